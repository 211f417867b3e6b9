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
# # Data parallelism: many ranks, one training run
#
# After this lesson you can
#
# - train one model on many ranks so that it ends where one process would have ended, and prove it;
# - build what `DistributedDataParallel` does, in three steps, and say what each step saves;
# - predict the bytes, the messages, the memory and the time of a step, and where more ranks stop helping;
# - recognise the mistakes that people really make, by the trace that each leaves.
#
# You need one thing from [Collectives](collectives.md): the all-reduce.
#
# Before you start, a puzzle.
# Four ranks begin with the same weights and train for five steps, each on its share of the text.
# A step moves a weight by at most about 0.001. After five steps some weight differs by 0.01 between two ranks.
# With one more line the largest difference is *exactly* 0.0, and the weights are those that one process computes from the whole batch.
# The line is easy. The rest of the lesson makes it cost next to nothing.
#
# ```{quiz} copies-before
# ```

# %% tags=["hide-input"]
# Imports, and the small GPT that every cell trains
import copy
import statistics
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

from shardcourse.exercises import check
from shardlab import ranks
from shardlab.collectives import CostModel
from shardlab.common import show, text
from shardlab.data_parallel import (
    MIB,
    Bucket,
    DataParallel,
    assign_buckets,
    average_gradients,
    average_in_buckets,
    measure_drift,
    scale_for_global_mean,
    overlap,
    predict_step_seconds,
)
from shardlab.data_parallel.buckets import split_into_buckets
from shardlab.gpt.model import GPT, PRESETS, loss
from shardlab.measure import count, link

show.set_style()


def model_and_optimizer(lr=1e-3):
    """The same small GPT on every rank, and its AdamW."""
    torch.manual_seed(0)
    model = GPT(PRESETS["nano"]).to(ranks.device())
    return model, torch.optim.AdamW(model.parameters(), lr=lr)


def local_batch(step, size=4, rank=None):
    """This rank's `size` windows of text for a step: tokens, targets: [size, 64]."""
    rank, count_ = dist.get_rank() if rank is None else rank, dist.get_world_size()
    tokens, targets = text.get_batch(64, size, start=(step * count_ + rank) * size)
    return tokens.to(ranks.device()), targets.to(ranks.device())


# %% [markdown]
# ## Four ranks, four models
#
# One process needs some time to go once through the course's text.
# Four ranks that share the work could need a quarter of it.
# So we give each rank a quarter of the windows, and let it train.
#
# The next cell does that for five steps. `measure_drift` says how far the ranks' weights have come apart: the largest difference of any weight from rank 0's.

# %%
def train_alone(steps):
    model, optimizer = model_and_optimizer()
    begin = count.read_clock(ranks.device())  # it waits for the GPU, if there is one
    for step in range(steps):
        tokens, targets = local_batch(step)
        optimizer.zero_grad()
        loss(model(tokens), targets).backward()
        optimizer.step()
    seconds = (count.read_clock(ranks.device()) - begin) / steps
    return seconds, measure_drift(model, dist.group.WORLD)



# %% tags=["hide-input", "measured"]
# Measures an epoch, and the drift of four ranks
windows = len(text.TokenWindows(64))
(one_process, _) = ranks.run(train_alone, 1, 5)[0]
(_, apart) = ranks.run(train_alone, 4, 5)[0]
minutes = one_process * windows / 4 / 60
print(f"one process, all {windows:,} windows: {minutes:.0f} minutes")
print(f"four ranks, after five steps: weights differ by up to {apart:.3f}")
assert apart > 1e-3  # a step of AdamW: about the learning rate


# %% [markdown]
# The ranks did share the work, and got four models, none of which saw more than a quarter of the text.
# What is missing comes after `backward`.
#
# ## Every rank has the whole model, and a share of the batch
#
# Every rank holds the whole model, and gets its own share of each batch.
# Before the optimizer's step the ranks average their gradients.
# From then on they are equal again: same weights, same gradients, same step.
#
# ![Four ranks. Each has a quarter of the batch, all weights, and computes gradients of its own. An all-reduce averages the gradients; then all four ranks have the same gradients and make the same optimizer step.](../figures/data_parallel_replicas.svg)
#
# Why the average, and not the sum?
# A loss is a mean over the batch.
# Let there be $N$ ranks, each with $b$ samples, and let $\ell_{r,i}$ be the loss of sample $i$ on rank $r$. Then
#
# $$
# \nabla \frac{1}{Nb}\sum_{r}\sum_{i} \ell_{r,i} \;=\; \frac{1}{N}\sum_{r} \nabla \frac{1}{b}\sum_{i}\ell_{r,i}
# $$
#
# On the left is the gradient of one process that has the whole batch, on the right the average of what the ranks have.
# They are equal, as long as each rank has the same number $b$ of samples.
#
# ## The mechanism, in three steps
#
# ### Step 1: average after backward
#
# This is what is missing, in three lines.

# %% tags=["slide"]
def average_one_by_one(model):
    for parameter in model.parameters():
        parameter.grad /= dist.get_world_size()
        dist.all_reduce(parameter.grad)


# %% [markdown]
# The next cell trains again, and now averages after each `backward`.

# %%
def train_together():
    model, optimizer = model_and_optimizer()
    for step in range(5):
        tokens, targets = local_batch(step)
        optimizer.zero_grad()
        loss(model(tokens), targets).backward()
        average_one_by_one(model)
        optimizer.step()
    return measure_drift(model, dist.group.WORLD)


apart = ranks.run(train_together, 4)
print("drift after five steps:", apart)

# %% tags=["hide-input"]
# Holds the drift of all four ranks against zero
assert apart == [0.0] * 4


# %% [markdown]
# Not almost zero: zero.
# Each sum is made in one place and copied to all ranks, so they get the same bits, and keep them.
#
# Two cases are missing in these lines: parameters that are frozen, and those that have no gradient on some rank.
# An all-reduce waits for every rank: if a rank without a gradient skipped one, the others would wait for it.
# The package's [average_gradients](../code/shardlab/data_parallel/buckets.py) handles both cases, and one of the exercises goes a step further.
#
# ````{admonition} Checked: "copies synchronise their weights"
# :class: checked
#
# No weight is sent in a step, only gradients.
# (`DistributedDataParallel` sends weights once, before the first step.)
# To average weights after the step is another algorithm: AdamW divides each rank's gradient by that rank's own history, so the mean of the steps is not the step of the mean.
# Only with plain SGD, where a step is the gradient times a number, do both end with the same weights.
# ````

# %% tags=["hide-input"]
# Table: averaged gradients beside averaged weights
def train_averaging(what, kind):
    model, optimizer = model_and_optimizer()
    if kind == "SGD":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        tokens, targets = local_batch(step)
        optimizer.zero_grad()
        loss(model(tokens), targets).backward()
        if what == "gradients":
            average_one_by_one(model)
        optimizer.step()
        for parameter in model.parameters() if what == "weights" else ():
            parameter.data /= dist.get_world_size()
            dist.all_reduce(parameter.data)
    return [parameter.detach().cpu() for parameter in model.parameters()]


rows, off = [], []
for kind in ("AdamW", "SGD"):
    ways = [
        ranks.run(train_averaging, 4, what, kind)[0]
        for what in ("gradients", "weights")
    ]
    off.append(max((a - b).abs().max().item() for a, b in zip(*ways, strict=True)))
    rows.append((kind, f"{off[-1]:.0e}"))
assert off[0] > 1e-3 > 1e-5 > off[1]
show.table(rows, ["optimizer", "weights after five steps differ by"])

