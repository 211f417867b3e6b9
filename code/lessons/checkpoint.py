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
# # Checkpoints: stop on some ranks, resume on others
#
# After this lesson you can
#
# - save a sharded run on four ranks and go on with two or one, and prove that nothing but rounding differs;
# - say what belongs into a checkpoint beside the weights, and what each missing part costs;
# - save so that a kill at any moment loses nothing, and damage is named before it does harm;
# - compute how often to save, how many bytes that writes, and what saving in the background gains;
# - load a model of Hugging Face's hub into any layout and write it back bit for bit, and hand weights to another layout while a job runs.
#
# It takes about 45 minutes to read and 40 minutes for the exercises. Running it takes a minute.
# It needs [Data parallelism](data_parallel.md), and reads better after [ZeRO](zero.md): most models here are sharded by `fully_shard`, PyTorch's own ZeRO-3.
#
# One thing to wonder about before you start.
# A job saves with PyTorch's own `torch.distributed.checkpoint` into one folder, over the last checkpoint, and is killed meanwhile.
# The folder then loads without a word of complaint.
# Half of the weights in it are of step 100, and half of step 200.
# You will see it [below](#one-folder-for-all-saves), and how one rename prevents it.

# %% tags=["hide-input"]
# Imports, and the small models that the cells train

import copy
import json
import math
import os
import shutil
import signal
import tempfile
import textwrap
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from shardlab import count, ranks, show, text
from shardlab.check import check
from shardlab.checkpoint import (
    MANIFEST,
    CheckpointError,
    Checkpoints,
    Training,
    best_interval,
    complete,
    config_of,
    core,
    export,
    hand_over,
    load_hub,
    lost_fraction,
    moving,
    names,
    predicted_hand_over,
    save_hub,
    simulated_lost_fraction,
)
from shardlab.layout import Layout
from shardlab.mesh import Parallel, join, predicted_pieces
from shardlab.model import GPT, PRESETS, loss, parameter_count

show.style()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # a page has no progress bars, and misses none
    import transformers

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
TEMPORARY = tempfile.TemporaryDirectory(prefix="checkpoints-")  # goes with this process
FOLDER = Path(TEMPORARY.name)
BATCH = 8  # windows in a step, over all ranks


def run(fn, size, *args, **how):
    """These ranks compute on the CPU: what this page measures is files, not GPUs."""
    # CPU: files are measured, not GPUs
    return ranks.run(fn, size, *args, device="cpu", **how)


def sharded(preset="nano", dtype=torch.float32, lr=1e-3):
    """A small GPT, spread over all ranks by `fully_shard`, with AdamW."""
    torch.manual_seed(0)
    model = GPT(PRESETS[preset]).to(dtype)
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")  # else this machine's GPUs
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 8], gamma=0.5)
    return Training(model, optimizer, schedule)


def train(training, steps):
    """Steps on this rank's share of each batch; the mean losses over all ranks."""
    rank, size, losses = dist.get_rank(), dist.get_world_size(), []
    each = BATCH // size
    for _ in range(steps):
        tokens, targets = text.batch(64, each, start=training.samples + rank * each)
        training.optimizer.zero_grad()
        value = loss(training.model(tokens), targets)
        value.backward()
        training.optimizer.step()
        training.schedule.step()
        training.step += 1
        training.samples += BATCH
        mean = value.detach() / size
        dist.all_reduce(mean)  # a scalar
        losses.append(mean.item())
    return losses


def small(step=0):
    """A sharded run whose weights all say which step they are of."""
    model = nn.Linear(64, 64)
    fully_shard(model, mesh=DeviceMesh.from_group(dist.group.WORLD, "cpu"))
    training = Training(model, torch.optim.AdamW(model.parameters()), step=step)
    set_step(training, step)
    return training


@torch.no_grad()
def set_step(training, step):
    training.step = step
    for parameter in training.model.parameters():
        parameter.fill_(step)


def flip(path):
    """Turn one bit round, in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# %% [markdown]
# ## How long a job lives
#
# Llama 3's largest model trained on 16,384 GPUs. In 54 days, the job was interrupted 419 times without anybody having planned it {cite}`dubey2024llama3` (section 3.3.4).
# One failed GPU stops all of them, because every step needs every rank.
# If each GPU fails as often as those did, this is how long a job of another size lives.

# %%
gpu_hours = 16_384 * 54 * 24 / 419  # of work of one GPU, for each interruption
between = {gpus: gpu_hours / gpus for gpus in (8, 256, 1024, 16_384)}
month = {gpus: math.exp(-30 * 24 / hours) for gpus, hours in between.items()}

# %% tags=["hide-input"]
# Table: hours between two interruptions, by the number of GPUs

rows = [(f"{n:,}", f"{between[n]:,.1f}", f"{100 * month[n]:.1f}") for n in between]
head = ["GPUs", "hours between interruptions", "chance of 30 days without one (%)"]
show.table(rows, head)


# %% [markdown]
# Eight GPUs usually come through a month. A thousand never do.
# A job of 16,384 that saves nothing gets three hours into its training, again and again.
# One that saves every hour loses half an hour of 16,384 GPUs at each interruption, on average.
#
# ## What belongs into a checkpoint
#
# Everything that decides what the next step does:
#
# | part | of what size | what happens without it |
# |---|---|---|
# | weights | 4 bytes per parameter in float32 | no training at all |
# | AdamW's two averages, its step counter | 8 bytes per parameter | the next step moves every weight too far: [measured below](#forgetting-the-optimizer) |
# | learning rate and schedule | some numbers | warm-up begins again, or never ends |
# | step, position in the data | two numbers | some text is seen twice, some never: [counted below](#forgetting-the-position-in-the-data) |
# | random state of each rank | some kilobytes | dropout and shuffling differ from the run without a stop |
#
# Gradients and activations are not in the list: the next step computes them anew.
#
# ## Every rank writes its shards
#
# A model with its optimizer can be larger than any one machine's memory. So nothing is gathered: each rank writes the shards that it holds, and an index says which piece of which tensor is in which file.
# Whoever loads computes from the index what to read.
#
# ![Four ranks each write their quarter of all tensors into a file of their own, beside an index. Later two ranks read: rank 0 the files of ranks 0 and 1, rank 1 those of ranks 2 and 3, and each holds half of all tensors.](../figures/checkpoint_shards.svg)
#
# ## The plain version: shards, an index, overlaps
#
# Let each rank hold some rows of every tensor, its `shards`: by name, the number of the first row, and the rows themselves.
# Then saving is a file for each rank, and a line of the index.
# Loading goes through all lines, and copies the rows in which somebody's old interval overlaps this rank's new one.

# %%
def save_plain(folder, shards, step):
    """Write this rank's rows of every tensor, and its line of the index."""
    file = f"{dist.get_rank()}.pt"
    torch.save({name: rows for name, (_, rows) in shards.items()}, folder / file)
    where = {name: (first, first + len(rows)) for name, (first, rows) in shards.items()}
    line = {"file": file, "step": step, "rows": where}
    (folder / f"{file}.json").write_text(json.dumps(line))


