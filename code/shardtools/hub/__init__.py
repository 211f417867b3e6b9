"""Exact structures of transformers' causal models, counted from their config.json.

`read` returns the `Structure` that a file describes; `planned` one that can be planned as well.
`bounds` limits what a file may ask for, `build` builds transformers' class on meta, `kinds` finds
the kinds of layers, `trace` what they compute and save, `cuts` how tensor ranks cut them.

Nothing is guessed from names of keys: the model's own class is built, without its numbers, and its
tensors are counted. Nothing is downloaded, no code from the file is run, and the process is left as
it was.
"""

from .core import planned, read

__all__ = ["planned", "read"]
