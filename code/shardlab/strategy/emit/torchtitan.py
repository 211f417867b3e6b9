"""A configuration of torchtitan, for 0.3.0: a Python module, which has taken the place of TOML.

torchtitan finds a function by the names of a module and of the function, takes the `Trainer.Config`
that it returns, and lets options of the command line change it. The function written here begins
with torchtitan's own Llama 3 8B and sets what the layout decides. Its fields have slots: a name
that torchtitan does not know is an error at once.
"""

from __future__ import annotations

from shardlab.shapes import Config

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
# Shapes that it has by name: layers, heads, hidden, width of the feed-forward network, tied.
FLAVORS = {
    "1B": (16, 32, 2048, 8192, True),
    "3B": (28, 24, 3072, 8192, True),
    "8B": (32, 32, 4096, 14_336, False),
    "70B": (80, 64, 8192, 28_672, False),
    "405B": (126, 128, 16_384, 53_248, False),
}


def write(target: Target) -> str:
    """The text of the module; ValueError for what torchtitan cannot do."""
    _check(target)
    named = flavor(target.config)
    lines = [
        '"""torchtitan\'s Llama 3, in a layout that was planned.',
        "",
        *target.title(),
        "",
        *(f"    {line}" for line in target.torchrun(LAUNCH)),
        "",
        "For torchtitan 0.3.0. What is not set here is that of its llama3_8b: optimizer, data,",
        "tokenizer, checkpoints; options behind the names change it, as --training.steps 100.",
        '"""',
        "",
        *_imports(target, named),
        "",
        "",
        *(_model(target) if named is None else []),
        "def planned() -> Trainer.Config:",
        '    """What `--config planned` takes."""',
        "    config = llama3_8b()",
        *_shape(target, named),
        "",
        *beside(_settings(target), indent=4),
        *_stages(target),
        "    return config",
    ]
    return "\n".join(lines) + "\n"


def flavor(config: Config) -> str | None:
    """The name under which torchtitan has this shape, or None."""
    shape = config.layers, config.heads, config.hidden, config.ffn_width, config.tied
    named = [name for name, has in FLAVORS.items() if has == shape]
    llama = config.vocab == 128_256 and config.key_value_heads == 8 and config.rotary_base == 5e5
    return named[0] if named and llama else None


def _imports(target: Target, named: str | None) -> list[str]:
    lines = []
    if named is None:
        lines += ["from functools import partial", "", "from torch import nn"]
        lines.append("from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm")
    if target.layout.recompute != "none":
        kind = "FullAC" if target.layout.recompute == "full" else "SelectiveAC"
        lines.insert(
            3 if named is None else 0,
            f"from torchtitan.distributed.activation_checkpoint import {kind}",
        )
    if named is None:
        lines += [
            "from torchtitan.models.llama3 import _build_llama3_layers, model_registry",
            "from torchtitan.models.llama3.config_registry import llama3_8b",
            "from torchtitan.models.llama3.model import Llama3Model",
        ]
    else:
        if named != "8B":
            lines.append("from torchtitan.models.llama3 import model_registry")
        lines.append("from torchtitan.models.llama3.config_registry import llama3_8b")
    return [*lines, "from torchtitan.trainer import Trainer"]


def _model(target: Target) -> list[str]:
    """The shape in torchtitan's terms, where it has no name for it."""
    c = target.config
    return [
        "def model() -> Llama3Model.Config:",
        '    """A shape that torchtitan has no name for, from the pieces of those that it has."""',
        f"    dim, vocab, draw = {c.hidden}, {c.vocab}, nn.init.trunc_normal_",
        "    return Llama3Model.Config(",
        "        dim=dim,",
        "        vocab_size=vocab,",
        f"        enable_weight_tying={c.tied},",
        "        tok_embeddings=Embedding.Config(",
        "            num_embeddings=vocab,",
        "            embedding_dim=dim,",
        '            param_init={"weight": partial(nn.init.normal_, std=0.02)},',
        "        ),",
        '        norm=RMSNorm.Config(normalized_shape=dim, param_init={"weight": nn.init.ones_}),',
        "        lm_head=Linear.Config(",
        "            in_features=dim,",
        "            out_features=vocab,",
        '            param_init={"weight": partial(draw, std=dim**-0.5)},',
        "        ),",
        "        layers=_build_llama3_layers(",
        f"            n_layers={c.layers},",
        "            dim=dim,",
        f"            n_heads={c.heads},",
        f"            n_kv_heads={c.key_value_heads},",
        f"            hidden_dim={c.ffn_width},",
        '            attn_backend="flex",',
        "            rope=ComplexRoPE.Config(",
        f"                dim={c.head_size},",
        f"                max_seq_len={max(c.seq, target.seq)},",
        f"                theta={c.rotary_base!r},",
        "            ),",
        "        ),",
        "    )",
        "",
        "",
    ]


