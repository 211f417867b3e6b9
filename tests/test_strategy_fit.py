"""A robust fit recovers rates from their predictions, and moves no further than a prior allows."""

from math import log

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtools.strategy.fit import fit
from shardtools.strategy.rates import Rate, Rates


def make_rates(**values: float) -> Rates:
    return Rates("course", {n: Rate(v, "s", 0.5, "a guess") for n, v in values.items()})


def make_points(truth: dict[str, float], noise: list[float]) -> list:
    """Return noisy points on y = a x + b."""
    points = []
    for k, factor in enumerate(noise):
        x = 1.0 + k
        points.append((lambda r, x=x: r["a"] * x + r["b"], (truth["a"] * x + truth["b"]) * factor))
    return points


@settings(max_examples=20, deadline=None)
@given(st.floats(0.5, 2.0), st.floats(0.5, 2.0))
def test_exact_steps_give_the_rates_that_made_them(a: float, b: float) -> None:
    points = make_points({"a": a, "b": b}, [1.0] * 20)
    found = fit(make_rates(a=1.0, b=1.0), points, ["a", "b"], "a test")
    assert found["a"] == pytest.approx(a, rel=0.02)
    assert found["b"] == pytest.approx(b, rel=0.1)
    assert {rate.origin for rate in found.by_name.values()} == {"a test"}


def test_one_slow_run_moves_nothing_far() -> None:
    points = make_points({"a": 1.5, "b": 0.7}, [1.0] * 12)
    clean = fit(make_rates(a=1.0, b=1.0), points, ["a", "b"], "")
    noise = [1.0] * 11 + [5.0]
    found = fit(make_rates(a=1.0, b=1.0), make_points({"a": 1.5, "b": 0.7}, noise), ["a", "b"], "")
    for name in ("a", "b"):
        assert abs(log(found[name] / clean[name])) < 0.02


def test_undetermined_rates_keep_their_priors() -> None:
    """Only a + b is measured: the fit finds the sum, and moves each as far as its prior allows."""
    measured = [(lambda r: r["a"] + r["b"], 3.0)] * 5
    found = fit(make_rates(a=1.0, b=1.0, c=4.0), measured, ["a", "b", "c"], "")
    assert found["a"] + found["b"] == pytest.approx(3.0, rel=0.01)
    assert found["a"] == pytest.approx(found["b"])
    assert found["c"] == pytest.approx(4.0)
    assert found.by_name["c"].spread == pytest.approx(0.5)  # as uncertain as before
    assert found.by_name["a"].spread < 0.5
