"""The `Structure` of transformers' model on meta.

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

from . import cuts
from .build import build, configured, offline
from .kinds import OTHERS, Alike, Tensor, main_stack, setting, settings, split, stacks
from .plugs import PLUGGED, registered
from .trace import TOKENS, Traced, traced

SEQ = 8192  # tokens, if a file gives no maximum sequence length
# Keys of sizes and of sharing, which are reported as assumed if a file leaves them open.
SIZES = re.compile(
    r"^(tie_word_embeddings|vocab_size|head_dim|.*hidden_size|.*intermediate_size|num_.*(layers|heads"
    r"|experts|per_tok)|.*_(rank|topk)|(qk_nope|qk_rope|v)_head_dim|sliding_window|max_position_embeddings|n_.*experts"
    r"|mlp_bias|attention_bias|use_qk_norm|first_k_dense_replace)$"
)


# Keys of modules that predict further tokens, which transformers' classes leave out.
FURTHER = "num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers"


def structure(given: dict[str, Any], trace: bool = True) -> Structure:
    """Describe the model of a config.json; trace: follow what its layers compute and save.

    Raises ValueError, in one line, for a model that transformers or this package does not know.
    """
    its = f"the class of model_type={given['model_type']!r}"
    try:
        with offline(), registered():
            config = configured(given)
            return _structure(given, config, trace)
    except ValueError as error:
        raise ValueError(_line(error)) from error
    except Exception as error:
        words = f"{type(error).__name__}: {_line(error)}"
        raise ValueError(f"{its} cannot be built from these values ({words})") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _structure(given: dict[str, Any], config: Any, trace: bool) -> Structure:
    model, unplanned = _built(config)
    layers, outside = split(model)
    text = model.config.get_text_config()
    unplanned = unplanned or ("" if trace else "its layers were not followed")
    seen: list[Traced | None] = [None] * len(layers)
    if not unplanned:
        try:
            own = [settings(module) for module in stacks(model).get(main_stack(model), ())]
            tokens = min(_longest(text) or TOKENS, TOKENS)
            seen = list(traced(model, list(zip(layers, own, strict=True)), tokens))
        except Exception:  # torch's messages about its kernels do not help here
            unplanned = "its layers read numbers, and a model without weights has none"
    unplanned = unplanned or _unlike(model)
    kinds, names, whole = {}, [], []
    found = list(zip(layers, seen, strict=True))
    for layer, one in dict.fromkeys(found):
        if one and one.chosen and set(one.chosen) != {layer.chosen}:
            said = f"through {one.chosen[0]} experts, and its file says {layer.chosen}"
            raise ValueError(f"{layer.module}: a token goes {said}")
        whole += (odd := cuts.unknown(layer, one))
        kind, why = _kind(layer, one, odd)
        names.append(kind.name)
        kinds[layer, one] = replace(kind, name=f"{kind.name} {names.count(kind.name)}")
        unplanned = unplanned or why
    order = [list(kinds).index(one) for one in found]
    kinds = [
        replace(kind, name=name) if names.count(name) == 1 else kind
        for kind, name in zip(kinds.values(), names, strict=True)
    ]
    outside = _ends(model, outside)
    last = len(outside) - 1
    ends = tuple(
        replace(cuts.outside(tensor, n == 0, n == last and last > 0), is_lookup=tensor.table)
        for n, tensor in enumerate(outside)
    )
    vocab, hidden = (int(n) for n in model.get_input_embeddings().weight.shape)
    seq, experts = _longest(text), any(layer.experts for layer in layers)
    words = [] if seq else [f"no longest sequence is given: {SEQ} tokens"]
    assumed = _assumed(given, config, model, experts)
    made = Structure(
        int(setting(text, "hidden_size") or hidden), vocab, seq or SEQ, _told_apart(kinds),
        tuple(order), ends, any(t.tied for t in outside), given["model_type"],
        (*assumed, *words, *cuts.said(whole)), unplanned,
    )  # fmt: skip
    total = sum(p.numel() for p in model.parameters())
    if made.num_params != total:
        words = f"its layers and ends have {made.num_params:,} parameters, its class {total:,}"
        raise ValueError(f"{type(model).__name__}: {words}")
    return made


def _kind(layer: Alike, traced: Traced | None, whole: list[Tensor]) -> tuple[LayerKind, str]:
    """Return a kind of layer (`whole`: its `unknown` tensors), and why it is not planned, or ""."""
    entries = tuple(
        replace(cuts.inside(tensor, traced), is_lookup=tensor.table) for tensor in layer.tensors
    )
    core, why = _core(traced, layer.module)
    plain, own = cuts.network(entries, False), cuts.network(entries, True)
    odd = {e.name for e in entries if e.kind == "ffn"} & {tensor.name for tensor in whole}
    if not why and (plain is None or own is None or odd):
        why = f"the network of {layer.module} has matrices whose place is not known"
    width, _, gated = plain or (0, 0, True)
    routed = None
    if layer.experts:
        wide, inputs, twice = own or (0, 0, True)
        routed = RoutedExperts(layer.experts, layer.chosen, wide, inputs)
        gated = twice if not width else gated
        if not why and width and twice != gated:
            why = f"of the networks of {layer.module} some have gates and some have none"
    kept = [round(getattr(traced, part, 0)) for part in ("stream", "latent", "heads")]
    if traced and not why:
        why = _unexplained(layer, traced, entries, core)
    pattern = layer.pattern.removesuffix("_attention")
    words = pattern, "experts" if routed else "dense" if width and pattern != "mlp" else ""
    name = ", ".join(filter(None, words)) or "layer"
    return LayerKind(name, entries, core, width, gated, routed, *kept), why


def _core(traced: Traced | None, module: str) -> tuple[AttentionCore | None, str]:
    """Return the layer's token mixer, and why it is not known ("" if it is)."""
    if not traced or not traced.mixed:
        return None, ""
    if (many := len(traced.mixed)) > 1:
        return None, f"{module} has {many} attentions in a layer"
    ((core, unknown),) = traced.mixed
    return core, f"{module} has {unknown}" if unknown else ""


