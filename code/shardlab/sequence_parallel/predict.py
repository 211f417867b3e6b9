"""Formulas for the bytes that a rank of a tensor-parallel model sends; they equal counted values.

A rank sends t - 1 copies of its shard in an all-gather, (t - 1)/t of its input in a reduce-scatter,
and 2(t - 1)/t of its input in an all-reduce.

In formulas: B batch, S tokens in all, H hidden, L layers, t ranks, e bytes an element.
"""

from __future__ import annotations

from shardlab.common.shapes import Config

from .core import check_seq


def predict_edge_bytes(
    config: Config,
    batch: int,
    seq: int,
    ranks: int,
    itemsize: int = 4,
    sequence_sharded: bool = True,
    keep_entered: bool = False,
) -> dict[str, int]:
    """Return a rank's bytes sent at the edges of a tensor-parallel GPT in a step, by purpose.

    A model of L layers leaves 2L + 1 regions (two for each layer, one for the embedding) and enters
    2L + 1 (two for each layer, one for the head). Forward and backward send:

        sequence_sharded=False   2L + 1 all-reduces of B S H e                 the same
        sequence_sharded=True    2L + 1 all-gathers, 2L + 1 reduce-scatters    the same
          keep_entered=False                                             and 2L + 1 all-gathers
          "gradients"            one all-reduce of norms, and of biases after `leave_region`

    "calls": number of collectives; "all_gather", "reduce_scatter", "all_reduce": bytes of their
    inputs (of an all-gather: the shard). The loss's collectives, equal either way, are excluded.

    Valid for attention without latents and QK norm, whose key-value heads t divides.
    """
    if sequence_sharded:
        check_seq(seq, ranks)
    edges, full = 2 * config.layers + 1, batch * seq * config.hidden * itemsize
    half = full * (ranks - 1) // ranks  # bytes sent in an all-gather or a reduce-scatter
    again = edges if sequence_sharded and not keep_entered else 0
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
    if not sequence_sharded:
        found |= {"gradients": 0, "calls": 2 * edges, "all_gather": 0, "reduce_scatter": 0}
        found["all_reduce"] = 2 * edges * full
    return found if ranks > 1 else dict.fromkeys(found, 0)
