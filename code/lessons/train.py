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
# # Training script: from one process to many
#
# After this lesson you can
#
# - take a script for one GPU to many, in three small steps, and show after each that it still trains the same model;
# - name the lines that go wrong on more ranks without an error: data, seeds, losses, checkpoints, the loss scale;
# - stop in the middle of an epoch and resume: bit for bit on the same number of ranks, up to rounding on any number that divides the batch;
# - start your own jobs from [a script to take home](#the-script-to-take-home).
#
# Before you start, a puzzle.
# Here is a script that trains a small GPT, and two ranks that run it. Nothing complains, both losses fall, and both GPUs would be busy.

# %% tags=["hide-input"]
# Imports, and how the page runs a script on ranks

import json
import logging
import math
import os
import signal
import tempfile
import threading
import time
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from shardcourse.exercises import check
from shardcourse.exercises.train import compare_scripts
from shardlab import ranks
from shardlab.common import show, text
from shardlab.common.show.diff import show_diff
from shardlab.gpt.model import GPT, PRESETS, loss
from shardlab.train import core, ddp, fsdp, one_gpu, sampler, take_home
from shardlab.train.take_home import Training

show.set_style()
TEMPORARY = tempfile.TemporaryDirectory(prefix="train-")  # goes with this process
FOLDER = Path(TEMPORARY.name)
# 143 windows of each part: 8 steps of 16 are an epoch. No number of ranks here divides 143.
LONG_RUN = {"steps": 300, "limit": 60_000}
SHORT_RUN = {"steps": 12, "every": 6, "limit": 64 * 143 + 1, "sample": 0}


def run_on_ranks(script, size, folder, each=False, show=True, **options):
    """Run a script on `size` ranks; return each rank's losses. each: use a folder per rank."""

    def main():
        own = folder / str(dist.get_rank()) if each else folder
        return script.main(folder=own, **options)

    return ranks.run(main, size, show=show)


# %%
asked = run_on_ranks(one_gpu, 2, FOLDER / "asked", each=True, show=False, **SHORT_RUN)
for rank, losses in enumerate(asked):
    print("rank", rank, "begins at", losses[0], "and ends at", losses[-1])

# %% [markdown]
# Each of the two GPUs trained the same model on the same text, to the last digit of the loss. The job takes as long as on one GPU, and costs twice as much.
# The script lacks some forty lines. This lesson adds and checks them one by one.
#
# ## The script for one process
#
# A GPT with 0.1 million parameters learns the sources of Python's standard library, a byte after the other.
# Whole files are kept apart to validate and to test: windows cut from one file share names and phrases, and would flatter the model.

# %%
show.source(one_gpu.main, fold=80)

# %% [markdown]
# Every 100 steps it validates, and writes the last and the best weights to files. At the end it tests the best ones, once.
# `evaluate` adds up losses and counts tokens. A mean of the batches' means would be another number, as the last batch is short.

# %%
show.source(one_gpu.evaluate)

# %% [markdown]
# After 300 steps the model, which wrote noise before, writes something that looks like Python from a distance.

# %%
(learned,) = run_on_ranks(one_gpu, 1, FOLDER / "learned", **LONG_RUN)

# %% tags=["hide-input"]
# Draws the loss over the steps

figure, axes = plt.subplots(figsize=(6.2, 2.6))
axes.plot(range(1, 301), learned, color=show.RANK_COLORS[0], lw=1)
axes.axhline(math.log(256), color=show.INK, ls=":", lw=1)
axes.text(300, math.log(256) - 0.1, "guessing among 256 bytes", ha="right", va="top", fontsize=9)
axes.set(xlabel="step", ylabel="loss (nats per byte)", ylim=(1.5, 5.8))
assert sum(learned[-20:]) / 20 < 2.8
show.figure(figure, "The loss falls from 5.5 to about 2 nats per byte in 300 steps.", "train-loss")

# %% [markdown]
# The *perplexity* that the script prints is $e^{\text{loss}}$, here of the validation loss. A loss of 2.2 nats is a perplexity of $e^{2.2} = 9$: the model is as unsure as if it had to guess among 9 equally likely bytes. At the start there are 256.
#
# From here on, twelve steps on a few kilobytes are enough: the only question is whether a change still computes the same.
# `run_and_compare` runs a script on two ranks, and compares losses and weights with those of the script above in one process.

# %% tags=["hide-input"]
# Runs a script on ranks, and holds losses and weights against one process


