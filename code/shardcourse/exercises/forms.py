"""Forms of exercises: a number, blanks to fill in, a table of cases, a function on ranks.

Each form is a call that registers an exercise: its name, the right answer, the message for a right
answer, and well-known mistakes, each with a sentence that helps. An exercise that fits no form is
a check under `add_exercise`, built from `call_answer`, `run_answer`, `compare_values` and `Number`.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardcourse.exercises import WrongAnswer, add_exercise
from shardcourse.exercises.messages import MessageBatch, MessageRecorder, has_deadlock
from shardlab import ranks
from shardlab.measure import count

TIMEOUT_S = 10.0  # seconds, for runs that take milliseconds: a longer run never ends
_DEADLOCK_HINT = (
    "A rank waits for a message that no rank sends, or sends one that no rank receives. Of two "
    "ranks, one has to send first and the other receive first, or use ranks.exchange on both."
)


def call_answer(answer: Callable[..., Any], *args: Any, subject: str = "Your function") -> Any:
    """Call the reader's function; turn an exception into a WrongAnswer that names it."""
    try:
        return answer(*args)
    except Exception as error:
        raise WrongAnswer(f"{subject} raised {type(error).__name__}: {error}") from None


# Exercises with one number or with several numbers.


@dataclass(frozen=True)
class Number:
    """Right number, up to a relative difference of `rel_tol`, and wrong numbers with hints.

    A factor of a thousand, a million or a billion, and a rounded number, need no entry in `hints`.
    """

    right: float
    unit: str = ""
    hints: Mapping[float, str] = field(default_factory=dict)
    rel_tol: float = 0.0

    def check_value(self, answer: Any) -> None:
        """Raise WrongAnswer unless `answer` is right."""
        if isinstance(answer, bool) or not isinstance(answer, int | float):
            unit = f" in {self.unit}" if self.unit else ""
            raise WrongAnswer(f"The answer should be a number{unit}, not {answer!r}.")
        if math.isclose(answer, self.right, rel_tol=self.rel_tol, abs_tol=0.0):
            return
        rel_tol = max(self.rel_tol, 1e-9)
        for wrong, hint in self.hints.items():
            if math.isclose(answer, wrong, rel_tol=rel_tol):
                raise WrongAnswer(hint)
        for n in (0, 3, -3, 6, -6, 9, -9) if self.unit else (0,):
            gap = abs(answer * 10.0**n / self.right - 1)
            if gap < max(rel_tol, 0.01):
                unit = f"Wrong by a factor of 10^{abs(n)}: the unit is {self.unit}. " if n else ""
                digits = f"It is {100 * gap:.2g} % off: is it rounded? Keep all digits."
                raise WrongAnswer(unit + digits if gap > rel_tol else unit.strip())
        side = "large" if answer > self.right else "small"
        raise WrongAnswer(f"{answer:,} {self.unit}".rstrip() + f" is too {side}.")


def add_number(
    name: str,
    right: float,
    unit: str = "",
    *,
    success: str,
    hints: Mapping[float, str],
    rel_tol: float = 0.0,
) -> None:
    """Register an exercise whose answer is a number (`hints`: wrong value -> hint)."""
    number = Number(right, unit, hints, rel_tol)

    def check_answer(answer: Any) -> str:
        number.check_value(answer)
        return success

    add_exercise(name, (f"{value:,g}: {hint}" for value, hint in hints.items()))(check_answer)


def add_blanks(
    name: str,
    right: Mapping[str, Any],
    *,
    success: str,
    hints: Mapping[tuple[str, Hashable], str] | None = None,
    default_hint: str = "Another value is right.",
) -> None:
    """Register an exercise whose answer is a dictionary: blank -> right value or `Number`.

    A tuple with the values in this order is accepted, too. hints: (blank, value) -> hint;
    default_hint: the hint for any other wrong value.
    """

    def check_answer(answer: Any) -> str:
        if isinstance(answer, tuple) and len(answer) == len(right):
            answer = dict(zip(right, answer, strict=True))
        if not isinstance(answer, Mapping) or set(answer) != set(right):
            raise WrongAnswer(f"The answer has {len(right)} parts: {', '.join(map(repr, right))}.")
        for blank, want in right.items():
            given = answer[blank]
            if given is Ellipsis or (given is None and want is not None):
                raise WrongAnswer(f"There is no answer for {blank!r} yet.")
            if isinstance(want, Number):
                try:
                    want.check_value(given)
                except WrongAnswer as error:
                    raise WrongAnswer(f"{blank!r}: {error}") from None
            elif given != want:
                known = hints or {}
                hint = known.get((blank, given)) if isinstance(given, Hashable) else None
                raise WrongAnswer(f"{blank!r}: not {given!r}. {hint or default_hint}")
        return success

    mistakes = (f"{blank!r}, {value!r}: {hint}" for (blank, value), hint in (hints or {}).items())
    add_exercise(name, mistakes)(check_answer)


