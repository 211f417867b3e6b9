"""What the doctor says to what the ranks found: each check is a function of all facts.

A check returns one `Verdict`: what was found, in a line, and, unless that is good, what to do.
"note" is worth knowing and no fault. Facts that a rank could not tell are left out here; the first
check, `answers`, says which and why.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any

from .verdicts import BAD, GOOD, NOTE, Findings, Verdict, count, listed, size, span

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
    told = [f"rank {rank} stopped answering in: {words}" for rank, words in job.silent.items()]
    for rank, facts in enumerate(job.facts):
        told += [f"rank {rank} failed in {p}: {e}" for p, e in facts.get("errors", {}).items()]
    if told:
        where = {r: f.get("host", "an unknown host") for r, f in enumerate(job.facts)}
        hosts = ", ".join(dict.fromkeys(where[int(t.split()[1])] for t in told))
        advice = f"look at {hosts}: py-spy dump --pid, dmesg; or leave that node out"
        return Verdict("answers", BAD, "; ".join(told), advice)
    return Verdict("answers", GOOD, f"{len(job.facts)} ranks on {count(job.hosts(), 'host')}")


def versions(job: Findings) -> Verdict:
    """One Python, one torch, one CUDA, one nccl, one driver, one shardlab."""
    found = job.of("versions")
    names = list(dict.fromkeys(name for v in found.values() for name in v))
    differ = []
    for name in names:
        by: dict[str, list[int]] = {}
        for rank, v in found.items():
            by.setdefault(v.get(name, "none"), []).append(rank)
        if len(by) > 1:
            few = sorted(by.items(), key=lambda item: len(item[1]), reverse=True)
            differ.append(f"{name} " + ", ".join(f"{v} on {listed(r)}" for v, r in few))
    if differ:
        advice = "start all ranks from one environment: one path that all hosts see, or one image"
        return Verdict("versions", BAD, "; ".join(differ), advice)
    one = next(iter(found.values()), {})
    return Verdict("versions", GOOD, ", ".join(f"{name} {one[name]}" for name in names))


def environment(job: Findings) -> Verdict:
    """What is set for nccl and gloo on one rank is set on all of them."""
    found, bad, notes = job.of("environment"), [], []
    if not found:
        return _unknown("environment")
    for name in sorted({name for mine in found.values() for name in mine}):
        by: dict[str, list[int]] = {}
        for rank, mine in found.items():
            by.setdefault(f"{name}={mine[name]}" if name in mine else "not set", []).append(rank)
        if len(by) > 1:
            few = sorted(by.items(), key=lambda item: len(item[1]))
            words = ", ".join(f"{value} on {listed(ranks)}" for value, ranks in few)
            (notes if OWN.search(name) else bad).append(words)
    if bad:
        advice = "set it on all ranks, or on none: srun --export, a line in the job script"
        return Verdict("environment", BAD, "; ".join(bad + notes), advice)
    if notes:
        return Verdict("environment", NOTE, "; ".join(notes), "right where hosts differ in that")
    names = ", ".join(next(iter(found.values())))
    text = f"{names}, the same on all ranks" if names else "no variables of nccl's or gloo's"
    return Verdict("environment", GOOD, text)


def devices(job: Findings) -> Verdict:
    """No two ranks compute on one GPU, and all have the same kind."""
    found, by = job.of("gpu"), dict[tuple[str, str], list[int]]()
    for rank, gpu in found.items():
        if gpu["id"] is not None:
            by.setdefault((job.facts[rank]["host"], gpu["id"]), []).append(rank)
    shared = [f"{listed(r)} share GPU {id} of {h}" for (h, id), r in by.items() if len(r) > 1]
    if shared:
        advice = (
            "torch.cuda.set_device(LOCAL_RANK) before anything else, and as many ranks on a host "
            "as it has GPUs; where the launcher shows each rank one GPU, that is cuda:0"
        )
        return Verdict("devices", BAD, "; ".join(shared), advice)
    names = Counter(gpu["name"] for gpu in found.values())
    text = ", ".join(f"{n} × {name or 'a processor'}" for name, n in names.items())
    if len({gpu["kind"] for gpu in found.values()}) > 1:
        lacking = listed(r for r, gpu in found.items() if gpu["kind"] == "cpu")
        advice = "ask for a GPU for each rank; nvidia-smi on that host, CUDA_VISIBLE_DEVICES"
        return Verdict("devices", BAD, f"{lacking} found no GPU, others did", advice)
    if len(names) > 1:
        return Verdict("devices", NOTE, text, "every step waits for the slowest kind")
    return Verdict("devices", GOOD, text + (", each its own" if by else ", no GPU"))


def cores(job: Findings) -> Verdict:
    """The ranks of a host have cores enough."""
    found, bad, notes = job.of("cores"), [], []
    for host, ranks in job.hosts().items():
        mine = [found[r] for r in ranks if r in found and found[r]["mask"]]
        union = {core for c in mine for core in c["mask"]}
        if not mine:
            continue
        text = f"{listed(ranks)} may use {count(union, 'core')} of {mine[0]['all']} of {host}"
        if len(union) < min(len(mine), mine[0]["all"]):
            bad.append(text)
        elif len(union) < sum(c["threads"] for c in mine):
            threads = sum(c["threads"] for c in mine)
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
    if not found:
        return _unknown("speed")
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
    text = span((f["flops"] for f in found.values()), "FLOP/s")
    if job.machine:
        text += f"; planner {size(job.machine.flops, 'FLOP/s')}"
        if min(f["flops"] for f in found.values()) < FRACTION * job.machine.flops:
            return Verdict("speed", BAD, text, "the planner's seconds come too short: --machine")
    idle = [r for r, f in found.items() if f["kind"] == "cpu" and f["fraction"] < FRACTION]
    if idle:
        least = min(found[r]["fraction"] for r in idle)
        text += f"; {listed(idle)} had a core for {least:.0%} of the time, or a little more"
        return Verdict("speed", NOTE, text, "top says what else runs on that host")
    return Verdict("speed", GOOD, text)


def clocks(job: Findings) -> Verdict:
    """The hosts agree on the time."""
    found = job.of("clock")
    if not found:
        return _unknown("clocks", job.unmeasured)
    wrong = {r: c for r, c in found.items() if abs(c["ahead"]) - c["within"] > CLOCK}
    if wrong:
        text = ", ".join(
            f"rank {r} on {job.facts[r]['host']} {c['ahead']:+.3g} s" for r, c in wrong.items()
        )
        advice = "chronyc tracking or timedatectl there; until then times of logs do not compare"
        return Verdict("clocks", BAD, f"beside rank 0: {text}", advice)
    most = max(abs(c["ahead"]) + c["within"] for c in found.values())
    return Verdict("clocks", GOOD, f"within {max(1, round(most * 1e3))} ms of rank 0")


def host_memory(job: Findings) -> Verdict:
    """A gigabyte of the host's memory for each of its ranks."""
    return _each(job, "memory", "memory", HOST, "the host's memory: what else runs there, --mem")