def load_weights(folder):
    """Return the model's weights in a folder of any of the scripts."""
    if (folder / "last.pt").exists():
        found = torch.load(folder / "last.pt", "cpu")
        return {name.removeprefix("module."): tensor for name, tensor in found.items()}
    state = {"state": {"model": GPT(PRESETS["nano"]).state_dict()}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this process is alone
        dcp.load(state, checkpoint_id=take_home.list_checkpoints(folder)[-1])
    return state["state"]["model"]


one = run_on_ranks(one_gpu, 1, FOLDER / "plain", show=False, **SHORT_RUN)[0]
REFERENCE_WEIGHTS = load_weights(FOLDER / "plain")


def compare_with_one_process(name, losses, folder, limit=1e-5):
    """Compare ranks' losses, and the weights in a folder, with those of one process."""
    mean = [sum(values) / len(losses) for values in zip(*losses, strict=True)]
    gaps = [abs(a - b) for a, b in zip(mean, one, strict=True)]
    found = load_weights(folder)
    pairs = [(found[name], weight) for name, weight in REFERENCE_WEIGHTS.items()]
    moved = max((a - b).abs().max().item() for a, b in pairs)
    assert max(gaps) < limit and moved < 50 * limit, (max(gaps), moved)
    print(f"{name}, {len(losses)} ranks: {len(mean)} losses and all weights equal one process's")


def run_and_compare(script, size=2, each=False, show=False):
    """Run a script on ranks, compare it with one process, and return each rank's losses."""
    name = script.__name__.rpartition(".")[2]
    folder = FOLDER / f"{name}-{size}"
    losses = run_on_ranks(script, size, folder, each, show, **SHORT_RUN)
    compare_with_one_process(name, losses, folder / "0" if each else folder)
    return losses


# %% [markdown]
# ## Ranks: a process group and a device
#
# `torchrun` starts the script once for each GPU, and tells each copy its number in environment variables. `init_process_group` reads them and connects the copies.
# What ranks need to train one model is ten lines:

# %%
show_diff(one_gpu.main, ddp.main)

# %% [markdown]
# And at the end of the file, around `main`:
#
# ```python
# dist.init_process_group()
# main()
# dist.destroy_process_group()
# ```
#
# `RANK` is a process's number among all, `LOCAL_RANK` its number on its own machine. The device comes from `LOCAL_RANK`: without it, all ranks of a machine compute on its first GPU.
# Why `% torch.cuda.device_count()`? In some Slurm jobs each process sees one GPU alone. Its number is then 0, whatever `LOCAL_RANK` says, and $r \bmod 1 = 0$.
#
# `destroy_process_group` comes after `main` on purpose. A model in DDP uses the group. If it is still there when the group is destroyed, the process may never end: with gloo, each of the two can wait for the other. When `main` has returned, the model is gone.
#
# Each step is a file of its own, and runs under `torchrun`: `torchrun --nproc-per-node=2 -m shardlab.train.ddp`.
# On this page `ranks.run` starts the ranks, which takes 0.2 s instead of 5.
#
# ## Seeds: one for each purpose
#
# Weights have to be the same on all ranks, so all make their model with the same seed.
# Dropout has to differ: if all ranks drop the same units, their average is noisier than one process's gradient.
# So a line after the model gives each rank a seed of its own: `torch.manual_seed(seed + 1 + rank)`.
#
# The order of the data has a seed of its own, as all ranks have to agree on it.
#
# ```{admonition} Checked: "manual_seed(1000 + rank) at the top of the script"
# :class: checked
#
# Then each rank begins with other weights. DDP hides it, since it copies rank 0's. `fully_shard` copies nothing: each rank keeps its part of *another* random model.
# ```

# %% tags=["hide-input"]
# Shows which wrapper repairs weights that began with a seed for each rank


def starts_from_rank_0(strategy):
    torch.manual_seed(1000 + dist.get_rank())
    model = GPT(PRESETS["nano"])
    torch.manual_seed(1000)
    of_rank_0 = GPT(PRESETS["nano"]).state_dict()
    options = take_home.Options(strategy=strategy)
    found = dcp_state.get_model_state_dict(take_home.parallelize_model(model, options, ranks.device()))
    full = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in found.items()}
    return all(torch.equal(full[name].cpu(), of_rank_0[name]) for name in of_rank_0)


for strategy in ("ddp", "fsdp2"):
    found = ranks.run(starts_from_rank_0, 2, strategy)
    print(f"{strategy}: the model that begins is rank 0's: {found[0]}")
    assert found == [strategy == "ddp"] * 2

# %% [markdown]
# ## The wrapper: gradients averaged
#
# The last of the ten lines wraps the model, and the ranks train one: DDP averages the gradients while backward computes them ([how](data_parallel.md#step-3-send-while-backward-still-runs)).

# %% tags=["hide-input"]
# Holds the wrapped model against one process

losses = run_and_compare(ddp, each=True)
assert losses[0] == losses[1] == one

# %% [markdown]
# The losses are still *bit for bit* those of one process, because both ranks read the same batches:
# the average of two equal gradients is the same gradient.
#
# ## Samplers: a share of the data for each rank
#
# `DistributedSampler` has one order of the windows, the same on all ranks. Rank $r$ of $N$ reads the places $r$, $r+N$, $r+2N$ and so on of it.

# %%
show_diff(ddp.main, sampler.main)

# %% [markdown]
# Four things go with it:
#
# - `set_epoch` makes the order of an epoch from seed and epoch. Without it every epoch has the order of the first.
# - The loader has a `sampler` and must not have `shuffle=True` as well; PyTorch refuses both. `shuffle` is the sampler's business now.
# - `drop_last=True`. By default the sampler repeats windows from the front, so that all ranks get equally many. On two ranks 143 windows become 144. That makes a ninth step in the epoch, where one process has eight, and all later steps read other windows.
# - `batch // world`: a loader's batch is its rank's share. If it stays 16, four ranks train with batches of 64, at a learning rate that was chosen for 16. On three ranks `16 // 3` would make batches of 15, so a batch that the ranks do not divide is an error.
#
# ![The order of an epoch, a row of windows in the colours of the two ranks that get them alternately. Two neighbouring windows of each rank make a batch. The resumed run begins after the second batch; four ranks deal the rest of the order anew.](../figures/train_order.svg)

# %% tags=["hide-input"]
# Holds the dealt data against one process

