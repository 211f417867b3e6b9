"""Tolerances, measured by plain runs in which all tensors move by a unit in the last place.

Each tensor has two differences, relative to its size: that of all its numbers together, and that of
its worst row, which alone detects one wrong row among thousands.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import inf, sqrt

import torch
from torch import Tensor

from .record import Record
from .recording import BEFORE, Key, Part, Sink

DRAWS = 3  # perturbed runs
# Allowed difference over the largest of all draws. 999 random right programs, small models
# (tests/parity_random.py), need at most 3.9 forward, 3.2 backward, 5.4 for gradients and 10.5 for
# updates in float32 and float64; in bfloat16 2.1, 2.4, 1.9 and 9.2; all before `Rounding` was
# added. With `Rounding`, gradients over 65,536 tokens and over 10^6 rows need less than 1.
FACTOR = 12.0
# Multiple of a gradient's noise below which rounding may flip the sign of a number.
TURNS = 3.0
# Where the tolerance exceeds COARSE, the common factor of a gradient's numbers is checked, too. It
# may differ by STEADY times its difference in a draw (noise averages out over n numbers), or by
# SHARED times the noise of one number: the factor itself, such as 1 / count or a clip, is rounded.
COARSE, STEADY, SHARED = 1e-2, 6.0, 2.0
PIECE = 2**20  # numbers that are compared at a time
TINY = 1e-9  # size below which squares of differences underflow in float32
DECIDES = 0.5  # above this tolerance, rounding decides the tensor: nothing is compared


def rms(x: Tensor) -> float:
    """Return the root mean square."""
    norm = torch.linalg.vector_norm(x.flatten(), dtype=torch.float64).item() if x.numel() else 0.0
    return norm / sqrt(max(1, x.numel()))


def eps(dtype: torch.dtype) -> float:
    """Return one unit in the last place of 1; 0 for a dtype that is not floating-point."""
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def gap(found: Tensor, wanted: Tensor, size: float, factor: float = 1.0) -> tuple[float, float]:
    """Return differences from factor times `wanted` over `size`: of all, and of the worst row."""
    if not found.numel():
        return 0.0, 0.0
    width = found.shape[-1] if found.dim() > 1 else found.numel()
    rows, wide = max(1, PIECE // width) * width, torch.promote_types(found.dtype, torch.float32)
    wide = torch.promote_types(wide, wanted.dtype)
    sums = wide if size > TINY else torch.float64  # squares of differences must not underflow
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
    """Return a plain tensor's root mean square, computed once; 0 if it has none."""
    if key not in record.sizes:
        whole = record.whole(key)
        has = whole is not None and whole.is_floating_point()
        record.sizes[key] = rms(whole) if has else 0.0
    return record.sizes[key]


def ratio(found: Tensor, wanted: Tensor) -> float:
    """Return the factor by which `found` is nearest to `wanted`."""
    product = square = 0.0
    for f, w in zip(found.flatten().split(PIECE), wanted.flatten().split(PIECE), strict=True):
        f, w = f.double(), w.double()
        product, square = product + (f @ w).item(), square + (w @ w).item()
    return product / square if square else 0.0


class Noise(Sink):
    """A sink that compares a perturbed run with the plain one, tensor by tensor."""

    def __init__(self, record: Record):
        super().__init__()
        self.record = record
        self.squares: dict[Key, float] = defaultdict(float)
        self.row: dict[Key, float] = defaultdict(float)
        self.shared: dict[Key, float] = {}

    def see(self, key: Key, part: Part) -> None:
        """Compare a part with the same call's; infinite if rounding changes its shape (routing)."""
        size, whole = size_of(self.record, key), self.record.whole(key)
        if not size:
            if whole is not None and whole.is_floating_point() and part.value.any():
                self.squares[key] = self.row[key] = inf  # zero in the plain run by rounding alone
            return
        for other in self.record.parts.get(key, ()):
            if other.call == part.call:
                alike = other.value.shape == part.value.shape
                of_all, of_row = gap(part.value, other.value, size) if alike else (inf, inf)
                self.squares[key] += of_all**2 * part.value.numel()
                self.row[key] = max(self.row[key], of_row)
                if key.phase == "gradient" and alike:
                    self.shared[key] = abs(ratio(part.value, other.value) - 1)

    def found(self) -> dict[Key, tuple[float, ...]]:
        """Return each tensor's relative differences: of all, of a row, of the common factor."""
        return {
            key: (
                sqrt(squares / self.record.whole(key).numel()),
                self.row[key],
                self.shared.get(key, inf),
            )  # fmt: skip
            for key, squares in self.squares.items()
        }


