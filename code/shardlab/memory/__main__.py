"""Train with and without recomputation, and compare: `python -m shardlab.memory`.

Recomputation repeats the same operations, so the weights have to be equal bit for bit.
"""

import sys
from functools import partial

from torch.utils.checkpoint import checkpoint

from shardlab import memory
from shardlab.layout import Layout
from shardlab.measure import comparison


def train_on_rank(recompute: str) -> comparison.Comparison:
    """Train a small GPT that keeps or recomputes activations; compare bytes and weights."""
    model, config = comparison.build_model(), comparison.MODEL
    for block in model.blocks if recompute == "full" else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    run = comparison.train(model, comparison.backward_whole, comparison.load_batches())
    layout = Layout(micro_batch=comparison.SEQS_PER_RANK, recompute=recompute)
    states = memory.estimate_states(memory.count_parameters(config), precision="fp32")
    want = memory.estimate_step(config, layout, precision="fp32")
    found = {"states": (states.total, run.states), "peak": (want.peak, run.peak)}
    gap, _ = comparison.compare_weights(model.state_dict())
    return comparison.Comparison(found, gap, tolerance=0.0)


if __name__ == "__main__":
    sys.exit(comparison.main(train_on_rank, "recompute", ["none", "full"], world_size=1))
