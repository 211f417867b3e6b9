"""Find the rank at fault.

When one rank fails, its peers fail some milliseconds later with longer errors: gloo tells them that
a connection was closed. This module separates the root cause from its consequences. It uses each
rank's `RankOutcome`: the report, the exit code, the stack if the rank still ran, and the log of the
collectives that the rank entered. `explain_failure` combines these.
"""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from . import collective_log, stacks
from .collective_log import CollectiveCall
from .stacks import Frame, Stack
from .worker import Job, Report

# Functions of torch.distributed in which a rank waits for others; the others return at once.
_BLOCKING_FUNCTIONS = {
    *collective_log.COLLECTIVES,
    *("send", "recv", "isend", "irecv", "batch_isend_irecv"),
    *("send_object_list", "recv_object_list", "all_reduce_coalesced", "all_gather_coalesced"),
    *("init_process_group", "new_group", "split_group", "destroy_process_group"),
    *("monitored_barrier", "wait_tensor"),
}


@dataclass
class RankOutcome:
    """State of one rank when the run failed."""

    rank: int
    report: Report | None
    exit_code: int | None = None
    stack: Stack = field(default_factory=list)  # innermost first
    calls: list[CollectiveCall] = field(default_factory=list)  # the rank's log
    output: str = ""
    uses_nccl: bool = False  # True if nccl moves the rank's tensors

    @property
    def entered_calls(self) -> list[CollectiveCall]:
        """The collectives that the rank entered."""
        return [call for call in self.calls if call.name]

    @property
    def has_returned(self) -> bool:
        """True if the rank's function returned."""
        return self.report is not None and not self.report.has_failed

    @property
    def has_raised(self) -> bool:
        """True if the rank reported an exception or a result that cannot be sent."""
        return self.report is not None and self.report.has_failed

    @property
    def has_died(self) -> bool:
        """True if the rank's process ended without a report."""
        return self.report is None and self.exit_code is not None

    @property
    def is_root_cause(self) -> bool:
        """True if the rank failed by itself, not because a peer failed."""
        if self.has_raised:
            assert self.report is not None
            return not self.report.is_peer_failure
        return self.has_died and not (self.exit_code == -signal.SIGABRT and "gloo" in self.output)

    def get_frames(self) -> Stack:
        """Return the stack at the request or at the exception, innermost frame first."""
        if self.has_raised:
            assert self.report is not None
            return [frame[:3] for frame in reversed(self.report.frames)]
        return self.stack

    def find_user_frame(self) -> Frame | None:
        """Return the innermost frame of the user's code, or else of the course's."""
        frames = stacks.drop_library_frames(self.get_frames())
        return next(iter(stacks.drop_course_frames(frames) or frames), None)

    def find_blocking_call(self) -> str | None:
        """Return the name of the collective in which the rank waits, if any."""
        names = [name for file, _, name in self.get_frames() if "torch/distributed" in file]
        if not _BLOCKING_FUNCTIONS.isdisjoint(names):
            return [name for name in names if not name.startswith(("_", "wrapper"))][-1]
        waits = any(frame[::2] == (collective_log.__file__, "wait") for frame in self.get_frames())
        return "wait" if waits else None

    def is_ahead_of(self, other: RankOutcome) -> bool:
        """Return True if this rank entered a collective which `other` must enter but has not."""
        mine, theirs = (Counter(call.ranks for call in w.entered_calls) for w in (self, other))
        groups = [ranks for ranks in mine if collective_log.is_member(ranks, other.rank)]
        return any(mine[group] > theirs[group] for group in groups)

    def describe_location(self) -> str:
        """Describe the user's line; if the function has returned, that of the last collective."""
        frame = self.find_user_frame()
        if frame is None and self.uses_nccl and self.entered_calls:
            frame = self.entered_calls[-1].frame
        return _format_frame(frame)


def read_outcome(job: Job, rank: int, report: Report | None, exit_code: int | None) -> RankOutcome:
    """Read the stack, the log and the output of rank `rank` from the run's folder."""

    def read_file(kind: str) -> str:
        path = job.get_path(kind, rank)
        return path.read_text("utf-8", "replace") if path.exists() else ""

    stack = stacks.parse_dump(read_file("stack"))
    calls = collective_log.read_log(job.get_path("calls", rank))
    return RankOutcome(rank, report, exit_code, stack, calls, read_file("out"), job.uses_nccl)


def find_silent_mismatch(job: Job) -> tuple[list[int], str] | None:
    """Return the ranks at fault and a message if all returned but their collectives mismatch."""
    paths = [job.get_path("calls", rank) for rank in range(job.world_size)]
    first = paths[0].read_bytes()
    if all(path.read_bytes() == first for path in paths):
        return None
    logs = [collective_log.read_log(path) for path in paths]
    mismatch = collective_log.find_mismatch(logs, job.uses_nccl, returned=True)
    if mismatch is None:
        return None
    at_fault, text = _explain_mismatch(*mismatch)
    return at_fault, f"{text}\nAll ranks returned, but the results of this call may be garbage."


