"""Kill an agent's ranks and their child processes once the agent closes a pipe, or has died.

    python kill_sessions.py    # reads the ranks' process ids, one a line, until its input ends

It is a separate process because the agent may be killed with SIGKILL: then the kernel closes the
pipe. It imports only a little of the standard library: the start of each round waits for it.
"""

import os
import signal
import sys
import time
from contextlib import suppress


def list_session(leader: int) -> list[int]:
    """Return the processes that run in the session of `leader`, which may itself have ended."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:  # may have ended by now
            state, _, _, its, *_ = stat.read().rpartition(b")")[2].split()
            if int(its) == leader and state != b"Z":
                found.append(int(name))
    return found


def main() -> None:
    """Read process numbers until the input ends, then kill the sessions of all these processes."""
    for leader in [int(line) for line in sys.stdin]:  # the list is complete when the input ends
        for _ in range(1000):  # repeats find children forked since the last list of the session
            if sys.platform != "linux":
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(leader, signal.SIGKILL)
                break
            if not (left := list_session(leader)):
                break
            for process in left:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.001)


if __name__ == "__main__":
    main()
