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
# # Training script: from one process to many
#
# After this lesson you can
#
# - change a script for one GPU into one for many, and show after each step that it still trains the same model;
# - name the lines that are silently wrong on several ranks: data, seeds, losses, checkpoints, the loss scale;
# - stop in the middle of an epoch, and resume on another number of ranks;
# - train your own model with [a script that you can copy](#the-script-to-take-home).
#
# Before you start, a puzzle.
# Two ranks run a script that trains a small GPT. There is no error, both losses fall from 5.5 to 4.4, two GPUs would be busy. What is wrong?
#
# ## Two ranks run the script for one GPU

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


# %% [markdown]
# Two ranks start the script for one GPU, unchanged:

# %%
asked = run_on_ranks(one_gpu, 2, FOLDER / "asked", each=True, show=False, **SHORT_RUN)
for rank, losses in enumerate(asked):
    print("rank", rank, "begins at", losses[0], "and ends at", losses[-1])

# %% [markdown]
# Both ranks trained the same model on the same text: their losses agree to the last digit. The job takes as long as on one GPU, and costs twice as much.
# This lesson adds and checks the forty missing lines one by one.
#
# ## The script for one process
#
# A GPT with 0.1 million parameters learns to predict the next byte of the Python standard library's source code.
# Validation and test use separate files: windows (training sequences) of one file share names and phrases, so a test on training files would look too good.

# %%
show.source(one_gpu.main, fold=80)

# %% [markdown]
# Every 100 steps the script validates, and writes the last and the best weights to files. At the end it tests the best weights, once.
# `evaluate` adds up losses and counts tokens. The mean of the batches' means would be a different number, since the last batch is smaller.

# %%
show.source(one_gpu.evaluate)

# %% [markdown]
# Before training the model writes noise; after 300 steps its text resembles Python.

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
# The *perplexity* that the script prints is $e^{\text{loss}}$, here of the validation loss. A loss of 2.2 nats is a perplexity of $e^{2.2} = 9$: the model is as unsure as if it had to guess among 9 equally likely bytes. At the start it guesses among 256.
#
# From here on, twelve steps on a few kilobytes are enough to see whether a changed script still computes the same.
# `run_and_compare` runs a script on two ranks, and compares losses and weights with those of the script above in one process.

# %% tags=["hide-input"]
# Runs a script on ranks, and compares losses and weights with one process


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
NEAR = 6.2e-5  # 4 sqrt(1,024 tokens) 2^-24 of 5.5; a turned weight: 2 * 1e-3 * 0.01


def compare_with_one_process(name, losses, folder, limit=NEAR):
    """Compare ranks' losses, and the weights in a folder, with those of one process."""
    mean = [sum(values) / len(losses) for values in zip(*losses, strict=True)]
    gaps = [abs(a - b) for a, b in zip(mean, one, strict=True)]
    found = load_weights(folder)
    pairs = [(found[name], weight) for name, weight in REFERENCE_WEIGHTS.items()]
    moved = max((a - b).abs().max().item() for a, b in pairs)
    assert max(gaps) < limit and moved < 8 * limit, (max(gaps), moved)
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
# `torchrun` starts one process per GPU, and gives each its rank in environment variables. `init_process_group` reads these and connects the processes.
# Ten more lines make the ranks train one model:

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
# `RANK` is a process's number among all processes, `LOCAL_RANK` its number on its own machine. The device comes from `LOCAL_RANK`: without it, all ranks of a machine compute on its first GPU.
# Why `% torch.cuda.device_count()`? In some Slurm jobs each process sees only its own GPU. This GPU has number 0 for every `LOCAL_RANK`, and $r \bmod 1 = 0$.
#
# `destroy_process_group` comes after `main` on purpose. A DDP model uses the group. If the model still exists when the group is destroyed, the process may never end: with gloo, model and group can wait for each other. When `main` returns, the model is freed.
#
# Each version of the script is a file, and runs under `torchrun`: `torchrun --nproc-per-node=2 -m shardlab.train.ddp`.
# On this page `ranks.run` starts the ranks.
#
# ## Seeds: one for each purpose
#
# Weights have to be the same on all ranks, so all ranks build the model with the same seed.
# Dropout has to differ: if all ranks drop the same units, the averaged gradient is noisier than one process's.
# So each rank sets its own seed after building the model: `torch.manual_seed(seed + 1 + rank)`.
#
# The order of the data has a separate seed, which is the same on all ranks.
#
# ```{admonition} Only if DDP copies the weights: "manual_seed(1000 + rank) at the top of the script"
# :class: checked
#
# Then each rank starts with different weights. DDP hides this mistake, since DDP copies rank 0's weights to all ranks. `fully_shard` copies nothing: each rank keeps its shard of a *different* random model.
# ```

