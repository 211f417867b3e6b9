"""A small Slurm of a few nodes on this machine, to try batch files, and for tests.

    eval "$(python -m shardlab cluster up)"  # two nodes of 2 GPUs and 4 CPUs (or --cpus)
    python -m shardlab cluster status
    python -m shardlab cluster down

    with slurm.up(folder, nodes=2) as box:   # the same for as long as the block lasts
        box.run(["sbatch", "--wait", "job.sbatch"])

It is the real Slurm, from Debian's packages, started by any user without systemd: munged, which
signs messages, slurmctld, which schedules, and one slurmd for each node. All of them listen only on
the loopback interface, at free ports, and keep their files in one folder: --folder, by default
~/.cache/shardlab/slurm. Slurm runs until `down`, which leaves the logs there.

Its limits: nodes share this machine's processor and disk, no job is limited to the CPUs that it
got (that takes cgroups, and so root), and a GPU is a character device that every machine has, so
that Slurm has something to count and to number.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from shardlab.common.arguments import MAX_PROCESSES, check_integer
from shardtools import options

INSTALL = "apt-get install --no-install-recommends slurmctld slurmd slurm-client munge"
FOLDER = "~/.cache/shardlab/slurm"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "sinfo", "scancel")
DAEMONS = ("munged", "slurmctld", "slurmd", "slurmscriptd")
# A job finds this Python, and the `torchrun` beside it; Debian has its daemons in sbin.
_PATH = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
# Slurm's GPUs must be character devices; these are on every machine, and harmless.
DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "ptmx")
# slurm.conf(5) explains the options. SlurmUser is this user, so that nothing needs root.
CONF = """ClusterName=box
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthInfo=socket={folder}/munge/socket
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/spool/slurmctld.pid
SlurmdPidFile={folder}/spool/%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=1
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/log/jobs.txt
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=2
GresTypes=gpu
PartitionName=all Nodes=ALL Default=YES MaxTime=60 State=UP
"""
_NODE = "NodeName=node{n} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus}{gres}\n"
_WRITTEN = ("state", "spool", "munge", "gres.conf", "slurm.conf")  # files that `stop` removes
START = 60.0  # seconds that Slurm may take to start
_CHILDREN: list[subprocess.Popen[bytes]] = []  # kept: Python warns if a running child is collected


class SlurmError(RuntimeError):
    """An error of Slurm: it is not installed, did not start, or a command of it failed."""


@dataclass(frozen=True)
class Box:
    """A running Slurm. `environment` has what its commands need: SLURM_CONF, and PATH."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """This process's environment with SLURM_CONF, and without variables of an outer job."""
        own = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_"))}
        return {**own, "SLURM_CONF": f"{self.folder}/slurm.conf", "PATH": _PATH}

    def run(
        self, command: Sequence[str], timeout: float = 120, **how: object
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in this Slurm. Raises SlurmError, with its output, unless its status is 0.

        `timeout` is in seconds; the rest goes to subprocess.run (`cwd`, `env`, `input`).
        """
        how = {"env": self.environment, "capture_output": True, "text": True, **how}
        try:
            done = subprocess.run(command, timeout=timeout, **how)
        except subprocess.TimeoutExpired:
            raise SlurmError(f"{' '.join(command)}: not finished after {timeout:g} s") from None
        if done.returncode:
            said = (done.stderr + done.stdout).strip()
            raise SlurmError(f"{' '.join(command)}: status {done.returncode}\n{said}")
        return done


def missing() -> list[str]:
    """Return the programs of Slurm that this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]


def version() -> str:
    """Return the version of this machine's Slurm, as "Slurm 22.05.8"."""
    program = shutil.which("slurmctld", path=_PATH)
    said = subprocess.run([program, "-V"], capture_output=True, text=True, check=True).stdout
    return f"Slurm {said.split()[-1]}"


def processes(folder: Path) -> list[psutil.Process]:
    """Return the processes of the Slurm in `folder`, and those of its jobs."""
    found = []
    for process in psutil.process_iter(["name"]):
        with contextlib.suppress(psutil.Error):  # ended meanwhile, or another user's
            if process.info["name"].startswith(("munged", "slurm")):
                ours = process.cwd() == str(folder)  # process titles overwrite environ()
            else:
                own = process.environ()
                ours = "SLURM_JOB_ID" in own and own.get("SLURM_CONF") == f"{folder}/slurm.conf"
            if ours:
                found.append(process)
    return found


def of_jobs(folder: Path) -> list[psutil.Process]:
    """Return the processes of jobs of the Slurm in `folder`, including Slurm's own starters."""
    return [one for one in processes(folder) if not one.info["name"].startswith(DAEMONS)]


def start(folder: str | Path, nodes: int = 2, cpus: int = 4, gpus: int = 2) -> Box:
    """Start a Slurm that keeps everything in `folder`, and return when all its nodes are idle.

    It runs until `stop(folder)`. Raises ValueError for a bad number, and for a folder where a Slurm
    runs or other files lie, SlurmError where Slurm is missing or fails.
    """
    check_integer(1, MAX_PROCESSES, nodes=nodes)
    check_integer(cpus=cpus)
    folder = Path(folder).expanduser().resolve()
    allowed = ""
    if not re.fullmatch(r"(?a:[\w/.+-]{1,90})", str(folder)):  # a socket's name has at most 107
        allowed = "up to 90 letters, digits and /._-+"
    elif processes(folder):
        allowed = "another folder, or `cluster down` first: a Slurm runs there"
    elif folder.is_dir() and not {path.name for path in folder.iterdir()} <= {"log", *_WRITTEN}:
        allowed = "an empty folder or a new one"
    if allowed:
        raise ValueError(f"folder={str(folder)!r}: allowed: {allowed}")
    if absent := missing():
        command = INSTALL if os.geteuid() == 0 else f"sudo {INSTALL}"
        raise SlurmError(f"Slurm is not here: no {', '.join(absent)}. To install:\n    {command}")
    options.folder("folder", folder)
    stop(folder)  # clean up after a Slurm that did not end by `stop`
    try:
        _configure(folder, nodes, cpus, gpus)
        _launch(Box(folder), nodes)
    except BaseException:
        stop(folder)
        raise
    return Box(folder)


