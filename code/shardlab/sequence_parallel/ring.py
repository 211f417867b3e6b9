"""Ring attention: queries stay, keys and values go round.

Each of N ranks has the queries, keys and values of its own s = S/N tokens. In turn 0 it attends
with its own keys; while it computes, they are on their way to the next rank, and those of the rank
before come in. After N turns every query has met every key, and no rank ever held more than two
ranks' keys and values (Liu et al. 2023, "Ring Attention with Blockwise Transformers", arXiv
2310.01889, section 3).

What one block of keys gives is no result yet: softmax divides by a sum over all keys. So each block
comes with the logarithm of its sum, and `merge` weighs two of them (online softmax: Milakov and
Gimelshein 2018, arXiv 1805.02867; over blocks: Dao et al. 2022, arXiv 2205.14135, section 3.1).

Backward, keys and values go round again, and with each block travels what the ranks that it has
visited add to its gradient; the last hop brings it home.

Under a causal mask some blocks are empty, and nobody computes them: `blocks` knows which. Laid out
contiguously, rank 0 has one block to compute and the last rank N; zig-zag, all have the same work
in every turn.

Shapes: B batch, s tokens of one rank, A query heads, K key and value heads, D size of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardlab import ranks
from shardlab.count import clock

from .kernel import block_attention, block_gradients
from .layout import check_layout, check_rank, group_of


class Block(NamedTuple):
    """Some of a rank's queries against some of the keys that are there: local slices."""

    queries: slice
    keys: slice
    causal: bool  # query i of them sees keys 0 to i; otherwise all

    @property
    def pairs(self) -> int:
        """Pairs of query and key that the mask leaves, in one head of one sequence."""
        queries, keys = (part.stop - part.start for part in self[:2])
        return queries * (queries + 1) // 2 if self.causal else queries * keys


class Work(NamedTuple):
    """A block that a rank computed, for pictures and for counting."""

    turn: int  # of the ring, from 0
    source: int  # the rank whose keys these are
    block: Block
    seconds: float
    backward: bool


def blocks(
    layout: str, ranks: int, rank: int, source: int, causal: bool, share: int
) -> list[Block]:
    """What `rank` has to compute with the keys of `source`: nothing, one block.

    share: tokens on each rank. Without a mask that is always everything. With it, a rank's own keys
    are half masked in either layout, because its tokens stand in order. Of another rank's keys,

    - contiguous: all or none, as they come before or after;
    - zig-zag: half the work, always. From an earlier rank come one early piece, which all queries
      see, and one that is later than both of theirs. From a later rank come two pieces that both
      stand between this rank's early queries, which see neither, and its late ones, which see both.
    """
    check_layout(layout)
    check_rank(ranks, rank)
    check_rank(ranks, source)
    whole, half = slice(0, share), share // 2
    if not causal or source == rank:
        return [Block(whole, whole, causal)]
    if layout == "contiguous":
        return [Block(whole, whole, False)] if source < rank else []
    if source < rank:
        return [Block(whole, slice(0, half), False)]
    return [Block(slice(half, share), whole, False)]


