"""Several cuts at once: data, tensor and pipeline parallelism on one mesh of ranks.

- `core`: a layout's groups; the plain GPT along three of them at once, `Parallel`: what the
  lesson teaches;
- `states`: whole weights and gradients, the tensors of a checkpoint, what a rank holds and sends;
- `predict`: the same by formula, and what a mesh cannot train;
- `groups`, `picture`: the groups of any layout, in words and drawn;
- `command`, `job`: `python -m shardlab mesh`.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
SC 2021 (arXiv 2104.04473).
"""

__all__ = [
    "AXES",
    "Parallel",
    "check_cuts",
    "counted",
    "full_tensors",
    "groups_of",
    "held",
    "join",
    "left_out",
    "predicted_pieces",
    "predicted_sent",
    "predicted_states",
]

# What needs torch is loaded when it is first asked for: who only looks at groups does not wait for
# it. Names are whole, so that a recording's key finds the files.
_LATER = {
    "AXES": "shardlab.mesh.core",
    "Parallel": "shardlab.mesh.core",
    "check_cuts": "shardlab.mesh.predict",
    "counted": "shardlab.mesh.states",
    "full_tensors": "shardlab.mesh.states",
    "groups_of": "shardlab.mesh.core",
    "held": "shardlab.mesh.states",
    "join": "shardlab.mesh.core",
    "left_out": "shardlab.mesh.predict",
    "predicted_pieces": "shardlab.mesh.predict",
    "predicted_sent": "shardlab.mesh.predict",
    "predicted_states": "shardlab.mesh.predict",
}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LATER[name]), name)
