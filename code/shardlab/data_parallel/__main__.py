"""Train copies of a GPT, and compare with one process: `python -m shardlab.data_parallel`.

Each rank trains its copy on its share of the batch, and `DataParallel` averages the gradients.
"""

import sys

import torch.distributed as dist

from shardlab import memory
from shardlab.data_parallel import DataParallel
from shardlab.measure import comparison


def train_on_rank(_: str) -> comparison.Comparison:
    """Train a copy of a small GPT on each rank; compare bytes and weights."""
    n = dist.get_world_size()
    model = DataParallel(comparison.build_model(), dist.group.WORLD)
    run = comparison.train(model, comparison.backward_share, comparison.load_batches())
    flags = 4 * len(list(model.parameters()))  # a bucket's extra elements, one per parameter
    want = memory.estimate_states(memory.count_parameters(comparison.MODEL), precision="fp32")
    ring = 2 * (n - 1) / n * (want.gradients + flags)
    found = {
        "states": (want.total + flags, run.states),
        "sent": (ring, run.sent.count_ring_bytes(n)),
    }
    return comparison.Comparison(found, *comparison.compare_weights(model.module.state_dict()))


if __name__ == "__main__":
    sys.exit(comparison.main(train_on_rank, "wrapper", ["DataParallel"]))
