"""Megatron's sequence parallelism: shard by tokens the parts that tensor parallelism replicates.

`tensor_parallel.parallelize(model, group, edges=SEQUENCE_SHARDED)` applies it; call `sum_gradients`
after backward. To shard the sequence in the whole model, attention included, see
`context_parallel`.
"""

# ruff: noqa: F401 - the names of the package
from .core import SEQUENCE_SHARDED, SequenceShardedEdges, find_partial_gradients, sum_gradients
from .predict import predict_edge_bytes
