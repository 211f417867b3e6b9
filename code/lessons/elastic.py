# ---
# jupyter:
#   jupytext:
#     default_lexer: ipython3
#     notebook_metadata_filter: myst,mystnb,title,-jupytext.text_representation.jupytext_version
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
# # A launcher from scratch
#
# After this lesson you can
#
# - build the program that starts the ranks of a job on many nodes, and restarts them when one is lost;
# - tell a lost node from a slow one, and the rank that failed first from the ranks that failed because of it;
# - say how many seconds a lost rank, launcher or node costs, with PyTorch's launcher and with the one built here.
#
# Before you start, a puzzle.
# Two nodes train a model, with two ranks each. On one of them somebody kills the launcher, but no rank.
# Under `torchrun` the ranks go on training, without a pause. Under the launcher built here training stops for ten seconds, and then goes on without that node.
# You want the second. [The table](#what-a-fault-costs-under-both) has the numbers, and the text below it the reason.

# %% tags=["hide-input"]
# Imports, and a folder for what the ranks write

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
# ## A launcher is a loop over processes
#
# A *launcher* starts a program several times on a node. It tells each process its rank, waits, and ends all processes when one fails.

# %%
def run_plain_agent(command, size):
    """Start `size` ranks of a program; return their exit statuses."""
    started = []
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": find_free_port("127.0.0.1")}
    for rank in range(size):
        given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, **meet}
        environment = os.environ | {name: str(value) for name, value in given.items()}
        started.append(subprocess.Popen(command, env=environment))
    while (codes := [one.poll() for one in started]).count(None):
        if any(codes):  # one has failed: the others would wait for it
            for one in started:
                one.terminate()
        time.sleep(0.05)
    return codes


# %% [markdown]
# In the cell rank 1 of three ends with status 7 after a tenth of a second. The others would sleep for a minute.

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
# Holds that nobody was waited for: who has slept a minute ends with status 0

assert codes == [-15, 7, -15]

# %% [markdown]
# A negative status is the number of the signal that ended the process: 15 is SIGTERM, which the launcher sent.
#
# `torchrun --standalone --nproc-per-node 3` does this, in the simplest case. Four things are missing:
#
# - It starts ranks on one node. On two nodes something has to decide which ranks each of them starts.
# - It starts them once. A failed rank ends the job.
# - It notices a process that ends, but not a node that no longer answers.
# - If it is killed with SIGKILL, its ranks go on running: they train, and keep their GPUs.
#
# ## Two nodes: one store, orders and reports
#
# Each node has one such program, its *agent*. The agents exchange what they know through a *store*: a table of keys and values. One agent serves it, at an address that all agents are given as `--at`.
#
# ![Two nodes, each with an agent and two ranks; the store is on node 0, the host's, and both agents use it. Below, time: in round 0 four ranks run, then rank 3 dies. The host orders a stop, all ranks end, and when all agents are ready it orders round 1, in which all four start anew and meet at another port.](../figures/elastic_rounds.svg)
#
# The agent that serves the store is the *host*. It alone decides what all agents do, and writes that under one key, the *order*. An order has a number, and holds until there is one with a higher number.
# Each start of all ranks is a *restart round*, or *round*, and has a number, too.

# %%
show.source(host.Order)

# %% [markdown]
# Every agent writes a *report*, twenty times a second.

# %%
show.source(host.Report, host.Failure, core.AgentStore)

# %% [markdown]
# A report also shows that its agent still runs: its number `heartbeat` grows each time. The host notes, by its own clock, when it saw that number grow. So clocks of two nodes are never compared.
# Every agent tries to listen at the address of the store. Only the one on that node can, and it becomes the host; no option says so.
#
# From the reports the host decides the next order. It orders no start before all ranks of the last round have ended, on all nodes.

# %%
show.source(host.Host)

# %% [markdown]
# Three of its rules matter most:
#
# - *Each round has its own port.* A rank that is left over from round 0 cannot connect to one of round 1.
# - *All ranks start again, not only the one that failed.* The others have connections to the one that failed, and are in the middle of a step.
# - *A lost node does not count as a restart* (a job has a limit of these), although the ranks of the other nodes fail as well.
#
# The rest of the agent starts processes, ends them, and sees to it that none outlives its agent.

# %%
show.source(exec_rank.main, core.RankProcesses)

# %% [markdown]
# `PR_SET_PDEATHSIG` asks Linux to kill a process when the one that started it ends, even if that one was killed with SIGKILL.
# This ends the rank alone, and not what the rank started.
# So each round has one more process, [kill_sessions.py](../code/shardlab/elastic/kill_sessions.py), which reads from a pipe. When the agent dies, the kernel closes the pipe, and this process kills each rank's whole session.

# %%
show.source(core.Agent)


