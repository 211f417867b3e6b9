"""Benchmark of our data parallelism against torch's DistributedDataParallel.

    python benchmarks/data_parallel.py            # a table; two to three minutes on two cores
    python benchmarks/data_parallel.py --json     # {"rows": [{"case", "against", "ranks", …}, …]}
    python benchmarks/data_parallel.py --quick    # toy sizes, seconds: only a smoke test

Every rank trains copies of one model in turn, step by step: ours, torch's, and a bare one that
averages nothing (compute alone); and it sends the messages without a model (wire alone). All ranks
start a step together, so each contender meets the same load; the order is reversed from round to
round. A step is zero_grad, forward, backward and AdamW, and lasts until the slowest rank is done.
Both sides have the same buckets: torch's own sizes on loopback and on GPUs; 1 MiB on the emulated
slow link, since a model of 32 MB hardly fills more than one of 25 MiB, and then nothing overlaps.
Torch's DDP is given gradient_as_bucket_view=True, with which it needs no more memory than ours.

ratio: median step of ours over median step of torch's in each repeat of a few rounds; the median
and the quartiles over the repeats are reported. Other work on the machine comes and goes, and thus
affects both sides alike.

floor: the share of the physical floor that ours reaches, floor / median step of ours. No step can
be shorter than either of two bounds, and the floor is the greater one:
  compute + work: all compute, and the work of moving the bytes, where all cores are busy computing
      (as many ranks as cores, or more). The work is the wire alone on loopback.
  compute - backward + wire: before backward nothing can leave, and before the last byte has come
      the optimizer cannot begin. It is the wire alone on the link at hand.
All four are medians of one repeat, and the share is the median over the repeats. On loopback,
cores that move bytes sometimes wait for one another, which compute can fill: so a share slightly
above 1 is possible.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from side_by_side import (
    Step,
    Times,
    describe_model,
    estimate_moving_seconds,
    gpu_model,
    make_row,
    make_run_options,
    measure_alternately,
    parse_options,
    print_progress,
    print_rows,
    read_clock,
    select_group,
    select_slowest_rank,
)
from torch import nn

from shardlab import ranks
from shardlab.data_parallel import MIB, DataParallel
from shardlab.gpt.model import GPT, PRESETS, Config, loss


def measure(config: Config, batch: int, slow: bool, rounds: int) -> Times:
    """Return this rank's seconds of `rounds` steps of each contender."""
    torch.manual_seed(0)
    device, world = ranks.device(), dist.group.WORLD
    group = select_group(slow)
    plain = GPT(config).to(device)
    ours_in = {"bucket_bytes": MIB} if slow else {}
    theirs_in = {"bucket_cap_mb": 1} if slow else {}
    ours = DataParallel(copy.deepcopy(plain), group, **ours_in)
    theirs = nn.parallel.DistributedDataParallel(
        copy.deepcopy(plain), process_group=group, gradient_as_bucket_view=True, **theirs_in
    )
    tokens_BS = torch.randint(config.vocab, (batch, config.seq), device=device)
    flats = [torch.zeros_like(bucket.flat) for bucket in ours.buckets]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], float]:
        def run() -> float:
            optimizer.zero_grad()
            value = loss(model(tokens_BS), tokens_BS)
            begin = read_clock(device)
            value.backward()
            seconds = read_clock(device) - begin
            optimizer.step()
            return seconds

        return run

    def messages(on: dist.ProcessGroup) -> Callable[[], None]:
        def run() -> None:
            works = [dist.all_reduce(flat, group=on, async_op=True) for flat in flats]
            for work in works:
                work.wait()

        return run

    contenders: dict[str, Step] = {
        name: step(model, torch.optim.AdamW(model.parameters()))
        for name, model in {"ours": ours, "theirs": theirs, "compute": plain}.items()
    }
    contenders |= {"wire": messages(group)} | ({"work": messages(world)} if slow else {})
    return measure_alternately(contenders, rounds, device, {"compute": "backward"})


def main(arguments: list[str] | None = None) -> None:
    chosen = parse_options(__doc__, arguments)
    rows = []
    for kind in chosen.links:
        for size in chosen.ranks:
            if chosen.quick:
                name, batch, rounds = "nano", 1, 1
            else:
                name, batch, rounds = (gpu_model(size), 4, 4) if kind == "gpu" else ("mini", 2, 4)
            print_progress(kind, f"{size} ranks")
            config, total = PRESETS[name], rounds * chosen.repeats
            results = ranks.run(
                measure, size, config, batch, kind == "slow", total, **make_run_options(kind)
            )

            def floor(middle: dict[str, float], size: int = size, kind: str = kind) -> float:
                outside = middle["compute"] - middle["backward"]
                full = middle["compute"] + estimate_moving_seconds(middle, kind, size)
                return max(full, outside + middle["wire"])

            case = f"{describe_model(name, config)}, {batch * config.seq} tokens a rank"
            given = case, "torch DDP", size, kind, select_slowest_rank(results), chosen.repeats
            rows.append(make_row(*given, floor))
    print_rows(rows, chosen.json)


if __name__ == "__main__":
    main()
