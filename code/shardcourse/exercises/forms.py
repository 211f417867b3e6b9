"""Forms of exercises: a number, blanks to fill in, a table of cases, a function on ranks.

Each form is a call that registers an exercise: its name, the right answer, the message for a right
answer, and well-known mistakes, each with a sentence that helps. An exercise that fits no form is
a function under `exercise`, built from `called`, `run_answer`, `same` and `Number`.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardcourse.exercises import Wrong, exercise
from shardcourse.exercises.messages import Messages, Posted, stuck
from shardlab import ranks
from shardlab.measure import count

PATIENCE = 10.0  # seconds, for runs that take milliseconds: a longer run never ends
_WAITS = (
    "Somebody waits for what nobody sends, or sends what nobody receives. Of two ranks, one has to "
    "send first and the other to receive first, or both do both at once: ranks.exchange."
)


def called(answer: Callable[..., Any], *args: Any, asked: str = "Your function") -> Any:
    """Call the reader's function; turn an exception into a Wrong that names it."""
    try:
        return answer(*args)
    except Exception as error:
        raise Wrong(f"{asked} raised {type(error).__name__}: {error}") from None


# Exercises with one number or with several numbers.


@dataclass(frozen=True)
class Number:
    """Right number, up to a relative difference of `rel`, and mistaken ones with explanations.

    A factor of a thousand, a million or a billion is explained without an entry in `wrong`.
    """

    right: float
    unit: str = ""
    wrong: Mapping[float, str] = field(default_factory=dict)
    rel: float = 0.0

    def judge(self, answer: Any) -> None:
        """Raise Wrong unless `answer` is right."""
        if isinstance(answer, bool) or not isinstance(answer, int | float):
            of = f" of {self.unit}" if self.unit else ""
            raise Wrong(f"The answer should be a number{of}, not {answer!r}.")
        if math.isclose(answer, self.right, rel_tol=self.rel, abs_tol=0.0):
            return
        near = max(self.rel, 1e-9)
        for wrong, sentence in self.wrong.items():
            if math.isclose(answer, wrong, rel_tol=near):
                raise Wrong(sentence)
        for k in (3, 6, 9) if self.unit else ():
            if any(math.isclose(answer * 10.0**n, self.right, rel_tol=near) for n in (k, -k)):
                raise Wrong(f"Right but for a factor of 10^{k}: the unit is {self.unit}.")
        side = "large" if answer > self.right else "small"
        raise Wrong(f"{answer:,} {self.unit}".rstrip() + f" is too {side}.")


def number(
    name: str,
    right: float,
    unit: str = "",
    *,
    says: str,
    wrong: Mapping[float, str],
    rel: float = 0.0,
) -> None:
    """Register an exercise whose answer is a number (`wrong`: mistaken value -> sentence)."""
    one = Number(right, unit, wrong, rel)

    def judge(answer: Any) -> str:
        one.judge(answer)
        return says

    exercise(name, (f"{value:,g}: {words}" for value, words in wrong.items()))(judge)


def blanks(
    name: str,
    right: Mapping[str, Any],
    *,
    says: str,
    wrong: Mapping[tuple[str, Hashable], str] | None = None,
    otherwise: str = "It is another.",
) -> None:
    """Register an exercise whose answer is a dictionary: blank -> right value or `Number`.

    A tuple with the values in this order is accepted, too. wrong: (blank, value) -> sentence;
    otherwise: the sentence for any other wrong value.
    """

    def judge(answer: Any) -> str:
        if isinstance(answer, tuple) and len(answer) == len(right):
            answer = dict(zip(right, answer, strict=True))
        if not isinstance(answer, Mapping) or set(answer) != set(right):
            raise Wrong(f"The answer has {len(right)} parts: {', '.join(map(repr, right))}.")
        for blank, want in right.items():
            given = answer[blank]
            if given is Ellipsis or (given is None and want is not None):
                raise Wrong(f"There is no answer for {blank!r} yet.")
            if isinstance(want, Number):
                try:
                    want.judge(given)
                except Wrong as error:
                    raise Wrong(f"{blank!r}: {error}") from None
            elif given != want:
                known = wrong or {}
                hint = known.get((blank, given)) if isinstance(given, Hashable) else None
                raise Wrong(f"{blank!r}: not {given!r}. {hint or otherwise}")
        return says

    told = (f"{blank!r}, {value!r}: {words}" for (blank, value), words in (wrong or {}).items())
    exercise(name, told)(judge)


