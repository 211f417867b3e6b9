"""Agents, ours and torchrun's: rendezvous, rounds, restarts, silence, signals, clean-up."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from commands import is_dead
from torch.distributed import run
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from shardlab.elastic import core
from shardlab.elastic.host import Failure, Host, Order, Report, describe_root_cause
from shardlab.elastic.job import Job, find_free_port
from shardtools.__main__ import main

pytestmark = pytest.mark.usefixtures("no_leftovers")

# A rank without torch: it writes its environment to a file, then does what its test needs.
STUB = """
import json, os, signal, subprocess, sys, time
folder, act = sys.argv[1:]
mine = {**os.environ, "pid": os.getpid()}
rank, size = int(mine["RANK"]), int(mine["WORLD_SIZE"])
round = int(mine["TORCHELASTIC_RESTART_COUNT"])
def note(name, what=""):
    with open(f"{folder}/.{name}.{rank}", "w") as file:
        file.write(what)
    os.rename(f"{folder}/.{name}.{rank}", f"{folder}/{name}")
note(f"{round}-{rank}", json.dumps(mine))
exec(act)
"""
REST = "time.sleep(60)"
QUICK = {"patience": 1.0, "last_call": 0.2, "join": 20.0, "grace": 5.0}


class Agent:
    """Call in a fork of this process, with its output in a file."""

    def __init__(self, call, log: Path, environment: dict[str, str] | None = None):
        self.log = log
        fork = multiprocessing.get_context("fork")
        self.process = fork.Process(target=run_logged, args=(call, log, environment or {}))
        self.process.start()

    def send(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def wait(self) -> int:
        """Wait for the process; return its exit status."""
        wait_for(self.ended)
        return self.process.exitcode

    def ended(self) -> bool:
        return self.process.exitcode is not None

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


def run_logged(call, log: Path, environment: dict[str, str]) -> None:
    """Exit this fork with the status that `call` returns."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1), os.dup2(file, 2)
    sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)
    os.environ.update(environment)
    sys.exit(call())


def wait_for(done) -> None:
    """Wait until `done()`, as long as a test may run: a busy machine is many times slower."""
    while not done():
        time.sleep(0.02)


@pytest.fixture
def start(tmp_path):
    """Start agents in forks; end them and their processes after the test."""
    agents: list[Agent] = []
    port = find_free_port("127.0.0.1")

    def start_ours(act: str, **changes) -> Agent:
        (tmp_path / "stub.py").write_text(STUB)
        program = (sys.executable, "-I", "-S", str(tmp_path / "stub.py"), str(tmp_path), act)
        job = Job(**{"command": program, "at": f"127.0.0.1:{port}", **QUICK, **changes})
        return fork(lambda: core.run(job))

    def start_torchrun(*options: str, port: int = port, **environment: str) -> Agent:
        at = "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"
        return fork(lambda: run.main([*at, *options]), environment)

    def fork(call, environment=None) -> Agent:
        agents.append(Agent(call, tmp_path / f"agent{len(agents)}.log", environment))
        return agents[-1]

    start = fork
    start.ours, start.torchrun, start.port = start_ours, start_torchrun, port
    yield start
    for agent in agents:
        with suppress(psutil.NoSuchProcess):
            started = psutil.Process(agent.process.pid).children(recursive=True)
            for process in started if not agent.ended() else []:
                process.kill()
        if not agent.ended():
            agent.send(signal.SIGKILL)
            agent.wait()


def make_port_probe(port: int):
    def is_listening() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    return is_listening


def read_notes(folder: Path, number: int) -> dict[int, dict[str, str]]:
    """Return the environments that the ranks of a round have noted."""
    return {
        int(p.name.split("-")[1]): json.loads(p.read_text()) for p in folder.glob(f"{number}-*")
    }


def list_alive(found: dict[int, dict]) -> list[int]:
    """Return the running ranks, without unreaped ones, such as orphans."""
    return [r for r, of in found.items() if not is_dead(of["pid"])]


@pytest.fixture
def pair(start, tmp_path, monkeypatch):
    """Start the host of a job of two nodes, then the other node, with ranks that do these acts."""
    prepare = Host._prepare_round

    def with_both(host, alive, now):  # the first round has both, whenever the other one starts
        return prepare(host, alive, now) if host.order.round >= 0 or len(alive) == 2 else None

    monkeypatch.setattr(Host, "_prepare_round", with_both)

    def start_node(act: str, **changes) -> tuple[Agent, Agent]:
        host = start.ours(act, **{"nodes": (1, 2), **changes})
        wait_for(make_port_probe(start.port))
        other = start.ours(act, **{"nodes": (1, 2), **changes})
        wait_for(lambda: len(read_notes(tmp_path, 0)) == 2 * changes.get("ranks", 1))
        return host, other

    return start_node


