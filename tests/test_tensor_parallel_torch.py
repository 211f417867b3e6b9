"""Our tensor parallelism beside torch's parallelize_module; and the benchmark of the two.

Torch's side is `by_torch` of the benchmark: what is timed there is what is compared here.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from commands import benchmark
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from shardlab import ranks, tensor_parallel
from shardlab.gpt.model import GPT, PRESETS, Config, loss
from shardlab.measure import link

TINY = replace(PRESETS["nano"], seq=16, heads=4, vocab=96)
CASES = {
    "gelu, tied": TINY,
    "swiglu, grouped, untied": Config(
        vocab=64, seq=16, layers=2, heads=8, hidden=64, kv_heads=4, ffn=96,
        mlp="swiglu", norm="rms", bias=False, tied=False,
    ),
}  # fmt: skip
STEPS = 5


def local(tensor, like=None):
    """This rank's part; a gradient cut as its parameter is, where torch left it otherwise."""
    if not isinstance(tensor, DTensor):
        return tensor
    return (tensor if like is None else tensor.redistribute(placements=like.placements)).to_local()


def trained(config, batches_NBS, group, ours):
    """Logits, losses, gradients of the first step, weights after all: this rank's own."""
    torch.manual_seed(0)
    model = GPT(config).double().to(ranks.device())
    if ours:
        tensor_parallel.parallelize(model, group)
    else:
        benchmark("tensor_parallel")["by_torch"](model, group)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.1, foreach=False)
    losses, first = [], {}
    for tokens_BS in batches_NBS:
        with loss_parallel():
            logits_BSv = model(tokens_BS)
            if ours:
                value = tensor_parallel.loss(logits_BSv, tokens_BS, group)
            else:
                value = loss(logits_BSv, tokens_BS)
            value.backward()
        losses.append(value.item())
        if not first:
            first["logits"] = local(logits_BSv).detach()
            first |= {f"{n}, gradient": local(p.grad, p) for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: local(p).detach() for name, p in model.named_parameters()}
    return losses, first | weights


def apart(slow):
    """On a rank, by case: both sides' losses, and by tensor how far ours is from torch's."""
    group = link.slow(1e-5, 1e10) if slow else dist.group.WORLD
    found = {}
    for case, config in CASES.items():
        torch.manual_seed(1)
        batches_NBS = torch.randint(config.vocab, (STEPS, 3, config.seq)).to(ranks.device())
        (got, ours), (want, theirs) = (
            trained(config, batches_NBS, group, o) for o in (True, False)
        )
        assert ours.keys() == theirs.keys()
        far = {}
        for name, tensor in theirs.items():
            assert ours[name].shape == tensor.shape, name  # the same part of it, too
            far[name] = ((ours[name] - tensor).abs().max() / tensor.abs().max()).item()
        found[case] = got, want, far
    return found


# float64: sums of some hundred numbers in another order, 1e-14 of the largest; AdamW divides the
# smallest gradients by themselves, and makes it up to a thousand times as much in five steps.
@pytest.mark.parametrize(("size", "slow"), [(4, False), (2, True)])
def test_torch_computes_the_same(size, slow):
    device = "cpu" if slow else "auto"  # torch's collectives over the emulated link
    for rank, found in enumerate(ranks.run(apart, size, slow, device=device, show=False)):
        for case, (got, want, far) in found.items():
            assert got == pytest.approx(want, rel=1e-12), (case, rank)
            assert want[-1] < want[0]
            assert max(far.values()) < 1e-11, (case, rank, max(far, key=far.get))
