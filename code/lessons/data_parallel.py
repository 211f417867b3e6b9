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
# # Data parallelism: many ranks, one training run
#
# After this lesson you can
#
# - train one model on many ranks, and prove that the result is that of one process;
# - build your own `DistributedDataParallel` in three steps, and say what each step saves;
# - predict a step's bytes, memory and time, and when more ranks no longer help;
# - recognise common mistakes by their symptoms.
#
# A puzzle: four ranks begin with the same weights and train for five steps, each on its share of the text.
# After five steps some weight differs by 0.01 between two ranks.
# With one more line of code the largest difference is *exactly* 0.0, and the weights are those that one process computes from the whole batch.
#
# ## Four ranks without communication: four models

# %% tags=["hide-input"]
# Imports, and the small GPT that every cell trains
import copy
import statistics
import tempfile
import time
from functools import partial
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
    """Return the same small GPT on every rank, and its AdamW."""
    torch.manual_seed(0)
    model = GPT(PRESETS["nano"]).to(ranks.device())
    return model, torch.optim.AdamW(model.parameters(), lr=lr)


def local_batch(step, size=4, rank=None):
    """Return this rank's `size` windows of text: tokens and targets, each [size, 64]."""
    rank, count_ = dist.get_rank() if rank is None else rank, dist.get_world_size()
    tokens, targets = text.get_batch(64, size, start=(step * count_ + rank) * size)
    return tokens.to(ranks.device()), targets.to(ranks.device())


# %% [markdown]
# You need one thing from [Collectives](collectives.md): the all-reduce.
#
# Four ranks that share the course's text could need a quarter of one process's time.
# So each rank gets a quarter of the windows of text (64 tokens each), and trains for five steps.
# `measure_drift` returns the largest difference between a weight and rank 0's copy.

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
# The ranks trained four different models, each on a quarter of the text.
# A line after `backward` is missing.
#
# ## Every rank has the whole model, and a share of the batch
#
# Every rank holds the whole model, and gets its own share of each batch.
# Before the optimizer's step the ranks average their gradients.
# So all ranks make the same step, and their weights stay equal.
#
# ![Four ranks. Each has a quarter of the batch, all weights, and computes gradients of its own. An all-reduce averages the gradients; then all four ranks have the same gradients and make the same optimizer step.](../figures/data_parallel_replicas.svg)
#
# Why the average, and not the sum?
# Because a loss is a mean over the batch.
# Let there be $N$ ranks, each with $b$ samples, and let $\ell_{r,i}$ be the loss of sample $i$ on rank $r$. Then
#
# $$
# \nabla \frac{1}{Nb}\sum_{r}\sum_{i} \ell_{r,i} \;=\; \frac{1}{N}\sum_{r} \nabla \frac{1}{b}\sum_{i}\ell_{r,i}
# $$
#
# On the left is the gradient of one process that has the whole batch, on the right the average of the ranks' gradients.
# They are equal, as long as each rank has the same number $b$ of samples.
#
# ## The mechanism, in three steps
#
# ### Step 1: average after backward
#
# The missing line is a call of this function:

# %% tags=["slide"]
def average_one_by_one(model):
    for parameter in model.parameters():
        parameter.grad /= dist.get_world_size()
        dist.all_reduce(parameter.grad)


# %% [markdown]
# The next cell trains again, and averages after each `backward`.

# %%
def train_together(average):
    model, optimizer = model_and_optimizer()
    for step in range(5):
        tokens, targets = local_batch(step)
        optimizer.zero_grad()
        loss(model(tokens), targets).backward()
        average(model)
        optimizer.step()
    return measure_drift(model, dist.group.WORLD)


apart = ranks.run(train_together, 4, average_one_by_one)
print("drift after five steps:", apart)

# %% tags=["hide-input"]
# Checks that the drift of all four ranks is zero
assert apart == [0.0] * 4


# %% [markdown]
# The drift is exactly zero.
# One rank computes each sum, and all ranks get a copy, so their gradients have the same bits.
#
# ````{admonition} False: "copies synchronise their weights"
# :class: checked
#
# No weight is sent in a step, only gradients.
# Averaging weights after the step is another algorithm: AdamW scales each rank's step by that rank's own moments, so the mean of the ranks' steps is not the step of the mean gradient.
# Both algorithms give the same weights only with plain SGD, whose step is the gradient times the learning rate.
# ````

