"""What a rank sends at the edges of a tensor-parallel model, by formula: equal to what is counted.

Of what a rank hands to an all-gather as its share, t - 1 copies go out; of a reduce-scatter,
(t - 1)/t does; of an all-reduce, 2(t - 1)/t.

In formulas: B batch, S tokens in all, H hidden, L layers, t ranks, e bytes an element.
"""

from __future__ import annotations

from shardlab.common.shapes import Config

from .core import check_seq


def edges_sent(
    config: Config,
    batch: int,
    seq: int,
    ranks: int,
    itemsize: int = 4,
    along_sequence: bool = True,
    keep: bool = False,
) -> dict[str, int]:
    """Bytes that a rank sends at the edges of a tensor-parallel GPT in a step, by purpose.

    A model of L layers has 2L + 1 edges to leave by (two for each layer, and the embedding's) and
    2L + 1 to enter by (the head's). Forward, backward:

        along_sequence=False    2L + 1 all-reduces of B S H e                 the same
        along_sequence=True     2L + 1 all-gathers, 2L + 1 reduce-scatters    the same
          keep=False                                                    and 2L + 1 all-gathers
          "gradients"                                   one all-reduce of norms' and late biases'

    "calls": of all collectives; "all_gather", "reduce_scatter", "all_reduce": bytes handed to them
    (of an all-gather: the shard). Without what the loss sends, which is the same either way.

    For attention without latents and norms of heads, whose key-value heads the ranks divide.
    """
    if along_sequence:
        check_seq(seq, ranks)
    edges, full = 2 * config.layers + 1, batch * seq * config.hidden * itemsize
    half = full * (ranks - 1) // ranks  # of a collective that is half an all-reduce
    again = edges if along_sequence and not keep else 0
    norm = config.hidden * (2 if config.norm == "layer" and config.bias else 1)
    biases = 2 * config.layers * config.hidden if config.bias else 0
    gradients = (edges * norm + biases) * itemsize
    found = {
        "forward": 2 * edges * half,
        "backward": (2 * edges + again) * half,
        "gradients": 2 * gradients * (ranks - 1) // ranks,
        "calls": 4 * edges + again + 1,
        "all_gather": (2 * edges + again) * (full // ranks),
        "reduce_scatter": 2 * edges * full,
        "all_reduce": gradients,
    }
    if not along_sequence:
        found |= {"gradients": 0, "calls": 2 * edges, "all_gather": 0, "reduce_scatter": 0}
        found["all_reduce"] = 2 * edges * full
    return found if ranks > 1 else dict.fromkeys(found, 0)
