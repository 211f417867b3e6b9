"""How the ranks of a tensor group cut a tensor, by the end of its name; and whose part it is.

As Megatron-LM and torchtitan cut (transformers' own plan leaves latent attention, state spaces and
the experts of several models whole): queries, keys and values by heads, networks by their width,
out and down by their inputs, the vocabulary by its entries. Latent attention's down-projections,
norms and routers are whole on every rank. What no row of the table knows is cut as transformers'
own plan has it, and whole where that is silent, too: `said` says which. The standard library
alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain
from math import gcd, prod
from typing import Any, NamedTuple

from shardlab.layout.entries import COPIED, Entry

# End of a name in attention or in what stands in its place: dimension, and by what.
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
    (r"[qkv]_conv1d|conv1d|in_proj\w*|dt_bias|A_log|D|dt_proj|conv", 0, "mixer"),
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
LEAST = 0.01  # of a layer's parameters: what is smaller is not said to be whole
MOST = 4  # names in a row
WORDS = {  # as Config calls it, where it does
    "heads": "heads",
    "kv_heads": COPIED,
    "both": f"{COPIED} of a fused matrix",
    "mixer": "heads of a state space",
    "width": "ffn_width",
    "twice": "ffn_width",  # gate and up in one
}


def inside(tensor: dict[str, Any], layer: dict[str, Any]) -> Entry:
    """A tensor of a layer, as the facts have both."""
    name, shape = tensor["name"], tuple(tensor["shape"])
    expert = 0 if tensor["experts"] else None
    mixes = expert is None and _mixes(name, layer)
    kind = "attention" if mixes else "ffn"
    parts = name.split(".")
    if _of_norm(name):
        return Entry(name, shape, "norms", partly=True)
    if len(parts) == 2 and len(shape) == 1 and _NORM.search(name) and not mixes:
        return Entry(name, shape, "norms", partly=True)
    cut = _cut(tensor, layer, mixes)
    if cut.dimension == 1 and len(shape) == 1:  # the bias behind the sum
        return Entry(name, shape, kind, partly=True, expert=expert)
    if cut.dimension is None:
        return Entry(name, shape, kind, expert=expert)
    along = cut.along if expert is None else "expert_width"
    own = {"tp": cut.dimension, "along": along, "units": cut.units}
    return Entry(name, shape, kind, **own, expert=expert)


class _Cut(NamedTuple):
    """How a tensor of a layer is cut."""

    dimension: int | None = None  # None: not at all
    along: str = ""
    units: int = 0
    known: bool = True  # by the table


def _cut(tensor: dict[str, Any], layer: dict[str, Any], mixes: bool) -> _Cut:
    """By the table; where that lacks the name, or how many there are, as transformers' plan has it.

    By the plan a dimension is cut as it is, whatever heads lie in it.
    """
    stem, shape = _stem(tensor), tensor["shape"]
    if row := _row(stem, mixes):
        dimension, by = row
        if dimension is None or dimension >= len(shape):
            return _Cut(dimension)
        units = _units(by, layer, shape[dimension] // (2 if by == "twice" else 1))
        if units and shape[dimension] % units == 0:
            return _Cut(dimension, WORDS["mixer" if mixes and _mixer(layer) else by], units)
    if not tensor["cut"]:
        return _Cut(known=False)
    dimension, matrices = tensor["cut"]
    return _Cut(dimension, stem, shape[dimension] // matrices, known=False)


def _row(stem: str, mixes: bool) -> tuple[int | None, str] | None:
    """The dimension that is cut, None if none is, and by what; None: no row has the name."""
    for ends, dimension, by in _ATTENTION if mixes else _NETWORK:
        if re.search(rf"(^|\.)({ends})$", stem):
            return dimension, by
    return None


def unknown(layer: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The matrices that the table does not cut: those that are cut by the plan, and whole ones.

    Of the latter those that are no small part of the layer.
    """
    planned, whole = [], []
    sizes = [prod(t["shape"]) * (t["experts"] or 1) for t in layer["tensors"]]
    for tensor, size in zip(layer["tensors"], sizes, strict=True):
        if len(tensor["shape"]) < 2 or _of_norm(tensor["name"]):
            continue
        cut = _cut(tensor, layer, not tensor["experts"] and _mixes(tensor["name"], layer))
        if not cut.known and cut.dimension is not None:
            planned.append(tensor)
        elif not cut.known and size > LEAST * sum(sizes):
            whole.append(tensor)
    return planned, whole


