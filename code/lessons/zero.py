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
# # ZeRO: one copy of the model states instead of many
#
# After this lesson you can
#
# - say what each of ZeRO's stages shards, and predict to the byte what a rank then holds;
# - follow a step of each stage through flat buffers, a reduce-scatter and an all-gather, and prove that it computes what one process computes;
# - predict the bytes that each stage sends, and say when they cost time and when they do not;
# - translate between ZeRO's stages, PyTorch's FSDP2 and DeepSpeed, and recognise the mistakes that raise no error.
#
# It takes about an hour to read and forty minutes for the exercises. Running it takes a minute.
# It needs [Data parallelism](data_parallel.md), and the reduce-scatter and all-gather of [Collectives](collectives.md).
#
# One number to begin with. A model of 7 billion parameters takes 112 GB while it is trained: 16 bytes for each parameter ([Memory](memory.md)).
# Eight ranks that train it with data parallelism take 896 GB, and 784 GB of that are copies of the other 112.

# %% tags=["hide-input"]
import contextlib
import copy
import hashlib
import statistics
import time
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from shardlab import count, link, memory, ranks, show, text, zero
from shardlab.check import check
from shardlab.data_parallel import DataParallel, drift
from shardlab.model import GPT, PRESETS, Config, loss

show.style()


