"""An emulated slow link between the ranks of one machine.

Ranks on one machine talk through its memory, which hides what a network costs. `slow` gives a
process group that moves real data with real collectives, and holds back the completion of each
operation until a wire of the given latency and bandwidth would have finished it. Nothing else is
slowed down, so compute goes on while the wire is busy, as it does beside a real network card.

Every rank owns one wire in each direction, and its messages follow one another on it. A message of
n bytes takes latency + n / bandwidth (Hockney 1994) once it was sent and its receive was posted,
whichever comes last: neither gloo nor nccl lets data leave before. A collective takes what its ring
does, whatever moves the data underneath (Thakur et al. 2005, section 4): see `ring_seconds`. On a
GPU all this begins when the stream comes to it; calling does not stop the host, `wait` does.

Measured beside a loopback interface that Linux itself limits to 1 Gbit/s (tc's token bucket filter,
in a network namespace): messages of 16 and 64 MiB took the same time within 0.4 %. A network of
1500-byte frames adds 4 % of headers, which are not emulated.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from shardlab.common import gpu
from shardlab.common.arguments import check_number
from shardlab.ranks import check_group

from .wire import Moment, Wire

_numbers = itertools.count()
_NOTES = 2**30  # the tag of notes about messages of a GPU, which leave when the stream is so far


def slow(
    latency: float, bandwidth: float, group: dist.ProcessGroup | None = None
) -> dist.ProcessGroup:
    """A group with the ranks of `group` whose messages take as long as on a slow wire.

    latency: seconds per message, 0 or more. bandwidth: bytes per second and direction, above 0.
    Every rank of `group` has to call this, in the same order as other collectives. The result works
    wherever a process group does: functions of torch.distributed, torch's DDP, this course's code.
    """
    check_number(0, latency=latency)
    check_number(most=math.inf, bandwidth=bandwidth)
    carrier = dist.group.WORLD if group is None else group
    check_group(carrier)

    def create(_store: Any, rank: int, size: int, _timeout: Any) -> dist.ProcessGroup:
        return SlowGroup(rank, size, carrier, latency, bandwidth)

    name = f"slow{next(_numbers)}"
    dist.Backend.register_backend(name, create, devices=["cpu", gpu.kind()])
    return dist.new_group(dist.get_process_group_ranks(carrier), backend=name)


def ring_seconds(operation: str, size: int, ranks: int, latency: float, bandwidth: float) -> float:
    """Seconds that a collective takes on rings of such wires.

    size: bytes of the whole tensor: what all_reduce and broadcast are given, what all_gather ends
    with, what reduce_scatter and all_to_all start from.
    """
    hops = {
        "all_reduce": 2 * (ranks - 1),
        "all_gather": ranks - 1,
        "reduce_scatter": ranks - 1,
        "all_to_all": ranks - 1,
    }
    if operation in hops:
        return hops[operation] * (latency + size / ranks / bandwidth)
    if operation in ("broadcast", "reduce"):  # a binomial tree
        return math.ceil(math.log2(ranks)) * (latency + size / bandwidth) if ranks > 1 else 0.0
    if operation == "barrier":
        return math.ceil(math.log2(ranks)) * latency if ranks > 1 else 0.0
    raise ValueError(
        f"operation={operation!r}: allowed are {', '.join(hops)}, broadcast, reduce, barrier"
    )


class _Held(dist._Work):
    """An operation that is over when its data has moved and its wire would be done."""

    def __init__(self, group: SlowGroup, work: dist.Work, due: Callable[[], float], result: Any):
        super().__init__()
        self._group = group
        self._work = work
        self._due = due  # asked once the data is there
        self._result = result
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, *_: Any) -> bool:
        """Wait for the data, then for the wire."""
        self._work.wait()
        left = self._due() - time.monotonic()
        if left > 0:
            time.sleep(left)
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._work.is_completed() and self._due() <= time.monotonic()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the result, for callers such as torch's DDP."""
        if self._future is None:
            devices = sorted(
                {t.device for t in tree_leaves(self._result) if gpu.is_on(t.device)}, key=str
            )
            self._future = torch.futures.Future(devices=devices or None)
            self._group.complete_later(self, self._future, self._result)
        return self._future


