"""What one plain step does not show: samples, uneven counts, clipping, rates, ends of epochs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from parity_programs import GPT2, batch, plain_loss, row
from torch import Tensor, nn

from shardlab import data_parallel as dp
from shardlab import ranks
from shardlab import tensor_parallel as tp
from shardlab.gpt.model import GPT
from shardlab.layout import Layout
from shardtools import parity
from shardtools.parity.programs import judged, matched, recorded

DEEP = row("data", GPT2, Layout(dp=2))
Program = Callable[[Any], None]


def compared(cases: dict[str, tuple[Program, Program, int]]) -> dict[str, Any]:
    """By case, of a plain and a parallel program and ranks: its report. Starts are shared."""
    plain = {id(case[0]): case[0] for case in cases.values()}

    def references() -> dict[int, Any]:
        return {name: recorded(program) for name, program in plain.items()}

    (records,) = ranks.run(references, 1, device="cpu", timeout=600, show=False)
    found = {}
    for size in sorted({case[2] for case in cases.values()}):
        mine = {name: case for name, case in cases.items() if case[2] == size}

        def work(mine: dict = mine) -> dict[str, Any]:
            return {name: matched(case[1], records[id(case[0])]) for name, case in mine.items()}

        each = ranks.run(work, size, device="cpu", timeout=600, show=False)
        for name, case in mine.items():
            found[name] = verdict(records[id(case[0])], [one[name] for one in each])
    return found


def verdict(record: Any, matchers: list[Any]) -> Any:
    """A report, or the line that refuses."""
    try:
        return judged(record, matchers)
    except ValueError as error:
        return str(error)


# A regression over the samples of an epoch, in batches

SAMPLES, BATCH = 22, 8  # the last batch is a short one
LENGTHS = [1 + n % 5 for n in range(SAMPLES)]  # of how many targets each sample's loss is the mean


@dataclass(frozen=True)
class Job:
    """How a program goes through two epochs; as it stands it is right."""

    micro: int = 1
    clip: float = 0.0
    even: bool = False  # without the short last batch
    tell: bool = True
    counted: bool = True  # a loss is divided by the targets of all ranks and micro-batches
    rates: str = "a step"  # when the schedule goes on
    order: Callable[[int, int], int] = lambda epoch, rank: epoch  # the seed of an epoch's order
    share: Callable[[Tensor, int, int], Tensor] = lambda ids, rank, n: ids[rank::n]
    lr: Callable[[int], float] = lambda rank: 0.05
    sync: Callable[[nn.Module], None] = lambda m: dp.average_gradients(m, dist.group.WORLD)
    clips_first: bool = False

    def batches(self, rank: int) -> Iterator[Tensor]:
        for epoch in range(2):
            seed = torch.Generator().manual_seed(self.order(epoch, rank))
            order = torch.randperm(SAMPLES, generator=seed)
            yield from (b for b in order.split(BATCH) if not self.even or len(b) == BATCH)

    def __call__(self, watch: Any) -> None:
        rank, n = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        data = torch.randn(SAMPLES, 6)
        wanted = torch.randn(SAMPLES, 5)
        has = torch.arange(5) < torch.tensor(LENGTHS)[:, None]
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
        optimizer = torch.optim.AdamW(model.parameters(), self.lr(rank), weight_decay=0.1)
        rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        watch(model, optimizer)
        for ids in self.batches(rank):
            mine = self.share(ids, rank, n)
            if self.tell:
                watch.samples(mine)
            optimizer.zero_grad()
            for part in mine.tensor_split(self.micro):
                errors = F.mse_loss(model(data[part]), wanted[part], reduction="none")[has[part]]
                whole = has[ids].sum() / n if self.counted else errors.numel() * self.micro
                (errors.sum() / whole).backward()
                if self.rates == "a micro-batch":
                    rates.step()
            if self.clips_first and self.clip:
                nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            if n > 1:
                self.sync(model)
            if self.clip and not self.clips_first:
                nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            optimizer.step()
            if self.rates == "a step":
                rates.step()


def padded(ids: Tensor, rank: int, n: int) -> Tensor:
    """As torch's DistributedSampler makes shares alike."""
    lacking = -len(ids) % (2 * n)
    return torch.cat((ids, ids[:lacking]))[rank::n]


