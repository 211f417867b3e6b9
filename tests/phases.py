"""`make test`: pytest, in three phases, so that no test waits for another one's sake.

    python tests/phases.py [what pytest takes]    # tests/test_zero.py, -k ring, -x

1. beside: what needs no site and measures nothing, in two processes.
2. site: what looks at the built site, in two processes. `make book` comes first.
3. alone: what measures (the mark `alone`), one test at a time, with nothing beside it.

What each test took is in _build/tests/seconds.txt, the slowest first. The last line sums up.
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

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "_build/tests"
PHASES = ("beside", "site", "alone")
FEW = 4  # tests that one process has done before two have started
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

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Count them by phase."""
        self.phases = Counter(phase(item) for item in session.items)
        self.site = any(needs_site(item) for item in session.items)


def run(name: str, tests: int, arguments: list[str]) -> tuple[int, list[ElementTree.Element]]:
    """Pytest's status in a phase, and its tests."""
    report = KEPT / f"{name}.xml"
    report.unlink(missing_ok=True)
    two = ["-n", "2", "--dist", "loadfile"] if name != "alone" and tests > FEW else []
    print(f"== tests, {name}: {tests}", flush=True)
    command = [sys.executable, "-m", "pytest", "--phase", name, f"--junitxml={report}", *two]
    status = subprocess.run([*command, *arguments], cwd=ROOT).returncode
    return status, list(ElementTree.parse(report).iter("testcase")) if report.exists() else []


def main(arguments: list[str]) -> int:
    """Run the phases that have tests; return pytest's status, the worst of them."""
    begin = time.monotonic()
    collected, told = Collected(), io.StringIO()
    with redirect_stdout(told):
        status = pytest.main(["--collect-only", "-q", *arguments], [collected])
    if status:
        print(told.getvalue())
        return status
    if collected.site and not any(a.startswith("--site") for a in arguments):
        print("== the site, which tests look at: make book", flush=True)
        plain = {k: v for k, v in os.environ.items() if not k.startswith("BOOK_")}
        if status := subprocess.run(["make", "book"], cwd=ROOT, env=plain).returncode:
            return status
    KEPT.mkdir(parents=True, exist_ok=True)
    tests = []
    for name in PHASES:
        if collected.phases[name]:
            ended, found = run(name, collected.phases[name], arguments)
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
    sys.exit(main(sys.argv[1:]))
