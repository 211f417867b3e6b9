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
# - build the program that starts the ranks of a job on many nodes, and starts them again when one is lost;
# - say how a lost node is told from a slow one, and how a failed rank from those that fail because of it;
# - say what a lost rank, launcher or node costs, under PyTorch's launcher and under the one built here.
#
# It takes about 25 minutes to read and 25 minutes for the exercises. Running it takes half a minute.
# It needs [Clusters](cluster.md), where `torchrun` starts the ranks.
#
# One thing to wonder about before you start.
# Two nodes train a model, with two ranks each. On one of them somebody kills the launcher, and no rank.
# Under `torchrun` the ranks go on training, without a pause. Under the launcher built here training stops for ten seconds, and then goes on without that node.
# The second is what you want. [The table](#what-a-fault-costs-under-both) has the numbers, and the reason is below it.

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

from shardlab import elastic, ranks, show
from shardlab.check import check
from shardlab.cluster.slurm import sessions
from shardlab.elastic import born, core, host
from shardlab.elastic.job import Job, free_port

TEMPORARY = tempfile.TemporaryDirectory(prefix="elastic-")  # goes with this process
FOLDER = Path(TEMPORARY.name)


# %% [markdown]
# ## A launcher is a loop over processes
#
# A *launcher* starts a program several times on a node. It tells each process its rank, waits, and ends all when one fails.

# %%
def plain_agent(command, size):
    """Start `size` ranks of a program; their exit statuses."""
    started = []
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port("127.0.0.1")}
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
# Rank 1 of three ends with status 7 after a tenth of a second. The others would sleep for a minute.

# %%
STUB = """
import os, sys, time
time.sleep(0.1)
sys.exit(7) if os.environ["RANK"] == "1" else time.sleep(60)
"""
(FOLDER / "stub.py").write_text(STUB)
codes = plain_agent([sys.executable, "-S", str(FOLDER / "stub.py")], 3)
print("exit statuses:", codes)

# %% tags=["hide-input"]
# Holds that nobody was waited for: who has slept a minute ends with status 0

assert codes == [-15, 7, -15]

# %% [markdown]
# A negative status is the number of the signal that ended the process: 15 is SIGTERM, which the launcher sent.
#
# `torchrun --standalone --nproc-per-node 3` does this, in the simplest case. Four things are missing:
#
# - It knows one node. On two, somebody has to say which ranks are whose.
# - It starts once. A failed rank ends the job.
# - It notices a process that ends, but not a node that no longer answers.
# - Whoever kills it with SIGKILL leaves its ranks running: they train on, and hold their GPUs.
#
# ## Two nodes: one store, orders and reports
#
# On each node runs one such program, the node's *agent*. The agents meet in a *store*: a table of keys and values that one of them serves at an address, which all are told as `--at`.
#
# ![Two nodes, each with an agent and two ranks; the store is on node 0, the host's, and both agents use it. Below, time: in round 0 four ranks run, then rank 3 dies. The host orders a stop, all ranks end, and when all agents are ready it orders round 1, in which all four start anew and meet at another port.](../figures/elastic_rounds.svg)
#
# The agent that serves the store is the *host*. It alone decides. What it wants is the value of one key, the *order*. An order holds until there is one with a higher number.
# Each start of the ranks is a *round*, and has a number, too.

# %%
show.source(host.Order)

# %% [markdown]
# Every agent answers with a *report*, twenty times a second.

# %%
show.source(host.Report, host.Failure, core.Meeting)

# %% [markdown]
# A report is also a sign of life: its number `beat` grows each time. The host notes, by its own clock, when it saw that number grow. So no two nodes' clocks are compared.
# Every agent tries to listen at the address. Only the one on that node can, so nobody has to be told who is the host.
#
# The host turns reports into orders. It starts no rank before all ranks of the last round are gone, on all nodes.

# %%
show.source(host.Host)

# %% [markdown]
# Three rules in there matter most:
#
# - *Each round has its own port.* A rank that is left over from round 0 cannot meet one of round 1.
# - *All ranks start again, not one.* The others have connections to the dead one, and are in the middle of a step.
# - *A lost node does not count as a restart*, although the ranks of the other nodes fail as well.
#
# The rest of the agent deals with processes: how they start, how they end, and that none outlives its agent.

# %%
show.source(born.main, core.Ranks)

# %% [markdown]
# `PR_SET_PDEATHSIG` asks Linux to kill a process when the one that started it ends, even if that one was killed with SIGKILL. On other systems the ranks live on.

# %%
show.source(core.Agent)


# %% [markdown]
# SIGTERM takes a node out of the job: its ranks get the signal, and have `grace` seconds to save. SIGUSR1 is passed to the ranks, and the agent goes on.
#
# ### What each rank finds
#
# Two nodes come: one with one rank, one with three. Each agent runs in a process of its own, and the ranks write down what they find in their environment.

# %%
def node(*jobs):
    """Be one node's agent; its exit status, and what it said."""
    number, said = dist.get_rank(), []
    while number and not listens(*jobs[0].address):  # node 0 is the host
        time.sleep(0.01)
    return core.run(jobs[number], said.append), said


def listens(host, port):
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


NAMES = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"]
NAMES += ["MASTER_ADDR"]
LIST = f"import os; print(*(os.environ[name] for name in {NAMES}))"
at = f"127.0.0.1:{free_port('127.0.0.1')}"
told = {"nodes": (2, 2), "logs": FOLDER / "found"}
jobs = [Job((sys.executable, "-S", "-c", LIST), at, size, **told) for size in (1, 3)]
ended = ranks.run(node, 2, *jobs, device="cpu", timeout=60)

