"""The schedules, from the naive one to zero bubble: each says in which order a stage works.

All but the last are one pattern. In every step a stage may do one pass of each kind; the kinds
begin at different steps, and each then takes micro-batch after micro-batch. How many steps the
backward begins after the forward is all that tells them apart:

    naive       0             the next micro-batch begins when the last has come back
    gpipe       m             all forwards, then all backwards
    1f1b        p-1-s         one forward, one backward, as soon as the first has come back
    zb-h1       p-1-s         and the weights' part of the backward from step p-1 on
    zb-h2       2(p-1-s)      twice as many forwards first; the weights' part from step 2(p-1) on
    interleaved 2(p-1-s) + (v-1) · group, with chunks in turn

for stage s of p stages, m micro-batches, v chunks. The standard library alone.
"""

from __future__ import annotations

from collections.abc import Callable

from .actions import Action, Schedule, loop, vee

NAMES = ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v")


def schedule(name: str, stages: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """The schedule called `name` for p `stages` and m `microbatches`.

    `chunks` is v, how many parts of the model each stage holds: any number above 0 for interleaved
    (2 unless given), 2 for zb-v, 1 for all others.

    Raises ValueError for an unknown name, for numbers below 1, for chunks that a schedule cannot
    have.
    """
    if name not in NAMES:
        raise ValueError(f"schedule={name!r}: allowed are {', '.join(NAMES)}")
    _whole(stages=stages, microbatches=microbatches)
    if name == "interleaved":
        return interleaved(stages, microbatches, 2 if chunks is None else chunks)
    fixed = 2 if name == "zb-v" else 1
    if chunks is not None and chunks != fixed:
        raise ValueError(f"chunks={chunks!r}: allowed for {name} is {fixed}")
    make = {
        "naive": naive,
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "zb-h1": zb_h1,
        "zb-h2": zb_h2,
        "zb-v": zb_v,
    }
    return make[name](stages, microbatches)


def naive(stages: int, microbatches: int) -> Schedule:
    """Each micro-batch passes all stages forward and backward before the next one begins.

    One stage works at a time: the bubble is (p-1)/p, whatever m is.
    """
    return _built("naive", stages, microbatches, lambda stage: {"F": 0, "B": 0})


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards, first micro-batch first.

    Huang et al. 2019 (arXiv 1811.06965). The bubble is (p-1)/(m+p-1); every stage keeps the
    activations of all m micro-batches. Backwards run in the order of the micro-batches, so that
    gradients add up in the order in which one process would add them.
    """
    return _built("gpipe", stages, microbatches, lambda stage: {"F": 0, "B": microbatches})


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """One forward, one backward, once the first micro-batch has come back.

    Narayanan et al. 2019 and 2021 (PipeDream-Flush; arXiv 2104.04473, section 2.2). Stage s runs
    p-1-s forwards before. The bubble is that of `gpipe`, but a stage keeps the activations of at
    most p-s micro-batches.
    """
    return _built("1f1b", stages, microbatches, lambda stage: {"F": 0, "B": stages - 1 - stage})


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """1F1B with its backward split: I at once, because a neighbour waits for it; W later.

    Qi et al. 2023 (arXiv 2401.10241), section 2.1: the bubble takes (p-1)(F+I-W), at 1F1B's p
    micro-batches of activations. W lags s micro-batches behind I on stage s: on all stages it
    begins at step p-1.
    """
    return _built(
        "zb-h1",
        stages,
        microbatches,
        lambda stage: {"F": 0, "I": stages - 1 - stage, "W": stages - 1},
    )


def zb_h2(stages: int, microbatches: int) -> Schedule:
    """Twice the forwards before the first backward; W waits until nothing else can be done.

    Qi et al. 2023 (arXiv 2401.10241), section 2.2: the bubble takes (p-1)(F+I-2W), none for equal
    times, with the activations of up to 2p-1 micro-batches.
    """
    return _built(
        "zb-h2",
        stages,
        microbatches,
        lambda stage: {"F": 0, "I": 2 * (stages - 1 - stage), "W": 2 * (stages - 1)},
    )


def interleaved(stages: int, microbatches: int, chunks: int) -> Schedule:
    """1F1B over v chunks a stage: a shorter way to the last stage, and v times the messages.

    Narayanan et al. 2021 (arXiv 2104.04473), section 2.2. Micro-batches go in groups; a group
    passes a stage's chunks in turn, forward from the first, backward from the last. For m a
    multiple of p the bubble is (p-1)/(vm+p-1). Other m are allowed: groups are then as equal as
    they can be, none smaller than p (or one, of all, if m < 2p), and the bubble is the same for any
    m from p on. Where torch's ScheduleInterleaved1F1B takes m, this is its order. With one chunk it
    fills the pipeline further than `one_f_one_b`, for nothing.
    """
    _whole(stages=stages, microbatches=microbatches, chunks=chunks)
    rounds = max(1, microbatches // stages)
    size, larger = divmod(microbatches, rounds)
    forwards, first = [], 0
    for group in range(rounds):
        end = first + size + (group < larger)
        forwards += [(i, chunk) for chunk in range(chunks) for i in range(first, end)]
        first = end
    backwards = [(i, chunks - 1 - chunk) for i, chunk in forwards]
    group = size + (larger > 0)

    def begin(stage: int) -> dict[str, int]:
        return {"F": 0, "B": 2 * (stages - 1 - stage) + (chunks - 1) * group}

    rows = {"F": forwards, "B": backwards}
    return _built("interleaved", stages, microbatches, begin, chunks, rows)


def zb_v(stages: int, microbatches: int) -> Schedule:
    """Two chunks a stage, placed as a V: no bubble for equal times, at 1F1B's memory.

    Qi et al. 2023 (arXiv 2401.10241), section 6. The first stage holds the first part and the
    last: the first backward begins where the first forward began. A row below is a number of
    rounds, and what a round does; each kind takes the micro-batches of its chunk in order. It wants
    2p-1 micro-batches or more; for fewer, those that do not exist are left out. It is the order of
    torch's ScheduleZBVZeroBubble.
    """
    _whole(stages=stages, microbatches=microbatches)
    p, n = stages, max(microbatches, 2 * stages - 1)
    orders = []
    for s in range(stages):
        phases = (
            (2 * (p - s) - 1, "F0"),  # the first part, until the turn of the V has come back
            (s, "F1 F0"),
            (p - s, "F1 I1 W1"),
            (n - 2 * p + s + 1, "F0 I0 W0 F1 I1 W1"),  # steady: nobody waits
            (p - s - 1, "I0 W0 F1 I1 W1"),
            (s, "I0 I1"),  # others wait for these: W can wait
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
    return Schedule("zb-v", stages, microbatches, 2, vee(stages), tuple(orders))


Passes = list[tuple[int, int]]  # (micro-batch, chunk), in the order in which they are taken


def _built(
    name: str,
    stages: int,
    microbatches: int,
    begin: Callable[[int], dict[str, int]],
    chunks: int = 1,
    rows: dict[str, Passes] | None = None,
) -> Schedule:
    """A schedule of steps: `begin` says for a stage at which step each kind of pass begins.

    In `rows` stand the passes of each kind, if there is more to say than one micro-batch after
    another.
    """
    _whole(stages=stages, microbatches=microbatches, chunks=chunks)
    orders = []
    for stage in range(stages):
        starts = begin(stage)
        passes = rows or {kind: [(i, 0) for i in range(microbatches)] for kind in starts}
        order = []
        for step in range(max(starts.values()) + microbatches * chunks):
            for kind, start in starts.items():
                if 0 <= step - start < len(passes[kind]):
                    order.append(Action(kind, *passes[kind][step - start]))
        orders.append(tuple(order))
    return Schedule(name, stages, microbatches, chunks, loop(stages, chunks), tuple(orders))


def _whole(**given: object) -> None:
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: allowed are whole numbers above 0")
