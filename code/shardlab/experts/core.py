"""Experts over ranks: every rank has all of the model but the experts, of which it has its own.

    tokens' rows, in order of experts  --all-to-all-->  rows for my experts      dispatch
    each expert computes its rows
    outputs  --all-to-all, the same sizes the other way-->  rows of my tokens    combine

Each rank brings tokens of its own, so the group of experts is a group of data parallelism, too:
what all ranks have is averaged over all of them, and an expert's gradient, which the all-to-alls
have already collected from the group's ranks, over its copies alone. In the order of the lesson:
the all-to-all with uneven sizes; who sends how much to whom; the layer; the model; gradients; and
how the router is kept from always choosing the same.

Lepikhin et al., "GShard", 2020 (arXiv 2006.16668), section 3.2. Fedus, Zoph, Shazeer, "Switch
Transformers", 2021 (arXiv 2101.03961), section 2.2: the balancing loss. Wang et al.,
"Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024 (arXiv 2408.15664).

Shapes in names: B batch, S sequence, H hidden, E experts, C experts that a token chooses, T tokens
(B * S), R rows, L layers with experts, N ranks; e, a rank's share of E.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardlab.data_parallel import buckets
from shardlab.gpt.model import GPT, Experts
from shardlab.gpt.router import Router
from shardlab.ranks import check_group, check_same
from shardlab.tensor_types.operator import Operator

Group = dist.ProcessGroup

# Rows to the ranks that they are for, and back.


def exchange(x_RH: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
    """Send `sent[j]` rows to rank j, one rank's after the other's; get `received[i]` from rank i.

    [sum(sent), H] to [sum(received), H]. Backward sends each row's gradient to where it came from:
    the same exchange with the two lists changed over. A rank without any row has to call it, too.
    """
    return _Exchange.apply(x_RH, list(sent), list(received), group)


class _Exchange(Operator):
    words = "V -> V"  # each rank its own: see tensor_types

    @staticmethod
    def forward(
        ctx: Any, x_RH: Tensor, sent: list[int], received: list[int], group: Group
    ) -> Tensor:
        ctx.back = received, sent, group
        y_RH = x_RH.new_empty(sum(received), *x_RH.shape[1:])
        dist.all_to_all_single(y_RH, x_RH.contiguous(), received, sent, group=group)
        return y_RH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RH: Tensor) -> tuple[Tensor, None, None, None]:
        return _Exchange.apply(dy_RH, *ctx.back), None, None, None


class Route(NamedTuple):
    """Which rows leave this rank, in which order, and which come."""

    order_R: Tensor  # choices, as they stand in [T * C], in order of experts, and of tokens in each
    sent: list[int]  # rows for each rank
    received: list[list[int]]  # N x e: rows of each rank for each expert of this one
    dropped: int  # choices that no expert takes


@torch.no_grad()
def route(chosen_TC: Tensor, experts: int, group: Group) -> Route:
    """Tell every rank how many rows it will get: E whole numbers, in an all-to-all of their own.

    chosen_TC: numbers of experts; -1: none. Sizes of messages are the host's business, so a GPU
    has to be waited for here, once in each layer.
    """
    _, ranks = check_group(group)
    number_X = chosen_TC.flatten() + 1  # 0 for those that nobody takes
    count_Y = number_X.new_zeros(experts + 1)
    count_Y.index_add_(0, number_X, torch.ones_like(number_X))
    received_E = torch.empty_like(count_Y[1:])
    dist.all_to_all_single(received_E, count_Y[1:].contiguous(), group=group)  # [N * e]
    numbers = torch.cat((count_Y, received_E)).tolist()
    dropped, counts, received = numbers[0], numbers[1 : experts + 1], numbers[experts + 1 :]
    local_experts = experts // ranks
    return Route(
        number_X.argsort(stable=True)[dropped:],
        [sum(counts[rank * local_experts :][:local_experts]) for rank in range(ranks)],
        [received[rank * local_experts :][:local_experts] for rank in range(ranks)],
        dropped,
    )


class ExpertParallel(nn.Module):
    """A plain layer of experts, of which this rank has its share; tokens travel to the others'."""

    def __init__(self, plain: Experts, group: Group):
        super().__init__()
        rank, ranks = check_group(group)
        self.group, self.total = group, len(plain.experts)
        check_experts(self.total, ranks)
        local_experts = self.total // ranks
        self.own = range(rank * local_experts, (rank + 1) * local_experts)
        self.router, self.shared = plain.router, plain.shared
        # By their numbers among all, so that names of parameters stay the plain model's.
        self.experts = nn.ModuleDict({str(e): plain.experts[e] for e in self.own})

    def forward(self, x_BSH: Tensor) -> Tensor:
        """[B, S, H] to [B, S, H], of this rank's tokens: as `Experts` computes it."""
        _, chosen_BSC, weights_BSC = self.router(x_BSH)
        chosen_BSC = self.router.admit(chosen_BSC)
        way = route(chosen_BSC.flatten(0, 1), self.total, self.group)
        token_R = way.order_R // chosen_BSC.shape[-1]
        x_TH = x_BSH.flatten(0, 1)
        received = [sum(rows) for rows in way.received]

        x_RH = exchange(x_TH.index_select(0, token_R), way.sent, received, self.group)  # dispatch
        y_RH = exchange(self.compute(x_RH, way), received, way.sent, self.group)  # combine

        y_TH = torch.zeros_like(x_TH) if self.shared is None else self.shared(x_TH)
        y_RH = weights_BSC.flatten()[way.order_R, None] * y_RH
        return y_TH.index_add(0, token_R, y_RH).view_as(x_BSH)

    def compute(self, x_RH: Tensor, way: Route) -> Tensor:
        """Each of this rank's experts on its rows: [R, H] to [R, H], in the same order.

        Rows come by rank, and of each rank by expert. An expert takes them in order of ranks, which
        is the order of one process's tokens: even its sums over tokens are one process's.
        """
        pieces = x_RH.split([rows for source in way.received for rows in source])
        done = []
        for number, expert in enumerate(self.experts.values()):
            mine = pieces[number :: len(self.own)]
            done.append(expert(torch.cat(mine)).split([len(piece) for piece in mine]))
        return torch.cat([piece for source in zip(*done, strict=True) for piece in source])


