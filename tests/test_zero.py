"""Messages, memory and errors of ZeRO, one test per promise; equality: `rows.zero`."""

import copy

import pytest
import torch
import torch.distributed as dist
from devices import to_device
from sides import SMALL_BUCKETS, ToyModel, gather_gradients
from sides import make_optimizer as adamw
from test_data_parallel import max_gap, toy_batch, toy_loss
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardlab import memory, ranks, zero
from shardlab.common import text
from shardlab.gpt.model import GPT, PRESETS, loss
from shardlab.layout import Layout
from shardlab.measure import count

STAGES = (1, 2, 3)


def run_ranks(fn, size, *args, device="auto", timeout=100, show=True):
    return ranks.run(fn, size, *args, device=device, timeout=timeout, show=show)


def shard_plain(plain, stage, **options):
    if stage < 3:
        options = SMALL_BUCKETS | options
    elif isinstance(plain, ToyModel):
        # Unused parameters cannot be a unit of their own: `left` and `right` are in the rest.
        options = {"units": [plain.frozen]} | options
    return zero.shard_module(plain, dist.group.WORLD, stage, **options)


def test_the_calculator_of_the_memory_lesson_says_the_same():
    config = PRESETS["nano"]  # all its sizes divide by 2

    def predict_bytes(stage, dtype):
        return zero.predict_state_bytes(shard_plain(GPT(config), stage, compute_dtype=dtype))

    def predict_all():
        return [
            [predict_bytes(stage, dtype) for dtype in (None, torch.bfloat16)] for stage in STAGES
        ]

    size = memory.count_parameters(config)
    for found in run_ranks(predict_all, 2):
        for stage, (wide, narrow) in zip(STAGES, found, strict=True):
            states = memory.estimate_states(size, Layout(dp=2, zero=stage), "fp32")
            names = "parameters", "gradients", "optimizer"
            assert wide == {name: getattr(states, name) for name in names}
            states = memory.estimate_states(size, Layout(dp=2, zero=stage), "bf16-fp32-gradients")
            # Its recipe keeps a 16-bit copy of the shard as well, which stage 3 here does not.
            spared = 2 * size // 2 if stage == 3 else 0
            assert sum(narrow.values()) == states.total - spared
            assert narrow["gradients"] == states.gradients


def predicted_and_held(model, optimizer):
    predicted = zero.predict_state_bytes(model)
    held = count.measure_state_bytes(model, optimizer)
    if model.compute_dtype is not None and not isinstance(model, zero.Zero3):
        held["parameters"] += sum(flat.full.nbytes for flat in model.flats)
    if next(p for p in model.parameters() if p.numel()).grad is None:
        held["gradients"] = predicted["gradients"]
    held.pop("counters")
    assert held == predicted
    return True


def run_backward(model, plain, step=0):
    if isinstance(plain, ToyModel):
        return toy_loss(model, toy_batch(step, dist.get_rank(), 6)).backward()
    tokens, targets = to_device(text.get_batch(32, 2, start=2 * dist.get_rank()))
    loss(model(tokens), targets).backward()


def held_and_sent():
    """Check states and sent messages to the byte, for models with unequal shards."""
    for stage, dtype in [(s, d) for s in STAGES for d in (None, torch.bfloat16)]:
        for plain in (to_device(ToyModel()), to_device(GPT(PRESETS["nano"]))):
            model = shard_plain(plain, stage, compute_dtype=dtype)
            optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
            for step in range(2):
                optimizer.zero_grad()
                with count.record_traffic() as sent:
                    run_backward(model, plain, step)
                optimizer.step()
            if isinstance(plain, GPT):  # all parameters are used: every piece has a gradient
                assert predicted_and_held(model, optimizer)
            predicted = zero.predict_sent_bytes(model)
            assert sent.bytes == predicted["gradients"], (stage, dtype)
            own = sent.collectives["all_gather_into_tensor"][1]  # sent to each other rank
            others = dist.get_world_size() - 1
            assert own * others == predicted["parameters"], (stage, dtype)
            trained = sum(p.requires_grad for p in model.parameters())
            assert sent.collectives["all_reduce"] == (1, trained)
            assert set(sent.collectives) == {"all_gather_into_tensor", "all_reduce"}
            if stage == 1:
                with model.no_sync(), count.record_traffic() as sent:
                    run_backward(model, plain)
                assert not sent.bytes  # gradients stay here