# A table of cases.


def close(rel: float) -> Callable[[Any, Any], bool]:
    """Return a function that returns True if two numbers differ by at most `rel`."""
    return lambda a, b: math.isclose(a, b, rel_tol=rel)


def cases(
    name: str,
    calls: Sequence[Any] | Callable[[], Sequence[Any]],
    right: Callable[..., Any] | None = None,
    *,
    says: str,
    mistakes: Mapping[str, Callable[..., Any]] | None = None,
    why: Callable[[tuple[Any, ...], Any, Any], str] | None = None,
    equal: Callable[[Any, Any], bool] = operator.eq,
    call: Callable[..., Any] | None = None,
) -> None:
    """Register an exercise whose answer is a function, compared with a reference case by case.

    calls: the arguments of each case; without `right`, (arguments, right value, sentence that
    helps). mistakes: sentence -> function that makes a well-known mistake; the sentence is shown if
    all values match. why: returns the sentence for the first wrong case, from its arguments, value
    and right value, in place of "Right is …". call: computes a value from answer and arguments.
    """
    slips = mistakes or {}

    def alike(value: Any, other: Any) -> bool:
        if value is None or other is None or isinstance(value, Wrong):
            return value is other
        try:
            return bool(equal(value, other))
        except Exception:  # `equal` failed: the value cannot be compared with a right one
            return False

    def asked(args: tuple[Any, ...]) -> str:
        words = ", ".join(map(_short, args))
        return f"{name}, tried with {words}," if call else f"{name}({words})"

    def judge(answer: Any) -> str:
        if not callable(answer):
            raise Wrong(f"The answer should be a function, not {answer!r}.")
        table = calls() if callable(calls) else calls
        rows = [(args, right(*args), "") for args in table] if right else list(table)
        found: list[Any] = []
        for args, *_ in rows:
            try:
                given = copy.deepcopy(args)  # the answer may change its arguments
                run = partial(call, answer) if call else answer
                found.append(called(run, *given, asked=asked(args)))
            except Wrong as wrong:
                found.append(wrong)
        if all(value is None for value in found) and any(want is not None for _, want, _ in rows):
            raise Wrong(f"{asked(rows[0][0])} returned None: does it end in `return`?")
        for (args, want, words), value in zip(rows, found, strict=True):
            if isinstance(value, Wrong):
                raise value
            text = f"{asked(args)} gives {_short(value)}"
            if not alike(value, want):
                each = [(v, row[0]) for v, row in zip(found, rows, strict=True)]
                made = (s for s, how in slips.items() if all(alike(v, how(*a)) for v, a in each))
                right_is = why(args, value, want) if why else f"Right is {_short(want)}."
                raise Wrong(f"{text}. {next(made, words) or right_is}")
        return says

    exercise(name, slips)(judge)


