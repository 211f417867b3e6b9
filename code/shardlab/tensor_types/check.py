"""Check a step on a simulated mesh in one call: no second rank, no GPU.

def step(dp, tp):  # one process group for each axis
    model = parallelize(MyModel(), tp)
    tt.declare_parameters(model, dp="R", tp={name: "V" if is_cut(name) else "I" for name in …})
    tokens, targets = (tt.declare(x, dp="V", tp="R") for x in batch())
    loss = tt.declare(loss_of(model(tokens), targets), dp="P")  # a summand of the joint loss
    loss.backward()
    average_gradients(model, dp)
    optimizer.step()

tt.check(step, dp=2, tp=2)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardlab import ranks
from shardlab.common.arguments import MAX_COUNT, check_integer

from .core import checking
from .messages import Mismatch


@dataclass(frozen=True)
class Verdict:
    """The result of `check`. judged: operations; sent: communicating ones; backwards: calls."""

    ok: bool
    message: str
    judged: int = 0
    sent: int = 0
    backwards: int = 0

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        return f"{'✓' if self.ok else '✗'} {self.message}"


def check(step: Callable[..., Any], timeout: float = 120.0, **degrees: int) -> Verdict:
    """Call `step` with a process group for each axis, and check its operations: see above.

    degrees: the number of ranks of each axis. A single process acts as rank 0 of the mesh; its
    messages move no data. The verdict is true, or names the line, the operation and the fix.

    Raises ValueError before anything starts for degrees that are not whole numbers of at least 2,
    and for a step that does not take these axes. Other errors of `step` are raised as RankError.
    """
    check_integer(2, MAX_COUNT, **degrees)
    try:
        inspect.signature(step).bind(**dict.fromkeys(degrees))
    except TypeError as error:
        raise ValueError(f"step: {error}; allowed are the axes {', '.join(degrees)}") from None
    return ranks.run_with_fake_group(
        _followed, prod(degrees.values()), step, degrees, timeout=timeout
    )


def _followed(step: Callable[..., Any], degrees: dict[str, int]) -> Verdict:
    mesh = init_device_mesh("cpu", tuple(degrees.values()), mesh_dim_names=tuple(degrees))
    groups: dict[str, dist.ProcessGroup] = {axis: mesh.get_group(axis) for axis in degrees}
    with checking(**groups) as mode:
        try:
            step(**groups)
        except Mismatch as error:
            return Verdict(False, str(error), mode.judged, mode.sent, mode.backwards)
    found = f"passes: {mode.judged} operations, {mode.sent} that send"
    ended = "" if mode.backwards else "; nothing was differentiated, so no gradient was checked"
    return Verdict(True, found + ended, mode.judged, mode.sent, mode.backwards)
