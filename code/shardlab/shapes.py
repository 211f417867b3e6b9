"""The shapes of models: what a calculator needs to know of them, and what `model` builds.

The standard library alone, so that whoever only counts does not have to load torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from shardlab.arguments import (
    LAYERS,
    RANKS,
    SIZES,
    check_flag,
    check_number,
    check_one_of,
    check_whole,
    given,
)


@dataclass(frozen=True)
class Config:
    """The shape of a model. Symbols in brackets are those of the course's notation page."""

    vocab: int = 256  # [V] entries; 256 serves bytes
    seq: int = 128  # [s] longest sequence, in tokens
    layers: int = 4  # [L]
    heads: int = 4  # [a]
    hidden: int = 128  # [h]
    kv_heads: int | None = None  # key-value heads; None: one for each head
    ffn: int | None = None  # width of the feed-forward network; None: four times hidden
    mlp: str = "gelu"  # or "swiglu"
    norm: str = "layer"  # or "rms"
    bias: bool = True  # in linear layers and LayerNorm
    tied: bool = True  # the output layer is the embedding, transposed
    dropout: float = 0.0
    rotary_base: float = 10_000.0
    experts: int = 0  # [E] in each layer; 0: one feed-forward network for all tokens
    experts_per_token: int = 2  # [k]
    expert_ffn: int | None = None  # width of one expert; None: that of the feed-forward network
    shared_experts: int = 0  # experts that see every token, as one network of their joint width
    dense_layers: int = 0  # the first layers, which have no experts
    router: str = "softmax"  # or "sigmoid"
    capacity: float | None = None  # times a fair share: what an expert takes; None: all that come

    def __post_init__(self) -> None:
        sizes = {"vocab": self.vocab, "seq": self.seq, "hidden": self.hidden}
        check_whole(1, SIZES, **sizes, **given(ffn=self.ffn, expert_ffn=self.expert_ffn))
        check_whole(1, LAYERS, layers=self.layers, heads=self.heads)
        check_whole(1, self.heads, **given(kv_heads=self.kv_heads))
        check_flag(bias=self.bias, tied=self.tied)
        check_number(0, 1, dropout=self.dropout)
        check_number(rotary_base=self.rotary_base)
        check_one_of(("gelu", "swiglu"), mlp=self.mlp)
        check_one_of(("layer", "rms"), norm=self.norm)
        check_whole(0, LAYERS, experts=self.experts)
        if self.hidden % (2 * self.heads):
            raise ValueError(f"hidden={self.hidden}: allowed are multiples of {2 * self.heads}")
        if self.heads % self.key_value_heads:
            raise ValueError(f"kv_heads={self.kv_heads}: allowed are divisors of {self.heads}")
        if self.experts:
            self._check_experts()

    def _check_experts(self) -> None:
        check_whole(1, RANKS // self.layers, experts=self.experts)  # layers times experts
        check_whole(1, self.experts, experts_per_token=self.experts_per_token)
        check_whole(0, LAYERS, shared_experts=self.shared_experts)
        check_whole(0, self.layers - 1, dense_layers=self.dense_layers)
        check_one_of(("softmax", "sigmoid"), router=self.router)
        check_number(**given(capacity=self.capacity))

    @property
    def head_size(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads

    @property
    def key_value_heads(self) -> int:
        """Heads of keys and values: as many as of queries, unless these share them."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def ffn_width(self) -> int:
        """Width of the feed-forward network [F]."""
        return 4 * self.hidden if self.ffn is None else self.ffn

    @property
    def expert_width(self) -> int:
        """Width of one expert's feed-forward network."""
        return self.ffn_width if self.expert_ffn is None else self.expert_ffn

    @property
    def chosen_width(self) -> int:
        """Width of the experts that one token goes through: those it chose, and the shared ones."""
        return (self.experts_per_token + self.shared_experts) * self.expert_width

    def places(self, seq: int) -> int | None:
        """How many of a sequence's `seq` tokens an expert takes; None: all that come.

        The fair share is seq * k / E. It is rounded up, so that capacity=1 never asks for less.
        """
        if self.capacity is None:
            return None
        return ceil(self.capacity * seq * self.experts_per_token / self.experts)


# Dubey et al. 2024 (arXiv 2407.21783), Table 3; the 8192 tokens of its pre-training.
_LLAMA = Config(128_256, 8192, 32, 32, 4096, 8, 14_336, "swiglu", "rms", False, False, 0.0, 5e5)

PRESETS: dict[str, Config] = {  # the first three for lessons, with bytes as tokens
    "nano": Config(seq=64, layers=2, heads=2, hidden=64),
    "micro": Config(seq=128, layers=4, heads=4, hidden=128),
    "mini": Config(seq=128, layers=10, heads=8, hidden=256),
    # Radford et al. 2019, Table 2; Brown et al. 2020 (arXiv 2005.14165), Table 2.1; both learned
    # their positions.
    "gpt-2": Config(vocab=50_257, seq=1024, layers=12, heads=12, hidden=768),
    "gpt-3-175b": Config(vocab=50_257, seq=2048, layers=96, heads=96, hidden=12_288),
    "llama-3-8b": _LLAMA,
    "llama-3-70b": replace(_LLAMA, layers=80, heads=64, hidden=8192, ffn=28_672),
    "llama-3-405b": replace(_LLAMA, layers=126, heads=128, hidden=16_384, ffn=53_248),
    # Jiang et al. 2024 (arXiv 2401.04088), Table 1: 46.7 billion parameters, 12.9 for a token.
    "mixtral-8x7b": Config(
        32_000, 32_768, 32, 32, 4096, 8, 14_336, "swiglu", "rms", False, False, 0.0, 1e6, 8
    ),
}