# %% tags=["hide-input"]
# Shows which wrapper repairs weights that each rank drew with its own seed


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
    print(f"{strategy}: training starts from rank 0's weights: {found[0]}")
    assert found == [strategy == "ddp"] * 2

# %% [markdown]
# ## The wrapper: gradients averaged
#
# `DistributedDataParallel` wraps the model and averages the gradients while backward computes them ([how](data_parallel.md#step-3-overlap-sending-during-backward)).

# %% tags=["hide-input"]
# Compares the wrapped model with one process

losses = run_and_compare(ddp, each=True)
assert losses[0] == losses[1] == one

# %% [markdown]
# The losses are still *bit for bit* those of one process, because both ranks read the same batches:
# the average of two equal gradients is the same gradient.
#
# ## Samplers: a share of the data for each rank
#
# `DistributedSampler` puts the windows into an order that is the same on all ranks. Rank $r$ of $N$ reads the windows at positions $r$, $r+N$, $r+2N$ and so on of this order.

# %%
show_diff(ddp.main, sampler.main)

# %% [markdown]
# - `set_epoch` reshuffles: the order depends on seed and epoch. Without this call every epoch has the order of the first.
# - `shuffle` is now an argument of the sampler. A loader with a `sampler` and `shuffle=True` raises an error.
# - `drop_last=True`. By default the sampler repeats the first windows, so that all ranks get equally many. On two ranks 143 windows become 144, and the epoch gets a ninth step, where one process has eight: all later steps read different windows.
# - `batch // world`: a loader's batch is its rank's share. If it stays 16, four ranks train with batches of 64, at a learning rate that was chosen for 16. On three ranks `16 // 3` would make a global batch of 15, so `batch` has to be a multiple of the number of ranks.
#
# ![The order of an epoch as a row of 13 windows, distributed over two ranks in turn: four windows are a step, and the last window is dropped. A run that stopped after step 2 continues at place 8 of the same order, on two ranks or on four.](../figures/train_order.svg)

# %% tags=["hide-input"]
# Compares ranks with a sampler with one process

losses = run_and_compare(sampler, each=True)
assert losses[0] != losses[1]

# %% [markdown]
# The ranks' losses differ now, and their mean is one process's loss: in each step two ranks together read the windows that one process reads. So they train the same model, up to rounding.
# [Data parallelism](data_parallel.md#five-steps-equal-one-process) says when this is close enough.
#
# Loading costs time, too. With `num_workers=2` *each rank* starts two processes: with four ranks per node, `num_workers=os.cpu_count()` starts four times as many processes as there are cores.
# Divide the cores by `LOCAL_WORLD_SIZE`.
#
# ## Losses: of all ranks
#
# A rank's own loss is the loss of its share of the batch. It varies more from step to step than the loss of the whole batch.
# The third version of the script reports the mean over all ranks:

# %%
show.source(core.average_over_ranks)

# %% [markdown]
# The shares are equally large and every target counts, so a mean of means is right here. The script detaches the loss first: otherwise each step's graph would stay in memory.
#
# ## Validation: each window once
#
# 143 windows cannot be divided into 2, 4 or 8 equal shares. By default `DistributedSampler` repeats the first windows, which then count twice; with `drop_last=True` it skips some windows. In both cases the validation loss depends on the number of ranks.
#
# The script lets the sampler repeat windows: under FSDP2 each forward is a collective, so all ranks need equally many batches.
# But it sets a repeated window's targets to −100, which cross-entropy ignores. An all-reduce adds up the losses and the counted tokens of all ranks, and each rank divides the two sums.

# %%
show_diff(one_gpu.evaluate, core.evaluate)


# %% tags=["hide-input"]
# Table: the validation loss by the number of ranks, with repeated windows and without

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
    ["ranks", "repeated windows count (nats)", "each window counts once (nats)"],
    caption="The same weights on the same 5 windows",
)

