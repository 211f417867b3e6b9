"""The host's decisions, computed from the agents' reports without access to processes or store.

`Host` turns each agent's `Report`, the state of its ranks, into an `Order` for all agents.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from shardlab.ranks.worker import PEER_FAILURE_TEXTS

from .job import Job


@dataclass(frozen=True)
class Order:
    """The host's instruction to all agents. It is valid until one with a higher number."""

    number: int = 0
    kind: Literal["stop", "run", "end"] = "stop"  # end the ranks; start the ranks; or end the job
    round: int = -1  # of "run": number of the start, which keeps the rounds' ranks apart
    agents: tuple[int, ...] = ()  # the agents in this round: the first one is node 0
    ranks: tuple[int, ...] = ()  # number of ranks of each agent
    port: int = 0  # MASTER_PORT, a new one for each round
    reason: str = ""
    status: int = 0  # exit status, of "end"

    @classmethod
    def from_json(cls, text: bytes) -> Order:
        """Parse an order from its JSON text in the store."""
        values = json.loads(text)
        values |= {name: tuple(values[name]) for name in ("agents", "ranks")}
        return cls(**values)

    def build_environment(self, job: Job, agent: int, local: int) -> dict[str, str]:
        """Return a rank's environment variables, with the names that torchrun uses."""
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
class Failure:
    """The failure of a rank: when and how it ended."""

    rank: int
    killed: bool  # True if a signal from outside killed it
    time: float  # seconds since 1970, by the clock of its node
    message: str  # its error message, or the signal or exit status with which it ended


# An agent's state: no ranks; some run; all exited with 0; one failed; the agent leaves the job.
State = Literal["ready", "running", "done", "failed", "left"]


@dataclass(frozen=True)
class Report:
    """The state of an agent's ranks. `heartbeat` grows with each report."""

    heartbeat: int = 0
    order_number: int = -1  # number of the order that the agent follows
    state: State = "ready"
    ranks: int = 1
    failures: tuple[Failure, ...] = ()  # in the agent's last round

    @classmethod
    def from_json(cls, text: bytes) -> Report:
        """Parse a report from its JSON text in the store."""
        values = json.loads(text)
        values["failures"] = tuple(Failure(**each) for each in values["failures"])
        return cls(**values)


@dataclass
class Host:
    """State machine that turns reports into orders; clock times are arguments of its methods."""

    job: Job
    order: Order = field(default_factory=Order)
    order_time: float | None = None  # time of the current order
    heartbeats: dict[int, int] = field(default_factory=dict)  # last heartbeat of each agent
    heartbeat_times: dict[int, float] = field(default_factory=dict)  # time of that heartbeat
    ready_count: int = 0  # number of agents that are ready, between two rounds
    ready_since: float = 0.0  # time since which their number has not changed
    restarts: int = 0
    failed: bool = False  # True if a rank failed in the last round

    def decide_order(self, reports: dict[int, Report], now: float) -> Order | None:
        """Return the next order, or None while the last one stays valid."""
        self.order_time = now if self.order_time is None else self.order_time
        for agent, report in reports.items():  # timed by the host's clock alone
            if self.heartbeats.get(agent) != report.heartbeat:
                self.heartbeats[agent], self.heartbeat_times[agent] = report.heartbeat, now
        alive = {
            agent: reports[agent]
            for agent in self.find_live_agents(reports, now)
            if reports[agent].state != "left"
        }
        new = None
        if self.order.kind == "run":
            new = self._monitor_round(alive)
        elif self.order.kind == "stop":
            new = self._prepare_round(alive, now)
        if new:
            self.order, self.order_time, self.ready_count, self.ready_since = new, now, 0, now
        return new

    def find_live_agents(self, reports: dict[int, Report], now: float) -> list[int]:
        """Return the agents with a new heartbeat within the last `job.patience` seconds."""
        return [agent for agent in reports if now - self.heartbeat_times[agent] < self.job.patience]

    def make_order(self, kind: str, reason: str, **more: Any) -> Order:
        """Make an order with the next number."""
        number = self.order.number + 1
        return replace(self.order, number=number, kind=kind, reason=reason, port=0, **more)

    def _monitor_round(self, alive: dict[int, Report]) -> Order | None:
        """Decide while ranks run: a lost agent, a failed rank, the end, a new node."""
        members = self.order.agents
        if lost := [agent for agent in members if agent not in alive]:
            return self.make_order("stop", f"agent {lost[0]} is silent or has left")
        states = [alive[a].state for a in members if alive[a].order_number == self.order.number]
        if "failed" in states:
            self.failed = True
            return self.make_order("stop", "a rank failed")
        if states == ["done"] * len(members):
            return self.make_order("end", "all ranks are done", status=0)
        new = [agent for agent in alive if agent not in members]
        if new and len(members) < self.job.nodes[1] and "done" not in states:
            return self.make_order("stop", f"agent {new[0]} has joined")
        return None

    def _prepare_round(self, alive: dict[int, Report], now: float) -> Order | None:
        """Decide between two rounds: once all old ranks have ended, start with the live agents."""
        if any(r.order_number != self.order.number or r.state != "ready" for r in alive.values()):
            return None  # some agent's ranks still run
        reason = self.order.reason
        if self.failed and all(agent in alive for agent in self.order.agents):
            reason = describe_root_cause(alive)
            if self.restarts == self.job.restarts:
                reason = f"no restarts left of {self.restarts}: {reason}"
                return self.make_order("end", reason, status=1)
            self.restarts += 1
        elif self.failed:  # a lost node makes other ranks fail: such failures use up no restart
            lost = [agent for agent in self.order.agents if agent not in alive]
            reason = f"agent {lost[0]} is silent or has left"
        self.failed, self.order = False, replace(self.order, reason=reason)
        if len(alive) != self.ready_count:
            self.ready_count, self.ready_since = len(alive), now
        least, most = self.job.nodes
        if len(alive) < least:
            if now - self.order_time < self.job.join:
                return None
            reason = f"{len(alive)} of at least {least} nodes joined within {self.job.join:g} s"
            return self.make_order("end", reason, status=1)
        if len(alive) < most and now - self.ready_since < self.job.last_call:
            return None
        members = tuple(sorted(alive))[:most]
        more = {"agents": members, "ranks": tuple(alive[agent].ranks for agent in members)}
        return self.make_order("run", reason, round=self.order.round + 1, **more)


def describe_root_cause(reports: dict[int, Report]) -> str:
    """Describe the failure that most likely caused the others, over all nodes.

    A rank killed by a signal from outside comes first, because no other rank causes that. An error
    about a broken connection comes last: another rank's failure breaks connections. Among equals
    the earliest failure counts, so the nodes' clocks have to be synchronized.
    """
    failures = [failure for report in reports.values() for failure in report.failures]
    if not failures:
        return "a rank failed"

    def get_priority(failure: Failure) -> tuple[bool, bool, float]:
        victim = any(words in failure.message.lower() for words in PEER_FAILURE_TEXTS)
        return not failure.killed, victim, failure.time

    first = min(failures, key=get_priority)
    return f"rank {first.rank} was first to fail: {first.message}"
