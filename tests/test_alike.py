"""What all techniques do alike: gradients clipped, arguments agreed on, models copied."""

import copy
import io
import math
import pickle

import pytest
import torch
import torch.distributed as dist
from devices import here
from torch import nn

from shardlab import context_parallel as cp
from shardlab import data_parallel, experts, link, mesh, pipeline, ranks, zero
from shardlab import sequence_parallel as sp
from shardlab import tensor_parallel as tp
from shardlab.model import GPT, Config, loss

DENSE = Config(vocab=64, seq=16, layers=2, heads=4, hidden=32)
SPARSE = Config(vocab=64, seq=16, layers=2, heads=4, hidden=32, experts=4, expert_ffn=24)


def gpt(config=DENSE, dtype=torch.float32):
    torch.manual_seed(0)
    return here(GPT(config)).to(dtype)


def batch():
    torch.manual_seed(1)
    tokens = here(torch.randint(64, (4, 17)))
    return tokens[:, :-1], tokens[:, 1:]


def own(x):
    """This rank's sequences."""
    return x.chunk(dist.get_world_size())[dist.get_rank()]


# Gradients of the whole batch by each technique, and its way to clip them.


def sharded(stage):
    def gradients(group, dtype):
        model = zero.shard(gpt(dtype=dtype), group, stage)
        loss(model(own(batch()[0])), own(batch()[1])).backward()
        return model, model.clip_grad_norm_

    return gradients


def cut(edges, finish):
    def gradients(group, dtype):
        model = tp.parallelize(gpt(dtype=dtype), group, edges)
        tp.loss(model(batch()[0]), batch()[1], group).backward()
        finish(model, group)
        return model, lambda limit: tp.clip_grad_norm_(model, limit)

    return gradients


def dealt(group, dtype):
    model = experts.parallelize(gpt(SPARSE, dtype), group)
    loss(model(own(batch()[0])), own(batch()[1])).backward()
    experts.average_gradients(model, group)
    return model, lambda limit: experts.clip_grad_norm_(model, limit)


def meshed(stage, **degrees):
    def gradients(group, dtype):
        shape = mesh.Mesh(**degrees)
        groups, schedule = mesh.join(shape, group), pipeline.schedule("1f1b", shape.pp, 2)
        job = mesh.Parallel(gpt(dtype=dtype), groups, schedule, stage)
        job.step(*(own(x) if shape.dp > 1 else x for x in batch()))
        return job, job.clip_grad_norm_

    return gradients


CLIPPED = {
    "zero 1": sharded(1),
    "zero 2": sharded(2),
    "zero 3": sharded(3),
    "tensor": cut(tp.REPLICATED, lambda *_: None),
    "sequence": cut(sp.ALONG_SEQUENCE, sp.sum_gradients),
    "experts": dealt,
    "mesh, tensor": meshed(0, tp=2),
    "mesh, pipeline": meshed(0, pp=2),
    "mesh, zero": meshed(1, dp=2),
}


def clips(way, dtype):
    """Of limits, those for which this clips as torch does, and those that it refuses."""
    serial = gpt(SPARSE if way == "experts" else DENSE, dtype)
    loss(serial(batch()[0]), batch()[1]).backward()
    model, clip = CLIPPED[way](dist.group.WORLD, dtype)
    mine = [p.grad for p in model.parameters() if p.grad is not None]
    before = [gradient.clone() for gradient in mine]
    exact = 3e-2 if dtype == torch.bfloat16 else 1e-5  # as many digits as the dtype has
    like_torch, refused = [], []
    for limit in (0.1, 0, 0.0, math.inf, 1e9, -0.1, -math.inf, math.nan):
        torch._foreach_copy_(mine, before)
        # What torch makes of gradients that have the norm of one process's.
        norm = nn.utils.get_total_norm([p.grad for p in serial.parameters()]).to(torch.float64)
        theirs = nn.Parameter(norm.detach().clone())
        theirs.grad = norm.clone()
        nn.utils.clip_grad_norm_(theirs, limit)
        scale = (theirs.grad / norm).item()
        try:
            found = clip(limit)
        except ValueError as error:
            assert str(error).split("=")[0] in ("limit", "max_norm") and "allowed" in str(error)
            assert all(x.equal(y) for x, y in zip(mine, before, strict=True))
            refused.append(str(limit))
            continue
        torch.testing.assert_close(found.double(), norm, rtol=exact, atol=0)
        for gradient, was in zip(mine, before, strict=True):
            torch.testing.assert_close(gradient, was * scale, rtol=exact, atol=0)
        like_torch.append(str(limit))
    return like_torch, refused


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", CLIPPED)
def test_limits_are_what_they_are_to_torch_and_without_a_meaning_are_refused(way, dtype):
    for like_torch, refused in ranks.run(clips, 2, way, dtype, timeout=100):
        assert like_torch == ["0.1", "0", "0.0", "inf", "1000000000.0"]
        # torch turns gradients round with the first two, and makes nan of them with the third.
        assert refused == ["-0.1", "-inf", "nan"]


