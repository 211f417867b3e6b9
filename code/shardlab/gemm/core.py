"""One matrix product on t ranks: sharded along one of its three dimensions, or along all of them.

C_MN = A_MK @ B_KN. M, N, K: rows of A, columns of B, and the inner dimension, which is summed over.
t: ranks that share the product (N is the number of columns here, as usual in linear algebra).
A lower-case letter is this rank's share of a dimension: a_mK is m of the M rows of A.

    scheme     a rank holds    it computes        to give every rank all of C
    "rows"     a_mK, b_KN      c_mN               all-gather of rows
    "columns"  a_MK, b_Kn      c_Mn               all-gather of columns
    "inner"    a_Mk, b_kN      a summand of C     all-reduce (reduce-scatter gives a rank its rows)
    SUMMA      a_mk, b_kn      c_mn               on a grid of ranks; C stays in blocks

Sources: Golub and Van Loan, Matrix Computations, 4th edition, section 1.6. Chan, Heimlich,
Purkayastha, van de Geijn, "Collective communication: theory, practice, and experience", CCPE 19
(2007). Van de Geijn, Watts, "SUMMA", Concurrency: Practice and Experience 9 (1997).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup as Group

from shardlab.common.arguments import check_one_of
from shardlab.ranks import check_group
from shardlab.ranks.checks import get_timeout
from shardlab.ranks.gather import reduce_scatter
from shardlab.ranks.torch_compat import all_gather_single

SCHEMES_1D = "rows", "columns", "inner"


def shard_slice(size: int, ranks: int, rank: int) -> slice:
    """Return the slice of `size` items that belongs to `rank`, with the longer slices first.

    10 items on 4 ranks give 0:3, 3:6, 6:8 and 8:10. With fewer items than ranks, some are empty.
    """
    each, longer = divmod(size, ranks)
    begin = rank * each + min(rank, longer)
    return slice(begin, begin + each + (rank < longer))


def shard_sizes(size: int, ranks: int) -> list[int]:
    """Return how many of `size` items each rank gets (see `shard_slice`)."""
    return [part.stop - part.start for part in (shard_slice(size, ranks, r) for r in range(ranks))]


def shard_operands(
    scheme: str, a_MK: Tensor, b_KN: Tensor, ranks: int, rank: int
) -> tuple[Tensor, Tensor]:
    """Return views of the shards of A and B that `rank` holds. scheme: one of SCHEMES_1D."""
    check_one_of(SCHEMES_1D, scheme=scheme)
    if scheme == "rows":
        return a_MK[shard_slice(len(a_MK), ranks, rank)], b_KN
    if scheme == "columns":
        return a_MK, b_KN[:, shard_slice(b_KN.shape[1], ranks, rank)]
    inner = shard_slice(len(b_KN), ranks, rank)
    return a_MK[:, inner], b_KN[inner]


def multiply_rows(a_mK: Tensor, b_KN: Tensor) -> Tensor:
    """Return this rank's rows of C, c_mN, from its rows of A and all of B. Sends nothing."""
    return a_mK @ b_KN  # [m, K] @ [K, N]


def multiply_columns(a_MK: Tensor, b_Kn: Tensor) -> Tensor:
    """Return this rank's columns of C, c_Mn, from all of A and its columns of B. Sends nothing."""
    return a_MK @ b_Kn  # [M, K] @ [K, n]


@torch.no_grad()
def gather_rows(c_mN: Tensor, rows: int, group: Group) -> Tensor:
    """Gather all of C, c_MN, on every rank, from each rank's rows. rows: M."""
    _, size = check_group(group)
    counts = shard_sizes(rows, size)
    if size == 1:
        return c_mN
    piece = _pad_shard(c_mN, 0, counts[0])  # [m, N], padded to the largest m
    gathered = _gather_shards(piece, group)  # [t, m, N]
    if rows % size == 0:
        return gathered.view(rows, c_mN.shape[1])
    return torch.cat([part[:m] for part, m in zip(gathered, counts, strict=True)])


