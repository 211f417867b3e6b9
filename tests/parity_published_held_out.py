"""More published silent bugs, of models that are cut: written when the rules were fixed.

With those of `parity_published_held_out_copies` they are 20, which were run once: all were found,
18 in their place and 12 in their words, and without the bug all were silent. Nothing was mended
for them after that; `shows` and `says` are what came instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from parity_published import (
    BATCH,
    INNER,
    LENGTH,
    WIDTH,
    Net,
    cross_entropy,
    mine,
    plain,
    sum_gradients,
    summed,
    targets,
    thread,
    tokens,
    train,
)
from parity_published_cuts import (
    along,
    cut,
    part_loss,
    sum_replicated,
)
from torch import Tensor, nn

from shardlab import sequence_parallel as sp
from shardlab import tensor_parallel as tp

held_out = partial(thread, held_out=True)

# Matrices


class HeadNorm(nn.Module):
    """Each head of four numbers by its size, times a weight that all heads share."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 4))

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (-1, 4))
        normed = heads / (heads.square().mean(-1, keepdim=True) + 1e-3).sqrt()
        return (normed * self.weight).flatten(-2)


def head_normed() -> Net:
    net = Net()
    net.act = HeadNorm()
    return net


def plain_head_norm(watch: Any) -> None:
    train(watch, head_normed())


@held_out("Megatron-LM 7452, finding 11", 2, plain_head_norm, r"gradient act\.weight",
          "nobody added them up over ranks 0, 1",
          "a norm over heads that are cut: its weight's gradient is summed for sequences alone",
          )  # fmt: skip
def unsummed_heads(watch: Any, wrong: bool) -> None:
    def after(net: nn.Module) -> None:
        net.act.weight.grad = net.act.weight.grad if wrong else summed(net.act.weight.grad)

    train(watch, cut(head_normed()), after=after)


class SharedKey(Net):
    """All heads are given one more vector of the token's, as in multi-head latent attention."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, 4, bias=False)
        self.enter: Callable[[Tensor], Tensor] = lambda x: x

    def body(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        normed = self.norm(x)
        shared = self.enter(self.shared(normed))[..., None, :]
        heads = self.up(normed).unflatten(-1, (-1, 4)) + shared
        return x + self.down(self.act(heads).flatten(-2))


def plain_shared_key(watch: Any) -> None:
    train(watch, SharedKey())


@held_out("torchtitan 1373", 2, plain_shared_key, "(backward|gradient) (shared|norm)",
          "nobody added",
          "what heads share is not summed over the ranks that have the heads")  # fmt: skip
def unsummed_key(watch: Any, wrong: bool) -> None:
    net = cut(SharedKey())
    if not wrong:
        net.enter = lambda x: tp.copy_to(x, dist.group.WORLD)
    train(watch, net)


@held_out("gpt-neox 1257", 2, plain, r"gradient norm\.", "0.5 times .*2 ranks once too often",
          "gradients of norms along the sequence are averaged where a sum is right")  # fmt: skip
def averaged_norms(watch: Any, wrong: bool) -> None:
    def after(net: Net) -> None:
        sum_replicated(net)
        for p in net.norm.parameters():
            p.grad /= 2 if wrong else 1

    train(watch, along(Net()), part_loss, after)


class Scattered(Net):
    """After the embedding each rank goes on with its positions."""

    scatter: Any = None

    def body(self, x: Tensor) -> Tensor:
        x = self.scatter(self.embedding(x))
        return x + self.down(self.act(self.up(self.norm(x))))


def pairs(of: list[list[int]]) -> Any:
    """This rank's group."""
    return dist.new_subgroups_by_enumeration(of)[0]


@held_out("Megatron-LM 7452, finding 7", 4, plain, "forward norm", "have the same",
          "scattered over one tensor-parallel group, gathered over another",
          shows="forward up$", says="rows are wrong")  # fmt: skip
def other_group(watch: Any, wrong: bool) -> None:
    given, known = pairs([[0, 2], [1, 3]]), pairs([[0, 1], [2, 3]])
    edges, net = sp.AlongSequence(), Scattered()
    net.up = tp.ColumnLinear.from_plain(net.up, given, edges.enter)
    net.down = tp.RowLinear.from_plain(net.down, given, edges.leave)
    at = lambda x, group: x.chunk(2, 1)[dist.get_rank(group)]  # noqa: E731
    net.scatter = lambda x: at(x, known if wrong else given)
    copy = dist.get_rank() % 2

    def backward(net: Net, step: int) -> None:
        x, y = tokens(step).chunk(2)[copy], targets(tokens(step)).chunk(2)[copy]
        (cross_entropy(net(x), at(y, given), "sum") / (BATCH * LENGTH)).backward()

    def after(net: Net) -> None:
        for name, p in net.named_parameters():
            cut_here = name.startswith("up") or name == "down.weight"
            p.grad = summed(p.grad, known if cut_here else None)

    train(watch, net, backward, after)


