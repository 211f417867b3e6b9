"""What all tests share."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from shardlab import show

# How long an example takes says something about the machine, and nothing about the code.
settings.register_profile("course", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("course")

SITE = pytest.StashKey[bool]()  # whether this process has the site


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--site` and `--whole`."""
    parser.addoption("--site", type=Path, help="a built site to try instead of building this one")
    parser.addoption("--whole", action="store_true", help="run every lesson as a script, not some")


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outermost: waiting is not part of a test's timeout
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Let a test that is marked `alone` run while no other worker of this machine runs one.

    It measures, and a neighbour would be measured with it. So does the first test of a worker that
    asks for the site: the build may have to execute lessons, which measure.
    """
    builds = "site" in getattr(item, "fixturenames", ()) and SITE not in item.config.stash
    stem = Path(tempfile.gettempdir()) / f"shardlab-tests-{os.getuid()}"
    with open(f"{stem}.turn", "w") as turn, open(f"{stem}.room", "w") as room:
        fcntl.flock(turn, fcntl.LOCK_EX)  # whoever waits to be alone keeps newcomers out
        if builds or item.get_closest_marker("alone"):
            fcntl.flock(room, fcntl.LOCK_EX)
        else:
            fcntl.flock(room, fcntl.LOCK_SH)
            fcntl.flock(turn, fcntl.LOCK_UN)
        return (yield)


@pytest.fixture(scope="session")
def root() -> Path:
    """The course's own folder."""
    return show.ROOT


@pytest.fixture(scope="session")
def site(root, request, tmp_path_factory, testrun_uid) -> Path:
    """The site as `make book` builds it: nothing is executed that an earlier build executed.

    It is built once in a run of the tests, by whichever worker asks first: a build writes pages
    anew, and nobody should be reading them then.
    """
    given = request.config.getoption("--site")
    if given is None:
        told = tmp_path_factory.getbasetemp().parent / f"site-{testrun_uid}"
        with open(f"{told}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not told.exists():
                told.write_text(_build(root))
        complaint = told.read_text()
        assert not complaint, complaint
    request.config.stash[SITE] = True
    return (given or root / "_build/html").resolve()


def _build(root: Path) -> str:
    """Build the site; return "", or the end of what the build printed when it failed."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("BOOK_")}
    tool = Path(sys.executable).parent / "jupyter-book"
    done = subprocess.run(
        [tool, "build", "-W", "-n", "--keep-going", "."],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
    )
    return "" if done.returncode == 0 else done.stdout[-4000:] + done.stderr[-4000:] + "\nfailed"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that measures may be disturbed: it has three tries, as a lesson's cells have.

    The first that asks for the site may have to wait until all lessons are executed.
    """
    for item in items:
        if "site" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))
        if item.get_closest_marker("alone"):
            item.add_marker(pytest.mark.flaky(reruns=2, only_rerun=["AssertionError", "RankError"]))


def children() -> set[int]:
    """Process numbers of this process's children, the ended but unreaped ones included."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended while we looked
        if int(fields[1]) == os.getpid():
            found.add(int(status.parent.name))
    return found


@pytest.fixture
def leaves_nothing():
    """Fails a test after which a process that it started is still there."""
    before = children()
    yield
    assert children() - before == set(), "the test left processes behind"
