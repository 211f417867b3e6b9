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
# # Sequence parallelism: divide the activations that tensor parallelism leaves whole
#
# After this lesson you can
#
# - name the activations that tensor parallelism leaves whole on every rank, and shard them too;
# - write the two operators for this, forward and backward;
# - predict what a layer keeps and what a step sends;
# - find out whether the gradients of the LayerNorms were summed over the ranks.
#
# Llama 3 8B keeps 48.5 GB of activations between forward and backward of one sequence of 8192 tokens.
# On eight ranks, each should keep an eighth, 6.1 GB.
# With tensor parallelism, each keeps 13.8 GB, more than twice as much.
#
# ## What tensor parallelism leaves whole

# %% tags=["hide-input"]
# Imports, and the small GPT that every cell trains
import time
from collections import Counter
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as torchs

from shardcourse.exercises import check
from shardlab import memory, ranks
from shardlab import sequence_parallel as sp
from shardlab import tensor_parallel as tp
from shardlab.common import show, text
from shardlab.gpt.model import GPT, PRESETS, Config, loss
from shardlab.layout import Layout
from shardlab.measure import count

show.set_style()

SHAPE = Config(seq=256, layers=4, heads=8, hidden=128)
SMALL = Config(seq=64, layers=2, heads=4, hidden=64)


def build_model(shape=SMALL, dtype=None):
    """The same GPT at every call."""
    torch.manual_seed(0)
    return GPT(shape).to(ranks.device(), dtype)


def make_batch(step=0, size=2, seq=SMALL.seq):
    """The same windows of text on every rank: tokens, targets: [size, seq]."""
    tokens, targets = text.get_batch(seq, size, start=step * size)
    return tokens.to(ranks.device()), targets.to(ranks.device())


def max_difference(a, b):
    """The largest difference between two tensors."""
    return (a - b).abs().max().item()


# %% [markdown]
# You need the activations section of [Memory](memory.md).

# %% tags=["hide-input"]
# Table: activations of Llama 3 8B on each rank
rows = []
for name, t, along in (
    ("1", 1, False),
    ("8, tensor parallel", 8, False),
    ("8, and the sequence cut as well", 8, True),
):
    layout = Layout(tp=t, sequence_parallel=along)
    of = memory.estimate_activations(PRESETS["llama-3-8b"], layout, device="gpu")
    rows.append((name, f"{of.kept_bytes / 1e9:.1f}"))
head = ["ranks", "kept on each (GB)"]
show.table(rows, head, caption="Llama 3 8B, one sequence of 8192 tokens, bfloat16")


# %% [markdown]
# Sequence parallelism, the last row, sends no more bytes than tensor parallelism.
#
# Four ranks train a small GPT with tensor parallelism. `measure_kept` counts the bytes that forward leaves in memory for backward on each rank.

# %%
def measure_kept(edges, layers=SHAPE.layers):
    """Bytes that forward leaves for backward on this rank, in bfloat16."""
    shape, group = replace(SHAPE, layers=layers), dist.group.WORLD
    model = tp.parallelize(build_model(shape, torch.bfloat16), group, edges=edges)
    tokens, targets = make_batch(seq=shape.seq)
    with count.track_memory(model, tokens, targets) as held:
        before = held.current_bytes
        value = tp.vocab_parallel_loss(model(tokens), targets, group)  # holds the graph
        time.sleep(0.05)  # gloo's threads let go of a message a moment after it is over
        return held.current_bytes - before if value.isfinite() else None


# CPU: bytes held by CPU kernels
TENSOR = {
    t: ranks.run(measure_kept, t, tp.REPLICATED, device="cpu")[0] for t in (1, 2, 4)
}

# %% [markdown]
# ```{predict}
# :row: 4
# :column: of one rank's (%)
#
# What percentage of a one-rank run's activations does each of four ranks keep?
# ```

# %% tags=["hide-input"]
# Table: what tensor parallelism keeps on each rank
rows = [
    (t, f"{TENSOR[t]:,}", f"{100 * TENSOR[t] / TENSOR[1]:.0f}", f"{100 / t:.0f}")
    for t in TENSOR
]
assert TENSOR[4] > 0.4 * TENSOR[1]
show.table(
    rows, ["ranks", "kept on each (B)", "of one rank's (%)", "divided evenly (%)"]
)


