"""Train a GPT in stages, and compare with one process: `python -m shardlab.pipeline`.

The schedules are naive (one stage works at a time), GPipe and 1F1B. They differ in `peak`.
"""

import sys
from dataclasses import replace
from functools import partial

import torch.distributed as dist

from shardlab import memory, pipeline
from shardlab.layout import Layout
from shardlab.measure import comparison


def train_on_rank(name: str) -> comparison.Comparison:
    """Train a small GPT in stages with this schedule; compare bytes and weights."""
    p, stage = dist.get_world_size(), dist.get_rank()
    config = replace(comparison.MODEL, layers=2 * p, tied=False)
    layout = Layout(pp=p, schedule=name, microbatches=2 * p, micro_batch=2)
    schedule = pipeline.make_schedule(name, p, layout.microbatches)
    build = partial(comparison.build_model, config)
    model = pipeline.distribute_model(build(), schedule, dist.group.WORLD)
    run = comparison.train(model, pipeline.Pipeline.step, comparison.load_batches())
    own = sum(memory.count_rank_parameters(config, layout, stage).values())
    want = memory.estimate_step(config, layout, precision="fp32", stage=stage)
    sends = sum(action.kind in ("SF", "SB") for action in schedule.actions[stage])
    message = 4 * layout.micro_batch * config.seq * config.hidden  # [b, s, h] in float32
    found = {
        "states": (memory.estimate_states(own, precision="fp32").total, run.states),
        "peak": (want.peak, run.peak),
        "sent": (sends * message, run.sent.count_ring_bytes(p)),
    }
    return comparison.Comparison(found, *comparison.compare_weights(model.full_state_dict(), build))


if __name__ == "__main__":
    sys.exit(comparison.main(train_on_rank, "schedule", ["naive", "gpipe", "1f1b"]))