def _shape(target: Target, named: str | None) -> list[str]:
    if named == "8B":
        return []
    if named is not None:
        return [f'    config.model_spec = model_registry("{named}")  # the shape that was planned']
    return [
        '    config.model_spec = model_registry("8B")',
        "    config.model_spec.model = model()  # the shape that was planned",
        f"    config.loss.loss_fn.global_vocab_size = {target.config.vocab}",
    ]


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
            else target.why_micro_batch(),
        ),
        (f"training.global_batch_size = {at.batch}", target.why_batch()),
        ('training.mixed_precision_param = "bfloat16"', target.why_half()),
        (f"parallelism.data_parallel_replicate_degree = {repeat}", groups),
        (f"parallelism.data_parallel_shard_degree = {at.dp // repeat}", target.why_zero()),
        (f"parallelism.tensor_parallel_degree = {at.tp}", target.why_tensor()),
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
        rows.append((f"parallelism.enable_sequence_parallel = {shared}", target.why_sequence()))
    if at.cp > 1:
        why = f"{at.cp} ranks share each sequence: its activations are too large for one"
        rows.append((f"parallelism.context_parallel_degree = {at.cp}", why))
    if at.pp > 1:
        name = SCHEDULES[at.schedule]
        rows += [
            (f"parallelism.pipeline_parallel_degree = {at.pp}", target.why_pipeline()),
            (f'parallelism.pipeline_parallel_schedule = "{name}"', target.why_microbatches()),
            (
                f"parallelism.pipeline_parallel_microbatch_size = {at.micro_batch}",
                target.why_micro_batch(),
            ),
        ]
    kinds = {"none": "None", "selective": "SelectiveAC.Config()", "full": "FullAC.Config()"}
    why = target.why_recompute()
    if at.recompute == "selective":
        why = "saves products and attention, computes the rest again: less than was planned for"
    rows.append((f"activation_checkpoint = {kinds[at.recompute]}", why))
    if at.offload == "parameters":
        why = "weights and optimizer in the host's memory: room, for time"
        rows.append(("training.enable_cpu_offload = True", why))
    if at.pp > 1 or at.offload == "parameters":
        why = "a captured step can neither send to a stage nor fetch from the host"
        rows.append(("training.disable_cuda_graphs = True", why))
    return [(f"config.{line}", why) for line, why in rows]


def _stages(target: Target) -> list[str]:
    if target.layout.pp == 1:
        return []
    parts = target.parts()
    return [
        "",
        "    # What each part holds; by itself torchtitan counts embedding and head as layers.",
        "    names, first = [], 0",
        f"    for layers in {tuple(parts)}:",
        '        names.append([f"layers.{i}" for i in range(first, first + layers)])',
        "        first += layers",
        '    names[0].insert(0, "tok_embeddings")',
        '    names[-1] += ["norm", "lm_head"]',
        "    config.parallelism.module_fqns_per_model_part = names",
    ]


def _check(target: Target) -> None:
    at, c = target.layout, target.config
    if (c.mlp, c.norm, c.bias) != ("swiglu", "rms", False):
        given = f"mlp={c.mlp!r}, norm={c.norm!r}, bias={c.bias}"
        why = "its Llama 3 has no others; nearest are fsdp2 and megatron"
        raise target.refusal(given, "are 'swiglu', 'rms' and False", why)
    if c.dropout:
        raise target.refusal(f"dropout={c.dropout}", "is 0.0", "its Llama 3 has none")
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