# A table of cases.


def make_isclose(rel_tol: float) -> Callable[[Any, Any], bool]:
    """Return a function that returns True if two numbers differ by at most `rel_tol`."""
    return lambda a, b: math.isclose(a, b, rel_tol=rel_tol)


def add_cases(
    name: str,
    calls: Sequence[Any] | Callable[[], Sequence[Any]],
    right: Callable[..., Any] | None = None,
    *,
    success: str,
    mistakes: Mapping[str, Callable[..., Any]] | None = None,
    explain: Callable[[tuple[Any, ...], Any, Any], str] | None = None,
    equal: Callable[[Any, Any], bool] = operator.eq,
    call: Callable[..., Any] | None = None,
) -> None:
    """Register an exercise whose answer is a function, compared with a reference case by case.

    calls: the arguments of each case; without `right`, (arguments, right value, hint).
    mistakes: hint -> function that makes a well-known mistake; the hint is shown if all values
    match. explain: returns the sentence for the first wrong case, from its arguments, value and
    right value, in place of "Right is …". call: computes a value from answer and arguments.
    """
    known = mistakes or {}

    def is_equal(value: Any, other: Any) -> bool:
        if value is None or other is None or isinstance(value, WrongAnswer):
            return value is other
        try:
            return bool(equal(value, other))
        except Exception:  # `equal` failed: the value cannot be compared with a right one
            return False

    def format_call(args: tuple[Any, ...]) -> str:
        words = ", ".join(map(_format_short, args))
        return f"{name}, called with {words}," if call else f"{name}({words})"

    def check_answer(answer: Any) -> str:
        if not callable(answer):
            raise WrongAnswer(f"The answer should be a function, not {answer!r}.")
        table = calls() if callable(calls) else calls
        rows = [(args, right(*args), "") for args in table] if right else list(table)
        found: list[Any] = []
        for args, *_ in rows:
            try:
                given = copy.deepcopy(args)  # the answer may change its arguments
                run = partial(call, answer) if call else answer
                found.append(call_answer(run, *given, subject=format_call(args)))
            except WrongAnswer as wrong:
                found.append(wrong)
        if all(value is None for value in found) and any(want is not None for _, want, _ in rows):
            raise WrongAnswer(f"{format_call(rows[0][0])} returned None: does it end in `return`?")
        for (args, want, hint), value in zip(rows, found, strict=True):
            if isinstance(value, WrongAnswer):
                raise value
            text = f"{format_call(args)} gives {_format_short(value)}"
            if not is_equal(value, want):
                pairs = [(v, row[0]) for v, row in zip(found, rows, strict=True)]
                made = (h for h, f in known.items() if all(is_equal(v, f(*a)) for v, a in pairs))
                words = f"Right is {_format_short(want)}."
                words = explain(args, value, want) if explain else words
                raise WrongAnswer(f"{text}. {next(made, hint) or words}")
        return success

    add_exercise(name, known)(check_answer)


