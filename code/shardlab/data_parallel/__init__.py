"""Data parallelism: every rank holds the whole model and trains it on its own share of the batch.

- `core`: gradients averaged after backward, in buckets, and while backward computes;
- `overlap`: when a rank computed and when its wire was busy, traced and drawn.
"""

# ruff: noqa: F401 - the names of the package
from shardlab.data_parallel.buckets import MIB

from .core import (
    Bucket,
    DataParallel,
    assign_buckets,
    average_gradients,
    average_in_buckets,
    drift,
    joined_mean,
    step_seconds,
)
