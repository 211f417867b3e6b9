"""Context parallelism: a sequence cut over ranks in the whole model, in attention too.

`distribute(model, group, …)` lets a plain GPT work on this rank's tokens, `shard` deals them out,
`average_gradients` comes after backward. In attention a rank needs the other ranks' tokens: by
`ring_attention`, whose keys and values go round, or by `all_to_all_attention`, which trades tokens
for heads and back.

`split`, `join`, `gather`, `positions` (layout) say which tokens a rank has; `block_attention`
(kernel) is attention to some of the keys; `ring_sent`, `ulysses_sent`, `score_turns`,
`attention_memory` (predict) say what it costs, `tokens_that_fit` (fit) how long a context may be.
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
