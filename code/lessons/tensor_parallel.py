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
# # Tensor parallelism: every matrix cut, every sum made once
#
# After this lesson you can
#
# - cut a feed-forward network, attention, an embedding and a loss over ranks, and say for each matrix why by columns or by rows;
# - write the two operators that make the cut model's *gradients* right, and recognise the loss curve of a model that lacks one;
# - predict to the byte what a rank holds and sends, and say why the ranks should be joined by one fast switch;
# - apply the cuts to a plain GPT from outside, and read PyTorch's `parallelize_module` as the same thing.
#
# You need one thing from [Collectives](collectives.md): the all-reduce.
#
# Before you start, a number. A *single* block of Llama 3 405B takes 51 GB during training, and the model has 126 blocks.
# [Pipelines](pipeline.md) give each rank whole blocks, and [ZeRO](zero.md) gathers a whole block before it computes. This lesson cuts the block.

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
    """Normal numbers that follow from the seed alone: the same on every rank."""
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
    """Forward and backward of a cut model; the loss."""
    tokens, targets = make_batch(step, size)
    value = tp.vocab_parallel_loss(model(tokens), targets, model.tensor_group)
    value.backward()
    return value


# %% [markdown]
# ## The part that no other cut divides
#
# The table takes the 16 bytes for each parameter of [Memory](memory.md): weights, gradients, AdamW.

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
# A stage of a pipeline holds one block at least. ZeRO's stage 3 shards the states, but gathers a block's weights to compute with them, and its rank computes the whole block.
# Neither makes one block's forward any shorter, nor its activations any smaller.
# So we cut the matrices themselves.
#
# ## One matrix product, cut in two ways
#
# Let $Y = XW$, and let every rank have all of $X$. There are two ways to divide the work among ranks, and each is one line.
# In code `T` stands for tokens, `I` and `O` for inputs and outputs, and a small letter for a rank's part of what its capital counts: `o` columns of `O`.

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
# A column of $Y$ needs all of $X$ and one column of $W$, nothing else. So a cut *by columns* sends nothing, and leaves each rank with some of the columns:
#
# $$
# X\,[\,W^{(0)} \mid W^{(1)}\,] = [\,X W^{(0)} \mid X W^{(1)}\,] .
# $$
#
# A cut *by rows* goes where the columns of $X$ go: rank 0's columns of $X$ meet rank 0's rows of $W$. What comes out has the full shape, but is only a summand, and the ranks add theirs up:
#
# $$
# [\,X^{(0)} \mid X^{(1)}\,] \begin{bmatrix} W^{(0)} \\ W^{(1)} \end{bmatrix} = X^{(0)} W^{(0)} + X^{(1)} W^{(1)} .
# $$
#
# Both give what one process computes, on two ranks and on four:

# %%
def compare_both_cuts():
    x_TI, w_IO = draw_normal(0, 16, 512), draw_normal(1, 512, 2048) / 512**0.5
    return by_columns(x_TI, w_IO), by_rows(x_TI, w_IO), x_TI @ w_IO


two, four = ranks.run(compare_both_cuts, 2), ranks.run(compare_both_cuts, 4)

# %% tags=["hide-input"]
# Holds both cuts against the whole product
for found in (two, four):
    columns, sums, (want, *_) = zip(*found, strict=True)
    # Float32, entries up to 5: a product of other shape may add up in another order.
    assert max_difference(torch.cat(columns, 1), want) < 1e-5
    assert all(max_difference(y, want) < 1e-5 for y in sums)
    shapes = f"by columns {list(columns[0].shape)}, by rows {list(sums[0].shape)}"
    print(f"{len(found)} ranks, each has {shapes}: together, and summed, they are Y")


