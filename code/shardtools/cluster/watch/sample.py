"""Samples of a job: how much GPU, CPU, memory and network each of its ranks uses.

    python -m shardlab cluster watch runs/one --pid 4711        # ranks below this launcher, or it
    python -m shardlab cluster watch runs/one --job 1234        # ranks of this Slurm job, here
    python -m shardlab cluster watch runs/one --draw            # report.svg from what was sampled

The first two write a line of JSON for each rank and one for the machine, every second, until the
ranks have ended: into runs/one/samples-<machine>.jsonl, so that each node of a job has a file of
its own. The job is not changed: the operating system (psutil) gives the numbers, and NVIDIA's
driver (NVML, package nvidia-ml-py, this package's extra `gpu`) if a rank has a GPU.

"utilisation" is NVML's: per cent of its sample period in which at least one kernel ran. It does not
say how much of the GPU that kernel filled.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from shardlab.common import show
from shardlab.common.arguments import check_integer
from shardlab.common.launcher import read_local_rank, read_rank
from shardtools import options

from .report import report

Line = dict[str, Any]
NO_PACKAGE = "GPUs are left out: that takes the package nvidia-ml-py (pip install nvidia-ml-py)"
# Reasons of a reduced GPU clock: names of NVML's bits, and the words for them.
THROTTLES = {
    "nvmlClocksThrottleReasonSwPowerCap": "power cap",
    "nvmlClocksThrottleReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksThrottleReasonSwThermalSlowdown": "too hot (driver)",
    "nvmlClocksThrottleReasonHwThermalSlowdown": "too hot (hardware)",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "power brake",
}


def find(launcher: int | None = None, job: int | None = None) -> dict[int, int]:
    """Return the process of each rank on this machine: below a launcher, or of a Slurm job.

    A rank is a process with RANK in its environment; if there is none, one with SLURM_PROCID, which
    torchrun itself has under srun, and so have the batch script and a watcher inside the job.
    Children inherit both, so the process of a rank that is nearest to the launcher counts. A
    launcher without ranks below it is a rank itself, that of its own RANK, or rank 0.
    """
    try:
        top = psutil.Process(launcher) if launcher is not None else None
        processes = top.children(recursive=True) if top else list(psutil.process_iter())
    except (psutil.NoSuchProcess, OverflowError):
        raise ValueError(f"pid={launcher}: allowed are processes that run here") from None
    by_rank: dict[int, tuple[int, int]] = {}  # process -> its parent, and its number by RANK
    by_slurm: dict[int, tuple[int, int]] = {}
    for process in sorted(processes, key=lambda process: (process.create_time(), process.pid)):
        with suppress(psutil.Error):  # ended meanwhile, or another user's
            environment, parent = process.environ(), process.ppid()
            rank, step = read_rank(environment), environment.get("SLURM_STEP_ID", "")
            if rank is None or (not top and environment.get("SLURM_JOB_ID") != str(job)):
                continue
            if "RANK" in environment:
                by_rank[process.pid] = parent, rank
            elif not step or step != os.environ.get("SLURM_STEP_ID"):  # the watcher's own step
                by_slurm[process.pid] = parent, rank
    ranked, found = by_rank or by_slurm, {}
    for pid, (parent, rank) in ranked.items():
        if ranked.get(parent, (0, None))[1] != rank:
            found.setdefault(rank, pid)
    if top and not found:
        own = top.environ().get("RANK", "")
        return {int(own) if own.isdigit() else 0: top.pid}
    return dict(sorted(found.items()))


def _use(process: psutil.Process) -> Line:
    """Return what a process uses. Raises psutil.Error if it has ended."""
    with process.oneshot():
        if process.status() == psutil.STATUS_ZOMBIE:
            raise psutil.NoSuchProcess(process.pid)
        return {
            "pid": process.pid,
            "cpu_percent": process.cpu_percent(),  # of one core, since the last sample
            "memory_bytes": process.memory_info().rss,
            "threads": process.num_threads(),
        }


def _device(nvml: Any, environment: Mapping[str, str]) -> Any:
    """Return NVML's handle of a rank's GPU, or None: CUDA numbers the GPUs that a rank may see."""
    count = nvml.nvmlDeviceGetCount()
    listed = environment.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))))
    visible = [name.strip() for name in listed.split(",") if name.strip()]
    if not visible:
        return None
    name = visible[read_local_rank(environment) % len(visible)]
    try:
        if name.isdigit():
            return nvml.nvmlDeviceGetHandleByIndex(int(name))
        return nvml.nvmlDeviceGetHandleByUUID(name)
    except nvml.NVMLError:
        return None


def _gpu(nvml: Any, device: Any) -> Line:
    """Return NVML's numbers of a GPU; None for numbers that this GPU does not provide."""

    def ask(question: str, *more: Any) -> Any:
        try:
            return getattr(nvml, question)(device, *more)
        except nvml.NVMLError:
            return None

    busy, memory = ask("nvmlDeviceGetUtilizationRates"), ask("nvmlDeviceGetMemoryInfo")
    milliwatts = ask("nvmlDeviceGetPowerUsage")
    held = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    names = [ours for bit, ours in THROTTLES.items() if held and held & getattr(nvml, bit)]
    return {
        "utilisation_percent": busy and busy.gpu,
        "memory_busy_percent": busy and busy.memory,  # share of time with reads or writes
        "memory_bytes": memory and memory.used,
        "memory_total_bytes": memory and memory.total,
        "power_watts": milliwatts and milliwatts / 1000,
        "sm_clock_mhz": ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        "throttled": None if held is None else names,
    }