def job(stage, config=PRESETS["nano"], group=None, **options):
    """The same GPT on every rank, in a stage (0: data parallel), and its AdamW."""
    torch.manual_seed(0)
    model = GPT(config).to(ranks.device())
    group = group or dist.group.WORLD
    model = (
        zero.shard(model, group, stage, **options)
        if stage
        else DataParallel(model, group)
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def share(step, size=1, rank=None):
    """This rank's `size` windows of text for a step: tokens, targets: [size, 64]."""
    rank, count_ = dist.get_rank() if rank is None else rank, dist.get_world_size()
    tokens, targets = text.batch(64, size, start=(step * count_ + rank) * size)
    return tokens.to(ranks.device()), targets.to(ranks.device())


def train(model, optimizer, steps, first=0):
    """Train on this rank's share; the losses."""
    losses = []
    for step in range(first, first + steps):
        tokens, targets = share(step)
        optimizer.zero_grad()
        value = loss(model(tokens), targets)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def largest(a, b):
    """The largest difference between two state dicts."""
    return max((a[name] - b[name]).abs().max().item() for name in a)


# %% [markdown]
# ## The same numbers, four times
#
# Data parallelism makes its ranks equal on purpose: same weights, same averaged gradients, so the same step of the same optimizer.
# The next cell trains that way on four ranks, and takes a fingerprint of every tensor that each rank then holds.
# Look at how much of what is held is different.

# %%
def fingerprints():
    model, optimizer = job(0)
    train(model, optimizer, 2)
    found = []
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        kinds = {"parameters": [parameter], "gradients": [parameter.grad]}
        kinds["optimizer"] = [state["exp_avg"], state["exp_avg_sq"]]
        for kind, tensors in kinds.items():
            for tensor in tensors:
                data = tensor.detach().cpu().contiguous().numpy().tobytes()
                found.append((kind, len(data), hashlib.sha256(data).hexdigest()))
    return found


held, different = defaultdict(int), defaultdict(int)
everywhere = [entry for found in ranks.run(fingerprints, 4) for entry in found]
for kind, size, _ in everywhere:
    held[kind] += size
for kind, size, _ in set(everywhere):
    different[kind] += size
rows = [
    (kind, f"{held[kind] / 1e6:.2f}", f"{different[kind] / 1e6:.2f}")
    for kind in ("parameters", "gradients", "optimizer")
]
waste = 1 - sum(different.values()) / sum(held.values())
# A few tensors may be equal by chance (all zeros, say): so not 75 % to the byte.
assert 0.745 < waste < 0.76
rows.append(
    ("together", *(f"{sum(kind.values()) / 1e6:.2f}" for kind in (held, different)))
)
show.table(
    rows,
    ["model states", "held by four ranks (MB)", "of it different (MB)"],
    caption=f"{100 * waste:.0f} % are copies",
)

# %% [markdown]
# Three quarters of the memory hold what another rank holds as well.
# With $N$ ranks it is $1 - 1/N$ of it.
#
# ## The picture
#
# ZeRO, the *zero redundancy optimizer*, lets each rank own one piece of the model states, and keep only that for as long as nobody needs more {cite}`rajbhandari2020zero`.
# It does so for more and more of them, in three stages.
# A piece has the colour of the rank that owns it.
#
# ![What four ranks hold in ZeRO's stages; weights, gradients and optimizer states are cut into four pieces. Stage 0: every rank holds all pieces of all three. Stage 1: of the optimizer states each rank holds its own piece alone. Stage 2: of the gradients, too. Stage 3: of the weights, too.](../figures/zero_stages.svg)
#
# It is still data parallelism: every rank has a batch of its own, and computes the whole model on it.
# What is divided is where numbers are *kept*.
#
# The rows below follow from the picture. The recipe is the paper's: 16-bit weights and gradients, and 12 bytes of optimizer, master weights included.
# The last column is from the paper's Figure 1 and Table 1.

# %%
formulas = ["2 + 2 + 12", "2 + 2 + 12/N", "2 + 2/N + 12/N", "2/N + 2/N + 12/N"]
published = [120, 31.4, 16.6, 1.88]  # GB: Rajbhandari et al. 2020, Figure 1 and Table 1
rows = []
for stage, (formula, printed) in enumerate(zip(formulas, published, strict=True)):
    totals = [memory.states(7.5e9, "fp16", zero=stage, dp=n).total for n in (4, 64)]
    assert abs(totals[1] / 1e9 - printed) <= 0.05  # as many digits as are printed
    rows.append((stage, formula, *(f"{total / 1e9:.2f}" for total in totals), printed))
show.table(
    rows,
    [
        "stage",
        "bytes per parameter",
        "on 4 ranks (GB)",
        "on 64 ranks (GB)",
        "published, on 64 (GB)",
    ],
    caption="7.5 billion parameters",
)

# %% [markdown]
# On 4 ranks stage 1 takes away more than half of everything, since the optimizer is 12 of the 16 bytes. On 64 only stage 3 goes on shrinking.
#
# ## The mechanism, stage by stage
#
# ### Flat tensors and shards
#
# A piece of what? Parameters come in all sizes. Dealing them out whole would give one rank the embedding and another a few biases.
# So parameters are put side by side in one flat tensor, and *that* is cut, wherever the cuts fall.
# Each of the $N$ shards has the same size, because collectives want that; the flat tensor is padded for it with fewer than $N$ zeros.
# Look at `shard_size`, and at `cut`, which finds what a shard holds of each parameter.

# %%
show.source(zero.Flat.__init__, zero.Flat.cut)

# %% [markdown]
# The pieces become `nn.Parameter`s, and the optimizer is given nothing else.
# So the optimizer is torch's own: AdamW works on each element by itself, and does not notice that it sees a quarter of them.
# An optimizer that looks at a whole matrix, such as Shampoo or Muon, cannot be cut like this.
#
# ### Stage 1: everyone steps a shard
#
# If rank $r$ steps only piece $r$ of the weights, it needs only piece $r$ of the averaged gradient.
# That is what a reduce-scatter leaves on it. Afterwards an all-gather tells everybody the new weights.
#
# ![A step of ZeRO's stage 1 on four ranks. Each rank has gradients of its own batch. A reduce-scatter leaves rank r with piece r of their average. Rank r steps its piece of the weights, and an all-gather gives every rank all four new pieces.](../figures/zero_step.svg)
#
# An all-reduce *is* a reduce-scatter and an all-gather ([Collectives](collectives.md)).
# Stage 1 only moves the optimizer's step between the two. This is why it costs no more bytes than data parallelism.
#
# The reduce-scatter of this course sends each shard straight to its owner, who adds up what arrives in the order of the ranks.
# It moves what every reduce-scatter moves. The fixed order buys something: the sums have the same bits as those of one process.
# Look at `wait`.

# %%
show.source(zero.ReduceScatter)

# %% [markdown]
# Around it, [`Gradients`](../code/shardlab/zero/gradients.py) collects what autograd delivers, and gives each piece its shard of the average.
# Look at what happens to `parameter.grad`, and at `keep`.

# %%
show.source(zero.Gradients.place, zero.Gradients.receive)

# %% [markdown]
# [`Zero1`](../code/shardlab/zero/replicated.py) says when. As in data parallelism, a bucket leaves while backward still computes the next one (`_arrived`).
# The all-gather waits for nobody either: it starts with the next forward (`_begin`), and each layer waits for its own weights alone.

# %%
show.source(zero.Zero1._arrived, zero.Zero1._begin)

# %% [markdown]
# ### Stage 2: forget what is sent
#
# After the reduce-scatter a rank needs no more than its shard of a bucket's gradients.
# Stage 2 gives the rest back at once. There is little to change:

# %%
show.source(zero.Zero2)

# %% [markdown]
# The last line of the class takes something away. We come to it [below](#zero-accumulation).
#
# ### Stage 3: gather before use, free after
#
# Now the weights. A layer's weights are needed while that layer computes, once in forward and once in backward. In between a shard will do.
# The model is divided into *units*, by default its blocks. To gather one takes two steps, so that something can happen in between; to free it, one.

# %%
show.source(zero.Unit.launch, zero.Unit.wait, zero.Unit.free)

# %% [markdown]
# To free a tensor that autograd has saved for backward sounds like trouble.
# It is not, because only the *storage* is given back, by `resize_(0)`: the tensor object stays, and by the time backward reads it, the next gather has filled it again.
#
# If the rank waited for each gather, it would stand still twice per block. So while a block computes, the next one is under way.
#
# Step through it. A cell's colour is that of the rank whose shard it is, in the lower half of the rank whose batch is in it, and a thick outline marks what has just arrived.
#
# :::{step-through} Stage 3 on four ranks, three blocks
# 1. ![Before the step. Two tables, weights above and gradients below, with a row for each of four ranks and three blocks side by side, each cut into four pieces. Of each block's weights rank r holds piece r alone. There are no gradients.](../figures/steps/zero_1.svg)
#
#    Between steps each rank has a quarter of every block's weights, and no gradients.
#
# 2. ![Block 1 is gathered: each rank sends its piece, and every rank now has all four pieces of block 1. Of blocks 2 and 3 each rank still has its own piece alone.](../figures/steps/zero_2.svg)
#
#    Before the first forward block 1 is gathered: an all-gather gives every rank the three quarters that it lacks.
#
# 3. ![Every rank computes the forward of block 1 while block 2 is gathered: blocks 1 and 2 are whole on every rank, block 3 is in shards.](../figures/steps/zero_3.svg)
#
#    Each rank computes block 1 on its own batch. Meanwhile block 2 is under way, and nobody will wait for it.
#
# 4. ![Block 1 is freed, down to each rank's own piece. Every rank computes the forward of block 2 while block 3 is gathered: blocks 2 and 3 are whole.](../figures/steps/zero_4.svg)
#
#    Block 1 is through: each rank gives back all but its own quarter. So two blocks are whole, and never more.
#
# 5. ![Block 2 is freed. Every rank computes the forward of block 3, the only one that is whole.](../figures/steps/zero_5.svg)
#
#    The last block computes. Nothing is left to gather.
#
# 6. ![Block 3 was freed after its forward like the others. While every rank computes its loss, block 3 is gathered again, for backward.](../figures/steps/zero_6.svg)
#
#    Block 3 was freed like the others. For backward it comes back, while the ranks compute their losses.
#
# 7. ![Every rank computes the backward of block 3 while block 2 is gathered: blocks 2 and 3 are whole. In the lower table every rank has all four pieces of block 3's gradients, of its own batch.](../figures/steps/zero_7.svg)
#
#    Backward runs the other way. Each rank gets the gradients of its own batch, and block 2 is under way.
#
# 8. ![Block 3's weights are freed and its gradients reduce-scattered: rank r keeps piece r, the average over all four ranks. Every rank computes the backward of block 2, whose gradients it now has of its own batch, while block 1 is gathered: blocks 1 and 2 are whole.](../figures/steps/zero_8.svg)
#
#    A reduce-scatter averages block 3's gradients over the ranks, and each rank keeps its quarter of the average.
#
# 9. ![Block 2's weights are freed and its gradients reduce-scattered. Every rank computes the backward of block 1, the only one that is whole, and has its gradients of its own batch.](../figures/steps/zero_9.svg)
#
#    The same for block 2, while block 1 computes.
#
# 10. ![Block 1's weights are freed and its gradients reduce-scattered. Of the weights and of the averaged gradients of all three blocks rank r now holds piece r and nothing else.](../figures/steps/zero_10.svg)
#
#     Each rank has a quarter of the weights and a quarter of the gradients, and steps that quarter.
#     No all-gather follows: the next forward gathers what it needs.
# :::
#
# The same on one rank, with four blocks and with the wire drawn beside what computes:
#
# ![Stage 3 through a step, on one rank, with four blocks. While a block computes, the wire gathers the next one's weights, in backward the one before; in the first half of a block's backward it carries the gradients of the block behind. Each block is whole in memory twice, and at most two are whole at a time; the rest of the time it is a shard.](../figures/zero_life.svg)
#
# Three hooks do this: before a unit's forward, before its backward, and after its backward.
# Look for `unit.wait()`, then for who calls `_prefetch`.

# %%
show.source(
    zero.Zero3._before, zero.Zero3._before_backward, zero.Zero3._done, zero.Zero3._leave
)


# %% [markdown]
# How does it know which block comes next? It remembers the order of the last forward. And *after backward* is a moment that autograd does not announce: it has come when the gradients of all that went into the unit are there.
#
# What belongs to no unit, here the embedding and the last norm, is gathered once and stays whole for the step. The [whole class](../code/shardlab/zero/zero3.py) has some 200 lines.
#
# ## Equal
#
# One process goes through the ranks' shares one after another, adds their gradients up, each divided by $N$, and steps.
# The cell compares with it every rank's losses, and all weights after five steps of AdamW. Then it does so again with gradients clipped to a norm of 0.5.

# %%
def compare(stage, clip, dtype):
    """Largest difference from one process in a loss, and in a weight after 5 steps."""
    torch.manual_seed(0)
    alone = GPT(PRESETS["nano"]).to(ranks.device(), dtype)
    model = zero.shard(copy.deepcopy(alone), dist.group.WORLD, stage)
    optimizers = [
        torch.optim.AdamW(m.parameters(), foreach=False) for m in (alone, model)
    ]
    rank, size = dist.get_rank(), dist.get_world_size()
    in_loss = 0.0
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        values = []
        for other in range(size):
            tokens, targets = share(step, rank=other)
            values.append(loss(alone(tokens), targets))
            (values[-1] / size).backward()
        tokens, targets = share(step)
        value = loss(model(tokens), targets)
        value.backward()
        if clip:
            nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
            model.clip_grad_norm_(0.5)
        for optimizer in optimizers:
            optimizer.step()
        in_loss = max(in_loss, abs(value - values[rank]).item())
    return in_loss, largest(alone.state_dict(), model.full_state_dict())


def compare_all():
    cases = (False, torch.float32), (True, torch.float32), (True, torch.float64)
    return {stage: [compare(stage, *case) for case in cases] for stage in (1, 2, 3)}


# %% [markdown]
# Look for the columns that are exactly 0.

# %%
rows = []
for size in (2, 4):
    for stage, found in ranks.run(compare_all, size)[0].items():
        (in_loss, plain), (_, clipped), (_, in_float64) = found
        if ranks.place(size)[1] == "cpu":
            assert (
                in_loss == plain == 0.0
            )  # the same sums in the same order: the same bits
        # Elsewhere, and for the norm, sums are made in another order. AdamW divides by
        # a gradient's size: where that is nearly 0, rounding decides which way a weight
        # moves, by up to the learning rate, 1e-3, in each of five steps. Not so in
        # float64.
        assert max(in_loss, plain, clipped) < 5e-3 and in_float64 < 1e-10, found
        values = in_loss, plain, clipped, in_float64
        rows.append(
            (size, stage, *(f"{value:.0e}" if value else "0" for value in values))
        )
head = ["ranks", "stage", "loss", "weights", "weights, clipped", "clipped, in float64"]
show.table(rows, head, caption="Largest differences from one process")


# %% [markdown]
# Zero means the same bits, on four ranks too, where libraries are some 1e-6 off (FSDP2 [below](#zero-fsdp)): their sums are made in whatever order is fast.
# Clipping needs the norm of *all* gradients. Each rank squares and sums its own shard, and one number travels.
# That sum is made in another order than one process makes it, so the last digits differ, and float64 shrinks the difference by as many digits as it has more.
#
# The [tests](../tests/test_zero.py) do the same with sizes that do not divide, tied and frozen parameters, layers that only some ranks use, accumulation, and 16-bit weights with float32 masters; and against FSDP2 and DeepSpeed.
#
# ## What it costs
#
# ### Memory: the states, to the byte
#
# Float32 first: 4 bytes for a weight, 4 for its gradient, 8 for AdamW's two moments.
# Then computing in bfloat16: 2 bytes for a weight, 4 for its float32 master, 4 for its gradient, 8 for the moments.
# *By formula* is bytes per parameter times $P$. *Predicted* knows the padding as well ([predict.py](../code/shardlab/zero/predict.py)): there are three ranks here, and $P$ does not divide by three.

# %%
def states(stage, dtype):
    model, optimizer = job(stage, **({"compute_dtype": dtype} if stage else {}))
    train(model, optimizer, 1)
    found = count.states(model, optimizer)
    del found["counters"]  # AdamW counts its steps, in four bytes per parameter tensor
    whole_or_not = [*model.parameters(), *model.module.parameters()]
    found["parameters"] = count.bytes_of(
        whole_or_not
    )  # a storage that both share counts once
    return sum(found.values()), sum(
        zero.predicted_states(model).values()
    ) if stage else None


def all_states():
    cases = [(0, None), *((s, t) for t in (None, torch.bfloat16) for s in (1, 2, 3))]
    return {case: states(*case) for case in cases}


# %% [markdown]
# The assert in the middle is the claim.

# %%
N, plain = 3, GPT(PRESETS["nano"])
P, tensors = sum(p.numel() for p in plain.parameters()), len(list(plain.parameters()))
FORMULAS = {
    None: [
        ("16", 16),
        ("8 + 8/N", 8 + 8 / N),
        ("4 + 12/N", 4 + 12 / N),
        ("16/N", 16 / N),
    ],
    torch.bfloat16: [
        None,
        ("6 + 12/N", 6 + 12 / N),
        ("2 + 16/N", 2 + 16 / N),
        ("16/N", 16 / N),
    ],
}
rows = []
for (stage, dtype), (measured, predicted) in ranks.run(all_states, N)[0].items():
    if stage == 0:
        predicted = 16 * P + 4 * tensors  # a bucket's flags: see Data parallelism
    assert measured == predicted
    formula, per_parameter = FORMULAS[dtype][stage]
    name = f"{stage}, {'float32' if dtype is None else 'bfloat16'}"
    cells = f"{predicted:,}", f"{measured:,}", measured - predicted
    rows.append((name, formula, f"{per_parameter * P:,.0f}", *cells))
head = ["stage", "bytes per parameter", "by formula (B)", "predicted (B)"]
show.table(
    rows,
    [*head, "measured (B)", "difference (B)"],
    caption=f"Model states on rank 0 of {N}, {P:,} parameters",
)


# %% [markdown]
# To the byte, in every stage.
# In bfloat16 stage 3 holds no 16-bit weights at all between uses: it makes them from the masters, while it gathers.
#
# ### Memory: what is not a state
#
# States are not all that is held. There are activations, and in stage 3 the units that are whole just now.
#
# `````{admonition} Checked: "ZeRO-3 divides all 122 GB by 8"
# :class: checked
#
# The example is often told: 7 billion parameters, 112 GB of states, 10 GB of activations, 8 GPUs, so 122 / 8 = 15 GB on each.
# But activations belong to a rank's *own* batch. Nobody else has them, so there is nothing to share: it is 112/8 + 10 = 24 GB.
# The next cell counts what forward saves for backward, in stages 0 and 3.
# `````
#
# ![Bytes on each of 8 ranks for 7 billion parameters: stage 0 has 122 GB, stage 1 48.5 GB, stage 2 36.25 GB, stage 3 24 GB. In each of them 10 GB are activations, so that stage 3 stays above an eighth of 122 GB, which is 15.25 GB.](../figures/zero_memory.svg)

# %%
def activations(stage):
    model, _ = job(stage)
    tokens, targets = share(0)
    # Autograd also notes the gathered weights; they are no activations.
    gathered = [flat.full for flat in model.flats] if stage == 3 else []
    with count.saved(model, model.module, tokens, targets, *gathered) as saved:
        loss(model(tokens), targets)
    return saved.bytes


def both():
    return activations(0), activations(3)


(plain_, sharded), total = (
    ranks.run(both, 4)[0],
    memory.states(7e9, "bf16", zero=3, dp=8).total,
)
print(f"saved for backward, stage 0: {plain_:,} B")
print(f"saved for backward, stage 3: {sharded:,} B")
print(f"7 billion on 8 ranks, stage 3: {total / 1e9:.0f} GB + 10 GB of activations")
assert plain_ == sharded and total + 10e9 == 24e9

# %% [markdown]
# What divides activations is a smaller batch, recomputation ([Memory](memory.md)), or another kind of parallelism.
#
# How large the units are is your choice, and matters.
#
# `````{admonition} Checked: "wrap the model, and stage 3 does the rest"
# :class: checked
#
# Wrapped as one unit, the model is sharded between steps, and whole during all of forward and backward, which is when memory is short.
# Below it peaks at about 27 MB, with a unit per block at 17 MB.
# The cell counts the peak of a step on four ranks, on the CPU, where every storage can be seen.
# The model has 12 blocks. Compare the three rows of stage 3.
# `````

# %% tags=["measured"]
DEEP = Config(seq=64, layers=12, heads=4, hidden=128)


def peak(make):
    """Bytes at the peak of a step of make()'s model, and bytes of its states."""
    model, optimizer = make()
    tokens, targets = share(0, 1)
    for _ in range(2):  # the first step creates the optimizer's states
        with count.held(model, getattr(model, "module", model), optimizer) as held:
            optimizer.zero_grad()
            loss(model(tokens), targets).backward()
            optimizer.step()
    return held.peak, sum(count.states(model, optimizer).values())


def peaks(cases):
    return [peak(lambda c=case: job(c[0], DEEP, **c[1])) for case in cases]


CASES = {
    "0, data parallel": (0, {}),
    "1": (1, {}),
    "2, buckets of 25 MiB": (2, {}),
    "2, buckets of 1 MiB": (2, {"bucket_bytes": 2**20}),
    "3, one unit": (3, {"units": []}),
    "3, a unit per block": (3, {}),
    "3, per block, kept after forward": (3, {"reshard": False}),
}
measured = ranks.run(peaks, 4, list(CASES.values()), device="cpu")[0]
ON_TOP = {
    name: (peak - states) / 1e6
    for name, (peak, states) in zip(CASES, measured, strict=True)
}
PEAK = {name: peak / 1e6 for name, (peak, _) in zip(CASES, measured, strict=True)}
rows = [
    (n, f"{PEAK[n] - ON_TOP[n]:.1f}", f"{PEAK[n]:.1f}", f"{ON_TOP[n]:+.1f}")
    for n in CASES
]
assert (
    PEAK["3, one unit"] > 1.4 * PEAK["3, a unit per block"]
)  # bytes, so no room is needed
assert PEAK["3, one unit"] > PEAK["2, buckets of 1 MiB"]
assert abs(PEAK["2, buckets of 25 MiB"] / PEAK["1"] - 1) < 0.05
show.table(
    rows, ["stage, how", "states (MB)", "peak of a step (MB)", "difference (MB)"]
)


# %% [markdown]
# As one unit stage 3 holds more at its peak than stage 2 with small buckets.
# Gathering all weights at once takes $4P$, gathering all gradients before they are sent another $4P$. Per block only two blocks' weights and one block's gradients are there at a time.
# Buckets are the same question for stage 2: a bucket as large as the model is stage 1.
# This is the peak over the step, measured on the larger model of the [figures](../figures/zero.py):
#
# ![Measured bytes on one of four ranks over a training step in stage 3. With the whole model as one unit it holds up to 89 MB; with a unit for each block up to 55 MB. The shards of the states alone take 32 MB.](../figures/zero_wrapping.svg)
#
# ### Bytes sent
#
# Let $P$ elements be the weights. A reduce-scatter or an all-gather of $P$ elements sends $\frac{N-1}{N}P$ from each rank, an all-reduce is both ([Collectives](collectives.md)).
# So per step, up to the factor $\frac{N-1}{N}$:
#
# - data parallelism sends $2P$: an all-reduce;
# - stages 1 and 2 send $2P$: gradients are reduce-scattered, new weights gathered;
# - stage 3 sends $3P$: weights are gathered in forward and again in backward, gradients reduce-scattered.
#
# The cell counts, operation by operation, on four ranks.

# %%
def bytes_sent(model, run):
    """Bytes that this rank sends in `run()`: of gradients, and of weights."""
    others = dist.get_world_size() - 1
    with count.sent() as sent:
        run()
    gradients = sent.bytes  # of the reduce-scatter, point to point
    if isinstance(model, DataParallel):
        gradients = sent.payload["all_reduce"] * 2 * others // (others + 1)
    # An all-gather is handed this rank's shard, and sends it to each of the others.
    gathers = sent.payload["all_gather_into_tensor"] + sent.payload["all_gather_single"]
    return gradients, gathers * others


WAYS = {
    "0": (0, {}, 2),
    "1": (1, {}, 2),
    "2": (2, {}, 2),
    "3": (3, {}, 3),
    "3, kept after forward": (3, {"reshard": False}, 2),
}


def traffic():
    found = []
    for stage, options, _ in WAYS.values():
        model, optimizer = job(stage, DEEP, **options)
        train(model, optimizer, 1)
        sent = bytes_sent(model, lambda m=model, o=optimizer: train(m, o, 1, first=1))
        found.append(
            (sum(sent), sum(zero.predicted_sent(model).values()) if stage else None)
        )
    return found


# %% [markdown]
# Here is the table; look at its last column.

# %%
N, P = 4, sum(p.numel() for p in GPT(DEEP).parameters())
flags = len(
    list(GPT(DEEP).parameters())
)  # who had a gradient: DataParallel sends it in buckets
rows = []
for (name, (*_, factor)), (sent, predicted) in zip(
    WAYS.items(), ranks.run(traffic, N, device="cpu")[0], strict=True
):
    unit = 4 * P * (N - 1) / N  # bytes
    predicted = predicted or int(2 * (unit + 4 * flags * (N - 1) / N))
    assert sent == predicted and abs(sent / unit / factor - 1) < 0.01
    cells = (f"{value / 1e6:.3f}" for value in (factor * unit, predicted, sent))
    rows.append((name, f"{factor}P", *cells, f"{sent / unit:.3f}"))
head = [
    "stage",
    "rule",
    "rule × (N-1)/N (MB)",
    "predicted (MB)",
    "counted (MB)",
    "in units of P",
]
show.table(
    rows,
    head,
    caption=f"Sent by rank 0 in a step, {N} ranks, {4 * P / 1e6:.2f} MB of weights",
)


# %% [markdown]
# Stage 3 sends a little less than $3P$, because what is outside the blocks stays whole between forward and backward.
# Kept after forward (`reshard=False`), nothing is gathered twice.
#
# (zero-accumulation)=
# ### Accumulation
#
# `````{admonition} Checked: "stage 2 saves gradient memory with accumulation, for free"
# :class: checked
#
# With $m$ micro-batches per step, stage 1 adds gradients up locally (`no_sync`) and sends them once.
# Stage 2 has nowhere to add them up: full gradients are what it does not keep. So each micro-batch has to send its own, $m$ times the bytes.
# If you keep full gradients between micro-batches instead, you are in stage 1. The cell counts four micro-batches.
# `````

# %%
def accumulate(stage, micro_batches=4):
    model, optimizer = job(stage)

    def backwards():
        for part in range(micro_batches):
            tokens, targets = share(part)
            last = part == micro_batches - 1
            with (
                model.no_sync() if stage == 1 and not last else contextlib.nullcontext()
            ):
                (loss(model(tokens), targets) / micro_batches).backward()

    gradients, _ = bytes_sent(model, backwards)
    return gradients, count.states(model, optimizer)["gradients"]


def both():
    return accumulate(1), accumulate(2)


found = ranks.run(both, 4, device="cpu")[0]
rows = [
    (stage, f"{sent / 1e6:.2f}", f"{held / 1e6:.2f}")
    for stage, (sent, held) in zip((1, 2), found, strict=True)
]
assert found[1][0] == 4 * found[0][0] and found[0][1] == 4 * found[1][1]
head = [
    "stage",
    "gradients sent in a step (MB)",
    "gradients held between micro-batches (MB)",
]
show.table(rows, head, caption="Four micro-batches on four ranks")

# %% [markdown]
# Four times the bytes, for a quarter of the memory: a trade, and no gift.
# Stage 3 sends as often, and gathers its weights for each micro-batch as well.
#
# ### Seconds
#
# Bytes are not seconds. Say forward computes for $f$ seconds, backward for $g$, and the wire needs $W$ for one gather of all weights.
# Gradients cannot leave before backward begins, but weights can be gathered while forward computes. With everything overlapped that can be,
#
# $$
# T_\text{data parallel} \approx f + \max(g,\, 2W), \qquad T_\text{stage 3} \approx \max(f,\, W) + \max(g,\, 2W).
# $$
#
# To see just this, the next cell takes blocks that *sleep* instead of computing, as in [Data parallelism](data_parallel.md): the messages are real, the wire is an emulated one of 80 Mbit/s, and there are two ranks.
# At the ends of forward and backward there is always a block or so that nothing hides: the formula leaves out these $2W/L$ and $3W/L$ of $L$ blocks, the prediction counts them.
# Look at the ratio to data parallelism in both cases.

# %% tags=["hide-input", "measured"]
BLOCKS, BLOCK_BYTES, BANDWIDTH = 12, 2**17, 10e6


class Sleep(torch.autograd.Function):
    """Takes time, twice as long in backward, and has a gradient for its weight."""

    @staticmethod
    def forward(ctx, x, weight, seconds):
        ctx.shape, ctx.seconds = weight.shape, seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * ctx.seconds)
        return gradient, gradient.new_ones(ctx.shape), None


