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
# # Checkpoints: stop on some ranks, resume on others
#
# After this lesson you can
#
# - save a sharded run on four ranks, and resume it on two or on one;
# - say what a checkpoint must hold besides the weights;
# - save so that the last good checkpoint survives a kill at any moment;
# - compute how often to save, and what saving in the background gains;
# - load a model from Hugging Face's hub into any layout, and write it back.
#
# A job saves with PyTorch's `torch.distributed.checkpoint` over its last checkpoint, and is killed while it writes.
# The folder then loads without an error: half of its weights are from step 100, half from step 200.
# [Below](#one-folder-for-all-saves) you reproduce this accident, and prevent it with one rename.
#
# ## Mean time between failures

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

from shardcourse.exercises import check
from shardlab import ranks
from shardlab.checkpoint import (
    MANIFEST,
    CheckpointError,
    Checkpoints,
    Training,
    best_interval,
    list_checkpoints,
    read_config,
    core,
    export_model,
    transfer_weights,
    load_hub,
    lost_fraction,
    resharding,
    hub_names,
    predict_transfer_bytes,
    save_hub,
    simulated_lost_fraction,
)
from shardlab.common import show, text
from shardlab.gpt.model import GPT, PRESETS, loss, count_parameters
from shardlab.layout import Layout
from shardlab.measure import count
from shardlab.mesh import Parallel, create_groups, predict_pieces

show.set_style()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # a page shows no progress bars
    import transformers

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
TEMPORARY = tempfile.TemporaryDirectory(prefix="checkpoints-")  # deleted when this process ends
FOLDER = Path(TEMPORARY.name)
BATCH_SIZE = 8  # windows in a step, over all ranks


def run_on_cpu(fn, size, *args, **how):
    """Run `fn` on `size` CPU ranks; return each rank's result."""
    # CPU: files are measured, not GPUs
    return ranks.run(fn, size, *args, device="cpu", **how)


def build_sharded_run(preset="nano", dtype=torch.float32, lr=1e-3):
    """Build a small GPT sharded by `fully_shard`, with AdamW."""
    torch.manual_seed(0)
    model = GPT(PRESETS[preset]).to(dtype)
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")  # by default it takes this machine's GPUs
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 8], gamma=0.5)
    return Training(model, optimizer, schedule)


def train_steps(training, steps):
    """Train on this rank's share of each batch; return the mean losses over all ranks."""
    rank, size, losses = dist.get_rank(), dist.get_world_size(), []
    each = BATCH_SIZE // size
    for _ in range(steps):
        tokens, targets = text.get_batch(64, each, start=training.samples + rank * each)
        training.optimizer.zero_grad()
        value = loss(training.model(tokens), targets)
        value.backward()
        training.optimizer.step()
        training.schedule.step()
        training.step += 1
        training.samples += BATCH_SIZE
        mean = value.detach() / size
        dist.all_reduce(mean)  # a scalar
        losses.append(mean.item())
    return losses


def build_small_run(step=0):
    """Build a sharded run whose weights all equal its step."""
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


def flip_bit(path):
    """Flip one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# %% [markdown]
# Most models of this page are sharded by `fully_shard`, PyTorch's ZeRO-3: each rank holds some rows of every weight, its *shard*.
#
# Llama 3's largest model trained on 16,384 GPUs.
# In 54 days there were 419 unplanned interruptions {cite}`dubey2024llama3` (section 3.3.4).
# One failed GPU stops the whole job, because every step needs every rank.
# If each GPU fails at the same rate, how long does a job of another size run between two interruptions?

# %%
gpu_hours = 16_384 * 54 * 24 / 419  # hours of one GPU, for each interruption
between = {gpus: gpu_hours / gpus for gpus in (8, 256, 1024, 16_384)}
month = {gpus: math.exp(-30 * 24 / hours) for gpus, hours in between.items()}

# %% tags=["hide-input"]
# Table: hours between two interruptions, by the number of GPUs

rows = [(f"{n:,}", f"{between[n]:,.1f}", f"{100 * month[n]:.1f}") for n in between]
head = ["GPUs", "hours between interruptions", "chance of 30 days without one (%)"]
show.table(rows, head)


# %% [markdown]
# Eight GPUs usually run a month without an interruption. A thousand never do.
# A job on 16,384 GPUs that saves nothing starts from scratch every three hours, and makes no progress.
# If it saves every hour, an interruption costs half an hour's work of 16,384 GPUs, on average.
#
# ## What a checkpoint contains
#
# A checkpoint needs everything on which the next step depends:
#
# | part | size | what happens without it |
# |---|---|---|
# | weights | 4 bytes per parameter in float32 | no training at all |
# | AdamW's two averages, its step counter | 8 bytes per parameter | the next step moves every weight too far: [measured below](#forgetting-the-optimizer) |
# | learning rate and schedule | a few numbers | each restart repeats warm-up, which may never end |
# | step, position in the data | two numbers | some text is seen twice, some never: [counted below](#forgetting-the-position-in-the-data) |
# | random state of each rank | a few kilobytes | dropout and shuffling differ from the run without a stop |
#
# Gradients and activations need not be saved: the next step computes them anew.
#
# ## Every rank writes its shards
#
# A model with its optimizer can be larger than one machine's memory.
# So no rank gathers the full tensors: each rank writes its own shards, and an index says which part of which tensor is in which file.
# To load, each rank finds in the index the files and rows that it needs.
#
# ![Four ranks each write their quarter of all tensors into a file of their own, beside an index. Later two ranks read: rank 0 the files of ranks 0 and 1, rank 1 those of ranks 2 and 3. Each then holds half of all tensors.](../figures/checkpoint_shards.svg)
#
# ## The plain version: shards, an index, overlaps
#
# Let each rank hold some rows of every tensor.
# `shards` maps each tensor's name to a pair: index of this rank's first row, and the rows.
# To save, each rank writes one file and one line of the index.
# To load, each rank reads all lines, and copies from each file the rows that belong to its own new shard.

# %%
def save_plain(folder, shards, step):
    """Write this rank's rows of every tensor, and its line of the index."""
    file = f"{dist.get_rank()}.pt"
    torch.save({name: rows for name, (_, rows) in shards.items()}, folder / file)
    where = {name: (first, first + len(rows)) for name, (first, rows) in shards.items()}
    line = {"file": file, "step": step, "rows": where}
    (folder / f"{file}.json").write_text(json.dumps(line))


