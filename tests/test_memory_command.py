"""`python -m shardlab memory`: a table for people, bytes for programs, one clear error."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ran

from shardlab import memory
from shardlab.layout import Layout
from shardlab.shapes import PRESETS

ROOT = Path(__file__).resolve().parents[1]
KEYS = ["parameters", "gradients", "optimizer", "activations", "buffers", "total"]


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    return ran(capsys, "memory", *arguments)


def test_the_figure_of_zero(capsys) -> None:
    # Rajbhandari et al. 2020 (arXiv 1910.02054), figure 1: 120, 31.4, 16.6 and 1.9 GB.
    for stage, printed in enumerate(("120", "31.4", "16.6", "1.9")):
        status, out, _ = run(
            capsys, "--params", "7.5e9", "--dp", "64", "--zero", str(stage), "--json"
        )
        found = json.loads(out)
        assert status == 0
        digits = len(printed.partition(".")[2])
        assert f"{found['total'] / 1e9:.{digits}f}" == printed


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


def test_without_a_shape_activations_are_unknown_and_count_as_nothing(capsys) -> None:
    _, out, _ = run(capsys, "--params", "1e9", "--json")
    found = json.loads(out)
    assert found["activations"] == found["buffers"] == 0
    assert found["total"] == 16 * 10**9
    _, out, _ = run(capsys, "--params", "1e9")
    assert out.count("unknown without --model") == 2
    assert "total of the states" in out and "16" in out


def test_the_table_carries_the_unit_at_every_number(capsys) -> None:
    for unit, total in (("GB", 16.0), ("GiB", 16e9 / 2**30)):
        _, out, _ = run(capsys, "--params", "1e9", "--unit", unit)
        line = next(line for line in out.splitlines() if "total" in line)
        assert line.split()[-1] == unit
        assert float(line.split()[-2].replace(",", "")) == pytest.approx(total, rel=0.01)
    _, out, _ = run(capsys, "--model", "gpt-2", "--offload", "optimizer")
    sizes = [line for line in out.splitlines() if line.startswith("  ") and "GB" in line]
    assert len(sizes) == 8  # five parts, the total, the peak, and what the host holds


BAD = [
    (["--params", "7.5e9", "--zero", "4"], "zero=4: allowed are whole numbers, 0 to 3"),
    (["--params", "7.5e9", "--zero", "-1"], "zero=-1: allowed are whole numbers, 0 to 3"),
    (["--params", "7.5e9", "--zero", "two"], "zero='two': allowed are whole numbers, 0 to 3"),
    (["--params", "7.5e9", "--zero"], "zero='': allowed are whole numbers, 0 to 3"),
    (["--params", "-7.5e9"], "params=-7500000000: allowed are whole numbers, 1 or more"),
    (["--params", "0"], "params=0: allowed are whole numbers, 1 or more"),
    (["--params", "many"], "params='many': allowed are numbers above 0"),
    (["--params", "nan"], "params=nan: allowed are whole numbers, 1 or more"),
    (["--params", "inf"], "params=inf: allowed are whole numbers, 1 or more"),
    (["--params", "7.5e9", "--dp", "0"], "dp=0: allowed are whole numbers, 1 or more"),
    (["--params", "7.5e9", "--dp", "-8"], "dp=-8: allowed are whole numbers, 1 or more"),
    (["--params", "7.5e9", "--tp", "1.5"], "tp='1.5': allowed are whole numbers, 1 or more"),
    (["--params", "7.5e9", "--precision", "fp12"], "precision='fp12': allowed are .*bf16"),
    (["--params", "7.5e9", "--optimizer", "lion"], "optimizer='lion': allowed are .*adamw"),
    (["--params", "7.5e9", "--offload", "disk"], "offload='disk': allowed are .*optimizer"),
    (["--params", "7.5e9", "--unit", "Gb"], "unit='Gb': allowed are .*GiB"),
    (["--model", "llama-9"], "model='llama-9': allowed are 'nano'.*llama-3-8b"),
    (["--model", "gpt-2", "--batch", "0"], "batch=0: allowed are whole numbers, 1 or more"),
    (["--model", "gpt-2", "--seq", "-5"], "seq=-5: allowed are whole numbers, 1 or more"),
    (["--model", "gpt-2", "--recompute", "some"], "recompute='some': allowed are .*selective"),
    (["--model", "gpt-2", "--attention", "x"], "attention='x': allowed are .*plain"),
    (["--model", "gpt-2", "--tp", "5"], "tp=5: allowed are"),
    (["--params", "1e9", "--batch", "2"], "--batch with --params: allowed with --model"),
    (["--params", "1e9", "--model", "gpt-2"], "allowed is exactly one of --params"),
    (["--dp", "2"], "allowed is exactly one of --params"),
    (["--params", "1e9", "--dp", "4", "--ranks", "6"], "ranks=6: allowed is 4, the product of"),
    (["--model", "gpt-2", "--stages", "half"], "stages='half': allowed are equal, .* as 9,9,8,6"),
    (["--model", "gpt-2", "--pp", "2", "--stages", "6,5"], "allowed are those with 12 layers"),
    (
        ["--model", "gpt-2", "--pp", "2", "--stage", "2"],
        "stage=2: allowed are whole numbers, 0 to 1",
    ),
    (["--model", "gpt-2", "--cp", "3"], "cp=3: allowed are divisors of seq=1024"),
    (["--params", "1e9", "--cp", "2"], "--cp with --params: allowed with --model"),
    (["--params", "1e9", "--phase", "2"], "unrecognized arguments: --phase"),
    (["--params", "1e9", "--dp", "2", "3"], "unrecognized arguments: 3"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(a) for a, _ in BAD])
def test_bad_input_is_one_error_and_status_2(capsys, arguments: list[str], message: str) -> None:
    status, out, err = run(capsys, *arguments)
    assert status == 2 and out == ""
    assert "Traceback" not in err
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(err.splitlines()[-1])


def test_the_real_command_line() -> None:
    command = [sys.executable, "-m", "shardlab", "memory", "--params", "7.5e9", "--zero"]
    good = subprocess.run([*command, "1", "--dp", "64"], cwd=ROOT, capture_output=True, text=True)
    assert good.returncode == 0 and not good.stderr
    assert "parameters" in good.stdout and "GB" in good.stdout
    bad = subprocess.run([*command, "9"], cwd=ROOT, capture_output=True, text=True)
    assert bad.returncode == 2 and not bad.stdout
    assert bad.stderr == "python -m shardlab: zero=9: allowed are whole numbers, 0 to 3\n"
