"""The search for layouts of a job: predicts them, ranks those that fit, counts the rejected ones.

This is the only search; the flow chart, for instance, chooses from its results. It skips
predictions that cannot matter: larger micro-batches of a layout that does not fit, context
parallelism or offloading where something fits without, recomputation by operator where it is not
needed or cannot be fastest.
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
MOST_GPUS = 1_000_000  # in a job: the search tries a layout for each divisor
# Bubble over step time above which context parallelism may pay, since with fewer copies the same
# batch makes more micro-batches.
IDLE = 0.05


@dataclass(frozen=True)
class Planned:
    """A candidate layout with its predicted memory, step time and MFU."""

    layout: Layout
    prediction: Prediction
    seconds: float
    reserved: float  # bytes of the fullest rank
    tokens: float  # per second, on all GPUs
    # Model FLOPs over the data sheet's operations in the products' format. Pairs that a mask, a
    # window or a chunk hides do not count, nor does recomputation.
    mfu: float


@dataclass
class Plan:
    """A request, its feasible layouts (fastest first), and counts of rejected ones by reason."""

    config: Structure
    machine: Machine
    gpus: int
    batch: int
    seq: int
    profile: Profile
    rates: Rates
    dtype: str = "bf16"
    fixed: Mapping[str, object] = field(default_factory=dict)  # required values of fields
    fits: list[Planned] = field(default_factory=list)
    ruled: Counter[str] = field(default_factory=Counter)
    nearest: Planned | None = None  # the infeasible layout that lacks the least memory
    # Parts of the search space: "" if the part was searched, else the reason why not.
    searched: dict[str, str] = field(default_factory=dict)

    @cached_property
    def values(self) -> Values:
        """The values of the rates."""
        return self.rates.values_of()

    @cached_property
    def room(self) -> float:
        """Bytes that a rank may reserve."""
        return room(self.machine, self.values)

    def keeps(self, layout: Layout, *names: str) -> bool:
        """Return True if these fields of a layout have the requested values."""
        return all(getattr(layout, n) == self.fixed[n] for n in names if n in self.fixed)

    def job(self, layout: Layout) -> Job:
        """Return the job to predict for a layout."""
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
    """Search the layouts for `batch` sequences per step on `gpus` GPUs.

    Candidates are all tensor degrees inside a node (with sequence parallelism), all pipelines, 1F1B
    and interleaved, with stages as equal as the profile's engine allows, context parallelism for
    long sequences, all expert-parallel degrees, the profile's stages of ZeRO (0 and 1 with a
    pipeline), micro-batches in powers of two, recomputation of layers and of operators, and where
    nothing fits offloading. fixed: required values of layout fields. dtype: format of products, one
    of `DTYPES`.

    A layout fits if its fullest rank reserves no more than the share of memory beyond which an
    allocator begins to retry. Raises ValueError for GPUs that fill no whole nodes, for numbers
    below 1 or beyond `arguments.SIZES` and `MOST_GPUS`, for rates of another profile, and for
    machines without products of that dtype.
    """
    config = structure(config)  # converted once, not for each layout
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
    # Equally fast layouts are sorted by memory: free memory is a margin for what is not counted.
    found.fits.sort(key=lambda planned: (round(planned.seconds, 6), planned.reserved))
    found.searched = _searched(found, last)
    return found


def check_dtype(machine: Machine, dtype: str) -> None:
    """Raise ValueError if a machine has no products of that dtype."""
    has = {"bf16": True, "fp8": machine.fp8, "mxfp8": machine.fp8, "nvfp4": machine.fp4}
    check_one_of([name for name in DTYPES if has[name]], dtype=dtype)


def planned(found: Plan, job: Job, held: tuple[Bytes, Bytes] | None = None) -> Planned:
    """Predict one of the plan's jobs, whether it fits or not; held: as in `of_job`.

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
    """Return the plan of one given layout. Raises ValueError as `predict` and `plan` do."""
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
    """Add the layouts that fit to `found`; return those that do not, with reserved bytes."""
    lacking: list[tuple[float, Job]] = []
    easy: dict[tuple[int, ...], int] = {}  # fewest context ranks without recompute and bubble
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
    """Add a layout's shapes that fit; return False if even the smallest shape lacks memory.

    Shapes with one chunk need more and more memory, and each needs less than the interleaved shapes
    that follow. Late buffers are not needed bytes: a larger layout may not have them.
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
    """Add layouts that recompute some operators, if they may be the fastest.

    Each lies between a layout without recomputation, which does not fit, and a slower one with full
    recomputation, which does.
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
    """Return, for each part of the search space, "" or the reason why it was not searched."""
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
    """Explain why no layout fits: the closest one, and how much memory it lacks."""
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
