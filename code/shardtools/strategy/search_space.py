"""The search space of a plan: layouts in groups whose smallest memory use is known beforehand.

A plan iterates over degrees (`bases`), for each over stages of ZeRO (`sharded`), recomputation
(`recomputed`), and micro-batches and chunks (`shapes`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import gcd, isqrt
from typing import TYPE_CHECKING, Any

from shardlab.layout import Layout, Structure
from shardlab.layout.structure import check_tensor_degree

from .profile import Profile

if TYPE_CHECKING:
    from .plan import Plan

MIN_SEQ_FOR_CP = 8192  # tokens; context parallelism is tried from here on
MIN_TOKENS_PER_CP_RANK = 2048  # least number of tokens for each context rank
CHUNKS_PER_STAGE = 2, 4, 8  # that are tried
EXCEEDS_GPU_MEMORY = "needs more memory than the GPU has"
LAYERS_NOT_DIVISIBLE = "the layers cannot be cut into this number of stages"
Fields = dict[str, Any]  # some fields of a layout, by name


def iter_base_layouts(plan: Plan, rejections: Counter[str]) -> Iterator[Layout]:
    """Yield layouts of all degrees and stages, with micro-batches of 1, fewest context ranks first.

    rejections: gets the counts of impossible layouts by reason.
    """
    config, gpus, batch, seq = plan.config, plan.gpus, plan.batch, plan.seq
    for tp in list_divisors(min(gpus, plan.machine.gpus_per_node)):
        if gpus % tp or plan.constraints.get("tp", tp) != tp:
            continue
        if seq % tp or not can_split_model(config, tp, plan.profile.replicates_kv_heads):
            rejections["tp does not divide heads, widths and tokens"] += 1
            continue
        for pp in list_divisors(gpus // tp):
            if plan.constraints.get("pp", pp) != pp:
                continue
            stages = choose_stage_rule(config.layers, pp, plan.profile)
            if stages is None:
                rejections[LAYERS_NOT_DIVISIBLE] += 1
                continue
            for cp in list_context_degrees(plan, gpus // tp // pp):
                dp = gpus // tp // pp // cp
                if seq % cp or batch % dp:
                    rejections["dp does not divide the batch, or cp the sequence"] += 1
                    continue
                for ep, etp in list_expert_degrees(plan, config.experts, tp, dp * cp):
                    along = tp > 1 and plan.profile.has_sequence_parallel
                    base = Layout(
                        dp, tp, pp, microbatches=batch // dp, sequence_parallel=along, cp=cp,
                        ep=ep, stages=stages, etp=etp,
                    )  # fmt: skip
                    if plan.meets_constraints(base, "dp", "cp", "ep"):
                        yield base


def can_split_model(config: Structure, tp: int, replicate_kv_heads: bool) -> bool:
    """Return True if `tp` ranks can cut a model (replicate_kv_heads: not its key/value heads)."""
    try:
        check_tensor_degree(config, tp, replicate_kv_heads)
    except ValueError:
        return False
    return True


def choose_stage_rule(layers: int, pp: int, profile: Profile) -> str | None:
    """Return the rule by which a profile cuts `layers` into `pp` stages, or None if it cannot."""
    if profile.stage_rule == "nanotron":
        return profile.stage_rule if pp <= layers else None
    if layers % pp == 0:
        return "equal"
    # The embedding and the head take a layer's place each; stages between them need a layer.
    return "megatron" if profile.stage_rule == "megatron" and layers + 2 >= 2 * pp else None


def list_context_degrees(plan: Plan, ranks: int) -> list[int]:
    """Return the context-parallel degrees to try: above 1 for long sequences, or on request."""
    if "cp" in plan.constraints:
        return [n for n in list_divisors(ranks) if n == plan.constraints["cp"]]
    if plan.seq < MIN_SEQ_FOR_CP or not plan.profile.has_context_parallel:
        return [1]
    return [n for n in list_divisors(ranks) if n * MIN_TOKENS_PER_CP_RANK <= plan.seq]


def list_expert_degrees(
    plan: Plan, experts: int, tp: int, shards: int
) -> list[tuple[int, int | None]]:
    """Return the pairs (expert-parallel degree, tensor degree of an expert) to try.

    None: experts are cut as other matrices. 1: whole experts, spread over tensor ranks, too.
    """
    if not experts:
        return [(1, None)]
    divisors = list_divisors(gcd(experts, shards))
    degrees: list[tuple[int, int | None]] = [(ep, None) for ep in divisors]
    if plan.profile.has_expert_folding and tp > 1:
        degrees += [(ep, 1) for ep in list_divisors(gcd(experts, shards * tp)) if ep % tp == 0]
    return degrees


def iter_zero_stages(plan: Plan, base: Layout, offload: str = "none") -> Iterator[Layout]:
    """Yield the layout with each stage of ZeRO that its engine supports there."""
    stages = plan.profile.zero_stages
    if offload != "none":
        stages = tuple(z for z in stages if z >= (3 if offload == "parameters" else 1))
    elif base.zero_degree == 1:
        stages = (0,)
    elif base.pp > 1:
        stages = (0, 1)
    for zero in stages:
        start = replace(base, zero=zero, offload=offload)
        if (base.pp == 1 or zero < 2) and plan.meets_constraints(start, "zero"):
            yield start


def list_recompute_options(plan: Plan) -> tuple[str, ...]:
    """Return the recomputation settings to try, in increasing order of activation memory."""
    if "recompute" in plan.constraints:
        return (str(plan.constraints["recompute"]),)
    plain = plan.profile.attention == "plain"
    return ("full", "selective", "none") if plain else ("full", "none")


def iter_batch_shapes(plan: Plan, base: Layout) -> Iterator[Fields]:
    """Yield micro-batch sizes in powers of two, each followed by its interleaved variants."""
    each, places = base.microbatches, plan.config.layers + 2 * (base.stages == "megatron")
    for k in range(each.bit_length()):
        size, m = 1 << k, each >> k
        if each % size or plan.constraints.get("micro_batch", size) != size:
            continue
        shape: Fields = {"micro_batch": size, "microbatches": m}
        yield shape
        if base.pp > 1 and plan.profile.has_interleaving and m % base.pp == 0:
            for v in CHUNKS_PER_STAGE:
                if v * base.pp <= places:
                    yield {**shape, "schedule": "interleaved", "chunks": v}


def list_divisors(n: int) -> list[int]:
    """Return all divisors of `n`, in increasing order."""
    small = [k for k in range(1, isqrt(n) + 1) if n % k == 0]
    return small + [n // k for k in reversed(small) if k * k != n]