def load_plain(folder, shards):
    """Fill this rank's rows of every tensor, from whichever files hold them."""
    for path in sorted(folder.glob("*.json")):
        line = json.loads(path.read_text())
        saved = torch.load(folder / line["file"], mmap=True)
        for name, (begin, rows) in shards.items():
            first, last = line["rows"][name]
            low, high = max(first, begin), min(last, begin + len(rows))
            if low < high:  # rows of this file that are now ours
                found = saved[name][low - first : high - first]
                rows[low - begin : high - begin] = found
    return line["step"]


# %% [markdown]
# No rank reads more than it needs (`mmap` reads from the disk only what is copied), and nobody asks how many ranks wrote.
#
# The next cell folds a small trainer: it cuts a GPT and AdamW's averages by rows, as ZeRO-1 does.
# Every rank computes the gradient of the whole batch, so that its sums have one order, whatever the number of ranks.

# %% tags=["hide-input"]
# Trains a GPT whose weights and averages are cut by rows over all ranks

MOMENTS = "exp_avg", "exp_avg_sq"


def cut_by_rows():
    """The model, and this rank's rows of its weights and of AdamW's averages."""
    torch.manual_seed(0)
    model, shards = GPT(PRESETS["nano"]), {}
    for name, weight in model.named_parameters():
        each = math.ceil(len(weight) / dist.get_world_size())
        first = min(dist.get_rank() * each, len(weight))
        rows = weight.detach()[first : first + each].clone()
        shards[name] = first, rows
        for moment in MOMENTS:
            shards[f"{name}.{moment}"] = first, torch.zeros_like(rows)
    return model, shards


@torch.no_grad()
def gather_rows(model, shards):
    """Put everybody's rows into the model's weights."""
    for name, weight in model.named_parameters():
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, shards[name][1])
        weight.copy_(torch.cat(parts))


def train_rows(model, shards, done, steps):
    """Each rank steps its own rows, `done` steps being done; the losses."""
    names, losses = [name for name, _ in model.named_parameters()], []
    optimizer = torch.optim.AdamW([shards[name][1] for name in names], lr=1e-3)
    for name in names:
        state = {moment: shards[f"{name}.{moment}"][1] for moment in MOMENTS}
        optimizer.state[shards[name][1]] = {"step": torch.tensor(float(done)), **state}
    gather_rows(model, shards)
    for step in range(done, done + steps):
        tokens, targets = text.batch(64, BATCH, start=BATCH * step)
        model.zero_grad()
        value = loss(model(tokens), targets)
        value.backward()
        for name, weight in model.named_parameters():
            first, rows = shards[name]
            rows.grad = weight.grad[first : first + len(rows)].clone()
        optimizer.step()
        gather_rows(model, shards)
        losses.append(value.item())
    return losses


# %% [markdown]
# Four ranks train three steps and save. Then one, two and three ranks load what the four have written, and train the next three.

# %%
def first_half(path):
    model, shards = cut_by_rows()
    train_rows(model, shards, 0, 3)
    save_plain(path, shards, 3)


def second_half(path):
    model, shards = cut_by_rows()
    losses = train_rows(model, shards, load_plain(path, shards), 3)
    return losses, model.state_dict()


(plain := FOLDER / "plain").mkdir()
run(first_half, 4, plain)
went_on = {size: run(second_half, size, plain)[0] for size in (1, 2, 3)}
print("files:", ", ".join(sorted(path.name for path in plain.iterdir())))
print("losses of steps 4 to 6 on three ranks:", went_on[3][0])

# %% [markdown]
# One process that makes all six steps without a stop gets the same losses and the same weights, to the last bit.

# %% tags=["hide-input"]
# Holds the resumed runs against one process that never stops


def one_process():
    torch.manual_seed(0)
    model, losses = GPT(PRESETS["nano"]), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(6):
        tokens, targets = text.batch(64, BATCH, start=BATCH * step)
        optimizer.zero_grad()
        value = loss(model(tokens), targets)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses[3:], model.state_dict()


losses, weights = run(one_process, 1)[0]
for size, (found, state) in went_on.items():
    assert found == losses and all(torch.equal(state[k], weights[k]) for k in weights)
    print(f"4 ranks, then {size}: same losses, same weights, bit for bit")


# %% [markdown]
# ### What the plain version leaves out
#
# Three accidents, and one delay:
#
# - A rank dies after the others have saved over the last checkpoint. Nothing tells new files from old ones.
# - A bit flips on the disk. Nothing compares.
# - The machine loses power. `save_plain` has returned, and the kernel may still hold the files in memory.
# - Training waits until everything is written.
#
# The next cell shows the first two. Every number in the shards says of which step it is; rank 1 dies before it saves step 6. Then a bit of another checkpoint flips.

# %%
def saves_twice(path, dies):
    _, shards = cut_by_rows()
    for step in (3, 6):
        for _, rows in shards.values():
            rows.fill_(step)
        if step == 6 and dies and dist.get_rank() == 1:
            dist.barrier()  # rank 0 has saved step 6
            os.kill(os.getpid(), signal.SIGKILL)
        save_plain(path, shards, step)
        dist.barrier()


def values_loaded(path):
    _, shards = cut_by_rows()
    step = load_plain(path, shards)
    return step, {x for _, rows in shards.values() for x in rows.flatten().tolist()}


for name, dies in (("half saved", True), ("flipped", False)):
    (FOLDER / name).mkdir()
    try:
        run(saves_twice, 2, FOLDER / name, dies, apart=True)
    except ranks.RankError as error:
        print(error)
flip(FOLDER / "flipped/0.pt")
found = {}
for name in ("half saved", "flipped"):
    step, numbers = found[name] = run(values_loaded, 1, FOLDER / name)[0]
    print(f"{name}: loads as step {step}, with the numbers {sorted(numbers)}")

# %% [markdown]
# Both load without a word. The full version, which the rest of the lesson builds, meets the same accidents:

# %% tags=["hide-input"]
# Table: the same accidents, with the plain version and with `Checkpoints`


def saves_twice_fully(path, dies):
    training = small(3)
    store = Checkpoints(path, dist.group.WORLD)
    synced, fsync = [], os.fsync
    os.fsync = lambda file: (synced.append(file), fsync(file))
    store.save(training)
    os.fsync = fsync
    set_step(training, 6)
    if dies and dist.get_rank() == 1:  # when its part is written, and not yet on the disk
        os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    store.save(training)
    return len(synced)


def loaded(path):
    model = nn.Linear(64, 64)
    training = Training(model, torch.optim.AdamW(model.parameters()))
    try:
        Checkpoints(path).load(training)
    except CheckpointError as error:
        return str(error)
    return sorted({value for p in model.parameters() for value in p.flatten().tolist()})


try:
    run(saves_twice_fully, 2, FOLDER / "half saved fully", True, apart=True)
except ranks.RankError:
    pass  # this was meant to happen
half_saved = loaded(FOLDER / "half saved fully")
synced = sum(run(saves_twice_fully, 2, FOLDER / "flipped fully", False))
flip(complete(FOLDER / "flipped fully")[-1] / "__0_0.distcp")
refusal = loaded(FOLDER / "flipped fully")
assert found["half saved"] == (3, {3.0, 6.0}) and half_saved == [3.0]
assert len(found["flipped"][1]) == 2 and "CRC-32" in refusal
rows = [
    ("a rank dies in the save of step 6", "loads steps 3 and 6", "loads step 3"),
    ("one bit flips", "loads a wrong number", "refused: a checksum differs"),
    ("files and folders forced to the disk", "0", str(synced)),
]
show.table(rows, ["accident, two ranks", "plain", "Checkpoints"])

