"""Implement `run` with ranks that exist already: in a script that torchrun started.

    torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 4 code/lessons/collectives.py

Process 0 executes the script as if it were alone. The others, on one machine or many, execute it up
to its first `run`, are ranks of this and all further runs, and end when process 0 ends. So the code
between the runs computes, prints and writes only once. Functions, arguments and results are sent by
value through the launcher's store, so no shared file system is needed. Ranks print to torchrun's
output.
"""

from __future__ import annotations

import atexit
import gc
import os
import pickle
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from shardlab.common import gpu

from . import launch, worker

_ARRIVAL_TIMEOUT = 300.0  # seconds for all processes to reach their first run
_GRACE = 5.0  # seconds for the other ranks to report once a rank has failed
_NO_TIMEOUT = timedelta(days=365)
_CHUNK_BYTES = 2**22  # the launcher's store takes no value of more than 8 MiB
_FAILED_KEY = "failed"  # key in the store: a rank of this run has failed

_run_numbers = count()  # numbers of the runs, equal in all processes

# Children of torchrun's processes inherit the environment, so this variable names the process that
# owns it, with the rendezvous address: a nested launcher gives its processes another address.
_OWNER_VARIABLE = "SHARDLAB_TORCHRUN_PROCESS"


def _find_torchrun_process() -> int | None:
    """Return the id of the process that torchrun gave this environment; None without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    address = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    if os.environ.get(_OWNER_VARIABLE, "").split()[:1] != [address]:
        os.environ[_OWNER_VARIABLE] = f"{address} {os.getpid()}"
    return int(os.environ[_OWNER_VARIABLE].split()[1])


_torchrun_pid = _find_torchrun_process()

_cleanups: list[Callable[[], None]] = []


def register_cleanup(cleanup: Callable[[], None]) -> None:
    """Register `cleanup()` for the end of this run, if this process goes on to another run.

    For libraries that keep a run's groups as long as the process lives. No effect outside a run.
    """
    if worker.current_job is not None and cleanup not in _cleanups:
        _cleanups.append(cleanup)


def is_torchrun_process() -> bool:
    """Return True if torchrun started this process (not `run`, not a fork)."""
    return worker.current_job is None and _torchrun_pid == os.getpid()


def get_rank_and_size() -> tuple[int, int]:
    """Return this process's rank among all of torchrun's processes, and their number."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


@cache
def _get_store() -> dist.Store:
    return next(iter(dist.rendezvous("env://", *get_rank_and_size())))[0]


def _open_run_store() -> dist.Store:
    return dist.PrefixStore(f"run{next(_run_numbers)}", _get_store())


def enter_run() -> None:
    """Enter a run: process 0 returns; the others serve its runs until process 0 ends."""
    rank, _ = get_rank_and_size()
    if rank:
        record(_serve_runs)()  # torchrun's summary then has the error
        raise SystemExit(0)
    _register_exit()


@cache
def _register_exit() -> None:
    atexit.register(_end_processes)


def _end_processes() -> None:
    if not is_torchrun_process():  # a process that this one forked
        return
    _open_run_store().set("job", b"")
    _wait_for_processes()
    _, total = get_rank_and_size()
    _count_arrival(_get_store(), "left", total)
    try:
        # This process may host the store, so it leaves last.
        _get_store().wait(["all left"], timedelta(seconds=_GRACE))
    except dist.DistStoreError:
        # After exit status 0, torchrun would wait for them.
        hanging = total - _get_store().add("left", 0)
        print(f"{hanging} of torchrun's {total} processes hang.", file=sys.stderr)
        worker.flush_outputs()
        os._exit(1)


def _count_arrival(store: dist.Store, event: str, total: int) -> None:
    """Count this process at `event`; the last of `total` processes sets the key `all {event}`."""
    if store.add(event, 1) == total:
        store.set(f"all {event}", b"")


def _set_bytes(store: dist.Store, key: str, data: bytes) -> None:
    chunks = [data[i : i + _CHUNK_BYTES] for i in range(0, len(data), _CHUNK_BYTES)]
    for number, chunk in enumerate(chunks):
        store.set(f"{key}/{number}", chunk)
    store.set(key, str(len(chunks)))


def _get_bytes(store: dist.Store, key: str) -> bytes:
    """Return the value of `key` that `_set_bytes` sets, waiting for it."""
    return b"".join(store.get(f"{key}/{number}") for number in range(int(store.get(key))))


def _delete_bytes(store: dist.Store, key: str) -> None:
    for number in range(int(store.get(key))):
        store.delete_key(f"{key}/{number}")


# Process 0.


def run_on_processes(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    world_size: int,
    backend: str,
    device: str,
    timeout: float,
) -> list[worker.Report | None]:
    """Run `fn(*args)` on the first processes; None for a rank that did not finish in time."""
    job = worker.Job(world_size, backend, device, timeout, "", os.getpid(), torch.get_rng_state())
    call = launch.pickle_call(fn, args)
    _wait_for_processes()
    store = _open_run_store()
    _set_bytes(store, "call", call)
    store.set("job", pickle.dumps(job))
    _wait_for_gpus(store, job)
    deadline = time.monotonic() + job.timeout + _GRACE
    _run_and_report(store, job, 0)
    # torchrun notices a rank that died: it ends the others and names it.
    while not store.check(["all reported"]) and time.monotonic() < deadline:
        if store.check([_FAILED_KEY]):
            deadline = min(deadline, time.monotonic() + _GRACE)
        time.sleep(0.005)
    if store.check(["all reported"]):
        _delete_bytes(store, "call")
    reports = [_read_report(store, rank) for rank in range(job.world_size)]
    store.set("received", b"")
    return reports


