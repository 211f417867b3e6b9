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
# # Meshes: several cuts at once
#
# After this lesson you can
#
# - say of any rank which groups it is in, and count what an order of ranks costs;
# - train one model by data, pipeline and tensor parallelism at once, and show that it equals one process;
# - name what clipping, tied embeddings, norms, dropout and uneven batches need, and what they do without it;
# - predict the bytes that each group holds and sends, and go on from a checkpoint under another mesh;
# - read FSDP2 over `parallelize_module` on a `DeviceMesh` as the same thing.
#
# It takes about 30 minutes to read and 40 minutes for the exercises. Running it takes under a minute.
# It needs [Tensor parallelism](tensor_parallel.md), [Pipeline parallelism](pipeline.md) and [ZeRO](zero.md).
#
# One number to begin with. Llama 3 70B is trained on 512 GPUs: each matrix over 8, the layers over 4 stages, 16 copies of all that.
# In nodes of 8 GPUs there are six ways to number the ranks. The best sends 26 GB for each GPU out of its node in a step. The worst sends 24 times as much.

# %% tags=["hide-input"]
# Imports, and the small jobs that every cell trains
import argparse
import contextlib
import io
import json
import logging
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import gelu

from shardlab import count, mesh, ranks, show, zero
from shardlab import tensor_parallel as tp
from shardlab.buckets import add_up, clip_by_joint_norm
from shardlab.check import check
from shardlab.checkpoint import Checkpoints, Training
from shardlab.layout import Layout, orders
from shardlab.mesh import Parallel, PlacedDropout, picture
from shardlab.mesh.command import add_command
from shardlab.mesh.job import Job, alone, apart, batch_of, model_of, train
from shardlab.model import GPT, loss
from shardlab.shapes import PRESETS, Config

show.style()
SMALL = Config(vocab=256, seq=16, layers=2, heads=4, hidden=32)
EIGHT = Layout(dp=2, pp=2, tp=2, microbatches=2)
GB = 1e9


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def short(difference):
    """A difference with one digit; 0 is exactly that."""
    return f"{difference:.0e}" if difference else "0"


def gap(a, b):
    """The largest difference between two tensors."""
    return (a - b).abs().max().item()


def parallel(layout, config=SMALL):
    """The same GPT on every rank, cut along three axes."""
    return Parallel(model_of(config), mesh.join(layout, dist.group.WORLD), layout)


def shardlab(line):
    """What `python -m shardlab …` prints."""
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers())
    chosen = parser.parse_args(line.split())
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        chosen.command(chosen)
    return printed.getvalue().rstrip()


# %% tags=["hide-input"]
# Table: what leaves a node under each order, for Llama 3 70B on 512 GPUs
LLAMA = PRESETS["llama-3-70b"]


def beyond(shape, config, batch, seq, node=8):
    """Bytes that leave the busiest node in a step, for each of its GPUs, by axis."""
    step = partial(mesh.predicted_sent, config, batch=batch, seq=seq)
    stages = [step(shape, shape.rank(pp=i)) for i in range(shape.pp)]
    found = shape.leaving(node, lambda rank: stages[shape.place(rank)["pp"]])
    return {axis: max(each) / node for axis, each in found.items()}


rows, totals = [], {}
for shape in orders(Layout(dp=16, pp=4, tp=8)):
    found = beyond(shape, LLAMA, batch=16, seq=8192)
    totals[shape.order] = sum(found.values())
    cells = [f"{found[axis] / GB:.1f}" for axis in ("tp", "pp", "dp")]
    rows.append([" → ".join(shape.order), *cells, f"{totals[shape.order] / GB:.0f}"])
assert round(min(totals.values()) / GB) == 26
assert round(max(totals.values()) / min(totals.values())) == 24
head = ["order, outermost → innermost", "tensor (GB)", "pipeline (GB)", "data (GB)"]
show.table(rows, [*head, "in all, for each GPU (GB)"])


# %% [markdown]
# Each copy takes 16 sequences of 8,192 tokens; all numbers are float32, and in bfloat16 they are half of it.
# The rest of this page says where these bytes come from, and then trains with all three cuts on eight real ranks.
#
# ## From a list of ranks to a mesh
#
# A launcher gives you $N$ processes with numbers from 0 to $N-1$. A job with three cuts needs $N = d \cdot p \cdot t$ of them, and each has three jobs at once:
# it shares every matrix with $t-1$ others, it is one of $p$ stages, and it belongs to one of $d$ copies.
# Who is with whom is arithmetic. Read the rank's number as a number with three digits, the last of which counts to $t$.

# %%
def groups(sizes, axis):
    """All groups along one axis of a box with N = product of `sizes` ranks in it."""
    box = torch.arange(torch.Size(sizes).numel()).view(sizes)
    return box.movedim(axis, -1).flatten(0, -2).tolist()


for axis, name in enumerate(("data", "pipeline", "tensor")):
    print(f"{name:8}", groups((2, 2, 2), axis))

# %% [markdown]
# Ranks of a group differ in one digit, and in no other. Put your own numbers into the cell's first line, and the picture follows; or into the form below it, which needs no Python of yours:

# %%
DEGREES, NODE = Layout(dp=2, pp=2, tp=2), 4  # ranks in a node
show.figure(picture.draw(DEGREES, NODE), picture.alt(DEGREES, NODE), "mesh-groups")

# %% [markdown]
# :::{calculator} mesh
# :dp: 2
# :pp: 2
# :tp: 2
# :node: 4
# :::
#
# In the picture a dashed line leaves its node. With `order=("tp", "pp", "dp")` the tensor groups do:

# %%
WRONG = replace(DEGREES, order=("tp", "pp", "dp"))
show.figure(picture.draw(WRONG, NODE), picture.alt(WRONG, NODE), "mesh-wrong-order")

