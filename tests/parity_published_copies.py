"""Published silent bugs of copies: averaging, accumulation, losses, optimizers, resumed runs."""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parity_published import (
    BATCH,
    EXPERTS,
    LENGTH,
    WIDTH,
    WORDS,
    Net,
    Sparse,
    average_gradients,
    cross_entropy,
    here,
    mine,
    plain_clipped,
    scale_to,
    share_loss,
    summed,
    targets,
    thread,
    tokens,
    train,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

# Norms


@thread("VeOmni 184", 4, plain_clipped, "gradient ", "by the same factor .clipped at another norm",
        "squares of shards are summed over their replicas, too")  # fmt: skip
def replicas_counted(watch: Any, wrong: bool) -> None:
    net, axes = Net(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    fully_shard(net, mesh=axes)

    def after(net: nn.Module) -> None:
        own = sum(p.grad.to_local().square().sum() for p in net.parameters())
        group = None if wrong else axes["shards"].get_group()
        scale_to(net, summed(own, group).sqrt())

    train(watch, net, share_loss, after)


# Auxiliary losses


def balance(model: Sparse, counts: Tensor, number: int) -> Tensor:
    """The auxiliary loss of `number` tokens: each expert's probability times its choices."""
    return EXPERTS * (model.probabilities.sum((0, 1)) * counts).sum() / number**2


def plain_balanced(watch: Any) -> None:
    def backward(model: Sparse, step: int) -> None:
        x = tokens(step)
        loss = cross_entropy(model(x), targets(x))
        (loss + balance(model, model.counts(), x.numel())).backward()

    train(watch, Sparse(), backward)


AUXILIARY = "loss that begins here|auxiliary"


@thread("Megatron-LM 3672", 4, plain_balanced, "(backward|gradient) router", AUXILIARY,
        "the balancing loss sums a rank's own probabilities over all ranks' tokens")  # fmt: skip
def balance_of_own(watch: Any, wrong: bool) -> None:
    def backward(model: Sparse, step: int) -> None:
        x = tokens(step)
        loss = cross_entropy(model(mine(x)), mine(targets(x)))
        own = balance(model, summed(model.counts()), x.numel())
        (loss + (own if wrong else own * dist.get_world_size())).backward()

    train(watch, Sparse(), backward, average_gradients)


class Riding(torch.autograd.Function):
    """A loss whose gradient begins where this one passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, Tensor, None]:
        return dx, torch.tensor(ctx.scale), None


class Scaled(Sparse):
    """Each batch's balancing loss rides on the probabilities."""

    scale, rides = 1.0, True

    def seen(self, probabilities: Tensor) -> Tensor:
        share = probabilities.mean((0, 1))
        ridden = Riding.apply(probabilities, 0.5 * (share * share.detach()).sum(), self.scale)
        return ridden if self.rides else probabilities


def plain_scaled(watch: Any) -> None:
    def backward(model: Sparse, step: int) -> None:
        for x in tokens(step).chunk(2):
            (cross_entropy(model(x), targets(x), "sum") / (BATCH * LENGTH)).backward()

    train(watch, Scaled(), backward)


@thread("Automodel 1412", 2, plain_scaled, "(backward|gradient) router", AUXILIARY,
        "what the auxiliary loss rides on is thrown away: its gradient never flows")  # fmt: skip
def thrown_away(watch: Any, wrong: bool) -> None:
    model = Scaled()
    model.scale, model.rides = float(dist.get_world_size()), not wrong

    def backward(model: Sparse, step: int) -> None:
        x = mine(tokens(step))
        loss = cross_entropy(model(x), targets(x), "sum") / (BATCH * LENGTH)
        (loss * dist.get_world_size()).backward()

    train(watch, model, backward, average_gradients)


# Counts


class Two(Net):
    """A second head, for the token after the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.later = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        body = self.body(x)
        return self.head(body), self.later(body)


def two_masks(x: Tensor) -> tuple[Tensor, Tensor]:
    """Which tokens count for each head: fewer in the second half."""
    main, later = torch.ones(x.shape), torch.ones(x.shape)
    main[BATCH // 2 :, 4:], later[:, 6:], later[BATCH // 2 :, 2:] = 0, 0, 0
    return main, later


def two_losses(model: Two, x: Tensor, y: Tensor, masks: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Of each head the sum over what its mask leaves."""
    found = []
    for logits, shift, mask in zip(model(x), (0, 1), masks, strict=True):
        each = cross_entropy(logits, y.roll(-shift, 1), "none")
        found.append(each @ mask.flatten())
    return found


def plain_two(watch: Any) -> None:
    def backward(model: Two, step: int) -> None:
        x = tokens(step)
        masks = two_masks(x)
        losses = two_losses(model, x, targets(x), masks)
        sum(loss / mask.sum() for loss, mask in zip(losses, masks, strict=True)).backward()

    train(watch, Two(), backward)


@thread("Megatron-LM 7452, finding 3", 2, plain_two, r"backward (later|\[1\])", "own count",
        "a second head's loss is divided by a rank's counts", shows="backward head")  # fmt: skip
def counts_of_rank(watch: Any, wrong: bool) -> None:
    def backward(model: Two, step: int) -> None:
        x, ranks = tokens(step), dist.get_world_size()
        masks = two_masks(x)
        main_all, later_all = (mask.sum() for mask in masks)
        own = tuple(mine(mask) for mask in masks)
        main, later = two_losses(model, mine(x), mine(targets(x)), own)
        share = own[0].sum() / own[1].sum() if wrong else main_all / later_all
        ((main + later * share) * ranks / main_all).backward()

    train(watch, Two(), backward, average_gradients)


SEQUENCES = 9, 2, 5, 1


def sequence(number: int) -> Tensor:
    """One of other lengths: [length]."""
    return tokens(number, 20)[0, : SEQUENCES[number]]


def plain_sequences(watch: Any) -> None:
    def backward(net: Net, step: int) -> None:
        for number in range(4):
            x = sequence(number)
            (cross_entropy(net(x), x, "sum") / sum(SEQUENCES)).backward()

    train(watch, Net(), backward)


@thread("transformers 34191", 2, plain_sequences, "gradient ", "own count",
        "means over each micro-batch's own tokens are averaged")  # fmt: skip
def mean_of_means(watch: Any, wrong: bool) -> None:
    def backward(net: Net, step: int) -> None:
        rank, ranks = here()
        for number in (2 * rank, 2 * rank + 1):
            x = sequence(number)
            loss = cross_entropy(net(x), x, "sum")
            (loss / (2 * len(x)) if wrong else loss * ranks / sum(SEQUENCES)).backward()

    train(watch, Net(), backward, average_gradients)


class Center(nn.Module):
    """Without the mean over the batch; weighted: by how many rows each rank has."""

    weighted, parted = True, False

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean((0, 1))
        if self.parted:
            rows = x.shape[0] if self.weighted else 1
            mean = summed(mean * rows) / summed(torch.tensor(float(rows)))
        return x - mean


def plain_centered(watch: Any) -> None:
    net = Net()
    net.drop = Center()
    train(watch, net, lambda net, step: uneven_loss(net, tokens(step)[:3]))


def uneven_loss(net: Net, x: Tensor) -> None:
    """This process's addend of a mean over three rows."""
    (cross_entropy(net(x), targets(x), "sum") / (3 * LENGTH)).backward()


@thread("pytorch 162692", 2, plain_centered, "forward drop$", "every row is off by the same",
        "the mean of an unevenly cut tensor is the mean of the ranks' means")  # fmt: skip
def uneven_mean(watch: Any, wrong: bool) -> None:
    net = Net()
    net.drop = Center()
    net.drop.parted, net.drop.weighted = True, not wrong

    def after(net: Net) -> None:
        for p in net.parameters():
            p.grad = summed(p.grad)

    train(watch, net, lambda net, step: uneven_loss(net, mine(tokens(step)[:3])), after)


# Accumulation

MICRO = 4


def micro_loss(net: nn.Module, number: int, of: Any = lambda x: x) -> Tensor:
    """A micro-batch's, or of this rank's part of it."""
    x = tokens(number)
    return cross_entropy(net(of(x)), of(targets(x))) / MICRO


def plain_micro(watch: Any) -> None:
    def backward(net: Net, step: int) -> None:
        for number in range(MICRO):
            micro_loss(net, number).backward()

    train(watch, Net(), backward)


@thread("build-nanogpt 30", 2, plain_micro, "gradient ", "where all should count alike",
        "the flag that DDP reads in forward is set after it")  # fmt: skip
def flag_too_late(watch: Any, wrong: bool) -> None:
    def backward(net: Any, step: int) -> None:
        for number in range(MICRO):
            if not wrong:
                net.require_backward_grad_sync = number == MICRO - 1
            loss = micro_loss(net, number, mine)
            net.require_backward_grad_sync = number == MICRO - 1
            loss.backward()

    train(watch, DistributedDataParallel(Net()), backward)


@thread("DeepSpeed 1800", 2, plain_micro, "gradient ", "bfloat16",
        "gradients of micro-batches are added up in bfloat16")  # fmt: skip
def added_in_bf16(watch: Any, wrong: bool) -> None:
    def backward(net: Net, step: int) -> None:
        total = [torch.zeros_like(p).bfloat16() if wrong else 0 * p for p in net.parameters()]
        for number in range(MICRO):
            net.zero_grad()
            micro_loss(net, number, mine).backward()
            for one, p in zip(total, net.parameters(), strict=True):
                one.data += p.grad.to(one.dtype)
        for one, p in zip(total, net.parameters(), strict=True):
            p.grad = one.detach().float()

    train(watch, Net(), backward, average_gradients)


# Over several steps


def scheduled(watch: Any, net: Net, backward: Any, after: Any, times: int) -> None:
    """Three steps of SGD, whose rate falls; times: that the schedule is stepped after each."""
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=8)
    watch(net, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        backward(net, step)
        after(net)
        optimizer.step()
        for _ in range(times):
            falling.step()


def plain_scheduled(watch: Any) -> None:
    def backward(net: Net, step: int) -> None:
        x = tokens(step)
        cross_entropy(net(x), targets(x)).backward()

    scheduled(watch, Net(), backward, lambda net: None, 1)


@thread("transformers 24088", 2, plain_scheduled, "1 update ", "the step's size",
        "the schedule is stepped once a process: the rate falls n times as fast")  # fmt: skip
def falls_too_fast(watch: Any, wrong: bool) -> None:
    scheduled(watch, Net(), share_loss, average_gradients, 2 if wrong else 1)


def first_steps(net: Any, optimizer: Any, steps: int, backward: Any, after: Any) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        backward(net, step)
        after(net)
        optimizer.step()


def plain_resumed(watch: Any) -> None:
    """Goes on, where the other one resumes."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2, foreach=False)

    def whole(net: Net, step: int) -> None:
        x = tokens(step)
        cross_entropy(net(x), targets(x)).backward()

    first_steps(net, optimizer, 3, whole, lambda net: None)
    train(watch, net, lambda net, step: whole(net, 3 + step), optimizer=optimizer)


@thread("KempnerForge 115", 2, plain_resumed, "update ", "moments|state",
        "a fresh optimizer's state_dict is empty, so nothing is loaded into it")  # fmt: skip
def moments_lost(watch: Any, wrong: bool) -> None:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)

    def built() -> tuple[Net, Any]:
        net = Net()
        return net, torch.optim.AdamW(net.parameters(), 1e-2, foreach=False)

    def state(net: Net, optimizer: Any) -> dict[str, Any]:
        if wrong:
            return {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
        return dict(zip(("model", "optimizer"), get_state_dict(net, optimizer), strict=True))

    net, optimizer = built()
    first_steps(net, optimizer, 3, share_loss, average_gradients)
    dcp.save(state(net, optimizer), checkpoint_id=folder[0])
    net, optimizer = built()
    loaded = state(net, optimizer)
    dcp.load(loaded, checkpoint_id=folder[0])
    if wrong:
        net.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
    else:
        set_state_dict(net, optimizer, model_state_dict=loaded["model"],
                       optim_state_dict=loaded["optimizer"])  # fmt: skip
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    resumed = lambda net, step: share_loss(net, 3 + step)  # noqa: E731
    train(watch, net, resumed, average_gradients, optimizer)


# Data of a resumed epoch

ROWS, SHARE = 32, 4  # of the data; of a rank's batch


def rows(epoch: int, batch: int, rank: int) -> Tensor:
    """Of the data, what a rank of two has in a batch of an epoch: [share, length]."""
    sampler = DistributedSampler(range(ROWS), 2, rank, seed=7)
    sampler.set_epoch(epoch)
    everything = torch.cat([tokens(n) for n in range(ROWS // BATCH)])
    return everything[[*sampler][batch * SHARE : (batch + 1) * SHARE]]


def plain_second_epoch(watch: Any) -> None:
    """The second epoch's third batch."""

    def backward(net: Net, step: int) -> None:
        x = torch.cat([rows(1, 2 + step, rank) for rank in (0, 1)])
        cross_entropy(net(x), targets(x)).backward()

    train(watch, Net(), backward)


@thread("accelerate 4071", 2, plain_second_epoch, "forward embedding", "is it the same batch",
        "a loader that is resumed within an epoch shuffles as in the first one",
        shows="backward (head)?$")  # fmt: skip
def shuffled_anew(watch: Any, wrong: bool) -> None:
    def backward(net: Net, step: int) -> None:
        x = rows(0 if wrong else 1, 2 + step, dist.get_rank())
        cross_entropy(net(x), targets(x)).backward()

    train(watch, Net(), backward, average_gradients)
