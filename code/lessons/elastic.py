# ---
# jupyter:
#   jupytext:
#     default_lexer: ipython3
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A launcher from scratch: agents, rendezvous and restarts
#
# After this lesson you can
#
# - build the program that starts the ranks of a job on many nodes, and restarts them when one is lost;
# - tell a lost node from a slow node, and the rank that failed first from those that failed as a consequence;
# - say how many seconds a lost rank, launcher or node costs, here and under `torchrun`.
#
# Two nodes train a model, with two ranks each. On one node somebody kills the launcher, but not the ranks.
# Under `torchrun` the ranks go on training, without a pause. Under the launcher built here training stops for ten seconds, and then goes on without that node.
# You want the second behaviour. [A later table](#the-cost-of-a-fault-here-and-under-torchrun) has the numbers.
#
# ## A launcher is a loop over processes

# %% tags=["hide-input"]
# Imports, and a folder for what the ranks write

import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch.distributed as dist

from shardcourse.exercises import check
from shardlab import elastic, ranks
from shardlab.common import show
from shardlab.elastic import exec_rank, core, host
from shardlab.elastic.job import Job, find_free_port
from shardtools.cluster.slurm import sessions

TEMPORARY = tempfile.TemporaryDirectory(prefix="elastic-")  # goes with this process
FOLDER = Path(TEMPORARY.name)


# %% [markdown]
# A *launcher* starts a program several times on a node. It tells each process its rank, waits, and ends all processes when one fails.

# %%
def start_ranks(command, size, port, node=0, nodes=1):
    """Start a node's `size` ranks of a program; return the processes."""
    started = []
    same = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": size * nodes}
    for local in range(size):
        variables = {"RANK": node * size + local, "LOCAL_RANK": local, **same}
        environment = os.environ | {name: str(x) for name, x in variables.items()}
        started.append(subprocess.Popen(command, env=environment))
    return started


def run_plain_agent(command, size):
    """Run `size` ranks of a program; return their exit statuses."""
    started = start_ranks(command, size, find_free_port("127.0.0.1"))
    while (codes := [one.poll() for one in started]).count(None):
        if any(codes):  # one has failed: the others would wait for it
            for one in started:
                one.terminate()
        time.sleep(0.05)
    return codes


# %% [markdown]
# Rank 1 of three ends with status 7 after a tenth of a second. The other ranks would sleep for a minute.

# %%
STUB = """
import os, sys, time
time.sleep(0.1)
sys.exit(7) if os.environ["RANK"] == "1" else time.sleep(60)
"""
(FOLDER / "stub.py").write_text(STUB)
codes = run_plain_agent([sys.executable, "-S", str(FOLDER / "stub.py")], 3)
print("exit statuses:", codes)

# %% tags=["hide-input"]
# Checks that the launcher ended the sleeping ranks: they would end with status 0

assert codes == [-15, 7, -15]


# %% [markdown]
# A negative status is minus the number of the signal that ended the process: 15 is SIGTERM, which the launcher sent.
#
# `torchrun --standalone --nproc-per-node 3` does the same.
# The launcher above has four limits:
#
# - It starts ranks on one node.
# - It starts the ranks only once. A failed rank ends the job.
# - It notices a process that ends, but not a node that no longer answers.
# - If it is killed with SIGKILL, its ranks go on running: they train, and keep their GPUs.
#
# ## Two nodes: agents, a host and a store
#
# Each node runs one launcher, its *agent*. The agents exchange messages through a *store*: a table of keys and values.
# One agent, the *host*, serves the store, at an address that all agents know. It alone decides what all agents do, and writes its decision, the *order*, into the store.
# Each start of all ranks is a *restart round*, or *round*.
#
# ![Two nodes, each with an agent and two ranks; the store is on node 0, the node of the host, and both agents use it. Below, time: in round 0 four ranks run, then rank 3 dies. The host orders a stop, all ranks end, and when all agents are ready it orders round 1, in which all four ranks start again and connect at another port.](../figures/elastic_rounds.svg)
#
# In plain form, a node starts its ranks when the order of the round is there. If a rank fails, on any node, all agents end their ranks, and the host orders another round.

