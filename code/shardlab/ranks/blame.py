"""Finding the rank at fault.

When one rank fails, its neighbours fail too, some milliseconds later and more loudly: gloo tells
them that a connection was closed. This module sorts causes from consequences, from four witnesses:
the ranks' reports, their exit codes, the stacks of those that still ran, and the log of the
collectives that each one entered.
"""

from __future__ import annotations

import linecache
import re
import signal
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .worker import Job, Report

_LIBRARIES = tuple(
    {sysconfig.get_paths()[k] for k in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {str(Path(torch.__file__).parent), str(Path(__file__).parent)}
)
_PACKAGE = str(Path(__file__).parents[1])
# Collectives whose tensors have one size on all ranks; for the others sizes may well differ.
_ONE_SIZE = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter")
_STACK_LINE = re.compile(r'File "(.*)", line (\d+) in (.*)')

Frame = tuple[str, int, str]  # file, line, function


@dataclass
class Witness:
    """All that is known of one rank at the moment at which the run failed."""

    rank: int
    report: Report | None
    exit_code: int | None
    stack: list[Frame] = field(default_factory=list)  # innermost first
    calls: list[list[str]] = field(default_factory=list)  # ranks, name, sizes, file, line, function
    output: str = ""

    @property
    def returned(self) -> bool:
        """It came to the end of its function."""
        return self.report is not None and self.report.kind == "returned"

    @property
    def raised(self) -> bool:
        """It reported an exception."""
        return self.report is not None and self.report.kind == "raised"

    @property
    def died(self) -> bool:
        """Its process ended without a report."""
        return self.report is None and self.exit_code is not None

    @property
    def guilty(self) -> bool:
        """It failed of its own doing, not because a neighbour did."""
        if self.raised:
            assert self.report is not None
            return not self.report.victim
        return self.died and not (self.exit_code == -signal.SIGABRT and "gloo" in self.output)

    def frames(self) -> list[Frame]:
        """Where it stood when it was asked, or where it raised; innermost first."""
        if self.raised:
            assert self.report is not None
            return [frame[:3] for frame in reversed(self.report.frames)]
        return self.stack

    def user_frame(self) -> Frame | None:
        """The innermost line of the reader's own; of the course's when there is none."""
        own = [frame for frame in self.frames() if not frame[0].startswith((*_LIBRARIES, "<"))]
        readers = [frame for frame in own if not frame[0].startswith(_PACKAGE)]
        return next(iter(readers or own), None)

    def collective(self) -> str | None:
        """The collective in which it stands, if it stands in one."""
        names = [
            name
            for file, _, name in self.frames()
            if "torch/distributed" in file and not name.startswith(("_", "wrapper"))
        ]
        if names:
            return names[-1]
        # A handle's wait() is C++ and leaves no frame of its own: its caller's line has to tell.
        if self.frames():
            file, line, name = self.frames()[0]
            if name == "wait" or ".wait(" in linecache.getline(file, line):
                return "wait"
        return None

    def place(self) -> str:
        """The user's line, in words."""
        return _place(self.user_frame())


def witness(job: Job, rank: int, report: Report | None, exit_code: int | None) -> Witness:
    """Read what rank `rank` left in the run's folder."""

    def text(kind: str) -> str:
        path = job.file(kind, rank)
        return path.read_text("utf-8", "replace") if path.exists() else ""

    # The last dump counts; a fatal signal's dump and a requested one look alike.
    dumps = re.split(
        r"(?:Current thread|Thread|Stack) .*\(most recent call first\):", text("stack")
    )
    stack = [(m[1], int(m[2]), m[3]) for m in map(_STACK_LINE.search, dumps[-1].splitlines()) if m]
    calls = [line.split("\t") for line in text("calls").splitlines()]
    return Witness(rank, report, exit_code, stack, calls, text("out"))


def explain(witnesses: list[Witness], timeout: float | None) -> tuple[list[int], str]:
    """The ranks at fault, and one paragraph that says what happened and where.

    `timeout` is the limit in seconds when the run was stopped for its length, None otherwise.
    """
    total = len(witnesses)
    guilty = [w for w in witnesses if w.guilty]
    if guilty:
        text = "\n".join(_own_failure(w, total) for w in guilty)
        rest = [w.rank for w in witnesses if not w.guilty and not w.returned]
        if rest:
            text += f"\n{_ranks(rest).capitalize()} {_was(rest)} stopped."
        return [w.rank for w in guilty], text
    parted = _parted_ways(witnesses)
    if parted:
        return parted
    waiting = [w for w in witnesses if w.collective() or (w.raised and not w.guilty)]
    absent = [w for w in witnesses if w not in waiting]
    limit = f" within {timeout:g} s" if timeout is not None else ""
    if waiting and absent:
        texts = [_absence(w, total, limit) for w in absent]
        for name, group in _grouped(waiting):
            verb = "waits" if len(group) == 1 else "wait"
            texts.append(
                f"{_ranks([w.rank for w in group]).capitalize()} {verb} for it in {name}"
                f" at {group[0].place()}."
            )
        return [w.rank for w in absent], "\n".join(texts)
    if waiting:
        texts = [
            f"{_ranks([w.rank for w in group]).capitalize()} stood in {name} at {group[0].place()}."
            for name, group in _grouped(waiting)
        ]
        errors = [w.report.error for w in waiting if w.report and w.raised]
        head = f"the {total} ranks did not come together{limit}: every one waits for another."
        said = f"\ngloo said: {errors[0].splitlines()[0][:200]}" if errors else ""
        return [w.rank for w in waiting], "\n".join([head, *texts]) + said
    texts = [_absence(w, total, limit) for w in absent if not w.returned]
    return [w.rank for w in absent if not w.returned], "\n".join(texts)


def _own_failure(w: Witness, total: int) -> str:
    head = f"rank {w.rank} of {total} "
    if w.raised:
        assert w.report is not None
        if w.report.error.startswith("sys.exit("):
            head += f"called {w.report.error} instead of returning"
        elif w.report.error.startswith("its result"):
            return f"{head}finished, but {w.report.error}"
        else:
            head += f"raised {w.report.error}"
        own = [f for f in w.report.frames if not f[0].startswith((*_LIBRARIES, "<"))]
        lines = [f"  at {_place(frame[:3])}: {frame[3].strip()}" for frame in own[-4:]]
        return "\n".join([head, *lines])
    code = w.exit_code or 0
    if code < 0:
        head += f"was ended by {signal.Signals(-code).name}"
    else:
        head += f"ended with exit status {code} without returning"
    return head + (f", at {w.place()}." if w.user_frame() else ".")


def _absence(w: Witness, total: int, limit: str) -> str:
    if w.returned:
        return f"rank {w.rank} of {total} returned early, before the others were done."
    where = f": it stands at {w.place()}" if w.user_frame() else ""
    return f"rank {w.rank} of {total} did not finish{limit}{where}."


def _parted_ways(witnesses: list[Witness]) -> tuple[list[int], str] | None:
    """The first collective at which the ranks of a group did not call the same thing."""
    for group in sorted({call[0] for w in witnesses for call in w.calls}):
        members = range(len(witnesses)) if group == "all" else map(int, re.findall(r"\d+", group))
        logs = {r: [call for call in witnesses[r].calls if call[0] == group] for r in members}
        for index in range(max(map(len, logs.values()))):
            calls = {rank: log[index] for rank, log in logs.items() if index < len(log)}
            camps: dict[tuple[str, str], list[int]] = {}
            for rank, (_, name, sizes, *_) in sorted(calls.items()):
                camps.setdefault((name, sizes if name in _ONE_SIZE else ""), []).append(rank)
            if len(camps) == 1:
                continue
            # The smaller camp is named first; of two camps of one size, the one without rank 0.
            ordered = sorted(camps.values(), key=lambda camp: (len(camp), -camp[0]))
            texts = []
            for camp in ordered:
                _, name, sizes, file, line, function = calls[camp[0]]
                where = _place((file, int(line), function))
                texts.append(f"{_ranks(camp)} called {name}({sizes}) at {where}")
            head = f"the ranks parted ways at their collective number {index + 1}: "
            rule = "Every rank of a group calls the same collectives, in the same order and sizes."
            return ordered[0], head + ",\nwhile ".join(texts) + f".\n{rule}"
    return None


def _grouped(witnesses: list[Witness]) -> list[tuple[str, list[Witness]]]:
    groups: dict[tuple[str, str], list[Witness]] = {}
    for w in witnesses:
        groups.setdefault((w.collective() or "a collective", w.place()), []).append(w)
    return [(name, group) for (name, _), group in groups.items()]


def _place(frame: Frame | None) -> str:
    if frame is None:
        return "an unknown place"
    file, line, function = frame
    inside = "" if function in ("<module>", "<cell line: 1>") else f", in {function}"
    return f"{readable(file)}, line {line}{inside}"


def readable(file: str) -> str:
    """A file's name as a reader knows it, the same from run to run."""
    if "ipykernel_" in file or file.startswith(("<ipython-input", "<cell")):
        return "this notebook's cell"
    path = Path(file)
    return "/".join(path.parts[-2:]) if path.is_absolute() else file


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _was(ranks: list[int]) -> str:
    return "was" if len(ranks) == 1 else "were"
