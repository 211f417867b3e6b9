"""Is a parallel program the same computation as its plain one? And if not, where and why?

    from shardtools import parity

    print(parity.check(plain, parallel, ranks=2))

Two functions in, of any model and library, one verdict out; see `check`. `core` is the comparison;
beside it `recording` sees what a program computes, `record` keeps it, `places` proposes where a
rank's part stands, `noise` measures what `rounding` does; `causes`, `carried` (for what a step
hands to the next), `clues` and `report` find the words.
`check_resume` compares a run that was stopped; `first_layers` is for models that fit nowhere.
"""

from .mistakes import MISTAKES, Mistake, mistakes
from .programs import check, check_resume, first_layers
from .recording import Key, Watch
from .report import Finding, Report
from .scripts import watch

__all__ = [
    "MISTAKES", "Finding", "Key", "Mistake", "Report", "Watch", "check", "check_resume",
    "first_layers", "mistakes", "watch",
]  # fmt: skip