# %% [markdown]
# PyTorch's `nn.Linear` keeps its weight transposed, `[out, in]`. Cut by columns in the formula is cut by *rows* of `linear.weight`, and the other way round: the commonest confusion in this subject.
#
# ## A feed-forward network: columns, then rows
#
# A feed-forward network is two products with a function between them, $Y = \mathrm{GELU}(X W_1)\, W_2$.
# Cut the first by columns and the second by rows, and the output of the first is cut just as the second needs its input.
# GELU looks at each number by itself, so each rank applies it to its own columns. Between the two matrices nothing is sent at all {cite}`shoeybi2019megatron`.
#
# ![A feed-forward network on two ranks. Each rank has all of X. The first matrix is cut by columns: each rank has 4096 x 8192 of it, and computes its half of XW₁ and of its GELU. The second is cut by rows: each rank has 8192 x 4096 of it, and computes a summand of Y, as large as all of Y. An all-reduce adds the two, and each rank has all of Y.](../figures/tensor_parallel_ffn.svg)
#
# Here is the picture's network, with three tokens: each rank makes only its own half of the weights.

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
# Holds the picture's network on two ranks against one process
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
# ### Two operators make the gradients right
#
# Training needs gradients, and for them the same two cuts need a second all-reduce, in another place.
# Every rank multiplied *the same* $X$ by its own columns, so the loss depends on $X$ through all ranks:
#
# $$
# \frac{\partial L}{\partial X} = \sum_r \frac{\partial L}{\partial (X W_1^{(r)})}\, {W_1^{(r)}}^{\!\top} .
# $$
#
# A rank can compute its own summand alone. At the other end $Y$ is a sum, and each summand has simply the gradient of $Y$, which all ranks have.
#
# ![The two operators around a cut piece of network, on two ranks. Forward, copy_to hands each rank the same x, and reduce_from adds up what the two computed. Backward, reduce_from hands each rank the same gradient, and copy_to adds up the gradients of x.](../figures/tensor_parallel_conjugate.svg)
#
# Step through both passes. A piece has the colour of the rank that computed it, both colours are the sum, the same on both ranks, and a thick outline marks what is new. $A = \mathrm{GELU}(X W_1)$, and $dX$ is the gradient of the loss by $X$.
#
# :::{step-through} A feed-forward network on two ranks, forward and backward
# 1. ![Two tables, values above and gradients below, with a row for each of two ranks, and the tensors X, W₁, A, W₂ and Y side by side. Both ranks have all of X. Rank 0 has the left half of W₁'s columns and the upper half of W₂'s rows, rank 1 the other halves. All else is empty.](../figures/steps/tensor_parallel_1.svg)
#
#    Each rank has all of $X$, half of the columns of $W_1$, and half of the rows of $W_2$.
#
# 2. ![Each rank multiplies X by its columns of W₁ and applies GELU: rank 0 has the left half of A's columns, rank 1 the right half. Nothing is sent.](../figures/steps/tensor_parallel_2.svg)
#
#    Each rank computes its columns of $X W_1$, and GELU of them. Nothing is sent.
#
# 3. ![Each rank multiplies its columns of A by its rows of W₂: it has a summand of Y, as large as all of Y. Nothing is sent.](../figures/steps/tensor_parallel_3.svg)
#
#    Its columns of $A$ meet its rows of $W_2$: a summand of $Y$, as large as $Y$. Still nothing is sent.
#
# 4. ![An all-reduce adds the two summands: both ranks have all of Y.](../figures/steps/tensor_parallel_4.svg)
#
#    The one message of forward: an all-reduce adds the summands.
#
# 5. ![In the lower table both ranks have the gradient of Y. Nothing is sent.](../figures/steps/tensor_parallel_5.svg)
#
#    Each summand has the gradient of their sum, and that is $dY$, which both ranks have. Nothing is sent.
#
# 6. ![Each rank computes the gradients of its rows of W₂ and of its columns of A. Nothing is sent.](../figures/steps/tensor_parallel_6.svg)
#
#    From $dY$ each rank computes the gradients of its own rows of $W_2$ and of its own columns of $A$.
#
# 7. ![Each rank computes the gradient of its columns of W₁, and a summand of the gradient of X, as large as all of it. Nothing is sent.](../figures/steps/tensor_parallel_7.svg)
#
#    Through GELU, each rank computes the gradient of its own columns of $W_1$, and its summand of $dX$.
#
# 8. ![An all-reduce adds the two summands: both ranks have all of the gradient of X. Of the weights' gradients each rank has those of its own halves.](../figures/steps/tensor_parallel_8.svg)
#
#    The one message of backward: an all-reduce adds the summands of $dX$. The gradients of weights stay where their weights are.
# :::
#
# So there are two operators, which the paper calls $f$ and $g$. Each is the other one, read backwards:

# %%
class CopyTo(torch.autograd.Function):
    """Forward hands x on; backward adds up what the ranks found for it."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        dx = dx.clone()
        dist.all_reduce(dx)
        return dx


class ReduceFrom(torch.autograd.Function):
    """Forward adds up the ranks' summands; backward hands the gradient on."""

    @staticmethod
    def forward(ctx, y):
        y = y.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        return dy


# %% [markdown]
# To call `dist.all_reduce` in the model's forward, as `by_rows` did, would be wrong: it changes a tensor, and autograd does not know.
# After the second matrix that happens to be right, since backward has nothing to do there. Before the first matrix backward has to add up, and would not.
#
# With the two operators the network is three lines, for training as well:

# %%
def plain_ffn(x_TH, w1_HF, w2_FH):
    x_TH = CopyTo.apply(x_TH)
    g_Tf = gelu(x_TH @ take_shard(w1_HF, 1))  # [T, H] @ [H, f]
    return ReduceFrom.apply(g_Tf @ take_shard(w2_FH, 0))  # [T, f] @ [f, H]


def train_once(network, width=512):
    """Its output, and the gradients of its input and of both matrices."""
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
# Holds output and gradients against one process
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
    # Float32: sums of up to 2048 products, in another order; entries are about 1.
    assert max(off) < 1e-5, off
    told = ", ".join(map(format_short, off))
    print(
        f"{t} ranks: Y and the gradients of X, W1, W2 differ from one process by {told}"
    )
calls = ranks.run(sum_parts, 2, plain_ffn)[0]
assert calls == [1, 1]
print(f"all-reduces: {calls[0]} in forward, {calls[1]} in backward")


# %% [markdown]
# Half the weights on each rank, half the products, and the same $Y$ on both, for one all-reduce forward and one backward.
#
# The plain version is simpler than the module: it copies each tensor before it adds up, works in the world of all ranks and not in a group, and has no bias.
# And in backward everything waits for the sum of $X$'s gradient, which [can be avoided](#hide-backwards-half).
#
# ### The other orders of cuts
#
# Each matrix can be cut both ways, so there are four orders. All can be made right. What do they send?
# Two things decide. After a cut by rows every rank has a summand, and *GELU of a sum is not the sum of GELUs*: it has to be added up first, while it is four times as wide.
# After a cut by columns every rank has some columns, and a matrix cut by columns wants all of them: they have to be gathered.
#
# ![Four ways of cutting two matrices, and what each rank sends, in units of one Y times (N-1)/N. Columns, then rows: nothing before GELU, an all-reduce of Y at the end: 2. Columns twice: an all-gather after GELU and one of Y: 4 + 1. Rows twice: a reduce-scatter before GELU and an all-reduce of Y: 4 + 2. Rows, then columns: an all-reduce before GELU and an all-gather of Y: 8 + 1.](../figures/tensor_parallel_orders.svg)
#
# With an all-gather, an all-reduce and a reduce-scatter from [Collectives](collectives.md) each order is one line, and four ranks count what they send.

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
# The first name is the first matrix's cut, the second the second's:

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
    assert sent == times * unit and off < 1e-4  # float32, sums of 1024 products up to 3
    rows.append((order, times, f"{times * unit:,}", f"{sent:,}", sent - times * unit))
