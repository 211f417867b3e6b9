"""`make test`: pytest, in three phases, so that no test waits for another one's sake.

    python tests/phases.py [what pytest takes]    # tests/test_zero.py, -k ring and not slow, -x

1. beside: what needs no site and measures nothing, in one process more than there are cores: much
   of what a test takes it waits.
2. site: what looks at the built site, in two processes. `make book` comes first.
3. alone: what measures (the mark `alone`), one test at a time, with nothing beside it.

A file's tests stay in one process, and share what the file makes once. A test that runs for a
minute is named; one that hangs fails, and its process is killed with all that it started (guard).
Interrupted, it ends all that it has started, and says so in one line.

What each test took is in _build/tests/seconds.txt, the slowest first. The last line sums up.
"""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from xml.etree import ElementTree

import pytest

from shardcourse.build import child

GUARD = "SHARDLAB_TEST_GUARD"  # environment variable: where a worker says which test it runs
ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "_build/tests"
PHASES = ("beside", "site", "alone")
LONG = 60.0  # seconds after which a test that still runs is named, and again after twice as many
FEW = 4  # tests that one process has done before two have started
# Files that take longest: they begin first, so that no process is left alone with one at the end.
LONGEST = (
    "test_rehearsal.py",
    "test_contract.py",
    "test_parity_random.py",
    "test_torchrun.py",
    "test_ranks.py",
    "test_train.py",
    "test_checkpoint.py",
    "test_record_gpu.py",
    "test_cluster_slurm.py",
    "test_elastic.py",
    "test_benchmarks.py",
    "test_deepspeed_engine.py",
    "test_zero.py",
    "test_cluster_doctor.py",
    "test_pairs.py",
    "test_questions.py",
    "test_book.py",
    "test_index.py",
)
TYPED = {"--pdb", "--trace", "-s", "--capture=no"}  # a worker of xdist reads and shows nothing
KINDS = {"failure": "failed", "error": "error", "skipped": "skipped"}  # in pytest's report


def phase(item: pytest.Item) -> str:
    """The phase to which a test belongs."""
    if item.get_closest_marker("alone"):
        return "alone"
    return "site" if needs_site(item) else "beside"


def needs_site(item: pytest.Item) -> bool:
    """Whether a test looks at the built site."""
    return "site" in getattr(item, "fixturenames", ())


class Collected:
    """Which tests pytest would run: a plugin."""

    interrupted = False

    def pytest_keyboard_interrupt(self) -> None:
        """Keep what pytest's status does not tell from a file that cannot be imported."""
        self.interrupted = True

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Count them by phase."""
        self.phases = Counter(phase(item) for item in session.items)
        self.files = {name: set() for name in PHASES}
        for item in session.items:
            self.files[phase(item)].add(str(item.path))
        self.site = any(needs_site(item) for item in session.items)


class Running:
    """Names the tests that run for long: a plugin of the process that reports."""

    def __init__(self, say: Callable[[str], None]):
        self._say, self._over = say, threading.Event()
        self._since: dict[str, tuple[float, float]] = {}  # by test: its begin, and when it is told
        threading.Thread(target=self._watch, daemon=True).start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self._since[nodeid] = time.monotonic(), LONG

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """It has ended."""
        self._since.pop(nodeid, None)

    def pytest_sessionfinish(self) -> None:
        """All have."""
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(1.0):
            for test, (begin, told) in list(self._since.items()):
                if time.monotonic() - begin > told and test in self._since:
                    self._since[test] = begin, 2 * told
                    self._say(f"{test} has been running for {told:.0f} s")


def with_words(arguments: list[str]) -> list[str]:
    """The arguments, where the words that follow -k are one: -k ring and not slow."""
    found = []
    for argument in arguments:
        words = found[-2:-1] == ["-k"] and not argument.startswith("-")
        if words and not Path(ROOT, argument.partition("::")[0]).exists():
            found[-1] += f" {argument}"
        else:
            found.append(argument)
    return found


def call(command: list[str], environment: dict[str, str]) -> int:
    """The status of a program that is interrupted with all that it has started."""
    if TYPED & {*command}:
        return subprocess.run(command, cwd=ROOT, env=environment).returncode
    return child.run(command, None, None, None, ROOT, environment, patience=0)


def run(
    name: str, tests: int, files: set[str], arguments: list[str]
) -> tuple[int, list[ElementTree.Element]]:
    """Pytest's status in a phase, and its tests."""
    report = KEPT / f"{name}.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "--phase", name, f"--junitxml={report}"]
    command.append(f"--files={os.pathsep.join(sorted(files))}")
    environment = dict(os.environ)
    processes = 1
    if name != "alone" and tests > FEW:
        processes = 2 if name == "site" else 1 + (os.cpu_count() or 1)
        # A second thread waits for its core in a loop: beside others, it takes ten times as long.
        environment["OMP_NUM_THREADS"] = "1"
    if not TYPED & {*arguments}:
        python = shlex.join([sys.executable, str(Path(__file__).with_name("guard.py"))])
        command += ["--tx", f"{processes}*popen//python={python}", "--dist=loadfile"]
        command += ["--no-loadscope-reorder", f"--max-worker-restart={tests}"]
    many = f"{tests} in {len(files)} file{'s' * (len(files) > 1)}"
    print(f"== tests, {name}: {many}, {processes} at a time", flush=True)
    status = call([*command, *arguments], environment)
    return status, list(ElementTree.parse(report).iter("testcase")) if report.exists() else []


def main(arguments: list[str]) -> int:
    """Run the phases that have tests; return pytest's status, the worst of them."""
    begin = time.monotonic()
    collected, told = Collected(), io.StringIO()
    with redirect_stdout(told):
        status = pytest.main(["--collect-only", "-q", *arguments], [collected])
    if collected.interrupted:
        raise KeyboardInterrupt
    if status:
        print(told.getvalue())
        return status
    if collected.site and not any(a.startswith("--site") for a in arguments):
        print("== the site, which tests look at: make book", flush=True)
        plain = {k: v for k, v in os.environ.items() if not k.startswith("BOOK_")}
        if status := call(["make", "book"], plain):
            return status
    KEPT.mkdir(parents=True, exist_ok=True)
    tests = []
    for name in PHASES:
        if collected.phases[name]:
            ended, found = run(name, collected.phases[name], collected.files[name], arguments)
            status = max(status, ended)
            tests += found
            if ended > 1 or (ended and "-x" in arguments):
                break
    tests.sort(key=lambda test: -float(test.get("time")))
    lines = (f"{float(t.get('time')):8.2f} {t.get('classname')}::{t.get('name')}" for t in tests)
    (KEPT / "seconds.txt").write_text("\n".join(lines) + "\n", "utf-8")
    ends = Counter(next((KINDS[e.tag] for e in t if e.tag in KINDS), "passed") for t in tests)
    words = ", ".join(f"{ends[kind]} {kind}" for kind in (*KINDS.values(), "passed") if ends[kind])
    print(f"{words or 'no tests ran'} in {time.monotonic() - begin:.2f}s")
    return status


if __name__ == "__main__":
    try:
        sys.exit(main(with_words(sys.argv[1:])))
    except KeyboardInterrupt:
        print("\nInterrupted. What it had started is ended.", flush=True)
        sys.exit(130)  # what a shell says of an interrupt
