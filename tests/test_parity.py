"""Right programs are silent, wrong ones are named, and beside each its control is silent."""

from __future__ import annotations

import re
import sys
import time
from functools import cache
from typing import Any

import pytest
import torch
from commands import ran
from parity_measured import measured, table
from parity_mistakes import MISTAKES, PROGRAMS, items, section
from parity_programs import (
    RIGHT,
    Program,
    Row,
    Wrong,
    a_bit_apart,
    averaged_by,
    beside,
    compared,
    data,
    parallel,
    plain,
    reference,
)

from shardlab import context_parallel as cp
from shardlab import ranks
from shardlab.common import show
from shardtools import parity
from shardtools.parity.places import in_any_order, pieces, proposals
from shardtools.parity.programs import judged, matched, recorded, refuse_other_runs, refuse_plain
from shardtools.parity.record import Record
from shardtools.parity.scripts import ASKED

DRIFTS = "data: copies that drift apart"
QUIET = Wrong(data(), "", "", instead=averaged_by(a_bit_apart))


@cache
def right() -> dict[str, Any]:
    """Reports on right programs."""
    return compared({name: beside(row, parallel(row)) for name, row in RIGHT.items()})


@cache
def wrong() -> dict[str, Any]:
    """Reports on wrong programs, and by their reference and technique on their controls."""
    controls = {
        control(one.row): beside(one.row, parallel(one.row, one.control))
        for one in PROGRAMS.values()
    }
    all_of = PROGRAMS | {DRIFTS: QUIET}
    wrong = {name: beside(one.row, one.program()) for name, one in all_of.items()}
    return compared(wrong | controls)


def control(row: Row) -> str:
    """A name of what a wrong program would be without its mistake."""
    return f"{row.technique} {row.layout} {row.options} {reference(row)}"


@pytest.mark.timeout(1800)  # whoever comes first waits for all
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_is_silent(name):
    report = right()[name]
    assert report.equal, report
    assert report.compared > 50 and max(report.worst.values()) < 1


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_mistake_is_found_where_it_is_and_named_and_without_it_all_is_silent(name):
    one, report = PROGRAMS[name], wrong()[name]
    assert not report.equal
    key, words = report.first.key, str(report).replace("\n", " ")
    assert re.search(one.place, f"{key.step} {key.phase} {key.name}"), report
    assert re.search(one.words, words), report
    without = wrong()[control(one.row)]
    assert without.equal, without


def test_copies_that_are_not_the_same_bits_are_told_and_are_no_mistake():
    report = wrong()[DRIFTS]
    assert report.equal and len(report.drifting) > 50
    assert "not the same bits on ranks that hold copies, first the gradient of" in str(report)
    without = wrong()[control(QUIET.row)]
    assert not without.drifting


# The mistakes that lessons show


@pytest.mark.parametrize("lesson", sorted({one.lesson for one in MISTAKES}))
def test_every_mistake_of_a_lesson_has_a_program_or_says_why_not(lesson):
    mine = [one for one in MISTAKES if one.lesson == lesson]
    text = (show.ROOT / f"lessons/{lesson}.md").read_text("utf-8")
    for one in mine:
        assert one.where in text, f"{one.where!r} does not stand in {lesson}"
        assert bool(one.why) != (one.program in PROGRAMS), one
    for item in items(section(lesson)):
        known = any(item.startswith(one.where) for one in mine)
        assert known, f"{lesson}: {item!r} has no row in parity_mistakes.SHOWN"


def test_every_lesson_with_mistakes_is_among_them():
    lessons = {path.stem for path in (show.ROOT / "lessons").glob("*.md")}
    shown = {name for name in lessons if section(name)} - {"parity"}  # which is about finding them
    assert shown <= {one.lesson for one in MISTAKES}


def test_the_table_of_mistakes_is_of_these_programs_and_found_where_it_says():
    found = {name: {"parity": wrong()[name].first.key.step + 1} for name in PROGRAMS}
    columns = "lesson", "where", "program", "why", "parity"
    wanted = [tuple(row[name] for name in columns) for row in table(found)]
    again = "run tests/parity_measured.py again"
    assert [tuple(getattr(row, n) for n in columns) for row in parity.mistakes()] == wanted, again


@pytest.mark.timeout(900)
def test_what_finds_a_mistake_is_measured(request):
    if not request.config.getoption("--whole"):
        pytest.skip("--whole trains each of them for 20 steps")
    columns = "program", "digits", "loss", "types", "parity"
    wanted = [tuple(row[n] for n in columns) for row in table(measured(wrong(), list(PROGRAMS)))]
    assert [tuple(getattr(row, n) for n in columns) for row in parity.mistakes()] == wanted


# What cannot be compared


def trained(steps: int = 1, lr: float = 0.1, **other: Any) -> Program:
    """A small program that anybody may write."""

    def program(watch: Any) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        model = other.get("model", lambda model: model)(model)
        optimizer = other.get("optimizer", torch.optim.SGD)(model.parameters(), lr)
        if other.get("watched", True):
            watch(model, optimizer, **other.get("more", {}))
        for _ in range(steps):
            optimizer.zero_grad()
            model(other.get("batch", torch.ones)(3, 4)).square().mean().backward()
            optimizer.step()

    return program


def renumbered(model: torch.nn.Module) -> torch.nn.Module:
    """The same layers by other names."""
    return torch.nn.Sequential(model)