losses = run_and_compare(sampler, each=True)
assert losses[0] != losses[1]

# %% [markdown]
# Each rank has another loss now, and the mean of both is one process's loss: in each step two ranks together read the windows that one process reads. So the same model comes out, to rounding.
# Why only to rounding, and when that is close enough: [Data parallelism](data_parallel.md#five-steps-equal-one-process).
#
# Loading costs time, too. `DataLoader(…, num_workers=2)` loads in two processes *of each rank*: with four ranks a node, `num_workers=os.cpu_count()` starts four times as many processes as there are cores.
# Divide the cores by `LOCAL_WORLD_SIZE`. The order of the data does not depend on it.
#
# ## Losses: of all ranks
#
# A rank's own loss is the loss of its share of the batch, which varies more than the whole batch's.
# The third step reports the mean over all ranks:

# %%
show.source(core.average_over_ranks)

# %% [markdown]
# The shares are equally large and every target counts, so a mean of means is right here. The loss is detached first: otherwise each step's graph would stay in memory.
#
# ## Validation: each window once
#
# 143 windows cannot be divided into 2, 4 or 8 equal shares. A `DistributedSampler` repeats the first windows, which then count twice, and with `drop_last=True` some windows do not count: either way the validation loss depends on the number of ranks.
#
# The sampler may repeat windows, and should: under FSDP2 each forward is a collective, so all ranks need equally many. But a repeated window gets the targets −100, which cross-entropy ignores. Then two numbers are added up over the ranks, the losses and the tokens that count, and divided once.

# %%
show_diff(one_gpu.evaluate, core.evaluate)


# %% tags=["hide-input"]
# Table: a validation loss by the number of ranks, filled up and counted once

def evaluate_padded(model, windows):
    """Return the mean of the ranks' means over their padded shares."""
    sampler = DistributedSampler(windows, shuffle=False)
    with torch.no_grad():
        values = [loss(model(a[None]), b[None]) for a, b in (windows[i] for i in sampler)]
    return core.average_over_ranks(torch.stack(values).mean()).item()


def evaluate_both_ways():
    torch.set_default_dtype(torch.float64)  # so that what differs is not rounding
    model = GPT(PRESETS["nano"])
    model.load_state_dict(REFERENCE_WEIGHTS)
    windows = text.TokenWindows(64, text.load_splits()[1][: 64 * 5 + 1])
    exact = core.evaluate(model, windows, dist.get_rank(), dist.get_world_size(), size=1)
    return evaluate_padded(model, windows), exact


# CPU: float64, of the host
found = {size: ranks.run(evaluate_both_ways, size, device="cpu")[0] for size in (1, 2, 4)}
assert len({f"{exact:.9f}" for _, exact in found.values()}) == 1
assert len({f"{wrong:.6f}" for wrong, _ in found.values()}) == 3
show.table(
    [(n, f"{wrong:.5f}", f"{exact:.5f}") for n, (wrong, exact) in found.items()],
    ["ranks", "filled up (nats)", "counted once (nats)"],
    caption="The same weights on the same 5 windows",
)

# %% [markdown]
# ## One rank prints and writes
#
# Until now each rank has had a folder of its own here. In one folder all ranks would write `last.pt` at once.
# With the mean of the losses and the validation of all, this is the third and last step:

# %%
show_diff(sampler.main, core.main)

# %% [markdown]
# `model.module` is the model inside the wrapper. DDP's own state dict has names that begin with `module.`, which fit no plain model.
# The barrier makes the others wait until rank 0 has written what they read.
#
# Without `if rank == 0` two ranks write one file, and now and then it is spoilt. The cell forces that order.

# %% tags=["hide-input"]
# Shows a checkpoint that two ranks write at once


def write_concurrently(path):
    """Write each rank's checkpoint to one path; rank 1 opens it while rank 0 writes."""
    content = Path(f"{path}.{dist.get_rank()}")
    torch.save({"weight": torch.full((20_000,), float(dist.get_rank()))}, content)
    data = content.read_bytes()
    if dist.get_rank() == 0:
        with open(path, "wb") as file:
            file.write(data[:40_000])
            file.flush()
            dist.barrier()  # here rank 1 opens the file, which empties it
            dist.barrier()
            file.write(data[40_000:])
    else:
        dist.barrier()
        path.write_bytes(data[:60_000])  # and is not through when rank 0 goes on
        dist.barrier()


ranks.run(write_concurrently, 2, path := FOLDER / "at-once.pt")
try:
    torch.load(path)
except Exception as error:
    print(f"{type(error).__name__}: {str(error).splitlines()[0][:75]}")

# %% tags=["hide-input"]
# Holds the whole script against one process

losses = run_and_compare(core, show=True)
assert losses[0] == losses[1]

# %% [markdown]
# Data parallelism asks no more of a script.
# Now do it yourself: in [an exercise](#exercises) you take [one_gpu.py](../code/shardlab/train/one_gpu.py) to two ranks, and each step is checked before the next.
#
# ### The whole script
#
# After the three steps `main` is:

# %%
show.source(core.main)

# %% [markdown]
# ## What a job asks for besides
#
# A real job asks for more: batches that do not fit, half precision, a stop and a new start, models that do not fit.
# [code/train.py](../code/train.py) has all of that in one file of some 600 lines that needs PyTorch alone: copy it anywhere, and run it under `torchrun`, `srun` or alone.
# Its model and its data come first, a hundred lines that you replace by yours: `GPT`, `load_text` and `Windows`.
# `main` asks a `Training` for batches and steps:

# %%
show.source(take_home.main, Training.make_loader, Training.step)

# %% [markdown]
# `make_loader` deals what is left of an epoch, so that a run that begins in its middle loads nothing twice. `build` is a function that makes the model: this page gives it the course's GPT, the script takes its own.
# On a GPU, `pin_memory` puts batches into memory that the GPU reads by itself, so that with `non_blocking=True` the copy returns at once.
# Kernels come after the copy, in the same stream, so no line waits for it.
# Only `copied.synchronize()` waits: until the GPU begins this step, of which it then has all kernels.
# Each line of `metrics.jsonl` has loss, norm, seconds, tokens per second, memory, and MFU where the peak of the device is known or given.

# %% tags=["hide-input"]
# Runs the script to take home, and holds it against one process


def build_course_gpt(options):
    """Build the model of the scripts above."""
    return GPT(replace(PRESETS["nano"], dropout=options.dropout))


def run_take_home(size, folder, **options):
    """Run the script to take home on `size` ranks; return each rank's losses."""
    options = {"report": 6} | {k: v for k, v in SHORT_RUN.items() if k != "sample"} | options

    def main():
        warnings.simplefilter("ignore")
        # With tensor=2 torch says that it adds up a norm in two all-reduces.
        logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
        return take_home.main(take_home.Options(folder=str(folder), **options), build_course_gpt)

    return ranks.run(main, size, show=False)


def compare_take_home(name, size=2, limit=1e-5, **options):
    """Run the script to take home, compare it with one process, and return the losses."""
    folder = FOLDER / f"home-{name}-{size}"
    losses = run_take_home(size, folder, **options)
    assert all(own == losses[0] for own in losses)
    compare_with_one_process(name, losses, folder, limit)
    return losses


_ = compare_take_home("the script to take home")

# %% [markdown]
# ## Accumulation: several backwards before a step
#
# A batch that does not fit is cut into micro-batches whose gradients add up.
# Each loss is a sum, divided by the number of tokens that count in the whole batch: targets of −100 do not. `step` adds up that number over all ranks first.
# In a mean of means, a token of a short text would weigh more than one of a long text.

# %%
show.source(Training.backward)

# %% [markdown]
# DDP would send all gradients in every backward. Under `no_sync` it sends none; the last backward, outside of it, sends the sums: as many bytes as in one backward ([measured](data_parallel.md#forgetting-zero_grad-forgetting-no_sync)).
# Forward has to run inside of it, too.
#
# **Clipping** comes once, after that. The norm is that of the averaged gradient, which all ranks have after the last backward, so all scale by the same number.
# Clip before, or in each micro-batch, and you clip other vectors, and each rank by another number.

# %% tags=["hide-input"]
# Holds four micro-batches a step against one process

_ = compare_take_home("micro-batches of 2", micro=2)

# %% [markdown]
# ## bf16: products in 16 bits
#
# `autocast` computes matrix products in `bfloat16` and keeps weights, gradients and optimizer in `float32`. `bfloat16` has `float32`'s range and 8 binary digits.
# It wraps the model's forward, so validation computes as training does: `parallelize_model` does that, [below](#fsdp2-weights-gradients-and-optimizer-sharded).
# The scaler does nothing unless `precision="fp16"`: `float16` needs [a scale that all ranks share](trainers.md#fp16-a-scale-that-all-ranks-share).

# %% tags=["hide-input"]
# Holds bf16 on two ranks against float32 in one process, with its own limit

losses = compare_take_home("bf16", micro=2, precision="bf16", limit=2e-2)
gap = max(abs(a - b) for a, b in zip(losses[0], one, strict=True))
assert 1e-5 < gap < 5e-3
print(f"in bf16 the losses are within {gap:.0e} of those in float32")

# %% [markdown]
# A product in `bfloat16` is off by up to $2^{-8} = 0.4\,\%$, and a loss of some 5 nats by about $10^{-3}$. That is no error of the ranks: one process in `bfloat16` is as far away.
#
# ## Resume: everything that decides the next step
#
# The files so far have weights alone. A run that goes on needs more: the optimizer's averages, the scaler, the step, the place in the data, and each rank's random state.
# `Training` names all of it. PyTorch's [distributed checkpoint](checkpoint.md) (DCP) calls two of its methods on every rank: that is what `Stateful` is for.

# %%
show.source(Training.state_dict, Training.load_state_dict)

# %% [markdown]
# `get_state_dict` gives weights and optimizer by the plain model's names, whatever wraps it, and `set_state_dict` puts them back.
# The random state has a name of its own on each rank; what is equal on all of them is written once.
# A new iterator of a `DataLoader` draws a number from the default generator, from which dropout draws as well. A run that was started twice would drop other units, so loaders have a generator of their own.
#
# A checkpoint is written under a name with a dot, and renamed when all ranks are through, so a killed save leaves the last one as it was. ([Checkpoints](checkpoint.md) has what is left out here, saving in the background for instance.)
# Its files have checksums, which all ranks check together before they load.
# The names of the weights are compared, as other ranks' random states may be missing: DCP alone would load a checkpoint with more layers than the model, and with `allow_partial_load=True` one with fewer, both in silence (torch 2.13).
#
# The proof: 12 steps with dropout on two ranks without a stop; and the same, stopped after step 5, in the middle of an epoch, and started again.