def _short(value: Any) -> str:
    """Return the value's repr on one line, cut to 200 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 200 else f"{text[:199]}…"


# Functions on ranks.

Each = Tensor | Sequence[Tensor]  # one tensor for every rank, or a sequence with one per rank


@dataclass(frozen=True)
class Part:
    """Value that a rank returns: its name, the right value, and the values of known mistakes."""

    what: str
    right: Each
    mistakes: Mapping[str, Each] = field(default_factory=dict)
    tolerance: float = 0.0  # largest absolute difference that is still right


@dataclass(frozen=True)
class Seen:
    """Record of a rank's run: what it sent, its messages in order, and `work`'s further results."""

    sent: count.Traffic
    posted: list[Posted]
    more: tuple[Any, ...]


@dataclass(frozen=True)
class Trial:
    """One run: the arguments of each rank, or just the number of ranks, and the right values."""

    parts: Sequence[Part]
    given: Sequence[tuple[Any, ...]] = ()
    size: int = 0


Rule = Callable[[list[Seen]], str]  # returns how the ranks broke the rule, "" if they kept it


def on_ranks(
    name: str,
    settings: Iterable[Any],
    *,
    says: str,
    rules: Sequence[Rule] = (),
    work: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Trial]], Callable[..., Trial]]:
    """Register an exercise whose answer runs on ranks and is compared with one process.

    The decorated function makes the trial of a setting. A rank calls `answer(*given, group)`, or
    `work(answer, *setting)` if there is `work`: it returns the trial's values, followed by further
    results for the `rules`, or raises Wrong. rules: check how the ranks computed the values.
    """

    def register(trial_of: Callable[..., Trial]) -> Callable[..., Trial]:
        def judge(answer: Any) -> str:
            for setting in settings:
                chosen = setting if isinstance(setting, tuple) else (setting,)
                trial = trial_of(*chosen)
                seen = _tried(answer, trial, work, chosen)
                for rule in rules:
                    if words := rule(seen):
                        raise Wrong(words)
            return says

        exercise(name)(judge)
        return trial_of

    return register


def _tried(
    answer: Any, trial: Trial, work: Callable[..., Any] | None, setting: tuple[Any, ...]
) -> list[Seen]:
    """Run a trial and return the ranks' records; Wrong unless the values are right."""
    wanted = len(trial.parts)

    def run() -> tuple[Any, Seen]:
        with count.record_traffic() as sent, Messages() as messages:
            try:
                if work:
                    found = work(answer, *setting)
                else:
                    mine = [_here(x) for x in trial.given[dist.get_rank()]]
                    found = answer(*mine, dist.group.WORLD)
            except Wrong as wrong:
                return wrong, Seen(sent, messages.log, ())
        values, more = ((found,), ()) if wanted == 1 else (found, ())
        if work and isinstance(found, tuple):
            values, more = found[:wanted], found[wanted:]
        return _back(values), Seen(sent, messages.log, more)

    size = trial.size or len(trial.given)
    results = run_answer(run, size)
    for rank, (values, _) in enumerate(results):
        if isinstance(values, Wrong):
            raise values
        if not isinstance(values, tuple | list) or len(values) != wanted:
            names = " and ".join(part.what for part in trial.parts)
            got = "nothing" if values is None else f"a {type(values).__name__}"
            raise Wrong(f"Rank {rank} returned {got}; it should return {names}.")
    for i, part in enumerate(trial.parts):
        mistakes = {words: _each(x, size) for words, x in part.mistakes.items()}
        got = [values[i] for values, _ in results]
        same(got, _each(part.right, size), part.what, part.tolerance, mistakes)
    return [seen for _, seen in results]


def _each(value: Each, size: int) -> Sequence[Tensor]:
    return [value] * size if isinstance(value, Tensor) else value


def _here(thing: Any) -> Any:
    if isinstance(thing, Tensor):
        return thing.to(ranks.device()).clone()
    return copy.deepcopy(thing)


def _back(values: Any) -> Any:
    if isinstance(values, tuple | list):
        return [x.detach().cpu() if isinstance(x, Tensor) else x for x in values]
    return values


def differentiate(
    answer: Callable[..., Any], given: Sequence[Tensor], dy: Tensor
) -> tuple[Any, ...]:
    """Call the answer on a rank and send `dy` backward; return its result and `given`'s gradients.

    All gradients are None if the result has no graph or another shape than dy.
    """
    given = [x.detach().clone().requires_grad_() for x in given]
    y = answer(*given, dist.group.WORLD)
    if isinstance(y, Tensor) and y.requires_grad and y.shape == dy.shape:
        y.backward(dy)
    return y, *(x.grad for x in given)


def run_answer(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float | None = None
) -> list[Any]:
    """Run code that calls the reader's function on ranks; a failure becomes a helpful Wrong."""
    timeout = timeout or PATIENCE
    try:
        return ranks.run(fn, world_size, *args, timeout=timeout)
    except ranks.RankError as error:
        waits = "each waits for another" in str(error) or f"within {timeout:g} s" in str(error)
        more = f"\n{_WAITS}" if waits else ""
        raise Wrong(f"With {world_size} ranks, {error}{more}") from None


