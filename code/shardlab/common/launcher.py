"""Rank and rendezvous address of this process, from the environment that its launcher set.

torchrun and similar launchers set RANK, WORLD_SIZE, MASTER_ADDR and others; srun sets SLURM_PROCID
and others for each process of a job step. This module imports only the standard library.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True)
class LaunchInfo:
    """A process's rank and the address of the rendezvous."""

    rank: int
    world_size: int
    local_rank: int
    master_addr: str = ""  # rank 0's host
    master_port: int = 0
    has_agent_store: bool = False  # True if the launcher's process hosts the store (torchrun)


def read_rank(environment: Mapping[str, str]) -> int | None:
    """Return the rank of a process with this environment; None without a launcher."""
    given = environment.get("RANK", environment.get("SLURM_PROCID", ""))
    return int(given) if given.isdigit() else None


def read_local_rank(environment: Mapping[str, str]) -> int:
    """Return the local rank of a process with this environment; 0 without a launcher."""
    return int(environment.get("LOCAL_RANK", environment.get("SLURM_LOCALID", "0")))


def read_launch_info(environment: Mapping[str, str]) -> LaunchInfo | None:
    """Read a launcher's variables; None without a launcher, ValueError if they are incomplete."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        wanted = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        given = {name: environment.get(name, "") for name in wanted}
        if not given["LOCAL_RANK"]:  # use srun's if the script also set RANK from srun's
            same_rank = environment.get("SLURM_PROCID") == given["RANK"]
            srun_rank = environment.get("SLURM_LOCALID") if same_rank else None
            given["LOCAL_RANK"] = srun_rank or given["RANK"]
        has_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    elif "SLURM_STEP_NUM_TASKS" in environment and "SLURM_PROCID" in environment:
        job = int(environment.get("SLURM_JOB_ID", 0))
        given = {
            "RANK": environment["SLURM_PROCID"],
            "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
            "LOCAL_RANK": environment.get("SLURM_LOCALID", ""),
            "MASTER_ADDR": environment.get("MASTER_ADDR") or _resolve_first_node(environment),
            # Two jobs may share a node: derive the port from the job's id.
            "MASTER_PORT": environment.get("MASTER_PORT") or str(20_000 + job % 20_000),
        }
        has_store = False
    else:
        return None
    for name, value in given.items():
        if not value or (name != "MASTER_ADDR" and not value.isdigit()):
            wanted = "a host name" if name == "MASTER_ADDR" else "a non-negative integer"
            raise ValueError(f"{name}={value!r} in the environment: must be {wanted}")
    rank, size, local = (int(given[n]) for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    return LaunchInfo(rank, size, local, given["MASTER_ADDR"], int(given["MASTER_PORT"]), has_store)


def _resolve_first_node(environment: Mapping[str, str]) -> str:
    """Return the address of the first node of a Slurm step, which runs rank 0."""
    nodes = environment.get("SLURM_STEP_NODELIST", "")
    with suppress(OSError, subprocess.SubprocessError, IndexError):
        name = _run_scontrol("hostnames", nodes).split()[0]
        with suppress(OSError):
            return socket.gethostbyname(name)
        # Names may not resolve, for instance of emulated nodes on one machine: ask Slurm.
        words = dict(w.partition("=")[::2] for w in _run_scontrol("node", name).split())
        return words.get("NodeAddr", name)
    return ""


def _run_scontrol(*arguments: str) -> str:
    command = ["scontrol", "show", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
