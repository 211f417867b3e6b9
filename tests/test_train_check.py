"""The exercises of lesson `train` help with the wrong answers that readers give."""

from __future__ import annotations

import torch
import torch.distributed as dist
from answers import each, judged


def right_mean(total, count, group):
    both = torch.tensor([total, count], dtype=torch.float64)
    dist.all_reduce(both, group=group)
    return (both[0] / both[1]).item()


def mean_of_means(total, count, group):
    mean = torch.tensor(total / count if count else 0.0, dtype=torch.float64)
    dist.all_reduce(mean, group=group)
    return mean.item() / dist.get_world_size(group)


def sum_alone(total, count, group):
    value = torch.tensor(total, dtype=torch.float64)
    dist.all_reduce(value, group=group)
    return value.item()


def own_mean(total, count, group):
    return total / max(count, 1)


def nothing(*_):
    pass


def rest(order, done, batch, rank, size):
    return order[done * batch : len(order) // batch * batch][rank::size]


def rest_from_the_start(order, done, batch, rank, size):
    return order[rank::size][: (len(order) // batch - done) * batch // size]


def rest_with_the_last(order, done, batch, rank, size):
    return order[done * batch :][rank::size]


def rest_in_pieces(order, done, batch, rank, size):
    left = order[done * batch : len(order) // batch * batch]
    each = len(left) // size
    return left[rank * each : (rank + 1) * each]


def rest_for_all(order, done, batch, rank, size):
    return order[done * batch : len(order) // batch * batch][: len(order) // size]


def decides(send):
    def my_decision(gradients, group):
        bad = torch.tensor(float(any(not g.isfinite().all() for g in gradients)))
        if send:
            dist.all_reduce(bad, send, group)
        return not bad.item()

    return my_decision


def adds_gradients(gradients, group):
    total = torch.stack([g.sum() for g in gradients] or [torch.tensor(0.0)]).sum()
    dist.all_reduce(total, group=group)
    return bool(total.isfinite())


RIGHT = {"A": "sampler", "B": "set_epoch", "C": "all_reduce", "D": "wrapper"}


@each(
    [
        ("validation_filled_up", 58 / 12, None),
        ("validation_filled_up", 5.5, "That is the right mean"),
        ("validation_filled_up", 74 / 12, "begins anew at the first"),
        ("my_mean", right_mean, None),
        ("my_mean", mean_of_means, "mean of the ranks' means"),
        ("my_mean", sum_alone, "sum of all losses"),
        ("my_mean", own_mean, "due are"),
        ("my_mean", nothing, "a number is due"),
        ("my_rest", rest, None),
        ("my_rest", rest_from_the_start, "read again"),
        ("my_rest", rest_with_the_last, "is to be dropped"),
        ("my_rest", rest_in_pieces, "other windows than one process"),
        ("my_rest", rest_for_all, "the same window"),
        ("my_rest", nothing, "A list is due"),
        ("my_decision", decides(dist.ReduceOp.MAX), None),
        ("my_decision", decides(None), "their scales differ"),
        ("my_decision", decides(dist.ReduceOp.MIN), "all ranks make the step"),
        ("my_decision", adds_gradients, "they should make it"),
        ("my_decision", nothing, "return a bool"),
        ("skipped_steps", 17, None),
        ("skipped_steps", 16, "a hysteresis of 2"),
        ("states_of_a_job", {"ddp": 20.8, "fsdp2": 2.6}, None),
        ("states_of_a_job", {"ddp": 20.8, "fsdp2": 20.8}, "FSDP2 divides"),
        ("states_of_a_job", {"ddp": 5.2, "fsdp2": 2.6}, "the weights alone"),
        ("states_of_a_job", 20.8, "A dictionary is due"),
        ("missing_lines", RIGHT, None),
        ("missing_lines", RIGHT | {"A": "wrapper", "D": "sampler"}, "A lacks something else"),
        ("missing_lines", {"A": "sampler"}, "A dictionary is due"),
        ("missing_lines", RIGHT | {"B": "epoch"}, "'epoch': allowed are"),
    ]
)
def test_verdicts(name, answer, words):
    judged(name, answer, words)
