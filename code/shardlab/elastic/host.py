"""What the host of a job decides, from what its agents report. No process, no store, no waiting.

An `Order` is what the host wants of everyone, a `Report` how an agent's ranks are. `Host` turns
reports into orders.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from shardlab.ranks.worker import VICTIM_WORDS

from .job import Job


@dataclass(frozen=True)
class Order:
    """What the host wants of everyone. It holds until there is one with a higher number."""

    number: int = 0
    kind: Literal["stop", "run", "end"] = "stop"  # end your ranks; start them; or end the job
    round: int = -1  # of "run": counts the starts, so a restarted rank never meets a dead one
    agents: tuple[int, ...] = ()  # who is in this round: the first one is node 0
    ranks: tuple[int, ...] = ()  # of each of them
    port: int = 0  # MASTER_PORT, a fresh one for each round
    why: str = ""
    status: int = 0  # of "end"

    @classmethod
    def read(cls, text: bytes) -> Order:
        """The order that stands in the store."""
        values = json.loads(text)
        values |= {name: tuple(values[name]) for name in ("agents", "ranks")}
        return cls(**values)

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
class Failure:
    """How a rank ended that did not end well."""

    rank: int
    killed: bool  # by a signal from outside
    time: float  # seconds since 1970, by the clock of its node
    what: str  # its error, or the signal or exit status with which it ended


# Of an agent: no ranks; some that run; all ended well; one did not; the agent is going.
State = Literal["ready", "running", "done", "failed", "left"]


@dataclass(frozen=True)
class Report:
    """How an agent's ranks are. Its number of beats is its heartbeat: it grows with each report."""

    beat: int = 0
    obeyed: int = -1  # number of the order that it follows
    state: State = "ready"
    ranks: int = 1
    failures: tuple[Failure, ...] = ()  # in its last round

    @classmethod
    def read(cls, text: bytes) -> Report:
        """The report that stands in the store."""
        values = json.loads(text)
        values["failures"] = tuple(Failure(**each) for each in values["failures"])
        return cls(**values)


@dataclass
class Host:
    """Turns reports into orders. It knows no processes and no store: times are arguments."""

    job: Job
    order: Order = field(default_factory=Order)
    since: float | None = None  # when the order was given
    beats: dict[int, int] = field(default_factory=dict)  # the last one of each agent
    heard: dict[int, float] = field(default_factory=dict)  # when it came
    ready: int = 0  # agents, between two rounds
    ready_since: float = 0.0  # so many
    restarts: int = 0
    failed: bool = False  # whether a rank failed in the last round

    def decide(self, reports: dict[int, Report], now: float) -> Order | None:
        """The next order, or None while the last one holds."""
        self.since = now if self.since is None else self.since
        for agent, report in reports.items():  # clocks of other nodes do not matter
            if self.beats.get(agent) != report.beat:
                self.beats[agent], self.heard[agent] = report.beat, now
        alive = {
            agent: reports[agent]
            for agent in self.audible(reports, now)
            if reports[agent].state != "left"
        }
        new = None
        if self.order.kind == "run":
            new = self._watch(alive)
        elif self.order.kind == "stop":
            new = self._gather(alive, now)
        if new:
            self.order, self.since, self.ready, self.ready_since = new, now, 0, now
        return new

    def audible(self, reports: dict[int, Report], now: float) -> list[int]:
        """The agents that have said something within the seconds of `job.patience`."""
        return [agent for agent in reports if now - self.heard[agent] < self.job.patience]

    def next(self, kind: str, why: str, **more: Any) -> Order:
        """An order that follows the last one."""
        return replace(self.order, number=self.order.number + 1, kind=kind, why=why, port=0, **more)

    def _watch(self, alive: dict[int, Report]) -> Order | None:
        """While ranks run: is anyone lost, has a rank failed, are all done, has a node come?"""
        members = self.order.agents
        if lost := [agent for agent in members if agent not in alive]:
            return self.next("stop", f"agent {lost[0]} is silent or has left")
        states = [alive[a].state for a in members if alive[a].obeyed == self.order.number]
        if "failed" in states:
            self.failed = True
            return self.next("stop", "a rank failed")
        if states == ["done"] * len(members):
            return self.next("end", "all ranks are done", status=0)
        new = [agent for agent in alive if agent not in members]
        if new and len(members) < self.job.nodes[1] and "done" not in states:
            return self.next("stop", f"agent {new[0]} has come")
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
                return self.next("end", why, status=1)
            self.restarts += 1
        elif self.failed:  # a lost node fails its neighbours' ranks: that counts for none
            lost = [agent for agent in self.order.agents if agent not in alive]
            why = f"agent {lost[0]} is silent or has left"
        self.failed, self.order = False, replace(self.order, why=why)
        if len(alive) != self.ready:
            self.ready, self.ready_since = len(alive), now
        least, most = self.job.nodes
        if len(alive) < least:
            if now - self.since < self.job.join:
                return None
            why = f"{len(alive)} of at least {least} nodes came within {self.job.join:g} s"
            return self.next("end", why, status=1)
        if len(alive) < most and now - self.ready_since < self.job.last_call:
            return None
        members = tuple(sorted(alive))[:most]
        more = {"agents": members, "ranks": tuple(alive[agent].ranks for agent in members)}
        return self.next("run", why, round=self.order.round + 1, **more)


def first_cause(reports: dict[int, Report]) -> str:
    """Return the failure that came first over all nodes: the others are mostly its consequences.

    A rank that was killed from outside is never another's victim. A crash may be a consequence, and
    an error that names a broken connection is one, wherever there is another failure. Among equals
    the earliest time counts, so the nodes' clocks have to agree.
    """
    failures = [failure for report in reports.values() for failure in report.failures]
    if not failures:
        return "a rank failed"

    def order(failure: Failure) -> tuple[bool, bool, float]:
        victim = any(words in failure.what.lower() for words in VICTIM_WORDS)
        return not failure.killed, victim, failure.time

    first = min(failures, key=order)
    return f"rank {first.rank} was first to fail: {first.what}"
