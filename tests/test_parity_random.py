"""Random right programs are silent, and mutants of the course's cores are found."""

from __future__ import annotations

import pytest
import torch
import transformers  # noqa: F401  # once, before any rank starts
from parity_mutants import judge_mutants
from parity_programs import compare_cases, make_case, make_parallel_program
from parity_random import draw_row

from shardlab import deepspeed_engine

DAILY = [1, 2, 3, 5, 7, 10]  # zero, mesh, DDP, experts, tensor, context, on two ranks each
WEEKLY = pytest.mark.weekly("takes half an hour")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "seeds", [DAILY, pytest.param(sorted({*range(100)} - {*DAILY}), marks=WEEKLY)], ids=len
)
def test_random_right_programs_are_silent(seeds):
    rows = {seed: draw_row(seed) for seed in seeds}
    if any(row.technique == "DeepSpeed" for row in rows.values()):
        deepspeed_engine.import_deepspeed()
    reports = compare_cases(
        {seed: make_case(row, make_parallel_program(row)) for seed, row in rows.items()}
    )
    loud = {
        seed: f"{rows[seed].name}: {r}"
        for seed, r in reports.items()
        if isinstance(r, str) or not r.is_equal
    }
    assert not loud, loud
    exact = [seed for seed, row in rows.items() if row.dtype != torch.bfloat16]
    assert all(reports[seed].num_compared > 30 for seed in exact)
    empty = [seed for seed in exact if reports[seed].num_undecided > reports[seed].num_compared / 2]
    assert not empty, empty


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seeds", [(4, 10), pytest.param(range(200), marks=WEEKLY)], ids=len)
def test_mutants_that_change_a_gradient_are_found(seeds):
    found, controls = judge_mutants(seeds)
    assert all(control.is_equal for control in controls.values()), controls
    missed = [str(one.mutant) for one in found if one.kind == "missed"]
    seen = sum(one.kind == "found" for one in found)
    assert seen and len(missed) <= 0.05 * (seen + len(missed)), missed
