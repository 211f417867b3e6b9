"""python -m rehearsal.drives [drive ...], on one GPU, two and four, up to REHEARSE of them.

Without REHEARSE_WHOLE, drives and rows of the contract are those of each day. Prints a line of JSON
for each drive: its name, the GPUs, its error or "", its seconds. Each number of GPUs has a fork of
its own.
"""

import importlib
import json
import os
import sys
import time

import torch  # noqa: F401 - first of all: the rehearsal comes with it

from rehearsal.machine import HERE
from shardlab import deepspeed_engine

from . import TOPICS, drives, list_gpu_counts, result

# Imported once, and not in every rank.
SLOW = [
    "fsspec.caching",
    "shardlab.pipeline.parts",
    "torch.fx.experimental.symbolic_shapes",
    "torch.profiler._cupti_monitor",
]


def run(gpus: int, wanted: list[str]) -> None:
    """Run the drives that are named, or all that run on so many GPUs."""
    HERE.gpus, os.environ["REHEARSE"] = gpus, str(gpus)
    whole = "REHEARSE_WHOLE" in os.environ or bool(wanted)
    for topic in TOPICS:
        for name, drive in drives(topic).items():
            asked = not wanted or {name, topic} & {*wanted}
            if asked and gpus in list_gpu_counts(drive, whole):
                begin = time.monotonic()
                line = {"name": name, "gpus": gpus, "error": result(drive, gpus)}
                print(json.dumps({**line, "seconds": time.monotonic() - begin}), flush=True)


def main() -> None:
    """Run them all."""
    for module in SLOW:
        importlib.import_module(module)
    deepspeed_engine.import_deepspeed()
    for gpus in (1, 2, 4):
        if gpus > int(os.environ["REHEARSE"]):
            break
        sys.stdout.flush()
        if not (pid := os.fork()):
            run(gpus, sys.argv[1:])
            os._exit(0)
        os.waitpid(pid, 0)


main()
