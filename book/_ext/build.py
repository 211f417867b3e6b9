"""`make book`: Jupyter Book, which ends in one line when it is interrupted."""

import os
import signal


def interrupted(number: int, frame: object) -> None:
    """Say that it was, and end as one who was: `make` then ends, too."""
    print("\nInterrupted. What was executed is kept, and make book goes on from there.", flush=True)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupted)
    from jupyter_book.cli.main import main  # seconds

    main(["build", "-W", "-n", "--keep-going", "."])
