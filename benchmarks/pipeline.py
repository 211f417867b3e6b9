"""Benchmark of our pipeline against torch.distributed.pipelining, schedule by schedule.

    python benchmarks/pipeline.py            # tables; some seven minutes on two cores
    python benchmarks/pipeline.py --json     # {"rows": [{"case", "against", "ranks", …}, …], …}
    python benchmarks/pipeline.py --quick    # toy sizes, seconds: only a smoke test

Every rank trains its stage of one model in turn, step by step: ours and torch's with GPipe, 1F1B,
interleaved 1F1B and ZB-V, from the same parts; and it computes its parts' passes without a message
(compute alone). All ranks start a step together, so each contender meets the same load; the order
is reversed from round to round. A step is zero_grad, forward and backward of all micro-batches, and
AdamW, and lasts until the slowest rank is done. Torch does not merge the outputs of the last
stage (return_outputs=False), since ours does not either.

ratio: median step of ours over median step of torch's in each repeat of a few rounds; the median
and the quartiles over the repeats are reported. Other work on the machine comes and goes, and thus
affects both sides alike.

floor: the share of the physical floor that ours reaches, floor / median step of ours. The floor is,
plus the optimizer,
  with more ranks than cores: the passes of the slowest stage, one after another, without a bubble,
      because other stages compute while one waits;
  with a core or a GPU for each rank: the simulated step of the schedule, from each stage's own
      passes, measured alone, and from the time of one message on the link.
Passes alone are the least of one repeat, the step is its median, and the share is the median over
the repeats. A share slightly above 1 is possible: stages measured alone share memory bandwidth.

predictions: the relative error of `simulate`. It is the measured cost of a step (the longest time
of a stage from its first pass to its last) over the simulated one, minus 1; median and quartiles of
a few steps. Stages compute if each rank has a core or a GPU; with more ranks than cores they would
delay each other, so that they sleep instead. `error`: simulated from the times of passes alone, or
of the sleeps; other programs on the machine increase it. `error_after`: simulated from the step's
own mean times of passes; the remaining error is order, waiting and messages.

The ratio on a CPU compares both with gloo. A message costs a core there, and a rank that waits
leaves its core to the others. With fewer GPUs than ranks there is no row: torch's stages send
from the GPU's memory, and gloo reads only the host's.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from side_by_side import (
    Times,
    describe_model,
    gpu_model,
    make_run_options,
    parse_options,
    print_progress,
    print_rows,
    ratio,
    read_clock,
    select_group,
    select_slowest_rank,
)
from torch import Tensor, nn
from torch.distributed import pipelining

from shardlab import pipeline, ranks
from shardlab.common import show
from shardlab.gpt.model import GPT, PRESETS, Config, loss

THEIRS = {  # schedule -> torch's class
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb-v": "ScheduleZBVZeroBubble",
}
if torch.__version__ < "2.13":  # a rank sends to itself there, which gloo does not support
    del THEIRS["zb-v"]
NAPS = 0.048, 0.040, 0.024  # seconds of a sleeping stage's F, I and W
Step = Callable[[], Any]
Naps = tuple[float, ...]


def make_our_step(name: str, config: Config, batch: Tensor, microbatches: int, group: Any) -> Step:
    """Return our training step on this rank."""
    schedule = pipeline.make_schedule(name, group.size(), microbatches)
    piped = pipeline.distribute_model(build_model(config), schedule, group)
    optimizer = torch.optim.AdamW(piped.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        piped.step(batch, batch)
        optimizer.step()

    return step


def make_torch_step(
    name: str, config: Config, batch: Tensor, microbatches: int, group: Any
) -> Step:
    """Return torch's step on this rank, from the same parts on the same stages as ours."""
    schedule = pipeline.make_schedule(name, group.size(), microbatches)
    mine = schedule.placement[group.rank()]
    parts = pipeline.split_model(build_model(config), schedule.parts)
    modules = nn.ModuleList(parts[part] for part in mine)
    stages = [
        pipelining.PipelineStage(parts[part], part, schedule.parts, batch.device, group=group)
        for part in mine
    ]
    made = getattr(pipelining, THEIRS[name])(
        stages if schedule.chunks > 1 else stages[0], microbatches, loss_fn=loss
    )
    given = (batch,) if 0 in mine else ()
    wanted = {"target": batch} if schedule.parts - 1 in mine else {}
    optimizer = torch.optim.AdamW(modules.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        made.step(*given, **wanted, return_outputs=False)
        optimizer.step()

    return step


def build_model(config: Config) -> GPT:
    """Return the model, the same for all contenders and on all ranks."""
    torch.manual_seed(0)
    return GPT(config).to(ranks.device())


class Alone:
    """Passes and optimizer of one stage without messages; a split backward has two halves."""

    def __init__(self, schedule: pipeline.Schedule, config: Config, batch: Tensor):
        parts = pipeline.split_model(build_model(config), schedule.parts)
        self.mine = [parts[part] for part in schedule.placement[dist.get_rank()]]
        self.later = [
            pipeline.defer_weight_gradients(part) if schedule.has_split_backward else None
            for part in self.mine
        ]
        self.batches = batch.tensor_split(schedule.microbatches)
        self.optimizer = torch.optim.AdamW(nn.ModuleList(self.mine).parameters(), lr=1e-3)

    def __call__(self) -> dict[str, float]:
        """Return the seconds of all forwards (F), all backwards (or I and W), and the optimizer."""
        self.optimizer.zero_grad()
        spent = dict.fromkeys(("F", "I", "W"), 0.0)
        for tokens_BS in self.batches:
            for part, later in zip(self.mine, self.later, strict=True):
                x, dy, begin = self.make_stage_inputs(part, tokens_BS)
                y = part(x) if part.head is None else loss(part(x), tokens_BS)
                forward = read_clock(x.device)
                torch.autograd.backward(y, dy)
                backward = read_clock(x.device)
                if later is not None:
                    pipeline.deferred.run_tasks(later)
                spent["F"] += forward - begin
                spent["I"] += backward - forward
                spent["W"] += read_clock(x.device) - backward
        begin = read_clock(tokens_BS.device)
        self.optimizer.step()
        return spent | {"optimizer": read_clock(tokens_BS.device) - begin}

    @staticmethod
    def make_stage_inputs(
        part: nn.Module, tokens_BS: Tensor
    ) -> tuple[Tensor, Tensor | None, float]:
        """Return a part's input, the gradient of its output, and the time at which it may begin."""
        shape, dtype = part.message_spec(tokens_BS)
        x = tokens_BS
        if part.embedding is None:
            x = torch.randn(shape, dtype=dtype, device=tokens_BS.device, requires_grad=True)
        dy = torch.randn(shape, dtype=dtype, device=x.device) if part.head is None else None
        return x, dy, read_clock(x.device)


def hop_seconds(config: Config, batch: Tensor, microbatches: int, group: Any) -> float:
    """Return the seconds of a message between two parts: half a round trip, the least of ten."""
    if group.size() == 1:
        return 0.0
    rank, least = group.rank(), float("inf")
    x_BSH = batch.new_zeros(len(batch) // microbatches, config.seq, config.hidden).float()
    for _ in range(10):
        dist.barrier()
        begin = read_clock(batch.device)
        for sender in (0, 1):
            if rank == sender:
                ranks.isend(x_BSH, 1 - rank, group).wait()
            elif rank == 1 - sender:
                ranks.irecv(x_BSH, 1 - rank, group).wait()
        if rank == 0:
            least = min(least, (read_clock(batch.device) - begin) / 2)
    seconds = torch.tensor([least])
    dist.broadcast(seconds, 0)
    return seconds.item()


def batch_of(config: Config, sequences: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randint(config.vocab, (sequences, config.seq), device=ranks.device())


def layout(schedule: pipeline.Schedule) -> str:
    """Return a name for the passes of a schedule, equal for schedules with the same passes."""
    halves = "halves" if schedule.has_split_backward else "whole"
    return f"alone, parts {schedule.placement}, backward {halves}"


def run_alternately(steps: dict[str, Step], rounds: int, times: dict[str, list[Any]]) -> None:
    """Run all steps in turns; `times` gets the seconds of a step, or the step's own result."""
    order = list(steps)
    for number in range(-2 if rounds > 3 else -1, rounds):  # first the rounds to warm up
        for name in order if number % 2 else reversed(order):
            dist.barrier()
            begin = read_clock(ranks.device())
            told = steps[name]()
            if number >= 0:
                times[name].append(told or read_clock(ranks.device()) - begin)


def measure(config: Config, sequences: int, microbatches: int, slow: bool, rounds: int) -> Times:
    """Return this rank's seconds of `rounds` steps of each contender, and of passes alone."""
    batch, group = batch_of(config, sequences), select_group(slow)
    steps: dict[str, Step] = {}
    for name in THEIRS:
        given = name, config, batch, microbatches, group
        schedule = pipeline.make_schedule(name, group.size(), microbatches)
        steps |= {name: make_our_step(*given), f"torch {THEIRS[name]}": make_torch_step(*given)}
        steps.setdefault(layout(schedule), Alone(schedule, config, batch))
    times: dict[str, list[Any]] = {name: [] for name in steps}
    run_alternately(steps, rounds, times)
    times["hop"] = [hop_seconds(config, batch, microbatches, group)]
    return times


def simulate_measured(
    schedule: pipeline.Schedule, spent: list[dict], hop: float
) -> pipeline.Timeline:
    """Simulate a schedule whose stages spend these seconds on all passes of each kind."""
    times = ([s[kind] / schedule.microbatches for s in spent] for kind in "FIW")
    return pipeline.simulate(schedule, *times, hop)


def has_core_per_stage(kind: str, size: int) -> bool:
    """Return True if each stage has a core or a GPU of its own."""
    return kind == "gpu" or size <= (os.cpu_count() or 1)


def floor(schedule: pipeline.Schedule, spent: list[dict], hop: float, each: bool) -> float:
    """Return a lower bound of a step's seconds; each: whether all stages can compute at once."""
    ends = [s["F"] + s["I"] + s["W"] for s in spent]
    if each:
        ends = [spans[-1].end for spans in simulate_measured(schedule, spent, hop).spans]
    return max(end + s["optimizer"] for end, s in zip(ends, spent, strict=True))


def find_least_seconds(
    results: list[dict[str, list]], name: str, rounds: slice
) -> list[dict[str, float]]:
    """Return the least seconds of passes alone in these rounds, by stage and kind."""
    return [
        {kind: min(one[kind] for one in r[name][rounds]) for kind in r[name][0]} for r in results
    ]


def make_schedule_row(
    name: str, case: str, microbatches: int, kind: str, results: list, repeats: int
) -> dict:
    """Return one row of the result, see the module; `seconds` go into the table alone."""
    size = len(results)
    schedule = pipeline.make_schedule(name, size, microbatches)
    pair = [name, f"torch {THEIRS[name]}"]
    seconds = select_slowest_rank([{key: r[key] for key in pair} for r in results])
    each = len(seconds[name]) // repeats
    ratios, fractions = [], []
    for repeat in range(repeats):
        rounds = slice(repeat * each, (repeat + 1) * each)
        spent = find_least_seconds(results, layout(schedule), rounds)
        mine, other = (seconds[key][rounds].median().item() for key in pair)
        least = floor(schedule, spent, results[0]["hop"][0], has_core_per_stage(kind, size))
        ratios.append(mine / other)
        fractions.append(least / mine)
    return {
        "case": f"{name}: {case}",
        "against": pair[1],
        "ranks": size,
        "link": kind,
        **ratio(ratios),
        "floor": round(statistics.median(fractions), 4),
        "seconds": round(seconds[name].median().item(), 4),
    }


def record_timelines(
    config: Config, sequences: int, microbatches: int, slow: bool, rounds: int, naps: Naps | None
) -> dict[str, list[Any]]:
    """Return this rank's measured timelines of all schedules, and the seconds of passes alone."""
    batch, group = batch_of(config, sequences), select_group(slow)
    steps: dict[str, Step] = {}

    def run_recorded(piped: pipeline.Pipeline, batch: Tensor) -> Step:
        def step() -> pipeline.Timeline:
            piped.step(batch, batch)
            return piped.gather_timeline()

        return step

    for name in pipeline.SCHEDULE_NAMES:
        schedule = pipeline.make_schedule(name, group.size(), microbatches)
        if naps is not None:
            size = len(batch) // microbatches * config.seq * config.hidden
            piped = pipeline.make_sleeping_pipeline(schedule, group, *naps, size, record=True)
            steps[name] = run_recorded(piped, torch.zeros(microbatches, 1))
        else:
            piped = pipeline.distribute_model(build_model(config), schedule, group, record=True)
            steps[name] = run_recorded(piped, batch)
            steps.setdefault(layout(schedule), Alone(schedule, config, batch))
    times: dict[str, list[Any]] = {name: [] for name in steps}
    run_alternately(steps, rounds, times)
    times["hop"] = [hop_seconds(config, batch, microbatches, group)]
    return times


def prediction(name: str, kind: str, results: list, naps: Naps | None) -> dict:
    """Return the relative error of a schedule's simulated cost, see the module's docstring."""
    size, before, after = len(results), [], []
    schedule, hop = results[0][name][0].schedule, results[0]["hop"][0]
    for number, timeline in enumerate(results[0][name]):
        if naps is None:
            spent = find_least_seconds(results, layout(schedule), slice(number, number + 1))
        else:
            passes = (nap * schedule.microbatches for nap in naps)
            spent = [dict(zip("FIW", passes, strict=True))] * size
        before.append(timeline.step_time / simulate_measured(schedule, spent, hop).step_time - 1)
        spent = [dict.fromkeys("FIW", 0.0) for _ in timeline.spans]
        for took, spans in zip(spent, timeline.spans, strict=True):
            for span in spans:
                took["I" if span.kind == "B" else span.kind] += span.end - span.begin
        after.append(timeline.step_time / simulate_measured(schedule, spent, hop).step_time - 1)
    return {
        "case": f"{name}: stages that {'sleep' if naps else 'compute'}",
        "ranks": size,
        "link": kind,
        **{key.replace("ratio", "error"): value for key, value in ratio(before).items()},
        **{key.replace("ratio", "error") + "_after": v for key, v in ratio(after).items()},
    }


def main(arguments: list[str] | None = None) -> None:
    chosen = parse_options(__doc__, arguments)
    rows, predictions = [], []
    for kind in chosen.links:
        for size in chosen.ranks:
            if kind == "gpu" and size > torch.cuda.device_count():
                gpus = f"{torch.cuda.device_count()} GPUs"
                print(f"no row for {size} ranks on {gpus}: each needs its own", file=sys.stderr)
                continue  # each stage needs a GPU of its own
            if chosen.quick:
                preset, each, rounds = "nano", 1, 1
            else:
                preset, each, rounds = (gpu_model(size), 4, 4) if kind == "gpu" else ("mini", 1, 2)
            print_progress(kind, f"{size} ranks")
            config = replace(
                PRESETS[preset], layers=2 * size if chosen.quick else max(8, 2 * size), tied=False
            )
            microbatches = max(8, size)
            sequences = each * microbatches
            on = make_run_options(kind)
            shape = config, sequences, microbatches, kind == "slow"
            results = ranks.run(measure, size, *shape, rounds * chosen.repeats, **on)
            case = f"{describe_model(preset, config)}, {microbatches} micro-batches"
            case += f" of {each * config.seq} tokens"
            rows += [
                make_schedule_row(n, case, microbatches, kind, results, chosen.repeats)
                for n in THEIRS
            ]
            naps = (
                None
                if has_core_per_stage(kind, size)
                else tuple(n * (0.1 if chosen.quick else 1) for n in NAPS)
            )
            results = ranks.run(record_timelines, size, *shape, min(chosen.repeats, 3), naps, **on)
            predictions += [prediction(n, kind, results, naps) for n in pipeline.SCHEDULE_NAMES]
    print_rows(rows, chosen.json, predictions=predictions)
    if chosen.json:
        return
    head = ["predicted", "ranks", "link", "measured / simulated - 1", "quartiles"]
    head += ["from its own passes", "quartiles"]
    show.table(
        [
            [p["case"], p["ranks"], p["link"]]
            + [format_percent(p["error"]), format_percent(*p["quartiles"])]
            + [format_percent(p["error_after"]), format_percent(*p["quartiles_after"])]
            for p in predictions
        ],
        head,
    )


def format_percent(*fractions: float) -> str:
    return " to ".join(f"{100 * fraction:+.1f}" for fraction in fractions) + " %"


if __name__ == "__main__":
    main()