head = [
    "cut by",
    "units of Y (N-1)/N",
    "predicted (B)",
    "counted (B)",
    "difference (B)",
]
show.table(rows, head, caption=f"Sent by rank 0 of {N} in forward")

# %% [markdown]
# The right order sends least, in one message. The others need two messages, of two and a half, three and four and a half times as many bytes.
#
# (tp-plus)=
# `````{admonition} Checked: "y = y0.to('cuda:0') + y1.to('cuda:0') is the all-reduce"
# :class: checked
#
# In tutorials one process moves both summands to GPU 0 and adds them. The number is right, and autograd knows the way back.
# But it is a *reduce*: the sum is on GPU 0 alone, and the next layer needs it on all. So it has to be copied back, and everything passes through one GPU's wire: $(N-1)S$ bytes in and as many out, where a rank of a ring has $2\frac{N-1}{N}S$ each way.
# That is $N/2$ times the bytes through one wire, while all other wires are idle most of the time; the cell counts them.
# And under `torchrun` the line does something else: each process knows its own summand alone, whatever device it moves it to.
# `````

# %% tags=["hide-input"]
# Table: what the copies carry through rank 0's wire
T, H = 16, 4096


def sum_on_rank_0():
    rank, size, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    mine_TH = draw_normal(rank, T, H)
    want_TH = sum(draw_normal(r, T, H) for r in range(size))

    def right(y_TH):
        return max_difference(y_TH, want_TH) < 1e-5  # float32

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
head = ["ranks", "have the sum after the plus", "in and out of rank 0: copies (MB)"]
show.table(rows, [*head, "of each rank: all-reduce (MB)", "ratio"])

# %% [markdown]
# ## The module's operators and layers
#
# The module's operators take a group. They copy where other code may hold the tensor, and `reduce_from_`, with an underscore, makes the sum in place, for a product that was just computed and that no other code keeps.

# %%
show.source(tp.copy_to, _CopyTo, tp.reduce_from, _ReduceFrom)

# %% [markdown]
# Two layers take the place of `nn.Linear`. Each keeps its shard of a plain layer's parameters under their old names, and says in `shard_dims` which are cut and along which dimension: saving, loading and clipping ask for that.
# The column-parallel layer has a bias for each of its columns, which is cut with them. The row-parallel layer has one for each entry of $Y$, of which every rank has all; it is added *after* the sum.

# %%
show.source(tp.ShardedLayer, tp.ColumnLinear, tp.RowLinear)


# %% [markdown]
# `shared_input` is for layers that share an input. We come to it [below](#hide-backwards-half).
#
# (tp-bias)=
# `````{admonition} Checked: "row-parallel layers each add their bias"
# :class: checked
#
# Then the all-reduce adds up the biases as well: $\sum_r (G^{(r)} W_2^{(r)} + b) = Y + t\,b$ in place of $Y + b$. Nothing fails.
# While biases are still zero, as they are in the beginning, the numbers are even right.
# The next cell cuts `nn.Linear` with a bias over $t$ ranks, in both ways.
# `````

# %% tags=["hide-input"]
# Measures how often the bias is in Y when each rank adds it
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
    assert off < 1e-5 and abs(surplus - (t - 1)) < 1e-3  # float32, numbers about 1
    print(
        f"{t} ranks: RowLinear has the bias once, the mistake {1 + surplus:.2f} times"
    )


# %% [markdown]
# ## Attention: heads take the place of columns
#
# A head uses its own columns of queries, keys and values and nothing of other heads, so each rank computes whole heads.
# The three matrices are cut by columns, the output matrix by rows, and attention takes the place of GELU.
#
# ![Attention with eight heads of queries and four of keys and values on two ranks. Rank 0 has the first four heads of queries and the two of keys and values that they share, rank 1 the others: columns of the three matrices. Each computes attention for its own heads, and multiplies by its rows of the output matrix; an all-reduce adds the two summands.](../figures/tensor_parallel_heads.svg)
#
# The plain version takes an attention of the plain model. Its weights are those of `nn.Linear`, so columns are dimension 0:

# %%
def plain_attention(x_BSH, attention):
    """What `attention` computes, by this rank's heads of it and all the others'."""
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
# Holds output and gradients against the plain attention
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
    assert off < 1e-4  # float32, gradients of up to 20
    print(
        f"{t} ranks: output and gradients differ from the whole by {format_short(off)}"
    )

# %% [markdown]
# It leaves out biases and dropout, for which ranks need [masks of their own](#dropout-ranks-with-seeds-of-their-own-or-with-one-seed-too-many), and it keeps the whole weights on every rank.
#
# So a block has two regions, attention and feed-forward network. Each begins with `copy_to` and ends with `reduce_from`, and nothing is sent inside.
# What lies between the cut parts (LayerNorms, residual additions, dropout), every rank computes in full.
#
# ![A block on two ranks. The residual stream, LayerNorms and dropout are whole on both ranks. Attention and the feed-forward network are cut, from copy_to to reduce_from. In forward each reduce_from is an all-reduce, in backward each copy_to: two and two.](../figures/tensor_parallel_block.svg)
#
# The module does it to the plain GPT from outside: it puts cut layers in the place of whole ones, and the model's own forward runs on.
# SwiGLU has two matrices in front; both are cut by the same columns, and their product is taken number by number.
# What enters does so *once* for a region, through a `SharedInput`, and not once for each of queries, keys and values: their gradients are added up locally first.

# %%
show.source(tp.shard_ffn, tp.shard_attention)

