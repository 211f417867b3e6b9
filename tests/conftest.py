"""What all tests share."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from shardlab import show

# How long an example takes says something about the machine, and nothing about the code.
settings.register_profile("course", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("course")


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outermost: waiting is not part of a test's timeout
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Let a test that is marked `alone` run while no other worker of this machine runs one.

    It measures, or executes lessons that do, and a neighbour would be measured with it.
    """
    stem = Path(tempfile.gettempdir()) / f"shardlab-tests-{os.getuid()}"
    with open(f"{stem}.turn", "w") as turn, open(f"{stem}.room", "w") as room:
        fcntl.flock(turn, fcntl.LOCK_EX)  # whoever waits to be alone keeps newcomers out
        if item.get_closest_marker("alone"):
            fcntl.flock(room, fcntl.LOCK_EX)
        else:
            fcntl.flock(room, fcntl.LOCK_SH)
            fcntl.flock(turn, fcntl.LOCK_UN)
        return (yield)


@pytest.fixture(scope="session")
def root() -> Path:
    """The course's own folder."""
    return show.ROOT


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that measures may be disturbed: it has three tries, as a lesson's cells have."""
    for item in items:
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
