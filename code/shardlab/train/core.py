#: steps plain ranks seeds ddp sampler losses validation rank0 accumulate
#: steps precision resume fsdp2 meta compile take_home
#: -take_home
"""Train a small GPT on text."""
#: take_home
"""Train a GPT on text: on one GPU, on many, on many nodes. The losses are the same.

    python train.py --folder runs/a
    torchrun --nproc-per-node=4 train.py --folder runs/a --strategy fsdp2 --precision bf16
    srun python train.py --folder runs/a          # on the ranks that Slurm has started

It goes on from the folder's last checkpoint. At SIGTERM or SIGUSR1 all ranks finish a step, save
and end; then a file `stopped` in the folder says that there is more to do.
"""
#: end

import contextlib  #: accumulate -fsdp2
import itertools  #: resume
import math
import os  #: ranks -take_home
import shutil  #: resume
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist  #: ranks
import torch.distributed.checkpoint as dcp  #: resume
from torch import nn  #: -take_home
#: resume -meta
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
#: meta -take_home
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
#: end
from torch.distributed.checkpoint.stateful import Stateful  #: resume
from torch.distributed.device_mesh import DeviceMesh  #: fsdp2 -take_home
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  #: fsdp2 -take_home
from torch.nn.parallel import DistributedDataParallel  #: ddp -fsdp2
from torch.utils.data import DataLoader, RandomSampler  #: -sampler
from torch.utils.data import DataLoader, DistributedSampler  #: sampler

from shardlab.model import GPT, PRESETS, loss
from shardlab.text import Windows, parts
from shardlab.train import job, options, saved  #: take_home
from shardlab.train.saved import Complete, checkpoints  #: resume
from shardlab.train.spread import Spread  #: take_home
#: precision -take_home

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: end


