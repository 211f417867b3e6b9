"""Lightning's Trainer on existing ranks, to compare it with a plain loop.

    losses, norms, weights = ranks.run(fit_on_ranks, 2, "ddp", 10)[0]  # or "fsdp2"

By default, Lightning starts the script again for each rank, and chooses the devices; here it uses
the ranks that run, each on its own device.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as L
import torch
import torch.distributed as dist
from pytorch_lightning.plugins.environments import TorchElasticEnvironment
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Subset

from shardlab import ranks
from shardlab.common import show
from shardlab.common.arguments import check_one_of
from shardlab.common.text import TokenWindows

from .core import LitGPT

STRATEGIES = ("ddp", "fsdp2")


class ExistingRanks(TorchElasticEnvironment):
    """A cluster environment for Lightning: the ranks of the process group, on one machine."""

    def world_size(self) -> int:
        """Return the group's size; torchrun may have started more processes."""
        return dist.get_world_size()

    def global_rank(self) -> int:
        """Return this process's rank in the group."""
        return dist.get_rank()

    def local_rank(self) -> int:
        """Return the global rank, which on one machine is the local rank."""
        return dist.get_rank()


class DDP(DDPStrategy):
    """Lightning's DDP for ranks that already run: its own launcher does not work in a notebook."""

    def __init__(self) -> None:
        super().__init__(parallel_devices=list_devices())

    def _configure_launcher(self) -> None:
        """Configure no launcher: the ranks already run."""


class MetricRecorder(L.Callback):
    """A callback that collects the logged losses, and gradient norms before clipping."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, optimizer: Any) -> None:
        """Record the gradient norm once per step, after all micro-batches."""
        norm = torch.nn.utils.get_total_norm([p.grad for p in module.parameters()])
        self.norms.append(gather_full_tensor(norm).item())

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Record the loss after each micro-batch."""
        self.losses.append(trainer.callback_metrics["loss"].item())


def choose_device(strategy: str, size: int) -> str:
    """Return the device for `ranks.run`: "cpu" where Lightning cannot train on the ranks' GPUs.

    Lightning does not know Intel's GPUs; FSDP2 needs a reduce-scatter, which gloo does not have for
    the tensors of a GPU that ranks share.
    """
    backend, kind = ranks.choose_backend(size)
    return "cpu" if kind == "xpu" or (strategy == "fsdp2" and backend == "gloo") else "auto"


def list_devices() -> list[torch.device]:
    """Return Lightning's list of devices: at each rank's place, on this rank, this rank's own."""
    return [ranks.device()] * dist.get_world_size()


def fit_on_ranks(
    strategy: str,
    steps: int,
    batch: int = 8,
    windows: int = 40,
    data_ranks: int | str | None = None,
    extra_callbacks: Sequence[L.Callback] = (),
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Train on each rank; return losses and gradient norms of all steps, and the final weights.

    strategy: "ddp" or "fsdp2". batch: windows in a step, over all ranks. windows: number of windows
    in an epoch, the text's first. data_ranks: number of ranks over which FSDP2 shards; None: all;
    "auto": Lightning's default.
    """
    check_one_of(STRATEGIES, strategy=strategy)
    size, recorder = dist.get_world_size(), MetricRecorder()
    parallel: DDP | ModelParallelStrategy = DDP()
    if strategy == "fsdp2":
        parallel = ModelParallelStrategy(data_ranks or size, 1 if data_ranks is None else "auto")
        parallel.parallel_devices = list_devices()
    trainer = L.Trainer(
        strategy=parallel,
        plugins=[ExistingRanks()],  # without it, Lightning would start this script again per rank
        max_steps=steps,
        gradient_clip_val=1.0,
        callbacks=[recorder, *extra_callbacks],
        log_every_n_steps=10,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = LitGPT(strategy == "fsdp2")
    data = Subset(TokenWindows(64), range(windows))
    trainer.fit(model, DataLoader(data, batch_size=batch // size))
    weights = {name: gather_full_tensor(w).clone() for name, w in model.net.state_dict().items()}
    return recorder.losses, recorder.norms, weights


def gather_full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor of a possibly sharded one (collective)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def show_batch_file() -> show.DisplayResult:
    """Show the file lightning.sbatch."""
    return show.file(Path(__file__).with_name("lightning.sbatch"), "bash")
