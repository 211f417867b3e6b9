"""Train a GPT on text: on one GPU, on many, on many nodes. The losses are the same.

    python train.py --folder runs/a
    torchrun --nproc-per-node=4 train.py --folder runs/a --strategy fsdp2 --precision bf16
    srun python train.py --folder runs/a          # on the ranks that Slurm has started

It goes on from the folder's last checkpoint. At SIGTERM or SIGUSR1 all ranks finish a step, save
and end; then a file `stopped` in the folder says that there is more to do.
"""

import itertools
import math
import shutil
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import DataLoader, DistributedSampler

from shardlab.model import GPT, PRESETS, loss
from shardlab.text import Windows, parts
from shardlab.train import job, options, saved
from shardlab.train.saved import Complete, checkpoints
from shardlab.train.spread import Spread


def main(
    preset="nano",
    source="stdlib",
    steps=400,
    batch=16,
    micro=16,
    lr=1e-3,
    clip=1.0,
    seed=0,
    dropout=0.0,
    limit=None,
    every=100,
    report=10,
    sample=80,
    precision="float32",
    compiler=None,
    strategy="ddp",
    tensor=1,
    workers=0,
    peak=None,
    folder="run",
):
    """Train for `steps` steps of `batch` sequences; return the loss of every step."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rank, world = dist.get_rank(), dist.get_world_size()
    device, stop = job.device(), job.Stop()
    print(f"rank {rank} of {world} on {device}")
    say = print if rank == 0 else lambda *_: None

    torch.manual_seed(seed)
    config = replace(PRESETS[preset], dropout=dropout)
    spread = Spread(GPT(config).to(device), strategy, tensor, precision, compiler)
    model, rank, world = spread.model, spread.share, spread.shares  # of the data
    torch.manual_seed(seed + 1 + rank)  # ranks that share data drop out the same
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    state = State(spread, optimizer, scaler)
    if checkpoints(folder):
        load(state, checkpoints(folder)[-1])
    done, best, losses = state.done, state.best, []

    texts = parts(source)
    train, validation, test = (Windows(config.seq, part[:limit]) for part in texts)
    sampler = Order(train, world, rank, seed=seed, drop_last=True)
    own = torch.Generator()  # a new iterator draws a number: not from what dropout draws from
    how = {"num_workers": workers, "persistent_workers": workers > 0, "drop_last": True}
    how["worker_init_fn"] = job.ignore_signals
    loader = DataLoader(train, batch // world, sampler=sampler, generator=own, **how)

    say(generate(model, sample))
    meter = job.Meter(folder, config, steps, batch, done, device, peak)
    while done < steps:
        sampler.set_epoch(done // len(loader))  # another order in every epoch
        sampler.start = done % len(loader) * (batch // world)
        for tokens, targets in loader:
            tokens, targets = tokens.to(device), targets.to(device)
            optimizer.zero_grad()
            value = backward(spread, model, tokens, targets, micro, scaler)
            scaler.unscale_(optimizer)
            norm = spread.clip(clip)
            scaler.step(optimizer)
            scaler.update()
            losses.append(averaged(value.detach()))
            done += 1
            if done % report == 0 or done == steps:
                meter.write(done, loss=losses[-1], norm=norm, scale=scaler.get_scale())
                if stop.on_any_rank(device):
                    steps = done  # so this one is the last
            if done % every == 0 or done == steps:
                mean = evaluate(model, validation, rank, world)
                perplexity = torch.tensor(mean).exp()  # math.exp raises where this is inf
                words = f"step {done}: validation {mean:.3f}, perplexity {perplexity:.2f}"
                say(words)
                best = min(best, (mean if mean < math.inf else math.inf, done))  # nan is no best
                state.done, state.best = done, best
                save(state, folder)
                meter.note(step=done, validation=mean)
                meter.restart()
            if done == steps:
                break

    (folder / "stopped").unlink(missing_ok=True)
    if stop.agreed:
        meter.close()
        (folder / "stopped").touch()
        return [value.item() for value in losses]
    say(generate(model, sample))
    load(state, folder / step_name(best[1]))
    mean = evaluate(model, test, rank, world)
    meter.note(step=best[1], test=mean)
    meter.close()
    say(f"test, of step {best[1]}: perplexity {torch.tensor(mean).exp():.2f}")
    return [value.item() for value in losses]


def averaged(value):
    """The mean of a number over all ranks."""
    value = value / dist.get_world_size()
    dist.all_reduce(value)  # a scalar
    return value


def backward(
    spread,
    model,
    tokens,
    targets,
    micro,
    scaler,
):
    """Backward for the mean loss, `micro` sequences at a time; return that loss."""
    pieces = list(zip(tokens.split(micro), targets.split(micro), strict=True))
    total = torch.zeros((), device=tokens.device)
    for number, (part, its_targets) in enumerate(pieces, 1):
        with spread.sync_if(number == len(pieces)):
            value = loss(model(part), its_targets) * len(part) / len(tokens)
            scaler.scale(value).backward()
        total += value.detach()
    return total


@torch.no_grad()
def evaluate(
    model,
    windows,
    rank,
    world,
    size=64,
):
    """The mean loss of a token, over all `windows`."""
    model.eval()
    device = next(model.parameters()).device
    total = torch.zeros(2, device=device)  # summed losses, tokens
    sampler = DistributedSampler(windows, world, rank, shuffle=False)
    loader = DataLoader(windows, size, sampler=sampler, generator=torch.Generator())
    for number, (tokens, targets) in enumerate(loader):
        positions = (number * size + torch.arange(len(targets))) * world + rank
        targets[positions >= len(windows)] = -100  # repeated to fill up: counted as nothing
        value = loss(model(tokens.to(device)), targets.to(device), "sum")
        total += torch.stack([value, (targets >= 0).sum().to(value)])
    dist.all_reduce(total)  # [2]
    model.train()
    return (total[0] / total[1]).item()


@torch.no_grad()
def generate(model, length, start="def ", seed=0):
    """`start` and `length` more bytes, each drawn from what the model expects there."""
    draw = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    tokens = torch.tensor([list(start.encode())])
    for _ in range(length):
        logits = model(tokens[:, -64:].to(device))[0, -1].cpu()
        drawn = torch.multinomial(logits.float().softmax(-1), 1, generator=draw)
        tokens = torch.cat([tokens, drawn[None]], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


class Order(DistributedSampler):
    """This rank's share of an epoch's order; it begins at `start` and loads nothing before it."""

    start = 0

    def __iter__(self):
        return itertools.islice(super().__iter__(), self.start, None)


class State(Stateful):
    """All that decides the next step. DCP calls the two methods, on every rank."""

    def __init__(self, model, optimizer, scaler):
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.done, self.best = 0, (math.inf, math.inf)  # steps; lowest validation loss, its step
        self.random = f"random state of rank {dist.get_rank()} of {dist.get_world_size()}"
        self.draws = torch.cuda if torch.cuda.is_available() else torch  # where dropout draws

    def state_dict(self):
        """What is saved."""
        return {
            **self.model.state(self.optimizer),
            "scaler": self.scaler.state_dict(),
            "position": [self.done, *self.best],
            self.random: self.draws.get_rng_state(),
        }

    def load_state_dict(self, state):
        """Take over what was saved."""
        self.model.load_state(self.optimizer, state)
        self.scaler.load_state_dict(state["scaler"])
        self.done, *best = state["position"]
        self.best = tuple(best)
        self.draws.set_rng_state(state[self.random])


def step_name(step):
    """The name of the checkpoint of `step`."""
    return f"step-{step:06d}"


def load(state, path):
    """Put the checkpoint `path` into `state`, from whichever ranks have written it."""
    saved.verify(path)
    dcp.load({"state": state}, checkpoint_id=path, planner=Complete())


def save(state, folder):
    """Write a checkpoint, each rank its part; the rename makes it count, and old ones go."""
    name = step_name(state.done)
    dcp.save({"state": state}, checkpoint_id=folder / f".{name}")
    saved.seal(folder / f".{name}")
    if dist.get_rank() == 0:
        (folder / f".{name}").rename(folder / name)
        for path in checkpoints(folder):
            if path.name not in (name, step_name(state.best[1])):
                shutil.rmtree(path)
    dist.barrier()


if __name__ == "__main__":
    job.run(main, options.parse(main))
