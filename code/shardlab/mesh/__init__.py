"""Several cuts at once: data, tensor and pipeline parallelism on one mesh of ranks.

- `core`: a layout's groups; the plain GPT along three of them at once, `Parallel`: what the
  lesson teaches;
- `states`: whole weights and gradients, the tensors of a checkpoint, what a rank holds and sends;
- `predict`: the same by formula, and what a mesh cannot train;
- `groups`, `picture`: the groups of any layout, in words and drawn;
- `job`: what `python -m shardlab mesh` trains.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
SC 2021 (arXiv 2104.04473).
"""

from importlib import import_module

# What needs torch is loaded when it is first asked for: who only looks at groups does not wait for
# it. Names of modules are whole, so that a recording's key finds the files.
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
