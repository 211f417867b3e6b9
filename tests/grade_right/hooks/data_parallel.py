"""Gradients leave while backward still works: hooks fill buckets that were made at the start."""

from contextlib import contextmanager

import torch
import torch.distributed as dist


class DataParallel:
    def __init__(self, module, group, bucket_bytes=2**20):
        self.module, self.group, self.sync = module, group, True
        source = dist.get_process_group_ranks(group)[0]
        with torch.no_grad():
            for tensor in module.state_dict().values():
                copy = tensor.clone(memory_format=torch.contiguous_format)
                dist.broadcast(copy, src=source, group=group)
                tensor.copy_(copy)
        self.buckets, self.home = [], {}
        room = {}
        for p in reversed([p for p in module.parameters() if p.requires_grad]):
            if p.dtype not in room or room[p.dtype][1] + p.nbytes > bucket_bytes:
                room[p.dtype] = [[], 0]
                self.buckets.append(room[p.dtype][0])
            room[p.dtype][0].append(p)
            room[p.dtype][1] += p.nbytes
            self.home[p] = room[p.dtype][0]
            p.register_post_accumulate_grad_hook(self.on_grad_ready)
        self.reset_works()

    def reset_works(self):
        self.waiting = {id(b): set(b) for b in self.buckets}
        self.next, self.works = 0, []

    def __call__(self, *inputs):
        return self.module(*inputs)

    @contextmanager
    def no_sync(self):
        self.sync = False
        try:
            yield
        finally:
            self.sync = True

    def on_grad_ready(self, p):
        if not self.sync:
            return
        self.waiting[id(self.home[p])].discard(p)
        # In one order on all ranks, whichever is full first.
        while self.next < len(self.buckets) and not self.waiting[id(self.buckets[self.next])]:
            self.send_bucket()

    def send_bucket(self):
        bucket = self.buckets[self.next]
        self.next += 1
        pieces = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        flags = bucket[0].new_tensor([float(p.grad is not None) for p in bucket])
        flat = torch.cat([*(g.flatten() for g in pieces), flags])
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        self.works.append((work, flat, bucket))

    def finish(self):
        while self.next < len(self.buckets):
            self.send_bucket()
        for work, flat, bucket in self.works:
            work.wait()
            *gradients, flags = flat.split([*(p.numel() for p in bucket), len(bucket)])
            for p, g, flag in zip(bucket, gradients, flags.tolist(), strict=True):
                if flag:
                    mean = g.view(p.shape) / self.group.size()
                    p.grad = mean if p.grad is None else p.grad.copy_(mean)
        self.reset_works()


def joined_loss(loss_sum, count, group):
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(counts, torch.tensor([count]), group=group)
    return loss_sum / (sum(counts).item() / group.size())
