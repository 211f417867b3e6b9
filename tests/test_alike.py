"""What all techniques do alike: gradients clipped, arguments agreed on, models copied."""

import math

import pytest
import torch
import torch.distributed as dist
from devices import here
from torch import nn

from shardlab import experts, mesh, pipeline, ranks, zero
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
