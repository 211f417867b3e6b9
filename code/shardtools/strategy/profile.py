"""Profiles: an implementation's memory and work in a step, beyond the arithmetic of the model.

There is one for the course's own model, Megatron-LM, nanotron, and each other engine that a plan
is emitted for. Numbers are counted in the source; measured numbers are in `rates`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shardlab.memory.core import PRECISIONS, WIDE_TENSORS, Recipe


@dataclass(frozen=True)
class WireBytes:
    """Bytes per parameter in which gradients and weights are communicated."""

    gradient: int
    weight: int


@dataclass(frozen=True)
class Profile:
    """One implementation, by default the course's own: 16-bit gradients, ZeRO as in FSDP2.

    Bytes are per token, or per parameter, of the whole model.
    """

    name: str
    stage_rule: str = "megatron"  # rule that cuts layers into stages: see `Layout.stages`
    # "flash" keeps no scores and computes no masked pairs; "plain" does both.
    attention: str = "flash"
    # Tensors that a feed-forward network saves for backward, by its kind.
    mlp_tensors: Mapping[str, int] = field(default_factory=lambda: WIDE_TENSORS)
    recipe: Recipe = PRECISIONS["bf16"]  # precision of model states
    bucket_bytes: int = 2  # extra bytes per parameter without ZeRO (DDP's buckets)
    wire_bytes: WireBytes = WireBytes(2, 2)  # bytes per parameter in communication
    # Work of a step beside the layers.
    update_bytes: int = 34  # bytes that the optimizer reads and writes per parameter that it keeps
    accumulate_bytes: int = 6  # bytes per parameter and micro-batch to accumulate gradients
    loss_bytes: int = 32  # bytes per logit, forward and backward
    counts_tile_waves: bool = False  # products count whole waves of tiles
    all_reduces_gradients: bool = False  # ZeRO-1 all-reduces, does not reduce-scatter, gradients
    prefetches_weights: bool = True  # ZeRO-1 and 2 gather weights during the next forward pass
    captures_graph: bool = False  # without a pipeline a step is one CUDA graph
    sequence_parallel: bool = False  # tensor parallelism always includes sequence parallelism
    has_sequence_parallel: bool = True
    # Features that the engine supports.
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)  # without a pipeline; with one, 0 and 1
    has_interleaving: bool = True
    # Operators that the engine can recompute selectively: see `Layout.recompute`.
    recompute_operators: tuple[str, ...] = ("norms", "ffn", "norms+ffn")
    # States that the engine can offload to the host: see `Layout.offload`.
    offload_states: tuple[str, ...] = ("optimizer", "parameters")
    has_context_parallel: bool = True
    replicates_kv_heads: bool = True  # if there are more tensor ranks than key and value heads
    has_expert_folding: bool = True  # tensor ranks may join expert parallelism: see `Layout.etp`
    # Only for today's engines.
    engine_rate: str = ""  # name of the rate that is its step time over its family's
    is_compiled: bool = True  # element-wise work is fused
    overlaps_context: bool = False  # overlaps context-parallel communication with attention
    posts_messages_early: bool = False  # posts messages of interleaved stages before waiting
    # Accesses of 2-byte numbers for experts' biases: per output of an expert, and per output of
    # its first product. In bf16, and in 8 bits with a scale for each tensor.
    expert_bias_accesses: tuple[int, int] = (0, 0)
    sends_tokens_once: bool = False  # to each node, however many experts there are chosen


COURSE = Profile("course")

# nanotron, early 2025: REDUCE_SCATTER tensor parallelism, a fused norm, flash attention; float32
# gradients are an accumulator beside the 16-bit ones; the loss is computed in float32.
NANOTRON = Profile(
    "nanotron", stage_rule="nanotron", mlp_tensors={**WIDE_TENSORS, "gelu": 3},
    recipe=PRECISIONS["bf16-fp32-gradients"], wire_bytes=WireBytes(4, 2), accumulate_bytes=10,
    all_reduces_gradients=True, prefetches_weights=False, sequence_parallel=True,
    zero_stages=(0, 1), has_interleaving=False, recompute_operators=(), offload_states=(),
    replicates_kv_heads=False, has_expert_folding=False,
)  # fmt: skip

# Megatron-LM: Korthikanti et al. 2022 (arXiv 2205.05198), Table 2: 10 sbh outside, 24 sbh and the
# scores' 5 as²b inside; main gradients in float32.
MEGATRON = Profile(
    "megatron",
    attention="plain",
    # SiLU is computed again in backward; gelu: 16 sbh for F = 4h.
    mlp_tensors={**WIDE_TENSORS, "swiglu": 3},
    recipe=PRECISIONS["bf16-fp32-gradients"],
    bucket_bytes=0,
    wire_bytes=WireBytes(4, 2),
    update_bytes=46,  # Adam 30, its norm and unscaling 12, zeroing 4
    accumulate_bytes=0,
    counts_tile_waves=True,
    prefetches_weights=False,  # in the papers; see `modernize_profile`
    zero_stages=(0, 1),
    recompute_operators=("norms",),
    offload_states=("optimizer",),
    overlaps_context=True,  # --cp-comm-type p2p, as it is by default
)

# torch 2.13's fully_shard, as `emit` writes it: float32 weights (counted as optimizer states) and
# a 16-bit copy; gradients are reduced and accumulated in float32. ZeRO-3's shard has no 16-bit
# copy, though 2 B are counted for it.
FSDP2 = replace(
    COURSE,
    name="fsdp2",
    stage_rule="equal",
    recipe=PRECISIONS["bf16-fp32-gradients"],
    bucket_bytes=0,
    wire_bytes=WireBytes(4, 2),
    update_bytes=40,  # Adam 28, its norm and clipping 12
    accumulate_bytes=10,
    has_interleaving=False,
    recompute_operators=(),
    offload_states=("parameters",),
    has_context_parallel=False,
    replicates_kv_heads=False,
    has_expert_folding=False,
    engine_rate="torchtitan",  # measured with the same fully_shard; the script does not compile
    is_compiled=False,
)

# torchtitan 0.3.0, on the same fully_shard: training.disable_cuda_graphs is False, and pipelines
# cannot be captured (its config/configs.py and trainer.py). `emit` turns compilation on.
TORCHTITAN = replace(
    FSDP2,
    name="torchtitan",
    stage_rule="megatron",
    is_compiled=True,
    captures_graph=True,
    zero_stages=(0, 2, 3),  # without a pipeline each micro-batch's gradients are scattered
    has_interleaving=True,
    recompute_operators=("norms+ffn",),  # its SelectiveAC keeps products and attention
    has_context_parallel=True,
    overlaps_context=True,
)

# DeepSpeed 0.19.8: gradients in the 16-bit type, unless data_types says otherwise, and a float32
# copy of a rank's shard for the step; ZeRO-1 and 2 gather weights after the step.
_FP32_COPIES = replace(PRECISIONS["bf16"], master=4 + 4)  # float32 copies of weights and gradients
DEEPSPEED = replace(
    COURSE, name="deepspeed", stage_rule="equal", recipe=_FP32_COPIES, prefetches_weights=False,
    has_interleaving=False, recompute_operators=(), offload_states=("optimizer", "parameters"),
    has_context_parallel=False, has_sequence_parallel=False, replicates_kv_heads=False,
    has_expert_folding=False,
)  # fmt: skip

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
    MEGATRON, name="engines", attention="flash", counts_tile_waves=False, prefetches_weights=True,
    sequence_parallel=True, zero_stages=(0, 1, 2, 3), overlaps_context=True, sends_tokens_once=True,
    posts_messages_early=True, expert_bias_accesses=(14, 4),
)  # fmt: skip
BY_ENGINE = {
    "megatron": ENGINES,
    **{
        name: replace(ENGINES, engine_rate=name, posts_messages_early=False)
        for name in ("torchtitan", "automodel", "fsdp")
    },
}

PROFILES = {
    profile.name: profile
    for profile in (COURSE, MEGATRON, NANOTRON, FSDP2, TORCHTITAN, DEEPSPEED, ENGINES)
}


def modernize_profile(profile: Profile) -> Profile:
    """Return `profile` as it trains now, if its rates come from older runs.

    Attention is fused. Megatron Core 0.19.2 gathers ZeRO-1's weights behind the next forward pass
    (--overlap-param-gather), and has ZeRO-2 and 3 (Megatron-FSDP).
    """
    profile = replace(profile, attention="flash")
    if profile.name == "megatron":
        profile = replace(profile, prefetches_weights=True, zero_stages=(0, 1, 2, 3))
    return profile
