"""Lesson `pipeline`: its exercises accept solutions, and help with the usual mistakes."""

from __future__ import annotations

from itertools import accumulate, combinations

import torch
import torch.nn.functional as F
from answers import each, judged

from shardlab.check import pipeline as checks


def interleaved(stage, p, m, v, ahead=None, group=None, down=True):
    forwards, backwards = [], []
    for first in range(0, m, group or p):
        them = range(first, min(m, first + (group or p)))
        forwards += [f"F{i}.{c}" for c in range(v) for i in them]
        backwards += [f"B{i}.{c}" for c in range(v)[:: -1 if down else 1] for i in them]
    ahead = 2 * (p - 1 - stage) + (v - 1) * p if ahead is None else ahead
    ahead = min(ahead, len(forwards))
    order = forwards[:ahead]
    for i in range(len(forwards) - ahead):
        order += [forwards[ahead + i], backwards[i]]
    return order + backwards[len(forwards) - ahead :]


def from_one(*args):
    return [f"{a[0]}{int(a[1]) + 1}{a[2:]}" for a in interleaved(*args)]


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


def one_f_one_b(
    part, x_BH, y_BH, m, stage, stages, send, receive,
    first=None, scale=None, ones=False, clear=False, grad=True, ahead=None,
):  # fmt: skip
    xs, ys, kept = list(x_BH.chunk(m)), list(y_BH.chunk(m)), []
    last = stages - 1

    def swap(out, peer):
        if stage % 2 == 0 if first is None else first:
            send(out, peer)
            return receive(out, peer)
        got = receive(out, peer)
        send(out, peer)
        return got

    def forward(i, x):
        if stage > 0:
            x.requires_grad_(grad)
        out = part(x)
        kept.append((x, F.mse_loss(out, ys[i]) / (scale or m) if stage == last else out))
        return out.detach()

    def backward(dy):
        x, out = kept.pop(0)
        if clear:
            part.zero_grad()
        out.backward(torch.ones_like(out) if ones and stage < last else dy)
        return x.grad

    ahead = min(last - stage if ahead is None else ahead, m)
    for i in range(ahead):
        out = forward(i, receive(xs[i], stage - 1) if stage else xs[i])
        if stage < last:
            send(out, stage + 1)
    dx = None
    for i in range(ahead, m):
        x = xs[i]
        if stage > 0:
            x = receive(x, stage - 1) if dx is None else swap(dx, stage - 1)
        out = forward(i, x)
        dx = backward(swap(out, stage + 1) if stage < last else None)
    if stage > 0 and dx is not None:
        send(dx, stage - 1)
    for _ in range(ahead):
        dx = backward(receive(kept[0][1], stage + 1) if stage < last else None)
        if stage > 0:
            send(dx, stage - 1)


def gpipe(part, x_BH, y_BH, m, stage, stages, send, receive):
    one_f_one_b(part, x_BH, y_BH, m, stage, stages, send, receive, ahead=m)


def without_gradients(part, x_BH, y_BH, m, *_):
    for x in x_BH.chunk(m):
        part(x).backward()


def all_send_first(*args):
    one_f_one_b(*args, first=True)


def all_receive_first(*args):
    one_f_one_b(*args, first=False)


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
    ("my_interleaved", interleaved, None),
    ("my_interleaved", lambda *_: None, "should be a list"),
    ("my_interleaved", lambda *_: ..., "should be a list"),
    ("my_interleaved", lambda *_: [0, 1], "should be a list"),
    ("my_interleaved", lambda *_: [], "F0.0 is missing"),
    ("my_interleaved", lambda stage: [], "raised TypeError"),
    ("my_interleaved", lambda s, p, m, v: interleaved(s, p, m, v, p - 1 - s), "1F1B's number"),
    ("my_interleaved", lambda s, p, m, v: interleaved(s, p, m, v, m * v), "All forwards come"),
    (
        "my_interleaved",
        lambda s, p, m, v: interleaved(s, p, m, v, 2 * s + (v - 1) * p),
        "counted from the wrong end",
    ),
    ("my_interleaved", lambda *a: interleaved(*a, down=False), "Backward begins with the last"),
    ("my_interleaved", lambda s, p, m, v: interleaved(s, p, m, v, group=m), "as many micro-batch"),
    ("my_interleaved", lambda *a: interleaved(*a, group=1), "Micro-batches go in groups"),
    ("my_interleaved", lambda *a: interleaved(*a, ahead=3), "comes at the wrong time"),
    ("my_interleaved", from_one, "no pass of micro-batches 0 to 7 and chunks 0 to 1"),
    ("my_interleaved", lambda *a: [b[:2] for b in interleaved(*a)], "a micro-batch and a chunk"),
    ("my_interleaved", lambda *a: interleaved(*a)[:-1], "B7.0 is missing"),
    ("my_interleaved", lambda *a: [*interleaved(*a), "B0.0"], "more than once"),
    ("my_interleaved", lambda *a: interleaved(*a)[::-1], "B0.0 stands before F0.0"),
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
    ("my_1f1b", one_f_one_b, None),
    ("my_1f1b", lambda *_: ..., "never went backward"),
    ("my_1f1b", lambda *a: one_f_one_b(*a, scale=1), "sum of 8 means is 8 times"),
    ("my_1f1b", lambda *a: one_f_one_b(*a, ones=True), "went backward from ones"),
    ("my_1f1b", lambda *a: one_f_one_b(*a, clear=True), "last micro-batch alone"),
    ("my_1f1b", lambda *a: one_f_one_b(*a, grad=False), "requires_grad_()"),
    ("my_1f1b", without_gradients, "Only the last stage has a loss"),
    ("my_1f1b", gpipe, "That is GPipe"),
    ("my_1f1b", all_send_first, "one has to send first and the other to receive first"),
    ("my_1f1b", all_receive_first, "one has to send first and the other to receive first"),
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
    if answer in (for_ever, all_send_first, all_receive_first):
        monkeypatch.setattr(checks, "_TIMEOUT", 2.0)  # they wait until it is over
    judged(name, answer, words)
