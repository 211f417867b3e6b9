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
# # Clusters: your script as a job
#
# After this lesson you can
#
# - write a batch script for one GPU and for several nodes, and say what each line does;
# - have a job save before its time limit, go back into the queue, and go on after a rank was lost;
# - say whether a job uses its GPUs, and which rank holds up the others;
# - find the rank, the collective and the line at which a job hangs;
# - examine the nodes before a job, with one command.
#
# You have a script that trains on one GPU, and an account on a cluster.
# The cluster's machines are *nodes*. You log in to one of them, the *login node*; those with GPUs are the *compute nodes*.
# You do not start programs on compute nodes yourself. You hand a *job* to the *scheduler*: what shall run, on how many nodes and GPUs, and for how long.
# The scheduler starts it when so many are free. Here it is Slurm; [PBS and Kubernetes](#the-same-job-under-pbs-and-kubernetes) follow near the end.
#
# ![On the left the login node, on which you call sbatch. The job goes into the queue, and the scheduler starts it when two nodes are free. On the first of two compute nodes the batch script runs, once. Its srun starts one torchrun on each node, and each torchrun starts two ranks. All nodes see one shared file system.](../figures/cluster_job.svg)

# %% tags=["hide-input"]
# Imports, and folders for what the ranks write

import json
import os
import resource
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from shardcourse.exercises import check
from shardlab import elastic, ranks
from shardlab.common import show, text
from shardlab.gpt.model import GPT, PRESETS, loss
from shardtools.__main__ import main
from shardtools.cluster import captured
from shardtools.cluster.doctor import checks, pairs
from shardtools.cluster.slurm import sessions
from shardtools.cluster.watch import flight, hang, report, sample, straggler

show.set_style()
TEMPORARY = tempfile.TemporaryDirectory(prefix="cluster-")  # goes with this process
FOLDER = Path(TEMPORARY.name)

# %% [markdown]
# ## One GPU: a batch script
#
# A *batch script* is a shell script whose first comments are options for the scheduler.
# This one is for a script that knows nothing of ranks, as [the first stage of the training script](train.md#training-script-from-one-process-to-many).

# %%
sessions.show_job("one.sbatch")

# %% [markdown]
# You hand it in with `sbatch one.sbatch train.py --steps 1000`. What follows its name arrives in it as `"$@"`.
# `sbatch` prints the job's number and returns at once. `squeue` lists the jobs, and `scancel NUMBER` ends one.

# %%
sessions.show_session("one")

# %% [markdown]
# `steps.py` stands for a training script: it counts, saves and resumes, and needs no GPU.
#
# ### The environment inside a job
#
# The job runs on another machine than the one on which you tried your script.
# Most sites pass the variables of the shell in which you call `sbatch` on to the job. Do not rely on it: let the batch script set up everything that the script needs.
#
# | you need | the line in the batch script |
# |---|---|
# | programs that the site installs | `module load NAME/VERSION`; `module avail` lists them |
# | your own Python packages | `source /shared/venv/bin/activate`, a virtual environment in a folder that all nodes see |
# | or a container | `srun apptainer exec --nv IMAGE.sif python "$@"`; `--nv` passes the GPUs on |
# | data and models of Hugging Face | `export HF_HOME=/shared/hf HF_HUB_OFFLINE=1` |
#
# Compute nodes often have no internet. Fetch data, models and packages on the login node, into a folder that all nodes see.
# [`HF_HUB_OFFLINE=1`](https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables) then turns waiting for a network into an error at once.
#
# Where the environment is not activated, the node does not find your programs. Slurm says so in the name of a system call:

# %%
sessions.show_session("path")

# %% [markdown]
# `execve(): torchrun: No such file or directory` means that no `torchrun` is in the job's `PATH`: activate the environment in the batch script.
#
# The commands of this course that look at a job, `doctor` and `cluster watch`, run inside the job.
# So its environment needs the course's package (`pip install -e .` in the course's folder) and, for the figures of GPUs, `pip install nvidia-ml-py`.
#
# ### It stays in the queue
#
# `squeue` gives the reason in its last column.
# `Priority` and `Resources` mean that other jobs come first. Some reasons never end by themselves:

# %%
sessions.show_session("pending")

# %% [markdown]
# Nodes are grouped into *partitions*, and each has a longest time. `sinfo -o '%P %l'` lists both.
# `PartitionTimeLimit`: the job asks for more than its partition allows, so it waits for ever. Ask for less, or name another partition with `--partition`.
# Some sites refuse such a job at once: `Requested time limit is invalid`.
#
# ### A small Slurm on your own machine
#
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
# Only `apt-get` needs root. It starts no system service, and listens on the loopback interface alone.
# Scheduler, signals, queue and files are real. Pretended are the nodes, which are both this machine, and the GPUs, which are devices such as `/dev/null`: Slurm can count them, and no script can compute on them.
#
# Where Slurm is installed, a page runs the sessions that are short. Elsewhere, and where a session is long, it shows what was recorded, and says when.
#
# ## Two nodes
#
# On several GPUs a script runs as several processes, the [ranks](train.md#ranks-a-process-group-and-a-device).
# The program that starts a node's ranks, tells each who it is, and ends all when one fails is a *launcher*. PyTorch's is `torchrun`.
# On two nodes there are two of them. They find each other at an address that both are given, and number the ranks; this meeting is the *rendezvous*.
# [A launcher from scratch](elastic.md) builds one.
#
# ### The batch script, line by line
#
# Slurm runs the batch script once, on the job's first node. `srun` is what starts a program on all of them.

