"""Right programs are silent, wrong ones are named, and beside each its control is silent."""

from __future__ import annotations

import re
import sys
import time
from functools import cache
from typing import Any
from unittest import mock

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
    compared,
    data,
    parallel,
    plain,
    reference,
)

from shardcourse.build.index import read
from shardlab import context_parallel as cp
from shardlab import ranks
from shardlab.common import show
from shardlab.gpt.model import GPT, Config
from shardlab.train import core as script_of_ranks
from shardlab.train import one_gpu as plain_script
from shardtools import parity
from shardtools.parity.places import by_columns, by_rows, in_any_order, pieces, proposals
from shardtools.parity.programs import judged, matched, recorded, refuse_other_runs, refuse_plain
from shardtools.parity.record import Record
from shardtools.parity.scripts import ASKED

# Each day every topic has a right program; of all of them the rest once a week. Or it has none:
TOPICS: dict[str, tuple[str, ...] | str] = {
    "model_parallelism": "it shows what the other topics bring",
    "memory": "it counts bytes, on one rank",
    "collectives": "they move tensors, and train nothing",
    "gemm": "one product, and no model",
    "data_parallel": ("data 2", "DDP accumulated 2", "data clipped 2"),
    "train": ("train",),
    "parity": "it is the comparison itself",
    "zero": ("zero 1 llama 2", "zero 2 clipped 2", "zero 3 2", "FSDP2 3 accumulated 2"),
    "checkpoint": ("resumed 1 2",),
    "trainers": "a trainer's loop is around a model that one of the others wraps",
    "pipeline": ("pipeline 1f1b 2", "pipeline zb-v 2", "torch's pipeline 2"),
    "tensor_parallel": ("tensor llama 2", "DTensor 2", "tensor in copies 3"),
    "tensor_types": "it runs on pretended ranks, without numbers",
    "sequence_parallel": ("sequence gpt2 2",),
    "context_parallel": ("context ring zigzag gpt2 2", "context ulysses contiguous llama 2"),
    "experts": ("experts 2",),
    "mesh": ("mesh d 2 · t 2, ZeRO-1",),
    "deepspeed_engine": ("DeepSpeed 2 clipped 2",),
    "strategy": "what it plans, a mesh, or DeepSpeed, trains",
    "cluster": "it runs jobs, and looks at them",
    "elastic": "it starts ranks of any program",
}
SHORT = {name for names in TOPICS.values() if not isinstance(names, str) for name in names}
DRIFTS = "data: copies that drift apart"
QUIET = Wrong(data(), "", "", instead=averaged_by(a_bit_apart))


@cache
def right(whole: bool) -> dict[str, Any]:
    """Reports on right programs, and on those that stand beside the wrong ones."""
    rows = {name: row for name, row in RIGHT.items() if whole or name in SHORT}
    return compared({name: (row, parallel(row)) for name, row in rows.items()})


@cache
def wrong() -> dict[str, Any]:
    """Reports on wrong programs, and by their reference and technique on their controls."""
    controls = {
        control(one.row): (one.row, parallel(one.row, one.control)) for one in PROGRAMS.values()
    }
    wrong = {name: (one.row, one.program()) for name, one in (PROGRAMS | {DRIFTS: QUIET}).items()}
    return compared(wrong | controls)


def control(row: Row) -> str:
    """A name of what a wrong program would be without its mistake."""
    return f"{row.technique} {row.layout} {row.options} {reference(row)}"


@pytest.mark.timeout(1800)  # whoever comes first waits for all
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_is_silent(name, request):
    whole = request.config.getoption("--whole")
    if name not in SHORT and not whole:
        pytest.skip("--whole compares all of them")
    report = right(whole)[name]
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


def test_every_topic_has_a_right_program_each_day_or_says_why_not():
    here = {name for name, topic in read(show.ROOT).topics.items() if not topic.planned}
    assert here == TOPICS.keys()
    assert SHORT - {"train"} <= RIGHT.keys()


def script(module: Any, folder: Any) -> Program:
    """A script of the lesson on training: some steps on the course's text."""

    def program(watch: Any) -> None:
        models = []

        def model(config: Config) -> GPT:
            models.append(GPT(config))
            return models[-1]

        def adamw(parameters: Any, lr: float, right: Any = torch.optim.AdamW) -> Any:
            watch(models[-1], made := right(parameters, lr))
            return made

        here = {"steps": 2, "batch": 8, "limit": 2000, "every": 2, "sample": 0, "folder": folder}
        with (
            mock.patch.object(module, "GPT", model),
            mock.patch.object(torch.optim, "AdamW", adamw),
        ):
            module.main(**here)

    return program


