"""Cases that one plain step does not cover: samples, long sums, few bits, other programs."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from parity_programs import GPT2, Program, compare_cases, join_batch, make_data_row, plain_loss
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shardlab import data_parallel as dp
from shardlab.gpt.model import GPT
from shardtools import parity

ROW = make_data_row()

# A regression over the samples of an epoch, in batches.

SAMPLES, BATCH = 22, 8  # the last batch is a short one
LENGTHS = [1 + n % 5 for n in range(SAMPLES)]  # each sample's loss is the mean over so many targets


@dataclass(frozen=True)
class EpochProgram:
    micro: int = 1
    declares_samples: bool = True
    order: Callable[[int], int] = lambda epoch: epoch  # seed of an epoch's order
    share: Callable[[Tensor, int, int], Tensor] = lambda ids, rank, n: ids[rank::n]

    def yield_batches(self) -> Iterator[Tensor]:
        for epoch in range(2):
            seed = torch.Generator().manual_seed(self.order(epoch))
            yield from torch.randperm(SAMPLES, generator=seed).split(BATCH)

    def __call__(self, watch: Any) -> None:
        rank, n = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        data = torch.randn(SAMPLES, 6)
        wanted = torch.randn(SAMPLES, 5)
        has = torch.arange(5) < torch.tensor(LENGTHS)[:, None]
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
        optimizer = torch.optim.AdamW(model.parameters(), 0.05, weight_decay=0.1)
        watch(model, optimizer)
        for ids in self.yield_batches():
            mine = self.share(ids, rank, n)
            if self.declares_samples:
                watch.declare_samples(mine)
            optimizer.zero_grad()
            for part in mine.tensor_split(self.micro):
                errors = F.mse_loss(model(data[part]), wanted[part], reduction="none")[has[part]]
                (errors.sum() / (has[ids].sum() / n)).backward()
            if n > 1:
                dp.average_gradients(model, dist.group.WORLD)
            optimizer.step()


def pad_share(ids: Tensor, rank: int, n: int) -> Tensor:
    lacking = -len(ids) % (2 * n)
    return torch.cat((ids, ids[:lacking]))[rank::n]


# Other kinds of programs, in copies.


def take_share(x: Tensor) -> Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def make_tokens(step: int) -> tuple[Tensor, Tensor]:
    x, y = join_batch(ROW, step)
    return take_share(x), take_share(y)


def deal_equal_rows(change: Callable[[Tensor], None]) -> Callable[[int], tuple[Tensor, Tensor]]:
    def deal_batch(step: int) -> tuple[Tensor, Tensor]:
        pair = join_batch(ROW, step)
        change(pair[0])
        return tuple(z[dist.get_rank() :: dist.get_world_size()] for z in pair)

    return deal_batch


def set_equal_starts(x: Tensor) -> None:
    x[:, 0] = 1


def build_model() -> nn.Module:
    return ROW.build_model(GPT2)


def return_model(model: nn.Module) -> nn.Module:
    return model


def wrap_ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def wrap_ddp_partly(model: nn.Module) -> nn.Module:
    kind = nn.parallel.DistributedDataParallel
    kind._set_params_and_buffers_to_ignore_for_model(model, ["embedding.weight", "head.weight"])
    return kind(model)


def wrap_fsdp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def compile_first_block(model: nn.Module) -> nn.Module:
    model.blocks[0].compile(backend="aot_eager")
    return model


def compile_blocks(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        block.compile(backend="eager")
    model(make_tokens(0)[0])
    return model


@dataclass(frozen=True)
class CopiesProgram:
    model: Callable[[], nn.Module] = build_model
    batch: Callable[[int], tuple[Tensor, Tensor]] = make_tokens
    wrap: Callable[[nn.Module], nn.Module] = return_model
    prepare: Callable[[nn.Module], nn.Module] = return_model
    cast: bool = False
    micro: int = 1

    def __call__(self, watch: Any) -> None:
        warnings.filterwarnings("ignore")
        torch._dynamo.reset()  # code compiled before, without hooks, would be used again
        model = self.prepare(self.model())
        model = self.wrap(model) if dist.get_world_size() > 1 else model
        optimizer = ROW.make_optimizer(model)
        watch(model, optimizer)
        for step in range(2):
            optimizer.zero_grad()
            for x, y in zip(*(z.chunk(self.micro) for z in self.batch(step)), strict=True):
                with torch.autocast("cpu", torch.bfloat16) if self.cast else nullcontext():
                    loss = plain_loss(model(x), y) / self.micro
                loss.backward()
            optimizer.step()


# Long sums, and few bits.


@dataclass(frozen=True)
class SumProgram:
    rows: int
    dtype: torch.dtype = torch.float32
    times: float = 1.0
    lost: int = 0

    def __call__(self, watch: Any) -> None:
        torch.manual_seed(61)
        rank, n = dist.get_rank(), dist.get_world_size()
        model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4)).to(self.dtype)
        seed = torch.Generator().manual_seed(0)
        x = torch.randn(self.rows, 8, generator=seed).to(self.dtype)
        y = torch.randint(4, (self.rows,), generator=seed)
        y = y.index_fill(0, torch.arange(self.lost), -100)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        watch(model, optimizer)
        loss = F.cross_entropy(model(x.chunk(n)[rank]).float(), y.chunk(n)[rank], reduction="sum")
        (loss * self.times / self.rows).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()


def flip_rounding(gradient: Tensor) -> Tensor:
    """Move the gradient closest to a rounding boundary of 16 bits to the boundary's other side."""
    low = gradient.view(torch.int32).flatten() & 0xFFFF
    nearest = (low - 0x8000).abs().argmin()
    moved = gradient.view(torch.int32).flatten().clone()
    moved[nearest] += 0x8001 - low[nearest] if low[nearest] < 0x8000 else 0x7FFF - low[nearest]
    return moved.view(torch.float32).view(gradient.shape)