class Half(nn.Module):
    """Half a block."""

    def __init__(self, seconds):
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.zeros(BLOCK_BYTES // 8)), seconds

    def forward(self, x):
        return Sleep.apply(x, self.weight, self.seconds)


def sleeping_steps(forward):
    wire, half = link.slow(0, BANDWIDTH), forward / BLOCKS / 2
    models = {}
    for name in ("data parallel", "stage 3", "stage 3, no prefetch"):
        plain = nn.Sequential(
            *(nn.Sequential(Half(half), Half(half)) for _ in range(BLOCKS))
        )
        if name == "data parallel":
            models[name] = DataParallel(plain, wire, BLOCK_BYTES, BLOCK_BYTES)
        else:
            models[name] = zero.Zero3(
                plain, wire, units=list(plain), prefetch=name == "stage 3"
            )
    found = defaultdict(list)
    for _ in range(4):
        for name, model in models.items():
            model.zero_grad()
            dist.barrier()
            begin = time.perf_counter()
            model(torch.ones((), requires_grad=True)).backward()
            found[name].append(time.perf_counter() - begin)
    return {name: statistics.median(seconds[1:]) for name, seconds in found.items()}


W = BLOCKS * BLOCK_BYTES * (2 - 1) / 2 / BANDWIDTH
rows, ratios = [], []
for forward in (0.015, 0.15):
    found = ranks.run(sleeping_steps, 2, forward, device="cpu")[0]
    backward = max(2 * forward, 2 * W)
    predicted = {"data parallel": forward + backward + 2 * W / BLOCKS}
    predicted["stage 3"] = max(forward, W) + backward + 3 * W / BLOCKS
    ratios.append(found["stage 3"] / found["data parallel"])
    for name, seconds in found.items():
        want = predicted.get(name)
        cells = (
            (f"{1e3 * want:.0f}", f"{1e3 * seconds:.0f}")
            if want
            else ("", f"{1e3 * seconds:.0f}")
        )
        off = f"{100 * (seconds / want - 1):+.0f}" if want else ""
        ratio = f"{seconds / found['data parallel']:.2f}"
        rows.append(
            (f"{3e3 * forward:.0f}", f"{3e3 * W:.0f}", name, *cells, off, ratio)
        )
        # Sleeps end late on a busy machine, and messages are work: hence the room.
        assert want is None or 0.85 < seconds / want < 1.7, (name, want, seconds)
assert ratios[1] < 1.3 and ratios[1] < ratios[0]
head = ["computes for (ms)", "wire, 3P (ms)", "way", "predicted (ms)", "measured (ms)"]
show.table(rows, [*head, "difference (%)", "of data parallel's"])


# %% [markdown]
# `````{admonition} Checked: "stage 3 sends 50 % more, so it is 50 % slower"
# :class: checked
#
# It sends 50 % more. When the wire is nearly all there is, first three rows, a step does take about half as long again.
# When a rank computes for as long as the wire is busy, the additional bytes hide behind forward, where data parallelism has nothing to send: fourth and fifth row.
# What costs then is to go without prefetching: last row.
# So look at the ratio of compute to bytes. It grows with the tokens that each rank has per step, and does not depend on the model's size: compute and bytes both grow with $P$.
# `````
#
# (zero-fsdp)=
# ## The production library
#
# FSDP2, `torch.distributed.fsdp.fully_shard`, is stage 3. It is applied from the inside out: to each block, then to the model, whose call takes what is left {cite}`zhao2023fsdp`.
# Each parameter becomes a `DTensor`, sharded by rows, in place of our flat pieces; so optimizers and checkpoints see the parameters' own shapes.
# Give it the mesh, which says over which ranks and on what kind of device: without one it takes this machine's GPUs, even for a model on the CPU.
#
# The cell trains the same model for five steps with both, on 2 and 4 ranks, and counts a step's peak on the model with 12 blocks.

# %%
def with_fsdp(config, per_block=True):
    torch.manual_seed(0)
    model = GPT(config).to(ranks.device())
    mesh = DeviceMesh.from_group(dist.group.WORLD, ranks.device().type)
    for block in model.blocks if per_block else ():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def beside():
    theirs, ours = with_fsdp(PRESETS["nano"]), job(3)
    losses = [train(*pair, 5) for pair in (theirs, ours)]
    weights = {name: p.full_tensor() for name, p in theirs[0].state_dict().items()}
    found = [max(abs(a - b) for a, b in zip(*losses, strict=True))]
    found.append(largest(weights, ours[0].full_state_dict()))
    found += [sum(count.states(*pair).values()) for pair in (ours, theirs)]
    return found


def peaks_beside():
    return [peak(lambda b=blocks: with_fsdp(DEEP, b))[0] for blocks in (True, False)]


rows = []
for size in (2, 4):
    in_loss, in_weights, *held = ranks.run(beside, size, device="cpu")[0]
    # FSDP2 adds up in gloo's order. A loss is about 5, with seven digits; for the
    # weights see Equal. Two ranks: only a + b is to be computed, which has the same bits as b + a.
    assert in_loss < 1e-4 and in_weights < 5e-3
    differences = (f"{x:.0e}" if x else "0" for x in (in_loss, in_weights))
    rows.append((size, *differences, *(f"{x:,}" for x in held)))
head = [
    "ranks",
    "largest difference: loss",
    "weights",
    "our states (B)",
    "FSDP2's states (B)",
]
show.table(rows, head, caption="Stage 3 beside FSDP2, five steps")

# %% [markdown]
# The states are the same bytes, up to padding and to the four bytes in which AdamW counts the steps of each piece.
# Now the peaks; look at the last column.

# %% tags=["measured"]
theirs = ranks.run(peaks_beside, 4, device="cpu")[0]
names = "3, a unit per block", "3, one unit"
rows = [
    (name, f"{PEAK[name]:.1f}", f"{size / 1e6:.1f}", f"{size / 1e6 / PEAK[name]:.2f}")
    for name, size in zip(names, theirs, strict=True)
]
assert 1.4 * theirs[0] < theirs[1]
show.table(rows, ["stage, how", "our peak (MB)", "FSDP2's peak (MB)", "FSDP2's / ours"])


# %% [markdown]
# For FSDP2, too, one unit takes about twice what a unit per block takes.
# It gets its overlap from CUDA streams, which a CPU does not have, so its times here would say nothing about it; [the benchmark](../benchmarks/zero.py) measures them all the same, and says so.
#
# The same things have three sets of names:
#
# | here | FSDP2 | FSDP1 | DeepSpeed |
# |---|---|---|---|
# | stage 0 | `replicate`, or DDP | `NO_SHARD` | `"stage": 0` |
# | stage 1 | (`ZeroRedundancyOptimizer`, beside DDP) | | `"stage": 1` |
# | stage 2 | | | `"stage": 2` |
# | stage 3, `reshard=False` | `reshard_after_forward=False` | `SHARD_GRAD_OP` | |
# | stage 3 | `reshard_after_forward=True` | `FULL_SHARD` | `"stage": 3` |
# | stage 3 in a node, copies between nodes | a mesh of two dimensions | `HYBRID_SHARD` | `"mics_shard_size"` |
# | units | one call of `fully_shard` each | `auto_wrap_policy` | chosen by itself, with thresholds in elements |
#
# `reshard_after_forward=False` and `SHARD_GRAD_OP` are often called ZeRO-2. They send $2P$ as stage 2 does, and from forward to backward they hold whole weights as stage 2 does. Between steps they hold a shard, as stage 3 does.
# FSDP2's outermost call behaves like that by default, as our *rest* does.
# A number for `reshard_after_forward`, say 8, reshards after forward among 8 ranks only, so that the second gather stays within a node.
# How DeepSpeed is configured, and how its engine differs, is the lesson [DeepSpeed](deepspeed_engine.md).
#
# ## What goes wrong
#
# Each of these is a mistake that raises no error, or not the right one.
#
# ### Reading weights outside forward
#
# In stage 3 there is nothing there. In stages 1 and 2 there is something worse: weights of one step ago.

# %%
def read_outside():
    model, optimizer = job(3)
    weight = model.module.blocks[0].ffn.up.weight
    shapes = [
        list(weight.shape),
        list(model.full_state_dict()["blocks.0.ffn.up.weight"].shape),
    ]
    model, optimizer = job(1)
    train(model, optimizer, 3)
    return shapes, largest(model.module.state_dict(), model.full_state_dict())


(empty, right), stale = ranks.run(read_outside, 2)[0]
print(f"stage 3: the weight has the shape {empty}; full_state_dict() has {right}")
print(
    f"stage 1: after step 3 weights differ from full_state_dict() by up to {stale:.4f}"
)
assert empty == [0] and stale > 5e-4  # a step of AdamW with a learning rate of 0.001


# %% [markdown]
# So a script that prints the norm of a layer, ties weights by hand, or initialises a layer anew after sharding does nothing, or the wrong thing.
# In FSDP2 the weight is a `DTensor`: its `shape` is the full one, and `to_local()` is the shard.
#
# ### Building the optimizer before sharding
#
# Then it holds the plain parameters, which are not the pieces that get gradients.

# %%
def optimizer_first(right):
    torch.manual_seed(0)
    plain = GPT(PRESETS["nano"]).to(ranks.device())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    model = zero.shard(plain, dist.group.WORLD, 3)
    if right:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = model.full_state_dict()
    train(model, optimizer, 3)
    return largest(before, model.full_state_dict())


moved = [ranks.run(optimizer_first, 2, right)[0] for right in (False, True)]
print(
    f"optimizer before sharding: weights move by {moved[0]}; after: by up to {moved[1]:.4f}"
)
assert moved[0] == 0.0 < moved[1]


# %% [markdown]
# No error: an optimizer skips parameters without a gradient. The loss stays where it is. Meanwhile the pieces' gradients pile up, since nobody sets them to zero.
#
# ### Clipping by the local norm
#
# `torch.nn.utils.clip_grad_norm_` takes the norm of the gradients that it is given. Here these are a shard.
# Each rank then scales by a factor of its own. The next cell trains with SGD, clipped to a norm of 1.

# %%
def clipped(local):
    torch.manual_seed(0)
    alone = GPT(PRESETS["nano"]).to(ranks.device())
    model = zero.shard(copy.deepcopy(alone), dist.group.WORLD, 2)
    sgd = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, model)]
    norms = []
    for step in range(5):
        for optimizer in sgd:
            optimizer.zero_grad()
        for other in range(dist.get_world_size()):
            tokens, targets = share(step, rank=other)
            (loss(alone(tokens), targets) / dist.get_world_size()).backward()
        tokens, targets = share(step)
        loss(model(tokens), targets).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        clip = (
            nn.utils.clip_grad_norm_
            if local
            else lambda _, norm: model.clip_grad_norm_(norm)
        )
        norms.append(float(clip(model.parameters(), 1.0)))
        for optimizer in sgd:
            optimizer.step()
    weights = model.full_state_dict()
    apart = drift(GPT_of(weights), dist.group.WORLD)
    return norms[0], apart, largest(alone.state_dict(), weights)


