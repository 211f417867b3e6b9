"""Tensor-parallel cuts of a model's tensors, by the end of their names.

As Megatron-LM and torchtitan cut (transformers' own plan leaves latent attention, state spaces and
the experts of several models whole): queries, keys and values by heads, networks by their width,
out and down by their inputs, the vocabulary by its entries. Latent attention's down-projections,
norms and routers are whole on every rank, and so are tensors without a row in the table: `said`
names them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import gcd, prod
from typing import TYPE_CHECKING

from shardlab.layout.parameters import KV_HEADS, ParamInfo

if TYPE_CHECKING:  # these load torch
    from .kinds import Alike, Tensor
    from .trace import Traced

# Ends of names in attention or another mixer, the dimension that is cut, and the unit.
_ATTENTION: tuple[tuple[str, int | None, str], ...] = (
    (
        r"indexer\..*|(q|kv)_a_.*|kv_a_.*|(q|k|v|kv|query|key)_?(layer)?norm\d?|[fg]_a_proj",
        None,
        "",
    ),
    (r"q_proj|query|q_b_proj|kv_b_proj|wq_b|wq|[fgb]_b_proj|b_proj|g_proj|gate_proj", 0, "heads"),
    (r"output_gate|sinks|wq_a_gate", 0, "heads"),
    (r"k_proj|v_proj|key|value|wk|wv", 0, "kv_heads"),
    (r"qkv_proj|query_key_value|c_attn|Wqkv|W_pack|qkv", 0, "both"),
    (r"o_proj|out_proj|dense|c_proj|[wW]o|out|x_proj", 1, "heads"),
)
_NETWORK: tuple[tuple[str, int | None, str], ...] = (
    (r"router.*|gate|gate\..*|shared_expert_gate|.*_latent_proj|.*norm\d?", None, ""),
    (r"gate_proj|up_proj|fc1|c_fc|fc_in|w1|w3|dense_h_to_4h|intermediate\.dense", 0, "width"),
    (r"gate_up_proj|input_linear|gate_and_up|w13|Wi", 0, "twice"),
    (r"down_proj|fc2|c_proj|fc_out|w2|dense_4h_to_h|output_linear|linear_2|[wW]o|down", 1, "width"),
    (r"output\.dense", 1, "width"),
)
_MIXES = re.compile(r"attn|attention|mamba|temporal|ssm|conv|time_mix|mixer")
_NORM = re.compile(r"(^|[._])(layer_?)?norm|(^|\.)ln_|norm(_\w|\d)?\.(weight|bias)$|layernorm")
LEAST = 0.01  # share of a layer's parameters below which an uncut tensor is not reported
MOST = 4  # most names in a list
WORDS = {  # units by their names in Config, if they have one
    "heads": "heads",
    "kv_heads": KV_HEADS,
    "both": f"{KV_HEADS} of a fused matrix",
    "width": "ffn_width",
    "twice": "ffn_width",  # gate and up in one matrix
}


def inside(tensor: Tensor, traced: Traced | None) -> ParamInfo:
    """Return the entry of a layer's tensor, with its cut; traced: the trace of its layer."""
    name, shape = tensor.name, tensor.shape
    expert = 0 if tensor.experts else None
    mixes = _mixes(tensor, traced)
    kind = "attention" if mixes else "ffn"
    if _of_norm(name):
        return ParamInfo(name, shape, "norms", partial_grad=True)
    if name.count(".") == 1 and len(shape) == 1 and _NORM.search(name) and not mixes:
        return ParamInfo(name, shape, "norms", partial_grad=True)
    dimension, along, units = _cut(tensor, traced) or (None, "", 0)
    if dimension == 1 and len(shape) == 1:  # a bias that is added after the all-reduce
        return ParamInfo(name, shape, kind, partial_grad=True, expert=expert)
    if dimension is None:
        return ParamInfo(name, shape, kind, expert=expert)
    along = along if expert is None else "expert_width"
    return ParamInfo(
        name, shape, kind, tp_dim=dimension, size_name=along, units=units, expert=expert
    )


