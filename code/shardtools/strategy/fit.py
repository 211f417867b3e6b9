"""Rates from a few measured steps: robust least squares of logarithms, with priors.

The fit seeks rates under which predicted and measured times differ little, and which differ little
from their priors. Residuals are log(predicted / measured), so that a rate's unit does not matter,
and fast and slow steps count alike. Each residual r is weighted by exp(-(r/cσ)²) of the round
before (Welsch's weights), so that runs which something else slowed down do not count, even if every
fifth run is such. A prior is a value and a spread: without priors, rates that no measured step can
tell apart take absurd values. The method is Gauss-Newton; a rate's uncertainty follows from the
curvature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .rates import Rate, Rates

Predictor = Callable[[dict[str, float]], float]  # predicts the measured value from rates
LOG_STEP = 1e-4  # finite-difference step in a rate's logarithm
MIN_SIGMA = 0.03  # relative repeatability of a run, at best
WELSCH_C = 2.985  # Welsch's c, with an efficiency of 95 % under normal errors


def fit(
    initial: Rates,
    measured: Sequence[tuple[Predictor, float]],
    free: Sequence[str],
    origin: str,
    rounds: int = 20,
) -> Rates:
    """Return `begin` with its `free` rates fitted to the measured values.

    measured: pairs of a function, which predicts a value from rates, and the measured value.
    origin: stored with each fitted rate, beside its uncertainty.

    Raises ValueError where nothing was measured.
    """
    if not measured:
        raise ValueError("measured=0: must hold at least one step that `Layout` can express")
    guess = np.log([initial[name] for name in free])
    spreads = np.log1p([initial.by_name[name].spread for name in free])
    taken = np.log([value for _, value in measured])

    def log_residuals(rates: np.ndarray) -> np.ndarray:
        """Return log(predicted / measured) for these logarithms of the free rates."""
        values = {**initial, **dict(zip(free, np.exp(rates).tolist(), strict=True))}
        return np.log([predict(values) for predict, _ in measured]) - taken

    rates, steps = guess.copy(), LOG_STEP * np.eye(len(free))
    for _ in range(rounds):
        residuals = log_residuals(rates)  # [measured]
        slopes = np.stack([(log_residuals(rates + step) - residuals) / LOG_STEP for step in steps])
        sigma = max(MIN_SIGMA, 1.48 * np.median(np.abs(residuals)))
        weights = np.exp(-((residuals / (WELSCH_C * sigma)) ** 2)) / sigma**2
        curvature = (slopes * weights) @ slopes.T + np.diag(spreads**-2.0)  # [free, free]
        pull = -(slopes * weights) @ residuals - (rates - guess) / spreads**2
        move = np.linalg.solve(curvature, pull)
        longest = np.abs(move).max()
        rates = rates + move * min(1.0, 0.5 / max(longest, 1e-12))
        if longest < 1e-4:
            break
    fitted = dict(initial.by_name)
    unsure = np.expm1(np.sqrt(np.diag(np.linalg.inv(curvature))))
    for name, value, spread in zip(free, np.exp(rates), unsure, strict=True):
        fitted[name] = Rate(float(value), initial.by_name[name].unit, float(spread), origin)
    return Rates(initial.profile, fitted)
