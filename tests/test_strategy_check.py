"""Lesson `strategy`: its exercises accept solutions, and help with the mistakes people make."""

from __future__ import annotations

from statistics import mean

from answers import each, judged

from shardlab.strategy import Layout

WIRE = 4 * 2 * 7 * 2 * 989e12 / (6 * 12 * 8192)
DAYS = 6 * 8e9 * 15e12 / (512 * 989e12 * 0.4) / 86400


def corner(layers):
    return min(s for _, s in layers), max(w / s for w, s in layers)


def averaged(layers):
    """The smallest layers' mean, as launch, and the largest ones', as rate."""
    layers = sorted(layers)
    return mean(s for _, s in layers[:4]), mean(w / s for w, s in layers[-4:])


def slow_rate(layers):
    return corner(layers)[0], mean(w / s for w, s in layers)


def laid_out(**changes):
    given = {"tp": 8, "pp": 8, "microbatches": 256, "sequence_parallel": True}
    return Layout(**{**given, **changes})


ANSWERS = [
    ("strategy_wire", WIRE, None),
    ("strategy_wire", WIRE / 2, "twice"),
    ("strategy_wire", WIRE / 8, "the all-reduces are not"),
    ("strategy_wire", WIRE * 8 / 7, "7/8"),
    ("strategy_wire", WIRE * 3, "Backward counts"),
    ("strategy_wire", WIRE / 4, "four all-reduces"),
    ("strategy_wire", WIRE / 1e9, "In GB/s it is right"),
    ("strategy_days", DAYS, None),
    ("strategy_days", DAYS * 86400, "seconds"),
    ("strategy_days", DAYS / 3, "forward alone"),
    ("strategy_days", DAYS * 0.4, "takes longer"),
    ("strategy_days", DAYS * 8 / 6, "Nothing is recomputed"),
    ("strategy_corner", corner, None),
    ("strategy_corner", averaged, "Do slow runs"),
    ("strategy_corner", slow_rate, "small layers"),
    ("strategy_corner", lambda layers: corner(layers)[::-1], "other order"),
    ("strategy_corner", lambda layers: None, "should return (launch, rate)"),
    ("strategy_corner", lambda layers: ("fast", 1), "launch should be a number"),
    ("strategy_corner", 3, "should be a function"),
    ("strategy_layout", laid_out(), None),
    ("strategy_layout", laid_out(dp=2, pp=4, microbatches=128), None),
    ("strategy_layout", (8, 8), "should be a strategy.Layout"),
    ("strategy_layout", laid_out(pp=4), "there are 64 GPUs"),
    ("strategy_layout", laid_out(microbatches=64), "a step has 256"),
    ("strategy_layout", laid_out(tp=1, pp=64), "cannot be cut"),
    ("strategy_layout", Layout(64, microbatches=4), "does not fit"),
    ("strategy_layout", laid_out(dp=8, pp=1, zero=3, microbatches=32), "the longest is: data"),
    ("strategy_layout", laid_out(pp=8, recompute="full"), "above the fastest"),
]


@each(ANSWERS)
def test_exercises_accept_the_solution_and_help_with_mistakes(name, answer, words):
    judged(name, answer, words)