# %% [markdown]
# The delay is measured [below](#saving-in-the-background).
# The plain version also knows nothing of schedules, random state, tensors that are cut in two directions, and models with other names.
#
# ## The core: a training run under names
#
# For the tensors we use `torch.distributed.checkpoint` (DCP), PyTorch's own library. It is the plain version grown up: boxes instead of rows, one index file, replicas written once, many files at a time.
# What it leaves to its user is the rest of the state, and the folders around it.
#
# `Training` holds the parts of a run together.

# %%
show.source(Training)

# %% [markdown]
# The position in the data counts samples over *all* ranks: "batch 300 of rank 3" means nothing to a job that has no rank 3.
#
# The tensors get names that say nothing of ranks or wrappers: `model.norm.weight`, `optimizer.norm.weight.exp_avg`.
# So a plain, a replicated and a sharded model have the same checkpoint, and each reads what any other wrote.
# Those of [ZeRO](zero.md) do, too: their flat pieces have no place in a tensor that DCP could write, so one flat tensor at a time is gathered, and each rank keeps its rows.

# %%
show.source(core.named_tensors, core.restore)

# %% [markdown]
# The care about a fresh optimizer has a reason, in a box [below](#forgetting-the-optimizer).
#
# ### Resumed on other ranks, it equals the run without a stop
#
# The next cell trains three steps on four ranks, with `fully_shard`, saves, and trains three more.
# Then everything is built anew on four, two and one ranks, loaded, and trained for the same three.

# %%
TYPES = torch.float32, torch.float64


def unstopped(path, dtype):
    training = sharded(dtype=dtype)
    with Checkpoints(path / str(dtype), dist.group.WORLD) as store:
        train(training, 3)
        store.save(training)
    return train(training, 3)


def resumed(path, dtype):
    training = sharded(dtype=dtype)
    with Checkpoints(path / str(dtype), dist.group.WORLD) as store:
        store.load(training)
    return train(training, 3)


without_stop = {dtype: run(unstopped, 4, FOLDER, dtype)[0] for dtype in TYPES}
after_stop = {
    (size, dtype): run(resumed, size, FOLDER, dtype)[0]
    for size in (4, 2, 1)
    for dtype in TYPES
}

# %% tags=["hide-input"]
# Holds the losses against the run without a stop, and tabulates them

rows = []
for (size, dtype), losses in after_stop.items():
    gap = max(abs(a - b) for a, b in zip(without_stop[dtype], losses, strict=True))
    # The same ranks do the same sums. Others add up in another order: float32
    # rounds at 6e-8, float64 at 1e-16, and losses are about 5.
    near = 1e-4 if dtype == torch.float32 else 1e-11
    assert gap == 0 if size == 4 else gap < near
    shown = ", ".join(f"{value:.4f}" for value in losses)
    rows.append(
        (f"4, then {size}", str(dtype)[6:], shown, f"{gap:.0e}" if gap else "0")
    )
head = ["ranks", "type", "losses of steps 4 to 6", "largest difference"]
show.table(rows, head, caption="Resumed, beside the run without a stop")

# %% [markdown]
# On as many ranks, training goes on bit for bit.
# On fewer GPUs, or ranks, what is *read* is still what was written, bit for bit; [a test](../tests/test_checkpoint.py) compares every tensor.
# But here, unlike in the plain version, each rank computes its share of the batch alone. On fewer ranks the shares are larger, and gradients are added up in another order.
# float64 shrinks that difference by the digits that it has more, so it is rounding and nothing else.
#
# The same test goes through the other cases: dropout, a schedule that is in the middle, a frozen layer, tensors whose rows do not divide, and every pair of plain, replicated and sharded models.
#
# ## Nothing is lost
#
# ### One rename makes a save complete
#
# A save takes seconds or minutes, and a job can die in it.
# So a save never touches the last checkpoint.
# It goes into a fresh folder whose name says that it is not complete.
# When every rank has written, one rename takes the mark off.
# A file system does a rename entirely or not at all: there is no moment at which the folder is half complete.
#
# ![Timeline of a save. The folder of step 500 stays complete while the ranks write step 600 into a folder whose name starts with .saving. One rename makes it complete. Only then the old one goes. A kill before the rename leaves step 500 as the current checkpoint, a kill after it step 600.](../figures/checkpoint_rename.svg)
#
# Two more things look like details and are not.
# `fsync` waits until a file is on the disk: without it the kernel may write the rename first, and a power cut leaves a complete name on empty files.
# And an old checkpoint is renamed before it is deleted, because a half deleted one must not look complete either.

# %%
show.source(core.begin, core.commit, core.prune)


# %% [markdown]
# The number at the front of a folder's name counts saves.
# So after somebody has gone back to step 500, because the loss had exploded at step 600, the new step 600 is current and the old one is not.
#
# ### Killed at random moments
#
# The claim is that a kill at any moment loses nothing that was promised.
# Two ranks save one step after the other and do nothing else. At a random moment one of them, or both, are killed with `SIGKILL`, which nobody can catch.
# Rank 0 notes each step whose `save` has returned: this is the promise.

# %%
def life(path, victims, delay):
    training = small()
    store = Checkpoints(path, dist.group.WORLD, keep=1)
    if store.steps():
        store.load(training)
    for number in range(1000):
        set_step(training, training.step + 1)
        store.save(training)
        if dist.get_rank() == 0:
            with open(f"{path}.promised", "a") as file:
                file.write(f"{training.step}\n")
        dist.barrier()
        # The first save of each life is left in peace.
        if number == 0 and dist.get_rank() in victims:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()


KILLS = {0.31: (0,), 0.47: (1,), 0.22: (0, 1), 0.56: (0,), 0.38: (1,)}  # after s: ranks

# %% [markdown]
# After each of five kills, another process loads what is current. The table has it beside the last step that was promised.

# %% tags=["hide-input", "measured"]
# Kills the ranks five times, and tabulates what is left


def current(path):
    """The step of the current checkpoint; whether all weights are of that step."""
    model = nn.Linear(64, 64)
    training = Training(model, torch.optim.AdamW(model.parameters()))
    Checkpoints(path).load(training)
    return training.step, all((p == training.step).all() for p in model.parameters())


path, rows = FOLDER / "killed", []
for delay, victims in KILLS.items():
    try:
        run(life, 2, path, victims, delay, apart=True)
    except ranks.RankError:
        pass  # this was meant to happen
    promised = int(Path(f"{path}.promised").read_text().split()[-1])
    step, intact = current(path)
    # A rank may die after the rename, and before the note.
    assert intact and promised <= step <= promised + 1
    left = sum(name.startswith(".saving") for name in os.listdir(path))
    rows.append((", ".join(map(str, victims)), delay, promised, step, "yes", left))
head = ["killed: rank", "after (s)", "last step promised", "current", "intact"]
show.table(rows, [*head, "unfinished saves left"])