# %%
sessions.show_job("torchrun.sbatch")

# %% [markdown]
# | line | why |
# |---|---|
# | `#SBATCH …` | options, as comments; after the first command Slurm ignores them, silently |
# | `--ntasks-per-node=1` | a *task* is one start of the program by `srun`. Each `torchrun` starts its node's ranks itself, so one is enough; with 2 there are twice as many ranks as GPUs |
# | `--output`, `--error` | one file each for all ranks, in the folder where you called `sbatch`. A folder in these names must exist, else the job fails at once, without output (`JobLaunchFailure`) |
# | `first`, `address` | the first node's name, and the address at which Slurm reaches it: there the launchers meet |
# | `port=…` | from the job's number: two jobs that share a node must not meet |
# | `srun --cpus-per-task` | said again, because `srun` does not inherit it from `sbatch` since Slurm 22.05 {cite}`schedmd2026srun` |
# | `--kill-on-bad-exit=1` | when one task fails, the others end |
#
# What `torchrun` is given there, and a few options more; the defaults are those of the installed version.

# %% tags=["hide-input"]
# Table: torchrun's options, their defaults, and what each gives

from torch.distributed.run import get_args_parser

MEANS = [
    ("--nnodes", "nodes of the job; 1:2 lets it go on with one"),
    ("--nproc-per-node", "ranks on this node; also gpu: one for each GPU"),
    ("--rdzv-backend", "how launchers meet; for several nodes c10d"),
    ("--rdzv-endpoint", "HOST:PORT where they meet; the same on all nodes"),
    ("--rdzv-id", "the job's name; the same on all nodes"),
    ("--rdzv-conf", "settings of the meeting: join_timeout, is_host, …"),
    ("--max-restarts", "how often all ranks start again after one has failed"),
    ("--log-dir", "folder of logs and error files"),
    ("--tee", "3: output and errors to files and to the console"),
    ("--local-ranks-filter", "0: the console shows one rank of each node"),
    ("--node-rank", "only for the static backend: c10d ignores it"),
    ("--shutdown-timeout", "seconds from SIGTERM to SIGKILL (none: 30)"),
    ("--standalone", "one node: picks a free port itself"),
    ("--local-addr", "this node's address for the others; none: its name's"),
]
known = {name: a for a in get_args_parser()._actions for name in a.option_strings}
empty = None, "", False
rows = []
for name, means in MEANS:
    default = known[name].default
    shown = "–" if default in empty else str(default).replace(",", ", ")  # so that it may break
    rows.append((name, shown, means))
show.table(rows, ["option", "default", "what it gives"])

# %% [markdown]
# `torchrun`'s options come before the script's name, the script's own after it.
# `sbatch torchrun.sbatch train.py --folder runs/a` submits it. Here it starts `steps.py`, which says who it is.

# %%
sessions.show_session("torchrun", live=False)

# %% [markdown]
# The lines are sorted here; in the file, ranks write as they please.
# `LOCAL_RANK` is a rank's number on its node and chooses its GPU. `RANK`, over all nodes, is for everything else.
#
# `srun` can start the ranks itself, without `torchrun`. Then the script needs four names that `torchrun` would have set, and Slurm has all of them:

# %%
sessions.show_job("srun.sbatch")

# %% [markdown]
# What you give up are restarts inside the job.
# The [tests](../tests/test_cluster_slurm.py) run these files as they are, with [our script](train.md#the-script-to-take-home): under both, losses equal those of one process, to 1e-5.
#
# ### Rank 0 is not on node 0
#
# With `c10d`, `torchrun` sorts the nodes by address, as text: `node10` comes before `node2`.
# So print and save by `RANK`, and never by Slurm's number of the node, `SLURM_NODEID`.
#
# The node that the endpoint names has to serve the meeting. Each `torchrun` decides by the name whether that is itself.
# At some sites the endpoint is a name that no node calls itself, such as `node1i` for node1 on the InfiniBand network: then nobody serves, and all wait.
# There `--rdzv-conf=is_host=…` decides, with 1 on the first node and 0 on the others. Single quotes let each node compute its own:
#
# ```bash
# srun bash -c 'torchrun --rdzv-conf=is_host=$((SLURM_NODEID == 0)) … "$@"' torchrun "$@"
# ```
#
# ### Which GPU is mine

# %%
sessions.show_session("gpus")

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
sessions.show_session("devices", live=False)

# %% [markdown]
# ````{admonition} Checked: "use $RANDOM as --rdzv-id"
# :class: checked
#
# It depends on quotes. Between double quotes the batch script replaces `$RANDOM` once, before `srun` starts anything.
# Between single quotes every node draws a number of its own, and the nodes wait for each other until the rendezvous times out.
# `$SLURM_JOB_ID` cannot go wrong, and leads from a log to its job.
# ````

