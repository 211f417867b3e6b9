"""One file with the whole model, for a plain process without ranks and without this course."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from shardlab.arguments import check_kind
from shardlab.data_parallel import DataParallel
from shardlab.ranks import check_group


def export(model: nn.Module, path: str | Path, group: dist.ProcessGroup | None = None) -> None:
    """Write the whole model into one file, for plain `torch.load(path, weights_only=True)`.

    model: as in Training, or one of our own `zero` and `mesh`. All ranks of `group` call it, the
    group's rank 0 gathers on the CPU and writes; its memory has to hold the model. The file appears
    under its name when it is complete.
    """
    check_kind(nn.Module, model=model)
    if group is not None:
        check_group(group)
    check_kind((str, os.PathLike), path=path)
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"path={str(path)!r}: this is a folder; allowed is the name of a file")
    if not path.parent.is_dir():
        raise ValueError(f"path={str(path)!r}: there is no folder {path.parent}")
    if hasattr(model, "full_state_dict"):
        whole = model.full_state_dict()
    else:
        module = model.module if isinstance(model, DataParallel) else model
        sharded = any(hasattr(parameter, "full_tensor") for parameter in module.parameters())
        options = StateDictOptions(full_state_dict=sharded, cpu_offload=sharded)
        whole = get_model_state_dict(module, options=options)
    if group is None or dist.get_rank(group) == 0:
        beside = path.with_name(f".{path.name}.saving")
        with open(beside, "wb") as file:
            torch.save({name: tensor.cpu() for name, tensor in whole.items()}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    if group is not None:
        dist.barrier(group)
