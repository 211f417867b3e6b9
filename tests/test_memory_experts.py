"""What a model with experts holds: its parameters, and how ranks share them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlab import memory
from shardlab.common.shapes import PRESETS, Config
from shardlab.gpt.model import GPT
from shardlab.layout import Layout, stages
from shardlab.memory import in_experts

MIXTRAL = PRESETS["mixtral-8x7b"]
MICRO = replace(PRESETS["micro"], experts=4)
MIXED = Config(
    64, 32, 5, 4, 32, 2, 48, "swiglu", "rms", False, False,
    experts=6, expert_ffn=20, shared_experts=2, dense_layers=2,
)  # fmt: skip


@pytest.mark.parametrize("config", [MICRO, MIXED], ids=["micro", "mixed"])
def test_parameters_are_the_model_s_own(config: Config) -> None:
    with torch.device("meta"):
        model = GPT(config)
    assert memory.shapes(config) == {n: tuple(p.shape) for n, p in model.named_parameters()}


@given(
    st.integers(1, 4), st.integers(1, 3), st.integers(0, 2), st.sampled_from([1, 2]),
    st.sampled_from([1, 5]),
)  # fmt: skip
def test_ranks_and_stages_add_up_to_the_model(
    each: int, ep: int, dense: int, shared: int, pp: int
) -> None:
    config = replace(
        MIXED, experts=each * ep, experts_per_token=1, dense_layers=dense, shared_experts=shared
    )
    held = own = 0
    for stage in stages(config, pp):
        held += sum(memory.parameters(config, Layout(dp=ep, ep=ep), stage).values())
        own += in_experts(config, Layout(dp=ep, ep=ep), stage)
    assert held + (ep - 1) * own == memory.parameter_count(config)


def test_states_are_shared_by_those_that_have_the_same() -> None:
    """Of 16 copies each expert has four: ZeRO divides its states by these, all else by 16."""
    layout = Layout(dp=16, zero=1, recompute="full")
    one = memory.estimate(MIXTRAL, layout)
    dealt = memory.estimate(MIXTRAL, replace(layout, ep=4))
    assert dealt.optimizer == pytest.approx(one.optimizer, rel=1e-6)  # a quarter over a quarter
    rest = 2 * sum(memory.parameters(MIXTRAL, Layout(dp=4, ep=4)).values())
    assert dealt.parameters == dealt.gradients == rest < one.parameters / 3
    assert dealt.peak < one.peak / 2


def test_activations_of_experts() -> None:
    """k times the rows, and with one expert of full width what a feed-forward network keeps."""
    one = replace(MIXTRAL, experts=1, experts_per_token=1)
    kept = memory.activations(one, device="gpu").layer
    plain = memory.activations(replace(MIXTRAL, experts=0), device="gpu").layer
    rows = 2 * 2 * MIXTRAL.seq * MIXTRAL.hidden  # in and out, in 16 bits
    assert kept - plain == pytest.approx(rows, rel=0.02)  # and the router's
    wide = 4 * 2 * MIXTRAL.seq * MIXTRAL.expert_width
    two = memory.activations(replace(MIXTRAL, experts=8), device="gpu").layer
    assert two - kept == pytest.approx(rows + wide, rel=0.02)
    again = memory.activations(MIXTRAL, Layout(recompute="ffn"), device="gpu").layer
    assert two - again == wide  # of both experts, half of their wide tensors
