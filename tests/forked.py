"""Call in a fork of this process: as isolated as a new interpreter, without seconds of imports."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path


def run_forked(
    call: Callable[[], object], folder: Path, environment: dict[str, str] | None = None
) -> tuple[int, str]:
    """Return exit status and output of `call()`, which runs in `folder`; 1 if it raises.

    Call it from the main thread only: a lock that another thread holds stays locked in the fork,
    which would then wait for ever.
    """
    assert threading.current_thread() is threading.main_thread()
    with tempfile.TemporaryFile() as log:
        child = os.fork()
        if child == 0:
            os._exit(_run_child(call, folder, environment, log.fileno()))
        _, status = os.waitpid(child, 0)
        log.seek(0)
        return os.waitstatus_to_exitcode(status), log.read().decode()


def _run_child(
    call: Callable[[], object], folder: Path, environment: dict[str, str] | None, log: int
) -> int:
    for output in (1, 2):
        os.dup2(log, output)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # OpenMP's threads do not survive a fork
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
    try:
        os.chdir(folder)
        if environment is not None:
            os.environ.clear()
            os.environ.update(environment)
        call()
        status = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)  # as Python does
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return status


def run_figure_script(script: Path) -> None:
    """Run a script of figures/, which writes into its own folder."""
    import matplotlib.pyplot  # noqa: F401  once, for all of them

    def run() -> None:
        sys.argv, sys.path = [str(script)], [str(script.parent), *sys.path]
        runpy.run_path(str(script), run_name="__main__")

    status, said = run_forked(run, script.parent)
    assert status == 0, said
