"""What a rank of tensor parallelism holds: counted on real ranks, beside the prediction.

On a CPU states are equal to the byte, and so is what autograd saves, but for dropout. What is held
may differ by 2 % after forward and by 5 % at the peak: that is what the course promises of any
shape. Here most differ by less than 0.2 %.
"""

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from shardlab import memory, ranks, tensor_parallel
from shardlab.gpt.model import GPT, PRESETS, Config
from shardlab.layout import Layout
from shardlab.measure import count
from shardlab.sequence_parallel import ALONG_SEQUENCE, sum_gradients

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NANO = replace(PRESETS["nano"], heads=4)
LLAMA = Config(
    vocab=512, seq=64, layers=4, heads=8, hidden=128, kv_heads=4, ffn=448,
    mlp="swiglu", norm="rms", bias=False, tied=False,
)  # fmt: skip
SHAPES = {
    "nano": NANO,
    "micro": PRESETS["micro"],
    "llama": LLAMA,
    "long": replace(NANO, seq=512),
    "words": replace(NANO, vocab=8192, tied=False),
    "dropout": replace(NANO, dropout=0.1),
    "qwen": replace(LLAMA, kv_heads=2, head=24, qk_norm=True, window=16, full_every=2),
    "latent": replace(
        LLAMA, kv_heads=None, head=16, latent=48, query_latent=64, rotary=8, value=16
    ),
}


@dataclass(frozen=True)
class Case:
    """A training step on each rank."""

    config: Config
    batch: int = 2
    precision: str = "fp32"
    recompute: str = "none"
    sequence: bool = False  # Megatron's sequence parallelism


def measured(case, device):
    """On a rank: bytes of one training step, after one that warmed up."""
    config, group = case.config, dist.group.WORLD
    torch.manual_seed(0)
    plain = GPT(config).to(device, DTYPES[case.precision])
    edges = ALONG_SEQUENCE if case.sequence else tensor_parallel.REPLICATED
    model = tensor_parallel.parallelize(plain, group, edges)
    if case.recompute == "full":
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    parameters = list(model.parameters())
    master = [] if case.precision == "fp32" else [p.detach().float() for p in parameters]
    optimizer = torch.optim.AdamW(master or parameters, foreach=False)

    def update():  # with master weights one parameter after the other
        if not master:
            optimizer.step()
        for parameter, copy in zip(parameters, master, strict=False):
            copy.grad = parameter.grad.float()
            optimizer.step()
            copy.grad = None
            with torch.no_grad():
                parameter.copy_(copy)

    def forward():
        return tensor_parallel.loss(model(tokens_BS), targets_BS, group)

    size = case.batch, config.seq
    tokens_BS, targets_BS = (torch.randint(config.vocab, size, device=device) for _ in range(2))
    forward().backward()
    update()
    with count.saved(tokens_BS, targets_BS, *parameters) as saved:
        value = forward()
    del value
    kept, peak = [], []
    for _ in range(2):
        model.zero_grad()
        with count.held(model, optimizer, tokens_BS, targets_BS, *master) as held:
            before = held.now
            value = forward()
            kept.append(held.now - before - value.nbytes)
            value.backward()
            if case.sequence:
                sum_gradients(model, group)
            gradients = count.states(model, optimizer)["gradients"]
            update()
        peak.append(held.peak)
        del value
    states = count.states(model, optimizer) | {"gradients": gradients}
    del states["counters"]
    states["optimizer"] += count.bytes_of(master)
    # The threads of gloo hold what they have sent until they get to let go of it, a moment after
    # the message is over. So a step may hold that much more, and the least is the true one.
    return {"states": states, "saved": saved.bytes, "kept": min(kept), "peak": min(peak)}


def all_measured(cases, device):
    return [measured(case, device) for case in cases]


def check(case, found, size, device="cpu"):
    """found: by rank."""
    layout = Layout(
        tp=size, micro_batch=case.batch, recompute=case.recompute, sequence_parallel=case.sequence
    )
    told = {"precision": case.precision, "device": "gpu" if device == "cuda" else "cpu"}
    estimate = memory.estimate(case.config, layout, **told)
    kept = memory.activations(case.config, layout, **told)
    for one in found:
        assert one["states"] == {
            "parameters": estimate.parameters,
            "gradients": estimate.gradients,
            "optimizer": estimate.optimizer,
        }
        if case.recompute == "none":  # what a checkpoint keeps is not saved by autograd
            exact = device == "cpu" and not case.config.dropout  # a GPU's kernels keep seeds
            assert one["saved"] == pytest.approx(kept.saved, rel=0 if exact else 0.02)
    assert min(one["kept"] for one in found) == pytest.approx(kept.saved, rel=0.02)
    assert min(one["peak"] for one in found) == pytest.approx(estimate.peak, rel=0.05)


CASES = {
    **{f"{name}, fp32": Case(config) for name, config in SHAPES.items()},
    "micro, bf16": Case(SHAPES["micro"], precision="bf16"),
    "words, bf16": Case(SHAPES["words"], precision="bf16"),
    "micro, recomputed": Case(SHAPES["micro"], recompute="full"),
    "llama, recomputed": Case(LLAMA, 4, "bf16", "full"),
}
ALONG = {
    f"{name}, along the sequence": replace(case, sequence=True)
    for name, case in CASES.items()
    if name not in ("dropout, fp32", "nano, fp32", "words, fp32")
}


def launch(size, cases, device="cpu"):
    """The results of each case, by rank."""
    results = ranks.run(all_measured, size, cases, device, device=device, show=False)
    return list(zip(*results, strict=True))


@pytest.mark.parametrize(
    ("cases", "size"), [(CASES, 4), (ALONG, 2)], ids=["replicated", "along the sequence"]
)
def test_a_step_holds_what_was_predicted(cases, size):
    for (name, case), found in zip(cases.items(), launch(size, list(cases.values())), strict=True):
        print(name)  # shown where one fails
        check(case, found, size)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_a_step_on_a_gpu_holds_what_was_predicted():
    """Two ranks, by the allocator's own counters; they may share one GPU."""
    names = "micro, fp32", "micro, bf16", "words, bf16"
    cases = [replace(CASES[name], batch=8) for name in names]
    for case, found in zip(cases, launch(2, cases, "cuda"), strict=True):
        check(case, found, 2, "cuda")
