"""GPU use of a job: samples, the straggler, and the timeline of all ranks."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import types

import pytest
from commands import run_main
from timing import timing_claims

from shardlab.common import show
from shardtools.cluster.watch import flight, report, sample, straggler

COLORS = show.RANK_COLORS


@pytest.fixture
def launcher_pid(no_leftovers):
    """Start a launcher with two ranks, one of which has started a process of its own."""
    script = "RANK=1 sh -c 'sleep 60 & wait' & RANK=0 sleep 60 & sleep 60 & wait"
    launcher = subprocess.Popen(["setsid", "sh", "-c", script])
    deadline = time.monotonic() + 60
    while len(sample.find_ranks(launcher.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    yield launcher.pid
    os.killpg(launcher.pid, signal.SIGKILL)
    launcher.wait()


def run_watch(*words):
    parser = argparse.ArgumentParser()
    sample.add_watch(parser.add_subparsers())
    chosen = parser.parse_args(["watch", *map(str, words)])
    return chosen.command(chosen)


def test_ranks_are_found_below_their_launcher(launcher_pid):
    import psutil

    found = sample.find_ranks(launcher_pid)
    assert list(found) == [0, 1]
    assert psutil.Process(found[0]).name() == "sleep"
    assert psutil.Process(found[1]).name() == "sh", "what a rank starts is not the rank"


def test_a_launcher_and_whoever_watches_are_no_ranks_of_their_job(no_leftovers, monkeypatch):
    """Under srun, the launcher, the batch script and a watcher have Slurm's rank variables, too."""
    from_slurm = {"SLURM_JOB_ID": "987654", "SLURM_PROCID": "0", "PATH": "/usr/bin:/bin"}
    script = "RANK=0 sleep 60 & RANK=1 sleep 60 & wait"
    launcher = subprocess.Popen(["setsid", "sh", "-c", script], env=from_slurm)
    deadline = time.monotonic() + 60
    while len(found := sample.find_ranks(job=987654)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(launcher.pid, signal.SIGKILL)
    launcher.wait()
    assert list(found) == [0, 1] and launcher.pid not in found.values()
    monkeypatch.setenv("SLURM_STEP_ID", "1")
    both = [
        subprocess.Popen(["sleep", "60"], env=from_slurm | {"SLURM_STEP_ID": step})
        for step in ("0", "1")
    ]
    time.sleep(0.1)
    found = sample.find_ranks(job=987654)
    for process in both:
        process.kill()
        process.wait()
    assert found == {0: both[0].pid}


@pytest.mark.alone
def test_samples_say_who_computes_and_who_waits(tmp_path, no_leftovers):
    busy = subprocess.Popen([sys.executable, "-c", "x = b'x' * 200_000_000\nwhile True: pass"])
    idle = subprocess.Popen(["sleep", "60"])
    try:
        time.sleep(0.3)
        path = sample.sample_ranks(tmp_path, {0: busy.pid, 1: idle.pid}, interval=0.2, seconds=1.5)
    finally:
        for process in (busy, idle):
            process.kill()
            process.wait()
    lines = report.read_samples(path)
    means = {}
    for rank in (0, 1):
        mine = [line for line in lines if line.get("rank") == rank]
        means[rank] = sum(line["cpu_percent"] for line in mine) / len(mine)
    with timing_claims():
        assert means[0] > 15 and means[1] < 5
    assert any(line.get("rank") == 0 and line["memory_bytes"] > 200e6 for line in lines)
    sent = [line["sent_bytes"] for line in lines if "sent_bytes" in line]
    assert len(sent) >= 4 and sent == sorted(sent)


def test_watching_ends_with_the_ranks(tmp_path, no_leftovers):
    with subprocess.Popen(["sleep", "0.5"]) as process:
        path = sample.sample_ranks(tmp_path, {0: process.pid}, interval=0.1)
    assert {line.get("rank") for line in report.read_samples(path)} == {0, None}


class NotSupported(Exception):
    """Base class of NVML's errors, with pynvml's name for it: NVMLError."""


def pretended_nvml():
    """Return a stub of NVML with two GPUs and the types of NVIDIA's API reference and pynvml.

    nvmlUtilization_t and nvmlMemory_t are structures; power is in mW, clocks in MHz, and reasons
    for a lower clock are bits of one number. It cannot change a GPU: it has no nvmlDeviceSet….
    """
    struct = types.SimpleNamespace
    return struct(
        NVMLError=NotSupported,
        NVML_CLOCK_SM=1,
        nvmlClocksThrottleReasonSwPowerCap=0x4,
        nvmlClocksThrottleReasonHwSlowdown=0x8,
        nvmlClocksThrottleReasonSwThermalSlowdown=0x20,
        nvmlClocksThrottleReasonHwThermalSlowdown=0x40,
        nvmlClocksThrottleReasonHwPowerBrakeSlowdown=0x80,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID={"GPU-aa": 0, "GPU-bb": 1}.get,
        nvmlDeviceGetUtilizationRates=lambda gpu: struct(gpu=90 + gpu, memory=30 + gpu),
        nvmlDeviceGetMemoryInfo=lambda gpu: struct(total=80 * 2**30, used=(10 + gpu) * 2**30),
        nvmlDeviceGetPowerUsage=lambda gpu: 412_345,
        nvmlDeviceGetClockInfo=lambda gpu, kind: 1980 if kind == 1 else None,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda gpu: 0x4 | 0x40 | 0x1,
    )


def start_on_gpus(**environment):
    return subprocess.Popen(["sleep", "60"], env={"PATH": "/usr/bin:/bin"} | environment)


@pytest.mark.parametrize(
    ("environment", "device"),
    [
        ({"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "1,0"}, 1),
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "0"}, 0),  # --gpus-per-task=1
        ({"SLURM_LOCALID": "1", "CUDA_VISIBLE_DEVICES": "GPU-aa,GPU-bb"}, 1),
        ({"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": ""}, None),
    ],
)
def test_a_gpus_numbers_come_from_the_ranks_own(
    monkeypatch, tmp_path, no_leftovers, environment, device
):
    monkeypatch.setitem(sys.modules, "pynvml", pretended_nvml())
    with start_on_gpus(**environment) as process:
        time.sleep(0.1)
        path = sample.sample_ranks(tmp_path, {0: process.pid}, interval=0.1, seconds=0.05)
        process.kill()
    (line,) = [line for line in report.read_samples(path) if "rank" in line]
    if device is None:
        assert "gpu" not in line
    else:
        assert line["gpu"] == {
            "utilisation_percent": 90 + device,
            "memory_busy_percent": 30 + device,
            "memory_bytes": (10 + device) * 2**30,
            "memory_total_bytes": 80 * 2**30,
            "power_watts": 412.345,
            "sm_clock_mhz": 1980,
            "throttled": ["power cap", "too hot (hardware)"],
        }


def write_samples(folder, gpu=False):
    """Write ten seconds of samples of two ranks, 3 MB sent in each, and steps of 0.5 s."""
    folder.mkdir(exist_ok=True)
    rows = []
    for t in range(11):
        for rank in (0, 1):
            use = {"cpu_percent": 50.0 + rank, "memory_bytes": 1e9 * (1 + rank), "threads": 4}
            own = {"utilisation_percent": 80 - rank, "memory_bytes": 4e9}
            row = {"time": 1000.0 + t, "node": "n", "rank": rank, "pid": 1} | use
            rows.append(row | ({"gpu": own} if gpu else {}))
        wire = {"interface": "lo", "sent_bytes": 3_000_000 * t, "received_bytes": 0}
        rows.append({"time": 1000.0 + t, "node": "n"} | wire)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "samples-n.jsonl").write_text(text + '{"time": 10')  # killed during a write
    steps = [{"step": i, "seconds": 0.5, "time": 1002 + i / 2} for i in range(12)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(s) + "\n" for s in steps))


