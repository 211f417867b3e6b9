"""Lesson `pipeline`: its exercises accept solutions, and help with the usual mistakes."""

from __future__ import annotations

from itertools import accumulate, combinations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from answers import each, judged

from shardlab import ranks
from shardlab.check import pipeline as checks


def one_f_one_b(stage, stages, microbatches, ahead=None):
    ahead = stages - 1 - stage if ahead is None else ahead
    ahead = min(ahead, microbatches)
    order = [f"F{i}" for i in range(ahead)]
    for i in range(microbatches - ahead):
        order += [f"F{ahead + i}", f"B{i}"]
    return order + [f"B{i}" for i in range(microbatches - ahead, microbatches)]


def more_than_there_are(stage, stages, microbatches):
    ahead = stages - 1 - stage
    order = [f"F{i}" for i in range(ahead)]
    for i in range(microbatches - ahead):
        order += [f"F{ahead + i}", f"B{i}"]
    return order + [f"B{i}" for i in range(microbatches - ahead, microbatches)]


def from_one(stage, stages, microbatches):
    return [f"{a[0]}{int(a[1:]) + 1}" for a in one_f_one_b(stage, stages, microbatches)]


def live(order, ends="BW", most=max, from_zero=True):
    counts = accumulate((action[0] == "F") - (action[0] in ends) for action in order)
    return most(list(counts))


def balance(costs, parts):
    cuts = combinations(range(1, len(costs)), parts - 1)
    ends = min(
        ((0, *cut, len(costs)) for cut in cuts),
        key=lambda ends: max(sum(costs[a:b]) for a, b in zip(ends, ends[1:], strict=False)),
    )
    return [b - a for a, b in zip(ends, ends[1:], strict=False)]


