"""Benchmark of our tensor parallelism against torch's parallelize_module (DTensor).

    python benchmarks/tensor_parallel.py            # tables; some four minutes on two cores
    python benchmarks/tensor_parallel.py --json     # {"rows": [{"case", "against", …}, …], …}
    python benchmarks/tensor_parallel.py --quick    # toy sizes, seconds: only a smoke test

Every rank trains its share of one model in turn, step by step: ours; torch's with ColwiseParallel,
RowwiseParallel and loss_parallel, once with PrepareModuleInput, so that queries, keys and values
share an input, as in ours, and once as in torch's tutorial, where each of them sends a gradient of
its own; and two contenders without messages: a rank's share of all compute, and the chain of it
that nothing can overlap. A step's messages are also sent without a model (wire alone). All ranks
start a step together, so each contender meets the same load; the order is reversed from round to
round. A step is forward, backward, AdamW and zero_grad, and lasts until the slowest rank is done.

ratio: median step of ours over median step of theirs in each repeat of a few rounds; the median
and the quartiles over the repeats are reported. peak_ratio: the same of the largest number of
bytes held in a step, counted apart from the timing: exact, but for what gloo uses inside. (Its
threads may hold a message a moment longer than it takes; so it is the least of three steps.)

floor: the share of the physical floor that ours reaches, floor / median step of ours. A message of
the forward pass needs what was computed before it, and what is computed after it needs the message:
nothing hides it. In backward the gradients of weights can be computed while a message travels, for
nobody waits for them. So no step is shorter than any of these, and the floor is the greatest:
  compute + forward wire: all compute, and what nothing hides;
  chain + wire: all messages, and all compute but the gradients of weights and the optimizer;
  compute + work: all compute, and the work of moving the bytes, where all cores are busy computing
      (as many ranks as cores, or more). The work is the wire alone on loopback.
Medians of one repeat, and the share is the median over the repeats.

where: where the time of one step goes, on loopback, by torch's profiler: `kernels`, operations on
plain tensors; `messages`, where a message is under way and no kernel runs; `rest`: Python, autograd
and, with DTensor, the dispatch of each operation: its rule is looked up, arguments are unwrapped
and redistributed, results wrapped. Milliseconds of the shortest of a few steps on any rank.
Counted, and so the same however busy the machine is: `operations` on plain tensors, `dispatched` by
DTensor, and `calls` of Python functions.

On a CPU the ratio shows the cost of dispatch for layers as small as these. That cost grows with the
number of operations and not with their size: the larger the layers, the nearer the ratio is to 1,
as the case "wide" shows. A GPU computes while the dispatch runs ahead, as long as the kernels take
longer than the dispatch.
"""

from __future__ import annotations

import cProfile
from collections.abc import Sequence
from contextlib import nullcontext
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
    read_clock,
    select_group,
    select_slowest_rank,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.profiler import ProfilerActivity, profile, record_function

from shardlab import ranks, tensor_parallel
from shardlab.common import show
from shardlab.gpt.model import GPT, PRESETS, Config, loss

OURS, THEIRS = "ours", ("parallelize_module", "parallelize_module, tutorial")
PARTS = "kernels", "messages", "rest"


def parallelize_with_torch(
    model: GPT, group: dist.ProcessGroup | DeviceMesh, tutorial: bool = False
) -> GPT:
    """Return the model, cut in place by torch, over a group or one axis of a mesh."""
    column, row = ColwiseParallel, RowwiseParallel
    plan: dict[str, Any] = {
        "embedding": row(input_layouts=Replicate()),
        "head": column(output_layouts=Shard(-1), use_local_output=False),
        "blocks.*.attention.out": row(),
        "blocks.*.ffn.down": row(),
    }
    for name in ("attention.query", "attention.key", "attention.value", "ffn.up"):
        plan[f"blocks.*.{name}"] = column()
    if model.config.mlp == "swiglu":
        plan["blocks.*.ffn.gate"] = column()
    if not tutorial:
        for name in ("attention", "ffn"):
            plan[f"blocks.*.{name}"] = PrepareModuleInput(
                input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)
            )
    mesh = group
    if not isinstance(mesh, DeviceMesh):
        mesh = DeviceMesh.from_group(group, ranks.device().type)
    # Every rank has built the same model, so that no weights need to be sent (src_data_rank).
    parallelize_module(model, mesh, plan, src_data_rank=None)
    if model.config.tied:
        model.head.weight = model.embedding.weight  # they were cut one by one
    return model


