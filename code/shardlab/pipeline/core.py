"""One pipeline stage on its rank, which runs its list of actions.

In order: the computation of a stage (`Passes`); its messages (`Mail`); the stage (`Pipeline`),
whose `step` runs the actions of its schedule one after the other. `schedules` makes these lists:
GPipe, 1F1B and others. A stage waits only before a pass whose input has not arrived.

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

# The first backward that starts from a gradient imports this: once here, not in each rank.
import torch.fx.experimental.symbolic_shapes
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shardlab import ranks
from shardlab.common import gpu
from shardlab.common.arguments import drop_none
from shardlab.data_parallel.buckets import average_gradients, copy_from_rank_0
from shardlab.gpt.model import IGNORED
from shardlab.ranks import checks, p2p
from shardlab.ranks.gather import gather_objects

from . import deferred
from .parts import Form, Held
from .schedules import Action, Schedule, needed, other_end, sent
from .simulate import Clock, Timeline
from .validate import result

Loss = Callable[[Tensor, Tensor], Tensor]


class Passes:
    """The computation of a stage: forward or backward of one micro-batch in one chunk.

    last: this stage's chunk with the last part of the model, which the loss follows; None if
    another stage has that part. split: defer the weight gradients of a backward to W.
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
        """Begin a step of m micro-batches; their sizes differ by at most one."""
        self.tokens, self.targets = tokens_BS.tensor_split(m), targets_BS.tensor_split(m)
        if self.last is not None:
            counted = torch.stack([(part != IGNORED).sum() for part in self.targets])
            self.scales = counted.double() / counted.sum().clamp(min=1)
            # A mean over no targets would be nan. To ask for the count would wait for a GPU.
            self.targets = [
                part if part.is_cpu and count else part.masked_fill(count == 0, 0)
                for part, count in zip(self.targets, counted, strict=True)
            ]
        self.live: dict[tuple[int, int], tuple[Tensor, GradientEdge | None]] = {}
        self.undone: dict[tuple[int, int], list[deferred.Task]] = {}
        self.value: Tensor | None = None  # the loss, if this stage has the last part

    def end(self) -> None:
        """Release the batch."""
        self.tokens = self.targets = self.scales = ()

    def forward(self, i: int, chunk: int, x: Tensor | None) -> Tensor:
        """Run micro-batch i through a chunk, and after the last part the loss."""
        x = self.tokens[i] if x is None else x.requires_grad_()
        y = self.parts[chunk](x)
        if chunk == self.last:
            y = self.loss(y, self.targets[i])
            y = y * self.scales[i].to(y.dtype)  # weighted by its share of the targets
            self.value = y.detach() if self.value is None else self.value + y.detach()
        # Backward needs y's graph but not y, whose memory is freed once it is sent.
        self.live[i, chunk] = x, get_gradient_edge(y) if y.requires_grad else None
        return y.detach()

    def backward(self, i: int, chunk: int, dy: Tensor | None) -> Tensor | None:
        """Run the whole backward: gradients of the input and of the weights."""
        dx = self.backward_input(i, chunk, dy)
        self.backward_weights(i, chunk)
        return dx

    def backward_input(self, i: int, chunk: int, dy: Tensor | None) -> Tensor | None:
        """Return the gradient of the input, given that of the output (None: of the loss).

        Without W actions in the schedule this is the whole backward: nothing is deferred.
        """
        x, edge = self.live.pop((i, chunk))
        if edge is not None:  # something before it is trainable
            torch.autograd.backward(edge, dy)
        if self.later is not None:
            self.undone[i, chunk] = self.later[chunk].copy()
            self.later[chunk].clear()
        return x.grad

    def backward_weights(self, i: int, chunk: int, _: None = None) -> None:
        """Compute the weight gradients that `backward_input` deferred."""
        deferred.run(self.undone.pop((i, chunk), []))


