"""Scripts under torchrun: `ranks.run` in its processes, set-up's commands, every lesson."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from commands import without_jupyter

from shardcourse import build
from shardlab.common import show

PAGE = (show.ROOT / "book/setup.md").read_text("utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]
# The others install, build or serve, or want several machines.
HERE = [c for c in COMMANDS if c.startswith(".venv/bin/python") or "--standalone" in c]
LONG = [c for c in HERE if "data_parallel" in c]  # a minute, and tests/test_pairs.py runs such
TRAIN = re.search(r":caption: train\.py\n\n(.*?)```", PAGE, re.DOTALL)[1]

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
TORCHRUN += ["--local-addr=127.0.0.1"]


def under_torchrun(
    folder: Path, processes: int, script: str, *options: str
) -> subprocess.CompletedProcess[str]:
    """Run `script` on so many processes; the lines that they printed may come in any order."""
    path = folder / "job.py"
    head = """
        import os, sys, time, torch, torch.distributed as dist
        from shardlab import ranks
        from shardlab.ranks import RankError, run

        def say(*words):  # in one piece: print writes each word alone, and others write there, too
            sys.stdout.write(" ".join(map(str, words)) + "\\n")
    """
    path.write_text(textwrap.dedent(head) + textwrap.dedent(script))
    command = [*TORCHRUN, "--nproc-per-node", str(processes), *options, str(path)]
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

        def ends(how):
            if dist.get_rank() == 1:
                os._exit(3) if how == "exits" else time.sleep(1000)
            dist.barrier()

        print([x.tolist() for x in run(work, 2, 1) + run(work, 3, 10)])
        try:
            run(fails, 2, "boom")
        except RankError as error:
            print(error.ranks, str(error).splitlines()[0])
        print([x.tolist() for x in run(work, 4, 1)])  # more ranks than torchrun started
        for how in ("exits", "hangs"):
            try:
                run(ends, 2, how, timeout=2, apart=True)
            except RankError as error:
                print(error.ranks)
        print(ranks.pretend(dist.get_world_size, 512))
        print([x.tolist() for x in run(work, 3, 1)], flush=True)
        run(fails, 3, "of its own")
        """,
    )
    lines = done.stdout.splitlines()
    beside = [line for line in lines if "beside" in line]  # one for each run elsewhere
    assert [line.split(" beside")[0] for line in beside] == ["[work on 4 ranks"] + 2 * [
        "[ends on 2 ranks"
    ]
    assert [line for line in lines if line not in beside] == [
        "[[1.0, 1.0], [1.0, 1.0], [30.0, 30.0], [30.0, 30.0], [30.0, 30.0]]",
        "[1] rank 1 of 2 raised ValueError: boom",
        "[[6.0, 6.0], [6.0, 6.0], [6.0, 6.0], [6.0, 6.0]]",
        "[1]",
        "[1]",
        "512",
        "[[3.0, 3.0], [3.0, 3.0], [3.0, 3.0]]",
    ], done.stderr
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if "ValueError: of its own" in line]
    assert len(said) == 1 and "rank 1 of 3" in said[0] and said[0].count("[rank") == 0
    assert done.stderr.count("in fails") == 1  # where, and no rank's complaint beside it


def test_a_rank_that_fails_before_there_is_a_group_is_named_at_once(tmp_path: Path) -> None:
    begin = time.monotonic()
    done = under_torchrun(
        tmp_path,
        3,
        """
        if os.environ["RANK"] == "1":
            os.environ["GLOO_SOCKET_IFNAME"] = "not-there"
        begin = time.monotonic()
        try:
            run(dist.barrier, 3, timeout=100)
        except RankError as error:
            print(error.ranks, "not-there" in str(error), time.monotonic() - begin < 90)
        print(run(lambda: 7, 1))
        """,
    )
    assert done.returncode == 0 and time.monotonic() - begin < 200, done.stderr
    assert done.stdout.splitlines() == ["[1] True True", "[7]"]


