"""Which layers stand where, against published cuts; and how many micro-batches a stage keeps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab import pipeline
from shardlab.common.shapes import Config
from shardlab.layout import SCHEDULES, Layout, stages
from shardlab.memory import in_flight


def shape(layers: int, hidden: int = 64, ffn: int = 256, vocab: int = 256) -> Config:
    return Config(vocab, 64, layers, 2, hidden, None, ffn, "swiglu")


def counts(config: Config, pp: int, rule: str) -> list[int]:
    return [stage.layers for stage in stages(config, pp, rule)]


# The Ultra-Scale sweep: layers, hidden, width; the layers of its stages.
LLAMA_8B, LLAMA_1B = shape(32, 4096, 14_336, 131_072), shape(16, 2048, 8192, 131_072)


@pytest.mark.parametrize(
    ("config", "pp", "found"),
    [
        (LLAMA_8B, 2, [18, 14]),
        (LLAMA_8B, 4, [9, 9, 8, 6]),
        # The head weighs as much as four layers, and a stage may end exactly where its share does.
        (LLAMA_1B, 2, [10, 6]),
        (LLAMA_1B, 4, [5, 5, 5, 1]),
    ],
)
def test_nanotron_weighs_the_head(config: Config, pp: int, found: list[int]) -> None:
    assert counts(config, pp, "nanotron") == found


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


@pytest.mark.parametrize("name", SCHEDULES)
@given(st.integers(2, 8), st.integers(1, 40), st.integers(2, 4))
def test_micro_batches_in_flight_are_those_of_the_schedule(name: str, p: int, m: int, v: int):
    chunks = {"interleaved": v, "zb-v": 2}.get(name, 1)
    plan = pipeline.schedule(name, p, m, chunks if chunks > 1 else None)
    layout = Layout(pp=p, microbatches=m, schedule=name, chunks=chunks)
    found = [in_flight(layout, stage) for stage in range(p)]
    lived = list(pipeline.live(plan))
    if name == "zb-v":  # a bound, which many micro-batches reach
        assert all(n <= most for n, most in zip(lived, found, strict=True))
        assert lived == found or m < 2 * p
    else:
        assert lived == found
