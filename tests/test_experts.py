"""Memory, messages and dropped tokens of expert parallelism; equality: `rows.routed`."""

import copy
import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from devices import to_device
from hypothesis import given, settings
from hypothesis import strategies as st
from plain import run_ranks

from shardlab import experts
from shardlab.common.shapes import PRESETS
from shardlab.gpt.model import GPT, Config, count_parameters, loss
from shardlab.measure import count

SMALL = Config(
    vocab=64, seq=12, layers=2, heads=4, hidden=32, experts=4, expert_ffn=24, mlp="swiglu"
)
DEEPSEEK = {
    "router": "sigmoid",
    "experts": 8,
    "experts_per_token": 3,
    "shared_experts": 1,
    "dense_layers": 1,
}
CASES = {
    "mixtral": {"bias": False, "norm": "rms"},
    "switch": {"experts_per_token": 1, "capacity": 1.0, "mlp": "gelu"},
    "gshard": {"capacity": 0.75},
    "deepseek": DEEPSEEK,
}


def gpt(**choices):
    torch.manual_seed(0)
    return to_device(GPT(replace(SMALL, **choices)))


def batch(step, sequences=8):
    torch.manual_seed(step)
    tokens = to_device(torch.randint(64, (sequences, 13)))
    return tokens[:, :-1], tokens[:, 1:]


def part(tensor, group):
    return tensor.chunk(group.size())[dist.get_rank(group)]


def count_sent(choices, dtype):
    model = experts.parallelize(gpt(**choices).to(dtype), dist.group.WORLD)
    tokens, targets = (part(x, dist.group.WORLD) for x in batch(0))
    with experts.record_routing(model) as routed, count.record_traffic() as found:
        loss(model(tokens), targets).backward()
    dropped = int(sum(one.dropped_BS.sum() for one in routed))
    assert bool(dropped) is (model.config.capacity is not None)
    want = experts.predict_sent_bytes(model.config, tokens.numel(), dtype.itemsize, dropped)
    return found.collectives["all_to_all_single"], want


@pytest.mark.parametrize("size", [1, 2, 4])
def test_bytes_of_all_to_alls_are_those_predicted(size):
    cases = list(itertools.product(("gshard", "deepseek"), (torch.float32, torch.float64)))
    results = run_ranks(lambda: [count_sent(CASES[case], dtype) for case, dtype in cases], size)
    for (case, _), found in zip(cases, zip(*results, strict=True), strict=True):
        config = replace(SMALL, **CASES[case])
        handed = sum(payload for (_, payload), _ in found)
        assert handed == sum(sum(want.values()) for _, want in found)
        assert {calls for (calls, _), _ in found} == {experts.predict_calls(config)}


def random_routes(cases):
    """Check that each row gets to its expert, in order, and comes back, for any choices."""
    group = dist.group.WORLD
    rank, size = dist.get_rank(), group.size()
    for seed, (tokens, choices, share) in enumerate(cases):
        total = share * size
        generators = [torch.Generator().manual_seed(100 * seed + r) for r in range(size)]
        counts = [tokens if r != seed % size else 0 for r in range(size)]  # one rank has no tokens
        every = [
            torch.randint(-1, total, (n, choices), generator=g)
            for n, g in zip(counts, generators, strict=True)
        ]
        chosen_TC = to_device(every[rank])
        way = experts.plan_route(chosen_TC, total, group)
        # A row encodes its origin: rank, token and choice, expert.
        numbers = torch.arange(chosen_TC.numel(), device=chosen_TC.device)
        rows = torch.stack((torch.full_like(numbers, rank), numbers, chosen_TC.flatten()), 1)
        rows = rows[way.order_R].double()
        sizes = [sum(row) for row in way.received]
        came = experts.exchange_rows(rows, way.sent, sizes, group)
        want = [
            [source, x, e]
            for source in range(size)
            for e in range(rank * share, (rank + 1) * share)
            for x, c in enumerate(every[source].flatten().tolist())
            if c == e
        ]
        assert came.tolist() == want
        assert way.dropped == (chosen_TC < 0).sum()
        assert experts.exchange_rows(came, sizes, way.sent, group).equal(rows)
    return True


SHAPES = st.tuples(st.integers(0, 12), st.integers(1, 4), st.integers(1, 5))


@settings(max_examples=2)
@given(st.integers(2, 4), st.lists(SHAPES, min_size=4, max_size=8))
def test_every_row_finds_its_expert_and_its_way_back(size, cases):
    assert all(run_ranks(random_routes, size, cases))


def test_published_numbers():
    # arXiv 2401.04088, Table 1: 46.7 and 12.9 billion; arXiv 2412.19437: 671 and 37. The released
    # DeepSeek-V3 has 671,026,419,200, of which 58 * 256 are biases of routers: no gradient's.
    mixtral = experts.count_parameters(PRESETS["mixtral-8x7b"])
    assert (mixtral.total, mixtral.active) == (46_702_792_704, 12_879_925_248)
    deepseek = experts.count_parameters(PRESETS["deepseek-v3"])
    assert deepseek.total == 671_026_419_200 - 58 * 256
    looked_up = 129_280 * 7168  # the embedding's rows, of which a token uses one
    assert round((deepseek.active - looked_up) / 1e9) == 37


