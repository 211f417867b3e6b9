"""Count the bytes that a process sends and holds, and measure how fast it can move them.

- `record_traffic`, `read_loopback_bytes` (traffic): bytes between ranks;
- `track_memory`, `track_saved_activations`, `measure_state_bytes`, `sum_bytes` (storage): bytes in
  one process, and a limit to them;
- `simulate_fsdp_step` (simulated_step): bytes that one rank of a large job would hold, without the
  job;
- `read_clock`, `describe_machine`, `measure_rates` (speed): a clock that waits for the GPU, the
  machine's hardware, and the rates that it reaches.
"""

# ruff: noqa: F401 - the names of the package
from .simulated_step import simulate_fsdp_step
from .speed import Rates, describe_machine, measure_rates, read_clock
from .storage import (
    MemoryTracker,
    SavedActivations,
    measure_state_bytes,
    sum_bytes,
    track_memory,
    track_saved_activations,
)
from .traffic import Traffic, read_loopback_bytes, record_traffic
