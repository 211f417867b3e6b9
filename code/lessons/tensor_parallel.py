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
# - predict the memory of a rank to the byte, and the bytes that it sends, and say why the ranks want to sit in one machine;
# - apply the cuts to a plain GPT from outside, and read PyTorch's `parallelize_module` as the same thing.
#
# It takes about an hour to read and forty minutes for the exercises. Running it takes a minute.
# It needs [Collectives](collectives.md), of which mostly the all-reduce.
#
# One number to begin with. A *single* block of Llama 3 405B takes 51 GB while it is trained, and the model has 126 of them.
# [ZeRO](zero.md) and [pipelines](pipeline.md) deal out whole blocks. This lesson cuts the block.

# %% tags=["hide-input"]
import math
import statistics
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
from torch.nn.functional import gelu
from torch.profiler import profile

from shardlab import collectives, count, link, memory, ranks, show, text
from shardlab import tensor_parallel as tp
from shardlab.check import check
from shardlab.model import GPT, PRESETS, Config, loss
from shardlab.tensor_parallel.core import _CopyTo, _CrossEntropy, _ReduceFrom
from shardlab.tensor_parallel.dropout import _own, drop_by_heads
from shardlab.tensor_parallel.overlap import _Columns

show.style()


def normal(seed, *shape):
    """Normal numbers that follow from the seed alone: the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(ranks.device())


def batch(step, size=8, seq=64):
    """`size` windows of text: tokens, targets: [size, seq]. Every rank gets the same ones."""
    tokens, targets = text.batch(seq, size, start=step * size)
    return tokens.to(ranks.device()), targets.to(ranks.device())


def plain(config, dtype=torch.float32):
    """The same GPT at every call."""
    torch.manual_seed(0)
    return GPT(config).to(ranks.device(), dtype)


def apart(a, b):
    """The largest difference between two tensors."""
    return (a - b).abs().max().item()


def short(difference):
    """A difference with one digit; 0 is exactly that."""
    return f"{difference:.0e}" if difference else "0"


def our_step(model, step, size=8):
    """Forward and backward of a cut model; the loss."""
    tokens, targets = batch(step, size)
    value = tp.loss(model(tokens), targets, model.tensor_group)
    value.backward()
    return value


# %% [markdown]
# ## The part that no other cut divides
#
# The table takes the 16 bytes for each parameter of [Memory](memory.md): weights, gradients, AdamW.

# %%
rows = []
for name in ("gpt-3-175b", "llama-3-8b", "llama-3-70b", "llama-3-405b"):
    config = PRESETS[name]
    sizes = memory.parameters(config)
    block = (sizes["attention"] + sizes["ffn"]) / config.layers
    rows.append((name, config.layers, f"{block / 1e6:,.0f}", f"{16 * block / 1e9:.1f}"))
assert rows[-1][-1] == "51.0"
head = ["model", "blocks", "parameters of a block (M)", "its model states (GB)"]
show.table(rows, head)

# %% [markdown]
# A stage of a pipeline holds one block at least. ZeRO's stage 3 shards the states, but gathers a block's weights to compute with them, and its rank computes the whole block.
# Neither makes one block's forward any shorter, nor its activations any smaller.
#
# So we cut the matrices themselves, and begin with two of them: a feed-forward network of 4096 → 16384 → 4096.
# Each matrix has $4096 \cdot 16384 = 67$ million weights, $67 + 67$ million together: 537 MB in float32. Two ranks shall hold half of them each.
#
# To have something to compare with, one process computes it first:
#
# $$
# Y = \mathrm{GELU}(X W_1)\, W_2 .
# $$
#
# In code `T` stands for tokens, and a small letter for a rank's share of what its capital counts: `f` columns of `F`.

# %%
H, F, T = 4096, 16_384, 16


def halves(r):
    """Half r of both matrices: columns of the first [H, F/2], rows of the second [F/2, H]."""
    return 0.02 * normal(10 + r, H, F // 2), 0.02 * normal(20 + r, F // 2, H)


def one_process():
    pieces = zip(halves(0), halves(1), strict=True)
    w1_HF, w2_FH = (torch.cat(pair, 1 - i) for i, pair in enumerate(pieces))
    y_TH = gelu(normal(0, T, H) @ w1_HF) @ w2_FH  # [T, H] @ [H, F], [T, F] @ [F, H]
    return y_TH, count.bytes_of([w1_HF, w2_FH])


want_TH, whole = ranks.run(one_process, 1)[0]
print(f"{2 * H * F:,} weights, {whole:,} B; Y has the shape {list(want_TH.shape)}")


# %% [markdown]
# Now two ranks. Rank 0 has the left half of $W_1$ and the upper half of $W_2$, rank 1 the others.
# Look at the one line that communicates.

# %%
def two_ranks():
    w1_Hf, w2_fH = halves(dist.get_rank())
    y_TH = gelu(normal(0, T, H) @ w1_Hf) @ w2_fH  # [T, H] @ [H, f], [T, f] @ [f, H]
    alone_TH = y_TH.clone()
    dist.all_reduce(y_TH)
    return alone_TH, y_TH, count.bytes_of([w1_Hf, w2_fH])


rows = []
for rank, (alone_TH, y_TH, size) in enumerate(ranks.run(two_ranks, 2)):
    off = [(y - want_TH).abs().max().item() for y in (alone_TH, y_TH)]
    # Float32: seven digits of numbers up to 10, and the sum of 16384 products in another order.
    assert off[0] > 1 and off[1] < 1e-4 and 2 * size == whole
    rows.append((rank, f"{size / 1e6:.0f}", f"{off[0]:.1f}", f"{off[1]:.0e}"))
head = ["rank", "weights (MB)", "before the all-reduce", "after"]
show.table(rows, head, caption="Largest difference from one process's Y, whose entries reach 10")


# %% [markdown]
# Half the weights on each rank, half the products, and the same $Y$ on both.
#
# ## The picture
#
# ![A feed-forward network on two ranks. Each rank has all of X. The first matrix is cut by columns: each rank has 4096 x 8192 of it, and computes its half of XW₁ and of its GELU. The second is cut by rows: each rank has 8192 x 4096 of it, and computes a summand of Y, as large as all of Y. An all-reduce adds the two, and each rank has all of Y.](../figures/tensor_parallel_ffn.svg)
#
# The first matrix is cut *by columns*. A column of $XW_1$ needs all of $X$ and one column of $W_1$, nothing else:
#
# $$
# X\,[\,W_1^{(0)} \mid W_1^{(1)}\,] = [\,X W_1^{(0)} \mid X W_1^{(1)}\,] .
# $$
#
# GELU looks at each number by itself, so each rank applies it to its own columns.
# The second matrix is cut *by rows*, where the columns of what comes in are: rank 0's columns meet rank 0's rows. What comes out has the full shape, but is only a summand:
#
# $$
# [\,G^{(0)} \mid G^{(1)}\,] \begin{bmatrix} W_2^{(0)} \\ W_2^{(1)} \end{bmatrix} = G^{(0)} W_2^{(0)} + G^{(1)} W_2^{(1)} .
# $$
#
# Between the two matrices nothing is sent at all {cite}`shoeybi2019megatron`.
#
# PyTorch's `nn.Linear` keeps its weight transposed, `[out, in]`. Cut by columns in the formula is cut by *rows* of `linear.weight`, and the other way round: the commonest confusion in this subject.
#
# ### The other orders
#
# Each matrix can be cut both ways, so there are four orders. All can be made right. What do they send?
# Two things decide. After a cut by rows every rank has a summand, and *GELU of a sum is not the sum of GELUs*: it has to be added up first, while it is four times as wide.
# After a cut by columns every rank has some columns, and a matrix cut by columns wants all of them: they have to be gathered.
#
# ![Four ways of cutting two matrices, and what each rank sends, in units of one Y times (N-1)/N. Columns, then rows: nothing before GELU, an all-reduce of Y at the end: 2. Columns twice: an all-gather after GELU and one of Y: 4 + 1. Rows twice: a reduce-scatter before GELU and an all-reduce of Y: 4 + 2. Rows, then columns: an all-reduce before GELU and an all-gather of Y: 8 + 1.](../figures/tensor_parallel_orders.svg)
#
# What has to be done is said by four functions, with the collectives of [Collectives](collectives.md).

# %%
def cut(x, dim):
    """This rank's share of x along dim."""
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous()


