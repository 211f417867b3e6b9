"""The plain GPT on a context cut over ranks equals one process; beside torch's, on a GPU."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from devices import here
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from shardlab import context_parallel as cp
from shardlab import count, link, ranks
from shardlab import tensor_parallel as tp
from shardlab.model import GPT, PRESETS, Config, loss, rotate

SHAPE = {"vocab": 64, "seq": 16, "layers": 2, "heads": 4, "hidden": 32}
LLAMA = {"kv_heads": 2, "mlp": "swiglu", "norm": "rms", "bias": False, "tied": False}
WAYS = [(way, layout) for way in ("ring", "ulysses") for layout in cp.LAYOUTS]


def run(fn, size, *args, device="auto", timeout=100):
    return ranks.run(fn, size, *args, device=device, timeout=timeout)


def gpt(**choices):
    torch.manual_seed(0)
    return here(GPT(Config(**(SHAPE | choices))))


def batch(step):
    torch.manual_seed(step)
    tokens = here(torch.randint(64, (2, 17)))
    return tokens[:, :-1], tokens[:, 1:]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=False)


def five_steps(choices, way, layout, dtype=torch.float64, recompute=False, group=None):
    """Largest differences to one process: losses and logits; weights after five steps."""
    group = group or dist.group.WORLD
    serial = gpt(**choices).to(dtype)
    model = cp.distribute(copy.deepcopy(serial), group, way, layout)
    for block in model.blocks if recompute else ():
        block.forward = Recomputed(block.forward)
    optimizers = [adamw(model), adamw(serial)]
    seen = 0.0
    for step in range(5):
        tokens, targets = batch(step)
        mine = [cp.share(x, group, layout) for x in (tokens, targets)]
        for optimizer in optimizers:
            optimizer.zero_grad()
        logits = model(mine[0])
        value = loss(logits, mine[1])
        value.backward()
        cp.average_gradients(model, group)
        whole = serial(tokens)
        expected = loss(whole, targets)
        expected.backward()
        for optimizer in optimizers:
            optimizer.step()
        seen = max(
            seen,
            abs(cp.average(value, group) - expected.item()),
            (cp.gather(logits, group, layout) - whole).abs().max().item(),
        )
    pairs = zip(model.state_dict().values(), serial.state_dict().values(), strict=True)
    return seen, max((a - b).abs().max().item() for a, b in pairs)


class Recomputed:
    def __init__(self, forward):
        self.forward = forward

    def __call__(self, x):
        return checkpoint(self.forward, x, use_reentrant=False)


def all_cases():
    found = {}
    for choices in ({}, LLAMA):
        for way, layout in WAYS:
            found[way, layout, len(choices)] = five_steps(choices, way, layout)
    found["recomputed"] = five_steps({}, "ring", "zigzag", recompute=True)
    if dist.get_world_size() == 2:
        found["slow"] = five_steps({}, "ring", "zigzag", group=link.slow(1e-5, 1e9))
    return found


@pytest.mark.parametrize("size", [1, 2, 4])
def test_five_steps_equal_one_process(size):
    for results in run(all_cases, size):
        for case, differences in results.items():
            # float64 rounds at 1e-16; sums in another order, then five AdamW steps of 1e-2, which
            # divide by gradients of 1e-4 and more. Positions counted from 0 on each rank: 1e-2.
            assert max(differences) < 1e-10, (case, differences)


def test_float32():
    def work():
        return [five_steps(LLAMA, *way, dtype=torch.float32) for way in WAYS]

    for results in run(work, 2):
        for losses, weights in results:
            # Units of 6e-8, which AdamW's division by small gradients makes larger in few weights.
            assert losses < 1e-3 and weights < 1e-3


def test_positions_are_those_of_the_whole_sequence():
    x = torch.randn(2, 3, 12, 8)
    whole = rotate(x, 1e4)
    for layout in cp.LAYOUTS:
        for rank in range(3):
            mine = cp.split(x, 3, rank, layout, dim=2)
            turned = rotate(mine, 1e4, cp.positions(layout, 12, 3, rank))
            assert turned.equal(cp.split(whole, 3, rank, layout, dim=2))  # the same operations


def heads_and_tokens(way):
    """Two ranks share the heads and every matrix, and two such pairs share the tokens."""
    rank, layout = dist.get_rank(), "zigzag"
    pairs = [dist.new_group(members) for members in ([0, 1], [2, 3], [0, 2], [1, 3])]
    heads, tokens = pairs[rank // 2], pairs[2 + rank % 2]
    serial = gpt(**LLAMA).double()
    model = tp.parallelize(copy.deepcopy(serial), heads)
    model = cp.distribute(model, tokens, way, layout)
    x, y = (cp.share(each, tokens, layout) for each in batch(0))
    tp.loss(model(x), y, heads).backward()
    cp.average_gradients(model, tokens)
    loss(serial(batch(0)[0]), batch(0)[1]).backward()
    gaps, cuts = [], tp.cuts(model)
    for (name, p), q in zip(model.named_parameters(), serial.parameters(), strict=True):
        whole, dim = q.grad, cuts[name]
        mine = whole if dim is None else whole.chunk(2, dim)[rank % 2]
        gaps.append((p.grad - mine).abs().max().item())
    return max(gaps)


@pytest.mark.parametrize("way", ["ring", "ulysses"])
def test_with_tensor_parallelism(way):
    assert max(run(heads_and_tokens, 4, way)) < 1e-12  # sums in another order, in float64


def activations(way):
    """A shape, and the bytes that the model keeps for backward on this rank, before the loss."""
    config = Config(**(SHAPE | LLAMA | {"seq": 64, "heads": 8, "hidden": 64}))
    torch.manual_seed(0)
    model = cp.distribute(GPT(config), dist.group.WORLD, way, "contiguous")
    tokens = cp.share(torch.randint(64, (1, 64)), dist.group.WORLD, "contiguous")
    with count.saved(model, tokens) as saved:
        model(tokens)
    return config, saved.bytes


def test_activations_are_divided_by_the_ranks():  # predicted are the CPU's kernels
    for way in ("ring", "ulysses"):
        ((config, whole),) = run(activations, 1, way, device="cpu")
        for size in (2, 4):
            # To the byte. Two heads of keys and values on four ranks: both are kept twice.
            keys = 2 * config.layers * 64 * config.key_value_heads * config.head_size * 4
            repeated = keys if (way, size) == ("ulysses", 4) else 0
            for _, counted in run(activations, size, way, device="cpu"):
                assert counted == (whole + repeated) // size, (way, size)


def mistakes():
    group, found = dist.group.WORLD, {}
    distributed = cp.distribute(gpt(), group)
    calls = {
        "attention": lambda: cp.distribute(gpt(), group, "flash"),
        "layout": lambda: cp.distribute(gpt(), group, layout="striped"),
        "dropout": lambda: cp.distribute(gpt(dropout=0.1), group),
        "again": lambda: cp.distribute(distributed, group),
        "heads": lambda: cp.distribute(gpt(heads=1), group, "ulysses"),
        "model": lambda: cp.distribute(torch.nn.Linear(2, 2), group),
        "seq": lambda: cp.share(torch.zeros(1, 6), group, "zigzag"),
    }
    for name, call in calls.items():
        with count.sent() as sent, pytest.raises(ValueError) as caught:
            call()
        assert not sent.calls and not sent.bytes
        found[name] = str(caught.value)
    return found


def test_mistakes_are_named_before_anything_is_sent():
    first, second = run(mistakes, 2)
    assert first == second == {
        "attention": "attention='flash': allowed are 'ring' and 'ulysses'",
        "layout": "layout='striped': allowed are 'contiguous' and 'zigzag'",
        "dropout": "dropout=0.1: allowed is 0 with a context cut",
        "again": "model: is distributed already; allowed is a plain one",
        "heads": "heads=1: 2 ranks need a multiple of 2; the nearest is 2. Ring attention takes any"
        " number",
        "model": "model=Linear: allowed is a shardlab.model.GPT",
        "seq": "seq=6: 2 ranks in layout 'zigzag' need a multiple of 4; the nearest are 4 and 8",
    }  # fmt: skip


# On a GPU

NEEDS_A_GPU = pytest.mark.skipif(
    not torch.cuda.device_count(),
    reason="this machine has no CUDA GPU; torch's context parallelism runs on no CPU",
)


def on_a_gpu(dtype):
    """Ours on ranks that share a GPU or have their own, against one process: largest gap."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole = [torch.randn(2, h, 256, 64, device=ranks.device()).to(dtype) for h in (8, 2, 2)]
    dy = torch.randn_like(whole[0])
    plain = [x.clone().requires_grad_() for x in whole]
    expected = F.scaled_dot_product_attention(*plain, is_causal=True, enable_gqa=True)
    expected.backward(dy)
    worst = 0.0
    for call in (cp.ring_attention, cp.all_to_all_attention):
        mine = [cp.split(x, size, rank, "zigzag", 2).clone().requires_grad_() for x in whole]
        y = call(*mine, group, True, "zigzag")
        y.backward(cp.split(dy, size, rank, "zigzag", 2))
        pairs = [(y, expected), *((m.grad, p.grad) for m, p in zip(mine, plain, strict=True))]
        for got, reference in pairs:
            part = cp.split(reference.detach(), size, rank, "zigzag", 2)
            worst = max(worst, ((got - part).abs().max() / part.abs().max()).item())
    return worst


