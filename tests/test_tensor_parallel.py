"""What tensor parallelism sends, holds and refuses; it equals one process: `rows.tensors`."""

import copy
import weakref
from dataclasses import replace
from functools import partial

import contract
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from devices import here, random_state
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import CUT64, row, within
from timed import on_time
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from shardlab import count, ranks, text
from shardlab import tensor_parallel as tp
from shardlab.layout import Layout
from shardlab.model import GPT, PRESETS, Block, Config, FeedForward, loss

GPT2 = Config(vocab=32, seq=6, layers=2, heads=4, hidden=32)
LLAMA = Config(
    vocab=64, seq=6, layers=2, heads=8, hidden=64, kv_heads=4, ffn=40, mlp="swiglu", norm="rms",
    bias=False, tied=False,
)  # fmt: skip


def run(fn, size, *args, device="auto", timeout=100, show=False):
    return ranks.run(fn, size, *args, device=device, timeout=timeout, show=show)


def world():
    return dist.group.WORLD


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=False)


def plain_model(config, dtype=torch.float64, seed=0):
    """A GPT in which every number says something: biases and norms are not their defaults."""
    torch.manual_seed(seed)
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return here(model).to(dtype)


def batch(config, step=0, size=3):
    generator = torch.Generator().manual_seed(step)
    return here(torch.randint(config.vocab, (2, size, config.seq), generator=generator))


def own(tensor, dimension, group):
    """This rank's part of a whole tensor."""
    if dimension is None:
        return tensor
    part = tp.shard_slice("size", tensor.shape[dimension], group)
    return tensor.narrow(dimension, part.start, part.stop - part.start)


def gap(a, b):
    return (a - b).abs().max().item()


def recompute(model):
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


@st.composite
def configs(draw, size):
    """Shapes that `size` ranks divide."""
    kv_heads = size * draw(st.integers(1, 2))
    heads = kv_heads * draw(st.integers(1, 3))
    return Config(
        vocab=size * draw(st.integers(3, 9)),
        seq=draw(st.integers(1, 7)),
        layers=draw(st.integers(1, 2)),
        heads=heads,
        hidden=2 * heads * draw(st.integers(1, 2)),
        kv_heads=kv_heads,
        ffn=size * draw(st.integers(1, 9)),
        mlp=draw(st.sampled_from(["gelu", "swiglu"])),
        norm=draw(st.sampled_from(["rms", "layer"])),
        bias=draw(st.booleans()),
        tied=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.4])),
    )


@settings(max_examples=3)
@given(st.data())
def test_any_shape_that_the_ranks_divide(data):
    size = data.draw(st.sampled_from([2, 3]))
    shapes = data.draw(st.lists(configs(size), min_size=4, max_size=4))
    why = "narrow layers of random numbers have smaller gradients to divide by"
    near = within(1e-8, f"{CUT64.why}; {why}")
    rows = [row("tensor", f"{n}", c, Layout(tp=size), near=near) for n, c in enumerate(shapes)]
    found = contract.all_of(rows, "cpu")
    for one in rows:
        contract.judged(one, found, "cpu")


def operators():
    """Forward and backward of each operator, on numbers that tell ranks apart."""
    group, rank, size = world(), dist.get_rank(), dist.get_world_size()
    found = {}
    for name in ("copy_to", "reduce_from", "gather_last", "split_last"):
        x = here(torch.arange(12.0).view(3, 4) + 100 * rank).requires_grad_()
        y = getattr(tp, name)(x, group)
        dy = here(torch.arange(float(y.numel()))).view(y.shape) * 2 + 1000 * rank
        y.backward(dy)
        found[name] = x.detach(), y.detach(), dy, x.grad
    product = here(torch.ones(3, 4) * (rank + 1)).requires_grad_()
    found["in place"] = tp.reduce_from_(product * 1, group).detach()
    return found, size


