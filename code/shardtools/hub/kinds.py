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

# Names of towers that process no text.
OTHERS = re.compile(r"vision|visual|image|audio|speech|patcher|img_")
# Modules that store transposed matrices, beside those with `is_transposed`.
FLIPPED = "Conv1D", "Llama4TextExperts", "AriaExperts"
# Keys for the number of experts that a token uses; the first one that is set counts.
CHOSEN = (
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts",
    "num_selected_experts",
)  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """A parameter of a layer, or outside of the layers."""

    name: str  # name inside the layer
    shape: tuple[int, ...]  # for experts the shape of one; outputs before inputs
    experts: int = 0  # number of experts in the tensor; 0: it belongs to no expert
    tied: str | None = None  # earlier name of the same parameter
    table: bool = False  # tokens look up some of its rows, as in an embedding of n-grams


@dataclass(frozen=True)
class Alike:
    """The common description of all layers of a kind."""

    module: str  # class of the layer's module
    pattern: str  # entry in config.layer_types
    tensors: tuple[Tensor, ...]
    experts: int
    chosen: int


def stacks(model: nn.Module) -> dict[str, nn.ModuleList]:
    """Return the lists of numbered layers by name, without lists inside another one."""
    found: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{other}.") for other in found)
        if isinstance(module, nn.ModuleList) and len(module) and not inside:
            found[name] = module
    return found


def main_stack(model: nn.Module) -> str:
    """Return the name of the stack that text goes through: the one with the most parameters."""
    sizes = {
        name: sum(p.numel() for p in stack.parameters())
        for name, stack in stacks(model).items()
        if not OTHERS.search(name)
    }
    return max(sizes, key=lambda name: sizes[name], default="")


def parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, str | None]]:
    """Yield each name of each parameter, and the first name of a tied one (else None)."""
    first: dict[int, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        before = first.setdefault(id(p), name)
        yield name, p, before if before != name else None


def split(model: nn.Module) -> tuple[list[Alike], list[Tensor]]:
    """Return each layer of the main stack, in order, and the tensors outside of it.

    A layer's tensors exclude those that it shares with an earlier one. Raises ValueError if the
    number of experts that a token uses is not known.
    """
    stack = main_stack(model)
    config = model.config.get_text_config()
    layers = list(stacks(model)[stack]) if stack else []
    inside: list[list[Tensor]] = [[] for _ in layers]
    outside = []
    expert = [_in_experts(layer) for layer in layers]
    flipped = [_flipped(layer) for layer in layers]
    tables = _tables(model)
    for name, p, tied in parameters(model):
        number, _, inner = name.removeprefix(f"{stack}.").partition(".")
        if stack and name.startswith(f"{stack}.") and number.isdigit():
            if tied is None:
                many = expert[int(number)].get(inner, 0)
                shape = tuple(p.shape[1:] if many else p.shape)
                if inner in flipped[int(number)] and len(shape) == 2:
                    shape = shape[::-1]
                inside[int(number)].append(Tensor(inner, shape, many, table=name in tables))
        else:
            outside.append(Tensor(name, tuple(p.shape), 0, tied, table=name in tables))
    patterns = _patterns(config, len(layers))
    found = []
    for number, (layer, tensors) in enumerate(zip(layers, inside, strict=True)):
        many = {t.experts for t in tensors if t.experts}
        if len(many) > 1:
            words = f"experts of several numbers, {sorted(many)}: what a token meets is not known"
            raise ValueError(f"{type(layer).__name__} has {words}")
        shared = setting(config, "n_shared_experts") or 0  # some routers weigh these, too
        routes = {n + more for n in many for more in (0, shared)}
        if many and not any(not t.experts and t.shape[0] in routes for t in tensors):
            words = f"a router that chooses among others than its {max(many)} experts"
            raise ValueError(f"{type(layer).__name__} has {words}: what a token meets is not known")
        k = chosen(config, number) if many else 0
        if k > max(many, default=k):
            words = f"{k}, more experts than its {max(many)}"
            raise ValueError(f"{type(layer).__name__}: a token goes through {words}")
        alike = type(layer).__name__, patterns[number], tuple(tensors), max(many, default=0), k
        found.append(Alike(*alike))
    if odd := [t.name for t in outside if "expert" in t.name and len(t.shape) > 2]:
        raise ValueError(f"{type(model).__name__} has experts outside of the layers: {odd[0]}")
    return found, outside


def _tables(model: nn.Module) -> set[str]:
    """Return the embeddings, other than the model's own, whose rows tokens choose.

    Smaller embeddings, such as those of positions, count as used, as the model's own does.
    """
    first = model.get_input_embeddings()
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        and module is not first
        and module.num_embeddings >= first.weight.shape[0]
    }


def _in_experts(layer: nn.Module) -> dict[str, int]:
    """Return the number of experts of each parameter that experts own, by its name in the layer.

    Raises ValueError for a module whose name says that it has experts, and whose shapes do not.
    """
    found = {}
    for name, module in layer.named_modules():
        kind = type(module).__name__
        if not kind.endswith("Experts") or "shared" in name:
            continue
        held = dict(module.named_parameters())
        many = {p.shape[0] for p in held.values() if p.dim() > 2}
        if not many:
            words = "their tensors have no axis of experts, so what a token meets is not known"
            raise ValueError(f"{kind}: {words}")
        for inner, p in held.items():
            if p.dim() > 1:
                found[f"{name}.{inner}".lstrip(".")] = p.shape[0]
    if not found:
        odd = [type(m).__name__ for m in layer.modules()]
        if odd := [kind for kind in odd if re.search("M[oO]E$|SparseMoeBlock$|MoeBlock$", kind)]:
            raise ValueError(f"{odd[0]}: which of its tensors are experts is not known")
    return found


def _flipped(layer: nn.Module) -> set[str]:
    """Return the matrices that are stored as (inputs, outputs), by name in the layer."""
    found = set()
    for name, module in layer.named_modules():
        kind = type(module).__name__
        if kind in FLIPPED or getattr(module, "is_transposed", False):
            found |= {f"{name}.{inner}" for inner, _ in module.named_parameters()}
    return found


def chosen(config: Any, number: int) -> int:
    """Return the number of experts that a token uses in a layer."""
    for key in CHOSEN:
        value = setting(config, key)
        value = value[number] if isinstance(value, list | tuple) else value
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    words = f"none of {', '.join(CHOSEN)} says how many experts a token goes through"
    raise ValueError(f"model_type={config.model_type!r}: {words}")


def settings(layer: nn.Module) -> tuple[object, ...]:
    """Return the plain attributes of a layer's modules, such as a window or a type."""
    plain = (bool, int, float, str, type(None))
    return tuple(
        (name, key, value)
        for name, module in layer.named_modules()
        for key, value in sorted(vars(module).items())
        if isinstance(value, plain) and not re.search("^_|layer_id|^layer_number$", key)
    )


def setting(config: Any, key: str) -> Any:
    """Return a setting that all layers share; None if each layer has its own."""
    try:
        return getattr(config, key, None)
    except Exception:  # transformers raises for a setting that differs by layer
        return None


def _patterns(config: Any, layers: int) -> list[str]:
    """Return the configuration's type of each layer, which its shapes do not show."""
    types = setting(config, "layer_types") or ()
    return [str(types[n]) if n < len(types) else "" for n in range(layers)]