# %%
def run_plain_node(store, node, nodes, command, size):
    """Run a node's ranks, in rounds, until a round has no failure; return the rounds."""
    for number in itertools.count():
        if node == 0:  # the host orders a start, at a new port
            store.set(f"order {number}", str(find_free_port("127.0.0.1")))
        port = store.get(f"order {number}").decode()  # waits for the order
        started = start_ranks(command, size, port, node, nodes)
        while (codes := [one.poll() for one in started]).count(None):
            if any(codes) or store.check([f"failed {number}"]):
                store.set(f"failed {number}", "")
                for one in started:
                    one.terminate()
            time.sleep(0.05)
        if any(codes):
            store.set(f"failed {number}", "")
        store.add(f"ended {number}", 1)
        while store.add(f"ended {number}", 0) < nodes:
            time.sleep(0.05)
        if not store.check([f"failed {number}"]):
            return number + 1


# %% [markdown]
# Two nodes have two ranks each. Rank 3 fails in the first round, while the other ranks sleep; in the second round all ranks succeed.

# %%
FAIL_ONCE = f"""
import os, pathlib, sys, time
failed = pathlib.Path({str(FOLDER / "failed")!r})
if os.environ["RANK"] == "3" and not failed.exists():
    failed.touch()
    sys.exit(7)
time.sleep(1)
"""


def run_nodes(port):
    node = dist.get_rank()
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=node == 0)
    rounds = run_plain_node(store, node, 2, [sys.executable, "-S", "-c", FAIL_ONCE], 2)
    dist.barrier()  # the store ends with node 0's process
    return rounds


# CPU: agents, no GPU
rounds = ranks.run(run_nodes, 2, find_free_port("127.0.0.1"), device="cpu")
print("rounds that each node ran:", rounds)


# %% [markdown]
# This leaves out a node that no longer answers, a limit of restarts, the message of the rank that failed first, and ranks that outlive their agent.
# The core, `core.run`, [has all four](#the-core-orders-reports-and-processes).
#
# ## The environment variables of each rank
#
# Here a job has two nodes, the first with one rank, the second with three. Each agent runs in its own process, and the ranks print environment variables.

# %%
def run_node(*jobs):
    """Run one node's agent; return its exit status and its messages."""
    number, said = dist.get_rank(), []
    while number and not is_listening(*jobs[0].address):  # node 0 is the host
        time.sleep(0.01)
    return core.run(jobs[number], said.append), said


def is_listening(host, port):
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


VARIABLES = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"]
VARIABLES += ["MASTER_ADDR"]
PRINT_VARIABLES = f"import os; print(*(os.environ[name] for name in {VARIABLES}))"
at = f"127.0.0.1:{find_free_port('127.0.0.1')}"
options = {"nodes": (2, 2), "logs": FOLDER / "found"}  # at least and at most two nodes
jobs = [Job((sys.executable, "-S", "-c", PRINT_VARIABLES), at, size, **options) for size in (1, 3)]
ended = ranks.run(run_node, 2, *jobs, device="cpu")  # CPU: agents, no GPU

# %% tags=["hide-input"]
# Table: the environment of four ranks on two nodes

logs = [FOLDER / f"found/round-0/rank-{rank}.log" for rank in range(4)]
rows = [log.read_text().split() for log in logs]
assert [row[0] for row in rows] == list("0123")
assert [status for status, _ in ended] == [0, 0]
show.table(rows, VARIABLES)

# %% [markdown]
# `LOCAL_RANK` determines the rank's GPU, and `RANK` everything else, such as its part of the data. `GROUP_RANK` is the node's number. `MASTER_PORT` is not in the table: each round has a different port.
#
# ## Restarting after a killed rank
#
# The script of [Clusters](cluster.md#restarting-all-ranks-after-one-is-lost) saves after every fifth step, and in its first run rank 1 kills itself after step 12. Here it runs on two nodes, with one rank each:

# %%
program = (sys.executable, str(sessions.JOBS / "killed.py"), str(FOLDER / "killed"))
at = f"127.0.0.1:{find_free_port('127.0.0.1')}"
job = Job(program, at, nodes=(2, 2), logs=FOLDER / "logs")
ended = ranks.run(run_node, 2, job, job, device="cpu")  # CPU: agents, no GPU
for status, said in ended:
    print(f"status {status}:", *said, sep="\n  ")

