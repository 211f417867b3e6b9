"""One Model, Many GPUs: the code of the course."""

import importlib
from typing import Any

__version__ = "0.1.0"


def watch(model: Any, optimizer: Any = None, **more: Any) -> Any:
    """Watch a script's model for `python -m shardlab parity`: see `parity.scripts.watch`."""
    return importlib.import_module("shardlab.parity.scripts").watch(model, optimizer, **more)
