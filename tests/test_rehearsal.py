"""Every topic's main functions on pretended GPUs: one that is shared, two, and four.

Each day every drive runs on one number of GPUs, or on those that differ for it; with --whole, once
a week, on all. One process for each number of GPUs runs all of its drives, and one tries the seeded
faults; here, each drive and each fault is a test.
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
    pytest.mark.timeout(600),  # whoever comes first waits for a whole process
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
    if gpus in drives.numbers(drive)
]


def _daily(name: str) -> tuple[int, ...]:
    """The numbers of GPUs on which a drive runs each day."""
    return drives.numbers(drives.drives(name.partition(".")[0])[name], whole=False)


@cache
def _lines(module: str, gpus: int, whole: bool = False, *named: str, **more: str) -> dict[str, str]:
    """The error of each line that `module` prints, by name, and what it said besides."""
    settings = {"REHEARSE_FORK": "1"} | ({"REHEARSE_WHOLE": "1"} if whole else {}) | more
    environment = lessons.environment(gpus, **settings)
    environment["PYTHONPATH"] += f":{lessons.HERE.parent}"
    done = subprocess.run(
        [sys.executable, "-m", module, *named], env=environment, capture_output=True, text=True
    )
    found = {"": done.stderr[-3000:]}
    for line in done.stdout.splitlines():
        if line.startswith('{"'):
            values = json.loads(line)
            found[values.get("drive") or values["seed"]] = values["error"]
    return found


@pytest.mark.parametrize(("name", "gpus"), CASES)
def test_drive(name: str, gpus: int, request: pytest.FixtureRequest):
    whole = request.config.getoption("--whole")
    if gpus not in _daily(name) and not whole:
        pytest.skip(f"as on {_daily(name)[0]}: --whole")
    found = _lines("rehearsal.drives", gpus, whole)
    assert name in found, found[""]
    assert not found[name], found[name]


INTELS = "contract.DDP", "memory.held_saved_and_sent", "ranks.messages"
INTELS += "ranks.a_device_for_each", "tensor_parallel.dropout", "zero.bf16"


def test_a_device_of_another_name_goes_the_same_ways():
    """Intel's: torch calls it "xpu", and what moves its messages "xccl"."""
    found = _lines("rehearsal.drives", 2, False, *INTELS, REHEARSE_DEVICE="xpu")
    said = {name: error for name, error in found.items() if name}
    assert {*INTELS} == said.keys(), found[""]
    assert not any(said.values()), said


@pytest.mark.parametrize("seed", seeds.SEEDS, ids=lambda seed: seed.name)
def test_seeded_fault_is_found(seed: seeds.Seed):
    honest = drives.numbers(drives.drives(seed.drive.partition(".")[0])[seed.drive])
    assert seed.gpus in honest, "honest code does not run this drive on so many GPUs"
    found = _lines("rehearsal.seeds", 4)
    assert seed.name in found, found[""]
    assert seed.sign in found[seed.name], found[seed.name] or f"{seed.drive} did not find it"
