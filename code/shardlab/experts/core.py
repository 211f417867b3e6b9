"""Expert parallelism: experts are sharded over ranks, and the rest of the model is replicated.

    tokens' rows, in order of experts  --all-to-all-->  rows for my experts      dispatch
    each expert computes its rows
    outputs  --all-to-all, sizes swapped-->  rows of my tokens                   combine

Each rank has its own tokens, so the expert group is a data-parallel group, too. Gradients of
replicated parameters are averaged over all ranks. An expert's gradient already contains the tokens
of all ranks of its group, through the all-to-alls, and is reduced only over the expert's copies.
In the order of the lesson: the all-to-all with uneven sizes; the routing of rows to ranks; the
layer; the model; gradients; and load balancing of the experts.

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

# Dispatch of rows to the ranks of their experts, and back.


def exchange_rows(x_RH: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
    """Send `sent[j]` rows to rank j and receive `received[i]` rows from rank i, in rank order.

    [sum(sent), H] to [sum(received), H]. Backward returns each row's gradient to its sender: the
    same exchange with the two lists swapped. Collective, also for a rank without any rows.
    """
    return _Exchange.apply(x_RH, sent, received, group)


class _Exchange(Operator):
    signature = "V -> V"  # varies between ranks: see tensor_types

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
    """The rows that this rank sends, in their order, and the rows that it receives."""

    order_R: Tensor  # indices into the [T * C] choices, sorted by expert, then by token
    sent: list[int]  # rows for each rank
    received: list[list[int]]  # N x e: rows from each rank for each expert of this rank
    dropped: int  # choices without an expert, because it is full


@torch.no_grad()
def plan_route(chosen_TC: Tensor, experts: int, group: Group) -> Route:
    """Exchange the number of rows for each expert (E integers, by all-to-all); plan the route.

    chosen_TC: expert numbers, -1 for a dropped choice. The host needs the message sizes, so this
    function synchronizes with the GPU, once in each layer.
    """
    _, ranks = check_group(group)
    number_X = chosen_TC.flatten() + 1  # 0 for dropped choices
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
    """A layer of experts, sharded: this rank has its share and sends tokens to other experts."""

    def __init__(self, plain: Experts, group: Group):
        super().__init__()
        rank, ranks = check_group(group)
        self.group, self.total = group, len(plain.experts)
        check_experts(self.total, ranks)
        local_experts = self.total // ranks
        self.own = range(rank * local_experts, (rank + 1) * local_experts)
        self.router, self.shared = plain.router, plain.shared
        # Keys are the experts' global numbers, so parameter names are the plain model's.
        self.experts = nn.ModuleDict({str(e): plain.experts[e] for e in self.own})

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Map this rank's tokens [B, S, H] to [B, S, H], with the result of `Experts`."""
        _, chosen_BSC, weights_BSC = self.router(x_BSH)
        chosen_BSC = self.router.apply_capacity(chosen_BSC)
        route = plan_route(chosen_BSC.flatten(0, 1), self.total, self.group)
        token_R = route.order_R // chosen_BSC.shape[-1]
        x_TH = x_BSH.flatten(0, 1)
        sent, received = route.sent, [sum(rows) for rows in route.received]

        x_RH = exchange_rows(x_TH.index_select(0, token_R), sent, received, self.group)  # dispatch
        y_RH = exchange_rows(self.run_experts(x_RH, route), received, sent, self.group)  # combine

        y_TH = torch.zeros_like(x_TH) if self.shared is None else self.shared(x_TH)
        y_RH = weights_BSC.flatten()[route.order_R, None] * y_RH
        return y_TH.index_add(0, token_R, y_RH).view_as(x_BSH)

    def run_experts(self, x_RH: Tensor, route: Route) -> Tensor:
        """Apply each of this rank's experts to its rows: [R, H] to [R, H], in the same order.

        Rows are ordered by source rank, then by expert. An expert gets its rows in rank order, the
        token order of a single process: so even its sums over tokens equal a single process's.
        """
        pieces = x_RH.split([rows for source in route.received for rows in source])
        done = []
        for number, expert in enumerate(self.experts.values()):
            mine = pieces[number :: len(self.own)]
            done.append(expert(torch.cat(mine)).split([len(piece) for piece in mine]))
        return torch.cat([piece for source in zip(*done, strict=True) for piece in source])


# The model and its gradients.


def parallelize(model: GPT, group: Group) -> GPT:
    """Shard the experts of each layer over `group`, in place, and return the model.

    Every rank of `group` calls it with the same model, and trains on its own tokens. Create the
    optimizer afterwards, and call `average_gradients` after backward. For tensor parallelism, call
    `tensor_parallel.parallelize` first: sharded feed-forward networks stay sharded.

    Raises ValueError for anything but a GPT with experts, experts that the ranks do not divide, and
    on every rank if the models differ.
    """
    _, ranks = check_group(group)
    if not isinstance(model, GPT) or not model.config.experts:
        given = type(model).__name__
        raise ValueError(f"model={given}: must be a GPT of shardlab.gpt.model with config.experts")
    if hasattr(model, "expert_group"):
        raise ValueError("model: must have all experts, but they are sharded already")
    check_experts(model.config.experts, ranks)
    check_same(group, model=model, config=model.config)
    for block in model.blocks:
        if isinstance(block.ffn, Experts):
            block.ffn = ExpertParallel(block.ffn, group)
    model.expert_group = group
    return model


def check_experts(experts: int, ranks: int) -> None:
    """Raise ValueError unless the number of ranks divides the number of experts."""
    if experts % ranks:
        raise ValueError(f"experts={experts}: must be a multiple of the {ranks} ranks")


