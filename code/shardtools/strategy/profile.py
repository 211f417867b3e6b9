"""What an implementation keeps in memory and does in a step, beyond the arithmetic of the model.

Six of them: the course's own model, Megatron-LM, nanotron, and the other engines that a plan is
emitted for. What is counted from their source stands here; what has to be measured stands in
`rates`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shardlab.memory.core import PRECISIONS, WIDE, Recipe


@dataclass(frozen=True)
class Wire:
    """Bytes in which a parameter's gradient and its weight travel."""

    gradient: int
    weight: int


@dataclass(frozen=True)
class Profile:
    """One implementation, by default the course's own model under torch: 16-bit gradients, ZeRO as
    FSDP2 does it. Bytes are for a token, or for a parameter, of the whole model."""

    name: str
    stages: str = "megatron"  # rule by which it cuts a pipeline: see `stages`
    # "flash" keeps no scores and computes no masked pairs; "plain" does both.
    attention: str = "flash"
    # Tensors that a feed-forward network keeps, by its kind.
    wide: Mapping[str, int] = field(default_factory=lambda: WIDE)
    recipe: Recipe = PRECISIONS["bf16"]  # of model states
    bucket: int = 2  # bytes of a parameter more, where copies are not sharded
    wire: Wire = Wire(2, 2)  # bytes that a parameter travels in
    # Work of a step beside the layers.
    update: int = 34  # bytes that the optimizer reads and writes for each parameter it keeps
    accumulate: int = 6  # the same for each micro-batch, where gradients are added up
    loss: int = 32  # for each logit, forward and backward
    waves: bool = False  # products count whole waves of tiles
    reduced: bool = False  # ZeRO-1 sums whole gradients up, and does not scatter them
    ahead: bool = True  # weights of ZeRO-1 and 2 are gathered behind the next forward pass
    captured: bool = False  # without a pipeline a step is a CUDA graph: no CPU launches the layers
    sequence_parallel: bool = False  # always, where tensors are cut
    # What it offers.
    zeros: tuple[int, ...] = (0, 1, 2, 3)  # stages of ZeRO, without a pipeline; with one, 0 and 1
    interleaves: bool = True
    # That it can compute again, one by one: see `Layout.recompute`.
    operators: tuple[str, ...] = ("norms", "ffn", "norms+ffn")
    # What it can keep in the host's memory, as DeepSpeed does it: see `Layout.offload`.
    offloads: tuple[str, ...] = ("optimizer", "parameters")
    shares: bool = True  # sequences among ranks
    copies: bool = True  # of heads of keys and values, on more tensor ranks than there are heads
    folds: bool = True  # tensor ranks may join those that share the experts: see `Layout.etp`
    # Of today's engines.
    engine: str = ""  # the rate that says how much longer its steps take than its family's
    compiled: bool = True  # element-wise work is fused
    hides: bool = False  # keys and values of other ranks come behind attention
    posts: bool = False  # messages of interleaved stages, before they are waited for
    # Numbers of 2 B that are read and written where experts have biases: for each that one gives,
    # and that its first product gives. In bf16, and in 8 bits with a scale for each tensor.
    biased: tuple[int, int] = (0, 0)
    once: bool = False  # a token goes to each node once, however many experts it chose there


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

# torch 2.13's fully_shard, as `emit` writes it: float32 weights, among the optimizer's states here,
# and a 16-bit copy of them; sums and sums of micro-batches in float32. Of ZeRO-3's share the 16-bit
# copy is not there, though 2 B are counted.
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
    engine="torchtitan",  # which measured the same fully_shard; the script does not compile
    compiled=False,
)

# torchtitan 0.3.0, on the same fully_shard: training.disable_cuda_graphs is False, and pipelines
# cannot be captured (its config/configs.py and trainer.py).
# It is emitted compiled.
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

# DeepSpeed 0.19.8: gradients in the 16-bit type, unless data_types says otherwise, and for the step
# a copy of its share in float32; ZeRO-1 and 2 gather when the step is over.
_COPIED = replace(PRECISIONS["bf16"], master=4 + 4)  # and a copy of gradients, in float32
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

# Today's engines in one family, whose rates are found together: Megatron Core, and what differs in
# others. Tokens go to experts by DeepEP or HybridEP, and rings of context hide behind attention.
# Megatron-Bridge sets overlap_p2p_comm where stages are interleaved, and only there (its
# training/comm_overlap.py); torch.distributed.pipelining, which the others use, waits for each.
# Biases of experts' second products are added expert by expert, in float32 (`_apply_bias` in
# experts.py of Megatron Core 0.16.1 and of NeMo Automodel): times a token's weight 4 B written, the
# sum 4 + 2 read and 4 written, put together 4 and 4, and made 16-bit again 4 and 2: 28. What the
# first gives is clamped before its activation and put together (fused_bias_geglu.py there): 8.
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
    """`profile` as one trains with it now, where its rates come from older runs.

    Attention is fused. Megatron Core 0.19.2 gathers ZeRO-1's weights behind the next forward pass
    (--overlap-param-gather), and has ZeRO-2 and 3 (Megatron-FSDP).
    """
    profile = replace(profile, attention="flash")
    if profile.name == "megatron":
        profile = replace(profile, ahead=True, zeros=(0, 1, 2, 3))
    return profile
