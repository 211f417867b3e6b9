"""Which ways of dividing a model go together, for which model on which machines, and why.

- `Machine`, `MACHINES`, `room`: GPUs and their links; memory that a job may plan with;
- `Layout`, `peak`: who holds which part, and the most that a rank then holds;
- `flops`, `zero_bytes`, `seconds`, `training_days`: work, traffic, and a step's floor;
- `rungs`, `choose`: the flow chart, from copies alone to pipelines across nodes;
- `fullness`, `slowness`: what a layout lacks, in a sentence;
- `fastest`: every layout that fits, by its floor, to compare the chart with.

The standard library alone: whoever only plans does not have to load torch. Bytes, and seconds.
"""

from shardlab.machines import MACHINES, Machine, room

from .advice import fullness, slowness
from .chart import RUNGS, Rung, choose, rungs
from .cost import Seconds, flops, seconds, training_days, zero_bytes
from .layout import Layout, peak
from .search import Choice, fastest

__all__ = [
    "MACHINES",
    "RUNGS",
    "Choice",
    "Layout",
    "Machine",
    "Rung",
    "Seconds",
    "choose",
    "fastest",
    "flops",
    "fullness",
    "peak",
    "room",
    "rungs",
    "seconds",
    "slowness",
    "training_days",
    "zero_bytes",
]
