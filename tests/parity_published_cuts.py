"""Published silent bugs of models that are cut: along matrices, sequences, layers and experts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from parity_published import (
    BATCH,
    EXPERTS,
    INNER,
    WIDTH,
    WORDS,
    Net,
    Sparse,
    cross_entropy,
    here,
    mine,
    plain,
    plain_clipped,
    plain_sparse,
    plain_sparse_clipped,
    scale_to,
    sum_gradients,
    summed,
    targets,
    thread,
    tokens,
    train,
    zigzag,
)
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce as differentiable_all_reduce
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from shardlab import sequence_parallel as sp
from shardlab import tensor_parallel as tp

LOSS = r"backward (head)?$"


def cut(net: Net, row: type = tp.RowLinear, edges: Any = None) -> Net:
    """The block's two matrices over all ranks."""
    enter, leave = (edges.enter, edges.leave) if edges else (tp.copy_to, tp.reduce_from)
    net.up = tp.ColumnLinear.from_plain(net.up, dist.group.WORLD, enter)
    net.down = row.from_plain(net.down, dist.group.WORLD, leave)
    return net


# Tensor parallelism

SMOOTHING = 0.1


def smoothed(nll: Tensor, mean: Tensor, words: int) -> Tensor:
    """Of a token's loss, and the mean of its log-probabilities over the vocabulary."""
    share = SMOOTHING * words / (words - 1)
    return ((1 - share) * nll - share * mean).mean()


def plain_smoothed(watch: Any) -> None:
    def backward(net: Net, step: int) -> None:
        x = tokens(step)
        logp = net(x).log_softmax(-1)
        nll = -logp.gather(-1, targets(x)[..., None])[..., 0]
        smoothed(nll, logp.mean(-1), WORDS).backward()

    train(watch, Net(), backward)


@thread("Megatron-LM 737", 2, plain_smoothed, LOSS, "every output was right: the loss",
        "label smoothing averages over the rank's own part of the vocabulary")  # fmt: skip
