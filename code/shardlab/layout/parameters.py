"""A list of a model's parameters: names, shapes, and how each axis of a layout may cut them.

It says which ranks hold a tensor, which count it in a norm and what a checkpoint contains. Names
and order are the plain GPT's. Tensor parallelism cuts as Megatron does (Shoeybi et
al. 2019, arXiv 1909.08053, section 3): queries, keys, values, up and gate by their outputs, out and
down by their inputs, embedding and head by vocabulary; norms, the matrices that make latents, the
biases of out and down, and the router are whole on every rank. Pipelines split layers, expert
parallelism splits experts. ZeRO cuts dimension 0, or a flat tensor of parameters in this order.

Imports only the standard library: a calculator needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod

from shardlab.common.shapes import Config

from .boxes import Box, make_full_box, take_shard

PARAMETER_KINDS = "embedding", "attention", "ffn", "norms", "head"
KV_HEADS = "key_value_heads"  # with more ranks than these, several ranks hold the same head


@dataclass(frozen=True)
class ParamInfo:
    """A parameter of the plain model."""

    name: str
    shape: tuple[int, ...]
    kind: str  # one of PARAMETER_KINDS; a router is "ffn"
    layer: int | None = None  # None: outside of the layers
    tp_dim: int | None = None  # dimension that tensor parallelism cuts; None: whole on every rank
    size_name: str | None = None  # name of the size that is cut, as in Config
    units: int | None = None  # number of heads or columns, which the degree must divide
    partial_grad: bool = False  # with sequence parallelism, from this rank's tokens alone
    expert: int | None = None  # the expert's number, if the parameter is an expert's
    tied_to: str | None = None  # the parameter with the same values, if on the same rank
    is_lookup: bool = False  # a token reads only a few rows

    def count_shards(self, tp: int = 1) -> int:
        """Return the number of equal parts over `tp` ranks; tp / parts ranks hold each part."""
        if self.tp_dim is None:
            return 1
        return min(tp, self.units) if self.size_name == KV_HEADS and self.units else tp

    def get_local_shape(self, tp: int = 1) -> tuple[int, ...]:
        """Return the shape on one of `tp` ranks, padded as in Megatron if they do not divide it."""
        parts = self.count_shards(tp)
        return tuple(-(-n // parts) if d == self.tp_dim else n for d, n in enumerate(self.shape))

    def get_box(self, rank: int = 0, tp: int = 1) -> Box:
        """Return the box of `rank` of `tp` ranks, if they divide the size."""
        parts = self.count_shards(tp)
        return take_shard(make_full_box(self.shape), self.tp_dim, rank * parts // tp, parts)

    def count_elements(self, tp: int = 1) -> int:
        """Return the number of elements on one of `tp` ranks."""
        return prod(self.get_local_shape(tp))


def list_params(config: Config) -> tuple[ParamInfo, ...]:
    """Return all parameters of GPT(config), in the model's order; a tied head is one of them."""
    first, *last = list_outer_params(config)
    blocks = (e for layer in range(config.layers) for e in iter_layer_params(config, layer))
    return (first, *blocks, *last)


def iter_layer_params(
    config: Config, layer: int, experts: range | None = None
) -> Iterator[ParamInfo]:
    """Yield the parameters of one layer, with all experts or with the given ones."""
    numbers = range(config.experts) if experts is None else experts
    alike = list_layer_params(config, config.experts > 0 and layer >= config.dense_layers)
    own = [entry for entry in alike if entry.expert is not None]
    for entry in alike:
        if entry.expert is None:
            yield replace(entry, name=f"blocks.{layer}.{entry.name}", layer=layer)
        elif entry is own[0]:
            for number, one in product(numbers, own):
                inside = one.name.replace(".experts.0.", f".experts.{number}.")
                yield replace(one, name=f"blocks.{layer}.{inside}", layer=layer, expert=number)


@lru_cache(maxsize=256)
def list_layer_params(config: Config, sparse: bool) -> tuple[ParamInfo, ...]:
    """Return the parameters of a kind of layer, with one expert that stands for all, for counting.

    256 experts in each of 58 layers are 45,000 parameters, but only two kinds of layer. Names are
    relative to the layer: "ffn_norm.weight".
    """
    return tuple(_iter_layer(config, sparse))


