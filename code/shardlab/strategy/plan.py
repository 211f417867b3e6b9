"""A plan: every layout of a job, predicted; which are fastest, and what ruled out the others.

This is the one search. What else chooses, the chart for instance, chooses from its layouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import gcd, isqrt

from shardlab.arguments import SIZES, check_kind, check_whole
from shardlab.layout import Layout, Structure, structure
from shardlab.layout.structure import cut_sizes
from shardlab.machines import Machine
from shardlab.shapes import Config

from .cost import flops
from .job import Job
from .predict import Prediction, check_rates, of_job, room
from .profile import COURSE, Profile
from .rates import Rates

LONG = 32_768  # tokens of a sequence, from which on ranks may share it
CHUNKS = 2, 4  # of a stage, that are tried
MOST_GPUS = 1_000_000  # of a job: every layout is tried, and there is one for each divisor
MORE = 2, 4, 8, 16, 32, 64  # times as many GPUs, tried where nothing fits


@dataclass(frozen=True)
class Planned:
    """A layout, what it takes, and what comes of that."""

    layout: Layout
    prediction: Prediction
    seconds: float
    reserved: float  # bytes of the fullest rank
    tokens: float  # in a second, on all GPUs
    mfu: float  # share of the data sheet's operations, as PaLM counts them: no recomputation


@dataclass
class Plan:
    """What was asked; layouts that fit, the fastest first; how many fell out for which reason."""

    config: Structure
    machine: Machine
    gpus: int
    batch: int
    seq: int
    profile: Profile
    rates: Rates | None
    room: float  # bytes that a rank may reserve
    fits: list[Planned] = field(default_factory=list)
    ruled: Counter[str] = field(default_factory=Counter)
    nearest: Planned | None = None  # of those that do not fit, the one that lacks least


def plan(
    config: Config | Structure,
    machine: Machine,
    gpus: int,
    batch: int,
    seq: int | None = None,
    profile: Profile = COURSE,
    rates: Rates | None = None,
    fixed: Mapping[str, object] | None = None,
) -> Plan:
    """Every layout for `batch` sequences in a step on `gpus` GPUs.

    Tried are all tensor degrees inside of a node (with sequence parallelism), all pipelines, 1F1B
    and interleaved, ranks that share a sequence where it is long, all ways to deal out experts, the
    profile's stages of ZeRO (2 and 3 without a pipeline: no engine here has others), micro-batches
    in powers of two, and recomputation.
    fixed: fields of the layouts that have to have these values.

    A layout fits if its fullest rank reserves no more than the share of memory beyond which the
    allocator begins to retry. Raises ValueError for GPUs that fill no whole nodes, for numbers
    below 1 or beyond `arguments.SIZES` and `MOST_GPUS`, and for rates of another profile.
    """
    config = structure(config)  # once, and not for each layout
    check_kind(Machine, machine=machine)
    check_whole(1, MOST_GPUS, gpus=gpus)
    check_whole(1, SIZES, batch=batch)
    if gpus > (n := machine.per_node) and gpus % n:
        raise ValueError(f"gpus={gpus}: allowed are 1 to {n}, and whole nodes of {n}")
    seq = config.seq if seq is None else seq
    check_whole(1, SIZES, seq=seq)
    values = check_rates(profile, rates)
    there = room(machine, values)
    found = Plan(config, machine, gpus, batch, seq, profile, rates, there)
    work = flops(config, batch * seq, seq, causal=False)
    for layout in layouts(config, machine, gpus, batch, seq, profile, found.ruled):
        if fixed and any(getattr(layout, name) != value for name, value in fixed.items()):
            continue
        prediction = of_job(Job(config, machine, layout, profile, seq), values)
        seconds, reserved = prediction.seconds.total, prediction.memory.reserved
        planned = Planned(
            layout, prediction, seconds, reserved, batch * seq / seconds,
            work / seconds / (gpus * machine.flops),
        )  # fmt: skip
        if reserved <= found.room:
            found.fits.append(planned)
            continue
        found.ruled["needs more memory than there is"] += 1
        if found.nearest is None or reserved < found.nearest.reserved:
            found.nearest = planned
    # Of layouts that take the same time, the emptier one: it leaves room for what is not counted.
    found.fits.sort(key=lambda planned: (round(planned.seconds, 6), planned.reserved))
    return found


def layouts(
    config: Config | Structure,
    machine: Machine,
    gpus: int,
    batch: int,
    seq: int,
    profile: Profile,
    ruled: Counter[str],
) -> Iterator[Layout]:
    """What `plan` tries; `ruled` counts degrees that cannot be, by reason."""
    experts = structure(config).experts
    for tp in divisors(min(gpus, machine.per_node)):
        if gpus % tp:
            continue
        if any(n % tp for n in (*cut_sizes(config).values(), seq)):
            ruled["a tensor degree that does not divide heads, widths and tokens"] += 1
            continue
        for pp in divisors(gpus // tp):
            if pp > config.layers or (profile.stages == "equal" and config.layers % pp):
                ruled["stages that the layers cannot be cut into"] += 1
                continue
            for cp in divisors(gpus // tp // pp) if seq >= LONG else [1]:
                dp = gpus // tp // pp // cp
                if seq % cp or batch % dp:
                    ruled["copies that cannot share the batch evenly"] += 1
                    continue
                for ep in divisors(gcd(experts, dp)) if experts else [1]:
                    base = Layout(
                        dp, tp, pp, sequence_parallel=tp > 1, cp=cp, ep=ep, stages=profile.stages
                    )  # fmt: skip
                    yield from _variants(config, base, batch // dp, profile)


def _variants(
    config: Config | Structure, base: Layout, each: int, profile: Profile
) -> Iterator[Layout]:
    """ZeRO, recomputation, micro-batches and chunks for given degrees; `each`: b times m."""
    shards = base.dp * base.cp
    zeros = (0,) if shards == 1 else (0, 1) if base.pp > 1 else profile.zeros
    recomputes = ("none", "selective", "full") if profile.attention == "plain" else ("none", "full")
    size = 1
    while each % size == 0:
        m = each // size
        chunked = [v for v in CHUNKS if config.layers % (base.pp * v) == 0 and m % base.pp == 0]
        for zero in zeros:
            for recompute in recomputes:
                layout = replace(
                    base, zero=zero, micro_batch=size, microbatches=m, recompute=recompute
                )
                yield layout
                for v in chunked if base.pp > 1 and profile.interleaves else ():
                    yield replace(layout, schedule="interleaved", chunks=v)
        size *= 2


def divisors(n: int) -> list[int]:
    """All divisors of `n`, from 1."""
    small = [k for k in range(1, isqrt(n) + 1) if n % k == 0]
    return small + [n // k for k in reversed(small) if k * k != n]


def short(found: Plan) -> str:
    """Why nothing of `found` fits: what comes nearest, and what would make it fit."""
    machine, gpus, batch = found.machine, found.gpus, found.batch
    if found.nearest is None:
        why = "; ".join(found.ruled) or "the layouts asked for do not exist"
        return f"gpus={gpus}: no layout can be made: {why}"

    def fits(gpus: int, batch: int, seq: int) -> bool:
        job = found.config, machine, gpus, batch, seq, found.profile, found.rates
        return bool(plan(*job).fits)

    near = found.nearest
    lacks = near.reserved - found.room
    words = (
        f"gpus={gpus}: no layout fits; {near.layout} comes nearest and needs "
        f"{near.reserved / 1e9:,.1f} GB on its fullest GPU, {lacks / 1e9:,.1f} GB more than the "
        f"{found.room / 1e9:,.1f} GB that it may take"
    )
    for times in MORE:
        more = gpus * times
        if more > MOST_GPUS or (more > machine.per_node and more % machine.per_node):
            continue
        if fits(more, batch * times, found.seq):
            return f"{words}; {more} of these GPUs would be enough, with {batch * times} sequences"
    half = found.seq // 2
    if half and fits(gpus, batch, half):
        return f"{words}; sequences of {half} tokens would fit"
    return f"{words}; {MORE[-1]} times as many of these GPUs would not help; larger ones would"