def load_plain(folder, shards):
    """Fill this rank's rows of every tensor from all files that have some of them."""
    for path in sorted(folder.glob("*.json")):
        line = json.loads(path.read_text())
        saved = torch.load(folder / line["file"], mmap=True)
        for name, (begin, rows) in shards.items():
            first, last = line["rows"][name]
            low, high = max(first, begin), min(last, begin + len(rows))
            if low < high:  # this file has rows of this rank
                found = saved[name][low - first : high - first]
                rows[low - begin : high - begin] = found
    return line["step"]


# %% [markdown]
# No rank reads more than it needs: with `mmap` only the copied rows are read from the disk.
# The number of ranks that wrote the files does not matter.
#
# The folded cell has a small trainer, which shards a GPT's weights and AdamW's averages by rows.
# Every rank computes the gradient of the whole batch, so gradients are summed in the same order on any number of ranks.

# %% tags=["hide-input"]
# Trains a GPT whose weights and averages are cut by rows over all ranks

MOMENTS = "exp_avg", "exp_avg_sq"


def cut_by_rows():
    """Return the model, and this rank's rows of its weights and of AdamW's averages."""
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
    """Gather the rows of all ranks into the model's weights."""
    for name, weight in model.named_parameters():
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, shards[name][1])
        weight.copy_(torch.cat(parts))


def train_rows(model, shards, done, steps):
    """Train `steps` steps after the first `done`; each rank updates its own rows."""
    names, losses = [name for name, _ in model.named_parameters()], []
    optimizer = torch.optim.AdamW([shards[name][1] for name in names], lr=1e-3)
    for name in names:
        state = {moment: shards[f"{name}.{moment}"][1] for moment in MOMENTS}
        optimizer.state[shards[name][1]] = {"step": torch.tensor(float(done)), **state}
    gather_rows(model, shards)
    for step in range(done, done + steps):
        tokens, targets = text.get_batch(64, BATCH_SIZE, start=BATCH_SIZE * step)
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
# Four ranks train for three steps and save.
# Then one, two and three ranks load these files, and train for three more steps.

# %%
def save_first_half(path):
    model, shards = cut_by_rows()
    train_rows(model, shards, 0, 3)
    save_plain(path, shards, 3)


def resume_second_half(path):
    model, shards = cut_by_rows()
    losses = train_rows(model, shards, load_plain(path, shards), 3)
    return losses, model.state_dict()


(plain := FOLDER / "plain").mkdir()
run_on_cpu(save_first_half, 4, plain)
went_on = {size: run_on_cpu(resume_second_half, size, plain)[0] for size in (1, 2, 3)}
print("files:", ", ".join(sorted(path.name for path in plain.iterdir())))
print("losses of steps 4 to 6 on three ranks:", went_on[3][0])

# %% [markdown]
# One process that makes all six steps without a stop gets the same losses and weights, bit for bit.

# %% tags=["hide-input"]
# Compares the resumed runs with one process that never stops


def train_in_one_process():
    torch.manual_seed(0)
    model, losses = GPT(PRESETS["nano"]), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(6):
        tokens, targets = text.get_batch(64, BATCH_SIZE, start=BATCH_SIZE * step)
        optimizer.zero_grad()
        value = loss(model(tokens), targets)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses[3:], model.state_dict()


losses, weights = run_on_cpu(train_in_one_process, 1)[0]
for size, (found, state) in went_on.items():
    assert found == losses and all(torch.equal(state[k], weights[k]) for k in weights)
    print(f"4 ranks, then {size}: same losses, same weights, bit for bit")


# %% [markdown]
# ### What the plain version leaves out
#
# The plain version allows three accidents and a delay:
#
# - A rank dies after others have overwritten their files of the last checkpoint. Nothing distinguishes new files from old ones.
# - A bit flips on the disk. There is no checksum.
# - The machine loses power after `save_plain` has returned. The files may have been only in the operating system's memory.
# - Training waits until everything is written.
#
# The next cell causes the first two accidents.
# It fills shards with the step's number; rank 1 dies before it saves step 6. Then a bit flips in another checkpoint.

# %% tags=["hide-input"]
# Runs the two accidents with the plain version
def save_twice(path, dies):
    _, shards = cut_by_rows()
    for step in (3, 6):
        for _, rows in shards.values():
            rows.fill_(step)
        if step == 6 and dies and dist.get_rank() == 1:
            dist.barrier()  # rank 0 has saved step 6
            os.kill(os.getpid(), signal.SIGKILL)
        save_plain(path, shards, step)
        dist.barrier()


def load_values(path):
    _, shards = cut_by_rows()
    step = load_plain(path, shards)
    return step, {x for _, rows in shards.values() for x in rows.flatten().tolist()}


for name, dies in (("half saved", True), ("flipped", False)):
    (FOLDER / name).mkdir()
    try:
        run_on_cpu(save_twice, 2, FOLDER / name, dies, own_processes=True)
    except ranks.RankError as error:
        print(error)
flip_bit(FOLDER / "flipped/0.pt")
found = {}
for name in ("half saved", "flipped"):
    step, numbers = found[name] = run_on_cpu(load_values, 1, FOLDER / name)[0]
    print(f"{name}: loads as step {step}, with the numbers {sorted(numbers)}")

# %% [markdown]
# Both checkpoints load without an error.
# The rest of the lesson builds `Checkpoints`, tested here with the same accidents:

# %% tags=["hide-input"]
# Table: the same accidents, with the plain version and with `Checkpoints`


def save_twice_with_checkpoints(path, dies):
    training = build_small_run(3)
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


def load_weights(path):
    model = nn.Linear(64, 64)
    training = Training(model, torch.optim.AdamW(model.parameters()))
    try:
        Checkpoints(path).load(training)
    except CheckpointError as error:
        return str(error)
    return sorted({value for p in model.parameters() for value in p.flatten().tolist()})


try:
    path = FOLDER / "half saved fully"
    run_on_cpu(save_twice_with_checkpoints, 2, path, True, own_processes=True)
except ranks.RankError:
    pass  # this was meant to happen