def dropped(ids: Tensor, rank: int, n: int) -> Tensor:
    return ids[: len(ids) // (2 * n) * 2 * n][rank::n]


PLAIN = Job()
EVEN = Job(even=True)
CLIPPED = Job(clip=0.1)
RIGHT = {  # a plain program, and a parallel one
    "uneven counts": (PLAIN, Job()),
    "uneven counts, accumulated": (PLAIN, Job(micro=2)),
    "accumulated in one process": (PLAIN, Job(micro=3)),
    "clipped": (CLIPPED, Job(clip=0.1, micro=2)),
    "samples are not told": (Job(tell=False), Job(tell=False)),
    "shares in a row": (PLAIN, Job(share=lambda ids, rank, n: ids.tensor_split(n)[rank])),
}
WRONG = {  # and where it shows, in which words
    "a mean of means": (PLAIN, Job(counted=False), "0 gradient ", "rank's own count"),
    "micro-batches of other counts": (
        EVEN, Job(even=True, micro=3, counted=False), "0 gradient ", "own count",
    ),
    "clipped before averaging": (
        CLIPPED, Job(clip=0.1, clips_first=True), "0 gradient ", "each was clipped",
    ),
    "rates go on by micro-batch": (
        EVEN, Job(even=True, micro=2, rates="a micro-batch"), "0 update ",
        "learning rate is 0.032, and 0.05",
    ),
    "a rate of a rank's own": (
        EVEN, Job(even=True, lr=lambda rank: 0.05 * (1 + rank)), "0 update ",
        "rank.? 1: .*learning rate is 0.1, and 0.05",
    ),
    "the last batch is padded": (PLAIN, Job(share=padded), "2 samples ", "count too often"),
    "the last batch is cut": (PLAIN, Job(share=dropped), "2 samples ", "are on no rank"),
    "the same share on each rank": (
        PLAIN, Job(share=lambda ids, rank, n: ids[::n]), "0 samples ",
        r"are on no rank .ranks 0, 1 have the same",
    ),
    "no epoch told to the order": (
        PLAIN, Job(order=lambda epoch, rank: 0), "3 samples ", "they are step 1's",
    ),
    "an order of each rank's own": (
        PLAIN, Job(order=lambda epoch, rank: epoch + 10 * rank), "0 samples ",
        "none of this step's",
    ),
    "samples told by one alone": (PLAIN, Job(tell=False), "", "never called watch.samples"),
}  # fmt: skip


@cache
def reports() -> dict[str, Any]:
    ranks_ = {"accumulated in one process": 1}
    return compared({n: (*c[:2], ranks_.get(n, 2)) for n, c in (RIGHT | WRONG).items()})


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", RIGHT)
def test_two_epochs_are_as_those_of_one_process(name):
    report = reports()[name]
    assert not isinstance(report, str) and report.equal, report
    assert report.compared > 50


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", WRONG)
def test_what_one_step_does_not_show_is_found(name):
    _, _, place, words = WRONG[name]
    report = reports()[name]
    assert re.search(words, str(report).replace("\n", " ")), report
    if place:
        key = report.first.key
        assert re.search(place, f"{key.step} {key.phase} {key.name}"), report


# An optimizer that computes in fewer bits than it is given


def turned(gradient: Tensor) -> Tensor:
    """The number that is nearest to the middle of two of 16 bits, moved to its other side."""
    low = gradient.view(torch.int32).flatten() & 0xFFFF
    nearest = (low - 0x8000).abs().argmin()
    moved = gradient.view(torch.int32).flatten().clone()
    moved[nearest] += 0x8001 - low[nearest] if low[nearest] < 0x8000 else 0x7FFF - low[nearest]
    return moved.view(torch.float32).view(gradient.shape)


BARE = {"momentum": 0.0, "nesterov": False}  # gradients themselves are cast


def by_muon(bits: bool = False, rule: Any = torch.optim.Muon, **options: Any) -> Program:
    """Three steps of a matrix; bits: in each, one number of 16 bits is another one."""

    def program(watch: Any) -> None:
        torch.manual_seed(0)
        model = nn.Linear(32, 32, bias=False)
        optimizer = rule(model.parameters(), lr=0.01, **options)
        watch(model, optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(64, 32)).square().mean().backward()
            if bits:
                model.weight.grad = turned(model.weight.grad)
            optimizer.step()

    return program


def test_a_rounding_that_an_optimizer_turns_is_no_mistake_and_another_rule_is_one():
    programs = {
        "bits": by_muon(bits=True, **BARE),
        "rule": by_muon(rule=torch.optim.AdamW),
        "fewer": by_muon(ns_steps=2, **BARE),
    }
    plain = by_muon(**BARE)
    found = compared({name: (plain, program, 1) for name, program in programs.items()})
    assert found["bits"].equal, found["bits"]
    assert "another optimizer's: AdamW made it, and Muon" in str(found["rule"])
    assert found["fewer"].first.key[:2] == (0, "update"), found["fewer"]


# What is said of a mistake


class Small(nn.Module):
    """Tokens to logits, times a number that is learned, too."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        other = kind == "other numbers"
        self.embed = nn.Embedding(12, 6, sparse=other)
        self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)
        self.head = nn.Linear(6, 12, bias=False)
        if kind == "tied":
            self.head.weight = self.embed.weight
        self.turn = nn.Parameter(torch.randn(6, dtype=torch.complex64 if other else None))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.enter = self.leave = self.after = lambda x: x
        self.between = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x)
        h = self.leave(self.down(self.up(self.between(self.enter(y))).tanh()))
        return self.after(self.head(y + (h * self.turn).abs())) * self.scale


def untie(model: Small) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


def cut(model: Small) -> None:
    """Cut `up` and `down`: `down` has addends in forward, and `between` in backward."""
    world = dist.group.WORLD
    for module, along in ((model.up, 0), (model.down, 1)):
        part = module.weight.detach().chunk(world.size(), along)[world.rank()]
        module.weight = nn.Parameter(part.clone())
    model.enter, model.leave = (partial(f, group=world) for f in (tp.copy_to, tp.reduce_from))


def turn_back(model: Small) -> None:
    """Give what comes after the head a wrong backward."""

    def after(x: Tensor) -> Tensor:
        x = x * 1
        x.register_hook(torch.abs)
        return x

    model.after = after


def add_up(model: nn.Module, over: float = 1, without: str = "-") -> None:
    for name, p in model.named_parameters():
        p.grad = p.grad.to_dense()
        if without not in name:
            dist.all_reduce(torch.view_as_real(p.grad) if p.is_complex() else p.grad)
            p.grad /= over


average = partial(add_up, over=2)


@dataclass(frozen=True)
class Steps:
    """Three steps of `Small`; without a share, all ranks do the same."""

    kind: str = ""
    change: Callable[[Small], None] = lambda model: None
    share: bool = False  # each rank has its part of a batch
    micro: int = 1
    over: int = 1  # what a micro-batch's mean is divided by
    end: Callable[[Small], None] = lambda model: None

    def __call__(self, watch: Any) -> None:
        rank, n = dist.get_rank(), dist.get_world_size()
        model = Small(self.kind)
        self.change(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        watch(model, optimizer)
        for step in range(3):
            x = torch.randint(12, (8, 5), generator=torch.Generator().manual_seed(step))
            model.zero_grad()
            for part in (x.chunk(n)[rank] if self.share else x).chunk(self.micro):
                loss = F.cross_entropy(model(part).flatten(0, 1), part.roll(-1, 1).flatten())
                (loss / self.over).backward()
            self.end(model)
            optimizer.step()


def fed(*numbers: int) -> Program:
    """Steps on batches that are given by number; 2 is nearly 0."""

    def program(watch: Any) -> None:
        torch.manual_seed(0)
        batches = torch.randn(3, 8, 6)
        batches[2] = batches[0] + batches[2] / 9
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        watch(model, optimizer)
        for number in numbers:
            optimizer.zero_grad()
            model(batches[number]).square().mean().backward()
            optimizer.step()

    return program


COPIES, OTHER = Steps(share=True, end=average), Steps("other numbers")
HALVES = Steps(micro=2, over=2)
SAID = {  # a plain and a parallel program; where it shows, in which words, and without which
    "complex and sparse": (OTHER, replace(COPIES, kind=OTHER.kind), "", "^equal", ""),
    "complex, not averaged": (
        OTHER, replace(COPIES, kind=OTHER.kind, end=partial(average, without="turn")),
        "0 gradient turn", "nobody averaged them over ranks 0, 1", "factor",
    ),
    "a number, not averaged": (
        Steps(), replace(COPIES, end=partial(average, without="scale")),
        "0 gradient scale", "nobody averaged them over ranks 0, 1", "factor",
    ),
    "one becomes two": (
        Steps("tied"), replace(COPIES, kind="tied", change=untie), "0 gradient embed.weight",
        "embed.weight and head.weight are one parameter in the plain program", "0, 0",
    ),
    "after addends": (
        Steps(), Steps(change=cut, end=lambda m: m.embed.weight.grad.mul_(2)),
        "0 gradient embed.weight", "2 times the right one", "began with",
    ),
    "a wrong backward": (
        Steps(), Steps(change=turn_back), "0 backward ", "right until .*: between the two",
        "right: the loss",
    ),
    "micro-batches": (
        Steps(), Steps(micro=2), "0 gradient ", "2 times .*: 2 micro-batches that", "2 ranks",
    ),
    "micro-batches in both": (
        HALVES, Steps(micro=2), "0 gradient ", "2 times .*: 2 micro-batches that", "2 ranks",
    ),
    "a sum over ranks": (
        HALVES, replace(HALVES, share=True, end=add_up), "0 gradient ",
        "2 times .* a sum over 2 ranks that was not averaged", "micro",
    ),
    "a step's batch": (
        fed(2, 1, 0), fed(2, 0, 0), "1 forward ",
        "nearest to that of step 3: are they that step's samples", "step 1",
    ),
}  # fmt: skip


@cache
def said() -> dict[str, Any]:
    return compared({name: (*case[:2], 2) for name, case in SAID.items()})


@pytest.mark.parametrize("name", SAID)
def test_words_say_what_the_mistake_is_and_nothing_that_misleads(name):
    _, _, place, words, unsaid = SAID[name]
    report = said()[name]
    text = str(report).replace("\n", " ")
    assert re.search(words, text), report
    assert not unsaid or not re.search(unsaid, text), report
    if place:
        assert re.search(place, "{} {} {}".format(*report.first.key)), report


# Long sums, and few bits


class Recurrent(nn.Module):
    """A recurrent net, whose gradients autocast rounds to 16 bits; some of them are tiny."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 16), nn.Linear(16, 8)
        self.inner = nn.RNN(16, 16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.embedding(x))[0]).flatten(0, 1)