# %% [markdown]
# ## One rank prints and writes
#
# So far each rank wrote to its own folder. In a shared folder all ranks would write `last.pt` at once.
# The third and last version adds the mean of the losses, the shared validation, and one rank that prints and writes:

# %%
show_diff(sampler.main, core.main)

# %% [markdown]
# `model.module` is the model inside the wrapper. DDP's own state dict has names that begin with `module.`, which no plain model can load.
# The barrier makes the other ranks wait until rank 0 has written the files that they read.
#
# Without `if rank == 0` two ranks write one file at once, and sometimes corrupt it. The cell forces an order of writes that corrupts it.

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
# Compares the whole script with one process

losses = run_and_compare(core, show=True)
assert losses[0] == losses[1]

# %% [markdown]
# Now change [one_gpu.py](../code/shardlab/train/one_gpu.py) for two ranks yourself: [an exercise](#exercises) checks each change before the next.
#
# ### The whole script

# %%
show.source(core.main)

# %% [markdown]
# ## What else a real job needs
#
# The script still lacks gradient accumulation, 16-bit precision, resuming, and sharding for models that do not fit into one GPU.
# [code/train.py](../code/train.py) has all of these in one file of some 600 lines that needs only PyTorch: copy it anywhere, and run it with `torchrun`, `srun` or `python`.
# Replace its model (`GPT`) and data (`load_text`, `Windows`), some hundred lines, with yours.
# `main` calls the methods of a `Training`, among them these two:

# %%
show.source(take_home.main, Training.make_loader, Training.step)

# %% [markdown]
# `make_loader` distributes the rest of an epoch, so a run that resumes in the middle of an epoch reads no window twice. `build` is the function that builds the model: the course's GPT on this page, `GPT` in the script.
# `pin_memory` puts batches into host memory that the GPU can read itself, so `.to` with `non_blocking=True` returns before the copy is done.
# The kernels that use the batch follow the copy in the same stream, so the CPU need not wait for it.
# The CPU waits only in `copied.synchronize()`, where the step's kernels are already queued, until the GPU begins the step.
# Each line of `metrics.jsonl` has loss, gradient norm, seconds, tokens per second, memory, and MFU if the device's peak FLOP/s is known or given.

# %% tags=["hide-input"]
# Runs the script to take home, and compares it with one process


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


def compare_take_home(name, size=2, limit=NEAR, **options):
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
# A batch that does not fit into memory is split into micro-batches whose gradients add up.
# Each micro-batch's loss is the sum over its tokens, divided by the number of counted tokens in the whole batch (tokens with target −100 are not counted). `step` first adds up this number over all ranks.
# In a mean of means, a token of a short text would weigh more than a token of a long text.

# %%
show.source(Training.backward)

# %% [markdown]
# By default DDP sends all gradients in every backward. Under `no_sync` it sends none; the last backward, outside `no_sync`, sends the sums, which are as many bytes as one backward's gradients ([measured](data_parallel.md#forgetting-zero_grad-forgetting-no_sync)).
# Forward has to run under `no_sync`, too.
#
# **Clipping** comes once, after the last backward. All ranks then have the averaged gradient and its norm, so they all scale by the same factor.
# If you clip earlier or in each micro-batch, you clip different vectors, and each rank scales by a different factor.

# %% tags=["hide-input"]
# Compares four micro-batches per step with one process

_ = compare_take_home("micro-batches of 2", micro=2)

# %% [markdown]
# ## bf16: products in 16 bits
#
# `autocast` computes matrix products in `bfloat16` and keeps weights, gradients and optimizer in `float32`. `bfloat16` has `float32`'s range and 8 significant bits.
# `parallelize_model` ([below](#fsdp2-weights-gradients-and-optimizer-sharded)) wraps the model's forward in `autocast`, so validation computes as training does.
# The gradient scaler does nothing unless `precision="fp16"`: `float16` needs [a scale that all ranks share](trainers.md#fp16-a-scale-that-all-ranks-share).

# %% tags=["hide-input"]
# Compares bf16 on two ranks with float32 in one process, with a larger tolerance
# sqrt(26 products) 2^-8 of logits of 0.5 is 1e-2.
losses = compare_take_home("bf16", micro=2, precision="bf16", limit=1e-2)
gap = max(abs(a - b) for a, b in zip(losses[0], one, strict=True))
assert gap > NEAR
print(f"in bf16 the losses are within {gap:.0e} of those in float32")

