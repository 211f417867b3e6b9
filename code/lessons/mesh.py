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
# # Meshes: data, pipeline and tensor parallelism at once
#
# After this lesson you can
#
# - name the groups of any rank, and count the bytes that leave a node under each order of axes;
# - train one model by data, pipeline and tensor parallelism at once, with the result of one process;
# - say how clipping, tied embeddings and dropout change on a mesh;
# - predict each rank's bytes, and resume a run under another mesh.
#
# Llama 3 70B is trained on 512 GPUs, 8 in a node: 16 replicas in 4 stages each, with each matrix sharded over 8 ranks.
# There are six ways to number these ranks.
# With the best numbering each GPU sends 26 GB out of its node in a step; with the worst, 24 times as much.
#
# ## Three axes, and their order

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
    """Return a difference with one digit; "0" if it is exactly 0."""
    return f"{difference:.0e}" if difference else "0"


def max_difference(a, b):
    """The largest difference between two tensors."""
    return (a - b).abs().max().item()


def make_parallel(layout, config=SMALL):
    """The same GPT on every rank, cut along three axes."""
    return Parallel(build_model(config), mesh.create_groups(layout, dist.group.WORLD), layout)


def run_shardlab(line):
    """Return the output of `python -m shardlab …`."""
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers())
    chosen = parser.parse_args(line.split())
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        chosen.command(chosen)
    return printed.getvalue().rstrip()


# %% [markdown]
# A *mesh* is an arrangement of ranks with an axis for each kind of parallelism.
# This lesson has three axes:
#
# | axis | degree | ranks of one group … | in the course's code, and usually in torch's `DeviceMesh` | Megatron-LM | DeepSpeed |
# |---|---|---|---|---|---|
# | data | $d$, the number of replicas | hold the same part, one in each replica | `dp` | `dp` | `data` |
# | pipeline | $p$, the number of stages | hold the stages of one replica | `pp` | `pp` | `pipe` |
# | tensor | $t$ | hold shards of the same matrices | `tp` | `tp` | `model` |
#
# The *degree* of an axis is the number of ranks in each of its groups.
# A *replica* is one copy of the whole model, on $p \cdot t$ ranks.
# Along the *innermost* axis, neighbours have consecutive rank numbers.
# The table has the bytes that leave a node under each order, if each replica gets 16 sequences of 8,192 tokens. They are float32; bfloat16 sends half.

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
# ## From a list of ranks to a mesh
#
# A launcher starts $N$ ranks with numbers from 0 to $N-1$.
# A mesh with three axes needs $N = d \cdot p \cdot t$ ranks, and each rank is in three groups.
# Read its number as three digits: the first counts the $d$ replicas, the second the $p$ stages, the last the $t$ ranks of a tensor group.
# Two ranks are in one group when their numbers differ in one digit only.

# %%
def groups(sizes, axis):
    """Return all groups along one axis of a mesh with degrees `sizes`."""
    box = torch.arange(torch.Size(sizes).numel()).view(sizes)
    return box.movedim(axis, -1).flatten(0, -2).tolist()


for axis, name in enumerate(("data", "pipeline", "tensor")):
    print(f"{name:8}", groups((2, 2, 2), axis))

# %% [markdown]
# The picture shows the groups, for nodes of four ranks.
# Put your own numbers into the cell's first line, or into the form below it, which runs in your browser:

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
# A line joins the ranks of a group; a dashed line leaves its node.
# With `order=("tp", "pp", "dp")` the tensor axis is outermost, and its groups leave their nodes:

# %%
WRONG = replace(DEGREES, order=("tp", "pp", "dp"))
figure, alt = picture.draw_groups(WRONG, NODE), picture.write_alt_text(WRONG, NODE)
show.figure(figure, alt, "mesh-wrong-order")