# The second nccl group of each group, made once and kept: nccl groups end on all ranks
# together, but each rank frees its pipelines at its own time.
_ways_back: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def way_back(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Return the group for messages to lower ranks: with nccl, a copy of `group`.

    All ranks of `group` call this together.
    """
    if not gpu.is_gpu_backend(p2p.get_backend(device, group)):
        return group
    if group not in _ways_back:
        members = dist.get_process_group_ranks(group)
        _ways_back[group] = dist.new_group(
            members, timeout=checks.get_timeout(group), use_local_synchronization=True
        )
    return _ways_back[group]


State = Enum("State", "POSTED RECEIVED MADE SENT")


class Message(NamedTuple):
    """A tensor that this stage receives (POSTED → RECEIVED) or sends (MADE → SENT)."""

    state: State
    tensor: Tensor | None = None
    transfer: ranks.P2PWork | None = None  # while POSTED or SENT


class Mail:
    """The messages of a stage: receives are posted early, and sends are not waited for.

    One table holds all messages by action. Messages have no names: between two ranks they
    arrive in the order of the sends, and receives are posted in that order (`with_messages`).
    In one group, nccl runs the messages of two ranks one after another, whatever their
    direction, so an early receive would block a send. Hence one group per direction: `group`
    for messages to higher ranks, `back` for others.
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
        """Begin a step; `forms` has shape and dtype of each micro-batch's messages."""
        self._forms = forms
        self._messages: dict[Action, Message] = {}

    def post(self, action: Action) -> None:
        """Start to receive (RF, RB)."""
        peer, _ = other_end(self.schedule, self.stage, action)
        shape, dtype = self._forms[action.microbatch]
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        transfer = ranks.irecv(tensor, peer, self._way(peer, self.stage))
        self._messages[action] = Message(State.POSTED, tensor, transfer)

    def wait(self, action: Action) -> Tensor | None:
        """Return a pass's input (F, B, I) once it is there; None if it needs none."""
        receive = needed(self.schedule, self.stage, action)
        message = self._messages.pop(receive or result(action), None)
        if message is None:
            if receive is None:
                return None
            raise RuntimeError(f"stage {self.stage}: {action} needs {receive}, which is not posted")
        if message.state is State.POSTED:
            message.transfer.wait()
            for send in self._over[receive]:
                self._messages.pop(send).transfer.wait()  # returns at once: it has arrived
        return message.tensor

    def hand(self, action: Action, tensor: Tensor | None) -> None:
        """Keep a pass's output (F, B, I) for the send or the chunk that needs it."""
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
        """Start to send (SF, SB)."""
        peer, _ = other_end(self.schedule, self.stage, action)
        transfer = ranks.isend(self._messages[action].tensor, peer, self._way(self.stage, peer))
        self._messages[action] = Message(State.SENT, transfer=transfer)

    def end(self) -> None:
        """Wait for the sends that have not finished."""
        for message in self._messages.values():
            if message.state is State.SENT:
                message.transfer.wait()
        self._messages.clear()

    def exchange(self, tensor: Tensor, peer: int) -> Tensor:
        """Send `tensor` to stage `peer` and receive a tensor of the same shape from it.

        The lower stage sends first: with nccl, both ends must enter one group first and then
        the other. (`ranks.exchange` needs all ranks of a group; these are two of them.)
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
        """Send one number along each direction in use, in the same order on all ranks.

        The first message between two ranks sets up their connection, and with nccl both ranks
        wait for it: a receive posted long before its send would block there.
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
    """Map each message that `stage` receives to its own sends that must have arrived.

    The sender waited for these before it sent the message; the schedule alone says so. (gloo
    cannot be polled without waiting, and sent tensors should be freed early.)
    """
    found: dict[Action, list[Action]] = {}
    for peer, actions in enumerate(schedule.actions):
        waited: list[Action] = []  # arrivals since the peer's last message to `stage`
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

    parts: this stage's modules, one per chunk: the model's parts with the numbers
    `schedule.placement[stage]`. Each part takes the output of the part before; the first takes
    tokens. group: the ranks of this pipeline; stage s is rank s. loss(output, targets): a mean
    over targets. between(tokens): shape and dtype of the tensors sent from part to part.

    replicas: the ranks that hold the same parts in other pipelines, each with its own share of
    the batch. Gradients are averaged over them once, after the last micro-batch. (A mean of
    means: `mesh.Parallel` weighs unequal shares.) All start from the first replica's weights.
    twin: a parameter that another stage holds too, and that stage: both get the sum of their
    gradients, and start from the lower stage's weights.

    record: measure the begin and end of each pass, for `timeline`. back: see `Mail`; by default
    `group`, or with nccl a second group of the same ranks, made once per `group`. check=False
    accepts an invalid schedule.

    Dropout draws from each rank's own generator, so its masks are not those of one process.
    Raises ValueError on all ranks of the group if parts, schedule and group do not match.
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
        for name, other in drop_none(replicas=replicas, back=back).items():
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
        """Run forward and backward of the whole batch, which every stage is given.

        Adds the gradients of the mean loss over the batch to the gradients that are there.
        Returns that loss on the rank with the last part, None on the others. Micro-batch sizes
        differ by one sequence at most; each is weighted by its share of the targets that are
        not IGNORED.

        Raises ValueError for fewer sequences than micro-batches.
        """
        self._begin(tokens_BS, targets_BS)
        for action in self.schedule.actions[self.stage]:
            if action.kind in ("RF", "RB"):
                self.mail.post(action)
            elif action.kind in ("SF", "SB"):
                self.mail.send(action)
            else:
                needs = self.mail.wait(action)  # the only wait of a step
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
        if self.twin is not None:  # older gradients must not be exchanged and added a second time
            self.before, self.twin[0].grad = self.twin[0].grad, None
        if self.clock:
            self.clock.start()

    @torch.no_grad()
    def _end(self) -> None:
        """Finish the batch: exchange the twin's gradients, average, release."""
        if self.twin is not None and self.twin[0].requires_grad:
            parameter, peer = self.twin
            parameter.grad += self.mail.exchange(parameter.grad, peer)  # same sum on both
            if self.before is not None:
                parameter.grad += self.before
        if self.replicas is not None:
            average_gradients(self.parameters(), self.replicas)
        self.passes.end()
        self.mail.end()

    def timeline(self) -> Timeline:
        """Return the last step's timeline (record=True); all ranks call this."""
        return Timeline(
            self.schedule, tuple(map(tuple, gather_objects(self.clock.spans(), self.group)))
        )

    @torch.no_grad()
    def _start_equal(self) -> None:
        if self.twin is not None:
            parameter, peer = self.twin
            theirs = self.mail.exchange(parameter.detach(), peer)
            if peer < self.stage:
                parameter.copy_(theirs)
        if self.replicas is not None:
            copy_from_rank_0(self.parameters(), self.replicas)
