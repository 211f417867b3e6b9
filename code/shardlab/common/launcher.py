"""Where a launcher has put this process: torchrun and its like, or srun.

A launcher tells its processes through their environment: torchrun and its like by RANK,
WORLD_SIZE, MASTER_ADDR and others, srun by SLURM_PROCID and others, for a step of a job. The
standard library alone.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Where a launcher has put this process, and where all of them meet."""

    rank: int
    size: int
    local_rank: int
    address: str = ""  # of rank 0's host
    port: int = 0
    served: bool = False  # whether the launcher's own process keeps the store, as torchrun's does

    def environment(self) -> dict[str, str]:
        """The same in the words of torchrun, which torch's own rendezvous reads."""
        own = {"RANK": self.rank, "WORLD_SIZE": self.size, "LOCAL_RANK": self.local_rank}
        meet = {"MASTER_ADDR": self.address, "MASTER_PORT": self.port} if self.address else {}
        return {name: str(value) for name, value in (own | meet).items()}


def rank_of(environment: Mapping[str, str]) -> int | None:
    """The rank that a process with this environment is; None where no launcher has set one."""
    given = environment.get("RANK", environment.get("SLURM_PROCID", ""))
    return int(given) if given.isdigit() else None


def local_rank_of(environment: Mapping[str, str]) -> int:
    """Its number among those of its machine; 0 where nobody says it."""
    return int(environment.get("LOCAL_RANK", environment.get("SLURM_LOCALID", "0")))


def place(environment: Mapping[str, str]) -> Place | None:
    """What a launcher has set; None where there was none. ValueError for half of it."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        wanted = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        given = {name: environment.get(name, "") for name in wanted}
        if not given["LOCAL_RANK"]:  # srun's word where the script took RANK from srun's as well
            of_srun = environment.get("SLURM_PROCID") == given["RANK"]
            of_srun = of_srun and environment.get("SLURM_LOCALID")
            given["LOCAL_RANK"] = of_srun or given["RANK"]
        served = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    elif "SLURM_STEP_NUM_TASKS" in environment and "SLURM_PROCID" in environment:
        job = int(environment.get("SLURM_JOB_ID", 0))
        given = {
            "RANK": environment["SLURM_PROCID"],
            "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
            "LOCAL_RANK": environment.get("SLURM_LOCALID", ""),
            "MASTER_ADDR": environment.get("MASTER_ADDR") or _first_node(environment),
            # Two jobs may share a node: a port for each.
            "MASTER_PORT": environment.get("MASTER_PORT") or str(20_000 + job % 20_000),
        }
        served = False
    else:
        return None
    for name, value in given.items():
        if not value or (name != "MASTER_ADDR" and not value.isdigit()):
            raise ValueError(f"{name}={value!r} in the environment: a launcher sets it, or you do")
    rank, size, local = (int(given[n]) for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    return Place(rank, size, local, given["MASTER_ADDR"], int(given["MASTER_PORT"]), served)


def _first_node(environment: Mapping[str, str]) -> str:
    """The address of the first node of a Slurm step, where rank 0 is."""
    nodes = environment.get("SLURM_STEP_NODELIST", "")
    with suppress(OSError, subprocess.SubprocessError, IndexError):
        name = _scontrol("hostnames", nodes).split()[0]
        with suppress(OSError):
            return socket.gethostbyname(name)
        # Names that do not resolve, of several nodes on one machine for instance: Slurm knows.
        words = dict(w.partition("=")[::2] for w in _scontrol("node", name).split())
        return words.get("NodeAddr", name)
    return ""


def _scontrol(*what: str) -> str:
    command = ["scontrol", "show", *what]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
