"""Which layers stand where: against what is published of real cuts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.shapes import Config
from shardlab.strategy import Layout, Stage, stages


def shape(layers: int, hidden: int = 64, ffn: int = 256, vocab: int = 256) -> Config:
    return Config(vocab, 64, layers, 2, hidden, None, ffn, "swiglu")


def counts(config: Config, pp: int, rule: str) -> list[int]:
    return [stage.layers for stage in stages(config, Layout(pp=pp, stages=rule))]


# The Ultra-Scale sweep: layers, hidden, width; the layers of its stages.
LLAMA_8B, LLAMA_1B = shape(32, 4096, 14_336, 131_072), shape(16, 2048, 8192, 131_072)


@pytest.mark.parametrize(
    ("config", "pp", "found"),
    [
        (LLAMA_8B, 1, [32]),
        (LLAMA_8B, 2, [18, 14]),
        (LLAMA_8B, 4, [9, 9, 8, 6]),
        # The head weighs as much as four layers, and a stage may end exactly where its share does.
        (LLAMA_1B, 2, [10, 6]),
        (LLAMA_1B, 4, [5, 5, 5, 1]),
    ],
)
def test_nanotron_weighs_the_head(config: Config, pp: int, found: list[int]) -> None:
    assert counts(config, pp, "nanotron") == found


def test_the_first_stage_of_nanotron_on_many() -> None:
    assert [counts(LLAMA_8B, pp, "nanotron")[0] for pp in (8, 16)] == [5, 3]


@pytest.mark.parametrize(
    ("layers", "pp", "found"),
    [
        (126, 16, [7, *[8] * 14, 7]),  # Llama 3 405B, section 3.3.2
        (70, 12, [5, *[6] * 10, 5]),  # BLOOM (arXiv 2211.05100), with 12 stages
        (22, 8, [2, *[3] * 6, 2]),  # Qi et al. 2023, Table 3
        (96, 8, [12] * 8),
        (5, 3, [1, 3, 1]),
    ],
)
def test_megatron_counts_the_ends_as_a_layer(layers: int, pp: int, found: list[int]) -> None:
    assert counts(shape(layers), pp, "megatron") == found


@given(st.integers(1, 130), st.integers(1, 64), st.sampled_from(["megatron", "nanotron"]))
def test_every_layer_stands_once(layers: int, pp: int, rule: str) -> None:
    config = shape(layers)
    if rule == "megatron" and pp > layers + 2:
        with pytest.raises(ValueError, match=f"pp={pp}: allowed are 1 to {layers + 2}"):
            stages(config, Layout(pp=pp, stages=rule))
        return
    found = stages(config, Layout(pp=pp, stages=rule))
    assert len(found) == pp and sum(stage.layers for stage in found) == layers
    assert [stage.embedding for stage in found] == [k == 0 for k in range(pp)]
    assert sum(stage.head for stage in found) == 1
    assert min(stage.layers for stage in found) >= 0


def test_given_layers() -> None:
    found = stages(shape(5), Layout(pp=2, stages=(2, 3)))
    assert found == [Stage(2, True, False), Stage(3, False, True)]
    with pytest.raises(ValueError, match=r"stages=\(2, 2\): allowed are those with 5 layers"):
        stages(shape(5), Layout(pp=2, stages=(2, 2)))
    with pytest.raises(ValueError, match="pp=2: allowed are divisors of layers=5"):
        stages(shape(5), Layout(pp=2))