def gathered(x_Th):
    """[T, H/t] of every rank to [T, H]."""
    pieces = [torch.empty_like(x_Th) for _ in range(dist.get_world_size())]
    collectives.all_gather(pieces, x_Th, dist.group.WORLD)
    return torch.cat(pieces, -1)


def summed(x_TH):
    """The sum of all ranks' [T, H]."""
    collectives.all_reduce(x_TH, dist.group.WORLD)
    return x_TH


def own_summed(x_TF):
    """This rank's columns [T, F/t] of the sum of all ranks' [T, F]."""
    pieces = [piece.contiguous() for piece in x_TF.chunk(dist.get_world_size(), -1)]
    out = torch.empty_like(pieces[0])
    collectives.reduce_scatter(out, pieces, dist.group.WORLD)
    return out


# %% [markdown]
# The next cell runs all four orders on four ranks and counts what rank 0 sends. The numbers beside the collectives are in units of $\frac{N-1}{N}$ times $Y$, as in the picture.

# %%
WIDE, INNER, TOKENS = 256, 1024, 64
ORDERS = {  # first matrix, second matrix: what is computed
    "columns, rows": lambda x, w, u: summed(gelu(x @ cut(w, 1)) @ cut(u, 0)),
    "columns, columns": lambda x, w, u: gathered(gathered(gelu(x @ cut(w, 1))) @ cut(u, 1)),
    "rows, rows": lambda x, w, u: summed(gelu(own_summed(cut(x, 1) @ cut(w, 0))) @ cut(u, 0)),
    "rows, columns": lambda x, w, u: gathered(gelu(summed(cut(x, 1) @ cut(w, 0))) @ cut(u, 1)),
}


def all_orders():
    x_TH, found = normal(0, TOKENS, WIDE), []
    w1_HF, w2_FH = 0.1 * normal(1, WIDE, INNER), 0.1 * normal(2, INNER, WIDE)
    want_TH = gelu(x_TH @ w1_HF) @ w2_FH
    for compute in ORDERS.values():
        with count.sent() as sent:
            y_TH = compute(x_TH, w1_HF, w2_FH)
        found.append((sent.bytes, (y_TH - want_TH).abs().max().item()))
    return found


BETWEEN = ["-", "all-gather, 4", "reduce-scatter, 4", "all-reduce, 8"]
AT_THE_END = ["all-reduce, 2", "all-gather, 1", "all-reduce, 2", "all-gather, 1"]
TIMES, N = [2, 4 + 1, 4 + 2, 8 + 1], 4
unit = TOKENS * WIDE * 4 * (N - 1) // N  # bytes: S (N-1)/N
rows = []
for order, between, end, times, (sent, off) in zip(
    ORDERS, BETWEEN, AT_THE_END, TIMES, ranks.run(all_orders, N)[0], strict=True
):
    assert sent == times * unit and off < 1e-4  # float32, sums of 1024 products up to 3
    rows.append((order, between, end, f"{times * unit:,}", f"{sent:,}", sent - times * unit))
head = ["cut by", "around GELU", "at the end", "predicted (B)"]
head += ["counted (B)", "difference (B)"]
show.table(rows, head, caption=f"Sent by rank 0 of {N} in forward")


# %% [markdown]
# The right order sends least, and once. The others send two and a half, three and four and a half times as much, and twice.
#
# (tp-plus)=
# `````{admonition} Checked: "y = y0.to('cuda:0') + y1.to('cuda:0') is the all-reduce"
# :class: checked
#
# In tutorials one process moves both summands to GPU 0 and adds them. The number is right, and autograd knows the way back.
# But it is a *reduce*: the sum stands on GPU 0 alone, and the next layer needs it on all. So it has to be copied back, and everything passes through one GPU's wire: $(N-1)S$ bytes in and as many out, where a rank of a ring has $2\frac{N-1}{N}S$ each way.
# And under `torchrun` the line does something else: each process knows its own summand alone, whatever device it moves it to.
# The next cell does on ranks what the `.to`s do.
# `````

# %%
def to_rank_0_and_plus():
    rank, size, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    mine_TH = normal(rank, T, H)
    want_TH = sum(normal(r, T, H) for r in range(size))

    def right(y_TH):
        return (y_TH - want_TH).abs().max().item() < 1e-5  # float32

    y_TH = mine_TH.clone()
    with count.sent() as there:
        if rank == 0:  # y = y0 + y1.to("cuda:0") + …
            for other in range(1, size):
                arrived_TH = torch.empty_like(y_TH)
                ranks.irecv(arrived_TH, other).wait()
                y_TH += arrived_TH
        else:
            ranks.isend(y_TH, 0).wait()
    have_it = right(y_TH)
    with count.sent() as back:
        for other in range(1, size) if rank == 0 else ():  # y.to("cuda:1"), …
            ranks.isend(y_TH, other).wait()
        if rank:
            ranks.irecv(y_TH, 0).wait()
    with count.sent() as ring:
        collectives.all_reduce(mine_TH, world)
    assert right(y_TH) and right(mine_TH)
    return have_it, there.bytes, back.bytes, ring.bytes


rows = []
for size in (2, 4, 8):
    found = ranks.run(to_rank_0_and_plus, size)
    have_it, there, back, ring = zip(*found, strict=True)
    S = T * H * 4
    through_0, in_ring = sum(there) + back[0], 2 * ring[0]  # what others send, rank 0 receives
    assert through_0 == 2 * (size - 1) * S and in_ring == 2 * 2 * (size - 1) * S // size
    assert sum(have_it) == 1
    cells = f"{sum(have_it)} of {size}", f"{through_0 / 1e6:.2f}", f"{in_ring / 1e6:.2f}"
    rows.append((size, *cells, f"{through_0 / in_ring:.0f}"))
head = ["ranks", "have the sum after the plus", "in and out of rank 0: copies (MB)"]
show.table(rows, [*head, "of each rank: all-reduce (MB)", "ratio"])

# %% [markdown]
# $N/2$ times the bytes through one wire, while all other wires are idle most of the time.
#
# ## The mechanism
#
# ### A pair of operators
#
# Forward is done. Training needs gradients, and for them the same two cuts need a second all-reduce, in another place.
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
# The paper calls the two operators $f$ and $g$; here they are `copy_to` and `reduce_from`. Each is the other one, read backwards.
# Look at which of the four methods send something. (`reduce_from_`, with an underscore, makes the sum in place.)

# %%
show.source(tp.copy_to, _CopyTo, _ReduceFrom)

