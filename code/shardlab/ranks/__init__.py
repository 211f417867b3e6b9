"""Run a function on N ranks, from a notebook, a script or a test.

    >>> from shardlab import ranks
    >>> import torch.distributed as dist
    >>> ranks.run(lambda: dist.get_rank() * 10, 4)
    [0, 10, 20, 30]

The same call works in a script that torchrun started: see `torchrun`.

Every rank is a real process in a real process group. Output comes back grouped by rank, results in
rank order; a rank that fails ends the run with an error that names it. The path of a call:

1. `start` starts the processes, in which `worker` joins the group, calls the function and reports;
2. this module waits for reports, and requests the stacks of ranks that still run (`stacks`);
3. `start` ends the processes, and the caller shows their output;
4. `blame` finds the rank at fault, from reports, stacks and the log of collectives (`calls`).

Helpers for code inside a run: `p2p`, `gather`, `renamed`, and `agree` for checks.
"""

from __future__ import annotations

import inspect
import io
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

import torch
import torch.distributed as dist

from shardlab.common import gpu, stale_code
from shardlab.common.arguments import check_integer, check_number, check_one_of
from shardlab.common.launcher import read_local_rank
from shardlab.common.show.timing import measure_slowdown

from . import blame, stacks, start, torchrun, worker
from .agree import check_group, check_model, check_same, check_same_once, check_trained
from .p2p import Message, exchange, irecv, isend
from .torchrun import at_parting

__all__ = [
    "Message",
    "RankError",
    "at_parting",
    "check_group",
    "check_model",
    "check_same",
    "check_same_once",
    "check_trained",
    "device",
    "exchange",
    "irecv",
    "isend",
    "max_ranks",
    "place",
    "pretend",
    "run",
]

# (backend, device, world size) -> number of runs in this process: recordings print it.
history: Counter[tuple[str, str, int]] = Counter()

_GRACE = 0.3  # seconds for further ranks to fail on their own, so that they are named as well
_VICTIM_GRACE = 1.0  # seconds for a cause to appear after its first consequence


class RankError(RuntimeError):
    """An error of a run whose rank failed. `ranks` are those at fault, `rank` the first of them."""

    def __init__(self, message: str, ranks: list[int] | None = None):
        super().__init__(message)
        self.ranks = ranks or []
        self.rank = self.ranks[0] if self.ranks else None

    def _render_traceback_(self) -> list[str]:
        # In a notebook the launcher's own frames are useless: the message has the place.
        return [f"{type(self).__name__}: {self}"]


def max_ranks() -> int:
    """Return the most ranks that `run` allows: eight per core, at least 16; torchrun's, if more."""
    started = torchrun.world()[1] if torchrun.launched() else 0
    return max(16, 8 * (os.cpu_count() or 1), started)


def place(world_size: int, device: str = "auto") -> tuple[str, str]:
    """Return the backend and the device that `run` gives to `world_size` ranks on this machine.

    nccl, or xccl, if every rank has a GPU of its own; otherwise gloo, on one shared GPU or on the
    CPU. gloo does not support Intel GPUs, so these are not shared.
    """
    if torchrun.launched() and world_size <= torchrun.world()[1]:
        world_size = int(os.environ["LOCAL_WORLD_SIZE"])  # each machine has its own GPUs
    return _place(world_size, device)


def _place(here: int, device: str) -> tuple[str, str]:
    """Return backend and device for `here` ranks on this machine, whoever starts them."""
    check_one_of(("auto", "cpu", *gpu.GPU_BACKENDS), device=device)
    kind, gpus = gpu.get_device_type(), gpu.get_device_module().device_count()
    if device in gpu.GPU_BACKENDS and (device != kind or not gpus):
        raise ValueError(f"device={device!r}: there is none here; allowed are 'auto' and 'cpu'")
    if device == "cpu" or not gpus:
        return "gloo", "cpu"
    if gpus >= here:
        return f"cpu:gloo,{kind}:{gpu.GPU_BACKENDS[kind]}", kind
    if device == "xpu":
        words = f"{here} ranks want a GPU each, of {gpus}; allowed are 'auto' and 'cpu'"
        raise ValueError(f"device='xpu': {words}")
    return "gloo", ("cuda" if kind == "cuda" else "cpu")


def device() -> torch.device:
    """Return this rank's device; outside a run, the device that a single rank would get."""
    inside, gpus = worker._inside, gpu.get_device_module().device_count()
    if not gpus or (inside is not None and inside.device == "cpu"):
        return torch.device("cpu")
    return torch.device(gpu.get_device_type(), read_local_rank(os.environ) % gpus)


