"""How a model is split, in one value, and every tensor of it with the axes that may cut it.

- `Layout`: how many copies and cuts, and what each rank does, in one value (core); `ALONE`: of
  one rank;
- `written`, `read`: a layout in words, and back (words);
- `stages`: which layers stand on which stage of a pipeline (stages);
- `ledger`: every parameter of a model once, and how each axis may cut it (entries).

The standard library alone. What is held, sent and saved is read from these.
"""

from .core import ALONE, AXES, Layout, computed_again, orders
from .entries import KINDS, Entry, ledger
from .stages import SCHEDULES, STAGE_RULES, Stage, stages
from .words import read, written

__all__ = [
    "ALONE",
    "AXES",
    "KINDS",
    "SCHEDULES",
    "STAGE_RULES",
    "Entry",
    "Layout",
    "Stage",
    "computed_again",
    "ledger",
    "orders",
    "read",
    "stages",
    "written",
]