# %% [markdown]
# A product in `bfloat16` is off by up to $2^{-8} = 0.4\,\%$, and a loss of some 5 nats by about $10^{-3}$. The ranks do not cause this error: one process in `bfloat16` is as far from `float32`.
#
# ## Resume: everything that decides the next step
#
# The files so far hold only weights. To resume, a run also needs the optimizer's averages, the scaler, the step, the position in the data, and each rank's random state.
# `Training` is a `Stateful`: PyTorch's [distributed checkpoint](checkpoint.md) (DCP) calls its `state_dict` and `load_state_dict` on every rank.

# %%
show.source(Training.state_dict, Training.load_state_dict)

# %% [markdown]
# `get_state_dict` returns weights and optimizer state under the unwrapped model's names, for any wrapper; `set_state_dict` loads them.
# The random state has a different name on each rank; entries that are equal on all ranks are written once.
# A new iterator of a `DataLoader` draws a number from the default generator, which dropout uses, too. A resumed run makes one more iterator and would drop different units, so loaders get their own generator.
#
# A checkpoint is written under a name that begins with a dot, and renamed when all ranks have written, so a job that is killed while it saves leaves the previous checkpoint intact.
# Before they load, the ranks verify the files' checksums.
# They also compare the names of the weights with the model's. DCP raises no error if the checkpoint has more layers than the model.
# It also loads a checkpoint with fewer layers if `allow_partial_load=True` (torch 2.13), which the script sets because some ranks' random states may be missing.
#
# The test trains 12 steps with dropout on two ranks, once without a stop, and once stopped after step 5, in the middle of an epoch, and resumed.

# %%
unbroken = run_take_home(2, FOLDER / "unbroken", dropout=0.1)[0]
stopped = run_take_home(2, FOLDER / "parts", dropout=0.1, steps=5)[0]
resumed = run_take_home(2, FOLDER / "parts", dropout=0.1)[0]
print("the same losses, bit for bit:", stopped + resumed == unbroken)

# %% tags=["hide-input"]
# Compares losses and weights of the stopped run with those of the run without a stop

a, b = load_weights(FOLDER / "unbroken"), load_weights(FOLDER / "parts")
assert stopped + resumed == unbroken and all(torch.equal(a[name], b[name]) for name in a)

# %% [markdown]
# One rank or four could also resume: they share the rest of the epoch's order. Dropout then draws different numbers; without dropout the losses are equal up to rounding.
#
# ## FSDP2: weights, gradients and optimizer sharded
#
# DDP keeps everything on every rank; FSDP2 is for models that do not fit. `parallelize_model` applies one of them. Apart from it, only `backward` and one line of `Training.clip_gradients` differ:

# %%
show.source(take_home.parallelize_model)

# %% [markdown]
# - **Units.** Each call of `fully_shard` makes a unit, whose parameters are gathered together before its forward and freed after it. A single call, on the model, would gather everything at once. Shard blocks first, then the root, whose unit gets the other parameters: embedding and last norm.
# - **Precision.** `MixedPrecisionPolicy` replaces `autocast`, in validation as well: parameters are gathered in 16 bits, which halves the bytes, and gradients are added up in `float32`.
# - **Reshard.** By default a block's parameters are freed after forward and gathered again for backward. `reshard_after_forward=False` keeps them: ranks send a third fewer bytes, and hold all weights in memory ([figures](zero.md)).
# - **Accumulation.** Every micro-batch reduces gradients. `set_requires_gradient_sync(False)` delays this until the last micro-batch, and keeps unsharded `float32` gradients: 280 GB on every rank for 70 billion parameters, the memory that you wanted to save.
# - **ZeRO's stages.** `--strategy zero2` sets `reshard_after_forward=False`, and holds as much as [ZeRO-2](zero.md) during a step; `zero1` adds `set_requires_gradient_sync(False)`, and holds as much as ZeRO-1.
# - **Clipping.** `get_total_norm` adds up the squares of all ranks' shards and returns a DTensor. Call `.full_tensor()` on all ranks before you print it.
# - **Tensor parallelism.** With `--tensor 2` each pair of ranks first halves every matrix ([how](tensor_parallel.md)); FSDP2 then shards each half over the pairs. Both ranks of a pair read the same share of the data.

