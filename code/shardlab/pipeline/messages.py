"""Messages, put into the order in which a stage computes.

Three rules, and a schedule that cannot deadlock stays one:

1. What a pass made is sent at once, to the stage that holds the next part (or the one before).
2. Whoever receives from a stage posts its receives in the order in which that stage sends. Messages
   have no names on the wire: tags exist, but nccl ignores them, so order is all there is.
3. A receive is posted one pass before the one that needs it, so that the message travels while the
   stage computes; earlier where rule 2 wants it.

A part that follows on the same stage (the turn of the V) needs no message. The standard library
alone.
"""

from __future__ import annotations

from collections import defaultdict

from .actions import Action, Schedule

FORWARD, BACKWARD = ("F",), ("B", "I")


def sent(schedule: Schedule, stage: int, action: Action) -> tuple[Action, int, Action] | None:
    """(send, stage that receives, its receive) of what `action` made; None if nobody waits."""
    if action.kind not in FORWARD + BACKWARD:
        return None
    ahead = action.kind in FORWARD
    part = schedule.placement[stage][action.chunk] + (1 if ahead else -1)
    if not 0 <= part < schedule.parts:
        return None
    peer, chunk = schedule.owner(part)
    if peer == stage:
        return None
    what = "F" if ahead else "B"
    send = Action(f"S{what}", action.microbatch, action.chunk)
    return send, peer, Action(f"R{what}", action.microbatch, chunk)


def other_end(schedule: Schedule, stage: int, message: Action) -> tuple[int, Action]:
    """Where a message of `stage` goes to, or comes from: the stage, and what that stage calls it.

    SF3 of stage 0 is RF3 on stage 1. Raises ValueError for a message that goes nowhere.
    """
    if message.kind not in ("RF", "SF", "RB", "SB"):
        raise ValueError(f"message={message}: allowed are RF, SF, RB and SB")
    forward = message.kind in ("SF", "RB")  # the other end holds the part after this one
    part = schedule.placement[stage][message.chunk] + (1 if forward else -1)
    if not 0 <= part < schedule.parts:
        raise ValueError(f"{message} on stage {stage}: its part has no neighbour there")
    peer, chunk = schedule.owner(part)
    side = "R" if message.kind[0] == "S" else "S"
    return peer, Action(side + message.kind[1], message.microbatch, chunk)


def needed(schedule: Schedule, stage: int, action: Action) -> Action | None:
    """The receive that `action` waits for; None if what it needs was made on its own stage."""
    if action.kind not in FORWARD + BACKWARD:
        return None
    back = action.kind in BACKWARD
    part = schedule.placement[stage][action.chunk] + (1 if back else -1)
    if not 0 <= part < schedule.parts or schedule.owner(part)[0] == stage:
        return None
    return Action("RB" if back else "RF", action.microbatch, action.chunk)


def with_messages(schedule: Schedule, early: bool = True) -> tuple[tuple[Action, ...], ...]:
    """By stage, its passes and its messages, by the three rules above.

    Without `early`, a receive stands right before the pass that needs it: nothing travels while the
    stage computes what comes before, if it is only posted there.
    """
    # What each stage receives from each other, in the order of the sends (rule 2).
    incoming: list[dict[int, list[Action]]] = [defaultdict(list) for _ in schedule.orders]
    for stage, order in enumerate(schedule.orders):
        for action in order:
            if found := sent(schedule, stage, action):
                _, peer, receive = found
                incoming[peer][stage].append(receive)
    return tuple(
        _stage(schedule, stage, order, incoming[stage], early)
        for stage, order in enumerate(schedule.orders)
    )


def _stage(
    schedule: Schedule,
    stage: int,
    order: tuple[Action, ...],
    incoming: dict[int, list[Action]],
    early: bool,
) -> tuple[Action, ...]:
    # Before which pass a receive should stand, for the sake of the one that needs it.
    wanted = {needed(schedule, stage, action): max(0, i - early) for i, action in enumerate(order)}
    posted: list[list[Action]] = [[] for _ in range(len(order) + 1)]  # before which pass
    for peer in sorted(incoming):
        # From the last one back: nothing may be posted after what follows it.
        place, places = len(order), []
        for receive in reversed(incoming[peer]):
            place = min(place, wanted.get(receive, len(order)))
            places.append((place, receive))
        for place, receive in reversed(places):
            posted[place].append(receive)
    actions: list[Action] = []
    for receives, action in zip(posted, order, strict=False):
        actions += [*receives, action]
        if found := sent(schedule, stage, action):
            actions.append(found[0])
    return tuple(actions + posted[-1])
