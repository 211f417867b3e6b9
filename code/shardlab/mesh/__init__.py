"""Data, tensor and pipeline parallelism together, on one mesh of ranks.

- `core`: a layout's groups; the plain GPT along three of them at once, `Parallel`: what the
  lesson teaches;
- `states`: whole weights and gradients, checkpoint tensors, measured bytes held and sent;
- `predict`: the same bytes by formula, and the layouts that a mesh cannot train;
- `groups`, `picture`: the groups of any layout, in words and drawn;
- `job`: the training run of `python -m shardlab mesh`.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
SC 2021 (arXiv 2104.04473).
"""

from importlib import import_module

# Names that need torch are loaded on first use, so programs that only look at groups do not wait.
# Module names are complete, so that a recording's key finds the files.
_LATER = {
    "shardlab.mesh.core": ("AXES", "Parallel", "groups_of", "join"),
    "shardlab.mesh.predict": (
        "check_cuts", "left_out", "predicted_pieces", "predicted_sent", "predicted_states",
    ),
    "shardlab.mesh.states": ("counted", "full_tensors", "held"),
}  # fmt: skip


def __getattr__(name: str) -> object:
    for module, names in _LATER.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
