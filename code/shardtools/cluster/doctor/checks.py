"""The doctor's table: each check judges the facts of all ranks; next to it stands what to do.

A check returns what is bad, notes (worth knowing, but no fault), and its words if all is good.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from shardlab.common.machines import Machine
from shardlab.ranks import root_cause

GOOD, NOTE, BAD = "good", "note", "bad"
UNMEASURED = "not measured"
FRACTION = 0.5  # of the planner's rate, and of other ranks' speed: below it is bad
# The same for a link inside a host, which needs messages of gigabytes to reach the data sheet's
# rate. nccl-tests' sendrecv_perf, healthy GPUs: 80 GB/s with 32 MiB and 180 with 4 GiB where a copy
# has 260 (two H100, nccl-tests issue 268 of 2024); 111 GB/s with 128 MiB and 195 with 1 GiB of 300
# (eight A100, li-plus/playground, cuda/nccl.md). So 64 MiB reach a third of the sheet's at best,
# and half of the lower figure's share is bad: PCIe, NCCL's fallback, is below that.
FRACTION_INSIDE = 0.125
FRACTION_GPU = 0.85  # equal GPUs differ by some percent, unless one is hot, capped or shared
SLOW = 3.0  # a link is bad if it is so many times slower than the median of its kind
LATENCY = 2e-3, 1e-4  # seconds above that median that are bad: on busy hosts; with NCCL
CLOCK = 0.1  # seconds
FREE = 0.9  # share of a GPU's memory before a job: if less is free, another process uses it
# Settings in which ranks may differ: logging, and the hosts' names of network cards.
OWN = re.compile("DEBUG|_FILE|IFNAME|_HCA|_INTERFACE|NUMA|HOSTID|_CPP_LOG")
SHARED = 256 * 2**20  # bytes: four workers of a data loader with two batches of 32 MiB each
LEAST = {"memory": 2**30, "/dev/shm": SHARED}  # bytes of a host for each of its ranks
FILES = 128, 16  # open files: for the process itself, and for each other rank
THREADS = 1024  # processes and threads of a user, for each rank
LISTED = 16  # ranks that a row names


@dataclass
class Findings:
    """The facts of all ranks. `facts`: by rank; see `examine` for the parts."""

    facts: list[dict[str, Any]]
    silent: dict[int, str] = field(default_factory=dict)  # last steps of silent ranks
    machine: Machine | None = None  # the planner's machine
    needs: float = 1e9  # bytes that must fit into the folder

    def of(self, part: str) -> dict[int, Any]:
        """Return each rank's facts of a part, without ranks that did not get there."""
        return {rank: f[part] for rank, f in enumerate(self.facts) if f.get(part) is not None}

    def hosts(self, part: str = "host") -> dict[str, list[int]]:
        """Return the ranks of each host that have facts of a part."""
        return grouped({rank: self.facts[rank]["host"] for rank in self.of(part)})


@dataclass(frozen=True)
class Verdict:
    """One row of the table: a state ("good", "note" or "bad"), its evidence, and the next step."""

    check: str
    state: str
    found: str
    advice: str


Judged = tuple[list[str], list[str], str]  # what is bad, notes, and words for "all is good"
Judge = Callable[[Findings], Judged]
CHECKS: list[tuple[Judge, str, str]] = []  # in the order of the table


def check(part: str, advice: str) -> Callable[[Judge], Judge]:
    """Add a check to the table, with the facts that it needs, and its advice."""

    def add(judge: Judge) -> Judge:
        CHECKS.append((judge, part, advice))
        return judge

    return add


def verdicts(job: Findings) -> list[Verdict]:
    """Return all rows of the table."""
    rows = []
    for judge, part, advice in CHECKS:
        bad, notes, good = judge(job) if job.of(part) else ([], [UNMEASURED], "")
        state = BAD if bad else NOTE if notes else GOOD
        needed = bad or notes not in ([], [UNMEASURED])
        found = "; ".join(bad or notes) or good
        rows.append(Verdict(judge.__name__, state, found, advice if needed else ""))
    return rows