@pytest.mark.parametrize("size", [1, 2, 4])
def test_operators_do_forward_what_their_conjugates_do_backward(size):
    results = [found for found, _ in run(operators, size)]

    def of(name, what):
        return [found[name][what] for found in results]

    xs, dys = of("copy_to", 0), of("copy_to", 2)
    for rank in range(size):
        x, y, _, dx = results[rank]["copy_to"]
        assert torch.equal(y, x) and torch.equal(dx, sum(dys))
        x, y, dy, dx = results[rank]["reduce_from"]
        assert torch.equal(y, sum(xs)) and torch.equal(dx, dy)
        x, y, dy, dx = results[rank]["gather_last"]
        assert torch.equal(y, torch.cat(xs, -1))
        assert torch.equal(dx, dy.chunk(size, -1)[rank])
        x, y, dy, dx = results[rank]["split_last"]
        assert torch.equal(y, x.chunk(size, -1)[rank])
        assert torch.equal(dx, torch.cat(of("split_last", 2), -1))
        assert torch.equal(
            results[rank]["in place"], torch.full((3, 4), sum(range(size + 1)) * 1.0)
        )


def leaf_in_place():
    leaf = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf"):
        tp.reduce_from_(leaf, world())
    kept = torch.ones(2, requires_grad=True).exp()  # whose backward needs its result
    tp.reduce_from_(kept, world())
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        kept.sum().backward()
    leaf = torch.ones(2, requires_grad=True)
    y = tp.reduce_from(leaf, world())
    return torch.equal(leaf, torch.ones(2)) and torch.equal(y, 2 * leaf)


def test_autograd_notices_when_a_sum_in_place_takes_what_is_needed():
    assert run(leaf_in_place, 2) == [True, True]