# %%
sessions.show_session("random")

# %% [markdown]
# ### When they do not meet
#
# Each row of this table is [a test](../tests/test_elastic.py).
#
# | what is wrong | what you see |
# |---|---|
# | a node does not come | `RendezvousTimeoutError`, after `join_timeout`, 600 s |
# | the address is wrong, or nobody serves it | `RendezvousConnectionError: The connection to the C10d store has failed`, after `read_timeout`, 60 s |
# | two jobs, or two ids, at one port | one of these two; no word of ids |
# | the wrong interface: `GLOO_SOCKET_IFNAME=ib7` | the rank raises, and names `ib7` |
# | node 0's name has no address, as in containers | `The IPv6 network addresses of (NAME, PORT) cannot be retrieved`, again and again |
#
# `--local-addr` gives an address in its place: with `--standalone`, 127.0.0.1.
#
# `torchrun` listens on all interfaces of the first node, without a password.
#
# ## Before the time limit
#
# A job that reaches `--time` gets SIGTERM, and SIGKILL some seconds later (30 by default, the site's `KillWait`).
# That is short for a checkpoint. So ask for a signal of your own earlier, save, and go back into the queue:

# %%
sessions.show_job("requeue.sbatch")

# %% [markdown]
# `--signal=USR1@120` sends SIGUSR1 to all processes that `srun` has started, and none to the batch script, 120 seconds before the end.
# Slurm is not punctual: it may send it up to 60 seconds *earlier* than asked {cite}`schedmd2026sbatch`.
# Ask for more seconds than a step and a save need together.
#
# All ranks have to leave after the same step, though the signal reaches them at different moments. A rank that left earlier would leave the others waiting.
# So at each step every rank adds a flag to an all-reduce, 1 if it has got the signal. When the sum is not 0, all of them save after that step, and stop.
# They end with status 0 and leave the file `stopped`; the batch script sees it, and puts its own job back into the queue.
# Another status would look like a failure to `torchrun`, which would start all ranks again.

# %%
sessions.show_session("requeue", live=False)

# %% [markdown]
# `scancel --signal` sends the same signal by hand: so you try this without waiting for the time limit.
# A requeued job keeps its number, and so its folder. It waits two minutes before it may start (`BeginTime`); `scontrol update` takes that away.
# The test stops [our script](train.md#the-script-to-take-home) in this way, and finds each step once, with the losses of one process.
#
# ````{admonition} Checked: "USR1 makes the job save"
# :class: checked
#
# It makes the *ranks* save, if they handle the signal. `torchrun` does not, and SIGUSR1 ends a process that does not handle it: status 138, which is 128 + 10.
# `set -e` then ends the batch script before it looks for `stopped`, and nothing is requeued, though everything was saved.
# `--signals-to-handle` (torch 2.13) passes the signal on, but `torchrun` still ends with 1.
# `trap "" USR1; exec torchrun` lets `torchrun` and what it starts ignore the signal; a rank that then sets a handler of its own gets it all the same.
# ````

# %%
sessions.show_session("usr1", live=False)

# %% [markdown]
# ## A rank is killed, and training goes on
#
# A rank can be lost at any time: a GPU fails, memory runs out, somebody kills it.
# The other ranks cannot go on without it. With `--max-restarts=3`, `torchrun` ends them and starts all of them again, up to three times.
# This helps a script that saves, and that resumes from what is there. This one saves after every fifth step. In its first run rank 1 kills itself after step 12.

# %%
show.file(sessions.JOBS / "killed.py", "python")

# %% [markdown]
# The batch script is the same. The variable is explained [below](#the-store-of-all-rounds).

# %%
sessions.show_session("killed", live=False)

# %% [markdown]
# Steps 11 and 12 are made twice, because they came after the last save. All losses equal those of a single process.
# The job lost two steps, and the seconds in which four interpreters imported torch again.
# Such interruptions come every few hours in a job of a thousand GPUs, as [Checkpoints](checkpoint.md#mean-time-between-failures) counts.
#
# ### Who failed first
#
# Each `torchrun` names a "root cause" among *its own* ranks. On the other nodes that is a rank whose connection was closed, and not the cause.
# Decorate `main` with `@record` (`torch.distributed.elastic.multiprocessing.errors`), and every rank that raises leaves `LOGS/ID_…/attempt_0/LOCAL_RANK/error.json`.
# Over all nodes, the earliest is the cause.
#
# ````{admonition} Checked: "the timestamp in error.json tells who was first"
# :class: checked
#
# It is in whole seconds (torch 2.13), and victims follow within milliseconds: [the test](../tests/test_elastic.py) finds ten digits and no more.
# The file's own time of change is finer. On a shared file system, `ls -tr --full-time logs/*/attempt_0/*/error.json | head -1` names the first.
# ````
#
# ### What a fault costs
#
# `benchmarks/elastic.py` has measured it: two nodes on one machine, four ranks, a small GPT, a checkpoint after every fifth step. After step 12 something happens.
# The seconds go from the last step before it to the first step after it.

