"""Train a small GPT on text, on one GPU.

    python one_gpu.py --folder runs/a

Copy this script, and take your copy to many GPUs, step by step: python -m shardlab steps
my_train.py The script needs PyTorch, and the model and the text of the course's package.
"""

import argparse
import inspect
import math
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

from shardlab.common.text import TokenWindows, load_splits
from shardlab.gpt.model import GPT, PRESETS, loss


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
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    torch.manual_seed(seed)
    config = replace(PRESETS["nano"], dropout=dropout)
    model = GPT(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    done, best, losses = 0, (math.inf, math.inf), []

    texts = load_splits()
    train, validation, test = (TokenWindows(config.seq, part[: limit or None]) for part in texts)
    order = torch.Generator()
    sampler = RandomSampler(train, generator=order)
    loader = DataLoader(train, batch, sampler=sampler, drop_last=True)

    print(generate(model, sample))
    while done < steps:
        order.manual_seed(seed + done // len(loader))  # another order in every epoch
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


@torch.no_grad()
def evaluate(model, windows, size=64):
    """Return the mean loss per token over all `windows`."""
    model.eval()
    device = next(model.parameters()).device
    total = torch.zeros(2, device=device)  # summed losses, tokens
    for tokens, targets in DataLoader(windows, size):
        value = loss(model(tokens.to(device)), targets.to(device), "sum")
        total += torch.stack([value, torch.full_like(value, targets.numel())])
    model.train()
    return (total[0] / total[1]).item()


@torch.no_grad()
def generate(model, length, start="def ", seed=0):
    """Return `start` and `length` more bytes, each drawn from the model's prediction."""
    draw = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    tokens = torch.tensor([list(start.encode())])
    for _ in range(length):
        logits = model(tokens[:, -64:].to(device))[0, -1].cpu()
        drawn = torch.multinomial(logits.float().softmax(-1), 1, generator=draw)
        tokens = torch.cat([tokens, drawn[None]], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def parse_options(main):
    """Parse the options of `main` from the command line: --steps 12 --folder runs/a."""
    parser = argparse.ArgumentParser()
    for name, option in inspect.signature(main).parameters.items():
        parser.add_argument(f"--{name}", type=type(option.default), default=option.default)
    return vars(parser.parse_args())


if __name__ == "__main__":
    main(**parse_options(main))