@NEEDS_A_GPU
@pytest.mark.parametrize(
    "dtype, tolerance",
    # Of the largest: what each dtype rounds to, a few times; float32 may be multiplied in TF32.
    [(torch.float64, 1e-12), (torch.float32, 5e-3), (torch.bfloat16, 3e-2)],
)
def test_ours_equals_one_process_on_a_gpu(dtype, tolerance):
    assert max(ranks.run(on_a_gpu, 2, dtype)) < tolerance


def beside_torch():
    """Ours and torch's context parallelism, the same queries, keys and values: largest gap."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    device = ranks.device()
    torch.manual_seed(0)
    whole = [torch.randn(1, 8, 512, 64, device=device, dtype=torch.bfloat16) for _ in range(3)]
    mine = [cp.split(x, size, rank, "zigzag", 2).clone() for x in whole]
    ours = cp.ring_attention(*mine, group, True, "zigzag")
    theirs = [x.clone() for x in whole]
    mesh = init_device_mesh("cuda", (size,))
    with (
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        context_parallel(mesh, buffers=theirs, buffer_seq_dims=[2, 2, 2]),
    ):  # it balances by the same zig-zag
        y = F.scaled_dot_product_attention(*theirs, is_causal=True)
    return (ours - y).abs().max().item()


@NEEDS_A_GPU
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="nccl wants a GPU for each of two ranks")
def test_ours_equals_torchs_context_parallelism():
    # bfloat16 rounds at 4e-3, and outputs are below 4.
    assert max(ranks.run(beside_torch, 2)) < 0.05


def test_a_preset_keeps_its_names_and_states():
    def work():
        model = GPT(PRESETS["nano"])
        names = list(model.state_dict())
        distributed = cp.distribute(model, dist.group.WORLD)
        return distributed is model and list(model.state_dict()) == names

    assert run(work, 2) == [True, True]
