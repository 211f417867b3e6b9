"""Programs that are compared with a plain one: right ones, and wrong ones with their controls.

A program is a row of the contract (`contract.Row`), trained by its technique's side (`sides`). A
wrong one is such a row with one mistake: a changed part of a side, or a replaced function. Its
control is the same row without the mistake, so that an alarm is due to the mistake.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import sides
import torch
import torch.distributed as dist
import torch.nn.functional as F
from commands import benchmark
from contract import FLOAT32, SIDES, Row, groups
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
from shardlab.tensor_parallel.overlap import _Copied
from shardtools.parity.core import Matcher
from shardtools.parity.programs import judged, matched, recorded
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
DROPS = replace(GPT2, dropout=0.2)
CLIP = {"clip": (0.3,)}  # norms are 1 and more
BATCHES = 4  # a longer run repeats these, so that it learns something
Program = Callable[[Any], Any]


def row(technique: str, config: Config, layout: Layout, **more: Any) -> Row:
    """Return a row with eight sequences in all and one step of float32."""
    more = {"dtype": torch.float32, "steps": 1, "options": {}} | more
    sizes = more.pop("sizes", (8 // layout.dp,) * layout.dp)
    case = more.pop("case", "parity")
    return Row(technique, case, config, layout, FLOAT32, sizes, **more)


def batch(row: Row, step: int) -> tuple[Tensor, ...]:
    """Return a step's whole batch."""
    parts = [part for copy in row.batch(step) for part in copy]
    return tuple(torch.cat([part[n] for part in parts]) for n in (0, 1))


def plain(row: Row) -> Program:
    """Return the row's program for one process; the program returns its losses."""

    def program(watch: Any) -> list[float]:
        model, losses = row.model(row.config), []
        o = row.optimizer(model)
        m = row.layout.microbatches if row.layout.pp == 1 else 1
        watch(model, o)
        for step in range(row.steps):
            o.zero_grad()
            torch.manual_seed(step)
            losses.append(0.0)
            for parts in zip(*(x.chunk(m) for x in batch(row, step % BATCHES)), strict=True):
                value = plain_loss(model(parts[0]), parts[1]) / m
                value.backward()
                losses[-1] += value.item()
            if row.clip:
                nn.utils.clip_grad_norm_(model.parameters(), row.clip[step % len(row.clip)])
            o.step()
        return losses

    return program


def watched(side: Side) -> Any:
    """Return the watched part of a side: the model, or this rank's parts of it."""
    if hasattr(side, "engine"):
        return side.engine
    model = side.model
    if side.row.technique == "mesh":
        return model.sharded or model.pipeline.parts
    staged = side.row.technique in ("pipeline", "torch's pipeline")
    return list(getattr(model, "parts", model)) if staged else model


class Joined(nn.Module):
    """Linear layer cut by columns, whose output is gathered on all ranks."""

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


class Columns(Side):
    """Side with one linear layer cut by columns, in an otherwise replicated model."""

    def made(self, model: Any, as_rows: bool = False) -> Any:
        ffn = model.blocks[0].ffn
        ffn.up = Joined(ffn.up, self.groups["tp"], as_rows)
        return model

    def step(self, batch: Any) -> Any:
        ((part,),) = batch
        value = self.loss(part)
        value.backward()
        return {None: value.detach()}


class DTensors(Side):
    """Side of torch's parallelize_module; with copies, FSDP2 over it."""

    def made(self, model: Any, **_: Any) -> Any:
        layout = self.row.layout
        shape, names = (layout.dp, layout.tp), ("dp", "tp")
        axes = init_device_mesh(ranks.device().type, shape, mesh_dim_names=names)
        benchmark("tensor_parallel")["by_torch"](model, axes["tp"])
        for each in (*model.blocks, model) if layout.dp > 1 else ():
            fully_shard(each, mesh=axes["dp"])
        return model

    def step(self, batch: Any) -> Any:
        (part,) = batch[self.copy]
        with loss_parallel():
            self.loss(part).backward()


SCHEDULES = {  # ours -> torch's
    "gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble",
}  # fmt: skip


