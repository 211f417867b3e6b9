"""The agent of an elastic launcher: it starts, monitors and restarts its node's ranks.

    python -m shardlab cluster run --nodes 2 --ranks 4 --at node1:29400 train.py --steps 100
    python -m shardlab cluster run --nodes 1:2 --ranks 4 --at node1:29400 --logs logs train.py

The same command runs on every node, and the same script runs under torchrun. Each agent publishes
its ranks' state in a `Report`. The agent on the node that `at` names, always node 0, is also the
host: it publishes an `Order` for all agents. `host` defines both, and makes the decisions. Here are

1. `Ranks`, the processes of one node: how they start, fail and end;
2. `Meeting`, a TCPStore that holds the order and the reports;
3. `Agent`, which follows the orders, and on node 0 asks the host for them.

If the host's node is lost, the job ends.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from . import born, keep
from .host import Failure, Host, Order, Report, State
from .job import Job, free_port, listen

TICK = 0.05  # seconds between two polls of ranks and store
TERMINATED = 128 + signal.SIGTERM  # the exit status that shells report after SIGTERM
# Helper programs; "-IS" makes them start fast, without user settings and site packages.
_BORN, _KEEP = ((sys.executable, "-IS", module.__file__) for module in (born, keep))
# Signals that a process's own errors raise; NCCL's watchdog calls abort(), which sends SIGABRT.
CRASHES = signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT

# The ranks of one node.


class Ranks:
    """This node's rank processes in one round, and their failures."""

    def __init__(self, job: Job):
        self.job = job
        self.processes: dict[int, subprocess.Popen] = {}  # by rank
        self.ended: dict[int, float] = {}  # end time by rank, by this node's clock
        self.keeper: subprocess.Popen | None = None  # kills leftover ranks, also if the agent died
        self.failures: dict[int, Failure] = {}
        self.files: dict[int, Path] = {}  # the file to which a rank's @record writes its error

    def start(self, order: Order, agent: int) -> None:
        """Start all ranks that `order` assigns to this node."""
        self.failures, self.files, self.ended = {}, {}, {}
        self.keeper = subprocess.Popen(_KEEP, stdin=subprocess.PIPE, start_new_session=True)
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
                start_new_session=True,  # its own session, which includes its children
            )
            self.keeper.stdin.write(b"%d\n" % self.processes[rank].pid)
            self.keeper.stdin.flush()
            one = self.ended, rank, self.processes[rank]
            threading.Thread(target=_note_end, args=one, daemon=True).start()
            if output:
                output.close()

    def state(self) -> State:
        """Return the state of this node's ranks; record the failures since the last call."""
        codes = {rank: process.poll() for rank, process in self.processes.items()}
        for rank in [r for r, code in codes.items() if code and r not in self.failures]:
            self.failures[rank] = self._failure(rank, codes[rank])
        if self.failures and codes:
            return "failed"
        if any(code is None for code in codes.values()):
            return "running"
        return "done" if codes else "ready"

    def _failure(self, rank: int, code: int) -> Failure:
        killed = code < 0 and -code not in CRASHES
        what = signal.Signals(-code).name if code < 0 else f"status {code}"
        with suppress(OSError, ValueError, KeyError, TypeError):
            path = self.files[rank]
            what = str(json.loads(path.read_text())["message"]["message"])
            when = path.stat().st_mtime  # more precise than the whole seconds in the file
            return Failure(rank, killed, when, what)
        return Failure(rank, killed, self.ended.get(rank, time.time()), what)

    def send(self, number: int) -> None:
        """Forward a signal to all ranks that still run."""
        for process in self.processes.values():
            process.send_signal(number)  # does nothing if the process has ended

    def end(self, meanwhile: Callable[[], None]) -> None:
        """Send SIGTERM, wait `job.grace` seconds, then kill the remaining ranks and children."""
        self.send(signal.SIGTERM)
        limit = time.monotonic() + self.job.grace
        while any(p.poll() is None for p in self.processes.values()) and time.monotonic() < limit:
            meanwhile()
            time.sleep(TICK)
        self.kill()

    def kill(self) -> None:
        """Kill all ranks and their child processes at once, and forget them."""
        if self.keeper:
            self.keeper.communicate()  # closes the keeper's input, so that it kills the sessions
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.processes, self.keeper = {}, None


def _note_end(ended: dict[int, float], rank: int, process: subprocess.Popen) -> None:
    """Record a rank's end time, in a thread: polls by TICK are too coarse to order failures."""
    process.wait()
    ended[rank] = time.time()


# The store shared by the agents.


