"""Rates from a few measured steps: robust least squares of logarithms, with priors.

Wanted are rates under which predicted and measured times differ little, and which differ little
from what is known beforehand. Residuals are logarithms of predicted over measured, so that a
rate's unit does not matter, and fast and slow steps count alike. Each is weighed by
exp(-(r/cσ)²) of the round before (Welsch's weights): a run that something else slowed down has
nothing to say, and be it every fifth. A prior is a value and a spread: without one, rates that no
measured step tells apart take absurd values. Gauss-Newton; the uncertainty of a rate is what the
curvature says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, log, sqrt
from statistics import median

from .rates import Rate, Rates

Predict = Callable[[dict[str, float]], float]  # from rates to what was measured
STEP = 1e-4  # of a logarithm, to differentiate by
LEAST = 0.03  # a run is repeated this well at best
WELSCH = 2.985  # with which weights lose 5 % where nothing but a normal error is there


def fit(
    begin: Rates,
    measured: Sequence[tuple[Predict, float]],
    free: Sequence[str],
    origin: str,
    rounds: int = 20,
) -> Rates:
    """`begin` with the `free` rates moved to where they agree best with what was measured.

    measured: pairs of a function, which predicts a value from rates, and the value that was found.
    origin: said of each rate that moved, with how far off it may be.

    Raises ValueError where nothing was measured.
    """
    if not measured:
        raise ValueError("measured=0: allowed are 1 or more steps that can be expressed")
    values = dict(begin)
    guess = dict(values)
    spreads = {name: log(1 + begin.all[name].spread) for name in free}
    curvature: list[list[float]] = []
    for _ in range(rounds):
        found = _residuals(measured, values)
        slopes = []
        for name in free:
            moved = {**values, name: values[name] * exp(STEP)}
            shifted = _residuals(measured, moved)
            slopes.append([(y - x) / STEP for x, y in zip(found, shifted, strict=True)])
        sigma = max(LEAST, 1.48 * median(abs(r) for r in found))
        weights = [exp(-((r / (WELSCH * sigma)) ** 2)) / sigma**2 for r in found]
        curvature, pull = [], []
        for i, name in enumerate(free):
            curvature.append([_sum(weights, slopes[i], other) for other in slopes])
            curvature[i][i] += 1 / spreads[name] ** 2
            away = log(values[name] / guess[name])
            pull.append(-_sum(weights, slopes[i], found) - away / spreads[name] ** 2)
        move = solve(curvature, [pull])[0]
        longest = max(abs(x) for x in move)
        for name, x in zip(free, move, strict=True):
            values[name] *= exp(x * min(1.0, 0.5 / max(longest, 1e-12)))
        if longest < 1e-4:
            break
    rates = dict(begin.all)
    unit = [[float(i == j) for j in range(len(free))] for i in range(len(free))]
    inverse = solve(curvature, unit)
    for i, name in enumerate(free):
        spread = exp(sqrt(inverse[i][i])) - 1
        rates[name] = Rate(values[name], begin.all[name].unit, spread, origin)
    return Rates(begin.profile, rates)


def _residuals(measured: Sequence[tuple[Predict, float]], values: dict[str, float]) -> list[float]:
    return [log(predict(values) / value) for predict, value in measured]


def _sum(*factors: Sequence[float]) -> float:
    total = 0.0
    for numbers in zip(*factors, strict=True):
        product = 1.0
        for number in numbers:
            product *= number
        total += product
    return total


def solve(matrix: list[list[float]], sides: list[list[float]]) -> list[list[float]]:
    """x of A x = y for each y of `sides`, for a symmetric, positive definite A."""
    n = len(matrix)
    rows = [list(matrix[i]) + [side[i] for side in sides] for i in range(n)]
    for i in range(n):
        best = max(range(i, n), key=lambda k: abs(rows[k][i]))
        rows[i], rows[best] = rows[best], rows[i]
        for k in range(n):
            if k != i:
                factor = rows[k][i] / rows[i][i]
                rows[k] = [x - factor * y for x, y in zip(rows[k], rows[i], strict=True)]
    return [[rows[i][n + j] / rows[i][i] for i in range(n)] for j in range(len(sides))]