# %% [markdown]
# `````{admonition} False: "tensor parallelism over t ranks divides activations by t"
# :class: checked
#
# Each of four ranks keeps 44 %, not 25 % (last row above).
# A *region* goes from a matrix sharded by columns to the next one, sharded by rows.
# Inside, tensor parallelism shards activations: heads, and the wide part of the feed-forward network.
# LayerNorms, dropout and the inputs of the sharded matrices are whole: every rank holds the same $s \cdot h$ numbers of each sequence.
# `````
#
# A sequence has $s$ tokens, a micro-batch $b$ sequences.
# The hidden size is $h$, with $a$ heads, and $t$ ranks share each matrix.
# Then a layer like GPT-3's keeps, in 16 bits, {cite}`korthikanti2022recomputation`
#
# $$
# \begin{aligned}
# sbh\Big(10 + \frac{24}{t} + \frac{5as}{ht}\Big) \quad & \text{bytes with tensor parallelism,} \\
# \frac{sbh}{t}\Big(34 + \frac{5as}{h}\Big) \quad & \text{with the sequence sharded as well.}
# \end{aligned}
# $$
#
# The 10 are bytes for each of the $sbh$ numbers: inputs of two LayerNorms (4), inputs of the sharded matrices (4), and two dropout masks (2).
# The 10 stays, however many ranks you add.
# The term $5as/h$ is for the attention scores.
# Each rank has the scores of $a/t$ heads in both cases; fused kernels never keep scores.
#
# ## All-gather and reduce-scatter around the cut layers
#
# LayerNorm, dropout and the additions of shortcut and bias work on each token alone.
# So outside the regions, shard the *sequence*: a rank keeps $s/t$ tokens, with all $h$ numbers of each.
# Inside, as before, it has all tokens, with $1/t$ of the heads or columns.
#
# ![A block on four ranks, twice. Above, tensor parallelism: LayerNorms, dropouts and the residual stream are whole on every rank, attention and the feed-forward network are sharded by heads and columns, and an all-reduce is where a region ends, in backward where it begins. Below, with sequence parallelism: outside the regions each rank has a quarter of the tokens; an all-gather is where a region begins, a reduce-scatter where it ends, and in backward the reverse.](../figures/sequence_parallel_block.svg)
#
# Before a region, an **all-gather** collects all tokens.
# After the region, each rank has a partial sum for every token, but needs the sum for its own tokens only: a **reduce-scatter**.
# The backward of an all-gather is a reduce-scatter, and the other way round.
#
# An all-reduce *is* a reduce-scatter and an all-gather ([Collectives](collectives.md)).
# Sequence parallelism separates the two: dropout and LayerNorm run between them, on a rank's $s/t$ tokens.
#
# ## The plain version: two operators
#
# An *edge* is a place where a region begins or ends.
# Autograd does not see collectives, so the operator at each edge has to define its backward.
# In the names, `B` is the batch, `S` all tokens, `s` this rank's tokens, and `H` the hidden size:

# %%
def gather_sequence(x_BsH):
    """All ranks' tokens, [B, S, H], from this rank's."""
    parts = [torch.empty_like(x_BsH) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x_BsH.contiguous())
    return torch.cat(parts, dim=1)


def scatter_sequence(y_BSH):
    """This rank's tokens, [B, s, H], of the sum of all ranks' y_BSH."""
    parts = [part.contiguous() for part in y_BSH.chunk(dist.get_world_size(), dim=1)]
    mine_BsH = torch.empty_like(parts[0])
    dist.reduce_scatter(mine_BsH, parts)
    return mine_BsH


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BsH):
        return gather_sequence(x_BsH)

    @staticmethod
    def backward(ctx, dx_BSH):
        return scatter_sequence(dx_BSH)


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_BSH):
        return scatter_sequence(y_BSH)

    @staticmethod
    def backward(ctx, dy_BsH):
        return gather_sequence(dy_BsH)


# %% [markdown]
# The gather's backward *adds*, because every rank multiplied each gathered token by its own columns, and so has a partial sum of the token's gradient.
#
# The next cell computes half a transformer block: LayerNorm, feed-forward network, shortcut.
# `up_HF` holds this rank's columns, `down_FH` its rows, as in tensor parallelism; `F` is the width of the feed-forward network. LayerNorm and shortcut are computed for this rank's tokens only.

# %%
def half_block(x_BsH, norm, up_HF, down_FH):
    x_BSH = Enter.apply(norm(x_BsH))  # all tokens
    y_BSH = F.gelu(x_BSH @ up_HF) @ down_FH  # a summand for every token
    return x_BsH + Leave.apply(y_BSH)  # the sum, of this rank's tokens


def run_on_rank():
    """Output, and gradients of this rank's tokens, columns, rows and the norm."""
    t, rank = dist.get_world_size(), dist.get_rank()
    x_BSH, norm, up_HF, down_FH = draw_inputs()
    x_BsH = x_BSH.chunk(t, 1)[rank].clone().requires_grad_()
    up_HF = up_HF.chunk(t, 1)[rank].clone().requires_grad_()
    down_FH = down_FH.chunk(t, 0)[rank].clone().requires_grad_()
    y_BsH = half_block(x_BsH, norm, up_HF, down_FH)
    y_BsH.square().sum().backward()
    dist.all_reduce(norm.weight.grad)  # the norm has seen this rank's tokens alone
    return y_BsH.detach(), x_BsH.grad, up_HF.grad, down_FH.grad, norm.weight.grad


