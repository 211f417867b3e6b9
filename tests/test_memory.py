"""Memory, predicted: published numbers of papers and libraries, identities, and the command."""

import json
from dataclasses import replace
from fractions import Fraction

import pytest
from commands import run_main

from shardlab import memory
from shardlab.common.shapes import PRESETS
from shardlab.layout import Layout

LLAMA, MIXTRAL = PRESETS["llama-3-8b"], PRESETS["mixtral-8x7b"]


# Rajbhandari et al. 2020 (arXiv 1910.02054), Table 1: GB of model states per GPU, by size, ranks,
# and stages 1, 2, 3.
ZERO_TABLE_1 = {
    7.5e9: {
        1: (120, 120, 120), 4: (52.5, 41.3, 30), 16: (35.6, 21.6, 7.5),
        64: (31.4, 16.6, 1.88), 256: (30.4, 15.4, 0.47), 1024: (30.1, 15.1, 0.12),
    },
    128e9: {
        1: (2048, 2048, 2048), 4: (896, 704, 512), 16: (608, 368, 128),
        64: (536, 284, 32), 256: (518, 263, 8), 1024: (513, 257, 2),
    },
    1e12: {
        1: (16000, 16000, 16000), 4: (7000, 5500, 4000), 16: (4750, 2875, 1000),
        64: (4187, 2218, 250), 256: (4046, 2054, 62.5), 1024: (4011, 2013, 15.6),
    },
}  # fmt: skip


def last_digit(printed: float) -> float:
    return 10.0 ** -len(str(printed).partition(".")[2])


def test_every_cell_of_zero_table_1() -> None:
    cells = 0
    for params, rows in ZERO_TABLE_1.items():
        for dp, printed in rows.items():
            for zero, cell in zip((1, 2, 3), printed, strict=True):
                gigabytes = (
                    memory.estimate_states(params, Layout(dp=dp, zero=zero), "fp16", "adam").total
                    / 1e9
                )
                # The print rounds some cells and truncates others (4187.5 is printed 4187).
                assert abs(gigabytes - cell) < last_digit(cell), (params, dp, zero)
                cells += 1
    assert cells == 54


# Rajbhandari et al. 2020, Table 2: the theoretical maximum, in 10^9 parameters, that 32 GB of model
# states hold, on 64 ranks times this tensor degree; stages 0, 1, 2, 3.
ZERO_TABLE_2 = {
    1: (2, 7.6, 14.4, 128),
    2: (4, 15.2, 28.8, 256),
    4: (8, 30.4, 57.6, 500),
    8: (16, 60.8, 115.2, 1000),
    16: (32, 121.6, 230.4, 2000),
}


def test_the_largest_models_of_zero_table_2() -> None:
    for tp, row in ZERO_TABLE_2.items():
        for zero, printed in enumerate(row):
            found = (
                memory.find_max_parameters(32e9, Layout(dp=64, tp=tp, zero=zero), "fp16", "adam")
                / 1e9
            )
            # The paper's 500, 1000 and 2000 are rounded 512, 1024 and 2048; the others are the
            # first row times tp, so that its rounding (7.64 to 7.6) is multiplied too.
            assert found == pytest.approx(printed, rel=0.025)


@pytest.mark.parametrize(
    ("precision", "alone", "fixed", "shared"),
    [("fp16", 20, 4, 16), ("bf16-fp32-gradients", 18, 6, 12), ("fp32", 16, 8, 8)],
)
def test_bytes_per_parameter_of_megatron(
    precision: str, alone: int, fixed: int, shared: int
) -> None:
    """Megatron-LM's documentation, dist_optimizer.md: 20, 18, 16 become 4+16/d, 6+12/d, 8+8/d."""
    assert memory.megatron_bytes(precision, distributed=False) == alone
    for d in (1, 2, 64, 1000):
        assert memory.megatron_bytes(precision, d) == fixed + Fraction(shared, d)
        assert memory.megatron_bytes(precision, d, distributed=False) == alone
    states = memory.estimate_states(6_000_000, Layout(dp=64, zero=1), precision, "adam")
    if precision != "fp16":  # Megatron keeps float32 gradients as well
        assert states.total == 6_000_000 * memory.megatron_bytes(precision, 64)


