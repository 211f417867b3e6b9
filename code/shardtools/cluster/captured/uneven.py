"""Eleven samples on three ranks, one at a time, and gradients averaged after each."""

import torch
import torch.distributed as dist
from job import start_rank

rank, size, watchdog = start_rank()
torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
samples = torch.randn(11, 8)


def average_gradients():
    """Average the gradients over all ranks, in place."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= size


for epoch in range(2):
    for step, sample in enumerate(samples[rank::size]):
        optimizer.zero_grad()
        model(sample).square().mean().backward()
        average_gradients()
        optimizer.step()
        watchdog.report_step()
        print(f"[rank {rank}] epoch {epoch} step {step}", flush=True)
    dist.barrier()
