"""Two ranks all-reduce the loss in every step, and in every fourth step the gradient's norm."""

import torch
import torch.distributed as dist
from job import start_rank

rank, size, watchdog = start_rank()
torch.manual_seed(rank)
groups = {name: dist.new_group([0, 1], group_desc=name) for name in ("loss", "norm")}
model = torch.nn.Linear(8, 4)

for step in range(8):
    loss = model(torch.randn(2, 8)).square().mean()
    loss.backward()
    norms = torch.stack([parameter.grad.norm() for parameter in model.parameters()])
    values = {"loss": loss.detach(), "norm": norms}
    for name in {"loss", "norm"} if step % 4 == 3 else {"loss"}:
        dist.all_reduce(values[name], group=groups[name])
    watchdog.report_step()
    print(f"[rank {rank}] step {step}", flush=True)