# %% tags=["hide-input"]
# Table: the environment of four ranks on two nodes

logs = [FOLDER / f"found/round-0/rank-{rank}.log" for rank in range(4)]
rows = [log.read_text().split() for log in logs]
assert [row[0] for row in rows] == list("0123")
assert [status for status, _ in ended] == [0, 0]
show.table(rows, NAMES)

# %% [markdown]
# `LOCAL_RANK` chooses the GPU, `RANK` everything else. `GROUP_RANK` is the node's number. `MASTER_PORT` is not in the table: each round has another one.
#
# ## A rank is killed
#
# The script of [Clusters](cluster.md#a-rank-is-killed-and-training-goes-on) saves after every fifth step, and in its first run rank 1 kills itself after step 12. It knows nothing of its launcher. Here are two nodes, with a rank each:

# %%
program = (sys.executable, str(sessions.JOBS / "killed.py"), str(FOLDER / "killed"))
at = f"127.0.0.1:{free_port('127.0.0.1')}"
job = Job(program, at, nodes=(2, 2), logs=FOLDER / "logs")
ended = ranks.run(node, 2, job, job, device="cpu", timeout=60)
for status, said in ended:
    print(f"status {status}:", *said, sep="\n  ")

# %% tags=["hide-input"]
# Holds that steps 11 and 12 were made twice, and that the others were made once

steps = (FOLDER / "killed/steps").read_text().splitlines()
numbers = [int(line.split("step ")[1].split(":")[0]) for line in steps]
assert numbers == [*range(1, 13), *range(11, 21)]
print(*steps[9:15], sep="\n")

# %% [markdown]
# What the ranks print is in `logs/round-0/rank-1.log` and the like, a file for each rank and round.
#
# ### Who failed first
#
# When one rank fails, the others fail soon after, because their connections break. The host names the first:

# %%
show.source(host.first_cause)

# %% [markdown]
# ### What a fault costs, under both
#
# `benchmarks/elastic.py` has measured it: two nodes on one machine, four ranks, a small GPT, a checkpoint after every fifth step. After step 12 something happens.
# The seconds go from the last step before it to the first step after it. Of two numbers the first is ours, the second torchrun's.

# %% tags=["hide-input"]
# Table: what faults cost, recorded by benchmarks/elastic.py

path = Path(elastic.__file__).parent / "restarts.json"
found = json.loads(path.read_text())
rows = []
for row in found["rows"]:
    told = row["seconds"], row["lost"], row["after"]
    both = [" / ".join("–" if x is None else str(x) for x in pair) for pair in told]
    rows.append((row["case"], *both))
where = f"torch {found['torch']}, {found['cores']} cores"
start = f"started by a mere loop, the script takes {found['bare start (s)']['4']} s"
caption = f"Recorded {found['date']}, {where}; {start}"
head = ["what happens", "seconds, ours / torchrun", "steps lost", "ranks after (of 4)"]
show.table(rows, head, caption=caption)


# %% [markdown]
# - Medians of two jobs each. Most seconds are the script's start, its imports above all, which no launcher can spare.
# - Neither launcher loses more than the steps since the last save. What was computed again had the same losses, on fewer ranks too.
# - "An agent alone is killed": torchrun's ranks do not notice, and train on. Nobody watches them any more. At the next fault they wait for ever, and hold their GPUs, unless a scheduler ends what the job has left. Our ranks end with their agent, and the other node starts again without it.
# - The store's node is lost: a dash, because both jobs end. Only the scheduler can start the job again.
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
# | two jobs at one port | one of these two | the name of the job that meets there |
# | an agent is killed | its ranks train on | its ranks end |
# | logs | a folder for each agent and attempt, named by local rank | a folder for each round, named by rank |
#
# [Tests](../tests/test_elastic.py) run one script under both, on two nodes, and compare losses and names in the environment; each row above is one of them.
#
# `python -m shardlab cluster run --help` says how to start it. On a cluster take `torchrun`: it also has spares, other ways to meet, and logs on the console.
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
# As many ranks come before a node as the nodes before it have.

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
# The host sees beats: `seen` is a list of `(time, agent, beat)`, in the order in which it read them, with its own clock. An agent whose process is stopped leaves its last beat in the store, so the host goes on reading it.
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
# A round has failed. `failures` has a tuple `(time, rank, signal)` for each rank that did not end well; `signal` is 0 where it raised an error.
# SIGTERM (15) is sent by the agents to ranks that shall end, so such a rank is never the cause. SIGABRT (6) a process sends to itself, for instance when nccl's time limit is over: it counts like an error.
# Any other signal came from outside, and is a cause before all errors. Among equals the earliest is the cause.
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
# False comes before True when Python sorts, so what came from outside is first.

# %%
def my_cause(failures):
    left = [one for one in failures if one[2] != 15]
    left.sort(key=lambda one: (one[2] in (0, 6), one[0]))
    return left[0][1] if left else None


check(my_cause)

# %% [markdown]
# ```{solution-end}
# ```
#
# ## Summary
#
# - A launcher starts ranks, tells them who they are, and ends all when one fails.
# - On several nodes agents meet in a store. One of them, the host, gives orders, and all send reports.
# - Ranks start again all together, in rounds, each with its own port.
# - An agent that sends no report for some seconds is left out. Ranks do not outlive their agent.
#
# ## Further reading
#
# - PyTorch's [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html), and how its [agents](https://docs.pytorch.org/docs/stable/elastic/agent.html) and its [rendezvous](https://docs.pytorch.org/docs/stable/elastic/rendezvous.html) work.