# %% [markdown]
# An agent that gets SIGTERM takes its node out of the job: it passes the signal to its ranks, which have `grace` seconds to save. It passes SIGUSR1 to the ranks as well, and goes on.
#
# ### What each rank finds
#
# Here a job has two nodes, one with one rank and one with three. Each agent runs in a process of its own, and the ranks print variables of their environment.

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
options = {"nodes": (2, 2), "logs": FOLDER / "found"}
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
# A rank chooses its GPU by `LOCAL_RANK`, and all else, such as its part of the data, by `RANK`. `GROUP_RANK` is the node's number. `MASTER_PORT` is not in the table: each round has another one.
#
# ## A rank is killed
#
# The script of [Clusters](cluster.md#a-rank-is-killed-and-training-goes-on) saves after every fifth step, and in its first run rank 1 kills itself after step 12. It is the same script under any launcher. Here it runs on two nodes, with a rank each:

# %%
program = (sys.executable, str(sessions.JOBS / "killed.py"), str(FOLDER / "killed"))
at = f"127.0.0.1:{find_free_port('127.0.0.1')}"
job = Job(program, at, nodes=(2, 2), logs=FOLDER / "logs")
ended = ranks.run(run_node, 2, job, job, device="cpu")  # CPU: agents, no GPU
for status, said in ended:
    print(f"status {status}:", *said, sep="\n  ")

# %% tags=["hide-input"]
# Holds that steps 11 and 12 were made twice, and that the others were made once

steps = (FOLDER / "killed/steps").read_text().splitlines()
numbers = [int(line.split("step ")[1].split(":")[0]) for line in steps]
assert numbers == [*range(1, 13), *range(11, 21)]
print(*steps[9:15], sep="\n")

# %% [markdown]
# What the ranks print is in files such as `logs/round-0/rank-1.log`, one for each rank and round.
#
# ### Who failed first
#
# When one rank fails, the others fail soon after, because their connections break. The host finds the first one:

# %%
show.source(host.describe_root_cause)

# %% [markdown]
# ### What a fault costs, under both
#
# `benchmarks/elastic.py` has measured it, with two nodes on one machine, four ranks, a small GPT, and a checkpoint after every fifth step. The fault happens after step 12.
# The seconds are those from the last step before the fault to the first step after it. Of two numbers the first is ours, the second torchrun's.

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
start = f"started by a mere loop, the script takes {found['bare start (s)']['4']} s"
caption = f"Recorded {found['date']}, {where}; {start}"
head = ["what happens", "seconds, ours / torchrun", "steps lost", "ranks after (of 4)"]
show.table(rows, head, caption=caption)


# %% [markdown]
# - Each number is the median of two jobs. Most of the time is the script's start, above all its imports, which no launcher can avoid.
# - Under both launchers only the steps since the last save are lost. The steps that were computed again had the same losses, on fewer ranks too.
# - "An agent alone is killed": torchrun's ranks do not notice, and go on training, but no agent watches them any more. At the next fault they wait for ever, and keep their GPUs, unless a scheduler ends them. Our ranks end with their agent, and the other node starts again without it.
# - The store's node is lost: there is a dash, because under both launchers the job ends. Only the scheduler can start it again.
#
# ## Beside torchrun
#
# | | torchrun | this launcher |
# |---|---|---|
# | a store for the ranks | one for all rounds, unless [a variable](cluster.md#the-store-of-all-rounds) is set | a port for each round |
# | where the agents' store listens | on all interfaces | at the address in `--at` alone |
# | node 0 is | the first by address, as text | the host |
# | a node does not come | `RendezvousTimeoutError` | how many of how many nodes came |
# | the address is wrong | `RendezvousConnectionError` | no agent answered at that address |
# | two jobs at one port | one of these two errors | name and command of the job that has the port |
# | an agent is killed | its ranks go on training | its ranks end |
# | logs | a folder for each agent and attempt, named by local rank | a folder for each round, named by rank |
#
# [Tests](../tests/test_elastic.py) run one script under both launchers, on two nodes, and compare the losses and the variables of the environment; each row above is a test.
#
# `python -m shardlab cluster run --help` says how to start this launcher. On a cluster use `torchrun`: it also has spare nodes, other kinds of rendezvous, and logs on the console.
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
# `seen` is what the host has read: a list of `(time, agent, beat)`, in order, with times by its own clock. When an agent's process has stopped, its last beat is still in the store, so the host goes on reading it.
# Return the agents that are silent at `now`: those whose beat has not changed for more than `patience` seconds.

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
# What counts is when a beat was *first* seen.

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
# Agents send SIGTERM (15) to ranks that shall end, so a rank with this signal is never the cause.
# A process sends SIGABRT (6) to itself, for instance when nccl's time limit is over, and crashes with SIGILL (4), SIGBUS (7), SIGFPE (8) or SIGSEGV (11): these five count as errors.
# Any other signal came from outside. A rank with such a signal is the cause rather than one with an error. Among ranks of the same kind the earliest is the cause.
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
# - On several nodes each launcher is an agent, and all agents share one store. One agent, the host, writes orders; all write reports.
# - All ranks restart together, in rounds; each round has its own port.
# - An agent that sends no report for some seconds is left out. Ranks do not outlive their agent.
#
# ## Further reading
#
# - PyTorch's [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html), and how its [agents](https://docs.pytorch.org/docs/stable/elastic/agent.html) and its [rendezvous](https://docs.pytorch.org/docs/stable/elastic/rendezvous.html) work.