# %% [markdown]
# So $t$ divides three numbers: heads of queries, the width $F$ and the vocabulary. The heads of keys and values it divides, or they divide it. These are the degrees that do:

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
# Any other number is refused before a byte is sent:

# %% tags=["hide-input"]
# Shows the refusal
try:
    ranks.run(lambda: tp.parallelize(GPT(PRESETS["nano"]), dist.group.WORLD), 4)
except ranks.RankError as error:
    print(*textwrap.wrap(str(error).splitlines()[0], 84), sep="\n")
else:
    raise AssertionError("this was meant to be refused")


# %% [markdown]
# (tp-today)=
# ## Today's attention: copied heads, norms of heads, latents
#
# Since then, attention has got three additions. Each raises the same question: what does *every* rank use, each for its own heads?
#
# | in | what | on $t$ ranks |
# |---|---|---|
# | Llama 3, Qwen3 | few heads of keys and values: 8, or 4 | beyond that several ranks have the same one |
# | Qwen3 | an RMSNorm of each head of queries and of keys; all heads share its weights | the weights are whole, each rank's gradient of them is not |
# | DeepSeek-V3 | keys and values of all heads made of one *latent* | what makes the latent is whole, what makes heads of it is cut |
#
# You know the answer from $x$. All ranks have it, each uses it for its own heads, so each has a summand of its gradient, and `copy_to` adds these up.
# Weights are no exception. The plain version lets them in by the same operator, and then takes of keys and values the head that its queries look at:

# %%
def plain_qwen(x_BSH, attention):
    """Grouped attention with norms of heads; ranks may be more than heads of keys."""
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
# Eight heads of queries, two of keys and values, on up to eight ranks. A head has 12 numbers: in today's models heads times their size need not be $H$.

# %% tags=["hide-input"]
# Holds output and gradients against the plain attention
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
    assert off < 1e-4  # float32, gradients of up to 20
    print(
        f"{t} ranks: output and gradients differ from the whole by {format_short(off)}"
    )

# %% [markdown]
# The module cuts as far as it goes, so a rank holds one head of keys and values and no more. Copies begin alike and get the same sum, so they stay alike; in the gradient norm each counts once.
# It adds them up in one message of all heads, with zeros where a head is another rank's, which needs no further group. vLLM copies the weights as well {cite}`vllm2026linear`; Megatron-LM goes on cutting them, and gathers keys and values before each rank picks its own {cite}`nvidia2026attention`.
#
# A *latent* {cite}`deepseek2024v3` moves the place where the region begins. DeepSeek-V3 first multiplies $x$ by narrow matrices: 1,536 numbers a token for queries, 512 for keys and values, 64 that know the position. All 128 heads are made of these.
# Every rank computes the narrow part whole, as it does a norm. What enters is the latents, and what is cut are the matrices that make heads of them:

# %%
show.source(tp.shard_latent, tp.core._compress_and_enter)

# %% [markdown]
# Both as whole models, with a window in every other layer of the first, and with experts in the second:

# %% tags=["hide-input"]
# Table: both models beside one process
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
        # Float64: numbers about 1, and sums of 64 to 192 of them in another order.
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
# And the cost, for the published shapes: what eight ranks do not divide, and what enters.

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
# Two copies of a head cost Qwen3 a tenth more of attention's weights. DeepSeek-V3's ranks have half as much again as an eighth: each has what makes the latents.
# In return backward adds up 2,112 numbers a token at the entrance, in place of 7,168. With sequence parallelism, the next lesson, the narrow part is computed of a rank's own tokens, and what has to be gathered are latents, too.
#
# ## Vocabulary: embedding, logits, loss
#
# The largest matrix of GPT-2 is its *embedding*. It is cut by rows: a rank looks up the tokens that it has, and puts zeros for the others; the sum has each row once.
#
# ![The vocabulary on two ranks, four of eight entries each. Left, the embedding: for tokens 5, 1, 7 and 2 each rank looks up those that it has and puts zeros for the others; an all-reduce adds the two. Right, the loss: each rank keeps its half of the logits, and three numbers for each token are reduced: the largest logit, the sum of the exponentials, and the target’s logit, which one rank has.](../figures/tensor_parallel_vocabulary.svg)
#
# The head is a column-parallel layer, so each rank gets the *logits* of its own entries.
# To gather them would be expensive, and is not needed. With $V$ entries, logits $z_j$, and $j \in r$ for the entries of rank $r$, the loss of a token is
#
# $$
# \log \sum_{j=1}^{V} e^{z_j} - z_\text{target}
# = \log \sum_r \Big( \sum_{j \in r} e^{z_j - z_{\max}} \Big) + z_{\max} - z_\text{target} ,
# $$
#
# and all that a rank has to tell the others is three numbers for each token. The plain versions use the operators that you know:

# %%
def local_entries(numbers_BS, v):
    """Places in this rank's v entries, and which of the numbers are among them."""
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
# Backward sends nothing. The gradient of a logit is softmax minus one for the target, and each rank knows that for its own entries; autograd finds it by itself.
# What the plain loss leaves out is memory: it holds several tensors as large as the logits, which are the largest activation of a small model. The module's loss [holds one](#the-modules-loss-one-tensor-as-large-as-the-logits).
# Both losses and both embeddings compute what one process computes; gathering would send hundreds of times as many bytes.

# %% tags=["hide-input"]
# Table: both losses beside one process, and what they hold and send
V, B, S = 4096, 4, 128


def measure_loss(which):
    """On a rank: off one process by, logits held besides, bytes handed over."""
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


rows, gathering = (
    [],
    4 * B * S * V * 3 // 4,
)  # an all-gather's bytes out of each of 4 ranks
for which in ("plain", "tp.vocab_parallel_loss"):
    off, most, handed = ranks.run(measure_loss, 4, which)[0]
    sent = tp.bytes_on_wire(handed, 4)
    assert off < 1e-5 and handed == 3 * 4 * B * S  # float32, a loss of about 9
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
# ### The module's loss: one tensor as large as the logits
#
# The module writes the backward by hand, and turns one tensor of the logits' size into the gradient in place.