def shared_memory(job: Findings) -> Verdict:
    """Loaders' workers and nccl exchange tensors through /dev/shm."""
    advice = "docker --shm-size, or a memory volume on /dev/shm (Kubernetes); else num_workers=0"
    return _each(job, "shm", "/dev/shm", SHARED, advice)


def _each(job: Findings, part: str, name: str, least: float, advice: str) -> Verdict:
    """Enough free bytes for all ranks of a host."""
    found, few, free = job.of(part), [], []
    for host, ranks in job.hosts().items():
        here = [found[r] for r in ranks if r in found]
        if not here:
            continue
        free.append(least_free := min(f["free"] for f in here))
        if least_free < least * len(ranks):
            tight = [r for r in ranks if r in found and found[r]["free"] == least_free]
            total = min(f["total"] for f in here)
            few.append(
                f"{host}, {listed(tight)}: {size(least_free)} free of {size(total)}, "
                f"{size(least * len(ranks))} wanted for {len(ranks)} ranks"
            )
    if few:
        return Verdict(name, BAD, "; ".join(few), advice)
    return Verdict(name, GOOD, f"{span(free)} free") if free else _unknown(name)


def device_memory(job: Findings) -> Verdict:
    """Nobody else holds memory of a GPU."""
    found = {r: g for r, g in job.of("gpu").items() if g["total"]}
    if not found:
        return Verdict("GPU memory", GOOD, "no GPU")
    held = {r: g for r, g in found.items() if g["free"] < FREE * g["total"]}
    if held:
        text = ", ".join(
            f"rank {r}: {size(g['free'])} free of {size(g['total'])}" for r, g in held.items()
        )
        return Verdict("GPU memory", BAD, text, "nvidia-smi on that host says who holds it")
    return Verdict("GPU memory", GOOD, f"{span(g['free'] for g in found.values())} free")


