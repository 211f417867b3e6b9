"""A file of the package that changes after its import is reported, once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import pathlib, sys, torch
from shardlab import ranks
from shardlab.common import show
import shardlab.first, shardlab.second
for module, call in (
    (shardlab.first, lambda: ranks.run(shardlab.first.value, 1)),
    (shardlab.second, lambda: show.source(shardlab.second)),
):
    path = pathlib.Path(module.__file__)
    for edit in ("", "# more\\n", "# and more\\n"):
        if edit:
            path.write_text(path.read_text() + edit)
        call()
"""


def test_a_changed_file_is_named_once_by_a_run_and_by_a_page(tmp_path: Path, root: Path):
    """The test edits two modules of its own in a package that counts as the course's."""
    folder = tmp_path / "shardlab"
    folder.mkdir()
    for path in (root / "code/shardlab").iterdir():
        (folder / path.name).symlink_to(path)
    added = [folder / f"{name}.py" for name in ("first", "second")]
    for path in added:
        path.write_text("def value():\n    return 1\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    words = "has changed since it was imported: restart the kernel to run the new code"
    assert done.stderr == "".join(f"{path} {words}\n" for path in added)
