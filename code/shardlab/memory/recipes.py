"""Model states: parameters, gradients and optimizer states, by precision, optimizer and ZeRO stage.

Bytes for each parameter, before anything is sharded, with Adam:

    recipe                 weights  gradients  master  Adam   together
    fp32                   4        4          -       8      16
    fp16, bf16             2        2          4       8      16   Micikevicius et al. 2018; ZeRO
    bf16-fp32-gradients    2        4          4       8      18   Megatron-LM
    bf16-compute           4        4          -       8      16   FSDP2's MixedPrecisionPolicy
    8-bit                  2        2          4       2.004  10   Dettmers et al. 2022

ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054, section 5): stage 1 gives each of the d
data-parallel ranks a d-th of the optimizer states (the master weights among them), stage 2 of the
gradients too, stage 3 of the parameters too. A share is rounded up: a flat buffer is
padded to a multiple of d.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction

from .units import ceil_div, one_of, whole


@dataclass(frozen=True)
class Recipe:
    """Bytes of one element of each kind of tensor; `master` is 0 where there is no second copy."""

    parameters: int
    gradients: int
    master: int
    state: int  # of each of the optimizer's states
    compute: int  # of activations
    about: str
    block: int = 0  # this many 8-bit states share a scale of four bytes; 0: no scales


PRECISIONS: dict[str, Recipe] = {
    "fp32": Recipe(4, 4, 0, 4, 4, "everything in float32"),
    "fp16": Recipe(2, 2, 4, 4, 2, "float16, with float32 master weights"),
    "bf16": Recipe(2, 2, 4, 4, 2, "bfloat16, with float32 master weights"),
    "bf16-fp32-gradients": Recipe(2, 4, 4, 4, 2, "bfloat16, gradients added up in float32"),
    "bf16-compute": Recipe(4, 4, 0, 4, 2, "kept in float32, cast to bfloat16 where it is used"),
    # Dettmers et al. 2022 (arXiv 2110.02861), section 2.1: blocks of 2048 values share a scale.
    "8-bit": Recipe(2, 2, 4, 1, 2, "bfloat16, float32 master weights, 8-bit states", 2048),
}
OPTIMIZERS: dict[str, int] = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}  # states a parameter
STAGES = 0, 1, 2, 3
OFFLOADS = "none", "optimizer", "parameters"


@dataclass(frozen=True)
class States:
    """Bytes of model states on one rank: on its device, and what it keeps in `host` memory."""

    parameters: int
    gradients: int
    optimizer: int
    host: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return self.parameters + self.gradients + self.optimizer


def check_recipe(precision: str, optimizer: str, zero: int, dp: int, offload: str) -> Recipe:
    """The recipe of that name; ValueError for what does not exist or does not go together."""
    one_of("precision", precision, PRECISIONS)
    one_of("optimizer", optimizer, OPTIMIZERS)
    one_of("zero", zero, STAGES)
    one_of("offload", offload, OFFLOADS)
    whole("dp", dp)
    if offload == "parameters" and zero != 3:
        raise ValueError(f"zero={zero}: allowed with offload='parameters' is 3")
    return PRECISIONS[precision]


def states(
    params: float,
    precision: str = "bf16",
    optimizer: str = "adamw",
    zero: int = 0,
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    offload: str = "none",
) -> States:
    """Bytes of model states per rank, for `params` parameters in the whole model (7.5e9 is fine).

    tp, pp: each of tp * pp ranks gets its share of the parameters, rounded up; what a certain
    shape gives each rank, exactly, is in `parameters`.
    offload: "optimizer" keeps the optimizer's states in host memory, and from stage 2 on the
    gradients too, because the optimizer computes there (ZeRO-Offload, arXiv 2101.06840, section 3);
    "parameters" keeps the parameters there as well (stage 3 alone).
    Adam's step counters (four bytes a tensor) are left out.

    Raises ValueError for unknown names, degrees below 1, and parameters offloaded below stage 3.
    """
    recipe = check_recipe(precision, optimizer, zero, dp, offload)
    held = ceil_div(whole("params", params, floats=True), whole("tp", tp) * whole("pp", pp))
    share = ceil_div(held, dp)

    def of(stage: int) -> int:
        return share if zero >= stage else held

    weights = of(3) * recipe.parameters
    gradients = of(2) * recipe.gradients
    kinds = OPTIMIZERS[optimizer]
    kept = of(1) * (recipe.master + kinds * recipe.state)
    if recipe.block:
        kept += kinds * 4 * ceil_div(of(1), recipe.block)
    host = 0
    if offload != "none":
        host, kept = kept, 0
        if zero >= 2:
            host, gradients = host + gradients, 0
    if offload == "parameters":
        host, weights = host + weights, 0
    return States(weights, gradients, kept, host)


def bytes_per_parameter(
    precision: str = "bf16", optimizer: str = "adamw", zero: int = 0, dp: int = 1
) -> Fraction:
    """Bytes of model states for each parameter, on each rank, exactly: 4 + 12/64, for instance."""
    recipe = check_recipe(precision, optimizer, zero, dp, "none")
    kinds = OPTIMIZERS[optimizer]
    kept = Fraction(recipe.master + kinds * recipe.state)
    if recipe.block:
        kept += Fraction(4 * kinds, recipe.block)
    parts = Fraction(recipe.parameters), Fraction(recipe.gradients), kept
    stages = 3, 2, 1
    return sum((p / dp if zero >= s else p for p, s in zip(parts, stages, strict=True)), Fraction())


def largest(
    memory: float,
    precision: str = "bf16",
    optimizer: str = "adamw",
    zero: int = 0,
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
) -> int:
    """The most parameters whose states fit into `memory` bytes per rank, and nothing else.

    Rajbhandari et al. 2020 (arXiv 1910.02054), Table 2, prints it as the theoretical maximum.
    """
    memory = whole("memory", memory, floats=True)
    ranks = whole("tp", tp) * whole("pp", pp)
    about = int(memory * ranks / bytes_per_parameter(precision, optimizer, zero, dp))

    def needs(params: int) -> int:
        return states(params, precision, optimizer, zero, dp, tp, pp).total

    return bisect_right(range(1, about + 2), memory, key=needs)  # shares are rounded up
