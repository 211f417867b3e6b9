"""The flow chart: what to try first, and what next when it does not do.

Seven rungs, from the least that can be changed to the most. At each of them three questions:

    1. Can the copies share the batch? Each of them needs a sequence.
    2. Does the fullest rank fit, at its fullest moment?
    3. Where ZeRO-3 is used: does the wire keep up, with no more seconds than the arithmetic takes?

The first rung that says yes to all is the choice. The order is that of effort and of traffic: a
rule of thumb for links that are much faster inside of a node. `search` says how good a one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardlab.arguments import SIZES, check_whole
from shardlab.layout import Layout
from shardlab.machines import RESERVE, Machine, room
from shardlab.shapes import Config

from .cost import seconds
from .needs import peak

MOST_GPUS = 1_000_000  # of a job: every layout is tried, and there is one for each divisor
RUNGS = (
    "data parallel",
    "ZeRO-1",
    "ZeRO-2",
    "ZeRO-3",
    "recompute",
    "tensor in the node",
    "pipeline across nodes",
)


@dataclass(frozen=True)
class Rung:
    """One rung for one model on given GPUs: its layout, and how the questions were answered."""

    name: str
    layout: Layout | None  # None where there is none: one GPU has no copies to share with
    peak: int  # bytes of the fullest rank
    room: float  # bytes that are there
    keeps_up: bool
    why: str

    @property
    def fits(self) -> bool:
        """There is such a layout, and its fullest rank has room."""
        return self.layout is not None and self.peak <= self.room

    @property
    def ok(self) -> bool:
        """All questions are answered with yes."""
        return self.fits and self.keeps_up


def rungs(
    config: Config,
    machine: Machine,
    gpus: int,
    batch: int,
    seq: int | None = None,
    reserve: float = RESERVE,
) -> list[Rung]:
    """Every rung of the chart, in order, for a step of `batch` sequences on `gpus` GPUs.

    Micro-batches are as large as fits, in powers of two; in a pipeline one sequence each, so that
    there are many. Raises ValueError for numbers below 1, a `reserve` outside of 0 to 1, and more
    GPUs than one node has that fill no whole nodes.
    """
    check_job(machine, gpus, batch)
    there = room(machine, reserve)
    found = []
    for name in RUNGS:
        tried = [
            _judged(config, machine, name, layout, seq, there)
            for layout in _layouts(config, machine, gpus, name)
            if batch % layout.dp == 0
            for layout in [_batched(config, layout, batch, seq, there)]
        ]
        good = [rung for rung in tried if rung.ok] or [rung for rung in tried if rung.fits]
        if tried:
            found.append(good[0] if good else min(tried, key=lambda rung: rung.peak))
        else:
            found.append(Rung(name, None, 0, there, True, _why_none(name, gpus, batch)))
    return found


def choose(
    config: Config,
    machine: Machine,
    gpus: int,
    batch: int,
    seq: int | None = None,
    reserve: float = RESERVE,
) -> Rung:
    """The first rung that is `ok`, or else the first that fits though the wire does not keep up.

    Raises ValueError as `rungs` does, and where nothing fits: what is short, and whether more GPUs
    would do.
    """
    found = rungs(config, machine, gpus, batch, seq, reserve)
    if good := [rung for rung in found if rung.ok] or [rung for rung in found if rung.fits]:
        return good[0]
    applicable = [rung for rung in found if rung.layout is not None]
    if not applicable:
        raise ValueError(f"batch={batch}: allowed are multiples of the copies; {found[0].why}")
    best = min(applicable, key=lambda rung: rung.peak)
    words = (
        f"gpus={gpus}: no rung fits; {best.name} ({best.layout}) comes nearest and needs "
        f"{best.peak / 1e9:,.1f} GB on its fullest GPU, {(best.peak - best.room) / 1e9:,.1f} GB "
        f"more than the {best.room / 1e9:,.1f} GB that a job may plan with"
    )
    raise ValueError(f"{words}; {_more(config, machine, gpus, batch, seq, reserve)}")


def check_job(machine: Machine, gpus: int, batch: int) -> None:
    """Raise ValueError for GPUs and batches that cannot be, or would be tried for ever."""
    check_whole(1, MOST_GPUS, gpus=gpus)
    check_whole(1, SIZES, batch=batch)
    n = machine.per_node
    if gpus > n and gpus % n:
        raise ValueError(f"gpus={gpus}: allowed are 1 to {n}, and whole nodes of {n}")


def _layouts(config: Config, machine: Machine, gpus: int, name: str) -> Iterator[Layout]:
    """What a rung tries, in order; the batch is still to be divided."""
    if name == "data parallel":
        yield Layout(dp=gpus)
    elif name == "ZeRO-1" and gpus > 1:
        yield Layout(dp=gpus, zero=1)
    elif name == "ZeRO-2" and gpus > 1:
        yield Layout(dp=gpus, zero=2)
    elif name == "ZeRO-3" and gpus > 1:
        yield Layout(dp=gpus, zero=3)
    elif name == "recompute":
        for zero in (1, 2, 3) if gpus > 1 else (0,):
            yield Layout(dp=gpus, zero=zero, recompute="full")
    elif name == "tensor in the node":
        for tp in tensor_degrees(config, machine, gpus)[1:]:
            yield from _both(Layout(dp=gpus // tp, tp=tp, zero=1, sequence_parallel=True))
    elif name == "pipeline across nodes":
        tp = tensor_degrees(config, machine, gpus)[-1]
        for pp in pipeline_degrees(config, gpus // tp)[1:]:
            dp, along = gpus // tp // pp, tp > 1
            yield from _both(Layout(dp, tp, pp, zero=1, sequence_parallel=along))


def _both(layout: Layout) -> Iterator[Layout]:
    layout = layout if layout.dp > 1 else replace(layout, zero=0)
    yield layout
    yield replace(layout, recompute="full")


def tensor_degrees(config: Config, machine: Machine, gpus: int) -> list[int]:
    """In how many ways one node's GPUs can cut this shape: 1, 2, 4, …"""
    widths = config.heads, config.key_value_heads, config.ffn_width, machine.per_node, gpus
    widths += (config.seq,)
    return [t for t in range(1, machine.per_node + 1) if not any(w % t for w in widths)]


