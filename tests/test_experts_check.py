"""Lesson `experts`: its exercises accept solutions, and help with common mistakes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from answers import each, judged

from shardlab import collectives, experts


def admit(chosen_TC, count, places, by_token=False):
    kept_TC, taken = chosen_TC.clone(), [0] * count
    turns = [(t, c) for c in range(chosen_TC.shape[1]) for t in range(len(chosen_TC))]
    for t, c in sorted(turns) if by_token else turns:
        number = int(chosen_TC[t, c])
        if taken[number] == places:
            kept_TC[t, c] = -1
        taken[number] = min(places, taken[number] + 1)
    return kept_TC


def exchange(x_RH, sent, received, group):
    outputs = [x_RH.new_empty(rows, x_RH.shape[1]) for rows in received]
    collectives.all_to_all(outputs, list(x_RH.split(sent)), group)
    return torch.cat(outputs)


def even_exchange(x_RH, sent, received, group):
    out_RH = torch.empty_like(x_RH)
    dist.all_to_all_single(out_RH, x_RH, group=group)
    return out_RH


def averaged(of_own, divided_by):
    def average(shared, own, data, copies):
        dist.all_reduce(shared, group=data)
        dist.all_reduce(own, group=copies if of_own == "copies" else data)
        shared /= data.size()
        own /= {"data": data.size(), "copies": copies.size()}[divided_by]

    return average


def only_sums(shared, own, data, copies):
    dist.all_reduce(shared, group=data)
    dist.all_reduce(own, group=copies)


def balancing(everywhere=True, differentiable=True):
    def balance(scores_TE, chosen_TC, group):
        load_E = torch.bincount(chosen_TC.flatten(), minlength=scores_TE.shape[1]).float()
        if everywhere:
            dist.all_reduce(load_E, group=group)
        mean_E = scores_TE.mean(0) if differentiable else scores_TE.detach().mean(0)
        return scores_TE.shape[1] * (load_E / load_E.sum() * mean_E).sum()

    return balance


def smallest(config, tokens, limit, rows, mind_rows=True):
    for size in range(1, config.experts + 1):
        if config.experts % size or 16 * experts.held(config, size) > limit:
            continue
        if not mind_rows or tokens * size * config.experts_per_token / config.experts >= rows:
            return size
    return None


WIRE = 2 * 4096 * 8 * 7168 * 2


@each(
    [
        ("experts_tokens", 9600, None),
        ("experts_tokens", 300 * 256, "eight experts"),
        ("experts_tokens", 2400, "How many experts share them?"),
        ("experts_tokens", 150, "all of them together"),
        ("experts_tokens", "many", "should be a number of tokens"),
        ("experts_wire", WIRE * 63 / 64, None),
        ("experts_wire", WIRE, "does not leave it"),
        ("experts_wire", WIRE * 63 / 128, "has to come back"),
        ("experts_wire", WIRE * 63 / 32, "asked is forward"),
        ("experts_wire", WIRE / 8 * 63 / 64, "as eight rows"),
        ("my_admit", admit, None),
        ("my_admit", lambda x, n, p: admit(x, n, p, True), "token by token"),
        ("my_admit", lambda x, n, p: x, "Nothing is dropped"),
        ("my_admit", lambda x, n, p: admit(x, n, p + 1), "places"),
        ("my_admit", lambda x, n, p: admit(x, n, p - 1), "should be"),
        ("my_admit", lambda x, n, p: x.tolist(), "should be a tensor"),
        ("my_admit", lambda x, n: x, "raised TypeError"),
        ("my_exchange", exchange, None),
        ("my_exchange", even_exchange, "shape"),
        ("my_exchange", lambda x, sent, received, group: None, "returned None"),
        ("my_average", averaged("copies", "data"), None),
        ("my_average", averaged("copies", "copies"), "four ranks brought tokens"),
        ("my_average", averaged("data", "data"), "different experts"),
        ("my_average", only_sums, "That is the sum"),
        ("my_average", lambda shared, own, data, copies: None, "off by"),
        ("my_balancing", balancing(), None),
        ("my_balancing", balancing(everywhere=False), "each rank's own tokens"),
        ("my_balancing", balancing(differentiable=False), "no gradient"),
        ("my_balancing", lambda scores, chosen, group: 1.0, "a tensor of one number"),
        ("my_expert_ranks", smallest, None),
        ("my_expert_ranks", lambda *given: smallest(*given, mind_rows=False), "gets 32 rows"),
        ("my_expert_ranks", lambda *given: 8, "right is 4"),
    ]
)
def test_verdicts(name, answer, words):
    judged(name, answer, words)
