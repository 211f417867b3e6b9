"""Sample the GPU, CPU, memory and network use of each rank of a job.

    python -m shardlab cluster watch runs/one --pid 4711        # ranks started by this process
    python -m shardlab cluster watch runs/one --job 1234        # ranks of this job on this node
    python -m shardlab cluster watch runs/one --draw            # draw report.svg from the samples

The first two write one line of JSON per rank and one for the machine every second until the ranks
have ended, into runs/one/samples-<machine>.jsonl, so that each node of a job has its own file. The
job is not changed: the numbers come from the operating system (psutil), and from NVIDIA's driver
(NVML, package nvidia-ml-py, this package's extra `gpu`) if a rank has a GPU.

"utilisation" is NVML's: the percentage of its sample period in which at least one kernel ran. It
does not tell which share of the GPU the kernel used.
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

from .report import draw_report

Sample = dict[str, Any]
NO_NVML = "no samples of GPUs: package nvidia-ml-py is missing (pip install nvidia-ml-py)"
# Reasons of a reduced GPU clock, by the name of NVML's bit.
THROTTLE_REASONS = {
    "nvmlClocksThrottleReasonSwPowerCap": "power cap",
    "nvmlClocksThrottleReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksThrottleReasonSwThermalSlowdown": "too hot (driver)",
    "nvmlClocksThrottleReasonHwThermalSlowdown": "too hot (hardware)",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "power brake",
}


def find_ranks(launcher: int | None = None, job: int | None = None) -> dict[int, int]:
    """Return the process of each rank on this machine: below a launcher, or of a Slurm job.

    A rank is a process with RANK in its environment; if there is none, a process with SLURM_PROCID
    (under srun torchrun itself has it, and so have the batch script and a watcher inside the job).
    Children inherit both, so the process of a rank that is nearest to the launcher counts. A
    launcher without ranks below it is itself a rank: its own RANK, or rank 0.
    """
    try:
        parent = psutil.Process(launcher) if launcher is not None else None
        processes = parent.children(recursive=True) if parent else list(psutil.process_iter())
    except (psutil.NoSuchProcess, OverflowError):
        raise ValueError(f"pid={launcher}: must be a process that runs here") from None
    by_rank: dict[int, tuple[int, int]] = {}  # by process: its parent, and RANK
    by_slurm: dict[int, tuple[int, int]] = {}
    for process in sorted(processes, key=lambda process: (process.create_time(), process.pid)):
        with suppress(psutil.Error):  # ended meanwhile, or another user's
            environment, ppid = process.environ(), process.ppid()
            rank, step = read_rank(environment), environment.get("SLURM_STEP_ID", "")
            if rank is None or (not parent and environment.get("SLURM_JOB_ID") != str(job)):
                continue
            if "RANK" in environment:
                by_rank[process.pid] = ppid, rank
            elif not step or step != os.environ.get("SLURM_STEP_ID"):  # the watcher's own step
                by_slurm[process.pid] = ppid, rank
    ranked, found = by_rank or by_slurm, {}
    for pid, (ppid, rank) in ranked.items():
        if ranked.get(ppid, (0, None))[1] != rank:
            found.setdefault(rank, pid)
    if parent and not found:
        own = parent.environ().get("RANK", "")
        return {int(own) if own.isdigit() else 0: parent.pid}
    return dict(sorted(found.items()))


def _sample_process(process: psutil.Process) -> Sample:
    """Return a process's CPU and memory use. Raises psutil.Error if it has ended."""
    with process.oneshot():
        if process.status() == psutil.STATUS_ZOMBIE:
            raise psutil.NoSuchProcess(process.pid)
        return {
            "pid": process.pid,
            "cpu_percent": process.cpu_percent(),  # of one core, since the last sample
            "memory_bytes": process.memory_info().rss,
            "threads": process.num_threads(),
        }


def _find_device(nvml: Any, environment: Mapping[str, str]) -> Any:
    """Return NVML's handle of a rank's GPU, or None. CUDA numbers only visible GPUs."""
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


