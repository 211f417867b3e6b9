"""What people give by mistake is refused by its name, in one sentence, by every technique alike."""

import math

import torch
import torch.distributed as dist

from shardlab import context_parallel as cp
from shardlab import data_parallel, ranks, zero
from shardlab import sequence_parallel as sp
from shardlab import tensor_parallel as tp
from shardlab.model import GPT, Config

AVERAGES = data_parallel.average_gradients, cp.average_gradients


def gpt():
    return GPT(Config(vocab=64, seq=16, layers=2, heads=4, hidden=32))


def refusals():
    """Of the public functions of every technique, for what people give by mistake."""
    group, plain = dist.group.WORLD, torch.nn.Linear(3, 3)
    sharded = [zero.shard(torch.nn.Linear(3, 3), group, stage) for stage in (1, 2, 3)]
    cut = tp.parallelize(gpt(), group)
    x = torch.ones(2, 4, 3)
    calls = {
        "stage": [
            lambda bad=bad: zero.shard(plain, group, bad) for bad in (1.0, [], None, "1", True, 4)
        ],
        "max_norm": [
            lambda model=model, bad=bad: model.clip_grad_norm_(bad)
            for model in sharded
            for bad in ("1", None, True, [])
        ],
        "limit": [lambda bad=bad: tp.clip_grad_norm_(cut, bad) for bad in ("1", None, True)],
        "state": [
            *(lambda model=model: model.load_full_state_dict(None) for model in sharded),
            *(lambda model=model: model.load_full_state_dict({"weight": 1}) for model in sharded),
            lambda: tp.load_full_state_dict(cut, None),
        ],
        "to": [lambda bad=bad: tp.full_state_dict(cut, bad) for bad in (0.0, "0", True, 1)],
        "units": [lambda bad=bad: zero.shard(plain, group, 3, units=bad) for bad in (5, [None])],
        "backwards": [lambda: zero.predicted_sent(sharded[0], "1")],
        "module": [lambda f=f: f(None, group) for f in AVERAGES],
        "group": [
            *(lambda f=f, bad=bad: f(plain, bad) for f in AVERAGES for bad in (None, "world")),
            lambda: data_parallel.drift(plain, None),
            lambda: cp.gather(x, None),
            lambda: sp.sum_gradients(plain, None),
            lambda: sp.TokenDropout(0.1, None),
        ],
        "model": [lambda: sp.sum_gradients(None, group), lambda: sp.sum_gradients(3, group)],
        "p": [lambda bad=bad: sp.TokenDropout(bad, group) for bad in ("1", None, math.nan, 2, -1)],
        "seq": [lambda bad=bad: cp.positions("zigzag", bad, 2, 0) for bad in ("8", None, 8.0)],
        "rank": [lambda bad=bad: cp.split(x, 2, bad) for bad in (None, "0", 2, 0.0)],
        "ranks": [lambda bad=bad: cp.split(x, bad, 0) for bad in (None, "2", 0, True)],
        "count": [
            lambda bad=bad: data_parallel.joined_mean(x.sum(), bad, group)
            for bad in (None, "1", math.nan, 1.5, True)
        ],
    }
    for name, wrong in calls.items():
        for number, call in enumerate(wrong):
            try:
                call()
            except ValueError as error:
                assert str(error).startswith((f"{name}=", f"{name}:")), (name, number, error)
                assert "allowed" in str(error), (name, number, error)
            else:
                raise AssertionError(f"{name}, case {number}: nothing was raised")


def test_mistakes_are_named_and_what_is_allowed_is_said():
    ranks.run(refusals, 1, device="cpu")
