"""A stand-in for a training script, to try the job around it: it counts to --steps.

    srun python steps.py --steps 50 --folder runs/1 --resume auto

It prints its rank, and makes ten steps a second. On SIGUSR1 or SIGTERM rank 0 saves the
count in --folder, leaves the file `stopped` there, and every rank ends with status 0.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--folder", type=Path)
parser.add_argument("--resume", default="never")
parser.add_argument("--lr", type=float, default=1e-3)
given = parser.parse_args()

stop = []
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, _: stop.append(number))

rank, size = (int(os.environ.get(name, n)) for name, n in (("RANK", 0), ("WORLD_SIZE", 1)))
saved, done = given.folder and given.folder / "step", 0
if given.resume == "auto" and saved and saved.exists():
    done = int(saved.read_text())
words = f"rank {rank} of {size}, local rank {os.environ.get('LOCAL_RANK', 0)}, lr {given.lr}"
sys.stdout.write(f"{words}: from step {done}\n")  # one call: other ranks write there, too
sys.stdout.flush()
while done < given.steps and not stop:
    time.sleep(0.1)
    done += 1
if rank == 0 and given.folder:
    given.folder.mkdir(parents=True, exist_ok=True)
    saved.write_text(str(done))
    left = given.folder / "stopped"
    left.touch() if done < given.steps else left.unlink(missing_ok=True)
sys.stdout.write(f"rank {rank}: {'saved' if stop else 'finished'}\n")
