"""A plan: the layouts of a job, predicted; which are fastest, and what ruled out the others.

This is the one search. What else chooses, the chart for instance, chooses from its layouts.

It does not predict what it knows to be of no use: larger micro-batches of a layout that does not
fit, context ranks where the same layout fits without, operators that are computed again where
nothing has to be or where it cannot be faster than what is there, and the host's memory where
something fits without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from shardlab.common.arguments import SIZES, check_kind, check_one_of, check_whole
from shardlab.common.machines import Machine
from shardlab.common.shapes import Config
from shardlab.layout import Layout, Structure, structure

from . import host
from .cost import flops
from .footprint import Bytes, first_and_fullest, fullest, on_host
from .job import DTYPES, Job
from .predict import Prediction, check_job, of_job, rates_of, room
from .profile import COURSE, Profile
from .rates import Rates, Values
from .space import LACKS, LONG, Fields, bases, recomputed, shapes, sharded

CROWDED = "needs more than the host's memory"
MOST_GPUS = 1_000_000  # of a job: every layout is tried, and there is one for each divisor
# Of a step, that a pipeline's bubble takes: above it context ranks may pay, for they make more
# micro-batches of the same batch.
IDLE = 0.05


@dataclass(frozen=True)
class Planned:
    """A layout, what it takes, and what comes of that."""

    layout: Layout
    prediction: Prediction
    seconds: float
    reserved: float  # bytes of the fullest rank
    tokens: float  # in a second, on all GPUs
    # Share of the data sheet's operations, in the format of the products, that go into the model:
    # pairs that a mask, a window or a chunk hides are no part of it, and recomputation neither.
    mfu: float


@dataclass
class Plan:
    """What was asked; layouts that fit, the fastest first; how many fell out for which reason."""

    config: Structure
    machine: Machine
    gpus: int
    batch: int
    seq: int
    profile: Profile
    rates: Rates
    dtype: str = "bf16"
    fixed: Mapping[str, object] = field(default_factory=dict)  # fields that have these values
    fits: list[Planned] = field(default_factory=list)
    ruled: Counter[str] = field(default_factory=Counter)
    nearest: Planned | None = None  # of those that do not fit, the one that lacks least
    # Parts of the space: "" where it was searched, or else why it was not.
    searched: dict[str, str] = field(default_factory=dict)

    @cached_property
    def values(self) -> Values:
        """The rates' values."""
        return self.rates.values_of()

    @cached_property
    def room(self) -> float:
        """Bytes that a rank may reserve."""
        return room(self.machine, self.values)

    def keeps(self, layout: Layout, *names: str) -> bool:
        """Whether those fields of a layout are as asked for."""
        return all(getattr(layout, n) == self.fixed[n] for n in names if n in self.fixed)

    def job(self, layout: Layout) -> Job:
        """What is predicted of a layout."""
        return Job(self.config, self.machine, layout, self.profile, self.seq, self.dtype)


def plan(
    config: Config | Structure,
    machine: Machine,
    gpus: int,
    batch: int,
    seq: int | None = None,
    profile: Profile = COURSE,
    rates: Rates | None = None,
    fixed: Mapping[str, object] | None = None,
    dtype: str = "bf16",
) -> Plan:
    """The layouts for `batch` sequences in a step on `gpus` GPUs, as far as they may be of use.

    Tried are all tensor degrees inside of a node (with sequence parallelism), all pipelines, 1F1B
    and interleaved, with stages as equal as the profile's engine can have them, ranks that share a
    sequence where it is long, all ways to deal out experts, the profile's stages of ZeRO (2 and 3
    without a pipeline: no engine here has others), micro-batches in powers of two, recomputation,
    of layers and of operators, and where nothing fits the host's memory.
    fixed: fields of the layouts that have to have these values. dtype: of products: `DTYPES`.

    A layout fits if its fullest rank reserves no more than the share of memory beyond which an
    allocator begins to retry. Raises ValueError for GPUs that fill no whole nodes, for numbers
    below 1 or beyond `arguments.SIZES` and `MOST_GPUS`, for rates of another profile, and for
    machines that have no products of that dtype.
    """
    config = structure(config)  # once, and not for each layout
    check_kind(Machine, machine=machine)
    check_whole(1, MOST_GPUS, gpus=gpus)
    check_whole(1, SIZES, batch=batch)
    if gpus > (n := machine.per_node) and gpus % n:
        raise ValueError(f"gpus={gpus}: allowed are 1 to {n}, and whole nodes of {n}")
    seq = config.seq if seq is None else seq
    check_whole(1, SIZES, seq=seq)
    check_dtype(machine, dtype)
    rates = rates_of(profile, rates)
    found = Plan(config, machine, gpus, batch, seq, profile, rates, dtype, fixed or {})
    offloads = ["none", *profile.offloads]
    if "offload" in found.fixed:
        offloads = [str(found.fixed["offload"])]
    lacking: list[tuple[float, Job]] = []
    for offload in offloads:
        if not found.fits:
            lacking += _search(found, offload)
            last = offload
    if lacking and not found.fits:
        found.nearest = planned(found, min(lacking, key=lambda pair: pair[0])[1])
    if found.fits and "recompute" not in found.fixed:
        _operators(found)
    # Of layouts that take the same time, the emptier one: it leaves room for what is not counted.
    found.fits.sort(key=lambda planned: (round(planned.seconds, 6), planned.reserved))
    found.searched = _searched(found, last)
    return found