# %% [markdown]
# ### Why tensor parallelism is the innermost axis
#
# Along the three axes ranks send at different moments, and different numbers of bytes.
# One activation has $B S H$ numbers: batch times sequence times hidden size.
#
# ![Timeline of what a rank of a 2 × 2 × 2 mesh sends in one step with two micro-batches. Tensor axis: it all-reduces B S H numbers several times in every layer, in forward and in backward. Pipeline axis: for each micro-batch it sends B S H numbers after the stage's last layer, and gets as many back. Data axis: it sends the gradients once, at the end.](../figures/mesh_step.svg)
#
# - **Tensor** ranks sum activations four times in every *layer*, and the layer waits for each sum.
#   So this axis needs the fastest links.
#   It is innermost, to keep its groups inside a node.
# - **Pipeline** ranks send one such activation for each *stage* and micro-batch to one other rank, which sends its gradient back.
#   The network between nodes is fast enough for this {cite}`narayanan2021megatron`.
# - **Data** ranks sum gradients once in each *step*, however many micro-batches it has.
#   No rank waits for this sum before the step ends.
#
# If each tensor group fills a node, the order of the other two axes does not change the bytes that leave a node: rows one and three of the table are equal.
# In Megatron-LM the pipeline axis is outermost, which often sends fewer bytes out of a rack.
# In Llama 3's job and on this page the data axis is outermost, since gradients can arrive late without a rank waiting {cite}`dubey2024llama3`.
#
# ### PyTorch's `init_device_mesh`
#
# `init_device_mesh` takes the degrees, outermost first, and makes the groups.
# `mesh.create_groups` does the same, in fewer lines:

# %% tags=["hide-input"]
# Shows the module's create_groups
show.source(mesh.create_groups)


# %% [markdown]
# On eight ranks the groups are those of torch:

# %%
def compare_groups():
    ours = mesh.create_groups(EIGHT, dist.group.WORLD)
    kind = ranks.device().type
    theirs = init_device_mesh(kind, (2, 2, 2), mesh_dim_names=("dp", "pp", "tp"))
    members = dist.get_process_group_ranks
    return [(members(a), members(b)) for a, b in zip(ours, mesh.get_mesh_groups(theirs))]


joined = ranks.run(compare_groups, 8)
assert all(ours == theirs for rank in joined for ours, theirs in rank)
print("groups of rank 5 in both:", *(ours for ours, _ in joined[5]))


# %% [markdown]
# `mesh.get_mesh_groups` reads them from a `DeviceMesh`.
#
# ## Three-dimensional parallelism in plain code
#
# The model has two layers, one on each stage.
# Each layer is a feed-forward network, $Y = \mathrm{GELU}(X W_1) W_2$, whose two matrices are sharded over two tensor ranks.
# Each of two replicas gets half of the batch.
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
assert worst < 1.7e-7  # paths of 200 terms: 2 sqrt(200) 2^-24 of up to 0.1
print(f"8 ranks, each with a quarter of the weights: gradients off by {format_gap(worst)}")

# %% [markdown]
# This plain form leaves out micro-batches, without which one stage always waits for the other; a batch that the replicas do not divide evenly; a loss over a vocabulary; clipping; and ZeRO, without which every replica holds all optimizer states.
#
# ## The module `Parallel`: matrices, then layers, then ZeRO
#
# `Parallel` takes a plain GPT, three groups and the layout.
# It first shards matrices, then splits the layers into stages, and last shards each rank's remaining parameters over the replicas by ZeRO.
# The modules of the earlier lessons do this work.
#
# The code has two terms of its own:
#
# - *Twins* are the two tensors of a tied embedding: the embedding on the first stage, and the output layer on the last stage.
#   Each stage computes its own gradient.
# - A gradient is *partial* (`partial_grads`) if every tensor rank has the whole parameter, but computes this gradient from a $t$-th of the tokens.
#   With [sequence parallelism](sequence_parallel.md) the gradients of LayerNorms are partial, and those of *late biases*: biases that are added after a sum over tensor ranks.

# %% tags=["hide-input"]
# Shows how the model is divided
show.source(
    Parallel.__init__,
    Parallel._shard_matrices,
    Parallel._split_layers,
    Parallel._shard_replicas,
)

# %% [markdown]
# A step sums gradients first within the layers, then between stages, then over the replicas.
# No gradient is added twice.

# %% tags=["hide-input"]
# Shows a step
show.source(Parallel.step, Parallel._compute_loss, Parallel._average_loss)