# %%
unbroken = run_take_home(2, FOLDER / "unbroken", dropout=0.1)[0]
stopped = run_take_home(2, FOLDER / "parts", dropout=0.1, steps=5)[0]
resumed = run_take_home(2, FOLDER / "parts", dropout=0.1)[0]
print("the same losses, bit for bit:", stopped + resumed == unbroken)

# %% tags=["hide-input"]
# Holds losses and weights of the stopped run against the run without a stop

a, b = load_weights(FOLDER / "unbroken"), load_weights(FOLDER / "parts")
assert stopped + resumed == unbroken and all(torch.equal(a[name], b[name]) for name in a)

# %% [markdown]
# Four ranks could have gone on as well, or one: they deal what is left of the order. Then dropout draws other numbers, and without dropout losses are equal to rounding.
#
# ## FSDP2: weights, gradients and optimizer sharded
#
# DDP keeps everything on every rank. When that does not fit, there is FSDP2. `parallelize_model` makes either. They differ there, in `backward`, and in one line of `Training.clip_gradients`:

# %%
show.source(take_home.parallelize_model)

# %% [markdown]
# - **Units.** Each `fully_shard` makes one: its parameters are gathered together before its forward and freed after it. One call on the whole model would be one unit, and gather everything at once. Blocks first, then the root, which takes what is left: embedding and last norm.
# - **Precision.** The policy replaces `autocast`, in validation as well: parameters are gathered in 16 bits, which halves the bytes, and gradients are added up in `float32`.
# - **Reshard.** By default a block's parameters are freed after forward and gathered again for backward. `reshard_after_forward=False` keeps them: a third fewer bytes on the wire, and all weights in memory ([ZeRO](zero.md) has the figures).
# - **Accumulation.** Every micro-batch sends. `set_requires_gradient_sync(False)` puts it off until the last, and keeps whole gradients in `float32` till then: 280 GB on every rank for 70 billion parameters, the memory that you wanted to save.
# - **ZeRO's stages.** With both of these settings FSDP2 holds what [ZeRO-1](zero.md) holds during a step, and with the first alone what ZeRO-2 holds: `--strategy zero1` and `zero2`.
# - **Clipping.** The norm adds up the shards' squares over the ranks by itself. What comes is a DTensor: `.full_tensor()` before you print it, on all ranks.
# - **Tensor parallelism.** `--tensor 2` has pairs of ranks cut each matrix between them first ([how](tensor_parallel.md)); FSDP2 then cuts what is left over the copies. Ranks of a pair have the same share of the data.

# %% tags=["hide-input"]
# Table: the strategies against one process

rows = []
for strategy, degree in (("ddp", 1), ("zero1", 1), ("zero2", 1), ("fsdp2", 1), ("fsdp2", 2)):
    folder = FOLDER / f"home-{strategy}-{degree}"
    how = {"strategy": strategy, "tensor": degree, "micro": 4, "steps": 6}
    found = run_take_home(2, folder, **how)
    gap = max(abs(a - b) for a, b in zip(found[0], one[:6], strict=True))
    line = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    assert found[0] == found[1] and gap < 1e-5
    assert {"loss", "norm", "tokens_per_second", "mfu", "memory_bytes"} < set(line)
    rows.append((strategy, degree, "equal", f"{line['norm']:.4f}"))
show.table(rows, ["strategy, 2 ranks", "tensor", "losses", "norm of the gradient, step 6"])

# %% [markdown]
# Checkpoints need no change. Each rank writes its shards, DCP's index says where they lie, and the names are the plain model's.
# So the run that DDP began goes on under FSDP2, on four ranks instead of two:

# %%
run_take_home(2, FOLDER / "moved", steps=5)
moved = run_take_home(4, FOLDER / "moved", strategy="fsdp2")[0]

# %% tags=["hide-input"]
# Holds the moved run against one process

gaps = [abs(a - b) for a, b in zip(moved, one[5:], strict=True)]
assert max(gaps) < 1e-5
print("steps 6 to 12, FSDP2 on four ranks after DDP on two: losses equal one process's")


# %% [markdown]
# A **full** state dict, for one file that everybody reads, is an option: `get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))` gathers one tensor after another onto rank 0's host.
#
# ### A model that no rank holds whole
#
# The script builds the model on every rank's host before it cuts it ([how many GB that takes](../book/your_job.md#emit)). On the device `meta`, tensors have shapes and no storage. So a larger model is built there, cut, given room for its shards, and filled from rank 0's host, one tensor at a time.

# %%
def build_on_meta():
    """Return this rank's largest difference between a model built on `meta` and the plain one."""
    torch.manual_seed(0)
    full = GPT(PRESETS["nano"]).state_dict()
    weights = dict(full) if dist.get_rank() == 0 else {}
    with torch.device("meta"):
        model = GPT(PRESETS["nano"])
    take_home.parallelize_model(model, take_home.Options(strategy="fsdp2"), ranks.device())
    model.to_empty(device=ranks.device())
    full_options = dcp_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    dcp_state.set_model_state_dict(model, weights, options=full_options)
    found = dcp_state.get_model_state_dict(model)
    return max((found[n].full_tensor().cpu() - full[n]).abs().max().item() for n in full)


assert ranks.run(build_on_meta, 2) == [0, 0]

# %% [markdown]
# ### Compiled blocks
#
# The first lines of `parallelize_model` compile each block before it is sharded. All blocks share one compiled program, and gathering stays outside of it.