# The model, and its gradients.


def parallelize(model: GPT, group: Group) -> GPT:
    """Leave this rank its share of the experts in each layer, in place, and return the model.

    Every rank of `group` calls it with the same model, and trains with tokens of its own; gradients
    are for `average_gradients`, the optimizer is made afterwards. Feed-forward networks that are
    cut already stay so: `tensor_parallel.parallelize` comes first.

    Raises ValueError for anything but a GPT with experts, experts that the ranks do not divide, and
    on every rank when the models differ.
    """
    _, ranks = check_group(group)
    if not isinstance(model, GPT) or not model.config.experts:
        given = type(model).__name__
        raise ValueError(
            f"model={given}: allowed is a GPT of shardlab.gpt.model with config.experts"
        )
    if hasattr(model, "expert_group"):
        raise ValueError("model: its experts are dealt out already; allowed is one that has all")
    check_experts(model.config.experts, ranks)
    check_same(group, model=model, config=model.config)
    for block in model.blocks:
        if isinstance(block.ffn, Experts):
            block.ffn = ExpertParallel(block.ffn, group)
    model.expert_group = group
    return model


def check_experts(experts: int, ranks: int) -> None:
    """Raise ValueError unless the ranks divide the experts."""
    if experts % ranks:
        fits = [n for n in range(1, experts + 1) if experts % n == 0]
        raise ValueError(f"experts={experts}: {ranks} ranks do not divide them; allowed are {fits}")


