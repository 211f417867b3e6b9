"""Messages, memory and refusals of tensor parallelism; equality: `rows.tensors`."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from devices import get_random_state, to_device
from plain import build_plain_model, make_adamw, max_diff, run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from shardlab import tensor_parallel as tp
from shardlab.gpt.model import GPT, Config, loss
from shardlab.measure import count
from shardlab.tensor_parallel.overlap import apply_columns

GPT2 = Config(vocab=32, seq=6, layers=2, heads=4, hidden=32)
LLAMA = Config(
    vocab=64, seq=6, layers=2, heads=8, hidden=64, kv_heads=4, ffn=40, mlp="swiglu", norm="rms",
    bias=False, tied=False,
)  # fmt: skip


def get_world():
    return dist.group.WORLD


def batch(config, step=0, size=3):
    generator = torch.Generator().manual_seed(step)
    return to_device(torch.randint(config.vocab, (2, size, config.seq), generator=generator))


def take_own(tensor, dimension, group):
    """Return this rank's part of an unsharded tensor."""
    if dimension is None:
        return tensor
    part = tp.shard_slice("size", tensor.shape[dimension], group)
    return tensor.narrow(dimension, part.start, part.stop - part.start)


def check_losses():
    """Compare the loss with F.cross_entropy: large logits, 16 bits, sums, and bytes sent."""
    group, size = get_world(), dist.get_world_size()
    torch.manual_seed(0)
    worst = {}
    for name, scale, dtype, reduction in (
        ("plain", 1.0, torch.float64, "mean"),
        ("sum", 1.0, torch.float64, "sum"),
        ("large", 1e4, torch.float64, "mean"),
        ("bf16", 3.0, torch.bfloat16, "mean"),
    ):
        whole = to_device(scale * torch.randn(2, 5, 12 * size, dtype=torch.float64)).to(dtype)
        targets = to_device(torch.randint(12 * size, (2, 5)))
        logits = [
            whole.clone().requires_grad_(),
            take_own(whole, -1, group).clone().requires_grad_(),
        ]
        wanted = loss(logits[0], targets, reduction)
        with count.record_traffic() as sent:
            found = tp.vocab_parallel_loss(logits[1], targets, group, reduction)
        with count.record_traffic() as backward:
            (2 * found).backward(), (2 * wanted).backward()
        assert not backward.calls
        with pytest.raises(RuntimeError, match="second time"):
            found.backward()
        assert found.dtype == wanted.dtype and logits[1].grad.dtype == dtype
        wanted_grad = take_own(logits[0].grad, -1, group)
        worst[name] = max(max_diff(found, wanted), max_diff(logits[1].grad, wanted_grad))
    return worst, sent.collectives


@pytest.mark.parametrize("size", [1, 4])
def test_the_loss_never_gathers_logits(size):
    for worst, sent in run_ranks(check_losses, size):
        # 48 entries, 10 tokens, in two orders: 2 * 58 * 2^-53 of losses of 5, 50 and 3e4.
        assert worst["plain"] < 1e-13 and worst["sum"] < 1e-12 and worst["large"] < 4e-10
        # float32 inside; two gradients of up to 0.2, each rounded to 2^-8 of it.
        assert worst["bf16"] < 2e-3
        tokens = 10
        assert sent == ({"all_reduce": (2, 3 * tokens * 4)} if size > 1 else {})


def compare_step(config):
    """Compare a step's all-reduces and bytes, and bytes of states, with the formulas."""
    t, tokens = dist.get_world_size(), batch(config, size=2)
    model = tp.parallelize(build_plain_model(config, torch.float32), get_world())
    optimizer = make_adamw(model)
    with count.record_traffic() as forward:
        logits = model(tokens[0])
    with count.record_traffic() as of_loss:
        value = tp.vocab_parallel_loss(logits, tokens[1], get_world())
    with count.record_traffic() as backward:
        value.backward()
    with count.record_traffic() as clipped:
        tp.clip_grad_norm_(model, 1.0)
    assert sum(clipped.payload.values()) == 8  # one number, of 64 bits
    optimizer.step()
    seen = {"forward": forward, "loss": of_loss, "backward": backward}
    assert all(set(s.calls) <= {"all_reduce"} and not s.messages for s in seen.values())
    calls = {name: s.calls["all_reduce"] for name, s in seen.items()}
    payload = {name: s.payload["all_reduce"] for name, s in seen.items()}
    states = count.measure_state_bytes(model, optimizer)
    del states["counters"]
    predicted = (
        tp.predict_calls(config, t),
        tp.predict_sent_bytes(config, t, 2, config.seq),
        tp.predict_state_bytes(config, t),
    )
    return (calls, payload, states), predicted


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_reduces_bytes_and_states_are_as_predicted(size):
    mixed = {"experts": 4, "expert_ffn": 8, "shared_experts": 1, "dense_layers": 1}
    # Four ranks have one key/value head twice.
    today = replace(LLAMA, kv_heads=2, head=12, qk_norm=True, bias=True)
    latent = replace(LLAMA, kv_heads=None, head=8, latent=16, query_latent=20, rotary=4, value=10)
    configs = (
        GPT2, LLAMA, replace(LLAMA, layers=3), replace(LLAMA, **mixed), today, latent,
        replace(latent, query_latent=None, window=3),
    )  # fmt: skip
    for results in run_ranks(lambda: [compare_step(config) for config in configs], size):
        for config, (found, predicted) in zip(configs, results, strict=True):
            assert found == predicted, config
    few, many = (tp.predict_calls(replace(GPT2, layers=n), size) for n in (1, 4))
    more = 3 * 2 if size > 1 else 0  # two all-reduces in each block, and two more in backward
    assert {n: many[n] - few[n] for n in few} == {"forward": more, "loss": 0, "backward": more}
    assert tp.bytes_on_wire(1000, 4) == 1500 and tp.bytes_on_wire(1000, 1) == 0


