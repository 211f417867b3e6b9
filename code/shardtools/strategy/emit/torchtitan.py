"""A configuration of torchtitan, for 0.3.0: a Python module, which has taken the place of TOML.

torchtitan finds a function by the names of a module and of the function, takes the `Trainer.Config`
that it returns, and lets options of the command line change it. The function written here begins
with torchtitan's own Llama 3 and sets what the layout decides. Its fields have slots: a name
that torchtitan does not know is an error at once.
"""

from __future__ import annotations

from shardlab.common.shapes import Config

from .target import Target, beside

FILE = "planned.py"
LAUNCH = "-m torchtitan.train --module planned --config planned"
# torchtitan's names for schedules; 1F1B and GPipe have one part of the model on each stage.
SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zb-v": "ZBVZeroBubble",
}
# Its selective one keeps products and attention, and computes again what lies between.
RECOMPUTE = {
    "none": None, "selective": "SelectiveAC", "norms+ffn": "SelectiveAC", "full": "FullAC",
}  # fmt: skip
# Shapes that it has by name: layers, heads, hidden, width of the feed-forward network, tied.
FLAVORS = {
    "1B": (16, 32, 2048, 8192, True),
    "3B": (28, 24, 3072, 8192, True),
    "8B": (32, 32, 4096, 14_336, False),
    "70B": (80, 64, 8192, 28_672, False),
    "405B": (126, 128, 16_384, 53_248, False),
}
_PARTS = """
    # What each part holds; by itself torchtitan counts embedding and head as layers.
    names, first = [], 0
    for layers in {parts}:
        names.append([f"layers.{{i}}" for i in range(first, first + layers)])
        first += layers
    names[0].insert(0, "tok_embeddings")
    names[-1] += ["norm", "lm_head"]
    config.parallelism.module_fqns_per_model_part = names"""


def write(target: Target) -> str:
    """The text of the module; ValueError for what torchtitan cannot do."""
    _check(target)
    kind, named = RECOMPUTE[target.layout.recompute], flavor(target.config)
    imports = {
        "torchtitan.distributed.activation_checkpoint": kind,
        "torchtitan.models.llama3": named != "8B" and "model_registry",
        "torchtitan.models.llama3.config_registry": "llama3_8b",
        "torchtitan.trainer": "Trainer",
    }
    lines = [
        '"""torchtitan\'s Llama 3, in a layout that was planned.',
        *["", *target.title(), ""],
        *(f"    {line}" for line in target.torchrun(LAUNCH)),
        "",
        "For torchtitan 0.3.0. What is not set here is that of its llama3_8b: optimizer, data,",
        "tokenizer, checkpoints; options behind the names change it, as --training.steps 100.",
        *['"""', ""],
        *(f"from {module} import {name}" for module, name in imports.items() if name),
        *["", "", "def planned() -> Trainer.Config:"],
        '    """Return the configuration that `--config planned` names."""',
        "    config = llama3_8b()",
        *[f'    config.model_spec = model_registry("{named}")'] * (named != "8B"),
        "",
        *beside(_settings(target), indent=4),
        *[_PARTS.format(parts=tuple(target.parts()))] * (target.layout.pp > 1),
        *["    return config", ""],
    ]
    return "\n".join(lines)


def flavor(config: Config) -> str | None:
    """Return torchtitan's name of this shape, or None."""
    shape = config.layers, config.heads, config.hidden, config.ffn_width, config.tied
    named = [name for name, has in FLAVORS.items() if has == shape]
    llama = config.vocab == 128_256 and config.key_value_heads == 8 and config.rotary_base == 5e5
    return named[0] if named and llama else None


