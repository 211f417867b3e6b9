"""Advice on one layout: why it does not fit or is slow, and remedies against running out of memory.

Each remedy is predicted, and named as each engine names it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from shardlab.common.machines import Machine
from shardlab.common.shapes import Config
from shardlab.layout import Layout, Structure
from shardlab.layout.structure import check_tensor_degree

from .plan import Plan, alone, planned
from .predict import predict
from .profile import COURSE
from .report import PARTS

# Remedies that the planner can predict, and the engines' options for them. The names are checked
# against the engines' own parsers: tests/test_your_job.py.
KNOBS: dict[str, dict[str, str]] = {
    "smaller micro-batches": {
        "torchtitan": "--training.local_batch_size",
        "megatron": "--micro-batch-size",
        "deepspeed": "train_micro_batch_size_per_gpu",
        "course": "--micro",
    },
    "sequence parallelism": {
        "torchtitan": "--parallelism.enable_sequence_parallel",
        "megatron": "--sequence-parallel",
    },
    "the next stage of ZeRO": {
        "torchtitan": "--parallelism.data_parallel_shard_degree, fsdp_reshard_after_forward",
        "megatron": "--use-distributed-optimizer, then --use-megatron-fsdp",
        "deepspeed": "zero_optimization.stage",
        "course": "--strategy",
    },
    "each layer computed again": {
        "torchtitan": "activation_checkpoint = FullAC.Config()",
        "megatron": "--recompute-granularity full",
        "deepspeed": "deepspeed.checkpointing.checkpoint, in the model",
        "course": "torch.utils.checkpoint, in the model",
    },
    "twice the tensor ranks": {
        "torchtitan": "--parallelism.tensor_parallel_degree",
        "megatron": "--tensor-model-parallel-size",
        "deepspeed": "tensor_parallel.autotp_size",
        "course": "--tensor",
    },
    "twice the stages": {
        "torchtitan": "--parallelism.pipeline_parallel_degree",
        "megatron": "--pipeline-model-parallel-size",
        "deepspeed": "PipelineModule(num_stages=…), in the program",
    },
    "twice the context ranks": {
        "torchtitan": "--parallelism.context_parallel_degree",
        "megatron": "--context-parallel-size",
    },
    "the optimizer on the host": {
        "megatron": "--optimizer-cpu-offload",
        "deepspeed": "zero_optimization.offload_optimizer",
    },
    "weights on the host as well": {
        "torchtitan": "--training.enable_cpu_offload",
        "deepspeed": "zero_optimization.offload_param",
    },
    "nothing lost to fragments": dict.fromkeys(
        ("torchtitan", "megatron", "deepspeed", "course"),
        "PYTORCH_ALLOC_CONF=expandable_segments:True",  # since torch 2.9
    ),
}


ARITHMETIC = "products", "attention", "elementwise"  # parts of a step that every layout needs


@dataclass(frozen=True)
class Remedy:
    """A change of a layout, one of KNOBS, with its predicted memory and step time."""

    name: str
    layout: Layout
    reserved: float  # bytes of the fullest rank
    seconds: float  # per step


def remedies(found: Plan, layout: Layout) -> list[Remedy]:
    """Return the changes that would reserve less than a plan's `layout`, the fastest first.

    All keep the GPUs and the batch; the remedy against fragments assumes that none are lost.
    """
    before = planned(found, found.job(layout))
    listed = []
    for name, fields in _changes(found, layout):
        try:
            changed = replace(layout, **fields)
            after = planned(found, found.job(changed))
        except ValueError:  # the model cannot be divided so
            continue
        reserved = after.reserved
        if changed == layout:
            reserved -= after.prediction.memory.fragments
        if reserved < before.reserved:
            listed.append(Remedy(name, changed, reserved, after.seconds))
    return sorted(listed, key=lambda one: (one.seconds, one.reserved))


def _changes(found: Plan, at: Layout) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each of KNOBS that applies to this layout, with the fields that it changes."""
    profile = found.profile
    yield "nothing lost to fragments", {}
    if at.micro_batch % 2 == 0:
        half = {"micro_batch": at.micro_batch // 2, "microbatches": 2 * at.microbatches}
        yield "smaller micro-batches", half
    if at.tp > 1:
        yield "sequence parallelism", {"sequence_parallel": True}
    stages = (0, 1) if at.pp > 1 else profile.zeros
    more = [zero for zero in stages if zero > at.zero]
    if at.dp > 1 and more:
        yield "the next stage of ZeRO", {"zero": min(more)}
    yield "each layer computed again", {"recompute": "full"}
    if at.dp % 2 == 0 and at.replicas == 1:
        less = {"dp": at.dp // 2, "microbatches": 2 * at.microbatches}
        if 2 * at.tp <= found.machine.per_node:
            along = {"tp": 2 * at.tp, "sequence_parallel": profile.sequence_parallel}
            yield "twice the tensor ranks", less | along
        if at.zero < 2 and isinstance(at.stages, str):
            yield "twice the stages", less | {"pp": 2 * at.pp}
        if profile.shares:
            yield "twice the context ranks", less | {"cp": 2 * at.cp}
    if "optimizer" in profile.offloads and at.zero and at.offload == "none":
        yield "the optimizer on the host", {"offload": "optimizer"}
    if "parameters" in profile.offloads and at.zero == 3:
        yield "weights on the host as well", {"offload": "parameters"}


def told(found: Plan, layout: Layout) -> list[list[str]]:
    """Return `remedies` as rows of a table, with each one's name in the profile's engine."""
    engine = found.profile.name
    table = [["out of memory?", "GB", "fits", "s", f"with {engine}"]]
    for one in remedies(found, layout):
        fits = "yes" if one.reserved <= found.room else "no"
        knob = KNOBS[one.name].get(engine, "")
        sizes = [f"{one.reserved / 1e9:.1f}", fits, f"{one.seconds:.3g}"]
        table.append([one.name, *sizes, knob])
    return table


def fullness(
    config: Config | Structure, machine: Machine, layout: Layout, seq: int | None = None
) -> str:
    """Explain why `layout` does not fit, and name a change that would suffice ("" if it fits).

    Bytes are predicted for the course's own model. Raises ValueError as `predict` does, and for
    heads that this model cannot be cut into.
    """
    check_tensor_degree(config, layout.tp, copies=True)
    found = alone(config, machine, layout, config.seq if seq is None else seq, COURSE)
    if found.fits:
        return ""
    full = found.nearest.prediction.memory
    states = full.weights + full.gradients + full.optimizer
    words = (
        f"Its fullest GPU needs {full.reserved / 1e9:.1f} GB, and {found.room / 1e9:.1f} are "
        f"there. {states / 1e9:.1f} GB of it are model states; the rest are activations, and what "
        "is gathered or on its way."
    )
    changed = (one for one in remedies(found, layout) if one.layout != layout)
    enough = next((one.name for one in changed if one.reserved <= found.room), "")
    if enough:
        return f"{words} It would fit with this: {enough}."
    return f"{words} No single change would do: cut the model into more parts, or share more."


def slowness(
    config: Config | Structure, machine: Machine, layout: Layout, seq: int | None = None
) -> str:
    """Name what a step waits for most, beside the arithmetic that every layout needs.

    Seconds are predicted for the course's own model. Raises ValueError as `predict` does.
    """
    found = predict(config, machine, layout, seq=seq).seconds
    words = f"A step takes some {_digits(found.total)} s."
    if layout.tp > machine.per_node:
        return (
            f"{words} t = {layout.tp} reaches beyond a node of {machine.per_node}: the sums of "
            "every layer wait for the links between nodes."
        )
    parts = {name: value for name, value in vars(found).items() if name not in ARITHMETIC}
    why = dict(PARTS)
    if layout.recompute == "full":  # recomputation is one pass of four
        parts["recomputation"] = (found.products + found.attention) / 4
        why["recomputation"] = "arithmetic that is done twice"
    most = max(parts, key=lambda name: parts[name])
    if parts[most] < 0.01 * found.total:
        return words
    return f"{words} {_digits(parts[most])} s of it for {most}: {why[most]}."


def _digits(seconds: float) -> str:
    """Format seconds with three digits and no exponent."""
    return f"{float(f'{seconds:.3g}'):,g}"
