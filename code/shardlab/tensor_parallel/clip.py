"""Clipping by the norm of a whole model's gradients, of which each rank has a part."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.model import GPT
from shardlab.ranks import check_number

from .state import _group, pieces


@torch.no_grad()
def clip_grad_norm_(model: GPT, limit: float) -> Tensor:
    """Scale gradients down to a joint norm of `limit`, where it is larger; return the norm before.

    Squares of cut parameters are added up over the ranks; those of whole ones, which all ranks
    have, count once. torch's own `nn.utils.clip_grad_norm_` would find another norm on every rank,
    and whole parameters would drift apart. Every rank of the group calls it; one number is sent.

    Raises ValueError for a limit below 0, and a model that is not parallelized.
    """
    group = _group(model)
    check_number(0, limit=limit)
    squares = {True: [], False: []}  # of cut ones, and of whole ones
    gradients = []
    for _, parameter, dimension in pieces(model):
        if (gradient := parameter.grad) is not None:
            gradients.append(gradient)
            wide = torch.promote_types(gradient.dtype, torch.float32)  # 16 bits lose too much
            norm = torch.linalg.vector_norm(gradient, dtype=wide)
            squares[dimension is not None].append(norm.square())
    nothing = next(model.parameters()).new_zeros((), dtype=torch.float32)
    cut, whole = (torch.stack(part).sum() if part else nothing.clone() for part in squares.values())
    dist.all_reduce(cut, group=group)  # one number
    norm = (cut + whole).sqrt()
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)  # as torch does
    for gradient in gradients:
        gradient.mul_(scale.to(gradient.dtype))
    return norm