# %% tags=["hide-input"]
# Table: what faults cost, recorded by benchmarks/elastic.py

path = Path(elastic.__file__).parent / "restarts.json"
found = json.loads(path.read_text())
rows = []
for row in found["rows"]:
    told = (row["seconds"][1], row["lost"][1], row["after"][1])
    rows.append((row["case"], *("–" if x is None else x for x in told)))
where = f"torch {found['torch']}, {found['cores']} cores"
start = f"started by a mere loop, the script takes {found['bare start (s)']['4']} s"
caption = f"Recorded {found['date']}, {where}; {start}"
head = ["what happens", "seconds", "steps lost", "ranks after (of 4)"]
show.table(rows, head, caption=caption)

# %% [markdown]
# - Most seconds are the script's start, its imports above all, which no launcher can spare.
# - No more is lost than the steps since the last save.
# - An agent is torchrun's process on a node. When it alone is killed, its ranks do not notice, and train on. Nobody watches them any more: at the next fault they wait for ever, and they hold their GPUs until somebody ends them. Slurm does so when the job ends.
# - The store is where the agents meet. A dash: the job ends with it, and only the scheduler can start it again, which is what requeueing is for.
#
# ### The store of all rounds
#
# Each start of the ranks is a *round*. By default `torchrun` keeps one store of addresses for the ranks of *all* rounds.
# A restarted rank can find the address of a dead one there, and waits for it: `connectFullMesh failed … Connection refused`.
# `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` gives each round its own store. Set it wherever you allow restarts.
# The [test](../tests/test_elastic.py) lets a rank of the first round write a key, and a rank of the second finds it; with the variable set it does not (torch 2.13).
#
# ### What no restart helps against
#
# - The first node is lost: the job goes with it.
# - A bad sample: the same step fails in every round, until no restart is left. Find it, or skip it.
# - A full disk: every save fails, so every round begins at the same step. [Checkpoints](checkpoint.md#a-full-disk-and-a-folder-that-is-not-shared)
# - A node that is only slow: nothing fails. See [the straggler](#step-times-hide-the-straggler).
#
# ## Is my job using its GPUs?
#
# A scheduler counts GPUs that are *allocated*, whether they compute or wait. `nvidia-smi` shows their utilisation, and many people stop when it says 100 %.
# By NVIDIA's definition that is the [share of time in which at least one kernel ran](https://docs.nvidia.com/deploy/nvml-api/structnvmlUtilization__t.html), a *kernel* being one operation on the GPU.
# How much of the GPU that kernel used, it does not say.
# The same holds for a processor's core. Here one multiplies small matrices for half a second, and then large ones.

# %% tags=["hide-input", "measured"]
# Table: busy and useful, for small and for large products


def measure_products(n, seconds=0.5):
    """Share of the time that a core was busy, and FLOP/s, in products of n x n."""
    a, count = torch.randn(n, n), 0
    begin, used = time.monotonic(), time.process_time()
    while (elapsed := time.monotonic() - begin) < seconds:
        a @ a
        count += 1
    return (time.process_time() - used) / elapsed, 2 * n**3 * count / elapsed


# CPU: cores are measured
found = {n: ranks.run(measure_products, 1, n, device="cpu")[0] for n in (16, 512)}
show.check_timing(
    found[512][1] > 5 * found[16][1], "large products: five times the FLOP/s"
)
rows = [(n, f"{100 * b:.0f}", f"{f / 1e9:.1f}") for n, (b, f) in found.items()]
show.table(rows, ["rows of the matrix", "core busy (% of time)", "GFLOP/s"])

# %% [markdown]
# ```{admonition} Checked: "the GPUs are at 100 %, so they are used"
# :class: checked
#
# In the table the core is equally busy with both sizes, and does many times the work with one of them.
# A GPU that waits for other ranks is at 100 %, too: [each collective of nccl is a kernel](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/overview.html), which runs while it waits.
# ```
#
# These numbers say more:
#
# | number | from | what it tells |
# |---|---|---|
# | utilisation | nvidia-smi, NVML | whether anything ran: near 0, the GPU waits for the processor or for data |
# | `DCGM_FI_PROF_SM_ACTIVE` | DCGM | how many of the GPU's multiprocessors have work; NVIDIA calls 0.8 necessary, and under 0.5 probably ineffective |
# | `DCGM_FI_PROF_PIPE_TENSOR_ACTIVE` | DCGM | fraction of cycles in which tensor cores work: they give the FLOP/s of the data sheet |
# | `DCGM_FI_PROF_DRAM_ACTIVE` | DCGM | the same of memory. If it is high and tensor cores are idle, memory is the limit |
# | power, clock, reasons for a lower clock | nvidia-smi, NVML | power far below the limit: little work. One GPU too hot: that rank is slow |
# | MFU (model FLOP utilisation) | your script | operations that the model needs, over what the GPUs could do in that time {cite}`chowdhery2022palm`: being merely busy does not raise it |
#
# NVML is the library of NVIDIA's driver, DCGM a service of the node's; [its overview](https://docs.nvidia.com/datacenter/dcgm/latest/user-guide/feature-overview.html) has the definitions.
# Many sites draw them for each job: [LLview](https://github.com/FZJ-JSC/LLview) comes from Jülich, [jobstats](https://github.com/PrincetonUniversity/jobstats) from Princeton.
# Look there first. They sample once in minutes; what happens between two samples you sample yourself.
#
# ### Sample each rank
#
# A sampler asks the driver and the operating system, and changes nothing.
# On a machine of your own you give it the launcher; in Slurm you start it inside the job that runs, once on each node:
#
# ```bash
# python -m shardlab cluster watch runs/one --pid $(pgrep -n torchrun)
# srun --jobid=1234 --overlap --ntasks-per-node=1 \
#     python -m shardlab cluster watch runs/one --job 1234
# python -m shardlab cluster watch runs/one --draw        # runs/one/report.svg
# ```
#
# The next cell watches two ranks for two seconds. In the middle rank 0 alone writes a file, for 0.7 s.

