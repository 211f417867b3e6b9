"""Draw a step of data parallelism in steps (python figures/steps/data_parallel.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

from sheet import INK, Place, draw_boxes, draw_cells, save_step

from shardlab.common.show.drawing import Cell, draw_rank_names, draw_text, draw_title, make_canvas

RANKS = (0, 1, 2, 3)
BUCKETS = ("embedding", "block 1", "block 2", "head")  # in the model's order
WIDE, HIGH, GAP, BETWEEN = 0.62, 0.26, 0.08, 0.05
BATCH, LEFT, TOP = 0.52, 0.9, 1.12  # left of the batches, left and top of the gradients


@dataclass
class Moment:
    """State of every rank at the end of a phase of the step, and the events in the phase."""

    head: str
    alt: str
    own: tuple[int, ...] = ()  # buckets with the gradients of a rank's own batch
    averaged: tuple[int, ...] = ()  # buckets with averaged gradients
    computes: dict[int, str] = field(default_factory=dict)  # bucket -> text
    sent: int | None = None  # the bucket that is being sent
    arrived: tuple[int, ...] = ()
    weights: str = "weights after 0 steps, equal on all ranks"


GRADIENTS = "a table with a row for each of four ranks and a column for each bucket of gradients"
MOMENTS = (
    Moment(
        "before the step",
        f"Before the step: {GRADIENTS}: embedding, block 1, block 2 and head. Each rank has its "
        "own share of the batch, all have the same weights, and there are no gradients.",
    ),
    Moment(
        "forward",
        "Forward: every rank computes all layers on its own share of the batch. Nothing is sent.",
        computes=dict.fromkeys(range(4), "forward"),
    ),
    Moment(
        "backward of the head",
        "Backward of the head: every rank has the head's gradients of its own batch.",
        own=(3,),
        computes={3: "backward"},
    ),
    Moment(
        "backward of block 2",
        "Backward of block 2, while the head's gradients are all-reduced: every rank has the "
        "gradients of block 2 and the head of its own batch.",
        own=(2, 3),
        computes={2: "backward"},
        sent=3,
    ),
    Moment(
        "backward of block 1",
        "Backward of block 1, while the gradients of block 2 are all-reduced. The head's are "
        "now averages over all four ranks.",
        own=(1, 2),
        averaged=(3,),
        computes={1: "backward"},
        sent=2,
        arrived=(3,),
    ),
    Moment(
        "backward of the embedding",
        "Backward of the embedding, while the gradients of block 1 are all-reduced. The "
        "gradients of block 2 and the head are averages.",
        own=(0, 1),
        averaged=(2, 3),
        computes={0: "backward"},
        sent=1,
        arrived=(2,),
    ),
    Moment(
        "the ranks wait",
        "Backward is over, and nothing computes while the embedding's gradients are all-reduced. "
        "All other gradients are averages.",
        own=(0,),
        averaged=(1, 2, 3),
        sent=0,
        arrived=(1,),
    ),
    Moment(
        "the optimizer's step",
        "All gradients are averages, the same on all four ranks. Each rank's optimizer makes the "
        "same step, and the weights are the same again.",
        averaged=(0, 1, 2, 3),
        computes=dict.fromkeys(range(4), "step"),
        arrived=(0,),
        weights="weights after 1 step, equal on all ranks",
    ),
)


def get_place(bucket: int, rank: int) -> Place:
    return LEFT + bucket * (WIDE + BETWEEN), TOP + rank * (HIGH + GAP), WIDE, HIGH


def list_holders(moment: Moment, bucket: int, rank: int) -> Cell:
    """Return the ranks whose batches are in a gradient."""
    if bucket in moment.own:
        return (rank,)
    return RANKS if bucket in moment.averaged else ()


def draw(number: int, moment: Moment) -> None:
    figure, axes = make_canvas(3.58, 2.95)
    draw_title(axes, 1.79, 0.16, f"{number}. {moment.head}")
    draw_rank_names(axes, BATCH - 0.06, TOP, HIGH, GAP)
    draw_text(axes, BATCH + 0.11, TOP - 0.14, "batch", fontsize=9)
    draw_text(axes, LEFT, TOP - 0.36, "gradients of", ha="left", weight="bold", fontsize=9)
    batches = [((BATCH, TOP + r * (HIGH + GAP), 0.22, HIGH), (r,)) for r in RANKS]
    at = [(b, r) for b in range(len(BUCKETS)) for r in RANKS]
    new = [get_place(b, r) for b, r in at if b in moment.arrived]
    draw_cells(axes, batches + [(get_place(b, r), list_holders(moment, b, r)) for b, r in at], new)
    foot = TOP + len(RANKS) * (HIGH + GAP)
    for bucket, name in enumerate(BUCKETS):
        x, _, wide, _ = get_place(bucket, 0)
        draw_text(axes, x + wide / 2, TOP - 0.14, name, fontsize=9)
        does = moment.computes.get(bucket, "")
        draw_text(axes, x + wide / 2, TOP - 0.62, does, weight="bold", fontsize=9)
        if bucket == moment.sent:
            draw_boxes(axes, [(x - 0.05, foot + 0.04, wide + 0.1, 0.24)], fc="none", ec=INK, lw=1.2)
            draw_text(axes, x + wide / 2, foot + 0.16, "all-reduce", fontsize=9)
    for y, said in ((TOP - 0.62, "computes"), (foot + 0.16, "link")):
        draw_text(axes, 0.05, y, said, ha="left", weight="bold", fontsize=9)
    draw_text(axes, 1.79, foot + 0.42, moment.weights, fontsize=9)
    save_step(figure, "data_parallel", number, moment.alt)


def main() -> None:
    for number, moment in enumerate(MOMENTS, 1):
        draw(number, moment)


if __name__ == "__main__":
    main()
