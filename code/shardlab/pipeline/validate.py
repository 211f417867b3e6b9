"""Check that a schedule can run, or say what is wrong with it; parse schedules from text.

The standard library alone.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import product

from .schedules import COMPUTE, MESSAGES, Action, Schedule, loop, needed, other_end, sent

Where = tuple[int, Action]  # a stage, and one of its actions


def validate(schedule: Schedule, blocking: bool = False) -> None:
    """Raise ValueError unless every stage can run all actions of `schedule`.

    Checked in this order: every micro-batch passes every part once forward and once backward (B, or
    I and then W), backward after forward; every message has both its ends, after the pass that
    makes it and before the pass that needs it; each stage receives from another in the order of
    that stage's sends; no stage waits for ever. The error names the stage, the action, and the
    problem.

    blocking: assume that a send returns only once its receive is posted, and a receive only once
    the message has arrived, as `dist.send` and `dist.recv` may. The course's pipeline posts
    messages and goes on. (Early receives then block early: for blocking calls use `early=False` in
    `with_messages`.)
    """
    finders = _passes, _messages, _pairs, lambda schedule: _Walk(schedule, blocking).problems()
    for problems in finders:
        if (problem := next(problems(schedule), None)) is not None:
            raise ValueError(f"schedule {schedule.name!r}: {problem}")


def live(schedule: Schedule) -> tuple[float, ...]:
    """Return each stage's peak of live activations, in micro-batches of a whole stage.

    Activations live from a micro-batch's forward through a chunk to its whole backward, or its W,
    as the zero bubble paper counts (some could be freed after I). A chunk's are 1/v of the stage's.
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
    """Return the action that stands for a pass's result: B for an I, whose result is the same."""
    return Action("B", *action[1:]) if action.kind == "I" else action


def before(schedule: Schedule, stage: int, action: Action) -> list[Where]:
    """Return the (stage, result) pairs that a pass needs, from its own stage or from others."""
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


# Generators of problems, as sentences; only the first problem is used.


def _passes(schedule: Schedule) -> Iterator[str]:
    """Yield errors unless each micro-batch passes each chunk once forward, then once backward."""
    name = schedule.name_of
    for stage, order in enumerate(schedule.orders):
        each = product(range(schedule.microbatches), range(schedule.chunks))
        done: dict[tuple[int, int], list[Action]] = {where: [] for where in each}
        for action in order:
            if action[1:] not in done:
                yield f"stage {stage}: {name(action)} is of no micro-batch and chunk of its"
            else:
                done[action[1:]].append(action)
        for where, passes in done.items():
            allowed = [[Action(kind, *where) for kind in kinds] for kinds in ("FB", "FIW")]
            if passes not in allowed:
                words = [" ".join(map(name, row)) or "nothing" for row in (passes, *allowed)]
                yield "stage {}: it does {}; allowed are {}, or {}".format(stage, *words)


def _messages(schedule: Schedule) -> Iterator[str]:
    """Yield errors unless a stage's passes have all their messages, each once and in time."""
    name = schedule.name_of
    for stage, (actions, order) in enumerate(zip(schedule.actions, schedule.orders, strict=True)):
        if tuple(action for action in actions if action.kind in COMPUTE) != order:
            yield f"stage {stage}: actions do not hold the passes of its order"
        receives = {needed(schedule, stage, action): action for action in order}
        sends = {sent(schedule, stage, action): action for action in order}
        wanted = Counter(message for message in (*receives, *sends) if message)
        counts = Counter(action for action in actions if action.kind in MESSAGES)
        for message in (wanted - counts) + (counts - wanted):
            times = f"{counts[message]} times; allowed is {wanted[message]}"
            yield f"stage {stage}: {name(message)} stands there {times}"
        place = {action: i for i, action in enumerate(actions)}
        for receive, action in receives.items():
            if receive and place[receive] > place[action]:
                yield f"stage {stage}: {name(receive)} stands after {name(action)}, which needs it"
        for send, action in sends.items():
            if send and place[send] < place[action]:
                yield f"stage {stage}: {name(send)} stands before {name(action)}, which makes it"


def _pairs(schedule: Schedule) -> Iterator[str]:
    """Yield errors unless each stage posts receives from another in the order of its sends."""
    name = schedule.name_of
    sends: dict[tuple[int, int], list[Action]] = defaultdict(list)
    receives: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for stage, actions in enumerate(schedule.actions):
        for action in actions:
            if action.kind in ("SF", "SB"):
                sends[stage, other_end(schedule, stage, action)[0]].append(action)
            elif action.kind in ("RF", "RB"):
                receives[other_end(schedule, stage, action)[0], stage].append(action)
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
    """All stages advance as far as they can. at: next action by stage; done: finished results."""

    def __init__(self, schedule: Schedule, blocking: bool):
        self.schedule, self.blocking = schedule, blocking
        self.at = [0] * schedule.stages
        self.done: set[Where] = set()

    def problems(self) -> Iterator[str]:
        """Yield a cycle of stages that wait for each other, if some do not reach the end."""
        moved, turn = True, list(enumerate(self.schedule.actions))
        while moved:
            moved = False
            for stage, actions in turn:
                while self.at[stage] < len(actions) and not self.waits(stage):
                    self.go(stage, actions[self.at[stage]])
                    moved = True
            turn.reverse()  # alternating directions: one round can take a pass through all stages
        stuck = [stage for stage, actions in turn if self.at[stage] < len(actions)]
        if stuck:
            yield self.circle(min(stuck))

    def go(self, stage: int, action: Action) -> None:
        """Run one action of a stage."""
        if self.blocking and action.kind in MESSAGES:  # blocking: both ends of the message advance
            peer, theirs = other_end(self.schedule, stage, action)
            self.done.add((peer, theirs))
            self.at[peer] += 1
        self.done.add((stage, result(action)))
        self.at[stage] += 1

    def next(self, stage: int) -> Action | None:
        """Return the next action of a stage; None at the end."""
        actions = self.schedule.actions[stage]
        return actions[self.at[stage]] if self.at[stage] < len(actions) else None

    def waits(self, stage: int) -> Where | None:
        """Return the (stage, result) that the next action of a stage waits for; None if none."""
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
        """Describe the cycle of waiting stages that is reached from `stage`."""
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
        """Describe the result that a stage waits for."""
        name = self.schedule.name_of
        peer, what = self.waits(stage)
        return (
            f"  stage {stage} stands at {name(self.next(stage))} and waits for {name(what)} of "
            f"stage {peer}, which stands at {name(self.next(peer))}"
        )


def from_text(*rows: str) -> Schedule:
    """Parse a schedule from one row per stage, such as "F0 F1 B0 B1", "F0 B0 F1 B1".

    F3.1 is for chunk 1 of a stage, with parts placed as in `loop`. Rows may contain messages; then
    no messages are added. Only the syntax is checked here; `validate` checks the rest.

    Raises ValueError for a word that is not an action.
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
