"""Attention over one block of keys, returning its output and the log-sum-exp of its scores.

Softmax over all keys can be combined from softmaxes over blocks of keys if each block returns the
log-sum-exp of its scores with its output. torch's fused kernels compute the log-sum-exp, because
their own backward needs it, but `scaled_dot_product_attention` does not return it. So this module
calls the kernels by their internal names.

Backward of one block is the fused kernel's own, given the output and the log-sum-exp of the *whole*
row: the probabilities are exp(score - lse), so each block's share of the gradients can be computed
without the other blocks (Dao et al. 2022, "FlashAttention", arXiv 2205.14135, appendix B.2).

Shapes: B batch, A query heads, K key and value heads, Q queries, T keys, D size of a head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten


class Gradients(NamedTuple):
    """One block's gradients: of queries [B, A, Q, D], of keys and values [B, K, T, D]."""

    queries: Tensor
    keys: Tensor
    values: Tensor


def block_attention(
    q_BAQD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the output [B, A, Q, D] and log-sum-exp [B, A, Q] of attention over these keys.

    causal: query i sees keys 0 to i. The log-sum-exp is that of the scores q . k / sqrt(D), in
    float32, or in float64 for float64 queries.
    """
    kind = _choose_kernel(q_BAQD)
    q_BAQD, k_BKTD, v_BKTD = _make_last_dim_contiguous(q_BAQD, k_BKTD, v_BKTD)
    if kind == "cpu":
        # This kernel supports grouped-query attention itself.
        return aten._scaled_dot_product_flash_attention_for_cpu(q_BAQD, k_BKTD, v_BKTD, 0.0, causal)
    k_BATD, v_BATD = _repeat_heads(k_BKTD, q_BAQD), _repeat_heads(v_BKTD, q_BAQD)
    if kind == "flash":
        y, lse, *_ = aten._scaled_dot_product_flash_attention(q_BAQD, k_BATD, v_BATD, 0.0, causal)
        return y, lse
    if kind == "efficient":
        y, lse, *_ = aten._scaled_dot_product_efficient_attention(
            q_BAQD, k_BATD, v_BATD, None, True, 0.0, causal
        )
        return y, lse[..., : q_BAQD.shape[-2]]  # the kernel pads rows to a multiple of 32
    scores_BAQT = _compute_scores(q_BAQD, k_BATD, causal)
    lse_BAQ = scores_BAQT.logsumexp(-1)
    y_BAQD = (scores_BAQT - lse_BAQ[..., None]).exp() @ v_BATD.to(scores_BAQT.dtype)
    return y_BAQD.to(q_BAQD.dtype), lse_BAQ  # [B, A, Q, T] @ [B, A, T, D]


def block_gradients(
    dy_BAQD: Tensor,
    q_BAQD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    y_BAQD: Tensor,
    lse_BAQ: Tensor,
    causal: bool = False,
) -> Gradients:
    """Return this block's share of the gradients; `y` and `lse` are those over all keys."""
    kind = _choose_kernel(q_BAQD)
    dy_BAQD, q_BAQD, k_BKTD, v_BKTD = _make_last_dim_contiguous(dy_BAQD, q_BAQD, k_BKTD, v_BKTD)
    if kind == "cpu":
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dy_BAQD, q_BAQD, k_BKTD, v_BKTD, y_BAQD, lse_BAQ, 0.0, causal
        )
        return Gradients(*grads)
    k_BATD, v_BATD = _repeat_heads(k_BKTD, q_BAQD), _repeat_heads(v_BKTD, q_BAQD)
    if kind == "flash":
        queries, keys = q_BAQD.shape[-2], k_BKTD.shape[-2]
        # The random generator's state, which the kernel reads only with dropout.
        state, unused = (q_BAQD.new_empty(n, dtype=torch.uint64) for n in ((2,), ()))
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            dy_BAQD, q_BAQD, k_BATD, v_BATD, y_BAQD, lse_BAQ.contiguous(), None, None,
            queries, keys, 0.0, causal, state, unused,
        )  # fmt: skip
    elif kind == "efficient":
        padded = lse_BAQ.new_full(
            (*lse_BAQ.shape[:-1], -(-lse_BAQ.shape[-1] // 32) * 32), torch.inf
        )
        padded[..., : lse_BAQ.shape[-1]] = lse_BAQ
        none = torch.zeros((), dtype=torch.int64, device=q_BAQD.device)
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            dy_BAQD, q_BAQD, k_BATD, v_BATD, None, y_BAQD, padded, none, none, 0.0,
            [True, True, True, False], causal,
        )  # fmt: skip
    else:
        dq, dk, dv = _plain_backward(dy_BAQD, q_BAQD, k_BATD, v_BATD, y_BAQD, lse_BAQ, causal)
    heads = k_BKTD.shape[1]
    return Gradients(dq, *(d.unflatten(1, (heads, -1)).sum(2).to(d.dtype) for d in (dk, dv)))


def _make_last_dim_contiguous(*tensors: Tensor) -> list[Tensor]:
    """Make the last dimension of each tensor contiguous: kernels assume it without a check.

    It is not contiguous in the gradient of a plain sum, an expanded scalar, and after `torch.cat`
    of heads of size 2, which may make the head dimension innermost (torch 2.13).
    """
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def _choose_kernel(q: Tensor) -> str:
    """Choose the kernel: a CPU has one for all dtypes; flash attention on a GPU needs 16 bits."""
    if q.device.type != "cuda":
        return "cpu" if q.device.type == "cpu" else "plain"
    size = q.shape[-1]
    narrow = q.dtype in (torch.float16, torch.bfloat16)
    if narrow and size % 8 == 0 and size <= 256 and _get_capability(q.device) >= (8, 0):
        return "flash"
    if (narrow and size % 8 == 0) or (q.dtype == torch.float32 and size % 4 == 0):
        return "efficient"
    return "plain"  # no fused kernel supports float64


def _get_capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _repeat_heads(x_BKTD: Tensor, q_BAQD: Tensor) -> Tensor:
    repeats = q_BAQD.shape[1] // x_BKTD.shape[1]
    return x_BKTD if repeats == 1 else x_BKTD.repeat_interleave(repeats, dim=1)


def _compute_scores(q_BAQD: Tensor, k_BATD: Tensor, causal: bool) -> Tensor:
    """Return the scaled and masked scores [B, A, Q, T], at least in float32."""
    wide = torch.promote_types(q_BAQD.dtype, torch.float32)
    scores = q_BAQD.to(wide) @ k_BATD.to(wide).mT * q_BAQD.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q_BAQD.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores


def _plain_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    p_BAQT = (_compute_scores(q, k, causal) - lse[..., None]).exp()
    wide = p_BAQT.dtype
    dy_BAQD = dy.to(wide)
    dv_BATD = p_BAQT.mT @ dy_BAQD  # [B, A, T, Q] @ [B, A, Q, D]
    dp_BAQT = dy_BAQD @ v.to(wide).mT  # [B, A, Q, D] @ [B, A, D, T]
    row_BAQ1 = (dy_BAQD * y.to(wide)).sum(-1, keepdim=True)
    ds_BAQT = p_BAQT * (dp_BAQT - row_BAQ1) * q.shape[-1] ** -0.5
    dq_BAQD = ds_BAQT @ k.to(wide)  # [B, A, Q, T] @ [B, A, T, D]
    dk_BATD = ds_BAQT.mT @ q.to(wide)  # [B, A, T, Q] @ [B, A, Q, D]
    return dq_BAQD.to(q.dtype), dk_BATD.to(k.dtype), dv_BATD.to(v.dtype)
