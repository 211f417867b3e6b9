"""Execute pages, each in a kernel of this very interpreter, and keep what their cells put out.

Several pages go beside each other in one event loop. What the cells of one do disturbs what another
one measures, so a cell with the tag MEASURED runs while no other one does (`Turns`).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from shardlab.common.show.timed import BUSY, UNSEEN

from . import facts
from .key import Key, Opened, Reader, cell_hash, code_cells, notebook, reach, source

if TYPE_CHECKING:
    import nbformat
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

AT_ONCE = 2  # pages, and no more than there are cores
MEASURED = "measured"  # the tag of a cell that measures times
CELL_TIMEOUT = 1200  # seconds: a whole lesson is meant to take a minute
TRIES = 3  # of a cell whose times are not what it claims, on a machine that others use as well
KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_ARROW = re.compile(r"(?m)^-+> *(\d+) ")  # marks the line of a cell in IPython's tracebacks


class LessonError(RuntimeError):
    """A cell of a lesson, or of another page, failed."""


class Turns:
    """Who may run just now: cells of several pages, or alone one that measures.

    Whoever asks first goes first: a cell that measures waits for those that run, and those that
    come after it wait for it, so nobody is overtaken for ever. All of it is in one event loop.
    """

    def __init__(self) -> None:
        self._door = asyncio.Lock()  # whoever came first gets it first
        self._places = asyncio.Semaphore(AT_ONCE)

    @asynccontextmanager
    async def turn(self, alone: bool) -> AsyncIterator[None]:
        """Wait for a turn and hold it within the block. `alone`: while nobody else holds one."""
        wanted = AT_ONCE if alone else 1
        async with self._door:
            for _ in range(wanted):
                await self._places.acquire()
        try:
            yield
        finally:
            for _ in range(wanted):
                self._places.release()


def execute(name: str, root: Path, cpu: bool = False) -> nbformat.NotebookNode:
    """Run the cells of the page `name` (see `key`) of the course in `root`, in the page's folder.

    The notebook that is returned holds the code cells alone, with their outputs, and in
    `metadata["shardlab"]` what these depend on and where they were made. `cpu`: hide GPUs.

    Raises LessonError, which names the page, the cell and its error.
    """
    return asyncio.run(_execute(name, root.resolve(), cpu, Turns()))


def execute_all(
    names: list[str],
    root: Path,
    done: Callable[[str, nbformat.NotebookNode | LessonError], None],
    cpu: bool = False,
) -> None:
    """Execute the pages `names`, AT_ONCE at a time, or one on a machine with one core.

    done: gets a page's name and its notebook (see `execute`) or error as soon as that is there.

    Interrupted, it takes with it what it has started.
    """
    asyncio.run(_execute_all(names, root.resolve(), done, cpu))


async def _execute_all(names: list[str], root: Path, done: Callable, cpu: bool) -> None:
    turns = Turns()
    places = asyncio.Semaphore(min(AT_ONCE, facts.cores()))

    async def one(name: str) -> None:
        async with places:
            try:
                outcome = await _execute(name, root, cpu, turns)
            except LessonError as error:
                outcome = error
            done(name, outcome)

    tasks = [asyncio.create_task(one(name)) for name in names]
    try:
        for task in tasks:
            await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _execute(name: str, root: Path, cpu: bool, turns: Turns) -> nbformat.NotebookNode:
    import nbformat

    async with turns.turn(alone=False):  # reading takes a second of a core
        book = notebook(name, root)
        key = reach(name, root, book)
    cells = [_blank(cell) for cell in code_cells(book)]
    for place, cell in enumerate(cells):
        cell["id"] = f"cell-{place}"  # not random
    lesson = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": KERNELSPEC})
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    about, seconds, again, opened = await _run(name, lesson, root, cpu, turns)
    opened = [path for path in opened if path not in key.files]
    # A file that has changed meanwhile counts as it was: its outputs are the old one's.
    async with turns.turn(alone=False):
        key = Key(key.cells, reach(name, root, book, opened=opened).files | key.files)
    lesson.metadata["shardlab"] = {
        "topic": name,
        "key": key.text,
        "date": date,
        "seconds": round(seconds, 1),
        "again": again,
        **about,
        "files": dict(sorted(key.files.items())),
        "opened": opened,
    }
    return lesson


def about(lesson: nbformat.NotebookNode) -> dict:
    """What a recording says about itself; {} when it says nothing."""
    return dict(lesson.metadata.get("shardlab", {}))


def changed(
    lesson: nbformat.NotebookNode, name: str, root: Path, reader: Reader | None = None
) -> list[str]:
    """Why the recording `lesson` does not hold for the page `name` of the course in `root`.

    A list of clauses, [] when it holds.

    reader: one that several calls share while no file changes.
    """
    recorded = about(lesson)
    key = reach(name, root, reader=reader, opened=recorded.get("opened", ()))
    cells = [cell_hash(cell) for cell in code_cells(lesson)]
    if recorded.get("key") == key.text and cells == list(key.cells):
        return []
    return key.changed(cells, recorded.get("files", {})) or ["its key does not fit its content"]


def _blank(cell: nbformat.NotebookNode) -> nbformat.NotebookNode:
    import nbformat

    tags = cell.metadata.get("tags", [])
    return nbformat.v4.new_code_cell(cell.source, metadata={"tags": tags} if tags else {})


def environment(root: Path, *first: str) -> dict[str, str]:
    """That of a child process: `first` and the sources of the course in `root` come first."""
    paths = [*first, str(root / "code"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


async def _run(
    name: str, lesson: nbformat.NotebookNode, root: Path, cpu: bool, turns: Turns
) -> tuple[dict, float, list[int], list[str]]:
    """Fill in the outputs.

    Return what the kernel says about where it ran, the seconds that it took, without those that
    it waited for other pages, the cells measured again, and the course's files that were opened.
    """
    import nbformat
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    @asynccontextmanager
    async def turn(alone: bool = False) -> AsyncIterator[None]:
        nonlocal begin
        asked = time.monotonic()
        async with turns.turn(alone):
            begin += time.monotonic() - asked
            yield

    async def attempt(number: int, cell: nbformat.NotebookNode, tries: int) -> None:
        """Execute a cell; where its times are not what it claims, measure again."""
        await client.async_execute_cell(cell, number - 1, execution_count=number)
        line = _unseen(cell)
        if line and tries > 1:
            again.append(number)
            cell.outputs = []
            await attempt(number, cell, tries - 1)
        elif line and BUSY not in line:
            raise LessonError(_message(shown, number, cells, f"{TRIES} times: {line}"))

    path = source(name, root)
    shown = path.relative_to(root).as_posix()
    question = nbformat.v4.new_code_cell(
        f"exec({Path(facts.__file__).read_text('utf-8')!r}, {{'__name__': '__main__'}})"
    )
    cells = list(lesson.cells)
    again: list[int] = []
    lesson.cells.append(question)
    begin = time.monotonic()
    options = {"timeout": CELL_TIMEOUT, "record_timing": False, "coalesce_streams": True}
    number = 0
    try:
        with tempfile.TemporaryDirectory(prefix="lesson-", ignore_cleanup_errors=True) as home:
            manager = AsyncKernelManager(
                kernel_name="python3",
                kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),  # this very interpreter
                transport="ipc",  # no port that others on the machine could reach
                connection_file=f"{home}/kernel.json",
            )
            client = NotebookClient(lesson, km=manager, **options)
            # No start-up files and no history of the user's.
            variables = environment(root, home)
            variables |= {"IPYTHONDIR": home, "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
            variables |= {"CUDA_VISIBLE_DEVICES": ""} if cpu else {}
            log = Opened(root, Path(home))
            try:
                async with turn():
                    await client.async_start_new_kernel(env=variables, cwd=str(path.parent))
                    await client.async_start_new_kernel_client()
                for number, cell in enumerate(cells, 1):
                    async with turn(alone=MEASURED in cell.metadata.get("tags", [])):
                        await attempt(number, cell, TRIES)
                seconds = time.monotonic() - begin
                async with turn():
                    await client.async_execute_cell(question, len(cells))
            finally:
                async with turn():
                    await _end(manager, client)
            opened = log.files()
    except CellExecutionError as error:
        where = _ARROW.search(_ANSI.sub("", error.traceback))  # the first: the cell's own line
        line = f", line {where[1]}" if where else ""
        what = f"{error.ename}{line}: {_ANSI.sub('', error.evalue)}"
        raise LessonError(_message(shown, number, cells, what)) from None
    except CellTimeoutError:
        what = f"it did not end within {CELL_TIMEOUT} s"
        raise LessonError(_message(shown, number, cells, what)) from None
    except DeadKernelError:
        if asyncio.current_task().cancelling():  # nbclient calls that so, too
            raise asyncio.CancelledError from None
        raise LessonError(_message(shown, number, cells, "its kernel died")) from None
    except LessonError:
        raise
    except (OSError, RuntimeError) as error:  # a full disk, a kernel that died at its start
        raise LessonError(f"{shown} could not be executed: {error}") from error
    finally:
        lesson.cells = cells
    return json.loads(question.outputs[0].text), seconds, again, opened


async def _end(manager: AsyncKernelManager, client: NotebookClient) -> None:
    """End the kernel, however far it has come."""
    if await manager.is_alive():
        await manager.shutdown_kernel()
    await manager.cleanup_resources()
    if client.kc is not None:
        client.kc.stop_channels()


def _unseen(cell: nbformat.NotebookNode) -> str | None:
    """The line of a claim about time that a cell did not bear out; None where all did."""
    texts = (output.text for output in cell.outputs if output.output_type == "stream")
    lines = (line for text in texts for line in text.splitlines())
    return next((line for line in lines if line.startswith(UNSEEN)), None)


def _message(path: str, number: int, cells: list[nbformat.NotebookNode], what: str) -> str:
    source = cells[number - 1].source.strip() if cells and number else ""
    lines = "\n".join(f"    | {line}" for line in source.splitlines())
    return f"{path}, code cell {number} of {len(cells)}: {what}\n{lines}"
