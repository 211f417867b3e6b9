"""All in `finish`: buckets by dtype, filled in the order of the parameters, one after another."""

from contextlib import contextmanager

import torch
import torch.distributed as dist


class DataParallel:
    def __init__(self, module, group, bucket_bytes=2**20):
        self.module, self.group, self.limit = module, group, bucket_bytes
        first = dist.get_global_rank(group, 0)
        for tensor in (*module.parameters(), *module.buffers()):
            whole = tensor.detach().contiguous()
            dist.broadcast(whole, first, group=group)
            tensor.data.copy_(whole)

    def __call__(self, *inputs):
        return self.module(*inputs)

    @contextmanager
    def no_sync(self):
        yield

    def finish(self):
        trained = [p for p in self.module.parameters() if p.requires_grad]
        has = torch.tensor([float(p.grad is not None) for p in trained])
        dist.all_reduce(has, group=self.group)
        for p, ranks in zip(trained, has.tolist(), strict=True):
            if ranks and p.grad is None:
                p.grad = torch.zeros_like(p)
        for bucket in self.fill_buckets([p.grad for p in trained if p.grad is not None]):
            flat = torch.cat([g.reshape(-1) for g in bucket])
            dist.all_reduce(flat, group=self.group)
            flat /= self.group.size()
            start = 0
            for g in bucket:
                g.copy_(flat[start : start + g.numel()].view(g.shape))
                start += g.numel()

    def fill_buckets(self, gradients):
        found, sizes = {}, {}
        for g in gradients:
            mine = found.setdefault(g.dtype, [[]])
            if mine[-1] and sizes[g.dtype] + g.nbytes > self.limit:
                mine.append([])
                sizes[g.dtype] = 0
            mine[-1].append(g)
            sizes[g.dtype] = sizes.get(g.dtype, 0) + g.nbytes
        return [bucket for mine in found.values() for bucket in mine]


def joined_loss(loss_sum, count, group):
    total = torch.tensor(float(count))
    dist.all_reduce(total, group=group)
    return loss_sum * group.size() / total.item()