def permuted(rows: Tensor, head: int) -> Tensor:
    """Rows of each head: the two halves in turn, as rotary embeddings want them."""
    return rows.unflatten(0, (-1, 2, head // 2)).transpose(1, 2).flatten(0, 2)


def plain_permuted(watch: Any) -> None:
    net = Net()
    net.up.weight.data.copy_(permuted(net.up.weight.data, 8))
    train(watch, net)


@held_out("transformers 48519", 2, plain_permuted, r"weights up\.weight", "order|elsewhere",
          "queries are permuted for rotation with a head size that is the part's",
          shows="forward up$", says="is another one")  # fmt: skip
def permuted_part(watch: Any, wrong: bool) -> None:
    net = cut(Net())
    net.up.weight.data.copy_(permuted(net.up.weight.data, 4 if wrong else 8))
    train(watch, net)


EPSILON = 1e-3


class Sized(nn.Module):
    """By the root mean square of all inner numbers, of which a rank has some."""

    parts, early = 1, False

    def forward(self, x: Tensor) -> Tensor:
        mean = x.square().sum(-1, keepdim=True) / INNER
        if self.parts > 1:
            own = mean + EPSILON if self.early else mean
            whole = tp.reduce_from(tp.copy_to(own, dist.group.WORLD), dist.group.WORLD)
            return x / (whole + (0 if self.early else EPSILON)).sqrt()
        return x / (mean + EPSILON).sqrt()


def sized(parts: int, early: bool = False) -> Net:
    net = Net()
    net.act = Sized()
    net.act.parts, net.act.early = parts, early
    return net


def plain_sized(watch: Any) -> None:
    train(watch, sized(1))


@held_out("pytorch 149768", 2, plain_sized, "forward act$", "factor of its own",
          "a number that is added to addends is added on every rank",
          says="is another one")  # fmt: skip
def epsilon_twice(watch: Any, wrong: bool) -> None:
    train(watch, cut(sized(2, early=wrong)))


# Attention along the sequence


class Gathered(torch.autograd.Function):
    """All ranks' positions; summed: their gradients come back from all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, summed: bool) -> Tensor:
        ctx.summed, parts = summed, [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return mine(summed(dx) if ctx.summed else dx, 1), None


class Attention(nn.Module):
    """One causal head with a sink, which takes a share of each row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        names = "query", "key", "value"
        for name in names:
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=False))
        self.sink = nn.Parameter(torch.full((), 0.3))
        self.first, self.sinks = 0, True
        self.gather: Callable[[Tensor], Tensor] = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query(x), self.gather(self.key(x)), self.gather(self.value(x))
        scores = q @ k.mT / WIDTH**0.5
        own = torch.arange(q.shape[1])[:, None] + self.first
        scores = scores.masked_fill(torch.arange(k.shape[1]) > own, -torch.inf)
        if self.sinks:
            column = self.sink.expand(*scores.shape[:-1], 1)
            return torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ v
        return (scores + 0 * self.sink).softmax(-1) @ v


def attending() -> Net:
    net = Net()
    net.drop = Attention()
    return net


def plain_attending(watch: Any) -> None:
    train(watch, attending())


def ring() -> Net:
    """Each rank has its positions' queries."""
    net = attending()
    net.drop.first = dist.get_rank() * LENGTH // dist.get_world_size()
    net.drop.gather = lambda x: Gathered.apply(x, True)
    return net


@held_out("TransformerEngine 1557", 2, plain_attending, r"backward drop\.(key|value)",
          "between the two, a backward, a sum over ranks",
          "the ring's backward loses blocks")  # fmt: skip
def lost_blocks(watch: Any, wrong: bool) -> None:
    net = ring()
    net.drop.gather = lambda x: Gathered.apply(x, not wrong)
    train(watch, net, part_loss, sum_gradients)


@held_out("TransformerEngine 3551", 2, plain_attending, "forward drop$", "factor of its own",
          "the ring forgets the softmax's sink", says="is another one")  # fmt: skip
def no_sink(watch: Any, wrong: bool) -> None:
    net = ring()
    net.drop.sinks = not wrong
    train(watch, net, part_loss, sum_gradients)


DOCUMENTS = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])  # of each position


class Running(nn.Module):
    """The sum of all tokens of a document so far."""

    resets = True
    gather: Any = staticmethod(lambda x: x)

    def forward(self, x: Tensor) -> Tensor:
        sums = torch.ones(LENGTH, LENGTH).tril()
        if self.resets:
            sums = sums * (DOCUMENTS[:, None] == DOCUMENTS)
        everything = self.gather(x)
        rows = sums if everything is x else mine(sums)
        return rows @ everything


def running() -> Net:
    net = Net()
    net.drop = Running()
    return net


def plain_running(watch: Any) -> None:
    train(watch, running())


@held_out("LlamaFactory 10787", 2, plain_running, "forward drop$", r"of 64 rows are wrong \(",
          "a recurrence is not told where documents begin when the sequence is cut",
          says=r"8 of 32 rows are wrong \(3, 7, 11")  # fmt: skip
def crosses_documents(watch: Any, wrong: bool) -> None:
    net = running()
    net.drop.resets, net.drop.gather = not wrong, lambda x: Gathered.apply(x, True)
    train(watch, net, part_loss, sum_gradients)
