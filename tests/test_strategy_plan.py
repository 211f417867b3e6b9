"""A plan: what is first is fastest, what is there fits, what is missing has a reason."""

import json
import re
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from commands import ran
from hypothesis import given, settings
from hypothesis import strategies as st
from timed import on_time

from shardlab.common.shapes import PRESETS
from shardtools.strategy import MACHINES, PROFILES, Layout, predict
from shardtools.strategy.plan import layouts, plan
from shardtools.strategy.predict import room
from shardtools.strategy.profile import COURSE, today
from shardtools.strategy.rates import known
from shardtools.strategy.rates import today as rates_today
from shardtools.strategy.space import Space

H100 = MACHINES["h100"]


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(["gpt-2", "llama-3-8b", "llama-3-70b"]),
    st.sampled_from(["h100", "a100-40", "gb200"]),
    st.sampled_from([1, 8, 72, 144]),
    st.sampled_from([72, 144, 256]),
    st.sampled_from(sorted(PROFILES)),
)
def test_what_is_first_is_fastest_and_all_of_it_fits(
    model: str, gpu: str, gpus: int, batch: int, profile: str
) -> None:
    config, machine = PRESETS[model], replace(MACHINES[gpu], per_node=8)
    found = plan(config, machine, gpus, batch, profile=PROFILES[profile])
    times = [planned.seconds for planned in found.fits]
    assert times == pytest.approx(sorted(times), abs=1e-6)
    assert all(planned.reserved <= found.room for planned in found.fits)
    layouts = [planned.layout for planned in found.fits]
    assert len(set(layouts)) == len(layouts)
    assert {(x.ranks, x.batch) for x in layouts} <= {(gpus, batch)}
    for planned in found.fits[:: max(1, len(layouts) // 5)]:
        assert 0 < planned.mfu < 1
        assert planned.tokens == pytest.approx(batch * config.seq / planned.seconds)
        want = predict(config, machine, planned.layout, PROFILES[profile])
        assert want == planned.prediction
    if not found.fits:
        assert found.nearest is None or found.nearest.reserved > found.room


@pytest.mark.alone
def test_thousands_of_layouts_take_seconds() -> None:
    config, ruled = PRESETS["gpt-3-175b"], Counter()
    profile = replace(PROFILES["megatron"], zeros=(0, 1, 2, 3))
    tried = list(layouts(Space(config, H100, 1536, 6144, config.seq, profile, {}), ruled))
    began = time.perf_counter()
    found = plan(config, H100, 1536, 6144, profile=profile)
    taken = time.perf_counter() - began
    assert len(tried) > 2000
    with on_time():
        assert taken < 10
    plain = [one for one in found.fits if one.layout.recompute in ("none", "selective", "full")]
    assert len(plain) + sum(found.ruled.values()) == len(tried) + sum(ruled.values())


def test_it_finds_the_layouts_of_those_who_trained() -> None:
    """GPT-3 on 64 A100s: Korthikanti et al. took t 8, p 8, 3 chunks, attention recomputed."""
    gpt3 = replace(PRESETS["gpt-3-175b"], vocab=51_200)
    found = plan(gpt3, MACHINES["a100"], 64, 64, profile=PROFILES["megatron"])
    best = found.fits[0].layout
    assert (best.tp, best.pp, best.dp, best.recompute) == (8, 8, 1, "selective")
    assert best.schedule == "interleaved"


def test_long_sequences_are_shared() -> None:
    llama = replace(PRESETS["llama-3-8b"], seq=131_072)
    found = plan(llama, H100, 64, 8)
    assert found.fits[0].layout.cp > 1
    assert plan(PRESETS["llama-3-8b"], H100, 64, 64).fits[0].layout.cp == 1


def test_fixed_values_are_kept() -> None:
    found = plan(PRESETS["llama-3-8b"], H100, 64, 512, fixed={"tp": 4, "zero": 1})
    assert found.fits
    assert {(x.layout.tp, x.layout.zero) for x in found.fits} == {(4, 1)}


def run(capsys, *arguments: object, part: str = "plan") -> tuple[int, str, str]:
    return ran(capsys, "strategy", *part.split(), *map(str, arguments))


JOB = "--model", "llama-3-8b", "--gpu", "a100-80", "--gpus", "16"


def test_the_table(capsys) -> None:
    status, out, err = run(capsys, *JOB, "--tokens", "1e12", "--price", "2", "--top", "3")
    assert status == 0 and not err
    lines = out.splitlines()
    head = lines[2].split()
    assert head[:1] == ["layout"] and "cost" in head
    rows = [line for line in lines[3:6] if line.startswith("d ")]
    assert len(rows) == 3
    assert "First is d 16, ZeRO-1, recompute norms+ffn" in out
    assert "ruled out: needs more memory" in out


def test_json_has_what_the_table_has_in_plain_numbers(capsys) -> None:
    status, out, _ = run(capsys, *JOB, "--tokens", "1e12", "--price", "2", "--json")
    found = json.loads(out)
    assert status == 0 and len(found["best"]) == 10 and found["fit"] > 10
    for one in found["best"]:
        layout = Layout(**one["fields"])
        assert str(layout) == one["layout"] and layout.ranks == 16
        assert sum(one["seconds_by_part"].values()) == pytest.approx(one["seconds"])
        assert sum(one["bytes_by_part"].values()) == pytest.approx(one["reserved_bytes"], rel=1e-6)
        assert one["floor_seconds"] < one["seconds"]
        days = 1e12 / one["tokens_per_second"] / 86_400
        assert one["days"] == pytest.approx(days)
        assert one["cost"] == pytest.approx(2 * 24 * 16 * days)


def test_one_layout_is_explained(capsys) -> None:
    status, out, _ = run(capsys, *JOB, "--tp", "2", "--pp", "2", "--explain")
    assert status == 0 and "d 4 · t 2 · p 2" in out
    for word in ("products", "bubble", "floor", "weights", "activations", "room", "a guess"):
        assert word in out


def test_the_fastest_layout_that_an_engine_runs_is_emitted(capsys) -> None:
    status, out, err = run(capsys, *JOB, part="emit torchtitan")
    assert status == 0 and not err and "Layout: d " in out
    compile(out, "planned.py", "exec")
    # What the engine has not is passed over, and named.
    status, out, err = run(capsys, *JOB, "--dp", "4", part="emit deepspeed")
    assert status == 0 and "Layout: d 4 · p 4" in out
    assert err.count("\n") == 1 and "the first is refused: sequence_parallel=True" in err


def megatron_layout(text: str, gpus: int) -> Layout:
    """The layout that the arguments of an emitted script say."""
    found = dict(re.findall(r"^    --([\w-]+) ?([\w.-]*)", text, re.M))
    tp, pp = (int(found[f"{kind}-model-parallel-size"]) for kind in ("tensor", "pipeline"))
    cp = int(found.get("context-parallel-size", 1))
    chunks = int(found.get("num-virtual-stages-per-pipeline-rank", 1))
    for parts in re.findall(r'--pipeline-model-parallel-layout "(.*)"', text):
        parts = re.sub(r"\(([^)]*)\)\*(\d+)", lambda run: run[1] * int(run[2]), parts)
        chunks = (parts.count("|") + 1) // pp
    dp, size = gpus // tp // pp // cp, int(found["micro-batch-size"])
    again = found.get("recompute-granularity", "none")
    again = "norms" if found.get("recompute-modules") == "layernorm" else again
    shards = {"": 1, "optim_grads": 2, "optim_grads_params": 3}
    strategy = found.get("data-parallel-sharding-strategy", "")
    return Layout(
        dp, tp, pp, shards[strategy] if "use-distributed-optimizer" in found else 0, size,
        int(found["global-batch-size"]) // dp // size, again,
        "sequence-parallel" in found, cp, chunks=chunks,
        schedule="interleaved" if chunks > 1 else "1f1b", stages="megatron",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "gpu", "gpus", "batch"),
    [
        ("gpt-3-175b", "a100", 1024, 1536),
        ("llama-3-8b", "a100-40", 64, 512),
        ("llama-3-405b", "h200", 512, 1024),
    ],
)
def test_what_megatron_gets_fits_with_megatron_s_bytes(capsys, model, gpu, gpus, batch) -> None:
    job = "--model", model, "--gpu", gpu, "--gpus", gpus, "--batch", batch
    status, out, _ = run(capsys, *job, part="emit megatron")
    config, machine, at = PRESETS[model], MACHINES[gpu], megatron_layout(out, gpus)
    assert status == 0 and at.ranks == gpus and at.batch == batch
    rates = rates_today(known("megatron"))
    found = predict(config, machine, at, today(PROFILES["megatron"]), rates).memory
    assert found.reserved <= room(machine, rates.values_of())
    # By hand: 2 B a weight, 4 a gradient and 12 of the optimizer, less what copies share.
    weight, gradient, optimizer = (
        n / at.shards ** (at.zero >= z) for n, z in ((2, 3), (4, 2), (12, 1))
    )
    states = config.layers * 12 * config.hidden**2 / at.tp / at.pp * (weight + gradient + optimizer)
    if model == "gpt-3-175b":
        assert found.weights + found.gradients + found.optimizer >= 0.999 * states


@pytest.mark.parametrize(
    ("engine", "gpu", "gpus"),
    [("deepspeed", "h100", 16), ("torchtitan", "h100", 16)] + [("megatron", "a100-40", 64)],
)
def test_an_engine_s_plan_is_that_of_its_profile(capsys, engine: str, gpu: str, gpus: int) -> None:
    job = "--model", "llama-3-8b", "--gpu", gpu, "--gpus", gpus, "--tp", 1, "--pp", 1
    status, out, err = run(capsys, *job, part=f"emit {engine}")
    assert status == 0 and not err
    said = json.loads(run(capsys, *job, "--profile", engine, "--json")[1])["best"]
    layouts = [one["layout"] for one in said]
    first = re.search(r"Layout: (.*?)\.?$", out, re.M)[1]
    assert first == next(name for name in layouts if "recompute attention" not in name)
    assert all(one["free_bytes"] >= 0 for one in said)
    # A profile of another name is refused, be it named or that of the rates.
    status, out, err = run(capsys, *job, "--profile", "course", part=f"emit {engine}")
    assert status == 2 and not out and err.count("\n") == 1
    assert f"profile='course': allowed with emit {engine} is '{engine}'" in err
    rates = Path(__file__).parents[1] / "code/shardtools/strategy/published/rates_nanotron.json"
    status, out, err = run(capsys, *job, "--rates", rates, part=f"emit {engine}")
    assert status == 2 and not out and err.count("\n") == 1 and "'nanotron'" in err


def test_gradients_of_the_engines_take_what_they_take() -> None:
    """Whole gradients of four micro-batches, in bytes a parameter: float32 but for DeepSpeed."""
    at = Layout(dp=8, zero=1, microbatches=4)
    config = PRESETS["llama-3-8b"]
    taken = {name: predict(config, H100, at, profile).memory for name, profile in PROFILES.items()}
    each = {name: round(one.gradients / taken["course"].weights * 2) for name, one in taken.items()}
    assert each == {
        "course": 2, "megatron": 4, "nanotron": 4, "fsdp2": 4, "torchtitan": 4, "deepspeed": 2,
        "engines": 4,
    }  # fmt: skip


def test_weights_that_come_ahead_hide_behind_a_forward_pass() -> None:
    config, at = PRESETS["llama-3-8b"], Layout(dp=64, zero=1, microbatches=4)
    ahead, after = (replace(COURSE, ahead=ahead) for ahead in (True, False))
    waits = [predict(config, H100, at, profile).seconds.data for profile in (ahead, after)]
    gather = 2 * 8e9 / (0.6 * 8 * 50e9)  # bytes over all cards of a node
    assert waits[1] - waits[0] == pytest.approx(0.8 * gather, rel=0.05)
    # A forward pass too short to hide them: 128 tokens, of which the CPU launches 32 layers.
    waits = [predict(config, H100, at, profile, seq=128).seconds.data for profile in (ahead, after)]
    assert waits[1] - waits[0] == pytest.approx(32 * 2e-3 / 3, rel=0.1)


def test_a_captured_step_has_no_launches_unless_it_is_a_pipeline() -> None:
    small = replace(PRESETS["llama-3-8b"], seq=256)
    titan = PROFILES["torchtitan"]
    one, two = Layout(dp=8, zero=3), Layout(dp=4, pp=2, zero=1, microbatches=4)
    assert predict(small, H100, one, titan).seconds.launches == pytest.approx(0, abs=1e-9)
    assert predict(small, H100, one, PROFILES["fsdp2"]).seconds.launches > 1e-2
    assert predict(small, H100, two, titan).seconds.launches > 1e-2


# config.json of Llama 3 8B and of GPT-2, what is used of them.
LLAMA = {
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14_336,
    "max_position_embeddings": 8192, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "vocab_size": 128_256, "rope_theta": 5e5,
}  # fmt: skip


def test_a_file_of_the_hub_is_planned_as_the_same_preset(capsys, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama"} | LLAMA))
    status, out, _ = run(capsys, "--config", path, "--gpu", "a100", "--gpus", "16", "--json")
    _, same, _ = run(capsys, *JOB, "--json")
    assert status == 0 and json.loads(out) == json.loads(same)
    # An engine is told of it as of the preset, and of nothing that the course's GPT is not.
    asked = "--config", path, "--gpu", "a100", "--gpus", "16"
    made = run(capsys, *asked, part="emit megatron")
    assert made[:2] == run(capsys, *JOB, part="emit megatron")[:2]
    path.write_text(json.dumps({"model_type": "llama", "mlp_bias": True} | LLAMA))
    status, out, err = run(capsys, *asked, part="emit megatron")
    assert (status, out) == (2, "") and "mlp_bias=True; allowed is False" in err
