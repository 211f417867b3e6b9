"""The groups of a layout in words, for the command and the pictures: the standard library alone."""

from __future__ import annotations

from shardlab.layout import Layout

WORDS = {"dp": "data", "pp": "pipeline", "cp": "context", "tp": "tensor"}


def said(layout: Layout, axis: str, node: int) -> str:
    """A line on an axis: how many groups of how many ranks, and how many leave their node."""
    groups = layout.groups(axis)
    beyond = sum(len({rank // node for rank in group}) > 1 for group in groups)
    where = {0: "none leaves its node", len(groups): "all leave their node"}
    told = where.get(beyond, f"{beyond} of them leave their node")
    return f"{WORDS[axis]}: {len(groups)} × {getattr(layout, axis)} ranks, {told}"
