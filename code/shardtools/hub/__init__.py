"""Any causal model of transformers, counted from its config.json: what it is made of, exactly.

- `read`: the `Structure` that a file describes; `planned`: one that can be planned as well;
  `read_many`: of several, by one process;
- what a file may ask for (bounds), a process that builds (child, ask), transformers' class on meta
  (build), its kinds of layers (kinds), what they compute and keep (trace), how tensor ranks cut
  them (cuts).

Nothing is guessed from names of keys: the model's own class is built, without its numbers, and its
tensors are counted. It is no network's business, and no code of the file's is run.
"""

from .core import planned, read, read_many

__all__ = ["planned", "read", "read_many"]