@check("host", "look at that host: py-spy dump --pid, dmesg; or leave the node out")
def answers(job: Findings) -> Judged:
    """Check that every rank came back from every part."""
    bad = [f"{_at(job, rank)} stopped answering in: {step}" for rank, step in job.silent.items()]
    bad += [f"{_at(job, rank)} failed in {error}" for rank, error in job.of("error").items()]
    return bad, [], f"{len(job.facts)} ranks on {count(job.hosts(), 'host')}"


@check("versions", "start all ranks from one environment that all hosts see; srun --export")
def versions(job: Findings) -> Judged:
    """Check that all ranks have equal versions, and equal NCCL and gloo variables."""
    found, differ = job.of("versions"), []
    for part in (found, job.of("environment")):
        for name in dict.fromkeys(name for mine in part.values() for name in mine):
            by = grouped({rank: mine.get(name, "none") for rank, mine in part.items()})
            if len(by) > 1 and not OWN.search(name):
                differ.append(f"{name} " + ", ".join(f"{v} on {listed(r)}" for v, r in by.items()))
    first = next(iter(found.values()))
    return differ, [], ", ".join(f"{name} {value}" for name, value in first.items())


@check(
    "gpu",
    "a GPU for each rank, and torch.cuda.set_device(LOCAL_RANK) before anything else (cuda:0 where "
    "the launcher shows each rank one); nvidia-smi says who holds memory",
)
def devices(job: Findings) -> Judged:
    """Check that each rank has a free GPU of its own, or that no rank has one."""
    found = job.of("gpu")
    ids = {r: (job.facts[r]["host"], gpu["id"]) for r, gpu in found.items() if gpu["id"]}
    bad = [
        f"{listed(ranks)} share GPU {number} of {host}"
        for (host, number), ranks in grouped(ids).items()
        if len(ranks) > 1
    ]
    for rank, gpu in found.items():
        if ids and not gpu["id"]:
            bad.append(f"{_at(job, rank)} found no GPU, others did")
        elif ids and gpu["free"] < FREE * gpu["total"]:
            free = f"{size(gpu['free'])} of {size(gpu['total'])}"
            bad.append(f"{free} of the memory of {_at(job, rank)} are free")
    names = Counter(gpu["name"] for gpu in found.values())
    text = ", ".join(f"{n} × {name or 'a processor'}" for name, n in names.items())
    notes = [f"{text}: every step waits for the slowest kind"] if len(names) > 1 else []
    return bad, notes, text + (", each its own" if ids else ", no GPU")


@check(
    "cores",
    "a core or more for each rank: --cpus-per-task and srun --cpu-bind=cores, or taskset; "
    "OMP_NUM_THREADS = cores / ranks of a host",
)
def cores(job: Findings) -> Judged:
    """Check that the ranks of a host have enough cores."""
    found, bad, notes = job.of("cores"), [], []
    for host, ranks in job.hosts("cores").items():
        mine = [found[rank] for rank in ranks]
        usable = {core for one in mine for core in one["mask"]}
        threads, every = sum(one["threads"] for one in mine), mine[0]["all"]
        text = f"{listed(ranks)} may use {count(usable, 'core')} of {every} of {host}"
        if len(usable) < min(len(mine), every):
            bad.append(text)
        elif len(usable) < threads:
            notes.append(f"{text}, and compute with {threads} threads")
    return bad, notes, f"enough on {count(job.hosts(), 'host')}"


@check(
    "speed",
    "is it hot or capped (nvidia-smi -q -d PERFORMANCE, cpupower), what else runs there? Every "
    "step waits for the slowest rank; if all are slow, is it another --machine?",
)
def speed(job: Findings) -> Judged:
    """Check that no rank computes much slower than its peers, or the planner's GPU."""
    found, slow = job.of("speed"), []
    planner = job.machine.flops if job.machine else 0.0
    for rank, mine in found.items():
        rates = [f["flops"] for r, f in found.items() if r != rank and f["name"] == mine["name"]]
        fraction = FRACTION_GPU if mine["kind"] == "cuda" else FRACTION
        enough = max(fraction * median(rates or [0]), FRACTION * planner)
        if mine["flops"] < enough:
            slow.append(f"{_at(job, rank)} {size(mine['flops'], 'FLOP/s')}")
    text = span((f["flops"] for f in found.values()), "FLOP/s")
    text += f" (planner {size(planner, 'FLOP/s')})" if planner else ""
    return slow and [*slow, f"in all {text}"], [], text


