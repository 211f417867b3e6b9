"""What a model is made of, against models that are built and operations that are counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_layout import GATED
from torch.utils.flop_counter import FlopCounterMode

from shardlab import memory
from shardlab.common.machines import MACHINES
from shardlab.common.shapes import PRESETS, Config
from shardlab.gpt.model import GPT
from shardlab.layout import Layout, structure
from shardlab.layout.structure import Core, own_config
from shardtools import strategy

MIXED = replace(GATED, layers=5, dense_layers=2)
SHAPES = {
    "plain": Config(96, 16, 2, 4, 32),
    "gated": replace(MIXED, experts=0, dense_layers=0, shared_experts=0),
    "mixed": MIXED,
    "nano": PRESETS["nano"],
}


@pytest.mark.parametrize("name", SHAPES)
def test_it_has_the_model_s_parameters_and_meets_those_that_a_token_does(name: str) -> None:
    config, found = SHAPES[name], structure(SHAPES[name])
    with torch.device("meta"):
        parameters = dict(GPT(config).named_parameters())
    assert found.total == sum(p.numel() for p in parameters.values())
    experts = [p.numel() for n, p in parameters.items() if ".experts." in n]
    left_out = sum(experts) * (config.experts - config.experts_per_token) // max(1, config.experts)
    assert found.active == found.total - left_out
    assert found.own == own_config(found, run=True) == config


@pytest.mark.parametrize("name", ["plain", "gated"])
def test_operations_are_those_that_torch_counts(name: str) -> None:
    """Forward, where no pair of attention is left out: torch's counter knows of no mask."""
    config = SHAPES[name]
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        GPT(config)(torch.zeros(2, config.seq, dtype=torch.long))
    tokens = 2 * config.seq
    assert 3 * counter.get_total_flops() == strategy.flops(config, tokens, causal=False)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 40),
    st.one_of(st.none(), st.integers(1, 50)),
    st.one_of(st.none(), st.integers(1, 50)),
)
def test_keys_are_those_that_a_mask_shows(seq: int, window: int | None, chunk: int | None) -> None:
    query, key = torch.arange(seq)[:, None], torch.arange(seq)[None]
    seen = key <= query
    if chunk:
        seen &= key // chunk == query // chunk
    elif window:
        seen &= key > query - window
    core = Core(1, 1, 8, 8, None if chunk else window, chunk)
    assert core.keys(seq) == pytest.approx(seen.sum().item() / seq)
    assert core.flops(seq, causal=False) == 2 * 16 * seq


def test_a_structure_is_counted_and_planned_as_its_config_is() -> None:
    config, machine = PRESETS["mixtral-8x7b"], MACHINES["h100"]
    model, layout = structure(config), Layout(dp=8, tp=4, pp=2, ep=4, zero=1)
    assert memory.parameters(model, layout) == memory.parameters(config, layout)
    assert strategy.predict(model, machine, layout) == strategy.predict(config, machine, layout)
    assert strategy.floor(model, machine, layout) == strategy.floor(config, machine, layout)
