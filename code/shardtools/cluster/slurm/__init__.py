"""A small Slurm of a few nodes on this machine: for trying batch files, and for tests.

    python -m shardlab cluster up            # two nodes of 4 CPUs and 2 pretended GPUs each
    python -m shardlab cluster down

    with slurm.up(folder, nodes=2) as box:   # the same for as long as the block lasts
        box.run(["sbatch", "--wait", "job.sbatch"])

It is the real Slurm, from Debian's packages, started by any user without systemd: munged, which
signs messages, slurmctld, which schedules, and one slurmd for each node. All of them listen on the
loopback interface alone, at ports that were free, and keep what they write in one folder.

What it is not: nodes share this machine's processor and disk, none is held to the CPUs that a job
got (that takes cgroups, and so root), and a GPU is some character device that every machine has, so
that Slurm has something to count and to number.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from shardlab.common.arguments import PROCESSES, check_whole
from shardtools import options

from . import configuration, daemons

INSTALL = "apt-get install --no-install-recommends slurmctld slurmd slurm-client munge"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "sinfo", "scancel")
# A job finds this Python, and the `torchrun` beside it; Debian has its daemons in sbin.
_PATH = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


class SlurmError(RuntimeError):
    """Slurm is not installed, did not start, or a command of it failed."""


@dataclass(frozen=True)
class Box:
    """A running Slurm. `environment` is what its commands need: SLURM_CONF, and their folder."""

    folder: Path
    nodes: int
    cpus: int
    gpus: int

    @property
    def conf(self) -> Path:
        """The configuration, which says to every command which Slurm is meant."""
        return self.folder / "slurm.conf"

    @property
    def slurmds(self) -> list[str]:
        """The names of its nodes' daemons."""
        return [f"slurmd-node{number}" for number in range(1, self.nodes + 1)]

    @property
    def environment(self) -> dict[str, str]:
        """This process's environment with SLURM_CONF, and without the job that it may be in."""
        own = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_"))}
        return {**own, "SLURM_CONF": str(self.conf), "PATH": _PATH}

    def run(
        self, command: Sequence[str], timeout: float = 120, **how: object
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in this Slurm; SlurmError, with what it said, unless it ends with 0.

        `timeout` is in seconds; the rest goes to subprocess.run (`cwd`, `env`, `input`).
        """
        how = {"env": self.environment, **how}
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout, **how
            )  # fmt: skip
            if done.returncode:
                said = (done.stderr + done.stdout).strip()
                raise SlurmError(f"{' '.join(command)}: status {done.returncode}\n{said}")
            return done
        raise SlurmError(f"{' '.join(command)}: not finished after {timeout:g} s")


def missing() -> list[str]:
    """The programs of Slurm that this machine lacks; an empty list where all are there."""
    return [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]


def version() -> str:
    """Of the Slurm on this machine, as "Slurm 22.05.8"; SlurmError where there is none."""
    _demand()
    program = shutil.which("slurmctld", path=_PATH)
    said = subprocess.run([program, "-V"], capture_output=True, text=True, check=True).stdout
    return f"Slurm {said.split()[-1]}"


def _demand() -> None:
    if absent := missing():
        command = INSTALL if os.geteuid() == 0 else f"sudo {INSTALL}"
        raise SlurmError(f"Slurm is not here: no {', '.join(absent)}. To install:\n    {command}")


def start(folder: str | Path, nodes: int = 2, cpus: int = 4, gpus: int = 2) -> Box:
    """Start a Slurm that keeps everything in `folder`, and return when all its nodes are idle.

    It goes on after this process: `stop(folder)` ends it. In a folder where it runs already, with
    the same numbers, it is returned, and what of it has ended is started again: jobs and the queue
    stay, also where nothing of it runs any more. Raises ValueError for bad numbers and for a folder
    that holds something else, SlurmError where Slurm is missing or does not start.
    """
    check_whole(1, PROCESSES, nodes=nodes)
    check_whole(cpus=cpus)
    check_whole(0, gpus=gpus)
    if gpus > len(configuration.DEVICES):
        raise ValueError(f"gpus={gpus}: allowed are 0 to {len(configuration.DEVICES)} on each node")
    folder = _folder(folder)
    _demand()
    folder = options.folder("folder", folder)
    wanted = Box(folder, nodes, cpus, gpus)
    with _locked(folder):
        if left := _left(folder):
            if left != wanted:
                raise ValueError(
                    f"folder={str(folder)!r}: there is a Slurm with nodes={left.nodes}, cpus="
                    f"{left.cpus}, gpus={left.gpus}; allowed are the same numbers, or another "
                    "folder, or to stop it first"
                )
            try:
                _launch(left)
            except SlurmError as error:  # the queue may be worth a look
                again = "It cannot be started again; `stop`, or `cluster down`, ends what is left"
                raise SlurmError(f"{error}\n{again}") from None
            return left
        _end(folder)
        try:
            configuration.write(folder, nodes, cpus, gpus)
            numbers = {"nodes": nodes, "cpus": cpus, "gpus": gpus}
            (folder / "box.json").write_text(json.dumps(numbers))
            _launch(wanted)
        except BaseException:
            _end(folder)
            raise
    return wanted


def find(folder: str | Path) -> Box | None:
    """The Slurm of which something runs in `folder`; None where there is none. See `lost`."""
    folder = Path(folder).expanduser().resolve()
    return _left(folder) if daemons.alive(folder) else None


def lost(box: Box) -> list[str]:
    """The daemons that do not run, though they should; an empty list for a Slurm that is well."""
    alive = daemons.named(box.folder)
    return [name for name in _daemons(box) if name not in alive]


def _daemons(box: Box) -> list[str]:
    """The names of all of its daemons, in the order in which they are started."""
    return ["munged", "slurmctld", *box.slurmds]


def _left(folder: Path) -> Box | None:
    """The Slurm that was started in `folder` and not stopped, whether something of it runs."""
    told, conf = folder / "box.json", folder / "slurm.conf"
    if not told.exists() or not conf.exists() or not (folder / daemons.NOTED).exists():
        return None
    try:
        return Box(folder, **json.loads(told.read_text()))
    except (TypeError, ValueError):  # cut short
        return None


def stop(folder: str | Path) -> bool:
    """End the Slurm in `folder` with all its jobs; whether there was one. Logs stay."""
    folder = Path(folder).expanduser().resolve()
    if not (folder / daemons.NOTED).exists():
        return False
    with _locked(folder):
        box = find(folder)
        if box and "slurmctld" in daemons.named(folder):
            with contextlib.suppress(SlurmError):
                mine = f"--user={configuration.user()}"
                box.run(["scancel", mine], timeout=10)
                for _ in range(30):  # gives jobs their KillWait, and a second more
                    if not box.run(["squeue", "--noheader", mine], timeout=10).stdout.strip():
                        break
                    time.sleep(0.1)
        _end(folder)
    return box is not None


@contextlib.contextmanager
def up(folder: str | Path, nodes: int = 2, cpus: int = 4, gpus: int = 2) -> Iterator[Box]:
    """A Slurm for as long as the block lasts, see `start`; ValueError where one runs already."""
    if _left(Path(folder).expanduser().resolve()):
        raise ValueError(f"folder={str(folder)!r}: a Slurm runs there; allowed is another folder")
    box = start(folder, nodes, cpus, gpus)
    try:
        yield box
    finally:
        stop(box.folder)


def _folder(given: str | Path) -> Path:
    """The folder; ValueError where Slurm could not use it, or should not."""
    folder = Path(given).expanduser().resolve()
    if not str(folder).isascii() or any(c in str(folder) for c in " \t#%,\"'\\()[]="):
        raise ValueError(f"folder={str(folder)!r}: allowed are letters, digits and /._-+ alone")
    if len(str(folder)) > 90:  # a socket's name has 107 characters at most
        raise ValueError(f"folder={str(folder)!r}: allowed are names of up to 90 characters")
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"folder={str(folder)!r}: allowed are folders that can be written")
    if folder.exists():
        conf = folder / "slurm.conf"
        ours = conf.exists() and conf.read_text().startswith(configuration.MARK)
        others = [path for path in folder.iterdir() if path.name != "log"]
        if others and not ours:
            raise ValueError(f"folder={str(folder)!r}: allowed is an empty or a new one")
    return folder


def _launch(box: Box) -> None:
    """Start the daemons that do not run, and wait until every node takes jobs."""
    munge = box.folder / "munge"
    absent = lost(box)

    def start(name: str, command: list[str]) -> None:
        if name in absent:
            daemons.start(box.folder, name, command, box.environment)

    if "munged" in absent:
        (munge / "socket").unlink(missing_ok=True)  # of the one before
    names = ("key-file", "socket", "pid-file", "seed-file")
    files = [f"--{name}={munge / name.split('-')[0]}" for name in names]
    start("munged", ["munged", "--foreground", "--force", "--num-threads=2", *files])
    _wait(box, (munge / "socket").exists, "munge does not answer", ["munged"])
    start("slurmctld", ["slurmctld", "-D"])
    for name in box.slurmds:
        start(name, ["slurmd", "-D", "-N", name.removeprefix("slurmd-")])
    if absent:
        _wait(box, lambda: _ready(box), "its nodes do not come", _daemons(box))


def _ready(box: Box) -> bool:
    """Whether all nodes listen, and the controller knows that they are there."""
    alive = daemons.named(box.folder)
    with contextlib.suppress(SlurmError, psutil.Error, KeyError):
        heard = [alive[name].net_connections("tcp") for name in box.slurmds]
        states = box.run(["sinfo", "-h", "-N", "-o", "%T"], timeout=10).stdout.split()
        up = [s for s in states if not s.endswith("*") and s not in ("unknown", "down")]
        return all(heard) and len(up) == box.nodes  # a node with a star does not answer
    return False


def _wait(
    box: Box, ready: Callable[[], bool], what: str, names: list[str], seconds: float = 60
) -> None:
    """Until `ready()`; SlurmError as soon as a daemon of `names` ends, or after so many seconds.

    Others may have ended before, and are started next.
    """
    end = time.monotonic() + seconds
    while not ready():
        if gone := daemons.ended(box.folder, names):
            raise SlurmError(f"Slurm did not start. {gone[0]}")
        if time.monotonic() > end:
            raise SlurmError(f"Slurm did not start in {seconds:g} s: {what}. See {box.folder}/log")
        time.sleep(0.05)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One `start` or `stop` at a time in a folder."""
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def of_jobs(folder: Path) -> list[psutil.Process]:
    """What runs in jobs of the Slurm in `folder`: Slurm's own starters, and what they started."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # ended meanwhile, or another user's
            if process.name().startswith("slurmstepd"):  # its title has overwritten its environment
                ours = process.cwd() == str(folder)
            else:
                own = process.environ()
                ours = "SLURM_JOB_ID" in own and own.get("SLURM_CONF") == f"{folder}/slurm.conf"
            if ours:
                found.append(process)
    return found


def _end(folder: Path) -> None:
    """End what is left of jobs, then the daemons, the last one first; remove all but the logs."""
    daemons.end(of_jobs(folder), patience=0.5)  # they have had their time; slurmd waits for them
    daemons.end(reversed(daemons.alive(folder)), patience=2)
    daemons.end(of_jobs(folder), patience=0.5)
    for name in ("state", "spool", "munge"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for pattern in ("*.pid", "gres.conf", "box.json", "slurm.conf", daemons.NOTED):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)
