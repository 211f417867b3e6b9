"""Running ranks, and messages between them."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from rehearsal.machine import CARRIER, HERE, KIND
from shardlab import ranks

from .common import near, on, on_caller, world


@on(1, 2, daily=(1, 2))
def messages():
    _, rank, size = world()
    after, before = (rank + 1) % size, (rank - 1) % size
    got = torch.zeros(4, device=ranks.device())
    calls = [
        lambda: ranks.isend(torch.full_like(got, rank), after),
        lambda: ranks.irecv(got, before),
    ]
    for message in [call() for call in (calls if rank % 2 == 0 else calls[::-1])]:
        message.wait()
    near(got, torch.full_like(got, before), 0.0)


@on_caller
@on(1, 2, 4, daily=(1, 2))
def a_device_for_each():
    where = ranks.run(lambda: (str(ranks.device()), dist.get_backend()), 2)
    shared = HERE.gpus == 1
    assert [device for device, _ in where] == [f"{KIND}:0", f"{KIND}:{0 if shared else 1}"]
    assert all((CARRIER in backend) is not shared for _, backend in where)


def _one_more(mine: int):
    x = torch.ones(3, device=ranks.device())
    for _ in range(2 if dist.get_rank() == mine else 1):
        dist.all_reduce(x)


@on_caller
@on(2)  # gloo's collectives stop the process anyway
def a_collective_that_nobody_waits_for():
    for mine in (0, 1):
        try:
            ranks.run(_one_more, 2, mine, timeout=1)
        except ranks.RankError as error:
            assert error.ranks == [1 - mine], str(error)
        else:
            raise AssertionError("a run ended before its collectives had")


SCRIPT = """
import os, sys
from shardlab import ranks
sys.stdout.write(f"process {os.environ['RANK']} {ranks.device()}\\n")  # a line in one piece
sys.stdout.flush()
print("ranks", *ranks.run(lambda: str(ranks.device()), 2), flush=True)
"""


@on_caller
@on(2)
def under_torchrun():
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(SCRIPT)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        done = subprocess.run(
            [*command, "--local-addr=127.0.0.1", "--nproc-per-node", "2", str(script)],
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    for line in (f"process 0 {KIND}:0", f"process 1 {KIND}:1", f"ranks {KIND}:0 {KIND}:1"):
        assert line in done.stdout, f"no line {line!r} in {done.stdout!r}"
