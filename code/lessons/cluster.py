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
# # Clusters: many nodes, and keeping them busy
#
# After this lesson you can
#
# - start a job on several nodes with `torchrun`, Slurm, PBS or Kubernetes, and say what each line of the batch script does;
# - have it save before its time limit, go back into the queue, and outlive a lost rank or node;
# - say whether a job uses its GPUs, and which rank holds up the others;
# - find the rank, the collective and the line at which a job hangs;
# - examine a cluster before a job, with one command on all ranks.
#
# It takes about 55 minutes to read and 75 minutes for the exercises. Running it takes a minute.
# It needs [Training script](train.md), whose script runs in the batch files here.
#
# One thing to wonder about before you start.
# Two nodes train a model, with two ranks each. On one of them somebody kills the launcher, and no rank.
# Under PyTorch's launcher training goes on, and loses no second. Under the one that this page builds it stops, and loses ten.
# The second is what you want. [The table](#what-a-fault-costs) has both numbers, and the reason below it.

# %% tags=["hide-input"]
# Imports, and folders for what the ranks write

import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from shardlab import cluster, ranks, show, text
from shardlab.check import check
from shardlab.cluster import born, captured, core, doctor, host
from shardlab.cluster.doctor import checks, pairs
from shardlab.cluster.job import Job, free_port
from shardlab.cluster.slurm import sessions
from shardlab.cluster.watch import flight, hang, report, sample, straggler, timeline
from shardlab.model import GPT, PRESETS, loss

show.style()
TEMPORARY = tempfile.TemporaryDirectory(prefix="cluster-")  # goes with this process
FOLDER = Path(TEMPORARY.name)


# %% [markdown]
# ## A launcher is a loop over processes
#
# The ranks of the other lessons were started by a function in a notebook.
# On a cluster nobody calls that function: a program on each node starts the node's ranks.
# This is such a program. It tells each rank who it is, waits, and ends all when one fails.

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
# A negative status is the number of the signal that ended the process: 15 is SIGTERM, from the agent.
#
# `torchrun --standalone --nproc-per-node 3` does this, in the simplest case. What the loop leaves out is what follows:
#
# - It knows one node. On two, somebody has to say which ranks are whose.
# - It starts once. A failed rank ends the job, at any hour of the night.
# - It notices a process that ends, and no node that falls silent.
# - Whoever kills it with SIGKILL leaves its ranks behind: they train on, and hold the GPUs.
#
# ## Two nodes: one store, orders and reports
#
# ![Two nodes, each with an agent and two ranks; the store is on node 0, the host's, and both agents use it. Below, time: in round 0 four ranks run, then rank 3 dies. The host orders a stop, all ranks end, and when all agents are ready it orders round 1, in which all four start anew and meet at another port.](../figures/cluster_rounds.svg)
#
# The full agent meets its fellows in a store: keys and values behind one address, which everyone is told as `--at`.
# The agent on that node serves it. It is the *host*, and it alone decides.
# What it wants stands in one key, the order. It holds until there is one with a higher number.

# %%
show.source(host.Order)

# %% [markdown]
# Every agent answers by a report, twenty times a second.

# %%
show.source(host.Report, host.Failure, core.Meeting)

# %% [markdown]
# Writing the report is the heartbeat as well: its number grows, and the host notes when *it* saw it grow. No two clocks are compared.
# The address is bound by whoever can bind it, so nobody has to be told that they are the host.
#
# The host turns reports into orders. It starts nobody before the last round's ranks are gone, everywhere.

# %%
show.source(host.Host)

# %% [markdown]
# Three rules in there carry most of it:
#
# - *A round has its number and its own port.* A rank that was left over from round 0 cannot meet one of round 1.
# - *All start again, not one.* The others hold connections to the dead one, and half a step.
# - *A lost node counts for no restart*, although the ranks beside it fail as well.
#
# The rest is processes: how they start, how they end, and that none outlives its agent.

# %%
show.source(born.main, core.Ranks)

# %% [markdown]
# `PR_SET_PDEATHSIG` asks Linux's kernel to kill a process when the thread that started it ends. It works even when the agent is killed with SIGKILL.
# On other systems they live on.

# %%
show.source(core.Agent, core.run)


# %% [markdown]
# SIGTERM takes a node out of the job: its ranks get the signal, and have `grace` seconds to save. SIGUSR1 goes to the ranks, and the agent lives on.
#
# ### What each rank finds
#
# Two nodes come: one with one rank, one with three. Each agent runs in a process of its own, and the ranks write down what they find.

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
ended = ranks.run(node, 2, *jobs, device="cpu", timeout=60)  # CPU: agents, no GPU

# %% tags=["hide-input"]
# Table: the environment of four ranks on two nodes

logs = [FOLDER / f"found/round-0/rank-{rank}.log" for rank in range(4)]
rows = [log.read_text().split() for log in logs]
assert [row[0] for row in rows] == list("0123")
assert [status for status, _ in ended] == [0, 0]
show.table(rows, NAMES)

# %% [markdown]
# `LOCAL_RANK` chooses the GPU, `RANK` everything else. `MASTER_PORT` is not in the table: it is another one in each round.
#
# ## torchrun, argument by argument
#
# `torchrun` is this agent, grown up: several kinds of rendezvous, spares, logs on the console. The defaults in this table are read from its own parser, in the installed version.

# %% tags=["hide-input"]
# Table: torchrun's options, what each gives, and ours beside it

from torch.distributed.run import get_args_parser

MEANS = [
    ("--nnodes", "agents that make a job; 1:2 lets it go on with one", "--nodes"),
    ("--nproc-per-node", "ranks on this node; also gpu, cpu, auto", "--ranks"),
    ("--rdzv-backend", "who keeps the meeting; take c10d for several nodes", "–"),
    ("--rdzv-endpoint", "HOST:PORT of the store; the same on all nodes", "--at"),
    ("--rdzv-id", "the job's name; the same on all nodes", "--job"),
    ("--rdzv-conf", "time limits: join_timeout, last_call_timeout, …", "--join, …"),
    ("--local-addr", "this node's address, where its name does not resolve", "–"),
    ("--max-restarts", "starts after the first", "--restarts"),
    ("--log-dir", "folder of logs and error files", "--logs"),
    ("--tee", "3: both streams to files and console", "–"),
    ("--local-ranks-filter", "0: the console shows one rank of each node", "–"),
    ("--node-rank", "only for the static backend: c10d ignores it", "–"),
    ("--signals-to-handle", "passed to the ranks, after which the agent ends", "–"),
    ("--shutdown-timeout", "seconds from SIGTERM to SIGKILL (none: 30)", "--grace"),
    ("--standalone", "one node: picks a free port itself", "–"),
]
known = {name: a for a in get_args_parser()._actions for name in a.option_strings}
empty = None, "", False
rows = []
for name, means, ours in MEANS:
    default = known[name].default
    shown = "–" if default in empty else str(default).replace(",", ", ")  # so that it may break
    rows.append((name, shown, means, ours))
show.table(rows, ["torchrun", "default", "what it gives", "ours"])

