"""Run a small Slurm with several nodes on this machine, to try batch files.

    eval "$(python -m shardlab cluster up)"  # two nodes of 2 GPUs and 4 CPUs (or --cpus)
    python -m shardlab cluster status
    python -m shardlab cluster down

    with slurm.run_cluster(folder, nodes=2) as cluster:   # in Python: until the block ends
        cluster.run(["sbatch", "--wait", "job.sbatch"])

The command starts the real Slurm from Debian's packages, without root and systemd: munged, which
signs messages, slurmctld, which schedules, and one slurmd for each node. They listen only on the
loopback interface, at free ports, and keep their files in one folder: --folder, by default
~/.cache/shardlab/slurm. Slurm runs until `down`, which leaves the logs there.

Limits: all nodes share this machine's processor and disk; jobs are not confined to their CPUs (this
takes cgroups, and so root); GPUs are character devices such as /dev/null, which Slurm can count.
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
from typing import Any

import psutil

from shardlab.common.arguments import MAX_PROCESSES, check_integer
from shardtools import options

INSTALL = "apt-get install --no-install-recommends slurmctld slurmd slurm-client munge"
DEFAULT_FOLDER = "~/.cache/shardlab/slurm"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "sinfo", "scancel")
DAEMONS = ("munged", "slurmctld", "slurmd", "slurmscriptd")
# A job finds this Python, and the `torchrun` beside it; Debian has its daemons in sbin.
_PATH = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
# Slurm's GPUs must be character devices; these are on every machine, and harmless.
GPU_DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "ptmx")
# slurm.conf(5) explains the options. SlurmUser is this user, so that nothing needs root.
SLURM_CONF = """ClusterName=box
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
_WRITTEN_FILES = ("state", "spool", "munge", "gres.conf", "slurm.conf")  # removed at the end
START_SECONDS = 60.0
_CHILDREN: list[subprocess.Popen[bytes]] = []  # kept: Python warns if a running child is collected


class SlurmError(RuntimeError):
    """An error of Slurm: it is not installed, did not start, or one of its commands failed."""


@dataclass(frozen=True)
class SlurmCluster:
    """A running Slurm."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """The environment for Slurm's commands, without variables of an outer job."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_"))}
        return {**kept, "SLURM_CONF": f"{self.folder}/slurm.conf", "PATH": _PATH}

    def run(
        self, command: Sequence[str], timeout: float = 120, **options: object
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in this Slurm. Raises SlurmError, with its output, unless its status is 0.

        `timeout` is in seconds; the rest goes to subprocess.run (`cwd`, `env`, `input`).
        """
        options = {"env": self.environment, "capture_output": True, "text": True, **options}
        try:
            done = subprocess.run(command, timeout=timeout, **options)
        except subprocess.TimeoutExpired:
            raise SlurmError(f"{' '.join(command)}: not finished after {timeout:g} s") from None
        if done.returncode:
            output = (done.stderr + done.stdout).strip()
            raise SlurmError(f"{' '.join(command)}: status {done.returncode}\n{output}")
        return done


def find_missing() -> list[str]:
    """Return the programs of Slurm that this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]


def get_version() -> str:
    """Return the version of this machine's Slurm, as "Slurm 22.05.8"."""
    program = shutil.which("slurmctld", path=_PATH)
    output = subprocess.run([program, "-V"], capture_output=True, text=True, check=True).stdout
    return f"Slurm {output.split()[-1]}"


def find_processes(folder: Path) -> list[psutil.Process]:
    """Return the processes of the Slurm in `folder`, and those of its jobs."""
    found = []
    for process in psutil.process_iter(["name"]):
        with contextlib.suppress(psutil.Error):  # ended meanwhile, or another user's
            if process.info["name"].startswith(("munged", "slurm")):
                ours = process.cwd() == str(folder)  # process titles overwrite environ()
            else:
                values, conf = process.environ(), f"{folder}/slurm.conf"
                ours = "SLURM_JOB_ID" in values and values.get("SLURM_CONF") == conf
            if ours:
                found.append(process)
    return found


def find_job_processes(folder: Path) -> list[psutil.Process]:
    """Return the processes of all jobs of the Slurm in `folder`."""
    return [one for one in find_processes(folder) if not one.info["name"].startswith(DAEMONS)]


def start_cluster(folder: str | Path, nodes: int = 2, cpus: int = 4, gpus: int = 2) -> SlurmCluster:
    """Start a Slurm whose files are in `folder`; return when all its nodes are idle.

    Slurm runs until `stop_cluster(folder)`. Raises ValueError for a bad number, and for a folder in
    which a Slurm runs or that has other files; SlurmError if Slurm is missing or fails.
    """
    check_integer(1, MAX_PROCESSES, nodes=nodes)
    check_integer(cpus=cpus)
    folder = Path(folder).expanduser().resolve()
    error, files = "", {"log", *_WRITTEN_FILES}
    if not re.fullmatch(r"(?a:[\w/.+-]{1,90})", str(folder)):  # a socket's name has at most 107
        error = "must have at most 90 letters, digits and /._-+"
    elif find_processes(folder):
        error = "must not have a running Slurm: take another folder, or `cluster down` first"
    elif folder.is_dir() and not {path.name for path in folder.iterdir()} <= files:
        error = "must be an empty folder or a new one"
    if error:
        raise ValueError(f"folder={str(folder)!r}: {error}")
    if absent := find_missing():
        command = INSTALL if os.geteuid() == 0 else f"sudo {INSTALL}"
        raise SlurmError(f"Slurm is not installed: no {', '.join(absent)}. Run:\n    {command}")
    options.make_folder("folder", folder)
    stop_cluster(folder)  # clean up after a Slurm that ended in another way
    try:
        _write_config(folder, nodes, cpus, gpus)
        _start_daemons(SlurmCluster(folder), nodes)
    except BaseException:
        stop_cluster(folder)
        raise
    return SlurmCluster(folder)