def test_a_process_that_hangs_ends_the_job_with_the_cause(tmp_path: Path) -> None:
    def job(hangs: int) -> subprocess.CompletedProcess[str]:
        (folder := tmp_path / str(hangs)).mkdir()
        return under_torchrun(
            folder,
            3,
            f"""
            def work():
                if dist.get_rank() == {hangs}:
                    time.sleep(1000)
                if dist.get_rank() == 2 and not {hangs}:
                    raise ValueError("the cause")
                dist.barrier()

            run(work, 3, timeout=2)
            """,
        )

    with ThreadPoolExecutor() as both:  # they wait, mostly
        process_0, process_1 = both.map(job, (0, 1))
    for done, cause in (
        (process_0, "rank 2 of 3 raised ValueError: the cause"),
        (process_1, "rank 1 of 3 did not finish within 2 s"),
    ):
        assert done.returncode != 0
        assert cause in done.stderr


def test_what_reaches_ranks_what_they_give_back_and_what_they_leave(tmp_path: Path) -> None:
    """As a gloo group's last owner torch's DDP may wait in its destructor for ever."""
    done = under_torchrun(
        tmp_path,
        2,
        """
        import gc, weakref

        gc.disable()
        dist.models = []  # in a module: what a function changes of its script's is a copy
        destroy = dist.destroy_process_group

        def watched(*args):
            say("alive:", sum(model() is not None for model in dist.models))
            destroy(*args)

        dist.destroy_process_group = watched

        big = torch.arange(5_000_000.0)  # 20 MB; the launcher's store takes 8 MiB at once
        first, second = run(lambda: big * (1 + dist.get_rank()), 2)
        assert torch.equal(first, big) and torch.equal(second, 2 * big)

        torch.manual_seed(int(os.environ["RANK"]))
        drawn = run(lambda: torch.rand(3), 2)
        own = torch.rand(3)  # the run took nothing from the caller's generator
        assert all(torch.equal(x, own) for x in drawn)

        def offset():
            from torch.distributed.checkpoint.planner_helpers import _create_write_items
            from torch.distributed.fsdp import fully_shard
            model = fully_shard(torch.nn.Linear(1, 4))
            items = _create_write_items("w", model.state_dict()["weight"])
            return [list(item.tensor_data.chunk.offsets) for item in items]

        # A process that has been a rank is no good father of ranks: torch caches its place.
        assert run(offset, 2) == run(offset, 2, apart=True) == [[[0, 0]], [[2, 0]]]

        def stores():  # a group of an ended run calls its store no more
            dist.barrier()
            gc.collect()
            return sum(type(thing).__name__ == "_Heedful" for thing in gc.get_objects())

        assert [run(stores, 2) for _ in range(2)] == [[1, 1]] * 2

        def work(fail):
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
            model.itself = [model]  # it goes when cycles are collected, not when `work` returns
            dist.models.append(weakref.ref(model))
            model(torch.ones(1, 2)).sum().backward()
            if fail:
                raise ValueError("the traceback holds the model, too")

        run(work, 2, False)
        try:
            run(work, 2, True)
        except RankError:
            pass
        """,
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if "beside" not in line]
    assert said == ["alive: 0"] * 7 * 2  # runs, processes


def test_deepspeed_in_one_run_after_another(tmp_path: Path) -> None:
    """DeepSpeed keeps its groups as long as the process lives; here it has several runs."""
    pytest.importorskip("deepspeed")
    done = under_torchrun(
        tmp_path,
        2,
        """
        from dataclasses import replace

        from shardlab import deepspeed_engine as de
        from shardlab.layout import Layout
        from shardlab.common import text
        from shardlab.gpt.model import GPT, PRESETS

        def work(way):
            torch.manual_seed(0)
            deepspeed, model = de.prepare(), GPT(PRESETS["nano"])
            if not way:  # by the reader's own hand
                settings = de.config(Layout(2, micro_batch=2))
                return deepspeed.initialize(model=model, config=settings)[0] and None
            engine = de.initialize(model, de.config(replace(way, micro_batch=2)))
            return [de.step(engine, [text.batch(64, 2, start=4 * step)]) for step in range(2)]

        ways = Layout(2, zero=1), Layout(tp=2), None, Layout(2, zero=1)
        found = [run(work, 2, way) for way in ways]
        assert found[0] == found[3]
        """,
    )
    assert done.returncode == 0, done.stderr


