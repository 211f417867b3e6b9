"""One matrix product on t ranks, cut along one of its three dimensions.

C_MN = A_MK @ B_KN. M, N, K: rows of A, columns of B, and the inner dimension, over which the sum
goes. t: ranks that share the matrices; N is the columns here, as everywhere in linear algebra.
A lower-case letter is this rank's share of a dimension: a_mK is m of the M rows of A.

    cut        a rank holds    it computes        so that every rank has all of C
    "rows"     a_mK, b_KN      c_mN               all-gather of rows
    "columns"  a_MK, b_Kn      c_Mn               all-gather of columns
    "inner"    a_Mk, b_kN      a summand of C     all-reduce; reduce-scatter leaves its rows alone

Cut by rows or by columns, nothing has to be sent as long as C may stay cut. Cut along the inner
dimension, C is the sum of t matrices of its own size. Sources: Golub and Van Loan, Matrix
Computations, 4th edition, section 1.6; Chan, Heimlich, Purkayastha, van de Geijn, "Collective
communication: theory, practice, and experience", CCPE 19 (2007), for the collectives.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup as Group

from shardlab.ranks import check_group
from shardlab.ranks.p2p import carrier
from shardlab.ranks.renamed import all_gather_single, reduce_scatter_single

CUTS = "rows", "columns", "inner"


def share(size: int, ranks: int, rank: int) -> slice:
    """The part of `size` things that belongs to `rank`: as equal as it goes, the longer ones first.

    Of 10 on 4 ranks: 0 to 3, 3 to 6, 6 to 8, 8 to 10. With fewer things than ranks some are empty.
    """
    for name, value, least in (("size", size, 0), ("ranks", ranks, 1), ("rank", rank, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value!r}: allowed are whole numbers from {least}")
    if rank >= ranks:
        raise ValueError(f"rank={rank}: allowed are 0 to {ranks - 1}")
    each, longer = divmod(size, ranks)
    begin = rank * each + min(rank, longer)
    return slice(begin, begin + each + (rank < longer))


def shares(size: int, ranks: int) -> list[int]:
    """How many of `size` things each rank gets."""
    return [part.stop - part.start for part in (share(size, ranks, r) for r in range(ranks))]


def cut(way: str, a_MK: Tensor, b_KN: Tensor, ranks: int, rank: int) -> tuple[Tensor, Tensor]:
    """What `rank` of `ranks` holds of A and of B; views. way: "rows", "columns" or "inner"."""
    check_way(way)
    check_product(a_MK, b_KN)
    if way == "rows":
        return a_MK[share(len(a_MK), ranks, rank)], b_KN
    if way == "columns":
        return a_MK, b_KN[:, share(b_KN.shape[1], ranks, rank)]
    inner = share(len(b_KN), ranks, rank)
    return a_MK[:, inner], b_KN[inner]


def by_rows(a_mK: Tensor, b_KN: Tensor) -> Tensor:
    """This rank's rows of C, c_mN, from its rows of A and all of B. Nothing is sent."""
    check_product(a_mK, b_KN)
    return a_mK @ b_KN  # [m, K] @ [K, N]


def by_columns(a_MK: Tensor, b_Kn: Tensor) -> Tensor:
    """This rank's columns of C, c_Mn, from all of A and its columns of B. Nothing is sent."""
    check_product(a_MK, b_Kn)
    return a_MK @ b_Kn  # [M, K] @ [K, n]


@torch.no_grad()
def by_inner(a_Mk: Tensor, b_kN: Tensor, group: Group, whole: bool = True) -> Tensor:
    """C from its columns of A and its rows of B: every rank's product is a summand of all of C.

    whole: all of C, c_MN, on every rank, by an all-reduce; otherwise this rank's rows of it, c_mN,
    by a reduce-scatter, which moves half as much. All ranks bring the same M and N; their k may
    differ. Sums are made in the tensors' own type.
    """
    check_product(a_Mk, b_kN)
    check_group(group)
    summand_MN = a_Mk @ b_kN  # [M, k] @ [k, N]
    if dist.get_world_size(group) == 1:
        return summand_MN
    if whole:
        dist.all_reduce(summand_MN, group=group)  # [M, N]
        return summand_MN
    return _scattered_sum(summand_MN, group)


