"""Behaviour shared by all techniques: gradient clipping, agreement on arguments."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from devices import to_device
from torch import nn

from shardlab import context_parallel as cp
from shardlab import data_parallel, experts, mesh, pipeline, ranks, zero
from shardlab import sequence_parallel as sp
from shardlab import tensor_parallel as tp
from shardlab.gpt.model import GPT, Config, loss
from shardlab.layout import Layout

DENSE = Config(vocab=64, seq=16, layers=2, heads=4, hidden=32)
SPARSE = Config(vocab=64, seq=16, layers=2, heads=4, hidden=32, experts=4, expert_ffn=24)


def gpt(config=DENSE, dtype=torch.float32):
    torch.manual_seed(0)
    return to_device(GPT(config)).to(dtype)


def batch():
    torch.manual_seed(1)
    tokens = to_device(torch.randint(64, (4, 17)))
    return tokens[:, :-1], tokens[:, 1:]


def take_own(x):
    """Return this rank's sequences."""
    return x.chunk(dist.get_world_size())[dist.get_rank()]


# Gradients of the whole batch by each technique, and its function to clip them.


def sharded(stage):
    def gradients(group, dtype):
        model = zero.shard_module(gpt(dtype=dtype), group, stage)
        loss(model(take_own(batch()[0])), take_own(batch()[1])).backward()
        return model, model.clip_grad_norm_

    return gradients


def make_sharded(edges, finish):
    def gradients(group, dtype):
        model = tp.parallelize(gpt(dtype=dtype), group, edges)
        tp.vocab_parallel_loss(model(batch()[0]), batch()[1], group).backward()
        finish(model, group)
        return model, lambda limit: tp.clip_grad_norm_(model, limit)

    return gradients


def average_experts(group, dtype):
    model = experts.parallelize(gpt(SPARSE, dtype), group)
    loss(model(take_own(batch()[0])), take_own(batch()[1])).backward()
    experts.average_gradients(model, group)
    return model, lambda limit: experts.clip_grad_norm_(model, limit)


def make_mesh(stage, **degrees):
    def gradients(group, dtype):
        shape = Layout(**degrees, zero=stage, microbatches=2)
        job = mesh.Parallel(gpt(dtype=dtype), mesh.create_groups(shape, group), shape)
        job.step(*(take_own(x) if shape.dp > 1 else x for x in batch()))
        return job, job.clip_grad_norm_

    return gradients


CLIPPED = {
    "zero 1": sharded(1),
    "zero 2": sharded(2),
    "zero 3": sharded(3),
    "tensor": make_sharded(tp.REPLICATED, lambda *_: None),
    "sequence": make_sharded(sp.SEQUENCE_SHARDED, sp.sum_gradients),
    "experts": average_experts,
    "mesh, tensor": make_mesh(0, tp=2),
    "mesh, pipeline": make_mesh(0, pp=2),
    "mesh, zero": make_mesh(1, dp=2),
}


def all_clips():
    dtypes = torch.float32, torch.bfloat16
    return {(way, dtype): list_limits(way, dtype) for way in CLIPPED for dtype in dtypes}


def list_limits(way, dtype):
    """Return the limits for which this technique clips as torch does, and those that it refuses."""
    serial = gpt(SPARSE if way == "experts" else DENSE, dtype)
    loss(serial(batch()[0]), batch()[1]).backward()
    model, clip = CLIPPED[way](dist.group.WORLD, dtype)
    mine = [p.grad for p in model.parameters() if p.grad is not None]
    before = [gradient.clone() for gradient in mine]
    exact = 2.8e-2 if dtype == torch.bfloat16 else 5e-6  # sqrt(50) 2^-8; 2 sqrt(50 * 32) 2^-24
    like_torch, refused = [], []
    for limit in (0.1, 0, math.inf, -0.1, math.nan):
        torch._foreach_copy_(mine, before)
        # torch's results for gradients with the norm of one process.
        norm = nn.utils.get_total_norm([p.grad for p in serial.parameters()]).to(torch.float64)
        theirs = nn.Parameter(norm.detach().clone())
        theirs.grad = norm.clone()
        nn.utils.clip_grad_norm_(theirs, limit)
        scale = (theirs.grad / norm).item()
        try:
            found = clip(limit)
        except ValueError as error:
            assert str(error).startswith("limit=") and "must be" in str(error)
            assert all(x.equal(y) for x, y in zip(mine, before, strict=True))
            refused.append(str(limit))
            continue
        torch.testing.assert_close(found.double(), norm, rtol=exact, atol=0)
        for gradient, was in zip(mine, before, strict=True):
            torch.testing.assert_close(gradient, was * scale, rtol=exact, atol=0)
        like_torch.append(str(limit))
    return like_torch, refused


def test_limits_are_what_they_are_to_torch_and_without_a_meaning_are_refused():
    for found in ranks.run(all_clips, 2, timeout=90):
        for case, (like_torch, refused) in found.items():
            assert like_torch == ["0.1", "0", "inf"], case
            # torch inverts gradients with the first limit, and makes nan of them with the second.
            assert refused == ["-0.1", "nan"], case


# Arguments that differ between ranks: one error, the same on all, before any step.


LAYERS = replace(DENSE, layers=3)


def make_stage(name="1f1b", model=LAYERS, **options):
    schedule = pipeline.make_schedule(name, 3, 4)
    return lambda group: pipeline.distribute_model(gpt(model), schedule, group, **options)


