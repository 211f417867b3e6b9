"""Lesson `zero`: its exercises accept solutions, and help with the mistakes that people make."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from answers import each, judged

from shardlab import zero


def bounds(elements, rank, size):
    shard = math.ceil(elements / size)
    return min(rank * shard, elements), min((rank + 1) * shard, elements)


def rounded_down(elements, rank, size):
    return rank * (elements // size), (rank + 1) * (elements // size)


def padded(elements, rank, size):
    shard = math.ceil(elements / size)
    return rank * shard, (rank + 1) * shard


def begin_too_far(elements, rank, size):
    shard = math.ceil(elements / size)
    return rank * shard, min((rank + 1) * shard, elements)


def last_takes_the_rest(elements, rank, size):
    shard = elements // size
    return rank * shard, elements if rank == size - 1 else (rank + 1) * shard


def own(weights, moment, group):
    begin = dist.get_rank(group) * len(moment)
    return slice(begin, begin + len(moment))


def mixed(
    weights,
    gradient,
    master,
    moment,
    lr,
    decay,
    group,
    share=None,
    wide=True,
    keep=True,
    put=True,
    gather=True,
):
    mine = own(weights, master, group)
    total = zero.ReduceScatter(gradient.float() if wide else gradient, group, ordered=True).wait()
    new = decay * moment + total.float() * (share or 1 / dist.get_world_size(group))
    if keep:
        moment.copy_(new)
    master -= lr * new
    if put:
        weights[mine] = master
    if gather:
        zero.all_gather(weights, mine, group).wait()


def mixed_nothing(weights, gradient, master, moment, lr, decay, group):
    dist.all_reduce(gradient, group=group)


def mixed_narrow_step(weights, gradient, master, moment, lr, decay, group):
    mine = own(weights, master, group)
    total = zero.ReduceScatter(gradient.float(), group, ordered=True).wait()
    moment.mul_(decay).add_(total / dist.get_world_size(group))
    weights[mine] -= (lr * moment).bfloat16()
    zero.all_gather(weights, mine, group).wait()


def mixed_unsummed(weights, gradient, master, moment, lr, decay, group):
    mine = own(weights, master, group)
    moment.mul_(decay).add_(gradient[mine].float())
    master -= lr * moment
    weights[mine] = master
    zero.all_gather(weights, mine, group).wait()


def norm(gradients, group, square=True, root=True, reduce=True, op=dist.ReduceOp.SUM):
    kept = [g for g in gradients if g is not None]
    value = sum((g.square().sum() for g in kept), torch.tensor(0.0))
    value = value if square else value.sqrt()
    if reduce:
        dist.all_reduce(value, op, group=group)
    return value.sqrt() if square and root else value


def stage(params, activations, ranks, memory, forget=False, divide=False):
    activations = 0 if forget else activations / ranks if divide else activations
    for number in range(4):
        held = [16, 4 + 12 / ranks, 2 + 14 / ranks, 16 / ranks][number] * params
        if held + activations <= memory:
            return number
    return None


ANSWERS = [
    ("zero_bytes", 13e9 * (2 + 14 / 32), None),
    ("zero_bytes", ..., "There is no answer yet"),
    ("zero_bytes", 13e9 * 16, "stage 0"),
    ("zero_bytes", 13e9 * (4 + 12 / 32), "stage 1"),
    ("zero_bytes", 13e9 * 16 / 32, "stage 3"),
    ("zero_bytes", 13e9 * (2 + 12 / 32), "this rank's gradients"),
    ("zero_bytes", 31.6875, "in bytes"),
    ("my_shard_bounds", bounds, None),
    ("my_shard_bounds", lambda elements, rank, size: ..., "a pair"),
    ("my_shard_bounds", rounded_down, "belong to nobody"),
    ("my_shard_bounds", padded, "padding"),
    ("my_shard_bounds", begin_too_far, "behind the end"),
    ("my_shard_bounds", last_takes_the_rest, "belong to nobody"),
    ("my_shard_bounds", lambda elements, rank: (0, 1), "raised TypeError"),
    ("my_mixed_step", mixed, None),
    ("my_mixed_step", lambda *_: ..., "Nothing has changed"),
    ("my_mixed_step", mixed_nothing, "Nothing has changed"),
    ("my_mixed_step", lambda *a: mixed(*a, share=1.0), "summed over 2 ranks, not averaged"),
    ("my_mixed_step", lambda *a: mixed(*a, gather=False), "nobody has the others'"),
    ("my_mixed_step", lambda *a: mixed(*a, put=False), "never get into the weights"),
    ("my_mixed_step", lambda *a: mixed(*a, keep=False), "does not carry over"),
    ("my_mixed_step", lambda *a: mixed(*a, wide=False), "added up in bfloat16"),
    ("my_mixed_step", mixed_narrow_step, "small steps round away"),
    ("my_mixed_step", mixed_unsummed, "not averaged at all"),
    ("my_global_norm", norm, None),
    ("my_global_norm", lambda gradients, group: norm(gradients, group).item(), None),
    ("my_global_norm", lambda gradients, group: ..., "should be a tensor"),
    ("my_global_norm", lambda g, group: norm(g, group, reduce=False), "own pieces"),
    ("my_global_norm", lambda g, group: norm(g, group, square=False), "sum of the ranks' norms"),
    ("my_global_norm", lambda g, group: norm(g, group, root=False), "square of the norm"),
    ("my_global_norm", lambda g, group: norm(g, group, op=dist.ReduceOp.AVG), "mean over ranks"),
    ("my_stage", stage, None),
    ("my_stage", lambda *_: None, "None every time"),
    ("my_stage", lambda *a: stage(*a, forget=True), "leaves out the activations"),
    ("my_stage", lambda *a: stage(*a, divide=True), "No stage divides activations"),
    ("my_stage", lambda *a: 3, "A smaller stage fits"),
    ("my_stage", lambda *a: 3 if stage(*a) is None else stage(*a), "Does stage 3 fit?"),
    ("my_stage", lambda params: 3, "raised TypeError"),
]


@each(ANSWERS)
def test_exercises_accept_the_solution_and_help_with_mistakes(name, answer, words):
    judged(name, answer, words)
