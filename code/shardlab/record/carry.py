"""What one machine made, in one zip file, for another one.

A recording is <topic>.ipynb in it, a benchmark's figures are <topic>_<ranks>.json; and from
`python -m shardlab gpu` come its summary, the result of its tests and its logs.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

RECORDED = Path("book/recorded")
FIGURES = Path("benchmarks/recorded")
WORK = Path("_build/gpu")
_MEMBERS = {  # a member's name -> the folder that it belongs in
    r"[a-z][a-z0-9_]*\.ipynb": RECORDED,
    r"[a-z][a-z0-9_]*_[0-9]+\.json": FIGURES,
    r"(summary|tests)\.json|logs/[a-z0-9_]+\.log": WORK,
}
_LARGEST = 64 * 10**6  # bytes: a recording takes some 10 kB


def archive(path: Path, root: Path, files: Iterable[Path] | None = None) -> list[str]:
    """Write `files`, by default all recordings, into the zip file `path`; return their names."""
    if files is None:
        files = sorted((root / RECORDED).glob("*.ipynb"))
    names = {f"logs/{f.name}" if f.suffix == ".log" else f.name: f for f in files}
    room(path)
    part = path.with_name(f".{path.name}.part")
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name, file in names.items():
            zipped.write(file, name)
    os.replace(part, path)
    return list(names)


def unpack(path: Path, root: Path) -> list[Path]:
    """Put what the zip file `path` holds in place; return the paths, below `root`.

    Raises ValueError, before anything is written, when a member is not what its name says, or
    would leave its folder.
    """
    contents = read(path)
    for name, data in contents.items():
        _check(path, name, data)
    found = {folder(name) / name: data for name, data in contents.items()}
    for place, data in found.items():
        replace(root / place, data)
    return list(found)


def read(path: Path) -> dict[str, bytes]:
    """The members of the zip file `path`. Raises ValueError when one has no place here."""
    contents: dict[str, bytes] = {}
    try:
        with zipfile.ZipFile(path) as file:
            for member in file.infolist():
                name = member.filename
                if not folder(name):
                    raise ValueError(
                        f"{path} holds {name!r}: allowed are <topic>.ipynb, <topic>_<ranks>.json, "
                        "summary.json, tests.json and logs/<step>.log"
                    )
                if member.file_size > _LARGEST:
                    raise ValueError(f"{path} holds {name!r} of {member.file_size} bytes: too many")
                contents[name] = file.read(member)
    except (zipfile.BadZipFile, OSError) as error:
        raise ValueError(f"{path} cannot be read as an archive of recordings: {error}") from None
    return contents


def folder(name: str) -> Path | None:
    """The folder that a member belongs in, below the root; None for what no archive holds."""
    return next((room for form, room in _MEMBERS.items() if re.fullmatch(form, name)), None)


def replace(path: Path, data: bytes) -> None:
    """Write a file so that a reader finds the old one or the new one, never a part."""
    room(path)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def room(path: Path) -> None:
    """Make the folder in which the file `path` is to stand."""
    path.parent.mkdir(parents=True, exist_ok=True)


def _check(path: Path, name: str, data: bytes) -> None:
    """Raise ValueError unless a recording, or a benchmark's figures, are those of their lesson."""
    place = folder(name)
    if place == WORK:
        return
    try:
        stated = json.loads(data)
        if place == RECORDED:
            stated = stated["metadata"]["shardlab"]
        topic = stated["topic"]
    except (ValueError, LookupError, TypeError):
        topic = None
    if topic != (name.removesuffix(".ipynb") if place == RECORDED else name.rpartition("_")[0]):
        what = "recording" if place == RECORDED else "benchmark"
        raise ValueError(f"{path} holds {name!r}, which is no {what} of that lesson")
