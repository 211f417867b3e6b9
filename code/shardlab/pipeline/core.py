"""One stage of a pipeline, on its rank: it goes through its list of actions.

In order: what a stage computes (`Passes`); what comes to it and leaves it (`Mail`); the stage
(`Pipeline`), whose `step` follows its schedule, action by action. The schedule is a list that
`schedules` made: GPipe, 1F1B or another. A stage waits only before a pass whose input has not come.

Shapes in names: B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from enum import Enum
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

# The first backward that starts from a gradient needs it: loaded once here, not in every rank.
import torch.fx.experimental.symbolic_shapes
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shardlab import ranks
from shardlab.common import gpu
from shardlab.common.arguments import given
from shardlab.data_parallel.buckets import average_gradients, copy_from_rank_0
from shardlab.gpt.model import IGNORED
from shardlab.ranks import agree, p2p
from shardlab.ranks.gather import gathered

from . import deferred
from .parts import Form, Held
from .schedules import Action, Schedule, needed, other_end, sent
from .simulate import Clock, Timeline
from .validate import result

Loss = Callable[[Tensor, Tensor], Tensor]


class Passes:
    """What a stage computes: one micro-batch at a time through one of its parts, or back.

    last: the chunk that holds the last part of the model, behind which comes the loss; None if it
    is on another stage. split: leave the weights' gradients of a backward for later.
    """

    def __init__(self, parts: Sequence[nn.Module], loss: Loss, last: int | None, split: bool):
        self.parts, self.loss, self.last = parts, loss, last
        self.later = [deferred.defer(part) for part in parts] if split else None
        self.kinds = {
            "F": self.forward,
            "B": self.backward,
            "I": self.backward_input,
            "W": self.backward_weights,
        }

    def begin(self, tokens_BS: Tensor, targets_BS: Tensor, m: int) -> None:
        """Begin a step of m micro-batches, which differ by a sequence at most."""
        self.tokens, self.targets = tokens_BS.tensor_split(m), targets_BS.tensor_split(m)
        if self.last is not None:
            counted = torch.stack([(part != IGNORED).sum() for part in self.targets])
            self.scales = counted.double() / counted.sum().clamp(min=1)
            # A mean of nothing would be nan. Asking for it would wait for a GPU.
            self.targets = [
                part if part.is_cpu and count else part.masked_fill(count == 0, 0)
                for part, count in zip(self.targets, counted, strict=True)
            ]
        self.live: dict[tuple[int, int], tuple[Tensor, GradientEdge | None]] = {}
        self.undone: dict[tuple[int, int], list[deferred.Task]] = {}
        self.value: Tensor | None = None  # the loss, where the last part is

    def end(self) -> None:
        """Let go of the batch."""
        self.tokens = self.targets = self.scales = ()

    def forward(self, i: int, chunk: int, x: Tensor | None) -> Tensor:
        """Micro-batch i through one part, and through the loss behind the last."""
        x = self.tokens[i] if x is None else x.requires_grad_()
        y = self.parts[chunk](x)
        if chunk == self.last:
            y = self.loss(y, self.targets[i])
            y = y * self.scales[i].to(y.dtype)  # its part of the mean
            self.value = y.detach() if self.value is None else self.value + y.detach()
        # Backward needs the graph that leads to y, and not y: that goes once it is sent.
        self.live[i, chunk] = x, get_gradient_edge(y) if y.requires_grad else None
        return y.detach()

    def backward(self, i: int, chunk: int, dy: Tensor | None) -> Tensor | None:
        """The whole backward: of the input and of the weights."""
        dx = self.backward_input(i, chunk, dy)
        self.backward_weights(i, chunk)
        return dx

    def backward_input(self, i: int, chunk: int, dy: Tensor | None) -> Tensor | None:
        """From the gradient of the output (None: of the loss) to that of the input.

        Where no schedule asks for W, this is the whole backward: nothing is deferred.
        """
        x, edge = self.live.pop((i, chunk))
        if edge is not None:  # something in it can be trained
            torch.autograd.backward(edge, dy)
        if self.later is not None:
            self.undone[i, chunk] = self.later[chunk].copy()
            self.later[chunk].clear()
        return x.grad

    def backward_weights(self, i: int, chunk: int, _: None = None) -> None:
        """What the input's backward left undone."""
        deferred.run(self.undone.pop((i, chunk), []))