# Rounds.


def test_when_a_rank_fails_all_start_again_and_meet_at_another_port(start, tmp_path):
    fails = """
while len([name for name in os.listdir(folder) if name.startswith(f"{round}-")]) < size:
    time.sleep(0.01)
if round < 2 and rank == 2:
    os._exit(3 + round)
time.sleep(60 if round < 2 else 0)
"""
    agents = [start.ours(fails, nodes=(2, 2), ranks=2) for _ in range(2)]
    assert [agent.wait() for agent in agents] == [0, 0]
    rounds = [read_notes(tmp_path, number) for number in range(3)]
    assert [len(found) for found in rounds] == [4, 4, 4]
    assert len({found[0]["MASTER_PORT"] for found in rounds}) == 3
    assert not any(list_alive(found) for found in rounds)
    for status in (3, 4):
        assert all(f"rank 2 was first to fail: status {status}" in a.said() for a in agents)


def test_a_node_that_comes_late_joins_in_the_next_round(start, tmp_path):
    act = f"if size == 1: {REST}"
    host = start.ours(act, nodes=(1, 2))
    wait_for(lambda: read_notes(tmp_path, 0))
    late = start.ours(act, nodes=(1, 2))
    assert (host.wait(), late.wait()) == (0, 0)
    assert len(read_notes(tmp_path, 0)) == 1 and len(read_notes(tmp_path, 1)) == 2
    assert "agent 1 has joined" in host.said()


# Silence and death.


def test_a_silent_agent_is_left_out_and_may_come_back(pair, tmp_path):
    host, other = pair(f"if not (round and size == 2): {REST}", restarts=0)
    other.send(signal.SIGSTOP)
    wait_for(lambda: read_notes(tmp_path, 1))
    assert len(read_notes(tmp_path, 1)) == 1 and "agent 1 is silent" in host.said()
    assert list_alive(read_notes(tmp_path, 0)) == [1]  # a stopped agent cannot end its ranks
    other.send(signal.SIGCONT)
    assert (host.wait(), other.wait()) == (0, 0)
    assert len(read_notes(tmp_path, 2)) == 2 and not list_alive(read_notes(tmp_path, 0))


def test_a_lost_node_costs_no_restart(pair, tmp_path):
    """The ranks of the neighbours fail with the lost node."""
    act = """
while not os.path.exists(folder + "/killed"):
    time.sleep(0.01)
if not round:
    sys.exit("my neighbour is gone")
"""
    host, other = pair(act, restarts=0)
    other.send(signal.SIGKILL)
    (tmp_path / "killed").touch()
    assert other.wait() == -9 and host.wait() == 0
    assert "my neighbour is gone" in host.said() and len(read_notes(tmp_path, 1)) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_ranks_do_not_outlive_their_agent_and_no_job_its_host(pair, tmp_path):
    """Nor do the ranks' helpers, even in process groups of their own as `timeout` makes them."""
    act = f"""
helper = subprocess.Popen(["sleep", "60"], process_group=0)
note(f"helper-{{rank}}", str(helper.pid))
{REST}
"""
    host, other = pair(act, nodes=(2, 2), ranks=2)
    wait_for(lambda: len([*tmp_path.glob("helper-*")]) == 4)
    host.send(signal.SIGKILL)
    host.wait()
    assert other.wait() == 1 and "lost the connection" in other.said()
    helpers = [int(path.read_text()) for path in tmp_path.glob("helper-*")]
    wait_for(lambda: not list_alive(read_notes(tmp_path, 0)) and all(map(is_dead, helpers)))


def test_an_agent_leaves_a_store_that_is_silent(pair, tmp_path):
    """Like a pulled cable: no connection breaks, and calls of the store do not return."""
    host, other = pair(REST, nodes=(2, 2))
    host.send(signal.SIGSTOP)
    assert other.wait() == 1 and "no answer from the store" in other.said()
    assert list_alive(read_notes(tmp_path, 0)) == [0]
    host.send(signal.SIGCONT)
    host.send(signal.SIGTERM)
    assert host.wait() == 143


# Signals.


