"""Terminal sessions in a real Slurm: executed where Slurm is installed, else as recorded.

    python -m shardtools.cluster.slurm.sessions          # record all anew: half a minute
    python -m shardtools.cluster.slurm.sessions queue    # record one

A session is a file in recorded/. Its first line has the date and the versions; lines that begin
with `$ ` are commands, followed by their output; `% ` marks commands that only wait, which are not
shown. Commands run one after another in one shell, in a fresh Slurm of two nodes and a folder with
the files of jobs/; so jobs are numbered from 1, and a test expects the same text from each run.
"""

from __future__ import annotations

import datetime
import platform
import re
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from shardlab.common import show
from shardtools.cluster import slurm

JOBS = Path(__file__).parents[1] / "jobs"
RECORDED = Path(__file__).parent / "recorded"
# srun's messages if the job before has not quite ended, which depends on timing.
_WAITED = r"^srun: job \d+ (queued and waiting for|has been allocated) resources\n"
# The output of a step and of srun come in any order.
_OVERTAKEN = r"(srun: error: .*\n)(slurmstepd-.*\n)"


def session(name: str, live: bool = True) -> show.DisplayResult:
    """Show a session: executed now, or, with `live=False` or without Slurm, as it was recorded.

    If the Slurm here does not run the session (slurmd needs mounted cgroups, for example), the
    recorded one is shown, too, and the caption says so.
    """
    made, text = recorded(name)
    caption = f"Recorded on {made}"
    if live and slurm.missing():
        caption += "; there is no Slurm here"
    elif live:
        try:
            text, caption = replayed(text), f"Executed with {slurm.version()}"
        except slurm.SlurmError as error:
            caption += f"; the Slurm here did not run it: {str(error).splitlines()[0]}"
    shown = [line for line in text.splitlines(keepends=True) if not line.startswith("% ")]
    return show.terminal("".join(shown), caption)


def job(name: str) -> show.DisplayResult:
    """Show a file of jobs/ as it is."""
    return show.file(JOBS / name, "yaml" if name.endswith("yaml") else "bash")


def recorded(name: str) -> tuple[str, str]:
    """Return a session's date and versions, and its text."""
    made, _, text = (RECORDED / f"{name}.txt").read_text("utf-8").partition("\n")
    return made.removeprefix("# "), text


def replayed(text: str) -> str:
    """Execute the session's commands anew; return the text with their output. Raises SlurmError."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, slurm.up(f"{folder}/box") as box:
        work = Path(folder, "work")
        shutil.copytree(JOBS, work)
        script = ["set -e", "exec 2>&1"]
        for line in text.splitlines():
            if line.startswith(("$ ", "% ")):
                quiet = " >/dev/null 2>&1" if line.startswith("%") else ""
                script += [f"cat <<'COMMAND'\n{line}\nCOMMAND", f"{{ {line[2:]}\n}}{quiet}"]
        said = box.run(["bash", "-c", "\n".join(script)], cwd=work).stdout
    return re.sub(_OVERTAKEN, r"\2\1", re.sub(_WAITED, "", said, flags=re.MULTILINE))


def record(name: str) -> None:
    """Execute a session's commands and keep their output, with date and versions."""
    _, text = recorded(name)
    with_ = f"{slurm.version()}, Python {platform.python_version()}, torch {version('torch')}"
    made = f"# {datetime.date.today()} with {with_}\n{replayed(text)}"
    (RECORDED / f"{name}.txt").write_text(made, "utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(path.stem for path in RECORDED.glob("*.txt")):
        record(name)
        print(name)
