"""Unsharded state dicts of expert-parallel models, and gradient clipping.

Names are the plain GPT's. So a single process's state dict can be loaded on any number of ranks
that divides the number of experts, and the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shardlab.data_parallel.buckets import clip_by_global_norm
from shardlab.gpt.model import GPT
from shardlab.ranks import check_group
from shardlab.ranks.checks import check_state
from shardlab.ranks.gather import gather_named_tensors

from .core import ExpertParallel, _get_group, own_parameters


@torch.no_grad()
def full_state_dict(model: GPT) -> dict[str, Tensor]:
    """Gather the plain GPT's state dict on every rank of the group (collective).

    Each expert's tensors come from the rank that has it, one tensor at a time. Raises ValueError
    for a model that is not parallelized.
    """
    group = _get_group(model)
    rank, _ = check_group(group)
    mine = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    owners = {name: owner for name, (owner, _) in _map_names(model).items()}
    sharded = gather_named_tensors(
        {name: mine[name] for name, owner in owners.items() if owner == rank}, group
    )
    return {name: mine[name] if owner is None else sharded[name] for name, owner in owners.items()}


@torch.no_grad()
def load_full_state_dict(model: GPT, state: Mapping[str, Tensor]) -> None:
    """Load this rank's share of a plain GPT's `state`, without communication.

    Raises ValueError for a model that is not parallelized, for missing or unexpected names, and for
    shapes that are not the plain GPT's.
    """
    _get_group(model)
    mine = model.state_dict()
    check_state(state, {name: mine[twin].shape for name, (_, twin) in _map_names(model).items()})
    for name, tensor in mine.items():
        tensor.copy_(state[name])


def clip_grad_norm_(model: GPT, limit: float) -> Tensor:
    """Clip gradients to a global norm over all experts of at most `limit`; return the norm before.

    Call it after `average_gradients`. The experts' squares are summed over the group (one scalar is
    sent), all other parameters count once; torch's clip_grad_norm_ would compute another norm on
    every rank. Raises ValueError for a limit below 0, a model that is not parallelized, and on
    every rank if the first call's limits differ.
    """
    group, own = _get_group(model), dict.fromkeys(own_parameters(model))
    replicated = [p for p in model.parameters() if p not in own]
    return clip_by_global_norm(model, limit, [group], own, replicated=replicated)


def _map_names(model: GPT) -> dict[str, tuple[int | None, str]]:
    """Map the plain GPT's names to (the expert's rank or None, a local tensor of equal shape)."""
    sharded = {
        prefix: layer
        for prefix, layer in model.named_modules()
        if isinstance(layer, ExpertParallel)
    }
    _get_group(model)
    names: dict[str, tuple[int | None, str]] = {}
    for name in model.state_dict():
        prefix, found, rest = name.partition(".experts.")
        if not found:
            names[name] = None, name
            continue
        layer = sharded[prefix]
        number, _, last = rest.partition(".")
        for turn in range(layer.total // len(layer.own)):
            expert = int(number) - layer.own.start + turn * len(layer.own)
            names[f"{prefix}.experts.{expert}.{last}"] = turn, name
    return names
