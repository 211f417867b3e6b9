"""Check that a schedule can run, and describe the first mistake; parse schedules from text.

The standard library alone.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import chain, product

from .schedules import (
    MESSAGE_KINDS,
    PASS_KINDS,
    Action,
    Schedule,
    find_peer,
    find_receive,
    find_send,
    place_round_robin,
)

StageAction = tuple[int, Action]  # a stage, and one of its actions


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
    `add_messages`.)
    """
    finders = _find_pass_errors, _find_message_errors, _find_order_errors
    errors = chain.from_iterable(find(schedule) for find in finders)
    deadlocks = _Execution(schedule, blocking).find_deadlock()
    if (error := next(chain(errors, deadlocks), None)) is not None:
        raise ValueError(f"schedule {schedule.name!r}: {error}")


def count_peak_activations(schedule: Schedule) -> tuple[float, ...]:
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


def result_key(action: Action) -> Action:
    """Return the action that stands for a pass's result: B for an I, whose result is the same."""
    return Action("B", *action[1:]) if action.kind == "I" else action


def find_inputs(schedule: Schedule, stage: int, action: Action) -> list[StageAction]:
    """Return the (stage, result) pairs that a pass needs, from its own stage or from others."""
    part = schedule.placement[stage][action.chunk]
    if action.kind == "F":
        return [_locate_pass(schedule, part - 1, "F", action)] if part else []
    if action.kind == "W":
        return [(stage, Action("B", *action[1:]))]
    own = stage, Action("F", *action[1:])
    last = part == schedule.parts - 1
    return [own] if last else [own, _locate_pass(schedule, part + 1, "B", action)]


def _locate_pass(schedule: Schedule, part: int, kind: str, action: Action) -> StageAction:
    stage, chunk = schedule.find_owner(part)
    return stage, Action(kind, action.microbatch, chunk)


# Generators of problems, as sentences; only the first problem is used.


def _find_pass_errors(schedule: Schedule) -> Iterator[str]:
    """Yield errors unless each micro-batch passes each chunk once forward, then once backward."""
    name = schedule.format_action
    for stage, order in enumerate(schedule.orders):
        each = product(range(schedule.microbatches), range(schedule.chunks))
        done: dict[tuple[int, int], list[Action]] = {where: [] for where in each}
        for action in order:
            if action[1:] not in done:
                yield f"stage {stage}: {name(action)} names a micro-batch or chunk it does not have"
            else:
                done[action[1:]].append(action)
        for where, passes in done.items():
            allowed = [[Action(kind, *where) for kind in kinds] for kinds in ("FB", "FIW")]
            if passes not in allowed:
                words = [" ".join(map(name, row)) or "nothing" for row in (passes, *allowed)]
                yield "stage {} runs {}: expected {}, or {}".format(stage, *words)


def _find_message_errors(schedule: Schedule) -> Iterator[str]:
    name = schedule.format_action
    for stage, (actions, order) in enumerate(zip(schedule.actions, schedule.orders, strict=True)):
        if tuple(action for action in actions if action.kind in PASS_KINDS) != order:
            yield f"stage {stage}: the passes in explicit_actions differ from those in orders"
        receives = {find_receive(schedule, stage, action): action for action in order}
        sends = {find_send(schedule, stage, action): action for action in order}
        wanted = Counter(message for message in (*receives, *sends) if message)
        counts = Counter(action for action in actions if action.kind in MESSAGE_KINDS)
        for message in (wanted - counts) + (counts - wanted):
            times = f"{counts[message]} times; expected {wanted[message]}"
            yield f"stage {stage}: {name(message)} occurs {times}"
        place = {action: i for i, action in enumerate(actions)}
        for receive, action in receives.items():
            if receive and place[receive] > place[action]:
                yield f"stage {stage}: {name(receive)} comes after {name(action)}, which needs it"
        for send, action in sends.items():
            if send and place[send] < place[action]:
                yield f"stage {stage}: {name(send)} comes before {name(action)}, which produces it"


def _find_order_errors(schedule: Schedule) -> Iterator[str]:
    name = schedule.format_action
    sends: dict[tuple[int, int], list[Action]] = defaultdict(list)
    receives: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for stage, actions in enumerate(schedule.actions):
        for action in actions:
            if action.kind in ("SF", "SB"):
                sends[stage, find_peer(schedule, stage, action)[0]].append(action)
            elif action.kind in ("RF", "RB"):
                receives[find_peer(schedule, stage, action)[0], stage].append(action)
    for (source, target), row in sends.items():
        for i, (send, receive) in enumerate(zip(row, receives[source, target], strict=True), 1):
            _, expected = find_peer(schedule, source, send)
            if expected != receive:
                yield (
                    f"stages {source} and {target} order their messages differently: message {i} "
                    f"from stage {source} to stage {target} is sent by {name(send)} and received "
                    f"by {name(receive)}; expected {name(expected)}. Messages have no tags: only "
                    "their order identifies them"
                )