def vocabulary(watch: Any, wrong: bool) -> None:
    net, (rank, ranks), world = Net(), here(), dist.group.WORLD
    net.head = tp.ColumnLinear.from_plain(net.head, world)

    def backward(net: Net, step: int) -> None:
        x = tokens(step)
        part, y, size = net(x), targets(x), WORDS // ranks
        shift = part.detach().max(-1).values
        dist.all_reduce(shift, dist.ReduceOp.MAX)
        lse = tp.reduce_from((part - shift[..., None]).exp().sum(-1), world).log() + shift
        hit = part.gather(-1, (y % size)[..., None])[..., 0] * (y // size == rank)
        total = part.sum(-1) if wrong else tp.reduce_from(part.sum(-1), world)
        words = size if wrong else WORDS
        smoothed(lse - tp.reduce_from(hit, world), total / words - lse, words).backward()

    train(watch, net, backward)


@thread("xtuner 1004", 2, plain, "backward act$", "2 times .*sum over 2 ranks",
        "torch.distributed.nn's all_reduce sums in backward, too")  # fmt: skip
def twice_summed(watch: Any, wrong: bool) -> None:
    net = cut(Net())
    if wrong:
        net.down.leave = lambda x, group: differentiable_all_reduce(x, group=group)
    train(watch, net)


class EarlyBias(tp.RowLinear):
    """Adds its bias before the sum."""

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(F.linear(x, self.weight, self.bias), self.group)


@thread("slapo 10", 2, plain, "forward down$", r"down\.bias is in it 2 times",
        "the replicated bias is added before the sum")  # fmt: skip
def early_bias(watch: Any, wrong: bool) -> None:
    train(watch, cut(Net(), EarlyBias if wrong else tp.RowLinear))


class SharedBias(tp.RowLinear):
    """Adds a part of its bias before the sum."""

    straight = True

    def forward(self, x: Tensor) -> Tensor:
        b = self.bias / dist.get_world_size(self.group)
        b = self.bias + (b - self.bias).detach() if self.straight else b
        return self.leave(F.linear(x, self.weight, b), self.group)


@thread("torchtitan 4332", 4, plain, r"gradient down\.bias", "0.25 times .*4 ranks once too often",
        "bias / tp is differentiable: 1/tp of the bias's gradient")  # fmt: skip
def divided_bias(watch: Any, wrong: bool) -> None:
    net = cut(Net(), SharedBias)
    net.down.straight = not wrong
    train(watch, net)


def seeded_parts(*seeds: int) -> Tensor:
    """Rows of a weight of `up`, each of four parts by a seed of its own."""
    drawn = [torch.Generator().manual_seed(seed) for seed in seeds]
    return torch.cat([torch.randn(INNER // 4, WIDTH, generator=each) / 4 for each in drawn])


def plain_seeded(watch: Any) -> None:
    net = Net()
    net.up.weight.data.copy_(seeded_parts(1, 2, 3, 4))
    train(watch, net)


@thread("ms-swift 7944", 4, plain_seeded, r"weights up\.weight", "same .*one seed",
        "all ranks draw their parts of a matrix with one seed: its rank is 1/tp")  # fmt: skip
def one_seed(watch: Any, wrong: bool) -> None:
    net = cut(Net())
    seed = 1 if wrong else 1 + dist.get_rank()
    net.up.weight.data.copy_(seeded_parts(seed))
    train(watch, net)


# Along the sequence


def along(net: Net) -> Net:
    """Sequence parallelism: what is between the matrices sees its own positions."""
    return cut(net, edges=sp.AlongSequence())


def part_loss(net: Net, step: int, part: Any = None) -> None:
    """Of this rank's positions: its addend of the batch's mean."""
    x, y = tokens(step), targets(tokens(step))
    part = part or (lambda z: mine(z, 1))
    (cross_entropy(net(part(x)), part(y), "sum") / y.numel()).backward()


def sum_replicated(net: Net, without: str = " ") -> None:
    for name, p in net.named_parameters():
        if name.startswith(("embedding", "norm", "down.bias", "head")):
            p.grad = p.grad if name.startswith(without) else summed(p.grad)


@thread("Megatron-LM 1446", 2, plain, r"gradient norm\.", "nobody added them up over ranks 0, 1",
        "a norm's weight lacks the flag by which its gradient is summed")  # fmt: skip
def unsummed_norm(watch: Any, wrong: bool) -> None:
    after = lambda net: sum_replicated(net, "norm" if wrong else " ")  # noqa: E731
    train(watch, along(Net()), part_loss, after)


@contextlib.contextmanager
def forked(seed: int) -> Iterator[None]:
    """Random numbers of their own."""
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    yield
    torch.set_rng_state(state)


class PartsDrop(nn.Module):
    """Dropout of `parts` of the sequence, each by a seed of its own."""

    def __init__(self, seeds: list[int]) -> None:
        super().__init__()
        self.seeds = seeds

    def forward(self, x: Tensor) -> Tensor:
        dropped = []
        for seed, part in zip(self.seeds, x.chunk(len(self.seeds), 1), strict=True):
            with forked(seed):
                dropped.append(F.dropout(part, 0.5))
        return torch.cat(dropped, 1)


def plain_dropped(watch: Any) -> None:
    net = Net()
    net.drop = PartsDrop([1234, 1235])
    train(watch, net)


@thread("Megatron-LM 1256", 2, plain_dropped, "forward drop$", "drop the same",
        "`and` where a comma was meant: all ranks drop the same of their parts")  # fmt: skip
def same_masks(watch: Any, wrong: bool) -> None:
    net = along(Net())
    net.drop = nn.Dropout(0.5) if wrong else PartsDrop([1234 + dist.get_rank()])
    torch.manual_seed(1234)  # all ranks alike
    train(watch, net, part_loss, sum_replicated)


@thread("verl 4250", 2, plain, LOSS, "every output was right: the loss .*its targets",
        "labels are rolled by one after the sequence is cut")  # fmt: skip
def rolled_late(watch: Any, wrong: bool) -> None:
    def backward(net: Net, step: int) -> None:
        x = tokens(step)
        y = targets(zigzag(x)) if wrong else zigzag(targets(x))
        (cross_entropy(net(zigzag(x)), y, "sum") / x.numel()).backward()

    train(watch, Net(), backward, sum_gradients)


def one_position(x: Tensor) -> Tensor:
    """A mask: of each sequence, one token has a loss."""
    mask = torch.zeros(x.shape)
    mask[:, 3] = 1
    return mask


def masked(net: Net, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """The sum over what the mask leaves."""
    each = F.cross_entropy(net(x).flatten(0, 1), y.flatten(), reduction="none")
    return each @ mask.flatten()


def plain_masked(watch: Any) -> None:
    def backward(net: Net, step: int) -> None:
        x = tokens(step)
        (masked(net, x, targets(x), one_position(x)) / BATCH).backward()

    train(watch, Net(), backward)


@thread("Megatron-LM 7513", 4, plain_masked, "gradient ", "0.25 times .*4 ranks once too often",
        "a masked loss is divided by the shard's own count")  # fmt: skip
def own_count(watch: Any, wrong: bool) -> None:
    def backward(net: Net, step: int) -> None:
        x = tokens(step)
        mask = mine(one_position(x), 1)
        total = masked(net, mine(x, 1), mine(targets(x), 1), mask)
        count = mask.sum().clamp(min=1) if wrong else summed(mask.sum()) / dist.get_world_size()
        (total / count).backward()

    after = lambda net: sum_gradients(net, over=dist.get_world_size())  # noqa: E731
    train(watch, Net(), backward, after)


@thread("DeepSpeed 5555", 4, plain, "gradient ", "0.25 times .*4 ranks once too often",
        "gradients are divided by sp * dp where dp is right")  # fmt: skip
def divided_by_all(watch: Any, wrong: bool) -> None:
    over = dist.get_world_size() if wrong else 1
    train(watch, Net(), part_loss, lambda net: sum_gradients(net, over=over))


# Pipelines


class First(nn.Module):
    """All but the head."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        for name, child in net.named_children():
            if name != "head":
                setattr(self, name, child)

    forward = Net.body


class Last(nn.Module):
    def __init__(self, net: Net) -> None:
        super().__init__()
        self.head = net.head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def part(net: Net) -> nn.Module:
    """This rank's of two stages."""
    return (First, Last)[dist.get_rank()](net)


def schedule(stage: nn.Module, parts: int, over: float = 1.0, scale: bool = False) -> Any:
    """torch's own; over: what divides each micro-batch's loss."""
    staged = PipelineStage(stage, dist.get_rank(), 2, torch.device("cpu"))
    loss = lambda logits, y: cross_entropy(logits, y) / over  # noqa: E731
    return ScheduleGPipe(staged, parts, loss, scale_grads=scale)


def run(pipe: Any, x: Tensor) -> None:
    """Forward and backward of a batch."""
    pipe.step(x) if dist.get_rank() == 0 else pipe.step(target=targets(x))


def plain_accumulated(watch: Any) -> None:
    def backward(net: Net, step: int) -> None:
        for number in range(3):
            x = tokens(number)
            (cross_entropy(net(x), targets(x)) / 3).backward()

    train(watch, Net(), backward)


@thread("torchtitan 1733", 2, plain_accumulated, "gradient ", "where all should count alike",
        "each step of the schedule divides all of .grad again")  # fmt: skip
def divided_again(watch: Any, wrong: bool) -> None:
    stage = part(Net())
    pipe = schedule(stage, 2, over=3 if wrong else 6, scale=wrong)

    def backward(net: nn.Module, step: int) -> None:
        for number in range(3):
            run(pipe, tokens(number))

    train(watch, stage, backward)


LENGTHS = 4, 4, 6


def plain_lengths(watch: Any) -> None:
    def backward(net: Net, step: int) -> None:
        for number, length in enumerate(LENGTHS):
            x = tokens(number, length)
            (cross_entropy(net(x), targets(x)) / 3).backward()

    train(watch, Net(), backward)


@thread("Automodel 3530", 2, plain_lengths, "gradient ", "where all should count alike",
        "a new sequence length begins new stages, and wipes what was accumulated")  # fmt: skip
def wiped(watch: Any, wrong: bool) -> None:
    stage = part(Net())

    def backward(net: nn.Module, step: int) -> None:
        pipe, last = None, 0
        for number, length in enumerate(LENGTHS):
            if length != last:
                pipe, last = schedule(net, 2, over=6), length
                for p in net.parameters():
                    p.grad = None if wrong else p.grad
            run(pipe, tokens(number, length))

    train(watch, stage, backward)


@thread("torchtitan 596", 2, plain_clipped, "gradient ", "clipped by a norm of its own",
        "the norm is that of a stage's parameters alone")  # fmt: skip
def stage_norm(watch: Any, wrong: bool) -> None:
    stage = part(Net())
    pipe = schedule(stage, 2, over=2)

    def after(stage: nn.Module) -> None:
        squares = sum(p.grad.square().sum() for p in stage.parameters())
        scale_to(stage, (squares if wrong else summed(squares)).sqrt())

    train(watch, stage, lambda stage, step: run(pipe, tokens(step)), after)


def tied_net() -> Net:
    net = Net()
    net.embedding.weight.data.mul_(0.5)
    net.head.weight = net.embedding.weight
    return net


def plain_tied(watch: Any) -> None:
    train(watch, tied_net())


@thread("Megatron-LM 4641", 2, plain_tied, r"update embedding\.weight", "another optimizer",
        "Muon updates the copy on the last stage, Adam the one on the first")  # fmt: skip
def other_rule(watch: Any, wrong: bool) -> None:
    net, rank = tied_net(), dist.get_rank()
    stage = part(net)
    pipe, ends = schedule(stage, 2, over=2), net.embedding.weight
    parameters = [*stage.parameters()]
    if wrong and rank:
        optimizer = torch.optim.Muon(parameters, 1e-2)
    else:
        optimizer = torch.optim.AdamW(parameters, 1e-2, foreach=False)

    def after(stage: nn.Module) -> None:
        ends.grad = summed(ends.grad)

    train(watch, stage, lambda stage, step: run(pipe, tokens(step)), after, optimizer)


# Experts on ranks


class Parted(Sparse):
    """Of four experts each rank has its own; tokens are on all."""

    def __init__(self, sums: bool = True) -> None:
        rank, ranks = here()
        self.sums, share = sums, EXPERTS // ranks
        super().__init__(range(rank * share, rank * share + share))

    def mixed(self, x: Tensor, score: Tensor) -> Tensor:
        world = dist.group.WORLD
        if self.sums:  # the ranks' parts of gradients
            x, score = tp.copy_to(x, world), tp.copy_to(score, world)
        return tp.reduce_from(super().mixed(x, score), world)


@thread("transformers 48205", 2, plain_sparse, r"(backward|gradient) (router|embedding)",
        "nobody added", "a rank's gradient of the scores covers its own experts alone")  # fmt: skip
def unsummed_scores(watch: Any, wrong: bool) -> None:
    train(watch, Parted(sums=not wrong))


def squares(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Of gradients that all ranks have, and of this rank's experts'."""
    both = [torch.zeros(()), torch.zeros(())]
    for name, p in model.named_parameters():
        both["experts" in name] += p.grad.square().sum()
    return both[0], both[1]


NORM = "by the same factor .clipped at another norm"


@thread("Megatron-LM 5916", 2, plain_sparse_clipped, "gradient ", NORM,
        "the filter of duplicates leaves out the experts of all ranks but the first")  # fmt: skip
def filtered(watch: Any, wrong: bool) -> None:
    def after(model: nn.Module) -> None:
        dense, own = squares(model)
        first = dist.get_rank() == 0
        total = (dense if first else 0 * dense) + (own if first or not wrong else 0 * own)
        scale_to(model, summed(total).sqrt())

    train(watch, Parted(), after=after)


@thread("DeepSpeed 8475", 2, plain_sparse_clipped, "gradient ", NORM,
        "the ranks' norms are averaged, as if all held the same parameters")  # fmt: skip
def averaged_norms(watch: Any, wrong: bool) -> None:
    def after(model: nn.Module) -> None:
        dense, own = squares(model)
        if wrong:
            scale_to(model, summed((dense + own).sqrt()) / dist.get_world_size())
        else:
            scale_to(model, (dense + summed(own)).sqrt())

    train(watch, Parted(), after=after)
