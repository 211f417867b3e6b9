"""`python -m shardlab gpu`, on a pretended GPU: in a small course of its own, never in this one."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile

import pytest
import torch
import yaml
from commands import gone, ran
from rehearsal import lessons
from throwaway import HEADER, Book

from shardcourse import build
from shardcourse.build import carry
from shardcourse.build import gpu as command
from shardcourse.build.gpu import child, machine, steps
from shardlab.common import show

rehearsed = pytest.mark.skipif(
    torch.version.cuda is not None, reason="a GPU is pretended on torch's build without CUDA"
)
ABSENT = ["sphinx", "myst_nb", "jupyter_book", "jupyter_cache", "hypothesis", "xdist", "playwright"]
HANGS_ONCE = """
import os, pathlib, subprocess, sys, time
mark = pathlib.Path({mark!r})
if not mark.exists():
    started = subprocess.Popen(["sleep", "600"], start_new_session=True)
    mark.with_suffix(".part").write_text(f"{{os.getpid()}} {{started.pid}}")
    mark.with_suffix(".part").rename(mark)
    time.sleep(600)
1 / 0
"""
ON_A_GPU = """
import pytest, torch

@pytest.mark.gpu
def test_it_adds():
    assert torch.ones(2, device="cuda").sum().item() == 2
"""


@pytest.fixture
def pretended():
    """A function: the environment of a machine with so many pretended GPUs."""
    return lambda gpus: lessons.environment(gpus, REHEARSE_FORK="1")  # forked ranks start quickly


def lesson(*cells):
    fences = [f"```{{code-cell}} ipython3\n{cell.strip()}\n```\n\n" for cell in cells]
    return HEADER + "# T\n\n" + "".join(fences)


@pytest.fixture
def course(tmp_path):
    """A course with two lessons, a benchmark, a test for a GPU, and this one's package."""
    book = Book(tmp_path / "course")
    shutil.rmtree(book.root / "code/shardlab")
    (book.root / "code/shardlab").symlink_to(show.ROOT / "code/shardlab")
    (book.root / "lessons/small.md").unlink()
    book.write("lessons/fine.md", lesson("import torch\ntorch.ones(1, device='cuda').item()"))
    book.write("lessons/hangs.md", lesson(HANGS_ONCE.format(mark=str(tmp_path / "mark"))))
    text = (show.ROOT / "benchmarks/data_parallel.py").read_text("utf-8")
    toy = text.replace("(gpu_model(size), 4, 4)", '("nano", 1, 1)')
    assert toy != text
    book.write("benchmarks/fine.py", toy)
    (book.root / "tests").mkdir()
    for name in ("conftest.py", "phases.py", "timed.py"):
        shutil.copy(show.ROOT / "tests" / name, book.root / "tests")
    book.write("tests/test_gpu.py", ON_A_GPU)
    shutil.copy(show.ROOT / "benchmarks/side_by_side.py", book.root / "benchmarks")
    shutil.copy(show.ROOT / "pyproject.toml", book.root)
    for name in ABSENT:
        (tmp_path / "absent").mkdir(exist_ok=True)
        (tmp_path / f"absent/{name}.py").write_text("raise ImportError('not on this machine')")
    return book


