"""Published silent bugs of copies, pipelines and experts, held out: see its neighbour."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from parity_published import (
    EXPERTS,
    Net,
    Sparse,
    average_gradients,
    cross_entropy,
    here,
    mine,
    plain,
    plain_clipped,
    plain_sparse,
    plain_sparse_clipped,
    scale_to,
    share_loss,
    sum_gradients,
    summed,
    targets,
    tokens,
    train,
)
from parity_published_cuts import (
    First,
    Last,
    Parted,
    PartsDrop,
    part,
    schedule,
    squares,
)
from parity_published_held_out import Gathered, held_out, pairs
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from shardlab import sequence_parallel as sp
from shardlab import tensor_parallel as tp

# Pipelines


@held_out("pytorch 144352", 2, plain, "gradient ", "4 micro-batches|4 times already",
          "micro-batches' means are summed")  # fmt: skip
def summed_means(watch: Any, wrong: bool) -> None:
    stage = part(Net())
    pipe = schedule(stage, 4, over=1 if wrong else 4)

    def backward(stage: nn.Module, step: int) -> None:
        x = tokens(step)
        pipe.step(x) if dist.get_rank() == 0 else pipe.step(target=targets(x))

    train(watch, stage, backward)


@held_out("picotron 5", 4, plain, "gradient head", "nobody averaged them over ranks 1, 3",
          "the flag for synchronizing is set in a phase that the last stage has not")  # fmt: skip
def last_stage_alone(watch: Any, wrong: bool) -> None:
    rank, copies, line = dist.get_rank(), pairs([[0, 2], [1, 3]]), pairs([[0, 1], [2, 3]])
    stage = (First, Last)[rank % 2](Net())
    staged = PipelineStage(stage, rank % 2, 2, torch.device("cpu"), group=line)
    loss = lambda logits, y: cross_entropy(logits, y) / 2  # noqa: E731
    pipe = ScheduleGPipe(staged, 2, loss, scale_grads=False)

    def backward(stage: nn.Module, step: int) -> None:
        x, y = tokens(step).chunk(2)[rank // 2], targets(tokens(step)).chunk(2)[rank // 2]
        pipe.step(x) if rank % 2 == 0 else pipe.step(target=y)

    def after(stage: nn.Module) -> None:
        for p in stage.parameters() if rank % 2 == 0 or not wrong else ():
            p.grad = summed(p.grad, copies) / 2

    train(watch, stage, backward, after)


# Copies


@held_out("mistral 194", 2, plain, "forward embedding", "ranks 0, 1 have the same",
          "an own loader drops the sharding: every rank sees the same batch")  # fmt: skip
def same_batch(watch: Any, wrong: bool) -> None:
    def backward(net: Net, step: int) -> None:
        x = tokens(step).chunk(2)[0 if wrong else dist.get_rank()]
        cross_entropy(net(x), targets(x)).backward()

    train(watch, Net(), backward, average_gradients)


def plain_twice(watch: Any) -> None:
    def backward(net: Net, step: int) -> None:
        (half_loss(net, tokens(0)) + half_loss(net, tokens(1))).backward()

    train(watch, Net(), backward)


def half_loss(net: Net, x: Tensor) -> Tensor:
    return cross_entropy(net(x), targets(x)) / 2


@held_out("DeepSpeed 8224", 2, plain_twice, "gradient ", "where all should count alike",
          "what is reduced is what the first of two subgraphs gave")  # fmt: skip
def first_subgraph(watch: Any, wrong: bool) -> None:
    def backward(net: Net, step: int) -> None:
        kept = []
        for number in (0, 1):
            half_loss(net, mine(tokens(number))).backward()
            kept.append([p.grad.clone() for p in net.parameters()])
        for p, first in zip(net.parameters(), kept[0], strict=True):
            p.grad = first if wrong else p.grad

    train(watch, Net(), backward, average_gradients)


class BatchDrop(PartsDrop):
    """Dropout of parts of the batch, each by a seed of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


def plain_batch_dropped(watch: Any) -> None:
    net = Net()
    net.drop = BatchDrop([1, 2])
    train(watch, net)


@held_out("tt-metal 55947", 2, plain_batch_dropped, "forward drop$", "drop the same",
          "one seed for all ranks: copies drop the same of their parts",
          says="is another one")  # fmt: skip
def same_masks(watch: Any, wrong: bool) -> None:
    net = Net()
    net.drop = BatchDrop([1 if wrong else 1 + dist.get_rank()])
    train(watch, net, share_loss, average_gradients)


@held_out("AReaL 312", 2, plain_clipped, "gradient ", "clipped by a norm of its own",
          "the norm is that of the local shards")  # fmt: skip
