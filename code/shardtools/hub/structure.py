"""Build the `Structure` of a transformers model on meta.

Loads torch and transformers.
"""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import replace
from math import prod
from typing import Any

from torch import nn

from shardlab.layout.parameters import KV_HEADS, ParamInfo
from shardlab.layout.structure import AttentionCore, LayerKind, RoutedExperts, Structure

from . import layer_kinds, tp_cuts
from .layer_kinds import NON_TEXT_NAMES, LayerInfo, TensorInfo, find_main_stack, find_stacks
from .meta_model import build_config, build_model, stay_offline
from .meta_stubs import STUB_IMPLEMENTATIONS, register_stubs
from .trace import TRACE_TOKENS, LayerTrace, trace_layers

DEFAULT_SEQ = 8192  # tokens, if a file gives no maximum sequence length
# Keys of sizes and of sharing, which are reported as assumed if a file omits them.
REPORTED_KEYS = re.compile(
    r"^(tie_word_embeddings|vocab_size|head_dim|.*hidden_size|.*intermediate_size|num_.*(layers|heads"
    r"|experts|per_tok)|.*_(rank|topk)|(qk_nope|qk_rope|v)_head_dim|sliding_window|max_position_embeddings|n_.*experts"
    r"|mlp_bias|attention_bias|use_qk_norm|first_k_dense_replace)$"
)


# Keys of multi-token prediction, whose layers transformers' classes omit.
MULTI_TOKEN_KEYS = "num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers"


def build_structure(given: dict[str, Any], with_trace: bool = True) -> Structure:
    """Describe the model of a config.json. with_trace: also trace its layers.

    Raises ValueError for a model that transformers or this package does not know.
    """
    subject = f"the class of model_type={given['model_type']!r}"
    try:
        with stay_offline(), register_stubs():
            config = build_config(given)
            return _describe_model(given, config, with_trace)
    except ValueError as error:
        raise ValueError(_join_lines(error)) from error
    except Exception as error:
        words = f"{type(error).__name__}: {_join_lines(error)}"
        raise ValueError(f"{subject} cannot be built from these values ({words})") from error


