"""Where the bytes of a training step go, predicted: the standard library alone.

- `states` and what a layer keeps (core): model states by precision, optimizer, ZeRO stage;
- `parameters`, `parameter_count` (counting): parameters of a shape, of one rank;
- `activations`: what autograd keeps of the course's own model, on one rank, and `in_flight`: for
  how many micro-batches a stage of a pipeline keeps it;
- `estimate` (step): all of it, and the moment of a step that needs the most;
- `estimate_structure` (of_structure): the same of any model of transformers, less exactly;
- the formulas that papers and libraries print (published), `bytes_per_parameter` and `largest`;
- `format_bytes` (units): GB is 10^9 bytes, GiB is 2^30.

Everything is in bytes, on one rank. `shardlab.measure.count` measures the same.
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