def test_signals_reach_the_ranks(pair, tmp_path):
    """SIGUSR1 is forwarded; SIGTERM removes a node, and its ranks may save and end with 0."""
    act = """
def usr1(*_): note(f"usr1-{rank}")
def term(*_): note(f"term-{round}-{rank}"); os._exit(0)
signal.signal(signal.SIGUSR1, usr1); signal.signal(signal.SIGTERM, term)
note(f"ready-{round}-{rank}")
while not round: time.sleep(1)
"""
    host, other = pair(act)
    wait_for(lambda: len([*tmp_path.glob("ready-0-*")]) == 2)
    other.send(signal.SIGUSR1)
    wait_for((tmp_path / "usr1-1").exists)
    other.send(signal.SIGTERM)
    assert other.wait() == 0 and host.wait() == 0
    assert {path.name for path in tmp_path.glob("term-*")} == {"term-0-0", "term-0-1"}
    assert len(read_notes(tmp_path, 1)) == 1


# The root cause.


@pytest.mark.alone  # the cause has to end within 30 ms
def test_the_first_cause_is_the_earliest_error_over_all_nodes(start, tmp_path):
    act = """
if round: sys.exit()
def fail(words, *cause):
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump({"message": {"message": words}}, file)
    for name in cause: note(name)
    sys.exit(1)
if rank == 3: fail("RuntimeError: a bad sample", "cause")
while not os.path.exists(folder + "/cause"): time.sleep(0.002)
time.sleep(0.03)  # as long as a neighbour's socket may take
fail("Connection closed by peer")
"""
    (tmp_path / "logs").mkdir()
    logs = {"logs": tmp_path / "logs", "ranks": 2, "nodes": (2, 2)}
    agents = [start.ours(act, **logs) for _ in range(2)]
    assert [agent.wait() for agent in agents] == [0, 0]
    for agent in agents:
        assert "rank 3 was first to fail: RuntimeError: a bad sample" in agent.said()
    files = sorted(str(p.relative_to(logs["logs"])) for p in logs["logs"].glob("*/*.log"))
    assert files == [f"round-{n}/rank-{rank}.log" for n in range(2) for rank in range(4)]


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT", "SIGKILL"])
def test_a_crash_is_a_cause_unless_another_failure_came_first(name):
    """Only SIGKILL comes from outside; a broken connection is a consequence of the crash."""
    ranks = core.RankProcesses(Job(("x",), "127.0.0.1:1"))
    ranks.ended[3] = 1.4
    crash = ranks._read_failure(3, -signal.Signals[name])
    assert crash == Failure(3, name == "SIGKILL", 1.4, name)

    def find_cause(when: float, what: str) -> str:
        failures = Failure(0, False, when, what), crash
        return describe_root_cause({0: Report(failures=failures)}).split(" was")[0]

    assert find_cause(1.0, "ValueError: a bad sample") == ("rank 3" if crash.killed else "rank 0")
    assert find_cause(1.5, "ValueError: a bad sample") == "rank 3"
    assert find_cause(1.0, "RuntimeError: Connection closed by peer [127.0.0.1]:1234") == "rank 3"


# Decisions of the host, without processes.


def decide_on(
    host: Host, now: float, *states: str, order_number: int | None = None
) -> Order | None:
    """Return the host's order to agents in these states; None: the agent is silent."""
    host.heartbeat = getattr(host, "heartbeat", 0) + 1
    number = host.order.number if order_number is None else order_number
    reports = {
        agent: Report(host.heartbeat if state else -1, number, state or "running", ranks=agent + 1)
        for agent, state in enumerate(states)
    }
    return host.decide_order(reports, now)


def test_the_host_waits_for_the_least_and_calls_for_more():
    host = Host(Job(("x",), "127.0.0.1:1", nodes=(2, 3), last_call=2, join=10))
    assert decide_on(host, 0, "ready") is None
    assert decide_on(host, 5, "ready", "ready") is None  # last call, for a third node
    assert decide_on(host, 6, "ready", "ready") is None
    order = decide_on(host, 7.1, "ready", "ready")
    assert (order.kind, order.round, order.agents, order.ranks) == ("run", 0, (0, 1), (1, 2))
    names = "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"
    places = [order.build_environment(host.job, *place) for place in ((0, 0), (1, 0), (1, 1))]
    assert [" ".join(of[name] for name in names) for of in places] == [
        "0 0 1 0",
        "1 0 2 1",
        "2 1 2 1",
    ]
    assert {(of["WORLD_SIZE"], of["MASTER_ADDR"]) for of in places} == {("3", "127.0.0.1")}
    full = Host(host.job)
    assert decide_on(full, 0, "ready", "ready", "ready").kind == "run"  # no other node can join
    alone = Host(host.job)
    assert decide_on(alone, 0, "ready") is None
    end = decide_on(alone, 10.1, "ready")
    assert (end.kind, end.status) == ("end", 1) and "1 of at least 2 nodes" in end.reason