# %% tags=["hide-input"]
# Checks that steps 11 and 12 ran twice, and all others once

steps = (FOLDER / "killed/steps").read_text().splitlines()
numbers = [int(line.split("step ")[1].split(":")[0]) for line in steps]
assert numbers == [*range(1, 13), *range(11, 21)]
print(*steps[9:15], sep="\n")

# %% [markdown]
# The ranks' output is in files such as `logs/round-0/rank-1.log`, one for each rank and round.
#
# ### Which rank failed first
#
# When one rank fails, the others fail soon after, because their connections break. The host finds the rank that failed first:

# %%
show.source(host.describe_root_cause)

# %% [markdown]
# ### The cost of a fault, here and under torchrun
#
# `benchmarks/elastic.py` trained a small GPT on four ranks and two nodes, both on one machine, with a checkpoint after every fifth step.
# The fault happens after step 12.
# The seconds are from the last step before the fault to the first step after it.

# %% tags=["hide-input"]
# Table: what faults cost, recorded by benchmarks/elastic.py

path = Path(elastic.__file__).parent / "restarts.json"
found = json.loads(path.read_text())
rows = []
for row in found["rows"]:
    pairs = row["seconds"], row["lost"], row["after"]
    both = [" / ".join("–" if x is None else str(x) for x in pair) for pair in pairs]
    rows.append((row["case"], *both))
where = f"torch {found['torch']}, {found['cores']} cores"
start = f"without a launcher, {found['bare start (s)']['4']} s from start to first step"
caption = f"Recorded {found['date']}, {where}; {start}"
head = ["what happens", "seconds, ours / torchrun", "steps lost", "ranks after (of 4)"]
show.table(rows, head, caption=caption)

# %% [markdown]
# - Each number is the median of two jobs. Most of the time is the script's start, mainly its imports, which no launcher can avoid.
# - Under both launchers only the steps since the last save are lost. Repeated steps had the same losses, on fewer ranks too.
# - "An agent alone is killed": torchrun's ranks do not notice, and continue training. At the next fault they wait for ever, and keep their GPUs, unless a scheduler ends them. Our ranks end with their agent, and the other node starts again alone.
# - A dash means that training did not go on. Without the store's node, the job ends under both launchers, and only the scheduler can start it again.
#
# ## The core: orders, reports and processes
#
# The host writes its order under one key. An order has a number, and is valid until the host writes an order with a higher number.

# %%
show.source(host.Order)

# %% [markdown]
# Every agent writes a *report* on its ranks, twenty times a second.

# %%
show.source(host.Report, host.Failure, core.AgentStore)

# %% [markdown]
# Reports also show that the agent still runs: the number `heartbeat` grows with each report. The host notes by its own clock when the number grew, so it never compares two nodes' clocks.
# Every agent tries to listen at the store's address. Only the agent on the store's node succeeds, and becomes the host.
#
# From the reports the host decides the next order. It orders a start only after all ranks of the last round have ended, on all nodes.

# %%
show.source(host.Host)

# %% [markdown]
# Three of the host's rules matter most:
#
# - *Each round has its own port.* A leftover rank of round 0 cannot connect to a rank of round 1.
# - *All ranks start again, not only the failed rank.* The others have connections to the failed rank, and are in the middle of a step.
# - *A lost node does not count as a restart* towards the job's limit, although the ranks of the other nodes fail as well.
#
# The rest of the agent starts and ends processes, and ensures that no rank outlives its agent.

# %%
show.source(exec_rank.main, core.RankProcesses)

# %% [markdown]
# `PR_SET_PDEATHSIG` asks Linux to kill a process when its parent ends, even by SIGKILL. Processes that the rank started would go on.
# So each round has one more process, [kill_sessions.py](../code/shardlab/elastic/kill_sessions.py), which reads from a pipe. When the agent dies, the kernel closes the pipe, and this process kills each rank's session: the rank and its child processes.

# %%
show.source(core.Agent)


