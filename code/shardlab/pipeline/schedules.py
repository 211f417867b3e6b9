"""Pipeline schedules as data: the list of actions of each stage.

A model is cut into `parts`, in order. Each of p stages (ranks of one pipeline) holds v of them, its
chunks; a batch is cut into m micro-batches, and each of these passes every part forward and
backward.

An action is one such pass, or one message:

    F   forward                               RF  receive the activations that an F needs
    B   backward, whole                       SF  send the activations that an F made
    I   backward, of the input alone          RB  receive the gradient that a B or an I needs
    W   backward, of the weights alone        SB  send the gradient that a B or an I made

The zero bubble paper calls I and W "B" and "W". In order: the schedule; naive, GPipe and 1F1B as
loops; the positions of messages; schedules with several chunks or a split backward. The standard
library alone: programs that only look at schedules do not have to load torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shardlab.common.arguments import MAX_COUNT, check_count, check_integer, shorten_repr

PASS_KINDS = ("F", "B", "I", "W")
MESSAGE_KINDS = ("RF", "SF", "RB", "SB")
SCHEDULE_NAMES = ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v")


class Action(NamedTuple):
    """One pass of a micro-batch through one chunk of a stage, or one message."""

    kind: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


@dataclass(frozen=True)
class Schedule:
    """The list of actions of every stage."""

    name: str
    stages: int  # [p]
    microbatches: int  # [m]
    chunks: int  # [v] per stage
    placement: tuple[tuple[int, ...], ...]  # [stage][chunk] -> part
    orders: tuple[tuple[Action, ...], ...]  # by stage: the passes alone (F B I W)
    # By stage: passes and messages. None: `add_messages` adds the messages, always correctly. A
    # test of wrong messages sets them: dataclasses.replace(schedule, explicit_actions=…).
    explicit_actions: tuple[tuple[Action, ...], ...] | None = None

    @property
    def parts(self) -> int:
        """The number of parts of the model: p · v."""
        return self.stages * self.chunks

    @property
    def has_split_backward(self) -> bool:
        """True if the backward is split into I and W."""
        return any(action.kind == "W" for order in self.orders for action in order)

    @cached_property
    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """The actions that each stage's rank executes: passes and messages."""
        return add_messages(self) if self.explicit_actions is None else self.explicit_actions

    @cached_property
    def _owner_by_part(self) -> dict[int, tuple[int, int]]:
        return {
            part: (stage, chunk)
            for stage, parts in enumerate(self.placement)
            for chunk, part in enumerate(parts)
        }

    def find_owner(self, part: int) -> tuple[int, int]:
        """Return (stage, chunk) of a part."""
        return self._owner_by_part[part]

    def format_action(self, action: Action) -> str:
        """Return the name of an action: `F3`, or `F3.1` if stages have several chunks."""
        return f"{action.kind}{action.microbatch}" + (f".{action.chunk}" if self.chunks > 1 else "")

    def __str__(self) -> str:
        """Return one line per stage, which `parse_schedule` can parse."""
        return "\n".join(" ".join(map(self.format_action, order)) for order in self.orders)


def place_round_robin(stages: int, chunks: int = 1) -> tuple[tuple[int, ...], ...]:
    """Return the round-robin placement: chunk c of stage s is part c · p + s."""
    return tuple(tuple(c * stages + s for c in range(chunks)) for s in range(stages))


def place_v_shaped(stages: int) -> tuple[tuple[int, ...], ...]:
    """Return the placement in which stage s holds parts s and 2p - 1 - s."""
    return tuple((s, 2 * stages - 1 - s) for s in range(stages))


