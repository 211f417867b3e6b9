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
# Times the largest difference of a draw. Of 999 random right programs (tests/parity_random.py) no
# tensor needs more, in float32 and float64, than 3.9 forward, 3.2 backward, 5.4 as a gradient and
# 10.5 as an update; in bfloat16 2.1, 2.4, 1.9 and 9.2.
FACTOR = 12.0
PIECE = 2**20  # numbers that are compared at a time
TINY = 1e-9  # of tensors this small, squares of differences are no float32 any more
DECIDES = 0.5  # where more than that is allowed, rounding makes another tensor: nothing is said


def rms(x: Tensor) -> float:
    """Root mean square."""
    norm = torch.linalg.vector_norm(x.flatten(), dtype=torch.float64).item() if x.numel() else 0.0
    return norm / sqrt(max(1, x.numel()))


def eps(dtype: torch.dtype) -> float:
    """One unit in the last place of 1."""
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def gap(found: Tensor, wanted: Tensor, size: float, factor: float = 1.0) -> tuple[float, float]:
    """Differences from factor times `wanted`, relative to `size`: of all, and of the worst row."""
    if not found.numel():
        return 0.0, 0.0
    width = found.shape[-1] if found.dim() > 1 else found.numel()
    rows, wide = max(1, PIECE // width) * width, torch.promote_types(found.dtype, torch.float32)
    wide = torch.promote_types(wide, wanted.dtype)
    sums = wide if size > TINY else torch.float64  # the square of a difference has to be a number
    total = worst = 0.0
    for f, w in zip(found.flatten().split(rows), wanted.flatten().split(rows), strict=True):
        f, w = f.to(wide), w.to(wide)
        w = w if factor == 1.0 else w * factor
        norms = torch.linalg.vector_norm((f - w).view(-1, width), dim=1, dtype=sums).double()
        if not norms.isfinite().all():
            if not torch.equal(f.nan_to_num(), w.nan_to_num()):
                return inf, inf
            norms = torch.zeros_like(norms)
        total, worst = total + (norms @ norms).item(), max(worst, norms.max().item())
    size = max(size * abs(factor), 1e-300)
    return sqrt(total / found.numel()) / size, worst / sqrt(width) / size


def size_of(record: Record, key: Key) -> float:
    """A plain tensor's root mean square, computed once; 0 where it has none."""
    if key not in record.sizes:
        whole = record.whole(key)
        has = whole is not None and whole.is_floating_point()
        record.sizes[key] = rms(whole) if has else 0.0
    return record.sizes[key]


class Noise:
    """A sink that compares a perturbed run with the plain one, tensor by tensor."""

    def __init__(self, record: Record):
        self.record, self.steps, self.watched, self.optimized = record, 0, False, False
        self.squares: dict[Key, float] = defaultdict(float)
        self.row: dict[Key, float] = defaultdict(float)

    def see(self, key: Key, part: Part) -> None:
        """Compare it with the same call's; where it has another shape, rounding routes anew."""
        if not (size := size_of(self.record, key)):
            return
        for other in self.record.parts.get(key, ()):
            if other.call == part.call:
                alike = other.value.shape == part.value.shape
                of_all, of_row = gap(part.value, other.value, size) if alike else (inf, inf)
                self.squares[key] += of_all**2 * part.value.numel()
                self.row[key] = max(self.row[key], of_row)

    def tied(self, name: str, first: str) -> None:
        """As `Sink` says."""

    def stepped(self, steps: int) -> None:
        """As `Sink` says."""
        self.steps = steps

    def found(self) -> dict[Key, tuple[float, float]]:
        """Relative differences of each tensor."""
        return {
            key: (sqrt(squares / self.record.whole(key).numel()), self.row[key])
            for key, squares in self.squares.items()
        }


def largest(record: Record, draws: list[dict[Key, tuple[float, float]]]) -> dict[Key, tuple]:
    """Of each tensor the largest differences of all draws, a unit in the last place at least."""
    found = {}
    for key, parts in record.parts.items():
        least = eps(parts[0].value.dtype)
        weight, size = Key(BEFORE, "weights", key.name), size_of(record, key)
        if key.phase == "update":  # a difference of two numbers that were rounded
            grain = eps(record.parts[weight][0].value.dtype)
            if size:
                least = max(least, grain * size_of(record, weight) / size)
            elif grain > eps(torch.float32):  # few bits have not moved; a neighbour's may
                least = inf
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
    allowed = factor * max(of_all, least), factor * max(of_row, 2 * least)
    return Tolerance(whole, size_of(record, key), *allowed)
