"""An all-reduce is a reduce-scatter and an all-gather: each rank divides a share of the sums."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F


class DataParallel:
    def __init__(self, module, group, bucket_bytes=2**20):
        self.module, self.group, self.bytes = module, group, bucket_bytes
        self.no_sync = contextlib.nullcontext
        for tensor in [*module.parameters(), *module.buffers()]:
            everyones = [torch.empty_like(tensor.contiguous()) for _ in range(group.size())]
            dist.all_gather(everyones, tensor.detach().contiguous(), group=group)
            tensor.detach().copy_(everyones[0])

    def __call__(self, *inputs):
        return self.module(*inputs)

    def finish(self):
        n = self.group.size()
        trained = [p for p in self.module.parameters() if p.requires_grad]
        has = torch.tensor([p.grad is not None for p in trained], dtype=torch.uint8)
        dist.all_reduce(has, op=dist.ReduceOp.MAX, group=self.group)
        used = [p for p, any_has in zip(trained, has, strict=True) if any_has]
        for dtype in sorted({p.dtype for p in used}, key=str):
            mine = [p for p in used if p.dtype == dtype]
            while mine:
                bucket = [mine.pop(0)]
                while mine and sum(p.nbytes for p in bucket) + mine[0].nbytes <= self.bytes:
                    bucket.append(mine.pop(0))
                flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten()
                                  for p in bucket])  # fmt: skip
                padded = F.pad(flat, (0, -len(flat) % n))
                share = padded.new_empty(len(padded) // n)
                dist.reduce_scatter_tensor(share, padded, group=self.group)
                dist.all_gather_into_tensor(padded, share / n, group=self.group)
                at = 0
                for p in bucket:
                    p.grad = padded[at : at + p.numel()].view_as(p).clone()
                    at += p.numel()


def joined_loss(loss_sum, count, group):
    share = torch.tensor([float(count)], dtype=torch.float64)
    dist.all_reduce(share, group=group)
    return (loss_sum * (group.size() / share)).to(loss_sum.dtype).squeeze()
