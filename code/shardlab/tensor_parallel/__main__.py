"""Train a sharded feed-forward network, and compare: `python -m shardlab.tensor_parallel`.

Its two matrices, 4096 to 16384 to 4096, are cut by columns and by rows.
"""

import sys

import torch
import torch.distributed as dist

from shardlab import memory, ranks
from shardlab import tensor_parallel as tp
from shardlab.common.shapes import Config
from shardlab.gpt.model import FeedForward
from shardlab.layout import Layout
from shardlab.measure import comparison
from shardlab.ranks.gather import gather_parts

SHAPE, TOKENS = Config(layers=1, heads=32, hidden=4096, ffn=16_384), 8


def _build_ffn() -> FeedForward:
    torch.manual_seed(0)
    return FeedForward(SHAPE).to(ranks.device())


def _backward(ffn: FeedForward, x_TH: torch.Tensor, y_TH: torch.Tensor) -> None:
    x_TH = x_TH.clone().requires_grad_()  # the layers before this network would need its gradient
    (ffn(x_TH) - y_TH).square().mean().backward()


def train_on_rank(_: str) -> comparison.Comparison:
    """Train a feed-forward network that is cut over the ranks; compare bytes and weights."""
    t, group, ffn = dist.get_world_size(), dist.group.WORLD, _build_ffn()
    tp.shard_ffn(ffn, group)
    batches = torch.randn(comparison.STEPS, 2, TOKENS, SHAPE.hidden).to(ranks.device())
    run = comparison.train(ffn, _backward, batches)
    own = memory.count_rank_parameters(SHAPE, Layout(tp=t))["ffn"]
    all_reduces = 2 * 4 * TOKENS * SHAPE.hidden  # one in forward, one in backward, in float32
    found = {
        "states": (memory.estimate_states(own, precision="fp32").total, run.states),
        "sent": (tp.bytes_on_wire(all_reduces, t), run.sent.count_ring_bytes(t)),
    }
    cuts = tp.get_shard_dims(ffn)
    full = {n: gather_parts(p.detach(), cuts[n], group, 0) for n, p in ffn.named_parameters()}
    equal = comparison.compare_weights(full, _build_ffn, _backward, batches, SHAPE.ffn_width)
    return comparison.Comparison(found, *equal)


if __name__ == "__main__":
    sys.exit(comparison.main(train_on_rank, "network", ["4096-16384-4096"]))