def same(
    got: Sequence[Any],
    want: Sequence[Tensor],
    what: str = "the result",
    tolerance: float = 0.0,
    hints: Mapping[str, Sequence[Tensor]] | None = None,
) -> None:
    """Compare one tensor per rank with the reference; Wrong names the first rank that differs.

    tolerance: largest absolute difference that is still right. hints: sentence -> the values that a
    well-known mistake gives; the sentence is added if `got` equals these values.
    """
    got = [
        _scalar(mine) if right.ndim == 0 else mine for mine, right in zip(got, want, strict=True)
    ]
    for rank, (mine, right) in enumerate(zip(got, want, strict=True)):
        if mine is None and what.startswith("the gradient"):
            raise Wrong(
                f"Rank {rank} has no {what[4:]}. Collectives know nothing of autograd: write a "
                "torch.autograd.Function with a backward, for all that the result is made of."
            )
        if not isinstance(mine, Tensor):
            given = "None" if mine is None else f"a {type(mine).__name__}"
            raise Wrong(f"Rank {rank} returned {given}; {what} should be a tensor.")
        if mine.shape != right.shape:
            shapes = f"{tuple(mine.shape)} instead of {tuple(right.shape)}"
            raise Wrong(f"On rank {rank} {what} has the shape {shapes}.")
        if not right.numel():
            continue
        gap = (mine.double() - right.double()).abs().max().item()
        if not gap <= tolerance:
            text = (
                f"Rank {rank} is the first whose values differ: {what} is off by up to {gap:.3g}."
            )
            if not math.isfinite(gap):
                text += " Is an exponential too large for any number, or a softmax over nothing?"
            raise Wrong(text + _hint(got, tolerance, hints or {}))


def _scalar(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return torch.tensor(float(value), dtype=torch.float64)
    return value.reshape(()) if isinstance(value, Tensor) and value.numel() == 1 else value


def _hint(got: Sequence[Any], tolerance: float, hints: Mapping[str, Sequence[Tensor]]) -> str:
    for sentence, mistake in hints.items():
        if all(
            isinstance(a, Tensor)
            and a.shape == b.shape
            and torch.allclose(a.double(), b.double(), rtol=0, atol=tolerance)
            for a, b in zip(got, mistake, strict=True)
        ):
            return f" {sentence}"
    return ""


# Rules for how right values were computed.


def calls_at_most(most: int, words: str) -> Rule:
    """Return a rule: no rank calls more than `most` collectives."""

    def rule(seen: list[Seen]) -> str:
        for rank, one in enumerate(seen):
            if (calls := sum(one.sent.calls.values())) > most:
                names = " and ".join(one.sent.collectives)
                few = f", {calls} collectives where {most} will do" if most else " of torch"
                return f"The values are right, but rank {rank} calls {names}{few}: {words}"
        return ""

    return rule


def bytes_at_most(most: Callable[[int], int], words: str) -> Rule:
    """Return a rule: no rank sends more bytes than `most(number of ranks)`."""

    def rule(seen: list[Seen]) -> str:
        enough = most(len(seen))
        for rank, one in enumerate(seen):
            if (sent := sum(one.sent.payload.values()) + one.sent.bytes) > enough:
                return (
                    f"The values are right. But with {len(seen)} ranks, rank {rank} sends {sent} "
                    f"bytes, and {enough} are enough: {words}"
                )
        return ""

    return rule


def nobody_waits(seen: list[Seen]) -> str:
    """Return a message if the ranks' messages would deadlock with nccl, although not with gloo."""
    if not stuck([one.posted for one in seen]):
        return ""
    return (
        f"The values are right, with gloo. With nccl it hangs, on {len(seen)} ranks: the first "
        "message of two ranks stops both until they meet, and here each of them has stopped for "
        "another one. Let even ranks send first and odd ones receive first, or begin both at once: "
        "ranks.exchange, or dist.batch_isend_irecv."
    )
