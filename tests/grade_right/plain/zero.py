"""One flat tensor for each dtype, cut into n equal pieces."""

import torch
import torch.distributed as dist


class ZeroOptimizer:
    def __init__(self, parameters, group, make):
        self.group, n = group, group.size()
        self.kinds, self.parameters = {}, [p for p in parameters if p.requires_grad]
        for p in self.parameters:
            self.kinds.setdefault(p.dtype, []).append(p)
        self.shares = []
        for kind in self.kinds.values():
            flat = self.flatten_tensors(kind, [p.detach() for p in kind])
            size = len(flat) // n
            share = flat[group.rank() * size : (group.rank() + 1) * size].clone()
            self.shares.append(share)
        self.optimizer = make(self.shares)

    def flatten_tensors(self, kind, tensors):
        flat = torch.cat([t.reshape(-1) for t in tensors])
        rest = -len(flat) % self.group.size()
        return torch.cat([flat, flat.new_zeros(rest)])

    def step(self, max_norm=None):
        n = self.group.size()
        for kind, share in zip(self.kinds.values(), self.shares, strict=True):
            own = [torch.zeros_like(p) if p.grad is None else p.grad for p in kind]
            share.grad = torch.empty_like(share)
            flat = self.flatten_tensors(kind, own)
            dist.reduce_scatter_tensor(share.grad, flat, group=self.group)
            share.grad /= n
        norm = None
        if max_norm is not None:
            squares = sum(share.grad.double().square().sum() for share in self.shares)
            dist.all_reduce(squares, group=self.group)
            norm = squares.sqrt().item()
            for share in self.shares:
                share.grad *= min(1.0, max_norm / (norm + 1e-6))
        self.optimizer.step()
        for kind, share in zip(self.kinds.values(), self.shares, strict=True):
            flat = share.new_empty(n * len(share))
            dist.all_gather_into_tensor(flat, share, group=self.group)
            start = 0
            for p in kind:
                p.data.copy_(flat[start : start + p.numel()].view(p.shape))
                start += p.numel()
        return norm

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None