# %% [markdown]
# Try these lines in two terminals: the same ones start both nodes, here with [the script to take home](train.md#the-script-to-take-home).
#
# ```bash
# export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # see: the store of all rounds
# torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-id 17 \
#     --rdzv-endpoint 127.0.0.1:29400 --local-addr 127.0.0.1 --max-restarts 3 \
#     --log-dir logs --tee 3 code/train.py --folder runs/two-nodes
# ```
#
# Every rank finds the names in the table above (`GROUP_RANK` is its node's number), and some that begin with `TORCHELASTIC_`.
# [A test](../tests/test_cluster.py) runs one script under both launchers, on two nodes, and compares losses and names.
#
# The script's own options stand behind the script.
#
# ### Rank 0 is not on node 0
#
# With c10d torchrun sorts the nodes by address, as text: `node10` comes before `node2`.
# So print and save by `RANK`, and never by the scheduler's number of the node.
#
# ### Who failed first
#
# Each of torchrun's agents names a "root cause" among *its own* ranks. On the innocent node that is a victim, whose connection was closed.
# Decorate `main` with `@record` (`torch.distributed.elastic.multiprocessing.errors`), and every rank that raises leaves `LOGS/ID_…/attempt_0/LOCAL_RANK/error.json`.
# Over all nodes, the earliest is the cause.
#
# ````{admonition} Checked: "the timestamp in error.json tells who was first"
# :class: checked
#
# It is in whole seconds (torch 2.13), and victims follow within milliseconds: [the test](../tests/test_cluster.py) finds ten digits and no more.
# The file's own time of change is finer. On a shared file system, `ls -tr --full-time logs/*/attempt_0/*/error.json | head -1` names the first.
# ````
#
# Our host looks at that time, too, and calls no rank a victim that a signal has killed: see `first_cause`.

# %%
show.source(host.first_cause)

# %% [markdown]
# ## When they do not meet
#
# Each row of this table is [a test](../tests/test_cluster.py).
#
# | what is wrong | torchrun says | our agent says |
# |---|---|---|
# | a node does not come | `RendezvousTimeoutError`, after `join_timeout`, 600 s | how many of how many nodes came, after `--join` |
# | the address is wrong | `RendezvousConnectionError: The connection to the C10d store has failed`, after `read_timeout`, 60 s | no agent answered at that address |
# | two jobs, or two ids, at one port | one of these two; no word of ids | the name of the job that meets there |
# | the wrong interface: `GLOO_SOCKET_IFNAME=ib7` | the rank raises, and names `ib7` | the same |
#
# torchrun's store listens on all interfaces of the node. Ours listens at the address in `--at`, and nowhere else.
#
# ## A real Slurm on your own machine
#
# On a cluster you hand a *batch script* to a scheduler, and it runs when enough nodes are free.
# Slurm is made of ordinary programs: `slurmctld` decides, and a `slurmd` on each node starts what it is told to.
# So a cluster of two nodes fits on your machine, and a mistake in a batch script costs seconds instead of a night in the queue:
#
# ```bash
# sudo apt-get install --no-install-recommends slurmctld slurmd slurm-client munge
# eval "$(python -m shardlab cluster up)"     # two nodes of 4 CPUs and 2 GPUs each
# sinfo
# python -m shardlab cluster down
# ```
#
# This needs no root (but for `apt-get`), starts no system service, and listens on the loopback interface alone.
# Scheduling, signals, queue and files are the real thing; what is pretended: both nodes are this machine, no task is held to its CPUs, and the GPUs are character devices such as `/dev/null`, so that Slurm has something to count.
#
# Where Slurm is installed, the next cell runs it. Elsewhere, it shows what was recorded, and says when.

# %%
sessions.session("ranks")

# %% [markdown]
# `sinfo` lists the nodes; `srun` starts a program once for each *task*, which finds its number in its environment.
# `sbatch` puts a script into the queue, prints its number and returns; `squeue` shows what runs, and why the rest waits; `scancel` ends a job, or sends it a signal.
#
# ## The batch script, line by line
#
# Slurm runs this script once, on the job's first node.
# It runs nothing on the other ones; that is what `srun` is for.

# %%
sessions.job("torchrun.sbatch")

# %% [markdown]
# | line | why |
# |---|---|
# | `#SBATCH …` | options, as comments; behind the first command they are ignored, silently |
# | `--ntasks-per-node=1` | one task a node: each `torchrun` starts its node's ranks itself. With 2, there are twice the ranks |
# | `--output`, `--error` | one file each for all ranks, where you called `sbatch`. A folder in these names must exist, else the job fails at once, without output (`JobLaunchFailure`) |
# | `first`, `address` | the first node's name, and the address at which Slurm reaches it: there ranks meet |
# | `port=…` | from the job's number: two jobs that share a node must not meet |
# | `srun --cpus-per-task` | said again, because `srun` does not inherit it from `sbatch` since Slurm 22.05 {cite}`schedmd2026srun` |
# | `--kill-on-bad-exit=1` | when one task fails, the others end |
#
# `sbatch torchrun.sbatch code/train.py --folder runs/a` submits it; what stands behind its name arrives as `"$@"`.
# Here it starts a script that says who it is, recorded because two launchers take longer than a page should.

# %%
sessions.session("torchrun", live=False)

# %% [markdown]
# The lines are sorted here; in the file, ranks write as they please.
#
# `srun` can start the ranks itself, without `torchrun`. Then the script needs four names that `torchrun` would have set, and Slurm has all of them:

# %%
sessions.job("srun.sbatch")

# %% [markdown]
# What you give up are restarts inside the job.
# The [tests](../tests/test_cluster_slurm.py) run these files as they stand, with [our script](train.md#the-script-to-take-home): under both, losses equal those of one process, to 1e-5.
#
# ### Which GPU is mine

# %%
sessions.session("gpus")

# %% [markdown]
# With `--gpus-per-node=2` every task sees both, and the device is `cuda:LOCAL_RANK`.
# With `--gpus-per-task=1` each task sees one. CUDA counts what it sees from 0, so it is `cuda:0` for all of them, and `cuda:1` is an invalid device on the second.
# A script that takes `LOCAL_RANK % torch.cuda.device_count()` is right in both cases.
#
# ````{admonition} Checked: "export CUDA_VISIBLE_DEVICES=0,1,2,3 gives the job its GPUs"
# :class: checked
#
# Many batch scripts hold that line. Two jobs with one GPU each share a node below, and both say it.
# Under `srun` it has no effect: Slurm sets the variable anew for every step.
# Without `srun` it has too much: the process sees GPUs of the other job. Where the site confines devices with cgroups they cannot be opened; where it does not, two jobs compute on one GPU.
# Ask for GPUs with `--gpus-per-node`, and leave the variable alone.
# ````

# %%
sessions.session("devices", live=False)

# %% [markdown]
# ````{admonition} Checked: "use $RANDOM as --rdzv-id"
# :class: checked
#
# It depends on quotes. Between double quotes the batch script replaces `$RANDOM` once, before `srun` starts anything.
# Between single quotes every node draws a number of its own, and the nodes wait for each other until the rendezvous times out.
# `$SLURM_JOB_ID` cannot go wrong, and leads from a log to its job.
# ````

