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

from .plan import Plan, plan_layout, predict_candidate
from .predict import predict
from .profile import COURSE
from .report import TIME_PARTS

# Remedies that the planner can predict, and the engines' options for them. The names are checked
# against the engines' own parsers: tests/test_your_job.py.
ENGINE_OPTIONS: dict[str, dict[str, str]] = {
    "smaller micro-batches": {
        "torchtitan": "--training.local_batch_size", "megatron": "--micro-batch-size",
        "deepspeed": "train_micro_batch_size_per_gpu", "course": "--micro",
    },
    "sequence parallelism": {
        "torchtitan": "--parallelism.enable_sequence_parallel", "megatron": "--sequence-parallel",
    },
    "next ZeRO stage": {
        "torchtitan": "--parallelism.data_parallel_shard_degree, fsdp_reshard_after_forward",
        "megatron": "--use-distributed-optimizer, then --use-megatron-fsdp",
        "deepspeed": "zero_optimization.stage", "course": "--strategy",
    },
    "full recomputation": {
        "torchtitan": "activation_checkpoint = FullAC.Config()",
        "megatron": "--recompute-granularity full",
        "deepspeed": "deepspeed.checkpointing.checkpoint, in the model",
        "course": "torch.utils.checkpoint, in the model",
    },
    "twice the tensor ranks": {
        "torchtitan": "--parallelism.tensor_parallel_degree",
        "megatron": "--tensor-model-parallel-size",
        "deepspeed": "tensor_parallel.autotp_size", "course": "--tensor",
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
    "optimizer offload": {
        "megatron": "--optimizer-cpu-offload",
        "deepspeed": "zero_optimization.offload_optimizer",
    },
    "optimizer and weight offload": {
        "torchtitan": "--training.enable_cpu_offload",
        "deepspeed": "zero_optimization.offload_param",
    },
    "no fragmentation": dict.fromkeys(
        ("torchtitan", "megatron", "deepspeed", "course"),
        "PYTORCH_ALLOC_CONF=expandable_segments:True",  # since torch 2.9
    ),
}  # fmt: skip


ARITHMETIC_PARTS = "products", "attention", "elementwise"  # parts of a step that every layout needs


@dataclass(frozen=True)
class Remedy:
    """A change of a layout, one of ENGINE_OPTIONS, with predicted memory and step time."""

    name: str
    layout: Layout
    reserved: float  # bytes of the fullest rank
    seconds: float  # per step


def list_remedies(plan: Plan, layout: Layout) -> list[Remedy]:
    """Return the changes that would reserve less than a plan's `layout`, the fastest first.

    All keep the GPUs and the batch; the remedy against fragments assumes that none are lost.
    """
    before = predict_candidate(plan, plan.make_job(layout))
    listed = []
    for name, fields in _iter_changes(plan, layout):
        try:
            changed = replace(layout, **fields)
            after = predict_candidate(plan, plan.make_job(changed))
        except ValueError:  # the model cannot be divided so
            continue
        reserved = after.reserved
        if changed == layout:
            reserved -= after.prediction.memory.fragments
        if reserved < before.reserved:
            listed.append(Remedy(name, changed, reserved, after.seconds))
    return sorted(listed, key=lambda one: (one.seconds, one.reserved))


def _find_remedy(plan: Plan, layout: Layout) -> str:
    """Return the fastest change of `layout` that fits, or ""."""
    changed = (one for one in list_remedies(plan, layout) if one.layout != layout)
    return next((one.name for one in changed if one.reserved <= plan.usable_memory), "")


def _iter_changes(plan: Plan, layout: Layout) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each of ENGINE_OPTIONS that applies to a layout, with the fields that it changes."""
    profile = plan.profile
    yield "no fragmentation", {}
    if layout.micro_batch % 2 == 0:
        half, twice = layout.micro_batch // 2, 2 * layout.microbatches
        yield "smaller micro-batches", {"micro_batch": half, "microbatches": twice}
    if layout.tp > 1 and profile.has_sequence_parallel:
        yield "sequence parallelism", {"sequence_parallel": True}
    stages = (0, 1) if layout.pp > 1 else profile.zero_stages
    higher = [zero for zero in stages if zero > layout.zero]
    if layout.dp > 1 and higher:
        yield "next ZeRO stage", {"zero": min(higher)}
    yield "full recomputation", {"recompute": "full"}
    if layout.dp % 2 == 0 and layout.replicas == 1:
        less = {"dp": layout.dp // 2, "microbatches": 2 * layout.microbatches}
        if 2 * layout.tp <= plan.machine.gpus_per_node:
            along = {"tp": 2 * layout.tp, "sequence_parallel": profile.has_sequence_parallel}
            yield "twice the tensor ranks", less | along
        if layout.zero < 2 and isinstance(layout.stages, str):
            yield "twice the stages", less | {"pp": 2 * layout.pp}
        if profile.has_context_parallel:
            yield "twice the context ranks", less | {"cp": 2 * layout.cp}
    if "optimizer" in profile.offload_states and layout.zero and layout.offload == "none":
        yield "optimizer offload", {"offload": "optimizer"}
    if "parameters" in profile.offload_states and layout.zero == 3:
        yield "optimizer and weight offload", {"offload": "parameters"}


def tabulate_remedies(plan: Plan, layout: Layout) -> list[list[str]]:
    """Return `list_remedies` as rows of a table, with the option of the profile's engine."""
    engine = plan.profile.name
    table = [["out of memory?", "GB", "fits", "s", f"with {engine}"]]
    for one in list_remedies(plan, layout):
        fits = "yes" if one.reserved <= plan.usable_memory else "no"
        option = ENGINE_OPTIONS[one.name].get(engine, "")
        sizes = [f"{one.reserved / 1e9:.1f}", fits, f"{one.seconds:.3g}"]
        table.append([one.name, *sizes, option])
    return table


def explain_infeasible(plan: Plan) -> str:
    """Explain why no layout fits: the closest one, the memory it lacks, and a change that helps."""
    closest, enough = plan.closest_infeasible, plan.usable_memory
    if closest is None:
        reasons = "; ".join(plan.rejections) or "no layout meets the constraints"
        return f"gpus={plan.gpus}: no layout is possible: {reasons}"
    words = (
        f"gpus={plan.gpus}: no layout fits. The closest, {closest.layout}, needs "
        f"{closest.reserved / 1e9:,.1f} GB on its fullest GPU; usable are {enough / 1e9:,.1f} GB. "
    )
    if name := _find_remedy(plan, closest.layout):
        return f"{words}One change is enough: {name}."
    shards = {"zero": max(plan.profile.zero_stages) if closest.layout.pp == 1 else 1}
    for factor in (2, 4, 8, 16, 32, 64):
        layout = replace(closest.layout, **shards, dp=factor * closest.layout.dp)
        if predict_candidate(plan, plan.make_job(layout)).reserved <= enough:
            return f"{words}It would fit with {layout.world_size} GPUs, as {layout}."
    return f"{words}More GPUs are not enough: take shorter sequences, or GPUs with more memory."


def explain_oom(
    config: Config | Structure, machine: Machine, layout: Layout, seq: int | None = None
) -> str:
    """Explain why `layout` does not fit, and name a change that would suffice ("" if it fits).

    Bytes are predicted for the course's own model. Raises ValueError as `predict` does, and for
    heads that this model cannot be cut into.
    """
    check_tensor_degree(config, layout.tp, copies=True)
    plan = plan_layout(config, machine, layout, config.seq if seq is None else seq, COURSE)
    if plan.feasible:
        return ""
    full = plan.closest_infeasible.prediction.memory
    states = full.weights + full.gradients + full.optimizer
    words = (
        f"Its fullest GPU needs {full.reserved / 1e9:.1f} GB; usable are "
        f"{plan.usable_memory / 1e9:.1f} GB. {states / 1e9:.1f} GB of it are model states, the "
        "rest activations and communication buffers."
    )
    if name := _find_remedy(plan, layout):
        return f"{words} One change is enough: {name}."
    return f"{words} No single change is enough: cut or shard the model over more ranks."


def explain_slowness(
    config: Config | Structure, machine: Machine, layout: Layout, seq: int | None = None
) -> str:
    """Name what a step waits for most, beside the arithmetic that every layout needs.

    Seconds are predicted for the course's own model. Raises ValueError as `predict` does.
    """
    seconds = predict(config, machine, layout, seq=seq).seconds
    words = f"A step takes about {_format_seconds(seconds.total)} s."
    if layout.tp > machine.gpus_per_node:
        return (
            f"{words} t = {layout.tp} reaches beyond a node of {machine.gpus_per_node}: the "
            "all-reduces of every layer wait for the links between nodes."
        )
    parts = {name: value for name, value in vars(seconds).items() if name not in ARITHMETIC_PARTS}
    why = dict(TIME_PARTS)
    if layout.recompute == "full":  # recomputation is one pass of four
        parts["recomputation"] = (seconds.products + seconds.attention) / 4
        why["recomputation"] = "layers are computed again in backward"
    most = max(parts, key=lambda name: parts[name])
    if parts[most] < 0.01 * seconds.total:
        return words
    return f"{words} {_format_seconds(parts[most])} s of it are {most}: {why[most]}."


def _format_seconds(seconds: float) -> str:
    return f"{float(f'{seconds:.3g}'):,g}"