# %% [markdown]
# To call `dist.all_reduce` in the model's forward would not do: it changes a tensor behind autograd's back.
# Behind the second matrix that happens to be right, since backward has nothing to do there. In front of the first, where a sum is due, nothing would happen either.
#
# ### Layers, and a bias
#
# Two layers follow. The first has a bias for each of its columns, which is cut with them. The second has a bias for each entry of $Y$, and every rank has all of $Y$.
# Look at where it is added. (Through an `entrance` a layer computes together with its neighbours; we come to it [below](#messages-and-bytes).)

# %%
show.source(tp.ColumnLinear.forward, tp.RowLinear.forward)


# %% [markdown]
# (tp-bias)=
# `````{admonition} Checked: "each rank keeps the bias and adds it, as nn.Linear does"
# :class: checked
#
# Then the all-reduce adds up the biases as well: $\sum_r (G^{(r)} W_2^{(r)} + b) = Y + t\,b$ in place of $Y + b$. Nothing fails.
# While biases are still zero, as they are in the beginning, the numbers are even right.
# The next cell cuts `nn.Linear` with a bias over $t$ ranks, in both ways.
# `````

# %%
def biased_rows():
    torch.manual_seed(0)
    linear = nn.Linear(256, 64).to(ranks.device())
    x_TI, group = normal(0, 16, 256), dist.group.WORLD
    want_TO = linear(x_TI)
    x_Ti = x_TI[:, tp.share("inputs", 256, group)]
    right = tp.RowLinear.from_plain(linear, group)
    y_TO = x_Ti @ right.weight.T + linear.bias  # [T, i] @ [i, O], and the mistake
    dist.all_reduce(y_TO)
    surplus = (y_TO - want_TO) / linear.bias  # in biases
    return apart(right(x_Ti), want_TO), surplus.mean().item()


rows = []
for t in (2, 4, 8):
    off, surplus = ranks.run(biased_rows, t)[0]
    assert off < 1e-5 and abs(surplus - (t - 1)) < 1e-3  # float32, numbers about 1
    rows.append((t, 1, t, f"{1 + surplus:.2f}"))
head = ["ranks", "biases in Y: added behind the sum", "added by each rank: predicted"]
show.table(rows, [*head, "measured"])

# %% [markdown]
# ### A block, and the whole model
#
# A feed-forward network is a column-parallel and a row-parallel layer. SwiGLU has two matrices in front; both are cut by the same columns, and their product is taken number by number.
#
# *Attention* is the same with something else in the middle. A head uses its own columns of queries, keys and values and nothing of other heads, so heads take the place of columns: each rank computes whole heads.
# Where several heads of queries share one of keys and values, $t$ has to divide the fewer.
#
# ![Attention with eight heads of queries and four of keys and values on two ranks. Rank 0 has the first four heads of queries and the two of keys and values that they share, rank 1 the others: columns of the three matrices. Each computes attention for its own heads, and multiplies by its rows of the output matrix; an all-reduce adds the two summands.](../figures/tensor_parallel_heads.svg)
#
# So a block has two regions. Each begins with `copy_to` and ends with `reduce_from`, and nothing is sent inside.
# What stands between the regions, norms, shortcuts, dropout, every rank computes in full.
#
# ![A block on two ranks. The residual stream, norms and dropout are whole on both ranks. Attention and the feed-forward network are cut, from copy_to to reduce_from. In forward each reduce_from is an all-reduce, in backward each copy_to: two and two.](../figures/tensor_parallel_block.svg)
#
# It is done to the plain GPT from outside. `copy_to` stands *once* in front of a region, as a hook on the module, and not in front of each of queries, keys and values: their gradients are added up locally first.

# %%
show.source(tp.cut_attention, tp.cut_ffn)

# %% [markdown]
# So $t$ divides four numbers: heads, heads of keys and values, the width $F$ and the vocabulary. Which $t$ do?

# %%
PADDED = replace(PRESETS["gpt-2"], vocab=50_304)
models = {**PRESETS, "gpt-2, vocabulary padded": PADDED}
for name in ("gpt-2", "gpt-2, vocabulary padded", "llama-3-8b", "llama-3-405b"):
    print(f"{name:25}", *tp.degrees(models[name]))
assert tp.degrees(PRESETS["gpt-2"]) == [1]

# %% [markdown]
# GPT-2's vocabulary is $50257 = 29 \cdot 1733$, so it is padded with entries that no token uses. Anything else is refused before a byte is sent:

# %%
try:
    ranks.run(lambda: tp.parallelize(GPT(PRESETS["nano"]), dist.group.WORLD), 4)
except ranks.RankError as error:
    print(str(error).splitlines()[0])
else:
    raise AssertionError("this was meant to be refused")

# %% [markdown]
# ### Vocabulary: embedding, logits, loss
#
# The largest matrix of GPT-2 is its *embedding*. It is cut by rows: a rank looks up the tokens that it has, and puts zeros for the others; the sum has each row once.
#
# ![The vocabulary on two ranks, four of eight entries each. Left, the embedding: for tokens 5, 1, 7 and 2 each rank looks up those that it has and puts zeros for the others; an all-reduce adds the two. Right, the loss: each rank keeps its half of the logits, and three numbers for each token are reduced: the largest logit, the sum of the exponentials, and the target’s logit, which one rank has.](../figures/tensor_parallel_vocabulary.svg)
#
# The head is a column-parallel layer, so each rank gets the *logits* of its own entries.
# To gather them would be dear, and it is not needed. The loss of a token is
#
# $$
# \log \sum_{j=1}^{V} e^{z_j} - z_\text{target}
# = \log \sum_r \Big( \sum_{j \in r} e^{z_j - z_{\max}} \Big) + z_{\max} - z_\text{target} ,
# $$
#
# and all that a rank has to tell the others is three numbers for each token.
# Look for what is reduced, and for what backward sends: the gradient of a logit is softmax minus one for the target, and each rank knows that for its own entries.

# %%
show.source(_CrossEntropy)


# %% [markdown]
# How much does it save? One sequence of 8,192 tokens of Llama 3, float32 logits, 8 ranks; and the same on a small model, counted.

# %%
def loss_traffic(vocab, tokens_):
    """On a rank: bytes sent by the loss, and its difference from one process."""
    logits_BSV = normal(0, 1, tokens_, vocab)
    targets_BS = torch.arange(tokens_, device=ranks.device())[None] * 7 % vocab
    mine = tp.share("vocab", vocab, dist.group.WORLD)
    with count.sent() as sent:
        value = tp.loss(logits_BSV[..., mine], targets_BS, dist.group.WORLD)
    handed = sent.payload["all_reduce"]
    return tp.on_wire(handed, dist.get_world_size()), apart(value, loss(logits_BSV, targets_BS))


def of_gathering(vocab, tokens_, t):
    return 4 * tokens_ * vocab * (t - 1) / t  # bytes that leave a rank in an all-gather


rows = []
for name, V, s, t in (("a small one", 4096, 512, 4), ("Llama 3 8B", 128_256, 8192, 8)):
    predicted, counted = tp.on_wire(3 * 4 * s, t), "-"
    if t == 4:
        counted, off = ranks.run(loss_traffic, t, V, s)[0]
        assert counted == predicted and off < 1e-5  # float32, a loss of about 9
        counted = f"{counted / 1e6:.4f}"
    cells = f"{of_gathering(V, s, t) / 1e6:,.2f}", f"{predicted / 1e6:.4f}", counted
    rows.append((name, V, s, t, *cells))
head = ["model", "V", "tokens", "t", "gathering logits (MB)", "three numbers: predicted (MB)"]
show.table(rows, [*head, "counted (MB)"], caption="Sent by a rank for one loss")

