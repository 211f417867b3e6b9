"""Predicted memory of a training step: the standard library alone.

- `states` and the tensors that a layer keeps (core): by precision, optimizer, ZeRO stage;
- `parameters`, `parameter_count` (counting): parameters of a shape, of one rank;
- `activations`: tensors that autograd keeps for the course's own model, on one rank, and
  `in_flight`: the number of micro-batches for which a pipeline stage keeps them;
- `estimate` (step): the whole step, and the moment that needs the most memory;
- `estimate_structure` (of_structure): the same for any model of transformers, less exactly;
- published formulas of papers and libraries (published), `bytes_per_parameter` and `largest`;
- `format_bytes` (units): GB is 10^9 bytes, GiB is 2^30.

All results are bytes on one rank. `shardlab.measure.count` measures the same.
"""

from .activations import activations, in_flight
from .core import PRECISIONS, states
from .counting import (
    in_experts,
    parameter_count,
    parameters,
    shapes,
)
from .of_structure import estimate_structure
from .published import (
    bytes_per_parameter,
    deepspeed_zero2,
    korthikanti_layer,
    largest,
    megatron_bytes,
)
from .step import estimate
from .units import UNITS, format_bytes

__all__ = [
    "PRECISIONS",
    "UNITS",
    "activations",
    "bytes_per_parameter",
    "deepspeed_zero2",
    "estimate",
    "estimate_structure",
    "format_bytes",
    "in_experts",
    "in_flight",
    "korthikanti_layer",
    "largest",
    "megatron_bytes",
    "parameter_count",
    "parameters",
    "shapes",
    "states",
]
