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

from shardlab.common.arguments import SIZES, check_kind, check_one_of, check_whole
from shardlab.common.machines import Machine
from shardlab.common.shapes import Config
from shardlab.layout import Layout, Structure, structure

from . import host
from .cost import flops
from .footprint import Bytes, first_and_fullest, fullest, on_host
from .job import DTYPES, Job
from .predict import Prediction, check_job, check_rates, of_job, room
from .profile import COURSE, Profile
from .rates import Rates, Values
from .space import LACKS, LONG, Space, bases, series

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
    rates: Rates | None
    room: float  # bytes that a rank may reserve
    fits: list[Planned] = field(default_factory=list)
    ruled: Counter[str] = field(default_factory=Counter)
    nearest: Planned | None = None  # of those that do not fit, the one that lacks least
    dtype: str = "bf16"
    # Parts of the space: "" where it was searched, or else why it was not.
    searched: dict[str, str] = field(default_factory=dict)

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
    values = check_rates(profile, rates)
    there = room(machine, values)
    found = Plan(config, machine, gpus, batch, seq, profile, rates, there, dtype=dtype)
    space = Space(config, machine, gpus, batch, seq, profile, fixed or {})
    offloads = ["none", *profile.offloads]
    if "offload" in space.fixed:
        offloads = [str(space.fixed["offload"])]
    for offload in offloads:
        if not found.fits:
            _search(found, space, values, offload)
            last = offload
    if found.fits and "recompute" not in space.fixed:
        _operators(found, values)
    # Of layouts that take the same time, the emptier one: it leaves room for what is not counted.
    found.fits.sort(key=lambda planned: (round(planned.seconds, 6), planned.reserved))
    found.searched = _searched(space, found, last)
    return found


def check_dtype(machine: Machine, dtype: str) -> None:
    """Raise ValueError where a machine has no products of that dtype."""
    has = {"bf16": True, "fp8": machine.fp8, "mxfp8": machine.fp8, "nvfp4": machine.fp4}
    check_one_of([name for name in DTYPES if has[name]], dtype=dtype)


def planned(
    found: Plan, job: Job, values: Values | None = None, held: tuple[Bytes, Bytes] | None = None
) -> Planned:
    """What comes of one of its jobs, which fits or not; values, held: as in `of_job`.

    Raises ValueError as `predict` does.
    """
    values = check_rates(found.profile, found.rates) if values is None else values
    prediction = of_job(job, values, held)
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
    there = room(machine, check_rates(profile, rates))
    job = config, machine, layout.ranks, layout.batch, seq, profile, rates, there
    found = Plan(*job, dtype=dtype)
    one = planned(found, found.job(layout))
    if one.reserved <= there:
        found.fits.append(one)
    else:
        found.nearest = one
    return found


def _search(found: Plan, space: Space, values: Values, offload: str) -> None:
    """Fill `found` with what of the space fits, and with what comes nearest."""
    there = found.room
    easy: dict[tuple[int, ...], int] = {}  # the fewest context ranks with which all goes well
    near: tuple[float, Job] | None = None

    def reserved(job: Job) -> tuple[Bytes, Bytes]:
        """What its first and its fullest rank reserve."""
        nonlocal near
        held = first_and_fullest(job, values)
        size = held[1].reserved
        if size > there and (near is None or size < near[0]):
            near = size, job
        return held

    for base in bases(space, found.ruled if offload == "none" else Counter()):
        copies = base.tp, base.pp, base.dp * base.cp
        if easy.get(copies, base.cp) < base.cp and "cp" not in space.fixed:
            found.ruled["context ranks where the same fits without them"] += 1
            continue
        check_job(found.job(base))
        for start, rows in series(space, base, offload):
            job = found.job(replace(start, **rows[-1][0]))
            if min(space.gpus, space.machine.per_node) * on_host(job) > host.MEMORY:
                found.ruled[CROWDED] += sum(map(len, rows))
                continue
            if reserved(job)[1].needed > there:  # a larger layout may not have what comes late
                found.ruled[LACKS] += sum(map(len, rows))
                continue
            for row in rows:
                for number, fields in enumerate(row):
                    job = found.job(layout := replace(start, **fields))
                    held = reserved(job)
                    if held[1].reserved <= there:
                        found.fits.append(planned(found, job, values, held))
                        if layout.recompute == "none" and _bubble(layout) <= IDLE:
                            easy.setdefault(copies, base.cp)
                    elif held[1].needed > there and layout.chunks == 1:
                        found.ruled[LACKS] += len(row) - number
                        break
                    else:
                        found.ruled[LACKS] += 1
    if near and (found.nearest is None or near[0] < found.nearest.reserved):
        found.nearest = planned(found, near[1], values)


def _bubble(layout: Layout) -> float:
    return (layout.pp - 1) / (layout.chunks * layout.microbatches)


def _operators(found: Plan, values: Values) -> None:
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
        return fullest(job, values).reserved <= found.room

    for one in found.fits if some else ():
        plain = replace(one.layout, recompute="none")
        least = replace(plain, recompute=some[-1])
        if one.layout.recompute == "full" and plain not in fitting and fits(found.job(least)):
            parts = of_job(found.job(plain), values).seconds
            between.append((parts.total - parts.retries, plain))
    for least, plain in sorted(between, key=lambda pair: pair[0]):
        if least >= fastest:
            break
        for name in some:
            job = found.job(replace(plain, recompute=name))
            if fits(job):
                found.fits.append(planned(found, job, values))
                fastest = min(fastest, found.fits[-1].seconds)
                break


def _searched(space: Space, found: Plan, offload: str) -> dict[str, str]:
    """Parts of the space: "" where it was searched, or else why it was not."""
    profile, fixed = space.profile, space.fixed
    name = profile.name
    without = f"{name} has none"
    uneven = space.config.layers > 1 and profile.stages == "equal"
    there = "" if offload != "none" else "something fits without" if found.fits else without
    context = "" if profile.shares else without
    if space.seq < LONG:
        context = f"sequences are shorter than {LONG:,} tokens"
    experts = structure(space.config).experts
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
