"""Point-to-point messages that work wherever the ranks are.

gloo reads and writes the memory of the host alone: it refuses to send a tensor that lies on a GPU.
Several ranks that share one GPU must use gloo (nccl wants a GPU for each rank), so their messages
pass through a copy in host memory. This is the one place where that is done.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


class Message:
    """A message under way. `wait` returns when it has left, or has arrived."""

    def __init__(self, work: dist.Work, staged: torch.Tensor, target: torch.Tensor | None):
        self._work: dist.Work | None = work
        self._staged = staged  # keeps the memory alive until the transfer is over
        self._target = target  # where a staged arrival has to go

    def wait(self) -> None:
        """Return when the tensor may be used: read, if it was received; changed, if it was sent."""
        if self._work is None:
            return
        self._work.wait()
        self._work = None  # gloo waits for ever when it is asked a second time
        if self._target is not None:
            self._target.copy_(self._staged)


def isend(tensor: torch.Tensor, peer: int, group: dist.ProcessGroup | None = None) -> Message:
    """Begin to send `tensor` to rank `peer` of `group` (its number in the group)."""
    staged = tensor.contiguous()
    if _through_host(tensor, group):
        staged = staged.cpu()
    return Message(dist.isend(staged, _global(peer, group), group=group), staged, None)


def irecv(tensor: torch.Tensor, peer: int, group: dist.ProcessGroup | None = None) -> Message:
    """Begin to receive into `tensor` what rank `peer` of `group` (its number there) sends."""
    through_host = _through_host(tensor, group)
    staged = tensor
    if through_host or not tensor.is_contiguous():
        staged = torch.empty(
            tensor.shape, dtype=tensor.dtype, device="cpu" if through_host else tensor.device
        )
    target = None if staged is tensor else tensor
    return Message(dist.irecv(staged, _global(peer, group), group=group), staged, target)


def carrier(device: torch.device, group: dist.ProcessGroup | None = None) -> str:
    """The backend that moves tensors of `device` in `group`: a group may have one for each kind."""
    # "cpu:gloo,cuda:nccl": a backend for each kind of device.
    each = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return each[device.type]


def _through_host(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    return tensor.is_cuda and carrier(tensor.device, group) != "nccl"


def _global(peer: int, group: dist.ProcessGroup | None) -> int:
    group = group or dist.group.WORLD
    size = dist.get_world_size(group)
    if not 0 <= peer < size:
        raise ValueError(f"peer={peer}: this group has ranks 0 to {size - 1}")
    return dist.get_global_rank(group, peer)
