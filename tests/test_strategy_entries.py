"""The stable entries: files in, predictions out, one line for each row, one line for each error."""

import csv
import io
import json
from pathlib import Path

import pytest
from commands import ran

from shardtools.strategy.rates import PUBLISHED, known

SWEEP, CASES = PUBLISHED / "sweep.csv", PUBLISHED / "megatron.json"
NANOTRON, MEGATRON = PUBLISHED / "rates_nanotron.json", PUBLISHED / "rates_megatron.json"
ADDED = ["predicted_seconds", "predicted_memory_gib", "note"]
HEAD = "layers,hidden,heads,ffn,emb,seq,mbs,ga,dp,pp,tp,zero"


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    return ran(capsys, "strategy", *map(str, arguments))


def predicted(capsys, path: Path) -> list[dict[str, str]]:
    status, out, err = run(capsys, "predict", path, "--rates", NANOTRON, "--profile", "nanotron")
    assert status == 0 and not err
    return list(csv.DictReader(io.StringIO(out)))


def test_rows_come_back_in_order_with_what_is_predicted(capsys) -> None:
    given = list(csv.DictReader(SWEEP.open()))
    found = predicted(capsys, SWEEP)
    assert len(found) == 340 and list(found[0]) == [*given[0], *ADDED]
    good = 0
    for row, line in zip(given, found, strict=True):
        assert {name: line[name] for name in row} == row
        assert line["note"] == ""
        taken = int(row["gbs"]) * int(row["seq"]) / float(row["tok_s_gpu"]) / int(row["n_gpus"])
        time = float(line["predicted_seconds"]) / taken
        size = float(line["predicted_memory_gib"]) / float(row["mem_GiB"])
        good += 0.8 < time < 1.25 and 0.8 < size < 1.25
    assert good >= 30  # units are those of the file; how near they come, test_strategy_predict asks


def test_no_measured_column_is_needed_and_reasons_stand_beside_rows(capsys, tmp_path) -> None:
    path = tmp_path / "rows.csv"
    good = "32,4096,32,14336,untied,4096,1,128,2,1,4,1"
    rows = {
        good: "",
        good.replace(",2,1,4,1", ",2,1,3,1"): "tp=3: allowed are divisors of heads=32",
        good.replace("32,4096,32", "32,4096,30"): "hidden=4096: allowed are multiples of 60",
        good.replace(",4,1", ",4,5"): "zero=5: allowed are 0, 1, 2 and 3",
        good.replace(",128,", ",,"): "ga is missing",
        good.replace(",128,", ",many,"): "ga='many': allowed are whole numbers, 1 or more",
        good.replace(",128,", ",1.5,"): "ga='1.5': allowed are whole numbers, 1 or more",
        good + ",": "",
    }
    path.write_text("\n".join([HEAD, *rows]) + "\n")
    found = predicted(capsys, path)
    assert [row["note"] for row in found] == list(rows.values())
    for row in found:
        numbers = row["predicted_seconds"], row["predicted_memory_gib"]
        assert all(float(x) > 0 for x in numbers) if not row["note"] else numbers == ("", "")
    path.write_text(f"{HEAD},n_gpus,gbs\n{good},8,256\n{good},16,256\n{good},8,255\n")
    assert [row["note"][:6] for row in predicted(capsys, path)] == ["", "n_gpus", "gbs=25"]
    path.write_text(HEAD + "\n")
    assert predicted(capsys, path) == []


def test_a_fit_writes_the_rates_that_come_with_the_course(capsys, tmp_path) -> None:
    rates = tmp_path / "rates.json"
    for source, profile in ((SWEEP, "nanotron"), (CASES, "megatron")):
        status, out, err = run(capsys, "fit", source, "--rates", rates, "--profile", profile)
        assert status == 0 and not err and "launch" in out and source.name in out
        kept = known(profile)
        found = json.loads(rates.read_text())
        assert found["profile"] == profile
        for name, rate in found["rates"].items():
            assert set(rate) == {"value", "unit", "spread", "origin"}
            assert rate["value"] == pytest.approx(kept[name], rel=1e-6)
            assert rate["origin"] == kept.all[name].origin