# %% [markdown]
# ## Equal
#
# One process and $t$ ranks train the same model for five steps of AdamW on the same batches.
# "GPT-2's" are its choices (GELU, LayerNorm, biases, a tied head), "Llama's" its own (SwiGLU, RMSNorm, two heads of queries for each of keys and values, no tied head); "dropout" is the first with dropout of 10 %.

# %%
GPT2ISH = Config(seq=32, layers=2, heads=8, hidden=64)
LLAMAISH = replace(GPT2ISH, kv_heads=4, mlp="swiglu", norm="rms", bias=False, tied=False)
CASES = {"GPT-2's": GPT2ISH, "Llama's": LLAMAISH, "dropout": replace(GPT2ISH, dropout=0.1)}


def gradients_apart(alone, cut_, group):
    """For each parameter: the difference of its gradient from this rank's part of one process's."""
    whole = dict(alone.named_parameters())
    for (name, p), dim in zip(cut_.named_parameters(), tp.cuts(cut_).values(), strict=True):
        want = whole[name].grad
        if dim is not None:
            want = want.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]
        yield apart(p.grad, want)


# %% [markdown]
# The comparison itself; look at what is the same on both sides: batches and seeds.

# %%
def compare(config, dtype):
    """Largest differences from one process: logits, first gradients, weights after five steps."""
    group = dist.group.WORLD
    alone, cut_ = plain(config, dtype), tp.parallelize(plain(config, dtype), group)
    models = [
        (alone, loss, torch.optim.AdamW(alone.parameters(), foreach=False)),
        (cut_, lambda *x: tp.loss(*x, group), torch.optim.AdamW(cut_.parameters(), foreach=False)),
    ]
    found = []
    for step in range(5):
        outputs = []
        for model, of, optimizer in models:
            torch.manual_seed(step)  # dropout: all ranks draw the same
            optimizer.zero_grad()
            tokens, targets = batch(step, 4, 32)
            outputs.append(model(tokens))
            of(outputs[-1], targets).backward()
        if step == 0:
            mine = tp.share("vocab", config.vocab, group)
            found.append(apart(outputs[0][..., mine], outputs[1]))
            found.append(max(gradients_apart(alone, cut_, group)))
        for _, _, optimizer in models:
            optimizer.step()
    weights = alone.state_dict()
    whole = tp.full_state_dict(cut_)
    return [*found, max(apart(weights[name], whole[name]) for name in weights)]


def compare_all(names):
    types = torch.float32, torch.float64
    return [compare(CASES[name], dtype) for name in names for dtype in types]


# %% [markdown]
# Compare float32 with float64, which has nine digits more: the differences shrink by as many.

# %%
rows = []
for names, device in ((["GPT-2's", "Llama's"], "auto"), (["dropout"], "cpu")):
    found = {}
    for t in (2, 4):
        # A mask's bits are one process's on the CPU alone; a GPU's kernels draw their own.
        found[t] = torch.tensor(ranks.run(compare_all, t, names, device=device)).amax(0)
    for i, (name, dtype) in enumerate((n, d) for n in names for d in ("float32", "float64")):
        # Sums over ranks are made in another order. Logits and gradients reach 1; AdamW divides by
        # a gradient's size, and where that is almost 0, rounding decides which way a weight moves.
        room = (1e-4, 1e-4, 5e-3) if dtype == "float32" else (1e-12, 1e-12, 1e-9)
        for t in (2, 4):
            assert all(x <= limit for x, limit in zip(found[t][i], room, strict=True)), found
            rows.append((name, dtype, t, *map(short, found[t][i])))
head = ["model", "type", "t", "logits", "gradients", "weights after 5 steps"]
show.table(rows, head, caption="Largest difference from one process")

# %% [markdown]
# Why not zero, as in [ZeRO](zero.md) and [Pipeline parallelism](pipeline.md)? There each product had the same operands. Here a sum of products is made in parts, on several ranks, and the parts are added afterwards: rounding comes at other places.
# The [tests](../tests/test_tensor_parallel.py) do the same for one rank, 16-bit weights, recomputation, clipping, and bad input.
#
# The optimizer is torch's own. AdamW works on each number by itself, and does not notice that it sees a part of each matrix.
#
# ## What it costs
#
# ### Memory
#
# Model states first. Norms and the biases behind sums are whole on every rank; everything else is divided by $t$.

# %%
MODEL = Config(seq=64, layers=4, heads=4, hidden=128, tied=False)


def held():
    """On a rank: bytes of the states after a step, and of what forward saves for backward."""
    model = tp.parallelize(plain(MODEL), dist.group.WORLD)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tokens, targets = batch(0)
    with count.saved(model, tokens, targets) as saved:
        value = tp.loss(model(tokens), targets, dist.group.WORLD)
    value.backward()
    optimizer.step()
    states = count.states(model, optimizer)
    del states["counters"]  # AdamW counts its steps, in four bytes for each parameter tensor
    return sum(states.values()), saved.bytes


HELD = {t: ranks.run(held, t, device="cpu")[0] for t in (1, 2, 4)}
rows = []
for t, (measured, _) in HELD.items():
    predicted = sum(tp.predicted_states(MODEL, t).values())
    assert measured == predicted
    share = f"{100 * t * predicted / HELD[1][0] - 100:.1f}"
    rows.append((t, f"{predicted:,}", f"{measured:,}", measured - predicted, share))
head = ["t", "predicted (B)", "measured (B)", "difference (B)"]
head += ["copies, on all ranks (% of the model)"]
show.table(rows, head, caption="Model states on each rank, float32")

# %% [markdown]
# To the byte. What is held more than once is next to nothing, and less in larger models.
#
# `````{admonition} Checked: "on t ranks everything takes a t-th of the memory"
# :class: checked
#
# Not activations. Inside the two regions they are divided; outside, norms and shortcuts keep the whole residual stream, on every rank.
# For each block that is $x + y/t$ bytes, and $x$ stays however large $t$ is. The cell measures what forward saves, and takes the prediction from [Memory](memory.md).
# `````

# %%
rows = []
for t, (_, measured) in HELD.items():
    activations = memory.activations(MODEL, 8, 64, "fp32", tp=t)
    predicted = activations.layer * activations.layers + activations.head + activations.logits
    # The loss keeps some numbers for each token besides.
    assert abs(measured / predicted - 1) < 0.01, (t, predicted, measured)
    off = 100 * (measured / predicted - 1)
    cells = f"{predicted / 1e6:.2f}", f"{measured / 1e6:.2f}", f"{off:+.1f}"
    rows.append((t, *cells, f"{HELD[1][1] / t / 1e6:.2f}", f"{measured / HELD[1][1]:.2f}"))
assert HELD[4][1] > 0.4 * HELD[1][1]
head = ["t", "predicted (MB)", "measured (MB)", "difference (%)", "a t-th would be (MB)"]
show.table(rows, [*head, "of one process's"], caption="Saved for backward on each rank")


# %% [markdown]
# On four ranks 43 % are left where 25 % were hoped for. The next lesson, [Sequence parallelism](sequence_parallel.md), divides the rest.
#
# ### Messages and bytes
#
# Two all-reduces forward and two backward for each block, one behind the embedding, one in backward of the head: each carries the stream, $b \cdot s \cdot h$ elements. Two small ones make the loss.
# The cell counts calls and bytes by purpose.

