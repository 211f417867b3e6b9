"""Megatron's sequence parallelism: shard by tokens the parts that tensor parallelism replicates.

`tensor_parallel.parallelize(model, group, edges=ALONG_SEQUENCE)` applies it; call `sum_gradients`
after backward. `edges_sent` predicts the bytes that a rank sends. To shard the sequence in the
whole model, attention included, see `context_parallel`.
"""

# ruff: noqa: F401 - the names of the package
from .core import ALONG_SEQUENCE, AlongSequence, seen_partly, sum_gradients
from .predict import edges_sent