@torch.no_grad()
def gather_columns(c_Mn: Tensor, columns: int, group: Group) -> Tensor:
    """Gather all of C, c_MN, on every rank, from each rank's columns. columns: N.

    Matrices are stored row by row. So gathered rows are already in place, but gathered columns must
    be copied into place, which briefly needs a second copy of C.
    """
    _, size = check_group(group)
    counts = shard_sizes(columns, size)
    if size == 1:
        return c_Mn
    piece = _pad_shard(c_Mn, 1, counts[0])  # [M, n], padded to the largest n
    gathered = _gather_shards(piece, group)  # [t, M, n]
    return torch.cat([part[:, :n] for part, n in zip(gathered, counts, strict=True)], dim=1)


def _pad_shard(x: Tensor, dim: int, length: int) -> Tensor:
    """Pad `x` with zeros to `length` along `dim`: an all-gather needs equal shards."""
    if x.shape[dim] == length:
        return x.contiguous()
    shape = list(x.shape)
    shape[dim] = length
    padded = x.new_zeros(shape)
    padded.narrow(dim, 0, x.shape[dim]).copy_(x)
    return padded


def _gather_shards(x: Tensor, group: Group) -> Tensor:
    """All-gather every rank's `x` into one tensor, [t, …]."""
    gathered = x.new_empty(dist.get_world_size(group) * len(x), x.shape[1])
    all_gather_single(gathered, x, group=group)
    return gathered.view(-1, *x.shape)


@torch.no_grad()
def multiply_inner(a_Mk: Tensor, b_kN: Tensor, group: Group, full: bool = True) -> Tensor:
    """Return C from this rank's columns of A and rows of B, whose product is a summand of C.

    full: return all of C, c_MN, by an all-reduce; otherwise this rank's rows, c_mN, by a
    reduce-scatter, which sends half the bytes. M and N must be equal on all ranks, k need not be.
    The sum is computed in the tensors' dtype.
    """
    _, size = check_group(group)
    summand_MN = a_Mk @ b_kN  # [M, k] @ [k, N]
    if size == 1:
        return summand_MN
    if full:
        dist.all_reduce(summand_MN, group=group)  # [M, N]
        return summand_MN
    rows = shard_sizes(len(summand_MN), size)
    return reduce_scatter(summand_MN, group, rows)()  # [M, N] to [m, N]


def multiply_sharded(
    scheme: str, a_MK: Tensor, b_KN: Tensor, group: Group, full: bool = True
) -> Tensor:
    """Compute C by one of SCHEMES_1D, from A and B that every rank holds in full.

    full: return c_MN on every rank; otherwise this rank's shard, which is its columns for "columns"
    and its rows for the other two schemes.
    """
    rank, size = check_group(group)
    a, b = shard_operands(scheme, a_MK, b_KN, size, rank)
    if scheme == "inner":
        return multiply_inner(a, b, group, full)
    if scheme == "rows":
        c_mN = multiply_rows(a, b)
        return gather_rows(c_mN, len(a_MK), group) if full else c_mN
    c_Mn = multiply_columns(a, b)
    return gather_columns(c_Mn, b_KN.shape[1], group) if full else c_Mn