def said(layers: Iterable[tuple[list[dict[str, Any]], ...]]) -> Iterator[str]:
    """What is `unknown` of several kinds of layers, in words."""
    words = (
        "cut by tensor ranks as in transformers' own plan",
        "whole on every tensor rank, for no cut is known",
    )
    for text, tensors in zip(words, zip(*layers, strict=True), strict=False):
        if some := list(dict.fromkeys(map(_stem, chain.from_iterable(tensors)))):
            more = f" and {len(some) - MOST} more" if len(some) > MOST else ""
            yield f"{text}: {', '.join(some[:MOST])}{more}"


def outside(tensor: dict[str, Any], first: bool, last: bool) -> Entry:
    """One that stands outside of the layers."""
    name, shape = tensor["name"], tuple(tensor["shape"])
    if len(shape) == 2 and (first or last):
        kind = "embedding" if first else "head"
        cut = {"tp": 0, "along": "vocab", "units": shape[0]}
        return Entry(name, shape, kind, tied=tensor["tied"], **cut)
    kind = "norms" if len(shape) == 1 and _NORM.search(name) else "ffn"
    if not first and "embed" in name:
        kind = "embedding"
    return Entry(name, shape, kind, partly=kind == "norms", tied=tensor["tied"])


def _of_norm(name: str) -> bool:
    """Whether it is a matrix inside of a norm, which some models have."""
    return bool(re.search(r"norm\w*\.\w+\.", name))


def _stem(tensor: dict[str, Any]) -> str:
    stem = re.sub(r"(\.linear)?\.(weight|bias)$", "", tensor["name"])
    return re.sub(r"_bias$", "", stem) if tensor["experts"] else stem


def _mixes(name: str, layer: dict[str, Any]) -> bool:
    """Whether it belongs to what mixes tokens; Nemotron-H calls networks mixers, too."""
    inside = _MIXES.search(name.rpartition(".")[0])
    if not inside or inside[0] != "mixer":
        return bool(inside)
    traced = layer["traced"]
    return bool(_mixer(layer) or not traced or traced["mixed"])


def _mixer(layer: dict[str, Any]) -> dict[str, Any] | None:
    found = layer["mixer"]
    return found if found and "scans" in found else None


def _units(by: str, layer: dict[str, Any], size: int) -> int:
    """How many of what is cut there are; 0: not known, so it is whole."""
    if by in ("width", "twice"):
        return size
    if mixer := _mixer(layer):
        heads, groups = mixer["heads"], mixer["groups"]
        return gcd(heads, groups) if groups > 1 else heads  # one group stands on every rank
    traced = layer["traced"]
    if not traced or not traced["mixed"]:
        return 0
    core = traced["mixed"][0]
    heads, kv_heads = core["heads"], core["kv_heads"]
    return {"heads": heads, "kv_heads": kv_heads, "both": gcd(heads, kv_heads)}.get(by, 0)


def network(entries: tuple[Entry, ...], expert: bool) -> tuple[int, int, bool] | None:
    """Width and inputs of the networks among these, and whether they are gated; None: not known.

    expert: of one expert, or of what sees every token. A width of 0: there is none.
    """
    own = [e for e in entries if e.kind == "ffn" and (e.expert is not None) == expert]
    own = [e for e in own if len(e.shape) == 2 and e.tp is not None]
    down = [e.shape for e in own if e.tp == 1]
    up = sum(e.shape[0] for e in own if e.tp == 0)
    width = sum(shape[1] for shape in down)
    if not own:
        return 0, 0, True
    if width == 0 or up not in (width, 2 * width) or len({shape[0] for shape in down}) != 1:
        return None
    return width, down[0][0], up == 2 * width