# %% tags=["hide-input"]
# Table: averaged gradients compared with averaged weights
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
# This GPT has 35 parameter tensors, a large GPT has hundreds, and most of them are small: biases, and the weights of LayerNorms.
# Each all-reduce has a latency, so many small all-reduces take longer than one large all-reduce.
# So the gradients are joined in a few flat tensors, the *buckets*, and each bucket is sent as one message {cite}`li2020ddp`.
#
# ![Eight parameters in the module's order are put into four buckets, from the last to the first: the head alone in bucket 0, block 2 in bucket 1, block 1 in bucket 2, the embedding in bucket 3. Each bucket is one flat tensor and one message.](../figures/data_parallel_buckets.svg)
#
# In the next cell a bucket holds at most eight parameters.
# An all-reduce averages its flat tensor, which is then split and copied back into the gradients.

# %%
def make_buckets(model):
    parameters = list(model.parameters())[::-1]  # step 3 needs the reversed order
    return [parameters[i : i + 8] for i in range(0, len(parameters), 8)]


def flatten_gradients(bucket):
    flat = torch.cat([parameter.grad.flatten() for parameter in bucket])
    return flat / dist.get_world_size()


def copy_back(bucket, flat):
    sizes = [parameter.numel() for parameter in bucket]
    for parameter, piece in zip(bucket, flat.split(sizes), strict=True):
        parameter.grad.copy_(piece.view_as(parameter))


def average_bucket_by_bucket(model):
    for bucket in make_buckets(model):
        flat = flatten_gradients(bucket)
        dist.all_reduce(flat)
        copy_back(bucket, flat)


apart = ranks.run(train_together, 4, average_bucket_by_bucket)
print("drift after five steps:", apart)


# %% [markdown]
# ### Step 3: overlap, sending during backward
#
# Backward goes through the layers from the last to the first.
# The last layer's gradients are ready first, but in step 2 they wait for the first layer's gradients.
# In step 3 autograd calls a hook for each parameter whose gradient is ready.
# The hook of a bucket's last gradient starts the bucket's all-reduce, with `async_op=True`: it does not wait for the result, and backward goes on.
# When backward is over, `wait_for_buckets` waits for all of them.

# %%
def send_during_backward(model):
    sent = []

    def on_grad_ready(bucket, ready, parameter):
        ready.append(parameter)
        if len(ready) == len(bucket):
            flat = flatten_gradients(bucket)
            sent.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
            ready.clear()

    for bucket in make_buckets(model):
        hook = partial(on_grad_ready, bucket, [])
        for parameter in bucket:
            parameter.register_post_accumulate_grad_hook(hook)
    return sent


def wait_for_buckets(sent):
    for bucket, flat, work in sent:
        work.wait()
        copy_back(bucket, flat)
    sent.clear()


# %% tags=["hide-input"]
# Compares the gradients of all three steps with one process that has the whole batch
def max_difference(a, b):
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))


def collect_gradients(size, average, prepare=lambda model: model):
    model, _ = model_and_optimizer()
    handle = prepare(model.double())  # float64 rounds nine digits later than float32
    tokens, targets = local_batch(0, size)
    loss(model(tokens), targets).backward()
    average(handle)
    return [parameter.grad.cpu() for parameter in model.parameters()]


assert apart == [0.0] * 4
(joined,) = ranks.run(collect_gradients, 1, 16, average_one_by_one)
steps = [(average_one_by_one,), (average_bucket_by_bucket,)]
steps += [(wait_for_buckets, send_during_backward)]
for number, step in enumerate(steps, 1):
    by_rank = ranks.run(collect_gradients, 4, 4, *step)
    assert all(max_difference(by_rank[0], found) == 0 for found in by_rank)
    off = max_difference(by_rank[0], joined)
    assert off < 6e-13  # paths of 26 * 64 + 1024 terms: 2 * 2,688 * 2^-53 of up to 1
    print(f"step {number}: gradients differ from one process by {off:.0e}")


