"""The same `run` when the ranks exist already: in a script that torchrun started.

    torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 4 code/lessons/collectives.py

Process 0 executes the script, as if it were alone. The others, on one machine or many, execute it
up to its first `run`, are ranks of this and all further runs, and end when process 0 ends: what
stands between the runs is computed, printed and written once. Functions, arguments and results
travel through the launcher's store, by value, so nothing depends on a file system that all machines
see. What a rank prints goes where torchrun sends it.
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

_ARRIVAL = 300.0  # seconds that processes may need until their first run, one after another
_GRACE = 5.0  # seconds that others may still take once a rank has failed
_FOR_EVER = timedelta(days=365)
_CHUNK = 2**22  # bytes; the launcher's store takes no value of more than 8 MiB
_FAILED = "failed"  # the key that says that a rank of this run has

_numbers = count()  # of the runs, in every process alike

# What a process of torchrun's starts inherits its environment, and is not torchrun's: this tells it
# whose the environment is. A launcher started from there gives its processes another address.
_MARK = "SHARDLAB_TORCHRUN_PROCESS"


def _own() -> int | None:
    """This process's number if torchrun started it, None otherwise."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    address = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    if os.environ.get(_MARK, "").split()[:1] != [address]:
        os.environ[_MARK] = f"{address} {os.getpid()}"
    return int(os.environ[_MARK].split()[1])


_process = _own()

_parting: list[Callable[[], None]] = []


def at_parting(call: Callable[[], None]) -> None:
    """Have `call()` called at the end of this run, if this process goes on to another one.

    For libraries that keep a run's groups for as long as the process lives. Outside of a run it
    does nothing.
    """
    if worker._inside is not None and call not in _parting:
        _parting.append(call)


def launched() -> bool:
    """Whether torchrun, and not `run`, started this very process."""
    return worker._inside is None and _process == os.getpid()


def world() -> tuple[int, int]:
    """This process's rank among all that torchrun started, and how many they are."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


@cache
def _store() -> dist.Store:
    return next(iter(dist.rendezvous("env://", *world())))[0]


def _next_run() -> dist.Store:
    return dist.PrefixStore(f"run{next(_numbers)}", _store())


def enter() -> None:
    """Come to a run: process 0 goes on, the others stay in here until process 0 ends."""
    rank, _ = world()
    if rank:
        record(_serve)()  # what it raises goes into torchrun's summary, too
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
        _store().wait(["all left"], timedelta(seconds=_GRACE))  # the store may be ours: we go last
    except dist.DistStoreError:
        # With the status 0 torchrun would wait for them.
        hang = total - _store().add("left", 0)
        print(f"{hang} of torchrun's {total} processes hang.", file=sys.stderr)
        worker.flush()
        os._exit(1)


def _arrive(store: dist.Store, what: str, total: int) -> None:
    """Count this process among `total`; the last of them sets the key `all …`."""
    if store.add(what, 1) == total:
        store.set(f"all {what}", b"")


# Values of any size in a store of torch's.


def _put(store: dist.Store, key: str, data: bytes) -> None:
    """Set `key` to `data`, in pieces."""
    pieces = [data[i : i + _CHUNK] for i in range(0, len(data), _CHUNK)]
    for number, piece in enumerate(pieces):
        store.set(f"{key}/{number}", piece)
    store.set(key, str(len(pieces)))


def _take(store: dist.Store, key: str) -> bytes:
    """What `_put` has set `key` to, or will set it to."""
    return b"".join(store.get(f"{key}/{number}") for number in range(int(store.get(key))))


def _drop(store: dist.Store, key: str) -> None:
    """Free the memory of what `_put` has set `key` to."""
    for number in range(int(store.get(key))):
        store.delete_key(f"{key}/{number}")


# What process 0 does.


def run_joined(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    world_size: int,
    backend: str,
    device: str,
    timeout: float,
) -> list[worker.Report | None]:
    """Run `fn(*args)` on the first processes; None stands for one that was not done in time."""
    job = worker.Job(world_size, backend, device, timeout, "", os.getpid(), torch.get_rng_state())
    call = start.packed(fn, args)
    _await_all()
    store = _next_run()
    _put(store, "call", call)
    store.set("job", pickle.dumps(job))
    _meet(store, job)
    limit = time.monotonic() + job.timeout + _GRACE
    _take_part(store, job, 0)
    # A rank that died is torchrun's to notice: it ends the others, and says which one it was.
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
    """Wait until all processes have come to their first run."""
    _, total = world()
    _arrive(_store(), "here", total)
    try:
        _store().wait(["all here"], timedelta(seconds=_ARRIVAL))
    except dist.DistStoreError:
        there = f"{_store().add('here', 0)} of torchrun's {total} processes"
        words = f"{there} came to a run within {_ARRIVAL:g} s: all of them have to"
        raise RuntimeError(words) from None


# What every other process does.


def _serve() -> None:
    """Be a rank of every run of process 0 that has one for this process, until process 0 ends."""
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
    """End the job, with the cause, when process 0 does not hear of it because it hangs itself.

    Under nccl it cannot come back from a collective in which this rank is missing.
    """
    cause = report.failed and not report.victim
    patience = _GRACE if cause and job.by_nccl else job.timeout + 2 * _GRACE
    try:
        store.wait(["heard"], timedelta(seconds=patience if cause else patience + _GRACE))
    except dist.DistStoreError:
        if store.add("said", 1) > 1:
            time.sleep(job.timeout)  # torchrun ends this process once the other one has said it
        if cause:
            raise RuntimeError(f"rank {rank} of {job.world_size} raised {report.error}") from None
        raise RuntimeError(
            f"rank 0 of {job.world_size} did not finish within {job.timeout:g} s"
        ) from None


# What all of them do.


def _meet(store: dist.Store, job: worker.Job) -> None:
    """Wait until all ranks have used their GPU: the run's time counts from then."""
    if job.device == "cpu":
        return
    worker.use_gpu(int(os.environ["LOCAL_RANK"]))
    _arrive(store, "met", job.world_size)
    store.wait(["all met"], timedelta(seconds=worker.START))


def _take_part(store: dist.Store, job: worker.Job, rank: int) -> worker.Report:
    """Be `rank` of one run, and leave its report in the store."""
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
            dist.barrier()  # nobody leaves while a neighbour still needs its sockets
            return report
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever else it is, process 0 has to hear of it
        report = worker._raised(error)
        if not dist.is_initialized():  # no neighbour's end can show here but as one of these
            report.victim = any(words in report.error for words in ("onnect", "imed out", "imeout"))
        return report
    finally:
        while _parting:
            _parting.pop()()
        worker._inside = None
        # What belongs to a group goes before it: torch's DDP, when it is the group's last owner,
        # waits for gloo's threads while they wait for it, for ever.
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def _as_if_alone(job: worker.Job) -> Iterator[None]:
    """What a rank that `run` starts finds, and this process's own state again afterwards."""
    threads, hook = torch.get_num_threads(), sys.excepthook
    gpus = [] if job.device == "cpu" else [gpu.module().current_device()]
    with torch.random.fork_rng(gpus, device_type=gpu.kind()), warnings.catch_warnings():
        torch.set_rng_state(job.rng_state)
        torch.set_num_threads(1)
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.")
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            sys.excepthook = hook  # each new group puts "[rank0]: " before what the last one says
