"""A GPT on two ranks. Its settings ask for tensor parallelism."""

import torch
import torch.distributed as dist
from job import start_rank
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from shardlab import tensor_parallel
from shardlab.common import text
from shardlab.gpt.model import GPT, PRESETS, loss

SETTINGS = {"tensor_paralel_size": 2, "sequences": 7}

rank, size, watchdog = start_rank()
print(f"[rank {rank}] tensor parallelism, {SETTINGS}", flush=True)
torch.manual_seed(0)
model = GPT(PRESETS["nano"])
if SETTINGS.get("tensor_parallel_size", 1) > 1:
    model = tensor_parallel.parallelize(model, dist.group.WORLD)
else:
    for part in (*model.blocks, model):
        fully_shard(part, mesh=DeviceMesh.from_group(dist.group.WORLD, "cpu"))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for number in range(rank, SETTINGS["sequences"], size):
    tokens, targets = text.get_batch(64, 1, start=number)
    value = loss(model(tokens), targets)
    value.backward()
    optimizer.step()
    optimizer.zero_grad()
    watchdog.report_step()
    print(f"[rank {rank}] sequence {number}", flush=True)
dist.barrier()
