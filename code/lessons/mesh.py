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
# # Meshes: data, pipeline and tensor parallelism at once
#
# After this lesson you can
#
# - name the groups of any rank, and count the bytes that an order of ranks costs;
# - train one model by data, pipeline and tensor parallelism at once, and show that it equals one process;
# - say how gradient clipping, tied embeddings, LayerNorms, dropout and uneven batches change on a mesh, and which errors follow otherwise;
# - predict the bytes that each rank holds and sends, and resume from a checkpoint under another mesh;
# - read code that applies FSDP2 over `parallelize_module` on a `DeviceMesh`.
#
# Llama 3 70B is trained on 512 GPUs, 8 in a node. Each matrix is cut over 8 ranks, the layers are cut into 4 stages, and there are 16 copies of the model.
# There are six ways to number these ranks. With the best numbering each GPU sends 26 GB out of its node in a step; with the worst, 24 times as much.
#
# ```{quiz} together-before
# ```
#
# A *mesh* is an arrangement of ranks with an axis for each cut. This table has the words for the three axes of this lesson:
#
# | axis | degree | its groups: the ranks that … | in the course's code, and usually in torch's `DeviceMesh` | Megatron-LM | DeepSpeed |
# |---|---|---|---|---|---|
# | data | $d$, the number of copies | hold the same part of the model, one in each copy | `dp` | `dp` | `data` |
# | pipeline | $p$, the number of stages | hold the stages of one copy | `pp` | `pp` | `pipe` |
# | tensor | $t$ | hold parts of the same matrices | `tp` | `tp` | `model` |
#
# The *degree* of an axis is the number of ranks in each of its groups. A *copy* is one whole model, on $p \cdot t$ ranks.
# Along the *innermost* axis, neighbours have consecutive rank numbers.

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

from shardcourse.exercises import check
from shardlab import mesh, ranks, zero
from shardlab import tensor_parallel as tp
from shardlab.checkpoint import Checkpoints, Training
from shardlab.common import show
from shardlab.common.shapes import PRESETS, Config
from shardlab.data_parallel.buckets import all_reduce_gradients
from shardlab.gpt.model import GPT, loss
from shardlab.layout import Layout, list_axis_orders
from shardlab.measure import count
from shardlab.mesh import Parallel, picture
from shardlab.mesh.job import Job, build_model, compare_runs, load_batch
from shardlab.mesh.job import train_on_rank, train_single_process
from shardtools.commands.mesh import add_command

show.set_style()
SMALL = Config(vocab=256, seq=16, layers=2, heads=4, hidden=32)
EIGHT = Layout(dp=2, pp=2, tp=2, microbatches=2)
GB = 1e9


def make_adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def format_gap(difference):
    """A difference with one digit; 0 is exactly that."""
    return f"{difference:.0e}" if difference else "0"


def max_difference(a, b):
    """The largest difference between two tensors."""
    return (a - b).abs().max().item()


def make_parallel(layout, config=SMALL):
    """The same GPT on every rank, cut along three axes."""
    return Parallel(build_model(config), mesh.create_groups(layout, dist.group.WORLD), layout)


def run_shardlab(line):
    """What `python -m shardlab …` prints."""
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers())
    chosen = parser.parse_args(line.split())
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        chosen.command(chosen)
    return printed.getvalue().rstrip()


# %% tags=["hide-input"]
# Table: bytes that leave a node under each order, for Llama 3 70B on 512 GPUs
LLAMA = PRESETS["llama-3-70b"]


def count_beyond_node(shape, config, batch, seq, node=8):
    """Bytes that leave the busiest node in a step, for each of its GPUs, by axis."""
    step = partial(mesh.predict_sent_bytes, config, batch=batch, seq=seq)
    stages = [step(shape, shape.find_rank(pp=i)) for i in range(shape.pp)]
    found = shape.count_node_egress(node, lambda rank: stages[shape.get_coordinates(rank)["pp"]])
    return {axis: max(each) / node for axis, each in found.items()}


rows, totals = [], {}
for shape in list_axis_orders(Layout(dp=16, pp=4, tp=8)):
    found = count_beyond_node(shape, LLAMA, batch=16, seq=8192)
    totals[shape.order] = sum(found.values())
    cells = [f"{found[axis] / GB:.1f}" for axis in ("tp", "pp", "dp")]
    rows.append([" → ".join(shape.order), *cells, f"{totals[shape.order] / GB:.0f}"])
assert round(min(totals.values()) / GB) == 26
assert round(max(totals.values()) / min(totals.values())) == 24
head = ["order, outermost → innermost", "tensor (GB)", "pipeline (GB)", "data (GB)"]
show.table(rows, [*head, "in all, for each GPU (GB)"])