def own_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of this rank's experts, which no other rank of the group has."""
    layers = [module for module in model.modules() if isinstance(module, ExpertParallel)]
    return [parameter for layer in layers for parameter in layer.experts.parameters()]


@torch.no_grad()
def average_gradients(model: GPT, data: Group, copies: Group | None = None) -> None:
    """Average gradients of the ranks' mean losses over all ranks, after backward.

    data: all ranks with tokens of their own. copies: the ranks of `data` that have the same experts
    as this one; None: no other rank has. Gradients of replicated parameters are averaged over
    `data`. An expert's gradient is already a sum over its expert group's ranks: it is summed over
    `copies` and divided by the size of `data`.

    Raises ValueError unless the size of `data` is that of the expert group times that of `copies`.
    """
    (_, ranks), (_, shards) = check_group(data, "data"), check_group(_get_group(model))
    several = 1 if copies is None else check_group(copies, "copies")[1]
    if ranks != shards * several:
        what = f"must have {shards} * {several} (ranks of the expert group, and of copies)"
        raise ValueError(f"data has {ranks} ranks: {what}")
    own = own_parameters(model)
    mine = {id(parameter) for parameter in own}
    buckets.average_gradients((p for p in model.parameters() if id(p) not in mine), data)
    gradients = [parameter.grad for parameter in own if parameter.grad is not None]
    if copies is not None:
        buckets.all_reduce_gradients(gradients, copies, scale=1 / ranks)
    else:
        for gradient in gradients:
            gradient /= ranks


# Load balancing of the experts.


class RoutingRecord(NamedTuple):
    """A router's scores and choices in one forward."""

    router: Router
    scores_BSE: Tensor
    chosen_BSC: Tensor  # before full experts drop choices

    @property
    def count_E(self) -> Tensor:
        """Number of tokens that chose each expert."""
        chosen_X = self.chosen_BSC.flatten()
        count_E = chosen_X.new_zeros(self.scores_BSE.shape[-1])
        return count_E.index_add_(0, chosen_X, torch.ones_like(chosen_X))

    @property
    def dropped_BS(self) -> Tensor:
        """Number of each token's dropped choices."""
        return (self.router.apply_capacity(self.chosen_BSC) < 0).sum(-1)


@contextmanager
def record_routing(model: nn.Module) -> Iterator[list[RoutingRecord]]:
    """Record each router's outputs inside this context, in order of layers; yield the list.

    With several micro-batches, run all of a step inside: functions that take the list treat a
    router's records as one batch.
    """
    routed: list[RoutingRecord] = []

    def record_result(router: Router, _: Any, result: tuple[Tensor, Tensor, Tensor]) -> None:
        routed.append(RoutingRecord(router, *result[:2]))

    routers = [module for module in model.modules() if isinstance(module, Router)]
    hooks = [router.register_forward_hook(record_result) for router in routers]
    try:
        yield routed
    finally:
        for hook in hooks:
            hook.remove()


def group_by_router(routed: Sequence[RoutingRecord]) -> dict[Router, list[RoutingRecord]]:
    """Group the records by router, in order of layers: one record for each micro-batch."""
    found: dict[Router, list[RoutingRecord]] = {}
    for one in routed:
        found.setdefault(one.router, []).append(one)
    return found


@torch.no_grad()
def compute_loads(routed: Sequence[RoutingRecord], group: Group | None = None) -> Tensor:
    """Return each expert's share of all choices, [L, E], over all tokens of `group`."""
    count_LE = torch.stack(
        [sum(one.count_E for one in each) for each in group_by_router(routed).values()]
    )
    if group is not None:
        check_group(group)
        dist.all_reduce(count_LE, group=group)  # [L, E], integers
    return count_LE / count_LE.sum(-1, keepdim=True)


def balancing_loss(routed: Sequence[RoutingRecord], group: Group | None = None) -> Tensor:
    """Return the sum over layers of E * sum over experts of (load * mean score); L if balanced.

    Switch, equations 4 to 6. The load is a count without gradient; the score's gradient lowers the
    scores of heavily loaded experts. A product of two means over tokens is no mean over tokens, so
    all ranks use the load of all tokens (`group`: all ranks with own tokens): then the mean of the
    ranks' results is a single process's. A token's scores are divided by their sum, for sigmoids.
    """
    load_LE = compute_loads(routed, group)
    scores = [
        torch.cat([one.scores_BSE.flatten(0, 1) for one in each])
        for each in group_by_router(routed).values()
    ]
    fractions = [scores_TE / scores_TE.sum(-1, keepdim=True) for scores_TE in scores]
    score_LE = torch.stack([fraction_TE.mean(0) for fraction_TE in fractions])
    return load_LE.shape[-1] * (load_LE * score_LE).sum()


@torch.no_grad()
def update_bias(routed: Sequence[RoutingRecord], rate: float, group: Group | None = None) -> None:
    """Raise the bias of experts below a fair load by `rate` and lower the others', after a step.

    The size of the difference does not matter (Wang et al., Algorithm 1). Call it once per step,
    with all micro-batches in `routed`. The bias changes only the choice of experts, so balancing
    adds no gradient that would distort the scores.
    """
    load_LE = compute_loads(routed, group)
    for router, load_E in zip(group_by_router(routed), load_LE, strict=True):
        router.bias_E += rate * (1 / len(load_E) - load_E).sign()


def _get_group(model: nn.Module) -> Group:
    group = getattr(model, "expert_group", None)
    if group is None:
        kind = type(model).__name__
        raise ValueError(f"model={kind}: must be a model that `parallelize` returned")
    return group
