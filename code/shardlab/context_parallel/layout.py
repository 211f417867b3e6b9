"""Assignment of tokens to ranks, and checks that shapes can be divided.

- "contiguous": N pieces, rank r has piece r;
- "zigzag": 2N pieces, rank r has pieces r and 2N - 1 - r, one early and one late. Under a causal
  mask a late token attends to more keys than an early one; this layout gives all ranks equal work.

The zig-zag is the balanced layout in use for ring attention today; Brandon et al. 2023, "Striped
Attention" (arXiv 2311.09431), balance the work by assigning single tokens in turn instead.

Shapes: S the whole sequence, s = S / N one rank's shard. B batch, A query heads, K key and
value heads, D size of a head.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.common.arguments import check_one_of
from shardlab.ranks.checks import check_group, check_same_once
from shardlab.ranks.torch_compat import all_gather_single

LAYOUTS = "contiguous", "zigzag"


def token_positions(
    layout: str, seq: int, ranks: int, rank: int, device: torch.device | None = None
) -> Tensor:
    """Return the positions of a rank's tokens in the whole sequence, int64 [s]."""
    return split_seq(torch.arange(seq, device=device), ranks, rank, layout, dim=0)


def split_seq(full: Tensor, ranks: int, rank: int, layout: str = "zigzag", dim: int = 1) -> Tensor:
    """Return a rank's shard of `full` along `dim`: a view if contiguous, a copy if zig-zag."""
    check_seq(full.shape[dim], ranks, layout)
    if layout == "contiguous":
        return full.chunk(ranks, dim)[rank]
    parts = full.chunk(2 * ranks, dim)
    return torch.cat((parts[rank], parts[2 * ranks - 1 - rank]), dim)


def join_seq(parts: list[Tensor], layout: str = "zigzag", dim: int = 1) -> Tensor:
    """Join all ranks' shards, in rank order, to the full tensor: inverse of `split_seq`."""
    check_layout(layout)
    if layout == "zigzag":  # early halves in rank order, then late halves in reverse rank order
        halves = [part.chunk(2, dim) for part in parts]
        parts = [early for early, _ in halves] + [late for _, late in reversed(halves)]
    return torch.cat(parts, dim)


def gather_seq(x: Tensor, group: dist.ProcessGroup, layout: str = "zigzag", dim: int = 1) -> Tensor:
    """All-gather the shards and return the full tensor on every rank, without gradient.

    Each rank sends its shard to N - 1 others.
    """
    _, ranks = check_group(group)
    check_same_once(group, "context_parallel.gather_seq", group, layout=layout, dim=dim)
    parts = x.new_empty((ranks, *x.shape))
    all_gather_single(parts.flatten(0, 1), x.detach().contiguous(), group=group)
    return join_seq(list(parts), layout, dim)


# Argument checks, which run before any communication


def check_layout(layout: str) -> None:
    """Raise ValueError for an unknown layout."""
    check_one_of(LAYOUTS, layout=layout)


def check_seq(seq: int, ranks: int, layout: str) -> None:
    """Raise ValueError for a sequence that cannot be divided equally."""
    check_layout(layout)
    unit = ranks if layout == "contiguous" else 2 * ranks
    if seq < 1 or seq % unit:
        what = f"must be a multiple of {unit} for {ranks} ranks in layout {layout!r}"
        raise ValueError(f"seq={seq}: {what}")


def check_shapes(q_BAsD: Tensor, k_BKsD: Tensor, v_BKsD: Tensor, layout: str) -> None:
    """Raise ValueError unless queries, keys and values match in shape and suit `layout`."""
    check_layout(layout)
    (batch, heads, local_seq, size), kv_heads = q_BAsD.shape, k_BKsD.shape[1]
    wanted = batch, kv_heads, local_seq, size
    if not k_BKsD.shape == v_BKsD.shape == wanted or heads % kv_heads:
        shapes = f"q {list(q_BAsD.shape)}, k {list(k_BKsD.shape)}, v {list(v_BKsD.shape)}"
        allowed = "q [B, A, s, D] and k, v [B, K, s, D], with K a divisor of A"
        raise ValueError(f"{shapes}: must be {allowed}")
    if layout == "zigzag" and local_seq % 2:
        raise ValueError(f"q_BAsD: s={local_seq} must be even in layout 'zigzag'")


def count_key_repeats(heads: int, kv_heads: int, ranks: int) -> int:
    """Return how often each key-value head is sent; raise ValueError for indivisible heads."""
    if heads % ranks:
        text = f"must be a multiple of the {ranks} ranks; ring attention takes any number"
        raise ValueError(f"heads={heads}: {text}")
    if kv_heads % ranks and ranks % kv_heads:
        text = f"must be a multiple or a divisor of the {ranks} ranks"
        raise ValueError(f"kv_heads={kv_heads}: {text}; ring attention takes any number")
    return max(1, ranks // kv_heads)
