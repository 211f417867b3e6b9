"""Which part of a tensor: a first and an end along each of its dimensions.

What a rank holds of a matrix is a box of it where tensor parallelism has cut it, and a stretch of
that box's numbers, counted row by row, where ZeRO has. A stretch is a few boxes again: the rest of
a row, whole rows, the beginning of a row. So whatever two ranks hold, what both have is a box.

The standard library alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

Box = tuple[tuple[int, int], ...]


class Piece(NamedTuple):
    """What a rank holds of a tensor."""

    name: str  # of the tensor, in the plain model
    box: Box
    tensor: Any  # with the numbers in that box, in its shape: a view, so that it can be filled


def whole(shape: Sequence[int]) -> Box:
    """All of a tensor of that shape."""
    return tuple((0, n) for n in shape)


def shape(box: Box) -> tuple[int, ...]:
    """Of a tensor that holds it alone."""
    return tuple(end - first for first, end in box)


def elements(box: Box) -> int:
    """Of it."""
    return prod(shape(box))


def common(a: Box, b: Box) -> Box | None:
    """What is in both; None: nothing."""
    found = tuple((max(m, n), min(i, j)) for (m, i), (n, j) in zip(a, b, strict=True))
    return found if all(first < end for first, end in found) else None


def spanned(parts: Iterable[tuple[str, Box]]) -> dict[str, tuple[int, ...]]:
    """The shapes of whole tensors, by name, from all the boxes that there are of them."""
    found: dict[str, tuple[int, ...]] = {}
    for name, box in parts:
        ends = tuple(end for _, end in box)
        found[name] = tuple(map(max, found.get(name, ends), ends))
    return found


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Where `box` stands in a tensor that holds `outer` alone."""
    return tuple(
        slice(first - begin, end - begin)
        for (first, end), (begin, _) in zip(box, outer, strict=True)
    )


def share(box: Box, dimension: int | None, number: int, of: int) -> Box:
    """The part of that number of `of` equal ones along a dimension; None: all of it."""
    if dimension is None:
        return box
    first, end = box[dimension]
    each = (end - first) // of
    own = first + number * each, first + (number + 1) * each
    return (*box[:dimension], own, *box[dimension + 1 :])


def stretch(box: Box, first: int, end: int) -> Iterator[Box]:
    """The boxes that are numbers `first` to `end` of `box`, counted row by row: in that order."""
    if first >= end:
        return
    if not box:  # a single number
        yield ()
        return
    (begin, _), *rest = box
    inner = tuple(rest)
    (row, low), (last, high) = divmod(first, elements(inner)), divmod(end, elements(inner))

    def of_row(number: int, low: int, high: int) -> Iterator[Box]:
        for found in stretch(inner, low, high):
            yield ((begin + number, begin + number + 1), *found)

    if row == last:
        yield from of_row(row, low, high)
        return
    if low:
        yield from of_row(row, low, elements(inner))
        row += 1
    if row < last:
        yield ((begin + row, begin + last), *inner)
    yield from of_row(last, 0, high)