# %% [markdown]
# Buckets must be sent in one order, the same on all ranks.
# Suppose that rank 0 used layer A before B, and rank 1 used B before A: then rank 0's bucket A would be added to rank 1's bucket B.
# And a bucket with a parameter that was not used never becomes full.
# [The package's buckets](#the-core-buckets-and-the-wrapper) solve both.
#
# The pictures show one step. A cell has the colour of the rank whose gradients it holds, four stripes mark the average, and a thick outline marks data that has just arrived.
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
#    The all-reduce of bucket 0 starts. Meanwhile each rank computes the backward of block 2.
#
# 5. ![Backward of block 1, while the gradients of block 2 are all-reduced. The head's are now averages over all four ranks.](../figures/steps/data_parallel_5.svg)
#
#    The head's gradients are averages now. Block 2's gradients are being sent, and the ranks compute the backward of block 1.
#
# 6. ![Backward of the embedding, while the gradients of block 1 are all-reduced. The gradients of block 2 and the head are averages.](../figures/steps/data_parallel_6.svg)
#
#    Block 1's gradients are being sent, and the ranks compute the backward of the embedding.
#
# 7. ![Backward is over, and nothing computes while the embedding's gradients are all-reduced. All other gradients are averages.](../figures/steps/data_parallel_7.svg)
#
#    Backward is over, and no computation is left to overlap the last bucket: all ranks wait for it.
#
# 8. ![All gradients are averages, the same on all four ranks. Each rank's optimizer makes the same step, and the weights are the same again.](../figures/steps/data_parallel_8.svg)
#
#    All gradients are averages, the same on all ranks. So all optimizers make the same step, and the weights stay equal.
# :::
#
# [Below](#seconds-overlap), the gain of overlap is measured, and a case without gain.
#
# ## Five steps equal one process
#
# All three steps must give the result of one process. One process can compute it in two ways:
#
# - *share by share*: it computes the gradients of one rank's share after another, divides each by $N$ and adds them up, as the ranks do.
# - *joined*: it computes the whole batch at once: the same mathematics, but matrix products over more rows add up their terms in another order.
#
# The table compares `DataParallel` with both, and with PyTorch's `DistributedDataParallel` (DDP), over five AdamW steps, also with a short batch on one rank. Sums in the same order are exactly equal. All other differences are rounding.

# %% tags=["hide-input"]
# Compares gradients and weights with one process and torch's DDP
def compare_models(dtype, sizes):
    """Return the largest differences of gradients and weights. sizes: windows per rank."""
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
        # Paths of n = 2,688 terms, as above, of up to 1, and weights that differ:
        # 4 sqrt(n) 2^-24 and 2 * 1e-3 * 0.01 of a turned weight, or 4 n 2^-53.
        assert max(found[:3]) < (3.3e-5 if dtype == torch.float32 else 1.2e-12), found
        # Where a gradient is nearly 0, rounding decides which way a weight moves, by
        # 1e-3 in a step; in float64 by lr / eps times 2 sqrt(n) 2^-53.
        assert found[3] < (1e-3 if dtype == torch.float32 else 6e-9), found
        if len(sizes) <= 2 and ranks.choose_backend(len(sizes))[1] == "cpu":
            # a + b is b + a, rounding included: equal to torch's bit for bit
            assert found[0] == 0.0
        cells = [f"{value:.0e}" if value else "0" for value in found]
        rows.append((len(sizes), " + ".join(map(str, sizes)), str(dtype)[6:], *cells))
head = ["ranks", "windows on each", "type", "gradients: ours − torch DDP"]
head += ["gradients: ours − share by share", "gradients: ours − joined", "weights: ours − joined"]
show.table(rows, head, caption="Largest differences over five steps")


# %% [markdown]
# A difference of 1e-6 looks small, but proves nothing. Float64 is the proof: it has nine more digits, so every difference from rounding is nine digits smaller,
# but the error of a wrong formula would not change.
#
# Why is the difference not zero? Because $(a+b)+c$ and $a+(b+c)$ round differently.
# On two ranks every sum is $a+b$, and our gradients equal torch's bit for bit.
# On four ranks, a ring begins the sum of each piece of the buffer at a different rank.
# Such differences between *runs* are normal, and grow over thousands of steps. Weights that differ between *ranks of one run* are an error.
# [Parity](parity.md#rule-1-rounding-is-measured) measures how far rounding moves a tensor of *your* model.
#
# ````{admonition} False: "DDP sums the gradients, so divide the learning rate by the number of ranks"
# :class: checked
#
# DDP averages: in the table above its gradient equals the joined batch's, up to rounding.
# If you sum by mistake, AdamW hides the mistake: its step divides the gradient by the gradient's own size, so a factor of $N$ cancels.
# Gradient clipping and SGD do not hide it:
# ````

# %% tags=["hide-input"]
# Table: largest change of a weight in a step, with an average and with a sum
def measure_update(kind, factor):
    """Return the largest change of a weight in a step with gradients times `factor`."""
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
    "largest change of a weight: average",
    "largest change of a weight: sum over 4 ranks",
    "ratio",
]
show.table(rows, head)

# %% [markdown]
# ## The core: buckets and the wrapper
#
# `python -m shardlab.data_parallel` trains five steps with this code on two ranks, compares with one process, and prints the bytes held and sent.
#
# The package's buckets hold a number of bytes, not of parameters, and are created once.