def normed(dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model whose gradients are sums over all rows, one after the other."""
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4)).to(dtype)


@dataclass(frozen=True)
class Classified:
    """A step of a model on rows of a class each; in micro-batches the ranks' shares are added."""

    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    cast: bool = False
    times: float = 1.0
    lost: int = 0

    def __call__(self, watch: Any) -> None:
        torch.manual_seed(61)
        rank, n = dist.get_rank(), dist.get_world_size()
        model, (x, y) = self.model(), self.batch()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        watch(model, optimizer)
        rows, y = y.numel(), y.index_fill(0, torch.arange(self.lost), -100)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.cast):
            found = model(x.chunk(n)[rank]).float()
            loss = F.cross_entropy(found, y.chunk(n)[rank].flatten(), reduction="sum") / rows
        (loss * self.times).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()


def many(rows: int = 2**18, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    seed = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 8, generator=seed).to(dtype)
    return x, torch.randint(4, (rows,), generator=seed)


def sequences() -> tuple[Tensor, Tensor]:
    seed = torch.Generator().manual_seed(6100)
    return tuple(torch.randint(most, (8, 12), generator=seed) for most in (32, 8))


LONG = Classified(normed, many)
FEW_BITS = Classified(lambda: normed(torch.bfloat16), lambda: many(64, torch.bfloat16))
CAST = Classified(Recurrent, sequences, cast=True)
ROUNDED = {  # a plain program and a parallel one, and whether they are equal
    "a sum over 2^18 rows": (LONG, LONG, True),
    "of which one is lost": (LONG, replace(LONG, lost=1), False),
    "or that counts a thousandth more": (LONG, replace(LONG, times=1.001), False),
    "bfloat16": (FEW_BITS, FEW_BITS, True),
    "bfloat16, 5 % more": (FEW_BITS, replace(FEW_BITS, times=1.05), False),
    "autocast, recurrent": (CAST, CAST, True),
    "autocast, 5 % more": (CAST, replace(CAST, times=1.05), False),
}


