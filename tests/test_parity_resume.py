"""A run that was stopped and resumed equals an unstopped run, and lost state is named."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from contract import SIDES, Row, make_groups
from parity_programs import DROPOUT, GPT2, get_watched_model, join_batch, make_row, plain_loss
from sides import make_optimizer
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from shardlab import ranks
from shardlab.checkpoint import Checkpoints, Training
from shardlab.layout import Layout
from shardtools import parity
from shardtools.parity import programs

SMALL = replace(GPT2, layers=1)
STEPS, STOP = 3, 2


def make_schedule(o: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step))


def make_full_run(like: Row) -> Callable[[Any], None]:
    def train(watch: Any) -> None:
        model = like.build_model(like.config)
        o = make_optimizer(model, like.lr)
        rates = make_schedule(o)
        watch(model, o)
        torch.manual_seed(0)
        for step in range(STEPS):
            o.zero_grad()
            tokens, targets = join_batch(like, step)
            plain_loss(model(tokens), targets).backward()
            o.step()
            rates.step()

    return train


@dataclass
class Run:
    side: Any
    rates: Any
    data: Callable[[int], int] = field(default=lambda step: step)

    def train(self, watch: Any, steps: range) -> None:
        watch(get_watched_model(self.side), self.side.optimizer)
        for step in steps:
            self.side.optimizer.zero_grad()
            self.side.step(self.side.row.make_batch(self.data(step)))
            self.side.optimizer.step()
            self.rates.step()

    @property
    def training(self) -> Training:
        return Training(self.side.model, self.side.optimizer, self.rates, STOP)


def build_run(like: Row) -> Run:
    side = SIDES[like.technique](like, like.build_model(like.config), make_groups(like))
    torch.manual_seed(0)
    return Run(side, make_schedule(side.optimizer))


def make_stopped_run(like: Row, save: Callable[[Run, Path], None]) -> Callable[[Any, Path], None]:
    def train_and_save(watch: Any, kept: Path) -> None:
        run = build_run(like)
        run.train(watch, range(STOP))
        save(run, kept)

    return train_and_save


def make_resumed_run(like: Row, load: Callable[[Run, Path], None]) -> Callable[[Any, Path], None]:
    def load_and_train(watch: Any, kept: Path) -> None:
        run = build_run(like)
        load(run, kept)
        run.train(watch, range(STOP, STEPS))

    return load_and_train


# Ways to save a run.


def course_save(run: Run, kept: Path) -> None:
    with Checkpoints(kept / "run", dist.group.WORLD) as store:
        store.save(run.training)


def course_load(run: Run, kept: Path) -> None:
    with Checkpoints(kept / "run", dist.group.WORLD) as store:
        store.load(run.training)


def torch_state(run: Run) -> dict[str, Any]:
    model, state = get_state_dict(run.side.model, run.side.optimizer)
    return {"model": model, "optimizer": state}


def torch_save(run: Run, kept: Path) -> None:
    dcp.save(torch_state(run), checkpoint_id=kept / "dcp")
    torch.save(run.rates.state_dict(), kept / "rates.pt")


def torch_load(run: Run, kept: Path) -> None:
    state = torch_state(run)
    dcp.load(state, checkpoint_id=kept / "dcp")
    model, o = run.side.model, run.side.optimizer
    set_state_dict(model, o, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    run.rates.load_state_dict(torch.load(kept / "rates.pt"))


def file_of(rank: int, kept: Path) -> Path:
    return kept / f"rank-{rank}.pt"


def own_save(run: Run, kept: Path) -> None:
    model, o = run.side.model.state_dict(), run.side.optimizer.state_dict()
    state = [model, o, run.rates.state_dict(), torch.get_rng_state()]
    torch.save(state, file_of(dist.get_rank(), kept))


def own_load(run: Run, kept: Path, without: str = "") -> None:
    model, o, rates, rng_state = torch.load(file_of(dist.get_rank(), kept))
    if without != "model":
        run.side.model.load_state_dict(model)
    for state in o["state"].values() if without == "count" else ():
        state["step"].zero_()
    if without != "optimizer":
        run.side.optimizer.load_state_dict(o)
    if without != "rates":
        run.rates.load_state_dict(rates)
    else:
        run.side.optimizer.param_groups[0]["lr"] = run.rates.base_lrs[0]
    if without != "rng_state":
        torch.set_rng_state(rng_state)


def load_and_restart_data(run: Run, kept: Path) -> None:
    own_load(run, kept)
    run.data = lambda step: step - STOP


@dataclass(frozen=True)
class Case:
    first_row: Row
    save: Callable[..., None]
    load: Callable[..., None]
    next_row: Row | None = None
    place: str = ""
    words: str = ""

    @property
    def last_row(self) -> Row:
        return self.next_row or self.first_row


def load_without(what: str) -> Callable[..., None]:
    return lambda run, kept: own_load(run, kept, without=what)


DATA = make_row("data", SMALL, Layout(dp=2), options={"way": "parameters"})
ALONE = replace(DATA, layout=Layout(dp=1), sizes=(8,))
FSDP, FSDP_4 = (make_row("FSDP2", SMALL, Layout(dp=n, zero=3)) for n in (2, 4))
DROPOUT_ROW = replace(ALONE, config=replace(DROPOUT, layers=1))


ZERO_2, ZERO_4 = (make_row("zero", SMALL, Layout(dp=n, zero=2)) for n in (2, 4))

RIGHT = {
    "a file of each rank": Case(DATA, own_save, own_load),
    "ours, on two and on four": Case(ZERO_2, course_save, course_load, ZERO_4),
    "DCP, on two and on four": Case(FSDP, torch_save, torch_load, FSDP_4),
}
WRONG = {
    "weights not loaded": Case(
        DATA, own_save, load_without("model"), place="2 weights ",
        words="equal the weights before the first step: not loaded",
    ),
    "optimizer not loaded": Case(
        DATA, own_save, load_without("optimizer"), place="2 update ",
        words="as in Adam's first step: did .* restart.*step count is 1, but 3",
    ),
    "count of steps not loaded": Case(
        DATA, own_save, load_without("count"), place="2 update ",
        words="the step count is 1, but 3 in the plain",
    ),
    "schedule begins anew": Case(
        DATA, own_save, load_without("rates"), place="2 update ",
        words="the learning rate is 0.01, but 0.0033+ in the plain",
    ),
    "data begin anew": Case(
        DATA, own_save, load_and_restart_data, place="2 forward embedding",
        words="most similar to step 1's value: did the data restart",
    ),
    "random numbers begin anew": Case(
        DROPOUT_ROW, own_save, load_without("rng_state"), place=r"2 forward blocks\.0",
        words="was the RNG state restored",
    ),
}  # fmt: skip
CASES = RIGHT | WRONG


@cache
def compute_reports() -> dict[str, Any]:
    rows = {str(case.first_row.config): case.first_row for case in CASES.values()}
    keys = {name: str(case.first_row.config) for name, case in CASES.items()}
    (records,) = ranks.run(
        lambda: {
            name: programs.record_program(make_full_run(row), every_step=True)
            for name, row in rows.items()
        },
        1, device="cpu", timeout=600,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as root:
        folders = {name: Path(tempfile.mkdtemp(dir=root)) for name in CASES}

        def match_all_sizes(work: Callable[..., Any], side: str) -> dict[str, list[Any]]:
            found = {}
            for size in (1, 2, 4):
                mine = [n for n, c in CASES.items() if getattr(c, side).ranks == size]
                each = ranks.run(lambda mine=mine: {n: work(n) for n in mine}, size,
                                 device="cpu", timeout=600, show=False)  # fmt: skip
                found |= {name: [one[name] for one in each] for name in mine}
            return found

        def match_stopped(name: str) -> Any:
            case = CASES[name]
            program = make_stopped_run(case.first_row, case.save)
            run = lambda watch: program(watch, folders[name])  # noqa: E731
            return programs.match_program(run, records[keys[name]])

        def match_resumed(name: str) -> Any:
            case = CASES[name]
            program = make_resumed_run(case.last_row, case.load)
            run = lambda watch: program(watch, folders[name])  # noqa: E731
            return programs.match_program(run, records[keys[name]], STOP)

        first = match_all_sizes(match_stopped, "first_row")
        second = match_all_sizes(match_resumed, "last_row")
    found = {}
    for name in CASES:
        record = records[keys[name]]
        report, taken = programs.build_stopped_report(record, first[name])
        assert report.is_equal and taken == STOP, (name, report)
        found[name] = report.merge_resumed(
            programs.build_report(record, second[name], "resumed_run")
        )
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", RIGHT)
def test_a_run_that_is_resumed_is_the_one_that_goes_through(name):
    report = compute_reports()[name]
    assert report.is_equal, report
    assert report.num_compared > 100 and " and then " in str(report)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", WRONG)
def test_what_was_lost_is_named(name):
    report = compute_reports()[name]
    assert not report.is_equal
    key, words = report.first_finding.key, str(report).replace("\n", " ")
    assert re.search(WRONG[name].place, f"{key.step} {key.phase} {key.name}"), report
    assert re.search(WRONG[name].words, words), report


# The interface itself.


def run_small_program(watch: Any, first: int = 0, to: int = 4, kept: Path | None = None) -> None:
    """Run steps of a small model from `kept`, unless it starts at 0; write `kept` at the end."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    o = torch.optim.Adam(model.parameters(), 0.1)
    if first:
        weights, state = torch.load(kept / "all.pt")
        model.load_state_dict(weights)
        o.load_state_dict(state)
    watch(model, o)
    for number in range(first, to):
        o.zero_grad()
        model(torch.full((3, 4), number + 1.0)).square().mean().backward()
        o.step()
    if kept and dist.get_rank() == 0:
        torch.save([model.state_dict(), o.state_dict()], kept / "all.pt")


def stop_after(after: int) -> Callable[[Any, Path], None]:
    return lambda watch, kept: run_small_program(watch, 0, after, kept)


def resume_until(to: int) -> Callable[[Any, Path], None]:
    return lambda watch, kept: run_small_program(watch, 2, to, kept)


def test_two_programs_and_a_folder_are_all_that_it_takes():
    report = parity.check_resume(
        run_small_program, stop_after(2), resume_until(4), ranks=(2, 1), draws=1, timeout=60
    )
    assert report.is_equal and "on 2 and then 1 ranks" in str(report), report


@pytest.mark.parametrize(
    "after, to, words",
    [
        (4, 4, "stopped_run: it took 4 optimizer steps"),
        (2, 3, "resumed_run: it took 1 optimizer steps"),
    ],
)
def test_what_cannot_be_resumed_gets_a_line(after, to, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        parity.check_resume(
            run_small_program, stop_after(after), resume_until(to), 1, draws=1, timeout=60
        )
