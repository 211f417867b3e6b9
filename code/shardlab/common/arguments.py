"""What every part of the course asks of what it is given. The standard library alone.

One check stands at each door: in a public function, or where an object is made. Each raises
ValueError with the argument's name, the value and what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

# More than any machine has: a larger number is a mistake, and often one that would run for ever.
MOST = 10**18  # of bytes, tokens, elements, seconds, operations a second
SIZES = 10**9  # of a sequence, a batch, a vocabulary, a layer's width
RANKS = 10**6  # of ranks, nodes, stages, micro-batches: gone through one by one
LAYERS = 10**4  # of a model's layers, heads, experts
PROCESSES = 10**3  # that one machine is asked to start


def is_whole(value: object, least: int = 0, most: float = math.inf) -> bool:
    """Whether `value` is a whole number from `least` to `most`; True is none."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def check_whole(least: int = 1, most: int = MOST, **values: int) -> None:
    """Raise ValueError for a value, given by its argument's name, that is no whole number."""
    for name, value in values.items():
        if not is_whole(value, least, most):
            ends = most < LAYERS or is_whole(value, most)
            allowed = f"{least} to {most:,}" if ends else f"{least} or more"
            raise ValueError(f"{name}={told(value)}: allowed are whole numbers, {allowed}")


def check_count(least: int = 1, **values: int) -> None:
    """The same for what is gone through one by one, and so is RANKS at most."""
    check_whole(least, RANKS, **values)


def check_number(least: float | None = None, most: float = MOST, **values: float) -> None:
    """Raise ValueError for a value that is no number from `least`, or, without it, above 0.

    most: math.inf lets infinity pass, and no other number above MOST.
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
    """Raise ValueError for a value that is none of those `allowed`; True is not 1."""
    allowed = list(allowed)
    for name, value in values.items():
        if not any(type(value) is type(a) and value == a for a in allowed):
            raise ValueError(f"{name}={told(value)}: allowed are {listed(allowed)}")


def check_kind(kind: type | tuple[type, ...], **values: object) -> None:
    """Raise ValueError for an object of another kind, or of none of several."""
    for name, value in values.items():
        if not isinstance(value, kind):
            names = [k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,))]
            allowed = " or ".join(f"a{'n' if n[0] in 'AEIO' else ''} {n}" for n in names)
            plain = value is None or isinstance(value, str | int | float | list | tuple)
            given = told(value) if plain else type(value).__name__
            raise ValueError(f"{name}={given}: allowed is {allowed}")


def check_all(kind: type, **values: Sequence[object]) -> None:
    """Raise ValueError for what is no list, or one with nothing or with another kind in it."""
    for name, each in values.items():
        listed = isinstance(each, Sequence) and each
        if not listed or not all(isinstance(value, kind) for value in each):
            raise ValueError(f"{name}={told(each)}: allowed is a list of {kind.__name__} objects")


def given(**values: Any) -> dict[str, Any]:
    """Those that are not None: for arguments that may be left out."""
    return {name: value for name, value in values.items() if value is not None}


def listed(names: Iterable[object]) -> str:
    """'a', 'b' and 'c', for a message."""
    *most, last = (repr(name) for name in names)
    return f"{', '.join(most)} and {last}" if most else last


def told(value: object) -> str:
    """`value` as Python writes it, on one line and shortened, for a message."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:79]}…"
