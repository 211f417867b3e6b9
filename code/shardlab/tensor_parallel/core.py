"""Tensor parallelism: every rank holds a part of each matrix, and all ranks hold every token.

    Y = X [W1 | W2] = [X W1 | X W2]            column-parallel: each rank has some of the outputs
    Y = [X1 | X2] [W1 ; W2] = X1 W1 + X2 W2    row-parallel: each rank has some inputs, one summand

A column-parallel layer sends nothing in forward; a row-parallel layer ends in a sum over the ranks.
In this order they make a feed-forward network or an attention, with one all-reduce in forward and
one in backward. The file follows the lesson: the two operators that make the sums; the two layers;
the shards of a block; the embedding, cut by vocabulary as the loss is (`cross_entropy`); the GPT.

Shoeybi, Patwary, Puri, LeGresley, Casper, Catanzaro, "Megatron-LM: Training Multi-Billion Parameter
Language Models Using Model Parallelism", 2019 (arXiv 1909.08053), section 3. (nn.Linear stores its
matrix transposed, outputs first: a column in the formulas is a row of `weight`.)

Shapes in names: B batch, S sequence, H hidden, O outputs, I inputs, V vocabulary; a lowercase
letter is this rank's share of that dimension.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardlab.common.arguments import check_type
from shardlab.gpt.latent import LatentAttention
from shardlab.gpt.model import GPT, Attention, FeedForward
from shardlab.layout.parameters import KV_HEADS
from shardlab.ranks import check_group, check_same
from shardlab.tensor_types.operator import Operator

from .cross_entropy import check_entries, to_local_rows
from .dropout import seed_per_rank
from .overlap import Edge, Edges, SharedInput, get_weights, start_all_reduce, start_identity
from .predict import check_degree, count_parts

Group = dist.ProcessGroup

# The two operators at the edges of cut layers. Each one's forward is the other's backward.


def copy_to(x: Tensor, group: Group) -> Tensor:
    """Pass a replicated `x` [any shape] to layers that are cut over the ranks.

    Megatron's f. All ranks have the same `x`. Each rank's layers use all of `x`, but their gradient
    of `x` covers that rank's share alone, so backward all-reduces the gradients.
    """
    return _CopyTo.apply(x, group) if check_group(group)[1] > 1 else x


class _CopyTo(Operator):
    signature = "I -> R"  # type of x -> type of the result over the ranks: see tensor_types

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        total = dx.clone(memory_format=torch.contiguous_format)  # dx may be shared
        dist.all_reduce(total, group=ctx.group)  # of x's shape
        return total, None


def reduce_from(x: Tensor, group: Group) -> Tensor:
    """Return the sum of all ranks' `x` [any shape], on every rank.

    Megatron's g. Backward sends nothing: all ranks have the sum's gradient, which is each
    summand's.
    """
    return _ReduceFrom.apply(x, group, False) if check_group(group)[1] > 1 else x


def reduce_from_(x: Tensor, group: Group) -> Tensor:
    """Do the same as `reduce_from` in place: no other code may keep `x`."""
    return _ReduceFrom.apply(x, group, True) if check_group(group)[1] > 1 else x


class _ReduceFrom(Operator):
    signature = "P -> I"

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, in_place: bool) -> Tensor:
        if in_place and x.is_contiguous():
            ctx.mark_dirty(x)
        else:
            x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)  # of x's shape
        return x

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        return dx, None, None


# The edges of a region outside of which all ranks have all activations.
REPLICATED = Edges(copy_to, reduce_from_, start_identity, start_all_reduce)


# Layers of which each of t ranks holds 1/t.


def shard_slice(name: str, size: int, group: Group, parts: int | None = None) -> slice:
    """Return this rank's slice of a dimension of length `size`; `name` is for the error.

    parts: number of parts; with fewer parts than ranks, neighbouring ranks share one; None: one per
    rank. Raises ValueError if `parts` does not divide `size`.
    """
    rank, ranks = check_group(group)
    parts = ranks if parts is None else parts
    if size % parts:
        raise ValueError(f"{name}={size}: must be a multiple of the {parts} ranks")
    part, number = size // parts, rank * parts // ranks
    return slice(number * part, (number + 1) * part)


def take_slice(full: Tensor, dimension: int, part: slice) -> Tensor:
    """Return the slice `part` of `full` along `dimension`, as a view."""
    return full.narrow(dimension, part.start, part.stop - part.start)


class ShardedLayer(nn.Module):
    """A layer with this rank's share of the parameters of a plain layer.

    shard_dims: parameter name -> dimension that is sharded; other parameters are whole on every
    rank. sharded_size: attribute of the plain layer with the size that is divided; ValueError if
    the parts do not divide it. parts: see `shard_slice`, and for copies of a part `overlap`.
    """

    shard_dims: ClassVar[dict[str, int]]
    sharded_size: ClassVar[str]

    def __init__(self, plain: nn.Module, group: Group, parts: int | None = None):
        super().__init__()
        self.group, self.parts = group, parts
        part = shard_slice(self.sharded_size, getattr(plain, self.sharded_size), group, parts)
        for name, parameter in plain._parameters.items():
            if parameter is None:  # no bias
                self.register_parameter(name, None)
                continue
            kept = parameter.detach()
            if name in self.shard_dims:  # a view would keep the whole tensor alive
                kept = take_slice(kept, self.shard_dims[name], part).clone()
            self.register_parameter(name, nn.Parameter(kept, parameter.requires_grad))


class ColumnLinear(ShardedLayer):
    """A linear layer that computes this rank's share of the outputs.

    enter: the operator in front of the layer. shared_input: computes this layer together with
    others that have the same input, if set (see `overlap`).
    """

    shard_dims: ClassVar[dict[str, int]] = {"weight": 0, "bias": 0}
    sharded_size: ClassVar[str] = "out_features"

    def __init__(
        self, plain: nn.Linear, group: Group, enter: Edge = copy_to, parts: int | None = None
    ):
        super().__init__(plain, group, parts)
        self.enter_region = enter
        self.shared_input: SharedInput | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., I] to this rank's outputs [..., o]."""
        if self.shared_input is not None:
            return self.shared_input.take_output(self, x)
        return F.linear(self.enter_region(x, self.group), *get_weights(self))  # [..., I] @ [I, o]