def test_recipes_have_the_bytes_that_people_know() -> None:
    """16 for plain and mixed precision with Adam, 18 with float32 gradients, SGD without states."""
    known = {
        ("fp32", "adamw"): 16,
        ("fp32", "momentum"): 12,
        ("fp32", "sgd"): 8,
        ("bf16", "adamw"): 16,
        ("fp16", "adam"): 16,
        ("bf16", "sgd"): 8,
        ("bf16-fp32-gradients", "adamw"): 18,
        ("bf16-compute", "adamw"): 16,
        # Dettmers et al. 2022 (arXiv 2110.02861): one byte each, and a scale for 2048 of them.
        ("8-bit", "adamw"): 10 + Fraction(8, 2048),
    }
    for (precision, optimizer), value in known.items():
        assert memory.bytes_per_parameter(precision, optimizer) == value
        # A whole number of blocks of 2048 parameters needs no rounding.
        assert (
            memory.estimate_states(2048 * 1000, precision=precision, optimizer=optimizer).total
            == 2048 * 1000 * value
        )


def test_offloading_moves_bytes_and_loses_none() -> None:
    for zero in range(4):
        layout = Layout(dp=8, zero=zero)
        kept = memory.estimate_states(10_000_000, layout)
        off = memory.estimate_states(10_000_000, replace(layout, offload="optimizer"))
        assert off.total + off.host == kept.total and kept.host == 0
        assert off.optimizer == 0 and off.parameters == kept.parameters
        assert off.gradients == (0 if zero >= 2 else kept.gradients)
    off = memory.estimate_states(10_000_000, replace(layout, offload="parameters"))
    assert off.total == 0 and off.host == kept.total


# Parameters.


def test_a_vocabulary_is_padded_for_tensor_parallelism() -> None:
    """50,257 words on two ranks are 25,129 each: one row is padding."""
    assert memory.count_rank_parameters(PRESETS["gpt-2"], Layout(tp=2))["embedding"] == 25_129 * 768


# Activations, as published.


def test_korthikanti_table_2() -> None:
    """Korthikanti et al. 2022 (arXiv 2205.05198), Table 2, for GPT-3 175B and MT-NLG 530B, t=8."""
    for s, b, h, a in ((2048, 1, 12_288, 96), (2048, 1, 20_480, 128)):
        t, sbh = 8, s * b * h
        five = 5 * a * s / h
        printed = {
            (1, False, "none"): sbh * (34 + five),
            (t, False, "none"): sbh * (10 + 24 / t + five / t),
            (t, True, "none"): sbh * (34 / t + five / t),
            (t, False, "selective"): sbh * (10 + 24 / t),
            (t, True, "selective"): 34 * sbh / t,
            (t, False, "full"): 2 * sbh,
            (t, True, "full"): 2 * sbh,
        }
        for (degree, sequence, recompute), value in printed.items():
            assert memory.korthikanti_layer(s, b, h, a, degree, sequence, recompute) == value


def test_micro_batches_in_flight() -> None:
    """Section 4.2.3: the first stage keeps p micro-batches, interleaved 1 + (p-1)/(pm) times L."""
    looped = Layout(pp=8, microbatches=24, schedule="interleaved", chunks=3)
    assert memory.count_in_flight(looped) == pytest.approx(8 * (1 + 7 / 24))
    kept = [
        memory.estimate_activations(
            PRESETS["micro"], Layout(pp=4, microbatches=4), stage=s
        ).in_flight
        for s in range(4)
    ]
    assert kept == [4, 3, 2, 1]