# %%
show.source(split_into_buckets, average_in_buckets, assign_buckets)

# %% [markdown]
# `Bucket.copy_gradient` makes each `parameter.grad` a view into the bucket's flat tensor.
# So every gradient is stored once and averaged in place, and the optimizer reads `parameter.grad` as before.

# %%
show.source(Bucket)

# %% [markdown]
# Three details are easy to get wrong:
#
# - `zero_grad()` sets `grad` to `None`, and autograd then makes a *new* tensor, which is not a view into the bucket. `copy_gradient` writes this tensor, scaled, into the bucket, and frees it.
# - If this rank did not use a parameter, the bucket still holds the parameter's gradient of the previous step. `start_all_reduce` sets that gradient to zero.
# - A parameter that *no* rank used must keep `grad=None`. With a gradient of zeros, AdamW's weight decay would change the parameter, which does not happen in one process. So the bucket has one extra element per parameter: after the all-reduce it is positive if any rank had a gradient, else zero.
#
# `DataParallel` copies rank 0's weights to all ranks when it is created, sends nothing under `no_sync`, and resets its state after an error in backward.
# A full bucket waits for the buckets before it, so all ranks send in one order.
# At the first gradient the hook asks autograd, through the class [BackwardTracker](../code/shardlab/data_parallel/buckets.py), to call `_finalize_backward` when backward is over: it sends the buckets that unused parameters have delayed.

# %%
show.source(DataParallel)

# %% [markdown]
# ## What it costs
#
# ### Messages and bytes
#
# A ring all-reduce of $S$ bytes sends $2\frac{N-1}{N}S$ bytes from each rank ([Collectives](collectives.md)), whatever the batch size.
# So the three steps should send the same gradients, in different numbers of messages.
# Step 1, in the package [average_gradients](../code/shardlab/data_parallel/buckets.py), sends one message per parameter; steps 2 and 3 send one per bucket, with the extra element (four bytes) of each parameter.
# The last two columns compare the prediction with an independent count: the bytes that the operating system's loopback interface transmitted.

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
    "handed to all-reduce (MB)",
    "predicted, sent per rank (MB)",
    "measured (MB)",
]
show.table(
    rows,
    [*head, "difference (%)"],
    caption=f"{N} ranks, {weights / 1e6:.2f} MB of weights",
)

# %% [markdown]
# The next table has the times of steps 1 and 2 on an emulated link between two ranks.
# A message of $S$ bytes takes $\alpha + \beta S$ seconds on it: $\alpha$ is the latency, here 2 ms, and $\beta$ the seconds per byte, at 1 GB/s one nanosecond.

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
# Data parallelism reduces none of these. It adds nothing, as long as the gradients are views into the buckets.

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
        return count.sum_bytes(kept) / sum(p.nbytes for p in model.parameters())

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
# The buckets stay when `zero_grad()` frees gradients: between steps and in forward a rank holds one unit more than one process.
# Forward also makes activations, so this unit can raise the peak.
# Eight ranks hold eight copies of all four units. [ZeRO](zero.md) keeps one copy, sharded over the ranks.
#
# (seconds-overlap)=
# ### Seconds: overlap
#
# Overlap saves only the time in which cores *wait*.
# On this machine's loopback the cores copy all bytes themselves, so if every core is busy there is no waiting.
# On a slow link the cores wait for messages.
#
# The table has both links. Steps with and without overlap alternate in one run.
# The slow link is [emulated](../code/shardlab/measure/link/__init__.py): the all-reduces are real, but each is reported as complete only when a link of 50 µs and 1 Gbit/s would have finished it.

# %% tags=["hide-input", "measured"]
# Table: a step with and without overlap, on loopback and a slow link
runs = {
    # CPU: times of the CPU's work and a wire
    "loopback": ranks.run(overlap.trace_steps, 2, 1, 3, 0.0, 1e12, device="cpu")[0],
    # CPU: times of the CPU's work and a wire
    "1 Gbit/s": ranks.run(overlap.trace_steps, 2, 3, 3, 50e-6, 125e6, device="cpu")[0],
}
rows, ratios = [], {}
for name, run in runs.items():
    steps = {way: [r["step"] for r in run[way]] for way in ("without", "with")}
    medians = {way: statistics.median(seconds) for way, seconds in steps.items()}
    ratios[name] = medians["with"] / medians["without"]
    cells = (f"{1e3 * s:.0f}" for s in medians.values())
    rows.append((name, *cells, f"{ratios[name]:.2f}"))
