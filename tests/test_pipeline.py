"""Messages, backward splits and errors of the pipeline (equality: `rows.pipelines`)."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from devices import to_device
from hypothesis import given
from hypothesis import strategies as st
from timing import timing_claims

from shardlab import ranks
from shardlab.gpt.model import GPT, Config
from shardlab.measure import count, link
from shardlab.pipeline import (
    SCHEDULE_NAMES,
    balance_layers,
    distribute_model,
    find_peer,
    find_receive,
    make_schedule,
    make_sleeping_pipeline,
    simulate,
    split_model,
)
from shardlab.pipeline.core import find_arrived_sends

TINY = Config(vocab=32, seq=4, layers=6, heads=2, hidden=16, tied=False)
LLAMA = replace(TINY, heads=4, kv_heads=2, hidden=32, mlp="swiglu", norm="rms", bias=False)


def launch(fn, size, *args, device="cpu", timeout=100):
    """Run on the CPU, since most tests compare bits: a GPU's attention adds in no fixed order."""
    return ranks.run(fn, size, *args, device=device, timeout=timeout, show=False)


def the_batch(config, size, seed=0):
    """Return tokens and targets, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    shape = size, config.seq
    return to_device([torch.randint(config.vocab, shape, generator=generator) for _ in range(2)])


def model_of(config, dtype=torch.float32):
    torch.manual_seed(0)
    return to_device(GPT(config)).to(dtype)


def over_a_slow_link():
    slow = link.create_slow_group(1e-3, 1e8)
    with count.record_traffic() as sent:
        pipe = distribute_model(model_of(LLAMA), make_schedule("1f1b", 2, 3), slow)
        for _ in range(2):
            pipe.step(*the_batch(LLAMA, 3))
    rank, number = dist.get_rank(), torch.ones(1)
    begin = ranks.irecv if rank else ranks.isend
    message = begin(number, 1 - rank, slow)
    message.wait()
    message.wait()  # a second wait returns at once: gloo itself would hang
    return sent.bytes


def test_messages_are_what_the_schedule_says_and_go_over_any_link():
    # Two steps of three micro-batches of one sequence, 4 tokens, 32 numbers of 4 bytes; and the one
    # number that builds the connection.
    assert launch(over_a_slow_link, 2) == [2 * 3 * 4 * 32 * 4 + 4] * 2


def accumulate_two_steps():
    tied = replace(LLAMA, tied=True)
    model = model_of(tied, torch.float64)
    pipe = distribute_model(model, make_schedule("gpipe", 2, 2), dist.group.WORLD)
    pipe.step(*the_batch(tied, 2))
    once = [p.grad.clone() for p in pipe.parameters()]
    pipe.step(*the_batch(tied, 2))
    pairs = zip(pipe.parameters(), once, strict=True)
    return max(((p.grad - 2 * g).abs().max() / g.abs().max()).item() for p, g in pairs)


def test_a_second_step_adds_its_gradients_those_of_tied_weights_too():
    # 2 steps x 2 micro-batches x 2 ends in two orders: 2 * 7 * 2^-53 of sums of up to 6.
    assert max(launch(accumulate_two_steps, 2)) < 1e-14


# Parts


def test_parts_keep_the_names_and_the_tensors_of_the_model():
    model = GPT(TINY)
    for layers in (1, 4, 6, [0, 6, 0], [2, 4]):
        parts = split_model(model, layers)
        joined = {n: p for part in parts for n, p in part.named_parameters()}
        assert list(joined) == [n for n, _ in model.named_parameters()]
        assert all(joined[n] is p for n, p in model.named_parameters())
    assert [len(part.blocks) for part in split_model(model, 4)] == [2, 2, 1, 1]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.data())
def test_balance_is_the_best_there_is(costs, data):
    parts = data.draw(st.integers(1, len(costs)))
    found = balance_layers([c / 7 for c in costs], parts)
    assert len(found) == parts and sum(found) == len(costs) and min(found) >= 1

    def judge_sizes(sizes):
        ends = list(itertools.accumulate(sizes, initial=0))
        sums = [sum(costs[a:b]) for a, b in itertools.pairwise(ends)]
        return max(sums), sum(s * s for s in sums)

    cuts = itertools.combinations(range(1, len(costs)), parts - 1)
    ways = [[b - a for a, b in itertools.pairwise([0, *c, len(costs)])] for c in cuts]
    assert judge_sizes(found) == min(judge_sizes(way) for way in ways)


# Messages


@given(st.sampled_from(SCHEDULE_NAMES), st.integers(1, 5), st.integers(1, 8))
def test_what_is_let_go_has_come(name, stages, m):
    plan = make_schedule(name, stages, m)
    for stage in range(stages):
        over = find_arrived_sends(plan, stage)
        sends = [send for done in over.values() for send in done]
        assert len(sends) == len(set(sends))
        posted = set()
        for action in plan.actions[stage]:
            if action.kind in ("SF", "SB"):
                posted.add(action)
            elif receive := find_receive(plan, stage, action):
                for send in over[receive]:
                    assert send in posted
                    # The receiver waits for the message before it computes the reply.
                    peer, theirs = find_peer(plan, stage, send)
                    order = plan.actions[peer]
                    user = next(a for a in order if find_receive(plan, peer, a) == theirs)
                    back = find_peer(plan, stage, receive)[1]
                    assert order.index(user) < order.index(back)


# Stages that sleep


def time_sleeping():
    found = []
    for name in ("1f1b", "zb-v"):
        plan = make_schedule(name, 4, 6)
        pipe = make_sleeping_pipeline(
            plan, dist.group.WORLD, 0.02, 0.03, [0.01] * 4, size=7, record=True
        )
        for _ in range(2):
            pipe.step(torch.zeros(6, 1), torch.zeros(6, 1))
        found.append((pipe.gather_timeline(), [p.grad.item() for p in pipe.parameters()]))
    return found


@pytest.mark.alone
def test_a_measured_timeline_is_the_simulated_one():
    # The best of up to three runs: a core that another program takes delays any of them.
    # The course's own target is 4 %, on a quiet machine; 20 % is a wrong order, not a late core.
    errors = []
    for _ in range(3):
        results = launch(time_sleeping, 4)
        for number, name in enumerate(("1f1b", "zb-v")):
            timelines = [r[number][0] for r in results]
            assert all(t == timelines[0] for t in timelines)  # equal on every rank
            chunks = timelines[0].schedule.chunks
            assert all(r[number][1] == [12.0] * chunks for r in results)  # all backwards
            passes = [[s[:3] for s in spans] for spans in timelines[0].spans]
            assert passes == [list(order) for order in make_schedule(name, 4, 6).orders]
            predicted = simulate(make_schedule(name, 4, 6), 0.02, 0.03, 0.01)
            errors.append(timelines[0].step_time / predicted.step_time - 1)
        if max(errors[-2:]) < 0.2:
            return
    with timing_claims():
        raise AssertionError(errors)
