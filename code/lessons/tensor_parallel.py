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
# # Tensor parallelism: column-parallel and row-parallel layers
#
# After this lesson you can
#
# - shard a feed-forward network, attention, an embedding and a loss, and explain for each matrix why by columns or by rows;
# - write the two operators that make the sharded model's *gradients* right;
# - predict the bytes that a rank holds and sends, and say why ranks should share a fast switch;
# - shard a plain GPT without changing its code.
#
# A *single* block of Llama 3 405B takes 51 GB during training, and the model has 126 blocks.
# [Pipelines](pipeline.md) give each rank whole blocks, and [ZeRO](zero.md) gathers a whole block before computing it. Tensor parallelism shards the block.
#
# ## Why shard single layers

# %% tags=["hide-input"]
# Imports, and the small model and batches that every cell takes
import math
import statistics
import textwrap
import time
from dataclasses import replace

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.functional import gelu
from torch.profiler import profile

from shardcourse.exercises import check
from shardlab import collectives, memory, ranks
from shardlab import tensor_parallel as tp
from shardlab.common import show, text
from shardlab.gpt.model import GPT, PRESETS, Attention, Config, loss, apply_rotary
from shardlab.layout import Layout
from shardlab.measure import count, link
from shardlab.tensor_parallel.core import _CopyTo, _ReduceFrom
from shardlab.tensor_parallel.cross_entropy import _CrossEntropy
from shardlab.tensor_parallel.dropout import own_seed
from shardlab.tensor_parallel.overlap import _Columns

show.set_style()
MODEL = Config(seq=64, layers=4, heads=4, hidden=128, tied=False)


def draw_normal(seed, *shape):
    """Normal random numbers from a fixed seed, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(ranks.device())


def make_batch(step, size=8, seq=64):
    """`size` windows of text, the same on every rank: tokens, targets [size, seq]."""
    tokens, targets = text.get_batch(seq, size, start=step * size)
    return tokens.to(ranks.device()), targets.to(ranks.device())


def build_model(config, dtype=torch.float32):
    """The same GPT at every call."""
    torch.manual_seed(0)
    return GPT(config).to(ranks.device(), dtype)


def max_difference(a, b):
    """The largest difference between two tensors."""
    return (a - b).abs().max().item()


def format_short(difference):
    """A difference with one digit; 0 is exactly that."""
    return f"{difference:.0e}" if difference else "0"


def run_our_step(model, step, size=8):
    """Run forward and backward of a cut model; return the loss."""
    tokens, targets = make_batch(step, size)
    value = tp.vocab_parallel_loss(model(tokens), targets, model.tensor_group)
    value.backward()
    return value


# %% [markdown]
# You need the all-reduce from [Collectives](collectives.md).
#
# The table assumes 16 bytes for each parameter (weights, gradients, AdamW), as in [Memory](memory.md).

# %% tags=["hide-input"]
# Table: the model states of one block
rows = []
for name in ("gpt-3-175b", "llama-3-8b", "llama-3-70b", "llama-3-405b"):
    config = PRESETS[name]
    sizes = memory.count_rank_parameters(config)
    block = (sizes["attention"] + sizes["ffn"]) / config.layers
    rows.append((name, config.layers, f"{block / 1e6:,.0f}", f"{16 * block / 1e9:.1f}"))
assert rows[-1][-1] == "51.0"
head = ["model", "blocks", "parameters of a block (M)", "its model states (GB)"]
show.table(rows, head)


# %% [markdown]
# A stage of a pipeline holds at least one block. ZeRO's stage 3 shards the states, but each rank gathers a block's weights and computes the whole block.
# Neither makes one block's forward shorter or its activations smaller.
# Tensor parallelism does both: each rank computes with its shards of the matrices.
#
# ## One matrix product, sharded in two ways
#
# Let $Y = XW$, and let every rank have all of $X$. There are two ways to divide the work among ranks.
# In code `T`, `I` and `O` are the numbers of tokens, inputs and outputs. A lowercase letter is the size of a rank's shard: `o` of `O` columns.

# %%
def take_shard(x, dim):
    """This rank's share of x along a dimension."""
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous()


def by_columns(x_TI, w_IO):
    return x_TI @ take_shard(w_IO, 1)  # [T, I] @ [I, o]: this rank's columns of Y


def by_rows(x_TI, w_IO):
    y_TO = take_shard(x_TI, 1) @ take_shard(
        w_IO, 0
    )  # [T, i] @ [i, O]: all of Y's shape, a summand
    dist.all_reduce(y_TO)
    return y_TO


# %% [markdown]
# A column of $Y$ needs all of $X$ and one column of $W$. So sharding *by columns* sends nothing: rank $r$ computes the columns $X W^{(r)}$ of $Y$:
#
# $$
# X\,[\,W^{(0)} \mid W^{(1)}\,] = [\,X W^{(0)} \mid X W^{(1)}\,] .
# $$
#
# If $W$ is sharded *by rows*, $X$ is sharded by columns: rank 0 multiplies its columns of $X$ by its rows of $W$.
# Each product has the full shape of $Y$, but is only a *partial sum* (a summand, in comments). An all-reduce adds up the partial sums:
#
# $$
# [\,X^{(0)} \mid X^{(1)}\,] \begin{bmatrix} W^{(0)} \\ W^{(1)} \end{bmatrix} = X^{(0)} W^{(0)} + X^{(1)} W^{(1)} .
# $$
#
# Both ways give the same $Y$ as one process, on two ranks and on four:

# %%
def compare_both_cuts():
    x_TI, w_IO = draw_normal(0, 16, 512), draw_normal(1, 512, 2048) / 512**0.5
    return by_columns(x_TI, w_IO), by_rows(x_TI, w_IO), x_TI @ w_IO


two, four = ranks.run(compare_both_cuts, 2), ranks.run(compare_both_cuts, 4)

# %% tags=["hide-input"]
# Compares both cuts with the whole product
for found in (two, four):
    columns, sums, (want, *_) = zip(*found, strict=True)
    # Sums of 512 products in two orders: 2 sqrt(512) roundings of 2^-24 of up to 5.
    assert max_difference(torch.cat(columns, 1), want) < 1.4e-5
    assert all(max_difference(y, want) < 1.4e-5 for y in sums)
    shapes = f"by columns {list(columns[0].shape)}, by rows {list(sums[0].shape)}"
    print(f"{len(found)} ranks, each has {shapes}: together, and summed, they are Y")


# %% [markdown]
# PyTorch's `nn.Linear` keeps its weight transposed, `[out, in]`. Columns in the formula are *rows* of `linear.weight`, and the reverse.
#
# ## A feed-forward network: columns, then rows
#
# A feed-forward network is two products with a function between them, $Y = \mathrm{GELU}(X W_1)\, W_2$.
# Shard $W_1$ by columns and $W_2$ by rows: then the first product's output is sharded just as the second product needs its input.
# GELU is elementwise, so each rank applies it to its own columns. Nothing is sent between the two matrices {cite}`shoeybi2019megatron`.
#
# ![A feed-forward network on two ranks. Each rank has all of X. The first matrix is sharded by columns: each rank has 4096 x 8192 of it, and computes its half of XW₁ and of its GELU. The second is sharded by rows: each rank has 8192 x 4096 of it, and computes a partial sum of Y, as large as all of Y. An all-reduce adds the two, and each rank has all of Y.](../figures/tensor_parallel_ffn.svg)
#
# The cell runs the picture's network on three tokens; each rank creates only its own half of the weights.

# %%
def run_halves(rank):
    """This rank's columns of W1, [4096, 8192], and rows of W2, [8192, 4096]."""
    w1_Hf, w2_fH = (
        draw_normal(2 * rank, 4096, 8192),
        draw_normal(2 * rank + 1, 8192, 4096),
    )
    return w1_Hf / 4096**0.5, w2_fH / 16_384**0.5


def run_on_two_ranks():
    w1_Hf, w2_fH = run_halves(dist.get_rank())
    y_TH = gelu(draw_normal(9, 3, 4096) @ w1_Hf) @ w2_fH
    dist.all_reduce(y_TH)
    return y_TH, 4 * (w1_Hf.numel() + w2_fH.numel())


# %% tags=["hide-input"]
# Compares the picture's network on two ranks with one process
def run_one_process():
    (w1_Hf, w2_fH), (w1_Hg, w2_gH) = run_halves(0), run_halves(1)
    w1_HF, w2_FH = torch.cat([w1_Hf, w1_Hg], 1), torch.cat([w2_fH, w2_gH])
    assert w1_HF.shape == (4096, 16_384) and w2_FH.shape == (16_384, 4096)
    return gelu(draw_normal(9, 3, 4096) @ w1_HF) @ w2_FH, 4 * (
        w1_HF.numel() + w2_FH.numel()
    )


((want, whole),) = ranks.run(run_one_process, 1)
for rank, (y_TH, held) in enumerate(ranks.run(run_on_two_ranks, 2)):
    # Sums of 16,384 products in two orders: the roundings of each add up as steps of a walk do.
    assert max_difference(y_TH, want) < 2 * 16_384**0.5 * 2**-24 * want.abs().max()
    assert 2 * held == whole
    print(f"rank {rank}: {held / 1e6:.0f} of {whole / 1e6:.0f} MB, and all of Y")


# %% [markdown]
# ### Two operators for backward: copy_to and reduce_from
#
# Backward needs a second all-reduce, in another place.
# Every rank multiplied *the same* $X$ by its own columns of $W_1$, so the loss depends on $X$ through all ranks:
#
# $$
# \frac{\partial L}{\partial X} = \sum_r \frac{\partial L}{\partial (X W_1^{(r)})}\, {W_1^{(r)}}^{\!\top} .
# $$
#
# A rank can compute only its own partial sum, so backward needs an all-reduce over the ranks.
# The backward of the sum $Y$ needs no message: the gradient of each partial sum is $dY$, which all ranks have.
#
# ![The two operators around a sharded part of a network, on two ranks. Forward, copy_to gives each rank the same x, and reduce_from adds up what the two computed. Backward, reduce_from gives each rank the same gradient, and copy_to adds up the gradients of x.](../figures/tensor_parallel_conjugate.svg)
#
# In the steps below, a tensor has the colour of the rank that computed it; a sum over both ranks has both colours. A thick outline marks new tensors. $A = \mathrm{GELU}(X W_1)$, and $dX$ is the gradient of the loss with respect to $X$.
#
# :::{step-through} A feed-forward network on two ranks, forward and backward
# 1. ![Two tables, values above and gradients below, with a row for each of two ranks, and the tensors X, W₁, A, W₂ and Y side by side. Both ranks have all of X. Rank 0 has the left half of W₁'s columns and the upper half of W₂'s rows, rank 1 the other halves. All else is empty.](../figures/steps/tensor_parallel_1.svg)
#
#    Each rank has all of $X$, half of the columns of $W_1$, and half of the rows of $W_2$.
#
# 2. ![Each rank multiplies X by its columns of W₁ and applies GELU: rank 0 has the left half of A's columns, rank 1 the right half. Nothing is sent.](../figures/steps/tensor_parallel_2.svg)
#
#    Each rank computes its columns of $X W_1$ and of $A$. Nothing is sent.
#
# 3. ![Each rank multiplies its columns of A by its rows of W₂: it has a partial sum of Y, as large as all of Y. Nothing is sent.](../figures/steps/tensor_parallel_3.svg)
#
#    Each rank multiplies its columns of $A$ by its rows of $W_2$: a partial sum, with the shape of $Y$. Nothing is sent.
#
# 4. ![An all-reduce adds the two partial sums: both ranks have all of Y.](../figures/steps/tensor_parallel_4.svg)
#
#    The only message in forward: an all-reduce adds the partial sums.
#
# 5. ![In the lower table both ranks have the gradient of Y. Nothing is sent.](../figures/steps/tensor_parallel_5.svg)
#
#    The gradient of each partial sum is $dY$, which both ranks have. Nothing is sent.
#
# 6. ![Each rank computes the gradients of its rows of W₂ and of its columns of A. Nothing is sent.](../figures/steps/tensor_parallel_6.svg)
#
#    From $dY$ each rank computes the gradients of its own rows of $W_2$ and of its own columns of $A$.
#
# 7. ![Each rank computes the gradient of its columns of W₁, and a partial sum of the gradient of X, as large as all of it. Nothing is sent.](../figures/steps/tensor_parallel_7.svg)
#
#    After GELU's backward, each rank computes the gradient of its columns of $W_1$, and its partial sum of $dX$.
#
# 8. ![An all-reduce adds the two partial sums: both ranks have all of the gradient of X. Of the weights' gradients each rank has those of its own halves.](../figures/steps/tensor_parallel_8.svg)
#
#    The only message in backward: an all-reduce adds the partial sums of $dX$. Each rank keeps the gradients of its own weights.
# :::
#
# So there are two operators, which Megatron-LM's paper calls $f$ (`copy_to`) and $g$ (`reduce_from`). The forward of one is the backward of the other:

# %%
class CopyTo(torch.autograd.Function):
    """Identity in forward; backward sums the gradient of x over the ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        dx = dx.clone()
        dist.all_reduce(dx)
        return dx


class ReduceFrom(torch.autograd.Function):
    """Sum over the ranks in forward; identity in backward."""

    @staticmethod
    def forward(ctx, y):
        y = y.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        return dy


# %% [markdown]
# Calling `dist.all_reduce` in forward, as `by_rows` did, would be wrong: autograd does not record it.
# The partial sums' gradients happen to be right, since `ReduceFrom` sends nothing in backward. But nothing would add up the ranks' gradients of $X$.
#
# With the two operators, the trainable network has three lines:

# %%
def plain_ffn(x_TH, w1_HF, w2_FH):
    x_TH = CopyTo.apply(x_TH)
    g_Tf = gelu(x_TH @ take_shard(w1_HF, 1))  # [T, H] @ [H, f]
    return ReduceFrom.apply(g_Tf @ take_shard(w2_FH, 0))  # [T, f] @ [f, H]


def train_once(network, width=512):
    """Output, and gradients of the input and both matrices."""
    sizes = (64, width), (width, 4 * width), (4 * width, width)
    tensors = [
        draw_normal(seed, *size) / size[0] ** 0.5 for seed, size in enumerate(sizes)
    ]
    for tensor in tensors:
        tensor.requires_grad_()
    y_TH = network(*tensors)
    y_TH.square().sum().backward()
    return y_TH.detach(), *(tensor.grad for tensor in tensors)


found = {t: ranks.run(train_once, t, plain_ffn) for t in (2, 4)}


# %% tags=["hide-input"]
# Compares output and gradients with one process
def full_ffn(x_TH, w1_HF, w2_FH):
    return gelu(x_TH @ w1_HF) @ w2_FH


def sum_parts(network):
    """All-reduces in forward and in backward."""
    x_TH, w1_HF, w2_FH = (
        draw_normal(0, 8, 64).requires_grad_(),
        draw_normal(1, 64, 256),
        draw_normal(2, 256, 64),
    )
    with count.record_traffic() as forward:
        y_TH = network(x_TH, w1_HF, w2_FH)
    with count.record_traffic() as backward:
        y_TH.sum().backward()
    return [sent.calls["all_reduce"] for sent in (forward, backward)]


want = ranks.run(train_once, 1, full_ffn)[0]
for t, results in found.items():
    # Of a matrix each rank has the gradient of its own share, and zeros elsewhere.
    y, dx, dw1, dw2 = zip(*results, strict=True)
    off = [
        max(max_difference(one, full) for one in ones)
        for ones, full in zip((y, dx), want, strict=False)
    ]
    off += [
        max_difference(sum(ones), full)
        for ones, full in zip((dw1, dw2), want[2:], strict=True)
    ]
    # Sums of 2048 products in two orders: 2 sqrt(2048) roundings of 2^-24 of up to 2.
    assert max(off) < 1.1e-5, off
    told = ", ".join(map(format_short, off))
    print(
        f"{t} ranks: Y and the gradients of X, W1, W2 differ from one process by {told}"
    )
calls = ranks.run(sum_parts, 2, plain_ffn)[0]
assert calls == [1, 1]
print(f"all-reduces: {calls[0]} in forward, {calls[1]} in backward")


# %% [markdown]
# Each of two ranks holds half the weights and computes half the products.
#
# This plain version is simpler than `shardlab.tensor_parallel`: it copies each tensor before the all-reduce, uses all ranks and not a group, and has no bias.
# Also, backward waits for the sum of $X$'s gradient, which [can be avoided](#overlap-in-backward).
#
# ### The other orders of columns and rows
#
# Each matrix can be sharded by columns or by rows, so there are four orders. All give the right $Y$, but send different amounts.
# If the first matrix is sharded by rows, every rank has a partial sum. *GELU of a sum is not the sum of GELUs*, so the ranks have to add up the partial sums before GELU, where they are four times as wide as $Y$.
# If a matrix is sharded by columns, each rank needs all columns of the input, so an input that is sharded by columns has to be gathered.
#
# ![Four ways of sharding two matrices, and what each rank sends, in units of one Y times (N-1)/N. Columns, then rows: nothing before GELU, an all-reduce of Y at the end: 2. Columns twice: an all-gather after GELU and one of Y: 4 + 1. Rows twice: a reduce-scatter before GELU and an all-reduce of Y: 4 + 2. Rows, then columns: an all-reduce before GELU and an all-gather of Y: 8 + 1.](../figures/tensor_parallel_orders.svg)
#
# With an all-gather, an all-reduce and a reduce-scatter ([Collectives](collectives.md)) each order is one expression. Four ranks count the bytes that they send.

# %% tags=["hide-input"]
# The three collectives, as functions of a tensor
def join_parts(x_Th):
    """[T, H/t] of every rank to [T, H]."""
    pieces = [torch.empty_like(x_Th) for _ in range(dist.get_world_size())]
    collectives.all_gather(pieces, x_Th, dist.group.WORLD)
    return torch.cat(pieces, -1)


def add_parts(x_TH):
    """The sum of all ranks' [T, H]."""
    collectives.all_reduce(x_TH, dist.group.WORLD)
    return x_TH


def scatter_sum(x_TF):
    """This rank's columns [T, F/t] of the sum of all ranks' [T, F]."""
    pieces = [piece.contiguous() for piece in x_TF.chunk(dist.get_world_size(), -1)]
    out = torch.empty_like(pieces[0])
    collectives.reduce_scatter(out, pieces, dist.group.WORLD)
    return out


# %% [markdown]
# The names say how the first and the second matrix are sharded:

# %%
ORDERS = {
    "columns, rows": lambda x, w, u: add_parts(
        gelu(x @ take_shard(w, 1)) @ take_shard(u, 0)
    ),
    "columns, columns": lambda x, w, u: join_parts(
        join_parts(gelu(x @ take_shard(w, 1))) @ take_shard(u, 1)
    ),
    "rows, rows": lambda x, w, u: add_parts(
        gelu(scatter_sum(take_shard(x, 1) @ take_shard(w, 0))) @ take_shard(u, 0)
    ),
    "rows, columns": lambda x, w, u: join_parts(
        gelu(add_parts(take_shard(x, 1) @ take_shard(w, 0))) @ take_shard(u, 1)
    ),
}

# %% tags=["hide-input"]
# Table: bytes of the four orders, predicted and counted
WIDE, INNER, TOKENS = 256, 1024, 64


def compare_orders():
    x_TH, found = draw_normal(0, TOKENS, WIDE), []
    w1_HF, w2_FH = 0.1 * draw_normal(1, WIDE, INNER), 0.1 * draw_normal(2, INNER, WIDE)
    want_TH = gelu(x_TH @ w1_HF) @ w2_FH
    for compute in ORDERS.values():
        with count.record_traffic() as sent:
            y_TH = compute(x_TH, w1_HF, w2_FH)
        found.append((sent.bytes, max_difference(y_TH, want_TH)))
    return found


TIMES, N = [2, 4 + 1, 4 + 2, 8 + 1], 4
unit = TOKENS * WIDE * 4 * (N - 1) // N  # bytes: S (N-1)/N
rows = []
results = ranks.run(compare_orders, N)[0]
for order, times, (sent, off) in zip(ORDERS, TIMES, results, strict=True):
    assert sent == times * unit and off < 7e-5  # 2 sqrt(1280) roundings of up to 16
    rows.append((order, times, f"{times * unit:,}", f"{sent:,}", sent - times * unit))
head = [
    "cut by",
    "in units of (N-1)/N × Y's bytes",
    "predicted (B)",
    "counted (B)",
    "difference (B)",
]
show.table(rows, head, caption=f"Sent by rank 0 of {N} in forward")

# %% [markdown]
# "Columns, rows" sends least, in one message. The other orders need two messages, with 2.5, 3 and 4.5 times as many bytes.
#
# (tp-plus)=
# `````{admonition} False: "y = y0.to('cuda:0') + y1.to('cuda:0') is the all-reduce"
# :class: checked
#
# In tutorials one process moves both partial sums to GPU 0 and adds them. The sum is right, and autograd differentiates it.
# But this is a *reduce*: only GPU 0 has the sum, and the next layer needs it on all GPUs. So GPU 0 has to copy the sum back. With $N$ GPUs and $S$ bytes, its link carries $(N-1)S$ bytes in and as many out; in a ring, each rank's link carries $2\frac{N-1}{N}S$ each way.
# GPU 0's link thus carries $N/2$ times the bytes of the ring, while all other links idle most of the time.
# And under `torchrun` the line adds nothing across processes: each process has only its own partial sum.
# `````

# %% tags=["hide-input"]
# Table: bytes over rank 0's link, by copies and by all-reduce
T, H = 16, 4096


def sum_on_rank_0():
    rank, size, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    mine_TH = draw_normal(rank, T, H)
    want_TH = sum(draw_normal(r, T, H) for r in range(size))

    def right(y_TH):
        return max_difference(y_TH, want_TH) < 1.4e-5  # 2 * 7 * 2^-24 of |terms| of 16

    y_TH = mine_TH.clone()
    with count.record_traffic() as there:
        if rank == 0:  # y = y0 + y1.to("cuda:0") + …
            for other in range(1, size):
                arrived_TH = torch.empty_like(y_TH)
                ranks.irecv(arrived_TH, other).wait()
                y_TH += arrived_TH
        else:
            ranks.isend(y_TH, 0).wait()
    have_it = right(y_TH)
    with count.record_traffic() as back:
        for other in range(1, size) if rank == 0 else ():  # y.to("cuda:1"), …
            ranks.isend(y_TH, other).wait()
        if rank:
            ranks.irecv(y_TH, 0).wait()
    with count.record_traffic() as ring:
        collectives.all_reduce(mine_TH, world)
    assert right(y_TH) and right(mine_TH)
    return have_it, there.bytes, back.bytes, ring.bytes


rows = []
for size in (2, 4, 8):
    have_it, there, back, ring = zip(*ranks.run(sum_on_rank_0, size), strict=True)
    S = T * H * 4
    through_0, in_ring = (
        sum(there) + back[0],
        2 * ring[0],
    )  # what others send, rank 0 receives
    assert through_0 == 2 * (size - 1) * S and in_ring == 2 * 2 * (size - 1) * S // size
    assert sum(have_it) == 1
    cells = (
        f"{sum(have_it)} of {size}",
        f"{through_0 / 1e6:.2f}",
        f"{in_ring / 1e6:.2f}",
    )
    rows.append((size, *cells, f"{through_0 / in_ring:.0f}"))
head = ["ranks", "ranks that have the sum after y0 + y1", "copies: in and out of rank 0 (MB)"]
show.table(rows, [*head, "all-reduce: in and out of each rank (MB)", "ratio"])

# %% [markdown]
# ## Column-parallel and row-parallel layers
#
# `python -m shardlab.tensor_parallel` trains the picture's network, 4096 → 16,384 → 4096, for five steps with these layers on two ranks, compares with one process, and prints the bytes held and sent.
#
# The operators of `shardlab.tensor_parallel` take a process group. They reduce a copy, because other code may hold the tensor. `reduce_from_`, with an underscore, sums in place: it is for a new product that no other code holds.

