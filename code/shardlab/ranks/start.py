"""Starting ranks, and ending them.

`forked` takes 0.1 s for four ranks and can run a function that exists only in a notebook's memory.
`fresh` starts new interpreters, which takes seconds, and is the way once the caller holds a CUDA
context, which does not survive a fork.
"""

from __future__ import annotations

import gc
import importlib
import io
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import torch

from shardlab.common import gpu

from . import worker

_FRESH = """
import sys
sys.path[:] = {path!r}
from shardlab.ranks import worker
worker.fresh({directory!r}, {rank}, {status}, {lifeline})
"""


@dataclass
class Process:
    """One started rank, as its caller sees it."""

    rank: int
    pid: int
    status: Connection  # out of it come None, when all ranks have met, and a Report
    met: bool = False
    report: worker.Report | None = None

    def exit_code(self) -> int | None:
        """None while it runs; its exit status; minus the signal that ended it.

        The process is left unreaped, so that its number cannot be given to another one before
        `end` has used it.
        """
        peek = os.WEXITED | os.WNOHANG | os.WNOWAIT
        info = os.waitid(os.P_PID, self.pid, peek)
        if info is None:
            return None
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status

    def dump_stack(self) -> None:
        """Ask it to write where it stands into its stack file."""
        if self.exit_code() is None:
            os.kill(self.pid, signal.SIGUSR1)


def _fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 warns that a process with threads forks. The four rules that make it safe here
        # stand in CONTRIBUTING.md, section "Ranks".
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def gpus_survive_fork() -> bool:
    """Whether a forked rank could use a GPU: not once this process has asked the driver for one.

    torch.cuda.is_available() may be enough to ask, and leaves no trace here; a child can tell.
    """
    pid = _fork()
    if not pid:
        os._exit(int(gpu.module()._is_in_bad_fork()))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def forked(
    job: worker.Job, fn: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[list[Process], int]:
    """Fork the ranks of `job`; return them and the lifeline's writing end."""

    def start(rank: int, status: int, lifeline: int, others: list[int]) -> int:
        pid = _fork()
        if pid:
            return pid
        try:
            for descriptor in others:
                os.close(descriptor)
            gc.freeze()
            connection = Connection(status, readable=False)
            worker.serve(rank, job, lambda: (fn, args), connection, lifeline)
        except BaseException:  # a rank must never return into the caller's code
            traceback.print_exc()
        finally:
            os._exit(1)

    return _start_all(job, start)


def packed(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """`fn` and `args` for a process that knows nothing of them; TypeError if they cannot travel."""
    # Not at the top: forked ranks do without it.
    import cloudpickle

    class Pickler(cloudpickle.CloudPickler):
        def reducer_override(self, obj: Any) -> Any:
            # Torch's modules of settings are of a class of their own, which cloudpickle does not
            # take for modules; it meets torch.distributed.config where a function says `.config`.
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


def fresh(
    job: worker.Job, fn: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[list[Process], int]:
    """Start the ranks of `job` as new interpreters; return them and the lifeline's writing end."""
    torch.save((job, packed(fn, args), sys.path), job.file("job"))

    def start(rank: int, status: int, lifeline: int, others: list[int]) -> int:
        code = _FRESH.format(
            path=sys.path,
            directory=job.directory,
            rank=rank,
            status=status,
            lifeline=lifeline,
        )
        # Until the rank has redirected its own output, what it says goes where it will write later.
        with open(job.file("out", rank), "ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(status, lifeline),
            )
        process.returncode = 0  # this module reaps it, Popen shall not
        return process.pid

    return _start_all(job, start)


def _start_all(job: worker.Job, start: Callable[..., int]) -> tuple[list[Process], int]:
    reading, writing = os.pipe()
    processes: list[Process] = []
    try:
        for rank in range(job.world_size):
            ours, theirs = os.pipe()
            others = [writing, ours, *(p.status.fileno() for p in processes)]
            pid = start(rank, theirs, reading, others)
            os.close(theirs)
            processes.append(Process(rank, pid, Connection(ours, writable=False)))
    except BaseException:
        end(processes, writing)
        raise
    finally:
        os.close(reading)
    return processes, writing


def end(processes: list[Process], lifeline: int, patience: float = 0.0) -> None:
    """Dismiss the ranks, wait `patience` seconds, kill what is left with all that it started."""
    with suppress(BrokenPipeError):
        os.write(lifeline, bytes(2 * len(processes)))  # two threads of each read one
    os.close(lifeline)
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and any(p.exit_code() is None for p in processes):
        time.sleep(0.002)
    for process in processes:
        # The group too: a rank may have started helpers of its own, data loaders for one.
        for kill, target in ((os.killpg, process.pid), (os.kill, process.pid)):
            with suppress(ProcessLookupError, PermissionError):
                kill(target, signal.SIGKILL)
    for process in processes:
        process.status.close()
        with suppress(ChildProcessError):
            os.waitpid(process.pid, 0)
