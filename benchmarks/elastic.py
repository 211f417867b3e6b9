"""Benchmark of our agent against torchrun: seconds and steps that a fault costs on two nodes.

    python benchmarks/elastic.py            # a table; a quarter of an hour on two cores
    python benchmarks/elastic.py --json     # {"rows": [{"case", "against", "ranks", …}, …]}
    python benchmarks/elastic.py --quick    # one fault, one time each: only a smoke test

Two agents on this machine's loopback stand for two nodes. They train a small GPT, with a checkpoint
after every 5 steps of 0.2 s; the fault follows step 12. seconds: from the last step before the
fault to the first step after it, of ours and of theirs; None if training did not go on. lost: steps
that were repeated. after: ranks that train then. Both launchers have the same timeouts: 5 s for a
silent agent, 2 s for more nodes to join; gloo waits 5 s for a rank that hangs.

ratio: median and quartiles over the repeats of ours over theirs. A restart is mostly the import of
torch, which both have to wait for, so the ratio says little about the launchers, and the seconds
say more. floor: seconds until the first step of the same script with the same ranks from the same
checkpoint, started by a plain loop over Popen; the share is the floor over our seconds.

    python benchmarks/elastic.py --ranks 4 --repeats 2 --json > code/shardlab/elastic/restarts.json

writes the table of the lesson.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import psutil
import torch
from side_by_side import parse_options, ratio

from shardlab.common import show
from shardlab.elastic.job import find_free_port

AT, EVERY, SLEEP, TIMEOUT = 12, 5, 0.2, 5.0  # fault's step, steps a save; seconds of step, gloo
PATIENCE, LAST_CALL = 5, 2
TRAIN = f"""
import json, os, sys, time
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from shardlab.common import text
from shardlab.checkpoint import Checkpoints, Training
from shardlab.data_parallel import DataParallel
from shardlab.gpt.model import GPT, PRESETS, loss

folder, fault = Path(sys.argv[1]), sys.argv[2]

