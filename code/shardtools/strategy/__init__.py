"""Layouts of a model on a cluster, with predicted memory and step time.

- `MACHINES`, `usable_memory`: GPUs and their links; memory that a rank may use;
- `Layout`: degrees of parallelism, and which rank holds which part of the model;
- `count_flops`, `zero_traffic`, `compute_floor`, `training_days`: work, traffic, lower bounds;
- `predict`: seconds and bytes of a step, from one of `PROFILES` (an implementation's work and
  memory) and measured `Rates` (`fit_runs`: from files; `measure`: on this machine);
- `plan`: feasible layouts, fastest first, and reasons for rejections; `plan_layout`: one layout;
- `choose_by_chart`: a flow chart over a plan, from data parallelism to pipelines across nodes;
- `explain_oom`, `explain_slowness`: why a layout does not fit, or is slow, in a sentence.

Only the standard library is imported: planning does not load torch. Units are bytes and seconds.
"""

from shardlab.common.machines import MACHINES
from shardlab.layout import Layout

from .advice import explain_oom, explain_slowness
from .cost import compute_floor, count_flops, training_days, zero_traffic
from .flow_chart import TECHNIQUES, choose_by_chart, fastest_by_technique, find_technique
from .plan import Plan, plan, plan_layout
from .predict import Prediction, predict, usable_memory
from .profile import PROFILES
from .rates import Rates, load_rates

__all__ = [
    "MACHINES", "PROFILES", "TECHNIQUES", "Layout", "Plan", "Prediction", "Rates",
    "plan_layout", "choose_by_chart", "compute_floor", "count_flops", "explain_oom",
    "load_rates", "plan", "predict", "usable_memory", "find_technique",
    "fastest_by_technique", "explain_slowness", "training_days", "zero_traffic",
]  # fmt: skip