def _read_report(store: dist.Store, rank: int) -> worker.Report | None:
    name = f"report{rank}"
    if not store.check([name]):
        return None
    data = _get_bytes(store, name)
    _delete_bytes(store, name)
    return pickle.loads(data)


@cache
def _wait_for_processes() -> None:
    """Wait until all processes have reached their first run."""
    _, total = get_rank_and_size()
    _count_arrival(_get_store(), "arrived", total)
    try:
        _get_store().wait(["all arrived"], timedelta(seconds=_ARRIVAL_TIMEOUT))
    except dist.DistStoreError:
        raise RuntimeError(
            f"{_get_store().add('arrived', 0)} of torchrun's {total} processes called run() within "
            f"{_ARRIVAL_TIMEOUT:g} s: all processes must call it"
        ) from None


# All other processes.


def _serve_runs() -> None:
    """Take part in every run of process 0 that needs this rank, until process 0 ends."""
    rank, total = get_rank_and_size()
    _count_arrival(_get_store(), "arrived", total)
    while True:
        store = _open_run_store()
        store.wait(["job"], _NO_TIMEOUT)
        message = store.get("job")
        if not message:
            _count_arrival(_get_store(), "left", total)
            return
        job = pickle.loads(message)
        if rank < job.world_size:
            _wait_for_gpus(store, job)
            report = _run_and_report(store, job, rank)
            _check_on_process_0(store, job, rank, report)


def _check_on_process_0(
    store: dist.Store, job: worker.Job, rank: int, report: worker.Report
) -> None:
    """Raise the cause of a failure if process 0 hangs, and so cannot raise it.

    Under nccl, process 0 cannot return from a collective that this rank does not enter.
    """
    is_cause = report.has_failed and not report.is_peer_failure
    patience = _GRACE if is_cause and job.uses_nccl else job.timeout + 2 * _GRACE
    try:
        store.wait(["received"], timedelta(seconds=patience if is_cause else patience + _GRACE))
    except dist.DistStoreError:
        if store.add("raised", 1) > 1:
            time.sleep(job.timeout)  # torchrun ends this process once another one has raised
        if is_cause:
            raise RuntimeError(f"rank {rank} of {job.world_size} raised {report.error}") from None
        raise RuntimeError(
            f"rank 0 of {job.world_size} did not finish within {job.timeout:g} s"
        ) from None


# All processes.


def _wait_for_gpus(store: dist.Store, job: worker.Job) -> None:
    """Wait until all ranks have used their GPU; the run's time counts from then."""
    if job.device == "cpu":
        return
    worker.select_gpu(int(os.environ["LOCAL_RANK"]))
    _count_arrival(store, "met", job.world_size)
    store.wait(["all met"], timedelta(seconds=worker.START_TIMEOUT))


def _run_and_report(store: dist.Store, job: worker.Job, rank: int) -> worker.Report:
    """Run one job as `rank`, and put its report into the store."""
    report = _execute_job(store, job, rank)
    _set_bytes(store, f"report{rank}", pickle.dumps(report))
    if report.has_failed:
        store.set(_FAILED_KEY, b"")
    _count_arrival(store, "reported", job.world_size)
    return report


def _execute_job(store: dist.Store, job: worker.Job, rank: int) -> worker.Report:
    worker.current_job = job
    try:
        with _isolate_state(job):
            dist.init_process_group(
                job.backend,
                rank=rank,
                world_size=job.world_size,
                store=store,
                timeout=timedelta(seconds=job.timeout),
            )
            report = worker.make_report(
                worker.call_and_synchronize(job, *pickle.loads(_get_bytes(store, "call")))
            )
            dist.barrier()  # no rank leaves while a peer still needs its sockets
            return report
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # process 0 must learn of every other error
        report = worker.make_error_report(error)
        if not dist.is_initialized():  # then a peer's failure can only show as one of these
            texts = "onnect", "imed out", "imeout"
            report.is_peer_failure = any(text in report.error for text in texts)
        return report
    finally:
        while _cleanups:
            _cleanups.pop()()
        worker.current_job = None
        # Objects that use a group must be freed before it: DDP, as the group's last owner, would
        # wait for gloo's threads while these wait for DDP.
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def _isolate_state(job: worker.Job) -> Iterator[None]:
    """Set up the state that `run` gives to a rank it starts, and restore this process's own."""
    threads, hook = torch.get_num_threads(), sys.excepthook
    gpus = [] if job.device == "cpu" else [gpu.get_device_module().current_device()]
    with torch.random.fork_rng(gpus, device_type=gpu.get_device_type()), warnings.catch_warnings():
        torch.set_rng_state(job.rng_state)
        torch.set_num_threads(1)
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.")
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            sys.excepthook = hook  # each new group prefixes the hook's output with "[rank0]: "
