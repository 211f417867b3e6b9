"""Starting DeepSpeed: quietly, without a compiler, on the device that the rank has.

Left to itself, DeepSpeed compiles a C++ extension when it joins a process group on a CPU (about a
minute, and an error without g++ and ninja), warns when it finds no GPU, and prints tables. None of
it is needed to train: the extension serves the all-reduce of its inference engine alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardlab import ranks

Optimizers = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def prepare() -> Any:
    """Import DeepSpeed, ready for this process's device, and return the module.

    Every function here calls it. Called once before `ranks.run`, it spares each forked rank the
    import, which takes a second or more. Raises ImportError when DeepSpeed is not installed.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise ImportError(
            "this needs DeepSpeed, which is not installed here: "
            "pip install deepspeed (any 0.19; without a compiler: DS_BUILD_OPS=0)"
        )
    device = ranks.device().type
    # What DeepSpeed itself reads to learn the accelerator; without it, it warns that it guesses.
    before = os.environ.get("DS_ACCELERATOR")
    os.environ["DS_ACCELERATOR"] = device
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            deepspeed = importlib.import_module("deepspeed")
            # The first engine would import it, seconds' worth, in each rank again.
            importlib.import_module("torch._inductor.compile_fx")
            importlib.import_module("tqdm.auto")  # in a notebook it warns, once, of missing widgets
    finally:
        if before is None:
            del os.environ["DS_ACCELERATOR"]
        else:
            os.environ["DS_ACCELERATOR"] = before
    _use_accelerator(device)
    deepspeed.ops.__compatible_ops__ = {}  # no extension is worth compiling: so none is compiled
    for handler in deepspeed.utils.logger.handlers:
        if type(handler) is logging.StreamHandler:
            # This rank's; that of the import was the caller's, and may be closed: no setStream,
            handler.stream = sys.stderr  # which flushes it.
    deepspeed.utils.logger.setLevel(logging.ERROR)
    ranks.at_parting(_forget)
    return deepspeed


def _use_accelerator(device: str) -> None:
    """Tell DeepSpeed which device it runs on; the caller that imported it may have had another."""
    accelerator = importlib.import_module("deepspeed.accelerator.real_accelerator")
    if accelerator.get_accelerator().device_name() != device:
        module = importlib.import_module(f"deepspeed.accelerator.{device}_accelerator")
        accelerator.set_accelerator(getattr(module, f"{device.upper()}_Accelerator")())


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, nothing that DeepSpeed prints reaches the page."""
    with (
        open(os.devnull, "w") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),  # progress bars
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def initialize(
    module: nn.Module,
    config: Mapping[str, Any],
    optimizer: Optimizers | torch.optim.Optimizer | None = None,
) -> Any:
    """DeepSpeed's engine around `module`, on every rank of the default process group.

        engine = initialize(GPT(PRESETS["nano"]), config(micro_batch=2, world_size=2, zero=3))
        loss(engine(tokens), targets)   # then engine.backward(...), engine.step(); or use `step`

    module: the same on every rank; it is moved to the rank's device and becomes the engine's. One
        made by `pipeline` gives DeepSpeed's PipelineEngine.
    config: from `config`, or any dict in DeepSpeed's own words.
    optimizer: a function from parameters to an optimizer, or an optimizer over all of `module`'s
        parameters; without one, torch's AdamW with a learning rate of 1e-3. (The config's own
        "optimizer" section, when there is one, comes before that default. DeepSpeed compiles the
        fast optimizers that it names unless "torch_adam" is set.)

    DeepSpeed keeps some of its state for the whole process: an engine with a pipeline, one with
    tensor parallelism and one with neither belong in runs of their own.

    Raises ValueError when the config was made for another number of ranks, before DeepSpeed starts.
    """
    deepspeed = prepare()
    settings = dict(config)
    _check_world(settings, dist.get_world_size())
    if optimizer is None and "optimizer" not in settings:
        optimizer = _adamw
    device = ranks.device()
    if device.type == "cuda":  # DeepSpeed takes this for the GPU's number; ranks may share one
        os.environ["LOCAL_RANK"] = str(device.index)
    with quiet():
        engine, *_ = deepspeed.initialize(
            model=module.to(device),
            optimizer=optimizer,
            model_parameters=[p for p in module.parameters() if p.requires_grad],
            config=settings,
        )
    return engine


def _forget() -> None:
    """Take from DeepSpeed what it keeps of this run: a process of torchrun's has more than one."""
    name = "deepspeed.{}".format
    importlib.import_module(name("comm.comm")).cdb = None
    importlib.reload(importlib.import_module(name("utils.groups")))
    importlib.import_module(name("module_inject.layers")).set_autotp_mode(training=False)
    messages = importlib.import_module(name("runtime.pipe.p2p"))
    messages._groups = messages._grid = None


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=False)


def _check_world(settings: Mapping[str, Any], world: int) -> None:
    total, micro, accumulation = (
        settings.get(key)
        for key in (
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
        )
    )
    if None in (total, micro, accumulation):
        return  # DeepSpeed works out the rest
    stages = settings.get("pipeline", {}).get("stages", 1)
    pp = stages if isinstance(stages, int) else 1
    # DeepSpeed divides by the stages of a pipeline, and not by the degree of tensor parallelism.
    if total * pp != micro * accumulation * world:
        raise ValueError(
            f"train_batch_size={total}: made for another number of ranks; with micro_batch={micro},"
            f" accumulation={accumulation}, pp={pp} on {world} ranks, allowed is"
            f" {micro * accumulation * world // pp}"
        )