def draw_inputs():
    """Whole tensors, the same on every rank, in float64."""
    torch.manual_seed(0)
    shapes = (2, 16, 32), (32, 128), (128, 32)
    x_BSH, up_HF, down_FH = (torch.randn(s, dtype=torch.float64) for s in shapes)
    return x_BSH, nn.LayerNorm(32, dtype=torch.float64), up_HF / 6, down_FH / 12


# %% [markdown]
# The all-reduce at the end is new: it belongs neither to tensor parallelism nor to an edge.
# The LayerNorm's weight is whole on every rank, but each rank used it for its own tokens only, and so has a partial sum of the weight's gradient.

# %% tags=["hide-input"]
# Compares the plain version with one process, on 2 and 4 ranks
x_BSH, norm, *matrices = draw_inputs()
leaves = [x.requires_grad_() for x in (x_BSH, *matrices)]
y_BSH = x_BSH + F.gelu(norm(x_BSH) @ matrices[0]) @ matrices[1]
y_BSH.square().sum().backward()
right = y_BSH.detach(), *(x.grad for x in leaves), norm.weight.grad
rows = []
for t in (2, 4):
    parts = list(zip(*ranks.run(run_on_rank, t), strict=True))
    full = [torch.cat(p, dim) for p, dim in zip(parts, (1, 1, 1, 0), strict=False)]
    gaps = [
        max_difference(a, b) for a, b in zip((*full, parts[4][0]), right, strict=True)
    ]
    # Paths of 350 terms in two orders: 2 * 350 * 2^-53 of gradients of up to 300.
    assert max(gaps) < 2.4e-11, gaps
    rows.append((t, *(f"{each:.0e}" for each in gaps)))
head = ["ranks", "output", "gradient of x", "of columns", "of rows", "of the norm"]
show.table(rows, head, caption="Largest differences from one process, float64")


# %% [markdown]
# The plain version has three shortcomings.
#
# 1. It waits at every collective, without overlap.
# 2. It keeps the gathered tokens `x_BSH`, a whole tensor, until backward, where the gradient of `up_HF` needs them.
# 3. gloo, the backend for CPU ranks, computes `reduce_scatter` as an all-reduce, and each rank discards most of the result.
#
# The next cell measures the third shortcoming on the loopback interface, compared with the reduce-scatter of `shardlab.ranks`.

# %%
def count_sent(repeats=8):
    """Bytes that a rank sends in a reduce-scatter of 4 MB: plain, and the module's."""
    y_BSH, group = torch.ones(1, 1024, 1024), dist.group.WORLD
    found = []
    for way in (scatter_sequence, lambda y: sp.SEQUENCE_SHARDED.leave_region(y, group)):
        sent = []
        for _ in range(repeats):
            # Bytes of all ranks, read before any rank starts to send.
            before = count.read_loopback_bytes() or 0
            dist.barrier()
            way(y_BSH)
            dist.barrier()
            sent.append((count.read_loopback_bytes() or 0) - before)
        found.append(min(sent) / dist.get_world_size())  # other traffic can only add
    return found


# %% tags=["hide-input", "measured"]
# Table: bytes of a reduce-scatter, plain and the module's
WIRE = ranks.run(count_sent, 4, device="cpu")[0]  # CPU: bytes on loopback
least = 3 / 4 * 4 * 2**20  # (t - 1) / t of the tensor
rows = [
    (name, f"{least / 1e6:.2f}", f"{bytes_ / 1e6:.2f}", f"{bytes_ / least:.2f}")
    for name, bytes_ in zip(
        ("plain, gloo's reduce_scatter", "the module"), WIRE, strict=True
    )
]
# Headers and whatever else talks on this machine come on top; nothing can be missing.
assert not WIRE[1] or WIRE[1] > 0.99 * least
show.check_timing(WIRE[1] < 1.3 * least, "the module sends what is needed, +30 %")
show.check_timing(not WIRE[0] or WIRE[0] > 1.8 * least, "gloo's sends twice as much")
show.table(rows, ["way", "needed (MB)", "sent by a rank (MB)", "times as much"])

# %% [markdown]
# ## The implementation: overlap and a second gather
#
# `tensor_parallel.parallelize` has an argument `edges`: the pair of operators where a region begins and ends.
# For tensor parallelism alone the pair is "identity, all-reduce".
# The pair for sequence parallelism looks like the plain version:

# %%
show.source(sp.core._GatherSequence, sp.core._ReduceScatterSequence)

# %% [markdown]
# But both operators call `_start_all_gather` and `_start_reduce_scatter`, which *start* a collective and return a function that waits for it.
# So `tensor_parallel` can multiply in backward while a collective runs.
# The reduce-scatter sends only the necessary bytes.
# With NCCL, the module uses NCCL's function.
# With gloo, part $j$ goes directly to rank $j$, which adds up the parts in rank order.

# %%
show.source(
    sp.core._start_all_gather, sp.core._start_reduce_scatter, sp.core.reduce_scatter
)

