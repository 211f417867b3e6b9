"""Tensor parallelism from scratch: every rank has a part of each matrix, and all have every token.

A transformer block is two regions, attention and feed-forward network. Each begins with matrices
cut by columns and ends with one cut by rows, so that nothing has to be sent in between. One sum at
its end, and in backward one at its beginning, make it what one process computes.

- `operators`: what stands at the edges of a region, forward and backward;
- `layers`: linear layers and the embedding, a share of each; `columns`: the first layers of a
  region at once, so that backward sends while it computes;
- `parallelize`: the plain GPT, changed in place; `dropout` within attention;
- `loss`: cross-entropy from logits of which each rank has a part;
- `state`: whole state dicts in and out, and models too large for one rank; `clip`: their norm;
- `predict`: what a rank holds and sends.

Shoeybi, Patwary, Puri, LeGresley, Casper, Catanzaro, "Megatron-LM: Training Multi-Billion Parameter
Language Models Using Model Parallelism", 2019 (arXiv 1909.08053).
"""

from .clip import clip_grad_norm_
from .columns import REPLICATED, columns
from .layers import ColumnLinear, Cut, RowLinear, VocabEmbedding
from .loss import loss
from .operators import (
    Edges,
    copy_to,
    gather_last,
    reduce_from,
    reduce_from_,
    share,
    split_last,
)
from .parallelize import cut_attention, cut_ffn, parallelize
from .predict import degrees, on_wire, predicted_calls, predicted_sent, predicted_states
from .state import cuts, full_state_dict, initialize, load_full_state_dict

__all__ = [
    "REPLICATED",
    "ColumnLinear",
    "Cut",
    "Edges",
    "RowLinear",
    "VocabEmbedding",
    "clip_grad_norm_",
    "columns",
    "copy_to",
    "cut_attention",
    "cut_ffn",
    "cuts",
    "degrees",
    "full_state_dict",
    "gather_last",
    "initialize",
    "load_full_state_dict",
    "loss",
    "on_wire",
    "parallelize",
    "predicted_calls",
    "predicted_sent",
    "predicted_states",
    "reduce_from",
    "reduce_from_",
    "share",
    "split_last",
]
