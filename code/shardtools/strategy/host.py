"""What it takes to keep states in the host's memory: the link to it, and a step of its processors.

Letters as in `cost`. Both rates are assumed: nobody's measured steps are behind them.
"""

from __future__ import annotations

from .job import Job
from .rates import Values

# Of a machine's link to the host, that copies from page-locked memory reach. Copies from other
# memory, or links that two GPUs share, are slower.
LINK = 0.8
# Parameters per second that a GPU's part of the processors updates with Adam: at 28 bytes read and
# written for each, 14 GB/s of a memory that eight of them share.
UPDATES = 5e8
MEMORY = 2e12  # bytes of a node's host that its GPUs may take together: a DGX H100 has 2 TB


def seconds(job: Job, rates: Values, kept: float, busy: float) -> float:
    """Seconds of a step in which a rank with `kept` parameters in its share waits for the host.

    busy: the step's work. Gradients go there, weights come back, and the processors update them in
    between: Ren et al. 2021 (arXiv 2101.06840), section 4. Offloaded parameters come for each pass
    of each micro-batch, which hides behind the work as ZeRO-3's gathers do.
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