def limits(job: Findings) -> Verdict:
    """What ulimit allows is enough for so many ranks."""
    found, low = job.of("limits"), []
    if not found:
        return _unknown("ulimits")
    needed = {
        "nofile": FILES[0] + FILES[1] * len(job.facts),
        "nproc": THREADS * max(map(len, job.hosts().values())),
    }
    for name in ("nofile", "nproc", "memlock"):
        by: dict[str, list[int]] = {}
        for rank, f in found.items():
            soft, hard = f[name]
            least = needed.get(name, float("inf") if f["infiniband"] else 0)
            if soft is not None and soft < least:
                most = "unlimited" if hard is None else hard
                by.setdefault(f"{name} {soft} (can be raised to {most})", []).append(rank)
        low += [f"{text} on {listed(r)}" for text, r in by.items()]
    if low:
        advice = "ulimit -n, -u, -l in the job script; the hard limit is the administrator's"
        return Verdict("ulimits", BAD, "; ".join(low), advice)
    least = {n: min(f[n][0] or float("inf") for f in found.values()) for n in needed}
    text = ", ".join(f"{n} {'unlimited' if v == float('inf') else v}" for n, v in least.items())
    dumps = any(f["core"][0] != 0 for f in found.values())
    return Verdict("ulimits", GOOD, f"{text}, core dumps {'on' if dumps else 'off'}")


def network(job: Findings) -> Verdict:
    """The ranks talk by an interface that reaches the others."""
    found, wrong = job.of("network"), []
    if not found:
        return _unknown("network")
    for rank, net in found.items():
        there = ", ".join(net["interfaces"])
        if net["interface"] is None:
            named = f"GLOO_SOCKET_IFNAME={net['named']}" if net["named"] else "the host's name"
            wrong.append(f"rank {rank}: {named} leads to no interface; there are {there}")
        elif net["loopback"] and len(job.hosts()) > 1:
            wrong.append(f"rank {rank} would offer {net['address']} to other hosts; it has {there}")
    if wrong:
        advice = "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME: an interface that reaches the others"
        return Verdict("network", BAD, "; ".join(wrong), advice)
    names = ", ".join(dict.fromkeys(n["unresolved"] for n in found.values() if n["unresolved"]))
    if names:
        advice = "torchrun would hang: --local-addr (127.0.0.1 on one machine), or /etc/hosts"
        return Verdict("network", NOTE, f"the host's own name has no address: {names}", advice)
    used = Counter((net["interface"], net["speed"]) for net in found.values())
    text = ", ".join(
        f"{name}{f' ({size(speed)}/s)' if speed else ''} on {n}"
        for (name, speed), n in used.items()
    )
    return Verdict("network", GOOD, f"{text} ranks")


def _kinds(job: Findings) -> list[tuple[str, list[dict[str, Any]], float | None, float]]:
    """Links inside of hosts and between them, the planner's bytes per second, and the share of it
    that such a link has to reach."""
    pairs = [link for facts in job.facts for link in facts.get("pairs") or []]
    host = job.of("host")
    inside = [p for p in pairs if host[p["pair"][0]] == host[p["pair"][1]]]
    between = [p for p in pairs if p not in inside]
    m = job.machine
    kinds = [
        ("on one host", inside, m and m.inside, FRACTION_INSIDE),
        ("between hosts", between, m and m.between, FRACTION),
    ]
    return [kind for kind in kinds if kind[1]]


def _name(link: dict[str, Any]) -> str:
    return "ranks {} and {}".format(*link["pair"])


def _others(link: dict[str, Any], links: list[dict[str, Any]], what: str) -> float:
    """The median of all other links of its kind; its own, if it has no like."""
    return median([x[what] for x in links if x is not link] or [link[what]])


def bandwidth(job: Findings) -> Verdict:
    """No pair is much slower than its like, nor than one that is well at this size of messages."""
    kinds, texts, slow = _kinds(job), [], []
    if not kinds:
        return _unknown("bandwidth", job.unmeasured)
    for kind, links, assumed, fraction in kinds:
        rates = [link["bandwidth"] for link in links]
        planner = f"planner {size(assumed)}/s" if assumed else "the planner assumes nothing"
        planner += (
            f", with large messages; {size(fraction * assumed)}/s are enough" if assumed else ""
        )
        texts.append(f"{count(links, 'pair')} {kind}: {span(rates, 'B/s')} ({planner})")
        for link in links:
            least = max(_others(link, links, "bandwidth") / SLOW, fraction * (assumed or 0))
            if link["bandwidth"] < least:
                slow.append(f"{_name(link)} {size(link['bandwidth'])}/s")
    text = "; ".join(texts)
    if slow:
        advice = (
            "one pair: its cable, its card, its slot (nvidia-smi topo -m); one rank's pairs: its "
            "host; all: NCCL_DEBUG=INFO says which way nccl takes, and --machine what to expect"
        )
        return Verdict("bandwidth", BAD, f"{', '.join(slow)}; in all {text}", advice)
    return Verdict("bandwidth", GOOD, text)