# %% tags=["hide-input", "measured"]
# Runs two ranks of DDP, and draws what each of them used


def train_and_sample(folder):
    rank, pids = dist.get_rank(), [None, None]
    model = torch.nn.parallel.DistributedDataParallel(GPT(PRESETS["nano"]))
    tokens, targets = text.get_batch(64, 8, start=8 * rank)
    dist.all_gather_object(pids, os.getpid())
    if rank == 0:
        job = (folder, dict(enumerate(pids)), 0.1, 2.0)
        threading.Thread(target=sample.sample_ranks, args=job).start()
    begin, saved, go = time.monotonic(), False, torch.ones(1)
    while go.item() == 1:
        loss(model(tokens), targets).backward()
        if rank == 0 and not saved and time.monotonic() - begin > 0.7:
            time.sleep(0.7)  # the file
            saved = True
        go.fill_(time.monotonic() - begin < 2.2)
        dist.broadcast(go, 0)


folder = Path(tempfile.mkdtemp(dir=FOLDER))
ranks.run(train_and_sample, 2, folder, device="cpu")  # CPU: cores are sampled
(samples,) = folder.glob("samples-*.jsonl")
idle = [line for line in report.read_samples(samples) if line.get("cpu_percent", 100) < 40]
both = {line["rank"] for line in idle} == {0, 1} and len(idle) >= 6
show.check_timing(both, "both ranks idle for 0.7 s")
alt = "Processor, memory and network of two ranks over two seconds. In the middle both "
alt += "ranks' processors and the network fall to nothing for 0.7 s; memory stays."
show.figure(report.draw_report(folder), alt, "cluster-report")

# %% [markdown]
# The processors of *both* ranks and the network are idle: one writes a file, the other waits.
# Memory does not change.
#
# ### Step times hide the straggler
#
# A *straggler* is a rank that is slower than the others. Here rank 1 of three takes 40 ms longer in each step, before its first message. Every rank measures its own steps.

# %% tags=["hide-input", "measured"]
# Table: each rank's steps, and when it arrives at their first message


def time_steps(slow):
    rank, seconds = dist.get_rank(), []
    for _ in range(36):
        begin = time.monotonic()
        time.sleep(0.01 + 0.04 * (rank == slow))  # forward and backward
        dist.all_reduce(torch.ones(100_000))
        seconds.append(time.monotonic() - begin)
    return seconds, flight.take_record(stacks=False)


def compute_delays(results):
    calls = {}
    for rank, (_, record) in enumerate(results):
        calls[rank] = [c for c in flight.parse_calls(record) if c.op == "all_reduce"]
    return straggler.measure_delays(calls)


results = ranks.run(time_steps, 3, 1, device="cpu")  # CPU: times are gloo's
delays = compute_delays(results)
middle = [1e3 * median(seconds) for seconds, _ in results]
show.check_timing(
    max(middle) < 1.2 * min(middle), "steps of all ranks take equally long"
)
slow = delays[1]
late = slow.median_delay > 0.02 and slow.share_last > 0.8
show.check_timing(late, "rank 1 is late in four of five steps")
rows = []
for a in delays:
    numbers = middle[a.rank], 1e3 * a.median_delay, 100 * a.share_last
    rows.append((a.rank, *(f"{number:.0f}" for number in numbers)))
head = ["rank", "step (ms, median)", "behind the first (ms, median)", "came last (%)"]
show.table(rows, head)

# %% tags=["hide-input", "measured"]
# Draws the steps, and the moments at which the ranks arrive

durations = {rank: seconds for rank, (seconds, _) in enumerate(results)}
alt = "Above, the duration of 36 steps: three ranks' lines lie together. Below, when "
alt += "each called a step's first collective: rank 1 comes last, by the same distance."
show.figure(straggler.draw_delays(delays, durations), alt, "cluster-straggler")

