"""An agent on each node: it starts the node's ranks, watches them, and starts them again.

    python -m shardlab cluster run --nodes 2 --ranks 4 --at node1:29400 train.py --steps 100
    python -m shardlab cluster run --nodes 1:2 --ranks 4 --at node1:29400 --logs logs train.py

The same line runs on every node, and the same script runs under torchrun. In this order:

1. `Order` and `Report`: the host says what all shall do, each agent says how its ranks are;
2. `Ranks`, the processes of one node: how they start, fail and end;
3. `Meeting`, a TCPStore in which orders and reports lie;
4. `Host`, which reads the reports and decides; 5. `run`, the loop of an agent.

The host is the agent on the node that `at` names, always node 0. When it is lost, so is the job.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from .job import Job, free_port, listen, within

TICK = 0.05  # seconds between two looks at ranks and store
# Runs before a rank's program, in little time: without settings of the user's, and packages.
_BORN = (sys.executable, "-IS", str(Path(__file__).with_name("born.py")))

# What the host and the agents say to one another.


@dataclass(frozen=True)
class Order:
    """What the host wants of everyone. It holds until there is one with a higher number."""

    number: int = 0
    kind: str = "stop"  # end your ranks and be ready; or "run" them; or "end" the job
    round: int = -1  # of "run": counts the starts, so a restarted rank never meets a dead one
    agents: tuple[int, ...] = ()  # who is in this round: the first one is node 0
    ranks: tuple[int, ...] = ()  # of each of them
    port: int = 0  # MASTER_PORT, a fresh one for each round
    why: str = ""
    status: int = 0  # of "end"

    def environment(self, job: Job, agent: int, local: int) -> dict[str, str]:
        """What a rank finds in its environment: the names that torchrun has made common."""
        node = self.agents.index(agent)
        given = {
            "RANK": sum(self.ranks[:node]) + local,
            "WORLD_SIZE": sum(self.ranks),
            "LOCAL_RANK": local,
            "LOCAL_WORLD_SIZE": self.ranks[node],
            "GROUP_RANK": node,
            "MASTER_ADDR": job.address[0],
            "MASTER_PORT": self.port,
            "TORCHELASTIC_RUN_ID": job.name,
            "TORCHELASTIC_RESTART_COUNT": self.round,
            "TORCHELASTIC_MAX_RESTARTS": job.restarts,
            "TORCHELASTIC_USE_AGENT_STORE": False,  # rank 0 opens a store on MASTER_PORT
        }
        return {name: str(value) for name, value in given.items()}


@dataclass(frozen=True)
class Report:
    """How an agent's ranks are. Its number of beats is its heartbeat: it grows with each report."""

    beat: int = 0
    obeyed: int = -1  # number of the order that it follows
    state: str = "ready"  # no ranks; "running"; all "done"; one "failed"; the agent has "left"
    ranks: int = 1
    errors: tuple[dict, ...] = ()  # of its last round


# The ranks of one node.


