"""Check a step on a simulated mesh in one call: no second rank, no GPU.

def step(dp, tp):  # one process group for each axis
    model = parallelize(MyModel(), tp)
    tt.declare_parameters(model, dp="R", tp={name: "V" if is_sharded(name) else "I" for name in …})
    tokens, targets = (tt.declare_types(x, dp="V", tp="R") for x in batch())
    loss = tt.declare_types(loss_of(model(tokens), targets), dp="P")  # a summand of the joint loss
    loss.backward()
    average_gradients(model, dp)
    optimizer.step()

tt.check_step(step, dp=2, tp=2)
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

from .core import check_types
from .messages import TypeMismatch


@dataclass(frozen=True)
class Verdict:
    """The result of `check_step`, and the number of operations and backward calls checked."""

    ok: bool
    message: str
    num_checked: int = 0
    num_communicating: int = 0
    num_backwards: int = 0

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        return f"{'✓' if self.ok else '✗'} {self.message}"


def check_step(step: Callable[..., Any], timeout: float = 120.0, **degrees: int) -> Verdict:
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
        raise ValueError(f"step: {error}; must take the axes {', '.join(degrees)}") from None
    size = prod(degrees.values())
    return ranks.run_with_fake_group(_run_checked, size, step, degrees, timeout=timeout)


def _run_checked(step: Callable[..., Any], degrees: dict[str, int]) -> Verdict:
    mesh = init_device_mesh("cpu", tuple(degrees.values()), mesh_dim_names=tuple(degrees))
    groups: dict[str, dist.ProcessGroup] = {axis: mesh.get_group(axis) for axis in degrees}
    error = ""
    with check_types(**groups) as mode:
        try:
            step(**groups)
        except TypeMismatch as mismatch:
            error = str(mismatch)
    checked, communicating, backwards = mode.num_checked, mode.num_communicating, mode.num_backwards
    message = error or f"passes: {checked} operations checked, {communicating} of them communicate"
    if not error and not backwards:
        message += "; backward was never called, so no gradient was checked"
    return Verdict(not error, message, checked, communicating, backwards)