# %% [markdown]
# Whatever an unfinished save has left is cleared away by the next one.
# [The tests](../tests/test_checkpoint.py) kill ten times at random, also in saves that run in the background, and then once at *every* operation on a file that a save makes, from the first to the last.
#
# What a kill does not test is a power cut: only `fsync` helps there, and only as far as the disk tells the truth.
# And it needs a file system with atomic renames. Object stores have none; there, write a small file last that says what is complete.
#
# ### Damaged files are refused
#
# The last file in the folder is a manifest: sizes and checksums of all others, and what the run was.
# This is one, with the first of its files and tensors.

# %%
def save_once(path):
    with Checkpoints(path, dist.group.WORLD) as store:
        return store.save(small(600))


saved = run(save_once, 2, FOLDER / "good")[0]
manifest = json.loads((saved / MANIFEST).read_text())
for part in ("files", "tensors"):
    manifest[part] = dict(sorted(manifest[part].items())[:2][-1:])
del manifest["crc32"]  # of all the others; as DCP's index it differs in every run
for name, value in manifest.items():
    print(f"{name}: {value}")

# %% [markdown]
# `load` checks files first, then names, shapes, types and parameter groups, and only then touches the model.
# torch itself matches groups by their place: two of them in the other order would swap their learning rates.
# What one rank finds, all ranks raise (`agree`); otherwise the others would wait for it.

# %%
show.source(Checkpoints.load)


# %% [markdown]
# Four kinds of damage, and then another model: each message names the file or the tensor, and no model is touched.

# %% tags=["hide-input"]
# Damages a checkpoint in four ways, and tries to load it

def attempt(path, model=None):
    """Try to load; print why not, and make sure that the model was not touched."""
    model = model or nn.Linear(64, 64)
    training = Training(model, torch.optim.AdamW(model.parameters()))
    before = copy.deepcopy(model.state_dict())
    try:
        Checkpoints(path).load(training)
    except CheckpointError as error:
        text = str(error).replace(f"{path}/", "")
        print(textwrap.fill(text, 90, break_on_hyphens=False))
    after = model.state_dict()
    assert all(torch.equal(before[name], value) for name, value in after.items())
    assert not training.optimizer.state and training.step == 0


def truncate(path):
    os.truncate(path, 10_000)


for name, spoil in (
    ("__0_0.distcp", truncate),
    ("__1_0.distcp", flip),
    ("__1_0.distcp", os.remove),
    (MANIFEST, os.remove),
):
    path = FOLDER / "bad"
    shutil.copytree(FOLDER / "good", path)
    spoil(complete(path)[-1] / name)
    attempt(path)
    shutil.rmtree(path)
attempt(FOLDER / "good", nn.Linear(64, 65))

# %% [markdown]
# CRC-32 finds damage. It does not stop somebody who changes a file and its checksum: for that, sign the manifest, or do not load strangers' checkpoints.
#
# ## Saving in the background
#
# While the ranks write, GPUs wait.
# They do not have to: the state can be copied in memory, which is fast, and a thread writes the copy while training goes on.
#
# ![Two timelines. Saving at once holds training up while everything is written. Saving in the background holds it up while the state is copied in memory; a thread then writes the copy while the next steps run.](../figures/checkpoint_async.svg)
#
# DCP has this as `async_save`. Two things surround it: messages of the thread travel in a process group of their own, so that they cannot be mistaken for training's, and the rename happens only when every rank's thread is done.

# %%
show.source(Checkpoints.save, Checkpoints._complete, Checkpoints._rename)


# %% [markdown]
# The next cell measures how long `save` holds training up, on an emulated storage that takes a second to answer, as a shared one may.
# Right after the call it spoils every weight, as training that goes on would.

# %%
class SlowStorage(dcp.FileSystemWriter):
    def write_data(self, plan, planner):
        time.sleep(1)
        return super().write_data(plan, planner)


def held_up(path, wait):
    """Seconds of a save, and whether the checkpoint holds the moment of the call."""
    training = sharded("micro")
    train(training, 1)
    weights = [p.to_local() for p in training.model.parameters()]  # this rank's rows
    with Checkpoints(path, dist.group.WORLD, writer=SlowStorage) as store:
        dist.barrier()
        begin = time.perf_counter()
        store.save(training, wait)
        seconds = time.perf_counter() - begin
        before = [weight.clone() for weight in weights]
        with torch.no_grad():
            for weight in weights:
                weight.zero_()  # training goes on, and fast
        store.load(training)  # waits for the save
    return seconds, all(map(torch.equal, before, weights))


# %% tags=["hide-input", "measured"]
# Table: how long training is held up, at once and in the background

times = {}
for wait in (True, False):
    results = [max(run(held_up, 2, FOLDER / f"{wait}-{i}", wait)) for i in range(2)]
    assert all(same for _, same in results)
    times[wait] = min(seconds for seconds, _ in results)
assert times[True] > 1  # the disk is made slow
show.timed(times[False] < 0.5 * times[True], "in the background: less than half")
rows = [
    (
        name,
        f"{times[wait]:.2f}",
        f"{times[wait] / times[True]:.2f}",
        "the moment of the call",
    )
    for name, wait in (("at once", True), ("in the background", False))
]
show.table(rows, ["save", "training held up (s)", "ratio", "the checkpoint holds"])


# %% [markdown]
# Three prices. The copy takes memory on the host: 12 bytes per parameter of this rank's share, until it is written.
# The thread takes CPU time and bandwidth from whatever else needs them.
# And a failure shows one save late: `save` and `wait` raise what went wrong in the thread before.
#
# ## What it costs
#
# ### Bytes written
#
# In float32 with AdamW a checkpoint holds 12 bytes per parameter: the weight, and two averages.
# Beside the prediction are the files of real saves, on one, two and four ranks.

# %%
def written(path, preset):
    training = sharded(preset)
    train(training, 1)  # before it, AdamW has no averages
    with Checkpoints(path, dist.group.WORLD) as store:
        return store.save(training)


def predicted_bytes(config):
    # The output layer is the embedding: one tensor with two names, written twice.
    return 12 * parameter_count(config) + 4 * config.vocab * config.hidden


# %% tags=["hide-input"]
# Table: bytes of a checkpoint, predicted and measured

rows = []
for preset, size in (("micro", 1), ("micro", 2), ("micro", 4), ("mini", 2)):
    path = run(written, size, FOLDER / f"{preset}{size}", preset)[0]
    manifest = json.loads((path / MANIFEST).read_text())
    files = manifest["files"].items()
    found = sum(file["bytes"] for name, file in files if name.endswith("distcp"))
    predicted = predicted_bytes(PRESETS[preset])
    pieces = size * len(manifest["tensors"])
    assert 1000 < (found - predicted) / pieces < 2000
    mb = f"{predicted / 1e6:.2f}", f"{found / 1e6:.2f}"
    off = f"{100 * (found / predicted - 1):+.1f}"
    more = f"{(found - predicted) / pieces:.0f}"
    rows.append((f"{preset}, {size}", *mb, off, pieces, more))
    shutil.rmtree(path)
head = ["model, ranks", "predicted (MB)", "measured (MB)", "difference (%)"]
show.table(rows, [*head, "pieces", "more bytes per piece"])

