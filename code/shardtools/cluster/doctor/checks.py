"""The doctor's table: checks of the facts of all ranks, each with advice for a bad row.

A check returns faults, notes (worth knowing, but no fault), and the text of a good row.
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
MIN_FRACTION = 0.5  # a smaller share of the planner's rate or of other ranks' speed is bad
# The same for a link inside a host, which needs messages of gigabytes to reach the data sheet's
# rate. nccl-tests' sendrecv_perf, healthy GPUs: 80 GB/s with 32 MiB and 180 with 4 GiB where a copy
# has 260 (two H100, nccl-tests issue 268 of 2024); 111 GB/s with 128 MiB and 195 with 1 GiB of 300
# (eight A100, li-plus/playground, cuda/nccl.md). So 64 MiB reach a third of the sheet's at best,
# and half of the lower figure's share is bad: PCIe, NCCL's fallback, is below that.
MIN_FRACTION_INSIDE = 0.125
MIN_FRACTION_GPU = 0.85  # equal GPUs differ by some percent, unless one is hot, capped or shared
SLOW_LINK_FACTOR = 3.0  # a link is bad if it is this many times slower than the median
EXTRA_LATENCY_S = 2e-3, 1e-4  # seconds above that median that are bad: on busy hosts; with NCCL
MAX_CLOCK_OFFSET_S = 0.1
MIN_FREE_GPU_SHARE = 0.9  # of its memory: if less is free before a job, another process uses it
# Settings in which ranks may differ: logging, and the hosts' names of network cards.
MAY_DIFFER = re.compile("DEBUG|_FILE|IFNAME|_HCA|_INTERFACE|NUMA|HOSTID|_CPP_LOG")
SHM_BYTES = 256 * 2**20  # four workers of a data loader with two batches of 32 MiB each
MIN_FREE_BYTES = {"memory": 2**30, "/dev/shm": SHM_BYTES}  # of a host, for each rank
OPEN_FILES = 128, 16  # for the process itself, and for each other rank
THREADS_PER_RANK = 1024  # processes and threads of a user, for each rank
MAX_NAMED_RANKS = 16


@dataclass
class Findings:
    """The facts of all ranks. `facts`: by rank; see `host_facts` for the parts."""

    facts: list[dict[str, Any]]
    silent: dict[int, str] = field(default_factory=dict)  # last steps of silent ranks
    machine: Machine | None = None  # the planner's machine
    needs: float = 1e9  # bytes that must fit into the folder

    def get_facts(self, part: str) -> dict[int, Any]:
        """Return the facts of a part by rank, without ranks that did not finish the part."""
        return {rank: f[part] for rank, f in enumerate(self.facts) if f.get(part) is not None}

    def get_planner_rate(self, name: str) -> float:
        """Return a rate of the planner's GPU, or 0 if no rank has a GPU."""
        gpus = {gpu["kind"] for gpu in self.get_facts("gpu").values()} - {"cpu"}
        return getattr(self.machine, name) if self.machine and gpus else 0.0

    def group_by_host(self, part: str = "host") -> dict[str, list[int]]:
        """Return the ranks of each host that have facts of a part."""
        return group_ranks({rank: self.facts[rank]["host"] for rank in self.get_facts(part)})


@dataclass(frozen=True)
class Verdict:
    """One row of the table: a state ("good", "note" or "bad"), its evidence, and the next step."""

    check: str
    state: str
    found: str
    advice: str


Judgement = tuple[list[str], list[str], str]  # faults, notes, and the text of a good row
Judge = Callable[[Findings], Judgement]
CHECKS: list[tuple[Judge, str, str]] = []  # in the order of the table


def register_check(part: str, advice: str) -> Callable[[Judge], Judge]:
    """Add a check to the table, with the part of the facts that it needs, and its advice."""

    def register(judge: Judge) -> Judge:
        CHECKS.append((judge, part, advice))
        return judge

    return register


def judge_findings(job: Findings) -> list[Verdict]:
    """Return all rows of the table."""
    rows = []
    for judge, part, advice in CHECKS:
        bad, notes, good = judge(job) if job.get_facts(part) else ([], [UNMEASURED], "")
        state = BAD if bad else NOTE if notes else GOOD
        name, found = judge.__name__.removeprefix("check_"), "; ".join(bad or notes) or good
        needed = bad or notes not in ([], [UNMEASURED])
        rows.append(Verdict(name, state, found, advice if needed else ""))
    return rows


