"""Scripts under torchrun: `ranks.run` in its processes, set-up's commands, every lesson."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from commands import without_jupyter

from shardcourse import build
from shardlab.common import show

PAGE = (show.ROOT / "book/setup.md").read_text("utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]
# The others install, build or serve, or need several machines.
HERE = [c for c in COMMANDS if c.startswith(".venv/bin/python") or "--standalone" in c]
LONG = pytest.mark.weekly("runs a whole lesson, as the tests of scripts and lessons do")
HERE = [pytest.param(c, marks=LONG) if "code/lessons" in c else c for c in HERE]
TRAIN = re.search(r":caption: train\.py\n\n(.*?)```", PAGE, re.DOTALL)[1]

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
TORCHRUN += ["--local-addr=127.0.0.1"]


def under_torchrun(folder: Path, processes: int, script: str) -> subprocess.CompletedProcess[str]:
    """Run `script` on `processes` processes; return their output lines, which come in any order."""
    path = folder / "job.py"
    head = """
        import os, sys, time, torch, torch.distributed as dist
        from shardlab import ranks
        from shardlab.ranks import RankError, run

        def say(*words):  # in one piece: print writes each word alone, and others write there, too
            sys.stdout.write(" ".join(map(str, words)) + "\\n")
    """
    path.write_text(textwrap.dedent(head) + textwrap.dedent(script))
    command = [*TORCHRUN, "--nproc-per-node", str(processes), str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=150)


def test_runs_of_every_kind_what_stands_between_them_and_an_error_at_the_end(
    tmp_path: Path,
) -> None:
    done = under_torchrun(
        tmp_path,
        3,
        """
        def work(factor):
            x = torch.full((2,), float(dist.get_rank() * factor))
            dist.all_reduce(x)
            return x

        def fails(words):
            if dist.get_rank() == 1:
                raise ValueError(words)
            dist.barrier()

        def hangs():
            if dist.get_rank() == 1:
                time.sleep(1000)
            dist.barrier()

        print([x.tolist() for x in run(work, 2, 1) + run(work, 3, 10)])
        try:
            run(fails, 2, "boom")
        except RankError as error:
            print(error.ranks, str(error).splitlines()[0])
        print([x.tolist() for x in run(work, 4, 1)])  # more ranks than torchrun started
        try:
            run(hangs, 2, timeout=2, own_processes=True)
        except RankError as error:
            print(error.ranks)
        print(ranks.run_with_fake_group(dist.get_world_size, 512))
        print([x.tolist() for x in run(work, 3, 1)], flush=True)

        big = torch.arange(5_000_000.0)  # 20 MB; the launcher's store takes 8 MiB at once
        first, second = run(lambda: big * (1 + dist.get_rank()), 2)
        assert torch.equal(first, big) and torch.equal(second, 2 * big)
        torch.manual_seed(int(os.environ["RANK"]))
        drawn = run(lambda: torch.rand(3), 2)
        own = torch.rand(3)  # the run took nothing from the caller's generator
        assert all(torch.equal(x, own) for x in drawn)
        run(fails, 3, "of its own")
        """,
    )
    lines = done.stdout.splitlines()
    beside = [line for line in lines if "of its own" in line]  # one for each run elsewhere
    assert [line.split(" of its own")[0] for line in beside] == [
        "[work: starting 4 processes",
        "[hangs: starting 2 processes",
    ]
    assert [line for line in lines if line not in beside] == [
        "[[1.0, 1.0], [1.0, 1.0], [30.0, 30.0], [30.0, 30.0], [30.0, 30.0]]",
        "[1] rank 1 of 2 raised ValueError: boom",
        "[[6.0, 6.0], [6.0, 6.0], [6.0, 6.0], [6.0, 6.0]]",
        "[1]",
        "512",
        "[[3.0, 3.0], [3.0, 3.0], [3.0, 3.0]]",
    ], done.stderr
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if "ValueError: of its own" in line]
    assert len(said) == 1 and "rank 1 of 3" in said[0] and said[0].count("[rank") == 0
    assert done.stderr.count("in fails") == 1  # one location, and no other rank's error


def test_a_process_that_hangs_ends_the_job_with_the_cause(tmp_path: Path) -> None:
    done = under_torchrun(
        tmp_path,
        2,
        """
        def work():
            if dist.get_rank() == 1:
                time.sleep(1000)
            dist.barrier()

        run(work, 2, timeout=2)
        """,
    )
    assert done.returncode != 0
    assert "rank 1 of 2 did not finish within 2 s" in done.stderr


# Set-up's commands, as that page prints them.


@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", HERE)
def test_set_ups_commands_run_as_printed(command: str, tmp_path: Path) -> None:
    """Run in a plain shell, and without Jupyter, too."""
    for name, target in ((".venv", sys.prefix), ("code", show.ROOT / "code")):
        (tmp_path / name).symlink_to(target)
    (tmp_path / "train.py").write_text(TRAIN, "utf-8")
    environment = without_jupyter(tmp_path)
    environment["PATH"] = "/usr/bin:/bin"  # a plain shell without the environment
    done = subprocess.run(
        command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    if "train.py" in command:
        assert re.findall(r"^step (\d): loss", done.stdout, re.MULTILINE) == list("01234")


# Every lesson, as a script under torchrun.


@pytest.mark.weekly("every lesson takes a minute and more")
@pytest.mark.alone
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("processes", [2, 4, 8])
@pytest.mark.parametrize("topic", build.list_lessons(show.ROOT))
def test_lessons_run_under_torchrun(topic: str, processes: int, tmp_path: Path) -> None:
    """The script ends with 0, and its cells' assertions hold: equalities, and measurements."""
    script = show.ROOT / "code/lessons" / f"{topic}.py"
    command = [*TORCHRUN, "--nproc-per-node", str(processes), str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
