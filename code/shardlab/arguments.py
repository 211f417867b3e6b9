"""What every part of the course asks of a number that it is given. The standard library alone."""

from __future__ import annotations

from numbers import Real


def check_whole(least: int = 1, **values: int) -> None:
    """Raise ValueError for a value, given by its argument's name, that is no whole number."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value!r}: allowed are whole numbers, {least} or more")


def check_number(least: float | None = None, **values: float) -> None:
    """Raise ValueError for a value that is no number from `least`, or, without it, above 0."""
    for name, value in values.items():
        real = isinstance(value, Real) and not isinstance(value, bool)
        if not real or not (value > 0 if least is None else value >= least):
            allowed = "above 0" if least is None else f"from {least:g}"
            raise ValueError(f"{name}={value!r}: allowed are numbers {allowed}")


def check_bytes(**sizes: int) -> None:
    """Raise ValueError for a size, given by its argument's name, that is no number of bytes."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: allowed is a whole number of bytes, 1 or more")