def _join_lines(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _describe_model(given: dict[str, Any], config: Any, with_trace: bool) -> Structure:
    model, unplanned = _build_with_stubs(config)
    layers, outside = layer_kinds.split_model(model)
    text = model.config.get_text_config()
    unplanned = unplanned or ("" if with_trace else "its layers were not traced")
    traces: list[LayerTrace | None] = [None] * len(layers)
    if not unplanned:
        try:
            stack = find_stacks(model).get(find_main_stack(model), ())
            attributes = [layer_kinds.get_plain_attributes(module) for module in stack]
            tokens = min(_get_max_seq(text) or TRACE_TOKENS, TRACE_TOKENS)
            traces = list(trace_layers(model, list(zip(layers, attributes, strict=True)), tokens))
        except Exception:  # torch's messages about its kernels do not help here
            unplanned = "its layers read values, which tensors on meta do not have"
    unplanned = unplanned or _find_irregularity(model)
    kinds, names, uncut = {}, [], []
    found = list(zip(layers, traces, strict=True))
    for layer, one in dict.fromkeys(found):
        if one and one.chosen and set(one.chosen) != {layer.chosen}:
            counts = f"{one.chosen[0]} experts per token, but its file says {layer.chosen}"
            raise ValueError(f"{layer.module} uses {counts}")
        uncut += (odd := tp_cuts.find_uncut(layer, one))
        kind, why = _describe_kind(layer, one, odd)
        names.append(kind.name)
        kinds[layer, one] = replace(kind, name=f"{kind.name} {names.count(kind.name)}")
        unplanned = unplanned or why
    order = [list(kinds).index(one) for one in found]
    kinds = [
        replace(kind, name=name) if names.count(name) == 1 else kind
        for kind, name in zip(kinds.values(), names, strict=True)
    ]
    outside = _order_outer_tensors(model, outside)
    last = len(outside) - 1
    ends = tuple(
        replace(tp_cuts.cut_outer_tensor(t, n == 0, n == last and last > 0), is_lookup=t.table)
        for n, t in enumerate(outside)
    )
    vocab, hidden = (int(n) for n in model.get_input_embeddings().weight.shape)
    seq, experts = _get_max_seq(text), any(layer.experts for layer in layers)
    words = [] if seq else [f"no maximum sequence length is given: {DEFAULT_SEQ} tokens"]
    assumed = _list_defaults(given, config, model, experts)
    made = Structure(
        int(layer_kinds.get_setting(text, "hidden_size") or hidden), vocab, seq or DEFAULT_SEQ,
        _separate_units(kinds), tuple(order), ends, any(t.tied for t in outside),
        given["model_type"], (*assumed, *words, *tp_cuts.describe_uncut(uncut)), unplanned,
    )  # fmt: skip
    total = sum(p.numel() for p in model.parameters())
    if made.num_params != total:
        words = f"layers and outer tensors have {made.num_params:,} parameters, the class {total:,}"
        raise ValueError(f"{type(model).__name__}: {words}")
    return made


def _describe_kind(
    layer: LayerInfo, trace: LayerTrace | None, uncut: list[TensorInfo]
) -> tuple[LayerKind, str]:
    """Return a kind of layer, and the reason if it cannot be planned, or ""."""
    entries = tuple(
        replace(tp_cuts.cut_layer_tensor(tensor, trace), is_lookup=tensor.table)
        for tensor in layer.tensors
    )
    core, why = _find_core(trace, layer.module)
    ffn, expert_ffn = tp_cuts.find_ffn_sizes(entries, False), tp_cuts.find_ffn_sizes(entries, True)
    odd = {e.name for e in entries if e.kind == "ffn"} & {tensor.name for tensor in uncut}
    if not why and (ffn is None or expert_ffn is None or odd):
        why = f"the FFN of {layer.module} has matrices with an unknown role"
    width, _, gated = ffn or (0, 0, True)
    routed = None
    if layer.experts:
        wide, inputs, twice = expert_ffn or (0, 0, True)
        routed = RoutedExperts(layer.experts, layer.chosen, wide, inputs)
        gated = twice if not width else gated
        if not why and width and twice != gated:
            why = f"some FFNs of {layer.module} have gates and some have none"
    saved = [round(getattr(trace, part, 0)) for part in ("stream", "latent", "heads")]
    if trace and not why:
        why = _find_unexplained_flops(layer, trace, entries, core)
    pattern = layer.pattern.removesuffix("_attention")
    words = pattern, "experts" if routed else "dense" if width and pattern != "mlp" else ""
    name = ", ".join(filter(None, words)) or "layer"
    return LayerKind(name, entries, core, width, gated, routed, *saved), why


def _find_core(trace: LayerTrace | None, module: str) -> tuple[AttentionCore | None, str]:
    if not trace or not trace.cores:
        return None, ""
    if (many := len(trace.cores)) > 1:
        return None, f"{module} has {many} attention calls"
    ((core, unknown),) = trace.cores
    return core, f"{module} has {unknown}" if unknown else ""


def _find_unexplained_flops(
    layer: LayerInfo, trace: LayerTrace, entries: tuple[ParamInfo, ...], core: AttentionCore | None
) -> str:
    """Describe operations of a layer beyond those of its matrices and core, or ""."""
    if core is None and any(entry.kind == "attention" for entry in entries):
        return f"{layer.module} has an unknown token mixer"
    if layer.module.startswith("Llama4"):  # its code sends each token through all experts
        return ""
    known = 2 * sum(
        prod(e.shape) * (1 if e.expert is None else layer.chosen)
        for e in entries
        if len(e.shape) > 1 and not e.name.endswith("bias")
    )
    more = trace.matmul_flops - known
    if abs(more) > 1e-3 * known:
        return f"{layer.module} has {more:.3g} operations per token beyond its matrices"
    return ""


def _separate_units(kinds: list[LayerKind]) -> tuple[LayerKind, ...]:
    """Return the kinds, with separate names of cut units whose numbers differ by kind."""
    units: dict[str, int] = {}
    found = []
    for kind in kinds:
        entries = []
        for entry in kind.parameters:
            along, many = entry.size_name, entry.units
            if along and many and along != KV_HEADS and units.setdefault(along, many) != many:
                entry = replace(entry, size_name=f"{along} ({kind.name})")
            entries.append(entry)
        found.append(replace(kind, parameters=tuple(entries)))
    return tuple(found)


def _build_with_stubs(config: Any) -> tuple[nn.Module, str]:
    """Build the model with stubs, or without; return the reason if it cannot be traced, or ""."""
    try:
        return build_model(deepcopy(config), **STUB_IMPLEMENTATIONS), ""
    except Exception:
        return build_model(config), "its attention cannot be replaced"


def _find_irregularity(model: nn.Module) -> str:
    """Say why the layers are no plain stack that each token passes once, or ""."""
    main = find_main_stack(model)
    if not main:
        return "it has no list of layers"
    others = {
        name: stack
        for name, stack in find_stacks(model).items()
        if name != main and not NON_TEXT_NAMES.search(name) and list(stack.parameters())
    }
    if others:
        return f"it has layers outside {main}: {', '.join(others)}"
    shared: set[int] = set()
    for layer in find_stacks(model)[main]:
        own = {id(p) for p in layer.parameters()}
        if shared & own:
            return "its layers share weights"
        shared |= own
    return ""


def _list_defaults(
    given: dict[str, Any], config: Any, model: nn.Module, experts: bool
) -> list[str]:
    text = config.get_text_config()
    inner = next((v for v in given.values() if isinstance(v, dict) and "hidden_size" in v), {})
    written = {config.attribute_map.get(key, key) for key in (*given, *inner)}
    written |= {text.attribute_map.get(key, key) for key in (*given, *inner)}
    unused = [] if experts else ["expert", "per_tok", "moe"]
    heads = layer_kinds.get_setting(text, "num_attention_heads") or 1
    found = []
    for key, value in text.to_dict().items():
        plain = isinstance(value, int | float) and not any(word in key for word in unused)
        width = (layer_kinds.get_setting(text, "hidden_size") or 0) // heads
        is_derived = key == "head_dim" and ("qk_rope_head_dim" in written or value == width)
        if REPORTED_KEYS.match(key) and plain and key not in written and not is_derived:
            found.append(f"{key} is {value}, the default of {type(text).__name__}")
    other = [n for n in given.get("architectures") or [] if n != type(model).__name__]
    if other:
        words = ", ".join(map(str, other))[:80]
        found.append(f"counted as {type(model).__name__}, not as {words}")
    if text is not config and type(model.config) is type(text):
        found.append("only the text model is counted, as in AutoModelForCausalLM")
    towers = sum(p.numel() for name, p in model.named_parameters() if NON_TEXT_NAMES.search(name))
    if towers:
        found.append(f"{towers:,} parameters of image or audio towers are included")
    for part in (given, *(value for value in given.values() if isinstance(value, dict))):
        for key in MULTI_TOKEN_KEYS:
            if isinstance(many := part.get(key), int) and many > 0:
                found.append(f"{key}={many}: multi-token prediction layers are not counted")
    return found


def _order_outer_tensors(model: nn.Module, outside: list[TensorInfo]) -> list[TensorInfo]:
    """Return the tensors outside of the layers, the embedding first and the head last."""
    names = {id(m): name for name, m in model.named_modules()}
    head = model.get_output_embeddings()
    first = names.get(id(model.get_input_embeddings()), "-")
    last = names.get(id(head), "-") if head is not None else "-"

    def sort_key(tensor: TensorInfo) -> tuple[int, int]:  # a bias of the head before its matrix
        head = tensor.name.startswith(f"{last}.")
        return 2 * head - tensor.name.startswith(f"{first}."), head * len(tensor.shape)

    return sorted(outside, key=sort_key)


def _get_max_seq(config: Any) -> int:
    for key in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        value = layer_kinds.get_setting(config, key)
        if isinstance(value, int) and value > 0:
            return value
    return 0