def _scattered_sum(x_MN: Tensor, group: Group) -> Tensor:
    """This rank's rows of the sum of all ranks' x_MN: a reduce-scatter.

    Every rank sends each other rank its rows, and adds up what it gets in the order of the ranks.
    That moves what a reduce-scatter moves, takes any number of rows, and has the same bits from run
    to run. gloo's own makes an all-reduce, twice as many bytes. nccl's is better, for equal shares.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    rows = shares(len(x_MN), size)
    m, columns = rows[rank], x_MN.shape[1]
    if carrier(x_MN.device, group) == "nccl" and len(x_MN) % size == 0:
        sum_mN = x_MN.new_empty(m, columns)
        reduce_scatter_single(sum_mN, x_MN, group=group)  # [M, N] to [m, N]
        return sum_mN
    received = x_MN.new_empty(size * m, columns)
    dist.all_to_all_single(received, x_MN, [m] * size, rows, group=group)  # [M, N] to [t * m, N]
    first, second, *others = received.view(size, m, columns)
    sum_mN = first + second
    for part_mN in others:
        sum_mN += part_mN
    return sum_mN


@torch.no_grad()
def gather_rows(c_mN: Tensor, rows: int, group: Group) -> Tensor:
    """All of C, c_MN, on every rank, from each rank's rows. rows: M.

    The collective wants equal pieces: shares that are a row shorter than the longest travel with a
    row of zeros behind them.
    """
    rank, size = check_group(group)
    check_share("c_mN", c_mN, 0, rows, size, rank)
    if size == 1:
        return c_mN
    counts, columns = shares(rows, size), c_mN.shape[1]
    piece = _padded(c_mN, 0, counts[0])
    gathered = _gathered(piece, group)  # [m, N] to [t, m, N]
    if rows % size == 0:
        return gathered.view(rows, columns)
    return torch.cat([part[:m] for part, m in zip(gathered, counts, strict=True)])


@torch.no_grad()
def gather_columns(c_Mn: Tensor, columns: int, group: Group) -> Tensor:
    """All of C, c_MN, on every rank, from each rank's columns. columns: N.

    The rows of a matrix lie one behind the other, so rows that arrive are in their place; columns
    have to be copied there: all of C a second time, for a moment.
    """
    rank, size = check_group(group)
    check_share("c_Mn", c_Mn, 1, columns, size, rank)
    if size == 1:
        return c_Mn
    counts = shares(columns, size)
    piece = _padded(c_Mn, 1, counts[0])
    gathered = _gathered(piece, group)  # [M, n] to [t, M, n]
    return torch.cat([part[:, :n] for part, n in zip(gathered, counts, strict=True)], dim=1)


def _padded(x: Tensor, dim: int, length: int) -> Tensor:
    if x.shape[dim] == length:
        return x.contiguous()
    shape = list(x.shape)
    shape[dim] = length
    padded = x.new_zeros(shape)
    padded.narrow(dim, 0, x.shape[dim]).copy_(x)
    return padded


def _gathered(x: Tensor, group: Group) -> Tensor:
    gathered = x.new_empty(dist.get_world_size(group) * len(x), x.shape[1])
    all_gather_single(gathered, x, group=group)
    return gathered.view(-1, *x.shape)


def multiply(way: str, a_MK: Tensor, b_KN: Tensor, group: Group, whole: bool = True) -> Tensor:
    """C by one of the three cuts, from an A and a B that all ranks have in full: to compare them.

    whole: c_MN on every rank; otherwise this rank's part: of "columns" its columns, of the other
    two its rows.
    """
    rank, size = check_group(group)
    a, b = cut(way, a_MK, b_KN, size, rank)
    if way == "inner":
        return by_inner(a, b, group, whole)
    if way == "rows":
        c_mN = by_rows(a, b)
        return gather_rows(c_mN, len(a_MK), group) if whole else c_mN
    c_Mn = by_columns(a, b)
    return gather_columns(c_Mn, b_KN.shape[1], group) if whole else c_Mn


def narrated(
    a_mK: Tensor, b_KN: Tensor, rows: int, group: Group, say: Callable[[str], object] = print
) -> Tensor:
    """`by_rows` in full, told by each rank: rank 0 has B and gives it to all; all of C at the end.

    b_KN: B on rank 0; elsewhere a contiguous tensor of its size, which it overwrites. rows: M.
    """
    rank, size = check_group(group)
    check_product(a_mK, b_KN)
    check_share("a_mK", a_mK, 0, rows, size, rank)
    if not b_KN.is_contiguous():
        raise ValueError(f"b_KN has strides {b_KN.stride()}: a contiguous tensor is needed")
    own = share(rows, size, rank)
    mine = ("no rows", f"row {own.start}", f"rows {own.start} to {own.stop - 1}")[min(len(a_mK), 2)]
    say(f"my part:              {mine} of A = {a_mK.tolist()}")
    say(f"before the broadcast: B = {b_KN.tolist()}")
    dist.broadcast(b_KN, group=group, group_src=0)  # [K, N]
    say(f"after the broadcast:  B = {b_KN.tolist()}")
    c_mN = by_rows(a_mK, b_KN)
    say(f"my product:           {mine} of C = {c_mN.tolist()}")
    c_MN = gather_rows(c_mN, rows, group)
    say(f"after the all-gather: C = {c_MN.tolist()}")
    return c_MN


def check_way(way: str, allowed: tuple[str, ...] = CUTS) -> None:
    """Raise ValueError unless `way` is one of those `allowed`."""
    if way not in allowed:
        raise ValueError(f"way={way!r}: allowed are {', '.join(map(repr, allowed))}")


def check_product(a: Tensor, b: Tensor) -> None:
    """Raise ValueError unless `a` @ `b` is a product of two matrices of one kind."""
    for x in (a, b):
        if not isinstance(x, Tensor) or x.dim() != 2:
            given = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{given} @ …: both factors have to be matrices, of two dimensions")
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"{list(a.shape)} @ {list(b.shape)}: the inner dimensions are {a.shape[1]} and "
            f"{b.shape[0]}, and have to be equal"
        )
    if (a.dtype, a.device) != (b.dtype, b.device):
        kinds = f"{a.dtype} on {a.device} and {b.dtype} on {b.device}"
        raise ValueError(f"{kinds}: the two factors have to be of one kind")


def check_share(name: str, x: Tensor, dim: int, size: int, ranks: int, rank: int) -> None:
    """Raise ValueError unless dimension `dim` of `x` is this rank's share of `size`."""
    part = share(size, ranks, rank)
    needed = part.stop - part.start
    if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[dim] != needed:
        given = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        what = ("rows", "columns")[dim]
        raise ValueError(
            f"{name} of {given}: rank {rank} of {ranks} has {needed} of {size} {what} "
            f"(`share({size}, {ranks}, {rank})`)"
        )
