"""A batch file for Slurm: one torchrun on each node, and each a rank for each of its GPUs.

The shape is that of `shardtools/cluster/jobs/torchrun.sbatch`, which the course's tests submit.
"""

from __future__ import annotations

from .target import Target, beside

FILE = "plan.sbatch"
CPUS = 4  # for each rank: its own thread, its loader's, and nccl's


def options(target: Target, time: str, partition: str = "") -> list[str]:
    """The lines that ask Slurm for the plan's nodes and GPUs, for so long."""
    n = target.ranks_of_node
    nodes = f"{target.layout.ranks} ranks, {n} on a node of {target.machine.per_node}"
    asked = [
        ("--job-name=train", "what squeue calls it"),
        (f"--nodes={target.nodes}", nodes),
        ("--ntasks-per-node=1", "one torchrun on each of them, which starts the ranks"),
        (f"--gpus-per-node={n}", f"{target.machine.name}: one for each rank"),
        (f"--cpus-per-task={n * CPUS}", f"for torchrun and all its ranks: {CPUS} for each"),
        (f"--time={time}", "after that it is killed; no more than the partition allows"),
        ("--output=%x-%j.out", "x: the job's name, j: its number"),
        ("--error=%x-%j.err", "errors apart, so that they are found"),
    ]
    if n == target.machine.per_node:
        asked.append(("--exclusive", "whole nodes: nobody else's traffic beside the plan's"))
    if partition:
        asked.append((f"--partition={partition}", "where such GPUs are, as sinfo names it"))
    return beside([(f"#SBATCH {option}", why) for option, why in asked])


def write(target: Target) -> str:
    """The text of the file, for `sbatch plan.sbatch train.py ARGUMENTS`."""
    n = target.ranks_of_node
    lines = [
        "#!/bin/bash",
        *(f"# {line}" for line in target.title()),
        f"#   sbatch {FILE} train.py ARGUMENTS",
        *options(target, "01:00:00"),
        "set -euo pipefail",
        "",
        "# Ranks meet at the first node, under the address at which Slurm itself finds that node.",
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "address=$(scontrol show node \"$first\" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')",
        "port=$((20000 + SLURM_JOB_ID % 10000))  # two jobs on a node do not meet each other",
        f"export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / {n}))  # ranks share the node's cores",
        "",
        "# A task that fails ends the others, which would wait for it.",
        'srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \\',
        f'  torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node={n} \\',
        '  --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$address:$port" \\',
        '  "$@"',
        "",
    ]
    return "\n".join(lines)
