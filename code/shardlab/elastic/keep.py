"""Kill an agent's ranks, with all that they started, once the agent closes a pipe, or is gone.

    python keep.py    # reads the ranks' process numbers, one a line, until its input is closed

A process of its own, for the agent may be killed with SIGKILL: the kernel closes the pipe then. The
standard library alone, and little of that: each round waits for it.
"""

import os
import signal
import sys
import time
from contextlib import suppress


def session(leader: int) -> list[int]:
    """Return the processes that run in the session of `leader`, which may itself have ended."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:  # it may end meanwhile
            state, _, _, its, *_ = stat.read().rpartition(b")")[2].split()
            if int(its) == leader and state != b"Z":
                found.append(int(name))
    return found


def main() -> None:
    """Wait for the end of the input; kill the sessions of all processes that it named."""
    for leader in [int(line) for line in sys.stdin]:  # the list is whole when the input ends
        for _ in range(1000):  # a process that has just forked: its child is found the next time
            if sys.platform != "linux":
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(leader, signal.SIGKILL)
                break
            if not (left := session(leader)):
                break
            for process in left:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.001)


if __name__ == "__main__":
    main()
