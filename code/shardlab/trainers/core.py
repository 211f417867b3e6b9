"""The training script with Lightning's Trainer, which provides loop, sampler, DDP and clipping.

    python -m shardlab.trainers.core --folder runs/a         # the GPUs of this machine, or its CPU
    sbatch lightning.sbatch --folder runs/a                  # two nodes

Needs pytorch-lightning (2.6).
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import pytorch_lightning as L
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from shardlab.common.text import TokenWindows, load_splits
from shardlab.gpt.model import GPT, PRESETS, Config, loss


class LitGPT(L.LightningModule):
    """The plain GPT, its losses and its optimizer. sharded: use FSDP2 on the strategy's mesh."""

    def __init__(self, sharded: bool = False, config: Config = PRESETS["nano"]):
        super().__init__()
        self.sharded, self.config, self.net = sharded, config, None

    def configure_model(self) -> None:
        """Build the model once, after the ranks have started; Lightning calls it for each stage."""
        if self.net is None:
            torch.manual_seed(0)
            self.net = GPT(self.config)
            if self.sharded:
                for part in [*self.net.blocks, self.net]:
                    fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """Return this rank's mean loss for tokens and targets, each [b, S]."""
        tokens_BS, targets_BS = batch
        value = loss(self.net(tokens_BS), targets_BS)
        self.log("loss", value, sync_dist=True)  # without sync_dist, ranks log different losses
        return value

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        """Log the loss; Lightning disables gradients and averages over batches and ranks."""
        tokens_BS, targets_BS = batch
        self.log("validation", loss(self.net(tokens_BS), targets_BS), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of the plain loop."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class SynchronizedSave(L.Callback):
    """A callback that saves after SIGUSR1, on all ranks after the same step.

    Lightning's own handler for Slurm saves inside the signal handler. The signal may reach ranks in
    different steps and collectives, and then all ranks hang (Lightning's issue 21406). This class
    only records the signal, and calls Lightning's handler once all ranks know of the signal.
    """

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        """Replace Lightning's signal handler."""
        self.save_requested, self.save_handler = False, signal.getsignal(signal.SIGUSR1)
        if callable(self.save_handler):
            signal.signal(signal.SIGUSR1, self.request_save)

    def request_save(self, *_: Any) -> None:
        """Record that this rank got the signal (signal handler)."""
        self.save_requested = True

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Ask all ranks for the signal in steps that log the loss, which synchronize anyway."""
        due = callable(self.save_handler) and trainer.global_step % trainer.log_every_n_steps == 0
        if due and trainer.strategy.reduce_boolean_decision(self.save_requested, all=False):
            self.save_requested = False
            self.save_handler(signal.SIGUSR1, None)


def build_trainer(folder: Path, nodes: int, steps: int, every: int) -> L.Trainer:
    """Return a Trainer on all GPUs of `nodes` nodes, or on their CPUs.

    It validates after every `every` steps and keeps the last and the best checkpoint. In a Slurm
    job it saves a checkpoint and requeues the job at SIGUSR1.
    """
    checkpoint = ModelCheckpoint(folder, "best", monitor="validation", save_last=True)
    return L.Trainer(
        accelerator="auto",  # GPUs, if there are any
        devices=int(os.environ.get("SLURM_NTASKS_PER_NODE", 0)) or "auto",
        num_nodes=nodes,
        strategy="ddp",
        max_steps=steps,
        val_check_interval=every,  # in batches
        check_val_every_n_epoch=None,  # counted over all epochs, not within each
        gradient_clip_val=1.0,
        callbacks=[checkpoint, SynchronizedSave()],
        log_every_n_steps=10,
        logger=CSVLogger(folder),
        default_root_dir=folder,  # folder of the checkpoint at SIGUSR1
        enable_progress_bar=False,
    )


def find_newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint, of the last validation or of a later SIGUSR1, or None.

    Lightning's own choice, with ckpt_path="last" or None, does not compare the two.
    """
    found = [*folder.glob("last*.ckpt"), *folder.glob("hpc_ckpt_*.ckpt")]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/lightning"))
    parser.add_argument("--nodes", type=int, default=int(os.environ.get("SLURM_NNODES", 1)))
    for name, default in {"steps": 400, "every": 100, "batch": 16, "limit": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    train, validation, _ = (TokenWindows(64, part[: args.limit or None]) for part in load_splits())
    trainer = build_trainer(args.folder, args.nodes, args.steps, args.every)
    per_rank, rest = divmod(args.batch, trainer.world_size)  # a DataLoader's batch size is per rank
    if per_rank < 1 or rest:
        parser.error(f"--batch {args.batch}: must be a multiple of {trainer.world_size} (ranks)")
    loaders = DataLoader(train, per_rank, shuffle=True, drop_last=True), DataLoader(validation, 64)
    trainer.fit(LitGPT(), *loaders, ckpt_path=find_newest_checkpoint(args.folder))


if __name__ == "__main__":
    main()
