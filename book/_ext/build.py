"""Run Jupyter Book for `make book`, with a one-line message on an interrupt or a failed page.

python book/_ext/build.py singlehtml    # all pages in one, as `make pdf` prints them

BUILT holds a hash of the sources of the last build that ended well: equal ones need no other.
"""

import gc
import hashlib
import os
import re
import signal
import sys
from pathlib import Path

BUILT, SITE = Path("_build/.built"), Path("_build/html/index.html")
FOLDERS = ("benchmarks", "book", "code", "figures", "lessons", "tests")
VARIABLES = ("RECORDED", "BOOK_REPOSITORY", "BOOK_BRANCH")  # a site depends on these, too


def hash_sources() -> str:
    """Return a hash of the files that a build may read, and of VARIABLES."""
    found = hashlib.sha256(repr([os.environ.get(name) for name in VARIABLES]).encode())
    paths = [*Path().glob("*"), *(path for folder in FOLDERS for path in Path(folder).rglob("*"))]
    for path in sorted(paths):
        if path.is_file() and "__pycache__" not in path.parts:
            found.update(f"{path} {path.stat().st_size} ".encode() + path.read_bytes())
    return found.hexdigest()


def on_interrupt(number: int, frame: object) -> None:
    """Print a message, then end this process by the same signal, so that `make` ends, too."""
    print("\nInterrupted. What was executed is kept, and make book goes on from there.", flush=True)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def run_jupyter_book(builder: str, *strict: str) -> None:
    """Build the book; exit with the failed pages' lines if a cell or a warning ends the build."""
    from jupyter_book.cli.main import main  # slow: takes seconds
    from sphinx.errors import SphinxError

    try:
        main(["build", "--builder", builder, *strict, "."], standalone_mode=False)
    except RuntimeError as error:  # its traceback is in Jupyter Book's code
        if not isinstance(error.__cause__, SphinxError):
            raise
        text = str(error.__cause__)  # a page's first line says why; its cell is logged above
        sys.exit("\n".join(re.findall(r"(?m)^\S+\.md\b.*$", text)) or text)


def build_site() -> None:
    """Build the site if a source has changed since the last build that ended well."""
    sources = hash_sources()
    if SITE.exists() and BUILT.exists() and BUILT.read_text() == sources:
        print("Nothing has changed since the last build.")
        return
    BUILT.unlink(missing_ok=True)
    run_jupyter_book("html", "-W", "-n", "--keep-going")
    BUILT.write_text(sources)


if __name__ == "__main__":
    gc.disable()  # a site's trees live to the end: to look for garbage took a fifth of the time
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, on_interrupt)
    if "singlehtml" in sys.argv:
        run_jupyter_book("singlehtml")
    else:
        build_site()
    sys.stdout.flush()
    os._exit(0)  # to free the memory of a whole site would take seconds
