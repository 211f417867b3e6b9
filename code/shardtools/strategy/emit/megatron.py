"""The arguments of Megatron-LM's pretrain_gpt.py, for Megatron Core 0.19.2, in a shell script.

ZeRO-1 is Megatron's distributed optimizer, ZeRO-2 and ZeRO-3 are Megatron-FSDP. Megatron pads the
vocabulary to a multiple of 128 t.
"""

from __future__ import annotations

from itertools import groupby

from .target import Target, beside

FILE = "train_megatron.sh"
# GPUs on which sums start in time by themselves: its arguments.py asks for compute capability 10.
BLACKWELL = "B200", "B300"
MODULES = {  # that it can compute again, by our words
    "selective": ("--recompute-modules core_attn", "from queries and keys to their values"),
    "norms": ("--recompute-modules layernorm", "their outputs, where the products take them"),
}
SHARDING = {2: "optim_grads", 3: "optim_grads_params"}  # of Megatron-FSDP


def write(target: Target) -> str:
    """The text of the script; ValueError for what Megatron cannot do."""
    _check(target)
    n = target.ranks_of_node
    launch = [f"torchrun --nproc-per-node={n}"]
    if target.nodes > 1:
        launch.append(f"--nnodes={target.nodes} --rdzv-backend=c10d")
        launch.append('--rdzv-endpoint="${HOST:?the first node}:${PORT:-29400}"')
    launch += ['"${MEGATRON:+$MEGATRON/}pretrain_gpt.py"', '"${arguments[@]}" "$@"']
    lines = [
        "#!/bin/bash",
        *(f"# {line}" for line in target.title()),
        "# For Megatron Core 0.19.2, in the folder with its pretrain_gpt.py, or with that folder",
        "# as MEGATRON, on each node:",
        f"#   {'HOST=FIRST_NODE ' if target.nodes > 1 else ''}bash {FILE} MORE ARGUMENTS",
        "set -euo pipefail",
        "",
        *_environment(target),
        "arguments=(",
        "    # The layout",
        *beside(_layout(target), indent=4),
        "",
        "    # The shape",
        *beside(_shape(target), indent=4),
        "",
        "    # No layout decides these: put your own",
        *beside(_own(target), indent=4),
        ")",
        " \\\n    ".join([f"exec {launch[0]}", *launch[1:-2], " ".join(launch[-2:])]),
        "",
    ]
    return "\n".join(lines)


def _environment(target: Target) -> list[str]:
    at = target.layout
    if at.zero > 1:
        return ["unset CUDA_DEVICE_MAX_CONNECTIONS  # Megatron-FSDP sends beside the products", ""]
    blackwell = any(name in target.machine.name.upper() for name in BLACKWELL)
    if (at.tp > 1 or at.cp > 1) and not blackwell:
        line = "export CUDA_DEVICE_MAX_CONNECTIONS=1"
        return [f"{line}  # sums start before products; before Blackwell alone", ""]
    return []


def _layout(target: Target) -> list[tuple[str, str]]:
    at = target.layout
    rows = [(f"--tensor-model-parallel-size {at.tp}", target.why["tensor"])]
    if at.sequence_parallel and at.tp > 1:
        rows.append(("--sequence-parallel", target.why["sequence"]))
    rows.append((f"--pipeline-model-parallel-size {at.pp}", target.why["pipeline"]))
    rows += _stages(target)
    if at.cp > 1:
        why = f"{at.cp} ranks share each sequence: its activations are too large for one"
        rows.append((f"--context-parallel-size {at.cp}", why))
    if at.ep > 1:
        why = f"{at.ep} {'copies' if at.etp is None else 'ranks'} deal out the experts"
        rows.append((f"--expert-model-parallel-size {at.ep}", f"{why}; tokens travel to them"))
        if at.etp is not None:
            why = "ranks that share each matrix of an expert"
            rows.append((f"--expert-tensor-parallel-size {at.etp}", why))
        rows.append(("--moe-token-dispatcher-type alltoall", "each to its own, and back"))
    idle = f"; stages idle for {target.idle:.0f} % of it" if at.pp > 1 else ""
    rows += [
        (f"--micro-batch-size {at.micro_batch}", target.why["micro_batch"]),
        (f"--global-batch-size {at.batch}", target.why["batch"] + idle),
        *_copies(target),
        *_recompute(target),
        (f"--{target.half}", target.why["half"]),
    ]
    return rows


def _stages(target: Target) -> list[tuple[str, str]]:
    at = target.layout
    if at.pp == 1:
        return []
    rows = []
    parts = target.parts()
    if len(set(parts)) > 1:
        why = "layers (t) of each part, with embedding (E) and head (L)"
        rows.append((f'--pipeline-model-parallel-layout "{_text(parts)}"', why))
    elif at.chunks > 1:
        why = f"{at.chunks} parts of the model on each stage: a bubble {at.chunks} times as short"
        rows.append((f"--num-virtual-stages-per-pipeline-rank {at.chunks}", why))
    return rows


def _text(parts: list[int]) -> str:
    """Layers of each part, as Megatron writes them: Et*7|(t*8|)*14t*7L."""
    each = [f"t*{n}" if n else "" for n in parts]
    each[0], each[-1] = f"E{each[0]}", f"{each[-1]}L"
    runs = [(name, len(list(same))) for name, same in groupby(each)]
    text = "".join(f"({name}|)*{n}" if n > 1 else f"{name}|" for name, n in runs)
    return text[:-1]


