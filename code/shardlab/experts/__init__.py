"""Expert parallelism: an all-to-all sends tokens to the ranks of their experts, another one back.

- `core`: the all-to-all with uneven sizes, the layer, the model, its gradients, and load balancing
  (the content of the lesson);
- `states`: saving and loading unsharded state dicts, and gradient clipping;
- `predict`: parameters held and used, bytes sent, and waiting time from uneven load.

The plain layer with all experts is `gpt.model.Experts`, its router `gpt.router.Router`.
"""

# ruff: noqa: F401 - the names of the package
from .core import (
    ExpertParallel,
    Route,
    average_gradients,
    balancing_loss,
    compute_loads,
    exchange_rows,
    own_parameters,
    parallelize,
    plan_route,
    record_routing,
    update_bias,
)
from .predict import (
    ParameterCounts,
    count_held_parameters,
    count_parameters,
    load_slowdown,
    padding_factor,
    predict_calls,
    predict_sent_bytes,
)
from .states import clip_grad_norm_, full_state_dict, load_full_state_dict