def test_the_fullest_rank_is_waited_for_and_the_fullest_expert_padded_to():
    assert experts.load_slowdown([0.5, 0.25, 0.25, 0.0], 2) == 1.5
    assert experts.padding_factor(SMALL, 100, 75) == 1.5


@pytest.mark.parametrize("size", [2, 4])
def test_held_parameters_are_those_counted(size):
    configs = [replace(SMALL, **choices) for choices in CASES.values()]
    for config in configs:
        assert experts.count_parameters(config).total == count_parameters(config)

    def count_built():
        models = [experts.parallelize(GPT(config), dist.group.WORLD) for config in configs]
        return [sum(p.numel() for p in model.parameters()) for model in models]

    assert (
        run_ranks(count_built, size)
        == [[experts.count_held_parameters(config, size) for config in configs]] * size
    )


def states():
    world = dist.group.WORLD
    torch.manual_seed(1)
    other = to_device(GPT(replace(SMALL, **DEEPSEEK)))
    other.blocks[1].ffn.router.bias_E.normal_()
    model = experts.parallelize(gpt(**DEEPSEEK), world)
    experts.load_full_state_dict(model, other.state_dict())
    found = experts.full_state_dict(model)
    assert found.keys() == other.state_dict().keys()
    assert all(found[name].equal(tensor) for name, tensor in other.state_dict().items())


def test_a_state_of_another_model_goes_in_and_comes_out():
    run_ranks(states, 2)


def test_the_balancing_loss_is_one_for_each_even_layer():
    """The lesson shows that the loss and the bias balance the loads."""
    model = gpt(layers=1)
    with experts.record_routing(model) as routed:
        model(batch(0)[0])
    (one,) = routed
    assert one.count_E.sum() == 8 * 12 * 2
    even = one._replace(scores_BSE=torch.full_like(one.scores_BSE, 0.25))
    assert experts.balancing_loss([even]).item() == pytest.approx(1)


def test_the_bias_goes_on_in_16_bits_models_in_steps_that_these_would_lose():
    model = gpt(layers=1)
    model.blocks[0].ffn.router.bias_E.copy_(torch.tensor([0.5, -0.5, 0.0, 0.25]))
    router = model.bfloat16().blocks[0].ffn.router
    assert router.score.weight.dtype == torch.bfloat16
    with experts.record_routing(model) as routed, torch.no_grad():
        model(batch(0)[0])
    assert routed[0].scores_BSE.dtype == torch.float32
    wanted = torch.tensor([0.5, -0.5, 0.0, 0.25]) + (0.25 - experts.compute_loads(routed)[0]).sign()
    for _ in range(1000):
        experts.update_bias(routed, 0.001)
    # Float32: 1,000 sums, each off by 2^-24 of up to 1.5.
    torch.testing.assert_close(router.bias_E, wanted, rtol=0, atol=1e-4)


def in_micro_batches():
    """Check that bias, loads and loss of four micro-batches a rank equal those of one batch."""
    world = dist.group.WORLD
    serial = gpt(**DEEPSEEK).double()
    model = experts.parallelize(copy.deepcopy(serial), world)
    tokens, _ = batch(0, 16)
    with experts.record_routing(serial) as one:
        serial(tokens)
    with experts.record_routing(model) as four:
        for micro in part(tokens, world).tensor_split([1, 2, 5]):  # of unequal sizes
            model(micro)
    torch.testing.assert_close(experts.compute_loads(four, world), experts.compute_loads(one))
    value = experts.balancing_loss(four, world)
    dist.all_reduce(value := value.detach())
    torch.testing.assert_close(value / world.size(), experts.balancing_loss(one).detach())
    experts.update_bias(one, 0.01)
    experts.update_bias(four, 0.01, world)
    mine, theirs = model.blocks[1].ffn.router.bias_E, serial.blocks[1].ffn.router.bias_E
    assert mine.equal(theirs) and mine.abs().max().item() == pytest.approx(0.01)


def test_micro_batches_of_a_step_count_as_one_batch():
    run_ranks(in_micro_batches, 2)


def without_tokens():
    """Train where rank 1 has no tokens: its experts compute, and learn from, those of rank 0."""
    world = dist.group.WORLD
    serial = gpt(**CASES["gshard"])
    model = experts.parallelize(copy.deepcopy(serial), world)
    tokens, targets = batch(0)
    mine = slice(None) if dist.get_rank() == 0 else slice(0)
    with experts.record_routing(model) as routed:
        loss(model(tokens[mine]), targets[mine], "sum").backward()
    assert experts.compute_loads(routed, world).sum().item() == pytest.approx(len(routed))
    loss(serial(tokens), targets, "sum").backward()
    own = {id(parameter) for parameter in experts.own_parameters(model)}
    whole = dict(serial.named_parameters())
    for name, parameter in model.named_parameters():
        if id(parameter) in own:  # already a sum over all ranks' tokens
            # Paths of 26 products of 32 terms and 96 losses: 2 sqrt(930) roundings of 20 are 7e-5.
            torch.testing.assert_close(parameter.grad, whole[name].grad, rtol=1e-4, atol=1e-4)


def test_a_rank_without_tokens_takes_part():
    run_ranks(without_tokens, 2)