@register_check("host", "look at that host (py-spy dump --pid, dmesg), or exclude the node")
def check_answers(job: Findings) -> Judgement:
    """Check that every rank finished every part."""
    bad = [f"{_name_rank(job, r)} stopped answering in: {step}" for r, step in job.silent.items()]
    bad += [f"{_name_rank(job, r)} failed in {text}" for r, text in job.get_facts("error").items()]
    return bad, [], f"{len(job.facts)} ranks on {format_count(job.group_by_host(), 'host')}"


@register_check("versions", "start all ranks from one environment on all hosts; srun --export")
def check_versions(job: Findings) -> Judgement:
    """Check that all ranks have equal versions, and equal NCCL and gloo variables."""
    found, differ = job.get_facts("versions"), []
    for part in (found, job.get_facts("environment")):
        for name in dict.fromkeys(name for mine in part.values() for name in mine):
            groups = group_ranks({rank: mine.get(name, "none") for rank, mine in part.items()})
            if len(groups) > 1 and not MAY_DIFFER.search(name):
                values = (f"{value} on {name_ranks(ranks)}" for value, ranks in groups.items())
                differ.append(f"{name} {', '.join(values)}")
    first = next(iter(found.values()))
    return differ, [], ", ".join(f"{name} {value}" for name, value in first.items())


@register_check(
    "gpu",
    "ask for a GPU for each rank, call torch.cuda.set_device(LOCAL_RANK) first (cuda:0 if the "
    "launcher shows each rank one GPU); nvidia-smi lists the processes that hold memory",
)
def check_devices(job: Findings) -> Judgement:
    """Check that each rank has its own free GPU, or that no rank has one."""
    found = job.get_facts("gpu")
    ids = {r: (job.facts[r]["host"], gpu["id"]) for r, gpu in found.items() if gpu["id"]}
    bad = [
        f"{name_ranks(ranks)} share GPU {number} of {host}"
        for (host, number), ranks in group_ranks(ids).items()
        if len(ranks) > 1
    ]
    for rank, gpu in found.items():
        if ids and not gpu["id"]:
            bad.append(f"{_name_rank(job, rank)} found no GPU, other ranks did")
        elif ids and gpu["free"] < MIN_FREE_GPU_SHARE * gpu["total"]:
            free = f"{format_size(gpu['free'])} of {format_size(gpu['total'])}"
            bad.append(f"{_name_rank(job, rank)} has {free} of GPU memory free")
    if job.machine and not ids:
        bad.append(f"no rank found a GPU, --machine names {job.machine.name}")
    names = Counter(gpu["name"] for gpu in found.values())
    text = ", ".join(f"{n} × {name or 'a processor'}" for name, n in names.items())
    notes = [f"{text}: every step waits for the slowest kind"] if len(names) > 1 else []
    return bad, notes, text + (", one for each rank" if ids else ", no GPU")


@register_check(
    "cores",
    "give each rank a core or more: --cpus-per-task and srun --cpu-bind=cores, or taskset; set "
    "OMP_NUM_THREADS to the cores per rank",
)
def check_cores(job: Findings) -> Judgement:
    """Check that the ranks of a host have enough cores."""
    found, bad, notes = job.get_facts("cores"), [], []
    for host, ranks in job.group_by_host("cores").items():
        mine = [found[rank] for rank in ranks]
        usable = {core for one in mine for core in one["mask"]}
        threads, total = sum(one["threads"] for one in mine), mine[0]["all"]
        text = f"{name_ranks(ranks)} may use {format_count(usable, 'core')} of {total} of {host}"
        if len(usable) < min(len(mine), total):
            bad.append(text)
        elif len(usable) < threads:
            notes.append(f"{text}, and compute with {threads} threads")
    return bad, notes, f"enough on {format_count(job.group_by_host(), 'host')}"


