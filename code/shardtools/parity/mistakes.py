"""The mistakes that the course's lessons show, and what finds each of them, as measured.

`tests/parity_measured.py` trains every program with its mistake on CPU ranks, and writes the table.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

MISTAKES_FILE = Path(__file__).with_name("mistakes.csv")


class Mistake(NamedTuple):
    """A row of the table; "" where a column says nothing."""

    lesson: str  # lesson that shows the mistake; "": published elsewhere
    quote: str  # a heading, or words, of that lesson's "What goes wrong"
    program: str  # program in the tests that makes the mistake
    no_program: str  # reason why no program makes it: no two runs can be compared by their tensors
    loss_1: str  # error of the printed loss in step 1, in percent; then in steps 2 and 20
    loss_2: str
    loss_20: str
    digits_step: str  # first of 20 steps in which the loss is off by 0.001 %
    loss_step: str  # first step in which it is off by 1 %, which a reader would see; "": none
    types: str  # "refuse", "pass"; "": not covered (hooks, messages of two, masks, more steps)
    parity_step: str  # the step in which `check` finds it; 0: before the first step
    report: str  # the report's line, without the size of the error


def load_mistakes() -> list[Mistake]:
    """Return all mistakes by lesson; those that no lesson shows are last."""
    with MISTAKES_FILE.open(encoding="utf-8", newline="") as file:
        return [Mistake(**row) for row in csv.DictReader(file)]
