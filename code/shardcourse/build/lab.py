"""Write the lessons as notebooks to work in, into the folder lab/, which git ignores.

    python -m shardlab lab    # writes what is new or changed there; `make lab` opens it, too

A notebook is written again when its page has changed. A notebook that the reader has edited, run
or saved is never overwritten: it moves to lab/kept/, and a line says so. contents.ipynb lists all
notebooks in reading order.
"""

from __future__ import annotations

import argparse
import hashlib
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from shardtools import options

from . import find_course_root, index
from .key import get_source_path, has_cells
from .notebook_export import export_notebook, make_notebook

if TYPE_CHECKING:
    import nbformat

LAB_FOLDER = Path("lab")
CONTENTS_FILE = "contents.ipynb"


def write_notebooks(root: Path) -> list[str]:
    """Update the folder lab/ of the course in `root`, and return what was done."""
    import nbformat

    folder = root / LAB_FOLDER
    folder.mkdir(exist_ok=True)
    contents, names = "# One Model, Many GPUs\n" + _INTRO, []
    for part in index.read_index(root).parts:
        here = [topic.topic for topic in part.topics]
        here += [page for page in part.pages if has_cells(get_source_path(page, root))]
        if here:
            entries = [f"- {_format_link(name, root)}\n" for name in here]
            contents += "".join([f"\n## {part.part}\n\n", *entries])
            names += here
    new = nbformat.v4.new_markdown_cell
    done = _update_notebook(make_notebook([new(contents)]), folder / CONTENTS_FILE, root)
    for name, after in zip(names, [*names[1:], None], strict=True):
        book = export_notebook(name, root, beside=True, needs=index.link_prerequisites(name, root))
        next_one = f"Next: {_format_link(after, root)} · " if after else ""
        book.cells.append(new(f"{next_one}[All lessons]({CONTENTS_FILE})", id="next"))
        done += _update_notebook(book, folder / f"{Path(name).name}.ipynb", root)
    return done


_INTRO = """
These notebooks are yours to run and to change; the lessons' sources stay as they are.
`make lab` writes a notebook anew when its lesson has changed, and keeps yours in `kept` then.
"""


def _format_link(name: str, root: Path) -> str:
    lines = get_source_path(name, root).read_text("utf-8").splitlines()
    title = next(line[2:] for line in lines if line.startswith("# "))
    return f"[{title}]({Path(name).name}.ipynb)"


def _update_notebook(book: nbformat.NotebookNode, path: Path, root: Path) -> list[str]:
    """Write `book` to `path` if the page has changed; keep a notebook that the reader edited."""
    import nbformat

    made = _hash_notebook(book)
    done = []
    if path.exists():
        try:
            there = nbformat.read(path, as_version=4)
            before = there.metadata.pop("shardlab", {}).get("made")
        except Exception:  # whatever the parser raises for a file that is no notebook
            there = before = None
        if before == made:
            return []
        if before is None or _hash_notebook(there) != before:
            kept = path.parent / "kept" / f"{path.stem}-{datetime.now():%Y-%m-%d-%H%M%S}.ipynb"
            kept.parent.mkdir(exist_ok=True)
            path.rename(kept)
            names = path.relative_to(root), kept.relative_to(root)
            done = ["{}: its lesson has changed; yours, with what you did, is {}".format(*names)]
    book.metadata["shardlab"] = {"made": made}
    path.write_text(nbformat.writes(book) + "\n", "utf-8")
    return done or [f"wrote {path.relative_to(root)}"]


def _hash_notebook(book: nbformat.NotebookNode) -> str:
    """Return a hash that shows whether a notebook is still as it was written."""
    import nbformat

    return hashlib.sha256(nbformat.writes(book).encode()).hexdigest()[:16]


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `lab` to the command line."""
    parser = options.add_parser(commands, "lab", __doc__)
    parser.set_defaults(command=_main)


def _main(_: argparse.Namespace) -> int:
    for line in write_notebooks(find_course_root()):
        print(line)
    return 0
