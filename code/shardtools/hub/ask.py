"""The process that builds, from outside: started, asked, and ended whatever it is at."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

START = 120  # seconds until torch and transformers are loaded, on a busy machine
SECONDS = 60  # for one configuration
MEMORY = 12 * 2**30  # bytes of its address space, of which loading takes a good part


class Builder:
    """One such process, for as many configurations as one likes; a new one where it ended."""

    def __init__(self, seconds: int = SECONDS, memory: int = MEMORY) -> None:
        self.seconds, self.memory = seconds, memory
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Builder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        """What the model is. Raises ValueError, in one line, for whatever went wrong there."""
        answer: bytes | None = b"ready"
        if self.process is None:
            self.process = _started(self.seconds, self.memory)
            answer = _line(self.process, START)
        if answer:
            with suppress(OSError):  # which has ended: then there is no answer
                assert self.process.stdin
                self.process.stdin.write(json.dumps(asked).encode() + b"\n")
                self.process.stdin.flush()
            answer = _line(self.process, self.seconds + 5)  # its own alarm comes first
        if answer:
            found = json.loads(answer)
            if "error" in found:
                raise ValueError(found["error"])
            return found
        status = self.end()
        if answer is None or status == -signal.SIGALRM:
            raise ValueError(f"transformers' class is not built after {self.seconds} seconds")
        words = "the process that builds transformers' class ended"
        raise ValueError(f"{words} with status {status}, in {self.memory / 2**30:.3g} GiB")

    def end(self) -> int:
        """End it and all that it started; its exit status."""
        if self.process is None:
            return 0
        process, self.process = self.process, None
        if process.poll() is None:
            try:
                process.wait(0.2)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        for pipe in (process.stdin, process.stdout):
            if pipe:
                with suppress(OSError):  # what was not written yet, to a process that is gone
                    pipe.close()
        return process.wait()


def _started(seconds: int, memory: int) -> subprocess.Popen[bytes]:
    own = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, (own, os.environ.get("PYTHONPATH"))))
    more = {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, "-m", "shardtools.hub.child", str(seconds), str(memory)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env={**os.environ, **more}, start_new_session=True,
    )  # fmt: skip


def _line(process: subprocess.Popen[bytes], limit: float) -> bytes | None:
    """What it says, b"" where it ended, None where that takes too long."""
    assert process.stdout
    ready, _, _ = select.select([process.stdout], [], [], limit)
    return process.stdout.readline() if ready else None
