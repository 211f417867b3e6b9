"""Parts shared by all benchmarks: options, the emulated link, and statistics of runs."""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardlab import ranks
from shardlab.common import show
from shardlab.gpt.model import Config, count_parameters
from shardlab.measure import count, link
from shardlab.measure.count import read_clock

LATENCY, BANDWIDTH = 50e-6, 125e6  # of the emulated slow link: seconds (50 µs), bytes/s (1 Gbit/s)
WARM_UP = 2  # rounds
ROOM = 30e9  # bytes of a GPU that a rank needs for several models of gpt-2 at once
Times = dict[str, list[float]]  # contender -> seconds of its steps
Step = Callable[[], Any]


def gpu_model(size: int) -> str:
    """Return the model that `size` ranks train on this machine's GPUs, which ranks may share."""
    # A subprocess asks: a process that has initialized CUDA cannot fork ranks any more.
    bytes_each = ranks.run(lambda: torch.cuda.mem_get_info()[1], 1, device="cuda", show=False)[0]
    shared = -(-size // torch.cuda.device_count())  # ranks on one GPU
    return "gpt-2" if bytes_each / shared >= ROOM else "mini"


def select_group(slow: bool) -> dist.ProcessGroup:
    """Return the group of all ranks, on the emulated link if `slow`."""
    return link.create_slow_group(LATENCY, BANDWIDTH) if slow else dist.group.WORLD


def measure_alternately(
    steps: Mapping[str, Step], rounds: int, device: torch.device, told: Mapping[str, str]
) -> Times:
    """Return this rank's seconds of `rounds` steps of each contender; contenders take turns.

    The order is reversed from round to round; two rounds warm up. told: contender -> name of the
    seconds that its step itself returns.
    """
    times: Times = {name: [] for name in [*steps, *told.values()]}
    outside = [*run_turns(steps, rounds, device, told, times)]
    assert not outside, "a contender has no step"
    return times


def run_turns(
    steps: Mapping[str, Step | None],
    rounds: int,
    device: torch.device,
    told: Mapping[str, str],
    times: Times,
) -> Iterator[None]:
    """Run the turns of `alternately` into `times`, with one contender whose step is None.

    That contender's step is the caller's code from one `next` to the next `next`.
    """
    order = list(steps)
    for number in range(-WARM_UP, rounds):
        for name in order if number % 2 else reversed(order):
            step = steps[name]
            dist.barrier()
            begin = read_clock(device)
            if step is None:
                yield
                seconds = None
            else:
                seconds = step()
            if number >= 0:
                times[name].append(read_clock(device) - begin)
                if name in told:
                    times[told[name]].append(seconds)


def peak(build: Callable[[], Step]) -> int:
    """Return the peak of held bytes on this rank in a step made by `build`, after two more steps.

    The least of three steps: gloo's threads may hold a message a moment longer than needed.
    """
    with count.track_memory(device=ranks.device()) as held:
        step = build()
        for _ in range(2):
            step()
        peaks = []
        for _ in range(3):
            gc.collect()
            held.reset_peak()
            step()
            peaks.append(held.peak_bytes)
        return min(peaks)


def select_slowest_rank(results: list[Times]) -> dict[str, torch.Tensor]:
    """Return for each contender that ran a tensor [rounds] of the slowest rank's seconds."""
    ran = [name for name, seconds in results[0].items() if seconds]
    return {name: torch.tensor([r[name] for r in results]).max(dim=0).values for name in ran}


def ratio(ratios: Sequence[float]) -> dict[str, Any]:
    """Return `ratio` and `quartiles` of a row: median and interquartile range over the repeats."""
    low, high = torch.quantile(torch.tensor(ratios), torch.tensor([0.25, 0.75])).tolist()
    return {
        "ratio": round(statistics.median(ratios), 4),
        "quartiles": [round(low, 4), round(high, 4)],
    }


def estimate_moving_seconds(
    middle: Mapping[str, float], link: str, size: int, name: str = ""
) -> float:
    """Return the seconds that moving bytes takes from computing: 0 if a core is left for moving.

    name: suffix of "work " and "wire " for contenders with messages of their own.
    """
    if link == "gpu" or size < (os.cpu_count() or 1):
        return 0.0
    return middle.get(f"work {name}".strip(), middle[f"wire {name}".strip()])


def make_row(
    case: str,
    against: str,
    size: int,
    link: str,
    times: Mapping[str, torch.Tensor],
    repeats: int,
    floor: Callable[[dict[str, float]], float],
    pair: tuple[str, str] = ("ours", "theirs"),
    **more: Any,
) -> dict[str, Any]:
    """Return one row of the result, from each contender's seconds (`slowest`).

    floor: computes a lower bound in seconds from the contenders' medians in one repeat. pair: our
    contender and theirs. more: further columns of the row.
    """
    chunks = {name: seconds.chunk(repeats) for name, seconds in times.items()}
    ours, theirs = pair
    ratios, shares = [], []
    for repeat in range(repeats):
        middle = {name: parts[repeat].median().item() for name, parts in chunks.items()}
        ratios.append(middle[ours] / middle[theirs])
        shares.append(floor(middle) / middle[ours])
    return {
        "case": case,
        "against": against,
        "ranks": size,
        "link": link,
        **ratio(ratios),
        "floor": round(statistics.median(shares), 4),
        **more,
        "seconds": round(times[ours].median().item(), 4),
    }


def compare_peaks(pair: tuple[str, str], peaks: Mapping[str, int]) -> dict[str, Any]:
    """Return a row's columns on the bytes held by ours and by theirs."""
    ours, theirs = (peaks[name] for name in pair)
    return {"peak_ratio": round(ours / theirs, 4), "peak_bytes": [ours, theirs]}


def print_rows(rows: list[dict[str, Any]], as_json: bool, **more: Any) -> None:
    """Print rows as one JSON object, with `more`; or as a table, which has the seconds as well."""
    if as_json:
        kept = [{key: row[key] for key in row if key != "seconds"} for row in rows]
        print(json.dumps({"rows": kept, **more}))
        return
    head = ["case", "against", "ranks", "link", "ours (s)", "ours / theirs", "quartiles", "floor"]
    last = {"sent_ratio": "bytes, ours / theirs", "peak_ratio": "peak, ours / theirs"}
    last = {key: words for key, words in last.items() if rows and key in rows[0]}
    show.table(
        [
            [r["case"].split(",")[0], r["against"], r["ranks"], r["link"], f"{r['seconds']:.4f}"]
            + [f"{r['ratio']:.3f}", "{:.3f} to {:.3f}".format(*r["quartiles"])]
            + [f"{r['floor'] * 100:.0f} %", *(f"{r[key]:.3f}" for key in last)]
            for r in rows
        ],
        [*head, *last.values()],
    )


def print_progress(*words: object) -> None:
    """Print the current measurement if stderr is a terminal."""
    if sys.stderr.isatty():
        print(", ".join(map(str, words)), "…", file=sys.stderr)


def make_run_options(link: str, timeout: float = 900.0) -> dict[str, Any]:
    """Return options of `ranks.run` for a link; `show` is off, so that warnings are not printed."""
    return {"device": "cuda" if link == "gpu" else "cpu", "timeout": timeout, "show": False}


def describe_model(name: str, config: Config) -> str:
    """Return a model's name with its number of parameters."""
    return f"{name}, {count_parameters(config) / 1e6:.1f} M parameters"


def parse_count(text: str) -> int:
    """Parse a number of ranks or repeats from the command line."""
    value = int(text) if text.isdecimal() else 0
    if not 1 <= value <= ranks.max_world_size():
        raise argparse.ArgumentTypeError(f"{text!r}: must be 1 to {ranks.max_world_size()}")
    return value


def parse_options(
    description: str,
    arguments: list[str] | None,
    kinds: Sequence[str] = ("loopback", "slow", "gpu"),
) -> argparse.Namespace:
    """Parse json, quick, ranks, links and repeats; `description`'s first line is the help."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0], allow_abbrev=False)
    kinds = [kind for kind in kinds if kind != "gpu" or torch.cuda.device_count()]
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="toy sizes: only shows that it runs")
    parser.add_argument("--ranks", type=parse_count, nargs="+", default=[2, 4], metavar="N")
    parser.add_argument("--links", nargs="+", choices=kinds, default=kinds, metavar="LINK")
    parser.add_argument("--repeats", type=parse_count, default=5, help="of a few rounds each")
    return parser.parse_args(arguments)
