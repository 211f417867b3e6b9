"""Options, fixtures and hooks shared by all tests."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import phases
import pytest
from timing import TimingClaimFailed

from shardlab.common import show
from shardlab.common.show.timing import BUSY_TEXT

MAX_TRIES = 3  # for a test that measures times
# With --quick: one contract row a technique, published tables, bad input, and the generated files.
QUICK = (
    "contract", "alike", "refusals", "collectives", "gemm", "zero", "pipeline", "layout", "index",
    "pipeline_schedules", "data_parallel", "tensor_parallel", "sequence_parallel", "experts",
    "context_parallel", "memory", "model", "house", "pairs", "strategy_predict",
    "strategy_entries", "strategy_floor",
)  # fmt: skip

with contextlib.suppress(ImportError):  # the GPU tests run on machines without hypothesis
    from hypothesis import HealthCheck, settings

    # The duration of an example depends on the machine, not on the code.
    settings.register_profile("course", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("course")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this suite."""
    parser.addoption("--phase", choices=("beside", "alone"), help="only the tests of one phase")
    parser.addoption("--site", type=Path, help="a built site to try instead of this one")
    parser.addoption("--weekly", action="store_true", help="run the weekly tests too")
    parser.addoption("--quick", action="store_true", help="only the techniques' main tests")


@pytest.fixture(scope="session")
def root() -> Path:
    """Return the course's own folder."""
    return show.ROOT


@pytest.fixture(scope="session")
def site(root, request) -> Path:
    """Return the folder of the built site: the one of --site, or of the last `make book`."""
    folder = request.config.getoption("--site") or root / "_build/html"
    whole = request.config.getoption("--site") or root / "_build/.built"
    assert whole.exists(), f"there is no site in {folder}, or no whole one: make book"
    return folder.resolve()


def is_quick(item: pytest.Item) -> bool:
    return item.path.stem.removeprefix("test_") in QUICK and not phases.is_alone(item)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the selected tests, and set which tests are tried again.

    A test has three tries for assertions on times, like a cell of a lesson. Any other test has a
    second try if gloo did not connect: a port of its ranks may have belonged, a moment before, to
    another test's rank that a peer still calls. Without the plugin for reruns, as on a machine
    lent for its GPU, each test has one try.
    """
    if config.getoption("--quick"):
        items[:] = [item for item in items if is_quick(item)]
    if phase := config.getoption("--phase"):
        others = [item for item in items if phases.is_alone(item) != (phase == "alone")]
        items[:] = [item for item in items if phases.is_alone(item) == (phase == "alone")]
        config.hook.pytest_deselected(items=others)
    for item in items if not config.getoption("--weekly") else []:
        if weekly := item.get_closest_marker("weekly"):
            item.add_marker(pytest.mark.skip(reason=f"{weekly.args[0]}: with --weekly"))
    for item in items if config.pluginmanager.hasplugin("rerunfailures") else []:
        if item.get_closest_marker("alone"):
            again = pytest.mark.flaky(
                reruns=MAX_TRIES - 1, only_rerun=["TimingClaimFailed", "RankError"]
            )
        else:
            again = pytest.mark.flaky(reruns=1, only_rerun=["connectFullMesh failed"])
        item.add_marker(again)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return a scheduler by files that does not rerun a test whose worker was killed."""
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
    """Skip a test whose last try made claims on times that a busy machine cannot show."""
    report = yield
    raised = call.excinfo.value if call.excinfo else None
    last = getattr(item, "execution_count", MAX_TRIES) >= MAX_TRIES
    if isinstance(raised, TimingClaimFailed) and BUSY_TEXT in str(raised) and last:
        report.outcome = "skipped"
        report.longrepr = str(item.path), item.location[1] or 0, f"Skipped: {raised}"
    return report


def list_children() -> set[int]:
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # the process has ended meanwhile
        if int(fields[1]) == os.getpid():
            found.add(int(status.parent.name))
    return found


@pytest.fixture
def no_leftovers():
    """Fail a test if a process that it started still exists afterwards."""
    before = list_children()
    yield
    assert list_children() - before == set(), "the test left processes behind"
