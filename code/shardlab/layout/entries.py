"""A ledger of a model's tensors: names, shapes, and how each axis of a layout may cut them.

Code that asks who holds a tensor, who counts it in a norm or what a checkpoint has reads this
ledger. Names and order are the plain GPT's. Tensor parallelism cuts as Megatron does (Shoeybi et
al. 2019, arXiv 1909.08053, section 3): queries, keys, values, up and gate by their outputs, out and
down by their inputs, embedding and head by vocabulary; norms, the matrices that make latents, the
biases of out and down, and the router are whole on every rank. Pipelines split layers, expert
parallelism splits experts. ZeRO cuts dimension 0, or a flat tensor of parameters in this order.

The standard library alone: a calculator needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod

from shardlab.common.shapes import Config

from .boxes import Box, share, whole

KINDS = "embedding", "attention", "ffn", "norms", "head"
COPIED = "key_value_heads"  # with more ranks than key-value heads, several ranks hold the same head


@dataclass(frozen=True)
class Entry:
    """A parameter of the plain model."""

    name: str
    shape: tuple[int, ...]
    kind: str  # one of KINDS; a router is "ffn"
    layer: int | None = None  # None: outside of the layers
    tp: int | None = None  # dimension that tensor parallelism cuts; None: whole on every rank
    along: str | None = None  # name of the size that is cut, as in Config
    units: int | None = None  # number of heads or columns, which the degree must divide
    partly: bool = False  # with sequence parallelism, gradients cover this rank's tokens alone
    expert: int | None = None  # number of its expert, if it is one's
    tied: str | None = None  # the entry with the same values, if on the same rank
    table: bool = False  # a token reads only a few rows

    def parts(self, tp: int = 1) -> int:
        """Return the number of equal parts over `tp` ranks; tp / parts ranks hold each part."""
        if self.tp is None:
            return 1
        return min(tp, self.units) if self.along == COPIED and self.units else tp

    def local(self, tp: int = 1) -> tuple[int, ...]:
        """Return the shape on one of `tp` ranks, padded as in Megatron if they do not divide it."""
        parts = self.parts(tp)
        return tuple(-(-n // parts) if d == self.tp else n for d, n in enumerate(self.shape))

    def box(self, rank: int = 0, tp: int = 1) -> Box:
        """Return the box of `rank` of `tp` ranks, if they divide the size."""
        parts = self.parts(tp)
        return share(whole(self.shape), self.tp, rank * parts // tp, parts)

    def elements(self, tp: int = 1) -> int:
        """Return the number of elements on one of `tp` ranks."""
        return prod(self.local(tp))


def ledger(config: Config) -> tuple[Entry, ...]:
    """Return all parameters of GPT(config), in the model's order; a tied head has an entry."""
    first, *last = outside(config)
    blocks = (e for layer in range(config.layers) for e in in_layer(config, layer))
    return (first, *blocks, *last)


def in_layer(config: Config, layer: int, experts: range | None = None) -> Iterator[Entry]:
    """Yield the entries of one layer, with all experts or with the given ones."""
    numbers = range(config.experts) if experts is None else experts
    alike = of_kind(config, config.experts > 0 and layer >= config.dense_layers)
    own = [entry for entry in alike if entry.expert is not None]
    for entry in alike:
        if entry.expert is None:
            yield replace(entry, name=f"blocks.{layer}.{entry.name}", layer=layer)
        elif entry is own[0]:
            for number, one in product(numbers, own):
                inside = one.name.replace(".experts.0.", f".experts.{number}.")
                yield replace(one, name=f"blocks.{layer}.{inside}", layer=layer, expert=number)


@lru_cache(maxsize=256)
def of_kind(config: Config, sparse: bool) -> tuple[Entry, ...]:
    """Return the entries of a kind of layer, with one expert that stands for all, for counting.

    256 experts in each of 58 layers are 45,000 entries, but only two kinds of layer. Names are
    relative to the layer: "ffn_norm.weight".
    """
    return tuple(_layer(config, sparse))


