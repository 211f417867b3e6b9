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

from .hooks import INITIAL_STEP, Key, Part, Sink
from .places import Place
from .record import Record

DRAWS = 3  # perturbed runs
# Allowed difference over the largest of all draws. 999 random right programs, small models
# (tests/parity_random.py), need at most 3.9 forward, 3.2 backward, 5.4 for gradients and 10.5 for
# updates in float32 and float64; in bfloat16 2.1, 2.4, 1.9 and 9.2; all before `RandomRounding` was
# added. With `RandomRounding`, gradients over 65,536 tokens and over 10^6 rows need less than 1.
TOLERANCE_FACTOR = 12.0
# Multiple of a gradient's noise below which rounding may flip the sign of a number.
SIGN_FLIP_FACTOR = 3.0
# Above COARSE_TOLERANCE, the common factor of a gradient's numbers is checked, too. It may differ
# by DRIFT_FACTOR times its difference in a draw (noise averages out over n numbers), or by
# ROUNDING_FACTOR times the noise of one number: 1 / count or a clip, for example, is rounded, too.
COARSE_TOLERANCE, DRIFT_FACTOR, ROUNDING_FACTOR = 1e-2, 6.0, 2.0
CHUNK_NUMEL = 2**20  # numbers that are compared at a time
UNDERFLOW_RMS = 1e-9  # size below which squares of differences underflow in float32
MAX_TOLERANCE = 0.5  # above this tolerance, rounding decides the tensor: nothing is compared


def rms(x: Tensor) -> float:
    """Return the root mean square."""
    norm = torch.linalg.vector_norm(x.flatten(), dtype=torch.float64).item() if x.numel() else 0.0
    return norm / sqrt(max(1, x.numel()))