# %% [markdown]
# The object that you pass to `parallelize` has four methods: `enter_region` and `leave_region` are the operators above; `start_enter` and `start_enter_backward` start the two collectives of `enter_region`.
# `keep_entered=False` avoids keeping the gathered tokens: the layers after `enter_region` keep only this rank's tokens, and gather again in backward.

# %%
show.source(sp.SequenceShardedEdges)

# %% [markdown]
# The LayerNorms' gradients still have to be summed, as do those of two biases that are added *after* the reduce-scatter, to this rank's tokens only: `attention.out` and `ffn.down`.
# One small all-reduce sums all these gradients.

# %%
show.source(sp.find_partial_gradients, sp.sum_gradients)


# %% [markdown]
# The model does not change.
# This is a training step:

# %%
def train_step(model, optimizer, tokens, targets, summed=True):
    """Train one step with tensor and sequence parallelism; return the loss."""
    value = tp.vocab_parallel_loss(model(tokens), targets, dist.group.WORLD)
    optimizer.zero_grad()
    value.backward()
    if summed:
        sp.sum_gradients(model, dist.group.WORLD)
    optimizer.step()
    return value.item()


def make_adamw(model, lr=1e-3):
    return torch.optim.AdamW(model.parameters(), lr=lr, foreach=False)


# %% [markdown]
# ## Comparison with one process over five steps
#
# The next cell compares one process with the sharded model on 1, 2 and 4 ranks: loss, all gradients, and all weights after five steps of AdamW.
# It computes in float64, so that rounding hides no error.

# %% tags=["hide-input"]
# Compares loss, gradients and weights with one process
def compare_with_one_process():
    group, dtype = dist.group.WORLD, torch.float64
    alone = build_model(dtype=dtype)
    model = tp.parallelize(build_model(dtype=dtype), group, edges=sp.SEQUENCE_SHARDED)
    optimizers = make_adamw(alone), make_adamw(model)
    found = dict.fromkeys(("loss", "gradients"), 0.0)
    for step in range(5):
        tokens, targets = make_batch(step)
        value = loss(alone(tokens), targets)
        optimizers[0].zero_grad()
        value.backward()
        optimizers[0].step()
        mine = train_step(model, optimizers[1], tokens, targets)
        found["loss"] = max(found["loss"], abs(value.item() - mine))
        found["gradients"] = max(
            found["gradients"], find_largest_gradient(alone, model)
        )
    full = tp.full_state_dict(model)
    found["weights"] = max(
        max_difference(t, full[name]) for name, t in alone.state_dict().items()
    )
    return found


def find_largest_gradient(alone, model):
    """The largest difference of a gradient from the same slice of one process's."""
    size, rank, gaps = dist.get_world_size(), dist.get_rank(), []
    cuts, full = tp.get_shard_dims(model), dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        right = full[name].grad
        if cuts[name] is not None:
            right = right.chunk(size, cuts[name])[rank]
        gaps.append(max_difference(right, parameter.grad))
    return max(gaps)


rows = []
for t in (1, 2, 4):
    results = ranks.run(compare_with_one_process, t)
    found = {what: max(result[what] for result in results) for what in results[0]}
    # Paths of n = 1,792 terms: 4 n 2^-53 of up to 1; 5 lr / eps times 2 sqrt(n) 2^-53.
    assert max(found["loss"], found["gradients"]) < 1e-12, found
    assert found["weights"] < 5e-9, found
    rows.append((t, *(f"{each:.0e}" if each else "0" for each in found.values())))
head = ["ranks", "loss", "gradients", "weights after 5 steps"]
show.table(rows, head, caption="Largest differences from one process, float64")

# %% [markdown]
# The differences are rounding: sums over ranks have a different order than in one process.
# [The tests](../tests/test_contract.py) do the same with SwiGLU, grouped keys and values, and untied output heads.
#
# ## What it costs
#
# ### Activations of a layer
#
# The next cell measures a model of four layers and one of two with `measure_kept`.
# Half of the difference is one layer.
# *By formula* is the paper's formula for our layer: $2sbh$ less, without dropout masks, and inside the region $2sbh/t$ more, because attention on a CPU keeps its output in two memory layouts.
# *Predicted* is `memory.estimate_activations`, which also counts small tensors, such as the means and deviations of LayerNorms.

# %%
CUTS = {
    "tensor alone": (tp.REPLICATED, False, lambda t: 8 + 26 / t),
    "+ sequence": (sp.SEQUENCE_SHARDED, True, lambda t: 34 / t),
    "+ sequence, kept whole": (
        sp.SequenceShardedEdges(keep_entered=True),
        True,
        lambda t: 30 / t + 4,
    ),
}


def measure_layer(edges):
    """Bytes that one layer keeps on this rank."""
    return (measure_kept(edges, 4) - measure_kept(edges, 2)) // 2