def GPT_of(weights):
    model = GPT(PRESETS["nano"])
    model.load_state_dict({name: tensor.cpu() for name, tensor in weights.items()})
    return model.to(ranks.device())


rows = []
for name, local in (("model.clip_grad_norm_", False), ("torch's, on the pieces", True)):
    found = ranks.run(clipped, 4, local)
    norms = " ".join(f"{norm:.2f}" for norm, _, _ in found)
    apart, off = found[0][1:]
    rows.append((name, norms, f"{apart:.1f}", f"{off:.0e}"))
    assert apart == 0.0 and (
        off > 1e-3 if local else off < 1e-5
    )  # float32, weights up to 1
head = [
    "clipping",
    "norm in step 1 on ranks 0 to 3",
    "drift",
    "weights: from one process",
]
show.table(rows, head)


# %% [markdown]
# `drift`, the test of the last lesson, sees nothing: a piece has one owner, so ranks cannot disagree about it. What is wrong can only be seen beside one process.
# The same goes for everything that looks at all gradients or weights: their norm in a log, the check for infinities of a loss scaler, an optimizer that scales by a layer's norm.
# FSDP2's `DTensor`s know that they are shards, and torch's function is right for them.
#
# ### Calling the model on some ranks only
#
# In data parallelism rank 0 may run a validation by itself. In stage 3 every forward is full of all-gathers.