class RowLinear(ShardedLayer):
    """A linear layer over this rank's share of the inputs; `leave` sums over the ranks.

    The bias is added after the sum. Before the sum, every rank would add it: t times too much.
    """

    shard_dims: ClassVar[dict[str, int]] = {"weight": 1}
    sharded_size: ClassVar[str] = "in_features"

    def __init__(self, plain: nn.Linear, group: Group, leave: Edge = reduce_from_):
        super().__init__(plain, group)
        self.leave_region = leave

    def forward(self, x: Tensor) -> Tensor:
        """Map this rank's inputs [..., i] to outputs [..., O], summed over ranks."""
        y = F.linear(x, self.weight)  # [..., i] @ [i, O]: one of t summands
        y = self.leave_region(y, self.group)
        return y if self.bias is None else y + self.bias.to(y.dtype)


# The two regions of a block: column-parallel layers, then a row-parallel one; no message between.


def shard_ffn(ffn: FeedForward, group: Group, edges: Edges = REPLICATED) -> None:
    """Keep this rank's share of `ffn`'s width, in place; still [B, S, H] to [B, S, H].

    The activation function acts on each feature alone, so each rank applies it to its own. After a
    row-parallel first matrix it would have to wait for a sum.
    """
    shard_slice("ffn_width", ffn.up.out_features, group)
    first = ("up", "gate") if ffn.gate is not None else ("up",)
    for name in first:
        setattr(ffn, name, ColumnLinear(getattr(ffn, name), group, edges.enter_region))
    ffn.down = RowLinear(ffn.down, group, edges.leave_region)
    SharedInput([getattr(ffn, name) for name in first], group, edges)


class HeadNorm(nn.Module):
    """A norm over each head's features, for a rank that has some of the heads.

    Its weights are whole; through `copy_to`, backward adds up their gradients of all heads.
    """

    def __init__(self, plain: nn.RMSNorm, group: Group):
        super().__init__()
        self.weight, self.eps, self.group = plain.weight, plain.eps, group

    def forward(self, x_BaSD: Tensor) -> Tensor:
        """Normalize x [B, a, S, D] over D; the shape stays."""
        weight_D = copy_to(self.weight, self.group)
        return F.rms_norm(x_BaSD, weight_D.shape, weight_D, self.eps)


def shard_attention(attention: Attention, group: Group, edges: Edges = REPLICATED) -> None:
    """Keep this rank's heads of `attention`, in place; still [B, S, H] to [B, S, H].

    With fewer key-value heads than ranks, a rank keeps the head that its queries use.
    """
    config, first = attention.config, ("query", "key", "value")
    shard_slice("heads", config.heads, group)
    parts = count_parts(KV_HEADS, config.key_value_heads, check_group(group)[1])
    for name in first:  # a head's features are adjacent in the outputs
        plain, some = getattr(attention, name), None if name == "query" else parts
        setattr(attention, name, ColumnLinear(plain, group, edges.enter_region, some))
    for name in ("query_norm", "key_norm") if config.qk_norm else ():
        setattr(attention, name, HeadNorm(getattr(attention, name), group))
    _shard_output(attention, group, edges)
    SharedInput([getattr(attention, name) for name in first], group, edges)


