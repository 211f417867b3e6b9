"""Trace one forward pass on meta: operations and saved elements of each layer, per token.

Loads torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from shardlab.layout.structure import AttentionCore

from .layer_kinds import find_main_stack, find_stacks
from .meta_stubs import get_storage_id, patch_modules, stub_calls

TRACE_TOKENS = 4096  # more than a sparse attention selects
LATENT_MODULE = re.compile(r"(^|\.)(q|kv)_(a_(layer)?norm|b_proj|a_proj\w*)$")


@dataclass(frozen=True)
class LayerTrace:
    """A layer's trace; elements and operations are per token."""

    cores: tuple[tuple[AttentionCore, str], ...]  # cores, each with the reason if unknown
    chosen: tuple[int, ...]
    matmul_flops: float  # operations in matrix products and convolutions
    stream: float  # saved 16-bit elements, by part; the FFN's follow by formula
    latent: float
    heads: float


@dataclass
class _SavedStorage:
    """A storage that autograd saves."""

    part: str
    size: int
    views: dict[int, int] = field(default_factory=dict)

    @property
    def elements(self) -> int:
        return min(self.size, sum(self.views.values()))


class _LayerObserver:
    """The observations while one layer runs."""

    def __init__(self, model_storages: set[int]) -> None:
        self.model_storages = model_storages
        self.saved: dict[int, _SavedStorage] = {}
        self.kept_alive: list[Tensor] = []  # so that no storage id is reused
        self.running: list[str] = []  # running modules, by names inside the layer
        self.inputs: set[int] = set()  # storages of inputs of the layer's children
        self.latent: set[int] = set()
        self.mixing: set[str] = set()  # children that called attention

    def record_saved(self, tensor: Tensor) -> Tensor:
        where = get_storage_id(tensor)
        if tensor.dtype == torch.float32 or not tensor.is_floating_point():
            return tensor
        if where in self.model_storages:
            return tensor
        self.kept_alive.append(tensor)
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        name = self.running[-1] if self.running else ""
        child = name.partition(".")[0]
        if where in self.inputs or not child:
            part = "stream"
        elif where in self.latent or LATENT_MODULE.search(name):
            part = "latent"
        else:
            part = child
        saved = self.saved.setdefault(where, _SavedStorage(part, size))
        elements = min(size, tensor.numel())
        offset = tensor.storage_offset()
        saved.views[offset] = max(saved.views.get(offset, 0), elements)
        return tensor

    def add_hooks(self, layer: nn.Module) -> None:
        """Track which modules of the layer are running; hooks stay, since it runs only once."""
        for name, module in layer.named_modules():
            if name:
                hook = partial(self._pre_forward, name)
                module.register_forward_pre_hook(hook, with_kwargs=True)
                module.register_forward_hook(partial(self._post_forward, name))

    def _pre_forward(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.running.append(name)
        if "." not in name:
            given = [g for g in (*args, *kwargs.values()) if isinstance(g, Tensor)]
            self.inputs |= {get_storage_id(g) for g in given}
            self.kept_alive += given
            self.cores_before = len(stub_calls.cores)

    def _post_forward(self, name: str, module: nn.Module, args: Any, out: Any) -> None:
        self.running.pop()
        if LATENT_MODULE.search(name) and "b_proj" not in name and isinstance(out, Tensor):
            self.latent.add(get_storage_id(out))
            self.kept_alive.append(out)
        if "." not in name and len(stub_calls.cores) > self.cores_before:
            self.mixing.add(name)

    def sum_saved(self, tokens: int) -> dict[str, float]:
        """Return saved elements per token of the residual stream, latents, and token mixers."""
        found = dict.fromkeys(("stream", "latent", "heads"), 0.0)
        for storage in self.saved.values():
            part = "heads" if storage.part in self.mixing else storage.part
            if part in found:
                found[part] += storage.elements / tokens
        return found


def trace_layers(model: nn.Module, layer_keys: list[Any], tokens: int) -> list[LayerTrace]:
    """Trace each layer of the main stack in a forward pass over a sequence of `tokens` tokens.

    layer_keys: a key for each layer; of layers with equal keys only the first is run.
    """
    layers = list(find_stacks(model)[find_main_stack(model)])
    tensors = [*model.parameters(), *model.buffers()]
    model_storages = {get_storage_id(t) for t in tensors}
    counter = FlopCounterMode(display=False)
    found: dict[int, LayerTrace] = {}

    def replace_forward(number: int, layer: nn.Module) -> None:
        forward = layer.forward

        def traced_forward(*args: Any, **kwargs: Any) -> Any:
            stub_calls.cores, stub_calls.chosen = [], []
            before, observer = counter.get_total_flops(), _LayerObserver(model_storages)
            for given in (*args, *kwargs.values()):
                if isinstance(given, Tensor):
                    observer.inputs.add(get_storage_id(given))
            observer.add_hooks(layer)
            with torch.autograd.graph.saved_tensors_hooks(observer.record_saved, lambda kept: kept):
                out = forward(*args, **kwargs)
            matmul_flops = (counter.get_total_flops() - before) / tokens
            called = tuple(stub_calls.cores), tuple(stub_calls.chosen)
            found[number] = LayerTrace(*called, matmul_flops, **observer.sum_saved(tokens))
            outputs[number] = out
            return out

        layer.forward = traced_forward  # type: ignore[method-assign]

    firsts = [layer_keys.index(one) for one in layer_keys]
    outputs: dict[int, Any] = {}
    for number, layer in enumerate(layers):
        if firsts[number] == number:
            replace_forward(number, layer)
        else:
            first = firsts[number]
            layer.forward = lambda *_, first=first, **__: outputs[first]  # type: ignore
    model.eval()  # no dropout
    with patch_modules(model), counter, torch.device("meta"):
        ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
        model(input_ids=ids, use_cache=False)
    return [found[first] for first in firsts]
