"""Exercises that check themselves, on real ranks, in the page.

    check(my_broadcast)         # a function: its name is the exercise's name
    check(48, "ring_bytes")     # any other answer, with the exercise's name

A topic's exercises stand in the module of this package that has the topic's name. A verdict says
what is right or wrong in a sentence or two that help, and never shows the solution.
"""

from __future__ import annotations

import html
import importlib
import math
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardlab import ranks, show

_EXERCISES: dict[str, Callable[[Any], str | None]] = {}


class Wrong(Exception):
    """Raised by an exercise whose answer is wrong; its text is what the reader sees."""


@dataclass(frozen=True)
class Verdict:
    """What `check` found: `ok`, and a sentence or two in `message`."""

    ok: bool
    message: str

    def __repr__(self) -> str:
        return f"{'✓' if self.ok else '✗'} {self.message}"

    def _repr_html_(self) -> str:
        kind = "right" if self.ok else "wrong"
        text = html.escape(repr(self)).replace("\n", "<br>")
        return f'<p class="verdict verdict-{kind}">{text}</p>'

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/html": self._repr_html_(), "text/plain": repr(self)}


def exercise(name: str) -> Callable[[Callable[[Any], str | None]], Callable[[Any], str | None]]:
    """Register a check under the exercise's `name`, which is unique in the whole course.

    The decorated function takes the reader's answer. It returns None, or a sentence of praise that
    says what was compared, when the answer is right; it raises Wrong when it is not.
    """

    def register(judge: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
        assert name not in _EXERCISES, f"two exercises are called {name}"
        _EXERCISES[name] = judge
        return judge

    return register


def names() -> list[str]:
    """The names of all exercises of the course."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return sorted(_EXERCISES)


def check(answer: Any, exercise: str | None = None) -> Verdict:
    """Judge the reader's `answer`; `exercise` may be left out when it is a function of that name.

    Raises ValueError when there is no such exercise. A wrong answer raises nothing: the
    verdict says what is wrong.
    """
    name = exercise or getattr(answer, "__name__", None)
    known = names()
    if name not in known:
        raise ValueError(f"exercise={name!r}: allowed are {', '.join(known)}")
    try:
        if answer is None or answer is Ellipsis:
            raise Wrong("There is no answer yet: replace the dots and run the cell again.")
        verdict = Verdict(True, _EXERCISES[name](answer) or "Right.")
    except Wrong as wrong:
        verdict = Verdict(False, str(wrong))
    if not show.in_notebook():
        print(repr(verdict))
    return verdict


def called(answer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the reader's function; what it raises becomes a Wrong that says so."""
    try:
        return answer(*args, **kwargs)
    except Exception as error:
        raise Wrong(f"Your function raised {type(error).__name__}: {error}") from None


def run_answer(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 20.0
) -> list[Any]:
    """Run code that calls the reader's function on ranks; a failure becomes a helpful Wrong."""
    try:
        return ranks.run(fn, world_size, *args, timeout=timeout)
    except ranks.RankError as error:
        raise Wrong(f"With {world_size} ranks, {error}") from None


def same(
    got: Sequence[Any],
    want: Sequence[torch.Tensor],
    what: str = "the result",
    tolerance: float = 0.0,
    hints: Mapping[str, Sequence[torch.Tensor]] | None = None,
) -> None:
    """Compare one tensor per rank with the reference; Wrong names the first rank that differs.

    tolerance: largest absolute difference that is still right. hints: sentence -> the values that a
    well-known mistake gives; when `got` equals them, the sentence is added.
    """
    assert len(got) == len(want)
    for rank, (mine, right) in enumerate(zip(got, want, strict=True)):
        if mine is None:
            raise Wrong(f"Rank {rank} returned None; {what} should be a tensor.")
        if not isinstance(mine, torch.Tensor):
            kind = type(mine).__name__
            raise Wrong(f"Rank {rank} returned a {kind}; {what} should be a tensor.")
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
            raise Wrong(text + _hint(got, tolerance, hints or {}))


def _hint(got: Sequence[Any], tolerance: float, hints: Mapping[str, Sequence[torch.Tensor]]) -> str:
    for sentence, mistake in hints.items():
        pairs = list(zip(got, mistake, strict=True))
        if all(
            isinstance(a, torch.Tensor)
            and a.shape == b.shape
            and torch.allclose(a.double(), b.double(), rtol=0, atol=tolerance)
            for a, b in pairs
        ):
            return f" {sentence}"
    return ""


def number(
    answer: Any,
    want: float,
    unit: str = "",
    rel: float = 0.0,
    hints: Mapping[float, str] | None = None,
) -> None:
    """Compare a number with the right one; a known wrong value gets its own sentence.

    rel: relative difference that is still right. hints: wrong value -> sentence.
    """
    if isinstance(answer, bool) or not isinstance(answer, (int, float)):
        raise Wrong(
            f"The answer should be a number{f' of {unit}' if unit else ''}, not {answer!r}."
        )
    if math.isclose(answer, want, rel_tol=rel, abs_tol=0.0):
        return
    for wrong, sentence in (hints or {}).items():
        if math.isclose(answer, wrong, rel_tol=max(rel, 1e-9)):
            raise Wrong(sentence)
    side = "large" if answer > want else "small"
    raise Wrong(f"{answer:,} {unit}".rstrip() + f" is too {side}.")


def laid_out(answer: Any, kind: type, gpus: int, batch: int) -> None:
    """Refuse what is no layout (`kind`: strategy.Layout), or one of other GPUs or sequences."""
    if not isinstance(answer, kind):
        raise Wrong(f"The answer should be a strategy.Layout, not a {type(answer).__name__}.")
    if answer.ranks != gpus:
        degrees = "d · t · p" + (" · c" if answer.cp > 1 else "")
        raise Wrong(f"{degrees} = {answer.ranks}; there are {gpus} GPUs.")
    if answer.batch != batch:
        raise Wrong(f"d · b · m = {answer.batch} sequences; a step has {batch}.")


Log = list[tuple[str, int]]  # a rank's messages in order: ("isend" or "irecv", peer)


def messages_of(answer: Callable[..., Any], *arguments: Any) -> tuple[Any, Log]:
    """On a rank: answer(*arguments), and its messages but for exchanges, which are batches."""
    log: Log = []
    plain = {"isend": ranks.isend, "irecv": ranks.irecv}

    def noting(kind: str) -> Callable[..., Any]:
        def call(tensor: torch.Tensor, peer: int, group: Any = None) -> Any:
            log.append((kind, peer))
            return plain[kind](tensor, peer, group)

        return call

    try:
        ranks.isend, ranks.irecv = noting("isend"), noting("irecv")
        return answer(*arguments), log
    finally:
        ranks.isend, ranks.irecv = plain["isend"], plain["irecv"]


def refuse_a_ring_that_hangs(logs: Sequence[Log]) -> None:
    """Wrong for messages that gloo moves and nccl does not: there the first one of a pair stops
    both ranks until they meet. So each call is taken to wait until its peer makes the other one.
    """
    other = {"isend": "irecv", "irecv": "isend"}
    queues, met = [list(log) for log in logs], True
    while met:
        met = False
        for rank, queue in enumerate(queues):
            if queue and queues[queue[0][1]][:1] == [(other[queue[0][0]], rank)]:
                peer = queue[0][1]
                del queue[0], queues[peer][0]
                met = True
    if any(queues):
        raise Wrong(
            f"The values are right, with gloo. With nccl it hangs, on {len(logs)} ranks: the first "
            "message of two ranks stops both until they meet, and here each of them has stopped "
            "for another one. Let even ranks send first and odd ones receive first, or begin both "
            "at once: ranks.exchange."
        )
