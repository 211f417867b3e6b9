"""All cells of the lessons on pretended GPUs: python -m rehearsal [lesson ...] [--gpus 1 4]."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LOGS = ROOT / "_build/rehearsal"
# What cannot be rehearsed: the lesson, a text in its cell, and why.
NOT_REHEARSED = [
    (
        "context_parallel",
        "beside_context_parallel",
        "torch's context_parallel registers its strategies for CUDA's kernels alone",
    ),
    ("train", 'precision="bf16"', "autocast for CUDA leaves the CPU's operators as they are"),
    ("train", "begun_on_meta", "DTensor makes empty tensors from meta below the mode"),
    ("tensor_parallel", "profiled", "a profiler counts c10d's operators twice under a mode"),
]
LIMIT = 1500  # seconds for a lesson
MEMORY = 12 * 2**30  # bytes of addresses for a process: what runs away ends here, alone


@dataclass
class Outcome:
    """What came of one lesson on some GPUs."""

    lesson: str
    gpus: int
    good: int = 0
    bad: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    findings: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def add(self, cell: dict[str, Any]) -> None:
        """Count one cell."""
        reasons = [
            r for le, text, r in NOT_REHEARSED if le == self.lesson and text in cell["source"]
        ]
        where = f"{self.lesson}.py:{cell['line']} on {self.gpus}"
        if not cell["error"]:
            self.good += 1
        elif reasons:
            self.left_out.append(f"{where}: {reasons[0]}")
        else:
            self.bad.append(f"{where}: {cell['error'][:1500]}")


def environment(gpus: int, root: Path = ROOT, **settings: str) -> dict[str, str]:
    """The environment of a rehearsal on `gpus` GPUs, with the course in `root`."""
    paths = [str(HERE / "site"), str(root / "code")]
    return os.environ | {"REHEARSE": str(gpus), "PYTHONPATH": os.pathsep.join(paths)} | settings


def rehearse(lesson: str, gpus: int, fork: bool) -> Outcome:
    """Run a lesson's cells in a process of its own; its output goes to a file."""
    stem = LOGS / f"{lesson}.{gpus}"
    results, findings = stem.with_suffix(f".{gpus}.cells"), stem.with_suffix(f".{gpus}.findings")
    for path in (results, findings):
        path.write_text("")
    settings = {"REHEARSE_LOG": str(findings)} | ({"REHEARSE_FORK": "1"} if fork else {})
    outcome, begin = Outcome(lesson, gpus), time.monotonic()
    script = ROOT / "code/lessons" / f"{lesson}.py"
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
    outcome.seconds = time.monotonic() - begin
    for line in results.read_text().splitlines():
        outcome.add(json.loads(line))
    if ended:
        outcome.bad.append(f"{lesson}.py on {gpus}: it {ended}; see {stem}.log")
    kinds = [
        line.partition("]")[0].partition(": ")[2] for line in findings.read_text().splitlines()
    ]
    outcome.findings = Counter(kinds)
    return outcome


def main(arguments: list[str] | None = None) -> int:
    """Print a table by lesson; 1 when a cell failed."""
    every = sorted(path.stem for path in (ROOT / "code/lessons").glob("*.py"))
    parser = argparse.ArgumentParser(prog="make rehearse", description=__doc__)
    parser.add_argument("lessons", nargs="*", metavar="lesson", help=", ".join(every))
    parser.add_argument("--gpus", nargs="+", type=int, default=[1, 4], help="how many (1 4)")
    parser.add_argument("--fresh", action="store_true", help="start ranks as on a GPU: slow")
    parser.add_argument("--jobs", type=int, default=1, help="lessons at a time (1)")
    options = parser.parse_args(arguments)
    if unknown := set(options.lessons) - set(every):
        parser.error(f"no such lesson: {', '.join(sorted(unknown))}; there are {', '.join(every)}")
    LOGS.mkdir(parents=True, exist_ok=True)
    work = [(lesson, gpus) for gpus in options.gpus for lesson in options.lessons or every]
    print(
        f"{'lesson':20} {'GPUs':>4} {'good':>5} {'bad':>4} {'left out':>8} {'seconds':>8}  findings"
    )
    outcomes = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for o in pool.map(lambda pair: rehearse(*pair, not options.fresh), work):
            found = ", ".join(f"{kind} {n}" for kind, n in sorted(o.findings.items()))
            counts = f"{o.good:5} {len(o.bad):4} {len(o.left_out):8} {o.seconds:8.0f}"
            print(f"{o.lesson:20} {o.gpus:4} {counts}  {found}", flush=True)
            outcomes.append(o)
    for o in outcomes:
        for text in o.left_out:
            print(f"not rehearsed: {text}")
    for o in outcomes:
        for text in o.bad:
            print(f"FAILED {text}")
    return int(any(o.bad for o in outcomes))