half_saved = load_weights(FOLDER / "half saved fully")
synced = sum(run_on_cpu(save_twice_with_checkpoints, 2, FOLDER / "flipped fully", False))
flip_bit(list_checkpoints(FOLDER / "flipped fully")[-1] / "__0_0.distcp")
refusal = load_weights(FOLDER / "flipped fully")
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
# The plain version also leaves out schedules, random state, and tensors that are sharded by rows and columns.
#
# ## The core: the state of a training run by name
#
# For the tensors we use PyTorch's `torch.distributed.checkpoint` (DCP).
# It does more than the plain version: tensors may be sharded in several dimensions, the index is one file, and replicated tensors are written once.
# You have to add the rest of the state, and a folder for each save.
#
# `Training` holds the full state of a run.

# %%
show.source(Training)

# %% [markdown]
# The position in the data counts samples over *all* ranks: "batch 300 of rank 3" means nothing in a job without a rank 3.
#
# The names of tensors contain neither ranks nor wrappers: `model.norm.weight`, `optimizer.norm.weight.exp_avg`.
# So a plain, a replicated and a sharded model have the same checkpoint format, and each can load the others' checkpoints.
# The course's own [ZeRO](zero.md) shards flat tensors that concatenate many weights, and DCP cannot write such shards. So the ranks gather one flat tensor at a time, and each rank saves some rows of each weight.

# %%
show.source(core.named_tensors, core.restore_training)

# %% [markdown]
# A box [below](#forgetting-the-optimizer) says why `named_tensors` treats an optimizer without state separately.
#
# ## Resuming on another number of ranks
#
# Four ranks train a model sharded by `fully_shard` for three steps, save, and train three more.
# Then jobs on four, two and one ranks each build the model anew, load, and take the same three steps.

# %%
DTYPES = torch.float32, torch.float64


def train_without_stop(path, dtype):
    training = build_sharded_run(dtype=dtype)
    with Checkpoints(path / str(dtype), dist.group.WORLD) as store:
        train_steps(training, 3)
        store.save(training)
    return train_steps(training, 3)


def train_after_resume(path, dtype):
    training = build_sharded_run(dtype=dtype)
    with Checkpoints(path / str(dtype), dist.group.WORLD) as store:
        store.load(training)
    return train_steps(training, 3)


without_stop = {
    dtype: run_on_cpu(train_without_stop, 4, FOLDER, dtype)[0] for dtype in DTYPES
}
after_stop = {
    (size, dtype): run_on_cpu(train_after_resume, size, FOLDER, dtype)[0]
    for size in (4, 2, 1)
    for dtype in DTYPES
}

# %% tags=["hide-input"]
# Table: losses of the resumed runs and of the run without a stop

rows = []
for (size, dtype), losses in after_stop.items():
    gap = max(abs(a - b) for a, b in zip(without_stop[dtype], losses, strict=True))
    # The same ranks do the same sums. Else 4 sqrt(512) 2^-24, 4 * 512 * 2^-53 of 5.5,
    # and in float32 2 * 1e-3 * 0.01 of a weight that rounding turns.
    near = 5e-5 if dtype == torch.float32 else 1.3e-12
    assert gap == 0 if size == 4 else gap < near
    shown = ", ".join(f"{value:.4f}" for value in losses)
    rows.append(
        (f"4, then {size}", str(dtype)[6:], shown, f"{gap:.0e}" if gap else "0")
    )
head = ["ranks", "type", "losses of steps 4 to 6", "largest difference"]
show.table(rows, head, caption="Resumed runs, compared with the run without a stop")

# %% [markdown]
# On four ranks the losses are bitwise equal.
# On fewer ranks every tensor that is *loaded* is still bitwise equal; [a test](../tests/test_checkpoint.py) compares all tensors.
# But unlike in the plain version, each rank computes only its share of the batch. On fewer ranks the shares are larger, so gradients are summed in another order.
# In float64 the difference shrinks with the rounding error, so rounding is its only cause.
#
# ## Saves that survive kills and damage
#
# ### Atomic saves: one rename
#
# A save takes seconds or minutes, and a job can die meanwhile.
# So a save never touches the last checkpoint.
# It goes into a new folder whose name begins with `.saving`.
# When every rank has written its files, the folder gets its final name.
# A rename is atomic: at every moment the new checkpoint is complete, or does not exist.
#
# ![Timeline of a save. The folder of step 500 stays complete while the ranks write step 600 into a folder whose name begins with .saving. One rename makes the new folder complete. Only then the old one is deleted. After a kill before the rename, step 500 is the current checkpoint; after a kill later, step 600.](../figures/checkpoint_rename.svg)
#
# `fsync` waits until a file is on the disk: without it the rename may reach the disk first, and a power cut then leaves empty files under a final name.
# An old checkpoint is renamed before it is deleted, so that a half-deleted checkpoint does not look complete.

# %%
show.source(core.begin_save, core.commit_save, core.prune_checkpoints)


# %% [markdown]
# The number at the front of a folder's name counts saves, and the highest number is the current checkpoint.
# Say the loss explodes after step 600, and you resume from step 500.
# When the run saves step 600 again, the new folder is the current checkpoint, not the old one.
#
# ### A test: kills at random moments
#
# The claim: when `save` has returned, no kill can lose that checkpoint.
# Two ranks save step after step and do nothing else. At a random moment one of them, or both, are killed with `SIGKILL`, which no process can catch.
# Whenever `save` has returned, rank 0 records the step in the file `killed.promised`.

# %%
def save_until_killed(path, victims, delay):
    training = build_small_run()
    store = Checkpoints(path, dist.group.WORLD, keep=1)
    if store.list_steps():
        store.load(training)
    for number in range(1000):
        set_step(training, training.step + 1)
        store.save(training)
        if dist.get_rank() == 0:
            with open(f"{path}.promised", "a") as file:
                file.write(f"{training.step}\n")
        dist.barrier()
        # Nobody is killed in the first save after a start.
        if number == 0 and dist.get_rank() in victims:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()


KILLS = {0.31: (0,), 0.22: (0, 1), 0.38: (1,)}  # seconds: ranks that are killed then

# %% [markdown]
# After each of three kills, another process loads the current checkpoint.
# The table compares its step with the last step in `killed.promised`.

# %% tags=["hide-input", "measured"]
# Table: three kills, and the checkpoint that is current after each


def load_current(path):
    """Return the current checkpoint's step, and whether all weights are of that step."""
    model = nn.Linear(64, 64)
    training = Training(model, torch.optim.AdamW(model.parameters()))
    Checkpoints(path).load(training)
    return training.step, all((p == training.step).all() for p in model.parameters())


