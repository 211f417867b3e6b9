"""What lessons themselves define: the functions of their cells, without the cells' runs."""

from __future__ import annotations

import ast
from typing import Any

from shardlab import ranks
from shardlab.common import show

from .common import on, on_caller


def _of(lesson: str) -> dict[str, Any]:
    """The names that a lesson imports, defines, and gives plain values."""
    path = show.ROOT / f"code/lessons/{lesson}.py"
    tree = ast.parse(path.read_text("utf-8"))
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    tree.body = [
        node
        for node in tree.body
        if isinstance(node, kinds)
        or (isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant))
    ]
    names: dict[str, Any] = {"__name__": lesson, "__file__": str(path)}
    exec(compile(tree, str(path), "exec"), names)
    return names


@on_caller
@on(1, 2, 4, daily=(2,))
def fully_shard_in_a_run_on_the_cpu():
    zero, checkpoint = _of("zero"), _of("checkpoint")

    def steps() -> None:
        zero["train"](*zero["with_fsdp"](zero["PRESETS"]["nano"]), 1)
        checkpoint["train"](checkpoint["sharded"](), 1)
        checkpoint["small"]()

    ranks.run(steps, 2, device="cpu", show=False)


def a_step_that_is_timed():
    _of("data_parallel")["train_alone"](1)
