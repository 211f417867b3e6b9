"""What comes to a stage and what leaves it: tensors, by the action of the schedule they belong to.

A message carries no name, so only its place in the row says which one it is: between two ranks, in
one direction, messages come in the order in which they were sent, and receives have to be posted in
that order too. `messages` has put them so. nccl moves the messages of two ranks in one group one
after another, whatever their direction: a receive that was posted early would hold up a send. So
there is a group for each direction: `group` for messages to higher ranks, `back` for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab import ranks
from shardlab.ranks import agree, p2p

from .actions import Action, Schedule
from .messages import needed, other_end, sent
from .stage import Form

# The second group of each group, made once and never let go: nccl's groups end on all ranks
# together, and a pipeline ends on each rank when nobody holds it any more.
_ways_back: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def way_back(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """The group for messages to lower ranks: with nccl another one of the same ranks.

    All ranks of `group` call it together.
    """
    if p2p.carrier(device, group) != "nccl":
        return group
    if group not in _ways_back:
        members = dist.get_process_group_ranks(group)
        _ways_back[group] = dist.new_group(
            members, timeout=agree.time_limit(group), use_local_synchronization=True
        )
    return _ways_back[group]


class Mail:
    """Receives are posted, and waited for by whoever needs them; sends go and are not waited for.

    What was sent is let go once it is known to have come: with the first message from the other
    side that was made after it came. (gloo has no other way to ask without waiting.)
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
        self.begin([])

    def begin(self, forms: Sequence[Form]) -> None:
        """Begin a step whose messages have these forms, one for each micro-batch."""
        self._forms = forms
        self._coming: dict[Action, tuple[Tensor, ranks.Message]] = {}
        self._here: dict[Action, Tensor] = {}  # for the next part, which is on this stage
        self._made: dict[Action, Tensor] = {}  # about to be sent
        self._leaving: dict[Action, ranks.Message] = {}

    def post(self, action: Action) -> None:
        """RF, RB: begin to receive."""
        peer, _ = other_end(self.schedule, self.stage, action)
        shape, dtype = self._forms[action.microbatch]
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        self._coming[action] = tensor, ranks.irecv(tensor, peer, self._from(peer))

    def wait(self, action: Action) -> Tensor | None:
        """F, B, I: what it needs, as soon as it is there. None for a W, and at the model's ends."""
        if (tensor := self._here.pop(_pass(action), None)) is not None:
            return tensor
        receive = needed(self.schedule, self.stage, action)
        if receive is None:
            return None
        if receive not in self._coming:
            raise RuntimeError(f"stage {self.stage}: {action} needs {receive}, which is not posted")
        tensor, message = self._coming.pop(receive)
        message.wait()
        for send in self._over[receive]:
            self._leaving.pop(send).wait()  # at once
        return tensor

    def hand(self, action: Action, tensor: Tensor | None) -> None:
        """F, B, I: take what it made, for the send that follows or for a part on this stage."""
        if action.kind == "W" or tensor is None:
            return
        if found := sent(self.schedule, self.stage, action):
            self._check(action, tensor)
            self._made[found[0]] = tensor
            return
        part = self.schedule.placement[self.stage][action.chunk] + (1 if action.kind == "F" else -1)
        if 0 <= part < self.schedule.parts:
            _, chunk = self.schedule.owner(part)
            self._here[_pass(action)._replace(chunk=chunk)] = tensor

    def send(self, action: Action) -> None:
        """SF, SB: begin to send."""
        peer, _ = other_end(self.schedule, self.stage, action)
        self._leaving[action] = ranks.isend(self._made.pop(action), peer, self._to(peer))

    def end(self) -> None:
        """Wait for what has not left yet."""
        while self._leaving:
            self._leaving.popitem()[1].wait()

    def exchange(self, tensor: Tensor, peer: int) -> Tensor:
        """Send `tensor` to stage `peer` and receive the like of it from there.

        The lower stage sends first: with nccl, both ends have to meet in one group and then in the
        other. (`ranks.exchange` is for all ranks of a group, these are two of them.)
        """
        theirs = torch.empty_like(tensor)
        calls = [(ranks.isend, tensor, self._to(peer)), (ranks.irecv, theirs, self._from(peer))]
        if peer < self.stage:
            calls.reverse()
        for message in [call(what, peer, group) for call, what, group in calls]:
            message.wait()
        return theirs

    def _to(self, peer: int) -> dist.ProcessGroup:
        return self.group if self.stage < peer else self.back

    def _from(self, peer: int) -> dist.ProcessGroup:
        return self.group if peer < self.stage else self.back

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
                ranks.isend(number, target, self._to(target)).wait()
            elif self.stage == target:
                ranks.irecv(number, source, self._from(source)).wait()

    def _check(self, action: Action, tensor: Tensor) -> None:
        form = self._forms[action.microbatch]
        if (tensor.shape, tensor.dtype) != form:
            given = f"{list(tensor.shape)} {tensor.dtype}"
            raise ValueError(
                f"stage {self.stage}: {action} made {given}; `between` says that {list(form[0])} "
                f"{form[1]} travels from part to part"
            )


def come(schedule: Schedule, stage: int) -> dict[Action, list[Action]]:
    """For each message that `stage` receives, those of its own that have come when it is here.

    Its sender had waited for them before it sent it, and this follows from the schedule alone.
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


def _pass(action: Action) -> Action:
    """I and B need and make the same."""
    return action._replace(kind="B") if action.kind == "I" else action