# %% [markdown]
# ### Step 2: buckets
#
# This GPT has 35 parameter tensors, a large one has hundreds, and most of them are small: biases, and the weights of LayerNorms.
# Each all-reduce takes its latency, so many small ones take longer than one large one.
# The gradients are put side by side into a few flat tensors, the *buckets*, and each bucket is one message {cite}`li2020ddp`.
#
# ![Eight parameters in the module's order are dealt into four buckets from the last to the first: the head alone in bucket 0, block 2 in bucket 1, block 1 in bucket 2, the embedding in bucket 3. Each bucket is one flat tensor and one message.](../figures/data_parallel_buckets.svg)
#
# The order is the reverse of the module's, for a reason that step 3 will use.

# %%
show.source(split_into_buckets, average_in_buckets)

# %% [markdown]
# `Bucket.copy_gradient` makes each `parameter.grad` a view into the bucket's flat tensor.
# So every gradient is stored once and averaged in place, and the optimizer reads `parameter.grad` as before.

# %%
show.source(Bucket.copy_gradient, Bucket.start_all_reduce)

# %% [markdown]
# Three details that one gets wrong on a first try:
#
# - `zero_grad()` sets `grad` to `None`, and autograd then makes a *new* tensor, which is no view into the bucket. `copy_gradient` moves it there, scaling it on the way, and the new tensor is freed.
# - Where this rank did not use a parameter, the bucket still has the last step's gradient. `start_all_reduce` clears it.
# - A parameter that *no* rank used must keep `grad=None`. With zeros, AdamW's weight decay would move it, which does not happen in one process. So the bucket has one more element for each parameter, which is summed like the rest: it counts the ranks that have a gradient.
#
# ### Step 3: send while backward still runs
#
# Backward goes through the layers from the last to the first.
# The last layer's gradients are ready early, and in step 2 they wait until the first layer's are ready as well.
# In step 3 a hook on each parameter puts its gradient into its bucket, and a full bucket is sent at once.
# `_on_grad_ready` is this hook, and its loop sends the buckets that are full. At the first gradient the hook also asks autograd to call `_finalize_backward` when backward is over, through a small class, [BackwardTracker](../code/shardlab/data_parallel/buckets.py).

# %%
show.source(DataParallel._on_grad_ready, DataParallel._finalize_backward)


# %% [markdown]
# Buckets are sent in one fixed order, the same on all ranks.
# Suppose that rank 0 used layer A before B, and rank 1 used B before A, and that each sent first what is full first.
# Then rank 0's bucket A would be added to rank 1's bucket B.
# So a full bucket waits for those before it.
# Bucket 0 holds the last parameters, since theirs are ready first: that is why the order is reversed.
#
# Step through one step. A cell's colour is that of the rank whose batch is in it, four stripes are the average, and a thick outline marks what has just arrived.
#
# :::{step-through} A step of data parallelism on four ranks, four buckets
# 1. ![Before the step: a table with a row for each of four ranks and a column for each bucket of gradients: embedding, block 1, block 2 and head. Each rank has its own share of the batch, all have the same weights, and there are no gradients.](../figures/steps/data_parallel_1.svg)
#
#    All ranks have the same weights, and each has its share of the batch.
#
# 2. ![Forward: every rank computes all layers on its own share of the batch. Nothing is sent.](../figures/steps/data_parallel_2.svg)
#
#    Each rank computes the forward of its own share. Nothing is sent.
#
# 3. ![Backward of the head: every rank has the head's gradients of its own batch.](../figures/steps/data_parallel_3.svg)
#
#    Backward begins at the last layer. Its gradients fill bucket 0.
#
# 4. ![Backward of block 2, while the head's gradients are all-reduced: every rank has the gradients of block 2 and the head of its own batch.](../figures/steps/data_parallel_4.svg)
#
#    Bucket 0 leaves. While it is under way, each rank computes the backward of block 2.
#
# 5. ![Backward of block 1, while the gradients of block 2 are all-reduced. The head's are the average over all four ranks now.](../figures/steps/data_parallel_5.svg)
#
#    The head's gradients are averages now. Block 2's are under way, and block 1 computes.
#
# 6. ![Backward of the embedding, while the gradients of block 1 are all-reduced. Those of block 2 and the head are averages.](../figures/steps/data_parallel_6.svg)
#
#    The same for the next layer.
#
# 7. ![Backward is over, and nothing computes while the embedding's gradients are all-reduced. All others are averages.](../figures/steps/data_parallel_7.svg)
#
#    Backward is over, and no computing is left that could hide the last bucket: all ranks wait for it.
#
# 8. ![All gradients are averages, the same on all four ranks. Each rank's optimizer makes the same step, and the weights are the same again.](../figures/steps/data_parallel_8.svg)
#
#    All gradients are averages, the same on all ranks. So all optimizers make the same step, and the weights are the same again.
# :::
#
# This is what overlap gains. Both timelines are from one real run, and show one of two ranks with an emulated link of 1 Gbit/s between them.
# Backward is drawn in pieces: each ends where a bucket became full.
#
# ![Timeline of one training step on two ranks over a slow link, twice. Above, the gradients are sent after the backward pass, and the ranks wait for them. Below, each bucket of gradients is sent while the backward pass still computes the next ones, and the step ends sooner.](../figures/data_parallel_overlap.svg)
#
# It is measured on this machine [below](#seconds-overlap), together with the case in which it gains nothing.
#
# ## Five steps equal one process
#
# All three steps must compute what one process computes. But what is *one process*? There are two candidates:
#
# - *share by share*: it computes the gradients of one rank's share after another, divides each by $N$ and adds them up. That is the same arithmetic in the same order.
# - *joined*: it puts the whole batch through the model at once. That is the same mathematics, but matrix products over more rows add their terms up in another order.
#
# The table compares with both, and with PyTorch's `DistributedDataParallel` (DDP), over five AdamW steps, also with a short last batch. The same arithmetic in the same order gives exactly 0. Elsewhere the difference is rounding, and float64 makes it nine digits smaller.

# %% tags=["hide-input"]
# Holds gradients and weights against one process and torch's DDP
def max_difference(a, b):
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))


def compare_models(dtype, sizes):
    """Largest differences of gradients and weights; sizes: windows on each rank."""
    rank, world = dist.get_rank(), dist.group.WORLD
    plain = model_and_optimizer()[0].to(dtype)
    ours = DataParallel(copy.deepcopy(plain), world, 2**16, 2**14)
    torchs = DistributedDataParallel(copy.deepcopy(plain))
    one_by_one, joined = copy.deepcopy(plain), copy.deepcopy(plain)
    models = [ours, torchs, one_by_one, joined]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in models]
    total, gradients = 64 * sum(sizes), [0.0] * 3
    for step in range(5):
        batches = [local_batch(step, max(sizes), r) for r in range(len(sizes))]
        batches = [(x[:n], y[:n]) for (x, y), n in zip(batches, sizes, strict=True)]
        for optimizer in optimizers:
            optimizer.zero_grad()
        x, y = batches[rank]
        for model in (ours, torchs):
            scale_for_global_mean(loss(model(x), y, "sum"), y.numel(), world).backward()
        for x, y in batches:
            (loss(one_by_one(x), y, "sum") / total).backward()
        x, y = (torch.cat(part) for part in zip(*batches, strict=True))
        (loss(joined(x), y, "sum") / total).backward()
        for i, model in enumerate((torchs, one_by_one, joined)):
            pairs = [[p.grad for p in m.parameters()] for m in (ours, model)]
            gradients[i] = max(gradients[i], max_difference(*pairs))
        for optimizer in optimizers:
            optimizer.step()
    weights = max_difference(
        *([p.detach() for p in m.parameters()] for m in (ours, joined))
    )
    return [*gradients, weights]