# %% [markdown]
# Each step ends when the last rank has come, so all steps take equally long. What tells ranks apart is when each *arrives* at the collective.
# PyTorch's flight recorder, a list that each rank keeps of its last collectives, has the moment at which the *processor* queued each of them.
# With gloo that is the rank's arrival. With nccl the processor runs ahead of its GPU, so a slow GPU does not show.
# Set `TORCH_NCCL_ENABLE_TIMING=1`, which adds how long each collective took. The straggler's are the shortest.
# Take medians of 30 steps; clocks of two machines differ by milliseconds.
#
# ### All ranks on one timeline
#
# The profiler writes a trace for each rank. [Perfetto](https://ui.perfetto.dev) draws one, and [HTA](https://hta.readthedocs.io) compares those of all ranks.
# The table compares a step that averages gradients after backward with one of DDP.

# %% tags=["hide-input", "measured"]
# Table: when messages begin, read from the traces of both steps


def trace_steps(folder):
    """A step that averages gradients after backward, and one in which DDP does."""
    rank = dist.get_rank()
    tokens, targets = text.get_batch(128, 2, start=2 * rank)
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


folder = Path(tempfile.mkdtemp(dir=FOLDER))
# CPU: gloo's messages are traced
ranks.run(trace_steps, 2, folder, device="cpu", show=False)
rows = []
for name in ("after", "ddp"):
    for path in sorted((folder / name).glob("*.json")):
        begins = {}
        for event in json.loads(path.read_text())["traceEvents"]:
            if event.get("name") in ("backward", "gloo:all_reduce"):
                first = begins.setdefault(event["name"], event)
                begins[event["name"]] = min(first, event, key=lambda e: e["ts"])
        backward, message = begins["backward"], begins["gloo:all_reduce"]
        share = (message["ts"] - backward["ts"]) / backward["dur"]
        show.check_timing(
            (share < 1) == (name == "ddp"), "DDP alone sends during backward"
        )
        rows.append((name, path.stem.removeprefix("rank"), f"{100 * share:.0f}"))
show.table(rows, ["gradients", "rank", "first message begins (% of backward)"])


# %% [markdown]
# On a CPU messages are work for the same cores, so little is won. On GPUs nccl's kernels and copies between them count as messages.
#
# ## It hangs
#
# Nothing moves. Look in this order:
#
# 1. **Which ranks are alive?** Read the logs of all: a dead rank is an error, and no hang.
# 2. **Where is each?** `py-spy dump --pid PID`: with gloo, all but one in one collective's line; with nccl, where the host next waits for its GPU.
# 3. **Which collective waits, and for whom?** The flight recorder's records say it.
# 4. **No record?** Make the next hang speak: `faulthandler`, a watchdog, a short time limit.
#
# ### Compare the records of all ranks
#
# Here rank 1 leaves out the last all-reduces, as if it had one batch fewer. The group gives up after two seconds.
# Before that, a thread of each rank, a watchdog, sees that no step ends, and writes down what its rank has called.

# %%
def all_reduce_steps(group, watchdog):
    for step in range(3):
        for size in (16, 4):
            if step == 2 and dist.get_rank() == 1:
                time.sleep(0.7)
            else:
                dist.all_reduce(torch.ones(size), group=group)
        watchdog.report_step()


def skip_last_step(folder):
    two = timedelta(seconds=2)
    group = dist.new_group(timeout=two, group_desc="data")
    careless = dist.new_group(group_desc="careless")  # without a limit of its own
    dist.all_reduce(torch.ones(1), group=careless)
    watchdog, message = flight.Watchdog(folder, timeout=0.5), "no error"
    try:
        all_reduce_steps(group, watchdog)
    except RuntimeError as error:
        message = str(error).rpartition("] ")[2].partition(" for ")[0]
    watchdog.close()
    return message


# CPU: gloo's time limit
print(*ranks.run(skip_last_step, 3, FOLDER / "flight", device="cpu"), sep="\n")


# %% [markdown]
# Ranks 0 and 2 waited, and they complain. Rank 1, which is at fault, says nothing.
# Counting calls finds it:

# %%
def find_missing_ranks(calls, group):
    """Ranks that have called fewer collectives of a group than others."""
    counts = {
        rank: max((c.number for c in mine if c.group.startswith(group)), default=0)
        for rank, mine in calls.items()
    }
    return [rank for rank, count in counts.items() if count < max(counts.values())]


calls = flight.read_records(FOLDER / "flight")
print("missing:", find_missing_ranks(calls, "data"))

# %% [markdown]
# `hang.find_causes` does the same, and names the collective and the line.
# It also finds ranks that called *another* collective, sizes that disagree, and circles of waiting ranks.
# If all wait in one collective, suspect a link or a network card.

# %%
found = hang.find_causes(calls)
print(*found)

# %% tags=["hide-input"]
# Holds the finding

assert found[0].ranks == (1,) and found[0].call.number == 5
assert find_missing_ranks(calls, "data") == [1]

