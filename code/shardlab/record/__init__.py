"""Execute lessons, and keep their outputs.

    python -m shardlab record                      # all lessons, on the machine at hand
    python -m shardlab record collectives
    python -m shardlab record --archive out.zip    # and all recordings in one file, to carry
    python -m shardlab record --unpack out.zip     # the recordings of such a file, put in place

A recording is book/recorded/<topic>.ipynb: the code cells with their outputs, on what machine they
were made (`facts`), and a key over everything that they depend on (`key`). The book's build uses a
recording as long as its key fits; otherwise it executes the lesson with the same `execute`, as it
does with the pages in book/ that have cells (`pages`): these are cheap, and are not recorded.
Neither needs Sphinx: nbclient, ipykernel and jupytext, and what the lessons import.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import zipfile
from pathlib import Path

import nbformat

from .kernel import LessonError, about, changed, execute
from .key import Key, cell_hash, code_cells, lessons, notebook, pages, reach, source

__all__ = [
    "Key",
    "LessonError",
    "about",
    "add_command",
    "archive",
    "cell_hash",
    "changed",
    "code_cells",
    "course",
    "execute",
    "lessons",
    "load",
    "notebook",
    "pages",
    "reach",
    "save",
    "selected",
    "source",
    "unpack",
]

RECORDED = Path("book/recorded")
_MEMBER = re.compile(r"[a-z][a-z0-9_]*\.ipynb")
_LARGEST = 64 * 10**6  # bytes: a recording takes some 10 kB


def course(start: Path | None = None) -> Path:
    """The course's folder: the nearest one above `start` (or above here) that holds lessons/.

    Raises ValueError when there is none.
    """
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents, *Path(__file__).resolve().parents):
        if (folder / "_toc.yml").is_file() and (folder / "lessons").is_dir():
            return folder
    raise ValueError(f"{here} is in no course: no folder above it holds _toc.yml and lessons/")


def selected(names: list[str], root: Path) -> list[str]:
    """The topics that `names` names, all of them for []. Raises ValueError for an unknown one."""
    known = lessons(root)
    wrong = [name for name in names if name not in known]
    if wrong:
        raise ValueError(f"no such lesson: {', '.join(wrong)}; allowed are {', '.join(known)}")
    return list(dict.fromkeys(names)) or known


def load(path: Path) -> nbformat.NotebookNode | None:
    """The recording in the file `path`; None when there is none that can be read."""
    try:
        book = nbformat.read(path, as_version=4)
        return book if about(book) else None
    except Exception:  # whatever a file that is no notebook makes the parser raise
        return None


def save(book: nbformat.NotebookNode, path: Path) -> None:
    """Write a recording so that a reader finds the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path, (nbformat.writes(book) + "\n").encode())


def archive(path: Path, root: Path) -> list[str]:
    """Write all recordings into the zip file `path`; return their names."""
    files = sorted((root / RECORDED).glob("*.ipynb"))
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for member in files:
            file.write(member, member.name)
    return [member.name for member in files]


def unpack(path: Path, root: Path) -> list[str]:
    """Put the recordings of the zip file `path` in place; return their names.

    Raises ValueError, before anything is written, when a member is not a recording of a lesson or
    would leave the folder.
    """
    contents: dict[str, bytes] = {}
    try:
        with zipfile.ZipFile(path) as file:
            for member in file.infolist():
                name = member.filename
                if not _MEMBER.fullmatch(name):
                    raise ValueError(
                        f"{path} holds {name!r}: allowed are <topic>.ipynb, without folders"
                    )
                if member.file_size > _LARGEST:
                    raise ValueError(f"{path} holds {name!r} of {member.file_size} bytes: too many")
                contents[name] = file.read(member)
    except (zipfile.BadZipFile, OSError) as error:
        raise ValueError(f"{path} cannot be read as an archive of recordings: {error}") from None
    for name, data in contents.items():
        try:
            stated = about(nbformat.reads(data.decode(), as_version=4))
        except Exception:  # whatever a file that is no notebook makes the parser raise
            stated = {}
        if stated.get("topic") != name.removesuffix(".ipynb"):
            raise ValueError(f"{path} holds {name!r}, which is no recording of that lesson")
    for name, data in contents.items():
        _replace(root / RECORDED / name, data)
    return list(contents)


def _replace(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `record` to the command line."""
    parser = commands.add_parser(
        "record",
        help="execute lessons on this machine and keep their outputs in book/recorded/",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("lesson", nargs="*", help="topics; all lessons when none is named")
    parser.add_argument("--archive", type=Path, metavar="FILE", help="then write all into a zip")
    parser.add_argument("--unpack", type=Path, metavar="FILE", help="only unpack such a zip")
    parser.set_defaults(command=_main)


def _main(options: argparse.Namespace) -> int:
    root = course()
    if options.unpack:
        if options.lesson or options.archive:
            raise ValueError("--unpack goes with no lesson and not with --archive")
        for name in unpack(options.unpack, root):
            print(f"unpacked {RECORDED / name}")
        return 0
    topics = selected(options.lesson, root)
    failed = 0
    for topic in topics:  # one after another: lessons never share a GPU
        try:
            book = execute(topic, root)
        except LessonError as error:
            print(error, file=sys.stderr)
            failed += 1
            continue
        save(book, root / RECORDED / f"{topic}.ipynb")
        stated = about(book)
        device = stated["device"]
        print(f"recorded {topic}: {stated['seconds']} s on {device['count']} × {device['name']}")
    if options.archive:
        names = archive(options.archive, root)
        print(f"wrote {len(names)} recordings into {options.archive}")
    return 1 if failed else 0
