"""Stand-ins for parts of a model whose cost its eager code does not show.

transformers replaces attention, masks and experts by name; norms and rotations are patched in
place. A stand-in computes nothing, and saves for backward what a fused kernel saves; no backward is
ever run. Without stand-ins a count on meta is wrong, and silently: attention has no causal half and
no window, and saves all scores; experts count as nothing (DeepSeek-V3: 17 of 94 · 10^9 operations a
token are theirs).

Loads torch and transformers, and changes the latter only within `registered` and `plugged`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import masking_utils
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from shardlab.layout.structure import AttentionCore

NAME = "shardlab"
PLUGGED = {"attn_implementation": NAME, "experts_implementation": NAME}


# Keys that a query attends to: size of a window or of a chunk, or neither; why it is not known.
Seen = tuple[int | None, int | None, str]


@dataclass
class Calls:
    """The stand-ins that a layer called."""

    mixed: list[tuple[AttentionCore, str]] = field(
        default_factory=list
    )  # a core, and why it is not known
    chosen: list[int] = field(default_factory=list)
    # By storage; kept alive, so that no address is reused. All layers share the masks.
    masks: dict[int, tuple[Tensor, Seen]] = field(default_factory=dict)


calls = Calls()


# Attention and its mask.


class _Core(torch.autograd.Function):
    """Attention that saves what flash attention does: q, k, v, its output, a number a row."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1])  # [b, s, a, D]
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:3], dtype=torch.float32))
        return out


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    window, chunk, unknown = sliding_window, None, ""
    if isinstance(attention_mask, Tensor):
        strange = None, (None, None, "a mask of its own making")
        window, chunk, unknown = calls.masks.get(storage(attention_mask), strange)[1]
    elif attention_mask is None and not more.get("is_causal", getattr(module, "is_causal", True)):
        window, unknown = None, "attention in both directions"
    sizes = query.shape[1], key.shape[1], query.shape[-1], value.shape[-1]
    calls.mixed.append((AttentionCore(*sizes, window=window, chunk=chunk), unknown))
    return _Core.apply(query, key, value), None


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any] | None = None,
    local_size: int | None = None,
    **more: Any,
) -> Tensor:
    mask = torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool, device="meta")
    calls.masks[storage(mask)] = mask, _seen(mask_function, local_size)
    return mask


def _seen(function: Callable[..., Any] | None, size: int | None) -> Seen:
    """Return which keys the model's own mask function lets a late query attend to."""
    row = 2 * (size or 2048) + 7  # a query beyond two windows or chunks
    with torch.device("cpu"):
        zero, keys = torch.zeros(1, dtype=torch.long), torch.arange(row + 64)
        try:
            found = torch.as_tensor(function(zero, zero, torch.tensor([row]), keys))  # type: ignore
            found = found.expand(len(keys)).nonzero()[:, 0]
        except Exception as error:
            return None, None, f"a mask that cannot be asked ({type(error).__name__})"
        first, last = int(found[0]), int(found[-1])
    if last != row or len(found) != last - first + 1:
        return None, None, "a mask that is not causal"
    if first == 0:
        return None, None, ""
    if size and first == row - size + 1:
        return size, None, ""
    if size and first == row - row % size:
        return None, size, ""
    return None, None, "a mask of another form than window and chunk"


def storage(tensor: Tensor) -> int:
    """Return the address of a tensor's storage."""
    return tensor.untyped_storage()._cdata


# Experts.


def _experts(self: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Send each choice as a row through expert 0, which has the shapes of any routing."""
    chosen = index.shape[-1]
    calls.chosen.append(chosen)
    rows = hidden.reshape(-1, hidden.shape[-1]).repeat_interleave(chosen, 0)  # [s k, h]
    up = self.gate_up_proj if self.has_gate else self.up_proj
    activated = self._apply_gate if self.has_gate else self.act_fn

    def product(x: Tensor, w: Tensor) -> Tensor:
        return x @ w[0] if self.is_transposed else nn.functional.linear(x, w[0])

    inner = activated(product(rows, up)) * weights.reshape(-1, 1).to(rows.dtype)
    out = product(inner, self.down_proj)
    return out.view(-1, chosen, out.shape[-1]).sum(1).reshape(hidden.shape).to(hidden.dtype)


# Norms and rotations.


class _Norm(torch.autograd.Function):
    """A norm that saves its input, and a number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)


class _Opaque(torch.autograd.Function):
    """A function that saves nothing: a rotation turns gradients back by the same angles."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], more: dict[str, Any], *given: Any) -> Any:
        with torch.no_grad():
            out = function(*(g.detach() if isinstance(g, Tensor) else g for g in given), **more)
        return tuple(o.clone() for o in out) if isinstance(out, tuple) else out.clone()


@contextmanager
def plugged(model: nn.Module) -> Iterator[None]:
    """Replace norms and rotations by stand-ins that save what fused kernels do, in this context."""
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("Norm") and "Gated" not in kind and type(module) is not nn.LayerNorm:
            module.forward = _fused(module)  # type: ignore[method-assign]
    spaces = {type(m).__module__ for m in model.modules()}
    with ExitStack() as stack:
        for name in (name for name in spaces if name.startswith("transformers.models")):
            for rotary in (n for n in dir(sys.modules[name]) if re.match("apply_.*rotary", n)):
                opaque = _opaque(getattr(sys.modules[name], rotary))
                stack.enter_context(mock.patch.object(sys.modules[name], rotary, opaque))
        yield


def _fused(module: nn.Module) -> Callable[..., Tensor]:
    return lambda x, *_, **__: _Norm.apply(x, getattr(module, "weight", None))


def _opaque(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given, **more: _Opaque.apply(function, more, *given)


@contextmanager
def registered() -> Iterator[None]:
    """Register attention, masks and experts with transformers under NAME, in this context."""
    overlay = masking_utils.chunked_overlay

    def on_cpu(size: int, left: Tensor) -> Any:
        return overlay(size, torch.zeros(len(left), dtype=torch.long, device="cpu"))

    with ExitStack() as stack:
        for registry, own in (
            (ALL_ATTENTION_FUNCTIONS, _attention),
            (ALL_MASK_ATTENTION_FUNCTIONS, _mask),
            (ALL_EXPERTS_FUNCTIONS, _experts),
        ):
            stack.enter_context(mock.patch.dict(type(registry)._global_mapping, {NAME: own}))
        # Both functions would read numbers, which meta tensors do not have.
        nothing = mock.patch.object(masking_utils, "find_packed_sequence_indices", lambda _: None)
        stack.enter_context(nothing)
        stack.enter_context(mock.patch.object(masking_utils, "chunked_overlay", on_cpu))
        try:
            yield
        finally:
            calls.__init__()
