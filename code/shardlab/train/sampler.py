"""Train on many ranks, each of which reads its own share of the data.

torchrun --nproc-per-node=2 -m shardlab.train.sampler
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
from shardlab.train.one_gpu import evaluate, generate, parse_options


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

    print(generate(model, sample))
    while done < steps:
        sampler.set_epoch(done // len(loader))  # another order in every epoch
        for tokens, targets in loader:
            tokens, targets = tokens.to(device), targets.to(device)
            optimizer.zero_grad()
            value = loss(model(tokens), targets)
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            losses.append(value.detach())
            done += 1
            if done % every == 0 or done == steps:
                mean = evaluate(model, validation)
                perplexity = torch.tensor(mean).exp()  # math.exp raises where this is inf
                line = f"step {done}: loss {losses[-1]:.4f}, validation {mean:.4f}"
                print(f"{line}, perplexity {perplexity:.2f}")
                best = min(best, (mean if mean < math.inf else math.inf, done))  # nan is no best
                torch.save(model.state_dict(), folder / "last.pt")
                if best[1] == done:
                    torch.save(model.state_dict(), folder / "best.pt")
            if done == steps:
                break

    print(generate(model, sample))
    model.load_state_dict(torch.load(folder / "best.pt", device))
    mean = evaluate(model, test)
    print(f"test, of step {best[1]}: perplexity {torch.tensor(mean).exp():.2f}")
    return [value.item() for value in losses]


if __name__ == "__main__":
    dist.init_process_group()
    main(**parse_options(main))
    dist.destroy_process_group()
