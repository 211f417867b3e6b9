"""Measurement of which check finds each mistake: loss, types, parity with one step, a longer run.

    .venv/bin/python tests/parity_measured.py      # three minutes: rewrites the table

The table is `code/shardtools/parity/mistakes.csv`; the lesson reads it.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import sides
import torch.distributed as dist
from contract import AXES, SIDES, Row
from parity_mistakes import MISTAKES, PROGRAMS, Mistake
from parity_programs import (
    EXTRA_SIDES,
    WrongProgram,
    make_parallel_program,
    make_plain_program,
    name_plain_program,
)

from shardlab import context_parallel as cp
from shardlab import ranks
from shardlab import tensor_parallel as tp
from shardlab import tensor_types as tt
from shardtools import parity

STEPS = 20
NOTICEABLE_ERROR = 0.01  # relative error of a loss that a reader would notice
DIGITS_ERROR = 1e-5  # relative error at which two programs' printed digits differ

# Found by the loss that a run prints


def measure_losses(each: dict[str, tuple[Row, Callable[[Row], Any]]]) -> dict[str, list[float]]:
    found = {}
    for size in sorted({row.ranks for row, _ in each.values()}):
        mine = {name: one for name, one in each.items() if one[0].ranks == size}

        def train_all(mine: dict = mine) -> dict[str, list[float | None]]:
            return {
                name: program(replace(row, steps=STEPS))(lambda *_, **__: None)
                for name, (row, program) in mine.items()
            }

        by_rank = ranks.run(train_all, size, device="cpu", timeout=1200, show=False)
        for name in mine:
            steps = zip(*(one[name] for one in by_rank), strict=True)
            known = [[value for value in step if value is not None] for step in steps]
            found[name] = [sum(step) / len(step) for step in known]
    return found


def make_longer_program(one: WrongProgram) -> Callable[[Row], Any]:
    return lambda row: replace(
        one, row=row, other_row=one.other_row and replace(one.other_row, steps=row.steps)
    ).build_program()


def measure_loss_errors(names: list[str]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the loss errors of each program, and of its control, relative to the plain program."""
    ones = {name: PROGRAMS[name] for name in names}
    rows = {name_plain_program(one.row): one.row for one in ones.values()}
    (alone,) = ranks.run(
        lambda: {
            name: make_plain_program(replace(row, steps=STEPS))(lambda *_, **__: None)
            for name, row in rows.items()
        },
        1, device="cpu", timeout=1200,
    )  # fmt: skip
    found = []
    control = lambda one: lambda row: make_parallel_program(row, one.control)  # noqa: E731
    for make in (make_longer_program, control):
        losses = measure_losses({name: (one.row, make(one)) for name, one in ones.items()})
        wanted = {name: alone[name_plain_program(one.row)] for name, one in ones.items()}
        pairs = {name: zip(losses[name], wanted[name], strict=True) for name in ones}
        found.append({name: [a / b - 1 for a, b in each] for name, each in pairs.items()})
    return found[0], found[1]


# Found by types


def run_typed_step(row: Row, mistake: Callable[[Any], None], group: Any) -> None:
    """Run a step of the row's technique with types declared for its inputs."""
    alone = row.technique in ("data", "context")  # tokens and loss differ between ranks
    side = (SIDES | EXTRA_SIDES)[row.technique](
        row, row.build_model(row.config), dict.fromkeys(AXES, group)
    )
    mistake(side)
    words: Any = tp.get_parameter_types(side.model) if hasattr(side.model, "tensor_group") else "R"
    tt.declare_parameters(side.model, group=words)
    batch, share = row.make_batch(0), cp.shard_tokens
    for tokens, targets, _ in (part for copy in batch for part in copy):
        for x in (tokens, targets) if row.technique != "context" else ():
            tt.declare_types(x, group="V" if alone else getattr(side, "tokens", "R"))

    def declare_addend(right: Any) -> Any:
        return lambda *given: tt.declare_types(right(*given), group="P")

    with ExitStack() as stack:
        if alone:
            for name in ("plain_loss", "loss"):
                own = declare_addend(getattr(sides, name))
                stack.enter_context(mock.patch.object(sides, name, own))
            shared = lambda *given: tt.declare_types(share(*given), group="V")  # noqa: E731
            stack.enter_context(mock.patch.object(cp, "shard_tokens", shared))
        side.optimizer.zero_grad()
        side.step(batch)
        if row.clip:
            side.clip_gradients(row.clip[0])
        side.optimizer.step()


def is_covered(row: Row) -> bool:
    by_hand = row.technique != "data" or row.options.get("way") == "parameters"
    known = row.technique in ("data", "tensor", "context")
    return known and by_hand and not row.config.dropout and row.steps == 1


def check_types(one: WrongProgram) -> str:
    """Return the type checker's verdict; "" for a program that it does not cover."""
    if not is_covered(one.row):
        return ""

    def check_step(mistake: Any, row: Row, patches: Any = ()) -> tt.Verdict:
        def run_step(group: dist.ProcessGroup) -> None:
            with ExitStack() as stack:
                for owner, name, value in patches:
                    stack.enter_context(mock.patch.object(owner, name, value))
                run_typed_step(row, mistake, group)

        return tt.check_step(run_step, group=one.row.ranks)

    right = check_step(lambda side: None, one.row)
    assert right, right
    wrong = check_step(one.mistake, one.other_row or one.row, one.patches)
    lacks = "has no declared type" in wrong.message  # the mistake's result: no verdict
    return "" if lacks else "pass" if wrong else "refuse"


# The whole table


def measure_mistakes(reports: dict[str, Any], names: list[str]) -> dict[str, dict[str, Any]]:
    """Return by program the error of its loss, and which checks find it from which step on."""
    wrong, right = measure_loss_errors(names)
    far = {name: max(map(abs, each)) for name, each in right.items()}
    print(f"right programs: off by {max(far.values()):.1e} at most")
    assert max(far.values()) < DIGITS_ERROR, far  # any larger error is due to the mistake
    found = {}
    for name in names:
        first = reports[name].first_finding
        digits, loss = (
            next((n for n, each in enumerate(wrong[name], 1) if abs(each) > limit), "")
            for limit in (DIGITS_ERROR, NOTICEABLE_ERROR)
        )
        found[name] = {
            **{f"loss_{n}": f"{100 * wrong[name][n - 1]:.2g}" for n in (1, 2, STEPS)},
            "digits_step": digits,
            "loss_step": loss,
            "types": check_types(PROGRAMS[name]),
            "parity_step": first.key.step + 1,
            "report": re.sub(r" \(relative error .*", "", str(first).splitlines()[0]),
        }
    return found


def make_table(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    shown = {one.program for one in MISTAKES}
    rest = [Mistake("", name, name) for name in PROGRAMS if name not in shown]
    rows = [one._asdict() | found.get(one.program, {}) for one in (*MISTAKES, *rest)]
    return [{name: str(row.get(name, "")) for name in parity.Mistake._fields} for row in rows]


if __name__ == "__main__":
    from test_parity import compute_reports

    rows = make_table(measure_mistakes(compute_reports(), list(PROGRAMS)))
    with parity.MISTAKES_FILE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, parity.Mistake._fields, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