@pytest.mark.parametrize("gpu", [False, True])
def test_the_report_draws_what_was_sampled(tmp_path, gpu):
    write_samples(tmp_path / "job", gpu)
    busy, memory, wire, steps = report.draw_report(tmp_path / "job").axes
    for rank, line in enumerate(busy.lines):
        assert line.get_color() == COLORS[rank]
        assert set(line.get_ydata()) == {80 - rank if gpu else 50 + rank}
    assert [set(line.get_ydata()) for line in memory.lines] == ([{4}, {4}] if gpu else [{1}, {2}])
    assert wire.lines[0].get_ydata() == pytest.approx([3.0] * 10)
    assert steps.lines[0].get_ydata() == pytest.approx([500.0] * 12)
    assert run_watch(tmp_path / "job", "--draw") == 0
    assert "<svg" in (tmp_path / "job/report.svg").read_text()


def test_broken_samples_are_named(tmp_path, capsys):
    (tmp_path / "samples-n.jsonl").write_bytes(b"x\n")
    status, _, error = run_main(capsys, "cluster", "watch", str(tmp_path), "--draw")
    assert status == 2 and error.count("\n") == 1 and str(tmp_path) in error
    assert not (tmp_path / "report.svg").exists()


# ---- the straggler: the lesson has a real one


def calls_at(late, steps=40, group="world"):
    """Return the records of four ranks, rank r being late[r] seconds behind in every step."""
    one = {"members": (0, 1, 2, 3), "op": "all_reduce", "sizes": (), "dtype": "", "line": 1}
    one |= {"location": "", "timeout": 60.0, "waiting": False}
    return {
        rank: [
            flight.Call(rank=rank, group=group, number=n + 1, created=n + seconds, **one)
            for n in range(steps)
        ]
        for rank, seconds in enumerate(late)
    }


def test_arrivals_say_how_late_and_how_often_last():
    found = straggler.measure_delays(calls_at([0.01, 0.0, 0.07, 0.02]))
    assert [a.median_delay for a in found] == pytest.approx([0.01, 0.0, 0.07, 0.02])
    assert [a.share_last for a in found] == [0, 0, 1, 0]
    with pytest.raises(ValueError, match="30 or more steps.*not 29"):
        straggler.measure_delays(calls_at([0.0] * 4, 29))
