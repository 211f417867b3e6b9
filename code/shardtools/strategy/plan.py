"""Search for layouts of a job: predict them, rank the feasible ones, count the rejected ones.

The flow chart chooses from its results, too. It skips predictions that cannot matter: larger
micro-batches of a layout that does not fit, context parallelism or offloading if a layout fits
without, recomputation by operator if it is not needed or cannot be fastest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from shardlab.common.arguments import MAX_SIZE, check_integer, check_one_of, check_type
from shardlab.common.machines import Machine
from shardlab.common.shapes import Config
from shardlab.layout import Layout, Structure, get_structure

from . import search_space
from .cost import bubble_ratio, count_flops
from .footprint import MemoryPair, host_bytes, predict_first_and_fullest
from .job import DTYPES, Job
from .offload import HOST_MEMORY_BYTES
from .predict import Prediction, check_job, check_rates, predict_job, usable_memory
from .profile import COURSE, Profile
from .rates import Rates, RateValues

EXCEEDS_HOST_MEMORY = "needs more memory than the host has"
MAX_GPUS = 1_000_000  # in a job: the search tries a layout for each divisor
# Bubble over step time above which context parallelism may pay, since with fewer copies the same
# batch makes more micro-batches.
BUBBLE_THRESHOLD = 0.05


@dataclass(frozen=True)
class Candidate:
    """A candidate layout with its predicted memory, step time and MFU."""

    layout: Layout
    prediction: Prediction
    seconds: float
    reserved: float  # bytes of the fullest rank
    tokens_per_second: float  # on all GPUs
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
    constraints: Mapping[str, object] = field(default_factory=dict)  # required values of fields
    feasible: list[Candidate] = field(default_factory=list)
    rejections: Counter[str] = field(default_factory=Counter)
    closest_infeasible: Candidate | None = None
    # Parts of the search space: "" if the part was searched, else the reason why not.
    search_coverage: dict[str, str] = field(default_factory=dict)

    @cached_property
    def rate_values(self) -> RateValues:
        """Rates as attributes."""
        return self.rates.to_values()

    @cached_property
    def usable_memory(self) -> float:
        """Bytes that a rank may reserve."""
        return usable_memory(self.machine, self.rate_values)

    def meets_constraints(self, layout: Layout, *names: str) -> bool:
        """Return True if these fields of a layout have the requested values."""
        fixed = self.constraints
        return all(getattr(layout, name) == fixed[name] for name in names if name in fixed)

    def make_job(self, layout: Layout) -> Job:
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
    constraints: Mapping[str, object] | None = None,
    dtype: str = "bf16",
) -> Plan:
    """Search the layouts for `batch` sequences per step on `gpus` GPUs.

    Candidates are all tensor degrees inside a node (with sequence parallelism), all pipelines, 1F1B
    and interleaved, with stages as equal as the profile's engine allows, context parallelism for
    long sequences, all expert-parallel degrees, the profile's stages of ZeRO (0 and 1 with a
    pipeline), micro-batches in powers of two, recomputation of layers and of operators, and where
    nothing fits offloading. constraints: required values of layout fields. dtype: format of matrix
    products, one of `DTYPES`.

    A layout fits if its fullest rank reserves no more than the share of memory beyond which an
    allocator begins to retry. Raises ValueError for GPUs that fill no whole nodes, for numbers
    below 1 or beyond `arguments.SIZES` and `MAX_GPUS`, for rates of another profile, and for
    machines without products of that dtype.
    """
    config = get_structure(config)  # converted once, not for each layout
    check_type(Machine, machine=machine)
    check_integer(1, MAX_GPUS, gpus=gpus)
    check_integer(1, MAX_SIZE, batch=batch)
    if gpus > (n := machine.gpus_per_node) and gpus % n:
        raise ValueError(f"gpus={gpus}: must be at most {n}, or a multiple of {n} (whole nodes)")
    seq = config.seq if seq is None else seq
    check_integer(1, MAX_SIZE, seq=seq)
    check_dtype(machine, dtype)
    rates = check_rates(profile, rates)
    result = Plan(config, machine, gpus, batch, seq, profile, rates, dtype, constraints or {})
    offloads = ["none", *profile.offload_states]
    if "offload" in result.constraints:
        offloads = [str(result.constraints["offload"])]
    lacking: list[tuple[float, Job]] = []
    for offload in offloads:
        if not result.feasible:
            lacking += _search_layouts(result, offload)
            last = offload
    if lacking and not result.feasible:
        _, closest = min(lacking, key=lambda pair: pair[0])
        result.closest_infeasible = predict_candidate(result, closest)
    if result.feasible and "recompute" not in result.constraints:
        _add_operator_recompute(result)
    # Equally fast layouts are sorted by memory: free memory is a margin for what is not counted.
    result.feasible.sort(key=lambda one: (round(one.seconds, 6), one.reserved))
    result.search_coverage = _describe_coverage(result, last)
    return result


def check_dtype(machine: Machine, dtype: str) -> None:
    """Raise ValueError if a machine has no products of that dtype."""
    has = {"bf16": True, "fp8": machine.fp8, "mxfp8": machine.fp8, "nvfp4": machine.fp4}
    check_one_of([name for name in DTYPES if has[name]], dtype=dtype)


def predict_candidate(plan: Plan, job: Job, memory: MemoryPair | None = None) -> Candidate:
    """Predict one of the plan's jobs, whether it fits or not; memory: as in `predict_job`.

    Raises ValueError as `predict` does.
    """
    prediction = predict_job(job, plan.rate_values, memory)
    taken = prediction.seconds.total
    tokens = plan.batch * plan.seq
    mfu = count_flops(plan.config, tokens, plan.seq) / taken / (plan.gpus * job.flops)
    return Candidate(job.layout, prediction, taken, prediction.memory.reserved, tokens / taken, mfu)


def plan_layout(
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
    job = get_structure(config), machine, layout.world_size, layout.global_batch, seq, profile
    result = Plan(*job, check_rates(profile, rates), dtype)
    one = predict_candidate(result, result.make_job(layout))
    if one.reserved <= result.usable_memory:
        result.feasible.append(one)
    else:
        result.closest_infeasible = one
    return result


def _search_layouts(plan: Plan, offload: str) -> list[tuple[float, Job]]:
    """Add the layouts that fit to `plan`; return those that do not, with reserved bytes."""
    lacking: list[tuple[float, Job]] = []
    easy: dict[tuple[int, ...], int] = {}  # fewest context ranks without recompute and bubble
    options = search_space.list_recompute_options(plan)
    for base in search_space.iter_base_layouts(
        plan, plan.rejections if offload == "none" else Counter()
    ):
        copies = base.tp, base.pp, base.dp * base.cp
        if easy.get(copies, base.cp) < base.cp and "cp" not in plan.constraints:
            plan.rejections["context parallelism is not needed: the same layout fits without"] += 1
            continue
        check_job(plan.make_job(base))
        ranks = min(plan.gpus, plan.machine.gpus_per_node)
        before, tried = len(plan.feasible), list(search_space.iter_batch_shapes(plan, base))
        for start in search_space.iter_zero_stages(plan, base, offload):
            if ranks * host_bytes(plan.make_job(start)) > HOST_MEMORY_BYTES:
                plan.rejections[EXCEEDS_HOST_MEMORY] += len(options) * len(tried)
                continue
            for number, how in enumerate(options, 1):
                if not _add_batch_shapes(plan, replace(start, recompute=how), tried, lacking):
                    plan.rejections[search_space.EXCEEDS_GPU_MEMORY] += (
                        len(options) - number
                    ) * len(tried)
                    break
        added = (one.layout for one in plan.feasible[before:])
        if any(x.recompute == "none" and bubble_ratio(x) <= BUBBLE_THRESHOLD for x in added):
            easy.setdefault(copies, base.cp)
    return lacking


def _add_batch_shapes(
    plan: Plan, start: Layout, tried: list[search_space.Fields], lacking: list[tuple[float, Job]]
) -> bool:
    """Add a layout's shapes that fit; return False if even the smallest shape lacks memory.

    Shapes with one chunk need more and more memory, and each needs less than the interleaved shapes
    that follow. Late buffers are not needed bytes: a larger layout may not have them.
    """
    for number, fields in enumerate(tried):
        job = plan.make_job(replace(start, **fields))
        memory = predict_first_and_fullest(job, plan.rate_values)
        if memory[1].reserved <= plan.usable_memory:
            plan.feasible.append(predict_candidate(plan, job, memory))
            continue
        lacking.append((memory[1].reserved, job))
        if memory[1].required_bytes > plan.usable_memory and job.layout.chunks == 1:
            plan.rejections[search_space.EXCEEDS_GPU_MEMORY] += len(tried) - number
            return number > 0
        plan.rejections[search_space.EXCEEDS_GPU_MEMORY] += 1
    return True


def _add_operator_recompute(plan: Plan) -> None:
    """Add layouts that recompute some operators, if they may be the fastest.

    Each lies between a layout without recomputation, which does not fit, and a slower one with full
    recomputation, which does.
    """
    fitting = {one.layout for one in plan.feasible}
    first = "attention+" if plan.profile.attention == "plain" else ""
    some = [first + name for name in plan.profile.recompute_operators]
    fastest = min(one.seconds for one in plan.feasible)
    between: list[tuple[float, Layout]] = []

    def has_room(job: Job) -> bool:
        memory = predict_first_and_fullest(job, plan.rate_values)
        return memory[1].reserved <= plan.usable_memory

    for one in plan.feasible if some else ():
        plain = replace(one.layout, recompute="none")
        least = replace(plain, recompute=some[-1])
        if (
            one.layout.recompute == "full"
            and plain not in fitting
            and has_room(plan.make_job(least))
        ):
            parts = predict_job(plan.make_job(plain), plan.rate_values).seconds
            between.append((parts.total - parts.retries, plain))
    for least, plain in sorted(between, key=lambda pair: pair[0]):
        if least >= fastest:
            break
        for name in some:
            job = plan.make_job(replace(plain, recompute=name))
            if has_room(job):
                plan.feasible.append(predict_candidate(plan, job))
                fastest = min(fastest, plan.feasible[-1].seconds)
                break


def _describe_coverage(plan: Plan, offload: str) -> dict[str, str]:
    """Return, for each part of the search space, "" or the reason why it was not searched."""
    profile, name = plan.profile, plan.profile.name
    missing = f"{name} does not support it"
    uneven = plan.config.layers > 1 and profile.stage_rule == "equal"
    offloading = "a layout fits without it" if plan.feasible else missing
    context = "" if profile.has_context_parallel else missing
    if plan.seq < search_space.MIN_SEQ_FOR_CP:
        context = f"sequences are shorter than {search_space.MIN_SEQ_FOR_CP:,} tokens"
    experts = "" if plan.config.experts else "the model has no experts"
    coverage = {
        "tensor ranks": "",
        "stages": "",
        "unequal stages": f"{name} supports only equal stages" if uneven else "",
        "chunks of stages": "" if profile.has_interleaving else missing,
        "context ranks": context,
        "hidden context messages": "" if profile.overlaps_context else f"{name} waits for them",
        "experts over ranks": experts,
        "folded experts": experts or ("" if profile.has_expert_folding else missing),
        "ZeRO": "",
        "recomputation": "",
        "recomputation by operator": "" if profile.recompute_operators else missing,
        "the host's memory": "" if offload != "none" else offloading,
        "8-bit products": "" if plan.dtype != "bf16" else "needs --dtype",
        "schedules without a bubble": "needs --layout",
        "tensor ranks beyond a node": "needs --layout",
    }
    names = {
        "tp": "tensor ranks", "pp": "stages", "cp": "context ranks", "ep": "experts over ranks",
        "zero": "ZeRO", "recompute": "recomputation", "offload": "the host's memory",
    }  # fmt: skip
    fixed = {names[n]: f"fixed at {x}" for n, x in plan.constraints.items() if n in names}
    return coverage | fixed
