"""The life of one rank, from its first instruction to its last.

A rank joins the process group, calls the function, reports back, and then waits to be dismissed, so
that no rank leaves while a peer may still need its sockets.
"""

from __future__ import annotations

import ctypes
import faulthandler
import io
import os
import pickle
import shutil
import signal
import sys
import threading
import traceback
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardlab.common import gpu

from . import collective_log

# Parts of errors that gloo and nccl raise in a rank if a *peer* fails or calls something else.
PEER_FAILURE_TEXTS = (
    *("gloo/gloo/", "nccl", "connection closed", "connection reset", "timed out"),
    "wait timeout",  # in torch's store
)

START_TIMEOUT = 120.0  # seconds for the ranks of a run to start and join the process group
RUN_TIMEOUT = 120.0  # seconds for a run, unless its caller sets another limit
MAX_SLOWDOWN = 4.0  # factor by which both may grow on a slow machine

current_job: Job | None = None  # the run of this process if it is a rank


@dataclass(frozen=True)
class Job:
    """The description of a run, which every rank receives."""

    world_size: int
    backend: str
    device: str  # "cpu", "cuda" or "xpu"
    timeout: float  # seconds for the whole run
    directory: str  # the run's own folder: rendezvous file, outputs, stacks
    parent_pid: int  # process id of the caller
    rng_state: torch.Tensor = field(repr=False)  # the caller's: every rank starts from it

    @property
    def uses_nccl(self) -> bool:
        """True if nccl or xccl moves the tensors: then `wait` blocks the GPU, not the process."""
        return self.device != "cpu" and gpu.GPU_BACKENDS[self.device] in self.backend

    def get_path(self, kind: str, rank: int | None = None) -> Path:
        """Return the path of a file in the run's folder, for the run or for one rank."""
        return Path(self.directory, kind if rank is None else f"{kind}.{rank}")


@dataclass
class Report:
    """The final message of a rank to the caller."""

    value: bytes = b""
    error: str = ""  # "ValueError: boom"; "" if it returned
    frames: list[tuple[str, int, str, str]] = field(default_factory=list)  # file, line, name, text
    is_peer_failure: bool = False  # True: the error is the consequence of a peer's failure

    @property
    def has_failed(self) -> bool:
        """True if the rank raised, or its result cannot be sent."""
        return self.error != ""


def run_rank(rank: int, job: Job, load: Any, status: Connection, caller_pipe: int) -> None:
    """Run rank `rank` of `job`: call the function, report, wait for dismissal. Never returns.

    `load` returns the function and its arguments; its imports do not count as the run's time.
    `caller_pipe` is the reading end of a pipe whose writing end the caller holds: it becomes
    readable when the caller dismisses its ranks, and reads as closed when the caller dies.
    """
    global current_job
    _set_up_process(rank, job, caller_pipe)
    current_job = job
    try:
        fn, args = load()
        _join_group(rank, job)
        status.send(None)  # the caller's clock starts
        report = make_report(call_and_synchronize(job, fn, args))
    except BaseException as error:  # the caller must learn of every error
        report = make_error_report(error)
    flush_outputs()
    with suppress(OSError):  # the caller has died
        status.send(report)
    _exit_with_caller(caller_pipe, job)


