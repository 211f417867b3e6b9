"""Run a function on N ranks, from a notebook, a script or a test.

    >>> from shardlab import ranks
    >>> import torch.distributed as dist
    >>> ranks.run(lambda: dist.get_rank() * 10, 4)
    [0, 10, 20, 30]

The same call works in a script that torchrun started: see `torchrun`.

Every rank is a real process in a real process group. What a rank prints comes back grouped by
rank; what it returns comes back in rank order; a rank that fails ends the run with an error that
names it.
"""

from __future__ import annotations

import inspect
import io
import operator
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

import torch

from . import blame, start, torchrun, worker
from .agree import check_bytes, check_group, check_model
from .p2p import Message, irecv, isend
from .pretended import pretend

__all__ = [
    "Message",
    "RankError",
    "WorldSizeError",
    "check_bytes",
    "check_group",
    "check_model",
    "device",
    "irecv",
    "isend",
    "max_ranks",
    "place",
    "pretend",
    "run",
]

# (backend, device, world size) -> how many times this process ran that: recordings tell it.
history: Counter[tuple[str, str, int]] = Counter()

_GRACE = 0.3  # seconds in which a second rank may fail of its own doing, and be named as well
_VICTIM_GRACE = 1.0  # seconds that a cause may take to show after its first consequence


class RankError(RuntimeError):
    """A rank failed. `ranks` are those at fault, `rank` the first of them."""

    def __init__(self, message: str, ranks: list[int] | None = None):
        super().__init__(message)
        self.ranks = ranks or []
        self.rank = self.ranks[0] if self.ranks else None

    def _render_traceback_(self) -> list[str]:
        # In a notebook the launcher's own frames say nothing: the message already says where.
        return [f"{type(self).__name__}: {self}"]


class WorldSizeError(RankError, ValueError):
    """More ranks than this machine can sensibly run."""


def max_ranks() -> int:
    """How many ranks `run` agrees to here: eight per core, sixteen at least; or torchrun's."""
    if torchrun.launched():
        return torchrun.world()[1]
    return max(16, 8 * (os.cpu_count() or 1))


