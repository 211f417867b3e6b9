"""Tensor parallelism from scratch: every rank has a part of each matrix, and all have every token.

A transformer block is two regions, attention and feed-forward network. Each begins with matrices
cut by columns and ends with one cut by rows, so that nothing has to be sent in between. One sum at
its end, and in backward one at its beginning, make it what one process computes.

- `core`: the operators at the edges of a region, the layers inside, the plain GPT cut in place:
  what the lesson teaches;
- `cross_entropy`: the loss, of logits that no rank has whole;
- `overlap`: the first layers of a region at once, so that backward sends while it computes; heads
  of keys and values that several ranks have;
- `dropout`: a seed for each rank, where activations are cut;
- `states`: whole state dicts in and out, models too large for one rank, and the norm of gradients;
- `gather`: two more operators, for other orders of cuts;
- `predict`: which numbers of ranks will do, and what a rank holds and sends.

Shoeybi, Patwary, Puri, LeGresley, Casper, Catanzaro, "Megatron-LM: Training Multi-Billion Parameter
Language Models Using Model Parallelism", 2019 (arXiv 1909.08053).
"""

# ruff: noqa: F401 - the names of the package
from .core import (
    REPLICATED,
    ColumnLinear,
    Cut,
    RowLinear,
    VocabEmbedding,
    copy_to,
    cut_attention,
    cut_ffn,
    cut_latent,
    parallelize,
    reduce_from,
    reduce_from_,
    shard_slice,
)
from .cross_entropy import loss
from .gather import gather_last, split_last
from .overlap import Edges, Entrance
from .predict import degrees, on_wire, predicted_calls, predicted_sent, predicted_states
from .states import (
    clip_grad_norm_,
    cuts,
    full_state_dict,
    initialize,
    load_full_state_dict,
    parts,
    words,
)