# %% [markdown]
# The difference is a header of one or two kilobytes around each piece of a tensor.
# It looks large because these models are small: Llama 3 8B has 96 GB to save, in pieces of megabytes.
# Numbers of that size by recipe and rank are in [Memory](memory.md): a checkpoint is its parameters and optimizer states, without gradients.
# Mixed precision does not make it smaller: the 32-bit copies of the weights are what has to be kept.
#
# ### How often to save
#
# Let a save hold training up for $\delta$ seconds, and let failures come every $M$ seconds on average.
# Saving every $\tau$ seconds costs $\delta/\tau$ of the time, and a failure loses half an interval, $\tau/2M$. The sum is smallest at
#
# $$
# \tau = \sqrt{2\,\delta M}
# $$
#
# {cite}`young1974checkpoint`. The exact share for failures that strike at any moment alike, in a save or a restart too, is {cite:t}`daly2006checkpoint`'s.

# %%
show.source(best_interval, lost_fraction)

# %% [markdown]
# The picture shows that share for 16,384 GPUs and five minutes to restart. The dots are a job that is played through until it has failed 20,000 times.
# The valleys are flat, and steep on their left sides.

# %% tags=["hide-input"]
# Draws the fraction of time lost over the interval between saves

mtbf, restart = 54 * 24 * 3600 / 419, 300.0  # seconds
intervals = [60 * 1.15**i for i in range(38)]  # 1 minute to 3 hours
figure, axes = plt.subplots(figsize=(6.4, 3.6))
for save, color, place in (
    (120, show.RANK_COLORS[0], 34),
    (5, show.RANK_COLORS[5], 2.2),
):
    fractions = [100 * lost_fraction(i, save, mtbf, restart) for i in intervals]
    axes.plot([i / 60 for i in intervals], fractions, color=color)
    for interval, fraction in list(zip(intervals, fractions, strict=True))[2::6]:
        played = 100 * simulated_lost_fraction(interval, save, mtbf, restart)
        assert abs(played - fraction) < 1.5  # 20,000 failures: an error of about 1 in 100
        axes.plot(interval / 60, played, "o", color=color, ms=5)
    best = best_interval(save, mtbf)
    least = 100 * lost_fraction(best, save, mtbf, restart)
    assert 100 * lost_fraction(2 * best, save, mtbf, restart) < least + 5
    axes.plot(best / 60, least, "*", color=color, ms=15)
    words = (
        f"a save holds up for {save} s:\nbest {best / 60:.0f} min, {least:.0f} % lost"
    )
    axes.text(best / 60, place, words, ha="center", va="center")
axes.set_xscale("log")
axes.set_xticks([1, 3, 10, 30, 100], ["1", "3", "10", "30", "100"])
axes.minorticks_off()
axes.set_ylim(0, 45)
axes.set_xlabel("minutes of training between two saves")
axes.set_ylabel("% of all time lost")
show.figure(
    figure,
    "Share of time lost over the interval between saves, for saves that hold training "
    "up for 120 and for 5 seconds. Both curves fall, have a flat valley, and rise; "
    "dots of a simulated job lie on them.",
    "checkpoint-interval",
)


# %% [markdown]
# If you do not know $M$ well, do not worry: twice the best interval costs less than 5 % of the time more.
# And a save that holds up for less is worth it twice: each one costs less, and you can afford more of them, so less is lost at a failure. Here that is a tenth of all time.
#
# ## PyTorch's library, and others
#
# DCP is under all of the above. What it does, and what it leaves to you:
#
# | | DCP | around it |
# |---|---|---|
# | shards written in parallel, read by any number of ranks | yes | |
# | replicas written once, dealt over the ranks | yes | |
# | `fsync` of each file | yes | of the folders too |
# | asynchronous | `async_save` | a group of its own, completion |
# | index written last | yes | a fresh folder for each save; one rename |
# | which one is current, which ones go | no | number in the name, `keep` |
# | checksums | no | manifest |
# | names and shapes compared | a missing name or another shape is an error, a name too many is not | both, and types, before anything is touched |
# | schedule, step, position, random state | no | `Training` |
#
# "Written once" has a catch: replicas that have [drifted apart](data_parallel.md) are not compared. One of them is kept, and [nobody hears of it](../tests/test_checkpoint.py).
#
# For a plain process, one file with the whole model is handier.
# `export` gathers it on rank 0, and so needs that one rank's memory to hold it. `torch.load` reads it with `weights_only=True`, which builds tensors and numbers and runs no code.
# `export` takes the models of [ZeRO](zero.md) and [mesh](mesh.md), too.

# %%
def trained_and_exported(path):
    training = sharded()
    losses = train(training, 2)
    export(training.model, path, dist.group.WORLD)
    return losses, train(training, 1)


_, (after,) = run(trained_and_exported, 4, FOLDER / "model.pt")[0]
alone = GPT(PRESETS["nano"])
alone.load_state_dict(torch.load(FOLDER / "model.pt", weights_only=True))
tokens, targets = text.batch(64, 8, start=16)
value = loss(alone(tokens), targets).item()

# %% [markdown]
# The plain process, which loaded the file without ranks, has the next loss of the four.

# %% tags=["hide-input"]
# Holds the next loss of the plain process against that of four ranks

assert abs(value - after) < 1e-5  # one process computes the batch at once: rounding
print(f"next loss: four ranks {after:.4f}, plain process {value:.4f}")

# %% [markdown]
# [DeepSpeed](deepspeed_engine.md) saves a folder per step with a file per rank, names the current one in a text file `latest`, and has scripts that turn shards into one state dict, or into the universal format, which any number of ranks loads.
#
# ## Weights of real models
#
# On Hugging Face's hub a model is a folder: `config.json` says its shape, and the weights lie in files of `safetensors`.
# Such a file is a header in JSON, which says of each tensor its name, dtype, shape and place, and then raw numbers: nothing that could be code.
# So a rank reads the slices that it holds, and nothing else; nothing is sent, and nobody ever has the whole model.
#
# What is in the way is names. Each kind of model has its own, and some store matrices otherwise.
# `names.links` says of every tensor of the course's GPT where it is:

# %%
for preset, kind in (("llama-3-8b", "llama"), ("gpt-2", "gpt2")):
    links = names.links(PRESETS[preset], kind)
    (link,) = links["blocks.0.attention.key.weight"]
    turned = ", transposed" if link.turned else ""
    print(f"{preset}: {link.hub} at {link.place}{turned}")


# %% [markdown]
# GPT-2 keeps queries, keys and values side by side in one matrix, inputs first: keys are its middle third.
#
# The next cell has `transformers` save a tiny Llama, in files of 30 kB. Eight ranks load it: two copies, two stages, two tensor ranks, with [ZeRO](zero.md) between the copies ([Mesh](mesh.md) puts these together).
# They write it again: tensor by tensor the parts of all ranks come to the one that writes the file, into a folder that appears when it is complete.

# %%
def through_a_mesh(source, target):
    group = dist.group.WORLD
    layout = Layout(dp=2, pp=2, tp=2, zero=1, microbatches=2)
    model = Parallel(GPT(config_of(source)), join(layout, group), layout)
    load_hub(model, source, group)
    save_hub(model, target, group, like=source, shard_bytes=30_000)