def own_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Those of this rank's experts, which the group's other ranks do not have."""
    layers = [module for module in model.modules() if isinstance(module, ExpertParallel)]
    return [parameter for layer in layers for parameter in layer.experts.parameters()]


@torch.no_grad()
def average_gradients(model: GPT, data: Group, copies: Group | None = None) -> None:
    """After backward of each rank's mean loss: make gradients those of the mean over all ranks.

    data: all ranks that have tokens of their own. copies: those of them that have the same experts;
    None: nobody else has. What all ranks have is averaged over `data`. An expert's gradient is a
    sum over its group's ranks already, and becomes the sum over its copies: what it is divided by
    is `data`'s ranks all the same.

    Raises ValueError unless data is as large as the group of experts times copies.
    """
    (_, ranks), (_, dealt) = check_group(data, "data"), check_group(_group(model))
    several = 1 if copies is None else check_group(copies, "copies")[1]
    if ranks != dealt * several:
        given = f"data has {ranks} ranks, the group of experts {dealt}, copies {several}"
        raise ValueError(f"{given}: allowed are {dealt} * {several} ranks in data")
    own = own_parameters(model)
    mine = {id(parameter) for parameter in own}
    buckets.average_gradients((p for p in model.parameters() if id(p) not in mine), data)
    gradients = [parameter.grad for parameter in own if parameter.grad is not None]
    if copies is not None:
        buckets.add_up(gradients, copies, scale=1 / ranks)
    else:
        for gradient in gradients:
            gradient /= ranks


# What keeps the router from always choosing the same experts.


class Routed(NamedTuple):
    """What a router said in one forward."""

    router: Router
    scores_BSE: Tensor
    chosen_BSC: Tensor  # before any is left out

    @property
    def count_E(self) -> Tensor:
        """How many tokens chose each expert."""
        chosen_X = self.chosen_BSC.flatten()
        count_E = chosen_X.new_zeros(self.scores_BSE.shape[-1])
        return count_E.index_add_(0, chosen_X, torch.ones_like(chosen_X))

    @property
    def dropped(self) -> Tensor:
        """How many choices find no place, [B, S]."""
        return (self.router.admit(self.chosen_BSC) < 0).sum(-1)


@contextmanager
def watch(model: nn.Module) -> Iterator[list[Routed]]:
    """A list that gets what each router says while the model runs, in order of layers.

    Where a step has several micro-batches, all of them belong inside: what is done with the list
    takes a router's as one batch.
    """
    routed: list[Routed] = []

    def note(router: Router, _: Any, result: tuple[Tensor, Tensor, Tensor]) -> None:
        routed.append(Routed(router, *result[:2]))

    routers = [module for module in model.modules() if isinstance(module, Router)]
    hooks = [router.register_forward_hook(note) for router in routers]
    try:
        yield routed
    finally:
        for hook in hooks:
            hook.remove()


def by_router(routed: Sequence[Routed]) -> dict[Router, list[Routed]]:
    """What each router said, once for each micro-batch; routers in order of layers."""
    found: dict[Router, list[Routed]] = {}
    for one in routed:
        found.setdefault(one.router, []).append(one)
    return found


@torch.no_grad()
def loads(routed: Sequence[Routed], group: Group | None = None) -> Tensor:
    """The share of all choices that each expert gets, [L, E]; of all tokens of `group`."""
    count_LE = torch.stack(
        [sum(one.count_E for one in each) for each in by_router(routed).values()]
    )
    if group is not None:
        check_group(group)
        dist.all_reduce(count_LE, group=group)  # L * E whole numbers
    return count_LE / count_LE.sum(-1, keepdim=True)


def balancing_loss(routed: Sequence[Routed], group: Group | None = None) -> Tensor:
    """E times the sum over experts of load times mean score, summed over layers; L where even.

    Switch, equations 4 to 6. The load is a count, and has no gradient; the score has, and falls
    where the load is high. A product of two means over tokens is no mean over tokens: so ranks have
    to agree on the load (`group`: all with tokens of their own). Then the mean over ranks of what
    each returns is one process's. Scores are taken as shares of a token's sum, as sigmoids need.
    """
    load_LE = loads(routed, group)
    scores = [
        torch.cat([one.scores_BSE.flatten(0, 1) for one in each])
        for each in by_router(routed).values()
    ]
    fractions = [scores_TE / scores_TE.sum(-1, keepdim=True) for scores_TE in scores]
    score_LE = torch.stack([fraction_TE.mean(0) for fraction_TE in fractions])
    return load_LE.shape[-1] * (load_LE * score_LE).sum()


@torch.no_grad()
def update_bias(routed: Sequence[Routed], rate: float, group: Group | None = None) -> None:
    """After a step: raise the bias of experts with less than a fair share, lower the others'.

    By `rate`, however large the difference (Wang et al., Algorithm 1), and once, by the tokens of
    all micro-batches in `routed`. It moves the choice alone, so no gradient pulls the scores away
    from what the loss wants.
    """
    load_LE = loads(routed, group)
    for router, load_E in zip(by_router(routed), load_LE, strict=True):
        router.bias_E += rate * (1 / len(load_E) - load_E).sign()


def _group(model: nn.Module) -> Group:
    group = getattr(model, "expert_group", None)
    if group is None:
        kind = type(model).__name__
        raise ValueError(f"model={kind}: allowed is what `parallelize` returned")
    return group
