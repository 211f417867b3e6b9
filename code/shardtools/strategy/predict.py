"""Predicted seconds and bytes of a job (`cost` counts lower bounds), and a GPU's memory limit."""

from __future__ import annotations

from dataclasses import dataclass

from shardlab.common.arguments import check_whole
from shardlab.common.machines import Machine
from shardlab.common.shapes import Config
from shardlab.layout import Layout
from shardlab.layout.structure import Structure, check_expert_degree, cut_sizes

from .core import Seconds, seconds
from .footprint import Bytes, first_and_fullest, footprint, on_host
from .job import Job
from .profile import COURSE, Profile
from .rates import Rates, Values, known


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds of a step and bytes of the fullest rank, each by part.

    host: the most bytes of host memory that a rank uses.
    """

    seconds: Seconds
    memory: Bytes
    host: int = 0


def room(machine: Machine, rates: Values | None = None) -> float:
    """Return the bytes that a rank may reserve on one GPU before the allocator begins to retry.

    rates: by default the known rates of the course's own model.
    """
    return (known(COURSE.name).values_of() if rates is None else rates).limit * machine.memory


def predict(
    config: Config | Structure,
    machine: Machine,
    layout: Layout,
    profile: Profile = COURSE,
    rates: Rates | None = None,
    seq: int | None = None,
) -> Prediction:
    """Predict the seconds and bytes of a step of `layout`.

    rates: rates of that profile, with origin and uncertainty; by default `known`.
    seq: tokens of a sequence, by default the model's longest.

    Raises ValueError for layers that the stages cannot share, for heads or experts that cannot be
    cut or distributed so, and for rates of another profile.
    """
    seq = config.seq if seq is None else seq
    check_whole(seq=seq)
    job = Job(config, machine, layout, profile, seq)
    return of_job(job, rates_of(profile, rates).values_of())


def of_job(job: Job, rates: Values, held: tuple[Bytes, Bytes] | None = None) -> Prediction:
    """Predict the seconds and bytes of a step of `job`. Raises ValueError as `predict` does.

    held: the job's `first_and_fullest`, if the caller has computed it already.
    """
    check_job(job)
    # `limit`, beyond which a step takes longer, was fitted on runs that recorded rank 0 alone.
    first, fullest = first_and_fullest(job, rates) if held is None else held
    return Prediction(seconds(job, rates, first.needed), fullest, on_host(job))


def first_rank(job: Job, rates: Values) -> float:
    """Return the bytes that rank 0 (first stage) reserves. Raises ValueError as `predict` does."""
    check_job(job)
    return footprint(job, rates).reserved


def rates_of(profile: Profile, rates: Rates | None) -> Rates:
    """Return `rates`, or else the known rates. Raises ValueError for rates of another profile."""
    rates = known(profile.name) if rates is None else rates
    if rates.profile != profile.name:
        raise ValueError(f"rates.profile={rates.profile!r}: allowed is {profile.name!r}")
    return rates


def check_job(job: Job) -> None:
    """Raise ValueError for a layout that cannot divide the model, or that is not predicted."""
    layout = job.layout
    for name, size in cut_sizes(job.model).items():
        if name != "key_value_heads" and size % layout.tp:  # engines replicate these heads
            raise ValueError(f"tp={layout.tp}: allowed are divisors of {name}={size}")
    if job.seq % layout.cp:
        raise ValueError(f"cp={layout.cp}: allowed are divisors of seq={job.seq}")
    check_expert_degree(job.model, layout.ep)