# %%
def traffic():
    """On a rank: (all-reduces, bytes handed to them) of forward, loss and backward."""
    group = dist.group.WORLD
    model = tp.parallelize(plain(MODEL), group)
    tokens, targets = batch(0)
    with count.sent() as forward:
        logits = model(tokens)
    with count.sent() as of_loss:
        value = tp.loss(logits, targets, group)
    with count.sent() as backward:
        value.backward()
    found = [forward, of_loss, backward]
    assert all(set(sent.calls) <= {"all_reduce"} and not sent.bytes for sent in found)
    return [(sent.calls["all_reduce"], sent.payload["all_reduce"]) for sent in found]


rows = []
for t in (2, 4):
    found = ranks.run(traffic, t)[0]
    calls, handed = tp.predicted_calls(MODEL, t), tp.predicted_sent(MODEL, t, 8, 64)
    for (counted, size), phase in zip(found, calls, strict=True):
        assert (counted, size) == (calls[phase], handed[phase])
        wires = (f"{tp.on_wire(handed[phase], t) / 1e6:.3f}", f"{tp.on_wire(size, t) / 1e6:.3f}")
        rows.append((t, phase, calls[phase], counted, *wires))
head = ["t", "in", "all-reduces: predicted", "counted", "on the wire: predicted (MB)"]
show.table(rows, [*head, "counted (MB)"], caption="A step, 4 blocks, 8 sequences of 64, h = 128")

# %% [markdown]
# Is that much? Data parallelism hands its all-reduce $P \approx 12 L h^2$ elements in a step, here it is about $4 L b s h$. So with more than $3h$ tokens in a step tensor parallelism sends more: 12,288 tokens for $h = 4096$.
# Worse, forward's half cannot be put behind computation, as gradients can: the next product *needs* the sum.
#
# In backward there is a way. The layers before wait for the gradient of $X$, but nobody waits for the gradients of the weights. So compute the first, send it, and compute the others meanwhile.
# For that the entrance and all layers that see $X$ become one function of autograd, as Megatron-LM has it for one matrix. `parallelize` uses it unless it is given `edges` that have no `begin` and `back`. Look at what stands between `back`, which starts the sum, and `arrive()`, which waits for it.

# %%
show.source(tp.REPLICATED.back, _Columns.backward)

# %% [markdown]
# The cell takes steps on two ranks without a wire, and over an emulated one of 0.4 Gbit/s, in both ways. With `copy_to` and the layers one by one, a step takes longer by $\alpha + \beta S$ of *all* messages.

# %% tags=["measured"]
LATENCY, BANDWIDTH = 1e-4, 50e6
WIDER = replace(MODEL, layers=2, hidden=512)


def on_a_wire(rounds):
    """On a rank: seconds of steps without a wire, with it one by one, with it overlapped."""
    world, slow, one_by_one = dist.group.WORLD, link.slow(LATENCY, BANDWIDTH), tp.Edges(*PAIR)
    cases = (world, one_by_one), (slow, one_by_one), (slow, tp.REPLICATED)
    models = [tp.parallelize(plain(WIDER), group, edges) for group, edges in cases]
    seconds = []
    for step in range(rounds + 1):
        seconds.append([])
        for model in models:
            model.zero_grad()
            dist.barrier()
            begin = time.perf_counter()
            our_step(model, step, 4)
            seconds[-1].append(time.perf_counter() - begin)
    return seconds[1:]


PAIR = tp.copy_to, tp.reduce_from
seconds = ranks.run(on_a_wire, 2, 8, device="cpu")[0]
calls = sum(tp.predicted_calls(WIDER, 2).values())
handed = sum(tp.predicted_sent(WIDER, 2, 4, 64).values())
wire = calls * 2 * LATENCY + tp.on_wire(handed, 2) / BANDWIDTH
bare, plainly, overlapped = map(statistics.median, zip(*seconds, strict=True))
# On a busy machine ranks wait for one another, and that the wire does hide: hence the room.
assert wire < plainly and 0.6 < plainly / (bare + wire) < 1.6, (bare, wire, plainly)
assert statistics.median(b / a for _, a, b in seconds) < 1.05, seconds
off = f"{100 * (plainly / (bare + wire) - 1):+.0f}"
rows = [
    ("without a wire", "-", f"{1e3 * bare:.0f}", "-"),
    ("copy_to, layers one by one", f"{1e3 * (bare + wire):.0f}", f"{1e3 * plainly:.0f}", off),
    ("behind the gradients of weights", "-", f"{1e3 * overlapped:.0f}", "-"),
]
head = ["all-reduce in backward", "step: predicted (ms)", "measured (ms)", "difference (%)"]
show.table(rows, head, caption=f"All messages take {1e3 * wire:.0f} ms on the wire")

# %% [markdown]
# (tp-node)=
# ### Within a machine
#
# So it is bandwidth that decides how large $t$ may be. For one token a block computes about $24h^2$ floating-point operations forward, divided by $t$, and sends $2 \cdot 2\frac{t-1}{t}h$ elements.
# The ratio of waiting to computing is
#
# $$
# \frac{4\,\frac{t-1}{t}\,h\,e\,\beta}{24\,h^2 / (t\,c)} = \frac{(t-1)\,e\,\beta\,c}{6\,h} ,
# $$
#
# with $e$ bytes for an element, $c$ operations per second, and $\beta$ seconds per byte. It grows with $t$ and with the GPU, and falls with $h$; batch and sequence do not matter.
# The table takes 16-bit elements, a GPU that reaches 400 TFLOP/s, and two wires: 450 GB/s, as between GPUs of a machine, and 50 GB/s, as between machines. They are assumptions: put in your own.

# %%
rows = []
for name in ("llama-3-8b", "llama-3-70b", "llama-3-405b"):
    h, cells = PRESETS[name].hidden, []
    for bandwidth in (450e9, 50e9):
        for t in (2, 4, 8):
            ratio = (t - 1) * 2 * 400e12 / bandwidth / (6 * h)
            cells.append(f"{100 * ratio / (1 + ratio):.0f}")
    rows.append((name, f"{h:,}", *cells))
head = [f"{g} GB/s, t = {t}" for g in (450, 50) for t in (2, 4, 8)]
show.table(rows, ["model", "h", *head], caption="Share of forward that waits for the wire (%)")


# %% [markdown]
# That is why $t$ ends at the GPUs of one machine, in practice at 8 {cite}`narayanan2021megatron`. Beyond, cut by layers ([Pipeline parallelism](pipeline.md)), and copy ([Data parallelism](data_parallel.md)).
# A second reason comes on top: thin shards compute worse. [One matrix product on many GPUs](gemm.md) measures how much.
#
# (tp-dtensor)=
# ## The production library
#
# `parallelize_module` takes a plan: a name, or a pattern, and how that module is cut. Weights become `DTensor`s, tensors that know how they are dealt out, and each operation on them asks what has to be sent.
# Compare the plan with [the block above](#a-block-and-the-whole-model), and note the last entry.

# %%
def by_torch(model, group, enter_once=True):
    """The same cuts with DTensor."""
    column, row, whole = ColwiseParallel, RowwiseParallel, (Replicate(),)
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
            input_layouts=whole, desired_input_layouts=whole
        )
    mesh = DeviceMesh.from_group(group, ranks.device().type)
    return parallelize_module(model, mesh, plan, src_data_rank=None)


def torch_step(model, step):
    with loss_parallel():
        value = loss(model(batch(step)[0]), batch(step)[1])
        value.backward()  # inside, because it has a backward of its own
    return value


# %% [markdown]
# Now both train for five steps. The cell compares losses and weights, and counts all-reduces; the third line is the plan as one often sees it, without `PrepareModuleInput`.

# %%
def profiled(run, model):
    """In one step: all-reduces, and operations that went through DTensor's dispatcher."""
    with profile() as seen:
        run(model, 0)
    calls = {event.key: event.count for event in seen.key_averages()}
    return calls["c10d::allreduce_"], calls.get("PythonSubclass", 0)