def stop(folder: str | Path) -> bool:
    """End the Slurm in `folder` with all its jobs; return True if one ran. Logs stay."""
    folder = Path(folder).expanduser().resolve()
    ran = bool(processes(folder))
    for how in ("terminate", "kill", "kill"):  # kill twice: a step may have begun meanwhile
        for process in processes(folder):
            with contextlib.suppress(psutil.NoSuchProcess):
                getattr(process, how)()
        until = time.monotonic() + 2
        while processes(folder) and time.monotonic() < until:
            time.sleep(0.05)
    for path in (folder / name for name in _WRITTEN):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return ran


@contextlib.contextmanager
def up(folder: str | Path, nodes: int = 2, cpus: int = 4, gpus: int = 2) -> Iterator[Box]:
    """Run a Slurm for as long as the block lasts; see `start`."""
    box = start(folder, nodes, cpus, gpus)
    try:
        yield box
    finally:
        stop(box.folder)


def _configure(folder: Path, nodes: int, cpus: int, gpus: int) -> None:
    """Write slurm.conf, the GPUs' gres.conf, and munge's key."""
    for name in ("state", "spool", "log", "munge"):
        (folder / name).mkdir(mode=0o700, exist_ok=True)
    host, user = socket.gethostname().split(".")[0], psutil.Process().username()
    with contextlib.ExitStack() as held:  # open all sockets at once, so that all ports differ
        sockets = [held.enter_context(socket.socket()) for _ in range(1 + nodes)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1] for one in sockets]
    gres = f" Gres=gpu:{gpus}" if gpus else ""
    text = CONF.format(host=host, ports=ports, folder=folder, user=user)
    for n, port in enumerate(ports[1:], 1):
        text += _NODE.format(n=n, host=host, port=port, cpus=cpus, gres=gres)
    (folder / "slurm.conf").write_text(text)
    lines = [f"Name=gpu File=/dev/{device}\n" for device in DEVICES[:gpus]]
    (folder / "gres.conf").write_text("".join(lines))
    (folder / "munge/key").touch(mode=0o600)
    (folder / "munge/key").write_bytes(os.urandom(128))


def _launch(box: Box, nodes: int) -> None:
    """Start the daemons, and wait until every node takes jobs."""
    munge = box.folder / "munge"
    files = [f"--{name}-file={munge / name}" for name in ("key", "pid", "seed")]
    commands = {
        "munged": ["munged", "--foreground", "--force", f"--socket={munge}/socket", *files],
        "slurmctld": ["slurmctld", "-D"],
        **{f"slurmd-node{n}": ["slurmd", "-D", "-N", f"node{n}"] for n in range(1, nodes + 1)},
    }
    end, started = time.monotonic() + START, {}
    for name, command in commands.items():
        with open(box.folder / f"log/{name}.out", "wb") as log:
            how = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            how |= {"cwd": box.folder, "env": box.environment, "start_new_session": True}
            started[name] = subprocess.Popen(command, **how)
            _CHILDREN.append(started[name])
        while not (munge / "socket").exists() and time.monotonic() < end:
            time.sleep(0.05)
    while time.monotonic() < end:
        for name, process in started.items():
            if process.poll() is not None:
                said = (box.folder / f"log/{name}.out").read_text(errors="replace")
                raise SlurmError(f"Slurm did not start. {name} has ended: {said[-300:]}")
        with contextlib.suppress(SlurmError):
            if box.run(["sinfo", "-h", "-N", "-o", "%T"]).stdout.split() == ["idle"] * nodes:
                return
        time.sleep(0.05)
    raise SlurmError(f"Slurm did not start in {START:g} s. See {box.folder}/log")


def _add(name: str, commands: argparse._SubParsersAction) -> None:
    parser = options.command(commands, name, __doc__)
    options.add(parser, "folder", f"where everything of it lies ({FOLDER})", "DIR")
    if name == "up":
        options.add(parser, "cpus", "that each node says it has (4)", "N", int)
    parser.set_defaults(command=partial(_main, name))


add_up, add_status, add_down = (partial(_add, name) for name in ("up", "status", "down"))


def _main(name: str, chosen: argparse.Namespace) -> int:
    given = FOLDER if chosen.folder is None else chosen.folder
    folder = options.parse_path("folder", given).expanduser().resolve()
    try:
        if name == "down" and stop(folder):
            print(f"Slurm has ended, and all its jobs; logs are in {folder}/log.")
            return 0
        if name == "up" and (chosen.cpus is not None or not processes(folder)):
            start(folder, cpus=4 if chosen.cpus is None else chosen.cpus)
        if not processes(folder):
            print(f"No Slurm runs in {folder}.")
            return int(name == "status")
        print("# A Slurm runs. Its commands need:")
        print(f"export SLURM_CONF={shlex.quote(f'{folder}/slurm.conf')}")
        for command in ("sinfo", "squeue") if name == "status" else ():
            print(Box(folder).run([command]).stdout, end="")
    except SlurmError as error:
        print(f"python -m shardlab cluster: {error}", file=sys.stderr)
        return 1
    return 0
