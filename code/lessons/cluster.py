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
# # Clusters: training jobs with Slurm and `torchrun`
#
# After this lesson you can
#
# - write a batch script for one GPU and for several nodes, and say what each line does;
# - let a job save before its time limit, requeue itself, and resume after a rank was lost;
# - say whether a job uses its GPUs, and which rank delays the others;
# - find the rank, the collective and the line at which a job hangs;
# - check the nodes before a job, with one command.
#
# You have a script that trains on one GPU, and an account on a cluster.
# `nvidia-smi` shows 100 % for a GPU that computes, and for one that waits for another rank: this page tells them apart.
#
# ## Nodes, jobs and the scheduler

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
# A cluster's machines are *nodes*. You log in to one, the *login node*; those with GPUs are the *compute nodes*.
# You submit a *job* (a program, numbers of nodes and GPUs, a time limit) to the *scheduler*, which starts it when enough nodes are free.
# This page uses Slurm; [PBS and Kubernetes](#the-same-job-under-pbs-and-kubernetes) follow near the end.
#
# ![On the left the login node, on which you call sbatch. The job goes into the queue, and the scheduler starts it when two nodes are free. On the first of two compute nodes the batch script runs, once. Its srun starts one torchrun on each node, and each torchrun starts two ranks. All nodes see one shared file system.](../figures/cluster_job.svg)
#
# ## One GPU: a batch script
#
# A *batch script* is a shell script whose first comments are options for the scheduler.
# This batch script runs a training script without ranks, like [the first stage of the training script](train.md#training-script-from-one-process-to-many).

# %%
sessions.show_job("one.sbatch")

# %% [markdown]
# You submit it with `sbatch one.sbatch train.py --steps 1000`.
# The batch script gets the arguments after its name as `"$@"`.
# `sbatch` prints the job's number and returns at once. `squeue` lists the jobs, and `scancel NUMBER` ends one.

# %%
sessions.show_session("one")

# %% [markdown]
# `steps.py` stands for a training script: it counts, saves and resumes, and needs no GPU.
#
# ### The environment inside a job
#
# The job does not run on the machine on which you tried your script.
# Most sites copy your shell's environment variables into it.
# Do not rely on this: let the batch script set up everything that the training script needs.
#
# | you need | the line in the batch script |
# |---|---|
# | programs that the site installs | `module load NAME/VERSION`; `module avail` lists them |
# | your own Python packages | `source /shared/venv/bin/activate`, a virtual environment in a folder that all nodes see |
# | your packages in a container | `srun apptainer exec --nv IMAGE.sif python "$@"`; `--nv` passes the GPUs into it |
# | data and models of Hugging Face | `export HF_HOME=/shared/hf HF_HUB_OFFLINE=1` |
#
# Compute nodes often have no internet. Fetch data, models and packages on the login node, into a folder that all nodes see.
# With [`HF_HUB_OFFLINE=1`](https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables) the library raises an error at once instead of waiting for a network.
# Without an activated environment, the node does not find your programs:

# %%
sessions.show_session("path")

# %% [markdown]
# `execve(): torchrun: No such file or directory` means that no `torchrun` is in the job's `PATH`.
#
# The course's commands that examine a job, `doctor` and `cluster watch`, run inside the job.
# So the job's environment needs the course's package (`pip install -e .` in the course's folder) and, for GPU metrics, `pip install nvidia-ml-py`.
#
# ### The job stays in the queue
#
# The last column of `squeue` says why a job waits.
# `Priority` and `Resources` mean that other jobs come first. With some other reasons a job waits for ever:

# %%
sessions.show_session("pending")

# %% [markdown]
# Nodes are grouped into *partitions*, each with a maximal time limit. `sinfo -o '%P %l'` lists partitions and limits.
# `PartitionTimeLimit`: the job asks for more time than its partition allows. Ask for less, or name another with `--partition`.
# Some sites refuse such a job at once: `Requested time limit is invalid`.
#
# ### A small Slurm on your own machine
#
# Slurm is made of ordinary programs: `slurmctld` schedules the jobs, and a `slurmd` on each node starts their programs.
# So a cluster of two nodes fits on your machine, and a mistake in a batch script costs seconds instead of a night in the queue:
#
# ```bash
# sudo apt-get install --no-install-recommends slurmctld slurmd slurm-client munge
# eval "$(python -m shardlab cluster up)"     # two nodes of 4 CPUs and 2 GPUs each
# sinfo
# python -m shardlab cluster down
# ```
#
# Only `apt-get` needs root.
# `cluster up` starts no system service, and listens on the loopback interface alone.
# Scheduler, signals, queue and files are real. Both nodes are this machine, and the GPUs are devices such as `/dev/null`: Slurm can count them, but no script can compute on them.
#
# If Slurm is installed, this page executes its short sessions. Otherwise, and for long sessions, it shows dated recordings.
#
# ## Two nodes
#
# On several GPUs a script runs as several processes, the [ranks](train.md#ranks-a-process-group-and-a-device).
# A *launcher* is the program that starts a node's ranks, tells each rank its number, and ends all ranks when one fails. PyTorch's launcher is `torchrun`.
# On two nodes there are two launchers. They find each other at an address that both are given, and number the ranks; this step is the *rendezvous*.
# [A launcher from scratch](elastic.md) builds a launcher.
#
# ### The batch script, line by line
#
# Slurm runs the batch script once, on the job's first node. `srun` starts a program on all nodes.

