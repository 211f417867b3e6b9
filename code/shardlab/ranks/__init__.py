"""Run a function on N ranks, from a notebook, a script or a test.

    >>> from shardlab import ranks
    >>> import torch.distributed as dist
    >>> ranks.run(lambda: dist.get_rank() * 10, 4)
    [0, 10, 20, 30]

The same call works in a script that torchrun started: see `torchrun`.

Every rank is a real process in a real process group. Output comes back grouped by rank, results in
rank order; a rank that fails ends the run with an error that names it. The path of a call:

1. `launch` starts the processes, in which `worker` joins the group, calls the function and reports;
2. this module waits for reports, and requests the stacks of ranks that still run (`stacks`);
3. `launch` stops the processes, and the caller prints their output;
4. `root_cause` finds the rank at fault, from reports, stacks and the `collective_log`.

Helpers for code inside a run: `p2p`, `gather`, `torch_compat`, `checks`.
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

from . import launch, root_cause, stacks, torchrun, worker
from .checks import check_group, check_model, check_same, check_same_once, check_trainable
from .launch import RankProcess
from .p2p import P2PWork, exchange, irecv, isend
from .root_cause import RankOutcome
from .torchrun import register_cleanup

__all__ = [
    "P2PWork",
    "RankError",
    "check_group",
    "check_model",
    "check_same",
    "check_same_once",
    "check_trainable",
    "choose_backend",
    "device",
    "exchange",
    "irecv",
    "isend",
    "max_world_size",
    "register_cleanup",
    "run",
    "run_with_fake_group",
]

# (backend, device, world size) -> number of runs in this process, for recordings.
run_counts: Counter[tuple[str, str, int]] = Counter()

_FAILURE_GRACE = 0.3  # seconds in which further ranks may fail by themselves and be named, too
_CAUSE_GRACE = 1.0  # seconds in which a root cause may be reported after its consequence


class RankError(RuntimeError):
    """An error of a run whose rank failed. `ranks` are those at fault, `rank` the first of them."""

    def __init__(self, message: str, ranks: list[int] | None = None):
        super().__init__(message)
        self.ranks = ranks or []
        self.rank = self.ranks[0] if self.ranks else None

    def _render_traceback_(self) -> list[str]:
        # In a notebook the launcher's own frames are useless: the message has the place.
        return [f"{type(self).__name__}: {self}"]


def max_world_size() -> int:
    """Return the most ranks that `run` allows: eight per core, 16, or torchrun's number."""
    launched = torchrun.get_rank_and_size()[1] if torchrun.is_torchrun_process() else 0
    return max(16, 8 * (os.cpu_count() or 1), launched)


def choose_backend(world_size: int, device: str = "auto") -> tuple[str, str]:
    """Return the backend and the device that `run` gives to `world_size` ranks on this machine.

    nccl, or xccl, if every rank has a GPU of its own; otherwise gloo, on one shared GPU or on the
    CPU. gloo does not support Intel GPUs, so these are not shared.
    """
    if torchrun.is_torchrun_process() and world_size <= torchrun.get_rank_and_size()[1]:
        world_size = int(os.environ["LOCAL_WORLD_SIZE"])  # each machine has its own GPUs
    return _choose_local_backend(world_size, device)


def _choose_local_backend(local_ranks: int, device: str) -> tuple[str, str]:
    """Return backend and device for `local_ranks` ranks on this machine."""
    check_one_of(("auto", "cpu", *gpu.GPU_BACKENDS), device=device)
    kind, gpus = gpu.get_device_type(), gpu.get_device_module().device_count()
    if device in gpu.GPU_BACKENDS and (device != kind or not gpus):
        raise ValueError(f"device={device!r}: must be 'auto' or 'cpu' on a machine without one")
    if device == "cpu" or not gpus:
        return "gloo", "cpu"
    if gpus >= local_ranks:
        return f"cpu:gloo,{kind}:{gpu.GPU_BACKENDS[kind]}", kind
    if device == "xpu":
        rule = f"must be 'auto' or 'cpu' for {local_ranks} ranks on {gpus} GPUs"
        raise ValueError(f"device='xpu': {rule}, because gloo cannot share Intel GPUs")
    return "gloo", ("cuda" if kind == "cuda" else "cpu")


