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
from shardtools.__main__ import main

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
    status, out, err = run(capsys, "1f1b", *PAPER)
    assert status == 0 and not err
    assert re.search(r"^  bubble +0.2431 of the cost$", out, re.MULTILINE)
    assert max(map(len, out.splitlines())) <= 80 and "\033" not in out
    assert [row[:8] for row in out.splitlines()[5:13]] == [f"stage {i} " for i in range(8)]


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