# %%
sessions.show_job("torchrun.sbatch")

# %% [markdown]
# | line | why |
# |---|---|
# | `#SBATCH …` | options, as comments; Slurm silently ignores those after the first command |
# | `--ntasks-per-node=1` | a *task* is one process that `srun` starts. Each `torchrun` starts its node's ranks itself, so one task is enough; two tasks start twice as many ranks as GPUs |
# | `--output`, `--error` | each names one file for all ranks, in the folder where you called `sbatch`. A folder in these names must exist, else the job fails at once, without output (`JobLaunchFailure`) |
# | `first`, `address` | the first node's name, and the address at which Slurm reaches this node: there the launchers meet |
# | `port=…` | computed from the job's number, so that two jobs on one node use different ports |
# | `srun --cpus-per-task` | repeated, because `srun` does not inherit it from `sbatch` since Slurm 22.05 {cite}`schedmd2026srun` |
# | `--kill-on-bad-exit=1` | when one task fails, the others end |
#
# The table has the options of `torchrun` in this script, and a few more, with the defaults of the installed version.

# %% tags=["hide-input"]
# Table: torchrun's options, their defaults, and their meaning

from torch.distributed.run import get_args_parser

MEANS = [
    ("--nnodes", "nodes of the job; 1:2 lets it go on with one"),
    ("--nproc-per-node", "ranks on this node; also gpu: one for each GPU"),
    ("--rdzv-backend", "how launchers meet; for several nodes c10d"),
    ("--rdzv-endpoint", "HOST:PORT where launchers meet; the same on all nodes"),
    ("--rdzv-id", "the job's name; the same on all nodes"),
    ("--rdzv-conf", "settings of the rendezvous: join_timeout, is_host, …"),
    ("--max-restarts", "how often all ranks start again after one has failed"),
    ("--log-dir", "folder of logs and error files"),
    ("--tee", "3: output and errors to files and to the console"),
    ("--local-ranks-filter", "0: the console shows one rank of each node"),
    ("--node-rank", "only for the static backend: c10d ignores it"),
    ("--shutdown-timeout", "seconds from SIGTERM to SIGKILL (if not given, 30)"),
    ("--standalone", "one node: picks a free port itself"),
    ("--local-addr", "this node's address (if not given, its host name's)"),
]
known = {name: a for a in get_args_parser()._actions for name in a.option_strings}
empty = None, "", False
rows = []
for name, means in MEANS:
    if name not in known:  # torch 2.11 lacks one
        continue
    default = known[name].default
    shown = "–" if default in empty else str(default).replace(",", ", ")  # so that it may break
    rows.append((name, shown, means))
show.table(rows, ["option", "default", "meaning"])

# %% [markdown]
# `torchrun`'s options come before the script's name, the script's own after it.
# `sbatch torchrun.sbatch train.py --folder runs/a` submits the job.
# The job below starts `steps.py`, which prints its rank.

# %%
sessions.show_session("torchrun", live=False)

# %% [markdown]
# `LOCAL_RANK` is a rank's number on its node and chooses its GPU.
# `RANK`, its number over all nodes, is for everything else.
#
# `srun` can start the ranks itself, without `torchrun`. Then the batch script sets the variables that `torchrun` would have set, from Slurm's values:

# %%
sessions.show_job("srun.sbatch")

# %% [markdown]
# Without `torchrun` there are no restarts inside the job.
# With both batch scripts, the losses of [our script](train.md#the-script-to-take-home) equal those of one process, to 1e-5 ([tested](../tests/test_cluster_slurm.py)).
#
# ### Rank 0 is not on node 0
#
# With `c10d`, `torchrun` sorts the nodes by address, as text: `node10` comes before `node2`.
# So choose the rank that prints and saves by `RANK`, never by Slurm's node number, `SLURM_NODEID`.
#
# The node at the endpoint has to serve the rendezvous. Each `torchrun` compares the endpoint's name with its node's host name to decide if it serves.
# At some sites the endpoint's name, such as `node1i` for node1 on the InfiniBand network, is no node's host name: then no node serves, and all wait.
# There, set `--rdzv-conf=is_host=…` to 1 on the first node and to 0 on the others. Single quotes let each node compute its own value:
#
# ```bash
# srun bash -c 'torchrun --rdzv-conf=is_host=$((SLURM_NODEID == 0)) … "$@"' torchrun "$@"
# ```
#
# ### Device numbers: which GPU a task sees
#
# Slurm says in `CUDA_VISIBLE_DEVICES` which GPUs a task sees:

# %%
sessions.show_session("gpus")

