"""Benchmark of our mesh against torch's FSDP2 (fully_shard) over parallelize_module (DTensor).

    python benchmarks/mesh.py            # tables; some four minutes on two cores
    python benchmarks/mesh.py --json     # {"rows": [{"case", "against", …}, …], …}
    python benchmarks/mesh.py --quick    # toy sizes, seconds: only a smoke test

The ranks (an even number) form two tensor-parallel groups, with ZeRO stage 3 between these copies.
A step is forward, backward, AdamW and zero_grad. (Without clipping: torch 2.13's clip_grad_norm_
refuses gradients of which some lie on one axis of a mesh, and some on two.) Every rank runs in
turn: ours; torch's as in its tutorials, with layers cut one by one by parallelize_module, then
every block and the root sharded by fully_shard along the mesh's other axis, and one shared input
for queries, keys and values, as in ours; a rank's share of all compute, without messages; and the
messages of a step, without compute. All ranks start a step together; the order is reversed from
round to round.

ratio: median step of ours over median step of theirs in each repeat of a few rounds; the median
and the quartiles over the repeats are reported. peak_ratio: the same of the largest number of
bytes held in a step, counted apart from the timing.

floor: the share of the physical floor that ours reaches. With as many ranks as cores, or more, the
floor is compute alone plus the work of moving the bytes, which takes the cores from computing; with
fewer, compute plus those messages that nothing can hide (the tensor group's in forward).

On a CPU the ratio shows the cost of dispatch, unsharding and copies for layers as small as these.
FSDP2 overlaps by CUDA streams, which a CPU does not have, and gloo implements the reduce-scatter
that FSDP2 uses as an all-reduce: the ratio does not carry over to GPUs.
"""

from __future__ import annotations

from dataclasses import replace
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
    select_slowest_rank,
)
from tensor_parallel import make_divisible_config, parallelize_with_torch, shard_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import loss_parallel

from shardlab import mesh, ranks
from shardlab.gpt.model import GPT, PRESETS, Config, loss
from shardlab.layout import Layout

OURS, THEIRS = "ours", "fully_shard × parallelize_module"


def build_model(config: Config) -> GPT:
    torch.manual_seed(0)
    return GPT(config).to(ranks.device())


def make_adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def build_ours(config: Config, batch: int) -> tuple[Step, mesh.Parallel]:
    """Return our step, with two ZeRO-3 copies of tensor groups, and the model that it trains."""
    groups = mesh.create_groups(choose_layout(), dist.group.WORLD)
    job = mesh.Parallel(build_model(config), groups, choose_layout())
    optimizer = make_adamw(job)
    tokens_BS, targets_BS = make_batch(config, batch, dist.get_rank(groups.dp))

    def step() -> torch.Tensor:
        value = job.step(tokens_BS, targets_BS)
        optimizer.step()
        optimizer.zero_grad()
        return value

    return step, job


def build_theirs(config: Config, batch: int) -> tuple[Step, GPT]:
    """Return torch's step, on its mesh of two axes, and the model that it trains."""
    shape = choose_layout()
    axes = init_device_mesh(ranks.device().type, (shape.dp, shape.tp), mesh_dim_names=("dp", "tp"))
    model = parallelize_with_torch(build_model(config), axes["tp"])
    for part in (*model.blocks, model):
        fully_shard(part, mesh=axes["dp"])
    optimizer = make_adamw(model)
    tokens_BS, targets_BS = make_batch(config, batch, axes["dp"].get_local_rank())

    def step() -> torch.Tensor:
        with loss_parallel():
            value = loss(model(tokens_BS), targets_BS)
            value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value

    return step, model


