"""How a model is split, in one value, and every tensor of it with the axes that may cut it.

- `Layout`: how many copies and cuts, and what each rank does, in one value (core); `ALONE`: of
  one rank;
- `written`, `read`: a layout in words, and back (words);
- `stages`: which layers stand on which stage of a pipeline (stages);
- `ledger`: every parameter of the plain model once, and how each axis may cut it (entries);
- `Structure`: what any model is made of, as far as a count or a plan has to know (structure).

The standard library alone. What is held, sent and saved is read from these.
"""

from .core import ALONE, AXES, Layout, computed_again, orders
from .entries import KINDS, ledger
from .stages import SCHEDULES, STAGE_RULES, Stage, stages
from .structure import Structure, structure
from .words import read, written

__all__ = [
    "ALONE",
    "AXES",
    "KINDS",
    "SCHEDULES",
    "STAGE_RULES",
    "Layout",
    "Stage",
    "Structure",
    "computed_again",
    "ledger",
    "orders",
    "read",
    "stages",
    "structure",
    "written",
]