class _Execution:
    """A symbolic run of a schedule, in which all stages advance as far as they can."""

    def __init__(self, schedule: Schedule, blocking: bool):
        self.schedule, self.blocking = schedule, blocking
        self.positions = [0] * schedule.stages  # index of each stage's next action
        self.done: set[StageAction] = set()  # finished results

    def find_deadlock(self) -> Iterator[str]:
        """Yield the error for a cycle of waiting stages, if some do not reach the end."""
        moved, turn = True, list(enumerate(self.schedule.actions))
        while moved:
            moved = False
            for stage, actions in turn:
                while self.positions[stage] < len(actions) and not self.find_blocker(stage):
                    self.run_action(stage, actions[self.positions[stage]])
                    moved = True
            turn.reverse()  # alternating directions: one round can take a pass through all stages
        stuck = [stage for stage, actions in turn if self.positions[stage] < len(actions)]
        if stuck:
            yield self.describe_cycle(min(stuck))

    def run_action(self, stage: int, action: Action) -> None:
        if self.blocking and action.kind in MESSAGE_KINDS:  # both ends of the message advance
            peer, theirs = find_peer(self.schedule, stage, action)
            self.done.add((peer, theirs))
            self.positions[peer] += 1
        self.done.add((stage, result_key(action)))
        self.positions[stage] += 1

    def next_action(self, stage: int) -> Action | None:
        actions = self.schedule.actions[stage]
        return actions[self.positions[stage]] if self.positions[stage] < len(actions) else None

    def find_blocker(self, stage: int) -> StageAction | None:
        """Return the (stage, result) that the next action of a stage waits for; None if none."""
        action = self.next_action(stage)
        if action.kind in MESSAGE_KINDS:
            peer, theirs = find_peer(self.schedule, stage, action)
            return (peer, theirs) if self.blocking and self.next_action(peer) != theirs else None
        for need in find_inputs(self.schedule, stage, action):
            message = find_receive(self.schedule, stage, action) if need[0] != stage else None
            where = find_peer(self.schedule, stage, message) if message else need
            if where not in self.done:
                return where
        return None

    def describe_cycle(self, stage: int) -> str:
        """Describe the cycle of waiting stages that is reached from `stage`."""
        cycle: list[int] = []
        while stage not in cycle:
            cycle.append(stage)
            stage, _ = self.find_blocker(stage)
        cycle = cycle[cycle.index(stage) :]
        names = ", ".join(map(str, cycle[:-1]))
        what = f"stages {names} and {cycle[-1]} wait for each other"
        what = what if cycle[1:] else f"stage {stage} waits for itself"
        return "\n".join([f"deadlock: {what}", *map(self.describe_wait, cycle)])

    def describe_wait(self, stage: int) -> str:
        name = self.schedule.format_action
        peer, what = self.find_blocker(stage)
        return (
            f"  stage {stage} is blocked at {name(self.next_action(stage))}: it waits for "
            f"{name(what)} of stage {peer}, which is blocked at {name(self.next_action(peer))}"
        )


def parse_schedule(*rows: str) -> Schedule:
    """Parse a schedule from one row per stage, such as "F0 F1 B0 B1", "F0 B0 F1 B1".

    F3.1 is for chunk 1 of a stage; parts are placed round-robin. Rows may contain messages; then
    no messages are added. Only the syntax is checked here; `validate` checks the rest.

    Raises ValueError for a word that is not an action.
    """
    stages = [
        tuple(_parse_action(word, row) for word in text.split()) for row, text in enumerate(rows)
    ]
    everything = [action for order in stages for action in order]
    if not everything:
        raise ValueError("rows=(): expected a row of actions per stage, such as 'F0 F1 B0 B1'")
    chunks = 1 + max(action.chunk for action in everything)
    messages = any(action.kind in MESSAGE_KINDS for action in everything)
    return Schedule(
        "custom",
        len(rows),
        1 + max(action.microbatch for action in everything),
        chunks,
        place_round_robin(len(rows), chunks),
        tuple(tuple(action for action in order if action.kind in PASS_KINDS) for order in stages),
        tuple(stages) if messages else None,
    )


def _parse_action(word: str, row: int) -> Action:
    found = re.fullmatch(r"(F|B|I|W|RF|SF|RB|SB)(\d+)(?:\.(\d+))?", word)
    if not found:
        kinds = ", ".join(PASS_KINDS + MESSAGE_KINDS)
        what = f"must be {kinds} with a micro-batch, and a chunk if there are several: F3, F3.1"
        raise ValueError(f"stage {row}, {word!r}: {what}")
    return Action(found[1], int(found[2]), int(found[3] or 0))
