"""All-to-all attention: tokens for heads, and back.

Each of N ranks has the queries, keys and values of its own s = S/N tokens, for all heads. An
all-to-all gives it all tokens instead, for A/N of the heads; attention, which no head shares with
another, is then the plain one, over the whole sequence. A second all-to-all brings the results back
to their tokens (Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv 2309.14509, section 3).

Of what a rank hands to an all-to-all, it sends (N - 1)/N: bytes per rank fall with N, while those
of a ring do not. But there must be a head for every rank.

Shapes: B batch, S tokens in all, s = S/N of one rank, A query heads, K key and value heads, D size
of a head, a = A/N heads of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .layout import group_of, join, split
from .ring import check_shapes


def all_to_all_attention(
    q_BAsD: Tensor,
    k_BKsD: Tensor,
    v_BKsD: Tensor,
    group: dist.ProcessGroup,
    causal: bool = True,
    layout: str = "contiguous",
) -> Tensor:
    """Attention of this rank's queries over the keys of all ranks: [B, A, s, D].

    All ranks call it with tensors of the same shapes; the tokens are laid out as by
    `split(…, layout)`. Differentiable in queries, keys and values. Where there are fewer key and
    value heads than ranks, each is sent to N/K of them: more bytes, the same result.

    Raises ValueError, before anything is sent, for shapes that do not fit, unknown layouts, and
    heads that cannot be shared out.
    """
    check_shapes(q_BAsD, k_BKsD, v_BKsD, layout)
    ranks, _ = group_of(group)
    repeats = key_repeats(q_BAsD.shape[1], k_BKsD.shape[1], ranks)
    if repeats > 1:
        k_BKsD, v_BKsD = (x.repeat_interleave(repeats, dim=1) for x in (k_BKsD, v_BKsD))
    q_BaSD, k_BkSD, v_BkSD = _to_heads((q_BAsD, k_BKsD, v_BKsD), group, layout)
    y_BaSD = F.scaled_dot_product_attention(
        q_BaSD, k_BkSD, v_BkSD, is_causal=causal, enable_gqa=q_BaSD.shape != k_BkSD.shape
    )
    return tokens_for_heads(y_BaSD, group, layout)


def key_repeats(heads: int, kv_heads: int, ranks: int) -> int:
    """How often each key and value head is sent; ValueError when heads cannot be shared out."""
    if heads % ranks:
        down, up = heads // ranks * ranks, -(-heads // ranks) * ranks
        nearest = f"nearest are {down} and {up}" if down else f"nearest is {up}"
        raise ValueError(
            f"heads={heads}: {ranks} ranks need a multiple of {ranks}; the {nearest}. "
            "Ring attention takes any number"
        )
    if kv_heads % ranks and ranks % kv_heads:
        raise ValueError(
            f"kv_heads={kv_heads}: {ranks} ranks need a multiple or a divisor of {ranks}. "
            "Ring attention takes any number"
        )
    return max(1, ranks // kv_heads)


def heads_for_tokens(
    x_BAsD: Tensor, group: dist.ProcessGroup, layout: str = "contiguous"
) -> Tensor:
    """From all heads of this rank's tokens to this rank's heads of all tokens, [B, a, S, D]."""
    return _to_heads((x_BAsD,), group, layout)[0]


def _to_heads(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, layout: str
) -> tuple[Tensor, ...]:
    """`heads_for_tokens` of several tensors, in one message."""
    ranks, _ = group_of(group)
    # [N, B, a, s, D]: heads by the rank they go to.
    each = [x_BAsD.unflatten(1, (ranks, -1)).movedim(1, 0) for x_BAsD in tensors]
    mine = _AllToAll.apply(torch.cat(each, dim=2), group)  # tokens by the rank they come from
    return join(list(mine), layout, dim=2).split([x.shape[2] for x in each], dim=1)


def tokens_for_heads(
    x_BaSD: Tensor, group: dist.ProcessGroup, layout: str = "contiguous"
) -> Tensor:
    """The way back: from this rank's heads of all tokens to all heads of its tokens, [B, A, s, D].

    In memory a token's heads stand side by side, as the model's next step wants them.
    """
    ranks, _ = group_of(group)
    shares = [split(x_BaSD, ranks, rank, layout, dim=2) for rank in range(ranks)]
    y_BsNaD = _AllToAll.apply(torch.stack(shares), group).permute(1, 3, 0, 2, 4)
    return y_BsNaD.contiguous().flatten(2, 3).transpose(1, 2)


class _AllToAll(torch.autograd.Function):
    """Part j of each rank to rank j: [N, …] to [N, …]. It is its own way back, in backward too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _exchange(dy, ctx.group), None


def _exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    if x.shape[0] == 1:
        return x.clone()
    x = x.contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received
