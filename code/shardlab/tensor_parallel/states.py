"""State dicts of sharded models: whole to shards and back, from meta, and the gradient norm.

The layers say which parameters are sharded, and how (`ShardedLayer.shard_dims`). Names are the
plain GPT's, so a state dict of one process fits any number of ranks, and the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shardlab import ranks
from shardlab.data_parallel.buckets import clip_by_global_norm
from shardlab.gpt.model import GPT
from shardlab.ranks import check_group
from shardlab.ranks.checks import check_state
from shardlab.ranks.gather import gather_parts

from .core import ColumnLinear, Group, HeadNorm, RowLinear, VocabEmbedding, shard_slice, take_slice

Shard = tuple[str, nn.Parameter, int | None, int]  # name, parameter, cut dimension, parts


def get_shard_dims(model: nn.Module) -> dict[str, int | None]:
    """Map each parameter to the dimension along which it is cut; None: whole on every rank.

    A tied parameter appears once, under its first name.
    """
    found = {}
    for prefix, module in model.named_modules():
        for name, _ in module.named_parameters(prefix, recurse=False):
            found[name] = getattr(module, "shard_dims", {}).get(name.rpartition(".")[2])
    return {name: found[name] for name, _ in model.named_parameters()}


def count_shards(model: GPT) -> dict[str, int]:
    """Map each parameter to its number of parts: 1, one per rank, or fewer with copies.

    With r ranks and p parts, rank i has part i * p // r; every (r / p)-th rank has the first copy.
    """
    _, size = check_group(_get_group(model))
    some = {
        f"{prefix}.{name}": module.parts
        for prefix, module in model.named_modules()
        if isinstance(module, ColumnLinear) and module.parts is not None
        for name in module.shard_dims
    }
    return {n: 1 if d is None else some.get(n, size) for n, d in get_shard_dims(model).items()}


def get_parameter_types(model: nn.Module) -> dict[str, str]:
    """Map each parameter to its type over the ranks, for `tensor_types.declare_parameters`."""
    _get_group(model)
    # Norms of heads see all tokens, whatever operators are at the edges.
    norms = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, HeadNorm)}
    shard_dims = get_shard_dims(model)
    whole = {name: "I" if name in norms else model.edges.uncut_type for name in shard_dims}
    return {name: whole[name] if dim is None else "V" for name, dim in shard_dims.items()}


def list_shards(model: GPT) -> list[Shard]:
    """Return name, parameter, cut and number of parts of each parameter, once."""
    parameters, several = dict(model.named_parameters()), count_shards(model)
    return [(name, parameters[name], d, several[name]) for name, d in get_shard_dims(model).items()]


def get_full_shapes(model: GPT) -> dict[str, torch.Size]:
    """Return the shapes of the plain GPT's parameters, by name."""
    shapes = {}
    for name, parameter, dimension, several in list_shards(model):
        shape = list(parameter.shape)
        if dimension is not None:
            shape[dimension] *= several
        shapes[name] = torch.Size(shape)
    return shapes


@torch.no_grad()
def full_state_dict(model: GPT, dst: int | None = None) -> dict[str, Tensor]:
    """Return the plain GPT's state dict, from all ranks' shards; all ranks of the group call this.

    dst: the rank of the group that gets the dict, while the others get {}; None: all ranks get it.
    One parameter is gathered at a time, so only one is whole in memory beside the result.

    Raises ValueError for a model that is not parallelized.
    """
    group = _get_group(model)
    found: dict[str, Tensor] = {}
    for name, parameter, dimension, several in list_shards(model):
        full = gather_parts(parameter.detach(), dimension, group, dst, several)
        if full is not None:
            found[name] = full
    if found:  # untrained buffers (a router's bias) are the same on all ranks
        found |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    return {name: found[first] for name, first in _map_tied_names(model).items() if first in found}


@torch.no_grad()
def load_full_state_dict(model: GPT, state: Mapping[str, Tensor]) -> None:
    """Load this rank's shards from a plain GPT's `state`; sends nothing.

    Parameters on meta become real, with dtype and device of the embedding in `state`.

    Raises ValueError for a model that is not parallelized, for missing or unknown names, and for
    shapes that differ from the plain GPT's.
    """
    group = _get_group(model)
    shapes = get_full_shapes(model) | {n: buffer.shape for n, buffer in model.named_buffers()}
    check_state(state, {name: shapes[first] for name, first in _map_tied_names(model).items()})
    like = state["embedding.weight"]
    _make_real(model, like.device, like.dtype)
    for name, buffer in model.named_buffers():
        buffer.copy_(state[name])
    for piece in list_shards(model):
        _copy_shard(piece, state[piece[0]], group)