@dataclass(frozen=True)
class Grid:
    """This rank's place in a grid of `rows` x `columns` ranks, numbered row by row."""

    rows: int
    columns: int
    row: int
    column: int
    row_group: Group  # the `columns` ranks of its row; A's panels are broadcast in it
    column_group: Group  # the `rows` ranks of its column; B's panels are broadcast in it

    def take_blocks(self, a_MK: Tensor, b_KN: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of this rank's blocks of A and B, a_mk and b_kn."""
        return self.take_block(a_MK), self.take_block(b_KN)

    def take_block(self, x: Tensor) -> Tensor:
        """Return a view of this rank's block of any matrix."""
        down = shard_slice(x.shape[0], self.rows, self.row)
        across = shard_slice(x.shape[1], self.columns, self.column)
        return x[down, across]


def create_grid(
    group: Group, rows: int, columns: int, wrap: Callable[[Group], Group] | None = None
) -> Grid:
    """Arrange the ranks of `group` in a grid of `rows` x `columns` (collective).

    wrap: applied to each row's and column's group, for instance to emulate a slow link.
    """
    rank, size = check_group(group)
    if rows * columns != size:
        raise ValueError(f"rows={rows}, columns={columns}: must multiply to {size}, the ranks")
    row, column = divmod(rank, columns)
    members = dist.get_process_group_ranks(group)
    along = members[row * columns : (row + 1) * columns], members[column::columns]
    # Local synchronization: ranks outside of `group` take no part in creating the new groups.
    limit = get_timeout(group)
    row_group, column_group = (
        dist.new_group(m, timeout=limit, use_local_synchronization=True) for m in along
    )
    if wrap is not None:
        row_group, column_group = wrap(row_group), wrap(column_group)
    return Grid(rows, columns, row, column, row_group, column_group)


class Panel(NamedTuple):
    """A range of the inner dimension, and the ranks that hold it."""

    begin: int
    end: int
    column: int  # the grid column whose ranks hold these columns of A
    row: int  # the grid row whose ranks hold these rows of B


def split_panels(inner: int, rows: int, columns: int, width: int | None = None) -> list[Panel]:
    """Divide the inner dimension, K, so that each panel has one owner in A and one in B.

    K is divided over the grid's columns in A and over its rows in B, so a panel ends at each
    boundary of either. width: the largest width of a panel; None: no limit.
    """
    found = []
    for column in range(columns):
        for row in range(rows):
            a, b = shard_slice(inner, columns, column), shard_slice(inner, rows, row)
            low, high = max(a.start, b.start), min(a.stop, b.stop)
            for begin in range(low, high, width or max(1, high - low)):
                found.append(Panel(begin, min(high, begin + (width or high)), column, row))
    return sorted(found)


@torch.no_grad()
def multiply_summa(
    a_mk: Tensor, b_kn: Tensor, inner: int, grid: Grid, width: int | None = None
) -> Tensor:
    """Return this rank's block of C, c_mn, from its blocks of A and B. inner: K, unsharded.

    The next panels are broadcast while the current ones are multiplied: a rank holds two of each. A
    narrower `width` needs less memory, but sends more messages and multiplies thinner matrices.
    """
    row = shard_slice(inner, grid.rows, grid.row)
    column = shard_slice(inner, grid.columns, grid.column)
    steps = split_panels(inner, grid.rows, grid.columns, width)
    m, n = a_mk.shape[0], b_kn.shape[1]
    widest = max((step.end - step.begin for step in steps), default=0)
    ahead = min(2, len(steps))
    # A grid of one column (or row) needs no receive buffer for A (or B): each rank has it all.
    a_buffer = a_mk.new_empty(ahead, m * widest) if grid.columns > 1 else None
    b_buffer = b_kn.new_empty(ahead, widest * n) if grid.rows > 1 else None

    def start_broadcasts(number: int) -> tuple[Tensor, Tensor, list[dist.Work]]:
        """Start the broadcasts of one panel of A and one of B."""
        step, works = steps[number], []
        w = step.end - step.begin
        a_mw = a_mk.narrow(1, step.begin - column.start, w) if step.column == grid.column else None
        b_wn = b_kn.narrow(0, step.begin - row.start, w) if step.row == grid.row else None
        if a_buffer is not None:
            a_mw = _fill_buffer(a_buffer[number % ahead], a_mw, m, w)
            works.append(_start_broadcast(a_mw, step.column, grid.row_group))  # [m, w]
        if b_buffer is not None:
            b_wn = _fill_buffer(b_buffer[number % ahead], b_wn, w, n)
            works.append(_start_broadcast(b_wn, step.row, grid.column_group))  # [w, n]
        return a_mw, b_wn, works

    c_mn = a_mk.new_zeros(m, n)
    following = start_broadcasts(0) if steps else None
    for number in range(len(steps)):
        a_mw, b_wn, works = following
        following = start_broadcasts(number + 1) if number + 1 < len(steps) else None
        for work in works:
            work.wait()
        c_mn.addmm_(a_mw, b_wn)  # [m, w] @ [w, n]
    return c_mn


def _fill_buffer(buffer: Tensor, mine: Tensor | None, rows: int, columns: int) -> Tensor:
    """Return a matrix in the buffer `room`; on the sending rank, filled with its panel `mine`."""
    matrix = buffer[: rows * columns].view(rows, columns)
    return matrix if mine is None else matrix.copy_(mine)


def _start_broadcast(tensor: Tensor, source: int, group: Group) -> dist.Work | None:
    return dist.broadcast(tensor, group=group, group_src=source, async_op=True)