def check_size(stages: int, microbatches: int, chunks: int = 1) -> None:
    """Raise ValueError for numbers below 1, and for more passes than the course allows."""
    check_count(stages=stages, microbatches=microbatches, chunks=chunks)
    check_integer(1, MAX_COUNT // (stages * chunks), microbatches=microbatches)


def make_schedule(name: str, stages: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """Return the schedule called `name` for p `stages` and m `microbatches`.

    `chunks` is v, the number of model parts per stage: any number above 0 for interleaved (by
    default 2), 2 for zb-v, 1 for all others.

    Raises ValueError for an unknown name, numbers below 1, and chunks that a schedule cannot have.
    """
    if name not in SCHEDULE_NAMES:
        raise ValueError(
            f"schedule={shorten_repr(name)}: must be one of {', '.join(SCHEDULE_NAMES)}"
        )
    if name == "interleaved":
        return schedule_interleaved(stages, microbatches, 2 if chunks is None else chunks)
    fixed = 2 if name == "zb-v" else 1
    if chunks is not None and chunks != fixed:
        raise ValueError(f"chunks={shorten_repr(chunks)}: must be {fixed} for {name}")
    makers = {"naive": schedule_naive, "gpipe": schedule_gpipe, "1f1b": schedule_1f1b}
    makers |= {"zb-h1": schedule_zb_h1, "zb-h2": schedule_zb_h2, "zb-v": schedule_zb_v}
    return makers[name](stages, microbatches)


# One chunk, whole backwards: each order is a loop or two.


def schedule_naive(stages: int, microbatches: int) -> Schedule:
    """Make a schedule in which each micro-batch passes all stages before the next begins.

    One stage works at a time: the bubble is (p-1)/p for every m.
    """

    def make_order(stage: int) -> list[Action]:
        passes = []
        for i in range(microbatches):
            passes += [Action("F", i), Action("B", i)]
        return passes

    return _order_each_stage("naive", stages, microbatches, make_order)


def schedule_gpipe(stages: int, microbatches: int) -> Schedule:
    """Make a schedule of all forwards, then all backwards, first micro-batch first.

    Huang et al. 2019 (arXiv 1811.06965). The bubble is (p-1)/(m+p-1); every stage keeps the
    activations of all m micro-batches. Backwards run in micro-batch order, so that gradients add up
    in the order of one process.
    """

    def make_order(stage: int) -> list[Action]:
        passes = [Action("F", i) for i in range(microbatches)]
        passes += [Action("B", i) for i in range(microbatches)]
        return passes

    return _order_each_stage("gpipe", stages, microbatches, make_order)


def schedule_1f1b(stages: int, microbatches: int) -> Schedule:
    """Make a schedule that alternates forward and backward after a warm-up.

    Narayanan et al. 2019 and 2021 (PipeDream-Flush; arXiv 2104.04473, section 2.2). Stage s warms
    up with p-1-s forwards. The bubble is GPipe's, but a stage keeps the activations of at most p-s
    micro-batches.
    """

    def make_order(stage: int) -> list[Action]:
        ahead = min(stages - 1 - stage, microbatches)
        passes = [Action("F", i) for i in range(ahead)]  # warm-up
        for i in range(microbatches - ahead):  # steady
            passes += [Action("F", ahead + i), Action("B", i)]
        passes += [Action("B", i) for i in range(microbatches - ahead, microbatches)]  # cool-down
        return passes

    return _order_each_stage("1f1b", stages, microbatches, make_order)


def _order_each_stage(
    name: str,
    stages: int,
    microbatches: int,
    make_order: Callable[[int], list[Action]],
    chunks: int = 1,
) -> Schedule:
    check_size(stages, microbatches)
    orders = tuple(tuple(make_order(stage)) for stage in range(stages))
    return Schedule(name, stages, microbatches, chunks, place_round_robin(stages, chunks), orders)


# Messages. The result of a pass is sent at once, to the stage with the next part (or the part
# before). No message is needed if that part is on the same stage (the turn of the V).


def find_receive(schedule: Schedule, stage: int, action: Action) -> Action | None:
    """Return the receive that `action` waits for; None if its input is made on its own stage."""
    return _find_message("R", schedule, stage, action)


def find_send(schedule: Schedule, stage: int, action: Action) -> Action | None:
    """Return the send of the result of `action`; None if no other stage needs it."""
    return _find_message("S", schedule, stage, action)


def _find_message(side: str, schedule: Schedule, stage: int, action: Action) -> Action | None:
    if action.kind not in ("F", "B", "I"):
        return None
    what = "F" if action.kind == "F" else "B"
    ahead = (side == "S") == (what == "F")  # the other end holds the part after this one
    part = schedule.placement[stage][action.chunk] + (1 if ahead else -1)
    if not 0 <= part < schedule.parts or schedule.find_owner(part)[0] == stage:
        return None
    return Action(side + what, action.microbatch, action.chunk)


def find_peer(schedule: Schedule, stage: int, message: Action) -> tuple[int, Action]:
    """Return the other end of a message: its stage, and that stage's action.

    SF3 of stage 0 is RF3 on stage 1.
    """
    forward = message.kind in ("SF", "RB")  # the other end holds the part after this one
    part = schedule.placement[stage][message.chunk] + (1 if forward else -1)
    peer, chunk = schedule.find_owner(part)
    side = "R" if message.kind[0] == "S" else "S"
    return peer, Action(side + message.kind[1], message.microbatch, chunk)


def add_messages(schedule: Schedule, early: bool = True) -> tuple[tuple[Action, ...], ...]:
    """Return each stage's passes and messages, without deadlock if the passes have none.

    1. A send follows immediately after the pass whose result it sends.
    2. Receives from a stage are in the order of that stage's sends. Messages have no names on the
       wire: tags exist, but nccl ignores them, so only the order identifies a message.
    3. A receive is one pass before the pass that needs it, so that the message travels while the
       stage computes; earlier if rule 2 requires it. Without `early`, right before that pass.
    """
    # Each stage's receives from each other stage, in the order of the sends (rule 2).
    incoming: list[dict[int, list[Action]]] = [defaultdict(list) for _ in schedule.orders]
    for stage, order in enumerate(schedule.orders):
        for action in order:
            if send := find_send(schedule, stage, action):
                peer, receive = find_peer(schedule, stage, send)
                incoming[peer][stage].append(receive)
    made = []
    for stage, order in enumerate(schedule.orders):
        posted = _place_receives(schedule, stage, incoming[stage], early)
        actions: list[Action] = []
        for receives, action in zip(posted, order, strict=False):
            actions += [*receives, action]
            if send := find_send(schedule, stage, action):
                actions.append(send)
        made.append(tuple(actions + posted[-1]))
    return tuple(made)


def _place_receives(
    schedule: Schedule, stage: int, incoming: dict[int, list[Action]], early: bool
) -> list[list[Action]]:
    """Return the receives to post before each pass of a stage, and at its end (rule 3)."""
    order = schedule.orders[stage]
    wanted = {find_receive(schedule, stage, a): max(0, i - early) for i, a in enumerate(order)}
    posted: list[list[Action]] = [[] for _ in range(len(order) + 1)]
    for peer in sorted(incoming):
        # From the last one back: no receive may be posted after its successor.
        place, places = len(order), []
        for receive in reversed(incoming[peer]):
            place = min(place, wanted.get(receive, len(order)))
            places.append((place, receive))
        for place, receive in reversed(places):
            posted[place].append(receive)
    return posted


# Several chunks, or a split backward. In every step a stage may do one pass of each kind. The kinds
# begin at different steps, and each then takes one micro-batch after the other.


def order_in_steps(
    starts: dict[str, int], passes: dict[str, list[tuple[int, int]]]
) -> list[Action]:
    """Return an order in steps; `starts` is the step at which each kind starts its `passes`.

    passes: for each kind, (micro-batch, chunk) in the order in which they run. 1F1B is
    order_in_steps({"F": 0, "B": p - 1 - stage}, …).
    """
    order = []
    for step in range(max(starts.values()) + len(passes["F"])):
        for kind, begin in starts.items():
            if 0 <= step - begin < len(passes[kind]):
                order.append(Action(kind, *passes[kind][step - begin]))
    return order


def schedule_interleaved(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Make 1F1B with v chunks per stage: a smaller bubble, but v times the messages.

    Narayanan et al. 2021 (arXiv 2104.04473), section 2.2. Micro-batches form groups; a group passes
    a stage's chunks in turn, forward from the first, backward from the last. For m a multiple of p
    the bubble is (p-1)/(vm+p-1). Other m are allowed: groups are then as equal as possible, none
    smaller than p (or a single one, if m < 2p), and the bubble is the same for any m from p on.
    Where torch's ScheduleInterleaved1F1B accepts m, this is its order. With one chunk it warms up
    with more forwards than `schedule_1f1b`, without a benefit.
    """
    check_size(stages, microbatches, chunks)
    rounds = max(1, microbatches // stages)
    size, larger = divmod(microbatches, rounds)
    forwards, first = [], 0
    for group in range(rounds):
        end = first + size + (group < larger)
        forwards += [(i, chunk) for chunk in range(chunks) for i in range(first, end)]
        first = end
    backwards = [(i, chunks - 1 - chunk) for i, chunk in forwards]
    group = size + (larger > 0)

    def make_order(stage: int) -> list[Action]:
        ahead = 2 * (stages - 1 - stage) + (chunks - 1) * group
        return order_in_steps({"F": 0, "B": ahead}, {"F": forwards, "B": backwards})

    return _order_each_stage("interleaved", stages, microbatches, make_order, chunks)


def schedule_zb_h1(stages: int, microbatches: int) -> Schedule:
    """Make 1F1B with a split backward: I at once, because a neighbour waits for it; W later.

    Qi et al. 2023 (arXiv 2401.10241), section 2.1: the bubble is (p-1)(F+I-W), with 1F1B's p
    micro-batches of activations. On stage s, W lags s micro-batches behind I, so it begins at step
    p-1 on all stages.
    """

    def make_order(stage: int) -> list[Action]:
        starts = {"F": 0, "I": stages - 1 - stage, "W": stages - 1}
        return order_in_steps(starts, dict.fromkeys(starts, [(i, 0) for i in range(microbatches)]))

    return _order_each_stage("zb-h1", stages, microbatches, make_order)


def schedule_zb_h2(stages: int, microbatches: int) -> Schedule:
    """Make a schedule with twice 1F1B's warm-up forwards, whose W runs only to fill idle time.

    Qi et al. 2023 (arXiv 2401.10241), section 2.2: the bubble is (p-1)(F+I-2W), zero for equal
    times, with the activations of up to 2p-1 micro-batches.
    """

    def make_order(stage: int) -> list[Action]:
        starts = {"F": 0, "I": 2 * (stages - 1 - stage), "W": 2 * (stages - 1)}
        return order_in_steps(starts, dict.fromkeys(starts, [(i, 0) for i in range(microbatches)]))

    return _order_each_stage("zb-h2", stages, microbatches, make_order)


def schedule_zb_v(stages: int, microbatches: int) -> Schedule:
    """Make a schedule of two chunks per stage, placed as a V: no bubble at 1F1B's memory.

    Qi et al. 2023 (arXiv 2401.10241), section 6, for equal times of F, I and W. The first stage
    holds the first part and the last, so the first backward begins where the first forward began.
    Each row below is a number of rounds and the passes of a round; each kind takes its chunk's
    micro-batches in order. Needs 2p-1 micro-batches; with fewer, those that do not exist are left
    out. This is the order of torch's ScheduleZBVZeroBubble.
    """
    check_size(stages, microbatches)
    p, n = stages, max(microbatches, 2 * stages - 1)
    orders = []
    for s in range(stages):
        phases = (
            (2 * (p - s) - 1, "F0"),  # the first part, until the turn of the V has come back
            (s, "F1 F0"),
            (p - s, "F1 I1 W1"),
            (n - 2 * p + s + 1, "F0 I0 W0 F1 I1 W1"),  # steady state: no stage waits
            (p - s - 1, "I0 W0 F1 I1 W1"),
            (s, "I0 I1"),  # other stages wait for these, so W is deferred
            (p - s, "I0 W0"),
            (s, "W1"),
            (s, "W0"),
        )
        passed = dict.fromkeys(("F0", "F1", "I0", "I1", "W0", "W1"), 0)
        order = []
        for rounds, pattern in phases:
            for what in pattern.split() * rounds:
                order.append(Action(what[0], passed[what], int(what[1])))
                passed[what] += 1
        orders.append(tuple(action for action in order if action.microbatch < microbatches))
    return Schedule("zb-v", stages, microbatches, 2, place_v_shaped(stages), tuple(orders))
