"""Train on many ranks: losses and validation over all ranks, and files from rank 0 alone.

torchrun --nproc-per-node=2 -m shardlab.train.core
"""

import math
import os
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from shardlab.common.text import TokenWindows, load_splits
from shardlab.gpt.model import GPT, PRESETS, loss
from shardlab.train.one_gpu import generate, parse_options


def main(
    steps=400,
    batch=16,
    lr=1e-3,
    clip=1.0,
    seed=0,
    dropout=0.0,
    limit=0,
    every=100,
    sample=80,
    folder="run",
):
    """Train for `steps` steps of `batch` sequences; return the loss of every step."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    print(f"rank {rank} of {world} on {device}")
    if batch % world:
        raise ValueError(f"batch={batch}: must be a multiple of {world} (ranks)")
    log = print if rank == 0 else lambda *_: None

    torch.manual_seed(seed)
    config = replace(PRESETS["nano"], dropout=dropout)
    model = GPT(config).to(device)
    torch.manual_seed(seed + 1 + rank)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    done, best, losses = 0, (math.inf, math.inf), []

    texts = load_splits()
    train, validation, test = (TokenWindows(config.seq, part[: limit or None]) for part in texts)
    sampler = DistributedSampler(train, world, rank, seed=seed, drop_last=True)
    loader = DataLoader(train, batch // world, sampler=sampler, drop_last=True)

    log(generate(model, sample))
    while done < steps:
        sampler.set_epoch(done // len(loader))  # another order in every epoch
        for tokens, targets in loader:
            tokens, targets = tokens.to(device), targets.to(device)
            optimizer.zero_grad()
            value = loss(model(tokens), targets)
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            losses.append(average_over_ranks(value.detach()))
            done += 1
            if done % every == 0 or done == steps:
                mean = evaluate(model, validation, rank, world)
                perplexity = torch.tensor(mean).exp()  # math.exp raises where this is inf
                line = f"step {done}: loss {losses[-1]:.4f}, validation {mean:.4f}"
                log(f"{line}, perplexity {perplexity:.2f}")
                best = min(best, (mean if mean < math.inf else math.inf, done))  # nan is no best
                if rank == 0:
                    torch.save(model.module.state_dict(), folder / "last.pt")
                    if best[1] == done:
                        torch.save(model.module.state_dict(), folder / "best.pt")
            if done == steps:
                break

    log(generate(model, sample))
    dist.barrier()  # the others wait for what rank 0 writes
    model.module.load_state_dict(torch.load(folder / "best.pt", device))
    mean = evaluate(model, test, rank, world)
    log(f"test, of step {best[1]}: perplexity {torch.tensor(mean).exp():.2f}")
    return [value.item() for value in losses]


def average_over_ranks(value):
    """Return the mean of a number over all ranks."""
    value = value / dist.get_world_size()
    dist.all_reduce(value)  # a scalar
    return value


@torch.no_grad()
def evaluate(model, windows, rank, world, size=64):
    """Return the mean loss per token over all `windows`."""
    model.eval()
    device = next(model.parameters()).device
    total = torch.zeros(2, device=device)  # summed losses, tokens
    sampler = DistributedSampler(windows, world, rank, shuffle=False)
    loader = DataLoader(windows, size, sampler=sampler)
    for number, (tokens, targets) in enumerate(loader):
        positions = (number * size + torch.arange(len(targets))) * world + rank
        targets[positions >= len(windows)] = -100  # repeated to fill up: counted as nothing
        value = loss(model(tokens.to(device)), targets.to(device), "sum")
        total += torch.stack([value, (targets >= 0).sum().to(value)])
    dist.all_reduce(total)  # [2]
    model.train()
    return (total[0] / total[1]).item()


if __name__ == "__main__":
    dist.init_process_group()
    main(**parse_options(main))
    dist.destroy_process_group()
