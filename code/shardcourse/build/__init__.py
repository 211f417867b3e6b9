"""Execute lessons, and keep their outputs.

    python -m shardlab record                      # all lessons, on the machine at hand
    python -m shardlab record collectives

A recording is book/recorded/<topic>.ipynb: the code cells with their outputs, on what machine they
were made (`facts`), and a key over everything that they depend on (`key`). The book's build uses a
recording whose key is current; otherwise it executes the lesson with the same `execute_page`. Pages
of book/ that have cells (`list_pages`) are always executed: they are cheap, and have no recording.
Recording needs nbclient, ipykernel, jupytext and what the lessons import, but not Sphinx.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shardtools.options import add_parser, write_file

from .kernel import LessonError, execute_page, execute_pages, get_metadata, list_outdated_reasons
from .key import (
    DependencyFinder,
    code_cells,
    compute_key,
    has_cells,
    list_lessons,
    list_pages,
    load_notebook,
    parse_notebook,
)

if TYPE_CHECKING:
    import nbformat

RECORDINGS_FOLDER = Path("book/recorded")
# Names that are imported only for other modules:
__all__ = ["DependencyFinder", "code_cells", "compute_key", "execute_pages", "has_cells"]
__all__ += ["list_outdated_reasons", "list_pages", "load_notebook", "parse_notebook"]


def find_course_root(start: Path | None = None) -> Path:
    """Return the course's folder: the nearest one above `start` (or this file) with lessons/.

    Raises ValueError when there is none.
    """
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents, *Path(__file__).resolve().parents):
        if (folder / "_toc.yml").is_file() and (folder / "lessons").is_dir():
            return folder
    raise ValueError(f"{here} is in no course: no folder above it holds _toc.yml and lessons/")


def select_topics(names: list[str], root: Path) -> list[str]:
    """Return the topics in `names`, all topics for []. Raises ValueError for an unknown topic."""
    known = list_lessons(root)
    wrong = [name for name in names if name not in known]
    if wrong:
        raise ValueError(f"lesson={', '.join(wrong)}: must be one of {', '.join(known)}")
    return list(dict.fromkeys(names)) or known


def load_recording(path: Path) -> nbformat.NotebookNode | None:
    """Return the recording in the file `path`; None if there is none or it cannot be read."""
    import nbformat

    try:
        book = nbformat.read(path, as_version=4)
        return book if get_metadata(book) else None
    except Exception:  # whatever the parser raises for a file that is no notebook
        return None


def save_recording(book: nbformat.NotebookNode, path: Path) -> None:
    """Write a recording atomically: a reader finds the old file or the new one, never a part."""
    import nbformat

    write_file("recording", path, nbformat.writes(book) + "\n", make_parent=True)


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `record` to the command line."""
    parser = add_parser(commands, "record", __doc__)
    parser.add_argument("lesson", nargs="*", help="topics; all lessons when none is named")
    parser.set_defaults(command=_main)


def _main(options: argparse.Namespace) -> int:
    root = find_course_root()
    topics = select_topics(options.lesson, root)
    failed = 0
    for topic in topics:  # one after another: lessons never share a GPU
        try:
            book = execute_page(topic, root)
        except LessonError as error:
            print(error, file=sys.stderr)
            failed += 1
            continue
        save_recording(book, root / RECORDINGS_FOLDER / f"{topic}.ipynb")
        stated = get_metadata(book)
        device = stated["device"]
        print(f"recorded {topic}: {stated['seconds']} s on {device['count']} × {device['name']}")
    return 1 if failed else 0
