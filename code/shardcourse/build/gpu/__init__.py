"""Everything that only a machine with a GPU can do, in one command.

    python -m shardlab gpu                               # tests, lessons, benchmarks
    python -m shardlab gpu --limit 580 --out carried     # stop in time; what to carry lies there
    python -m shardlab gpu --only lessons zero pipeline  # some lessons

It says what GPUs are here, runs the tests that need one, records every lesson, and measures the
benchmarks' rows for a GPU, one after another: nothing shares the GPU. Called again, it does what is
missing, failed, or out of date. At the end stands a table, and what to commit.

Exit status: 0, all passed; 1, something failed; 2, it could not begin; 3, time was up or it was
interrupted, and something is left: call it again.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardcourse.build import course, selected
from shardcourse.build.carry import FIGURES, RECORDED, WORK, archive, replace
from shardcourse.build.kernel import environment
from shardlab.common import folder_lock, show
from shardtools import options

from . import machine
from .steps import PARTS, Step, planned

PASSED, HELD, FAILED, LACKING, LEFT = "passed", "there already", "FAILED", "left out", "left"
ENOUGH = 5.0  # seconds: with less left, no step is begun


@dataclass
class Outcome:
    """What became of a step."""

    result: str
    seconds: float | None = None
    says: str = ""
    log: str = ""


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `gpu` to the command line."""
    parser = options.command(commands, "gpu", __doc__)
    parser.add_argument("lesson", nargs="*", help="only these lessons, and their benchmarks")
    parser.add_argument(
        "--only", action="append", metavar="PART", help=f"{', '.join(PARTS)}; may be repeated"
    )
    options.add(parser, "limit", "how long all of it may take", "SECONDS")
    options.add(parser, "each", "how long one step may take", "SECONDS")
    options.add(parser, "out", f"of summary.json and gpu.zip ({WORK})", "FOLDER")
    parser.add_argument("--again", action="store_true", help="do what holds once more")
    parser.set_defaults(command=_main)


def _main(chosen: argparse.Namespace) -> int:
    begin = time.monotonic()
    root = course()
    parts = chosen.only or ([*PARTS] if not chosen.lesson else ["lessons", "benchmarks"])
    for part in parts:
        if part not in PARTS:
            raise ValueError(f"--only={part!r}: allowed are {', '.join(PARTS)}")
    if chosen.lesson and set(parts) == {"tests"}:
        raise ValueError(f"--only=tests with {chosen.lesson[0]}: allowed is no lesson with it")
    limit, each = (
        None if given is None else options.whole(name, given)
        for name, given in (("--limit", chosen.limit), ("--each", chosen.each))
    )
    topics = selected(chosen.lesson, root)
    out = root / WORK if chosen.out is None else options.folder("--out", chosen.out).resolve()
    if lacking := machine.missing(dict.fromkeys(n for part in parts for n in PARTS[part][1])):
        needed = f"{sys.executable} -m pip install {' '.join(repr(n) for n in lacking)}"
        raise ValueError(f"this Python lacks {', '.join(lacking)}: {needed}")
    found = machine.look(environment(root))
    todo = planned(root, topics, parts, found["facts"])
    if not todo:
        raise ValueError(f"nothing to do: no {' and no '.join(parts)} of {', '.join(topics)}")
    (root / WORK / "logs").mkdir(parents=True, exist_ok=True)
    with folder_lock.hold(root / WORK, "a run of `gpu`"):
        print(machine.described(found), flush=True)
        work = Work(root, out, found, todo, each, limit and begin + limit)
        return work.through(again=chosen.again)


