"""One forward pass on meta: what each layer computes, and keeps for backward, a token.

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

from shardlab.layout.structure import Core

from .kinds import main_stack, stacks
from .plugs import calls, plugged, storage

TOKENS = 4096  # of the sequence: more than a sparse attention chooses, and no multiple of its sizes
LATENT = re.compile(r"(^|\.)(q|kv)_(a_(layer)?norm|b_proj|a_proj\w*)$")


@dataclass(frozen=True)
class Traced:
    """Of a layer; elements and operations are those of a token."""

    mixed: tuple[tuple[Core, str], ...]  # and why a core is not known
    chosen: tuple[int, ...]
    products: float  # operations, in matrix products and convolutions
    stream: float  # elements in 16 bits that it keeps, of each part; a network's follow by formula
    latent: float
    heads: float


@dataclass
class _Saved:
    """A storage that autograd keeps."""

    part: str
    size: int
    views: dict[int, int] = field(default_factory=dict)

    @property
    def elements(self) -> int:
        return min(self.size, sum(self.views.values()))


class _Layer:
    """What is seen while one layer runs."""

    def __init__(self, own: set[int]) -> None:
        self.own = own
        self.saved: dict[int, _Saved] = {}
        self.held: list[Tensor] = []  # so that no storage is used again
        self.path: list[str] = []  # modules under way, names inside of the layer
        self.inputs: set[int] = set()  # storages that the layer's child got
        self.latent: set[int] = set()
        self.mixing: set[str] = set()  # children that called attention

    def pack(self, tensor: Tensor) -> Tensor:
        where = storage(tensor)
        if where in self.own or not tensor.is_floating_point() or tensor.dtype == torch.float32:
            return tensor
        self.held.append(tensor)
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        name = self.path[-1] if self.path else ""
        child = name.partition(".")[0]
        if where in self.inputs or not child:
            part = "stream"
        elif where in self.latent or LATENT.search(name):
            part = "latent"
        else:
            part = child
        one = self.saved.setdefault(where, _Saved(part, size))
        many = min(size, tensor.numel())
        at = tensor.storage_offset()
        one.views[at] = max(one.views.get(at, 0), many)
        return tensor

    def follow(self, layer: nn.Module) -> None:
        """Note which modules of the layer are under way; the hooks stay, for it runs once."""
        for name, module in layer.named_modules():
            if name:
                enter, leave = partial(self._enter, name), partial(self._leave, name)
                module.register_forward_pre_hook(enter, with_kwargs=True)
                module.register_forward_hook(leave)

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.path.append(name)
        if "." not in name:
            given = [g for g in (*args, *kwargs.values()) if isinstance(g, Tensor)]
            self.inputs |= {storage(g) for g in given}
            self.held += given
            self.before = len(calls.mixed)

    def _leave(self, name: str, module: nn.Module, args: Any, out: Any) -> None:
        self.path.pop()
        if LATENT.search(name) and "b_proj" not in name and isinstance(out, Tensor):
            self.latent.add(storage(out))
            self.held.append(out)
        if "." not in name and len(calls.mixed) > self.before:
            self.mixing.add(name)

    def kept(self, tokens: int) -> dict[str, float]:
        """Elements by part: those of the stream, of latents, and of what mixes tokens."""
        found = dict.fromkeys(("stream", "latent", "heads"), 0.0)
        for one in self.saved.values():
            part = "heads" if one.part in self.mixing else one.part
            if part in found:
                found[part] += one.elements / tokens
        return found


def traced(model: nn.Module, alike: list[Any], tokens: int) -> list[Traced]:
    """What each layer of the main stack does in a forward pass over a sequence of so many.

    alike: of each layer what tells it apart. Of those that have the same, one is followed, and its
    output is that of the others.
    """
    layers = list(stacks(model)[main_stack(model)])
    tensors = [*model.parameters(), *model.buffers()]
    own = {storage(t) for t in tensors}
    counter = FlopCounterMode(display=False)
    found: dict[int, Traced] = {}

    def watch(number: int, layer: nn.Module) -> None:
        forward = layer.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            calls.mixed, calls.chosen = [], []
            before, seen = counter.get_total_flops(), _Layer(own)
            for given in (*args, *kwargs.values()):
                if isinstance(given, Tensor):
                    seen.inputs.add(storage(given))
            seen.follow(layer)
            with torch.autograd.graph.saved_tensors_hooks(seen.pack, lambda kept: kept):
                out = forward(*args, **kwargs)
            products = (counter.get_total_flops() - before) / tokens
            called = tuple(calls.mixed), tuple(calls.chosen)
            found[number] = Traced(*called, products, **seen.kept(tokens))
            outputs[number] = out
            return out

        layer.forward = watched  # type: ignore[method-assign]

    firsts = [alike.index(one) for one in alike]
    outputs: dict[int, Any] = {}
    for number, layer in enumerate(layers):
        if firsts[number] == number:
            watch(number, layer)
        else:
            first = firsts[number]
            layer.forward = lambda *_, first=first, **__: outputs[first]  # type: ignore
    model.eval()  # no dropout
    with plugged(model), counter, torch.device("meta"):
        ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
        model(input_ids=ids, use_cache=False)
    return [found[first] for first in firsts]
