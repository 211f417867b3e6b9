"""The arguments of Megatron-LM's pretrain_gpt.py, for Megatron Core 0.19.2, in a shell script.

ZeRO-1 is Megatron's distributed optimizer, ZeRO-2 and ZeRO-3 are Megatron-FSDP. Megatron pads the
vocabulary to a multiple of 128 t.
"""

from __future__ import annotations

from itertools import groupby

from .target import Row, Target, annotate_lines

FILE_NAME = "train_megatron.sh"
# GPUs without need of CUDA_DEVICE_MAX_CONNECTIONS=1 (arguments.py: compute capability 10 on).
BLACKWELL = "B200", "B300"
RECOMPUTE_MODULES = {  # modules that Megatron can recompute, by the course's names
    "selective": ("--recompute-modules core_attn", "from queries and keys to their values"),
    "norms": ("--recompute-modules layernorm", "their outputs, where the products take them"),
}
# Megatron-FSDP's names for ZeRO-2 and 3.
FSDP_STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}


def render_file(target: Target) -> str:
    """Return the text of the script. Raises ValueError for features that Megatron lacks."""
    _check_target(target)
    n = target.ranks_per_node
    launch = [f"torchrun --nproc-per-node={n}"]
    if target.nodes > 1:
        launch.append(f"--nnodes={target.nodes} --rdzv-backend=c10d")
        launch.append('--rdzv-endpoint="${HOST:?the first node}:${PORT:-29400}"')
    launch += ['"${MEGATRON:+$MEGATRON/}pretrain_gpt.py"', '"${arguments[@]}" "$@"']
    lines = [
        "#!/bin/bash",
        *(f"# {line}" for line in target.title_lines()),
        "# For Megatron Core 0.19.2, in the folder with its pretrain_gpt.py, or with that folder",
        "# as MEGATRON, on each node:",
        f"#   {'HOST=FIRST_NODE ' if target.nodes > 1 else ''}bash {FILE_NAME} MORE ARGUMENTS",
        "set -euo pipefail",
        "",
        *_environment_lines(target),
        "arguments=(",
        "    # The layout",
        *annotate_lines(_layout_rows(target), indent=4),
        "",
        "    # The shape",
        *annotate_lines(_shape_rows(target), indent=4),
        "",
        "    # No layout decides these: replace them with your own",
        *annotate_lines(_placeholder_rows(target), indent=4),
        ")",
        " \\\n    ".join([f"exec {launch[0]}", *launch[1:-2], " ".join(launch[-2:])]),
        "",
    ]
    return "\n".join(lines)


def _environment_lines(target: Target) -> list[str]:
    layout = target.layout
    if layout.zero > 1:
        return ["unset CUDA_DEVICE_MAX_CONNECTIONS  # so that Megatron-FSDP can overlap", ""]
    blackwell = any(name in target.machine.name.upper() for name in BLACKWELL)
    if (layout.tp > 1 or layout.cp > 1) and not blackwell:
        line = "export CUDA_DEVICE_MAX_CONNECTIONS=1"
        return [f"{line}  # all-reduces start before products; not needed from Blackwell on", ""]
    return []


def _layout_rows(target: Target) -> list[Row]:
    layout, why = target.layout, target.reasons
    parts = target.list_part_sizes() if layout.pp > 1 else []
    uneven, fsdp = _format_stages(parts) if len(set(parts)) > 1 else "", layout.zero > 1
    idle = f"; stages idle for {target.idle_percent:.0f} % of it" if layout.pp > 1 else ""
    ranks = "copies" if layout.etp is None else "ranks"
    modules, scope = RECOMPUTE_MODULES.get(layout.recompute, ("", ""))
    full, some = layout.recompute == "full", layout.recompute in RECOMPUTE_MODULES
    host, chunks = layout.offload == "optimizer", layout.chunks
    return [
        (True, f"--tensor-model-parallel-size {layout.tp}", why["tensor"]),
        (layout.sequence_parallel and layout.tp > 1, "--sequence-parallel", why["sequence"]),
        (True, f"--pipeline-model-parallel-size {layout.pp}", why["pipeline"]),
        (uneven, f'--pipeline-model-parallel-layout "{uneven}"',
         "layers (t) of each part, with embedding (E) and head (L)"),
        (chunks > 1 and not uneven, f"--num-virtual-stages-per-pipeline-rank {chunks}",
         f"{chunks} parts of the model on each stage: a bubble {chunks} times as short"),
        (layout.cp > 1, f"--context-parallel-size {layout.cp}",
         f"{layout.cp} ranks share each sequence: its activations are too large for one"),
        (layout.ep > 1, f"--expert-model-parallel-size {layout.ep}", f"{ranks} of the experts"),
        (layout.ep > 1 and layout.etp is not None, f"--expert-tensor-parallel-size {layout.etp}",
         "ranks that share each matrix of an expert"),
        (layout.ep > 1, "--moe-token-dispatcher-type alltoall", "tokens to experts, and back"),
        (True, f"--micro-batch-size {layout.micro_batch}", why["micro_batch"]),
        (True, f"--global-batch-size {layout.global_batch}", why["batch"] + idle),
        (layout.zero, "--use-distributed-optimizer", why["zero"]),
        (fsdp, "--use-megatron-fsdp", f"ZeRO-{layout.zero}: shards more than the optimizer"),
        (fsdp, f"--data-parallel-sharding-strategy {FSDP_STRATEGIES.get(layout.zero)}", ""),
        (fsdp, "--ckpt-format fsdp_dtensor", "the only one that Megatron-FSDP writes"),
        (layout.zero or layout.dp > 1, "--overlap-grad-reduce", "reduce buckets during backward"),
        (layout.zero, "--overlap-param-gather", "weights are gathered in buckets during forward"),
        (layout.zero and layout.replicas > 1,
         f"--num-distributed-optimizer-instances {layout.replicas}",
         f"shards over groups of {layout.zero_degree} ranks"),
        (host, "--optimizer-cpu-offload", "the optimizer's states are too large for the GPU"),
        (host, "--use-precision-aware-optimizer", "required for the offload"),
        (some, "--recompute-granularity selective", why["recompute"]),
        (some, modules, scope),
        (full, "--recompute-granularity full", why["recompute"]),
        (full, "--recompute-method uniform", "all layers alike"),
        (full, "--recompute-num-layers 1", "one at a time: fewest saved activations"),
        (True, f"--{target.half_dtype}", why["half"]),
    ]  # fmt: skip


