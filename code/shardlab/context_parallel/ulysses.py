"""All-to-all attention: exchange tokens for heads, attend, and exchange back (Ulysses).

An all-to-all turns a rank's own tokens of all heads into all tokens of A/N heads. Heads attend
independently of each other, so plain attention follows. A second all-to-all restores the sharding
by tokens (Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv 2309.14509, section 3).

Shapes: B batch, S tokens in all, s = S/N of one rank, A query heads, K key and value heads, a = A/N
heads of one rank, D size of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardlab.ranks import check_group, check_same_once
from shardlab.tensor_types.operator import Operator

from .layout import check_shapes, count_key_repeats, join_seq, split_seq


def all_to_all_attention(
    q_BAsD: Tensor,
    k_BKsD: Tensor,
    v_BKsD: Tensor,
    group: dist.ProcessGroup,
    causal: bool = True,
    layout: str = "contiguous",
) -> Tensor:
    """Return attention of this rank's queries over all ranks' keys, [B, A, s, D].

    Collective: all ranks pass tensors of the same shapes, sharded by `split_seq`. The result
    is differentiable in queries, keys and values. With fewer key-value heads than ranks, each is
    sent to N/K ranks: this costs more bytes and does not change the result.

    Raises ValueError, before any communication, for mismatched shapes, unknown layouts, and
    heads that the ranks do not divide.
    """
    check_shapes(q_BAsD, k_BKsD, v_BKsD, layout)
    _, ranks = check_group(group)
    repeats = count_key_repeats(q_BAsD.shape[1], k_BKsD.shape[1], ranks)
    check_same_once(group, "context_parallel.ulysses", group, causal=causal, layout=layout)
    if repeats > 1:
        k_BKsD, v_BKsD = (x.repeat_interleave(repeats, dim=1) for x in (k_BKsD, v_BKsD))
    q_BaSD, k_BkSD, v_BkSD = tokens_to_heads((q_BAsD, k_BKsD, v_BKsD), group, layout)
    y_BaSD = F.scaled_dot_product_attention(
        q_BaSD, k_BkSD, v_BkSD, is_causal=causal, enable_gqa=q_BaSD.shape != k_BkSD.shape
    )
    return heads_to_tokens(y_BaSD, group, layout)


def tokens_to_heads(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, layout: str = "contiguous"
) -> tuple[Tensor, ...]:
    """Exchange [B, A, s, D] tensors, all heads of s tokens, for [B, a, S, D], in one all-to-all."""
    _, ranks = check_group(group)
    # [N, B, a, s, D]: heads by destination rank.
    each = [x_BAsD.unflatten(1, (ranks, -1)).movedim(1, 0) for x_BAsD in tensors]
    mine = _AllToAll.apply(torch.cat(each, dim=2), group)  # tokens by source rank
    return join_seq(list(mine), layout, dim=2).split([x.shape[2] for x in each], dim=1)


def heads_to_tokens(x_BaSD: Tensor, group: dist.ProcessGroup, layout: str = "contiguous") -> Tensor:
    """Exchange [B, a, S, D], a rank's heads of all tokens, back for [B, A, s, D].

    Memory order is [B, s, A, D], because the output projection needs a token's heads adjacent.
    """
    _, ranks = check_group(group)
    shards = [split_seq(x_BaSD, ranks, rank, layout, dim=2) for rank in range(ranks)]
    y_BsNaD = _AllToAll.apply(torch.stack(shards), group).permute(1, 3, 0, 2, 4)
    return y_BsNaD.contiguous().flatten(2, 3).transpose(1, 2)


class _AllToAll(Operator):
    """All-to-all on [N, …]: part j goes to rank j. Backward is the same all-to-all."""

    signature = "V -> V"

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        if x.shape[0] == 1:
            return x.clone()
        x = x.contiguous()
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(dy, ctx.group), None
