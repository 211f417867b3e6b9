"""Whether a schedule can be run, and what is wrong with it if it cannot; schedules from text.

The standard library alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

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
    _shape(schedule)
    for stage, order in enumerate(schedule.orders):
        _passes(schedule, stage, order)
    for stage, actions in enumerate(schedule.actions):
        _ends(schedule, stage, actions)
    _pairs(schedule)
    _walk(schedule, blocking)


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


def _shape(schedule: Schedule) -> None:
    p, v = schedule.stages, schedule.chunks
    parts = [part for row in schedule.placement for part in row]
    if [len(row) for row in schedule.placement] != [v] * p or sorted(parts) != list(range(p * v)):
        raise _wrong(
            schedule,
            f"placement {schedule.placement}: allowed is each of parts 0 to {p * v - 1} once, "
            f"{v} on each of {p} stages",
        )
    for what, rows in (("orders", schedule.orders), ("given", schedule.given)):
        if rows is not None and len(rows) != p:
            raise _wrong(schedule, f"{what} of {len(rows)} stages: allowed is one for each of {p}")


def _passes(schedule: Schedule, stage: int, order: tuple[Action, ...]) -> None:
    """Each micro-batch once through each chunk of the stage, forward and then backward."""
    name = schedule.name_of
    place = {action: i for i, action in enumerate(order)}
    for action, count in Counter(order).items():
        inside = action.microbatch in range(schedule.microbatches)
        if action.kind not in COMPUTE or not inside or action.chunk not in range(schedule.chunks):
            raise _wrong(
                schedule,
                f"stage {stage}: {name(action)} is none of its passes, which are "
                f"{', '.join(COMPUTE)} of micro-batches 0 to {schedule.microbatches - 1}"
                + f" and chunks 0 to {schedule.chunks - 1}"
                * (schedule.chunks > 1),
            )
        if count > 1:
            raise _wrong(schedule, f"stage {stage}: {name(action)} stands {count} times")
    for chunk in range(schedule.chunks):
        for i in range(schedule.microbatches):
            f, b, x, w = (Action(kind, i, chunk) for kind in COMPUTE)
            if f not in place:
                raise _wrong(schedule, f"stage {stage}: {name(f)} is missing")
            if b in place and (x in place or w in place):
                both = name(x if x in place else w)
                raise _wrong(
                    schedule, f"stage {stage}: {name(b)} and {both}: the backward is done twice"
                )
            if b not in place and not (x in place and w in place):
                absent = " and ".join(name(a) for a in (x, w) if a not in place)
                needed = absent if x in place or w in place else f"{name(b)} (or {absent})"
                raise _wrong(schedule, f"stage {stage}: {needed} is missing")
            steps = [f, b] if b in place else [f, x, w]
            for first, then in zip(steps, steps[1:], strict=False):
                if place[then] < place[first]:
                    raise _wrong(
                        schedule, f"stage {stage}: {name(then)} stands before {name(first)}"
                    )


def _ends(schedule: Schedule, stage: int, actions: tuple[Action, ...]) -> None:
    """Messages of a stage: those that its passes make and need, each once, and in time."""
    name = schedule.name_of
    order = schedule.orders[stage]
    if tuple(action for action in actions if action.kind in COMPUTE) != order:
        raise _wrong(schedule, f"stage {stage}: actions do not hold the passes of its order")
    place = {action: i for i, action in enumerate(actions)}
    counts = Counter(actions)
    wanted = set()
    for action in order:
        made = sent(schedule, stage, action)
        for message, late in ((needed(schedule, stage, action), False), (made and made[0], True)):
            if message is None:
                continue
            wanted.add(message)
            what = "made by" if late else "needed by"
            if counts[message] != 1:
                times = f"stands {counts[message]} times" if counts[message] else "is missing"
                raise _wrong(
                    schedule, f"stage {stage}: {name(message)}, {what} {name(action)}, {times}"
                )
            if (place[message] > place[action]) != late:
                side = "before" if late else "after"
                raise _wrong(
                    schedule,
                    f"stage {stage}: {name(message)} stands {side} {name(action)}, "
                    + ("which makes it" if late else "which needs it"),
                )
    for action in actions:
        if action.kind not in COMPUTE and action not in wanted:
            raise _wrong(schedule, f"stage {stage}: {name(action)} is a message that nobody needs")


def _pairs(schedule: Schedule) -> None:
    """Each stage posts its receives from another in the order in which that one sends."""
    name = schedule.name_of
    sends: dict[tuple[int, int], list[Action]] = {}
    receives: dict[tuple[int, int], list[Action]] = {}
    for stage, actions in enumerate(schedule.actions):
        for action in actions:
            if action.kind in ("SF", "SB"):
                peer, _ = other_end(schedule, stage, action)
                sends.setdefault((stage, peer), []).append(action)
            elif action.kind in ("RF", "RB"):
                peer, _ = other_end(schedule, stage, action)
                receives.setdefault((peer, stage), []).append(action)
    for (source, target), row in sends.items():
        for i, (send, receive) in enumerate(zip(row, receives[source, target], strict=True)):
            meant = other_end(schedule, source, send)[1]
            if meant != receive:
                raise _wrong(
                    schedule,
                    f"stages {source} and {target} order their messages differently: number "
                    f"{i + 1} that stage {source} sends there is {name(send)}, number {i + 1} that "
                    f"stage {target} receives is {name(receive)}, where {name(meant)} has to "
                    "stand. On the wire only the order says which message is which",
                )


def _walk(schedule: Schedule, blocking: bool) -> None:
    """Let all stages go as far as they can; raise if they do not get to the end."""
    at = [0] * schedule.stages
    done: set[Where] = set()
    moved, turn = True, list(enumerate(schedule.actions))
    while moved:
        moved = False
        for stage, actions in turn:
            while at[stage] < len(actions) and not _waits(schedule, stage, at, done, blocking):
                action = actions[at[stage]]
                if blocking and action.kind in MESSAGES:
                    # Both ends stand at it, and both go on.
                    peer, _ = other_end(schedule, stage, action)
                    done.add((peer, schedule.actions[peer][at[peer]]))
                    at[peer] += 1
                done.add((stage, result(action)))
                at[stage] += 1
                moved = True
        turn.reverse()  # and back: a round takes a pass through all stages
    stuck = [s for s, actions in enumerate(schedule.actions) if at[s] < len(actions)]
    if stuck:
        raise _wrong(schedule, _deadlock(schedule, stuck[0], at, done, blocking))


def _waits(
    schedule: Schedule, stage: int, at: list[int], done: set[Where], blocking: bool
) -> tuple[int, Action] | None:
    """What the next action of a stage waits for: (stage, action there); None if nothing."""
    action = schedule.actions[stage][at[stage]]
    if action.kind not in COMPUTE:
        peer, theirs = other_end(schedule, stage, action)
        stands = at[peer] < len(schedule.actions[peer]) and schedule.actions[peer][at[peer]]
        return (peer, theirs) if blocking and stands != theirs else None
    for need in before(schedule, stage, action):
        message = needed(schedule, stage, action) if need[0] != stage else None
        where = other_end(schedule, stage, message) if message else need
        if where not in done:
            return where
    return None


def _deadlock(
    schedule: Schedule, stage: int, at: list[int], done: set[Where], blocking: bool
) -> str:
    """Who waits for whom, in a circle."""
    circle: list[int] = []
    while stage not in circle:
        circle.append(stage)
        stage = _waits(schedule, stage, at, done, blocking)[0]
    circle = circle[circle.index(stage) :]
    lines = list(_lines(schedule, circle, at, done, blocking))
    if len(circle) == 1:
        return f"deadlock: stage {stage} waits for itself\n{lines[0]}"
    names = ", ".join(map(str, circle[:-1]))
    return "\n".join(
        [f"deadlock: stages {names} and {circle[-1]} wait for each other, in a circle", *lines]
    )


def _lines(
    schedule: Schedule, circle: list[int], at: list[int], done: set[Where], blocking: bool
) -> Iterator[str]:
    name = schedule.name_of
    for stage in circle:
        stands = schedule.actions[stage][at[stage]]
        peer, what = _waits(schedule, stage, at, done, blocking)
        row = schedule.actions[peer]
        # An I does what is asked for as a B.
        there = next(action for action in row[at[peer] :] if what in (action, result(action)))
        does = {
            "SF": f"stage {peer} to send activations ({name(there)})",
            "SB": f"stage {peer} to send gradients ({name(there)})",
            "RF": f"stage {peer} to receive them ({name(there)})",
            "RB": f"stage {peer} to receive them ({name(there)})",
        }.get(there.kind, f"its own {name(there)}")
        yield (
            f"  stage {stage} stands at {name(stands)} and waits for {does}, "
            f"which it does only after its {name(row[at[peer]])}"
        )


def _wrong(schedule: Schedule, what: str) -> ValueError:
    return ValueError(f"schedule {schedule.name!r}: {what}")


def from_text(
    *rows: str, name: str = "yours", placement: Sequence[Sequence[int]] | None = None
) -> Schedule:
    """A schedule written by hand, a row for each stage: from_text("F0 F1 B0 B1", "F0 B0 F1 B1").

    Written F3.1 for chunk 1 of a stage; `placement` is `loop` unless given. Rows may hold messages,
    too: then every message is theirs. Nothing is judged here but the writing: `validate` does that.

    Raises ValueError for a word that is no action.
    """
    stages = [tuple(_parsed(word, row) for word in text.split()) for row, text in enumerate(rows)]
    everything = [action for order in stages for action in order]
    if not everything:
        raise ValueError("rows=(): allowed is a row of actions for each stage, as 'F0 F1 B0 B1'")
    chunks = 1 + max(action.chunk for action in everything)
    if placement is not None:
        chunks = len(placement[0]) if placement else 0
        if len(placement) != len(rows) or {len(parts) for parts in placement} != {chunks}:
            raise ValueError(f"placement={placement}: allowed is a row of parts for each stage")
    messages = any(action.kind in MESSAGES for action in everything)
    return Schedule(
        name,
        len(rows),
        1 + max(action.microbatch for action in everything),
        chunks,
        loop(len(rows), chunks) if placement is None else tuple(map(tuple, placement)),
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