def _unexplained(
    layer: Alike, traced: Traced, entries: tuple[ParamInfo, ...], core: AttentionCore | None
) -> str:
    """Say if a layer computes other operations than its matrices and core explain, or ""."""
    if core is None and any(entry.kind == "attention" for entry in entries):
        return f"{layer.module} mixes tokens in a way that is not known"
    if layer.module.startswith("Llama4"):  # its code sends each token through all experts
        return ""
    known = 2 * sum(
        prod(e.shape) * (1 if e.expert is None else layer.chosen)
        for e in entries
        if len(e.shape) > 1 and not e.name.endswith("bias")
    )
    more = traced.products - known
    if abs(more) > 1e-3 * known:
        return f"{layer.module} computes {more:.3g} operations a token that no matrix explains"
    return ""


def _told_apart(kinds: list[LayerKind]) -> tuple[LayerKind, ...]:
    """Return the kinds, with separate units of cuts where their numbers differ by kind."""
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


def _built(config: Any) -> tuple[nn.Module, str]:
    """Build the model with the stand-ins, or without; also say why it is not traced, or ""."""
    try:
        return build(deepcopy(config), **PLUGGED), ""
    except Exception:
        return build(config), "its attention cannot be replaced"


def _unlike(model: nn.Module) -> str:
    """Say why the layers are no plain stack that each token passes once ("" if they are)."""
    main = main_stack(model)
    if not main:
        return "it has no list of layers"
    others = {
        name: stack
        for name, stack in stacks(model).items()
        if name != main and not OTHERS.search(name) and any(True for _ in stack.parameters())
    }
    if others:
        return f"it has other layers beside those of {main}: {', '.join(others)}"
    shared: set[int] = set()
    for layer in stacks(model)[main]:
        own = {id(p) for p in layer.parameters()}
        if shared & own:
            return "its layers share weights"
        shared |= own
    return ""


def _assumed(given: dict[str, Any], config: Any, model: nn.Module, experts: bool) -> list[str]:
    """List the values that the file left open, and other assumptions."""
    text = config.get_text_config()
    inner = next((v for v in given.values() if isinstance(v, dict) and "hidden_size" in v), {})
    written = {config.attribute_map.get(key, key) for key in (*given, *inner)}
    written |= {text.attribute_map.get(key, key) for key in (*given, *inner)}
    unused = [] if experts else ["expert", "per_tok", "moe"]
    heads = setting(text, "num_attention_heads") or 1
    found = []
    for key, value in text.to_dict().items():
        plain = isinstance(value, int | float) and not any(word in key for word in unused)
        follows = key == "head_dim" and (
            "qk_rope_head_dim" in written or value == (setting(text, "hidden_size") or 0) // heads
        )
        if SIZES.match(key) and plain and key not in written and not follows:
            found.append(f"{key} is {value}, as {type(text).__name__} has it")
    other = [n for n in given.get("architectures") or [] if n != type(model).__name__]
    if other:
        found.append(
            f"{type(model).__name__} is counted, and not {', '.join(map(str, other))[:80]}"
        )
    if text is not config and type(model.config) is type(text):
        found.append("the part that reads text is counted alone, as AutoModelForCausalLM has it")
    towers = sum(p.numel() for name, p in model.named_parameters() if OTHERS.search(name))
    if towers:
        found.append(f"{towers:,} parameters of towers for images or sound are counted among all")
    for part in (given, *(value for value in given.values() if isinstance(value, dict))):
        for key in FURTHER:
            if isinstance(many := part.get(key), int) and many > 0:
                words = "layers that predict further tokens are not counted"
                found.append(f"{key}={many}: {words}")
    return found


def _ends(model: nn.Module, outside: list[Tensor]) -> list[Tensor]:
    """Return the tensors outside of the layers, the embedding first and the head last."""
    names = {id(m): name for name, m in model.named_modules()}
    head = model.get_output_embeddings()
    first = names.get(id(model.get_input_embeddings()), "-")
    last = names.get(id(head), "-") if head is not None else "-"

    def place(tensor: Tensor) -> tuple[int, int]:  # a bias of the head before its matrix
        head = tensor.name.startswith(f"{last}.")
        return 2 * head - tensor.name.startswith(f"{first}."), head * len(tensor.shape)

    return sorted(outside, key=place)


def _longest(config: Any) -> int:
    for key in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        value = setting(config, key)
        if isinstance(value, int) and value > 0:
            return value
    return 0
