"""The shapes of models, for calculators and for `gpt.model`.

Imports only the standard library, so that calculators do not have to load torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, log

from shardlab.common.arguments import (
    MAX_COUNT,
    MAX_LAYERS,
    MAX_SIZE,
    check_integer,
    check_number,
    check_one_of,
    drop_none,
)


@dataclass(frozen=True)
class Yarn:
    """YaRN's settings of rotary positions for longer sequences. See `attention.apply_rotary`.

    Peng et al. 2023, "YaRN" (arXiv 2309.00071).
    """

    factor: float  # the speed of slow pairs is divided by it
    seq: int  # tokens of the original, shorter sequences
    beta_fast: float = 32.0  # pairs with at least this many turns in `seq` tokens keep their speed
    beta_slow: float = 1.0  # pairs with at most this many turns rotate `factor` times as slowly
    attention_factor: float = 1.0  # factor on cosines and sines
    mscale: float = 0.0  # latent attention: factor (0.1 mscale ln factor + 1)^2 on the scores

    def __post_init__(self) -> None:
        check_number(1, factor=self.factor)
        check_integer(1, MAX_SIZE, seq=self.seq)

    @property
    def score_scale(self) -> float:
        """Factor on latent attention's scores, as in DeepSeek's code and in transformers."""
        return (0.1 * self.mscale * log(self.factor) + 1) ** 2


@dataclass(frozen=True)
class Config:
    """The shape of a model. Symbols in brackets are those of the course's notation page."""

    vocab: int = 256  # [V] entries; 256 suffice for bytes
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
    capacity: float | None = None  # factor on an expert's fair share of tokens; None: no limit
    expert_groups: int = 1  # number of equal groups of experts; a token first chooses groups
    groups_per_token: int = 1  # number of groups that a token chooses
    routed_scale: float = 1.0  # factor on the weights of the chosen experts
    head: int | None = None  # [D] size of a head; None: hidden over heads
    qk_norm: bool = False  # an RMSNorm on each head's queries, and one on its keys
    window: int | None = None  # sliding window in tokens, the query's included; None: no window
    full_every: int | None = None  # every n-th layer has no window; None: all have it
    latent: int | None = None  # size of the key-value latent; None: no latent attention
    query_latent: int | None = None  # size of the query latent; None: queries have none
    rotary: int | None = None  # with latents: a head's position features, beside its `head`
    value: int | None = None  # with latents: size of a head of values; None: `head`
    norm_eps: float = 1e-5  # added to the mean of squares, or the variance
    yarn: Yarn | None = None  # rotary positions for longer sequences; None: unchanged

    def __post_init__(self) -> None:
        sizes = {"vocab": self.vocab, "seq": self.seq, "hidden": self.hidden}
        check_integer(1, MAX_SIZE, **sizes, **drop_none(ffn=self.ffn, expert_ffn=self.expert_ffn))
        check_integer(1, MAX_LAYERS, layers=self.layers, heads=self.heads)
        check_integer(1, self.heads, **drop_none(kv_heads=self.kv_heads))
        check_number(0, 1, dropout=self.dropout)
        check_number(rotary_base=self.rotary_base)
        check_one_of(("gelu", "swiglu"), mlp=self.mlp)
        check_one_of(("layer", "rms"), norm=self.norm)
        check_integer(0, MAX_LAYERS, experts=self.experts)
        if self.head is None and self.hidden % (2 * self.heads):
            raise ValueError(f"hidden={self.hidden}: must be a multiple of {2 * self.heads}")
        if self.heads % self.key_value_heads:
            raise ValueError(f"kv_heads={self.kv_heads}: must divide heads={self.heads}")
        self._check_attention()
        if self.experts:
            self._check_experts()

    def _check_attention(self) -> None:
        optional = {"head": self.head, "latent": self.latent, "rotary": self.rotary}
        optional |= {"query_latent": self.query_latent, "value": self.value}
        check_integer(1, MAX_SIZE, **drop_none(window=self.window, **optional))
        check_integer(1, MAX_LAYERS, **drop_none(full_every=self.full_every))
        check_number(norm_eps=self.norm_eps)
        for name in ("query_latent", "rotary", "value") if self.latent is None else ():
            if optional[name] is not None:
                raise ValueError(f"{name}={optional[name]}: must be None unless latent is set")
        if self.latent is not None:
            for name, only in (("kv_heads", None), ("qk_norm", False), ("bias", False)):
                if getattr(self, name) is not only:
                    value = getattr(self, name)
                    raise ValueError(f"{name}={value!r}: must be {only} with latent attention")
            if self.rotary is None:
                raise ValueError("rotary=None: must be an even size with latent attention")
        for name in ("head", "rotary"):  # rotary positions rotate pairs of features
            if (size := optional[name]) and size % 2:
                raise ValueError(f"{name}={size}: must be even")

    def _check_experts(self) -> None:
        check_integer(1, MAX_COUNT // self.layers, experts=self.experts)  # bounds layers * experts
        check_integer(1, self.experts, experts_per_token=self.experts_per_token)
        check_integer(0, MAX_LAYERS, shared_experts=self.shared_experts)
        check_integer(0, self.layers - 1, dense_layers=self.dense_layers)
        check_one_of(("softmax", "sigmoid"), router=self.router)
        check_number(**drop_none(capacity=self.capacity))
        check_number(routed_scale=self.routed_scale)
        check_integer(1, self.experts, expert_groups=self.expert_groups)
        check_integer(1, self.expert_groups, groups_per_token=self.groups_per_token)
        if self.expert_groups == 1:
            return
        each, rest = divmod(self.experts, self.expert_groups)
        if rest or each < 2:  # a group's score is the sum of its best two experts' scores
            rule = f"must divide experts={self.experts} into groups of at least 2"
            raise ValueError(f"expert_groups={self.expert_groups}: {rule}")
        if self.experts_per_token > (most := each * self.groups_per_token):
            rule = (
                f"must be at most {most}, the experts in groups_per_token={self.groups_per_token}"
            )
            raise ValueError(f"experts_per_token={self.experts_per_token}: {rule} groups")

    @property
    def nope_head_size(self) -> int:
        """Width of one head, without latent attention's position features."""
        return self.hidden // self.heads if self.head is None else self.head

    @property
    def head_size(self) -> int:
        """Width of one head of queries or keys."""
        return self.nope_head_size + (self.rotary or 0)

    @property
    def value_size(self) -> int:
        """Width of one head of values."""
        return self.nope_head_size if self.value is None else self.value

    def get_window(self, layer: int) -> int | None:
        """Return the sliding window of a layer, in tokens; None: no window."""
        full = self.full_every is not None and (layer + 1) % self.full_every == 0
        return None if full else self.window

    @property
    def key_value_heads(self) -> int:
        """Number of key-value heads, by default that of query heads."""
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
    def active_expert_width(self) -> int:
        """Total width of the experts that process one token, chosen and shared ones."""
        return (self.experts_per_token + self.shared_experts) * self.expert_width

    def get_expert_capacity(self, seq: int) -> int | None:
        """Return an expert's capacity, in tokens of a sequence of `seq` tokens; None: no limit.

        It is `capacity` times the fair share, seq * k / E, rounded up.
        """
        if self.capacity is None:
            return None
        return ceil(self.capacity * seq * self.experts_per_token / self.experts)


# Dubey et al. 2024 (arXiv 2407.21783), Table 3; the 8192 tokens of its pre-training.
_LLAMA = Config(128_256, 8192, 32, 32, 4096, 8, 14_336, "swiglu", "rms", False, False, 0.0, 5e5)

PRESETS: dict[str, Config] = {  # the first three are for lessons, with bytes as tokens
    "nano": Config(seq=64, layers=2, heads=2, hidden=64),
    "micro": Config(seq=128, layers=4, heads=4, hidden=128),
    "mini": Config(seq=128, layers=10, heads=8, hidden=256),
    # Radford et al. 2019, Table 2; Brown et al. 2020 (arXiv 2005.14165), Table 2.1; the originals
    # have learned positions.
    "gpt-2": Config(vocab=50_257, seq=1024, layers=12, heads=12, hidden=768),
    "gpt-3-175b": Config(vocab=50_257, seq=2048, layers=96, heads=96, hidden=12_288),
    # The released model's config.json, at 8192 tokens: without its rotary positions for 131,072.
    "llama-3.2-1b": replace(_LLAMA, layers=16, hidden=2048, ffn=8192, tied=True),
    "llama-3-8b": _LLAMA,
    "llama-3-70b": replace(_LLAMA, layers=80, heads=64, hidden=8192, ffn=28_672),
    "llama-3-405b": replace(_LLAMA, layers=126, heads=128, hidden=16_384, ffn=53_248),
    # Jiang et al. 2024 (arXiv 2401.04088), Table 1: 46.7 billion parameters, 12.9 for a token.
    "mixtral-8x7b": Config(
        32_000, 32_768, 32, 32, 4096, 8, 14_336, "swiglu", "rms", False, False, 0.0, 1e6, 8
    ),
    # Yang et al. 2025 (arXiv 2505.09388), Table 2, section 3.2; the released model's config.json.
    "qwen3-30b-a3b": Config(
        151_936, 32_768, 48, 32, 2048, 4, 6144, "swiglu", "rms", False, False, 0.0, 1e6, 128, 8,
        768, head=128, qk_norm=True, norm_eps=1e-6,
    ),
    # DeepSeek-AI 2024 (arXiv 2412.19437), section 4.2; the pre-training's 4096 tokens, so without
    # YaRN, and without the module for multi-token prediction.
    "deepseek-v3": Config(
        129_280, 4096, 61, 128, 7168, None, 18_432, "swiglu", "rms", False, False, 0.0, 1e4, 256, 8,
        2048, 1, 3, "sigmoid", None, 8, 4, 2.5, head=128, latent=512, query_latent=1536, rotary=64,
        value=128, norm_eps=1e-6,
    ),
}  # fmt: skip