# %%
sessions.session("random")

# %% [markdown]
# ## Before the time limit
#
# A job that reaches `--time` gets SIGTERM, and SIGKILL some seconds later (30 by default, the site's `KillWait`).
# That is short for a checkpoint. So ask for a signal of your own earlier, save, and go back into the queue:

# %%
sessions.job("requeue.sbatch")

# %% [markdown]
# `--signal=USR1@120` goes to all processes of all steps, but not to the batch script.
# Slurm is not punctual: it may send it up to 60 seconds *earlier* than asked {cite}`schedmd2026sbatch`, so nothing may depend on when it comes.
# Ask for more seconds than a step and a save need together.
#
# One signal has to become one decision. Ranks that get it at different moments would leave at different steps, and the last ones would wait for ever.
# So every rank adds its flag to an all-reduce, and all of them stop after the same step.
# They end with status 0 and leave the file `stopped`; the script sees it, and puts its own job back.
# A planned stop with another status would look like a failure to `torchrun`, which would start all ranks again.

# %%
sessions.session("requeue", live=False)

# %% [markdown]
# `scancel --signal` sends the same signal by hand, which is how you try this without waiting for a clock.
# A requeued job keeps its number, and so its folder. It waits two minutes before it may start (`BeginTime`); `scontrol update` takes that away.
# The test stops [our script](train.md#the-script-to-take-home) so, and finds each step once, with the losses of one process.
#
# ````{admonition} Checked: "USR1 makes the job save"
# :class: checked
#
# It makes the *ranks* save, if they have a handler. `torchrun` has none, and SIGUSR1 ends a process that has none: status 138, which is 128 + 10.
# `set -e` then ends the script before it looks for `stopped`, and nothing is requeued, though everything was saved.
# `--signals-to-handle` (torch 2.13) passes the signal on, but `torchrun` still ends with 1.
# `trap "" USR1; exec torchrun` keeps it alive: an ignored signal stays ignored over `exec`, and ranks that set a handler get it all the same.
# ````

# %%
sessions.session("usr1", live=False)

# %% [markdown]
# ## One script, many jobs: arrays
#
# A sweep over learning rates is one job in four copies. `%2` lets two of them run at a time.

# %%
sessions.job("array.sbatch")

# %%
sessions.session("array", live=False)

# %% [markdown]
# Each task is a job of its own, with its own time limit and its own output. `scancel 1_3` ends one, `scancel 1` all.
# A task must write into a folder of its own.
#
# ## The same job under PBS and Kubernetes
#
# What you ask for is the same everywhere.
#
# | | Slurm | PBS {cite}`openpbs2026qsub` | Kubernetes {cite}`kubernetes2026job` |
# |---|---|---|---|
# | two nodes, 2 GPUs each | `--nodes=2 --gpus-per-node=2` | `-l select=2:ngpus=2 -l place=scatter` | `completions: 2`, `nvidia.com/gpu: 2` |
# | start on every node | `srun` | `pbsdsh` (or the site's `mpiexec`) | each pod's own `command` |
# | meeting point | first of `SLURM_JOB_NODELIST` | first line of `$PBS_NODEFILE` | `train-0.train`, by the headless Service |
# | time limit | `--time` | `-l walltime` | `activeDeadlineSeconds` |
# | signal before it | `--signal=USR1@120` | none: `timeout --signal=USR1` around the command | SIGTERM, then `terminationGracePeriodSeconds` |
# | run again | `--requeue` | `-r y` | `backoffLimit` |

# %%
sessions.job("job.pbs")

# %% [markdown]
# On Kubernetes nothing counts pods for you unless the Job is *Indexed*: then they are called `train-0` and `train-1`, and a Service without an address of its own makes these names resolve.

# %%
sessions.job("job.yaml")

# %% [markdown]
# Where Kubeflow's Trainer is installed, a TrainJob says the same in a third of the lines; its runtime sets the rendezvous.

# %%
sessions.job("trainjob.yaml")

# %% [markdown]
# Neither PBS nor Kubernetes ran here. [Tests](../tests/test_cluster_jobs.py) hold the YAML files to published schemas (`kubeflow-trainer-api` 2.3.0); the PBS file follows OpenPBS's manual, and its shell ran with a pretended `pbsdsh`.
#
# ## A rank is killed, and training goes on
#
# The script below knows nothing of its launcher: it calls `init_process_group`, saves every fifth step, and resumes from what is there. In the first round rank 1 kills itself after step 12.

# %%
TRAIN = """
import json, os, signal, sys
import torch
import torch.distributed as dist

folder, deadly = sys.argv[1], sys.argv[2] == "deadly"
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
weight, done = torch.zeros(5), 0
if os.path.exists(f"{folder}/saved.pt"):
    weight, done = torch.load(f"{folder}/saved.pt")
for step in range(done + 1, 21):
    data = torch.randn(12, 6, generator=torch.Generator().manual_seed(step))[rank::size]
    error = data[:, :5] @ weight - data[:, 5]
    sums = torch.cat([data[:, :5].T @ error, error.square().sum()[None]])
    dist.all_reduce(sums)  # the gradient of all ranks, and their loss
    weight -= 0.01 * sums[:5]
    if rank == 0:
        with open(f"{folder}/steps", "a") as file:
            print(json.dumps([step, size, sums[5].item() / 12]), file=file)
    if rank == 0 and step % 5 == 0:
        torch.save((weight, step), f"{folder}/saving.pt")
        os.rename(f"{folder}/saving.pt", f"{folder}/saved.pt")
    if deadly and step == 12 and rank == 1 and done == 0:
        os.kill(os.getpid(), signal.SIGKILL)
dist.destroy_process_group()
"""
(FOLDER / "train.py").write_text(TRAIN)
print(TRAIN.count("\n"), "lines")

# %% [markdown]
# Two nodes, with a rank each:

# %%
(FOLDER / "deadly").mkdir()
program = (sys.executable, str(FOLDER / "train.py"), str(FOLDER / "deadly"), "deadly")
at = f"127.0.0.1:{free_port('127.0.0.1')}"
job = Job(program, at, nodes=(2, 2), logs=FOLDER / "logs")
ended = ranks.run(node, 2, job, job, device="cpu", timeout=60)  # CPU: agents, no GPU
for status, said in ended:
    print(f"status {status}:", *said, sep="\n  ")

# %% tags=["hide-input"]
# Table: the steps around the kill, beside one process that never stops


def one_process():
    weight, losses = torch.zeros(5), {}
    for step in range(1, 21):
        data = torch.randn(12, 6, generator=torch.Generator().manual_seed(step))
        error = data[:, :5] @ weight - data[:, 5]
        weight -= 0.01 * (data[:, :5].T @ error)
        losses[step] = error.square().sum().item() / 12
    return losses