# %% [markdown]
# The watchdog's `timeout` is longer than any step, the first and saves included, and shorter than the group's: a collective that gloo has given up counts as done.
# `python -m shardlab cluster hang FOLDER` then says the same as above, and PyTorch's `torchfrtrace FOLDER -p trace_` reads these files, too.
# [A test](../tests/test_cluster_hang.py) gives the same records to both.
#
# ```{admonition} Checked: "torchfrtrace works with any backend, and names the culprit"
# :class: checked
#
# With gloo's own records it ends in a `KeyError`, since gloo leaves out the groups (torch 2.13, November 2026, [tested](../tests/test_cluster_hang.py)); `flight.take_record` fills them in.
# It compares calls and sizes as above, and GPUs' states, but each group by itself: a circle over two groups is reported as two missing ranks.
# Where ranks differ, the record that it happens to read first is right, and the others are culprits.
# Ours asks the majority. Of two ranks nobody knows: look at both lines.
# ```
#
# ### Time limits
#
# A group without a limit has its backend's, 10 minutes under nccl and 30 under gloo, whatever `init_process_group` was given.

# %%
limits = {call.group.partition(":")[0]: call.timeout for call in calls[0]}
print("data:", limits["data"], "s, careless:", limits["careless"], "s")
print("the world's is another one:", limits["default_pg"] < limits["careless"])

# %% [markdown]
# With nccl a thread ends the job at the limit, and leaves each rank's record (torch 2.13, November 2026). [These variables steer it](https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html):
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
# `py-spy` (`pip install py-spy`) reads a process's stack from outside. It needs the right to trace: root, in containers `SYS_PTRACE`; Ubuntu's `ptrace_scope` may forbid it.
# Without it, prepare: after `faulthandler.register(signal.SIGUSR2)` in the script, `kill -USR2 PID` prints the stack.
# This was captured of a real job on 23 November 2026, and is the first of the exercises with a log.

# %%
print(captured.read_log("uneven").partition("== flight")[0].strip())

# %% [markdown]
# ## Where ranks run: cores, and the right network
#
# Two ranks that are bound to one core share it, however many are idle.

# %% tags=["hide-input", "measured"]
# Table: what two ranks get of the cores, bound to one and bound to two


def measure_cores(cores):
    os.sched_setaffinity(0, {cores[dist.get_rank()]})
    a = torch.randn(256, 256)
    dist.barrier()
    begin, used = time.monotonic(), time.process_time()
    while time.monotonic() - begin < 0.5:
        a @ a
    return (time.process_time() - used) / (time.monotonic() - begin)


first, *others = sorted(os.sched_getaffinity(0))
# CPU: cores are measured
together = sum(ranks.run(measure_cores, 2, [first, first], device="cpu"))
# CPU: cores are measured
apart = sum(ranks.run(measure_cores, 2, [first, (others or [first])[0]], device="cpu"))
show.check_timing(together < 1.1, "ranks on one core share it")
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
# ## Before the job: ask all ranks
#
# With `python -m shardlab doctor`, every rank looks at its own host, then at the others, and one table says what is wrong and what to do.
# Without a launcher it starts ranks of its own, here four.

# %% tags=["measured"]
here = ["--ranks", "4", "--device", "cpu", "--folder", tempfile.gettempdir()]
status = main(["doctor", *here, "--needs", "1e6", "--pairs"])

# %% [markdown]
# A `note` is no fault: four ranks on two cores, for instance, wait for one another.
# On GPUs that the course's table knows, a link between hosts is good when it reaches half of the rate that the planner assumes.
# Within a host an eighth is enough: [messages of 64 MiB reach little of NVLink's](https://github.com/NVIDIA/nccl-tests/issues/268).
#
# ### What it finds
#
# Now this process gets three faults that jobs really have, and the ranks that it starts inherit two of them.
# All of them may use one core, as under a launcher that binds wrongly; each may open 150 files; and the checkpoint wants a petabyte.

# %% tags=["measured"]
cores, files = os.sched_getaffinity(0), resource.getrlimit(resource.RLIMIT_NOFILE)
os.sched_setaffinity(0, {min(cores)})
resource.setrlimit(resource.RLIMIT_NOFILE, (150, files[1]))
try:
    status = main(["doctor", *here, "--needs", "1e15"])
finally:
    os.sched_setaffinity(0, cores)
    resource.setrlimit(resource.RLIMIT_NOFILE, files)
assert status == 1

# %% [markdown]
# Each check is a function of what all ranks found. This one is for clocks.

# %%
show.source(checks.check_clocks)

# %% [markdown]
# Each rank asks rank 0 for the time, and takes the answer to be half a round trip old {cite}`cristian1989clock`.
# So an offset is believed only as far as it is larger than that half.
#
# ### In a job script
#
# The same command is one rank of whatever launcher starts it: it reads `RANK` and its like (torchrun), or `SLURM_PROCID` and its like (srun).
#
# ```bash
# srun python -m shardlab doctor --folder "$FOLDER" --needs 200e9 || exit 1
# srun python code/train.py --folder "$FOLDER" --resume auto
# ```
#
# The status is 0 when all is good, 1 when something is bad, and 2 when it could not begin; torchrun makes 1 of both.
# Start it with the options of the training's own `srun`: another binding is another machine.
# When nothing has moved for `--timeout` seconds, it names the rank that did not come or stopped answering, and what that rank was doing.
#
# ### Pairs that do not disturb each other
#
# In round $d$ rank $r$ exchanges messages with rank $r \oplus d$ (exclusive or).
# A round's pairs are disjoint, and up to 16 ranks everyone meets everyone.