def device() -> torch.device:
    """Return this rank's device; outside a run, the device that a single rank would get."""
    job, gpus = worker.current_job, gpu.get_device_module().device_count()
    if not gpus or (job is not None and job.device == "cpu"):
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
    own_processes: bool = False,
) -> list[Any]:
    """Call `fn(*args)` on `world_size` ranks and return their results in rank order.

    Inside `fn` the default process group exists: `dist.get_rank()`, `dist.group.WORLD`. Every rank
    starts from the caller's random state. Tensors come back on the CPU.

    timeout: seconds for the run, counted after all ranks have met, because fresh interpreters and
        the first use of CUDA are slow. None: 120, extended at the end on a machine that is measured
        to be slow or busy.
    device: "auto", "cpu", "cuda" or "xpu" (see `choose_backend`).
    method: "auto", "fork" or "fresh": how processes start (see `launch`).
    show: print the output of the ranks, grouped by rank.
    own_processes: start new processes even under torchrun, for ranks that shall die or hang.

    Under torchrun the ranks are the processes that it started, and `method` and `show` have no
    effect (see `torchrun`). If `world_size` exceeds their number, or with `own_processes`, process
    0 starts its own ranks on its machine, as without torchrun, and prints that.

    Raises RankError when a rank fails, dies, hangs or leaves; ValueError or TypeError, before any
    process starts, for invalid arguments.
    """
    stale_code.warn_stale_modules()
    under_torchrun = torchrun.is_torchrun_process()
    if under_torchrun:
        torchrun.enter_run()
    limit = worker.RUN_TIMEOUT if timeout is None else timeout
    _check_arguments(fn, world_size, args, limit, method)
    name = getattr(fn, "__name__", repr(fn))
    launched = torchrun.get_rank_and_size()[1] if under_torchrun else 0
    if world_size <= launched and not own_processes:
        backend, device = choose_backend(world_size, device)
        reports = torchrun.run_on_processes(fn, args, world_size, backend, device, limit)
        if any(report is None or report.has_failed for report in reports):
            outcomes = [RankOutcome(rank, report) for rank, report in enumerate(reports)]
            expired = limit if None in reports else None
            raise RankError(*reversed(root_cause.explain_failure(outcomes, expired)))
        return [_load_result(report) for report in reports]
    backend, device = _choose_local_backend(world_size, device)
    if under_torchrun:
        why = "they may die or hang" if own_processes else f"torchrun started {launched}"
        print(f"[{name}: starting {world_size} processes of its own, because {why}]")
    run_counts[backend, device, world_size] += 1
    if method == "auto":
        # A former rank of torchrun has stale caches in torch and DTensor offsets.
        unsafe = gpu.get_device_module().is_initialized() or under_torchrun
        unsafe = unsafe or (device in gpu.GPU_BACKENDS and not launch.gpus_survive_fork())
        # macOS: the system's libraries (Accelerate, Objective-C) do not survive a fork.
        method = "fresh" if unsafe or sys.platform != "linux" else "fork"
    worker.flush_outputs()
    with tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as directory:
        state = torch.get_rng_state()
        job = worker.Job(world_size, backend, device, limit, directory, os.getpid(), state)
        try:
            return _run_processes(job, fn, args, method, timeout is None, show)
        except KeyboardInterrupt:
            raise _make_interrupt(name, world_size) from None


def run_with_fake_group(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float | None = None
) -> Any:
    """Call `fn(*args)` in one process that acts as rank 0 of `world_size` ranks.

    The world may have any size, because the other ranks do not exist. Use fake or meta tensors for
    large data (`torch._subclasses.FakeTensorMode`). Returns the result of `fn`, whose tensors need
    data. Raises ValueError for an invalid world size; RankError as `run` does.
    """
    check_integer(world_size=world_size)
    return run(_call_in_fake_group, 1, fn, world_size, args, timeout=timeout, device="cpu")[0]


def _call_in_fake_group(fn: Callable[..., Any], world_size: int, args: tuple[Any, ...]) -> Any:
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


def _make_interrupt(name: str, world_size: int) -> KeyboardInterrupt:
    """Make an interrupt that a notebook shows without the launcher's frames."""
    error = KeyboardInterrupt(
        f"{name} was running on {world_size} rank{'s' if world_size > 1 else ''}.\n"
        "The ranks and their child processes were stopped.\n"
        "Results of earlier runs and cells are not lost."
    )
    error._render_traceback_ = lambda: [f"Interrupted: {error}"]  # for IPython, as in RankError
    return error


