"""`python -m shardlab schedule`: a picture for people, numbers for programs, one clear error."""

import json
import re

import pytest
from commands import run_main

from shardlab import pipeline

# The first row of the zero bubble paper's Table 9 (arXiv 2401.10241).
PAPER = [
    "--stages", "8", "--microbatches", "24", "--forward", "18.522", "--backward-input", "18.086",
    "--backward-weight", "9.337", "--hop", "0.601",
]  # fmt: skip
SMALL = ["--stages", "4", "--microbatches", "6"]


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    return run_main(capsys, "schedule", *arguments)


def test_the_bubble_of_the_paper(capsys) -> None:
    status, out, err = run(capsys, "1f1b", *PAPER)
    assert status == 0 and not err
    assert re.search(r"^  bubble +0.2431 of the cost$", out, re.MULTILINE)
    assert max(map(len, out.splitlines())) <= 80 and "\033" not in out
    assert [row[:8] for row in out.splitlines()[5:13]] == [f"stage {i} " for i in range(8)]


@pytest.mark.parametrize("name", pipeline.SCHEDULE_NAMES)
def test_json_is_what_simulate_says(capsys, name: str) -> None:
    options = ["--chunks", "3"] if name == "interleaved" else []
    times = ["--forward", "1,2,1.5,1", "--backward-input", "2", "--hop", "0.25"]
    status, out, err = run(capsys, name, *SMALL, *options, *times, "--json")
    assert status == 0 and not err and out.count("\n") == 1
    found = json.loads(out)
    made = pipeline.make_schedule(name, 4, 6, 3 if options else None)
    timeline = pipeline.simulate(made, [1, 2, 1.5, 1], 2, hop=0.25)
    assert (found["bubble"], found["cost"]) == (timeline.bubble, timeline.step_time)
    assert found["peak_activations"] == list(timeline.peak_activations)
    assert found["busy"] == list(timeline.busy_times)
    assert found["timeline"] == [[span._asdict() for span in row] for row in timeline.spans]
    heads = [found[key] for key in ("schedule", "stages", "microbatches", "chunks")]
    assert heads == [name, 4, 6, made.chunks]
