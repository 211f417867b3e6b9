"""One Model, Many GPUs: the code of the course."""

__version__ = "0.1.0"


def watch(model: object, optimizer: object = None, **more: object) -> object:
    """Watch a script's model for `python -m shardlab parity`: see `parity.scripts.watch`."""
    # Every floor imports this file, and a browser without torch does: nothing is imported above.
    scripts = __import__("shardlab.parity.scripts", fromlist=["watch"])
    return scripts.watch(model, optimizer, **more)
