"""Run what needs a machine with a GPU: GPU tests, recordings of lessons, benchmarks.

    python -m shardlab gpu                               # everything
    python -m shardlab gpu zero pipeline                 # two lessons and their benchmarks
    python -m shardlab gpu --limit 580 --out carried     # stop in time; carried/gpu.zip has it all

Each step is a process of its own, one after another, so that no two share the GPU. A step is
skipped if its result was made from the current sources: a second call does the rest. gpu.zip holds
paths below the course's folder: `python -m zipfile -e gpu.zip .` puts them in place elsewhere.

Exit status: 0 if all steps passed, 1 if one failed, 2 if none could begin, 3 if the time was up.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shardcourse.build import RECORDINGS_FOLDER, find_course_root, load_recording, select_topics
from shardcourse.build.kernel import build_environment, get_metadata, list_outdated_reasons
from shardcourse.build.key import Key, compute_program_key
from shardlab.common import show
from shardtools import options

WORK_FOLDER, RESULTS_FOLDER = Path("_build/gpu"), Path("benchmarks/recorded")
STEP_SECONDS = {"tests": 900, "lesson": 1800, "benchmark": 3600}  # a step that takes longer hangs
MIN_STEP_SECONDS = 5.0  # no step is started with less time left


@dataclass(frozen=True)
class Step:
    """Program to run, and the file below the course's folder that it writes on success."""

    kind: str  # a key of STEP_SECONDS
    name: str
    command: tuple[str, ...]  # arguments of Python
    result: Path
    key: str = ""  # hash of all sources that the result depends on; a recording stores its own

    def is_current(self, root: Path) -> bool:
        """Return True if the result exists and was made on a GPU from the current sources."""
        path = root / self.result
        if self.kind == "lesson":
            book = load_recording(path)
            made = book is not None and not list_outdated_reasons(book, path.stem, root)
            return made and get_metadata(book)["device"]["kind"] == "cuda"
        with suppress(OSError, ValueError, LookupError, TypeError):
            return json.loads(path.read_text("utf-8"))["key"] == self.key
        return False


def plan(root: Path, topics: list[str], tests: bool, gpus: int) -> list[Step]:
    """Return the steps for these lessons, with the tests that need a GPU if `tests`."""
    steps = []
    files = sorted(root.glob("tests/test_gpu*.py"))
    if tests and files:
        reached = {p: h for file in files for p, h in compute_program_key(file, root).files.items()}
        names = [file.relative_to(root).as_posix() for file in files]
        command = ("-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", *names)
        key = Key((), reached).digest
        steps.append(Step("tests", "tests", command, WORK_FOLDER / "tests.json", key))
    for topic in topics:
        command = ("-m", "shardlab", "record", topic)
        result = RECORDINGS_FOLDER / f"{topic}.ipynb"
        steps.append(Step("lesson", f"lesson_{topic}", command, result))
    for topic in topics:
        program = Path(f"benchmarks/{topic}.py")
        if not (root / program).is_file():
            continue
        key = compute_program_key(program, root).digest
        for ranks in sorted({2, 4, max(gpus, 4)}):
            command = (str(program), "--json", "--links", "gpu", "--ranks", str(ranks))
            result = RESULTS_FOLDER / f"{topic}_{ranks}.json"
            steps.append(Step("benchmark", f"benchmark_{result.stem}", command, result, key))
    return steps


