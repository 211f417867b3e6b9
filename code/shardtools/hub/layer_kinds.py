"""Kinds of layers of a model on meta, their order, tensors outside of them, and shared tensors.

A kind of layer is the class of its module, its entry in config.layer_types, and the shapes of all
its parameters; no model is recognized by its name. Loads torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

# Names of modules for images or sound.
NON_TEXT_NAMES = re.compile(r"vision|visual|image|audio|speech|patcher|img_")
# Modules that store transposed matrices, beside those with `is_transposed`.
TRANSPOSED_MODULES = "Conv1D", "Llama4TextExperts", "AriaExperts"
# Keys for the number of experts that a token uses; the first one that is set counts.
TOP_K_KEYS = (
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts",
    "num_selected_experts",
)  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """A parameter inside or outside the layers."""

    name: str  # name inside the layer
    shape: tuple[int, ...]  # for experts the shape of one; outputs before inputs
    experts: int = 0  # number of experts in the tensor; 0: it belongs to no expert
    tied: str | None = None  # earlier name of the same parameter
    table: bool = False  # a lookup table, such as an embedding of n-grams


@dataclass(frozen=True)
class LayerInfo:
    """The description of all layers of one kind."""

    module: str  # class of the layer's module
    pattern: str  # entry in config.layer_types
    tensors: tuple[TensorInfo, ...]
    experts: int
    chosen: int


def find_stacks(model: nn.Module) -> dict[str, nn.ModuleList]:
    """Return the lists of numbered layers by name, without lists inside another one."""
    found: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{other}.") for other in found)
        if isinstance(module, nn.ModuleList) and len(module) and not inside:
            found[name] = module
    return found


def find_main_stack(model: nn.Module) -> str:
    """Return the name of the text stack: the one with the most parameters."""
    sizes = {
        name: sum(p.numel() for p in stack.parameters())
        for name, stack in find_stacks(model).items()
        if not NON_TEXT_NAMES.search(name)
    }
    return max(sizes, key=lambda name: sizes[name], default="")


def iterate_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, str | None]]:
    """Yield each name of each parameter, and the first name of a tied one (else None)."""
    first: dict[int, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        before = first.setdefault(id(p), name)
        yield name, p, before if before != name else None


def split_model(model: nn.Module) -> tuple[list[LayerInfo], list[TensorInfo]]:
    """Return each layer of the main stack, in order, and the tensors outside of the stack.

    Tensors shared with an earlier layer are left out. Raises ValueError if the number of experts
    per token is not known.
    """
    stack = find_main_stack(model)
    config = model.config.get_text_config()
    layers = list(find_stacks(model)[stack]) if stack else []
    inside: list[list[TensorInfo]] = [[] for _ in layers]
    outside = []
    num_experts = [_count_experts(layer) for layer in layers]
    transposed = [_find_transposed(layer) for layer in layers]
    tables = _find_lookup_tables(model)
    for name, p, tied in iterate_parameters(model):
        number, _, inner = name.removeprefix(f"{stack}.").partition(".")
        if stack and name.startswith(f"{stack}.") and number.isdigit():
            if tied is None:
                count = num_experts[int(number)].get(inner, 0)
                shape = tuple(p.shape[1:] if count else p.shape)
                if inner in transposed[int(number)] and len(shape) == 2:
                    shape = shape[::-1]
                inside[int(number)].append(TensorInfo(inner, shape, count, table=name in tables))
        else:
            outside.append(TensorInfo(name, tuple(p.shape), 0, tied, table=name in tables))
    layer_types = _get_layer_types(config, len(layers))
    found = []
    for number, (layer, tensors) in enumerate(zip(layers, inside, strict=True)):
        counts = {t.experts for t in tensors if t.experts}
        if len(counts) > 1:
            words = f"several numbers of experts, {sorted(counts)}: experts per token are not known"
            raise ValueError(f"{type(layer).__name__} has {words}")
        shared = get_setting(config, "n_shared_experts") or 0  # some routers weigh these, too
        routes = {n + more for n in counts for more in (0, shared)}
        if counts and not any(not t.experts and t.shape[0] in routes for t in tensors):
            words = f"no router over its {max(counts)} experts: experts per token are not known"
            raise ValueError(f"{type(layer).__name__} has {words}")
        k = get_top_k(config, number) if counts else 0
        if k > max(counts, default=k):
            words = f"{k} experts per token are more than its {max(counts)}"
            raise ValueError(f"{type(layer).__name__}: {words}")
        many, name = max(counts, default=0), type(layer).__name__
        found.append(LayerInfo(name, layer_types[number], tuple(tensors), many, k))
    if odd := [t.name for t in outside if "expert" in t.name and len(t.shape) > 2]:
        raise ValueError(f"{type(model).__name__} has experts outside of the layers: {odd[0]}")
    return found, outside


def _find_lookup_tables(model: nn.Module) -> set[str]:
    """Return the lookup tables: embeddings as large as the model's own, without that one."""
    first = model.get_input_embeddings()
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        and module is not first
        and module.num_embeddings >= first.weight.shape[0]
    }


