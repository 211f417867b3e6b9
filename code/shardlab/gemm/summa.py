"""One matrix product on a grid of ranks: every matrix cut both ways (SUMMA).

On p rows and q columns of ranks, each rank has one block of A, of B and of C, and nothing else: the
first way here that holds none of the three matrices in full. The sum over K is made panel by panel:
the ranks that have the next few columns of A send them along their row of the grid, those that have
the same rows of B send them along their column, and everyone multiplies what came. Each rank gets
(q - 1) / q of its rows of A and (p - 1) / p of its columns of B.

R. van de Geijn, J. Watts, "SUMMA: scalable universal matrix multiplication algorithm", Concurrency:
Practice and Experience 9 (1997). Letters as in `split`; w: width of a panel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup as Group

from shardlab.ranks.agree import check_group, time_limit

from .split import check_product, share


@dataclass(frozen=True)
class Grid:
    """Where this rank stands in a grid of `rows` x `columns` ranks, numbered row by row."""

    rows: int
    columns: int
    row: int
    column: int
    row_group: Group  # the ranks of its row, which A travels along: `columns` of them
    column_group: Group  # the ranks of its column, which B travels along: `rows` of them

    def cut(self, a_MK: Tensor, b_KN: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's blocks of A and of B, a_mk and b_kn; views."""
        check_product(a_MK, b_KN)
        return self.block(a_MK), self.block(b_KN)

    def block(self, x: Tensor) -> Tensor:
        """This rank's block of any matrix; a view."""
        down = share(x.shape[0], self.rows, self.row)
        across = share(x.shape[1], self.columns, self.column)
        return x[down, across]


def grid(
    group: Group, rows: int, columns: int, wrap: Callable[[Group], Group] | None = None
) -> Grid:
    """Arrange the ranks of `group` in a grid of `rows` x `columns`; all of them have to call it.

    wrap: makes another group of each row's and column's, for instance one with a slow link.
    """
    rank, size = check_group(group)
    for name, value in (("rows", rows), ("columns", columns)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: allowed are whole numbers above 0")
    if rows * columns != size:
        fitting = ", ".join(f"{p} x {size // p}" for p in range(1, size + 1) if size % p == 0)
        raise ValueError(
            f"rows={rows}, columns={columns}: {rows * columns} ranks, and the group has {size}; "
            f"allowed are {fitting}"
        )
    row, column = divmod(rank, columns)
    members = dist.get_process_group_ranks(group)
    along = members[row * columns : (row + 1) * columns], members[column::columns]
    # Only its members make a group: the ranks outside of `group` know nothing of this.
    limit = time_limit(group)
    row_group, column_group = (
        dist.new_group(m, timeout=limit, use_local_synchronization=True) for m in along
    )
    if wrap is not None:
        row_group, column_group = wrap(row_group), wrap(column_group)
    return Grid(rows, columns, row, column, row_group, column_group)


class Panel(NamedTuple):
    """A stretch of the inner dimension, and who has it."""

    begin: int
    end: int
    column: int  # of the grid: its ranks have these columns of A
    row: int  # of the grid: its ranks have these rows of B


def panels(inner: int, rows: int, columns: int, width: int | None = None) -> list[Panel]:
    """Cut the inner dimension, K, so that each panel has one owner in A and one in B.

    A's blocks are cut by the grid's columns and B's by its rows, so panels end wherever one of
    these does. width: the most that a panel may have; None: as wide as they come.
    """
    if width is not None and (isinstance(width, bool) or not isinstance(width, int) or width < 1):
        raise ValueError(f"width={width!r}: allowed are whole numbers above 0, or None")
    of_a = [share(inner, columns, column) for column in range(columns)]
    of_b = [share(inner, rows, row) for row in range(rows)]
    found = []
    for column, a in enumerate(of_a):
        for row, b in enumerate(of_b):
            low, high = max(a.start, b.start), min(a.stop, b.stop)
            for begin in range(low, high, width or max(1, high - low)):
                found.append(Panel(begin, min(high, begin + (width or high)), column, row))
    return sorted(found)


@torch.no_grad()
def summa(a_mk: Tensor, b_kn: Tensor, inner: int, grid: Grid, width: int | None = None) -> Tensor:
    """This rank's block of C, c_mn, from its blocks of A and of B. inner: K, of the whole product.

    The next panel travels while this one is multiplied: two panels of each are held beside the
    blocks. A narrow `width` holds less, sends more often and multiplies thinner.
    """
    row, column = share(inner, grid.rows, grid.row), share(inner, grid.columns, grid.column)
    needed = column.stop - column.start, row.stop - row.start
    if not (a_mk.dim() == b_kn.dim() == 2) or (a_mk.shape[1], b_kn.shape[0]) != needed:
        raise ValueError(
            f"a_mk of {list(a_mk.shape)}, b_kn of {list(b_kn.shape)}: of inner={inner}, the rank "
            f"in row {grid.row}, column {grid.column} has {needed[0]} columns of A and {needed[1]} "
            "rows of B (`Grid.cut`)"
        )
    if (a_mk.dtype, a_mk.device) != (b_kn.dtype, b_kn.device):
        kinds = f"{a_mk.dtype} on {a_mk.device} and {b_kn.dtype} on {b_kn.device}"
        raise ValueError(f"{kinds}: the two factors have to be of one kind")
    steps = panels(inner, grid.rows, grid.columns, width)
    m, n = a_mk.shape[0], b_kn.shape[1]
    widest = max((step.end - step.begin for step in steps), default=0)
    ahead = min(2, len(steps))
    # Where all of A's row, or of B's column, is here anyway, it is used where it stands.
    a_room = a_mk.new_empty(ahead, m * widest) if grid.columns > 1 else None
    b_room = b_kn.new_empty(ahead, widest * n) if grid.rows > 1 else None

    def fetch(number: int) -> tuple[Tensor, Tensor, list[dist.Work]]:
        step, works = steps[number], []
        w = step.end - step.begin
        a_mw = a_mk.narrow(1, step.begin - column.start, w) if step.column == grid.column else None
        b_wn = b_kn.narrow(0, step.begin - row.start, w) if step.row == grid.row else None
        if a_room is not None:
            a_mw = _into(a_room[number % ahead], a_mw, m, w)
            works.append(_broadcast(a_mw, step.column, grid.row_group))  # [m, w]
        if b_room is not None:
            b_wn = _into(b_room[number % ahead], b_wn, w, n)
            works.append(_broadcast(b_wn, step.row, grid.column_group))  # [w, n]
        assert a_mw is not None and b_wn is not None
        return a_mw, b_wn, works

    c_mn = a_mk.new_zeros(m, n)
    following = fetch(0) if steps else None
    for number in range(len(steps)):
        assert following is not None
        a_mw, b_wn, works = following
        following = fetch(number + 1) if number + 1 < len(steps) else None
        for work in works:
            work.wait()
        c_mn.addmm_(a_mw, b_wn)  # [m, w] @ [w, n]
    return c_mn


def _into(room: Tensor, mine: Tensor | None, rows: int, columns: int) -> Tensor:
    """A matrix in `room`, with what this rank has to send in it, if it is the one that sends."""
    matrix = room[: rows * columns].view(rows, columns)
    return matrix if mine is None else matrix.copy_(mine)


def _broadcast(tensor: Tensor, source: int, group: Group) -> dist.Work:
    work = dist.broadcast(tensor, group=group, group_src=source, async_op=True)
    assert work is not None
    return work
