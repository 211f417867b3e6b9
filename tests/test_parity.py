"""Parity is silent on right programs and on controls, and names the mistake of wrong programs."""

from __future__ import annotations

import re
import sys
import time
from functools import cache
from typing import Any

import pytest
import torch
from commands import run_main
from parity_measured import make_table, measure_mistakes
from parity_mistakes import MISTAKES, PROGRAMS, list_items, read_section
from parity_programs import (
    RIGHT,
    Program,
    Row,
    compare_cases,
    make_case,
    make_parallel_program,
    name_plain_program,
)

from shardlab import context_parallel as cp
from shardlab import ranks
from shardlab.common import show
from shardtools import parity
from shardtools.parity.places import propose_permuted, propose_pieces, propose_places
from shardtools.parity.programs import build_report, check_plain_run, match_program, record_program
from shardtools.parity.record import Record

LESSONS = show.ROOT / "lessons"


@cache
def compute_reports() -> dict[str, Any]:
    right = {name: make_case(row, make_parallel_program(row)) for name, row in RIGHT.items()}
    controls = {
        name_control(one.row): make_case(one.row, make_parallel_program(one.row, one.control))
        for one in PROGRAMS.values()
    }
    wrong = {name: make_case(one.row, one.build_program()) for name, one in PROGRAMS.items()}
    return compare_cases(right | wrong | controls)


def name_control(row: Row) -> str:
    return f"{row.technique} {row.layout} {row.options} {name_plain_program(row)}"


@pytest.mark.timeout(1800)  # the first test waits for all
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_is_silent(name):
    report = compute_reports()[name]
    assert report.is_equal, report
    assert report.num_compared > 50 and max(report.tolerance_used.values()) < 1


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_mistake_is_found_where_it_is_and_named_and_without_it_all_is_silent(name):
    one, report = PROGRAMS[name], compute_reports()[name]
    assert not report.is_equal
    key, words = report.first_finding.key, str(report).replace("\n", " ")
    assert re.search(one.place, f"{key.step} {key.phase} {key.name}"), report
    assert re.search(one.words, words), report
    without = compute_reports()[name_control(one.row)]
    assert without.is_equal, without


# Mistakes that lessons show


@pytest.mark.parametrize("lesson", sorted(path.stem for path in LESSONS.glob("*.md")))
def test_every_mistake_of_a_lesson_has_a_program_or_says_why_not(lesson):
    if lesson == "parity":
        pytest.skip("it is about finding them")
    mine = [one for one in MISTAKES if one.lesson == lesson]
    text = (LESSONS / f"{lesson}.md").read_text("utf-8")
    for one in mine:
        assert one.quote in text, f"{one.quote!r} does not stand in {lesson}"
        assert bool(one.no_program) != (one.program in PROGRAMS), one
    for item in list_items(read_section(lesson)):
        known = any(item.startswith(one.quote) for one in mine)
        assert known, f"{lesson}: {item!r} has no row in parity_mistakes.LESSON_MISTAKES"


def test_the_table_of_mistakes_is_of_these_programs_and_found_where_it_says():
    firsts = {name: compute_reports()[name].first_finding for name in PROGRAMS}
    found = {name: {"parity_step": first.key.step + 1} for name, first in firsts.items()}
    columns = "lesson", "quote", "program", "no_program", "parity_step"
    wanted = [tuple(row[name] for name in columns) for row in make_table(found)]
    rows = [tuple(getattr(row, n) for n in columns) for row in parity.load_mistakes()]
    assert rows == wanted, "run tests/parity_measured.py again"


@pytest.mark.weekly("trains each of them for 20 steps")
@pytest.mark.timeout(900)
def test_what_finds_a_mistake_is_measured():
    columns = "program", "digits_step", "loss_step", "types", "parity_step"
    found = make_table(measure_mistakes(compute_reports(), list(PROGRAMS)))
    wanted = [tuple(row[n] for n in columns) for row in found]
    assert [tuple(getattr(row, n) for n in columns) for row in parity.load_mistakes()] == wanted


# Programs that cannot be compared


def make_program(steps: int = 1, lr: float = 0.1, watched: bool = True, **other: Any) -> Program:
    def train(watch: Any) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        model = other.get("model", lambda model: model)(model)
        optimizer = torch.optim.SGD(model.parameters(), lr)
        if watched:
            watch(model, optimizer, **other.get("more", {}))
        for _ in range(steps):
            optimizer.zero_grad()
            model(other.get("batch", torch.ones)(3, 4)).square().mean().backward()
            optimizer.step()

    return train


def wrap_layers(model: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.Sequential(model)


def draw_random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(time.perf_counter_ns()))