def pipeline_degrees(config: Config, ranks: int) -> list[int]:
    """Into how many equal stages `ranks` ranks can cut the layers."""
    return [p for p in range(1, ranks + 1) if not (config.layers % p or ranks % p)]


def _batched(config: Config, layout: Layout, batch: int, seq: int | None, there: float) -> Layout:
    """`layout` with the largest micro-batch that fits; 1 in a pipeline, and where none does."""
    each = batch // layout.dp
    layout = replace(layout, microbatches=each)
    size = 2
    while layout.pp == 1 and each % size == 0:
        larger = replace(layout, micro_batch=size, microbatches=each // size)
        if peak(config, larger, seq) > there:
            break
        layout, size = larger, 2 * size
    return layout


def _judged(
    config: Config, machine: Machine, name: str, layout: Layout, seq: int | None, there: float
) -> Rung:
    needs = peak(config, layout, seq)
    if needs > there:
        why = f"needs {needs / 1e9:,.1f} GB on a GPU; there are {there / 1e9:,.1f}"
        return Rung(name, layout, needs, there, True, why)
    why = f"fits: {needs / 1e9:,.1f} of {there / 1e9:,.1f} GB"
    cost = seconds(config, machine, layout, seq)
    keeps_up = layout.zero < 3 or cost.data <= cost.arithmetic
    if not keeps_up:
        why += (
            f", but a step sends for {cost.data:,.1f} s and computes for {cost.arithmetic:,.1f} s"
        )
    return Rung(name, layout, needs, there, keeps_up, why)


def _why_none(name: str, gpus: int, batch: int) -> str:
    if gpus == 1:
        return "there is one GPU"
    if name in RUNGS[-2:]:
        where = "in a node" if name == RUNGS[-2] else "behind one another"
        return f"no cut {where} leaves copies that can share {batch} sequences"
    return f"{gpus} copies cannot share {batch} sequences evenly"


def _more(
    config: Config, machine: Machine, gpus: int, batch: int, seq: int | None, reserve: float
) -> str:
    """What more GPUs would change: the first of 2, 4, … 64 times as many that is enough."""
    for times in (2, 4, 8, 16, 32, 64):
        more = gpus * times
        if more > MOST_GPUS or (more > machine.per_node and more % machine.per_node):
            continue
        if any(rung.fits for rung in rungs(config, machine, more, batch, seq, reserve)):
            return f"{more} of these GPUs would be enough"
    return "more of these GPUs would not help; larger ones or shorter sequences would"
