"""What one machine made, in one zip file, for another one.

A recording is <topic>.ipynb in it, a benchmark's figures are <topic>_<ranks>.json; and from
`python -m shardlab gpu` come its summary, the result of its tests and its logs.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from shardlab.common.files import LARGEST
from shardtools.options import written

RECORDED = Path("book/recorded")
FIGURES = Path("benchmarks/recorded")
WORK = Path("_build/gpu")
_MEMBERS = {  # a member's name -> the folder that it belongs in
    r"[a-z][a-z0-9_]*\.ipynb": RECORDED,
    r"[a-z][a-z0-9_]*_[0-9]+\.json": FIGURES,
    r"(summary|tests)\.json|logs/[a-z0-9_]+\.log": WORK,
}


def archive(path: Path, root: Path, files: Iterable[Path] | None = None) -> list[str]:
    """Write `files`, by default all recordings, into the zip file `path`; return their names."""
    if files is None:
        files = sorted((root / RECORDED).glob("*.ipynb"))
    names = {f"logs/{f.name}" if f.suffix == ".log" else f.name: f for f in files}

    def write(part: Path) -> None:
        with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as zipped:
            for name, file in names.items():
                zipped.write(file, name)

    written("archive", path, write, room=True)
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
    for place in found:
        written("unpack", root / place, room=True)
    for place, data in found.items():
        replace(root / place, data)
    return list(found)


def read(path: Path) -> dict[str, bytes]:
    """The members of the zip file `path`. Raises ValueError when one has no place here."""
    contents: dict[str, bytes] = {}
    try:
        if not path.is_file():  # what is none can keep a reader waiting
            raise ValueError("it is no plain file")
        with zipfile.ZipFile(path) as file:
            members = file.infolist()
            if not (wrong := _wrong(members)):
                contents = {member.filename: _data(file, member) for member in members}
    except Exception as error:  # whatever a damaged file makes zipfile and what it uses raise
        wrong = f"cannot be read as an archive of recordings: {error}"
    if wrong:
        raise ValueError(f"{path} {wrong}")
    return contents


def _wrong(members: Iterable[zipfile.ZipInfo]) -> str:
    """What keeps members from being taken, by their names and sizes; "": nothing."""
    names, size = Counter(member.filename for member in members), 0
    for member in members:
        name = member.filename
        if not folder(name):
            allowed = "<topic>.ipynb, <topic>_<ranks>.json, summary.json, tests.json"
            return f"holds {name[:100]!r}: allowed are {allowed} and logs/<step>.log"
        if names[name] > 1:
            return f"holds {name!r} {names[name]} times: allowed is once"
        size += member.file_size
        if size > LARGEST:  # a recording takes some 10 kB
            return f"holds {name!r} and more: allowed are {LARGEST} bytes of all members together"
    return ""


def _data(file: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    """What a member holds, never more than it says; raises whatever zipfile has for a damaged one.

    (`ZipFile.read` unpacks all there is, and looks afterwards how much it should have been.)
    """
    with file.open(member) as opened:
        data = opened.read(member.file_size + 1)
    if len(data) != member.file_size:
        raise ValueError(f"{member.filename!r} is not as long as it says")
    return data


def folder(name: str) -> Path | None:
    """The folder that a member belongs in, below the root; None for what no archive holds."""
    return next((room for form, room in _MEMBERS.items() if re.fullmatch(form, name)), None)


def replace(path: Path, data: bytes) -> None:
    """Write a file, and make its folder, as `options.written` does."""
    written("file", path, lambda part: part.write_bytes(data), room=True)


def _check(path: Path, name: str, data: bytes) -> None:
    """Raise ValueError unless a recording, or a benchmark's figures, are those of their lesson."""
    place = folder(name)
    if place == WORK:
        return
    try:
        stated = json.loads(data)
        if place == RECORDED:
            stated = stated["metadata"]["shardlab"] if isinstance(stated["cells"], list) else {}
        topic = stated["topic"]
    except (ValueError, LookupError, TypeError, RecursionError):
        topic = None
    if topic != (name.removesuffix(".ipynb") if place == RECORDED else name.rpartition("_")[0]):
        what = "recording" if place == RECORDED else "benchmark"
        raise ValueError(f"{path} holds {name!r}, which is no {what} of that lesson")
