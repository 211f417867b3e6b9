"""A sequence shared out over the ranks of a group, and put together again.

- "contiguous": N pieces, rank r has piece r;
- "zigzag": 2N pieces, rank r has pieces r and 2N - 1 - r, one early and one late. Under a causal
  mask a late token looks at more keys than an early one; so shared out, all ranks have equal work.

The zig-zag is the balanced layout in use for ring attention today; Brandon et al. 2023, "Striped
Attention" (arXiv 2311.09431), balance by dealing out single tokens instead.

Capital S in a shape is the whole sequence, small s one rank's share of it, S / N.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.ranks.agree import check_whole
from shardlab.ranks.renamed import all_gather_single

LAYOUTS = "contiguous", "zigzag"


def check_layout(layout: str) -> None:
    """Raise ValueError for a layout that there is not."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}: allowed are 'contiguous' and 'zigzag'")


def check_seq(seq: int, ranks: int, layout: str) -> None:
    """Raise ValueError for a sequence that cannot be shared out equally; it says what could."""
    check_layout(layout)
    check_whole(ranks=ranks)
    unit = ranks if layout == "contiguous" else 2 * ranks
    if isinstance(seq, bool) or not isinstance(seq, int):
        raise ValueError(f"seq={seq!r}: allowed are whole numbers")
    if seq < 1 or seq % unit:
        down, up = seq // unit * unit, -(-max(seq, 1) // unit) * unit
        nearest = f"nearest are {down} and {up}" if down > 0 else f"nearest is {up}"
        needed = f"{ranks} ranks in layout {layout!r} need a multiple of {unit}"
        raise ValueError(f"seq={seq}: {needed}; the {nearest}")


def check_rank(ranks: int, rank: int) -> None:
    """Raise ValueError for a rank that is not in a group of this size."""
    check_whole(ranks=ranks)
    if type(rank) is not int or not 0 <= rank < ranks:
        raise ValueError(f"rank={rank!r}: allowed in a group of {ranks} are 0 to {ranks - 1}")


def group_of(group: dist.ProcessGroup) -> tuple[int, int]:
    """(ranks, this rank) of a group; ValueError when this rank is not in it."""
    rank = dist.get_rank(group) if isinstance(group, dist.ProcessGroup) else -1
    if rank < 0:  # None would be taken for all ranks
        where = f"rank {dist.get_rank()} of the world is not in it"
        raise ValueError(f"group={group!r}: allowed are process groups with this rank; {where}")
    return dist.get_world_size(group), rank


def pieces(layout: str, ranks: int, rank: int) -> list[int]:
    """Which pieces of the sequence a rank has, in its order: of N contiguous, of 2N zig-zag."""
    check_layout(layout)
    check_rank(ranks, rank)
    return [rank] if layout == "contiguous" else [rank, 2 * ranks - 1 - rank]


def positions(
    layout: str, seq: int, ranks: int, rank: int, device: torch.device | None = None
) -> Tensor:
    """Where a rank's tokens stand in the whole sequence: int64 [s]."""
    check_seq(seq, ranks, layout)
    return split(torch.arange(seq, device=device), ranks, rank, layout, dim=0)


def split(whole: Tensor, ranks: int, rank: int, layout: str = "zigzag", dim: int = 1) -> Tensor:
    """A rank's share of `whole` along `dim`: a view when contiguous, a copy when zig-zag."""
    check_seq(whole.shape[dim], ranks, layout)
    mine = pieces(layout, ranks, rank)
    parts = whole.chunk(ranks * len(mine), dim)
    return parts[mine[0]] if len(mine) == 1 else torch.cat([parts[i] for i in mine], dim)


def join(parts: list[Tensor], layout: str = "zigzag", dim: int = 1) -> Tensor:
    """The whole from all ranks' shares, given in rank order: the inverse of `split`."""
    check_layout(layout)
    if layout == "zigzag":  # the early halves in rank order, the late ones back from the last
        halves = [part.chunk(2, dim) for part in parts]
        parts = [early for early, _ in halves] + [late for _, late in reversed(halves)]
    return torch.cat(parts, dim)


def gather(share: Tensor, group: dist.ProcessGroup, layout: str = "zigzag", dim: int = 1) -> Tensor:
    """The whole on every rank, put together by an all-gather; without gradients, to compare with.

    Each rank sends its share to N - 1 others.
    """
    check_layout(layout)
    ranks, _ = group_of(group)
    parts = share.new_empty((ranks, *share.shape))
    all_gather_single(parts.flatten(0, 1), share.detach().contiguous(), group=group)
    return join(list(parts), layout, dim)