# %% [markdown]
# ### Why tensor stands innermost
#
# The three groups send at different moments, and different amounts.
#
# ![What a rank of a 2 × 2 × 2 mesh sends in one step with two micro-batches, along a line of time. Along the tensor axis an all-reduce of B S H numbers several times in every layer, in forward and in backward. Along the pipeline axis one message of B S H numbers behind the stage's last layer for each micro-batch, and one back. Along the data axis the gradients, once, at the end.](../figures/mesh_step.svg)
#
# - **Tensor** sends activations in every layer, four times, and every layer waits for them. It belongs on the fastest wire there is, so it gets the last digit: neighbours, in one node.
# - **Pipeline** sends the same activations once for each *stage*, from one rank to one rank. It crosses nodes well {cite}`narayanan2021megatron`.
# - **Data** sends gradients once for each *step*, however many micro-batches it has. Nobody waits for them before the step ends.
#
# Where tensor groups fill the nodes, the order of the other two changes nothing at a node's door: rows one and three of the table are equal. It decides what leaves a rack.
# Which of the two stands outermost is then a question of bytes and of patience. Megatron-LM puts stages there, which often send less. Llama 3's job puts copies there, which can wait longest {cite}`dubey2024llama3`; so does this page.
#
# ### PyTorch's mesh is the same arithmetic
#
# `init_device_mesh` is given the sizes from the outermost in, and makes the groups. So does `mesh.join`, in fewer lines:

# %% tags=["hide-input"]
# Shows the module's join
show.source(mesh.join, mesh.groups_of)


# %%
def both_meshes():
    ours = mesh.join(EIGHT, dist.group.WORLD)
    kind = ranks.device().type
    theirs = init_device_mesh(kind, (2, 2, 2), mesh_dim_names=("dp", "pp", "tp"))
    members = dist.get_process_group_ranks
    return [(members(a), members(b)) for a, b in zip(ours, mesh.groups_of(theirs))]


joined = ranks.run(both_meshes, 8)
assert all(ours == theirs for rank in joined for ours, theirs in rank)
print("rank 5 is with", *(ours for ours, _ in joined[5]), "in both")


# %% [markdown]
# From here on a group is an argument, whoever made it.
#
# ## All three cuts in their plainest form
#
# Two layers, one on each stage. Each is a feed-forward network, $Y = \mathrm{GELU}(X W_1) W_2$, whose matrices are halved over a tensor group. Two copies take half of the batch each.
# Every line is from one of the lessons before; new is that they run at once.

# %%
def plain_step(layers, x_BH, groups):
    """The gradients of this rank's halves of its stage's two matrices."""
    copy, stage, part = (dist.get_rank(group) for group in groups)
    up_HF, down_FH = layers[stage]
    up_Hf = up_HF.chunk(2, 1)[part].clone().requires_grad_()  # tensor: by columns
    down_fH = down_FH.chunk(2, 0)[part].clone().requires_grad_()  # and by rows
    x_BH = x_BH.chunk(2)[copy].clone()  # data: this copy's half of the batch
    if stage == 1:  # pipeline: what comes from the stage before
        ranks.irecv(x_BH, 0, groups.pp).wait()
    x_BH.requires_grad_()
    y_Bf = gelu(tp.copy_to(x_BH, groups.tp) @ up_Hf)  # [B, H] @ [H, f]
    y_BH = tp.reduce_from(y_Bf @ down_fH, groups.tp)  # [B, f] @ [f, H], summed
    if stage == 1:
        y_BH.square().mean().backward()  # the loss
        ranks.isend(x_BH.grad, 0, groups.pp).wait()
    else:
        ranks.isend(y_BH.detach(), 1, groups.pp).wait()
        dy_BH = torch.empty_like(y_BH)
        ranks.irecv(dy_BH, 1, groups.pp).wait()
        y_BH.backward(dy_BH)
    for weight in (up_Hf, down_fH):  # data: the average, once
        dist.all_reduce(weight.grad, group=groups.dp)
        weight.grad /= 2
    return copy, stage, part, up_Hf.grad, down_fH.grad


# %% tags=["hide-input"]
# Holds all eight ranks' gradients against one process
def drawn():
    torch.manual_seed(0)
    layers = [(torch.randn(8, 32) / 3, torch.randn(32, 8) / 6) for _ in range(2)]
    return layers, torch.randn(4, 8)


def plain_rank():
    layers, x_BH = drawn()
    layers = [[w.to(ranks.device()) for w in layer] for layer in layers]
    return plain_step(layers, x_BH.to(ranks.device()), mesh.join(EIGHT, dist.group.WORLD))


layers, y_BH = drawn()
for weight in sum(layers, ()):
    weight.requires_grad_()
for up_HF, down_FH in layers:
    y_BH = gelu(y_BH @ up_HF) @ down_FH
y_BH.square().mean().backward()
worst = 0.0
for _, stage, part, dup, ddown in ranks.run(plain_rank, 8):
    up_HF, down_FH = layers[stage]
    worst = max(worst, gap(dup, up_HF.grad.chunk(2, 1)[part]))
    worst = max(worst, gap(ddown, down_FH.grad.chunk(2, 0)[part]))
assert worst < 1e-6  # float32, gradients up to 0.1
print(f"8 ranks, each with a quarter of the weights: gradients off by {short(worst)}")

# %% [markdown]
# What it leaves out: micro-batches, so that one stage always waits; a batch that the copies cannot share evenly; a loss over a vocabulary; a norm of all gradients; and copies that hold everything twice.
#
# ## The module: the order in which the cuts meet
#
# `Parallel` takes a plain GPT, three groups and the layout, and hands the model from one technique to the next.
# Each is the module of its own lesson. First matrices, then layers, then copies: a stage has to be cut by tensor parallelism before its parameters are known, and ZeRO deals out what is left.

# %% tags=["hide-input"]
# Shows how the cuts are applied
show.source(
    Parallel.__init__,
    Parallel._cut_matrices,
    Parallel._cut_layers,
    Parallel._share_copies,
)

# %% [markdown]
# A step goes the other way round, from the layers out. Every group adds up what is its own, and no group adds up what another one has added already.

