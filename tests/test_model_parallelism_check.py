"""Lesson `model_parallelism`: its exercises accept solutions, and help with common mistakes."""

from __future__ import annotations

import math

import torch.distributed as dist
from answers import each, judged

from shardlab.strategy import Layout

TENSOR, DATA, ALL = 0, 1, 2


def busy(p, percent):
    return max(1, -(-percent * (p - 1) // (100 - percent)))


def busy_in_floats(p, percent):
    return max(1, math.ceil(percent / 100 * (p - 1) / (1 - percent / 100)))


def traffic(params, d, m, nbytes=2, share=True, back=2, early=False, late=True, gathers=2):
    once = nbytes * params * (d - 1) / d if share else nbytes * params
    first, many = m if early else 1, m if late else 1
    return [back * first * once, (first + 1) * once, (many + 1) * once, many * (1 + gathers) * once]


def grid(x, w, *groups, loss=(TENSOR, DATA), gradient=(DATA,), over=DATA, loss_over=DATA):
    """The solution; or other groups to add up in, and other ranks to average over."""
    y = x @ w.T
    value, rows = (y**2).sum() / 2 / len(x), y.T @ x / len(x)
    for which in loss:
        dist.all_reduce(value, group=groups[which])
    for which in gradient:
        dist.all_reduce(rows, group=groups[which])
    groups = [*groups, dist.group.WORLD]
    value = value if loss_over is None else value / dist.get_world_size(groups[loss_over])
    return value, rows if over is None else rows / dist.get_world_size(groups[over])


GOOD = {"dp": 8, "tp": 4, "pp": 2, "zero": 1, "microbatches": 64, "sequence_parallel": True}


def laid_out(**changes):
    return Layout(**GOOD | changes)


ANSWERS = [
    ("zero_states", 20.125e9, None),
    ("zero_states", ..., "There is no answer yet"),
    ("zero_states", 112e9, "Which of them does stage 2 share"),
    ("zero_states", 7e9, "which is stage 3"),
    ("zero_states", 33.25e9, "which is stage 1"),
    ("zero_states", 17.5e9, "Are the gradients there"),
    ("zero_states", 19.25e9, "One is missing"),
    ("zero_states", 18.375e9, "beside its two means"),
    ("zero_states", 85.75e9, "are shared, too"),
    ("zero_states", 26.25e9, "16 GPUs, not 8"),
    ("zero_states", 322e9, "for all GPUs together"),
    ("zero_states", 20.125, "asked for in bytes"),
    ("gradient_traffic", 24.5e9, None),
    ("gradient_traffic", 14e9, "How often does each piece"),
    ("gradient_traffic", 28e9, "(N−1)/N"),
    ("gradient_traffic", 12.25e9, "do the sums come back"),
    ("gradient_traffic", 98e9, "passes pieces on"),
    ("gradient_traffic", 49e9, "not 4"),
    ("gradient_traffic", 24.5, "asked for in bytes"),
    ("my_busy_microbatches", busy, None),
    ("my_busy_microbatches", lambda p, q: None, "None every time"),
    ("my_busy_microbatches", lambda p, q: q * (p - 1) / (100 - q), "whole numbers"),
    ("my_busy_microbatches", lambda p, q: -(-100 * (p - 1) // (100 - q)) or 1, "the whole step"),
    ("my_busy_microbatches", lambda p, q: -(-q * p // (100 - q)), "not p"),
    ("my_busy_microbatches", lambda p, q: max(1, q * (p - 1) // (100 - q)), "are busy for 66.67 %"),
    ("my_busy_microbatches", lambda p, q: -(-q * (p - 1) // (100 - q)), "one micro-batch at least"),
    ("my_busy_microbatches", busy_in_floats, "rounded on the way"),
    ("my_busy_microbatches", lambda p: 1, "raised TypeError"),
    ("gpus_needed", 24, None),
    ("gpus_needed", 14, "states alone"),
    ("gpus_needed", 16, "the other 10"),
    ("gpus_needed", 19, "whole nodes"),
    ("gpus_needed", 18, "rounded up"),
    ("gpus_needed", 5, "room for the weights"),
    ("my_zero_traffic", traffic, None),
    ("my_zero_traffic", lambda *case: tuple(traffic(*case)), None),
    ("my_zero_traffic", lambda *case: None, "four numbers"),
    ("my_zero_traffic", lambda *case: traffic(*case)[1:], "0 to 3"),
    ("my_zero_traffic", lambda *case: traffic(*case, share=False), "keeps its own share"),
    ("my_zero_traffic", lambda *case: traffic(*case, late=False), "for one micro-batch"),
    ("my_zero_traffic", lambda *case: traffic(*case, back=1), "to hand out"),
    ("my_zero_traffic", lambda *case: traffic(*case, early=True), "once a step"),
    ("my_zero_traffic", lambda *case: traffic(*case, gathers=1), "they were freed"),
    ("my_zero_traffic", lambda *case: traffic(*case, nbytes=1), "has 2 bytes"),
    (
        "my_zero_traffic",
        lambda p, d, m: [*traffic(p, d, m)[:2], 2 * m * p * (d - 1) / d * 2, traffic(p, d, m)[3]],
        "gathered once, after",
    ),
    ("my_zero_traffic", lambda p, d, m: [*traffic(p, d, m)[:1], p, 0, 0], "In stage 1"),
    ("my_zero_traffic", lambda p, d, m: [*traffic(p, d, m)[:3], p], "Stage 3 is the first"),
    ("my_grid_step", grid, None),
    ("my_grid_step", lambda *a: None, "returned nothing"),
    ("my_grid_step", lambda *a: grid(*a)[0], "a pair, loss and gradient"),
    ("my_grid_step", lambda *a: grid(*a, loss=(), loss_over=None), "nothing was added up"),
    ("my_grid_step", lambda *a: grid(*a, loss=(TENSOR,), loss_over=None), "the loss of one copy"),
    ("my_grid_step", lambda *a: grid(*a, loss=(DATA,)), "lacks the other shards'"),
    ("my_grid_step", lambda *a: grid(*a, loss_over=ALL), "averaged over all ranks"),
    ("my_grid_step", lambda *a: grid(*a, loss_over=None), "losses were added up, not averaged"),
    ("my_grid_step", lambda *a: grid(*a, gradient=(), over=None), "this copy's sequences alone"),
    ("my_grid_step", lambda *a: grid(*a, gradient=(TENSOR,), over=None), "does not belong"),
    ("my_grid_step", lambda *a: grid(*a, over=None), "gradients were added up, not averaged"),
    ("my_grid_step", lambda *a: grid(*a, gradient=(DATA, TENSOR), over=ALL), "averaged over all"),
    ("my_grid_step", lambda *a: grid(*a, gradient=(DATA, TENSOR), over=None), "added up over all"),
    ("my_layout", laid_out(), None),
    ("my_layout", laid_out(dp=16, pp=1, zero=2, microbatches=32), None),
    ("my_layout", laid_out(dp=16, pp=1, zero=3, microbatches=32), "waits of the copies"),
    ("my_layout", (8, 4, 2), "should be a strategy.Layout"),
    ("my_layout", laid_out(dp=4, microbatches=128), "there are 64 GPUs"),
    ("my_layout", laid_out(microbatches=4), "a step has 512"),
    ("my_layout", laid_out(dp=1, tp=64, pp=1, microbatches=512), "cannot be cut"),
    ("my_layout", laid_out(zero=0), "copies can share one"),
    ("my_layout", laid_out(sequence_parallel=False), "sequence parallelism shares it"),
    ("my_layout", laid_out(micro_batch=8, microbatches=8), "fewer sequences"),
    ("my_layout", Layout(64, microbatches=8), "cut the model into more parts"),
    ("my_layout", Layout(64, zero=3, microbatches=8), "the rest are activations"),
    ("my_layout", Layout(64, zero=3, microbatches=8, recompute="full"), "done twice"),
    ("my_layout", laid_out(tp=8, pp=1), "sums inside of the layers"),
    ("my_layout", laid_out(zero=3, recompute="full"), "done twice"),
]


@each(ANSWERS)
def test_exercises_accept_the_solution_and_help_with_mistakes(name, answer, words):
    judged(name, answer, words)
