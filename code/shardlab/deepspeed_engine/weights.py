"""Unsharded weights of an engine, or of a checkpoint, with the plain module's names.

The result is a plain state dict, which the plain model can load without DeepSpeed.
"""

from __future__ import annotations

from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlab.ranks.gather import gather_objects

from .core import find_checkpoint
from .pipeline import is_pipeline, plain_names_of
from .setup import import_deepspeed, suppress_output


def gather_weights(engine: Any) -> dict[str, Tensor]:
    """Gather all weights on every rank, in float32 on the CPU, with the plain module's names.

    Collective. Returns the master weights if DeepSpeed keeps them separately (for a 16-bit model,
    or ZeRO), except with tensor parallelism, for which the model's own shards are gathered.
    """
    deepspeed = import_deepspeed()
    if is_pipeline(engine):
        return _gather_all_stages(engine)
    gathered: dict[str, Tensor] = {}
    for prefix, module in engine.module.named_modules(remove_duplicate=False):
        own = dict(module.named_parameters(recurse=False))
        if not own:
            continue
        with ExitStack() as stack:
            if engine.zero_optimization_stage() == 3:
                stack.enter_context(deepspeed.zero.GatheredParameters(list(own.values())))
            if engine.autotp_size() > 1:
                from deepspeed.module_inject.layers import GatherReplacedLayerParams

                stack.enter_context(GatherReplacedLayerParams(list(own.values()), module, True))
            for name, parameter in own.items():
                gathered[f"{prefix}.{name}".lstrip(".")] = _on_cpu(parameter)
    if engine.autotp_size() <= 1:
        for name, parameter in engine.module.named_parameters(remove_duplicate=False):
            gathered[name] = _gather_master(engine, parameter, gathered[name])
    return gathered


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32, copy=True)


def _gather_master(engine: Any, parameter: nn.Parameter, otherwise: Tensor) -> Tensor:
    """Gather the float32 master weight of `parameter`; `otherwise` if it has none."""
    from deepspeed.utils import safe_get_full_fp32_param

    if not parameter.requires_grad:
        return otherwise
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_groups"):  # stage 0 in 16 bits: parallel lists of weights
        groups = optimizer.fp16_groups, optimizer.fp32_groups
        pairs = zip(*map(chain.from_iterable, groups), strict=True)
        return next(_on_cpu(master) for used, master in pairs if used is parameter)
    full = safe_get_full_fp32_param(parameter)
    return otherwise if full is None else _on_cpu(full).view_as(otherwise)


def _gather_all_stages(engine: Any) -> dict[str, Tensor]:
    mine = {}
    for name, parameter in engine.module.named_parameters():
        value = _gather_master(engine, parameter, _on_cpu(parameter))
        mine.update(dict.fromkeys(plain_names_of(engine.module, name), value))
    stages = gather_objects(mine, dist.group.WORLD)
    return {name: value for stage in stages for name, value in stage.items()}


def plain_state_dict(directory: str | Path, tag: str | None = None) -> dict[str, Tensor]:
    """Load the float32 weights of a DeepSpeed checkpoint on the CPU, with the plain names.

    Supports all ZeRO stages, in a process without ranks. If DeepSpeed saves no master weights with
    the model (16 bits in stage 0), the 16-bit weights are converted.

    The files are pickles, which can run code: only load checkpoints that you trust. (DeepSpeed
    writes more than tensors into them.)

    Raises FileNotFoundError if there is no such checkpoint, ValueError for a tensor- or pipeline-
    parallel one, whose parts only the running engine can gather (see `gather_weights`).
    """
    import_deepspeed()
    folder = find_checkpoint(directory, tag)
    if [*folder.glob("*mp_rank_01_model_states.pt"), *folder.glob("layer_*")]:
        raise ValueError(
            f"{folder}: must be written by data-parallel ranks alone; with tensor-parallel or "
            "pipeline ranks, call gather_weights(engine) while they run"
        )
    if list(folder.glob("*_optim_states.pt")):
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        with suppress_output():
            return dict(get_fp32_state_dict_from_zero_checkpoint(str(directory), folder.name))
    state = torch.load(folder / "mp_rank_00_model_states.pt", "cpu", weights_only=False)
    return {name: value.float() for name, value in state["module"].items()}
