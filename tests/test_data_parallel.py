"""Data parallelism equals one process and torch's DDP; one test per promise."""

import copy
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from devices import here
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardlab import buckets as shared
from shardlab import count, link, ranks, text
from shardlab import data_parallel as dp
from shardlab.model import GPT, PRESETS, loss

ROOT = Path(__file__).resolve().parents[1]
SMALL = {"bucket_bytes": 600, "first_bytes": 500}  # several buckets for models of a few kB


def run(fn, size, *args, timeout=60):
    return ranks.run(fn, size, *args, timeout=timeout)


class Toy(nn.Module):
    """All that is special at once: tied, frozen, buffer, branches that a rank may not use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(17, 12)
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.left = nn.Linear(12, 12)
        self.right = nn.Linear(12, 12)
        self.never = nn.Linear(12, 12)
        self.head = nn.Linear(12, 17, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens, branches="lr"):
        if self.training:
            self.seen += tokens.shape[0]
        x = self.frozen(self.embedding(tokens))  # [batch, 12]
        for branch in branches:
            x = x + (self.left if branch == "l" else self.right)(x).tanh()
        return self.head(x)  # [batch, 17]


def toy_batch(step, part, size):
    generator = torch.Generator().manual_seed(100 * step + part)
    return here(torch.randint(17, (2, size), generator=generator))


def toy_loss(model, batch, branches="lr", reduction="mean"):
    tokens, targets = batch
    return nn.functional.cross_entropy(model(tokens, branches), targets, reduction=reduction)


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def gap(a, b):
    """Largest difference between two lists of tensors, which have to be None in the same places."""
    worst = 0.0
    for x, y in zip(a, b, strict=True):
        assert (x is None) == (y is None)
        if x is not None and x.numel():
            worst = max(worst, (x.double() - y.double()).abs().max().item())
    return worst


# What the ranks do in a step: the branches that rank r uses, its samples, its micro-batches.
CASES = {
    "plain": (lambda r: "lr", lambda r: 6, 1),
    "unused on some": (lambda r: "lr" if r == 0 else "l", lambda r: 6, 1),
    "other order": (lambda r: "lr" if r % 2 else "rl", lambda r: 6, 1),
    "uneven": (lambda r: "lr", lambda r: 6 - 2 * r if r < 3 else 0, 1),
    "accumulated": (lambda r: "lr", lambda r: 6, 3),
    "accumulated, first part alone": (lambda r: "lr", lambda r: 6, -3),
}


def five_steps(case, dtype, set_to_none=True):
    """Ours, torch's DDP, and one process that goes through all ranks' shares: the differences."""
    branches, samples, parts = CASES[case]
    lazy, parts = parts < 0, abs(parts)  # lazy: only the first micro-batch uses both branches
    rank, size = dist.get_rank(), dist.get_world_size()
    serial = here(Toy()).to(dtype)
    ours = dp.DataParallel(copy.deepcopy(serial), dist.group.WORLD, **SMALL)
    torchs = nn.parallel.DistributedDataParallel(
        copy.deepcopy(serial), find_unused_parameters=True, gradient_as_bucket_view=True
    )
    models = (ours, torchs, serial)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1) for m in models]
    total = sum(samples(r) for r in range(size))
    against_torch, against_serial = [], []
    for step in range(5):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad(set_to_none=set_to_none)

            def one(model, r, part, step=step):
                used = "l" if lazy and part else branches(r)
                batch = toy_batch(step, 10 * r + part, samples(r))
                if case != "uneven":
                    return toy_loss(model, batch, used) / parts
                value = toy_loss(model, batch, used, "sum")
                if model is serial:
                    return value * (size / total)
                return dp.joined_mean(value, samples(r), dist.group.WORLD)

            if model is serial:
                # In the order of the ranks, each scaled by 1/N: the arithmetic of two ranks.
                for r in range(size):
                    for part in range(parts):
                        (one(model, r, part) / size).backward()
                continue
            with model.no_sync():
                for part in range(parts - 1):
                    one(model, rank, part).backward()
            one(model, rank, parts - 1).backward()
        if case != "accumulated, first part alone":
            # torch's DDP looks at the last micro-batch alone for what is unused: left out there.
            against_torch.append(gap(gradients(ours), gradients(torchs)))
        against_serial.append(gap(gradients(ours), gradients(serial)))
        for optimizer in optimizers:
            optimizer.step()
    assert dp.drift(ours, dist.group.WORLD) == 0.0
    weights = [[p.detach() for p in m.parameters()] for m in models]
    torch_weights = gap(weights[0], weights[1]) if against_torch else 0.0
    return (
        *map(max, (against_torch or [0.0], against_serial)),
        torch_weights,
        gap(weights[0], weights[2]),
    )


def all_cases(dtype):
    return {case: five_steps(case, dtype) for case in CASES}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_five_steps_equal_one_process_and_torch_in_float64(size):
    for results in run(all_cases, size, torch.float64):
        for case, differences in results.items():
            # float64 rounds at 1e-16; sums of a few dozen terms of size 1, five AdamW steps of 1e-2
            # which divide by gradients of 1e-4 and more: a wrong formula would show at 1e-3.
            assert max(differences) < 1e-11, (case, differences)


@pytest.mark.parametrize("size", [1, 2])
def test_up_to_two_ranks_equal_torch_bit_for_bit_in_float32(size):
    for results in run(all_cases, size, torch.float32):
        for case, (by_torch, _, torch_weights, _) in results.items():
            assert (by_torch, torch_weights) == (0.0, 0.0), case  # a + b is b + a, also rounded


def plain_bits():
    return [
        five_steps("plain", torch.float32),
        five_steps("unused on some", torch.float32),
        five_steps("unused on some", torch.float32, set_to_none=False),
    ]


def test_two_ranks_equal_one_process_bit_for_bit_where_it_goes_share_by_share():
    for results in run(plain_bits, 2):
        assert results == [(0.0,) * 4] * 3


def test_four_ranks_in_float32_differ_by_the_order_of_sums_alone():
    for results in run(plain_bits, 4):
        for by_torch, by_serial, *_ in results:
            # Gradients up to 1, four terms in another order: units of 6e-8, and five steps' worth.
            assert max(by_torch, by_serial) < 2e-6


def gpt_steps(dtype):
    """A GPT on text against torch's DDP and against one forward over the joined batch."""
    rank, size = dist.get_rank(), dist.get_world_size()
    serial = here(GPT(PRESETS["nano"])).to(dtype)
    ours = dp.DataParallel(copy.deepcopy(serial), dist.group.WORLD, 2**16, 2**14)
    torchs = nn.parallel.DistributedDataParallel(copy.deepcopy(serial))
    models = (ours, torchs, serial)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in models]
    worst = []
    for step in range(5):
        tokens, targets = here(text.batch(32, 4 * size, start=4 * size * step))
        mine = slice(4 * rank, 4 * rank + 4)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            part = slice(None) if model is serial else mine
            loss(model(tokens[part]), targets[part]).backward()
        worst.append([gap(gradients(ours), gradients(other)) for other in (torchs, serial)])
        for optimizer in optimizers:
            optimizer.step()
    weights = [[p.detach() for p in m.parameters()] for m in models]
    worst.append([gap(weights[0], weights[1]), gap(weights[0], weights[2])])
    return torch.tensor(worst).max(0).values.tolist(), len(ours.buckets)