path, rows = FOLDER / "killed", []
for delay, victims in KILLS.items():
    try:
        run_on_cpu(save_until_killed, 2, path, victims, delay, own_processes=True)
    except ranks.RankError:
        pass  # this was meant to happen
    promised = int(Path(f"{path}.promised").read_text().split()[-1])
    step, intact = load_current(path)
    # A rank may die after the rename, but before it notes the step.
    assert intact and promised <= step <= promised + 1
    left = sum(name.startswith(".saving") for name in os.listdir(path))
    rows.append((", ".join(map(str, victims)), delay, promised, step, "yes", left))
head = ["killed: rank", "after (s)", "last step promised", "current", "intact"]
show.table(rows, [*head, "unfinished saves left"])


# %% [markdown]
# The next save deletes the files of an unfinished save.
# [The tests](../tests/test_checkpoint.py) kill ten times at random moments, also during saves in the background, and then once at *every* file operation of a save.
#
# The tests cannot cut the power. Only `fsync` helps against power cuts, and only if the disk has really written the data that it reports as written.
# Object stores have no atomic rename. There, write a small file last, to mark the checkpoint as complete.
#
# ### Checksums: damaged files are refused
#
# The last file written into a folder is its manifest: sizes and checksums of all other files, names and shapes of all tensors, and step and position of the run.
# The cell prints a manifest with only one file and one tensor.

# %%
def save_once(path):
    with Checkpoints(path, dist.group.WORLD) as store:
        return store.save(build_small_run(600))


saved = run_on_cpu(save_once, 2, FOLDER / "good")[0]
manifest = json.loads((saved / MANIFEST).read_text())
for part in ("files", "tensors"):
    manifest[part] = dict(sorted(manifest[part].items())[:2][-1:])
del manifest["crc32"]  # of the manifest itself: it differs in every run, as DCP's index does
for name, value in manifest.items():
    print(f"{name}: {value}")

# %% [markdown]
# `load` checks the files first, then names, shapes, types and parameter groups, and only then changes the model.
# It compares groups because torch identifies them only by their order: two groups in reverse order would swap their learning rates.
# If one rank finds a fault, all ranks raise its error (`raise_on_all_ranks`); otherwise the others would wait for this rank.

# %%
show.source(Checkpoints.load)


# %% [markdown]
# The next cell damages a checkpoint in four ways, and then loads an intact checkpoint into a model of another shape.
# Each message names the file or the tensor, and no model is changed.

# %% tags=["hide-input"]
# Damages a checkpoint in four ways, and tries to load it

def try_to_load(path, model=None):
    """Try to load; print why not, and make sure that the model is unchanged."""
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


def truncate_file(path):
    os.truncate(path, 10_000)


for name, spoil in (
    ("__0_0.distcp", truncate_file),
    ("__1_0.distcp", flip_bit),
    ("__1_0.distcp", os.remove),
    (MANIFEST, os.remove),
):
    path = FOLDER / "bad"
    shutil.copytree(FOLDER / "good", path)
    spoil(list_checkpoints(path)[-1] / name)
    try_to_load(path)
    shutil.rmtree(path)
try_to_load(FOLDER / "good", nn.Linear(64, 65))

# %% [markdown]
# A checksum (CRC-32) finds damage. It does not protect against a person who changes a file and its checksum: sign the manifest, or do not load strangers' checkpoints.
#
# ## Saving in the background
#
# While the ranks save *at once* (synchronously), the GPUs wait.
# To avoid this, copy the state in memory, which is fast, and let a thread write the copy while training continues.
#
# ![Two timelines. In a synchronous save training waits until everything is written. In a save in the background training waits only while the state is copied in memory; a thread then writes the copy while the next steps run.](../figures/checkpoint_async.svg)
#
# DCP does this in `async_save`.
# Add two things: a process group for the thread, so that its messages cannot be mixed with those of training, and a rename after the threads of all ranks are done.

# %%
show.source(Checkpoints.save, Checkpoints._finish_save, Checkpoints._commit_or_discard)


# %% [markdown]
# How long does `save` block training?
# The storage here is slow: it takes 0.3 s to answer.
# After the call the cell sets every weight to zero, to show that later training steps do not change the saved copy.

# %%
class SlowStorage(dcp.FileSystemWriter):
    def write_data(self, plan, planner):
        time.sleep(0.3)
        return super().write_data(plan, planner)


def measure_blocking_time(path, wait):
    """Return the seconds of `save`, and whether it saved the weights of the moment of the call."""
    training = build_sharded_run("micro")
    train_steps(training, 1)
    weights = [p.to_local() for p in training.model.parameters()]  # this rank's rows
    with Checkpoints(path, dist.group.WORLD, writer=SlowStorage) as store:
        dist.barrier()
        begin = time.perf_counter()
        store.save(training, wait)
        seconds = time.perf_counter() - begin
        before = [weight.clone() for weight in weights]
        with torch.no_grad():
            for weight in weights:
                weight.zero_()  # as if training went on
        store.load(training)  # waits for the save
    return seconds, all(map(torch.equal, before, weights))


# %% tags=["hide-input", "measured"]
# Table: how long training is held up, at once and in the background

times = {}
for wait in (True, False):
    results = [
        max(run_on_cpu(measure_blocking_time, 2, FOLDER / f"{wait}-{i}", wait))
        for i in range(2)
    ]
    assert all(same for _, same in results)
    times[wait] = min(seconds for seconds, _ in results)
assert times[True] > 0.3  # the disk is made slow
show.check_timing(times[False] < 0.5 * times[True], "in the background: less than half")
rows = [
    (
        name,
        f"{times[wait]:.2f}",
        f"{times[wait] / times[True]:.2f}",
        "of the moment of the call",
    )
    for name, wait in (("at once", True), ("in the background", False))
]
show.table(rows, ["save", "training held up (s)", "ratio", "weights saved"])


# %% [markdown]
# Saving in the background has three costs. The copy takes host memory until it is written: 12 bytes for each parameter of this rank.
# The thread takes CPU time and bandwidth.
# And an error in the thread is raised late, by the next `save` or `wait`.
#
# ## What it costs
#
# ### Bytes written
#
# In float32 with AdamW a checkpoint has 12 bytes per parameter: the weight, and two averages.
# The table compares this prediction with real saves, on one, two and four ranks.