rows = []
for sizes in ([4], [4, 4], [4, 4, 4, 4], [4, 4, 4, 1]):
    for dtype in (torch.float32, torch.float64):
        found = ranks.run(compare_models, len(sizes), dtype, sizes)[0]
        # float32 rounds at 6e-8, float64 at 1e-16; gradients reach 1, and are
        # sums of 1024 terms.
        assert max(found[:3]) < (1e-4 if dtype == torch.float32 else 1e-12), found
        # AdamW divides by the gradient's size: where that is nearly 0, rounding
        # decides which way a weight moves, by up to the learning rate. In float64
        # no gradient here is that small.
        assert found[3] < (1e-3 if dtype == torch.float32 else 1e-11), found
        if len(sizes) <= 2 and ranks.choose_backend(len(sizes))[1] == "cpu":
            # a + b is b + a, rounding included: equal to torch's bit for bit
            assert found[0] == 0.0
        cells = [f"{value:.0e}" if value else "0" for value in found]
        rows.append((len(sizes), " + ".join(map(str, sizes)), str(dtype)[6:], *cells))
head = ["ranks", "windows on each", "type", "gradients: from torch DDP's"]
head += ["from share by share", "from joined", "weights: from joined"]
show.table(rows, head, caption="Largest differences over five steps")


# %% [markdown]
# How close is close enough?
# That 1e-6 looks small proves nothing. Float64 does: with its nine more digits every difference that comes from rounding is nine digits smaller,
# while the error of a wrong formula would stay as large.
#
# And why is the difference not zero? Because $(a+b)+c$ and $a+(b+c)$ round differently.
# On two ranks every sum is $a+b$, and ours equals torch's bit for bit.
# On four, a ring begins the sum of each piece of the buffer at another rank.
# Over thousands of steps such differences grow until the last digits of the losses differ, as they do between two runs on one GPU with different kernels.
# That is normal. Weights that differ between *ranks of one run* are not.
# How far rounding moves a tensor of *your* model can be measured: [Parity](parity.md#rule-1-rounding-is-measured).
#
# The [tests](../tests/test_data_parallel.py) do the same with tied weights, a frozen layer, a layer that only some ranks use, a buffer, accumulation, and sub-groups.
#
# ````{admonition} Checked: "DDP sums the gradients, so divide the learning rate by the number of ranks"
# :class: checked
#
# It averages: the gradient above equals that of the joined mean, to the last digits.
# If you do sum, AdamW hides it: its step divides the gradient by the gradient's own size, so a factor of $N$ cancels.
# Gradient clipping and SGD do not hide it. The table shows how far a step moves weights, with an average and with a sum over four ranks.
# ````

# %% tags=["hide-input"]
# Table: how far a step moves a weight, with an average and with a sum
def measure_update(kind, factor):
    """Largest change of a weight in a step with gradients `factor` times too large."""
    torch.manual_seed(0)
    model = GPT(PRESETS["nano"])
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-3)
    tokens, targets = text.get_batch(64, 4)
    (factor * loss(model(tokens), targets)).backward()
    optimizer.step()
    return max_difference([p.detach() for p in model.parameters()], before)


found = {
    kind: (measure_update(kind, 1), measure_update(kind, 4))
    for kind in ("SGD", "AdamW")
}
# 4 and 1, up to rounding: the difference of two weights has some four digits.
assert abs(found["SGD"][1] / found["SGD"][0] - 4) < 0.01
assert abs(found["AdamW"][1] / found["AdamW"][0] - 1) < 0.01
rows = [(k, f"{a:.5f}", f"{b:.5f}", f"{b / a:.2f}") for k, (a, b) in found.items()]
head = [
    "optimizer",
    "a weight moves by up to: average",
    "sum over 4 ranks",
    "ratio",
]
show.table(rows, head)

# %% [markdown]
# ## The core: buckets and the wrapper
#
# A bucket is made once, and is told when a step begins:

# %%
show.source(assign_buckets, Bucket)

# %% [markdown]
# `DataParallel` begins with rank 0's weights, sends nothing under `no_sync`, and after an error in backward starts over on all ranks.

# %%
show.source(DataParallel)

# %% [markdown]
# ## What it costs
#
# ### Messages and bytes
#
# A ring all-reduce of $S$ bytes sends $2\frac{N-1}{N}S$ bytes from each rank ([Collectives](collectives.md)), whatever the batch is.
# So the three steps should send the same bytes, in a different number of messages.
# Predicted: step 1 sends one message per parameter; steps 2 and 3 send one per bucket, each with four more bytes per parameter.
# The last two columns compare with an independent count: the bytes that the operating system's loopback interface transmitted.

