"""`python -m shardlab memory`: a table for people, bytes for programs, one clear error."""

import json
from pathlib import Path

import pytest
from commands import ran

from shardlab import memory
from shardlab.common.shapes import PRESETS
from shardlab.layout import Layout

ROOT = Path(__file__).resolve().parents[1]
KEYS = ["parameters", "gradients", "optimizer", "activations", "buffers", "total"]


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    return ran(capsys, "memory", *arguments)


def test_json_has_whole_bytes_that_add_up(capsys) -> None:
    status, out, err = run(
        capsys, "--model", "llama-3-8b", "--dp", "8", "--zero", "3", "--batch", "2", "--json"
    )
    found = json.loads(out)
    assert status == 0 and not err
    assert list(found)[:6] == KEYS
    assert all(type(size) is int for size in found.values())
    assert sum(found[key] for key in KEYS[:-1]) == found["total"]
    want = memory.estimate(PRESETS["llama-3-8b"], Layout(dp=8, zero=3, micro_batch=2), device="gpu")
    assert found == want.as_dict()
    assert found["activations"] > 0 and 0 < found["peak"] <= found["total"]


def test_every_option_reaches_the_calculator(capsys) -> None:
    cut = {
        "dp": 4, "tp": 2, "pp": 2, "zero": 1, "recompute": "full", "offload": "optimizer",
        "microbatches": 8,
    }  # fmt: skip
    told = {
        "seq": 1024, "precision": "bf16-fp32-gradients", "optimizer": "adam",
        "attention": "plain", "device": "cpu",
    }  # fmt: skip
    settings = {**cut, **told, "batch": 2}
    options = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    options += ["--sequence-parallel", "--ranks", "16"]
    _, out, err = run(capsys, "--model", "llama-3-8b", *options, "--json")
    assert not err
    layout = Layout(**cut, micro_batch=2, sequence_parallel=True)
    want = memory.estimate(PRESETS["llama-3-8b"], layout, **told)
    found = json.loads(out)
    assert found == want.as_dict() and found["host"] > 0


def test_layouts_of_real_jobs_reach_the_calculator(capsys) -> None:
    cut = {
        "dp": 8, "pp": 4, "cp": 2, "zero": 1, "replicas": 2, "schedule": "interleaved",
        "chunks": 2, "microbatches": 8, "recompute": "norms+ffn",
    }  # fmt: skip
    options = [word for name, value in cut.items() for word in (f"--{name}", str(value))]
    options += ["--stage", "1", "--stages", "8,10,8,6", "--ranks", "64"]
    _, out, err = run(capsys, "--model", "llama-3-8b", *options, "--json")
    layout = Layout(**cut, stages=(8, 10, 8, 6))
    want = memory.estimate(PRESETS["llama-3-8b"], layout, device="gpu", stage=1)
    assert not err and json.loads(out) == want.as_dict()


@pytest.mark.parametrize(("etp", "size"), [(1, 18.97), (4, 10.82), (None, 10.82)])
def test_experts_that_tensor_ranks_do_not_cut_are_held_whole(capsys, etp, size) -> None:
    """Megatron's ETP 1: 128 experts of 48 layers over 16 ranks, 3 · 2,048 · 768 numbers each."""
    config = ROOT / "tests/configs/qwen3-30b-a3b.json"
    job = "--config", config, "--tp", 4, "--dp", 16, "--ep", 16, "--zero", 1
    job += "--precision", "bf16-fp32-gradients", *(("--etp", etp) if etp else ())
    _, out, err = run(capsys, *map(str, job), "--json")
    found = json.loads(out)
    states = found["parameters"] + found["gradients"] + found["optimizer"]
    assert not err and round(states / 1e9, 2) == size
    whole = 48 * 128 // 16 * 3 * 2048 * 768 // (etp or 4)
    assert found["parameters"] > 2 * whole
    assert f"each matrix of one over {etp or 4}" in run(capsys, *map(str, job))[1]


def test_without_a_shape_activations_are_unknown_and_count_as_nothing(capsys) -> None:
    _, out, _ = run(capsys, "--params", "1e9", "--json")
    found = json.loads(out)
    assert found["activations"] == found["buffers"] == 0
    assert found["total"] == 16 * 10**9
    _, out, _ = run(capsys, "--params", "1e9")
    assert out.count("unknown without --model") == 2
    assert "total of the states" in out and "16" in out
