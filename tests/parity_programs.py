"""Programs that are compared with a plain one: right ones, and wrong ones with their controls.

A program is a row of the contract (`contract.Row`), trained by its technique's side (`sides`). A
wrong one is such a row with one mistake: a changed part of a side, or a replaced function. Its
control is the same row without the mistake, so that an alarm is due to the mistake.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import sides
import torch
import torch.distributed as dist
import torch.nn.functional as F
from commands import load_bench
from contract import FLOAT32, SIDES, Row, make_groups
from sides import Side, plain_loss
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import loss_parallel

from shardlab import context_parallel as cp
from shardlab import data_parallel as dp
from shardlab import experts, pipeline, ranks
from shardlab import sequence_parallel as sp
from shardlab import tensor_parallel as tp
from shardlab.context_parallel import core as cp_core
from shardlab.gpt.model import Config
from shardlab.layout import Layout
from shardlab.tensor_parallel import core as tp_core
from shardlab.tensor_parallel.overlap import _SumCopiedGradients
from shardtools.parity.core import Matcher
from shardtools.parity.programs import build_report, match_program, record_program
from shardtools.parity.record import Record

GPT2 = Config(vocab=64, seq=16, layers=2, heads=4, hidden=32)
LLAMA = Config(
    vocab=64, seq=16, layers=2, heads=8, hidden=64, kv_heads=4, ffn=48, mlp="swiglu", norm="rms",
    bias=False, tied=False,
)  # fmt: skip
UNTIED = replace(GPT2, tied=False)
SPARSE = replace(
    LLAMA, experts=4, expert_ffn=24, hidden=32, heads=4, kv_heads=4, experts_per_token=2
)
DROPOUT = replace(GPT2, dropout=0.2)
CLIP = {"clip": (0.3,)}  # norms are 1 and more
BATCHES = 4  # a longer run repeats these, so that it learns something
Program = Callable[[Any], Any]


def make_row(technique: str, config: Config, layout: Layout, **more: Any) -> Row:
    more = {"dtype": torch.float32, "steps": 1, "options": {}} | more
    sizes = more.pop("sizes", (8 // layout.dp,) * layout.dp)
    case = more.pop("case", "parity")
    return Row(technique, case, config, layout, FLOAT32, sizes, **more)


def join_batch(row: Row, step: int) -> tuple[Tensor, ...]:
    parts = [part for copy in row.make_batch(step) for part in copy]
    return tuple(torch.cat([part[n] for part in parts]) for n in (0, 1))


def make_plain_program(row: Row) -> Program:
    def train(watch: Any) -> list[float]:
        model, losses = row.build_model(row.config), []
        o = row.make_optimizer(model)
        m = row.layout.microbatches if row.layout.pp == 1 else 1
        watch(model, o)
        for step in range(row.steps):
            o.zero_grad()
            torch.manual_seed(step)
            losses.append(0.0)
            for parts in zip(*(x.chunk(m) for x in join_batch(row, step % BATCHES)), strict=True):
                value = plain_loss(model(parts[0]), parts[1]) / m
                value.backward()
                losses[-1] += value.item()
            if row.clip:
                nn.utils.clip_grad_norm_(model.parameters(), row.clip[step % len(row.clip)])
            o.step()
        return losses

    return train


def get_watched_model(side: Side) -> Any:
    if hasattr(side, "engine"):
        return side.engine
    model = side.model
    if side.row.technique == "mesh":
        return model.sharded or model.pipeline.parts
    staged = side.row.technique in ("pipeline", "torch's pipeline")
    return list(getattr(model, "parts", model)) if staged else model


class GatheredColumns(nn.Module):
    def __init__(self, whole: nn.Linear, group: Any, as_rows: bool):
        super().__init__()
        self.group, self.as_rows = group, as_rows
        mine = tp.shard_slice("columns", whole.out_features, group)
        self.weight = nn.Parameter(whole.weight.detach()[mine].clone())
        self.bias = nn.Parameter(whole.bias.detach()[mine].clone())

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(tp.copy_to(x, self.group), self.weight, self.bias)
        y = tp.gather_last(y, self.group)
        pieces = y.chunk(dist.get_world_size(self.group), -1)
        return torch.stack(pieces).reshape(y.shape) if self.as_rows else y


class ColumnSide(Side):
    def wrap_model(self, model: Any, as_rows: bool = False) -> Any:
        ffn = model.blocks[0].ffn
        ffn.up = GatheredColumns(ffn.up, self.groups["tp"], as_rows)
        return model

    def step(self, batch: Any) -> Any:
        ((part,),) = batch
        value = self.compute_loss(part)
        value.backward()
        return {None: value.detach()}


class DTensorSide(Side):
    def wrap_model(self, model: Any, **_: Any) -> Any:
        layout = self.row.layout
        shape, names = (layout.dp, layout.tp), ("dp", "tp")
        axes = init_device_mesh(ranks.device().type, shape, mesh_dim_names=names)
        load_bench("tensor_parallel")["parallelize_with_torch"](model, axes["tp"])
        for each in (*model.blocks, model) if layout.dp > 1 else ():
            fully_shard(each, mesh=axes["dp"])
        return model

    def step(self, batch: Any) -> Any:
        (part,) = batch[self.copy]
        with loss_parallel():
            self.compute_loss(part).backward()


SCHEDULES = {  # ours -> torch's
    "gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble",
}  # fmt: skip


class TorchPipelineSide(Side):
    def wrap_model(self, model: Any, **_: Any) -> Any:
        layout, group = self.row.layout, self.groups["pp"]
        route, parts = layout.stage_order, pipeline.split_model(model, layout.pp * layout.chunks)
        mine = [n for n, stage in enumerate(route) if stage == dist.get_rank(group)]
        where = len(parts), ranks.device()
        stages = [pipelining.PipelineStage(parts[n], n, *where, group=group) for n in mine]
        self.last = len(parts) - 1 in mine
        made = pipelining.schedules.get_schedule_class(SCHEDULES[layout.schedule])
        given = stages if layout.chunks > 1 else stages[0]
        self.schedule = made(given, layout.microbatches, loss_fn=plain_loss)
        return nn.ModuleList(parts[n] for n in mine)

    def step(self, batch: Any) -> Any:
        tokens, targets = (torch.cat([part[n] for part in batch[0]]) for n in (0, 1))
        given = (tokens,) if dist.get_rank(self.groups["pp"]) == 0 else ()
        self.schedule.step(*given, **({"target": targets} if self.last else {}))


def set_engine_clipping(side: Any) -> None:
    side.engine._config.gradient_clipping = side.engine.optimizer.clip_grad = side.row.clip[0]


EXTRA_SIDES = {
    "columns": ColumnSide,
    "DTensor": DTensorSide,
    "torch's pipeline": TorchPipelineSide,
}


def make_parallel_program(row: Row, mistake: Callable[[Side], None] = lambda side: None) -> Program:
    """Return the row's parallel program, with a mistake in its side; it returns a rank's losses."""

    def train(watch: Any) -> list[float | None]:
        losses = []
        model, groups = row.build_model(row.config), make_groups(row)
        side = (SIDES | EXTRA_SIDES)[row.technique](row, model, groups)
        mistake(side)
        if row.options.get("clips"):
            set_engine_clipping(side)
        watch(get_watched_model(side), side.optimizer)
        for step in range(row.steps):
            side.optimizer.zero_grad()
            torch.manual_seed(step)
            getattr(side, "before_step", lambda: None)()
            losses.append(get_printed_loss(side, side.step(row.make_batch(step % BATCHES))))
            if row.clip and not hasattr(side, "engine"):
                side.clip_gradients(row.clip[step % len(row.clip)])
            side.optimizer.step()
        return losses

    return train


def get_printed_loss(side: Side, found: Any) -> float | None:
    value = (found or {}).get(None, (found or {}).get(side.copy))
    return None if value is None else float(side.join_loss(value))


def freeze_first(program: Program) -> Program:
    """Exempt all that is imported by now from the garbage collection that ends each program."""
    gc.freeze()
    return program


def compare_cases(cases: dict[Any, tuple[Program, Program, int]]) -> dict[Any, Any]:
    """Compare (plain program, parallel program, ranks) for each case; return report or error line.

    One run records all plain programs, and one run per number of ranks runs the parallel programs.
    """
    number = {name: id(case[0]) for name, case in cases.items()}
    plains = {number[name]: case[0] for name, case in cases.items()}

    def record_plains() -> dict[int, Record]:
        return {n: record_program(freeze_first(program)) for n, program in plains.items()}

    (records,) = ranks.run(record_plains, 1, device="cpu", timeout=1200, show=False)
    found: dict[Any, Any] = {}
    for size in sorted({case[2] for case in cases.values()}):
        mine = {name: case[1] for name, case in cases.items() if case[2] == size}

        def match_all(mine: dict = mine) -> dict[Any, Matcher]:
            todo = ((n, freeze_first(program), records[number[n]]) for n, program in mine.items())
            return {n: match_program(program, record) for n, program, record in todo}

        each = ranks.run(match_all, size, device="cpu", timeout=1200, show=False)
        for name in mine:
            try:
                found[name] = build_report(records[number[name]], [one[name] for one in each])
            except ValueError as error:
                found[name] = str(error)
    return found


PLAIN_PROGRAMS: dict[str, Program] = {}  # by `reference`, so that rows share a plain program


def make_case(row: Row, program: Program) -> tuple[Program, Program, int]:
    return (
        PLAIN_PROGRAMS.setdefault(name_plain_program(row), make_plain_program(row)),
        program,
        row.ranks,
    )


def name_plain_program(row: Row) -> str:
    m = row.layout.microbatches if row.layout.pp == 1 else 1
    same = row.config, sum(row.sizes), row.steps, row.lr, row.dtype, row.clip, m
    same += getattr(row, "optimizer_name", ""), getattr(row, "family", "")
    return f"{type(row).__name__} {same}"


# Right programs

TWO_COPIES = Layout(dp=2)
DATA = make_row("data", GPT2, TWO_COPIES, options={"way": "parameters"})


RIGHT = {  # a row of every technique of the course and of libraries
    "data": make_row(
        "data", GPT2, TWO_COPIES, options={"bucket_bytes": 20_000, "first_bytes": 4_000}
    ),
    "data clipped": make_row("data", LLAMA, TWO_COPIES, **CLIP),
    "DDP accumulated": make_row("DDP", GPT2, replace(TWO_COPIES, microbatches=2)),
    "zero 1 llama": make_row("zero", LLAMA, Layout(dp=2, zero=1)),
    "zero 2 clipped": make_row("zero", GPT2, Layout(dp=2, zero=2), **CLIP),
    "zero 3": make_row("zero", GPT2, Layout(dp=2, zero=3)),
    "FSDP2 3 accumulated": make_row("FSDP2", LLAMA, Layout(dp=2, zero=3, microbatches=2), **CLIP),
    "DeepSpeed 2 clipped": make_row(
        "DeepSpeed", GPT2, Layout(dp=2, zero=2), options={"clips": True}, **CLIP
    ),
    "pipeline 1f1b": make_row("pipeline", GPT2, Layout(pp=2, schedule="1f1b", microbatches=4)),
    "pipeline zb-v": make_row(
        "pipeline", replace(UNTIED, layers=4),
        Layout(pp=2, schedule="zb-v", microbatches=4, chunks=2),
    ),
    "torch's pipeline": make_row(
        "torch's pipeline", UNTIED, Layout(pp=2, schedule="1f1b", microbatches=4)
    ),
    "tensor llama": make_row("tensor", LLAMA, Layout(tp=2)),
    "DTensor": make_row("DTensor", LLAMA, Layout(tp=2)),
    "tensor in copies 3": make_row("tensor in copies", LLAMA, Layout(dp=2, tp=2, zero=3)),
    "sequence gpt2": make_row("tensor", GPT2, Layout(tp=2, sequence_parallel=True)),
    "context ring zigzag gpt2": make_row(
        "context", GPT2, Layout(cp=2), options={"way": "ring", "layout": "zigzag"}
    ),
    "context ulysses contiguous llama": make_row(
        "context", LLAMA, Layout(cp=2), options={"way": "ulysses", "layout": "contiguous"}
    ),
    "experts": make_row("experts", SPARSE, Layout(dp=2, ep=2)),
    "mesh": make_row("mesh", GPT2, Layout(dp=2, tp=2, zero=1), clip=(0.3,)),
}  # fmt: skip


# Wrong ones


@dataclass(frozen=True)
class WrongProgram:
    """Mistake in a side, in functions (owner, name, replacement), or in the row."""

    row: Row
    place: str  # regular expressions for the first wrong tensor, and the words of the report
    words: str
    mistake: Callable[[Side], None] = lambda side: None
    patches: tuple[tuple[Any, str, Any], ...] = ()
    other_row: Row | None = None  # the wrong program's row, if different
    control: Callable[[Side], None] = lambda side: None  # changes that the right program needs

    def build_program(self) -> Program:
        def train(watch: Any) -> Any:
            with ExitStack() as stack:
                for owner, name, value in self.patches:
                    stack.enter_context(mock.patch.object(owner, name, value))
                return make_parallel_program(self.other_row or self.row, self.mistake)(watch)

        return train


def do_nothing(*_: Any) -> None:
    """Do nothing, in place of a forgotten call."""


def pass_through(x: Tensor, *_: Any) -> Tensor:
    return x


def reduce_mean(x: Tensor, group: Any) -> Tensor:
    return tp.reduce_from(x, group) / dist.get_world_size(group)


def add_bias_early(self: Any, x: Tensor) -> Tensor:
    return self.leave_region(F.linear(x, self.weight, self.bias), self.group)


def select_without_mask(numbers: Tensor, own: slice) -> tuple[Tensor, Tensor]:
    within = (numbers - own.start).clamp(0, own.stop - own.start - 1)
    return within, torch.zeros_like(numbers, dtype=torch.bool)


def average_over(module: nn.Module, group: Any, scale: float | None = None, skip: int = 0) -> None:
    parameters = list(module.parameters())
    for p in parameters[: len(parameters) - skip]:
        dist.all_reduce(p.grad, group=group)
        p.grad *= scale or 1 / dist.get_world_size(group)


def broadcast_from_rank_0(module: nn.Module, group: Any) -> None:
    for p in module.parameters():
        dist.broadcast(p.grad, 0, group=group)


def average_in_pairs(module: nn.Module, group: Any) -> None:
    average_over(module, dist.new_subgroups(2)[0])


def clip_then_average(module: nn.Module, group: Any) -> None:
    nn.utils.clip_grad_norm_(module.parameters(), 0.3)
    average_over(module, group)


def build_with_own_seed(self: Row, config: Config) -> nn.Module:
    torch.manual_seed(dist.get_rank())
    return sides.GPT(config)


def compute_padded_loss(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    zeros = logits.new_zeros(*logits.shape[:-1], 2)
    return plain_loss(torch.cat((logits, zeros), -1), targets, reduction)


def attend_whole_blocks(
    layout: Any, ranks: int, rank: int, source: int, causal: bool, share: int
) -> list:
    return [cp_core.Block(slice(0, share), slice(0, share), source == rank)]


def change_second_shard(change: Callable[[Tensor, Any, str], Tensor]) -> Callable[..., Tensor]:
    turn = iter(range(10**6))

    def shard_or_change(x: Tensor, group: Any, layout: str = "zigzag") -> Tensor:
        return (
            cp_core.shard_tokens(x, group, layout)
            if next(turn) % 2 == 0
            else change(x, group, layout)
        )

    return shard_or_change


def shard_and_shift(x: Tensor, group: Any, layout: str) -> Tensor:
    y = cp_core.shard_tokens(x, group, layout)
    return torch.cat((y[:, 1:], y[:, :1]), 1)


class IgnoringRow(Row):
    def make_batch(self, step: int) -> list[list[Any]]:
        found = super().make_batch(step)
        for tokens, targets, _ in found[-1]:
            targets[: len(tokens) // 4 * 3, tokens.shape[1] // 2 :] = -100
        return found


def scale_options(**given: float) -> Callable[[Side], None]:
    def scale(side: Side) -> None:
        for group in side.optimizer.param_groups:
            group.update({name: group[name] * value for name, value in given.items()})

    return scale


def use_share_of_rank_0(side: Side) -> None:
    side.copy = 0


def scale_gradient(loss: Tensor, factor: float) -> Tensor:
    """Return a loss whose gradient is scaled, and whose printed value is not."""
    return factor * loss - (factor - 1) * loss.detach()


def skip_division(side: Any) -> None:
    side.compute_mean = lambda part, parts: scale_gradient(side.compute_loss(part) / parts, parts)


def halve_loss(side: Any) -> None:
    side.compute_mean = lambda part, parts: scale_gradient(side.compute_loss(part) / parts, 1 / 2)


def average_over_targets(side: Any) -> None:
    def average(part: Any, parts: int) -> Tensor:
        count = int((part[1] != -100).sum())
        return dp.scale_for_global_mean(side.compute_loss(part, "sum"), count, side.groups["dp"])

    side.compute_mean = average


def skip_clipping(side: Side) -> None:
    side.clip_gradients = do_nothing


def double_clip_limit(side: Side) -> None:
    clip = side.clip_gradients
    side.clip_gradients = lambda limit: clip(2 * limit)


def clip_locally(side: Side) -> None:
    side.clip_gradients = lambda limit: nn.utils.clip_grad_norm_(side.model.parameters(), limit)


def skip_step_on_rank_1(side: Side) -> None:
    step, turn = side.optimizer.step, iter(range(10**6))
    side.optimizer.step = lambda: step() if next(turn) or dist.get_rank() == 0 else None


def keep_stale_parameters(side: Side) -> None:
    """Train half of the parameters on each rank, and receive outdated values for the others."""
    step, rank, n = side.optimizer.step, dist.get_rank(), dist.get_world_size()

    def step_own_half() -> None:
        had = [p.detach().clone() for p in side.model.parameters()]
        step()
        with torch.no_grad():
            for i, (p, old) in enumerate(zip(side.model.parameters(), had, strict=True)):
                if i % n != rank:
                    p.copy_(old)

    side.optimizer.step = step_own_half


def untie_ends(side: Any) -> None:
    side.model.tied_parameter = None


def scale_micro_batches(side: Any, factor: float = 4) -> None:
    """Scale each micro-batch's mean: as if it were the step's, or divided once more."""
    right = side.model.passes.loss
    side.model.passes.loss = lambda logits, targets: scale_gradient(right(logits, targets), factor)


def divide_twice(module: nn.Module, *groups: Any, right: Any = experts.average_gradients) -> None:
    right(module, *groups)
    for p in experts.own_parameters(module):
        p.grad /= dist.get_world_size()


def make_data_row(**more: Any) -> Row:
    return make_row("data", more.pop("config", GPT2), more.pop("layout", TWO_COPIES),
               options={"way": "parameters"}, **more)  # fmt: skip


def patch_averaging(function: Callable[..., None]) -> tuple[tuple[Any, str, Any], ...]:
    return ((dp, "average_gradients", function),)


def make_edges_row(enter: Any, leave: Any) -> Row:
    return replace(TENSOR, options={"edges": tp.Edges(enter, leave)})


TENSOR = make_row("tensor", GPT2, Layout(tp=2))
GROUPED = make_row("tensor", replace(LLAMA, kv_heads=2), Layout(tp=4))
SEQUENCE = make_row("tensor", LLAMA, Layout(tp=2, sequence_parallel=True))
RING = make_row("context", GPT2, Layout(cp=2), options={"way": "ring", "layout": "zigzag"})
CONTIGUOUS = replace(RING, options={"way": "ring", "layout": "contiguous"})
ZERO = make_row("zero", GPT2, Layout(dp=2, zero=2))
PIPE = make_row("pipeline", GPT2, Layout(pp=2, schedule="1f1b", microbatches=4))
UNTIED_PIPE = replace(PIPE, config=UNTIED)
EXPERTS = make_row("experts", SPARSE, Layout(dp=2, ep=2))
IGNORING = IgnoringRow(**{f: getattr(DATA, f) for f in DATA.__dataclass_fields__})

WRONG: dict[str, WrongProgram] = {
    "tensor: sum of the input's gradient forgotten": WrongProgram(
        TENSOR, r"backward blocks\.1\.", "first error: partial sums",
        other_row=make_edges_row(pass_through, tp.reduce_from),
    ),
    "tensor: sum of the outputs forgotten": WrongProgram(
        TENSOR, r"forward blocks\.0\.attention_norm|forward embedding", "partial sums",
        other_row=make_edges_row(tp.copy_to, pass_through),
    ),
    "tensor: bias added by each rank": WrongProgram(
        TENSOR, r"forward blocks\.0\.attention\.out", r"attention\.out\.bias is added 2 times",
        patches=((tp_core.RowLinear, "forward", add_bias_early),),
    ),
    "tensor: mean in place of a sum": WrongProgram(
        TENSOR, "forward embedding", r"0.5 times .* number of ranks \(2\) one time too many",
        other_row=make_edges_row(tp.copy_to, reduce_mean),
    ),
    "tensor: tokens of other ranks not masked": WrongProgram(
        TENSOR, "forward embedding", "unknown reason; the value is the same on all|rows are wrong",
        patches=((tp_core, "to_local_rows", select_without_mask),),
    ),
    "sequence: gradients of norms not summed": WrongProgram(
        SEQUENCE, "gradient norm", "not added up", patches=((sp, "sum_gradients", do_nothing),)
    ),
    "tensor: gradients of shared heads not summed": WrongProgram(
        GROUPED, r"gradient .*attention\.(key|value)\.weight",
        r"not added up over ranks 0, 1 \| 2, 3",
        patches=(
            (_SumCopiedGradients, "backward", staticmethod(lambda ctx, dx: (dx, None, None))),
        ),
    ),
    "data: summed, not averaged": WrongProgram(
        DATA, "gradient ", "2 times .* a sum over 2 ranks that was not averaged",
        patches=patch_averaging(lambda m, g: average_over(m, g, 1.0)),
    ),
    "data: never averaged": WrongProgram(
        DATA, "gradient ", "not averaged over ranks 0, 1", patches=patch_averaging(do_nothing)
    ),
    "data: averaged in pairs alone": WrongProgram(
        make_data_row(layout=Layout(dp=4)), "gradient ",
        r"averaged over ranks 0, 1 \| 2, 3 only, not over ranks 0, 1, 2, 3",
        patches=patch_averaging(average_in_pairs),
    ),
    "data: divided twice": WrongProgram(
        DATA, "gradient ", r"0.5 times .* ranks \(2\) one time too many", mistake=halve_loss
    ),
    "data: a mean of means over other counts": WrongProgram(
        IGNORING, "gradient ", "began with wrong factors: .* count", control=average_over_targets,
    ),
    "data: the last bucket is dropped": WrongProgram(
        DATA, "gradient norm", "not averaged over ranks",
        patches=patch_averaging(lambda m, g: average_over(m, g, skip=3)),
    ),
    "data: rank 0's gradient for all": WrongProgram(
        DATA, "gradient ", "rank 0's own gradient", patches=patch_averaging(broadcast_from_rank_0)
    ),
    "data: the same share on every rank": WrongProgram(
        DATA, "forward embedding", "no rank .*ranks 0, 1 hold the same", mistake=use_share_of_rank_0
    ),
    "data: another seed on each rank": WrongProgram(
        DATA, "weights ", "a different seed", patches=((Row, "build_model", build_with_own_seed),)
    ),
    "data: micro-batches' losses not divided": WrongProgram(
        make_data_row(layout=replace(TWO_COPIES, microbatches=2)), "gradient ",
        "2 times .* the loss was already scaled by 2", mistake=skip_division,
    ),
    "data: clipped before averaging": WrongProgram(
        make_data_row(**CLIP), "gradient ", "each gradient was clipped", mistake=skip_clipping,
        patches=patch_averaging(clip_then_average),
    ),
    "data: one rank skips a step": WrongProgram(
        make_data_row(steps=2), "0 update ",
        "took 2 optimizer steps, but rank 0 took 2, rank 1 took 1",
        mistake=skip_step_on_rank_1,
    ),
    "data: padding in the softmax": WrongProgram(
        make_data_row(config=UNTIED), "backward head", "every output was right: the loss",
        patches=((sides, "plain_loss", compute_padded_loss),),
    ),
    "context: positions begin at 0 on each rank": WrongProgram(
        RING, r"forward blocks\.0\.attention", "rows are wrong",
        patches=((cp_core, "token_positions", lambda lay, s, n, r, d=None: torch.arange(s // n)),),
    ),
    "context: the mask is forgotten on the ring": WrongProgram(
        CONTIGUOUS, r"forward blocks\.0\.attention", "rows are wrong|unknown reason",
        patches=((cp_core, "list_blocks", attend_whole_blocks),),
    ),
    "context: targets are not in zig-zag": WrongProgram(
        RING, "backward head", "every output was right: the loss .*targets",
        patches=((cp, "shard_tokens", change_second_shard(
            lambda x, group, layout: cp_core.shard_tokens(x, group, "contiguous"))),),
    ),
    "context: targets are shifted within a share": WrongProgram(
        CONTIGUOUS, "backward head", "every output was right: the loss .*targets",
        patches=((cp, "shard_tokens", change_second_shard(shard_and_shift)),),
    ),
    "context: gradients not averaged": WrongProgram(
        RING, "gradient ", "not averaged over ranks",
        patches=((cp, "average_gradients", do_nothing),),
    ),
    "zero: clipped by the norm of a piece": WrongProgram(
        replace(ZERO, **CLIP), "gradient ", "clip by its own norm",
        mistake=clip_locally,
    ),
    "zero: clipped at another norm": WrongProgram(
        replace(ZERO, **CLIP), "gradient ", "by the same factor .a different clipping norm",
        mistake=double_clip_limit,
    ),
    "zero: weight decay twice": WrongProgram(
        ZERO, "update ", "-.* times the weight: wrong weight decay",
        mistake=scale_options(weight_decay=2),
    ),
    "zero: learning rate times ranks": WrongProgram(
        ZERO, "update ", "2 times the right value: wrong step size", mistake=scale_options(lr=2)
    ),
    "zero: stale weights are gathered": WrongProgram(
        make_data_row(steps=2), "1 forward embedding", "does not use the weights",
        mistake=keep_stale_parameters,
    ),
    "pipeline: tied weight, gradient of one stage only": WrongProgram(
        PIPE, r"gradient embedding\.weight", "not added up", mistake=untie_ends
    ),
    "pipeline: loss not divided by m": WrongProgram(
        UNTIED_PIPE, "gradient ",
        "4 times .* 4 micro-batches that was not averaged|already scaled by 4",
        mistake=scale_micro_batches,
    ),
    "experts: gradients divided twice": WrongProgram(
        EXPERTS, r"gradient blocks\.\d\.ffn\.experts", r"0.5 times .*the number of ranks \(2\)",
        patches=((experts, "average_gradients", divide_twice),),
    ),
    "experts: tokens dropped by a capacity": WrongProgram(
        EXPERTS, r"forward blocks\.\d\.ffn\.", "rows are held by no rank",
        other_row=replace(EXPERTS, config=replace(SPARSE, capacity=0.75)),
    ),
}  # fmt: skip