@record
def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds={TIMEOUT}))
    rank, size, batch = dist.get_rank(), dist.get_world_size(), 8
    torch.manual_seed(0)
    model = DataParallel(GPT(PRESETS["nano"]), dist.group.WORLD)
    training = Training(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    store = Checkpoints(folder / "checkpoints", dist.group.WORLD)
    if store.list_steps():
        store.load(training)
    share = batch // size
    while True:
        tokens, targets = text.get_batch(32, share, start=training.samples + rank * share)
        training.optimizer.zero_grad()
        value = loss(model(tokens), targets)
        value.backward()
        training.optimizer.step()
        training.step, training.samples = training.step + 1, training.samples + batch
        time.sleep({SLEEP})
        mean = value.detach() / size
        dist.all_reduce(mean)
        if rank == 0:
            line = {{"time": time.time(), "step": training.step, "ranks": size}}
            line["loss"] = mean.item()
            with open(folder / "steps.jsonl", "a") as file:
                print(json.dumps(line), file=file)
        if training.step % {EVERY} == 0:
            store.save(training)
        if training.step == {AT} and rank == size - 1 and not (folder / "fault").exists():
            if fault in ("raises", "hangs"):
                (folder / "fault").write_text("")
            if fault == "raises":
                raise RuntimeError("a bad sample")
            if fault == "hangs":
                time.sleep(1000)

main()
"""


@dataclass(frozen=True)
class Case:
    """Case: what happens after step 12, and the fewest nodes that the job may shrink to."""

    name: str
    words: str
    least: int = 2
    late: bool = False  # the second node joins only after the fault's step
    shared: bool = False  # torchrun's default: the ranks of all rounds share the agents' store


CASES = [
    Case("rank", "a rank is killed"),
    Case("raises", "a rank raises"),
    Case("hangs", "a rank hangs"),
    Case("node", "a node is lost: agent and ranks", 1),
    Case("agent", "an agent alone is killed", 1),
    Case("leaves", "SIGTERM to an agent", 1),
    Case("comes", "a second node joins", 1, late=True),
    Case("host", "the store's node is lost", 1),
    Case("rank", "a rank is killed, torchrun's default store", shared=True),
]


def start_agent(who: str, case: Case, number: int, ranks: int, port: int, folder: Path) -> Any:
    """Start one agent, ours or torchrun's."""
    at, nodes = f"127.0.0.1:{port}", f"{case.least}:2"
    if who == "ours":
        command = ["-m", "shardlab", "cluster", "run", "--nodes", nodes, "--ranks", f"{ranks}"]
        command += ["--at", at, "--patience", f"{PATIENCE}", "--last-call", f"{LAST_CALL}"]
    else:
        conf = f"last_call_timeout={LAST_CALL},keep_alive_interval=1"
        conf += f",keep_alive_max_attempt={PATIENCE}"
        command = ["-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={ranks}"]
        command += ["--rdzv-backend=c10d", "--rdzv-id=job", f"--rdzv-endpoint={at}"]
        command += ["--local-addr=127.0.0.1", "--max-restarts=3", f"--rdzv-conf={conf}"]
    (folder / "train.py").write_text(TRAIN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "0" if case.shared else "1"
    with open(folder / f"agent{number}.log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, *command, str(folder / "train.py"), str(folder), case.name],
            stdout=log,
            stderr=log,
            env=environment,
        )


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """Return rank 0's record of each step."""
    with suppress(OSError):
        lines = (folder / "steps.jsonl").read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]
    return []


def run_case(who: str, case: Case, ranks: int, limit: float = 100.0) -> dict[str, Any]:
    """Run one job with its fault; return the seconds and steps lost, and the ranks after it."""
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), find_free_port("127.0.0.1")
        start = lambda number: start_agent(who, case, number, ranks // 2, port, folder)  # noqa: E731
        agents, started = [start(0)], set()
        try:
            if not case.late:
                wait_for(lambda: is_listening(agents[0], port), agents, limit)  # hosts the store
                agents.append(start(1))
            wait_for(
                lambda: max([s["step"] for s in read_steps(folder)], default=0) >= AT, agents, limit
            )
            for one in agents:
                started |= {*psutil.Process(one.pid).children(recursive=True)}
            inject_fault(case, agents, start)
            before = read_steps(folder)
            known = len(before)
            if case.name in ("raises", "hangs"):
                known = AT
            found = lambda: find_restart(read_steps(folder), known, before[0]["ranks"], case)  # noqa: E731
            wait_for(lambda: found() is not None, agents, limit)
            result = found() or {"seconds": None, "lost": None, "after": 0}
            time.sleep(3 * SLEEP)
            result["same"] = has_same_losses(read_steps(folder))
            return result
        finally:
            for one in agents:
                with suppress(psutil.NoSuchProcess):
                    started |= {*psutil.Process(one.pid).children(recursive=True)}
                one.kill()
                one.wait()
            for process in started:
                with suppress(psutil.NoSuchProcess):
                    process.kill()


def is_listening(agent: subprocess.Popen, port: int) -> bool:
    """Return True if this process listens at this port already."""
    found = psutil.Process(agent.pid).net_connections("tcp") if agent.poll() is None else []
    return any(one.status == "LISTEN" and one.laddr.port == port for one in found)


def wait_for(done: Any, agents: list[Any], limit: float) -> None:
    """Wait until `done()` is true, the limit is over, or all agents have ended."""
    end = time.monotonic() + limit
    while not done() and time.monotonic() < end and any(one.poll() is None for one in agents):
        time.sleep(0.1)


def inject_fault(case: Case, agents: list[Any], start: Any) -> None:
    """Cause the fault, unless the training script does so itself."""
    if case.name == "comes":
        agents.append(start(1))
        return
    victim = psutil.Process(agents[0 if case.name == "host" else -1].pid)
    ranks = victim.children()
    if case.name == "rank":
        ranks[-1].kill()
    if case.name == "leaves":
        victim.terminate()
    if case.name in ("node", "agent", "host"):
        victim.kill()
    if case.name in ("node", "host"):
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.kill()


def find_restart(
    lines: list[dict[str, Any]], known: int, size: int, case: Case
) -> dict[str, Any] | None:
    """Return the first step after a restart, where the step or the number of ranks jumps."""
    for last, new in zip(lines[:-1], lines[1:], strict=True):
        if new["step"] != last["step"] + 1 or new["ranks"] != last["ranks"]:
            seconds, lost = new["time"] - last["time"], last["step"] + 1 - new["step"]
            return {"seconds": round(seconds, 1), "lost": lost, "after": new["ranks"]}
    if case.name == "agent" and len(lines) > known + 60:  # the failed agent went unnoticed
        return {"seconds": 0.0, "lost": 0, "after": lines[-1]["ranks"]}
    return None


def has_same_losses(lines: list[dict[str, Any]]) -> bool:
    """Return True if each step that was repeated had the same loss both times, up to rounding."""
    losses: dict[int, list[float]] = {}
    for line in lines:
        losses.setdefault(line["step"], []).append(line["loss"])
    return all(max(found) - min(found) < 1e-4 for found in losses.values())


def time_bare_start(ranks: int) -> float:
    """Return the seconds until the script's first step, started by a loop, from a checkpoint."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(TRAIN)
        (folder / "fault").write_text("")
        for least in (EVERY + 1, EVERY + 2):
            begin, already = time.time(), len(read_steps(folder))
            port, processes = find_free_port("127.0.0.1"), []
            for rank in range(ranks):
                given = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank}
                given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
                environment = {**os.environ, **{k: str(v) for k, v in given.items()}}
                command = [sys.executable, str(folder / "train.py"), name, "none"]
                quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
                processes.append(subprocess.Popen(command, env=environment, **quiet))
            wait_for(lambda at=already + 1: len(read_steps(folder)) > at - 1, processes, 100)
            first = read_steps(folder)[already]["time"] - begin
            wait_for(lambda n=least: read_steps(folder)[-1]["step"] >= n, processes, 100)
            for process in processes:
                process.kill()
                process.wait()
        return first


def make_row(case: Case, ranks: int, floor: float, found: dict[str, list[dict]]) -> dict[str, Any]:
    """Return one row of the result; the module's docstring explains the columns."""
    pairs = list(zip(found["ours"], found["torchrun"], strict=True))
    both = [(a["seconds"], b["seconds"]) for a, b in pairs if a["seconds"] and b["seconds"]]
    ratios = [a / b for a, b in both]
    middle = {
        who: [one["seconds"] for one in runs if one["seconds"] is not None]
        for who, runs in found.items()
    }
    whole = {who: len(middle[who]) == len(runs) for who, runs in found.items()}
    seconds = {
        who: round(statistics.median(middle[who]), 1) if middle[who] else None for who in found
    }
    stated = ratio(ratios) if ratios and all(whole.values()) else {"ratio": None, "quartiles": []}
    return {
        "case": case.words,
        "against": "torchrun",
        "ranks": ranks,
        "link": "loopback",
        **stated,
        "floor": round(floor / seconds["ours"], 4) if seconds["ours"] else None,
        "seconds": list(seconds.values()),
        "recovered": [f"{len(middle[who])} of {len(runs)}" for who, runs in found.items()],
        "lost": [
            max(one["lost"] for one in runs) if whole[w] else None for w, runs in found.items()
        ],
        "after": [runs[-1]["after"] if whole[w] else None for w, runs in found.items()],
        "same": all(one["same"] for runs in found.values() for one in runs),
    }


def main(arguments: list[str] | None = None) -> None:
    chosen = parse_options(__doc__, arguments, kinds=["loopback"])
    cases = CASES[:1] if chosen.quick else CASES
    rows, starts = [], {}
    for ranks in chosen.ranks:
        starts[ranks] = round(time_bare_start(ranks), 1)
        for case in cases:
            found: dict[str, list[dict]] = {"ours": [], "torchrun": []}
            for _ in range(chosen.repeats):
                for who in found:
                    found[who].append(run_case(who, case, ranks))
                    print(f"{case.words}, {ranks} ranks, {who}: {found[who][-1]}", file=sys.stderr)
            rows.append(make_row(case, ranks, starts[ranks], found))
    if chosen.json:
        about = {"date": date.today().isoformat(), "torch": torch.__version__}
        about |= {"python": platform.python_version(), "cores": os.cpu_count()}
        print(json.dumps(about | {"bare start (s)": starts, "rows": rows}, indent=1))
        return
    head = ["what happens", "ranks", "ours (s)", "torchrun (s)", "steps lost", "ranks after"]
    shown = lambda both: " / ".join("–" if x is None else f"{x}" for x in both)  # noqa: E731
    show.table(
        [
            [r["case"], r["ranks"], *("–" if s is None else s for s in r["seconds"])]
            + [shown(r["lost"]), shown(r["after"])]
            for r in rows
        ],
        head,
    )


if __name__ == "__main__":
    main()