def main(
    preset="nano",  #: take_home
    source="stdlib",  #: take_home
    steps=400,
    batch=16,
    micro=16,  #: accumulate
    lr=1e-3,
    clip=1.0,
    seed=0,
    dropout=0.0,
    limit=None,
    every=100,
    report=10,  #: take_home
    sample=80,
    precision="float32",  #: precision
    compiler=None,  #: compile
    strategy="ddp",  #: take_home
    tensor=1,  #: take_home
    workers=0,  #: take_home
    peak=None,  #: take_home
    folder="run",
):
    """Train for `steps` steps of `batch` sequences; return the loss of every step."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rank, world = dist.get_rank(), dist.get_world_size()  #: ranks
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  #: -take_home
    #: ranks -take_home
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    #: take_home
    device, stop = job.device(), job.Stop()
    #: end
    print(f"rank {rank} of {world} on {device}")  #: ranks
    #: sampler -take_home
    if batch % world:
        raise ValueError(f"batch={batch}: allowed are multiples of {world}, one share a rank")
    #: end
    say = print if rank == 0 else lambda *_: None  #: rank0

    torch.manual_seed(seed)
    config = replace(PRESETS["nano"], dropout=dropout)  #: -take_home
    config = replace(PRESETS[preset], dropout=dropout)  #: take_home
    model = GPT(config).to(device)  #: -meta
    #: take_home
    spread = Spread(GPT(config).to(device), strategy, tensor, precision, compiler)
    model, rank, world = spread.model, spread.share, spread.shares  # of the data
    torch.manual_seed(seed + 1 + rank)  # ranks that share data drop out the same
    #: meta -take_home
    weights = GPT(config).state_dict() if rank == 0 else {}
    with torch.device("meta"):
        model = GPT(config)
    #: end
    torch.manual_seed(seed + 1 + rank)  #: seeds -take_home
    #: precision -fsdp2
    cast = torch.autocast(device.type, DTYPES[precision], precision != "float32")
    model.forward = cast(model.forward)  # to train, to validate and to generate
    #: end
    model = DistributedDataParallel(model)  #: ddp -fsdp2
    #: fsdp2 -take_home
    mesh = DeviceMesh.from_group(dist.group.WORLD, device.type)
    policy = MixedPrecisionPolicy(DTYPES[precision], reduce_dtype=torch.float32)
    for block in model.blocks:
        block.compile(backend=compiler, disable=compiler is None)  #: compile
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    #: meta -take_home
    model.to_empty(device=device)
    whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=whole)
    #: end
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")  #: precision
    done, best, losses = 0, (math.inf, math.inf), []  #: -resume
    #: resume
    state = State(model, optimizer, scaler)  #: -take_home
    state = State(spread, optimizer, scaler)  #: take_home
    if checkpoints(folder):
        load(state, checkpoints(folder)[-1])
    done, best, losses = state.done, state.best, []
    #: end

    texts = parts()  #: -take_home
    texts = parts(source)  #: take_home
    train, validation, test = (Windows(config.seq, part[:limit]) for part in texts)
    order = torch.Generator()  #: -sampler
    sampler = RandomSampler(train, generator=order)  #: -sampler
    loader = DataLoader(train, batch, sampler=sampler, drop_last=True)  #: -sampler
    sampler = DistributedSampler(train, world, rank, seed=seed, drop_last=True)  #: sampler -resume
    sampler = Order(train, world, rank, seed=seed, drop_last=True)  #: resume
    #: sampler -resume
    loader = DataLoader(train, batch // world, sampler=sampler, drop_last=True)
    #: resume
    own = torch.Generator()  # a new iterator draws a number: not from what dropout draws from
    #: resume -take_home
    loader = DataLoader(train, batch // world, sampler=sampler, drop_last=True, generator=own)
    #: take_home
    how = {"num_workers": workers, "persistent_workers": workers > 0, "drop_last": True}
    how["worker_init_fn"] = job.ignore_signals
    loader = DataLoader(train, batch // world, sampler=sampler, generator=own, **how)
    #: end

    print(generate(model, sample))  #: -rank0
    say(generate(model, sample))  #: rank0
    meter = job.Meter(folder, config, steps, batch, done, device, peak)  #: take_home
    while done < steps:
        order.manual_seed(seed + done // len(loader))  # another order in every epoch  #: -sampler
        sampler.set_epoch(done // len(loader))  # another order in every epoch  #: sampler
        sampler.start = done % len(loader) * (batch // world)  #: resume
        for tokens, targets in loader:
            tokens, targets = tokens.to(device), targets.to(device)
            optimizer.zero_grad()
            value = loss(model(tokens), targets)  #: -accumulate
            value.backward()  #: -accumulate
            value = backward(model, tokens, targets, micro)  #: accumulate -precision
            value = backward(model, tokens, targets, micro, scaler)  #: precision -take_home
            value = backward(spread, model, tokens, targets, micro, scaler)  #: take_home
            scaler.unscale_(optimizer)  #: precision
            nn.utils.clip_grad_norm_(model.parameters(), clip)  #: -take_home
            norm = spread.clip(clip)  #: take_home
            optimizer.step()  #: -precision
            scaler.step(optimizer)  #: precision
            scaler.update()  #: precision
            losses.append(value.detach())  #: -losses
            losses.append(averaged(value.detach()))  #: losses
            done += 1
            #: take_home
            if done % report == 0 or done == steps:
                meter.write(done, loss=losses[-1], norm=norm, scale=scaler.get_scale())
                if stop.on_any_rank(device):
                    steps = done  # so this one is the last
            #: end
            if done % every == 0 or done == steps:
                mean = evaluate(model, validation)  #: -validation
                mean = evaluate(model, validation, rank, world)  #: validation
                perplexity = torch.tensor(mean).exp()  # math.exp raises where this is inf
                words = f"step {done}: validation {mean:.3f}, perplexity {perplexity:.2f}"
                print(words)  #: -rank0
                say(words)  #: rank0
                best = min(best, (mean if mean < math.inf else math.inf, done))  # nan is no best
                #: -rank0
                torch.save(model.state_dict(), folder / "last.pt")
                if best[1] == done:
                    torch.save(model.state_dict(), folder / "best.pt")
                #: rank0 -resume
                if rank == 0:
                    torch.save(model.module.state_dict(), folder / "last.pt")
                    if best[1] == done:
                        torch.save(model.module.state_dict(), folder / "best.pt")
                #: resume
                state.done, state.best = done, best
                save(state, folder)
                meter.note(step=done, validation=mean)  #: take_home
                meter.restart()  #: take_home
                #: end
            if done == steps:
                break

    #: take_home
    (folder / "stopped").unlink(missing_ok=True)
    if stop.agreed:
        meter.close()
        (folder / "stopped").touch()
        return [value.item() for value in losses]
    #: end
    print(generate(model, sample))  #: -rank0
    say(generate(model, sample))  #: rank0
    model.load_state_dict(torch.load(folder / "best.pt", device))  #: -rank0
    dist.barrier()  # the others wait for what rank 0 writes  #: rank0 -resume
    model.module.load_state_dict(torch.load(folder / "best.pt", device))  #: rank0 -resume
    load(state, folder / step_name(best[1]))  #: resume
    mean = evaluate(model, test)  #: -validation
    mean = evaluate(model, test, rank, world)  #: validation
    meter.note(step=best[1], test=mean)  #: take_home
    meter.close()  #: take_home
    print(f"test, of step {best[1]}: perplexity {torch.tensor(mean).exp():.2f}")  #: -rank0
    say(f"test, of step {best[1]}: perplexity {torch.tensor(mean).exp():.2f}")  #: rank0
    return [value.item() for value in losses]


#: losses
def averaged(value):
    """The mean of a number over all ranks."""
    value = value / dist.get_world_size()
    dist.all_reduce(value)  # a scalar
    return value


#: accumulate
def backward(
    spread,  #: take_home
    model,
    tokens,
    targets,
    micro,
    scaler,  #: precision
):
    """Backward for the mean loss, `micro` sequences at a time; return that loss."""
    pieces = list(zip(tokens.split(micro), targets.split(micro), strict=True))
    total = torch.zeros((), device=tokens.device)
    #: accumulate -fsdp2
    for number, (part, its_targets) in enumerate(pieces, 1):
        last = number == len(pieces)
        with contextlib.nullcontext() if last else model.no_sync():
            value = loss(model(part), its_targets) * len(part) / len(tokens)
            value.backward()  #: -precision
            scaler.scale(value).backward()  #: precision
    #: fsdp2 -take_home
    for part, its_targets in pieces:
        value = loss(model(part), its_targets) * len(part) / len(tokens)
        scaler.scale(value).backward()  # sends: to wait for the last is to keep whole gradients
    #: take_home
    for number, (part, its_targets) in enumerate(pieces, 1):
        with spread.sync_if(number == len(pieces)):
            value = loss(model(part), its_targets) * len(part) / len(tokens)
            scaler.scale(value).backward()
        #: accumulate
        total += value.detach()
    return total


#: end
@torch.no_grad()
def evaluate(
    model,
    windows,
    rank,  #: validation
    world,  #: validation
    size=64,
):
    """The mean loss of a token, over all `windows`."""
    model.eval()
    device = next(model.parameters()).device
    total = torch.zeros(2, device=device)  # summed losses, tokens
    #: -validation
    for tokens, targets in DataLoader(windows, size):
        value = loss(model(tokens.to(device)), targets.to(device), "sum")
        total += torch.stack([value, torch.full_like(value, targets.numel())])
    #: validation
    sampler = DistributedSampler(windows, world, rank, shuffle=False)
    loader = DataLoader(windows, size, sampler=sampler)  #: validation -resume
    loader = DataLoader(windows, size, sampler=sampler, generator=torch.Generator())  #: resume
    for number, (tokens, targets) in enumerate(loader):  #: validation
        positions = (number * size + torch.arange(len(targets))) * world + rank
        targets[positions >= len(windows)] = -100  # repeated to fill up: counted as nothing
        value = loss(model(tokens.to(device)), targets.to(device), "sum")
        total += torch.stack([value, (targets >= 0).sum().to(value)])
    dist.all_reduce(total)  # [2]
    #: end
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


#: resume
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
        model, optimizer = get_state_dict(self.model, self.optimizer)  #: -take_home
        return {
            "model": model,  #: -take_home
            "optimizer": optimizer,  #: -take_home
            **self.model.state(self.optimizer),  #: take_home
            "scaler": self.scaler.state_dict(),
            "position": [self.done, *self.best],
            self.random: self.draws.get_rng_state(),
        }

    def load_state_dict(self, state):
        """Take over what was saved."""
        #: resume -take_home
        own = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **own)
        #: take_home
        self.model.load_state(self.optimizer, state)
        #: resume
        self.scaler.load_state_dict(state["scaler"])
        self.done, *best = state["position"]
        self.best = tuple(best)
        self.draws.set_rng_state(state[self.random])


def step_name(step):
    """The name of the checkpoint of `step`."""
    return f"step-{step:06d}"


def load(state, path):
    """Put the checkpoint `path` into `state`, from whichever ranks have written it."""
    saved.verify(path)  #: take_home
    dcp.load({"state": state}, checkpoint_id=path, planner=Complete())


def save(state, folder):
    """Write a checkpoint, each rank its part; the rename makes it count, and old ones go."""
    name = step_name(state.done)
    dcp.save({"state": state}, checkpoint_id=folder / f".{name}")
    saved.seal(folder / f".{name}")  #: take_home
    if dist.get_rank() == 0:
        (folder / f".{name}").rename(folder / name)
        for path in checkpoints(folder):
            if path.name not in (name, step_name(state.best[1])):
                shutil.rmtree(path)
    dist.barrier()


#: end
if __name__ == "__main__":
    dist.init_process_group()  #: ranks -take_home
    main()  #: -take_home
    dist.destroy_process_group()  #: ranks -take_home
    job.run(main, options.parse(main))  #: take_home