def check_dtype(machine: Machine, dtype: str) -> None:
    """Raise ValueError where a machine has no products of that dtype."""
    has = {"bf16": True, "fp8": machine.fp8, "mxfp8": machine.fp8, "nvfp4": machine.fp4}
    check_one_of([name for name in DTYPES if has[name]], dtype=dtype)


def planned(found: Plan, job: Job, held: tuple[Bytes, Bytes] | None = None) -> Planned:
    """What comes of one of its jobs, which fits or not; held: as in `of_job`.

    Raises ValueError as `predict` does.
    """
    prediction = of_job(job, found.values, held)
    taken = prediction.seconds.total
    tokens = found.batch * found.seq
    mfu = flops(found.config, tokens, found.seq) / taken / (found.gpus * job.flops)
    return Planned(job.layout, prediction, taken, prediction.memory.reserved, tokens / taken, mfu)


def alone(
    config: Config | Structure,
    machine: Machine,
    layout: Layout,
    seq: int,
    profile: Profile,
    rates: Rates | None = None,
    dtype: str = "bf16",
) -> Plan:
    """The plan of one layout, as it is. Raises ValueError as `predict` and `plan` do."""
    check_dtype(machine, dtype)
    job = structure(config), machine, layout.ranks, layout.batch, seq, profile
    found = Plan(*job, rates_of(profile, rates), dtype)
    one = planned(found, found.job(layout))
    if one.reserved <= found.room:
        found.fits.append(one)
    else:
        found.nearest = one
    return found


def _search(found: Plan, offload: str) -> list[tuple[float, Job]]:
    """Fill `found` with what of the space fits; return what does not, and what it reserves."""
    lacking: list[tuple[float, Job]] = []
    easy: dict[tuple[int, ...], int] = {}  # the fewest context ranks with which all goes well
    again = recomputed(found)
    for base in bases(found, found.ruled if offload == "none" else Counter()):
        copies = base.tp, base.pp, base.dp * base.cp
        if easy.get(copies, base.cp) < base.cp and "cp" not in found.fixed:
            found.ruled["context ranks where the same fits without them"] += 1
            continue
        check_job(found.job(base))
        before, tried = len(found.fits), list(shapes(found, base))
        for start in sharded(found, base, offload):
            if min(found.gpus, found.machine.per_node) * on_host(found.job(start)) > host.MEMORY:
                found.ruled[CROWDED] += len(again) * len(tried)
                continue
            for number, how in enumerate(again, 1):
                if not _fill(found, replace(start, recompute=how), tried, lacking):
                    found.ruled[LACKS] += (len(again) - number) * len(tried)
                    break
        here = (one.layout for one in found.fits[before:])
        if any(at.recompute == "none" and _bubble(at) <= IDLE for at in here):
            easy.setdefault(copies, base.cp)
    return lacking


