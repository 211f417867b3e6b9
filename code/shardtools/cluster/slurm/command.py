"""The commands of the small Slurm on this machine, see `shardtools.cluster.slurm`.

    python -m shardlab cluster up                      # two nodes, 4 CPUs and 2 pretended GPUs each
    python -m shardlab cluster up --nodes 3 --cpus 8 --gpus 0 --folder ~/box
    eval "$(python -m shardlab cluster up)"            # and this shell's sbatch means this Slurm
    python -m shardlab cluster status
    python -m shardlab cluster down

It runs until `down`, as the user who started it, on the loopback interface alone. Everything that
it writes lies in --folder (~/.cache/shardlab/slurm); `down` leaves the logs there.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from functools import partial

from shardtools import options
from shardtools.cluster import slurm

FOLDER = "~/.cache/shardlab/slurm"
NUMBERS = {
    "nodes": "how many (2)",
    "cpus": "that each node says it has (4)",
    "gpus": "that each node pretends to have (2)",
}


def _add(name: str, commands: argparse._SubParsersAction) -> None:
    parser = options.command(commands, name, __doc__)
    options.add(parser, "folder", f"where everything of it lies ({FOLDER})", "DIR")
    for number, words in NUMBERS.items() if name == "up" else ():
        options.add(parser, number, words, "N")
    parser.set_defaults(command=partial(_main, name))


add_up, add_status, add_down = (partial(_add, name) for name in ("up", "status", "down"))


def _main(name: str, chosen: argparse.Namespace) -> int:
    folder = options.place("folder", FOLDER if chosen.folder is None else chosen.folder)
    try:
        box = slurm.find(folder)
        if name == "up":
            given = {n: value for n in NUMBERS if (value := getattr(chosen, n)) is not None}
            if given or not box:
                numbers = {n: options.whole(n, value, n != "gpus") for n, value in given.items()}
                box = slurm.start(folder, **numbers)
        elif name == "down" and slurm.stop(folder):
            print(f"Slurm has ended, and all its jobs; logs are in {folder}/log.")
            return 0
        if not box:
            print(f"No Slurm runs in {folder}.")
            return int(name == "status")
        print("# A Slurm runs. Its commands need:")
        print(f"export SLURM_CONF={shlex.quote(f'{box.folder}/slurm.conf')}")
        for command in ("sinfo", "squeue") if name == "status" else ():
            print(box.run([command]).stdout, end="")
    except slurm.SlurmError as error:
        print(f"python -m shardlab cluster: {error}", file=sys.stderr)
        return 1
    return 0
