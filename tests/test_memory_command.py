"""`python -m shardlab memory`: a table for people, bytes for programs, one clear error."""

import json
from pathlib import Path

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