# Below 1 at 1 Gbit/s, about 1 on loopback. A busy machine has less to hide.
less = ratios["1 Gbit/s"]
show.check_timing(less < 0.95, "at 1 Gbit/s overlap takes less than 95 % of the time")
show.check_timing(
    less < ratios["loopback"], "overlap gains more at 1 Gbit/s than on loopback"
)
head = ["link", "without overlap (ms)", "with overlap (ms)", "with / without"]
show.table(rows, head)

# %% [markdown]
# The picture shows the median step on the slow link. Each piece of backward ends when a bucket is full.

# %% tags=["hide-input", "measured"]
# Plots the slow link's median step, without and with overlap
slow = {way: overlap.pick_median(run) for way, run in runs["1 Gbit/s"].items()}
show.figure(
    overlap.draw_timeline(slow["without"], slow["with"]),
    "Timelines of a step without and with overlap, measured by this page on one of two "
    "ranks.",
    "data_parallel_timeline",
)

# %% [markdown]
# ````{admonition} False: "overlap makes communication free"
# :class: checked
#
# On a slow link most of the sending overlaps backward, so the ratio in the last row above is below 1.
# The sending that is left at the end of backward overlaps nothing, and in forward no gradient exists yet.
# If all cores are busy, as in the first row, overlap gains nothing.
# On GPUs nccl's all-reduce takes some of the GPU's own processors and memory bandwidth, so matrix products are slower meanwhile.
# ````
#
# ### Seconds: more ranks
#
# The time of forward and backward is proportional to the rank's share of the batch. A bucket of $S$ bytes takes $2(N-1)(\alpha + \beta S/N)$ on the link.
# The link sends one bucket after another, and a bucket only once it is full. The model of a step's time has only these rules:

# %%
show.source(predict_step_seconds)

# %% [markdown]
# Eight ranks that compute on two cores would wait for a core, not for the link.
# So in this measurement the layers *sleep* instead of computing, for as long as their share of the batch would take. The messages are real, and the link is emulated.
# We measure two cases:
#
# - *fixed batch*: each of $N$ ranks computes $1/N$ of one batch. The aim is the same training in less time.
# - *growing batch*: each rank has a batch of the same size as one process had, so a step trains on $N$ times as many samples. The aim is more samples per second.

# %% tags=["hide-input", "measured"]
# Measures steps of layers that sleep, on 1 to 8 ranks
LAYERS, LAYER_BYTES = 16, 2**17
FORWARD, BACKWARD = 0.08, 0.16  # seconds for a batch on one rank
SLEEP_WIRE = CostModel(latency=150e-6, bandwidth=30e6)


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
    for _ in range(2):
        dist.barrier()
        begin = time.perf_counter()
        model(torch.ones((), requires_grad=True)).backward()
        seconds.append(time.perf_counter() - begin)
    return min(seconds), [b.flat.nbytes for b in model.buckets]


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
# With a fixed batch more ranks soon stop helping.

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
show.table(rows, [*head, "samples/s, relative to one rank"])

# %% [markdown]
# The picture has the same numbers, and the times with an ideal, infinitely fast link.

# %% tags=["hide-input", "measured"]
# Plots the step's time against the number of ranks
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
    axes.text(8.6, 1e3 * predicted[growing, 8] + 6, words, va="center")
    axes.text(8.6, ideal[growing][-1] - 6, "ideal link", va="center", fontsize=9)
axes.set_xscale("log", base=2)
axes.set_xticks(sizes, sizes)
axes.set_xlim(0.9, 14)
axes.set_ylim(0, 312)
axes.set_xlabel("ranks")
axes.set_ylabel("step (ms)")
axes.text(1.05, 16, "dots: measured, lines: predicted", fontsize=9)
show.figure(
    figure,
    "Step time against the number of ranks. With a growing batch it stays nearly "
    "flat; with a fixed batch it falls to two ranks and rises again, because the "
    "link's time does not shrink.",
    "data_parallel_scaling",
)


