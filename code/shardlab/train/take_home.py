"""Train a model on text: on one GPU, on many GPUs, on many nodes. The losses are the same.

    python train.py --source book.txt --folder runs/a
    torchrun --nproc-per-node=4 train.py --folder runs/a --strategy fsdp2 --precision bf16
    srun python train.py --folder runs/a          # on the ranks that Slurm has started

This file needs only PyTorch (2.11 or later): copy it, and replace `GPT` by your model, `load_text`
and `Windows` by your data. It resumes from the folder's last checkpoint, on any number of ranks
that divides the batch. At SIGTERM or SIGUSR1 all ranks finish a step, save and exit; a file
`stopped` in the folder then says that steps remain. Wrong options end all ranks with status 2.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import hashlib
import json
import math
import multiprocessing
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dcp_state
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp2")
STOP_SIGNALS = signal.SIGTERM, signal.SIGUSR1  # stop after a step, and save
# Peak 16-bit matrix FLOP/s from data sheets, without sparsity.
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class JobError(ValueError):
    """An error that ends a job, raised on all ranks; rank 0 reports it in one line."""


def make_option(default: Any, text: str, *allowed: Any) -> Any:
    """Make a field of `Options`. allowed: a number's minimum and maximum, or a list of words."""
    return field(default=default, metadata={"help": text, "allowed": allowed})


