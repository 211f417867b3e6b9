"""All cells of the lessons on pretended GPUs: python -m rehearsal [lesson ...] [--gpus 1 4]."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LOGS = ROOT / "_build/rehearsal"
# Cells that cannot be rehearsed: the lesson, a text in its cell, and the reason.
NOT_REHEARSED = [
    (
        "context_parallel",
        "compare_with_torch",
        "torch's context_parallel registers its strategies for CUDA's kernels alone",
    ),
    ("train", 'precision="bf16"', "autocast for CUDA leaves the CPU's operators as they are"),
    ("train", "build_on_meta", "DTensor makes empty tensors from meta below the mode"),
    ("tensor_parallel", "profile_step", "a profiler counts c10d's operators twice under a mode"),
]
LIMIT = 1500  # seconds for a lesson
MEMORY = 12 * 2**30  # bytes of address space for a process: a runaway process ends alone


def environment(gpus: int, root: Path = ROOT, **settings: str) -> dict[str, str]:
    """Return the environment of a rehearsal on `gpus` GPUs, with the course in `root`."""
    paths = [str(HERE / "site"), str(root / "code")]
    return os.environ | {"REHEARSE": str(gpus), "PYTHONPATH": os.pathsep.join(paths)} | settings


def rehearse(lesson: str, gpus: int) -> tuple[int, list[str], list[str]]:
    """Run a lesson's cells in a process; return the number of good cells, skipped ones, errors."""
    stem = LOGS / f"{lesson}.{gpus}"
    results = stem.with_suffix(f".{gpus}.cells")
    results.write_text("")
    log = stem.with_suffix(f".{gpus}.findings")
    settings = {"REHEARSE_LOG": str(log), "REHEARSE_FORK": "1"}
    script = ROOT / "code/lessons" / f"{lesson}.py"
    good, left_out, bad = 0, [], []
    with open(f"{stem}.log", "w") as output:
        try:
            done = subprocess.run(
                [sys.executable, HERE / "cells.py", script, results],
                cwd=ROOT,
                env=environment(gpus, **settings),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=LIMIT,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY)),
            )
            ended = "" if done.returncode == 0 else f"ended with status {done.returncode}"
        except subprocess.TimeoutExpired:
            ended = f"did not end within {LIMIT} s"
    for cell in map(json.loads, results.read_text().splitlines()):
        reasons = [r for le, text, r in NOT_REHEARSED if le == lesson and text in cell["source"]]
        where = f"{lesson}.py:{cell['line']} on {gpus}"
        if not cell["error"]:
            good += 1
        elif reasons:
            left_out.append(f"{where}: {reasons[0]}")
        else:
            bad.append(f"{where}: {cell['error'][:1500]}")
    if ended:
        bad.append(f"{lesson}.py on {gpus}: it {ended}; see {stem}.log")
    return good, left_out, bad


def main() -> int:
    """Print a line for each lesson; return 1 if a cell failed."""
    every = sorted(path.stem for path in (ROOT / "code/lessons").glob("*.py"))
    parser = argparse.ArgumentParser(prog="make rehearse", description=__doc__)
    parser.add_argument("lessons", nargs="*", metavar="lesson", help=", ".join(every))
    parser.add_argument("--gpus", nargs="+", type=int, default=[1, 4], help="how many (1 4)")
    options = parser.parse_args()
    if unknown := set(options.lessons) - set(every):
        parser.error(f"lesson={', '.join(sorted(unknown))}: must be one of {', '.join(every)}")
    LOGS.mkdir(parents=True, exist_ok=True)
    failed = False
    for gpus in options.gpus:
        for lesson in options.lessons or every:
            good, left_out, bad = rehearse(lesson, gpus)
            print(f"{lesson} on {gpus} GPUs: {good} cells good, {len(bad)} bad", flush=True)
            for text in left_out:
                print(f"  not rehearsed: {text}")
            for text in bad:
                print(f"  FAILED {text}")
            failed |= bool(bad)
    return int(failed)