def run_step(step: Step, root: Path, facts: dict[str, Any], seconds: float) -> str:
    """Run a step for at most `seconds`, store its result, and return how it ended."""
    from shardcourse.build import child_process  # imports psutil

    log = root / WORK_FOLDER / f"logs/{step.name}.log"
    output = log.with_suffix(".out")
    for path in (log, output):
        path.write_bytes(b"")
    begin, command = time.monotonic(), [sys.executable, *step.command]
    status = child_process.run_with_time_limit(
        command, log, output, seconds, root, build_environment(root)
    )
    if status is None:
        return "left" if seconds < STEP_SECONDS[step.kind] else "FAILED: it hung"
    last = (output.read_text("utf-8", "replace").strip().splitlines() or [""])[-1]
    if status:
        errors = log.read_text("utf-8", "replace").strip().splitlines() or [last]
        cells = [line for line in errors if line.startswith("lessons/")]  # errors of `record`
        return f"FAILED: {last if step.kind == 'tests' else (cells or errors)[-1]}"
    if step.kind != "lesson":  # `record` has written its own result
        date = datetime.now(UTC).strftime("%Y-%m-%d")
        found = {"key": step.key, "date": date, "seconds": round(time.monotonic() - begin, 1)}
        topic, _, _ = step.result.stem.rpartition("_")
        try:
            figures = {"topic": topic} | json.loads(last) if topic else {"counts": last.strip("= ")}
        except ValueError:
            return "FAILED: it printed no figures"
        if not figures.get("rows", True):
            return "no row for this machine"
        text = json.dumps(found | facts | figures, indent=1) + "\n"
        options.write_file("result", root / step.result, text, make_parent=True)
    return "passed" if step.is_current(root) else "FAILED: it was not made on a GPU"


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `gpu` to the command line."""
    parser = options.add_parser(commands, "gpu", __doc__)
    parser.add_argument("lesson", nargs="*", help="only these lessons and their benchmarks")
    options.add_option(parser, "limit", "seconds that everything may take", "SECONDS")
    options.add_option(parser, "out", f"folder of gpu.zip ({WORK_FOLDER})", "FOLDER")
    parser.set_defaults(command=_main)


def _main(chosen: argparse.Namespace) -> int:
    root = find_course_root()
    limit = float("inf") if chosen.limit is None else options.parse_whole("limit", chosen.limit)
    deadline = time.monotonic() + limit
    topics = select_topics(chosen.lesson, root)
    folder = root / WORK_FOLDER
    out = folder if chosen.out is None else options.make_folder("out", chosen.out).resolve()
    facts = _collect_gpu_facts(root)
    device = facts["device"]
    print(f"{device['count']} × {device['name']}, driver {device['driver']}", flush=True)
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    steps = plan(root, topics, not chosen.lesson, device["count"])
    results = {step.name: "left" for step in steps}
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends child processes, too
    try:
        # A step with a log failed before, so it goes last: it may take all the time that is left.
        for step in sorted(steps, key=lambda step: (logs / f"{step.name}.log").exists()):
            left = deadline - time.monotonic()
            if step.is_current(root):
                results[step.name] = "there already"
            elif left > MIN_STEP_SECONDS:
                print(f"{step.name} …", end="", flush=True)
                results[step.name] = run_step(step, root, facts, min(left, STEP_SECONDS[step.kind]))
                print(f" {results[step.name]}", flush=True)
                _write_archive(out / "gpu.zip", root, steps, results)
    except KeyboardInterrupt:
        print("\ninterrupted")
    _write_archive(out / "gpu.zip", root, steps, results)
    show.table(list(results.items()), ["step", "result"])
    print(
        f"Logs: {WORK_FOLDER}/logs. Commit the new files in {RECORDINGS_FOLDER}, {RESULTS_FOLDER}."
    )
    print(f"To copy them: {out / 'gpu.zip'}; unpack it with python -m zipfile -e gpu.zip .")
    outcomes = [result.partition(":")[0] for result in results.values()]
    return 3 if "left" in outcomes else 1 if "FAILED" in outcomes else 0


def _collect_gpu_facts(root: Path) -> dict[str, Any]:
    """Return the facts that a recording stores of this machine; ValueError without a CUDA GPU."""
    ask = "import torch; torch.ones(1, device='cuda').item(); import json; "
    ask += "from shardcourse.build import facts; print(json.dumps(facts.collect_facts()))"
    command = [sys.executable, "-c", ask]
    done = subprocess.run(command, env=build_environment(root), capture_output=True, text=True)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["it printed no error"])[-1]
        raise ValueError(f"no CUDA GPU here that can compute: {why}")
    return json.loads(done.stdout.splitlines()[-1])


def _write_archive(path: Path, root: Path, steps: list[Step], results: dict[str, str]) -> None:
    done = ("passed", "there already")
    files = [root / step.result for step in steps if results[step.name] in done]

    def write_zip(part: Path) -> None:
        with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
            for file in [*files, *(root / WORK_FOLDER / "logs").glob("*.*")]:
                archive.write(file, file.relative_to(root))

    options.write_file("out", path, write_zip)
