"""What people give by mistake is refused by its name, in one sentence, by every technique alike."""

import contextlib
import inspect
import io
import math
import re

import doors
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
            for bad in ("1", None, True, math.nan, 0, [])
        ],
        "limit": [lambda bad=bad: tp.clip_grad_norm_(cut, bad) for bad in ("1", None, True, -1)],
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


class Strange:
    """An object of no kind that anybody knows."""

    def __repr__(self):
        return "Strange()"


def wrong(right):
    """What people give by mistake where `right` would be: of another kind, or no such number."""
    objects = [None, "x", [], Strange()]
    if isinstance(right, bool):
        return [*objects, 3]
    if isinstance(right, int):
        return [*objects, "1", True, 1.5, math.nan, math.inf, -1, 10**30]
    if isinstance(right, float):
        return [*objects, "1", True, math.nan, -1.0, 1e300, 10**400]
    if isinstance(right, str):
        return [None, 3, "x", [], Strange()]
    if isinstance(right, torch.nn.Module):
        return [*objects, 3, torch.nn.ReLU()]
    return [*objects, 3]


def is_fine(function, argument, value):
    """Whether it is no mistake: None by default, or as the table says."""
    signature = inspect.signature(getattr(function, "stands_for", function)).parameters
    if value is None and argument in signature and signature[argument].default is None:
        return True
    fine = doors.FINE.get((doors.called(function), argument), ())
    return any(type(value) is one or type(value) is type(one) and value == one for one in fine)


def complaints(rows):
    """Of every function, argument and mistake: what does not come as it is promised."""
    found, tried = [], 0
    for function, make in rows:
        name = doors.called(function)
        with contextlib.redirect_stdout(io.StringIO()):
            function(**make())  # a right call has to be one
        inner = doors.INNER.get(name)
        for argument in make():
            if inner is not None and (not inner or argument in inner):
                continue
            names = "|".join(re.escape(n) for n in (argument, doors.SAID.get(argument)) if n)
            for value in wrong(make()[argument]):
                if is_fine(function, argument, value):
                    continue
                tried += 1
                told = f"{name}({argument}={str(type(value)) if value == 10**400 else value!r})"
                try:
                    function(**{**make(), argument: value})
                except ValueError as error:
                    said = str(error)
                    named = re.search(rf"(?<!\w)({names}|both factors)(?!\w)", said)
                    if not named or not re.search(r"allowed|needs?\b|needed|have to|has ", said):
                        found.append(f"{told}: {said}")
                except Exception as error:
                    found.append(f"{told}: {type(error).__name__}: {error}")
                else:
                    found.append(f"{told}: nothing was raised")
    return found, tried


def test_every_door_refuses_wrong_numbers_by_name():
    found, tried = complaints(doors.numbers())
    assert not found, f"{len(found)} of {tried}:\n" + "\n".join(found)


def test_every_door_refuses_wrong_objects_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where "x" is written

    def tries(folder):
        return complaints(doors.objects(folder))

    ((found, tried),) = ranks.run(tries, 1, str(tmp_path), device="cpu")
    assert not found, f"{len(found)} of {tried}:\n" + "\n".join(found)


def test_every_public_function_has_its_row():
    group = doors.called
    rows = {group(function) for function, _ in doors.numbers()}
    ((objects,),) = [ranks.run(lambda: [group(f) for f, _ in doors.objects("")], 1, device="cpu")]
    rows |= set(objects)
    ours = {group(one) for one in doors.OURS}
    public = {
        group(thing)
        for package in doors.PACKAGES
        for name, thing in vars(package).items()
        if not name.startswith("_")
        and callable(thing)
        and getattr(thing, "__module__", "").startswith(package.__name__)
        and name in getattr(package, "__all__", vars(package))
        and "TypeVar" not in type(thing).__name__
    }
    assert public - rows - ours == set()
    assert not rows & ours
    assert {*doors.INNER, *(name for name, _ in doors.FINE)} <= rows