def stop_cluster(folder: str | Path) -> bool:
    """End the Slurm in `folder` and all its jobs, but keep logs; return True if one ran."""
    folder = Path(folder).expanduser().resolve()
    ran = bool(find_processes(folder))
    for method in ("terminate", "kill", "kill"):  # kill twice: a step may have begun meanwhile
        for process in find_processes(folder):
            with contextlib.suppress(psutil.NoSuchProcess):
                getattr(process, method)()
        until = time.monotonic() + 2
        while find_processes(folder) and time.monotonic() < until:
            time.sleep(0.05)
    for path in (folder / name for name in _WRITTEN_FILES):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return ran


@contextlib.contextmanager
def run_cluster(folder: str | Path, *args: Any, **kwargs: Any) -> Iterator[SlurmCluster]:
    """Run a Slurm until the block ends; arguments as of `start_cluster`."""
    cluster = start_cluster(folder, *args, **kwargs)
    try:
        yield cluster
    finally:
        stop_cluster(cluster.folder)


def _write_config(folder: Path, nodes: int, cpus: int, gpus: int) -> None:
    """Write slurm.conf, the GPUs' gres.conf, and munge's key."""
    for name in ("state", "spool", "log", "munge"):
        (folder / name).mkdir(mode=0o700, exist_ok=True)
    host, user = socket.gethostname().split(".")[0], psutil.Process().username()
    with contextlib.ExitStack() as held:  # open all sockets at the same time, so that ports differ
        sockets = [held.enter_context(socket.socket()) for _ in range(1 + nodes)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1] for one in sockets]
    gres = f" Gres=gpu:{gpus}" if gpus else ""
    text = SLURM_CONF.format(host=host, ports=ports, folder=folder, user=user)
    for n, port in enumerate(ports[1:], 1):
        text += _NODE.format(n=n, host=host, port=port, cpus=cpus, gres=gres)
    (folder / "slurm.conf").write_text(text)
    lines = [f"Name=gpu File=/dev/{device}\n" for device in GPU_DEVICES[:gpus]]
    (folder / "gres.conf").write_text("".join(lines))
    (folder / "munge/key").touch(mode=0o600)
    (folder / "munge/key").write_bytes(os.urandom(128))


def _start_daemons(cluster: SlurmCluster, nodes: int) -> None:
    munge = cluster.folder / "munge"
    files = [f"--{name}-file={munge / name}" for name in ("key", "pid", "seed")]
    commands = {
        "munged": ["munged", "--foreground", "--force", f"--socket={munge}/socket", *files],
        "slurmctld": ["slurmctld", "-D"],
        **{f"slurmd-node{n}": ["slurmd", "-D", "-N", f"node{n}"] for n in range(1, nodes + 1)},
    }
    end, started = time.monotonic() + START_SECONDS, {}
    for name, command in commands.items():
        with open(cluster.folder / f"log/{name}.out", "wb") as log:
            options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            options |= {"cwd": cluster.folder, "start_new_session": True}
            started[name] = subprocess.Popen(command, env=cluster.environment, **options)
            _CHILDREN.append(started[name])
        while not (munge / "socket").exists() and time.monotonic() < end:
            time.sleep(0.05)
    while time.monotonic() < end:
        for name, process in started.items():
            if process.poll() is not None:
                output = (cluster.folder / f"log/{name}.out").read_text(errors="replace")
                raise SlurmError(f"Slurm did not start. {name} has ended: {output[-300:]}")
        with contextlib.suppress(SlurmError):
            if cluster.run(["sinfo", "-h", "-N", "-o", "%T"]).stdout.split() == ["idle"] * nodes:
                return
        time.sleep(0.05)
    raise SlurmError(f"Slurm did not start in {START_SECONDS:g} s. See {cluster.folder}/log")


def _add_parser(name: str, commands: argparse._SubParsersAction) -> None:
    parser = options.add_parser(commands, name, __doc__)
    options.add_option(parser, "folder", f"folder of all its files ({DEFAULT_FOLDER})", "DIR")
    if name == "up":
        options.add_option(parser, "cpus", "CPUs of each node (4)", "N", int)
    parser.set_defaults(command=partial(_main, name))


add_up, add_status, add_down = (partial(_add_parser, name) for name in ("up", "status", "down"))


def _main(name: str, args: argparse.Namespace) -> int:
    given = DEFAULT_FOLDER if args.folder is None else args.folder
    folder = options.parse_path("folder", given).expanduser().resolve()
    try:
        if name == "down" and stop_cluster(folder):
            print(f"Slurm and all its jobs have ended; logs are in {folder}/log.")
            return 0
        if name == "up" and (args.cpus is not None or not find_processes(folder)):
            start_cluster(folder, cpus=4 if args.cpus is None else args.cpus)
        if not find_processes(folder):
            print(f"No Slurm runs in {folder}.")
            return int(name == "status")
        print("# Slurm runs. Its commands need this variable:")
        print(f"export SLURM_CONF={shlex.quote(f'{folder}/slurm.conf')}")
        for command in ("sinfo", "squeue") if name == "status" else ():
            print(SlurmCluster(folder).run([command]).stdout, end="")
    except SlurmError as error:
        print(f"python -m shardlab cluster: {error}", file=sys.stderr)
        return 1
    return 0
