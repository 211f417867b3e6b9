"""The commands of the small Slurm on this machine, see `shardtools.cluster.slurm`.

    python -m shardlab cluster up                      # two nodes, 4 CPUs and 2 pretended GPUs each
    python -m shardlab cluster up --nodes 3 --cpus 8 --gpus 0 --folder ~/box
    eval "$(python -m shardlab cluster up)"            # and this shell's sbatch means this Slurm
    python -m shardlab cluster status
    python -m shardlab cluster down

It runs until `down`, as the user who started it, on the loopback interface alone. Everything that
it writes lies in --folder (~/.cache/shardlab/slurm); `down` leaves the logs there, from which the
next one goes on with the numbers of jobs. `status` ends with 0 when all of it runs; `up` starts
again what of it has ended, and the jobs stay.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from functools import partial

from shardtools import options
from shardtools.cluster import slurm

FOLDER = "~/.cache/shardlab/slurm"
Act = Callable[[str, dict[str, str]], int]  # the folder, numbers that were given: the status


def add_up(commands: argparse._SubParsersAction) -> None:
    """Add `up` to the command line."""
    add = _command(commands, "up", _up)
    add("nodes", "how many (2)", "N")
    add("cpus", "that each node says it has (4)", "N")
    add("gpus", "that each node pretends to have (2)", "N")


def add_status(commands: argparse._SubParsersAction) -> None:
    """Add `status` to the command line."""
    _command(commands, "status", _status)


def add_down(commands: argparse._SubParsersAction) -> None:
    """Add `down` to the command line."""
    _command(commands, "down", _down)


def _command(
    commands: argparse._SubParsersAction, name: str, act: Act
) -> Callable[[str, str, str], None]:
    parser = options.command(commands, name, __doc__)
    options.add(parser, "folder", f"where everything of it lies ({FOLDER})", "DIR")
    parser.set_defaults(command=partial(_main, act))
    return partial(options.add, parser)


def _main(act: Act, chosen: argparse.Namespace) -> int:
    folder = str(options.place("folder", FOLDER if chosen.folder is None else chosen.folder))
    known = ("nodes", "cpus", "gpus")
    given = {n: value for n in known if (value := getattr(chosen, n, None)) is not None}
    try:
        return act(folder, given)
    except slurm.SlurmError as error:
        print(f"python -m shardlab cluster: {error}", file=sys.stderr)
        return 1


def _up(folder: str, given: dict[str, str]) -> int:
    numbers = {n: options.whole(n, value, int(n != "gpus")) for n, value in given.items()}
    before = slurm.find(folder)
    ended = slurm.lost(before) if before else []
    box = slurm.start(folder, **numbers)
    again = f"runs again: {', '.join(ended)} had ended" if ended else "runs already"
    _say(box, again if before else "has started")
    return 0


def _status(folder: str, _: dict[str, str]) -> int:
    box = slurm.find(folder)
    if box is None:
        print(f"No Slurm runs in {folder}.")
        return 1
    ended = slurm.lost(box)
    _say(box, f"runs without {', '.join(ended)}: `up` starts it again" if ended else "runs")
    for command in () if {"munged", "slurmctld"} & {*ended} else ("sinfo", "squeue"):
        print(box.run([command]).stdout, end="")
    return 1 if ended else 0


def _down(folder: str, _: dict[str, str]) -> int:
    if slurm.stop(folder):
        print(f"Slurm has ended, and all its jobs; logs are in {folder}/log.")
    else:
        print(f"No Slurm ran in {folder}.")
    return 0


def _say(box: slurm.Box, how: str) -> None:
    each = f"{box.cpus} CPUs and {box.gpus} pretended GPUs each"
    print(f"# A Slurm of {box.nodes} nodes, {each}, {how}. Its commands need:")
    print(f"export SLURM_CONF={shlex.quote(str(box.conf))}")