# %% [markdown]
# With a fixed batch the time of computation shrinks as $1/N$, while the link's time *grows* towards $2S\beta$. Once the link takes longer than the computation, more ranks make the step slower.
# With a growing batch every rank computes as long as before, and backward still overlaps the sending.
# This is why data-parallel jobs train with large batches. With too large a batch the model learns less per sample {cite}`goyal2017imagenet`.
#
# ## PyTorch's DistributedDataParallel compared with ours
#
# `torch.nn.parallel.DistributedDataParallel` is used in the same way, and does the same three steps in C++.
#
# | | ours | torch DDP |
# |---|---|---|
# | wrap | `DataParallel(model, group)` | `DistributedDataParallel(model, process_group=group)` |
# | size of a bucket | `bucket_bytes`, `first_bytes` | `bucket_cap_mb`: 25 MiB, the first 1 MiB |
# | order of buckets | reverse of the module's | the same, then the order of the first step's gradients |
# | gradients inside the buckets | always | `gradient_as_bucket_view=True`; otherwise one unit of memory more |
# | parameters without a gradient | always allowed | `find_unused_parameters=True`; otherwise an error in the next step |
# | accumulate | `no_sync()` around every backward but the last | the same, around forward too |
# | end | `destroy_process_group()` | `del model, optimizer` first: on gloo the process may hang otherwise (torch 2.13) |
# | length | under 300 lines of Python | several thousand of C++ and Python |
#
# The table has the times of both on two ranks with buckets of the same size; steps of the two alternate.

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
# [The benchmark](../benchmarks/data_parallel.py) repeats this comparison on two and four ranks and on the slow link.
#
# ## Data: DistributedSampler and set_epoch
#
# Each rank must see its own share of the samples in every epoch.
# `DistributedSampler` distributes the samples in turn: rank $r$ gets the samples $r$, $r+N$, $r+2N$, … of a shuffled list.
# All ranks shuffle with the same seed, so they have the same list without a message.
#
# ![Ten samples, distributed over four ranks in turn, in a different order in each epoch. Each rank gets three, so two samples are repeated.](../figures/data_parallel_sampler.svg)
#
# Two lines are easily forgotten: the sampler itself, and `set_epoch`, which changes the seed from epoch to epoch.
# The table counts, for 4 ranks and 1,000 windows, the different windows used in an epoch, and the windows that have the same place in the next epoch.