# %%
show.source(tp.VocabEmbedding.forward, _CrossEntropy)

# %% [markdown]
# ## The whole model
#
# With these parts the whole GPT is cut in place. Names of parameters stay, so a state dict of one process fits, and the optimizer is made as ever.

# %%
show.source(tp.parallelize)


# %% [markdown]
# Training differs from one process in two lines, `parallelize` and `tp.vocab_parallel_loss`:

# %%
def train_five_steps(config):
    """The weights, whole again, after five steps of AdamW."""
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
# The optimizer is torch's own. AdamW works on each number by itself, so it computes the same on a shard as on the whole matrix.
#
# ### Five steps beside one process
#
# The next cell trains one process and $t$ ranks on the same batches, and compares logits, gradients and weights.
# "GPT-2's" are its choices (GELU, LayerNorm, biases, a tied head), "Llama's" its own (SwiGLU, RMSNorm, two heads of queries for each of keys and values, no tied head).

# %% tags=["hide-input"]
# Table: largest differences from one process, on 2 and on 4 ranks
GPT2ISH = Config(seq=32, layers=2, heads=8, hidden=64)
LLAMAISH = replace(
    GPT2ISH, kv_heads=4, mlp="swiglu", norm="rms", bias=False, tied=False
)
CASES = {"GPT-2's": GPT2ISH, "Llama's": LLAMAISH}


def compare_gradients(alone, cut_, group):
    """By parameter: how far its gradient is from this rank's part of one process's."""
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
    # Sums over ranks are made in another order. Logits and gradients reach 1; AdamW
    # divides by a gradient's size, and where that is almost 0, rounding decides
    # which way a weight moves.
    room = (1e-4, 1e-4, 5e-3) if dtype == "float32" else (1e-12, 1e-12, 1e-9)
    off = torch.cat(found)[:, i].amax(0).tolist()
    assert all(x <= limit for x, limit in zip(off, room, strict=True)), off
    rows.append((name, dtype, *map(format_short, off)))
show.table(rows, ["model", "type", "logits", "gradients", "weights after 5 steps"])


# %% [markdown]
# Float64 has nine digits more than float32, and the differences shrink by as many: it is rounding.
# Why not zero, as in [ZeRO](zero.md) and [Pipeline parallelism](pipeline.md)? There each product had the same operands. Here a sum of products is made in parts, on several ranks, and the parts are added afterwards, so other intermediate results are rounded.
# The [tests](../tests/test_tensor_parallel.py) do the same for one rank, 16-bit weights, recomputation and clipping.
#
# ## What it costs
#
# ### Memory
#
# LayerNorms and the biases that are added after sums are whole on every rank; everything else of the model's states is divided by $t$.
# The cell measures states after a step, and what forward saves for backward.

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
# States are predicted to the byte. What every rank holds whole is next to nothing, less still in larger models.
#
# `````{admonition} Checked: "on t ranks everything takes a t-th of the memory"
# :class: checked
#
# Not activations. Inside the two regions they are divided; outside, LayerNorms and residual additions keep the whole residual stream, on every rank.
# For each block that is $x + y/t$ bytes, and $x$ stays however large $t$ is: on four ranks 43 % are left where 25 % were hoped for.
# The next lesson, [Sequence parallelism](sequence_parallel.md), divides the rest.
# `````
#
# ### Messages and bytes
#
# Two all-reduces forward and two backward for each block, one after the embedding, one in backward of the head: each carries the stream, $b \cdot s \cdot h$ elements. Two small ones make the loss.

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
# Is that much? Data parallelism hands its all-reduce $P \approx 12 L h^2$ elements in a step, for $P$ parameters in $L$ blocks of width $h$. Tensor parallelism hands its about $4 L b s h$. So with more than $3h$ tokens in a step tensor parallelism sends more: 12,288 tokens for $h = 4096$.
#
# And ranks wait for it: the next product *needs* the sum. [Hide the messages](#hide-the-messages) finds other work that can overlap with it.
#
# (tp-node)=
# ### How far to cut: one fast domain
#
# Bandwidth decides how large $t$ may be. For one token a block computes about $24h^2$ floating-point operations forward, divided by $t$, and sends $2 \cdot 2\frac{t-1}{t}h$ elements.
# The ratio of waiting to computing, where nothing is hidden, is
#
# $$
# \frac{4\,\frac{t-1}{t}\,h\,e\,\beta}{24\,h^2 / (t\,c)} = \frac{(t-1)\,e\,\beta\,c}{6\,h} ,
# $$
#
# with $e$ bytes for an element, $c$ operations per second, and $\beta$ seconds per byte. It grows with $t$ and with the GPU, and falls with $h$; batch and sequence do not matter.
# The table takes 16-bit elements, a GPU that reaches 400 TFLOP/s, and two wires: 450 GB/s each way, as between GPUs behind one NVLink switch, and 50 GB/s, as over a network card. They are assumptions: put in your own.

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
# That is why $t$ ends where the fast wires end. For years that was a machine of eight GPUs, and "at most 8" became a rule of thumb {cite}`narayanan2021megatron`.
# It is a limit of the fast domain, not of tensor parallelism: in a GB200 NVL72, 72 GPUs are behind one NVLink switch system, with 900 GB/s each way for each {cite}`nvidia2024nvl72`, and a $t$ of 16 or 32 stays inside. What bounds it there is the formula's $t/h$, the number of heads, and products that become thin: [One matrix product on many GPUs](gemm.md) measures how much worse these compute.
# Beyond, cut by layers ([Pipeline parallelism](pipeline.md)), and copy ([Data parallelism](data_parallel.md)).
#
# ## Hide the messages
#
# (tp-backward)=
# ### Hide backward's half
#
# The layers before wait for the gradient of $X$, but nobody waits for the gradients of the weights. So compute the first, send it, and compute the others meanwhile.
# For that the entrance and all layers that see $X$ become one function of autograd, as Megatron-LM has it for one matrix. `parallelize` uses it unless it is given `edges` that have no `begin` and `back`.
# In its backward `back` starts the sum, and `arrive()` waits for it; what is computed between them overlaps with the message, and so hides it.

