"""Tensor types: what tensors and their gradients are over the ranks, and a checker for programs.

- `core`: the table of matching types, and the checker: what the lesson teaches;
- `operator`: the base class of communicating operators;
- `declared`: declarations of types;
- `functions`: the effect of torch's functions on summands;
- `messages`: errors with the line, the operation, and the fix;
- `check`: a step on a simulated mesh, checked in one call;
- `adjoint`: a numerical test of an operator's words, on real ranks;
- `programs`: random programs, whose gradients finite differences check.
"""

# ruff: noqa: F401 - the names of the package
from .check import Verdict, check
from .core import checking, combined
from .declared import DUAL, WORDS, believe, declare, declare_parameters, type_of
from .messages import Mismatch
from .operator import Operator