# %%
show.source(tp.copy_to, _CopyTo, tp.reduce_from, _ReduceFrom)

# %% [markdown]
# Two layers replace `nn.Linear`. Each keeps its shard of a plain layer's parameters under their old names, and lists the sharded parameters and dimensions in `shard_dims`, which saving, loading and clipping read.
# The column-parallel layer shards its bias like its columns. In the row-parallel layer every rank holds the whole bias, and adds it *after* the sum.

# %%
show.source(tp.ShardedLayer, tp.ColumnLinear, tp.RowLinear)


# %% [markdown]
# `shared_input` is for layers that share an input: see [below](#overlap-in-backward).
#
# (tp-bias)=
# `````{admonition} False: "row-parallel layers each add their bias"
# :class: checked
#
# Then the all-reduce adds up $t$ biases. With rank $r$'s columns $A^{(r)}$ of $A = \mathrm{GELU}(X W_1)$, it returns $\sum_r (A^{(r)} W_2^{(r)} + b) = Y + t\,b$ instead of $Y + b$, without an error.
# While biases are zero, as they often are at initialisation, even this output is right.
# The cell shards an `nn.Linear` with a bias over $t$ ranks, and adds the bias after and before the sum.
# `````

# %% tags=["hide-input"]
# Measures how many times Y contains the bias when each rank adds it
def add_bias_by_rows():
    torch.manual_seed(0)
    linear = nn.Linear(256, 64).to(ranks.device())
    x_TI, group = draw_normal(0, 16, 256), dist.group.WORLD
    want_TO = linear(x_TI)
    x_Ti = x_TI[:, tp.shard_slice("inputs", 256, group)]
    right = tp.RowLinear(linear, group)
    y_TO = x_Ti @ right.weight.T + linear.bias  # [T, i] @ [i, O], and the mistake
    dist.all_reduce(y_TO)
    surplus = (y_TO - want_TO) / linear.bias  # in biases
    return max_difference(right(x_Ti), want_TO), surplus.mean().item()


for t in (2, 4, 8):
    off, surplus = ranks.run(add_bias_by_rows, t)[0]
    # 2 sqrt(256) roundings of up to 2.5; over biases, whose inverses average 80
    assert off < 5e-6 and abs(surplus - (t - 1)) < 4e-4
    print(
        f"{t} ranks: RowLinear has the bias once, the mistake {1 + surplus:.2f} times"
    )


# %% [markdown]
# ## Attention: sharded by heads
#
# A head uses only its own columns of queries, keys and values, so each rank computes whole heads.
# The matrices of queries, keys and values are sharded by columns, the output matrix by rows; attention takes GELU's place between them.
#
# ![Attention with eight query heads and four key-value heads on two ranks. Rank 0 has the first four query heads and the two key-value heads that they share, rank 1 the others: columns of the three matrices. Each rank computes attention for its own heads, and multiplies by its rows of the output matrix; an all-reduce adds the two partial sums.](../figures/tensor_parallel_heads.svg)
#
# The plain version takes an `Attention` of the plain GPT, whose layers are `nn.Linear`, so columns are dimension 0:

# %%
def plain_attention(x_BSH, attention):
    """The output of `attention`, computed with each rank's own heads and summed."""
    x_BSH = CopyTo.apply(x_BSH)
    q_BaSD, k_BkSD, v_BkSD = (
        F.linear(x_BSH, take_shard(layer.weight, 0))  # [B, S, H] @ [H, a D]
        .unflatten(-1, (-1, attention.config.head_size))
        .transpose(1, 2)
        for layer in (attention.query, attention.key, attention.value)
    )
    q_BaSD, k_BkSD = (apply_rotary(x, attention.config.rotary_base) for x in (q_BaSD, k_BkSD))
    y_BaSD = F.scaled_dot_product_attention(
        q_BaSD, k_BkSD, v_BkSD, is_causal=True, enable_gqa=True
    )
    y_BSh = y_BaSD.transpose(1, 2).flatten(-2)
    return ReduceFrom.apply(F.linear(y_BSh, take_shard(attention.out.weight, 1)))


