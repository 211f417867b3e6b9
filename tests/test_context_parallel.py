"""Context-parallel attention equals one process's; counted work, bytes and memory."""

import itertools
import random
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from devices import to_device
from hypothesis import given, settings
from hypothesis import strategies as st
from plain import run_ranks

from shardlab import context_parallel as cp
from shardlab.context_parallel import core, kernel
from shardlab.gpt.model import GPT, Config
from shardlab.measure import count

WAYS = {"ring": cp.ring_attention, "ulysses": cp.all_to_all_attention}
SIZES = (1, 2, 4)


# Layouts


@given(st.sampled_from(cp.LAYOUTS), st.integers(1, 9), st.integers(1, 5), st.integers(0, 2))
def test_join_is_the_inverse_of_split_and_positions_say_where_tokens_stand(layout, n, unit, dim):
    seq = unit * n * (2 if layout == "zigzag" else 1)
    whole = torch.arange(seq * 6).view(2, 3, seq).movedim(2, dim)
    parts = [cp.split_seq(whole, n, rank, layout, dim) for rank in range(n)]
    assert cp.join_seq(parts, layout, dim).equal(whole)
    for rank, part in enumerate(parts):
        where = cp.token_positions(layout, seq, n, rank)
        assert part.equal(whole.index_select(dim, where))
        assert where.dtype == torch.int64 and where.equal(where.sort().values)


@given(st.sampled_from(cp.LAYOUTS), st.integers(1, 8), st.integers(1, 3), st.booleans())
@settings(max_examples=40)
def test_blocks_are_the_mask_and_each_pair_once(layout, n, unit, causal):
    local_seq = unit * (2 if layout == "zigzag" else 1)
    computed = torch.zeros(n * local_seq, n * local_seq, dtype=torch.int64)
    for rank in range(n):
        for source in range(n):
            mine, theirs = (cp.token_positions(layout, n * local_seq, n, r) for r in (rank, source))
            for block in cp.list_blocks(layout, n, rank, source, causal, local_seq):
                rows, columns = mine[block.queries], theirs[block.keys]
                pairs = torch.ones(len(rows), len(columns), dtype=torch.int64)
                pairs = pairs.tril() if block.causal else pairs
                assert pairs.sum() == block.num_pairs
                computed[rows[:, None], columns] += pairs
    whole = torch.ones_like(computed)
    assert computed.equal(whole.tril() if causal else whole)


@given(st.integers(1, 16), st.integers(1, 4))
def test_zig_zag_shares_out_equal_work_in_every_turn(n, unit):
    local_seq = 2 * unit
    turns = cp.count_pairs_by_turn("zigzag", n * local_seq, n)
    own, others = local_seq * (local_seq + 1) // 2, local_seq * local_seq // 2
    assert turns == [[own] + [others] * (n - 1)] * n
    assert sum(map(sum, turns)) == n * local_seq * (n * local_seq + 1) // 2
    lazy, busy = (cp.count_pairs("contiguous", n * local_seq, n, rank) for rank in (0, n - 1))
    assert (lazy, busy) == (own, own + (n - 1) * local_seq * local_seq)


# The parts of the mathematics


@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 7), st.integers(1, 7))
@settings(max_examples=30)
def test_two_blocks_merged_are_attention_over_both(seed, queries, left, right):
    torch.manual_seed(seed)
    # Up to 30 in the exponent: without the logarithms, sums would overflow float32.
    q, k, v = (4 * torch.randn(1, 2, n, 4) for n in (queries, left + right, left + right))
    q = 4 * q
    first = cp.block_attention(q, k[:, :, :left], v[:, :, :left])
    second = cp.block_attention(q, k[:, :, left:], v[:, :, left:])
    merged = cp.merge_attention(*first, *second)
    whole = cp.block_attention(q, k, v)
    off = 2 * 4 * 2**-24 * (q.abs() @ k.abs().mT).max().item() / 2  # exponents: two orders of 4
    for got, expected in zip(merged, whole, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=2 * off * v.abs().max().item())


