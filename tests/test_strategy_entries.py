"""The stable interface: files in, predictions out, a line for each row, a line for each error."""

import csv
import io
import json
from pathlib import Path

import pytest
from commands import run_main

from shardtools.strategy.rates import DATA_DIR, load_rates

SWEEP, CASES = DATA_DIR / "sweep.csv", DATA_DIR / "megatron.json"
NANOTRON = DATA_DIR / "rates_nanotron.json"
ADDED = ["predicted_seconds", "predicted_memory_gib", "note"]
HEAD = "layers,hidden,heads,ffn,emb,seq,mbs,ga,dp,pp,tp,zero"


def run_cli(capsys, *arguments: object) -> tuple[int, str, str]:
    return run_main(capsys, "strategy", *map(str, arguments))


def predict_file(capsys, path: Path) -> list[dict[str, str]]:
    given = path, "--rates", NANOTRON, "--profile", "nanotron"
    status, out, err = run_cli(capsys, "predict", *given)
    assert status == 0 and not err
    return list(csv.DictReader(io.StringIO(out)))


def test_predicted_rows_keep_order_and_columns(capsys) -> None:
    given = list(csv.DictReader(SWEEP.open()))
    found = predict_file(capsys, SWEEP)
    assert len(found) == 340 and list(found[0]) == [*given[0], *ADDED]
    good = 0
    for row, line in zip(given, found, strict=True):
        assert {name: line[name] for name in row} == row
        assert line["note"] == ""
        taken = int(row["gbs"]) * int(row["seq"]) / float(row["tok_s_gpu"]) / int(row["n_gpus"])
        time = float(line["predicted_seconds"]) / taken
        size = float(line["predicted_memory_gib"]) / float(row["mem_GiB"])
        good += 0.8 < time < 1.25 and 0.8 < size < 1.25
    assert good >= 30  # units are those of the file; test_strategy_predict checks the accuracy


def test_rows_without_measurements_are_predicted_with_notes(capsys, tmp_path) -> None:
    path = tmp_path / "rows.csv"
    good = "32,4096,32,14336,untied,4096,1,128,2,1,4,1"
    rows = {
        good: "",
        good.replace(",2,1,4,1", ",2,1,3,1"): "tp=3",
        good.replace(",4,1", ",4,5"): "zero=5",
        good.replace(",128,", ",,"): "ga is missing",
        good.replace(",128,", ",many,"): "ga='many'",
    }
    path.write_text("\n".join([HEAD, *rows]) + "\n")
    found = predict_file(capsys, path)
    for row, words in zip(found, rows.values(), strict=True):
        assert row["note"].startswith(words) and bool(row["note"]) == bool(words)
    for row in found:
        numbers = row["predicted_seconds"], row["predicted_memory_gib"]
        assert all(float(x) > 0 for x in numbers) if not row["note"] else numbers == ("", "")


def test_predicted_cases_have_notes(capsys, tmp_path) -> None:
    shape = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14_336}
    case = shape | {"gpu": "h100", "gpus": 8, "tp": 2, "mbs": 2, "gbs": 128, "seq": 8192}
    bad = {
        "gpus=8": {"dp": 16},
        "gbs=100": {"gbs": 100},
        "recompute='everything'": {"recompute": "everything"},
        "ep=2": {"ep": 2},
        "hidden is missing": {"hidden": None},
    }
    cases = [{"id": "good", "config": case}]
    cases += [{"id": name, "config": case | change} for name, change in bad.items()]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    rates = DATA_DIR / "rates_megatron.json"
    status, out, _ = run_cli(capsys, "predict", tmp_path / "cases.json", "--rates", rates)
    good, *others = json.loads(out)
    assert status == 0 and 3 < good["seconds"] < 20 and good["memory_gib"] > 20
    assert not good["note"]
    for one in others:
        assert one["seconds"] is None and one["note"].startswith(one["id"]), one


def test_a_fit_writes_the_rates_that_come_with_the_course(capsys, tmp_path) -> None:
    """test_strategy_predict fits the rates of the sweep, which takes longer."""
    rates = tmp_path / "rates.json"
    status, out, err = run_cli(capsys, "fit", CASES, "--rates", rates, "--profile", "megatron")
    assert status == 0 and not err and "launch" in out and CASES.name in out
    kept, found = load_rates("megatron"), json.loads(rates.read_text())
    assert found["profile"] == "megatron"
    for name, rate in found["rates"].items():
        assert set(rate) == {"value", "unit", "spread", "origin"}
        assert rate["value"] == pytest.approx(kept[name], rel=1e-6)
        assert rate["origin"] == kept.by_name[name].origin


def test_skipped_lines_are_reported(capsys, tmp_path) -> None:
    table, good, *rest = (DATA_DIR / "throughput.csv").read_text().splitlines()
    bad = {
        good.replace("deepseek-v3", "gpt-5"): "line 3 is left out: model='gpt-5'",
        good.replace("6288", ""): "line 4 is left out: has neither seconds",
        good.replace("6288", "many"): "line 5 is left out: tokens_per_s_per_gpu='many'",
    }
    (tmp_path / "rows.csv").write_text("\n".join([table, good, *bad, *rest[-3:]]))
    rates = tmp_path / "rates.json"
    status, out, _ = run_cli(
        capsys, "fit", tmp_path / "rows.csv", "--rates", rates, "--profile", "engines"
    )
    said = [line for line in out.splitlines() if "left out" in line]
    assert status == 0 and len(said) == len(bad) and all(map(str.startswith, said, bad.values()))


def test_a_file_without_the_columns_is_refused(capsys, tmp_path) -> None:
    (tmp_path / "rows.csv").write_text("hidden,heads\n1,1\n")
    status, out, err = run_cli(capsys, "predict", tmp_path / "rows.csv", "--rates", NANOTRON)
    assert status == 2 and not out and "'layers' is missing" in err and err.count("\n") == 1
