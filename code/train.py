"""Train a model on text: on one GPU, on many GPUs, on many nodes. The losses are the same.

    python train.py --source book.txt --folder runs/a
    torchrun --nproc-per-node=4 train.py --folder runs/a --strategy fsdp2 --precision bf16
    srun python train.py --folder runs/a          # on the ranks that Slurm has started

This file needs only PyTorch (2.11 or later): copy it, and replace `GPT` by your model, and `text`
and `Windows` by your data. It resumes from the folder's last checkpoint, on any number of ranks
that divides the batch. At SIGTERM or SIGUSR1 all ranks finish a step, save and exit; a file
`stopped` in the folder then says that steps remain. A refusal ends all ranks with a line, status 2.
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
import torch.distributed.checkpoint.state_dict as by_name
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
SIGNALS = signal.SIGTERM, signal.SIGUSR1  # stop after a step, and save
# Peak 16-bit matrix FLOP/s from data sheets, without sparsity.
PEAKS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Refused(ValueError):
    """An error that ends a job, raised on all ranks; a single line reports it for all."""


def option(default: Any, words: str, *allowed: Any) -> Any:
    """Make a field of `Options`: a number in a range or above a bound, or one of some words."""
    return field(default=default, metadata={"words": words, "allowed": allowed})


@dataclass
class Options:
    """The options of a run. Raises Refused for values that are not allowed."""

    folder: str = option("run", "where checkpoints and metrics go")
    source: str = option("stdlib", "text: a file, or the sources of Python's own library")
    limit: int = option(0, "bytes to use of each part: train, validation, test; 0: all", 0)
    seq: int = option(64, "tokens of a sequence; a byte is a token", 1)
    layers: int = option(2, "blocks of the model", 1)
    heads: int = option(2, "attention heads of a block", 1)
    hidden: int = option(64, "width of the model", 1)
    dropout: float = option(0.0, "share of activations that are dropped", 0, 0.99)
    steps: int = option(400, "optimizer steps in all, those before a stop included", 1)
    batch: int = option(16, "sequences of a step, over all ranks", 1)
    micro: int = option(16, "sequences of one backward of one rank", 1)
    lr: float = option(1e-3, "AdamW's learning rate", 0)
    clip: float = option(1.0, "largest norm of the gradient", 0, math.inf)
    seed: int = option(0, "of weights and order; for dropout, ranks draw their own", 0)
    strategy: str = option("ddp", "who holds what", *STRATEGIES)
    tensor: int = option(1, "neighbouring ranks that cut each matrix between them; not with ddp", 1)
    precision: str = option("float32", "of products in forward", *DTYPES)
    compiler: str = option("none", "torch.compile's backend for the blocks, as inductor")
    workers: int = option(0, "processes of each rank that load data", 0, 1000)
    every: int = option(100, "steps from one validation and checkpoint to the next", 1)
    report: int = option(10, "steps from one line of metrics.jsonl to the next", 1)
    resume: str = option("auto", "whether to go on from the folder's checkpoint", "auto", "never")
    peak: float = option(0.0, "FLOP/s of a device, to count MFU by; 0: its data sheet's", 0)
    timeout: float = option(600.0, "seconds that a rank waits for another one", 1, 1e9)

    def __post_init__(self) -> None:
        for each in fields(self):
            value, allowed = getattr(self, each.name), each.metadata["allowed"]
            if isinstance(each.default, str):
                good, said = not allowed or value in allowed, ", ".join(allowed)
            else:
                least, most = (*allowed, 1e18)[:2]
                good, said = least <= value <= most, f"numbers from {least:g} to {most:g}"
            if not good:
                raise Refused(f"{each.name}={value!r}: allowed are {said}")
        if not self.folder or not self.folder.isprintable():
            raise Refused(f"folder={self.folder!r}: allowed are names that can be printed")
        if self.hidden % (2 * self.heads):
            raise Refused(f"hidden={self.hidden}: allowed are multiples of {2 * self.heads}")
        if self.tensor > 1 and (self.strategy == "ddp" or self.precision == "fp16"):
            have = f"strategy={self.strategy!r} and precision={self.precision!r}"
            raise Refused(f"tensor={self.tensor} with {have}: allowed is 1")

    def check(self, world: int) -> None:
        """Raise ValueError for options that `world` ranks, or this machine, cannot run."""
        if world % self.tensor or self.heads % self.tensor:
            allowed = f"divisors of {world} ranks and of {self.heads} heads"
            raise Refused(f"tensor={self.tensor}: allowed are {allowed}")
        if self.batch % (replicas := world // self.tensor):
            raise Refused(f"batch={self.batch}: allowed are multiples of {replicas}")
        if self.compiler not in ("none", *(known := torch.compiler.list_backends(()))):
            raise Refused(f"compiler={self.compiler!r}: allowed are none, {', '.join(known)}")
        for part, sequences in zip(text(self), (self.batch, 1, 1), strict=True):
            if len(part) <= (needed := self.seq * sequences):
                found = f"source={self.source!r} has a part of {len(part)} bytes"
                raise Refused(f"{found}: allowed are more than {needed}")


# Your model: its `blocks` are compiled and gathered one by one. Shapes in names: B batch,
# S sequence, H hidden, A heads, D size of a head.


class Block(nn.Module):
    """Causal attention, and two matrices with GELU; each after a norm, with a residual."""

    def __init__(self, options: Options):
        super().__init__()
        hidden, self.size = options.hidden, options.hidden // options.heads
        self.attention_norm, self.ffn_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        self.out, self.dropout = nn.Linear(hidden, hidden), nn.Dropout(options.dropout)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Map [B, S, H] to [B, S, H]; a rank with some of the heads computes those."""
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


