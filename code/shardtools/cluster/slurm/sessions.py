"""Terminal sessions in a real Slurm: executed where Slurm is installed, else as recorded.

    python -m shardtools.cluster.slurm.sessions          # record all anew: half a minute
    python -m shardtools.cluster.slurm.sessions queue    # record one

A session is a file in recorded/. The first line has the date and the versions; lines that begin
with `$ ` are commands, followed by their output; `% ` marks commands that only wait, which are not
shown. Commands run one after another in one shell, in a fresh Slurm of two nodes and a folder with
the files of jobs/; so jobs are numbered from 1, and each run must give the same text.
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
# srun's messages if the job before has not ended yet, which depends on timing.
_WAIT_MESSAGE = r"^srun: job \d+ (queued and waiting for|has been allocated) resources\n"
# Lines of a step and of srun, which come in any order.
_SWAPPED_LINES = r"(srun: error: .*\n)(slurmstepd-.*\n)"


def show_session(name: str, live: bool = True) -> show.DisplayResult:
    """Show a session: executed now, or the recording, with `live=False` or without Slurm.

    If Slurm fails here (slurmd may need mounted cgroups), the recording is shown, and the caption
    says so.
    """
    made, text = read_session(name)
    caption = f"Recorded on {made}"
    if live and slurm.find_missing():
        caption += "; Slurm is not installed here"
    elif live:
        try:
            text, caption = replay_session(text), f"Executed with {slurm.get_version()}"
        except slurm.SlurmError as error:
            caption += f"; the Slurm here did not run it: {str(error).splitlines()[0]}"
    shown = [line for line in text.splitlines(keepends=True) if not line.startswith("% ")]
    return show.terminal("".join(shown), caption)


def show_job(name: str) -> show.DisplayResult:
    """Show a file of jobs/."""
    return show.file(JOBS / name, "yaml" if name.endswith("yaml") else "bash")


def read_session(name: str) -> tuple[str, str]:
    """Return a session's date and versions, and its text."""
    made, _, text = (RECORDED / f"{name}.txt").read_text("utf-8").partition("\n")
    return made.removeprefix("# "), text


def replay_session(text: str) -> str:
    """Execute the session's commands anew; return the text with their output. Raises SlurmError."""
    with tempfile.TemporaryDirectory() as folder, slurm.run_cluster(f"{folder}/box") as cluster:
        work = Path(folder, "work")
        shutil.copytree(JOBS, work)
        script = ["set -e", "exec 2>&1"]
        for line in text.splitlines():
            if line.startswith(("$ ", "% ")):
                quiet = " >/dev/null 2>&1" if line.startswith("%") else ""
                script += [f"cat <<'COMMAND'\n{line}\nCOMMAND", f"{{ {line[2:]}\n}}{quiet}"]
        output = cluster.run(["bash", "-c", "\n".join(script)], cwd=work).stdout
    return re.sub(_SWAPPED_LINES, r"\2\1", re.sub(_WAIT_MESSAGE, "", output, flags=re.MULTILINE))


def record_session(name: str) -> None:
    """Execute a session's commands and keep their output, with date and versions."""
    _, text = read_session(name)
    made = f"# {datetime.date.today()} with {slurm.get_version()}, "
    made += f"Python {platform.python_version()}, torch {version('torch')}\n"
    (RECORDED / f"{name}.txt").write_text(made + replay_session(text), "utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(path.stem for path in RECORDED.glob("*.txt")):
        record_session(name)
        print(name)