class Ranks:
    """This node's processes of one round, and what went wrong in it."""

    def __init__(self, job: Job):
        self.job = job
        self.processes: dict[int, subprocess.Popen] = {}  # by rank
        self.errors: dict[int, dict] = {}
        self.files: dict[int, Path] = {}  # where a rank's @record leaves its error

    def start(self, order: Order, agent: int) -> None:
        """Start all ranks that `order` has for this node."""
        self.errors, self.files = {}, {}
        for local in range(self.job.ranks):
            environment = order.environment(self.job, agent, local)
            rank, output = int(environment["RANK"]), None
            if self.job.logs:
                folder = self.job.logs / f"round-{order.round}"
                folder.mkdir(parents=True, exist_ok=True)
                output = open(folder / f"rank-{rank}.log", "wb")
                self.files[rank] = folder / f"rank-{rank}.error.json"
                environment["TORCHELASTIC_ERROR_FILE"] = str(self.files[rank])
            self.processes[rank] = subprocess.Popen(
                [*_BORN, str(os.getpid()), *self.job.command],
                env={"OMP_NUM_THREADS": "1", **os.environ, **environment},
                stdout=output,
                stderr=output and subprocess.STDOUT,
                start_new_session=True,  # a group of its own, with all that it will start
            )
            if output:
                output.close()

    def state(self) -> str:
        """As in `Report`; notes the errors of those that have failed since the last look."""
        codes = {rank: process.poll() for rank, process in self.processes.items()}
        for rank in [r for r, code in codes.items() if code and r not in self.errors]:
            self.errors[rank] = self._error(rank, codes[rank])
        if self.errors and codes:
            return "failed"
        if any(code is None for code in codes.values()):
            return "running"
        return "done" if codes else "ready"

    def _error(self, rank: int, code: int) -> dict:
        what = signal.Signals(-code).name if code < 0 else f"status {code}"
        error = {"rank": rank, "killed": code < 0 and -code != signal.SIGABRT, "time": time.time()}
        with suppress(OSError, ValueError, KeyError, TypeError):
            path = self.files[rank]
            what = json.loads(path.read_text())["message"]["message"]
            error["time"] = path.stat().st_mtime  # finer than the whole seconds in the file
        return error | {"what": str(what)}

    def send(self, number: int) -> None:
        """Pass a signal on to all ranks that still run."""
        for process in self.processes.values():
            process.send_signal(number)  # does nothing to one that has ended

    def end(self, meanwhile: Callable[[], None]) -> None:
        """SIGTERM, the seconds of grace, and SIGKILL for what is left, children of ranks too."""
        self.send(signal.SIGTERM)
        limit = time.monotonic() + self.job.grace
        while any(p.poll() is None for p in self.processes.values()) and time.monotonic() < limit:
            meanwhile()
            time.sleep(TICK)
        self.kill()

    def kill(self) -> None:
        """End all ranks at once, and forget them."""
        for process in self.processes.values():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.processes.clear()


# Where they meet.


class Meeting:
    """A TCPStore at `job.at`: the agent there serves it, all others connect to it.

    It listens at that address alone. Raises ValueError where another job has met already, or
    nobody answers within the seconds of `job.join`.
    """

    def __init__(self, job: Job):
        self.job, self.beat, self.silent = job, 0, 0
        listening = listen(*job.address)
        self.agent = 0 if listening else -1
        wait = timedelta(seconds=job.join)
        how = {"world_size": None, "timeout": wait, "wait_for_workers": False}
        if listening:
            how |= {"is_master": True, "master_listen_fd": listening.detach()}
        self.store = within(job.join, lambda: dist.TCPStore(*job.address, **how))
        if self.store and self.agent == 0:
            self.give(Order())
            self.store.set("job", job.name)  # last: who finds it finds the rest, too
        name = within(job.join, lambda: self.store.get("job").decode())
        if name is None:
            words = f"at={job.at!r}: no agent answered there within {job.join:g} s"
            raise ValueError(f"{words}; allowed is an address of one of the nodes")
        if name != job.name:
            raise ValueError(f"name={job.name!r}: at {job.at} meets the job {name!r}")
        if self.agent < 0:
            self.agent = self.store.add("agents", 1)

    def order(self) -> Order:
        """The host's last word."""
        values = json.loads(self.store.get("order"))
        return Order(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})

    def give(self, order: Order) -> None:
        """Give an order, as the host."""
        self.store.set("order", json.dumps(asdict(order)))

    def report(self, report: Report) -> None:
        """Say how this agent's ranks are: a sign of life as well, of the agent and of the store."""
        self.beat += 1
        report = replace(report, beat=self.beat, ranks=self.job.ranks)
        self.store.set(f"agent {self.agent}", json.dumps(asdict(report)))
        self.silent = 0  # the store has answered

    def reports(self) -> dict[int, Report]:
        """The last report of every agent that has ever come."""
        names = {agent: f"agent {agent}" for agent in range(1 + self.store.add("agents", 0))}
        there = {agent: name for agent, name in names.items() if self.store.check([name])}
        return {agent: Report(**json.loads(self.store.get(n))) for agent, n in there.items()}


