"""What a job needs around its training: a start under any launcher, a clean stop, and a log."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

from shardlab.launcher import Place, place
from shardlab.model import parameter_count
from shardlab.shapes import Config

from . import saved

SIGNALS = signal.SIGTERM, signal.SIGUSR1  # stop after the current step, and save
# Dense products of 16-bit numbers, in FLOP/s: the makers' data sheets.
PEAKS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}


def launched() -> Place:
    """Where torchrun or srun has put this process; from a shell it is the only one."""
    return place(os.environ) or Place(rank=0, size=1, local_rank=0)


def device() -> torch.device:
    """This rank's GPU, or the CPU. Where Slurm gives each task one GPU, that is number 0."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())


@record  # an error of any rank is written down with its time: see torchrun's --log-dir
def run(main: Callable[..., Any], options: dict[str, Any]) -> None:
    """Make the process group, call `main(**options)` in its folder, and end cleanly.

    options: also `timeout`, the seconds that a rank waits for another one in a collective.
    What all ranks refuse, a damaged checkpoint for instance, ends them with status 2 and one line.
    """
    at = launched()
    os.environ.update(at.environment())
    timeout = timedelta(seconds=options.pop("timeout"))
    if (gpu := device()).type == "cuda":
        torch.cuda.set_device(gpu)
    dist.init_process_group(
        store=dist.HashStore() if at.size == 1 else None,  # no port for one process
        rank=0 if at.size == 1 else -1,
        world_size=1 if at.size == 1 else -1,
        timeout=timeout,
        device_id=gpu if gpu.type == "cuda" else None,
    )
    rest = {name: value for name, value in options.items() if name != "folder"}
    try:
        with saved.entered(Path(options["folder"]), rest):
            main(**options)
        dist.barrier()  # nobody closes its connections while another one still needs them
    except saved.Refused as error:
        refuse(error, at.rank)
    finally:
        _end_workers()
        # A model wrapped by DDP went with `main`'s variables: as a group's last owner it can wait
        # for gloo's threads while they wait for it.
        dist.destroy_process_group()


def refuse(error: Exception, rank: int) -> NoReturn:
    """End the process with status 2; rank 0 says why, in one line."""
    if rank == 0:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
    sys.exit(2)


def ignore_signals(_worker: int) -> None:
    """In a process that loads data: a job's signals are for its ranks, which want the last batch.

    Without it, SIGTERM to all processes of a job ends the loader's first, and its rank fails.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _end_workers() -> None:
    """End what `ignore_signals` has made deaf: after an error Python would wait for them."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's raises an error for each of them
    for worker in multiprocessing.active_children():
        worker.kill()


class Stop:
    """Notices SIGTERM and SIGUSR1, on whichever rank they arrive."""

    def __init__(self) -> None:
        self.asked = self.agreed = False
        for number in SIGNALS:
            signal.signal(number, self._notice)

    def _notice(self, _number: int, _frame: Any) -> None:
        self.asked = True

    def on_any_rank(self, device: torch.device) -> bool:
        """Whether any rank was asked to stop. Every rank calls it, and all get the same answer."""
        flag = torch.tensor(float(self.asked), device=device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)  # a scalar
        self.agreed = flag.item() > 0
        return self.agreed


class Meter:
    """Rank 0's log: a JSON object a line in `folder/metrics.jsonl`, and a progress bar.

    The bar is drawn in a terminal alone. peak: FLOP/s of one device; None: that of its data sheet,
    and no utilisation where PEAKS does not know it. MFU counts 6 FLOP per parameter and token and
    12·L·h·s for attention (Chowdhery et al. 2022, arXiv 2204.02311, appendix B).
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        steps: int,
        batch: int,
        done: int,
        device: torch.device,
        peak: float | None = None,
    ):
        from tqdm import tqdm

        self.device, self.tokens = device, batch * config.seq  # of a step, on all ranks
        attention = 12 * config.layers * config.hidden * config.seq
        self.flops = (6 * parameter_count(config) + attention) * self.tokens
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self.peak = peak or next((p for gpu, p in PEAKS.items() if gpu in name), None)
        self.first, self.since, self.then = dist.get_rank() == 0, done, time.perf_counter()
        self.file = open(folder / "metrics.jsonl", "a", buffering=1) if self.first else None
        hidden = None if self.first else True  # None: only where standard error is a terminal
        self.bar = tqdm(total=steps, initial=done, disable=hidden, unit="step")

    def write(self, step: int, **values: float | Tensor) -> None:
        """A line for the steps since the last one. Every rank calls it: memory is the largest's."""
        memory = torch.tensor(float(held(self.device)), device=self.device)
        dist.all_reduce(memory, dist.ReduceOp.MAX)  # a scalar
        numbers = {name: float(value) for name, value in values.items()}  # waits for the GPU
        now = time.perf_counter()
        seconds = (now - self.then) / max(1, step - self.since)
        self.since, self.then = step, now
        rate = self.flops / seconds / dist.get_world_size()
        line = {
            "step": step,
            "time": time.time(),
            **numbers,
            "seconds": seconds,
            "tokens_per_second": self.tokens / seconds,
            "mfu": rate / self.peak if self.peak else None,
            "memory_bytes": int(memory),
        }
        if self.first:
            print(json.dumps(line), file=self.file)
            self.bar.n = step
            self.bar.set_postfix(loss=f"{numbers.get('loss', 0):.3f}")

    def note(self, **values: float) -> None:
        """A line that is no step: a validation, the end."""
        if self.first:
            print(json.dumps(values), file=self.file)

    def restart(self) -> None:
        """Leave out of the steps' time what came between: a validation, a checkpoint."""
        self.then = time.perf_counter()

    def close(self) -> None:
        """End the bar and the file."""
        self.bar.close()
        if self.file:
            self.file.close()


def held(device: torch.device) -> int:
    """The most bytes that this rank has held: on its GPU, or of the process without one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
