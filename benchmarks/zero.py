"""Benchmark of our ZeRO against torch's FSDP2 and DeepSpeed, stage by stage.

    python benchmarks/zero.py            # a table; some ten minutes on two cores
    python benchmarks/zero.py --json     # {"rows": [{"case", "against", "ranks", …}, …]}
    python benchmarks/zero.py --quick    # toy sizes, a minute: only a smoke test

Every rank trains copies of one model in turn, step by step: ours in stages 1, 2 and 3, FSDP2 with
reshard_after_forward both ways, DeepSpeed in stages 1, 2 and 3, and a bare one that sends nothing
(compute alone, with an optimizer of a shard's size); and it sends the messages of each stage
without a model (wire alone). All ranks start a step together, so each contender meets the same
load; the order is reversed from round to round. A step is forward, backward, AdamW and zero_grad,
and lasts until the slowest rank is done. Units are the blocks, for all who have units; buckets hold
as much as a block, for all who have buckets. DeepSpeed's other settings are its own, but for three:
no clipping; small parameters (biases and norms) kept whole; two blocks whole at a time in stage 3.

ratio: median step of ours over median step of theirs in each repeat of a few rounds; the median
and the quartiles over the repeats are reported. peak_ratio: the same of the largest number of
bytes held in a step, counted apart from the timing: exact, but for what gloo uses inside.

On a CPU the ratio compares the three with gloo. FSDP2 overlaps by CUDA streams, which a CPU does
not have, so that it waits for each message; and gloo's reduce-scatter, which FSDP2 and DeepSpeed
call, moves as much as an all-reduce. The ratio does not say that they are slow on GPUs. On
the emulated link a reduce-scatter costs what a ring's would, whoever calls it.

floor: the share of the physical floor that ours reaches, floor / median step of ours. No step can
be shorter than either of two bounds, and the floor is the greater one:
  compute + work: all compute, and the work of moving the bytes, where all cores are busy computing
      (as many ranks as cores, or more). The work is the wire alone on loopback.
  optimizer + wire: nothing can travel while the optimizer works. The wire is that of the link.
Medians of one repeat, and the share is the median over the repeats. On loopback, cores that move
bytes sometimes wait for one another, which compute can fill: so a share slightly above 1 is
possible.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from side_by_side import (
    Step,
    Times,
    compare_peaks,
    describe_model,
    estimate_moving_seconds,
    gpu_model,
    make_row,
    make_run_options,
    measure_alternately,
    parse_options,
    peak,
    print_progress,
    print_rows,
    read_clock,
    select_group,
    select_slowest_rank,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from shardlab import deepspeed_engine, ranks, zero
from shardlab.gpt.model import GPT, PRESETS, Config, loss

OURS = {"stage 1": 1, "stage 2": 2, "stage 3": 3, "stage 3, kept": 3}
ROWS = [  # (ours, theirs)
    ("stage 1", "DeepSpeed stage 1"),
    ("stage 2", "DeepSpeed stage 2"),
    ("stage 2", "FSDP2, reshard_after_forward=False"),
    ("stage 3", "DeepSpeed stage 3"),
    ("stage 3", "FSDP2, reshard_after_forward=True"),
    ("stage 3, kept", "FSDP2, reshard_after_forward=False"),
]


def block_bytes(config: Config) -> int:
    """Return the bytes of a block's parameters."""
    with torch.device("meta"):
        return sum(p.nbytes for p in GPT(config).blocks[0].parameters())


def build(name: str, config: Config, group: dist.ProcessGroup, tokens_BS: torch.Tensor) -> Step:
    """Return a contender's training step, with a model of its own."""
    torch.manual_seed(0)
    plain = GPT(config).to(ranks.device())
    if name.startswith("DeepSpeed"):
        return deepspeed_step(plain, int(name[-1]), config, group, tokens_BS)
    if name in OURS:
        buckets = {"bucket_bytes": block_bytes(config), "first_bytes": block_bytes(config)}
        options = {"reshard": name == "stage 3"} if OURS[name] == 3 else buckets
        model = zero.shard_module(plain, group, OURS[name], **options)
    else:
        model, again = plain, name.endswith("True")
        mesh = DeviceMesh.from_group(group, ranks.device().type)
        for block in plain.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=again)
        fully_shard(plain, mesh=mesh, reshard_after_forward=False)  # the rest
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    def run_step() -> None:
        loss(model(tokens_BS), tokens_BS).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run_step


def deepspeed_step(
    plain: nn.Module, stage: int, config: Config, group: dist.ProcessGroup, tokens_BS: torch.Tensor
) -> Step:
    """Return a training step of DeepSpeed's engine over `group`."""
    deepspeed = deepspeed_engine.import_deepspeed()
    from deepspeed.utils import groups

    deepspeed.init_distributed()
    groups._WORLD_GROUP = group  # the group of stages 1 and 2; stage 3 calls the function below
    deepspeed.comm.get_world_group = lambda: group
    block = block_bytes(config) // 4
    settings = {"stage": stage, "reduce_bucket_size": block, "allgather_bucket_size": block}
    if stage == 3:
        settings |= {"stage3_prefetch_bucket_size": block, "stage3_max_reuse_distance": 0}
        settings |= {"stage3_max_live_parameters": 2 * block}
        settings |= {"stage3_param_persistence_threshold": 10 * config.hidden}
    engine = deepspeed_engine.initialize(
        plain,
        {
            "train_micro_batch_size_per_gpu": len(tokens_BS),
            "gradient_clipping": 0.0,
            "steps_per_print": 10**9,
            "zero_optimization": settings,
            "zero_allow_untested_optimizer": True,
        },
        torch.optim.AdamW(plain.parameters(), lr=1e-3, foreach=False),
    )

    def run_step() -> None:
        engine.backward(loss(engine(tokens_BS), tokens_BS))
        engine.step()

    return run_step


