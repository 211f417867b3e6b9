"""Predicted seconds and bytes of a job (`cost` counts lower bounds), and a GPU's memory limit."""

from __future__ import annotations

from dataclasses import dataclass

from shardlab.common.arguments import check_integer
from shardlab.common.machines import Machine
from shardlab.common.shapes import Config
from shardlab.layout import Layout
from shardlab.layout.structure import Structure, check_expert_degree, get_tp_sizes

from .core import StepSeconds, predict_seconds
from .footprint import MemoryPair, RankMemory, host_bytes, predict_first_and_fullest, predict_memory
from .job import Job
from .profile import COURSE, Profile
from .rates import Rates, RateValues, load_rates


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds of a step and bytes of the fullest rank, each by part.

    host: the most bytes of host memory that a rank uses.
    """

    seconds: StepSeconds
    memory: RankMemory
    host_bytes: int = 0


def usable_memory(machine: Machine, rates: RateValues | None = None) -> float:
    """Return the bytes that a rank may reserve before the allocator retries."""
    rates = load_rates(COURSE.name).to_values() if rates is None else rates
    return rates.limit * machine.memory


def predict(
    config: Config | Structure,
    machine: Machine,
    layout: Layout,
    profile: Profile = COURSE,
    rates: Rates | None = None,
    seq: int | None = None,
) -> Prediction:
    """Predict the seconds and bytes of a step of `layout`.

    rates: rates of that profile, with origin and uncertainty; by default the known ones.
    seq: tokens of a sequence, by default the model's longest.

    Raises ValueError for layers that the stages cannot share, for heads or experts that cannot be
    cut or distributed so, and for rates of another profile.
    """
    seq = config.seq if seq is None else seq
    check_integer(seq=seq)
    job = Job(config, machine, layout, profile, seq)
    return predict_job(job, check_rates(profile, rates).to_values())


def predict_job(job: Job, rates: RateValues, memory: MemoryPair | None = None) -> Prediction:
    """Predict the seconds and bytes of a step of `job`. Raises ValueError as `predict` does.

    memory: `predict_first_and_fullest` of the job, if the caller has it already.
    """
    check_job(job)
    # `limit`, beyond which a step takes longer, was fitted on runs that recorded rank 0 alone.
    first, fullest = predict_first_and_fullest(job, rates) if memory is None else memory
    return Prediction(predict_seconds(job, rates, first.required_bytes), fullest, host_bytes(job))


def predict_rank0_bytes(job: Job, rates: RateValues) -> float:
    """Return the bytes that rank 0 (first stage) reserves. Raises ValueError as `predict` does."""
    check_job(job)
    return predict_memory(job, rates).reserved


def check_rates(profile: Profile, rates: Rates | None) -> Rates:
    """Return `rates`, or else the known rates. Raises ValueError for rates of another profile."""
    rates = load_rates(profile.name) if rates is None else rates
    if rates.profile != profile.name:
        raise ValueError(f"rates.profile={rates.profile!r}: must be {profile.name!r}, as planned")
    return rates


def check_job(job: Job) -> None:
    """Raise ValueError for a layout that cannot divide the model, or that is not predicted."""
    layout = job.layout
    for name, size in get_tp_sizes(job.model).items():
        if name != "key_value_heads" and size % layout.tp:  # engines replicate these heads
            raise ValueError(f"tp={layout.tp}: must divide {name} ({size})")
    if job.seq % layout.cp:
        raise ValueError(f"cp={layout.cp}: must divide the tokens of a sequence ({job.seq})")
    check_expert_degree(job.model, layout.ep)
