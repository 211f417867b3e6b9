"""Experts over ranks: the exchange, a model's step, its balance, its states."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
import torch.distributed as dist

from shardlab import experts, ranks
from shardlab.model import loss

from .common import LLAMA, batch, model, near, on, share, solution, world

MIXTRAL = replace(LLAMA, experts=4)
DEEPSEEK = replace(
    MIXTRAL, router="sigmoid", experts_per_token=3, shared_experts=1, dense_layers=1, capacity=1.0
)


def _rows() -> tuple[torch.Tensor, list[int], list[int]]:
    """Rows of this rank, how many it sends to each, and how many come: rank r sends r + j to j."""
    _, rank, size = world()
    sent, received = ([rank + j for j in range(size)] for _ in range(2))
    return torch.full((sum(sent), 3), float(rank), device=ranks.device()), sent, received


@on(1, 2, 4)
def exchange():
    group = world()[0]
    x, sent, received = _rows()
    x.requires_grad_()
    y = experts.exchange(x, sent, received, group)
    wanted = [rank for rank, rows in enumerate(received) for _ in range(rows)]
    near(y[:, 0], torch.tensor(wanted, device=y.device, dtype=y.dtype), 0.0)
    y.backward(y.detach())
    near(x.grad, x, 0.0)


@on(1, 2, 4)
def whole_model():
    group = world()[0]
    for config in (MIXTRAL, DEEPSEEK):
        plain = model(config)
        mine = experts.parallelize(copy.deepcopy(plain), group)
        x, y = batch(config)
        with experts.watch(plain) as routed:
            value = loss(plain(x), y)
        (value + experts.balancing_loss(routed)).backward()
        with experts.watch(mine) as ours:
            value = loss(mine(share(x)), share(y))
        (value + experts.balancing_loss(ours, group)).backward()
        experts.average_gradients(mine, group)
        own = dict(plain.named_parameters())
        for name, parameter in mine.named_parameters():
            near(parameter.grad, own[name].grad)
        experts.update_bias(routed, 0.01)
        experts.update_bias(ours, 0.01, group)
        found = experts.full_state_dict(mine)
        for name, tensor in plain.state_dict().items():
            near(found[name], tensor, 0.0)
        experts.load_full_state_dict(mine, found)
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        near(experts.clip_grad_norm_(mine, 1.0), norm)


@on(4)
def copies():
    layouts = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    groups = [dist.new_subgroups_by_enumeration(layout)[0] for layout in layouts]
    plain = model(MIXTRAL)
    mine = experts.parallelize(copy.deepcopy(plain), groups[0])
    x, y = batch(MIXTRAL)
    loss(plain(x), y).backward()
    loss(mine(share(x)), share(y)).backward()
    experts.average_gradients(mine, world()[0], groups[1])
    own = dict(plain.named_parameters())
    for name, parameter in mine.named_parameters():
        near(parameter.grad, own[name].grad)


@on(1, 2, 4)
def solution_of_the_exchange():
    from shardlab import collectives

    x, sent, received = _rows()
    got = solution("experts", "ex-experts-exchange", collectives=collectives)
    near(got(x, sent, received, world()[0]), experts.exchange(x, sent, received, world()[0]), 0.0)


@on(1, 2, 4)
def solution_of_balance():
    group, rank, size = world()
    torch.manual_seed(0)
    scores = torch.rand(4 * size, 4).softmax(-1).to(ranks.device())
    chosen = scores.topk(2).indices
    got = solution("experts", "ex-experts-balance")
    value = got(scores.chunk(size)[rank], chosen.chunk(size)[rank], group)
    dist.all_reduce(value, group=group)
    load = torch.bincount(chosen.flatten(), minlength=4) / chosen.numel()
    near(value / size, 4 * (load * scores.mean(0)).sum())
