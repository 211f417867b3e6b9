"""A block of attention; `contract` covers attention over a sequence that is cut over ranks."""

from __future__ import annotations

import torch

from shardlab import ranks
from shardlab.context_parallel.kernel import block_attention


def block():
    q = torch.randn(1, 2, 6, 5, dtype=torch.float64, device=ranks.device())
    block_attention(q, q, q, causal=True)
