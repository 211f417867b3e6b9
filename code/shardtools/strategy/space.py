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

LONG = 8192  # sequence length in tokens from which context parallelism is tried
LEAST = 2048  # least number of tokens for each context rank
CHUNKS = 2, 4, 8  # numbers of chunks per stage that are tried
LACKS = "needs more memory than there is"
UNCUT = "stages that the layers cannot be cut into"
Fields = dict[str, Any]  # some fields of a layout, by name


def bases(plan: Plan, ruled: Counter[str]) -> Iterator[Layout]:
    """Yield layouts of all degrees and stages, with micro-batches of 1, fewest context ranks first.

    `ruled`: counts of impossible layouts by reason.
    """
    config, gpus, batch, seq = plan.config, plan.gpus, plan.batch, plan.seq
    for tp in divisors(min(gpus, plan.machine.per_node)):
        if gpus % tp or plan.fixed.get("tp", tp) != tp:
            continue
        if seq % tp or not divides(config, tp, plan.profile.copies):
            ruled["a tensor degree that does not divide heads, widths and tokens"] += 1
            continue
        for pp in divisors(gpus // tp):
            if plan.fixed.get("pp", pp) != pp:
                continue
            stages = rule(config.layers, pp, plan.profile)
            if stages is None:
                ruled[UNCUT] += 1
                continue
            for cp in contexts(plan, gpus // tp // pp):
                dp = gpus // tp // pp // cp
                if seq % cp or batch % dp:
                    ruled["copies that cannot share the batch evenly"] += 1
                    continue
                for ep, etp in dealt(plan, config.experts, tp, dp * cp):
                    base = Layout(
                        dp, tp, pp, microbatches=batch // dp, sequence_parallel=tp > 1, cp=cp,
                        ep=ep, stages=stages, etp=etp,
                    )  # fmt: skip
                    if plan.keeps(base, "dp", "cp", "ep"):
                        yield base


def divides(config: Structure, tp: int, copies: bool) -> bool:
    """Return True if `tp` ranks can cut a model; copies: key and value heads may be replicated."""
    try:
        check_tensor_degree(config, tp, copies)
    except ValueError:
        return False
    return True


def rule(layers: int, pp: int, profile: Profile) -> str | None:
    """Return the rule by which a profile cuts `layers` into `pp` stages, or None if it cannot."""
    if profile.stages == "nanotron":
        return profile.stages if pp <= layers else None
    if layers % pp == 0:
        return "equal"
    # The embedding and the head take a layer's place each; stages between them need a layer.
    return "megatron" if profile.stages == "megatron" and layers + 2 >= 2 * pp else None


def contexts(plan: Plan, ranks: int) -> list[int]:
    """Return the context-parallel degrees to try: above 1 for long sequences, or on request."""
    if "cp" in plan.fixed:
        return [n for n in divisors(ranks) if n == plan.fixed["cp"]]
    if plan.seq < LONG or not plan.profile.shares:
        return [1]
    return [n for n in divisors(ranks) if n * LEAST <= plan.seq]


def dealt(plan: Plan, experts: int, tp: int, shards: int) -> list[tuple[int, int | None]]:
    """Return the pairs (expert-parallel degree, tensor degree of an expert) to try.

    None: experts are cut as other matrices. 1: whole experts, spread over tensor ranks, too.
    """
    if not experts:
        return [(1, None)]
    found: list[tuple[int, int | None]] = [(ep, None) for ep in divisors(gcd(experts, shards))]
    if plan.profile.folds and tp > 1:
        found += [(ep, 1) for ep in divisors(gcd(experts, shards * tp)) if ep % tp == 0]
    return found


def sharded(plan: Plan, base: Layout, offload: str = "none") -> Iterator[Layout]:
    """Yield the layout with each stage of ZeRO that its engine supports there."""
    stages = plan.profile.zeros
    if offload != "none":
        stages = tuple(z for z in stages if z >= (3 if offload == "parameters" else 1))
    elif base.shards == 1:
        stages = (0,)
    elif base.pp > 1:
        stages = (0, 1)
    for zero in stages:
        start = replace(base, zero=zero, offload=offload)
        if (base.pp == 1 or zero < 2) and plan.keeps(start, "zero"):
            yield start


def recomputed(plan: Plan) -> tuple[str, ...]:
    """Return the recomputation settings to try, in increasing order of activation memory."""
    if "recompute" in plan.fixed:
        return (str(plan.fixed["recompute"]),)
    plain = plan.profile.attention == "plain"
    return ("full", "selective", "none") if plain else ("full", "none")


def shapes(plan: Plan, base: Layout) -> Iterator[Fields]:
    """Yield micro-batch sizes in powers of two, each followed by its interleaved variants."""
    each, places = base.microbatches, plan.config.layers + 2 * (base.stages == "megatron")
    for k in range(each.bit_length()):
        size, m = 1 << k, each >> k
        if each % size or plan.fixed.get("micro_batch", size) != size:
            continue
        shape: Fields = {"micro_batch": size, "microbatches": m}
        yield shape
        if base.pp > 1 and plan.profile.interleaves and m % base.pp == 0:
            for v in CHUNKS:
                if v * base.pp <= places:
                    yield {**shape, "schedule": "interleaved", "chunks": v}


def divisors(n: int) -> list[int]:
    """Return all divisors of `n`, in increasing order."""
    small = [k for k in range(1, isqrt(n) + 1) if n % k == 0]
    return small + [n // k for k in reversed(small) if k * k != n]