# %% [markdown]
# Each copy takes 16 sequences of 8,192 tokens. The bytes are those of float32; bfloat16 sends half.
#
# ## From a list of ranks to a mesh
#
# A launcher gives you $N$ ranks with numbers from 0 to $N-1$. Three cuts need $N = d \cdot p \cdot t$ of them, and each rank is in three groups.
# Its number tells which three. Read the number as three digits: the first counts the $d$ copies, the second the $p$ stages, the last the $t$ ranks of a tensor group.
# Two ranks are in one group when their numbers differ in one digit only.

# %%
def groups(sizes, axis):
    """All groups along one axis of a box with N = product of `sizes` ranks in it."""
    box = torch.arange(torch.Size(sizes).numel()).view(sizes)
    return box.movedim(axis, -1).flatten(0, -2).tolist()


for axis, name in enumerate(("data", "pipeline", "tensor")):
    print(f"{name:8}", groups((2, 2, 2), axis))

# %% [markdown]
# The picture shows the groups, for nodes of four ranks. Put your own numbers into the cell's first line, or into the form below it, which runs in your browser:

# %%
DEGREES, NODE = Layout(dp=2, pp=2, tp=2), 4  # ranks in a node
figure, alt = picture.draw_groups(DEGREES, NODE), picture.write_alt_text(DEGREES, NODE)
show.figure(figure, alt, "mesh-groups")

# %% [markdown]
# :::{calculator} mesh
# :dp: 2
# :pp: 2
# :tp: 2
# :node: 4
# :::
#
# A line joins the ranks of a group; a dashed line leaves its node. With `order=("tp", "pp", "dp")` tensor is outermost, and its groups leave their nodes:

# %%
WRONG = replace(DEGREES, order=("tp", "pp", "dp"))
figure, alt = picture.draw_groups(WRONG, NODE), picture.write_alt_text(WRONG, NODE)
show.figure(figure, alt, "mesh-wrong-order")

# %% [markdown]
# ### Why tensor parallelism is the innermost axis
#
# Along the three axes ranks send at different moments, and different amounts. $B S H$ is one activation: batch times sequence times hidden size.
#
# ![What a rank of a 2 × 2 × 2 mesh sends in one step with two micro-batches, along a line of time. Along the tensor axis an all-reduce of B S H numbers several times in every layer, in forward and in backward. Along the pipeline axis one message of B S H numbers after the stage's last layer for each micro-batch, and one back. Along the data axis the gradients, once, at the end.](../figures/mesh_step.svg)
#
# - **Tensor** ranks sum activations four times in every *layer*, and the layer waits for each sum. So this axis needs the fastest links: it is innermost, which keeps its groups inside a node.
# - **Pipeline** ranks send one such activation for each *stage* and micro-batch to one other rank, which sends its gradient back. A network between nodes carries that well {cite}`narayanan2021megatron`.
# - **Data** ranks sum gradients once in each *step*, however many micro-batches it has. Nobody waits for them before the step ends.
#
# Where tensor groups fill the nodes, the order of the other two axes does not change the bytes that leave a node: rows one and three of the table are equal. The order changes the bytes that leave a rack.
# Megatron-LM makes pipeline the outermost axis, which often sends fewer bytes. Llama 3's job makes data the outermost, as this page does, since gradients can arrive late without a rank waiting {cite}`dubey2024llama3`.
#
# ### PyTorch's `init_device_mesh`
#
# `init_device_mesh` takes the degrees, outermost first, and makes the groups. `mesh.create_groups` does the same, in fewer lines:

# %% tags=["hide-input"]
# Shows the module's create_groups
show.source(mesh.create_groups)


# %%
def compare_groups():
    ours = mesh.create_groups(EIGHT, dist.group.WORLD)
    kind = ranks.device().type
    theirs = init_device_mesh(kind, (2, 2, 2), mesh_dim_names=("dp", "pp", "tp"))
    members = dist.get_process_group_ranks
    return [(members(a), members(b)) for a, b in zip(ours, mesh.get_mesh_groups(theirs))]


joined = ranks.run(compare_groups, 8)
assert all(ours == theirs for rank in joined for ours, theirs in rank)
print("rank 5 is with", *(ours for ours, _ in joined[5]), "in both")


# %% [markdown]
# From here on functions take the groups as arguments. `mesh.get_mesh_groups` reads them from a `DeviceMesh`.
#
# ## Three-dimensional parallelism in plain code
#
# There are two layers, one on each stage. Each is a feed-forward network, $Y = \mathrm{GELU}(X W_1) W_2$, whose two matrices are cut in halves over a tensor group. Each of two copies takes half of the batch.
# In names of tensors `B` is the batch, `H` the hidden size, `F` the network's width, and `f` this rank's half of it.
# Every line is from an earlier lesson.

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
# Compares all eight ranks' gradients with one process's
def draw_weights():
    torch.manual_seed(0)
    layers = [(torch.randn(8, 32) / 3, torch.randn(32, 8) / 6) for _ in range(2)]
    return layers, torch.randn(4, 8)


