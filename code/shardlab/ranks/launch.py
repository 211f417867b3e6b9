"""Start and stop the processes of ranks.

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
class RankProcess:
    """A started rank, as its caller sees it."""

    rank: int
    pid: int
    status: Connection  # receives None when the rank has joined, and later its Report
    has_joined: bool = False  # True once all ranks have joined the process group
    report: worker.Report | None = None

    def get_exit_code(self) -> int | None:
        """Return None while the process runs, its exit status, or minus the signal that ended it.

        The process is left unreaped, so that its number cannot be given to another process before
        `stop_processes` has used it.
        """
        info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if info is None:
            return None
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status

    def dump_stack(self) -> None:
        """Ask the process to write its stack into its stack file."""
        if self.get_exit_code() is None:
            os.kill(self.pid, signal.SIGUSR1)


def _fork_process() -> int:
    with warnings.catch_warnings():
        # Python 3.12 warns when a process with threads forks. The four rules that make this safe
        # are in CONTRIBUTING.md, section "Ranks".
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def gpus_survive_fork() -> bool:
    """Return True if a forked rank can use a GPU: not if this process has initialized the driver.

    torch.cuda.is_available() may initialize it without a trace in this process, so ask in a fork.
    """
    pid = _fork_process()
    if not pid:
        os._exit(int(gpu.get_device_module()._is_in_bad_fork()))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def pickle_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickle `fn` and `args` for a fresh process; raise TypeError if that is not possible."""
    import cloudpickle  # not at the top: forked ranks do not need it

    class Pickler(cloudpickle.CloudPickler):
        def reducer_override(self, obj: Any) -> Any:
            # Torch's settings modules have a class of their own, which cloudpickle does not handle
            # as modules. A function that uses `.config` may refer to torch.distributed.config.
            if isinstance(obj, ModuleType) and type(obj) is not ModuleType:
                return importlib.import_module, (obj.__name__,)
            return super().reducer_override(obj)

    buffer = io.BytesIO()
    try:
        Pickler(buffer).dump((fn, args))
    except Exception as error:
        name = getattr(fn, "__name__", repr(fn))
        raise TypeError(
            f"fn={name}: must be picklable with its arguments, to be sent to a fresh process "
            f"({type(error).__name__}: {error})"
        ) from None
    return buffer.getvalue()


def start_processes(
    job: worker.Job, fn: Callable[..., Any], args: tuple[Any, ...], method: str
) -> tuple[list[RankProcess], int]:
    """Start the ranks by `method`; return them and the writing end of the caller pipe."""
    if method == "fresh":
        torch.save((job, pickle_call(fn, args), sys.path), job.get_path("job"))
    caller_pipe, writing_end = os.pipe()
    processes: list[RankProcess] = []
    try:
        for rank in range(job.world_size):
            ours, theirs = os.pipe()
            if not (pid := _fork_process()):
                for descriptor in (writing_end, ours, *(p.status.fileno() for p in processes)):
                    os.close(descriptor)
                _become_rank(rank, job, fn, args, method, theirs, caller_pipe)
            os.close(theirs)
            processes.append(RankProcess(rank, pid, Connection(ours, writable=False)))
    except BaseException:
        stop_processes(processes, writing_end)
        raise
    finally:
        os.close(caller_pipe)
    return processes, writing_end


def _become_rank(
    rank: int,
    job: worker.Job,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    method: str,
    status: int,
    caller_pipe: int,
) -> NoReturn:
    """Become the rank in the forked process, directly or as a new interpreter."""
    try:
        if method == "fork":
            gc.freeze()
            connection = Connection(status, readable=False)
            worker.run_rank(rank, job, lambda: (fn, args), connection, caller_pipe)
        # Until the rank redirects its own output, write to the same file.
        output = os.open(job.get_path("out", rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        low, high = sorted((status, caller_pipe))
        for limits in ((3, low), (low + 1, high), (high + 1, os.sysconf("SC_OPEN_MAX"))):
            os.closerange(*limits)  # every descriptor that a library has opened
        for descriptor in (status, caller_pipe):
            os.set_inheritable(descriptor, True)
        call = f"{job.directory!r}, {rank}, {status}, {caller_pipe}"
        code = f"import sys; sys.path[:] = {sys.path!r}; from shardlab.ranks import worker; "
        os.execv(sys.executable, [sys.executable, "-c", f"{code}worker.run_fresh_rank({call})"])
    except BaseException:  # a rank must never return into the caller's code
        traceback.print_exc()
    finally:
        os._exit(1)


def stop_processes(processes: list[RankProcess], caller_pipe: int, patience: float = 0.0) -> None:
    """Dismiss the ranks, wait `patience` seconds, then kill the rest with their helpers."""
    with suppress(BrokenPipeError):
        os.write(caller_pipe, bytes(2 * len(processes)))  # two threads of each rank read a byte
    os.close(caller_pipe)
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and any(p.get_exit_code() is None for p in processes):
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
