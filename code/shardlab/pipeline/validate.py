"""Whether a schedule can be run, and what is wrong with it if it cannot; schedules from text.

The standard library alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise, product

from .schedules import COMPUTE, MESSAGES, Action, Schedule, loop, needed, other_end, sent

Where = tuple[int, Action]  # a stage, and something that it does


def validate(schedule: Schedule, blocking: bool = False) -> None:
    """Return if every stage can do all that `schedule` says; raise ValueError if not.

    In this order: every micro-batch passes every part once forward and once backward (B, or I and
    then W), backward after forward; every message has both its ends, after the pass that makes it
    and before the pass that needs it; each stage receives from another in the order in which that
    one sends; nobody waits for ever. The error names the stage, the action, and what is wrong.

    `blocking`: judge the messages as if a send returned only when its receive has been posted, and
    a receive only when the message has come, as `dist.send` and `dist.recv` may. The course's own
    pipeline posts them and goes on. (Receives posted early are then waited for early: what a loop
    of blocking calls would do is `with_messages(schedule, early=False)`.)
    """
    finders = _passes, _ends, _pairs, lambda schedule: _Walk(schedule, blocking).problems()
    for problems in finders:
        if (problem := next(problems(schedule), None)) is not None:
            raise ValueError(f"schedule {schedule.name!r}: {problem}")


def live(schedule: Schedule) -> tuple[float, ...]:
    """By stage, the most activations it keeps at once, in micro-batches of a whole stage.

    They live from the forward of a micro-batch through a chunk until its whole backward, or its W:
    as the zero bubble paper counts, though what W does not need could go with I. A chunk's are 1/v
    of the stage's.
    """
    peaks = []
    for order in schedule.orders:
        now = most = 0
        for action in order:
            now += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
            most = max(most, now)
        peaks.append(most / schedule.chunks)
    return tuple(peaks)


def result(action: Action) -> Action:
    """What a pass leaves behind; that of an I is that of a B: the gradient of the input."""
    return Action("B", *action[1:]) if action.kind == "I" else action


def before(schedule: Schedule, stage: int, action: Action) -> list[Where]:
    """Whose results a pass needs: (stage, result), on its own stage or on another."""
    part = schedule.placement[stage][action.chunk]
    if action.kind == "F":
        return [_at(schedule, part - 1, "F", action)] if part else []
    if action.kind == "W":
        return [(stage, Action("B", *action[1:]))]
    own = stage, Action("F", *action[1:])
    last = part == schedule.parts - 1
    return [own] if last else [own, _at(schedule, part + 1, "B", action)]


def _at(schedule: Schedule, part: int, kind: str, action: Action) -> Where:
    stage, chunk = schedule.owner(part)
    return stage, Action(kind, action.microbatch, chunk)


# What is wrong, in sentences; only the first one of them is asked for.


def _passes(schedule: Schedule) -> Iterator[str]:
    """Each micro-batch once through each chunk of a stage, forward and then backward."""
    name, m, v = schedule.name_of, schedule.microbatches, schedule.chunks
    for stage, order in enumerate(schedule.orders):
        place = {action: i for i, action in enumerate(order)}
        for action, count in Counter(order).items():
            inside = action.microbatch in range(m) and action.chunk in range(v)
            if action.kind not in COMPUTE or not inside:
                passes = f"{', '.join(COMPUTE)} of {m} micro-batches and {v} chunks, from 0"
                yield f"stage {stage}: {name(action)} is none of its passes, which are {passes}"
            if count > 1:
                yield f"stage {stage}: {name(action)} stands {count} times"
        for chunk, i in product(range(v), range(m)):
            f, b, x, w = (Action(kind, i, chunk) for kind in COMPUTE)
            if f not in place:
                yield f"stage {stage}: {name(f)} is missing"
            split = [half for half in (x, w) if half in place]
            if b in place and split:
                yield f"stage {stage}: {name(b)} and {name(split[0])}: the backward is done twice"
            if b not in place and len(split) < 2:
                absent = " and ".join(name(half) for half in (x, w) if half not in place)
                absent = absent if split else f"{name(b)} (or {absent})"
                yield f"stage {stage}: {absent} is missing"
            for first, then in pairwise([f, b] if b in place else [f, x, w]):
                if place[then] < place[first]:
                    yield f"stage {stage}: {name(then)} stands before {name(first)}"


def _ends(schedule: Schedule) -> Iterator[str]:
    """Messages of a stage: those that its passes make and need, each once, and in time."""
    name = schedule.name_of
    for stage, (actions, order) in enumerate(zip(schedule.actions, schedule.orders, strict=True)):
        if tuple(action for action in actions if action.kind in COMPUTE) != order:
            yield f"stage {stage}: actions do not hold the passes of its order"
        place, counts = {action: i for i, action in enumerate(actions)}, Counter(actions)
        wanted = set()
        for action in order:
            receive, found = needed(schedule, stage, action), sent(schedule, stage, action)
            for message, role in ((receive, "needs"), (found and found[0], "makes")):
                if message is None:
                    continue
                wanted.add(message)
                if (count := counts[message]) != 1:
                    times = f"stands {count} times" if count else "is missing"
                    by = "needed" if role == "needs" else "made"
                    yield f"stage {stage}: {name(message)}, {by} by {name(action)}, {times}"
                late = place[message] > place[action]
                if late == (role == "needs"):
                    side = f"stands {'after' if late else 'before'} {name(action)}"
                    yield f"stage {stage}: {name(message)} {side}, which {role} it"
        for action in actions:
            if action.kind not in COMPUTE and action not in wanted:
                yield f"stage {stage}: {name(action)} is a message that nobody needs"


def _pairs(schedule: Schedule) -> Iterator[str]:
    """Each stage posts its receives from another in the order in which that one sends."""
    name = schedule.name_of
    sends: dict[tuple[int, int], list[Action]] = {}
    receives: dict[tuple[int, int], list[Action]] = {}
    for stage, actions in enumerate(schedule.actions):
        for action in actions:
            if action.kind in MESSAGES:
                peer, _ = other_end(schedule, stage, action)
                way = (stage, peer) if action.kind[0] == "S" else (peer, stage)
                rows = sends if action.kind[0] == "S" else receives
                rows.setdefault(way, []).append(action)
    for (source, target), row in sends.items():
        for i, (send, receive) in enumerate(zip(row, receives[source, target], strict=True), 1):
            _, meant = other_end(schedule, source, send)
            if meant != receive:
                yield (
                    f"stages {source} and {target} order their messages differently: number {i} "
                    f"that stage {source} sends there is {name(send)}, number {i} that stage "
                    f"{target} receives is {name(receive)}, where {name(meant)} has to stand. On "
                    "the wire only the order says which message is which"
                )


class _Walk:
    """All stages go as far as they can. at: by stage, its next action; done: results that exist."""

    def __init__(self, schedule: Schedule, blocking: bool):
        self.schedule, self.blocking = schedule, blocking
        self.at = [0] * schedule.stages
        self.done: set[Where] = set()

    def problems(self) -> Iterator[str]:
        """A circle of stages that wait for each other, if some do not get to the end."""
        moved, turn = True, list(enumerate(self.schedule.actions))
        while moved:
            moved = False
            for stage, actions in turn:
                while self.at[stage] < len(actions) and not self.waits(stage):
                    self.go(stage, actions[self.at[stage]])
                    moved = True
            turn.reverse()  # and back: a round takes a pass through all stages
        stuck = [stage for stage, actions in turn if self.at[stage] < len(actions)]
        if stuck:
            yield self.circle(min(stuck))

    def go(self, stage: int, action: Action) -> None:
        """One action further."""
        if self.blocking and action.kind in MESSAGES:  # both ends stand at it, and both go on
            peer, theirs = other_end(self.schedule, stage, action)
            self.done.add((peer, theirs))
            self.at[peer] += 1
        self.done.add((stage, result(action)))
        self.at[stage] += 1

    def next(self, stage: int) -> Action | None:
        """Where a stage stands; None at the end."""
        actions = self.schedule.actions[stage]
        return actions[self.at[stage]] if self.at[stage] < len(actions) else None

    def waits(self, stage: int) -> Where | None:
        """What the next action of a stage waits for, and on which stage; None if nothing."""
        action = self.next(stage)
        if action.kind in MESSAGES:
            peer, theirs = other_end(self.schedule, stage, action)
            return (peer, theirs) if self.blocking and self.next(peer) != theirs else None
        for need in before(self.schedule, stage, action):
            message = needed(self.schedule, stage, action) if need[0] != stage else None
            where = other_end(self.schedule, stage, message) if message else need
            if where not in self.done:
                return where
        return None

    def circle(self, stage: int) -> str:
        """Who waits for whom."""
        circle: list[int] = []
        while stage not in circle:
            circle.append(stage)
            stage, _ = self.waits(stage)
        circle = circle[circle.index(stage) :]
        names = ", ".join(map(str, circle[:-1]))
        what = f"stages {names} and {circle[-1]} wait for each other, in a circle"
        what = what if circle[1:] else f"stage {stage} waits for itself"
        return "\n".join([f"deadlock: {what}", *map(self.words, circle)])

    def words(self, stage: int) -> str:
        """What a stage waits for."""
        name = self.schedule.name_of
        peer, what = self.waits(stage)
        later = self.schedule.actions[peer][self.at[peer] :]
        # An I does what is asked for as a B.
        there = name(next(action for action in later if what in (action, result(action))))
        does = {
            "SF": f"stage {peer} to send activations ({there})",
            "SB": f"stage {peer} to send gradients ({there})",
            "RF": f"stage {peer} to receive them ({there})",
            "RB": f"stage {peer} to receive them ({there})",
        }.get(what.kind, f"its own {there}")
        return (
            f"  stage {stage} stands at {name(self.next(stage))} and waits for {does}, "
            f"which it does only after its {name(later[0])}"
        )


def from_text(*rows: str) -> Schedule:
    """A schedule written by hand, a row for each stage: from_text("F0 F1 B0 B1", "F0 B0 F1 B1").

    Written F3.1 for chunk 1 of a stage, placed round and round. Rows may hold messages, too: then
    every message is theirs. Nothing is judged here but the writing: `validate` does that.

    Raises ValueError for a word that is no action.
    """
    stages = [tuple(_parsed(word, row) for word in text.split()) for row, text in enumerate(rows)]
    everything = [action for order in stages for action in order]
    if not everything:
        raise ValueError("rows=(): allowed is a row of actions for each stage, as 'F0 F1 B0 B1'")
    chunks = 1 + max(action.chunk for action in everything)
    messages = any(action.kind in MESSAGES for action in everything)
    return Schedule(
        "yours",
        len(rows),
        1 + max(action.microbatch for action in everything),
        chunks,
        loop(len(rows), chunks),
        tuple(tuple(action for action in order if action.kind in COMPUTE) for order in stages),
        tuple(stages) if messages else None,
    )


def _parsed(word: str, row: int) -> Action:
    found = re.fullmatch(r"(F|B|I|W|RF|SF|RB|SB)(\d+)(?:\.(\d+))?", word)
    if not found:
        kinds = ", ".join(COMPUTE + MESSAGES)
        raise ValueError(
            f"stage {row}, {word!r}: allowed are {kinds} with a micro-batch, and with a chunk "
            "where there are several: F3, F3.1"
        )
    return Action(found[1], int(found[2]), int(found[3] or 0))