# %% tags=["hide-input", "measured"]
# Table: messages and bytes of the three steps, predicted and measured
SIZES = {"bucket_bytes": MIB, "first_bytes": MIB // 4}


def sent_by(way):
    world = dist.group.WORLD
    model = GPT(PRESETS["micro"])
    hooked = DataParallel(model, world, **SIZES) if way == "DataParallel" else model
    dealt = assign_buckets(model.parameters(), *SIZES.values())
    buckets = [Bucket(parameters, world) for parameters in dealt]
    tokens, targets = text.get_batch(128, 1)
    loss(model(tokens) * 0, targets).backward()  # gradients exist from here on
    on_wire = []
    for _ in range(5):
        before = count.read_loopback_bytes()  # of all ranks, so before any of them begins
        dist.barrier()
        with count.record_traffic() as sent:
            if way == "average_gradients":
                average_gradients(model, world)
            if way == "average_in_buckets":
                average_in_buckets(buckets)
            if way == "DataParallel":
                loss(hooked(tokens), targets).backward()
        dist.barrier()
        on_wire.append((count.read_loopback_bytes() or 0) - (before or 0))
    return sent.collectives["all_reduce"], min(on_wire)  # other traffic can only add


N = 4
parameters = list(GPT(PRESETS["micro"]).parameters())
weights = sum(p.nbytes for p in parameters)
buckets = len(assign_buckets(parameters, *SIZES.values()))
rows = []
for way in ("average_gradients", "average_in_buckets", "DataParallel"):
    # CPU: bytes on loopback
    (messages, size), on_wire = ranks.run(sent_by, N, way, device="cpu")[0]
    by_parameter = way == "average_gradients"
    assert messages == (len(parameters) if by_parameter else buckets)
    assert size == weights + (0 if by_parameter else 4 * len(parameters))
    ring = 2 * (N - 1) / N * size
    # Nothing can be missing. Headers and acknowledgements add 0.3 % to large
    # messages and more to small ones, and so does whatever else talks on this
    # machine meanwhile: hence up to 25 %.
    near = not on_wire or 0.99 < on_wire / N / ring < 1.25
    show.check_timing(near, f"{way}: the formula's bytes, +25 %")
    off = f"{100 * (on_wire / N / ring - 1):+.1f}"
    rows.append(
        (
            way,
            messages,
            f"{size / 1e6:.3f}",
            f"{ring / 1e6:.2f}",
            f"{on_wire / N / 1e6:.2f}",
            off,
        )
    )
head = [
    "way",
    "messages",
    "handed over (MB)",
    "predicted, sent per rank (MB)",
    "measured (MB)",
]
show.table(
    rows,
    [*head, "difference (%)"],
    caption=f"{N} ranks, {weights / 1e6:.2f} MB of weights",
)

# %% [markdown]
# What do messages cost? Here is the same exchange on an emulated wire, predicted and measured.
# A message of $S$ bytes takes $\alpha + \beta S$ seconds: $\alpha$ is the latency, here 2 ms, and $\beta$ the seconds per byte, at 1 GB/s one nanosecond.

# %% tags=["hide-input", "measured"]
# Table: seconds of the messages on a slow wire, predicted and measured
WIRE = CostModel(latency=2e-3, bandwidth=1e9)


def seconds_of(way):
    wire = link.create_slow_group(WIRE.latency, WIRE.bandwidth)
    model = GPT(PRESETS["micro"])
    buckets = [Bucket(dealt, wire) for dealt in assign_buckets(model.parameters())]
    tokens, targets = text.get_batch(64, 1)
    loss(model(tokens), targets).backward()
    seconds = []
    for _ in range(3):
        dist.barrier()
        begin = time.perf_counter()
        if way == "parameters":
            average_gradients(model, wire)
        else:
            average_in_buckets(buckets)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


parameters = list(GPT(PRESETS["micro"]).parameters())
messages = {
    "parameters": [p.nbytes for p in parameters],
    "buckets": [sum(p.nbytes + 4 for p in b) for b in assign_buckets(parameters)],
}
rows = []
for way, sizes in messages.items():
    predicted = sum(WIRE.predict_seconds("all_reduce ring", size, 2) for size in sizes)
    # CPU: times of the CPU's work and a wire
    measured = max(ranks.run(seconds_of, 2, way, device="cpu"))
    # The wire's clock is exact; on top comes this machine's own work.
    assert measured > predicted * 0.99
    show.check_timing(
        measured < predicted * 1.3 + 0.03, f"{way}: the wire's time, +30 %"
    )
    rows.append(
        (
            way,
            len(sizes),
            f"{1e3 * predicted:.1f}",
            f"{1e3 * measured:.1f}",
            f"{100 * (measured / predicted - 1):+.0f}",
        )
    )
show.table(
    rows,
    [
        "one message for each of",
        "messages",
        "predicted (ms)",
        "measured (ms)",
        "difference (%)",
    ],
)


# %% [markdown]
# ### Memory
#
# In units of the weights' size, one process with AdamW holds 1 for weights, 1 for gradients and 2 for AdamW's two moments.
# Data parallelism takes nothing off that. It should add nothing either, as long as the gradients are views into the buckets.

# %% tags=["hide-input"]
# Table: memory in units of the weights, predicted and measured
def measure_memory(way):
    model, optimizer = model_and_optimizer()
    wrapped = DataParallel(model, dist.group.WORLD) if way == "ours" else model
    tokens, targets = local_batch(0)
    loss(wrapped(tokens), targets).backward()
    optimizer.step()

    def count_units():
        kept = [
            *model.parameters(),
            *(p.grad for p in model.parameters() if p.grad is not None),
        ]
        kept += [
            v for s in optimizer.state.values() for v in s.values() if v.dim()
        ]  # not the counter
        kept += [b.flat for b in wrapped.buckets] if way == "ours" else []
        storages = [t.untyped_storage() for t in kept]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        return sum(sizes.values()) / sum(p.nbytes for p in model.parameters())

    at_step = count_units()
    optimizer.zero_grad()
    return at_step, count_units()


one, ours = (
    ranks.run(measure_memory, 1, "one process")[0],
    ranks.run(measure_memory, 2, "ours")[0],
)
for got, want in zip((*one, *ours), (4, 3, 4, 4), strict=True):
    assert abs(got - want) < 0.01  # the buckets' extra elements, one per parameter
rows = [
    ("one process", 4, f"{one[0]:.2f}", 3, f"{one[1]:.2f}"),
    ("each rank of 2", 4, f"{ours[0]:.2f}", 4, f"{ours[1]:.2f}"),
]
show.table(
    rows,
    [
        "units of the weights' size",
        "predicted, at the step",
        "measured",
        "predicted, after zero_grad",
        "measured",
    ],
)

# %% [markdown]
# The buckets stay when `zero_grad()` frees gradients: between steps a rank holds one unit more than one process.
# Then forward begins to keep activations, so this unit can raise the peak.
# Eight ranks hold eight copies of all four units. [ZeRO](zero.md) keeps one copy, cut into shards.
#
# (seconds-overlap)=
# ### Seconds: overlap
#
# Overlap hides *waiting*. A core that moves bytes is not waiting: it works.
# On this machine's loopback the cores copy all bytes themselves, so with every core busy there is nothing to hide.
# On a slow link they wait for the wire.
#
# The table has both, measured in one run in which steps with and without overlap alternate.
# The link is emulated: the all-reduces are real, and each is reported as complete only when a wire of 50 µs and 1 Gbit/s would be done ([link](../code/shardlab/measure/link/__init__.py)).

# %% tags=["hide-input", "measured"]
# Table: a step with and without overlap, on loopback and a slow link
runs = {
    # CPU: times of the CPU's work and a wire
    "loopback": ranks.run(overlap.trace_steps, 2, 1, 7, 0.0, 1e12, device="cpu")[0],
    # CPU: times of the CPU's work and a wire
    "1 Gbit/s": ranks.run(overlap.trace_steps, 2, 3, 5, 50e-6, 125e6, device="cpu")[0],
}
rows, ratios = [], {}
for name, run in runs.items():
    steps = {way: [r["step"] for r in run[way]] for way in ("without", "with")}
    medians = {way: statistics.median(seconds) for way, seconds in steps.items()}
    ratios[name] = medians["with"] / medians["without"]
    cells = (f"{1e3 * s:.0f}" for s in medians.values())
    rows.append((name, *cells, f"{ratios[name]:.2f}"))
# About 0.7 and 1 on a quiet machine. A busy one computes slower, and has less to hide.
less = ratios["1 Gbit/s"]
show.check_timing(less < 0.95, "at 1 Gbit/s overlap takes less than 95 % of the time")
show.check_timing(
    less < ratios["loopback"], "overlap gains more at 1 Gbit/s than on loopback"
)
head = ["link", "without overlap (ms)", "with overlap (ms)", "with / without"]
show.table(rows, head)

# %% [markdown]
# On the slow link, this is where the time goes:

# %% tags=["hide-input", "measured"]
# Draws the slow link's median step, without and with overlap
slow = {way: overlap.pick_median(run) for way, run in runs["1 Gbit/s"].items()}
show.figure(
    overlap.draw_timeline(slow["without"], slow["with"]),
    "Timelines of a step without and with overlap, measured by this page on one of two "
    "ranks.",
    "data_parallel_timeline",
)

# %% [markdown]
# ````{admonition} Checked: "overlap makes communication free"
# :class: checked
#
# On a slow link most of the wire's time is hidden by backward: the last row above, close to 0.7.
# The last bucket is not hidden, nor is what takes longer than backward. Forward hides nothing, since no gradient exists yet.
# Where all cores are busy, first row, overlap gains nothing at all: there, communication is not waiting but work.
# On GPUs the copies are done by other units, but an all-reduce still takes some of the GPU's own processors and some of its memory's bandwidth. So matrix products get slower while one is under way.
# ````
#
# ### Seconds: more ranks
#
# Now the whole step. The time of forward and backward is proportional to the rank's share of the batch. The wire takes $2(N-1)(\alpha + \beta S/N)$ for a bucket of $S$ bytes.
# Buckets follow each other on the wire, and a bucket cannot be sent before it is full. The model is no more than that:

# %%
show.source(predict_step_seconds)

# %% [markdown]
# Eight ranks that compute on two cores would wait for a core, not for the wire.
# So in this measurement the layers *sleep* instead of computing, for as long as their share of the batch would take. The messages are real, and the wire is emulated.
# Two cases:
#
# - *fixed batch*: each of $N$ ranks computes $1/N$ of one batch. The aim is the same training in less time.
# - *growing batch*: each rank has a batch of the same size as one process had, so a step sees $N$ times as much. The aim is more data per second.

# %% tags=["hide-input", "measured"]
# Measures steps of layers that sleep, on 1 to 8 ranks
LAYERS, LAYER_BYTES = 16, 2**17
FORWARD, BACKWARD = 0.1, 0.2  # seconds for a batch on one rank
SLEEP_WIRE = CostModel(latency=200e-6, bandwidth=25e6)


class Sleep(torch.autograd.Function):
    """Takes time, and has a gradient for its weight."""

    @staticmethod
    def forward(ctx, x, weight, seconds):
        ctx.shape, ctx.predict_seconds = weight.shape, seconds
        time.sleep(seconds[0])
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.predict_seconds[1])
        return gradient, gradient.new_ones(ctx.shape), None


