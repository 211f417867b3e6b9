"""Layers of which each of t ranks has a t-th.

    ColumnLinear      Y = X [W1 | W2] = [X W1 | X W2]: each rank has some of the outputs
    RowLinear         Y = [X1 | X2] [W1 ; W2] = X1 W1 + X2 W2: each has some of the inputs
    VocabEmbedding    each rank has some of the vocabulary's rows

The first needs nothing of the others forward, the second ends in a sum. In this order they are a
feed-forward network, or an attention, with one sum forward and one backward. (nn.Linear keeps its
matrix transposed, outputs first: what the formulas call a column is a row of `weight`.)

Shoeybi et al. 2019 (arXiv 1909.08053), section 3. Shapes in names: B batch, S sequence, H hidden, O
outputs, I inputs, V vocabulary; a small letter is this rank's share of that dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from .operators import Group, copy_to, reduce_from_, share

Edge = Callable[[Tensor, Group], Tensor]


class Cut(nn.Module):
    """A layer that holds this rank's share of a plain one's parameters.

    cut: the parameters that are cut, and along which of their dimensions; all others are whole.
    """

    cut: ClassVar[dict[str, int]]
    group: Group

    def keep(self, plain: nn.Module, names: dict[str, str]) -> None:
        """Take over the parameters of `plain`, this rank's share of those that are cut.

        names: what the cut dimension of each is called in an error.
        """
        for name, parameter in plain._parameters.items():
            if parameter is None:  # a bias that is not there
                self.register_parameter(name, None)
                continue
            kept = parameter.detach()
            if name in self.cut:
                dimension = self.cut[name]
                part = share(names[name], kept.shape[dimension], self.group)
                kept = take(kept, dimension, part).clone()  # a view would keep all of it alive
            self.register_parameter(name, nn.Parameter(kept, parameter.requires_grad))


def take(whole: Tensor, dimension: int, part: slice) -> Tensor:
    """The part of `whole` along a dimension: a view."""
    return whole.narrow(dimension, part.start, part.stop - part.start)


class ColumnLinear(Cut):
    """A linear layer that computes this rank's share of the outputs.

    enter: the operator in front of it; None where the input has entered the region already, so that
    several layers share one entrance. `ready`: its output, where that was computed at the entrance
    together with its neighbours' (see `columns`); to be used once.
    """

    cut: ClassVar[dict[str, int]] = {"weight": 0, "bias": 0}

    def __init__(self, group: Group, enter: Edge | None):
        super().__init__()
        self.group, self.enter = group, enter
        self.ready: Tensor | None = None

    @classmethod
    def from_plain(
        cls, linear: nn.Linear, group: Group, enter: Edge | None = copy_to
    ) -> ColumnLinear:
        """Cut `linear` by its outputs; ValueError where the ranks do not divide them."""
        layer = cls(group, enter)
        layer.keep(linear, {"weight": "out_features", "bias": "out_features"})
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] to [..., o]."""
        if self.ready is not None:
            y, self.ready = self.ready, None
            return y
        if self.enter is not None:
            x = self.enter(x, self.group)
        return F.linear(x, self.weight, self.bias)  # [..., I] @ [I, o]

    def extra_repr(self) -> str:
        """Its shape, as nn.Linear prints it."""
        outputs, inputs = self.weight.shape
        return f"in_features={inputs}, out_features={outputs}, bias={self.bias is not None}"


class RowLinear(Cut):
    """A linear layer that sees this rank's share of the inputs; `leave` makes the sum of it.

    The bias stands behind the sum. In front of it, each rank would add its own: t times too much.
    """

    cut: ClassVar[dict[str, int]] = {"weight": 1}

    def __init__(self, group: Group, leave: Edge):
        super().__init__()
        self.group, self.leave = group, leave

    @classmethod
    def from_plain(cls, linear: nn.Linear, group: Group, leave: Edge = reduce_from_) -> RowLinear:
        """Cut `linear` by its inputs; ValueError where the ranks do not divide them."""
        layer = cls(group, leave)
        layer.keep(linear, {"weight": "in_features"})
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """[..., i] to [..., O]."""
        y = F.linear(x, self.weight)  # [..., i] @ [i, O], one of t addends
        y = self.leave(y, self.group)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    extra_repr = ColumnLinear.extra_repr


class VocabEmbedding(Cut):
    """An embedding with this rank's share of the rows; tokens of the other ranks give zeros."""

    cut: ClassVar[dict[str, int]] = {"weight": 0}

    def __init__(self, group: Group, leave: Edge, vocabulary: int):
        super().__init__()
        self.group, self.leave, self.vocabulary = group, leave, vocabulary
        self.own = share("num_embeddings", vocabulary, group)

    @classmethod
    def from_plain(
        cls, embedding: nn.Embedding, group: Group, leave: Edge = reduce_from_
    ) -> VocabEmbedding:
        """Cut `embedding` by its rows; ValueError where the ranks do not divide them."""
        layer = cls(group, leave, embedding.num_embeddings)
        layer.keep(embedding, {"weight": "num_embeddings"})
        return layer

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

    def extra_repr(self) -> str:
        """Its shape, as nn.Embedding prints it."""
        return ", ".join(map(str, self.weight.shape))


def own_rows(numbers: Tensor, own: slice) -> tuple[Tensor, Tensor]:
    """Where `numbers` stand in this rank's part, and which do not: these get row 0."""
    rows = numbers - own.start
    elsewhere = (rows < 0) | (numbers >= own.stop)
    return rows.masked_fill_(elsewhere, 0), elsewhere


def check_entries(name: str, numbers: Tensor, vocabulary: int) -> None:
    """Raise ValueError if there are `numbers` on the CPU that are not in the vocabulary."""
    if numbers.is_cpu and type(numbers) is Tensor:  # fake tensors have no data
        outside = (numbers < 0) | (numbers >= vocabulary)
        if outside.any():
            wrong = int(numbers[outside][0])
            raise ValueError(f"{name}: {wrong} is among them; allowed are 0 to {vocabulary - 1}")
