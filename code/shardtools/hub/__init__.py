"""Any causal model of transformers, counted from its config.json: what it is made of, exactly.

`read` returns the `Structure` that a file describes; `planned` one that can be planned as well.
What a file may ask for (bounds), transformers' class on meta (build), its kinds of layers (kinds),
what they compute and keep (trace), how tensor ranks cut them (cuts).

Nothing is guessed from names of keys: the model's own class is built, without its numbers, and its
tensors are counted. Nothing is fetched, no code of the file's is run, and the process is left as
it was.
"""

from .core import planned, read

__all__ = ["planned", "read"]
