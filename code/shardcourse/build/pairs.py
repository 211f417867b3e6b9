"""Write the generated files: scripts from lessons, and those that are made from book/topics.yml.

    python -m shardlab pairs            # write the files that are out of date
    python -m shardlab pairs --check    # only list them; exit status 1 if there are any

A lesson's script is code/lessons/<topic>.py, and its notebook, lessons/<topic>.md, is the source:
one way, always. jupytext's own two-way synchronisation trusts the newer file, and in a fresh clone
that can be the wrong one. `shardcourse.build.index` lists the other generated files.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from shardtools import options

from . import find_course_root, index, list_lessons
from .key import load_notebook
from .notebook_export import format_install

SCRIPTS_FOLDER = Path("code/lessons")
_NEEDS = """\
*As a script: `python {topic}.py` runs it, without Jupyter or a GPU, where the course's package is \
installed: `{install}`.*"""


def make_script(topic: str, root: Path, alone: bool = False) -> str:
    """Return the lesson as a plain script: prose as comments, code cells unchanged.

    alone: add the requirements, for a reader without the course's folder.
    """
    import jupytext
    from jupytext.config import load_jupytext_config

    book = load_notebook(topic, root)  # `load_notebook` drops the metadata that are set below
    book.metadata.pop("source_map")
    book.metadata.setdefault("jupytext", {})["default_lexer"] = "ipython3"
    if alone:
        code = "\n".join(cell.source for cell in book.cells if cell.cell_type == "code")
        title, _, prose = book.cells[0].source.partition("\n\n")
        needs = _NEEDS.format(topic=topic, install=format_install(code, "/path/to/the/course{}"))
        prerequisites = re.sub(r"\]\([^)]*\)|\[", "", index.link_prerequisites(topic, root))
        needs += f"\n\n{prerequisites}" * bool(prerequisites)
        book.cells[0].source = f"{title}\n\n{needs}\n\n{prose}"
    config = load_jupytext_config(str(root / "lessons"))
    return jupytext.writes(book, fmt="py:percent", config=config)


def find_outdated(root: Path) -> dict[Path, str | None]:
    """Return the files that differ from their source, with the right contents (None: no source)."""
    wanted: dict[Path, str | None] = dict.fromkeys((root / SCRIPTS_FOLDER).glob("*.py"))
    for topic in list_lessons(root):
        wanted[root / SCRIPTS_FOLDER / f"{topic}.py"] = make_script(topic, root)
    wanted |= index.generate_files(root)
    return {
        path: text
        for path, text in wanted.items()
        if text is None or not path.is_file() or path.read_text("utf-8") != text
    }


def write_outdated(root: Path) -> list[str]:
    """Write files that are out of date, remove scripts without a lesson, return what was done."""
    done = []
    for path, text in find_outdated(root).items():
        if text is None:
            path.unlink()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
        done.append(f"{'removed' if text is None else 'wrote'} {path.relative_to(root)}")
    return done


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `pairs` to the command line."""
    parser = options.add_parser(commands, "pairs", __doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, only compare")
    parser.set_defaults(command=_main)


def _main(chosen: argparse.Namespace) -> int:
    root = find_course_root()
    if not chosen.check:
        for line in write_outdated(root):
            print(line)
        return 0
    late = find_outdated(root)
    for path, text in late.items():
        why = "has no lesson" if text is None else "differs from its source"
        print(f"{path.relative_to(root)} {why}: run `make pairs`")
    return 1 if late else 0
