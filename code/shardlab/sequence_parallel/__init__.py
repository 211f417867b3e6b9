"""The sequence cut over ranks: activations that tensor parallelism leaves whole, and long contexts.

Two things go by the name. Megatron's sequence parallelism (`AlongSequence`) is a companion of
tensor parallelism: what stands between its cut matrices is cut by tokens. The other one cuts the
whole model's context (`distribute`), where attention alone has to look at other ranks' tokens: by
`ring_attention`, whose keys and values go round, or by `all_to_all_attention`, which trades tokens
for heads and back.

`split`, `join`, `positions` (layout) say which tokens a rank has; `blocks` what is left to compute
under a mask; `ring_sent`, `ulysses_sent`, `edges_sent`, `score_turns`, `attention_memory` (predict)
what it costs, and `tokens_that_fit`, `tokens_table` (fit) how long a context may be.
"""

from .context import average, average_gradients, distribute, share
from .edges import (
    ALONG_SEQUENCE,
    AlongSequence,
    TokenDropout,
    gather_sequence,
    scatter_sequence,
    seen_partly,
    slice_dropouts,
    sum_gradients,
)
from .fit import context_moments, grain, tokens_table, tokens_that_fit
from .kernel import Gradients, block_attention, block_gradients
from .layout import LAYOUTS, gather, join, pieces, positions, split
from .predict import (
    attention_memory,
    edges_sent,
    ring_sent,
    score_pairs,
    score_turns,
    ulysses_sent,
)
from .ring import Block, Work, blocks, merge, ring_attention
from .ulysses import all_to_all_attention, heads_for_tokens, tokens_for_heads

__all__ = [
    "ALONG_SEQUENCE",
    "LAYOUTS",
    "AlongSequence",
    "Block",
    "Gradients",
    "TokenDropout",
    "Work",
    "all_to_all_attention",
    "attention_memory",
    "average",
    "average_gradients",
    "block_attention",
    "block_gradients",
    "blocks",
    "context_moments",
    "distribute",
    "edges_sent",
    "gather",
    "gather_sequence",
    "grain",
    "heads_for_tokens",
    "join",
    "merge",
    "pieces",
    "positions",
    "ring_attention",
    "ring_sent",
    "scatter_sequence",
    "score_pairs",
    "score_turns",
    "seen_partly",
    "share",
    "slice_dropouts",
    "split",
    "sum_gradients",
    "tokens_for_heads",
    "tokens_table",
    "tokens_that_fit",
    "ulysses_sent",
]
