"""Find the rank at fault.

When one rank fails, its neighbours fail too, some milliseconds later and with longer errors: gloo
tells them that a connection was closed. This module separates causes from consequences, with the
evidence of each rank (`Witness`): report, exit code, stack if it still ran, and the log of the
collectives that it entered. `explain` combines these.
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

# Functions of torch.distributed in which a rank waits for others; the others return at once.
_WAITS = {
    *calls.COLLECTIVES,
    *("send", "recv", "isend", "irecv", "batch_isend_irecv"),
    *("send_object_list", "recv_object_list", "all_reduce_coalesced", "all_gather_coalesced"),
    *("init_process_group", "new_group", "split_group", "destroy_process_group"),
    *("monitored_barrier", "wait_tensor"),
}


@dataclass
class Witness:
    """The evidence of one rank at the moment when the run failed."""

    rank: int
    report: Report | None
    exit_code: int | None
    stack: Stack = field(default_factory=list)  # innermost first
    calls: list[Call] = field(default_factory=list)  # its log
    output: str = ""
    nccl: bool = False  # True if nccl moves its tensors

    @property
    def entered(self) -> list[Call]:
        """The collectives that the rank entered."""
        return [call for call in self.calls if call.name]

    @property
    def returned(self) -> bool:
        """True if the rank's function returned."""
        return self.report is not None and not self.report.failed

    @property
    def raised(self) -> bool:
        """True if the rank reported an exception or a result that cannot be sent."""
        return self.report is not None and self.report.failed

    @property
    def died(self) -> bool:
        """True if the rank's process ended without a report."""
        return self.report is None and self.exit_code is not None

    @property
    def guilty(self) -> bool:
        """True if the rank failed by itself, not because a neighbour failed."""
        if self.raised:
            assert self.report is not None
            return not self.report.victim
        return self.died and not (self.exit_code == -signal.SIGABRT and "gloo" in self.output)

    def frames(self) -> Stack:
        """Return the stack at the request or at the exception, innermost frame first."""
        if self.raised:
            assert self.report is not None
            return [frame[:3] for frame in reversed(self.report.frames)]
        return self.stack

    def user_frame(self) -> Frame | None:
        """Return the innermost frame of the reader's code, or else of the course's."""
        frames = self.frames()
        return next(iter(stacks.readers(frames) or stacks.own(frames)), None)

    def collective(self) -> str | None:
        """Return the name of the collective in which the rank waits, if any."""
        names = [name for file, _, name in self.frames() if "torch/distributed" in file]
        if not _WAITS.isdisjoint(names):
            return [name for name in names if not name.startswith(("_", "wrapper"))][-1]
        innermost, _, name = self.frames()[0] if self.frames() else ("", 0, "")
        return "wait" if (innermost, name) == (calls.__file__, "wait") else None

    def ahead_of(self, other: Witness) -> bool:
        """Return True if this rank entered a collective which `other` must enter but has not."""
        mine, theirs = (Counter(call.ranks for call in w.entered) for w in (self, other))
        groups = [ranks for ranks in mine if calls.has(ranks, other.rank)]
        return any(mine[group] > theirs[group] for group in groups)

    def place(self) -> str:
        """Describe the user's line; if the function is over, that of the last collective."""
        frame = self.user_frame()
        if frame is None and self.nccl and self.entered:
            frame = _frame(self.entered[-1])
        return _place(frame)


def witness(job: Job, rank: int, report: Report | None, exit_code: int | None) -> Witness:
    """Read the evidence of rank `rank` in the run's folder."""

    def text(kind: str) -> str:
        path = job.file(kind, rank)
        return path.read_text("utf-8", "replace") if path.exists() else ""

    stack, log = stacks.read(text("stack")), calls.read(job.file("calls", rank))
    return Witness(rank, report, exit_code, stack, log, text("out"), job.by_nccl)


def disagreement(job: Job) -> tuple[list[int], str] | None:
    """Return the ranks at fault and a message if all returned but their collectives mismatch."""
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
    """Return the ranks at fault, and a paragraph that says what happened and where.

    `timeout`: the limit in seconds if the run was stopped because of it, else None.
    """
    within = f" within {timeout:g} s" if timeout is not None else ""
    if any(w.guilty for w in witnesses):
        return _own_failures(witnesses)
    if parted := calls.parted([w.calls for w in witnesses], witnesses[0].nccl):
        return _told(*parted)
    waiting = [w for w in witnesses if _waits(w, witnesses)]
    absent = [w for w in witnesses if w not in waiting]
    if waiting:
        # With nccl, the logs tell for which of the other ranks they wait.
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
    """Return ranks and message for ranks that failed by themselves; the others are consequences."""
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
    """Return the ranks at fault and a message, for a mismatch at one place of a group's logs."""
    more = len({(call.name, call.sizes) for call in firsts}) == 1
    texts = []
    for camp, call in zip(camps, firsts, strict=True):
        given = ", ".join(word for word in (call.sizes, call.told if more else "") if word)
        texts.append(f"{listed(camp)} called {call.name}({given}) at {_place(_frame(call))}")
    head = f"the ranks parted ways at their collective number {place + 1}: "
    rule = "Every rank of a group calls the same collectives, in the same order, types and sizes."
    return camps[0], head + ",\nwhile ".join(texts) + f".\n{rule}"


def _waits(w: Witness, witnesses: list[Witness]) -> bool:
    """Return True if the rank waits for another rank."""
    if w.collective() or (w.raised and not w.guilty):
        return True
    if not w.nccl or w.returned or w.died:
        return False
    # With nccl a rank goes on after it entered a collective, until it needs the result, so its
    # stack can be anywhere.
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
    """Return a file's name as a reader knows it, the same in every run."""
    if "ipykernel_" in file or file.startswith(("<ipython-input", "<cell")):
        return "this notebook's cell"
    path = Path(file)
    return "/".join(path.parts[-2:]) if path.is_absolute() else file


def listed(ranks: list[int]) -> str:
    """Format rank numbers: rank 1, or ranks 0, 1 and 3."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
