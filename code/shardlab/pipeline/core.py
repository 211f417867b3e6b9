"""One pipeline stage on its rank, which runs its list of actions.

In order: the computation of a stage (`StagePasses`); its messages (`Mailbox`); the stage
(`Pipeline`), whose `step` runs the actions of its schedule one after the other. `schedules` makes
these lists: GPipe, 1F1B and others. A stage waits only before a pass whose input has not arrived.

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
from .parts import LocalParts, TensorSpec
from .schedules import Action, Schedule, find_peer, find_receive, find_send
from .simulate import Clock, Timeline
from .validate import result_key

Loss = Callable[[Tensor, Tensor], Tensor]


class StagePasses:
    """The computation of a stage: forward or backward of one micro-batch in one chunk.

    last_chunk: this stage's chunk with the last part of the model, which the loss follows; None if
    another stage has that part. split: defer the weight gradients of a backward to W.
    """

    def __init__(self, parts: Sequence[nn.Module], loss: Loss, last_chunk: int | None, split: bool):
        self.parts, self.loss, self.last_chunk = parts, loss, last_chunk
        self.new_tasks = [deferred.defer_weight_gradients(x) for x in parts] if split else None
        self.run_by_kind = {
            "F": self.forward,
            "B": self.backward,
            "I": self.backward_input,
            "W": self.backward_weights,
        }

    def begin_step(self, tokens_BS: Tensor, targets_BS: Tensor, m: int) -> None:
        """Begin a step of m micro-batches; their sizes differ by at most one."""
        self.tokens, self.targets = tokens_BS.tensor_split(m), targets_BS.tensor_split(m)
        if self.last_chunk is not None:
            counts = torch.stack([(part != IGNORED).sum() for part in self.targets])
            self.scales = counts.double() / counts.sum().clamp(min=1)
            # A mean over no targets would be nan. Reading the count would wait for a GPU.
            self.targets = [
                part if part.is_cpu and count else part.masked_fill(count == 0, 0)
                for part, count in zip(self.targets, counts, strict=True)
            ]
        self.in_flight: dict[tuple[int, int], tuple[Tensor, GradientEdge | None]] = {}
        self.pending_tasks: dict[tuple[int, int], list[deferred.Task]] = {}
        self.loss_sum: Tensor | None = None  # None on stages without the last part

    def end_step(self) -> None:
        """Release the batch."""
        self.tokens = self.targets = self.scales = ()

    def forward(self, i: int, chunk: int, x: Tensor | None) -> Tensor:
        """Run micro-batch i through a chunk, and after the last part the loss."""
        x = self.tokens[i] if x is None else x.requires_grad_()
        y = self.parts[chunk](x)
        if chunk == self.last_chunk:
            y = self.loss(y, self.targets[i])
            y = y * self.scales[i].to(y.dtype)  # weighted by its share of the targets
            self.loss_sum = y.detach() + (0 if self.loss_sum is None else self.loss_sum)
        # Backward needs y's graph but not y, whose memory is freed once it is sent.
        self.in_flight[i, chunk] = x, get_gradient_edge(y) if y.requires_grad else None
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
        x, edge = self.in_flight.pop((i, chunk))
        if edge is not None:  # x or a parameter of this chunk needs a gradient
            torch.autograd.backward(edge, dy)
        if self.new_tasks is not None:
            self.pending_tasks[i, chunk] = self.new_tasks[chunk].copy()
            self.new_tasks[chunk].clear()
        return x.grad

    def backward_weights(self, i: int, chunk: int, _: None = None) -> None:
        """Compute the weight gradients that `backward_input` deferred."""
        deferred.run_tasks(self.pending_tasks.pop((i, chunk), []))


# The second nccl group of each group, made once and kept: nccl groups end on all ranks
# together, but each rank frees its pipelines at its own time.
_reverse_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def get_reverse_group(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Return the group for messages to lower ranks: with nccl, a copy of `group`.

    All ranks of `group` call this together.
    """
    if not gpu.is_gpu_backend(p2p.get_backend(device, group)):
        return group
    if group not in _reverse_groups:
        members = dist.get_process_group_ranks(group)
        _reverse_groups[group] = dist.new_group(
            members, timeout=checks.get_timeout(group), use_local_synchronization=True
        )
    return _reverse_groups[group]


