"""Gradients live in flat buffers for good, and are views of them: nothing is copied to be sent."""

from contextlib import contextmanager

import torch
import torch.distributed as dist


class DataParallel:
    def __init__(self, module, group, bucket_bytes=2**20):
        self.module, self.group = module, group
        for tensor in (*module.parameters(), *module.buffers()):
            where = dist.get_process_group_ranks(group)[0]
            sent = tensor.detach().clone().contiguous()
            dist.broadcast(sent, where, group=group)
            tensor.detach().copy_(sent)
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.flat, homes = [], {}
        for p in self.parameters:
            key, size = p.dtype, p.numel() * p.element_size()
            if key not in homes or homes[key][0] + size > bucket_bytes:
                homes[key] = [0, []]
                self.flat.append(homes[key][1])
            homes[key][0] += size
            homes[key][1].append(p)
        self.buffers = [torch.zeros(sum(p.numel() for p in b), dtype=b[0].dtype) for b in self.flat]

    def __call__(self, *inputs):
        return self.module(*inputs)

    @contextmanager
    def no_sync(self):
        yield

    def finish(self):
        has = torch.tensor([int(p.grad is not None) for p in self.parameters])
        dist.all_reduce(has, group=self.group)
        there = dict(zip(self.parameters, has.tolist(), strict=True))
        works = []
        for bucket, buffer in zip(self.flat, self.buffers, strict=True):
            buffer.zero_()
            for p, view in self.views(bucket, buffer):
                if p.grad is not None:
                    view.copy_(p.grad)
            buffer.mul_(1 / self.group.size())
            works.append(dist.all_reduce(buffer, group=self.group, async_op=True))
        for work in works:
            work.wait()
        for bucket, buffer in zip(self.flat, self.buffers, strict=True):
            for p, view in self.views(bucket, buffer):
                if there[p]:
                    p.grad = view.clone()

    def views(self, bucket, buffer):
        at = 0
        for p in bucket:
            yield p, buffer[at : at + p.numel()].view(p.shape)
            at += p.numel()


def joined_loss(loss_sum, count, group):
    total = loss_sum.new_tensor(count)
    dist.all_reduce(total, group=group)
    return loss_sum / total * dist.get_world_size(group)