# Copies and pickles of a model that knows its group.

DROPS = Config(vocab=64, seq=16, layers=2, heads=4, hidden=32, dropout=0.3)
COPIED = {
    "ring": lambda group: cp.distribute(gpt(), group, "ring"),
    "ulysses": lambda group: cp.distribute(gpt(), group, "ulysses", "contiguous"),
    "tensor": lambda group: tp.parallelize(gpt(), group),
    "tensor, equal dropout": lambda group: tp.parallelize(gpt(DROPS), group, dropout="equal"),
    "tensor, own dropout": lambda group: tp.parallelize(gpt(DROPS), group, dropout="own"),
    "sequence": lambda group: tp.parallelize(gpt(), group, sp.ALONG_SEQUENCE),
    "experts": lambda group: experts.parallelize(gpt(SPARSE), group),
}


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def through_file(model):
    torch.save(model, buffer := io.BytesIO())
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def gradients_of(model, way, group):
    tokens, targets = batch()
    if way in ("ring", "ulysses"):
        layout = "zigzag" if way == "ring" else "contiguous"
        tokens, targets = (cp.share(x, group, layout) for x in (tokens, targets))
    torch.manual_seed(5)
    model(tokens).square().sum().backward()
    return [p.grad for p in model.parameters()]


def copies(way, copied, slow):
    """A copy computes what the model computes, with weights of its own, and in the same group."""
    group = dist.new_group([1, 0])
    if slow:
        group = link.slow(1e-4, 1e9, group)
    model = COPIED[way](group)
    other = copied(model)
    mine, theirs = list(model.parameters()), list(other.parameters())
    assert all(p.equal(q) and p is not q for p, q in zip(mine, theirs, strict=True))
    with torch.no_grad():
        for p in mine:
            p.fill_(0.1)  # a copy that looked at these would find other gradients
    found = gradients_of(other, way, group)
    assert all(p.grad is None for p in mine)
    wanted = gradients_of(COPIED[way](group), way, group)
    assert all(x.equal(y) for x, y in zip(found, wanted, strict=True))


@pytest.mark.parametrize("slow", [False, True], ids=["", "slow"])
@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, through_file])
@pytest.mark.parametrize("way", COPIED)
def test_a_copy_of_a_parallel_model_is_one(way, copied, slow):
    ranks.run(copies, 2, way, copied, slow, timeout=100)


HEARD = {
    "data": lambda group: data_parallel.DataParallel(gpt(), group),
    **{f"zero {n}": lambda group, n=n: zero.shard(gpt(), group, n) for n in (1, 2, 3)},
    "pipeline": lambda group: pipeline.distribute(gpt(), pipeline.schedule("1f1b", 2, 2), group),
    "mesh": lambda group: meshed(1, dp=2)(group, torch.float32)[0],
}


def not_copied():
    for way, make in HEARD.items():
        model = make(dist.group.WORLD)
        for copied in (copy.deepcopy, pickle.dumps):
            with pytest.raises(ValueError, match="allowed is to copy or pickle the plain model"):
                copied(model)
            assert way


def test_what_hooks_on_parameters_make_is_not_copied_in_silence():
    ranks.run(not_copied, 2, timeout=100)


def test_a_group_is_not_found_where_it_is_not():
    (pickled, _) = ranks.run(lambda: pickle.dumps(dist.group.WORLD), 2)
    with pytest.raises(ValueError, match=r"group: .* ranks \[0, 1\]"):
        pickle.loads(pickled)

    def elsewhere():
        with pytest.raises(ValueError, match=r"group: .* ranks \[0, 1\]"):
            pickle.loads(pickled)  # three ranks, whose group has the same name

    ranks.run(elsewhere, 3)