def make_muon_program(bits: bool = False, **options: Any) -> Program:
    def train(watch: Any) -> None:
        torch.manual_seed(0)
        model = nn.Linear(32, 32, bias=False)
        optimizer = torch.optim.Muon(
            model.parameters(), lr=0.01, momentum=0.0, nesterov=False, **options
        )
        watch(model, optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(64, 32)).square().mean().backward()
            if bits:
                model.weight.grad = flip_rounding(model.weight.grad)
            optimizer.step()

    return train


# A model that fits nowhere, at two layers.


def make_deep_program(wrap: Callable[[nn.Module], None]) -> Program:
    def train(watch: Any) -> None:
        with torch.device("meta"):
            model = GPT(replace(GPT2, layers=12))
        model = parity.keep_first_layers(model).to_empty(device="cpu")
        torch.manual_seed(0)
        for p in model.parameters():
            nn.init.normal_(p, std=0.1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        watch(model, optimizer)
        x, y = make_tokens(0)
        plain_loss(model(x), y).backward()
        wrap(model)
        optimizer.step()

    return train


def do_nothing(_: nn.Module) -> None:
    """Do nothing, in place of a forgotten call."""


PLAIN, FULL, CAST = EpochProgram(), CopiesProgram(), CopiesProgram(cast=True)
LONG, FEW_BITS = SumProgram(2**16), SumProgram(64, torch.bfloat16)
MUON, DEEP = make_muon_program(), make_deep_program(do_nothing)
ALIKE = {  # plain programs
    "rows begin alike": CopiesProgram(batch=deal_equal_rows(set_equal_starts)),
}
RIGHT: dict[str, tuple[Program, Program]] = {
    "uneven counts, accumulated": (PLAIN, EpochProgram(micro=2)),
    "samples are not told": (
        EpochProgram(declares_samples=False),
        EpochProgram(declares_samples=False),
    ),
    "autocast, FSDP2's policy": (CAST, replace(FULL, wrap=wrap_fsdp)),
    "compiled": (FULL, replace(FULL, wrap=wrap_ddp, prepare=compile_first_block)),
    "compiled before": (FULL, replace(FULL, wrap=wrap_ddp, prepare=compile_blocks)),
    "a sum over 2^16 rows": (LONG, LONG),
    "bfloat16": (FEW_BITS, FEW_BITS),
    "Muon, where a rounding turns": (MUON, make_muon_program(bits=True)),
    "two of 12 layers": (
        DEEP,
        make_deep_program(lambda m: dp.average_gradients(m, dist.group.WORLD)),
    ),
} | {name: (kind, replace(kind, wrap=wrap_ddp, micro=2)) for name, kind in ALIKE.items()}
REPORT_TEXTS = {  # reports on right programs
    "compiled before": "44 outputs were not compared, first the output of blocks.0",
    "two of 12 layers": "compared with a shortened model: 2 of 12 layers, same widths",
}
WRONG: dict[str, tuple[Program, Program, str, str]] = {  # and where it shows, in which words
    "the last batch is padded": (
        PLAIN, EpochProgram(share=pad_share), "2 samples ", "are counted too often",
    ),
    "the same share on each rank": (
        PLAIN, EpochProgram(share=lambda ids, rank, n: ids[::n]), "0 samples ",
        r"are held by no rank .ranks 0, 1 have the same",
    ),
    "no epoch told to the order": (
        PLAIN, EpochProgram(order=lambda epoch: 0), "3 samples ", "samples belong to step 1",
    ),
    "one row of 2^16 is lost": (LONG, replace(LONG, lost=1), "0 backward 1", "1 of"),
    "bfloat16, 5 % more": (FEW_BITS, replace(FEW_BITS, times=1.05), "0 gradient ", ""),
    "Muon in fewer iterations": (MUON, make_muon_program(ns_steps=2), "0 update ", ""),
    "two of 12 layers, not averaged": (DEEP, DEEP, "0 gradient ", "not averaged over ranks"),
} | {
    f"{name}, one not averaged": (
        kind, replace(kind, wrap=wrap_ddp_partly, micro=2), "0 gradient embedding.weight",
        "not averaged over ranks|each rank has its own",
    )
    for name, kind in ALIKE.items()
}  # fmt: skip
ALONE = EpochProgram(), EpochProgram(declares_samples=False)  # only one declares its samples


@cache
def compute_reports() -> dict[str, Any]:
    cases = RIGHT | WRONG | {"told by one alone": ALONE}
    return compare_cases({name: (*case[:2], 2) for name, case in cases.items()})


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_are_silent(name):
    report = compute_reports()[name]
    assert not isinstance(report, str) and report.is_equal and not report.unplaced, report
    assert REPORT_TEXTS.get(name, "") in str(report).replace("\n", " ")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", WRONG)
def test_what_one_step_does_not_show_is_found(name):
    _, _, place, words = WRONG[name]
    report = compute_reports()[name]
    key = report.first_finding.key
    assert re.search(place, f"{key.step} {key.phase} {key.name}"), report
    assert re.search(words, str(report).replace("\n", " ")), report


def test_samples_that_one_program_alone_tells_are_refused():
    assert "never called watch.declare_samples" in compute_reports()["told by one alone"]


def test_a_model_without_layers_cannot_be_cut_to_its_first_ones():
    with pytest.raises(ValueError, match="model=Linear: .* ModuleList"):
        parity.keep_first_layers(nn.Linear(2, 2))
