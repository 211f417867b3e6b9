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


class P2PWork:
    """The handle of one or more messages in flight, like `dist.Work`."""

    def __init__(
        self,
        works: list[dist.Work],
        send_buffers: Sequence[torch.Tensor] = (),
        recv_buffers: Sequence[torch.Tensor] = (),
        outputs: Sequence[torch.Tensor] = (),
    ):
        self._works = works
        self._send_buffers = send_buffers  # kept alive until the transfer is complete
        self._recv_buffers, self._outputs = recv_buffers, outputs  # buffers are copied to outputs

    def wait(self) -> None:
        """Wait until received tensors may be read and sent tensors may be changed."""
        if not self._works:
            return
        for work in self._works:
            work.wait()
        self._works = []  # gloo waits for ever on a second wait
        for output, buffer in zip(self._outputs, self._recv_buffers, strict=True):
            if output is not buffer:
                output.copy_(buffer)


def isend(tensor: torch.Tensor, peer: int, group: dist.ProcessGroup | None = None) -> P2PWork:
    """Start to send `tensor` to rank `peer` of `group` (its number in the group)."""
    buffer = _prepare_send_buffer(tensor, group)
    return P2PWork([dist.isend(buffer, _get_global_rank(peer, group), group=group)], [buffer])


def irecv(tensor: torch.Tensor, peer: int, group: dist.ProcessGroup | None = None) -> P2PWork:
    """Start to receive a message from rank `peer` of `group` (its number there) into `tensor`."""
    buffer = _prepare_recv_buffer(tensor, group)
    work = dist.irecv(buffer, _get_global_rank(peer, group), group=group)
    return P2PWork([work], recv_buffers=[buffer], outputs=[tensor])


def exchange(
    outgoing: torch.Tensor,
    dst: int,
    incoming: torch.Tensor,
    src: int,
    group: dist.ProcessGroup | None = None,
) -> P2PWork:
    """Start to send `outgoing` to rank `dst`, and to receive `incoming` from rank `src`.

    Every rank of the group calls this, as in a collective: each sends and receives one tensor. With
    nccl both start together; otherwise, if every rank sent first, all would wait.
    """
    return exchange_all([(outgoing, dst)], [(incoming, src)], group)


def exchange_all(
    outgoing: Sequence[tuple[torch.Tensor, int]],
    incoming: Sequence[tuple[torch.Tensor, int]],
    group: dist.ProcessGroup | None = None,
) -> P2PWork:
    """Start to send each tensor to its rank and to receive each from its rank, in one batch.

    Two ranks must list the messages between them in the same order. A rank without messages need
    not call this.
    """
    send_buffers = [_prepare_send_buffer(tensor, group) for tensor, _ in outgoing]
    recv_buffers = [_prepare_recv_buffer(tensor, group) for tensor, _ in incoming]
    operations = [
        dist.P2POp(dist.irecv, buffer, _get_global_rank(src, group), group)
        for buffer, (_, src) in zip(recv_buffers, incoming, strict=True)
    ]
    operations += [
        dist.P2POp(dist.isend, buffer, _get_global_rank(dst, group), group)
        for buffer, (_, dst) in zip(send_buffers, outgoing, strict=True)
    ]
    works = dist.batch_isend_irecv(operations) if operations else []
    return P2PWork(works, send_buffers, recv_buffers, [tensor for tensor, _ in incoming])


def _prepare_send_buffer(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return `tensor` or a copy that can be sent: contiguous, in host memory if necessary."""
    tensor = tensor.contiguous()
    return tensor.cpu() if _needs_host_copy(tensor, group) else tensor


def _prepare_recv_buffer(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return `tensor`, or an empty buffer of its shape if no backend can receive into it."""
    on_host = _needs_host_copy(tensor, group)
    if tensor.is_contiguous() and not on_host:
        return tensor
    device = "cpu" if on_host else tensor.device
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def get_backend(device: torch.device, group: dist.ProcessGroup | None = None) -> str:
    """Return the backend that moves tensors of `device` in `group`."""
    # The config names a backend for each device type: "cpu:gloo,cuda:nccl".
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return backends[device.type]


def _needs_host_copy(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    return gpu.is_gpu(tensor.device) and not gpu.is_gpu_backend(get_backend(tensor.device, group))


def _get_global_rank(peer: int, group: dist.ProcessGroup | None) -> int:
    group = group or dist.group.WORLD
    size = dist.get_world_size(group)
    if not 0 <= peer < size:
        raise ValueError(f"peer={peer}: must be a rank of the group, from 0 to {size - 1}")
    return dist.get_global_rank(group, peer)