@check("clock", "chronyc tracking or timedatectl; until then logs do not compare")
def clocks(job: Findings) -> Judged:
    """Check that the hosts agree on the time."""
    found = job.of("clock")
    wrong = {r: c for r, c in found.items() if abs(c["ahead"]) - c["within"] > CLOCK}
    bad = [f"{_at(job, r)} {c['ahead']:+.3g} s beside rank 0" for r, c in wrong.items()]
    most = max(abs(c["ahead"]) + c["within"] for c in found.values())
    return bad, [], f"within {max(1, round(most * 1e3))} ms of rank 0"


@check(
    "memory",
    "what else runs there, --mem; docker --shm-size, or a memory volume on /dev/shm (Kubernetes), "
    "else num_workers=0",
)
def memory(job: Findings) -> Judged:
    """Check that each host has enough memory, and /dev/shm for loaders and NCCL."""
    found, few, free = job.of("memory"), [], []
    for host, ranks in job.hosts("memory").items():
        for name in found[ranks[0]]:
            left, wanted = min(found[rank][name] for rank in ranks), LEAST[name] * len(ranks)
            free.append(f"{size(left)} of {name}")
            if left < wanted:
                words = f"{size(left)} of {name} free on {host}, {size(wanted)} wanted"
                few.append(f"{words} for {listed(ranks)}")
    return few, [], f"free: {', '.join(dict.fromkeys(free))}"


@check("limits", "ulimit -n, -u, -l in the job script; the hard limit is the administrator's")
def ulimits(job: Findings) -> Judged:
    """Check that the limits of ulimit are high enough for so many ranks."""
    nofile = FILES[0] + FILES[1] * len(job.facts)
    nproc = THREADS * max(map(len, job.hosts().values()))
    low = {}
    for rank, mine in job.of("limits").items():
        memlock = float("inf") if mine["infiniband"] else 0
        needed = {"nofile": nofile, "nproc": nproc, "memlock": memlock}
        low[rank] = ", ".join(
            f"{name} {soft} (can be raised to {'unlimited' if hard is None else hard})"
            for name, (soft, hard) in ((name, mine[name]) for name in needed)
            if soft is not None and soft < needed[name]
        )
    bad = [f"{text} on {listed(ranks)}" for text, ranks in grouped(low).items() if text]
    return bad, [], f"open files {nofile} and more on all ranks"


@check(
    "network",
    "one pair: its cable, its card, its slot (nvidia-smi topo -m); one rank's pairs: its host; "
    "all: NCCL_DEBUG=INFO says which way nccl takes, and --machine what to expect. An interface: "
    "GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME; a name without address: torchrun --local-addr",
)
def network(job: Findings) -> Judged:
    """Check that ranks use a reachable interface, and that no link is too slow."""
    if wrong := interfaces(job):
        return wrong, [], ""
    texts, slow = [], []
    host, gpus = job.of("host"), {gpu["kind"] for gpu in job.of("gpu").values()}
    links = [link for found in job.of("pairs").values() for link in found]
    for kind, inside in (("on one host", True), ("between hosts", False)):
        mine = [p for p in links if (host[p["pair"][0]] == host[p["pair"][1]]) == inside]
        if not mine:
            continue
        assumed = getattr(job.machine, f"{'node' if inside else 'network'}_bandwidth", 0)
        enough = assumed * (FRACTION_INSIDE if inside else FRACTION)
        rates, waits = ([p[what] for p in mine] for what in ("bandwidth", "latency"))
        planner = f" (planner {size(assumed)}/s; {size(enough)}/s are enough)" if assumed else ""
        times = f"{min(waits) * 1e6:.0f} to {max(waits) * 1e6:.0f} µs"
        texts.append(f"{count(mine, 'pair')} {kind}: {span(rates, 'B/s')}{planner}, {times}")
        for link in mine:
            others = [other for other in mine if other is not link] or [link]
            rate, wait = (median(p[what] for p in others) for what in ("bandwidth", "latency"))
            name = "ranks {} and {}".format(*link["pair"])
            if link["bandwidth"] < max(rate / SLOW, enough):
                slow.append(f"{name} {size(link['bandwidth'])}/s")
            if link["latency"] > max(SLOW * wait, wait + LATENCY[gpus == {"cuda"}]):
                slow.append(f"{name} {link['latency'] * 1e6:.0f} µs")
    text = "; ".join(texts) or UNMEASURED
    names = dict.fromkeys(net["unresolved"] for net in job.of("network").values())
    notes = [f"no address for {name}, the host's own name" for name in names if name]
    if notes or not texts:
        notes.append(text)
    return slow and [*slow, f"in all {text}"], notes, text