def _copies(target: Target) -> list[tuple[str, str]]:
    at = target.layout
    overlap = ("--overlap-grad-reduce", "gradients leave in buckets, while backward goes on")
    gather = ("--overlap-param-gather", "weights come for one bucket, while another computes")
    if at.zero == 0:
        return [overlap] if at.dp > 1 else []
    rows = [("--use-distributed-optimizer", target.why["zero"])]
    if at.zero > 1:
        rows += [
            ("--use-megatron-fsdp", f"ZeRO-{at.zero}: more than the optimizer is shared"),
            (f"--data-parallel-sharding-strategy {SHARDING[at.zero]}", "which are these"),
            ("--ckpt-format fsdp_dtensor", "the only one that Megatron-FSDP writes"),
        ]
    rows += [overlap, gather]
    if at.replicas > 1:
        why = f"groups of {at.shards} ranks share; the groups repeat"
        rows.append((f"--num-distributed-optimizer-instances {at.replicas}", why))
    if at.offload == "optimizer":
        rows += [
            ("--optimizer-cpu-offload", "the optimizer's states are too large for the GPU"),
            ("--use-precision-aware-optimizer", "without it no optimizer goes to the host"),
        ]
    return rows


def _recompute(target: Target) -> list[tuple[str, str]]:
    how = target.layout.recompute
    if how == "none":
        return []
    if how in MODULES:
        rows = [("--recompute-granularity selective", target.why["recompute"])]
        return [*rows, MODULES[how]]
    return [
        ("--recompute-granularity full", target.why["recompute"]),
        ("--recompute-method uniform", "all layers alike"),
        ("--recompute-num-layers 1", "one after another: the least is kept"),
    ]


def _shape(target: Target) -> list[tuple[str, str]]:
    c = target.config
    rows = [
        (f"--num-layers {c.layers}", "one after another"),
        (f"--hidden-size {c.hidden}", "width of what goes from layer to layer"),
        (f"--ffn-hidden-size {c.ffn_width}", "width of the feed-forward network"),
        (f"--num-attention-heads {c.heads}", "heads of queries"),
    ]
    if c.key_value_heads != c.heads:
        rows.append(("--group-query-attention", "several queries share a key and a value"))
        rows.append((f"--num-query-groups {c.key_value_heads}", "heads of keys and values"))
    rows += [
        (f"--seq-length {target.seq}", "tokens of a sequence"),
        (f"--max-position-embeddings {max(target.seq, c.seq)}", "the longest that there may be"),
        ("--position-embedding-type rope", "positions turn queries and keys"),
        (f"--rotary-base {int(c.rotary_base)}", "how slowly"),
        (f"--attention-dropout {c.dropout}", "by itself Megatron drops 0.1"),
        (f"--hidden-dropout {c.dropout}", "the same"),
    ]
    if c.mlp == "swiglu":
        rows.append(("--swiglu", "gate, SiLU and product in the place of GELU"))
    if c.norm == "rms":
        rows.append(("--normalization RMSNorm", "no mean is subtracted"))
    if c.norm_eps != 1e-5:
        rows.append((f"--norm-epsilon {c.norm_eps}", "by itself Megatron adds 1e-5"))
    if not c.bias:
        rows.append(("--disable-bias-linear", "matrices have no bias"))
    if not c.tied:
        rows.append(("--untie-embeddings-and-output-weights", "the head is a matrix of its own"))
    return rows + _experts(target)


def _experts(target: Target) -> list[tuple[str, str]]:
    c = target.config
    if not c.experts:
        return []
    rows = [
        (f"--num-experts {c.experts}", "feed-forward networks of a layer"),
        (f"--moe-router-topk {c.experts_per_token}", "of them for each token"),
        (f"--moe-router-score-function {c.router}", "of what the router says"),
        (f"--moe-ffn-hidden-size {c.expert_width}", "width of one"),
        ("--moe-grouped-gemm", "all experts of a rank in one launch"),
    ]
    return rows


def _own(target: Target) -> list[tuple[str, str]]:
    padded = 128 * target.layout.tp
    balance = []
    if target.config.experts:
        balance = [("--moe-aux-loss-coeff 1e-2", "how much an uneven choice of experts costs")]
    return [
        ("--mock-data", "in the place of --data-path"),
        ("--tokenizer-type NullTokenizer", "in the place of your tokenizer"),
        (
            f"--vocab-size {target.config.vocab - 1}",
            f"and an end of text; padded to a multiple of {padded}",
        ),
        ("--train-iters 100", "steps"),
        ("--lr 3e-4", "largest learning rate"),
        *balance,
    ]


def _check(target: Target) -> None:
    at = target.layout
    if at.pp > 1 and at.schedule not in ("1f1b", "interleaved"):
        why = "nearest is '1f1b'"
        raise target.refusal(f"schedule={at.schedule!r}", "are '1f1b' and 'interleaved'", why)
    if at.pp > 1 and at.zero > 1:
        why = "Megatron-FSDP shares weights between copies of whole models; nearest is 1"
        raise target.refusal(f"zero={at.zero}", f"with pp={at.pp} are 0 and 1", why)
    if at.schedule == "interleaved" and at.pp > 1 and at.microbatches % at.pp:
        allowed = f"with schedule='interleaved' are multiples of pp={at.pp}"
        raise target.refusal(f"microbatches={at.microbatches}", allowed)
    if at.offload == "parameters":
        why = "it keeps no weights on the host; nearest is 'optimizer'"
        raise target.refusal("offload='parameters'", "are 'none' and 'optimizer'", why)
    if at.offload == "optimizer" and at.zero != 1:
        why = "the distributed optimizer alone goes to the host"
        raise target.refusal(f"zero={at.zero}", "with offload='optimizer' is 1", why)
