"""Context parallelism: the sequence is sharded over ranks in the whole model, attention included.

`distribute_model(model, group, …)` makes a plain GPT work on this rank's tokens, `shard_tokens`
selects these tokens, and `average_gradients` is called after backward. Attention reaches the other
ranks' tokens in one of two ways: `ring_attention` passes keys and values around a ring, and
`all_to_all_attention` exchanges sharded tokens for sharded heads and back.
"""

# ruff: noqa: F401 - the names of the package
from .core import (
    Block,
    average_gradients,
    average_scalar,
    distribute_model,
    list_blocks,
    merge_attention,
    ring_attention,
    shard_tokens,
)
from .fit import find_max_context, predict_context_moments
from .kernel import block_attention, block_gradients
from .layout import LAYOUTS, gather_seq, join_seq, split_seq, token_positions
from .predict import (
    count_pairs,
    count_pairs_by_turn,
    predict_attention_memory,
    predict_ring_bytes,
    predict_ulysses_bytes,
)
from .ulysses import all_to_all_attention, heads_to_tokens, tokens_to_heads
