"""Files of a whole Slurm job: a batch file, the site's setup, and the engine's own files.

    for name, text in job(target, Limits("12:00:00"), steps=1000, seconds=85.0).items(): ...

The batch file asks for a signal some minutes before its end. Megatron and train.py then save and
exit; torchtitan handles no signal, and resumes from its last checkpoint. The job returns to the
queue under its number, and the engine resumes from its folder.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from . import course, megatron, torchtitan
from .slurm import MEET, options
from .target import Target

FILE, SITE = "job.sbatch", "site.sh"
RUN = "run"  # the folder, beside the batch file, of checkpoints and metrics
ENGINES = ("torchtitan", "megatron", "course")
SIGNAL = 300  # seconds before the end: Slurm may be a minute early, and a save takes its time
LEAST = 600  # seconds: a shorter time limit leaves no time to train
LOST = 0.1  # share of the time limit that may be lost if a job ends without a save
TIMES = "MINUTES, HOURS:MINUTES:SECONDS and DAYS-HOURS:MINUTES:SECONDS, of 10 minutes or more"

_SITE = """\
# What your site wants in a job, before anything else. Written once: edit it, it is kept.
# `source site.sh` gives a shell on the login node the same.

# module load CUDA
# source ~/venv/bin/activate        # or: conda activate train
# export MEGATRON=~/Megatron-LM     # the folder with pretrain_gpt.py, for Megatron

# Compute nodes often have no network: fetch on the login node, and let nobody ask there.
# export HF_HOME=/shared/me/huggingface HF_HUB_OFFLINE=1
# export NCCL_SOCKET_IFNAME=ib0     # where nccl takes the wrong interface
# export GLOO_SOCKET_IFNAME=lo      # for ranks on the CPU of one machine without a network
"""

_BATCH = """\
set -euo pipefail

# Submit it in its own folder: there are its files, and there go its checkpoints.
fail() {{ echo "$1" >&2; exit 1; }}
for file in {files}; do
  [[ -e $file ]] || fail "no $file here: cd into the job's folder, then sbatch {file}"
done
# ---- your site: modules, environment, caches -----------------------------------------------------
source ./{site}
# --------------------------------------------------------------------------------------------------
command -v torchrun >/dev/null || fail "no torchrun: activate your environment in {site}"

{meet}export PYTORCH_ALLOC_CONF=expandable_segments:True  # less is lost between tensors
{more}echo "run ${{SLURM_RESTART_COUNT:-0}} of job $SLURM_JOB_ID"

# torchrun would die of USR1. It ignores what its parent ignored; ranks set a handler of their own.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \\
  bash -c 'trap "" USR1; exec "$@"' job \\
  {launch} \\
  "$@" &
step=$! again=
{trap}
trap ask USR1
status=0
wait "$step" || status=$?
while kill -0 "$step" 2>/dev/null; do status=0; wait "$step" || status=$?; done
if [[ $again && $status == 0 ]]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
"""
_SAVES = """\
# Before the time limit: the ranks save and leave, and the job goes back into the queue.
ask() { again=yes; scancel --signal=USR1 "$SLURM_JOB_ID.0"; }"""
_GOES = """\
# torchtitan saves at no signal: what came after its last checkpoint is computed again.
ask() { scontrol requeue "$SLURM_JOB_ID"; }"""


@dataclass(frozen=True)
class Limits:
    """A time limit in sbatch's format, and a partition. Raises ValueError for bad values."""

    time: str = "01:00:00"
    partition: str = ""

    def __post_init__(self) -> None:
        if self.seconds < LEAST:
            raise ValueError(f"time={self.time!r}: allowed are {TIMES}")
        if self.partition and not re.fullmatch(r"[\w.-]+", self.partition):
            raise ValueError(f"partition={self.partition!r}: allowed are names that sinfo prints")

    @property
    def seconds(self) -> int:
        """Seconds of the time limit; 0 if it is no time."""
        return in_seconds(self.time)


def in_seconds(time: str) -> int:
    """Parse a Slurm time limit ("90", "12:00:00", "1-12") into seconds; 0 if it is not one."""
    form = r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?"
    if not (found := re.fullmatch(form, time)):
        return 0
    days, one, two, three = found.groups()
    first, second, third = (int(part or 0) for part in (one, two, three))
    if days is not None or three is not None:  # hours come first
        return int(days or 0) * 86_400 + first * 3600 + second * 60 + third
    return first * 60 + second  # minutes, and seconds


def job(target: Target, limits: Limits, steps: int, seconds: float) -> dict[str, str]:
    """Return the job's files by name; seconds: predicted seconds of a step.

    Raises ValueError for features that the engine lacks.
    """
    every = max(1, int(LOST * limits.seconds / seconds))  # steps from one checkpoint to the next
    files = _files(target)
    launch, more = _launch(target, steps, every)
    lines = [
        "#!/bin/bash",
        *(f"# {line}" for line in target.title()),
        f"#   sbatch {FILE}    # in this folder: Slurm's options before it, the engine's after",
        *options(target, limits.time, limits.partition),
        f"#SBATCH --signal=B:USR1@{SIGNAL}  # so many seconds before the end, to this script alone",
        "#SBATCH --requeue --open-mode=append  # it may run again, and adds to its output",
        _BATCH.format(
            files=" ".join([SITE, *files]),
            file=FILE,
            site=SITE,
            meet=MEET.format(ranks=target.ranks_of_node),
            launch=" \\\n  ".join(launch),
            more=more,
            trap=_GOES if target.engine == "torchtitan" else _SAVES,
        ),
    ]
    return {FILE: "\n".join(lines), SITE: _SITE, **files}


def _files(target: Target) -> dict[str, str]:
    """Return the engine's own files, by name."""
    if target.engine == "torchtitan":
        return {torchtitan.FILE: torchtitan.write(target)}
    if target.engine == "megatron":
        return {megatron.FILE: megatron.write(target)}
    script = Path(__file__).parents[3] / "shardlab/train/take_home.py"
    return {course.FILE: course.write(target), "train.py": script.read_text(encoding="utf-8")}


def _launch(target: Target, steps: int, every: int) -> tuple[list[str], str]:
    """Return the lines that start or resume a node's ranks, and lines that precede them."""
    n = target.ranks_of_node
    torchrun = [
        f'torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node={n} --rdzv-backend=c10d',
        '--rdzv-id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" --rdzv-endpoint="$HOST:$PORT"',
    ]
    if target.engine == "torchtitan":
        resume = f"--dump-folder {RUN} --checkpoint.enable --checkpoint.interval {every}"
        keep = "--checkpoint.keep-latest-k 2"
        return [*torchrun, torchtitan.LAUNCH, f"--training.steps {steps} {keep}", resume], ""
    if target.engine == "megatron":
        resume = f"--save {RUN} --load {RUN} --save-interval {every} --train-iters {steps}"
        leave = "--exit-signal-handler --exit-signal SIGUSR1"
        return [f"bash {megatron.FILE} {resume}", leave], ""
    own = f'train.py "${{options[@]}}" --steps {steps} --every {every}'
    return [*torchrun, own, f"--folder {RUN} --resume auto"], f"source ./{course.FILE}\n"