@lru_cache(maxsize=256)
def outside(config: Config) -> tuple[Entry, ...]:
    """Return the entries outside of the layers: embedding, last norm, head."""
    vocabulary, tied = (config.vocab, config.hidden), "embedding.weight" if config.tied else None
    cut = {"tp": 0, "along": "vocab", "units": config.vocab}
    first = Entry("embedding.weight", vocabulary, "embedding", **cut)
    last = Entry("head.weight", vocabulary, "head", **cut, tied=tied)
    return first, *_norm(config, "norm"), last


def _layer(c: Config, sparse: bool) -> Iterator[Entry]:
    yield from _norm(c, "attention_norm")
    yield from _attention(c) if c.latent is None else _latent_attention(c)
    yield from _norm(c, "ffn_norm")
    if not sparse:
        yield from _network(c, "ffn", c.ffn_width, "ffn_width")
        return
    yield Entry("ffn.router.score.weight", (c.experts, c.hidden), "ffn")
    for entry in _network(c, "ffn.experts.0", c.expert_width, "expert_width"):
        yield replace(entry, expert=0)
    if c.shared_experts:
        yield from _network(c, "ffn.shared", c.shared_experts * c.expert_width, "expert_width")


def _attention(c: Config) -> Iterator[Entry]:
    wide, narrow = c.heads * c.head_size, c.key_value_heads * c.head_size
    yield from _columns(c, "attention.query", "attention", wide, "heads")
    for name in ("key", "value"):
        yield from _columns(c, f"attention.{name}", "attention", narrow, "key_value_heads")
    for name in ("query_norm", "key_norm") if c.qk_norm else ():
        # Its gradient is all-reduced over all ranks' heads where the weight enters the region.
        yield Entry(f"attention.{name}.weight", (c.head_size,), "norms")
    yield from _rows(c, "attention.out", "attention", wide, "heads")


def _latent_attention(c: Config) -> Iterator[Entry]:
    """Yield latent attention's entries; those that make the latents are whole on every rank."""
    enters = c.hidden
    if c.query_latent is not None:
        enters = c.query_latent
        yield Entry("attention.query_down.weight", (enters, c.hidden), "attention", partly=True)
        yield Entry("attention.query_norm.weight", (enters,), "norms", partly=True)
    wide, width = c.heads * c.head_size, c.nope_head_size + c.value_size
    cut = {"tp": 0, "along": "heads", "units": c.heads}
    yield Entry("attention.query.weight", (wide, enters), "attention", **cut)
    down = c.latent + c.rotary
    yield Entry("attention.down.weight", (down, c.hidden), "attention", partly=True)
    yield Entry("attention.down_norm.weight", (c.latent,), "norms", partly=True)
    shape = c.heads * width, c.latent
    yield Entry("attention.key_value.weight", shape, "attention", **cut)
    yield from _rows(c, "attention.out", "attention", c.heads * c.value_size, "heads")


def _norm(c: Config, name: str) -> Iterator[Entry]:
    for what in ("weight", "bias") if c.norm == "layer" and c.bias else ("weight",):
        yield Entry(f"{name}.{what}", (c.hidden,), "norms", partly=True)


def _network(c: Config, name: str, width: int, along: str) -> Iterator[Entry]:
    for first in ("up", "gate") if c.mlp == "swiglu" else ("up",):
        yield from _columns(c, f"{name}.{first}", "ffn", width, along)
    yield from _rows(c, f"{name}.down", "ffn", width, along)


def _columns(c: Config, name: str, kind: str, outputs: int, along: str) -> Iterator[Entry]:
    cut = {"tp": 0, "along": along, "units": getattr(c, along)}
    yield Entry(f"{name}.weight", (outputs, c.hidden), kind, **cut)
    if c.bias:
        yield Entry(f"{name}.bias", (outputs,), kind, **cut)


def _rows(c: Config, name: str, kind: str, inputs: int, along: str) -> Iterator[Entry]:
    units = getattr(c, along)
    yield Entry(f"{name}.weight", (c.hidden, inputs), kind, tp=1, along=along, units=units)
    if c.bias:  # added after the sum
        yield Entry(f"{name}.bias", (c.hidden,), kind, partly=True)
