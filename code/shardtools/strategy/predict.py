"""What a job will take: seconds and bytes, predicted, beside the floor that `cost` counts; and how
much memory there is for it.
"""

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
    """Seconds of a step, and bytes of the fullest rank, each in parts.

    host: bytes that a rank keeps in the host's memory, at most.
    """

    seconds: Seconds
    memory: Bytes
    host: int = 0


def room(machine: Machine, rates: Values | None = None) -> float:
    """Bytes of one GPU that a rank may reserve: beyond them the allocator begins to retry.

    rates: by default those that are known of the course's own model.
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
    """What a step of `layout` takes.

    rates: of that profile; by default `known`. Each states its origin and how sure it is.
    seq: tokens of a sequence, by default the model's longest.

    Raises ValueError for layers that the stages cannot share, heads or experts that cannot be cut
    or dealt out so, and rates of another profile.
    """
    seq = config.seq if seq is None else seq
    check_whole(seq=seq)
    job = Job(config, machine, layout, profile, seq)
    return of_job(job, rates_of(profile, rates).values_of())


def of_job(job: Job, rates: Values, held: tuple[Bytes, Bytes] | None = None) -> Prediction:
    """What a step of `job` takes. Raises ValueError as `predict` does.

    held: its `first_and_fullest`, from whoever has asked for that already.
    """
    check_job(job)
    # The limit beyond which a step takes longer was found where rank 0 alone was watched.
    first, fullest = first_and_fullest(job, rates) if held is None else held
    return Prediction(seconds(job, rates, first.needed), fullest, on_host(job))


def first_rank(job: Job, rates: Values) -> float:
    """Bytes that rank 0, which is on the first stage, reserves. Raises ValueError as `predict`."""
    check_job(job)
    return footprint(job, rates).reserved


def rates_of(profile: Profile, rates: Rates | None) -> Rates:
    """`rates`, or those that are known. Raises ValueError for those of another profile."""
    rates = known(profile.name) if rates is None else rates
    if rates.profile != profile.name:
        raise ValueError(f"rates.profile={rates.profile!r}: allowed is {profile.name!r}")
    return rates


def check_job(job: Job) -> None:
    """Raise ValueError for what cannot be cut so, or is not predicted."""
    layout = job.layout
    for name, size in cut_sizes(job.model).items():
        if name != "key_value_heads" and size % layout.tp:  # engines copy those
            raise ValueError(f"tp={layout.tp}: allowed are divisors of {name}={size}")
    if job.seq % layout.cp:
        raise ValueError(f"cp={layout.cp}: allowed are divisors of seq={job.seq}")
    check_expert_degree(job.model, layout.ep)
