"""The shapes of models: what a calculator needs to know of them, and what `model` builds.

The standard library alone, so that whoever only counts does not have to load torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


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

    def __post_init__(self) -> None:
        for name in ("vocab", "seq", "layers", "heads", "hidden", "key_value_heads", "ffn_width"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name}={value}: allowed are whole numbers above 0")
        if self.hidden % (2 * self.heads):
            raise ValueError(f"hidden={self.hidden}: allowed are multiples of {2 * self.heads}")
        if self.heads % self.key_value_heads:
            raise ValueError(f"kv_heads={self.kv_heads}: allowed are divisors of {self.heads}")
        if self.mlp not in ("gelu", "swiglu") or self.norm not in ("layer", "rms"):
            given = f"mlp={self.mlp!r}, norm={self.norm!r}"
            raise ValueError(f"{given}: allowed are 'gelu', 'swiglu'; 'layer', 'rms'")

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
}