def run_plain_step():
    layers, x_BH = draw_weights()
    layers = [[w.to(ranks.device()) for w in layer] for layer in layers]
    groups = mesh.create_groups(EIGHT, dist.group.WORLD)
    return plain_step(layers, x_BH.to(ranks.device()), groups)


layers, y_BH = draw_weights()
for weight in sum(layers, ()):
    weight.requires_grad_()
for up_HF, down_FH in layers:
    y_BH = gelu(y_BH @ up_HF) @ down_FH
y_BH.square().mean().backward()
worst = 0.0
for _, stage, part, dup, ddown in ranks.run(run_plain_step, 8):
    up_HF, down_FH = layers[stage]
    worst = max(worst, max_difference(dup, up_HF.grad.chunk(2, 1)[part]))
    worst = max(worst, max_difference(ddown, down_FH.grad.chunk(2, 0)[part]))
assert worst < 1e-6  # float32, gradients up to 0.1
print(f"8 ranks, each with a quarter of the weights: gradients off by {format_gap(worst)}")

# %% [markdown]
# This plain form leaves out micro-batches, without which one stage always waits for the other; a batch that the copies do not divide evenly; a loss over a vocabulary; clipping; and ZeRO, without which every copy holds all optimizer states.
#
# ## The module `Parallel`: matrices, then layers, then ZeRO
#
# `Parallel` takes a plain GPT, three groups and the layout, and cuts the model three times, each time by the module of that cut's own lesson.
# It cuts matrices first, then layers. ZeRO comes last, and shards a rank's remaining parameters over the copies.
#
# The code uses two words in a meaning of its own:
#
# - *Twins* are the two tensors of a tied embedding: one is the embedding of the first stage, the other the output layer of the last stage. Each stage computes its own gradient.
# - A parameter is *partly* seen when every tensor rank has the whole parameter, but computes its gradient from a $t$-th of the tokens. With [sequence parallelism](sequence_parallel.md) these are the LayerNorms and the *late biases*: biases that are added after a sum over tensor ranks.

# %% tags=["hide-input"]
# Shows how the cuts are applied
show.source(
    Parallel.__init__,
    Parallel._shard_matrices,
    Parallel._split_layers,
    Parallel._shard_replicas,
)

# %% [markdown]
# A step sums gradients within the layers first, then between stages, and over the copies last. No group repeats a sum that another group has made.

# %% tags=["hide-input"]
# Shows a step
show.source(Parallel.step, Parallel._compute_loss, Parallel._average_loss)

# %% [markdown]
# Two steps are new:
#
# - Each copy's loss has a *weight*, so that the average over copies is the mean over all tokens with a target. Copies may have different numbers of such tokens: fewer sequences, or more targets of −100.
# - The gradients of partly seen parameters are summed over the tensor group at the very end: by then each rank has only its ZeRO shard of these gradients, and the message is short.
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
results = {
    name: ranks.run(train_on_rank, job.layout.world_size, job) for name, job in JOBS.items()
}

# %% tags=["hide-input"]
# Table: differences of losses, gradients and weights from one process
want = ranks.run(train_single_process, 1, JOBS["1 × 2 × 2, GPipe"])[0]
rows = []
for name, found in results.items():
    gaps = compare_runs(found[0], want)
    # Float32: losses of 5.5 in units of 5e-7; another order of sums; AdamW divides by gradients,
    # which makes 1e-7 of a gradient near 0 up to 1e-5 of a weight.
    assert gaps["losses"] < 5e-6 and gaps["gradients"] < 1e-5 and gaps["weights"] < 1e-4
    rows.append([name, SHAPES[name].world_size, *map(format_gap, gaps.values())])
head = ["data × pipeline × tensor", "ranks", "losses", "last gradients", "weights"]
show.table(rows, head)

# %% [markdown]
# The table has the largest difference of any element. The differences come from sums in a different order.
# In float64 [the tests](../tests/test_contract.py) hold two dozen meshes to $10^{-11}$ after each of five steps, all with clipping, some with uneven batches, several model chunks on a stage, or recomputation.
#
# ## Clipping, tied embeddings, LayerNorms and dropout on a mesh
#
# Code for each of these is right with one kind of parallelism, and wrong as soon as another kind is added.
#
# ### The gradient norm: count every element once
#
# To clip gradients you need their global norm, for which all ranks add up their squares. But some gradients are on several ranks, and must count once.
#
# ![What counts for the gradient norm, on two stages with two tensor ranks each. Parts of matrices are on one rank, and count there. LayerNorms and late biases are whole on both tensor ranks, and count on the first. The tied embedding is on both stages, and counts on the first.](../figures/mesh_norm.svg)
#
# `Parallel` decides which rank counts which gradient. The sum and the scaling are those of the other lessons, [`clip_by_global_norm`](../code/shardlab/data_parallel/buckets.py).

# %% tags=["hide-input"]
# Shows which rank counts which gradient
show.source(Parallel.clip_grad_norm_, Parallel._is_counted_in_norm)