LAYER = {
    # CPU: bytes held by CPU kernels
    (t, name): ranks.run(measure_layer, t, edges, device="cpu")[0]
    for t in (2, 4)
    for name, (edges, *_) in CUTS.items()
}

# %% tags=["hide-input"]
# Table: bytes of a layer by formula, predicted and measured
sbh, rows = 2 * SHAPE.seq * SHAPE.hidden, []
for (t, name), measured in LAYER.items():
    _, along, formula = CUTS[name]
    layout = Layout(tp=t, micro_batch=2, sequence_parallel=along)
    want = memory.estimate_activations(SHAPE, layout, precision="bf16").layer
    if "whole" in name:  # two gathered inputs of cut matrices, in place of their shares
        want += 4 * sbh - 4 * sbh // t
    assert abs(measured / want - 1) < 0.02, (t, name, measured, want)
    cells = f"{formula(t):.1f}", f"{want / sbh:.2f}", f"{measured / sbh:.2f}"
    rows.append((t, name, *cells, f"{100 * (measured / want - 1):+.1f}"))
head = ["ranks", "cut", "by formula (sbh)", "predicted (sbh)", "measured (sbh)"]
show.table(
    rows, [*head, "difference (%)"], caption="Bytes that a layer keeps on each rank"
)


# %% [markdown]
# With the sequence sharded, each of two ranks keeps half of one process's $34sbh$ bytes, and each of four a quarter. *Kept whole* is the plain version: it keeps the gathered tokens, two tensors of $2sbh$ bytes in each layer, for any number of ranks.
# The picture shows the paper's layer, with dropout, on more ranks:
#
# ![Bytes of activations that one layer keeps, without scores, in units of sbh, for tensor degrees 1, 2, 4 and 8. Tensor parallelism alone: 34, 22, 16 and 13; of these 10 lie outside the sharded matrices and stay. With sequence parallelism, which divides them as well: 34, 17, 8.5 and 4.25.](../figures/sequence_parallel_memory.svg)
#
# (sequence-bytes)=
# ### Bytes sent in a step
#
# `````{admonition} Only if backward gathers the tokens again: "sequence parallelism buys memory with communication"
# :class: checked
#
# An all-reduce of $S$ bytes sends $2\frac{t-1}{t}S$ from each rank, an all-gather and a reduce-scatter $\frac{t-1}{t}S$ each.
# Four all-reduces per block become four all-gathers and four reduce-scatters: the same bytes, rows 1 and 3 of the table below.
# If you gather again in backward instead of keeping the tokens (row 2), two more collectives per block send a quarter more bytes.
# `````
#
# The next cell counts the bytes that a rank sends at the edges in one step, by collective.

# %%
def count_sent_bytes(edges):
    """Calls and bytes of each collective in a step, without the loss's messages."""
    model = tp.parallelize(build_model(SHAPE), dist.group.WORLD, edges=edges)
    tokens, _ = make_batch(seq=SHAPE.seq)
    with count.record_traffic() as sent:
        model(tokens).square().mean().backward()
    times, handed = Counter(), Counter()
    for name, (calls, bytes_) in sent.collectives.items():
        kind = next(k for k in ("all_reduce", "all_gather", "all_to_all") if k in name)
        times[kind] += calls
        handed[kind] += bytes_
    return times, handed


# CPU: counts the module's bytes
SENT = {
    name: ranks.run(count_sent_bytes, 4, CUTS[name][0], device="cpu")[0]
    for name in CUTS
}

# %% tags=["hide-input"]
# Table: collectives of a step, and bytes predicted and counted
rows = []
for name, (times, handed) in SENT.items():
    want = sp.predict_edge_bytes(
        SHAPE,
        2,
        SHAPE.seq,
        4,
        sequence_sharded=CUTS[name][1],
        keep_entered="whole" in name,
    )
    # An all-gather is handed this rank's share, the others the whole tensor.
    wire = handed["all_gather"] * 3 + handed["all_to_all"] * 3 // 4
    wire += 2 * handed["all_reduce"] * 3 // 4
    assert wire == want["forward"] + want["backward"], (name, wire, want)
    calls = (times[kind] for kind in ("all_reduce", "all_gather", "all_to_all"))
    rows.append((name, *calls, f"{want['forward'] + want['backward']:,}", f"{wire:,}"))
head = ["edges", "all-reduces", "all-gathers", "reduce-scatters", "sent: predicted (B)"]
show.table(rows, [*head, "counted (B)"], caption="A rank of four, one step")


