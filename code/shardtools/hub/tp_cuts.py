"""Tensor-parallel cuts of a model's tensors, by the end of their names.

They are those of Megatron-LM and torchtitan (transformers' own plan leaves latent attention, state
spaces and the experts of several models whole): queries, keys and values are cut by heads, FFNs by
width, output and down projections by inputs, the vocabulary by entries. Down-projections of latent
attention, norms and routers are whole on every rank, and so are tensors that the tables lack:
`describe_uncut` names them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import gcd, prod
from typing import TYPE_CHECKING

from shardlab.layout.parameters import KV_HEADS, ParamInfo

if TYPE_CHECKING:  # these load torch
    from .layer_kinds import LayerInfo, TensorInfo
    from .trace import LayerTrace

# Ends of names in attention or another mixer, the dimension that is cut, and the unit.
_ATTENTION_CUTS: tuple[tuple[str, int | None, str], ...] = (
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
_FFN_CUTS: tuple[tuple[str, int | None, str], ...] = (
    (r"router.*|gate|gate\..*|shared_expert_gate|.*_latent_proj|.*norm\d?", None, ""),
    (r"gate_proj|up_proj|fc1|c_fc|fc_in|w1|w3|dense_h_to_4h|intermediate\.dense", 0, "width"),
    (r"gate_up_proj|input_linear|gate_and_up|w13|Wi", 0, "twice"),
    (r"down_proj|fc2|c_proj|fc_out|w2|dense_4h_to_h|output_linear|linear_2|[wW]o|down", 1, "width"),
    (r"output\.dense", 1, "width"),
)
_MIXER_NAME = re.compile(r"attn|attention|mamba|temporal|ssm|conv|time_mix|mixer")
_NORM_NAME = re.compile(r"(^|[._])(layer_?)?norm|(^|\.)ln_|norm(_\w|\d)?\.(weight|bias)$|layernorm")
MIN_REPORTED_SHARE = 0.01  # of a layer's parameters: smaller uncut tensors are not reported
MAX_LISTED = 4
UNIT_NAMES = {  # units by their names in Config, if they have one
    "heads": "heads",
    "kv_heads": KV_HEADS,
    "both": f"{KV_HEADS} of a fused matrix",
    "width": "ffn_width",
    "twice": "ffn_width",  # gate and up in one matrix
}


def cut_layer_tensor(tensor: TensorInfo, trace: LayerTrace | None) -> ParamInfo:
    """Return the entry of a layer's tensor, with its cut; trace: the trace of the layer."""
    name, shape = tensor.name, tensor.shape
    expert = 0 if tensor.experts else None
    in_mixer = _is_in_mixer(tensor, trace)
    kind = "attention" if in_mixer else "ffn"
    if _is_in_norm(name):
        return ParamInfo(name, shape, "norms", partial_grad=True)
    if name.count(".") == 1 and len(shape) == 1 and _NORM_NAME.search(name) and not in_mixer:
        return ParamInfo(name, shape, "norms", partial_grad=True)
    dimension, along, units = _find_cut(tensor, trace) or (None, "", 0)
    if dimension == 1 and len(shape) == 1:  # a bias that is added after the all-reduce
        return ParamInfo(name, shape, kind, partial_grad=True, expert=expert)
    if dimension is None:
        return ParamInfo(name, shape, kind, expert=expert)
    along = along if expert is None else "expert_width"
    return ParamInfo(
        name, shape, kind, tp_dim=dimension, size_name=along, units=units, expert=expert
    )


def _find_cut(tensor: TensorInfo, trace: LayerTrace | None) -> tuple[int | None, str, int] | None:
    """Return a tensor's cut by the table: the dimension (None: whole), the unit, and their number.

    Returns None if the table lacks the name, or if the number of units is not known.
    """
    in_mixer, stem = _is_in_mixer(tensor, trace), _strip_suffix(tensor)
    for ends, dimension, unit in _ATTENTION_CUTS if in_mixer else _FFN_CUTS:
        if not re.search(rf"(^|\.)({ends})$", stem):
            continue
        if dimension is None or dimension >= len(tensor.shape):
            return dimension, "", 0
        size = tensor.shape[dimension]
        units = _count_units(unit, trace, size // (2 if unit == "twice" else 1))
        return (dimension, UNIT_NAMES[unit], units) if units and size % units == 0 else None
    return None


def find_uncut(layer: LayerInfo, trace: LayerTrace | None) -> list[TensorInfo]:
    """Return the large matrices of a layer that have no known cut."""
    sizes = [prod(t.shape) * (t.experts or 1) for t in layer.tensors]
    return [
        tensor
        for tensor, size in zip(layer.tensors, sizes, strict=True)
        if len(tensor.shape) > 1
        and size > MIN_REPORTED_SHARE * sum(sizes)
        and not _is_in_norm(tensor.name)
        and _find_cut(tensor, trace) is None
    ]


def describe_uncut(tensors: Iterable[TensorInfo]) -> list[str]:
    """Describe the tensors from `find_uncut` of all kinds of layers."""
    if not (names := list(dict.fromkeys(map(_strip_suffix, tensors)))):
        return []
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    text = f"{', '.join(names[:MAX_LISTED])}{more}"
    return [f"whole on every tensor-parallel rank, because no cut is known: {text}"]


def cut_outer_tensor(tensor: TensorInfo, first: bool, last: bool) -> ParamInfo:
    """Return the entry of a tensor outside of the layers."""
    name, shape = tensor.name, tensor.shape
    if len(shape) == 2 and (first or last):
        kind = "embedding" if first else "head"
        cut = {"tp_dim": 0, "size_name": "vocab", "units": shape[0]}
        return ParamInfo(name, shape, kind, tied_to=tensor.tied, **cut)
    kind = "norms" if len(shape) == 1 and _NORM_NAME.search(name) else "ffn"
    if not first and "embed" in name:
        kind = "embedding"
    return ParamInfo(name, shape, kind, partial_grad=kind == "norms", tied_to=tensor.tied)


def _is_in_norm(name: str) -> bool:
    """Return True for a matrix inside a norm, which some models have."""
    return bool(re.search(r"norm\w*\.\w+\.", name))


def _strip_suffix(tensor: TensorInfo) -> str:
    stem = re.sub(r"(\.linear)?\.(weight|bias)$", "", tensor.name)
    return re.sub(r"_bias$", "", stem) if tensor.experts else stem


def _is_in_mixer(tensor: TensorInfo, trace: LayerTrace | None) -> bool:
    """Return True if the tensor is in a token mixer (Nemotron-H also calls FFNs mixers)."""
    mixer = None if tensor.experts else _MIXER_NAME.search(tensor.name.rpartition(".")[0])
    if mixer and mixer[0] == "mixer":
        return not trace or bool(trace.cores)
    return bool(mixer)


def _count_units(unit: str, trace: LayerTrace | None, size: int) -> int:
    """Return the number of units of a cut, such as heads; 0 if unknown."""
    if unit in ("width", "twice"):
        return size
    if not trace or not trace.cores:
        return 0
    core, _ = trace.cores[0]
    both = gcd(core.heads, core.kv_heads)
    return {"heads": core.heads, "kv_heads": core.kv_heads, "both": both}[unit]


def find_ffn_sizes(entries: tuple[ParamInfo, ...], expert: bool) -> tuple[int, int, bool] | None:
    """Return width, number of inputs, and True if gated, of the FFN of `entries`; None if unknown.

    expert: the FFN of one expert, else the one that all tokens use. Width 0: there is none.
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
