"""A right call of every constructor and entry point of a technique, for test_refusals.

A row is a function and its arguments, made anew for each try, for much changes what it is given.

INNER   arguments without a check of their own
FINE    values that look wrong, and are allowed; and None, where it is the default
SAID    the name by which an error calls an argument, where it is another one
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardlab import (
    checkpoint,
    collectives,
    data_parallel,
    experts,
    gemm,
    layout,
    memory,
    mesh,
    pipeline,
    zero,
)
from shardlab import context_parallel as cp
from shardlab import sequence_parallel as sp
from shardlab import tensor_parallel as tp
from shardlab import tensor_types as tt
from shardlab.common import machines
from shardlab.common.shapes import Config
from shardlab.gpt.model import GPT, loss
from shardlab.measure import count, link
from shardtools import parity

PLAIN = Config(vocab=64, seq=16, layers=2, heads=4, hidden=32)
SPARSE = Config(vocab=64, seq=16, layers=2, heads=4, hidden=32, experts=4)
Row = tuple[Callable[..., Any], Callable[[], dict[str, Any]]]


def called(function: Callable[..., Any]) -> str:
    """Its name, by which rows are found."""
    function = getattr(function, "stands_for", function)
    return f"{function.__module__.removeprefix('shardlab.')}.{function.__qualname__}"


INNER = {
    gemm.grid: "wrap",
    **dict.fromkeys((zero.Zero1, zero.Zero2, zero.Zero3), "late reshard prefetch"),
    machines.Machine: "name label",
}
INNER = {called(function): names.split() for function, names in INNER.items()}
RELU = nn.ReLU  # without parameters: a model in which there is nothing to be found
FINE = {
    (zero.Zero3, "units"): ([],),
    (checkpoint.Checkpoints, "folder"): ("x",),
    (checkpoint.export, "path"): ("x",),
    (checkpoint.export, "model"): (RELU,),
    (checkpoint.save_hub, "folder"): ("x",),
    (checkpoint.hand_over, "source"): (None,),  # on ranks that have none
    (checkpoint.hand_over, "target"): (None, RELU),
}
FINE = {(called(function), name): values for (function, name), values in FINE.items()}
SAID = {"name": "schedule", "text": "layout", "rule": "stages", "model": "module",
    }  # fmt: skip


def one_step(watch: Any, _: Any = None, behind: int = 0, steps: int = 1) -> None:
    """A program that trains: some steps, after some that nobody watches."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(behind + steps):
        if step == behind:
            watch(model, optimizer)
        optimizer.zero_grad()
        model(torch.ones(3, 2)).square().mean().backward()
        optimizer.step()


def numbers() -> Iterator[Row]:
    """Predictors and what else computes with numbers alone: no rank is needed."""
    cut = layout.Layout(dp=2, tp=2, zero=1, sequence_parallel=True, microbatches=2)
    table: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (Config, {f: getattr(SPARSE, f) for f in vars(SPARSE)} | {"kv_heads": 2, "ffn": 64}
         | {"expert_ffn": 32, "capacity": 1.5, "head": 8, "window": 4, "full_every": 2}),
        (Config, {"hidden": 32, "heads": 4, "bias": False, "latent": 16, "query_latent": 16,
                  "rotary": 4, "value": 8}),
        (machines.Machine, vars(machines.MACHINES["b200"]) | {"name": "B200"}),
        (layout.Layout, {"dp": 4, "tp": 2, "pp": 2, "zero": 3, "micro_batch": 2,
                         "microbatches": 4, "recompute": "norms+ffn", "sequence_parallel": True,
                         "cp": 2, "ep": 2, "chunks": 2, "schedule": "interleaved", "replicas": 2,
                         "offload": "parameters", "stages": "equal",
                         "order": ("dp", "pp", "tp", "cp")}),
        (layout.read, {"text": "d 2 · t 2, ZeRO-1"}),
        (memory.estimate, {"config": PLAIN, "layout": cut, "seq": 16, "precision": "bf16",
                           "attention": "fused", "device": "cpu", "stage": 0,
                           "optimizer": "adamw", "bucket": 2**20, "prefetch": 1}),
        (pipeline.schedule, {"name": "interleaved", "stages": 2, "microbatches": 4, "chunks": 2}),
        (pipeline.Sleeping, {"forward": 1.0, "backward_input": 1.0, "backward_weight": 1.0,
                             "size": 1}),
        (collectives.CostModel, {"latency": 1e-6, "bandwidth": 1e9}),
        (gemm.Machine, {"flops": 1e12, "latency": 1e-6, "bandwidth": 1e9}),
        (count.Rates, {"flops": 1e12, "bytes": 1e11}),
        (count.pretended_step, {"config": PLAIN, "world_size": 2, "batch": 1, "seq": 16,
                                "recompute": "full", "reshard": True, "timeout": 60.0}),
        (checkpoint.best_interval, {"save": 10.0, "mtbf": 1e4}),
        (parity.check, {"plain": one_step, "parallel": one_step, "ranks": 1, "draws": 1,
                        "timeout": 60.0}),
        (parity.check_resume, {"through": partial(one_step, steps=2), "before": one_step,
                               "after": partial(one_step, behind=1), "ranks": 1, "draws": 1,
                               "timeout": 60.0}),
        (tt.check, {"step": lambda tp: None, "timeout": 60.0, "tp": 2}),
    ]  # fmt: skip
    for function, right in table:
        yield function, lambda right=right: dict(right)


