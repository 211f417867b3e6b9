"""One matrix product on many ranks: how to shard it, what each scheme costs, when it pays off.

- `multiply_rows`, `multiply_columns`, `multiply_inner`, `multiply_summa` (core): the product,
  sharded along one dimension or on a grid of ranks, with its communication;
- `predict_cost`, `predict_seconds`, `find_break_even_side` (cost): memory, bytes sent, and time;
- `measure_machine`, `measure_shard_throughput` (measure): measured rates for the predictions.
"""

# ruff: noqa: F401 - the names of the package
from .core import (
    SCHEMES_1D,
    Grid,
    create_grid,
    gather_columns,
    gather_rows,
    multiply_columns,
    multiply_inner,
    multiply_rows,
    multiply_sharded,
    multiply_summa,
    shard_operands,
    shard_sizes,
    shard_slice,
    split_panels,
)
from .cost import (
    SCHEMES,
    Cost,
    Machine,
    MemoryBudgetError,
    check_budget,
    choose_grid_shape,
    find_break_even_side,
    predict_cost,
    predict_seconds,
)
from .measure import measure_machine, measure_shard_throughput, time_on_group