def shard_norm(watch: Any, wrong: bool) -> None:
    net = Net()
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))

    def after(net: nn.Module) -> None:
        own = sum(p.grad.to_local().square().sum() for p in net.parameters())
        scale_to(net, (own if wrong else summed(own)).sqrt())

    train(watch, net, share_loss, after)


@held_out("miles 3231", 2, plain, "gradient ", "the loss was 32 times",
          "the count of tokens is thrown away: sums go backward")  # fmt: skip
def not_divided(watch: Any, wrong: bool) -> None:
    def backward(net: Net, step: int) -> None:
        x, y = mine(tokens(step)), mine(targets(tokens(step)))
        (cross_entropy(net(x), y, "sum") / (1 if wrong else y.numel())).backward()

    train(watch, Net(), backward, average_gradients)


# Experts


class Exchanged(Sparse):
    """Tokens go to the ranks of their experts and come back; each rank has its positions."""

    def __init__(self) -> None:
        rank, ranks = here()
        share = EXPERTS // ranks
        super().__init__(range(rank * share, rank * share + share))
        self.edges = sp.AlongSequence()

    def mixed(self, x: Tensor, score: Tensor) -> Tensor:
        world = dist.group.WORLD
        own, self.index = self.index, Gathered.apply(self.index, False)
        mixed = super().mixed(self.edges.enter(x, world), self.edges.enter(score, world))
        self.index = own
        return self.edges.leave(mixed, world)


@held_out("pytorch 160285", 2, plain_sparse, r"gradient experts", "2 times .*sum over 2 ranks",
          "experts' gradients are not divided by the ranks that their tokens come from",
          )  # fmt: skip
def undivided_experts(watch: Any, wrong: bool) -> None:
    def backward(model: Sparse, step: int) -> None:
        x, y = mine(tokens(step), 1), mine(targets(tokens(step)), 1)
        cross_entropy(model(x), y).backward()

    def after(model: Sparse) -> None:
        sum_gradients(model, without="experts", over=2)
        for p in model.experts.parameters():
            p.grad /= 1 if wrong else 2

    train(watch, Exchanged(), backward, after)


class Mispaired(Parted):
    """Scores by expert, choices by rank of choice: flattened, they pair wrongly."""

    def mixed(self, x: Tensor, score: Tensor) -> Tensor:
        by_expert = torch.zeros(*score.shape[:-1], EXPERTS).scatter(-1, self.index, score)
        return super().mixed(x, by_expert[..., :2])


@held_out("transformers 45473", 2, plain_sparse, "forward (head)?$",
          r"right until the output of experts",
          "scores are paired with other experts")  # fmt: skip
def mispaired(watch: Any, wrong: bool) -> None:
    train(watch, Mispaired() if wrong else Parted())


class InPairs(Parted):
    """Experts over the two ranks of a group."""

    def __init__(self, group: Any) -> None:
        self.group, share, rank = group, EXPERTS // 2, dist.get_rank(group)
        Sparse.__init__(self, range(rank * share, rank * share + share))
        self.group = group

    def mixed(self, x: Tensor, score: Tensor) -> Tensor:
        x, score = tp.copy_to(x, self.group), tp.copy_to(score, self.group)
        return tp.reduce_from(Sparse.mixed(self, x, score), self.group)


@held_out("Megatron-LM 1622", 4, plain_sparse, "gradient experts", "another group|other weights",
          "experts are reduced over the group of what is dense: unrelated ones mix",
          says="is another one")  # fmt: skip
def wrong_group(watch: Any, wrong: bool) -> None:
    ep, copies = pairs([[0, 1], [2, 3]]), pairs([[0, 2], [1, 3]])
    half = dist.get_rank() // 2

    def backward(model: Sparse, step: int) -> None:
        x, y = tokens(step).chunk(2)[half], targets(tokens(step)).chunk(2)[half]
        cross_entropy(model(x), y).backward()

    def after(model: Sparse) -> None:
        for name, p in model.named_parameters():
            group = ep if wrong and "experts" in name else copies
            p.grad = summed(p.grad, group) / 2

    train(watch, InPairs(ep), backward, after)


@held_out("ColossalAI 2192", 2, plain_sparse_clipped, "gradient ", "clipped by a norm of its own",
          "experts' norms are not summed: ranks clip by other factors",
          says="clipped at another norm")  # fmt: skip
def own_norms(watch: Any, wrong: bool) -> None:
    def after(model: nn.Module) -> None:
        dense, own = squares(model)
        scale_to(model, (dense + (own if wrong else summed(own))).sqrt())

    train(watch, Parted(), after=after)
