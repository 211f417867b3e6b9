"""Exercises of the lesson `parity`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardcourse.exercises import WrongAnswer, add_exercise
from shardcourse.exercises.forms import add_blanks, add_number, call_answer
from shardlab import ranks
from shardtools import parity
from shardtools.parity import places

add_number("times_allowed", 1.9e-3 / (12 * 2.1e-7), "times", rel_tol=0.02,
       success="Right: 754 times the tolerance, so it is a mistake.", hints={
    1.9e-3 / 2.1e-7: "That is 9,048 times the noise; twelve times the noise is still allowed.",
    1.9e-3 / (3 * 2.1e-7): "Only the largest of the three draws counts; 12 times it is allowed.",
})  # fmt: skip


# A small correct program, and copies of it with one wrong line.


def make_network() -> nn.Module:
    """Return a network that predicts one of 64 tokens from the token before; fixed weights."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Embedding(64, 16), nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 64)
    )
    return network.to(ranks.device())


def make_batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Yield two batches of 8 texts: 6 tokens each, and the tokens that follow (-100: ignored)."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        drawn = torch.randint(64, (8, 7), generator=generator)
        x, y = drawn[:, :-1], drawn[:, 1:].clone()
        y[5:, 2:] = -100  # the last texts are short
        yield x.to(ranks.device()), y.to(ranks.device())


def train_one_process(watch: Callable[..., Any]) -> None:
    """Train in one process: loss averaged over all targets, clipped gradients, AdamW."""
    model = make_network()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=False)
    watch(model, optimizer)
    for x, y in make_batches():
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def _make_program(mistake: str) -> Callable[..., None]:
    """Return the same program for ranks, with one mistake."""

    def train_on_ranks(watch: Callable[..., Any]) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        model, decay = make_network(), 0.1 if mistake == "decay" else 0.01
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=False, weight_decay=decay)
        watch(model, optimizer)
        for x, y in make_batches():
            mine = 0 if mistake == "share" else rank
            learned = (y != -100).sum()
            x, y = x.chunk(size)[mine], y.chunk(size)[mine]
            optimizer.zero_grad()
            total = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
            learned = (y != -100).sum() * size if mistake == "counts" else learned
            (total / learned).backward()
            if mistake == "clip":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            for p in model.parameters():
                dist.all_reduce(p.grad)
            if mistake != "clip":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

    return train_on_ranks


_MISTAKES = {"A": "decay", "B": "share", "C": "clip", "D": "counts"}


def compute_reports() -> dict[str, parity.Report]:
    """Return parity's reports on four programs that have one mistake each."""
    from shardtools.parity.programs import build_report, match_program, record_program

    (record,) = ranks.run(record_program, 1, train_one_process, show=False)
    programs = {name: _make_program(mistake) for name, mistake in _MISTAKES.items()}
    match_all = lambda: {name: match_program(p, record) for name, p in programs.items()}  # noqa: E731
    each = ranks.run(match_all, 2, show=False)
    return {name: build_report(record, [one[name] for one in each]) for name in _MISTAKES}


_HINTS = {
    "share": "Then rows of the batch would be held by no rank, before any gradient.",
    "counts": "Then backward would begin with a different factor on each rank.",
    "clip": "Then the result would contain the ranks' own gradients, each scaled differently.",
    "bucket": "Then only some parameters would have each rank's own gradient.",
    "decay": "Then all gradients would be right, and the first update would not.",
    "seed": "Then the weights would differ before the first step.",
}
add_blanks(
    "four_reports",
    _MISTAKES,
    success="Right, from one report each, without reading a program.",
    default_hint=f"Allowed are {', '.join(_HINTS)}.",
    hints={(name, given): words for name in _MISTAKES for given, words in _HINTS.items()},
)


# A way to shard rows that parity does not know.


def _list_dealt_rows(total: int, ranks_: int, rank: int) -> Tensor:
    return torch.arange(total).view(-1, 2)[rank::ranks_].flatten()


@add_exercise("my_cut")
def _(answer: Callable[..., Any]) -> str:
    for total, n, first in ((16, 2, 1), (24, 3, 1), (16, 4, 3), (16, 4, 1)):
        size, mine = total // n, _list_dealt_rows(total, n, first)
        case = f"size={size}, total={total}, first={first}"
        found = call_answer(lambda *a: list(answer(*a)), size, total, first)
        if not found:
            raise WrongAnswer(f"{case}: it proposes nothing.")
        if not any(x.equal(mine) for x in found):
            raise WrongAnswer(f"{case}: rank {first} holds the rows {mine.tolist()}: propose them.")
        if not found[0].equal(mine):
            raise WrongAnswer(
                f"{case}: `first` is the likeliest part. Begin with it, then the rest."
            )
        order = [(first + i) % n for i in range(n)]
        right = torch.cat([_list_dealt_rows(total, n, rank) for rank in order])
        if not torch.cat(found).equal(right):
            raise WrongAnswer(f"{case}: the parts should be those of ranks {order}, in this order.")
        whole = torch.randn(total, 3, generator=torch.Generator().manual_seed(n))
        with mock.patch.object(places, "CUTS", (*places.CUTS, answer)):
            proposed = places.propose_places((size, 3), (total, 3), first)
            if not any(place.take_from(whole).equal(whole[mine]) for place in proposed):
                raise WrongAnswer(f"{case}: as a row of CUTS it does not find the part.")
    return "Right on 2, 3 and 4 ranks, and as a row of parity's CUTS it finds the parts."


# Programs that the reader writes.


def _watch_rows(watch: Callable[..., Any], model: nn.Module, *more: Any) -> Any:
    """Watch the model; its forward refuses more rows than this rank's share of a batch."""

    def check_rows(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        rows, share = len(args[0]), 8 // dist.get_world_size()
        if rows > share:
            raise ValueError(f"rows={rows}: must be {share}, this rank's share of the batch")

    model.register_forward_pre_hook(check_rows)
    return watch(model, *more)


@add_exercise("my_program")
def _(answer: Callable[..., Any]) -> str:
    for size in (2, 4):
        try:
            program = lambda watch: answer(partial(_watch_rows, watch))  # noqa: E731
            report = parity.check(train_one_process, program, ranks=size, draws=1)
        except ValueError as error:
            raise WrongAnswer(str(error)) from None
        except ranks.RankError as error:
            raise WrongAnswer(f"It failed on {size} ranks: {error}") from None
        if not report.is_equal:
            raise WrongAnswer(f"On {size} ranks: {report}"[:590])
    return "Right: parity finds no difference on 2 and 4 ranks."


@add_exercise("own_parity")
def _(answer: Any) -> str:
    if not isinstance(answer, parity.Report):
        raise WrongAnswer("The answer is what parity.check returns: a Report of your two programs.")
    if not answer.is_equal:
        raise WrongAnswer(f"The programs still differ: {answer}"[:590])
    if answer.ranks < 2:
        raise WrongAnswer("parity.check ran on one rank. Use two, or as many as your layout needs.")
    if answer.num_compared < 10:
        count = answer.num_compared
        raise WrongAnswer(f"Only {count} tensors were compared. Is the whole model watched?")
    return f"Right: {answer.num_compared} tensors are equal on {answer.ranks} ranks."