def gpt(config: Config = PLAIN) -> GPT:
    """A small model."""
    return GPT(config)


def trained(model: nn.Module) -> nn.Module:
    """The same with gradients."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def objects(folder: str) -> Iterator[Row]:
    """What takes models, tensors, groups and optimizers: to be called by the one rank of a run."""
    group = dist.group.WORLD
    assert group is not None
    y = torch.ones(4, 4)
    one = pipeline.schedule("1f1b", 1, 2)
    groups = mesh.join(layout.Layout(), group)
    zeros = {"compute_dtype": torch.bfloat16, "reduction": "auto"}
    sizes = {"bucket_bytes": 2**20, "first_bytes": 2**20}
    device = torch.device("cpu")
    linear = nn.Linear
    edges = tp.REPLICATED

    yield cp.distribute, lambda: {
        "model": gpt(), "group": group, "attention": "ring", "layout": "zigzag",
    }  # fmt: skip
    yield mesh.join, lambda: {"layout": layout.Layout(), "world": group}
    yield mesh.Parallel, lambda: {
        "model": gpt(), "groups": groups, "layout": layout.Layout(zero=1), "seed": 0,
    }  # fmt: skip
    yield tp.Edges, lambda: dict(vars(edges))
    yield tp.parallelize, lambda: {
        "model": gpt(), "group": group, "edges": edges, "dropout": "equal",
    }  # fmt: skip
    yield sp.AlongSequence, lambda: {"keep": False}
    yield sp.TokenDropout, lambda: {"p": 0.1, "group": group}
    yield data_parallel.DataParallel, lambda: {
        "module": linear(3, 3), "group": group, **sizes, "broadcast_buffers": True,
    }  # fmt: skip
    yield data_parallel.average_gradients, lambda: {
        "module": trained(linear(3, 3)), "group": group,
    }  # fmt: skip
    yield experts.parallelize, lambda: {"model": gpt(SPARSE), "group": group}
    for stage in (zero.Zero1, zero.Zero2):
        yield stage, lambda: {
            "module": linear(3, 3), "group": group, **sizes, **zeros, "late": True,
        }  # fmt: skip
    yield zero.Zero3, lambda: {
        "module": linear(3, 3), "group": group, "units": [], "reshard": True, "prefetch": True,
        **zeros,
    }  # fmt: skip
    yield zero.shard, lambda: {"module": linear(3, 3), "group": group, "stage": 1}
    yield pipeline.Pipeline, lambda: {
        "parts": [pipeline.Sleeping(0.0, 0.0, 0.0)], "schedule": one, "group": group,
        "loss": loss, "between": lambda tokens: (tokens.shape, torch.float32), "replicas": group,
        "twin": None, "record": False, "back": group, "check": True,
    }  # fmt: skip
    yield pipeline.cut, lambda: {"model": gpt(), "layers": 2}
    yield pipeline.distribute, lambda: {
        "model": gpt(), "schedule": one, "group": group, "layers": [2], "loss": loss,
        "replicas": group, "recompute": False, "record": False, "back": group, "check": True,
    }  # fmt: skip
    yield collectives.all_reduce, lambda: {"tensor": y, "group": group, "algorithm": "ring"}
    yield gemm.grid, lambda: {"group": group, "rows": 1, "columns": 1, "wrap": lambda group: group}
    yield gemm.multiply, lambda: {
        "way": "rows", "a_MK": y, "b_KN": y, "group": group, "full": True,
    }  # fmt: skip
    yield link.slow, lambda: {"latency": 0.0, "bandwidth": 1e9, "group": group}
    yield _entered(count.held), lambda: {"device": device, "trace": False, "limit": 1e12}
    yield tt.declare, lambda: {"x": torch.ones(2), "tp": "R"}
    yield _entered(tt.checking), lambda: {"tp": group}
    yield checkpoint.Checkpoints, lambda: {
        "folder": folder, "group": group, "keep": 2, "timeout": 60.0,
    }  # fmt: skip
    yield checkpoint.export, lambda: {"model": linear(3, 3), "path": f"{folder}/model.pt",
                                      "group": group}  # fmt: skip
    yield checkpoint.load_hub, lambda: {"model": GPT(PLAIN), "folder": _hub(folder),
                                        "group": group}  # fmt: skip
    yield checkpoint.save_hub, lambda: {
        "model": GPT(PLAIN), "folder": f"{_hub(folder)}-{next(numbered)}", "group": group,
        "like": _hub(folder), "dtype": torch.float32, "shard_bytes": 10**6,
    }  # fmt: skip
    yield checkpoint.config_of, lambda: {"folder": _hub(folder)}
    yield checkpoint.hand_over, lambda: {"source": GPT(PLAIN), "target": GPT(PLAIN),
                                         "group": group}  # fmt: skip


def _entered(manager: Callable[..., Any]) -> Callable[..., None]:
    """A context manager's call and its beginning, as one function of the same name."""

    def call(**given: Any) -> None:
        with manager(**given):
            pass

    call.stands_for = manager
    return call


numbered = itertools.count()


def _hub(folder: str) -> str:
    """A folder as the hub has it."""
    if not Path(f"{folder}/hub").exists():
        checkpoint.save_hub(GPT(PLAIN), f"{folder}/hub")
    return f"{folder}/hub"