def latency(job: Findings) -> Verdict:
    """The planner assumes none: no pair is far above its like."""
    kinds, texts, slow = _kinds(job), [], []
    if not kinds:
        return _unknown("latency", job.unmeasured)
    least = LATENCY[{gpu["kind"] for gpu in job.of("gpu").values()} == {"cuda"}]
    for kind, links, *_ in kinds:
        waits = [link["latency"] for link in links]
        # A message of so many bytes spends half of its time waiting (Hockney's n 1/2).
        half = median(link["latency"] * link["bandwidth"] for link in links)
        low, high = min(waits) * 1e6, max(waits) * 1e6
        texts.append(
            f"{kind}: {low:.0f} to {high:.0f} µs, half of a message's time at {size(half)}"
        )
        for link in links:
            like = _others(link, links, "latency")
            if link["latency"] > max(SLOW * like, like + least):
                slow.append(f"{_name(link)} {link['latency'] * 1e6:.0f} µs")
    text = "; ".join(texts)
    if slow:
        advice = "the same look as for bandwidth; busy cores of that host count here, too"
        return Verdict("latency", BAD, f"{', '.join(slow)}; in all {text}", advice)
    return Verdict("latency", GOOD, text)


def folder(job: Findings) -> Verdict:
    """All ranks see one folder, what is renamed in it, and can write."""
    found = job.of("folder")
    if not found:
        return _unknown("folder")
    errors = {r: f["error"] for r, f in found.items() if f["error"]}
    blind = [r for r, f in found.items() if not f["seen"]]
    late = [r for r, f in found.items() if f["seen"] and not f["renamed"]]
    if 0 in errors and len(blind) == len(found):
        advice = "choose a --folder that exists and that you may write"
        return Verdict("folder", BAD, f"rank 0 cannot write: {errors[0]}", advice)
    if blind:
        advice = "checkpoints need a file system that all hosts mount: not /tmp, not a local disk"
        return Verdict("folder", BAD, f"what rank 0 wrote is not seen by {listed(blind)}", advice)
    if late:
        advice = "mount without caching of names (NFS: lookupcache=none), or wait after a save"
        return Verdict("folder", BAD, f"a rename is not seen by {listed(late)}", advice)
    if errors:
        text = "; ".join(f"rank {r}: {e}" for r, e in errors.items())
        return Verdict("folder", BAD, text, "make room, raise the quota (quota -s), or permissions")
    kinds = Counter(f["type"] or "unknown" for f in found.values())
    text = f"{', '.join(kinds)}, written and seen by all"
    if set(kinds) & {"tmpfs", "ramfs"}:
        return Verdict("folder", NOTE, text, "it is memory: it goes with the host")
    return Verdict("folder", GOOD, text)


def locks(job: Findings) -> Verdict:
    """A lock that one rank holds keeps all others out."""
    found = {r: f for r, f in job.of("folder").items() if f["seen"] and f["locks"]}
    if not found:
        return _unknown("locks", "nobody saw the folder")
    by: dict[str, list[int]] = {}
    for rank, f in found.items():
        for name, wrong in f["locks"].items():
            if wrong:
                by.setdefault(f"{name}: {wrong}", []).append(rank)
    if by:
        advice = (
            "mount with locks for the whole cluster (Lustre: -o flock, NFS: 4 or with lockd); "
            "until then never let two jobs save into one folder"
        )
        text = "; ".join(f"{words} on {listed(ranks)}" for words, ranks in by.items())
        return Verdict("locks", BAD, text, advice)
    return Verdict("locks", GOOD, "flock and fcntl keep others out")


def space(job: Findings) -> Verdict:
    """What is needed fits into the folder."""
    found = {r: f for r, f in job.of("folder").items() if f.get("free") is not None}
    if not found:
        return _unknown("space", "no folder")
    full = {r: size(f["free"]) for r, f in found.items() if f["free"] < job.needs}
    if full:
        text = f"{', '.join(dict.fromkeys(full.values()))} free for {listed(full)}"
        advice = "delete old checkpoints, or choose another --folder"
        return Verdict("space", BAD, f"{text}, {size(job.needs)} wanted", advice)
    few = [r for r, f in found.items() if f["files"] is not None and f["files"] < 1000]
    if few:
        text = f"room for {found[few[0]]['files']} more files (inodes) for {listed(few)}"
        return Verdict("space", BAD, text, "delete small files, or choose another --folder")
    return Verdict("space", GOOD, f"{span(f['free'] for f in found.values())} free")


def _unknown(check: str, why: str = "") -> Verdict:
    return Verdict(check, NOTE, "not measured" + (f": {why}" if why else ""))


CHECKS: list[Callable[[Findings], Verdict]] = [
    answers, versions, environment, devices, cores, speed, clocks, host_memory, device_memory,
    shared_memory, limits, network, bandwidth, latency, folder, locks, space,
]  # fmt: skip


def verdicts(job: Findings) -> list[Verdict]:
    """All rows of the table, in the order of CHECKS."""
    return [check(job) for check in CHECKS]
