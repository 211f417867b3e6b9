"""A folder has one writer, exactly as long as the writer's process lives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardlab.common import folder_lock, show

HOLDS = """
import os, sys, time
from pathlib import Path
from shardlab.common import folder_lock
held = folder_lock.lock_folder(Path(sys.argv[1]), "a training job")
parent = os.getpid()
if os.fork() == 0:
    print(parent, flush=True)  # it runs, and has let go
    time.sleep(100)  # as a loader's worker that outlives its parent
time.sleep(100)
"""


def test_the_second_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    first = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=show.ROOT / "code",
        start_new_session=True,
    )
    try:
        assert first.stdout and int(first.stdout.readline()) == first.pid
        for _ in range(2):  # a refusal changes nothing
            with pytest.raises(ValueError, match="another process writes into it") as said:
                folder_lock.lock_folder(tmp_path, "another")
            assert repr(str(tmp_path)) in str(said.value)
        os.kill(first.pid, signal.SIGKILL)  # only the process, not its child
        first.wait()
        held = folder_lock.lock_folder(tmp_path, "another")
        with pytest.raises(ValueError, match="writes into it"):
            folder_lock.lock_folder(tmp_path, "a third in this process")
        held.release()
        folder_lock.lock_folder(tmp_path, "another").release()
    finally:
        os.killpg(first.pid, signal.SIGKILL)
