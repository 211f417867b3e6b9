"""`python -m shardlab gpu` on a pretended GPU, in a small course of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from commands import is_dead
from rehearsal import lessons
from throwaway import HEADER, Book

from shardcourse import build
from shardcourse.build import child_process
from shardcourse.build import gpu as command
from shardlab.common import show

rehearsed = pytest.mark.skipif(
    torch.version.cuda is not None, reason="a GPU is pretended on torch's build without CUDA"
)
ABSENT = ["sphinx", "myst_nb", "jupyter_book", "jupyter_cache", "hypothesis", "xdist", "playwright"]
ON_A_GPU = """
import pytest, torch

@pytest.mark.gpu
def test_it_adds():
    assert torch.ones(2, device="cuda").sum().item() == 2
"""


@pytest.fixture
def make_environment():
    """Return a function: number of pretended GPUs -> environment."""
    return lambda gpus: lessons.environment(gpus, REHEARSE_FORK="1")  # forked ranks start quickly


def make_lesson(*cells):
    fences = [f"```{{code-cell}} ipython3\n{cell.strip()}\n```\n\n" for cell in cells]
    return HEADER + "# T\n\n" + "".join(fences)


@pytest.fixture
def course(tmp_path):
    """Return a course with two lessons, a benchmark, a GPU test, and this course's package."""
    book = Book(tmp_path / "course")
    shutil.rmtree(book.root / "code/shardlab")
    (book.root / "code/shardlab").symlink_to(show.ROOT / "code/shardlab")
    (book.root / "lessons/small.md").unlink()
    book.write("lessons/fine.md", make_lesson("import torch\ntorch.ones(1, device='cuda').item()"))
    book.write("lessons/fails.md", make_lesson("1 / 0"))
    text = (show.ROOT / "benchmarks/data_parallel.py").read_text("utf-8")
    toy = text.replace("(gpu_model(size), 4, 4)", '("nano", 1, 1)')
    assert toy != text
    book.write("benchmarks/fine.py", toy)
    (book.root / "tests").mkdir()
    for name in ("conftest.py", "phases.py", "timing.py"):
        shutil.copy(show.ROOT / "tests" / name, book.root / "tests")
    book.write("tests/test_gpu.py", ON_A_GPU)
    shutil.copy(show.ROOT / "benchmarks/side_by_side.py", book.root / "benchmarks")
    shutil.copy(show.ROOT / "pyproject.toml", book.root)
    for name in ABSENT:
        (tmp_path / "absent").mkdir(exist_ok=True)
        (tmp_path / f"absent/{name}.py").write_text("raise ImportError('not on this machine')")
    return book


@pytest.fixture
def run_gpu(course, make_environment):
    """Return a function that runs the command, in a Python without Sphinx and pytest's plugins."""
    environment = make_environment(1) | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment["PYTHONPATH"] += f"{os.pathsep}{course.root.parent / 'absent'}"

    def run_gpu(*options):
        done = subprocess.run(
            [sys.executable, "-m", "shardlab", "gpu", *options],
            cwd=course.root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return done.returncode, done.stdout

    return run_gpu


# --- On the pretended GPU ---------------------------------------------------------------------


@pytest.mark.weekly("three calls of make gpu")
@rehearsed
@pytest.mark.timeout(600)  # a minute when the machine is quiet
def test_from_a_call_without_time_to_what_is_carried_home(course, tmp_path, no_leftovers, run_gpu):
    status, said = run_gpu("fine", "--limit", "1")
    assert status == 3 and re.search(r"\blesson_fine +left", said), said
    status, said = run_gpu("fine")
    assert status == 0 and "lesson_fine … passed" in said, said

    # The next call continues on another machine, with the files that the first one had packed.
    (course.root / "book/recorded/fine.ipynb").unlink()
    unpack = [sys.executable, "-m", "zipfile", "-e", "_build/gpu/gpu.zip", "."]
    subprocess.run(unpack, cwd=course.root, check=True)
    status, said = run_gpu("--out", "carried")
    assert status == 1, said
    for name, result in {
        "tests": "passed",
        "lesson_fine": "there already",
        "lesson_fails": "FAILED: .*ZeroDivisionError",
        "benchmark_fine_2": "there already",
        "benchmark_fine_4": "there already",
    }.items():
        assert re.search(rf"\b{name} +{result}", said), said
    assert "ZeroDivisionError" in (course.root / "_build/gpu/logs/lesson_fails.log").read_text()

    # The packed recordings were made on a GPU.
    home = tmp_path / "home"
    home.mkdir()
    unpack[4] = str(course.root / "carried/gpu.zip")
    subprocess.run(unpack, cwd=home, check=True)
    book = build.load_recording(home / "book/recorded/fine.ipynb")
    assert build.get_metadata(book)["device"]["kind"] == "cuda"
    figures = json.loads((home / "benchmarks/recorded/fine_4.json").read_text("utf-8"))
    assert [(row["link"], row["ranks"]) for row in figures["rows"]] == [("gpu", 4)]


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


@pytest.mark.weekly("drives of the rehearsal go the same ways each day")
@rehearsed
def test_the_tests_for_a_gpu_pass_on_pretended_ones(make_environment):
    # The rows of the contract are drives of the rehearsal (test_rehearsal).
    options = ["-p", "no:cacheprovider", "-q", "-k", "not trains_as_one_process"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "tests/test_gpu.py"],
        cwd=show.ROOT,
        env=make_environment(2),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) == 5


# --- Steps, without a GPU ---------------------------------------------------------------------


@pytest.fixture
def small(tmp_path):
    return Book(tmp_path / "small").root


def test_a_program_at_its_limit_is_ended_with_all_that_it_started(tmp_path, no_leftovers):
    pids = tmp_path / "pids"
    code = (
        "import os, signal, subprocess, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "own = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{own.pid}}')\n"
        "time.sleep(600)\n"
    )
    log = tmp_path / "log"
    given = [sys.executable, "-c", code], log, log, 2.0, tmp_path, dict(os.environ)
    assert child_process.run_with_time_limit(*given, cleanup_seconds=1.0) is None
    assert len(pids.read_text().split()) == 2
    assert all(is_dead(int(pid)) for pid in pids.read_text().split())


def test_a_recording_of_the_cpu_is_none_of_a_gpu(small):
    book = build.execute_page("small", small, cpu=True)
    path = small / "book/recorded/small.ipynb"
    build.save_recording(book, path)
    (step,) = command.plan(small, ["small"], False, 1)
    assert not step.is_current(small)
    book.metadata["shardlab"]["device"] = {"kind": "cuda", "name": "Imaginary Z9", "count": 1}
    build.save_recording(book, path)
    assert step.is_current(small)
    (small / "code/shardlab/second.py").write_text("VALUE = 41\n")
    assert not step.is_current(small)
