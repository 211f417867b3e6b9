"""Cost breakdown of a lab run: tokens, seconds, FLOPs, bytes moved, and money if priced.

Symbols: B sequences, S tokens of each, H hidden, L layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shardlab.common import show
from shardlab.common.arguments import check_integer
from shardlab.layout import Layout

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODES = {
    "one": "one process",
    "data": "data parallel",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
    "offload": "ZeRO-3, offload",
    "tensor": "tensor parallel",
    "mixed": "tensor × ZeRO-1",
}
PHASES = ("inference", "training")
BYTES_PER_VALUE = {
    "fp32": 4,
    "bf16": 2,
}  # weights and gradients; states have four


@dataclass(frozen=True)
class Task:
    """The computation of all ranks together, equal for each mode.

    batch: sequences B; prompt: tokens of each prompt; new: tokens generated after the prompt; seq:
    tokens S of a training sequence; steps: timed optimizer steps, after one warm-up step.
    """

    batch: int = 4
    prompt: int = 64
    new: int = 32
    seq: int = 128
    steps: int = 3

    def __post_init__(self) -> None:
        check_integer(**vars(self))


@dataclass(frozen=True)
class Report:
    """The cost of one mode, and its results for comparison.

    tokens: trained, or generated. seconds: of the slowest rank, without start-up. flops, moved:
    floating-point operations, and bytes to and from memory, of all ranks. price: per GPU hour;
    None: ranks have no price.
    outcome: losses [1 + steps], or generated tokens [B, new]. built: peak bytes on a rank while it
    built the model.
    """

    mode: str
    work: str
    ranks: int
    tokens: int
    seconds: float
    flops: int
    moved: int
    price: float | None
    outcome: Tensor
    build_peak: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def total_tflops(self) -> float:
        """10^12 floating-point operations per second, of all ranks together."""
        return self.flops / self.seconds / 1e12

    @property
    def flops_per_byte(self) -> float:
        """Floating-point operations per byte moved to or from memory."""
        return self.flops / self.moved

    @property
    def cost_per_million(self) -> float | None:
        """Price of a million tokens, where every rank is a GPU with a price."""
        if self.price is None:
            return None
        return self.price * self.ranks * self.seconds / 3600 / self.tokens * 1e6


def count_matrix_parameters(shape: Any) -> int:
    """Return the parameters of a Llama's matrices, the head's included, without the embedding.

    shape: a LlamaConfig. The matrices are query, output, key, value, gate, up, down and the head.
    """
    hidden, head = shape.hidden_size, shape.hidden_size // shape.num_attention_heads
    keys = shape.num_key_value_heads * head
    layer = 2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * shape.intermediate_size
    return shape.num_hidden_layers * layer + shape.vocab_size * hidden


def training_flops(shape: Any, batch: int, seq: int) -> int:
    """Return the FLOPs of a forward and a backward pass over [batch, seq] tokens.

    6 per parameter and token: a multiplication and an addition in forward, twice as many in
    backward; and 12 L H S per token for attention's scores and values, masked half included
    (Narayanan et al., SC 2021, appendix; Chowdhery et al., PaLM, appendix B).
    """
    attention = 12 * shape.num_hidden_layers * shape.hidden_size * seq
    return batch * seq * (6 * count_matrix_parameters(shape) + attention)


def inference_flops(shape: Any, batch: int, prompt: int, new: int) -> int:
    """Return the FLOPs of generating `new` tokens: 2 per parameter and token, and attention.

    One pass processes the prompt, and one pass each further token. The head is computed only for
    the last position of each pass.
    """
    head = shape.vocab_size * shape.hidden_size
    attention = 4 * shape.num_hidden_layers * shape.hidden_size
    passes = [(prompt, prompt)] + [(1, prompt + i) for i in range(1, new)]  # (tokens, context)
    body = sum(n * (2 * (count_matrix_parameters(shape) - head) + attention * c) for n, c in passes)
    return batch * (body + len(passes) * 2 * head)


def training_bytes_moved(read: int, own: int, gathered: bool, number: int = 4) -> int:
    """Return a rank's bytes to and from memory in one step, without activations.

    read: parameters that its forward pass reads; own: parameters that its optimizer updates, for
    which it reads the gradient, and reads and writes parameter and two moments. gathered: ZeRO-3
    writes the gathered parameters, in forward and in backward. number: bytes of a parameter; with
    2 bytes, the optimizer reads and writes a 4-byte master copy instead.
    """
    passes = 2 * read + (2 * read if gathered else 0) + read  # the last term: gradients written
    written = number if number < 4 else 0  # 16-bit weights, written from the master copy
    return number * (passes + own) + (4 * 2 * 3 + written) * own


def inference_bytes_moved(
    shape: Any, task: Task, layout: Layout, read: int, number: int = 4
) -> int:
    """Return a rank's bytes to and from memory for generation: weights of each pass, KV cache.

    Tensor-parallel ranks shard the heads, and so the KV cache [L, 2, batch, context, keys]. read,
    number: as in `training_bytes_moved`; elements of the cache have `number` bytes, too.
    """
    head = shape.hidden_size // shape.num_attention_heads
    token = 2 * shape.num_hidden_layers * shape.num_key_value_heads * head // layout.tp
    read_of_cache = task.prompt + sum(task.prompt + i for i in range(1, task.new))
    cache = read_of_cache + task.prompt + task.new - 1  # tokens read, and then tokens written
    passes = task.new * (2 if layout.zero == 3 else 1)
    return number * (passes * read + layout.micro_batch * token * cache)


def show_table(
    reports: Sequence[Report], failed: Mapping[str, str] | None = None, caption: str = ""
) -> show.DisplayResult:
    """Show a table with a row for each report, and for each mode that `failed`, with its cause."""
    head = ["work", "mode", "ranks", "tokens", "total time (s)", "tokens/s", "TFLOP/s"]
    head += ["FLOP/byte", "held to build (MB)"]
    rows = []
    for r in reports:
        speeds = f"{r.tokens_per_second:,.0f}", f"{r.total_tflops:.4f}", f"{r.flops_per_byte:.1f}"
        row = [r.work, MODES[r.mode], r.ranks, r.tokens, f"{r.seconds:.3f}", *speeds]
        row += [f"{r.build_peak / 1e6:.1f}"]
        rows.append(row if r.cost_per_million is None else [*row, f"{r.cost_per_million:.2f}"])
    if any(r.cost_per_million is not None for r in reports):
        head += ["cost per million tokens"]
    for mode, why in (failed or {}).items():
        rows.append(["", MODES[mode], *["–"] * (len(head) - 3), why])
    return show.table(rows, head, caption)


def draw_bars(reports: Sequence[Report]) -> Figure:
    """Draw tokens/s and FLOP per byte of each mode: a row for inference and one for training."""
    import matplotlib.pyplot as plt

    show.set_style()
    kinds = [work for work in PHASES if any(r.work == work for r in reports)]
    figure, panels = plt.subplots(len(kinds), 2, figsize=(6.6, 1.9 * len(kinds)), squeeze=False)
    figure.subplots_adjust(wspace=0.18, hspace=0.75)
    measures = [("tokens/s", "tokens_per_second", ",.0f")]
    measures += [("FLOP per byte", "flops_per_byte", ".1f")]
    for row, work in zip(panels, kinds, strict=True):
        chosen = [r for r in reports if r.work == work]
        for axes, (title, name, form) in zip(row, measures, strict=True):
            values = [getattr(r, name) for r in chosen]
            bars = axes.barh(
                [MODES[r.mode] for r in chosen],
                values,
                color=[show.RANK_COLORS[list(MODES).index(r.mode)] for r in chosen],
            )
            axes.bar_label(bars, [format(v, form) for v in values], padding=2, fontsize=9)
            axes.set_xlim(0, 1.45 * max(values))
            axes.invert_yaxis()
            axes.set_xticks([])
            axes.spines["bottom"].set_visible(False)
            axes.tick_params(axis="y", length=0, labelleft=axes is row[0])
            axes.set_title(title, loc="left", fontsize=10)
        row[0].text(0, 1.2, work, transform=row[0].transAxes, weight="bold", va="bottom")
    return figure