# %% tags=["hide-input"]
# Holds compiled blocks against one process

_ = compare_take_home("compiled blocks", micro=4, strategy="fsdp2", compiler="aot_eager")

# %% [markdown]
# This page takes the backend `aot_eager`, which needs no C++ compiler. On a GPU take `--compiler inductor`; its first step takes a minute.
#
# ## How much faster?
#
# The same global batch on 1, 2 and 4 ranks, timed in turns. *Compute* is the same step with no message, under `no_sync`.

# %% tags=["hide-input"]
# Times a step with messages and without


def time_steps(repeats=2, steps=2, batch=8):
    """Return the seconds of a step on this rank, with messages and without."""
    torch.manual_seed(0)
    model = DistributedDataParallel(GPT(PRESETS["micro"]).to(ranks.device()))
    tokens, targets = text.get_batch(128, batch // dist.get_world_size())
    tokens, targets = tokens.to(ranks.device()), targets.to(ranks.device())
    found = {True: [], False: []}
    for _ in range(repeats + 1):
        for sends in (True, False):
            model.require_backward_grad_sync = sends
            dist.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                loss(model(tokens), targets).backward()
            if ranks.device().type == "cuda":
                torch.cuda.synchronize()
            found[sends].append((time.perf_counter() - start) / steps)
    return [median(found[sends][1:]) for sends in (True, False)]  # the first warms up


# %% tags=["hide-input", "measured"]
# Table: speed-up and efficiency on 1, 2 and 4 ranks

measured = {size: max(ranks.run(time_steps, size)) for size in (1, 2, 4)}
alone = measured[1][0]
rows = []
for size, (step, compute) in measured.items():
    gain, messages = alone / step, 100 * max(0, step - compute) / step
    slower = compute * size / alone
    rows.append(
        (size, f"{step:.3f}", f"{gain:.2f}", f"{100 * gain / size:.0f}", f"{slower:.2f}", f"{messages:.0f}")
    )
show.table(
    rows,
    [
        "ranks",
        "step (s)",
        "speed-up",
        "efficiency (%)",
        "compute of a window, against 1 rank",
        "messages (% of the step)",
    ],
)

# %% [markdown]
# Efficiency is the speed-up divided by the ranks. Each loss has a column:
#
# - *Compute of a window* above 1: ranks share something. Four ranks on two cores have half a core each; on GPUs it is small batches that keep a GPU less busy.
# - *Messages*: what of the all-reduce backward did not hide.
# - What is left is waiting for the slowest rank.
#
# The slides of a course at Jülich have [1 h 32 min on one GPU, 25 minutes on 4 and 14 on 8](https://github.com/sab148/Running-and-Scaling-Performent-Deep-Learning-Models-on-HPC-Original/blob/0e3c3305509900761d17f9170f6c743f9d51ec96/03-parallelize-training.md): speed-ups of 3.7 and 6.6, efficiencies of 92 and 82 %.
# Read what was kept constant. In [its script](https://github.com/sab148/Running-and-Scaling-Performent-Deep-Learning-Models-on-HPC/blob/1b90cf6cc86aa43b65ac969f43b94386bdda40f1/train/single_gpu_training.py) it is the batch of a *rank*: the global one grows from 512 to 2,048 and 4,096, so it is the same number of windows, in a quarter and an eighth of the steps. The larger batch keeps each GPU as busy as one alone, and the loss that comes out is another one.
# The table above keeps the global batch, and with it the training.
#
# ## The script to take home
#
# What is left of [code/train.py](../code/train.py) is what a job needs around its training.
# `log_metrics` writes a line of JSON every 10 steps on rank 0, and draws the step where there is a terminal.
# A signal reaches one rank or all, at any moment. Every [`step`](#what-a-job-asks-for-besides) begins with an all-reduce of two numbers: the tokens that count, and the ranks that got the signal. So all ranks learn of it in one step, which is the last:

# %%
show.source(Training.log_metrics)


# %% [markdown]
# A checkpoint is saved at once; a validation that was due waits for the next start.
# All ranks end with status 0, which keeps `torchrun` from starting them again. A file `stopped` says that there is more to do.
# Processes that load data ignore the signal: the last step still needs them.
# Here rank 1 alone gets a signal while it trains; the command is then given once more.

# %%
def train_with_signal(folder, **options):
    """Run the script to take home; rank 1 gets a signal after half a second."""
    if dist.get_rank() == 1:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    return take_home.main(take_home.Options(folder=str(folder), **options), build_course_gpt)


long = {"steps": 2000, "every": 2000, "limit": SHORT_RUN["limit"]}
made = len(ranks.run(partial(train_with_signal, FOLDER / "signal", **long), 2, show=False)[0])
print("stopped early:", made < 2000, "-", (FOLDER / "signal/stopped").exists())
rest = long | {"steps": made + 5}
rest = run_take_home(2, FOLDER / "signal", **rest)[0]
print("the second start made", len(rest), "more steps")

# %% [markdown]
# `lock_folder` locks the folder. A second job in it is refused while the first lives, and ranks that see different folders are told.
# Each of these, and a damaged checkpoint, ends all ranks with one line and status 2, as a bad option does.
#
# What it needs from you is a model with a list `blocks`, and three texts. All strategies take any such module; `--tensor` wants the names of its matrices in `STYLES`.
# Checkpoints load under any strategy, on any number of ranks that divides the batch.
#
# ## What goes wrong, and how it looks
#
# | symptom | the line that is missing |
# |---|---|
# | four GPUs asked for, the time of one; every rank prints the same losses | [the process group](#ranks-a-process-group-and-a-device): each process trains alone |
# | losses exactly those of one process, and no faster | [a sampler](#samplers-a-share-of-the-data-for-each-rank): all ranks read the same batches |
# | a loss that falls in steps, one at each epoch | [`set_epoch`](#samplers-a-share-of-the-data-for-each-rank): each epoch repeats the order |
# | the validation loss changes with the number of ranks | [what fills up](#validation-each-window-once) is counted |
# | now and then a checkpoint that cannot be read | [one rank writes](#one-rank-prints-and-writes): all did |
# | bytes per step grow with accumulation | [`no_sync`](#accumulation-several-backwards-before-a-step) |
# | a spike after each restart | [the optimizer, or the place in the data](#resume-everything-that-decides-the-next-step) is not in the checkpoint |
# | the job never ends, though all is printed | [the model outlives its group](#ranks-a-process-group-and-a-device) |
#
# None of these raises an error. [Parity](parity.md), the next lesson, asks your own two scripts which tensor is the first that differs.
#
# ## When to use what
#
# | | for | against |
# |---|---|---|
# | DDP | one line; fewest bytes; any module | the whole model and its optimizer on every GPU: 16 bytes a parameter with AdamW |
# | FSDP2 | a model that does not fit; checkpoints by shards | half as many bytes again on the wire; units to choose; every forward is a collective, in validation as well |
# | Lightning, accelerate | the loop, the launch and the checkpoint are written | [what they change without being asked](trainers.md#what-it-hides) |
#
# ## Exercises
#
# ```{exercise-start} From one GPU to many, by your own hand (medium)
# :label: ex-train-steps
# ```
#
# Copy [one_gpu.py](../code/shardlab/train/one_gpu.py), and change your copy, `my_train.py`, step by step, to number 15 of this table.
# After each step run `python -m shardlab steps my_train.py` in a terminal, or the cell below. Two ranks run your script, and you read whether the step is made, and if not, what it lacks:
#
# | step | what you write | seen on two ranks |
# |---|---|---|
# | 1, 2 | `init_process_group`, `destroy_process_group` around `main` | a group of two, and none at the end |
# | 3 | a device by `LOCAL_RANK` | by your text alone, without a GPU |
# | 4 | `manual_seed(seed + 1 + rank)` after the model | one seed for weights, two afterwards |
# | 5 | `DistributedDataParallel` | whether forward goes through it |
# | 6, 7 | `DistributedSampler`, `batch // world` | no window twice, 16 in a step |
# | 8, 9 | `drop_last=True`, `set_epoch` | each step's windows are those of one process |
# | 10 | the mean of the loss | the printed loss, to four digits |
# | 11, 12 | validation by shares, each window once | who validates what; the printed loss |
# | 13, 14, 15 | rank 0 prints and writes, the others wait | output, files and their names, on a slow disk |
# | 16, 17 | `fully_shard`; whole weights in the files | units; names and shapes in the files |
#
# On a cluster, this is a batch file for one GPU, and what changes in it for four; for two nodes see [Clusters](cluster.md).
#
# ```bash
# #!/bin/bash
# #SBATCH --gpus-per-node=1        # then 4
# #SBATCH --cpus-per-task=4        # then 16
# #SBATCH --time=00:10:00
# srun python my_train.py          # then: srun torchrun --nproc-per-node=4 my_train.py
# ```

# %%
answer = ...  # "my_train.py"
check(answer, "my_ddp_script")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-train-steps
# :label: sol-train-steps
# :class: dropdown
# ```
#
# It is the script that the lesson comes to, `core`.

# %%
answer = core.__file__
check(answer, "my_ddp_script")

# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} The same under FSDP2 (medium)
# :label: ex-train-fsdp
# ```
#
# Make the last two steps: shards in the place of DDP, and files with whole weights. Nothing else changes.

# %%
answer = ...  # "my_train.py"
check(answer, "my_fsdp_script")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-train-fsdp
# :label: sol-train-fsdp
# :class: dropdown
# ```
#
# [fsdp.py](../code/shardlab/train/fsdp.py) differs from `core` in these lines.
# By default the outermost unit keeps its weights whole after a forward without a backward, as `generate` makes them, and weights that are loaded then do not fit: hence `reshard_after_forward=True`.

# %%
show_diff(core.main, fsdp.main)

# %%
answer = fsdp.__file__
check(answer, "my_fsdp_script")

# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Counted twice (easy)
# :label: ex-train-counted
# ```
#
# A validation set has 10 windows. Their losses are 1, 2, 3 and so on to 10.
# Four ranks validate with `DistributedSampler(windows, shuffle=False)` and average their means.
# Which loss do they report, where the right one is 5.5?

# %%
answer = ...  # nats
check(answer, "validation_filled_up")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-train-counted
# :label: sol-train-counted
# :class: dropdown
# ```
#
# Ten windows fill twelve places: the first two are repeated. All ranks have three, so the mean of their means is the mean of all twelve.

# %%
answer = (sum(range(1, 11)) + 1 + 2) / 12
check(answer, "validation_filled_up")


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} The mean over unequal shares (medium)
# :label: ex-train-mean
# ```
#
# Each rank has the summed loss of its tokens and their number, as Python numbers. Some ranks may have none.
# Return the mean loss of a token over all ranks of `group`, the same number on each.

