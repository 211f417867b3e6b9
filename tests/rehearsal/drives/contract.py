"""Rows of the contract on pretended GPUs: parallel training equals training in one process.

A drive is a technique's rows: of two ranks on one shared GPU and on two GPUs, and of four ranks on
four GPUs. With a GPU for each rank the host never waits in a step; on a shared GPU, messages
pass through the host.
"""

from __future__ import annotations

import os

import contract
from rows import ROWS, select_gpu_rows

from rehearsal.machine import HERE, KIND, collect_waits

from .common import Drive, on, on_caller

RANKS = {1: 2, 2: 2, 4: 4}  # by GPUs
MESSAGES = ("pipeline", "context")  # what passes them: on a shared GPU, through the host


def _drive(technique: str) -> Drive:
    def drive() -> None:
        size = RANKS[HERE.gpus]
        rows = select_gpu_rows(technique, size, "REHEARSE_WHOLE" in os.environ)
        shared = {} if HERE.gpus < size else {"waits": collect_waits}
        found = contract.measure_rows(rows, KIND, **shared)
        for row in rows:
            contract.check_gaps(row, found, "cpu")  # whose kernels a pretended GPU has

    gpus = [number for number, size in RANKS.items() if select_gpu_rows(technique, size)]
    today = [number for number in gpus if select_gpu_rows(technique, RANKS[number], whole=False)]
    drive.__module__ = __name__
    # Four ranks go the ways of two: each day they have what takes four, a mesh.
    daily = [n for n in today if n == 2 or (n == 1 and technique in MESSAGES)] or today
    return on_caller(on(*gpus, daily=tuple(daily))(drive))


DRIVES = {row.technique.replace(" ", "_"): _drive(row.technique) for row in ROWS if row.gpus}
