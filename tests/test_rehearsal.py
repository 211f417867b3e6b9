"""Every topic's main functions on pretended GPUs: on one that is shared, on two, and on four.

Each day every drive runs on one number of GPUs, or on all numbers that matter for it; with
--weekly on all. One process runs all drives, and one tries the seeded faults; here, each drive
and each fault is a test.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache

import pytest
import torch
from rehearsal import drives, lessons, seeds

pytestmark = [
    pytest.mark.timeout(600),  # the first test waits for a whole process
    pytest.mark.skipif(
        torch.version.cuda is not None,
        reason="the rehearsal pretends CUDA on torch's build without it; this one has it",
    ),
]

CASES = [
    (name, gpus)
    for gpus in (1, 2, 4)
    for topic in drives.TOPICS
    for name, drive in drives.drives(topic).items()
    if gpus in drives.list_gpu_counts(drive)
]


def _list_daily(name: str) -> tuple[int, ...]:
    """Return the numbers of GPUs on which a drive runs each day."""
    return drives.list_gpu_counts(drives.drives(name.partition(".")[0])[name], whole=False)


@cache
def _collect_errors(
    module: str, whole: bool, *named: str, **more: str
) -> dict[tuple[str, int], str]:
    """Return the error of each of a module's drives or seeds, by name and GPUs; "" for none."""
    settings = {"REHEARSE_FORK": "1"} | ({"REHEARSE_WHOLE": "1"} if whole else {}) | more
    environment = lessons.environment(4, **settings)
    environment["PYTHONPATH"] += f":{lessons.HERE.parent}"
    done = subprocess.run(
        [sys.executable, "-m", module, *named], env=environment, capture_output=True, text=True
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    assert lines, done.stderr[-3000:]
    return {(line["name"], line["gpus"]): line["error"] for line in lines}


def test_cells_that_are_not_rehearsed_are_in_their_lessons() -> None:
    for lesson, text, _ in lessons.NOT_REHEARSED:
        assert text in (lessons.ROOT / f"code/lessons/{lesson}.py").read_text("utf-8")


@pytest.mark.parametrize(("name", "gpus"), CASES)
def test_drive(name: str, gpus: int, request: pytest.FixtureRequest):
    whole = request.config.getoption("--weekly")
    if gpus not in _list_daily(name) and not whole:
        pytest.skip(f"as on {_list_daily(name)[0]}: --weekly")
    assert _collect_errors("rehearsal.drives", whole)[name, gpus] == ""


INTELS = "contract.DDP", "memory.held_saved_and_sent", "ranks.messages"
INTELS += "ranks.a_device_for_each", "tensor_parallel.dropout", "zero.bf16"


@pytest.mark.weekly("the same drives, where torch has another name for the device")
def test_a_device_of_another_name_goes_the_same_ways():
    """Intel's GPUs: torch calls the device "xpu" and the backend "xccl". None is shared."""
    found = _collect_errors("rehearsal.drives", False, *INTELS, REHEARSE="2", REHEARSE_DEVICE="xpu")
    assert {name: found[name, 2] for name in INTELS} == dict.fromkeys(INTELS, "")


@pytest.mark.weekly("a test of the rehearsal, not of the course")
@pytest.mark.parametrize("seed", seeds.SEEDS, ids=lambda seed: seed.name)
def test_seeded_fault_is_found(seed: seeds.Seed):
    honest = drives.list_gpu_counts(drives.drives(seed.drive.partition(".")[0])[seed.drive])
    assert seed.gpus in honest, "honest code does not run this drive on so many GPUs"
    found = _collect_errors("rehearsal.seeds", False)[seed.name, seed.gpus]
    assert seed.sign in found, found or f"{seed.drive} did not find it"
