"""Check this machine, or all hosts of a job, before training.

    python -m shardlab doctor --ranks 4                       # starts ranks on this machine
    torchrun --nproc-per-node 4 -m shardlab doctor --folder /scratch/me/run
    srun python -m shardlab doctor --folder /scratch/me/run --needs 200e9 --machine h100

All ranks examine their hosts and compare them: versions, devices, cores, speed, clocks, memory,
limits, the network with every link, and the folder for checkpoints. Rank 0 prints the verdict, then
a table of the evidence, in which each bad row is followed by the next step.

After --timeout seconds without progress, the silent ranks are named. --machine names the GPU of the
planner's table to compare links and speed with (by default the GPU that is found). Exit status:
0 all good, 1 a check is bad, 2 the doctor could not start. torchrun turns every status except 0
into 1, and prints its own report of a failed rank below the table.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import socket
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardlab import ranks
from shardlab.common.arguments import check_integer, check_number, check_one_of
from shardlab.common.launcher import LaunchInfo, read_launch_info
from shardlab.common.machines import MACHINES, check_machine, find_machine
from shardtools import options

from . import checkpoint_folder, checks, host_facts, pairs
from .checks import BAD, Findings
from .rendezvous import DONE, FAILED, Rendezvous, explain_loopback, open_store

LINE_WIDTH = 100
MAX_TIMEOUT_S = 10**6  # the limit of the whole run is four times as long
MakeGroup = Callable[[str], dist.ProcessGroup]  # makes a group of all ranks for a backend


@dataclass(frozen=True)
class Settings:
    """The command's options. Raises ValueError for a bad value."""

    folder: str = "."
    needs: float = 1e9  # bytes that must fit into the folder
    timeout: float = 60.0  # seconds without progress
    machine: str = ""
    device: str = "auto"
    pairs: bool = False
    json: bool = False

    def __post_init__(self) -> None:
        options.parse_path("folder", self.folder)
        check_number(needs=self.needs)
        check_number(maximum=MAX_TIMEOUT_S, timeout=self.timeout)
        check_one_of(("auto", "cpu"), device=self.device)
        if self.machine:
            check_machine(machine=self.machine)


# --- one rank: a thread examines it, so that its facts are known if the thread hangs


def _collect_findings(
    rendezvous: Rendezvous, settings: Settings, make_group: MakeGroup
) -> Findings | None:
    """Examine all ranks; return the findings on rank 0. Raises ValueError if rank 0 has ended."""
    arguments = rendezvous, settings, make_group
    threading.Thread(target=_examine_and_publish, args=arguments, daemon=True).start()
    silent = rendezvous.wait_for_all() if rendezvous.rank == 0 else {}
    try:
        rendezvous.leave_store()
    except (dist.DistError, RuntimeError):  # the store ended with rank 0
        words = f"rank {rendezvous.rank} on {socket.gethostname()}: lost the connection to rank 0"
        raise ValueError(words) from None
    if rendezvous.rank:
        return None
    facts = [rendezvous.read("facts", rank) or {} for rank in range(rendezvous.size)]
    return Findings(facts, silent, None, settings.needs)


def _examine_and_publish(rendezvous: Rendezvous, *args: Any) -> None:
    found: dict[str, Any] = {"host": socket.gethostname()}
    try:
        _examine_host(found, rendezvous, *args)
        rendezvous.set_step(DONE, waiting=True)
    except Exception as error:
        text = (str(error).strip() or "no message").splitlines()[0]
        found["error"] = f"{rendezvous.step}: {type(error).__name__}: {text}"
        rendezvous.publish("facts", found)
        rendezvous.set_step(FAILED, waiting=True)


def _examine_host(
    found: dict[str, Any], rendezvous: Rendezvous, settings: Settings, make_group: MakeGroup
) -> None:
    def publish_part(name: str, examine: Callable[..., Any], *args: Any) -> None:
        rendezvous.set_step(name)
        found[name] = examine(*args)
        rendezvous.publish("facts", found)

    publish_part("cores", host_facts.read_cores)
    torch.set_num_threads(1)  # for this thread: a fork has lost its parent's other threads
    device = torch.device("cpu") if settings.device == "cpu" else ranks.device()
    if device.type == "cuda":
        torch.cuda.set_device(device)  # the device is a setting of each thread
    publish_part("gpu", host_facts.describe_device, device)
    publish_part("versions", host_facts.read_versions, device)
    publish_part("environment", host_facts.read_environment)
    publish_part("memory", host_facts.read_free_memory)
    publish_part("limits", host_facts.read_limits)
    publish_part("network", host_facts.read_network)
    publish_part("folder", checkpoint_folder.examine_folder, settings.folder, rendezvous)
    publish_part("speed", host_facts.measure_speed, device)
    rendezvous.barrier()
    findings = Findings([rendezvous.read("facts", rank) for rank in range(rendezvous.size)])
    if rendezvous.size > 1 and not checks.find_bad_interfaces(findings):
        gpus = {gpu["kind"] for gpu in findings.get_facts("gpu").values()} == {"cuda"}
        nccl = gpus and not checks.check_devices(findings)[0]  # it refuses two ranks on one GPU
        rendezvous.set_step("group")
        world = make_group("cpu:gloo,cuda:nccl" if nccl else "gloo")
        publish_part("clock", pairs.measure_clock_offset, rendezvous, world)
        hosts = list(findings.get_facts("host").values())
        publish_part("pairs", pairs.measure_links, rendezvous, world, device, hosts)