def _fill(
    found: Plan, start: Layout, tried: list[Fields], lacking: list[tuple[float, Job]]
) -> bool:
    """Add what fits of a layout's shapes; return whether the first may have room at all.

    Those with one chunk need more and more, and each of them less than the ones with several chunks
    that follow it. What comes late is not needed: a larger layout may not have it.
    """
    for number, fields in enumerate(tried):
        job = found.job(replace(start, **fields))
        held = first_and_fullest(job, found.values)
        if held[1].reserved <= found.room:
            found.fits.append(planned(found, job, held))
            continue
        lacking.append((held[1].reserved, job))
        if held[1].needed > found.room and job.layout.chunks == 1:
            found.ruled[LACKS] += len(tried) - number
            return number > 0
        found.ruled[LACKS] += 1
    return True


def _bubble(layout: Layout) -> float:
    return (layout.pp - 1) / (layout.chunks * layout.microbatches)


def _operators(found: Plan) -> None:
    """Add layouts that compute some operators again, where they may be the fastest.

    They lie between a layout that keeps all, which does not fit, and one that keeps its layers'
    inputs, which does: they take longer than the one, and fit if at all where the other does.
    """
    fitting = {one.layout for one in found.fits}
    first = "attention+" if found.profile.attention == "plain" else ""
    some = [first + name for name in found.profile.operators]
    fastest = min(one.seconds for one in found.fits)
    between: list[tuple[float, Layout]] = []

    def fits(job: Job) -> bool:
        return fullest(job, found.values).reserved <= found.room

    for one in found.fits if some else ():
        plain = replace(one.layout, recompute="none")
        least = replace(plain, recompute=some[-1])
        if one.layout.recompute == "full" and plain not in fitting and fits(found.job(least)):
            parts = of_job(found.job(plain), found.values).seconds
            between.append((parts.total - parts.retries, plain))
    for least, plain in sorted(between, key=lambda pair: pair[0]):
        if least >= fastest:
            break
        for name in some:
            job = found.job(replace(plain, recompute=name))
            if fits(job):
                found.fits.append(planned(found, job))
                fastest = min(fastest, found.fits[-1].seconds)
                break


def _searched(found: Plan, offload: str) -> dict[str, str]:
    """Parts of the space: "" where it was searched, or else why it was not."""
    profile, fixed = found.profile, found.fixed
    name = profile.name
    without = f"{name} has none"
    uneven = found.config.layers > 1 and profile.stages == "equal"
    there = "" if offload != "none" else "something fits without" if found.fits else without
    context = "" if profile.shares else without
    if found.seq < LONG:
        context = f"sequences are shorter than {LONG:,} tokens"
    experts = found.config.experts
    found_by = {
        "tensor ranks": "",
        "stages": "",
        "unequal stages": f"{name} has equal ones alone" if uneven else "",
        "chunks of stages": "" if profile.interleaves else without,
        "context ranks": context,
        "hidden context messages": "" if profile.hides else f"{name} waits for them",
        "experts over ranks": "" if experts else "the model has none",
        "folded experts": "" if experts and profile.folds else without if experts else "no experts",
        "ZeRO": "",
        "recomputation": "",
        "recomputation by operator": "" if profile.operators else without,
        "the host's memory": there,
        "8-bit products": "" if found.dtype != "bf16" else "not asked for: --dtype",
        "schedules without a bubble": "not tried: --layout takes one",
        "tensor ranks beyond a node": "not tried: --layout takes them",
    }
    names = {
        "tp": "tensor ranks", "pp": "stages", "cp": "context ranks", "ep": "experts over ranks",
        "zero": "ZeRO", "recompute": "recomputation", "offload": "the host's memory",
    }  # fmt: skip
    kept = {names[n]: f"kept at {value}" for n, value in fixed.items() if n in names}
    return found_by | kept


def short(found: Plan) -> str:
    """Why nothing of `found` fits: what comes nearest, and by how much."""
    gpus = found.gpus
    if found.nearest is None:
        why = "; ".join(found.ruled) or "the layouts asked for do not exist"
        return f"gpus={gpus}: no layout can be made: {why}"

    near = found.nearest
    lacks = near.reserved - found.room
    left = "; ".join(f"{what}: {why}" for what, why in found.searched.items() if why)
    words = (
        f"gpus={gpus}: no layout fits; {near.layout} comes nearest and needs "
        f"{near.reserved / 1e9:,.1f} GB on its fullest GPU, {lacks / 1e9:,.1f} GB more than the "
        f"{found.room / 1e9:,.1f} GB that it may take"
    )
    return f"{words}. Not searched: {left}"
