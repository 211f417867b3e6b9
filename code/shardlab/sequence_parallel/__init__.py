"""Megatron's sequence parallelism: what tensor parallelism leaves whole is cut by tokens.

`tensor_parallel.parallelize(model, group, edges=ALONG_SEQUENCE)` uses it; `sum_gradients` comes
after backward. `edges_sent` predicts the bytes that a rank sends. A context that is cut everywhere,
in attention too, is `context_parallel`.
"""

# ruff: noqa: F401 - the names of the package
from .core import ALONG_SEQUENCE, AlongSequence, seen_partly, sum_gradients
from .predict import edges_sent