def test_the_training_script_on_two_ranks_is_the_one_on_one(tmp_path):
    two = script(plain_script, tmp_path), script(script_of_ranks, tmp_path)
    report = parity.check(*two, ranks=2, draws=1)
    assert report.equal and report.compared > 100, report


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
        watched = other.get("watched", lambda model, optimizer: (model, optimizer))
        for _ in range(other.get("calls", 1)):
            watch(*watched(model, optimizer), **other.get("more", {}))
        stepped = other.get("stepped", lambda model, optimizer: optimizer)(model, optimizer)

        def backward(x: torch.Tensor) -> torch.Tensor:
            stepped.zero_grad()
            loss = model(x).square().mean() * other.get("times", 1)
            loss.backward()
            return loss

        for _ in range(steps):
            x = other.get("batch", torch.ones)(3, 4)
            if other.get("closure"):
                stepped.step(lambda x=x: backward(x))
            else:
                backward(x)
                stepped.step()

    return program


def renumbered(model: torch.nn.Module) -> torch.nn.Module:
    """The same layers by other names."""
    return torch.nn.Sequential(model)


class Wider(torch.nn.Sequential):
    """With a parameter that the plain model has not."""

    def __init__(self, model: torch.nn.Module):
        super().__init__(model[0], model[1], model[2])
        self.more = torch.nn.Parameter(torch.zeros(2))