def place(world_size: int, device: str = "auto") -> tuple[str, str]:
    """The backend and the device that `run` gives to `world_size` ranks on this machine.

    nccl when every rank has a GPU of its own; gloo otherwise, on one shared GPU or on the CPU.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device={device!r}: allowed are 'auto', 'cpu' and 'cuda'")
    # Asks the driver's library without a CUDA context, and so does not spoil a later fork.
    gpus = torch.cuda.device_count()
    if torchrun.launched():  # on several machines, each has its own GPUs
        world_size = int(os.environ["LOCAL_WORLD_SIZE"])
    if device == "cuda" and not gpus:
        raise ValueError("device='cuda': this machine has no CUDA GPU; allowed here: 'auto', 'cpu'")
    if device == "cpu" or not gpus:
        return "gloo", "cpu"
    return ("cpu:gloo,cuda:nccl" if gpus >= world_size else "gloo"), "cuda"


def device() -> torch.device:
    """The device of the rank that asks; outside a run, the device that a single rank would get."""
    if worker._inside is not None:
        if worker._inside.device == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    return torch.device("cuda", 0) if torch.cuda.device_count() else torch.device("cpu")


def run(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    device: str = "auto",
    method: str = "auto",
    show: bool = True,
) -> list[Any]:
    """Call `fn(*args)` on `world_size` ranks and return their results in rank order.

    Inside `fn` the default process group exists: `dist.get_rank()`, `dist.group.WORLD`. Every rank
    starts from the caller's random state. Tensors come back on the CPU.

    timeout: seconds that the run may take, starting included.
    device: "auto", "cpu" or "cuda" (see `place`).
    method: "auto", "fork" or "fresh": how processes start (see `start`).
    show: print what the ranks printed, grouped by rank.

    Raises RankError when a rank fails, dies, hangs or leaves; ValueError or TypeError, before any
    process starts, when an argument is not allowed.
    """
    world_size, timeout = _checked(fn, world_size, args, timeout, method)
    backend, device = place(world_size, device)
    if torchrun.launched():
        return _run_joined(fn, args, world_size, backend, device, timeout)
    history[backend, device, world_size] += 1
    if method == "auto":
        spoilt = torch.cuda.is_initialized() or (
            device == "cuda" and not start.cuda_survives_fork()
        )
        method = "fresh" if spoilt or not hasattr(os, "fork") else "fork"
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as directory:
        job = worker.Job(
            world_size, backend, device, timeout, directory, os.getpid(), torch.get_rng_state()
        )
        deadline = time.monotonic() + timeout
        starter = start.forked if method == "fork" else start.fresh
        processes, lifeline = starter(job, fn, args)
        patience = 0.0
        try:
            timed_out = _wait(processes, deadline)
            failed = any(p.report is None or p.report.kind != "returned" for p in processes)
            witnesses = _question(job, processes) if failed else []
            patience = 0.0 if failed else 0.5
        finally:
            start.end(processes, lifeline, patience)
        if show:
            _show(job)
        if failed:
            culprits, message = blame.explain(witnesses, timeout if timed_out else None)
            raise RankError(message, culprits)
        return [_result(p) for p in processes]


def _run_joined(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    world_size: int,
    backend: str,
    device: str,
    timeout: float,
) -> list[Any]:
    job = worker.Job(world_size, backend, device, timeout, "", os.getpid(), torch.get_rng_state())
    outcomes = torchrun.run_joined(fn, args, job)
    reports = {rank: value for rank, (kind, value) in enumerate(outcomes) if kind == "raised"}
    if reports:
        causes = [rank for rank, report in reports.items() if not report.victim] or list(reports)
        texts = [f"rank {rank} of {world_size} raised {reports[rank].error}" for rank in causes]
        raise RankError("\n".join(texts), causes)
    return [value for _, value in outcomes]


def _checked(
    fn: Any, world_size: Any, args: tuple[Any, ...], timeout: Any, method: Any
) -> tuple[int, float]:
    if not callable(fn):
        raise TypeError(f"fn={fn!r}: run needs a function, fn(*args)")
    try:
        count = operator.index(world_size)
    except TypeError:
        count = None
    if count is None or isinstance(world_size, bool):
        raise TypeError(f"world_size={world_size!r}: allowed is a whole number of at least 1")
    if count < 1:
        raise ValueError(f"world_size={count}: allowed is a whole number of at least 1")
    if count > max_ranks():
        what = f"this machine has {os.cpu_count()} cores"
        if torchrun.launched():
            what = f"torchrun started {max_ranks()} processes"
        raise WorldSizeError(f"world_size={count}: {what}, allowed are 1 to {max_ranks()} ranks")
    try:
        inspect.signature(fn).bind(*args)
    except TypeError as error:
        name = getattr(fn, "__name__", repr(fn))
        expected = inspect.signature(fn)
        raise TypeError(
            f"{name}{expected} cannot be called with the {len(args)} given arguments: {error}"
        ) from None
    except ValueError:
        pass  # a built-in without a signature: the call itself will tell
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ValueError(f"timeout={timeout!r}: allowed is a number of seconds above 0")
    if method not in ("auto", "fork", "fresh"):
        raise ValueError(f"method={method!r}: allowed are 'auto', 'fork' and 'fresh'")
    if worker._inside is not None:
        raise ValueError("run was called inside a rank; only the caller of ranks may start them")
    return count, float(timeout)


def _wait(processes: list[start.Process], deadline: float) -> bool:
    """Wait until all ranks reported, or one failed, or time is up (then True)."""
    while True:
        pending = [p for p in processes if p.report is None]
        left = deadline - time.monotonic()
        if not pending:
            return False
        if left <= 0:
            return True
        # 50 ms: a death shows at the pipe at once, unless a helper of the rank's own holds it.
        ready = connection.wait([p.status for p in pending], min(left, 0.05))
        silent = {p.rank for p in pending if not _receive(p, ready)}
        dead = [p for p in pending if p.rank in silent and p.exit_code() is not None]
        failures = [p for p in processes if p.report and p.report.kind == "raised"]
        if not dead and not failures:
            continue
        # A failure. Causes may come after their consequences: give them a moment to show.
        only_victims = not dead and all(p.report.victim for p in failures if p.report)
        limit = time.monotonic() + (_VICTIM_GRACE if only_victims else _GRACE)
        while time.monotonic() < limit:
            for p in processes:
                if p.report is None:
                    _receive(p, connection.wait([p.status], 0.0))
            time.sleep(0.01)
        return False


def _receive(process: start.Process, ready: list[Any]) -> bool:
    """Take the report of `process` if it is there; False when there is none."""
    if process.status not in ready:
        return False
    try:
        process.report = process.status.recv()
    except (EOFError, OSError):
        return False
    return True


def _question(job: worker.Job, processes: list[start.Process]) -> list[blame.Witness]:
    """Ask each rank that still runs where it stands, and collect what all of them left."""
    running = [p for p in processes if p.report is None and p.exit_code() is None]
    for process in running:
        process.dump_stack()
    deadline = time.monotonic() + 1.0
    while running and time.monotonic() < deadline:
        running = [p for p in running if not _has_stack(job, p.rank)]
        time.sleep(0.01)
    return [blame.witness(job, p.rank, p.report, p.exit_code()) for p in processes]


def _has_stack(job: worker.Job, rank: int) -> bool:
    path = job.file("stack", rank)
    return path.exists() and path.stat().st_size > 0


def _show(job: worker.Job) -> None:
    for rank in range(job.world_size):
        path = job.file("out", rank)
        text = path.read_text("utf-8", "replace") if path.exists() else ""
        for line in text.splitlines():
            if not line.startswith("[Gloo] Rank "):
                print(f"[rank {rank}] {line}")


def _result(process: start.Process) -> Any:
    assert process.report is not None
    try:
        return torch.load(io.BytesIO(process.report.value), "cpu", weights_only=False)
    except Exception as error:
        raise RankError(
            f"rank {process.rank}'s result cannot be read here: {type(error).__name__}: {error}",
            [process.rank],
        ) from None