def get_eps(dtype: torch.dtype) -> float:
    """Return one unit in the last place of 1; 0 for a dtype that is not floating-point."""
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def measure_difference(
    found: Tensor, wanted: Tensor, size: float, factor: float = 1.0
) -> tuple[float, float]:
    """Return differences from factor times `wanted` over `size`: of all, and of the worst row."""
    if not found.numel():
        return 0.0, 0.0
    width = found.shape[-1] if found.dim() > 1 else found.numel()
    rows, dtype = (
        max(1, CHUNK_NUMEL // width) * width,
        torch.promote_types(found.dtype, torch.float),
    )
    dtype = torch.promote_types(dtype, wanted.dtype)
    # Squares of differences must not underflow.
    sum_dtype = dtype if size > UNDERFLOW_RMS else torch.float64
    total = worst = 0.0
    for f, w in zip(found.flatten().split(rows), wanted.flatten().split(rows), strict=True):
        f, w = f.to(dtype), w.to(dtype)
        w = w if factor == 1.0 else w * factor
        norms = torch.linalg.vector_norm((f - w).view(-1, width), dim=1, dtype=sum_dtype).double()
        if not norms.isfinite().all():
            if not torch.equal(f.nan_to_num(), w.nan_to_num()):
                return inf, inf
            norms = torch.zeros_like(norms)
        total, worst = total + (norms @ norms).item(), max(worst, norms.max().item())
    size = max(size * abs(factor), 1e-300)
    return sqrt(total / found.numel()) / size, worst / sqrt(width) / size


def get_rms(record: Record, key: Key) -> float:
    """Return a plain tensor's root mean square, computed once; 0 if it has none."""
    if key not in record.sizes:
        full = record.full_tensor(key)
        has_rms = full is not None and full.is_floating_point()
        record.sizes[key] = rms(full) if has_rms else 0.0
    return record.sizes[key]


def fit_factor(found: Tensor, wanted: Tensor) -> float:
    """Return the factor by which `found` is nearest to `wanted`."""
    product = square = 0.0
    chunks = (x.flatten().split(CHUNK_NUMEL) for x in (found, wanted))
    for f, w in zip(*chunks, strict=True):
        f, w = f.double(), w.double()
        product, square = product + (f @ w).item(), square + (w @ w).item()
    return product / square if square else 0.0


class NoiseMeter(Sink):
    """A sink that compares a perturbed run with the plain one, tensor by tensor."""

    def __init__(self, record: Record):
        super().__init__()
        self.record = record
        self.squared_errors: dict[Key, float] = defaultdict(float)
        self.worst_row: dict[Key, float] = defaultdict(float)
        self.common_factor: dict[Key, float] = {}

    def receive_part(self, key: Key, part: Part) -> None:
        """Compare a part with the same call's; infinite if rounding changes its shape (routing)."""
        size, full, value = get_rms(self.record, key), self.record.full_tensor(key), part.value
        if not size:
            if full is not None and full.is_floating_point() and value.any():
                # The tensor is zero in the plain run by rounding alone.
                self.squared_errors[key] = self.worst_row[key] = inf
            return
        for other in self.record.parts.get(key, ()):
            if other.call == part.call:
                fits, error = other.value.shape == value.shape, (inf, inf)
                overall, row = measure_difference(value, other.value, size) if fits else error
                self.squared_errors[key] += overall**2 * value.numel()
                self.worst_row[key] = max(self.worst_row[key], row)
                if key.phase == "gradient" and fits:
                    self.common_factor[key] = abs(fit_factor(value, other.value) - 1)

    def get_differences(self) -> dict[Key, tuple[float, ...]]:
        """Return each tensor's relative differences: of all, of a row, of the common factor."""
        return {
            key: (
                sqrt(squared / self.record.full_tensor(key).numel()),
                self.worst_row[key],
                self.common_factor.get(key, inf),
            )  # fmt: skip
            for key, squared in self.squared_errors.items()
        }


def combine_draws(record: Record, draws: list[dict[Key, tuple[float, ...]]]) -> dict[Key, tuple]:
    """Return each tensor's largest differences of all draws, or a unit in the last place."""
    found: dict[Key, tuple[float, float, float]] = {}
    for key, parts in record.parts.items():
        floor = get_eps(parts[0].value.dtype)
        row, weight, size = 2 * floor, Key(INITIAL_STEP, "weights", key.name), get_rms(record, key)
        if key.phase == "update":  # the difference of two rounded weights
            weight_eps = get_eps(record.parts[weight][0].value.dtype)
            if size:
                floor = max(floor, weight_eps * get_rms(record, weight) / size)
            elif weight_eps > get_eps(torch.float32) or _is_gradient_undecided(key, found):
                floor = inf  # too small to move this weight, though it may move after noise
            flipped, flipped_row = _measure_sign_flips(record, key, found)
            row = max(2 * floor, flipped_row / TOLERANCE_FACTOR)
            floor = max(floor, flipped / TOLERANCE_FACTOR)
        each = [draw.get(key, (0.0, 0.0, inf)) for draw in draws]
        overall, row, common = (max(x) for x in zip((floor, row, 0.0), *each, strict=True))
        found[key] = overall, row, max(common, overall / sqrt(max(1, parts[0].value.numel())))
    return found


def _is_gradient_undecided(key: Key, found: dict[Key, tuple]) -> bool:
    return found.get(key._replace(phase="gradient"), (0.0,))[0] * TOLERANCE_FACTOR > MAX_TOLERANCE


def _measure_sign_flips(record: Record, key: Key, found: dict[Key, tuple]) -> tuple[float, float]:
    """Return an update's differences if each number whose sign rounding may flip is flipped.

    AdamW's first step has its rate's size however small the gradient is, and the gradient's sign.
    """
    gradient = key._replace(phase="gradient")
    g, u, size = record.full_tensor(gradient), record.full_tensor(key), get_rms(record, key)
    if g is None or g.shape != u.shape or not size:
        return 0.0, 0.0
    threshold = SIGN_FLIP_FACTOR * found[gradient][0] * get_rms(record, gradient)
    return measure_difference(torch.where((g != 0) & (g.abs() <= threshold), -u, u), u, size)


@dataclass(frozen=True)
class Tolerance:
    """The allowed differences between a plain tensor and a rank's part."""

    full: Tensor
    size: float  # root mean square of the whole
    overall: float
    worst_row: float
    common_factor: float = inf  # allowed difference of the common factor

    @property
    def is_comparable(self) -> bool:
        """True if rounding leaves anything to compare."""
        return self.overall <= MAX_TOLERANCE

    def get_explained(self, error: float) -> float:
        """Return the tolerance that an error exceeds: of all numbers, or of their common factor."""
        return self.overall if error > self.overall else min(self.overall, self.common_factor)

    def measure_error(self, value: Tensor, wanted: Tensor, factor: float = 1.0) -> float:
        """Return the difference relative to what is allowed: above 1 it is wrong."""
        overall, worst_row = measure_difference(value, wanted, self.size, factor)
        share = self.full.numel() / max(1, value.numel())
        allowed = min(self.worst_row, self.overall * sqrt(max(1.0, share)))  # for the worst part
        pairs = [(overall, allowed), (worst_row, self.worst_row)]
        if self.common_factor < inf and factor and self.overall > COARSE_TOLERANCE:
            drift = abs(fit_factor(value, wanted) / factor - 1)
            pairs.append((drift, self.common_factor * sqrt(share)))
        return max(g / a if a else (inf if g else 0.0) for g, a in pairs)

    def measure_at(self, place: Place, value: Tensor, factor: float = 1.0) -> float:
        """Return `measure_error` of a part from the full tensor at a place."""
        return self.measure_error(value, place.take_from(self.full), factor)


def get_tolerance(record: Record, key: Key, dtype: torch.dtype) -> Tolerance:
    """Return the tolerance of a tensor that a rank holds in this dtype."""
    overall, row, common = record.noise.get(key, (0.0, 0.0, inf))
    overall, row = max(overall, get_eps(dtype)), max(row, 2 * get_eps(dtype))
    common = max(DRIFT_FACTOR * common, ROUNDING_FACTOR * overall)
    allowed = TOLERANCE_FACTOR * overall, TOLERANCE_FACTOR * row, common
    return Tolerance(record.full_tensor(key), get_rms(record, key), *allowed)