# %% [markdown]
# With `--gpus-per-node=2` every task sees both GPUs, and the device is `cuda:LOCAL_RANK`.
# With `--gpus-per-task=1` each task sees one GPU. CUDA numbers visible GPUs from 0, so the device is `cuda:0` in all tasks, and `cuda:1` is invalid in the second task.
# `LOCAL_RANK % torch.cuda.device_count()` is right in both cases.
#
# ````{admonition} False: "export CUDA_VISIBLE_DEVICES=0,1,2,3 gives the job its GPUs"
# :class: checked
#
# In the session below, two jobs with one GPU each share a node, and both set the variable.
# Under `srun` the line has no effect: Slurm sets the variable anew for every `srun`.
# Without `srun` the process sees GPUs of the other job. If the site confines devices with cgroups, these GPUs cannot be opened; if not, two jobs compute on one GPU.
# Ask for GPUs with `--gpus-per-node`, and do not set the variable.
# ````

# %%
sessions.show_session("devices", live=False)

# %% [markdown]
# ````{admonition} Only if the batch script expands it: "use $RANDOM as --rdzv-id"
# :class: checked
#
# This depends on quotes. Between double quotes the batch script replaces `$RANDOM` once, before `srun` starts anything.
# Between single quotes every node draws a number of its own, and the nodes wait for each other until the rendezvous times out.
# `$SLURM_JOB_ID` is the same on all nodes, and identifies the job in a log.
# ````

# %%
sessions.show_session("random")

# %% [markdown]
# ### Rendezvous errors
#
# [Tests](../tests/test_elastic.py) produce each error of this table.
#
# | what is wrong | what you see |
# |---|---|
# | a node does not join | `RendezvousTimeoutError`, after `join_timeout`, 600 s |
# | the address is wrong, or no node serves it | `RendezvousConnectionError: The connection to the C10d store has failed`, after `read_timeout`, 60 s |
# | two jobs, or two ids, at one port | one of the two errors above; neither names ids |
# | the wrong interface: `GLOO_SOCKET_IFNAME=ib7` | the rank's error names `ib7` |
# | node 0's name has no address, as in containers | `The IPv6 network addresses of (NAME, PORT) cannot be retrieved`, again and again |
#
# In the last case give an address with `--local-addr`; with `--standalone`, give 127.0.0.1.
#
# `torchrun` listens on all interfaces of the first node, without a password.
#
# ## Save before the time limit and requeue
#
# A job that reaches `--time` gets SIGTERM, and SIGKILL some seconds later (30 by default, the site's `KillWait`).
# These seconds may be too few for a checkpoint. So ask for an earlier signal, save, and requeue:

# %%
sessions.show_job("requeue.sbatch")

# %% [markdown]
# `--signal=USR1@120` sends SIGUSR1 120 seconds before the time limit, to all processes that `srun` has started, but not to the batch script.
# Slurm may send the signal up to 60 seconds *earlier* than asked {cite}`schedmd2026sbatch`.
# Ask for more seconds than a step and a save need together.
#
# All ranks have to stop after the same step, though the signal reaches them at different moments. If one rank stopped earlier, the others would wait for it.
# So at each step the ranks all-reduce a flag, which is 1 on a rank that has received the signal.
# When the sum is not 0, all ranks save after this step, and stop.
# They end with status 0 and create the file `stopped`; the batch script finds the file, and requeues its own job.
# `torchrun` would treat any other status as failure, and start all ranks again.

# %%
sessions.show_session("requeue", live=False)

# %% [markdown]
# `scancel --signal` sends the same signal by hand, so you can try this without waiting for the time limit.
# A requeued job keeps its number, and so its folder. It waits two minutes before it may start (`BeginTime`); `scontrol update` removes this delay.
#
# ````{admonition} Only if the ranks handle the signal: "USR1 makes the job save"
# :class: checked
#
# The signal makes the *ranks* save, if they handle it. `torchrun` does not handle SIGUSR1, so the signal ends `torchrun` with status 138, which is 128 + 10.
# `set -e` then ends the batch script before it looks for `stopped`, and the job is not requeued.
# `--signals-to-handle` (torch 2.13) passes the signal on, but `torchrun` still ends with status 1.
# After `trap "" USR1; exec torchrun`, `torchrun` and its processes ignore the signal; a rank that then sets its own handler still receives it.
# ````

# %%
sessions.show_session("usr1", live=False)

# %% [markdown]
# ## Restarting all ranks after one is lost
#
# A rank can be lost at any time: a GPU fails, memory runs out, or somebody kills the process. The other ranks cannot continue without it.
# With `--max-restarts=3`, `torchrun` ends them and starts all ranks again, up to three times.
# This helps a script that saves, and resumes from the last save.
# The script below saves after every fifth step. In its first run rank 1 kills itself after step 12.

# %%
show.file(sessions.JOBS / "killed.py", "python")

# %% [markdown]
# The batch script is the same as before.
# [A later section](#the-rendezvous-store-one-per-round) explains the variable in the session's first line.