# %%
show.source(tp.SharedInput.take_output, _Columns.backward)

# %% [markdown]
# Queries, keys and values are three layers of the plain model, which calls them one by one. The first call with an $x$ computes all three, and the other two take theirs.
#
# The next cell takes steps over an emulated wire of 0.4 Gbit/s, in both ways, and predicts them from $\alpha + \beta S$ of each message.
# To what are these seconds added? Not to a step on loopback: that already contains the time to copy messages and to wait for other ranks, and on a slower link this time overlaps with the link's. To add both counts it twice, as the second line of the table shows.
# So the base is the same step with operators that send nothing: its numbers are wrong, but its products are the same.
# At most, a message is hidden for as long as the weights' gradients of the first layers take: 7/12 of a third of the products.

# %% tags=["hide-input", "measured"]
# Table: steps over a wire, predicted by computing and α + β S
LATENCY, BANDWIDTH = 1e-4, 50e6
WIDER = replace(MODEL, layers=2, hidden=512)


def pass_silently(x, group):
    return x


def time_on_wire(rounds, nothing, pair):
    """On a rank: seconds of steps: silent, on loopback, over the wire in two ways."""
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
seconds = ranks.run(time_on_wire, 2, 8, *edges, device="cpu")[0]
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
        "the wire, behind the weights' gradients",
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
# ### Hide forward's half
#
# Forward has no gradients to hide behind, and it is often said that nothing can hide its half. But the sum can be made in pieces. Tokens are independent in a product, so the sum of some tokens travels while the next ones are multiplied:

# %%
def row_in_pieces(x_Ti, w_iO, pieces, group):
    """The ranks' products, summed; a piece is sent under the next one."""
    under_way = []
    for x_ti in x_Ti.chunk(pieces):
        y_tO = x_ti @ w_iO  # [T / pieces, i] @ [i, O]: a summand
        under_way.append((y_tO, dist.all_reduce(y_tO, group=group, async_op=True)))
    for _, work in under_way:
        work.wait()
    return torch.cat([y_tO for y_tO, _ in under_way])


# %% tags=["hide-input", "measured"]
# Holds the pieces against one product, and measures both over a wire
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
assert off < 1e-4  # float32, entries up to 6
less = statistics.median(c / b for _, b, c in found)
show.check_timing(less < 0.95, "in 8 pieces it takes less than 95 % of the time")
hidden = (unsplit - pieces) / min(product, wire)
print(f"product alone {1e3 * product:.0f} ms, its sum on the wire {1e3 * wire:.0f} ms")
print(f"in 1 piece {1e3 * unsplit:.0f} ms, in 8 pieces {1e3 * pieces:.0f} ms: ", end="")
print(
    f"{100 * hidden:.0f} % of the shorter is hidden; the same sum, up to {format_short(off)}"
)


# %% [markdown]
# With 8 pieces, at best 7/8 of the shorter of the two, product or message, are hidden. How near the measured value comes depends on what else needs the cores: to copy and add up on loopback is work for the same two.
# Pieces have a price, too: each is a message with its own $\alpha$, and a thinner product, which computes worse. So they have to stay large.
#
# This is *asynchronous tensor parallelism*. Where the edges are an all-gather and a reduce-scatter ([Sequence parallelism](sequence_parallel.md)), both are taken apart in this way, around the products before and after them.
# PyTorch's report of 2024, made with torchtitan, gives a forward faster by up to 29 % for a Llama 3 of 7B and 20 % for 70B, and a whole step by about 8 % {cite}`wang2024asynctp`. These are the authors' numbers, in their set-up; none was measured here.
# In torch 2.13 it is a pass of the compiler for CUDA (`torch._inductor.config._micro_pipeline_tp`, off by default). Our `parallelize` does without.
#
# (tp-dtensor)=
# ## PyTorch's parallelize_module beside ours
#
# `parallelize_module` takes a plan: a name, or a pattern, and how that module is cut. Weights become `DTensor`s, tensors that know how they are cut, and each operation on them finds out what has to be sent.
# The plan says what [`shard_attention` and `shard_ffn`](#attention-heads-take-the-place-of-columns) do, with `PrepareModuleInput` in the place of an entrance:

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
# Now both train for five steps; the third line is the plan as one often sees it, without `PrepareModuleInput`.

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
in_loss, in_weights, found = ranks.run(compare_with_torch, 2, device="cpu", show=False)[
    0
]
# Float32, a loss of 5; AdamW divides by a gradient's size, as above.
assert in_loss < 1e-4 and in_weights < 5e-3
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
# The same numbers. Without the last entry each of queries, keys and values adds up a gradient of its own: two all-reduces more for each block, and the bytes with them.
#
# What does DTensor cost? Each operation on a tensor that knows how it is cut has to be looked up, and its result wrapped. The next cell takes a step of both, in turn.

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
# The cost is one of operations, not of bytes: in large layers it vanishes, and on a GPU the dispatch runs ahead of the kernels while these are long enough.
# In return a DTensor always knows how it is cut: FSDP2, checkpoints and clipping use that. [The benchmark](../benchmarks/tensor_parallel.py) measures with more care.
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
# None of these raises an error.
#
# ### The forgotten all-reduce
#
# Somebody writes the layers with `reduce_from` and leaves `copy_to` out. Forward is right, to the last digit, and so is the first loss.
# The module takes its two operators as an argument, so the mistake is one line; both runs train for 80 steps on two ranks, over the same twenty batches.

