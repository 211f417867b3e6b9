"""The arguments of Megatron-LM's pretrain_gpt.py, for Megatron Core 0.19.2, in a shell script.

ZeRO-1 is Megatron's distributed optimizer, ZeRO-2 and ZeRO-3 are Megatron-FSDP. Megatron pads the
vocabulary to a multiple of 128 t.
"""

from __future__ import annotations

from itertools import groupby

from .target import Row, Target, beside

FILE = "train_megatron.sh"
# GPUs without need of CUDA_DEVICE_MAX_CONNECTIONS=1 (arguments.py: compute capability 10 on).
BLACKWELL = "B200", "B300"
MODULES = {  # modules that Megatron can recompute, by the course's names
    "selective": ("--recompute-modules core_attn", "from queries and keys to their values"),
    "norms": ("--recompute-modules layernorm", "their outputs, where the products take them"),
}
SHARDING = {2: "optim_grads", 3: "optim_grads_params"}  # Megatron-FSDP's names for ZeRO-2 and 3


def write(target: Target) -> str:
    """Return the text of the script. Raises ValueError for features that Megatron lacks."""
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


def _layout(target: Target) -> list[Row]:
    at, why = target.layout, target.why
    parts = target.parts() if at.pp > 1 else []
    uneven, fsdp = _text(parts) if len(set(parts)) > 1 else "", at.zero > 1
    idle = f"; stages idle for {target.idle:.0f} % of it" if at.pp > 1 else ""
    dealt = f"{at.ep} {'copies' if at.etp is None else 'ranks'} deal out the experts"
    what, of_it = MODULES.get(at.recompute, ("", ""))
    full, some = at.recompute == "full", at.recompute in MODULES
    host = at.offload == "optimizer"
    return [
        (True, f"--tensor-model-parallel-size {at.tp}", why["tensor"]),
        (at.sequence_parallel and at.tp > 1, "--sequence-parallel", why["sequence"]),
        (True, f"--pipeline-model-parallel-size {at.pp}", why["pipeline"]),
        (uneven, f'--pipeline-model-parallel-layout "{uneven}"',
         "layers (t) of each part, with embedding (E) and head (L)"),
        (at.chunks > 1 and not uneven, f"--num-virtual-stages-per-pipeline-rank {at.chunks}",
         f"{at.chunks} parts of the model on each stage: a bubble {at.chunks} times as short"),
        (at.cp > 1, f"--context-parallel-size {at.cp}",
         f"{at.cp} ranks share each sequence: its activations are too large for one"),
        (at.ep > 1, f"--expert-model-parallel-size {at.ep}", f"{dealt}; tokens travel to them"),
        (at.ep > 1 and at.etp is not None, f"--expert-tensor-parallel-size {at.etp}",
         "ranks that share each matrix of an expert"),
        (at.ep > 1, "--moe-token-dispatcher-type alltoall", "each to its own, and back"),
        (True, f"--micro-batch-size {at.micro_batch}", why["micro_batch"]),
        (True, f"--global-batch-size {at.batch}", why["batch"] + idle),
        (at.zero, "--use-distributed-optimizer", why["zero"]),
        (fsdp, "--use-megatron-fsdp", f"ZeRO-{at.zero}: more than the optimizer is shared"),
        (fsdp, f"--data-parallel-sharding-strategy {SHARDING.get(at.zero)}", "which are these"),
        (fsdp, "--ckpt-format fsdp_dtensor", "the only one that Megatron-FSDP writes"),
        (at.zero or at.dp > 1, "--overlap-grad-reduce",
         "gradients leave in buckets, while backward goes on"),
        (at.zero, "--overlap-param-gather", "weights come for one bucket, while another computes"),
        (at.zero and at.replicas > 1, f"--num-distributed-optimizer-instances {at.replicas}",
         f"groups of {at.shards} ranks share; the groups repeat"),
        (host, "--optimizer-cpu-offload", "the optimizer's states are too large for the GPU"),
        (host, "--use-precision-aware-optimizer", "without it no optimizer goes to the host"),
        (some, "--recompute-granularity selective", why["recompute"]),
        (some, what, of_it),
        (full, "--recompute-granularity full", why["recompute"]),
        (full, "--recompute-method uniform", "all layers alike"),
        (full, "--recompute-num-layers 1", "one after another: the least is kept"),
        (True, f"--{target.half}", why["half"]),
    ]  # fmt: skip