# %% tags=["hide-input"]
# Table: the strategies against one process
rows = []
for strategy, degree in (("ddp", 1), ("zero1", 1), ("zero2", 1), ("fsdp2", 1), ("fsdp2", 2)):
    folder = FOLDER / f"home-{strategy}-{degree}"
    how = {"strategy": strategy, "tensor": degree, "micro": 4, "steps": 6}
    found = run_take_home(2, folder, **how)
    gap = max(abs(a - b) for a, b in zip(found[0], one[:6], strict=True))
    line = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    assert found[0] == found[1] and gap < NEAR
    assert {"loss", "norm", "tokens_per_second", "mfu", "memory_bytes"} < set(line)
    rows.append((strategy, degree, "equal", f"{line['norm']:.4f}"))
show.table(rows, ["strategy, 2 ranks", "tensor", "losses", "norm of the gradient, step 6"])

# %% [markdown]
# Checkpoints need no change. Each rank writes its shards, DCP's index says which file has which shard, and the names are the unwrapped model's.
# So FSDP2 on four ranks can resume a run that DDP began on two:

# %%
run_take_home(2, FOLDER / "moved", steps=5)
moved = run_take_home(4, FOLDER / "moved", strategy="fsdp2")[0]

# %% tags=["hide-input"]
# Compares the run that changed to FSDP2 with one process
gaps = [abs(a - b) for a, b in zip(moved, one[5:], strict=True)]
assert max(gaps) < NEAR
print("steps 6 to 12, FSDP2 on four ranks after DDP on two: losses equal one process's")


# %% [markdown]
# For one file that any program can read, make a **full** state dict: `get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))` gathers one tensor after another onto rank 0's host.
#
# ### A model that no rank holds whole
#
# The script builds the whole model in every rank's host memory, then shards it ([how many GB that takes](../book/your_job.md#emit)). Build a larger model on the device `meta`, where tensors have shapes and no storage. Then shard it, allocate the shards, and fill them from rank 0's host, one tensor at a time.

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
# The first lines of `parallelize_model` compile each block before it is sharded. All blocks share one compiled program, which does not include the all-gather.

# %% tags=["hide-input"]
# Compares compiled blocks with one process

_ = compare_take_home("compiled blocks", micro=4, strategy="fsdp2", compiler="aot_eager")

# %% [markdown]
# This page uses the backend `aot_eager`, which needs no C++ compiler. On a GPU use `--compiler inductor`; its first step takes a minute.
#
# ## How much faster?
#
# The table times the same global batch on 1, 2 and 4 ranks. *Compute* is the same step without messages, as under `no_sync`.

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
        "compute per window, relative to 1 rank",
        "messages (% of the step)",
    ],
)

# %% [markdown]
# Efficiency is the speed-up divided by the number of ranks. Three causes keep it below 100 %; two have columns:
#
# - *Compute per window* is above 1 if ranks compete for a resource (here four ranks have half a core each) or if small batches keep a GPU less busy.
# - *Messages* is the part of the all-reduce that backward does not hide.
# - The rest is waiting for the slowest rank.
#
# The slides of a course at Jülich have [1 h 32 min on one GPU, 25 minutes on 4 and 14 on 8](https://github.com/sab148/Running-and-Scaling-Performent-Deep-Learning-Models-on-HPC-Original/blob/0e3c3305509900761d17f9170f6c743f9d51ec96/03-parallelize-training.md): speed-ups of 3.7 and 6.6, efficiencies of 92 and 82 %.
# In [its script](https://github.com/sab148/Running-and-Scaling-Performent-Deep-Learning-Models-on-HPC/blob/1b90cf6cc86aa43b65ac969f43b94386bdda40f1/train/single_gpu_training.py) each *rank's* batch is constant. The global batch grows from 512 to 2,048 and 4,096, so the same windows take a quarter and an eighth of the steps. Each GPU stays as busy as a single GPU, but the final loss is different.
# The table above keeps the global batch constant, so the training is the same.
#
# ## The script to take home
#
# The rest of [code/train.py](../code/train.py) handles signals, saves and logs.
# A signal reaches one rank or all, at any moment.
# Every [`step`](#what-else-a-real-job-needs) begins with an all-reduce of two numbers: counted tokens, and ranks that got a signal.
# So all ranks learn of the signal in the same step, and stop after it.
# `log_metrics` writes a line of JSON every 10 steps on rank 0, and shows the step in a terminal:

# %%
show.source(Training.log_metrics)


