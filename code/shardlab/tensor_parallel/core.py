"""Tensor parallelism: every rank has a part of each matrix, and all ranks have every token.

    Y = X [W1 | W2] = [X W1 | X W2]            by columns: each rank has some of the outputs
    Y = [X1 | X2] [W1 ; W2] = X1 W1 + X2 W2    by rows: each has some of the inputs, and a summand

The first needs nothing of the others forward, the second ends in a sum. In this order they are a
feed-forward network, or an attention, with one all-reduce forward and one backward. In the order of
the lesson: the two operators that make these sums; the two layers; how the parts of a block are
cut; the embedding, cut by vocabulary as the loss is (`cross_entropy`); the whole GPT.

Shoeybi, Patwary, Puri, LeGresley, Casper, Catanzaro, "Megatron-LM: Training Multi-Billion Parameter
Language Models Using Model Parallelism", 2019 (arXiv 1909.08053), section 3. (nn.Linear keeps its
matrix transposed, outputs first: what the formulas call a column is a row of `weight`.)

Shapes in names: B batch, S sequence, H hidden, O outputs, I inputs, V vocabulary; a small letter is
this rank's share of that dimension.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardlab.common.arguments import check_kind
from shardlab.gpt.latent import LatentAttention
from shardlab.gpt.model import GPT, Attention, FeedForward
from shardlab.layout.entries import COPIED
from shardlab.ranks import check_group, check_same
from shardlab.tensor_types.operator import Operator

from .cross_entropy import check_entries, own_rows
from .dropout import draw_apart
from .overlap import Edge, Edges, Entrance, added_up, handed_on, used
from .predict import check_degree, parts_of

Group = dist.ProcessGroup

# The two operators at the edges of what is cut. Each is the other one, read backwards.


def copy_to(x: Tensor, group: Group) -> Tensor:
    """Give `x` [any shape], which all ranks have, to layers of which each rank has a part.

    Megatron's f. Each rank's layers see all of `x`, and give it a gradient that knows of them
    alone: backward adds these up.
    """
    return _CopyTo.apply(x, group) if check_group(group)[1] > 1 else x


class _CopyTo(Operator):
    words = "I -> R"  # what x is on all ranks, and what it becomes: see tensor_types

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        total = dx.clone(memory_format=torch.contiguous_format)  # dx may be others' as well
        dist.all_reduce(total, group=ctx.group)  # of x's shape
        return total, None


def reduce_from(x: Tensor, group: Group) -> Tensor:
    """The sum of all ranks' `x` [any shape], on all of them.

    Megatron's g. Backward sends nothing: each summand has the sum's gradient, which all ranks have.
    """
    return _ReduceFrom.apply(x, group, False) if check_group(group)[1] > 1 else x


def reduce_from_(x: Tensor, group: Group) -> Tensor:
    """`reduce_from` in place: `x` becomes the sum. For what was just computed and nobody keeps."""
    return _ReduceFrom.apply(x, group, True) if check_group(group)[1] > 1 else x


class _ReduceFrom(Operator):
    words = "P -> I"

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


# What stands around each part that is cut, where all ranks have all activations outside of it.
REPLICATED = Edges(copy_to, reduce_from_, handed_on, added_up)


# Layers of which each of t ranks has a t-th.


def shard_slice(name: str, size: int, group: Group, parts: int | None = None) -> slice:
    """Which part of `size` is this rank's; `name` is what the size is called.

    parts: cut into so many, each of which several neighbours have; None: one for each rank. Raises
    ValueError where they do not divide it.
    """
    rank, ranks = check_group(group)
    parts = ranks if parts is None else parts
    if size % parts:
        raise ValueError(f"{name}={size}: allowed on {parts} ranks are multiples of {parts}")
    part, number = size // parts, rank * parts // ranks
    return slice(number * part, (number + 1) * part)


def take(full: Tensor, dimension: int, part: slice) -> Tensor:
    """The part of `full` along a dimension: a view."""
    return full.narrow(dimension, part.start, part.stop - part.start)


class Cut(nn.Module):
    """A layer with this rank's share of a plain one's parameters.

    cut: parameter -> the dimension along which it is cut; all others are whole on every rank.
    along: what nn.Linear or nn.Embedding call the size that is cut; ValueError where the ranks do
    not divide it. parts: into how many, where ranks have copies of them (see `overlap`); None: one
    for each rank.
    """

    cut: ClassVar[dict[str, int]]
    along: ClassVar[str]

    def __init__(self, plain: nn.Module, group: Group, parts: int | None = None):
        super().__init__()
        self.group, self.parts = group, parts
        part = shard_slice(self.along, getattr(plain, self.along), group, parts)
        for name, parameter in plain._parameters.items():
            if parameter is None:  # a bias that is not there
                self.register_parameter(name, None)
                continue
            kept = parameter.detach()
            if name in self.cut:
                kept = take(kept, self.cut[name], part).clone()  # a view would keep all of it alive
            self.register_parameter(name, nn.Parameter(kept, parameter.requires_grad))


class ColumnLinear(Cut):
    """A linear layer that computes this rank's share of the outputs.

    enter: the operator in front of it. entrance: where it stands beside others that see the same
    input, what computes all of them at once (see `overlap`).
    """

    cut: ClassVar[dict[str, int]] = {"weight": 0, "bias": 0}
    along: ClassVar[str] = "out_features"

    def __init__(
        self, plain: nn.Linear, group: Group, enter: Edge = copy_to, parts: int | None = None
    ):
        super().__init__(plain, group, parts)
        self.enter = enter
        self.entrance: Entrance | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] to [..., o]."""
        if self.entrance is not None:
            return self.entrance.output(self, x)
        return F.linear(self.enter(x, self.group), *used(self))  # [..., I] @ [I, o]