class Sleeper(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.predict_seconds = (part * FORWARD / LAYERS, part * BACKWARD / LAYERS)
        sizes = [LAYER_BYTES // 4] * LAYERS
        self.weights = nn.ParameterList(torch.zeros(size) for size in sizes)

    def forward(self, x):
        for weight in self.weights:
            x = Sleep.apply(x, weight, self.predict_seconds)
        return x


def sleeping_steps(growing):
    wire = link.create_slow_group(SLEEP_WIRE.latency, SLEEP_WIRE.bandwidth)
    part = 1 if growing else 1 / dist.get_world_size()
    model = DataParallel(Sleeper(part), wire, 2 * LAYER_BYTES, 2 * LAYER_BYTES)
    seconds = []
    for _ in range(3):
        dist.barrier()
        begin = time.perf_counter()
        model(torch.ones((), requires_grad=True)).backward()
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:]), [b.flat.nbytes for b in model.buckets]


measured, predicted = {}, {}
for growing in (False, True):
    for size in (1, 2, 4, 8):
        # CPU: what sleeps needs no GPU
        results = ranks.run(sleeping_steps, size, growing, device="cpu")

        def all_reduce_seconds(nbytes, size=size):
            return SLEEP_WIRE.predict_seconds("all_reduce ring", nbytes, size)

        measured[growing, size] = max(seconds for seconds, _ in results)
        part = 1 if growing else 1 / size
        predicted[growing, size] = predict_step_seconds(
            part * FORWARD,
            part * BACKWARD,
            results[0][1],
            all_reduce_seconds,
        )
        # Each of 32 sleeps ends 0.1 ms late; 25 % is for a busy machine.
        off = measured[growing, size] / predicted[growing, size]
        show.check_timing(
            0.98 < off < 1.25, f"{size} ranks: a step within 25 % of the prediction"
        )

# %% [markdown]
# The table has both cases. The fixed batch soon stops gaining.

# %% tags=["hide-input", "measured"]
# Table: steps and throughput, predicted and measured
rows = []
for growing in (False, True):
    for size in (1, 2, 4, 8):
        p, m = predicted[growing, size], measured[growing, size]
        gain = measured[growing, 1] / m * (size if growing else 1)
        off = f"{100 * (m / p - 1):+.1f}"
        case = "growing batch" if growing else "fixed batch"
        cells = f"{1e3 * p:.0f}", f"{1e3 * m:.0f}", off, f"{gain:.1f} x"
        rows.append((case, size, *cells))
head = ["case", "ranks", "predicted (ms)", "measured (ms)", "difference (%)"]
show.table(rows, [*head, "samples per second, of one rank's"])

# %% [markdown]
# The picture has the same numbers, and beside them those of a wire that takes no time.

# %% tags=["hide-input", "measured"]
# Draws the step's time against the number of ranks
figure, axes = plt.subplots(figsize=(6.2, 3.3))
sizes = [1, 2, 4, 8]
ideal = {
    False: [1e3 * (FORWARD + BACKWARD) / n for n in sizes],
    True: [1e3 * (FORWARD + BACKWARD)] * 4,
}
for growing, color in ((True, show.RANK_COLORS[1]), (False, show.RANK_COLORS[0])):
    axes.plot(sizes, [1e3 * predicted[growing, n] for n in sizes], color=color, lw=2)
    dots = [1e3 * measured[growing, n] for n in sizes]
    axes.plot(sizes, dots, "o", color=color, ms=7)
    axes.plot(sizes, ideal[growing], color=color, lw=1, ls=":")
    words = "growing batch" if growing else "fixed batch"
    axes.text(8.6, 1e3 * predicted[growing, 8] + 8, words, va="center")
    axes.text(8.6, ideal[growing][-1] - 8, "without a wire", va="center", fontsize=9)
axes.set_xscale("log", base=2)
axes.set_xticks(sizes, sizes)
axes.set_xlim(0.9, 14)
axes.set_ylim(0, 390)
axes.set_xlabel("ranks")
axes.set_ylabel("step (ms)")
axes.text(1.05, 20, "dots: measured, lines: predicted", fontsize=9)
show.figure(
    figure,
    "Step time against the number of ranks. With a growing batch it stays nearly "
    "flat; with a fixed batch it falls to two ranks and rises again, because the wire "
    "does not get shorter.",
    "data_parallel_scaling",
)


# %% [markdown]
# With a fixed batch the time of computing shrinks as $1/N$, while the wire's time *grows* towards $2S\beta$. Once the wire takes longer than computing, more ranks make the step slower.
# With a growing batch every rank computes as long as before, and backward still hides the wire's time.
# This is why data-parallel jobs train with large batches; how large a batch may be before the model learns less per sample is another question {cite}`goyal2017imagenet`.
#
# ## PyTorch's DistributedDataParallel beside ours
#
# `torch.nn.parallel.DistributedDataParallel` is used in the same way, and does the same three steps in C++.
#
# | | ours | torch DDP |
# |---|---|---|
# | wrap | `DataParallel(model, group)` | `DistributedDataParallel(model, process_group=group)` |
# | size of a bucket | `bucket_bytes`, `first_bytes` | `bucket_cap_mb`: 25 MiB, the first 1 MiB |
# | order of buckets | reverse of the module's | the same, then dealt anew after the first step |
# | gradients inside the buckets | always | `gradient_as_bucket_view=True`; otherwise one unit of memory more |
# | parameters without a gradient | always allowed | `find_unused_parameters=True`; otherwise an error in the next step |
# | accumulate | `no_sync()` around all but the last backward | the same, around forward too |
# | end | `destroy_process_group()` | `del model, optimizer` first: on gloo the process may hang otherwise (torch 2.13) |
# | length | under 300 lines of Python | several thousand of C++ and Python |
#
# The table has the times of both on two ranks with buckets of the same size, measured in turn, one step of each.

# %% tags=["hide-input", "measured"]
# Table: median steps of ours and of torch's DDP
def side_by_side(rounds):
    plain = GPT(PRESETS["micro"])
    ours = DataParallel(copy.deepcopy(plain), dist.group.WORLD)
    torchs = DistributedDataParallel(copy.deepcopy(plain), gradient_as_bucket_view=True)
    tokens, targets = text.get_batch(128, 4, start=4 * dist.get_rank())
    models = {"ours": ours, "torch DDP": torchs}
    optimizers = {name: torch.optim.AdamW(m.parameters()) for name, m in models.items()}
    seconds = {name: [] for name in models}
    for number in range(rounds + 2):
        for name in list(models) if number % 2 else list(models)[::-1]:
            dist.barrier()
            begin = time.perf_counter()
            optimizers[name].zero_grad()
            loss(models[name](tokens), targets).backward()
            optimizers[name].step()
            if number >= 2:
                seconds[name].append(time.perf_counter() - begin)
    equal = max_difference(
        [p.detach() for p in ours.parameters()],
        [p.detach() for p in torchs.parameters()],
    )
    return {name: statistics.median(values) for name, values in seconds.items()}, equal


