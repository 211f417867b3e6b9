"""The checks of lesson `model_parallelism`.

Shapes in names as everywhere; small letters are a rank's share: f of F.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab import ranks, strategy
from shardlab.check import Wrong, exercise, laid_out, number, run_answer, same
from shardlab.shapes import PRESETS
from shardlab.strategy import MACHINES, Layout

_TIMEOUT = 10.0  # seconds, for what takes milliseconds: who waits that long waits for ever
_ON_GRID = 2e-4  # float32, values up to about 100, sums made in another order


@exercise("zero_states")
def _zero_states(answer: Any) -> str:
    params, size = 7e9, 16
    hints = {
        params * 16: "Those are all states, as without ZeRO. Which of them does stage 2 share?",
        params: "That shares the weights as well, which is stage 3.",
        params * (4 + 12 / size): "Either the gradients are whole there, which is stage 1, or "
        "weights have 4 bytes; here they have 2.",
        params * (2 + 8 / size): "Are the gradients there, and the float32 master weights?",
        params * (2 + 12 / size): "One is missing: gradients, master weights, two means.",
        params * (2 + 10 / size): "The optimizer keeps master weights beside its two means.",
        params * (12 + 4 / size): "It is the optimizer's 12 bytes that are shared, too.",
        params * (2 + 14 / 8): "There are 16 GPUs, not 8.",
        params * (2 + 14 / size) * size: "That is for all GPUs together.",
        20.125: "In GB it is right; the answer is asked for in bytes.",
        2.875: "That is for one parameter; there are 7 billion.",
    }
    number(answer, params * (2 + 14 / size), "bytes", rel=1e-6, hints=hints)
    return "Right: 20.1 GB in place of 112; the weights' 14 GB stay, however many GPUs there are."


@exercise("gradient_traffic")
def _gradient_traffic(answer: Any) -> str:
    params, size, nbytes = 7e9, 8, 2
    once = (size - 1) / size * params * nbytes
    hints = {
        params * nbytes: "Those are the gradients. How often does each piece of them travel?",
        2 * params * nbytes: "Nearly: a GPU never sends all of the pieces, but (N−1)/N of them.",
        once: "That is half of it: does each gradient have its 2 bytes, and do the sums come back?",
        (size - 1) * params * nbytes: "That is what sending all of it to everyone would take; a "
        "ring passes pieces on.",
        2 * (size - 1) * params * nbytes: "That is what all eight GPUs send together.",
        2 * once * 2: "Gradients have 2 bytes here, not 4.",
        2 * once / 1e9: "In GB it is right; the answer is asked for in bytes.",
    }
    number(answer, 2 * once, "bytes", rel=1e-6, hints=hints)
    return "Right: 24.5 GB; with 1,000 GPUs it would be 28, and never more."


_PIPELINES = ((4, 50), (4, 75), (4, 90), (8, 90), (8, 80), (2, 99), (64, 95), (1, 90), (3, 67))


def _results(answer: Callable[..., Any], cases: Any, name: str) -> list[Any]:
    """The answer's value for each case; what it raises becomes a Wrong."""
    got = []
    for case in cases:
        try:
            got.append(answer(*case))
        except Exception as error:
            asked = f"{name}({', '.join(map(str, case))})"
            raise Wrong(f"{asked} raised {type(error).__name__}: {error}") from None
    return got


