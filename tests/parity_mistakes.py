"""Mistakes that lessons show under "What goes wrong", each with a program or a reason for none.

SHOWN has a row for each mistake: its place in its lesson, and the program of `PROGRAMS` that makes
it, or the reason why a comparison of two runs cannot show it. COURSE holds the programs that these
lessons need in addition to those of `parity_programs`.

`python tests/parity_measured.py` measures which checks find each mistake.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from contract import Row
from parity_programs import (
    CLIP,
    CONTIGUOUS,
    DATA,
    GPT2,
    LLAMA,
    SPARSE,
    TENSOR,
    TWO_COPIES,
    UNTIED_PIPE,
    WRONG,
    ZERO,
    WrongProgram,
    clip_locally,
    make_data_row,
    make_edges_row,
    make_row,
    patch_averaging,
    scale_micro_batches,
)
from sides import Side
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from shardlab import context_parallel as cp
from shardlab import experts, pipeline
from shardlab import tensor_parallel as tp
from shardlab.common import show
from shardlab.data_parallel import buckets
from shardlab.gpt.model import Config
from shardlab.layout import Layout


def swap_sums(module: nn.Module, group: Any) -> None:
    attention = module.blocks[0].attention
    first, second = attention.query.weight, attention.key.weight
    for p in (first, second) if dist.get_rank() == 0 else (second, first):
        dist.all_reduce(p.grad, group=group)
    for p in module.parameters():
        if p is not first and p is not second:
            dist.all_reduce(p.grad, group=group)
        p.grad /= dist.get_world_size(group)


def average_parameters(module: nn.Module, group: Any) -> None:
    for p in module.parameters():
        dist.all_reduce(p.data, group=group)
        p.data /= dist.get_world_size(group)


def skip_zero_grad(side: Side) -> None:
    side.optimizer.zero_grad = lambda: None


def bypass_wrapper(side: Side) -> None:
    side.model = side.plain


def repeat_first_batch(side: Side) -> None:
    step, batch = side.step, side.row.make_batch(0)
    side.step = lambda _: step(batch)


def create_optimizer_first(side: Any) -> None:
    side.optimizer = side.row.make_optimizer(side.row.build_model(side.row.config))


def forget_state(side: Any) -> None:
    turn = iter(range(10**6))
    side.before_step = lambda: side.optimizer.state.clear() if next(turn) == 1 else None


def request_state(side: Side) -> None:
    get_optimizer_state_dict(side.model, side.optimizer)


def load_half_older(self: Row, config: Config, right: Any = Row.build_model) -> nn.Module:
    model = right(self, config)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p[len(p) // 2 :] *= 0.9
    return model


def swap_messages(name: str, stages: int, microbatches: int) -> pipeline.Schedule:
    found = pipeline.schedule_gpipe(stages, microbatches)
    one, two, *others = found.actions[1]
    return replace(found, explicit_actions=(found.actions[0], (two, one, *others)))


def copy_first_shards(side: Any) -> None:
    with torch.no_grad():
        for name, p in side.model.named_parameters():
            if side.cuts[name] is not None:
                dist.broadcast(p, 0)


def initialize_shards(side: Any, own_seed: bool) -> None:
    torch.manual_seed(dist.get_rank() if own_seed else 0)
    with torch.no_grad():
        for name, p in side.model.named_parameters():
            if side.cuts[name] is not None:
                p.normal_(0, 0.02)


def give_own_batches(side: Any) -> None:
    right, rank, side.tokens = side.compute_loss, dist.get_rank(), "V"  # the tokens' type
    side.compute_loss = lambda part: right((part[0].roll(rank, 0), part[1].roll(rank, 0), ()))


def compute_scaled_loss(logits: Tensor, *more: Any, right: Any = tp.vocab_parallel_loss) -> Tensor:
    return right(logits * (1 + dist.get_rank()), *more)


def reduce_in_bfloat16(x: Tensor, group: Any) -> Tensor:
    return tp.reduce_from(x.bfloat16(), group).to(x.dtype)


def count_all_squares(side: Any) -> None:
    """Count replicated gradients once a rank in the norm, that is, twice."""

    def clip_by_wrong_norm(limit: float) -> None:
        gradients = [p.grad for p in side.model.parameters()]
        square = nn.utils.get_total_norm(gradients).square()
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(side.model.parameters(), limit, square.sqrt())

    side.clip_gradients = clip_by_wrong_norm


def patch_average(way: str) -> Any:
    """Average experts over the wrong ranks; average shared parameters as usual."""

    def average_wrongly(
        module: Any, world: Any, copies: Any, right: Any = experts.average_gradients
    ):
        own = experts.own_parameters(module)
        before = [p.grad.clone() for p in own]
        right(module, world, copies)
        for p, gradient in zip(own, before, strict=True):
            p.grad.copy_(gradient)
        if way != "nobody":
            buckets.average_gradients(own, copies if way == "copies" else world)

    return ((experts, "average_gradients", average_wrongly),)


def clip_by_default(side: Any) -> None:
    side.engine._config.gradient_clipping = side.engine.optimizer.clip_grad = 1.0


CHECKPOINTED = make_data_row(steps=2)
SWAPPED = replace(
    UNTIED_PIPE, layout=Layout(pp=2, schedule="gpipe", microbatches=2), options={"check": False}
)
COPIES = make_row("experts", SPARSE, Layout(dp=4, ep=2))
MESH = make_row("mesh", GPT2, Layout(tp=2, pp=2, microbatches=2), **CLIP)

LESSON_PROGRAMS: dict[str, WrongProgram] = {
    "collectives: two sums in another order": WrongProgram(
        DATA, r"gradient blocks\.0\.attention\.(query|key)\.weight", "unknown reason",
        patches=patch_averaging(swap_sums),
    ),
    "gemm: columns joined as rows": WrongProgram(
        make_row("columns", GPT2, Layout(tp=2)), r"forward blocks\.0\.ffn\.up",
        "rows are wrong|unknown",
        other_row=make_row("columns", GPT2, Layout(tp=2), options={"as_rows": True}),
    ),
    "gemm: addends rounded to bfloat16": WrongProgram(
        TENSOR, "forward embedding", "has only bfloat16 precision",
        other_row=make_edges_row(tp.copy_to, reduce_in_bfloat16),
    ),
    "data: the hook averages the parameter": WrongProgram(
        DATA, "gradient ", "not averaged over ranks 0, 1",
        patches=patch_averaging(average_parameters),
    ),
    "data: gradients pile up": WrongProgram(
        make_data_row(steps=2), "1 gradient ", "previous step", mistake=skip_zero_grad
    ),
    "DDP: the wrapper is bypassed": WrongProgram(
        make_row("DDP", GPT2, TWO_COPIES), "gradient ", "not averaged over ranks",
        mistake=bypass_wrapper,
    ),
    "data: the first batch again": WrongProgram(
        make_data_row(steps=2), "1 forward embedding", "that step's samples",
        mistake=repeat_first_batch,
    ),
    "zero: the optimizer is made before sharding": WrongProgram(
        replace(ZERO, layout=Layout(dp=2, zero=3)), "update ", "has not moved",
        mistake=create_optimizer_first,
    ),
    "checkpoint: the optimizer's state is forgotten": WrongProgram(
        CHECKPOINTED, "1 update ", "as in Adam's first", mistake=forget_state
    ),
    "checkpoint: the optimizer's state is asked for": WrongProgram(
        DATA, "update ", r"best fit: 0\.7", mistake=request_state
    ),
    "checkpoint: half of the weights are older": WrongProgram(
        DATA, "weights ", "other weights were loaded",
        patches=((Row, "build_model", load_half_older),),
    ),
    "pipeline: two messages swapped": WrongProgram(
        SWAPPED, "backward head", "every output was right: the loss .*targets",
        patches=((pipeline, "make_schedule", swap_messages),),
    ),
    "pipeline: micro-batches divided twice": WrongProgram(
        UNTIED_PIPE, "gradient ", "0.25 times", mistake=lambda side: scale_micro_batches(side, 0.25)
    ),
    "tensor: shards drawn from one seed": WrongProgram(
        TENSOR, "weights ", "a different seed", mistake=lambda side: initialize_shards(side, False)
    ),
    "tensor: rank 0's shards on all ranks": WrongProgram(
        TENSOR, "weights ", "no rank", mistake=copy_first_shards
    ),
    "tensor: shards drawn from seeds of their own": WrongProgram(
        TENSOR, "weights ", "a different seed", mistake=lambda side: initialize_shards(side, True)
    ),
    "tensor: a batch for each rank": WrongProgram(
        TENSOR, "forward embedding", "rows are wrong|unknown reason", mistake=give_own_batches
    ),
    "tensor: clipped by the norm of each rank": WrongProgram(
        replace(TENSOR, **CLIP), "gradient ", "clip by its own norm",
        mistake=clip_locally,
    ),
    "tensor: a factor that differs by rank": WrongProgram(
        TENSOR, "backward head", "the loss is wrong",
        patches=((tp, "vocab_parallel_loss", compute_scaled_loss),),
    ),
    "mesh: norm counts replicated gradients twice": WrongProgram(
        MESH, "gradient ", "a different clipping norm", mistake=count_all_squares
    ),
    "context: each rank a short text": WrongProgram(
        CONTIGUOUS, r"forward (position|blocks\.0)", "rows are wrong|unknown reason",
        patches=((cp, "distribute_model", lambda model, *_: model),),
    ),
    "experts: averaged over expert replicas only": WrongProgram(
        COPIES, r"gradient blocks\.\d\.ffn\.experts", "2 times the right value",
        patches=patch_average("copies"),
    ),
    "experts: averaged over all ranks": WrongProgram(
        COPIES, r"gradient blocks\.\d\.ffn\.experts", "unknown reason",
        patches=patch_average("world"),
    ),
    "experts: never averaged": WrongProgram(
        COPIES, r"gradient blocks\.\d\.ffn\.experts", "each rank has its own",
        patches=patch_average("nobody"),
    ),
    "DeepSpeed: clips by default": WrongProgram(
        make_row("DeepSpeed", LLAMA, Layout(dp=2, zero=2), steps=2), "update ",
        "times the right value", mistake=clip_by_default,
    ),
}  # fmt: skip

PROGRAMS = WRONG | LESSON_PROGRAMS


class Mistake(NamedTuple):
    lesson: str
    quote: str  # text in the section: a heading, the symptom in a table, the name in a cell
    program: str = ""  # key of PROGRAMS
    no_program: str = ""  # reason why no program makes it


HANGS, RAISES = "it hangs: there is no run to compare", "it is refused, or raises, at once"
BYTES = "all numbers are right: bytes, counted, show it"
SECONDS = "all numbers are right: seconds, measured, show it"
MASKS = "masks are random: seeds are compared, and numbers with dropout 0"
FILE = "it is in what is saved, and nothing is trained by it: loading shows it"

LESSON_MISTAKES: dict[
    str, dict[str, str]
] = {  # by lesson: where it stands, and the program or the reason
    "memory": {
        "gradients set to zero, not None": BYTES,
        "the last step's logits kept": BYTES,
        "losses kept in a list, after backward": BYTES,
        "evaluation that adds up losses, without no_grad": BYTES,
        "Fragmentation": BYTES,
        "An exception keeps a step": BYTES,
    },
    "collectives": {
        "Different order": HANGS,
        "One rank missing": HANGS,
        "Different shapes": RAISES,
        "No error at all": "collectives: two sums in another order",
    },
    "gemm": {
        "inner, never added up": "tensor: sum of the outputs forgotten",
        "columns, joined as rows": "gemm: columns joined as rows",
        "inner, averaged": "tensor: mean in place of a sum",
        "inner, summed in bfloat16": "gemm: addends rounded to bfloat16",
    },
    "data_parallel": {
        "A hook that averages the parameter": "data: the hook averages the parameter",
        "Averaging means of unequal batches": "data: a mean of means over other counts",
        "Forgetting `zero_grad`, forgetting `no_sync`": "data: gradients pile up",
        "no no_sync": BYTES,
        "Choosing the GPU by `RANK`": RAISES,
        "Calling `model.module`": "DDP: the wrapper is bypassed",
        "A rank that skips an all-reduce": HANGS,
        "A rank skips a bucket": HANGS,
        "The ranks built different models": RAISES,
    },
    "train": {
        "four GPUs take as long as one": "data: never averaged",
        "losses exactly those of one process": "data: the same share on every rank",
        "a loss that drops once in every epoch": "data: the first batch again",
        "the validation loss changes": "nothing is trained by it",
        "now and then a checkpoint": FILE,
        "bytes per step grow": BYTES,
        "a spike after each restart": "checkpoint: the optimizer's state is forgotten",
        "the job never ends": HANGS,
    },
    "trainers": {
        "losses differ from the script's": "data: the same share on every rank",
        "with `ModelParallelStrategy`": SECONDS,
        "a job is ended at its time limit": "no number is wrong",
        "a job hangs at its time limit": HANGS,
        "losses rise after an overflow": "data: one rank skips a step",
        "the run ends with an exception": RAISES,
    },
    "zero": {
        "Reading weights outside forward": "what is read is not trained by",
        "Building the optimizer before sharding": "zero: the optimizer is made before sharding",
        "Clipping by the local norm": "zero: clipped by the norm of a piece",
        "Calling the model on some ranks only": HANGS,
        "Saving one rank's shard as the model": FILE,
    },
    "checkpoint": {
        "One folder for all saves": "checkpoint: half of the weights are older",
        "Forgetting the optimizer": "checkpoint: the optimizer's state is forgotten",
        "asking for a state dict changes nothing": "checkpoint: the optimizer's state is asked for",
        "Forgetting the position in the data": "data: the first batch again",
        "Saving the shards of rank 0": FILE,
        "Running a stranger's code": "no number is wrong",
        "A full disk, and a folder that is not shared": RAISES,
    },
    "pipeline": {
        "Two stages, two schedules": HANGS,
        "Two messages swapped": "pipeline: two messages swapped",
        "A stage that raises": RAISES,
        "Gradients m times too large, or too small": "pipeline: loss not divided by m",
        "you divide twice": "pipeline: micro-batches divided twice",
    },
    "tensor_parallel": {
        "The forgotten all-reduce": "tensor: sum of the input's gradient forgotten",
        "Dropout: seeds inside and outside the regions": MASKS,
        "one seed for all ranks": MASKS,
        "Initialisation of shards": "tensor: shards drawn from seeds of their own",
        "one seed on all ranks": "tensor: shards drawn from one seed",
        "Different batches or gradient norms on the ranks": "tensor: a batch for each rank",
        "gradient norms on the ranks": "tensor: clipped by the norm of each rank",
        "row-parallel layers each add their bias": "tensor: bias added by each rank",
    },
    "tensor_types": {
        "What no type sees": "tensor: a factor that differs by rank",
        "the loss divided by N, and its gradients averaged": "data: divided twice",
        "means of unequal batches, averaged": "data: a mean of means over other counts",
        "weights that started apart": "data: another seed on each rank",
        "a factor that differs by rank": "tensor: a factor that differs by rank",
        "What the checker does not verify": "tensor: sum of the input's gradient forgotten",
        "Every mistake of this course": "the other lessons have them",
    },
    "sequence_parallel": {
        "Gradients of norms that nobody sums": "sequence: gradients of norms not summed",
        "Tokens that the ranks cannot share": RAISES,
    },
    "context_parallel": {
        "A ring in which all send first": HANGS,
        "Wrong position ids on a shard": "context: each rank a short text",
        "positions from 0": "context: positions begin at 0 on each rank",
        "Sequences and heads that ranks cannot share": RAISES,
    },
    "experts": {
        "The wrong average": "experts: averaged over expert replicas only",
        "over all four": "experts: averaged over all ranks",
        "over nobody": "experts: never averaged",
        "A rank without tokens skips the exchange": HANGS,
        "Symptoms and causes": "signs of those above",
        "one rank computes, the others wait": SECONDS,
        "memory runs out on one rank": BYTES,
        "a jump in the norm": "experts: averaged over expert replicas only",
        "norms of experts' gradients are equal": "experts: averaged over all ranks",
        "the router does not learn": "the plain model makes it as well",
        "validation loss depends": "experts: tokens dropped by a capacity",
    },
    "mesh": {
        "A layout that no mesh can train is refused": RAISES,
        "all squares of all ranks": "mesh: norm counts replicated gradients twice",
        "twins are not summed": "pipeline: tied weight, gradient of one stage only",
        "norms are not summed": "sequence: gradients of norms not summed",
        "replicas weigh the same": "data: a mean of means over other counts",
        "A seed for each rank": MASKS,
    },
    "deepspeed_engine": {
        "A misspelt name": "DeepSpeed: clips by default",
        '`"auto"` from Hugging Face': RAISES,
        "Reading a parameter at stage 3": "what is read is not trained by",
        "`loss.backward()` in place of": "it is right, or refused",
        "Pipeline with stage 2 or 3": RAISES,
        "A machine without a compiler": RAISES,
        "The default weight decay is 0.01 in torch's AdamW": "zero: weight decay twice",
        "Signs that a job": "signs of those above",
    },
    "model_parallelism": {
        "the job hangs without an error": HANGS,
        "the first loss is right": "tensor: sum of the input's gradient forgotten",
        "the gradient norm is too large": "data: summed, not averaged",
        "ZeRO-3 runs out of memory": BYTES,
        "more GPUs do not shorten the step": SECONDS,
    },
    "strategy": {
        "the best layout on paper": SECONDS,
        "one layout is many times slower": SECONDS,
        "a small model does not get faster": SECONDS,
        "predicted and measured agree on one node": SECONDS,
        "the planner's first three layouts": SECONDS,
        "fitted constants are absurd": SECONDS,
    },
}
MISTAKES = [
    Mistake(lesson, where, found if found in PROGRAMS else "", "" if found in PROGRAMS else found)
    for lesson, mistakes in LESSON_MISTAKES.items()
    for where, found in mistakes.items()
]


def read_section(lesson: str) -> str:
    """Return the section "What goes wrong" of a lesson, "" if it has none."""
    text = (show.ROOT / f"lessons/{lesson}.md").read_text("utf-8")
    found = re.search(r"^## What goes wrong.*?(?=^## )", text, re.M | re.S)
    return found[0] if found else ""


def list_items(section: str) -> list[str]:
    """Return the section's headings, and the first words of its table rows and labs."""
    prose = re.sub(r"^```.*?^```", "", section, flags=re.M | re.S)
    found = re.findall(
        r"^### (.+)|^\*\*(.+?)\.\*\*|^\| (?!what |symptom |---)(.+?) \|", prose, re.M
    )
    return [next(filter(None, each)) for each in found]