@torch.no_grad()
def initialize_shards(
    model: GPT, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> None:
    """Fill a model on meta with this rank's share of the values that GPT(config) would draw.

        with torch.device("meta"):
            model = GPT(config)
        parallelize(model, group)
        torch.manual_seed(0)
        initialize(model)

    Shards drawn independently on each rank would not be parts of one matrix. So every rank draws
    each whole matrix in turn, and keeps its part, in the time of drawing all and the memory of the
    largest. Layers are drawn twice, as in GPT: when they are made, and when GPT fills them.
    Afterwards the generator is in the state in which GPT(config) would leave it.

    device: by default this rank's (`ranks.device`); drawn on the CPU. dtype: by default float32.

    Raises ValueError for a model that is not parallelized.
    """
    group, shapes = _get_group(model), get_full_shapes(model)
    device = ranks.device() if device is None else torch.device(device)
    _, size = check_group(group)
    for module in model.modules():  # drawn to advance the generator, and dropped at once
        if isinstance(module, VocabEmbedding):
            nn.Embedding(module.weight.shape[0] * size, module.weight.shape[1])
        elif isinstance(module, ColumnLinear | RowLinear | nn.Linear):
            full = list(module.weight.shape)
            if isinstance(module, ColumnLinear | RowLinear):
                full[module.shard_dims["weight"]] *= module.parts or size
            nn.Linear(full[1], full[0], module.bias is not None)
    _make_real(model, device, dtype or torch.float32)
    for buffer in model.buffers():
        buffer.zero_()
    for piece in list_shards(model):
        name, parameter, *_ = piece
        if parameter.dim() == 2:
            full = nn.init.normal_(torch.empty(shapes[name]), std=0.02)
        elif name.endswith("bias"):
            full = torch.zeros(shapes[name])
        else:
            full = torch.ones(shapes[name])  # weights of norms
        _copy_shard(piece, full, group)
    if model.head.weight is model.embedding.weight:  # GPT fills its head before it ties it
        nn.init.normal_(torch.empty(shapes["embedding.weight"]), std=0.02)


def clip_grad_norm_(model: GPT, limit: float) -> Tensor:
    """Scale gradients down to a global norm of at most `limit`; return the norm before.

    Squares of cut parameters are added up over the ranks; whole parameters, which all ranks have,
    and copies count once. torch's own `nn.utils.clip_grad_norm_` would compute another norm on
    every rank, and whole parameters would diverge. Every rank of the group calls this; one number
    is sent.

    Raises ValueError for a limit below 0, a model that is not parallelized, and on every rank when
    the first limits differ.
    """
    group = _get_group(model)
    rank, ranks = check_group(group)
    whole, own, copies = [], [], []
    for _, parameter, dimension, several in list_shards(model):
        if dimension is None:
            whole.append(parameter)
        else:
            (copies if rank % (ranks // several) else own).append(parameter)
    return clip_by_global_norm(model, limit, [group], own, replicated=whole, copies=copies)


def _make_real(model: GPT, device: torch.device, dtype: torch.dtype) -> None:
    """Allocate uninitialised memory for a model on meta; a tied head stays tied."""
    if model.embedding.weight.is_meta:
        tied = model.head.weight is model.embedding.weight
        model.to(dtype).to_empty(device=device)
        if tied:
            model.head.weight = model.embedding.weight


def _copy_shard(piece: Shard, full: Tensor, group: Group) -> None:
    name, parameter, dimension, several = piece
    if dimension is not None:
        full = take_slice(full, dimension, shard_slice(name, full.shape[dimension], group, several))
    parameter.copy_(full)


def _map_tied_names(model: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(tensor), name)
        for name, tensor in model.state_dict(keep_vars=True).items()
    }


def _get_group(model: nn.Module) -> Group:
    group = getattr(model, "tensor_group", None)
    if group is None:
        kind = type(model).__name__
        raise ValueError(f"model={kind}: must be a model that `parallelize` returned")
    return group