def _format_short(value: Any) -> str:
    """Return the value's repr on one line, cut to 200 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 200 else f"{text[:199]}…"


# Functions on ranks.

PerRank = Tensor | Sequence[Tensor]  # one tensor for all ranks, or a sequence with one per rank


@dataclass(frozen=True)
class Output:
    """Value that a rank returns: its name, the right value, and the values of known mistakes."""

    name: str
    right: PerRank
    mistakes: Mapping[str, PerRank] = field(default_factory=dict)
    tolerance: float = 0.0  # largest absolute difference that is still right


@dataclass(frozen=True)
class RankRecord:
    """Record of a rank's run: its traffic, its messages in order, and further results.

    keeps_received: True if all received tensors were held at once.
    """

    traffic: count.Traffic
    message_log: list[MessageBatch]
    keeps_received: bool
    extras: tuple[Any, ...]


@dataclass(frozen=True)
class Trial:
    """One run: the arguments of each rank, or just the number of ranks, and the right values."""

    outputs: Sequence[Output]
    args: Sequence[tuple[Any, ...]] = ()
    size: int = 0


Rule = Callable[[list[RankRecord]], str]  # returns the violation, "" if there is none


def add_trials(
    name: str,
    settings: Iterable[Any],
    *,
    success: str,
    rules: Sequence[Rule] = (),
    rank_fn: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Trial]], Callable[..., Trial]]:
    """Register an exercise whose answer runs on ranks and is compared with one process.

    The decorated function makes the trial of a setting. A rank calls `answer(*args, group)`, or
    `rank_fn(answer, group, *setting)` if given, which returns the trial's outputs, followed by
    further results for the `rules`, or raises WrongAnswer. rules: check how the ranks computed the
    values. `group` is that of `create_group`.
    """

    def add_check(make_trial: Callable[..., Trial]) -> Callable[..., Trial]:
        def check_answer(answer: Any) -> str:
            for setting in settings:
                args = setting if isinstance(setting, tuple) else (setting,)
                trial = make_trial(*args)
                records = _run_trial(answer, trial, rank_fn, args)
                for rule in rules:
                    if violation := rule(records):
                        raise WrongAnswer(violation)
            return success

        add_exercise(name)(check_answer)
        return make_trial

    return add_check


def _run_trial(
    answer: Any, trial: Trial, rank_fn: Callable[..., Any] | None, setting: tuple[Any, ...]
) -> list[RankRecord]:
    """Run a trial and return the ranks' records; WrongAnswer unless the values are right."""
    num_outputs = len(trial.outputs)

    def run_on_rank() -> tuple[Any, RankRecord]:
        with count.record_traffic() as traffic, MessageRecorder() as recorder:
            try:
                with create_group() as group:
                    if rank_fn:
                        found = rank_fn(answer, group, *setting)
                    else:
                        args = [_copy_to_device(x) for x in trial.args[dist.get_rank()]]
                        found = answer(*args, group)
            except WrongAnswer as wrong:
                return wrong, RankRecord(traffic, recorder.log, False, ())
        values, extras = ((found,), ()) if num_outputs == 1 else (found, ())
        if rank_fn and isinstance(found, tuple):
            values, extras = found[:num_outputs], found[num_outputs:]
        keeps = 0 < recorder.received_bytes <= recorder.held_bytes
        return _move_to_cpu(values), RankRecord(traffic, recorder.log, keeps, extras)

    size = trial.size or len(trial.args)
    results = run_answer(run_on_rank, size)
    for rank, (values, _) in enumerate(results):
        if isinstance(values, WrongAnswer):
            raise values
        if not isinstance(values, tuple | list) or len(values) != num_outputs:
            names = " and ".join(output.name for output in trial.outputs)
            got = "nothing" if values is None else f"a {type(values).__name__}"
            raise WrongAnswer(f"Rank {rank} returned {got}; it should return {names}.")
    for i, output in enumerate(trial.outputs):
        mistakes = {hint: _list_per_rank(x, size) for hint, x in output.mistakes.items()}
        got = [values[i] for values, _ in results]
        right = _list_per_rank(output.right, size)
        compare_values(got, right, output.name, output.tolerance, mistakes)
    return [record for _, record in results]


def _list_per_rank(value: PerRank, size: int) -> Sequence[Tensor]:
    return [value] * size if isinstance(value, Tensor) else value