# %% [markdown]
# Two operations are new:
#
# - Each replica's loss has a *weight*, so that the average over replicas is the mean over all tokens with a target.
#   Replicas may have different numbers of such tokens: fewer sequences, or more targets of −100.
# - Partial gradients are summed over the tensor group at the very end: by then each rank has only its ZeRO shard of these gradients, and the message is short.
#
# ## Five steps equal one process
#
# Three layouts train for five steps:

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
    # 4 sqrt(128 tokens) 2^-24 of 5.5; 4 sqrt(26 * 32 + 128 terms) 2^-24 of 0.5; AdamW
    # may turn a weight by 2e-3, which changes losses and gradients by 2e-5.
    assert gaps["losses"] < 3.5e-5 and gaps["gradients"] < 2.4e-5
    assert gaps["weights"] < 1e-4
    rows.append([name, SHAPES[name].world_size, *map(format_gap, gaps.values())])
head = ["data × pipeline × tensor", "ranks", "losses", "last gradients", "weights"]
show.table(rows, head)

# %% [markdown]
# The table shows the largest difference of any element, from sums in a different order.
# In float64 [the tests](../tests/test_contract.py) hold two dozen meshes to within $10^{-11}$ of one process.
#
# ## Clipping, tied embeddings, LayerNorms and dropout on a mesh
#
# For all four, code that is right with one kind of parallelism is wrong as soon as another kind is added.
#
# ### The gradient norm: count every element once
#
# Clipping needs the gradients' global norm, for which all ranks add up their squares.
# But some gradients are on several ranks, and must count once.
#
# ![Ranks that count a gradient in the norm, on two stages with two tensor ranks each. A shard of a matrix is on one rank, and counts there. LayerNorms and late biases are whole on both tensor ranks, and count on the first. The tied embedding is on both stages, and counts on the first.](../figures/mesh_norm.svg)
#
# `Parallel` decides which rank counts which gradient, and [`clip_by_global_norm`](../code/shardlab/data_parallel/buckets.py) sums and scales.

# %% tags=["hide-input"]
# Shows which rank counts which gradient
show.source(Parallel.clip_grad_norm_, Parallel._is_counted_in_norm)


# %% tags=["hide-input"]
# Table: the gradient norm, and two ways to get it wrong
def compute_norms():
    job = make_parallel(Layout(pp=2, tp=2, microbatches=2, sequence_parallel=True))
    reference = build_model(SMALL)
    with torch.no_grad():  # so that LayerNorms' gradients change the norm visibly
        for name, parameter in (*job.named_parameters(), *reference.named_parameters()):
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
# Paths of 26 * 32 + 64 terms in two orders: 2 sqrt(896) roundings of 2^-24.
assert abs(ours - one) < 3.6e-6 * one < 0.02 * one < everything - one
rows = [
    ("one process", f"{one:.4f}"),
    ("Parallel.clip_grad_norm_, on every rank", f"{ours:.4f}"),
    ("all squares of all ranks", f"{everything:.4f}"),
    ("torch's clip_grad_norm_, rank by rank", ", ".join(f"{r[3]:.4f}" for r in found)),
]
show.table(rows, ["who adds up what", "gradient norm"])


# %% [markdown]
# In row three a LayerNorm counts $t$ times and the tied embedding twice.
# Training runs on, but gradients are clipped more than you asked for, by a factor that depends on the mesh.
# In the last row every rank scales its gradients by a different factor.
# A LayerNorm that was equal on two ranks is then no longer equal.
#
# ### Tied embeddings, LayerNorms, and a short batch
#
# Each row of the next table leaves out an operation that replicas or tensor ranks need:
#
# - *twins are not summed*: the two gradients of the tied embedding, on the first and the last stage, are not added up;
# - *norms are not summed*: the gradients of LayerNorms and late biases include only a $t$-th of the tokens;
# - *replicas weigh the same*: the average over replicas ignores that one replica has three sequences and the other just one.

# %%
def run_faulty_step(fault, sizes=(3, 1)):
    """A step with a fault in it: how far each gradient is off, in parts of its own norm."""
    job = make_parallel(replace(EIGHT, zero=1, sequence_parallel=True, microbatches=1))
    if fault == "twins are not summed":
        job.pipeline.tied_parameter = None
    elif fault == "norms are not summed":
        job.partial_grads = set()
    elif fault == "replicas weigh the same":
        job.pipeline.passes.loss = lambda x, y: tp.vocab_parallel_loss(x, y, job.groups.tp)
    tokens, targets = load_batch(SMALL, 4, 0)
    copy = dist.get_rank(job.groups.dp)
    job.step(tokens.split(sizes)[copy], targets.split(sizes)[copy])
    reference = build_model(SMALL)
    loss(reference(tokens), targets).backward()
    found = mesh.gather_model_tensors(job, lambda piece: piece.grad)
    wanted = {n: p.grad for n, p in reference.named_parameters()}
    return {n: ((found[n] - w).norm() / w.norm()).item() for n, w in wanted.items()}