# CPU: times are gloo's
medians, equal = ranks.run(side_by_side, 2, 15, device="cpu")[0]
ratio = medians["ours"] / medians["torch DDP"]
assert equal == 0.0
show.check_timing(0.75 < ratio < 1.33, "ours takes as long as torch's, within a third")
rows = [(name, f"{1e3 * value:.0f}") for name, value in medians.items()]
rows.append(("ratio", f"{ratio:.2f}"))
show.table(rows, ["two ranks, loopback", "median step (ms)"])


# %% [markdown]
# The weights are equal bit for bit, and the times nearly equal.
# [The benchmark](../benchmarks/data_parallel.py) repeats it more often, on two and four ranks and on the slow link, beside the least time that computing and wire allow.
#
# ## Data: who sees what
#
# Each rank must see its own share of every epoch.
# `DistributedSampler` deals the indices out in turn: rank $r$ gets numbers $r$, $r+N$, $r+2N$, … of a shuffled list.
# All ranks shuffle with the same seed, so they have the same list without a message.
#
# ![Ten samples dealt to four ranks in turn, in another order in epoch 1 than in epoch 0. Twelve places have to be filled, so two samples appear a second time.](../figures/data_parallel_sampler.svg)
#
# Two lines are easily forgotten: the sampler itself, and `set_epoch`, which changes the seed from epoch to epoch.
# The table counts, for 4 ranks and 1,000 windows, which windows are seen in an epoch, and how many have the same place in the next.

