"""Data, tensor and pipeline parallelism together, on one mesh of ranks.

- `core`: a layout's groups; the plain GPT along three of them at once, `Parallel`: what the
  lesson teaches;
- `states`: whole weights and gradients, checkpoint tensors, measured bytes held and sent;
- `predict`: the same bytes by formula, and the layouts that a mesh cannot train;
- `groups`, `picture`: the groups of any layout, as text and drawn;
- `job`: the training run of `python -m shardlab mesh`.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
SC 2021 (arXiv 2104.04473).
"""

# Names that need torch are loaded on first use, so programs that only look at groups do not wait.
# Module names are complete, so that a recording's key finds the files.
_LAZY_NAMES = {
    "shardlab.mesh.core": ("AXES", "Parallel", "create_groups", "get_mesh_groups"),
    "shardlab.mesh.predict": (
        "check_supported", "find_unsupported", "predict_pieces", "predict_sent_bytes",
        "predict_state_bytes",
    ),
    "shardlab.mesh.states": ("count_sent_bytes", "gather_model_tensors", "measure_state_bytes"),
}  # fmt: skip


def __getattr__(name: str) -> object:
    from importlib import import_module  # here, since the browser's Python has none

    for module, names in _LAZY_NAMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
