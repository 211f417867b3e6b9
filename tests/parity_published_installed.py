"""Published silent bugs that are still in what is installed: the libraries do it themselves.

Seen on 2026-11-24 with DeepSpeed 0.19.8 and torch 2.13.0. `live` names the version: where another
one is installed and the bug is gone, the test says what to do.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from parity_published import (
    BATCH,
    LENGTH,
    WIDTH,
    Net,
    mine,
    thread,
    train,
)
from parity_published_copies import MICRO, micro_loss, plain_micro
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from shardlab import deepspeed_engine

boundaries = partial(
    thread, ranks=2, plain=plain_micro, place="gradient ", words="where all should count alike",
    said="every backward of the engine is a boundary: the last alone counts",
    live="DeepSpeed 0.19.8",
)  # fmt: skip


@boundaries("open-instruct 1498")
def second_stage(watch: Any, wrong: bool) -> None:
    accumulate(watch, 2, marked=not wrong)


@boundaries("open-instruct 1498, stage 1")
def first_stage(watch: Any, wrong: bool) -> None:
    accumulate(watch, 1, marked=not wrong)


def accumulate(watch: Any, stage: int, marked: bool) -> None:
    """Its configuration says one micro-batch a step, and it gets more; marked: is told so."""
    deepspeed = deepspeed_engine.prepare()
    deepspeed.ops.__compatible_ops__ = {}  # compile nothing
    deepspeed.init_distributed()
    net = Net()
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=torch.optim.AdamW(net.parameters(), 1e-2, foreach=False),
        config={
            "train_micro_batch_size_per_gpu": BATCH // dist.get_world_size(),
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,  # 1.0 by default
            "steps_per_print": 10**9,
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 2**16},
            "zero_allow_untested_optimizer": True,
        },
    )
    watch(engine)
    for number in range(MICRO):
        if marked:
            engine.set_gradient_accumulation_boundary(number == MICRO - 1)
        engine.backward(micro_loss(engine, number, mine))
    engine.step()


class Gain(nn.Module):
    """Each number times a weight, like a norm's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, WIDTH + 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Gained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = Gain()

    def forward(self, x: Tensor) -> Tensor:
        return self.gain(x)


def exact() -> Tensor:
    """Numbers of which bfloat16 holds all, their products, and each half's sums; not the whole's.

    Then the sum of the halves is the only place at which it can round.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(8, (BATCH, LENGTH, WIDTH), generator=generator).float()
    x[:, LENGTH // 2 :] /= 32
    return x


def plain_gained(watch: Any) -> None:
    train(watch, Gained(), lambda model, step: model(exact()).sum().backward())


@thread("pytorch 190626", 2, plain_gained, r"gradient gain\.weight", "the digits of bfloat16",
        "reduce_dtype=float32 is not that of the sum over tensor-parallel ranks",
        live="torch 2.13.0")  # fmt: skip
def narrow_sum(watch: Any, wrong: bool) -> None:
    """With accumulation FSDP2 keeps gradients in reduce_dtype, and the sum over ranks, too."""
    model, mesh = Gained(), init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"gain": SequenceParallel()})
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=mesh["data"], mp_policy=policy)

    def backward(model: Any, step: int) -> None:
        parts = mine(exact(), 1).chunk(1 if wrong else 2)
        for number, x in enumerate(parts):
            model.set_requires_gradient_sync(number == len(parts) - 1)
            y = model(x)
            y = y.to_local() if isinstance(y, DTensor) else y
            y.float().sum().backward()

    train(watch, model, backward)
