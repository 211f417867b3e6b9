"""Counting bytes: those that a process sends, those that it holds, and how fast it can move them.

- `sent`, `wire_bytes` (traffic): what travels between ranks;
- `held`, `saved`, `states`, `bytes_of` (storage): what one process holds, and a limit to it;
- `pretended_step` (pretended): what one rank of a large job would hold, without the job;
- `clock`, `machine`, `rates` (speed): a clock that waits for the GPU, what this machine has, and
  what it reaches.
"""

from .pretended import pretended_step
from .speed import Rates, clock, machine, rates
from .storage import Held, Saved, bytes_of, held, saved, states
from .traffic import Sent, sent, wire_bytes

__all__ = [
    "Held",
    "Rates",
    "Saved",
    "Sent",
    "bytes_of",
    "clock",
    "held",
    "machine",
    "pretended_step",
    "rates",
    "saved",
    "sent",
    "states",
    "wire_bytes",
]
