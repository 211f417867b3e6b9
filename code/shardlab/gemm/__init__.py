"""One matrix product on many ranks: how to shard it, the cost of each way, and when it pays off.

- `by_rows`, `by_columns`, `by_inner`, `summa` (core): the product, sharded along one dimension or
  on a grid of ranks, with its communication;
- `predict`, `seconds`, `pays_from` (cost): predicted memory, bytes sent, and time;
- `measure`, `shard_throughput` (measure): measured rates, the inputs of the predictions.
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
