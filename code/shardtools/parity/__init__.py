"""Comparison of a parallel program with its plain version: equal, or where it goes wrong, and why.

    from shardtools import parity

    print(parity.check(plain, parallel, ranks=2))

`check` takes two functions, of any model and library, and returns a report. `core` compares
tensors; `hooks` watches a program, `record` stores its tensors, `places` proposes where a rank's
part is in the full tensor, `noise` measures rounding errors, which `rounding` makes random;
`causes`, `state_causes`, `hints` and `report` explain what is wrong.
`check_resume` compares a resumed run; `keep_first_layers` shortens models that do not fit into
memory.
"""

from .hooks import Key, Watch
from .mistakes import MISTAKES_FILE, Mistake, load_mistakes
from .programs import check, check_resume, keep_first_layers
from .report import Finding, Report
from .scripts import watch

__all__ = [
    "MISTAKES_FILE", "Finding", "Key", "Mistake", "Report", "Watch", "check", "check_resume",
    "keep_first_layers", "load_mistakes", "watch",
]  # fmt: skip