@pytest.mark.parametrize("size", [2, 4])
def test_a_gpt_equals_the_joined_batch_and_torch(size):
    for (by_torch, by_serial), buckets in run(gpt_steps, size, torch.float64):
        assert buckets > 4
        # As above; rotary angles are float32, but the same on both sides.
        assert by_torch < 1e-10
        assert by_serial < 1e-10


def three_ways():
    rank = dist.get_rank()
    found = []
    for way in ("hooks", "buckets", "parameters"):
        model = here(Toy())
        wrapped = dp.DataParallel(model, dist.group.WORLD, **SMALL) if way == "hooks" else model
        for _ in range(2):
            wrapped.zero_grad()
            toy_loss(wrapped, toy_batch(0, rank, 6), "lr" if rank == 0 else "r").backward()
            if way == "parameters":
                dp.average_gradients(model, dist.group.WORLD)
            if way == "buckets":
                dealt = dp.assign_buckets(model.parameters(), 600, 500)
                dp.average_in_buckets([dp.Bucket(p, dist.group.WORLD) for p in dealt])
        found.append(gradients(model))
    found[2] = [None if g is not None and not g.any() else g for g in found[2]]  # zeros for None
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert a is b is None or torch.equal(a, b)
    return model.never.weight.grad is not None, found[0][-4:] is not None