# %% [markdown]
# After a signal the job saves a checkpoint; a validation that is due waits for the next start.
# All ranks exit with status 0, which keeps `torchrun` from restarting them. The file `stopped` records that the training is not finished.
# Processes that load data ignore the signal: the last step still needs them.
# Here only rank 1 gets a signal while it trains; then the job is started again.

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
# `lock_folder` raises an error if another job uses the folder, or if ranks see different folders.
# These errors, damaged checkpoints and bad options end all ranks with a one-line message and status 2.
#
# The script needs training, validation and test texts, and a model with a list `blocks`. For `--tensor`, also list the names of the model's matrices in `STYLES`.
# Checkpoints load under any strategy, on any number of ranks that divides the batch.
#
# ## What goes wrong, and how it looks
#
# | symptom | missing line, or cause |
# |---|---|
# | four GPUs take as long as one; every rank prints the same losses | [the process group](#ranks-a-process-group-and-a-device): each process trains alone |
# | losses exactly those of one process, and no speed-up | [a sampler](#samplers-a-share-of-the-data-for-each-rank): all ranks read the same batches |
# | a loss that drops once in every epoch | [`set_epoch`](#samplers-a-share-of-the-data-for-each-rank): each epoch repeats the order |
# | the validation loss changes with the number of ranks | [`-100`](#validation-each-window-once): repeated windows count twice |
# | now and then a checkpoint that cannot be read | [`if rank == 0`](#one-rank-prints-and-writes): all ranks write the file |
# | bytes per step grow with accumulation | [`no_sync`](#accumulation-several-backwards-before-a-step) |
# | a spike after each restart | [the optimizer, or the position in the data](#resume-everything-that-decides-the-next-step) is not in the checkpoint |
# | the job never ends, though it printed its last line | [the model is freed](#ranks-a-process-group-and-a-device) only after its process group |
#
# None of these raises an error. [Parity](parity.md), the next lesson, finds the first tensor that differs between your two scripts.
#
# ## When to use what
#
# | | for | against |
# |---|---|---|
# | DDP | one line; fewest bytes; any module | the whole model and its optimizer on every GPU: 16 bytes a parameter with AdamW |
# | FSDP2 | models that do not fit; sharded checkpoints | sends 1.5 times as many bytes; you choose the units; every forward is a collective, in validation as well |
# | Lightning, accelerate | the loop, the launch and the checkpoint are written | [what they change without being asked](trainers.md#what-a-trainer-changes-without-being-asked) |
#
# ## Exercises
#
# ```{exercise-start} From one GPU to many, step by step (medium)
# :label: ex-train-steps
# ```
#
# Save {download}`one_gpu.py <../code/shardlab/train/one_gpu.py>` as `my_train.py`, and change it up to step 15 of this table.
# After each step run `python -m shardlab steps my_train.py` in a terminal, or the cell below. Two ranks run your script, and a message says whether the step is done, and if not, what is missing:
#
# | step | what you write | what is checked on two ranks |
# |---|---|---|
# | 1, 2 | `init_process_group`, `destroy_process_group` around `main` | a group of two, and none at the end |
# | 3 | a device by `LOCAL_RANK` | without a GPU: your source code |
# | 4 | `manual_seed(seed + 1 + rank)` after the model | one seed for weights, different seeds afterwards |
# | 5 | `DistributedDataParallel` | forward goes through the wrapper |
# | 6, 7 | `DistributedSampler`, `batch // world` | no window twice, 16 windows in a step |
# | 8, 9 | `drop_last=True`, `set_epoch` | each step's windows are those of one process |
# | 10 | the mean of the loss | the printed loss, to four digits |
# | 11, 12 | validation by shares, each window once | each rank's windows; the printed loss |
# | 13, 14, 15 | rank 0 prints and writes, the others wait | output, files and their names, with slow saves |
# | 16, 17 | `fully_shard`; full weights in the files | units; names and shapes in the files |
#
# Under Slurm, `sbatch one.sbatch my_train.py` runs it on one GPU with {download}`one.sbatch <../code/shardtools/cluster/jobs/one.sbatch>`.
# For four GPUs change its `--gpus=1` to 4 and its `--cpus-per-task=4` to 16, and its `python` to `torchrun --standalone --nproc-per-node=4`; [Clusters](cluster.md#one-gpu-a-batch-script) explains the file, and has files for two nodes.

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
# The solution is the lesson's third version, `core`.

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
# Make the last two steps: `fully_shard` instead of DDP, and files with unsharded weights. Nothing else changes.

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
# By default the root module stays gathered after a forward without a backward, such as in `generate`, and then cannot load weights: hence `reshard_after_forward=True`.

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
# Which loss do they report instead of the right one, 5.5?

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
# The sampler repeats the first two windows, which makes twelve. Each rank has three, so the mean of the means is the mean of all twelve.

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
# Each rank has the summed loss of its tokens and their number, as Python numbers. Some ranks may have no tokens.
# Return the mean loss per token over all ranks of `group`, the same number on each rank.

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
# ```{exercise-start} Resume with fewer ranks (medium)
# :label: ex-train-order
# ```
#
# `order` is the order of an epoch, a list of window numbers. Some number of ranks has already made `done` steps of `batch` windows.
# Return the windows that this rank reads in the rest of the epoch, in order, when `size` ranks resume. An incomplete last batch is dropped. `size` divides `batch`.

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
# The position counts windows of all ranks; which rank read which window does not matter.

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
# Four versions of the script ran on two ranks, for two epochs of four steps. Each lacks one line: `sampler`, `set_epoch`, `wrapper` or `all_reduce` (of the losses).
# The table shows each rank's losses minus those of one process. Which version lacks which line?

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
# A's ranks print exactly one process's losses: they read the same batches. B is right until the second epoch. C's ranks differ from each other, but their mean is right. D is right only at the first step; then the ranks' weights drift apart.

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
# How many GB of weights, gradients and optimizer states does each GPU hold with `--strategy ddp`, and how many with `fsdp2`?
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
# Both `autocast` and FSDP2's policy keep weights, gradients and AdamW's two averages in `float32`: 16 bytes per parameter.

