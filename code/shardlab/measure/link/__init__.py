"""An emulated slow link between the ranks of one machine.

Ranks on one machine communicate through its memory, which hides the cost of a network.
`create_slow_group` makes a process group that moves real data with real collectives, and delays the
completion of each operation until a wire of the given latency and bandwidth would have finished it.
Computation is not delayed: it goes on while the wire is busy, as beside a real network card.

Every rank has one wire in each direction, on which its messages follow one another. A message of n
bytes takes latency + n / bandwidth (Hockney 1994), counted from when it was sent and its receive
was posted, whichever is later: neither gloo nor nccl sends data before. A collective takes the time
of its ring, however the data moves (Thakur et al. 2005, section 4): see `estimate_ring_seconds`. On
a GPU all this begins when the stream reaches the call; only `wait` blocks the host.

Compared with a loopback interface that Linux limits to 1 Gbit/s (tc's token bucket filter, in a
network namespace): messages of 16 and 64 MiB took the same time within 0.4 %. Headers, 4 % in a
network of 1500-byte frames, are not emulated.
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

from .wire import ReadyTime, Wire

_group_numbers = itertools.count()
_NOTE_TAG_OFFSET = 2**30  # tag of notes about GPU messages, sent when the stream reaches them


def create_slow_group(
    latency: float, bandwidth: float, group: dist.ProcessGroup | None = None
) -> dist.ProcessGroup:
    """Make a group with the ranks of `group` whose messages take as long as on a slow wire.

    latency: seconds per message, 0 or more. bandwidth: bytes per second and direction, above 0.
    Every rank of `group` has to call this, in the same order as other collectives. The result works
    like any process group: with functions of torch.distributed, torch's DDP, and the course's code.
    """
    check_number(0, latency=latency)
    check_number(maximum=math.inf, bandwidth=bandwidth)
    carrier = dist.group.WORLD if group is None else group
    check_group(carrier)

    def create_backend(_store: Any, rank: int, size: int, _timeout: Any) -> dist.ProcessGroup:
        return SlowGroup(rank, size, carrier, latency, bandwidth)

    name = f"slow{next(_group_numbers)}"
    dist.Backend.register_backend(name, create_backend, devices=["cpu", gpu.get_device_type()])
    return dist.new_group(dist.get_process_group_ranks(carrier), backend=name)


def estimate_ring_seconds(
    operation: str, size: int, ranks: int, latency: float, bandwidth: float
) -> float:
    """Return the seconds that a collective takes on rings of such wires.

    size: bytes of the whole tensor: the input of all_reduce and broadcast, the output of
    all_gather, the input of reduce_scatter and all_to_all.
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
        f"operation={operation!r}: must be one of {', '.join(hops)}, broadcast, reduce, barrier"
    )


class _DelayedWork(dist._Work):
    """An operation that completes once its data has moved and its wire is done."""

    def __init__(
        self, group: SlowGroup, work: dist.Work, get_due_time: Callable[[], float], result: Any
    ):
        super().__init__()
        self._group = group
        self._work = work
        self._get_due_time = get_due_time  # called once the data is there
        self._result = result
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, *_: Any) -> bool:
        """Wait for the data, then for the wire."""
        self._work.wait()
        left = self._get_due_time() - time.monotonic()
        if left > 0:
            time.sleep(left)
        return True

    def is_completed(self) -> bool:
        """Return True if `wait` would return at once."""
        return self._work.is_completed() and self._get_due_time() <= time.monotonic()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the result, for callers such as torch's DDP."""
        if self._future is None:
            devices = sorted(
                {t.device for t in tree_leaves(self._result) if gpu.is_gpu(t.device)}, key=str
            )
            self._future = torch.futures.Future(devices=devices or None)
            self._group.complete_later(self, self._future, self._result)
        return self._future


