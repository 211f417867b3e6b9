"""A configuration of torchtitan 0.3.0: a Python module, which replaced the TOML file.

torchtitan finds a function by the names of a module and of the function, takes the `Trainer.Config`
that it returns, and lets command-line options change it. The function written here begins with
torchtitan's own Llama 3 or Qwen3, and sets the fields that the layout decides. The configuration's
classes have slots, so that a field that torchtitan does not know raises an error at once.
"""

from __future__ import annotations

from .target import Row, Target, annotate_lines

FILE_NAME = "planned.py"
LAUNCH_ARGUMENTS = "-m torchtitan.train --module planned --config planned"
# torchtitan's names of schedules; 1F1B and GPipe have one part of the model on each stage.
SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zb-v": "ZBVZeroBubble",
}
# SelectiveAC saves the outputs of products and attention, and recomputes all operators between.
RECOMPUTE = {
    "none": None, "selective": "SelectiveAC", "norms+ffn": "SelectiveAC", "full": "FullAC",
}  # fmt: skip
# torchtitan's models, and the named shapes of each: layers, heads, hidden, width of the
# feed-forward network, tied.
FLAVORS = {
    "llama3": {
        "1B": (16, 32, 2048, 8192, True), "3B": (28, 24, 3072, 8192, True),
        "8B": (32, 32, 4096, 14_336, False), "70B": (80, 64, 8192, 28_672, False),
        "405B": (126, 128, 16_384, 53_248, False),
    },
    "qwen3": {
        "0.6B": (28, 16, 1024, 3072, True), "1.7B": (28, 16, 2048, 6144, True),
        "4B": (36, 32, 2560, 9728, True), "8B": (36, 32, 4096, 12_288, False),
        "14B": (40, 40, 5120, 17_408, False), "32B": (64, 64, 5120, 25_600, False),
    },
}  # fmt: skip
BASES = {"llama3": "8B", "qwen3": "14B"}  # flavors with a configuration, to begin with
_PARTS_TEMPLATE = """
    # Modules of each part; torchtitan's default counts embedding and head as layers.
    names, first = [], 0
    for layers in {parts}:
        names.append([f"layers.{{i}}" for i in range(first, first + layers)])
        first += layers
    names[0].insert(0, "tok_embeddings")
    names[-1] += ["norm", "lm_head"]
    config.parallelism.module_fqns_per_model_part = names"""


def render_file(target: Target) -> str:
    """Return the text of the module. Raises ValueError for features that torchtitan lacks."""
    _check_target(target)
    kind, (model, flavor) = RECOMPUTE[target.layout.recompute], _find_model(target)
    base = f"{model}_{BASES[model].lower()}"
    imports = {
        "torchtitan.distributed.activation_checkpoint": kind,
        f"torchtitan.models.{model}": flavor != BASES[model] and "model_registry",
        f"torchtitan.models.{model}.config_registry": base,
        "torchtitan.trainer": "Trainer",
    }
    lines = [
        f'"""torchtitan\'s {model} {flavor}, in a layout that was planned.',
        *["", *target.title_lines(), ""],
        *(f"    {line}" for line in target.torchrun_lines(LAUNCH_ARGUMENTS)),
        "",
        f"For torchtitan 0.3.0. All other settings are those of its {base}: optimizer, data,",
        "tokenizer, checkpoints; command-line options change them, as --training.steps 100.",
        *['"""', ""],
        *(f"from {module} import {name}" for module, name in imports.items() if name),
        *["", "", "def planned() -> Trainer.Config:"],
        '    """Return the configuration that `--config planned` names."""',
        f"    config = {base}()",
        *[f'    config.model_spec = model_registry("{flavor}")'] * (flavor != BASES[model]),
        "",
        *annotate_lines(_setting_rows(target), indent=4),
        *[_PARTS_TEMPLATE.format(parts=tuple(target.list_part_sizes()))] * (target.layout.pp > 1),
        *["    return config", ""],
    ]
    return "\n".join(lines)


