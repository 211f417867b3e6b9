"""One matrix product on many ranks: where to cut it, what that costs, and when it pays.

- `by_rows`, `by_columns`, `by_inner`, `summa` (core): the product, cut along one dimension or on a
  grid of ranks, and what it sends;
- `predict`, `seconds`, `pays_from` (cost): bytes held and sent, and time, before anything runs;
- `measure`, `shard_throughput` (measure): the rates that the predictions start from.
"""

# ruff: noqa: F401 - the names of the package
from .core import (
    CUTS,
    Grid,
    by_columns,
    by_inner,
    by_rows,
    cut,
    gather_columns,
    gather_rows,
    grid,
    multiply,
    panels,
    shard_sizes,
    shard_slice,
    summa,
)
from .cost import (
    WAYS,
    Cost,
    Machine,
    OverBudget,
    check_budget,
    near_square,
    pays_from,
    predict,
    seconds,
)
from .measure import measure, shard_throughput, stopwatch
