"""The layouts of a job that there are to try, in groups of which the emptiest is known beforehand.

A plan walks through them: degrees (`bases`), and for each of these ZeRO, recomputation,
micro-batches and chunks (`series`). What of the whole space it did not try, `searched` says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import gcd, isqrt
from typing import Any

from shardlab.common.machines import Machine
from shardlab.common.shapes import Config
from shardlab.layout import Layout, Structure, structure
from shardlab.layout.structure import check_tensor_degree

from .profile import Profile

LONG = 8192  # tokens of a sequence, from which on ranks may share it
LEAST = 2048  # of these each of them has at least
CHUNKS = 2, 4, 8  # of a stage, that are tried
LACKS = "needs more memory than there is"
UNCUT = "stages that the layers cannot be cut into"
Fields = dict[str, Any]  # of a layout, by their names


@dataclass(frozen=True)
class Space:
    """A job whose layouts are tried: what they are made for, and what of them is kept."""

    config: Config | Structure
    machine: Machine
    gpus: int
    batch: int
    seq: int
    profile: Profile
    fixed: Mapping[str, object]  # fields that have to have these values

    def keeps(self, layout: Layout, *names: str) -> bool:
        """Whether those fields of a layout are as asked for."""
        return all(
            getattr(layout, n) == self.fixed[n] for n in names or self.fixed if n in self.fixed
        )


def bases(space: Space, ruled: Counter[str]) -> Iterator[Layout]:
    """Degrees and stages, of fewest context ranks first; `ruled` counts what cannot be, by reason.

    Their micro-batches are of one sequence.
    """
    config, gpus, batch, seq = space.config, space.gpus, space.batch, space.seq
    experts = structure(config).experts
    for tp in divisors(min(gpus, space.machine.per_node)):
        if gpus % tp or space.fixed.get("tp", tp) != tp:
            continue
        if seq % tp or not divides(config, tp, space.profile.copies):
            ruled["a tensor degree that does not divide heads, widths and tokens"] += 1
            continue
        for pp in divisors(gpus // tp):
            if space.fixed.get("pp", pp) != pp:
                continue
            stages = rule(config.layers, pp, space.profile)
            if stages is None:
                ruled[UNCUT] += 1
                continue
            for cp in contexts(space, gpus // tp // pp):
                dp = gpus // tp // pp // cp
                if seq % cp or batch % dp:
                    ruled["copies that cannot share the batch evenly"] += 1
                    continue
                for ep, etp in dealt(space, experts, tp, dp * cp):
                    base = Layout(
                        dp, tp, pp, microbatches=batch // dp, sequence_parallel=tp > 1, cp=cp,
                        ep=ep, stages=stages, etp=etp,
                    )  # fmt: skip
                    if space.keeps(base, "dp", "cp", "ep"):
                        yield base


def divides(config: Config | Structure, tp: int, copies: bool) -> bool:
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


def contexts(space: Space, ranks: int) -> list[int]:
    """Degrees to which ranks share a sequence: where it is long, or where that is asked for."""
    if "cp" in space.fixed:
        return [n for n in divisors(ranks) if n == space.fixed["cp"]]
    if space.seq < LONG or not space.profile.shares:
        return [1]
    return [n for n in divisors(ranks) if n * LEAST <= space.seq]


def dealt(space: Space, experts: int, tp: int, shards: int) -> list[tuple[int, int | None]]:
    """Over how many ranks the experts are dealt out, and into how many each of them is cut.

    They are cut as all else is, or not at all, where the tensor ranks join in.
    """
    if not experts:
        return [(1, None)]
    found: list[tuple[int, int | None]] = [(ep, None) for ep in divisors(gcd(experts, shards))]
    if space.profile.folds and tp > 1:
        found += [(ep, 1) for ep in divisors(gcd(experts, shards * tp)) if ep % tp == 0]
    return found


def series(
    space: Space, base: Layout, offload: str = "none"
) -> Iterator[tuple[Layout, list[list[Fields]]]]:
    """For each stage of ZeRO a layout, and a series of changes of it by each recomputation.

    A series holds the fields that change, for most of these layouts are never made: the first of
    the last one reserves least of all. But for buffers that come late: of a series those with one
    chunk reserve more and more, and each of them less than the ones with several chunks that follow
    it.
    """
    profile = space.profile
    zeros = (0,) if base.shards == 1 else (0, 1) if base.pp > 1 else profile.zeros
    if offload != "none":
        zeros = tuple(z for z in profile.zeros if z >= (3 if offload == "parameters" else 1))
        zeros = tuple(z for z in zeros if base.pp == 1 or z < 2)
    how = ("none", "selective", "full") if profile.attention == "plain" else ("none", "full")
    if "recompute" in space.fixed:
        how = (str(space.fixed["recompute"]),)
    each = list(_shapes(space, base))
    rows = [[{"recompute": recompute, **shape} for shape in each] for recompute in how]
    for zero in zeros if each else ():
        start = replace(base, zero=zero, offload=offload)
        if space.keeps(start, "zero"):
            yield start, rows


def _shapes(space: Space, base: Layout) -> Iterator[Fields]:
    """Micro-batches in powers of two; after each, several chunks on a stage where layers allow."""
    each, places = base.microbatches, space.config.layers + 2 * (base.stages == "megatron")
    for k in range(each.bit_length()):
        size, m = 1 << k, each >> k
        if each % size or space.fixed.get("micro_batch", size) != size:
            continue
        shape: Fields = {"micro_batch": size, "microbatches": m}
        yield shape
        if base.pp > 1 and space.profile.interleaves and m % base.pp == 0:
            for v in CHUNKS:
                if v * base.pp <= places:
                    yield {**shape, "schedule": "interleaved", "chunks": v}


def divisors(n: int) -> list[int]:
    """All divisors of `n`, from 1."""
    small = [k for k in range(1, isqrt(n) + 1) if n % k == 0]
    return small + [n // k for k in reversed(small) if k * k != n]