def run(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float | None = None,
    device: str = "auto",
    method: str = "auto",
    show: bool = True,
    apart: bool = False,
) -> list[Any]:
    """Call `fn(*args)` on `world_size` ranks and return their results in rank order.

    Inside `fn` the default process group exists: `dist.get_rank()`, `dist.group.WORLD`. Every rank
    starts from the caller's random state. Tensors come back on the CPU.

    timeout: seconds for the run, counted after all ranks have met, because fresh interpreters and
        the first use of CUDA are slow. None: 120, extended at the end on a machine that is measured
        to be slow or busy.
    device: "auto", "cpu", "cuda" or "xpu" (see `place`).
    method: "auto", "fork" or "fresh": how processes start (see `start`).
    show: print the output of the ranks, grouped by rank.
    apart: start new processes even under torchrun, for ranks that are meant to die or hang.

    Under torchrun the ranks are the processes that it started, and `method` and `show` have no
    effect (see `torchrun`). If `world_size` exceeds their number, or with `apart`, process 0 starts
    its own ranks on its machine, as without torchrun, and says so.

    Raises RankError when a rank fails, dies, hangs or leaves; ValueError or TypeError, before any
    process starts, for invalid arguments.
    """
    stale_code.warn_stale_modules()
    under_torchrun = torchrun.launched()
    if under_torchrun:
        torchrun.enter()
    limit = worker.TIMEOUT if timeout is None else timeout
    _check(fn, world_size, args, limit, method)
    name = getattr(fn, "__name__", repr(fn))
    if under_torchrun and not apart and world_size <= torchrun.world()[1]:
        reports = torchrun.run_joined(fn, args, world_size, *place(world_size, device), limit)
        if any(report is None or report.failed for report in reports):
            witnesses = [blame.Witness(rank, report, None) for rank, report in enumerate(reports)]
            time_up = limit if None in reports else None
            raise RankError(*reversed(blame.explain(witnesses, time_up)))
        return [_result(report) for report in reports]
    backend, device = _place(world_size, device)
    if under_torchrun:
        why = "it may end them" if apart else f"torchrun started {torchrun.world()[1]} processes"
        print(f"[{name} on {world_size} ranks beside those of torchrun: {why}]")
    history[backend, device, world_size] += 1
    if method == "auto":
        # A former rank of torchrun has stale caches in torch and DTensor offsets.
        spoilt = gpu.get_device_module().is_initialized() or under_torchrun
        spoilt = spoilt or (device in gpu.GPU_BACKENDS and not start.gpus_survive_fork())
        method = "fresh" if spoilt or not hasattr(os, "fork") else "fork"
    worker.flush()
    with tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as directory:
        state = torch.get_rng_state()
        job = worker.Job(world_size, backend, device, limit, directory, os.getpid(), state)
        try:
            return _run(job, fn, args, method, timeout is None, show)
        except KeyboardInterrupt:
            raise _interrupted(name, world_size) from None


def pretend(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float | None = None
) -> Any:
    """Call `fn(*args)` in one process that acts as rank 0 of `world_size` ranks.

    The world may have any size, because the other ranks do not exist. Use fake or meta tensors for
    large data (`torch._subclasses.FakeTensorMode`). Returns the result of `fn`, whose tensors need
    data. Raises ValueError for an invalid world size; RankError as `run` does.
    """
    check_integer(world_size=world_size)
    return run(_alone, 1, fn, world_size, args, timeout=timeout, device="cpu")[0]


def _alone(fn: Callable[..., Any], world_size: int, args: tuple[Any, ...]) -> Any:
    """Call `fn(*args)` in a process group whose other ranks do not exist.

    Collectives return at once and move nothing, so their results are not data. Shapes, sizes and
    the order of operations are right.
    """
    # This import registers the backend "fake".
    import torch.testing._internal.distributed.fake_pg  # noqa: F401

    dist.destroy_process_group()
    store = dist.HashStore()
    dist.init_process_group("fake", rank=0, world_size=world_size, store=store)
    return fn(*args)


def _interrupted(name: str, world_size: int) -> KeyboardInterrupt:
    """Make an interrupt that a notebook shows without the launcher's frames."""
    error = KeyboardInterrupt(
        f"{name} was running on {world_size} rank{'s' if world_size > 1 else ''}.\n"
        "The ranks were ended, and nothing that they started is left.\n"
        "What was computed before the run is still there."
    )
    error._render_traceback_ = lambda: [f"Interrupted: {error}"]  # for IPython, as in RankError
    return error


