"""Layouts of a model on a cluster, with predicted memory and step time.

- `MACHINES`, `room`: GPUs and their links; memory that a rank may use;
- `Layout`: degrees of parallelism, and which rank holds which part of the model;
- `flops`, `zero_bytes`, `floor`, `training_days`: arithmetic, traffic, and lower bounds;
- `predict`: seconds and bytes of a step, from one of `PROFILES` (an implementation's work and
  memory) and measured `Rates` (by `learn` from files, by `measure` on this machine);
- `plan`: feasible layouts, the fastest first, and why others were rejected; `alone`: one layout;
- `rungs`, `choose`: a flow chart over a plan, from data parallelism to pipelines across nodes;
- `fullness`, `slowness`: why a layout does not fit, or is slow, in a sentence.

Only the standard library is imported: planning does not load torch. Units are bytes and seconds.
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