def merge(
    out_BAsD: Tensor, lse_BAs: Tensor, block_BAsD: Tensor, block_lse_BAs: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys from attention over each: (output, logarithm of the sum).

    With sums e^l and e^m the weight of the second is e^m / (e^l + e^m) = sigmoid(m - l), which
    cannot overflow.
    """
    weight_BAs1 = torch.sigmoid(block_lse_BAs - lse_BAs)[..., None].to(out_BAsD.dtype)
    merged_BAsD = torch.lerp(out_BAsD, block_BAsD.to(out_BAsD.dtype), weight_BAs1)
    return merged_BAsD, torch.logaddexp(lse_BAs, block_lse_BAs)


def ring_attention(
    q_BAsD: Tensor,
    k_BKsD: Tensor,
    v_BKsD: Tensor,
    group: dist.ProcessGroup,
    causal: bool = True,
    layout: str = "zigzag",
    trace: list[Work] | None = None,
) -> Tensor:
    """Attention of this rank's queries over the keys of all ranks: [B, A, s, D].

    All ranks call it with tensors of the same shapes; the tokens are laid out as by
    `split(…, layout)`. Differentiable in queries, keys and values. trace: gets a `Work` for every
    block that is computed, in forward and in backward. 16-bit inputs are merged, and gradients
    travel, in float32.

    Raises ValueError, before anything is sent, for shapes that do not fit and unknown layouts.
    """
    check_shapes(q_BAsD, k_BKsD, v_BKsD, layout)
    call = _Call(group, causal, layout, trace, q_BAsD.shape[2])
    return _Ring.apply(q_BAsD, k_BKsD, v_BKsD, call)


def check_shapes(q_BAsD: Tensor, k_BKsD: Tensor, v_BKsD: Tensor, layout: str) -> None:
    """Raise ValueError unless these are queries, keys and values of tokens in such a layout."""
    check_layout(layout)
    shapes = f"q {list(q_BAsD.shape)}, k {list(k_BKsD.shape)}, v {list(v_BKsD.shape)}"
    if q_BAsD.dim() != 4 or k_BKsD.shape != v_BKsD.shape or k_BKsD.dim() != 4:
        raise ValueError(f"{shapes}: allowed are q [B, A, s, D] and k, v [B, K, s, D]")
    batch, heads, share, size = q_BAsD.shape
    if (batch, share, size) != (k_BKsD.shape[0], *k_BKsD.shape[2:]) or 0 in q_BAsD.shape:
        raise ValueError(
            f"{shapes}: batch, tokens and size of a head have to agree, and be above 0"
        )
    if not k_BKsD.shape[1] or heads % k_BKsD.shape[1]:
        raise ValueError(f"{shapes}: allowed numbers of key and value heads divide {heads}")
    if len({(x.dtype, x.device) for x in (q_BAsD, k_BKsD, v_BKsD)}) > 1:
        kinds = ", ".join(f"{x.dtype} on {x.device}" for x in (q_BAsD, k_BKsD, v_BKsD))
        raise ValueError(f"q, k, v are {kinds}: allowed is one dtype, on one device")
    if layout == "zigzag" and share % 2:
        raise ValueError(
            f"q_BAsD has {share} tokens: layout 'zigzag' needs an even number on each rank; "
            f"the nearest are {share - 1} and {share + 1}"
        )


class _Pass:
    """A tensor on its way to the next rank, while that of the rank before comes in."""

    def __init__(self, outgoing: Tensor, group: dist.ProcessGroup):
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        after, before = (rank + 1) % size, (rank - 1) % size
        self.incoming = torch.empty_like(outgoing)
        self.message = ranks.exchange(outgoing, after, self.incoming, before, group)

    def wait(self) -> Tensor:
        """What came in, once it is here and the other has left."""
        self.message.wait()
        del self.message
        return self.incoming


class _Call:
    """What one call of `ring_attention` knows of the ring."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        causal: bool,
        layout: str,
        trace: list[Work] | None,
        share: int,
    ):
        self.group, self.causal, self.layout, self.trace = group, causal, layout, trace
        self.size, self.rank = group_of(group)
        self.share = share

    def pack(self, k_BKsD: Tensor, v_BKsD: Tensor) -> Any:
        """Keys and values as one message, [2, B, K, s, D]."""
        return (k_BKsD, v_BKsD) if self.size == 1 else torch.stack((k_BKsD, v_BKsD))

    def pass_on(self, kv: Tensor, turn: int) -> _Pass | None:
        """Start to hand them to the next rank, unless this was the last turn."""
        return _Pass(kv, self.group) if turn < self.size - 1 else None

    def work(self, turn: int, device: torch.device, backward: bool = False) -> Iterator[Block]:
        """The blocks of a turn; whoever takes the next one has computed the last."""
        source = (self.rank - turn) % self.size
        for block in blocks(self.layout, self.size, self.rank, source, self.causal, self.share):
            if self.trace is None:
                yield block
                continue
            begin = clock(device)
            yield block
            self.trace.append(Work(turn, source, block, clock(device) - begin, backward))


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Tensor:
        ctx.call = call
        wide = torch.promote_types(q.dtype, torch.float32)
        # In memory a token's heads stand side by side: the model's next step wants them so.
        out_BAsD = torch.empty_like(
            q.transpose(1, 2), dtype=wide, memory_format=torch.contiguous_format
        ).transpose(1, 2)
        lse_BAs = torch.empty(q.shape[:3], dtype=wide, device=q.device)
        kv = call.pack(k, v)
        for turn in range(call.size):
            passing = call.pass_on(kv, turn)
            for block in call.work(turn, q.device):
                _attend(q, kv, block, out_BAsD, lse_BAs, first=turn == 0)
            if passing is not None:
                kv = passing.wait()
        out_BAsD = out_BAsD.to(q.dtype)
        ctx.save_for_backward(q, k, v, out_BAsD, lse_BAs)
        return out_BAsD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BAsD: Tensor) -> tuple[Tensor | None, ...]:
        call, (q, k, v, out_BAsD, lse_BAs) = ctx.call, ctx.saved_tensors
        wide = torch.promote_types(q.dtype, torch.float32)
        dq_BAsD = torch.zeros_like(q, dtype=wide)
        kv, coming = call.pack(k, v), None
        for turn in range(call.size):
            passing = call.pass_on(kv, turn)
            dkv = torch.zeros((2, *k.shape), dtype=wide, device=k.device)  # [2, B, K, s, D]
            for block in call.work(turn, q.device, backward=True):
                _differentiate(dy_BAsD, q, kv, out_BAsD, lse_BAs, block, dq_BAsD, dkv)
            if passing is not None:
                kv = passing.wait()
            if coming is not None:  # what the ranks before have found for these keys
                dkv += coming.wait()
            if call.size > 1:  # on with it, behind its keys; the last hop is the way home
                coming = _Pass(dkv, call.group)
        if coming is not None:
            dkv = coming.wait()
        return dq_BAsD.to(q.dtype), dkv[0].to(k.dtype), dkv[1].to(v.dtype), None


def _attend(
    q: Tensor, kv: Tensor, block: Block, out_BAsD: Tensor, lse_BAs: Tensor, first: bool
) -> None:
    """Merge one block into output and logarithms; the first one meets every query."""
    rows, keys = block.queries, block.keys
    y, lse = block_attention(q[:, :, rows], kv[0][:, :, keys], kv[1][:, :, keys], block.causal)
    if not first:
        y, lse = merge(out_BAsD[:, :, rows], lse_BAs[:, :, rows], y, lse)
    out_BAsD[:, :, rows], lse_BAs[:, :, rows] = y, lse


def _differentiate(
    dy: Tensor,
    q: Tensor,
    kv: Tensor,
    out_BAsD: Tensor,
    lse_BAs: Tensor,
    block: Block,
    dq_BAsD: Tensor,
    dkv: Tensor,
) -> None:
    """Add what one block has to say about the gradients."""
    rows, keys = block.queries, block.keys
    found = block_gradients(
        dy[:, :, rows], q[:, :, rows], kv[0][:, :, keys], kv[1][:, :, keys],
        out_BAsD[:, :, rows], lse_BAs[:, :, rows], block.causal,
    )  # fmt: skip
    dq_BAsD[:, :, rows] += found.queries
    dkv[0][:, :, keys] += found.keys
    dkv[1][:, :, keys] += found.values
