"""A plan: its first layout is the fastest, listed layouts fit, and missing ones have a reason."""

import json
import re
from dataclasses import replace

import pytest
from commands import run_main
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.common.shapes import PRESETS
from shardtools.strategy import MACHINES, PROFILES, Layout, predict
from shardtools.strategy.plan import plan
from shardtools.strategy.profile import COURSE

H100 = MACHINES["h100"]


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(["gpt-2", "llama-3-8b", "llama-3-70b"]),
    st.sampled_from(["h100", "a100-40", "gb200"]),
    st.sampled_from([1, 8, 72, 144]),
    st.sampled_from([72, 144, 256]),
    st.sampled_from(sorted(PROFILES)),
)
def test_feasible_layouts_fit_and_are_sorted(
    model: str, gpu: str, gpus: int, batch: int, profile: str
) -> None:
    config, machine = PRESETS[model], replace(MACHINES[gpu], gpus_per_node=8)
    found = plan(config, machine, gpus, batch, profile=PROFILES[profile])
    times = [planned.seconds for planned in found.feasible]
    assert times == pytest.approx(sorted(times), abs=1e-6)
    assert all(planned.reserved <= found.usable_memory for planned in found.feasible)
    layouts = [planned.layout for planned in found.feasible]
    assert len(set(layouts)) == len(layouts)
    assert {(x.world_size, x.global_batch) for x in layouts} <= {(gpus, batch)}
    for planned in found.feasible[:: max(1, len(layouts) // 5)]:
        assert 0 < planned.mfu < 1
        assert planned.tokens_per_second == pytest.approx(batch * config.seq / planned.seconds)
        want = predict(config, machine, planned.layout, PROFILES[profile])
        assert want == planned.prediction
    if not found.feasible:
        closest = found.closest_infeasible
        assert closest is None or closest.reserved > found.usable_memory


def test_plan_finds_a_layout_that_was_trained() -> None:
    """GPT-3 on 64 A100s: Korthikanti et al. took t 8, p 8, 3 chunks, attention recomputed."""
    gpt3 = replace(PRESETS["gpt-3-175b"], vocab=51_200)
    found = plan(gpt3, MACHINES["a100"], 64, 64, profile=PROFILES["megatron"])
    best = found.feasible[0].layout
    assert (best.tp, best.pp, best.dp, best.recompute) == (8, 8, 1, "selective")
    assert best.schedule == "interleaved"


def test_long_sequences_use_context_parallelism() -> None:
    llama = replace(PRESETS["llama-3-8b"], seq=131_072)
    found = plan(llama, H100, 64, 8)
    assert found.feasible[0].layout.cp > 1
    assert plan(PRESETS["llama-3-8b"], H100, 64, 64).feasible[0].layout.cp == 1


def test_constraints_are_met() -> None:
    found = plan(PRESETS["llama-3-8b"], H100, 64, 512, constraints={"tp": 4, "zero": 1})
    assert found.feasible
    assert {(x.layout.tp, x.layout.zero) for x in found.feasible} == {(4, 1)}


def run_cli(capsys, *arguments: object, part: str = "plan") -> tuple[int, str, str]:
    return run_main(capsys, "strategy", *part.split(), *map(str, arguments))


JOB = "--model", "llama-3-8b", "--gpu", "a100-80", "--gpus", "16"


def test_json_has_what_the_table_has_in_plain_numbers(capsys) -> None:
    status, out, _ = run_cli(capsys, *JOB, "--tokens", "1e12", "--json")
    found = json.loads(out)
    assert status == 0 and len(found["best"]) == 10 and found["fit"] > 10
    for one in found["best"]:
        layout = Layout(**one["fields"])
        assert str(layout) == one["layout"] and layout.world_size == 16
        assert sum(one["seconds_by_part"].values()) == pytest.approx(one["seconds"])
        assert sum(one["bytes_by_part"].values()) == pytest.approx(one["reserved_bytes"], rel=1e-6)
        assert one["floor_seconds"] < one["seconds"]
        days = 1e12 / one["tokens_per_second"] / 86_400
        assert one["days"] == pytest.approx(days)


def test_the_fastest_layout_that_an_engine_runs_is_emitted(capsys) -> None:
    status, out, err = run_cli(capsys, *JOB, part="emit torchtitan")
    assert status == 0 and "Layout: d " in out
    assert "s a step and" in err and "leaves" in err and "emitted is" not in err
    compile(out, "planned.py", "exec")
    # Layouts that the engine does not support are skipped, with a reason.
    status, out, err = run_cli(capsys, *JOB, "--dp", "4", part="emit deepspeed")
    assert status == 0 and "Layout: d 4 · t 4" in out
    assert "tp=2: must be 1" in err and "d 4 · t 4, ZeRO-1: predicted are" in err


def test_memory_and_plan_take_sequences_of_one_length(capsys) -> None:
    long = "--model", "mixtral-8x7b"
    words = "8,192 tokens (of at most 32,768)"
    assert words in run_main(capsys, "memory", *long)[1]
    assert words in run_cli(capsys, *long, "--gpu", "h100", "--gpus", 64)[1]


def test_the_gpus_that_the_refusal_of_a_job_names_are_enough(capsys) -> None:
    job = "--model", "llama-3-70b", "--gpu", "a100-40", "--offload", "none", "--gpus"
    status, _, error = run_cli(capsys, *job, 8)
    named = re.search(r"would fit with (\d+) GPUs", error)[1]
    assert status == 2 and run_cli(capsys, *job, named)[0] == 0


@pytest.mark.parametrize(
    ("engine", "gpu", "gpus"),
    [("deepspeed", "h100", 16), ("torchtitan", "h100", 16)] + [("megatron", "a100-40", 64)],
)
def test_an_engine_s_plan_is_that_of_its_profile(capsys, engine: str, gpu: str, gpus: int) -> None:
    job = "--model", "llama-3-8b", "--gpu", gpu, "--gpus", gpus, "--tp", 1, "--pp", 1
    status, out, err = run_cli(capsys, *job, part=f"emit {engine}")
    assert status == 0 and "emitted is" not in err
    said = json.loads(run_cli(capsys, *job, "--profile", engine, "--json")[1])["best"]
    layouts = [one["layout"] for one in said]
    first = re.search(r"Layout: (.*?)\.?$", out, re.M)[1]
    assert first == next(name for name in layouts if "recompute attention" not in name)
    assert all(one["free_bytes"] >= 0 for one in said)
    status, out, err = run_cli(capsys, *job, "--profile", "course", part=f"emit {engine}")
    assert status == 2 and not out and "profile='course'" in err


def test_gradient_bytes_of_each_engine() -> None:
    """Unsharded gradients of four micro-batches, bytes a parameter: float32 except DeepSpeed's."""
    at = Layout(dp=8, zero=1, microbatches=4)
    config = PRESETS["llama-3-8b"]
    taken = {name: predict(config, H100, at, profile).memory for name, profile in PROFILES.items()}
    each = {name: round(one.gradients / taken["course"].weights * 2) for name, one in taken.items()}
    assert each == {
        "course": 2, "megatron": 4, "nanotron": 4, "fsdp2": 4, "torchtitan": 4, "deepspeed": 2,
        "engines": 4,
    }  # fmt: skip


def test_prefetched_weights_hide_behind_a_forward_pass() -> None:
    config, at = PRESETS["llama-3-8b"], Layout(dp=64, zero=1, microbatches=4)
    ahead, after = (replace(COURSE, prefetches_weights=ahead) for ahead in (True, False))
    waits = [predict(config, H100, at, profile).seconds.data for profile in (ahead, after)]
    gather = 2 * 8e9 / (0.6 * 8 * 50e9)  # bytes over all network cards of a node
    assert waits[1] - waits[0] == pytest.approx(0.8 * gather, rel=0.05)
    # A forward pass too short to hide the gathers: 128 tokens, 32 layers launched by the CPU.
    waits = [predict(config, H100, at, profile, seq=128).seconds.data for profile in (ahead, after)]
    assert waits[1] - waits[0] == pytest.approx(32 * 2e-3 / 3, rel=0.1)


def test_a_captured_step_has_no_launches_unless_it_is_a_pipeline() -> None:
    small = replace(PRESETS["llama-3-8b"], seq=256)
    titan = PROFILES["torchtitan"]
    one, two = Layout(dp=8, zero=3), Layout(dp=4, pp=2, zero=1, microbatches=4)
    assert predict(small, H100, one, titan).seconds.launches == pytest.approx(0, abs=1e-9)
    assert predict(small, H100, one, PROFILES["fsdp2"]).seconds.launches > 1e-2
    assert predict(small, H100, two, titan).seconds.launches > 1e-2