# %%
def count_seen(sampler, set_epoch, epoch, N=4, windows=1000):
    """The windows that each of N ranks sees in an epoch, 250 each."""
    orders = []
    for rank in range(N):
        place = (N, rank) if sampler else (1, 0)
        dealer = DistributedSampler(range(windows), *place)
        dealer.set_epoch(epoch if set_epoch else 0)
        orders.append(list(dealer)[: windows // N])
    return orders



# %% [markdown]
# ```{predict}
# :row: no DistributedSampler
# :column: different windows seen, of 1000
#
# Four ranks share 1,000 windows of text. How many different ones do they see in an epoch without the sampler?
# ```

# %% tags=["hide-input"]
# Table: windows seen in an epoch, with each line and without it
rows = []
for name, sampler, set_epoch in (
    ("both", True, True),
    ("no set_epoch", True, False),
    ("no DistributedSampler", False, True),
):
    first, second = count_seen(sampler, set_epoch, 0), count_seen(sampler, set_epoch, 1)
    different = len({i for order in first for i in order})
    pairs = zip(sum(first, []), sum(second, []), strict=True)
    rows.append((name, different, sum(a == b for a, b in pairs)))
assert [row[1] for row in rows] == [1000, 1000, 250] and rows[1][2] == 1000
show.table(
    rows,
    ["lines", "different windows seen, of 1000", "in the same place in epoch 1"],
)


# %% [markdown]
# Without the sampler all four ranks compute the same: the averaged gradient is that of a single rank.
# Nothing fails, and the ranks' weights are equal. The only trace is that the loss falls as slowly as with one rank.
# Without `set_epoch` every epoch has the same batches in the same order.
#
# When the number of ranks does not divide the number of samples, the sampler repeats some, so that all ranks have equally many (`drop_last=True` leaves some out instead).
# For training that is fine. In an evaluation repeated samples count twice.
#
# ### Loss, printing, saving
#
# A rank's loss is the loss of its own share. The number to report is the average over the ranks, an all-reduce of one scalar.
# Rank 0 alone prints and writes files. If *computing* what it prints needs an all-reduce, all ranks have to take part in it.
# So in the loop the printing and the saving are under the `if`, and the all-reduce is not.

# %%
def train_and_save(folder):
    rank, size = dist.get_rank(), dist.get_world_size()
    model, optimizer = model_and_optimizer()
    model = DataParallel(model, dist.group.WORLD)
    data = Subset(text.TokenWindows(64), range(128))
    sampler = DistributedSampler(data, size, rank)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=ranks.device())
        for tokens, targets in DataLoader(data, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            value = loss(model(tokens.to(ranks.device())), targets.to(ranks.device()))
            value.backward()
            optimizer.step()
            total += value.detach() * len(tokens)
        dist.all_reduce(total)  # every rank, or rank 0 waits for ever
        if rank == 0:
            print("epoch", epoch, "loss", round(total.item() / len(data), 1))
    if rank == 0:
        # `module` is the plain model: its state has the plain names.
        torch.save(model.module.state_dict(), Path(folder, "model.pt"))
    dist.barrier()  # nobody reads the file before it is there
    return value.item()


with tempfile.TemporaryDirectory() as folder:
    ranks.run(train_and_save, 2, folder)
    plain = GPT(PRESETS["nano"])
    plain.load_state_dict(torch.load(Path(folder, "model.pt"), map_location="cpu"))
tokens, targets = text.get_batch(64, 8)
value = loss(plain(tokens), targets).item()
print("in one process, from the file: loss", round(value, 1))


# %% [markdown]
# So a single process, which knows nothing of ranks, can load the file.
#
# ## What goes wrong
#
# Each of these has been seen in real code, with the trace that it leaves.
#
# ### The hook that averages the wrong thing
#
# `register_post_accumulate_grad_hook` hands the hook the *parameter*. Its gradient is `parameter.grad`.
# At least one widely read tutorial has averaged the parameter itself.

# %%
def drift_with_hook(right):
    model, optimizer = model_and_optimizer()
    world, size = dist.group.WORLD, dist.get_world_size()

    def average_one_by_one(parameter):
        tensor = parameter.grad if right else parameter.data  # the one word
        tensor.div_(size)
        dist.all_reduce(tensor, group=world)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average_one_by_one)
    found = []
    for step in range(5):
        tokens, targets = local_batch(step)
        optimizer.zero_grad()
        loss(model(tokens), targets).backward()
        optimizer.step()
        found.append(measure_drift(model, world))
    return found



# %% tags=["hide-input"]
# Table: drift after each step, with the right hook and with the wrong one
right, wrong = (ranks.run(drift_with_hook, 2, which)[0] for which in (True, False))
assert right == [0.0] * 5
assert min(wrong) > 5e-4  # a step of AdamW is about 1e-3, on each rank its own
rows = [
    ("parameter.grad", *(f"{d:.4f}" for d in right)),
    ("parameter", *(f"{d:.4f}" for d in wrong)),
]
show.table(rows, ["the hook averages", *(f"drift after step {i}" for i in range(1, 6))])


# %% [markdown]
# Every backward averages the weights, in the middle of computing with them. Every step then makes them differ by about twice the learning rate.
# The loss falls all the same. `measure_drift` finds it in one line: call it once after the first step of every new job.
#
# ### Averaging means of unequal batches
#
# The last batch of an epoch is short on some ranks. An average of the ranks' own means gives each *rank* the same weight, where each *sample* should have it.

# %%
def short_batch(joined):
    plain, _ = model_and_optimizer()
    model = DataParallel(copy.deepcopy(plain), dist.group.WORLD)
    sizes = [6, 6, 6, 1]
    batches = [local_batch(0, 6, rank) for rank in range(4)]
    batches = [(x[:n], y[:n]) for (x, y), n in zip(batches, sizes, strict=True)]
    tokens, targets = batches[dist.get_rank()]
    summed = loss(model(tokens), targets, "sum")
    own_mean = summed / targets.numel()
    right = scale_for_global_mean(summed, targets.numel(), dist.group.WORLD)
    (right if joined else own_mean).backward()
    tokens, targets = (torch.cat(part) for part in zip(*batches, strict=True))
    loss(plain(tokens), targets).backward()
    got = torch.cat([p.grad.flatten() for p in model.parameters()])
    want = torch.cat([p.grad.flatten() for p in plain.parameters()])
    return ((got - want).norm() / want.norm()).item()



# %% tags=["hide-input"]
# How far the gradient is off, with the ranks' means and with scale_for_global_mean
naive, right = (ranks.run(short_batch, 4, joined)[0] for joined in (False, True))
assert naive > 0.05 and right < 1e-5  # float32 has seven digits
print(f"average of the ranks' means: the gradient is off by {100 * naive:.0f} %")
print(f"scale_for_global_mean:       off by less than {1e-3} %")
print(f"weight of the lone window:   {1 / 4:.3f} instead of {1 / 19:.3f}")

# %% [markdown]
# With language models this happens in every step: padding and packing give every rank another number of *tokens*.
# The remedy is `scale_for_global_mean`: it sums the local losses, and divides by the number of tokens of all ranks.

# %%
show.source(scale_for_global_mean)


# %% [markdown]
# ### Forgetting `zero_grad`, forgetting `no_sync`
#
# Without `zero_grad` each step's gradients are added to those of the steps before.
# `no_sync` is for accumulation: with it, a step of $k$ micro-batches sends its gradients once, and not $k$ times.
# Neither mistake makes the ranks' weights differ, so `measure_drift` does not find it.

# %%
def measure_norms(forget):
    model, _ = model_and_optimizer()
    model = DataParallel(model, dist.group.WORLD)
    found = []
    for step in range(4):
        if not forget:
            model.zero_grad()
        tokens, targets = local_batch(step)
        loss(model(tokens), targets).backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        found.append(gradient.norm().item())
    return found


def measure_traffic(forget):
    model = DataParallel(model_and_optimizer()[0], dist.group.WORLD)
    with count.record_traffic() as sent:
        for part in range(4):
            tokens, targets = local_batch(part)
            if forget or part == 3:
                (loss(model(tokens), targets) / 4).backward()
            else:
                with model.no_sync():
                    (loss(model(tokens), targets) / 4).backward()
    return sent.collectives["all_reduce"][1]



# %% tags=["hide-input"]
# The gradient's norm and the bytes sent, with each line and without it
right, wrong = (ranks.run(measure_norms, 2, forget)[0] for forget in (False, True))
few, many = (ranks.run(measure_traffic, 2, forget)[0] for forget in (False, True))
growth = [b / a for a, b in zip(right, wrong, strict=True)]
assert growth[0] == 1.0 and growth[3] > 2 and many == 4 * few
print(
    "no zero_grad: the gradient's norm is",
    ", ".join(f"{g:.1f}" for g in growth),
    "times the right one",
)
print(
    f"no no_sync:   {many / 1e6:.2f} MB handed to all-reduce in a step, "
    f"instead of {few / 1e6:.2f} MB"
)

# %% [markdown]
# ### The device of the second node
#
# `RANK` counts over all nodes, but a GPU's number only within its node; so does `LOCAL_RANK`.
# Which of these work on two nodes with four GPUs each?

# %% tags=["hide-input"]
# Table: the device by RANK and by LOCAL_RANK
rows = []
for rank in (0, 3, 4, 7):
    by_rank, by_local = rank, rank % 4  # the launcher says the latter in LOCAL_RANK
    outcome = "works" if by_rank < 4 else "error: invalid device ordinal"
    rows.append((rank, rank // 4, f"cuda:{by_rank}", outcome, f"cuda:{by_local}"))
show.table(rows, ["RANK", "node", "by RANK", "outcome", "by LOCAL_RANK"])


# %% [markdown]
# On one node both are right, so the mistake shows only in the first job on two nodes.
# One variant raises no error: `torch.device("cuda")` without a number puts every rank of a node on `cuda:0`, and the job runs, four times slower, until memory is full.
#
# ### Going round the wrapper
#
# `model.module(x)` computes the same as `model(x)`. But torch's DDP prepares its exchange of gradients in its own `forward`: a training step that calls `model.module` sends nothing, and raises no error.

# %%
def drift_with(wrap):
    model, _ = model_and_optimizer()
    wrapped = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        tokens, targets = local_batch(step)
        optimizer.zero_grad()
        loss(wrapped.module(tokens), targets).backward()
        optimizer.step()
    return measure_drift(model, dist.group.WORLD)



# %% tags=["hide-input"]
# Drift after three steps round the wrapper, torch's and ours
torchs = ranks.run(drift_with, 2, DistributedDataParallel)[0]
ours = ranks.run(drift_with, 2, lambda model: DataParallel(model, dist.group.WORLD))[0]
assert torchs > 1e-3 and ours == 0.0  # a step of AdamW is about 1e-3
print(
    f"drift after three steps: torch DDP {torchs:.4f}, ours {ours:.1f}, "
    "whose hooks sit on the parameters"
)


# %% [markdown]
# ### Failure lab
#
# **A rank skips a bucket**, say because of a condition that only it fulfils. Its part of the all-reduce never comes.

# %%
def skips_one():
    model, _ = model_and_optimizer()
    buckets = [
        Bucket(dealt, dist.group.WORLD)
        for dealt in assign_buckets(model.parameters(), 2**16, 2**14)
    ]
    tokens, targets = local_batch(0)
    loss(model(tokens), targets).backward()
    average_in_buckets(buckets[:-1] if dist.get_rank() == 1 else buckets)



# %% tags=["hide-input"]
# Runs it on two ranks, and shows what the launcher says
def catch_failure(fn):
    """Run `fn` on two ranks, print what came of it, and say which ranks were named."""
    try:
        ranks.run(fn, 2, timeout=4, own_processes=True)
    except ranks.RankError as error:
        print(error)
        return error.ranks
    raise AssertionError("this was meant to fail")


assert catch_failure(skips_one) == [1]


# %% [markdown]
# In a real job rank 1 would not return but go on to its next step.
# There its bucket 0 would be added to the others' last bucket, or all would wait until the timeout, ten minutes with nccl.
#
# **The ranks built different models.** Without a check, the broadcast at the start would hang, or write one tensor's values into another. `DataParallel`, like torch's DDP, compares shapes first, and raises an error on every rank.

# %%
def different_models():
    layers = [nn.Linear(4, 4) for _ in range(2 + dist.get_rank())]
    try:
        DataParallel(nn.Sequential(*layers), dist.group.WORLD)
    except ValueError as error:
        print(error)
        return "refused"



# %% tags=["hide-input"]
# Runs it on two ranks, both of which are to refuse
assert ranks.run(different_models, 2) == ["refused", "refused"]

# %% [markdown]
# ````{admonition} Checked: "a rank without a gradient can skip the all-reduce"
# :class: checked
#
# It cannot: that is the first failure of this lab. It takes part with zeros.
# The zeros count in the average: where one of two ranks used a layer, both get *half* of that rank's gradient. That is right, since it is the gradient of the joined mean.
# A row of [the contract table](../tests/rows.py) compares it with one process.
# ````
#
# ## When to use it
#
# | for | against |
# |---|---|
# | The model is not touched: one line wraps it | The whole model and its optimizer must fit on one GPU: 4 units on every rank (measured above), 16 bytes per parameter |
# | Backward hides the wire's time: at 1 Gbit/s a step takes about 0.7 of the time | No gain where cores do the copying: about 1.0 on loopback |
# | Bytes per rank stay below $2S$, however many ranks | A fixed batch stops gaining: here beyond 2 to 4 ranks, when the wire exceeds backward |
# | Equal to one process but for rounding; on two ranks equal to DDP bit for bit | All wait for the slowest: a rank that takes 0.1 s longer costs each of the others 0.1 s, in every step |
#
# In a real job, these show that it is set up right:
#
# - `measure_drift` is 0 after the first step;
# - the throughput with $N$ ranks is near $N$ times that of one;
# - each rank sends $2\frac{N-1}{N}$ times the gradients' size per *step*, not per micro-batch;
# - the loss of step 1 on $N$ ranks equals that of one process on the joined batch.
#
# ```{admonition} On more GPUs
# :class: note
#
# Here the link is emulated, and the ranks compute on the same cores. So you see waiting overlapped, not copying.
# A second GPU would show the overlap of real jobs: nccl's all-reduce beside backward's kernels, and how many processors and how much memory bandwidth it takes from them.
# Gradients, buckets and bytes would be the same.
# ```
#
# ## Exercises
#
# Each exercise has a check that runs your answer on real ranks.
#
# ```{exercise-start} Bytes of a step (easy)
# :label: ex-data-parallel-bytes
# ```
#
# GPT-2 small has 124 million parameters. Its gradients are float32, and 8 ranks average them with a ring.
# How many bytes does each rank send in a step?

# %%
answer = ...  # bytes
check(answer, "ddp_bytes")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-data-parallel-bytes
# :label: sol-data-parallel-bytes
# :class: dropdown
# ```
#
# Seven eighths go out in the reduce-scatter, and seven eighths in the all-gather.

# %%
answer = 2 * 7 / 8 * 4 * 124e6
check(answer, "ddp_bytes")

# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} The best that overlap can do (easy)
# :label: ex-data-parallel-floor
# ```
#
# Forward takes 0.04 s, backward 0.05 s, and the wire is busy for 0.10 s. There are very many, very small buckets, and latency is zero.
# How long do forward, backward and the exchange take together at best?

# %%
answer = ...  # seconds
check(answer, "overlap_floor")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-data-parallel-floor
# :label: sol-data-parallel-floor
# :class: dropdown
# ```
#
# The wire starts with backward, and takes longer than it.

# %%
answer = 0.04 + max(0.05, 0.10)
check(answer, "overlap_floor")


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} As one process would (medium)
# :label: ex-data-parallel-average
# ```
#
# `average_gradients` leaves zeros where no rank had a gradient, and AdamW's weight decay then moves a layer that does not move in one process.
# Write it so that this does not happen: a parameter that *some* rank used gets the average, one that *no* rank used keeps `grad=None`.
# Some parameters are frozen.

# %%
def my_exact_average(module, group):
    pass  # your code


check(my_exact_average)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-data-parallel-average
# :label: sol-data-parallel-average
# :class: dropdown
# ```
#
# One more all-reduce counts who has a gradient, for all parameters at once. All ranks learn the same, so they leave out the same.

# %%
def my_exact_average(module, group):
    trained = [p for p in module.parameters() if p.requires_grad]
    device = trained[0].device
    users = torch.tensor([float(p.grad is not None) for p in trained], device=device)
    dist.all_reduce(users, group=group)  # [parameters]
    for parameter, used in zip(trained, users.tolist(), strict=True):
        if used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG, group=group)


check(my_exact_average)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} A loss for unequal batches (medium)
# :label: ex-data-parallel-joined
# ```
#
# `DataParallel` averages gradients over the ranks. Return this rank's loss such that the result is the gradient of the mean over *all* samples of all ranks.
# `loss_sum` is the sum over this rank's `samples` samples.

