"""Outputs of each page: recorded ones if they are current, freshly executed ones otherwise.

Before Sphinx reads any page, each lesson gets the first of these that exists:

1. the recording book/recorded/<topic>.ipynb, if its key is current (see `shardcourse.build`),
   unless RECORDED=0 is in the environment;
2. the outputs of an earlier build, _build/executed/<topic>.ipynb, if their key is current and
   Python, torch and DeepSpeed have the same versions;
3. outputs from an execution now, on the CPU, kept as 2: two pages at a time, and nothing beside
   a cell that measures.

Pages in book/ that have cells are treated alike, without 1: they have no recordings.

Then `read_with_outputs` hands each page to myst-nb as an executed notebook, and myst-nb executes
nothing. Its own cache would not do: the cache's key ignores imported code.

`env.page_outputs` holds the origin of every page's outputs; `env.lesson_outputs` holds the
lessons among them, and `app.lesson_books` the lessons' code cells with their outputs.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import nbformat
from site_files import hash_files
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.errors import SphinxError
from sphinx.util import logging

from shardcourse import build
from shardcourse.build import facts, key

logger = logging.getLogger(__name__)

LESSONS_PREFIX = "lessons/"
FIRST, FIRST_LINKS = "model_parallelism", ("book/glossary", "book/references")
FIRST_CONTENTS = "_build/first.yml"  # contents of the first lesson's small site
EXECUTIONS_PAGE = "book/execution"  # the page that lists how each page was executed
FOLDED_TAG = "hide-input"  # tag of a cell whose code is folded
_BUILT_FOLDERS = ("_build", "__pycache__")
_SHOWING_CALL = re.compile(r"show\.(source|file)|(\w+\.)?show_\w+")


@dataclass
class PageOutputs:
    """Outputs of a page; without `book`, the page has still to be executed."""

    path: Path  # file of the outputs
    book: nbformat.NotebookNode | None  # None: the page has to be executed
    how: str
    stale: list[str]  # reasons why an existing recording is outdated


class LessonFailed(SphinxError):
    """Failure of a cell, which ends the build."""

    category = "Lesson failed"


def choose_outputs(app: Sphinx) -> list[str]:
    """Find outputs for all pages; return the pages whose outputs have changed."""
    env, root = app.env, Path(app.srcdir)
    before: dict[str, Any] = getattr(env, "page_outputs", {})
    now: dict[str, Any] = {}
    failures = []
    app.lesson_books = {}
    pages = set(build.list_pages(root))
    found: dict[str, PageOutputs] = {}
    finder = build.DependencyFinder(root)  # executing a page changes no file
    sources = _list_source_names(root)
    if getattr(env, "source_names", None) != sources:
        env.source_names, env.current_outputs = sources, {}
    for docname in sorted(env.found_docs):
        name = docname.removeprefix(LESSONS_PREFIX)
        if name not in pages:
            continue
        if not build.has_cells(Path(env.doc2path(docname))):
            words = "has no notebook header: its first lines must say format_name: myst"
            failures.append(f"{docname}.md {words}")
            continue
        found[docname] = _find_outputs(name, app, finder)
    failures += _execute_missing({d.removeprefix(LESSONS_PREFIX): found[d] for d in found}, app)
    if failures:
        raise LessonFailed("\n\n".join(failures))
    for docname, page in found.items():
        if docname.startswith(LESSONS_PREFIX):
            app.lesson_books[docname] = page.book
        now[docname] = {
            "how": page.how,
            "stale": page.stale,
            "about": build.get_metadata(page.book),
            "content": hashlib.sha256(nbformat.writes(page.book).encode()).hexdigest(),
        }
        reader = (read_with_outputs, {"book": page.path}, False)
        env.mystnb_config.custom_formats[f"/{docname}.md"] = reader
    outdated = [docname for docname in now if now[docname] != before.get(docname)]
    if now != before:
        outdated.append(EXECUTIONS_PAGE)
    env.page_outputs = now
    env.lesson_outputs = {d: state for d, state in now.items() if d.startswith(LESSONS_PREFIX)}
    return outdated


def _find_outputs(name: str, app: Sphinx, finder: build.DependencyFinder) -> PageOutputs:
    """Return a page's recording or the outputs of an earlier build, if one of them is current."""
    root = Path(app.srcdir)
    path, stale = root / build.RECORDINGS_FOLDER / f"{name}.ipynb", []
    if path.exists() and os.environ.get("RECORDED") != "0":
        recording = build.load_recording(path)
        if recording is None:
            stale = ["it cannot be read"]
        elif not (stale := _list_outdated_reasons(recording, path, name, app, finder)):
            return PageOutputs(path, recording, "recorded", [])
    kept = Path(app.outdir).parent / "executed" / f"{name}.ipynb"
    book = build.load_recording(kept)
    current = book is not None and not _list_outdated_reasons(book, kept, name, app, finder)
    book = book if current and _has_same_versions(book) else None
    return PageOutputs(kept, book, "executed", stale)


