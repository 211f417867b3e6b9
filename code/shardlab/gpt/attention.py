"""Causal self-attention of the plain GPT.

Three variants are supported: grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245), QK
norm, a norm of each head's queries and keys (Dehghani et al. 2023, arXiv 2302.05442, section 2),
and sliding-window attention (Beltagy et al. 2020, arXiv 2004.05150). The head size is independent:
A*D need not equal H. Latent attention is in `latent`.

Shapes in names: B batch, S sequence, H hidden, A query heads, K key-value heads, D size of a head.
"""

from __future__ import annotations

from math import ceil, floor, log, pi

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardlab.common.shapes import Config, Yarn


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped keys and values."""

    def __init__(self, config: Config, window: int | None = None):
        super().__init__()
        self.config, self.window = config, window
        hidden, size = config.hidden, config.head_size
        wide, narrow = config.heads * size, config.key_value_heads * size  # A*D, K*D
        self.query = nn.Linear(hidden, wide, config.bias)
        self.key = nn.Linear(hidden, narrow, config.bias)
        self.value = nn.Linear(hidden, narrow, config.bias)
        self.query_norm = nn.RMSNorm(size, config.norm_eps) if config.qk_norm else None
        self.key_norm = nn.RMSNorm(size, config.norm_eps) if config.qk_norm else None
        self.out = nn.Linear(wide, hidden, config.bias)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Map [B, S, H] to [B, S, H]."""
        dropout = self.config.dropout if self.training else 0.0
        y_BASD = compute_attention(*self.project_heads(x_BSH), dropout, self.window)
        return self.out(y_BASD.transpose(1, 2).flatten(-2))  # [B, S, A*D] @ [A*D, H]

    def project_heads(self, x_BSH: Tensor, positions_S: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return queries [B, A, S, D], keys and values [B, K, S, D], rotated to `positions_S`."""
        # The number of heads follows from the widths: tensor parallelism may have sharded heads.
        q_BASD, k_BKSD, v_BKSD = (
            linear(x_BSH).unflatten(-1, (-1, self.config.head_size)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        if self.query_norm is not None:  # over the D features of a head; heads share the weights
            q_BASD, k_BKSD = self.query_norm(q_BASD), self.key_norm(k_BKSD)
        rotary = self.config.rotary_base, positions_S, self.config.yarn
        return apply_rotary(q_BASD, *rotary), apply_rotary(k_BKSD, *rotary), v_BKSD


def compute_attention(
    q_BASD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, dropout: float, window: int | None
) -> Tensor:
    """Return causal attention, [B, A, S, D], over the last `window` tokens, the query's included.

    window=None: over all tokens up to the query. Values may have another head size than queries and
    keys; the result has the values' size.
    """
    seq, grouped = q_BASD.shape[-2], q_BASD.shape[1] != k_BKSD.shape[1]
    seen: dict = {"is_causal": True}
    if window is not None and window < seq:
        before_SS = torch.ones(seq, seq, dtype=torch.bool, device=q_BASD.device).tril()
        seen = {"attn_mask": before_SS.triu(1 - window)}
    return F.scaled_dot_product_attention(
        q_BASD, k_BKSD, v_BKSD, dropout_p=dropout, enable_gqa=grouped, **seen
    )


def apply_rotary(
    x_BASD: Tensor, base: float, positions_S: Tensor | None = None, yarn: Yarn | None = None
) -> Tensor:
    """Apply rotary positions: rotate each feature pair by an angle proportional to the position.

    positions_S: the tokens' positions; None: 0, 1, 2, … yarn: settings for longer contexts. Su et
    al. 2021 (arXiv 2104.09864), section 3.2; pairs are (i, i + D/2), as in Llama's code.
    """
    sequence, size = x_BASD.shape[-2:]
    steps_D = torch.arange(0, size, 2, device=x_BASD.device, dtype=torch.float32) / size
    if positions_S is None:
        positions_S = torch.arange(sequence, device=x_BASD.device)
    speeds_D = base**-steps_D if yarn is None else scale_rotary_speeds(base**-steps_D, base, yarn)
    angles_SD = torch.outer(positions_S.to(torch.float32), speeds_D)  # [S, D/2]
    cos_SD, sin_SD = angles_SD.cos(), angles_SD.sin()
    if yarn is not None:
        cos_SD, sin_SD = yarn.attention_factor * cos_SD, yarn.attention_factor * sin_SD
    cos_SD, sin_SD = cos_SD.to(x_BASD.dtype), sin_SD.to(x_BASD.dtype)
    a, b = x_BASD.chunk(2, dim=-1)  # each [B, A, S, D/2]
    return torch.cat((a * cos_SD - b * sin_SD, a * sin_SD + b * cos_SD), dim=-1)


def scale_rotary_speeds(speeds_D: Tensor, base: float, yarn: Yarn) -> Tensor:
    """Return YaRN's rotation speeds, [D/2] angles a token, for sequences `factor` times as long.

    Pairs that rotate often within the original length encode local order, and keep their speed.
    Pairs that never complete a turn encode the absolute position: their speed is divided by
    `factor`, so that the longest sequence covers the same angle as before. Speeds in between are
    interpolated linearly in the pair's index, as in the code of YaRN's models (Peng et al. 2023,
    arXiv 2309.00071, section 3.2).
    """

    def find_pair(turns: float) -> float:  # index of the pair with `turns` turns in the old length
        return len(speeds_D) * log(yarn.seq / (2 * pi * turns)) / log(base)

    first = max(floor(find_pair(yarn.beta_fast)), 0)
    last = min(ceil(find_pair(yarn.beta_slow)), 2 * len(speeds_D) - 1)
    numbers_D = torch.arange(len(speeds_D), device=speeds_D.device, dtype=torch.float32)
    part_D = ((numbers_D - first) / max(last - first, 1e-3)).clamp(0, 1)
    return speeds_D * (1 - part_D) + speeds_D / yarn.factor * part_D