# %%
sessions.show_session("killed", live=False)

# %% [markdown]
# Steps 11 and 12 are computed twice, because they came after the last save. All losses equal those of a single process.
# Such interruptions come every three hours in a job of 16,384 GPUs, as [Checkpoints](checkpoint.md#mean-time-between-failures) counts.
#
# ### Which rank failed first
#
# Each `torchrun` names a "root cause" among *its own* ranks. On nodes without the failed rank, this is only a rank whose connection was closed.
# Decorate `main` with `@record` (`torch.distributed.elastic.multiprocessing.errors`), and every rank that raises leaves `LOGS/ID_…/attempt_0/LOCAL_RANK/error.json`.
# The earliest of these files on all nodes is from the rank that failed first.
#
# ````{admonition} False: "the timestamp in error.json tells who was first"
# :class: checked
#
# The timestamp has whole seconds (torch 2.13, [tested](../tests/test_elastic.py)), and other ranks fail within milliseconds.
# The file's modification time is finer.
# On a shared file system, `ls -tr --full-time logs/*/attempt_0/*/error.json | head -1` names the first.
# ````
#
# ### What a fault costs
#
# `benchmarks/elastic.py` trained a small GPT on four ranks and two nodes, both on one machine, with a checkpoint after every fifth step.
# Each fault comes after step 12.
# The seconds are from the last step before the fault to the first step after it.

# %% tags=["hide-input"]
# Table: what faults cost, recorded by benchmarks/elastic.py

path = Path(elastic.__file__).parent / "restarts.json"
found = json.loads(path.read_text())
rows = []
for row in found["rows"]:
    told = (row["seconds"][1], row["lost"][1], row["after"][1])
    rows.append((row["case"], *("–" if x is None else x for x in told)))
where = f"torch {found['torch']}, {found['cores']} cores"
start = f"without a launcher, {found['bare start (s)']['4']} s from start to first step"
caption = f"Recorded {found['date']}, {where}; {start}"
head = ["what happens", "seconds", "steps lost", "ranks after (of 4)"]
show.table(rows, head, caption=caption)

# %% [markdown]
# - Most of the time is the script's start, mainly its imports, which no launcher can avoid.
# - An agent is torchrun's process on a node. When it alone is killed, its ranks do not notice, and continue training. At the next fault they wait for ever, and hold their GPUs until they are killed. Slurm kills them when the job ends.
# - A dash means that training did not go on. Without the store, through which the agents exchange data, the job ends, and only the scheduler can start it again, by requeueing.
#
# ### The rendezvous store: one per round
#
# Each start of the ranks is a *round*. By default `torchrun` keeps one store of addresses for the ranks of *all* rounds.
# A restarted rank can find the address of a dead rank in this store, and waits for that rank: `connectFullMesh failed … Connection refused`.
# `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` gives each round its own store (torch 2.13, [tested](../tests/test_elastic.py)). Set it wherever you allow restarts.
#
# ### Faults that no restart repairs
#
# - The first node is lost: the job ends.
# - A bad sample: the same step fails in every round, until no restart is left. Find it, or skip it.
# - [A full disk](checkpoint.md#a-full-disk-and-a-folder-that-is-not-shared): every save fails, so every round begins at the same step.
# - A node that is only slow: nothing fails. See [the straggler](#step-times-hide-the-straggler).
#
# ## Is my job using its GPUs?
#
# A scheduler counts GPUs that are *allocated*, whether they compute or wait. `nvidia-smi` shows their utilisation,
# which NVIDIA defines as the [share of time in which at least one kernel ran](https://docs.nvidia.com/deploy/nvml-api/structnvmlUtilization__t.html). A *kernel* is one operation on the GPU. Utilisation does not say how much of the GPU this kernel used.
# The same holds for a CPU core. The cell multiplies small matrices for half a second, and then large matrices.