# %%
def save_one_checkpoint(path, preset):
    training = build_sharded_run(preset)
    train_steps(training, 1)  # before the first step, AdamW has no averages
    with Checkpoints(path, dist.group.WORLD) as store:
        return store.save(training)


def predict_bytes(config):
    # The output layer is the embedding: one tensor with two names, written twice.
    return 12 * count_parameters(config) + 4 * config.vocab * config.hidden


# %% tags=["hide-input"]
# Table: bytes of a checkpoint, predicted and measured

rows = []
for preset, size in (("micro", 1), ("micro", 2), ("micro", 4), ("mini", 2)):
    path = run_on_cpu(save_one_checkpoint, size, FOLDER / f"{preset}{size}", preset)[0]
    manifest = json.loads((path / MANIFEST).read_text())
    files = manifest["files"].items()
    found = sum(file["bytes"] for name, file in files if name.endswith("distcp"))
    predicted = predict_bytes(PRESETS[preset])
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
# The difference is a header of one or two kilobytes for each piece of a tensor.
# It looks large because these models are small: Llama 3 8B has 96 GB to save, in pieces of megabytes.
# In mixed precision a checkpoint has the same size: only the optimizer's 32-bit weights are saved, since the 16-bit weights follow from them.
#
# ### How often to save
#
# Let a save hold training up for $\delta$ seconds, and let failures come every $M$ seconds on average.
# If you save every $\tau$ seconds, saving takes the fraction $\delta/\tau$ of the time.
# A failure loses $\tau/2$ seconds on average, so failures take the fraction $\tau/2M$.
# The sum of both, the *lost fraction*, is smallest at
#
# $$
# \tau = \sqrt{2\,\delta M}
# $$
#
# ({cite:t}`young1974checkpoint`). {cite:t}`daly2006checkpoint` gives the exact lost fraction for failures that are equally likely at every moment, also during a save and a restart.

# %%
show.source(best_interval, lost_fraction)

# %% [markdown]
# The picture shows the lost fraction for 16,384 GPUs and five minutes to restart.
# Each dot is a simulated job that fails 20,000 times.

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
# If you do not know $M$ well, choose a longer interval, because a shorter one costs more: twice the best interval adds less than 5 percentage points to the lost fraction.
# Faster saves help twice: each save costs less, and you can save more often, so that a failure loses less.
# In the picture, saves of 5 instead of 120 s gain a tenth of the job's time.
#
# ## PyTorch's library, and others
#
# The table says what DCP does, and what this course adds:
#
# | | DCP | added |
# |---|---|---|
# | shards written in parallel, read by any number of ranks | yes | |
# | a tensor that several ranks hold is written by one of them | yes | |
# | `fsync` of each file | yes | of the folders too |
# | save in the background | `async_save` | its own process group; a final rename |
# | a complete save is recognised by | index written last | a new folder for each save; one rename |
# | which checkpoint is current, which are deleted | no | number in the name, `keep` |
# | checksums | no | manifest |
# | names and shapes compared | a missing name or another shape is an error, an additional name is not | any difference, also in types, raises before the model changes |
# | schedule, step, position, random state | no | `Training` |
#
# If replicas have drifted apart ([Data parallelism](data_parallel.md) shows how), DCP does not notice: it writes one of them.
#
# To use a model in one process, one file with the whole model is simpler.
# `export_model` gathers the model on rank 0, whose memory must hold it, and writes that file.
# `torch.load` reads the file with `weights_only=True`, which builds only tensors and numbers, and runs no code.

# %%
def train_and_export(path):
    training = build_sharded_run()
    losses = train_steps(training, 2)
    export_model(training.model, path, dist.group.WORLD)
    return losses, train_steps(training, 1)


_, (after,) = run_on_cpu(train_and_export, 4, FOLDER / "model.pt")[0]
alone = GPT(PRESETS["nano"])
alone.load_state_dict(torch.load(FOLDER / "model.pt", weights_only=True))
tokens, targets = text.get_batch(64, 8, start=16)
value = loss(alone(tokens), targets).item()

# %% [markdown]
# The process that loaded the file has the same next loss as the four ranks.

# %% tags=["hide-input"]
# Compares the next loss of one process with that of four ranks

assert abs(value - after) < 1.5e-5  # 2 sqrt(512 tokens) roundings of 2^-24 of 5.5
print(f"next loss: four ranks {after:.4f}, one process {value:.4f}")

# %% [markdown]
# [DeepSpeed](deepspeed_engine.md) has its own checkpoint format: a folder for each step with a file for each rank, and a text file `latest` with the current folder's name.
# Scripts convert a checkpoint into one state dict, or into a format that any number of ranks loads.
#
# ## Weights of real models
#
# On Hugging Face's hub a model is a folder: `config.json` has its shape, and the weights are in `safetensors` files.
# Such a file begins with a header in JSON: name, dtype, shape and offset of each tensor.
# Then come raw numbers, and no code.
# So each rank reads only its own slices, without messages.
#
# But each kind of model has its own tensor names, and some store matrices transposed or concatenated.
# `hub_names.map_tensors` says where in the files each tensor of the course's GPT is:

# %%
for preset, kind in (("llama-3-8b", "llama"), ("gpt-2", "gpt2")):
    links = hub_names.map_tensors(PRESETS[preset], kind)
    link = links["blocks.0.attention.key.weight"]
    transposed = ", transposed" if link.transposed else ""
    print(f"{preset}: {link.hub} at {link.box}{transposed}")


# %% [markdown]
# GPT-2 keeps the weights of queries, keys and values side by side in one matrix of shape [inputs, outputs]: the keys' weights are the middle third of its columns, transposed.
#
# `transformers` saves a tiny Llama, in files of 30 kB.
# Eight ranks load it, with data, pipeline and tensor parallelism over two ranks each, and ZeRO-1 ([Mesh](mesh.md) combines these).
# The model is built on the device `meta`, where tensors have no storage. `Parallel` allocates only this rank's part, so no rank ever holds the whole model.
# Then the ranks write the model: for each tensor, all ranks send their parts to the rank that writes the tensor's file.
# The folder gets its final name when it is complete.