# %% tags=["hide-input"]
# Shows a step
show.source(Parallel.step, Parallel._loss, Parallel._joined)

# %% [markdown]
# Two sums stand here that no single technique knows of. The *weight* of a copy makes the average over copies a mean over sequences. And where [sequence parallelism](sequence_parallel.md) cuts the tokens between the matrices, norms have gradients that know of a $t$-th of the tokens: these are summed last, on ZeRO's pieces, where they are shortest.
#
# ## Five steps equal one process

# %%
SHAPES = {
    "2 × 2 × 2, ZeRO-1, sequence": replace(
        EIGHT, zero=1, sequence_parallel=True, micro_batch=2
    ),
    "2 × 1 × 2, ZeRO-3": Layout(dp=2, tp=2, zero=3, micro_batch=4),
    "1 × 2 × 2, GPipe": Layout(
        pp=2, tp=2, schedule="gpipe", micro_batch=2, microbatches=4
    ),
}
JOBS = {name: Job(SMALL, layout) for name, layout in SHAPES.items()}
results = {name: ranks.run(train, job.layout.ranks, job) for name, job in JOBS.items()}

# %% tags=["hide-input"]
# Table: losses, gradients and weights beside one process's
want = ranks.run(alone, 1, JOBS["1 × 2 × 2, GPipe"])[0]
rows = []
for name, found in results.items():
    gaps = apart(found[0], want)
    # Float32: losses of 5.5 in units of 5e-7; another order of sums; AdamW divides by gradients,
    # which makes 1e-7 of a gradient near 0 up to 1e-5 of a weight.
    assert gaps["losses"] < 5e-6 and gaps["gradients"] < 1e-5 and gaps["weights"] < 1e-4
    rows.append([name, SHAPES[name].ranks, *map(short, gaps.values())])
head = ["data × pipeline × tensor", "ranks", "losses", "last gradients", "weights"]
show.table(rows, head)

# %% [markdown]
# These are the largest differences of any number in the model: another order of sums, no more.
# In float64 [the tests](../tests/test_contract.py) hold two dozen meshes to $10^{-11}$ after each of five steps, all with clipping, some with dropout, uneven batches, chunks and recomputation.
#
# ## What each of them needs
#
# Each of these is right in its own lesson, and wrong when it meets another cut.
#
# ### The norm: every number once
#
# To clip by the global norm, ranks add up their squares. But not every number lies on one rank.
#
# ![What counts for the norm, on two stages with two tensor ranks each. Parts of matrices lie on one rank, and count there. Norms and late biases lie whole on both tensor ranks, and count on the first. The tied embedding lies on both stages, and counts on the first.](../figures/mesh_norm.svg)
#
# Who counts what is the mesh's own. The sum and the scaling, `clip_by_joint_norm`, are those of tensor parallelism, ZeRO and experts, too.

# %% tags=["hide-input"]
# Shows who counts what, and how it is added up
show.source(Parallel.clip_grad_norm_, Parallel._counts, clip_by_joint_norm)


# %% tags=["hide-input"]
# Table: the norm, and three that are wrong
def norms():
    job = parallel(Layout(pp=2, tp=2, microbatches=2, sequence_parallel=True))
    with torch.no_grad():  # such that norms have gradients that one sees
        for name, parameter in job.named_parameters():
            if "norm" in name:
                parameter.mul_(0.1)
    reference = model_of(SMALL)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "norm" in name:
                parameter.mul_(0.1)
    tokens, targets = batch_of(SMALL, 4, 0)
    loss(reference(tokens), targets).backward()
    job.step(tokens, targets)
    local = nn.utils.get_total_norm([p.grad for p in job.parameters()])
    square = local.square()
    dist.all_reduce(square)
    full = nn.utils.get_total_norm([p.grad for p in reference.parameters()])
    return [x.item() for x in (full, job.clip_grad_norm_(1e9), square.sqrt(), local)]


found = ranks.run(norms, 4)
one, ours, everything, _ = found[0]
assert abs(ours - one) < 1e-5 * one < 0.02 * one < everything - one
rows = [
    ("one process", f"{one:.4f}"),
    ("Parallel.clip_grad_norm_, on every rank", f"{ours:.4f}"),
    ("all squares of all ranks", f"{everything:.4f}"),
    ("torch's clip_grad_norm_, rank by rank", ", ".join(f"{r[3]:.4f}" for r in found)),
]
show.table(rows, ["who adds up what", "norm"])


# %% [markdown]
# With all squares of all ranks, what lies on $t$ ranks counts $t$ times, and the tied embedding twice: training runs on, with a limit that is lower than you think, and that changes with the mesh.
# With torch's own function every rank scales by another factor, and what was whole on two ranks is soon two things.
#
# ### Twins, norms, and a short batch
#
# A tied embedding stands on the first stage and, as the head, on the last. Both see their own gradient alone, so the two exchange and add theirs after the last micro-batch.
# Norms see their own tokens alone, under sequence parallelism. And an average over copies is the mean over sequences only where all copies have equally many.
# Take out one of the three at a time:

# %%
def faulty(fault, sizes=(3, 1)):
    """A step with a fault in it: how far each gradient is off, as a share of its norm."""
    job = parallel(replace(EIGHT, zero=1, sequence_parallel=True, microbatches=1))
    if fault == "the twins do not meet":
        job.pipeline.twin = None
    elif fault == "norms are not summed":
        job.partly = set()
    elif fault == "copies weigh the same":
        job.pipeline.passes.loss = lambda x, y: tp.loss(x, y, job.groups.tp)
    tokens, targets = batch_of(SMALL, 4, 0)
    copy = dist.get_rank(job.groups.dp)
    job.step(tokens.split(sizes)[copy], targets.split(sizes)[copy])
    reference = model_of(SMALL)
    loss(reference(tokens), targets).backward()
    found = mesh.full_tensors(job, lambda piece: piece.grad)
    wanted = {n: p.grad for n, p in reference.named_parameters()}
    return {n: ((found[n] - w).norm() / w.norm()).item() for n, w in wanted.items()}


