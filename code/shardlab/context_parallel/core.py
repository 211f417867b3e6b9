"""Context parallelism: the sequence is sharded over ranks in the whole model, attention included.

Every rank has all weights and its own s = S/N tokens, from the embedding to the loss. Norms, linear
layers and the loss treat each token independently and need no change. Only attention needs the
other ranks' keys and values. Two implementations provide them.

`ring_attention`: queries stay, and keys and values travel around a ring. In turn 0 a rank attends
to its own keys, sends its keys and values to the next rank, and receives the previous rank's. After
N turns every query has met every key, and no rank ever held more than two ranks' keys and values
beside its own (Liu et al. 2023, "Ring Attention", arXiv 2310.01889, section 3). Attention over one
block of keys is only a partial result, because softmax divides by a sum over all keys. So each
block also returns the logarithm of its sum, and `merge_attention` combines two (online softmax:
Milakov and Gimelshein 2018, arXiv 1805.02867; over blocks: Dao et al. 2022, arXiv 2205.14135, 3.1).

`all_to_all_attention` is the other implementation: see `ulysses`.

    model = distribute_model(GPT(config), group, attention="ring", layout="zigzag")
    optimizer = torch.optim.AdamW(model.parameters())
    tokens_Bs, targets_Bs = (shard_tokens(x, group, "zigzag") for x in batch)
    loss(model(tokens_Bs), targets_Bs).backward()
    average_gradients(model, group)
    optimizer.step()

The loss is a mean over s tokens on every rank. If some targets are ignored, ranks count different
numbers of tokens: pass the sum of the losses to `data_parallel.scale_for_global_mean` instead.

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
from shardlab.measure.count import read_clock
from shardlab.ranks import check_group, check_same, check_same_once, check_trainable, exchange
from shardlab.tensor_types.operator import Operator

from .kernel import block_attention, block_gradients
from .layout import check_layout, check_shapes, count_key_repeats, split_seq, token_positions
from .ulysses import all_to_all_attention


def merge_attention(
    out_BAsD: Tensor, lse_BAs: Tensor, block_BAsD: Tensor, block_lse_BAs: Tensor
) -> tuple[Tensor, Tensor]:
    """Combine attention over two sets of keys; return (output, logarithm of the sum) over both.

    With sums e^l and e^m, the second output's weight is e^m / (e^l + e^m) = sigmoid(m - l), a
    form that cannot overflow.
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
    trace: list[BlockTiming] | None = None,
) -> Tensor:
    """Return attention of this rank's queries over all ranks' keys, [B, A, s, D].

    Collective: all ranks pass tensors of the same shapes, sharded by `split_seq`. The result
    is differentiable in queries, keys and values. trace: a list that receives a `BlockTiming` for
    every block computed, in forward and in backward. For 16-bit inputs, partial outputs are merged,
    and the gradients of keys and values are sent, in float32.

    Raises ValueError, before any communication, for mismatched shapes and unknown layouts.
    """
    check_shapes(q_BAsD, k_BKsD, v_BKsD, layout)
    rank, size = check_group(group)
    check_same_once(group, "context_parallel.ring", group, causal=causal, layout=layout)
    ring = _Ring(group, rank, size, causal, layout, q_BAsD.shape[2], trace)
    return _RingAttention.apply(q_BAsD, k_BKsD, v_BKsD, ring)