def _run(
    job: worker.Job,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    method: str,
    scaled: bool,
    show: bool,
) -> list[Any]:
    """Start the ranks here, wait for them, end them; return their results in rank order."""
    processes, lifeline = start.start(job, fn, args, method)
    patience = 0.0
    try:
        time_up = _wait(processes, job.timeout, scaled)
        failed = any(p.report is None or p.report.failed for p in processes)
        witnesses = _question(job, processes) if failed else []
        patience = 0.0 if failed else 0.5
    finally:
        start.end(processes, lifeline, patience)
        if show:
            _show(job)
    if failed:
        raise RankError(*reversed(blame.explain(witnesses, time_up)))
    if found := blame.disagreement(job):
        raise RankError(*reversed(found))
    return [_result(p.report) for p in processes]


def _check(fn: Any, world_size: Any, args: tuple[Any, ...], timeout: Any, method: Any) -> None:
    if not callable(fn):
        raise TypeError(f"fn={fn!r}: run needs a function, fn(*args)")
    if worker._inside is not None:
        raise ValueError("run was called inside a rank; only the caller of ranks may start them")
    check_integer(1, max_ranks(), world_size=world_size)
    check_number(timeout=timeout)
    check_one_of(("auto", "fork", "fresh"), method=method)
    try:
        inspect.signature(fn).bind(*args)
    except TypeError as error:
        name = getattr(fn, "__name__", repr(fn))
        expected = inspect.signature(fn)
        raise TypeError(
            f"{name}{expected} cannot be called with the {len(args)} given arguments: {error}"
        ) from None
    except ValueError:
        pass  # a built-in without a signature: the call itself will fail


def _wait(processes: list[start.Process], timeout: float, scaled: bool) -> float | None:
    """Wait until all ranks reported (None), one failed (None), or time is up (limit in seconds).

    scaled: at the end of `timeout`, extend it on a slow machine, as for the start.
    """
    for what, limit, extend in (("met", worker.START, True), ("report", timeout, scaled)):
        deadline = time.monotonic() + limit
        while not all(getattr(p, what) for p in processes):
            left = deadline - time.monotonic()
            if left <= 0 and extend:
                extend = False
                deadline += limit * (min(measure_slowdown(), worker.MAX_SLOWDOWN) - 1)
            elif left <= 0:
                return limit
            # 50 ms: a death closes the pipe at once, unless a helper process of the rank holds it
            # open.
            elif _has_failed(processes, min(left, 0.05)):
                return None
    return None


def _has_failed(processes: list[start.Process], seconds: float) -> bool:
    """Receive messages for at most `seconds`; return True if a rank has failed or died."""
    pending = [p for p in processes if p.report is None]
    ready = connection.wait([p.status for p in pending], seconds)
    silent = [p for p in pending if not _receive(p, ready)]
    dead = [p for p in silent if p.exit_code() is not None]
    reports = [p.report for p in processes if p.report and p.report.failed]
    if not dead and not reports:
        return False
    # Causes may arrive after their consequences: wait a moment for them.
    only_victims = not dead and all(report.victim for report in reports)
    end = time.monotonic() + (_VICTIM_GRACE if only_victims else _GRACE)
    while time.monotonic() < end:
        for p in processes:
            if p.report is None:
                _receive(p, connection.wait([p.status], 0.0))
        time.sleep(0.01)
    return True


def _receive(process: start.Process, ready: list[Any]) -> bool:
    """Receive a message of `process`: it met the others, or its report; False if there is none."""
    if process.status not in ready:
        return False
    try:
        process.met, process.report = True, process.status.recv()
    except (EOFError, OSError):
        return False
    return True


def _question(job: worker.Job, processes: list[start.Process]) -> list[blame.Witness]:
    """Request the stacks of the ranks that still run, and collect the evidence of all ranks."""
    codes = {p.rank: p.exit_code() for p in processes}  # later exits are our doing
    running = [p for p in processes if p.report is None and codes[p.rank] is None]
    for process in running:
        process.dump_stack()
    stacks.await_dumps([job.file("stack", p.rank) for p in running])
    return [blame.witness(job, p.rank, p.report, codes[p.rank]) for p in processes]


def _show(job: worker.Job) -> None:
    if sys.stdout is None or sys.stdout.closed:  # no stream to print to
        return
    for rank in range(job.world_size):
        path = job.file("out", rank)
        text = path.read_text("utf-8", "replace") if path.exists() else ""
        for line in text.splitlines():
            if not line.startswith("[Gloo] Rank "):
                print(f"[rank {rank}] {line}")


def _result(report: worker.Report) -> Any:
    return torch.load(io.BytesIO(report.value), "cpu", weights_only=False)
