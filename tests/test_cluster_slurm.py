"""A real Slurm on this machine that runs the package's batch files unchanged."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import run_main
from forked import run_forked

from shardlab.train import take_home
from shardtools.cluster import slurm
from shardtools.cluster.slurm import sessions

NEEDS = pytest.mark.skipif(
    bool(slurm.find_missing()), reason=f"Slurm is not installed: {slurm.INSTALL}"
)

TRAIN = Path(__file__).resolve().parents[1] / "code/train.py"
SMALL = "--limit 16577 --batch 8 --micro 2 --report 1 --steps"  # the number of steps follows
LOSS = 5e-5  # 4 sqrt(8 x 64 tokens) 2^-24 of 5.5, and a turned step: see test_train


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.SlurmCluster]:
    """Start one Slurm for this file, with the jobs' files in its folder; clean up at the end."""
    folder = tmp_path_factory.mktemp("slurm")
    for path in sessions.JOBS.iterdir():
        shutil.copy(path, folder)
    shutil.copy(TRAIN, folder)
    with slurm.run_cluster(folder / "box") as cluster:
        yield cluster
        running = [process.pid for process in slurm.find_job_processes(cluster.folder)]
    assert running == [], "jobs left processes behind"
    assert slurm.find_processes(cluster.folder) == []
    assert [path.name for path in cluster.folder.iterdir()] == ["log"]


def submit_job(cluster: slurm.SlurmCluster, *words: str) -> str:
    """Run `sbatch` in the folder with the jobs' files, gloo on the loopback; return the job number.

    The jobs assume 8 CPUs and start as many threads: waiting threads leave the cores to others.
    """
    more = {"GLOO_SOCKET_IFNAME": "lo", "OMP_WAIT_POLICY": "PASSIVE"}
    how = {"cwd": cluster.folder.parent, "env": {**cluster.environment, **more}}
    return cluster.run(["sbatch", "--parsable", *words], **how).stdout.strip()


def wait_until(true: Callable[[], Any], seconds: float = 240) -> Any:
    """Return the first true value of `true()`; fail long after it should have become true.

    Other tests run at the same time: a job's four interpreters may take a minute to import torch.
    """
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.2)
    return found


def get_state(cluster: slurm.SlurmCluster, job: str) -> str:
    """Return a job's state, such as COMPLETED or PENDING."""
    said = cluster.run(["scontrol", "--oneliner", "show", "job", job]).stdout
    return re.search(r"JobState=(\w+)", said)[1]


def wait_for_end(cluster: slurm.SlurmCluster, job: str) -> str:
    """Wait for a job's end; return its final state."""
    busy = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
    return wait_until(lambda: (now := get_state(cluster, job)) not in busy and now)


