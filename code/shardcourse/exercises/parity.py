"""Exercises of the lesson `parity`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardcourse.exercises import Wrong, exercise
from shardcourse.exercises.forms import blanks, called, number
from shardlab import ranks
from shardtools import parity
from shardtools.parity import places

number("times_allowed", 1.9e-3 / (12 * 2.1e-7), "times", rel=0.02,
       says="Right: 754 times what rounding explains. It is a mistake, small as it looks.", wrong={
    1.9e-3 / 2.1e-7: "That is 9,048 times the noise; twelve times the noise is still allowed.",
    1.9e-3 / (3 * 2.1e-7): "Of three draws the largest counts, once; 12 of it are allowed.",
})  # fmt: skip


# A small correct program, and copies of it with one wrong line.


def start() -> nn.Module:
    """Return a network that predicts one of 64 tokens from the token before; fixed weights."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Embedding(64, 16), nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 64)
    )
    return network.to(ranks.device())


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Yield two batches of 8 texts: 6 tokens each, and the tokens that follow (-100: ignored)."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        drawn = torch.randint(64, (8, 7), generator=generator)
        x, y = drawn[:, :-1], drawn[:, 1:].clone()
        y[5:, 2:] = -100  # the last texts are short
        yield x.to(ranks.device()), y.to(ranks.device())


def plain(watch: Callable[..., Any]) -> None:
    """Train in one process: loss averaged over all targets, clipped gradients, AdamW."""
    model = start()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=False)
    watch(model, optimizer)
    for x, y in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def _parallel(lacks: str) -> Callable[..., None]:
    """Return the same program for ranks, with the mistake `lacks`."""

    def program(watch: Callable[..., Any]) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        model = start()
        optimizer = torch.optim.AdamW(
            model.parameters(), 1e-2, foreach=False, weight_decay=0.1 if lacks == "decay" else 0.01
        )
        watch(model, optimizer)
        for x, y in batches():
            mine = 0 if lacks == "share" else rank
            learned = (y != -100).sum()
            x, y = x.chunk(size)[mine], y.chunk(size)[mine]
            optimizer.zero_grad()
            total = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
            learned = (y != -100).sum() * size if lacks == "counts" else learned
            (total / learned).backward()
            if lacks == "clip":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            for p in model.parameters():
                dist.all_reduce(p.grad)
            if lacks != "clip":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

    return program


_LACKS = {"A": "decay", "B": "share", "C": "clip", "D": "counts"}


def four_reports() -> dict[str, parity.Report]:
    """Return parity's reports on four programs that have one mistake each."""
    from shardtools.parity.programs import build_report, match_program, record_program

    (record,) = ranks.run(record_program, 1, plain, show=False)
    each = ranks.run(
        lambda: {name: match_program(_parallel(lacks), record) for name, lacks in _LACKS.items()},
        2,
        show=False,
    )
    return {name: build_report(record, [one[name] for one in each]) for name in _LACKS}


_WHY = {
    "share": "Then rows of the batch would be on no rank, before any gradient.",
    "counts": "Then backward would begin with another factor on each rank.",
    "clip": "Then the ranks' own gradients would be in the result, but not alike.",
    "bucket": "Then the gradients of some parameters alone would be each rank's own.",
    "decay": "Then all gradients would be right, and the first update would not.",
    "seed": "Then the weights would differ before the first step.",
}
blanks(
    "four_reports",
    _LACKS,
    says="Right, from one report each, and without a look at a program.",
    otherwise=f"Allowed are {', '.join(_WHY)}.",
    wrong={(name, given): words for name in _LACKS for given, words in _WHY.items()},
)


# A cut that parity does not know.


def _dealt(total: int, ranks_: int, rank: int) -> Tensor:
    return torch.arange(total).view(-1, 2)[rank::ranks_].flatten()


@exercise("my_cut")
def _(answer: Callable[..., Any]) -> str:
    for total, n in ((16, 2), (24, 3), (16, 4)):
        size, mine = total // n, _dealt(total, n, n - 1)
        case = f"size={size}, total={total}, first={n - 1}"
        found = called(lambda *a: list(answer(*a)), size, total, n - 1)
        if not found:
            raise Wrong(f"{case}: it proposes nothing.")
        if not any(x.equal(mine) for x in found):
            raise Wrong(f"{case}: rank {n - 1} holds the rows {mine.tolist()}: propose them.")
        if not found[0].equal(mine):
            raise Wrong(f"{case}: `first` is the likeliest part. Begin with it, go round the rest.")
        if sorted(torch.cat(found).tolist()) != list(range(total)):
            raise Wrong(f"{case}: together the ranks' parts should be every row once.")
        whole = torch.randn(total, 3, generator=torch.Generator().manual_seed(n))
        with mock.patch.object(places, "CUTS", (*places.CUTS, answer)):
            proposed = places.propose_places((size, 3), (total, 3), n - 1)
            if not any(place.take_from(whole).equal(whole[mine]) for place in proposed):
                raise Wrong(f"{case}: as a row of CUTS it does not find the part.")
    return "Right on 2, 3 and 4 ranks, and as a row of parity's CUTS it finds the parts."


# Programs that the reader writes.


@exercise("my_program")
def _(answer: Callable[..., Any]) -> str:
    for size in (2, 4):
        try:
            report = parity.check(plain, answer, ranks=size, draws=1)
        except ValueError as error:
            raise Wrong(str(error)) from None
        except ranks.RankError as error:
            raise Wrong(f"It failed on {size} ranks: {error}") from None
        if not report.is_equal:
            raise Wrong(f"On {size} ranks: {report}"[:590])
    return "Silent on 2 and 4 ranks: it is the same computation."


@exercise("own_parity")
def _(answer: Any) -> str:
    if not isinstance(answer, parity.Report):
        raise Wrong("The answer is what parity.check returns: a Report of your two programs.")
    if not answer.is_equal:
        raise Wrong(f"Not yet the same: {answer}"[:590])
    if answer.ranks < 2:
        raise Wrong("That was one rank. Take two, or as many as your cut needs.")
    if answer.num_compared < 10:
        count = answer.num_compared
        raise Wrong(f"Only {count} tensors were compared. Is the whole model watched?")
    return f"Your model is the same one on {answer.ranks} ranks, in {answer.num_compared} tensors."