# %%
def validate_on_rank_0():
    model, optimizer = job(3)
    train(model, optimizer, 1)
    if dist.get_rank() == 0:
        tokens, targets = share(1)
        with torch.no_grad():
            print("validation loss:", loss(model(tokens), targets).item())


try:
    ranks.run(validate_on_rank_0, 2, timeout=4, apart=True)
except ranks.RankError as error:
    print(error)
    assert error.ranks == [1]
else:
    raise AssertionError("this was meant to fail")


# %% [markdown]
# Rank 1 is at fault for what it did *not* do. In the middle of training it would not return but go on: then rank 0's gathers of the validation meet rank 1's gathers of the next step, whatever is in them.
# The same happens when one rank has a batch fewer, or generates one token fewer than the others.
# Whatever calls the model has to call it on all ranks, as often.
#
# ### Saving one rank's shard as the model
#
# Rank 0 saves, out of habit. What is in the file?

# %%
def saved_elements():
    model, optimizer = job(3)
    train(model, optimizer, 1)
    ways = {
        "model.module.state_dict()": model.module.state_dict(),
        "dict(model.named_parameters())": dict(model.named_parameters()),
        "model.full_state_dict()": model.full_state_dict(),
    }
    # Tied weights have two names, and are one tensor.
    return {
        n: sum({id(t): t.numel() for t in way.values()}.values())
        for n, way in ways.items()
    }