plain = one_process()
steps = [json.loads(line) for line in open(FOLDER / "deadly/steps")]
numbers = [step for step, _, _ in steps]
assert numbers == [*range(1, 13), *range(11, 21)]
assert all(abs(value - plain[step]) < 1e-5 for step, _, value in steps)  # float32
rows = [
    (step, "0" if place < 12 else "1", f"{value:.5f}", f"{plain[step]:.5f}")
    for place, (step, _, value) in enumerate(steps)
    if 9 <= place <= 15
]
show.table(rows, ["step", "round", "loss", "loss of one process"])

# %% [markdown]
# What the ranks say lies in `logs/round-0/rank-1.log` and its neighbours, a file for each rank and round, by its number over all nodes.
# Steps 11 and 12 are made twice: they came after the last save. All losses are those of one process.
# The job lost two steps, and the seconds until torch was imported again.
#
# Such interruptions come every few hours in a job of a thousand GPUs, as [Checkpoints](checkpoint.md#how-long-a-job-lives) counts.
# What a restart costs is mostly no training at all. A part of it is a fresh interpreter that imports torch:

# %% tags=["measured"]
begin = time.perf_counter()
subprocess.run([sys.executable, "-c", "import torch"], check=True)
print("import torch:", round(time.perf_counter() - begin, 1), "s")

# %% [markdown]
# ### What a fault costs
#
# The page cannot wait for all of this. `benchmarks/cluster.py` has measured it: two nodes on one machine, four ranks, a small GPT, a checkpoint after every fifth step. After step 12 something happens.
# The seconds go from the last step before to the first step after.

# %% tags=["hide-input"]
# Table: what faults cost, recorded by benchmarks/cluster.py

path = Path(cluster.__file__).parent / "restarts.json"
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
# - No launcher loses more than the steps since the last save. What was computed again had the same losses, on fewer ranks too.
# - "An agent alone is killed": torchrun's ranks do not notice, and train on as orphans. Nobody watches them, so the next fault is for ever, unless a scheduler ends what the job has left.
# - The store's node lost: a dash, for both jobs end. Only the scheduler can start the job again, which is what requeueing is for.
#
# ### The store of all rounds
#
# By default torchrun's agents keep one store for the ranks of *all* rounds, and keys do not say of which round they are.
# A restarted rank can read the address of a dead one there, and waits for it: `connectFullMesh failed … Connection refused`.
# The [test](../tests/test_cluster.py) lets a rank of round 0 write a key, and a rank of round 1 finds it; with the variable set it does not (torch 2.13).
# Set it wherever restarts are allowed. A port for each round, as in our agent, is the same cure.
#
# ### What no restart helps against
#
# - The store's host is lost: the job goes with it.
# - A bad sample: the same step fails in every round, until restarts are used up. Skip it, or find it.
# - A full disk: every save fails, so every round begins at the same step. [Checkpoints](checkpoint.md#a-full-disk-and-a-folder-that-is-not-shared)
# - A node that is only slow: nothing fails. See the straggler, below.
#
# ## Is my job using its GPUs?
#
# A scheduler counts GPUs that are *allocated*, whether they compute or wait. `nvidia-smi` shows their utilisation, and many people stop when it says 100 %.
# By NVIDIA's definition that is the [share of time in which at least one kernel ran](https://docs.nvidia.com/deploy/nvml-api/structnvmlUtilization__t.html).
# How much of the GPU that kernel filled, it does not say.
# Busy and useful differ on a core as well. Here one multiplies small matrices for half a second, and then large ones.

# %%
def multiply(n, seconds=0.5):
    """Share of the time that a core was busy, and FLOP/s, in products of n x n."""
    a, count = torch.randn(n, n), 0
    begin, used = time.monotonic(), time.process_time()
    while (elapsed := time.monotonic() - begin) < seconds:
        a @ a
        count += 1
    return (time.process_time() - used) / elapsed, 2 * n**3 * count / elapsed


# %% tags=["hide-input", "measured"]
# Table: busy and useful, for small and for large products

# CPU: cores are measured
found = {n: ranks.run(multiply, 1, n, device="cpu")[0] for n in (16, 512)}
show.timed(found[512][1] > 5 * found[16][1], "large products: five times the FLOP/s")
rows = [(n, f"{100 * b:.0f}", f"{f / 1e9:.1f}") for n, (b, f) in found.items()]
show.table(rows, ["n", "core busy (% of time)", "GFLOP/s"])

# %% [markdown]
# ```{admonition} Checked: "the GPUs are at 100 %, so they are used"
# :class: checked
#
# In the table the core is equally busy with both sizes, and does many times the work with one of them.
# A GPU that waits for other ranks is at 100 %, too: [each collective of nccl is a kernel](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/overview.html), which runs while it waits.
# ```
#
# These numbers say more, each in its way:
#
# | number | from | what it tells |
# |---|---|---|
# | utilisation | nvidia-smi, NVML | whether anything ran: near 0, the GPU waits for the host |
# | `DCGM_FI_PROF_SM_ACTIVE` | DCGM | how many of the multiprocessors have work; NVIDIA calls 0.8 necessary, and under 0.5 probably ineffective |
# | `DCGM_FI_PROF_PIPE_TENSOR_ACTIVE` | DCGM | share of cycles in which tensor cores work: they give the FLOP/s of the data sheet |
# | `DCGM_FI_PROF_DRAM_ACTIVE` | DCGM | the same of memory: high beside idle tensor cores, memory is the limit |
# | power, clock, reasons for a lower clock | nvidia-smi, NVML | power far below the cap: little work; one GPU too hot: that rank is slow |
# | MFU | your script | FLOP that the model needs, over what the GPUs could do in that time {cite}`chowdhery2022palm`: being merely busy does not raise it |
#
# The definitions are in [DCGM's feature overview](https://docs.nvidia.com/datacenter/dcgm/latest/user-guide/feature-overview.html).
# Many sites draw them for each job: [LLview](https://github.com/FZJ-JSC/LLview) comes from Jülich, [jobstats](https://github.com/PrincetonUniversity/jobstats) from Princeton.
# Look there first. LLview samples once in minutes; what happens between them you sample yourself.
#
# ### Sample each rank
#
# A sampler asks the driver (`pip install nvidia-ml-py`) and the operating system, and sets nothing.

# %% tags=["hide-input"]
# Shows how a sample is taken, of a process and of its GPU

show.source(sample.Sampler.read, sample.Sampler._gpu)


# %% [markdown]
# On each node it is one command, for a launcher, one process, or a job of Slurm's; the last line draws:
#
# ```bash
# python -m shardlab cluster watch runs/one --pid $(pgrep -n torchrun)
# python -m shardlab cluster watch runs/one --job $SLURM_JOB_ID
# python -m shardlab cluster watch runs/one --draw        # runs/one/report.svg
# ```
#
# The next cell watches two ranks for two seconds. In the middle rank 0 alone is busy with a file, for 0.7 s.

