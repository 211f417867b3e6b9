"""How near is near enough: measured, by plain runs where all moves by a unit in the last place.

Of each tensor two differences count: of all its numbers together, and of the worst of its rows,
which alone sees one wrong row among thousands. Both are relative to the tensor's size.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import inf, sqrt

import torch
from torch import Tensor

from .record import Record
from .recording import BEFORE, Key, Part

DRAWS = 3  # runs that are perturbed
FACTOR = 12.0  # times the largest difference of a draw; right programs need up to 9
PIECE = 2**20  # numbers that are widened to float64 at a time
DECIDES = 0.5  # where more than that is allowed, rounding makes another tensor: nothing is said


def rms(x: Tensor) -> float:
    """Root mean square."""
    total = sum(piece.double().square().sum().item() for piece in x.flatten().split(PIECE))
    return sqrt(total / x.numel()) if x.numel() else 0.0


def eps(dtype: torch.dtype) -> float:
    """One unit in the last place of 1."""
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def gap(found: Tensor, wanted: Tensor, size: float, factor: float = 1.0) -> tuple[float, float]:
    """Relative differences from factor times `wanted`: of all numbers, and of the worst row."""
    if not found.numel():
        return 0.0, 0.0
    width = found.shape[-1] if found.dim() > 1 else found.numel()
    rows = max(1, PIECE // width) * width
    total = worst = 0.0
    for f, w in zip(found.flatten().split(rows), wanted.flatten().split(rows), strict=True):
        apart = f.double() - w.double() * factor
        if not apart.isfinite().all():
            f, w = f.double().nan_to_num(1e300), (w.double() * factor).nan_to_num(1e300)
            if not torch.equal(f, w):
                return inf, inf
            apart = f - w
        squares = apart.view(-1, width).square().sum(1)
        total, worst = total + squares.sum().item(), max(worst, squares.max().item())
    size = max(size * abs(factor), rms(wanted) * abs(factor), 1e-300)
    return sqrt(total / found.numel()) / size, sqrt(worst / width) / size


class Noise:
    """A sink that compares a perturbed run with the plain one, tensor by tensor."""

    def __init__(self, record: Record):
        self.record, self.steps, self.watched, self.optimized = record, 0, False, False
        self.squares: dict[Key, float] = defaultdict(float)
        self.row: dict[Key, float] = defaultdict(float)

    def see(self, key: Key, part: Part) -> None:
        """Compare it with the same call's."""
        for other in self.record.parts.get(key, ()):
            if other.call == part.call and other.value.shape == part.value.shape:
                of_all, of_row = gap(part.value, other.value, 1.0)
                size = max(1.0, rms(other.value))  # what `gap` divided by
                self.squares[key] += (of_all * size) ** 2 * part.value.numel()
                self.row[key] = max(self.row[key], of_row * size)

    def tied(self, name: str, first: str) -> None:
        """As `Sink` says."""

    def stepped(self, steps: int) -> None:
        """As `Sink` says."""
        self.steps = steps

    def found(self) -> dict[Key, tuple[float, float]]:
        """Relative differences of each tensor."""
        told = {}
        for key, squares in self.squares.items():
            whole = self.record.whole(key)
            size = rms(whole) if whole is not None else 0.0
            if size:
                told[key] = sqrt(squares / whole.numel()) / size, self.row[key] / size
        return told


def largest(record: Record, draws: list[dict[Key, tuple[float, float]]]) -> dict[Key, tuple]:
    """Of each tensor the largest differences of all draws, a unit in the last place at least."""
    found = {}
    for key, parts in record.parts.items():
        least = eps(parts[0].value.dtype)
        weight = record.whole(Key(BEFORE, "weights", key.name))
        if key.phase == "update" and weight is not None:  # a difference of two rounded numbers
            size = rms(record.whole(key))
            least = max(least, eps(weight.dtype) * rms(weight) / size) if size else least
        each = [draw.get(key, (0.0, 0.0)) for draw in draws]
        found[key] = max([least, *(d[0] for d in each)]), max([2 * least, *(d[1] for d in each)])
    return found


@dataclass(frozen=True)
class Tolerance:
    """How far from a plain tensor a rank's part may be."""

    whole: Tensor
    size: float  # root mean square of the whole
    of_all: float
    of_row: float

    @property
    def decides(self) -> bool:
        """Whether rounding leaves anything to compare."""
        return self.of_all <= DECIDES

    def off(self, value: Tensor, wanted: Tensor, factor: float = 1.0) -> float:
        """The difference as a part of what is allowed: above 1 it is wrong."""
        of_all, of_row = gap(value, wanted, self.size, factor)
        share = self.whole.numel() / max(1, value.numel())
        allowed = min(self.of_row, self.of_all * sqrt(max(1.0, share)))  # a part may be the worst
        pairs = (of_all, allowed), (of_row, self.of_row)
        return max(g / a if a else (inf if g else 0.0) for g, a in pairs)


def tolerance(record: Record, key: Key, dtype: torch.dtype, factor: float = FACTOR) -> Tolerance:
    """Of a tensor that a rank has in this dtype."""
    of_all, of_row = record.noise.get(key, (0.0, 0.0))
    least, whole = eps(dtype), record.whole(key)
    if key not in record.sizes:
        record.sizes[key] = rms(whole)
    allowed = factor * max(of_all, least), factor * max(of_row, 2 * least)
    return Tolerance(whole, record.sizes[key], *allowed)