@register_check(
    "speed",
    "look for heat, power caps (nvidia-smi -q -d PERFORMANCE, cpupower) and other processes: every "
    "step waits for the slowest rank; if all ranks are slow, check --machine",
)
def check_speed(job: Findings) -> Judgement:
    """Check that no rank computes much slower than the other ranks or the planner's GPU."""
    found, slow = job.get_facts("speed"), []
    planner = job.get_planner_rate("flops")
    for rank, mine in found.items():
        rates = [f["flops"] for r, f in found.items() if r != rank and f["name"] == mine["name"]]
        fraction = MIN_FRACTION_GPU if mine["kind"] == "cuda" else MIN_FRACTION
        minimum = max(fraction * median(rates or [0]), MIN_FRACTION * planner)
        if mine["flops"] < minimum:
            slow.append(f"{_name_rank(job, rank)} {format_size(mine['flops'], 'FLOP/s')}")
    text = format_range((f["flops"] for f in found.values()), "FLOP/s")
    text += f" (planner {format_size(planner, 'FLOP/s')})" if planner else ""
    return slow and [*slow, f"all ranks: {text}"], [], text


@register_check("clock", "see chronyc tracking or timedatectl; do not compare times in logs")
def check_clocks(job: Findings) -> Judgement:
    """Check that the hosts agree on the time."""
    found, bad = job.get_facts("clock"), []
    for rank, clock in found.items():
        if abs(clock["ahead"]) - clock["within"] > MAX_CLOCK_OFFSET_S:
            bad.append(f"{_name_rank(job, rank)} {clock['ahead']:+.3g} s from rank 0")
    most = max(abs(c["ahead"]) + c["within"] for c in found.values())
    return bad, [], f"within {max(1, round(most * 1e3))} ms of rank 0"


@register_check(
    "memory",
    "look for other processes, and ask for --mem; for /dev/shm: docker --shm-size, a memory volume "
    "(Kubernetes), or num_workers=0",
)
def check_memory(job: Findings) -> Judgement:
    """Check that each host has enough memory, and enough /dev/shm for loaders and NCCL."""
    found, short, free = job.get_facts("memory"), [], []
    for host, ranks in job.group_by_host("memory").items():
        for name in found[ranks[0]]:
            left = min(found[rank][name] for rank in ranks)
            free.append(f"{format_size(left)} of {name}")
            if left < (needed := MIN_FREE_BYTES[name] * len(ranks)):
                words = f"{format_size(needed)} needed for {name_ranks(ranks)}"
                short.append(f"{free[-1]} free on {host}, {words}")
    return short, [], f"free: {', '.join(dict.fromkeys(free))}"


@register_check("limits", "ulimit -n, -u, -l in the job script; hard limits need an administrator")
def check_ulimits(job: Findings) -> Judgement:
    """Check that the limits of ulimit suffice for this number of ranks."""
    nofile = OPEN_FILES[0] + OPEN_FILES[1] * len(job.facts)
    nproc = THREADS_PER_RANK * max(map(len, job.group_by_host().values()))
    low = {}
    for rank, mine in job.get_facts("limits").items():
        memlock = float("inf") if mine["infiniband"] else 0
        needed = {"nofile": nofile, "nproc": nproc, "memlock": memlock}
        low[rank] = ", ".join(
            f"{name} {soft} (can be raised to {'unlimited' if hard is None else hard})"
            for name, (soft, hard) in ((name, mine[name]) for name in needed)
            if soft is not None and soft < needed[name]
        )
    bad = [f"{text} on {name_ranks(ranks)}" for text, ranks in group_ranks(low).items() if text]
    return bad, [], f"at least {nofile} open files on all ranks"


