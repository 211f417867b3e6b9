"""Step time of offloading to host memory: transfers over the host link, and the CPU optimizer.

Symbols as in `cost`. Both rates are assumptions: no measured step supports them.
"""

from __future__ import annotations

from .job import Job
from .rates import RateValues

# Share of the host link's rate that copies from page-locked memory reach. Copies from pageable
# memory, or over links that two GPUs share, are slower.
HOST_LINK_SHARE = 0.8
# Parameters per second that a GPU's share of the host's CPUs updates with Adam: 28 bytes each.
CPU_UPDATES_PER_SECOND = 5e8
HOST_MEMORY_BYTES = 2e12  # that a node's GPUs may use together: a DGX H100 has 2 TB


def offload_seconds(job: Job, rates: RateValues, params: float, compute: float) -> float:
    """Return the seconds in which a rank with a shard of `params` parameters waits for the host.

    compute: seconds of the step's compute. Gradients go to the host, the CPU updates the weights,
    and weights come back: Ren et al. 2021 (arXiv 2101.06840), section 4. Offloaded parameters are
    fetched for each pass of each micro-batch; compute hides these transfers as it hides ZeRO-3's
    gathers.
    """
    layout, wire = job.layout, job.profile.wire_bytes
    if layout.offload == "none":
        return 0.0
    link = HOST_LINK_SHARE * job.machine.host_bandwidth
    taken = params * ((wire.gradient + wire.weight) / link + 1 / CPU_UPDATES_PER_SECOND)
    if layout.offload == "parameters":
        fetched = 2 * layout.microbatches * params * wire.weight / link
        taken += max(rates.exposed_gathers * fetched, fetched - compute)
    return taken
