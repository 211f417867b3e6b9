"""`python -m shardlab schedule`: a picture for people, numbers for programs, one clear error."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ran

from shardlab import pipeline
from shardlab.__main__ import main

ROOT = Path(__file__).resolve().parents[1]
# The first row of the zero bubble paper's Table 9 (arXiv 2401.10241).
PAPER = [
    "--stages", "8", "--microbatches", "24", "--forward", "18.522", "--backward-input", "18.086",
    "--backward-weight", "9.337", "--hop", "0.601",
]  # fmt: skip
SMALL = ["--stages", "4", "--microbatches", "6"]


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    return ran(capsys, "schedule", *arguments)


def test_the_bubble_of_the_paper(capsys) -> None:
    for name, rate in (("1f1b", "0.2431"), ("zb-h1", "0.1585"), ("zb-h2", "0.1083")):
        status, out, err = run(capsys, name, *PAPER)
        assert status == 0 and not err
        assert re.search(rf"^  bubble +{rate} of the cost$", out, re.MULTILINE)
        assert max(map(len, out.splitlines())) <= 80 and "\033" not in out
        assert [row[:8] for row in out.splitlines()[5:13]] == [f"stage {i} " for i in range(8)]
        _, out, _ = run(capsys, name, *PAPER, "--json")
        assert f"{json.loads(out)['bubble']:.4f}" == rate


@pytest.mark.parametrize("name", pipeline.NAMES)
def test_json_is_what_simulate_says(capsys, name: str) -> None:
    options = ["--chunks", "3"] if name == "interleaved" else []
    times = ["--forward", "1,2,1.5,1", "--backward-input", "2", "--hop", "0.25"]
    status, out, err = run(capsys, name, *SMALL, *options, *times, "--json")
    assert status == 0 and not err and out.count("\n") == 1
    found = json.loads(out)
    made = pipeline.schedule(name, 4, 6, 3 if options else None)
    timeline = pipeline.simulate(made, [1, 2, 1.5, 1], 2, hop=0.25)
    assert (found["bubble"], found["cost"]) == (timeline.bubble, timeline.cost)
    assert found["peak_activations"] == list(timeline.peak_activations)
    assert found["busy"] == list(timeline.busy)
    assert found["timeline"] == [[span._asdict() for span in row] for row in timeline.spans]
    heads = [found[key] for key in ("schedule", "stages", "microbatches", "chunks")]
    assert heads == [name, 4, 6, made.chunks]


def test_the_screen_says_memory_and_chunks(capsys) -> None:
    _, out, _ = run(capsys, "interleaved", "--stages", "4", "--microbatches", "8")
    assert out.startswith("interleaved: 4 stages, 2 chunks on each, 8 micro-batches\n")
    assert "peak activations  5.5 4.5 3.5 2.5  (micro-batches, by stage)" in out
    _, out, _ = run(capsys, "naive", "--stages", "1", "--microbatches", "1")
    assert out.startswith("naive: 1 stage, 1 micro-batch\n") and "bubble            0.0000" in out


def test_colours_and_width_are_those_of_the_terminal(capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    _, out, _ = run(capsys, "zb-h1", *SMALL)
    assert "\033[48;5;" in out
    plain = re.sub("\033\\[[0-9;]*m", "", out)
    assert 50 < max(map(len, plain.splitlines())) <= 60


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_an_old_terminal_gets_plain_characters(monkeypatch, encoding: str) -> None:
    screen = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", screen)
    assert main(["schedule", "1f1b", *SMALL]) == 0
    screen.flush()
    shown = screen.buffer.getvalue().decode(encoding)
    assert "stage 3 ......F0B0##F1B1##" in shown and "F- forward   B# backward" in shown


def test_svg_is_written(capsys, tmp_path: Path) -> None:
    path = tmp_path / "timeline.svg"
    status, out, err = run(capsys, "1f1b", *SMALL, "--svg", str(path))
    assert status == 0 and not err and out.endswith(f"\npicture: {path}\n")
    page = path.read_text("utf-8")
    assert page.startswith("<svg") and "1f1b, 4 stages, 6 micro-batches: bubble 33.3 %" in page
    path.write_text("old")
    status, out, _ = run(capsys, "1f1b", *SMALL, "--svg", str(path), "--json")
    assert path.read_text("utf-8") == page and json.loads(out)["stages"] == 4


BAD = [
    (["1f1c", *SMALL], "schedule='1f1c': allowed are naive, gpipe, 1f1b, interleaved, zb-h1"),
    ([*SMALL], "schedule='': allowed are naive"),
    (["1f1b"], "stages='': allowed are whole numbers, 1 or more"),
    (["1f1b", "--stages", "4"], "microbatches='': allowed are whole numbers, 1 or more"),
    (["1f1b", "--stages", "0", "--microbatches", "6"], "stages=0: allowed are whole numbers, 1"),
    (["1f1b", "--stages", "4", "--microbatches", "0"], "microbatches=0: allowed are whole numbers"),
    (["1f1b", "--stages", "-4", "--microbatches", "6"], "stages=-4: allowed are whole numbers"),
    (["1f1b", "--stages", "1.5", "--microbatches", "6"], "stages='1.5': allowed are whole numbers"),
    (["1f1b", *SMALL, "--chunks", "2"], "chunks=2: allowed for 1f1b is 1"),
    (["zb-v", *SMALL, "--chunks", "4"], "chunks=4: allowed for zb-v is 2"),
    (["interleaved", *SMALL, "--chunks", "0"], "chunks=0: allowed are whole numbers, 1 or more"),
    (["interleaved", *SMALL, "--chunks"], "chunks='': allowed are whole numbers, 1 or more"),
    (["1f1b", *SMALL, "--forward", "-1"], "forward=-1.0: allowed are numbers from 0"),
    (["1f1b", *SMALL, "--backward-input", "x"], "backward_input='x': allowed are numbers from 0"),
    (["1f1b", *SMALL, "--backward-weight", "nan"], "backward_weight=nan: allowed are numbers from"),
    (["1f1b", *SMALL, "--hop", "inf"], "hop=inf: allowed are numbers from 0"),
    (["1f1b", *SMALL, "--hop"], "hop='': allowed are numbers from 0"),
    (["1f1b", *SMALL, "--forward", "1,2"], "forward has 2 values: allowed are one for all, or one"),
    (["1f1b", *SMALL, "--svg", "/nowhere/x.svg"], "svg='/nowhere/x.svg': allowed are files in a"),
    (["1f1b", *SMALL, "--svg", "/"], "svg='/': allowed are files in a folder"),
    (["1f1b", *SMALL, "--svg"], "svg='': allowed are names"),
    (["1f1b", "--stages", "9999", "--microbatches", "9999"], "stages=9999: allowed are 1 to 1,000"),
    (["1f1b", "--stages", "1000", "--microbatches", "1000"], "allowed are 100,000 at most"),
    (["zb-v", "--stages", "1000", "--microbatches", "51"], "allowed are 100,000 at most"),
    (["1f1b", *SMALL, "--svg", "/proc/x.svg"], "svg='/proc/x.svg': allowed are files in a folder"),
    (["1f1b", *SMALL, "--svg", "/dev/full"], "svg='/dev/full': allowed are files in a folder"),
    (["1f1b", *SMALL, "--svg", "a" * 300], "aaa': allowed are names of files"),
    (["1f1b", *SMALL, "--forward", "5e-324"], "forward=5e-324: allowed are numbers from 0, above"),
    (["1f1b", *SMALL, "--forward", "1,1,1,1e308"], "forward=1e+308: allowed are numbers from 0"),
    (["1f1b", *SMALL, "--stage", "2"], "unrecognized arguments: --stage"),
    (["1f1b", "gpipe", *SMALL], "unrecognized arguments: gpipe"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(a) for a, _ in BAD])
def test_bad_input_is_one_error_and_status_2(capsys, arguments: list[str], message: str) -> None:
    status, out, err = run(capsys, *arguments)
    assert status == 2 and out == ""
    assert "Traceback" not in err and message in err.splitlines()[-1]


def test_nothing_is_written_after_an_error(capsys, tmp_path: Path) -> None:
    path = tmp_path / "timeline.svg"
    for bad in (["--hop", "-1"], ["--stages", "0"], ["--chunks", "7"]):
        assert run(capsys, "1f1b", *SMALL, "--svg", str(path), *bad)[0] == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("time", ["0", "1e-100", "1e100", "1,1e-100,1e100,0"])
def test_the_least_and_the_most_that_are_allowed_are_drawn(capsys, tmp_path, time: str) -> None:
    path, times = tmp_path / "timeline.svg", []
    for name in ("--forward", "--backward-input", "--backward-weight", "--hop"):
        times += [name, time]
        assert run(capsys, "1f1b", *SMALL, *times, "--svg", str(path))[0] == 0
        assert run(capsys, "1f1b", *SMALL, *times)[0] == 0
    _, out, _ = run(capsys, "1f1b", *SMALL, *times, "--json")
    assert 0 <= json.loads(out)["bubble"] < 1
    assert "inf" not in path.read_text("utf-8") and "nan" not in path.read_text("utf-8")


def test_a_reader_who_has_had_enough_is_no_error() -> None:
    command = [sys.executable, "-m", "shardlab", "schedule", "1f1b", "--json"]
    long = [*command, "--stages", "16", "--microbatches", "500"]  # more than a pipe holds
    with subprocess.Popen(long, cwd=ROOT, stdout=-1, stderr=-1, text=True) as process:
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == ""


def test_the_real_command_line() -> None:
    command = [sys.executable, "-m", "shardlab", "schedule"]
    good = subprocess.run([*command, "1f1b", *PAPER], cwd=ROOT, capture_output=True, text=True)
    assert good.returncode == 0 and not good.stderr and "0.2431" in good.stdout
    bad = subprocess.run([*command, "2f2b", *SMALL], cwd=ROOT, capture_output=True, text=True)
    assert bad.returncode == 2 and not bad.stdout
    assert bad.stderr.startswith("python -m shardlab: schedule='2f2b': allowed are naive, gpipe")
    assert bad.stderr.count("\n") == 1
