"""python cells.py SCRIPT RESULTS: execute a lesson's script cell by cell, continuing after errors.

RESULTS gets a line of JSON for each cell: its first line's number, its source, seconds, and its
error. Cells that measure run without their assertions: times on a pretended GPU mean nothing.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
import time
import traceback
from pathlib import Path

CELL = re.compile(r"^# %%.*$", re.MULTILINE)


class _WithoutAssertions(ast.NodeTransformer):
    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return ast.copy_location(ast.Pass(), node)


def _execute(script: Path, results: Path) -> None:
    source = script.read_text("utf-8")
    starts = [match.start() for match in CELL.finditer(source)]
    # Ranks get objects of a script by value, from `__main__`.
    scope = sys.modules["__main__"].__dict__
    scope["__file__"], sys.argv = str(script), [str(script)]
    sys.path[0] = str(script.parent)
    for start, end in zip(starts, [*starts[1:], len(source)], strict=True):
        head, _, body = source[start:end].partition("\n")
        line = source.count("\n", 0, start)
        tree = ast.parse("\n" * (line + 1) + body, str(script))
        if "[markdown]" in head or not tree.body:
            continue
        if "measured" in head:
            tree = _WithoutAssertions().visit(tree)
        error, begin = "", time.monotonic()
        try:
            exec(compile(tree, str(script), "exec"), scope)
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"
            traceback.print_exc()
        cell = {"line": line + 2, "source": body, "seconds": time.monotonic() - begin}
        with results.open("a") as file:
            file.write(json.dumps({**cell, "error": error}) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("MPLBACKEND", "agg")
    _execute(*map(Path, sys.argv[1:]))
    sys.stdout.flush()
    os._exit(0)  # the lesson's own threads may still run