found = ranks.run(saved_elements, 4)[0]
P = sum(p.numel() for p in GPT(PRESETS["nano"]).parameters())
assert list(found.values())[0] == 0 and 0 < list(found.values())[1] < 0.26 * P
assert list(found.values())[2] == P
rows = [(name, f"{size:,}", f"{100 * size / P:.0f}") for name, size in found.items()]
show.table(rows, ["saved by rank 0 of 4, stage 3", "elements", "of the model (%)"])

# %% [markdown]
# In stage 1 the first way saves all elements, of which three quarters are one step old: nothing fails, and the resumed run is slightly off.
# Calling `full_state_dict` on rank 0 alone is the hang above. It also holds the whole model on every rank; how to save shards, and load them on another number of ranks, is the lesson [Checkpoints](checkpoint.md).
#
# ## When to use it
#
# | | for | against |
# |---|---|---|
# | stage 1 | $8 + 8/N$ bytes per parameter in float32 instead of 16, the bytes sent of data parallelism | an optimizer must work element by element |
# | stage 2 | $4 + 12/N$ | with $m$ micro-batches $m$ times the gradients on the wire; buckets must be small |
# | stage 3 | $16/N$: any model, with enough ranks | $3P$ instead of $2P$; weights are there only while they are used |
# | all | the model's code stays as it is | activations stay; a block must still fit and compute on one rank |
#
# Take the lowest stage that fits: each next one has more to wait for.
# In a real job these show that it is set up right: held bytes per rank fall with $N$ as predicted; the peak falls when units get smaller; the norm in the log is the same on all ranks; the first loss equals that of one process.
#
# ```{admonition} On more GPUs
# :class: note
#
# What each rank holds and sends is counted here, and stays the same on any number of GPUs of their own.
# A second GPU would add the seconds: whether stage 3 gathers the next block in the time that this one computes, and from what size of block on.
# Here blocks that sleep and an emulated link stand for it.
# ```
#
# ## Exercises
#
# Each exercise has a check; where ranks are needed, it runs your answer on real ones.
#
# ```{exercise-start} Bytes of a rank (easy)
# :label: ex-zero-bytes
# ```
#
# 13 billion parameters are trained with 16-bit weights and gradients and 12 bytes of optimizer, on 32 ranks, in stage 2.
# How many bytes of model states does each rank hold?