FAULTS = ["none", "the twins do not meet", "norms are not summed", "copies weigh the same"]


# %% tags=["hide-input"]
# Table: which gradients each fault spoils
def all_faults():
    return [faulty(fault) for fault in FAULTS]


rows = []
for fault, found in zip(FAULTS, ranks.run(all_faults, 8)[0]):
    found = {n: off for n, off in found.items() if "key.bias" not in n}  # these are 0 anyway
    wrong = [n for n in found if found[n] > 1e-3]
    worst = max(found, key=found.get)
    told = f"{100 * found[worst]:.0f} % ({worst})" if wrong else short(found[worst])
    rows.append([fault, f"{len(wrong)} of {len(found)}", told])
    assert bool(wrong) == (fault != "none")
show.table(rows, ["fault", "gradients that are wrong", "the worst of them"])


# %% [markdown]
# No fault raises an error.
# The first spoils one tensor, and the two that should be one drift apart. The second spoils what is small, on which much hangs. The third spoils everything, and is gone as soon as batches are even, as they are in most tests: the hardest of the three to find.
#
# ### Dropout: random in the same way, not by the same rank
#
# Ranks of a *tensor* group must drop the same between regions, since all of them hold the same activations there. *Copies* and *stages* must drop something else.
# One seed on all ranks breaks the second rule; a seed for each rank breaks the first.

# %%
def masks(seeded):
    groups = mesh.join(Layout(dp=2, tp=2), dist.group.WORLD)
    copy = dist.get_rank(groups.dp)
    torch.manual_seed({"one seed": 0, "by rank": dist.get_rank(), "by copy": copy}[seeded])
    return nn.functional.dropout(torch.ones(1000), 0.5) > 0


# %% tags=["hide-input"]
# Table: who drops the same
rows = []
for seeded in ("one seed", "by rank", "by copy"):
    # CPU: masks by the CPU's generator
    found = ranks.run(masks, 4, seeded, device="cpu")
    alike = [(found[0] == found[other]).float().mean().item() for other in (1, 2)]
    rows.append([seeded, *(f"{100 * fraction:.0f} %" for fraction in alike)])
    right = alike[0] == 1 and abs(alike[1] - 0.5) < 0.1
    assert right == (seeded == "by copy")
show.table(rows, ["seeds", "alike in a tensor group", "alike in two copies"])


# %% [markdown]
# Half of the places are alike by chance. So seed by copy and stage, and you train rightly.
# You still cannot compare with one process, or go on from a checkpoint under another mesh with the same numbers. `PlacedDropout` can: it sets the generator before each block, by step, block and micro-batch, counted over all copies.

# %% tags=["hide-input"]
# Shows PlacedDropout, and holds a job with dropout against one process
def dropped():
    config, sizes, microbatches = replace(SMALL, dropout=0.2), (3, 2), 2
    layout = replace(EIGHT, zero=1, sequence_parallel=True)
    job, reference = parallel(layout, config), model_of(config)
    drops = PlacedDropout(dict(reference.blocks.named_children()))
    copy, off = dist.get_rank(job.groups.dp), 0.0
    tokens, targets = batch_of(config, 5, 0)
    value = job.step(tokens.split(sizes)[copy], targets.split(sizes)[copy])
    drops.begin(0)
    for x, y in zip(tokens.split(sizes), targets.split(sizes)):
        for a, b in zip(x.tensor_split(microbatches), y.tensor_split(microbatches)):
            part = loss(reference(a), b) * len(a) / len(tokens)
            part.backward()
            value = value - part.detach()
    drops.end()
    found = mesh.full_tensors(job, lambda piece: piece.grad)
    off = max(gap(found[n], p.grad) for n, p in reference.named_parameters())
    return abs(value.item()), off


lost, off = ranks.run(dropped, 8, device="cpu")[0]  # CPU: masks by the CPU's generator
assert lost < 5e-6 and off < 1e-5  # float32
print(f"dropout on 8 ranks: loss off by {short(lost)}, gradients by {short(off)}")
show.source(PlacedDropout)

# %% [markdown]
# It costs one call for each block. Inside attention each tensor rank draws the masks of all heads and keeps its own, as in [Tensor parallelism](tensor_parallel.md).
#
# ## What it costs
#
# ### Held and sent, by group
#
# For each rank of the 2 × 2 × 2 job, the formulas of `mesh.predict` beside what its five steps held and sent:

# %% tags=["hide-input"]
# Table: bytes of one copy's four ranks, predicted and counted
rows = []
for rank, one in enumerate(results["2 × 2 × 2, ZeRO-1, sequence"]):
    assert one["held"] == one["held_predicted"] and one["sent"] == one["sent_predicted"]
    if one["place"]["dp"] == 0:
        rows.append([rank, one["place"]["pp"], one["place"]["tp"]])
        rows[-1] += [f"{sum(one['held_predicted'].values()):,}", f"{sum(one['held'].values()):,}"]
        for axis in ("tp", "pp", "dp"):
            rows[-1] += [f"{one['sent_predicted'][axis]:,.0f}", f"{one['sent'][axis]:,.0f}"]
head = ["rank", "stage", "part", "holds (B)", "counted"]
head += [x for a in ("tp", "pp", "dp") for x in (f"sends, {a} (B)", "counted")]
show.table(rows, head)

# %% [markdown]
# Equal to the byte, padding and single numbers included. The second stage holds more: the last norm, and the tied embedding for a second time.
#
# ### Chunks and recomputation
#
# A stage may hold several parts of the model, as in [interleaved schedules](pipeline.md), and a block may keep its input alone and compute the rest again in backward, as in [Memory](memory.md).
# `Parallel` takes both from the layout. What they change of a step's messages, on two stages of two tensor ranks, for the first rank:

# %% tags=["hide-input"]
# Table: four layers in two or four parts, with and without recomputation
FOUR, STAGES = replace(SMALL, layers=4), Layout(pp=2, tp=2, micro_batch=2, microbatches=4)
CHUNKS, AGAIN = {"schedule": "interleaved", "chunks": 2}, {"recompute": "full"}
want, rows, sends = ranks.run(alone, 1, Job(FOUR, STAGES))[0], [], []
for how in ({}, CHUNKS, AGAIN, CHUNKS | AGAIN):
    layout = replace(STAGES, **how)
    found = ranks.run(train, 4, Job(FOUR, layout))
    assert all(one["held"] == one["held_predicted"] for one in found)
    assert all(one["sent"] == one["sent_predicted"] for one in found)
    gaps = apart(found[0], want)
    assert gaps["losses"] < 5e-6 and gaps["gradients"] < 1e-5  # float32, as above
    first = found[0]
    sends.append(first["sent"])
    rows.append([str(layout)])
    for axis in ("tp", "pp"):
        rows[-1] += [f"{first['sent_predicted'][axis]:,.0f}", f"{first['sent'][axis]:,.0f}"]
    rows[-1].append(short(gaps["gradients"]))
tensor, stages = ([each[axis] for each in sends] for axis in ("tp", "pp"))
assert tensor[0] == tensor[1] < tensor[2] == tensor[3]
assert stages[0] == stages[2] < stages[1] == stages[3]
twin = mesh.predicted_sent(FOUR, STAGES, 0)["twin"]
number = 4  # bytes of the loss, which all stages get
assert stages[1] - twin - number == 3 * (stages[0] - twin - number)
assert round(tensor[2] / tensor[0], 2) == 1.22
head = ["layout"] + [x for a in ("tp", "pp") for x in (f"sends, {a} (B)", "counted")]
show.table(rows, [*head, "gradients off by"])

# %% [markdown]
# Two chunks send three times the activations, beside the twin's gradient, which stays: forward from both of the stage's parts, and a gradient back from the second.
# Recomputation sends 22 % more along the tensor axis: of each layer the first of forward's two sums once more. Behind the second stands nothing that backward needs, and torch stops where it has everything again. Where dropout or experts stand behind it, all of them come again.
#
# ### Every order, counted
#
# The same bytes under other orders: what changes is where the neighbours are. The ranks' counted bytes, in two nodes of four:

# %% tags=["hide-input"]
# Table: what leaves the two nodes under each order, predicted and counted
counted = {tuple(r["place"].items()): r["sent"] for r in results["2 × 2 × 2, ZeRO-1, sequence"]}
rows, least = [], {}
for shape in orders(SHAPES["2 × 2 × 2, ZeRO-1, sequence"]):
    predicted = shape.leaving(4, Job(SMALL, shape).sent)
    by_place = {frozenset(place): sent for place, sent in counted.items()}
    real = shape.leaving(4, lambda rank: by_place[frozenset(shape.place(rank).items())])
    total = sum(map(sum, real.values()))
    assert abs(total - sum(map(sum, predicted.values()))) < 1e-6 * total
    least[shape.order] = total
    cells = [f"{sum(real[axis]):,.0f}" for axis in ("tp", "pp", "dp")]
    rows.append([" → ".join(shape.order), *cells])
    rows[-1] += [f"{sum(map(sum, predicted.values())):,.0f}", f"{total:,.0f}"]
assert min(least, key=least.get)[-1] == "tp"
head = ["order", "tensor (B)", "pipeline (B)", "data (B)", "in all, predicted (B)", "counted (B)"]
show.table(rows, head)


# %% [markdown]
# What stands outermost pays at the door, all the rest stays inside. In a model of two layers, too, tensor outermost pays most.
# Here stages at the door send half of what copies do. That is sequence parallelism's doing: without it the $t$ ranks of a tensor group send the same activations $t$ times.
#
# ## The production library: FSDP2 over `parallelize_module`
#
# With PyTorch you cut along one axis of a mesh and shard along the other.

