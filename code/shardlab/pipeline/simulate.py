"""The timeline of one step of a schedule: busy and idle times, and live activations.

    simulate(schedule("1f1b", 8, 24), forward=18.522, backward_input=18.086,
             backward_weight=9.337, hop=0.601).bubble        # 0.2431

`simulate` predicts a step without computing; a `Clock` measures a real step, and its times make the
same `Timeline`. The slowest stage sets the pace: `balance_layers` cuts layers of unequal cost so
that the slowest stage is as fast as possible. Only the clock needs torch.
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

from shardlab.common.arguments import check_integer

from .schedules import Action, Schedule
from .validate import count_peak_activations, find_inputs, result_key, validate

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

Times = float | Sequence[float]  # one time for all stages, or one for each


class Span(NamedTuple):
    """A pass and its time, in the unit of the given times; measured times are in seconds."""

    kind: str  # F, B, I or W
    microbatch: int
    chunk: int
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The begin and end of every pass of every stage, simulated or measured."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]  # by stage, in order

    @cached_property
    def step_time(self) -> float:
        """The longest time of any stage from its first begin to its last end.

        The convention of the zero bubble paper (arXiv 2401.10241, Table 5): a stage that began late
        may also begin the next step late, so its late start is no loss.
        """
        return max(spans[-1].end - spans[0].begin for spans in self.spans)

    @cached_property
    def busy_times(self) -> tuple[float, ...]:
        """The time that each stage computes."""
        return tuple(sum(span.end - span.begin for span in spans) for spans in self.spans)

    @cached_property
    def bubble(self) -> float:
        """The share of the step time during which a stage, on average, does not compute.

        For equal stages the paper's bubble rate, (cost - m(F+B+W)) / cost.
        """
        total = len(self.spans) * self.step_time
        return 1 - sum(self.busy_times) / total if total else 0.0

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """The result of `count_peak_activations` for this schedule."""
        return count_peak_activations(self.schedule)


def simulate(
    schedule: Schedule,
    forward: Times = 1.0,
    backward_input: Times = 1.0,
    backward_weight: Times = 1.0,
    hop: Times = 0.0,
) -> Timeline:
    """Return the timeline of `schedule` for the given times of passes and messages.

    Times are for a micro-batch's passes through a whole stage, one number for all stages or one for
    each; a chunk takes 1/v of them, a whole backward the sum of its two halves. `hop` is the time
    of a message between stages, during which both go on. A pass begins once its stage is free and
    its inputs have arrived.

    Raises ValueError for times below 0 or infinite, for lists that are not one per stage, and for a
    schedule that does not pass `validate`.
    """
    times = {
        "F": expand_per_stage("forward", forward, schedule),
        "I": expand_per_stage("backward_input", backward_input, schedule),
        "W": expand_per_stage("backward_weight", backward_weight, schedule),
    }
    times["B"] = [i + w for i, w in zip(times["I"], times["W"], strict=True)]
    hops = expand_per_stage("hop", hop, schedule)
    validate(schedule)
    ends: dict[tuple[int, Action], float] = {}
    spans: list[list[Span]] = [[] for _ in schedule.orders]
    # In every round, each stage advances as long as the ends of its inputs are known. No round
    # fails to advance, because a valid schedule has no deadlock. Rounds go from the first stage to
    # the last or back, so one round can take a pass through all stages.
    turn = list(enumerate(schedule.orders))
    while any(len(spans[s]) < len(order) for s, order in turn):
        known = len(ends)
        for stage, order in turn:
            done = spans[stage]
            while len(done) < len(order):
                action = order[len(done)]
                needs = find_inputs(schedule, stage, action)
                if any(need not in ends for need in needs):
                    break
                arrivals = [
                    ends[need] + (hops[need[0]] if need[0] != stage else 0) for need in needs
                ]
                begin = max([done[-1].end if done else 0, *arrivals])
                end = begin + times[action.kind][stage] / schedule.chunks
                ends[stage, result_key(action)] = end
                done.append(Span(*action, begin, end))
        assert len(ends) > known
        turn.reverse()
    return Timeline(schedule, tuple(map(tuple, spans)))


def expand_per_stage(name: str, given: Times, schedule: Schedule) -> list[float]:
    """Return one time per stage. Raises ValueError for lists of another length."""
    if isinstance(given, Sequence) and not isinstance(given, str):
        values = list(given)
        if len(values) != schedule.stages:
            what = f"must have one for all stages, or one for each of {schedule.stages}"
            raise ValueError(f"{name} has {len(values)} values: {what}")
    else:
        values = [given] * schedule.stages
    for value in values:
        if not 0 <= value < math.inf:
            raise ValueError(f"{name}={value!r}: must be finite and at least 0")
    return values


def balance_layers(costs: Sequence[float], parts: int) -> list[int]:
    """Return the number of consecutive layers per part that minimises the most expensive part.

    costs: per layer, in any unit. Among equally good cuts the parts are as equal as possible, with
    larger ones first, because the last part computes the loss besides its layers.

    Dynamic programming: the best cut of the first i layers into k parts is a best cut of the first
    j < i into k - 1 parts, and one part more; parts · layers² steps.

    Raises ValueError for costs below 0 or not finite, and for fewer layers than parts.
    """
    check_integer(1, len(costs), parts=parts)
    # Integers in a common unit: rounded sums would make equal cuts differ, and so would the
    # rounding of 4/7 to a float. So costs are the nearest simple fractions of the largest one.
    largest = max(costs) or 1
    exact = [Fraction(cost / largest).limit_denominator(10**6) for cost in costs]
    unit = math.lcm(*(cost.denominator for cost in exact))
    upto = [0, *accumulate(int(cost * unit) for cost in exact)]  # the cost of the first i layers
    many = range(len(upto))
    # The largest part of the best cut of the first i layers.
    most: list[float] = [0, *[math.inf] * len(costs)]
    for _ in range(parts):
        most = [
            min((max(most[j], upto[i] - upto[j]) for j in range(i)), default=math.inf) for i in many
        ]
    # Once more, among the cuts whose parts all stay within this limit: the least sum of squares is
    # the most even one. Sizes are negative, so among equal sums more layers come first.
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
    """A clock for the begin and end of passes, in seconds since a moment that all ranks share.

    This moment is the end of a barrier, which ranks leave within a fraction of a millisecond. On a
    GPU the times are those of the work on the stream, not of the calls.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup):
        import torch  # imported here, so that simulations need no torch

        self.torch, self.device, self.group = torch, device, group
        self._recorded: list[tuple[Action, Any, Any]] = []

    def restart(self) -> None:
        """Restart the clock, on all ranks at once, and drop earlier records."""
        self._synchronize_device()
        self.torch.distributed.barrier(group=self.group)
        self._recorded = []
        self._start = self._read_clock()

    @contextmanager
    def __call__(self, action: Action) -> Iterator[None]:
        """Record the time spent inside."""
        begin = self._read_clock()
        yield
        self._recorded.append((action, begin, self._read_clock()))

    def read_spans(self) -> list[Span]:
        """Return the passes recorded since `restart`."""
        self._synchronize_device()
        seconds = self._to_seconds
        return [Span(*a, seconds(begin), seconds(end)) for a, begin, end in self._recorded]

    def _synchronize_device(self) -> None:
        if self.device.type != "cpu":
            self.torch.get_device_module(self.device).synchronize(self.device)

    def _read_clock(self) -> Any:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = self.torch.get_device_module(self.device).Event(enable_timing=True)
        event.record()
        return event

    def _to_seconds(self, moment: Any) -> float:
        if self.device.type == "cpu":
            return moment - self._start
        return self._start.elapsed_time(moment) / 1e3
