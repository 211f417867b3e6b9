"""Which ways of dividing a model go together, for which model on which machines, and why.

- `Machine`, `MACHINES`, `room`: GPUs and their links; memory that a job may plan with;
- `Layout`, `peak`: who holds which part, and the most that a rank then holds;
- `flops`, `zero_bytes`, `seconds`, `training_days`: work, traffic, and a step's floor;
- `predict`: what a step takes, in seconds and bytes, by a `Profile` (what an implementation keeps
  and does) and `Rates` (what has to be measured); `learn` finds these in files, `measure` here;
- `plan`: every layout of a job, the fastest first, and what ruled out the others;
- `rungs`, `choose`: the flow chart, from copies alone to pipelines across nodes;
- `fullness`, `slowness`: what a layout lacks, in a sentence;
- `fastest`: every layout that fits, to compare the chart with.

The standard library alone: whoever only plans does not have to load torch. Bytes, and seconds.
"""

from shardlab.layout import Layout
from shardlab.machines import MACHINES, Machine, room

from .advice import fullness, slowness
from .chart import RUNGS, Rung, choose, rungs
from .cost import Seconds, flops, seconds, training_days, zero_bytes
from .needs import peak
from .plan import Plan, Planned, plan
from .predict import Prediction, predict
from .profile import PROFILES, Profile
from .rates import Rate, Rates, known
from .search import Choice, fastest

__all__ = [
    "MACHINES",
    "PROFILES",
    "RUNGS",
    "Choice",
    "Layout",
    "Machine",
    "Plan",
    "Planned",
    "Prediction",
    "Profile",
    "Rate",
    "Rates",
    "Rung",
    "Seconds",
    "choose",
    "fastest",
    "flops",
    "fullness",
    "known",
    "peak",
    "plan",
    "predict",
    "room",
    "rungs",
    "seconds",
    "slowness",
    "training_days",
    "zero_bytes",
]
