"""`make test`, in a small course: a test that hangs fails by name, and the others still run."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import psutil
import pytest

from shardlab.common import show

HANGS = """
import ctypes, os, subprocess, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import pytest

def started():
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    Path("started").open("a").write(f"{process.pid}\\n")
    return process

def in_a_child():
    if not (child := os.fork()):
        started().wait()
    while True:  # whatever is raised
        try:
            os.waitpid(child, 0)
        except BaseException:
            pass

def in_the_exit_of_a_pool():
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: started().wait(), range(2)))

def in_c():
    started()
    libc, lock = ctypes.PyDLL(None), ctypes.create_string_buffer(64)  # it keeps Python's lock
    libc.pthread_mutex_lock(lock), libc.pthread_mutex_lock(lock)

@pytest.mark.parametrize("hang", [in_a_child, in_the_exit_of_a_pool, in_c])
def test_it_hangs(hang):
    hang()

@pytest.mark.parametrize("number", range(3))
def test_it_passes(number):
    Path("passed").open("a").write(f"{number}\\n")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a mutex of zeros is glibc's")
def test_a_test_that_hangs_fails_and_the_run_goes_on(tmp_path):
    (tmp_path / "tests").mkdir()
    for name in ("conftest.py", "phases.py", "guard.py", "timed.py"):
        shutil.copy(show.ROOT / "tests" / name, tmp_path / "tests")
    (tmp_path / "tests/test_hangs.py").write_text(HANGS)
    limit = "[tool.pytest.ini_options]\ntimeout = 2\nmarkers = ['alone', 'flaky']\n"
    (tmp_path / "pyproject.toml").write_text(limit)
    done = subprocess.run(
        [sys.executable, "tests/phases.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 1 and "3 passed" in done.stdout.splitlines()[-1], done.stdout
    for hang in ("in_a_child", "in_the_exit_of_a_pool", "in_c"):
        assert re.search(rf"(?m)^(FAILED|ERROR) \S+test_it_hangs\[{hang}\]", done.stdout)
    assert sorted((tmp_path / "passed").read_text().split()) == ["0", "1", "2"]
    started = (tmp_path / "started").read_text().split()
    assert len(started) == 4
    assert not [pid for pid in started if psutil.pid_exists(int(pid))]
