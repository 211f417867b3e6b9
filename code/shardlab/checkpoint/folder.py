"""A folder of checkpoints on a disk: names, locks, files that last, and what tells damage.

A folder gets its final name by one rename, which a file system does entirely or not at all: so a
name without a dot at its front is a promise that everything is in it. The number at the front
counts saves and not steps, so that whoever goes back to step 500 and saves step 600 anew has a
current checkpoint with the new step 600 in it. No torch in here.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from shardlab.ranks.agree import check_whole

FORMAT, VERSION = "shardlab checkpoint", 2
MANIFEST = "manifest.json"
SAVING, OLD = ".saving-", ".old-"
_NAME = re.compile(r"(\d{6,})-step-(\d+)")
_CHUNK = 2**20


class CheckpointError(RuntimeError):
    """A checkpoint cannot be saved or used; the text names the file and says what is wrong."""


def complete(root: Path) -> list[Path]:
    """The folders of complete checkpoints in `root`, the current one last."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.split("-")[0]))


def step_of(path: Path) -> int:
    """The training step that a checkpoint's folder was saved after."""
    found = _NAME.fullmatch(path.name)
    assert found, path
    return int(found[2])


def choose(root: Path, step: int | None) -> Path:
    """The current checkpoint in `root`, or the newest one of `step`."""
    if step is not None:
        check_whole(0, step=step)
    found = complete(root)
    if not found:
        raise CheckpointError(f"{root}: there is no complete checkpoint in it")
    chosen = [path for path in found if step is None or step_of(path) == step]
    if not chosen:
        steps = ", ".join(str(step_of(path)) for path in found)
        raise ValueError(f"step={step!r}: allowed are {steps}")
    return chosen[-1]


def open_plain(path: Path) -> IO[bytes]:
    """Open a file to read; OSError for a link to who knows where, a folder, a pipe, a device.

    To open a pipe, or to read from it, is to wait for whoever writes into it.
    """
    if not stat.S_ISREG(path.lstat().st_mode):
        raise OSError(errno.EINVAL, "no plain file", str(path))
    return open(path, "rb")


def check_plain(path: Path) -> None:
    """Raise OSError for what is there and is no plain file."""
    with suppress(FileNotFoundError):
        open_plain(path).close()


def write_durably(path: Path, content: bytes) -> None:
    """Write a file, and return when it is on the disk and not just in the kernel's memory."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(directory: Path) -> None:
    """Have the names in a directory written to the disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def describe(path: Path) -> dict[str, int]:
    """The size of a file in bytes and its CRC-32, which finds damage (and stops no forger)."""
    checksum = size = 0
    with open_plain(path) as file:
        while chunk := file.read(_CHUNK):
            checksum = zlib.crc32(chunk, checksum)
            size += len(chunk)
    return {"bytes": size, "crc32": checksum}


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint; CheckpointError if it is none of ours, or damaged."""
    path = folder / MANIFEST
    try:
        with open_plain(path) as file:
            manifest = json.loads(file.read())
    except FileNotFoundError:
        text = f"{path}: there is no manifest, so this is no checkpoint of ours"
        raise CheckpointError(text) from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError as well
        raise CheckpointError(f"{path}: damaged, not JSON any more ({error})") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else manifest
        raise CheckpointError(f"{path}: format is {found!r}, allowed is {FORMAT!r}")
    if manifest.get("version") != VERSION:
        text = f"{path}: version is {manifest.get('version')!r}, this code reads {VERSION}"
        raise CheckpointError(text)
    contents = {k: v for k, v in manifest.items() if k != "crc32"}
    if manifest.get("crc32") != checksum_of(contents):
        raise CheckpointError(f"{path}: damaged, its own checksum does not fit")
    if manifest["step"] != step_of(folder):
        text = f"is of step {manifest['step']}, and not of the step that its folder's name says"
        raise CheckpointError(f"{path}: {text}")
    return manifest


def checksum_of(manifest: dict[str, Any]) -> int:
    """CRC-32 of a manifest's contents, whatever the order and the spacing they stand in."""
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def damage(folder: Path, files: dict[str, dict[str, int]], names: Iterable[str]) -> list[str]:
    """What is wrong with those of a checkpoint's `files` that have these `names`, in sentences."""
    problems = []
    for name in names:
        path, want = folder / name, files[name]
        try:
            check_plain(path)
            if (size := path.lstat().st_size) != want["bytes"]:
                problems.append(f"{path}: has {size:,} bytes instead of {want['bytes']:,}")
            elif (read := describe(path)["crc32"]) != want["crc32"]:
                text = f"{path}: damaged, its CRC-32 is {read:08x} instead of {want['crc32']:08x}"
                problems.append(text)
        except FileNotFoundError:
            problems.append(f"{path}: is missing")
        except OSError as error:
            problems.append(f"{path}: cannot be read: {error.strerror}")
    return problems
