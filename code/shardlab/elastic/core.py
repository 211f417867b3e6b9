"""The agent of an elastic launcher: it starts, monitors and restarts its node's ranks.

    python -m shardlab cluster run --nodes 2 --ranks 4 --at node1:29400 train.py --steps 100
    python -m shardlab cluster run --nodes 1:2 --ranks 4 --at node1:29400 --logs logs train.py

The same command runs on every node, and the same script runs under torchrun. Each agent publishes
its ranks' state in a `Report`. The agent on the node that `at` names, always node 0, is also the
host: it publishes an `Order` for all agents. `host` defines both, and makes the decisions. Here are

1. `RankProcesses`, the processes of one node: how they start, fail and end;
2. `AgentStore`, a TCPStore that holds the order and the reports;
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

from . import exec_rank, kill_sessions
from .host import Failure, Host, Order, Report, State
from .job import Job, find_free_port, open_listener

POLL_SECONDS = 0.05  # seconds between two polls of ranks and store
SIGTERM_STATUS = 128 + signal.SIGTERM  # the exit status that shells report after SIGTERM
# Helper programs; "-IS" makes them start fast, without user settings and site packages.
_EXEC, _KILL = ((sys.executable, "-IS", m.__file__) for m in (exec_rank, kill_sessions))
# Signals that a process's own errors raise; NCCL's watchdog calls abort(), which sends SIGABRT.
CRASH_SIGNALS = signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT

# The ranks of one node.


class RankProcesses:
    """This node's rank processes in one round, and their failures."""

    def __init__(self, job: Job):
        self.job = job
        self.processes: dict[int, subprocess.Popen] = {}  # by rank
        self.ended: dict[int, float] = {}  # end time by rank, by this node's clock
        self.killer: subprocess.Popen | None = None  # kills leftover ranks, also if the agent died
        self.failures: dict[int, Failure] = {}
        self.files: dict[int, Path] = {}  # the file to which a rank's @record writes its error

    def start_ranks(self, order: Order, agent: int) -> None:
        """Start all ranks that `order` assigns to this node."""
        self.failures, self.files, self.ended = {}, {}, {}
        pipe = subprocess.PIPE
        self.killer = subprocess.Popen(_KILL, stdin=pipe, start_new_session=True)
        for local in range(self.job.ranks):
            environment = order.build_environment(self.job, agent, local)
            rank, output = int(environment["RANK"]), None
            if self.job.logs:
                folder = self.job.logs / f"round-{order.round}"
                folder.mkdir(parents=True, exist_ok=True)
                output = open(folder / f"rank-{rank}.log", "wb")
                self.files[rank] = folder / f"rank-{rank}.error.json"
                environment["TORCHELASTIC_ERROR_FILE"] = str(self.files[rank])
            self.processes[rank] = subprocess.Popen(
                [*_EXEC, str(os.getpid()), *self.job.command],
                env={"OMP_NUM_THREADS": "1", **os.environ, **environment},
                stdout=output,
                stderr=output and subprocess.STDOUT,
                start_new_session=True,  # its own session, which includes its children
            )
            self.killer.stdin.write(b"%d\n" % self.processes[rank].pid)
            self.killer.stdin.flush()
            arguments = self.ended, rank, self.processes[rank]
            threading.Thread(target=_record_end_time, args=arguments, daemon=True).start()
            if output:
                output.close()

    def poll_state(self) -> State:
        """Return the state of this node's ranks; record the failures since the last call."""
        codes = {rank: process.poll() for rank, process in self.processes.items()}
        for rank in [r for r, code in codes.items() if code and r not in self.failures]:
            self.failures[rank] = self._read_failure(rank, codes[rank])
        if self.failures and codes:
            return "failed"
        if any(code is None for code in codes.values()):
            return "running"
        return "done" if codes else "ready"

    def _read_failure(self, rank: int, code: int) -> Failure:
        killed = code < 0 and -code not in CRASH_SIGNALS
        message = signal.Signals(-code).name if code < 0 else f"status {code}"
        with suppress(OSError, ValueError, KeyError, TypeError):
            path = self.files[rank]
            message = str(json.loads(path.read_text())["message"]["message"])
            end_time = path.stat().st_mtime  # more precise than the whole seconds in the file
            return Failure(rank, killed, end_time, message)
        return Failure(rank, killed, self.ended.get(rank, time.time()), message)

    def send_signal(self, number: int) -> None:
        """Forward a signal to all ranks that still run."""
        for process in self.processes.values():
            process.send_signal(number)  # does nothing if the process has ended

    def terminate_ranks(self, on_tick: Callable[[], None]) -> None:
        """Send SIGTERM, wait `job.grace` seconds, then kill the remaining ranks and children."""
        self.send_signal(signal.SIGTERM)
        limit = time.monotonic() + self.job.grace
        while any(p.poll() is None for p in self.processes.values()) and time.monotonic() < limit:
            on_tick()
            time.sleep(POLL_SECONDS)
        self.kill_ranks()

    def kill_ranks(self) -> None:
        """Kill all ranks and their child processes at once, and forget them."""
        if self.killer:
            self.killer.communicate()  # closes its input, so that it kills the sessions
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.processes, self.killer = {}, None


