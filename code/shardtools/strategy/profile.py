"""Profiles: an implementation's memory and work in a step, beyond the arithmetic of the model.

There is one for the course's own model, Megatron-LM, nanotron, and each other engine that a plan
is emitted for. Numbers are counted in the source; measured numbers are in `rates`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shardlab.memory.core import PRECISIONS, WIDE, Recipe


@dataclass(frozen=True)
class Wire:
    """Bytes per parameter in which gradients and weights are communicated."""

    gradient: int
    weight: int


@dataclass(frozen=True)
class Profile:
    """One implementation, by default the course's own: 16-bit gradients, ZeRO as in FSDP2.

    Bytes are per token, or per parameter, of the whole model.
    """

    name: str
    stages: str = "megatron"  # rule that cuts layers into stages: see `Layout.stages`
    # "flash" keeps no scores and computes no masked pairs; "plain" does both.
    attention: str = "flash"
    # Tensors that a feed-forward network saves for backward, by its kind.
    wide: Mapping[str, int] = field(default_factory=lambda: WIDE)
    recipe: Recipe = PRECISIONS["bf16"]  # precision of model states
    bucket: int = 2  # extra bytes per parameter without ZeRO (DDP's buckets)
    wire: Wire = Wire(2, 2)  # bytes per parameter in communication
    # Work of a step beside the layers.
    update: int = 34  # bytes that the optimizer reads and writes per parameter that it keeps
    accumulate: int = 6  # bytes per parameter and micro-batch to accumulate gradients
    loss: int = 32  # bytes per logit, forward and backward
    waves: bool = False  # products count whole waves of tiles
    reduced: bool = False  # ZeRO-1 all-reduces gradients instead of reduce-scattering them
    ahead: bool = True  # ZeRO-1 and 2 overlap gathers of weights with the next forward pass
    captured: bool = False  # without a pipeline a step is a CUDA graph: no CPU launches the layers
    sequence_parallel: bool = False  # tensor parallelism always includes sequence parallelism
    # Features that it supports.
    zeros: tuple[int, ...] = (0, 1, 2, 3)  # stages of ZeRO, without a pipeline; with one, 0 and 1
    interleaves: bool = True
    # Operators that it can recompute selectively: see `Layout.recompute`.
    operators: tuple[str, ...] = ("norms", "ffn", "norms+ffn")
    # States that it can offload to the host, as DeepSpeed does: see `Layout.offload`.
    offloads: tuple[str, ...] = ("optimizer", "parameters")
    shares: bool = True  # context parallelism
    copies: bool = True  # replicates key and value heads if there are more tensor ranks than heads
    folds: bool = True  # tensor ranks may join expert parallelism: see `Layout.etp`
    # Only for today's engines.
    engine: str = ""  # name of the rate that is its step time over its family's
    compiled: bool = True  # element-wise work is fused
    hides: bool = False  # overlaps context-parallel communication with attention
    posts: bool = False  # posts messages of interleaved stages before it waits for them
    # Accesses of 2-byte numbers for experts' biases: per output of an expert, and per output of
    # its first product. In bf16, and in 8 bits with a scale for each tensor.
    biased: tuple[int, int] = (0, 0)
    once: bool = False  # sends a token to each node once, however many experts it chose there


COURSE = Profile("course")

# nanotron, early 2025: REDUCE_SCATTER tensor parallelism, a fused norm, flash attention; float32
# gradients are an accumulator beside the 16-bit ones; the loss is computed in float32.
NANOTRON = Profile(
    "nanotron",
    stages="nanotron",
    wide={**WIDE, "gelu": 3},
    recipe=PRECISIONS["bf16-fp32-gradients"],
    wire=Wire(4, 2),
    accumulate=10,
    reduced=True,
    ahead=False,
    sequence_parallel=True,
    zeros=(0, 1),
    interleaves=False,
    operators=(),
    offloads=(),
    copies=False,
    folds=False,
)

# Megatron-LM: Korthikanti et al. 2022 (arXiv 2205.05198), Table 2: 10 sbh outside, 24 sbh and the
# scores' 5 as²b inside; main gradients in float32.
MEGATRON = Profile(
    "megatron",
    attention="plain",
    wide={**WIDE, "swiglu": 3},  # SiLU is computed again in backward; gelu: 16 sbh for F = 4h
    recipe=PRECISIONS["bf16-fp32-gradients"],
    bucket=0,
    wire=Wire(4, 2),
    update=46,  # Adam 30, its norm and unscaling 12, zeroing 4
    accumulate=0,
    waves=True,
    ahead=False,  # in the papers; see `today`
    zeros=(0, 1),
    operators=("norms",),
    offloads=("optimizer",),
    hides=True,  # --cp-comm-type p2p, as it is by default
)

# torch 2.13's fully_shard, as `emit` writes it: float32 weights (counted as optimizer states) and
# a 16-bit copy; gradients are reduced and accumulated in float32. ZeRO-3's shard has no 16-bit
# copy, though 2 B are counted for it.
FSDP2 = replace(
    COURSE,
    name="fsdp2",
    stages="equal",
    recipe=PRECISIONS["bf16-fp32-gradients"],
    bucket=0,
    wire=Wire(4, 2),
    update=40,  # Adam 28, its norm and clipping 12
    accumulate=10,
    interleaves=False,
    operators=(),
    offloads=("parameters",),
    shares=False,
    copies=False,
    folds=False,
    engine="torchtitan",  # measured with the same fully_shard; the script does not compile
    compiled=False,
)

# torchtitan 0.3.0, on the same fully_shard: training.disable_cuda_graphs is False, and pipelines
# cannot be captured (its config/configs.py and trainer.py). `emit` turns compilation on.
TORCHTITAN = replace(
    FSDP2,
    name="torchtitan",
    stages="megatron",
    compiled=True,
    captured=True,
    zeros=(0, 2, 3),  # without a pipeline each micro-batch's gradients are scattered
    interleaves=True,
    operators=("norms+ffn",),  # its SelectiveAC keeps products and attention
    shares=True,
    hides=True,
)

# DeepSpeed 0.19.8: gradients in the 16-bit type, unless data_types says otherwise, and a float32
# copy of a rank's shard for the step; ZeRO-1 and 2 gather weights after the step.
_COPIED = replace(PRECISIONS["bf16"], master=4 + 4)  # float32 copies of weights and gradients
DEEPSPEED = replace(
    COURSE,
    name="deepspeed",
    stages="equal",
    recipe=_COPIED,
    ahead=False,
    interleaves=False,
    operators=(),
    offloads=("optimizer", "parameters"),
    shares=False,
    copies=False,
    folds=False,
)

# Today's engines form one family, whose rates are fitted together: Megatron Core, and differences
# of others. Tokens go to experts by DeepEP or HybridEP; attention hides context-parallel rings.
# Megatron-Bridge sets overlap_p2p_comm where stages are interleaved, and only there (its
# training/comm_overlap.py); torch.distributed.pipelining, which the others use, waits for each.
# Biases of experts' second products are added expert by expert, in float32 (`_apply_bias` in
# experts.py of Megatron Core 0.16.1 and of NeMo Automodel). Bytes per output: bias times a token's
# weight 4 written; sum 4 + 2 read, 4 written; concatenation 4 and 4; cast to 16 bits 4 and 2: 28.
# The first product's output is clamped and concatenated (fused_bias_geglu.py there): 8 bytes.
# Bridge's recipes in mxfp8 have one kernel for all of an expert (cutedsl_fused_grouped_mlp).
ENGINES = replace(
    MEGATRON, name="engines", attention="flash", waves=False, ahead=True, sequence_parallel=True,
    zeros=(0, 1, 2, 3), hides=True, once=True, posts=True, biased=(14, 4),
)  # fmt: skip
BY_ENGINE = {
    "megatron": ENGINES,
    **{
        name: replace(ENGINES, engine=name, posts=False)
        for name in ("torchtitan", "automodel", "fsdp")
    },
}

PROFILES = {
    profile.name: profile
    for profile in (COURSE, MEGATRON, NANOTRON, FSDP2, TORCHTITAN, DEEPSPEED, ENGINES)
}


def today(profile: Profile) -> Profile:
    """Return `profile` as it trains now, if its rates come from older runs.

    Attention is fused. Megatron Core 0.19.2 gathers ZeRO-1's weights behind the next forward pass
    (--overlap-param-gather), and has ZeRO-2 and 3 (Megatron-FSDP).
    """
    profile = replace(profile, attention="flash")
    if profile.name == "megatron":
        profile = replace(profile, ahead=True, zeros=(0, 1, 2, 3))
    return profile
