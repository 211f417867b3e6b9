"""Where the bytes of a training step go, predicted: the standard library alone.

- `parameters`, `parameter_count`, `fsdp2_shard` (counting): parameters of a shape, of one rank;
- `states`, `bytes_per_parameter`, `largest` (recipes): the states of a model, by precision,
  optimizer, ZeRO stage;
- `activations`: what autograd keeps of the course's own model;
- `estimate` (step): all of it, and the moment of a step that needs the most;
- the formulas that papers and libraries print (published);
- `format_bytes` (units): GB is 10^9 bytes, GiB is 2^30.

Everything is in bytes, on one rank. `shardlab.count` measures the same.
"""

from .activations import Activations, activations
from .counting import PARTS, fsdp2_shard, largest_parameter, parameter_count, parameters, shapes
from .published import (
    attention_term,
    deepspeed_zero2,
    deepspeed_zero3,
    in_flight_layers,
    korthikanti_layer,
    megatron_bytes,
    selective_saving,
    stage_output_saved,
)
from .recipes import (
    OPTIMIZERS,
    PRECISIONS,
    Recipe,
    States,
    bytes_per_parameter,
    largest,
    states,
)
from .step import Estimate, estimate
from .units import UNITS, format_bytes

__all__ = [
    "OPTIMIZERS",
    "PARTS",
    "PRECISIONS",
    "UNITS",
    "Activations",
    "Estimate",
    "Recipe",
    "States",
    "activations",
    "attention_term",
    "bytes_per_parameter",
    "deepspeed_zero2",
    "deepspeed_zero3",
    "estimate",
    "format_bytes",
    "fsdp2_shard",
    "in_flight_layers",
    "korthikanti_layer",
    "largest",
    "largest_parameter",
    "megatron_bytes",
    "parameter_count",
    "parameters",
    "selective_saving",
    "shapes",
    "stage_output_saved",
    "states",
]
