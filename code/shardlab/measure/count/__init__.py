"""Count the bytes that a process sends and holds, and measure how fast it can move them.

- `sent`, `wire_bytes` (traffic): bytes between ranks;
- `held`, `saved`, `states`, `bytes_of` (storage): bytes in one process, and a limit to them;
- `pretended_step` (pretended): bytes that one rank of a large job would hold, without the job;
- `clock`, `machine`, `rates` (speed): a clock that waits for the GPU, the machine's hardware, and
  the rates that it reaches.
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