# %% tags=["hide-input"]
# Compares output and gradients with the plain attention
def compare_attention():
    config = Config(hidden=64, heads=8, kv_heads=4, bias=False)
    torch.manual_seed(0)
    models = [Attention(config).to(ranks.device()) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    inputs = [draw_normal(0, 2, 16, 64).requires_grad_() for _ in models]
    outputs = [models[0](inputs[0]), plain_attention(inputs[1], models[1])]
    for y_BSH in outputs:
        y_BSH.square().sum().backward()
    off = [max_difference(*outputs), max_difference(*(x.grad for x in inputs))]
    for name, dim in (("query", 0), ("key", 0), ("value", 0), ("out", 1)):
        grads = [getattr(model, name).weight.grad for model in models]
        off.append(max_difference(*(take_shard(grad, dim) for grad in grads)))
    return off


for t in (2, 4):
    off = max(max(one) for one in ranks.run(compare_attention, t))
    assert off < 5.3e-5  # paths of 480 terms: 2 sqrt(480) 2^-24 of up to 20
    print(
        f"{t} ranks: output and gradients differ from the whole by {format_short(off)}"
    )

# %% [markdown]
# This version leaves out biases and dropout, for which ranks need [different masks](#dropout-seeds-inside-and-outside-the-regions), and keeps the whole weights on every rank.
#
# A block has two sharded *regions*, attention and feed-forward network. Each begins with `copy_to` and ends with `reduce_from`, and sends nothing in between.
# Every rank computes everything between the regions (LayerNorms, residual additions, dropout) in full.
#
# ![A block on two ranks. The residual stream, LayerNorms and dropout are whole on both ranks. Attention and the feed-forward network are sharded, from copy_to to reduce_from. In forward each reduce_from is an all-reduce, in backward each copy_to: two and two.](../figures/tensor_parallel_block.svg)
#
# `shardlab.tensor_parallel` replaces the layers of a plain GPT by sharded layers; the model's own forward does not change.
# SwiGLU has two first matrices; both are sharded by the same columns, since their outputs are multiplied elementwise.
# The input enters a region *once*, through a `SharedInput`, not once for each of queries, keys and values: its three gradients are added up locally before one all-reduce.

# %%
show.source(tp.shard_ffn, tp.shard_attention)

# %% [markdown]
# So $t$ has to divide the number of query heads, the width $F$ and the vocabulary. It also has to divide the number of key and value heads, or be a multiple of that number. These degrees work:

# %%
padded = replace(PRESETS["gpt-2"], vocab=50_304)
print(
    "GPT-2",
    tp.feasible_degrees(PRESETS["gpt-2"]),
    "padded to 50304:",
    tp.feasible_degrees(padded),
)
print("Llama 3 405B", tp.feasible_degrees(PRESETS["llama-3-405b"]))

# %% [markdown]
# GPT-2's vocabulary is $50257 = 29 \cdot 1733$, so it is padded with entries that no token uses.
# Any degree not printed above raises an error before anything is sent:

# %% tags=["hide-input"]
# Shows the error
try:
    ranks.run(lambda: tp.parallelize(GPT(PRESETS["nano"]), dist.group.WORLD), 4)
except ranks.RankError as error:
    print(*textwrap.wrap(str(error).splitlines()[0], 84), sep="\n")
else:
    raise AssertionError("this was meant to be refused")


# %% [markdown]
# (tp-today)=
# ## GQA, QK norm and latent attention (MLA)
#
# Newer models have three additions to attention. In each, *every* rank uses some shared tensor for its own heads.
#
# | model | addition | on $t$ ranks |
# |---|---|---|
# | Llama 3, Qwen3 | few heads of keys and values: 8, or 4 | with more ranks than such heads, several ranks hold the same head |
# | Qwen3 | an RMSNorm of each head of queries and of keys; all heads share its weights | every rank holds the whole weights, but finds only a partial sum of their gradient |
# | DeepSeek-V3 | keys and values of all heads computed from one *latent* | the matrix that computes the latent is whole on every rank, the matrices that compute heads from it are sharded |
#
# The solution is the same as for $x$: each rank finds a partial sum of the shared tensor's gradient, and `copy_to` adds up the partial sums.
# Weights that all heads share need `copy_to` as well. The plain version applies `copy_to`, and then picks the heads of keys and values that the rank's queries use:

# %%
def plain_qwen(x_BSH, attention):
    """Grouped attention with head norms; there may be more ranks than key heads."""
    c, rank, t = attention.config, dist.get_rank(), dist.get_world_size()
    size, parts = c.head_size, min(c.key_value_heads, t)
    q_hH, k_hH, v_hH = (
        take_shard(attention.query.weight, 0),
        *(
            CopyTo.apply(layer.weight).chunk(parts)[rank * parts // t]
            for layer in (attention.key, attention.value)
        ),
    )
    x_BSH = CopyTo.apply(x_BSH)
    q_BaSD, k_BkSD, v_BkSD = (
        F.linear(x_BSH, weight_hH).unflatten(-1, (-1, size)).transpose(1, 2)
        for weight_hH in (q_hH, k_hH, v_hH)
    )
    norms = attention.query_norm, attention.key_norm
    q_BaSD, k_BkSD = (
        F.rms_norm(x, (size,), CopyTo.apply(norm.weight), norm.eps)
        for x, norm in zip((q_BaSD, k_BkSD), norms, strict=True)
    )
    q_BaSD, k_BkSD = (apply_rotary(x, c.rotary_base) for x in (q_BaSD, k_BkSD))
    y_BaSD = F.scaled_dot_product_attention(
        q_BaSD, k_BkSD, v_BkSD, is_causal=True, enable_gqa=True
    )
    y_BSh = y_BaSD.transpose(1, 2).flatten(-2)
    return ReduceFrom.apply(F.linear(y_BSh, take_shard(attention.out.weight, 1)))


# %% [markdown]
# The cell's attention has eight heads of queries and two of keys and values, on up to eight ranks. A head has 12 features: in newer models the number of heads times their size need not be $H$.

# %% tags=["hide-input"]
# Compares output and gradients with the plain attention
QWEN = Config(
    hidden=64, heads=8, kv_heads=2, head=12, qk_norm=True, bias=False, norm="rms",
    mlp="swiglu", tied=False, layers=2, ffn=192, seq=64,
)  # fmt: skip


def compare_qwen():
    torch.manual_seed(0)
    models = [Attention(QWEN).to(ranks.device()) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    inputs = [draw_normal(0, 2, 16, 64).requires_grad_() for _ in models]
    outputs = [models[0](inputs[0]), plain_qwen(inputs[1], models[1])]
    for y_BSH in outputs:
        y_BSH.square().sum().backward()
    off = [max_difference(*outputs), max_difference(*(x.grad for x in inputs))]
    names = {"query": 0, "out": 1, "key": None, "value": None}
    for name, dim in (names | {"query_norm": None, "key_norm": None}).items():
        grads = [getattr(model, name).weight.grad for model in models]
        off.append(
            max_difference(*(g if dim is None else take_shard(g, dim) for g in grads))
        )
    return off


for t in (2, 4, 8):
    off = max(max(one) for one in ranks.run(compare_qwen, t))
    assert off < 7e-5  # paths of 800 terms: 2 sqrt(800) 2^-24 of up to 20
    print(
        f"{t} ranks: output and gradients differ from the whole by {format_short(off)}"
    )

# %% [markdown]
# With more ranks than heads of keys and values, `shardlab.tensor_parallel` gives each rank one such head. Copies of a head start equal and get the same summed gradient, so they stay equal; the gradient norm counts each head once.
# One all-reduce adds up the gradients of all heads, with zeros for the heads that a rank does not hold, so no further group is needed. vLLM copies the weights, too {cite}`vllm2026linear`; Megatron-LM shards them within a head, and gathers keys and values before each rank picks its own {cite}`nvidia2026attention`.
#
# With a *latent* {cite}`deepseek2024v3` the region begins later. DeepSeek-V3 first multiplies $x$ by narrow matrices, which give 1,536 features a token for queries, 512 for keys and values, and 64 for the keys' position. All 128 heads are computed from these.
# Every rank computes the narrow products in full, like a norm. The latents enter the region, and the matrices that compute heads from them are sharded:

# %%
show.source(tp.shard_latent, tp.core._compress_and_enter)

# %% [markdown]
# The table compares two whole models with one process: the first, like Qwen3, has a window in every other layer; the second, like DeepSeek-V3, has experts:

# %% tags=["hide-input"]
# Table: both models compared with one process
WINDOWED = replace(QWEN, window=16, full_every=2)
DEEPSEEK = replace(
    QWEN, kv_heads=None, qk_norm=False, head=8, value=12, latent=16, query_latent=24,
    rotary=4, experts=8, expert_ffn=32, shared_experts=1, dense_layers=1, ffn=64,
    router="sigmoid", expert_groups=4, groups_per_token=2, routed_scale=2.5,
)  # fmt: skip


def compare_today(config):
    """Largest differences of logits and gradients, and the share of parameters."""
    group, whole = dist.group.WORLD, build_model(config, torch.float64)
    mine = tp.parallelize(build_model(config, torch.float64), group)
    tokens, targets = make_batch(0)
    logits = [whole(tokens), tp.gather_last(mine(tokens), group)]
    loss(logits[0], targets).backward()
    tp.vocab_parallel_loss(mine(tokens), targets, group).backward()
    full, gradients = dict(whole.named_parameters()), []
    for name, parameter in mine.named_parameters():
        grad, dim, parts = (
            full[name].grad,
            tp.get_shard_dims(mine)[name],
            tp.count_shards(mine)[name],
        )
        if dim is not None:
            grad = grad.chunk(parts, dim)[dist.get_rank() * parts // group.size()]
        gradients.append(max_difference(grad, parameter.grad))
    held = [sum(p.numel() for p in model.parameters()) for model in (mine, whole)]
    return max_difference(*logits), max(gradients), held[0] / held[1]


rows = []
for name, config in (("as Qwen3", WINDOWED), ("as DeepSeek-V3", DEEPSEEK)):
    for t in (2, 4, 8):
        found = ranks.run(compare_today, t, config)
        logits, gradients, held = map(max, zip(*found, strict=True))
        # Paths of 26 * 100 + 512 terms in two orders: 2 * 3,100 * 2^-53 of up to 1.
        assert logits < 1e-12 and gradients < 1e-12
        rows.append(
            (name, t, format_short(logits), format_short(gradients), f"{held:.3f}")
        )
head = [
    "model",
    "t",
    "logits differ by",
    "gradients by",
    "parameters of a rank (of all)",
]
show.table(rows, head)

# %% [markdown]
# The next table gives the cost for the published shapes: a rank's parameters compared with an eighth of all, and the size of the region's input.

# %% tags=["hide-input"]
# Table: a layer's attention on one of eight ranks, by formula
rows, EIGHT = [], Layout(tp=8)
for name in ("llama-3-8b", "qwen3-30b-a3b", "deepseek-v3"):
    config = PRESETS[name]
    whole, mine = (
        memory.count_rank_parameters(config, at)["attention"] / config.layers / 1e6
        for at in (Layout(), EIGHT)
    )
    enters = sum(tp.predict.attention_input_sizes(config))
    sizes = f"{whole:.1f}", f"{whole / 8:.2f}", f"{mine:.2f}"
    rows.append((name, *sizes, f"{config.hidden:,}", f"{enters:,}"))
assert [row[2:4] for row in rows[1:]] == [("2.36", "2.62"), ("23.39", "36.63")]
assert rows[2][4:] == ("7,168", "2,112")
head = [
    "model",
    "attention of a layer (M parameters)",
    "an eighth (M)",
    "on a rank (M)",
    "h (numbers a token)",
    "what enters (numbers a token)",
]
show.table(rows, head)


# %% [markdown]
# Two ranks hold each of Qwen3's four key-value heads, which adds a tenth to a rank's attention weights. A DeepSeek-V3 rank holds one and a half times an eighth, because every rank has the matrices that compute the latents.
# In return, backward all-reduces 2,112 numbers a token instead of 7,168. With [sequence parallelism](sequence_parallel.md), a rank computes the latents of its own tokens only, and the ranks gather latents.
#
# ## Vocabulary: embedding, logits, loss
#
# The largest matrix of GPT-2 is its *embedding*. It is sharded by rows: a rank looks up the tokens whose rows it holds, and puts zeros for the others; the sum over the ranks is the whole output.
#
# ![The vocabulary on two ranks, four of eight entries each. Left, the embedding: for tokens 5, 1, 7 and 2 each rank looks up those that it has and puts zeros for the others; an all-reduce adds the two. Right, the loss: each rank keeps its half of the logits, and three numbers for each token are reduced: the largest logit, the sum of the exponentials, and the target's logit, which one rank has.](../figures/tensor_parallel_vocabulary.svg)
#
# The output layer (the model's head) is column-parallel, so each rank computes the *logits* of its own vocabulary entries.
# The logits need not be gathered. With $V$ entries, logits $z_j$, and $j \in r$ for the entries of rank $r$, the loss of a token is
#
# $$
# \log \sum_{j=1}^{V} e^{z_j} - z_\text{target}
# = \log \sum_r \Big( \sum_{j \in r} e^{z_j - z_{\max}} \Big) + z_{\max} - z_\text{target} ,
# $$
#
# so the ranks exchange only three numbers for each token: the largest logit, the sum of exponentials, the target's logit. The plain versions use the operators from above:

# %%
def local_entries(numbers_BS, v):
    """Row indices within this rank's v entries, and a mask of the entries it holds."""
    local_BS = numbers_BS - dist.get_rank() * v
    own_BS = (local_BS >= 0) & (local_BS < v)
    return local_BS * own_BS, own_BS


def plain_embedding(tokens_BS, table_vH):
    local_BS, own_BS = local_entries(tokens_BS, len(table_vH))
    return ReduceFrom.apply(F.embedding(local_BS, table_vH) * own_BS[..., None])


def plain_loss(logits_BSv, targets_BS):
    largest_BS = logits_BSv.detach().amax(-1)
    dist.all_reduce(largest_BS, dist.ReduceOp.MAX)
    logits_BSv = logits_BSv - largest_BS[..., None]
    local_BS, own_BS = local_entries(targets_BS, logits_BSv.shape[-1])
    target_BS = logits_BSv.gather(-1, local_BS[..., None])[..., 0] * own_BS
    sum_BS = ReduceFrom.apply(logits_BSv.exp().sum(-1))
    return (sum_BS.log() - ReduceFrom.apply(target_BS)).mean()


# %% [markdown]
# Backward sends nothing. The gradient of a logit is its softmax, minus one for the target, and each rank can compute it for its own entries.
# The plain loss wastes memory: it holds several tensors as large as the logits, the largest activation of a small model. `tp.vocab_parallel_loss` [holds one](#vocabulary-parallel-loss-with-one-tensor-of-the-logits-size).
# Both losses and both embeddings equal one process's; gathering logits would send hundreds of times as many bytes.

# %% tags=["hide-input"]
# Table: both losses compared with one process, memory and bytes sent
V, B, S = 4096, 4, 128


def measure_loss(which):
    """On a rank: difference from one process, memory (logits), bytes sent."""
    group = dist.group.WORLD
    logits_BSV = draw_normal(0, B, S, V)
    targets_BS = torch.arange(B * S, device=ranks.device()).view(B, S) * 7 % V
    full = logits_BSV.clone().requires_grad_()
    want = loss(full, targets_BS)
    want.backward()
    mine = take_shard(logits_BSV, 2).requires_grad_()
    with count.track_memory(mine.detach(), targets_BS) as held, count.record_traffic() as sent:
        if which == "plain":
            value = plain_loss(mine, targets_BS)
        else:
            value = tp.vocab_parallel_loss(mine, targets_BS, group)
        value.backward()
        held_most = held.peak_bytes - mine.nbytes - targets_BS.nbytes
    off = (
        max_difference(value, want),
        max_difference(mine.grad, take_shard(full.grad, 2)),
    )
    rows = compare_embedding(group)
    return max(*off, rows), held_most / mine.nbytes, sent.payload["all_reduce"]


def compare_embedding(group):
    table_VH, tokens_BS = (
        draw_normal(1, 64, 8),
        torch.arange(12, device=ranks.device()).view(3, 4) * 5,
    )
    plainly = plain_embedding(tokens_BS, take_shard(table_VH, 0))
    embedding = nn.Embedding.from_pretrained(table_VH)
    cut_embedding = tp.VocabEmbedding(embedding, group)
    wants = embedding(tokens_BS)
    return max(
        max_difference(plainly, wants), max_difference(cut_embedding(tokens_BS), wants)
    )


# Bytes of an all-gather out of each of 4 ranks
rows, gathering = [], 4 * B * S * V * 3 // 4
for which in ("plain", "tp.vocab_parallel_loss"):
    off, most, handed = ranks.run(measure_loss, 4, which)[0]
    sent = tp.bytes_on_wire(handed, 4)
    assert off < 2.5e-5 and handed == 3 * 4 * B * S  # 2 sqrt(512 tokens) 2^-24 of 9
    rows.append(
        (
            which,
            format_short(off),
            f"{most:.1f}",
            f"{sent / 1e6:.4f}",
            f"{gathering / 1e6:.2f}",
        )
    )
assert float(rows[1][2]) < 1.3 < 2 < float(rows[0][2])
head = ["loss", "off one process by", "held at most (logits)", "sent (MB)"]
show.table(
    rows, [*head, "gathering logits would send (MB)"], caption=f"4 ranks, V = {V:,}"
)

# %% [markdown]
# For one sequence of 8,192 tokens of Llama 3, float32 logits and 8 ranks, gathering would send 3,677 MB from each rank; three numbers a token are 0.17 MB.
#
# ### Vocabulary-parallel loss with one tensor of the logits' size
#
# `_CrossEntropy` has a hand-written backward, which turns its one tensor of the logits' size into the gradient in place.

# %%
show.source(tp.VocabEmbedding.forward, _CrossEntropy)

# %% [markdown]
# ## The whole model
#
# `parallelize` shards the whole GPT in place with these layers. Parameters keep their names, and the optimizer is created as usual.

# %%
show.source(tp.parallelize)


# %% [markdown]
# Training differs from one process in two lines, `parallelize` and `tp.vocab_parallel_loss`:

# %%
def train_five_steps(config):
    """The gathered weights after five steps of AdamW."""
    group = dist.group.WORLD
    model = tp.parallelize(build_model(config), group)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(5):
        tokens, targets = make_batch(step, 4, 32)
        optimizer.zero_grad()
        tp.vocab_parallel_loss(model(tokens), targets, group).backward()
        optimizer.step()
    return tp.full_state_dict(model)


weights = ranks.run(train_five_steps, 2, Config(seq=32, layers=2, heads=8, hidden=64))[
    0
]
print("tensors of a plain GPT:", len(weights))

# %% [markdown]
# AdamW is elementwise, so it computes the same on a shard as on the whole matrix.
#
# ### Comparison with one process over five steps
#
# The cell trains one process and $t$ ranks on the same batches, and compares logits, gradients and weights.
# The model "GPT-2's" has GELU, LayerNorm, biases and a tied head; "Llama's" has SwiGLU, RMSNorm, two query heads for each key and value head, and no tied head.

# %% tags=["hide-input"]
# Table: largest differences from one process, on 2 and on 4 ranks
GPT2ISH = Config(seq=32, layers=2, heads=8, hidden=64)
LLAMAISH = replace(
    GPT2ISH, kv_heads=4, mlp="swiglu", norm="rms", bias=False, tied=False
)
CASES = {"GPT-2's": GPT2ISH, "Llama's": LLAMAISH}


def compare_gradients(alone, cut_, group):
    """For each parameter: the difference of its gradient from one process's shard."""
    full = dict(alone.named_parameters())
    for (name, p), dim in zip(
        cut_.named_parameters(), tp.get_shard_dims(cut_).values(), strict=True
    ):
        want = full[name].grad
        yield max_difference(p.grad, want if dim is None else take_shard(want, dim))


def compare_training(config, dtype):
    """Largest differences: logits, first gradients, weights after five steps."""
    group = dist.group.WORLD
    alone, cut_ = (
        build_model(config, dtype),
        tp.parallelize(build_model(config, dtype), group),
    )
    models = [
        (alone, loss, torch.optim.AdamW(alone.parameters(), foreach=False)),
        (
            cut_,
            lambda *x: tp.vocab_parallel_loss(*x, group),
            torch.optim.AdamW(cut_.parameters(), foreach=False),
        ),
    ]
    found = []
    for step in range(5):
        outputs = []
        for model, of, optimizer in models:
            optimizer.zero_grad()
            tokens, targets = make_batch(step, 4, 32)
            outputs.append(model(tokens))
            of(outputs[-1], targets).backward()
        if step == 0:
            found.append(max_difference(take_shard(outputs[0], 2), outputs[1]))
            found.append(max(compare_gradients(alone, cut_, group)))
        for _, _, optimizer in models:
            optimizer.step()
    weights, full = alone.state_dict(), tp.full_state_dict(cut_)
    return [*found, max(max_difference(weights[name], full[name]) for name in weights)]


def compare_all():
    types = torch.float32, torch.float64
    return [
        compare_training(config, dtype) for config in CASES.values() for dtype in types
    ]


rows = []
found = [torch.tensor(ranks.run(compare_all, t)) for t in (2, 4)]
for i, (name, dtype) in enumerate(
    (n, d) for n in CASES for d in ("float32", "float64")
):
    # Paths of n = 26 * 64 + 256 terms in two orders: 4 sqrt(n) 2^-24, or 4 n 2^-53, of
    # up to 1. AdamW's step multiplies an error by up to lr / eps; in float32 it moves a
    # weight by 1e-3 either way, and what depends on it by 2e-5.
    room = (3.1e-5, 3.1e-5, 5e-3) if dtype == "float32" else (1e-12, 1e-12, 5e-9)
    off = torch.cat(found)[:, i].amax(0).tolist()
    assert all(x <= limit for x, limit in zip(off, room, strict=True)), off
    rows.append((name, dtype, *map(format_short, off)))
show.table(rows, ["model", "type", "logits", "gradients", "weights after 5 steps"])


# %% [markdown]
# Float64 has nine digits more than float32, and the differences shrink by nine digits, so they are rounding errors.
# In [ZeRO](zero.md) and [Pipeline parallelism](pipeline.md) the difference is zero, because each product has the same operands. Here ranks compute partial sums, so the roundings differ.
# The [tests](../tests/test_tensor_parallel.py) do the same for one rank, 16-bit weights, recomputation and clipping.
#
# ## What it costs
#
# ### Memory
#
# LayerNorms and the biases that are added after sums are whole on every rank; all other model states are divided by $t$.
# The cell measures the states after a step, and the tensors that forward saves for backward.

# %% tags=["hide-input"]
# Table: states and activations of a rank, predicted and measured
def held():
    """On a rank: bytes of the states after a step, and of what forward saves."""
    model = tp.parallelize(build_model(MODEL), dist.group.WORLD)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tokens, targets = make_batch(0)
    with count.track_saved_activations(model, tokens, targets) as saved:
        value = tp.vocab_parallel_loss(model(tokens), targets, dist.group.WORLD)
    value.backward()
    optimizer.step()
    states = count.measure_state_bytes(model, optimizer)
    del states[
        "counters"
    ]  # AdamW counts its steps, in four bytes for each parameter tensor
    return sum(states.values()), saved.bytes


# CPU: bytes held by CPU kernels
HELD = {t: ranks.run(held, t, device="cpu")[0] for t in (1, 2, 4)}
rows = []
for t, (states, saved) in HELD.items():
    predicted = sum(tp.predict_state_bytes(MODEL, t).values())
    assert states == predicted
    layout = Layout(tp=t, micro_batch=8)
    activations = memory.estimate_activations(MODEL, layout, seq=64, precision="fp32")
    kept = (
        activations.layer * activations.layers + activations.head + activations.logits
    )
    # The loss keeps some numbers for each token besides.
    assert abs(saved / kept - 1) < 0.01, (t, kept, saved)
    numbers = f"{predicted:,}", f"{states:,}", f"{states / HELD[1][0]:.3f}"
    more = f"{kept / 1e6:.2f}", f"{saved / 1e6:.2f}", f"{saved / HELD[1][1]:.2f}"
    rows.append((t, *numbers, *more))
assert HELD[4][1] > 0.4 * HELD[1][1]
head = ["t", "states: predicted (B)", "measured (B)", "of one process's"]
head += ["saved for backward: predicted (MB)", "measured (MB)", "of one process's"]
show.table(rows, head, caption="On each rank, float32")


# %% [markdown]
# States are predicted to the byte. Parameters that ranks hold whole are less than one percent, and less still in larger models.
#
# `````{admonition} False: "on t ranks everything takes a t-th of the memory"
# :class: checked
#
# Activations take more. They are divided inside the two regions; outside, every rank keeps the whole *residual stream* for LayerNorms and residual additions.
# Each block keeps $x + y/t$ bytes, $x$ outside and $y/t$ inside: each of four ranks holds 43 % of one process's activations, not 25 %.
# The next lesson, [Sequence parallelism](sequence_parallel.md), divides the rest.
# `````
#
# ### Messages and bytes
#
# A step has two all-reduces forward and two backward for each block, one after the embedding, and one in the output layer's backward. Each sums $bsh$ elements. The loss has two small all-reduces.

# %% tags=["hide-input"]
# Table: all-reduces and bytes of a step, predicted and counted
def count_traffic():
    """On a rank: (all-reduces, bytes handed to them) of forward, loss and backward."""
    group = dist.group.WORLD
    model = tp.parallelize(build_model(MODEL), group)
    tokens, targets = make_batch(0)
    with count.record_traffic() as forward:
        logits = model(tokens)
    with count.record_traffic() as of_loss:
        value = tp.vocab_parallel_loss(logits, targets, group)
    with count.record_traffic() as backward:
        value.backward()
    found = [forward, of_loss, backward]
    assert all(set(sent.calls) <= {"all_reduce"} and not sent.bytes for sent in found)
    return [(sent.calls["all_reduce"], sent.payload["all_reduce"]) for sent in found]


for t in (2, 4):
    rows, found = [], ranks.run(count_traffic, t)[0]
    calls, handed = tp.predict_calls(MODEL, t), tp.predict_sent_bytes(MODEL, t, 8, 64)
    for (counted, size), phase in zip(found, calls, strict=True):
        assert (counted, size) == (calls[phase], handed[phase])
        wires = (
            f"{tp.bytes_on_wire(handed[phase], t) / 1e6:.3f}",
            f"{tp.bytes_on_wire(size, t) / 1e6:.3f}",
        )
        rows.append((phase, calls[phase], counted, *wires))
head = [
    "in",
    "all-reduces: predicted",
    "counted",
    "on the wire: predicted (MB)",
    "counted (MB)",
]
show.table(
    rows, head, caption="A step on 4 ranks: 4 blocks, 8 sequences of 64, h = 128"
)

# %% [markdown]
# Data parallelism all-reduces $P \approx 12 L h^2$ elements in a step, for $P$ parameters in $L$ blocks of width $h$. Tensor parallelism all-reduces about $4 L b s h$. So tensor parallelism sends more if a step has more than $3h$ tokens: 12,288 for $h = 4096$.
#
# Ranks also wait for each all-reduce, because the next product *needs* the sum. [Hide the messages](#hide-the-messages-overlap-with-computation) overlaps some of them with other work.
#
# (tp-node)=
# ### How many ranks: one fast domain
#
# Bandwidth limits $t$. In forward, a rank computes about $24h^2/t$ floating-point operations of a block for each token, and sends $2 \cdot 2\frac{t-1}{t}h$ elements.
# Without overlap, the ratio of waiting to computing is
#
# $$
# \frac{4\,\frac{t-1}{t}\,h\,e\,\beta}{24\,h^2 / (t\,c)} = \frac{(t-1)\,e\,\beta\,c}{6\,h} ,
# $$
#
# with $e$ bytes for an element, $c$ operations per second, and $\beta$ seconds per byte. The ratio grows with $t$ and with the GPU's speed, and falls with $h$; batch and sequence length do not matter.
# The table assumes 16-bit elements, 400 TFLOP/s, and two links: 450 GB/s each way (NVLink switch) and 50 GB/s (network card).

# %% tags=["hide-input"]
# Table: the fraction of forward that waits, by formula
rows = []
for name in ("llama-3-8b", "llama-3-70b", "llama-3-405b"):
    h, cells = PRESETS[name].hidden, []
    for bandwidth, t in ((450e9, 2), (450e9, 8), (450e9, 32), (50e9, 2), (50e9, 8)):
        ratio = (t - 1) * 2 * 400e12 / bandwidth / (6 * h)
        cells.append(f"{100 * ratio / (1 + ratio):.0f}")
    rows.append((name, f"{h:,}", *cells))
head = ["fast, t = 2", "fast, t = 8", "fast, t = 32", "slow, t = 2", "slow, t = 8"]
show.table(
    rows, ["model", "h", *head], caption="Share of forward that waits for the wire (%)"
)

# %% [markdown]
# So $t$ should not exceed the number of GPUs on one fast switch. For years such a switch joined the eight GPUs of one machine, and "at most 8" became a rule of thumb {cite}`narayanan2021megatron`.
# This is a limit of the fast domain, not of tensor parallelism: in a GB200 NVL72, 72 GPUs share one NVLink switch system, with 900 GB/s each way for each GPU {cite}`nvidia2024nvl72`, so $t$ can be 16 or 32. There, the limits are the formula's $t/h$, the number of heads, and thin matrix products, which compute less efficiently ([One matrix product on many GPUs](gemm.md)).
# For more GPUs, combine tensor parallelism with [pipeline](pipeline.md) and [data parallelism](data_parallel.md).
#
# ## Hide the messages: overlap with computation
#
# (tp-backward)=
# ### Overlap in backward
#
# Earlier layers wait for the gradient of $X$, but only the optimizer needs the gradients of the weights. So compute the gradient of $X$, start its all-reduce, and compute the weights' gradients meanwhile.
# For this overlap, `copy_to` and all layers that use $X$ become one autograd function, as in Megatron-LM for one matrix. `parallelize` uses this function if its argument `edges`, a region's operators, has a `start_enter`.
# In backward, `start_enter_backward` starts the all-reduce, and `wait_dx()` waits for the sum; computation between the two overlaps with the message.

# %%
show.source(tp.SharedInput.take_output, _Columns.backward)

# %% [markdown]
# The plain model calls the layers of queries, keys and values one by one. The first call with an $x$ computes all three, and the other two calls return the stored outputs.
#
# The next cell measures steps over an emulated link of 0.4 Gbit/s, with and without overlap.
# The prediction adds the messages' time, $\alpha + \beta S$ for $S$ bytes, to a step whose operators send nothing (first row): its results are wrong, but it computes the same products.
# A step on loopback (second row) is no base for the prediction: on a slower link, its copying and waiting overlap with the link's time.
# A message overlaps at most with the weights' gradients of a region's first layers. These layers have $7h^2$ of a block's $12h^2$ weights (queries, keys, values and `up`), and weights' gradients are a third of the products: at most 7/12 of a third overlaps.

# %% tags=["hide-input", "measured"]
# Table: steps over a wire, predicted by computing and α + β S
LATENCY, BANDWIDTH = 1e-4, 50e6
WIDER = replace(MODEL, layers=2, hidden=512)


def pass_silently(x, group):
    return x


def time_on_wire(rounds, nothing, pair):
    """On a rank: step times, silent, on loopback, and over the link in two ways."""
    world, slow = dist.group.WORLD, link.create_slow_group(LATENCY, BANDWIDTH)
    cases = (world, nothing), (world, pair), (slow, pair), (slow, tp.REPLICATED)
    models = [
        tp.parallelize(build_model(WIDER), group, edges) for group, edges in cases
    ]
    seconds = []
    for step in range(rounds + 1):
        seconds.append([])
        for model in models:
            model.zero_grad()
            dist.barrier()
            begin = time.perf_counter()
            run_our_step(model, step, 4)
            seconds[-1].append(time.perf_counter() - begin)
    return seconds[1:]


edges = tp.Edges(pass_silently, pass_silently), tp.Edges(tp.copy_to, tp.reduce_from)
# CPU: times of the CPU's work and a wire
seconds = ranks.run(time_on_wire, 2, 5, *edges, device="cpu")[0]
calls = sum(tp.predict_calls(WIDER, 2).values())
handed = sum(tp.predict_sent_bytes(WIDER, 2, 4, 64).values())
wire = calls * 2 * LATENCY + tp.bytes_on_wire(handed, 2) / BANDWIDTH
compute, bare, plainly, overlapped = map(statistics.median, zip(*seconds, strict=True))
at_least = wire + compute * (1 - 7 / 12 / 3)
# Steps are taken in turn, and a busy machine may burden those that send nothing
# more; and ranks wait for one another at each message, there longer.
near = 0.75 < plainly / (compute + wire) < 1.5
show.check_timing(near, "layers one by one: compute and wire, within half")
less = statistics.median(b / a for *_, a, b in seconds)
show.check_timing(less < 1.05, "overlap makes no step slower")
rows = [("nothing is sent", "-", compute), ("loopback", "-", bare)]
rows += [("the wire, layers one by one", f"{1e3 * (compute + wire):.0f}", plainly)]
rows += [
    (
        "the wire, overlapped with the weights' gradients",
        f"from {1e3 * at_least:.0f}",
        overlapped,
    )
]
rows = [(case, told, f"{1e3 * took:.0f}") for case, told, took in rows]
head = ["step", "predicted (ms)", "measured (ms)"]
show.table(
    rows, head, caption=f"Two ranks; all messages take {1e3 * wire:.0f} ms on the wire"
)


# %% [markdown]
# (tp-forward)=
# ### Overlap in forward
#
# In forward there are no weights' gradients to overlap with. But the product can be split by tokens: while the partial sums of some tokens are all-reduced, those of the next tokens are computed:

# %%
def row_in_pieces(x_Ti, w_iO, pieces, group):
    """The sum of the ranks' products; one piece is sent while the next is computed."""
    under_way = []
    for x_ti in x_Ti.chunk(pieces):
        y_tO = x_ti @ w_iO  # [T / pieces, i] @ [i, O]: a summand
        under_way.append((y_tO, dist.all_reduce(y_tO, group=group, async_op=True)))
    for _, work in under_way:
        work.wait()
    return torch.cat([y_tO for y_tO, _ in under_way])


# %% tags=["hide-input", "measured"]
# Compares the pieces with one product, and measures both over a link
def in_pieces(rounds):
    """On a rank: seconds of the product, of 1 and of 8 pieces over a wire; gap."""
    group, size = link.create_slow_group(1e-4, 100e6), (1024, 1024, 1024)
    x_Ti, w_iO = draw_normal(dist.get_rank(), *size[:2]), draw_normal(1, *size[1:]) / 32
    full_TO = row_in_pieces(x_Ti, w_iO, 1, dist.group.WORLD)
    calls = (
        lambda: x_Ti @ w_iO,
        *(lambda n=n: row_in_pieces(x_Ti, w_iO, n, group) for n in (1, 8)),
    )
    found = []
    for _ in range(rounds + 1):
        found.append([])
        for call in calls:
            dist.barrier()
            begin = time.perf_counter()
            y_TO = call()
            found[-1].append(time.perf_counter() - begin)
    return found[1:], max_difference(y_TO, full_TO)


# CPU: times of the CPU's work and a wire
found, off = ranks.run(in_pieces, 2, 10, device="cpu")[0]
product, unsplit, pieces = map(statistics.median, zip(*found, strict=True))
wire = 2e-4 + 4 * 1024 * 1024 / 100e6
assert off < 4e-5  # 2 sqrt(2048 products) roundings of 2^-24 of up to 7
less = statistics.median(c / b for _, b, c in found)
show.check_timing(less < 0.95, "in 8 pieces it takes less than 95 % of the time")
hidden = (unsplit - pieces) / min(product, wire)
print(f"product alone {1e3 * product:.0f} ms, its sum on the wire {1e3 * wire:.0f} ms")
print(f"in 1 piece {1e3 * unsplit:.0f} ms, in 8 pieces {1e3 * pieces:.0f} ms: ", end="")
print(
    f"{100 * hidden:.0f} % of the shorter is hidden; the same sum, up to {format_short(off)}"
)


# %% [markdown]
# With 8 pieces, at best 7/8 of the shorter time, the product's or the message's, is hidden. The measured value is lower because copying and adding on loopback use the same two cores.
# Pieces must stay large: each is a message with its own $\alpha$, and a thinner, less efficient product.
#
# This is *asynchronous tensor parallelism*. With [Sequence parallelism](sequence_parallel.md), its all-gather and reduce-scatter are split in this way, too.
# PyTorch's report of 2024, with torchtitan, gives a forward up to 29 % faster for a Llama 3 of 7B and 20 % for 70B, and a whole step about 8 % faster {cite}`wang2024asynctp`; we have not measured this.
# In torch 2.13 it is a compiler pass for CUDA (`torch._inductor.config._micro_pipeline_tp`, off by default). Our `parallelize` does not split products.
#
# (tp-dtensor)=
# ## Comparison with PyTorch's parallelize_module
#
# `parallelize_module` takes a plan: module names, or patterns, and how each is sharded. Weights become `DTensor`s, which store how they are sharded, and each operation on them decides what to send.
# This plan does the same as [`shard_attention` and `shard_ffn`](#attention-sharded-by-heads), with `PrepareModuleInput` in the role of `SharedInput`:

# %%
def parallelize_by_torch(model, group, enter_once=True):
    """The same cuts with DTensor."""
    column, row, replicated = ColwiseParallel, RowwiseParallel, (Replicate(),)
    plan = {
        "embedding": row(input_layouts=Replicate()),
        "head": column(output_layouts=Shard(-1), use_local_output=False),
        "blocks.*.attention.out": row(),
        "blocks.*.ffn.down": row(),
    }
    for name in ("attention.query", "attention.key", "attention.value", "ffn.up"):
        plan[f"blocks.*.{name}"] = column()
    for name in ("attention", "ffn") if enter_once else ():
        plan[f"blocks.*.{name}"] = PrepareModuleInput(
            input_layouts=replicated, desired_input_layouts=replicated
        )
    mesh = DeviceMesh.from_group(group, ranks.device().type)
    return parallelize_module(model, mesh, plan, src_data_rank=None)


def torch_step(model, step):
    with loss_parallel():
        value = loss(model(make_batch(step)[0]), make_batch(step)[1])
        value.backward()  # inside, because it has a backward of its own
    return value


# %% [markdown]
# Our model and DTensor's train for five steps; the last row is a common form of the plan, without `PrepareModuleInput`.

# %% tags=["hide-input"]
# Table: losses, weights, all-reduces and dispatches of both
def profile_step(run, model):
    """In one step: all-reduces, and operations through DTensor's dispatcher."""
    with profile() as seen:
        run(model, 0)
    calls = {event.key: event.count for event in seen.key_averages()}
    return calls["c10d::allreduce_"], calls.get("PythonSubclass", 0)


def compare_with_torch():
    group, losses, models = dist.group.WORLD, [], []
    for model, run in (
        (tp.parallelize(build_model(MODEL), group), run_our_step),
        (parallelize_by_torch(build_model(MODEL), group), torch_step),
    ):
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        losses.append([])
        for step in range(5):
            optimizer.zero_grad()
            losses[-1].append(run(model, step).item())
            optimizer.step()
        models.append(model)
    ours, theirs = models
    others = theirs.state_dict()  # DTensors where they are cut
    weights = [
        max_difference(
            tensor, getattr(others[name], "full_tensor", lambda n=name: others[n])()
        )
        for name, tensor in tp.full_state_dict(ours).items()
    ]
    often = parallelize_by_torch(build_model(MODEL), group, enter_once=False)
    steps = (run_our_step, ours), (torch_step, theirs), (torch_step, often)
    in_loss = max(abs(a - b) for a, b in zip(*losses, strict=True))
    return in_loss, max(weights), [profile_step(*step) for step in steps]


# CPU: a profiler counts gloo's calls
found = ranks.run(compare_with_torch, 2, device="cpu", show=False)
in_loss, in_weights, found = found[0]
# Losses: 4 sqrt(512 tokens) 2^-24 of 5.5, and 2e-5 of a turned weight, as above.
assert in_loss < 5e-5 and in_weights < 5e-3
L, (calls, dispatched) = MODEL.layers, zip(*found, strict=True)
# torch reduces the loss's two sums one by one, and queries, keys, values by themselves.
assert calls == (4 * L + 2 + 2, 4 * L + 2 + 3, 6 * L + 2 + 3), calls
assert dispatched[0] == 0 and min(dispatched[1:]) > 100
print(
    f"five steps: losses differ by {format_short(in_loss)}, weights by {format_short(in_weights)}"
)
ways = "ours", "DTensor", "DTensor, without PrepareModuleInput"
head = [
    "two ranks, 4 blocks",
    "all-reduces in a step",
    "operations through DTensor's dispatcher",
]
show.table(list(zip(ways, calls, dispatched, strict=True)), head)


# %% [markdown]
# The results are equal. Without `PrepareModuleInput`, queries, keys and values each all-reduce a gradient of $x$: two more all-reduces of full size for each block.
#
# DTensor costs time: it has to look up a rule for each operation, and to wrap the result.

# %% tags=["hide-input", "measured"]
# Measures a step of ours and of DTensor's
def time_steps(rounds):
    """On a rank: seconds of steps of ours and of DTensor's."""
    group = dist.group.WORLD
    pair = {
        "ours": (run_our_step, tp.parallelize(build_model(MODEL), group)),
        "DTensor": (torch_step, parallelize_by_torch(build_model(MODEL), group)),
    }
    seconds = {who: [] for who in pair}
    for number in range(rounds + 2):
        for who in list(pair)[:: 1 if number % 2 else -1]:
            run, model = pair[who]
            model.zero_grad()
            dist.barrier()
            begin = time.perf_counter()
            run(model, number)
            seconds[who].append(time.perf_counter() - begin)
    return {who: times[2:] for who, times in seconds.items()}


seconds = ranks.run(time_steps, 2, 10, device="cpu", show=False)[
    0
]  # CPU: times are gloo's
ratio = statistics.median(a / b for a, b in zip(*seconds.values(), strict=True))
show.check_timing(ratio < 1.0, "ours is faster")  # about 0.7 on a quiet machine
for who, times in seconds.items():
    print(
        f"{who}: {1e3 * statistics.median(times):.0f} ms a step, two ranks on loopback"
    )
print(f"ours / DTensor, median of the ratios: {ratio:.2f}")

# %% [markdown]
# This cost is per operation, not per byte: it is negligible in large layers, and on a GPU the dispatch runs ahead of kernels that are long enough.
# In return, FSDP2, checkpoints and clipping can read from a DTensor how it is sharded. [The benchmark](../benchmarks/tensor_parallel.py) measures with more care.
#
# | here | PyTorch | Megatron-LM |
# |---|---|---|
# | `ColumnLinear` | `ColwiseParallel` | `ColumnParallelLinear` |
# | `RowLinear` | `RowwiseParallel` | `RowParallelLinear` |
# | `copy_to`, once for each region | `PrepareModuleInput` | `copy_to_tensor_model_parallel_region` |
# | `reduce_from` | `Partial` to `Replicate` | `reduce_from_tensor_model_parallel_region` |
# | `tp.vocab_parallel_loss` | `loss_parallel()` | `vocab_parallel_cross_entropy` |
# | $t$ | size of the mesh's dimension | `tensor_model_parallel_size` |
#
# ## What goes wrong
#
# None of these mistakes raises an error.
#
# ### The forgotten all-reduce
#
# The layers use `reduce_from`, but not `copy_to`. Forward and the first loss are right, to the last digit.
# `parallelize` takes the two operators as an argument, so the mistake is one line. Both runs train for 80 steps on two ranks, over the same twenty batches.

# %%
LAB = replace(MODEL, layers=2, hidden=64)


def do_nothing(x, group):
    return x


def train_step(edges, steps=80):
    """On a rank: each step's loss, and the ranks' difference in whole parameters."""
    group, found = dist.group.WORLD, []
    model = tp.parallelize(build_model(LAB), group, edges)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for step in range(steps):
        optimizer.zero_grad()
        value = run_our_step(model, step % 20, 4)
        optimizer.step()
        found.append((value.item(), compare_replicated(model, group)))
    return found


def compare_replicated(model, group):
    """Largest difference between ranks in a parameter that all ranks hold whole."""
    named, cuts = dict(model.named_parameters()), tp.get_shard_dims(model)
    replicated = [named[name].detach().view(-1) for name in named if cuts[name] is None]
    mine = torch.cat(replicated)
    root = mine.clone()
    dist.broadcast(root, 0, group=group)
    difference = (mine - root).abs().max()
    dist.all_reduce(difference, dist.ReduceOp.MAX, group=group)
    return difference.item()


forgotten = tp.Edges(enter_region=do_nothing, leave_region=tp.reduce_from)
RUNS = {
    "as it should be": ranks.run(train_step, 2, tp.REPLICATED)[0],
    "forgotten": ranks.run(train_step, 2, forgotten)[0],
}

# %% tags=["hide-input"]
# Draws both loss curves, and the ranks' difference in whole parameters
curves = {name: list(zip(*found, strict=True)) for name, found in RUNS.items()}
(right, stay), (wrong, drift) = curves.values()
# 2 sqrt(256 tokens) roundings of 2^-24 of 5.5
assert abs(right[0] - wrong[0]) < 1.1e-5 and max(stay) == 0.0 < 0.01 < drift[-1]
assert statistics.mean(wrong[-10:]) > 1.05 * statistics.mean(right[-10:])
print(f"loss of step 1: {right[0]:.4f} and {wrong[0]:.4f}; ", end="")
print(f"mean of steps 71 to 80: {statistics.mean(right[-10:]):.2f} and ", end="")
print(f"{statistics.mean(wrong[-10:]):.2f} where it is forgotten")
figure, panels = plt.subplots(1, 2, figsize=(7.6, 3.0), gridspec_kw={"wspace": 0.38})
places = (38, -0.2, "right", "top"), (46, 0.15, "left", "bottom")
for (name, (losses, apart_)), color, place in zip(
    curves.items(), (2, 5), places, strict=True
):
    smooth = [
        statistics.mean(losses[max(0, i - 4) : i + 1]) for i in range(len(losses))
    ]
    for axes, values in zip(panels, (smooth, apart_), strict=True):
        axes.plot(
            range(1, len(values) + 1), values, color=show.RANK_COLORS[color], lw=2
        )
    step, off, ha, va = place
    panels[0].text(step, smooth[step] + off, name, ha=ha, va=va)
panels[0].set_ylabel("loss")
panels[1].set_ylabel("whole parameters apart")
for axes in panels:
    axes.set_xlabel("step")
show.figure(
    figure,
    "Left, the loss over 80 steps: without the all-reduce in backward it falls, too, "
    "a little behind at first, then further and further. Right, how far parameters are "
    "apart that both ranks have whole: with it zero in every step, without it more and "
    "more.",
    "tensor_parallel_forgotten",
)

# %% [markdown]
# The wrong model trains, too. Without the right curve to compare, you would blame the learning rate.
# Each rank's gradients lack the other rank's partial sum. So the parameters that both hold whole (LayerNorms, biases added after sums) drift apart. They must stay bitwise equal, which `compare_replicated` tests.
# The checker of [Tensor types](tensor_types.md) finds the wrong line before the program runs.
#
# ### Dropout: seeds inside and outside the regions
#
# Dropout needs two kinds of masks. Between the regions all ranks hold the same activations, and have to drop the same ones. Within attention ranks hold different heads, and have to drop independently.
# So one seed for all ranks is wrong, and so is a different seed for each rank.

# %% tags=["hide-input"]
# Makes both mistakes: a seed for each rank between regions, one seed inside attention
DROPS = replace(LAB, dropout=0.1)


def run_dropout(seed_of_its_own):
    """On a rank: loss of step 20, stream of step 1, final difference of norms."""
    group, streams = dist.group.WORLD, []
    model = tp.parallelize(build_model(DROPS), group)
    model.norm.register_forward_pre_hook(
        lambda _, inputs: streams.append(inputs[0].detach())
    )
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    torch.manual_seed(dist.get_rank() if seed_of_its_own else 0)
    for step in range(20):
        optimizer.zero_grad()
        value = run_our_step(model, step)
        optimizer.step()
    return value.item(), streams[0], compare_replicated(model, group)


def compare_heads():
    """On a rank: a mask for two heads, drawn from one seed on all ranks."""
    torch.manual_seed(0)
    return F.dropout(torch.ones(2, 64, 64), 0.1) > 0


for own in (False, True):
    # CPU: masks by the CPU's generator
    (value, stream, norms), (_, other, _) = ranks.run(run_dropout, 2, own, device="cpu")
    assert (
        max_difference(stream, other) > 0.05 < 100 * norms
        if own
        else max_difference(stream, other) == norms == 0
    )
    name = "a seed for each rank" if own else "one seed for all"
    print(f"between regions, {name}: loss of step 20 {value:.2f}, ", end="")
    print(
        f"streams of ranks {max_difference(stream, other):.2f} apart, norms {norms:.4f}"
    )
# CPU: masks by the CPU's generator
same = torch.stack(ranks.run(compare_heads, 2, device="cpu"))
fraction = (same[0] == same[1]).float().mean().item()
print(
    f"within attention, one seed: {100 * fraction:.0f} % of rank 1's mask is rank 0's"
)
own = (same[0, 0] == same[0, 1]).float().mean().item()
print(f"of two heads of one rank: {100 * own:.0f} % of one mask is the other's")
assert fraction == 1.0

# %% [markdown]
# Two independent masks agree in 82 % of their entries, $0.9^2 + 0.1^2$, as the masks of one rank's heads do. With one seed, the masks of two ranks agree everywhere, so pairs of heads drop the same entries.
#
# The loss does not show the other mistake, a seed for each rank between the regions, because dropout is noisy anyway. But the ranks no longer hold the same residual stream: they multiply different $X$ by shards of one matrix, so the sum is wrong.
# Like Megatron, `parallelize` gives each rank its own seed inside attention, and restores the generator afterwards:

# %%
show.source(own_seed)


# %% [markdown]
# ### Initialisation of shards
#
# It looks wasteful to draw a whole matrix and keep a shard, so people let each rank create its layers with the shards' shapes.
#
# (tp-shards)=
# `````{admonition} Only if seeds differ and scales do not depend on the shape: "each rank can initialise its own shard"
# :class: checked
#
# With *one seed on all ranks*, all shards are equal. They get equal gradients and stay equal for ever, and the network has $F/t$ different neurons instead of $F$.
# With a *seed for each rank*, neurons differ. But `nn.Linear` scales its weights by $1/\sqrt{\text{inputs}}$, and a row-parallel shard has $1/t$ of the inputs: its weights are $\sqrt t$ times too large. A scale that does not depend on the shape, such as GPT-2's 0.02, is right; but the model still depends on $t$, and differs from one process's.
# The cell trains a feed-forward network on two ranks for 50 steps, with weights drawn in three ways, and counts different neurons.
# `````

# %% tags=["hide-input"]
# Table: a network with shards drawn in three ways
def feed_forward(how, group, wide=64, inner=256):
    """Column- and row-parallel weights of nn.Linear, drawn in one of three ways."""
    torch.manual_seed(0)
    up, down = nn.Linear(wide, inner, bias=False), nn.Linear(inner, wide, bias=False)
    first, second = tp.ColumnLinear(up, group), tp.RowLinear(down, group)
    if how != "whole, then cut":  # this rank draws its own shapes alone
        shard = inner // dist.get_world_size(group)
        torch.manual_seed(dist.get_rank(group) if how == "each its own seed" else 0)
        first.weight = nn.Linear(wide, shard, bias=False).weight
        second.weight = nn.Linear(shard, wide, bias=False).weight
    return first, second


def initialize_twice(how):
    group = dist.group.WORLD
    first, second = (layer.to(ranks.device()) for layer in feed_forward(how, group))
    scale = second.weight.std().item()
    sgd = torch.optim.SGD([first.weight, second.weight], lr=1.0)
    for step in range(50):
        x_TH = draw_normal(step, 64, 64)
        loss_ = (second(gelu(first(x_TH))) - gelu(x_TH.roll(1, -1))).square().mean()
        sgd.zero_grad()
        loss_.backward()
        sgd.step()
    return scale, loss_.item(), first.weight.detach()


rows, scales = [], {}
for how in ("whole, then cut", "each its own seed", "one seed on all ranks"):
    # CPU: drawn by the CPU's generator
    found = ranks.run(initialize_twice, 2, how, device="cpu")
    neurons = len(torch.unique(torch.cat([weight for *_, weight in found]), dim=0))
    scales[how], value, _ = found[0]
    ratio = scales[how] / scales["whole, then cut"]
    assert neurons == (128 if how == "one seed on all ranks" else 256)
    assert how == "whole, then cut" or abs(ratio - math.sqrt(2)) < 0.03
    rows.append((how, neurons, f"{ratio:.2f}", f"{value:.3f}"))
head = [
    "weights drawn",
    "different neurons of 256, after training",
    "scale of the second matrix",
]
show.table(rows, [*head, "loss after 50 steps"])


# %% [markdown]
# DTensor makes the first mistake if its mesh has no random generator of its own, as on CPUs, and only prints a warning:

# %%
def draw_by_torch():
    torch.manual_seed(0)
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    weight = distribute_tensor(torch.zeros(8, 4), mesh, [Shard(0)])
    return nn.init.normal_(weight).to_local()


# CPU: a DTensor on a CPU mesh
shards = ranks.run(draw_by_torch, 2, device="cpu", show=False)
print("shards of a DTensor drawn on a CPU mesh are equal:", torch.equal(*shards))
assert torch.equal(*shards)


# %% [markdown]
# So draw each matrix whole, from one seed, and keep the rank's shard. If the model fits on no rank, draw it matrix by matrix: `tp.initialize_shards` gives each shard the numbers that one process would draw.

# %%
def initialize_on_meta():
    group = dist.group.WORLD
    with torch.device("meta"):
        model = GPT(MODEL)
    tp.parallelize(model, group)
    torch.manual_seed(0)
    with count.track_memory(device=ranks.device()) as held:
        tp.initialize_shards(model)
    return held.peak_bytes, tp.full_state_dict(model)


# %% [markdown]
# `tp.full_state_dict` gathers the shards into one process's state dict. `tp.load_full_state_dict` loads it into shards again, on any number of ranks:

# %% tags=["hide-input"]
# Compares the drawn and the loaded weights with one process's, bit for bit
def resume_training(state):
    model = tp.parallelize(build_model(MODEL), dist.group.WORLD)
    tp.load_full_state_dict(model, state)
    return tp.full_state_dict(model)


def compare_bits(found, want):
    return all(torch.equal(found[name].cpu(), want[name].cpu()) for name in want)


want = build_model(MODEL).state_dict()
full = sum(4 * tensor.numel() for tensor in want.values())
# CPU: the same bits each time
for peak, drawn in ranks.run(initialize_on_meta, 4, device="cpu"):
    assert peak < 0.7 * full and compare_bits(drawn, want)
print(f"drawn on 4 ranks: at most {peak:,} B held of {full:,} B; the same bits")
state = ranks.run(train_five_steps, 4, MODEL)[0]
state = {name: tensor.cpu() for name, tensor in state.items()}
assert all(compare_bits(ranks.run(resume_training, t, state)[0], state) for t in (1, 2))
print(f"{len(state)} tensors trained on 4 ranks, loaded on 1 and on 2: the same bits")


# %% [markdown]
# ### Different batches or gradient norms on the ranks
#
# All ranks of a tensor group need *the same* batch. A sampler that chooses batches by global rank gives them different batches; then the embedding adds up rows of different tokens, and the loss is wrong.
# Choose the batch by the index of the tensor group, not of the rank.
# torch's `clip_grad_norm_` computes the norm of a rank's own gradients only. So each rank scales by a different factor, and whole parameters drift apart. `tp.clip_grad_norm_` sums the squares of sharded gradients over the ranks, and counts whole gradients once.

# %% tags=["hide-input"]
# Measures the gradient norm: by one process, by tp, and by torch on each rank
def norms():
    """On a rank: the norms of one process, of `tp`, and of torch on this rank."""
    alone, model = build_model(LAB), tp.parallelize(build_model(LAB), dist.group.WORLD)
    tokens, targets = make_batch(0)
    loss(alone(tokens), targets).backward()
    run_our_step(model, 0)
    found = [nn.utils.clip_grad_norm_(alone.parameters(), math.inf)]
    found.append(tp.clip_grad_norm_(model, math.inf))
    return [*found, nn.utils.clip_grad_norm_(model.parameters(), math.inf)]


found = torch.tensor(ranks.run(norms, 2))
# Paths of 26 * 64 + 512 terms in two orders: 2 sqrt(2176) roundings of 2^-24.
assert torch.allclose(found[:, 0], found[:, 1], rtol=6e-6)
assert (found[:, 2] < 0.99 * found[:, 0]).all() and found[0, 2] != found[1, 2]
(alone, ours, first), (*_, second) = found.tolist()
print(
    f"norm of one process {alone:.3f}, tp.clip_grad_norm_ on both ranks {ours:.3f}; ",
    end="",
)
print(f"torch's {first:.3f} on rank 0 and {second:.3f} on rank 1")

# %% [markdown]
# ## When to use it
#
# | for | against |
# |---|---|
# | Divides weights, gradients, optimizer states *and* the work of one block by $t$, so even a single sequence gets faster | Has two all-reduces forward and two backward for each block, which overlap only in part |
# | Divides the activations inside attention and feed-forward network, and the logits | Leaves the residual stream whole: above, each of 4 ranks holds 43 % of the activations |
# | Needs no larger batch, unlike data parallelism, and has no bubble, unlike a pipeline | Sends more than data parallelism above $3h$ tokens in a step |
# | Equals one process, but for rounding | $t$ must divide heads, widths and vocabulary; heads of keys and values are copied if there are fewer than ranks |
# | | Needs fast links: one machine, or one NVLink domain |
#
# In a real job, three signs show a correct setup: the first loss and gradient norm equal those of one process; after a thousand steps, LayerNorms' weights are bitwise equal on all ranks of a group; a profile shows four all-reduces for each block and step, and none between queries and keys.
#
# ```{admonition} On more GPUs
# :class: note
#
# On this page, results and byte counts are exact; seconds are those of ranks that share a machine, or of an emulated link.
# Two GPUs would show the deciding ratio: the time of a layer's four all-reduces to that of its halved products, over NVLink and, where you can choose, over PCIe.
# ```
#
# ## Exercises
#
# ```{exercise-start} Bytes of a rank (easy)
# :label: ex-tp-bytes
# ```
#
# A feed-forward network 4096 → 16384 → 4096, this time with both biases, is trained in float32 with AdamW on $t = 4$ ranks.
# How many bytes of model states (weights, gradients, two moments) does each rank hold?

# %%
answer = ...  # bytes
check(answer, "tp_bytes")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-tp-bytes
# :label: sol-tp-bytes
# :class: dropdown
# ```
#
# Both matrices and the first bias are divided. The second bias is added after the sum, so every rank holds it whole.

# %%
answer = (2 * 4096 * 16384 // 4 + 16384 // 4 + 4096) * 16
check(answer, "tp_bytes")


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Shards of a feed-forward network (easy)
# :label: ex-tp-shards
# ```
#
# A feed-forward network has weights of `nn.Linear`, which computes `x @ weight.T + bias`: `up_FH`, `up_bias_F` and `down_HF`. Return the shards `(up_fH, up_bias_f, down_Hf)` of `rank` of `size` ranks. `size` divides F.

# %%
def my_ffn_shards(up_FH, up_bias_F, down_HF, rank, size):
    pass  # your code


check(my_ffn_shards)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-tp-shards
# :label: sol-tp-shards
# :class: dropdown
# ```
#
# A column of $W_1$ is a row of `up.weight`. Both matrices are sharded along F: dimension 0 of `up`, 1 of `down`.

# %%
def my_ffn_shards(up_FH, up_bias_F, down_HF, rank, size):
    shard = len(up_FH) // size
    own = slice(rank * shard, (rank + 1) * shard)
    return up_FH[own], up_bias_F[own], down_HF[:, own]


check(my_ffn_shards)

# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} The other order, with a gate (medium)
# :label: ex-tp-order
# ```
#
# A feed-forward network with SwiGLU has two matrices, `up` and `gate`, from $h$ to the inner width $4h$, and `down` back to $h$. Shard them in the wrong order: `up` and `gate` by rows, `down` by columns. Every rank starts with all of $X$, and needs all of $Y$ at the end.
# With ring collectives, what is the ratio of the bytes that a rank sends in forward to those of the right order?

# %%
answer = ...  # times
check(answer, "tp_other_order")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-tp-order
# :label: sol-tp-order
# :class: dropdown
# ```
#
# SiLU and the elementwise product need whole sums, not partial sums: both inner tensors need an all-reduce of width $4h$, and $Y$ an all-gather of width $h$. The right order has one all-reduce of width $h$. An all-reduce sends twice the bytes of an all-gather.

# %%
answer = (2 * 2 * 4 + 1) / 2
check(answer, "tp_other_order")


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} A trainable SwiGLU with a bias (medium)
# :label: ex-tp-gated
# ```
#
# Compute $Y = (\mathrm{SiLU}(X G) \cdot X U)\, D + b$ with the right gradients. Every rank has all of `x_BSH` and `bias_H`, and its own shards of the three matrices, in the layout of `nn.Linear`. You may use `tp.copy_to` and `tp.reduce_from`.
# One all-reduce forward and one backward are enough.

# %%
def my_gated_ffn(x_BSH, gate_fH, up_fH, down_Hf, bias_H, group):
    pass  # your code


check(my_gated_ffn)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-tp-gated
# :label: sol-tp-gated
# :class: dropdown
# ```
#
# Apply `copy_to` to $X$ once, for both matrices. Add the bias after the sum.

# %%
def my_gated_ffn(x_BSH, gate_fH, up_fH, down_Hf, bias_H, group):
    x_BSH = tp.copy_to(x_BSH, group)
    y_BSf = F.silu(x_BSH @ gate_fH.T) * (x_BSH @ up_fH.T)  # [B, S, H] @ [H, f], twice
    y_BSH = y_BSf @ down_Hf.T  # [B, S, f] @ [f, H]: a summand
    return tp.reduce_from(y_BSH, group) + bias_H


check(my_gated_ffn)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} More ranks than heads of keys and values (medium)
# :label: ex-tp-heads
# ```
#
# A model has $a$ = `heads` heads of queries and $k$ = `kv_heads` of keys and values; query head $i$ uses key and value head $\lfloor i \cdot k / a \rfloor$. Ranks hold consecutive query heads. If there are more ranks than `kv_heads`, several ranks hold the same head of keys and values.
# Return two lists for `rank` of `size`: the heads of keys and values that it holds, and all ranks, itself included, that hold the same heads and so sum their gradients.
# `size` divides `heads`, and one of `size` and `kv_heads` divides the other.

# %%
def my_kv_heads(heads, kv_heads, rank, size):
    pass  # your code


check(my_kv_heads)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-tp-heads
# :label: sol-tp-heads
# :class: dropdown
# ```
#
# A rank's first and last query heads determine its heads of keys and values. Each copy of such a head is used by its own rank's queries only, so its gradient is a partial sum, and is all-reduced over the copies alone.

# %%
def my_kv_heads(heads, kv_heads, rank, size):
    def held(r):
        first, last = r * heads // size, (r + 1) * heads // size - 1
        return list(range(first * kv_heads // heads, last * kv_heads // heads + 1))

    return held(rank), [r for r in range(size) if held(r) == held(rank)]


check(my_kv_heads)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} The likeliest token from sharded logits (hard)
# :label: ex-tp-greedy
# ```
#
# Rank $r$ has the logits of entries $r v$ to $r v + v - 1$ of the vocabulary: `logits_BSv`, float32. Return the index of the entry with the largest logit for each token, `[B, S]`, on every rank, without gathering logits. Among equal logits choose the smallest index, as `argmax` does in one process.

# %%
def my_greedy(logits_BSv, group):
    pass  # your code


check(my_greedy)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-tp-greedy
# :label: sol-tp-greedy
# :class: dropdown
# ```
#
# First find the largest logit over all ranks, then the smallest index that has this logit. Ranks without it contribute an index larger than all others.

# %%
def my_greedy(logits_BSv, group):
    v = logits_BSv.shape[-1]
    own_BS, number_BS = logits_BSv.max(-1)
    largest_BS = own_BS.clone()
    dist.all_reduce(largest_BS, dist.ReduceOp.MAX, group=group)
    number_BS = number_BS + dist.get_rank(group) * v
    number_BS[own_BS < largest_BS] = dist.get_world_size(group) * v
    dist.all_reduce(number_BS, dist.ReduceOp.MIN, group=group)
    return number_BS


check(my_greedy)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} The smallest degree that fits (design)
# :label: ex-tp-degree
# ```
#
# Return the smallest $t$, from 1 to `node` (the GPUs that share a fast link), that divides `config.heads`, `key_value_heads`, `ffn_width` and `vocab`, and whose `memory.estimate_step(config, Layout(tp=t), device="gpu").peak` is at most `limit` bytes; `None` if there is none.

# %%
def my_degree(config, limit, node):
    pass  # your code


check(my_degree)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-tp-degree
# :label: sol-tp-degree
# :class: dropdown
# ```
#
# Return the smallest, because each doubling makes products thinner and messages no smaller.

# %%
def my_degree(config, limit, node):
    widths = config.heads, config.key_value_heads, config.ffn_width, config.vocab
    for t in range(1, node + 1):
        if any(width % t for width in widths):
            continue
        if memory.estimate_step(config, Layout(tp=t), device="gpu").peak <= limit:
            return t
    return None


check(my_degree)

# %% [markdown]
# ```{solution-end}
# ```
#
# ## Summary
#
# - Shard the first matrix by columns and the second by rows: nothing is sent in between, and one all-reduce follows. Other orders send two and a half to four and a half times as much.
# - `copy_to` and `reduce_from` make the gradients right; without `copy_to` the model trains with wrong gradients, and no error is raised.
# - Attention is sharded by whole heads, not single columns. Tensors that every rank uses for its own heads ($x$, a latent, shared weights) enter by `copy_to`. Embedding, logits and loss are sharded by vocabulary; ranks exchange three numbers for each token instead of the logits.
# - Biases that are added after a sum are whole, and added once; all shards come from one initialisation.
# - Each of $t$ ranks holds a $t$-th of the states, but more than a $t$-th of the activations: the residual stream stays whole.
# - A block needs four all-reduces of $bsh$ elements in a step. Those of backward can overlap with the weights' gradients, those of forward with other tokens' products; stay within one fast domain all the same.
# - Test that parameters which all ranks hold whole stay bitwise equal.
#
# ## Further reading
#
# - {cite:t}`shoeybi2019megatron`: the sharding, the two operators and the vocabulary-parallel loss, in section 3.
# - {cite:t}`narayanan2021megatron`: tensor, pipeline and data parallelism combined, and why $t$ stays within a machine.
# - {cite:t}`korthikanti2022recomputation`: the activations that this lesson leaves whole, counted and then divided.
# - {cite:t}`wang2024asynctp`: overlapping forward's messages, and the difficulties.