def build(name: str, config: Config, group: dist.ProcessGroup, tokens_BS: torch.Tensor) -> Step:
    """Return a contender's training step, with a model of its own."""
    torch.manual_seed(0)
    model = GPT(config).to(ranks.device())
    if name == OURS:
        tensor_parallel.parallelize(model, group)
    else:
        parallelize_with_torch(model, group, name.endswith("tutorial"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    def step() -> None:
        with nullcontext() if name == OURS else loss_parallel():
            logits_BSv = model(tokens_BS)
            if name == OURS:
                value = tensor_parallel.vocab_parallel_loss(logits_BSv, tokens_BS, group)
            else:
                value = loss(logits_BSv, tokens_BS)
            value.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def shard_of(config: Config, size: int) -> GPT:
    """Return a model as large as one rank's share, with fewer heads and without communication."""
    model = GPT(config)
    for block in model.blocks:
        for part in (block.attention, block.ffn):
            for name, linear in part.named_children():
                inputs, outputs, bias = linear.in_features, linear.out_features, linear.bias
                inner = name in ("out", "down")
                cut = (inputs // size, outputs) if inner else (inputs, outputs // size)
                setattr(part, name, nn.Linear(*cut, bias is not None))
    model.embedding = nn.Embedding(config.vocab // size, config.hidden)
    model.head = nn.Linear(config.hidden, config.vocab // size, bias=False)
    if config.tied:
        model.head.weight = model.embedding.weight
    return model.to(ranks.device())


def make_compute_step(config: Config, size: int, tokens_BS: torch.Tensor, chain: bool) -> Step:
    """Return a step of compute alone. chain: no weight gradients and no optimizer."""
    model, tokens_BS = shard_of(config, size), tokens_BS % (config.vocab // size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    if chain:
        model.requires_grad_(False)
        model.embedding.register_forward_hook(lambda _m, _a, x_BSH: x_BSH.requires_grad_())

    def step() -> None:
        loss(model(tokens_BS), tokens_BS).backward()
        if not chain:
            optimizer.step()
            optimizer.zero_grad()

    return step


def messages(config: Config, group: dist.ProcessGroup, tokens_BS: torch.Tensor) -> Step:
    """Return a step that sends a step's messages without a model, and returns forward's seconds."""
    x_BSH = torch.zeros(*tokens_BS.shape, config.hidden, device=tokens_BS.device)
    # For the loss: each token's maximum; then the sum of exponentials and the target's logit.
    rows = [torch.zeros(n, *tokens_BS.shape, device=tokens_BS.device) for n in (1, 2)]

    def step() -> float:
        begin = read_clock(tokens_BS.device)
        for _ in range(1 + 2 * config.layers):  # after embedding, attention, ffn
            dist.all_reduce(x_BSH, group=group)
        for row in rows:
            dist.all_reduce(row, group=group)
        forward = read_clock(tokens_BS.device) - begin
        for _ in range(2 * config.layers + 1):
            dist.all_reduce(x_BSH, group=group)
        return forward

    return step


def batch_of(config: Config, batch: int) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(config.vocab, (batch, config.seq), device=ranks.device())


def measure(config: Config, batch: int, slow: bool, rounds: int, names: Sequence[str]) -> Times:
    """Return this rank's seconds of `rounds` steps of each contender."""
    tokens_BS, group, device = batch_of(config, batch), select_group(slow), ranks.device()
    steps = {name: build(name, config, group, tokens_BS) for name in names}
    steps["compute"] = make_compute_step(config, group.size(), tokens_BS, chain=False)
    steps["chain"] = make_compute_step(config, group.size(), tokens_BS, chain=True)
    steps["wire"] = messages(config, group, tokens_BS)
    if slow:
        steps["work"] = messages(config, dist.group.WORLD, tokens_BS)
    return measure_alternately(steps, rounds, device, {"wire": "forward wire"})


def peak_of(config: Config, batch: int, name: str) -> int:
    """Return the most bytes that one contender holds on this rank in a step."""
    tokens_BS = batch_of(config, batch)
    return peak(lambda: build(name, config, dist.group.WORLD, tokens_BS))


def spent_by(config: Config, batch: int, name: str) -> dict[str, float]:
    """Return this rank's milliseconds of one step by kind; the module's docstring has them."""
    step = build(name, config, dist.group.WORLD, batch_of(config, batch))
    for _ in range(2):
        step()
    found = []
    for _ in range(4):
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU]) as seen, record_function("the step"):
            step()
        found.append(split_profile(seen.events()))
    calls = cProfile.Profile()
    calls.runcall(step)
    shortest = min(found, key=lambda one: sum(one[part] for part in PARTS))
    return shortest | {"calls": sum(entry.callcount for entry in calls.getstats())}


def split_profile(events: Any) -> dict[str, float]:
    """Return the parts of a step's profile."""
    (full,) = (e for e in events if e.name == "the step")
    plain, dispatched = operations(full)
    moved = [e for e in events if e.name.startswith(("gloo:", "c10d::", "_c10d_functional::"))]
    kernels, both = sum_busy_ms(plain), sum_busy_ms(plain + moved)
    return {
        "kernels": kernels,
        "messages": both - kernels,
        "rest": full.cpu_time_total / 1e3 - both,
        "operations": len(plain),
        "dispatched": dispatched,
    }


def operations(event: Any) -> tuple[list[Any], int]:
    """Return the outermost operations on plain tensors in `event`, and the number of dispatches."""
    found = [operations(child) for child in event.cpu_children]
    dispatched = sum(number for _, number in found) + (event.name == "PythonSubclass")
    if event.name.startswith("aten::") and not dispatched:
        return [event], 0
    return [one for plain, _ in found for one in plain], dispatched


def sum_busy_ms(events: list[Any]) -> float:
    """Return the milliseconds during which at least one of these events runs."""
    total = end = 0.0
    for span in sorted((e.time_range for e in events), key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, end))
        end = max(end, span.end)
    return total / 1e3


def cases(kind: str, size: int, quick: bool) -> list[tuple[str, Config, int, int]]:
    """Return (name, shape, batch, rounds) of each case on a link."""
    if quick:
        return [("nano", PRESETS["nano"], 1, 1)]
    if kind == "gpu":
        name = gpu_model(size)
        return [(name, PRESETS[name], 4, 4)]
    wide = replace(PRESETS["mini"], layers=2, heads=16, hidden=1024)
    return [("mini", PRESETS["mini"], 2, 2)] + [("wide", wide, 2, 1)] * (kind == "loopback")


def make_divisible_config(config: Config, size: int) -> Config:
    """Return the shape, with heads and vocabulary rounded up to multiples of `size`."""
    heads, vocab = (-(-n // size) * size for n in (config.heads, config.vocab))
    return replace(config, heads=heads, hidden=heads * config.head_size, vocab=vocab)


def main(arguments: list[str] | None = None) -> None:
    chosen = parse_options(__doc__, arguments)
    rows: list[dict[str, Any]] = []
    spent: list[dict[str, Any]] = []
    held: dict[tuple[str, int], dict[str, int]] = {}
    for kind in chosen.links:
        on = make_run_options(kind)
        for size in chosen.ranks:
            for name, config, batch, rounds in cases(kind, size, chosen.quick):
                config = make_divisible_config(config, size)
                print_progress(name, kind, f"{size} ranks")
                names = [OURS, *(THEIRS[:1] if name == "wide" else THEIRS)]
                if (name, size) not in held:  # the link does not matter
                    held[name, size] = {
                        who: max(ranks.run(peak_of, size, config, batch, who, **on))
                        for who in names
                    }
                how = config, batch, kind == "slow", rounds * chosen.repeats, names
                times = select_slowest_rank(ranks.run(measure, size, *how, **on))

                def floor(middle: dict[str, float], size: int = size, kind: str = kind) -> float:
                    return max(
                        middle["compute"] + middle["forward wire"],
                        middle["chain"] + middle["wire"],
                        middle["compute"] + estimate_moving_seconds(middle, kind, size),
                    )

                case = f"{describe_model(name, config)}, {batch * config.seq} tokens"
                for theirs in names[1:]:
                    given = case, theirs, size, kind, times, chosen.repeats, floor, (OURS, theirs)
                    rows.append(make_row(*given, **compare_peaks((OURS, theirs), held[name, size])))
                if kind != "loopback":
                    continue
                for who in names:
                    told = ranks.run(spent_by, size, config, batch, who, **on)
                    shortest = min(told, key=lambda one: sum(one[part] for part in PARTS))
                    numbers = {k: round(v, 1) if k in PARTS else v for k, v in shortest.items()}
                    spent.append({"case": f"{who}: {name}", "ranks": size, **numbers})
    print_rows(rows, chosen.json, where=spent)
    if not chosen.json:
        head = ["where the time goes", "ranks", *(f"{part} (ms)" for part in PARTS)]
        head += ["operations", "dispatched by DTensor", "calls of Python functions"]
        show.table([list(s.values()) for s in spent], head)


if __name__ == "__main__":
    main()