# %% tags=["hide-input", "measured"]
# Table: how busy a core is, and its FLOP/s, in small and large products


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
# ```{admonition} False: "the GPUs are at 100 %, so they are used"
# :class: checked
#
# In the table the core is equally busy with both sizes, but does many times as much work with large matrices.
# A GPU that waits for other ranks is at 100 %, too: [each collective of nccl is a kernel](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/overview.html), which runs while it waits.
# ```
#
# These numbers say more:
#
# | number | from | what it tells |
# |---|---|---|
# | utilisation | nvidia-smi, NVML | near 0: the GPU waits for the CPU or for data |
# | `DCGM_FI_PROF_SM_ACTIVE` | DCGM | fraction of the GPU's multiprocessors with work; NVIDIA: effective use needs 0.8; under 0.5 is probably ineffective |
# | `DCGM_FI_PROF_PIPE_TENSOR_ACTIVE` | DCGM | fraction of cycles in which tensor cores work; only tensor cores reach the data sheet's FLOP/s |
# | `DCGM_FI_PROF_DRAM_ACTIVE` | DCGM | the same for memory. If high while tensor cores are idle, memory is the limit |
# | power, clock, reasons for a lower clock | nvidia-smi, NVML | power far below the limit: little work. One GPU too hot: that rank is slow |
# | MFU (model FLOP utilisation) | your script | operations that the model needs, divided by the operations that the GPUs could do in the same time {cite}`chowdhery2022palm`: busy waiting does not raise it |
#
# NVML is the library of NVIDIA's driver, DCGM a service on the node; [its overview](https://docs.nvidia.com/datacenter/dcgm/latest/user-guide/feature-overview.html) has the definitions.
# Many sites plot these numbers for each job, with [LLview](https://github.com/FZJ-JSC/LLview) or [jobstats](https://github.com/PrincetonUniversity/jobstats).
# Look at these plots first. Their samples are minutes apart; for shorter intervals, sample yourself.
#
# ### Sample each rank
#
# A sampler reads counters of the driver and the operating system, and does not change the job.
# On your own machine you pass it the launcher's process id; in Slurm you start it inside the running job, once on each node:
#
# ```bash
# python -m shardlab cluster watch runs/one --pid $(pgrep -n torchrun)
# srun --jobid=1234 --overlap --ntasks-per-node=1 \
#     python -m shardlab cluster watch runs/one --job 1234
# python -m shardlab cluster watch runs/one --draw        # runs/one/report.svg
# ```
#
# The next cell watches two ranks for two seconds. After 0.7 s, rank 0 alone writes a file, for 0.7 s.

# %% tags=["hide-input", "measured"]
# Runs two ranks of DDP, and draws the resources that each used


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
# The processors of *both* ranks and the network are idle: one rank writes a file, the other waits.
# Memory use does not change.
#
# ### Step times hide the straggler
#
# A *straggler* is a rank that is slower than the others. Here rank 1 of three takes 40 ms longer in each step, before its first message.
# Every rank measures its own steps.

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
head = ["rank", "step (ms, median)", "arrives after the first rank by (ms, median)"]
head += ["last to arrive (% of steps)"]
show.table(rows, head)

# %% tags=["hide-input", "measured"]
# Draws the steps, and the moments at which the ranks arrive

durations = {rank: seconds for rank, (seconds, _) in enumerate(results)}
alt = "Above, the duration of 36 steps: three ranks' lines lie together. Below, when "
alt += "each called a step's first collective: rank 1 comes last, by the same distance."
show.figure(straggler.draw_delays(delays, durations), alt, "cluster-straggler")

# %% [markdown]
# Each step ends when the last rank has arrived at the collective, so all steps take equally long. Only the ranks' *arrival* times differ.
# PyTorch's flight recorder, each rank's list of its last collectives, has the time when the *CPU* queued each collective.
# With gloo this is the rank's arrival. With nccl the CPU runs ahead of its GPU, so these times do not show a slow GPU.
# Set `TORCH_NCCL_ENABLE_TIMING=1` to record each collective's duration. The straggler waits least: its durations are shortest.
# Take medians over 30 steps; clocks of two machines differ by milliseconds.
#
# ### All ranks on one timeline
#
# The profiler writes a trace for each rank. [Perfetto](https://ui.perfetto.dev) draws a trace, and [HTA](https://hta.readthedocs.io) compares the traces of all ranks.
# The table compares a step that averages gradients after backward with a step of DDP.

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
# On a CPU the same cores compute and send, so DDP gains little.
#
# ## The job hangs
#
# Ask in this order:
#
# 1. **Which ranks are alive?** Read all ranks' logs: a dead rank is an error, not a hang.
# 2. **At which line is each rank?** Run `py-spy dump --pid PID`: with gloo, all ranks but one are at the same collective; with nccl, at the line where the CPU waits for its GPU.
# 3. **Which collective waits, and for which rank?** The flight recorder's records answer this.
# 4. **No record?** Prepare for the next hang: `faulthandler`, a watchdog, a short time limit.
#
# ### Compare the records of all ranks
#
# Here rank 1 leaves out the last all-reduces, as if it had one batch fewer. The group gives up after two seconds.
# Before this time limit, a thread of each rank, a *watchdog*, notices that no step ends, and writes its rank's calls to a file.

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
# Ranks 0 and 2 waited, and raise errors; rank 1, the cause, raises none.
# Counting calls finds rank 1:

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
# It also finds ranks that called *different* collectives, mismatched sizes, and circles of waiting ranks.
# If all ranks wait in one collective, suspect a link or a network card.

# %%
found = hang.find_causes(calls)
print(*found)

# %% tags=["hide-input"]
# Checks the missing rank in the report

assert found[0].ranks == (1,) and found[0].call.number == 5
assert find_missing_ranks(calls, "data") == [1]

