"""Train ZeRO's stages 1, 2 and 3, and compare with one process: `python -m shardlab.zero`."""

import sys

import torch.distributed as dist

from shardlab import zero
from shardlab.measure import comparison


def train_on_rank(stage: int) -> comparison.Comparison:
    """Train a small GPT that is sharded in this ZeRO stage; compare bytes and weights."""
    n = dist.get_world_size()
    model = zero.shard_module(comparison.build_model(), dist.group.WORLD, stage)
    run = comparison.train(model, comparison.backward_share, comparison.load_batches())
    flags = 2 * (n - 1) / n * len(list(model.parameters()))  # one byte per parameter, all-reduced
    found = {
        "states": (sum(zero.predict_state_bytes(model).values()), run.states),
        "sent": (
            sum(zero.predict_sent_bytes(model).values()) + flags,
            run.sent.count_ring_bytes(n),
        ),
    }
    return comparison.Comparison(found, *comparison.compare_weights(model.full_state_dict()))


if __name__ == "__main__":
    sys.exit(comparison.main(train_on_rank, "stage", [1, 2, 3]))