@pytest.fixture
def gpu(course, pretended):
    """A function that starts the command, in a Python without Sphinx and pytest's plugins."""
    environment = pretended(1)
    environment["PYTHONPATH"] += f"{os.pathsep}{course.root.parent / 'absent'}"
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    started = []

    def start(*options):
        process = subprocess.Popen(
            [sys.executable, "-m", "shardlab", "gpu", *options],
            cwd=course.root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.terminate()  # it ends what it has started
        process.communicate(timeout=60)


def summary(folder):
    return json.loads((folder / "summary.json").read_text("utf-8"))["steps"]


# --- On the pretended GPU ---------------------------------------------------------------------


@rehearsed
@pytest.mark.timeout(600)  # a minute when the machine is quiet
def test_from_an_interrupted_call_to_what_is_carried_home(course, tmp_path, leaves_nothing, gpu):
    # The first call is interrupted while a lesson hangs: what was done is kept, and named.
    subprocess.run(["git", "init", "--quiet"], cwd=course.root, check=True)
    mark = tmp_path / "mark"
    first = gpu("--only", "lessons")
    while not mark.exists():
        assert first.poll() is None, first.stdout.read()
        time.sleep(0.05)
    first.send_signal(signal.SIGTERM)
    said, _ = first.communicate(timeout=60)
    assert first.returncode == 3, said
    assert "book/recorded/fine.ipynb" in said.partition("To commit")[2]
    assert all(gone(int(pid)) for pid in mark.read_text().split())
    found = summary(course.root / carry.WORK)
    assert [step["result"] for step in found.values()] == ["passed", "left"]

    # The second goes on there, on a machine that got what the first one had carried.
    (course.root / "book/recorded/fine.ipynb").unlink()
    shutil.rmtree(course.root / ".git")
    build.unpack(course.root / carry.WORK / "gpu.zip", course.root)
    second = gpu("--out", "carried")
    said, _ = second.communicate(timeout=480)
    assert second.returncode == 1, said
    found = summary(course.root / "carried")
    assert {name: step["result"] for name, step in found.items()} == {
        "tests": "passed",
        "lesson_fine": "there already",
        "lesson_hangs": "FAILED",
        "benchmark_fine_2": "passed",
        "benchmark_fine_4": "passed",
    }
    assert found["tests"]["says"].startswith("1 passed")
    assert "ZeroDivisionError" in found["lesson_hangs"]["says"]
    assert "ZeroDivisionError" in (course.root / found["lesson_hangs"]["log"]).read_text()
    assert str(course.root / "carried/gpu.zip") in said  # there is no git

    # At home, what came from there holds.
    home = tmp_path / "home"
    shutil.copytree(course.root, home, ignore=shutil.ignore_patterns("recorded", "_build"))
    build.unpack(home / "carried/gpu.zip", home)
    book = build.load(home / "book/recorded/fine.ipynb")
    assert build.changed(book, "fine", home) == []
    assert build.about(book)["device"]["kind"] == "cuda"
    figures = json.loads((home / "benchmarks/recorded/fine_4.json").read_text("utf-8"))
    assert [(row["link"], row["ranks"]) for row in figures["rows"]] == [("gpu", 4)]
    assert figures["device"]["count"] == 1
    (step,) = [s for s in steps.planned(home, ["fine"], ["benchmarks"], figures) if "4" in s.name]
    assert step.held(home)
    with open(home / "benchmarks/fine.py", "a") as source:
        source.write("# changed\n")
    (step,) = [s for s in steps.planned(home, ["fine"], ["benchmarks"], figures) if "4" in s.name]
    assert not step.held(home)


def test_without_a_gpu_nothing_is_begun(course):
    before = sorted(course.root.rglob("*"))
    environment = {k: v for k, v in os.environ.items() if k != "REHEARSE"}
    done = subprocess.run(
        [sys.executable, "-m", "shardlab", "gpu"],
        cwd=course.root,
        env={**environment, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "no CUDA GPU here" in done.stderr
    assert done.stderr.count("\n") == 1
    assert sorted(course.root.rglob("*")) == before


@rehearsed
@pytest.mark.parametrize("gpus", [1, 2])
def test_the_tests_for_a_gpu_pass_on_pretended_ones(pretended, gpus, request):
    if gpus == 1 and not request.config.getoption("--whole"):
        pytest.skip("on one, fewer of them have ranks on several GPUs: with --whole")
    # The rows of the contract are drives of the rehearsal (test_rehearsal).
    options = ["-p", "no:cacheprovider", "-q", "-k", "not trains_as_one_process"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "tests/test_gpu.py"],
        cwd=show.ROOT,
        env=pretended(gpus),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 12


@rehearsed
def test_a_benchmark_says_in_one_line_why_it_has_no_row(pretended):
    command = [sys.executable, "benchmarks/pipeline.py", "--json", "--quick", "--links", "gpu"]
    done = subprocess.run(
        [*command, "--ranks", "2"],
        cwd=show.ROOT,
        env=pretended(1),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"] == []
    assert "2 ranks on 1 GPU" in done.stderr


# --- Steps, without a GPU ---------------------------------------------------------------------


@pytest.fixture
def small(tmp_path):
    return Book(tmp_path / "small").root


def program(name, code):
    """A step that runs `code`; what it prints last is what it says when it passed."""
    return steps.Step(name, "tests", ("-c", code), carry.WORK / f"{name}.json", name)


def work(root, todo, limit=None, each=None):
    """Exit status, and the result of each step."""
    (root / carry.WORK / "logs").mkdir(parents=True, exist_ok=True)
    found = {"facts": {"device": {}, "versions": {}}}
    deadline = limit and time.monotonic() + limit
    work = command.Work(root, root / "out", found, todo, each, deadline)
    status = work.through(again=False)
    return status, {name: step["result"] for name, step in summary(root / "out").items()}


def test_a_program_at_its_limit_is_ended_with_all_that_it_started(
    tmp_path, monkeypatch, leaves_nothing
):
    pids = tmp_path / "pids"
    orphan = (  # whoever started it has ended
        "import subprocess as s; "
        "print(s.Popen(['sleep', '600'], stdout=-3, stderr=-3, start_new_session=True).pid)"
    )
    code = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "own = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"orphan = subprocess.check_output([sys.executable, '-c', {orphan!r}])\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{own.pid}} {{int(orphan)}}')\n"
        "time.sleep(600)\n"
    )
    log = tmp_path / "log"
    monkeypatch.setattr(child, "PATIENCE", 1.0)
    assert (
        child.run([sys.executable, "-c", code], log, log, 5.0, tmp_path, dict(os.environ)) is None
    )
    assert len(pids.read_text().split()) == 3
    assert all(gone(int(pid)) for pid in pids.read_text().split())


def test_what_was_tried_in_vain_comes_last_the_next_time(small, monkeypatch, leaves_nothing):
    monkeypatch.setattr(command, "ENOUGH", 0.2)
    order = small / "order"
    slow = program("slow", f"open({str(order)!r}, 'a').write('slow '); import time; time.sleep(60)")
    quick = program("quick", f"open({str(order)!r}, 'a').write('quick '); print('fine')")
    assert work(small, [slow, quick], limit=3) == (3, {"slow": "left", "quick": "left"})
    assert work(small, [slow, quick], limit=3) == (3, {"slow": "left", "quick": "passed"})
    assert order.read_text() == "slow quick slow "
    status, results = work(small, [slow, quick], each=1)
    assert (status, results) == (1, {"slow": "FAILED", "quick": "there already"})


def test_a_summary_that_is_none_is_as_good_as_none(small):
    path = small / "_build/gpu/summary.json"
    path.parent.mkdir(parents=True)
    for text in ("x", "[]", '{"steps": []}', '{"steps": {"quick": 3}}', "[" * 99_999):
        path.write_text(text)
        (small / carry.WORK / "quick.json").unlink(missing_ok=True)
        assert work(small, [program("quick", "print('fine')")]) == (0, {"quick": "passed"}), text


def test_a_step_that_failed_or_went_stale_is_done_again(small):
    flag = small / "flag"
    code = f"import pathlib; assert pathlib.Path({str(flag)!r}).exists(), 'no flag'; print('fine')"
    one = program("one", code)
    assert work(small, [one]) == (1, {"one": "FAILED"})
    assert summary(small / "out")["one"]["says"] == "AssertionError: no flag"
    flag.touch()
    assert work(small, [one]) == (0, {"one": "passed"})
    flag.unlink()
    assert work(small, [one]) == (0, {"one": "there already"})
    stale = steps.Step("one", "tests", one.command, one.kept, "changed")
    assert work(small, [stale]) == (1, {"one": "FAILED"})


def test_a_lesson_without_its_library_is_left_out(small, monkeypatch):
    (small / "lessons/small.md").write_text(lesson("import deepspeed"), "utf-8")
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    step = steps.lesson("small", small)
    status, results = work(small, [step])
    assert (status, results) == (0, {"lesson_small": "left out"})
    assert "deepspeed" in summary(small / "out")["lesson_small"]["says"]


def test_a_recording_of_the_cpu_is_none_of_a_gpu(small):
    book = build.execute("small", small, cpu=True)
    path = small / "book/recorded/small.ipynb"
    build.save(book, path)
    step = steps.lesson("small", small)
    assert not step.held(small)
    book.metadata["shardlab"]["device"] = {"kind": "cuda", "name": "Imaginary Z9", "count": 1}
    build.save(book, path)
    assert step.held(small)
    (small / "code/shardlab/second.py").write_text("VALUE = 41\n")
    assert not steps.lesson("small", small).held(small)


def test_packages_that_are_missing_are_named_at_once_with_the_line_that_gets_them(
    small, monkeypatch, capsys
):
    monkeypatch.chdir(small)
    real = machine.importlib.util.find_spec
    lacking = ("nbclient", "pytest")
    monkeypatch.setattr(
        machine.importlib.util, "find_spec", lambda name: None if name in lacking else real(name)
    )
    status, out, err = ran(capsys, "gpu")
    assert status == 2 and not out
    assert "-m pip install 'pytest' 'nbclient'" in err
    assert err.count("\n") == 1
    assert not (small / "_build").exists()


def test_a_torch_that_is_too_old_counts_as_missing(monkeypatch):
    monkeypatch.setattr(machine.importlib.metadata, "version", lambda name: "2.9.1+cu128")
    assert machine.missing(["torch"]) == ["torch>=2.11"]
    monkeypatch.setattr(machine.importlib.metadata, "version", lambda name: "2.11.0+cu130")
    assert machine.missing(["torch"]) == []


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("E  assert\nFAILED tests/t.py::test - assert 1\n= 1 failed =", "FAILED tests/t.py::test"),
        ("lessons/zero.md, code cell 3 of 9: RankError: rank 1\n  | run()\n", "lessons/zero.md, c"),
        ("Traceback:\n  at\ntorch.OutOfMemoryError: CUDA\nbye", "torch.OutOfMemoryError: CUDA"),
        ("no row for 2 ranks on 1 GPUs\n\n", "no row for 2 ranks on 1 GPUs"),
        ("", "it said nothing"),
    ],
)
def test_the_line_that_tells_is_found_in_a_log(log, line):
    assert machine.reason(log).startswith(line)