@dataclass
class Options:
    """The options of a run. Raises JobError for wrong values."""

    folder: str = make_option("run", "folder for checkpoints and metrics")
    source: str = make_option("stdlib", "text file, or stdlib: the sources of Python's library")
    limit: int = make_option(0, "bytes of each part (train, validation, test); 0: all", 0)
    seq: int = make_option(64, "tokens (bytes) of a sequence", 1)
    layers: int = make_option(2, "transformer blocks", 1)
    heads: int = make_option(2, "attention heads of a block", 1)
    hidden: int = make_option(64, "width of the model", 1)
    dropout: float = make_option(0.0, "dropout probability", 0, 0.99)
    steps: int = make_option(400, "optimizer steps in total, over all runs", 1)
    batch: int = make_option(16, "sequences of a step, over all ranks", 1)
    micro: int = make_option(16, "sequences of a micro-batch on one rank", 1)
    lr: float = make_option(1e-3, "AdamW's learning rate", 0)
    clip: float = make_option(1.0, "maximum norm of the gradient", 0, math.inf)
    seed: int = make_option(0, "seed of weights, data order and dropout", 0)
    strategy: str = make_option("ddp", "how states are sharded", *STRATEGIES)
    tensor: int = make_option(1, "tensor-parallel ranks; 1 with ddp", 1)
    precision: str = make_option("float32", "dtype of matrix products", *DTYPES)
    compiler: str = make_option("none", "torch.compile backend, such as inductor")
    workers: int = make_option(0, "data loader processes per rank", 0, 1000)
    every: int = make_option(100, "steps between validations and checkpoints", 1)
    report: int = make_option(10, "steps between lines of metrics.jsonl", 1)
    resume: str = make_option("auto", "load the last checkpoint", "auto", "never")
    peak: float = make_option(0.0, "peak FLOP/s of a device, for MFU; 0: from its data sheet", 0)
    timeout: float = make_option(600.0, "seconds that a rank waits for others", 1, 1e9)

    def __post_init__(self) -> None:
        for each in fields(self):
            value, allowed = getattr(self, each.name), each.metadata["allowed"]
            if isinstance(each.default, str):
                valid, text = not allowed or value in allowed, f"one of {', '.join(allowed)}"
            else:
                low, high = (*allowed, 1e18)[:2]
                valid, text = low <= value <= high, f"from {low:g} to {high:g}"
            if not valid:
                raise JobError(f"{each.name}={value!r}: must be {text}")
        if not self.folder or not self.folder.isprintable():
            raise JobError(f"folder={self.folder!r}: must be a printable name")
        if self.hidden % (2 * self.heads):
            raise JobError(f"hidden={self.hidden}: must be a multiple of {2 * self.heads}")
        if self.tensor > 1 and (self.strategy == "ddp" or self.precision == "fp16"):
            text = f"strategy={self.strategy!r} and precision={self.precision!r}"
            raise JobError(f"tensor={self.tensor}: must be 1 with {text}")

    def check_world_size(self, world: int) -> None:
        """Raise JobError for options that `world` ranks, or this machine, cannot run."""
        if world % self.tensor or self.heads % self.tensor:
            text = f"must divide the number of ranks ({world}) and of heads ({self.heads})"
            raise JobError(f"tensor={self.tensor}: {text}")
        if self.batch % (replicas := world // self.tensor):
            raise JobError(f"batch={self.batch}: must be a multiple of {replicas} (replicas)")
        if self.compiler not in ("none", *(known := torch.compiler.list_backends(()))):
            raise JobError(f"compiler={self.compiler!r}: must be one of none, {', '.join(known)}")
        for part, sequences in zip(load_text(self), (self.batch, 1, 1), strict=True):
            if len(part) <= (needed := self.seq * sequences):
                text = f"each part must have more than {needed} bytes, but one has {len(part)}"
                raise JobError(f"source={self.source!r}: {text}")


# Your model: its `blocks` are compiled and gathered one by one. Shapes in names: B batch,
# S sequence, H hidden, A heads, D size of a head.


class Block(nn.Module):
    """A transformer block: causal attention and an FFN with GELU; pre-norm, with residuals."""

    def __init__(self, options: Options):
        super().__init__()
        hidden, self.size = options.hidden, options.hidden // options.heads
        self.attention_norm, self.ffn_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        self.out, self.dropout = nn.Linear(hidden, hidden), nn.Dropout(options.dropout)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Map [B, S, H] to [B, S, H]; with `tensor`, each rank computes its own heads."""
        y_BSH = self.attention_norm(x_BSH)
        q_BASD, k_BASD, v_BASD = (
            linear(y_BSH).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        y_BASD = F.scaled_dot_product_attention(q_BASD, k_BASD, v_BASD, is_causal=True)
        x_BSH = x_BSH + self.dropout(self.out(y_BASD.transpose(1, 2).flatten(-2)))
        return x_BSH + self.dropout(self.down(F.gelu(self.up(self.ffn_norm(x_BSH)))))


class GPT(nn.Module):
    """A small GPT that maps tokens to logits."""

    def __init__(self, options: Options):
        super().__init__()
        self.embedding = nn.Embedding(256, options.hidden)
        self.positions = nn.Embedding(options.seq, options.hidden)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.hidden)
        self.head = nn.Linear(options.hidden, 256, bias=False)
        for matrix in (p for p in self.parameters() if p.dim() == 2):
            nn.init.normal_(matrix, std=0.02)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Map token numbers [B, S] to logits [B, S, 256]."""
        x_BSH = self.embedding(tokens_BS) + self.positions.weight[: tokens_BS.shape[1]]
        for block in self.blocks:
            x_BSH = block(x_BSH)
        return self.head(self.norm(x_BSH))


# For --tensor: how each matrix is split, by the last part of its name.
STYLES = dict.fromkeys(("query", "key", "value", "up"), ColwiseParallel())
STYLES |= dict.fromkeys(("out", "down"), RowwiseParallel())


def compute_loss(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Return the summed cross-entropy of all tokens, in float32; targets of -100 are ignored."""
    return F.cross_entropy(logits_BSV.float().flatten(0, 1), targets_BS.flatten(), reduction="sum")


# Your data.


def load_text(options: Options) -> list[Tensor]:
    """Return the bytes for training, validation and test: 80, 10, 10 % of a readable source."""
    library = Path(sysconfig.get_paths()["stdlib"]).glob("[!_]*.py")
    files = sorted(library) if options.source == "stdlib" else [Path(options.source)]
    try:
        data = bytearray(b"".join(file.read_bytes() for file in files))
    except OSError as error:
        text = f"must be stdlib or a readable file ({error.strerror})"
        raise JobError(f"source={options.source!r}: {text}") from None
    tokens = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0)
    parts = tokens.tensor_split([len(tokens) * 8 // 10, len(tokens) * 9 // 10])
    return [part[: options.limit or None] for part in parts]


class Windows(Dataset):
    """A dataset whose item i is the i-th `seq` tokens and the same shifted by one, both [seq]."""

    def __init__(self, tokens: Tensor, seq: int):
        self.tokens, self.seq = tokens, seq

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.tokens[index * self.seq : (index + 1) * self.seq + 1].long()
        return window[:-1], window[1:]


# One model on many ranks.


def parallelize_model(model: nn.Module, options: Options, device: torch.device) -> nn.Module:
    """Distribute `model`, which every rank has on its host, over all ranks.

    ddp: replicated. fsdp2: weights, gradients and optimizer states are sharded; a block's weights
    are gathered for forward, and again for backward. zero2: weights are gathered once for both.
    zero1: as zero2, but gradients are reduced only in a step's last backward. With `tensor`,
    neighbouring ranks split the matrices first.
    """
    dtype = DTYPES[options.precision]
    for block in model.blocks if options.compiler != "none" else ():
        block.compile(backend=options.compiler)
    if options.strategy == "ddp":  # autocast around forward: for training and validation
        model.forward = torch.autocast(device.type, dtype, dtype != torch.float32)(model.forward)
        return DistributedDataParallel(model.to(device))
    grid = torch.arange(dist.get_world_size()).view(-1, options.tensor)  # [data, tensor]
    make, timeout = dist.new_subgroups_by_enumeration, timedelta(seconds=options.timeout)
    groups = [make(lists.tolist(), timeout=timeout)[0] for lists in (grid.T, grid)]
    mesh = DeviceMesh.from_group(groups, device.type, grid, mesh_dim_names=("data", "tensor"))
    if options.tensor > 1:
        names = {name: name.split(".")[-1] for name, _ in model.named_modules()}
        plan = {name: STYLES[last] for name, last in names.items() if last in STYLES}
        parallelize_module(model, mesh["tensor"], plan)
    policy = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32)
    reshard = options.strategy == "fsdp2"
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh["data"], mp_policy=policy, reshard_after_forward=reshard)
    return model


class Training(Stateful):
    """A model on its ranks, with the state of training. Every rank calls each method."""

    def __init__(self, options: Options, model: nn.Module, device: torch.device):
        self.options, self.model, self.device = options, model, device
        self.folder = Path(options.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.replica, self.replicas = self.rank // options.tensor, self.world // options.tensor
        # With `tensor`, parameters are on different meshes, which one foreach call cannot step.
        self.foreach = None if options.tensor == 1 else False
        # FLOP per token, both passes (Chowdhery et al. 2022, appendix B); adapt to your model.
        attention = 12 * options.layers * options.hidden * options.seq
        self.flops = 6 * sum(p.numel() for p in model.parameters()) + attention
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self.peak = options.peak or next((p for gpu, p in PEAK_FLOPS.items() if gpu in name), None)
        self.optimizer = torch.optim.AdamW(model.parameters(), options.lr, foreach=self.foreach)
        self.scaler = torch.amp.GradScaler(device.type, enabled=options.precision == "fp16")
        self.steps_done, self.best = 0, (math.inf, math.inf)  # best: validation loss and its step
        self.rng = torch.cuda if device.type == "cuda" else torch  # the generator of dropout
        self.last_log_time, self.last_log_step = time.perf_counter(), 0
        self.stop_requested = self.stopped = False  # this rank got a signal; any rank did

    def make_loader(self, windows: Windows) -> DataLoader:
        """Return a loader of this rank's share of the rest of an epoch, in the epoch's order."""
        size, seed = self.options.batch // self.replicas, self.options.seed
        epoch, done = divmod(self.steps_done, len(windows) // self.options.batch)
        sharding = {"num_replicas": self.replicas, "rank": self.replica, "drop_last": True}
        sampler = DistributedSampler(windows, seed=seed, **sharding)
        sampler.set_epoch(epoch)
        order = list(sampler)[done * size :]
        own = torch.Generator()  # loaders draw a number: not from dropout's generator
        kwargs = {"num_workers": self.options.workers, "worker_init_fn": ignore_signals}
        kwargs["pin_memory"] = self.device.type == "cuda"  # else the CPU waits for each copy
        return DataLoader(windows, size, sampler=order, drop_last=True, generator=own, **kwargs)

    def step(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Take an optimizer step on this rank's share of a batch; return batch loss and norm."""
        self.optimizer.zero_grad()
        tokens, targets = (t.to(self.device, non_blocking=True) for t in (tokens, targets))
        sums = torch.full((2,), float(self.stop_requested), device=self.device)
        sums[0] = (targets != -100).sum()
        dist.all_reduce(sums)  # [2]: counted tokens, ranks with a signal
        on_host = sums.to("cpu", non_blocking=True)
        copied = torch.cuda.current_stream().record_event() if self.device.type == "cuda" else None
        loss = self.backward(tokens, targets, sums[0]) / self.world
        self.scaler.unscale_(self.optimizer)
        norm = self.clip_gradients()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        dist.all_reduce(loss)  # a scalar: the mean over all ranks
        self.steps_done += 1
        if copied:
            copied.synchronize()  # waits until the GPU begins this step, which is queued by now
        self.stopped = bool(on_host[1])
        return loss, norm

    def backward(self, tokens: Tensor, targets: Tensor, counted: Tensor) -> Tensor:
        """Run backward for this rank's loss, `micro` sequences at a time; return the loss.

        Averaged over ranks, the losses are the mean over all `counted` tokens, even for unequal
        shares. ddp and zero1 reduce gradients in the last backward only; zero2 and fsdp2 keep no
        unsharded gradients, so each backward reduces.
        """
        micro, total = self.options.micro, torch.zeros((), device=self.device)
        micro_batches = list(zip(tokens.split(micro), targets.split(micro), strict=True))
        for number, (inputs, labels) in enumerate(micro_batches, 1):
            last = number == len(micro_batches)
            if self.options.strategy == "zero1":
                self.model.set_requires_gradient_sync(last)
            no_sync = self.options.strategy == "ddp" and not last
            with self.model.no_sync() if no_sync else nullcontext():
                loss = compute_loss(self.model(inputs), labels) * self.world / counted
                self.scaler.scale(loss).backward()
            total += loss.detach()
        return total

    def clip_gradients(self) -> Tensor:
        """Scale the gradient to a norm of at most `clip`; return its norm before."""
        by_mesh: dict[Any, list[Tensor]] = {}
        for gradient in (p.grad for p in self.model.parameters() if p.grad is not None):
            by_mesh.setdefault(getattr(gradient, "device_mesh", None), []).append(gradient)
        norms = [nn.utils.get_total_norm(gradients) for gradients in by_mesh.values()]
        norm = torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]).norm()
        limit = self.options.clip
        nn.utils.clip_grads_with_norm_(self.model.parameters(), limit, norm, self.foreach)
        return norm

    @torch.no_grad()
    def evaluate(self, windows: Windows, size: int = 64) -> float:
        """Return the mean loss per token over all `windows`, each of which counts once."""
        self.model.eval()
        total = torch.zeros(2, device=self.device)  # summed losses, tokens
        sampler = DistributedSampler(windows, self.replicas, self.replica, shuffle=False)
        loader = DataLoader(windows, size, sampler=sampler, generator=torch.Generator())
        for number, (tokens, targets) in enumerate(loader):
            indices = (number * size + torch.arange(len(targets))) * self.replicas + self.replica
            targets[indices >= len(windows)] = -100  # padding of the sampler: ignored
            loss = compute_loss(self.model(tokens.to(self.device)), targets.to(self.device))
            total += torch.stack([loss, (targets >= 0).sum().to(loss)])
        dist.all_reduce(total)  # [2]
        self.model.train()
        return (total[0] / total[1]).item()

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save, by the plain model's names. DCP calls this."""
        model, optimizer = dcp_state.get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer, "scaler": self.scaler.state_dict()}
        state["position"] = [self.steps_done, *self.best]
        return state | {f"random, {self.rank} of {self.world}": self.rng.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state. DCP calls this."""
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        dcp_state.set_state_dict(self.model, self.optimizer, **parts)
        self.scaler.load_state_dict(state["scaler"])
        self.steps_done, *best = state["position"]
        self.best = tuple(best)
        self.rng.set_rng_state(state[f"random, {self.rank} of {self.world}"])

    def save(self) -> None:
        """Write a checkpoint, each rank its part; a rename completes it; delete old ones."""
        path, partial = (self.folder / f"{dot}step-{self.steps_done:06d}" for dot in ("", "."))
        dcp.save({"state": self}, checkpoint_id=partial)
        own = {file.name: compute_sha256(file) for file in partial.glob(f"__{self.rank}_*")}
        lines = [f"{sha}  {n}\n" for sums in all_gather_object(own) for n, sha in sums.items()]
        if self.rank == 0:
            lines.append(f"{compute_sha256(partial / '.metadata')}  .metadata\n")
            (partial / "SHA256SUMS").write_text("".join(lines))
            partial.rename(path)
            for old in list_checkpoints(self.folder):
                if old.name not in (path.name, f"step-{self.best[1]:06}"):
                    shutil.rmtree(old)
        dist.barrier()

    def load(self, path: Path) -> None:
        """Resume from a checkpoint of any number of ranks; raise JobError if it is unusable."""
        try:
            sums = [line.split() for line in (path / "SHA256SUMS").read_text().splitlines()]
            own = sums[self.rank :: self.world]  # each rank reads some files
            wrong = [name for saved, name in own if compute_sha256(path / name) != saved]
            wrong += ["SHA256SUMS"] * (sums[-1][1] != ".metadata")  # truncated
        except (OSError, ValueError, IndexError) as error:
            wrong = [str(error)]
        text = f"{path} is not a complete checkpoint; remove it to resume from an older one"
        raise_on_all_ranks(f"{text}: {wrong[0]}" if wrong else None)
        own = {f"state.model.{name}" for name in dcp_state.get_model_state_dict(self.model)}
        saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        differing = own ^ {name for name in saved if name.startswith("state.model.")}
        raise_on_all_ranks(f"{path} is of another model: {min(differing)}" if differing else None)
        # Random states may be missing with more ranks; the scaler's, in another precision.
        planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
        try:
            dcp.load({"state": self}, checkpoint_id=path, planner=planner)
        except dcp.CheckpointException as error:
            first, _ = next(iter(error.failures.values()))
            raise JobError(f"{path} does not match this run: {first}") from None

    def log_metrics(self, loss: Tensor, norm: Tensor) -> None:
        """Write metrics of the steps since the last line, averaged over them."""
        kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        cuda = self.device.type == "cuda"
        own = torch.cuda.max_memory_allocated(self.device) if cuda else 1024 * kilobytes
        peak = torch.tensor(own, device=self.device)
        dist.all_reduce(peak, dist.ReduceOp.MAX)  # a scalar
        memory = int(peak)  # waits for the GPU, so the clock is read after its work
        steps, now = max(1, self.steps_done - self.last_log_step), time.perf_counter()
        seconds = (now - self.last_log_time) / steps
        line = {"loss": loss.item(), "norm": norm.item(), "scale": self.scaler.get_scale()}
        rate = self.options.batch * self.options.seq / seconds
        line |= {"seconds": seconds, "tokens_per_second": rate, "memory_bytes": memory}
        line["mfu"] = self.flops * rate / self.world / self.peak if self.peak else None
        self.write_metrics(time=time.time(), **line)
        if self.rank == 0 and sys.stderr.isatty():
            text = f"\rstep {self.steps_done}/{self.options.steps}, loss={line['loss']:.3f} "
            end = "\n" if self.steps_done == self.options.steps else ""
            print(text, end=end, file=sys.stderr, flush=True)

    def request_stop(self, *_: Any) -> None:
        """Record that this rank got a signal (signal handler)."""
        self.stop_requested = True

    def write_metrics(self, **values: float) -> None:
        """Write a line of metrics.jsonl on rank 0, and restart the clock for the next steps."""
        if self.rank == 0:
            with open(self.folder / "metrics.jsonl", "a") as file:
                print(json.dumps({"step": self.steps_done} | values), file=file)
            for name in {"validation", "test"} & values.keys():
                print(f"step {self.steps_done}: {name} {values[name]:.3f}")
        self.last_log_time, self.last_log_step = time.perf_counter(), self.steps_done


def main(options: Options, build: Callable[[Options], nn.Module] = GPT) -> list[float]:
    """Train on the ranks of the default group; return the loss of every step."""
    device, losses, steps = get_device(), [], options.steps
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} on {device}")
    torch.manual_seed(options.seed)
    training = Training(options, parallelize_model(build(options), options, device), device)
    torch.manual_seed(options.seed + 1 + training.replica)  # equal if ranks share data
    for number in STOP_SIGNALS:
        signal.signal(number, training.request_stop)
    train, validation, test = (Windows(part, options.seq) for part in load_text(options))

    def run_validation() -> None:
        loss = training.evaluate(validation)
        best = loss if loss < math.inf else math.inf  # a nan loss is never the best
        training.best = min(training.best, (best, training.steps_done))
        training.write_metrics(validation=loss)

    if found := list_checkpoints(training.folder):
        training.load(found[-1])
        if training.steps_done % options.every == 0 or training.steps_done == steps:
            run_validation()  # a checkpoint does not include this step's validation
    training.last_log_time, training.last_log_step = time.perf_counter(), training.steps_done
    while training.steps_done < steps:
        for tokens, targets in training.make_loader(train):
            loss, norm = training.step(tokens, targets)
            losses.append(loss)
            steps = training.steps_done if training.stopped else steps  # so this step is the last
            if training.steps_done % options.report == 0 or training.steps_done == steps:
                training.log_metrics(loss, norm)
            if training.steps_done % options.every == 0 or training.steps_done == steps:
                training.save()
                if not training.stopped:  # after a stop there is no time: the next start does it
                    run_validation()
            if training.steps_done == steps:
                break
    (training.folder / "stopped").unlink(missing_ok=True)
    if training.stopped:
        (training.folder / "stopped").touch()
    else:
        training.load(training.folder / f"step-{training.best[1]:06d}")
        training.write_metrics(test=training.evaluate(test))
    return [loss.item() for loss in losses]


# Helpers of a job.


def all_gather_object(value: Any) -> list[Any]:
    """Return the values of all ranks, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def raise_on_all_ranks(problem: str | None) -> None:
    """Raise JobError on every rank if any rank has a problem. Every rank calls this."""
    if found := [text for text in all_gather_object(problem) if text]:
        raise JobError(found[0])


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints, the newest last: sorted by number, not as text."""
    return sorted(folder.glob("step-*"), key=lambda path: (len(path.name), path.name))


def compute_sha256(file: Path) -> str:
    """Return the SHA-256 checksum of a file, as sha256sum prints it."""
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


@contextmanager
def lock_folder(options: Options) -> Iterator[None]:
    """Lock the folder for this job; raise JobError if that fails, or ranks see other folders."""
    folder, first, problem = Path(options.folder), dist.get_rank() == 0, None
    owner, file = f"process {os.getpid()} on {socket.gethostname()}", folder / ".lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(file, "a+") if first else None
        if lock:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released with the process
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
                    raise
                print(f"{folder}: this file system has no locks: use it in one job at a time")
            lock.truncate(0)
            print(owner, end="", file=lock, flush=True)
            for partial in folder.glob(".step-*"):  # of a save that was killed
                shutil.rmtree(partial)
    except BlockingIOError:
        problem = f"{file.read_text()} writes into it; use another folder"
    except OSError as error:
        problem = f"must be writable ({error.strerror})"
    raise_on_all_ranks(problem and f"folder={options.folder!r}: {problem}")
    saved = [path.name for path in list_checkpoints(folder)]
    # Rank 0 does not read the file: closing it would release its lock.
    content = owner if first else file.read_text() if file.exists() else "nothing"
    own = asdict(options) | {"folder": content, "saved": saved}
    for name, value in all_gather_object(own)[0].items():
        if own[name] != value:
            text = f"{name}: rank 0 has {value!r}, rank {dist.get_rank()} has {own[name]!r}"
            problem = f"{text}; all ranks must have the same options, and share the folder"
    if options.resume == "never" and saved:
        problem = f"folder={options.folder!r} has checkpoints; use resume='auto' or another folder"
    raise_on_all_ranks(problem)
    with lock or nullcontext():
        yield


def ignore_signals(_worker: int) -> None:
    """Ignore signals in a loader process: they are for the ranks, which need the last batch."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def get_device() -> torch.device:
    """Return this rank's GPU, or the CPU. If Slurm gives each task one GPU, that is number 0."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())


def read_launch_environment() -> tuple[int, int]:
    """Return this process's rank and the world size, set by torchrun or srun; else 0 and 1."""
    env = os.environ
    if "RANK" not in env and "SLURM_STEP_NUM_TASKS" in env:
        env["RANK"], env["LOCAL_RANK"] = env["SLURM_PROCID"], env["SLURM_LOCALID"]
        env["WORLD_SIZE"] = env["SLURM_STEP_NUM_TASKS"]
        nodes = ["scontrol", "show", "hostnames", env["SLURM_STEP_NODELIST"]]
        if "MASTER_ADDR" not in env:
            env["MASTER_ADDR"] = subprocess.check_output(nodes, text=True).split()[0]
        env.setdefault("MASTER_PORT", str(20_000 + int(env["SLURM_JOB_ID"]) % 20_000))
    rank, world = int(env.get("RANK", 0)), int(env.get("WORLD_SIZE", 1))
    env.setdefault("LOCAL_RANK", str(rank))
    return rank, world


class Parser(argparse.ArgumentParser):
    """A parser of the command line that raises JobError for errors."""

    def error(self, message: str) -> NoReturn:
        """Raise JobError instead of printing the usage on every rank."""
        raise JobError(message)


def parse_options(arguments: list[str] | None = None) -> Options:
    """Parse options from the command line; raise JobError for wrong ones."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = Parser(description=__doc__, formatter_class=formatter, allow_abbrev=False)
    for each in fields(Options):
        text = each.metadata["help"]
        if isinstance(each.default, str) and each.metadata["allowed"]:
            text += f": {', '.join(each.metadata['allowed'])}"
        kind = {"type": type(each.default), "default": each.default, "metavar": "…"}
        parser.add_argument(f"--{each.name}", help=f"{text} (default: {each.default})", **kind)
    return Options(**vars(parser.parse_args(arguments)))


@record  # records an error of any rank with its time: see torchrun's --log-dir
def run() -> None:
    """Train as the command line says, on the ranks that were started."""
    rank, world = read_launch_environment()
    single = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if world == 1 else {}
    gpu = {"device_id": get_device()} if torch.cuda.is_available() else {}
    try:
        options = parse_options()
        options.check_world_size(world)
        for device in gpu.values():
            torch.cuda.set_device(device)
        dist.init_process_group(timeout=timedelta(seconds=options.timeout), **single, **gpu)
        with lock_folder(options):
            main(options)
        dist.barrier()  # no rank closes its connections while another still needs them
    except JobError as error:
        if rank == 0:
            print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for worker in multiprocessing.active_children():  # they ignore signals, and exit waits
            worker.kill()
        # DDP's wrapper was freed with `main`: as a group's last owner it could wait for gloo's
        # threads while these wait for it.
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    run()