def _set_up_process(rank: int, job: Job, caller_pipe: int) -> None:
    """Give the rank its own session, output and signals; make it die with the caller."""
    os.setsid()  # the terminal's Ctrl-C reaches the caller alone, which stops its ranks
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    if sys.platform == "linux":
        # The kernel signals the caller's death with SIGHUP, whose C handler calls alarm(SIGHUP).
        # SIGHUP is 1, so the thread below has one second, even if Python is too busy to run it.
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
        libc.signal(signal.SIGHUP, ctypes.cast(libc.alarm, ctypes.c_void_p))
        libc.prctl(1, signal.SIGHUP, 0, 0, 0)  # PR_SET_PDEATHSIG
        # Where ranks outnumber cores, each message wakes threads, which would displace each other.
        # Batch scheduling forbids that: gloo's all-reduce of 4 ranks on 2 cores took a seventh.
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if os.getppid() != job.parent_pid:
        _kill_process_group(job, dismissed=False)
    threading.Thread(target=_exit_with_caller, args=(caller_pipe, job), daemon=True).start()
    output = os.open(job.get_path("out", rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    # In a notebook, sys.stdout belongs to the kernel and must not be used here.
    sys.stdin = open(0, closefd=False)
    sys.stdout = io.TextIOWrapper(open(1, "wb", 0, closefd=False), "utf-8", write_through=True)
    sys.stderr = io.TextIOWrapper(open(2, "wb", 0, closefd=False), "utf-8", write_through=True)
    stacks = open(job.get_path("stack", rank), "w")
    faulthandler.enable(stacks, all_threads=False)
    # All threads: on a GPU, the hooks of a backward run in autograd's threads.
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    torch.set_rng_state(job.rng_state)
    # torch 2.13 renames collectives; only the old names exist in every supported torch.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.")
    _print_instead_of_display()
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
        GLOO_SOCKET_IFNAME="lo" if sys.platform == "linux" else "lo0",  # loopback alone
        NCCL_SOCKET_IFNAME="lo",
        TORCH_CPP_LOG_LEVEL="ERROR",
    )


def _exit_with_caller(caller_pipe: int, job: Job) -> None:
    """Wait until the caller dismisses its ranks or dies; then kill this rank's process group.

    sys.exit would not do: gloo's threads abort a process that ends in the ordinary way.
    """
    _kill_process_group(
        job, dismissed=bool(os.read(caller_pipe, 1))
    )  # a caller that dies writes nothing


def _kill_process_group(job: Job, dismissed: bool) -> None:
    for _ in range(0 if dismissed else 100):  # another rank may still be writing there
        shutil.rmtree(job.directory, ignore_errors=True)
        if not os.path.exists(job.directory):
            break
    os.killpg(0, signal.SIGKILL)  # this process leads its group


def select_gpu(local_rank: int) -> None:
    """Make this rank's GPU the current one, and run a product on it, which loads cuBLAS.

    This takes seconds, so it happens before the clock of a run starts.
    """
    gpu.get_device_module().set_device(local_rank % gpu.get_device_module().device_count())
    one = torch.ones(1, 1, device=gpu.get_device_type())
    one @ one


def call_and_synchronize(job: Job, fn: Any, args: tuple[Any, ...]) -> Any:
    """Return the result of `fn(*args)`, once all its work on the GPU is done.

    A collective that a peer does not enter hangs on the GPU, and not in `fn`.
    """
    value = fn(*args)
    if job.device != "cpu":
        gpu.get_device_module().synchronize()
    return value


def _join_group(rank: int, job: Job) -> None:
    if job.device != "cpu":
        select_gpu(rank)
    store = dist.FileStore(str(job.get_path("store")), job.world_size)
    # The caller's timeout decides: gloo's must not expire first, in a rank that only waits.
    limit = timedelta(seconds=MAX_SLOWDOWN * (START_TIMEOUT + job.timeout) + 30)
    dist.init_process_group(
        job.backend, rank=rank, world_size=job.world_size, store=store, timeout=limit
    )
    dist.barrier()
    collective_log.start_logging(job.get_path("calls", rank))


def make_report(value: Any) -> Report:
    """Return the report of a result, or of an error if the result cannot be sent."""
    buffer = io.BytesIO()
    try:
        import cloudpickle

        torch.save(value, buffer, pickle_module=cloudpickle)
    except Exception as error:
        what = f"its result, a {type(value).__qualname__}, cannot be sent to the caller"
        return make_error_report(TypeError(f"{what}: {_format_error(error)}"))
    return Report(buffer.getvalue())


def make_error_report(error: BaseException) -> Report:
    """Return the report of an exception, with the frames of its traceback."""
    summary = traceback.extract_tb(error.__traceback__)
    frames = [(f.filename, f.lineno or 0, f.name, f.line or "") for f in summary]
    text = _format_error(error)
    is_peer = isinstance(error, RuntimeError) and any(t in text.lower() for t in PEER_FAILURE_TEXTS)
    return Report(error=text, frames=frames, is_peer_failure=is_peer)


def _format_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


def flush_outputs() -> None:
    """Flush this process's output streams, if they exist and are open."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()


def _print_instead_of_display() -> None:
    """Print the text of displayed objects: a forked kernel must not answer the notebook."""
    kernel = sys.modules.get("IPython")
    shell = kernel.get_ipython() if kernel else None
    if shell is not None:

        def print_text(data: dict[str, Any], *_: Any, **__: Any) -> None:
            print(data.get("text/plain", ""))

        shell.display_pub.publish = print_text


def run_fresh_rank(directory: str, rank: int, status: int, caller_pipe: int) -> None:
    """Run a rank in a fresh process (see `launch.start_processes`)."""
    job, payload, paths = torch.load(Path(directory, "job"), weights_only=False)
    sys.path[:] = paths
    connection = Connection(status, readable=False)
    run_rank(rank, job, lambda: pickle.loads(payload), connection, caller_pipe)
