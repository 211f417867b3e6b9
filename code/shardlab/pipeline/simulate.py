"""A step of a schedule, in time: who works when, who waits, what is kept.

    simulate(schedule("1f1b", 8, 24), forward=18.522, backward_input=18.086,
             backward_weight=9.337, hop=0.601).bubble        # 0.2431

`simulate` predicts it and computes nothing; a `Clock` measures it in a real step, and what it noted
is drawn and judged as the same `Timeline`. The slowest stage sets the pace: `balance` cuts layers
of unequal cost so that it is as fast as it can be. The standard library alone, but for the clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from shardlab.common.arguments import check_whole

from .schedules import Action, Schedule
from .validate import before, live, result, validate

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

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

    Raises ValueError for times below 0 or infinite, for lists that are not one for each
    stage, for a schedule that does not pass `validate`.
    """
    times = {
        "F": each_stage("forward", forward, schedule),
        "I": each_stage("backward_input", backward_input, schedule),
        "W": each_stage("backward_weight", backward_weight, schedule),
    }
    times["B"] = [i + w for i, w in zip(times["I"], times["W"], strict=True)]
    hops = each_stage("hop", hop, schedule)
    validate(schedule)
    ends: dict[tuple[int, Action], float] = {}
    spans: list[list[Span]] = [[] for _ in schedule.orders]
    # Every round, each stage goes on as far as what it needs has an end. Rounds that get nowhere
    # cannot be: a valid schedule has no deadlock.
    # From first to last, and back: so a round takes a pass through all stages.
    turn = list(enumerate(schedule.orders))
    while any(len(spans[s]) < len(order) for s, order in turn):
        known = len(ends)
        for stage, order in turn:
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
        turn.reverse()
    return Timeline(schedule, tuple(map(tuple, spans)))


def each_stage(name: str, given: Times, schedule: Schedule) -> list[float]:
    """Return `given` for every stage. Raises ValueError for lists that are not one for each."""
    if isinstance(given, Sequence) and not isinstance(given, str):
        values = list(given)
        if len(values) != schedule.stages:
            raise ValueError(
                f"{name} has {len(values)} values: allowed are one for all, or one for each of "
                f"{schedule.stages} stages"
            )
    else:
        values = [given] * schedule.stages
    for value in values:
        if not 0 <= value < math.inf:
            raise ValueError(f"{name}={value!r}: allowed are numbers from 0")
    return values


def balance(costs: Sequence[float], parts: int) -> list[int]:
    """How many layers in a row each of `parts` gets, so that the most expensive part is cheapest.

    costs: of each layer, in any unit. Where several ways are equally good, the parts come out as
    equal as possible, and larger ones first, because the last part has the loss beside its layers.

    Dynamic programming: the best cut of the first i layers into k parts is a best cut of the first
    j < i into k - 1 parts, and one part more; parts · layers² steps.

    Raises ValueError for costs below 0 or not finite, and for fewer layers than parts.
    """
    check_whole(1, len(costs), parts=parts)
    # Whole numbers, in a unit that fits all: rounded sums would tell equal ways apart, and so would
    # the rounding of 4/7 to a float. So costs are the nearest simple shares of the largest one.
    largest = max(costs) or 1
    exact = [Fraction(cost / largest).limit_denominator(10**6) for cost in costs]
    unit = math.lcm(*(cost.denominator for cost in exact))
    upto = [0, *accumulate(int(cost * unit) for cost in exact)]  # the cost of the first i layers
    many = range(len(upto))
    # Of the best cut of the first i layers, its largest part.
    most: list[float] = [0, *[math.inf] * len(costs)]
    for _ in range(parts):
        most = [
            min((max(most[j], upto[i] - upto[j]) for j in range(i)), default=math.inf) for i in many
        ]
    # Once more among the cuts whose parts all stay below that: the least sum of squares is the most
    # even one. Sizes are kept negative, so that of equals the first part with more layers wins.
    limit = most[-1]
    even: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    for _ in range(parts):
        even = {
            i: min((even[j][0] + (upto[i] - upto[j]) ** 2, [*even[j][1], j - i]) for j in fits)
            for i in many
            if (fits := [j for j in range(i) if j in even and upto[i] - upto[j] <= limit])
        }
    return [-size for size in even[len(costs)][1]]


class Clock:
    """Notes begin and end of passes, in seconds since a moment that all ranks share.

    That moment is the end of a barrier, which ranks leave within a fraction of a millisecond. On a
    GPU the times are those of the stream, where the work is done, and not of the calls.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup):
        import torch  # here, so that who only simulates does not have to load it

        self.torch, self.device, self.group = torch, device, group
        self._noted: list[tuple[Action, Any, Any]] = []

    def start(self) -> None:
        """Begin to count, all ranks at once."""
        self._idle()
        self.torch.distributed.barrier(group=self.group)
        self._noted = []
        self._start = self._now()

    @contextmanager
    def __call__(self, action: Action) -> Iterator[None]:
        """Note the time that passes inside."""
        begin = self._now()
        yield
        self._noted.append((action, begin, self._now()))

    def spans(self) -> list[Span]:
        """What was noted since `start`."""
        self._idle()
        return [Span(*a, self._seconds(begin), self._seconds(end)) for a, begin, end in self._noted]

    def _idle(self) -> None:
        if self.device.type != "cpu":
            self.torch.get_device_module(self.device).synchronize(self.device)

    def _now(self) -> Any:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = self.torch.get_device_module(self.device).Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, moment: Any) -> float:
        if self.device.type == "cpu":
            return moment - self._start
        return self._start.elapsed_time(moment) / 1e3