# %%
def watched(folder):
    rank, pids = dist.get_rank(), [None, None]
    model = torch.nn.parallel.DistributedDataParallel(GPT(PRESETS["nano"]))
    tokens, targets = text.batch(64, 8, start=8 * rank)
    dist.all_gather_object(pids, os.getpid())
    if rank == 0:
        job = (folder, dict(enumerate(pids)), 0.1, 2.0)
        threading.Thread(target=sample.watch, args=job).start()
    begin, saved, go = time.monotonic(), False, torch.ones(1)
    while go.item() == 1:
        loss(model(tokens), targets).backward()
        if rank == 0 and not saved and time.monotonic() - begin > 0.7:
            time.sleep(0.7)  # the file
            saved = True
        go.fill_(time.monotonic() - begin < 2.2)
        dist.broadcast(go, 0)


# %% tags=["hide-input", "measured"]
# Runs it, and draws what each rank used, from the samples

folder = Path(tempfile.mkdtemp(dir=FOLDER))
ranks.run(watched, 2, folder, device="cpu")  # CPU: cores are sampled
(samples,) = folder.glob("samples-*.jsonl")
idle = [line for line in report.lines(samples) if line.get("cpu_percent", 100) < 40]
both = {line["rank"] for line in idle} == {0, 1} and len(idle) >= 6
show.timed(both, "both ranks idle for 0.7 s")
alt = "Processor, memory and network of two ranks over two seconds. In the middle both "
alt += "ranks' processors and the network fall to nothing for 0.7 s; memory stays."
show.figure(report.report(folder), alt, "cluster-report")


# %% [markdown]
# The processors of *both* ranks and the network fall silent: one works on a file, all wait.
# Memory looks healthy all the time.
#
# ### Step times hide the straggler
#
# One of these three ranks takes 40 ms longer in each step, before its first message. Every rank measures its own steps.

# %%
def steps(slow):
    rank, seconds = dist.get_rank(), []
    for _ in range(36):
        begin = time.monotonic()
        time.sleep(0.01 + 0.04 * (rank == slow))  # forward and backward
        dist.all_reduce(torch.ones(100_000))
        seconds.append(time.monotonic() - begin)
    return seconds, flight.record(lines=False)


def late(results):
    calls = {}
    for rank, (_, record) in enumerate(results):
        calls[rank] = [c for c in flight.calls(record) if c.op == "all_reduce"]
    return straggler.arrivals(calls)


# %% tags=["hide-input", "measured"]
# Table: each rank's steps, and when it arrives at their first message

results = ranks.run(steps, 3, 1, device="cpu")  # CPU: times are gloo's
arrivals = late(results)
middle = [1e3 * median(seconds) for seconds, _ in results]
show.timed(max(middle) < 1.2 * min(middle), "steps of all ranks take equally long")
slow = arrivals[1]
show.timed(slow.late > 0.02 and slow.last > 0.8, "rank 1 is late in four of five steps")
rows = [
    (a.rank, f"{middle[a.rank]:.0f}", f"{1e3 * a.late:.0f}", f"{100 * a.last:.0f}")
    for a in arrivals
]
head = ["rank", "step (ms, median)", "behind the first (ms, median)", "came last (%)"]
show.table(rows, head)

# %% tags=["hide-input", "measured"]
# Draws the steps, and the moments at which the ranks arrive

durations = {rank: seconds for rank, (seconds, _) in enumerate(results)}
alt = "Above, the duration of 36 steps: three ranks' lines lie together. Below, when "
alt += "each called a step's first collective: rank 1 comes last, by the same distance."
show.figure(straggler.picture(arrivals, durations), alt, "cluster-straggler")


# %% [markdown]
# Each step ends when the last rank has come: *arrivals* tell ranks apart.
# PyTorch's flight recorder keeps when a *host* queues a collective: with gloo, its arrival.
# With nccl hosts run ahead: it ranks hosts, and hides a throttled GPU.
# `TORCH_NCCL_ENABLE_TIMING=1` adds durations, which `arrivals` prefers: the straggler's are shortest.
# Take medians of 30 steps; machines' clocks differ by milliseconds.
#
# ### All ranks on one timeline
#
# The profiler writes a trace for each rank. Laid on one axis, they show the share of communication that is hidden: the time in which a rank also computes.

# %%
def traced(folder):
    """A step that averages gradients after backward, and one in which DDP does."""
    rank = dist.get_rank()
    tokens, targets = text.batch(128, 2, start=2 * rank)
    plain = GPT(PRESETS["micro"])
    ddp = torch.nn.parallel.DistributedDataParallel(plain, bucket_cap_mb=1)
    for name, model in (("after", plain), ("ddp", ddp)):
        for last in (False, True):  # the first step is a warm-up
            dist.barrier()
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                with record_function("forward"):
                    value = loss(model(tokens), targets)
                with record_function("backward"):
                    value.backward()
                for parameter in plain.parameters() if model is plain else ():
                    dist.all_reduce(parameter.grad)
        (folder / name).mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(f"{folder}/{name}/rank{rank}.json")


# %% tags=["hide-input", "measured"]
# Traces both, and draws the step whose messages come after backward

folder = Path(tempfile.mkdtemp(dir=FOLDER))
# CPU: gloo's messages are traced
ranks.run(traced, 2, folder, device="cpu", show=False)
traces = {name: timeline.read(folder / name) for name in ("after", "ddp")}
for trace in traces["ddp"]:
    early = trace.messages[0][0] < dict(trace.phases)["backward"][1]
    show.timed(early, "DDP's first message begins within backward")
hidden = max(trace.hidden for trace in traces["after"])
show.timed(hidden < 0.05, "messages after backward are not hidden")
alt = "Two ranks. Each computes first, then its messages follow: none is hidden."
show.figure(timeline.picture(traces["after"]), alt, "cluster-timeline-after")

# %% [markdown]
# This is the step with DDP. What is hidden is dark.

# %% tags=["hide-input", "measured"]
# Draws the step in which DDP sends during backward

alt = "Two ranks with DDP: messages begin while backward computes; part is hidden."
show.figure(timeline.picture(traces["ddp"]), alt, "cluster-timeline-ddp")


# %% [markdown]
# On a CPU messages are work for the same cores, so little is won. On GPUs nccl's kernels and copies between them count as messages.
#
# ## It hangs
#
# Nothing moves. Look in this order:
#
# 1. **Which ranks are alive?** Read the logs of all: a dead rank is no hang.
# 2. **Where does each stand?** `py-spy dump --pid PID`: with gloo, all but one in one collective's line; with nccl, where the host next waits for its GPU.
# 3. **Which collective waits, and for whom?** The flight recorder's records say it.
# 4. **No record?** Make the next hang speak: `faulthandler`, a watchdog, a short time limit.
#
# ### Compare the records of all ranks
#
# Here rank 1 leaves out the last all-reduces, as it would with a batch less. The group gives up after two seconds.
# Before that, a thread of each rank, a watchdog, sees that no step ends, and writes down what its rank has called.

# %%
def average(group, watchdog):
    for step in range(3):
        for size in (16, 4):
            if step == 2 and dist.get_rank() == 1:
                time.sleep(0.7)
            else:
                dist.all_reduce(torch.ones(size), group=group)
        watchdog.beat()


