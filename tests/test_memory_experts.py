"""What a model with experts holds: its parameters, and how ranks share them."""

from dataclasses import replace

import pytest

from shardlab import memory
from shardlab.common.shapes import PRESETS, Config
from shardlab.layout import Layout

MIXTRAL = PRESETS["mixtral-8x7b"]
MIXED = Config(
    64, 32, 5, 4, 32, 2, 48, "swiglu", "rms", False, False,
    experts=6, expert_ffn=20, shared_experts=2, dense_layers=2,
)  # fmt: skip


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