# %% [markdown]
# Megatron gathers again.
# This second gather need not cost time, because it overlaps with the computation of the input's gradient.
# Also, an all-reduce sums the LayerNorms' gradients: a few vectors of $h$ numbers per layer, for any number of tokens.
#
# ## Questions and answers: ZeRO, pipelines, dropout, names
#
# **Why gather tokens at all?**
# A rank has some columns of a matrix, and every token has to be multiplied with every column.
# So you gather either the tokens, as here, or the *weights*, as stage 3 of [ZeRO](zero.md) does.
# ZeRO sends less if a batch has so many tokens that their activations are larger than the matrices.
#
# **What happens at both ends of the model?**
# The embedding is sharded by the vocabulary, so each rank has a partial sum for every token, and a reduce-scatter follows.
# An all-gather precedes the output layer.
# A rank computes the logits of all tokens for its shard of the vocabulary.
# The loss is computed as in [Tensor parallelism](tensor_parallel.md): it is equal on every rank, and is not averaged.
# So with $L$ layers forward has $2L + 1$ all-gathers and as many reduce-scatters, and backward the same: 9 of each for four layers.
#
# **What changes with a pipeline?**
# Stages send the residual stream, which is now sharded.
# Each rank sends its own tokens to the corresponding rank of the next stage: $1/t$ of the bytes, without a gather.
#
# **Does dropout use the same mask on every rank?**
# It must not.
# Ranks have different tokens outside the regions, and different heads inside, so they need different masks.
# With one seed for all, they drop the same positions of different tokens: no error is raised, but the masks are not independent.
# Megatron keeps a second random generator state for this.
# [Our dropout](../code/shardlab/tensor_parallel/dropout.py) seeds the generator by rank during the layer, then restores it.
# So compare with one process at dropout 0.
#
# **Which sequence parallelism is meant?**
# Three methods have this name. Megatron's option `--sequence-parallel` and PyTorch's `SequenceParallel` are the method of this lesson.
# DeepSpeed's sequence parallelism is an all-to-all inside attention, and Megatron's `--context-parallel-size` is a ring: see [Context parallelism](context_parallel.md).
#
# ## PyTorch's own: DTensor
#
# With `DTensor`, sequence parallelism is a plan for `parallelize_module`.
# LayerNorms are `SequenceParallel`, the input of a region goes from `Shard(1)` (sharded by tokens) to `Replicate()`, and the region's output is `Shard(1)` again.

# %%
def parallelize_by_torch(model):
    """torch's plan for tensor and sequence parallelism, applied to the plain GPT."""
    along, replicated = (Shard(1),), (Replicate(),)
    plan = {
        "embedding": torchs.RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1)
        ),
        "norm": torchs.SequenceParallel(),
        "head": torchs.ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    for part, last in (("attention", "out"), ("ffn", "down")):
        plan[f"blocks.*.{part}_norm"] = torchs.SequenceParallel()
        plan[f"blocks.*.{part}"] = torchs.PrepareModuleInput(
            input_layouts=along, desired_input_layouts=replicated
        )
        plan[f"blocks.*.{part}.{last}"] = torchs.RowwiseParallel(
            output_layouts=Shard(1)
        )
    for name in ("attention.query", "attention.key", "attention.value", "ffn.up"):
        plan[f"blocks.*.{name}"] = torchs.ColwiseParallel()
    mesh = init_device_mesh(ranks.device().type, (dist.get_world_size(),))
    return torchs.parallelize_module(model, mesh, plan, src_data_rank=None)


# %% [markdown]
# The same model takes a step in three ways: this plan, and our edges with and without `keep_entered`.
# The table counts collectives in each phase, and the bytes that forward keeps.

# %% tags=["hide-input"]
# Counts collectives of a step of torch's and of ours, phase by phase
def time_phases(model, value_of, finish):
    """A step: loss, bytes kept, collectives in forward, backward, optimizer."""
    optimizer = make_adamw(model)
    with count.track_memory() as held:  # the model is there before, and not counted
        value = value_of()
        time.sleep(0.05)  # as above
        kept_ = held.current_bytes
    value = None
    calls = []
    with count.record_traffic() as sent:
        for phase in ("forward", "backward", "optimizer"):
            if phase == "forward":
                value = value_of()
            elif phase == "backward":
                value.backward()
                finish()
            else:
                optimizer.step()
            calls.append(sum(sent.calls.values()))
    each = [now - before for now, before in zip(calls, [0, *calls], strict=False)]
    return value.item(), kept_, *each


def compare_with_torch():
    untied, group = replace(SHAPE, tied=False), dist.group.WORLD
    tokens, targets = make_batch(seq=SHAPE.seq)
    model = parallelize_by_torch(build_model(untied))
    with torchs.loss_parallel():
        found = {
            "torch": time_phases(
                model, lambda: loss(model(tokens), targets), lambda: None
            )
        }
    for keep in (True, False):
        mine = tp.parallelize(
            build_model(untied), group, edges=sp.SequenceShardedEdges(keep)
        )
        found["ours, kept whole" if keep else "ours"] = time_phases(
            mine,
            lambda m=mine: tp.vocab_parallel_loss(m(tokens), targets, group),
            lambda m=mine: sp.sum_gradients(m, group),
        )
    return found


