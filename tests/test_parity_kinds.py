"""Other kinds of programs: mixed precision, compiled blocks, images, experts, torch's schedules."""

import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from parity_programs import GPT2, UNTIED, batch, row
from sides import optimizer, plain_loss
from test_parity_more import compared
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shardlab import pipeline
from shardlab.layout import Layout

BFLOAT16 = torch.bfloat16
ROW = row("data", GPT2, Layout(dp=2), options={"way": "parameters"})


def here(x: Tensor) -> Tensor:
    """This rank's share of a batch."""
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def tokens(step: int) -> Tensor:
    return here(batch(ROW, step)[0])


def targets(step: int) -> Tensor:
    return here(batch(ROW, step)[1])


def language() -> nn.Module:
    return ROW.model(GPT2)


def images(step: int) -> Tensor:
    return here(torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(step)))


def labels(step: int) -> Tensor:
    return here(torch.randint(5, (8,), generator=torch.Generator().manual_seed(step)))


def convnet(norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), norm(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3), norm(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 5),
    )  # fmt: skip


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=16,
                       intermediate_size=48, patch_size=4, num_labels=5,
                       hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
    return ViTForImageClassification(config)


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                           num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
                           num_experts_per_tok=2, max_position_embeddings=32)  # fmt: skip
    return MixtralForCausalLM(config)


def qwen() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(vocab_size=64, hidden_size=32, intermediate_size=48, head_dim=8,
                            moe_intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
                            num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
                            decoder_sparse_step=1, max_position_embeddings=32)  # fmt: skip
    return Qwen3MoeForCausalLM(config)


def entropy(output: Any, wanted: Tensor) -> Tensor:
    logits = getattr(output, "logits", output)
    if logits.dim() == 3:
        return plain_loss(logits, wanted)
    return F.cross_entropy(logits, wanted)


def same(model: nn.Module) -> nn.Module:
    return model


def ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def in_few_bits(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook of DDP's, which averages in bfloat16."""
    narrow = bucket.buffer().to(BFLOAT16).div_(dist.get_world_size())
    work = dist.all_reduce(narrow, async_op=True).get_future()
    return work.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def ddp_in_few_bits(model: nn.Module) -> nn.Module:
    model = ddp(model)
    model.register_comm_hook(None, in_few_bits)
    return model


def fsdp(*policy: Any) -> Callable[[nn.Module], nn.Module]:
    def wrapped(model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        options = {"mp_policy": MixedPrecisionPolicy(*policy)} if policy else {}
        layers = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
        for block in layers[0] if layers else ():
            fully_shard(block, mesh=mesh, **options)
        return fully_shard(model, mesh=mesh, **options)

    return wrapped


def blocks(backend: str) -> Callable[[nn.Module], nn.Module]:
    """Each block compiled in its place."""

    def compiled(model: nn.Module) -> nn.Module:
        for block in model.blocks:
            block.compile(backend=backend)
        return model

    return compiled


def warm(model: nn.Module) -> nn.Module:
    """Compiled before anybody watches."""
    blocks("eager")(model)(tokens(0))
    return model


def wrapped_blocks(model: nn.Module) -> nn.Module:
    for n, block in enumerate(model.blocks):
        model.blocks[n] = torch.compile(block, backend="eager")
    return model


@dataclass(frozen=True)
class Kind:
    """A program of a model, trained in copies; on one rank it is the plain one."""

    model: Callable[[], nn.Module] = language
    x: Callable[[int], Tensor] = tokens
    y: Callable[[int], Tensor] = targets
    wrap: Callable[[nn.Module], nn.Module] = same
    made: Callable[[nn.Module], nn.Module] = same
    cast: bool = False
    steps: int = 2

    def __call__(self, watch: Any) -> None:
        warnings.filterwarnings("ignore")
        torch._dynamo.reset()  # what was compiled before, without hooks, would be taken again
        model = self.made(self.model())
        model = self.wrap(model) if dist.get_world_size() > 1 else model
        o = optimizer(model, 1e-2)
        watch(model, o)
        for step in range(self.steps):
            o.zero_grad()
            with torch.autocast("cpu", BFLOAT16) if self.cast else nullcontext():
                loss = entropy(model(self.x(step)), self.y(step))
            loss.backward()
            o.step()


FULL, CAST = Kind(), Kind(cast=True)
IMAGES = {"x": images, "y": labels}
CONV, VIT = Kind(convnet, **IMAGES), Kind(vit, **IMAGES)
GROUPS = Kind(lambda: convnet(lambda n: nn.GroupNorm(2, n)), **IMAGES)
MIXTRAL, QWEN = Kind(mixtral), Kind(qwen)
DEEP = row("pipeline", replace(UNTIED, layers=4), Layout(pp=2, schedule="1f1b", microbatches=4))


def deep(watch: Any) -> None:
    """What torch's schedules are compared with."""
    model = DEEP.model(DEEP.config)
    o = optimizer(model, 1e-2)
    watch(model, o)
    x, y = batch(DEEP, 0)
    plain_loss(model(x), y).backward()
    o.step()


def scheduled(name: str, v: bool = False, turned: bool = False) -> Callable[[Any], None]:
    """One of torch's schedules with two stages a rank."""

    def program(watch: Any) -> None:
        warnings.filterwarnings("ignore")
        rank, n = dist.get_rank(), dist.get_world_size()
        parts = pipeline.cut(DEEP.model(DEEP.config), 2 * n)
        mine = [rank, 2 * n - 1 - rank if v else rank + n]
        own = [parts[m] for m in mine]
        stages = [pipelining.PipelineStage(p, m, 2 * n, torch.device("cpu"))
                  for p, m in zip(own, mine, strict=True)]  # fmt: skip
        made = getattr(pipelining, name)(stages, 4, loss_fn=plain_loss, scale_grads=not turned)
        parameters = nn.ModuleList(own)
        o = optimizer(parameters, 1e-2)
        watch(own, o)
        x, y = batch(DEEP, 0)
        last = {"target": y} if 2 * n - 1 in mine else {}
        made.step(*((x,) if rank == 0 else ()), **last)
        o.step()

    return program


RIGHT: dict[str, tuple[Any, Any, int]] = {
    "autocast": (CAST, replace(CAST, wrap=ddp), 2),
    "autocast, FSDP2's policy": (CAST, replace(FULL, wrap=fsdp(BFLOAT16, torch.float32)), 2),
    "FSDP2": (FULL, replace(FULL, wrap=fsdp()), 2),
    "compiled, eager": (FULL, replace(FULL, wrap=ddp, made=blocks("eager")), 2),
    "compiled, aot_eager": (FULL, replace(FULL, wrap=ddp, made=blocks("aot_eager")), 2),
    "compiled before": (FULL, replace(FULL, wrap=ddp, made=warm), 2),
    "compiled blocks in wrappers": (FULL, replace(FULL, wrap=ddp, made=wrapped_blocks), 2),
    "compiled, whole": (FULL, replace(FULL, made=lambda m: torch.compile(m, backend="eager")), 1),
    "groups' norm": (GROUPS, replace(GROUPS, wrap=ddp), 2),
    "batch norm on one rank": (CONV, CONV, 1),
    "ViT": (VIT, replace(VIT, wrap=ddp), 2),
    "ViT, FSDP2": (VIT, replace(VIT, wrap=fsdp()), 2),
    "Mixtral": (MIXTRAL, replace(MIXTRAL, wrap=ddp), 2),
    "Mixtral, FSDP2": (MIXTRAL, replace(MIXTRAL, wrap=fsdp()), 2),
    "Qwen's experts": (QWEN, replace(QWEN, wrap=ddp), 2),
    "Qwen's experts, FSDP2": (QWEN, replace(QWEN, wrap=fsdp()), 2),
    "eight ranks": (FULL, replace(FULL, wrap=ddp), 8),
    "eight ranks, FSDP2": (FULL, replace(FULL, wrap=fsdp()), 8),
    "torch's interleaved 1F1B": (deep, scheduled("ScheduleInterleaved1F1B"), 2),
    "torch's interleaved zero bubble": (deep, scheduled("ScheduleInterleavedZeroBubble"), 2),
    "torch's zero bubble in a V": (deep, scheduled("ScheduleZBVZeroBubble", True), 2),
}
WRONG: dict[str, tuple[Any, Any, int, str, str]] = {
    "averaged in few bits": (
        FULL, replace(FULL, wrap=ddp_in_few_bits), 2, "0 gradient ", "of bfloat16",
    ),
    "reduced in few bits": (
        FULL, replace(FULL, wrap=fsdp(None, BFLOAT16)), 2, "0 gradient ", "bfloat16",
    ),
    "cast on one side": (
        FULL, replace(CAST, wrap=ddp), 2, r"0 forward blocks\.0",
        "40 outputs are of another dtype.*attention.query: bfloat16, and float32 there",
    ),
    "batch norm, each its own": (
        CONV, replace(CONV, wrap=ddp), 2, "0 forward 1", "another one",
    ),
    "micro-batches not averaged": (
        deep, scheduled("ScheduleInterleaved1F1B", turned=True), 2, "0 gradient ",
        "4 micro-batches",
    ),
}  # fmt: skip

# Of all of them: those that take no seconds to import or compile. The rest once a week.
SHORT = (
    "autocast, FSDP2's policy", "groups' norm", "torch's zero bubble in a V", "reduced in few bits",
    "batch norm, each its own",
)  # fmt: skip


@cache
def reports(whole: bool) -> dict[str, Any]:
    cases = RIGHT | {name: case[:3] for name, case in WRONG.items()}
    return compared({name: case for name, case in cases.items() if whole or name in SHORT})


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", RIGHT)
def test_other_kinds_of_right_programs_are_silent(name, request):
    whole = request.config.getoption("--whole")
    if name not in SHORT and not whole:
        pytest.skip("--whole compares all of them")
    report = reports(whole)[name]
    assert not isinstance(report, str) and report.equal, report
    assert report.compared > 50
    unseen = "44 have nothing to be compared with, first the output of blocks.0.attention_norm"
    assert (unseen in str(report)) == (name == "compiled before")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", WRONG)
def test_mistakes_of_other_kinds_are_named(name, request):
    *_, place, words = WRONG[name]
    whole = request.config.getoption("--whole")
    if name not in SHORT and not whole:
        pytest.skip("--whole compares all of them")
    report = reports(whole)[name]
    assert re.search(words, str(report).replace("\n", " ")), report
    key = report.first.key
    assert re.search(place, f"{key.step} {key.phase} {key.name}"), report