State = Enum("State", "POSTED RECEIVED MADE SENT")


class Message(NamedTuple):
    """A tensor that this stage receives (POSTED → RECEIVED) or sends (MADE → SENT)."""

    state: State
    tensor: Tensor | None = None
    transfer: ranks.P2PWork | None = None  # while POSTED or SENT


class Mailbox:
    """The messages of a stage: receives are posted early, and sends are not waited for.

    One table holds all messages by action. Messages have no tags: between two ranks they
    arrive in the order of the sends, and receives are posted in that order (`add_messages`).
    In one group, nccl runs the messages of two ranks one after another, whatever their
    direction, so an early receive would block a send. Hence one group per direction: `group`
    for messages to higher ranks, `reverse_group` for others.
    """

    def __init__(
        self,
        schedule: Schedule,
        stage: int,
        group: dist.ProcessGroup,
        reverse_group: dist.ProcessGroup,
        device: torch.device,
    ):
        self.schedule, self.stage, self.device = schedule, stage, device
        self.group, self.reverse_group = group, reverse_group
        self._arrived_sends = find_arrived_sends(schedule, stage)
        self._connect_peers()

    def begin_step(self, specs: Sequence[TensorSpec]) -> None:
        """Begin a step; `specs` has shape and dtype of each micro-batch's messages."""
        self._specs = specs
        self._messages: dict[Action, Message] = {}

    def post_receive(self, action: Action) -> None:
        """Start to receive (RF, RB)."""
        peer, _ = find_peer(self.schedule, self.stage, action)
        shape, dtype = self._specs[action.microbatch]
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        transfer = ranks.irecv(tensor, peer, self._select_group(peer, self.stage))
        self._messages[action] = Message(State.POSTED, tensor, transfer)

    def wait_for_input(self, action: Action) -> Tensor | None:
        """Return a pass's input (F, B, I) once it has arrived; None if the pass needs none."""
        receive = find_receive(self.schedule, self.stage, action)
        message = self._messages.pop(receive or result_key(action), None)
        if message is None:
            if receive is None:
                return None
            raise RuntimeError(f"stage {self.stage}: {action} needs {receive}, which is not posted")
        if message.state is State.POSTED:
            message.transfer.wait()
            for send in self._arrived_sends[receive]:
                self._messages.pop(send).transfer.wait()  # returns at once: it has arrived
        return message.tensor

    def store_output(self, action: Action, tensor: Tensor | None) -> None:
        """Keep a pass's output (F, B, I) for the send or the chunk that needs it."""
        if action.kind == "W" or tensor is None:
            return
        if send := find_send(self.schedule, self.stage, action):
            if (tensor.shape, tensor.dtype) != (spec := self._specs[action.microbatch]):
                made, expected = (f"{list(s)} {d}" for s, d in ((tensor.shape, tensor.dtype), spec))
                what = f"{action} returned {made}: must be {expected}, as `message_spec` says"
                raise ValueError(f"stage {self.stage}: {what}")
            self._messages[send] = Message(State.MADE, tensor)
            return
        part = self.schedule.placement[self.stage][action.chunk] + (1 if action.kind == "F" else -1)
        if 0 <= part < self.schedule.parts:
            _, chunk = self.schedule.find_owner(part)
            key = result_key(action)._replace(chunk=chunk)
            self._messages[key] = Message(State.RECEIVED, tensor)

    def start_send(self, action: Action) -> None:
        """Start to send (SF, SB)."""
        peer, _ = find_peer(self.schedule, self.stage, action)
        group = self._select_group(self.stage, peer)
        transfer = ranks.isend(self._messages[action].tensor, peer, group)
        self._messages[action] = Message(State.SENT, transfer=transfer)

    def end_step(self) -> None:
        """Wait for the sends that have not finished."""
        for message in self._messages.values():
            if message.state is State.SENT:
                message.transfer.wait()
        self._messages.clear()

    def exchange_with(self, tensor: Tensor, peer: int) -> Tensor:
        """Send `tensor` to stage `peer` and receive a tensor of the same shape from it.

        The lower stage sends first: with nccl, both ends must enter one group first and then
        the other. (`ranks.exchange` needs all ranks of a group; these are two of them.)
        """
        theirs = torch.empty_like(tensor)
        out, back = self._select_group(self.stage, peer), self._select_group(peer, self.stage)
        calls = [(ranks.isend, tensor, out), (ranks.irecv, theirs, back)]
        if peer < self.stage:
            calls.reverse()
        for message in [call(what, peer, group) for call, what, group in calls]:
            message.wait()
        return theirs

    def _select_group(self, source: int, target: int) -> dist.ProcessGroup:
        return self.group if source < target else self.reverse_group

    def _connect_peers(self) -> None:
        """Send one number along each direction in use, in the same order on all ranks.

        The first message between two ranks sets up their connection, and with nccl both ranks
        wait for it: a receive posted long before its send would block there.
        """
        directions = {
            (stage, find_peer(self.schedule, stage, action)[0])
            for stage, actions in enumerate(self.schedule.actions)
            for action in actions
            if action.kind in ("SF", "SB")
        }
        number = torch.zeros(1, device=self.device)
        for source, target in sorted(directions):
            group = self._select_group(source, target)
            if self.stage == source:
                ranks.isend(number, target, group).wait()
            elif self.stage == target:
                ranks.irecv(number, source, group).wait()


