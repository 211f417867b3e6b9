"""Exact structures of transformers' causal models, counted from their config.json.

`read_structure` returns the `Structure` that a file describes, `read_plannable` only one that the
planner can predict. `limits` checks the numbers of a file, `meta_model` builds transformers' class
on meta, `layer_kinds` finds the kinds of layers, `trace` counts what they compute and save, and
`tp_cuts` says how tensor parallelism cuts them.

Nothing is guessed from names of keys: the model's own class is built on meta, and its tensors are
counted. Nothing is downloaded, and no code from the file is run.
"""

from .core import read_plannable, read_structure

__all__ = ["read_plannable", "read_structure"]