def test_the_host_starts_nobody_while_ranks_of_the_last_round_live():
    host = Host(Job(("x",), "127.0.0.1:1", nodes=(2, 2)))
    decide_on(host, 0, "ready", "ready")
    assert decide_on(host, 1, "failed", "running").kind == "stop"
    assert decide_on(host, 2, "ready", "running") is None
    # A node reports ready, but for an order before this one.
    assert decide_on(host, 3, "ready", "ready", order_number=host.order.number - 1) is None
    assert decide_on(host, 4, "ready", "ready").round == 1
    # A report that is older than the order says nothing about this round.
    assert decide_on(host, 5, "failed", "failed", order_number=host.order.number - 1) is None
    assert decide_on(host, 6, "done", "running") is None
    assert decide_on(host, 7, "done", "done").kind == "end"


def test_another_job_at_the_same_port_is_turned_away(start, tmp_path):
    host = start.ours(REST, name="first", nodes=(1, 2))
    wait_for(lambda: read_notes(tmp_path, 0))
    for act, name in ((REST, "second"), (f"{REST}; 'of another script'", "first")):
        other = start.ours(act, name=name, nodes=(1, 2))
        assert other.wait() == 1 and "belongs to job 'first' of 1:2 nodes" in other.said()
    assert not host.ended() and not read_notes(tmp_path, 1)
    assert list_addresses(host) == {"127.0.0.1"}  # the store's, which torchrun's does not keep to


def list_addresses(agent: Agent) -> set[str]:
    """Return the addresses at which an agent listens."""
    found = psutil.Process(agent.process.pid).net_connections("tcp")
    return {one.laddr.ip for one in found if one.status == "LISTEN"}


def test_where_nobody_answers_the_agent_says_so_in_time(start):
    command = ["cluster", "run", "--join", "2", "--at", "192.0.2.1:29400", __file__]
    agent = start(lambda: main(command))
    assert agent.wait() == 2, agent.said()  # after torch's own warnings of each try
    assert "no agent answered within 2 s" in agent.said().splitlines()[-1]


# torchrun.

TRAIN = """
import json, os, sys
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

folder, act = sys.argv[1:]
mine = dict(os.environ)

@record
def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    weight, losses = torch.zeros(5), []
    for step in range(6):
        data = torch.randn(12, 6, generator=torch.Generator().manual_seed(step))[rank::size]
        error = data[:, :5] @ weight - data[:, 5]
        both = torch.cat([data[:, :5].T @ error, (error ** 2).sum()[None]])
        dist.all_reduce(both)
        weight -= 0.01 * both[:5]
        losses.append(both[5].item() / 12)
    name = f"{folder}/{mine['TORCHELASTIC_RESTART_COUNT']}-{rank}"
    with open(name, "w") as file:
        json.dump(mine | {"losses": losses, "pid": os.getpid()}, file)
    exec(act)
    dist.barrier()
    dist.destroy_process_group()

main()
"""
FAILS = """
if rank == 3 and mine["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise ValueError("a bad sample")
"""


def one_process() -> list[float]:
    """Return the losses of TRAIN in one process."""
    weight, losses = torch.zeros(5), []
    for step in range(6):
        data = torch.randn(12, 6, generator=torch.Generator().manual_seed(step))
        error = data[:, :5] @ weight - data[:, 5]
        weight -= 0.01 * (data[:, :5].T @ error)
        losses.append((error**2).sum().item() / 12)
    return losses