class Staged(Side):
    """Side of torch's own pipeline."""

    def made(self, model: Any, **_: Any) -> Any:
        layout, group = self.row.layout, self.groups["pp"]
        route, parts = layout.route, pipeline.cut(model, layout.pp * layout.chunks)
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


def clipped_inside(side: Any) -> None:
    """Clip within DeepSpeed's step."""
    side.engine._config.gradient_clipping = side.engine.optimizer.clip_grad = side.row.clip[0]


MORE = {
    "columns": Columns,
    "DTensor": DTensors,
    "torch's pipeline": Staged,
}


def parallel(row: Row, mistake: Callable[[Side], None] = lambda side: None) -> Program:
    """Return the row's parallel program, with a mistake in its side; it returns a rank's losses."""

    def program(watch: Any) -> list[float | None]:
        losses = []
        side = (SIDES | MORE)[row.technique](row, row.model(row.config), groups(row))
        mistake(side)
        if row.options.get("clips"):
            clipped_inside(side)
        watch(watched(side), side.optimizer)
        for step in range(row.steps):
            side.optimizer.zero_grad()
            torch.manual_seed(step)
            getattr(side, "begin", lambda: None)()
            losses.append(printed(side, side.step(row.batch(step % BATCHES))))
            if row.clip and not hasattr(side, "engine"):
                side.clip(row.clip[step % len(row.clip)])
            side.optimizer.step()
        return losses

    return program


def printed(side: Side, found: Any) -> float | None:
    """Return the loss that this rank knows after a step, or None."""
    value = (found or {}).get(None, (found or {}).get(side.copy))
    return None if value is None else float(side.joined(value))


def compared(cases: dict[Any, tuple[Program, Program, int]]) -> dict[Any, Any]:
    """Compare (plain program, parallel program, ranks) for each case; return report or error line.

    One run records all plain programs, and one run per number of ranks runs the parallel programs.
    """
    number = {name: id(case[0]) for name, case in cases.items()}
    plains = {number[name]: case[0] for name, case in cases.items()}

    def references() -> dict[int, Record]:
        return {n: recorded(program) for n, program in plains.items()}

    (records,) = ranks.run(references, 1, device="cpu", timeout=1200, show=False)
    found: dict[Any, Any] = {}
    for size in sorted({case[2] for case in cases.values()}):
        mine = {name: case[1] for name, case in cases.items() if case[2] == size}

        def work(mine: dict = mine) -> dict[Any, Matcher]:
            return {n: matched(program, records[number[n]]) for n, program in mine.items()}

        each = ranks.run(work, size, device="cpu", timeout=1200, show=False)
        for name in mine:
            try:
                found[name] = judged(records[number[name]], [one[name] for one in each])
            except ValueError as error:
                found[name] = str(error)
    return found


PLAINS: dict[str, Program] = {}  # by `reference`, so that rows share a plain program


def beside(row: Row, program: Program) -> tuple[Program, Program, int]:
    """Return a case of `compared`: the row's plain program, a parallel one, and ranks."""
    return PLAINS.setdefault(reference(row), plain(row)), program, row.ranks


def reference(row: Row) -> str:
    """Return a name of the row's plain program, equal for rows that can share it."""
    m = row.layout.microbatches if row.layout.pp == 1 else 1
    same = row.config, sum(row.sizes), row.steps, row.lr, row.dtype, row.clip, m
    same += getattr(row, "rule", ""), getattr(row, "family", "")
    return f"{type(row).__name__} {same}"


# Right programs

ONE = Layout(dp=2)
G = row("data", GPT2, ONE, options={"way": "parameters"})