# %% tags=["hide-input"]
# Table: the gradient norm, and two ways to get it wrong
def compute_norms():
    job = make_parallel(Layout(pp=2, tp=2, microbatches=2, sequence_parallel=True))
    with torch.no_grad():  # such that norms have gradients that one sees
        for name, parameter in job.named_parameters():
            if "norm" in name:
                parameter.mul_(0.1)
    reference = build_model(SMALL)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "norm" in name:
                parameter.mul_(0.1)
    tokens, targets = load_batch(SMALL, 4, 0)
    loss(reference(tokens), targets).backward()
    job.step(tokens, targets)
    local = nn.utils.get_total_norm([p.grad for p in job.parameters()])
    square = local.square()
    dist.all_reduce(square)
    full = nn.utils.get_total_norm([p.grad for p in reference.parameters()])
    return [x.item() for x in (full, job.clip_grad_norm_(1e9), square.sqrt(), local)]


found = ranks.run(compute_norms, 4)
one, ours, everything, _ = found[0]
assert abs(ours - one) < 1e-5 * one < 0.02 * one < everything - one
rows = [
    ("one process", f"{one:.4f}"),
    ("Parallel.clip_grad_norm_, on every rank", f"{ours:.4f}"),
    ("all squares of all ranks", f"{everything:.4f}"),
    ("torch's clip_grad_norm_, rank by rank", ", ".join(f"{r[3]:.4f}" for r in found)),
]
show.table(rows, ["who adds up what", "gradient norm"])


# %% [markdown]
# In row three a LayerNorm counts $t$ times and the tied embedding twice. Training runs on, but gradients are clipped more than you asked for, by a factor that depends on the mesh.
# In the last row every rank scales its gradients by a different factor. A LayerNorm that was equal on two ranks is then no longer equal.
#
# ### Tied embeddings, LayerNorms, and a short batch
#
# Three sums keep the copies and the tensor ranks right. Each row of the next table leaves one of them out:
#
# - *the twins do not meet*: the two gradients of the tied embedding, on the first and the last stage, are not added up;
# - *norms are not summed*: the gradients of LayerNorms and late biases include only a $t$-th of the tokens;
# - *copies weigh the same*: the average over copies ignores that one copy has three sequences and the other has one.

# %%
def run_faulty_step(fault, sizes=(3, 1)):
    """A step with a fault in it: how far each gradient is off, in parts of its own norm."""
    job = make_parallel(replace(EIGHT, zero=1, sequence_parallel=True, microbatches=1))
    if fault == "the twins do not meet":
        job.pipeline.tied_parameter = None
    elif fault == "norms are not summed":
        job.partial_grads = set()
    elif fault == "copies weigh the same":
        job.pipeline.passes.loss = lambda x, y: tp.vocab_parallel_loss(x, y, job.groups.tp)
    tokens, targets = load_batch(SMALL, 4, 0)
    copy = dist.get_rank(job.groups.dp)
    job.step(tokens.split(sizes)[copy], targets.split(sizes)[copy])
    reference = build_model(SMALL)
    loss(reference(tokens), targets).backward()
    found = mesh.gather_model_tensors(job, lambda piece: piece.grad)
    wanted = {n: p.grad for n, p in reference.named_parameters()}
    return {n: ((found[n] - w).norm() / w.norm()).item() for n, w in wanted.items()}


FAULTS = ["none", "the twins do not meet", "norms are not summed", "copies weigh the same"]


# %% tags=["hide-input"]
# Table: which gradients each fault spoils
def run_all_faults():
    return [run_faulty_step(fault) for fault in FAULTS]


rows = []
for fault, found in zip(FAULTS, ranks.run(run_all_faults, 8)[0]):
    found = {n: off for n, off in found.items() if "key.bias" not in n}  # these are 0 anyway
    wrong = [n for n in found if found[n] > 1e-3]
    worst = max(found, key=found.get)
    worst_text = f"{100 * found[worst]:.0f} % ({worst})" if wrong else format_gap(found[worst])
    rows.append([fault, f"{len(wrong)} of {len(found)}", worst_text])
    assert bool(wrong) == (fault != "none")
show.table(rows, ["fault", "gradients that are wrong", "the worst of them"])


# %% [markdown]
# No fault raises an error.
# The first fault spoils one tensor, whose twins then become different. The second spoils LayerNorms and late biases. The third spoils every tensor and is the hardest to find: it needs copies with different numbers of sequences, which few tests have.
#
# ### Dropout: which ranks draw the same mask
#
# Outside the cut matrices all ranks of a *tensor* group hold the same activations, so they need the same dropout mask. Each *copy* and each *stage* needs its own mask.
# A seed for each rank breaks the first rule; one seed on all ranks breaks the second.