def largest(record: Record, draws: list[dict[Key, tuple[float, ...]]]) -> dict[Key, tuple]:
    """Return each tensor's largest differences of all draws, or a unit in the last place."""
    found: dict[Key, tuple[float, float, float]] = {}
    for key, parts in record.parts.items():
        least = eps(parts[0].value.dtype)
        row, weight, size = 2 * least, Key(BEFORE, "weights", key.name), size_of(record, key)
        if key.phase == "update":  # the difference of two rounded weights
            grain = eps(record.parts[weight][0].value.dtype)
            if size:
                least = max(least, grain * size_of(record, weight) / size)
            elif grain > eps(torch.float32) or _lost(record, key, found):
                least = inf  # too small to move this weight, though it may move after noise
            of_all, of_row = _turned(record, key, found)
            least, row = max(least, of_all / FACTOR), max(2 * least, of_row / FACTOR)
        each = [draw.get(key, (0.0, 0.0, inf)) for draw in draws]
        of_all, of_row, shared = (max(one) for one in zip((least, row, 0.0), *each, strict=True))
        found[key] = of_all, of_row, max(shared, of_all / sqrt(max(1, parts[0].value.numel())))
    return found


def _lost(record: Record, key: Key, found: dict[Key, tuple]) -> bool:
    """Return True if rounding alone decides an update's gradient."""
    return found.get(key._replace(phase="gradient"), (0.0,))[0] * FACTOR > DECIDES


def _turned(record: Record, key: Key, found: dict[Key, tuple]) -> tuple[float, float]:
    """Return an update's differences if each number whose sign rounding may flip is flipped.

    AdamW's first step has its rate's size however small the gradient is, and the gradient's sign.
    """
    gradient = key._replace(phase="gradient")
    g, u, size = record.whole(gradient), record.whole(key), size_of(record, key)
    if g is None or g.shape != u.shape or not size:
        return 0.0, 0.0
    near = TURNS * found[gradient][0] * size_of(record, gradient)
    return gap(torch.where((g != 0) & (g.abs() <= near), -u, u), u, size)


@dataclass(frozen=True)
class Tolerance:
    """The allowed differences between a plain tensor and a rank's part."""

    whole: Tensor
    size: float  # root mean square of the whole
    of_all: float
    of_row: float
    shared: float = inf  # allowed difference of the common factor

    @property
    def decides(self) -> bool:
        """True if rounding leaves anything to compare."""
        return self.of_all <= DECIDES

    def explains(self, error: float) -> float:
        """Return how much of an error rounding explains: of all numbers, or of their factor."""
        return self.of_all if error > self.of_all else min(self.of_all, self.shared)

    def off(self, value: Tensor, wanted: Tensor, factor: float = 1.0) -> float:
        """Return the difference relative to what is allowed: above 1 it is wrong."""
        of_all, of_row = gap(value, wanted, self.size, factor)
        share = self.whole.numel() / max(1, value.numel())
        allowed = min(self.of_row, self.of_all * sqrt(max(1.0, share)))  # for the worst part
        pairs = [(of_all, allowed), (of_row, self.of_row)]
        if self.shared < inf and factor and self.of_all > COARSE:
            pairs.append((abs(ratio(value, wanted) / factor - 1), self.shared * sqrt(share)))
        return max(g / a if a else (inf if g else 0.0) for g, a in pairs)


def tolerance(record: Record, key: Key, dtype: torch.dtype) -> Tolerance:
    """Return the tolerance of a tensor that a rank holds in this dtype."""
    of_all, of_row, shared = record.noise.get(key, (0.0, 0.0, inf))
    least, whole = eps(dtype), record.whole(key)
    of_all, of_row = max(of_all, least), max(of_row, 2 * least)
    shared = max(STEADY * shared, SHARED * of_all)
    return Tolerance(whole, size_of(record, key), FACTOR * of_all, FACTOR * of_row, shared)
