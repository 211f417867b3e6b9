"""The ten checks of the doctor: each is a function of what all ranks found.

A check returns one `Verdict`. "note" is worth knowing and no fault. Facts that a rank could not
tell are left out here; the first check, `answers`, says which and why.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from statistics import median

from .verdicts import BAD, GOOD, NOTE, Findings, Verdict, count, grouped, listed, size, span

FRACTION = 0.5  # of what the planner assumes, and of what other ranks compute: below it is bad
# The same of a link inside a host, whose data sheet's rate takes messages of gigabytes. With nccl a
# pair of healthy GPUs reached, by nccl-tests' sendrecv_perf: 80 GB/s with 32 MiB and 180 with 4 GiB
# where a copy has 260 (two H100, nccl-tests issue 268 of 2024); 111 GB/s with 128 MiB and 195 with
# 1 GiB of 300 (eight A100, li-plus/playground, cuda/nccl.md). So 64 MiB make a third of the sheet's
# at best, and half of the lower figure's share is bad: PCIe, to which nccl falls back, is below it.
FRACTION_INSIDE = 0.125
FRACTION_GPU = 0.85  # equal GPUs differ by some percent, unless one is hot, capped or shared
SLOW = 3.0  # times as slow as the median of its kind: then a link is bad
LATENCY = 2e-3, 1e-4  # seconds above that median which count: a busy host adds one; with nccl
CLOCK = 0.1  # seconds
FREE = 0.9  # of a GPU's memory, before a job begins: less, and somebody else is there
# Settings in which ranks may differ: what is printed and where, and what hosts call their cards.
OWN = re.compile("DEBUG|_FILE|IFNAME|_HCA|_INTERFACE|NUMA|HOSTID|_CPP_LOG")
HOST = 2**30  # bytes of the host's memory for each of its ranks
SHARED = 256 * 2**20  # bytes of /dev/shm for each: a loader's four workers, two batches of 32 MiB
FILES = 128, 16  # open files: of the process itself, and for each other rank
THREADS = 1024  # processes and threads of a user, for each rank


def answers(job: Findings) -> Verdict:
    """Every rank came back from every part."""
    bad = {rank: f"rank {rank} stopped answering in: {words}" for rank, words in job.silent.items()}
    for rank, facts in enumerate(job.facts):
        for part, error in facts.get("errors", {}).items():
            bad[rank] = f"rank {rank} failed in {part}: {error}"
    if not bad:
        return Verdict("answers", GOOD, f"{len(job.facts)} ranks on {count(job.hosts(), 'host')}")
    hosts = dict.fromkeys(job.facts[rank].get("host", "an unknown host") for rank in bad)
    advice = f"look at {', '.join(hosts)}: py-spy dump --pid, dmesg; or leave that node out"
    return Verdict("answers", BAD, "; ".join(bad.values()), advice)


def versions(job: Findings) -> Verdict:
    """One Python, torch, CUDA, nccl and course; nccl's and gloo's variables are set alike."""
    found, differ = job.of("versions"), []
    for part in (found, job.of("environment")):
        for name in dict.fromkeys(name for mine in part.values() for name in mine):
            values = {rank: mine.get(name, "none") for rank, mine in part.items()}
            by = sorted(grouped(values).items(), key=lambda one: len(one[1]), reverse=True)
            if len(by) > 1 and not OWN.search(name):
                differ.append(f"{name} " + ", ".join(f"{v} on {listed(r)}" for v, r in by))
    if differ:
        advice = "start all ranks from one environment that all hosts see; srun --export"
        return Verdict("versions", BAD, "; ".join(differ), advice)
    one = next(iter(found.values()), {})
    return Verdict("versions", GOOD, ", ".join(f"{name} {value}" for name, value in one.items()))


def devices(job: Findings) -> Verdict:
    """Each rank has its own GPU, or none has one, and nobody else uses it."""
    found = job.of("gpu")
    ids = {r: (job.facts[r]["host"], gpu["id"]) for r, gpu in found.items() if gpu["id"]}
    shared = [
        f"{listed(ranks)} share GPU {number} of {host}"
        for (host, number), ranks in grouped(ids).items()
        if len(ranks) > 1
    ]
    if shared:
        advice = (
            "torch.cuda.set_device(LOCAL_RANK) before anything else, and as many ranks on a host "
            "as it has GPUs; where the launcher shows each rank one GPU, that is cuda:0"
        )
        return Verdict("devices", BAD, "; ".join(shared), advice)
    if ids and (lacking := found.keys() - ids.keys()):
        advice = "ask for a GPU for each rank; nvidia-smi on that host, CUDA_VISIBLE_DEVICES"
        return Verdict("devices", BAD, f"{listed(lacking)} found no GPU, others did", advice)
    held = [r for r in ids if found[r]["free"] < FREE * found[r]["total"]]
    if held:
        each = (f"rank {r}: {size(found[r]['free'])} of {size(found[r]['total'])}" for r in held)
        advice = "nvidia-smi on that host says who holds the memory"
        return Verdict("devices", BAD, f"free of a GPU's memory: {', '.join(each)}", advice)
    names = Counter(gpu["name"] for gpu in found.values())
    text = ", ".join(f"{n} × {name or 'a processor'}" for name, n in names.items())
    if len(names) > 1:
        return Verdict("devices", NOTE, text, "every step waits for the slowest kind")
    return Verdict("devices", GOOD, text + (", each its own" if ids else ", no GPU"))


def cores(job: Findings) -> Verdict:
    """The ranks of a host have cores enough."""
    found, bad, notes = job.of("cores"), [], []
    for host, ranks in job.hosts().items():
        mine = [found[r] for r in ranks if r in found]
        usable = {core for one in mine for core in one["mask"]}
        if not mine:
            continue
        threads, every = sum(one["threads"] for one in mine), mine[0]["all"]
        text = f"{listed(ranks)} may use {count(usable, 'core')} of {every} of {host}"
        if len(usable) < min(len(mine), every):
            bad.append(text)
        elif len(usable) < threads:
            notes.append(f"{text}, and compute with {threads} threads")
    if bad:
        advice = "--cpus-per-task and srun --cpu-bind=cores, or taskset: a core or more for each"
        return Verdict("cores", BAD, "; ".join(bad), advice)
    if notes:
        advice = "OMP_NUM_THREADS = cores / ranks of a host, and fewer ranks than cores"
        return Verdict("cores", NOTE, "; ".join(notes), advice)
    return Verdict("cores", GOOD, f"enough on {count(job.hosts(), 'host')}")


def speed(job: Findings) -> Verdict:
    """No rank computes much slower than the others of its kind, nor than the planner assumes."""
    found, slow = job.of("speed"), []
    for rank, mine in found.items():
        rates = [f["flops"] for r, f in found.items() if r != rank and f["name"] == mine["name"]]
        fraction = FRACTION_GPU if mine["kind"] == "cuda" else FRACTION
        if rates and mine["flops"] < fraction * median(rates):
            others = span(rates, "FLOP/s")
            slow.append(f"rank {rank} {size(mine['flops'], 'FLOP/s')}, the others {others}")
    if slow:
        advice = (
            "is it hot or capped (nvidia-smi -q -d PERFORMANCE, cpupower), what else runs there "
            "(nvidia-smi, top)? Every step waits for the slowest rank"
        )
        return Verdict("speed", BAD, "; ".join(slow), advice)
    if not found:
        return _unmeasured("speed")
    text = span((f["flops"] for f in found.values()), "FLOP/s")
    if job.machine:
        text += f"; planner {size(job.machine.flops, 'FLOP/s')}"
        if min(f["flops"] for f in found.values()) < FRACTION * job.machine.flops:
            return Verdict("speed", BAD, text, "the planner's seconds come too short: --machine")
    return Verdict("speed", GOOD, text)


def clocks(job: Findings) -> Verdict:
    """The hosts agree on the time."""
    found = job.of("clock")
    wrong = {r: c for r, c in found.items() if abs(c["ahead"]) - c["within"] > CLOCK}
    if wrong:
        text = ", ".join(
            f"rank {r} on {job.facts[r]['host']} {c['ahead']:+.3g} s" for r, c in wrong.items()
        )
        advice = "chronyc tracking or timedatectl there; until then times of logs do not compare"
        return Verdict("clocks", BAD, f"beside rank 0: {text}", advice)
    if not found:
        return _unmeasured("clocks")
    most = max(abs(c["ahead"]) + c["within"] for c in found.values())
    return Verdict("clocks", GOOD, f"within {max(1, round(most * 1e3))} ms of rank 0")


def memory(job: Findings) -> Verdict:
    """Each host has memory for its ranks; so has /dev/shm, by which loaders and nccl hand tensors
    from process to process."""
    few, free = [], []
    for part, name, least in (("memory", "memory", HOST), ("shm", "/dev/shm", SHARED)):
        found = job.of(part)
        for host, ranks in job.hosts().items():
            here = {found[r]: r for r in ranks if r in found}
            if not here:
                continue
            left = min(here)
            free.append(f"{size(left)} of {name}")
            if left < least * len(ranks):
                wanted = f"{size(least * len(ranks))} wanted for {len(ranks)} ranks"
                few.append(f"{host}, rank {here[left]}: {size(left)} of {name} free, {wanted}")
    if few:
        advice = (
            "what else runs there, --mem; docker --shm-size, or a memory volume on /dev/shm "
            "(Kubernetes), else num_workers=0"
        )
        return Verdict("memory", BAD, "; ".join(few), advice)
    return Verdict("memory", GOOD, f"free: {', '.join(dict.fromkeys(free))}")


def ulimits(job: Findings) -> Verdict:
    """What ulimit allows is enough for so many ranks."""
    found, low = job.of("limits"), []
    needed = {
        "nofile": FILES[0] + FILES[1] * len(job.facts),
        "nproc": THREADS * max(map(len, job.hosts().values()), default=1),
    }
    for name in ("nofile", "nproc", "memlock"):
        too_low = {}
        for rank, mine in found.items():
            soft, hard = mine[name]
            least = needed.get(name, float("inf") if mine["infiniband"] else 0)
            if soft is not None and soft < least:
                most = "unlimited" if hard is None else hard
                too_low[rank] = f"{name} {soft} (can be raised to {most})"
        low += [f"{text} on {listed(ranks)}" for text, ranks in grouped(too_low).items()]
    if low:
        advice = "ulimit -n, -u, -l in the job script; the hard limit is the administrator's"
        return Verdict("ulimits", BAD, "; ".join(low), advice)
    return Verdict("ulimits", GOOD, f"open files {needed['nofile']} and more on all ranks")


def network(job: Findings) -> Verdict:
    """The ranks talk by an interface that reaches the others, and no link is much slower than
    others of its kind, nor than the planner assumes."""
    if wrong := interfaces(job):
        advice = "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME: an interface that reaches the others"
        return Verdict("network", BAD, "; ".join(wrong), advice)
    texts, slow = [], []
    host, gpus = job.of("host"), {gpu["kind"] for gpu in job.of("gpu").values()}
    links = [link for found in job.of("pairs").values() for link in found]
    for kind, inside in (("on one host", True), ("between hosts", False)):
        mine = [p for p in links if (host[p["pair"][0]] == host[p["pair"][1]]) == inside]
        if not mine:
            continue
        assumed = getattr(job.machine, "inside" if inside else "between", 0)
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
    text = "; ".join(texts)
    if slow:
        advice = (
            "one pair: its cable, its card, its slot (nvidia-smi topo -m); one rank's pairs: its "
            "host; all: NCCL_DEBUG=INFO says which way nccl takes, and --machine what to expect"
        )
        return Verdict("network", BAD, f"{', '.join(slow)}; in all {text}", advice)
    names = ", ".join(dict.fromkeys(n["unresolved"] for n in job.of("network").values()))
    if names:
        text = f"the host's own name has no address: {names}. {text}"
        advice = "torchrun would hang: --local-addr (127.0.0.1 on one machine), or /etc/hosts"
        return Verdict("network", NOTE, text, advice)
    return Verdict("network", GOOD, text) if text else _unmeasured("network")


def interfaces(job: Findings) -> list[str]:
    """Describe each rank's interface that does not reach the other ranks."""
    wrong = []
    for rank, net in job.of("network").items():
        there = ", ".join(net["interfaces"])
        if net["interface"] is None:
            named = f"GLOO_SOCKET_IFNAME={net['named']}" if net["named"] else "the host's name"
            wrong.append(f"rank {rank}: {named} leads to no interface; there are {there}")
        elif net["loopback"] and len(job.hosts()) > 1:
            wrong.append(f"rank {rank} would offer {net['address']} to other hosts; it has {there}")
    return wrong


