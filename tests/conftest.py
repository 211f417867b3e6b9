"""What all tests share."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import phases
import pytest
from timed import NotSeen

from shardlab.common import show
from shardlab.common.show.timed import BUSY

TRIES = 3  # of a test that measures

with contextlib.suppress(ImportError):  # the tests for a GPU do without it, on any machine
    from hypothesis import HealthCheck, settings

    # How long an example takes says something about the machine, and nothing about the code.
    settings.register_profile("course", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("course")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--phase`, `--site` and `--whole`."""
    parser.addoption("--phase", choices=("beside", "alone"), help="only the tests of one phase")
    parser.addoption("--site", type=Path, help="a built site to try instead of this one")
    parser.addoption("--whole", action="store_true", help="run the weekly tests too")


@pytest.fixture(scope="session")
def root() -> Path:
    """The course's own folder."""
    return show.ROOT


@pytest.fixture(scope="session")
def site(root, request) -> Path:
    """The folder of the built site: what --site names, or what the last `make book` made."""
    folder = request.config.getoption("--site") or root / "_build/html"
    whole = request.config.getoption("--site") or root / "_build/.built"
    assert whole.exists(), f"there is no site in {folder}, or no whole one: make book"
    return folder.resolve()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests that are asked for, and say which are tried again.

    A test has three tries for what it asserts of times, as a cell of a lesson has. Any other has a
    second one where gloo did not connect: a port of its ranks may have been, a moment before, that
    of another test's rank, whom somebody still calls. Where the plugin that tries again is not
    installed, as on a machine lent for its GPU, each has one.
    """
    if phase := config.getoption("--phase"):
        others = [item for item in items if phases.is_alone(item) != (phase == "alone")]
        items[:] = [item for item in items if phases.is_alone(item) == (phase == "alone")]
        config.hook.pytest_deselected(items=others)
    for item in items if not config.getoption("--whole") else []:
        if weekly := item.get_closest_marker("weekly"):
            item.add_marker(pytest.mark.skip(reason=f"{weekly.args[0]}: with --whole"))
    for item in items if config.pluginmanager.hasplugin("rerunfailures") else []:
        if item.get_closest_marker("alone"):
            again = pytest.mark.flaky(reruns=TRIES - 1, only_rerun=["NotSeen", "RankError"])
        else:
            again = pytest.mark.flaky(reruns=1, only_rerun=["connectFullMesh failed"])
        item.add_marker(again)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return a scheduler by files that does not run the test again in which a worker was killed."""
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def remove_node(self, node: Any) -> str | None:
            units = self.assigned_work[node].values()
            left = [(unit, test) for unit in units for test, done in unit.items() if not done]
            if left:
                unit, test = left[0]
                unit[test] = True
            super().remove_node(node)
            return left[0][1] if left else None

    return Files(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    """Skip a test whose last try claimed of times what a busy machine does not show."""
    report = yield
    raised = call.excinfo.value if call.excinfo else None
    last = getattr(item, "execution_count", TRIES) >= TRIES
    if isinstance(raised, NotSeen) and BUSY in str(raised) and last:
        report.outcome = "skipped"
        report.longrepr = str(item.path), item.location[1] or 0, f"Skipped: {raised}"
    return report


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
