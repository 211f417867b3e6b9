"""Which ways of dividing a model go together, for which model on which machines, and why.

- `MACHINES`, `room`: GPUs and their links; memory that a rank may take;
- `Layout`: who holds which part;
- `flops`, `zero_bytes`, `floor`, `training_days`: work, traffic, and the least that a step takes;
- `predict`: what a step takes, in seconds and bytes, by one of `PROFILES` (what an implementation
  keeps and does) and `Rates` (what has to be measured: by `learn` in files, by `measure` here);
- `plan`: the layouts of a job, the fastest first, and what ruled out the others; `alone`: one;
- `rungs`, `choose`: the flow chart over a plan, from copies alone to pipelines across nodes;
- `fullness`, `slowness`: what a layout lacks, in a sentence.

The standard library alone: whoever only plans does not have to load torch. Bytes, and seconds.
"""

from shardlab.common.machines import MACHINES
from shardlab.layout import Layout

from .advice import fullness, slowness
from .chart import RUNGS, choose, rung, rungs
from .cost import floor, flops, training_days, zero_bytes
from .plan import Plan, alone, plan
from .predict import Prediction, predict, room
from .profile import PROFILES
from .rates import Rates, known

__all__ = [
    "MACHINES",
    "PROFILES",
    "RUNGS",
    "Layout",
    "Plan",
    "Prediction",
    "Rates",
    "alone",
    "choose",
    "floor",
    "flops",
    "fullness",
    "known",
    "plan",
    "predict",
    "room",
    "rung",
    "rungs",
    "slowness",
    "training_days",
    "zero_bytes",
]