def folder(job: Findings) -> Verdict:
    """All ranks see one folder, what is renamed and locked in it, and what is needed fits in."""
    found = job.of("folder")
    errors = {r: f["error"] for r, f in found.items() if f["error"]}
    blind = [r for r, f in found.items() if not f["seen"]]
    late = [r for r, f in found.items() if f["seen"] and not f["renamed"]]
    broken = {r: "; ".join(f["locks"]) for r, f in found.items() if f["locks"]}
    full = {r: size(f["free"]) for r, f in found.items() if f["free"] < job.needs}
    if 0 in errors and len(blind) == len(found):
        text, advice = f"rank 0 cannot write: {errors[0]}", "choose another --folder"
    elif blind:
        text = f"what rank 0 wrote is not seen by {listed(blind)}"
        advice = "checkpoints need a file system that all hosts mount: not /tmp, not a local disk"
    elif late:
        text = f"a rename is not seen by {listed(late)}"
        advice = "mount without caching of names (NFS: lookupcache=none), or wait after a save"
    elif broken:
        text = "; ".join(f"{what} on {listed(ranks)}" for what, ranks in grouped(broken).items())
        advice = (
            "mount with locks for the whole cluster (Lustre: -o flock, NFS: 4 or with lockd); "
            "until then never let two jobs save into one folder"
        )
    elif errors:
        text = "; ".join(f"rank {r}: {e}" for r, e in errors.items())
        advice = "make room, raise the quota (quota -s), or permissions"
    elif full:
        text = "; ".join(f"{free} free for {listed(r)}" for free, r in grouped(full).items())
        text, advice = f"{text}, {size(job.needs)} wanted", "delete old checkpoints, or --folder"
    elif not found:
        return _unmeasured("folder")
    else:
        free = span(f["free"] for f in found.values())
        return Verdict("folder", GOOD, f"written, renamed and locked for all; {free} free")
    return Verdict("folder", BAD, text, advice)


def _unmeasured(check: str) -> Verdict:
    return Verdict(check, NOTE, "not measured")


CHECKS: list[Callable[[Findings], Verdict]] = [
    answers, versions, devices, cores, speed, clocks, memory, ulimits, network, folder,
]  # fmt: skip


def verdicts(job: Findings) -> list[Verdict]:
    """Return all rows of the table, in the order of CHECKS."""
    return [check(job) for check in CHECKS]