def find_arrived_sends(schedule: Schedule, stage: int) -> dict[Action, list[Action]]:
    """Map each message that `stage` receives to its own sends that must have arrived.

    The sender waited for these before it sent the message; the schedule alone says so. (gloo
    cannot be polled without waiting, and sent tensors should be freed early.)
    """
    found: dict[Action, list[Action]] = {}
    for peer, actions in enumerate(schedule.actions):
        waited: list[Action] = []  # arrivals since the peer's last message to `stage`
        for action in actions:
            if receive := find_receive(schedule, peer, action):
                source, send = find_peer(schedule, peer, receive)
                waited += [send] if source == stage else []
            elif action.kind in ("SF", "SB"):
                target, receive = find_peer(schedule, peer, action)
                if target == stage:
                    found[receive], waited = waited, []
    return found


class Pipeline(LocalParts):
    """This rank's stage of a model that is cut into parts.

    parts: this stage's modules, one per chunk: the model's parts with the numbers
    `schedule.placement[stage]`. Each part takes the output of the part before; the first takes
    tokens. group: the ranks of this pipeline; stage s is rank s. loss(output, targets): a mean
    over targets. message_spec(tokens): shape and dtype of the tensors sent from part to part.

    replicas: the ranks that hold the same parts in other pipelines, each with its own share of
    the batch. Gradients are averaged over them once, after the last micro-batch. (A mean of
    means: `mesh.Parallel` weighs unequal shares.) All start from the first replica's weights.
    tied_parameter: a parameter that another stage holds too, and that stage: both get the sum of
    their gradients, and start from the lower stage's weights.

    record: measure the begin and end of each pass, for `gather_timeline`. reverse_group: see
    `Mailbox`; by default `group`, or with nccl a second group of the same ranks, made once per
    `group`. check=False accepts an invalid schedule.

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
        message_spec: Callable[[Tensor], TensorSpec] | None = None,
        replicas: dist.ProcessGroup | None = None,
        tied_parameter: tuple[nn.Parameter, int] | None = None,
        record: bool = False,
        reverse_group: dist.ProcessGroup | None = None,
        check: bool = True,
    ):
        for name, other in drop_none(replicas=replicas, reverse_group=reverse_group).items():
            ranks.check_group(other, name)
        same = {"record": record, "replicas": replicas and dist.get_world_size(replicas)}
        super().__init__(parts, schedule, group, message_spec, check, **same)
        self.replicas, self.tied_parameter = replicas, tied_parameter
        last, chunk = schedule.find_owner(schedule.parts - 1)
        last_chunk = chunk if last == self.stage else None
        self.passes = StagePasses(self.parts, loss, last_chunk, schedule.has_split_backward)
        reverse_group = reverse_group or get_reverse_group(group, self.device)
        self.mailbox = Mailbox(schedule, self.stage, group, reverse_group, self.device)
        self.clock = Clock(self.device, group) if record else None
        self._synchronize_weights()

    def step(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor | None:
        """Run forward and backward of the whole batch, which every stage is given.

        Adds the gradients of the mean loss over the batch to the gradients that are there.
        Returns that loss on the rank with the last part, None on the others. Micro-batch sizes
        differ by one sequence at most; each is weighted by its share of the targets that are
        not IGNORED.

        Raises ValueError for fewer sequences than micro-batches.
        """
        self._begin_step(tokens_BS, targets_BS)
        for action in self.schedule.actions[self.stage]:
            if action.kind in ("RF", "RB"):
                self.mailbox.post_receive(action)
            elif action.kind in ("SF", "SB"):
                self.mailbox.start_send(action)
            else:
                tensor = self.mailbox.wait_for_input(action)  # the only wait of a step
                run = self.passes.run_by_kind[action.kind]
                with self.clock(action) if self.clock else nullcontext():
                    output = run(action.microbatch, action.chunk, tensor)
                self.mailbox.store_output(action, output)
        self._end_step()
        return self.passes.loss_sum

    def _begin_step(self, tokens_BS: Tensor, targets_BS: Tensor) -> None:
        m, size = self.schedule.microbatches, len(tokens_BS)
        if size < m:
            what = f"must have at least one for each of {m} micro-batches"
            raise ValueError(f"tokens has {size} sequences: {what}")
        self.passes.begin_step(tokens_BS, targets_BS, m)
        self.mailbox.begin_step([self.message_spec(tokens) for tokens in self.passes.tokens])
        if self.tied_parameter is not None:  # earlier gradients must not be exchanged again
            tied, _ = self.tied_parameter
            self.earlier_gradient, tied.grad = tied.grad, None
        if self.clock:
            self.clock.restart()

    @torch.no_grad()
    def _end_step(self) -> None:
        if self.tied_parameter is not None and self.tied_parameter[0].requires_grad:
            parameter, peer = self.tied_parameter
            parameter.grad += self.mailbox.exchange_with(parameter.grad, peer)  # same sum on both
            if self.earlier_gradient is not None:
                parameter.grad += self.earlier_gradient
        if self.replicas is not None:
            average_gradients(self.parameters(), self.replicas)
        self.passes.end_step()
        self.mailbox.end_step()

    def gather_timeline(self) -> Timeline:
        """Return the last step's timeline (record=True); all ranks call this."""
        spans = gather_objects(self.clock.read_spans(), self.group)
        return Timeline(self.schedule, tuple(map(tuple, spans)))

    @torch.no_grad()
    def _synchronize_weights(self) -> None:
        if self.tied_parameter is not None:
            parameter, peer = self.tied_parameter
            theirs = self.mailbox.exchange_with(parameter.detach(), peer)
            if peer < self.stage:
                parameter.copy_(theirs)
        if self.replicas is not None:
            copy_from_rank_0(self.parameters(), self.replicas)
