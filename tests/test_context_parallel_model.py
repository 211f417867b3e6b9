"""The plain GPT on a context cut over ranks: costs, mistakes; it equals: `rows.contexts`."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from devices import here
from torch.distributed.device_mesh import init_device_mesh

from shardlab import context_parallel as cp
from shardlab import ranks
from shardlab.gpt.model import GPT, Config
from shardlab.measure import count

SHAPE = {"vocab": 64, "seq": 16, "layers": 2, "heads": 4, "hidden": 32}
LLAMA = {"kv_heads": 2, "mlp": "swiglu", "norm": "rms", "bias": False, "tied": False}


def run(fn, size, *args, device="auto", timeout=100):
    return ranks.run(fn, size, *args, device=device, timeout=timeout)


def gpt(**choices):
    torch.manual_seed(0)
    return here(GPT(Config(**(SHAPE | choices))))


def activations(way):
    """A shape, and the bytes that the model keeps for backward on this rank, before the loss."""
    config = Config(**(SHAPE | LLAMA | {"seq": 64, "heads": 8, "hidden": 64}))
    torch.manual_seed(0)
    model = cp.distribute(GPT(config), dist.group.WORLD, way, "contiguous")
    tokens = cp.shard(torch.randint(64, (1, 64)), dist.group.WORLD, "contiguous")
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


# On a GPU

NEEDS_A_GPU = pytest.mark.skipif(
    not torch.cuda.device_count(),
    reason="this machine has no CUDA GPU; torch's context parallelism runs on no CPU",
)


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
