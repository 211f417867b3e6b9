"""Rows of a matrix for each dtype: row r is rank r's, and parameters become views of the matrix."""

import torch
import torch.distributed as dist


class ZeroOptimizer:
    def __init__(self, parameters, group, make):
        self.group, self.trained = group, [p for p in parameters if p.requires_grad]
        n, self.matrices = group.size(), []
        for dtype in dict.fromkeys(p.dtype for p in self.trained):
            kind = [p for p in self.trained if p.dtype == dtype]
            total = sum(p.numel() for p in kind)
            matrix = torch.zeros(n, (total + n - 1) // n, dtype=dtype)
            flat, at = matrix.view(-1), 0
            for p in kind:
                place = flat[at : at + p.numel()].view(p.shape)
                place.copy_(p.data)
                p.data = place
                at += p.numel()
            self.matrices.append((matrix, kind))
        self.rows = [matrix[group.rank()].clone() for matrix, _ in self.matrices]
        self.optimizer = make(self.rows)

    @torch.no_grad()
    def step(self, max_norm=None):
        for (matrix, kind), row in zip(self.matrices, self.rows, strict=True):
            whole = torch.zeros_like(matrix)
            at = 0
            for p in kind:
                if p.grad is not None:
                    whole.view(-1)[at : at + p.numel()] = p.grad.flatten()
                at += p.numel()
            row.grad = torch.empty_like(row)
            dist.reduce_scatter(row.grad, list(whole.unbind()), group=self.group)
            row.grad.div_(self.group.size())
        norm = None if max_norm is None else self.clip(max_norm)
        self.optimizer.step()
        for (matrix, _), row in zip(self.matrices, self.rows, strict=True):
            dist.all_gather(list(matrix.unbind()), row, group=self.group)
        return norm

    def clip(self, max_norm):
        squares = torch.zeros(self.group.size(), dtype=torch.float64)
        own = sum(float(row.grad.double().norm()) ** 2 for row in self.rows)
        squares[self.group.rank()] = own
        dist.all_reduce(squares, group=self.group)
        norm = squares.sum().sqrt()
        for row in self.rows:
            row.grad *= (max_norm / (norm + 1e-6)).clamp(max=1).item()
        return norm.item()

    def zero_grad(self):
        for p in self.trained:
            p.grad = None