def test_what_is_here_is_said_in_a_few_lines():
    found = {
        "facts": {
            "device": {"count": 2, "name": "Z9", "driver": "1.2", "cuda": "13.0", "cores": 8},
            "versions": {"python": "3.12.3", "torch": "2.11.0", "nccl": "2.28"},
        },
        "devices": [
            {"name": "Z9", "total": 2**37, "free": 2**37 - 2**29},
            {"name": "Z9", "total": 2**37, "free": 2**36},
        ],
    }
    text = machine.described(found)
    assert "2 × Z9, driver 1.2" in text
    assert "GPU 1: Z9, 128.0 GiB, 64.0 of them in use" in text
    assert "in use" not in text.splitlines()[1]


# --- What is carried --------------------------------------------------------------------------


def test_an_archive_with_something_else_in_it_changes_nothing(tmp_path):
    path = tmp_path / "gpu.zip"
    for name, content in (
        ("zero_2.json", '{"topic": "pipeline"}'),
        ("zero_2.json", "[]"),
        ("logs/../../a.log", ""),
        ("logs/a/b.log", ""),
        ("other.json", "{}"),
    ):
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("zero_4.json", '{"topic": "zero"}')
            file.writestr(name, content)
        with pytest.raises(ValueError):
            build.unpack(path, tmp_path)
        assert [p.name for p in tmp_path.iterdir()] == ["gpu.zip"], name


