"""A layout holds a job's degrees of parallelism, and refuses invalid ones."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.common.shapes import PRESETS
from shardlab.layout import SCHEDULES, STAGE_RULES, format_layout, parse_layout
from shardlab.memory import count_expert_parameters
from shardtools.strategy import Layout


def test_ranks_and_shards() -> None:
    layout = Layout(dp=16, tp=8, pp=4, zero=1, cp=2, replicas=4)
    assert layout.world_size == 16 * 8 * 4 * 2
    assert layout.zero_degree == 8  # four copies of a group, two ranks each
    assert Layout(dp=16, ep=8).world_size == 16  # copies share the experts
    assert Layout(cp=4, ep=2).zero_degree == 4  # ranks that share a sequence share the experts, too


def test_tensor_ranks_join_the_experts() -> None:
    """ETP · EP · EDP · PP = TP · CP · DP · PP, with each degree of experts free (folding)."""
    folded = Layout(dp=2, tp=4, pp=2, cp=2, ep=8, etp=1)
    assert (folded.world_size, folded.expert_tp, folded.expert_zero_degree) == (32, 1, 2)
    assert (
        Layout(dp=8, tp=4, ep=4).expert_tp == 4 and Layout(dp=8, tp=4, ep=4).expert_zero_degree == 2
    )
    with pytest.raises(ValueError, match="ep=32: must divide the 16 .* etp=1"):
        Layout(dp=2, tp=4, cp=2, ep=32, etp=1)
    whole = count_expert_parameters(PRESETS["mixtral-8x7b"], Layout(dp=8, ep=8))
    assert (
        count_expert_parameters(PRESETS["mixtral-8x7b"], Layout(dp=2, tp=4, ep=8, etp=1)) == whole
    )
    assert count_expert_parameters(PRESETS["mixtral-8x7b"], Layout(dp=8, tp=4, ep=8)) * 4 == whole


LAYOUTS = st.fixed_dictionaries(
    {
        "dp": st.sampled_from([1, 2, 8]), "tp": st.integers(1, 4), "pp": st.integers(1, 4),
        "cp": st.integers(1, 2), "ep": st.sampled_from([1, 2]), "zero": st.integers(0, 3),
        "etp": st.sampled_from([None, 1]), "replicas": st.sampled_from([1, 4]),
        "micro_batch": st.integers(1, 3), "microbatches": st.integers(1, 9),
        "sequence_parallel": st.booleans(),
        "recompute": st.sampled_from(["none", "full", "selective", "norms+ffn", "norms"]),
        "schedule": st.sampled_from(SCHEDULES), "chunks": st.integers(1, 3),
        "offload": st.sampled_from(["none", "optimizer", "parameters"]),
        "stages": st.sampled_from([*STAGE_RULES, (3,), (3, 3, 4), (2, 2)]),
        "order": st.permutations(["dp", "pp", "cp", "tp"]).map(tuple),
    }
)  # fmt: skip


@settings(max_examples=400)
@given(LAYOUTS)
def test_written_layouts_are_read_back(fields: dict) -> None:
    try:
        layout = Layout(**fields)
    except ValueError:
        return
    assert parse_layout(format_layout(layout)) == layout
    short = parse_layout(str(layout))
    assert str(short) == str(layout) and short.world_size == layout.world_size


def test_layouts_are_read_in_several_notations() -> None:
    want = Layout(2, 2, 2, 1, microbatches=4)
    for text in (
        "d2 t2 p2, zero-1, m 4",
        "d 2 · t 2 · p 2, ZeRO-1, m 4 × b 1",
        "p2*d2*t2,ZeRO-1,m4",
    ):
        assert parse_layout(text) == want
    assert parse_layout("") == Layout()