# %%
def torch_job(config):
    """ZeRO-3 over data × tensor parallelism, by torch alone."""
    axes = init_device_mesh(ranks.device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"embedding": RowwiseParallel(input_layouts=Replicate())}
    plan["head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    for name in ("query", "key", "value"):
        plan[f"blocks.*.attention.{name}"] = ColwiseParallel()
    plan |= {"blocks.*.attention.out": RowwiseParallel(), "blocks.*.ffn.up": ColwiseParallel()}
    plan["blocks.*.ffn.down"] = RowwiseParallel()
    model = parallelize_module(model_of(config), axes["tp"], plan, src_data_rank=None)
    for part in (*model.blocks, model):  # blocks first, what is left last
        fully_shard(part, mesh=axes["dp"])
    return model, axes["dp"].get_local_rank()


# %% [markdown]
# Ours is one line, `Parallel` of `Layout(dp=2, tp=2, zero=3)`. Five steps of both, from the same weights:

# %% tags=["hide-input"]
# Trains both, compares weights, and tries torch's clipping
UNTIED = replace(SMALL, tied=False)


def side_by_side():
    ours = parallel(Layout(dp=2, tp=2, zero=3), UNTIED)
    theirs, copy = torch_job(UNTIED)
    optimizers = adamw(ours), adamw(theirs)
    for step in range(5):
        tokens, targets = (x.chunk(2)[copy] for x in batch_of(UNTIED, 8, step))
        ours.step(tokens, targets)
        with loss_parallel():
            loss(theirs(tokens), targets).backward()
        for optimizer in optimizers:
            optimizer.step()
            if step < 4:
                optimizer.zero_grad()
    full = mesh.full_tensors(ours)
    # It gathers along one axis after the other, and warns that this is slow.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    off = max(gap(full[n], p.full_tensor()) for n, p in theirs.named_parameters())
    placed = {n: p.placements for n, p in theirs.named_parameters()}
    refused = ""
    try:
        nn.utils.clip_grad_norm_(theirs.parameters(), 1.0, foreach=False)
    except RuntimeError as error:
        refused = str(error).splitlines()[0].partition(", but got")[0]
    return off, placed["blocks.0.ffn.up.weight"], placed["blocks.0.ffn_norm.weight"], refused


off, matrix, norm, refused = ranks.run(side_by_side, 4, show=False)[0]
assert off < 1e-4 and "same mesh" in refused  # float32, after AdamW
print(f"weights differ by {short(off)}")
print("a matrix:", matrix, "\na norm:  ", norm)
print("clip_grad_norm_:", refused)


# %% [markdown]
# A `DTensor` knows how it is cut, so a matrix has two entries, one for each axis, and a norm one.
# That is also the trap: in torch 2.13 (November 2026) `clip_grad_norm_` refuses gradients of which some lie on one axis and some on two. In torchtitan the norms are made DTensors of both axes first.
#
# In [the benchmark](../benchmarks/mesh.py) ours takes 0.52 of this one's time on four ranks of two cores with 0.97 of its peak memory (loopback, a model of 8 M parameters; 0.77 with layers four times as wide, since what costs is the dispatch of each operation), and reaches 60 % of the floor, which is compute alone and the work of moving the bytes. It does not carry over to GPUs, where the dispatch hides.
#
# ### Hybrid sharding: ZeRO-3 in a node, copies across
#
# ZeRO-3 gathers each weight twice in a step. *Hybrid sharding* (HSDP) gathers within a node alone, and averages gradients between nodes {cite}`zhao2023fsdp`: two axes of copies, an inner one that shards and an outer one that repeats.
# With the parts of this course it is one line behind backward; with torch it is `fully_shard` with a mesh of two dimensions.

# %%
def hybrid():
    device, outer, inner = ranks.device().type, 2, 2
    axes = init_device_mesh(device, (outer, inner), mesh_dim_names=("copies", "shards"))
    copies, shards = (axes.get_group(name) for name in axes.mesh_dim_names)
    ours = zero.shard(model_of(UNTIED), shards, 3)
    theirs = model_of(UNTIED)
    for part in (*theirs.blocks, theirs):
        fully_shard(part, mesh=axes)
    optimizers = adamw(ours), adamw(theirs)
    for step in range(3):
        tokens, targets = (x.chunk(4)[dist.get_rank()] for x in batch_of(UNTIED, 8, step))
        with count.sent() as sent:
            loss(ours(tokens), targets).backward()
            add_up([p.grad for p in ours.parameters() if p.grad is not None], copies, scale=1 / 2)
        loss(theirs(tokens), targets).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    full = ours.full_state_dict()
    off = max(gap(full[n], p.full_tensor()) for n, p in theirs.named_parameters())
    return off, sent.within(shards).leaving(2), sent.within(copies).leaving(2), len(full)


# %% tags=["hide-input"]
# Table: what hybrid sharding sends, counted, and on 64 GPUs
off, inside, outside, tensors = ranks.run(hybrid, 4, show=False)[0]
assert off < 1e-4  # float32, after AdamW
full = 4 * sum(p.numel() for p in GPT(UNTIED).parameters())
rest = 4 * sum(p.numel() for n, p in GPT(UNTIED).named_parameters() if "blocks" not in n)
# Halves: gathered in forward, gathered in backward but for the rest, gradients; a byte a tensor.
assert inside == (3 * full - rest) / 2 + tensors
assert outside == full / 2  # 2 (2-1)/2 of this rank's half
print(f"4 ranks: weights as fully_shard's, off by {short(off)}; ", end="")
print(f"{inside:,.0f} B to the shards, {outside:,.0f} B to the copies, as predicted")
P, NODES, G = 4 * 8.03e9, 8, 8  # bytes of the weights in float32
rows = []
for name, states, door in (
    ("data parallel", 4 * P, 2 * (NODES * G - 1) / (NODES * G) * P),
    ("ZeRO-3 over 64", 4 * P / 64, 3 * (NODES * G - 1) / (NODES * G) * P),
    ("hybrid: 8 × ZeRO-3 over 8", 4 * P / 8, 2 * (NODES - 1) / NODES * P),
):
    rows.append([name, f"{states / GB:.1f}", f"{door / GB:.0f}"])
head = ["Llama 3 8B, 64 GPUs in nodes of 8", "states of a GPU (GB)", "leaves a node in a step (GB)"]
show.table(rows, head)

# %% [markdown]
# ```{admonition} Checked: "hybrid sharding keeps the traffic in the node"
# :class: checked
#
# What leaves a node falls from 95 to 56 GB, by two fifths, and not by eight: a ring over 64 ranks crosses a node's door once, not eight times, and gradients still have to cross.
# What hybrid sharding gains is that nothing *waits* at the door: gathers, which do make layers wait, stay inside. It pays with eight times the states.
# ```
#
# ## One command for any mesh

# %% tags=["measured"]
print(shardlab("mesh --dp 2 --tp 2 --pp 2 --zero 1 --layers 4 --steps 4"))

# %% [markdown]
# Every knob is an option, and `python -m shardlab mesh --help` names them. With `--budget` you say what a rank may hold:

# %%
for knobs in ("", "--tp 2", "--tp 4", "--dp 2 --tp 2", "--dp 2 --tp 2 --zero 3"):
    told = shardlab(f"mesh --hidden 64 --heads 4 {knobs} --steps 3 --budget 5e5")
    print(f"{knobs or 'one rank':22}", told.splitlines()[0].partition(", ZeRO")[0])

# %% [markdown]
# A rank that holds too much is refused before anything starts. Raising `--tp` divides everything; `--dp` divides nothing until `--zero` is raised with it.
#
# ### When more is slower

# %% tags=["measured", "hide-input"]
# Table: milliseconds of a step on 1, 2 and 4 tensor ranks, two widths
rows, slower = [], {}
for hidden, seq in ((32, 32), (512, 128)):
    times = []
    config = Config(seq=seq, layers=2, heads=4, hidden=hidden)
    for t in (1, 2, 4):
        found = ranks.run(train, t, Job(config, Layout(tp=t, micro_batch=4)))
        times.append(max(one["seconds"] for one in found))
    slower[hidden] = times[2] / times[0]
    sent = found[0]["sent"]["tp"]
    rows.append([hidden, *(f"{1e3 * s:.0f}" for s in times), f"{sent / 1e6:.1f}"])
show.timed(slower[32] > 1, "in the narrow model four ranks are slower than one")
show.timed(slower[512] < slower[32], "the wider, the less they lose")
head = ["hidden", "t = 1 (ms)", "t = 2 (ms)", "t = 4 (ms)", "a rank of 4 sends (MB)"]
show.table(rows, head)


# %% [markdown]
# Ten all-reduces a step for two layers, each of which makes all ranks wait for one another, whatever the width.
# In the narrow model they cost more than the products that they divide: more ranks are slower. In the wide one the products weigh more.
# Four ranks on two cores cannot be faster than two, either; and on GPUs it is the same with other numbers: below some width a product takes no less time on half of its columns.
#
# ## A checkpoint goes on under another mesh
#
# A checkpoint knows nothing of the mesh that saved it. Each rank writes its part of a matrix under the plain model's name, with its place in the whole; pieces of ZeRO's are gathered over the copies first. [Checkpoints](checkpoint.md) does the rest.

# %%
def go_on(folder, layout, steps):
    """Load what is there, train, save the first time; weights at the beginning and the end."""
    job = parallel(layout, UNTIED)
    training, copy = Training(job, adamw(job)), dist.get_rank(job.groups.dp)
    with Checkpoints(folder, dist.group.WORLD) as store:
        saved = store.steps()
        if saved:
            store.load(training)
        begin = job.full_state_dict()
        for _ in range(steps):
            tokens, targets = batch_of(UNTIED, 8, training.step)
            job.step(tokens.chunk(layout.dp)[copy], targets.chunk(layout.dp)[copy])
            training.optimizer.step()
            training.optimizer.zero_grad()
            training.step += 1
        if not saved:
            store.save(training)
    return begin, job.full_state_dict()


# %% tags=["hide-input"]
# Table: saved by 2 × 2 × 2, resumed by others
def bits(a, b):
    return all(torch.equal(a[name], b[name]) for name in b)


rows = []
with tempfile.TemporaryDirectory() as folder:
    first = replace(EIGHT, zero=1, sequence_parallel=True)
    _, saved = ranks.run(go_on, 8, folder, first, 2)[0]
    _, straight = ranks.run(go_on, 8, folder, first, 2)[0]
    for name, layout in (
        ("2 × 1 × 2", replace(first, pp=1)),
        ("4 × 1 × 2", Layout(dp=4, tp=2, zero=1)),
        ("1", Layout(microbatches=2)),
    ):
        begin, end = ranks.run(go_on, layout.ranks, folder, layout, 2)[0]
        assert bits(begin, saved)
        off = max(gap(end[name], straight[name]) for name in straight)
        assert off < 1e-4  # float32, after AdamW
        rows.append([name, "the same bits", "the same bits" if not off else f"off by {short(off)}"])
assert rows[0][2] == "the same bits" and rows[1][2] != "the same bits"
head = ["resumed by (data × pipeline × tensor)", "as loaded", "two steps later"]
show.table(rows, head)


# %% [markdown]
# What is loaded has the same bits everywhere. What follows has them where the order of sums is the same: a pipeline changes no sum, as long as micro-batches stay, so $p$ may change; another $t$ or $d$ adds up in another order, and differs in the last digits.
# Dropout goes on with the same numbers, too, where `PlacedDropout` draws them and $d \cdot m$ stays: [the tests](../tests/test_mesh.py) hold it to the bit.
#
# ## What goes wrong before it starts
#
# What no mesh can train is refused on every rank, or before there are any, in one sentence:

# %%
def said(make):
    try:
        make()
    except ValueError as error:
        print(error)


said(lambda: EIGHT.check(6))
said(lambda: Job(replace(SMALL, heads=2), Layout(tp=4)))
said(lambda: Job(SMALL, replace(EIGHT, zero=3)))
said(lambda: Job(SMALL, Layout(pp=3)))
said(lambda: Job(SMALL, Layout(cp=2)))


# %% [markdown]
# The last one names what `Parallel` leaves out: contexts and experts over ranks, ZeRO in repeated groups, offload, schedules that split the backward, and recomputation of some operators alone. Most of it has a lesson of its own, without the other cuts; `mesh.left_out(config, layout)` says what of a layout it is.

# %%
def a_mesh_without_rank_3():
    axes = init_device_mesh("cpu", (1, 1, 4), mesh_dim_names=("dp", "pp", "tp"))
    part = torch.distributed.device_mesh.DeviceMesh(
        "cpu", axes.mesh[..., :3], mesh_dim_names=("dp", "pp", "tp")
    )
    return mesh.groups_of(part) and None


try:
    # CPU: a mesh is refused, on no device
    ranks.run(a_mesh_without_rank_3, 4, device="cpu", show=False)
except ranks.RankError as error:
    print(str(error).splitlines()[0])


# %% [markdown]
# ## When to use it
#
# | for | against |
# |---|---|
# | Each cut stays in the range where it is cheap: tensor within a node, stages where activations are few, copies outside | Three kinds of messages, three groups, and the faults above, none of which raises an error |
# | Divides everything: states by $t \cdot p$, and with ZeRO-1 the optimizer by $d$ as well | Micro-batches are needed for stages, and copies divide the batch: small batches leave nothing for either |
# | One model file, which knows nothing of it | With stages this page's ZeRO stops at 1: each micro-batch would gather or scatter everything anew. Llama 3 pays for the gradients: it shards them, too, with 16 stages {cite}`dubey2024llama3` |
#
# In a real job these show that it is set up right: the first loss and the first norm are those of one process; norms' weights are equal over a tensor group, to the bit, after a thousand steps; the tied embedding is equal on the first and last stage; nothing of the tensor groups shows up on the network's counters.
# Where the first norm is another one, [parity](parity.md) says of which tensor it comes, and on which ranks.
#
# ## Exercises
#
# Each exercise has a check; where ranks are needed, it runs your answer on real ones.
#
# ```{exercise-start} Who is with whom (easy)
# :label: ex-mesh-groups
# ```
#
# Return three lists for `rank`: its data group, its pipeline and its tensor group, with ranks in ascending order. The order is data, pipeline, tensor, from the outermost in.

# %%
def my_groups(rank, d, p, t):
    pass  # your code


check(my_groups)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-mesh-groups
# :label: sol-mesh-groups
# :class: dropdown
# ```
#
# The last digit counts to $t$, the one before to $p$: a step along the pipeline is $t$ ranks, one along the copies $p \cdot t$.

# %%
def my_groups(rank, d, p, t):
    part, stage, copy = rank % t, rank // t % p, rank // (p * t)
    data = [part + t * stage + p * t * i for i in range(d)]
    stages = [part + t * i + p * t * copy for i in range(p)]
    tensor = [i + t * stage + p * t * copy for i in range(t)]
    return data, stages, tensor


check(my_groups)

# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} A budget (easy)
# :label: ex-mesh-budget
# ```
#
# A model of `--layers 2 --hidden 64 --heads 4` takes 1.9 MB of model states. Find knobs (`--dp`, `--tp`, `--pp`, `--zero`) for `python -m shardlab mesh` with which no rank holds more than 300,000 bytes, on eight ranks at most and with a batch of 8.

# %%
answer = "--tp 2"  # knobs
check(answer, "mesh_budget")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-mesh-budget
# :label: sol-mesh-budget
# :class: dropdown
# ```
#
# Eight ranks have to share nearly everything, gradients and weights included: ZeRO's stage 3, or tensor ranks, or both. ZeRO-1 leaves weights and gradients whole in every copy.

# %%
answer = "--dp 2 --tp 4 --zero 3"
check(answer, "mesh_budget")


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} One norm (medium)
# :label: ex-mesh-norm
# ```
#
# A tied GPT is cut over `groups.pp` and `groups.tp`; there is one copy. `gradients` are this rank's, by the plain model's names; `cut` are the names of those of which each tensor rank has a part, all others lie whole on every rank of a tensor group. The embedding's gradient is on the first stage as `embedding.weight`, and once more on the last as `head.weight`.
# Return the norm of one process's gradients, a scalar tensor, on every rank.