def _list_source_names(root: Path) -> list[str]:
    """Return the paths of all files in the folders of `root` that hold sources."""
    found = []
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if name[0] != "." and name not in _BUILT_FOLDERS]
        found += [os.path.join(folder, name) for name in files]
    return sorted(found)


def _list_outdated_reasons(
    book: nbformat.NotebookNode, path: Path, name: str, app: Sphinx, finder: build.DependencyFinder
) -> list[str]:
    """Return why the outputs `book`, in the file `path`, are outdated for the page `name`.

    A key follows from the page, the names of all sources, and the content of those in the key:
    where these are as they were when the outputs were last current, none is computed.
    """
    inputs = hash_files([key.get_source_path(name, finder.root), path])
    files = build.get_metadata(book).get("files", {})
    if app.env.current_outputs.get(name) == inputs and key.are_unchanged(files, finder.root):
        return []
    stale = build.list_outdated_reasons(book, name, finder.root, finder)
    app.env.current_outputs[name] = "" if stale else inputs
    return stale


def announce_others(config: Config) -> None:
    """Say on the pages of the first lesson's small site that the other pages are missing yet."""
    if config.external_toc_path.endswith(FIRST_CONTENTS):
        words = "The other lessons are being executed, and links to them lead nowhere yet."
        config.html_theme_options["announcement"] = f"{words} The terminal says which are done."


