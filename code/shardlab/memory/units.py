"""Units of memory, and what every part of `shardlab.memory` refuses in the same words."""

from __future__ import annotations

from shardlab.common.arguments import check_one_of, check_whole

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
    check_one_of(UNITS, unit=unit)
    scale = UNITS[unit]
    return f"{size:,.0f} B" if scale == 1 else f"{size / scale:,.{digits}f} {unit}"


def whole(argument: str, value: float) -> int:
    """`value` as an int, or ValueError; 7.5e9 is a whole number, too."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    check_whole(**{argument: value})
    return value


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up: what the most loaded of b ranks gets of a things."""
    return -(-a // b)