# %%
def load_and_save_on_mesh(source, target):
    group = dist.group.WORLD
    layout = Layout(dp=2, pp=2, tp=2, zero=1, microbatches=2)
    with torch.device("meta"):
        plain = GPT(read_config(source))
    model = Parallel(plain, create_groups(layout, group), layout)
    load_hub(model, source, group)
    save_hub(model, target, group, template=source, shard_bytes=30_000)


shape = replace(
    PRESETS["llama-3-8b"], layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=64
)
known = transformers.LlamaConfig(**hub_names.build_config_json(shape, "llama"))
transformers.LlamaForCausalLM(known).save_pretrained(
    FOLDER / "hub", max_shard_size="30KB"
)
_ = run_on_cpu(load_and_save_on_mesh, 8, FOLDER / "hub", FOLDER / "back")

# %% tags=["hide-input"]
# Compares tensors and logits of both folders


def read_tensors(folder):
    files = [safe_open(path, "pt") for path in sorted(folder.glob("*.safetensors"))]
    return {n: f.get_tensor(n) for f in files for n in f.keys()}, len(files)  # noqa: SIM118


(there, _), (back, files) = read_tensors(FOLDER / "hub"), read_tensors(FOLDER / "back")
assert there.keys() == back.keys()
assert all(torch.equal(there[name], back[name]) for name in there)
print(f"{len(back)} tensors in {files} files: equal, bit for bit")
tokens = torch.arange(16)[None] % 64
theirs, again = (
    transformers.LlamaForCausalLM.from_pretrained(FOLDER / name)(tokens).logits
    for name in ("hub", "back")
)
load_hub(ours := GPT(read_config(FOLDER / "back")), FOLDER / "back")
# Paths of 13 * 64 terms in two orders: 2 sqrt(832) roundings of 2^-24 of up to 1.
assert torch.equal(theirs, again) and (ours(tokens) - theirs).abs().max() < 3.5e-6
print("logits of transformers from both folders: equal; the course's GPT has the same")

# %% [markdown]
# `snapshot_download` of `huggingface_hub` returns such a folder in its own cache. Its files are symbolic links, which `load_hub` follows.
# If a file is truncated, missing or renamed, or a tensor has another shape or name, `load_hub` names it in an error, before the model changes.
# In a tied model the output layer is the embedding.
# Some folders, such as Qwen3-1.7B's, store both tensors nevertheless. `load_hub` compares them and keeps one.
# If they differ, `transformers` warns and unties them. `load_hub` refuses them: build the model with `tied=False`.
# The course's GPT has rotary positions.
# GPT-2's weights load, but its learned positions are not used, so the result is another model. `load_hub` returns the names of the tensors that it did not use.
#
# ### Another layout, while the job runs
#
# Reinforcement learning alternates between training a model and generating text with it.
# Each is fastest in its own layout: for instance, training with every matrix sharded over four ranks, and generating with two copies over two ranks each.
# Saving and loading every few steps would be too slow.
# But both layouts tell every rank which part of which tensor each rank has and needs.
# So all ranks compute the same plan, send the parts that others lack, and know the bytes in advance.

# %%
show.source(resharding.transfer_weights, resharding.plan_transfers)

# %% [markdown]
# The number of bytes depends on which ranks form a copy.
# In training, rank $r$ has quarter $r$ of each matrix, counted from 0.
# With copies {0, 1} and {2, 3}, rank 1 has the second quarter and needs the second half, of which it has nothing.
# With copies {0, 2} and {1, 3}, ranks 0 and 1 both need the first half, and each lacks one quarter.
# In all, the ranks send six quarters in the first case, and four in the second.

# %% tags=["hide-input"]
# Transfers weights to two layouts, and counts the bytes
TRAINER = Layout(tp=4)
GENERATORS = {
    "copies {0, 1} and {2, 3}": Layout(dp=2, tp=2, order=("dp", "tp")),
    "copies {0, 2} and {1, 3}": Layout(dp=2, tp=2, order=("tp", "dp")),
}
four_heads = replace(PRESETS["micro"], vocab=512)


def transfer_to_layout(layout):
    models = []
    for seed, of in enumerate((TRAINER, layout)):
        torch.manual_seed(seed)
        groups = create_groups(of, dist.group.WORLD)
        models.append(Parallel(GPT(four_heads), groups, of))
    with count.record_traffic() as sent:
        transfer_weights(*models, dist.group.WORLD)
    return sent.bytes, [model.full_state_dict() for model in models]


def predict_bytes_for_layout(layout):
    parts = [
        [predict_pieces(four_heads, of, rank) for rank in range(4)]
        for of in (TRAINER, layout)
    ]
    return predict_transfer_bytes(*parts)


# %% tags=["hide-input"]
# Table: bytes that each rank sends, predicted and counted

rows = []
for words, layout in GENERATORS.items():
    results = run_on_cpu(transfer_to_layout, 4, layout)
    predicted = predict_bytes_for_layout(layout)
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
# This is the accident from the beginning of the lesson, with DCP alone. DCP writes its index last, so that a folder without an index is known to be incomplete.
# Rank 1 is killed just before it writes its shard of step 200.

# %%
class KilledOnRank1(dcp.FileSystemWriter):
    def write_data(self, plan, planner):
        if dist.get_rank() == 1:
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        written = super().write_data(plan, planner)
        dist.barrier()  # rank 0 has written, rank 1 has not
        return written


def save_twice_into_one_folder(path):
    warnings.simplefilter("ignore")  # DCP's, that it overwrites a checkpoint
    for step, writer in ((100, dcp.FileSystemWriter), (200, KilledOnRank1)):
        state = {"model": build_small_run(step).model.state_dict()}
        dcp.save(state, storage_writer=writer(path))


try:
    run_on_cpu(save_twice_into_one_folder, 2, FOLDER / "in place", own_processes=True)
except ranks.RankError as error:
    print(error)
state = {"model": nn.Linear(64, 64).state_dict()}
dcp.load(state, checkpoint_id=FOLDER / "in place")
weight = state["model"]["weight"]  # [64, 64]
print("weights of step", sorted(set(weight.flatten().tolist())))

# %% tags=["hide-input"]
# Checks the weights: rank 0's half of step 200, rank 1's of step 100

assert (weight[:32] == 200).all() and (weight[32:] == 100).all()


