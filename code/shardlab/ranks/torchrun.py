"""The same `run` when the ranks exist already: in a script that torchrun started.

    torchrun --nproc-per-node 4 --local-ranks-filter 0 code/lessons/collectives.py

Every process, on one machine or many, executes the whole script. At each `run`, the first
`world_size` of them form a process group of their own and call the function; then all of them
receive all results, as `run` promises. Prints go where torchrun sends them.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from itertools import count
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from . import worker

_runs = count()


def launched() -> bool:
    """Whether torchrun, and not `run`, started this process."""
    return worker._inside is None and "TORCHELASTIC_RUN_ID" in os.environ


def world() -> tuple[int, int]:
    """This process's rank among all that torchrun started, and how many they are."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


@cache
def _store() -> dist.Store:
    rank, total = world()
    return next(iter(dist.rendezvous("env://", rank, total)))[0]


def run_joined(
    fn: Callable[..., Any], args: tuple[Any, ...], job: worker.Job
) -> list[tuple[str, Any]]:
    """Take part in one run; return ("returned", value) or ("raised", report) of each rank."""
    rank, _ = world()
    store = dist.PrefixStore(f"run{next(_runs)}", _store())
    if rank < job.world_size:
        store.set(f"outcome{rank}", _outcome(fn, args, job, rank, store))
    names = [f"outcome{r}" for r in range(job.world_size)]
    # A rank that died is torchrun's to notice: it ends the others, and says which one it was.
    store.wait(names, timedelta(seconds=job.timeout))
    return [torch.load(io.BytesIO(store.get(name)), "cpu", weights_only=False) for name in names]


def _outcome(
    fn: Callable[..., Any], args: tuple[Any, ...], job: worker.Job, rank: int, store: dist.Store
) -> bytes:
    buffer = io.BytesIO()
    worker._inside = job
    try:
        if job.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        limit = timedelta(seconds=job.timeout)
        dist.init_process_group(
            job.backend, rank=rank, world_size=job.world_size, store=store, timeout=limit
        )
        torch.save(("returned", fn(*args)), buffer, pickle_module=cloudpickle)
        dist.barrier()  # nobody leaves while a neighbour still needs its sockets
    except Exception as error:
        buffer = io.BytesIO()
        torch.save(("raised", worker._raised(error)), buffer)
    finally:
        worker._inside = None
        if dist.is_initialized():
            dist.destroy_process_group()
    return buffer.getvalue()
