"""Formulas as papers and libraries print them, to compare with, and to know where they end.

They count what their authors' models held. The course's own model is in `core`.
"""

from __future__ import annotations

from bisect import bisect_right
from fractions import Fraction

from shardlab.common.arguments import check_one_of
from shardlab.layout import ALONE, Layout

from .core import OPTIMIZERS, check_recipe, states
from .units import ceil_div, whole

RECOMPUTE = "none", "selective", "full"


def korthikanti_layer(
    s: int,
    b: int,
    h: int,
    a: int,
    t: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> int:
    """Bytes of activations that one layer keeps for one micro-batch, rounded up.

    Korthikanti et al. 2022 (arXiv 2205.05198), Table 2: s tokens, micro-batch b, hidden size h,
    a heads, tensor degree t; 16-bit activations, masks of dropout of one byte an element, GELU at
    four times the width, attention that keeps its s * s scores.

        no parallelism                  sbh (34 + 5as/h)
        tensor                          sbh (10 + 24/t + 5as/(ht))
        tensor, sequence                sbh (34/t + 5as/(ht))
        tensor, selective               sbh (10 + 24/t)
        tensor, sequence, selective     sbh (34/t)
        full                            sbh 2

    Raises ValueError for sizes below 1 and an unknown `recompute`.
    """
    check_one_of(RECOMPUTE, recompute=recompute)
    if recompute == "full":
        return 2 * s * b * h
    outside = Fraction(10, t if sequence_parallel else 1)
    scores = attention_term(a, s, h) / t if recompute == "none" else Fraction()
    factor = outside + Fraction(24, t) + scores
    return ceil_div((s * b * h * factor).numerator, (s * b * h * factor).denominator)


def attention_term(a: int, s: int, h: int) -> Fraction:
    """5as/h: what attention's scores add to the 34 (80 for GPT-3 175B, 64 for MT-NLG 530B)."""
    return Fraction(5 * a * s, h)


def selective_saving(a: int, s: int, h: int) -> Fraction:
    """Share of the activations that selective recomputation saves; section 5 prints 70 and 65 %."""
    return attention_term(a, s, h) / (34 + attention_term(a, s, h))


def in_flight_layers(layers: int, p: int, chunks: int = 1) -> Fraction:
    """Layers' worth of activations on the first of `p` stages, whatever the micro-batches are.

    1F1B keeps p micro-batches of L/p layers: L in all. Interleaved, with m = `chunks` chunks on
    each stage, L (1 + (p - 1) / (pm)). Korthikanti et al. 2022, section 4.2.3.
    """
    return Fraction(layers) if chunks == 1 else layers * (1 + Fraction(p - 1, p * chunks))


def stage_output_saved(s: int, b: int, h: int, p: int) -> int:
    """Bytes saved on the first stage by freeing outputs that were sent on: 2 sbhp.

    Korthikanti et al. 2022, appendix B: 2.73 GB (they are GiB) for the 530B model on 35 stages.
    """
    return 2 * s * b * h * p


def bytes_per_parameter(
    precision: str = "bf16", optimizer: str = "adamw", layout: Layout = ALONE
) -> Fraction:
    """Bytes of model states for each parameter, on each rank, exactly: 4 + 12/64, for instance.

    Raises ValueError for unknown names, and a layout that keeps some of them on the host.
    """
    recipe = check_recipe(precision, optimizer)
    if layout.offload != "none":
        raise ValueError(f"layout.offload={layout.offload!r}: allowed is 'none'")
    kinds = OPTIMIZERS[optimizer]
    kept = Fraction(recipe.master + kinds * recipe.state)
    if recipe.block:
        kept += Fraction(4 * kinds, recipe.block)
    parts = Fraction(recipe.parameters), Fraction(recipe.gradients), kept
    zero, shards = layout.zero, layout.shards
    shared = (part / (shards if zero >= s else 1) for part, s in zip(parts, (3, 2, 1), strict=True))
    return sum(shared, Fraction())


def largest(
    memory: float, layout: Layout = ALONE, precision: str = "bf16", optimizer: str = "adamw"
) -> int:
    """The most parameters whose states fit into `memory` bytes per rank, and nothing else.

    Rajbhandari et al. 2020 (arXiv 1910.02054), Table 2, prints it as the theoretical maximum.
    """
    memory = whole("memory", memory)
    each = bytes_per_parameter(precision, optimizer, layout)
    about = int(memory * layout.tp * layout.pp / each)

    def needs(params: int) -> int:
        return states(params, layout, precision, optimizer).total

    return bisect_right(range(1, about + 2), memory, key=needs)  # shares are rounded up


def megatron_bytes(precision: str, d: int = 1, distributed: bool = True) -> Fraction:
    """Bytes per parameter of Megatron-LM's optimizer, over d data-parallel ranks.

    Megatron-LM's documentation (dist_optimizer.md): for 16-bit parameters and gradients 20 becomes
    4 + 16/d, because the distributed optimizer keeps float32 gradients too; for bf16 with float32
    gradients 18 becomes 6 + 12/d; for fp32 16 becomes 8 + 8/d.
    """
    check_one_of(("fp16", "bf16-fp32-gradients", "fp32"), precision=precision)
    layout = Layout(dp=d, zero=1 if distributed else 0)
    extra = Fraction(4, d if distributed else 1) if precision == "fp16" else Fraction()
    return bytes_per_parameter(precision, "adam", layout) + extra


def deepspeed_zero2(
    params: float,
    gpus_per_node: int = 1,
    nodes: int = 1,
    offload: bool = True,
    version: str = "documented",
) -> tuple[int, int]:
    """(host bytes per node, device bytes per GPU) by DeepSpeed's estimator of ZeRO-2 states.

    Its documentation (docs/code-docs/source/memory.rst) prints 4 + 16/n bytes a parameter without
    offload; the code of version 0.19 has 2 + 18/n. Offloaded: 2 on the device. The factor 1.5 on
    the host is its own reserve. What both call "GB" is 2^30.
    """
    check_one_of(("documented", "0.19"), version=version)
    n = gpus_per_node * nodes
    params = whole("params", params)
    if offload:
        return int(params * max(4 * n, 16) * 1.5), 2 * params
    fixed, shared = (4, 16) if version == "documented" else (2, 18)
    return int(params * 4 * gpus_per_node * 1.5), fixed * params + int(shared * params / n)


def deepspeed_zero3(
    params: float,
    largest_layer: float,
    gpus_per_node: int = 1,
    nodes: int = 1,
    offload_optimizer: bool = True,
    offload_parameters: bool = True,
    zero_init: bool = True,
) -> tuple[int, int, int]:
    """(host bytes per node, device bytes per GPU, bytes of the largest layer) by DeepSpeed, ZeRO-3.

    18 bytes a parameter, shared by all GPUs or moved to the host; the largest layer once more, at 4
    bytes, on each device. zero_init: the model is built in shards (`deepspeed.zero.Init`); without,
    each process of a node first holds it whole. Same source as `deepspeed_zero2`.

    Raises ValueError when parameters are offloaded and the optimizer is not.
    """
    params = whole("params", params)
    layer = 4 * whole("largest_layer", largest_layer)
    n = gpus_per_node * nodes
    if offload_parameters and not offload_optimizer:
        raise ValueError("offload_parameters=True: allowed with offload_optimizer=True")
    whole_copies = 4 * gpus_per_node
    if not offload_optimizer:
        host = 4 * gpus_per_node * (layer // 4 if zero_init else params)
        return int(host * 1.5), layer + int(18 * params / n), layer
    per_node = (18 if offload_parameters else 16) / nodes
    host = params * (per_node if zero_init else max(whole_copies, per_node))
    device = layer if offload_parameters else layer + int(2 * params / n)
    return int(host * 1.5), device, layer
