"""Messages, memory and errors of data parallelism, a test a promise (equality: `rows.data`)."""

import time

import pytest
import torch
import torch.distributed as dist
from devices import to_device
from hypothesis import given, settings
from hypothesis import strategies as st
from plain import run_ranks
from sides import SMALL_BUCKETS, ToyModel
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardlab import data_parallel as dp
from shardlab.data_parallel import buckets as shared
from shardlab.measure import count


def toy_batch(step, part, size):
    generator = torch.Generator().manual_seed(100 * step + part)
    return to_device(torch.randint(17, (2, size), generator=generator))


def toy_loss(model, batch, branches="lr", reduction="mean"):
    tokens, targets = batch
    return nn.functional.cross_entropy(model(tokens, branches), targets, reduction=reduction)


def clone_gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def max_gap(a, b):
    """Return the largest difference between two lists; both must be None in the same places."""
    worst = 0.0
    for x, y in zip(a, b, strict=True):
        assert (x is None) == (y is None)
        if x is not None and x.numel():
            worst = max(worst, (x.double() - y.double()).abs().max().item())
    return worst


def joined_or_not():
    models, messages = [to_device(ToyModel()), to_device(ToyModel())], []
    for model, joined in zip(models, (False, True), strict=True):
        toy_loss(
            model, toy_batch(0, dist.get_rank(), 6), "lr" if dist.get_rank() else "l"
        ).backward()
        with count.record_traffic() as sent:
            shared.average_gradients(model.parameters(), dist.group.WORLD, joined)
        messages.append(sent.calls["all_reduce"])
    assert max_gap(*map(clone_gradients, models)) == 0.0
    trained = sum(p.requires_grad for p in models[0].parameters())
    assert messages == [trained, 1]


def test_averaging_side_by_side_gives_the_same_bits_in_one_message():
    run_ranks(joined_or_not, 2)


def held_and_sent():
    rank, world = dist.get_rank(), dist.group.WORLD
    model = dp.DataParallel(to_device(ToyModel()), world, **SMALL_BUCKETS)
    expected = sum(p.nbytes + 4 for b in model.buckets for p in b.parameters)
    for set_to_none in (True, False, True):
        model.zero_grad(set_to_none=set_to_none)
        with count.record_traffic() as local, model.no_sync():
            toy_loss(model, toy_batch(0, rank, 6)).backward()
        assert not local.collectives
        inside_buckets(model)
        with count.record_traffic() as sent:
            toy_loss(model, toy_batch(1, rank, 6)).backward()
        inside_buckets(model)
        # The buffer's broadcast, and each bucket once.
        assert sent.collectives["all_reduce"] == (len(model.buckets), expected)
        assert sent.collectives["broadcast"] == (1, 4)
    assert len(model.buckets) > 2
    model.eval()
    with count.record_traffic() as sent:
        model(toy_batch(0, 0, 2)[0])
    assert not sent.collectives


def inside_buckets(model):
    for bucket in model.buckets:
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            if parameter.grad is not None:
                assert parameter.grad.data_ptr() == view.data_ptr()
                assert view.untyped_storage().data_ptr() == bucket.flat.data_ptr()


def test_gradients_live_in_the_buckets_and_only_the_last_micro_batch_sends():
    run_ranks(held_and_sent, 2)


def sub_groups():
    rank = dist.get_rank()
    group = [dist.new_group([2, 0]), dist.new_group([1, 3])][rank % 2]
    toy = to_device(ToyModel())
    with torch.no_grad():
        toy.left.weight.fill_(rank)
        toy.seen.fill_(rank)
    model = dp.DataParallel(toy, group, **SMALL_BUCKETS)
    start = (toy.left.weight[0, 0].item(), toy.seen.item())
    toy_loss(model, toy_batch(0, rank, 4)).backward()
    return start, toy.right.weight.grad


def test_sub_groups_start_from_their_own_rank_0_and_average_among_themselves():
    results = run_ranks(sub_groups, 4)
    for rank, (start, gradient) in enumerate(results):
        assert start == (rank % 2, rank % 2)
        assert torch.equal(gradient, results[(rank + 2) % 4][1])
        assert not torch.equal(gradient, results[(rank + 1) % 4][1])


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.narrow = nn.Linear(8, 8, dtype=torch.bfloat16)

    def forward(self, x, recompute=False):
        x = self.narrow(x.bfloat16()).float()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        return x


def run_chain():
    layer = {"bucket_bytes": 288, "first_bytes": 288}
    model = dp.DataParallel(to_device(Chain()), dist.group.WORLD, **layer)
    kinds = [{p.dtype for p in b.parameters} for b in model.buckets]
    assert all(len(kind) == 1 for kind in kinds)
    assert {torch.bfloat16} in kinds
    underway = []
    first = model.module.layers[0].weight
    first.register_post_accumulate_grad_hook(lambda _: underway.append(model._sent))
    x = to_device(torch.randn(3, 8))
    model(x).sum().backward()
    plain = clone_gradients(model)
    model.zero_grad()
    model(x, recompute=True).sum().backward()
    assert max_gap(plain, clone_gradients(model)) == 0.0
    return underway[0], len(model.buckets)