# %%
def my_mean(total, count, group):
    pass  # your code


check(my_mean)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-train-mean
# :label: sol-train-mean
# :class: dropdown
# ```

# %%
def my_mean(total, count, group):
    both = torch.tensor([total, count], dtype=torch.float64, device=ranks.device())
    dist.all_reduce(both, group=group)  # [2]
    return (both[0] / both[1]).item()


check(my_mean)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Go on with fewer ranks (medium)
# :label: ex-train-order
# ```
#
# `order` is the order of an epoch, a list of window numbers. `done` steps of `batch` windows are over, made by any number of ranks.
# Return the windows that this rank reads in the rest of the epoch, in order, when `size` ranks go on. An incomplete last batch is dropped. `size` divides `batch`.

# %%
def my_rest(order, done, batch, rank, size):
    pass  # your code


check(my_rest)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-train-order
# :label: sol-train-order
# :class: dropdown
# ```
#
# The position counts windows of all ranks; who has read them does not matter.

# %%
def my_rest(order, done, batch, rank, size):
    full = len(order) // batch * batch
    return order[done * batch : full][rank::size]


check(my_rest)

# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Four scripts, each lacks a line (medium)
# :label: ex-train-logs
# ```
#
# Four versions of the script ran on two ranks, for two epochs of four steps. Each lacks one of `sampler`, `set_epoch`, `wrapper` and `all_reduce`, the last one in the losses.
# The table has how far each rank's losses are from those of one process. Which version lacks what?