def interfaces(job: Findings) -> list[str]:
    """Describe each rank's interface that does not reach the other ranks."""
    wrong, many = [], len(job.hosts()) > 1
    for rank, net in job.of("network").items():
        if net["fault"]:
            wrong.append(f"rank {rank}: {net['fault']}")
        elif net["loopback"] and many:
            wrong.append(f"rank {rank} would offer {net['loopback']} to other hosts")
    return wrong


@check(
    "folder",
    "checkpoints want a folder that all hosts mount (not /tmp), without caching of names (NFS: "
    "lookupcache=none), with locks for the whole cluster (Lustre: -o flock; NFS: 4, or lockd), and "
    "with room: quota -s, or another --folder",
)
def folder(job: Findings) -> Judged:
    """Check that all ranks share one folder with renames, locks and enough space."""
    found = job.of("folder")
    wrong = {rank: mine["fault"] for rank, mine in found.items() if mine["fault"]}
    for rank, mine in found.items():
        if rank not in wrong and mine["free"] < job.needs:
            wrong[rank] = f"{size(mine['free'])} free, {size(job.needs)} wanted,"
    bad = [f"{what} on {listed(ranks)}" for what, ranks in grouped(wrong).items()]
    free = span(mine["free"] for mine in found.values())
    return bad, [], f"written, renamed and locked for all; {free} free"


# Formatting of ranks and amounts.


def _at(job: Findings, rank: int) -> str:
    return f"rank {rank} on {job.facts[rank].get('host', 'an unknown host')}"


def grouped(values: Mapping[int, Hashable]) -> dict[Any, list[int]]:
    """Return the ranks that have each value; values of many ranks come first."""
    found: dict[Any, list[int]] = {}
    for rank, value in values.items():
        found.setdefault(value, []).append(rank)
    return dict(sorted(found.items(), key=lambda one: -len(one[1])))


def listed(ranks: list[int]) -> str:
    """Name ranks: "rank 3"; "ranks 0, 1 and 5"; of many only the first and their number."""
    if len(ranks) > LISTED:
        return f"{len(ranks)} ranks ({', '.join(map(str, ranks[:LISTED]))}, …)"
    return root_cause.format_ranks(ranks)


def size(amount: float, unit: str = "B") -> str:
    """Format an amount with a decimal prefix: "1.5 GB"."""
    for prefix in ("", "k", "M", "G", "T"):
        if amount < 999.5:
            return f"{amount:.3g} {prefix}{unit}"
        amount /= 1000
    return f"{amount:.3g} P{unit}"


def span(values: Iterable[float], unit: str = "B") -> str:
    """Format the least and the largest value: "1.2 GB/s to 1.5 GB/s"."""
    values = list(values)
    low, high = (size(v, unit) for v in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def count(things: Any, name: str) -> str:
    """Count things: "1 host"; "2 hosts"."""
    return f"{len(things)} {name}{'s' * (len(things) != 1)}"