# %%
full = 16 * 1.3e9 / 1e9
answer = {"ddp": full, "fsdp2": full / 8}
buckets, casts = 4 * 1.3, 2 * 1.3  # GB: copies of the gradients, of the weights in bfloat16
print(f"left of 40 GB: ddp {40 - full - buckets - casts:.0f}, fsdp2 {40 - full / 8:.0f}")
check(answer, "states_of_a_job")

# %% [markdown]
# DDP holds more: its buckets are a second copy of the gradients (without `gradient_as_bucket_view=True`), and `autocast` keeps its 16-bit weights for backward. So 11 GB are left for activations. FSDP2 leaves 37 GB, minus one or two gathered blocks; every micro-batch reduces gradients, so no unsharded gradients are kept.
# Begin with `ddp`, which sends least, and the largest `--micro` that fits. If only 1 or 2 fit, `fsdp2` leaves three times as much memory, and the larger matrix products may save more time than its messages cost.
# Each rank has 64 sequences per step. After a signal during a step, the next step is the last: measure whether two steps and a save take less than 60 seconds.
# `--every` follows from how long a save takes and how often a job dies ([Checkpoints](checkpoint.md#how-often-to-save)).
# First of all, compare ten losses with one process and the same seed; better, compare [every tensor](parity.md#comparing-two-scripts).
#
# ```{solution-end}
# ```
#
# ## Summary
#
# - Forty lines turn a script for one process into one for many; compare losses and weights with one process after each change.
# - All ranks share one seed for the weights and one for the order of the data; each has its own seed for dropout.
# - Add up all ranks' sums and counts, then divide: in training losses, in validation, in accumulation.
# - One rank writes a full checkpoint, or each rank its shards; write under a temporary name, then rename.
# - The checkpoint holds everything that decides the next step: weights, optimizer, scaler, position in the data, random states.
# - If a decision depends on one rank's data (stop, skip a step), all ranks need an all-reduce to agree on it.
# - FSDP2 replaces the wrapper, `autocast` and `no_sync`; nothing else changes.
#
# ## Further reading
#
# - {cite}`li2020ddp`: how DDP overlaps messages with backward; section 3 has the interface that this script uses.
# - {cite}`zhao2023fsdp`: FSDP's units, and what resharding costs.
# - {cite}`micikevicius2018mixed`: why half precision needs a scale, and which parts stay in single precision.
# - PyTorch's own [notes on DDP](https://docs.pytorch.org/docs/stable/notes/ddp.html) and [FSDP2's tutorial](https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html).
