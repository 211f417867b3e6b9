"""Runner for one program with a time limit, which also ends every process that it started."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

import psutil

CLEANUP_SECONDS = 10.0  # seconds that a program has to clean up


def run_with_time_limit(
    command: Sequence[str],
    log: Path | None,
    output: Path | None,
    seconds: float | None,
    folder: Path,
    environment: Mapping[str, str],
    cleanup_seconds: float = CLEANUP_SECONDS,
) -> int | None:
    """Run `command` in `folder`; return its exit status, None if `seconds` ran out before.

    stderr is appended to the file `log` and stdout to `output`; both may be the same file, and None
    inherits this process's stream. At the limit the program has `patience` seconds to clean up.
    """
    with (
        open(log, "ab") if log else nullcontext() as stderr_file,
        open(output, "ab") if output else nullcontext() as stdout_file,
    ):
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout_file,
            stderr=stderr_file,
            start_new_session=True,  # the terminal's Ctrl-C reaches this process alone
        )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            started = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(cleanup_seconds)
            for one in (process, *started):
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            process.wait()
            psutil.wait_procs(started, timeout=CLEANUP_SECONDS)