class _RingAttention(Operator):
    signature = "V, V, V -> V"  # see tensor_types

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: _Ring) -> Tensor:
        ctx.ring = ring
        wide = torch.promote_types(q.dtype, torch.float32)
        # Memory order is [B, s, A, D]: the output projection needs a token's heads adjacent.
        out_BAsD = torch.empty_like(
            q.transpose(1, 2), dtype=wide, memory_format=torch.contiguous_format
        ).transpose(1, 2)
        lse_BAs = torch.empty(q.shape[:3], dtype=wide, device=q.device)
        kv = ring.stack_kv(k, v)
        for turn in range(ring.size):
            passing = ring.send_kv(kv, turn)
            for rows, keys, masked in ring.run_turn(turn, q.device):
                k_block, v_block = (x[:, :, keys] for x in kv)
                y, lse = block_attention(q[:, :, rows], k_block, v_block, masked)
                if turn:  # turn 0 computes a first output for every query
                    y, lse = merge_attention(out_BAsD[:, :, rows], lse_BAs[:, :, rows], y, lse)
                out_BAsD[:, :, rows], lse_BAs[:, :, rows] = y, lse
                del y, lse, k_block, v_block  # free them before the next block allocates its own
            if passing is not None:
                kv = passing.wait()
        out_BAsD = out_BAsD.to(q.dtype)
        ctx.save_for_backward(q, k, v, out_BAsD, lse_BAs)
        return out_BAsD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BAsD: Tensor) -> tuple[Tensor | None, ...]:
        """Pass keys and values around the ring again, each followed by its gradient so far."""
        ring, (q, k, v, out_BAsD, lse_BAs) = ctx.ring, ctx.saved_tensors
        wide = torch.promote_types(q.dtype, torch.float32)
        dq_BAsD = torch.zeros_like(q, dtype=wide)
        kv, coming = ring.stack_kv(k, v), None
        for turn in range(ring.size):
            passing = ring.send_kv(kv, turn)
            dkv = torch.zeros((2, *k.shape), dtype=wide, device=k.device)  # [2, B, K, s, D]
            for rows, keys, masked in ring.run_turn(turn, q.device, backward=True):
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
            if coming is not None:  # these keys' gradient from the previous ranks' queries
                dkv += coming.wait()
            if ring.size > 1:  # follow the keys; the last hop returns to the rank that owns them
                coming = _RingTransfer(dkv, ring)
        if coming is not None:
            dkv = coming.wait()
        return dq_BAsD.to(q.dtype), dkv[0].to(k.dtype), dkv[1].to(v.dtype), None


class _RingTransfer:
    """A send to the next rank in flight, together with the receive from the previous rank."""

    def __init__(self, outgoing: Tensor, ring: _Ring):
        after, before = (ring.rank + 1) % ring.size, (ring.rank - 1) % ring.size
        self.incoming = torch.empty_like(outgoing)
        # One batched send and receive: NCCL would deadlock in a ring in which all send first.
        self.message = exchange(outgoing, after, self.incoming, before, ring.group)

    def wait(self) -> Tensor:
        """Wait for the send and the receive; return the received tensor."""
        self.message.wait()
        del self.message
        return self.incoming


class Block(NamedTuple):
    """A slice of a rank's queries and a slice of the keys it holds, in local indices."""

    queries: slice
    keys: slice
    causal: bool  # query i of the slice sees keys 0 to i of the slice; if False, all keys

    @property
    def num_pairs(self) -> int:
        """Number of unmasked query-key pairs, in one head of one sequence."""
        queries, keys = (part.stop - part.start for part in self[:2])
        return queries * (queries + 1) // 2 if self.causal else queries * keys


def list_blocks(
    layout: str, ranks: int, rank: int, source: int, causal: bool, local_seq: int
) -> list[Block]:
    """Return the blocks that `rank` computes with the keys of `source`: none, or one.

    local_seq: tokens on each rank. Without a mask, the block is all queries by all keys. With it,
    the rank's own block is causal, because its tokens are in order. With another rank's keys:

    - contiguous: all of it if `source` is an earlier rank, none if it is a later one;
    - zig-zag: always half. An earlier rank's early piece comes before all local queries, and its
      late piece after all of them. Both pieces of a later rank lie between the local early
      queries, which see neither piece, and the local late queries, which see both.
    """
    full, half = slice(0, local_seq), local_seq // 2
    if not causal or source == rank:
        return [Block(full, full, causal)]
    if layout == "contiguous":
        return [Block(full, full, False)] if source < rank else []
    if source < rank:
        return [Block(full, slice(0, half), False)]
    return [Block(slice(half, local_seq), full, False)]


class BlockTiming(NamedTuple):
    """A trace record of one block that a rank computed."""

    turn: int  # turn of the ring, from 0
    source: int  # the rank that owns the block's keys
    block: Block
    seconds: float
    backward: bool


