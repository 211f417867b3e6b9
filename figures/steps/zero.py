"""Draw ZeRO's stage 3 in steps (python figures/steps/zero.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

from sheet import Place, draw_cells, save_step

from shardlab.common.show.drawing import Cell, draw_rank_names, draw_text, draw_title, make_canvas

RANKS, BLOCKS = 4, (1, 2, 3)
ALL = tuple(range(RANKS))
WIDE, HIGH, GAP, BETWEEN = 0.19, 0.2, 0.07, 0.15
LEFT, WEIGHTS, GRADIENTS = 0.68, 0.86, 2.6  # left of the boards, tops of both boards


@dataclass
class Moment:
    """State of every rank at the end of a phase of the step, and the events in the phase."""

    head: str
    alt: str
    gathered: tuple[int, ...] = ()  # blocks whose weights are gathered on every rank
    own: tuple[int, ...] = ()  # blocks for which a rank has the gradients of its own batch
    averaged: tuple[int, ...] = ()  # blocks for which a rank has its shard of the average
    does: dict[int, str] = field(default_factory=dict)  # block -> text above its weights
    gradients: dict[int, str] = field(default_factory=dict)  # block -> text above its gradients
    came: tuple[int, ...] = ()  # blocks whose weights arrived


MOMENTS = (
    Moment(
        "before the step",
        "Before the step. Two tables, weights above and gradients below, with a row for each of "
        "four ranks and three blocks side by side, each divided into four shards. Of each "
        "block's weights rank r holds only shard r. There are no gradients.",
    ),
    Moment(
        "forward begins",
        "Block 1 is gathered: each rank sends its shard, and every rank now has all four shards "
        "of block 1. Of blocks 2 and 3 each rank still has only its own shard.",
        gathered=(1,),
        does={1: "gather"},
        came=(1,),
    ),
    Moment(
        "forward of block 1",
        "Every rank computes the forward of block 1 while block 2 is gathered: blocks 1 and 2 are "
        "full on every rank, block 3 is sharded.",
        gathered=(1, 2),
        does={1: "forward", 2: "gather"},
        came=(2,),
    ),
    Moment(
        "forward of block 2",
        "Block 1 is freed, except each rank's own shard. Every rank computes the forward of "
        "block 2 while block 3 is gathered: blocks 2 and 3 are full.",
        gathered=(2, 3),
        does={1: "freed", 2: "forward", 3: "gather"},
        came=(3,),
    ),
    Moment(
        "forward of block 3",
        "Block 2 is freed. Every rank computes the forward of block 3, the only full block.",
        gathered=(3,),
        does={2: "freed", 3: "forward"},
    ),
    Moment(
        "loss",
        "Block 3 was freed after its forward like the others. While every rank computes its loss, "
        "block 3 is gathered again, for backward.",
        gathered=(3,),
        does={3: "gather"},
        came=(3,),
    ),
    Moment(
        "backward of block 3",
        "Every rank computes the backward of block 3 while block 2 is gathered: blocks 2 and 3 are "
        "full. In the lower table every rank has all four shards of block 3's gradients, of its "
        "own batch.",
        gathered=(2, 3),
        own=(3,),
        does={2: "gather", 3: "backward"},
        gradients={3: "own batch"},
        came=(2,),
    ),
    Moment(
        "backward of block 2",
        "Block 3's weights are freed and its gradients reduce-scattered: rank r keeps shard r, "
        "the average over all four ranks. Every rank computes the backward of block 2, whose "
        "gradients it now has of its own batch, while block 1 is gathered: blocks 1 and 2 are "
        "full.",
        gathered=(1, 2),
        own=(2,),
        averaged=(3,),
        does={1: "gather", 2: "backward", 3: "freed"},
        gradients={2: "own batch", 3: "averaged"},
        came=(1,),
    ),
    Moment(
        "backward of block 1",
        "Block 2's weights are freed and its gradients reduce-scattered. Every rank computes the "
        "backward of block 1, the only full block, and has its gradients of its own batch.",
        gathered=(1,),
        own=(1,),
        averaged=(2, 3),
        does={1: "backward", 2: "freed"},
        gradients={1: "own batch", 2: "averaged"},
    ),
    Moment(
        "after backward",
        "Block 1's weights are freed and its gradients reduce-scattered. Of the weights and of the "
        "averaged gradients of all three blocks rank r now holds only shard r.",
        averaged=(1, 2, 3),
        does={1: "freed"},
        gradients={1: "averaged"},
    ),
)


def get_place(top: float, block: int, rank: int, piece: int) -> Place:
    x = LEFT + (block - 1) * (RANKS * WIDE + BETWEEN) + piece * WIDE
    return x, top + rank * (HIGH + GAP), WIDE, HIGH


def get_weight_owner(moment: Moment, block: int, rank: int, piece: int) -> Cell:
    """Return the rank that a shard of the weights belongs to, () if the shard is absent."""
    return (piece,) if block in moment.gathered or piece == rank else ()


def list_gradient_holders(moment: Moment, block: int, rank: int, piece: int) -> Cell:
    """Return the ranks whose batches are in a shard of a gradient."""
    if block in moment.own:
        return (rank,)
    return ALL if block in moment.averaged and piece == rank else ()


def draw(number: int, moment: Moment) -> None:
    figure, axes = make_canvas(3.42, 3.7)
    pieces = [(b, r, p) for b in BLOCKS for r in ALL for p in ALL]
    draw_title(axes, 1.71, 0.16, f"{number}. {moment.head}")
    for top, what, holds, said in (
        (WEIGHTS, "weights", get_weight_owner, moment.does),
        (GRADIENTS, "gradients", list_gradient_holders, moment.gradients),
    ):
        draw_text(axes, 0.05, top - 0.34, what, ha="left", weight="bold")
        draw_rank_names(axes, LEFT - 0.08, top, HIGH, GAP)
        for block in BLOCKS:
            x, _, _, _ = get_place(top, block, 0, 0)
            middle = x + RANKS * WIDE / 2
            does = said.get(block, "")
            weight = "bold" if does in ("forward", "backward") else "normal"
            y = top - (0.34 if top == WEIGHTS else 0.14)
            draw_text(axes, middle, y, does, weight=weight)
            if top == WEIGHTS:
                draw_text(axes, middle, top - 0.14, f"block {block}")
        held = [(get_place(top, *at), holds(moment, *at)) for at in pieces]
        # Newly arrived: other ranks' shards, or the one shard that is now an average.
        new = [
            get_place(top, b, r, p)
            for b, r, p in pieces
            if (b in moment.came and r != p and top == WEIGHTS)
            or (said.get(b) == "averaged" and r == p)
        ]
        draw_cells(axes, held, new)
    save_step(figure, "zero", number, moment.alt)


def main() -> None:
    for number, moment in enumerate(MOMENTS, 1):
        draw(number, moment)


if __name__ == "__main__":
    main()