RIGHT = {  # a row of every technique of the course and of libraries
    "data": row("data", GPT2, ONE, options={"bucket_bytes": 20_000, "first_bytes": 4_000}),
    "data clipped": row("data", LLAMA, ONE, **CLIP),
    "DDP accumulated": row("DDP", GPT2, replace(ONE, microbatches=2)),
    "zero 1 llama": row("zero", LLAMA, Layout(dp=2, zero=1)),
    "zero 2 clipped": row("zero", GPT2, Layout(dp=2, zero=2), **CLIP),
    "zero 3": row("zero", GPT2, Layout(dp=2, zero=3)),
    "FSDP2 3 accumulated": row("FSDP2", LLAMA, Layout(dp=2, zero=3, microbatches=2), **CLIP),
    "DeepSpeed 2 clipped": row(
        "DeepSpeed", GPT2, Layout(dp=2, zero=2), options={"clips": True}, **CLIP
    ),
    "pipeline 1f1b": row("pipeline", GPT2, Layout(pp=2, schedule="1f1b", microbatches=4)),
    "pipeline zb-v": row(
        "pipeline", replace(UNTIED, layers=4),
        Layout(pp=2, schedule="zb-v", microbatches=4, chunks=2),
    ),
    "torch's pipeline": row(
        "torch's pipeline", UNTIED, Layout(pp=2, schedule="1f1b", microbatches=4)
    ),
    "tensor llama": row("tensor", LLAMA, Layout(tp=2)),
    "DTensor": row("DTensor", LLAMA, Layout(tp=2)),
    "tensor in copies 3": row("tensor in copies", LLAMA, Layout(dp=2, tp=2, zero=3)),
    "sequence gpt2": row("tensor", GPT2, Layout(tp=2, sequence_parallel=True)),
    "context ring zigzag gpt2": row(
        "context", GPT2, Layout(cp=2), options={"way": "ring", "layout": "zigzag"}
    ),
    "context ulysses contiguous llama": row(
        "context", LLAMA, Layout(cp=2), options={"way": "ulysses", "layout": "contiguous"}
    ),
    "experts": row("experts", SPARSE, Layout(dp=2, ep=2)),
    "mesh": row("mesh", GPT2, Layout(dp=2, tp=2, zero=1), clip=(0.3,)),
}  # fmt: skip


# Wrong ones


@dataclass(frozen=True)
class Wrong:
    """Mistake in a side, in functions (owner, name, replacement), or in the row."""

    row: Row
    place: str  # regular expressions for the first wrong tensor, and the words of the report
    words: str
    mistake: Callable[[Side], None] = lambda side: None
    instead: tuple[tuple[Any, str, Any], ...] = ()
    other: Row | None = None  # the wrong program's row, if different
    control: Callable[[Side], None] = lambda side: None  # changes that the right program needs

    def program(self) -> Program:
        """Return the wrong program."""

        def program(watch: Any) -> Any:
            with ExitStack() as stack:
                for owner, name, value in self.instead:
                    stack.enter_context(mock.patch.object(owner, name, value))
                return parallel(self.other or self.row, self.mistake)(watch)

        return program


def nothing(*_: Any) -> None:
    """Do nothing, in place of a forgotten call."""


def same(x: Tensor, *_: Any) -> Tensor:
    """Return the tensor without communication."""
    return x


def mean_of(x: Tensor, group: Any) -> Tensor:
    return tp.reduce_from(x, group) / dist.get_world_size(group)


def early_bias(self: Any, x: Tensor) -> Tensor:
    return self.leave(F.linear(x, self.weight, self.bias), self.group)


def unmasked(numbers: Tensor, own: slice) -> tuple[Tensor, Tensor]:
    within = (numbers - own.start).clamp(0, own.stop - own.start - 1)
    return within, torch.zeros_like(numbers, dtype=torch.bool)


def average(module: nn.Module, group: Any, scale: float | None = None, skip: int = 0) -> None:
    """Average gradients over a group; scale: 1 for a sum."""
    parameters = list(module.parameters())
    for p in parameters[: len(parameters) - skip]:
        dist.all_reduce(p.grad, group=group)
        p.grad *= scale or 1 / dist.get_world_size(group)


def from_rank_0(module: nn.Module, group: Any) -> None:
    for p in module.parameters():
        dist.broadcast(p.grad, 0, group=group)


def in_pairs(module: nn.Module, group: Any) -> None:
    average(module, dist.new_subgroups(2)[0])


def clip_first(module: nn.Module, group: Any) -> None:
    nn.utils.clip_grad_norm_(module.parameters(), 0.3)
    average(module, group)