def _settings(target: Target) -> list[tuple[str, str]]:
    at = target.layout
    repeat = at.dp if at.zero == 0 else at.replicas
    groups = f"{repeat} groups, each with the whole model"
    if repeat == 1:
        groups = "one copy" if at.dp == 1 else "one group of all copies"
    local = at.micro_batch * (at.microbatches if at.pp > 1 else 1)
    rows = [
        (f"training.seq_len = {target.seq}", "tokens of a sequence"),
        (
            f"training.local_batch_size = {local}",
            f"b·m = {at.micro_batch} · {at.microbatches}: a pipeline takes a step's at once"
            if at.pp > 1
            else target.why["micro_batch"],
        ),
        (f"training.global_batch_size = {at.batch}", target.why["batch"]),
        ('training.mixed_precision_param = "bfloat16"', target.why["half"]),
        (f"parallelism.data_parallel_replicate_degree = {repeat}", groups),
        (f"parallelism.data_parallel_shard_degree = {at.dp // repeat}", target.why["zero"]),
        (f"parallelism.tensor_parallel_degree = {at.tp}", target.why["tensor"]),
    ]
    if at.zero:
        how = "always" if at.zero == 3 else "never"
        why = "weights leave, and come again" if at.zero == 3 else "weights stay"
        rows.append(
            (
                f'parallelism.fsdp_reshard_after_forward = "{how}"',
                f"ZeRO-{at.zero}: {why} for backward",
            )
        )
    if at.tp > 1:
        shared = at.sequence_parallel
        rows.append((f"parallelism.enable_sequence_parallel = {shared}", target.why["sequence"]))
    if at.cp > 1:
        why = f"{at.cp} ranks share each sequence: its activations are too large for one"
        rows.append((f"parallelism.context_parallel_degree = {at.cp}", why))
    if at.pp > 1:
        name = SCHEDULES[at.schedule]
        rows += [
            (f"parallelism.pipeline_parallel_degree = {at.pp}", target.why["pipeline"]),
            (f'parallelism.pipeline_parallel_schedule = "{name}"', target.why["microbatches"]),
            (
                f"parallelism.pipeline_parallel_microbatch_size = {at.micro_batch}",
                target.why["micro_batch"],
            ),
        ]
    kind = RECOMPUTE[at.recompute]
    saved = f"{kind}.Config()" if kind else "None"
    why = target.why["recompute"]
    if at.recompute == "selective":
        why = "saves products and attention, computes the rest again: less than was planned for"
    rows.append((f"activation_checkpoint = {saved}", why))
    if at.offload == "parameters":
        why = "weights and optimizer in the host's memory: room, for time"
        rows.append(("training.enable_cpu_offload = True", why))
    rows.append(("compile.enable = True", "kernels of its own for what lies between products"))
    if at.pp > 1 or at.offload == "parameters":
        why = "a captured step can neither send to a stage nor fetch from the host"
        rows.append(("training.disable_cuda_graphs = True", why))
    return [(f"config.{line}", why) for line, why in rows]


def _check(target: Target) -> None:
    at, c = target.layout, target.config
    if (c.mlp, c.norm, c.bias) != ("swiglu", "rms", False):
        given = f"mlp={c.mlp!r}, norm={c.norm!r}, bias={c.bias}"
        why = "its Llama 3 has no others; nearest is megatron"
        raise target.refusal(given, "are 'swiglu', 'rms' and False", why)
    if c.dropout:
        raise target.refusal(f"dropout={c.dropout}", "is 0.0", "its Llama 3 has none")
    if flavor(c) is None:
        given = f"layers={c.layers}, hidden={c.hidden}, vocab={c.vocab}"
        raise target.refusal(given, f"are Llama 3's {', '.join(FLAVORS)}", "nearest is megatron")
    if target.half != "bf16":
        why = "it has no fp16; nearest are deepspeed and megatron"
        raise target.refusal(f"machine={target.machine.name!r}", "are GPUs with bf16", why)
    tokens = (at.tp if at.sequence_parallel else 1) * (2 * at.cp if at.cp > 1 else 1)
    if target.seq % tokens:
        raise target.refusal(f"seq={target.seq}", f"are multiples of {tokens}", "ranks share it")
    if at.offload == "optimizer":
        why = "its offload takes weights along; nearest is 'parameters', with zero=3"
        raise target.refusal("offload='optimizer'", "are 'none' and 'parameters'", why)
    target.check_vocab()
    _check_zero(target)
    if at.pp > 1 and at.schedule not in SCHEDULES:
        names = ", ".join(repr(name) for name in SCHEDULES)
        raise target.refusal(f"schedule={at.schedule!r}", f"are {names}", "nearest is '1f1b'")


def _check_zero(target: Target) -> None:
    """What a pipeline and gradient accumulation do with gradients is not the layout's to choose."""
    at = target.layout
    if at.zero == 0 and at.cp > 1:
        why = "ranks that share a sequence share the weights as well; nearest is 2"
        raise target.refusal("zero=0", f"with cp={at.cp} are 2 and 3", why)
    if at.pp > 1 and at.zero > 1:
        why = "a pipeline keeps whole gradients up to the last micro-batch; nearest is 1"
        raise target.refusal(f"zero={at.zero}", f"with pp={at.pp} are 0 and 1", why)
    if at.pp == 1 and at.zero == 1 and at.microbatches > 1:
        why = "it sends gradients for each micro-batch, and keeps a share; nearest is 2"
        raise target.refusal("zero=1", f"with microbatches={at.microbatches} are 0, 2 and 3", why)
