"""Whole weights from ranks with experts of their own, and back; the norm of their gradients.

Names are the plain GPT's, so that a state dict of one process fits any number of ranks that divides
the experts, and the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shardlab.data_parallel.buckets import clip_by_joint_norm
from shardlab.gpt.model import GPT
from shardlab.ranks import check_group
from shardlab.ranks.agree import check_state
from shardlab.ranks.gather import named

from .core import ExpertParallel, _group, own_parameters


@torch.no_grad()
def full_state_dict(model: GPT) -> dict[str, Tensor]:
    """The plain GPT's state dict, on every rank of the group: all of them call it.

    An expert comes from the rank that has it, one tensor after the other. Raises ValueError for a
    model that is not parallelized.
    """
    group = _group(model)
    rank, _ = check_group(group)
    mine = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    owners = {name: owner for name, (owner, _) in _names(model).items()}
    dealt = named({name: mine[name] for name, owner in owners.items() if owner == rank}, group)
    return {name: mine[name] if owner is None else dealt[name] for name, owner in owners.items()}


@torch.no_grad()
def load_full_state_dict(model: GPT, state: Mapping[str, Tensor]) -> None:
    """Fill this rank's share from a plain GPT's `state`; sends nothing.

    Raises ValueError for a model that is not parallelized, names that are missing or too many, and
    other shapes than the plain GPT's.
    """
    _group(model)
    mine = model.state_dict()
    check_state(state, {name: mine[twin].shape for name, (_, twin) in _names(model).items()})
    for name, tensor in mine.items():
        tensor.copy_(state[name])


def clip_grad_norm_(model: GPT, limit: float) -> Tensor:
    """Scale gradients down to a joint norm of `limit`, where it is larger; return the norm before.

    After `average_gradients`. Squares of experts are added up over the group, all else counts once:
    torch's own would find another norm on every rank. One number is sent.

    Raises ValueError for a limit below 0, a model that is not parallelized, and on every rank when
    the first call's limits differ.
    """
    group, own = _group(model), dict.fromkeys(own_parameters(model))
    replicated = [p for p in model.parameters() if p not in own]
    return clip_by_joint_norm(model, limit, [group], own, replicated=replicated)


def _names(model: GPT) -> dict[str, tuple[int | None, str]]:
    """Plain GPT's names -> the expert's rank (None: all have it), and one of its shape here."""
    dealt = {
        prefix: layer
        for prefix, layer in model.named_modules()
        if isinstance(layer, ExpertParallel)
    }
    _group(model)
    names: dict[str, tuple[int | None, str]] = {}
    for name in model.state_dict():
        prefix, found, rest = name.partition(".experts.")
        if not found:
            names[name] = None, name
            continue
        layer = dealt[prefix]
        number, _, last = rest.partition(".")
        for turn in range(layer.total // len(layer.own)):
            expert = int(number) - layer.own.start + turn * len(layer.own)
            names[f"{prefix}.experts.{expert}.{last}"] = turn, name
    return names