# %%
def draw_masks(seeded):
    groups = mesh.create_groups(Layout(dp=2, tp=2), dist.group.WORLD)
    copy = dist.get_rank(groups.dp)
    torch.manual_seed({"one seed": 0, "by rank": dist.get_rank(), "by copy": copy}[seeded])
    return nn.functional.dropout(torch.ones(1000), 0.5) > 0


# %% tags=["hide-input"]
# Table: shares of equal dropout masks between ranks
rows = []
for seeded in ("one seed", "by rank", "by copy"):
    # CPU: masks by the CPU's generator
    found = ranks.run(draw_masks, 4, seeded, device="cpu")
    alike = [(found[0] == found[other]).float().mean().item() for other in (1, 2)]
    rows.append([seeded, *(f"{100 * fraction:.0f} %" for fraction in alike)])
    right = alike[0] == 1 and abs(alike[1] - 0.5) < 0.1
    assert right == (seeded == "by copy")
show.table(rows, ["seeds", "alike in a tensor group", "alike in two copies"])

# %% [markdown]
# Independent masks agree in 50 % of the elements. So `Parallel` seeds torch's generator by copy and stage; within a tensor group, [each rank draws for itself](tensor_parallel.md#dropout-seeds-inside-and-outside-the-regions) only where activations are cut.
# Another mesh draws other masks: compare with one process at dropout 0.
#
# ## What it costs
#
# ### Bytes that a rank holds and sends
#
# For the ranks of one copy of the 2 × 2 × 2 job, the table compares the predictions of `mesh.predict` with the bytes held, and sent in a step.
# The columns *stage* and *part* are the rank's place along the pipeline and the tensor axis.

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
# Predicted and counted bytes are equal, with padding and scalars. The second stage holds more, since it has the last LayerNorm.
#
# ### Bytes between nodes, by order of the axes
#
# Every order sends the same number of bytes, but a different part of them leaves a node. With two nodes of four ranks:

# %% tags=["hide-input"]
# Table: bytes that leave the two nodes under each order, predicted and counted
counted = {tuple(r["place"].items()): r["sent"] for r in results["2 × 2 × 2, ZeRO-1, sequence"]}
rows, least = [], {}
for shape in list_axis_orders(SHAPES["2 × 2 × 2, ZeRO-1, sequence"]):
    predicted = shape.count_node_egress(4, Job(SMALL, shape).predict_sent_bytes)
    by_place = {frozenset(place): sent for place, sent in counted.items()}
    at = shape.get_coordinates
    real = shape.count_node_egress(4, lambda rank: by_place[frozenset(at(rank).items())])
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
# With two nodes only the messages of the outermost axis leave a node. The tensor axis is the worst outermost axis, even in a model of two layers.
# The pipeline axis sends half as much as the data axis. Without sequence parallelism it would send more: all $t$ ranks of a tensor group would send the same activation to the next stage.
#
# ## The production library: FSDP2 over `parallelize_module`
#
# In PyTorch you cut the matrices along one axis of a `DeviceMesh`, and shard the parameters along the other.