# Who decides.


@dataclass
class Host:
    """Turns reports into orders. It knows no processes and no store: times are arguments."""

    job: Job
    order: Order = field(default_factory=Order)
    heard: dict[int, tuple[int, float]] = field(default_factory=dict)  # last beat, and when
    since: float | None = None  # when the order was given
    came: tuple[int, float] = (0, 0.0)  # how many are ready, and since when so many
    restarts: int = 0
    failed: bool = False  # whether a rank failed in the last round

    def decide(self, reports: dict[int, Report], now: float) -> Order | None:
        """The next order, or None while the last one holds."""
        self.since = now if self.since is None else self.since
        for agent, report in reports.items():  # clocks of other nodes do not matter
            if self.heard.get(agent, (None,))[0] != report.beat:
                self.heard[agent] = report.beat, now
        alive = {
            agent: report
            for agent, report in reports.items()
            if now - self.heard[agent][1] < self.job.patience and report.state != "left"
        }
        choose = {"run": self._watch, "stop": self._gather}.get(self.order.kind)
        new = choose(alive, now) if choose else None
        if new:
            self.order, self.since, self.came = new, now, (0, now)
        return new

    def _next(self, kind: str, why: str, **more: object) -> Order:
        return replace(self.order, number=self.order.number + 1, kind=kind, why=why, port=0, **more)

    def _watch(self, alive: dict[int, Report], now: float) -> Order | None:
        """While ranks run: is anyone lost, has a rank failed, are all done, has a node come?"""
        members = self.order.agents
        if lost := [agent for agent in members if agent not in alive]:
            return self._next("stop", f"agent {lost[0]} is silent or has left")
        states = [alive[a].state for a in members if alive[a].obeyed == self.order.number]
        if "failed" in states:
            self.failed = True
            return self._next("stop", "a rank failed")
        if states == ["done"] * len(members):
            return self._next("end", "all ranks are done", status=0)
        new = [agent for agent in alive if agent not in members]
        if new and len(members) < self.job.nodes[1] and "done" not in states:
            return self._next("stop", f"agent {new[0]} has come")
        return None

    def _gather(self, alive: dict[int, Report], now: float) -> Order | None:
        """Between two rounds: once nobody has ranks any more, start with those who are there."""
        if any(r.obeyed != self.order.number or r.state != "ready" for r in alive.values()):
            return None  # somebody's ranks still run
        why = self.order.why
        if self.failed and all(agent in alive for agent in self.order.agents):
            why = first_cause(alive)
            if self.restarts == self.job.restarts:
                why = f"{self.restarts} restarts are used up: {why}"
                return self._next("end", why, status=1)
            self.restarts += 1
        elif self.failed:  # a lost node fails its neighbours' ranks: that counts for none
            lost = [agent for agent in self.order.agents if agent not in alive]
            why = f"agent {lost[0]} is silent or has left"
        self.failed, self.order = False, replace(self.order, why=why)
        if len(alive) != self.came[0]:
            self.came = len(alive), now
        least, most = self.job.nodes
        if len(alive) < least:
            if now - self.since < self.job.join:
                return None
            why = f"{len(alive)} of at least {least} nodes came within {self.job.join:g} s"
            return self._next("end", why, status=1)
        if len(alive) < most and now - self.came[1] < self.job.last_call:
            return None
        members = tuple(sorted(alive))[:most]
        more = {"agents": members, "ranks": tuple(alive[agent].ranks for agent in members)}
        return self._next("run", why, round=self.order.round + 1, **more)


