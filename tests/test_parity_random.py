"""Random right programs are silent, and mutants of the course's cores are found."""

from __future__ import annotations

import pytest
import torch
import transformers  # noqa: F401  # once, before any rank starts
from parity_mutants import verdicts
from parity_programs import beside, compared, parallel
from parity_random import drawn

from shardlab import deepspeed_engine

SEEDS = range(100)
DAILY = [seed for seed in SEEDS if drawn(seed).ranks <= 3][:10]  # more ranks take most of the time
PROGRAMS = {"daily": DAILY, "weekly": [seed for seed in SEEDS if seed not in DAILY]}
# Each day, three that change a gradient.
MUTANTS = {"daily": (4, 10, 22), "weekly": range(200)}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("which", PROGRAMS)
def test_random_right_programs_are_silent(which, request):
    if which != "daily" and not request.config.getoption("--whole"):
        pytest.skip("--whole compares all of them")
    deepspeed_engine.prepare()
    rows = {seed: drawn(seed) for seed in PROGRAMS[which]}
    reports = compared({seed: beside(row, parallel(row)) for seed, row in rows.items()})
    loud = {
        seed: f"{rows[seed].name}: {r}"
        for seed, r in reports.items()
        if isinstance(r, str) or not r.equal
    }
    assert not loud, loud
    exact = [seed for seed, row in rows.items() if row.dtype != torch.bfloat16]
    assert all(reports[seed].compared > 30 for seed in exact)
    empty = [seed for seed in exact if reports[seed].undecided > reports[seed].compared / 2]
    assert not empty, empty


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("how", MUTANTS)
def test_mutants_that_change_a_gradient_are_found(how, request):
    if how == "weekly" and not request.config.getoption("--whole"):
        pytest.skip("--whole tries all of them")
    found, controls = verdicts(MUTANTS[how])
    assert all(control.equal for control in controls.values()), controls
    missed = [str(one.mutant) for one in found if one.kind == "missed"]
    seen = sum(one.kind == "found" for one in found)
    assert seen and len(missed) <= 0.05 * (seen + len(missed)), missed
