"""Executor of pages, each in a Jupyter kernel of this interpreter, that keeps the cells' outputs.

Several pages run side by side in one event loop. Their cells would disturb each other's timings,
so a cell with the tag MEASURED_TAG runs while no other cell does (`ExecutionLock`).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from shardlab.common.show.timing import BUSY_TEXT, UNSEEN_PREFIX

from . import facts
from .kernel_server import KernelServer
from .key import (
    DependencyFinder,
    FileAuditLog,
    Key,
    code_cells,
    compute_key,
    get_source_path,
    hash_cell,
    load_notebook,
)

if TYPE_CHECKING:
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient
    from nbformat import NotebookNode

MAX_CONCURRENT_PAGES = 2  # pages, and no more than there are cores
MEASURED_TAG = "measured"  # tag of a cell that measures times
CELL_TIMEOUT_SECONDS = 1200  # a whole lesson is meant to take a minute
MAX_ATTEMPTS = 3  # attempts for a cell whose timings contradict its claim, on a shared machine
KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_ARROW = re.compile(r"(?m)^-+> *(\d+) ")  # marks the current line of a cell in IPython's tracebacks


class LessonError(RuntimeError):
    """Failure of a cell, in a lesson or in another page."""


class ExecutionLock:
    """Lock for cells of several pages: shared, or exclusive for a cell that measures times.

    It is fair: a measuring cell waits for running cells, and later requests wait for that cell, so
    that no request starves. All users are in one event loop.
    """

    def __init__(self) -> None:
        self._queue = asyncio.Lock()  # fair: waiters acquire it in order
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_PAGES)

    @asynccontextmanager
    async def hold_lock(self, alone: bool) -> AsyncIterator[None]:
        """Hold the lock in the block: shared, or exclusively with `alone`."""
        wanted = MAX_CONCURRENT_PAGES if alone else 1
        async with self._queue:
            for _ in range(wanted):
                await self._slots.acquire()
        try:
            yield
        finally:
            for _ in range(wanted):
                self._slots.release()


@dataclass
class _Shared:
    """State of the pages that are executed together."""

    finder: DependencyFinder
    cpu: bool  # hide GPUs
    lock: ExecutionLock = field(default_factory=ExecutionLock)
    server: KernelServer | None = None  # None: each kernel is a new interpreter

    def make_variables(self, *first: str) -> dict[str, str]:
        """Return a kernel's variables, with `first` first on its PYTHONPATH."""
        variables = build_environment(self.finder.root, *first)
        # Two pages share the cores: an OpenMP thread that spins takes one from the other page.
        variables |= {"OMP_WAIT_POLICY": "PASSIVE", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
        return variables | ({"CUDA_VISIBLE_DEVICES": ""} if self.cpu else {})


def execute_page(name: str, root: Path, cpu: bool = False) -> NotebookNode:
    """Run the cells of the page `name` (see `key`) of the course in `root`, in the page's folder.

    The returned notebook holds only the code cells, with outputs; `metadata["shardlab"]` says what
    the outputs depend on and where they were made. `cpu`: hide GPUs.

    Raises LessonError, which names the page, the cell and its error.
    """
    return asyncio.run(_execute_page(name, _Shared(DependencyFinder(root), cpu)))


def execute_pages(
    names: list[str],
    root: Path,
    done: Callable[[str, NotebookNode | LessonError], None],
    cpu: bool = False,
) -> None:
    """Execute the pages `names`, MAX_CONCURRENT_PAGES at a time: one if there is one core.

    done: called in a thread, beside no measuring cell, with a page's name and its notebook (see
    `execute_page`) or its error at its end.

    An interrupt also ends the kernels that were started.
    """
    shared = _Shared(DependencyFinder(root), cpu)  # executing a page changes no file
    forks = cpu and sys.platform == "linux" and len(names) > MAX_CONCURRENT_PAGES  # it pays
    with KernelServer(shared.make_variables()) if forks else nullcontext() as shared.server:
        asyncio.run(_execute_pages(names, done, shared))


async def _execute_pages(names: list[str], done: Callable, shared: _Shared) -> None:
    slots = asyncio.Semaphore(min(MAX_CONCURRENT_PAGES, facts.count_cores()))

    async def execute_one(name: str) -> None:
        async with slots:
            try:
                outcome = await _execute_page(name, shared)
            except LessonError as error:
                outcome = error
            async with shared.lock.hold_lock(alone=False):
                await asyncio.to_thread(done, name, outcome)

    tasks = [asyncio.create_task(execute_one(name)) for name in names]
    try:
        for task in tasks:
            await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _execute_page(name: str, shared: _Shared) -> NotebookNode:
    import nbformat

    lock, finder, root = shared.lock, shared.finder, shared.finder.root
    async with lock.hold_lock(alone=False):  # reading takes a second of one core
        book = load_notebook(name, root)
        key = compute_key(name, root, book, finder)
    cells = [_copy_without_outputs(cell) for cell in code_cells(book)]
    for place, cell in enumerate(cells):
        cell["id"] = f"cell-{place}"  # the default is random
    lesson = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": KERNELSPEC})
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    metadata, seconds, again, opened = await _execute_cells(name, lesson, shared)
    opened = [path for path in opened if path not in key.files]
    # A file that changed during execution counts with its old hash: the outputs are from then.
    async with lock.hold_lock(alone=False):
        key = Key(key.cells, compute_key(name, root, book, finder, opened).files | key.files)
    lesson.metadata["shardlab"] = {
        "topic": name,
        "key": key.digest,
        "date": date,
        "seconds": round(seconds, 1),
        "again": again,
        **metadata,
        "files": dict(sorted(key.files.items())),
        "opened": opened,
    }
    return lesson


def get_metadata(lesson: NotebookNode) -> dict:
    """Return the metadata of a recording; {} if there are none."""
    return dict(lesson.metadata.get("shardlab", {}))


def list_outdated_reasons(
    lesson: NotebookNode, name: str, root: Path, finder: DependencyFinder | None = None
) -> list[str]:
    """Return why the recording `lesson` is outdated for the page `name` of the course in `root`.

    The reasons are clauses; [] means that the recording is current.

    finder: one that several calls share while no file changes.
    """
    recorded = get_metadata(lesson)
    key = compute_key(name, root, finder=finder, opened=recorded.get("opened", ()))
    cells = [hash_cell(cell) for cell in code_cells(lesson)]
    if recorded.get("key") == key.digest and cells == list(key.cells):
        return []
    changes = key.describe_changes(cells, recorded.get("files", {}))
    return changes or ["its key does not match its content"]


def _copy_without_outputs(cell: NotebookNode) -> NotebookNode:
    import nbformat

    tags = cell.metadata.get("tags", [])
    return nbformat.v4.new_code_cell(cell.source, metadata={"tags": tags} if tags else {})


def build_environment(root: Path, *first: str) -> dict[str, str]:
    """Return a child process's variables, with `first` and the course's sources on PYTHONPATH."""
    paths = [*first, str(root / "code"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


async def _execute_cells(
    name: str, lesson: NotebookNode, shared: _Shared
) -> tuple[dict, float, list[int], list[str]]:
    """Execute the cells of `lesson` in a new kernel and fill in their outputs.

    Return the facts from the kernel, the seconds of execution without waits for other pages, the
    numbers of the cells that were measured again, and the course files that were opened.
    """
    import nbformat
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    @asynccontextmanager
    async def hold_lock(alone: bool = False) -> AsyncIterator[None]:
        nonlocal begin
        requested = time.monotonic()
        async with shared.lock.hold_lock(alone):
            begin += time.monotonic() - requested
            yield

    async def execute_cell(number: int, cell: NotebookNode, tries: int) -> None:
        """Execute a cell; repeat it if its timings contradict its claim."""
        await client.async_execute_cell(cell, number - 1, execution_count=number)
        line = _find_failed_claim(cell)
        if line and tries > 1:
            again.append(number)
            cell.outputs = []
            await execute_cell(number, cell, tries - 1)
        elif line and BUSY_TEXT not in line:
            what = f"{MAX_ATTEMPTS} times: {line}"
            raise LessonError(_format_cell_error(shown, number, cells, what))

    root = shared.finder.root
    path = get_source_path(name, root)
    shown = path.relative_to(root).as_posix()
    question = nbformat.v4.new_code_cell(
        f"exec({Path(facts.__file__).read_text('utf-8')!r}, {{'__name__': '__main__'}})"
    )
    cells = list(lesson.cells)
    again: list[int] = []
    lesson.cells.append(question)
    begin = time.monotonic()
    options = {"timeout": CELL_TIMEOUT_SECONDS, "record_timing": False, "coalesce_streams": True}
    number = 0
    try:
        with tempfile.TemporaryDirectory(prefix="lesson-", ignore_cleanup_errors=True) as home:
            manager = AsyncKernelManager(
                kernel_name="python3",
                kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),  # this very interpreter
                transport="ipc",  # no port that other users of the machine could reach
                connection_file=f"{home}/kernel.json",
            )
            client = NotebookClient(lesson, km=manager, **options)
            if shared.server:
                manager.provisioner = shared.server.make_provisioner(manager)
            # Ignore the user's start-up files and history.
            variables = shared.make_variables(home) | {"IPYTHONDIR": home}
            log = FileAuditLog(root, Path(home))
            try:
                async with hold_lock():
                    await client.async_start_new_kernel(env=variables, cwd=str(path.parent))
                    await client.async_start_new_kernel_client()
                for number, cell in enumerate(cells, 1):
                    async with hold_lock(alone=MEASURED_TAG in cell.metadata.get("tags", [])):
                        await execute_cell(number, cell, MAX_ATTEMPTS)
                seconds = time.monotonic() - begin
                async with hold_lock():
                    await client.async_execute_cell(question, len(cells))
            finally:
                async with hold_lock():
                    await _shut_down_kernel(manager, client)
            opened = log.list_read_files()
    except CellExecutionError as error:
        where = _ARROW.search(_ANSI.sub("", error.traceback))  # the first match: the cell's line
        line = f", line {where[1]}" if where else ""
        what = f"{error.ename}{line}: {_ANSI.sub('', error.evalue)}"
        raise LessonError(_format_cell_error(shown, number, cells, what)) from None
    except CellTimeoutError:
        what = f"it did not end within {CELL_TIMEOUT_SECONDS} s (the limit for a cell)"
        raise LessonError(_format_cell_error(shown, number, cells, what)) from None
    except DeadKernelError:
        if asyncio.current_task().cancelling():  # nbclient reports a cancellation like that, too
            raise asyncio.CancelledError from None
        raise LessonError(_format_cell_error(shown, number, cells, "its kernel died")) from None
    except LessonError:
        raise
    except (OSError, RuntimeError) as error:  # a full disk, a kernel that died at its start
        raise LessonError(f"{shown} could not be executed: {error}") from error
    finally:
        lesson.cells = cells
    return json.loads(question.outputs[0].text), seconds, again, opened


async def _shut_down_kernel(manager: AsyncKernelManager, client: NotebookClient) -> None:
    if await manager.is_alive():
        await manager.shutdown_kernel()
    await manager.cleanup_resources()
    if client.kc is not None:
        client.kc.stop_channels()


def _find_failed_claim(cell: NotebookNode) -> str | None:
    """Return a cell's output line about a timing claim that did not hold; None if all held."""
    texts = (output.text for output in cell.outputs if output.output_type == "stream")
    lines = (line for text in texts for line in text.splitlines())
    return next((line for line in lines if line.startswith(UNSEEN_PREFIX)), None)


def _format_cell_error(path: str, number: int, cells: list[NotebookNode], what: str) -> str:
    source = cells[number - 1].source.strip() if cells and number else ""
    lines = "\n".join(f"    | {line}" for line in source.splitlines())
    return f"{path}, code cell {number} of {len(cells)}: {what}\n{lines}"