@cache
def rounded() -> dict[str, Any]:
    return compared({name: (*case[:2], 2) for name, case in ROUNDED.items()})


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ROUNDED)
def test_what_rounds_is_no_mistake_however_long_a_sum_or_few_the_bits(name):
    report = rounded()[name]
    assert report.equal == ROUNDED[name][2], report


# A model that fits nowhere, at two layers


def deep(wrap: Callable[[nn.Module], nn.Module]) -> Program:
    def program(watch: Any) -> None:
        with torch.device("meta"):
            model = GPT(replace(GPT2, layers=12))
        model = parity.first_layers(model).to_empty(device="cpu")
        torch.manual_seed(0)
        for p in model.parameters():
            nn.init.normal_(p, std=0.1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        watch(model, optimizer)
        x, y = batch(DEEP, 0)
        share = slice(dist.get_rank(), None, dist.get_world_size())
        plain_loss(model(x[share]), y[share]).backward()
        wrap(model)
        optimizer.step()

    return program


def test_a_model_that_fits_nowhere_is_compared_at_two_layers():
    average = lambda m: dp.average_gradients(m, dist.group.WORLD)  # noqa: E731
    plain = deep(lambda m: None)
    right, wrong = compared(
        {"right": (plain, deep(average), 2), "wrong": (plain, deep(lambda m: None), 2)}
    ).values()
    assert right.equal and "compared at 2 of 12 layers, the same widths" in str(right), right
    assert not wrong.equal and "nobody averaged" in str(wrong)


def test_lists_within_a_layer_stay_and_a_model_without_layers_is_refused():
    layer = nn.Module()
    layer.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(8))
    model = nn.Module()
    model.layers = nn.ModuleList([layer, layer, layer])
    parity.first_layers(model, 1)
    assert len(model.layers) == 1 and len(layer.experts) == 8
    with pytest.raises(ValueError, match="model=Linear: it has no ModuleList of more than 2"):
        parity.first_layers(nn.Linear(2, 2))