def _find_model(target: Target) -> tuple[str, str]:
    """Return torchtitan's names of the model and its shape. Raises ValueError if it has none."""
    c = target.config
    model = "qwen3" if c.qk_norm else "llama3"
    wanted = (128_256, 5e5, 1e-5, 8, c.hidden // c.heads)
    if model == "qwen3":
        wanted = (151_936, 1e6, 1e-6, 8, 128)
    details = (c.vocab, c.rotary_base, c.norm_eps, c.key_value_heads, c.head_size)
    shape = (c.layers, c.heads, c.hidden, c.ffn_width, c.tied)
    for flavor, known in FLAVORS[model].items():
        if (shape, details) == (known, wanted):
            return model, flavor
    given = f"layers={c.layers}, hidden={c.hidden}, vocab={c.vocab}"
    raise target.make_error(given, f"be one of {model}'s {', '.join(FLAVORS[model])}")


def _setting_rows(target: Target) -> list[Row]:
    layout, why = target.layout, target.reasons
    repeat = layout.dp if layout.zero == 0 else layout.replicas
    groups = f"{repeat} groups, each with a whole model"
    if repeat == 1:
        groups = "one copy" if layout.dp == 1 else "one group of all copies"
    local, batch_reason = layout.micro_batch, why["micro_batch"]
    if layout.pp > 1:
        local *= layout.microbatches
        batch_reason = f"b·m = {layout.micro_batch} · {layout.microbatches}: a step's sequences"
    how, weights = ("always", "are gathered again") if layout.zero == 3 else ("never", "stay")
    kind, again = RECOMPUTE[layout.recompute], why["recompute"]
    if layout.recompute == "selective":
        again = "saves products and attention, recomputes the rest: needs less than planned"
    host = layout.offload == "parameters"
    rows = [
        (True, f"training.seq_len = {target.seq}", "tokens of a sequence"),
        (True, f"training.local_batch_size = {local}", batch_reason),
        (True, f"training.global_batch_size = {layout.global_batch}", why["batch"]),
        (True, 'training.mixed_precision_param = "bfloat16"', why["half"]),
        (True, f"parallelism.data_parallel_replicate_degree = {repeat}", groups),
        (True, f"parallelism.data_parallel_shard_degree = {layout.dp // repeat}", why["zero"]),
        (True, f"parallelism.tensor_parallel_degree = {layout.tp}", why["tensor"]),
        (layout.zero, f'parallelism.fsdp_reshard_after_forward = "{how}"',
         f"ZeRO-{layout.zero}: weights {weights} for backward"),
        (layout.tp > 1, f"parallelism.enable_sequence_parallel = {layout.sequence_parallel}",
         why["sequence"]),
        (layout.cp > 1, f"parallelism.context_parallel_degree = {layout.cp}",
         f"{layout.cp} ranks share each sequence: its activations are too large for one"),
        (layout.pp > 1, f"parallelism.pipeline_parallel_degree = {layout.pp}", why["pipeline"]),
        (layout.pp > 1,
         f'parallelism.pipeline_parallel_schedule = "{SCHEDULES.get(layout.schedule)}"',
         why["microbatches"]),
        (layout.pp > 1, f"parallelism.pipeline_parallel_microbatch_size = {layout.micro_batch}",
         why["micro_batch"]),
        (True, f"activation_checkpoint = {f'{kind}.Config()' if kind else None}", again),
        (host, "training.enable_cpu_offload = True",
         "weights and optimizer in host memory: less GPU memory, more time"),
        (True, "compile.enable = True", "fuses the operators between products"),
        (layout.pp > 1 or host, "training.disable_cuda_graphs = True",
         "a captured step cannot send to a stage or fetch from the host"),
    ]  # fmt: skip
    return [(when, f"config.{line}", reason) for when, line, reason in rows]


def _check_target(target: Target) -> None:
    layout, c = target.layout, target.config
    target.check_allowed(mlp=["swiglu"], norm=["rms"], bias=[False], dropout=[0.0])
    _find_model(target)
    if target.half_dtype != "bf16":
        raise target.make_error(f"machine={target.machine.name!r}", "have bf16")
    tokens = layout.tp if layout.sequence_parallel else 1
    tokens *= 2 * layout.cp if layout.cp > 1 else 1
    if target.seq % tokens:
        raise target.make_error(f"seq={target.seq}", f"be a multiple of {tokens}, its ranks")
    if c.vocab % layout.tp:
        raise target.make_error(f"vocab={c.vocab}", f"be a multiple of tp={layout.tp}")
    target.check_allowed(
        offload=["none", "parameters"]
    )  # torchtitan offloads weights with the optimizer
    # With a pipeline or accumulation, torchtitan decides what happens to gradients.
    if layout.pp > 1:  # a rank keeps whole gradients up to the last micro-batch
        target.check_allowed("pp > 1", schedule=list(SCHEDULES), zero=[0, 1], tied=[False])
    elif layout.microbatches > 1:  # each micro-batch reduce-scatters its gradients
        target.check_allowed("microbatches > 1", zero=[0, 2, 3])
    if layout.cp > 1:  # weights are sharded over context-parallel ranks as well
        target.check_allowed("cp > 1", zero=[1, 2, 3])
