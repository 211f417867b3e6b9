"""Each parameter is cut by itself, and its sums travel while the next ones are prepared."""

import torch
import torch.distributed as dist
import torch.nn.functional as F


class ZeroOptimizer:
    def __init__(self, parameters, group, make):
        self.group, self.n = group, group.size()
        self.parameters = [p for p in parameters if p.requires_grad]
        self.pieces = [self.cut(p)[group.rank()].clone() for p in self.parameters]
        self.inner = make(self.pieces)

    def cut(self, tensor):
        flat = tensor.detach().flatten()
        return F.pad(flat, (0, -flat.numel() % self.n)).view(self.n, -1)

    def step(self, max_norm=None):
        works = []
        for p, piece in zip(self.parameters, self.pieces, strict=True):
            rows = self.cut(p.new_zeros(p.shape) if p.grad is None else p.grad) / self.n
            piece.grad = torch.zeros_like(piece)
            works.append((dist.reduce_scatter_tensor(
                piece.grad, rows.flatten(), group=self.group, async_op=True), rows))  # fmt: skip
        for work, _ in works:
            work.wait()
        norm = None
        if max_norm is not None:
            norm = torch.stack([g.grad.double().norm() for g in self.pieces]).norm() ** 2
            dist.all_reduce(norm, group=self.group)
            norm = norm.sqrt()
            if norm > max_norm:
                for piece in self.pieces:
                    piece.grad.mul_(max_norm / (norm.item() + 1e-6))
        self.inner.step()
        gathered = []
        for p, piece in zip(self.parameters, self.pieces, strict=True):
            whole = piece.new_empty(self.n * piece.numel())
            work = dist.all_gather_into_tensor(whole, piece, group=self.group, async_op=True)
            gathered.append((p, whole, work))
        for p, whole, work in gathered:
            work.wait()
            p.detach().copy_(whole[: p.numel()].view_as(p))
        return norm

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None