# %%
def my_norm(gradients, cut, groups):
    pass  # your code


check(my_norm)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-mesh-norm
# :label: sol-mesh-norm
# :class: dropdown
# ```
#
# Every number once: what is whole counts on the first tensor rank, the twin not at all. Then the squares are added up along both axes.

# %%
def my_norm(gradients, cut, groups):
    square = torch.zeros((), device=next(iter(gradients.values())).device)
    for name, gradient in gradients.items():
        first = dist.get_rank(groups.tp) == 0
        if name != "head.weight" and (name in cut or first):
            square += gradient.square().sum()
    dist.all_reduce(square, group=groups.tp)
    dist.all_reduce(square, group=groups.pp)
    return square.sqrt()


check(my_norm)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Which mesh? (design)
# :label: ex-mesh-choice
# ```
#
# Return a `Layout` of `ranks` ranks for `config`, with `zero=1`, such that every rank holds at most `limit` bytes of model states and that as few bytes as possible leave the nodes of `node` ranks in a step of `batch` sequences in all; `None` if none fits. Allowed are $t$ and $p$ that divide the model (`mesh.check_cuts(config, layout)` raises ValueError for others) and $d$ that divide `batch`.
# At hand are `mesh.predicted_states(config, layout, rank)`, `mesh.predicted_sent(config, layout, rank, config.seq, batch // d)` and `layout.leaving(node, sent)`, where `sent` is a function of the rank.

