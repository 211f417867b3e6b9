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
    exchange,
    loads,
    own_parameters,
    parallelize,
    route,
    update_bias,
    watch,
)
from .predict import (
    Parameters,
    held,
    padded,
    parameters,
    predicted_calls,
    predicted_sent,
    wait,
)
from .states import clip_grad_norm_, full_state_dict, load_full_state_dict