def beside():
    group, losses, models = dist.group.WORLD, [], []
    for model, run in (
        (tp.parallelize(plain(MODEL), group), our_step),
        (by_torch(plain(MODEL), group), torch_step),
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
        apart(tensor, getattr(others[name], "full_tensor", lambda n=name: others[n])())
        for name, tensor in tp.full_state_dict(ours).items()
    ]
    often = by_torch(plain(MODEL), group, enter_once=False)
    steps = (our_step, ours), (torch_step, theirs), (torch_step, often)
    in_loss = max(abs(a - b) for a, b in zip(*losses, strict=True))
    return in_loss, max(weights), [profiled(*step) for step in steps]


in_loss, in_weights, found = ranks.run(beside, 2, device="cpu", show=False)[0]
# Float32, a loss of 5; AdamW divides by a gradient's size, as above.
assert in_loss < 1e-4 and in_weights < 5e-3
L, (calls, dispatched) = MODEL.layers, zip(*found, strict=True)
# torch reduces the loss's two sums one by one; and queries, keys and values for themselves.
assert calls == (4 * L + 2 + 2, 4 * L + 2 + 3, 6 * L + 2 + 3), calls
assert dispatched[0] == 0 and min(dispatched[1:]) > 100
print(f"five steps of AdamW: losses differ by {short(in_loss)}, weights by {short(in_weights)}")
ways = "ours", "DTensor", "DTensor, without PrepareModuleInput"
head = ["two ranks, 4 blocks", "all-reduces in a step", "operations through DTensor's dispatcher"]
show.table(list(zip(ways, calls, dispatched, strict=True)), head)


# %% [markdown]
# The same numbers. Without the last entry each of queries, keys and values adds up a gradient of its own: two all-reduces more for each block, and the bytes with them.
#
# What does DTensor cost? Each operation on a tensor that knows how it is cut has to be looked up, and its result wrapped. Torch's profiler has counted these in the cell above. Now a step of both, in turn:

