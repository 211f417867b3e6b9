"""Torch's helpers between parameters and one vector; one vector for each dtype."""

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters


class ZeroOptimizer:
    def __init__(self, parameters, group, make):
        self.group = group
        trained = [p for p in parameters if p.requires_grad]
        self.parts = [
            [p for p in trained if p.dtype == dtype] for dtype in {p.dtype: 0 for p in trained}
        ]
        self.shares = [
            self.share(parameters_to_vector(p.contiguous() for p in part)).detach()
            for part in self.parts
        ]
        self.optimizer = make(self.shares)

    def share(self, vector):
        vector = self.padded(vector)
        return vector.chunk(self.group.size())[self.group.rank()].clone()

    def padded(self, vector):
        return torch.cat([vector, vector.new_zeros(-vector.numel() % self.group.size())])

    def step(self, max_norm=None):
        for part, share in zip(self.parts, self.shares, strict=True):
            for p in part:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            vector = parameters_to_vector(p.grad.contiguous() for p in part) / self.group.size()
            share.grad = torch.zeros_like(share)
            dist.reduce_scatter_tensor(share.grad, self.padded(vector), group=self.group)
        total = None
        if max_norm is not None:
            total = torch.stack([s.grad.double().pow(2).sum() for s in self.shares]).sum()
            dist.all_reduce(total, group=self.group)
            total = total.sqrt().item()
            scale = max_norm / (total + 1e-6)
            if scale < 1:
                for share in self.shares:
                    share.grad.mul_(scale)
        self.optimizer.step()
        for part, share in zip(self.parts, self.shares, strict=True):
            vector = share.new_empty(share.numel() * self.group.size())
            dist.all_gather_into_tensor(vector, share, group=self.group)
            fresh = [torch.empty(p.shape, dtype=p.dtype) for p in part]
            vector_to_parameters(vector[: sum(p.numel() for p in part)], fresh)
            for p, new in zip(part, fresh, strict=True):
                p.data.copy_(new)
        return total

    def zero_grad(self):
        for p in [p for part in self.parts for p in part]:
            p.grad = None