# %%
def build_torch_model(config):
    """ZeRO-3 over data × tensor parallelism, by torch alone."""
    axes = init_device_mesh(ranks.device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"embedding": RowwiseParallel(input_layouts=Replicate())}
    plan["head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    for name in ("query", "key", "value"):
        plan[f"blocks.*.attention.{name}"] = ColwiseParallel()
    plan |= {"blocks.*.attention.out": RowwiseParallel(), "blocks.*.ffn.up": ColwiseParallel()}
    plan["blocks.*.ffn.down"] = RowwiseParallel()
    model = parallelize_module(build_model(config), axes["tp"], plan, src_data_rank=None)
    for part in (*model.blocks, model):  # blocks first, the rest last
        fully_shard(part, mesh=axes["dp"])
    return model, axes["dp"].get_local_rank()


# %% [markdown]
# The course's module for the same job is `Parallel` with `Layout(dp=2, tp=2, zero=3)`. The cell trains both for five steps from the same weights:

# %% tags=["hide-input"]
# Trains both, compares weights, and tries torch's clipping
UNTIED = replace(SMALL, tied=False)


def train_side_by_side():
    ours = make_parallel(Layout(dp=2, tp=2, zero=3), UNTIED)
    theirs, copy = build_torch_model(UNTIED)
    optimizers = make_adamw(ours), make_adamw(theirs)
    for step in range(5):
        tokens, targets = (x.chunk(2)[copy] for x in load_batch(UNTIED, 8, step))
        ours.step(tokens, targets)
        with loss_parallel():
            loss(theirs(tokens), targets).backward()
        for optimizer in optimizers:
            optimizer.step()
            if step < 4:
                optimizer.zero_grad()
    full = mesh.gather_model_tensors(ours)
    # It gathers along one axis after the other, and warns that this is slow.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    off = max(max_difference(full[n], p.full_tensor()) for n, p in theirs.named_parameters())
    placed = {n: p.placements for n, p in theirs.named_parameters()}
    refused = ""
    try:
        nn.utils.clip_grad_norm_(theirs.parameters(), 1.0, foreach=False)
    except RuntimeError as error:
        refused = str(error).splitlines()[0].partition(", but got")[0]
    return off, placed["blocks.0.ffn.up.weight"], placed["blocks.0.ffn_norm.weight"], refused


off, matrix, norm, refused = ranks.run(train_side_by_side, 4, show=False)[0]
assert off < 1e-4 and "same mesh" in refused  # float32, after AdamW
print(f"weights differ by {format_gap(off)}")
print("a matrix:   ", matrix, "\na LayerNorm:", norm)
print("clip_grad_norm_:", refused)

# %% [markdown]
# A `DTensor` knows how it is cut. A matrix is cut along two axes and has two entries; a LayerNorm is cut along one axis and has one entry.
# So in torch 2.13 (November 2026) `clip_grad_norm_` refuses these gradients, of which some have one axis and some have two. torchtitan first makes LayerNorms DTensors with both axes.
#
# In [the benchmark](../benchmarks/mesh.py), with a model of 8 M parameters on four ranks of two cores over loopback, our `Parallel` takes 0.52 of torch's time and 0.97 of its peak memory. With layers four times as wide it takes 0.77 of the time, since most of the difference is the dispatch of each operation. The lower bound of the time, computing and moving the bytes alone, is 60 % of ours. These ratios do not hold on GPUs, where dispatch runs ahead of the computation.
#
# ## The command `python -m shardlab mesh`

# %% tags=["measured"]
print(run_shardlab("mesh --dp 2 --tp 2 --pp 2 --zero 1 --layers 4 --steps 4"))

# %% [markdown]
# `python -m shardlab mesh --help` names all options. `--budget` limits the bytes that a rank may hold:

# %%
for options in ("", "--tp 2", "--tp 4", "--dp 2 --tp 2", "--dp 2 --tp 2 --zero 3"):
    printed = run_shardlab(f"mesh --hidden 64 --heads 4 {options} --steps 3 --budget 5e5")
    print(f"{options or 'one rank':22}", printed.splitlines()[0].partition(", ZeRO")[0])


# %% [markdown]
# A layout whose fullest rank would hold too much is refused before anything starts. A larger `--tp` divides everything that a rank holds; a larger `--dp` divides nothing unless `--zero` is larger, too.
#
# A layout that no mesh can train is refused in the same way, with one sentence on every rank:

# %%
def print_error(make):
    try:
        make()
    except ValueError as error:
        print(error)


print_error(lambda: EIGHT.check_world_size(6))
print_error(lambda: Job(replace(SMALL, heads=2), Layout(tp=4)))
print_error(lambda: Job(SMALL, replace(EIGHT, zero=3)))
print_error(lambda: Job(SMALL, Layout(pp=3)))
print_error(lambda: Job(SMALL, Layout(cp=2)))

# %% [markdown]
# `Parallel` also trains interleaved schedules with several chunks on a stage, and full recomputation; [the tests](../tests/test_mesh.py) count their bytes.
# It leaves out context parallelism, experts over ranks, ZeRO in repeated groups, offload, schedules that split the backward, and recomputation of some operators only. `mesh.find_unsupported(config, layout)` lists the settings of a layout that it does not train.
#
# ## Resuming from a checkpoint under another mesh
#
# A checkpoint does not depend on the mesh that saved it. Each rank writes its part of a matrix under the plain model's name, with its place in the whole matrix. ZeRO's shards are gathered over the copies first. [Checkpoints](checkpoint.md) explains the rest.

# %% tags=["hide-input"]
# Shows each part under the plain model's name
show.source(Parallel.named_parameters, Parallel.pieces, Parallel.full_state_dict)


# %% [markdown]
# The next cell saves under one mesh and resumes under others.

# %% tags=["hide-input"]
# Table: saved by 2 × 2 × 2, resumed by others
def resume_training(folder, layout, steps):
    """Load what is there, train, save the first time; weights at the beginning and the end."""
    job = make_parallel(layout, UNTIED)
    training, copy = Training(job, make_adamw(job)), dist.get_rank(job.groups.dp)
    with Checkpoints(folder, dist.group.WORLD) as store:
        saved = store.list_steps()
        if saved:
            store.load(training)
        begin = job.full_state_dict()
        for _ in range(steps):
            tokens, targets = load_batch(UNTIED, 8, training.step)
            job.step(tokens.chunk(layout.dp)[copy], targets.chunk(layout.dp)[copy])
            training.optimizer.step()
            training.optimizer.zero_grad()
            training.step += 1
        if not saved:
            store.save(training)
    return begin, job.full_state_dict()


def are_equal(a, b):
    return all(torch.equal(a[name], b[name]) for name in b)


rows = []
with tempfile.TemporaryDirectory() as folder:
    first = replace(EIGHT, zero=1, sequence_parallel=True)
    _, saved = ranks.run(resume_training, 8, folder, first, 2)[0]
    _, straight = ranks.run(resume_training, 8, folder, first, 2)[0]
    for name, layout in (
        ("2 × 1 × 2", replace(first, pp=1)),
        ("4 × 1 × 2", Layout(dp=4, tp=2, zero=1)),
        ("1", Layout(microbatches=2)),
    ):
        begin, end = ranks.run(resume_training, layout.world_size, folder, layout, 2)[0]
        assert are_equal(begin, saved)
        off = max(max_difference(end[name], straight[name]) for name in straight)
        assert off < 1e-4  # float32, after AdamW
        after = f"off by {format_gap(off)}" if off else "the same bits"
        rows.append([name, "the same bits", after])
assert rows[0][2] == "the same bits" and rows[1][2] != "the same bits"
head = ["resumed by (data × pipeline × tensor)", "as loaded", "two steps later"]
show.table(rows, head)


# %% [markdown]
# The weights as loaded have the same bits under every mesh. Two steps later the bits are the same only if sums are made in the same order.
# A new $p$ changes no sum while the micro-batches are the same. A new $t$ or $d$ changes the order of additions, so the last digits differ.
#
# ## Hybrid sharding (HSDP): ZeRO-3 within a node, copies between nodes
#
# ZeRO-3 gathers each weight twice in a step. *Hybrid sharding* (HSDP) gathers within a node only, and averages gradients between nodes {cite}`zhao2023fsdp`. The data axis is split in two: an inner axis over which parameters are sharded, and an outer axis of copies. torchtitan calls them `dp_shard` and `dp_replicate`.
# With this course's modules HSDP takes one line after backward. In torch you call `fully_shard` with a mesh of two dimensions. The next cell trains with both.

# %%
def hybrid_backward(model, tokens, targets, copies):
    """`model` is ZeRO-3 over the ranks of a node; `copies` is this rank's group across nodes."""
    loss(model(tokens), targets).backward()  # gathers and scatters in the node
    shards = [p.grad for p in model.parameters() if p.grad is not None]
    scale = 1 / dist.get_world_size(copies)  # the average over nodes
    all_reduce_gradients(shards, copies, scale=scale)


# %% tags=["hide-input"]
# Table: bytes that hybrid sharding sends, counted here and predicted for 64 GPUs
def train_hybrid():
    device, outer, inner = ranks.device().type, 2, 2
    axes = init_device_mesh(device, (outer, inner), mesh_dim_names=("copies", "shards"))
    copies, shards = (axes.get_group(name) for name in axes.mesh_dim_names)
    ours = zero.shard_module(build_model(UNTIED), shards, 3)
    theirs = build_model(UNTIED)
    for part in (*theirs.blocks, theirs):
        fully_shard(part, mesh=axes)
    optimizers = make_adamw(ours), make_adamw(theirs)
    for step in range(3):
        tokens, targets = (x.chunk(4)[dist.get_rank()] for x in load_batch(UNTIED, 8, step))
        with count.record_traffic() as sent:
            hybrid_backward(ours, tokens, targets, copies)
        loss(theirs(tokens), targets).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    full = ours.full_state_dict()
    off = max(max_difference(full[n], p.full_tensor()) for n, p in theirs.named_parameters())
    left = (sent.get_group_traffic(group).count_ring_bytes(2) for group in (shards, copies))
    return off, *left, len(full)


off, inside, outside, tensors = ranks.run(train_hybrid, 4, show=False)[0]
assert off < 1e-4  # float32, after AdamW
full = 4 * sum(p.numel() for p in GPT(UNTIED).parameters())
rest = 4 * sum(p.numel() for n, p in GPT(UNTIED).named_parameters() if "blocks" not in n)
# Halves: gathered in forward, gathered in backward but for the rest, gradients; a byte a tensor.
assert inside == (3 * full - rest) / 2 + tensors
assert outside == full / 2  # 2 (2-1)/2 of this rank's half
print(f"4 ranks: weights as fully_shard's, off by {format_gap(off)}; ", end="")
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
# The bytes that leave a node fall from 95 to 56 GB: by two fifths, and not to an eighth. A ring over 64 ranks leaves each node at only one of its eight ranks, and gradients still have to leave.
# The gain of hybrid sharding is that no layer *waits* for the network between nodes: the gathers stay inside. The price is eight times the model states.
# ```
#
# ## When to use it
#
# | for | against |
# |---|---|
# | Each axis uses links that are fast enough: tensor within a node, pipeline and data between nodes | Three kinds of messages, three groups, and the faults above, none of which raises an error |
# | All model states are divided by $t \cdot p$, and with ZeRO-1 optimizer states by $d$ as well | Stages need micro-batches, and copies divide the batch: a small batch is not enough for both |
# | The model's code does not change | With stages, this page supports only ZeRO-1: with ZeRO-2 or 3 each micro-batch would gather or scatter everything anew. Llama 3's job, with 16 stages, does so for gradients {cite}`dubey2024llama3` |
#
# Signs that a real job is set up right:
#
# - the first loss and the first gradient norm are those of one process;
# - LayerNorms' weights are equal over a tensor group, to the bit, after a thousand steps;
# - the tied embedding is equal on the first and the last stage;
# - the network's counters show no traffic of the tensor groups.
#
# If the first gradient norm differs, [parity](parity.md) finds the first wrong tensor and its ranks.
#
# ## Exercises
#
# Each exercise has a check; where ranks are needed, it runs your answer on real ones.
#
# ```{exercise-start} The groups of a rank (easy)
# :label: ex-mesh-groups
# ```
#
# Return three lists for `rank`: its data group, its pipeline group and its tensor group, with ranks in ascending order. Data is the outermost axis, tensor the innermost.

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
# The last digit has $t$ values, the one before it $p$. So the next stage is $t$ ranks further, and the next copy $p \cdot t$ ranks.

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
# A model of `--layers 2 --hidden 64 --heads 4` takes 1.9 MB of model states. Find options (`--dp`, `--tp`, `--pp`, `--zero`) of `python -m shardlab mesh` with which no rank holds more than 300,000 bytes, on eight ranks at most and with a batch of 8.

# %%
answer = "--tp 2"  # options
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
# Gradients and weights have to be divided as well: by ZeRO-3, by tensor ranks, or by both. ZeRO-1 leaves weights and gradients whole in every copy.

# %%
answer = "--dp 2 --tp 4 --zero 3"
check(answer, "mesh_budget")


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} One gradient norm (medium)
# :label: ex-mesh-norm
# ```
#
# A tied GPT is cut over `groups.pp` and `groups.tp`; there is one copy. `gradients` are this rank's, by the plain model's names. `cut` has the names of the gradients of which each tensor rank has a part; all others are whole on every rank of a tensor group. The embedding's gradient is on the first stage as `embedding.weight`, and once more on the last as `head.weight`.
# On every rank, return the norm that one process computes over all gradients, as a scalar tensor.

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
# Every element counts once: whole gradients count on the first tensor rank, and the twin `head.weight` does not count. Then the squares are added up along both axes.

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
# Return a `Layout` of `ranks` ranks for `config`, with `zero=1`. Every rank holds at most `limit` bytes of model states. In a step of `batch` sequences, as few bytes as possible leave the nodes of `node` ranks each. Return `None` if no layout fits. Allowed are $t$ and $p$ that divide the model (`mesh.check_supported(config, layout)` raises ValueError for others) and $d$ that divide `batch`.
# Use `mesh.predict_state_bytes(config, layout, rank)`, `mesh.predict_sent_bytes(config, layout, rank, config.seq, batch // d)` and `layout.count_node_egress(node, sent)`, where `sent` is a function of the rank.

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
# Try all layouts: there are few. Sum `count_node_egress` over axes and nodes.