FAULTS = ["none", "twins are not summed", "norms are not summed", "replicas weigh the same"]


# %% tags=["hide-input"]
# Table: gradients that each fault makes wrong
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
# The third affects every gradient and is the hardest to find: it needs replicas with different numbers of sequences, which few tests have.
#
# ### Dropout: which ranks draw the same mask
#
# Outside the sharded matrices all ranks of a *tensor* group hold the same activations, so they need the same dropout mask.
# Each *replica* and each *stage* needs its own mask.
# A seed for each rank breaks the first rule; one seed on all ranks breaks the second.

# %%
def draw_masks(seeded):
    groups = mesh.create_groups(Layout(dp=2, tp=2), dist.group.WORLD)
    replica = dist.get_rank(groups.dp)
    seeds = {"one seed": 0, "by rank": dist.get_rank(), "by replica": replica}
    torch.manual_seed(seeds[seeded])
    return nn.functional.dropout(torch.ones(1000), 0.5) > 0


# %% tags=["hide-input"]
# Table: shares of equal dropout masks between ranks
rows = []
for seeded in ("one seed", "by rank", "by replica"):
    # CPU: masks by the CPU's generator
    found = ranks.run(draw_masks, 4, seeded, device="cpu")
    alike = [(found[0] == found[other]).float().mean().item() for other in (1, 2)]
    rows.append([seeded, *(f"{100 * fraction:.0f} %" for fraction in alike)])
    right = alike[0] == 1 and abs(alike[1] - 0.5) < 0.1
    assert right == (seeded == "by replica")
show.table(rows, ["seeds", "equal in a tensor group", "equal in two replicas"])

# %% [markdown]
# Independent masks agree in 50 % of the elements.
# `Parallel` seeds torch's generator by replica and stage; within a tensor group, [each rank draws its own masks](tensor_parallel.md#dropout-seeds-inside-and-outside-the-regions) only where activations are sharded.
# Another mesh draws other masks, so compare with one process at dropout 0.
#
# ## Memory and communication on a mesh
#
# ### Bytes that a rank holds and sends
#
# The table compares the predictions of `mesh.predict` with the bytes that one replica's ranks in the 2 × 2 × 2 job hold, and send in a step.
# The columns *stage* and *part* are the rank's place along the pipeline and the tensor axis.

# %% tags=["hide-input"]
# Table: bytes of one replica's four ranks, predicted and counted
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
# Predicted and counted bytes are equal, including padding and scalars.
# The second stage holds more, since it has the last LayerNorm.
#
# ### Bytes between nodes, by order of the axes
#
# Every order sends the same bytes, but a different part of them leaves a node, here with two nodes of four ranks:

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
    # 24 sums in float64: 2 * 24 * 2^-53
    assert abs(total - sum(map(sum, predicted.values()))) < 6e-15 * total
    least[shape.order] = total
    cells = [f"{sum(real[axis]):,.0f}" for axis in ("tp", "pp", "dp")]
    rows.append([" → ".join(shape.order), *cells])
    rows[-1] += [f"{sum(map(sum, predicted.values())):,.0f}", f"{total:,.0f}"]
assert min(least, key=least.get)[-1] == "tp"
head = ["order", "tensor (B)", "pipeline (B)", "data (B)", "in all, predicted (B)", "counted (B)"]
show.table(rows, head)


