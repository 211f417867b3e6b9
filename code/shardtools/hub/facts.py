"""Everything that a `Structure` needs, from transformers' model on meta.

Loads torch and transformers.
"""

from __future__ import annotations

import inspect
import re
from copy import deepcopy
from dataclasses import dataclass, fields
from typing import Any

import transformers
from torch import nn

from .build import build, configured, offline, reads
from .kinds import OTHERS, Alike, Tensor, main_stack, setting, settings, split, stacks
from .plugs import PLUGGED, registered
from .trace import TOKENS, Traced, traced

# Keys that say how large a model is, or what is shared: named where a file leaves them open.
SIZES = re.compile(
    r"^(tie_word_embeddings|vocab_size|head_dim|.*hidden_size|.*intermediate_size|num_.*(layers|heads"
    r"|experts|per_tok)|.*_(rank|topk)|(qk_nope|qk_rope|v)_head_dim|sliding_window|max_position_embeddings|n_.*experts"
    r"|mlp_bias|attention_bias|use_qk_norm|first_k_dense_replace)$"
)


# What files call the modules that predict further tokens, which transformers' classes leave out.
FURTHER = "num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers"
# Keys that are sizes of weights, if a class reads them.
UNREAD = re.compile(
    r"^(vocab_size|d_model|n_(embd|layer|head|inner)|first_k_dense_replace|.*(hidden|intermediate)_size"
    r"|.*head_dim|.*lora_rank|.*num_.*(layers|heads|experts?|per_tok\w*)|.*experts?_(dim|width))$"
)


@dataclass(frozen=True)
class Facts:
    """A model on meta, described."""

    model_type: str
    name: str  # of its class
    total: int  # parameters
    hidden: int
    vocab: int
    seq: int  # its longest sequence; 0: its file names none
    tied: bool
    order: list[int]  # the kind of each layer
    kinds: list[tuple[Alike, Traced | None]]
    outside: list[Tensor]
    assumed: list[str]
    unplanned: str


def facts(given: dict[str, Any], trace: bool = True) -> Facts:
    """Describe the model of a config.json; trace: follow what its layers compute and keep.

    Raises ValueError, in one line, for a model that transformers or this package does not know.
    """
    its = f"the class of model_type={given['model_type']!r}"
    try:
        with offline(), registered():
            config = configured(given)
            with reads() as read:
                return _facts(given, config, trace, read)
    except ValueError as error:
        raise ValueError(_line(error)) from error
    except Exception as error:
        words = f"{type(error).__name__}: {_line(error)}"
        raise ValueError(f"{its} cannot be built from these values ({words})") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _facts(given: dict[str, Any], config: Any, trace: bool, read: set[str]) -> Facts:
    """read: the settings that were asked for so far, which grows."""
    model, unplanned = _built(config)
    layers, outside = split(model)
    text = model.config.get_text_config()
    tokens = min(_longest(text) or TOKENS, TOKENS)
    modules = list(stacks(model)[main_stack(model)]) if layers else []
    seen: list[Traced | None] = [None] * len(layers)
    if trace and not unplanned:
        try:
            own = [settings(module) for module in modules]
            seen = list(traced(model, list(zip(layers, own, strict=True)), tokens))
        except Exception:  # what torch says of its kernels helps nobody
            unplanned = "its layers read numbers, and a model without weights has none"
    elif not unplanned:
        unplanned = "its layers were not followed"
    found = list(zip(layers, seen, strict=True))
    for layer, one in found:
        if one and one.chosen and set(one.chosen) != {layer.chosen}:
            said = f"through {one.chosen[0]} experts, and its file says {layer.chosen}"
            raise ValueError(f"{layer.module}: a token goes {said}")
    kinds = list(dict.fromkeys(found))
    vocab, hidden = (int(n) for n in model.get_input_embeddings().weight.shape)
    ends = _ends(model, outside)
    experts = any(layer.experts for layer, _ in kinds)
    return Facts(
        model_type=given["model_type"],
        name=type(model).__name__,
        total=sum(p.numel() for p in model.parameters()),
        hidden=int(setting(text, "hidden_size") or hidden),
        vocab=vocab,
        seq=_longest(text),
        tied=any(t.tied for t in ends),
        order=[kinds.index(kind) for kind in found],
        kinds=kinds,
        outside=ends,
        assumed=[*_assumed(given, config, model, experts), *_unread(given, config, model, read)],
        unplanned=unplanned or _unlike(model),
    )


def _built(config: Any) -> tuple[nn.Module, str]:
    """The model with the plug-ins, or without, and why then it is not followed."""
    try:
        return build(deepcopy(config), **PLUGGED), ""
    except Exception:
        return build(config), "its attention cannot be replaced"


def _unlike(model: nn.Module) -> str:
    """Why its layers are no plain stack that every token goes through once."""
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
    """What the file left open, and what of it was not read."""
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


def _unread(given: dict[str, Any], config: Any, model: nn.Module, read: set[str]) -> list[str]:
    """Name what the file says and its class does not read.

    read: settings that were asked for while the model was built and followed. What the class
    declares, or its own code names, is taken as read. Raises ValueError where a size is not read,
    unless one that is read has the same value: then the model may be another one.
    """
    parts = [(given, config)]
    parts += [(given[k], getattr(config, k)) for k in config.sub_configs if k in given]
    found, sizes, known = [], [], {"model_type", *FURTHER}
    for part, own in (pair for pair in parts if isinstance(pair[0], dict)):
        code = inspect.getsource(type(own))
        known |= {f.name for f in fields(own)} | {*own.attribute_map, *own.attribute_map.values()}
        left = [k for k in part if k in vars(own) and k not in known | read]
        left = [k for k in left if not re.search(rf"""(["']|self\.){re.escape(k)}\b""", code)]
        seen = [value for k, value in part.items() if k not in left] + [0, 1, -1]
        sizes += [
            k for k in left if UNREAD.search(k) and isinstance(part[k], int) and part[k] not in seen
        ]
        found += left
    words = f"not read by {type(model).__name__}: {', '.join(sorted(found))}"
    if sizes:
        value = next(part[sizes[0]] for part, _ in parts if sizes[0] in part)
        version = f"transformers {transformers.__version__}"
        raise ValueError(f"{sizes[0]}={value}: a size that {version} does not know; {words}")
    return [words] if found else []


def _ends(model: nn.Module, outside: list[Tensor]) -> list[Tensor]:
    """What stands outside, the embedding first and the head last."""
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
