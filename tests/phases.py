"""Run pytest twice for `make test`: first parallel tests, then tests that measure time.

    python tests/phases.py [arguments of pytest]    # tests/test_zero.py, -k ring, -x
    python tests/phases.py quick                    # three minutes; or weekly: all tests

The first run uses pytest-xdist with one process more than there are cores, because tests wait a
lot. A file's tests stay in one process and share their fixtures. The second run takes the tests
with the mark `alone`, one at a time. If a test looks at the built site, `make book` comes first.

A test that exceeds its time limit ends its process; it fails by name, and the others go on. The
times of all tests are in _build/tests/seconds.txt, the slowest first. The last line sums up both
runs.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from xml.etree import ElementTree

import pytest

from shardcourse.build import child_process

ROOT = Path(__file__).resolve().parents[1]
REPORTS = ROOT / "_build/tests"
INTERACTIVE = {"--pdb", "--trace", "-s", "--capture=no"}  # a process of xdist has no terminal
OUTCOMES = {"failure": "failed", "error": "error", "skipped": "skipped"}  # by tag of junitxml


class Collection:
    """Pytest plugin that keeps the collected tests."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = session.items


def is_alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None


def run_program(command: list[str], environment: dict[str, str]) -> int:
    """Run a program; return its exit status. An interrupt ends all that it has started."""
    if INTERACTIVE & {*command}:
        return subprocess.run(command, cwd=ROOT, env=environment).returncode
    return child_process.run_with_time_limit(
        command, None, None, None, ROOT, environment, cleanup_seconds=0
    )


def run_phase(
    phase: str, arguments: list[str], processes: int
) -> tuple[int, list[ElementTree.Element]]:
    report = REPORTS / f"{phase}.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", f"--phase={phase}", f"--junitxml={report}"]
    environment = dict(os.environ)
    if processes > 1:
        command += [f"-n{processes}", "--dist=loadfile", "--timeout-method=thread"]
        # Beside other tests a second OpenMP thread spins for its core, and takes ten times as long.
        environment["OMP_NUM_THREADS"] = "1"
    status = run_program([*command, *arguments], environment)
    return status, list(ElementTree.parse(report).iter("testcase")) if report.exists() else []


def main(arguments: list[str]) -> int:
    """Run both phases; return the worse of their exit statuses."""
    begin, collection, output = time.monotonic(), Collection(), io.StringIO()
    if arguments[:1] in (["quick"], ["weekly"]):
        arguments = [f"--{arguments[0]}", *arguments[1:]]
    with redirect_stdout(output):
        status = pytest.main(["--collect-only", "-q", *arguments], [collection])
    if status:
        print(output.getvalue())
        return status
    if any("site" in item.fixturenames for item in collection.items):
        plain = {name: v for name, v in os.environ.items() if not name.startswith("BOOK_")}
        if status := run_program(["make", "book"], plain):
            return status
    REPORTS.mkdir(parents=True, exist_ok=True)
    several = 1 if INTERACTIVE & {*arguments} else 1 + (os.cpu_count() or 1)
    number, status, cases = Counter(map(is_alone, collection.items)), 0, []
    for phase, processes in (("beside", min(several, number[False])), ("alone", 1)):
        if number[phase == "alone"] and not (status and "-x" in arguments):
            ended, found = run_phase(phase, arguments, processes)
            status, cases = max(status, ended), cases + found
    cases.sort(key=lambda case: -float(case.get("time")))
    lines = (f"{float(c.get('time')):8.2f} {c.get('classname')}::{c.get('name')}" for c in cases)
    (REPORTS / "seconds.txt").write_text("\n".join(lines) + "\n", "utf-8")
    ends = Counter(next((OUTCOMES[e.tag] for e in c if e.tag in OUTCOMES), "passed") for c in cases)
    words = ", ".join(f"{ends[end]} {end}" for end in (*OUTCOMES.values(), "passed") if ends[end])
    print(f"{words or 'no tests ran'} in {time.monotonic() - begin:.2f}s")
    return status


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("\nInterrupted. What it had started is ended.", flush=True)
        sys.exit(130)  # the exit status of a shell after an interrupt
