"""Our pipeline beside torch.distributed.pipelining: the same bits; and the benchmark of the two."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

from shardlab import link, pipeline, ranks
from shardlab.model import GPT, PRESETS, loss

ROOT = Path(__file__).resolve().parents[1]
THEIRS = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zb-v": pipelining.ScheduleZBVZeroBubble,
}
if torch.__version__ < "2.13":  # there it sends to itself, and gloo carries no such message
    del THEIRS["zb-v"]
# Torch ties nothing over stages, so the head has weights of its own.
CONFIG = replace(PRESETS["nano"], layers=8, seq=16, tied=False)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def whole():
    torch.manual_seed(0)
    return GPT(CONFIG)


def trained_by_torch(schedule, batches, group):
    """Losses and named gradients and weights of this rank after AdamW steps by torch's schedule."""
    mine = schedule.placement[dist.get_rank()]
    parts = pipeline.cut(whole(), schedule.parts)
    stages = [
        pipelining.PipelineStage(
            parts[part], part, schedule.parts, torch.device("cpu"), group=group
        )
        for part in mine
    ]
    made = THEIRS[schedule.name](
        stages if schedule.chunks > 1 else stages[0], schedule.microbatches, loss_fn=loss
    )
    modules = nn.ModuleList(parts[part] for part in mine)
    optimizer = adamw(modules.parameters())
    values = []
    for batch in batches:
        optimizer.zero_grad()
        losses = []
        made.step(
            *([batch] if 0 in mine else []),
            **({"target": batch, "losses": losses} if schedule.parts - 1 in mine else {}),
            return_outputs=False,
        )
        optimizer.step()
        values.append(torch.stack(losses).mean().item() if losses else None)
    named = {name: p for part in mine for name, p in parts[part].named_parameters()}
    return values, named


def trained_by_us(schedule, batches, group):
    """The same by ours."""
    piped = pipeline.distribute(whole(), schedule, group)
    optimizer = adamw(piped.parameters())
    values = []
    for batch in batches:
        optimizer.zero_grad()
        value = piped.step(batch, batch)
        optimizer.step()
        values.append(None if value is None else value.item())
    return values, dict(piped.named_parameters())


def both(slow, microbatches):
    """On a rank, by schedule: the losses, and names whose gradients or weights are not equal."""
    group = link.slow(1e-4, 1e9) if slow else dist.group.WORLD
    found = []
    for name in THEIRS:
        schedule = pipeline.schedule(name, dist.get_world_size(), microbatches)
        torch.manual_seed(1)
        batches = torch.randint(CONFIG.vocab, (3, 2 * microbatches, CONFIG.seq))
        want, theirs = trained_by_torch(schedule, batches, group)
        got, ours = trained_by_us(schedule, batches, group)
        assert sorted(ours) == sorted(theirs)
        unequal = [
            key
            for key in ours
            if not torch.equal(ours[key], theirs[key])
            or not torch.equal(ours[key].grad, theirs[key].grad)
        ]
        found.append((got, want, unequal))
    return found


@pytest.mark.parametrize(("size", "m", "slow"), [(2, 4, False), (4, 8, False), (4, 4, True)])
def test_torch_computes_the_same_bits(size, m, slow):
    # Torch divides the sum of the micro-batches' gradients by m, we weigh each loss with 1/m
    # before its backward: for m a power of two both are exact, and so the same to the last bit. On
    # a GPU the embedding's gradient is a sum in changing order, and one run differs from the next.
    for rank, found in enumerate(ranks.run(both, size, slow, m, device="cpu")):
        for name, (got, want, unequal) in zip(THEIRS, found, strict=True):
            assert unequal == [], (name, m, rank)
            last = pipeline.schedule(name, size, m).placement[rank]
            assert (got[0] is not None) == (pipeline.schedule(name, size, m).parts - 1 in last)
            # The last rank alone knows the loss: the mean of m values, added in another order.
            if got[0] is not None:
                assert got == pytest.approx(want, rel=1e-6), (name, m)