def _nvml() -> Any:
    """Return NVML, initialized, or None without a driver or the package."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def watch(
    folder: str | Path, pids: Mapping[int, int], every: float = 1.0, seconds: float | None = None
) -> Path:
    """Sample these ranks into `folder` until they have ended, or for `seconds`; return the file.

    pids: the process of each rank on this machine. every: seconds from one sample to the next.
    """
    nvml, node, ranks = _nvml(), platform.node(), {}
    for rank, pid in pids.items():
        process = psutil.Process(pid)
        process.cpu_percent()  # the first answer is 0: later ones cover the time since then
        ranks[rank] = process, _device(nvml, process.environ()) if nvml else None
    path = options.folder("folder", folder) / f"samples-{node}.jsonl"
    begin = time.monotonic()
    with path.open("a", encoding="utf-8") as file:
        while ranks and (seconds is None or time.monotonic() - begin < seconds):
            time.sleep(every)
            network, now = psutil.net_io_counters(), {"time": time.time(), "node": node}
            wire = {"sent_bytes": network.bytes_sent, "received_bytes": network.bytes_recv}
            lines = [now | wire]
            for rank, (process, device) in list(ranks.items()):
                try:
                    lines.append(now | {"rank": rank} | _use(process))
                except psutil.Error:
                    del ranks[rank]
                    continue
                if device is not None:
                    lines[-1]["gpu"] = _gpu(nvml, device)
            file.writelines(json.dumps(line) + "\n" for line in lines)
            file.flush()
    return path


def add_watch(commands: argparse._SubParsersAction) -> None:
    """Add `watch` to the command line."""
    parser = options.command(commands, "watch", __doc__)
    parser.add_argument("folder", help="of the job's metrics; samples go there", metavar="FOLDER")
    options.add(parser, "pid", "of torchrun, or whatever started the ranks", "PID", int)
    options.add(parser, "job", "of Slurm: all its ranks on this machine", "NUMBER", int)
    parser.add_argument("--draw", action="store_true", help="draw FOLDER/report.svg, and no more")
    parser.set_defaults(command=_main)


def _main(chosen: argparse.Namespace) -> int:
    chosen.folder = options.parse_path("folder", chosen.folder)
    if chosen.draw:
        alt = "What each rank of the job used over time, and the duration of its steps."
        picture, path = report(chosen.folder), chosen.folder / "report.svg"
        options.written("folder", path, lambda part: show.save_svg(picture, part, alt))
        print(path)
        return 0
    if (chosen.pid is None) == (chosen.job is None):
        raise ValueError(f"pid={chosen.pid}, job={chosen.job}: allowed is one of the two")
    if chosen.job is None:
        check_integer(pid=chosen.pid)
    else:
        check_integer(job=chosen.job)
    pids = find(chosen.pid, chosen.job)
    if not pids:
        raise ValueError(f"job={chosen.job}: no ranks")
    print(f"ranks {', '.join(map(str, pids))} on {platform.node()}", flush=True)
    if find_spec("pynvml") is None:
        print(NO_PACKAGE, flush=True)
    print(watch(chosen.folder, pids))
    return 0