# %%
def my_joined_loss(loss_sum, samples, group):
    pass  # your code


check(my_joined_loss)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-data-parallel-joined
# :label: sol-data-parallel-joined
# :class: dropdown
# ```
#
# The sum of all losses over all samples, times $N$ because the average divides by it once more.

# %%
def my_joined_loss(loss_sum, samples, group):
    total = torch.tensor(samples, device=loss_sum.device)
    dist.all_reduce(total, group=group)
    return loss_sum * dist.get_world_size(group) / total


check(my_joined_loss)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Accumulate without waste (hard)
# :label: ex-data-parallel-accumulate
# ```
#
# Run backward on every micro-batch, so that the gradients end as those of the mean over all micro-batches of all ranks, and every bucket is sent once.
# `model` is a `DataParallel`; `loss_of(micro_batch)` puts a micro-batch through it and returns its mean loss. All micro-batches are of one size.

# %%
def my_accumulate(model, loss_of, micro_batches):
    pass  # your code


check(my_accumulate)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-data-parallel-accumulate
# :label: sol-data-parallel-accumulate
# :class: dropdown
# ```
#
# All but the last backward are inside `no_sync()`. The last one sends the sum.

# %%
def my_accumulate(model, loss_of, micro_batches):
    *most, last = micro_batches
    with model.no_sync():
        for micro_batch in most:
            (loss_of(micro_batch) / len(micro_batches)).backward()
    (loss_of(last) / len(micro_batches)).backward()


check(my_accumulate)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} How much to accumulate? (design)
# :label: ex-data-parallel-micro-batches
# ```
#
# On `n` ranks a ring all-reduces `size` bytes of gradients over links of `bandwidth` bytes per second. A micro-batch takes `forward` and `backward` seconds, and fills the memory. All but the last micro-batch of a step run inside `no_sync()`; the last backward hides as many seconds of the all-reduce as it lasts.
# Return the least number of micro-batches with which ranks wait for at most `fraction` of the step. Latency and the first bucket's backward do not count.

# %%
def my_micro_batches(size, n, bandwidth, forward, backward, fraction):
    pass  # your code


check(my_micro_batches)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-data-parallel-micro-batches
# :label: sol-data-parallel-micro-batches
# :class: dropdown
# ```
#
# The ranks wait for the $w$ seconds that the all-reduce takes longer than one backward, however many micro-batches there are.
# With $m$ micro-batches of $f$ seconds of forward and $b$ of backward, waiting is $w / (w + m (f + b))$ of the step.
# So a slow link needs a larger batch, for which the learning rate has to be chosen anew.

# %%
def my_micro_batches(size, n, bandwidth, forward, backward, fraction):
    waiting = max(0, 2 * (n - 1) / n * size / bandwidth - backward)
    m = 1
    while waiting > fraction * (waiting + m * (forward + backward)):
        m += 1
    return m


check(my_micro_batches)

# %% [markdown]
# ```{solution-end}
# ```
#
# ## Summary
#
# - Every rank holds the whole model; averaged gradients keep the copies equal, and equal to one process on the joined batch.
# - The average is right because a loss is a mean; with unequal batches, divide by the count of all ranks together.
# - Buckets save latency, hooks hide waiting; neither saves bytes or memory.
# - A rank sends $2\frac{N-1}{N}S$ bytes per step, whatever the batch; so give each rank a batch whose backward takes longer than the sending.
# - Every rank takes part in every all-reduce, in the same order, with or without a gradient.
# - Most mistakes raise no error: check `measure_drift`, traffic, and the first loss.
#
# ## Further reading
#
# - {cite:t}`li2020ddp`: the design that this lesson rebuilds, with measurements on up to 256 GPUs; sections 3.2.1 to 3.2.4 are steps 1 to 3 and `no_sync`.
# - {cite:t}`sergeev2018horovod`: the ring all-reduce reaches deep learning; its fusion buffer is the bucket.
# - {cite:t}`goyal2017imagenet`: large batches, learning rates that grow with them, and a list of pitfalls that overlaps with the one above.
# - {cite:t}`patarasuk2009ring`: why no all-reduce sends less than $2\frac{N-1}{N}S$.
# - {cite:t}`rajbhandari2020zero`: what to do about the copies.