def _record_end_time(ended: dict[int, float], rank: int, process: subprocess.Popen) -> None:
    """Record a rank's end time, in a thread: polls are too rare to order failures."""
    process.wait()
    ended[rank] = time.time()


# The store shared by the agents.


class AgentStore:
    """A TCPStore at `job.at`: the agent on that node serves it, and all others connect.

    The store listens at that address only. Raises ValueError if another job uses the address, if
    this job's only node is there already, or if no agent answers within `job.join` seconds.
    """

    def __init__(self, job: Job):
        self.job, self.heartbeat, self.unanswered_ticks = job, 0, 0
        listener = open_listener(*job.address)
        self.agent = 0 if listener else -1
        timeout = timedelta(seconds=job.join)
        options = {"world_size": None, "timeout": timeout, "wait_for_workers": False}
        if listener:
            options |= {"is_master": True, "master_listen_fd": listener.detach()}
        own = [job.name, shlex.join(job.command[1:]), "{}:{}".format(*job.nodes)]
        try:
            self.tcp_store = dist.TCPStore(*job.address, **options)
            if listener:
                self.publish_order(Order())
                self.tcp_store.set("job", json.dumps(own))  # last: agents wait for this key
                return
            found = json.loads(self.tcp_store.get("job"))
        except (dist.DistError, RuntimeError):
            text = f"no agent answered within {job.join:g} s; must be the address of a node"
            raise ValueError(f"at={job.at!r}: {text}") from None
        name, command, nodes = found
        text = f"{job.at} belongs to job {name!r} of {nodes} nodes, {command}; use another port"
        if name != job.name:
            raise ValueError(f"name={job.name!r}: {text}")
        if found != own or job.nodes[1] == 1:  # a second agent of a one-node job could never start
            raise ValueError(f"at={job.at!r}: {text}")
        self.agent = self.tcp_store.add("agents", 1)

    def read_order(self) -> Order:
        """Read the host's current order."""
        return Order.from_json(self.tcp_store.get("order"))

    def publish_order(self, order: Order) -> None:
        """Publish an order, as the host."""
        self.tcp_store.set("order", json.dumps(asdict(order)))

    def publish_report(self, report: Report) -> None:
        """Publish the state of this agent's ranks; each report is also the agent's heartbeat."""
        self.heartbeat += 1
        report = replace(report, heartbeat=self.heartbeat, ranks=self.job.ranks)
        self.tcp_store.set(f"agent {self.agent}", json.dumps(asdict(report)))
        self.unanswered_ticks = 0  # the store has answered

    def read_reports(self) -> dict[int, Report]:
        """Return the last report of every agent that ever connected."""
        names = {agent: f"agent {agent}" for agent in range(1 + self.tcp_store.add("agents", 0))}
        found = {agent: name for agent, name in names.items() if self.tcp_store.check([name])}
        return {agent: Report.from_json(self.tcp_store.get(name)) for agent, name in found.items()}


# The agent, which follows the host's orders.


