"""Plain GPT to compare with, and helpers shared by the tests of techniques."""

from __future__ import annotations

from typing import Any

import torch
from devices import to_device

from shardlab import ranks
from shardlab.gpt.model import GPT, Config


def run_ranks(fn: Any, size: int, *args: Any, device: str = "auto", timeout: float = 100) -> list:
    return ranks.run(fn, size, *args, device=device, timeout=timeout, show=False)


def build_plain_model(config: Config, dtype: torch.dtype = torch.float64, seed: int = 0) -> GPT:
    """Return a GPT with random biases and norms, so that each parameter matters."""
    torch.manual_seed(seed)
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return to_device(model).to(dtype)


def make_adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=False)


def max_diff(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one - other).abs().max().item()