class RowLinear(Cut):
    """A linear layer that sees this rank's share of the inputs; `leave` makes the sum of it.

    The bias stands behind the sum. In front of it, each rank would add its own: t times too much.
    """

    cut: ClassVar[dict[str, int]] = {"weight": 1}
    along: ClassVar[str] = "in_features"

    def __init__(self, plain: nn.Linear, group: Group, leave: Edge = reduce_from_):
        super().__init__(plain, group)
        self.leave = leave

    def forward(self, x: Tensor) -> Tensor:
        """[..., i] to [..., O]."""
        y = F.linear(x, self.weight)  # [..., i] @ [i, O], one of t summands
        y = self.leave(y, self.group)
        return y if self.bias is None else y + self.bias.to(y.dtype)


# The two parts of a block, each cut in place: columns first, rows last, nothing sent in between.


def cut_ffn(ffn: FeedForward, group: Group, edges: Edges = REPLICATED) -> None:
    """Leave this rank its share of `ffn`'s width, in place: [B, S, H] to [B, S, H] as before.

    The function between the matrices acts on each feature alone, so every rank can apply it to its
    own. Were the first matrix cut by rows, it would have to wait for a sum.
    """
    shard_slice("ffn_width", ffn.up.out_features, group)
    first = ("up", "gate") if ffn.gate is not None else ("up",)
    for name in first:
        setattr(ffn, name, ColumnLinear(getattr(ffn, name), group, edges.enter))
    ffn.down = RowLinear(ffn.down, group, edges.leave)
    Entrance([getattr(ffn, name) for name in first], group, edges)


class HeadNorm(nn.Module):
    """A norm of each head of which this rank has some: its weights are all heads', and whole.

    They enter the region as activations do, so that backward adds up what all heads make of them.
    """

    def __init__(self, plain: nn.RMSNorm, group: Group):
        super().__init__()
        self.weight, self.eps, self.group = plain.weight, plain.eps, group

    def forward(self, x_BaSD: Tensor) -> Tensor:
        """[B, a, S, D] to the same."""
        weight_D = copy_to(self.weight, self.group)
        return F.rms_norm(x_BaSD, weight_D.shape, weight_D, self.eps)


def cut_attention(attention: Attention, group: Group, edges: Edges = REPLICATED) -> None:
    """Leave this rank its heads of `attention`, in place: [B, S, H] to [B, S, H] as before.

    Of fewer heads of keys and values than ranks it has the one that its queries look at.
    """
    config, first = attention.config, ("query", "key", "value")
    shard_slice("heads", config.heads, group)
    parts = parts_of(COPIED, config.key_value_heads, check_group(group)[1])
    for name in first:  # heads stand side by side in the outputs
        plain, some = getattr(attention, name), None if name == "query" else parts
        setattr(attention, name, ColumnLinear(plain, group, edges.enter, some))
    for name in ("query_norm", "key_norm") if config.qk_norm else ():
        setattr(attention, name, HeadNorm(getattr(attention, name), group))
    _end(attention, group, edges)
    Entrance([getattr(attention, name) for name in first], group, edges)