# %% tags=["hide-input"]
# Table: losses of four versions that lack a line, minus those of one process

show.table(compare_scripts(), ["script", "rank", *(f"step {n}" for n in range(1, 9))])

# %%
answer = {"A": ..., "B": ..., "C": ..., "D": ...}
check(answer, "missing_lines")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-train-logs
# :label: sol-train-logs
# :class: dropdown
# ```
#
# A's ranks print what one process prints, to the last bit: they read the same. B is right until the second epoch. C's ranks differ from one another, and their mean is right. D is right at the first step alone, as weights drift apart afterwards.

# %%
answer = {"A": "sampler", "B": "set_epoch", "C": "all_reduce", "D": "wrapper"}
check(answer, "missing_lines")

# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Your own job (design)
# :label: ex-train-design
# ```
#
# A model of 1.3 billion parameters trains on 8 GPUs of 40 GB with AdamW and `--precision bf16`, with a batch of 512 sequences. It has to stop within 60 seconds of a signal.
# How many GB of weights, gradients and optimizer does each GPU hold with `--strategy ddp`, and how many with `fsdp2`?
# Which strategy, `--micro` and `--every` would you begin with, and what would you measure first?

# %%
answer = {"ddp": ..., "fsdp2": ...}  # GB on each GPU
check(answer, "states_of_a_job")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-train-design
# :label: sol-train-design
# :class: dropdown
# ```
#
# With `autocast` and with FSDP2's policy alike, weights, gradients and AdamW's two averages are kept in `float32`: 16 bytes a parameter.

# %%
full = 16 * 1.3e9 / 1e9
answer = {"ddp": full, "fsdp2": full / 8}
buckets, casts = 4 * 1.3, 2 * 1.3  # GB: copies of the gradients, of the weights in bfloat16
print(f"left of 40 GB: ddp {40 - full - buckets - casts:.0f}, fsdp2 {40 - full / 8:.0f}")
check(answer, "states_of_a_job")

# %% [markdown]
# DDP holds more than that: its buckets are a second copy of the gradients (without `gradient_as_bucket_view=True`), and what `autocast` has cast is kept for backward. So 11 GB are left for activations. FSDP2 has 37, less a block or two that are gathered; as every micro-batch sends, no whole gradients wait.
# Begin with `ddp`, which sends least, and the largest `--micro` that fits. If that is only 1 or 2, `fsdp2` leaves three times as much, and larger products may pay for its messages.
# A rank has 64 sequences of a step. A signal comes within a step, and the next one is the last: two steps and a save must take less than 60 seconds. Measure one of each.
# `--every` follows from how long a save takes and how often a job dies ([Checkpoints](checkpoint.md#how-often-to-save)).
# First of all, hold ten losses against one process with the same seed; better, ask for [every tensor](parity.md#two-scripts).
#
# ```{solution-end}
# ```
#
# ## Summary
#
# - Forty lines take a script from one process to many; compare losses and weights with one process after each step.
# - All ranks share one seed for the weights and one for the order of the data; each has its own seed for dropout.
# - Ranks send sums and counts, and divide once: in training losses, in validation, in accumulation.
# - One rank writes a whole checkpoint, all ranks write shards; write under a temporary name, then rename.
# - The checkpoint holds everything that decides the next step: weights, optimizer, scaler, position in the data, random states.
# - A decision that depends on one rank's data (stop, skip a step) takes one all-reduce.
# - FSDP2 changes the wrapper, the place where the precision is set, and `no_sync`; nothing else.
#
# ## Further reading
#
# - {cite}`li2020ddp`: how DDP hides its messages; section 3 has the interface that this script uses.
# - {cite}`zhao2023fsdp`: FSDP's units, and what resharding costs.
# - {cite}`micikevicius2018mixed`: why half precision needs a scale, and which parts stay in single precision.
# - PyTorch's own [notes on DDP](https://docs.pytorch.org/docs/stable/notes/ddp.html) and [FSDP2's tutorial](https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html).