def _run_processes(
    job: worker.Job,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    method: str,
    scaled: bool,
    show: bool,
) -> list[Any]:
    processes, caller_pipe = launch.start_processes(job, fn, args, method)
    patience = 0.0
    try:
        expired = _wait_for_reports(processes, job.timeout, scaled)
        failed = any(p.report is None or p.report.has_failed for p in processes)
        outcomes = _collect_outcomes(job, processes) if failed else []
        patience = 0.0 if failed else 0.5
    finally:
        launch.stop_processes(processes, caller_pipe, patience)
        if show:
            _print_outputs(job)
    if failed:
        raise RankError(*reversed(root_cause.explain_failure(outcomes, expired)))
    if mismatch := root_cause.find_silent_mismatch(job):
        raise RankError(*reversed(mismatch))
    return [_load_result(p.report) for p in processes]


def _check_arguments(fn: Any, world_size: Any, args: Any, timeout: Any, method: Any) -> None:
    if not callable(fn):
        raise TypeError(f"fn={fn!r}: must be a function, which run calls as fn(*args)")
    if worker.current_job is not None:
        raise ValueError("run() inside a rank: must be called by the process that starts the ranks")
    check_integer(1, max_world_size(), world_size=world_size)
    check_number(timeout=timeout)
    check_one_of(("auto", "fork", "fresh"), method=method)
    try:
        inspect.signature(fn).bind(*args)
    except TypeError as error:
        name = getattr(fn, "__name__", repr(fn))
        call = f"{name}{inspect.signature(fn)}"
        message = f"{call} cannot be called with the {len(args)} given arguments: {error}"
        raise TypeError(message) from None
    except ValueError:
        pass  # a built-in without a signature: the call itself will fail


def _wait_for_reports(processes: list[RankProcess], timeout: float, scaled: bool) -> float | None:
    """Wait for all reports or a failure (None), or until a limit expires (its seconds).

    scaled: at the end of `timeout`, scale it on a slow machine, as for the start.
    """
    start = "has_joined", worker.START_TIMEOUT, True
    for event, limit, extend in (start, ("report", timeout, scaled)):
        deadline = time.monotonic() + limit
        while not all(getattr(p, event) for p in processes):
            left = deadline - time.monotonic()
            if left <= 0 and extend:
                extend = False
                deadline += limit * (min(measure_slowdown(), worker.MAX_SLOWDOWN) - 1)
            elif left <= 0:
                return limit
            # 50 ms: a death closes the pipe at once, unless a helper process of the rank holds it
            # open.
            elif _poll_for_failure(processes, min(left, 0.05)):
                return None
    return None


def _poll_for_failure(processes: list[RankProcess], seconds: float) -> bool:
    """Receive messages for at most `seconds`; return True if a rank has failed or died."""
    pending = [p for p in processes if p.report is None]
    ready = connection.wait([p.status for p in pending], seconds)
    silent = [p for p in pending if not _receive_message(p, ready)]
    dead = [p for p in silent if p.get_exit_code() is not None]
    failures = [p.report for p in processes if p.report and p.report.has_failed]
    if not dead and not failures:
        return False
    # A root cause may be reported after its consequences: wait a moment for it.
    only_peers = not dead and all(report.is_peer_failure for report in failures)
    deadline = time.monotonic() + (_CAUSE_GRACE if only_peers else _FAILURE_GRACE)
    while time.monotonic() < deadline:
        for p in processes:
            if p.report is None:
                _receive_message(p, connection.wait([p.status], 0.0))
        time.sleep(0.01)
    return True


def _receive_message(process: RankProcess, ready: list[Any]) -> bool:
    """Receive that `process` has joined its group, or its report; False if nothing has come."""
    if process.status not in ready:
        return False
    try:
        process.has_joined, process.report = True, process.status.recv()
    except (EOFError, OSError):
        return False
    return True


def _collect_outcomes(job: worker.Job, processes: list[RankProcess]) -> list[RankOutcome]:
    """Request the stacks of the ranks that still run, and collect the evidence of all ranks."""
    codes = {p.rank: p.get_exit_code() for p in processes}  # before this module stops any process
    running = [p for p in processes if p.report is None and codes[p.rank] is None]
    for process in running:
        process.dump_stack()
    stacks.wait_for_dumps([job.get_path("stack", p.rank) for p in running])
    return [root_cause.read_outcome(job, p.rank, p.report, codes[p.rank]) for p in processes]


def _print_outputs(job: worker.Job) -> None:
    if sys.stdout is None or sys.stdout.closed:  # no stream to print to
        return
    for rank in range(job.world_size):
        path = job.get_path("out", rank)
        text = path.read_text("utf-8", "replace") if path.exists() else ""
        for line in text.splitlines():
            if not line.startswith("[Gloo] Rank "):
                print(f"[rank {rank}] {line}")


def _load_result(report: worker.Report) -> Any:
    return torch.load(io.BytesIO(report.value), "cpu", weights_only=False)