def _sample_gpu(nvml: Any, device: Any) -> Sample:
    """Return NVML's numbers for a GPU; None for a number that the GPU does not provide."""

    def query(question: str, *more: Any) -> Any:
        try:
            return getattr(nvml, question)(device, *more)
        except nvml.NVMLError:
            return None

    busy, memory = query("nvmlDeviceGetUtilizationRates"), query("nvmlDeviceGetMemoryInfo")
    milliwatts = query("nvmlDeviceGetPowerUsage")
    reasons = query("nvmlDeviceGetCurrentClocksThrottleReasons")
    names = [name for bit, name in THROTTLE_REASONS.items() if (reasons or 0) & getattr(nvml, bit)]
    return {
        "utilisation_percent": busy and busy.gpu,
        "memory_busy_percent": busy and busy.memory,  # share of time with reads or writes
        "memory_bytes": memory and memory.used,
        "memory_total_bytes": memory and memory.total,
        "power_watts": milliwatts and milliwatts / 1000,
        "sm_clock_mhz": query("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        "throttled": None if reasons is None else names,
    }


def _load_nvml() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def sample_ranks(
    folder: str | Path, pids: Mapping[int, int], interval: float = 1.0, seconds: float | None = None
) -> Path:
    """Sample ranks into a file in `folder` until they end, or for `seconds`; return the file.

    pids: the process of each rank on this machine. interval: seconds between samples.
    """
    nvml, node, ranks = _load_nvml(), platform.node(), {}
    for rank, pid in pids.items():
        process = psutil.Process(pid)
        process.cpu_percent()  # the first answer is 0, the next covers the time since
        ranks[rank] = process, _find_device(nvml, process.environ()) if nvml else None
    path = options.make_folder("folder", folder) / f"samples-{node}.jsonl"
    begin = time.monotonic()
    with path.open("a", encoding="utf-8") as file:
        while ranks and (seconds is None or time.monotonic() - begin < seconds):
            time.sleep(interval)
            network, now = psutil.net_io_counters(), {"time": time.time(), "node": node}
            wire = {"sent_bytes": network.bytes_sent, "received_bytes": network.bytes_recv}
            lines = [now | wire]
            for rank, (process, device) in list(ranks.items()):
                try:
                    lines.append(now | {"rank": rank} | _sample_process(process))
                except psutil.Error:
                    del ranks[rank]
                    continue
                if device is not None:
                    lines[-1]["gpu"] = _sample_gpu(nvml, device)
            file.writelines(json.dumps(line) + "\n" for line in lines)
            file.flush()
    return path


def add_watch(commands: argparse._SubParsersAction) -> None:
    """Add `watch` to the command line."""
    parser = options.add_parser(commands, "watch", __doc__)
    parser.add_argument("folder", help="folder of samples and metrics.jsonl", metavar="FOLDER")
    options.add_option(parser, "pid", "process that started the ranks: torchrun", "PID", int)
    options.add_option(parser, "job", "Slurm job with ranks on this machine", "NUMBER", int)
    parser.add_argument("--draw", action="store_true", help="only draw FOLDER/report.svg")
    parser.set_defaults(command=_main)


def _main(args: argparse.Namespace) -> int:
    args.folder = options.parse_path("folder", args.folder)
    if args.draw:
        alt = "What each rank of the job used over time, and the duration of its steps."
        picture, path = draw_report(args.folder), args.folder / "report.svg"
        options.write_file("folder", path, lambda part: show.save_svg(picture, part, alt))
        print(path)
        return 0
    if (args.pid is None) == (args.job is None):
        raise ValueError(f"pid={args.pid}, job={args.job}: must be exactly one of the two")
    if args.job is None:
        check_integer(pid=args.pid)
    else:
        check_integer(job=args.job)
    pids = find_ranks(args.pid, args.job)
    if not pids:
        raise ValueError(f"job={args.job}: has no ranks on this machine")
    print(f"ranks {', '.join(map(str, pids))} on {platform.node()}", flush=True)
    if find_spec("pynvml") is None:
        print(NO_NVML, flush=True)
    print(sample_ranks(args.folder, pids))
    return 0