def _enough(p: int, percent: int) -> int:
    return max(1, -(-percent * (p - 1) // (100 - percent)))


@exercise("my_busy_microbatches")
def _busy_microbatches(answer: Callable[[int, int], Any]) -> str:
    got = _results(answer, _PIPELINES, "my_busy_microbatches")
    want = [_enough(*case) for case in _PIPELINES]
    if got == want:
        return "Right: 4 stages need 9 micro-batches to be 75 % busy, and 27 for 90 %."
    if all(value is None for value in got):
        raise Wrong("It returned None every time: does it end in `return`?")
    first = next(i for i, pair in enumerate(zip(got, want, strict=True)) if pair[0] != pair[1])
    (p, percent), mine = _PIPELINES[first], got[first]
    words = f"For {p} stages and {percent} % it returned {mine!r}."
    if isinstance(mine, float):
        words += " Micro-batches are whole numbers: round up, in whole numbers."
    elif not isinstance(mine, int) or isinstance(mine, bool):
        words += " It should be a whole number."
    elif got == [max(1, math.ceil(100 * (p - 1) / (100 - q))) for p, q in _PIPELINES]:
        words += (
            " That makes (p−1)/m the idle share; but the idle time is a share of the whole step, "
            "m + p − 1 long."
        )
    elif got == [math.ceil(p * q / (100 - q)) for p, q in _PIPELINES]:
        words += " A step waits p − 1 turns, not p: the first stage begins at once."
    elif mine < 1:
        words += " A step has one micro-batch at least."
    elif mine < want[first]:
        busy = 100 * mine / (mine + p - 1)
        words += f" With {mine}, the stages are busy for {busy:.2f} %."
    else:
        less = mine - 1
        words += f" {less} would do: {100 * less / (less + p - 1):.2f} %."
        if less == want[first]:
            words += " Was a number like 0.9 rounded on the way?"
    raise Wrong(words)


@exercise("gpus_needed")
def _gpus_needed(answer: Any) -> str:
    hints = {
        16: "1,120 GB / 16 are 70 GB on each GPU; do the other 10 fit beside it?",
        14: "That shares 80 GB of each GPU among states alone.",
        15: "1,120 / 15 are 75 GB: more than the 72 that the job plans with.",
        18: "18 GPUs hold 1,116 GB of states: it has to be rounded up, and to whole nodes.",
        19: "19 would be enough; they come in whole nodes.",
        20: "They come in whole nodes of 8.",
        5: "That is room for the weights, not for what training holds.",
        4: "That is room for the weights, not for what training holds.",
        8: "8 GPUs have 576 GB to plan with; the states alone have 1,120.",
        32: "Fewer would do: three quarters of it.",
        1120 / 62: "GPUs are whole, and so are nodes.",
        1130 / 72: "ZeRO-3 divides states; each GPU has its own 10 GB beside its share.",
    }
    number(answer, 24, "GPUs", hints=hints)
    return "Right: 19 would be enough, and 24 leave 15 GB free on each."


_STAGES = ((8_000, 2, 1), (8_000, 2, 8), (1_000_000, 4, 32), (5_455_000_000, 2, 256), (640, 64, 4))


def _traffic(params: int, d: int, m: int, share: bool = True) -> list[float]:
    once = 2 * params * ((d - 1) / d if share else 1)
    return [2 * once, 2 * once, (m + 1) * once, 3 * m * once]


def _alike(a: list[Any], b: list[Any]) -> bool:
    return all(math.isclose(x, y, rel_tol=1e-9) for x, y in zip(a, b, strict=True))


@exercise("my_zero_traffic")
def _zero_traffic(answer: Callable[[int, int, int], Any]) -> str:
    for case, got in zip(_STAGES, _results(answer, _STAGES, "my_zero_traffic"), strict=True):
        asked = "my_zero_traffic({}, {}, {})".format(*case)
        try:
            got = [float(x) for x in got]
        except (TypeError, ValueError):
            raise Wrong(f"{asked} returned {got!r}; it should be four numbers.") from None
        if len(got) != 4:
            raise Wrong(f"{asked} returned {len(got)} numbers; there are four stages, 0 to 3.")
        want = _traffic(*case)
        if _alike(got, want):
            continue
        params, d, m = case
        once = want[0] / 2
        stage = next(i for i in range(4) if not _alike(got[i : i + 1], want[i : i + 1]))
        words = f"{asked} returned {[f'{x:,.0f}' for x in got]}."
        if _alike(got, _traffic(*case, share=False)):
            words += " A rank keeps its own share: (d−1)/d of everything travels."
        elif _alike(got, [x / 2 for x in want]):
            words += " Each number has 2 bytes."
        elif _alike(got, _traffic(params, d, 1)) and m > 1:
            words += " That is for one micro-batch, in stages 2 and 3, too."
        elif _alike(got[:1], [once]):
            words += " An all-reduce sends everything twice: to add up, and to hand out."
        elif m > 1 and (_alike(got[:1], [2 * m * once]) or _alike(got[1:2], [(m + 1) * once])):
            words += " Stages 0 and 1 add up in place, and send once a step, whatever m is."
        elif stage == 1:
            words += " In stage 1: gradients to their owners, once; new weights from them, once."
        elif stage == 2 and _alike(got[2:3], [2 * m * once]):
            words += " In stage 2 the weights are gathered once, after the optimizer's step."
        elif stage == 3 and _alike(got[3:], [2 * m * once]):
            words += " In stage 3 weights are gathered twice for each micro-batch: they were freed."
        else:
            words += f" Stage {stage} is the first that differs."
        raise Wrong(words)
    return "Right: stages 0 and 1 send the same, and m micro-batches multiply 2 and 3."


_SEQUENCES, _INPUTS, _OUTPUTS = 3, 5, 4


def _grid_inputs(copies: int, shards: int) -> tuple[Tensor, Tensor]:
    """x_CBH, of every copy; w_FH, whole."""
    generator = torch.Generator().manual_seed(copies)
    x_CBH = torch.randn(copies, _SEQUENCES, _INPUTS, generator=generator)
    return x_CBH, torch.randn(_OUTPUTS * shards, _INPUTS, generator=generator)


def _everywhere(size: int, mistakes: dict[str, Any]) -> dict[str, Any]:
    """A value for each rank where one is the same on all of them."""
    return {
        words: [value] * size if isinstance(value, Tensor) else value
        for words, value in mistakes.items()
    }


def _on_grid(answer: Callable[..., Any], copies: int, shards: int) -> Any:
    copy, shard = divmod(dist.get_rank(), shards)
    tensor_group = data_group = None
    for c in range(copies):  # every rank makes all groups, in the same order
        group = dist.new_group([c * shards + s for s in range(shards)])
        tensor_group = group if c == copy else tensor_group
    for s in range(shards):
        group = dist.new_group([c * shards + s for c in range(copies)])
        data_group = group if s == shard else data_group
    x_CBH, w_FH = (tensor.to(ranks.device()) for tensor in _grid_inputs(copies, shards))
    w_fH = w_FH.chunk(shards)[shard].clone()
    got = answer(x_CBH[copy].clone(), w_fH, tensor_group, data_group)
    if not isinstance(got, tuple) or len(got) != 2:
        return None, got
    loss, gradient_fH = (torch.as_tensor(value).cpu() for value in got)
    return loss.reshape(()) if loss.numel() == 1 else loss, gradient_fH


@exercise("my_grid_step")
def _grid_step(answer: Callable[..., Any]) -> str:
    for copies, shards in ((2, 2), (1, 2)):
        size = copies * shards
        results = run_answer(_on_grid, size, answer, copies, shards, timeout=_TIMEOUT)
        for rank, (loss, rest) in enumerate(results):
            if loss is None:
                kind = "nothing" if rest is None else f"a {type(rest).__name__}"
                words = f"Rank {rank} returned {kind}; it should be a pair, loss and gradient."
                raise Wrong(words)
        x_CBH, w_FH = _grid_inputs(copies, shards)
        w_sfH = w_FH.chunk(shards)
        # By copy and shard: each one's own loss and gradient, over its own sequences.
        y = [[x @ w.T for w in w_sfH] for x in x_CBH]
        own = torch.tensor([[(part**2).sum() / 2 / _SEQUENCES for part in row] for row in y])
        ours = [[part.T @ x / _SEQUENCES for part in row] for row, x in zip(y, x_CBH, strict=True)]
        places = [divmod(rank, shards) for rank in range(size)]
        losses = {
            "Each rank returned the loss of its own part: nothing was added up.": [
                own[c, s] for c, s in places
            ],
            "The parts of one copy add up; they were averaged over all ranks.": own.mean(),
            "The copies' losses were added up, not averaged: each is over its own "
            "sequences.": own.sum(),
            "It is the loss of one copy: the others have sequences, too.": [
                own[c].sum() for c, _ in places
            ],
            "It lacks the other shards' part of the sum.": [own[:, s].mean() for _, s in places],
        }
        right = [own.sum(1).mean()] * size
        got = [loss for loss, _ in results]
        same(got, right, "the loss", _ON_GRID, _everywhere(size, losses))

        share = [torch.stack([row[s] for row in ours]).mean(0) for s in range(shards)]
        mixed = torch.stack([gradient for row in ours for gradient in row])
        other_rows = "ranks of the tensor group hold other rows."
        gradients = {
            "The tensor group's ranks hold different rows: what was added up there does not belong "
            "together.": [sum(ours[c]) for c, _ in places],
            f"It was averaged over all ranks; {other_rows}": mixed.mean(0),
            f"It was added up over all ranks; {other_rows}": mixed.sum(0),
            "It is the gradient of this copy's sequences alone.": [ours[c][s] for c, s in places],
            "The copies' gradients were added up, not averaged.": [
                copies * share[s] for _, s in places
            ],
        }
        right, got = [share[s] for _, s in places], [gradient for _, gradient in results]
        same(got, right, "the gradient", _ON_GRID, _everywhere(size, gradients))
    return "Right on two copies of two shards, and on one, as one process computes it."


_MODEL, _GPU = PRESETS["llama-3-70b"], MACHINES["h200"]
_GPUS, _BATCH, _MOST = 64, 512, 71.0  # seconds


@exercise("my_layout")
def _layout(answer: Any) -> str:
    laid_out(answer, Layout, _GPUS, _BATCH)
    try:
        full = strategy.fullness(_MODEL, _GPU, answer)
        found = strategy.predict(_MODEL, _GPU, answer)
    except ValueError as error:
        raise Wrong(f"The model cannot be cut so: {error}.") from None
    if full:
        raise Wrong(full)
    needs, taken = f"{found.memory.reserved / 1e9:.1f} GB", found.seconds.total
    if taken > _MOST:
        slow = strategy.slowness(_MODEL, _GPU, answer)
        raise Wrong(f"It fits, with {needs} on the fullest GPU, but it is too slow. {slow}")
    return f"Right: {needs} on the fullest GPU, and a step of some {taken:.1f} s."
