"""Candidate places of a rank's part in the whole tensor: proposed by CUTS, the likeliest first.

The numbers decide which one is right, not what a module computes. A new kind of cut is a function
of sizes, and a row of CUTS.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, product
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

Index = range | Tensor | None  # along one dimension; None: everything; -1 in a tensor: padding
Shape = tuple[int, ...]
LOOKED_AT = 600  # proposals for one part, at most
BEGINS = 5000  # starts of one flat piece that are tried, at most: a constant fits all
ROWS = 8192  # most rows of a whole for which rows in any order are searched
SLOW = 4  # most places of each column cut that are tried with rows in any order


@dataclass(frozen=True, eq=False)
class Place:
    """A place: part == whole.view(view)[index of each dimension], or a flat piece of that."""

    view: Shape  # the whole's shape, or that of its rows
    index: tuple[Index, ...]
    shape: Shape  # the part's
    piece: int | None = None  # start of a flat piece after the cuts; past the end is padding

    def of(self, whole: Tensor) -> Tensor:
        """Return the numbers of `whole` at this place, with zeros for padding."""
        x = whole.reshape(self.view)
        for dimension, index in enumerate(self.index):
            if isinstance(index, range):
                along = slice(index.start, index.stop, index.step)
                x = x[(slice(None),) * dimension + (along,)]
            elif index is not None:
                x = x.index_select(dimension, index.clamp_min(0))
                if (index < 0).any():
                    shape = [1] * x.dim()
                    shape[dimension] = -1
                    x = x.masked_fill((index < 0).view(shape), 0)
        if self.piece is not None:
            size = prod(self.shape)
            x = x.flatten()[self.piece : self.piece + size]
            x = F.pad(x, (0, size - x.numel()))
        return x.reshape(self.shape)

    def mark(self, had: Tensor) -> None:
        """Set this place to True in `had`, a boolean tensor with the whole's shape."""
        numbers = self.of(torch.arange(1, had.numel() + 1).view(had.shape))
        had.view(-1)[numbers[numbers > 0] - 1] = True

    def later(self, numbers: int, whole: Shape) -> Place | None:
        """Return this place in the whole of all calls, `numbers` numbers further on."""
        width = prod(self.view[1:])
        if self.piece is not None or not self.view or not width or numbers % width:
            return None
        rows, first = numbers // width, self.index[0]
        if isinstance(first, Tensor):
            first = torch.where(first < 0, first, first + rows)
        else:
            first = first or range(self.view[0])
            first = range(first.start + rows, first.stop + rows, first.step)
        view = (prod(whole) // width, *self.view[1:])
        return Place(view, (first, *self.index[1:]), self.shape)

    def holds(self, value: Tensor) -> bool:
        """Return True if the place has as many numbers as `value`."""
        return prod(self.shape) == value.numel()

    def same(self, other: Place) -> bool:
        """Return True if both places have the same view, indices, shape and piece."""
        return self._words() == other._words()

    def _words(self) -> tuple[object, ...]:
        index = (tuple(i.tolist()) if isinstance(i, Tensor) else i for i in self.index)
        return self.view, *index, self.shape, self.piece


# Cuts of one dimension: `size` of `total` numbers. `first`: the number of the likeliest part.


def _padded(size: int, total: int, first: int) -> Iterator[Index]:
    """Yield all numbers, with padding behind them."""
    if size > total:
        yield torch.cat((torch.arange(total), torch.full((size - total,), -1)))


def _even(size: int, total: int, first: int) -> Iterator[Index]:
    for n in _order(size, total, first):
        yield range(n * size, (n + 1) * size)


def _zigzag(size: int, total: int, first: int) -> Iterator[Index]:
    """Yield an early and a late piece, as context parallelism cuts a causal sequence."""
    if size % 2 == 0:
        ranks, half = total // size, size // 2
        for n in _order(size, total, first):
            late = 2 * ranks - 1 - n
            pieces = (torch.arange(k * half, (k + 1) * half) for k in (n, late))
            yield torch.cat(tuple(pieces))


def _strided(size: int, total: int, first: int) -> Iterator[Index]:
    """Yield every step-th number, of all or of a piece, such as strided shares of micro-batches."""
    for step in range(total // max(size, 1), 1, -1):
        for n in _order(size, total, first) if total % (step * size) == 0 else ():
            start = n // step * step * size + n % step
            yield range(start, start + step * size, step)


def _in_sections(size: int, total: int, first: int) -> Iterator[Index]:
    """Yield a part of each section: gate and up, or queries, keys and values, in one matrix."""
    for sections in (2, 3):
        if size % sections == 0 and total % sections == 0:
            for n in _order(size, total, first):
                pieces = (s.chunk(total // size)[n] for s in torch.arange(total).chunk(sections))
                yield torch.cat(tuple(pieces))


def _uneven(size: int, total: int, first: int) -> Iterator[Index]:
    """Yield parts among parts of other sizes: the last of padded ones; then from any start."""
    if 0 < size < total:
        for start in range(-(-total // size) * size)[::size] if total % size else ():
            piece = torch.arange(start, start + size)
            yield piece.masked_fill(piece >= total, -1)
        for start in range(total - size + 1):
            yield range(start, start + size)


def _order(size: int, total: int, first: int) -> Iterator[int]:
    """Yield the numbers of equal parts, the likeliest first."""
    if 0 < size < total and total % size == 0:
        ranks = total // size
        yield from ((first + n) % ranks for n in range(ranks))


CUTS = _padded, _even, _zigzag, _strided, _in_sections, _uneven


def proposals(
    part: Shape, whole: Shape, first: int = 0, start: Shape | None = None
) -> Iterator[Place]:
    """Yield places for a part of this shape in a whole of that shape; start: a DTensor's offset."""
    part, whole = tuple(part), tuple(whole)
    if start is not None and len(part) == len(whole):
        told = tuple(range(b, b + size) for b, size in zip(start, part, strict=True))
        if all(r.stop <= total for r, total in zip(told, whole, strict=True)):
            yield Place(whole, told, part)
    if prod(part) == 0:
        yield Place(whole, (range(0),) + (None,) * (len(whole) - 1), part)
    elif part == whole:
        yield Place(whole, (None,) * len(whole), part)
    elif len(part) == len(whole):
        yield from islice(_cut(part, whole, part, first), LOOKED_AT)
    elif min(len(part), len(whole)) > 1 and part[-1] == whole[-1]:  # rows, however they are grouped
        rows = (prod(part[:-1]), part[-1]), (prod(whole[:-1]), whole[-1])
        if rows[0] == rows[1]:
            yield Place(whole, (None,) * len(whole), part)
        else:
            yield from islice(_cut(*rows, part, first), LOOKED_AT)


def _cut(part: Shape, whole: Shape, shape: Shape, first: int) -> Iterator[Place]:
    differ = [d for d in range(len(whole)) if part[d] != whole[d]]
    if len(differ) > 2:
        return
    for cuts in (CUTS[:-1], CUTS)[len(differ) < 2 :]:  # in two dimensions uneven cuts come last
        ways = (
            [i for cut in cuts for i in islice(cut(part[d], whole[d], first), LOOKED_AT)]
            for d in differ
        )
        for chosen in product(*ways):
            index: list[Index] = [None] * len(whole)
            for dimension, one in zip(differ, chosen, strict=True):
                index[dimension] = one
            yield Place(whole, tuple(index), shape)


def pieces(part: Tensor, whole: Tensor, ranks: int) -> Iterator[Place]:
    """Yield places of a flat piece of the whole, or of the whole cut along one dimension."""
    size, shape = part.numel(), tuple(part.shape)
    if part.dim() != 1 or not size:
        return
    bases: list[tuple[Index, ...]] = [(None,) * whole.dim()]
    for degree in (d for d in range(2, ranks + 1) if ranks % d == 0):
        for dimension, total in enumerate(whole.shape):
            for n in range(degree) if total % degree == 0 else ():
                index: list[Index] = [None] * whole.dim()
                index[dimension] = range(n * total // degree, (n + 1) * total // degree)
                bases.append(tuple(index))
    view = tuple(whole.shape)
    for index in bases:
        cut = [t if i is None else len(i) for i, t in zip(index, whole.shape, strict=True)]
        base = Place(view, index, (prod(cut),)).of(whole)
        begins = (base == part[0]).nonzero().flatten()
        last = part.nonzero().flatten()[-1:]  # zeros after the last nonzero may be padding
        if len(last):
            ends = (begins + last < len(base)).nonzero().flatten()
            begins = begins[ends]
            begins = begins[base[begins + last] == part[last]]
        begins = begins if len(begins) else _begins(part[: last + 1] if len(last) else part, base)
        for begin in begins[:BEGINS].tolist():
            yield Place(view, index, shape, begin)


def _begins(part: Tensor, base: Tensor) -> Tensor:
    """Return the likeliest starts of a piece without equal bits (trained), by some numbers."""
    ends = len(base) - len(part) + 1
    if ends < 1:
        return base.new_empty(0, dtype=torch.long)
    apart = sum(
        (base[at : at + ends] - part[at]).abs().float()
        for at in torch.linspace(0, len(part) - 1, min(len(part), 16)).long().tolist()
    )
    return apart.topk(min(4, ends), largest=False).indices


def in_any_order(part: Tensor, whole: Tensor, first: int = 0) -> Iterator[Place | None]:
    """Yield places of samples or rows in any order, and of rows whose columns are cut."""
    size, total = part.shape[-1:], whole.shape[-1:]
    if min(part.dim(), whole.dim()) > 2 and part.shape[1:] == whole.shape[1:]:
        each = by_rows(part.flatten(1), whole.flatten(1))
        yield None if each is None else replace(each, shape=tuple(part.shape))
    yield by_rows(part, whole)
    for cut in CUTS[1:-1] if len(size) and len(total) else ():
        for columns in islice(cut(size[0], total[0], first), SLOW):
            yield by_rows(part, whole, columns)


def by_rows(part: Tensor, whole: Tensor, columns: Index = None) -> Place | None:
    """Match each row of the part to the most similar row of the whole, in any order."""
    if min(part.dim(), whole.dim()) < 2 or not part.numel():
        return None
    mine, all_ = part.reshape(-1, part.shape[-1]), whole.reshape(-1, whole.shape[-1])
    if len(all_) > ROWS or (columns is None and mine.shape[1] != all_.shape[1]):
        return None
    cut = Place(tuple(all_.shape), (None, columns), (len(all_), mine.shape[1])).of(all_)
    return Place(tuple(all_.shape), (_nearest(mine, cut), columns), tuple(part.shape))


def by_twins(stood: Place, *pairs: tuple[Tensor, Tensor]) -> Place | None:
    """Match rows in any order, with columns as they stood, over pairs of part and whole.

    Rows that are equal in one pair are told apart by the others.
    """
    view = pairs[0][1].numel() // max(1, pairs[0][1].shape[-1]), pairs[0][1].shape[-1]
    if min(len(stood.shape), pairs[0][1].dim()) < 2 or stood.piece is not None or view[0] > ROWS:
        return None
    cut = Place(view, (None, stood.index[-1]), (view[0], stood.shape[-1]))
    sizes = [whole.float().norm().clamp_min(1e-30) for _, whole in pairs]
    all_ = [cut.of(whole) / size for (_, whole), size in zip(pairs, sizes, strict=True)]
    mine = [
        part.reshape(-1, cut.shape[1]) / size for (part, _), size in zip(pairs, sizes, strict=True)
    ]
    index = _nearest(torch.cat(mine, 1), torch.cat(all_, 1))
    return Place(view, (index, cut.index[1]), stood.shape)


def _nearest(part: Tensor, whole: Tensor) -> Tensor:
    """Return the number of the most similar row for each row, by 16 random projections."""
    generator = torch.Generator().manual_seed(0)
    sketch = torch.randn(part.shape[1], 16, generator=generator)
    return apart(part.float() @ sketch, whole.float() @ sketch).argmin(1)


def apart(rows: Tensor, others: Tensor) -> Tensor:
    """Return the distance of each row from each other row, 0 where they are equal.

    The matrix products that torch takes for more than 25 rows would leave the root of rounding
    errors.
    """
    return torch.cdist(rows, others, compute_mode="donot_use_mm_for_euclid_dist")