@lru_cache(maxsize=256)
def list_outer_params(config: Config) -> tuple[ParamInfo, ...]:
    """Return the parameters outside of the layers: embedding, last norm, head."""
    vocabulary, tied = (config.vocab, config.hidden), "embedding.weight" if config.tied else None
    cut = {"tp_dim": 0, "size_name": "vocab", "units": config.vocab}
    first = ParamInfo("embedding.weight", vocabulary, "embedding", **cut)
    last = ParamInfo("head.weight", vocabulary, "head", **cut, tied_to=tied)
    return first, *_iter_norm(config, "norm"), last


def _iter_layer(c: Config, sparse: bool) -> Iterator[ParamInfo]:
    yield from _iter_norm(c, "attention_norm")
    yield from _iter_attention(c) if c.latent is None else _iter_latent_attention(c)
    yield from _iter_norm(c, "ffn_norm")
    if not sparse:
        yield from _iter_ffn(c, "ffn", c.ffn_width, "ffn_width")
        return
    yield ParamInfo("ffn.router.score.weight", (c.experts, c.hidden), "ffn")
    for entry in _iter_ffn(c, "ffn.experts.0", c.expert_width, "expert_width"):
        yield replace(entry, expert=0)
    if c.shared_experts:
        yield from _iter_ffn(c, "ffn.shared", c.shared_experts * c.expert_width, "expert_width")


def _iter_attention(c: Config) -> Iterator[ParamInfo]:
    wide, narrow = c.heads * c.head_size, c.key_value_heads * c.head_size
    yield from _iter_column_parallel(c, "attention.query", "attention", wide, "heads")
    for name in ("key", "value"):
        yield from _iter_column_parallel(
            c, f"attention.{name}", "attention", narrow, "key_value_heads"
        )
    for name in ("query_norm", "key_norm") if c.qk_norm else ():
        # Its gradient is all-reduced over all ranks' heads where the weight enters the region.
        yield ParamInfo(f"attention.{name}.weight", (c.head_size,), "norms")
    yield from _iter_row_parallel(c, "attention.out", "attention", wide, "heads")


def _iter_latent_attention(c: Config) -> Iterator[ParamInfo]:
    enters = c.hidden
    if c.query_latent is not None:
        enters = c.query_latent
        yield ParamInfo(
            "attention.query_down.weight", (enters, c.hidden), "attention", partial_grad=True
        )
        yield ParamInfo("attention.query_norm.weight", (enters,), "norms", partial_grad=True)
    wide, width = c.heads * c.head_size, c.nope_head_size + c.value_size
    cut = {"tp_dim": 0, "size_name": "heads", "units": c.heads}
    yield ParamInfo("attention.query.weight", (wide, enters), "attention", **cut)
    down = c.latent + c.rotary
    yield ParamInfo("attention.down.weight", (down, c.hidden), "attention", partial_grad=True)
    yield ParamInfo("attention.down_norm.weight", (c.latent,), "norms", partial_grad=True)
    shape = c.heads * width, c.latent
    yield ParamInfo("attention.key_value.weight", shape, "attention", **cut)
    yield from _iter_row_parallel(c, "attention.out", "attention", c.heads * c.value_size, "heads")


def _iter_norm(c: Config, name: str) -> Iterator[ParamInfo]:
    for what in ("weight", "bias") if c.norm == "layer" and c.bias else ("weight",):
        yield ParamInfo(f"{name}.{what}", (c.hidden,), "norms", partial_grad=True)


def _iter_ffn(c: Config, name: str, width: int, along: str) -> Iterator[ParamInfo]:
    for first in ("up", "gate") if c.mlp == "swiglu" else ("up",):
        yield from _iter_column_parallel(c, f"{name}.{first}", "ffn", width, along)
    yield from _iter_row_parallel(c, f"{name}.down", "ffn", width, along)


def _iter_column_parallel(
    c: Config, name: str, kind: str, outputs: int, along: str
) -> Iterator[ParamInfo]:
    cut = {"tp_dim": 0, "size_name": along, "units": getattr(c, along)}
    yield ParamInfo(f"{name}.weight", (outputs, c.hidden), kind, **cut)
    if c.bias:
        yield ParamInfo(f"{name}.bias", (outputs,), kind, **cut)


def _iter_row_parallel(
    c: Config, name: str, kind: str, inputs: int, along: str
) -> Iterator[ParamInfo]:
    units = getattr(c, along)
    yield ParamInfo(
        f"{name}.weight", (c.hidden, inputs), kind, tp_dim=1, size_name=along, units=units
    )
    if c.bias:  # added after the sum
        yield ParamInfo(f"{name}.bias", (c.hidden,), kind, partial_grad=True)
