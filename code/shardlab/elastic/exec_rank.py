"""Launch shim for a rank: ask the kernel to kill it with its agent, then exec the program.

    python exec_rank.py 4711 python train.py     # 4711 is the agent's process id

It is a separate program because subprocess's `preexec_fn` would run in a fork of the agent with
only one of its threads: a lock held by another thread would stay locked, and the rank would hang.

It imports only a little of the standard library, because the start of each rank waits for it.
"""

import ctypes
import os
import signal
import sys


def main() -> None:
    """Ask the Linux kernel to kill this process when its agent dies, then exec the rank."""
    agent, *program = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # 1 is PR_SET_PDEATHSIG
        if os.getppid() != int(agent):  # the agent has died already
            os._exit(1)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.exit(f"{program[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
