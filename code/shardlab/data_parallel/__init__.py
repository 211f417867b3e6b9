"""Data parallelism: every rank holds the whole model and trains it on its own share of the batch.

- `core`: average gradients after backward, in buckets, and while backward computes;
- `overlap`: trace and draw when a rank computes and when its link is busy.
"""

# ruff: noqa: F401 - the names of the package
from shardlab.data_parallel.buckets import MIB

from .core import (
    Bucket,
    DataParallel,
    assign_buckets,
    average_gradients,
    average_in_buckets,
    measure_drift,
    predict_step_seconds,
    scale_for_global_mean,
)