def _cut(tensor: Tensor, traced: Traced | None) -> tuple[int | None, str, int] | None:
    """Return a tensor's cut by the table: the dimension (None: whole), the unit, and their number.

    Returns None if the table lacks the name, or if the number of units is not known.
    """
    mixes, stem = _mixes(tensor, traced), _stem(tensor)
    for ends, dimension, by in _ATTENTION if mixes else _NETWORK:
        if not re.search(rf"(^|\.)({ends})$", stem):
            continue
        if dimension is None or dimension >= len(tensor.shape):
            return dimension, "", 0
        size = tensor.shape[dimension]
        units = _units(by, traced, size // (2 if by == "twice" else 1))
        return (dimension, WORDS[by], units) if units and size % units == 0 else None
    return None


def unknown(layer: Alike, traced: Traced | None) -> list[Tensor]:
    """Return the matrices that the table does not cut, except small parts of the layer."""
    sizes = [prod(t.shape) * (t.experts or 1) for t in layer.tensors]
    return [
        tensor
        for tensor, size in zip(layer.tensors, sizes, strict=True)
        if len(tensor.shape) > 1
        and size > LEAST * sum(sizes)
        and not _of_norm(tensor.name)
        and _cut(tensor, traced) is None
    ]


def said(tensors: Iterable[Tensor]) -> list[str]:
    """Describe the `unknown` tensors of all kinds of layers."""
    if not (some := list(dict.fromkeys(map(_stem, tensors)))):
        return []
    more = f" and {len(some) - MOST} more" if len(some) > MOST else ""
    return [f"whole on every tensor rank, for no cut is known: {', '.join(some[:MOST])}{more}"]


def outside(tensor: Tensor, first: bool, last: bool) -> ParamInfo:
    """Return the entry of a tensor outside of the layers."""
    name, shape = tensor.name, tensor.shape
    if len(shape) == 2 and (first or last):
        kind = "embedding" if first else "head"
        cut = {"tp_dim": 0, "size_name": "vocab", "units": shape[0]}
        return ParamInfo(name, shape, kind, tied_to=tensor.tied, **cut)
    kind = "norms" if len(shape) == 1 and _NORM.search(name) else "ffn"
    if not first and "embed" in name:
        kind = "embedding"
    return ParamInfo(name, shape, kind, partial_grad=kind == "norms", tied_to=tensor.tied)


def _of_norm(name: str) -> bool:
    """Return True for a matrix inside a norm, which some models have."""
    return bool(re.search(r"norm\w*\.\w+\.", name))


def _stem(tensor: Tensor) -> str:
    stem = re.sub(r"(\.linear)?\.(weight|bias)$", "", tensor.name)
    return re.sub(r"_bias$", "", stem) if tensor.experts else stem


def _mixes(tensor: Tensor, traced: Traced | None) -> bool:
    """Return True if the tensor belongs to a token mixer; Nemotron-H also calls networks mixers."""
    inside = None if tensor.experts else _MIXES.search(tensor.name.rpartition(".")[0])
    if inside and inside[0] == "mixer":
        return not traced or bool(traced.mixed)
    return bool(inside)


def _units(by: str, traced: Traced | None, size: int) -> int:
    """Return the number of units of a cut, such as heads; 0 if unknown: then nothing is cut."""
    if by in ("width", "twice"):
        return size
    if not traced or not traced.mixed:
        return 0
    core, _ = traced.mixed[0]
    both = gcd(core.heads, core.kv_heads)
    return {"heads": core.heads, "kv_heads": core.kv_heads, "both": both}[by]


def network(entries: tuple[ParamInfo, ...], expert: bool) -> tuple[int, int, bool] | None:
    """Return width and inputs of the entries' networks, and True if gated; None if not known.

    expert: of one expert, or of the network that all tokens use. A width of 0: there is none.
    """
    own = [e for e in entries if e.kind == "ffn" and (e.expert is not None) == expert]
    own = [e for e in own if len(e.shape) == 2 and e.tp_dim is not None]
    down = [e.shape for e in own if e.tp_dim == 1]
    up = sum(e.shape[0] for e in own if e.tp_dim == 0)
    width = sum(shape[1] for shape in down)
    if not own:
        return 0, 0, True
    if width == 0 or up not in (width, 2 * width) or len({shape[0] for shape in down}) != 1:
        return None
    return width, down[0][0], up == 2 * width
