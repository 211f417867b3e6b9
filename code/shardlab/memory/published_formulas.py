"""Formulas as papers and libraries print them, for comparisons, and to know their limits.

They count the tensors of their authors' models. The course's own model is in `core`.
"""

from __future__ import annotations

from bisect import bisect_right
from fractions import Fraction
from math import ceil

from shardlab.layout import SINGLE_RANK, Layout

from .core import OPTIMIZERS, check_recipe, estimate_states


def korthikanti_layer(
    s: int,
    b: int,
    h: int,
    a: int,
    t: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> int:
    """Return the bytes of activations that one layer keeps for one micro-batch, rounded up.

    Korthikanti et al. 2022 (arXiv 2205.05198), Table 2: s tokens, micro-batch b, hidden size h, a
    heads, tensor degree t; 16-bit activations, dropout masks of one byte per element, GELU at four
    times the width, attention that keeps its s * s scores.

        no parallelism                  sbh (34 + 5as/h)
        tensor                          sbh (10 + 24/t + 5as/(ht))
        tensor, sequence                sbh (34/t + 5as/(ht))
        tensor, selective               sbh (10 + 24/t)
        tensor, sequence, selective     sbh (34/t)
        full                            sbh 2
    """
    if recompute == "full":
        return 2 * s * b * h
    factor = Fraction(10, t if sequence_parallel else 1) + Fraction(24, t)
    if recompute == "none":  # attention's scores: 80 for GPT-3 175B, 64 for MT-NLG 530B, over t
        factor += Fraction(5 * a * s, h * t)
    return ceil(s * b * h * factor)


def bytes_per_parameter(
    precision: str = "bf16", optimizer: str = "adamw", layout: Layout = SINGLE_RANK
) -> Fraction:
    """Return the bytes of model states per parameter on each rank, exactly, as 4 + 12/64.

    Raises ValueError for unknown names, and for a layout that keeps states on the host.
    """
    recipe = check_recipe(precision, optimizer)
    if layout.offload != "none":
        raise ValueError(f"layout.offload={layout.offload!r}: must be 'none'")
    kinds = OPTIMIZERS[optimizer]
    kept = Fraction(recipe.master + kinds * recipe.state)
    if recipe.block:
        kept += Fraction(4 * kinds, recipe.block)
    parts = Fraction(recipe.parameters), Fraction(recipe.gradients), kept
    zero, shards = layout.zero, layout.zero_degree
    shared = (part / (shards if zero >= s else 1) for part, s in zip(parts, (3, 2, 1), strict=True))
    return sum(shared, Fraction())


def find_max_parameters(
    memory: float, layout: Layout = SINGLE_RANK, precision: str = "bf16", optimizer: str = "adamw"
) -> int:
    """Return the most parameters whose states alone fit into `memory` bytes per rank.

    Rajbhandari et al. 2020 (arXiv 1910.02054), Table 2, print it as the theoretical maximum.
    """
    each = bytes_per_parameter(precision, optimizer, layout)
    about = int(memory * layout.tp * layout.pp / each)

    def count_state_bytes(params: int) -> int:
        return estimate_states(params, layout, precision, optimizer).total

    return bisect_right(range(1, about + 2), memory, key=count_state_bytes)  # shares are rounded up


def megatron_bytes(precision: str, d: int = 1, distributed: bool = True) -> Fraction:
    """Return the bytes per parameter of Megatron-LM's optimizer, over d data-parallel ranks.

    Megatron-LM's documentation (dist_optimizer.md): for 16-bit parameters and gradients 20 becomes
    4 + 16/d, because the distributed optimizer keeps float32 gradients too; for bf16 with float32
    gradients 18 becomes 6 + 12/d; for fp32 16 becomes 8 + 8/d.
    """
    layout = Layout(dp=d, zero=1 if distributed else 0)
    extra = Fraction(4, d if distributed else 1) if precision == "fp16" else Fraction()
    return bytes_per_parameter(precision, "adam", layout) + extra


def deepspeed_zero2(params: float, gpus_per_node: int = 1, offload: bool = True) -> tuple[int, int]:
    """Return (host bytes, bytes per GPU) of a node by DeepSpeed's estimator of ZeRO-2 states.

    Its documentation (docs/code-docs/source/memory.rst) prints 4 + 16/n bytes per parameter without
    offload, on n GPUs; with offload, 2 on the GPU. The host's factor 1.5 is the estimator's
    reserve. Its "GB" is 2^30.
    """
    n, params = gpus_per_node, int(params)
    if offload:
        return int(params * max(4 * n, 16) * 1.5), 2 * params
    return int(params * 4 * n * 1.5), 4 * params + int(16 * params / n)
