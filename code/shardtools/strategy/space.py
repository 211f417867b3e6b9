"""The layouts of a job that there are to try, in groups of which the emptiest is known beforehand.

A plan walks through degrees (`bases`), and for each of these through ZeRO (`sharded`), what is
computed again (`recomputed`), and micro-batches and chunks (`shapes`).
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

LONG = 8192  # tokens of a sequence, from which on ranks may share it
LEAST = 2048  # of these each of them has at least
CHUNKS = 2, 4, 8  # of a stage, that are tried
LACKS = "needs more memory than there is"
UNCUT = "stages that the layers cannot be cut into"
Fields = dict[str, Any]  # of a layout, by their names


def bases(plan: Plan, ruled: Counter[str]) -> Iterator[Layout]:
    """Degrees and stages, of fewest context ranks first; `ruled` counts what cannot be, by reason.

    Their micro-batches are of one sequence.
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
    """Whether `tp` ranks can cut a model; copies: of heads of keys and values, if need be."""
    try:
        check_tensor_degree(config, tp, copies)
    except ValueError:
        return False
    return True


def rule(layers: int, pp: int, profile: Profile) -> str | None:
    """The rule by which a profile cuts so many layers into stages; None: it cannot."""
    if profile.stages == "nanotron":
        return profile.stages if pp <= layers else None
    if layers % pp == 0:
        return "equal"
    # With a layer's place for each end, and a layer for each stage between them.
    return "megatron" if profile.stages == "megatron" and layers + 2 >= 2 * pp else None


def contexts(plan: Plan, ranks: int) -> list[int]:
    """Degrees to which ranks share a sequence: where it is long, or where that is asked for."""
    if "cp" in plan.fixed:
        return [n for n in divisors(ranks) if n == plan.fixed["cp"]]
    if plan.seq < LONG or not plan.profile.shares:
        return [1]
    return [n for n in divisors(ranks) if n * LEAST <= plan.seq]


def dealt(plan: Plan, experts: int, tp: int, shards: int) -> list[tuple[int, int | None]]:
    """Over how many ranks the experts are dealt out, and into how many each of them is cut.

    They are cut as all else is, or not at all, where the tensor ranks join in.
    """
    if not experts:
        return [(1, None)]
    found: list[tuple[int, int | None]] = [(ep, None) for ep in divisors(gcd(experts, shards))]
    if plan.profile.folds and tp > 1:
        found += [(ep, 1) for ep in divisors(gcd(experts, shards * tp)) if ep % tp == 0]
    return found


def sharded(plan: Plan, base: Layout, offload: str = "none") -> Iterator[Layout]:
    """A layout with each stage of ZeRO that its engine has for it."""
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
    """What is computed again, from what keeps least to what keeps most."""
    if "recompute" in plan.fixed:
        return (str(plan.fixed["recompute"]),)
    plain = plan.profile.attention == "plain"
    return ("full", "selective", "none") if plain else ("full", "none")


def shapes(plan: Plan, base: Layout) -> Iterator[Fields]:
    """Micro-batches in powers of two; after each, several chunks on a stage where layers allow."""
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
    """All divisors of `n`, from 1."""
    small = [k for k in range(1, isqrt(n) + 1) if n % k == 0]
    return small + [n // k for k in reversed(small) if k * k != n]