@dataclass
class Work:
    """All steps, done one after another."""

    root: Path
    out: Path
    found: dict[str, Any]
    todo: list[Step]
    each: float | None  # seconds for a step, None: its part's own limit
    deadline: float | None  # on the monotonic clock

    def through(self, again: bool) -> int:
        """Do what is to be done, and say so; return the exit status. again: what holds as well."""
        tried = self._tried()
        outcomes = {step.name: Outcome(LEFT, log=tried.get(step.name, "")) for step in self.todo}
        stop = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            # What was tried in vain comes last: it may take all the time that there is.
            for step in sorted(self.todo, key=lambda step: step.name in tried):
                said = step.held(self.root)
                if said is not None and not again:
                    outcomes[step.name] = Outcome(HELD, said["seconds"], said["date"])
                elif step.lacks:
                    outcomes[step.name] = Outcome(LACKING, None, step.lacks)
                elif self._seconds() > ENOUGH:
                    print(f"{step.name} …", end="", flush=True)
                    outcomes[step.name] = outcome = self._do(step)
                    print(f" {outcome.result}, {outcome.seconds} s {outcome.says}", flush=True)
                    self._write(outcomes)
        except KeyboardInterrupt:
            print("\ninterrupted")
        finally:
            signal.signal(signal.SIGTERM, stop)
        self._write(outcomes)
        self._say(outcomes)
        results = {outcome.result for outcome in outcomes.values()}
        return 3 if LEFT in results else 1 if FAILED in results else 0

    def _seconds(self) -> float:
        """How many there are left."""
        return float("inf") if self.deadline is None else self.deadline - time.monotonic()

    def _tried(self) -> dict[str, str]:
        """The steps that were tried in vain, and their logs, as the last call left it."""
        with suppress(OSError, ValueError, AttributeError, LookupError, TypeError, RecursionError):
            last = json.loads((self.root / WORK / "summary.json").read_text("utf-8"))["steps"]
            vain = (FAILED, LEFT)
            return {
                n: one["log"] for n, one in last.items() if one["log"] and one["result"] in vain
            }
        return {}

    def _do(self, step: Step) -> Outcome:
        """Run a step, and keep what it made."""
        from . import child  # which needs psutil

        log = self.root / WORK / f"logs/{step.name}.log"
        output = log.with_suffix(".json") if step.part == "benchmarks" else log
        for path in (log, output):
            path.write_bytes(b"")
        own, begin = self.each or PARTS[step.part][0], time.monotonic()
        limit = min(own, self._seconds())
        command = (sys.executable, *step.command)
        status = child.run(command, log, output, limit, self.root, environment(self.root))
        seconds = round(time.monotonic() - begin, 1)
        result, says = FAILED, machine.reason(log.read_text("utf-8", "replace"))
        if status is None and limit < own:
            result, says = LEFT, "time was up"
        elif status is None:
            says = f"took longer than {own} s: {says}"
        elif status == 0:
            text = output.read_text("utf-8", "replace")
            try:
                kept = step.keep(self.root, text, self.found["facts"], seconds)
                result, says = (PASSED, kept) if kept else (LACKING, says)
            except ValueError as error:
                says = str(error)
        return Outcome(result, seconds, says, log.relative_to(self.root).as_posix())

    def _write(self, outcomes: Mapping[str, Outcome]) -> None:
        """The summary, and all that holds in one file: so it is there however the call ends."""
        steps = {name: asdict(outcome) for name, outcome in outcomes.items()}
        work = self.root / WORK
        text = json.dumps({"machine": self.found, "steps": steps}, indent=1) + "\n"
        for folder in {work, self.out}:
            replace(folder / "summary.json", text.encode())
        kept = [self.root / step.kept for step in self.todo if step.held(self.root) is not None]
        files = [*kept, work / "summary.json", *sorted((work / "logs").glob("*.log"))]
        archive(self.out / "gpu.zip", self.root, files)

    def _say(self, outcomes: Mapping[str, Outcome]) -> None:
        """The table, where logs are, and what to commit or to carry."""
        print()
        rows = [
            [
                name,
                one.result,
                "" if one.seconds is None else f"{one.seconds:.0f}",
                one.log if one.result == FAILED else one.says,
            ]
            for name, one in outcomes.items()
        ]
        show.table(rows, ["step", "result", "time (s)", "what it says, or its log"])
        print()
        for name, one in outcomes.items():
            if one.result == FAILED:
                print(f"{name}: {one.says}")
        new = self._new()
        if new is None:
            print(f"There is no git here. Carry home: {self.out / 'gpu.zip'}")
            print("There: python -m shardlab record --unpack gpu.zip, and commit what it says.")
        else:
            print("To commit:" if new else "Nothing new to commit.", *new, sep="\n    ")

    def _new(self) -> list[str] | None:
        """The paths of what was made and is not committed yet; None where there is no git."""
        command = ["git", "status", "--porcelain", "--untracked-files=all", "--"]
        command += [str(RECORDED), str(FIGURES)]
        with suppress(OSError):
            done = subprocess.run(command, cwd=self.root, capture_output=True, text=True)
            return None if done.returncode else [line[3:] for line in done.stdout.splitlines()]
        return None