def randomize_weights(model: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        model[0].weight.copy_(draw_random(8, 4))
    return model


REFUSED = {  # a plain and a parallel program, and the words of the error
    "nobody watches": (make_program(), make_program(watched=False), "parallel: rank 0: .*watch"),
    "no step": (make_program(0), make_program(), "plain: .*took no step"),
    "nothing trained": (make_program(lr=0.0), make_program(lr=0.0), "plain: no weight moved"),
    "other steps": (make_program(2), make_program(3), r"3 optimizer steps; .* \(2"),
    "other names": (
        make_program(), make_program(model=wrap_layers), r"parallel: .*0\.0\.bias, .*rename"
    ),
    "other weights each time": (
        make_program(model=randomize_weights), make_program(), "plain: .*initial weights .*0.weight"
    ),
    "other batches each time": (make_program(batch=draw_random), make_program(), "plain.*outputs"),
}  # fmt: skip
RENAMED = make_program(model=wrap_layers, more={"rename": lambda name: name.partition(".")[2]})


@cache
def compare_small_programs() -> dict[str, Any]:
    def compare_all() -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, (one, other, _) in (REFUSED | {"renamed": (make_program(), RENAMED, "")}).items():
            try:
                record = record_program(one, 1)
                check_plain_run(record)
                found[name] = build_report(record, [match_program(other, record)])
            except ValueError as error:
                found[name] = str(error)
        return found

    return ranks.run(compare_all, 1, device="cpu")[0]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compared_gets_a_line_that_says_what_to_do(name):
    said = compare_small_programs()[name]
    assert isinstance(said, str) and "\n" not in said, said
    assert re.search(REFUSED[name][2], said) and re.search("must|call|pass", said)


def test_renamed_parameters_are_compared():
    assert compare_small_programs()["renamed"].is_equal, compare_small_programs()["renamed"]


# Placement of a part in a tensor


CUTS = {
    "columns": lambda x, r, n: x.chunk(n, 1)[r],
    "zig-zag": lambda x, r, n: cp.split_seq(x, n, r, "zigzag", 0),
    "dealt": lambda x, r, n: x[r::n],
    "fused columns": lambda x, r, n: torch.cat([p.chunk(n, 1)[r] for p in x.chunk(3, 1)], 1),
    "rows of columns": lambda x, r, n: x.chunk(n)[r].chunk(n, 1)[n - 1 - r],
    "padded": lambda x, r, n: torch.cat((x, x.new_zeros(r + 1, x.shape[1]))),
}


def test_a_cut_a_flat_piece_and_rows_in_any_order_are_found():
    whole = torch.randn(16, 24)
    for name, cut in CUTS.items():
        for rank in range(4):
            part = cut(whole, rank, 4)
            places = propose_places(part.shape, whole.shape, rank)
            found = [place for place in places if place.take_from(whole).equal(part)]
            assert found, (name, rank)
            had = torch.zeros(whole.shape, dtype=torch.bool)
            found[0].mark_in(had)
            assert had.sum() == min(part.numel(), whole.numel())
    piece = whole.chunk(2, 1)[1].flatten()[50:120]
    assert any(p.take_from(whole).equal(piece) for p in propose_pieces(piece, whole, 4))
    rows = whole.chunk(2, 1)[1][torch.randperm(16)[:9]]
    assert any(p and p.take_from(whole).equal(rows) for p in propose_permuted(rows, whole))


# A folder in place of memory, and scripts in place of functions


PLAIN = """
import torch
from shardtools import parity

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
parity.watch(model, optimizer)
x = torch.randn(8, 4)
for _ in range(2):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""
BEGIN = """
import torch.distributed as dist

dist.init_process_group("gloo")
"""
SUMMED = """
    for p in model.parameters():  # and nobody divides
        dist.all_reduce(p.grad)
    optimizer.step()
"""
SUM = BEGIN + PLAIN.replace("model(x)", "model(x.chunk(2)[dist.get_rank()])").replace(
    "\n    optimizer.step()\n", SUMMED
)


def test_two_scripts_are_compared(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.py").write_text(PLAIN)
    (tmp_path / "parallel.py").write_text(SUM)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--local-addr=127.0.0.1", "--nproc-per-node", "2", "parallel.py"]
    status, out, err = run_main(
        capsys, "parity", "--draws", "1", "--folder", "kept", "plain.py", "--", *command
    )
    assert status == 1 and not err, err
    assert "step 1, gradient of 2.bias, ranks 0, 1: is 2 times the right value: a sum over 2" in out
    record = Record.load(tmp_path / "kept")  # equal to a record in memory
    assert record.steps == 2 and record.noise and (tmp_path / "kept/rank-1.pt").exists()
    assert all(record.full_tensor(key) is not None for key in record.parts)

    def run_check(plain: str, *options: str) -> str:
        (tmp_path / "other.py").write_text(plain)
        status, out, err = run_main(capsys, "parity", *options, "other.py", "--", "true")
        assert status == 2 and not out
        return err

    assert "folder='kept': must be new or empty, but it holds" in run_check(
        PLAIN, "--folder", "kept"
    )
    assert "plain: must call parity.watch" in run_check("pass")
    failed = run_check(
        "raise KeyError('which')"
    )  # without a folder: the script's whole output is shown
    assert "line 1, in <module>" in failed and "KeyError: 'which'\n" in failed
    assert "ended with status 1; see its output above" in failed