class Meeting:
    """A TCPStore at `job.at`: the agent on that node serves it, and all others connect.

    The store listens at that address only. Raises ValueError if another job uses the address, if
    this job's only node is there already, or if no agent answers within `job.join` seconds.
    """

    def __init__(self, job: Job):
        self.job, self.beat, self.silent = job, 0, 0
        listening = listen(*job.address)
        self.agent = 0 if listening else -1
        wait = timedelta(seconds=job.join)
        how = {"world_size": None, "timeout": wait, "wait_for_workers": False}
        if listening:
            how |= {"is_master": True, "master_listen_fd": listening.detach()}
        mine = [job.name, shlex.join(job.command[1:]), "{}:{}".format(*job.nodes)]
        try:
            self.store = dist.TCPStore(*job.address, **how)
            if listening:
                self.give(Order())
                self.store.set("job", json.dumps(mine))  # last: agents wait for it, then read all
                return
            found = json.loads(self.store.get("job"))
        except (dist.DistError, RuntimeError):
            words = f"at={job.at!r}: no agent answered there within {job.join:g} s"
            raise ValueError(f"{words}; allowed is an address of one of the nodes") from None
        name, command, nodes = found
        words = f"meets job {name!r} of {nodes} nodes, {command}; another job needs another port"
        if name != job.name:
            raise ValueError(f"name={job.name!r}: at {job.at} {words}")
        if found != mine or job.nodes[1] == 1:  # a second agent of a one-node job could never start
            raise ValueError(f"at={job.at!r}: here {words}")
        self.agent = self.store.add("agents", 1)

    def order(self) -> Order:
        """Read the host's current order."""
        return Order.read(self.store.get("order"))

    def give(self, order: Order) -> None:
        """Publish an order, as the host."""
        self.store.set("order", json.dumps(asdict(order)))

    def report(self, report: Report) -> None:
        """Publish the state of this agent's ranks; each report is also the agent's heartbeat."""
        self.beat += 1
        report = replace(report, beat=self.beat, ranks=self.job.ranks)
        self.store.set(f"agent {self.agent}", json.dumps(asdict(report)))
        self.silent = 0  # the store has answered

    def reports(self) -> dict[int, Report]:
        """Return the last report of every agent that ever connected."""
        names = {agent: f"agent {agent}" for agent in range(1 + self.store.add("agents", 0))}
        there = {agent: name for agent, name in names.items() if self.store.check([name])}
        return {agent: Report.read(self.store.get(name)) for agent, name in there.items()}


# The agent, which follows the host's orders.


class Agent:
    """This node's part of a job: its ranks, its access to the store and, on node 0, the host."""

    def __init__(self, job: Job, say: Callable[[str], None]):
        self.job, self.say = job, say
        self.meeting, self.ranks = Meeting(job), Ranks(job)
        self.name = f"agent {self.meeting.agent}"
        self.host = Host(job) if self.meeting.agent == 0 else None
        self.order = Order(-1)  # the order that this agent follows
        self.told_to_leave = self.ended = False

    def run(self) -> int:
        """Follow orders until the job ends; return the exit status: see `run`."""

        def leave(*_: Any) -> None:
            self.told_to_leave = True

        signal.signal(signal.SIGTERM, leave)
        signal.signal(signal.SIGINT, leave)
        signal.signal(signal.SIGUSR1, lambda number, _: self.ranks.send(number))
        threading.Thread(target=self._leave_when_silent, daemon=True).start()
        try:
            while self.order.kind != "end" and not self.told_to_leave:
                order = self.meeting.order()
                if order.number != self.order.number:
                    self._obey(order)
                self._pulse(self.ranks.state())
                time.sleep(TICK)
            return self._leave()
        except RuntimeError:  # raised by the store
            self.say(f"{self.name}: the store at {self.job.at} is gone")
            return 1
        finally:
            self.ended = True
            self.ranks.kill()

    def _obey(self, order: Order) -> None:
        """End the ranks of the last round, and start the ranks of a new round."""
        self.ranks.end(self._pulse)
        self.order = order
        if order.kind == "run" and self.meeting.agent in order.agents:
            size = f"world size {sum(order.ranks)}, nodes {len(order.agents)}"
            why = f" ({order.why})" if order.why else ""
            self.say(f"{self.name}, round {order.round}: {size}{why}")
            self.ranks.start(order, self.meeting.agent)
        elif order.kind == "run":
            self.say(f"{self.name}, round {order.round}: spare, the round has its nodes")

    def _pulse(self, state: State = "running") -> None:
        """Publish the ranks' state; on the host, decide and publish the next order."""
        failures = tuple(self.ranks.failures.values())
        self.meeting.report(Report(0, self.order.number, state, failures=failures))
        new = self.host and self.host.decide(self.meeting.reports(), time.monotonic())
        if new:
            port = free_port(self.job.address[0]) if new.kind == "run" else 0
            self.meeting.give(replace(new, port=port))

    def _leave(self) -> int:
        """Leave a job that has ended, or after SIGTERM; return the exit status."""
        status = self.order.status
        if self.order.kind != "end":  # after SIGTERM, ranks that all exit with 0 are no failure
            processes = list(self.ranks.processes.values())
            self.ranks.end(self._pulse)
            status = TERMINATED if any(process.returncode for process in processes) else 0
        elif status:
            self.say(f"{self.name}: {self.order.why}")
        self._pulse("left")
        if self.host:
            self._leave_last(self.host)
        return status

    def _leave_last(self, host: Host) -> None:
        """Wait as the host until all other agents have left: they must read the last order."""
        if self.order.kind != "end":
            self.meeting.give(host.next("end", "the host was told to leave", status=1))
        limit = time.monotonic() + self.job.grace + self.job.patience
        while time.monotonic() < limit:
            reports, now = self.meeting.reports(), time.monotonic()
            host.decide(reports, now)
            if all(reports[agent].state == "left" for agent in host.audible(reports, now)):
                return
            time.sleep(TICK)

    def _leave_when_silent(self) -> None:
        """Exit if the store is silent, in a thread: calls to an unreachable store block forever."""
        while not self.ended:
            time.sleep(TICK)
            self.meeting.silent += 1  # counts ticks, not time: a suspended agent may continue
            if self.meeting.silent * TICK > self.job.patience and not self.ended:
                self.say(f"{self.name}: the store at {self.job.at} is silent")
                self.ranks.kill()
                os._exit(1)


def run(job: Job, say: Callable[[str], None] = print) -> int:
    """Run this node's agent until the job ends; return the exit status of this process.

    0: all ranks are done, or the agent got SIGTERM and its ranks exited with 0. 1: no restarts are
    left, too few nodes joined, or the store is gone. 143: SIGTERM, and a rank did not exit with 0.
    SIGTERM and SIGINT remove this node (on the host: end the job). SIGUSR1 goes on to the ranks.
    """
    return Agent(job, say).run()