class Agent:
    """This node's part of a job: its ranks, its access to the store and, on node 0, the host."""

    def __init__(self, job: Job, log: Callable[[str], None]):
        self.job, self.log = job, log
        self.store, self.ranks = AgentStore(job), RankProcesses(job)
        self.name = f"agent {self.store.agent}"
        self.host = Host(job) if self.store.agent == 0 else None
        self.order = Order(-1)  # the order that this agent follows
        self.leave_requested = self.ended = False

    def run(self) -> int:
        """Follow orders until the job ends; return the exit status: see `run`."""

        def request_leave(*_: Any) -> None:
            self.leave_requested = True

        signal.signal(signal.SIGTERM, request_leave)
        signal.signal(signal.SIGINT, request_leave)
        signal.signal(signal.SIGUSR1, lambda number, _: self.ranks.send_signal(number))
        threading.Thread(target=self._exit_if_store_silent, daemon=True).start()
        try:
            while self.order.kind != "end" and not self.leave_requested:
                order = self.store.read_order()
                if order.number != self.order.number:
                    self._follow_order(order)
                self._publish_state(self.ranks.poll_state())
                time.sleep(POLL_SECONDS)
            return self._leave_job()
        except RuntimeError:  # raised by the store
            self.log(f"{self.name}: lost the connection to the store at {self.job.at}")
            return 1
        finally:
            self.ended = True
            self.ranks.kill_ranks()

    def _follow_order(self, order: Order) -> None:
        """End the ranks of the last round, and start the ranks of a new round."""
        self.ranks.terminate_ranks(self._publish_state)
        self.order = order
        if order.kind == "run" and self.store.agent in order.agents:
            size = f"world size {sum(order.ranks)}, nodes {len(order.agents)}"
            reason = f" ({order.reason})" if order.reason else ""
            self.log(f"{self.name}, round {order.round}: {size}{reason}")
            self.ranks.start_ranks(order, self.store.agent)
        elif order.kind == "run":
            self.log(f"{self.name}, round {order.round}: spare node, the round has enough nodes")

    def _publish_state(self, state: State = "running") -> None:
        """Publish the ranks' state; on the host, decide and publish the next order."""
        failures = tuple(self.ranks.failures.values())
        self.store.publish_report(Report(0, self.order.number, state, failures=failures))
        new = self.host and self.host.decide_order(self.store.read_reports(), time.monotonic())
        if new:
            port = find_free_port(self.job.address[0]) if new.kind == "run" else 0
            self.store.publish_order(replace(new, port=port))

    def _leave_job(self) -> int:
        """Leave a job that has ended, or after SIGTERM; return the exit status."""
        status = self.order.status
        if self.order.kind != "end":  # after SIGTERM, ranks that all exit with 0 are no failure
            processes = list(self.ranks.processes.values())
            self.ranks.terminate_ranks(self._publish_state)
            status = SIGTERM_STATUS if any(process.returncode for process in processes) else 0
        elif status:
            self.log(f"{self.name}: {self.order.reason}")
        self._publish_state("left")
        if self.host:
            self._wait_for_agents(self.host)
        return status

    def _wait_for_agents(self, host: Host) -> None:
        """Wait as the host until all other agents have left: they must read the last order."""
        if self.order.kind != "end":
            self.store.publish_order(host.make_order("end", "the host got a signal", status=1))
        limit = time.monotonic() + self.job.grace + self.job.patience
        while time.monotonic() < limit:
            reports, now = self.store.read_reports(), time.monotonic()
            host.decide_order(reports, now)
            if all(reports[agent].state == "left" for agent in host.find_live_agents(reports, now)):
                return
            time.sleep(POLL_SECONDS)

    def _exit_if_store_silent(self) -> None:
        """Exit if the store is silent, in a thread: calls to an unreachable store block forever."""
        while not self.ended:
            time.sleep(POLL_SECONDS)
            self.store.unanswered_ticks += 1  # not seconds: a suspended agent may continue
            if self.store.unanswered_ticks * POLL_SECONDS > self.job.patience and not self.ended:
                self.log(f"{self.name}: no answer from the store at {self.job.at}")
                self.ranks.kill_ranks()
                os._exit(1)


def run(job: Job, log: Callable[[str], None] = print) -> int:
    """Run this node's agent until the job ends; return the exit status of this process.

    0: all ranks are done, or the agent got SIGTERM and its ranks exited with 0. 1: no restarts are
    left, too few nodes joined, or the store is gone. 143: SIGTERM, and a rank did not exit with 0.
    SIGTERM and SIGINT remove this node (on the host: end the job). SIGUSR1 goes on to the ranks.
    """
    return Agent(job, log).run()
