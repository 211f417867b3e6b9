"""Draw a causal ring in a zig-zag in steps (python figures/steps/context_parallel.py)."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline
from sheet import EMPTY, INK, Place, draw_boxes, save_step

from shardlab import context_parallel as cp
from shardlab.common import show
from shardlab.common.show.drawing import (
    draw_arrow,
    draw_text,
    draw_title,
    make_canvas,
    pick_text_color,
)

RANKS, PIECES = 4, 8
MINE = [cp.token_positions("zigzag", PIECES, RANKS, rank).tolist() for rank in range(RANKS)]
OWNER = {piece: rank for rank, pieces in enumerate(MINE) for piece in pieces}
SIZE, LEFT, TOP, KEYS, ROW = 0.23, 0.5, 0.66, 2.98, 0.48
Square = tuple[int, int]  # index of the queries' piece, index of the keys' piece


def list_squares(rank: int, turn: int) -> list[Square]:
    """Return the squares that a rank computes in a turn, with the keys that it holds then."""
    return [(q, k) for q in MINE[rank] for k in MINE[(rank - turn) % RANKS] if k <= q]


def get_place(square: Square) -> Place:
    query, key = square
    return LEFT + key * SIZE, TOP + query * SIZE, SIZE, SIZE


def describe_turn(turn: int) -> str:
    """Return the alternative text: each rank's keys, and its squares in the turn."""
    if turn < 0:
        shares = "; ".join(f"rank {rank} has {a} and {b}" for rank, (a, b) in enumerate(MINE))
        return (
            "Before the first turn. A square of eight rows, the pieces' queries, and eight "
            "columns, their keys; only squares on and below the diagonal are needed. Pieces: "
            f"{shares}."
        )
    said = []
    for rank in range(RANKS):
        early, late = sorted(MINE[(rank - turn) % RANKS])
        pairs = [f"{q} to {k}" + " (half)" * (q == k) for q, k in list_squares(rank, turn)]
        said.append(f"rank {rank} has keys {early} and {late}: {', '.join(pairs)}")
    return f"Turn {turn}. Queries to keys: {'; '.join(said)}. Two squares of work for each rank."


END = (
    "After four turns. All squares below the diagonal and the halves on it are computed, eight "
    "squares of work by each rank: those in the rows of its two pieces."
)


def draw(number: int) -> None:
    figure, axes = make_canvas(3.8, 2.66)
    turn = number - 2
    now = turn if turn < RANKS else -1
    head = f"turn {now}" if now >= 0 else ("after four turns" if turn > 0 else "before")
    draw_title(axes, LEFT + 4 * SIZE, 0.16, head)
    draw_text(axes, LEFT - 0.36, TOP + 4 * SIZE, "queries", rotation=90, fontsize=9)
    draw_text(axes, LEFT + 4 * SIZE, 0.4, "keys of piece", fontsize=9)
    every = [(q, k) for q in range(PIECES) for k in range(PIECES)]
    draw_boxes(axes, [get_place(square) for square in every], **{**EMPTY, "alpha": 0.3})
    for piece in range(PIECES):
        draw_text(axes, LEFT + (piece + 0.5) * SIZE, TOP - 0.1, str(piece), fontsize=9)
        draw_text(axes, LEFT - 0.12, TOP + (piece + 0.5) * SIZE, str(piece), fontsize=9)
    for rank in range(RANKS):
        done = [s for t in range(min(turn + 1, RANKS)) for s in list_squares(rank, t)]
        color = show.RANK_COLORS[rank]
        draw_boxes(axes, [get_place(s) for s in done if s[0] > s[1]], fc=color, ec=INK, lw=0.8)
        current = list_squares(rank, now) if now >= 0 else []
        for square in [s for s in done if s[0] == s[1]]:
            x, y, _, _ = get_place(square)
            half = Outline([(x, y), (x, y + SIZE), (x + SIZE, y + SIZE), (x, y)], closed=True)
            thick = 2.2 if square in current else 0.8
            axes.add_patch(PathPatch(half, fc=color, ec=INK, lw=thick, clip_on=False))
        draw_boxes(axes, [get_place(s) for s in current if s[0] > s[1]], fc="none", ec=INK, lw=2.2)
    if turn < RANKS:
        draw_keys(axes, max(now, 0))
    alt = END if turn == RANKS else describe_turn(now)
    save_step(figure, "context_parallel", number, alt)


def draw_keys(axes: Axes, turn: int) -> None:
    """Draw the owner of the keys on each rank, and the messages that brought them."""
    draw_text(axes, KEYS + 0.02, 0.4, "has keys", fontsize=9)
    for rank in range(RANKS):
        y = TOP + rank * ROW
        draw_text(axes, KEYS - 0.08, y + SIZE / 2, f"rank {rank}", ha="right")
        source = (rank - turn) % RANKS
        color = show.RANK_COLORS[source]
        places = [(KEYS + i * SIZE, y, SIZE, SIZE) for i in range(2)]
        draw_boxes(axes, places, fc=color, ec=INK, lw=0.8)
        for (x, _, _, _), piece in zip(places, sorted(MINE[source]), strict=True):
            draw_text(
                axes,
                x + SIZE / 2,
                y + SIZE / 2,
                str(piece),
                color=pick_text_color(color),
                fontsize=9,
            )
        middle = KEYS + SIZE
        if turn and rank:
            draw_arrow(axes, (middle, y - ROW + SIZE), (middle, y), clip_on=False, lw=1.2)
        if turn and not rank:
            low, right = y + (RANKS - 1) * ROW + SIZE / 2, KEYS + 2 * SIZE + 0.2
            way = [(KEYS + 2 * SIZE, low), (right, low), (right, y + SIZE / 2)]
            axes.plot(*zip(*way, strict=True), color=INK, lw=1.2, clip_on=False)
            end = (KEYS + 2 * SIZE, y + SIZE / 2)
            draw_arrow(axes, (right, y + SIZE / 2), end, clip_on=False, lw=1.2)


def main() -> None:
    for number in range(1, RANKS + 3):
        draw(number)


if __name__ == "__main__":
    main()
