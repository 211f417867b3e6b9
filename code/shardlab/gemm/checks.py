"""What `core` refuses, before anything is sent: a way that is none, matrices that do not fit."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shardlab.common.arguments import check_kind as check_kinds
from shardlab.common.arguments import check_whole, told


def check_way(way: str, allowed: Sequence[str]) -> None:
    """Raise ValueError unless `way` is one of those `allowed`."""
    if way not in allowed:
        raise ValueError(f"way={told(way)}: allowed are {', '.join(map(repr, allowed))}")


def check_product(a: Tensor, b: Tensor) -> None:
    """Raise ValueError unless `a` @ `b` is a product of two matrices of one kind."""
    for x in (a, b):
        if not isinstance(x, Tensor) or x.dim() != 2:
            raise ValueError(f"{_given(x)} @ …: both factors have to be matrices, of 2 dimensions")
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"{list(a.shape)} @ {list(b.shape)}: the inner dimensions are {a.shape[1]} and "
            f"{b.shape[0]}, and have to be equal"
        )
    check_kind(a, b)


def check_kind(a: Tensor, b: Tensor) -> None:
    """Raise ValueError unless both factors have one dtype, on one device."""
    if (a.dtype, a.device) != (b.dtype, b.device):
        kinds = f"{a.dtype} on {a.device} and {b.dtype} on {b.device}"
        raise ValueError(f"{kinds}: the two factors have to be of one kind")


def check_shard(name: str, x: Tensor, dim: int, counts: Sequence[int], rank: int) -> None:
    """Raise ValueError unless `x` has counts[rank] rows (`dim` 0) or columns (1)."""
    if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[dim] != counts[rank]:
        total, size = sum(counts), len(counts)
        raise ValueError(
            f"{name} of {_given(x)}: rank {rank} of {size} has {counts[rank]} of {total} "
            f"{('rows', 'columns')[dim]} (`shard_slice({total}, {size}, {rank})`)"
        )


def check_blocks(a_mk: Tensor, b_kn: Tensor, columns: slice, rows: slice, inner: int) -> None:
    """Raise ValueError unless the blocks have these columns of A and these rows of B."""
    needed = columns.stop - columns.start, rows.stop - rows.start
    check_kinds(Tensor, a_mk=a_mk, b_kn=b_kn)
    if not (a_mk.dim() == b_kn.dim() == 2) or (a_mk.shape[1], b_kn.shape[0]) != needed:
        raise ValueError(
            f"a_mk of {list(a_mk.shape)}, b_kn of {list(b_kn.shape)}: of inner={inner}, this rank "
            f"has {needed[0]} columns of A and {needed[1]} rows of B (`Grid.cut`)"
        )
    check_kind(a_mk, b_kn)


def check_grid(rows: int, columns: int, size: int) -> None:
    """Raise ValueError unless `size` ranks fill a grid of `rows` x `columns`."""
    check_whole(1, rows=rows, columns=columns)
    if rows * columns != size:
        fitting = ", ".join(f"{p} x {size // p}" for p in range(1, size + 1) if size % p == 0)
        raise ValueError(
            f"rows={rows}, columns={columns}: {rows * columns} ranks, and the group has {size}; "
            f"allowed are {fitting}"
        )


def _given(x: object) -> object:
    return list(x.shape) if isinstance(x, Tensor) else type(x).__name__