def test_states_and_messages_are_as_predicted_to_the_byte():
    # Counted by messages: on a GPU ZeRO calls the library's reduce-scatter.
    run_ranks(held_and_sent, 3, device="cpu")


def states_and_back():
    """Load the full weights from four ranks' shards into two ranks' shards of another stage."""
    rank, toy = dist.get_rank(), to_device(ToyModel())
    with torch.no_grad():
        toy.left.weight.fill_(rank)  # all start with rank 0's weights
        toy.seen.fill_(rank)
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    for stage in STAGES:
        model = shard_plain(copy.deepcopy(toy), stage)
        optimizer = adamw(model)
        toy_loss(model, toy_batch(0, rank, 4)).backward()
        optimizer.step()
        state = model.full_state_dict()
        assert list(state) == list(ToyModel().state_dict())
        assert state["seen"] == 4  # buffers, too
        assert torch.equal(state["head.weight"], state["embedding.weight"])
        for other in STAGES:
            second = zero.shard_module(to_device(ToyModel()), pair, other)
            second.load_full_state_dict(state)
            batch = toy_batch(1, 0, 4)
            assert torch.equal(second(batch[0]), model(batch[0]))
            again = second.full_state_dict()
            del again["seen"]
            assert all(torch.equal(again[name], state[name]) for name in again)
        plain = to_device(ToyModel())
        plain.load_state_dict(state)
        assert torch.equal(plain(batch[0]), model(batch[0]))
    return state["left.weight"][0, 1].item()


def test_full_weights_go_out_and_in_between_stages_and_groups():
    assert len(set(run_ranks(states_and_back, 4))) == 1