@register_check(
    "network",
    "one slow pair: check cable, card, slot (nvidia-smi topo -m); all pairs of a rank: its host; "
    "all pairs: NCCL_DEBUG=INFO shows the transport, --machine the expected rate. Interface: set "
    "GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME; a name without an address: torchrun --local-addr",
)
def check_network(job: Findings) -> Judgement:
    """Check that ranks use a reachable interface, and that no link is too slow."""
    if wrong := find_bad_interfaces(job):
        return wrong, [], ""
    texts, slow = [], []
    host, gpus = job.get_facts("host"), {gpu["kind"] for gpu in job.get_facts("gpu").values()}
    links = [link for found in job.get_facts("pairs").values() for link in found]
    for kind, inside in (("on one host", True), ("between hosts", False)):
        kind_links = [p for p in links if (host[p["pair"][0]] == host[p["pair"][1]]) == inside]
        if not kind_links:
            continue
        assumed = job.get_planner_rate(f"{'node' if inside else 'network'}_bandwidth")
        minimum = assumed * (MIN_FRACTION_INSIDE if inside else MIN_FRACTION)
        rates, latencies = ([p[what] for p in kind_links] for what in ("bandwidth", "latency"))
        text = f"{format_count(kind_links, 'pair')} {kind}: {format_range(rates, 'B/s')}"
        if assumed:
            text += f" (planner {format_size(assumed)}/s, minimum {format_size(minimum)}/s)"
        texts.append(f"{text}, {min(latencies) * 1e6:.0f} to {max(latencies) * 1e6:.0f} µs")
        for link in kind_links:
            others = [other for other in kind_links if other is not link] or [link]
            rate, latency = (median(p[what] for p in others) for what in ("bandwidth", "latency"))
            name = "ranks {} and {}".format(*link["pair"])
            if link["bandwidth"] < max(rate / SLOW_LINK_FACTOR, minimum):
                slow.append(f"{name} {format_size(link['bandwidth'])}/s")
            extra = EXTRA_LATENCY_S[gpus == {"cuda"}]
            if link["latency"] > max(SLOW_LINK_FACTOR * latency, latency + extra):
                slow.append(f"{name} {link['latency'] * 1e6:.0f} µs")
    text = "; ".join(texts) or UNMEASURED
    names = dict.fromkeys(net["unresolved"] for net in job.get_facts("network").values())
    notes = [f"the host's own name, {name}, has no address" for name in names if name]
    if notes or not texts:
        notes.append(text)
    return slow and [*slow, f"all ranks: {text}"], notes, text


def find_bad_interfaces(job: Findings) -> list[str]:
    """Describe the interfaces over which a rank cannot reach the others."""
    wrong, several_hosts = [], len(job.group_by_host()) > 1
    for rank, net in job.get_facts("network").items():
        if net["fault"]:
            wrong.append(f"rank {rank}: {net['fault']}")
        elif net["loopback"] and several_hosts:
            wrong.append(f"rank {rank} would announce {net['loopback']} to other hosts")
    return wrong


@register_check(
    "folder",
    "use a folder that all hosts mount (not /tmp), without caching of names (NFS: "
    "lookupcache=none), with locks for the whole cluster (Lustre: -o flock; NFS: 4, or lockd), and "
    "with enough space (quota -s), or another --folder",
)
def check_folder(job: Findings) -> Judgement:
    """Check that all ranks share one folder with renames, locks and enough space."""
    found = job.get_facts("folder")
    wrong = {rank: mine["fault"] for rank, mine in found.items() if mine["fault"]}
    for rank, mine in found.items():
        if rank not in wrong and mine["free"] < job.needs:
            wrong[rank] = f"{format_size(mine['free'])} free, {format_size(job.needs)} needed,"
    bad = [f"{what} on {name_ranks(ranks)}" for what, ranks in group_ranks(wrong).items()]
    free = format_range(mine["free"] for mine in found.values())
    return bad, [], f"files, renames and locks are seen by all; {free} free"


# Formatting of ranks and amounts.


def _name_rank(job: Findings, rank: int) -> str:
    return f"rank {rank} on {job.facts[rank].get('host', 'an unknown host')}"


def group_ranks(values: Mapping[int, Hashable]) -> dict[Any, list[int]]:
    """Return the ranks that have each value; values of many ranks come first."""
    found: dict[Any, list[int]] = {}
    for rank, value in values.items():
        found.setdefault(value, []).append(rank)
    return dict(sorted(found.items(), key=lambda one: -len(one[1])))


def name_ranks(ranks: list[int]) -> str:
    """Name ranks: "rank 3", "ranks 0, 1 and 5", or the first of many and their number."""
    if len(ranks) > MAX_NAMED_RANKS:
        return f"{len(ranks)} ranks ({', '.join(map(str, ranks[:MAX_NAMED_RANKS]))}, …)"
    return root_cause.format_ranks(ranks)


def format_size(amount: float, unit: str = "B") -> str:
    """Format an amount with a decimal prefix: "1.5 GB"."""
    for prefix in ("", "k", "M", "G", "T"):
        if amount < 999.5:
            return f"{amount:.3g} {prefix}{unit}"
        amount /= 1000
    return f"{amount:.3g} P{unit}"


def format_range(values: Iterable[float], unit: str = "B") -> str:
    """Format the least and the largest value: "1.2 GB/s to 1.5 GB/s"."""
    values = list(values)
    low, high = (format_size(v, unit) for v in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def format_count(things: Any, name: str) -> str:
    """Count things: "1 host"; "2 hosts"."""
    return f"{len(things)} {name}{'s' * (len(things) != 1)}"
