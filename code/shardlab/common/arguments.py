"""Argument checks shared by the whole package; imports only the standard library.

Arguments are checked once, in a public function or in an object's constructor. The error names the
argument, its value and the rule: "world_size=0: must be an integer of at least 1".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

# Upper bounds beyond any machine: a larger number is a mistake, and could make code run forever.
MAX_QUANTITY = 10**18  # bytes, tokens, elements, seconds, operations per second
MAX_SIZE = 10**9  # length of a sequence, batch size, vocabulary, width of a layer
MAX_COUNT = 10**6  # ranks, nodes, stages, micro-batches: code loops over each of them
MAX_LAYERS = 10**4  # layers, heads, experts of a model
MAX_PROCESSES = 10**3  # processes to start on one machine


def is_integer(value: object, minimum: int = 0, maximum: float = math.inf) -> bool:
    """Return True if `value` is an integer from `minimum` to `maximum`, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum


def check_integer(minimum: int = 1, maximum: int = MAX_QUANTITY, **values: int) -> None:
    """Raise ValueError for a value that is no integer from `minimum` to `maximum`."""
    for name, value in values.items():
        if not is_integer(value, minimum, maximum):
            bounded = maximum < MAX_LAYERS or is_integer(value, maximum)
            limits = f"from {minimum} to {maximum:,}" if bounded else f"of at least {minimum}"
            raise ValueError(f"{name}={shorten_repr(value)}: must be an integer {limits}")


def check_count(minimum: int = 1, **values: int) -> None:
    """Check like `check_integer`, but at most MAX_COUNT, for items that code loops over."""
    check_integer(minimum, MAX_COUNT, **values)


def check_number(
    minimum: float | None = None, maximum: float = MAX_QUANTITY, **values: float
) -> None:
    """Raise ValueError for a value that is no number of at least `minimum` (None: above 0).

    maximum: math.inf allows infinity, but no other number above MAX_QUANTITY.
    """
    for name, value in values.items():
        real = isinstance(value, Real) and not isinstance(value, bool)
        low = not real or not (value > 0 if minimum is None else value >= minimum)
        if low or (value != maximum and value > min(maximum, MAX_QUANTITY)):
            limits = "above 0" if minimum is None else f"of at least {minimum:g}"
            if maximum < MAX_LAYERS or not low:
                limits += f" and at most {min(maximum, MAX_QUANTITY):g}"
            raise ValueError(f"{name}={shorten_repr(value)}: must be a number {limits}")


def check_one_of(allowed: Iterable[object], **values: object) -> None:
    """Raise ValueError for a value that is not in `allowed`; True does not count as 1."""
    allowed = list(allowed)
    for name, value in values.items():
        if not any(type(value) is type(a) and value == a for a in allowed):
            raise ValueError(f"{name}={shorten_repr(value)}: must be {join_names(allowed)}")


def check_type(kind: type | tuple[type, ...], **values: object) -> None:
    """Raise ValueError for an object that is no instance of `kind`."""
    for name, value in values.items():
        if not isinstance(value, kind):
            names = [k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,))]
            allowed = " or ".join(f"a{'n' if n[0] in 'AEIO' else ''} {n}" for n in names)
            plain = value is None or isinstance(value, str | int | float | list | tuple)
            text = shorten_repr(value) if plain else type(value).__name__
            raise ValueError(f"{name}={text}: must be {allowed}")


def check_list(kind: type, **values: Sequence[object]) -> None:
    """Raise ValueError unless a value is a non-empty list of instances of `kind`."""
    for name, each in values.items():
        valid = isinstance(each, Sequence) and each
        if not valid or not all(isinstance(value, kind) for value in each):
            raise ValueError(
                f"{name}={shorten_repr(each)}: must be a list of {kind.__name__} objects"
            )


def drop_none(**values: Any) -> dict[str, Any]:
    """Return the arguments that are not None, to check optional arguments."""
    return {name: value for name, value in values.items() if value is not None}


def join_names(names: Iterable[object]) -> str:
    """Join the names as "'a', 'b' or 'c'", for a message."""
    *others, last = (repr(name) for name in names)
    return f"{', '.join(others)} or {last}" if others else last


def shorten_repr(value: object) -> str:
    """Return repr(value) on one line and shortened to 80 characters, for a message."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:79]}…"
