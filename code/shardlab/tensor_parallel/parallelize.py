"""The plain GPT on t ranks: the same module, each rank with a t-th of every matrix.

Attention is cut by heads (queries, keys, values by columns, `out` by rows), the feed-forward
network by its width (up and gate by columns, down by rows), embedding and head by vocabulary. Norms
and the biases behind sums are whole on all ranks, see the same activations there, get the same
gradients, and so stay equal. Each block has two regions, so that it sums activations twice forward
and twice backward, whatever stands inside them.

Shoeybi et al. 2019 (arXiv 1909.08053), section 3. t: ranks of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from shardlab.model import GPT, Attention, FeedForward

from .columns import REPLICATED, columns
from .dropout import DROPOUTS, drop_by_heads
from .layers import ColumnLinear, RowLinear, VocabEmbedding
from .operators import Edges, Group, ranks_in, share
from .predict import check_degree


def parallelize(model: GPT, group: Group, edges: Edges = REPLICATED, dropout: str = "equal") -> GPT:
    """Leave this rank its share of `model`, in place, and return it: logits [B, S, V / t].

    Every rank of `group` calls it with the same model, and gives it the same tokens; train with
    `loss`, and make the optimizer afterwards. Names of parameters stay those of the plain GPT, a
    tied head stays tied. A model on meta gets numbers by `initialize` or `load_full_state_dict`.

    edges: what stands around each region. dropout, within attention: "equal", as one process draws
    it, or "own", each rank for itself (see `dropout`); between blocks all ranks draw the same, if
    their generators are in the same state.

    Raises ValueError for anything but a plain GPT, a group without this rank, and heads, key-value
    heads, width of the feed-forward network or vocabulary that the ranks do not divide.
    """
    size = ranks_in(group)
    if not isinstance(model, GPT):
        raise ValueError(f"model={type(model).__name__}: allowed is a GPT of shardlab.model")
    if hasattr(model, "tensor_group"):
        raise ValueError("model: it is parallelized already; allowed is a plain GPT")
    if dropout not in DROPOUTS:
        raise ValueError(f"dropout={dropout!r}: allowed are {', '.join(map(repr, DROPOUTS))}")
    check_degree(model.config, size)
    for block in model.blocks:
        cut_attention(block.attention, group, edges, dropout)
        cut_ffn(block.ffn, group, edges)
    tied = model.head.weight is model.embedding.weight
    model.embedding = VocabEmbedding.from_plain(model.embedding, group, edges.leave)
    model.head = ColumnLinear.from_plain(model.head, group, None)
    _enter(model.head, ("",), group, edges)
    if tied:
        model.head.weight = model.embedding.weight
    model.tensor_group, model.edges = group, edges
    return model


def cut_attention(
    attention: Attention, group: Group, edges: Edges = REPLICATED, dropout: str = "equal"
) -> None:
    """Leave this rank its heads of `attention`, in place: [B, S, H] to [B, S, H] as before."""
    config = attention.config
    for name in ("heads", "key_value_heads"):
        share(name, getattr(config, name), group)
    for name in ("query", "key", "value"):  # heads stand side by side in the outputs
        setattr(attention, name, ColumnLinear.from_plain(getattr(attention, name), group, None))
    attention.out = RowLinear.from_plain(attention.out, group, edges.leave)
    _enter(attention, ("query", "key", "value"), group, edges)
    if config.dropout and ranks_in(group) > 1:
        drop_by_heads(attention, group, dropout)


def cut_ffn(ffn: FeedForward, group: Group, edges: Edges = REPLICATED) -> None:
    """Leave this rank its share of `ffn`'s width, in place: [B, S, H] to [B, S, H] as before.

    The function between the matrices acts on each feature alone, so every rank can apply it to its
    own. Were the first matrix cut by rows, it would have to wait for a sum.
    """
    share("ffn_width", ffn.up.out_features, group)
    first = ("up", "gate") if ffn.gate is not None else ("up",)
    for name in first:
        setattr(ffn, name, ColumnLinear.from_plain(getattr(ffn, name), group, None))
    ffn.down = RowLinear.from_plain(ffn.down, group, edges.leave)
    _enter(ffn, first, group, edges)


def _enter(module: nn.Module, first: Sequence[str], group: Group, edges: Edges) -> None:
    """Let what `module` is given enter once, for all the layers in it that see it `first`."""

    def entering(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x = inputs[0]
        if edges.begin is None:
            return edges.enter(x, group), *inputs[1:]
        layers = [module.get_submodule(name) for name in first]  # "" is the module itself
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        for layer, y in zip(layers, columns(x, weights, biases, group, edges), strict=True):
            layer.ready = y  # for when `module` calls it
        return inputs

    module.register_forward_pre_hook(entering)