shape = replace(
    PRESETS["llama-3-8b"], layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=64
)
known = transformers.LlamaConfig(**names.config_json(shape, "llama"))
transformers.LlamaForCausalLM(known).save_pretrained(
    FOLDER / "hub", max_shard_size="30KB"
)
_ = run(through_a_mesh, 8, FOLDER / "hub", FOLDER / "back")

# %% tags=["hide-input"]
# Holds what came back against what was there: tensors, and logits


def stored(folder):
    files = [safe_open(path, "pt") for path in sorted(folder.glob("*.safetensors"))]
    return {n: f.get_tensor(n) for f in files for n in f.keys()}, len(files)  # noqa: SIM118


(there, _), (back, files) = stored(FOLDER / "hub"), stored(FOLDER / "back")
assert there.keys() == back.keys()
assert all(torch.equal(there[name], back[name]) for name in there)
print(f"{len(back)} tensors in {files} files: equal, bit for bit")
tokens = torch.arange(16)[None] % 64
theirs, again = (
    transformers.LlamaForCausalLM.from_pretrained(FOLDER / name)(tokens).logits
    for name in ("hub", "back")
)
load_hub(ours := GPT(config_of(FOLDER / "back")), FOLDER / "back")
assert torch.equal(theirs, again) and (ours(tokens) - theirs).abs().max() < 1e-5
print("logits of transformers from both folders: equal; the course's GPT has them, too")

# %% [markdown]
# A file that is cut off, missing or renamed is named before the model changes, as is a tensor of another shape or name.
# The course's GPT has rotary positions: GPT-2's weights load, and its learned positions stay in the file, so what they make is another model. `load_hub` returns the names of what it left.
#
# ### Another layout, while the job runs
#
# Reinforcement learning trains a model and generates with it in turn, and what is good for training is not what is good for generating: say, every matrix over four ranks for the one, over two for the other, in two copies.
# Files are too slow for every few steps. All ranks know from the [ledger](memory.md) who has which part of which tensor, and who wants which. So each makes the same plan, sends what others lack, and the bytes are known before.

# %%
show.source(moving.hand_over, moving.transfers)

# %% [markdown]
# Who is to have which half decides the price.
# With the tensor ranks of a copy side by side, rank 1, which trains the second quarter of a matrix, is to generate with the second half: it has nothing of it.
# With copies side by side, ranks 0 and 1 both get the first half, of which each has a quarter already. In all, four quarters travel instead of six.

# %%
TRAINER = Layout(tp=4)
GENERATORS = {
    "tensor ranks side by side": Layout(dp=2, tp=2, order=("dp", "tp")),
    "copies side by side": Layout(dp=2, tp=2, order=("tp", "dp")),
}
four_heads = replace(PRESETS["micro"], vocab=512)


def handed(layout):
    models = []
    for seed, of in enumerate((TRAINER, layout)):
        torch.manual_seed(seed)
        groups = join(of, dist.group.WORLD)
        models.append(Parallel(GPT(four_heads), groups, of))
    with count.sent() as sent:
        hand_over(*models, dist.group.WORLD)
    return sent.bytes, [model.full_state_dict() for model in models]


def predicted_for(layout):
    parts = [
        [predicted_pieces(four_heads, of, rank) for rank in range(4)]
        for of in (TRAINER, layout)
    ]
    return predicted_hand_over(*parts)


# %% tags=["hide-input"]
# Table: bytes that each rank sends, predicted and counted

rows = []
for words, layout in GENERATORS.items():
    results, predicted = run(handed, 4, layout), predicted_for(layout)
    for _, (trainer, generator) in results:
        assert all(torch.equal(trainer[name], generator[name]) for name in trainer)
    assert [sent for sent, _ in results] == predicted
    for what, each in (("predicted", predicted), ("counted", [s for s, _ in results])):
        mb = [f"{one / 1e6:.3f}" for one in each]
        rows.append((words, what, *mb, f"{sum(each) / 1e6:.3f}"))
head = ["generator", "bytes (MB)", *(f"rank {rank}" for rank in range(4)), "together"]
show.table(rows, head)


# %% [markdown]
# ## What goes wrong
#
# ### One folder for all saves
#
# This is the opening's accident, with DCP as it comes. DCP writes its index last, which is meant to tell complete from incomplete.
# Rank 1 is killed just before it writes its second shard.

# %%
class KilledOnRank1(dcp.FileSystemWriter):
    def write_data(self, plan, planner):
        if dist.get_rank() == 1:
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        written = super().write_data(plan, planner)
        dist.barrier()  # rank 0 has written, rank 1 has not
        return written


def twice_into_one_folder(path):
    warnings.simplefilter("ignore")  # DCP's, that it overwrites a checkpoint
    for step, writer in ((100, dcp.FileSystemWriter), (200, KilledOnRank1)):
        state = {"model": small(step).model.state_dict()}
        dcp.save(state, storage_writer=writer(path))


try:
    run(twice_into_one_folder, 2, FOLDER / "in place", apart=True)
except ranks.RankError as error:
    print(error)
state = {"model": nn.Linear(64, 64).state_dict()}
dcp.load(state, checkpoint_id=FOLDER / "in place")
weight = state["model"]["weight"]  # [64, 64]
print("weights of step", sorted(set(weight.flatten().tolist())))

# %% tags=["hide-input"]
# Holds the loaded weights: rank 0's half of step 200, rank 1's of step 100

assert (weight[:32] == 200).all() and (weight[32:] == 100).all()


# %% [markdown]
# ````{admonition} Checked: "DCP's index is written last, so a broken save is noticed"
# :class: checked
#
# In a fresh folder that is true: without an index nothing loads.
# In a folder that already has one, the *old* index is still there, and fits the new files to the byte. The cell above loads half a model of each step, without an error.
# DCP warns at the save that it overwrites. At the load nothing warns.
# Give every save a folder of its own.
# ````
#
# ### Forgetting the optimizer
#
# Weights alone are enough to *use* a model. To go on training with them is another matter.
# After 120 steps the next cell goes on twice: with AdamW's state, and with a new AdamW. It measures the loss on text that the model never sees in training, and how far a step moves the weights.

