"""DeepSpeed's configuration, for 0.19.8: JSON with comments.

DeepSpeed reads its file with Hjson, a JSON that takes comments, when it is given the file's name:
`deepspeed.initialize(model=model, config="ds_config.json")`, or `--deepspeed_config`. What reads
the file by itself, as Hugging Face's Trainer does, wants plain JSON: drop the lines that begin
with //.

Not in this file, since DeepSpeed takes them from the program: the model and where it is cut into
stages, what is recomputed, the optimizer.
"""

from __future__ import annotations

import json
from typing import Any

from .target import Target

FILE = "ds_config.json"

# Names of the course's plain GPT: cut by columns where outputs are a rank's own, by rows where they
# are added up. `deepspeed_engine.core.COURSE_PLAN` is the same.
TENSOR_PLAN = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.(query|key|value|up|gate)\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.(out|down)\.weight$"], "partition_type": "row"},
    ],
}


def write(target: Target) -> str:
    """The text of the file; ValueError for what DeepSpeed cannot do, or not from a file."""
    _check(target)
    head = [
        *target.title(),
        "For DeepSpeed 0.19.8, which reads these comments; initialize(config='ds_config.json').",
        *target.torchrun("YOUR_PROGRAM.py"),
    ]
    lines = [*(f"// {line}" for line in head), "{"]
    for key, value, why in _rows(target):
        lines += ["", *(f"  // {line}" for line in why.splitlines())]
        text = json.dumps(value, indent=2).replace("\n", "\n  ")
        lines.append(f"  {json.dumps(key)}: {text},")
    lines[-1] = lines[-1][:-1]
    del lines[len(head) + 1]  # the empty line behind the bracket
    return "\n".join([*lines, "}", ""])


def _rows(target: Target) -> list[tuple[str, Any, str]]:
    at = target.layout
    b, m = at.micro_batch, at.microbatches
    rows: list[tuple[str, Any, str]] = [
        ("train_micro_batch_size_per_gpu", b, f"b: {target.why['micro_batch']}"),
        ("gradient_accumulation_steps", m, f"m: {target.why['microbatches']}"),
    ]
    if at.tp == 1:  # with tp DeepSpeed would hold the true number against all ranks, tp's included
        rows.append(("train_batch_size", at.batch, target.why["batch"]))
    zero: dict[str, Any] = {"stage": at.zero}
    why = f"ZeRO-{at.zero}: {target.why['zero']}"
    if at.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        why += "\nThe optimizer stays in the host's memory and steps there: room, for time."
    if at.offload == "parameters":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
        why += "\nWeights stay there, too, and come for the layer that needs them."
    rows.append(("zero_optimization", zero, why))
    rows.append((target.half, {"enabled": True}, f"{target.why['half']}; a float32 master copy."))
    rows += _tensor(target) + _pipeline(target) + _recompute(target)
    if at.offload != "none":
        why = "Any optimizer may step on the host; DeepSpeedCPUAdam is several times as fast."
        rows.append(("zero_force_ds_cpu_optimizer", False, why))
    rows.append(
        (
            "zero_allow_untested_optimizer",
            True,
            "The program brings the optimizer: DeepSpeed is not to refuse one that is not its own.",
        )
    )
    why = "No layout decides this; written out, since 1.0 is what DeepSpeed takes without a word."
    return [*rows, ("gradient_clipping", 1.0, why)]


def _tensor(target: Target) -> list[tuple[str, Any, str]]:
    if target.layout.tp == 1:
        return []
    why = (
        f"t: {target.why['tensor']}.\n"
        "The patterns are names of the course's GPT; for a model of Hugging Face, its preset\n"
        'instead: "preset_model": "llama". Embedding and head stay whole on each rank.'
    )
    section = {"autotp_size": target.layout.tp, "partition_config": TENSOR_PLAN}
    return [("tensor_parallel", section, why)]


def _pipeline(target: Target) -> list[tuple[str, Any, str]]:
    at = target.layout
    if at.pp == 1:
        return []
    section: dict[str, Any] = {"stages": at.pp}
    why = (
        f"p: {target.why['pipeline']}.\n"
        f"The program cuts: PipelineModule(layers, num_stages={at.pp}, "
        'partition_method="type:Block"),\n'
        f"with the class of a layer, here Block, gives each stage {target.parts()[0]} of them."
    )
    if at.recompute == "full":  # re-entrant would leave the embedding without gradient
        section.update(activation_checkpoint_interval=1, use_reentrant=False)
        why += f"\nAnd {target.why['recompute']}."
    return [("pipeline", section, why)]


def _recompute(target: Target) -> list[tuple[str, Any, str]]:
    at = target.layout
    if at.pp > 1 or at.recompute == "none":
        return []
    what = "each layer" if at.recompute == "full" else "attention's core"
    why = (
        f"{target.why['recompute']}.\n".capitalize()
        + "This says how, never where: the program has to call deepspeed.checkpointing.checkpoint\n"
        f"on {what}; for the course's GPT, shardlab.deepspeed_engine.recompute on each layer."
    )
    return [("activation_checkpointing", {"partition_activations": False}, why)]


def _check(target: Target) -> None:
    at = target.layout
    if at.cp > 1:
        why = (
            "DeepSpeed shares a sequence in the model's code (DistributedAttention), not from here"
        )
        raise target.refusal(f"cp={at.cp}", "is 1", why)
    if at.replicas > 1:
        why = "nearest is one group of all copies"
        raise target.refusal(f"replicas={at.replicas}", "is 1", why)
    if at.sequence_parallel and at.tp > 1:
        why = "its tensor parallelism keeps whole what stands between the cut matrices"
        raise target.refusal("sequence_parallel=True", "is False", why)
    if at.offload == "optimizer" and at.zero == 0:
        raise target.refusal("zero=0", "with offload='optimizer' are 1, 2 and 3", "nearest is 1")
    if at.pp == 1:
        return
    if at.tp > 1:
        why = "its automatic tensor parallelism does not go into a pipeline; nearest is megatron"
        raise target.refusal(f"tp={at.tp}", f"with pp={at.pp} is 1", why)
    if at.zero > 1:
        why = "a pipeline adds up gradients of many micro-batches; nearest is 1"
        raise target.refusal(f"zero={at.zero}", f"with pp={at.pp} are 0 and 1", why)
    if at.schedule != "1f1b":
        raise target.refusal(f"schedule={at.schedule!r}", "is '1f1b'", "it has no other")
    if len(set(target.parts())) > 1:
        why = "its pipeline takes no list of stages; nearest is 'equal'"
        raise target.refusal(f"stages={at.stages!r}", "are equal ones", why)
    if at.recompute == "selective":
        why = "its pipeline recomputes whole layers; nearest is 'full'"
        raise target.refusal("recompute='selective'", f"with pp={at.pp} are 'none' and 'full'", why)