def choose_layout() -> Layout:
    """Return the layout with two copies of the largest tensor groups that fit."""
    return Layout(dp=2, tp=dist.get_world_size() // 2, zero=3)


def make_batch(config: Config, batch: int, copy: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a copy's tokens and targets, [batch, seq] each."""
    generator = torch.Generator().manual_seed(copy)
    found = torch.randint(config.vocab, (2, batch, config.seq), generator=generator)
    return tuple(found.to(ranks.device()))


def build_bare(config: Config, batch: int) -> Step:
    """Return a step of compute alone: a rank's share of the model, optimizer on its shards."""
    shape = choose_layout()
    model = shard_of(config, shape.tp)
    tokens_BS, targets_BS = (x % (config.vocab // shape.tp) for x in make_batch(config, batch, 0))
    parameters = list(model.parameters())
    pieces = [torch.nn.Parameter(p.detach().flatten()[:: shape.dp].clone()) for p in parameters]
    optimizer = make_adamw(torch.nn.ParameterList(pieces))

    def step() -> None:
        loss(model(tokens_BS), targets_BS).backward()
        for piece, parameter in zip(pieces, parameters, strict=True):
            piece.grad, parameter.grad = parameter.grad.flatten()[: len(piece)], None
        optimizer.step()
        optimizer.zero_grad()

    return step


def build_messages(config: Config, batch: int) -> Step:
    """Return a step that sends a step's messages one after another, without a model."""
    shape, device = choose_layout(), ranks.device()
    groups = mesh.create_groups(shape, dist.group.WORLD)
    x_BSH = torch.zeros(batch, config.seq, config.hidden, device=device)
    rows = [torch.zeros(n, batch, config.seq, device=device) for n in (1, 2)]
    shards = mesh.predict.list_flat_tensors(config, shape, 0)
    other = 1 - dist.get_rank(groups.dp)
    coming = torch.zeros(max(flat.shard_size for flat in shards), device=device)
    flats = [(torch.zeros(flat.padded_size, device=device), flat.is_root) for flat in shards]

    def step() -> None:
        for _ in range(2 * (1 + 2 * config.layers)):  # forward and backward
            dist.all_reduce(x_BSH, group=groups.tp)
        for row in rows:  # for the loss
            dist.all_reduce(row, group=groups.tp)
        for full, rest in flats:
            shard = full[: len(full) // shape.dp]
            for _ in range(2 if rest else 3):  # all-gathers, then gradients
                ranks.exchange(shard, other, coming[: len(shard)], other, groups.dp).wait()

    return step


def measure_rounds(config: Config, batch: int, rounds: int) -> Times:
    """Return this rank's seconds of `rounds` steps of each contender."""
    steps = {OURS: build_ours(config, batch)[0], THEIRS: build_theirs(config, batch)[0]}
    steps |= {"compute": build_bare(config, batch), "wire": build_messages(config, batch)}
    return measure_alternately(steps, rounds, ranks.device(), {})


def measure_peak(config: Config, batch: int, build: Any) -> int:
    """Return the most bytes that one contender holds on this rank in a step."""
    return peak(lambda: build(config, batch)[0])


def list_cases(kind: str, size: int, quick: bool) -> list[tuple[str, Config, int, int]]:
    """Return (name, shape, batch of a copy, rounds) of each case on a link."""
    if quick:
        return [("nano", PRESETS["nano"], 1, 1)]
    if kind == "gpu":
        name = gpu_model(size)
        return [(name, PRESETS[name], 4, 4)]
    wide = replace(PRESETS["mini"], layers=2, heads=16, hidden=1024)
    return [("mini", PRESETS["mini"], 2, 2), ("wide", wide, 2, 1)]


def main(arguments: list[str] | None = None) -> None:
    chosen = parse_options(__doc__, arguments, ("loopback", "gpu"))
    rows: list[dict[str, Any]] = []
    for kind in chosen.links:
        on = make_run_options(kind)
        for size in (size for size in chosen.ranks if size % 2 == 0):
            for name, config, batch, rounds in list_cases(kind, size, chosen.quick):
                config = replace(make_divisible_config(config, max(1, size // 2)), tied=False)
                print_progress(name, kind, f"{size} ranks")
                held = {
                    who: max(ranks.run(measure_peak, size, config, batch, build, **on))
                    for who, build in ((OURS, build_ours), (THEIRS, build_theirs))
                }
                results = ranks.run(
                    measure_rounds, size, config, batch, rounds * chosen.repeats, **on
                )

                def choose_floor(
                    middle: dict[str, float], size: int = size, kind: str = kind
                ) -> float:
                    return middle["compute"] + estimate_moving_seconds(middle, kind, size)

                case = f"{describe_model(name, config)}, {2 * batch * config.seq} tokens"
                given = (
                    case,
                    THEIRS,
                    size,
                    kind,
                    select_slowest_rank(results),
                    chosen.repeats,
                    choose_floor,
                )
                rows.append(make_row(*given, (OURS, THEIRS), **compare_peaks((OURS, THEIRS), held)))
    print_rows(rows, chosen.json)


if __name__ == "__main__":
    main()