def cut_latent(attention: LatentAttention, group: Group, edges: Edges = REPLICATED) -> None:
    """The same of latent attention: what all heads share stays whole, and enters instead of x."""
    shard_slice("heads", attention.config.heads, group)
    for name in ("query", "key_value"):
        layer = ColumnLinear(getattr(attention, name), group, edges.enter)
        setattr(attention, name, layer)
        Entrance([layer], group, edges)
    attention.compress = partial(_entering, attention, group, edges.enter)
    _end(attention, group, edges)


def _entering(attention: LatentAttention, group: Group, enter: Edge, x: Tensor) -> Any:
    q, latent, position_BSP = LatentAttention.compress(attention, x)
    return q, latent, enter(position_BSP, group)  # the others enter where they are multiplied


def _end(attention: nn.Module, group: Group, edges: Edges) -> None:
    attention.out = RowLinear(attention.out, group, edges.leave)
    if attention.config.dropout:
        draw_apart(attention, group)


# Cut by vocabulary: the embedding. The loss, from logits of which each rank has a part, stands in
# `cross_entropy`.


class VocabEmbedding(Cut):
    """An embedding with this rank's share of the rows; tokens of the other ranks give zeros."""

    cut: ClassVar[dict[str, int]] = {"weight": 0}
    along: ClassVar[str] = "num_embeddings"

    def __init__(self, plain: nn.Embedding, group: Group, leave: Edge = reduce_from_):
        super().__init__(plain, group)
        self.leave, self.vocabulary = leave, plain.num_embeddings
        self.own = shard_slice("num_embeddings", plain.num_embeddings, group)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """[B, S] token numbers to [B, S, H]: one rank has each row, and the sum gives it to all.

        Raises ValueError for tokens that are not in the vocabulary; on a GPU, which would have to
        be waited for, they give zeros.
        """
        check_entries("tokens", tokens_BS, self.vocabulary)
        rows_BS, elsewhere_BS = own_rows(tokens_BS, self.own)
        x_BSH = F.embedding(rows_BS, self.weight)
        x_BSH = x_BSH.masked_fill_(elsewhere_BS[..., None], 0)
        return self.leave(x_BSH, self.group)


# The whole model.


def parallelize(model: GPT, group: Group, edges: Edges = REPLICATED) -> GPT:
    """Leave this rank its share of `model`, in place, and return it: logits [B, S, V / t].

    Every rank of `group` calls it with the same model, and gives it the same tokens; train with
    `loss`, and make the optimizer afterwards. Names of parameters stay those of the plain GPT, a
    tied head stays tied. A model on meta gets numbers by `initialize` or `load_full_state_dict`.

    edges: what stands around each region. Dropout: each rank draws for what it has a part of, and
    all draw alike for what they have whole, if their generators begin alike (see `dropout`).

    Raises ValueError for anything but a plain GPT, a group without this rank, sizes that the ranks
    do not divide, and on every rank when models or arguments differ.
    """
    _, ranks = check_group(group)
    check_kind(GPT, model=model)
    if hasattr(model, "tensor_group"):
        raise ValueError("model: it is parallelized already; allowed is a plain GPT")
    check_degree(model.config, ranks)
    if model.config.experts and edges is not REPLICATED:
        raise ValueError(f"edges: with experts={model.config.experts} allowed is REPLICATED")
    check_same(group, model=model, config=model.config, edges=edges)
    for block in model.blocks:
        cut_mixer = cut_latent if isinstance(block.attention, LatentAttention) else cut_attention
        cut_mixer(block.attention, group, edges)
        for ffn in [m for m in block.ffn.modules() if isinstance(m, FeedForward)]:
            cut_ffn(ffn, group, edges)
        if model.config.dropout and edges.uncut == "R":  # a rank has its own tokens there
            draw_apart(block.dropout, group)
    tied = model.head.weight is model.embedding.weight
    model.embedding = VocabEmbedding(model.embedding, group, edges.leave)
    model.head = ColumnLinear(model.head, group, edges.enter)
    Entrance([model.head], group, edges)
    if tied:
        model.head.weight = model.embedding.weight
    model.tensor_group, model.edges = group, edges
    return model
