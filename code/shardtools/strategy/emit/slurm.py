"""A batch file for Slurm: one torchrun on each node, which starts a rank for each GPU.

Its form is that of `shardtools/cluster/jobs/torchrun.sbatch`, which the course's tests submit.
"""

from __future__ import annotations

from .target import Target, annotate_lines

FILE_NAME = "plan.sbatch"
CPUS_PER_RANK = 4  # cores per rank: for its own thread, its loader's, and NCCL's
# Part of a batch file: the rendezvous address, and threads per rank.
RENDEZVOUS_LINES = """\
# Rendezvous on the first node, at the address under which Slurm itself finds it.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
HOST=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
PORT=$((20000 + SLURM_JOB_ID % 10000))  # differs between two jobs on a node
export HOST PORT OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / {ranks}))  # ranks share the cores
"""
_BATCH_TEMPLATE = """\
set -euo pipefail

{meet}
# A task that fails ends the others, which would wait for it otherwise.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \\
  torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node={ranks} \\
  --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$HOST:$PORT" \\
  "$@"
"""


def sbatch_lines(target: Target, time: str, partition: str) -> list[str]:
    """Return the lines that request the plan's nodes and GPUs from Slurm for `time`."""
    n = target.ranks_per_node
    nodes = f"{target.layout.world_size} ranks, {n} on a node of {target.machine.gpus_per_node}"
    rows = [
        (True, "job-name=train", "name in squeue"),
        (True, f"nodes={target.nodes}", nodes),
        (True, "ntasks-per-node=1", "one torchrun on each node, which starts the ranks"),
        (True, f"gpus-per-node={n}", f"{target.machine.name}: one for each rank"),
        (True, f"cpus-per-task={n * CPUS_PER_RANK}", f"{CPUS_PER_RANK} for each rank"),
        (True, f"time={time}", "the job is killed after it; at most what the partition allows"),
        (True, "output=%x-%j.out", "x: the job's name, j: its number"),
        (True, "error=%x-%j.err", "errors in a file of their own"),
        (n == target.machine.gpus_per_node, "exclusive", "whole nodes: no other jobs"),
        (partition, f"partition={partition}", "a partition with such GPUs"),
    ]  # fmt: skip
    return annotate_lines([(when, f"#SBATCH --{option}", why) for when, option, why in rows])


def render_file(target: Target, time: str = "01:00:00", partition: str = "") -> str:
    """Return the text of the file, for `sbatch plan.sbatch train.py ARGUMENTS`."""
    head = [
        "#!/bin/bash",
        *(f"# {line}" for line in target.title_lines()),
        f"#   sbatch {FILE_NAME} train.py ARGUMENTS",
        *sbatch_lines(target, time, partition),
    ]
    n = target.ranks_per_node
    meet = RENDEZVOUS_LINES.format(ranks=n)
    return "\n".join([*head, _BATCH_TEMPLATE.format(meet=meet, ranks=n)])