class Chain(nn.Module):
    """Blocks in a row, with an input that may be passed by keyword and outputs in a dict."""

    def __init__(self, width=8):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Link(width) for _ in range(4))
        self.out = nn.Linear(width, width)

    def forward(self, x, recompute=False, order=(0, 1, 2, 3), fail=False):
        for number in order:
            block = self.blocks[number]
            if recompute:
                x = checkpoint(lambda x, b=block: b(x=x)["y"], x, use_reentrant=False)
            else:
                x = block(x=x)["y"]
        if fail:
            x.register_hook(lambda _: 1 // 0)
        return self.out(x)


class Link(nn.Module):
    """Model with two layers, one of them frozen, and an unused layer."""

    def __init__(self, width):
        super().__init__()
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.layer = nn.Linear(width, width)
        self.never = nn.Linear(width, width)

    def forward(self, x):
        return {"y": x + self.layer(self.frozen(x)).tanh(), "shape": x.shape}


CALLS = {
    "once": {},
    "recomputed": {"recompute": True},
    "one unit twice": {"order": (0, 1, 1, 3)},
    "other order": {"order": (2, 0, 3, 1)},
    "some unused": {"order": (1, 2)},
}


def ways_through():
    serial = to_device(Chain())
    x = to_device(torch.randn(3, 8, generator=torch.Generator().manual_seed(dist.get_rank())))
    settings = [
        {},
        {"prefetch": False},
        {"reshard": False},
        {"units": []},
        {"reduction": "library"},
        {"reduction": "library", "reshard": False},
    ]
    models = [zero.Zero3(copy.deepcopy(serial), dist.group.WORLD, **s) for s in settings]
    chain = copy.deepcopy(serial)
    pairs = [chain.blocks[0], [chain.blocks[1], chain.blocks[2]], chain.out]
    models.append(zero.Zero3(chain, dist.group.WORLD, units=pairs))
    models += [shard_plain(copy.deepcopy(serial), stage) for stage in (1, 2)]
    for name, call in CALLS.items():
        for number, model in enumerate(models):
            expected = to_device(Chain())
            for r in range(dist.get_world_size()):
                share = to_device(torch.randn(3, 8, generator=torch.Generator().manual_seed(r)))
                (expected(share, **call).square().mean() / dist.get_world_size()).backward()
            if number % 2:  # a forward without a backward in between does no harm
                with torch.no_grad():
                    model(x)
            model(x, **call).square().mean().backward()
            found = gather_gradients(model, dist.group.WORLD)
            trained = [(k, p) for k, p in expected.named_parameters() if p.requires_grad]
            for key, parameter in trained:
                wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                # Up to 4 ranks x 2 uses in two orders: 2 * 7 * 2^-24 of gradients of up to 0.6.
                assert (found[key] - wanted).abs().max() < 5e-7, (name, number, key)
            unused = dict(model.named_parameters())["blocks.1.never.weight"]
            assert unused.grad is None
            model.zero_grad()
            if isinstance(model, zero.Zero3):
                assert all(p.numel() == 0 for p in model.module.parameters())
                assert all(f.full.untyped_storage().nbytes() == 0 for f in model.flats)


def test_units_in_any_order_twice_or_recomputed():
    run_ranks(ways_through, 2)


def under_way():
    tokens = to_device(torch.zeros(2, 64, dtype=torch.int64))
    sent = []
    for stage in STAGES:
        model = shard_plain(to_device(GPT(PRESETS["nano"])), stage)
        embedding = model.module.embedding.weight  # its gradient is the last to come
        embedding.register_post_accumulate_grad_hook(
            lambda _, m=model: sent.append(len(m.reducer.sent))
        )
        loss(model(tokens), tokens).backward()
        assert model.reducer.sent == []  # all finished
    states = []
    for prefetch in (True, False):
        model = zero.Zero3(to_device(GPT(PRESETS["nano"])), dist.group.WORLD, prefetch=prefetch)

        def record_state(*_, model=model):
            units = [model.rest, *model.units]
            states.append("".join(unit.flats[0].state[0] for unit in units))

        first, second = model.module.blocks
        first.attention.register_forward_pre_hook(record_state)
        second.ffn.register_forward_pre_hook(record_state)
        # Of each block's gradients the norm's comes last.
        second.attention_norm.weight.register_post_accumulate_grad_hook(record_state)
        first.attention_norm.weight.register_post_accumulate_grad_hook(record_state)
        loss(model(tokens), tokens).backward()
        record_state()
    return sent, states


def test_gradients_leave_and_units_come_while_others_are_computed():
    for sent, states in run_ranks(under_way, 2):
        assert min(sent) > 0
        # The rest, the first and the second block: full, gathering or sharded. Blocks are freed
        # after their forward, the next one comes during it; in backward the other way around.
        assert states[:5] == ["ffg", "fsf", "fgf", "ffs", "sss"]
        assert states[5:] == ["ffs", "fsf", "fsf", "ffs", "sss"]


def interrupt_backward():
    """After an error in backward, a forward is required, and the next step is right."""
    found = []
    for stage in STAGES:
        x = to_device(torch.randn(3, 8, generator=torch.Generator().manual_seed(dist.get_rank())))
        model = shard_plain(to_device(Chain()), stage)
        model(x).sum().backward()
        wanted = gather_gradients(model, dist.group.WORLD)
        model.zero_grad()
        other = model(x).sum()
        with pytest.raises(ZeroDivisionError):
            model(x, fail=True).sum().backward()
        with pytest.raises(RuntimeError, match="forward"):  # its gradients would be only local
            other.backward()
        model.zero_grad()
        model(x).sum().backward()
        again = gather_gradients(model, dist.group.WORLD)
        found.append(max_gap(list(wanted.values()), list(again.values())))
    return found


def test_an_interrupted_backward_leaves_nothing_behind():
    assert run_ranks(interrupt_backward, 2) == [[0.0] * 3] * 2


def by_hand():
    """Step without an optimizer: the forward needs `mark_changed()`, and equals one process."""
    rank = dist.get_rank()
    for stage in STAGES:
        model, plain = shard_plain(to_device(Chain()), stage), to_device(Chain())
        shares = [
            to_device(torch.randn(3, 8, generator=torch.Generator().manual_seed(r))) for r in (0, 1)
        ]
        model(shares[rank]).sum().backward()
        for share in shares:
            (plain(share).sum() / 2).backward()
        with torch.no_grad():
            for one in (model, plain):
                for parameter in one.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
        if stage < 3:
            with pytest.raises(RuntimeError, match="changed by hand"):
                model(shares[rank])
        model.mark_changed()
        assert torch.equal(model(shares[rank]), plain(shares[rank]))


def test_pieces_that_were_changed_by_hand_are_never_stale():
    run_ranks(by_hand, 2)