# For --tensor, by the last part of their names: column-parallel and row-parallel matrices.
CUTS = dict.fromkeys(("query", "key", "value", "up"), ColwiseParallel())
CUTS |= dict.fromkeys(("out", "down"), RowwiseParallel())


def loss_of(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Return the summed cross-entropy of all tokens, in float32; targets of -100 are ignored."""
    return F.cross_entropy(logits_BSV.float().flatten(0, 1), targets_BS.flatten(), reduction="sum")


# Your data.


def text(options: Options) -> list[Tensor]:
    """Return the bytes for training, validation and test: 80, 10, 10 % of a readable source."""
    library = Path(sysconfig.get_paths()["stdlib"]).glob("[!_]*.py")
    files = sorted(library) if options.source == "stdlib" else [Path(options.source)]
    try:
        data = bytearray(b"".join(file.read_bytes() for file in files))
    except OSError as error:
        allowed = f"allowed are stdlib and files that can be read ({error.strerror})"
        raise Refused(f"source={options.source!r}: {allowed}") from None
    tokens = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0)
    parts = tokens.tensor_split([len(tokens) * 8 // 10, len(tokens) * 9 // 10])
    return [part[: options.limit or None] for part in parts]


class Windows(Dataset):
    """A dataset; item i: a text's i-th `seq` tokens, and the same one token later, both [seq]."""

    def __init__(self, tokens: Tensor, seq: int):
        self.tokens, self.seq = tokens, seq

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.tokens[index * self.seq : (index + 1) * self.seq + 1].long()
        return window[:-1], window[1:]


# One model on many ranks.


def spread(model: nn.Module, options: Options, device: torch.device) -> nn.Module:
    """Distribute `model`, which every rank has on its host, over all ranks.

    ddp: whole on each rank. fsdp2: weights, gradients and optimizer states in shards; a block's
    weights are gathered for forward, and again for backward. zero2: once for both. zero1: also
    gradients stay whole until a step's last backward. Before that, `tensor` neighbours cut the
    matrices.
    """
    dtype = DTYPES[options.precision]
    for block in model.blocks if options.compiler != "none" else ():
        block.compile(backend=options.compiler)
    if options.strategy == "ddp":  # autocast around forward: for training and validation
        model.forward = torch.autocast(device.type, dtype, dtype != torch.float32)(model.forward)
        return DistributedDataParallel(model.to(device))
    places = torch.arange(dist.get_world_size()).view(-1, options.tensor)  # [data, tensor]
    new, limit = dist.new_subgroups_by_enumeration, timedelta(seconds=options.timeout)
    groups = [new(lists.tolist(), timeout=limit)[0] for lists in (places.T, places)]
    mesh = DeviceMesh.from_group(groups, device.type, places, mesh_dim_names=("data", "tensor"))
    if options.tensor > 1:
        found = {name: name.split(".")[-1] for name, _ in model.named_modules()}
        plan = {name: CUTS[last] for name, last in found.items() if last in CUTS}
        parallelize_module(model, mesh["tensor"], plan)
    policy = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32)
    again = options.strategy == "fsdp2"
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh["data"], mp_policy=policy, reshard_after_forward=again)
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
        self.peak = options.peak or next((p for gpu, p in PEAKS.items() if gpu in name), None)
        self.optimizer = torch.optim.AdamW(model.parameters(), options.lr, foreach=self.foreach)
        self.scaler = torch.amp.GradScaler(device.type, enabled=options.precision == "fp16")
        self.done, self.best = 0, (math.inf, math.inf)  # steps; lowest validation loss and its step
        self.random = torch.cuda if device.type == "cuda" else torch  # the generator of dropout
        self.then, self.since = time.perf_counter(), 0  # time and step of the last line in the log
        self.asked = self.stopped = False  # this rank got a signal; any rank did

    def batches(self, windows: Windows) -> DataLoader:
        """Yield this rank's share of the rest of an epoch; each epoch has its own order."""
        size, seed = self.options.batch // self.replicas, self.options.seed
        epoch, done = divmod(self.done, len(windows) // self.options.batch)
        sharding = {"num_replicas": self.replicas, "rank": self.replica, "drop_last": True}
        sampler = DistributedSampler(windows, seed=seed, **sharding)
        sampler.set_epoch(epoch)
        order = list(sampler)[done * size :]
        own = torch.Generator()  # loaders draw a number: not from dropout's generator
        how = {"num_workers": self.options.workers, "worker_init_fn": ignore_signals}
        how["pin_memory"] = self.device.type == "cuda"  # else the CPU waits for each copy
        return DataLoader(windows, size, sampler=order, drop_last=True, generator=own, **how)

    def step(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Take an optimizer step on this rank's share of a batch; return batch loss and norm."""
        self.optimizer.zero_grad()
        tokens, targets = (t.to(self.device, non_blocking=True) for t in (tokens, targets))
        sums = torch.full((2,), float(self.asked), device=self.device)
        sums[0] = (targets != -100).sum()
        dist.all_reduce(sums)  # [2]: tokens that count, ranks with a signal
        on_host = sums.to("cpu", non_blocking=True)
        copied = torch.cuda.current_stream().record_event() if self.device.type == "cuda" else None
        loss = self.backward(tokens, targets, sums[0]) / self.world
        self.scaler.unscale_(self.optimizer)
        norm = self.clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        dist.all_reduce(loss)  # a scalar: the mean over all ranks
        self.done += 1
        if copied:
            copied.synchronize()  # waits until the GPU begins this step, which is queued by now
        self.stopped = bool(on_host[1])
        return loss, norm

    def backward(self, tokens: Tensor, targets: Tensor, counted: Tensor) -> Tensor:
        """Run backward for this rank's loss, `micro` sequences at a time; return that loss.

        Its average over ranks is the mean over all `counted` tokens, even for unequal shares. ddp
        and zero1 send gradients with the last micro-batch; the others keep no whole ones, so each
        backward sends.
        """
        micro, total = self.options.micro, torch.zeros((), device=self.device)
        pieces = list(zip(tokens.split(micro), targets.split(micro), strict=True))
        for number, (part, its_targets) in enumerate(pieces, 1):
            last = number == len(pieces)
            if self.options.strategy == "zero1":
                self.model.set_requires_gradient_sync(last)
            waits = self.options.strategy == "ddp" and not last
            with self.model.no_sync() if waits else nullcontext():
                loss = loss_of(self.model(part), its_targets) * self.world / counted
                self.scaler.scale(loss).backward()
            total += loss.detach()
        return total

    def clip(self) -> Tensor:
        """Scale the whole gradient to a norm of at most `clip`; return the norm before."""
        on: dict[Any, list[Tensor]] = {}  # by mesh
        for gradient in (p.grad for p in self.model.parameters() if p.grad is not None):
            on.setdefault(getattr(gradient, "device_mesh", None), []).append(gradient)
        norms = [nn.utils.get_total_norm(gradients) for gradients in on.values()]
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
            places = (number * size + torch.arange(len(targets))) * self.replicas + self.replica
            targets[places >= len(windows)] = -100  # repeated to fill up: ignored
            loss = loss_of(self.model(tokens.to(self.device)), targets.to(self.device))
            total += torch.stack([loss, (targets >= 0).sum().to(loss)])
        dist.all_reduce(total)  # [2]
        self.model.train()
        return (total[0] / total[1]).item()

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save, by the plain model's names. DCP calls this."""
        model, optimizer = by_name.get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer, "scaler": self.scaler.state_dict()}
        state["position"] = [self.done, *self.best]
        return state | {f"random, {self.rank} of {self.world}": self.random.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state. DCP calls this."""
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        by_name.set_state_dict(self.model, self.optimizer, **parts)
        self.scaler.load_state_dict(state["scaler"])
        self.done, *best = state["position"]
        self.best = tuple(best)
        self.random.set_rng_state(state[f"random, {self.rank} of {self.world}"])

    def save(self) -> None:
        """Write a checkpoint, each rank its part; a rename completes it; delete old ones."""
        path, under_way = (self.folder / f"{dot}step-{self.done:06d}" for dot in ("", "."))
        dcp.save({"state": self}, checkpoint_id=under_way)
        sums = {file.name: checksum(file) for file in under_way.glob(f"__{self.rank}_*")}
        lines = [f"{known}  {name}\n" for own in of_all(sums) for name, known in own.items()]
        if self.rank == 0:
            lines.append(f"{checksum(under_way / '.metadata')}  .metadata\n")
            (under_way / "SHA256SUMS").write_text("".join(lines))
            under_way.rename(path)
            for old in checkpoints(self.folder):
                if old.name not in (path.name, f"step-{self.best[1]:06}"):
                    shutil.rmtree(old)
        dist.barrier()

    def load(self, path: Path) -> None:
        """Resume from a checkpoint of any number of ranks, if it is complete and of this model."""
        try:
            noted = [line.split() for line in (path / "SHA256SUMS").read_text().splitlines()]
            own = noted[self.rank :: self.world]  # each rank reads some files
            wrong = [name for known, name in own if checksum(path / name) != known]
            wrong += ["SHA256SUMS"] * (noted[-1][1] != ".metadata")  # as if it were cut short
        except (OSError, ValueError, IndexError) as error:
            wrong = [str(error)]
        what = f"{path} is no whole checkpoint; remove it to go on from an older one"
        agree(f"{what}: {wrong[0]}" if wrong else None)
        here = {f"state.model.{name}" for name in by_name.get_model_state_dict(self.model)}
        there = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        alone = here ^ {name for name in there if name.startswith("state.model.")}
        agree(f"{path} is of another model: {min(alone)}" if alone else None)
        # Random states may be missing with more ranks; the scaler's, in another precision.
        planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
        try:
            dcp.load({"state": self}, checkpoint_id=path, planner=planner)
        except dcp.CheckpointException as error:
            first, _ = next(iter(error.failures.values()))
            raise Refused(f"{path} does not fit: {first}") from None

    def report(self, loss: Tensor, norm: Tensor) -> None:
        """Log the steps since the last line."""
        kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        cuda = self.device.type == "cuda"
        held = torch.cuda.max_memory_allocated(self.device) if cuda else 1024 * kilobytes
        most = torch.tensor(held, device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)  # a scalar
        memory = int(most)  # waits for the GPU, so the clock is read after its work
        seconds = (time.perf_counter() - self.then) / max(1, self.done - self.since)
        line = {"loss": loss.item(), "norm": norm.item(), "scale": self.scaler.get_scale()}
        rate = self.options.batch * self.options.seq / seconds
        line |= {"seconds": seconds, "tokens_per_second": rate, "memory_bytes": memory}
        line["mfu"] = self.flops * rate / self.world / self.peak if self.peak else None
        self.note(time=time.time(), **line)
        if self.rank == 0 and sys.stderr.isatty():
            said = f"\rstep {self.done}/{self.options.steps}, loss={line['loss']:.3f} "
            print(said, end="\n" * (self.done == self.options.steps), file=sys.stderr, flush=True)

    def ask_to_stop(self, *_: Any) -> None:
        """Handle a signal, on whichever ranks it arrives."""
        self.asked = True

    def note(self, **values: float) -> None:
        """Write a line of metrics.jsonl on rank 0, and restart the clock for the next steps."""
        if self.rank == 0:
            with open(self.folder / "metrics.jsonl", "a") as file:
                print(json.dumps({"step": self.done} | values), file=file)
            for name in {"validation", "test"} & values.keys():
                print(f"step {self.done}: {name} {values[name]:.3f}")
        self.then, self.since = time.perf_counter(), self.done


def main(options: Options, build: Callable[[Options], nn.Module] = GPT) -> list[float]:
    """Train on the ranks of the default group; return the loss of every step."""
    device, losses, steps = own_device(), [], options.steps
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} on {device}")
    torch.manual_seed(options.seed)
    training = Training(options, spread(build(options), options, device), device)
    torch.manual_seed(options.seed + 1 + training.replica)  # equal if ranks share data
    for number in SIGNALS:
        signal.signal(number, training.ask_to_stop)
    train, validation, test = (Windows(part, options.seq) for part in text(options))

    def validate() -> None:  # a nan loss is never the best
        mean = training.evaluate(validation)
        training.best = min(training.best, (mean if mean < math.inf else math.inf, training.done))
        training.note(validation=mean)

    if found := checkpoints(training.folder):
        training.load(found[-1])
        if training.done % options.every == 0 or training.done == steps:
            validate()  # a checkpoint does not include this step's validation
    training.then, training.since = time.perf_counter(), training.done
    while training.done < steps:
        for tokens, targets in training.batches(train):
            loss, norm = training.step(tokens, targets)
            losses.append(loss)
            steps = training.done if training.stopped else steps  # so this step is the last
            if training.done % options.report == 0 or training.done == steps:
                training.report(loss, norm)
            if training.done % options.every == 0 or training.done == steps:
                training.save()
                if not training.stopped:  # after a stop there is no time: the next start does it
                    validate()
            if training.done == steps:
                break
    (training.folder / "stopped").unlink(missing_ok=True)
    if training.stopped:
        (training.folder / "stopped").touch()
    else:
        training.load(training.folder / f"step-{training.best[1]:06d}")
        training.note(test=training.evaluate(test))
    return [loss.item() for loss in losses]


# Helpers of a job.


def of_all(value: Any) -> list[Any]:
    """Return the values of all ranks, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def agree(problem: str | None) -> None:
    """Raise Refused on every rank if any rank has a problem. Every rank calls this."""
    if found := [said for said in of_all(problem) if said]:
        raise Refused(found[0])


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints, the newest last: sorted by number, not as text."""
    return sorted(folder.glob("step-*"), key=lambda path: (len(path.name), path.name))


def checksum(file: Path) -> str:
    """Return the SHA-256 checksum of a file, as sha256sum prints it."""
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


@contextmanager
def entered(options: Options) -> Iterator[None]:
    """Lock the folder for this job, the same one on all ranks; else raise Refused."""
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
                print(f"{folder}: there are no locks here: let no other job write into it")
            lock.truncate(0)
            print(owner, end="", file=lock, flush=True)
            for left in folder.glob(".step-*"):  # of a save that was killed
                shutil.rmtree(left)
    except BlockingIOError:
        problem = f"{file.read_text()} writes into it; allowed is a folder of its own"
    except OSError as error:
        problem = f"allowed are folders that can be written ({error.strerror})"
    agree(problem and f"folder={options.folder!r}: {problem}")
    saved = [path.name for path in checkpoints(folder)]
    # Rank 0 does not read the file: closing it would release its lock.
    there = owner if first else file.read_text() if file.exists() else "nothing"
    mine = asdict(options) | {"folder": there, "saved": saved}
    for name, value in of_all(mine)[0].items():
        if mine[name] != value:
            said = f"{name}: rank 0 has {value!r}, rank {dist.get_rank()} has {mine[name]!r}"
            problem = f"{said}; allowed are the same options, and one folder that all ranks share"
    if options.resume == "never" and saved:
        problem = f"folder={options.folder!r} has checkpoints: allowed is resume='auto'"
    agree(problem)
    with lock or nullcontext():
        yield


def ignore_signals(_worker: int) -> None:
    """Ignore signals in a loader process: they are for the ranks, which need the last batch."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def own_device() -> torch.device:
    """Return this rank's GPU, or the CPU. If Slurm gives each task one GPU, that is number 0."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())


def launched() -> tuple[int, int]:
    """Return this process's rank and the world size, set by torchrun or srun; else 0 and 1."""
    told = os.environ
    if "RANK" not in told and "SLURM_STEP_NUM_TASKS" in told:
        told["RANK"], told["LOCAL_RANK"] = told["SLURM_PROCID"], told["SLURM_LOCALID"]
        told["WORLD_SIZE"] = told["SLURM_STEP_NUM_TASKS"]
        nodes = ["scontrol", "show", "hostnames", told["SLURM_STEP_NODELIST"]]
        if "MASTER_ADDR" not in told:
            told["MASTER_ADDR"] = subprocess.check_output(nodes, text=True).split()[0]
        told.setdefault("MASTER_PORT", str(20_000 + int(told["SLURM_JOB_ID"]) % 20_000))
    rank, world = int(told.get("RANK", 0)), int(told.get("WORLD_SIZE", 1))
    told.setdefault("LOCAL_RANK", str(rank))
    return rank, world


class Parser(argparse.ArgumentParser):
    """A parser of the command line that raises Refused for errors."""

    def error(self, message: str) -> NoReturn:
        """Raise Refused instead of printing the usage on every rank."""
        raise Refused(message)


def parse(arguments: list[str] | None = None) -> Options:
    """Parse options from the command line. Raises Refused for values that are not allowed."""
    how = argparse.RawDescriptionHelpFormatter
    parser = Parser(description=__doc__, formatter_class=how, allow_abbrev=False)
    for each in fields(Options):
        words = each.metadata["words"]
        if isinstance(each.default, str) and each.metadata["allowed"]:
            words += f": {', '.join(each.metadata['allowed'])}"
        kind = {"type": type(each.default), "default": each.default, "metavar": "…"}
        parser.add_argument(f"--{each.name}", help=f"{words} [{each.default}]", **kind)
    return Options(**vars(parser.parse_args(arguments)))


@record  # records an error of any rank with its time: see torchrun's --log-dir
def run() -> None:
    """Train as the command line says, on the ranks that were started."""
    rank, world = launched()
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if world == 1 else {}
    gpu = {"device_id": own_device()} if torch.cuda.is_available() else {}
    try:
        options = parse()
        options.check(world)
        for device in gpu.values():
            torch.cuda.set_device(device)
        dist.init_process_group(timeout=timedelta(seconds=options.timeout), **alone, **gpu)
        with entered(options):
            main(options)
        dist.barrier()  # no rank closes its connections while another still needs them
    except Refused as error:
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
