"""Run Jupyter Book for `make book`, with a one-line message on an interrupt or a failed page.

python book/_ext/build.py singlehtml    # all pages in one, as `make pdf` prints them
"""

import os
import re
import signal
import sys


def on_interrupt(number: int, frame: object) -> None:
    """Print a message, then end this process by the same signal, so that `make` ends, too."""
    print("\nInterrupted. What was executed is kept, and make book goes on from there.", flush=True)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, on_interrupt)
    from jupyter_book.cli.main import main  # slow: takes seconds
    from sphinx.errors import SphinxError

    try:
        builder = "singlehtml" if "singlehtml" in sys.argv else "html"
        strict = ["-W", "-n", "--keep-going"] if builder == "html" else []
        main(["build", "--builder", builder, *strict, "."])
    except RuntimeError as error:  # its traceback is in Jupyter Book's code
        if not isinstance(error.__cause__, SphinxError):
            raise
        text = str(error.__cause__)  # a page's first line says why; its cell is logged above
        sys.exit("\n".join(re.findall(r"(?m)^\S+\.md\b.*$", text)) or text)