def make_cube(stage=0, seed=0, model=DENSE, name="1f1b", sequence=False, **degrees):
    def make(group):
        how = {"zero": stage, "schedule": name, "sequence_parallel": sequence}
        shape = Layout(**(degrees or {"dp": 3}), **how, microbatches=2)
        return mesh.Parallel(gpt(model), mesh.create_groups(shape, group), shape, seed)

    return make


def make_wrapped(function, *given, model=DENSE, **options):
    return lambda group: function(gpt(model), group, *given, **options)


THREE = replace(DENSE, heads=3, hidden=48, vocab=66, layers=3)  # divisible by three ranks
THREES = replace(SPARSE, experts=3)

# technique -> its call on two ranks, and the third rank's call by the name of the argument
DIFFER = {
    "data parallel": (
        make_wrapped(data_parallel.DataParallel),
        {
            "bucket_bytes": make_wrapped(data_parallel.DataParallel, bucket_bytes=999),
            "module": make_wrapped(data_parallel.DataParallel, model=replace(DENSE, layers=1)),
        },
    ),
    "zero 1": (make_wrapped(zero.shard_module, 1), {"stage": make_wrapped(zero.shard_module, 2)}),
    "zero 3": (
        make_wrapped(zero.shard_module, 3),
        {
            "units": make_wrapped(zero.shard_module, 3, units=[]),
            "module": make_wrapped(zero.shard_module, 3, model=replace(DENSE, hidden=16)),
        },
    ),
    "pipeline": (
        make_stage(),
        {
            "schedule": make_stage("gpipe"),
            "config": make_stage(model=replace(LAYERS, tied=not LAYERS.tied)),
        },
    ),
    "tensor parallel": (
        make_wrapped(tp.parallelize, model=THREE),
        {"edges": make_wrapped(tp.parallelize, sp.SEQUENCE_SHARDED, model=THREE)},
    ),
    "context parallel": (
        make_wrapped(cp.distribute_model, model=THREE),
        {"attention": make_wrapped(cp.distribute_model, "ulysses", model=THREE)},
    ),
    "experts": (
        make_wrapped(experts.parallelize, model=THREES),
        {"config": make_wrapped(experts.parallelize, model=replace(THREES, capacity=1.0))},
    ),
    "mesh": (make_cube(), {"layout.dp": make_cube(pp=3), "seed": make_cube(seed=1)}),
}


def collect_errors():
    """Return, for each argument, the error when rank 2 of three gives another value."""
    told = {}
    for way, (make, others) in DIFFER.items():
        make(dist.group.WORLD)  # no error where all ranks agree
        for name, other in others.items():
            told[way, name] = "nothing"
            try:
                (other if dist.get_rank() == 2 else make)(dist.group.WORLD)
            except ValueError as error:
                told[way, name] = str(error)
    return told


def test_ranks_that_were_given_other_arguments_are_named_on_all_ranks():
    check_errors(ranks.run(collect_errors, 3, timeout=90))


def check_errors(found):
    """Check the errors; found: by rank, the error by technique and argument."""
    one, *rest = found
    assert all(each == one for each in rest)
    for (way, name), said in one.items():
        argument, _, field = name.partition(".")
        assert said.startswith(
            f"{argument}: must be the same on all ranks, but ranks 0 and 1 have {field}"
        ), (way, name, said)
        assert ", rank 2 has " in said, (way, said)


def norm_of_ones(way):
    """Return squared norm, dtype and number of bf16 gradients of 1."""
    model, clip = CLIPPED[way](dist.group.WORLD, torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    numbers = sum(p.numel() for p in gpt(SPARSE if way == "experts" else DENSE).parameters())
    norm = clip(0)
    assert not any(p.grad.any() for p in model.parameters())
    return norm.double().square().item(), norm.dtype, numbers


def norms_of_ones():
    return {way: norm_of_ones(way) for way in CLIPPED}


def test_a_norm_of_16_bit_gradients_is_not_rounded_to_16_bits():
    """A norm needs float32: bf16 has no number between 256 and 258."""
    for found in ranks.run(norms_of_ones, 2, timeout=90):
        for way, (square, dtype, numbers) in found.items():
            assert dtype == torch.float32, way
            # Up to 61 tensors' norms: 67 squares, roots and sums, each off by 2^-24.
            assert square == pytest.approx(numbers, rel=67 * 2**-24), way


# Arguments that are given at every call are compared at the first call.


def attend(function, layout="zigzag", causal=True):
    x = to_device(torch.ones(1, 6, 4, 8))
    return lambda group, x=x: function(x, x, x, group, causal, layout)


def clip_to(limit):
    return lambda group: make_cube()(group).clip_grad_norm_(limit)


def reduce_loss_by(reduction):
    logits, targets = to_device((torch.ones(1, 3, 4), torch.zeros(1, 3, dtype=torch.int64)))
    return lambda group: tp.vocab_parallel_loss(logits, targets, group, reduction)


def calls():
    """Yield technique and argument, the call of the first two ranks, and the call of the third."""
    return {
        ("ring", "layout"): (attend(cp.ring_attention), attend(cp.ring_attention, "contiguous")),
        ("loss", "reduction"): (reduce_loss_by("mean"), reduce_loss_by("sum")),
        ("mesh", "limit"): (clip_to(1.0), clip_to(2.0)),
    }


def disagree_at_a_call():
    told = {}
    for (way, name), pair in calls().items():
        group = dist.new_group([0, 1, 2])  # a group that has not compared arguments before
        with pytest.raises(ValueError) as error:
            pair[dist.get_rank() // 2](group)
        told[way, name] = str(error.value)
    return told


def test_limits_layouts_dimensions_and_reductions_that_differ_are_named_at_the_first_call():
    check_errors(ranks.run(disagree_at_a_call, 3, timeout=100))