# %% [markdown]
# With two nodes only the messages of the outermost axis leave a node.
# The tensor axis is the worst choice, even for a model of two layers.
# Without sequence parallelism the pipeline axis would send more: all $t$ ranks of a tensor group would send the same activation to the next stage.
#
# ## The production library: FSDP2 over `parallelize_module`
#
# In PyTorch `parallelize_module` shards the matrices over one axis of a `DeviceMesh`, and `fully_shard` the parameters over the other.

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
# The next cell trains this model and `Parallel` with `Layout(dp=2, tp=2, zero=3)` for five steps from the same weights:

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
# A `DTensor` has a placement for each axis that shards it: a matrix has two, a LayerNorm one.
# In torch 2.13 (November 2026) `clip_grad_norm_` refuses these gradients, since some are on one axis and some on two. torchtitan first makes LayerNorms DTensors on both axes.
#
# In [the benchmark](../benchmarks/mesh.py), with a model of 8 M parameters on four ranks of two cores over loopback, our `Parallel` takes 0.52 of torch's time and 0.97 of its peak memory.
# With layers four times as wide it takes 0.77 of the time, since most of the difference is the dispatch of operations.
# On GPUs dispatch runs ahead of the computation, so the ratios do not hold there.
#
# ## The command `python -m shardlab mesh`
#
# The command trains under a layout, and compares predicted and counted bytes. `--help` names all options.

# %% tags=["measured"]
print(run_shardlab("mesh --dp 2 --tp 2 --pp 2 --zero 1 --layers 4 --steps 4"))

# %% [markdown]
# `--budget` limits the bytes of tensors that a rank holds at its peak, activations included:

# %%
for options in ("", "--tp 2", "--tp 4", "--dp 2 --tp 4 --zero 3"):
    printed = run_shardlab(f"mesh --hidden 64 --heads 4 {options} --steps 3 --budget 1e6")
    print(f"{options or 'one rank':22}", printed.splitlines()[0])


# %% [markdown]
# A layout whose model states alone need too much is refused before anything starts; of the others the peak is counted.
# A larger `--tp` divides the states and most activations; a larger `--dp` divides the batch, and the states only with `--zero`.
#
# A layout that no mesh can train is refused in the same way, with one message on every rank:

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
# `Parallel` also trains interleaved schedules with several chunks on a stage, and full recomputation.
# It does not support context or expert parallelism, hybrid sharding, offload, schedules that split the backward, or recomputation of some operators only.
# `mesh.find_unsupported(config, layout)` lists the settings of a layout that it does not train.
#
# ## Resuming from a checkpoint under another mesh
#
# A checkpoint does not depend on the mesh that saved it.
# Each rank writes its shard of a matrix under the plain model's name, with its place in the whole matrix.
# ZeRO's shards are gathered over the replicas first.
# [Checkpoints](checkpoint.md) explains the rest.

# %% tags=["hide-input"]
# Shows how shards are named after the plain model's parameters
show.source(Parallel.named_parameters, Parallel.pieces, Parallel.full_state_dict)


# %% [markdown]
# The next cell saves under one mesh and resumes under others.