# Identities of the course's own model.


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("t", [1, 2, 4])
def test_the_course_s_layer_beside_korthikanti_s(t: int, sequence: bool) -> None:
    """With dropout, 16 bits, and no scores kept, both count the same 34 bytes an element.

    Ours has three more kinds of small tensors: statistics of the norms, rotary tables, and with a
    fused kernel one number for each row of scores.
    """
    config = replace(PRESETS["gpt-2"], dropout=0.1)
    b, s, h, a = 2, 512, config.hidden, config.heads
    layout = Layout(tp=t, micro_batch=b, sequence_parallel=sequence)
    again = replace(layout, recompute="selective")
    statistics = 2 * 2 * 4 * b * s // (t if sequence else 1)  # two norms, mean and deviation
    tables = 2 * 2 * s * (h // a)  # cosines and sines, of queries and of keys
    printed = memory.korthikanti_layer(s, b, h, a, t, sequence, "selective")
    ours = memory.estimate_activations(config, again, s, device="gpu").layer
    assert ours == printed + statistics + tables
    fused = memory.estimate_activations(config, layout, s, device="gpu").layer
    assert fused == ours + 4 * a * b * s // t


# Experts.


def test_states_are_shared_by_those_that_have_the_same() -> None:
    """Each expert has four of 16 copies: ZeRO divides its states by 4, all other states by 16."""
    layout = Layout(dp=16, zero=1, recompute="full")
    one = memory.estimate_step(MIXTRAL, layout)
    dealt = memory.estimate_step(MIXTRAL, replace(layout, ep=4))
    assert dealt.optimizer == pytest.approx(one.optimizer, rel=1e-6)  # a quarter over a quarter
    rest = 2 * sum(memory.count_rank_parameters(MIXTRAL, Layout(dp=4, ep=4)).values())
    assert dealt.parameters == dealt.gradients == rest < one.parameters / 3
    assert dealt.peak < one.peak / 2


def test_activations_of_experts() -> None:
    """k times the rows; one expert of full width keeps as much as a feed-forward network."""
    one = replace(MIXTRAL, experts=1, experts_per_token=1)
    kept = memory.estimate_activations(one, device="gpu").layer
    plain = memory.estimate_activations(replace(MIXTRAL, experts=0), device="gpu").layer
    rows = 2 * 2 * MIXTRAL.seq * MIXTRAL.hidden  # in and out, in 16 bits
    assert kept - plain == pytest.approx(rows, rel=0.02)  # and the router's
    wide = 4 * 2 * MIXTRAL.seq * MIXTRAL.expert_width
    two = memory.estimate_activations(replace(MIXTRAL, experts=8), device="gpu").layer
    assert two - kept == pytest.approx(rows + wide, rel=0.02)
    again = memory.estimate_activations(MIXTRAL, Layout(recompute="ffn"), device="gpu").layer
    assert two - again == wide  # half of the wide tensors of both experts


# The command: `python -m shardlab memory`.


def as_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, int]:
    status, out, err = run_main(
        capsys, "memory", "--model", "llama-3-8b", *map(str, arguments), "--json"
    )
    assert status == 0 and not err
    return json.loads(out)


def bytes_of(estimate: memory.step_estimate.Estimate) -> dict[str, int]:
    names = "parameters", "gradients", "optimizer", "activations", "buffers", "total"
    return {name: getattr(estimate, name) for name in (*names, "peak", "host")}


def test_json_has_whole_bytes_that_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "--dp", 8, "--zero", 3, "--batch", 2)
    assert all(type(size) is int for size in found.values())
    assert sum([*found.values()][:5]) == found["total"]
    want = memory.estimate_step(LLAMA, Layout(dp=8, zero=3, micro_batch=2), device="gpu")
    assert list(found.items()) == list(bytes_of(want).items())
    assert found["activations"] > 0 and 0 < found["peak"] <= found["total"]


def test_every_option_reaches_the_calculator(capsys: pytest.CaptureFixture[str]) -> None:
    cut = {
        "dp": 4, "tp": 2, "pp": 2, "zero": 1, "recompute": "full", "offload": "optimizer",
        "microbatches": 8,
    }  # fmt: skip
    told = {
        "seq": 1024, "precision": "bf16-fp32-gradients", "optimizer": "adam",
        "attention": "plain", "device": "cpu",
    }  # fmt: skip
    settings = {**cut, **told, "batch": 2, "ranks": 16}
    options = [word for name, value in settings.items() for word in (f"--{name}", value)]
    found = as_json(capsys, *options, "--sequence-parallel")
    layout = Layout(**cut, micro_batch=2, sequence_parallel=True)
    assert found == bytes_of(memory.estimate_step(LLAMA, layout, **told)) and found["host"] > 0
