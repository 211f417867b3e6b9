"""A lesson in JupyterLab, in a real browser: folded, answered, interrupted, restarted cells."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Browser, Page

from shardcourse.build.notebook_export import export_notebook

SLOW = 60  # seconds: a kernel has to start, and torch to be imported
OUTPUTS = """() => Array.from(jupyterapp.shell.currentWidget.content.model.cells)
    .filter(cell => cell.type === 'code')
    .map(cell => cell.outputs.toJSON().map(output => JSON.stringify(output)).join('\\n'))"""
WAIT = """import os, time
from shardlab import ranks
def wait():
    os.close(os.open({path!r} + os.environ["RANK"], os.O_CREAT))
    time.sleep(1000)
ranks.run(wait, 2)"""


@contextlib.contextmanager
def start_jupyter(folder: Path) -> Iterator[str]:
    """Start JupyterLab on `folder`, without the user's settings; yield its address."""
    home = {f"JUPYTER_{kind}_DIR": str(folder / kind) for kind in ("CONFIG", "DATA", "RUNTIME")}
    options = ["--no-browser", "--allow-root", "--expose-app-in-browser", "--port=0"]
    options += ["--IdentityProvider.token="]
    command = [sys.executable, "-m", "jupyterlab", *options, f"--ServerApp.root_dir={folder}"]
    log = (folder / "log").open("w")
    environment = {**os.environ, **home, "IPYTHONDIR": str(folder / "ipython")}
    server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder)
    try:
        # JupyterLab writes the page to open last, after the file with the address.
        wait_until(lambda: list((folder / "RUNTIME").glob("jpserver-*-open.html")))
        (file,) = (folder / "RUNTIME").glob("jpserver-*.json")
        yield json.loads(file.read_text())["url"] + "lab"
    finally:
        server.terminate()
        server.wait(30)


def wait_until(true: Callable[[], object]) -> None:
    """Wait until `true` returns something true."""
    deadline = time.monotonic() + SLOW
    while True:
        with contextlib.suppress(OSError):  # the server does not answer yet
            if true():
                return
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.fixture
def page(tmp_path: Path, root: Path, browser: Browser) -> Iterator[Page]:
    """Open JupyterLab with the lesson on products, its exercises alone, and an endless run."""
    book = export_notebook("gemm", root, beside=True)
    code = [n for n, cell in enumerate(book.cells) if cell.cell_type == "code"]
    first = next(n for n, c in enumerate(book.cells) if c.source.startswith("### Exercise 1"))
    asked = book.cells[first : first + 4]
    waiting = nbformat.v4.new_code_cell(WAIT.format(path=str(tmp_path / "rank")))
    book.cells = [book.cells[code[0]], *asked, waiting]
    nbformat.write(book, tmp_path / "gemm.ipynb")
    context = browser.new_context(viewport={"width": 1300, "height": 2000})
    context.set_default_timeout(1000 * SLOW)
    with start_jupyter(tmp_path) as address:
        tab = context.new_page()
        tab.goto(f"{address}/tree/gemm.ipynb")
        tab.wait_for_selector(".jp-Notebook .jp-CodeCell")
        yield tab
    context.close()


def test_a_lesson_is_read_answered_interrupted_and_started_again(page: Page, tmp_path: Path):
    shown = page.locator(".jp-Notebook")
    solution, folded = shown.locator("details"), shown.locator(".jp-InputPlaceholder")
    assert not solution.evaluate("node => node.open")
    folded.nth(1).wait_for()  # JupyterLab renders a cell when it has time
    assert folded.count() == 2 and "# Solution to exercise 1" in folded.nth(1).inner_text()
    assert "2 * 3 / 4" not in shown.inner_text()  # the solution's number

    def execute_command(command: str) -> None:
        page.evaluate("name => void jupyterapp.commands.execute(name)", command)

    page.wait_for_function(
        "() => jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status === 'idle'"
    )
    for _ in ("a fresh kernel", "one that was started again"):
        execute_command("notebook:run-all-cells")
        met = [tmp_path / "rank0", tmp_path / "rank1"]
        wait_until(lambda: all(path.exists() for path in met))  # noqa: B023
        for path in met:
            path.unlink()
        execute_command("notebook:interrupt-kernel")
        wait_until(lambda: "KeyboardInterrupt" in page.evaluate(OUTPUTS)[3])  # it comes last
        _, asked, solved, waited = page.evaluate(OUTPUTS)
        assert asked and solved and asked != solved  # two verdicts of the check
        assert "Interrupted: " in waited and "Traceback" not in waited
        said = page.locator(".jp-RenderedText[data-mime-type$=stderr]").last
        wait_until(lambda: len(said.inner_text().strip().splitlines()) == 3)  # noqa: B023
        page.evaluate("() => jupyterapp.shell.currentWidget.sessionContext.restartKernel()")
        execute_command("notebook:clear-all-cell-outputs")

    def has_unfolded() -> bool:
        if folded.count() == 2:  # still: a click is lost while JupyterLab moves its cells
            folded.nth(1).click()
        return "2 * 3 / 4" in shown.inner_text()

    wait_until(has_unfolded)