def first_cause(reports: dict[int, Report]) -> str:
    """The error that came first over all nodes: the others are mostly its consequences.

    A rank that was killed is never another's victim, unless it aborted itself, as nccl's watchdog
    does. Among the rest the earliest time counts, so the nodes' clocks have to agree.
    """
    errors = [error for report in reports.values() for error in report.errors]
    if not errors:
        return "a rank failed"
    first = min(errors, key=lambda error: (not error["killed"], error["time"]))
    return f"rank {first['rank']} was first to fail: {first['what']}"


# The agent.


def run(job: Job, say: Callable[[str], None] = print) -> int:
    """Be the agent of this node until the job ends; return the exit status of this process.

    0: all ranks are done, or the agent got SIGTERM and its ranks ended with 0. 1: restarts are used
    up, or too few nodes came, or the store is gone. 143: SIGTERM, and a rank did not end with 0.
    SIGTERM and SIGINT take this node out of the job, the host's end it; SIGUSR1 goes to the ranks.
    """
    meeting, ranks, asked, ended = Meeting(job), Ranks(job), [], threading.Event()
    host = Host(job) if meeting.agent == 0 else None
    order, status = Order(-1), 1
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: asked.append(number))
    signal.signal(signal.SIGUSR1, lambda number, _: ranks.send(number))
    threading.Thread(target=_watch, args=(meeting, ranks, say, ended), daemon=True).start()

    def pulse(state: str = "running") -> None:
        """Say how the ranks are; the host then decides."""
        meeting.report(Report(0, order.number, state, errors=tuple(ranks.errors.values())))
        new = host and host.decide(meeting.reports(), time.monotonic())
        if new:
            port = free_port(job.address[0]) if new.kind == "run" else 0
            meeting.give(replace(new, port=port))

    try:
        while order.kind != "end" and not asked:
            new, state = meeting.order(), ranks.state()
            if new.number != order.number:
                ranks.end(pulse)
                order, state = new, "ready"
                if order.kind == "run" and meeting.agent in order.agents:
                    size = f"world size {sum(order.ranks)}, nodes {len(order.agents)}"
                    why = f" ({order.why})" if order.why else ""
                    say(f"agent {meeting.agent}, round {order.round}: {size}{why}")
                    ranks.start(order, meeting.agent)
                    state = "running"
            pulse(state)
            time.sleep(TICK)
        status = order.status
        if order.kind != "end":  # a planned stop, with all ranks at 0, is no failure
            processes = list(ranks.processes.values())
            ranks.end(pulse)
            status = 143 if any(process.returncode for process in processes) else 0
        elif status:
            say(f"agent {meeting.agent}: {order.why}")
        pulse("left")
        if host:
            _last(meeting, host, order)
    except RuntimeError:  # of the store's
        say(f"agent {meeting.agent}: the store at {job.at} is gone")
    finally:
        ended.set()
        ranks.kill()
    return status


def _watch(
    meeting: Meeting, ranks: Ranks, say: Callable[[str], None], ended: threading.Event
) -> None:
    """In a thread: leave when the store is silent. Its calls wait for ever for a host cut off."""
    while not ended.wait(TICK):
        meeting.silent += 1  # counted, not timed: an agent that was stopped may go on
        if meeting.silent * TICK > meeting.job.patience:
            say(f"agent {meeting.agent}: the store at {meeting.job.at} is silent")
            ranks.kill()
            os._exit(1)


def _last(meeting: Meeting, host: Host, order: Order) -> None:
    """The host goes last: the others still want to read that the job has ended."""
    if order.kind != "end":
        meeting.give(host._next("end", "the host was told to leave", status=1))
    job, limit = host.job, time.monotonic() + host.job.grace + host.job.patience
    while time.monotonic() < limit:
        reports, now = meeting.reports(), time.monotonic()
        host.decide(reports, now)
        heard = [agent for agent in reports if now - host.heard[agent][1] < job.patience]
        if all(reports[agent].state == "left" for agent in heard):
            return
        time.sleep(TICK)