# %% [markdown]
# The watchdog's `timeout` must be longer than any step, also the first and those with saves, but shorter than the group's limit: at that limit gloo marks the waiting collective as done.
# `python -m shardlab cluster hang FOLDER` prints the same report, and PyTorch's `torchfrtrace FOLDER -p trace_` reads these files, too.
#
# ```{admonition} False: "torchfrtrace works with any backend, and names the culprit"
# :class: checked
#
# With gloo's own records `torchfrtrace` ends in a `KeyError`, since gloo leaves out the groups (torch 2.13, November 2026, [tested](../tests/test_cluster_hang.py)); `flight.take_record` fills them in.
# `torchfrtrace` compares calls, sizes and GPUs' states, but separately in each group: it reports a circle over two groups as two missing ranks.
# Where ranks differ, it takes the record that it reads first as right, and reports the other ranks as culprits.
# Our command takes the majority as right. With only two ranks, look at both lines.
# ```
#
# ### Time limits of process groups
#
# A group without its own time limit has its backend's default, 10 minutes with nccl and 30 with gloo. It does not inherit the limit given to `init_process_group`.

# %%
limits = {call.group.partition(":")[0]: call.timeout for call in calls[0]}
print("data:", limits["data"], "s, careless:", limits["careless"], "s")
print("the world's limit is shorter:", limits["default_pg"] < limits["careless"])

# %% [markdown]
# With nccl a thread ends the job at the limit, and writes each rank's record (torch 2.13, November 2026). [These variables control it](https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html):
#
# | variable | what for |
# |---|---|
# | `TORCH_NCCL_DUMP_ON_TIMEOUT=1` | write the records at a time limit (the default) |
# | `TORCH_FR_DUMP_TEMP_FILE=/shared/trace_` | the records' file; `~/.cache/torch` is the default folder |
# | `TORCH_NCCL_ENABLE_TIMING=1` | record started collectives, and durations |
# | `TORCH_NCCL_DESYNC_DEBUG=1` | say which rank left the others |
#
# ### Stacks of all ranks: `py-spy` and `faulthandler`
#
# `py-spy` (`pip install py-spy`) reads a process's stack from outside. It needs the right to trace: root, in containers `SYS_PTRACE`; Ubuntu's `ptrace_scope` may forbid it.
# Without this right, call `faulthandler.register(signal.SIGUSR2)` in the script beforehand; then `kill -USR2 PID` prints the stack.
# The log below is from a real job (23 November 2026). The first exercise with a log uses it.

# %%
print(captured.read_log("uneven").partition("== flight")[0].strip())

# %% [markdown]
# ## CPU binding and network interfaces
#
# Two ranks that are bound to one core share it, even if other cores are idle.

# %% tags=["hide-input", "measured"]
# Table: CPU time of two ranks, bound to one core and to two


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
rows = [("both ranks on one core", f"{together:.2f}")]
rows += [("each rank on its own core", f"{apart:.2f}")]
show.table(rows, ["binding", "CPU time of both ranks / elapsed time"])

# %% [markdown]
# [`srun --cpu-bind=verbose,cores`](https://slurm.schedmd.com/srun.html) binds each task to its cores, and prints their numbers; `--cpus-per-task` is the number of cores, including those for data-loading workers.
# torchrun's processes share the cores of the task that started it, so give this task all cores of the node.
# `torchrun --numa-binding=node` then binds each rank to the cores near the GPU whose number is its local rank (torch 2.13).
# Ranks that communicate most belong on one node: give them consecutive numbers.
#
# nccl chooses interfaces and paths by itself. These variables show its choice, or override it ([NVIDIA's list](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html)):
#
# | variable | what for |
# |---|---|
# | `NCCL_DEBUG=INFO`, `NCCL_DEBUG_SUBSYS=INIT,NET,GRAPH` | prints version, interface and paths at the start; `WARN` is enough for errors |
# | `NCCL_SOCKET_IFNAME=ib0`, `=eth0`, `^docker` | interfaces by prefix, by exact name, or all but these; `GLOO_SOCKET_IFNAME` is gloo's |
# | `NCCL_IB_HCA=mlx5_0` | InfiniBand adapters to use |
# | `NCCL_IB_DISABLE=1`, `NCCL_P2P_DISABLE=1` | switch off InfiniBand, or direct copies between GPUs: only to find a fault |
#
# `INFO` prints `NET/IB : Using …` or `NET/Socket : Using …`: `NET/Socket` on a cluster with InfiniBand makes a job slow.
#
# ## Node checks before the job: `doctor`
#
# With `python -m shardlab doctor`, every rank checks its own host, then its connections to the others, and one table lists faults and remedies.
# Without a launcher the command starts its own ranks, here four.

# %% tags=["measured"]
here = ["--ranks", "4", "--device", "cpu", "--folder", tempfile.gettempdir()]
status = main(["doctor", *here, "--needs", "1e6", "--pairs"])

# %% [markdown]
# A `note` is no fault: four ranks on two cores are slower, not wrong.
# For GPUs in the [planner](strategy.md)'s table, a link between hosts is good if it reaches half of the table's rate. Within a host an eighth is enough: [messages of 64 MiB reach little of NVLink's rate](https://github.com/NVIDIA/nccl-tests/issues/268).
#
# ### What `doctor` finds
#
# The cell gives its process three common faults; the ranks inherit the first two.
# All ranks may use only one core, as with wrong binding; each may open only 150 files; and the checkpoint needs a petabyte.

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
# Each check is a function of all ranks' measurements. This check compares clocks.

