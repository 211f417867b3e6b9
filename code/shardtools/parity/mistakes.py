"""The mistakes that the course's lessons show, and what finds each of them: a table, measured.

`tests/parity_measured.py` trains every program with its mistake on CPU ranks, and writes it.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

MISTAKES = Path(__file__).with_name("mistakes.csv")


class Mistake(NamedTuple):
    """A row; "" where a column says nothing of it."""

    lesson: str  # that shows it; "": no lesson does, others have published it
    where: str  # a heading, or words, of that lesson's "What goes wrong"
    program: str  # that makes it, in the tests
    why: str  # no program makes it: no two runs can be compared by their tensors
    loss_1: str  # how far the loss that is printed is off in step 1, in percent; then in 2 and 20
    loss_2: str
    loss_20: str
    digits: str  # the first of 20 steps in which it is off by 0.001 %, as no right program's is
    loss: str  # and by 1 %, which one would see; "": in none
    types: str  # "refuse", "pass"; "": not followed (hooks, messages of two, masks, more steps)
    parity: str  # the step in which `check` finds it; 0: before the first one
    says: str  # its line, without how far off


def mistakes() -> list[Mistake]:
    """All of them, by lesson; those that no lesson shows are last."""
    with MISTAKES.open(encoding="utf-8", newline="") as file:
        return [Mistake(**row) for row in csv.DictReader(file)]