# %% tags=["measured"]
def timed(rounds):
    """On a rank: seconds of steps of ours and of DTensor's."""
    group = dist.group.WORLD
    pair = {
        "ours": (our_step, tp.parallelize(plain(MODEL), group)),
        "DTensor": (torch_step, by_torch(plain(MODEL), group)),
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


seconds = ranks.run(timed, 2, 10, device="cpu", show=False)[0]
ratio = statistics.median(a / b for a, b in zip(*seconds.values(), strict=True))
assert ratio < 1.0, ratio  # about 0.7 on a quiet machine
rows = [(who, f"{1e3 * statistics.median(times):.0f}") for who, times in seconds.items()]
rows.append(("ours / DTensor, median of the ratios", f"{ratio:.2f}"))
show.table(rows, ["two ranks, loopback", "step (ms)"])

# %% [markdown]
# The cost is one of operations, not of bytes: in large layers it vanishes, and on a GPU the dispatch runs ahead of the kernels while these are long enough.
# For that a DTensor knows how it is cut wherever it goes: FSDP2, checkpoints and clipping ask it. [The benchmark](../benchmarks/tensor_parallel.py) measures with more care.
#
# | here | PyTorch | Megatron-LM |
# |---|---|---|
# | `ColumnLinear` | `ColwiseParallel` | `ColumnParallelLinear` |
# | `RowLinear` | `RowwiseParallel` | `RowParallelLinear` |
# | `copy_to`, once for each region | `PrepareModuleInput` | `copy_to_tensor_model_parallel_region` |
# | `reduce_from` | `Partial` to `Replicate` | `reduce_from_tensor_model_parallel_region` |
# | `tp.loss` | `loss_parallel()` | `vocab_parallel_cross_entropy` |
# | $t$ | size of the mesh's dimension | `tensor_model_parallel_size` |
#
# ## What goes wrong
#
# None of these raises an error.
#
# ### The forgotten all-reduce
#
# Somebody writes the layers with `reduce_from` and leaves `copy_to` out. Forward is right, to the last digit, and so is the first loss.
# Two runs on two ranks, of 80 steps over the same twenty batches:

# %%
LAB = replace(MODEL, layers=2, hidden=64)


def nothing(x, group):
    return x


def train(edges, steps=80):
    """On a rank: of each step, the loss, and how far whole parameters of the ranks are apart."""
    group, found = dist.group.WORLD, []
    model = tp.parallelize(plain(LAB), group, edges)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for step in range(steps):
        optimizer.zero_grad()
        value = our_step(model, step % 20, 4)
        optimizer.step()
        found.append((value.item(), whole_apart(model, group)))
    return found


def whole_apart(model, group):
    """Largest difference between ranks in a parameter that all of them have whole."""
    named, cuts = dict(model.named_parameters()), tp.cuts(model)
    mine = torch.cat([named[name].detach().view(-1) for name in named if cuts[name] is None])
    root = mine.clone()
    dist.broadcast(root, 0, group=group)
    difference = (mine - root).abs().max()
    dist.all_reduce(difference, dist.ReduceOp.MAX, group=group)
    return difference.item()


# %% [markdown]
# The table has means over ten steps, the picture over five.

# %%
RUNS = {
    "as it should be": tp.REPLICATED,
    "forgotten": tp.Edges(enter=nothing, leave=tp.reduce_from),
}
rows, curves = [], {}
for name, edges in RUNS.items():
    losses, drift = curves[name] = list(
        zip(*ranks.run(train, 2, edges, device="cpu")[0], strict=True)
    )
    means = (f"{statistics.mean(losses[i - 10 : i]):.2f}" for i in (10, 40, 80))
    rows.append((name, f"{losses[0]:.4f}", *means, f"{drift[-1]:.3f}"))
(right, stay), (wrong, drift) = curves.values()
assert abs(right[0] - wrong[0]) < 1e-5 and max(stay) == 0.0 < 0.01 < drift[-1]
assert statistics.mean(wrong[-10:]) > 1.05 * statistics.mean(right[-10:])
head = ["all-reduce in backward", "loss of step 1", "of steps 1 to 10", "31 to 40", "71 to 80"]
show.table(rows, [*head, "whole parameters apart"])

# %% tags=["hide-input"]
figure, panels = plt.subplots(1, 2, figsize=(7.6, 3.0), gridspec_kw={"wspace": 0.38})
places = (38, -0.2, "right", "top"), (46, 0.15, "left", "bottom")
for (name, (losses, apart_)), color, place in zip(curves.items(), (2, 5), places, strict=True):
    smooth = [statistics.mean(losses[max(0, i - 4) : i + 1]) for i in range(len(losses))]
    for axes, values in zip(panels, (smooth, apart_), strict=True):
        axes.plot(range(1, len(values) + 1), values, color=show.RANK_COLORS[color], lw=2)
    step, off, ha, va = place
    panels[0].text(step, smooth[step] + off, name, ha=ha, va=va)
panels[0].set_ylabel("loss")
panels[1].set_ylabel("whole parameters apart")
for axes in panels:
    axes.set_xlabel("step")
show.figure(
    figure,
    "Left, the loss over 80 steps: without the all-reduce in backward it falls as well, a little "
    "behind at first, then further and further. Right, how far parameters are apart that both "
    "ranks have whole: with it zero in every step, without it more and more.",
    "tensor_parallel_forgotten",
)

# %% [markdown]
# It trains. Who has no second curve beside it blames the learning rate.
# Each rank's gradients lack what the other rank's part of the network says. So parameters that both hold whole, norms and the biases behind sums, drift apart. *That* is the test: they must stay equal, to the bit.
#
# ### Dropout: ranks with seeds of their own, or with one seed too many
#
# Two kinds of masks are wanted. Between the regions every rank has the same activations, and has to drop the same ones. Within attention every rank has other heads, and has to drop independently.
# So a single seed for all is wrong, and a seed for each rank is wrong:

# %%
DROPS = replace(LAB, dropout=0.1)


def dropped(seed_of_its_own):
    """On a rank: loss of step 20; the stream of step 1; how far norms are apart in the end."""
    group, streams = dist.group.WORLD, []
    model = tp.parallelize(plain(DROPS), group)
    model.norm.register_forward_pre_hook(lambda _, inputs: streams.append(inputs[0].detach()))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    torch.manual_seed(dist.get_rank() if seed_of_its_own else 0)
    for step in range(20):
        optimizer.zero_grad()
        value = our_step(model, step)
        optimizer.step()
    return value.item(), streams[0], whole_apart(model, group)


def heads_alike():
    """On a rank: a mask for two heads, drawn from one seed on all ranks."""
    torch.manual_seed(0)
    return nn.functional.dropout(torch.ones(2, 64, 64), 0.1) > 0


rows = []
for own in (False, True):
    (value, stream, norms), (_, other, _) = ranks.run(dropped, 2, own, device="cpu")
    name = "its own on each rank" if own else "one for all"
    rows.append((name, f"{value:.2f}", f"{apart(stream, other):.2f}", f"{norms:.4f}"))
    assert apart(stream, other) > 0.05 < 100 * norms if own else apart(stream, other) == norms == 0
same = torch.stack(ranks.run(heads_alike, 2, device="cpu"))
share = (same[0] == same[1]).float().mean().item()
head = ["seed between regions", "loss of step 20", "streams of ranks apart", "whole parameters"]
print(f"within attention, one seed for all: {100 * share:.0f} % of rank 1's mask is rank 0's")
own = (same[0, 0] == same[0, 1]).float().mean().item()
print(f"of two heads of one rank: {100 * own:.0f} % of one mask is the other's")
assert share == 1.0
show.table(rows, head)

# %% [markdown]
# Of one rank's heads 82 % would agree by chance, $0.9^2 + 0.1^2$; of two ranks' all do, so that heads drop in pairs.
#
# The loss does not show the other mistake: dropout is noisy in any case. But the ranks no longer have the same stream. They multiply different $X$ by parts of one matrix, and nothing equals one process any more.
# `parallelize` draws attention's mask whole on every rank and keeps its own heads' part (`dropout="equal"`), or lets each rank draw from a seed of its own inside the region only, and puts the generator back (`"own"`), as Megatron does.

# %%
show.source(drop_by_heads, _own)


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

# %%
def feed_forward(how, group, wide=64, inner=256):
    """Column- and row-parallel weights of nn.Linear, drawn in one of three ways."""
    share = inner // dist.get_world_size(group)
    if how == "whole, then cut":
        torch.manual_seed(0)
        up, down = nn.Linear(wide, inner, bias=False), nn.Linear(inner, wide, bias=False)
    else:
        torch.manual_seed(dist.get_rank(group) if how == "each its own seed" else 0)
        up, down = nn.Linear(wide, share, bias=False), nn.Linear(share, wide, bias=False)
    if how == "whole, then cut":
        return tp.ColumnLinear.from_plain(up, group), tp.RowLinear.from_plain(down, group)
    first, second = tp.ColumnLinear(group, tp.copy_to), tp.RowLinear(group, tp.reduce_from)
    first.weight, second.weight, first.bias, second.bias = up.weight, down.weight, None, None
    return first, second


def initialised(how):
    group = dist.group.WORLD
    first, second = (layer.to(ranks.device()) for layer in feed_forward(how, group))
    scale = second.weight.std().item()
    sgd = torch.optim.SGD([first.weight, second.weight], lr=1.0)
    for step in range(50):
        x_TH = normal(step, 64, 64)
        loss_ = (second(gelu(first(x_TH))) - gelu(x_TH.roll(1, -1))).square().mean()
        sgd.zero_grad()
        loss_.backward()
        sgd.step()
    return scale, loss_.item(), first.weight.detach()


rows, scales = [], {}
for how in ("whole, then cut", "each its own seed", "one seed on all ranks"):
    found = ranks.run(initialised, 2, how, device="cpu")
    neurons = len(torch.unique(torch.cat([weight for *_, weight in found]), dim=0))
    scales[how], value, _ = found[0]
    ratio = scales[how] / scales["whole, then cut"]
    assert neurons == (128 if how == "one seed on all ranks" else 256)
    assert how == "whole, then cut" or abs(ratio - math.sqrt(2)) < 0.03
    rows.append((how, neurons, f"{ratio:.2f}", f"{value:.3f}"))
head = ["weights drawn", "different neurons of 256, after training", "scale of the second matrix"]
show.table(rows, [*head, "loss after 50 steps"])


# %% [markdown]
# DTensor walks into the first of the two where its mesh has no generator of its own, as on CPUs. It prints a warning, and goes on:

# %%
def drawn_by_torch():
    torch.manual_seed(0)
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    weight = distribute_tensor(torch.zeros(8, 4), mesh, [Shard(0)])
    return nn.init.normal_(weight).to_local()


shards = ranks.run(drawn_by_torch, 2, device="cpu", show=False)
print("nn.init.normal_ of a DTensor on a CPU mesh: shards are equal:", torch.equal(*shards))
assert torch.equal(*shards)


# %% [markdown]
# So draw each matrix whole, from one seed, and keep your part. A model that is too large to be whole anywhere is drawn matrix by matrix: `tp.initialize` gives it the numbers that one process would have drawn.

# %%
def never_whole():
    group = dist.group.WORLD
    with torch.device("meta"):
        model = GPT(MODEL)
    tp.parallelize(model, group)
    torch.manual_seed(0)
    with count.held(device=ranks.device()) as held:
        tp.initialize(model)
    weights, want = tp.full_state_dict(model), plain(MODEL).state_dict()
    assert all(torch.equal(weights[name], want[name]) for name in want)
    return held.peak, sum(4 * tensor.numel() for tensor in want.values())


for rank, (peak, whole) in enumerate(ranks.run(never_whole, 4, device="cpu")):
    print(f"rank {rank}: at most {peak:,} B held, the model has {whole:,} B; the same bits")
    assert peak < 0.7 * whole


# %% [markdown]
# The way back to one process is `tp.full_state_dict`. With `tp.load_full_state_dict` a state goes into shards again, on any number of ranks:

# %%
def trained():
    model = tp.parallelize(plain(MODEL), dist.group.WORLD)
    our_step(model, 0)
    torch.optim.AdamW(model.parameters()).step()
    return tp.full_state_dict(model)


def resumed(state):
    model = tp.parallelize(plain(MODEL), dist.group.WORLD)
    tp.load_full_state_dict(model, state)
    again = tp.full_state_dict(model)
    return all(torch.equal(again[name].cpu(), state[name]) for name in state)


state = ranks.run(trained, 4, device="cpu")[0]
same = [ranks.run(resumed, t, state)[0] for t in (1, 2)]
print(f"{len(state)} tensors from 4 ranks; the same bits on 1 and on 2 ranks: {same}")
assert all(same)


# %% [markdown]
# ### A batch for each rank, a norm for each rank
#
# Ranks of a tensor group are *one* worker. A sampler that deals out batches by global rank gives them different ones; then the embedding adds up rows of different tokens, and the loss is taken of a mixture.
# Deal out by the number of the group, not of the rank.
# And torch's `clip_grad_norm_` sees a rank's own gradients. Every rank scales by another factor, and whole parameters drift. `tp.clip_grad_norm_` adds up the squares of what is cut over the ranks, and counts once what is whole.

# %%
def norms():
    """On a rank: the gradients' norm of one process, by tp, and by torch on this rank."""
    alone, model = plain(LAB), tp.parallelize(plain(LAB), dist.group.WORLD)
    tokens, targets = batch(0)
    loss(alone(tokens), targets).backward()
    our_step(model, 0)
    found = [nn.utils.clip_grad_norm_(alone.parameters(), math.inf)]
    found.append(tp.clip_grad_norm_(model, math.inf))
    return [*found, nn.utils.clip_grad_norm_(model.parameters(), math.inf)]


found = torch.tensor(ranks.run(norms, 2))
rows = [(rank, *(f"{norm:.3f}" for norm in row)) for rank, row in enumerate(found.tolist())]
assert torch.allclose(found[:, 0], found[:, 1], rtol=1e-5)  # float32
assert (found[:, 2] < 0.99 * found[:, 0]).all() and found[0, 2] != found[1, 2]
show.table(rows, ["rank", "one process", "tp.clip_grad_norm_", "torch's"], caption="Norm")

# %% [markdown]
# ## When to use it
#
# | for | against |
# |---|---|
# | Divides weights, gradients, optimizer *and* the work of one block by $t$: a single sequence gets faster | Two all-reduces forward and two backward for each block; nothing hides forward's |
# | Divides the activations inside attention and feed-forward network, and the logits | Leaves the stream whole: 43 % of the activations on 4 ranks above |
# | Needs no larger batch, as data parallelism does, and has no bubble, as a pipeline has | Sends more than data parallelism above $3h$ tokens in a step |
# | Computes what one process computes | $t$ divides heads of keys and values, widths, vocabulary: for Llama 3 at most 8 |
# | | Only over fast wires: in one machine |
#
# In a real job these show that it is set up right: the first loss and the first norm of the gradients are those of one process; norms' weights are equal on all ranks of a group, to the bit, after a thousand steps; a profile shows four all-reduces for each block and step, and none between queries and keys.
#
# ```{admonition} On more GPUs
# :class: note
#
# Results, held bytes and sent bytes are exact here; seconds are those of ranks that share a machine, or of an emulated wire.
# A second GPU, linked to the first, would show the one number that decides: what four waited-for all-reduces a layer cost beside products of half the size,
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
# The feed-forward network of the beginning, 4096 → 16384 → 4096, this time with both biases, is trained in float32 with AdamW on $t = 4$ ranks.
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
    share = len(up_FH) // size
    own = slice(rank * share, (rank + 1) * share)
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
# ```{exercise-start} Forward on real ranks (medium)
# :label: ex-tp-ffn
# ```
#
# Compute the feed-forward network (GELU). Every rank has all of `x_BSH` and its own shards, and is to return all of $Y$, `[B, S, H]`. `down_bias_H` is the same on all ranks. Forward only.

# %%
def my_ffn(x_BSH, up_fH, up_bias_f, down_Hf, down_bias_H, group):
    pass  # your code


check(my_ffn)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-tp-ffn
# :label: sol-tp-ffn
# :class: dropdown
# ```
#
# One all-reduce, and the bias behind it.

# %%
def my_ffn(x_BSH, up_fH, up_bias_f, down_Hf, down_bias_H, group):
    y_BSf = gelu(x_BSH @ up_fH.T + up_bias_f)  # [B, S, H] @ [H, f]
    y_BSH = y_BSf @ down_Hf.T  # [B, S, f] @ [f, H]: a summand
    dist.all_reduce(y_BSH, group=group)
    return y_BSH + down_bias_H


check(my_ffn)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} One of the pair (medium)
# :label: ex-tp-copy
# ```
#
# Write the operator in front of a column-parallel layer: forward it returns `x` as it is, backward it adds up the gradients of all ranks.

