"""Finding the rank at fault.

When one rank fails, its neighbours fail too, some milliseconds later and more loudly: gloo tells
them that a connection was closed. This module sorts causes from consequences, from what each rank
leaves behind (`Witness`): its report, its exit code, where it stood if it still ran, and the log of
the collectives that it entered. `explain` puts these together.
"""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from . import calls, stacks
from .calls import Call
from .stacks import Frame, Stack
from .worker import Job, Report

# The functions of torch.distributed in which a rank waits for others. The rest of them only asks.
_WAITS = {
    *calls.COLLECTIVES,
    *("send", "recv", "isend", "irecv", "batch_isend_irecv"),
    *("send_object_list", "recv_object_list", "all_reduce_coalesced", "all_gather_coalesced"),
    *("init_process_group", "new_group", "split_group", "destroy_process_group"),
    *("monitored_barrier", "wait_tensor"),
}


@dataclass
class Witness:
    """All that is known of one rank at the moment at which the run failed."""

    rank: int
    report: Report | None
    exit_code: int | None
    stack: Stack = field(default_factory=list)  # innermost first
    calls: list[Call] = field(default_factory=list)  # its log
    output: str = ""
    nccl: bool = False  # what moves its tensors

    @property
    def entered(self) -> list[Call]:
        """The collectives that it entered."""
        return [call for call in self.calls if call.name]

    @property
    def returned(self) -> bool:
        """It came to the end of its function."""
        return self.report is not None and not self.report.failed

    @property
    def raised(self) -> bool:
        """It reported an exception, or what else kept its function from returning a result."""
        return self.report is not None and self.report.failed

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

    def frames(self) -> Stack:
        """Where it stood when it was asked, or where it raised; innermost first."""
        if self.raised:
            assert self.report is not None
            return [frame[:3] for frame in reversed(self.report.frames)]
        return self.stack

    def user_frame(self) -> Frame | None:
        """The innermost line of the reader's own; of the course's when there is none."""
        frames = self.frames()
        return next(iter(stacks.readers(frames) or stacks.own(frames)), None)

    def collective(self) -> str | None:
        """The collective in which it stands, if it stands in one."""
        names = [name for file, _, name in self.frames() if "torch/distributed" in file]
        if not _WAITS.isdisjoint(names):
            return [name for name in names if not name.startswith(("_", "wrapper"))][-1]
        innermost, _, name = self.frames()[0] if self.frames() else ("", 0, "")
        return "wait" if (innermost, name) == (calls.__file__, "wait") else None

    def ahead_of(self, other: Witness) -> bool:
        """Whether it entered a collective which `other` has to enter, and has not."""
        mine, theirs = (Counter(call.ranks for call in w.entered) for w in (self, other))
        groups = [ranks for ranks in mine if calls.has(ranks, other.rank)]
        return any(mine[group] > theirs[group] for group in groups)

    def place(self) -> str:
        """The user's line, in words; that of its last collective where its function is over."""
        frame = self.user_frame()
        if frame is None and self.nccl and self.entered:
            frame = _frame(self.entered[-1])
        return _place(frame)


def witness(job: Job, rank: int, report: Report | None, exit_code: int | None) -> Witness:
    """Read what rank `rank` left in the run's folder."""

    def text(kind: str) -> str:
        path = job.file(kind, rank)
        return path.read_text("utf-8", "replace") if path.exists() else ""

    stack, log = stacks.read(text("stack")), calls.read(job.file("calls", rank))
    return Witness(rank, report, exit_code, stack, log, text("out"), job.by_nccl)


def disagreement(job: Job) -> tuple[list[int], str] | None:
    """The ranks at fault, and what they asked for, where all returned and yet did not agree."""
    paths = [job.file("calls", rank) for rank in range(job.world_size)]
    first = paths[0].read_bytes()
    if all(path.read_bytes() == first for path in paths):
        return None
    parted = calls.parted([calls.read(path) for path in paths], job.by_nccl, returned=True)
    if parted is None:
        return None
    culprits, text = _told(*parted)
    return culprits, f"{text}\nAll ranks returned, but what it gave them may be garbage."


