"""The life of one rank, from its first instruction to its last.

A rank joins the process group, calls the function, reports back, and then waits to be dismissed, so
that no rank leaves while a neighbour may still need its sockets.
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

from . import calls

# Error texts of gloo and nccl in a rank whose *neighbour* failed or called something else.
VICTIM_WORDS = (
    *("gloo/gloo/", "nccl", "connection closed", "connection reset", "timed out"),
    "wait timeout",  # in torch's store
)

START = 120.0  # seconds for the ranks of a run to start and meet
TIMEOUT = 120.0  # seconds for a run, unless its caller sets another limit
MAX_SLOWDOWN = 4.0  # factor by which both may grow on a slow machine

_inside: Job | None = None  # set in a rank, None everywhere else


@dataclass(frozen=True)
class Job:
    """The description of a run, which every rank receives."""

    world_size: int
    backend: str
    device: str  # "cpu", "cuda" or "xpu"
    timeout: float  # seconds for the whole run
    directory: str  # the run's own folder: rendezvous file, outputs, stacks
    parent: int  # process id of the caller
    rng_state: torch.Tensor = field(repr=False)  # the caller's: every rank starts from it

    @property
    def by_nccl(self) -> bool:
        """True if nccl or xccl moves the tensors: then `wait` blocks the GPU, not the process."""
        return self.device != "cpu" and gpu.GPU_BACKENDS[self.device] in self.backend

    def file(self, kind: str, rank: int | None = None) -> Path:
        """Return a file in the run's folder: the run's own, or that of one rank."""
        return Path(self.directory, kind if rank is None else f"{kind}.{rank}")


@dataclass
class Report:
    """The final message of a rank to the caller."""

    value: bytes = b""
    error: str = ""  # "ValueError: boom"; "" if it returned
    frames: list[tuple[str, int, str, str]] = field(default_factory=list)  # file, line, name, text
    victim: bool = False  # True: the error is the consequence of a neighbour's failure

    @property
    def failed(self) -> bool:
        """True if the rank raised, or its result cannot be sent."""
        return self.error != ""


def serve(rank: int, job: Job, load: Any, status: Connection, lifeline: int) -> None:
    """Run rank `rank` of `job`: call the function, report, wait for dismissal. Never returns.

    `load` returns the function and its arguments; its imports do not count as the run's time.
    `lifeline` is the reading end of a pipe whose writing end the caller holds: it becomes readable
    when the caller dismisses its ranks, and reads as closed when the caller dies.
    """
    global _inside
    _settle_in(rank, job, lifeline)
    _inside = job
    try:
        fn, args = load()
        _join(rank, job)
        status.send(None)  # the caller's clock starts
        report = _returned(called(job, fn, args))
    except BaseException as error:  # the caller must learn of every error
        report = _raised(error)
    flush()
    with suppress(OSError):  # the caller has died
        status.send(report)
    _leave_with_caller(lifeline, job)


def _settle_in(rank: int, job: Job, lifeline: int) -> None:
    """Give the rank its own session, output and signals; make it die with the caller."""
    os.setsid()  # the terminal's Ctrl-C reaches the caller alone, which stops its ranks
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    if sys.platform == "linux":
        # The kernel signals the caller's death with SIGHUP, and C handles it with alarm(SIGHUP),
        # where SIGHUP is 1: one second for the thread below, if Python is too busy to run it.
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
        libc.signal(signal.SIGHUP, ctypes.cast(libc.alarm, ctypes.c_void_p))
        libc.prctl(1, signal.SIGHUP, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != job.parent:
        _leave(job, dismissed=False)
    threading.Thread(target=_leave_with_caller, args=(lifeline, job), daemon=True).start()
    output = os.open(job.file("out", rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    # In a notebook, sys.stdout belongs to the kernel and must not be used here.
    sys.stdin = open(0, closefd=False)
    sys.stdout = io.TextIOWrapper(open(1, "wb", 0, closefd=False), "utf-8", write_through=True)
    sys.stderr = io.TextIOWrapper(open(2, "wb", 0, closefd=False), "utf-8", write_through=True)
    stacks = open(job.file("stack", rank), "w")
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


def _leave_with_caller(lifeline: int, job: Job) -> None:
    """Wait until the caller dismisses its ranks or dies; then kill this rank's process group.

    Not with sys.exit: gloo's threads abort a process that ends in the ordinary way.
    """
    _leave(job, dismissed=bool(os.read(lifeline, 1)))  # a caller that dies writes nothing


def _leave(job: Job, dismissed: bool) -> None:
    for _ in range(0 if dismissed else 100):  # another rank may still be writing there
        shutil.rmtree(job.directory, ignore_errors=True)
        if not os.path.exists(job.directory):
            break
    os.killpg(0, signal.SIGKILL)  # this process leads its group


def use_gpu(local_rank: int) -> None:
    """Make this rank's GPU the current one, and run a product on it, which loads cuBLAS.

    This takes seconds, so it happens before the clock of a run starts.
    """
    gpu.get_device_module().set_device(local_rank % gpu.get_device_module().device_count())
    one = torch.ones(1, 1, device=gpu.get_device_type())
    one @ one


def called(job: Job, fn: Any, args: tuple[Any, ...]) -> Any:
    """Return the result of `fn(*args)`, once all its work on the GPU is done.

    A collective that a neighbour does not enter hangs on the GPU, and not in `fn`.
    """
    value = fn(*args)
    if job.device != "cpu":
        gpu.get_device_module().synchronize()
    return value


def _join(rank: int, job: Job) -> None:
    if job.device != "cpu":
        use_gpu(rank)
    store = dist.FileStore(str(job.file("store")), job.world_size)
    # The caller's clock decides: gloo's own must not expire first, in a rank that only waited.
    limit = timedelta(seconds=MAX_SLOWDOWN * (START + job.timeout) + 30)
    dist.init_process_group(
        job.backend, rank=rank, world_size=job.world_size, store=store, timeout=limit
    )
    dist.barrier()
    calls.log(job.file("calls", rank))


def _returned(value: Any) -> Report:
    buffer = io.BytesIO()
    try:
        import cloudpickle

        torch.save(value, buffer, pickle_module=cloudpickle)
    except Exception as error:
        what = f"its result, a {type(value).__qualname__}"
        return _raised(TypeError(f"{what}, cannot be sent to the caller: {_describe(error)}"))
    return Report(buffer.getvalue())


def _raised(error: BaseException) -> Report:
    summary = traceback.extract_tb(error.__traceback__)
    frames = [(f.filename, f.lineno or 0, f.name, f.line or "") for f in summary]
    text = _describe(error)
    victim = isinstance(error, RuntimeError) and any(w in text.lower() for w in VICTIM_WORDS)
    return Report(error=text, frames=frames, victim=victim)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


def flush() -> None:
    """Flush this process's output streams, if they exist and are open."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()


def _print_instead_of_display() -> None:
    """Print the text of displayed objects: a forked kernel must not answer the notebook."""
    kernel = sys.modules.get("IPython")
    shell = kernel.get_ipython() if kernel else None
    if shell is not None:

        def publish(data: dict[str, Any], *_: Any, **__: Any) -> None:
            print(data.get("text/plain", ""))

        shell.display_pub.publish = publish


def fresh(directory: str, rank: int, status: int, lifeline: int) -> None:
    """Serve as a rank that starts as a fresh process (see `start.start`)."""
    job, payload, paths = torch.load(Path(directory, "job"), weights_only=False)
    sys.path[:] = paths
    serve(rank, job, lambda: pickle.loads(payload), Connection(status, readable=False), lifeline)