# %%
def my_copy_to(x, group):
    pass  # your code


check(my_copy_to)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-tp-copy
# :label: sol-tp-copy
# :class: dropdown
# ```
#
# A function of autograd whose forward does nothing. (The gradient that arrives may belong to others as well, so it is copied before it is changed.)

# %%
class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


def my_copy_to(x, group):
    return Copy.apply(x, group)


check(my_copy_to)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Loss without logits (hard)
# :label: ex-tp-loss
# ```
#
# Rank $r$ has the logits of entries $r v$ to $r v + v - 1$ of the vocabulary: `logits_BSv`, float32. Return the mean cross-entropy over all tokens, the same on every rank, without gathering logits: reduce what is `[B, S]` large.
# Logits may be larger than `exp` can take. Forward only.

# %%
def my_loss(logits_BSv, targets_BS, group):
    pass  # your code


check(my_loss)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-tp-loss
# :label: sol-tp-loss
# :class: dropdown
# ```
#
# The maximum of *all* logits first; then two sums in one message.

# %%
def my_loss(logits_BSv, targets_BS, group):
    v = logits_BSv.shape[-1]
    most_BS = logits_BSv.amax(-1)
    dist.all_reduce(most_BS, dist.ReduceOp.MAX, group=group)
    shifted_BSv = logits_BSv - most_BS[..., None]
    local_BS = targets_BS - dist.get_rank(group) * v
    own_BS = (local_BS >= 0) & (local_BS < v)
    picked_BS = shifted_BSv.gather(-1, local_BS.clamp(0, v - 1)[..., None])[..., 0]
    sums = torch.stack([shifted_BSv.exp().sum(-1), picked_BS * own_BS])  # [2, B, S]
    dist.all_reduce(sums, group=group)
    return (sums[0].log() - sums[1]).mean()


check(my_loss)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Which degree? (design)
# :label: ex-tp-degree
# ```
#
# Return the smallest $t$, from 1 to `node` (the GPUs that share a fast link), that divides the model (`config.heads`, `key_value_heads`, `ffn_width`, `vocab`) and whose `memory.estimate(config, tp=t, device="gpu").peak` is at most `limit` bytes; `None` if there is none.

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
        if memory.estimate(config, tp=t, device="gpu").peak <= limit:
            return t
    return None


check(my_degree)

# %% [markdown]
# ```{solution-end}
# ```
#
# ## Summary
#
# - First matrix by columns, second by rows: nothing is sent in between, one all-reduce at the end. Other orders send two and a half to four and a half times as much.
# - Two conjugate operators make the gradients right; without `copy_to` training runs on, and learns wrongly.
# - Heads take the place of columns in attention; embedding, logits and loss are cut by vocabulary, and three numbers for each token replace the logits.
# - Biases behind a sum are whole, and added once; shards are cut from one drawing.
# - $t$ ranks hold a $t$-th of the states and less than that is saved of activations: the stream stays whole.
# - Four all-reduces of $bsh$ elements for each block and step, forward's hidden by nothing: stay within one machine.
# - What all ranks hold whole must stay equal to the bit: test that.
#
# ## Further reading
#
# - {cite:t}`shoeybi2019megatron`: the cuts, the two operators and the vocabulary-parallel loss are section 3; a page and a half.
# - {cite:t}`narayanan2021megatron`: how tensor, pipeline and data parallelism divide a cluster, and why $t$ ends with the machine.
# - {cite:t}`korthikanti2022recomputation`: the activations that this lesson leaves whole, counted and then divided.