def even(costs, parts):
    return [len(costs) // parts + (i < len(costs) % parts) for i in range(parts)]


def greedy(costs, parts):
    layers, held, part = [0] * parts, 0.0, 0
    for i, cost in enumerate(costs):
        full = layers[part] and held + cost > sum(costs) / parts
        if part < parts - 1 and (full or len(costs) - i <= parts - 1 - part):
            part, held = part + 1, 0.0
        layers[part] += 1
        held += cost
    return layers


def gpipe(part, x_BH, y_BH, m, group, scale=None, ones=False, clear=False, grad=True, order=1):
    stage, last = dist.get_rank(group), dist.get_world_size(group) - 1
    inputs, outputs, sent = [], [], []
    for x, y in zip(x_BH.chunk(m), y_BH.chunk(m), strict=True):
        if stage > 0:
            x = torch.empty_like(x)
            ranks.irecv(x, stage - 1, group).wait()
            x.requires_grad_(grad)
        out = part(x)
        if stage < last:
            sent.append(ranks.isend(out.detach(), stage + 1, group))
        else:
            out = F.mse_loss(out, y) / (scale or m)
        inputs.append(x)
        outputs.append(out)
    for x, out in list(zip(inputs, outputs, strict=True))[::order]:
        if clear:
            part.zero_grad()
        gradient = None
        if stage < last:
            gradient = torch.empty_like(out)
            ranks.irecv(gradient, stage + 1, group).wait()
        out.backward(torch.ones_like(out) if ones and stage < last else gradient)
        if stage > 0:
            sent.append(ranks.isend(x.grad, stage - 1, group))
    for message in sent:
        message.wait()


def gpipe_without_gradients(part, x_BH, y_BH, m, group):
    for x in x_BH.chunk(m):
        part(x).backward()


def gpipe_that_waits(part, x_BH, y_BH, m, group):
    stage = dist.get_rank(group)
    ranks.irecv(torch.empty_like(x_BH), 1 - stage if stage < 2 else 0, group).wait()


def deadlock(orders, rounds=99, kinds="FB", own=True, only=99):
    done, at = set(), [0] * len(orders)
    for _ in range(rounds):
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                action = order[at[stage]]
                other = stage - 1 if action[0] == "F" else stage + 1
                need = (other, action)
                if other == len(orders):
                    need = (stage, "F" + action[1:]) if own else None
                if other >= 0 and action[0] in kinds and need and need not in done:
                    break
                done.add((stage, action))
                at[stage] += 1
    stuck = {s: order[at[s]] for s, order in enumerate(orders) if at[s] < len(order)}
    return dict(list(stuck.items())[:only])


def for_ever(orders):
    while True:
        pass


def microbatches(stages, batch, bubble, room, held=None, share=None, divides=True, first=0):
    held = held or (lambda p, m, batch: min(p, m) * batch / m)
    share = share or (lambda p, m: (p - 1) / (m + p - 1))
    fit = [
        m
        for m in range(1, batch + 1)
        if (batch % m == 0 or not divides)
        and share(stages, m) <= bubble
        and held(stages, m, batch) <= room
    ]
    return fit[first] if fit else None


ANSWERS = [
    # exercise, answer, words of the verdict (None: it is right)
    ("pipeline_bubble", 7 / 39, None),
    ("pipeline_bubble", 0.18, None),
    ("pipeline_bubble", ..., "no answer yet"),
    ("pipeline_bubble", 32 / 39, "in which a stage works"),
    ("pipeline_bubble", 7 / 32, "idle time beside working time"),
    ("pipeline_bubble", 8 / 39, "how many stages come before"),
    ("pipeline_bubble", 7 / 40, "how many slots"),
    ("pipeline_bubble", 7 / 8, "without micro-batches"),
    ("pipeline_bubble", 1 / 8, "without micro-batches"),
    ("pipeline_bubble", 14 / 39, "Twice too much"),
    ("pipeline_bubble", 17.9, "In percent it is right"),
    ("pipeline_bubble", "18 %", "should be a number"),
    ("my_1f1b", one_f_one_b, None),
    ("my_1f1b", lambda *_: None, "should be a list"),
    ("my_1f1b", lambda *_: ..., "should be a list"),
    ("my_1f1b", lambda *_: [0, 1], "should be a list"),
    ("my_1f1b", lambda *_: [], "F0 is missing"),
    ("my_1f1b", lambda stage: [], "raised TypeError"),
    ("my_1f1b", lambda s, p, m: one_f_one_b(s, p, m, m), "That is GPipe"),
    ("my_1f1b", lambda s, p, m: one_f_one_b(s, p, m, p - s), "one micro-batch more than"),
    ("my_1f1b", lambda s, p, m: one_f_one_b(s, p, m, p - 1), "All stages begin alike"),
    ("my_1f1b", lambda s, p, m: one_f_one_b(s, p, m, s), "Counted from the wrong end"),
    ("my_1f1b", lambda s, p, m: one_f_one_b(s, p, m, 0), "nothing overlaps"),
    ("my_1f1b", more_than_there_are, "no pass of micro-batches 0 to 1"),
    ("my_1f1b", from_one, "counted from 0"),
    ("my_1f1b", lambda *a: one_f_one_b(*a)[:-1], "B7 is missing"),
    ("my_1f1b", lambda *a: [*one_f_one_b(*a), "B0"], "more than once"),
    ("my_1f1b", lambda *a: one_f_one_b(*a)[::-1], "B0 stands before F0"),
    ("my_1f1b", lambda s, p, m: one_f_one_b(s, p, m, 2), "comes at the wrong time"),
    ("my_live", live, None),
    ("my_live", lambda order: None, "returned None"),
    ("my_live", lambda order: live(order, most=lambda counts: counts[-1]), "most at any time"),
    ("my_live", lambda order: sum(a[0] == "F" for a in order), "gives activations back"),
    ("my_live", lambda order: live(order, "B"), "What ends them then?"),
    ("my_live", lambda order: live(order, "BI"), "I does not end them"),
    ("my_live", lambda order: live(order, "BIW"), "I does not end them"),
    ("my_live", lambda order: {"F": 1, "B": -1}[order[1][0]], "returned 1"),
    ("my_live", lambda order: max({"F": 1, "B": 1}[a[0]] for a in order), "returned 1"),
    ("my_balance", balance, None),
    ("my_balance", lambda costs, parts: tuple(balance(costs, parts)), None),
    ("my_balance", lambda *_: None, "should be a list"),
    ("my_balance", even, "Layers are counted here"),
    ("my_balance", greedy, "fills one part after another"),
    ("my_balance", lambda costs, parts: [len(costs)], "should be 4 numbers"),
    ("my_balance", lambda costs, parts: [1] * parts, "8 layers in all"),
    ("my_balance", lambda costs, parts: [len(costs)] + [0] * (parts - 1), "without work"),
    ("my_gpipe", gpipe, None),
    ("my_gpipe", lambda *a: gpipe(*a, order=-1), None),
    ("my_gpipe", lambda *_: ..., "never went backward"),
    ("my_gpipe", lambda *a: gpipe(*a, scale=1), "sum of 4 means is 4 times"),
    ("my_gpipe", lambda *a: gpipe(*a, ones=True), "went backward from ones"),
    ("my_gpipe", lambda *a: gpipe(*a, clear=True), "last micro-batch alone"),
    ("my_gpipe", lambda *a: gpipe(*a, grad=False), "requires_grad_()"),
    ("my_gpipe", gpipe_without_gradients, "Only the last stage has a loss"),
    ("my_gpipe", gpipe_that_waits, "needs a send on the other side"),
    ("my_deadlock", deadlock, None),
    ("my_deadlock", lambda orders: None, "should be a dict"),
    ("my_deadlock", lambda orders: [], "should be a dict"),
    ("my_deadlock", lambda orders: {}, "name all that stand"),
    ("my_deadlock", lambda orders: deadlock(orders, rounds=1), "goes on once another"),
    ("my_deadlock", lambda orders: deadlock(orders, kinds="F"), "name all that stand"),
    ("my_deadlock", lambda orders: deadlock(orders, kinds="B"), "name all that stand"),
    ("my_deadlock", lambda orders: deadlock(orders, own=False), "waits for its forward"),
    ("my_deadlock", lambda orders: deadlock(orders, only=1), "name all that stand"),
    ("my_deadlock", lambda orders: orders[9], "raised IndexError"),
    ("my_deadlock", for_ever, "Does the loop end"),
    ("my_microbatches", microbatches, None),
    ("my_microbatches", lambda *_: None, "returned None"),
    ("my_microbatches", lambda *a: microbatches(*a, divides=False), "divides the batch"),
    ("my_microbatches", lambda *a: microbatches(*a, first=-1), "smallest m"),
    (
        "my_microbatches",
        lambda *a: microbatches(*a, share=lambda p, m: (p - 1) / m),
        "share of the whole step",
    ),
    (
        "my_microbatches",
        lambda *a: microbatches(*a, held=lambda p, m, batch: batch),
        "up to p micro-batches",
    ),
    (
        "my_microbatches",
        lambda *a: microbatches(*a, held=lambda p, m, batch: 0),
        "up to p micro-batches",
    ),
    (
        "my_microbatches",
        lambda *a: microbatches(*a, held=lambda p, m, batch: batch / m),
        "up to p micro-batches",
    ),
    (
        "my_microbatches",
        lambda *a: microbatches(*a, held=lambda p, m, batch: p * batch / m),
        "fewer micro-batches than stages",
    ),
    ("my_microbatches", lambda p, batch, *_: batch if p != 16 else 96, "returned 64"),
]


@each(ANSWERS)
def test_exercises_accept_the_solution_and_help_with_mistakes(name, answer, words, monkeypatch):
    if answer in (for_ever, gpipe_that_waits):
        monkeypatch.setattr(checks, "_TIMEOUT", 2.0)  # they wait until it is over
    judged(name, answer, words)
