"""Tensor types: what a tensor is over ranks, its gradient included, and a checker of programs.

- `core`: the table of what goes with what, and the checker: what the lesson teaches;
- `operator`: the base class of operators that send;
- `declared`: saying what a tensor is;
- `functions`: what torch's functions do with addends;
- `messages`: the line, the operation, and what would be right;
- `check`: a step on a pretended mesh, checked in one call;
- `adjoint`: whether an operator is what its words say, by numbers, on real ranks;
- `programs`: random programs, and by finite differences whether their gradients are right.
"""

# ruff: noqa: F401 - the names of the package
from .check import Verdict, check
from .core import checking, combined
from .declared import DUAL, WORDS, believe, declare, declare_parameters, type_of
from .messages import Mismatch
from .operator import Operator