@dataclass(frozen=True)
class _Ring:
    """The arguments of one `ring_attention` call, and this rank's place in the ring."""

    group: dist.ProcessGroup
    rank: int
    size: int
    causal: bool
    layout: str
    local_seq: int  # tokens on each rank
    trace: list[BlockTiming] | None

    def stack_kv(self, k_BKsD: Tensor, v_BKsD: Tensor) -> Any:
        """Stack keys and values into one message, [2, B, K, s, D]."""
        return (k_BKsD, v_BKsD) if self.size == 1 else torch.stack((k_BKsD, v_BKsD))

    def send_kv(self, kv: Tensor, turn: int) -> _RingTransfer | None:
        """Start sending keys and values to the next rank, unless this is the last turn."""
        return _RingTransfer(kv, self) if turn < self.size - 1 else None

    def run_turn(self, turn: int, device: torch.device, backward: bool = False) -> Iterator[Block]:
        """Yield the blocks of a turn; time each one until the caller asks for the next."""
        source = (self.rank - turn) % self.size
        place = self.layout, self.size, self.rank, source
        for block in list_blocks(*place, self.causal, self.local_seq):
            if self.trace is None:
                yield block
                continue
            begin = read_clock(device)
            yield block
            seconds = read_clock(device) - begin
            self.trace.append(BlockTiming(turn, source, block, seconds, backward))


ATTENTIONS = {"ring": ring_attention, "ulysses": all_to_all_attention}


def distribute_model(
    model: GPT, group: dist.ProcessGroup, attention: str = "ring", layout: str = "zigzag"
) -> GPT:
    """Make `model` attend over a sequence sharded over `group`, in place; return `model`.

    Forward then takes `shard_tokens(…)` [B, s] and returns logits [B, s, V]. Parameters stay
    unsharded, so state dicts are loaded and saved as before. attention: "ring" or "ulysses".

    Raises ValueError, before any communication, for unknown names, dropout, windows, latent
    attention, a model that is distributed already, and heads that all-to-all attention cannot
    divide; on every rank, after one exchange, if models or arguments differ between ranks.
    """
    check_one_of(ATTENTIONS, attention=attention)
    check_layout(layout)
    _, ranks = check_group(group)
    config = getattr(model, "config", None)
    for name in ("latent", "window"):
        if (value := getattr(config, name, None)) is not None:
            raise ValueError(f"{name}={value}: must be None with context parallelism")
    parts = [part for part in model.modules() if isinstance(part, Attention)]
    if not parts:
        raise ValueError(f"model={type(model).__name__}: must be a shardlab.gpt.model.GPT")
    for part in parts:
        if "forward" in vars(part):
            raise ValueError("model: must be a plain GPT, but is distributed already")
        if part.config.dropout:
            # One process draws a random number per query-key pair; no rank here has all pairs.
            raise ValueError(f"dropout={part.config.dropout}: must be 0 with context parallelism")
        if attention == "ulysses":
            # Count heads by the weights' widths: tensor parallelism may have sharded them.
            widths = part.query.weight.shape[0], part.key.weight.shape[0]
            count_key_repeats(*(width // part.config.head_size for width in widths), ranks)
    check_same(group, model=model, config=parts[0].config, attention=attention, layout=layout)
    for part in parts:
        part.forward = partial(_forward_sharded, part, group, attention, layout)
    return model


def _forward_sharded(
    module: Attention, group: dist.ProcessGroup, attention: str, layout: str, x_BsH: Tensor
) -> Tensor:
    rank, ranks = check_group(group)
    at_s = token_positions(layout, ranks * x_BsH.shape[1], ranks, rank, x_BsH.device)
    q_BAsD, k_BKsD, v_BKsD = module.project_heads(x_BsH, at_s)
    y_BAsD = ATTENTIONS[attention](q_BAsD, k_BKsD, v_BKsD, group, True, layout)
    return module.out(y_BAsD.transpose(1, 2).flatten(-2))  # [B, s, A*D] @ [A*D, H]


def shard_tokens(tokens_BS: Tensor, group: dist.ProcessGroup, layout: str = "zigzag") -> Tensor:
    """Return this rank's tokens [B, s] of a batch that every rank has.

    Raises ValueError for a sequence that cannot be divided equally.
    """
    rank, ranks = check_group(group)
    return split_seq(tokens_BS, ranks, rank, layout)


@torch.no_grad()
def average_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Average every gradient over the ranks after backward, with one all-reduce per dtype.

    A rank's gradient is that of the mean loss over its own tokens. All ranks have equally many
    tokens, so the mean over the ranks is the gradient of the whole context's mean loss.
    """
    check_trainable(model, group)
    buckets.average_gradients(model.parameters(), group, coalesce=True)


def average_scalar(value: Tensor, group: dist.ProcessGroup) -> float:
    """Return the mean of a scalar over the ranks, without gradient; waits for the GPU."""
    _, ranks = check_group(group)
    total = value.detach().clone()
    dist.all_reduce(total, group=group)
    return total.item() / ranks
