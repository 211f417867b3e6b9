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
from .slurm import RENDEZVOUS_LINES, sbatch_lines
from .target import Target

BATCH_FILE, SITE_FILE = "job.sbatch", "site.sh"
RUN_FOLDER = "run"  # the folder, beside the batch file, of checkpoints and metrics
ENGINES = ("torchtitan", "megatron", "course")
SIGNAL_SECONDS = 300  # before the end: Slurm may be a minute early, and a save takes time
MIN_TIME_SECONDS = 600  # a shorter time limit leaves no time to train
MAX_LOST_SHARE = 0.1  # share of the time limit that may be lost if a job ends without a save
TIME_FORMATS = "MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS:MINUTES:SECONDS, 10 minutes or more"

_SITE_SCRIPT = """\
# Your site's setup: each job sources this file first. Edit it: it is not overwritten.
# `source site.sh` sets up a shell on the login node in the same way.

# module load CUDA
# source ~/venv/bin/activate        # or: conda activate train
# export MEGATRON=~/Megatron-LM     # the folder with pretrain_gpt.py, for Megatron

# Compute nodes often have no network: download on the login node, and work offline there.
# export HF_HOME=/shared/me/huggingface HF_HUB_OFFLINE=1
# export NCCL_SOCKET_IFNAME=ib0     # if NCCL chooses the wrong interface
# export GLOO_SOCKET_IFNAME=lo      # for ranks on the CPU of one machine without a network
"""

_BATCH_TEMPLATE = """\
set -euo pipefail

# Submit this file in its own folder, which holds its files and its checkpoints.
fail() {{ echo "$1" >&2; exit 1; }}
for file in {files}; do
  [[ -e $file ]] || fail "no $file here: cd into the job's folder, then sbatch {file}"
done
# ---- your site: modules, environment, caches -----------------------------------------------------
source ./{site}
# --------------------------------------------------------------------------------------------------
command -v torchrun >/dev/null || fail "no torchrun: activate your environment in {site}"

{meet}export PYTORCH_ALLOC_CONF=expandable_segments:True  # less is lost between tensors
{setup}echo "run ${{SLURM_RESTART_COUNT:-0}} of job $SLURM_JOB_ID"

# USR1 would kill torchrun. A child ignores what its parent ignores; ranks set their own handler.
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
_SAVE_TRAP = """\
# Before the time limit the ranks save and exit, and the job returns to the queue.
ask() { again=yes; scancel --signal=USR1 "$SLURM_JOB_ID.0"; }"""
_REQUEUE_TRAP = """\
# torchtitan does not save at a signal: steps after its last checkpoint are computed again.
ask() { scontrol requeue "$SLURM_JOB_ID"; }"""


@dataclass(frozen=True)
class Limits:
    """A time limit in sbatch's format, and a partition. Raises ValueError for bad values."""

    time: str = "01:00:00"
    partition: str = ""

    def __post_init__(self) -> None:
        if self.time_seconds < MIN_TIME_SECONDS:
            raise ValueError(f"time={self.time!r}: must be {TIME_FORMATS}")
        if self.partition and not re.fullmatch(r"[\w.-]+", self.partition):
            raise ValueError(f"partition={self.partition!r}: must be a name that sinfo prints")

    @property
    def time_seconds(self) -> int:
        """Seconds of the time limit; 0 if it is no time."""
        return parse_slurm_time(self.time)


def parse_slurm_time(time: str) -> int:
    """Parse a Slurm time limit ("90", "12:00:00", "1-12") into seconds; 0 if it is not one."""
    form = r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?"
    if not (match := re.fullmatch(form, time)):
        return 0
    days, one, two, three = match.groups()
    first, second, third = (int(part or 0) for part in (one, two, three))
    if days is not None or three is not None:  # hours come first
        return int(days or 0) * 86_400 + first * 3600 + second * 60 + third
    return first * 60 + second  # minutes, and seconds


def render_job(target: Target, limits: Limits, steps: int, seconds: float) -> dict[str, str]:
    """Return the job's files by name; seconds: predicted seconds of a step.

    Raises ValueError for features that the engine lacks.
    """
    interval = max(1, int(MAX_LOST_SHARE * limits.time_seconds / seconds))
    files = _engine_files(target)
    launch, setup = _launch_lines(target, steps, interval)
    lines = [
        "#!/bin/bash",
        *(f"# {line}" for line in target.title_lines()),
        f"#   sbatch {BATCH_FILE}  # in this folder: Slurm's options before it, the engine's after",
        f"# {SITE_FILE} has to provide the engine, and for doctor and watch the course's package.",
        *sbatch_lines(target, limits.time, limits.partition),
        f"#SBATCH --signal=B:USR1@{SIGNAL_SECONDS}  # seconds before the end, to this script alone",
        "#SBATCH --requeue --open-mode=append  # it may run again, and adds to its output",
        _BATCH_TEMPLATE.format(
            files=" ".join([SITE_FILE, *files]),
            file=BATCH_FILE,
            site=SITE_FILE,
            meet=RENDEZVOUS_LINES.format(ranks=target.ranks_per_node),
            launch=" \\\n  ".join(launch),
            setup=setup,
            trap=_REQUEUE_TRAP if target.engine == "torchtitan" else _SAVE_TRAP,
        ),
    ]
    return {BATCH_FILE: "\n".join(lines), SITE_FILE: _SITE_SCRIPT, **files}


def _engine_files(target: Target) -> dict[str, str]:
    writer = {"torchtitan": torchtitan, "megatron": megatron, "course": course}[target.engine]
    files = {writer.FILE_NAME: writer.render_file(target)}
    if target.engine == "course":
        script = Path(__file__).parents[3] / "shardlab/train/take_home.py"
        files["train.py"] = script.read_text(encoding="utf-8")
    return files


def _launch_lines(target: Target, steps: int, save_interval: int) -> tuple[list[str], str]:
    """Return the lines that start or resume a node's ranks, and lines that precede them."""
    n = target.ranks_per_node
    torchrun = [
        f'torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node={n} --rdzv-backend=c10d',
        '--rdzv-id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" --rdzv-endpoint="$HOST:$PORT"',
    ]
    if target.engine == "torchtitan":
        resume = f"--dump-folder {RUN_FOLDER} --checkpoint.enable"
        resume += f" --checkpoint.interval {save_interval}"
        options = f"--training.steps {steps} --checkpoint.keep-latest-k 2"
        return [*torchrun, torchtitan.LAUNCH_ARGUMENTS, options, resume], ""
    if target.engine == "megatron":
        save = f"--save {RUN_FOLDER} --load {RUN_FOLDER} --save-interval {save_interval}"
        leave = "--exit-signal-handler --exit-signal SIGUSR1"
        return [f"bash {megatron.FILE_NAME} {save} --train-iters {steps}", leave], ""
    own = f'train.py "${{options[@]}}" --steps {steps} --every {save_interval}'
    launch = [*torchrun, own, f"--folder {RUN_FOLDER} --resume auto"]
    return launch, f"source ./{course.FILE_NAME}\n"