# %%
LAB = replace(MODEL, layers=2, hidden=64)


def do_nothing(x, group):
    return x


def train_step(edges, steps=80):
    """On a rank: each step's loss, and how far what both ranks have whole is apart."""
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
    """Largest difference between ranks in a parameter that all of them have whole."""
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
# Draws both loss curves, and how far whole parameters are apart
curves = {name: list(zip(*found, strict=True)) for name, found in RUNS.items()}
(right, stay), (wrong, drift) = curves.values()
assert abs(right[0] - wrong[0]) < 1e-5 and max(stay) == 0.0 < 0.01 < drift[-1]
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
# It trains. Without a second curve to compare, you would blame the learning rate.
# Each rank's gradients lack the summand of the other rank's part of the network. So parameters that both hold whole, LayerNorms and the biases added after sums, drift apart. *That* is the test, `compare_replicated`: they must stay equal, to the bit.
# [Tensor types](tensor_types.md) finds the line before the program runs.
#
# ### Dropout: ranks with seeds of their own, or with one seed too many
#
# Two kinds of masks are wanted. Between the regions every rank has the same activations, and has to drop the same ones. Within attention every rank has other heads, and has to drop independently.
# So a single seed for all is wrong, and a seed for each rank is wrong. The cell makes both mistakes:

# %% tags=["hide-input"]
# Makes both mistakes: a seed for each rank outside, one inside
DROPS = replace(LAB, dropout=0.1)


def run_dropout(seed_of_its_own):
    """On a rank: loss of step 20; stream of step 1; how far norms end apart."""
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
# By chance, two masks agree in 82 % of their entries, $0.9^2 + 0.1^2$, as those of one rank's heads do. Two ranks' agree in all: heads drop in pairs.
#
# The loss does not show the other mistake: dropout is noisy in any case. But the ranks no longer have the same stream. They multiply different $X$ by parts of one matrix, and nothing equals one process any more.
# `parallelize` does as Megatron does. Inside attention each rank draws from a seed of its own, and then puts the generator back:

# %%
show.source(own_seed)


# %% [markdown]
# ### Shards initialised apart
#
# Each rank makes its layers itself, in their own small shapes. Why draw a matrix whole, to throw most of it away?
#
# (tp-shards)=
# `````{admonition} Checked: "each rank can initialise its own shard"
# :class: checked
#
# With *one seed on all ranks*, the shards are equal: rank 1's columns are rank 0's columns again. They get equal gradients and stay equal for ever, and the network has $F/t$ different neurons and not $F$.
# With a *seed for each rank*, neurons differ. But `nn.Linear` scales its numbers by $1/\sqrt{\text{inputs}}$, and a row-parallel shard has $1/t$ of the inputs: its weights are $\sqrt t$ times too large. Where the scale does not depend on the shape, as in GPT-2's 0.02, this goes well; it is still another model than one process's, and with another $t$ another one again.
# The cell trains two ranks' feed-forward network for 50 steps, drawn in three ways, and counts different neurons.
# `````

# %% tags=["hide-input"]
# Table: a network of shards that were drawn in three ways
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
# DTensor walks into the first of the two where its mesh has no generator of its own, as on CPUs. It prints a warning, and goes on:

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
# So draw each matrix whole, from one seed, and keep your part. A model that is too large to be whole anywhere is drawn matrix by matrix: `tp.initialize_shards` gives it the numbers that one process would have drawn.

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
# The way back to one process is `tp.full_state_dict`. With `tp.load_full_state_dict` a state goes into shards again, on any number of ranks:

# %% tags=["hide-input"]
# Holds both against one process's numbers, bit for bit
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
# ### A batch for each rank, a norm for each rank
#
# Ranks of a tensor group are *one* worker. A sampler that deals out batches by global rank gives them different ones; then the embedding adds up rows of different tokens, and the loss is that of mixed batches.
# Choose the batch by the number of the group, not of the rank.
# And torch's `clip_grad_norm_` sees a rank's own gradients. Every rank scales by another factor, and whole parameters drift. `tp.clip_grad_norm_` adds up the squares of what is cut over the ranks, and counts once what is whole.

# %% tags=["hide-input"]
# Measures the norm: one process's, the module's, torch's by rank
def norms():
    """On a rank: the norm of one process, by tp, and by torch on this rank."""
    alone, model = build_model(LAB), tp.parallelize(build_model(LAB), dist.group.WORLD)
    tokens, targets = make_batch(0)
    loss(alone(tokens), targets).backward()
    run_our_step(model, 0)
    found = [nn.utils.clip_grad_norm_(alone.parameters(), math.inf)]
    found.append(tp.clip_grad_norm_(model, math.inf))
    return [*found, nn.utils.clip_grad_norm_(model.parameters(), math.inf)]


