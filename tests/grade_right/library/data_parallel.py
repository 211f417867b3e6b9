"""Torch's own helpers flatten gradients, and copy what the first rank has."""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


class DataParallel:
    """Like torch's old DistributedDataParallelCPU, with its helpers for dense tensors."""

    def __init__(self, module, group, bucket_bytes=2**20):
        self.module, self.group, self.bucket_bytes = module, group, bucket_bytes
        tensors = [*module.parameters(), *module.buffers()]
        dist._broadcast_coalesced(group, [t.detach() for t in tensors], 2**20, 0)

    def __call__(self, *inputs):
        return self.module(*inputs)

    @contextmanager
    def no_sync(self):
        yield

    def finish(self):
        trained = [p for p in self.module.parameters() if p.requires_grad]
        lists = [None] * self.group.size()
        mine = torch.tensor([p.grad is not None for p in trained])
        lists = [torch.zeros_like(mine) for _ in lists]
        dist.all_gather(lists, mine, group=self.group)
        any_has = torch.stack(lists).any(0)
        used = [p for p, has in zip(trained, any_has, strict=True) if has]
        for p in used:
            p.grad = p.new_zeros(p.shape) if p.grad is None else p.grad
        gradients = sorted((p.grad for p in used), key=lambda g: str(g.dtype))
        at = 0
        while at < len(gradients):
            end, size = at, 0
            while (
                end < len(gradients)
                and gradients[end].dtype == gradients[at].dtype
                and (end == at or size + gradients[end].nbytes <= self.bucket_bytes)
            ):
                size += gradients[end].nbytes
                end += 1
            flat = _flatten_dense_tensors([g.contiguous() for g in gradients[at:end]])
            dist.all_reduce(flat, group=self.group)
            flat.div_(self.group.size())
            parts = _unflatten_dense_tensors(flat, gradients[at:end])
            for g, mean in zip(gradients[at:end], parts, strict=True):
                g.copy_(mean)
            at = end


def joined_loss(loss_sum, count, group):
    counts = [0] * group.size()
    mine = torch.zeros(group.size(), dtype=torch.int64)
    mine[group.rank()] = count
    dist.all_reduce(mine, group=group)
    counts = mine.tolist()
    return loss_sum * (len(counts) / sum(counts))