def own_seed(self: Row, config: Config) -> nn.Module:
    torch.manual_seed(dist.get_rank())
    return sides.GPT(config)


def padded_loss(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    zeros = logits.new_zeros(*logits.shape[:-1], 2)
    return plain_loss(torch.cat((logits, zeros), -1), targets, reduction)


def whole_blocks(layout: Any, ranks: int, rank: int, source: int, causal: bool, share: int) -> list:
    return [cp_core.Block(slice(0, share), slice(0, share), source == rank)]


def second_share(change: Callable[[Tensor, Any, str], Tensor]) -> Callable[..., Tensor]:
    """Return a cp.shard that changes only its second call, for the targets."""
    turn = iter(range(10**6))

    def share(x: Tensor, group: Any, layout: str = "zigzag") -> Tensor:
        return cp_core.shard(x, group, layout) if next(turn) % 2 == 0 else change(x, group, layout)

    return share


def shifted(x: Tensor, group: Any, layout: str) -> Tensor:
    y = cp_core.shard(x, group, layout)
    return torch.cat((y[:, 1:], y[:, :1]), 1)


class Ignoring(Row):
    """Row whose last sequences have no targets in their second half."""

    def batch(self, step: int) -> list[list[Any]]:
        found = super().batch(step)
        for tokens, targets, _ in found[-1]:
            targets[: len(tokens) // 4 * 3, tokens.shape[1] // 2 :] = -100
        return found


def options_of(**given: float) -> Callable[[Side], None]:
    """Return a mistake that multiplies the optimizer's options by these factors."""

    def mistake(side: Side) -> None:
        for group in side.optimizer.param_groups:
            group.update({name: group[name] * value for name, value in given.items()})

    return mistake


def share_of_rank_0(side: Side) -> None:
    side.copy = 0


def weighed(loss: Tensor, factor: float) -> Tensor:
    """Return a loss whose gradient is scaled, and whose printed value is not."""
    return factor * loss - (factor - 1) * loss.detach()


def undivided(side: Any) -> None:
    side.mean = lambda part, parts: weighed(side.loss(part) / parts, parts)


def half_the_loss(side: Any) -> None:
    side.mean = lambda part, parts: weighed(side.loss(part) / parts, 1 / 2)


def joined(side: Any) -> None:
    """Set the side's loss to the mean over the tokens with a target on all ranks."""

    def mean(part: Any, parts: int) -> Tensor:
        count = int((part[1] != -100).sum())
        return dp.joined_mean(side.loss(part, "sum"), count, side.groups["dp"])

    side.mean = mean


def clipped_before(side: Side) -> None:
    side.clip = nothing


def twice_the_limit(side: Side) -> None:
    clip = side.clip
    side.clip = lambda limit: clip(2 * limit)


def clipped_locally(side: Side) -> None:
    side.clip = lambda limit: nn.utils.clip_grad_norm_(side.model.parameters(), limit)


def overflow_on_rank_1(side: Side) -> None:
    step, turn = side.optimizer.step, iter(range(10**6))
    side.optimizer.step = lambda: step() if next(turn) or dist.get_rank() == 0 else None


def stale(side: Side) -> None:
    """Train half of the parameters on each rank, and receive outdated values for the others."""
    step, rank, n = side.optimizer.step, dist.get_rank(), dist.get_world_size()

    def stepped() -> None:
        had = [p.detach().clone() for p in side.model.parameters()]
        step()
        with torch.no_grad():
            for i, (p, old) in enumerate(zip(side.model.parameters(), had, strict=True)):
                if i % n != rank:
                    p.copy_(old)

    side.optimizer.step = stepped


def one_end(side: Any) -> None:
    side.model.twin = None


def counted(side: Any, factor: float = 4) -> None:
    """Scale each micro-batch's mean: as if it were the step's, or divided once more."""
    right = side.model.passes.loss
    side.model.passes.loss = lambda logits, targets: weighed(right(logits, targets), factor)


def twice_divided(module: nn.Module, *groups: Any, right: Any = experts.average_gradients) -> None:
    right(module, *groups)
    for p in experts.own_parameters(module):
        p.grad /= dist.get_world_size()


def data(**more: Any) -> Row:
    return row("data", more.pop("config", GPT2), more.pop("layout", ONE),
               options={"way": "parameters"}, **more)  # fmt: skip


def averaged_by(function: Callable[..., None]) -> tuple[tuple[Any, str, Any], ...]:
    return ((dp, "average_gradients", function),)


def edges(enter: Any, leave: Any) -> Row:
    return replace(TENSOR, options={"edges": tp.Edges(enter, leave)})


TENSOR = row("tensor", GPT2, Layout(tp=2))
GROUPED = row("tensor", replace(LLAMA, kv_heads=2), Layout(tp=4))
ALONG = row("tensor", LLAMA, Layout(tp=2, sequence_parallel=True))
RING = row("context", GPT2, Layout(cp=2), options={"way": "ring", "layout": "zigzag"})
CONTIGUOUS = replace(RING, options={"way": "ring", "layout": "contiguous"})
ZERO = row("zero", GPT2, Layout(dp=2, zero=2))
PIPE = row("pipeline", GPT2, Layout(pp=2, schedule="1f1b", microbatches=4))
PARTED = replace(PIPE, config=UNTIED)
EXPERTS = row("experts", SPARSE, Layout(dp=2, ep=2))
IGNORING = Ignoring(**{f: getattr(G, f) for f in G.__dataclass_fields__})

WRONG: dict[str, Wrong] = {
    "tensor: sum of the input's gradient forgotten": Wrong(
        TENSOR, r"backward blocks\.1\.", "began with .*addends", other=edges(same, tp.reduce_from)
    ),
    "tensor: sum of the outputs forgotten": Wrong(
        TENSOR, r"forward blocks\.0\.attention_norm|forward embedding", "addends",
        other=edges(tp.copy_to, same),
    ),
    "tensor: bias added by each rank": Wrong(
        TENSOR, r"forward blocks\.0\.attention\.out", r"attention\.out\.bias is in it 2 times",
        instead=((tp_core.RowLinear, "forward", early_bias),),
    ),
    "tensor: mean in place of a sum": Wrong(
        TENSOR, "forward embedding", "0.5 times .* divided by 2 ranks once too often",
        other=edges(tp.copy_to, mean_of),
    ),
    "tensor: tokens of other ranks not masked": Wrong(
        TENSOR, "forward embedding", "another one, the same on all|rows are wrong",
        instead=((tp_core, "own_rows", unmasked),),
    ),
    "sequence: gradients of norms not summed": Wrong(
        ALONG, "gradient norm", "nobody added them up", instead=((sp, "sum_gradients", nothing),)
    ),
    "tensor: gradients of shared heads not summed": Wrong(
        GROUPED, r"gradient .*attention\.(key|value)\.weight",
        r"nobody added them up over ranks 0, 1 \| 2, 3",
        instead=((_Copied, "backward", staticmethod(lambda ctx, dx: (dx, None, None))),),
    ),
    "data: summed, not averaged": Wrong(
        data(), "gradient ", "2 times .* a sum over 2 ranks that was not averaged",
        instead=averaged_by(lambda m, g: average(m, g, 1.0)),
    ),
    "data: never averaged": Wrong(
        data(), "gradient ", "nobody averaged them over ranks 0, 1", instead=averaged_by(nothing)
    ),
    "data: averaged in pairs alone": Wrong(
        data(layout=Layout(dp=4)), "gradient ",
        r"averaged over ranks 0, 1 \| 2, 3 alone, and not over 0, 1, 2, 3",
        instead=averaged_by(in_pairs),
    ),
    "data: divided twice": Wrong(
        data(), "gradient ", "0.5 times .* divided by 2 ranks once too often", mistake=half_the_loss
    ),
    "data: a mean of means over other counts": Wrong(
        IGNORING, "gradient ", "began with other factors: .* count", control=joined,
    ),
    "data: the last bucket is dropped": Wrong(
        data(), "gradient norm", "nobody averaged",
        instead=averaged_by(lambda m, g: average(m, g, skip=3)),
    ),
    "data: rank 0's gradient for all": Wrong(
        data(), "gradient ", "rank 0's own gradient", instead=averaged_by(from_rank_0)
    ),
    "data: the same share on every rank": Wrong(
        data(), "forward embedding", "no rank .*ranks 0, 1 have the same", mistake=share_of_rank_0
    ),
    "data: another seed on each rank": Wrong(
        data(), "weights ", "another seed", instead=((Row, "model", own_seed),)
    ),
    "data: micro-batches' losses not divided": Wrong(
        data(layout=replace(ONE, microbatches=2)), "gradient ",
        "2 times .* the loss was 2 times", mistake=undivided,
    ),
    "data: clipped before averaging": Wrong(
        data(**CLIP), "gradient ", "each was clipped", mistake=clipped_before,
        instead=averaged_by(clip_first),
    ),
    "data: one rank skips a step": Wrong(
        data(steps=2), "0 update ", "took 2 optimizer steps, rank 0 2, rank 1 1",
        mistake=overflow_on_rank_1,
    ),
    "data: padding in the softmax": Wrong(
        data(config=UNTIED), "backward head", "every output was right: the loss",
        instead=((sides, "plain_loss", padded_loss),),
    ),
    "context: positions begin at 0 on each rank": Wrong(
        RING, r"forward blocks\.0\.attention", "rows are wrong",
        instead=((cp_core, "positions", lambda lay, s, n, r, d=None: torch.arange(s // n)),),
    ),
    "context: the mask is forgotten on the ring": Wrong(
        CONTIGUOUS, r"forward blocks\.0\.attention", "rows are wrong|another one",
        instead=((cp_core, "blocks", whole_blocks),),
    ),
    "context: targets are not in zig-zag": Wrong(
        RING, "backward head", "every output was right: the loss .*targets",
        instead=((cp, "shard", second_share(
            lambda x, group, layout: cp_core.shard(x, group, "contiguous"))),),
    ),
    "context: targets are shifted within a share": Wrong(
        CONTIGUOUS, "backward head", "every output was right: the loss .*targets",
        instead=((cp, "shard", second_share(shifted)),),
    ),
    "context: gradients not averaged": Wrong(
        RING, "gradient ", "nobody averaged", instead=((cp, "average_gradients", nothing),)
    ),
    "zero: clipped by the norm of a piece": Wrong(
        replace(ZERO, **CLIP), "gradient ", "clipped by a norm of its own",
        mistake=clipped_locally,
    ),
    "zero: clipped at another norm": Wrong(
        replace(ZERO, **CLIP), "gradient ", "by the same factor .clipped at another norm",
        mistake=twice_the_limit,
    ),
    "zero: weight decay twice": Wrong(
        ZERO, "update ", "weight is too little in it: weight decay",
        mistake=options_of(weight_decay=2),
    ),
    "zero: learning rate times ranks": Wrong(
        ZERO, "update ", "2 times the right one: the step's size", mistake=options_of(lr=2)
    ),
    "zero: stale weights are gathered": Wrong(
        data(steps=2), "1 forward embedding", "other weights are used", mistake=stale
    ),
    "pipeline: a tied matrix's gradient of one end": Wrong(
        PIPE, r"gradient embedding\.weight", "nobody added them up", mistake=one_end
    ),
    "pipeline: micro-batches count whole": Wrong(
        PARTED, "gradient ", "4 times .* 4 micro-batches that were not averaged|4 times already",
        mistake=counted,
    ),
    "experts: gradients divided twice": Wrong(
        EXPERTS, r"gradient blocks\.\d\.ffn\.experts", "0.5 times .*divided by 2 ranks",
        instead=((experts, "average_gradients", twice_divided),),
    ),
    "experts: tokens dropped by a capacity": Wrong(
        EXPERTS, r"forward blocks\.\d\.ffn\.", "rows are on no rank",
        other=replace(EXPERTS, config=replace(SPARSE, capacity=0.75)),
    ),
}  # fmt: skip