def test_the_three_ways_give_the_same_bits():
    run(three_ways, 2)


def joined_or_not():
    """The gradients of two models, averaged in messages of their own and side by side."""
    models, messages = [here(Toy()), here(Toy())], []
    for model, joined in zip(models, (False, True), strict=True):
        toy_loss(
            model, toy_batch(0, dist.get_rank(), 6), "lr" if dist.get_rank() else "l"
        ).backward()
        with count.sent() as sent:
            shared.average_gradients(model.parameters(), dist.group.WORLD, joined)
        messages.append(sent.calls["all_reduce"])
    assert gap(*map(gradients, models)) == 0.0
    trained = sum(p.requires_grad for p in models[0].parameters())
    assert messages == [trained, 1]


def test_averaging_side_by_side_gives_the_same_bits_in_one_message():
    run(joined_or_not, 2)


def held_and_sent():
    rank, world = dist.get_rank(), dist.group.WORLD
    model = dp.DataParallel(here(Toy()), world, **SMALL)
    expected = sum(p.nbytes + 4 for b in model.buckets for p in b.parameters)
    for set_to_none in (True, False, True):
        model.zero_grad(set_to_none=set_to_none)
        with count.sent() as local, model.no_sync():
            toy_loss(model, toy_batch(0, rank, 6)).backward()
        assert not local.collectives
        inside_buckets(model)
        with count.sent() as sent:
            toy_loss(model, toy_batch(1, rank, 6)).backward()
        inside_buckets(model)
        # The buffer's broadcast, and each bucket once.
        assert sent.collectives["all_reduce"] == (len(model.buckets), expected)
        assert sent.collectives["broadcast"] == (1, 4)
    assert len(model.buckets) > 2
    model.eval()
    with count.sent() as sent:
        model(toy_batch(0, 0, 2)[0])
    assert not sent.collectives


def inside_buckets(model):
    """Every gradient is a view into its bucket: it is held once."""
    for bucket in model.buckets:
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            if parameter.grad is not None:
                assert parameter.grad.data_ptr() == view.data_ptr()
                assert view.untyped_storage().data_ptr() == bucket.flat.data_ptr()


def test_gradients_live_in_the_buckets_and_only_the_last_micro_batch_sends():
    run(held_and_sent, 2)


