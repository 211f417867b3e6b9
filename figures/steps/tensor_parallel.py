"""Draw a feed-forward network on two ranks in steps (python figures/steps/tensor_parallel.py)."""

from __future__ import annotations

from dataclasses import dataclass

from sheet import Place, draw_cells, save_step

from shardlab.common.show.drawing import Cell, draw_text, draw_title, make_canvas

RANKS = (0, 1)
# Tensors from left to right: width, and sharded by columns ("|"), by rows ("-") or not at all ("").
TENSORS = {"X": (0.42, ""), "W₁": (0.58, "|"), "A": (0.58, "|"), "W₂": (0.46, "-"), "Y": (0.42, "")}
LEFT, HIGH, GAP, BETWEEN = 0.62, 0.42, 0.1, 0.08
TOPS = (0.82, 2.3)  # of the values, and of their gradients
WEIGHTS = {"W₁", "W₂"}


@dataclass
class Moment:
    """State of both ranks at the end of a phase, and the events in the phase."""

    head: str
    alt: str
    values: str = ""  # of X, A and Y; the weights are always there
    gradients: str = ""
    new: str = ""  # tensors that this phase has computed
    partial: str = ""  # tensors of which each rank has only a partial sum


TABLES = "Two tables, values above and gradients below, with a row for each of two ranks"
MOMENTS = (
    Moment(
        "before",
        f"{TABLES}, and the tensors X, W₁, A, W₂ and Y side by side. Both ranks have all of X. "
        "Rank 0 has the left half of W₁'s columns and the upper half of W₂'s rows, rank 1 the "
        "other halves. All else is empty.",
        values="X",
    ),
    Moment(
        "X times W₁, and GELU",
        "Each rank multiplies X by its columns of W₁ and applies GELU: rank 0 has the left half "
        "of A's columns, rank 1 the right half. Nothing is sent.",
        values="XA",
        new="A",
    ),
    Moment(
        "A times W₂",
        "Each rank multiplies its columns of A by its rows of W₂: it has a partial sum of Y, as "
        "large as all of Y. Nothing is sent.",
        values="XAY",
        new="Y",
        partial="Y",
    ),
    Moment(
        "all-reduce of Y",
        "An all-reduce adds the two partial sums: both ranks have all of Y.",
        values="XAY",
        new="Y",
    ),
    Moment(
        "backward begins",
        "In the lower table both ranks have the gradient of Y. Nothing is sent.",
        values="XAY",
        gradients="Y",
        new="Y",
    ),
    Moment(
        "gradients of W₂ and A",
        "Each rank computes the gradients of its rows of W₂ and of its columns of A. Nothing is "
        "sent.",
        values="XAY",
        gradients="Y2A",
        new="2A",
    ),
    Moment(
        "gradients of W₁ and X",
        "Each rank computes the gradient of its columns of W₁, and a partial sum of the gradient "
        "of X, as large as all of it. Nothing is sent.",
        values="XAY",
        gradients="Y2A1X",
        new="1X",
        partial="X",
    ),
    Moment(
        "all-reduce of X's gradient",
        "An all-reduce adds the two partial sums: both ranks have all of the gradient of X. Of the "
        "weights' gradients each rank has those of its own halves.",
        values="XAY",
        gradients="Y2A1X",
        new="X",
    ),
)


def list_places(top: float, rank: int) -> dict[str, list[Place]]:
    """Return the pieces of each tensor in a rank's row."""
    x, y, found = LEFT, top + rank * (HIGH + GAP), {}
    for name, (wide, by) in TENSORS.items():
        if by == "|":
            pieces = [(x + i * wide / 2, y, wide / 2, HIGH) for i in RANKS]
        elif by == "-":
            pieces = [(x, y + i * HIGH / 2, wide, HIGH / 2) for i in RANKS]
        else:
            pieces = [(x, y, wide, HIGH)]
        found[name], x = pieces, x + wide + BETWEEN
    return found


def list_holders(name: str, there: bool, partial: bool, rank: int, piece: int) -> Cell:
    """Return the ranks in a piece: for a full tensor, both ranks unless it is a partial sum."""
    if not there:
        return ()
    if TENSORS[name][1]:
        return (rank,) if piece == rank else ()
    return (rank,) if partial else RANKS


def draw(number: int, moment: Moment) -> None:
    figure, axes = make_canvas(3.46, 3.42)
    draw_title(axes, 1.73, 0.16, f"{number}. {moment.head}")
    held, new = [], []
    for top, what, here in zip(
        TOPS, ("values", "gradients"), (moment.values + "12", moment.gradients), strict=True
    ):
        lower = what == "gradients"
        draw_text(axes, 0.05, top - 0.38, what, ha="left", weight="bold", fontsize=9)
        for rank in RANKS:
            middle = top + rank * (HIGH + GAP) + HIGH / 2
            draw_text(axes, LEFT - 0.08, middle, f"rank {rank}", ha="right", fontsize=9)
            for name, pieces in list_places(top, rank).items():
                short = name[-1].translate({0x2081: "1", 0x2082: "2"})
                current = short in moment.new and lower == bool(moment.gradients)
                for piece, at in enumerate(pieces):
                    partial = short in moment.partial and current
                    cell = list_holders(name, short in here, partial, rank, piece)
                    held.append((at, cell))
                    if current and cell:
                        new.append(at)
                if not rank:
                    x, _, wide, _ = pieces[0]
                    middle = x + wide * len(pieces) / 2 if TENSORS[name][1] == "|" else x + wide / 2
                    draw_text(axes, middle, top - 0.14, f"d{name}" if lower else name)
    draw_cells(axes, held, new)
    save_step(figure, "tensor_parallel", number, moment.alt)


def main() -> None:
    for number, moment in enumerate(MOMENTS, 1):
        draw(number, moment)


if __name__ == "__main__":
    main()
