"""Every layout, tried: what the chart's rule of thumb is compared with."""

from __future__ import annotations

from dataclasses import dataclass

from shardlab.layout import Layout
from shardlab.machines import RESERVE, Machine, room
from shardlab.shapes import Config

from .chart import check_job, pipeline_degrees, tensor_degrees
from .cost import Seconds, seconds
from .needs import peak
from .predict import predict


@dataclass(frozen=True)
class Choice:
    """A layout that fits, the bytes of its fullest rank, its step's floor, and what it may take."""

    layout: Layout
    peak: int
    seconds: Seconds
    predicted: float  # seconds of a step


def fastest(
    config: Config,
    machine: Machine,
    gpus: int,
    batch: int,
    seq: int | None = None,
    reserve: float = RESERVE,
) -> list[Choice]:
    """All layouts that fit, the fastest first by `predict`; the emptier one where equal.

    Tried are all tensor degrees inside of a node (with sequence parallelism), all equal stages, all
    stages of ZeRO, with and without recomputation, micro-batches in powers of two. An empty list
    where nothing fits. Raises ValueError as `rungs` does.
    """
    check_job(machine, gpus, batch)
    there = room(machine, reserve)
    found = []
    for tp in tensor_degrees(config, machine, gpus):
        for pp in pipeline_degrees(config, gpus // tp):
            dp = gpus // tp // pp
            if batch % dp:
                continue
            for zero in (0, 1, 2, 3) if dp > 1 else (0,):
                for recompute in ("none", "full"):
                    size = 1
                    while batch // dp % size == 0:
                        m = batch // dp // size
                        layout = Layout(dp, tp, pp, zero, size, m, recompute, tp > 1)
                        if (needs := peak(config, layout, seq)) > there:
                            break  # a larger micro-batch needs more
                        cost = seconds(config, machine, layout, seq)
                        takes = predict(config, machine, layout, seq=seq).seconds.total
                        found.append(Choice(layout, needs, cost, takes))
                        size *= 2
    return sorted(found, key=lambda choice: (choice.predicted, choice.peak))