def read_losses(folder: Path) -> list[float]:
    text = (folder / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def serial_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses of one process."""
    folder = tmp_path_factory.mktemp("alone")

    def train() -> None:
        sys.argv = [str(TRAIN), *f"{SMALL} 30 --folder".split(), str(folder)]
        take_home.run()

    status, said = run_forked(train, folder, slurm.SlurmCluster(Path("/nowhere")).environment)
    assert status == 0, said
    return read_losses(folder)


def find_listeners(cluster: slurm.SlurmCluster) -> set[tuple[str, str]]:
    """Return the listening programs (first words) and their addresses."""
    found = set()
    for process in slurm.find_processes(cluster.folder):
        try:
            who = " ".join(process.cmdline()[:3])
            for one in process.net_connections("tcp"):
                if one.status == psutil.CONN_LISTEN:
                    found.add((who, one.laddr.ip))
        except psutil.Error:
            continue  # the process has ended meanwhile
    return found


@NEEDS
def test_torchrun_in_a_job_equals_one_process_and_listens_on_the_loopback(
    cluster, serial_losses
) -> None:
    words = f"train.py {SMALL} 4 --folder runs/torchrun".split()
    job = submit_job(cluster, "torchrun.sbatch", *words)
    seen = set()
    while get_state(cluster, job) in ("PENDING", "RUNNING", "COMPLETING"):
        seen |= find_listeners(cluster)
        time.sleep(0.5)
    folder = cluster.folder.parent
    errors = (folder / f"train-{job}.err").read_text()
    assert get_state(cluster, job) == "COMPLETED", errors
    assert read_losses(folder / "runs/torchrun") == pytest.approx(serial_losses[:4], abs=LOSS)
    said = (folder / f"train-{job}.out").read_text()  # one file for all ranks
    assert [said.count(f"rank {rank} of 4") for rank in range(4)] == [1] * 4
    # Slurm and srun listen on the loopback; torchrun's store always listens on all interfaces.
    open_to_all = {
        who for who, ip in seen if ip.removeprefix("::ffff:") not in ("127.0.0.1", "::1")
    }
    assert any("slurmctld" in who for who, _ in seen) and any("slurmd" in who for who, _ in seen)
    assert len(open_to_all) == 1 and "torchrun" in open_to_all.pop()


@pytest.mark.weekly("trains once more: torchrun trains above, and a session below has srun's ranks")
@NEEDS
def test_srun_gives_ranks_by_itself(cluster, serial_losses) -> None:
    job = submit_job(cluster, "srun.sbatch", "train.py", *f"{SMALL} 4 --folder runs/srun".split())
    folder = cluster.folder.parent
    assert wait_for_end(cluster, job) == "COMPLETED", (folder / f"train-{job}.err").read_text()
    assert read_losses(folder / "runs/srun") == pytest.approx(serial_losses[:4], abs=LOSS)


@NEEDS
def test_a_job_saves_before_its_end_is_requeued_and_resumes(cluster, serial_losses) -> None:
    one = "--nodes=1"  # half as many interpreters to start, twice
    job = submit_job(cluster, one, "requeue.sbatch", "train.py", *f"{SMALL} 30".split())
    folder = cluster.folder.parent / "runs" / job
    wait_until(lambda: (folder / "metrics.jsonl").exists() and read_losses(folder))
    cluster.run(["scancel", "--signal=USR1", job])  # the signal of --signal, sent directly
    wait_until(lambda: get_state(cluster, job) == "PENDING")
    assert (folder / "stopped").exists() and len(read_losses(folder)) < 30
    time.sleep(2)  # the first run's processes end; Slurm itself waits two minutes
    cluster.run(["scontrol", "update", f"JobId={job}", "StartTime=now"])
    assert wait_for_end(cluster, job) == "COMPLETED"
    assert read_losses(folder) == pytest.approx(serial_losses, abs=LOSS)  # each step once
    assert not (folder / "stopped").exists()
    said = (cluster.folder.parent / f"train-{job}.out").read_text()
    assert said.index(f"run 0 of job {job}") < said.index(f"run 1 of job {job}")


@NEEDS
@pytest.mark.alone
@pytest.mark.parametrize("name", sorted(path.stem for path in sessions.RECORDED.glob("*.txt")))
def test_sessions_say_what_was_recorded(name: str, request) -> None:
    if name in ("torchrun", "requeue", "usr1", "killed") and not request.config.getoption(
        "--weekly"
    ):
        pytest.skip("starts torchrun, as the tests above do: with --weekly")
    made, text = sessions.read_session(name)
    assert re.match(r"\d{4}-\d\d-\d\d with Slurm [\d.]+, Python [\d.]+, torch [\d.]+", made)
    assert sessions.replay_session(text) == text


@NEEDS
def test_up_twice_and_down_twice(tmp_path: Path, capsys) -> None:
    where = ("--folder", str(tmp_path / "box"))
    assert run_main(capsys, "cluster", "status", *where)[0] == 1
    try:
        status, out, _ = run_main(capsys, "cluster", "up", "--cpus", "1", *where)
        assert status == 0 and f"export SLURM_CONF={tmp_path}/box/slurm.conf" in out
        started = slurm.find_processes(tmp_path / "box")
        assert run_main(capsys, "cluster", "up", *where) == (0, out, "")
        status, _, error = run_main(capsys, "cluster", "up", "--cpus", "3", *where)
        assert status == 2 and f"folder='{tmp_path}/box'" in error
        assert slurm.find_processes(tmp_path / "box") == started and len(started) >= 4
        assert "node[1-2]" in run_main(capsys, "cluster", "status", *where)[1]
    finally:
        status, out, _ = run_main(capsys, "cluster", "down", *where)
    assert status == 0 and "have ended" in out and slurm.find_processes(tmp_path / "box") == []
    assert run_main(capsys, "cluster", "down", *where)[0] == 0


@NEEDS
def test_an_error_in_the_middle_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    box = tmp_path / "box"
    with pytest.raises(RuntimeError, match="mine"), slurm.run_cluster(box, 1) as cluster:
        cluster.run(["sbatch", "--wrap", "trap '' TERM; sleep 100"], cwd=tmp_path)
        wait_until(lambda: slurm.find_job_processes(cluster.folder))
        raise RuntimeError("mine")
    assert slurm.find_processes(cluster.folder) == []
    monkeypatch.setattr(slurm, "SLURM_CONF", slurm.SLURM_CONF + "NoSuchThing=1\n")
    with pytest.raises(slurm.SlurmError, match=r"slurm(ctld|d-node1) has ended"):
        slurm.start_cluster(tmp_path / "other")
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["log"]


def test_a_page_survives_a_slurm_that_does_not_start(monkeypatch) -> None:
    def raise_error(text: str) -> str:
        raise slurm.SlurmError("Slurm did not start. slurmd-node1 has ended: no cgroups")

    monkeypatch.setattr(slurm, "find_missing", list)
    monkeypatch.setattr(sessions, "replay_session", raise_error)
    shown = sessions.show_session("ranks").text
    assert "Recorded on" in shown and "no cgroups" in shown and "rank 3 of 4" in shown


def test_without_slurm_it_says_what_to_install(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(slurm, "_PATH", str(tmp_path))
    status, _, error = run_main(capsys, "cluster", "up", "--folder", str(tmp_path / "box"))
    assert status == 1 and slurm.INSTALL in error and "slurmctld" in error
    assert not (tmp_path / "box").exists()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"nodes": 0}, "nodes=0"),
        ({"folder": "with space"}, "letters"),
        ({"folder": "full"}, "an empty"),
    ],
)
def test_bad_input_is_named_before_anything_starts(tmp_path: Path, given: dict, named: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").touch()
    given = {"folder": "box", **given}
    given["folder"] = tmp_path / given["folder"]
    with pytest.raises(ValueError, match=named):
        slurm.start_cluster(**given)
    assert not (tmp_path / "box").exists()
