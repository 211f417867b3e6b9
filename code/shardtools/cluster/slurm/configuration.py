"""Configuration of the small Slurm of `shardtools.cluster.slurm`: slurm.conf, GPUs, munge's key.

Every address is on the loopback interface, every path in the Slurm's own folder, and the user is
the one who starts it, so nothing here needs root. Options are explained in slurm.conf(5).
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import socket
from pathlib import Path

# A GPU of Slurm's has to be a character device; these are on every machine, and harmless.
DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "ptmx")
MOST_JOBS = 67_043_328  # Slurm begins at 1 again behind this number
MARK = "# Written by `python -m shardlab cluster up`, and removed by `down`\n"

CONF = (
    MARK
    + """ClusterName=box
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthInfo=socket={folder}/munge/socket
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
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
FirstJobId={first_job}
ReturnToService=2
KillWait=2
GresTypes=gpu
"""
)
_NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus}{gres}\n"


def write(folder: Path, nodes: int, cpus: int, gpus: int) -> None:
    """The configuration: slurm.conf, the GPUs' gres.conf, and munge's key."""
    for name in ("state", "spool", "log", "munge"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name).chmod(0o700)
    host = socket.gethostname().split(".")[0]
    ports = _free_ports(1 + nodes)
    text = CONF.format(
        host=host, ports=ports, folder=folder, user=user(), first_job=first_job(folder)
    )
    gres = f" Gres=gpu:{gpus}" if gpus else ""
    for number, port in enumerate(ports[1:], 1):
        text += _NODE.format(name=f"node{number}", host=host, port=port, cpus=cpus, gres=gres)
    text += "PartitionName=all Nodes=ALL Default=YES MaxTime=60 State=UP\n"
    (folder / "slurm.conf").write_text(text)
    lines = [f"Name=gpu File=/dev/{device}\n" for device in DEVICES[:gpus]]
    (folder / "gres.conf").write_text("".join(lines))
    key = folder / "munge/key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))


def first_job(folder: Path) -> int:
    """The number after the last one that the controller's log names, which outlives a Slurm.

    So no job gets the number, and with it the files, of one before it.
    """
    last, log = 0, folder / "log/slurmctld.log"
    if log.exists():
        with log.open(errors="replace") as lines:
            for number in re.findall(r"JobId=(?:\d+_\d+\()?(\d+)", "".join(lines)):
                last = max(last, int(number))
    return 1 + last % MOST_JOBS


def user() -> str:
    """The name of the user who runs this, or the number where there is no name."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a container's user without a name
        return str(os.geteuid())


def _free_ports(number: int) -> list[int]:
    """Ports of the loopback interface that nobody uses, all different."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
