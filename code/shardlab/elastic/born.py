"""What the process of a rank does first: from here on it does not outlive its agent.

    python born.py 4711 python train.py     # 4711 is the agent; then it becomes `python train.py`

A program of its own, for subprocess's `preexec_fn` runs in a copy of the agent, of whose threads
one alone is left: a lock that another one held stays held, and the rank hangs before it begins.

The standard library alone, and little of that: each rank waits for it.
"""

import ctypes
import os
import signal
import sys


def main() -> None:
    """Ask Linux's kernel to kill this process when its agent is gone, and become the rank."""
    agent, *program = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # 1 is PR_SET_PDEATHSIG
        if os.getppid() != int(agent):  # it has died already
            os._exit(1)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.exit(f"{program[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