# %% [markdown]
# An agent that gets SIGTERM removes its node from the job: it passes the signal to its ranks, which have `grace` seconds to save. An agent that gets SIGUSR1 passes it to the ranks, and continues.
#
# ## Comparison with torchrun
#
# | | torchrun | this launcher |
# |---|---|---|
# | the ranks' store | one for all rounds, unless [a variable](cluster.md#the-rendezvous-store-one-per-round) is set | one for each round, at its own port |
# | where the agents' store listens | on all interfaces | at its address alone |
# | node 0 | the first by address, sorted as text | the host |
# | message if a node does not join | `RendezvousTimeoutError` | the number of nodes that came, and the number needed |
# | message for a wrong address | `RendezvousConnectionError` | no agent answered at that address |
# | message for two jobs at one port | one of these two errors | name and command of the job that has the port |
# | an agent is killed | its ranks go on training | its ranks end |
# | logs | a folder for each agent and attempt, named by local rank | a folder for each round, named by rank |
#
# [Tests](../tests/test_elastic.py) check each row.
#
# `python -m shardlab cluster run --help` says how to start this launcher. On a cluster use `torchrun`: it also supports spare nodes, other rendezvous backends, and logs on the console.
#
# ## Exercises
#
# ```{exercise-start} Who is first (easy)
# :label: ex-elastic-first
# ```
#
# `sizes` are the numbers of ranks on each node, in the order of the nodes. Return a list: the `RANK` of each node's first rank.

# %%
def my_first_ranks(sizes):
    pass  # your code


check(my_first_ranks)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-elastic-first
# :label: sol-elastic-first
# :class: dropdown
# ```
#
# The `RANK` of a node's first rank is the number of ranks on the nodes before it.

# %%
def my_first_ranks(sizes):
    return [sum(sizes[:node]) for node in range(len(sizes))]


check(my_first_ranks)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Who is silent (medium)
# :label: ex-elastic-silent
# ```
#
# `seen` lists the heartbeats that the host has read: `(time, agent, beat)`, in order, with times by the host's clock. When an agent's process has stopped, its last beat stays in the store, so the host goes on reading it.
# Return the agents that are silent at `now`: those whose `beat` has not changed for more than `patience` seconds.

# %%
def my_silent(seen, now, patience):
    pass  # your code


check(my_silent)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-elastic-silent
# :label: sol-elastic-silent
# :class: dropdown
# ```
#
# The time when a beat was *first* seen counts.

# %%
def my_silent(seen, now, patience):
    last = {}
    for time, agent, beat in seen:
        if agent not in last or last[agent][0] != beat:
            last[agent] = beat, time
    return {agent for agent, (_, time) in last.items() if now - time > patience}


check(my_silent)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Whose fault (hard)
# :label: ex-elastic-cause
# ```
#
# A round has failed. `failures` has a tuple `(time, rank, signal)` for each rank that failed; `signal` is 0 where the rank raised an error.
# Agents end ranks with SIGTERM (15), so a rank with this signal is never the cause.
# A process sends SIGABRT (6) to itself, for instance when nccl's time limit is over, and crashes with SIGILL (4), SIGBUS (7), SIGFPE (8) or SIGSEGV (11): these five count as errors.
# Any other signal came from outside. A rank with such a signal is the cause rather than a rank with an error.
# Among ranks of the same kind the earliest is the cause.
# Return the rank that is the cause, or `None` if there is none.

# %%
def my_cause(failures):
    pass  # your code


check(my_cause)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-elastic-cause
# :label: sol-elastic-cause
# :class: dropdown
# ```
#
# When Python sorts, False comes before True, so ranks with a signal from outside come first.

# %%
def my_cause(failures):
    left = [one for one in failures if one[2] != 15]
    left.sort(key=lambda one: (one[2] in (0, 4, 6, 7, 8, 11), one[0]))
    return left[0][1] if left else None


check(my_cause)

# %% [markdown]
# ```{solution-end}
# ```
#
# ## Summary
#
# - A launcher starts ranks, tells each its number, and ends all of them when one fails.
# - On several nodes each launcher is an agent, and all agents share one store. The agent called host writes orders; all agents write reports.
# - All ranks restart together, in rounds; each round has its own port.
# - The host starts the next round without agents that were silent for some seconds. Ranks do not outlive their agent.
#
# ## Further reading
#
# - PyTorch's [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html), and how its [agents](https://docs.pytorch.org/docs/stable/elastic/agent.html) and its [rendezvous](https://docs.pytorch.org/docs/stable/elastic/rendezvous.html) work.
