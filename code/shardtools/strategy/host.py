"""Step time of offloading to host memory: transfers over the host link, and the CPU optimizer.

Symbols as in `cost`. Both rates are assumptions: no measured step supports them.
"""

from __future__ import annotations

from .job import Job
from .rates import Values

# Share of the host link's rate that copies from page-locked memory reach. Copies from pageable
# memory, or over links that two GPUs share, are slower.
LINK = 0.8
# Parameters per second that a GPU's share of the host's CPUs updates with Adam: 28 bytes each.
UPDATES = 5e8
MEMORY = 2e12  # bytes of host memory that a node's GPUs may use together: a DGX H100 has 2 TB


def seconds(job: Job, rates: Values, kept: float, busy: float) -> float:
    """Return the seconds in which a rank with `kept` parameters in its shard waits for the host.

    busy: seconds of the step's compute. Gradients go to the host, the CPU updates the weights, and
    weights come back: Ren et al. 2021 (arXiv 2101.06840), section 4. Offloaded parameters are
    fetched for each pass of each micro-batch; compute hides these transfers as it hides ZeRO-3's
    gathers.
    """
    layout, wire = job.layout, job.profile.wire
    if layout.offload == "none":
        return 0.0
    link = LINK * job.machine.host
    taken = kept * ((wire.gradient + wire.weight) / link + 1 / UPDATES)
    if layout.offload == "parameters":
        come = 2 * layout.microbatches * kept * wire.weight / link
        taken += max(rates.gathers * come, come - busy)
    return taken
