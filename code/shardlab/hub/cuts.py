"""How the ranks of a tensor group cut a tensor, by the end of its name; and whose part it is.

As Megatron-LM and torchtitan cut (transformers' own plan leaves latent attention, state spaces and
the experts of several models whole): queries, keys and values by heads, networks by their width,
out and down by their inputs, the vocabulary by its entries. Latent attention's down-projections,
norms, routers and what no row of the table knows are whole on every rank. The standard library
alone.
"""

from __future__ import annotations

import re
from math import gcd
from typing import Any

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
    (r"o_proj|out_proj|dense|c_proj|wo|out|x_proj", 1, "heads"),
)
_NETWORK: tuple[tuple[str, int | None, str], ...] = (
    (r"router.*|gate|gate\..*|shared_expert_gate|.*_latent_proj|.*norm\d?", None, ""),
    (r"gate_proj|up_proj|fc1|c_fc|fc_in|w1|w3|dense_h_to_4h|intermediate\.dense", 0, "width"),
    (r"gate_up_proj|input_linear|gate_and_up|w13", 0, "twice"),
    (r"down_proj|fc2|c_proj|fc_out|w2|dense_4h_to_h|output_linear|linear_2|wo|down", 1, "width"),
    (r"output\.dense", 1, "width"),
)
_MIXES = re.compile(r"attn|attention|mamba|temporal|ssm|conv|time_mix|mixer")
_NORM = re.compile(r"(^|[._])(layer_?)?norm|(^|\.)ln_|norm(_\w|\d)?\.(weight|bias)$|layernorm")
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
    if len(parts) == 2 and len(shape) == 1 and _NORM.search(name) and not mixes:
        return Entry(name, shape, "norms", partly=True)
    dimension, by = _row(_stem(name, tensor), mixes)
    if dimension == 1 and len(shape) == 1:  # the bias behind the sum
        return Entry(name, shape, kind, partly=True, expert=expert)
    if dimension is None or (dimension == 1 and len(shape) < 2):
        return Entry(name, shape, kind, expert=expert)
    units = _units(by, layer, shape[dimension] // (2 if by == "twice" else 1))
    if not units or shape[dimension] % units:
        return Entry(name, shape, kind, expert=expert)
    along = WORDS["mixer" if mixes and _mixer(layer) else by]
    if expert is not None:
        along = "expert_width"
    return Entry(name, shape, kind, tp=dimension, along=along, units=units, expert=expert)


def _row(stem: str, mixes: bool) -> tuple[int | None, str]:
    """The dimension that is cut, None if none is, and by what."""
    for ends, dimension, by in _ATTENTION if mixes else _NETWORK:
        if re.search(rf"(^|\.)({ends})$", stem):
            return dimension, by
    return None, ""


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


def _stem(name: str, tensor: dict[str, Any]) -> str:
    stem = re.sub(r"\.(weight|bias)$", "", name)
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
