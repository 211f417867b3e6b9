"""Context parallelism: a sequence cut over ranks in the whole model, in attention too.

Every rank has all weights and its own s = S/N tokens, from the embedding to the loss. Norms,
matrices and the loss work on each token alone and notice nothing. Attention alone needs the other
ranks' keys and values. There are two ways to them.

`ring_attention`: queries stay, keys and values go round. In turn 0 a rank attends with its own
keys; while it computes, they are on their way to the next rank, and those of the rank before come
in. After N turns every query has met every key, and no rank ever held more than two ranks' keys and
values (Liu et al. 2023, "Ring Attention with Blockwise Transformers", arXiv 2310.01889, section 3).
What one block of keys gives is no result yet: softmax divides by a sum over all keys. So each block
comes with the logarithm of its sum, and `merge` weighs two of them (online softmax: Milakov and
Gimelshein 2018, arXiv 1805.02867; over blocks: Dao et al. 2022, arXiv 2205.14135, section 3.1).

The other one is `all_to_all_attention`: see `ulysses`.

    model = distribute(GPT(config), group, attention="ring", layout="zigzag")
    optimizer = torch.optim.AdamW(model.parameters())
    tokens_Bs, targets_Bs = (shard(x, group, "zigzag") for x in batch)
    loss(model(tokens_Bs), targets_Bs).backward()
    average_gradients(model, group)
    optimizer.step()

A rank's mean is over s tokens, as many as another's. Where some targets are ignored, the loss is
`data_parallel.joined_mean` of a sum, in the place of a mean.

Shapes: B batch, S tokens in all, s = S/N of one rank, H hidden, A query heads, K key and value
heads, D size of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardlab.common.arguments import check_one_of
from shardlab.data_parallel import buckets
from shardlab.gpt.model import GPT, Attention
from shardlab.measure.count import clock
from shardlab.ranks import check_group, check_same, check_same_once, check_trained, exchange
from shardlab.tensor_types.operator import Operator

from .kernel import block_attention, block_gradients
from .layout import check_layout, check_shapes, key_repeats, positions, split
from .ulysses import all_to_all_attention


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
    rank, size = check_group(group)
    check_same_once(group, "context_parallel.ring", group, causal=causal, layout=layout)
    ring = _Ring(group, rank, size, causal, layout, q_BAsD.shape[2], trace)
    return _RingAttention.apply(q_BAsD, k_BKsD, v_BKsD, ring)


class _RingAttention(Operator):
    words = "V, V, V -> V"  # see tensor_types

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: _Ring) -> Tensor:
        ctx.ring = ring
        wide = torch.promote_types(q.dtype, torch.float32)
        # In memory a token's heads stand side by side: the model's next step wants them so.
        out_BAsD = torch.empty_like(
            q.transpose(1, 2), dtype=wide, memory_format=torch.contiguous_format
        ).transpose(1, 2)
        lse_BAs = torch.empty(q.shape[:3], dtype=wide, device=q.device)
        kv = ring.pack(k, v)
        for turn in range(ring.size):
            passing = ring.pass_on(kv, turn)
            for rows, keys, masked in ring.work(turn, q.device):
                k_block, v_block = (x[:, :, keys] for x in kv)
                y, lse = block_attention(q[:, :, rows], k_block, v_block, masked)
                if turn:  # in turn 0 every query has met its first keys
                    y, lse = merge(out_BAsD[:, :, rows], lse_BAs[:, :, rows], y, lse)
                out_BAsD[:, :, rows], lse_BAs[:, :, rows] = y, lse
                del y, lse, k_block, v_block  # so that the next block's are not held beside them
            if passing is not None:
                kv = passing.wait()
        out_BAsD = out_BAsD.to(q.dtype)
        ctx.save_for_backward(q, k, v, out_BAsD, lse_BAs)
        return out_BAsD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BAsD: Tensor) -> tuple[Tensor | None, ...]:
        """Keys and values go round once more; behind them, what was found for their gradients."""
        ring, (q, k, v, out_BAsD, lse_BAs) = ctx.ring, ctx.saved_tensors
        wide = torch.promote_types(q.dtype, torch.float32)
        dq_BAsD = torch.zeros_like(q, dtype=wide)
        kv, coming = ring.pack(k, v), None
        for turn in range(ring.size):
            passing = ring.pass_on(kv, turn)
            dkv = torch.zeros((2, *k.shape), dtype=wide, device=k.device)  # [2, B, K, s, D]
            for rows, keys, masked in ring.work(turn, q.device, backward=True):
                k_block, v_block = (x[:, :, keys] for x in kv)
                found = block_gradients(
                    dy_BAsD[:, :, rows], q[:, :, rows], k_block, v_block,
                    out_BAsD[:, :, rows], lse_BAs[:, :, rows], masked,
                )  # fmt: skip
                dq_BAsD[:, :, rows] += found.queries
                dkv[0][:, :, keys] += found.keys
                dkv[1][:, :, keys] += found.values
                del found, k_block, v_block
            if passing is not None:
                kv = passing.wait()
            if coming is not None:  # what the ranks before have found for these keys
                dkv += coming.wait()
            if ring.size > 1:  # on with it, behind its keys; the last hop is the way home
                coming = _Pass(dkv, ring)
        if coming is not None:
            dkv = coming.wait()
        return dq_BAsD.to(q.dtype), dkv[0].to(k.dtype), dkv[1].to(v.dtype), None


class _Pass:
    """A tensor on its way to the next rank, while that of the rank before comes in."""

    def __init__(self, outgoing: Tensor, ring: _Ring):
        after, before = (ring.rank + 1) % ring.size, (ring.rank - 1) % ring.size
        self.incoming = torch.empty_like(outgoing)
        # One batch: nccl would wait for ever in a ring where all send first.
        self.message = exchange(outgoing, after, self.incoming, before, ring.group)

    def wait(self) -> Tensor:
        """What came in, once it is here and the other has left."""
        self.message.wait()
        del self.message
        return self.incoming


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


def blocks(
    layout: str, ranks: int, rank: int, source: int, causal: bool, local_seq: int
) -> list[Block]:
    """What `rank` has to compute with the keys of `source`: nothing, or one block.

    local_seq: tokens on each rank. Without a mask that is always everything. With it, its own keys
    are half masked in either layout, because its tokens stand in order. Of another rank's keys,

    - contiguous: all or none, as they come before or after;
    - zig-zag: half the work, always. From an earlier rank come one early piece, which all queries
      see, and one that is later than both of theirs. From a later rank come two pieces that both
      stand between this rank's early queries, which see neither, and its late ones, which see both.
    """
    full, half = slice(0, local_seq), local_seq // 2
    if not causal or source == rank:
        return [Block(full, full, causal)]
    if layout == "contiguous":
        return [Block(full, full, False)] if source < rank else []
    if source < rank:
        return [Block(full, slice(0, half), False)]
    return [Block(slice(half, local_seq), full, False)]


class Work(NamedTuple):
    """A block that a rank computed, for pictures and for counting."""

    turn: int  # of the ring, from 0
    source: int  # the rank whose keys these are
    block: Block
    seconds: float
    backward: bool


@dataclass(frozen=True)
class _Ring:
    """What one call of `ring_attention` knows of its ring."""

    group: dist.ProcessGroup
    rank: int
    size: int
    causal: bool
    layout: str
    local_seq: int  # tokens on each rank
    trace: list[Work] | None

    def pack(self, k_BKsD: Tensor, v_BKsD: Tensor) -> Any:
        """Keys and values as one message, [2, B, K, s, D]."""
        return (k_BKsD, v_BKsD) if self.size == 1 else torch.stack((k_BKsD, v_BKsD))

    def pass_on(self, kv: Tensor, turn: int) -> _Pass | None:
        """Start to hand them to the next rank, unless this was the last turn."""
        return _Pass(kv, self) if turn < self.size - 1 else None

    def work(self, turn: int, device: torch.device, backward: bool = False) -> Iterator[Block]:
        """The blocks of a turn; whoever takes the next one has computed the last."""
        source = (self.rank - turn) % self.size
        for block in blocks(self.layout, self.size, self.rank, source, self.causal, self.local_seq):
            if self.trace is None:
                yield block
                continue
            begin = clock(device)
            yield block
            self.trace.append(Work(turn, source, block, clock(device) - begin, backward))


ATTENTIONS = {"ring": ring_attention, "ulysses": all_to_all_attention}


def distribute(
    model: GPT, group: dist.ProcessGroup, attention: str = "ring", layout: str = "zigzag"
) -> GPT:
    """Let `model` work on this rank's tokens of a context that `group` shares; the same, in place.

    Forward then takes `shard(tokens_BS, …)` [B, s] and gives logits [B, s, V]. Parameters stay as
    they are, and whole: states are loaded and saved as ever. attention: "ring" or "ulysses".

    Raises ValueError, before anything is sent, for other names, dropout, windows, latent attention,
    a model that is distributed already, and heads that all-to-all attention cannot share out; after
    one exchange, and on every rank, when models or arguments differ.
    """
    check_one_of(ATTENTIONS, attention=attention)
    check_layout(layout)
    _, ranks = check_group(group)
    config = getattr(model, "config", None)
    for name in ("latent", "window"):
        if (value := getattr(config, name, None)) is not None:
            raise ValueError(f"{name}={value}: allowed is None with a context cut")
    parts = [part for part in model.modules() if isinstance(part, Attention)]
    if not parts:
        raise ValueError(f"model={type(model).__name__}: allowed is a shardlab.gpt.model.GPT")
    for part in parts:
        if "forward" in vars(part):
            raise ValueError("model: is distributed already; allowed is a plain one")
        if part.config.dropout:
            # One process draws a number for each pair of tokens; here, no rank sees all pairs.
            raise ValueError(f"dropout={part.config.dropout}: allowed is 0 with a context cut")
        if attention == "ulysses":
            # From the widths, so that it is right for heads that tensor parallelism has cut.
            widths = part.query.weight.shape[0], part.key.weight.shape[0]
            key_repeats(*(width // part.config.head_size for width in widths), ranks)
    check_same(group, model=model, config=parts[0].config, attention=attention, layout=layout)
    for part in parts:
        part.forward = partial(_attention, part, group, attention, layout)
    return model


def _attention(
    module: Attention, group: dist.ProcessGroup, attention: str, layout: str, x_BsH: Tensor
) -> Tensor:
    """`Attention.forward` for this rank's tokens, [B, s, H] to [B, s, H]."""
    rank, ranks = check_group(group)
    at_s = positions(layout, ranks * x_BsH.shape[1], ranks, rank, x_BsH.device)
    q_BAsD, k_BKsD, v_BKsD = module.heads(x_BsH, at_s)
    y_BAsD = ATTENTIONS[attention](q_BAsD, k_BKsD, v_BKsD, group, True, layout)
    return module.out(y_BAsD.transpose(1, 2).flatten(-2))  # [B, s, A*D] @ [A*D, H]


def shard(tokens_BS: Tensor, group: dist.ProcessGroup, layout: str = "zigzag") -> Tensor:
    """This rank's tokens [B, s] of a batch that every rank has.

    Raises ValueError for a sequence that cannot be shared out.
    """
    rank, ranks = check_group(group)
    return split(tokens_BS, ranks, rank, layout)


@torch.no_grad()
def average_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """After backward: every gradient becomes the mean over the ranks, in one message a dtype.

    A rank's gradients are means over its own tokens; ranks have equally many, so the mean over the
    ranks is the gradient of the whole context, as in data parallelism.
    """
    check_trained(model, group)
    buckets.average_gradients(model.parameters(), group, joined=True)


def average(value: Tensor, group: dist.ProcessGroup) -> float:
    """The mean of a number over the ranks, without gradient; a GPU's work has to be waited for."""
    _, ranks = check_group(group)
    total = value.detach().clone()
    dist.all_reduce(total, group=group)
    return total.item() / ranks