# %%
def new(state=None, optimizer_state=None):
    torch.manual_seed(0)
    model = GPT(PRESETS["nano"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if state:
        model.load_state_dict(state)
    if optimizer_state:
        optimizer.load_state_dict(copy.deepcopy(optimizer_state))
    return model, optimizer


def go_on(model, optimizer, steps, start=0):
    """Losses on held-out text around each step; how far the first one moves."""
    tokens, targets = text.batch(64, 32, start=20_000)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    losses, moved = [], None
    for step in range(steps + 1):
        with torch.no_grad():
            losses.append(loss(model(tokens), targets).item())
        if step < steps:
            x, y = text.batch(64, 8, start=8 * (start + step))
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
        if step == 0:
            after = torch.cat([p.detach().flatten() for p in model.parameters()])
            moved = ((after - before).abs().mean() / 3e-3).item()
    return losses, moved


def with_and_without():
    model, optimizer = new()
    for step in range(120):
        x, y = text.batch(64, 8, start=8 * step)
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    kept = model.state_dict(), optimizer.state_dict()
    return go_on(*new(*kept), 6, 120), go_on(*new(kept[0]), 6, 120)


kept, lost = run(with_and_without, 1)[0]

# %% tags=["hide-input"]
# Prints how far the first step moves the weights, and what the loss does

jumps = [losses[1] - losses[0] for losses, _ in (kept, lost)]
assert lost[1] > 0.9 and lost[1] > 5 * kept[1] and jumps[1] > 0.05 > jumps[0]
pairs = zip(("kept:", "lost:"), (kept, lost), jumps, strict=True)
for words, (_, moved), jump in pairs:
    print(f"{words} the first step moves a weight by {moved:.2f} learning rates,")
    print(f"      and the loss changes by {jump:+.3f}")

# %% [markdown]
# And this is the loss over the next six steps.

# %% tags=["hide-input"]
# Draws the loss on held-out text after resuming, with and without AdamW's state

figure, axes = plt.subplots(figsize=(6.4, 2.8))
for (losses, _), color, words in (
    (lost, show.RANK_COLORS[5], "new AdamW"),
    (kept, show.RANK_COLORS[0], "with its state"),
):
    axes.plot(range(120, 127), losses, "o-", color=color)
    axes.text(126.15, losses[-1], words, va="center")
axes.set_xlim(119.8, 128.2)
axes.set_xlabel("step")
axes.set_ylabel("loss on held-out text")
show.figure(
    figure,
    "Held-out loss after resuming at step 120. With AdamW's state it stays level; with "
    "a new AdamW it jumps at the first step and stays higher.",
    "checkpoint-forgotten",
)


# %% [markdown]
# A new AdamW has no averages yet. Its first step divides the gradient by its own size, so *every* weight moves by a whole learning rate, where a settled one moves it by a small part of that.
# In a large run this is the spike in the loss curve that everyone asks about.
#
# ````{admonition} Checked: "asking for a state dict changes nothing"
# :class: checked
#
# Before the first step an optimizer has no state. `get_optimizer_state_dict` makes some by a step with gradients of zero, and leaves the step counters at 1: the table shows it.
# AdamW then corrects its averages as if they were one step older, so a run that saves at step 0 differs from one that does not.
# `named_tensors` asks only where there is a state, and leaves the optimizer as it found it.
# ````

# %%
def counted(ask):
    """AdamW's step counter after two steps, and the loss then."""
    model, optimizer = new()
    if ask:
        get_optimizer_state_dict(model, optimizer)
    losses, _ = go_on(model, optimizer, 2)
    return int(optimizer.state[model.norm.weight]["step"]), losses[2]


counters = {"no": run(counted, 1, False)[0], "yes": run(counted, 1, True)[0]}

# %% tags=["hide-input"]
# Table: counter and loss, with and without a state dict before the first step

assert counters["no"][0] == 2 and counters["yes"][0] == 3
assert counters["no"][1] != counters["yes"][1]
rows = [(ask, counter, f"{value:.4f}") for ask, (counter, value) in counters.items()]
head = ["state dict asked for before step 1", "counter after two steps", "loss then"]
show.table(rows, head)


# %% [markdown]
# ### Forgetting the position in the data
#
# A run of 60 steps stops after 20 and after 40. What does it see of the text, if a resumed loader begins at the beginning; if each rank kept a position of its own and the number of ranks changed from four to two; and if the position counts samples of all ranks?

# %%
def windows(position, rank, size):
    each = BATCH // size
    return range(position + rank * each, position + (rank + 1) * each)


def seen(way):
    found = []
    for part, size in enumerate((4, 4, 2)):
        for step in range(20):
            done = 20 * part + step  # steps before this one
            for rank in range(size):
                if way == "from the beginning":
                    found += windows(BATCH * step, rank, size)
                if way == "each rank its own":  # reads the windows r, r + size, …
                    own = (20 * part) * BATCH // 4 + step * BATCH // size
                    found += [(own + i) * size + rank for i in range(BATCH // size)]
                if way == "samples of all ranks":
                    found += windows(BATCH * done, rank, size)
    return found


WAYS = "from the beginning", "each rank its own", "samples of all ranks"
trained_on = {way: seen(way) for way in WAYS}

# %% tags=["hide-input"]
# Table: windows seen, repeated and skipped, for the three ways of counting

rows = []
for way, found in trained_on.items():
    once, skipped = len(set(found)), len(set(range(max(found))) - set(found))
    rows.append((way, len(found), once, len(found) - once, skipped))
assert rows[2][2:] == (480, 0, 0) and rows[0][3] == 320 and rows[1][3] > 0
head = ["position", "windows trained on", "different ones", "repeated", "skipped"]
show.table(rows, head)


# %% [markdown]
# None of this raises an error, and the loss even looks better, because the text is known.
#
# ### Saving the shards of rank 0
#
# The reflex of data-parallel days is `if rank == 0: torch.save(…)`. On a sharded model that is one rank's part.

# %%
def only_rank_0(path):
    model = sharded().model
    if dist.get_rank() == 0:
        local = {name: value.to_local() for name, value in model.state_dict().items()}
        torch.save(local, path)


run(only_rank_0, 4, FOLDER / "rank0.pt")
state = torch.load(FOLDER / "rank0.pt", weights_only=True)
full = GPT(PRESETS["nano"]).state_dict()
fraction = sum(v.numel() for v in state.values()) / sum(v.numel() for v in full.values())
print("fraction of the numbers that was saved:", fraction)
print("norm.weight:", len(state["norm.weight"]), "of", len(full["norm.weight"]))

# %% tags=["hide-input"]
# Holds the fraction: a quarter, on four ranks

assert fraction == 0.25


# %% [markdown]
# One notices when one loads, which may be weeks later.
# So load a new job's first checkpoint at once, in another process.
#
# ### Running a stranger's code
#
# A pickle is a program. `torch.load` with `weights_only=False` runs it.

# %%
class Trap:
    def __reduce__(self):
        return print, ("code from the file is running",)


torch.save({"weights": torch.zeros(3), "notes": Trap()}, FOLDER / "stranger.pt")
torch.load(FOLDER / "stranger.pt", weights_only=False)
try:
    torch.load(FOLDER / "stranger.pt", weights_only=True)
except Exception as error:
    print(f"refused: {type(error).__name__}")

# %% [markdown]
# All that this course's checkpoints hold is read with `weights_only=True`, or is JSON, but for one file: DCP's index `.metadata` is a pickle, and DCP unpickles it. The manifest's checksum finds damage in it, not malice.
#
# ### A full disk, and a folder that is not shared
#
# A save that fails on one rank fails on all, with that rank's reason; what was written is removed, and the last checkpoint stays.
# On a full disk the reason is the bytes that the save takes, and those that are free; DCP's own is `unexpected pos 704 vs 598` (torch 2.13).
# The [tests](../tests/test_checkpoint.py) fill a small disk to try it.
# The room needed is that of `keep` checkpoints *and one more*: the new one has to be complete before an old one goes.
#
# Two jobs that save into one folder would each delete the other's checkpoints as too old.
# From its first save to its end a job holds the folder by a lock of the operating system, so the second one's first save is refused; it may load.
#
# A folder on each node's own disk looks right on every node and is complete on none. Rank 0 looks for every file before the rename, and says which ones it does not see.
#
# ## When to use what
#
# | | for | against |
# |---|---|---|
# | sharded, on all ranks | no rank holds more than its part; each writes $1/N$ of the bytes | many files; one needs the library to read them |
# | one file, gathered | any process reads it | one rank holds 12 bytes per parameter, and the others wait for it to write them |
# | at once | simple; an error shows where it happens | training waits for the storage |
# | in the background | holds up for the copy alone (ratio measured above) | a second copy of the state in memory; errors show one save late |
#
# In a real job, these show that it is set up right: the first checkpoint was loaded by another process; the loss of the first resumed step equals that of the run that went on; the time between two saves is near $\sqrt{2\delta M}$; the disk has room for one checkpoint more than `keep`.
#
# ```{admonition} On more GPUs
# :class: note
#
# What is saved, and that training resumes with the same bits, does not depend on where ranks compute.
# A second GPU would change the seconds of a save: each GPU copies its shards to the host over a connection of its own, at the same time as the others,
# so the part for which training waits becomes shorter with every GPU, until the storage is the limit.
# ```
#
# ## Exercises
#
# ```{exercise-start} Bytes of a checkpoint (easy)
# :label: ex-checkpoint-bytes
# ```
#
# A model of 8.03 billion parameters trains on 8 ranks with AdamW, all in float32, fully sharded.
# How many bytes of tensors does a checkpoint hold, written by all ranks together?

# %%
answer = ...  # bytes
check(answer, "checkpoint_bytes")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-checkpoint-bytes
# :label: sol-checkpoint-bytes
# :class: dropdown
# ```
#
# The weight and AdamW's two averages, 4 bytes each. Gradients are not kept.

# %%
answer = (4 + 4 + 4) * 8.03e9
check(answer, "checkpoint_bytes")

# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} How often (easy)
# :label: ex-checkpoint-interval
# ```
#
# A save holds training up for 90 seconds, and a failure comes every 50 hours.
# How many seconds of training should lie between two saves?

# %%
answer = ...  # seconds
check(answer, "checkpoint_interval")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-checkpoint-interval
# :label: sol-checkpoint-interval
# :class: dropdown
# ```

# %%
answer = math.sqrt(2 * 90 * 50 * 3600)
check(answer, "checkpoint_interval")


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Whose turn is it (medium)
# :label: ex-checkpoint-windows
# ```
#
# All ranks together have trained on `samples` windows. Return the numbers of the windows that this rank takes in the next step, in which all ranks together take `batch`.
# The check stops and goes on with 4, 2, 1 and 8 ranks.

# %%
def my_windows(samples, batch, rank, size):
    pass  # your code


check(my_windows)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-checkpoint-windows
# :label: sol-checkpoint-windows
# :class: dropdown
# ```
#
# The position is one number for all, and the ranks cut what follows it.

# %%
def my_windows(samples, batch, rank, size):
    each = batch // size
    return range(samples + rank * each, samples + (rank + 1) * each)


check(my_windows)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Write so that no kill hurts (medium)
# :label: ex-checkpoint-write
# ```
#
# Write the bytes `content` to the file `path`, which may exist already, so that whoever looks finds the old content or the new, and nothing else.
# The check kills your function before each line of Python that it runs.

# %%
def my_write(path, content):
    pass  # your code


check(my_write)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-checkpoint-write
# :label: sol-checkpoint-write
# :class: dropdown
# ```
#
# Beside it, to the disk, and then in its place. The next write opens the same name anew, so nothing is left lying about.

# %%
def my_write(path, content):
    beside = f"{path}.new"
    with open(beside, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


check(my_write)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Read boxes that others wrote (hard)
# :label: ex-checkpoint-pieces
# ```
#
# Rows are not all: with tensor parallelism a matrix is cut by columns as well, and each rank holds a box.
# `saved` is a list of boxes `(file, offset, size)`, and this rank's new box is `(offset, size)`. Offset and size have two numbers each: rows and columns of the whole matrix.
# Return what to read: a list of `(file, theirs, mine)`, so that `box[mine] = saved_box[theirs]` copies what the two have in common. `theirs` and `mine` are pairs of slices, each counted from its own box's corner. Files that hold nothing for this rank are not in the list.

# %%
def my_pieces(saved, offset, size):
    pass  # your code


check(my_pieces)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-checkpoint-pieces
# :label: sol-checkpoint-pieces
# :class: dropdown
# ```
#
# The overlap of two boxes is the overlap of two intervals, in each direction. This is what DCP's planner does, for any number of directions.

# %%
def my_pieces(saved, offset, size):
    plan = []
    for file, corner, extent in saved:
        both = list(zip(offset, size, corner, extent, strict=True))
        low = [max(a, b) for a, _, b, _ in both]
        high = [min(a + n, b + m) for a, n, b, m in both]
        if all(first < last for first, last in zip(low, high, strict=True)):
            theirs, mine = (
                tuple(
                    slice(i - c, j - c) for i, j, c in zip(low, high, at, strict=True)
                )
                for at in (corner, offset)
            )
            plan.append((file, theirs, mine))
    return plan


check(my_pieces)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Save in the background (design)
# :label: ex-checkpoint-background
# ```
#
# A checkpoint of `size` bytes is saved by `ranks_` ranks at once. Each copies its share to the host, at `copy` bytes per second, and training waits for that. Then training goes on while the shares are written; storage takes `write` bytes per second from all of them together. A save begins only when the one before is written. The job, all of it, fails every `mtbf` seconds.
# Return after how many seconds of training to save, so that the least is lost.

# %%
def my_save_interval(size, ranks_, copy, write, mtbf):
    pass  # your code


check(my_save_interval)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-checkpoint-background
# :label: sol-checkpoint-background
# :class: dropdown
# ```
#
# Only the copy delays training, so only it is under the root. What storage takes is the least that there can be between two saves.

# %%
def my_save_interval(size, ranks_, copy, write, mtbf):
    held_up = size / ranks_ / copy
    return max(math.sqrt(2 * held_up * mtbf), size / write)


check(my_save_interval)

# %% [markdown]
# ```{solution-end}
# ```
#
# ## Summary
#
# - A checkpoint is everything that decides the next step: weights, optimizer, schedule, step, position in the data, random state.
# - Each rank writes its shards and a line of an index, and reads the overlaps with its new ones; resumed equals unstopped, bit for bit on as many ranks, to rounding on others.
# - A save goes into a fresh folder and counts from one rename on; old ones go after it. A kill at any moment then loses nothing.
# - Sizes and checksums, names and shapes are compared before a model is touched.
# - 12 bytes per parameter in float32 with AdamW; in the background, training waits for the copy alone.
# - Save every $\sqrt{2\delta M}$ seconds.
# - The hub's files are read by slices, under names and forms that a table knows; between two layouts a rank sends what others lack, and the bytes are known before.
#
# ## Further reading
#
# - {cite:t}`dubey2024llama3`, section 3.3.4: what failed in 54 days, how often, and how 90 % effective training time was reached all the same.
# - {cite:t}`young1974checkpoint`: the square root, on two pages.
# - {cite:t}`daly2006checkpoint`: what changes when failures strike in saves and restarts as well.
# - {cite:t}`mohan2021checkfreq`: saving every few iterations, in the background, at an overhead of some percent, and resuming inside an epoch.