def shard_latent(attention: LatentAttention, group: Group, edges: Edges = REPLICATED) -> None:
    """Keep this rank's heads of latent attention; shared latents enter, not x."""
    shard_slice("heads", attention.config.heads, group)
    for name in ("query", "key_value"):
        layer = ColumnLinear(getattr(attention, name), group, edges.enter_region)
        setattr(attention, name, layer)
        SharedInput([layer], group, edges)
    attention.compute_latents = partial(_compress_and_enter, attention, group, edges.enter_region)
    _shard_output(attention, group, edges)


def _compress_and_enter(attention: LatentAttention, group: Group, enter: Edge, x: Tensor) -> Any:
    q, latent, position_BSP = LatentAttention.compute_latents(attention, x)
    return q, latent, enter(position_BSP, group)  # q and latent enter in their layers' SharedInput


def _shard_output(attention: nn.Module, group: Group, edges: Edges) -> None:
    attention.out = RowLinear(attention.out, group, edges.leave_region)
    if attention.config.dropout:
        seed_per_rank(attention, group)


# Cut by vocabulary: the embedding. The loss of logits that are cut by vocabulary is in
# `cross_entropy`.


class VocabEmbedding(ShardedLayer):
    """An embedding with this rank's share of rows; other ranks' tokens give zeros."""

    shard_dims: ClassVar[dict[str, int]] = {"weight": 0}
    sharded_size: ClassVar[str] = "num_embeddings"

    def __init__(self, plain: nn.Embedding, group: Group, leave: Edge = reduce_from_):
        super().__init__(plain, group)
        self.leave_region, self.vocabulary = leave, plain.num_embeddings
        self.row_slice = shard_slice("num_embeddings", plain.num_embeddings, group)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Map tokens [B, S] to [B, S, H]: the sum over the ranks gives every rank all rows.

        Raises ValueError for tokens outside the vocabulary, on the CPU alone: on a GPU the check
        would have to wait, so such tokens give zeros.
        """
        check_entries("tokens", tokens_BS, self.vocabulary)
        rows_BS, elsewhere_BS = to_local_rows(tokens_BS, self.row_slice)
        x_BSH = F.embedding(rows_BS, self.weight)
        x_BSH = x_BSH.masked_fill_(elsewhere_BS[..., None], 0)
        return self.leave_region(x_BSH, self.group)


# The whole model.


def parallelize(model: GPT, group: Group, edges: Edges = REPLICATED) -> GPT:
    """Keep this rank's share of `model`, in place, and return it: logits [B, S, V / t].

    Every rank of `group` calls this with the same model and then trains on the same tokens, with
    `vocab_parallel_loss` and an optimizer made afterwards. Parameters keep the plain GPT's names; a
    tied head stays tied. `initialize_shards` or `load_full_state_dict` fills a model on meta.

    edges: the operators around each region. Dropout: each rank draws its own masks for cut
    activations; for the others all draw the same if their generators start equal (see `dropout`).

    Raises ValueError unless `model` is a plain GPT, this rank is in `group` and the ranks divide
    its sizes; and on every rank when models or arguments differ.
    """
    _, ranks = check_group(group)
    check_type(GPT, model=model)
    if hasattr(model, "tensor_group"):
        raise ValueError("model: must be a plain GPT, but is parallelized already")
    check_degree(model.config, ranks)
    if model.config.experts and edges is not REPLICATED:
        raise ValueError(f"edges: must be REPLICATED with experts={model.config.experts}")
    check_same(group, model=model, config=model.config, edges=edges)
    for block in model.blocks:
        latent = isinstance(block.attention, LatentAttention)
        (shard_latent if latent else shard_attention)(block.attention, group, edges)
        for ffn in [m for m in block.ffn.modules() if isinstance(m, FeedForward)]:
            shard_ffn(ffn, group, edges)
        if model.config.dropout and edges.uncut_type == "R":  # there each rank has its own tokens
            seed_per_rank(block.dropout, group)
    tied = model.head.weight is model.embedding.weight
    model.embedding = VocabEmbedding(model.embedding, group, edges.leave_region)
    model.head = ColumnLinear(model.head, group, edges.enter_region)
    SharedInput([model.head], group, edges)
    if tied:
        model.head.weight = model.embedding.weight
    model.tensor_group, model.edges = group, edges
    return model