def _text(parts: list[int]) -> str:
    """Return the layers of each part in Megatron's notation: Et*7|(t*8|)*14t*7L."""
    each = [f"t*{n}" if n else "" for n in parts]
    each[0], each[-1] = f"E{each[0]}", f"{each[-1]}L"
    runs = [(name, len(list(same))) for name, same in groupby(each)]
    text = "".join(f"({name}|)*{n}" if n > 1 else f"{name}|" for name, n in runs)
    return text[:-1]


def _shape(target: Target) -> list[Row]:
    c = target.config
    grouped = c.key_value_heads != c.heads
    return [
        (True, f"--num-layers {c.layers}", "one after another"),
        (True, f"--hidden-size {c.hidden}", "width of what goes from layer to layer"),
        (True, f"--ffn-hidden-size {c.ffn_width}", "width of the feed-forward network"),
        (True, f"--num-attention-heads {c.heads}", "heads of queries"),
        (grouped, "--group-query-attention", "several queries share a key and a value"),
        (grouped, f"--num-query-groups {c.key_value_heads}", "heads of keys and values"),
        (True, f"--seq-length {target.seq}", "tokens of a sequence"),
        (True, f"--max-position-embeddings {max(target.seq, c.seq)}",
         "the longest that there may be"),
        (True, "--position-embedding-type rope", "positions turn queries and keys"),
        (True, f"--rotary-base {int(c.rotary_base)}", "how slowly"),
        (True, f"--attention-dropout {c.dropout}", "by itself Megatron drops 0.1"),
        (True, f"--hidden-dropout {c.dropout}", "the same"),
        (c.mlp == "swiglu", "--swiglu", "gate, SiLU and product in the place of GELU"),
        (c.norm == "rms", "--normalization RMSNorm", "no mean is subtracted"),
        (c.norm_eps != 1e-5, f"--norm-epsilon {c.norm_eps}", "by itself Megatron adds 1e-5"),
        (not c.bias, "--disable-bias-linear", "matrices have no bias"),
        (not c.tied, "--untie-embeddings-and-output-weights", "the head is a matrix of its own"),
        (c.experts, f"--num-experts {c.experts}", "feed-forward networks of a layer"),
        (c.experts, f"--moe-router-topk {c.experts_per_token}", "of them for each token"),
        (c.experts, f"--moe-router-score-function {c.router}", "of what the router says"),
        (c.experts, f"--moe-ffn-hidden-size {c.expert_width}", "width of one"),
        (c.experts, "--moe-grouped-gemm", "all experts of a rank in one launch"),
    ]  # fmt: skip


def _own(target: Target) -> list[Row]:
    vocab, padded = target.config.vocab - 1, 128 * target.layout.tp
    return [
        (True, "--mock-data", "in the place of --data-path"),
        (True, "--tokenizer-type NullTokenizer", "in the place of your tokenizer"),
        (True, f"--vocab-size {vocab}", f"and an end of text; padded to a multiple of {padded}"),
        (True, "--train-iters 100", "steps"),
        (True, "--lr 3e-4", "largest learning rate"),
        (target.config.experts, "--moe-aux-loss-coeff 1e-2",
         "how much an uneven choice of experts costs"),
    ]  # fmt: skip


def _check(target: Target) -> None:
    at = target.layout
    target.allow(offload=["none", "optimizer"])
    if at.offload == "optimizer":  # only the distributed optimizer can be offloaded
        target.allow("offload='optimizer'", zero=[1])
    if at.pp > 1:  # Megatron-FSDP shards weights of whole models only
        target.allow("pp > 1", schedule=["1f1b", "interleaved"], zero=[0, 1])
    if at.pp > 1 and at.schedule == "interleaved" and at.microbatches % at.pp:
        allowed = f"are multiples of pp={at.pp} with schedule='interleaved'"
        raise target.refusal(f"microbatches={at.microbatches}", allowed)