@pytest.mark.weekly("trains under torchrun and under the agent")
def test_the_same_script_under_both_with_equal_losses(start, tmp_path):
    """Two nodes, a rank that fails in the first round; torchrun's files of the failure."""
    losses, environments = {}, {}
    for who in ("ours", "torchrun"):
        (folder := tmp_path / who).mkdir()
        script = folder / "train.py"
        script.write_text(TRAIN)
        if who == "ours":
            program = (sys.executable, str(script), str(folder), FAILS)
            agents = [start.ours("", command=program, ranks=n, nodes=(2, 2)) for n in (1, 3)]
        else:
            sizes = ["--nnodes=2", "--nproc-per-node=2", "--rdzv-id=job", "--max-restarts=1"]
            logs = [f"--log-dir={folder}/logs", "--tee=3"]
            told = [*sizes, *logs, str(script), str(folder), FAILS]
            switch = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
            agents = [start.torchrun(*told, **switch) for _ in range(2)]
        assert [agent.wait() for agent in agents] == [0, 0], agents[0].said()
        found = read_notes(folder, 1)
        losses[who] = [found[rank]["losses"] for rank in range(4)]
        environments[who] = found
    want = one_process()
    for found in losses.values():  # float32, sums in another order
        assert all(torch.allclose(torch.tensor(of), torch.tensor(want)) for of in found)

    # Variables of each rank: the names that both set.
    ours, theirs = (environments[who][3] for who in ("ours", "torchrun"))
    for name in Order(agents=(0,), ranks=(1,)).build_environment(Job(("x",), "127.0.0.1:1"), 0, 0):
        assert name in ours and name in theirs, name
    assert theirs["TORCHELASTIC_USE_AGENT_STORE"] == "False"

    # Each agent has its own folder, local ranks, and every failed rank's error with its time.
    folders = sorted((tmp_path / "torchrun/logs").iterdir())
    assert len(folders) == 2 and all(folder.name.startswith("job_") for folder in folders)
    errors = {
        p: json.loads(p.read_text()) for p in (tmp_path / "torchrun/logs").rglob("error.json")
    }
    assert all(path.parent.parent.name == "attempt_0" for path in errors)
    times = {p: e["message"]["extraInfo"]["timestamp"] for p, e in errors.items()}
    assert all(re.fullmatch(r"\d{10}", moment) for moment in times.values())  # whole seconds
    first = min(errors, key=lambda path: path.stat().st_mtime)
    assert "a bad sample" in errors[first]["message"]["message"]
    assert first.parent.name == "1"  # rank 3 is local rank 1


STORE = """
import os, sys
import torch.distributed as dist
store, rank, size = next(dist.rendezvous("env://"))
again = os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
if not again:
    store.set(f"address of {rank}", "of a rank that will be dead")
    store.wait([f"address of {other}" for other in range(size)])
    sys.exit(1)
print("stale:", store.check(["address of 1"]), flush=True)
store.set(f"seen {rank}", "")
store.wait([f"seen {other}" for other in range(size)])
"""


@pytest.mark.weekly("torchrun alone")
def test_torchruns_restarted_ranks_find_the_addresses_of_dead_ones(start, tmp_path):
    """If this fails, torch needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 no more."""
    (tmp_path / "store.py").write_text(STORE)
    told = ["--nnodes=2", "--rdzv-id=job", "--max-restarts=1", str(tmp_path / "store.py")]
    agents = [start.torchrun(*told, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="0") for _ in range(2)]
    wait_for(lambda: all("stale: True" in agent.said() for agent in agents))


QUIET = "last_call_timeout=1,join_timeout=2,read_timeout=2"


@pytest.mark.weekly("torchrun alone")
def test_where_torchruns_nodes_do_not_meet_it_says_one_of_three_errors(start):
    """A node does not come, the address is wrong, two ids share a port: no error contains an id."""
    told = ["--nnodes=2", "missing.py"]
    lonely = start.torchrun(f"--rdzv-conf={QUIET}", *told)
    wait_for(make_port_probe(start.port))
    assert list_addresses(lonely) & {"::", "0.0.0.0"}  # all interfaces
    other, shared = ({"port": find_free_port("127.0.0.1")} for _ in range(2))
    wrong = start.torchrun(f"--rdzv-conf={QUIET},is_host=0", *told, **other)
    one = start.torchrun(f"--rdzv-conf={QUIET}", "--rdzv-id=17", *told, **shared)
    wait_for(make_port_probe(shared["port"]))
    other = start.torchrun(f"--rdzv-conf={QUIET}", "--rdzv-id=18", *told, **shared)
    assert lonely.wait() == 1 and "RendezvousTimeoutError" in lonely.said()
    assert wrong.wait() == 1
    assert "RendezvousConnectionError: The connection to the C10d store has failed" in wrong.said()
    for agent in (one, other):
        assert agent.wait() == 1
        assert re.search(r"Rendezvous(Timeout|Connection|Closed)Error", agent.said())
        assert "rdzv_id" not in agent.said() and "--rdzv-id" not in agent.said()


def test_torchruns_rank_0_is_not_on_node_0():
    """Nodes are numbered by address, as text: sorted participants, in dynamic_rendezvous.py."""
    names = [_NodeDesc(name, 1, 0) for name in ("node2", "node10", "node1")]
    assert [node.addr for node in sorted(names)] == ["node1", "node10", "node2"]
