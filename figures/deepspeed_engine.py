"""Draw the pictures of the lesson `deepspeed_engine` (python figures/deepspeed_engine.py)."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from shardlab.common import show
from shardlab.common.show.drawing import draw_arrow, draw_box, draw_cell, draw_title, make_canvas

HERE = Path(__file__).parent
INK = show.INK
COLORS = show.RANK_COLORS


def _draw_text(axes: Axes, x: float, y: float, text: str, **changes: object) -> None:
    axes.text(x, y, text, **{"va": "center", "fontsize": 10, **changes})


def draw_wraps() -> None:
    figure, axes = make_canvas(6.2, 4.75)
    width, gap = 1.98, 0.08
    calls = [
        (
            "engine(tokens)",
            ["the model's forward", "stage 3: gathers each layer", "before, frees it after"],
        ),
        (
            "engine.backward(loss)",
            ["loss / accumulation", "stage 0: all-reduce", "stages 1 to 3: reduce-scatter"],
        ),
        (
            "engine.step()",
            [
                "at the last micro-batch:",
                "clip, step, zero_grad",
                "stages 1, 2: all-gather",
            ],
        ),
    ]
    for i, (call, lines) in enumerate(calls):
        x = 0.05 + i * (width + gap)
        axes.add_patch(Rectangle((x, 0.05), width, 1.3, fill=False, ec=INK, lw=0.8))
        draw_title(axes, x + width / 2, 0.24, call, fontsize=10.5, family="monospace")
        for n, line in enumerate(lines):
            _draw_text(axes, x + width / 2, 0.56 + 0.28 * n, line, ha="center", fontsize=9.5)
    draw_title(axes, 0.05, 1.65, "states on four ranks", ha="left")
    _draw_text(axes, 6.15, 1.65, "striped: full; one colour: a shard", ha="right", fontsize=9)
    kinds = [("parameters", 3), ("gradients", 2), ("optimizer", 1)]
    for i, (kind, _) in enumerate(kinds):
        _draw_text(axes, 1.2 + 1.72 * i + 0.66, 1.93, kind, ha="center")
    for stage in range(4):
        y = 2.12 + 0.46 * stage
        _draw_text(axes, 0.05, y + 0.17, f"stage {stage}")
        for i, (_, since) in enumerate(kinds):
            for rank in range(4):
                x = 1.2 + 1.72 * i + 0.33 * rank
                sharded = stage >= since
                holds = (rank,) if sharded else (0, 1, 2, 3)
                draw_cell(axes, x, y, 0.3, holds, str(rank) if sharded else "")
    y = 4.0
    axes.plot([0.05, 6.15], [y + 0.04, y + 0.04], color=INK, lw=0.8, ls=(0, (3, 2)))
    _draw_text(axes, 0.05, y + 0.26, "the host's memory", weight="bold")
    draw_arrow(axes, (5.3, y - 0.06), (5.3, y + 0.42))
    draw_arrow(axes, (1.86, y - 0.06), (1.86, y + 0.42))
    _draw_text(
        axes, 5.3, y + 0.58, "offload_optimizer", ha="center", family="monospace", fontsize=9.5
    )
    _draw_text(axes, 1.86, y + 0.58, "offload_param", ha="center", family="monospace", fontsize=9.5)
    show.save_svg(
        figure,
        HERE / "deepspeed_engine_wraps.svg",
        "The engine's three calls. engine(tokens) runs the model's forward; at stage 3 it gathers "
        "each layer before its use and frees it after. engine.backward(loss) divides the loss by "
        "the accumulation; at stage 0 it all-reduces the gradients, at stages 1 to 3 it "
        "reduce-scatters them. engine.step() clips and steps after the last micro-batch; at "
        "stages 1 and 2 it then all-gathers the weights. Below, the states on four ranks: all are "
        "full at stage 0; each rank has a shard of the optimizer states from stage 1, of the "
        "gradients from stage 2, of the parameters at stage 3. Offload moves optimizer states or "
        "parameters to the host's memory.",
    )


def draw_batch() -> None:
    figure, axes = make_canvas(6.2, 2.95)
    micro, parts, size = 2, 2, 0.42
    _draw_text(axes, 2.12, 0.2, "micro-batch 0", ha="center")
    _draw_text(axes, 3.62, 0.2, "micro-batch 1", ha="center")
    _draw_text(axes, 5.2, 0.2, "then", ha="center")
    for rank in range(2):
        y = 0.45 + 0.75 * rank
        _draw_text(axes, 0.1, y + size / 2, f"rank {rank}", weight="bold", fontsize=11)
        for part in range(parts):
            x = 1.66 + 1.5 * part
            for sequence in range(micro):
                number = (rank * parts + part) * micro + sequence
                draw_cell(axes, x + (size + 0.06) * sequence, y, size, (rank,), str(number))
            if part == 0:
                draw_arrow(axes, (x + 1.02, y + size / 2), (x + 1.42, y + size / 2))
        draw_arrow(axes, (4.2, y + size / 2), (4.52, 0.45 + 0.585))
    draw_box(axes, 4.56, 0.62, 1.5, 0.83, "one average,\none step")
    y = 2.2
    for x, number, name in (
        (0.62, "2", "micro-batch"),
        (2.12, "2", "accumulation"),
        (3.55, "2", "copies"),
        (5.2, "8", "train batch"),
    ):
        draw_title(axes, x, y, number, fontsize=15)
        _draw_text(axes, x, y + 0.34, name, ha="center")
    for x, sign in ((1.37, "×"), (2.84, "×"), (4.35, "=")):
        draw_title(axes, x, y, sign, fontsize=14)
    show.save_svg(
        figure,
        HERE / "deepspeed_engine_batch.svg",
        "Two ranks, each with two micro-batches of two sequences, one after the other. "
        "Micro-batch 2, times accumulation 2, times 2 copies: a train batch of 8 sequences, for "
        "one average over the ranks and one optimizer step.",
    )


def draw_checkpoint() -> None:
    figure, axes = make_canvas(6.2, 5.25)
    _draw_text(axes, 0.05, 0.18, "two ranks train, stage 3", weight="bold")
    for rank in range(2):
        y = 0.42 + 0.62 * rank
        draw_box(axes, 0.05, y, 1.6, 0.5, f"shard {rank} of 2", COLORS[rank])
    draw_arrow(axes, (1.72, 0.98), (2.42, 0.98))
    _draw_text(axes, 2.05, 0.76, "save", ha="center")
    _draw_text(axes, 2.5, 0.18, "folder, tag step3", weight="bold")
    axes.add_patch(Rectangle((2.46, 0.36), 3.68, 1.72, fill=False, ec=INK, lw=0.8))
    _draw_text(axes, 2.98, 0.52, "model", ha="center")
    _draw_text(axes, 4.72, 0.52, "optimizer, master weights", ha="center")
    for rank in range(2):
        y = 0.66 + 0.48 * rank
        draw_box(axes, 2.52, y, 0.93, 0.4, "no weights", "none")
        draw_box(axes, 3.5, y, 2.54, 0.4, f"shard {rank} of 2, float32", COLORS[rank])
    _draw_text(axes, 2.56, 1.88, "latest: says step3", family="monospace", fontsize=9.5)
    draw_arrow(axes, (2.6, 2.12), (1.4, 2.82))
    _draw_text(axes, 1.8, 2.35, "load", ha="right")
    draw_arrow(axes, (4.9, 2.12), (4.9, 2.82))
    _draw_text(axes, 4.8, 2.45, "plain_state_dict", ha="right", family="monospace")
    _draw_text(axes, 0.05, 3.0, "two ranks, same stage", weight="bold")
    for rank in range(2):
        draw_box(axes, 0.05 + 1.2 * rank, 3.2, 1.12, 0.46, f"shard {rank}", COLORS[rank])
    _draw_text(axes, 0.05, 3.88, "training continues bit for bit")
    _draw_text(axes, 3.0, 3.0, "anywhere, without DeepSpeed", weight="bold")
    for rank in range(2):
        axes.add_patch(Rectangle((3.0 + 1.5 * rank, 3.2), 1.5, 0.46, fc=COLORS[rank], lw=0))
    axes.add_patch(Rectangle((3.0, 3.2), 3.0, 0.46, fill=False, ec=INK, lw=0.8))
    _draw_text(axes, 3.75, 3.43, "name: weight", ha="center", color="#ffffff", fontsize=11)
    _draw_text(axes, 5.25, 3.43, "name: weight", ha="center", color="#000000", fontsize=11)
    _draw_text(axes, 3.0, 3.88, "no optimizer: for inference or a new run")
    draw_arrow(axes, (2.8, 2.12), (2.8, 4.2))
    _draw_text(axes, 2.7, 4.12, "to_universal", ha="right", family="monospace")
    _draw_text(axes, 0.05, 4.42, "any number of ranks, same stage", weight="bold")
    for rank in range(4):
        draw_box(axes, 0.05 + 1.54 * rank, 4.6, 1.46, 0.46, f"shard {rank} of 4", COLORS[rank])
    show.save_svg(
        figure,
        HERE / "deepspeed_engine_checkpoint.svg",
        "The life of a checkpoint. Two ranks train at stage 3, and each holds a shard of every "
        "state, one half. save writes, under a tag, two model files without weights and two "
        "optimizer files, each with a shard of the float32 master weights; the file latest names "
        "the tag. load reads the shards on two ranks, and training continues bit for bit. "
        "plain_state_dict joins the shards into one dictionary of weights, without optimizer, for "
        "use without DeepSpeed. to_universal makes a folder of full tensors, from which each of "
        "any number of ranks loads its shard.",
    )


def main() -> None:
    draw_wraps()
    draw_batch()
    draw_checkpoint()


if __name__ == "__main__":
    main()