def test_cases(capsys, tmp_path) -> None:
    path = tmp_path / "cases.json"
    config = next(
        case["config"] for case in json.loads(CASES.read_text())
        if case["id"] == "korthikanti-175B-sel+sp"
    )  # fmt: skip
    llama = {
        "layers": 126, "hidden": 16_384, "heads": 128, "kv_heads": 8, "ffn": 53_248, "seq": 8192,
        "vocab": 128_256, "gbs": 2048, "mbs": 1, "tp": 8, "pp": 16, "dp": 64, "cp": 1, "vp": 1,
        "zero": 1, "gpu": "H100", "precision": "bf16", "recompute": "none", "attention": "flash",
        "mlp": "swiglu", "sequence_parallel": True,
    }  # fmt: skip
    odd = {
        "fp8": llama | {"precision": "fp8"},
        "around": llama | {"cp": 2, "dp": 32, "gbs": 1024},
        "gpu": config | {"gpu": "TPU"},
        "layers": {k: v for k, v in config.items() if k != "layers"},
        "batch": config | {"gbs": 63, "dp": 2},
        "recompute": config | {"recompute": "some"},
        "tp": config | {"tp": 7},
    }
    cases = [{"id": 1, "config": config}, {"id": "llama", "config": llama}]
    cases += [{"id": name, "config": value} for name, value in odd.items()]
    path.write_text(json.dumps(cases))
    status, out, err = run(capsys, "predict", path, "--rates", MEGATRON, "--profile", "megatron")
    found = json.loads(out)
    assert status == 0 and not err
    assert [x["id"] for x in found] == [x["id"] for x in cases]
    assert all(list(x) == ["id", "seconds", "memory_gib", "note"] for x in found)
    assert found[0]["seconds"] == pytest.approx(13.75, rel=0.04)
    assert found[2]["seconds"] < found[1]["seconds"]  # products in 8 bits are faster
    assert all(x["memory_gib"] > 0 and not x["note"] for x in found[:4])
    notes = ["gpu='TPU'", "layers is missing", "gbs=63", "recompute='some'", "tp=7"]
    for x, words in zip(found[4:], notes, strict=True):
        assert x["note"].startswith(words) and x["seconds"] is None and x["memory_gib"] is None


WRONG = {
    "no rates": (["fit", SWEEP], "required: --rates"),
    "profile": (["fit", SWEEP, "--rates", "R", "--profile", "mine"], "profile='mine': allowed"),
    "no profile": (["fit", SWEEP, "--rates", "R"], "profile='': allowed are course, megatron"),
    "no file": (
        ["fit", "none.csv", "--rates", "R", "--profile", "nanotron"],
        "file='none.csv': allowed are files",
    ),
    "not rates": (
        ["predict", SWEEP, "--rates", CASES],
        "allowed are files that `strategy fit` wrote",
    ),
    "another's rates": (
        ["predict", SWEEP, "--rates", NANOTRON, "--profile", "megatron"],
        "profile='megatron': allowed is 'nanotron'",
    ),
    "not rows": (["predict", "ROWS", "--rates", NANOTRON], "'layers' is missing"),
    "other JSON": (["predict", MEGATRON, "--rates", MEGATRON], 'objects with "id" and "config"'),
    "nothing to fit": (
        ["fit", "EMPTY", "--rates", "R", "--profile", "nanotron"],
        "measured=0: allowed are 1 or more",
    ),
    "nowhere to write": (
        ["fit", CASES, "--rates", "none/R", "--profile", "megatron"],
        "rates='none/R': allowed are files in a folder",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_gets_one_line_and_nothing_is_written(
    capsys, tmp_path, monkeypatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("EMPTY").write_text(HEAD + "\n")
    Path("ROWS").write_text("hidden,heads\n1,1\n")
    arguments, words = WRONG[name]
    status, out, err = run(capsys, *arguments)
    assert status == 2 and not out
    assert words in err and err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["EMPTY", "ROWS"]
