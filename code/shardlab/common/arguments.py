"""Argument checks shared by the whole package; imports only the standard library.

Arguments are checked once, in a public function or in an object's constructor. A check raises
ValueError with the argument's name, the value and the allowed values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

# Upper bounds beyond any machine: a larger number is a mistake, and could make code run forever.
MOST = 10**18  # bytes, tokens, elements, seconds, operations per second
SIZES = 10**9  # length of a sequence, batch size, vocabulary, width of a layer
RANKS = 10**6  # ranks, nodes, stages, micro-batches: code loops over each of them
LAYERS = 10**4  # layers, heads, experts of a model
PROCESSES = 10**3  # processes to start on one machine


def is_whole(value: object, least: int = 0, most: float = math.inf) -> bool:
    """Return True if `value` is an integer from `least` to `most`, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def check_whole(least: int = 1, most: int = MOST, **values: int) -> None:
    """Raise ValueError for a value (argument=value) that is no integer from `least` to `most`."""
    for name, value in values.items():
        if not is_whole(value, least, most):
            ends = most < LAYERS or is_whole(value, most)
            allowed = f"{least} to {most:,}" if ends else f"{least} or more"
            raise ValueError(f"{name}={told(value)}: allowed are whole numbers, {allowed}")


def check_count(least: int = 1, **values: int) -> None:
    """Check like `check_whole`, but at most RANKS, for numbers of items that code loops over."""
    check_whole(least, RANKS, **values)


def check_number(least: float | None = None, most: float = MOST, **values: float) -> None:
    """Raise ValueError for a value that is no number of at least `least`, or, if None, above 0.

    most: math.inf allows infinity, but no other number above MOST.
    """
    for name, value in values.items():
        real = isinstance(value, Real) and not isinstance(value, bool)
        low = not real or not (value > 0 if least is None else value >= least)
        if low or (value != most and value > min(most, MOST)):
            allowed = "above 0" if least is None else f"from {least:g}"
            if most < LAYERS or not low:
                allowed += f" to {min(most, MOST):g}"
            raise ValueError(f"{name}={told(value)}: allowed are numbers {allowed}")


def check_one_of(allowed: Iterable[object], **values: object) -> None:
    """Raise ValueError for a value that is not in `allowed`; True does not count as 1."""
    allowed = list(allowed)
    for name, value in values.items():
        if not any(type(value) is type(a) and value == a for a in allowed):
            raise ValueError(f"{name}={told(value)}: allowed are {listed(allowed)}")


def check_kind(kind: type | tuple[type, ...], **values: object) -> None:
    """Raise ValueError for an object that is no instance of `kind`."""
    for name, value in values.items():
        if not isinstance(value, kind):
            names = [k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,))]
            allowed = " or ".join(f"a{'n' if n[0] in 'AEIO' else ''} {n}" for n in names)
            plain = value is None or isinstance(value, str | int | float | list | tuple)
            given = told(value) if plain else type(value).__name__
            raise ValueError(f"{name}={given}: allowed is {allowed}")


def check_all(kind: type, **values: Sequence[object]) -> None:
    """Raise ValueError unless a value is a non-empty list of instances of `kind`."""
    for name, each in values.items():
        listed = isinstance(each, Sequence) and each
        if not listed or not all(isinstance(value, kind) for value in each):
            raise ValueError(f"{name}={told(each)}: allowed is a list of {kind.__name__} objects")


def given(**values: Any) -> dict[str, Any]:
    """Return the arguments that are not None, to check optional arguments."""
    return {name: value for name, value in values.items() if value is not None}


def listed(names: Iterable[object]) -> str:
    """Join names as "'a', 'b' and 'c'", for a message."""
    *most, last = (repr(name) for name in names)
    return f"{', '.join(most)} and {last}" if most else last


def told(value: object) -> str:
    """Return repr(value) on one line and shortened to 80 characters, for a message."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:79]}…"