# %%
show.source(checks.check_clocks)

# %% [markdown]
# Each rank asks rank 0 for the time, and assumes that the answer is half a round trip old {cite}`cristian1989clock`. So an offset has an error of up to half a round trip.
#
# ### In a job script
#
# Under a launcher, each process of this command is one rank: it reads variables such as `RANK` (torchrun) or `SLURM_PROCID` (srun).
#
# ```bash
# srun python -m shardlab doctor --folder "$FOLDER" --needs 200e9 || exit 1
# srun python code/train.py --folder "$FOLDER" --resume auto
# ```
#
# The exit status is 0 if all checks are good, 1 if a check is bad, and 2 if the command could not begin; torchrun turns 1 and 2 into 1.
# Use the options of the training's `srun`, since other bindings give other results.
# After `--timeout` seconds without progress, `doctor` names the rank that did not answer, and that rank's last step.
#
# ### Link measurements in disjoint pairs
#
# In round $d$ rank $r$ exchanges messages with rank $r \oplus d$ (exclusive or).
# A round's pairs are disjoint, and with up to 16 ranks all pairs are measured.

# %%
hosts = ["node1", "node1", "node2", "node2"]
for number, turn in enumerate(pairs.schedule_turns(4, hosts, one_per_host=False), 1):
    print(f"round {number}:", " ".join(f"{a}–{b}" for a, b in turn))
print(len(list(pairs.generate_rounds(64))), "rounds for 64 ranks")

# %% [markdown]
# With gloo the cores of a host move the bytes, so the host's pairs take turns (`one_per_host=True`).
# With more than 16 ranks, each rank is measured with ranks at distances 1 to 7, 8, 16, 32, …: ten rounds for 64 ranks.
#
# ### What `doctor` cannot find
#
# - Later faults: a GPU that is hot after an hour, another job that starts on the node, a disk that fills.
# - A slow switch: it shows only when all ranks send across it, and the doctor measures pairs.
#
# ## Job arrays: one script, many jobs
#
# A job array runs one batch script several times, here for four learning rates. `%2` lets two *array tasks* run at a time.

# %%
sessions.show_job("array.sbatch")

# %% [markdown]
# One `sbatch` submits all four tasks, and each writes its own file:

# %%
sessions.show_session("array", live=False)

# %% [markdown]
# Each array task is a job with its own time limit and output, and has to write into its own folder.
# `scancel 1_3` ends one task, `scancel 1` all tasks.
#
# ## The same job under PBS and Kubernetes
#
# | | Slurm | PBS {cite}`openpbs2026qsub` | Kubernetes {cite}`kubernetes2026job` |
# |---|---|---|---|
# | two nodes, 2 GPUs each | `--nodes=2 --gpus-per-node=2` | `-l select=2:ngpus=2 -l place=scatter` | `completions: 2`, `nvidia.com/gpu: 2` |
# | start on every node | `srun` | `pbsdsh` (or the site's `mpiexec`) | each pod's own `command` |
# | rendezvous address | first of `SLURM_JOB_NODELIST` | first line of `$PBS_NODEFILE` | `train-0.train`, by the headless Service |
# | time limit | `--time` | `-l walltime` | `activeDeadlineSeconds` |
# | signal before the limit | `--signal=USR1@120` | none: `timeout --signal=USR1` around the command | SIGTERM, then `terminationGracePeriodSeconds` |
# | run again | `--requeue` | `-r y` | `backoffLimit` |

# %%
sessions.show_job("job.pbs")

# %% [markdown]
# On Kubernetes pods are numbered only if the Job is *Indexed*: then they are called `train-0` and `train-1`, and a headless Service, without its own address, makes these names resolve.

# %%
sessions.show_job("job.yaml")

# %% [markdown]
# Where Kubeflow's Trainer is installed, a TrainJob does the same with a third of the lines; its runtime sets the rendezvous.

# %%
sessions.show_job("trainjob.yaml")