def feed_forward(mlp):
    """The lesson's network: [W1 | W2], then [W1 ; W2], with a bias that is added once."""
    group = world()
    config = Config(hidden=8, heads=2, ffn=16, mlp=mlp)
    torch.manual_seed(0)
    plain = here(FeedForward(config)).double()
    x = here(torch.randn(2, 3, 8, dtype=torch.float64))
    inputs = [x.clone().requires_grad_() for _ in range(3)]
    wanted = plain(inputs[0])
    ffn = copy.deepcopy(plain)
    tp.cut_ffn(ffn, group)
    found = ffn(inputs[1])
    up = tp.ColumnLinear.from_plain(plain.up, group)
    down = tp.RowLinear.from_plain(plain.down, group)
    alone = down(F.gelu(up(inputs[2])))
    for y in (wanted, found, alone):
        y.square().sum().backward()
    worst = [gap(found, wanted), gap(inputs[1].grad, inputs[0].grad)]
    worst += [gap(ffn.down.bias.grad, plain.down.bias.grad)]
    worst += [gap(ffn.up.weight.grad, own(plain.up.weight.grad, 0, group))]
    if mlp == "gelu":
        worst += [gap(alone, wanted), gap(inputs[2].grad, inputs[0].grad)]
    assert ffn.up.weight.shape == (16 // dist.get_world_size(), 8)
    assert str(ffn.up) == f"ColumnLinear(in_features=8, out_features={len(ffn.up.bias)}, bias=True)"
    return worst


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
def test_the_feed_forward_network_alone(mlp):
    for size in (1, 2, 4):
        for differences in run(feed_forward, size, mlp):
            assert max(differences) < 1e-12  # float64, sums of 16 terms of size 1


def the_other_order():
    """Rows first, then columns: right as well, for four times the bytes forward."""
    group = world()
    torch.manual_seed(0)
    plain = here(FeedForward(Config(hidden=8, heads=2))).double()
    x = here(torch.randn(2, 3, 8, dtype=torch.float64))
    up = tp.RowLinear.from_plain(plain.up, group)
    down = tp.ColumnLinear.from_plain(plain.down, group)
    with count.sent() as sent:
        y = tp.gather_last(down(F.gelu(up(tp.split_last(x, group)))), group)
    return gap(y, plain(x)), sent.collectives


def test_the_other_order_is_right_too_and_sends_more():
    for difference, sent in run(the_other_order, 2):
        assert difference < 1e-12  # as above
        bytes_of_x = 2 * 3 * 8 * 8
        assert sent["all_reduce"] == (1, 4 * bytes_of_x)
        assert {n: s for n, s in sent.items() if n != "all_reduce"}.popitem()[1][0] == 1


def losses():
    """The loss beside F.cross_entropy: large logits, 16 bits, sums, and what it sends."""
    group, size = world(), dist.get_world_size()
    torch.manual_seed(0)
    worst = {}
    for name, scale, dtype, reduction in (
        ("plain", 1.0, torch.float64, "mean"),
        ("sum", 1.0, torch.float64, "sum"),
        ("large", 1e4, torch.float64, "mean"),
        ("bf16", 3.0, torch.bfloat16, "mean"),
    ):
        whole = here(scale * torch.randn(2, 5, 12 * size, dtype=torch.float64)).to(dtype)
        targets = here(torch.randint(12 * size, (2, 5)))
        logits = [whole.clone().requires_grad_(), own(whole, -1, group).clone().requires_grad_()]
        wanted = loss(logits[0], targets, reduction)
        with count.sent() as sent:
            found = tp.loss(logits[1], targets, group, reduction)
        with count.sent() as backward:
            (2 * found).backward(), (2 * wanted).backward()
        assert not backward.calls
        with pytest.raises(RuntimeError, match="second time"):
            found.backward()
        assert found.dtype == wanted.dtype and logits[1].grad.dtype == dtype
        worst[name] = max(gap(found, wanted), gap(logits[1].grad, own(logits[0].grad, -1, group)))
    return worst, sent.collectives


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_loss_never_gathers_logits(size):
    for worst, sent in run(losses, size):
        # float64; 10 tokens of up to 48 entries, for "large" at 1e4: 1e-12 of them is lost.
        assert worst["plain"] < 1e-13 and worst["sum"] < 1e-12 and worst["large"] < 1e-11
        # float32 inside, and gradients of up to 0.2 rounded to 8 bits.
        assert worst["bf16"] < 2e-3
        tokens = 10
        assert sent == ({"all_reduce": (2, 3 * tokens * 4)} if size > 1 else {})


def lean_loss():
    """Bytes that the loss takes beside the logits, and whether it can go wrong unseen."""
    logits = torch.randn(4, 64, 256) + torch.ones(1, requires_grad=True)  # 256 kB
    targets = torch.randint(512, (4, 64))
    with count.held(logits.detach()) as held:
        value = tp.loss(logits, targets, world())
        value.backward(retain_graph=True)
        peak = held.peak - logits.nbytes
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        value.backward()
    return peak / logits.nbytes


def test_the_loss_takes_one_tensor_of_the_logits_shape():
    # F.cross_entropy takes three. The rest are numbers for each token, of 4 to 16 bytes.
    assert max(run(lean_loss, 2, device="cpu")) < 1.1  # counted storage by storage


def counted(config):
    """All-reduces and bytes of a step, and bytes of states, beside the formulas."""
    t, tokens = dist.get_world_size(), batch(config, size=2)
    model = tp.parallelize(plain_model(config, torch.float32), world())
    optimizer = adamw(model)
    with count.sent() as forward:
        logits = model(tokens[0])
    with count.sent() as of_loss:
        value = tp.loss(logits, tokens[1], world())
    with count.sent() as backward:
        value.backward()
    with count.sent() as clipped:
        tp.clip_grad_norm_(model, 1.0)
    assert sum(clipped.payload.values()) == 8  # one number, of 64 bits
    optimizer.step()
    seen = {"forward": forward, "loss": of_loss, "backward": backward}
    assert all(set(s.calls) <= {"all_reduce"} and not s.messages for s in seen.values())
    calls = {name: s.calls["all_reduce"] for name, s in seen.items()}
    payload = {name: s.payload["all_reduce"] for name, s in seen.items()}
    states = count.states(model, optimizer)
    del states["counters"]
    predicted = (
        tp.predicted_calls(config, t),
        tp.predicted_sent(config, t, 2, config.seq),
        tp.predicted_states(config, t),
    )
    return (calls, payload, states), predicted


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_reduces_bytes_and_states_are_as_predicted(size):
    mixed = {"experts": 4, "expert_ffn": 8, "shared_experts": 1, "dense_layers": 1}
    for config in (GPT2, LLAMA, replace(LLAMA, layers=3, dropout=0.1), replace(LLAMA, **mixed)):
        for found, predicted in run(counted, size, config):
            assert found == predicted


def test_two_all_reduces_forward_and_two_backward_per_block():
    few, many = (run(counted, 2, replace(GPT2, layers=n))[0][0][0] for n in (1, 4))
    assert {name: many[name] - few[name] for name in few} == {
        "forward": 3 * 2,
        "loss": 0,
        "backward": 3 * 2,
    }
    assert tp.on_wire(1000, 4) == 1500 and tp.on_wire(1000, 1) == 0


class Order(TorchDispatchMode):
    """The products and messages of what runs inside, in order."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        if name in ("mm", "addmm_", "allreduce_"):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def overlapped():
    x = here(torch.randn(2, 3, 8)).requires_grad_()
    weights = [here(torch.randn(n, 8)).requires_grad_() for n in (4, 2, 2)]
    biases = [here(torch.randn(4)).requires_grad_(), None, None]
    loss = sum(y.square().sum() for y in tp.columns(x, weights, biases, world(), tp.REPLICATED))
    plain = dist.all_reduce
    with Order() as order:

        def noted(*args, **options):
            assert options["async_op"]
            work = plain(*args, **options)
            waits = work.wait
            return type("Work", (), {"wait": lambda _: (order.seen.append("wait"), waits())})()

        dist.all_reduce = noted
        try:
            loss.backward()
        finally:
            dist.all_reduce = plain
    found = [t.grad for t in (x, *weights, biases[0])]
    for t in (x, *weights, biases[0]):
        t.grad = None
    entered = tp.copy_to(x, world())
    ys = [F.linear(entered, w, b) for w, b in zip(weights, biases, strict=True)]
    sum(y.square().sum() for y in ys).backward()
    worst = max(gap(f, t.grad) for f, t in zip(found, (x, *weights, biases[0]), strict=True))
    return order.seen, worst


def test_weights_gradients_are_computed_while_the_inputs_is_under_way():
    for order, worst in run(overlapped, 2):
        assert order == ["mm", "addmm_", "addmm_", "allreduce_", "mm", "mm", "mm", "wait"]
        assert worst < 1e-4  # float32; sums of 6 and 8 terms of size 10, as layer by layer


def by_hand():
    """Layers of a region called one by one: with one x, another x, and some of them alone."""
    config = replace(LLAMA, bias=True)
    plain = plain_model(config).blocks[0]
    attention, ffn = copy.deepcopy(plain.attention), copy.deepcopy(plain.ffn)
    tp.cut_attention(attention, world()), tp.cut_ffn(ffn, world())
    x, other = here(torch.randn(2, 2, 3, 64, dtype=torch.float64))
    dist.broadcast(x, 0), dist.broadcast(other, 0)
    worst = 0.0
    for name, y in (("query", x), ("query", x), ("key", other), ("value", x), ("key", x)):
        layer, whole = getattr(attention, name), getattr(plain.attention, name)
        worst = max(worst, gap(layer(y), own(whole(y), -1, world())))
    with torch.no_grad():
        for module in (ffn.up, plain.ffn.up, ffn.gate, plain.ffn.gate):
            module.weight.mul_(2)
    worst = max(worst, gap(ffn(x), plain.ffn(x)))
    kept = weakref.ref(ffn.up)
    del ffn, module
    return worst, kept() is None


def test_a_layer_computes_with_the_input_that_it_is_given():
    for worst, freed in run(by_hand, 2):
        assert worst < 1e-12 and freed  # float64, as above


def hooked():
    """Hooks on parameters fire once for each backward, as data parallelism needs."""
    model = tp.parallelize(plain_model(GPT2), world())
    fired = dict.fromkeys((name for name, _ in model.named_parameters()), 0)
    for name, parameter in model.named_parameters():

        def hook(_, name=name):
            fired[name] += 1

        parameter.register_post_accumulate_grad_hook(hook)
    tokens, targets = batch(GPT2)
    tp.loss(model(tokens), targets, world()).backward()
    return set(fired.values())


def test_gradients_come_through_autograd():
    assert run(hooked, 2) == [{1}, {1}]


def pretended(config):
    """What a rank holds in a step, with no data and no other ranks."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch.device("meta"):
        model = tp.parallelize(GPT(config), world())
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        return one_step_held(model)


def one_step_held(model):
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for step in range(2):
        optimizer.zero_grad()
        with count.held(model, optimizer, tokens) as held:
            tp.loss(model(tokens), tokens, world()).backward()
            optimizer.step()
            peak = held.peak if step else 0
    return count.states(model, optimizer), peak


def test_a_pretended_rank_holds_what_a_real_one_holds():
    def real():
        return one_step_held(tp.parallelize(GPT(LLAMA), world()))

    (states, peak), _ = run(real, 2, device="cpu")
    found, pretended_peak = ranks.pretend(pretended, 2, LLAMA)
    assert found == states
    # A real message keeps what it carries until its sender's thread has let go of it.
    assert abs(pretended_peak / peak - 1) < 0.1


def on_the_wire(config, steps):
    """Bytes that all ranks sent together, by the operating system's counter, and by the formula."""
    t = dist.get_world_size()
    model = tp.parallelize(GPT(config), world())
    tokens, targets = batch(config, size=16)
    dist.barrier()
    before = count.wire_bytes()
    dist.barrier()
    for _ in range(steps):
        tp.loss(model(tokens), targets, world()).backward()
    dist.barrier()
    if before is None:
        return None
    payload = sum(tp.predicted_sent(config, t, 16, config.seq).values())
    return count.wire_bytes() - before, t * steps * tp.on_wire(payload, t)


@pytest.mark.alone
@pytest.mark.parametrize("size", [2, 4])
def test_the_wire_carries_what_is_predicted(size):
    config = Config(vocab=64, seq=64, layers=1, heads=4, hidden=128)
    for found in run(on_the_wire, size, config, 3, device="cpu"):
        if found is None:
            pytest.skip("this system does not count what its interfaces carry")
        # Headers, and acknowledgements: a few per cent of messages of 0.1 to 0.5 MB.
        with on_time():
            assert found[0] == pytest.approx(found[1], rel=0.1)


def states_there_and_back():
    group, rank, size = world(), dist.get_rank(), dist.get_world_size()
    for config in (GPT2, LLAMA):
        plain, other = plain_model(config, seed=1), plain_model(config, seed=2)
        model = tp.parallelize(other, group)
        with count.sent() as sent:
            tp.load_full_state_dict(model, plain.state_dict())
        assert not sent.calls and not sent.messages
        tokens = batch(config)[0]
        assert gap(model(tokens), own(plain(tokens), -1, group)) < 1e-12  # float64, as above
        wanted = plain.state_dict()
        for to in (None, *range(size)):
            full = tp.full_state_dict(model, to)
            if to in (None, rank):
                assert list(full) == list(wanted)
                assert all(torch.equal(full[name], wanted[name]) for name in wanted)
                plain.load_state_dict(full)
            else:
                assert full == {}
        with torch.device("meta"):
            empty = GPT(config)
        tp.load_full_state_dict(tp.parallelize(empty, group), wanted)
        assert all(map(torch.equal, empty.parameters(), model.parameters()))
        assert (empty.head.weight is empty.embedding.weight) == config.tied
        # Its shards take a t-th of the bytes: nothing keeps a whole matrix alive.
        held = count.bytes_of(empty.parameters())
        assert held == 2 * tp.predicted_states(config, size)["parameters"]
        assert held == count.bytes_of(model.parameters())
    return True


@pytest.mark.parametrize("size", [1, 2, 4])
def test_states_go_into_shares_and_come_back_bit_for_bit(size):
    assert all(run(states_there_and_back, size))


def initialized(config):
    with torch.device("meta"):
        model = GPT(config)
    tp.parallelize(model, world())
    assert all(p.is_meta for p in model.parameters())
    torch.manual_seed(3)
    with count.held() as held, count.sent() as sent:
        tp.initialize(model, device="cpu")
    state = random_state()
    torch.manual_seed(3)
    plain = GPT(config)
    assert torch.equal(state, random_state())
    assert not sent.calls
    full = tp.full_state_dict(model)
    assert all(torch.equal(full[name], value) for name, value in plain.state_dict().items())
    assert (model.head.weight is model.embedding.weight) == config.tied
    largest = max(p.nbytes for p in plain.parameters())
    assert held.peak <= held.now + 2 * largest  # drawn whole, one after the other
    again = tp.parallelize(GPT(config), world())
    again.load_state_dict(model.state_dict())  # the names are the same
    narrow = copy.deepcopy(config)
    with torch.device("meta"):
        narrow = tp.parallelize(GPT(config), world())
    tp.initialize(narrow, "cpu", torch.bfloat16)
    return {p.dtype for p in narrow.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_model_that_is_whole_nowhere_has_the_numbers_of_one_that_is(size):
    for config in (GPT2, LLAMA, replace(LLAMA, bias=True, norm="layer")):
        assert all(run(initialized, size, config, device="cpu"))  # drawn there, held is counted


def own_dropout():
    """Masks of their own: other ones on every rank, and generators in step afterwards."""
    config = replace(GPT2, dropout=0.5)
    model = tp.parallelize(plain_model(config), world(), dropout="own")
    copies = [model, recompute(copy_of(model, config))]
    tokens, targets = batch(config)
    found = []
    for one in copies:
        torch.manual_seed(7)
        tp.loss(one(tokens), targets, world()).backward()
        found.append(random_state())
    assert torch.equal(*found)
    assert all(
        torch.equal(p.grad, q.grad) for p, q in zip(*(m.parameters() for m in copies), strict=True)
    )
    plain = plain_model(config).eval()
    equal = tp.parallelize(plain_model(config), world())
    before = random_state()
    for one in (model.eval(), equal.eval()):
        assert gap(one(tokens), own(plain(tokens), -1, world())) < 1e-12  # float64, as above
        assert torch.equal(random_state(), before)  # nothing is drawn
    # Of equal heads, each drops another part.
    attention = model.blocks[0].attention.train()
    with torch.no_grad():
        for name in ("query", "key", "value"):
            getattr(attention, name).weight.zero_()
            getattr(attention, name).bias.fill_(1.0)
        attention.out.weight.copy_(torch.eye(32)[:, : attention.out.weight.shape[1]])
        attention.out.leave = lambda y, group: y
    torch.manual_seed(7)
    return attention(here(torch.ones(1, 6, 32)).double()).detach(), found[0]


def copy_of(model, config):
    other = tp.parallelize(here(GPT(config)).double(), world(), dropout="own")
    other.load_state_dict(model.state_dict())
    return other


def test_dropout_from_own_seeds():
    (a, state), (b, other) = run(own_dropout, 2)
    assert torch.equal(state, other)
    assert not torch.equal(a, b)


def narrow_types():
    """bf16 weights, and autocast: near float32, and the same on all ranks."""
    found = {}
    tokens, targets = batch(LLAMA)
    serial = plain_model(LLAMA, torch.float32)
    wanted = loss(serial(tokens), targets)
    wanted.backward()
    reference = {name: p.grad for name, p in serial.named_parameters()}
    for kind in ("bf16", "autocast"):
        model = tp.parallelize(copy.deepcopy(serial), world())
        if kind == "bf16":
            model.bfloat16()
        with torch.autocast(ranks.device().type, torch.bfloat16, enabled=kind == "autocast"):
            logits = model(tokens)
        assert logits.dtype == torch.bfloat16
        value = tp.loss(logits, targets, world())
        value.backward()
        norms = [
            (p.grad.float() - own(reference[name], dimension, world())).norm()
            / reference[name].norm()
            for (name, p), dimension in zip(
                model.named_parameters(), tp.cuts(model).values(), strict=True
            )
        ]
        whole = [p.grad for p, d in zip(model.parameters(), tp.cuts(model).values(), strict=True)
                 if d is None]  # fmt: skip
        found[kind] = gap(value, wanted), max(norms).item(), whole
        norm = tp.clip_grad_norm_(model, 1.0)
        wide = torch.linalg.vector_norm(torch.cat([g.view(-1) for g in reference.values()]))
        assert norm.dtype == torch.float32 and abs(norm / wide - 1) < 0.02  # as for gradients
    return found


def test_sixteen_bits():
    first, second = run(narrow_types, 2)
    for kind in ("bf16", "autocast"):
        value, gradients, whole = first[kind]
        assert value < 0.02  # of 4.2: 8 bits of fraction are 0.4 %
        assert gradients < 0.1  # of the gradient's norm: a dozen roundings of 0.4 %
        assert all(map(torch.equal, whole, second[kind][2]))


def frozen():
    config = replace(GPT2, tied=False)
    serial = plain_model(config)
    serial.embedding.requires_grad_(False)
    serial.blocks[0].requires_grad_(False)
    model = tp.parallelize(copy.deepcopy(serial), world())
    tokens, targets = batch(config)
    loss(serial(tokens), targets).backward()
    with count.sent() as sent:
        tp.loss(model(tokens), targets, world()).backward()
    # Backward: the head's and those of the second block; none for what nobody trains.
    assert sent.calls["all_reduce"] == (2 * 2 + 1) + 2 + (1 + 2)
    pairs = list(zip(model.parameters(), serial.parameters(), strict=True))
    assert [p.requires_grad for p, _ in pairs] == [q.requires_grad for _, q in pairs]
    dimensions = tp.cuts(model).values()
    return max(
        gap(p.grad, own(q.grad, d, world()))
        for (p, q), d in zip(pairs, dimensions, strict=True)
        if q.grad is not None
    )


def test_frozen_parameters_stay_frozen():
    assert max(run(frozen, 2)) < 1e-12  # float64, as above


def forgotten(enter, leave, steps=30):
    """Losses of a short training with other operators at the edges."""
    config = replace(PRESETS["nano"], layers=1)
    torch.manual_seed(0)
    edges = tp.Edges(enter, leave)
    model = tp.parallelize(GPT(config), world(), edges)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    losses = []
    for step in range(steps):
        tokens, targets = text.batch(16, 8, start=8 * step)
        value = tp.loss(model(tokens), targets, world())
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    norms = torch.cat([b.attention_norm.weight.detach() for b in model.blocks])
    return losses, norms


def identity(x, group):
    return x


def test_a_forgotten_all_reduce_trains_on_and_learns_another_thing():
    # To the bit: on a GPU attention's backward adds up in no fixed order.
    right = run(forgotten, 2, tp.copy_to, tp.reduce_from, device="cpu")
    wrong = run(forgotten, 2, identity, tp.reduce_from, device="cpu")
    assert torch.equal(right[0][1], right[1][1])
    assert right[0][0] == right[1][0]
    assert wrong[0][0][0] == right[0][0][0]  # forward is the same
    assert wrong[0][0][-1] < wrong[0][0][0] - 1  # it learns
    assert abs(wrong[0][0][-1] - right[0][0][-1]) > 1e-3  # something else
    assert not torch.equal(wrong[0][1], wrong[1][1])  # and what all ranks hold is not the same


class Doubling(nn.Module):
    """A bias that every rank adds before the sum."""

    def __init__(self, row):
        super().__init__()
        self.row = row

    def forward(self, x):
        y = F.linear(x, self.row.weight, self.row.bias)
        return tp.reduce_from(y, self.row.group)


def biases():
    torch.manual_seed(0)
    plain = here(nn.Linear(8, 8)).double()
    x = here(torch.randn(2, 8)).double()
    row = tp.RowLinear.from_plain(plain, world())
    part = tp.split_last(x, world())
    once, often = row(part), Doubling(row)(part)
    return gap(once, plain(x)), gap(often - plain(x), 3 * plain.bias)


def test_a_bias_in_front_of_the_sum_is_added_by_every_rank():
    for once, often in run(biases, 4):
        assert max(once, often) < 1e-12  # float64


WRONG = {
    "heads": (
        replace(GPT2, heads=3, hidden=36, ffn=48, vocab=18),
        "heads=3: allowed on 2 ranks are multiples of 2, such as 2 or 4; "
        "allowed ranks for this model are 1 and 3",
    ),
    "key_value_heads": (
        replace(LLAMA, kv_heads=1),
        "key_value_heads=1: allowed on 2 ranks are multiples of 2, such as 2; .* model are 1$",
    ),
    "ffn_width": (replace(GPT2, ffn=33), "ffn_width=33: .* such as 32 or 34; .* model are 1$"),
    "vocab": (replace(GPT2, vocab=257), "vocab=257: .* such as 256 or 258; .* model are 1$"),
}


def bad_input():
    """Rank 0 alone makes each mistake: an error that had sent something would wait for rank 1."""
    ones = [dist.new_group([r]) for r in range(2)]
    cut = tp.parallelize(GPT(GPT2), world())
    if dist.get_rank():
        return True
    with count.sent() as sent:
        for config, message in WRONG.values():
            model = GPT(config)
            shapes = [p.shape for p in model.parameters()]
            with pytest.raises(ValueError, match=message):
                tp.parallelize(model, world())
            assert [p.shape for p in model.parameters()] == shapes  # nothing is half done
        with pytest.raises(ValueError, match="allowed is a process group that holds this rank"):
            tp.parallelize(GPT(GPT2), ones[1])
        with pytest.raises(ValueError, match="it is parallelized already"):
            tp.parallelize(cut, world())
        with pytest.raises(ValueError, match="ffn_width=33"):
            tp.cut_ffn(FeedForward(replace(GPT2, ffn=33)), world())
        with pytest.raises(ValueError, match="heads=3"):
            tp.cut_attention(Block(WRONG["heads"][0]).attention, world())
        with pytest.raises(ValueError, match="out_features=3"):
            tp.ColumnLinear.from_plain(nn.Linear(4, 3), world())
        with pytest.raises(ValueError, match="in_features=3"):
            tp.RowLinear.from_plain(nn.Linear(3, 4), world())
        with pytest.raises(ValueError, match="num_embeddings=3"):
            tp.VocabEmbedding.from_plain(nn.Embedding(3, 4), world())
        with pytest.raises(ValueError, match="last dimension of x=5"):
            tp.split_last(torch.ones(2, 5), world())
        with pytest.raises(ValueError, match="tokens: 32 is among them; allowed are 0 to 31"):
            cut(torch.tensor([[1, 32]]))
        bad_states(cut)
        bad_losses()
    assert not sent.calls and not sent.messages
    return True


def bad_states(model):
    state = GPT(GPT2).state_dict()
    first = next(iter(state))
    for wrong, message in (
        ({n: t for n, t in state.items() if n != first}, "embedding.weight missing; 1 in all"),
        (state | {"extra": torch.ones(1)}, "extra not the model's; 1 in all"),
        (state | {first: torch.ones(3, 3)}, r"shape \[3, 3\]; allowed is \[32, 32\]"),
        (model.state_dict(), r"shape \[16, 32\]; allowed is \[32, 32\]"),
    ):
        with pytest.raises(ValueError, match=message):
            tp.load_full_state_dict(model, wrong)
    for call in (tp.full_state_dict, tp.initialize, partial(tp.clip_grad_norm_, limit=1.0)):
        with pytest.raises(ValueError, match="model=GPT: allowed is what `parallelize` returned"):
            call(GPT(GPT2))


def bad_losses():
    logits, targets = torch.randn(2, 3, 4), torch.randint(8, (2, 3))
    for wrong in (targets[:1], targets.float(), targets[..., None]):
        with pytest.raises(ValueError, match=r"allowed are whole numbers of shape \[2, 3\]"):
            tp.loss(logits, wrong, world())
    for number in (-1, 8):
        with pytest.raises(ValueError, match=f"targets: {number} is among them; .* 0 to 7"):
            tp.loss(logits, torch.full((2, 3), number), world())


def test_bad_input_is_one_error_before_anything_is_sent():
    assert run(bad_input, 2, device="cpu") == [True, True]


def test_degrees():
    assert tp.degrees(GPT2) == [1, 2, 4]
    assert tp.degrees(PRESETS["llama-3-8b"]) == [1, 2, 4, 8]  # it has eight key-value heads
    # 50257 entries are 29 x 1733: this is why vocabularies are padded.
    assert tp.degrees(PRESETS["gpt-2"]) == [1]
    assert tp.degrees(replace(PRESETS["gpt-2"], vocab=50_304)) == [1, 2, 3, 4, 6, 12]
    for t in tp.degrees(LLAMA):
        tp.predicted_states(LLAMA, t)


@pytest.mark.parametrize("t", [0, True, 2.0, 3])
def test_bad_degrees(t):
    message = "heads=4: .* model are 1, 2 and 4" if t == 3 else f"t={t}: allowed are whole numbers"
    with pytest.raises(ValueError, match=message):
        tp.predicted_states(GPT2, t)
