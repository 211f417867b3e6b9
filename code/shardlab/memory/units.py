"""Units of memory, and what every part of `shardlab.memory` refuses in the same words."""

from __future__ import annotations

from collections.abc import Iterable

from shardlab.arguments import MOST, check_number, check_one_of, check_whole

# A disk maker's GB is 10^9 bytes, and so is the GB of papers; an operating system's GiB is 2^30,
# 7 % more. torch and DeepSpeed print GiB, the latter under the name "GB".
UNITS: dict[str, int] = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


def format_bytes(size: float, unit: str = "GB", digits: int = 2) -> str:
    """`size` bytes in a unit of `UNITS`: format_bytes(31_406_250_000) is "31.41 GB"."""
    check_number(-MOST, size=size)
    check_whole(0, 20, digits=digits)
    scale = UNITS[one_of("unit", unit, UNITS)]
    return f"{size:,.0f} B" if scale == 1 else f"{size / scale:,.{digits}f} {unit}"


def one_of(argument: str, value: object, allowed: Iterable[object]) -> object:
    """`value`, or ValueError that names the argument and what is allowed."""
    check_one_of(allowed, **{argument: value})
    return value


def whole(
    argument: str, value: float, least: int = 1, floats: bool = False, most: int | None = None
) -> int:
    """`value` as an int, or ValueError. floats: 7.5e9 is a whole number too."""
    if floats and isinstance(value, float) and value.is_integer():
        value = int(value)
    check_whole(least, **{argument: value})
    if most is not None and value > most:
        raise ValueError(f"{argument}={value}: allowed are whole numbers, {least} to {most:,}")
    return value


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up: what the most loaded of b ranks gets of a things."""
    return -(-a // b)
