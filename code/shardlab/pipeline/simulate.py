"""A step of a schedule, in time: who works when, who waits, what is kept. Nothing is computed.

    simulate(schedule("1f1b", 8, 24), forward=18.522, backward_input=18.086,
             backward_weight=9.337, hop=0.601).bubble        # 0.2431

The standard library alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import NamedTuple

from .actions import Action, Schedule
from .validate import before, live, result, validate

Times = float | Sequence[float]  # one for all stages, or one for each


class Span(NamedTuple):
    """A pass and its time, in whatever unit was given; a measured one is in seconds."""

    kind: str  # F, B, I or W
    microbatch: int
    chunk: int
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When every stage did what: simulated, or measured in a real run."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]  # by stage, in order

    @cached_property
    def cost(self) -> float:
        """What the step takes: the longest any stage takes from its first begin to its last end.

        The convention of the zero bubble paper (arXiv 2401.10241, Table 5): a stage that began
        late may go on with the next step late, so the slant of the pipeline is no loss.
        """
        return max(spans[-1].end - spans[0].begin for spans in self.spans)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """By stage, the time that it computes."""
        return tuple(sum(span.end - span.begin for span in spans) for spans in self.spans)

    @cached_property
    def bubble(self) -> float:
        """Share of the cost that a stage, on average, does not compute.

        (cost - m(F+B+W)) / cost for equal stages, which is the paper's bubble rate.
        """
        return 1 - sum(self.busy) / (len(self.busy) * self.cost) if self.cost else 0.0

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """By stage, most live activations, in micro-batches of a whole stage: see `live`."""
        return live(self.schedule)


def simulate(
    schedule: Schedule,
    forward: Times = 1.0,
    backward_input: Times = 1.0,
    backward_weight: Times = 1.0,
    hop: Times = 0.0,
) -> Timeline:
    """The timeline of `schedule` when every pass and every message takes the time given.

    Times of a micro-batch's passes through a whole stage, a number for all stages or one for each;
    a chunk takes 1/v of it, a whole backward both of its parts. `hop` is what a message takes from
    a stage to another; while it travels, both go on. A pass begins when its stage is free and what
    it needs has come.

    Raises ValueError for times below 0 or beyond all measure, for lists that are not one for each
    stage, for a schedule that does not pass `validate`.
    """
    times = {
        "F": _each("forward", forward, schedule),
        "I": _each("backward_input", backward_input, schedule),
        "W": _each("backward_weight", backward_weight, schedule),
    }
    times["B"] = [i + w for i, w in zip(times["I"], times["W"], strict=True)]
    hops = _each("hop", hop, schedule)
    validate(schedule)
    ends: dict[tuple[int, Action], float] = {}
    spans: list[list[Span]] = [[] for _ in schedule.orders]
    # Every round, each stage goes on as far as what it needs has an end. Rounds that get nowhere
    # cannot be: a valid schedule has no deadlock.
    while any(len(spans[s]) < len(order) for s, order in enumerate(schedule.orders)):
        known = len(ends)
        for stage, order in enumerate(schedule.orders):
            done = spans[stage]
            while len(done) < len(order):
                action = order[len(done)]
                needs = before(schedule, stage, action)
                if any(need not in ends for need in needs):
                    break
                come = [ends[need] + (hops[need[0]] if need[0] != stage else 0) for need in needs]
                begin = max([done[-1].end if done else 0, *come])
                end = begin + times[action.kind][stage] / schedule.chunks
                ends[stage, result(action)] = end
                done.append(Span(*action, begin, end))
        assert len(ends) > known
    return Timeline(schedule, tuple(map(tuple, spans)))


def _each(name: str, given: Times, schedule: Schedule) -> list[float]:
    """`given` for every stage. Raises ValueError."""
    if isinstance(given, Sequence) and not isinstance(given, str):
        values = list(given)
        if len(values) != schedule.stages:
            raise ValueError(
                f"{name} has {len(values)} values: allowed are one for all, or one for each of "
                f"{schedule.stages} stages"
            )
    else:
        values = [given] * schedule.stages
    least, most = 1e-100, 1e100  # sums and quotients of such times are numbers as well
    for value in values:
        number = isinstance(value, Real) and not isinstance(value, bool)
        if not number or not (value == 0 or least <= value <= most):
            allowed = f"numbers from 0, above it from {least:g} to {most:g}"
            raise ValueError(f"{name}={value!r}: allowed are {allowed}")
    return values
