"""Measurement of which check finds each mistake: loss, types, parity with one step, a longer run.

    .venv/bin/python tests/parity_measured.py      # three minutes: rewrites the table

The table is `code/shardtools/parity/mistakes.csv`; `parity.mistakes()` reads it, for the lesson.
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
from parity_programs import MORE, Wrong, parallel, plain, reference

from shardlab import context_parallel as cp
from shardlab import ranks
from shardlab import tensor_parallel as tp
from shardlab import tensor_types as tt
from shardtools import parity

STEPS = 20
SHOWS = 0.01  # relative error of a loss that a reader would notice
DIGITS = 1e-5  # relative error at which two programs' printed digits differ

# Found by the loss that a run prints


def losses(each: dict[str, tuple[Row, Callable[[Row], Any]]]) -> dict[str, list[float]]:
    """Return the ranks' mean printed loss at each step, by program."""
    found = {}
    for size in sorted({row.ranks for row, _ in each.values()}):
        mine = {name: one for name, one in each.items() if one[0].ranks == size}

        def work(mine: dict = mine) -> dict[str, list[float | None]]:
            return {
                name: program(replace(row, steps=STEPS))(lambda *_, **__: None)
                for name, (row, program) in mine.items()
            }

        by_rank = ranks.run(work, size, device="cpu", timeout=1200, show=False)
        for name in mine:
            steps = zip(*(one[name] for one in by_rank), strict=True)
            known = [[value for value in step if value is not None] for step in steps]
            found[name] = [sum(step) / len(step) for step in known]
    return found


def run_of(one: Wrong) -> Callable[[Row], Any]:
    """Return the wrong program with as many steps as the row has."""
    return lambda row: replace(
        one, row=row, other=one.other and replace(one.other, steps=row.steps)
    ).program()


def off(names: list[str]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the loss errors of each program, and of its control, relative to the plain program."""
    ones = {name: PROGRAMS[name] for name in names}
    rows = {reference(one.row): one.row for one in ones.values()}
    (alone,) = ranks.run(
        lambda: {
            name: plain(replace(row, steps=STEPS))(lambda *_, **__: None)
            for name, row in rows.items()
        },
        1, device="cpu", timeout=1200,
    )  # fmt: skip
    found = []
    for made in (run_of, lambda one: lambda row: parallel(row, one.control)):
        of = losses({name: (one.row, made(one)) for name, one in ones.items()})
        wanted = {name: alone[reference(one.row)] for name, one in ones.items()}
        found.append(
            {
                name: [a / b - 1 for a, b in zip(of[name], wanted[name], strict=True)]
                for name in ones
            }
        )
    return found[0], found[1]


# Found by types


def stepped(row: Row, mistake: Callable[[Any], None], group: Any) -> None:
    """Run a step of the row's technique with types declared for its inputs."""
    alone = row.technique in ("data", "context")  # tokens and loss differ between ranks
    side = (SIDES | MORE)[row.technique](row, row.model(row.config), dict.fromkeys(AXES, group))
    mistake(side)
    words: Any = tp.words(side.model) if hasattr(side.model, "tensor_group") else "R"
    tt.declare_parameters(side.model, group=words)
    batch, share = row.batch(0), cp.shard
    for tokens, targets, _ in (part for copy in batch for part in copy):
        for x in (tokens, targets) if row.technique != "context" else ():
            tt.declare(x, group="V" if alone else getattr(side, "tokens", "R"))

    def addend(right: Any) -> Any:
        return lambda *given: tt.declare(right(*given), group="P")

    with ExitStack() as stack:
        if alone:
            for name in ("plain_loss", "loss"):
                own = addend(getattr(sides, name))
                stack.enter_context(mock.patch.object(sides, name, own))
            shared = lambda *given: tt.declare(share(*given), group="V")  # noqa: E731
            stack.enter_context(mock.patch.object(cp, "shard", shared))
        side.optimizer.zero_grad()
        side.step(batch)
        if row.clip:
            side.clip(row.clip[0])
        side.optimizer.step()


def followed(row: Row) -> bool:
    """Return True if types cover a program: no hooks, point-to-point, subgroups or masks."""
    by_hand = row.technique != "data" or row.options.get("way") == "parameters"
    known = row.technique in ("data", "tensor", "context")
    return known and by_hand and not row.config.dropout and row.steps == 1


def verdict(one: Wrong) -> str:
    """Return the type checker's verdict; "" for a program that it does not cover."""
    if not followed(one.row):
        return ""

    def checked(mistake: Any, row: Row, instead: Any = ()) -> tt.Verdict:
        def taken(group: dist.ProcessGroup) -> None:
            with ExitStack() as stack:
                for owner, name, value in instead:
                    stack.enter_context(mock.patch.object(owner, name, value))
                stepped(row, mistake, group)

        return tt.check(taken, group=one.row.ranks)

    right = checked(lambda side: None, one.row)
    assert right, right
    wrong = checked(one.mistake, one.other or one.row, one.instead)
    lacks = "has no type" in wrong.message  # the mistake's result has no declared type: no verdict
    return "" if lacks else "pass" if wrong else "refuse"


# The whole table


def measured(reports: dict[str, parity.Report], names: list[str]) -> dict[str, dict[str, Any]]:
    """Return by program the error of its loss, and which checks find it from which step on."""
    wrong, right = off(names)
    far = {name: max(map(abs, each)) for name, each in right.items()}
    print(f"right programs: off by {max(far.values()):.1e} at most")
    assert max(far.values()) < DIGITS, far  # any larger error is due to the mistake
    found = {}
    for name in names:
        first = reports[name].first
        digits, loss = (
            next((n for n, each in enumerate(wrong[name], 1) if abs(each) > limit), "")
            for limit in (DIGITS, SHOWS)
        )
        found[name] = {
            **{f"loss_{n}": f"{100 * wrong[name][n - 1]:.2g}" for n in (1, 2, STEPS)},
            "digits": digits,
            "loss": loss,
            "types": verdict(PROGRAMS[name]),
            "parity": first.key.step + 1,
            "says": re.sub(r" \(off by .*", "", str(first).splitlines()[0]),
        }
    return found


def table(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each mistake of the lessons, then for programs that no lesson shows."""
    shown = {one.program for one in MISTAKES}
    rest = [Mistake("", name, name) for name in PROGRAMS if name not in shown]
    rows = [one._asdict() | found.get(one.program, {}) for one in (*MISTAKES, *rest)]
    return [{name: str(row.get(name, "")) for name in parity.Mistake._fields} for row in rows]


if __name__ == "__main__":
    from test_parity import reports

    rows = table(measured(reports(), list(PROGRAMS)))
    with parity.MISTAKES.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, parity.Mistake._fields, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
