"""Start and end the processes of ranks.

A fork takes 0.1 s for four ranks and can run a function that exists only in a notebook's memory.
Fresh ranks are new interpreters, which takes seconds. They are needed once the caller holds a CUDA
context, which does not survive a fork.
"""

from __future__ import annotations

import gc
import importlib
import io
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, NoReturn

import torch

from shardlab.common import gpu

from . import worker


@dataclass
class Process:
    """A started rank, as its caller sees it."""

    rank: int
    pid: int
    status: Connection  # sends None when all ranks have met, and later a Report
    met: bool = False
    report: worker.Report | None = None

    def exit_code(self) -> int | None:
        """Return None while the process runs, its exit status, or minus the signal that ended it.

        The process is left unreaped, so that its number cannot be given to another process before
        `end` has used it.
        """
        peek = os.WEXITED | os.WNOHANG | os.WNOWAIT
        info = os.waitid(os.P_PID, self.pid, peek)
        if info is None:
            return None
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status

    def dump_stack(self) -> None:
        """Ask the process to write its stack into its stack file."""
        if self.exit_code() is None:
            os.kill(self.pid, signal.SIGUSR1)


def _fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 warns when a process with threads forks. The four rules that make this safe
        # are in CONTRIBUTING.md, section "Ranks".
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def gpus_survive_fork() -> bool:
    """Return True if a forked rank can use a GPU: not after this process has asked the driver.

    torch.cuda.is_available() may be enough to ask, and leaves no trace here; a child can tell.
    """
    pid = _fork()
    if not pid:
        os._exit(int(gpu.get_device_module()._is_in_bad_fork()))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def packed(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickle `fn` and `args` for a fresh process; raise TypeError if that is not possible."""
    # Not at the top: forked ranks do not need it.
    import cloudpickle

    class Pickler(cloudpickle.CloudPickler):
        def reducer_override(self, obj: Any) -> Any:
            # Torch's settings modules have a class of their own, which cloudpickle does not handle
            # as modules; it meets torch.distributed.config if a function uses `.config`.
            if isinstance(obj, ModuleType) and type(obj) is not ModuleType:
                return importlib.import_module, (obj.__name__,)
            return super().reducer_override(obj)

    buffer = io.BytesIO()
    try:
        Pickler(buffer).dump((fn, args))
    except Exception as error:
        name = getattr(fn, "__name__", repr(fn))
        raise TypeError(
            f"{name} or one of its arguments cannot be sent to a fresh process "
            f"({type(error).__name__}: {error})"
        ) from None
    return buffer.getvalue()


def start(
    job: worker.Job, fn: Callable[..., Any], args: tuple[Any, ...], method: str
) -> tuple[list[Process], int]:
    """Start the ranks of `job`, "fork" or "fresh"; return them and the lifeline's writing end."""
    if method == "fresh":
        torch.save((job, packed(fn, args), sys.path), job.file("job"))
    reading, writing = os.pipe()
    processes: list[Process] = []
    try:
        for rank in range(job.world_size):
            ours, theirs = os.pipe()
            if not (pid := _fork()):
                for descriptor in (writing, ours, *(p.status.fileno() for p in processes)):
                    os.close(descriptor)
                _become(rank, job, fn, args, method, theirs, reading)
            os.close(theirs)
            processes.append(Process(rank, pid, Connection(ours, writable=False)))
    except BaseException:
        end(processes, writing)
        raise
    finally:
        os.close(reading)
    return processes, writing


def _become(
    rank: int,
    job: worker.Job,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    method: str,
    status: int,
    lifeline: int,
) -> NoReturn:
    """Become the rank in the forked process, directly or as a new interpreter."""
    try:
        if method == "fork":
            gc.freeze()
            connection = Connection(status, readable=False)
            worker.serve(rank, job, lambda: (fn, args), connection, lifeline)
        # Until the rank redirects its own output, write to the same file.
        output = os.open(job.file("out", rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        low, high = sorted((status, lifeline))
        for ends in ((3, low), (low + 1, high), (high + 1, os.sysconf("SC_OPEN_MAX"))):
            os.closerange(*ends)  # every descriptor that a library has opened
        for descriptor in (status, lifeline):
            os.set_inheritable(descriptor, True)
        call = f"{job.directory!r}, {rank}, {status}, {lifeline}"
        code = f"import sys; sys.path[:] = {sys.path!r}; from shardlab.ranks import worker; "
        os.execv(sys.executable, [sys.executable, "-c", f"{code}worker.fresh({call})"])
    except BaseException:  # a rank must never return into the caller's code
        traceback.print_exc()
    finally:
        os._exit(1)


def end(processes: list[Process], lifeline: int, patience: float = 0.0) -> None:
    """Dismiss the ranks, wait `patience` seconds, then kill the rest with their helpers."""
    with suppress(BrokenPipeError):
        os.write(lifeline, bytes(2 * len(processes)))  # two threads of each rank read one
    os.close(lifeline)
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and any(p.exit_code() is None for p in processes):
        time.sleep(0.002)
    for process in processes:
        # The group too: a rank may have started helpers, such as data loaders.
        for kill, target in ((os.killpg, process.pid), (os.kill, process.pid)):
            with suppress(ProcessLookupError, PermissionError):
                kill(target, signal.SIGKILL)
    for process in processes:
        process.status.close()
        with suppress(ChildProcessError):
            os.waitpid(process.pid, 0)