def _copy_to_device(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(ranks.device()).clone()
    return copy.deepcopy(value)


def _move_to_cpu(values: Any) -> Any:
    if isinstance(values, tuple | list):
        return [x.detach().cpu() if isinstance(x, Tensor) else x for x in values]
    return values


@contextmanager
def create_group() -> Iterator[dist.ProcessGroup]:
    """Yield a group of all ranks; raise WrongAnswer if the default group was used in its place."""
    group = dist.new_group()
    with count.record_traffic() as traffic:
        yield group
    outside = traffic.get_group_traffic(dist.group.WORLD)
    if outside.calls or outside.messages:
        name = next(iter(outside.calls), "send")
        raise WrongAnswer(
            f"Your {name} runs in the default group, which has all processes of a job, also those "
            "that do not call it: pass the group that your function is given."
        )


def compute_gradients(
    answer: Callable[..., Any], given: Sequence[Tensor], dy: Tensor, group: dist.ProcessGroup
) -> tuple[Any, ...]:
    """Call the answer on a rank and send `dy` backward; return its result and `given`'s gradients.

    All gradients are None if the result has no graph or another shape than dy.
    """
    given = [x.detach().clone().requires_grad_() for x in given]
    y = answer(*given, group)
    if isinstance(y, Tensor) and y.requires_grad and y.shape == dy.shape:
        y.backward(dy)
    return y, *(x.grad for x in given)


def run_answer(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float | None = None
) -> list[Any]:
    """Run code that calls the reader's function on ranks; turn a failure into a WrongAnswer."""
    timeout = timeout or TIMEOUT_S
    try:
        return ranks.run(fn, world_size, *args, timeout=timeout)
    except ranks.RankError as error:
        waits = "each waits for another" in str(error) or f"within {timeout:g} s" in str(error)
        more = f"\n{_DEADLOCK_HINT}" if waits else ""
        raise WrongAnswer(f"With {world_size} ranks, {error}{more}") from None


def compare_values(
    got: Sequence[Any],
    want: Sequence[Tensor],
    name: str = "the result",
    tolerance: float = 0.0,
    mistakes: Mapping[str, Sequence[Tensor]] | None = None,
) -> None:
    """Compare one tensor per rank with the reference; name the first rank that differs.

    tolerance: largest absolute difference that is still right. mistakes: hint -> the values that a
    well-known mistake gives; the hint is added if `got` equals these values.
    """
    got = [
        _to_scalar(mine) if right.ndim == 0 else mine for mine, right in zip(got, want, strict=True)
    ]
    for rank, (mine, right) in enumerate(zip(got, want, strict=True)):
        if mine is None and name.startswith("the gradient"):
            raise WrongAnswer(
                f"Rank {rank} has no {name[4:]}. Collectives are invisible to autograd: write a "
                "torch.autograd.Function with a backward, for every tensor that enters the result."
            )
        if not isinstance(mine, Tensor):
            given = "None" if mine is None else f"a {type(mine).__name__}"
            raise WrongAnswer(f"Rank {rank} returned {given}; {name} should be a tensor.")
        if mine.shape != right.shape:
            shapes = f"{tuple(mine.shape)} instead of {tuple(right.shape)}"
            raise WrongAnswer(f"On rank {rank} {name} has the shape {shapes}.")
        if not right.numel():
            continue
        gap = (mine.double() - right.double()).abs().max().item()
        if not gap <= tolerance:
            text = (
                f"Rank {rank} is the first whose values differ: {name} is off by up to {gap:.3g}."
            )
            if not math.isfinite(gap):
                text += " Is an exponential too large for any number, or a softmax over nothing?"
            raise WrongAnswer(text + _find_hint(got, tolerance, mistakes or {}))


def _to_scalar(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return torch.tensor(float(value), dtype=torch.float64)
    return value.reshape(()) if isinstance(value, Tensor) and value.numel() == 1 else value


def _find_hint(got: Sequence[Any], tolerance: float, mistakes: Mapping[str, Any]) -> str:
    for hint, mistake in mistakes.items():
        if all(
            isinstance(a, Tensor)
            and a.shape == b.shape
            and torch.allclose(a.double(), b.double(), rtol=0, atol=tolerance)
            for a, b in zip(got, mistake, strict=True)
        ):
            return f" {hint}"
    return ""


# Rules for how right values were computed.


def limit_calls(max_calls: int, hint: str) -> Rule:
    """Return a rule: no rank calls more than `max_calls` collectives."""

    def check_traffic(records: list[RankRecord]) -> str:
        for rank, record in enumerate(records):
            if (calls := sum(record.traffic.calls.values())) > max_calls:
                names = " and ".join(record.traffic.collectives)
                few = f", {calls} collectives where {max_calls} will do" if max_calls else ""
                return f"The values are right, but rank {rank} calls {names}{few}: {hint}"
        return ""

    return check_traffic


def limit_bytes(max_bytes: Callable[[int], int], hint: str) -> Rule:
    """Return a rule: no rank sends more bytes than `max_bytes(number of ranks)`."""

    def check_traffic(records: list[RankRecord]) -> str:
        limit = max_bytes(len(records))
        for rank, record in enumerate(records):
            if (sent := sum(record.traffic.payload.values()) + record.traffic.bytes) > limit:
                return (
                    f"The values are right. But with {len(records)} ranks, rank {rank} sends "
                    f"{sent} bytes, and {limit} are enough: {hint}"
                )
        return ""

    return check_traffic


def check_received_freed(records: list[RankRecord]) -> str:
    """Return a message if a rank of a ring of five or more kept all that it received.

    In a smaller ring this is no mistake: a rank uses one piece, sends one and receives the next.
    """
    if len(records) < 5 or not any(record.keeps_received for record in records):
        return ""
    return (
        "The values are right, but a rank keeps every piece that it receives, so in the end it "
        "holds all of them: use each piece when it arrives, and do not keep it."
    )


def check_nccl_deadlock(records: list[RankRecord]) -> str:
    """Return a message if the ranks' messages would deadlock with nccl, although not with gloo."""
    if not has_deadlock([record.message_log for record in records]):
        return ""
    return (
        f"The values are right with gloo. With nccl it hangs, on {len(records)} ranks: the first "
        "message between two ranks blocks both until it is done, and here each rank is blocked by "
        "a different one. Let even ranks send first and odd ranks receive first, or begin both "
        "directions at once: ranks.exchange, or dist.batch_isend_irecv."
    )
