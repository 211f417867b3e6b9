"""Point-to-point messages that work on every backend and device.

gloo reads and writes host memory alone: it refuses to send a tensor on a GPU. Ranks that share one
GPU must use gloo (nccl needs one GPU per rank), so their messages pass through a copy in host
memory. Only this module makes such copies.

nccl connects two ranks at their first message in a group, and both processes block until they are
connected. It then runs the two ranks' messages one after another, in either direction. So ranks
that first send around a ring and then receive wait for ever: use `exchange` instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardlab.common import gpu


class Message:
    """A message in flight, or one in each direction; `wait` returns once it is complete."""

    def __init__(
        self,
        works: list[dist.Work],
        sent: Sequence[torch.Tensor] = (),
        landed: Sequence[torch.Tensor] = (),
        targets: Sequence[torch.Tensor] = (),
    ):
        self._works = works
        self._sent, self._landed = sent, landed  # kept alive until the transfer is complete
        self._targets = targets  # where received tensors are copied

    def wait(self) -> None:
        """Wait until tensors may be used: received ones read, sent ones changed."""
        if not self._works:
            return
        for work in self._works:
            work.wait()
        self._works = []  # gloo waits for ever on a second wait
        for target, landed in zip(self._targets, self._landed, strict=True):
            if target is not landed:
                target.copy_(landed)


def isend(tensor: torch.Tensor, peer: int, group: dist.ProcessGroup | None = None) -> Message:
    """Start to send `tensor` to rank `peer` of `group` (its number in the group)."""
    sent = _leaving(tensor, group)
    return Message([dist.isend(sent, _global(peer, group), group=group)], [sent])


def irecv(tensor: torch.Tensor, peer: int, group: dist.ProcessGroup | None = None) -> Message:
    """Start to receive a message from rank `peer` of `group` (its number there) into `tensor`."""
    landed = _landing(tensor, group)
    work = dist.irecv(landed, _global(peer, group), group=group)
    return Message([work], landed=[landed], targets=[tensor])


def exchange(
    outgoing: torch.Tensor,
    to: int,
    incoming: torch.Tensor,
    source: int,
    group: dist.ProcessGroup | None = None,
) -> Message:
    """Start to send `outgoing` to rank `to`, and to receive `incoming` from rank `source`.

    Every rank of the group calls this, as in a collective: each sends and receives one tensor. With
    nccl both start together; otherwise, if every rank sent first, all would wait.
    """
    return exchange_all([(outgoing, to)], [(incoming, source)], group)


def exchange_all(
    outgoing: Sequence[tuple[torch.Tensor, int]],
    incoming: Sequence[tuple[torch.Tensor, int]],
    group: dist.ProcessGroup | None = None,
) -> Message:
    """Start to send each tensor to its rank and to receive each from its rank, in one batch.

    Two ranks must list the messages between them in the same order. A rank without messages need
    not call this.
    """
    sent = [_leaving(tensor, group) for tensor, _ in outgoing]
    landed = [_landing(tensor, group) for tensor, _ in incoming]
    both = [
        dist.P2POp(dist.irecv, tensor, _global(source, group), group)
        for tensor, (_, source) in zip(landed, incoming, strict=True)
    ]
    both += [
        dist.P2POp(dist.isend, tensor, _global(to, group), group)
        for tensor, (_, to) in zip(sent, outgoing, strict=True)
    ]
    works = dist.batch_isend_irecv(both) if both else []
    return Message(works, sent, landed, [tensor for tensor, _ in incoming])


def _leaving(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the tensor to send for `tensor`: contiguous, and in host memory if necessary."""
    tensor = tensor.contiguous()
    return tensor.cpu() if _through_host(tensor, group) else tensor


def _landing(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the tensor to receive into for `tensor`: itself, or a buffer."""
    through_host = _through_host(tensor, group)
    if tensor.is_contiguous() and not through_host:
        return tensor
    device = "cpu" if through_host else tensor.device
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def carrier(device: torch.device, group: dist.ProcessGroup | None = None) -> str:
    """Return the backend that moves tensors of `device` in `group`."""
    # "cpu:gloo,cuda:nccl": a backend for each kind of device.
    each = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return each[device.type]


def _through_host(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    return gpu.is_gpu(tensor.device) and not gpu.is_gpu_backend(carrier(tensor.device, group))


def _global(peer: int, group: dist.ProcessGroup | None) -> int:
    group = group or dist.group.WORLD
    size = dist.get_world_size(group)
    if not 0 <= peer < size:
        raise ValueError(f"peer={peer}: this group has ranks 0 to {size - 1}")
    return dist.get_global_rank(group, peer)
