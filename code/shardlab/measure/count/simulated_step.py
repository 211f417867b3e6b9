"""Count the bytes that one rank of a large job would hold, on a laptop, without the job.

The process group is simulated (`ranks.run_with_fake_group`) and so are the tensors: they have
shapes, dtypes and storage sizes, but no data. Torch's FSDP2 shards torch modules on them, and
`track_memory` counts the bytes of their storages. With real ranks and tensors the same step holds
the same bytes; `tests/test_held.py` compares.

Not included: allocator fragmentation, nccl's buffers, CUDA's own memory, and tensors that
asynchronous streams hold a moment longer.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from shardlab import ranks
from shardlab.common.shapes import Config
from shardlab.gpt import model as plain

from .storage import measure_state_bytes, track_memory


def simulate_fsdp_step(
    config: Config, world_size: int, batch: int = 1, seq: int | None = None, recompute: str = "full"
) -> dict[str, int]:
    """Count the bytes that rank 0 of `world_size` would hold in a simulated FSDP2 training step.

    Each block is a unit of its own. Parameters are float32 in shards and bfloat16 for computing;
    gradients are reduced in float32; AdamW. batch: sequences per rank; seq: tokens of each, by
    default the model's longest. recompute: "full" (each block again in backward) or "none".

    Returns bytes: parameters, gradients, optimizer (this rank's shards, after the step), and, in
    a step with optimizer states, `activations` (kept at the end of forward) and `peak` (of all).

    Raises ValueError for a world_size below 1.
    """
    seq = config.seq if seq is None else seq
    step = config, batch, seq, recompute == "full"
    return ranks.run_with_fake_group(_run_step, world_size, *step, timeout=300)


def _run_step(config: Config, batch: int, seq: int, recompute: bool) -> dict[str, int]:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.tensor import _sharding_prop

    # DTensor infers shapes with its own fake tensors. Inside another fake mode it would use that
    # mode, and `track_memory` would count its trial tensors.
    if hasattr(_sharding_prop, "detect_fake_mode"):
        _sharding_prop.detect_fake_mode = lambda *_, **__: None
    with torch.device("meta"):
        model = plain.GPT(config)
    _shard_model(model)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        return measure_fsdp_step(model, batch, seq, recompute)


def _shard_model(model: plain.GPT) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    settings: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": True}
    for block in model.blocks:
        fully_shard(block, **settings)
    fully_shard(model, **settings)


def measure_fsdp_step(model: plain.GPT, batch: int, seq: int, recompute: bool) -> dict[str, int]:
    """Count the bytes of a training step of an FSDP2-sharded model; see `simulate_fsdp_step`."""
    if recompute:
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    # foreach=True would copy all shards during the step.
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tokens_BS = torch.zeros(batch, seq, dtype=torch.int64)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # creates the optimizer states
    optimizer.zero_grad()
    with track_memory(model, optimizer, tokens_BS) as tracker:
        before = tracker.current_bytes
        value = plain.loss(model(tokens_BS), tokens_BS)
        kept = tracker.current_bytes - before
        value.backward()
        found = measure_state_bytes(model, optimizer)
        optimizer.step()
    return {
        "parameters": found["parameters"],
        "gradients": found["gradients"],
        "optimizer": found["optimizer"] + found["counters"],
        "activations": kept,
        "peak": tracker.peak_bytes,
    }