@pytest.mark.parametrize("causal", [True, False])
def test_the_plain_kernel_equals_the_fused_one(monkeypatch, causal):
    # The plain kernel is for dtypes and head sizes without a fused GPU kernel.
    torch.manual_seed(0)
    q, dy = (torch.randn(2, 6, 5, 8, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(2, 3, 5, 8, dtype=torch.float64) for _ in range(2))

    def run_both():
        y, lse = cp.block_attention(q, k, v, causal)
        return y, lse, *cp.block_gradients(dy, q, k, v, y, lse, causal)

    fused = run_both()
    monkeypatch.setattr(kernel, "_choose_kernel", lambda q: "plain")
    for got, expected in zip(run_both(), fused, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)  # 2 * 30 * 2^-53 of 100


# Equal to one process


def make_tensors(seed, batch, seq, heads, kv_heads, size, dtype):
    """Return queries, keys, values and a gradient of the results, for the whole sequence."""
    torch.manual_seed(seed)
    kinds = (heads, kv_heads, kv_heads, heads)
    return to_device([torch.randn(batch, h, seq, size, dtype=dtype) for h in kinds])


def measure_gaps(way, seed, shape, dtype, causal, layout, group):
    """Return the largest differences from one process: results, and gradients of q, k, v."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    *whole, dy = make_tensors(seed, *shape, dtype)
    mine = [cp.split_seq(x, size, rank, layout, 2).clone().requires_grad_() for x in whole]
    y = WAYS[way](*mine, group, causal, layout)
    y.backward(cp.split_seq(dy, size, rank, layout, 2))
    whole = [x.requires_grad_() for x in whole]
    expected = F.scaled_dot_product_attention(*whole, is_causal=causal, enable_gqa=True)
    expected.backward(dy)
    got = [cp.gather_seq(x, group, layout, 2) for x in (y, *(m.grad for m in mine))]
    return [
        (a - b).abs().max().item()
        for a, b in zip(got, (expected.detach(), *(w.grad for w in whole)), strict=True)
    ]


def all_gaps(cases):
    return [measure_gaps(*case, dist.group.WORLD) for case in cases]


@pytest.mark.parametrize("size", SIZES)
@given(seed=st.integers(0, 2**31))
@settings(max_examples=1)
def test_output_and_all_three_gradients_equal_one_process(size, seed):
    draw = random.Random(seed)
    cases = []
    for way in WAYS:
        for layout in cp.LAYOUTS:
            for causal in (True, False):
                # Heads for every rank, with one, some or all of the key/value heads.
                kv_heads = draw.choice([1, 2, 4])
                heads = kv_heads * draw.choice([1, 2, 3]) if way == "ring" else 4
                seq = 2 * size * draw.randint(1, 5)
                shape = draw.randint(1, 3), seq, heads, kv_heads, 2 * draw.randint(1, 8)
                cases.append((way, seed, shape, torch.float64, causal, layout))
    for results in run_ranks(all_gaps, size, cases):
        for case, found in zip(cases, results, strict=True):
            # Paths of 16 + 40 + 16 + 3 * 40 terms in two orders: 2 * 192 * 2^-53 of up to 20.
            assert max(found) < 1e-12, (case, found)


# Predicted and counted


def sent_by(way, shape, dtype):
    batch, seq, heads, kv_heads, size = shape
    group, n = dist.group.WORLD, dist.get_world_size()
    *whole, dy = make_tensors(0, *shape, dtype)
    mine = [x[:, :, : seq // n].clone().requires_grad_() for x in whole]
    dy = dy[:, :, : seq // n]
    with count.record_traffic() as forward:
        y = WAYS[way](*mine, group, True, "contiguous")
    with count.record_traffic() as backward:
        y.backward(dy)
    return forward, backward


@pytest.mark.parametrize("size", SIZES)
def test_bytes_on_the_wire_are_those_predicted(size):
    cases = list(itertools.product(WAYS, (1, 2, 4), (torch.float32, torch.bfloat16)))

    def work():
        return [sent_by(way, (2, 16, 4, kv_heads, 6), dtype) for way, kv_heads, dtype in cases]

    for results in run_ranks(work, size):
        for (way, kv_heads, dtype), (forward, backward) in zip(cases, results, strict=True):
            itemsize = dtype.itemsize
            if way == "ring":
                predicted = cp.predict_ring_bytes(2, 16, kv_heads, 6, size, itemsize)
                assert (forward.bytes, backward.bytes) == (
                    predicted["forward"],
                    predicted["backward"],
                )
                assert forward.messages + backward.messages == predicted["messages"]
                assert not forward.calls and not backward.calls
            else:
                predicted = cp.predict_ulysses_bytes(2, 16, 4, kv_heads, 6, size, itemsize)
                calls = forward.calls + backward.calls
                handed = forward.payload + backward.payload
                assert calls["all_to_all_single"] == predicted["calls"] == sum(calls.values())
                assert handed["all_to_all_single"] == predicted["handed"]
                for one, way in ((forward, "forward"), (backward, "backward")):
                    payload = one.payload["all_to_all_single"]
                    assert Fraction(payload * (size - 1), size) == predicted[way]


def trace_turns(layout, causal):
    n, rank = dist.get_world_size(), dist.get_rank()
    *whole, dy = make_tensors(0, 1, 48, 2, 2, 4, torch.float32)
    mine = [cp.split_seq(x, n, rank, layout, 2).clone().requires_grad_() for x in whole]
    trace = []
    cp.ring_attention(*mine, dist.group.WORLD, causal, layout, trace).sum().backward()
    return trace


@pytest.mark.parametrize("size", [1, 3, 4])
def test_blocks_that_ranks_compute_are_those_predicted(size):
    cases = list(itertools.product(cp.LAYOUTS, (True, False)))
    for rank, traces in enumerate(run_ranks(lambda: [trace_turns(*case) for case in cases], size)):
        for (layout, causal), trace in zip(cases, traces, strict=True):
            for backward in (False, True):
                found = [0] * size
                for work in trace:
                    assert work.source == (rank - work.turn) % size and work.seconds > 0
                    if work.backward == backward:
                        found[work.turn] += work.block.num_pairs
                assert found == cp.count_pairs_by_turn(layout, 48, size, causal)[rank]


def memory(way, shape, dtype, layout):
    """Return the bytes kept for backward, and the peaks in forward and in backward."""
    batch, seq, heads, kv_heads, size = shape
    group, n = dist.group.WORLD, dist.get_world_size()
    *whole, dy = make_tensors(0, *shape, dtype)
    if way != "one":
        whole, dy = [x[:, :, : seq // n].clone() for x in whole], dy[:, :, : seq // n].clone()
    mine = [x.requires_grad_() for x in whole]
    del whole

    def attend():
        if way == "one":
            return F.scaled_dot_product_attention(*mine, is_causal=True, enable_gqa=True)
        return WAYS[way](*mine, group, True, layout)

    with count.track_saved_activations() as saved:
        results = attend()
    # The next layer keeps the results; all-to-all attention keeps them already.
    kept = saved.bytes + (results.nbytes if way == "ulysses" and n > 1 else 0)
    del results
    with count.track_memory(*mine) as held:
        y = attend()
        forward = held.peak_bytes
        dy = torch.empty_like(y).copy_(dy)  # a new tensor, as the model's next layer passes it
        held.reset_peak()
        gradients = torch.autograd.grad(y, mine, dy)
        assert len(gradients) == 3
        return kept, forward, held.peak_bytes - dy.nbytes


@pytest.mark.parametrize("size", [2, 4])
def test_memory_is_what_is_predicted(size):
    shapes = [(1, 64, 4, 4, 8), (2, 128, 4, 2, 16), (1, 256, 8, 1, 8)]
    ways = [("one", None), ("ring", "contiguous"), ("ring", "zigzag"), ("ulysses", "contiguous")]
    cases = [(w, s, d, t) for s in shapes for w, t in ways for d in (torch.float32, torch.bfloat16)]

    def work():
        return [memory(*case) for case in cases]

    results = run_ranks(work, size, device="cpu")  # the prediction is for the CPU's kernels
    for i, (way, shape, dtype, layout) in enumerate(cases):
        predicted = cp.predict_attention_memory(way, *shape, ranks=size, itemsize=dtype.itemsize)
        for result in results:
            assert result[i][0] == predicted["kept"]
        # The most on any rank. gloo's threads may hold an all-to-all's buffers for a moment
        # longer, so that this case has no exact value.
        forward, backward = (max(result[i][j] for result in results) for j in (1, 2))
        if way != "ulysses":
            assert forward == predicted["forward"]
            if layout != "zigzag":  # where some blocks have half the size
                assert backward == predicted["backward"]
            assert 0.85 < backward / predicted["backward"] <= 1


# Order


def record_order():
    """Return the order of one rank's operations."""
    did = []

    class Pass(core._RingTransfer):
        def __init__(self, *args):
            did.append("send")
            super().__init__(*args)

        def wait(self):
            did.append("wait")
            return super().wait()

    def note_calls(fn, name):
        return lambda *args, **kwargs: (did.append(name), fn(*args, **kwargs))[1]

    core._RingTransfer = Pass
    core.block_attention = note_calls(core.block_attention, "attend")
    core.block_gradients = note_calls(core.block_gradients, "differentiate")
    q, k, v, _ = (x.requires_grad_() for x in make_tensors(0, 1, 4, 1, 1, 2, torch.float32))
    cp.ring_attention(q, k, v, dist.group.WORLD, False).sum().backward()
    return did


def test_messages_are_on_their_way_while_a_rank_computes():
    turn, last = ["send", "attend", "wait"], ["attend"]
    first_back = ["send", "differentiate", "wait", "send"]  # keys; then gradients, without a wait
    back = ["send", "differentiate", "wait", "wait", "send"]
    last_back = ["differentiate", "wait", "send", "wait"]  # send the gradients home
    for did in run_ranks(record_order, 3):
        assert did == turn * 2 + last + first_back + back + last_back


# A model with context parallelism.


DEEP = Config(
    vocab=64, seq=64, layers=2, heads=8, hidden=64, kv_heads=2, mlp="swiglu", norm="rms",
    bias=False, tied=False,
)  # fmt: skip


def activations(way):
    """Return the bytes that the model keeps for backward on this rank, before the loss."""
    torch.manual_seed(0)
    model = cp.distribute_model(GPT(DEEP), dist.group.WORLD, way, "contiguous")
    tokens = cp.shard_tokens(torch.randint(64, (1, 64)), dist.group.WORLD, "contiguous")
    with count.track_saved_activations(model, tokens) as saved:
        model(tokens)
    return saved.bytes


def test_activations_are_divided_by_the_ranks():  # the prediction is for the CPU's kernels
    def run_both():
        return {way: activations(way) for way in WAYS}

    (whole,) = run_ranks(run_both, 1, device="cpu")
    keys = 2 * DEEP.layers * 64 * DEEP.key_value_heads * DEEP.head_size * 4
    for size in (2, 4):
        # To the byte. Two key/value heads on four ranks: both are replicated.
        wanted = {way: whole[way] // size for way in WAYS}
        wanted["ulysses"] += keys // size if size == 4 else 0
        assert run_ranks(run_both, size, device="cpu") == [wanted] * size
