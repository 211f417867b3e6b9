"""Draw the ring all-reduce in steps (python figures/steps/collectives.py)."""

from __future__ import annotations

from sheet import INK, Place, draw_cells, save_step

from shardlab.common.show.drawing import (
    Cell,
    draw_arrow,
    draw_rank_names,
    draw_text,
    draw_title,
    make_canvas,
)

RANKS = 4
SIZE, GAP = 0.36, 0.3  # of a piece, and between ranks, where messages are drawn
LEFT, TOP = 0.72, 0.68


class Moment:
    """State after a step: each rank's share of each piece, and the step's messages."""

    def __init__(self, rows: list[list[Cell]], sent: dict[int, int], head: str):
        self.rows, self.sent, self.head = [list(row) for row in rows], sent, head


def list_moments() -> list[Moment]:
    """Return the states at the start, after N - 1 steps of reduce-scatter, N - 1 of all-gather."""
    rows: list[list[Cell]] = [[(rank,)] * RANKS for rank in range(RANKS)]
    found = [Moment(rows, {}, "start")]
    for step in range(2 * (RANKS - 1)):
        adds = step < RANKS - 1
        # Each rank first sends the piece of the rank before it; then it passes complete pieces on.
        sent = {rank: (rank - 1 - step) % RANKS for rank in range(RANKS)}
        before = [list(row) for row in rows]
        for rank, piece in sent.items():
            to = (rank + 1) % RANKS
            own = before[to][piece] if adds else ()
            rows[to][piece] = tuple(sorted({*before[rank][piece], *own}))
        phase = "reduce-scatter" if adds else "all-gather"
        found.append(Moment(rows, sent, f"step {step + 1}: {phase}"))
    return found


def get_place(rank: int, piece: int) -> Place:
    return LEFT + piece * SIZE, TOP + rank * (SIZE + GAP), SIZE, SIZE


def describe_moment(number: int, moment: Moment) -> str:
    """Return the alternative text: messages and state of each piece."""
    if not number:
        return (
            "The start. A table: a row for each of four ranks, a column for each of four pieces. "
            "Each rank holds four pieces of its own, in its own colour."
        )
    messages = ", ".join(
        f"rank {rank} sends piece {piece} to rank {(rank + 1) % RANKS}"
        for rank, piece in moment.sent.items()
    )
    if number < RANKS:
        counts = {2: "two", 3: "three", 4: "all four"}
        result = f"is added to the receiver's piece, now the sum over {counts[number + 1]} ranks"
    else:
        complete = sum(len(ranks) == RANKS for ranks in moment.rows[0])
        counts = {2: "two complete pieces", 3: "three", 4: "all four"}
        result = f"is complete and replaces the receiver's: every rank now has {counts[complete]}"
    return f"Step {number}: {messages}. Each sent piece {result}."


def draw(number: int, moment: Moment) -> None:
    figure, axes = make_canvas(2.85, 3.32)
    draw_title(axes, LEFT + 2 * SIZE, 0.16, moment.head)
    draw_text(axes, LEFT - 0.08, 0.5, "piece", ha="right")
    for piece in range(RANKS):
        draw_text(axes, LEFT + (piece + 0.5) * SIZE, 0.5, str(piece))
    draw_rank_names(axes, LEFT - 0.08, TOP, SIZE, GAP)
    all_places = [(get_place(r, c), moment.rows[r][c]) for r in range(RANKS) for c in range(RANKS)]
    new = [get_place((rank + 1) % RANKS, piece) for rank, piece in moment.sent.items()]
    draw_cells(axes, all_places, new)
    for rank, piece in moment.sent.items():
        x, y, _, _ = get_place(rank, piece)
        middle = x + SIZE / 2
        if rank < RANKS - 1:
            draw_arrow(axes, (middle, y + SIZE), (middle, y + SIZE + GAP), clip_on=False)
            continue
        # Draw the message from the last rank to the first around the table.
        right, low, high = LEFT + RANKS * SIZE + 0.28, y + SIZE + 0.16, TOP - 0.34
        landing = x + SIZE * 0.78  # beside the column's number
        way = [(middle, y + SIZE), (middle, low), (right, low), (right, high), (landing, high)]
        axes.plot(*zip(*way, strict=True), color=INK, lw=1.4, clip_on=False)
        draw_arrow(axes, (landing, high), (landing, TOP), clip_on=False)
    save_step(figure, "collectives", number + 1, describe_moment(number, moment))


def main() -> None:
    for number, moment in enumerate(list_moments()):
        draw(number, moment)


if __name__ == "__main__":
    main()