def test_the_workflow_pushes_what_was_recorded_and_nothing_else(tmp_path):
    workflow = yaml.safe_load((show.ROOT / ".github/workflows/gpu.yml").read_text("utf-8"))
    (script,) = [s["run"] for s in workflow["jobs"]["record"]["steps"] if s.get("id") == "offer"]
    here, there = tmp_path / "here", tmp_path / "there.git"
    as_me = ["-c", "user.name=me", "-c", "user.email=me@here"]

    def git(*words, folder=here):
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    git("init", "--quiet", "--bare", str(there), folder=tmp_path)
    git("init", "--quiet", str(here), folder=tmp_path)
    git("remote", "add", "origin", str(there))
    (here / "benchmarks").mkdir()
    (here / "benchmarks/zero.py").write_text("1\n")
    git("add", ".")
    git(*as_me, "commit", "--quiet", "-m", "all")

    def offer():
        output = tmp_path / "output"
        output.write_text("")
        environment = {**os.environ, "TOKEN": "t", "GITHUB_OUTPUT": str(output)}
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
        subprocess.run(command, cwd=here, env=environment, check=True, capture_output=True)
        return output.read_text()

    assert offer() == ""  # nothing was recorded
    assert git("branch", "--list", folder=there) == []
    (here / "benchmarks/recorded").mkdir()
    (here / "benchmarks/recorded/zero_2.json").write_text("{}\n")
    (here / "benchmarks/zero.py").write_text("2\n")  # whatever else changed
    assert offer() == "branch=recordings\n"
    changed = git("show", "--name-only", "--format=", "recordings", folder=there)
    assert changed == ["benchmarks/recorded/zero_2.json"]
