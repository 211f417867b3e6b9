"""The checker's errors: the line, the operation with its operands' types, and the fix.

train.py:31: y = F.linear(x, up)
linear(tensor tp:I, up tp:V): on axis tp, I is combined with V: each rank would compute a
different gradient for the tensor that is I, and nothing sums these gradients
fix: apply copy_to (I -> R) to the tensor that is I, or move this operation after the sum
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
_TORCH = str(Path(torch.__file__).parent)
_SKIPPED_FILES = str(_HERE), str(_HERE.with_name("ranks")), _TORCH, "<frozen"

_SUM_FIRST = "sum it first: reduce_from (P -> I), or an all-reduce (P -> R)"
_REMOVE_SUM = "remove this sum: all ranks have the tensor, and a sum would count it once per rank"
# (the operator's input type, the given type) -> the fix.
_FIXES = {
    ("P", "I"): _REMOVE_SUM,
    ("P", "R"): _REMOVE_SUM,
    ("I", "R"): "remove this operator: the tensor is R already, its gradient would be summed twice",
    ("I", "V"): "reduce_from (P -> I) or gather_last (V -> I) first: ranks hold different values",
    ("V", "I"): "split_last (I -> V) first: every rank holds the whole tensor",
    ("V", "R"): "remove this operator: every rank holds the whole tensor",
    ("R", "V"): "give all ranks of this axis the same tensor",
    ("R", "I"): "copy_to (I -> R) first",
}
_LOSS_FIXES = {
    "V": "declare it a summand of the joint loss, declare_types(loss, dp='P'), or sum it first",
    "R": "make it I: each rank's backward counts a loss that is R, and the gradients are summed",
}


class TypeMismatch(RuntimeError):
    """An operation whose operands' types do not match, or a tensor without a declared type.

    Not a TypeError: in x * y Python would replace it by "unsupported operand". argument: index of
    the wrong operand. `line`: file and line; `operation`: its name, with its operands' types.
    """

    def __init__(self, reason: str, argument: int | None = None, fix: str = ""):
        self.reason, self.argument, self.fix = reason, argument, fix
        self.axis, self.line, self.operation = "", "", ""
        super().__init__(reason)

    @classmethod
    def for_case(cls, case: str, types: Sequence[str]) -> TypeMismatch:
        """Return the error for a case: a type combined with others, or an operator's input type."""
        if case == "I":
            other = next(t for t in types if t != "I")
            why = "each rank would compute a different gradient for the tensor that is I, and "
            why += "nothing sums these gradients"
            fix = "apply copy_to (I -> R) to the tensor that is I, or move this operation after "
            fix += "the sum"
            if other == "P":
                why, fix = "the tensor that is I would be counted once per rank", _SUM_FIRST
            return cls(f"I is combined with {other}: {why}", fix=fix)
        if case == "P":
            others = sorted({t for t in types if t != "P"})
            combined = f" is combined with {', '.join(others)}" if others else ""
            why = "P is a summand of a sum not made yet, and this operation is not linear in it"
            return cls(f"P{combined}: {why}" if others else why, fix=_SUM_FIRST)
        if case == "backward":
            return cls(f"the loss is {types[0]}: must be I or P", fix=_LOSS_FIXES[types[0]])
        if case == "in place":
            why = f"this operation would change the type in place to {' '.join(types)}"
            return cls(why, fix="sum over the ranks first, or write to another tensor")
        src = case.split()[0]
        fix = _FIXES.get((src, types[0]), _SUM_FIRST)
        return cls(f"the operator is {case}, but its input is {types[0]}", fix=fix)

    @classmethod
    @contextmanager
    def add_axis(cls, axis: str) -> Iterator[None]:
        """Add the axis to a TypeMismatch raised inside."""
        try:
            yield
        except cls as error:
            error.axis = error.axis or axis
            raise

    def __str__(self) -> str:
        reason = f"on axis {self.axis}, {self.reason}" if self.axis else self.reason
        reason = f"{self.operation}: {reason}" if self.operation else reason
        lines = [self.line, reason, f"fix: {self.fix}" if self.fix else ""]
        return "\n".join(line for line in lines if line)

    def __reduce__(self) -> Any:  # pickled between processes with all attributes
        return _rebuild_mismatch, (dict(self.__dict__),)


def _rebuild_mismatch(values: dict[str, Any]) -> TypeMismatch:
    error = TypeMismatch(values["reason"])
    error.__dict__.update(values)
    return error


@contextmanager
def locate_errors(func: Callable[..., Any], tensors: Sequence[Tensor]) -> Iterator[None]:
    """Add the line and the operation to a TypeMismatch raised inside."""
    try:
        yield
    except TypeMismatch as error:
        if not error.operation:
            types = [_describe_tensor(x) for x in tensors]
            if error.argument is not None:
                error.reason = f"argument {error.argument + 1} {error.reason}"
                error.fix = "declare it with declare_types"
            error.operation = f"{func.__name__.strip('_')}({', '.join(types)})"
            error.line = _find_source_line()
        raise error from None


def _describe_tensor(x: Tensor) -> str:
    known = getattr(x, "rank_types", None)
    types = "?" if known is None else " ".join(f"{axis}:{type_}" for axis, type_ in known.items())
    return f"{getattr(x, 'tensor_name', '')} {types}".strip()


def _find_source_line() -> str:
    """Return file, number and text of the innermost line outside of torch and the checker.

    If that line is the course's, also the line of the reader's program that called it.
    """
    frame = sys._getframe(1)
    while frame and frame.f_code.co_filename.startswith((*_SKIPPED_FILES, contextlib.__file__)):
        frame = frame.f_back
    if frame is None:
        return ""
    text = linecache.getline(frame.f_code.co_filename, frame.f_lineno, frame.f_globals).strip()
    inner, outer = frame, frame
    while outer and outer.f_code.co_filename.startswith((*_SKIPPED_FILES, str(_HERE.parent))):
        outer = outer.f_back
    led = f" (from {_format_place(outer)})" if outer not in (None, inner) else ""
    return f"{_format_place(inner)}: {text}{led}"


def _format_place(frame: FrameType) -> str:
    # A notebook's cell is a file with a different name in each session.
    path = Path(frame.f_code.co_filename)
    return f"{path.name if path.exists() else 'cell'}:{frame.f_lineno}"
