"""Export of the whole model to one file, for a process without ranks and without this package."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from shardlab.ranks import check_group

from .folder import CheckpointError, describe_error, describe_full_disk, fsync_path, unwrap_model


def export_model(
    model: nn.Module, path: str | Path, group: dist.ProcessGroup | None = None
) -> None:
    """Write the whole model into one file, for plain `torch.load(path, weights_only=True)`.

    model: as in `Training`, or a model of this package's `zero` and `mesh`. Collective over `group`
    (None: the world). The group's rank 0 gathers the model in its CPU memory and writes the file,
    which gets its name only once it is complete. Raises CheckpointError on every rank if the file
    cannot be written; an existing file then stays as it was.
    """
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    if group is not None:
        check_group(group)
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"path={str(path)!r}: its folder must exist ({path.parent})")
    if hasattr(model, "full_state_dict"):
        full = model.full_state_dict()
    else:
        module = unwrap_model(model)
        sharded = any(hasattr(parameter, "full_tensor") for parameter in module.parameters())
        options = StateDictOptions(full_state_dict=sharded, cpu_offload=sharded)
        full = get_model_state_dict(module, options=options)
    problem: list[str | None] = [None]
    if group is None or dist.get_rank(group) == 0:
        problem = [_write_atomically(path, {name: tensor.cpu() for name, tensor in full.items()})]
    if group is not None:  # also a barrier: the file exists when any rank returns
        dist.broadcast_object_list(problem, group_src=0, group=group)
    if problem[0]:
        raise CheckpointError(problem[0])


def _write_atomically(path: Path, full: dict[str, torch.Tensor]) -> str | None:
    """Write a temporary file and rename it to `path`; return an error message, or None."""
    temporary = path.with_name(f".{path.name}.saving")
    try:
        with open(temporary, "wb") as file:
            torch.save(full, file)
        fsync_path(temporary)
        os.replace(temporary, path)
    except Exception as error:
        room = describe_full_disk(path.parent, sum(tensor.nbytes for tensor in full.values()))
        temporary.unlink(missing_ok=True)
        return f"{path}: not written: {describe_error(error)}{room}"
    return None