def explain_failure(outcomes: list[RankOutcome], timeout: float | None) -> tuple[list[int], str]:
    """Return the ranks at fault, and a paragraph that says what happened and where.

    `timeout`: the limit in seconds if the run was stopped because of it, else None.
    """
    within = f" within {timeout:g} s" if timeout is not None else ""
    if any(outcome.is_root_cause for outcome in outcomes):
        return _explain_root_causes(outcomes)
    calls = [outcome.calls for outcome in outcomes]
    if mismatch := collective_log.find_mismatch(calls, outcomes[0].uses_nccl):
        return _explain_mismatch(*mismatch)
    waiting = [o for o in outcomes if _is_waiting(o, outcomes)]
    absent = [o for o in outcomes if o not in waiting]
    if waiting:
        # With nccl, the logs tell for which of the other ranks they wait.
        behind = [o for o in absent if o.uses_nccl and any(w.is_ahead_of(o) for w in waiting)]
        absent = behind or absent
    else:
        absent = [o for o in absent if not o.has_returned]
    texts = [_describe_absence(o, len(outcomes), within) for o in absent]
    if not absent:
        texts.append(f"{len(waiting)} ranks did not finish{within}: each waits for another one.")
    missing = f" for {format_ranks([o.rank for o in absent])}" if absent else ""
    for name, group in _group_by_location(waiting):
        who = format_ranks([o.rank for o in group]).capitalize()
        wait = "waits" if len(group) == 1 else "wait"
        texts.append(f"{who} {wait}{missing} in {name} at {group[0].describe_location()}.")
    return [o.rank for o in absent or waiting], "\n".join(texts)


def _explain_root_causes(outcomes: list[RankOutcome]) -> tuple[list[int], str]:
    causes = [o for o in outcomes if o.is_root_cause]
    texts = [_describe_root_cause(o, len(outcomes)) for o in causes]
    rest = [o.rank for o in outcomes if not o.is_root_cause and not o.has_returned]
    if rest:
        verb = "was" if len(rest) == 1 else "were"
        texts.append(f"{format_ranks(rest).capitalize()} {verb} stopped.")
    return [o.rank for o in causes], "\n".join(texts)


def _describe_root_cause(outcome: RankOutcome, world_size: int) -> str:
    text = f"rank {outcome.rank} of {world_size} "
    if outcome.has_raised:
        assert outcome.report is not None
        frames = stacks.drop_library_frames(outcome.report.frames)[-4:]
        lines = [f"  at {_format_frame(frame[:3])}: {frame[3].strip()}" for frame in frames]
        return "\n".join([f"{text}raised {outcome.report.error}", *lines])
    code = outcome.exit_code or 0
    if code < 0:
        text += f"was killed by {signal.Signals(-code).name}"
    else:
        text += f"ended with exit status {code} before its function returned"
    return text + (f", at {outcome.describe_location()}." if outcome.find_user_frame() else ".")


def _explain_mismatch(
    index: int, groups: list[list[int]], calls: list[CollectiveCall]
) -> tuple[list[int], str]:
    """Return the ranks at fault and a message for a mismatch at one index of the ranks' logs."""
    differ_in_options = len({(call.name, call.sizes) for call in calls}) == 1
    texts = []
    for ranks, call in zip(groups, calls, strict=True):
        options = call.options if differ_in_options else ""
        arguments = ", ".join(word for word in (call.sizes, options) if word)
        where = _format_frame(call.frame)
        texts.append(f"{format_ranks(ranks)} called {call.name}({arguments}) at {where}")
    head = f"mismatched collectives: at collective number {index + 1} of a group, "
    rule = (
        "All ranks of a group must call the same collectives, in the same order, types and sizes."
    )
    return groups[0], head + ",\nwhile ".join(texts) + f".\n{rule}"


def _is_waiting(outcome: RankOutcome, outcomes: list[RankOutcome]) -> bool:
    if outcome.find_blocking_call() or (outcome.has_raised and not outcome.is_root_cause):
        return True
    if not outcome.uses_nccl or outcome.has_returned or outcome.has_died:
        return False
    # With nccl a rank goes on after it entered a collective, until it needs the result, so its
    # stack can be anywhere.
    return any(outcome.is_ahead_of(other) for other in outcomes)


def _describe_absence(outcome: RankOutcome, world_size: int, within: str) -> str:
    text = f"rank {outcome.rank} of {world_size}"
    if outcome.has_returned:
        return f"{text} returned early, before the other ranks finished."
    where = f": it is at {outcome.describe_location()}" if outcome.find_user_frame() else ""
    return f"{text} did not finish{within}{where}."


def _group_by_location(outcomes: list[RankOutcome]) -> list[tuple[str, list[RankOutcome]]]:
    groups: dict[tuple[str, str], list[RankOutcome]] = {}
    for outcome in outcomes:
        entered = outcome.entered_calls if outcome.uses_nccl else []
        last = entered[-1].name if entered else "a collective"
        key = outcome.find_blocking_call() or last, outcome.describe_location()
        groups.setdefault(key, []).append(outcome)
    return [(name, group) for (name, _), group in groups.items()]


def _format_frame(frame: Frame | None) -> str:
    if frame is None:
        return "an unknown place"
    file, line, function = frame
    where = "" if function in ("<module>", "<cell line: 1>") else f", in {function}"
    return f"{shorten_path(file)}, line {line}{where}"


def shorten_path(file: str) -> str:
    """Return a file's name as users know it, the same in every run."""
    if "ipykernel_" in file or file.startswith(("<ipython-input", "<cell")):
        return "this notebook's cell"
    path = Path(file)
    return "/".join(path.parts[-2:]) if path.is_absolute() else file


def format_ranks(ranks: list[int]) -> str:
    """Format rank numbers: rank 1, or ranks 0, 1 and 3."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