# %%
answer = ...  # bytes
check(answer, "zero_bytes")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-zero-bytes
# :label: sol-zero-bytes
# :class: dropdown
# ```
#
# The weights are whole, gradients and optimizer are shared.

# %%
answer = 13e9 * (2 + (2 + 12) / 32)
check(answer, "zero_bytes")


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Whose elements? (easy)
# :label: ex-zero-bounds
# ```
#
# A flat tensor has `elements` elements and is padded, so that it falls into `size` shards of one size.
# Return `(begin, end)`: which of the elements lie in the shard of `rank`, without padding. A shard may be padding altogether; then `begin == end == elements`.

# %%
def my_shard_bounds(elements, rank, size):
    pass  # your code


check(my_shard_bounds)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-zero-bounds
# :label: sol-zero-bounds
# :class: dropdown
# ```
#
# The shard's size is rounded up, and both bounds stop at the end of the elements.

# %%
def my_shard_bounds(elements, rank, size):
    shard = -(-elements // size)
    return min(rank * shard, elements), min((rank + 1) * shard, elements)


check(my_shard_bounds)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} A step of stage 1 (medium)
# :label: ex-zero-step
# ```
#
# Write a step of stage 1 for SGD with momentum: `moment = decay * moment + gradient`, then `weights = weights - lr * moment`, where `gradient` is the average over the ranks.
# `weights` [P] are the same on all ranks, and have to be so afterwards; `gradient` [P] is this rank's own; `moment` [P/N] is this rank's shard of it. Change `weights` and `moment` in place. $N$ divides $P$.