# %% [markdown]
# Neither PBS nor Kubernetes ran here. [Tests](../tests/test_cluster.py) check the YAML files against published schemas (`kubeflow-trainer-api` 2.3.0), and run the PBS file's shell commands with a fake `pbsdsh`.
#
# ## Symptoms, and where to look
#
# | what you see | where |
# |---|---|
# | the job stays in the queue | [The job stays in the queue](#the-job-stays-in-the-queue) |
# | a program is not found | [The environment inside a job](#the-environment-inside-a-job) |
# | ranks do not start | [Rendezvous errors](#rendezvous-errors) |
# | the job ends, and every node blames another | [Which rank failed first](#which-rank-failed-first) |
# | ranks do not *restart* | [the shared store](#the-rendezvous-store-one-per-round) |
# | ranks restart again and again at one step | [Faults that no restart repairs](#faults-that-no-restart-repairs) |
# | no progress, no error | [The job hangs](#the-job-hangs) |
# | the job is slow from the start | [the doctor](#node-checks-before-the-job-doctor); [cores and network](#cpu-binding-and-network-interfaces) |
# | the job becomes slow | [the sampler](#sample-each-rank); [the straggler](#step-times-hide-the-straggler) |
# | GPUs busy, and little done | [Is my job using its GPUs?](#is-my-job-using-its-gpus); [one timeline](#all-ranks-on-one-timeline) |
#
# ## When to use which launcher
#
# - **One GPU**: `srun python`.
# - **One node**: `srun torchrun --standalone`.
# - **Several nodes under Slurm**: `srun` with one `torchrun` per node for restarts inside the job; `srun` alone if a requeue is enough.
# - **Nodes without a scheduler**: `torchrun` with c10d, in a service (systemd, a container) that kills leftover processes.
# - **Kubernetes**: a TrainJob where Kubeflow is installed, else an Indexed Job.
# - **Fewer nodes than requested**: `--nnodes 1:2` only if your batch stays the same on fewer ranks, as in [our script](train.md); else the losses change.
# - **Always**: the doctor before the training, `--resume auto`, a signal before the time limit, a watchdog.
#
# ## Exercises
#
# In three exercises a job hangs. [Each log](../code/shardtools/cluster/captured/capture.py) has the output, every rank's stack, and each rank's last calls. The jobs' scripts are in the same folder; try without them first.
#
# ```{exercise-start} Who is who (easy)
# :label: ex-cluster-ranks
# ```
#
# A rendezvous numbers three nodes with 4, 2 and 4 GPUs in this order, with a rank for each GPU.
# What are `RANK`, `LOCAL_RANK` and `GROUP_RANK` (the node's number) of the second rank on the third node?

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
# All three numbers count from 0, and six ranks come before the third node.

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
# A job of 4 nodes with 8 GPUs each has to save before its time limit, and resume. The training script saves on SIGUSR1, and the batch script is:
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
# 3: eight tasks start eight launchers on each node; one is needed.
# 8: after a command, `#SBATCH` is only a comment.
# 9: the signal kills `torchrun`; `trap "" USR1` has to come before it.
# 11: on each node `localhost` is this node, so each node would wait for the other three.

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
# Two ranks wait for a third. Which rank is missing, in which collective do the others wait, and in which line of `uneven.py` do they call it? (The log below has the calls; the stacks are above.)

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
# Call number 8 is an all-reduce on ranks 0 and 1, and a barrier on rank 2, which has left the loop: of 11 samples rank 2 gets 3, and the others get 4 each.
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
# Compute the values that `torchrun` would set, for a task under `srun`. `slurm` holds Slurm's variables as text, `names` the job's nodes in order, `gpus` the number of GPUs that this task sees.
# Return a dictionary with `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT` and `device`, numbers as `int`. `device` is the index of the task's GPU, or None without GPUs. Jobs on one node whose numbers differ by 1 to 1,000 must get different ports; ports below 1024 are reserved, and Linux assigns ports from 32768.

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
#
# The remainder keeps the port between 20000 and 29999, and the GPU among those that the task sees.

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
# The line iterates over a *set* of names, whose order differs between processes. Sorting the names removes the hang.

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
# A link is slow when its rate is less than a third of the median of all links.
# Write a function that returns the rank *all* of whose links are slow, and `None` if there is no such rank: then one cable may be slow, or nothing.

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
# Each other rank also has one slow link, to the returned rank: so *any* slow link is not enough.

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
# The job says that it runs tensor parallelism, in which both ranks would see the same sequences and sum activations. Which parallelism does it really run: `"ddp"`, `"zero1"`, `"zero3"` or `"tensor"`? Which rank has run out of data, in which collective does the other rank wait, and in which line?

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
# Halves of parameters are gathered before each block, in forward and again in backward, and gradients are reduce-scattered: ZeRO-3. Message sizes are independent of the batch: 2 × 24,992 numbers are one block. Tensor parallelism would all-reduce activations of 1 × 64 × the hidden size.
# The reason is in the first line: a setting is misspelt, so the script ignores it. Each rank trains on its own sequences, and one of seven is left over.

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
# With exclusive or, six ranks take seven rounds, and in most rounds a rank is idle.
# For an even number of ranks $N$ a round-robin tournament has $N-1$ rounds without idle ranks.
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
# The last rank keeps its place, and the others rotate in a circle: opposite ranks form a pair.

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
# - A busy GPU may do nothing useful: look at MFU, at the rank that arrives last, and at all ranks' traces.
# - In a hang, the rank that raises an error is seldom the cause: compare the calls of all ranks.
# - Check all nodes before the job, with the job's own options.
#
# ## Further reading
#
# - PyTorch's [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html), and its [flight recorder](https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html).
# - Slurm's manual pages: sbatch {cite}`schedmd2026sbatch` and srun {cite}`schedmd2026srun`.
# - Kubernetes on Jobs whose pods communicate, with a pod for each node {cite}`kubernetes2026job`.
