"""Boxes: the part of a tensor between a first and an end index along each dimension.

After tensor parallelism a rank holds a box of a matrix; after ZeRO it holds a range of that box's
elements, counted row by row. Such a range is again a few boxes: the rest of a row, whole rows, the
beginning of a row. So whatever two ranks hold, their intersection consists of boxes.

Imports only the standard library.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

Box = tuple[tuple[int, int], ...]


class TensorPiece(NamedTuple):
    """A part of a tensor that a rank holds."""

    name: str  # name of the tensor in the plain model
    box: Box
    tensor: Any  # a writable view of the elements in `box`, in the box's shape


def make_full_box(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor of that shape."""
    return tuple((0, n) for n in shape)


def get_box_shape(box: Box) -> tuple[int, ...]:
    """Return the shape of a tensor that holds exactly the box."""
    return tuple(end - first for first, end in box)


def count_elements(box: Box) -> int:
    """Return the number of elements in a box."""
    return prod(get_box_shape(box))


def intersect_boxes(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes; None if it is empty."""
    found = tuple((max(m, n), min(i, j)) for (m, i), (n, j) in zip(a, b, strict=True))
    return found if all(first < end for first, end in found) else None


def infer_full_shapes(parts: Iterable[tuple[str, Box]]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each whole tensor, by name, from the boxes that cover it."""
    found: dict[str, tuple[int, ...]] = {}
    for name, box in parts:
        ends = tuple(end for _, end in box)
        found[name] = tuple(map(max, found.get(name, ends), ends))
    return found


def get_slices(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return the slices of `box` in a tensor that holds exactly `outer`."""
    return tuple(
        slice(first - begin, end - begin)
        for (first, end), (begin, _) in zip(box, outer, strict=True)
    )


def take_shard(box: Box, dimension: int | None, index: int, count: int) -> Box:
    """Return part `index` of `count` equal parts along a dimension; None: the whole box."""
    if dimension is None:
        return box
    first, end = box[dimension]
    each = (end - first) // count
    own = first + index * each, first + (index + 1) * each
    return (*box[:dimension], own, *box[dimension + 1 :])


def iter_range_boxes(box: Box, first: int, end: int) -> Iterator[Box]:
    """Yield, in order, the boxes of elements `first` to `end` of `box`, counted row by row."""
    if first >= end:
        return
    if not box:  # a scalar
        yield ()
        return
    (begin, _), *rest = box
    inner = tuple(rest)
    size = count_elements(inner)
    (row, low), (last, high) = divmod(first, size), divmod(end, size)

    def iter_row(number: int, low: int, high: int) -> Iterator[Box]:
        for found in iter_range_boxes(inner, low, high):
            yield ((begin + number, begin + number + 1), *found)

    if row == last:
        yield from iter_row(row, low, high)
        return
    if low:
        yield from iter_row(row, low, size)
        row += 1
    if row < last:
        yield ((begin + row, begin + last), *inner)
    yield from iter_row(last, 0, high)
