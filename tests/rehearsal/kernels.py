"""Operators with other kernels on CUDA: the same numbers, with the outputs of CUDA's kernels.

Autograd saves a kernel's outputs, so that shapes and memory layouts are the GPU's; a fused kernel
draws other random numbers than the separate operators that it replaces.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .machine import KIND, find
from .paint import device_of, plain

aten = torch.ops.aten
NARROW = (torch.float16, torch.bfloat16)


def allocate(shape: Any, dtype: torch.dtype) -> Tensor:
    """Allocate memory without paint, invisible to all modes."""
    return torch._C._VariableFunctions.empty(shape, dtype=dtype, device="cpu")


# --- attention


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Any, float]:
    wide = torch.promote_types(q.dtype, torch.float32)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = q.to(wide) @ k.to(wide).transpose(-2, -1) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores, wide, scale


def _attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: Any) -> tuple[Tensor, Tensor]:
    scores, wide, _ = _scores(q, k, causal, scale)
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp() @ v.to(wide)).to(q.dtype), lse.float()


def _gradients(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, causal: bool, scale: Any
) -> tuple[Tensor, Tensor, Tensor]:
    scores, wide, scale = _scores(q, k, causal, scale)
    p = (scores - lse[..., None]).exp()
    dv = p.transpose(-2, -1) @ dy.to(wide)
    dp = dy.to(wide) @ v.to(wide).transpose(-2, -1)
    ds = p * (dp - (dy.to(wide) * y.to(wide)).sum(-1, keepdim=True)) * scale
    dq, dk = ds @ k.to(wide), ds.transpose(-2, -1) @ q.to(wide)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _laid_out(x: Tensor) -> Tensor:
    """Return a copy with the kernels' output layout: [B, S, A, D] in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _each_head(x: Tensor, q: Tensor) -> Tensor:
    repeats = q.shape[1] // x.shape[1]
    return x if repeats == 1 else x.repeat_interleave(repeats, 1)


def _check_dtypes(name: str, q: Tensor, k: Tensor, v: Tensor, allowed: tuple[Any, ...]) -> None:
    if q.dtype not in allowed or len({q.dtype, k.dtype, v.dtype}) > 1:
        find("dtype", f"{name}: q {q.dtype}, k {k.dtype}, v {v.dtype}: must be {allowed}")


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, compute_lse: bool, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: Any = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    _check_dtypes("efficient attention", q, k, v, (torch.float32, *NARROW))
    assert bias is None and not dropout_p
    if q.shape[1] != k.shape[1]:
        find("shape", f"efficient attention: {q.shape[1]} query heads, {k.shape[1]} key heads")
    y, lse = _attention(q, k, v, is_causal, scale)
    rows = -(-q.shape[-2] // 32) * 32 if compute_lse else 0
    padded = lse.new_full((*lse.shape[:-1], rows), torch.inf)
    padded[..., : lse.shape[-1]] = lse[..., :rows]
    return _laid_out(y), padded, allocate((), torch.int64), allocate((), torch.int64)


def _efficient_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Any, out: Tensor, lse: Tensor, seed: Any,
    offset: Any, dropout_p: float, mask: Any, is_causal: bool = False, *, scale: Any = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    if lse.shape[-1] % 32:
        find("shape", f"efficient attention: logarithms in rows of 32, given {list(lse.shape)}")
    found = _gradients(dy, q, k, v, out, lse[..., : q.shape[-2]], is_causal, scale)
    return (*map(_laid_out, found), allocate((0,), q.dtype))


def _flash(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    _check_dtypes("flash attention", q, k, v, NARROW)
    y, lse = _attention(q, _each_head(k, q), _each_head(v, q), is_causal, scale)
    state, none, mask = (
        allocate((2,), torch.uint64),
        allocate((), torch.uint64),
        allocate((0,), q.dtype),
    )
    return _laid_out(y), lse, None, None, q.shape[-2], k.shape[-2], state, none, mask


def _flash_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cumulative_q: Any,
    cumulative_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool, seed: Any,
    offset: Any, *, scale: Any = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    if not lse.is_contiguous() or lse.shape[-1] != q.shape[-2]:
        find("shape", f"flash attention: contiguous logarithms, given {list(lse.shape)}")
    repeats = q.shape[1] // k.shape[1]
    dq, dk, dv = _gradients(dy, q, _each_head(k, q), _each_head(v, q), out, lse, is_causal, scale)
    if repeats > 1:
        dk, dv = (x.unflatten(1, (-1, repeats)).sum(2) for x in (dk, dv))
    return tuple(map(_laid_out, (dq, dk, dv)))


def _attend(original: Any) -> Any:
    """Return scaled_dot_product_attention with the kernel that a GPU would choose."""

    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Tensor:
        if torch.overrides.has_torch_function(args[:3]):
            return torch.overrides.handle_torch_function(
                scaled_dot_product_attention, args[:3], *args, **kwargs
            )
        return attend(*args, **kwargs)

    def attend(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: Any = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        given = [x for x in (query, key, value, attn_mask) if x is not None]
        if not all(map(plain, given)) or device_of(query).type != KIND:
            return original(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                enable_gqa=enable_gqa,
            )  # fmt: skip
        if len({device_of(x) for x in given}) > 1:
            find("devices", "scaled_dot_product_attention: tensors on more than one device")
        options = {"is_causal": is_causal, "scale": scale}
        width = query.shape[-1]
        if attn_mask is None and not dropout_p and query.dim() == 4:
            if query.dtype in NARROW and width % 8 == 0:
                return aten._scaled_dot_product_flash_attention(query, key, value, **options)[0]
            if query.dtype in (torch.float32, *NARROW) and not width % 4:
                key, value = _each_head(key, query), _each_head(value, query)
                needed = any(x.requires_grad for x in (query, key, value))
                return aten._scaled_dot_product_efficient_attention(
                    query, key, value, None, needed and torch.is_grad_enabled(), **options
                )[0]
        if enable_gqa:
            key, value = _each_head(key, query), _each_head(value, query)
        return aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, **options
        )[0]

    return scaled_dot_product_attention


# --- dropout


def _native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Compute the fused kernel: it keeps values where `rand` >= p, unlike `bernoulli_`."""
    mask = torch.rand(x.shape, dtype=torch.float32) >= p
    return x * mask / (1 - p), mask


def _dropout(original: Any) -> Any:
    """Return dropout with CUDA's choice: the fused kernel out of place, not in place."""

    def dropout(input: Tensor, p: float, train: bool) -> Tensor:
        fused = train and 0 < p < 1 and plain(input) and device_of(input).type == KIND
        if fused and input.numel():
            return torch.native_dropout(input, p, train)[0]
        return original(input, p, train)

    return dropout


EMULATED = {
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "native_dropout": _native_dropout,
}


def install() -> None:
    """Replace torch's operators."""
    F.scaled_dot_product_attention = _attend(F.scaled_dot_product_attention)
    torch._VF.dropout = torch.dropout = _dropout(torch.dropout)
