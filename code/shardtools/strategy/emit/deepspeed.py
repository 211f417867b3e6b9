"""DeepSpeed's configuration, for 0.19.8: JSON with comments.

DeepSpeed reads a named file with Hjson, a JSON that allows comments:
`deepspeed.initialize(model=model, config="ds_config.json")`, or `--deepspeed_config`. Programs that
read the file themselves, such as Hugging Face's Trainer, need plain JSON: delete the lines that
begin with //.

DeepSpeed takes these from the program, not from this file: the model and its division into stages,
recomputation, the optimizer.
"""

from __future__ import annotations

import json
from typing import Any

from .target import Target

FILE_NAME = "ds_config.json"

# Names of the course's plain GPT: column-parallel matrices, then row-parallel ones, whose outputs
# are all-reduced. `deepspeed_engine.core.COURSE_TP_PLAN` is the same.
TENSOR_PLAN = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.(query|key|value|up|gate)\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.(out|down)\.weight$"], "partition_type": "row"},
    ],
}


def render_file(target: Target) -> str:
    """Return the text of the file. Raises ValueError for features that DeepSpeed lacks."""
    _check_target(target)
    head = [
        *target.title_lines(),
        "For DeepSpeed 0.19.8, which reads these comments; initialize(config='ds_config.json').",
        *target.torchrun_lines("YOUR_PROGRAM.py"),
    ]
    lines = [*(f"// {line}" for line in head), "{"]
    for when, key, value, why in _setting_rows(target):
        if when:
            lines += ["", *(f"  // {line}" for line in why.splitlines())]
            text = json.dumps(value, indent=2).replace("\n", "\n  ")
            lines.append(f"  {json.dumps(key)}: {text},")
    lines[-1] = lines[-1][:-1]
    del lines[len(head) + 1]  # the empty line behind the bracket
    return "\n".join([*lines, "}", ""])


def _setting_rows(target: Target) -> list[tuple[bool, str, Any, str]]:
    layout, why = target.layout, target.reasons
    host, full = layout.offload != "none", layout.recompute == "full"
    zero: dict[str, Any] = {"stage": layout.zero}
    pipeline: dict[str, Any] = {"stages": layout.pp}
    sharing, cutting = f"ZeRO-{layout.zero}: {why['zero']}", f"p: {why['pipeline']}."
    if host:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        sharing += "\nThe optimizer stays and steps in host memory: less GPU memory, more time."
    if layout.offload == "parameters":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
        sharing += "\nWeights stay there, too, and are fetched for the layer that needs them."
    if layout.pp > 1:
        cutting += (
            f"\nThe program cuts: PipelineModule(layers, num_stages={layout.pp}, "
            'partition_method="type:Block"),\n'
            f"with the layers' class, Block, gives {target.list_part_sizes()[0]} to each stage."
        )
    if layout.pp > 1 and full:  # re-entrant would leave the embedding without gradient
        pipeline.update(activation_checkpoint_interval=1, use_reentrant=False)
        cutting += f"\nAnd {why['recompute']}."
    tensor = (
        f"t: {why['tensor']}.\n"
        "The patterns are names of the course's GPT; for a model of Hugging Face, its preset\n"
        'instead: "preset_model": "llama". Embedding and head stay whole on each rank.'
    )
    what = "each layer" if full else "attention's core"
    again = (
        f"{why['recompute']}.\n".capitalize()
        + "These are settings only: the program has to call deepspeed.checkpointing.checkpoint\n"
        f"on {what}; for the course's GPT, "
        "shardlab.deepspeed_engine.enable_recompute on each layer."
    )
    return [
        (True, "train_micro_batch_size_per_gpu", layout.micro_batch, f"b: {why['micro_batch']}"),
        (True, "gradient_accumulation_steps", layout.microbatches, f"m: {why['microbatches']}"),
        # With tp DeepSpeed would check the batch size against all ranks, including tp's.
        (layout.tp == 1, "train_batch_size", layout.global_batch, why["batch"]),
        (True, "zero_optimization", zero, sharing),
        (True, target.half_dtype, {"enabled": True}, f"{why['half']}; a float32 master copy."),
        (layout.tp > 1, "tensor_parallel",
         {"autotp_size": layout.tp, "partition_config": TENSOR_PLAN}, tensor),
        (layout.pp > 1, "pipeline", pipeline, cutting),
        (layout.pp == 1 and layout.recompute != "none", "activation_checkpointing",
         {"partition_activations": False}, again),
        (host, "zero_force_ds_cpu_optimizer", False,
         "Any optimizer may step on the host; DeepSpeedCPUAdam is several times as fast."),
        (True, "zero_allow_untested_optimizer", True,
         "The program brings the optimizer: DeepSpeed must accept one that is not its own."),
        (True, "gradient_clipping", 1.0,
         "No layout decides this; written out, since 1.0 is DeepSpeed's default."),
    ]  # fmt: skip


def _check_target(target: Target) -> None:
    layout = target.layout
    target.check_allowed(cp=[1], replicas=[1])  # the model's code has context parallelism
    if layout.tp > 1:  # its tensor parallelism has no sequence parallelism
        target.check_allowed("tp > 1", sequence_parallel=[False])
    if layout.offload == "optimizer":
        target.check_allowed("offload='optimizer'", zero=[1, 2, 3])
    if layout.pp > 1:  # a pipeline accumulates gradients, and recomputes whole layers
        pipelines = {"schedule": ["1f1b"], "recompute": ["none", "full"]}
        target.check_allowed("pp > 1", tp=[1], zero=[0, 1], **pipelines)
        if len(set(target.list_part_sizes())) > 1:
            raise target.make_error(f"stages={layout.stages!r}", "be equal stages")
