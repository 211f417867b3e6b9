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

import numpy as np

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
    guess = np.log([begin[name] for name in free])
    spreads = np.log1p([begin.all[name].spread for name in free])
    taken = np.log([value for _, value in measured])

    def residuals(rates: np.ndarray) -> np.ndarray:
        """Logarithms of predicted over measured, at these logarithms of the free rates."""
        values = {**begin, **dict(zip(free, np.exp(rates).tolist(), strict=True))}
        return np.log([predict(values) for predict, _ in measured]) - taken

    rates, steps = guess.copy(), STEP * np.eye(len(free))
    for _ in range(rounds):
        found = residuals(rates)  # [measured]
        slopes = np.stack([(residuals(rates + step) - found) / STEP for step in steps])
        sigma = max(LEAST, 1.48 * np.median(np.abs(found)))
        weights = np.exp(-((found / (WELSCH * sigma)) ** 2)) / sigma**2
        curvature = (slopes * weights) @ slopes.T + np.diag(spreads**-2.0)  # [free, free]
        pull = -(slopes * weights) @ found - (rates - guess) / spreads**2
        move = np.linalg.solve(curvature, pull)
        longest = np.abs(move).max()
        rates = rates + move * min(1.0, 0.5 / max(longest, 1e-12))
        if longest < 1e-4:
            break
    fitted = dict(begin.all)
    unsure = np.expm1(np.sqrt(np.diag(np.linalg.inv(curvature))))
    for name, value, spread in zip(free, np.exp(rates), unsure, strict=True):
        fitted[name] = Rate(float(value), begin.all[name].unit, float(spread), origin)
    return Rates(begin.profile, fitted)
