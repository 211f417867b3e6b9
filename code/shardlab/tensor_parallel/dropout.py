"""Dropout inside of attention when its heads are on different ranks.

Outside of a region all ranks have the same activations and must drop the same of them: they do,
when their generators are in the same state. Inside, each rank has scores of its own heads and needs
a mask of its own, and the generators must be in the same state afterwards. Two ways:

    "equal"   every rank draws the whole mask, as one process does, and keeps its heads' part
    "own"     every rank draws for its own heads, from a seed of its own

The first has the bits of one process on the CPU, whose attention with dropout is put together from
plain operations. It costs the drawing and, for a moment, the memory of all heads' masks; kernels
that draw inside of themselves, as a GPU's do, cannot be used. The second is what one trains with:
random in the same way, other numbers than those of one process. Both survive recomputation.

Shoeybi et al. 2019 (arXiv 1909.08053), section 3 and appendix B.2. Shapes in names: B batch, S
sequence, A heads, K key-value heads, D size of a head; a, k this rank's share of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardlab.common import gpu
from shardlab.gpt.latent import LatentAttention
from shardlab.gpt.model import Attention

Group = dist.ProcessGroup
DROPOUTS = "equal", "own"


def drop_by_heads(attention: Attention | LatentAttention, group: Group, kind: str) -> None:
    """Let `attention`, which has this rank's heads, draw its dropout in one of the two ways."""
    assert kind in DROPOUTS
    attention.forward = partial(_forward, attention, group, kind)  # which a copy has of its own


def _forward(
    attention: Attention | LatentAttention, group: Group, kind: str, x_BSH: Tensor
) -> Tensor:
    plain = partial(type(attention).forward, attention)
    if not attention.training:
        return plain(x_BSH)
    return (_equal if kind == "equal" else _own)(plain, x_BSH, group)


def _equal(plain: Callable[[Tensor], Tensor], x_BSH: Tensor, group: Group) -> Tensor:
    with _WholeMask(group):
        return plain(x_BSH)


def _own(plain: Callable[[Tensor], Tensor], x_BSH: Tensor, group: Group) -> Tensor:
    # All ranks draw the same number here, so their generators stay in step. Recomputation, which
    # sets the generator back to where it was, draws the same again.
    seed = int(torch.randint(2**62, (), device="cpu")) + dist.get_rank(group)
    generator = torch.default_generator
    if gpu.is_on(x_BSH.device):
        generator = gpu.module().default_generators[x_BSH.device.index]
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        return plain(x_BSH)
    finally:
        generator.set_state(state)


class _WholeMask(TorchFunctionMode):
    """Attention inside of it drops what one process would drop of these heads."""

    def __init__(self, group: Group):
        super().__init__()
        self.group = group

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return attend(*args, group=self.group, **kwargs)
        return func(*args, **(kwargs or {}))


def attend(
    q_BaSD: Tensor,
    k_BkSD: Tensor,
    v_BkSD: Tensor,
    *,
    group: Group,
    dropout_p: float,
    enable_gqa: bool,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
) -> Tensor:
    """Attention of this rank's heads, [B, a, S, D], with their part of one process's mask.

    The operations are those of torch's own attention where no fused kernel serves: in float32 for
    numbers of 16 bits, half of the scale on queries and half on keys.
    """
    assert is_causal == (attn_mask is None)
    dtype = q_BaSD.dtype
    if dtype in (torch.bfloat16, torch.float16):
        q_BaSD, k_BkSD, v_BkSD = (x.float() for x in (q_BaSD, k_BkSD, v_BkSD))
    if enable_gqa:  # [B, k, S, D] to [B, a, S, D]
        repeats = q_BaSD.shape[1] // k_BkSD.shape[1]
        k_BkSD, v_BkSD = (x.repeat_interleave(repeats, 1) for x in (k_BkSD, v_BkSD))
    batch, heads, sequence, size = q_BaSD.shape
    half = math.sqrt(1 / math.sqrt(size))
    scores_BaSS = (q_BaSD * half) @ (k_BkSD * half).transpose(-2, -1)  # [.., S, D] @ [.., D, S]
    if attn_mask is None:
        later_SS = scores_BaSS.new_full((sequence, sequence), -math.inf).triu_(1)
    else:
        later_SS = torch.zeros_like(scores_BaSS[0, 0]).masked_fill_(~attn_mask, -math.inf)
    weights_BaSS = (scores_BaSS + later_SS).softmax(-1)
    full = batch, heads * group.size(), sequence, sequence
    mask_BASS = weights_BaSS.new_empty(full).bernoulli_(1 - dropout_p)
    begin = dist.get_rank(group) * heads
    mask_BaSS = mask_BASS[:, begin : begin + heads] / (1 - dropout_p)
    return ((weights_BaSS * mask_BaSS) @ v_BkSD).to(dtype)  # [.., S, S] @ [.., S, D]