def test_set_ups_script_would_end_with_torchs_ddp_too(tmp_path: Path) -> None:
    ours = "DataParallel(GPT(config).to(device), dist.group.WORLD)"
    theirs = "torch.nn.parallel.DistributedDataParallel(GPT(config).to(device))"
    assert ours in TRAIN
    watch = """
    import gc
    destroy = dist.destroy_process_group

    def watched():
        kinds = [type(thing).__name__ for thing in gc.get_objects()]
        say("alive:", kinds.count("DistributedDataParallel"))
        destroy()

    dist.destroy_process_group = watched
    """
    done = under_torchrun(tmp_path, 2, textwrap.dedent(watch) + TRAIN.replace(ours, theirs))
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if "step" not in line] == ["alive: 0"] * 2


def test_what_a_process_of_torchruns_starts_is_not_torchruns(tmp_path: Path) -> None:
    (tmp_path / "inner.py").write_text(
        "from shardlab import ranks\n"
        "import torch.distributed as dist\n"
        "print(ranks.run(dist.get_world_size, 2))\n"
    )
    done = under_torchrun(
        tmp_path,
        1,
        f"""
        import subprocess
        run(dist.barrier, 1)
        script = {str(tmp_path / "inner.py")!r}
        alone = [sys.executable, script]
        launched = [*{TORCHRUN!r}, "--nproc-per-node", "2", script]
        for command in (alone, launched):
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            print(done.stdout.strip(), done.returncode)
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[2, 2] 0"] * 2  # alone, and under a launcher of its own


def test_the_device_outside_of_a_run_is_the_local_ranks() -> None:
    """With one visible GPU for each process, it is that one."""
    script = """
import torch
from shardlab import ranks
for gpus in (4, 1, 0):
    torch.cuda.device_count = lambda: gpus
    print(ranks.device())
"""
    given = {"RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}
    given |= {"TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **given}, capture_output=True, text=True
    )
    assert done.stdout.split() == ["cuda:2", "cuda:0", "cpu"], done.stderr


# Set-up's commands, as that page prints them.


def test_set_up_shows_what_is_tried_here() -> None:
    assert (
        sum("--standalone --local-addr 127.0.0.1" in c for c in HERE) == 2
        and len(LONG) == 1
        and len(HERE) == 4
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", HERE)
def test_set_ups_commands_run_as_printed(
    command: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """In a plain shell, and without Jupyter, too."""
    if command in LONG and not request.config.getoption("--whole"):
        pytest.skip("takes a minute: --whole")
    for name, target in ((".venv", sys.prefix), ("code", show.ROOT / "code")):
        (tmp_path / name).symlink_to(target)
    (tmp_path / "train.py").write_text(TRAIN, "utf-8")
    environment = without_jupyter(tmp_path)
    environment["PATH"] = "/usr/bin:/bin"  # a plain shell: the environment is not activated
    done = subprocess.run(
        command,
        shell=True,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    if "train.py" in command:
        assert re.findall(r"^step (\d): loss", done.stdout, re.MULTILINE) == list("01234")


# Every lesson, as a script under torchrun.


@pytest.mark.alone
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("processes", [2, 4, 8])
@pytest.mark.parametrize("topic", build.lessons(show.ROOT))
def test_lessons_run_under_torchrun(
    topic: str, processes: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """It ends with 0, and what its cells assert holds: equalities, and what they measure."""
    if not request.config.getoption("--whole"):
        pytest.skip("every lesson takes a minute and more: --whole")
    script = show.ROOT / "code/lessons" / f"{topic}.py"
    command = [*TORCHRUN, "--nproc-per-node", str(processes), str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