# --- under a launcher, or with ranks started here


def _run_launched_rank(info: LaunchInfo, settings: Settings) -> int:
    """Examine this process as one rank of a launched job, and exit."""
    os.environ["LOCAL_RANK"] = str(info.local_rank)
    store = open_store(info, settings.timeout)
    rendezvous = Rendezvous(store, info.rank, info.world_size, settings.timeout)

    def make_group(backend: str) -> dist.ProcessGroup:
        own = dist.PrefixStore("group", store.clone())  # blocks; the main thread's store must not
        limit = timedelta(seconds=settings.timeout + 10)  # the doctor gives up before
        rank, size = info.rank, info.world_size
        dist.init_process_group(backend, rank=rank, world_size=size, store=own, timeout=limit)
        return dist.group.WORLD

    findings = _collect_findings(rendezvous, settings, make_group)
    status = _print_report(settings, findings) if findings else 0
    if findings and findings.silent and (words := explain_loopback(info)):
        print(f"doctor{words}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # exit even if a thread of this process hangs


def _run_local_ranks(num_ranks: int, settings: Settings) -> int:
    """Start ranks on this machine, and examine them."""
    with tempfile.TemporaryDirectory(prefix="doctor-") as own:
        path, reason = Path(own, "findings"), "rank 0 printed no findings"
        options = {"timeout": 4 * settings.timeout + 60, "device": settings.device, "show": False}
        try:
            ranks.run(_run_local_rank, num_ranks, settings, path, **options)
        except ranks.RankError as error:
            reason = str(error)
        if path.exists():
            return _print_report(settings, pickle.loads(path.read_bytes()))
        print(f"doctor: {reason}", file=sys.stderr)
        return 1


def _run_local_rank(settings: Settings, path: Path) -> None:
    world = dist.group.WORLD
    store = dist.PrefixStore("doctor", world.get_group_store())
    rendezvous = Rendezvous(store, dist.get_rank(), dist.get_world_size(), settings.timeout)
    findings = _collect_findings(rendezvous, settings, lambda backend: world)
    if findings:
        path.write_bytes(pickle.dumps(findings))
        if findings.silent:
            raise RuntimeError("a rank does not answer")  # ends the silent rank, too


# --- the command


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `doctor` to the command line."""
    parser = options.add_parser(commands, "doctor", __doc__)
    add = partial(options.add_option, parser)
    words = "ranks to start on this machine (the number of GPUs, or 2); not under a launcher"
    add("ranks", words, "N", int)
    add("folder", "folder for checkpoints (.)", "DIR")
    add("needs", "bytes that must be free there (1e9)", "BYTES", float)
    add("machine", f"GPU to compare with: {', '.join(MACHINES)} (the GPU found)", "NAME")
    add("device", "auto or cpu (auto)", "KIND")
    add("timeout", "seconds without progress until ranks are named as silent (60)", "S", float)
    parser.add_argument("--pairs", action="store_true", help="list every link below the table")
    parser.add_argument("--json", action="store_true", help="print verdicts and facts as JSON")
    parser.set_defaults(command=_main)


def _main(args: argparse.Namespace) -> int:
    settings = Settings(**options.collect_options(args, Settings))
    num_ranks = torch.cuda.device_count() or 2 if args.ranks is None else args.ranks
    check_integer(ranks=num_ranks)
    if info := read_launch_info(os.environ):
        if args.ranks is not None:
            words = "must be left out, because the launcher has started the ranks"
            raise ValueError(f"ranks={num_ranks}: {words}")
        return _run_launched_rank(info, settings)
    if not os.path.isdir(settings.folder):
        raise ValueError(f"folder={settings.folder!r}: must be a folder that exists")
    return _run_local_ranks(num_ranks, settings)


def _print_report(settings: Settings, findings: Findings) -> int:
    """Print the verdict, and each row's evidence above its next step; return the exit status."""
    gpus = {gpu["name"] for gpu in findings.get_facts("gpu").values()}
    known = [find_machine(name) for name in ([settings.machine] if settings.machine else gpus)]
    findings.machine = known[0] if len(known) == 1 else None
    rows = checks.judge_findings(findings)
    bad = [row.check for row in rows if row.state == BAD]
    if settings.json:
        print(json.dumps({"good": not bad, "rows": list(map(asdict, rows)), **asdict(findings)}))
        return int(bool(bad))
    print(f"{len(bad)} of {len(rows)} checks are bad: {', '.join(bad)}" if bad else "all good")
    print()
    wrap = partial(textwrap.wrap, width=LINE_WIDTH, break_long_words=False, break_on_hyphens=False)
    blank = " " * 15
    for row in rows:
        state = row.state.upper() if row.state == BAD else row.state
        head = f"{state:<5} {row.check:<9}"
        lines = wrap(row.found, initial_indent=head, subsequent_indent=blank)
        lines += wrap(row.advice, initial_indent=f"{blank}→ ", subsequent_indent=f"{blank}  ")
        print(*lines, sep="\n")
    if settings.pairs:
        links = [link for facts in findings.facts for link in facts.get("pairs") or []]
        print("\nranks      one way (µs)   bandwidth (GB/s)")
        for link in sorted(links, key=lambda link: link["pair"]):
            pair = "{} and {}".format(*link["pair"])
            print(f"{pair:<10} {link['latency'] * 1e6:12.0f} {link['bandwidth'] / 1e9:18.2f}")
    return int(bool(bad))
