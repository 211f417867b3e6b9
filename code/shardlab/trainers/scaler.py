"""Dynamic loss scaling for float16, with one decision for all ranks.

float16 has no number between 0 and 6e-8, and none above 65,504. Gradients are often below 6e-8. So
the loss is multiplied by a scale before backward, which multiplies all gradients, and the gradients
are divided by the scale before the step. If the scale is too large, gradients become inf or nan.
Such a step is skipped and the scale is halved; after many good steps the scale is doubled
(Micikevicius et al. 2018, "Mixed Precision Training", section 3.2; arXiv 1710.03740).

    scaler = LossScaler(group=dist.group.WORLD)
    for tokens, targets in batches:
        with torch.autocast("cpu", torch.float16):
            value = loss(model(tokens), targets)
        scaler.scale_loss(value).backward()  # for each micro-batch
        if scaler.unscale_gradients(optimizer):  # after the last micro-batch; equal on all ranks
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        optimizer.zero_grad()
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardlab.common.arguments import check_integer, check_number
from shardlab.ranks import check_group


class LossScaler:
    """A dynamic loss scaler: scales losses, unscales gradients, and decides on skipping steps.

    scale: the initial scale. interval: number of good steps after which the scale is doubled.
    group: the ranks that hold shards of one gradient; None if each rank holds full gradients, as in
    DDP, whose all-reduce spreads inf to all. The scale has no minimum: a nan loss always halves it.
    """

    def __init__(
        self,
        scale: float = 2.0**16,
        interval: int = 2000,
        group: dist.ProcessGroup | None = None,
    ):
        check_number(scale=scale)
        check_integer(interval=interval)
        if group is not None:
            check_group(group)
        self.scale, self.interval, self.group = float(scale), interval, group
        self.good_steps = 0  # good steps since the scale changed

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale, for backward."""
        return loss * self.scale

    @torch.no_grad()
    def unscale_gradients(self, optimizer: torch.optim.Optimizer) -> bool:
        """Divide the gradients by the scale, adjust the scale; return True unless to skip the step.

        Call it once per step, after the last backward. Raises ValueError for float16 parameters.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        bad = torch.zeros((), device=parameters[0].device)  # 1 if any gradient is inf or nan
        for parameter in parameters:
            if (gradient := parameter.grad) is None:
                continue
            if gradient.dtype == torch.float16:
                raise ValueError("optimizer: must hold float32 master weights, not float16")
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            local.mul_(1 / self.scale)
            bad = torch.maximum(bad, (~local.isfinite()).any().to(bad.dtype))
        if self.group is not None:  # only the rank that has the shard knows of its inf
            dist.all_reduce(bad, dist.ReduceOp.MAX, self.group)  # a scalar
        step = not bad  # synchronizes with the GPU, once per step
        self.good_steps = self.good_steps + 1 if step else 0
        if not step:
            self.scale /= 2
        elif self.good_steps == self.interval:
            self.scale, self.good_steps = 2 * self.scale, 0
        return step

    def state_dict(self) -> dict[str, float]:
        """Return the scaler's state for a checkpoint."""
        return {"scale": self.scale, "good": self.good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the state that `state_dict` returned."""
        self.scale, self.good_steps = state["scale"], int(state["good"])