def _build_first_lesson(root: Path) -> None:
    """Build a small site around the first lesson, to be read while the others are executed."""
    toc = root / FIRST_CONTENTS
    pages = (f"- file: {name}\n" for name in (f"{LESSONS_PREFIX}{FIRST}", *FIRST_LINKS))
    toc.write_text(f"format: jb-book\nroot: book/index\nchapters:\n{''.join(pages)}", "utf-8")
    program = "import gc; gc.disable(); from jupyter_book.cli.main import main; main()"
    command = [sys.executable, "-c", program, "build", "--toc", str(toc), "."]
    # Links to the other pages are missing yet; an error comes again in the build of the whole site.
    done = subprocess.run(command, cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    shutil.rmtree(root / "_build/.doctrees", ignore_errors=True)
    if not done.returncode:
        page = f"_build/html/{LESSONS_PREFIX}{FIRST}.html"
        logger.info("The first lesson is there: %s. The others follow.", page)


def _execute_missing(found: dict[str, PageOutputs], app: Sphinx) -> list[str]:
    root, failures, ended = Path(app.srcdir), {}, count(1)

    def save_outcome(name: str, book: nbformat.NotebookNode | build.LessonError) -> None:
        begin = f"executed {next(ended)} of {len(todo)}: {name}"
        if not isinstance(book, build.LessonError):
            try:
                build.save_recording(book, found[name].path)
            except OSError as error:  # a full disk
                book = build.LessonError(f"{name}.md: its outputs could not be kept: {error}")
        if isinstance(book, build.LessonError):
            failures[name] = str(book)
            logger.info("%s, failed", begin)
            return
        found[name].book = book
        made = build.get_metadata(book)
        twice = "".join(f"; code cell {number} measured again" for number in made["again"])
        why = f"; {shorten_reasons(found[name].stale)}" if found[name].stale else ""
        logger.info("%s, %.0f s%s%s", begin, made["seconds"], twice, why)
        if name in first:
            first.remove(name)
            if not first and others and not Path(app.outdir, "index.html").exists():
                _build_first_lesson(root)

    todo = [name for name in found if found[name].book is None]
    first = [name for name in (FIRST, "book/index") if name in todo]
    others = len(todo) > len(first)
    # The longest pages go first, so that none of them runs alone at the end.
    todo.sort(key=lambda name: (name not in first, -key.get_source_path(name, root).stat().st_size))
    if todo:
        logger.info("\nexecuting %s of %s pages", len(todo), len(found))
        with _defer_interrupts():
            build.execute_pages(todo, root, save_outcome, cpu=True)
    return [failures[name] for name in todo if name in failures]


@contextmanager
def _defer_interrupts() -> Iterator[None]:
    """Defer an interrupt to the previous handler until all kernels have ended."""
    before = signal.getsignal(signal.SIGINT)
    if callable(before):
        signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupted = False
    try:
        yield
    except KeyboardInterrupt:
        interrupted = True
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupted:
        signal.raise_signal(signal.SIGINT)


def shorten_reasons(reasons: list[str], most: int = 3) -> str:
    """Join the first few reasons, with the number of further ones."""
    more = [f"and {len(reasons) - most} more"] if len(reasons) > most else []
    return "; ".join([*reasons[:most], *more])


def _has_same_versions(book: nbformat.NotebookNode) -> bool:
    made, now = build.get_metadata(book)["versions"], facts.get_versions()
    return {**made, "shardlab": ""} == {**now, "shardlab": ""}  # its files are in the key


def read_with_outputs(text: str, book: Path) -> nbformat.NotebookNode:
    """Return the page `text` with the outputs of the executed notebook in the file `book`."""
    page = copy_outputs(build.parse_notebook(text), build.load_recording(book))
    for cell in build.code_cells(page):
        _set_fold_title(cell)
        if _only_shows(cell.source):
            cell.metadata["tags"] = [*cell.metadata.get("tags", []), "remove-input"]
        cell.outputs = [one for one in cell.outputs if not _is_missing_answer(one)]
    page.metadata["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}
    return page


def _set_fold_title(cell: nbformat.NotebookNode) -> None:
    """Turn a folded cell's first line, a comment that describes it, into the fold's title."""
    first, _, rest = cell.source.partition("\n")
    if FOLDED_TAG in cell.metadata.get("tags", []) and first.startswith("# "):
        title = first.removeprefix("# ").replace("`", "")  # plain text on the page
        cell.metadata["mystnb"] = {"code_prompt_show": title, "code_prompt_hide": title}
        cell.source = rest.lstrip("\n")


def _only_shows(source: str) -> bool:
    """Return True if a cell is one call that shows a source, a file or a session."""
    try:
        statements = ast.parse(source).body
    except SyntaxError:  # a cell's magic
        return False
    match statements:
        case [ast.Expr(value=ast.Call(func=function))]:
            return bool(_SHOWING_CALL.fullmatch(ast.unparse(function)))
    return False


def _is_missing_answer(output: nbformat.NotebookNode) -> bool:
    """Return True for what `check` says of the unanswered form, which only a notebook needs."""
    return 'class="verdict verdict-wrong"' in output.get("data", {}).get("text/html", "")


def copy_outputs(page: nbformat.NotebookNode, made: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Return the notebook `page` with the outputs of the executed notebook `made`."""
    for cell, done in zip(build.code_cells(page), build.code_cells(made), strict=True):
        cell.outputs = done.outputs
        cell.execution_count = done.execution_count
    return page
