"""One stage of a pipeline, on its rank: does what a schedule says, action by action.

Whatever the schedule, the rank goes through its list of actions. Receives are posted, sends are on
their way, and the stage stands still in one place only: before a pass whose input has not come.

Shapes in names: B batch, S sequence, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist

# The first backward that starts from a gradient needs it: loaded once here, not in every rank.
import torch.fx.experimental.symbolic_shapes
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shardlab.buckets import average_gradients

from . import deferred
from .actions import Action, Schedule
from .clock import Clock
from .mail import Mail, way_back
from .simulate import Timeline
from .stage import Form, Stage, gathered

Loss = Callable[[Tensor, Tensor], Tensor]


class Pipeline(Stage):
    """This rank's stage of a model that is cut into parts.

    parts: this stage's modules, one for each chunk: those with the numbers
    `schedule.placement[stage]`. Each takes what the one before gives; the first takes tokens.
    group: the ranks of this pipeline; rank and stage are the same number. loss(output, targets) is
    a mean over sequences. between(tokens): shape and dtype of what travels from part to part.

    replicas: the ranks that hold the same parts in other pipelines, each of which has its own share
    of the batch: gradients become averages over them, once, after the last micro-batch. All start
    from the first replica's weights. twin: a parameter that another stage holds too, and which
    stage: both get the sum of their gradients, and start from the lower stage's weights.

    record: note when each pass begins and ends, for `timeline`. back: see `mail`; by default
    `group`, or with nccl another group of the same ranks, made for the first pipeline of `group`.
    check=False takes a wrong schedule as well.

    Dropout draws from each rank's own generator: it trains as well, but is not what one process
    draws. Raises ValueError, on all ranks of the group alike, for what does not fit together.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        schedule: Schedule,
        group: dist.ProcessGroup,
        loss: Loss,
        *,
        between: Callable[[Tensor], Form] | None = None,
        replicas: dist.ProcessGroup | None = None,
        twin: tuple[nn.Parameter, int] | None = None,
        record: bool = False,
        back: dist.ProcessGroup | None = None,
        check: bool = True,
    ):
        super().__init__(parts, schedule, group, between, check)
        self.loss, self.replicas, self.twin = loss, replicas, twin
        back = back or way_back(group, self.device)
        self.mail = Mail(schedule, self.stage, group, back, self.device)
        self.clock = Clock(self.device, group) if record else None
        self.later = [deferred.defer(part) for part in self.parts] if schedule.splits else None
        self._passes = {
            "F": self._forward,
            "B": self._backward,
            "I": self._backward_input,
            "W": self._backward_weights,
        }
        self._start_equal()

    # A step

    def step(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor | None:
        """Forward and backward of the whole batch, which every rank of the pipeline is given.

        Adds the gradients of the mean loss over the batch to those that are there. Returns that
        loss on the rank with the last part, None on the others. Micro-batches differ by a sequence
        at most, and each counts by its share of the sequences.

        Raises ValueError for fewer sequences than micro-batches.
        """
        self._begin(tokens_BS, targets_BS)
        for action in self.schedule.actions[self.stage]:
            if action.kind in ("RF", "RB"):
                self.mail.post(action)
            elif action.kind in ("SF", "SB"):
                self.mail.send(action)
            else:
                self._pass(action)
        self._end()
        return self.value

    def _pass(self, action: Action) -> None:
        """F, B, I or W: wait for what it needs, compute, pass on what it made."""
        needed = self.mail.wait(action)
        with self.clock(action) if self.clock else nullcontext():
            made = self._passes[action.kind](action.microbatch, action.chunk, needed)
        self.mail.hand(action, made)

    def _forward(self, i: int, chunk: int, x: Tensor | None) -> Tensor:
        """Micro-batch i through one part, and through the loss behind the last."""
        x = self.tokens[i] if x is None else x.requires_grad_()
        y = self.parts[chunk](x)
        if self.numbers[chunk] == self.schedule.parts - 1:
            y = self.loss(y, self.targets[i]) * self.shares[i]  # its share of the mean
            self.value = y.detach() if self.value is None else self.value + y.detach()
        # Backward needs the graph that leads to y, and not y: that goes once it is sent.
        self.live[i, chunk] = x, get_gradient_edge(y) if y.requires_grad else None
        return y.detach()

    def _backward(self, i: int, chunk: int, dy: Tensor | None) -> Tensor | None:
        """The whole backward."""
        dx = self._backward_input(i, chunk, dy)
        self._backward_weights(i, chunk)
        return dx

    def _backward_input(self, i: int, chunk: int, dy: Tensor | None) -> Tensor | None:
        """From the gradient of the output (None: of the loss) to that of the input.

        Where no schedule asks for W, this is the whole backward: nothing is deferred.
        """
        x, edge = self.live.pop((i, chunk))
        if edge is not None:  # something in it can be trained
            torch.autograd.backward(edge, dy)
        if self.later is not None:
            self.undone[i, chunk] = self.later[chunk].take()
        return x.grad

    def _backward_weights(self, i: int, chunk: int, _: None = None) -> None:
        """What the input's backward left undone."""
        deferred.run(self.undone.pop((i, chunk), []))

    def _begin(self, tokens_BS: Tensor, targets_BS: Tensor) -> None:
        m, size = self.schedule.microbatches, len(tokens_BS)
        if len(targets_BS) != size:
            what = f"tokens has {size} sequences, targets {len(targets_BS)}"
            raise ValueError(f"{what}: allowed are as many of one as of the other")
        if size < m:
            what = f"allowed are {m} or more for {m} micro-batches"
            raise ValueError(f"tokens has {size} sequences: {what}")
        if not torch.is_grad_enabled():
            raise ValueError("step was called under torch.no_grad(): it computes gradients")
        self.tokens, self.targets = tokens_BS.tensor_split(m), targets_BS.tensor_split(m)
        self.shares = [len(tokens) / size for tokens in self.tokens]
        self.live: dict[tuple[int, int], tuple[Tensor, GradientEdge | None]] = {}
        self.undone: dict[tuple[int, int], list[deferred.Task]] = {}
        self.value: Tensor | None = None
        if self.twin is not None:  # of what was there before, nothing is to be added a second time
            self.before, self.twin[0].grad = self.twin[0].grad, None
        self.mail.begin([self.between(tokens) for tokens in self.tokens])
        if self.clock:
            self.clock.start()

    def _end(self) -> None:
        """After the last micro-batch: what is done once for the whole batch."""
        with torch.no_grad():
            if self.twin is not None and self.twin[0].requires_grad:
                parameter, peer = self.twin
                parameter.grad += self.mail.exchange(parameter.grad, peer)  # both add the same two
                if self.before is not None:
                    parameter.grad += self.before
            if self.replicas is not None:
                average_gradients(self.parameters(), self.replicas)
        self.mail.end()

    def timeline(self) -> Timeline:
        """The last step as it was; every rank has to call it. ValueError if it is not recorded."""
        if self.clock is None:
            raise ValueError("record=False: a timeline needs a pipeline made with record=True")
        return Timeline(self.schedule, tuple(map(tuple, gathered(self.clock.spans(), self.group))))

    @torch.no_grad()
    def _start_equal(self) -> None:
        if self.twin is not None:
            parameter, peer = self.twin
            theirs = self.mail.exchange(parameter.detach(), peer)
            if peer < self.stage:
                parameter.copy_(theirs)
        if self.replicas is not None:
            root = dist.get_global_rank(self.replicas, 0)
            for parameter in self.parameters():
                dist.broadcast(parameter.detach(), root, group=self.replicas)
