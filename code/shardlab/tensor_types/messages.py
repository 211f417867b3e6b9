"""The checker's errors: the line, the operation with its operands' types, and the fix.

train.py:31: y = F.linear(x, up)
linear(tensor tp:I, up tp:V): on tp I meets V: each rank would find another gradient for what is
I, and nothing adds these up
right: copy_to (I -> R) in front of what is I, or this operation behind the sum
"""

from __future__ import annotations

import contextlib
import linecache
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

_HERE = Path(__file__).parent
# Innermost lines in these are not the mistake: the checker, `ranks`, which logs, and torch.
_INSIDE = str(_HERE), str(_HERE.with_name("ranks")), str(Path(torch.__file__).parent), "<frozen"

_MAKE_THE_SUM = "make the sum first: reduce_from (P -> I), or an all-reduce (P -> R)"
_ONE_SUM = "leave it out: all ranks have it, and a sum would count it once for each of them"
# (the operator's input type, the given type) -> the fix.
_MOVES = {
    ("P", "I"): _ONE_SUM,
    ("P", "R"): _ONE_SUM,
    ("I", "R"): "leave it out: it is R already, and its gradient would be added up twice",
    ("I", "V"): "reduce_from (P -> I) or gather_last (V -> I) first: ranks hold different values",
    ("V", "I"): "split_last (I -> V) first: all ranks hold all of it",
    ("V", "R"): "leave it out: all ranks hold all of it",
    ("R", "V"): "give all ranks of this axis the same",
    ("R", "I"): "copy_to (I -> R) first",
}
_BACKWARD = {
    "V": "say what the local loss is a summand of, as in declare(loss, dp='P'), or add it up first",
    "R": "a loss that is I: every rank's backward counts an R one, and gradients are added up",
}


class Mismatch(RuntimeError):
    """An operation whose operands' types do not match, or a tensor without a declared type.

    Not a TypeError: in x * y Python would replace it by "unsupported operand". `right`: the fix;
    `line`: file and line; `operation`: its name, with its operands' types.
    """

    def __init__(self, what: str, culprit: int | None = None, right: str = ""):
        self.what, self.culprit, self.right = what, culprit, right
        self.axis, self.line, self.operation = "", "", ""
        super().__init__(what)

    @classmethod
    def of(cls, case: str, words: Sequence[str]) -> Mismatch:
        """Make the error for a case: a word that meets others, or an operator's input type."""
        if case == "I":
            other = next(word for word in words if word != "I")
            why = "each rank would find another gradient for what is I, and nothing adds these up"
            right = "copy_to (I -> R) in front of what is I, or this operation behind the sum"
            if other == "P":
                why, right = "P is an addend, and would count what is I again", _MAKE_THE_SUM
            return cls(f"I meets {other}: {why}", right=right)
        if case == "P":
            others = sorted({word for word in words if word != "P"})
            meets = f" meets {', '.join(others)}" if others else ""
            why = "an addend of a sum that nobody has made yet, and this is not linear in it"
            return cls(f"P{meets}: {why}", right=_MAKE_THE_SUM)
        if case == "backward":
            return cls(f"a loss that is {words[0]}", right=_BACKWARD[words[0]])
        if case == "in place":
            why = f"it would change, in place, to {' '.join(words)}"
            return cls(why, right="add up over the ranks first; or write to another tensor")
        src = case.split()[0]
        right = _MOVES.get((src, words[0]), _MAKE_THE_SUM)
        return cls(f"it makes {case}, and is given {words[0]}", right=right)

    @classmethod
    @contextmanager
    def on(cls, axis: str) -> Iterator[None]:
        """Add the axis to a Mismatch raised inside."""
        try:
            yield
        except cls as error:
            error.axis = error.axis or axis
            raise

    def __str__(self) -> str:
        what = f"on {self.axis} {self.what}" if self.axis else self.what
        what = f"{self.operation}: {what}" if self.operation else what
        lines = [self.line, what, f"right: {self.right}" if self.right else ""]
        return "\n".join(line for line in lines if line)

    def __reduce__(self) -> Any:  # pickled between processes with all attributes
        return _again, (dict(self.__dict__),)


def _again(values: dict[str, Any]) -> Mismatch:
    error = Mismatch(values["what"])
    error.__dict__.update(values)
    return error


@contextmanager
def located(func: Callable[..., Any], tensors: Sequence[Tensor]) -> Iterator[None]:
    """Add the line and the operation to a Mismatch raised inside."""
    try:
        yield
    except Mismatch as error:
        if not error.operation:
            words = [_told(x) for x in tensors]
            if error.culprit is not None:
                error.what = f"its argument {error.culprit + 1} {error.what}"
                error.right = "declare it"
            error.operation = f"{func.__name__.strip('_')}({', '.join(words)})"
            error.line = _line()
        raise error from None


def _told(x: Tensor) -> str:
    known = getattr(x, "over_ranks", None)
    words = "?" if known is None else " ".join(f"{axis}:{word}" for axis, word in known.items())
    return f"{getattr(x, 'called', '')} {words}".strip()


def _line() -> str:
    """Return file, number and text of the innermost line outside of torch and the checker.

    If that line is the course's, also the line of the reader's program that called it.
    """
    frame = sys._getframe(1)
    while frame and frame.f_code.co_filename.startswith((*_INSIDE, contextlib.__file__)):
        frame = frame.f_back
    if frame is None:
        return ""
    text = linecache.getline(frame.f_code.co_filename, frame.f_lineno, frame.f_globals).strip()
    inner, outer = frame, frame
    while outer and outer.f_code.co_filename.startswith((*_INSIDE, str(_HERE.parent))):
        outer = outer.f_back
    led = f" (from {_place(outer)})" if outer not in (None, inner) else ""
    return f"{_place(inner)}: {text}{led}"


def _place(frame: FrameType) -> str:
    # A notebook's cell is a file with a different name in each session.
    path = Path(frame.f_code.co_filename)
    return f"{path.name if path.exists() else 'cell'}:{frame.f_lineno}"