def skips(folder):
    two = timedelta(seconds=2)
    group = dist.new_group(timeout=two, group_desc="data")
    careless = dist.new_group(group_desc="careless")  # without a limit of its own
    dist.all_reduce(torch.ones(1), group=careless)
    watchdog, message = flight.Watchdog(folder, limit=0.5), "no error"
    try:
        average(group, watchdog)
    except RuntimeError as error:
        message = str(error).rpartition("] ")[2].partition(" for ")[0]
    watchdog.close()
    return message


# CPU: gloo's time limit
print(*ranks.run(skips, 3, FOLDER / "flight", device="cpu"), sep="\n")


# %% [markdown]
# Ranks 0 and 2 complain, which waited. The one at fault says nothing.
# Counting calls finds it:

# %%
def fewer(calls, group):
    """Ranks that have called fewer collectives of a group than others."""
    counts = {
        rank: max((c.number for c in mine if c.group.startswith(group)), default=0)
        for rank, mine in calls.items()
    }
    return [rank for rank, count in counts.items() if count < max(counts.values())]


calls = flight.read(FOLDER / "flight")
print("missing:", fewer(calls, "data"))

# %% [markdown]
# It leaves out ranks that called *another* collective under the same number, circles of groups, and GPUs that never start what nccl's hosts have all queued.
# `hang.explain` has that, and names collective and line:

# %%
found = hang.explain(calls)
print(*found)

# %% tags=["hide-input"]
# Holds the finding, and shows how it is made

assert found[0].ranks == (1,) and found[0].call.number == 5
assert fewer(calls, "data") == [1]
show.source(hang.explain, hang._first)

# %% [markdown]
# The watchdog's limit is longer than any step, the first and saves included, and shorter than the group's: what gloo has given up counts as done.
# `python -m shardlab cluster hang FOLDER` then says the same as above, and PyTorch's `torchfrtrace FOLDER -p trace_` reads these files, too.
# [A test](../tests/test_cluster_hang.py) holds the two equal.
#
# ```{admonition} Checked: "torchfrtrace works with any backend, and names the culprit"
# :class: checked
#
# With gloo's own records it ends in a `KeyError`, since gloo leaves out the groups (torch 2.13, November 2026, [tested](../tests/test_cluster_hang.py)); `flight.record` fills them in.
# It compares calls, sizes and states as above, but each group by itself: a circle is two missing ranks.
# Where ranks differ, the record that it happens to read first is right, and the others are culprits.
# Ours asks the majority. Of two ranks nobody knows: look at both lines.
# ```
#
# ### Time limits
#
# A group made without a limit takes gloo's 30 minutes, whatever `init_process_group` was given.

# %%
limits = {call.group.partition(":")[0]: call.limit for call in calls[0]}
print("data:", limits["data"], "s, careless:", limits["careless"], "s")
print("the world's is another one:", limits["default_pg"] < limits["careless"])

# %% [markdown]
# With nccl a watchdog thread ends the job, and leaves each rank's record (torch 2.13, November 2026). [What steers it](https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html):
#
# | variable | what for |
# |---|---|
# | `TORCH_NCCL_DUMP_ON_TIMEOUT=1` | write the records at a time limit, by default |
# | `TORCH_FR_DUMP_TEMP_FILE=/shared/trace_` | where; `~/.cache/torch` is the default |
# | `TORCH_NCCL_ENABLE_TIMING=1` | note what has started, and durations |
# | `TORCH_NCCL_DESYNC_DEBUG=1` | say which rank left the others |
#
# ### Where each rank stands
#
# `py-spy` reads a process's stack from outside, with root's right to trace (in containers `SYS_PTRACE`; on Ubuntu `ptrace_scope`).
# Without it, prepare: after `faulthandler.register(signal.SIGUSR2)` in the script, `kill -USR2 PID` prints the stack.
# This was captured of a real job on 23 November 2026, and is the first exercise.

# %%
print(captured.log("uneven").partition("== flight")[0].strip())


# %% [markdown]
# ## Where ranks run: cores, and the right network
#
# Two ranks that are bound to one core share it, however many are idle.

# %%
def on_cores(cores):
    os.sched_setaffinity(0, {cores[dist.get_rank()]})
    a = torch.randn(256, 256)
    dist.barrier()
    begin, used = time.monotonic(), time.process_time()
    while time.monotonic() - begin < 0.5:
        a @ a
    return (time.process_time() - used) / (time.monotonic() - begin)


# %% tags=["hide-input", "measured"]
# Table: what two ranks get of the cores, bound to one and bound to two

first, *others = sorted(os.sched_getaffinity(0))
# CPU: cores are measured
together = sum(ranks.run(on_cores, 2, [first, first], device="cpu"))
# CPU: cores are measured
apart = sum(ranks.run(on_cores, 2, [first, (others or [first])[0]], device="cpu"))
show.timed(together < 1.1, "ranks on one core share it")
rows = [("one core for both", f"{together:.2f}"), ("a core each", f"{apart:.2f}")]
show.table(rows, ["binding", "cores that the two ranks got, together"])

# %% [markdown]
# [`srun --cpu-bind=verbose,cores`](https://slurm.schedmd.com/srun.html) binds each task to its cores, and prints which; `--cpus-per-task` says how many, and data-loading workers need theirs.
# torchrun's processes share the cores of the one task that started it, so give that task all of the node's.
# `torchrun --numa-binding=node` then binds each rank to the cores beside the GPU with its local rank's number (torch 2.13).
# Ranks that talk most belong on one node, where rank numbers follow each other.
#
# nccl chooses interfaces and paths by itself. These variables show its choice, or overrule it ([NVIDIA's list](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html)):
#
# | variable | what for |
# |---|---|
# | `NCCL_DEBUG=INFO`, `NCCL_DEBUG_SUBSYS=INIT,NET,GRAPH` | prints version, interface and paths at the start; `WARN` is enough for errors |
# | `NCCL_SOCKET_IFNAME=ib0`, `=eth0`, `^docker` | interfaces by prefix, by exact name, or all but these; `GLOO_SOCKET_IFNAME` is gloo's |
# | `NCCL_IB_HCA=mlx5_0` | which InfiniBand adapters |
# | `NCCL_IB_DISABLE=1`, `NCCL_P2P_DISABLE=1` | leave InfiniBand, or direct copies between GPUs, out: to find a fault, never for good |
#
# `INFO` prints `NET/IB : Using …` or `NET/Socket : Using …`: the second, on a cluster with InfiniBand, is why a job is slow.
#
# Compute nodes often have no internet. Fetch data and models before, on a login node, into a folder that all nodes see (`HF_HOME=/shared/hf`).
# In the job, [`HF_HUB_OFFLINE=1`](https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables) turns waiting for a network into an error at once.
#
# ## Before the job: ask all ranks
#
# With `python -m shardlab doctor`, every rank looks at its own host, then at the others, and one table says what is wrong and what to do.
# Without a launcher it starts ranks of its own, here four.

# %% tags=["measured"]
here = ["--ranks", "4", "--device", "cpu", "--folder", tempfile.gettempdir()]
status = doctor.main([*here, "--needs", "1e6", "--pairs"])