# %%
def my_zero1_step(weights, gradient, moment, lr, decay, group):
    pass  # your code


check(my_zero1_step)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-zero-step
# :label: sol-zero-step
# :class: dropdown
# ```
#
# The four lines of the picture: reduce-scatter, step, all-gather, and where the own shard lies.

# %%
def my_zero1_step(weights, gradient, moment, lr, decay, group):
    begin = dist.get_rank(group) * len(moment)
    own = slice(begin, begin + len(moment))
    total = zero.ReduceScatter(gradient, group, ordered=True).wait()  # [P] to [P/N]
    moment.mul_(decay).add_(total / dist.get_world_size(group))
    weights[own] -= lr * moment
    zero.all_gather(weights, own, group).wait()  # [P/N] to [P]


check(my_zero1_step)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} The norm of what nobody has (medium)
# :label: ex-zero-norm
# ```
#
# Return the norm of all gradients of all ranks. `gradients` is this rank's list: a tensor for each piece, or `None`. On some rank all of them may be `None`.

# %%
def my_global_norm(gradients, group):
    pass  # your code


check(my_global_norm)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-zero-norm
# :label: sol-zero-norm
# :class: dropdown
# ```
#
# Squares add up. A rank without gradients takes part with zero.

# %%
def my_global_norm(gradients, group):
    square = torch.zeros(())
    for gradient in gradients:
        if gradient is not None:
            square += gradient.square().sum()
    dist.all_reduce(square, group=group)
    return square.sqrt()


check(my_global_norm)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Which stage? (design)
# :label: ex-zero-stage
# ```
#
# Return the lowest stage, 0 to 3, that fits, or `None`. There are `params` parameters (16-bit weights and gradients, 12 bytes of optimizer), `activations` bytes of activations on each rank, `ranks_` ranks, and `memory_` bytes on each.

# %%
def my_stage(params, activations, ranks_, memory_):
    pass  # your code


check(my_stage)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-zero-stage
# :label: sol-zero-stage
# :class: dropdown
# ```
#
# States by stage, and activations undivided beside them.

# %%
def my_stage(params, activations, ranks_, memory_):
    for stage in range(4):
        held = memory.states(params, "bf16", zero=stage, dp=ranks_).total
        if held + activations <= memory_:
            return stage
    return None


check(my_stage)

# %% [markdown]
# ```{solution-end}
# ```
#
# A last one without a check: 7 billion parameters on 8 ranks of 24 GB fit in stage 3 by `my_stage`, with nothing to spare. What have you left out? (Which units are whole, and what is in the buckets?)
#
# ## Summary
#
# - Data parallelism holds $N$ copies; ZeRO lets each rank own a shard of optimizer, gradients, weights, in three stages.
# - The step computes what one process computes, bit for bit where sums are made in the same order.
# - States per rank in float32: 16, $8 + 8/N$, $4 + 12/N$, $16/N$ bytes per parameter. Activations are not divided.
# - Bytes sent: $2P$, $2P$, $2P$, $3P$; stage 2 and 3 send gradients with every micro-batch.
# - Stage 3 saves as much as its units are small; as one unit it peaks above stage 2.
# - FSDP2 is stage 3; `reshard_after_forward=False` saves the second gather.
# - Wrap first, then build the optimizer; clip by the global norm; call the model on every rank.
#
# ## Further reading
#
# - {cite:t}`rajbhandari2020zero`: the three stages; section 5 is this lesson's memory, section 7 its bytes. Section 6 partitions activations, too, but for tensor parallelism.
# - {cite:t}`zhao2023fsdp`: the first FSDP, with what prefetching and freeing do to a GPU's allocator.
# - {cite:t}`xu2020sharding`: stage 1 found a second time, by a compiler that shards the weight update.
# - {cite:t}`rajbhandari2021infinity`: where to put shards when all GPUs together are too small.
