"""Tensor types: what tensors and their gradients are over the ranks, and a checker for programs.

- `core`: the table of matching types, and the checker: what the lesson teaches;
- `operator`: the base class of communicating operators;
- `declarations`: declarations of types;
- `functions`: the effect of torch's functions on summands;
- `messages`: errors with the line, the operation, and the fix;
- `check`: a step on a simulated mesh, checked in one call;
- `adjoint`: a numerical test of an operator's types, on real ranks;
- `random_programs`: random programs, whose gradients finite differences check.
"""

# ruff: noqa: F401 - the names of the package
from .check import Verdict, check_step
from .core import check_types, combine_types
from .declarations import (
    GRADIENT_TYPES,
    TYPES,
    declare_parameters,
    declare_types,
    get_types,
    override_types,
)
from .messages import TypeMismatch
from .operator import Operator