found = torch.tensor(ranks.run(norms, 2))
assert torch.allclose(found[:, 0], found[:, 1], rtol=1e-5)  # float32
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
# | Divides weights, gradients, optimizer *and* the work of one block by $t$: a single sequence gets faster | Two all-reduces forward and two backward for each block, hidden in part and with effort |
# | Divides the activations inside attention and feed-forward network, and the logits | Leaves the stream whole: 43 % of the activations on 4 ranks above |
# | Needs no larger batch, as data parallelism does, and has no bubble, as a pipeline has | Sends more than data parallelism above $3h$ tokens in a step |
# | Computes what one process computes | $t$ divides heads, widths and vocabulary; heads of keys and values have to be copied where they are fewer |
# | | Only over fast wires: in one machine, or one NVLink domain |
#
# In a real job these show that it is set up right: the first loss and the first gradient norm are those of one process; LayerNorms' weights are equal on all ranks of a group, to the bit, after a thousand steps; a profile shows four all-reduces for each block and step, and none between queries and keys.
#
# ```{admonition} On more GPUs
# :class: note
#
# Results, held bytes and sent bytes are exact here; seconds are those of ranks that share a machine, or of an emulated wire.
# A second GPU, linked to the first, would show the one number that decides: what four all-reduces a layer cost beside products of half the size,
# over NVLink and, where you can choose, over PCIe.
# ```
#
# ## Exercises
#
# Each exercise has a check; where ranks are needed, it runs your answer on real ones.
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
# Both matrices are divided, and so is the bias of the first. The bias of the second is added to the sum, and every rank has it whole.

# %%
answer = (2 * 4096 * 16384 // 4 + 16384 // 4 + 4096) * 16
check(answer, "tp_bytes")


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Cut it (easy)
# :label: ex-tp-shards
# ```
#
# Return `(up_fH, up_bias_f, down_Hf)` of `rank` of `size`, for a feed-forward network whose weights are those of `nn.Linear`, which computes `x @ weight.T + bias`: `up_FH`, `up_bias_F`, `down_HF`. `size` divides F.

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
# A column of $W_1$ is a row of `up.weight`. Both matrices are cut along F, dimension 0 of the one and 1 of the other.

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
# A feed-forward network with SwiGLU has two matrices, `up` and `gate`, that lead to the inner width, $4h$ here, and `down` leads back. Cut it the wrong way round: `up` and `gate` by rows, `down` by columns. Every rank has all of $X$, and is to have all of $Y$ in the end.
# With ring collectives, how many times as many bytes does a rank send in forward as in the right order?

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
# Neither SiLU nor a product of summands is a summand of the result: both inner tensors go through an all-reduce of width $4h$, and an all-gather of width $h$ comes at the end. The right order has one all-reduce of width $h$. An all-reduce counts twice.

# %%
answer = (2 * 2 * 4 + 1) / 2
check(answer, "tp_other_order")


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} A gate and a bias, for training (medium)
# :label: ex-tp-gated
# ```
#
# Compute $Y = (\mathrm{SiLU}(X G) \cdot X U)\, D + b$ so that gradients are right as well. Every rank has all of `x_BSH` and `bias_H`, and its own shards of the three matrices, as `nn.Linear` keeps them. `tp.copy_to` and `tp.reduce_from` are yours to use.
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
# $X$ enters once, for both matrices. The bias is added after the sum.

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
# A model has `heads` heads of queries and `kv_heads` of keys and values; head $i$ of the queries uses head $\lfloor i \cdot k / a \rfloor$ of the others. Ranks take consecutive heads of queries. Where ranks are more than `kv_heads`, several ranks hold the same head of keys and values.
# Return two lists for `rank` of `size`: the heads of keys and values that it holds, and the ranks over which the gradients of their weights have to be added up, itself among them (`[rank]` where nobody else holds them).
# `size` divides `heads`, and of `size` and `kv_heads` one divides the other.

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
# What a rank holds follows from its first and last head of queries. Each copy of a head of keys sees the queries of its own rank alone, so its gradient is a summand: an all-reduce over the copies, and over nobody else.

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
# ```{exercise-start} The likeliest token (hard)
# :label: ex-tp-greedy
# ```
#
# Rank $r$ has the logits of entries $r v$ to $r v + v - 1$ of the vocabulary: `logits_BSv`, float32. Return the number of the entry with the largest logit for each token, `[B, S]`, the same on every rank, without gathering logits. Among equal logits the smallest number wins, as `argmax` has it in one process.

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
# First the largest logit of all, then the smallest number among those that have it: ranks that have it not offer a number beyond all others.

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
# ```{exercise-start} Which degree? (design)
# :label: ex-tp-degree
# ```
#
# Return the smallest $t$, from 1 to `node` (the GPUs that share a fast link), that divides the model (`config.heads`, `key_value_heads`, `ffn_width`, `vocab`) and whose `memory.estimate_step(config, Layout(tp=t), device="gpu").peak` is at most `limit` bytes; `None` if there is none.

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
# The smallest, because each doubling makes shards thinner and messages no smaller.

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
# - Cut the first matrix by columns and the second by rows: nothing is sent in between, and one all-reduce follows. Other orders send two and a half to four and a half times as much.
# - Two conjugate operators make the gradients right; without `copy_to` training continues without an error, and learns wrongly.
# - Attention is cut by heads instead of columns. Whatever every rank uses for its own heads ($x$, a latent or weights) enters by `copy_to`. Embedding, logits and loss are cut by vocabulary; ranks exchange three numbers for each token instead of the logits.
# - Biases that are added after a sum are whole, and added once; all shards are cut from one initialisation.
# - Each of $t$ ranks holds a $t$-th of the states, but more than a $t$-th of the activations: the residual stream stays whole.
# - A block needs four all-reduces of $bsh$ elements in a step. Those of backward can overlap with the weights' gradients, those of forward with other tokens' products; stay within one fast domain all the same.
# - Tensors that all ranks hold whole must stay bitwise equal: test that.
#
# ## Further reading
#
# - {cite:t}`shoeybi2019megatron`: the cuts, the two operators and the vocabulary-parallel loss are section 3; a page and a half.
# - {cite:t}`narayanan2021megatron`: how tensor, pipeline and data parallelism divide a cluster, and why $t$ ends with the machine.
# - {cite:t}`korthikanti2022recomputation`: the activations that this lesson leaves whole, counted and then divided.
# - {cite:t}`wang2024asynctp`: hiding forward's messages, and what made that hard.
