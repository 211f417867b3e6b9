"""One forward pass on meta: operations of each layer, and numbers it saves for backward, a token.

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

from .kinds import main_stack, stacks
from .plugs import calls, plugged, storage

TOKENS = 4096  # tokens of the sequence: more than a sparse attention chooses
LATENT = re.compile(r"(^|\.)(q|kv)_(a_(layer)?norm|b_proj|a_proj\w*)$")


@dataclass(frozen=True)
class Traced:
    """A layer's trace; elements and operations are per token."""

    mixed: tuple[tuple[AttentionCore, str], ...]  # cores, each with why it is not known
    chosen: tuple[int, ...]
    products: float  # operations in matrix products and convolutions
    stream: float  # saved 16-bit elements, by part; those of networks follow by formula
    latent: float
    heads: float


@dataclass
class _Saved:
    """A storage that autograd saves."""

    part: str
    size: int
    views: dict[int, int] = field(default_factory=dict)

    @property
    def elements(self) -> int:
        return min(self.size, sum(self.views.values()))


class _Layer:
    """The observations while one layer runs."""

    def __init__(self, own: set[int]) -> None:
        self.own = own
        self.saved: dict[int, _Saved] = {}
        self.held: list[Tensor] = []  # kept alive, so that no storage's address is reused
        self.path: list[str] = []  # running modules, by names inside the layer
        self.inputs: set[int] = set()  # storages of inputs of the layer's children
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
        """Track which modules of the layer are running; hooks stay, since it runs only once."""
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
        """Return saved elements per token by part: the stream, latents, and token mixers."""
        found = dict.fromkeys(("stream", "latent", "heads"), 0.0)
        for one in self.saved.values():
            part = "heads" if one.part in self.mixing else one.part
            if part in found:
                found[part] += one.elements / tokens
        return found


def traced(model: nn.Module, alike: list[Any], tokens: int) -> list[Traced]:
    """Trace each layer of the main stack in a forward pass over a sequence of `tokens` tokens.

    alike: a value for each layer; of layers with equal values only the first runs, for all of them.
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
