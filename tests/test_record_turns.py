"""Two pages run at a time, and no cell runs beside a cell that measures."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from commands import is_dead
from throwaway import HEADER, Book

from shardcourse import build
from shardcourse.build import facts, kernel, kernel_server

# --- Pages ------------------------------------------------------------------------------------


def make_page(*cells, measures=()):
    """Return a page's text; `measures`: numbers of the cells that measure."""
    text = f"{HEADER}# T\n"
    for number, cell in enumerate(cells):
        tag = ":tags: [measured]\n\n" if number in measures else ""
        text += f"\n```{{code-cell}} ipython3\n{tag}{cell}\n```\n"
    return text


def make_timed_cell(kind, does="time.sleep(0.2)"):
    """Return a cell that records when it ran."""
    return f"""import os, time
begin = time.monotonic()
{does}
with open("../times", "a") as file:
    print(begin, time.monotonic(), {kind!r}, file=file)"""


def make_meeting(own, other):
    """Return code that waits until the other page's cell runs, too."""
    return f"""open("../{own}.met", "w").close()
while not os.path.exists("../{other}.met"):
    assert time.monotonic() < begin + 60, "nothing runs beside this"
    time.sleep(0.01)"""


def run_all(book, *names):
    said = []
    build.execute_pages(names, book.root, lambda *what: said.append(what), cpu=True)
    return said


@pytest.fixture
def book(tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "count_cores", lambda: 2)
    return Book(tmp_path)


def test_two_pages_go_beside_each_other_but_for_what_measures(book, no_leftovers):
    for name, other in (("small", "other"), ("other", "small")):
        kinds = ["plain", "measures", "plain", "plain", "measures", "plain"]
        cells = [make_timed_cell("plain", make_meeting(name, other)), *map(make_timed_cell, kinds)]
        book.write(f"lessons/{name}.md", make_page(*cells, measures=(2, 5)))
    said = run_all(book, "other", "small")
    assert sorted((name, type(made).__name__) for name, made in said) == [
        ("other", "NotebookNode"),
        ("small", "NotebookNode"),
    ]
    lines = (book.root / "times").read_text().splitlines()
    spans = [(float(begin), float(end), kind) for begin, end, kind in map(str.split, lines)]
    assert len(spans) == 14
    for number, (begin, end, kind) in enumerate(spans):
        beside = [b for b in spans[:number] + spans[number + 1 :] if b[0] < end and begin < b[1]]
        assert kind != "measures" or not beside


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each kernel is a new interpreter")
def test_kernels_of_many_pages_are_forks_of_one_process(book, monkeypatch, no_leftovers):
    monkeypatch.setattr(kernel_server, "PRELOADED", ("ipykernel.kernelapp", "this"))
    looks = 'import os, sys\nopen("../figures/" + "boxes.svg").close()\n'
    looks += 'print(os.getppid(), "this" in sys.modules, os.getcwd())'
    for name in ("one", "other", "small"):
        book.write(f"lessons/{name}.md", make_page(looks))
    book.write("lessons/dead.md", make_page("import os\nos._exit(3)"))
    said = dict(run_all(book, "dead", "one", "other", "small"))
    assert "its kernel died" in str(said.pop("dead"))
    (text,) = {made.cells[0].outputs[0].text for made in said.values()}
    assert re.fullmatch(rf"\d+ True {book.root}/lessons\n", text)
    assert int(text.split()[0]) != os.getpid()
    for made in said.values():
        assert "figures/boxes.svg" in made.metadata["shardlab"]["opened"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_build_that_is_ended_leaves_no_kernel(number, book, monkeypatch):
    with tempfile.TemporaryDirectory() as folder:  # a short name: sockets' names have an end
        monkeypatch.setenv("TMPDIR", folder)
        pids = [book.root / name for name in ("small", "other")]
        for path in pids:
            tell = f"import os, time\nopen('../{path.name}.new', 'w').write(str(os.getpid()))\n"
            tell += f"os.rename('../{path.name}.new', '../{path.name}')"
            book.write(f"lessons/{path.name}.md", make_page(tell, "time.sleep(600)"))
        book.write("lessons/third.md", make_page("third"))  # with it kernels are forks
        # Tests in the background may have been started with interrupts ignored.
        script = f"""import pathlib, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from shardcourse import build
from shardcourse.build import facts, kernel_server
facts.count_cores = lambda: 2
kernel_server.PRELOADED = ("ipykernel.kernelapp",)
root = pathlib.Path({str(book.root)!r})
build.execute_pages(["small", "other", "third"], root, lambda *_: None, cpu=True)"""
        started = subprocess.Popen(
            [sys.executable, "-c", script], stderr=subprocess.PIPE, start_new_session=True
        )
        while not all(path.exists() for path in pids):
            assert started.poll() is None, started.stderr.read()
            time.sleep(0.05)
        started.send_signal(number)
        started.communicate(timeout=60)
        assert started.returncode == -number
        while number == signal.SIGKILL and not all(is_dead(int(p.read_text())) for p in pids):
            time.sleep(0.05)  # a kernel looks every second
        assert all(is_dead(int(path.read_text())) for path in pids)
        assert number == signal.SIGKILL or list(Path(folder).glob("lesson-*")) == []


# --- The tag ----------------------------------------------------------------------------------

CLOCKS = {"clock", "monotonic", "perf_counter", "check_timing"}
# Functions of pages that read a clock for other purposes than a shown or claimed time.
OTHERWISE = {
    "deepspeed_engine": {"train_cases"},  # where it counts, the cell has the tag
    "memory": {"watch_step"},  # marks places in a picture
}


def list_names(nodes):
    """Return the names in a source, without those inside its functions and classes."""
    found, todo = set(), list(nodes)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            todo += ast.iter_child_nodes(node)
    return found


def list_used_names(definition):
    """Return the names used by a function and its inner functions, without its variables."""
    nodes = [node for node in ast.walk(definition) if node is not definition]
    own = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return list_names(n for n in nodes if isinstance(n, ast.expr)) - own


def test_a_cell_that_reads_a_clock_has_the_tag_that_lets_it_run_alone(root):
    found, read = [], 0
    for name in build.list_pages(root):
        clocks = set(CLOCKS)
        for number, cell in enumerate(build.code_cells(build.load_notebook(name, root)), 1):
            tree = ast.parse(cell.source)
            for node in tree.body:
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    clocks -= {node.name}
                    exempt = node.name in OTHERWISE.get(name, ())
                    reads = list_used_names(node) & clocks and not exempt
                    clocks |= {node.name} if reads else set()
            if used := list_names(tree.body) & clocks:
                read += 1
                if kernel.MEASURED_TAG not in cell.metadata.get("tags", []):
                    found.append(f"{name}, code cell {number}: {', '.join(sorted(used))}")
    assert read > 50  # there are many
    assert found == []