def _format_stages(parts: list[int]) -> str:
    """Return the layers of each part in Megatron's notation: Et*7|(t*8|)*14t*7L."""
    each = [f"t*{n}" if n else "" for n in parts]
    each[0], each[-1] = f"E{each[0]}", f"{each[-1]}L"
    runs = [(name, len(list(same))) for name, same in groupby(each)]
    text = "".join(f"({name}|)*{n}" if n > 1 else f"{name}|" for name, n in runs)
    return text[:-1]


def _shape_rows(target: Target) -> list[Row]:
    c = target.config
    grouped = c.key_value_heads != c.heads
    return [
        (True, f"--num-layers {c.layers}", "of the model"),
        (True, f"--hidden-size {c.hidden}", "width of the residual stream"),
        (True, f"--ffn-hidden-size {c.ffn_width}", "width of the feed-forward network"),
        (True, f"--num-attention-heads {c.heads}", "heads of queries"),
        (grouped, "--group-query-attention", "several queries share a key and a value"),
        (grouped, f"--num-query-groups {c.key_value_heads}", "heads of keys and values"),
        (c.head_size * c.heads != c.hidden, f"--kv-channels {c.head_size}", "width of a head"),
        (c.qk_norm, "--qk-layernorm", "the same norm on each head's queries and keys"),
        (True, f"--seq-length {target.seq}", "tokens of a sequence"),
        (True, f"--max-position-embeddings {max(target.seq, c.seq)}", "longest sequence"),
        (True, "--position-embedding-type rope", "rotary positions"),
        (True, f"--rotary-base {int(c.rotary_base)}", "base of their frequencies"),
        (True, f"--attention-dropout {c.dropout}", "Megatron's default is 0.1"),
        (True, f"--hidden-dropout {c.dropout}", "the same"),
        (c.mlp == "swiglu", "--swiglu", "in place of GELU"),
        (c.norm == "rms", "--normalization RMSNorm", "in place of LayerNorm"),
        (c.norm_eps != 1e-5, f"--norm-epsilon {c.norm_eps}", "Megatron's default is 1e-5"),
        (not c.bias, "--disable-bias-linear", "matrices have no bias"),
        (not c.tied, "--untie-embeddings-and-output-weights", "the head has a matrix of its own"),
        (c.experts, f"--num-experts {c.experts}", "feed-forward networks of a layer"),
        (c.experts, f"--moe-router-topk {c.experts_per_token}", "experts for each token"),
        (c.experts, f"--moe-router-score-function {c.router}", "of the router's logits"),
        (c.experts, f"--moe-ffn-hidden-size {c.expert_width}", "width of an expert"),
        (c.experts, "--moe-grouped-gemm", "all experts of a rank in one launch"),
    ]  # fmt: skip


def _placeholder_rows(target: Target) -> list[Row]:
    vocab, padded = target.config.vocab - 1, 128 * target.layout.tp
    return [
        (True, "--mock-data", "in place of --data-path"),
        (True, "--tokenizer-type NullTokenizer", "in place of your tokenizer"),
        (True, f"--vocab-size {vocab}", f"and an end of text; padded to a multiple of {padded}"),
        (True, "--train-iters 100", "steps"),
        (True, "--lr 3e-4", "largest learning rate"),
        (target.config.experts, "--moe-aux-loss-coeff 1e-2", "weight of the load-balancing loss"),
    ]  # fmt: skip


def _check_target(target: Target) -> None:
    layout = target.layout
    target.check_allowed(offload=["none", "optimizer"])
    if layout.offload == "optimizer":  # only the distributed optimizer can be offloaded
        target.check_allowed("offload='optimizer'", zero=[1])
    if layout.pp > 1:  # Megatron-FSDP shards weights of whole models only
        target.check_allowed("pp > 1", schedule=["1f1b", "interleaved"], zero=[0, 1])
    if layout.pp > 1 and layout.schedule == "interleaved" and layout.microbatches % layout.pp:
        given, rule = f"microbatches={layout.microbatches}", f"be a multiple of pp={layout.pp}"
        raise target.make_error(given, rule, "schedule='interleaved'")
