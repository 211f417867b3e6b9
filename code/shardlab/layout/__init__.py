"""A model's layout over ranks, and the ledger of its tensors with the axes that may cut them.

- `Layout`: the number of replicas and cuts, and the work of each rank, in one value (core);
  `ALONE`: the layout of one rank;
- `written`, `read`: a layout as text, and back (words);
- `stages`: the layers on each stage of a pipeline (stages);
- `ledger`: every parameter of the plain model once, and how each axis may cut it (entries);
- `Structure`: the parts of any model, as far as a count or a plan needs them (structure).

The standard library alone. Code that holds, sends and saves tensors reads these.
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
