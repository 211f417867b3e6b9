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

from . import start, worker

_ARRIVAL = 300.0  # seconds for processes to reach their first run, in sequence
_GRACE = 5.0  # seconds for the others once a rank has failed
_FOR_EVER = timedelta(days=365)
_CHUNK = 2**22  # bytes; the launcher's store takes no value of more than 8 MiB
_FAILED = "failed"  # key in the store: a rank of this run has failed

_numbers = count()  # numbers of the runs, equal in all processes

# Children of torchrun's processes inherit the environment, but are not torchrun's: this says whose
# the environment is. A launcher started by one gives its processes another address.
_MARK = "SHARDLAB_TORCHRUN_PROCESS"


def _own() -> int | None:
    """Return the id of this environment's process that torchrun started; None if there is none."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    address = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    if os.environ.get(_MARK, "").split()[:1] != [address]:
        os.environ[_MARK] = f"{address} {os.getpid()}"
    return int(os.environ[_MARK].split()[1])


_process = _own()

_parting: list[Callable[[], None]] = []


def at_parting(call: Callable[[], None]) -> None:
    """Register `call()` for the end of this run, if this process goes on to another run.

    For libraries that keep a run's groups as long as the process lives. No effect outside a run.
    """
    if worker._inside is not None and call not in _parting:
        _parting.append(call)


def launched() -> bool:
    """Return True if torchrun, and not `run`, started this very process."""
    return worker._inside is None and _process == os.getpid()


def world() -> tuple[int, int]:
    """Return this process's rank among all of torchrun's processes, and their number."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


@cache
def _store() -> dist.Store:
    return next(iter(dist.rendezvous("env://", *world())))[0]


def _next_run() -> dist.Store:
    return dist.PrefixStore(f"run{next(_numbers)}", _store())


def enter() -> None:
    """Enter a run: process 0 returns; the others stay here until process 0 ends."""
    rank, _ = world()
    if rank:
        record(_serve)()  # torchrun's summary then has the error
        raise SystemExit(0)
    _at_the_end()


@cache
def _at_the_end() -> None:
    atexit.register(_end_all)


def _end_all() -> None:
    if not launched():  # a process that this one forked
        return
    _next_run().set("job", b"")
    _await_all()
    _, total = world()
    _arrive(_store(), "left", total)
    try:
        _store().wait(["all left"], timedelta(seconds=_GRACE))  # it may host the store: last out
    except dist.DistStoreError:
        # After exit status 0, torchrun would wait for them.
        hang = total - _store().add("left", 0)
        print(f"{hang} of torchrun's {total} processes hang.", file=sys.stderr)
        worker.flush()
        os._exit(1)


def _arrive(store: dist.Store, what: str, total: int) -> None:
    """Count this process among `total`; the last one sets the key `all …`."""
    if store.add(what, 1) == total:
        store.set(f"all {what}", b"")


# Values of any size in torch's store.


def _put(store: dist.Store, key: str, data: bytes) -> None:
    """Set `key` to `data`, in chunks."""
    pieces = [data[i : i + _CHUNK] for i in range(0, len(data), _CHUNK)]
    for number, piece in enumerate(pieces):
        store.set(f"{key}/{number}", piece)
    store.set(key, str(len(pieces)))


def _take(store: dist.Store, key: str) -> bytes:
    """Return the value of `key` that `_put` sets, waiting for it."""
    return b"".join(store.get(f"{key}/{number}") for number in range(int(store.get(key))))


def _drop(store: dist.Store, key: str) -> None:
    """Free the memory of the value of `key` that `_put` has set."""
    for number in range(int(store.get(key))):
        store.delete_key(f"{key}/{number}")


# Process 0.


def run_joined(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    world_size: int,
    backend: str,
    device: str,
    timeout: float,
) -> list[worker.Report | None]:
    """Run `fn(*args)` on the first processes; None for a rank that did not finish in time."""
    job = worker.Job(world_size, backend, device, timeout, "", os.getpid(), torch.get_rng_state())
    call = start.packed(fn, args)
    _await_all()
    store = _next_run()
    _put(store, "call", call)
    store.set("job", pickle.dumps(job))
    _meet(store, job)
    limit = time.monotonic() + job.timeout + _GRACE
    _take_part(store, job, 0)
    # torchrun notices a rank that died: it ends the others and names it.
    while not store.check(["all reported"]) and time.monotonic() < limit:
        if store.check([_FAILED]):
            limit = min(limit, time.monotonic() + _GRACE)
        time.sleep(0.005)
    if store.check(["all reported"]):
        _drop(store, "call")
    reports = [_report_of(store, rank) for rank in range(job.world_size)]
    store.set("heard", b"")
    return reports


