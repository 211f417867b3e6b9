"""What all benchmarks share: their options, the emulated link, how runs become numbers."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardlab import link, ranks

LATENCY, BANDWIDTH = 50e-6, 125e6  # of the slow link: 50 microseconds, 1 Gbit/s
Times = dict[str, list[float]]  # contender -> seconds of its steps


def clock(device: torch.device) -> float:
    """Seconds, once the work of `device` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def the_group(slow: bool) -> dist.ProcessGroup:
    """On a rank: all ranks, on the emulated link if `slow`."""
    return link.slow(LATENCY, BANDWIDTH) if slow else dist.group.WORLD


def slowest(results: list[Times]) -> dict[str, torch.Tensor]:
    """Per contender that ran, a tensor [rounds] of the slowest rank's seconds."""
    ran = [name for name, seconds in results[0].items() if seconds]
    return {name: torch.tensor([r[name] for r in results]).max(dim=0).values for name in ran}


def ratio(ratios: Sequence[float]) -> dict[str, Any]:
    """`ratio` and `quartiles` of a row: the median over the repeats, and the middle half."""
    low, high = torch.quantile(torch.tensor(ratios), torch.tensor([0.25, 0.75])).tolist()
    return {
        "ratio": round(statistics.median(ratios), 4),
        "quartiles": [round(low, 4), round(high, 4)],
    }


def counted(text: str) -> int:
    """A number of ranks or repeats from the command line."""
    value = int(text) if text.isdecimal() else 0
    if not 1 <= value <= ranks.max_ranks():
        raise argparse.ArgumentTypeError(f"{text!r}: allowed are 1 to {ranks.max_ranks()}")
    return value


def options(description: str, arguments: list[str] | None) -> argparse.Namespace:
    """The command line's json, quick, ranks, links and repeats; the first line describes it."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0], allow_abbrev=False)
    kinds = ["loopback", "slow", "gpu"] if torch.cuda.device_count() else ["loopback", "slow"]
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="toy sizes: only shows that it runs")
    parser.add_argument("--ranks", type=counted, nargs="+", default=[2, 4], metavar="N")
    parser.add_argument("--links", nargs="+", choices=kinds, default=kinds, metavar="LINK")
    parser.add_argument("--repeats", type=counted, default=5, help="of a few rounds each")
    return parser.parse_args(arguments)