# %%
def my_mesh(config, ranks, node, limit, batch):
    pass  # your code


check(my_mesh)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-mesh-choice
# :label: sol-mesh-choice
# :class: dropdown
# ```
#
# Try them all: there are few. What leaves is what the functions say, summed over axes and nodes.

# %%
def my_mesh(config, ranks, node, limit, batch):
    best, least = None, float("inf")
    sizes = [n for n in range(1, ranks + 1) if ranks % n == 0]
    for d, t in ((d, t) for d in sizes for t in sizes if ranks % (d * t) == 0):
        layout = Layout(dp=d, pp=ranks // (d * t), tp=t, zero=1)
        try:
            mesh.check_cuts(config, layout)
        except ValueError:
            continue
        held = (mesh.predicted_states(config, layout, r) for r in range(ranks))
        if batch % d or max(sum(one.values()) for one in held) > limit:
            continue
        how = config.seq, batch // d
        out = layout.leaving(node, lambda r: mesh.predicted_sent(config, layout, r, *how))
        if (total := sum(map(sum, out.values()))) < least:
            best, least = layout, total
    return best


check(my_mesh)

# %% [markdown]
# ```{solution-end}
# ```
#
# ## Summary
#
# - A rank's number is its place in a box, digit by digit; a group is the ranks that differ in one digit.
# - The last digit is the tensor group's, which sends in every layer. Other orders send up to 24 times as much out of a node.
# - Apply matrices, then layers, then copies; sum in a step from the layers out: tensor, pipeline, twins, copies, norms.
# - Every number counts once in the norm; the twin's and the norms' gradients are summed; copies weigh by their sequences; dropout follows the place, not the rank.
# - Held and sent bytes are predictable to the byte, for every group.
# - A checkpoint fits any mesh: the same bits as loaded, and afterwards where the order of sums is the same.
#
# ## Further reading
#
# - {cite:t}`narayanan2021megatron`: all three at once on 3,072 GPUs, with the rules of which goes where.
# - {cite:t}`korthikanti2022recomputation`: sequence parallelism, and why stages then send a $t$-th.
# - {cite:t}`dubey2024llama3`: section 3.3, the order of axes of a job on 16,384 GPUs.
# - {cite:t}`zhao2023fsdp`: hybrid sharding is section 3.2.2.