# With nccl, the second group of each group, made once and never let go: nccl's groups end on all
# ranks together, and a pipeline ends on each rank when nobody holds it any more.
_ways_back: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def way_back(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """The group for messages to lower ranks: with nccl another one of the same ranks.

    All ranks of `group` call it together.
    """
    if not gpu.carries(p2p.carrier(device, group)):
        return group
    if group not in _ways_back:
        members = dist.get_process_group_ranks(group)
        _ways_back[group] = dist.new_group(
            members, timeout=agree.time_limit(group), use_local_synchronization=True
        )
    return _ways_back[group]


State = Enum("State", "POSTED RECEIVED MADE SENT")


class Message(NamedTuple):
    """A tensor that comes to this stage (POSTED → RECEIVED) or leaves it (MADE → SENT)."""

    state: State
    tensor: Tensor | None = None
    transfer: ranks.Message | None = None  # while it is POSTED or SENT


class Mail:
    """Receives are posted, and waited for by whoever needs them; sends go and are not waited for.

    One table holds all messages, by the action that they belong to. A message carries no name:
    between two ranks, in one direction, messages come in the order in which they were sent, and
    receives are posted in that order too (`with_messages`). nccl moves the messages of two ranks in
    one group one after another, whatever their direction: a receive that was posted early would
    hold up a send. So there is a group for each direction: `group` for messages to higher ranks,
    `back` for others.
    """

    def __init__(
        self,
        schedule: Schedule,
        stage: int,
        group: dist.ProcessGroup,
        back: dist.ProcessGroup,
        device: torch.device,
    ):
        self.schedule, self.stage, self.device = schedule, stage, device
        self.group, self.back = group, back
        self._over = come(schedule, stage)
        self._connect()

    def begin(self, forms: Sequence[Form]) -> None:
        """Begin a step whose messages have these forms, one for each micro-batch."""
        self._forms = forms
        self._messages: dict[Action, Message] = {}

    def post(self, action: Action) -> None:
        """RF, RB: begin to receive."""
        peer, _ = other_end(self.schedule, self.stage, action)
        shape, dtype = self._forms[action.microbatch]
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        transfer = ranks.irecv(tensor, peer, self._way(peer, self.stage))
        self._messages[action] = Message(State.POSTED, tensor, transfer)

    def wait(self, action: Action) -> Tensor | None:
        """F, B, I: what it needs, as soon as it is there. None for a W, and at the model's ends."""
        receive = needed(self.schedule, self.stage, action)
        message = self._messages.pop(receive or result(action), None)
        if message is None:
            if receive is None:
                return None
            raise RuntimeError(f"stage {self.stage}: {action} needs {receive}, which is not posted")
        if message.state is State.POSTED:
            message.transfer.wait()
            for send in self._over[receive]:
                self._messages.pop(send).transfer.wait()  # at once: it has come
        return message.tensor

    def hand(self, action: Action, tensor: Tensor | None) -> None:
        """F, B, I: take what it made, for the send that follows or for a part on this stage."""
        if action.kind == "W" or tensor is None:
            return
        if send := sent(self.schedule, self.stage, action):
            if (tensor.shape, tensor.dtype) != (form := self._forms[action.microbatch]):
                made = f"{list(tensor.shape)} {tensor.dtype}"
                wanted = f"{list(form[0])} {form[1]} travels from part to part"
                what = f"{action} made {made}; `between` says that {wanted}"
                raise ValueError(f"stage {self.stage}: {what}")
            self._messages[send] = Message(State.MADE, tensor)
            return
        part = self.schedule.placement[self.stage][action.chunk] + (1 if action.kind == "F" else -1)
        if 0 <= part < self.schedule.parts:
            _, chunk = self.schedule.owner(part)
            self._messages[result(action)._replace(chunk=chunk)] = Message(State.RECEIVED, tensor)

    def send(self, action: Action) -> None:
        """SF, SB: begin to send."""
        peer, _ = other_end(self.schedule, self.stage, action)
        transfer = ranks.isend(self._messages[action].tensor, peer, self._way(self.stage, peer))
        self._messages[action] = Message(State.SENT, transfer=transfer)

    def end(self) -> None:
        """Wait for what has not left yet."""
        for message in self._messages.values():
            if message.state is State.SENT:
                message.transfer.wait()
        self._messages.clear()

    def exchange(self, tensor: Tensor, peer: int) -> Tensor:
        """Send `tensor` to stage `peer` and receive the like of it from there.

        The lower stage sends first: with nccl, both ends have to meet in one group and then in the
        other. (`ranks.exchange` is for all ranks of a group, these are two of them.)
        """
        theirs = torch.empty_like(tensor)
        out, back = self._way(self.stage, peer), self._way(peer, self.stage)
        calls = [(ranks.isend, tensor, out), (ranks.irecv, theirs, back)]
        if peer < self.stage:
            calls.reverse()
        for message in [call(what, peer, group) for call, what, group in calls]:
            message.wait()
        return theirs

    def _way(self, source: int, target: int) -> dist.ProcessGroup:
        return self.group if source < target else self.back

    def _connect(self) -> None:
        """One number along each way, in one order for all ranks.

        The first message between two ranks builds their connection, and with nccl both wait for it:
        a receive that is posted long before its send would stand there.
        """
        ways = {
            (stage, other_end(self.schedule, stage, action)[0])
            for stage, actions in enumerate(self.schedule.actions)
            for action in actions
            if action.kind in ("SF", "SB")
        }
        number = torch.zeros(1, device=self.device)
        for source, target in sorted(ways):
            if self.stage == source:
                ranks.isend(number, target, self._way(source, target)).wait()
            elif self.stage == target:
                ranks.irecv(number, source, self._way(source, target)).wait()


def come(schedule: Schedule, stage: int) -> dict[Action, list[Action]]:
    """For each message that `stage` receives, those of its own that have come when it is here.

    Its sender had waited for them before it sent it: this follows from the schedule alone. (gloo
    has no other way to ask without waiting, and what was sent should be let go early.)
    """
    found: dict[Action, list[Action]] = {}
    for peer, actions in enumerate(schedule.actions):
        waited: list[Action] = []  # since the peer's last message to `stage`
        for action in actions:
            if receive := needed(schedule, peer, action):
                source, send = other_end(schedule, peer, receive)
                waited += [send] if source == stage else []
            elif action.kind in ("SF", "SB"):
                target, receive = other_end(schedule, peer, action)
                if target == stage:
                    found[receive], waited = waited, []
    return found


class Pipeline(Held):
    """This rank's stage of a model that is cut into parts.

    parts: this stage's modules, one for each chunk: those with the numbers
    `schedule.placement[stage]`. Each takes what the one before gives; the first takes tokens.
    group: the ranks of this pipeline; rank and stage are the same number. loss(output, targets) is
    a mean over targets. between(tokens): shape and dtype of what travels from part to part.

    replicas: the ranks that hold the same parts in other pipelines, each of which has its own share
    of the batch: gradients become averages over them, once, after the last micro-batch. (A mean of
    means: `mesh.Parallel` weighs unequal shares.) All start from the first replica's weights. twin:
    a parameter that another stage holds too, and which stage: both get the sum of their gradients,
    and start from the lower stage's weights.

    record: note when each pass begins and ends, for `timeline`. back: see `Mail`; by default
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
        for name, other in given(replicas=replicas, back=back).items():
            ranks.check_group(other, name)
        copies = None if replicas is None else dist.get_world_size(replicas)
        super().__init__(parts, schedule, group, between, check, record=record, replicas=copies)
        self.replicas, self.twin = replicas, twin
        last, chunk = schedule.owner(schedule.parts - 1)
        last_chunk = chunk if last == self.stage else None
        self.passes = Passes(self.parts, loss, last_chunk, schedule.splits)
        back = back or way_back(group, self.device)
        self.mail = Mail(schedule, self.stage, group, back, self.device)
        self.clock = Clock(self.device, group) if record else None
        self._start_equal()

    def step(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor | None:
        """Forward and backward of the whole batch, which every rank of the pipeline is given.

        Adds the gradients of the mean loss over the batch to those that are there. Returns that
        loss on the rank with the last part, None on the others. Micro-batches differ by a sequence
        at most, and each counts by its share of the targets that are not IGNORED.

        Raises ValueError for fewer sequences than micro-batches.
        """
        self._begin(tokens_BS, targets_BS)
        for action in self.schedule.actions[self.stage]:
            if action.kind in ("RF", "RB"):
                self.mail.post(action)
            elif action.kind in ("SF", "SB"):
                self.mail.send(action)
            else:
                needs = self.mail.wait(action)  # the one place where a stage stands still
                with self.clock(action) if self.clock else nullcontext():
                    made = self.passes.kinds[action.kind](action.microbatch, action.chunk, needs)
                self.mail.hand(action, made)
        self._end()
        return self.passes.value

    def _begin(self, tokens_BS: Tensor, targets_BS: Tensor) -> None:
        m, size = self.schedule.microbatches, len(tokens_BS)
        if size < m:
            what = f"allowed are {m} or more for {m} micro-batches"
            raise ValueError(f"tokens has {size} sequences: {what}")
        self.passes.begin(tokens_BS, targets_BS, m)
        self.mail.begin([self.between(tokens) for tokens in self.passes.tokens])
        if self.twin is not None:  # of what was there before, nothing is to be added a second time
            self.before, self.twin[0].grad = self.twin[0].grad, None
        if self.clock:
            self.clock.start()

    @torch.no_grad()
    def _end(self) -> None:
        """After the last micro-batch: what is done once for the whole batch."""
        if self.twin is not None and self.twin[0].requires_grad:
            parameter, peer = self.twin
            parameter.grad += self.mail.exchange(parameter.grad, peer)  # both add the same two
            if self.before is not None:
                parameter.grad += self.before
        if self.replicas is not None:
            average_gradients(self.parameters(), self.replicas)
        self.passes.end()
        self.mail.end()

    def timeline(self) -> Timeline:
        """The last step as it was, if the pipeline has record=True; every rank has to call it."""
        return Timeline(self.schedule, tuple(map(tuple, gathered(self.clock.spans(), self.group))))

    @torch.no_grad()
    def _start_equal(self) -> None:
        if self.twin is not None:
            parameter, peer = self.twin
            theirs = self.mail.exchange(parameter.detach(), peer)
            if peer < self.stage:
                parameter.copy_(theirs)
        if self.replicas is not None:
            copy_from_rank_0(self.parameters(), self.replicas)
