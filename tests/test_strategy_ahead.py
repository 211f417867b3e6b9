"""Modules that predict further tokens, in a plan: DeepSeek-V3, which was trained with one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardlab import memory
from shardlab.common.machines import MACHINES
from shardlab.common.shapes import PRESETS
from shardlab.layout import Layout, structure
from shardtools.hub.ahead import with_modules
from shardtools.strategy import models
from shardtools.strategy.cost import flops
from shardtools.strategy.emit import emit

GIVEN = json.loads((Path(__file__).parent / "configs" / "deepseek-v3.json").read_text())
PLAIN = models.named("deepseek-v3")
ONE = with_modules(PLAIN, GIVEN, 1)
H, V = PLAIN.hidden, PLAIN.vocab
LAYER = PLAIN.kinds[-1].parameters
MODULE = LAYER + 2 * H * H + 3 * H
# Elements of the published checkpoint in BF16 and in FP8, as the hub counts its safetensors; those
# in F32 are scales, and what the router adds to choices. It has embedding and head twice.
PUBLISHED = 3_918_786_560 + 680_571_043_840


def test_the_published_checkpoint_has_one() -> None:
    assert ONE.total == PLAIN.total + MODULE
    assert ONE.total + 2 * V * H == PUBLISHED
    assert (ONE.layers, len(ONE.order), ONE.ahead) == (61, 62, 1)
    assert round((ONE.total - PLAIN.total) / 1e9, 1) == 11.6  # "11.5B unique", says its README


def test_its_operations_are_those_of_published_rates() -> None:
    """NVIDIA's TFLOP/s over its tokens per second is 260.0e9 a token, at 4,096 in a sequence."""
    kind = PLAIN.kinds[PLAIN.order[-1]]
    met = sum(p.inputs * p.outputs * (8 if p.expert else 1) for p in kind.products)
    more = 6 * (met + 2 * H * H + V * H) + 3 * kind.core.flops(4096)
    found = [flops(model, 1000, 4096) for model in (PLAIN, ONE)]
    assert found[1] - found[0] == pytest.approx(1000 * more, rel=1e-9)
    assert found[1] / 1000 == pytest.approx(260.0e9, rel=0.005)


STAGES = (7, 8, 8, 8, 8, 8, 8, 6)  # of its 61 layers: its first ones stand beside the embedding
AT = Layout(
    dp=32, pp=8, ep=32, zero=1, microbatches=32, schedule="interleaved", chunks=2, stages=STAGES
)


def held(model, stage: int, tp: int = 1) -> int:
    at = replace(AT, tp=tp, ep=1, dp=1, sequence_parallel=tp > 1)
    return sum(memory.parameters(model, at, stage).values())


def test_it_stands_on_the_last_stage_with_an_embedding_of_its_own() -> None:
    placed = AT.parts(ONE)
    assert [stage.layers for stage in placed] == [7, 8, 8, 8, 8, 8, 8, 7]
    assert placed[-1].chunks[-1].stop == 62 and placed[-1].head
    for stage in range(7):
        assert held(ONE, stage) == held(PLAIN, stage)
    assert held(ONE, 7) == 6 * LAYER + MODULE + H + 2 * V * H
    for tp in (2, 8):  # the matrix is cut by its outputs
        cut = held(ONE, 7, tp) - held(PLAIN, 7, tp)
        layer = held(PLAIN, 3, tp) // 8
        assert cut == layer + (2 * H * H + V * H) // tp + 3 * H
    # Where the head stands on the first stage, so does the module.
    there = replace(AT, schedule="zb-v", stages=(8,) * 7 + (5,))
    assert [stage.layers for stage in there.parts(ONE)] == [9, *(8,) * 6, 5]


def test_megatron_is_told_of_it_and_others_refuse_it() -> None:
    own = with_modules(structure(PRESETS["deepseek-v3"]), GIVEN, 1)
    at = Layout(dp=8, pp=8, ep=8, zero=1, microbatches=8, stages=STAGES)
    text = emit("megatron", own, MACHINES["h100"], at, 4096)
    assert "--mtp-num-layers 1 " in text and '"Et*7|(t*8|)*6t*6mL"' in text
    assert "--num-layers 61 " in text
    assert "mtp" not in emit("megatron", PRESETS["deepseek-v3"], MACHINES["h100"], at, 4096)
    plain = with_modules(structure(PRESETS["llama-3-8b"]), {"num_mtp_modules": 2}, 2)
    for engine in ("torchtitan", "deepspeed", "course", "slurm"):
        with pytest.raises(ValueError, match="mtp=2"):
            emit(engine, plain, MACHINES["h100"], Layout(dp=8))