# %%
hosts = ["node1", "node1", "node2", "node2"]
for number, turn in enumerate(pairs.schedule_turns(4, hosts, one_per_host=False), 1):
    print(f"round {number}:", " ".join(f"{a}–{b}" for a, b in turn))
print(len(list(pairs.generate_rounds(64))), "rounds for 64 ranks")

# %% [markdown]
# With gloo the cores of a host move the bytes, so its pairs take turns (`one_per_host=True`).
# Above 16 ranks, the seven nearest and those 8, 16, 32, … away are measured: ten rounds for 64 ranks.
#
# ### What it cannot see
#
# - What comes later: a GPU that is hot after an hour, a neighbour job that starts, a disk that fills.
# - What only all together show: it measures pairs, and a switch that is too slow shows only when all ranks send across it.
#
# ## One script, many jobs: arrays
#
# A sweep over learning rates is one job in four copies. `%2` lets two of them run at a time.

# %%
sessions.show_job("array.sbatch")

# %%
sessions.show_session("array", live=False)

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
sessions.show_job("job.pbs")

# %% [markdown]
# On Kubernetes nothing counts pods for you unless the Job is *Indexed*: then they are called `train-0` and `train-1`, and a Service without an address of its own makes these names resolve.

# %%
sessions.show_job("job.yaml")

# %% [markdown]
# Where Kubeflow's Trainer is installed, a TrainJob says the same in a third of the lines; its runtime sets the rendezvous.

# %%
sessions.show_job("trainjob.yaml")

# %% [markdown]
# Neither PBS nor Kubernetes ran here. [Tests](../tests/test_cluster.py) hold the YAML files to published schemas (`kubeflow-trainer-api` 2.3.0); the PBS file follows OpenPBS's manual, and its shell ran with a pretended `pbsdsh`.
#
# ## What you see, and where to look
#
# | what you see | where |
# |---|---|
# | it stays in the queue | [It stays in the queue](#it-stays-in-the-queue) |
# | a program is not found | [The environment inside a job](#the-environment-inside-a-job) |
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
# - **One GPU**: `srun python`.
# - **One node**: `srun torchrun --standalone`.
# - **Several nodes under Slurm**: `srun` with one `torchrun` a node where ranks shall restart inside the job; `srun` alone where a requeue is restart enough.
# - **Nodes without a scheduler**: `torchrun` with c10d, in a service that ends what it leaves (systemd, a container).
# - **Kubernetes**: a TrainJob where Kubeflow is installed, else an Indexed Job.
# - **Fewer nodes than asked**: `--nnodes 1:2` only if your batch stays the same on fewer ranks, as in [our script](train.md); else the losses change.
# - **Always**: the doctor before, `--resume auto`, a signal before the time limit, a watchdog.
#
# ## Exercises
#
# Three of them are jobs that hang: they were run, looked at and ended by [a script](../code/shardtools/cluster/captured/capture.py). Each log has what was printed, where every rank was, and the last calls of each. The scripts lie beside it; try without them first.
#
# ```{exercise-start} Who is who (easy)
# :label: ex-cluster-ranks
# ```
#
# Three nodes come to a rendezvous with 4, 2 and 4 GPUs, in this order, a rank for each GPU.
# What are `RANK`, `LOCAL_RANK` and `GROUP_RANK` (the number of its node) of the second rank on the third node?

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
# 8: after a command, `#SBATCH` is a mere comment.
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
# Two ranks wait for a third. Which rank is missing, in which collective do the others wait, and in which line of `uneven.py` do they call it? (Here are its calls; the stacks are above.)

# %%
print(captured.read_log("uneven").partition("== flight")[2])

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
# Both ranks are in the same line, in the same function, and neither is missing. In which group does each of them wait?

# %%
print(captured.read_log("order"))

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
print(captured.read_log("tensor"))

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
# The reason is in the first line: a setting is misspelt, and nobody reads it. So each rank trains on sequences of its own, and one of seven is left over.

# %%
answer = {"runs": "zero3", "rank": 1, "collective": "all_gather", "line": 28}
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
# - A batch script sets up the environment and starts one launcher on each node with `srun`. A job that asks for more time than its partition allows never starts.
# - The scheduler gives nodes and sends a signal before the time limit; at the signal all ranks save after the same step, and the job is requeued.
# - A restart costs the steps since the last save and the seconds of imports; it does not help against a bad sample or a full disk.
# - A busy GPU may do nothing useful: look at MFU, at the last rank, and at all ranks' traces.
# - In a hang, the rank that complains is seldom the one at fault: compare the calls of all ranks.
# - Check all nodes before the job, with the job's own options.
#
# ## Further reading
#
# - PyTorch's [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html), and its [flight recorder](https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html).
# - Slurm's manual pages: sbatch {cite}`schedmd2026sbatch` and srun {cite}`schedmd2026srun`.
# - A pod for each node: Kubernetes on Jobs whose pods talk to each other {cite}`kubernetes2026job`.
