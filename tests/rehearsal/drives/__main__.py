"""python -m rehearsal.drives [drive ...], where REHEARSE says how many GPUs are pretended.

Without REHEARSE_WHOLE, drives and rows of the contract are those of each day. Prints a line of JSON
for each drive: its name, its error or "", its seconds.
"""

import importlib
import json
import os
import sys
import time

import torch  # noqa: F401 - first of all: the rehearsal comes with it

from shardlab import deepspeed_engine

from . import TOPICS, drives, numbers, result

# Imported once, and not in every rank.
SLOW = [
    "fsspec.caching",
    "shardlab.pipeline.parts",
    "torch.fx.experimental.symbolic_shapes",
    "torch.profiler._cupti_monitor",
]


def main() -> None:
    """Run those that are named, or all that run on so many GPUs."""
    gpus, wanted = int(os.environ["REHEARSE"]), sys.argv[1:]
    whole = "REHEARSE_WHOLE" in os.environ
    for module in SLOW:
        importlib.import_module(module)
    deepspeed_engine.prepare()
    for topic in TOPICS:
        for name, drive in drives(topic).items():
            asked = not wanted or {name, topic} & {*wanted}
            if asked and gpus in numbers(drive, whole or bool(wanted)):
                begin = time.monotonic()
                line = {"drive": name, "error": result(drive, gpus)}
                print(json.dumps({**line, "seconds": time.monotonic() - begin}), flush=True)


main()