# CPU: bytes held by CPU kernels
results = ranks.run(compare_with_torch, 4, device="cpu", show=False)[0]
rows = [
    (n, f"{value:.6f}", f"{kept_:,}", *calls)
    for n, (value, kept_, *calls) in results.items()
]
values = [value for value, *_ in results.values()]
assert max(values) - min(values) < 1.5e-5  # 2 sqrt(512 tokens) 2^-24 of 5.5
assert results["torch"][4] == 54
head = [
    "way",
    "loss",
    "kept by forward (B)",
    "collectives: forward",
    "backward",
    "optimizer",
]
show.table(rows, head, caption=f"A step on 4 ranks, {SHAPE.layers} layers")


# %% [markdown]
# In all three, the edges have 18 collectives forward and 18 backward.
# The others are for the loss, the LayerNorms' gradients, and the second gather.
# PyTorch differs in two ways (torch 2.13).
# It keeps the gathered tokens.
# And it has no `sum_gradients`: the gradient of a LayerNorm's weight is a `DTensor` with the placement `Partial`, a partial sum. Every operation that reads this gradient repeats the all-reduce.
# AdamW reads a gradient three times: 54 all-reduces for 18 small parameters, in every step, unless you call `gradient.redistribute(placements=[Replicate()])` on these gradients after backward.
#
# ## What goes wrong
#
# ### Gradients of norms that nobody sums
#
# `sum_gradients` is one line after `backward`, and easy to forget.
# No error is raised.
# Each rank then updates its LayerNorms with the gradient of its own tokens alone, and the ranks' weights drift apart.
# `apart` is the largest difference of the last LayerNorm's weight between ranks, after ten steps.

# %%
def train_with_norms(summed, steps=10):
    """Losses, and how far apart the ranks' last norms are at the end."""
    model = tp.parallelize(build_model(), dist.group.WORLD, edges=sp.SEQUENCE_SHARDED)
    optimizer = make_adamw(model, lr=3e-3)
    losses = [
        train_step(model, optimizer, *make_batch(step), summed) for step in range(steps)
    ]
    weight_H = model.norm.weight.detach()
    least, most = weight_H.clone(), weight_H.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return losses, (most - least).max().item()


NORMS = {summed: ranks.run(train_with_norms, 4, summed)[0] for summed in (True, False)}

# %% tags=["hide-input"]
# Table: losses with and without the sum, and how far norms drift
rows = []
for summed, (losses, apart) in NORMS.items():
    name = "with sum_gradients" if summed else "without"
    rows.append((name, f"{losses[0]:.4f}", f"{losses[-1]:.4f}", f"{apart:.4f}"))
    assert (apart == 0) == summed
head = ["norms' gradients", "first loss", "loss after 10 steps", "apart"]
show.table(rows, head)


# %% [markdown]
# The first loss is right, and the loss curve looks right.
# But weights that should be equal on all ranks are not, and `tensor_parallel.full_state_dict` saves those of one rank.
# So if a resumed run has another loss than before the checkpoint, first check for this mistake.
# Compare LayerNorms over the ranks regularly, as this cell does with two small all-reduces: they should be bitwise equal.
# [Tensor types](tensor_types.md#through-backward-and-the-step) shows a checker that names the faulty line before the first step is run.
#
# ### Tokens that the ranks cannot share
#
# All ranks need equally many tokens, so $s$ has to be a multiple of $t$.
# Other lengths raise an error before anything is sent:

# %%
def find_refusal():
    model = tp.parallelize(build_model(), dist.group.WORLD, edges=sp.SEQUENCE_SHARDED)
    try:
        model(make_batch(seq=62)[0])
    except ValueError as error:
        return str(error)


print(ranks.run(find_refusal, 4)[0])

# %% [markdown]
# Pad to a multiple of $t$, and leave the padding's targets out of the loss. Every rank computes the loss of all tokens here, so nothing else changes.
#
# ## When to use it
#
# | | |
# |---|---|
# | **for** | with tensor parallelism, always: on 4 ranks a layer keeps 11.8 instead of 14.9 $sbh$ bytes and sends as many, or keeps 8.8 and sends a quarter more |
# | **for** | LayerNorms and dropout are computed once, not $t$ times: each rank works on its own tokens |
# | **against** | it needs what tensor parallelism needs: a fast link, and no more ranks than heads |
# | **against** | LayerNorms' gradients need a sum that is easy to forget |
#
# Sequence parallelism divides only activations: weights and optimizer states are as with tensor parallelism alone.
# It uses tensor parallelism's ranks: GPUs with fast links, eight in most machines.
# For a longer context, [Context parallelism](context_parallel.md) shards the tokens inside attention as well.
# The two degrees multiply: with $t = 8$ in a machine and context parallelism over 16 machines, a rank has $s/128$ tokens outside the sharded matrices.
#
# In a real job, three signs show a correct setup: the first loss and gradient norm equal those of one process on the same tokens; activations fall with $1/t$; LayerNorms are bitwise equal on all ranks.
#
# ```{admonition} On more GPUs
# :class: note
#
# This page checks results and bytes.
# How much of the gather in backward overlaps with the matrix products depends on NVLink and on the block's size, and can be measured only on GPUs.
# ```
#
# ## Exercises
#
# Each exercise has a check, which runs your answer on real ranks where it needs them.
#
# ```{exercise-start} Bytes of a layer (easy)
# :label: ex-sequence-bytes
# ```
#
# A layer of GPT-3 has $h = 12{,}288$ and $a = 96$, and sees one sequence of 2048 tokens in 16 bits.
# The layer is sharded over 8 ranks with tensor and sequence parallelism; its fused attention keeps no scores.
# How many bytes of activations does each rank keep for this layer, by the formula above?

