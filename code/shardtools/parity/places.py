"""Candidate places of a rank's part in the full tensor: proposed by CUTS, the likeliest first.

The numbers decide which place is right, not the kind of module. A new kind of cut is a function
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
MAX_PROPOSALS = 600  # for one part
MAX_PIECE_STARTS = 5000  # starts of one flat piece that are tried: a constant fits all
MAX_ROWS = 8192  # rows of a full tensor above which no permutation of rows is searched
MAX_COLUMN_CUTS = 4  # places of each column cut that are tried with permuted rows


@dataclass(frozen=True, eq=False)
class Place:
    """A place: part == full.view(view)[index of each dimension], or a flat piece of that."""

    view: Shape  # shape of the full tensor, or of its rows
    index: tuple[Index, ...]
    shape: Shape  # shape of the part
    piece_start: int | None = None  # start of a flat piece after the cuts; past the end is padding

    def take_from(self, full: Tensor) -> Tensor:
        """Return the numbers of `full` at this place, with zeros for padding."""
        x = full.reshape(self.view)
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
        if self.piece_start is not None:
            size = prod(self.shape)
            x = x.flatten()[self.piece_start : self.piece_start + size]
            x = F.pad(x, (0, size - x.numel()))
        return x.reshape(self.shape)

    def mark_in(self, mask: Tensor) -> None:
        """Set this place to True in a boolean tensor with the full tensor's shape."""
        numbers = self.take_from(torch.arange(1, mask.numel() + 1).view(mask.shape))
        mask.view(-1)[numbers[numbers > 0] - 1] = True

    def shift_by(self, numbers: int, full: Shape) -> Place | None:
        """Return this place `numbers` numbers further on, in the joined tensor of all calls."""
        width = prod(self.view[1:])
        if self.piece_start is not None or not self.view or not width or numbers % width:
            return None
        rows, first = numbers // width, self.index[0]
        if isinstance(first, Tensor):
            first = torch.where(first < 0, first, first + rows)
        else:
            first = first or range(self.view[0])
            first = range(first.start + rows, first.stop + rows, first.step)
        view = (prod(full) // width, *self.view[1:])
        return Place(view, (first, *self.index[1:]), self.shape)

    def fits_size(self, value: Tensor) -> bool:
        """Return True if the place has as many numbers as `value`."""
        return prod(self.shape) == value.numel()

    def is_same(self, other: Place) -> bool:
        """Return True if both places have the same view, indices, shape and piece start."""
        return self._as_tuple() == other._as_tuple()

    def _as_tuple(self) -> tuple[object, ...]:
        index = (tuple(i.tolist()) if isinstance(i, Tensor) else i for i in self.index)
        return self.view, *index, self.shape, self.piece_start


# Cuts of one dimension: `size` of `total` numbers. `first`: the number of the likeliest part.


def _cut_padded(size: int, total: int, first: int) -> Iterator[Index]:
    if size > total:
        yield torch.cat((torch.arange(total), torch.full((size - total,), -1)))


def _cut_even(size: int, total: int, first: int) -> Iterator[Index]:
    for n in _order_parts(size, total, first):
        yield range(n * size, (n + 1) * size)


def _cut_zigzag(size: int, total: int, first: int) -> Iterator[Index]:
    """Yield an early and a late piece, as context parallelism cuts a causal sequence."""
    if size % 2 == 0:
        ranks, half = total // size, size // 2
        for n in _order_parts(size, total, first):
            late = 2 * ranks - 1 - n
            pieces = (torch.arange(k * half, (k + 1) * half) for k in (n, late))
            yield torch.cat(tuple(pieces))


def _cut_strided(size: int, total: int, first: int) -> Iterator[Index]:
    """Yield every step-th number, of all or of a piece, such as strided shares of micro-batches."""
    for step in range(total // max(size, 1), 1, -1):
        for n in _order_parts(size, total, first) if total % (step * size) == 0 else ():
            start = n // step * step * size + n % step
            yield range(start, start + step * size, step)


def _cut_sections(size: int, total: int, first: int) -> Iterator[Index]:
    """Yield a part of each section: gate and up, or queries, keys and values, in one matrix."""
    for sections in (2, 3):
        if size % sections == 0 and total % sections == 0:
            for n in _order_parts(size, total, first):
                pieces = (s.chunk(total // size)[n] for s in torch.arange(total).chunk(sections))
                yield torch.cat(tuple(pieces))


def _cut_uneven(size: int, total: int, first: int) -> Iterator[Index]:
    """Yield parts among parts of other sizes: the last of padded ones; then from any start."""
    if 0 < size < total:
        for start in range(-(-total // size) * size)[::size] if total % size else ():
            piece = torch.arange(start, start + size)
            yield piece.masked_fill(piece >= total, -1)
        for start in range(total - size + 1):
            yield range(start, start + size)


def _order_parts(size: int, total: int, first: int) -> Iterator[int]:
    if 0 < size < total and total % size == 0:
        ranks = total // size
        yield from ((first + n) % ranks for n in range(ranks))


CUTS = _cut_padded, _cut_even, _cut_zigzag, _cut_strided, _cut_sections, _cut_uneven


def propose_places(
    part: Shape, full: Shape, first: int = 0, offset: Shape | None = None
) -> Iterator[Place]:
    """Yield places for a part of this shape in a tensor of that shape; offset: a DTensor's."""
    part, full = tuple(part), tuple(full)
    if offset is not None and len(part) == len(full):
        index = tuple(range(b, b + size) for b, size in zip(offset, part, strict=True))
        if all(r.stop <= total for r, total in zip(index, full, strict=True)):
            yield Place(full, index, part)
    if prod(part) == 0:
        yield Place(full, (range(0),) + (None,) * (len(full) - 1), part)
    elif part == full:
        yield Place(full, (None,) * len(full), part)
    elif len(part) == len(full):
        yield from islice(_propose_cuts(part, full, part, first), MAX_PROPOSALS)
    elif min(len(part), len(full)) > 1 and part[-1] == full[-1]:  # rows, however they are grouped
        rows = (prod(part[:-1]), part[-1]), (prod(full[:-1]), full[-1])
        if rows[0] == rows[1]:
            yield Place(full, (None,) * len(full), part)
        else:
            yield from islice(_propose_cuts(*rows, part, first), MAX_PROPOSALS)


def _propose_cuts(part: Shape, full: Shape, shape: Shape, first: int) -> Iterator[Place]:
    differ = [d for d in range(len(full)) if part[d] != full[d]]
    if len(differ) > 2:
        return
    for cuts in (CUTS[:-1], CUTS)[len(differ) < 2 :]:  # in two dimensions uneven cuts come last
        indices = (
            [i for cut in cuts for i in islice(cut(part[d], full[d], first), MAX_PROPOSALS)]
            for d in differ
        )
        for chosen in product(*indices):
            index: list[Index] = [None] * len(full)
            for dimension, chosen_index in zip(differ, chosen, strict=True):
                index[dimension] = chosen_index
            yield Place(full, tuple(index), shape)


def propose_pieces(part: Tensor, full: Tensor, ranks: int) -> Iterator[Place]:
    """Yield places of a flat piece of the full tensor, or of one cut along one dimension."""
    size, shape = part.numel(), tuple(part.shape)
    if part.dim() != 1 or not size:
        return
    bases: list[tuple[Index, ...]] = [(None,) * full.dim()]
    for degree in (d for d in range(2, ranks + 1) if ranks % d == 0):
        for dimension, total in enumerate(full.shape):
            for n in range(degree) if total % degree == 0 else ():
                index: list[Index] = [None] * full.dim()
                index[dimension] = range(n * total // degree, (n + 1) * total // degree)
                bases.append(tuple(index))
    view = tuple(full.shape)
    for index in bases:
        cut = [t if i is None else len(i) for i, t in zip(index, full.shape, strict=True)]
        base = Place(view, index, (prod(cut),)).take_from(full)
        starts = (base == part[0]).nonzero().flatten()
        last = part.nonzero().flatten()[-1:]  # zeros after the last nonzero may be padding
        if len(last):
            ends = (starts + last < len(base)).nonzero().flatten()
            starts = starts[ends]
            starts = starts[base[starts + last] == part[last]]
        if not len(starts):
            starts = _find_piece_starts(part[: last + 1] if len(last) else part, base)
        for begin in starts[:MAX_PIECE_STARTS].tolist():
            yield Place(view, index, shape, begin)


def _find_piece_starts(part: Tensor, base: Tensor) -> Tensor:
    """Return the likeliest starts of a piece without equal bits (trained), by some numbers."""
    ends = len(base) - len(part) + 1
    if ends < 1:
        return base.new_empty(0, dtype=torch.long)
    distances = sum(
        (base[at : at + ends] - part[at]).abs().float()
        for at in torch.linspace(0, len(part) - 1, min(len(part), 16)).long().tolist()
    )
    return distances.topk(min(4, ends), largest=False).indices


def propose_permuted(part: Tensor, full: Tensor, first: int = 0) -> Iterator[Place | None]:
    """Yield places of samples or rows in any order, and of rows whose columns are cut."""
    size, total = part.shape[-1:], full.shape[-1:]
    if min(part.dim(), full.dim()) > 2 and part.shape[1:] == full.shape[1:]:
        each = match_rows(part.flatten(1), full.flatten(1))
        yield None if each is None else replace(each, shape=tuple(part.shape))
    yield match_rows(part, full)
    for cut in CUTS[1:-1] if len(size) and len(total) else ():
        for columns in islice(cut(size[0], total[0], first), MAX_COLUMN_CUTS):
            yield match_rows(part, full, columns)


def match_rows(part: Tensor, full: Tensor, columns: Index = None) -> Place | None:
    """Match each row of the part to the most similar row of the full tensor, in any order."""
    if min(part.dim(), full.dim()) < 2 or not part.numel():
        return None
    rows, all_ = part.reshape(-1, part.shape[-1]), full.reshape(-1, full.shape[-1])
    if len(all_) > MAX_ROWS or (columns is None and rows.shape[1] != all_.shape[1]):
        return None
    cut = Place(tuple(all_.shape), (None, columns), (len(all_), rows.shape[1])).take_from(all_)
    return Place(tuple(all_.shape), (_find_nearest_rows(rows, cut), columns), tuple(part.shape))


def match_equal_rows(at: Place, *pairs: tuple[Tensor, Tensor]) -> Place | None:
    """Match rows in any order, with columns as in place `at`, over pairs of part and full tensor.

    Rows that are equal in one pair differ in the others.
    """
    shape = pairs[0][1].shape
    view = pairs[0][1].numel() // max(1, shape[-1]), shape[-1]
    if min(len(at.shape), len(shape)) < 2 or at.piece_start is not None or view[0] > MAX_ROWS:
        return None
    cut = Place(view, (None, at.index[-1]), (view[0], at.shape[-1]))
    sizes = [full.float().norm().clamp_min(1e-30) for _, full in pairs]
    all_ = [cut.take_from(full) / size for (_, full), size in zip(pairs, sizes, strict=True)]
    parts = (part.reshape(-1, cut.shape[1]) for part, _ in pairs)
    rows = [part / size for part, size in zip(parts, sizes, strict=True)]
    index = _find_nearest_rows(torch.cat(rows, 1), torch.cat(all_, 1))
    return Place(view, (index, cut.index[1]), at.shape)


def _find_nearest_rows(part: Tensor, full: Tensor) -> Tensor:
    """Return the number of the most similar row for each row, by 16 random projections."""
    generator = torch.Generator().manual_seed(0)
    sketch = torch.randn(part.shape[1], 16, generator=generator)
    return compute_row_distances(part.float() @ sketch, full.float() @ sketch).argmin(1)


def compute_row_distances(rows: Tensor, others: Tensor) -> Tensor:
    """Return the distance of each row from each other row, 0 where they are equal.

    The matrix products that torch takes for more than 25 rows would leave the root of rounding
    errors.
    """
    return torch.cdist(rows, others, compute_mode="donot_use_mm_for_euclid_dist")
