"""Random right programs are silent, and mutants of the course's cores are found."""

from __future__ import annotations

from dataclasses import replace

import parity_random_nets as nets
import pytest
import torch
import transformers  # noqa: F401  # once, before any rank starts
from parity_mutants import verdicts
from parity_programs import compared, parallel
from parity_random import drawn
from parity_random_nets import Job
from test_parity_more import compared as compared_jobs

from shardlab import deepspeed_engine

SEEDS = range(1000)
DAILY = [seed for seed in SEEDS if drawn(seed).ranks <= 3][:10]  # more ranks take most of the time
REST = [seed for seed in SEEDS if seed not in DAILY]
PROGRAMS = {"daily": DAILY} | {f"from {REST[n]}": REST[n : n + 50] for n in range(0, len(REST), 50)}
JOBS = {"daily": range(6)} | {f"from {n}": range(n, n + 50) for n in range(6, 506, 50)}
NAMED = {
    "without a batch, in micro-batches": Job(
        pieces=("positions", "normed by row", "queries"), micro=2, share="shuffled"
    ),
    "without a batch, on tensor ranks": Job(
        pieces=("feed, normed", "positions"), tensor=2, ranks=4, micro=2, plain_micro=2
    ),
    "rows alike": Job(texts="begin alike", share="dealt", micro=3),
    "all rows alike": Job(texts="constant", share="dealt", micro=2),
    "samples twice": Job(texts="repeated", share="shuffled", micro=2, loss="scaled"),
    "stepped and sent by their owners": Job(split="ZeRO-1 by hand", rule="AdamW", steps=2),
    "a stage in a container": Job(
        split="stages", pieces=("feed", "gru"), container="nested", micro=2, samples=4
    ),
}
# Each day, three that change a gradient.
MUTANTS = {"daily": (4, 10, 22), "weekly": range(200)}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("which", PROGRAMS)
def test_random_right_programs_are_silent(which, request):
    if which != "daily" and not request.config.getoption("--whole"):
        pytest.skip("--whole compares all of them")
    deepspeed_engine.prepare()
    rows = {seed: drawn(seed) for seed in PROGRAMS[which]}
    reports = compared({seed: (row, parallel(row)) for seed, row in rows.items()})
    loud = {seed: f"{rows[seed].name}: {r}" for seed, r in reports.items() if not r.equal}
    assert not loud, loud
    exact = [seed for seed, row in rows.items() if row.dtype != torch.bfloat16]
    assert all(reports[seed].compared > 30 for seed in exact)
    empty = [seed for seed in exact if reports[seed].undecided > reports[seed].compared / 2]
    assert not empty, empty


def reports(jobs: dict[object, Job]) -> dict[object, object]:
    return compared_jobs({n: (nets.plain(j), nets.parallel(j), j.ranks) for n, j in jobs.items()})


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("which", JOBS)
def test_random_jobs_around_odd_models_are_silent(which, request):
    if which != "daily" and not request.config.getoption("--whole"):
        pytest.skip("--whole compares all of them")
    jobs = {seed: nets.drawn(seed) for seed in JOBS[which]}
    loud = {
        n: f"{jobs[n]}: {r}" for n, r in reports(jobs).items() if isinstance(r, str) or not r.equal
    }
    assert not loud, loud


def test_what_is_alike_or_a_part_gets_its_place_and_a_mistake_around_it_is_found():
    by_hand = {name: job for name, job in NAMED.items() if job.split in nets.BY_HAND}
    wrong = {f"{name}, wrong": replace(job, forgets=True) for name, job in by_hand.items()}
    found = reports(NAMED | wrong)
    for name in NAMED:
        assert found[name].equal and not found[name].unplaced, (name, str(found[name]))
    for name in wrong:
        phase, words = ("gradient", "each rank has") if wrong[name].split == "loop" else (
            "update", "rank 1: has not moved"
        )  # fmt: skip
        assert found[name].first.key == (0, phase, "body.wte.weight"), str(found[name])
        assert words in str(found[name])


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("how", MUTANTS)
def test_mutants_that_change_a_gradient_are_found(how, request, tmp_path):
    if how == "weekly" and not request.config.getoption("--whole"):
        pytest.skip("--whole tries all of them")
    found, controls = verdicts(MUTANTS[how], tmp_path)
    assert all(control.equal for control in controls.values()), controls
    missed = [str(one.mutant) for one in found if one.kind == "missed"]
    seen = sum(one.kind == "found" for one in found)
    assert seen and len(missed) <= 0.05 * (seen + len(missed)), missed