# %%
answer = ...  # bytes
check(answer, "sequence_bytes")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-sequence-bytes
# :label: sol-sequence-bytes
# :class: dropdown
# ```
#
# All 34 bytes are divided by 8, including the 10.

# %%
answer = 2048 * 12_288 * 34 / 8
check(answer, "sequence_bytes")


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Whose gradients are partial sums? (medium)
# :label: ex-sequence-summands
# ```
#
# `names` are the names of a GPT's parameters, such as `"blocks.0.attention.query.weight"`, with biases or without.
# Return those whose gradients have to be summed over the ranks after backward.
# (`query`, `key`, `value`, `up` and `gate` are sharded by columns, `out` and `down` by rows, embedding and head by the vocabulary.
# Print the parameter names of `build_model()` to see all.)

# %%
def my_summands(names):
    pass  # your code


check(my_summands)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-sequence-summands
# :label: sol-sequence-summands
# :class: dropdown
# ```
#
# They are the LayerNorms' parameters, and the biases that are added after the reduce-scatter.
# A column-parallel layer's bias is sharded like its columns, and is added to all tokens.

# %%
def my_summands(names):
    late = ("attention.out.bias", "ffn.down.bias")
    return [name for name in names if "norm." in name or name.endswith(late)]


check(my_summands)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} A column-parallel layer that keeps its own tokens (hard)
# :label: ex-sequence-column
# ```
#
# The plain version keeps the gathered tokens.
# Write gather and column product as one operator that does not keep them: `x_BsH` are this rank's tokens, `w_HF` its columns; return [B, S, F], all tokens times these columns.
# Both inputs get their gradients, and no tensor of shape [B, S, H] is kept between forward and backward.
# (Use `torch.autograd.Function` and plain collectives; they may send more bytes than necessary.)

# %%
def my_column(x_BsH, w_HF, group):
    pass  # your code


check(my_column)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-sequence-column
# :label: sol-sequence-column
# :class: dropdown
# ```
#
# Save this rank's tokens, and gather again in backward.
# The gather could overlap with the product for `dx_BSH`, the sum with the product for `dw_HF`.

# %%
class Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BsH, w_HF, group):
        ctx.group = group
        ctx.save_for_backward(x_BsH, w_HF)
        return Column.gather(x_BsH, group) @ w_HF

    @staticmethod
    def backward(ctx, dy_BSF):
        x_BsH, w_HF = ctx.saved_tensors
        t, rank = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        dx_BSH = dy_BSF @ w_HF.T
        dist.all_reduce(dx_BSH, group=ctx.group)  # a reduce-scatter would do with half
        x_BSH = Column.gather(x_BsH, ctx.group)
        dw_HF = x_BSH.flatten(0, 1).T @ dy_BSF.flatten(0, 1)
        return dx_BSH.chunk(t, dim=1)[rank], dw_HF, None

    @staticmethod
    def gather(x_BsH, group):
        parts = [torch.empty_like(x_BsH) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x_BsH.contiguous(), group=group)
        return torch.cat(parts, dim=1)


def my_column(x_BsH, w_HF, group):
    return Column.apply(x_BsH, w_HF, group)


check(my_column)

# %% [markdown]
# ```{solution-end}
# ```
#
# ## Summary
#
# - Tensor parallelism leaves LayerNorms, dropout and the sharded matrices' inputs whole: a layer keeps $sbh(10 + 24/t)$ bytes. With the sequence sharded as well, it keeps $34sbh/t$.
# - A region of sharded matrices begins with an all-gather and ends with a reduce-scatter; each is the other's backward.
# - The two are the halves of an all-reduce, and send the same bytes.
# - Keeping the gathered tokens takes $4sbh$ bytes a layer; gathering them again sends a quarter more.
# - LayerNorms, and biases added after the reduce-scatter, are applied to some of the tokens: their gradients are summed over the ranks.
#
# ## Further reading
#
# - {cite:t}`korthikanti2022recomputation`: sequence parallelism and selective recomputation; section 4 counts every byte of a layer.
# - {cite:t}`shoeybi2019megatron`: tensor parallelism.
# - {cite:t}`dubey2024llama3`: section 3.3 uses 8 tensor-parallel ranks.
