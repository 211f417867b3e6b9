"""One Model, Many GPUs: the code of the course.

Scripts call `shardlab.watch(model, optimizer)`, which is `parity.scripts.watch`.
"""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`watch`, when it is asked for: every floor imports this file, and a browser without torch."""
    if name != "watch":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return import_module("shardlab.parity.scripts").watch