def unused_everywhere():
    model = dp.DataParallel(here(Toy()), dist.group.WORLD, **SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    before = model.module.never.weight.detach().clone()
    right = model.module.right.weight.detach().clone()
    toy_loss(model, toy_batch(0, 0, 4), "lr" if dist.get_rank() else "l").backward()
    optimizer.step()
    assert model.module.never.weight.grad is None
    assert torch.equal(
        before, model.module.never.weight
    )  # no weight decay either, as in one process
    assert not torch.equal(right, model.module.right.weight)
    assert dp.drift(model, dist.group.WORLD) == 0.0


def test_unused_on_every_rank_stays_none_and_unused_on_one_gets_the_average():
    run(unused_everywhere, 2)


def sub_groups():
    rank = dist.get_rank()
    groups = [dist.new_group([1, 3]), dist.new_group([2, 0])]
    group = groups[0] if rank % 2 else groups[1]
    toy = here(Toy())
    with torch.no_grad():
        toy.left.weight.fill_(rank)
        toy.seen.fill_(rank)
    model = dp.DataParallel(toy, group, **SMALL)
    start = (toy.left.weight[0, 0].item(), toy.seen.item())
    toy.seen.fill_(rank)
    toy_loss(model, toy_batch(0, rank, 4)).backward()
    refused = ""
    try:
        dp.DataParallel(here(Toy()), groups[0])
    except ValueError as error:
        refused = str(error)
    return start, toy.seen.item(), toy.right.weight.grad, refused


def test_sub_groups_start_from_their_own_rank_0_and_average_among_themselves():
    results = run(sub_groups, 4)
    roots = [min(r for r in range(4) if r % 2 == rank % 2) for rank in range(4)]
    for rank, (start, seen, gradient, refused) in enumerate(results):
        assert start == (roots[rank], roots[rank])
        assert seen == roots[rank] + 4
        assert torch.equal(gradient, results[(rank + 2) % 4][2])
        assert not torch.equal(gradient, results[(rank + 1) % 4][2])
        assert bool(refused) == (rank % 2 == 0)
        assert not refused or "a process group that holds this rank" in refused


def held_up():
    """How many buckets are under way when the last gradient comes, with an unused layer."""
    model = dp.DataParallel(here(Toy()), dist.group.WORLD, bucket_bytes=1, first_bytes=1)
    seen = []
    model.module.embedding.weight.register_post_accumulate_grad_hook(
        lambda _: seen.append(model._sent)
    )
    toy_loss(model, toy_batch(0, dist.get_rank(), 4)).backward()
    slow = dp.DataParallel(here(Toy()), link.slow(0.0, 1e9), **SMALL)
    toy_loss(slow, toy_batch(0, dist.get_rank(), 4)).backward()
    assert gap(gradients(model.module), gradients(slow.module)) == 0.0
    return seen[0], len(model.buckets)


def test_an_unused_layer_holds_up_the_buckets_behind_it_until_backward_ends():
    # `never` comes first in the fixed order. Right gradients all the same, on a slow link too.
    assert run(held_up, 2) == [(0, 7)] * 2


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


def chain():
    layer = {"bucket_bytes": 288, "first_bytes": 288}
    model = dp.DataParallel(here(Chain()), dist.group.WORLD, **layer)
    kinds = [{p.dtype for p in b.parameters} for b in model.buckets]
    assert all(len(kind) == 1 for kind in kinds)
    assert {torch.bfloat16} in kinds
    underway = []
    first = model.module.layers[0].weight
    first.register_post_accumulate_grad_hook(lambda _: underway.append(model._sent))
    x = here(torch.randn(3, 8))
    model(x).sum().backward()
    plain = gradients(model)
    model.zero_grad()
    with pytest.raises(ZeroDivisionError):
        handle = first.register_hook(lambda _: 1 // 0)
        model(x).sum().backward()
    handle.remove()
    model.zero_grad()
    model(x, recompute=True).sum().backward()  # after an interrupted backward, all is well again
    assert gap(plain, gradients(model)) == 0.0
    return underway[0], len(model.buckets)


def test_complete_buckets_leave_in_order_also_with_checkpointing_and_after_an_error():
    for underway, buckets in run(chain, 1):
        assert 3 <= underway < buckets


def broken_off(apart, set_to_none):
    """Every rank's backward ends in an error, and the next one begins while messages are away."""
    rank = dist.get_rank()
    model = dp.DataParallel(Chain(), dist.group.WORLD, bucket_bytes=288, first_bytes=288)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(rank))
    model(x).sum().backward()
    wanted = gradients(model)
    model.zero_grad()
    layers = model.module.layers
    # The gradient of the one comes when most buckets have been sent, that of the other before any.
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
    return gap(wanted, gradients(model))


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("apart", [False, True])
def test_messages_of_a_backward_that_broke_off_do_not_meet_those_of_the_next(apart, set_to_none):
    assert run(broken_off, 2, apart, set_to_none, timeout=20) == [0.0, 0.0]


def alone_in_error():
    """Rank 0's backward breaks off, rank 1's does not: it must not take half a sum for a whole."""
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
    assert run(alone_in_error, 2, timeout=20) == [None, True]


def complain(what):
    module, keywords, group = Toy(), {}, dist.group.WORLD
    if what == "size":
        keywords = {"bucket_bytes": 0}
    if what == "first":
        keywords = {"first_bytes": 2.5}
    if what == "group":
        group = None
    if what == "frozen":
        module.requires_grad_(False)
    if what == "sparse":
        module = nn.Embedding(3, 2, sparse=True)
    if what == "differs" and dist.get_rank() == 1:
        module.left = nn.Linear(12, 13)
    if what == "more" and dist.get_rank() == 1:
        module.more = nn.Linear(2, 2)
    if what == "count":
        dp.joined_mean(torch.ones(()), -1, group)
    if what == "empty":
        dp.joined_mean(torch.ones(()), 0, group)
    dp.DataParallel(module, group, **keywords)


COMPLAINTS = {
    "size": "bucket_bytes=0: allowed is a whole number of bytes, 1 or more",
    "first": "first_bytes=2.5: allowed",
    "group": "group=None: allowed is a process group that holds this rank",
    "frozen": "module=Toy: nothing in it can be trained",
    "sparse": "module=Embedding: its gradients are sparse",
    "differs": "module: rank 0 has left.weight [12, 12] torch.float32, rank 1 has left.weight "
    "[13, 12] torch.float32",
    "more": "rank 0 has no further one, rank 1 has more.weight",
    "count": "count=-1: allowed",
    "empty": "count=0 on every rank",
}


def complaints():
    found = {}
    for what in COMPLAINTS:
        try:
            complain(what)
        except ValueError as error:
            found[what] = str(error)
    return found


def test_bad_arguments_are_named_with_what_is_allowed():
    for found in run(complaints, 2):
        for what, words in COMPLAINTS.items():
            assert words in found.get(what, "no error"), what


def drifting():
    toy = here(Toy())
    model = dp.DataParallel(toy, dist.group.WORLD)
    with torch.no_grad():
        toy.left.bias[3] += 0.25 * dist.get_rank()
    return dp.drift(model, dist.group.WORLD)


def test_drift_is_the_largest_difference_and_known_to_all_ranks():
    assert run(drifting, 3) == pytest.approx([0.5] * 3)  # float32: 0.5 up to a rounded addition


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

    def wire(size):
        return size / 10

    assert dp.step_seconds(1, 4, sizes, wire, overlap=False) == 1 + 4 + 2
    assert dp.step_seconds(1, 4, sizes, wire) == 1 + 4 + 1  # only the last bucket is not hidden
    assert dp.step_seconds(1, 1, sizes, wire) == 1 + 0.5 + 2  # the wire is busy from its start on
    assert dp.step_seconds(1, 4, sizes, lambda size: 0.0) == 5


def on_a_gpu():
    model = dp.DataParallel(here(Toy()), dist.group.WORLD, **SMALL)
    batch = toy_batch(0, dist.get_rank(), 6)
    toy_loss(model, batch, "lr" if dist.get_rank() == 0 else "l").backward()
    return [None if g is None else g.cpu() for g in gradients(model.module)]


@pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a CUDA GPU")
def test_on_a_gpu_the_gradients_are_those_of_the_cpu():
    got = ranks.run(on_a_gpu, 2, device="cuda")
    want = ranks.run(on_a_gpu, 2, device="cpu")
    # float32 sums of a few dozen terms of size 0.1, in other orders on a GPU.
    assert max(gap(a, b) for a, b in zip(got, want, strict=True)) < 1e-6