def explain(witnesses: list[Witness], timeout: float | None) -> tuple[list[int], str]:
    """The ranks at fault, and one paragraph that says what happened and where.

    `timeout` is the limit in seconds when the run was stopped for its length, None otherwise.
    """
    within = f" within {timeout:g} s" if timeout is not None else ""
    if any(w.guilty for w in witnesses):
        return _own_failures(witnesses)
    if parted := calls.parted([w.calls for w in witnesses], witnesses[0].nccl):
        return _told(*parted)
    waiting = [w for w in witnesses if _waits(w, witnesses)]
    absent = [w for w in witnesses if w not in waiting]
    if waiting:
        # With nccl logs tell for whom they wait, among those who do something else.
        behind = [w for w in absent if w.nccl and any(other.ahead_of(w) for other in waiting)]
        absent = behind or absent
    else:
        absent = [w for w in absent if not w.returned]
    texts = [_absence(w, len(witnesses), within) for w in absent]
    if not absent:
        all_of_them = f"the {len(waiting)} ranks did not come together{within}"
        texts.append(f"{all_of_them}: every one waits for another.")
    for name, group in _grouped(waiting):
        who, one = listed([w.rank for w in group]).capitalize(), len(group) == 1
        does = f"wait{'s' * one} for it" if absent else f"stand{'s' * one}"
        texts.append(f"{who} {does} in {name} at {group[0].place()}.")
    return [w.rank for w in absent or waiting], "\n".join(texts)


def _own_failures(witnesses: list[Witness]) -> tuple[list[int], str]:
    """Ranks that raised or died of their own doing: all others are consequences."""
    guilty = [w for w in witnesses if w.guilty]
    texts = [_own_failure(w, len(witnesses)) for w in guilty]
    rest = [w.rank for w in witnesses if not w.guilty and not w.returned]
    if rest:
        texts.append(f"{listed(rest).capitalize()} {'was' if len(rest) == 1 else 'were'} stopped.")
    return [w.rank for w in guilty], "\n".join(texts)


def _own_failure(w: Witness, total: int) -> str:
    head = f"rank {w.rank} of {total} "
    if w.raised:
        assert w.report is not None
        head += f"raised {w.report.error}"
        own = stacks.own(w.report.frames)
        lines = [f"  at {_place(frame[:3])}: {frame[3].strip()}" for frame in own[-4:]]
        return "\n".join([head, *lines])
    code = w.exit_code or 0
    if code < 0:
        head += f"was ended by {signal.Signals(-code).name}"
    else:
        head += f"ended with exit status {code} without returning"
    return head + (f", at {w.place()}." if w.user_frame() else ".")


def _told(place: int, camps: list[list[int]], firsts: list[Call]) -> tuple[list[int], str]:
    """Who parted ways with the others at a place of a group's logs, and in what words."""
    more = len({(call.name, call.sizes) for call in firsts}) == 1
    texts = []
    for camp, call in zip(camps, firsts, strict=True):
        given = ", ".join(word for word in (call.sizes, call.told if more else "") if word)
        texts.append(f"{listed(camp)} called {call.name}({given}) at {_place(_frame(call))}")
    head = f"the ranks parted ways at their collective number {place + 1}: "
    rule = "Every rank of a group calls the same collectives, in the same order, types and sizes."
    return camps[0], head + ",\nwhile ".join(texts) + f".\n{rule}"


def _waits(w: Witness, witnesses: list[Witness]) -> bool:
    """Whether it waits for another rank."""
    if w.collective() or (w.raised and not w.guilty):
        return True
    if not w.nccl or w.returned or w.died:
        return False
    # With nccl a rank goes on after it entered a collective, up to where it needs what comes from
    # there, and stands anywhere.
    return any(w.ahead_of(other) for other in witnesses)


def _absence(w: Witness, total: int, within: str) -> str:
    if w.returned:
        return f"rank {w.rank} of {total} returned early, before the others were done."
    where = f": it stands at {w.place()}" if w.user_frame() else ""
    return f"rank {w.rank} of {total} did not finish{within}{where}."


def _grouped(witnesses: list[Witness]) -> list[tuple[str, list[Witness]]]:
    groups: dict[tuple[str, str], list[Witness]] = {}
    for w in witnesses:
        entered = w.entered[-1].name if w.nccl and w.entered else "a collective"
        groups.setdefault((w.collective() or entered, w.place()), []).append(w)
    return [(name, group) for (name, _), group in groups.items()]


def _frame(call: Call) -> Frame:
    return call.file, int(call.line), call.function


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


def listed(ranks: list[int]) -> str:
    """Ranks in words: rank 1, or ranks 0, 1 and 3."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
