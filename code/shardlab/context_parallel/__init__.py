"""Context parallelism: the sequence is sharded over ranks in the whole model, attention included.

`distribute(model, group, …)` makes a plain GPT work on this rank's tokens, `shard` selects these
tokens, and `average_gradients` is called after backward. Attention reaches the other ranks' tokens
in one of two ways: `ring_attention` passes keys and values around a ring, and
`all_to_all_attention` exchanges sharded tokens for sharded heads and back.

`split`, `join`, `gather`, `positions` (layout) map tokens to ranks; `block_attention` (kernel)
computes attention over a block of keys; `ring_sent`, `ulysses_sent`, `score_turns`,
`attention_memory` (predict) predict costs; `tokens_that_fit` (fit) the longest possible context.
"""

# ruff: noqa: F401 - the names of the package
from .core import (
    Block,
    average,
    average_gradients,
    blocks,
    distribute,
    merge,
    ring_attention,
    shard,
)
from .fit import context_moments, tokens_that_fit
from .kernel import block_attention, block_gradients
from .layout import LAYOUTS, gather, join, positions, split
from .predict import attention_memory, ring_sent, score_pairs, score_turns, ulysses_sent
from .ulysses import all_to_all_attention, heads_for_tokens, tokens_for_heads
