"""Units of memory."""

from __future__ import annotations

from shardlab.common.arguments import check_one_of

# GB is 10^9 bytes for disk makers and in papers; an operating system's GiB is 2^30, 7 % more. torch
# and DeepSpeed print GiB, and DeepSpeed calls them "GB".
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


def format_bytes(size: float, unit: str = "GB") -> str:
    """Format bytes in a unit of `UNITS`: 31_406_250_000 is "31.41 GB"."""
    check_one_of(UNITS, unit=unit)
    scale = UNITS[unit]
    return f"{size:,.0f} B" if scale == 1 else f"{size / scale:,.2f} {unit}"


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up: the share of the most loaded of b ranks."""
    return -(-a // b)
