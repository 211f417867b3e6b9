"""`python -m shardlab doctor`: finds injected faults, names ranks, accepts a good machine.

Faults are real where possible: file systems in a namespace of their own, limits, an emulated link,
processes that sleep or die. Faults of a GPU or of a second host are simulated by editing the
collected facts.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from commands import run_main
from forked import run_forked
from hypothesis import given
from hypothesis import strategies as st
from timing import timing_claims

from shardlab.common.machines import MACHINES
from shardlab.measure import link
from shardtools.__main__ import main
from shardtools.cluster import doctor
from shardtools.cluster.doctor import checkpoint_folder, checks, host_facts, pairs
from shardtools.cluster.doctor.checks import BAD, Findings

CPU = ("--device", "cpu", "--timeout", "20")
SHORT = ["memory"] if shutil.disk_usage("/dev/shm").free < 4 * checks.SHM_BYTES else []
SHORT += ["cores"] if len(os.sched_getaffinity(0)) == 1 else []  # faults of some machines
BUSY = {"network", "speed"}  # checks that other tests on the same cores slow down
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "SLURM_", "TORCHELASTIC_")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in os.environ:
        if name.startswith(LAUNCHER):
            monkeypatch.delenv(name)


def run_doctor(capsys, path, *options):
    """Run the doctor here; return its report, its states by check, and the exit status."""
    options = ("--folder", str(path), *CPU, "--json", *options)
    status, out, err = run_main(capsys, "doctor", *options)
    assert out, err
    return parse_report(out), status


def parse_report(out):
    line = next((line for line in out.splitlines() if line.startswith("{")), None)
    assert line, out
    found = json.loads(line)
    found["states"] = {row["check"]: row["state"] for row in found["rows"]}
    found["bad"] = {row["check"]: row for row in found["rows"] if row["state"] == BAD}
    for check in SHORT:
        found["bad"].pop(check, None)
    return found


def inject_fault(monkeypatch, fault):
    """Call `fault(rank)` in every rank before it is examined."""
    run_healthy_rank = doctor._run_local_rank

    def run_sick_rank(*args):
        fault(dist.get_rank())
        run_healthy_rank(*args)

    monkeypatch.setattr(doctor, "_run_local_rank", run_sick_rank)


# A good machine.


@pytest.mark.alone
def test_nothing_is_bad_on_a_good_machine_and_nothing_is_left(capsys, tmp_path, no_leftovers):
    begin = time.monotonic()
    found, status = run_doctor(capsys, tmp_path, "--ranks", "4")
    with timing_claims():
        assert not found["bad"] and status == bool(SHORT)
        assert time.monotonic() - begin < 10
    links = [link for facts in found["facts"] for link in facts["pairs"]]
    assert sorted(link["pair"] for link in links) == [
        [a, b] for a in range(4) for b in range(a + 1, 4)
    ]
    assert all(0 < link["latency"] < 0.1 and link["bandwidth"] > 1e6 for link in links)
    assert not list(tmp_path.iterdir())
    status, out, _ = run_main(capsys, "doctor", "--folder", str(tmp_path), *CPU, "--pairs")
    assert all(row["check"] in out for row in found["rows"])
    assert out.splitlines()[-1].startswith("0 and 1")


# Injected faults.


def mount_tmpfs(*points, size="32m"):
    """Mount another, small file system over each folder, for this process alone."""
    new = 0x00020000  # CLONE_NEWNS
    if ctypes.CDLL(None).unshare(new):
        raise OSError("unshare was refused")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    for point in points:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(point)]
        subprocess.run(command, check=True)


def can_mount():
    if os.geteuid() or not shutil.which("mount"):
        return False
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(command, capture_output=True).returncode == 0


needs_mount = pytest.mark.skipif(not can_mount(), reason="mounting a tmpfs wants root")


@needs_mount
def test_a_folder_that_one_rank_does_not_see_and_its_small_dev_shm(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_folder, "VISIBLE_SECONDS", 0.3)
    inject_fault(monkeypatch, lambda rank: mount_tmpfs(tmp_path, "/dev/shm") if rank == 1 else None)
    found, status = run_doctor(capsys, tmp_path, "--ranks", "3")
    assert status == 1
    assert found["bad"].keys() - {"memory"} - BUSY == {"folder"}
    assert "not seen on rank 1" in found["bad"]["folder"]["found"]
    assert "memory" in SHORT or "of /dev/shm free" in found["bad"]["memory"]["found"]
    assert not list(tmp_path.iterdir())


@pytest.mark.alone
def test_seven_faults_are_found_in_one_run(capsys, tmp_path, monkeypatch):
    def break_rank(rank):
        product, now = torch.mm, time.time
        if rank == 0:
            torch.mm = lambda a, b: [product(a, b) for _ in range(4)]
        if rank == 1:
            time.time = lambda: now() + 3
        if rank == 2:
            torch.__version__ = "2.9.0"
            resource.setrlimit(resource.RLIMIT_NOFILE, (150, 150))
        slow, measured = link.create_slow_group(0.02, 30e6), pairs.measure_link
        pairs.measure_link = lambda pair, group, device: measured(
            pair, slow if pair == (1, 3) else group, device
        )

        def refuse_lock(*_):
            raise OSError(errno.ENOLCK, "No locks available")

        if rank == 2:  # a mount with locks of its own
            fcntl.flock = lambda *_: None
        if rank == 3:  # a mount without locks
            fcntl.lockf = refuse_lock

    inject_fault(monkeypatch, break_rank)
    found, status = run_doctor(capsys, tmp_path, "--ranks", "4")
    with timing_claims():
        assert status == 1
        kinds = {"folder", "network", "speed", "versions", "ulimits", "clocks"}
        assert found["bad"].keys() == kinds
        assert found["bad"]["speed"]["found"].startswith("rank 0 ")
        assert len(re.findall("ranks 1 and 3 ", found["bad"]["network"]["found"])) == 2
    assert "2.9.0 on rank 2" in found["bad"]["versions"]["found"]
    assert "nofile 150" in found["bad"]["ulimits"]["found"]
    assert "rank 1 " in found["bad"]["clocks"]["found"]
    locks = found["bad"]["folder"]["found"]
    assert "a lock (flock) was given while rank 0 held it on rank 2" in locks
    assert "ENOLCK: No locks available on rank 3" in locks
    (slow,) = [x for facts in found["facts"] for x in facts["pairs"] if x["pair"] == [1, 3]]
    with timing_claims():
        assert abs(found["facts"][1]["clock"]["ahead"] - 3) < 0.5
        assert slow["latency"] == pytest.approx(0.02, rel=0.3)
        assert slow["bandwidth"] == pytest.approx(30e6, rel=0.3)


def test_an_interface_that_is_not_there_leaves_the_links_out_and_a_setting_is_seen(
    capsys, tmp_path, monkeypatch
):
    def break_rank(rank):
        if rank == 1:
            os.environ |= {"GLOO_SOCKET_IFNAME": "ib7", "NCCL_PROTO": "LL"}

    inject_fault(monkeypatch, break_rank)
    found, status = run_doctor(capsys, tmp_path, "--ranks", "3")
    assert status == 1 and found["bad"].keys() - {"speed"} == {"network", "versions"}
    assert "NCCL_PROTO none on ranks 0 and 2, LL on rank 1" in found["bad"]["versions"]["found"]
    assert "rank 1: GLOO_SOCKET_IFNAME=ib7" in found["bad"]["network"]["found"]


# Ranks that do not answer.


def test_a_rank_that_hangs_is_named_with_what_it_did(capsys, tmp_path, monkeypatch, no_leftovers):
    limits = host_facts.read_limits
    monkeypatch.setattr(
        host_facts, "read_limits", lambda: time.sleep(99) if dist.get_rank() == 2 else limits()
    )
    found, status = run_doctor(capsys, tmp_path, "--ranks", "3", "--timeout", "1")
    assert status == 1
    assert found["silent"] == {"2": "limits"}
    assert found["bad"].keys() == {"answers"}
    assert "rank 2" in found["bad"]["answers"]["found"]
    assert found["facts"][2]["versions"]  # facts collected before the hang


def test_a_rank_that_fails_says_why_and_keeps_nobody_waiting(capsys, tmp_path, monkeypatch):
    def raise_on_rank(rendezvous, group, tries=5):
        if dist.get_rank() == 1:
            raise RuntimeError("out of luck\nand more")
        return clocks(rendezvous, group, tries)

    clocks = pairs.measure_clock_offset
    monkeypatch.setattr(pairs, "measure_clock_offset", raise_on_rank)
    begin = time.monotonic()
    found, status = run_doctor(capsys, tmp_path)
    assert time.monotonic() - begin < 45  # the silence lasts a minute
    assert status == 1 and found["bad"].keys() == {"answers"}
    told = found["bad"]["answers"]["found"]
    assert "rank 1" in told and "RuntimeError: out of luck" in told and "and more" not in told


def test_a_rank_that_dies_is_named(capsys, tmp_path, monkeypatch, no_leftovers):
    def kill_rank():
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(host_facts, "read_free_memory", kill_rank)
    status, out, err = run_main(capsys, "doctor", "--folder", str(tmp_path), *CPU)
    assert status == 1 and not out and "rank 1" in err and "SIGKILL" in err


# Faults that this machine cannot have: edited facts.

GB = 10**9


def make_facts(ranks=4, hosts=1, kind="cpu"):
    """Return the facts of a good job; ranks are spread over the hosts in blocks."""
    each = ranks // hosts
    cuda = kind == "cuda"

    def make_rank(rank):
        gpu = {"kind": kind, "name": "NVIDIA H100 80GB HBM3" if cuda else "Some CPU", "id": None}
        if cuda:
            gpu |= {"id": f"GPU-{rank}", "free": 79 * GB, "total": 80 * GB}
        core = rank % each
        return {
            "host": f"node{rank // each}",
            "versions": {"python": "3.11.7", "torch": "2.13.0", "shardlab": "abc"},
            "gpu": gpu,
            "environment": {"NCCL_SOCKET_IFNAME": "ib0"},
            "cores": {"mask": [core], "all": each, "threads": 1},
            "memory": {"memory": 100 * GB, "/dev/shm": 50 * GB},
            "limits": {n: [None, None] for n in ("nofile", "nproc", "memlock")}
            | {"infiniband": False},
            "network": {"fault": "", "loopback": "", "unresolved": ""},
            "folder": {"fault": "", "free": 9000 * GB},
            "speed": {
                "kind": kind, "name": gpu["name"], "flops": 700e12 if cuda else 5e10,
            },
            "clock": {"ahead": 0.0, "within": 1e-4},
            "pairs": [
                {"pair": [rank, b], "latency": 1e-5,
                 "bandwidth": 350 * GB if rank // each == b // each else 48 * GB}
                for b in range(rank + 1, ranks)
            ],
        }  # fmt: skip

    return [make_rank(rank) for rank in range(ranks)]


def find_bad_rows(facts, **more):
    rows = checks.judge_findings(Findings(facts, **more))
    return {row.check: row for row in rows if row.state == BAD}


def test_good_facts_have_no_bad_row():
    for machine, kind in ((None, "cpu"), (MACHINES["h100"], "cuda")):
        assert find_bad_rows(make_facts(4, 1, kind), machine=machine) == {}
        facts = make_facts(4, 2, kind)
        facts[2]["environment"]["NCCL_SOCKET_IFNAME"] = "ib1"  # a setting of one host
        facts[0]["environment"]["NCCL_DEBUG"] = "INFO"
        assert find_bad_rows(facts, machine=machine) == {}
    assert find_bad_rows(make_facts(), machine=MACHINES["h100"]).keys() == {"devices"}


def make_change(path, value, rank=2):
    def apply_change(facts):
        *parts, last = path.split("/", 1)
        place = facts[rank]
        for part in parts:
            place = place[part]
        place[last] = value

    return apply_change


FAULTS = {
    "two ranks on one GPU": ("devices", make_change("gpu/id", "GPU-3")),
    "a hot GPU": ("speed", make_change("speed/flops", 560e12)),
    "a GPU that somebody else uses": ("devices", make_change("gpu/free", 60 * GB)),
    "another CUDA": ("versions", make_change("versions/cuda", "12.8")),
    "ranks bound to one core": ("cores", make_change("cores/mask", [1])),
    "a host without memory": ("memory", make_change("memory/memory", GB)),
    "docker's /dev/shm": ("memory", make_change("memory//dev/shm", 64 * 2**20)),
    "few open files": ("ulimits", make_change("limits/nofile", [180, None])),
    "InfiniBand, and 8 MB may be locked": (
        "ulimits",
        lambda facts: facts[2]["limits"].update(infiniband=True, memlock=[8 * 2**20, None]),
    ),
    "a name that is the loopback": ("network", make_change("network/loopback", "127.0.1.1")),
    "a clock that is wrong": ("clocks", make_change("clock/ahead", -1.5)),
    "a rename that is not seen": ("folder", make_change("folder/fault", "a rename is not seen")),
    "a folder without room": ("folder", make_change("folder/free", 1e6)),
    "one slow link": (
        "network",
        lambda facts: facts[2]["pairs"][0].update(bandwidth=50 * GB),
    ),
    "slow links all over": (
        "network",
        lambda facts: [p.update(bandwidth=1.2 * GB) for f in facts for p in f["pairs"]],
    ),
    "one late link": ("network", lambda facts: facts[2]["pairs"][0].update(latency=5e-4)),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_shows_in_its_own_row_with_the_rank_and_what_to_do(name):
    check, fault = FAULTS[name]
    facts = make_facts(4, 2, "cuda")
    fault(facts)
    found = find_bad_rows(facts, machine=MACHINES["h100"])
    assert found.keys() == {check}
    assert found[check].advice
    words = found[check].found
    assert "2" in words or "node1" in words


# The order in which pairs are measured.


@given(st.integers(1, 40), st.integers(1, 8), st.booleans())
def test_pairs_meet_once_and_nobody_is_in_two_at_a_time(size, each, apart):
    hosts = [f"node{rank // each}" for rank in range(size)]
    turns = pairs.schedule_turns(size, hosts, apart)
    met = [pair for turn in turns for pair in turn]
    assert len(set(met)) == len(met) and all(a < b < size for a, b in met)
    if size <= pairs.MAX_ALL_PAIRS_RANKS:
        assert len(met) == size * (size - 1) // 2
    for turn in turns:
        busy = [rank for pair in turn for rank in pair]
        assert len(set(busy)) == len(busy)
        touched = [{hosts[a], hosts[b]} for a, b in turn]
        if apart:
            assert sum(map(len, touched)) == len(set().union(*touched))
    if size > 1:  # and everybody has a partner in some round
        assert {rank for pair in met for rank in pair} == set(range(size))


# Three ways to start, and failing starts.


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


@pytest.fixture
def run_launched(tmp_path):
    """Return a function that runs a rank of a job of two; it returns exit status and output."""
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    job |= {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}

    def run_rank(number, timeout):
        command = ["doctor", "--folder", str(tmp_path), "--json", *CPU, "--timeout", timeout]
        call = lambda: sys.exit(main(command))  # noqa: E731
        return run_forked(call, tmp_path, job | {"RANK": str(number)})

    return run_rank


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_does_not_come(run_launched, number):
    """Rank 0 names rank 1; rank 1 names rank 0's address; both name the loopback."""
    status, said = run_launched(number, "1")
    assert status == 1 + number, said
    assert f"rank {1 - number} " in said and "did not come" in said
    assert "MASTER_ADDR=127.0.0.1 is the loopback address" in said