# %%
def my_mesh(config, ranks, node, limit, batch):
    best, least = None, float("inf")
    sizes = [n for n in range(1, ranks + 1) if ranks % n == 0]
    for d, t in ((d, t) for d in sizes for t in sizes if ranks % (d * t) == 0):
        layout = Layout(dp=d, pp=ranks // (d * t), tp=t, zero=1)
        try:
            mesh.check_supported(config, layout)
        except ValueError:
            continue
        held = (mesh.predict_state_bytes(config, layout, r) for r in range(ranks))
        if batch % d or max(sum(one.values()) for one in held) > limit:
            continue
        sent = partial(mesh.predict_sent_bytes, config, layout, seq=config.seq, batch=batch // d)
        out = layout.count_node_egress(node, sent)
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
# - A rank's number is its place on the mesh, a digit for each axis; the ranks of a group differ in one digit.
# - The tensor axis sends in every layer, so it is the last digit. Other orders send up to 24 times as much out of a node.
# - Cut matrices, then layers, then shard over copies. A step sums gradients along the tensor and pipeline axes, between tied embeddings, along the data axis, and last for partly seen parameters.
# - Every element counts once in the gradient norm; each copy's weight is its number of tokens with a target; copies and stages have their own dropout seeds, the ranks of a tensor group share one.
# - The bytes that ranks hold and send are predicted exactly, along each axis.
# - A checkpoint loads bit for bit under any mesh; later steps are bitwise equal if sums are made in the same order.
#
# ## Further reading
#
# - {cite:t}`narayanan2021megatron`: all three axes at once on 3,072 GPUs, with rules for their order.
# - {cite:t}`korthikanti2022recomputation`: sequence parallelism, and why stages then send a $t$-th of the bytes.
# - {cite:t}`dubey2024llama3`: section 3.3, the order of axes of a job on 16,384 GPUs.
# - {cite:t}`zhao2023fsdp`: section 3.2.2 is hybrid sharding.
