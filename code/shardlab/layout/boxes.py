"""Boxes: the part of a tensor between a first and an end index along each dimension.

After tensor parallelism a rank holds a box of a matrix; after ZeRO it holds a range of that box's
elements, counted row by row. Such a range is again a few boxes: the rest of a row, whole rows, the
beginning of a row. So whatever two ranks hold, their intersection consists of boxes.

The standard library alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

Box = tuple[tuple[int, int], ...]


class Piece(NamedTuple):
    """A part of a tensor that a rank holds."""

    name: str  # name of the tensor in the plain model
    box: Box
    tensor: Any  # a writable view of the elements in `box`, in the box's shape


def whole(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor of that shape."""
    return tuple((0, n) for n in shape)


def shape(box: Box) -> tuple[int, ...]:
    """Return the shape of a tensor that holds exactly the box."""
    return tuple(end - first for first, end in box)


def elements(box: Box) -> int:
    """Return the number of elements in a box."""
    return prod(shape(box))


def common(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes; None if it is empty."""
    found = tuple((max(m, n), min(i, j)) for (m, i), (n, j) in zip(a, b, strict=True))
    return found if all(first < end for first, end in found) else None


def spanned(parts: Iterable[tuple[str, Box]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of whole tensors, by name, from all boxes of them."""
    found: dict[str, tuple[int, ...]] = {}
    for name, box in parts:
        ends = tuple(end for _, end in box)
        found[name] = tuple(map(max, found.get(name, ends), ends))
    return found


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return the slices of `box` in a tensor that holds exactly `outer`."""
    return tuple(
        slice(first - begin, end - begin)
        for (first, end), (begin, _) in zip(box, outer, strict=True)
    )


def share(box: Box, dimension: int | None, number: int, of: int) -> Box:
    """Return part `number` of `of` equal parts along a dimension; None: the whole box."""
    if dimension is None:
        return box
    first, end = box[dimension]
    each = (end - first) // of
    own = first + number * each, first + (number + 1) * each
    return (*box[:dimension], own, *box[dimension + 1 :])


def stretch(box: Box, first: int, end: int) -> Iterator[Box]:
    """Yield, in order, the boxes of elements `first` to `end` of `box`, counted row by row."""
    if first >= end:
        return
    if not box:  # a scalar
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
