"""Run a worker of pytest-xdist, and end it with all that it started when a test hangs.

    python tests/guard.py ARGUMENTS OF PYTHON    # phases.py gives this to xdist instead of python

pytest-timeout raises one error in the test's main thread. That error ends no test that stands in C
code, and none whose cleanup waits as well, like the exit of a thread pool. This process is told by
the worker's conftest.py which test runs and what its limit is. After that limit it kills the
worker; xdist then reports the test as failed, and goes on with another worker.
"""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

from phases import GUARD

from shardcourse.build import child

MARGIN = 1.2  # of a test's limit: pytest-timeout, which also says where the test stood, comes first


def main(arguments: list[str]) -> int:
    """Run Python with `arguments`; return its exit status. Nothing that it started is left."""
    child.adopt_orphans(True)
    reading, writing = os.pipe()
    worker = subprocess.Popen(
        [sys.executable, *arguments],
        env=os.environ | {GUARD: str(writing)},
        pass_fds=[writing],
        preexec_fn=child.die_with_parent,
    )
    os.close(writing)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0), os.dup2(nothing, 1)  # xdist waits until the worker's ends are closed
    test, limit, end = "", "", math.inf
    while worker.poll() is None and time.monotonic() < end:
        if select.select([reading], [], [], 0.1)[0]:
            *_, last = os.read(reading, 65536).decode().splitlines() or [""]
            limit, _, test = last.partition(" ")
            end = time.monotonic() + MARGIN * float(limit) if test else math.inf
    if worker.poll() is None:
        print(f"\n{test} did not end within its {limit} s: its process is killed", file=sys.stderr)
        worker.send_signal(signal.SIGABRT)  # pytest's faulthandler writes where its threads stand
        with suppress(subprocess.TimeoutExpired):
            worker.wait(5.0)
    child.end_started()
    return worker.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
