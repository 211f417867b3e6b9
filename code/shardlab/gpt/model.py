"""A plain GPT for one device.

Pre-norm blocks, rotary positions, grouped or latent attention, GELU or SwiGLU, one feed-forward
network or experts, tied or untied embeddings: enough for the shapes of GPT-2, GPT-3, Llama 3,
Mixtral, Qwen3 and DeepSeek-V3. Everything parallel in this course is applied to this model from
outside.

Shapes in names: B batch, S sequence, H hidden, F width of the feed-forward network, V vocabulary, E
experts, C experts that a token chooses, R tokens of one expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardlab.common.shapes import PRESETS, Config  # noqa: F401 - imported from here
from shardlab.gpt.attention import Attention, apply_rotary  # noqa: F401 - imported from here
from shardlab.gpt.latent import LatentAttention
from shardlab.gpt.router import Router


class FeedForward(nn.Module):
    """A feed-forward network: two matrices with GELU, or three with SwiGLU (arXiv 2002.05202)."""

    def __init__(self, config: Config, width: int | None = None):
        super().__init__()
        width = width or config.ffn_width
        shape = config.hidden, width, config.bias
        self.up = nn.Linear(*shape)
        self.gate = nn.Linear(*shape) if config.mlp == "swiglu" else None
        self.down = nn.Linear(width, config.hidden, config.bias)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Map [B, S, H] to [B, S, H]."""
        y_BSF = self.up(x_BSH)  # [B, S, H] @ [H, F]
        y_BSF = F.gelu(y_BSF) if self.gate is None else F.silu(self.gate(x_BSH)) * y_BSF
        return self.down(y_BSF)  # [B, S, F] @ [F, H]


class Experts(nn.Module):
    """E feed-forward networks; each token is processed by the C that the router chooses."""

    def __init__(self, config: Config):
        super().__init__()
        width, shared = config.expert_width, config.shared_experts
        self.router = Router(config)
        self.experts = nn.ModuleList(FeedForward(config, width) for _ in range(config.experts))
        self.shared = FeedForward(config, shared * width) if shared else None

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Map [B, S, H] to [B, S, H]; zeros for a token that all its experts dropped."""
        _, chosen_BSC, weights_BSC = self.router(x_BSH)
        chosen_BSC = self.router.apply_capacity(chosen_BSC)
        y_BSH = torch.zeros_like(x_BSH) if self.shared is None else self.shared(x_BSH)
        for number, expert in enumerate(self.experts):
            b_R, s_R, c_R = (chosen_BSC == number).nonzero(as_tuple=True)  # in order of tokens
            y_RH = weights_BSC[b_R, s_R, c_R, None] * expert(x_BSH[b_R, s_R])
            y_BSH = y_BSH.index_put((b_R, s_R), y_RH, accumulate=True)
        return y_BSH


class Block(nn.Module):
    """One pre-norm layer: attention and a feed-forward network, each with a residual connection."""

    def __init__(self, config: Config, layer: int = 0):
        super().__init__()
        self.attention_norm = _make_norm(config)
        mixed = Attention if config.latent is None else LatentAttention
        self.attention = mixed(config, config.get_window(layer))
        self.ffn_norm = _make_norm(config)
        sparse = config.experts and layer >= config.dense_layers
        self.ffn = Experts(config) if sparse else FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Map [B, S, H] to [B, S, H]."""
        x_BSH = x_BSH + self.dropout(self.attention(self.attention_norm(x_BSH)))
        return x_BSH + self.dropout(self.ffn(self.ffn_norm(x_BSH)))


def _make_norm(config: Config) -> nn.Module:
    if config.norm == "rms":
        return nn.RMSNorm(config.hidden, eps=config.norm_eps)
    return nn.LayerNorm(config.hidden, eps=config.norm_eps, bias=config.bias)


class GPT(nn.Module):
    """The plain GPT, from tokens to logits."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = _make_norm(config)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        for name, parameter in self.named_parameters():  # GPT-2's initialization
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        if config.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Map token ids [B, S] to logits [B, S, V]."""
        x_BSH = self.embedding(tokens_BS)
        for block in self.blocks:
            x_BSH = block(x_BSH)
        return self.head(self.norm(x_BSH))  # [B, S, H] @ [H, V]


IGNORED = -100  # target of tokens that the loss ignores: torch's default `ignore_index`


def loss(logits_BSV: Tensor, targets_BS: Tensor, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy over all tokens whose target is not IGNORED.

    reduction: "mean" or "sum". 16-bit logits are converted to float32, for a precise softmax.
    """
    if logits_BSV.dtype in (torch.bfloat16, torch.float16):
        logits_BSV = logits_BSV.float()
    return F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten(), reduction=reduction)


def count_parameters(config: Config) -> int:
    """Count the parameters of a model of this shape, tied ones once (on the meta device)."""
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(config).parameters())
