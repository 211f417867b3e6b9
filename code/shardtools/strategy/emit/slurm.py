"""A batch file for Slurm: one torchrun on each node, which starts a rank for each GPU.

Its form is that of `shardtools/cluster/jobs/torchrun.sbatch`, which the course's tests submit.
"""

from __future__ import annotations

from .target import Target, beside

FILE = "plan.sbatch"
CPUS = 4  # cores per rank: for its own thread, its loader's, and NCCL's
# Part of a batch file: the rendezvous address, and threads per rank.
MEET = """\
# Ranks meet at the first node, under the address at which Slurm itself finds that node.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
HOST=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
PORT=$((20000 + SLURM_JOB_ID % 10000))  # two jobs on a node do not meet each other
export HOST PORT OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / {ranks}))  # ranks share the cores
"""
_BATCH = """\
set -euo pipefail

{meet}
# A task that fails ends the others, which would wait for it.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \\
  torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node={ranks} \\
  --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$HOST:$PORT" \\
  "$@"
"""


def options(target: Target, time: str, partition: str = "") -> list[str]:
    """Return the lines that request the plan's nodes and GPUs from Slurm for `time`."""
    n = target.ranks_of_node
    nodes = f"{target.layout.ranks} ranks, {n} on a node of {target.machine.per_node}"
    rows = [
        (True, "job-name=train", "what squeue calls it"),
        (True, f"nodes={target.nodes}", nodes),
        (True, "ntasks-per-node=1", "one torchrun on each of them, which starts the ranks"),
        (True, f"gpus-per-node={n}", f"{target.machine.name}: one for each rank"),
        (True, f"cpus-per-task={n * CPUS}", f"for torchrun and all its ranks: {CPUS} for each"),
        (True, f"time={time}", "after that it is killed; no more than the partition allows"),
        (True, "output=%x-%j.out", "x: the job's name, j: its number"),
        (True, "error=%x-%j.err", "errors apart, so that they are found"),
        (n == target.machine.per_node, "exclusive",
         "whole nodes: nobody else's traffic beside the plan's"),
        (partition, f"partition={partition}", "where such GPUs are, as sinfo names it"),
    ]  # fmt: skip
    return beside([(when, f"#SBATCH --{option}", why) for when, option, why in rows])


def write(target: Target) -> str:
    """Return the text of the file, for `sbatch plan.sbatch train.py ARGUMENTS`."""
    head = [
        "#!/bin/bash",
        *(f"# {line}" for line in target.title()),
        f"#   sbatch {FILE} train.py ARGUMENTS",
        *options(target, "01:00:00"),
    ]
    n = target.ranks_of_node
    return "\n".join([*head, _BATCH.format(meet=MEET.format(ranks=n), ranks=n)])
