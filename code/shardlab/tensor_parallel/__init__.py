"""Tensor parallelism from scratch: every rank holds a part of each matrix, and all have all tokens.

A transformer block has two regions, attention and feed-forward network. Each begins with
column-parallel matrices and ends with a row-parallel one, and sends nothing in between. One
all-reduce at its end, and in backward one at its beginning, give the results of one process.

- `core`: the operators at the edges of a region, the layers inside, the plain GPT cut in place:
  what the lesson teaches;
- `cross_entropy`: the loss of logits that are cut by vocabulary;
- `overlap`: the first layers of a region together, so that backward sends while it computes;
  key-value heads that several ranks hold;
- `dropout`: a seed for each rank, for activations that are cut;
- `states`: whole state dicts in and out, models too large for one rank, and the norm of gradients;
- `gather`: two more operators, for other orders of cuts;
- `predict`: the degrees that divide a model, and the bytes that a rank holds and sends.

Shoeybi, Patwary, Puri, LeGresley, Casper, Catanzaro, "Megatron-LM: Training Multi-Billion Parameter
Language Models Using Model Parallelism", 2019 (arXiv 1909.08053).
"""

# ruff: noqa: F401 - the names of the package
from .core import (
    REPLICATED,
    ColumnLinear,
    RowLinear,
    ShardedLayer,
    VocabEmbedding,
    copy_to,
    parallelize,
    reduce_from,
    reduce_from_,
    shard_attention,
    shard_ffn,
    shard_latent,
    shard_slice,
)
from .cross_entropy import vocab_parallel_loss
from .gather import gather_last, split_last
from .overlap import Edges, SharedInput
from .predict import (
    bytes_on_wire,
    feasible_degrees,
    predict_calls,
    predict_sent_bytes,
    predict_state_bytes,
)
from .states import (
    clip_grad_norm_,
    count_shards,
    full_state_dict,
    get_parameter_types,
    get_shard_dims,
    initialize_shards,
    load_full_state_dict,
)