def chance(*shape: int) -> torch.Tensor:
    """Numbers of no seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(time.perf_counter_ns()))


def by_chance(model: torch.nn.Module) -> torch.nn.Module:
    """With first weights of no seed."""
    with torch.no_grad():
        model[0].weight.copy_(chance(8, 4))
    return model


REFUSED = {  # a plain and a parallel program, and what their line names
    "plain: nobody watches": (trained(watched=False), trained(), "plain: .*watch"),
    "nobody watches": (trained(), trained(watched=False), "parallel: rank 0: .*watch"),
    "no step": (trained(0), trained(), "plain: .*took no step"),
    "nothing trained": (trained(lr=0.0), trained(lr=0.0), "plain: no weight moved"),
    "other steps": (trained(2), trained(3), "3 optimizer steps, .* 2"),
    "other names": (trained(), trained(model=renumbered), r"parallel: .*0\.0\.bias, .*rename"),
    "other weights each time": (trained(model=by_chance), trained(), "plain: .*weights .0.weight"),
    "other batches each time": (trained(batch=chance), trained(), "plain: .*outputs"),
    "no function": (trained(more={"rename": 3}), trained(), "rename=3: allowed"),
}
RENAMED = trained(model=renumbered, more={"rename": lambda name: name.partition(".")[2]})


@cache
def small() -> dict[str, Any]:
    """Of plain and parallel programs on one rank: the report, or the line that refuses."""

    def work() -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, (one, other, _) in (REFUSED | {"renamed": (trained(), RENAMED, "")}).items():
            try:
                record = recorded(one, 1)
                refuse_plain(record)
                refuse_other_runs(record)
                found[name] = judged(record, [matched(other, record)])
            except ValueError as error:
                found[name] = str(error)
        return found

    return ranks.run(work, 1, device="cpu")[0]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compared_gets_a_line_that_says_what_to_do(name):
    said = small()[name]
    assert isinstance(said, str) and "\n" not in said, said
    assert re.search(REFUSED[name][2], said) and re.search("needed|allowed|give watch", said)


def test_renamed_parameters_are_compared():
    assert small()["renamed"].equal, small()["renamed"]


# Where a part stands


CUTS = {
    "rows": lambda x, r, n: x.chunk(n)[r],
    "columns": lambda x, r, n: x.chunk(n, 1)[r],
    "zig-zag": lambda x, r, n: cp.split(x, n, r, "zigzag", 0),
    "dealt": lambda x, r, n: x[r::n],
    "fused columns": lambda x, r, n: torch.cat([p.chunk(n, 1)[r] for p in x.chunk(3, 1)], 1),
    "rows of columns": lambda x, r, n: x.chunk(n)[r].chunk(n, 1)[n - 1 - r],
    "padded": lambda x, r, n: torch.cat((x, x.new_zeros(r + 1, x.shape[1]))),
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_a_cut_is_among_the_proposals(cut):
    whole = torch.randn(16, 24)
    for rank in range(4):
        part = cut(whole, rank, 4)
        found = [p for p in proposals(part.shape, whole.shape, rank) if p.of(whole).equal(part)]
        assert found
        had = torch.zeros(whole.shape, dtype=torch.bool)
        found[0].mark(had)
        assert had.sum() == min(part.numel(), whole.numel())


def test_a_flat_piece_and_rows_in_any_order_are_found():
    whole = torch.randn(16, 24)
    piece = whole.chunk(2, 1)[1].flatten()[50:120]
    assert any(p.of(whole).equal(piece) for p in pieces(piece, whole, 4))
    order = torch.randperm(16)[:9]
    cut = whole.chunk(2, 1)[1][order]
    assert any(p and p.of(whole).equal(cut) for p in in_any_order(cut, whole))


# A folder in place of memory, and scripts in place of functions


def test_a_folder_holds_what_memory_would(tmp_path):
    row = RIGHT["zero 1 llama"]
    report = parity.check(plain(row), parallel(row), 2, draws=1, folder=tmp_path, timeout=300)
    assert report.equal and report.compared > 50, report
    record = Record.load(tmp_path)
    assert (tmp_path / "values").stat().st_size > 10**5
    assert record.steps == 1 and record.noise
    assert all(record.whole(key) is not None for key in record.parts)


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
    status, out, err = ran(
        capsys, "parity", "--draws", "1", "--folder", "kept", "plain.py", "--", *command
    )
    assert status == 1 and not err, err
    assert "step 1, gradient of 2.bias, ranks 0, 1: is 2 times the right one: a sum over 2" in out
    assert (tmp_path / "kept/rank-1.pt").exists()

    def says(plain: str, *options: str) -> str:
        (tmp_path / "other.py").write_text(plain)
        status, out, err = ran(capsys, "parity", *options, "other.py", "--", "true")
        assert status == 2 and not out
        return err

    mine = tmp_path / "kept/rank-9.pt"
    mine.write_text("mine")
    assert "folder='kept': no comparison wrote 'rank-9.pt'" in says(PLAIN, "--folder", "kept")
    assert mine.read_text() == "mine" and (tmp_path / "kept/rank-1.pt").exists()
    mine.unlink()
    assert "plain: it never called parity.watch" in says("pass", "--folder", "kept")
    assert not (tmp_path / "kept/index.pt").exists()
    failed = says("raise KeyError('which')")  # without a folder: all that it printed is shown
    assert "line 1, in <module>" in failed and "KeyError: 'which'\n" in failed
    assert "ended with status 1; what it printed stands above" in failed


def test_without_the_command_a_script_runs_as_it_is(monkeypatch):
    monkeypatch.delenv(ASKED, raising=False)
    model = torch.nn.Linear(2, 2)
    assert parity.watch(model, None) is model and not model._forward_hooks