# %% tags=["hide-input"]
# Table: saved by 2 × 2 × 2, resumed by others
def resume_training(folder, layout, steps):
    """Load any checkpoint, else save one after training; return first, last weights."""
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
# The loaded weights have the same bits under every mesh.
# Two steps later the bits are the same only if sums are made in the same order: a new $p$ changes no sum while the micro-batches are the same, a new $t$ or $d$ does.
#
# ## Hybrid sharding (HSDP): ZeRO-3 within a node, replicas across nodes
#
# ZeRO-3 gathers each weight twice in a step, from all nodes.
# *Hybrid sharding* (HSDP) shards parameters over the ranks of one node only, and every node holds a replica {cite}`zhao2023fsdp`.
# So weights are gathered within a node, and only gradients are averaged across nodes.
# The data axis is split in two, which torchtitan calls `dp_shard` (inner) and `dp_replicate` (outer).
# With this course's modules HSDP takes one call after backward, and in torch a mesh of two dimensions for `fully_shard`.
# The next cells train with both.

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
# Half of: all weights, the blocks' weights again, all gradients; a byte per tensor.
assert inside == (3 * full - rest) / 2 + tensors
assert outside == full / 2  # 2 (2-1)/2 of this rank's half
print(f"4 ranks: weights as fully_shard's, off by {format_gap(off)}; ", end="")
print(f"{inside:,.0f} B within nodes, {outside:,.0f} B across nodes, as predicted")
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
# ```{admonition} False: "hybrid sharding keeps the traffic in the node"
# :class: checked
#
# The bytes that leave a node fall from 95 to 56 GB: by two fifths, and not to an eighth.
# In a ring over 64 ranks only one of a node's eight ranks sends to another node, and gradients still have to leave.
# The gain of hybrid sharding is that no layer *waits* for the network between nodes.
# The price is eight times the model states.
# ```
#
# ## When to use a mesh
#
# | for | against |
# |---|---|
# | Each axis uses links that are fast enough: tensor within a node, pipeline and data between nodes | There are three kinds of messages, three groups, and the faults above, none of which raises an error |
# | All model states are divided by $t \cdot p$, and with ZeRO-1 optimizer states by $d$ as well | Stages need micro-batches, and replicas divide the batch: a small batch is not enough for both |
# | The model's code does not change | With stages, `Parallel` supports only ZeRO-1: with ZeRO-2 or 3 each micro-batch would gather or scatter everything anew. Llama 3's job, with 16 stages, scatters gradients in this way {cite}`dubey2024llama3` |
#
# Signs that a real job is set up right:
#
# - the first loss and the first gradient norm equal those of one process;
# - LayerNorms' weights are equal over a tensor group, to the bit, after a thousand steps;
# - the tied embedding is equal on the first and the last stage;
# - the counters of the network between nodes show no traffic of tensor groups.
#
# If the first gradient norm differs, [parity](parity.md) finds the first wrong tensor and its ranks.
#
# ## Exercises
#
# ```{exercise-start} The groups of a rank (easy)
# :label: ex-mesh-groups
# ```
#
# Return three lists for `rank`: its data group, its pipeline group and its tensor group, with ranks in ascending order.
# Data is the outermost axis, tensor the innermost.

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
# The last digit has $t$ values, the one before it $p$.
# So the next stage is $t$ ranks further, and the next replica $p \cdot t$ ranks.

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
# ```{exercise-start} A memory budget (easy)
# :label: ex-mesh-budget
# ```
#
# A model of `--layers 2 --hidden 64 --heads 4` takes 1.9 MB of model states.
# Find options (`--dp`, `--tp`, `--pp`, `--zero`) of `python -m shardlab mesh` with which no rank holds more than 300,000 bytes of model states, on eight ranks at most and with a batch of 8.

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
# Gradients and weights have to be divided as well: by ZeRO-3, by tensor ranks, or by both.
# ZeRO-1 leaves them whole in every replica.

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
# A GPT with a tied embedding is divided over `groups.pp` and `groups.tp`; there is one replica.
# `gradients` are this rank's gradients, by the plain model's names.
# `cut` has the names of the gradients that are sharded over a tensor group; all others are whole on each of its ranks.
# The embedding's gradient is on the first stage as `embedding.weight`, and again on the last as `head.weight`.
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
# Every element counts once: whole gradients count on the first tensor rank, and the twin `head.weight` does not count.
# Then the squares are added up along both axes.

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
# Return a `Layout` of `ranks` ranks for `config`, with `zero=1`, such that every rank holds at most `limit` bytes of model states.
# Nodes have `node` ranks: in a step of `batch` sequences, as few bytes as possible should leave them.
# Return `None` if no layout fits.
# $t$ and $p$ must divide the model (`mesh.check_supported(config, layout)` raises ValueError for others), and $d$ must divide `batch`.
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
# Try all layouts: there are few.
# Sum `count_node_egress` over axes and nodes.

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
# - The tensor axis sends in every layer, so it is the last digit.
#   Other orders send up to 24 times as much out of a node.
# - Shard matrices, then split layers into stages, then shard over replicas.
#   A step sums gradients within layers (tensor axis), between twins (pipeline axis), and over replicas (data axis); partial gradients come last.
# - Every element counts once in the gradient norm; each replica's weight is its number of tokens with a target; replicas and stages have their own dropout seeds, the ranks of a tensor group share one.
# - The bytes that ranks hold and send are predicted exactly, along each axis.
# - A checkpoint loads bit for bit under any mesh; later steps are bitwise equal if sums are made in the same order.
#
# ## Further reading
#
# - {cite:t}`narayanan2021megatron`: all three axes at once on 3,072 GPUs, with rules for their order.
# - {cite:t}`korthikanti2022recomputation`: sequence parallelism, and why stages then send a $t$-th of the bytes.
# - {cite:t}`dubey2024llama3`: section 3.3, the order of axes of a job on 16,384 GPUs.
# - {cite:t}`zhao2023fsdp`: section 3.2.2 is hybrid sharding.