def make_compute_step(config: Config, group: dist.ProcessGroup, tokens_BS: torch.Tensor) -> Step:
    """Return a step of compute alone, with a shard for the optimizer; it returns its seconds."""
    plain = GPT(config).to(tokens_BS.device)
    like = zero.Zero3(GPT(config).to(tokens_BS.device), group)
    pieces = [nn.Parameter(torch.zeros_like(p)) for p in like.parameters()]
    optimizer = torch.optim.AdamW(pieces, lr=1e-3, foreach=False)
    for piece in pieces:
        piece.grad = torch.zeros_like(piece)

    def run_step() -> float:
        loss(plain(tokens_BS), tokens_BS).backward()
        plain.zero_grad()
        begin = read_clock(tokens_BS.device)
        optimizer.step()
        return read_clock(tokens_BS.device) - begin

    return run_step


def messages(name: str, config: Config, group: dist.ProcessGroup) -> Step:
    """Return a step that sends a stage's messages one after another, without a model."""
    options = {"reshard": name == "stage 3"} if OURS[name] == 3 else {}
    with torch.device(ranks.device()):
        model = zero.shard_module(GPT(config), group, OURS[name], **options)
    gathers = 2 if name == "stage 3" else 1
    # All messages are in flight at once: each needs memory of its own.
    flats = [
        (flat, [torch.zeros(flat.size, device=flat.device) for _ in range(gathers + 1)])
        for flat in model.flats
    ]

    def run_step() -> None:
        works: list[Any] = []
        for turn in range(gathers):
            works += [zero.all_gather(into[turn], flat.shard_slice, group) for flat, into in flats]
        works += [zero.ReduceScatter(into[-1], group, model.ordered) for _, into in flats]
        for work in works:
            work.wait()

    return run_step


def batch_of(config: Config, batch: int) -> torch.Tensor:
    return torch.randint(config.vocab, (batch, config.seq), device=ranks.device())


def measure(config: Config, batch: int, slow: bool, rounds: int, names: Sequence[str]) -> Times:
    """Return this rank's seconds of `rounds` steps of each contender."""
    tokens_BS, group, device = batch_of(config, batch), select_group(slow), ranks.device()
    steps = {name: build(name, config, group, tokens_BS) for name in names}
    steps["compute"] = make_compute_step(config, dist.group.WORLD, tokens_BS)
    for name in OURS:
        if name in names:
            steps[f"wire {name}"] = messages(name, config, group)
            if slow:
                steps[f"work {name}"] = messages(name, config, dist.group.WORLD)
    return measure_alternately(steps, rounds, device, {"compute": "optimizer"})


def peak_of(config: Config, batch: int, name: str) -> int:
    """Return the most bytes that one contender holds on this rank in a step."""
    tokens_BS = batch_of(config, batch)
    return peak(lambda: build(name, config, dist.group.WORLD, tokens_BS))


def main(arguments: list[str] | None = None) -> None:
    chosen = parse_options(__doc__, arguments)
    pairs = ROWS
    if not importlib.util.find_spec("deepspeed"):
        pairs = [pair for pair in ROWS if "DeepSpeed" not in pair[1]]
        print("DeepSpeed is not installed here: no rows against it", file=sys.stderr)
    names = list(dict.fromkeys(name for pair in pairs for name in pair))
    rows = []
    held: dict[tuple[str, int], dict[str, int]] = {}
    for kind in chosen.links:
        for size in chosen.ranks:
            if chosen.quick:
                preset, batch, rounds = "nano", 1, 1
            else:
                preset, batch, rounds = (gpu_model(size), 4, 4) if kind == "gpu" else ("mini", 2, 4)
            config, on = PRESETS[preset], make_run_options(kind)
            print_progress(kind, f"{size} ranks")
            if (preset, size) not in held:  # the link does not matter
                held[preset, size] = {
                    name: max(ranks.run(peak_of, size, config, batch, name, **on)) for name in names
                }
            total = rounds * chosen.repeats
            results = ranks.run(measure, size, config, batch, kind == "slow", total, names, **on)
            case = f"{describe_model(preset, config)}, {batch * config.seq} tokens a rank"
            given = size, kind, select_slowest_rank(results), chosen.repeats
            for ours, theirs in pairs:

                def floor(middle: dict[str, float], ours: str = ours, at: Any = given) -> float:
                    full = middle["compute"] + estimate_moving_seconds(middle, at[1], at[0], ours)
                    return max(full, middle["optimizer"] + middle[f"wire {ours}"])

                more = compare_peaks((ours, theirs), held[preset, size])
                rows.append(
                    make_row(f"{ours}: {case}", theirs, *given, floor, (ours, theirs), **more)
                )
    print_rows(rows, chosen.json)


if __name__ == "__main__":
    main()
