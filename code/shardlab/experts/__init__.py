"""Mixture of experts over ranks: tokens travel to the experts that their router chose, and back.

- `core`: the all-to-all with uneven sizes, the layer, the model, its gradients, and what keeps
  experts evenly loaded: what the lesson teaches;
- `states`: whole state dicts in and out, and the norm of gradients;
- `predict`: parameters held and used, bytes sent, and who waits for whom.

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