# %% [markdown]
# A `note` is no fault: four ranks on two cores, for instance, wait for one another.
# The planner assumes nothing of a loopback.
# On GPUs that its table knows, half of the planner's rate is enough between hosts.
# Inside, an eighth is: [messages of 64 MiB reach little of NVLink's](https://github.com/NVIDIA/nccl-tests/issues/268).
#
# ### What it finds
#
# Now the kernel gets three faults that jobs really have, and the ranks that it starts inherit two of them.
# All of them may use one core, as under a launcher that binds wrongly; each may open 150 files; and the checkpoint wants a petabyte.

# %% tags=["measured"]
cores, files = os.sched_getaffinity(0), resource.getrlimit(resource.RLIMIT_NOFILE)
os.sched_setaffinity(0, {min(cores)})
resource.setrlimit(resource.RLIMIT_NOFILE, (150, files[1]))
try:
    status = doctor.main([*here, "--needs", "1e15"])
finally:
    os.sched_setaffinity(0, cores)
    resource.setrlimit(resource.RLIMIT_NOFILE, files)
assert status == 1

# %% [markdown]
# Each check is a function of what all ranks found. This one is for clocks.

# %%
show.source(checks.clocks)

# %% [markdown]
# Each rank asks rank 0 for the time, and takes the answer to be half a round trip old {cite}`cristian1989clock`.
# So an offset is believed only as far as it is larger than that half.
#
# ### Pairs that do not disturb each other
#
# In round $d$ rank $r$ exchanges messages with rank $r \oplus d$ (exclusive or).
# A round's pairs are disjoint, and up to 16 ranks everyone meets everyone.

# %%
hosts = ["node1", "node1", "node2", "node2"]
for number, turn in enumerate(pairs.turns(4, hosts, apart=False), 1):
    print(f"round {number}:", " ".join(f"{a}–{b}" for a, b in turn))
print(len(list(pairs.rounds(64))), "rounds for 64 ranks")

# %% [markdown]
# With gloo the cores of a host move the bytes, so its pairs take turns (`apart=True`).
# Above 16 ranks, the seven nearest and those 8, 16, 32, … away are measured: ten rounds for 64 ranks.
#
# ### In a job script
#
# The same command is one rank of whatever launcher starts it: it reads `RANK` and its neighbours (torchrun), or `SLURM_PROCID` and its (srun).
#
# ```bash
# srun python -m shardlab doctor --folder "$FOLDER" --needs 200e9 || exit 1
# srun python code/train.py --folder "$FOLDER" --resume auto
# ```
#
# The status is 0 when all is good, 1 when something is bad, and 2 when it could not begin; torchrun makes 1 of both.
# Start it with the options of the training's own `srun`: another binding is another machine.
# A rank that does not come, or stops answering, is named with what it was doing once nothing has moved for `--timeout` seconds.
#
# ### What it cannot see
#
# - What comes later: a GPU that is hot after an hour, a neighbour job that starts, a disk that fills.
# - What only all together show: it measures pairs, and a switch that is too small shows when all ranks talk across it.
#
# ## What you see, and where to look
#
# | what you see | where |
# |---|---|
# | it does not start | [When they do not meet](#when-they-do-not-meet) |
# | it ends, and every node blames another | [Who failed first](#who-failed-first) |
# | it does not start *again* | [the shared store](#the-store-of-all-rounds) |
# | it starts again and again at one step | [What no restart helps against](#what-no-restart-helps-against) |
# | nothing moves | [It hangs](#it-hangs) |
# | it is slow from the start | [the doctor](#before-the-job-ask-all-ranks); [cores and network](#where-ranks-run-cores-and-the-right-network) |
# | it becomes slow | [the sampler](#sample-each-rank); [who comes last](#step-times-hide-the-straggler) |
# | GPUs busy, and little done | [Is my job using its GPUs?](#is-my-job-using-its-gpus); [one timeline](#all-ranks-on-one-timeline) |
#
# ## When to use what
#
# - **One node**: `torchrun --standalone`.
# - **Several nodes under Slurm**: `srun` with one `torchrun` a node where ranks shall restart inside the job; `srun` alone where a requeue is restart enough.
# - **Nodes without a scheduler**: `torchrun` with c10d, in a service that ends orphans (systemd, a container).
# - **Kubernetes**: a TrainJob where Kubeflow is installed, else an Indexed Job.
# - **Fewer nodes than asked**: `--nnodes 1:2` only if your batch stays the same on fewer ranks, as in [our script](train.md); else the losses change.
# - **Always**: the doctor before, `--resume auto`, a signal before the time limit, a watchdog.
#
# ## Exercises
#
# Three of them are jobs that hang: they were run, looked at and ended by [a script](../code/shardlab/cluster/captured/capture.py). Each log has what was printed, where every rank stood, and the last calls of each. The scripts lie beside it; try without them first.
#
# ```{exercise-start} Who is who (easy)
# :label: ex-cluster-ranks
# ```
#
# Three nodes come to a rendezvous with 4, 2 and 4 GPUs, in this order, a rank for each GPU.
# What are `RANK`, `LOCAL_RANK` and `GROUP_RANK` of the second rank on the third node?

# %%
answer = ...  # (RANK, LOCAL_RANK, GROUP_RANK)
check(answer, "cluster_ranks")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-cluster-ranks
# :label: sol-cluster-ranks
# :class: dropdown
# ```
#
# All count from 0, and six ranks come before the third node's first one.

# %%
answer = (4 + 2 + 1, 1, 2)
check(answer, "cluster_ranks")

# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Four lines of a batch script (easy)
# :label: ex-cluster-batch
# ```
#
# A job of 4 nodes with 8 GPUs each shall save before its time limit, and go on afterwards. Somebody wrote this, and the training script saves on SIGUSR1:
#
# ```
#  1  #!/bin/bash
#  2  #SBATCH --nodes=4
#  3  #SBATCH --ntasks-per-node=8
#  4  #SBATCH --gpus-per-node=8
#  5  #SBATCH --time=24:00:00
#  6  #SBATCH --signal=USR1@300
#  7  export OMP_NUM_THREADS=8
#  8  #SBATCH --requeue
#  9  srun torchrun --nnodes=4 --nproc-per-node=8 \
# 10    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" \
# 11    --rdzv-endpoint=localhost:29500 train.py
# 12  if [[ -e stopped ]]; then scontrol requeue "$SLURM_JOB_ID"; fi
# ```
#
# Which four lines are wrong?

# %%
answer = {...}  # numbers of lines
check(answer, "cluster_batch")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-cluster-batch
# :label: sol-cluster-batch
# :class: dropdown
# ```
#
# 3: eight tasks are eight launchers a node; it has to be one.
# 8: behind a command, `#SBATCH` is a mere comment.
# 9: the signal kills `torchrun`; `trap "" USR1` has to come before it.
# 11: on each node `localhost` is that node, so each of them would wait for the other three.

# %%
answer = {3, 8, 9, 11}
check(answer, "cluster_batch")

# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Read this log: a rank is missing (easy)
# :label: ex-cluster-uneven
# ```
#
# Two ranks wait for a third. Which rank is missing, in which collective do the others wait, and in which line of `uneven.py` do they call it? (Here are its calls; the stacks stand above.)

# %%
print(captured.log("uneven").partition("== flight")[2])

# %%
answer = {"rank": ..., "collective": ..., "line": ...}  # a number, a name, a number
check(answer, "hang_uneven")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-cluster-uneven
# :label: sol-cluster-uneven
# :class: dropdown
# ```
#
# Call number 8 is an all-reduce on ranks 0 and 1, and a barrier on rank 2, which has left the loop: 11 samples give it 3, and the others 4.
# The innermost line of the script is the call itself; line 25 called the function.

# %%
answer = {"rank": 2, "collective": "all_reduce", "line": 17}
check(answer, "hang_uneven")


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Who is silent (medium)
# :label: ex-cluster-silent
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
# ```{solution-start} ex-cluster-silent
# :label: sol-cluster-silent
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
# ```{exercise-start} What srun's task has to tell torch (medium)
# :label: ex-cluster-srun
# ```
#
# Write what a task under `srun` needs in place of `torchrun`. `slurm` holds Slurm's variables as text, `names` the job's nodes in order, `gpus` how many GPUs this task sees.
# Return a dictionary with `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT` and `device`, numbers as numbers. `device` is the index of the task's GPU, or None where it sees none. Two jobs on one node must get two ports; ports below 1024 are not yours, those from 32768 are given out by Linux.

# %%
def my_ranks(slurm, names, gpus):
    pass  # your code


check(my_ranks)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-cluster-srun
# :label: sol-cluster-srun
# :class: dropdown
# ```

# %%
def my_ranks(slurm, names, gpus):
    local = int(slurm["SLURM_LOCALID"])
    return {
        "RANK": int(slurm["SLURM_PROCID"]),
        "WORLD_SIZE": int(slurm["SLURM_NTASKS"]),
        "LOCAL_RANK": local,
        "MASTER_ADDR": names[0],
        "MASTER_PORT": 20000 + int(slurm["SLURM_JOB_ID"]) % 10000,
        "device": local % gpus if gpus else None,
    }


check(my_ranks)

# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Read this log: everybody waits (medium)
# :label: ex-cluster-order
# ```
#
# Both ranks stand in the same line, in the same function, and neither is missing. In which group does each of them wait?

# %%
print(captured.log("order"))

# %%
answer = {"rank 0": ..., "rank 1": ...}  # names of groups
check(answer, "hang_order")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-cluster-order
# :label: sol-cluster-order
# :class: dropdown
# ```
#
# The line goes through a *set* of names, whose order is another one in each process. Any sorted order ends it.

# %%
answer = {"rank 0": "norm", "rank 1": "loss"}
check(answer, "hang_order")


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} One card or one cable (medium)
# :label: ex-cluster-culprit
# ```
#
# The doctor measured `links`: a list of `(a, b, bytes per second)`, each pair of ranks once.
# A link is slow when it has less than a third of the median of all links.
# Write a function that returns the rank *all* of whose links are slow, and `None` when there is none: then it is a cable between two, or nothing.

# %%
def culprit(links):
    ...


check(culprit, "cluster_culprit")


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-cluster-culprit
# :label: sol-cluster-culprit
# :class: dropdown
# ```
#
# Each other rank has one slow link as well, the one to the culprit: so *some* is not enough.

# %%
def culprit(links):
    rates = sorted(rate for _, _, rate in links)
    slow = rates[len(rates) // 2] / 3
    for rank in {rank for a, b, _ in links for rank in (a, b)}:
        if all(rate < slow for a, b, rate in links if rank in (a, b)):
            return rank
    return None


check(culprit, "cluster_culprit")

# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Read this log: the wrong parallelism (hard)
# :label: ex-cluster-tensor
# ```
#
# The job says that it runs tensor parallelism, in which both ranks would see the same sequences and add up activations. What does it run: `"ddp"`, `"zero1"`, `"zero3"` or `"tensor"`? Which rank has run out of data, in which collective does the other one wait, and in which line?

# %%
print(captured.log("tensor"))

# %%
answer = {"runs": ..., "rank": ..., "collective": ..., "line": ...}
check(answer, "hang_tensor")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-cluster-tensor
# :label: sol-cluster-tensor
# :class: dropdown
# ```
#
# Halves of parameters are gathered before each block, in forward and again in backward, and gradients are reduce-scattered: ZeRO-3. Sizes do not depend on the batch: 2 × 24,992 numbers are a block. Tensor parallelism would all-reduce activations of 1 × 64 × the hidden size.
# The reason stands in the first line: a setting is misspelt, and nobody reads it. So each rank trains on sequences of its own, and one of seven is left over.

# %%
answer = {"runs": "zero3", "rank": 1, "collective": "all_gather", "line": 27}
check(answer, "hang_tensor")


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Fewer rounds (hard)
# :label: ex-cluster-rounds
# ```
#
# With exclusive or, six ranks take seven rounds, and in most of them somebody is idle.
# For an even number of ranks $N$ there is a schedule of $N-1$ rounds in which nobody ever is: that of a round-robin tournament.
# Write `rounds(size)`, a list of rounds, each a list of pairs `(a, b)`.

# %%
def rounds(size):
    ...


check(rounds, "cluster_rounds")


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-cluster-rounds
# :label: sol-cluster-rounds
# :class: dropdown
# ```
#
# The last rank keeps its place, and the others go round in a circle: those who stand opposite meet.

# %%
def rounds(size):
    circle, found = list(range(size - 1)), []
    for _ in range(size - 1):
        around = [*circle, size - 1]
        found.append([(around[i], around[-1 - i]) for i in range(size // 2)])
        circle = circle[1:] + circle[:1]
    return found


check(rounds, "cluster_rounds")

# %% [markdown]
# ```{solution-end}
# ```
#
# ## Summary
#
# - A launcher starts ranks, tells them who they are, and ends all when one fails. On several nodes agents meet in a store, in rounds.
# - The scheduler gives nodes and signals; the script saves at a signal, on all ranks after the same step, and is put back into the queue.
# - A restart costs the steps since the last save and the seconds of imports; against a bad sample or a full disk it does not help.
# - Busy is not useful: look at MFU, at who comes last, and at all ranks on one timeline.
# - In a hang, the rank that complains is seldom the one at fault: compare what all ranks have called.
# - Ask all ranks before the job, with the options of the job.
#
# ## Further reading
#
# - PyTorch's [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html), and its [flight recorder](https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html).
# - Slurm's manual pages: sbatch {cite}`schedmd2026sbatch` and srun {cite}`schedmd2026srun`.
# - A pod for each node: Kubernetes on Jobs whose pods talk to each other {cite}`kubernetes2026job`.
# - NVIDIA's [variables of nccl](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html), and [DCGM's counters](https://docs.nvidia.com/datacenter/dcgm/latest/user-guide/feature-overview.html).