class SlowGroup(dist.ProcessGroup):
    """The process group that `create_slow_group` returns; `carrier` moves the data."""

    def __init__(
        self, rank: int, size: int, carrier: dist.ProcessGroup, latency: float, bandwidth: float
    ):
        super().__init__(rank, size)
        self.carrier = carrier
        self.latency = latency
        self.bandwidth = bandwidth
        self._wire = Wire()
        self._incoming_free = 0.0  # when the incoming wire will be idle
        # Transfers on the wire, for timelines: collective, bytes, and the times of call (on a GPU:
        # of ready data), begin and end, in seconds of time.monotonic().
        self.log: list[tuple[str, int, float, float, float]] = []
        # One thread each, so tasks run one after another, as on wires.
        self._finisher, self._announcer = (ThreadPoolExecutor(max_workers=1) for _ in range(2))

    @property
    def group_name(self) -> str:
        """The name of the group in torch's registry, with which a DeviceMesh looks it up."""
        return dist.distributed_c10d._world.pg_names[self]

    def getBackendName(self) -> str:
        """Return the name in torch's messages."""
        return "slow"

    # Messages of a batch are sent one by one: torch 2.15 asks each device's backend, which is this
    # group itself, whether it coalesces them.
    supports_coalescing = False

    def _get_backend(self, _device: torch.device) -> SlowGroup:
        return self

    def complete_later(self, work: _DelayedWork, future: torch.futures.Future, result: Any) -> None:
        """Fill `future` once `work` is complete; a single thread does this in order."""

        def complete_future() -> None:
            try:
                work.wait()
                future.set_result(result)
            except Exception as error:
                future.set_exception(error)

        self._finisher.submit(complete_future)

    def _start_collective(
        self, name: str, operation: str, size_index: int | None, *args: Any
    ) -> _DelayedWork:
        """Start a collective by the carrier's method `name`; reserve the wire for the ring's time.

        size_index: index in `args` of the whole tensor; None for a barrier.
        """
        tensors = [] if size_index is None else args[size_index]
        result = [] if size_index is None else args[0]
        size = sum(t.numel() * t.element_size() for t in tree_leaves(tensors))
        seconds = estimate_ring_seconds(operation, size, self.size(), self.latency, self.bandwidth)
        ready = ReadyTime(tensors)
        work = getattr(self.carrier, name)(*args)

        def on_start(begin: float, end: float) -> None:
            self._incoming_free = end
            self.log.append((operation, size, ready(), begin, end))

        get_end = self._wire.queue_transfer(ready, seconds, on_start)
        results = [result] if isinstance(result, torch.Tensor) else result
        return _DelayedWork(self, work, get_end, results)

    # Point-to-point. A note with the time of sending precedes each message, so that the receiver
    # can compute when the message would have arrived, however long it has waited.

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _DelayedWork:
        """Send one tensor to rank `peer`."""
        (tensor,) = tensors
        seconds = tensor.numel() * tensor.element_size() / self.bandwidth
        pending: list[dist.Work] = []  # keeps the handle: gloo drops a message with its handle

        def on_start(begin: float, _: float) -> None:
            note = torch.tensor([begin], dtype=torch.float64)
            with _disable_current_modes():  # byte counts must not include the note
                pending.append(self.carrier.send([note], peer, _get_note_tag(tensor, tag)))

        ready = ReadyTime(tensors)
        get_end = self._wire.queue_transfer(ready, seconds, on_start)
        if not ready.is_known:
            self._announcer.submit(get_end)  # the other side may ask first

        def get_due_time() -> float:
            end = get_end()
            if pending:
                pending.pop().wait()  # only once: gloo waits for ever on a second wait
            return end

        return _DelayedWork(self, self.carrier.send(tensors, peer, tag), get_due_time, tensors)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _DelayedWork:
        """Receive one tensor from rank `peer`."""
        (tensor,) = tensors
        seconds = tensor.numel() * tensor.element_size() / self.bandwidth
        note = torch.empty(1, dtype=torch.float64)
        posted = ReadyTime(tensors)
        with _disable_current_modes():
            noted = self.carrier.recv([note], peer, _get_note_tag(tensor, tag))
        arrival: list[float] = []

        def get_due_time() -> float:
            if not arrival:
                noted.wait()
                # Data moves once both ends are ready, with gloo as with nccl.
                sent = max(note.item(), posted()) + self.latency + seconds
                arrival.append(max(sent, self._incoming_free + seconds))
                self._incoming_free = arrival[0]
            return arrival[0]

        return _DelayedWork(self, self.carrier.recv(tensors, peer, tag), get_due_time, tensors)


# Methods of a process group -> the collective, and the argument with the whole tensor.
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
_NEW_NAMES = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}


def _make_method(name: str) -> Callable[..., _DelayedWork]:
    def start_collective(self: SlowGroup, *args: Any, opts: Any = None) -> _DelayedWork:
        args = args if opts is None else (*args, opts)
        return self._start_collective(name, *_COLLECTIVES[name], *args)

    return start_collective


for _name in (*_COLLECTIVES, *_NEW_NAMES):
    setattr(SlowGroup, _name, _make_method(_NEW_NAMES.get(_name, _name)))


def _get_note_tag(tensor: torch.Tensor, tag: int) -> int:
    """Return a tag for the note: GPU notes are sent later, and must not match other messages."""
    return tag + _NOTE_TAG_OFFSET if gpu.is_gpu(tensor.device) else tag
