"""Dynamic loss scaling for float16, with one decision for all ranks.

float16 has no number between 0 and 6e-8, and none above 65,504. Gradients are often smaller. So
the loss is multiplied by a scale before backward, which multiplies all gradients, and they are
divided by it before the step. A scale that is too large shows itself: inf or nan. Such a step is
left out, and the scale halved; after many good steps it is doubled (Micikevicius et al. 2018,
"Mixed Precision Training", section 3.2; arXiv 1710.03740).

    scaler = LossScaler(group=dist.group.WORLD)
    for tokens, targets in batches:
        with torch.autocast("cpu", torch.float16):
            value = loss(model(tokens), targets)
        scaler.scaled(value).backward()  # of each micro-batch
        if scaler.unscale(optimizer):  # after the last one; the same answer on all ranks
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        optimizer.zero_grad()
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardlab.common.arguments import check_number, check_whole
from shardlab.ranks import check_group


class LossScaler:
    """Multiplies losses, divides gradients, and says whether the step may be made.

    scale: the first one. interval: good steps after which it is doubled. group: the ranks that hold
    shards of one gradient; None where each rank holds all of it, as with DDP, whose sum carries an
    inf to everybody. There is no smallest scale: a loss that is nan itself halves it for ever.
    """

    def __init__(
        self,
        scale: float = 2.0**16,
        interval: int = 2000,
        group: dist.ProcessGroup | None = None,
    ):
        check_number(scale=scale)
        check_whole(interval=interval)
        if group is not None:
            check_group(group)
        self.scale, self.interval, self.group = float(scale), interval, group
        self.good = 0  # steps since the scale changed

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss times the scale, for backward."""
        return loss * self.scale

    @torch.no_grad()
    def unscale(self, optimizer: torch.optim.Optimizer) -> bool:
        """Divide the gradients by the scale, and adjust it; whether the step may be made.

        Once for each step, after its last backward. Raises ValueError for parameters in float16.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        bad = torch.zeros((), device=parameters[0].device)  # 1 once something is inf or nan
        for parameter in parameters:
            if (gradient := parameter.grad) is None:
                continue
            if gradient.dtype == torch.float16:
                raise ValueError("optimizer: parameters in float16; allowed are float32 masters")
            mine = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            mine.mul_(1 / self.scale)
            bad = torch.maximum(bad, (~mine.isfinite()).any().to(bad.dtype))
        if self.group is not None:  # a shard's inf is known to its own rank alone
            dist.all_reduce(bad, dist.ReduceOp.MAX, self.group)  # a scalar
        step = not bad  # the one place at which the host waits for the device
        self.good = self.good + 1 if step else 0
        if not step:
            self.scale /= 2
        elif self.good == self.interval:
            self.scale, self.good = 2 * self.scale, 0
        return step

    def state_dict(self) -> dict[str, float]:
        """What a resumed run has to know."""
        return {"scale": self.scale, "good": self.good}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on where `state_dict` was taken."""
        self.scale, self.good = state["scale"], int(state["good"])