# %% [markdown]
# ````{admonition} Only if the folder is new: "DCP's index is written last, so a broken save is noticed"
# :class: checked
#
# In a new folder that is true: without an index nothing loads.
# In a folder with an older checkpoint the *old* index is still there, and its offsets fit the new files.
# So the cell above loads half of each step, without an error.
# DCP warns when it overwrites a checkpoint, but not when it loads a mixed checkpoint.
# Give every save a folder of its own.
# ````
#
# ### Forgetting the optimizer
#
# Weights alone are enough to *use* a model, but not to continue training.
# After 120 steps the folded cell resumes twice: with AdamW's state, and with a new AdamW. It measures the loss on held-out text, and how far the first step moves the weights.

# %% tags=["hide-input"]
# Resumes after 120 steps, with AdamW's state and without
def build_run(state=None, optimizer_state=None):
    torch.manual_seed(0)
    model = GPT(PRESETS["nano"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if state:
        model.load_state_dict(state)
    if optimizer_state:
        optimizer.load_state_dict(copy.deepcopy(optimizer_state))
    return model, optimizer


def train_and_evaluate(model, optimizer, steps, start=0):
    """Return held-out losses around each step, and how far the first step moves weights."""
    tokens, targets = text.get_batch(64, 32, start=20_000)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    losses, moved = [], None
    for step in range(steps + 1):
        with torch.no_grad():
            losses.append(loss(model(tokens), targets).item())
        if step < steps:
            x, y = text.get_batch(64, 8, start=8 * (start + step))
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
        if step == 0:
            after = torch.cat([p.detach().flatten() for p in model.parameters()])
            moved = ((after - before).abs().mean() / 3e-3).item()
    return losses, moved


def resume_both_ways():
    model, optimizer = build_run()
    for step in range(120):
        x, y = text.get_batch(64, 8, start=8 * step)
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    kept = model.state_dict(), optimizer.state_dict()
    with_state, without = build_run(*kept), build_run(kept[0])
    return train_and_evaluate(*with_state, 6, 120), train_and_evaluate(*without, 6, 120)


kept, lost = run_on_cpu(resume_both_ways, 1)[0]

# %% tags=["hide-input"]
# Prints how far the first step moves the weights, and what the loss does

jumps = [losses[1] - losses[0] for losses, _ in (kept, lost)]
assert lost[1] > 0.9 and lost[1] > 5 * kept[1] and jumps[1] > 0.05 > jumps[0]
pairs = zip(("kept:", "lost:"), (kept, lost), jumps, strict=True)
for words, (_, moved), jump in pairs:
    print(f"{words} the first step moves a weight by {moved:.2f} learning rates,")
    print(f"      and the loss changes by {jump:+.3f}")

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
# A new AdamW has no averages yet. Its first step divides each gradient by its own absolute value, so *every* weight moves by a whole learning rate.
# With averages of many steps a weight moves by a small part of the learning rate.
# In a large run you see this as a spike in the loss curve.
#
# ````{admonition} Only if the optimizer already has state: "asking for a state dict changes nothing"
# :class: checked
#
# Before the first step an optimizer has no state. `get_optimizer_state_dict` creates the state by a step with zero gradients, and leaves the step counters at 1, so the table's counter is one too high.
# AdamW then corrects its averages as if they were one step older.
# So saving at step 0 changes the run.
# `named_tensors` calls this function only for an optimizer with state.
# ````

# %%
def count_steps(ask):
    """Return AdamW's step counter after two steps, and the loss."""
    model, optimizer = build_run()
    if ask:
        get_optimizer_state_dict(model, optimizer)
    losses, _ = train_and_evaluate(model, optimizer, 2)
    return int(optimizer.state[model.norm.weight]["step"]), losses[2]


counters = {
    word: run_on_cpu(count_steps, 1, ask)[0] for word, ask in (("no", False), ("yes", True))
}

# %% tags=["hide-input"]
# Table: counter and loss, with and without a state dict before the first step

assert counters["no"][0] == 2 and counters["yes"][0] == 3
assert counters["no"][1] != counters["yes"][1]
rows = [(ask, counter, f"{value:.4f}") for ask, (counter, value) in counters.items()]
head = ["state dict read before step 1?", "counter after two steps", "loss then"]
show.table(rows, head)


# %% [markdown]
# ### Forgetting the position in the data
#
# A run of 60 steps stops after 20 and after 40, and its last 20 steps run on two ranks instead of four.
# A sample is a *window* of the text. The table counts windows in three cases: the resumed loader starts from the beginning; each rank has saved its own position; the position counts samples of all ranks.

# %% tags=["hide-input"]
# Lists the windows that the run reads in each of the three cases
def list_windows(position, rank, size):
    each = BATCH_SIZE // size
    return range(position + rank * each, position + (rank + 1) * each)


def list_windows_seen(way):
    found = []
    for part, size in enumerate((4, 4, 2)):
        for step in range(20):
            done = 20 * part + step  # steps before this one
            for rank in range(size):
                if way == "from the beginning":
                    found += list_windows(BATCH_SIZE * step, rank, size)
                if way == "each rank its own":  # reads the windows r, r + size, …
                    own = (20 * part) * BATCH_SIZE // 4 + step * BATCH_SIZE // size
                    found += [(own + i) * size + rank for i in range(BATCH_SIZE // size)]
                if way == "samples of all ranks":
                    found += list_windows(BATCH_SIZE * done, rank, size)
    return found


POSITIONS = "from the beginning", "each rank its own", "samples of all ranks"
trained_on = {way: list_windows_seen(way) for way in POSITIONS}

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
# None of these mistakes raises an error.
# The loss even looks better, because the model has already seen the text.
#
# ### Saving the shards of rank 0
#
# In data parallelism `if rank == 0: torch.save(…)` saves the model.
# With a sharded model, it saves only rank 0's shards.

# %%
def save_on_rank_0(path):
    model = build_sharded_run().model
    if dist.get_rank() == 0:
        local = {name: value.to_local() for name, value in model.state_dict().items()}
        torch.save(local, path)


run_on_cpu(save_on_rank_0, 4, FOLDER / "rank0.pt")
state = torch.load(FOLDER / "rank0.pt", weights_only=True)
full = GPT(PRESETS["nano"]).state_dict()
fraction = sum(v.numel() for v in state.values()) / sum(v.numel() for v in full.values())
print("fraction of the numbers that was saved:", fraction)
print("norm.weight:", len(state["norm.weight"]), "of", len(full["norm.weight"]))

# %% tags=["hide-input"]
# Checks the fraction: a quarter, on four ranks

assert fraction == 0.25


# %% [markdown]
# You notice this only when you load the file, perhaps weeks later.
# So load a new job's first checkpoint immediately, in another process.
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
# This course's checkpoints are read with `weights_only=True`, or are JSON, with one exception: DCP's index `.metadata` is a pickle, and DCP unpickles it. The manifest's checksum finds damage in it, but no attack.
#
# ### A full disk, and a folder that is not shared
#
# If a save fails on one rank, all ranks raise that rank's error; the incomplete folder is deleted, and the last checkpoint stays.
# On a full disk the error says how many bytes the save needs, and how many are free; DCP alone says `unexpected pos 704 vs 598` (torch 2.13).
# The disk needs room for `keep` checkpoints *and one more*: the new one is complete before an old one is deleted.
#
# Two jobs that save into one folder would delete each other's checkpoints, since each keeps only the newest.
# So a job locks the folder from its first save to its end. A second job may load from it, but its first save is refused.
#
# If the folder is on each node's own disk, it looks right on every node, but no node has all files.
# So rank 0 looks for every file before the rename, and its error names the missing files.
#
# ## When to use what
#
# | | for | against |
# |---|---|---|
# | sharded, by all $N$ ranks | no rank holds more than its shards; each writes $1/N$ of the bytes | many files, which only DCP reads |
# | one file, gathered | any process reads it | one rank holds all 12 bytes per parameter, and the others wait while it writes |
# | at once (synchronous) | simple; an error is raised by the save that failed | training waits for the storage |
# | in the background | training waits only for the copy (measured above) | a second copy of the state in memory; an error is raised one save late |
#
# In your own job, check four things:
#
# - another process has loaded the first checkpoint;
# - the first loss after resuming equals that of a run without a stop;
# - the time between two saves is near $\sqrt{2\delta M}$;
# - the disk has room for one checkpoint more than `keep`.
#
# ```{admonition} On more GPUs
# :class: note
#
# The saved files do not depend on the device, and training resumes bit for bit on any.
# Save times depend on the device: all GPUs copy their own shards to the host at the same time.
# So with more GPUs training waits less, until the storage is the limit.
# ```
#
# ## Exercises
#
# ```{exercise-start} Bytes of a checkpoint (easy)
# :label: ex-checkpoint-bytes
# ```
#
# A model of 8.03 billion parameters trains on 8 ranks with AdamW, all in float32, fully sharded.
# How many bytes of tensors does a checkpoint have, of all ranks together?

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
# The weight and AdamW's two averages, 4 bytes each. Gradients are not saved.

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
# ```{exercise-start} Which windows a rank reads next (medium)
# :label: ex-checkpoint-windows
# ```
#
# The text is cut into windows with the numbers 0, 1, 2 and so on.
# All ranks together have trained on the first `samples` windows, and take `batch` windows in each step.
# Return the numbers of the windows that rank `rank` of `size` takes in the next step. `size` divides `batch`.
# The check stops the run, and resumes it with 4, 2, 1 and 8 ranks.

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
# The position is one number for all ranks. They divide the windows that follow it.

# %%
def my_windows(samples, batch, rank, size):
    each = batch // size
    return range(samples + rank * each, samples + (rank + 1) * each)


check(my_windows)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Write a file atomically (medium)
# :label: ex-checkpoint-write
# ```
#
# Write the bytes `content` to the file `path`, which may exist already.
# At every moment, and after a power cut, the file must have either the old or the new content.
# The check kills your function before each line of Python that it runs.
# After a killed call the next call must work.

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
# Write a new file beside `path`, wait until it is on the disk, then rename it.
# After a kill, the next call overwrites this new file.

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
# ```{exercise-start} Load shards in two dimensions (hard)
# :label: ex-checkpoint-pieces
# ```
#
# With tensor parallelism a matrix may be sharded by rows and by columns: each rank has a rectangle of it, a *box*.
# `saved` is a list of boxes `(file, offset, size)`, and this rank's new box is `(offset, size)`. `offset` is the row and column of the whole matrix at which the box begins, `size` its numbers of rows and columns.
# Return a list of `(file, theirs, mine)`, so that `box[mine] = saved_box[theirs]` copies the elements that both boxes contain.
# `theirs` and `mine` are pairs of slices: `theirs` is relative to the file's box, `mine` to this rank's box.
# Leave out files with nothing for this rank.

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
# Two boxes overlap where their rows overlap and their columns overlap. DCP computes the same, for any number of dimensions.

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
# A checkpoint has `size` bytes, of all `ranks_` ranks together. Each rank copies its part to the host at `copy` bytes per second, all ranks at the same time, and training waits for the copy.
# Then training goes on while the parts are written.
# The storage writes `write` bytes per second in all, and a save may begin only when the save before it is written.
# The job fails every `mtbf` seconds on average.
# Return how many seconds of training should lie between two saves, so that the lost time is smallest.

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
# Only the copy holds training up, so its time is $\delta$.
# The interval cannot be shorter than the time in which the storage writes a checkpoint.

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
# - A checkpoint is everything on which the next step depends: weights, optimizer, schedule, step, position in the data, random state.
# - Each rank writes its shards, and later reads the saved shards that overlap with its new ones. A resumed run equals an uninterrupted one: bit for bit on the same number of ranks, up to rounding on fewer.
# - A save goes into a new folder, and one rename completes it; old checkpoints are deleted afterwards. So a kill at any moment leaves the last good checkpoint.
# - Loading compares sizes, checksums, names and shapes before it changes a model.
# - A checkpoint takes 12 bytes per parameter in float32 with AdamW. When it is written in the background, training waits only for the copy.
# - Save every $\sqrt{2\delta M}$ seconds.
# - Each rank reads only its slices of the hub's files. To change the layout of a running job, each rank sends the parts that others lack; the bytes are known in advance.
#
# ## Further reading
#
# - {cite:t}`dubey2024llama3`, section 3.3.4: what failed in 54 days, how often, and how 90 % effective training time was still reached.
# - {cite:t}`young1974checkpoint`: the square root, in two pages.
# - {cite:t}`daly2006checkpoint`: what changes if failures come during saves and restarts as well.
# - {cite:t}`mohan2021checkfreq`: saving every few iterations, in the background, at an overhead of some percent, and resuming inside an epoch.
