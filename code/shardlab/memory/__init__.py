"""Predicted memory of a training step: the standard library alone.

- `core`: model states by precision, optimizer and ZeRO stage, and the tensors that a layer keeps;
- `activations`: tensors that autograd keeps for the course's own model, on one rank;
- `step_estimate`: the whole step, and the moment that needs the most memory;
- `structure_estimate`: the same for any model of transformers, less exactly;
- `published_formulas` of papers and libraries.

All results are bytes on one rank. `shardlab.measure.count` measures the same.
"""

# ruff: noqa: F401 - the names of the package

from .activations import count_in_flight, estimate_activations
from .core import PRECISIONS, estimate_states
from .counting import (
    count_expert_parameters,
    count_parameters,
    count_rank_parameters,
    list_parameter_shapes,
)
from .published_formulas import (
    bytes_per_parameter,
    deepspeed_zero2,
    find_max_parameters,
    korthikanti_layer,
    megatron_bytes,
)
from .step_estimate import estimate_step
from .structure_estimate import estimate_structure
from .units import UNITS, format_bytes
