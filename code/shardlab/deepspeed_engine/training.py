"""Training with DeepSpeed's engine: one step, the weights, recomputation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlab import model as plain
from shardlab import ranks

from .pipe import full_names, is_pipeline
from .start import prepare, quiet

LossOf = Callable[[Any, Tensor, Tensor], Tensor]


def _loss_of(engine: Any, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
    return plain.loss(engine(tokens_BS), targets_BS)


def step(
    engine: Any, micro_batches: Sequence[tuple[Tensor, Tensor]], loss_of: LossOf = _loss_of
) -> float:
    """One optimizer step; the mean loss over all micro-batches of all ranks.

    micro_batches: this rank's pairs of tokens and targets, each [micro_batch, S]: as many as the
        configuration's accumulation. Ranks that share a model (tensor or pipeline parallel) are
        given the same ones.
    loss_of: (engine, tokens, targets) to the mean loss; the pipeline has its own.

    Raises ValueError when their number is not the configuration's.
    """
    wanted = engine.gradient_accumulation_steps()
    if len(micro_batches) != wanted:
        raise ValueError(f"micro_batches: {len(micro_batches)} of them; allowed is {wanted}")
    device = ranks.device()
    batches = [(tokens.to(device), targets.to(device)) for tokens, targets in micro_batches]
    if is_pipeline(engine):
        with quiet():
            return engine.train_batch(iter(batches)).item()
    total = torch.zeros((), dtype=torch.float64, device=device)  # so that the mean adds no error
    for tokens_BS, targets_BS in batches:
        loss = loss_of(engine, tokens_BS, targets_BS)
        engine.backward(loss)  # divides by the accumulation, and averages over the ranks
        engine.step()  # steps at the last micro-batch, and does nothing before
        total += loss.detach() / wanted
    dist.all_reduce(total)  # a scalar; ranks that share a model add the same again
    return total.item() / dist.get_world_size()


def weights(engine: Any) -> dict[str, Tensor]:
    """All weights on every rank, in float32 on the CPU, under the plain module's names.

    Every rank has to call it. The master weights where DeepSpeed keeps them apart (a 16-bit model,
    ZeRO), except with tensor parallelism, whose shards are put together from the weights in use.
    """
    deepspeed = prepare()
    if is_pipeline(engine):
        return _of_all_stages(engine)
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
            gathered[name] = _master(engine, parameter, gathered[name])
    return gathered


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32, copy=True)


def _master(engine: Any, parameter: nn.Parameter, otherwise: Tensor) -> Tensor:
    """The float32 master weight of `parameter`, gathered over the ranks; if it has one."""
    from deepspeed.utils import safe_get_full_fp32_param

    if not parameter.requires_grad:
        return otherwise
    if hasattr(engine.optimizer, "fp32_groups"):  # stage 0 in 16 bits: two lists side by side
        used, masters = (sum(map(list, _groups(engine, bits)), []) for bits in (16, 32))
        return next(_on_cpu(m) for u, m in zip(used, masters, strict=True) if u is parameter)
    full = safe_get_full_fp32_param(parameter)
    return otherwise if full is None else _on_cpu(full).view_as(otherwise)


def _groups(engine: Any, bits: int) -> list[Any]:
    return getattr(engine.optimizer, f"fp{bits}_groups")


def _of_all_stages(engine: Any) -> dict[str, Tensor]:
    mine = {}
    for name, parameter in engine.module.named_parameters():
        value = _master(engine, parameter, _on_cpu(parameter))
        mine.update(dict.fromkeys(full_names(engine.module, name), value))
    stages: list[dict[str, Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(stages, mine)
    return {name: value for stage in stages for name, value in stage.items()}


def recompute(
    module: nn.Module,
    blocks: Iterable[nn.Module] | None = None,
    config: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Keep only each block's input for backward and compute the block again then; returns `module`.

    blocks: the modules to recompute; `module.blocks` when left out.
    config: settings whose section "activation_checkpointing" DeepSpeed is to use.

    DeepSpeed's `deepspeed.checkpointing.checkpoint` has to be called in the model's own code, as
    this does for each block. The section in the configuration says how, never where: on its own it
    changes nothing. Inside a rank only. (Chen et al., arXiv 1604.06174.)
    """
    checkpointing = prepare().checkpointing
    if config is not None:
        with quiet():
            checkpointing.configure(None, deepspeed_config=dict(config))
    chosen = list(module.blocks if blocks is None else blocks)
    if not chosen:
        raise ValueError("blocks=[]: allowed are modules, one or more")
    for block in chosen:
        block.forward = partial(checkpointing.checkpoint, block.forward)
    return module
