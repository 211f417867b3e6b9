"""Several cuts at once: data, tensor and pipeline parallelism on one mesh of ranks.

- `layout`: which ranks form which group, and what leaves a node under which order: `Mesh`;
- `core`: the plain GPT along three groups at once, `Parallel`: what the lesson teaches;
- `dropout`: numbers that do not depend on the mesh;
- `states`: whole weights and gradients, and the tensors of a checkpoint;
- `predict`: what a mesh cannot train, what a rank holds and sends;
- `picture`: the groups of any mesh, drawn;
- `command`, `job`: `python -m shardlab mesh`.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
SC 2021 (arXiv 2104.04473).
"""

from .core import Groups, Parallel, groups_of, join
from .dropout import PlacedDropout
from .layout import AXES, Mesh, orders
from .predict import check_cuts, counted, held, predicted_sent, predicted_states
from .states import local, whole

__all__ = [
    "AXES",
    "Groups",
    "Mesh",
    "Parallel",
    "PlacedDropout",
    "check_cuts",
    "counted",
    "groups_of",
    "held",
    "join",
    "local",
    "orders",
    "predicted_sent",
    "predicted_states",
    "whole",
]
