"""What all tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardlab import show


@pytest.fixture(scope="session")
def root() -> Path:
    """The course's own folder."""
    return show.ROOT


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
