"""A model's layout over ranks, and a list of its parameters with the axes that may cut them.

- `Layout`: the number of replicas and cuts, and the work of each rank, in one value (core);
  `SINGLE_RANK`: the layout of one rank;
- `format_layout`, `parse_layout`: convert a layout to text and back (text);
- `build_stages`: the layers on each stage of a pipeline (stages);
- `list_params`: every parameter of the plain model, and how each axis may cut it (parameters);
- `Structure`: the parts of any model, as far as a count or a plan needs them (structure).

Imports only the standard library. Code that holds, sends and saves tensors uses this package.
"""

# ruff: noqa: F401 - the names of the package
from .core import AXES, SINGLE_RANK, Layout, list_axis_orders, parse_recompute
from .parameters import PARAMETER_KINDS, list_params
from .stages import SCHEDULES, STAGE_RULES, Stage, build_stages
from .structure import Structure, get_structure
from .text import format_layout, parse_layout