class Order(TorchDispatchMode):
    """Recorder of products and messages, in order."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        if name in ("mm", "addmm_", "allreduce_"):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def record_overlap():
    x = to_device(torch.randn(2, 3, 8)).requires_grad_()
    weights = [to_device(torch.randn(n, 8)).requires_grad_() for n in (4, 2, 2)]
    biases = [to_device(torch.randn(4)).requires_grad_(), None, None]
    loss = sum(
        y.square().sum() for y in apply_columns(x, weights, biases, get_world(), tp.REPLICATED)
    )
    plain = dist.all_reduce
    with Order() as order:

        def note_call(*args, **options):
            assert options["async_op"]
            work = plain(*args, **options)
            waits = work.wait
            return type("Work", (), {"wait": lambda _: (order.seen.append("wait"), waits())})()

        dist.all_reduce = note_call
        try:
            loss.backward()
        finally:
            dist.all_reduce = plain
    found = [t.grad for t in (x, *weights, biases[0])]
    for t in (x, *weights, biases[0]):
        t.grad = None
    entered = tp.copy_to(x, get_world())
    ys = [F.linear(entered, w, b) for w, b in zip(weights, biases, strict=True)]
    sum(y.square().sum() for y in ys).backward()
    worst = max(max_diff(f, t.grad) for f, t in zip(found, (x, *weights, biases[0]), strict=True))
    return order.seen, worst


def test_weights_gradients_are_computed_while_the_inputs_is_under_way():
    for order, worst in run_ranks(record_overlap, 2):
        assert order == ["mm", "addmm_", "addmm_", "allreduce_", "mm", "mm", "mm", "wait"]
        assert worst < 1e-4  # sums of 8 terms of up to 12 in two orders: 2 * 7 * 2^-24 * 96


def states_there_and_back():
    group, rank, size = get_world(), dist.get_rank(), dist.get_world_size()
    for config in (GPT2, LLAMA):
        plain, other = build_plain_model(config, seed=1), build_plain_model(config, seed=2)
        model = tp.parallelize(other, group)
        with count.record_traffic() as sent:
            tp.load_full_state_dict(model, plain.state_dict())
        assert not sent.calls and not sent.messages
        tokens = batch(config)[0]
        # Paths of 13 products of up to 128 terms in two orders: 2 * 13 * 128 * 2^-53 of 1.
        assert max_diff(model(tokens), take_own(plain(tokens), -1, group)) < 4e-13
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
        # Its shards take a t-th of the bytes: no view keeps an unsharded matrix alive.
        held = count.sum_bytes(empty.parameters())
        assert held == 2 * tp.predict_state_bytes(config, size)["parameters"]
        assert held == count.sum_bytes(model.parameters())
    return True


def test_states_go_into_shares_and_come_back_bit_for_bit():
    assert all(run_ranks(states_there_and_back, 4))


def initialized(config):
    with torch.device("meta"):
        model = GPT(config)
    tp.parallelize(model, get_world())
    assert all(p.is_meta for p in model.parameters())
    torch.manual_seed(3)
    with count.track_memory() as held, count.record_traffic() as sent:
        tp.initialize_shards(model, device="cpu")
    state = get_random_state()
    torch.manual_seed(3)
    plain = GPT(config)
    assert torch.equal(state, get_random_state())
    assert not sent.calls
    full = tp.full_state_dict(model)
    assert all(torch.equal(full[name], value) for name, value in plain.state_dict().items())
    assert (model.head.weight is model.embedding.weight) == config.tied
    largest = max(p.nbytes for p in plain.parameters())
    assert (
        held.peak_bytes <= held.current_bytes + 2 * largest
    )  # drawn unsharded, one after the other


def test_a_model_that_is_whole_nowhere_has_the_numbers_of_one_that_is():
    run_ranks(lambda: [initialized(config) for config in (GPT2, LLAMA)], 2, device="cpu")


def check_dropout():
    """Check that ranks' equal heads have different dropout masks; generators agree afterwards."""
    model = tp.parallelize(build_plain_model(replace(GPT2, dropout=0.5)), get_world())
    attention = model.blocks[0].attention
    with torch.no_grad():
        for name in ("query", "key", "value"):
            getattr(attention, name).weight.zero_()
            getattr(attention, name).bias.fill_(1.0)
        attention.out.weight.copy_(torch.eye(32)[:, : attention.out.weight.shape[1]])
        attention.out.leave_region = lambda y, group: y
        torch.manual_seed(7)
        return attention(to_device(torch.ones(1, 6, 32)).double()), get_random_state()


def test_heads_drop_by_seeds_of_their_own():
    (part, state), (other, theirs) = run_ranks(check_dropout, 2)
    assert not torch.equal(part, other) and torch.equal(state, theirs)