def _count_experts(layer: nn.Module) -> dict[str, int]:
    """Return the number of experts in each parameter of experts, by its name in the layer.

    Raises ValueError for a module with a name of experts, but without their shapes.
    """
    found = {}
    for name, module in layer.named_modules():
        kind = type(module).__name__
        if not kind.endswith("Experts") or "shared" in name:
            continue
        parameters = dict(module.named_parameters())
        counts = {p.shape[0] for p in parameters.values() if p.dim() > 2}
        if not counts:
            words = "tensors without an axis of experts: experts per token are not known"
            raise ValueError(f"{kind}: {words}")
        for inner, p in parameters.items():
            if p.dim() > 1:
                found[f"{name}.{inner}".lstrip(".")] = p.shape[0]
    if not found:
        kinds = [type(m).__name__ for m in layer.modules()]
        if odd := [kind for kind in kinds if re.search("M[oO]E$|SparseMoeBlock$|MoeBlock$", kind)]:
            raise ValueError(f"{odd[0]}: its experts' tensors are not known")
    return found


def _find_transposed(layer: nn.Module) -> set[str]:
    """Return the matrices that are stored as (inputs, outputs), by name in the layer."""
    found = set()
    for name, module in layer.named_modules():
        kind = type(module).__name__
        if kind in TRANSPOSED_MODULES or getattr(module, "is_transposed", False):
            found |= {f"{name}.{inner}" for inner, _ in module.named_parameters()}
    return found


def get_top_k(config: Any, number: int) -> int:
    """Return the number of experts per token in a layer."""
    for key in TOP_K_KEYS:
        value = get_setting(config, key)
        value = value[number] if isinstance(value, list | tuple) else value
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    words = f"none of {', '.join(TOP_K_KEYS)} gives the experts per token"
    raise ValueError(f"model_type={config.model_type!r}: {words}")


def get_plain_attributes(layer: nn.Module) -> tuple[object, ...]:
    """Return the plain attributes of a layer's modules, such as a window or a type."""
    plain = (bool, int, float, str, type(None))
    return tuple(
        (name, key, value)
        for name, module in layer.named_modules()
        for key, value in sorted(vars(module).items())
        if isinstance(value, plain) and not re.search("^_|layer_id|^layer_number$", key)
    )


def get_setting(config: Any, key: str) -> Any:
    """Return a setting that all layers share; None if each layer has its own."""
    try:
        return getattr(config, key, None)
    except Exception:  # transformers raises for a setting that differs by layer
        return None


def _get_layer_types(config: Any, layers: int) -> list[str]:
    """Return the configuration's type of each layer, which its shapes do not show."""
    types = get_setting(config, "layer_types") or ()
    return [str(types[n]) if n < len(types) else "" for n in range(layers)]
