"""Latent attention (MLA): keys and values of all heads are computed from one small latent a token.

    latent = norm(x W)        one small vector, shared by all heads
    keys, values = latent W   for each head, with its own rows of the matrix

For generation, only the latent is cached: 512 + 64 numbers a token in DeepSeek-V3, where the keys
and values of 128 heads would be 32,768. Rotated keys cannot be computed from the latent, since the
rotation depends on the position. So each head's queries and keys get `rotary` more features that
carry the position; all heads' keys share these features, which are cached beside the latent.

DeepSeek-AI 2024, "DeepSeek-V2" (arXiv 2405.04434), section 2.1, and 3.1.2 for the norms.

Shapes in names: B batch, S sequence, H hidden, A heads, N features of a head without position, P
features with position, D = N + P, X value head size, Q query latent, L key-value latent.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from shardlab.common.shapes import Config
from shardlab.gpt.attention import apply_rotary, compute_attention


class LatentAttention(nn.Module):
    """Causal self-attention whose keys and values are computed from one latent."""

    def __init__(self, config: Config, window: int | None = None):
        super().__init__()
        self.config, self.window = config, window
        hidden, heads, rank = config.hidden, config.heads, config.query_latent
        linear = partial(nn.Linear, bias=False)
        self.query_down = linear(hidden, rank) if rank else None
        self.query_norm = nn.RMSNorm(rank, config.norm_eps) if rank else None
        self.query = linear(rank or hidden, heads * config.head_size)  # A*D
        self.down = linear(hidden, config.latent + config.rotary)  # L+P
        self.down_norm = nn.RMSNorm(config.latent, config.norm_eps)
        self.key_value = linear(config.latent, heads * (config.nope_head_size + config.value_size))
        self.out = linear(heads * config.value_size, hidden)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Map [B, S, H] to [B, S, H]."""
        return self.attend_heads(*self.compute_latents(x_BSH))

    def compute_latents(self, x_BSH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what all heads share: query latent [B, S, Q] (or x), latent, position features.

        The key-value latent is [B, S, L], the keys' position features [B, S, P], not yet rotated.
        """
        q_BSQ = x_BSH if self.query_down is None else self.query_norm(self.query_down(x_BSH))
        sizes = [self.config.latent, self.config.rotary]
        latent_BSL, position_BSP = self.down(x_BSH).split(sizes, -1)
        return q_BSQ, self.down_norm(latent_BSL), position_BSP

    def attend_heads(self, q_BSQ: Tensor, latent_BSL: Tensor, position_BSP: Tensor) -> Tensor:
        """Compute the heads from the outputs of `compute_latents`, and attend: [B, S, H]."""
        c = self.config
        q_BASD, kv_BASX = (
            linear(x).unflatten(-1, (-1, size)).transpose(1, 2)
            for linear, x, size in (
                (self.query, q_BSQ, c.head_size),
                (self.key_value, latent_BSL, c.nope_head_size + c.value_size),
            )
        )
        q_BASN, q_BASP = q_BASD.split([c.nope_head_size, c.rotary], -1)
        k_BASN, v_BASX = kv_BASX.split([c.nope_head_size, c.value_size], -1)
        q_BASP, k_B1SP = (
            apply_rotary(split_rotary_pairs(x), c.rotary_base, yarn=c.yarn)
            for x in (q_BASP, position_BSP[:, None])
        )
        k_BASP = k_B1SP.expand(-1, k_BASN.shape[1], -1, -1)
        q_BASD, k_BASD = torch.cat((q_BASN, q_BASP), -1), torch.cat((k_BASN, k_BASP), -1)
        if c.yarn is not None and c.yarn.mscale:  # longer sequences need sharper attention
            q_BASD = q_BASD * c.yarn.score_scale
        dropout = c.dropout if self.training else 0.0
        y_BASX = compute_attention(q_BASD, k_BASD, v_BASX, dropout, self.window)
        return self.out(y_BASX.transpose(1, 2).flatten(-2))  # [B, S, A*X] @ [A*X, H]


def split_rotary_pairs(x_BASP: Tensor) -> Tensor:
    """Reorder DeepSeek's adjacent rotary pairs (0, 1), (2, 3), … to halves 0, 2, …, 1, 3, …."""
    return x_BASP.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
