"""The gradients of one flat tensor's parameters: collected, sent away, kept as a shard."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .flat import Flat, ReduceScatter


class Gradients:
    """Gradients of the parameters of `flat`, from autograd's hand to this rank's pieces.

    `place` moves each gradient, scaled by 1/N, into one flat tensor as soon as it is there; `send`
    starts the reduce-scatter; `receive` gives each piece its gradient. With keep=True (stage 1)
    the sum is written where this rank's share stood, and the flat tensor stays for as long as the
    pieces have gradients. Otherwise (stages 2 and 3) it is given back, and a shard is left.
    """

    def __init__(self, flat: Flat, keep: bool, ordered: bool):
        self.flat, self.keep, self.ordered = flat, keep, ordered
        self.share = 1 / dist.get_world_size(flat.group)
        self.drop()

    def drop(self) -> None:
        """Forget what has been collected, and wait for what is under way."""
        if getattr(self, "sending", None) is not None:
            self.sending.wait()
        for parameter in self.flat.parameters:
            parameter.grad = None
        self.collected: Tensor | None = None
        self.views: list[Tensor] = []
        self.placed: set[int] = set()
        self.sending: ReduceScatter | None = None
        self.late: list[tuple[int, Tensor]] = []

    @torch.no_grad()
    def place(self, index: int) -> None:
        """Move the gradient of parameter `index` into the flat tensor, or add it to what is there.

        It is widened to the master's dtype before it is scaled.
        """
        parameter = self.flat.parameters[index]
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if self.collected is None:
            self.collected = self.flat.empty(self.flat.master)  # [size]
            self.views = self.flat.views(self.collected)
        view = self.views[index]
        if index in self.placed:
            view.add_(gradient, alpha=self.share)
        elif gradient.dtype == view.dtype:
            torch.mul(gradient, self.share, out=view)  # moved and scaled in one pass
        else:
            view.copy_(gradient).mul_(self.share)
        self.placed.add(index)

    def place_all(self) -> None:
        """Move whatever gradients the parameters have."""
        for index, parameter in enumerate(self.flat.parameters):
            if parameter.grad is not None:
                self.place(index)

    @torch.no_grad()
    def send(self) -> None:
        """Start the reduce-scatter; a parameter without a gradient takes part with zeros."""
        if self.collected is None:
            self.collected = self.flat.empty(self.flat.master)
            self.views = self.flat.views(self.collected)
        # Made where it is needed: a list that is copied to a GPU makes this process wait for it.
        self.had_gradient = torch.ones(len(self.views), dtype=torch.uint8, device=self.flat.device)
        for index, view in enumerate(self.views):
            if index not in self.placed:
                view.zero_()
                self.had_gradient[index].zero_()
        self.sending = ReduceScatter(self.collected, self.flat.group, self.ordered)
        self.collected, self.views = None, []

    @torch.no_grad()
    def receive(self) -> None:
        """Wait for the sum. Pieces get their gradients, but for parameters that had none here."""
        if self.sending is None:
            return
        output = self.sending.flat[self.flat.own] if self.keep else None
        shard = self.sending.wait(output)  # [shard_size]
        self.sending = None
        for index, gradient in enumerate(self.flat.cut(shard)):
            if index in self.placed:
                self._give(index, gradient)
            else:
                self.late.append((index, gradient))
        self.placed = set()

    def settle(self, had_gradient: Tensor) -> None:
        """Give the others theirs, where any rank had one: `had_gradient` [parameters].

        Reading it waits for a GPU: it happens only where a gradient is missing.
        """
        for index, gradient in self.late:
            if had_gradient[index] > 0:
                self._give(index, gradient)
        self.late = []

    def _give(self, index: int, gradient: Tensor) -> None:
        piece = self.flat.pieces[index]
        if not piece.numel():
            return
        if piece.grad is None:
            piece.grad = gradient
        else:
            piece.grad += gradient
