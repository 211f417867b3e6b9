"""Every topic's main functions on pretended GPUs: one that is shared, two, and four.

One process for each number of GPUs runs all of its drives, and one tries the seeded faults; here,
each drive and each fault is a test.
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


@cache
def _lines(module: str, gpus: int) -> dict[str, str]:
    """The error of each line that `module` prints, by name, and what it said besides."""
    environment = lessons.environment(gpus, REHEARSE_FORK="1")
    environment["PYTHONPATH"] += f":{lessons.HERE.parent}"
    done = subprocess.run(
        [sys.executable, "-m", module], env=environment, capture_output=True, text=True
    )
    found = {"": done.stderr[-3000:]}
    for line in done.stdout.splitlines():
        if line.startswith('{"'):
            values = json.loads(line)
            found[values.get("drive") or values["seed"]] = values["error"]
    return found


@pytest.mark.parametrize(("name", "gpus"), CASES)
def test_drive(name: str, gpus: int):
    found = _lines("rehearsal.drives", gpus)
    assert name in found, found[""]
    assert not found[name], found[name]


@pytest.mark.parametrize("seed", seeds.SEEDS, ids=lambda seed: seed.name)
def test_seeded_fault_is_found(seed: seeds.Seed):
    assert (seed.drive, seed.gpus) in CASES, "honest code does not run this drive on so many GPUs"
    found = _lines("rehearsal.seeds", 4)
    assert seed.name in found, found[""]
    assert seed.sign in found[seed.name], found[seed.name] or f"{seed.drive} did not find it"
