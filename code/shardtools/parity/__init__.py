"""Comparison of a parallel program with its plain version: equal, or where it goes wrong, and why.

    from shardtools import parity

    print(parity.check(plain, parallel, ranks=2))

`check` takes two functions, of any model and library, and returns a report. `core` compares
tensors; `recording` hooks into a program, `record` stores its tensors, `places` proposes where a
rank's part stands, `noise` measures rounding errors, which `rounding` draws anew; `causes`,
`carried` (state that steps hand on), `clues` and `report` find the words.
`check_resume` compares a resumed run; `first_layers` shortens models that do not fit into memory.
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