def test_complete_buckets_leave_in_order_also_with_checkpointing():
    for underway, buckets in run_ranks(run_chain, 1):
        assert 3 <= underway < buckets


def broken_off(apart, set_to_none):
    rank = dist.get_rank()
    model = dp.DataParallel(Chain(), dist.group.WORLD, bucket_bytes=288, first_bytes=288)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(rank))
    model(x).sum().backward()
    wanted = clone_gradients(model)
    model.zero_grad()
    layers = model.module.layers
    # The first gradient comes when most buckets have been sent, the second one before any.
    last = layers[3] if apart and rank == 0 else layers[0]
    handle = last.weight.register_hook(lambda _: 1 // 0)
    output = model(5 * x).sum()
    if rank == 1:
        time.sleep(0.5)  # rank 0 sends, fails, and is in its next backward meanwhile
    with pytest.raises(ZeroDivisionError):
        output.backward()
    handle.remove()
    model.zero_grad(set_to_none)
    model(x).sum().backward()
    return max_gap(wanted, clone_gradients(model))


def test_messages_of_a_backward_that_broke_off_do_not_meet_those_of_the_next():
    ways = [(False, True), (True, False)]
    found = run_ranks(lambda: [broken_off(*way) for way in ways], 2, timeout=30)
    assert found == [[0.0] * len(ways)] * 2


def alone_in_error():
    model = dp.DataParallel(Chain(), dist.group.WORLD, bucket_bytes=288, first_bytes=288)
    x = torch.randn(3, 8)
    weight = model.module.layers[0].weight
    if dist.get_rank() == 0:
        handle = weight.register_hook(lambda _: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            model(x).sum().backward()
        handle.remove()
        with pytest.raises(RuntimeError, match="forward"):  # without a forward in between
            model.module(x).sum().backward()
        model(x)
    else:
        model(x).sum().backward()
    return None if weight.grad is None else weight.grad.isnan().all().item()


def test_who_did_not_fail_gets_nan_and_not_half_a_sum():
    assert run_ranks(alone_in_error, 2, timeout=20) == [None, True]


def drift_apart():
    toy = to_device(ToyModel())
    model = dp.DataParallel(toy, dist.group.WORLD)
    with torch.no_grad():
        toy.left.bias[3] += 0.25 * dist.get_rank()
    return dp.measure_drift(model, dist.group.WORLD)


def test_drift_is_the_largest_difference_and_known_to_all_ranks():
    assert run_ranks(drift_apart, 3) == pytest.approx([0.5] * 3)  # 0.5 up to a rounded addition


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 50), st.booleans(), st.booleans()), min_size=1, max_size=30),
    st.integers(1, 400),
    st.integers(1, 400),
)
def test_buckets_hold_every_trainable_parameter_once_last_first(specs, size, first):
    parameters = [
        nn.Parameter(torch.zeros(n, dtype=torch.bfloat16 if half else None), requires_grad=train)
        for n, half, train in specs
    ]
    buckets = dp.assign_buckets(parameters, size, first)
    order = {id(p): i for i, p in enumerate(parameters)}
    numbers = [[order[id(p)] for p in bucket] for bucket in buckets]
    trained = [i for i, p in enumerate(parameters) if p.requires_grad]
    assert sorted(i for bucket in numbers for i in bucket) == trained
    assert all(bucket == sorted(bucket, reverse=True) for bucket in numbers)
    assert all(len({p.dtype for p in bucket}) == 1 for bucket in buckets)
    open_ended = {buckets[-1][0].dtype, *(b[0].dtype for b in buckets[-2:])} if buckets else set()
    for number, bucket in enumerate(buckets):
        # Not full before its last parameter came. Bucket 0 is the first to be full; others may have
        # begun to fill before it was, up to `first_bytes` where that is the larger of the two.
        limit = max(size, first) if number else first
        filled = sum(p.nbytes for p in bucket)
        assert filled - bucket[-1].nbytes < limit
        assert filled >= min(size, first) or bucket[0].dtype in open_ended


def test_step_seconds_is_the_schedule_of_one_wire():
    sizes = [10, 10]

    def wire_seconds(size):
        return size / 10

    assert dp.predict_step_seconds(1, 4, sizes, wire_seconds, overlap=False) == 1 + 4 + 2
    assert (
        dp.predict_step_seconds(1, 4, sizes, wire_seconds) == 1 + 4 + 1
    )  # all but the last bucket is hidden
    assert (
        dp.predict_step_seconds(1, 1, sizes, wire_seconds) == 1 + 0.5 + 2
    )  # the wire is busy from its start on
    assert dp.predict_step_seconds(1, 4, sizes, lambda size: 0.0) == 5
