"""Placement of a process, read from the environment that torchrun or srun sets."""

import os

import pytest

from shardlab.common.launcher import LaunchInfo, read_launch_info

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "node[3-4]",
    "SLURM_JOB_ID": "40007",
}


def install_scontrol(folder, monkeypatch, script):
    """Put a program `scontrol` first on the PATH; its answer depends on its arguments."""
    (folder / "scontrol").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_without_a_launcher():
    assert read_launch_info({}) is None
    # In the batch script itself, beside the ranks, Slurm sets a rank and no step.
    assert read_launch_info({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}) is None


def test_torchrun():
    at = read_launch_info(TORCHRUN | {"LOCAL_RANK": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert at == LaunchInfo(
        rank=3, world_size=4, local_rank=1, master_addr="a", master_port=29500, has_agent_store=True
    )
    assert read_launch_info(TORCHRUN).local_rank == 3  # other launchers of one node omit it
    assert (
        read_launch_info(SRUN | TORCHRUN).rank == 3
    )  # torchrun under srun: torchrun's variables count
    # Under srun, a script that sets all but LOCAL_RANK; a launcher of its own in a batch script.
    assert read_launch_info(TORCHRUN | SRUN | {"RANK": "5", "WORLD_SIZE": "8"}).local_rank == 1
    assert read_launch_info(TORCHRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}).local_rank == 3


def test_srun(tmp_path, monkeypatch):
    at = read_launch_info(SRUN | {"MASTER_ADDR": "node1"})
    assert at == LaunchInfo(
        rank=5, world_size=8, local_rank=1, master_addr="node1", master_port=20007
    )
    assert (
        read_launch_info(SRUN | {"MASTER_ADDR": "node1", "MASTER_PORT": "4000"}).master_port == 4000
    )
    install_scontrol(
        tmp_path, monkeypatch, 'test "$2" = hostnames && printf "localhost\\nnode4\\n"'
    )
    assert read_launch_info(SRUN).master_addr == "127.0.0.1"


def test_a_node_whose_name_does_not_resolve_has_the_address_that_slurm_knows(tmp_path, monkeypatch):
    answers = 'case "$2" in hostnames) echo no.such.node.invalid;; *) echo NodeAddr=10.0.0.7;; esac'
    install_scontrol(tmp_path, monkeypatch, answers)
    assert read_launch_info(SRUN).master_addr == "10.0.0.7"


def test_half_of_it_is_an_error_that_names_what_is_missing():
    with pytest.raises(ValueError, match="MASTER_PORT='' in the environment"):
        read_launch_info(TORCHRUN | {"MASTER_PORT": ""})
