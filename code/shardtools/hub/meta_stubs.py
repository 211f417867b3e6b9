"""Stubs for parts of a model whose cost its eager code does not show on meta.

transformers replaces attention, masks and experts by name; norms and rotations are patched in
place. A stub computes nothing, and saves for backward the tensors that a fused kernel saves; no
backward is ever run. Without stubs a count on meta is wrong: attention has no causal half and no
window, and saves all scores; experts count as zero (they take 17 of the 94 · 10^9 operations per
token of DeepSeek-V3).

Loads torch and transformers; changes transformers only in `register_stubs` and `patch_modules`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import masking_utils
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from shardlab.layout.structure import AttentionCore

STUB_NAME = "shardlab"
STUB_IMPLEMENTATIONS = {"attn_implementation": STUB_NAME, "experts_implementation": STUB_NAME}


# Keys that a query attends to: size of a window or of a chunk, or neither; reason if unknown.
MaskRange = tuple[int | None, int | None, str]


@dataclass
class StubCalls:
    """The calls of stubs by one layer."""

    cores: list[tuple[AttentionCore, str]] = field(
        default_factory=list
    )  # a core; reason if unknown
    chosen: list[int] = field(default_factory=list)
    # By storage; kept alive, so that no id is reused. All layers share the masks.
    masks: dict[int, tuple[Tensor, MaskRange]] = field(default_factory=dict)


stub_calls = StubCalls()


# Attention and its mask.


class _AttentionStub(torch.autograd.Function):
    """Attention that saves the same as flash attention: q, k, v, output, one number per row."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1])  # [b, s, a, D]
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:3], dtype=torch.float32))
        return out


def _stub_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    window, chunk, unknown = sliding_window, None, ""
    if isinstance(attention_mask, Tensor):
        default = None, (None, None, "a mask that its own code makes")
        found = stub_calls.masks.get(get_storage_id(attention_mask), default)
        window, chunk, unknown = found[1]
    elif attention_mask is None and not kwargs.get("is_causal", getattr(module, "is_causal", True)):
        window, unknown = None, "attention in both directions"
    sizes = query.shape[1], key.shape[1], query.shape[-1], value.shape[-1]
    stub_calls.cores.append((AttentionCore(*sizes, window=window, chunk=chunk), unknown))
    return _AttentionStub.apply(query, key, value), None


def _stub_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any] | None = None,
    local_size: int | None = None,
    **kwargs: Any,
) -> Tensor:
    mask = torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool, device="meta")
    stub_calls.masks[get_storage_id(mask)] = mask, _probe_mask(mask_function, local_size)
    return mask


def _probe_mask(function: Callable[..., Any] | None, size: int | None) -> MaskRange:
    """Return the range of keys that the model's mask function gives to a late query."""
    row = 2 * (size or 2048) + 7  # a query beyond two windows or chunks
    with torch.device("cpu"):
        zero, keys = torch.zeros(1, dtype=torch.long), torch.arange(row + 64)
        try:
            found = torch.as_tensor(function(zero, zero, torch.tensor([row]), keys))  # type: ignore
            found = found.expand(len(keys)).nonzero()[:, 0]
        except Exception as error:
            return None, None, f"a mask that cannot be probed ({type(error).__name__})"
        first, last = int(found[0]), int(found[-1])
    if last != row or len(found) != last - first + 1:
        return None, None, "a mask that is not causal"
    if first == 0:
        return None, None, ""
    if size and first == row - size + 1:
        return size, None, ""
    if size and first == row - row % size:
        return None, size, ""
    return None, None, "a mask that is neither a window nor a chunk"


def get_storage_id(tensor: Tensor) -> int:
    """Return an id of a tensor's storage."""
    return tensor.untyped_storage()._cdata


# Experts.


def _stub_experts(self: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Send all rows through expert 0, which gives the shapes of any routing."""
    chosen = index.shape[-1]
    stub_calls.chosen.append(chosen)
    rows = hidden.reshape(-1, hidden.shape[-1]).repeat_interleave(chosen, 0)  # [s k, h]
    up = self.gate_up_proj if self.has_gate else self.up_proj
    activated = self._apply_gate if self.has_gate else self.act_fn

    def multiply(x: Tensor, w: Tensor) -> Tensor:
        return x @ w[0] if self.is_transposed else nn.functional.linear(x, w[0])

    inner = activated(multiply(rows, up)) * weights.reshape(-1, 1).to(rows.dtype)
    out = multiply(inner, self.down_proj)
    return out.view(-1, chosen, out.shape[-1]).sum(1).reshape(hidden.shape).to(hidden.dtype)


# Norms and rotations.


class _NormStub(torch.autograd.Function):
    """A norm that saves its input, and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)


class _OpaqueStub(torch.autograd.Function):
    """A function that saves nothing: a rotation turns gradients back by the same angles."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], more: dict[str, Any], *given: Any) -> Any:
        with torch.no_grad():
            out = function(*(g.detach() if isinstance(g, Tensor) else g for g in given), **more)
        return tuple(o.clone() for o in out) if isinstance(out, tuple) else out.clone()


@contextmanager
def patch_modules(model: nn.Module) -> Iterator[None]:
    """Replace norms and rotations by stubs that save as fused kernels do, in this context."""
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("Norm") and "Gated" not in kind and type(module) is not nn.LayerNorm:
            module.forward = _make_fused_norm(module)  # type: ignore[method-assign]
    modules = {type(m).__module__ for m in model.modules()}
    with ExitStack() as stack:
        for name in (name for name in modules if name.startswith("transformers.models")):
            for rotary in (n for n in dir(sys.modules[name]) if re.match("apply_.*rotary", n)):
                opaque = _make_opaque(getattr(sys.modules[name], rotary))
                stack.enter_context(mock.patch.object(sys.modules[name], rotary, opaque))
        yield


def _make_fused_norm(module: nn.Module) -> Callable[..., Tensor]:
    return lambda x, *_, **__: _NormStub.apply(x, getattr(module, "weight", None))


def _make_opaque(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given, **more: _OpaqueStub.apply(function, more, *given)


@contextmanager
def register_stubs() -> Iterator[None]:
    """Register stubs of attention, masks and experts as STUB_NAME, in this context."""
    overlay = masking_utils.chunked_overlay

    def overlay_on_cpu(size: int, left: Tensor) -> Any:
        return overlay(size, torch.zeros(len(left), dtype=torch.long, device="cpu"))

    with ExitStack() as stack:
        for registry, stub in (
            (ALL_ATTENTION_FUNCTIONS, _stub_attention),
            (ALL_MASK_ATTENTION_FUNCTIONS, _stub_mask),
            (ALL_EXPERTS_FUNCTIONS, _stub_experts),
        ):
            stack.enter_context(mock.patch.dict(type(registry)._global_mapping, {STUB_NAME: stub}))
        # Both functions would read numbers, which meta tensors do not have.
        patch = partial(mock.patch.object, masking_utils)
        stack.enter_context(patch("find_packed_sequence_indices", lambda _: None))
        stack.enter_context(patch("chunked_overlay", overlay_on_cpu))
        try:
            yield
        finally:
            stub_calls.__init__()