class SlowGroup(dist.ProcessGroup):
    """The process group that `slow` returns; `carrier` moves the data."""

    def __init__(
        self, rank: int, size: int, carrier: dist.ProcessGroup, latency: float, bandwidth: float
    ):
        super().__init__(rank, size)
        self.carrier = carrier
        self.latency = latency
        self.bandwidth = bandwidth
        self._wire = Wire()
        self._incoming_free = 0.0  # when the wire in will be idle
        # What the wire carried: collective, bytes, and when it was called (on a GPU: when its data
        # was there), begun and over, in seconds of time.monotonic(). For timelines.
        self.log: list[tuple[str, int, float, float, float]] = []
        # Threads that do one thing after another, as wires do.
        self._finisher, self._announcer = (ThreadPoolExecutor(max_workers=1) for _ in range(2))

    @property
    def group_name(self) -> str:
        """The name under which torch keeps it: a DeviceMesh looks its group up by that."""
        return dist.distributed_c10d._world.pg_names[self]

    def getBackendName(self) -> str:
        """Its name in torch's messages."""
        return "slow"

    # Messages of a batch go one by one: torch 2.15 asks the backend of each device, which it is
    # itself, whether it would take them as one.
    supports_coalescing = False

    def _get_backend(self, _device: torch.device) -> SlowGroup:
        return self

    def complete_later(self, work: _Held, future: torch.futures.Future[Any], result: Any) -> None:
        """Fill `future` when `work` is over; one thread does so for all, in order."""

        def finish() -> None:
            try:
                work.wait()
                future.set_result(result)
            except Exception as error:
                future.set_exception(error)

        self._finisher.submit(finish)

    def _collective(self, name: str, operation: str, sized: int | None, *args: Any) -> _Held:
        """Begin `operation` by the carrier's method `name`; the wire is busy for the ring's time.

        sized: which of `args` has the bytes of the whole tensor; None for a barrier.
        """
        tensors = [] if sized is None else args[sized]
        result = args[0] if sized is not None else []
        size = sum(t.numel() * t.element_size() for t in tree_leaves(tensors))
        seconds = ring_seconds(operation, size, self.size(), self.latency, self.bandwidth)
        ready = Moment(tensors)
        work = getattr(self.carrier, name)(*args)

        def begun(begin: float, end: float) -> None:
            self._incoming_free = end
            self.log.append((operation, size, ready(), begin, end))

        over = self._wire.line_up(ready, seconds, begun)
        return _Held(self, work, over, [result] if isinstance(result, torch.Tensor) else result)

    # Point-to-point. A note of when the message was sent goes ahead of it, so that the receiver can
    # tell when it would have arrived, however long it has been waiting.

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _Held:
        """Send one tensor to rank `peer`."""
        (tensor,) = tensors
        seconds = tensor.numel() * tensor.element_size() / self.bandwidth
        pending: list[dist.Work] = []  # gloo drops a message whose handle is dropped: this keeps it

        def begun(begin: float, _: float) -> None:
            note = torch.tensor([begin], dtype=torch.float64)
            with _disable_current_modes():  # the note is the emulation's: nobody shall count it
                pending.append(self.carrier.send([note], peer, _tag(tensor, tag)))

        ready = Moment(tensors)
        over = self._wire.line_up(ready, seconds, begun)
        if not ready.known:
            self._announcer.submit(over)  # the other side may ask before this host does

        def due() -> float:
            end = over()
            if pending:
                pending.pop().wait()  # once: gloo waits for ever when asked a second time
            return end

        return _Held(self, self.carrier.send(tensors, peer, tag), due, tensors)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _Held:
        """Receive one tensor from rank `peer`."""
        (tensor,) = tensors
        seconds = tensor.numel() * tensor.element_size() / self.bandwidth
        note = torch.empty(1, dtype=torch.float64)
        posted = Moment(tensors)
        with _disable_current_modes():
            noted = self.carrier.recv([note], peer, _tag(tensor, tag))
        arrival: list[float] = []

        def due() -> float:
            if not arrival:
                noted.wait()
                # Nothing sets off before both ends are ready, with gloo as with nccl.
                sent = max(note.item(), posted()) + self.latency + seconds
                arrival.append(max(sent, self._incoming_free + seconds))
                self._incoming_free = arrival[0]
            return arrival[0]

        return _Held(self, self.carrier.recv(tensors, peer, tag), due, tensors)


# Methods of a process group: the collective, and the argument with the bytes of the whole tensor.
_COLLECTIVES = {
    "allreduce": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all_gather", 0),
    "_allgather_base": ("all_gather", 0),
    "reduce_scatter": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "barrier": ("barrier", None),
}
# torch 2.13's names for three of them.
_RENAMED = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}


def _method(name: str) -> Callable[..., _Held]:
    def method(self: SlowGroup, *args: Any, opts: Any = None) -> _Held:
        args = args if opts is None else (*args, opts)
        return self._collective(name, *_COLLECTIVES[name], *args)

    return method


for _name in (*_COLLECTIVES, *_RENAMED):
    setattr(SlowGroup, _name, _method(_RENAMED.get(_name, _name)))


def _tag(tensor: torch.Tensor, tag: int) -> int:
    """That of the note: those of a GPU's messages are sent later, and must not pass for others'."""
    return tag + _NOTES if gpu.is_on(tensor.device) else tag