def chance(*shape: int) -> torch.Tensor:
    """Numbers of no seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(time.perf_counter_ns()))


def by_chance(model: torch.nn.Module) -> torch.nn.Module:
    """With first weights of no seed."""
    with torch.no_grad():
        model[0].weight.copy_(chance(8, 4))
    return model


def another(model: Any, optimizer: Any) -> Any:
    """An optimizer that nobody watches."""
    return torch.optim.SGD(model.parameters(), 0.1)


REFUSED = {  # a plain and a parallel program, and the line that they get
    "plain: nobody watches": (trained(calls=0), trained(), "plain: it never called watch"),
    "parallel: nobody watches": (
        trained(), trained(calls=0), "parallel: rank 0: it never called watch",
    ),
    "no optimizer": (
        trained(watched=lambda model, _: (model,)), trained(), "plain: .* was given no optimizer",
    ),
    "no step": (trained(0), trained(), "plain: .*took no step; needed is one"),
    "another optimizer": (trained(), trained(stepped=another), "parallel: rank 0: .*took no step"),
    "nothing trained": (trained(lr=0.0), trained(lr=0.0), "plain: no weight moved"),
    "other steps": (trained(2), trained(3), "took 3 optimizer steps, and the plain program 2"),
    "other names": (
        trained(), trained(model=renumbered),
        r"parallel: it has 4 parameters that the plain one lacks \(0\.0\.bias, .*rename",
    ),
    "more names": (trained(), trained(model=Wider), r"it has 1 .*lacks \(more\); give watch"),
    "watched twice": (trained(calls=2), trained(), "watch: a second call; needed is one"),
    "no model": (
        trained(watched=lambda model, optimizer: (3, optimizer)), trained(), "model=.*: allowed",
    ),
    "no optimizer's": (
        trained(watched=lambda model, _: (model, "x")), trained(), "optimizer='x': allowed",
    ),
    "other weights each time": (
        trained(model=by_chance), trained(), "plain: each run begins with other weights .0.weight",
    ),
    "other batches each time": (
        trained(batch=chance), trained(), "plain: each run computes other outputs",
    ),
    "no function": (trained(more={"rename": 3}), trained(), "rename=3: allowed is a function"),
}  # fmt: skip


def verdicts(cases: dict[str, tuple[Program, Program]]) -> dict[str, Any]:
    """Of plain and parallel programs on one rank: the report, or the sentence that refuses."""

    def work() -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, (one, other) in cases.items():
            try:
                record = recorded(one, 1)
                refuse_plain(record)
                refuse_other_runs(record)
                found[name] = judged(record, [matched(other, record)])
            except ValueError as error:
                found[name] = str(error)
        return found

    return ranks.run(work, 1, device="cpu")[0]


@cache
def small() -> dict[str, Any]:
    """Of all that this file asks of small programs."""
    rename = {"more": {"rename": lambda name: name.partition(".")[2]}}
    fine = {
        "renamed": (trained(), trained(model=renumbered, **rename)),
        "another kind": (trained(), trained(optimizer=torch.optim.AdamW)),
        "a closure": (trained(2, closure=True), trained(2)),
        "a closure, twice the loss": (trained(closure=True), trained(closure=True, times=2)),
        "two optimizers": (trained(2), trained(2, watched=halves, stepped=lambda *_: Both())),
    }
    return verdicts({name: case[:2] for name, case in REFUSED.items()} | fine)


class Both:
    """Two optimizers, of which each has half of the parameters."""

    made: tuple[Any, ...] = ()

    def zero_grad(self) -> None:
        for one in self.made:
            one.zero_grad()

    def step(self) -> None:
        for one in self.made:
            one.step()


def halves(model: Any, _: Any) -> tuple[Any, Any]:
    """The model and two optimizers."""
    first, second = [*model.parameters()][:2], [*model.parameters()][2:]
    Both.made = torch.optim.SGD(first, 0.1), torch.optim.SGD(second, 0.1)
    return model, list(Both.made)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compared_gets_a_line_that_says_what_to_do(name):
    said = small()[name]
    assert isinstance(said, str), said
    assert re.search(REFUSED[name][2], said) and re.search("needed|allowed|give watch", said)
    assert "\n" not in said and len(said) < 300


@pytest.mark.parametrize("name", ["renamed", "two optimizers", "a closure"])
def test_other_names_several_optimizers_and_closures_are_compared(name):
    assert small()[name].equal, small()[name]


def test_an_update_by_another_kind_of_optimizer_is_called_that():
    first = small()["another kind"].first
    assert first.key.phase == "update"
    assert first.words.endswith("optimizer's: AdamW made it, and SGD in the plain program")


def test_gradients_that_a_closure_computes_belong_to_its_step():
    first = small()["a closure, twice the loss"].first
    assert first.key[:2] == (0, "gradient") and "2 times the right one" in first.words


# Where a part stands


@pytest.mark.parametrize("ranks_", [2, 4])
@pytest.mark.parametrize(
    "cut",
    [
        lambda x, r, n: x.chunk(n)[r],
        lambda x, r, n: x.chunk(n, 1)[r],
        lambda x, r, n: cp.split(x, n, r, "zigzag", 0),
        lambda x, r, n: x[r::n],
        lambda x, r, n: x[r::n].chunk(2)[1],
        lambda x, r, n: torch.cat([part.chunk(n)[r] for part in x.chunk(2)]),
        lambda x, r, n: torch.cat([part.chunk(n, 1)[r] for part in x.chunk(3, 1)], 1),
        lambda x, r, n: x.chunk(n)[r].chunk(n, 1)[n - 1 - r],
        lambda x, r, n: torch.cat((x, x.new_zeros(r + 1, x.shape[1]))),
        lambda x, r, n: x[r : r + 3],
    ],
)
def test_a_cut_is_among_the_proposals(cut, ranks_):
    whole = torch.randn(16, 24)
    for rank in range(ranks_):
        part = cut(whole, rank, ranks_)
        found = [p for p in proposals(part.shape, whole.shape, rank) if p.of(whole).equal(part)]
        assert found
        had = torch.zeros(whole.shape, dtype=torch.bool)
        found[0].mark(had)
        assert had.sum() == min(part.numel(), whole.numel())


def test_of_wide_matrices_every_pair_of_equal_parts_is_proposed_first():
    whole = torch.randn(16, 4096)
    for rows in whole.chunk(4):
        for part in rows.chunk(2, 1):
            assert any(p.of(whole).equal(part) for p in proposals(part.shape, whole.shape))


def test_a_flat_piece_and_rows_in_any_order_are_found():
    whole = torch.randn(16, 24)
    piece = whole.chunk(2, 1)[1].flatten()[50:120]
    assert any(p.of(whole).equal(piece) for p in pieces(piece, whole, 4))
    order = torch.randperm(16)[:9]
    assert by_rows(whole[order], whole).of(whole).equal(whole[order])
    assert by_columns(whole[:, order], whole).of(whole).equal(whole[:, order])
    cut = whole.chunk(2, 1)[1][order]
    assert any(p and p.of(whole).equal(cut) for p in in_any_order(cut, whole))
    ones = torch.ones(40)  # of a constant all places are kept
    assert len(list(pieces(ones[:10], ones, 2))) >= 31


# A folder in place of memory, and scripts in place of functions


def test_a_folder_holds_what_memory_would(tmp_path):
    row = RIGHT["zero 1 llama 2"]
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


def test_a_folder_that_holds_other_files_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "values").write_text("mine")
    with pytest.raises(ValueError, match="no comparison wrote 'values' in it; allowed is a new"):
        parity.check(trained(), trained(), 1, draws=1, folder=tmp_path)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("values", "mine")]


def test_without_the_command_a_script_runs_as_it_is(monkeypatch):
    monkeypatch.delenv(ASKED, raising=False)
    model = torch.nn.Linear(2, 2)
    assert parity.watch(model, None) is model and not model._forward_hooks
