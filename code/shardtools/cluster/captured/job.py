"""Common part of the captured jobs: a rendezvous in a file, and a watchdog that records calls."""

import os
import sys
from datetime import timedelta

import torch.distributed as dist

from shardtools.cluster.watch import flight


def start_rank() -> tuple[int, int, flight.Watchdog]:
    """Make the group; return the rank, the world size, and a watchdog with a limit of 3 seconds."""
    folder, rank, size = sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meet = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": size}
    dist.init_process_group("gloo", timeout=timedelta(seconds=60), **meet)
    dist.barrier()
    return rank, size, flight.Watchdog(f"{folder}/flight", timeout=3)