# %%
def split_windows(by_rank, set_epoch, epoch, N=4, windows=1000):
    """Return the windows that each of N ranks gets in an epoch, 250 each."""
    shares = []
    for rank in range(N):
        place = (N, rank) if by_rank else (1, 0)
        sampler = DistributedSampler(range(windows), *place)
        sampler.set_epoch(epoch if set_epoch else 0)
        shares.append(list(sampler)[: windows // N])
    return shares


# %% [markdown]
# ```{predict}
# :row: no DistributedSampler
# :column: different windows seen, of 1000
#
# Four ranks share 1,000 windows of text. How many different windows do they use in an epoch without the sampler?
# ```

# %% tags=["hide-input"]
# Table: windows used in an epoch, with each line and without it
rows = []
for name, *lines in (
    ("both", True, True),
    ("no set_epoch", True, False),
    ("no DistributedSampler", False, True),
):
    first, second = split_windows(*lines, 0), split_windows(*lines, 1)
    different = len({i for share in first for i in share})
    pairs = zip(sum(first, []), sum(second, []), strict=True)
    rows.append((name, different, sum(a == b for a, b in pairs)))
assert [row[1] for row in rows] == [1000, 1000, 250] and rows[1][2] == 1000
show.table(
    rows,
    ["lines", "different windows seen, of 1000", "in the same place in epoch 1"],
)


# %% [markdown]
# Without the sampler all four ranks compute the same gradient, so the average is that of a single rank.
# No error is raised, and the ranks' weights are equal. The only symptom is that the loss falls as slowly as with one rank.
# Without `set_epoch` every epoch has the same batches in the same order.
#
# When the number of ranks does not divide the number of samples, the sampler repeats some, so that all ranks have equally many (`drop_last=True` leaves some out instead).
# In training this does little harm. In an evaluation repeated samples count twice.
#
# ### Loss, printing, saving
#
# A rank's loss is the loss of its own share. The number to report is the average over the ranks, an all-reduce of one scalar.
# Rank 0 alone prints and writes files. But if the printed value needs an all-reduce, all ranks have to take part in it.
# So printing and saving are inside `if rank == 0`, and the all-reduce is outside.

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
# The last line shows that one process without ranks can load the file.
#
# ## What goes wrong
#
# Each of these mistakes is from real code.
#
# ### A hook that averages the parameter, not its gradient
#
# `register_post_accumulate_grad_hook` passes the *parameter* to the hook. The gradient is `parameter.grad`.

# %%
def drift_with_hook(right):
    model, optimizer = model_and_optimizer()
    world, size = dist.group.WORLD, dist.get_world_size()

    def on_grad_ready(parameter):
        tensor = parameter.grad if right else parameter.data  # the mistake
        tensor.div_(size)
        dist.all_reduce(tensor, group=world)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(on_grad_ready)
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
# The wrong hook averages the weights during backward, which still computes with them. Every step then makes the ranks' weights differ by about twice the learning rate.
# The loss falls nevertheless. `measure_drift` finds the mistake: call it once after the first step of every new job.
#
# ### Averaging means of unequal batches
#
# The last batch of an epoch is short on some ranks. An average of the ranks' own means gives each *rank* the same weight, but each *sample* should have the same weight.

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
# The gradient's error, with the ranks' means and with scale_for_global_mean
naive, right = (ranks.run(short_batch, 4, joined)[0] for joined in (False, True))
assert naive > 0.05 and right < 1e-5  # 2 sqrt(2,900 terms) roundings: 6.4e-6
print(f"average of the ranks' means: the gradient is off by {100 * naive:.0f} %")
print(f"scale_for_global_mean:       off by less than {1e-3} %")
print(f"weight of rank 3's only window:   {1 / 4:.3f} instead of {1 / 19:.3f}")

# %% [markdown]
# With language models this happens in every step: padding and packing give every rank a different number of *tokens*.
# The remedy is `scale_for_global_mean`: it divides the sum of the local losses by the number of tokens of all ranks, and multiplies by $N$.

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
# ### Choosing the GPU by `RANK`: an error on the second node
#
# `RANK` counts over all nodes; `LOCAL_RANK` and the GPUs' numbers count within a node.
# Two nodes have four GPUs each: on which ranks does `cuda:RANK` exist?

# %% tags=["hide-input"]
# Table: the device by RANK and by LOCAL_RANK
rows = []
for rank in (0, 3, 4, 7):
    by_rank, by_local = rank, rank % 4  # the launcher says the latter in LOCAL_RANK
    outcome = "works" if by_rank < 4 else "error: invalid device ordinal"
    rows.append((rank, rank // 4, f"cuda:{by_rank}", outcome, f"cuda:{by_local}"))
show.table(rows, ["RANK", "node", "by RANK", "outcome", "by LOCAL_RANK"])


# %% [markdown]
# On one node `RANK` and `LOCAL_RANK` are equal, so the mistake shows only in the first job on two nodes.
# One variant raises no error: `torch.device("cuda")` without a number puts every rank of a node on `cuda:0`, and the job runs, four times slower, until memory is full.
#
# ### Calling `model.module` instead of the DDP wrapper
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
# Drift after three steps that call model.module: torch's wrapper and ours
torchs = ranks.run(drift_with, 2, DistributedDataParallel)[0]
ours = ranks.run(drift_with, 2, lambda model: DataParallel(model, dist.group.WORLD))[0]
assert torchs > 1e-3 and ours == 0.0  # a step of AdamW is about 1e-3
print(
    f"drift after three steps: torch DDP {torchs:.4f}, ours {ours:.1f}, "
    "whose hooks sit on the parameters"
)


# %% [markdown]
# ### A rank that skips an all-reduce, and ranks with different models
#
# **A rank skips a bucket**, for example under a condition that is true only on that rank, and never joins the bucket's all-reduce.

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
# Runs it on two ranks, and prints the launcher's message
def catch_failure(fn):
    """Run `fn` on two ranks, print its errors, and return the ranks that they name."""
    try:
        ranks.run(fn, 2, timeout=4, own_processes=True)
    except ranks.RankError as error:
        print(error)
        return error.ranks
    raise AssertionError("this was meant to fail")


assert catch_failure(skips_one) == [1]


# %% [markdown]
# In a real job rank 1 would not return but continue with its next step.
# Then its bucket 0 would be added to the other ranks' last bucket, or all ranks would wait until the timeout, ten minutes with nccl.
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
# Runs it on two ranks, which must both raise an error
assert ranks.run(different_models, 2) == ["refused", "refused"]

# %% [markdown]
# ````{admonition} False: "a rank without a gradient can skip the all-reduce"
# :class: checked
#
# It cannot, as the skipped bucket above shows; it must take part with zeros.
# The zeros count in the average: if one of two ranks used a layer, both get *half* of that rank's gradient. Half is right for the mean over both ranks' samples.
# ````
#
# ## When to use it
#
# | advantages | disadvantages |
# |---|---|
# | The model's code does not change: one line wraps the model | The whole model and its optimizer must fit on one GPU: 16 bytes per parameter on every rank, 4 times the weights (measured above) |
# | Sending overlaps backward: at 1 Gbit/s this makes a step shorter (measured above) | Overlap gains nothing where busy cores do the copying |
# | Bytes per rank stay below $2S$, however many ranks | With a fixed batch more ranks stop helping: here beyond 2 to 4 ranks, when sending takes longer than backward |
# | Results equal those of one process up to rounding; on two ranks they equal DDP's bit for bit | All ranks wait for the slowest: a rank that is 0.1 s late makes all ranks 0.1 s late, in every step |
#
# In a real job, four checks show that data parallelism is set up right:
#
# - `measure_drift` is 0 after the first step;
# - the throughput with $N$ ranks is near $N$ times that of one rank;
# - each rank sends $2\frac{N-1}{N}$ times the gradients' size per *step*, not per micro-batch;
# - the loss of step 1 on $N$ ranks equals that of one process on the joined batch.
#
# ## Exercises
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
# Each rank sends seven eighths of the gradients in the reduce-scatter, and seven eighths in the all-gather.

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
# Forward takes 0.04 s, backward 0.05 s, and the link is busy for 0.10 s. There are very many, very small buckets, and latency is zero.
# How long do forward, backward and sending take together at best?

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
# Sending can start when backward starts, and takes longer than backward.

# %%
answer = 0.04 + max(0.05, 0.10)
check(answer, "overlap_floor")


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Gradients of unused parameters (medium)
# :label: ex-data-parallel-average
# ```
#
# `average_gradients` leaves zeros where no rank had a gradient, and AdamW's weight decay then moves a layer that does not move in one process.
# Write an `average_gradients` that avoids this: a parameter that *some* rank used gets the average over all ranks, even if it is exactly zero; a parameter that *no* rank used keeps `grad=None`.
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
# One more all-reduce counts, for all parameters at once, the ranks that have a gradient. All ranks get the same counts, so they skip the same parameters.

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
# `DataParallel` averages gradients over the ranks of `group`. Return a loss for this rank such that the averaged gradient is the gradient of the mean over *all* samples of these ranks.
# `loss_sum` is the sum of this rank's losses, `samples` their number.

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
# Divide the rank's sum of losses by the number of all ranks' samples, and multiply by $N$, because the average divides by $N$.

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
# ```{exercise-start} Accumulate, and send once (hard)
# :label: ex-data-parallel-accumulate
# ```
#
# Run backward on every micro-batch, so that the result is the gradient of the mean over all micro-batches of all ranks, every bucket is sent once, and the activations of only one micro-batch are held at a time.
# `model` is a `DataParallel`; `loss_of(micro_batch)` runs the model on a micro-batch and returns the mean loss. All micro-batches are of one size.

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
# Run every backward but the last inside `no_sync()`; the last backward sends the sum.

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
# On `n` ranks a ring all-reduces `size` bytes of gradients over links of `bandwidth` bytes per second. A micro-batch takes `forward` and `backward` seconds, and fills the memory. All but the last micro-batch of a step run inside `no_sync()`; the all-reduce begins with the last backward, and overlaps it.
# Return the smallest number of micro-batches with which ranks wait for at most `fraction` of the step. Ignore latency, and the time until the first bucket is full.

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
# The all-reduce takes $w$ seconds longer than one backward, and the ranks wait for $w$ seconds per step, however many micro-batches there are.
# With $m$ micro-batches of $f$ seconds of forward and $b$ of backward, waiting is $w / (w + m (f + b))$ of the step.
# So a slow link needs more micro-batches, and the larger batch needs another learning rate.

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
# - Every rank holds the whole model; averaged gradients keep the replicas equal, and equal to one process on the joined batch.
# - The average is right because a loss is a mean; with unequal batches, divide by the samples of all ranks.
# - Buckets save latency, and hooks overlap communication with backward; neither saves bytes or memory.
# - A rank sends $2\frac{N-1}{N}S$ bytes per step, whatever the batch; so give each rank a batch whose backward takes longer than the sending.
# - Every rank calls every all-reduce, in the same order, with or without a gradient.
# - Most mistakes raise no error: check `measure_drift`, traffic, and the first loss.
#
# ## Further reading
#
# - {cite:t}`li2020ddp`: the design that this lesson rebuilds, with measurements on up to 256 GPUs; sections 3.2.1 to 3.2.4 are steps 1 to 3 and `no_sync`.
# - {cite:t}`sergeev2018horovod`: the ring all-reduce in deep learning; its fusion buffer is a bucket.
# - {cite:t}`goyal2017imagenet`: large batches, learning rates that grow with them, and a list of pitfalls, some of them shown above.
# - {cite:t}`patarasuk2009ring`: why no all-reduce sends less than $2\frac{N-1}{N}S$.
# - {cite:t}`rajbhandari2020zero`: ZeRO, which shards the replicas' states.
