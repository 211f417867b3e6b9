"""Lesson `tensor_types`: its exercises accept solutions, and help with common mistakes."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from answers import each, judged

from shardlab.tensor_parallel import copy_to, gather_last, reduce_from

WORDS = {"norm": "RR", "norm's gradient": "PP", "up": "RV", "up's gradient": "PV", "tokens": "VR"}


class Gather(torch.autograd.Function):
    """V -> R, or with a mistake."""

    @staticmethod
    def forward(ctx, x, group, mistake):
        ctx.group, ctx.mistake = group, mistake
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts[::-1] if mistake == "order" else parts, -1)

    @staticmethod
    def backward(ctx, dy):
        total = dy.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        if ctx.mistake == "average":
            total /= ctx.group.size()
        return total.chunk(ctx.group.size(), -1)[ctx.group.rank()], None, None


def gathers(mistake=None):
    return lambda x, group: Gather.apply(x, group, mistake)


def bare(x, group):
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.detach().contiguous(), group=group)
    return torch.cat(parts, -1)


def summed(words):
    found = set(words)
    if len(found) == 1:
        return words[0]
    return "V" if found == {"R", "V"} else None


def network(enter=copy_to, scaled=copy_to, behind=True, leave=reduce_from):
    def answer(x, gate, up, down, scale, bias, group):
        x, scale = enter(x, group), scaled(scale, group)
        y = F.silu(F.linear(x, gate)) * F.linear(x, up) * scale
        if not behind:
            return leave(F.linear(y, down) + bias, group)
        return leave(F.linear(y, down), group) + bias

    return answer


def nothing(x, group):
    return x


PLAN = {
    "copy_to forgotten": "types",
    "loss divided by N twice, before backward": "loss",
    "a rank's tokens begin at position 0": "loss",
    "gradients of norms not summed, sequence cut": "types",
    "each epoch in the same order": None,
    "gradients averaged over tp in place of dp": "types",
}
# Name of the exercise, an answer, words of the verdict; None: it is right.
ANSWERS = [
    ("type_words", WORDS, None),
    ("type_words", {**WORDS, "norm": "RI"}, "a rank's norm sees its own tokens alone"),
    ("type_words", {**WORDS, "norm": "VR"}, "'norm': V on dp it is not"),
    ("type_words", {**WORDS, "norm's gradient": "PR"}, "The tensor is R there"),
    ("type_words", {**WORDS, "up's gradient": "PP"}, "The tensor is V there"),
    ("type_words", {**WORDS, "tokens": "VV"}, "look at the same tokens"),
    ("type_words", {**WORDS, "up": "R"}, "is no pair of the words"),
    ("type_words", {"norm": "RR"}, "A word pair for each"),
    ("my_operator", gathers(), None),
    ("my_operator", gathers("order"), "the value changes"),
    ("my_operator", gathers("average"), "addends have to be added up"),
    ("my_operator", gather_last, "Its words are V -> I"),
    ("my_operator", copy_to, "Its words are I -> R"),
    ("my_operator", bare, "gets no gradient"),
    ("my_operator", lambda x, group: None, "returned no tensor"),
    ("my_operator", lambda x, group: 1 / 0, "ZeroDivisionError"),
    ("my_sum", summed, None),
    ("my_sum", lambda words: summed(words) if "P" not in words else None, "Addends of two sums"),
    ("my_sum", lambda words: "I" if "I" in words else summed(words), "I's gradient"),
    ("my_sum", lambda words: summed(words) if len(set(words)) == 1 else None, "the rank's own"),
    ("my_sum", lambda words: "P" if "P" in words and "I" not in words else summed(words), "once"),
    ("my_sum", lambda words: None, "Like goes with like"),
    ("my_sum", lambda words: "X", "A word is asked for"),
    ("my_sum", lambda words: words[9], "raised IndexError"),
    ("my_network", network(), None),
    ("my_network", network(scaled=nothing), "gradient of scale is not one process's"),
    ("my_network", network(enter=nothing), "linear(x tp:I, gate tp:V)"),
    ("my_network", network(behind=False), "The output of rank 0 is off"),
    ("my_network", network(leave=nothing), "The output of rank 0 is off"),
    ("my_network", lambda *_: None, "no result of x's shape"),
    ("type_plan", PLAN, None),
    ("type_plan", {**PLAN, "copy_to forgotten": "gradients"}, "something cheaper does"),
    ("type_plan", {**PLAN, "copy_to forgotten": "loss"}, "x is I and meets"),
    ("type_plan", {**PLAN, "each epoch in the same order": "loss"}, "Each single step is right"),
    ("type_plan", {**PLAN, "copy_to forgotten": 1}, "is none of"),
    ("type_plan", {}, "is asked for, for each mistake"),
]


@each(ANSWERS)
def test_exercises_accept_the_solution_and_help_with_mistakes(name, answer, words):
    judged(name, answer, words)