def _report_of(store: dist.Store, rank: int) -> worker.Report | None:
    name = f"report{rank}"
    if not store.check([name]):
        return None
    data = _take(store, name)
    _drop(store, name)
    return pickle.loads(data)


@cache
def _await_all() -> None:
    """Wait until all processes have reached their first run."""
    _, total = world()
    _arrive(_store(), "here", total)
    try:
        _store().wait(["all here"], timedelta(seconds=_ARRIVAL))
    except dist.DistStoreError:
        there = f"{_store().add('here', 0)} of torchrun's {total} processes"
        words = f"{there} came to a run within {_ARRIVAL:g} s: all of them have to"
        raise RuntimeError(words) from None


# All other processes.


def _serve() -> None:
    """Serve as a rank of every run of process 0 with a rank for this process, until that ends."""
    rank, total = world()
    _arrive(_store(), "here", total)
    while True:
        store = _next_run()
        store.wait(["job"], _FOR_EVER)
        order = store.get("job")
        if not order:
            _arrive(_store(), "left", total)
            return
        job = pickle.loads(order)
        if rank < job.world_size:
            _meet(store, job)
            report = _take_part(store, job, rank)
            _make_sure_of_process_0(store, job, rank, report)


def _make_sure_of_process_0(
    store: dist.Store, job: worker.Job, rank: int, report: worker.Report
) -> None:
    """End the job with the cause if process 0 hangs and so does not receive it.

    Under nccl, process 0 cannot return from a collective that this rank does not enter.
    """
    cause = report.failed and not report.victim
    patience = _GRACE if cause and job.by_nccl else job.timeout + 2 * _GRACE
    try:
        store.wait(["heard"], timedelta(seconds=patience if cause else patience + _GRACE))
    except dist.DistStoreError:
        if store.add("said", 1) > 1:
            time.sleep(job.timeout)  # torchrun ends this process once the other one has raised
        if cause:
            raise RuntimeError(f"rank {rank} of {job.world_size} raised {report.error}") from None
        raise RuntimeError(
            f"rank 0 of {job.world_size} did not finish within {job.timeout:g} s"
        ) from None


# All processes.


def _meet(store: dist.Store, job: worker.Job) -> None:
    """Wait until all ranks have used their GPU; the run's time counts from then."""
    if job.device == "cpu":
        return
    worker.use_gpu(int(os.environ["LOCAL_RANK"]))
    _arrive(store, "met", job.world_size)
    store.wait(["all met"], timedelta(seconds=worker.START))


def _take_part(store: dist.Store, job: worker.Job, rank: int) -> worker.Report:
    """Run one job as `rank`, and put its report into the store."""
    report = _reported(store, job, rank)
    _put(store, f"report{rank}", pickle.dumps(report))
    if report.failed:
        store.set(_FAILED, b"")
    _arrive(store, "reported", job.world_size)
    return report


def _reported(store: dist.Store, job: worker.Job, rank: int) -> worker.Report:
    worker._inside = job
    try:
        with _as_if_alone(job):
            dist.init_process_group(
                job.backend,
                rank=rank,
                world_size=job.world_size,
                store=store,
                timeout=timedelta(seconds=job.timeout),
            )
            report = worker._returned(worker.called(job, *pickle.loads(_take(store, "call"))))
            dist.barrier()  # no rank leaves while a neighbour still needs its sockets
            return report
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # process 0 must learn of every other error
        report = worker._raised(error)
        if not dist.is_initialized():  # then a neighbour's failure can only show as one of these
            report.victim = any(words in report.error for words in ("onnect", "imed out", "imeout"))
        return report
    finally:
        while _parting:
            _parting.pop()()
        worker._inside = None
        # Objects that use a group must go before it: torch's DDP, as the group's last owner, waits
        # for gloo's threads while these wait for DDP, for ever.
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def _as_if_alone(job: worker.Job) -> Iterator[None]:
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
