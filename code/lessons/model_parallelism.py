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
# # Model parallelism: training models too large for one GPU
#
# After this lesson you can
#
# - say what has to fit on a GPU to train a model, in bytes, and which technique divides which part of it;
# - run data parallelism, a pipeline, tensor parallelism and ZeRO on real ranks, and show that each computes what one process computes;
# - predict what each of them holds, sends and waits for;
# - choose among them for a given model on given machines, and write the choice down as a configuration.
#
# It takes an hour to read and half an hour for the exercises.
# Running it takes under a minute.
# You need to know PyTorch, and nothing of parallelism.
# Most sections end with a link to the lesson that goes deep.
#
# One number to begin with.
# Llama 3 70B has 70.6 billion weights.
# In float32 they are 282 GB; the largest GPU on this page has 141 GB.
# And the weights are the *small* part: training holds four times that before the first word is read.

# %% tags=["hide-input"]
import json
import math
import textwrap
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from shardlab import collectives, count, memory, pipeline, ranks, show, strategy, text, zero
from shardlab import deepspeed_engine as de
from shardlab import tensor_parallel as tp
from shardlab.check import check
from shardlab.data_parallel import DataParallel
from shardlab.model import GPT, PRESETS, Config, loss

show.style()
GB, TB = 1e9, 1e12
# Four layers and four heads, so that four ranks can share either.
SHAPE = Config(seq=64, layers=4, heads=4, hidden=128, tied=False)
P, STEPS, BATCH = memory.parameter_count(SHAPE), 5, 8


def plain(device=None):
    """The same small GPT at every call."""
    torch.manual_seed(0)
    return GPT(SHAPE).to(device or ranks.device())


def batch(step):
    """All of a step's text: tokens, targets: [8, 64]."""
    tokens, targets = text.batch(SHAPE.seq, BATCH, start=step * BATCH)
    return tokens.to(ranks.device()), targets.to(ranks.device())


def share(*tensors):
    """Of each tensor, the sequences that are this rank's."""
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    return [tensor[mine] for tensor in tensors]


def on_wire(sent):
    """Bytes that this rank sends, from what it handed over: see the lesson Collectives."""
    n = dist.get_world_size()
    gathered = sent.payload["all_gather_into_tensor"] + sent.payload["all_gather_single"]
    return sent.bytes + 2 * (n - 1) / n * sent.payload["all_reduce"] + (n - 1) * gathered


def percent(found, predicted):
    """The difference in percent, as tables here show it."""
    return "0" if found == predicted else f"{100 * (found / predicted - 1):+.2f}"


# %% [markdown]
# (mp-problem)=
# ## The problem: one GPU is not enough
#
# What does *training* hold?
# For every weight its gradient, and two running means that AdamW keeps: in float32 four numbers of 4 bytes, 16 bytes in all.
# Then the {term}`activations <activation>`: everything that forward computes and backward needs again.
# The cell computes both for three models, with one sequence of the model's full length.
# Compare the last column with the 24 GB of an RTX 4090, the 80 GB of an A100 or an H100, and the 141 GB of an H200.

# %%
rows = []
for name in ("llama-3-8b", "llama-3-70b", "gpt-3-175b"):
    config = PRESETS[name]
    one = memory.estimate(config, precision="fp32", device="gpu")
    states, n = memory.states(memory.parameter_count(config), "fp32"), config.seq
    assert one.peak > strategy.MACHINES["h200"].memory == 141 * GB
    assert states.total == 4 * states.parameters == 16 * memory.parameter_count(config)
    sizes = states.parameters, states.total, one.activations, one.peak
    rows.append((name, f"{n:,}", *(f"{size / GB:,.0f}" for size in sizes)))
    if name == "llama-3-70b":
        assert [round(size / GB) for size in sizes[:3]] == [282, 1129, 449]
        assert round(memory.parameter_count(config) / GB, 1) == 70.6
head = ["model, float32", "tokens", "weights (GB)", "all states (GB)"]
show.table(rows, [*head, "activations, with temporaries (GB)", "peak (GB)"], caption="On one GPU")

# %% [markdown]
# Not even the smallest of them fits on any of these GPUs.
#
# `````{admonition} Checked: "a 70B model needs 280 GB"
# :class: checked
#
# For its *weights* in float32, yes: 282 GB.
# To train it takes 1,129 GB of states, and 449 GB more for the activations of one sequence of 8,192 tokens and what is computed with them: the second row above.
# Quote the number with its purpose: to keep the model, to run it, or to train it.
# `````
#
# Can such a prediction be trusted?
# The course's own small GPT fits everywhere, so here is a step of it, with every byte counted.
# Look at the last column.

# %%
model = plain("cpu")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
tokens, targets = text.batch(SHAPE.seq, BATCH)
for _ in range(2):  # the first step makes AdamW's means
    with count.held(model, optimizer, tokens, targets) as held:
        optimizer.zero_grad()
        loss(model(tokens), targets).backward()
        optimizer.step()
states = count.states(model, optimizer)
want = memory.estimate(SHAPE, BATCH, precision="fp32")
parts = ("parameters", "gradients", "optimizer")
pairs = [(part, getattr(want, part), states[part]) for part in parts]
rows = []
for part, predicted, found in [*pairs, ("peak of the step", want.peak, held.peak)]:
    assert found == predicted or (part not in parts and abs(found / predicted - 1) < 0.05)
    rows.append((part, f"{predicted:,}", f"{found:,}", percent(found, predicted)))
head = ["part", "predicted (B)", "measured (B)", "difference (%)"]
show.table(rows, head, caption=f"{P:,} parameters, {BATCH} sequences of {SHAPE.seq} tokens, CPU")

# %% [markdown]
# ### What one GPU can do for itself
#
# Three things, before anything is divided: compute in 16 bits, take a smaller batch, and {term}`recompute <recomputation>`: keep only each layer's input, and run the layer's forward again when backward gets there.
# The first two are often credited with too much, the third is feared too much.
#
# `````{admonition} Checked: "mixed precision halves the memory of training"
# :class: checked
#
# It needs float32 *master weights* beside the 16-bit ones, because a step is too small to be seen in 16 bits. 2 + 2 + 4 + 8 = 16 bytes for each parameter: as many as before.
# Only the activations are halved.
# The next cell adds it up.
# `````

# %%
rows = []
for precision in ("fp32", "bf16"):
    found = memory.states(1, precision)
    sizes = found.parameters, found.gradients, found.optimizer, found.total
    kept = memory.activations(PRESETS["llama-3-70b"], precision=precision, device="gpu").saved
    rows.append((precision, *sizes, f"{kept / GB:.0f}"))
    assert found.total == 16
head = ["recipe", "weights (B)", "gradients (B)", "optimizer (B)", "together (B)"]
show.table(rows, [*head, "Llama 3 70B: activations kept (GB)"], caption="States of one parameter")


# %% [markdown]
# `````{admonition} Checked: "recomputation doubles the work"
# :class: checked
#
# Backward is two thirds of a step's arithmetic.
# Repeating forward adds its third once more: at most a third of a step.
# The next cell counts the operations of a step with torch's own counter, and what is kept for backward.
# `````

# %%
def kept_and_counted(again):
    """Bytes kept for backward, and floating-point operations of forward and backward."""
    model = plain("cpu")
    for block in model.blocks if again else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    with count.saved(model, tokens, targets) as saved, FlopCounterMode(display=False) as counter:
        loss(model(tokens), targets).backward()
    return saved.bytes, counter.get_total_flops()


(kept, flops), (kept_again, flops_again) = kept_and_counted(False), kept_and_counted(True)
RECOMPUTE = flops_again / flops
assert 1.1 < RECOMPUTE <= 4 / 3 and kept_again < kept / 8
rows = [("no", f"{kept / 1e6:.1f}", f"{flops / GB:.2f}", "1")]
rows.append(("yes", f"{kept_again / 1e6:.1f}", f"{flops_again / GB:.2f}", f"{RECOMPUTE:.2f}"))
show.table(rows, ["recompute each layer", "kept for backward (MB)", "GFLOP of a step", "ratio"])


# %% [markdown]
# None of the three makes Llama 3 70B fit: its states stay 1,129 GB.
# So they have to be divided.
# [Memory](memory.md) has all of this in detail.
#
# ## Four ways to divide the work
#
# A training step is a batch that goes through layers, whose weights have gradients and optimizer states.
# Each of these can be cut.
#
# ![Four ways to train one model of four layers on four ranks. Data parallelism: each rank has a quarter of the batch and all four layers; gradients are sent. ZeRO, stage 3: each rank has a quarter of the batch, and of every layer's weights, gradients and optimizer states a quarter; weights and gradients are sent. Pipeline: each rank has one layer, and the whole batch passes through all of them; activations are sent to the next rank. Tensor parallelism: each rank has the whole batch and a quarter of every layer's matrices; activations are summed in every layer.](../figures/model_parallelism_ways.svg)
#
# A {term}`rank` is a process with a number; usually it has one GPU.
# On this page ranks are real processes that send real messages, whatever this machine has.
# They are started by `ranks.run(function, 4)`, which runs the function on four of them and returns four results.
#
# One yardstick serves all four ways.
# The same GPT trains for five steps of AdamW, on the same eight sequences a step.
# The loop is always this one; look at what it counts.

# %%
class Trained(NamedTuple):
    losses: list  # of each step, where this rank knows it
    weights: dict  # after the last step, those that this rank can name
    states: int  # bytes of weights, gradients and optimizer
    sent: float  # bytes that this rank sends in a step
    messages: int  # and in how many calls


def train(model, forward_and_backward, weights):
    """Five steps on the batches of one process; `weights()` names what came out."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        with count.sent() as sent:
            value = forward_and_backward(*batch(step))
            optimizer.step()
        losses.append(None if value is None else value.item())
    states = count.states(model, optimizer)
    del states["counters"]  # AdamW counts its steps, four bytes for each tensor
    held = {name: tensor.detach().cpu() for name, tensor in weights().items()}
    calls = sum(sent.calls.values()) + sent.messages
    return Trained(losses, held, sum(states.values()), on_wire(sent), calls)


# %% [markdown]
# First one process, for comparison:

# %%
def one_process():
    model = plain()

    def forward_and_backward(tokens, targets):
        value = loss(model(tokens), targets)
        value.backward()
        return value

    return train(model, forward_and_backward, model.state_dict)


ONE = ranks.run(one_process, 1)[0]
FOUR = {}  # what four ranks held and sent, by technique: filled below
assert ONE.states == 16 * P and ONE.sent == 0
print(f"{ONE.states:,} B of states; losses:", ", ".join(f"{x:.4f}" for x in ONE.losses))


# %% [markdown]
# And a function that holds ranks against it.
# A technique is *right* if its losses and its weights are those of one process, up to rounding.

# %% tags=["hide-input"]
def compared(cases):
    """Table of cases: name, results by rank, predicted states and bytes sent (fullest rank)."""
    rows = []
    for name, found, states, sent in cases:
        by_step = zip(*(r.losses for r in found), strict=True)
        known = [[x for x in step if x is not None] for step in by_step]
        losses = [sum(step) / len(step) for step in known]
        in_loss = max(abs(a - b) for a, b in zip(losses, ONE.losses, strict=True))
        named = [(n, w) for r in found for n, w in r.weights.items()]
        assert {n for n, _ in named} == set(ONE.weights)  # together they have them all
        in_weights = max((w - ONE.weights[n]).abs().max().item() for n, w in named)
        # Float32: a loss of 5 has seven digits. AdamW divides by a gradient's size; where that is
        # nearly 0, rounding decides which way a weight moves, by up to 0.001 in each of 5 steps.
        assert in_loss < 1e-4 and in_weights < 5e-3, (name, in_loss, in_weights)
        held, wire = max(r.states for r in found), max(r.sent for r in found)
        assert held == states and abs(wire - sent) <= 1e-3 * sent, (name, held, states, wire, sent)
        cells = f"{states:,}", f"{held:,}", f"{sent / 1e6:.3f}", f"{wire / 1e6:.3f}"
        rows.append((name, f"{in_loss:.0e}", f"{in_weights:.0e}", *cells))
        FOUR[name] = held, wire, max(r.messages for r in found)
    head = ["four ranks", "losses differ by", "weights differ by", "states: predicted (B)"]
    head += ["counted (B)", "sent in a step: predicted (MB)", "counted (MB)"]
    return show.table(rows, head, caption="Beside one process; the fullest rank")


# %% [markdown]
# (mp-data)=
# ## Data parallelism: copies
#
# The simplest way.
# Every rank has the whole model and a quarter of the batch.
# After backward the ranks average their gradients, with one {term}`all-reduce`: a {term}`collective` after which each of them has the sum of all.
# From equal weights and equal gradients, every rank makes the same step, and they stay equal.
#
# In code, nothing changes but a wrapper and the rank's share of the batch.
# Look at how `sent` is predicted: a ring all-reduce of $S$ bytes sends $2\frac{N-1}{N}S$ from each of $N$ ranks.

# %%
def data_parallel():
    model = DataParallel(plain(), dist.group.WORLD)

    def forward_and_backward(tokens, targets):
        x, y = share(tokens, targets)
        value = loss(model(x), y)
        value.backward()  # gradients are averaged when it returns
        return value

    return train(model, forward_and_backward, model.module.state_dict)


N, flags = 4, 4 * len(list(plain("cpu").parameters()))  # who had a gradient: sent along
predicted = 16 * P + flags, 2 * (N - 1) / N * (4 * P + flags)
compared([("data parallel", ranks.run(data_parallel, N), *predicted)])


# %% [markdown]
# The same losses, the same weights.
# And on every rank the states of one process, with 4 bytes more for each tensor, which say who had a gradient: copies make nothing fit.
# *The model must fit on one GPU.*
# What copies divide is the batch, and with it time and activations.
#
# `````{admonition} Checked: "all-reduce costs more the more GPUs there are"
# :class: checked
#
# In bytes it costs each of them $2\frac{N-1}{N}S$: from 2 ranks to 1,024 that less than doubles, and it never reaches $2S$.
# What does grow is the number of steps that a message takes around the ring, hence its latency.
# The next cell counts what a rank sends.
# `````

# %%
def reduced():
    gradients = torch.ones(2**18, device=ranks.device())  # 1 MiB
    with count.sent() as sent:
        collectives.all_reduce(gradients, dist.group.WORLD)
    return sent.bytes, sent.messages


S, rows = 4 * 2**18, []
for n in (2, 4, 8, 1024):
    predicted, messages = 2 * (n - 1) * S // n, 2 * (n - 1)
    if n <= 8:
        counted, calls = ranks.run(reduced, n)[0]
        assert (counted, calls) == (predicted, messages)
    counted = f"{counted:,}" if n <= 8 else "-"
    rows.append((n, f"{predicted:,}", counted, f"{predicted / S:.3f}", messages))
head = ["ranks", "sent by each: predicted (B)", "counted (B)", "in units of S", "messages"]
show.table(rows, head, caption=f"Ring all-reduce of {S:,} B")


# %% [markdown]
# `````{admonition} Checked: "accumulating gradients equals a larger batch"
# :class: checked
#
# If all parts have as many tokens, yes.
# A short last batch, or padded sequences, and the mean of means is not the mean: a part with few tokens counts as much as one with many.
# The same holds for the average over ranks.
# The next cell has parts of 64 and of 16 tokens.
# `````

# %%
def gradients(parts, weights):
    """All gradients in one tensor, of a weighted sum of the parts' mean losses."""
    model = plain("cpu")
    for (x, y), weight in zip(parts, weights, strict=True):
        (weight * loss(model(x), y)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def of_all(parts):
    """The gradients of the mean over all tokens of all parts."""
    model, total = plain("cpu"), sum(y.numel() for _, y in parts)
    (sum(loss(model(x), y, "sum") for x, y in parts) / total).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


uneven = [(tokens[:1], targets[:1]), (tokens[1:2, :16], targets[1:2, :16])]
want = of_all(uneven)
rows = []
for how, weights in (("each part's mean, halved", (1 / 2, 1 / 2)), ("by tokens", (0.8, 0.2))):
    off = ((gradients(uneven, weights) - want).norm() / want.norm()).item()
    rows.append((how, f"{100 * off:.1f}"))
    assert off < 1e-5 if how == "by tokens" else off > 0.1
show.table(rows, ["weights of the parts", "gradient: off by (% of its norm)"])

# %% [markdown]
# How far does it scale?
# The gradients travel while backward still computes, so they cost nothing until the wire takes longer than that.
# The cell takes Llama 3 8B, 4 million tokens a step for all GPUs together, an H100 of which 40 % are reached, and the wires between nodes; backward is two thirds of the arithmetic.

# %%
h100, llama = strategy.MACHINES["h100"], PRESETS["llama-3-8b"]
params, rows, SPEEDUP = memory.parameter_count(llama), [], {}
compute = 6 * params * 4e6 / (0.4 * h100.flops)  # s on one GPU: 6 for a token and parameter
for n in (8, 64, 512, 4096):
    sending = 2 * (n - 1) / n * 2 * params / h100.between  # s; gradients of 2 bytes
    step = compute / n / 3 + max(2 * compute / n / 3, sending)
    SPEEDUP[n] = compute / step
    cells = f"{compute / n:.2f}", f"{sending:.2f}", f"{step:.2f}", f"{SPEEDUP[n]:,.0f}"
    rows.append((n, *cells, f"{100 * SPEEDUP[n] / n:.0f}"))
assert SPEEDUP[64] == 64 and SPEEDUP[4096] < 0.35 * 4096
head = ["GPUs", "arithmetic (s)", "sending (s)", "step (s)", "times faster", "of ideal (%)"]
show.table(rows, head, caption=f"{h100.between / GB:.0f} GB/s between nodes")

# %% [markdown]
# `````{admonition} Checked: "N GPUs train N times as fast"
# :class: checked
#
# As long as the wire hides behind backward: in the table up to hundreds.
# Then the step stops shrinking, because the bytes do not know how small a rank's share of the batch has become.
# More GPUs then need a larger batch, which needs other learning rates, and at some size learns no more from each token.
# `````
#
# [Data parallelism](data_parallel.md) builds the wrapper, its buckets and its overlap.
#
# (mp-pipeline)=
# ## Pipeline parallelism: a cut by layers
#
# If the model does not fit, give each rank some of its layers.
# Rank 0 computes the first quarter and hands its activations to rank 1, and so on; backward comes the same way back.
# Each rank holds a quarter of the states.
# But while one rank works, the others wait for it.
#
# ![Three timelines of four stages on one axis. The whole batch at once: one stage computes at a time, and each is busy 25 % of the time. Four micro-batches in a loop, forward and backward of one before the next begins: still one stage at a time, still 25 %. GPipe, forwards of all four and then backwards of all four: stages overlap, each is busy 57 % of the time, and the step takes less than half as long.](../figures/pipeline_microbatches.svg)
#
# The remedy is to cut the batch into $m$ {term}`micro-batches <micro-batch>`, and to let the next one start as soon as the first stage is free.
# What remains idle is the {term}`bubble`: the pipeline has to fill and to drain, and of a step
#
# $$
# \text{bubble} = \frac{p-1}{m+p-1}
# $$
#
# is lost, with $p$ stages.
# Two orders are common.
# GPipe runs all forwards, then all backwards {cite}`huang2019gpipe`; {term}`1F1B <one forward, one backward>` starts each backward as early as it can {cite}`narayanan2021megatron`.
#
# `````{admonition} Checked: "four micro-batches on four stages keep GPUs 75 % busy"
# :class: checked
#
# It is $m/(m+p-1) = 4/7 = 57\,\%$.
# ($3/4$ is $(p-1)/m$, the idle time as a share of the *work*.)
# The next cell measures it on four ranks whose layers *sleep*, so that they wait for each other and not for this machine's cores.
# `````

# %% tags=["measured"]
UNIT = 0.015  # seconds: forward, backward of the input, backward of the weights


def sleeping(cases):
    """On a rank: for each schedule, the shorter of two steps of stages that sleep."""
    found = []
    for name, m in cases:
        schedule = pipeline.schedule(name, dist.get_world_size(), m)
        mine = pipeline.asleep(schedule, dist.group.WORLD, UNIT, UNIT, UNIT, record=True)
        steps = []
        for _ in range(2):
            mine.step(torch.zeros(m, 1), torch.zeros(m, 1))
            steps.append(mine.timeline())
        found.append(min(steps, key=lambda timeline: timeline.cost).bubble)
    return found


CASES = [("naive", 1), ("gpipe", 4), ("1f1b", 4), ("1f1b", 8), ("1f1b", 16)]
rows, BUBBLE = [], {}
for (name, m), bubble in zip(CASES, ranks.run(sleeping, 4, CASES, device="cpu")[0], strict=True):
    drawn = pipeline.simulate(pipeline.schedule(name, 4, m))
    BUBBLE[name, m] = 3 / (m + 3)
    assert abs(drawn.bubble - BUBBLE[name, m]) < 1e-12
    assert abs(bubble - BUBBLE[name, m]) < 0.12  # sleeps end late on a busy machine
    busy = [f"{100 * (1 - x):.0f}" for x in (BUBBLE[name, m], drawn.bubble, bubble)]
    rows.append((name, m, *busy, " ".join(f"{held:g}" for held in drawn.peak_activations)))
head = ["four stages", "m", "busy: formula (%)", "simulated (%)", "measured (%)"]
show.table(rows, [*head, "micro-batches held by stages 0 to 3"])


# %% [markdown]
# `````{admonition} Checked: "1F1B has a smaller bubble than GPipe"
# :class: checked
#
# The same one, in every column above: the second and third row.
# What 1F1B saves is memory, since a backward frees what its forward kept: stage $s$ never holds more than $p-s$ micro-batches, however many there are.
# *That* lets you take more of them, and more of them make the bubble smaller.
# `````
#
# Now the real thing: four stages of the GPT, one layer each, and four micro-batches of two sequences.
# In a step $B \cdot s \cdot h$ numbers go forward and as many gradients back.

# %%
def four_stages():
    schedule = pipeline.schedule("1f1b", dist.get_world_size(), microbatches=4)
    mine = pipeline.distribute(plain(), schedule, dist.group.WORLD)
    return train(mine, mine.step, lambda: dict(mine.named_parameters()))


held = max(sum(memory.parameters(SHAPE, pp=4, stage=stage).values()) for stage in range(4))
predicted = 16 * held, 2 * BATCH * SHAPE.seq * SHAPE.hidden * 4
compared([("pipeline", ranks.run(four_stages, 4), *predicted)])

# %% [markdown]
# A quarter of the states, give or take the embedding and the head, and by far the fewest bytes so far.
# The price is the bubble, and that the layers must be cut into stages of equal time.
# [Pipeline parallelism](pipeline.md) has seven schedules, down to no bubble at all.
#
# (mp-tensor)=
# ## Tensor parallelism: a cut through every matrix
#
# A pipeline cannot cut a layer, and all ranks but one wait for it.
# Tensor parallelism cuts each matrix, and all ranks work on the same layer at the same time {cite}`shoeybi2019megatron`.
#
# ![A feed-forward network on two ranks. Each rank has all of X. The first matrix is cut by columns: each rank has 4096 x 8192 of it, and computes its half of XW₁ and of its GELU. The second is cut by rows: each rank has 8192 x 4096 of it, and computes a summand of Y, as large as all of Y. An all-reduce adds the two, and each rank has all of Y.](../figures/tensor_parallel_ffn.svg)
#
# The first matrix of the feed-forward network is cut by columns.
# A rank then has some columns of the result, and GELU needs no more, because it looks at each number by itself.
# The second matrix is cut by rows, those that meet these columns.
# It gives each rank a *summand* of $Y$; one all-reduce adds them up.
#
# Here it is, on two ranks and smaller than in the picture: 512 → 2048 → 512. Look at the three lines that know of ranks: each begins with `tp.` or cuts a matrix.
# `copy_to` does nothing in forward and an all-reduce in backward, `reduce_from` the reverse.

# %%
H, F, T = 512, 2048, 32


def feed_forward(right=True):
    """On a rank: Y, X's gradient, bytes of weights; `right`: the bias behind the sum."""
    generator = torch.Generator().manual_seed(1)
    x_TH, w1_HF, w2_FH, b_H = (
        scale * torch.randn(*shape, generator=generator, dtype=torch.float64).to(ranks.device())
        for scale, shape in ((1, (T, H)), (0.05, (H, F)), (0.05, (F, H)), (1, (H,)))
    )
    group, rank, n = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    w1_Hf, w2_fH = w1_HF.chunk(n, 1)[rank], w2_FH.chunk(n, 0)[rank]
    x_TH.requires_grad_()
    with count.sent() as sent:
        inner_Tf = nn.functional.gelu(tp.copy_to(x_TH, group) @ w1_Hf)  # [T, H] @ [H, f]
        y_TH = inner_Tf @ w2_fH + (0 if right else b_H)  # [T, f] @ [f, H]
        y_TH = tp.reduce_from(y_TH, group) + (b_H if right else 0)
        y_TH.square().mean().backward()
    return y_TH.detach(), x_TH.grad, w1_Hf.numel() + w2_fH.numel(), sent.calls["all_reduce"], b_H


y_TH, gradient_TH, whole, *_ = ranks.run(feed_forward, 1)[0]
rows = []
for rank, (y, gradient, held, calls, _) in enumerate(ranks.run(feed_forward, 2)):
    off = [(a - b).abs().max().item() for a, b in ((y, y_TH), (gradient, gradient_TH))]
    assert max(off) < 1e-12 and 2 * held == whole and calls == 2  # float64: 16 digits
    rows.append((rank, f"{held:,}", f"{whole:,}", calls, *(f"{x:.0e}" for x in off)))
head = ["rank", "weights held", "of", "all-reduces, forward and backward"]
show.table(rows, [*head, "Y: from one process", "X's gradient"])

# %% [markdown]
# `````{admonition} Checked: "each row-parallel layer adds its bias"
# :class: checked
#
# Then the all-reduce adds it up as well, $t$ times.
# It has to be added once, behind the sum.
# Nothing fails, and as long as biases are zero, as in the beginning, nothing is even wrong.
# The next cell makes the mistake.
# `````

# %%
rows = []
for t in (2, 4):
    y, _, _, _, b_H = ranks.run(feed_forward, t, False)[0]
    surplus = ((y - y_TH) / b_H).mean().item()
    assert abs(surplus - (t - 1)) < 1e-9
    rows.append((t, 1, t, f"{1 + surplus:.2f}"))
show.table(rows, ["ranks", "biases in Y: right", "added by each rank: predicted", "measured"])


# %% [markdown]
# Attention is cut the same way: each rank computes some of the heads.
# So a layer needs two all-reduces in forward and two in backward, each of $b \cdot s \cdot h$ numbers.
# The whole GPT on four ranks, cut by one call, and a loss that never puts the logits together:

# %%
def cut_in_four():
    group = dist.group.WORLD
    model = tp.parallelize(plain(), group)

    def forward_and_backward(tokens, targets):
        value = tp.loss(model(tokens), targets, group)
        value.backward()
        return value

    return train(model, forward_and_backward, lambda: tp.full_state_dict(model))


predicted = (
    sum(tp.predicted_states(SHAPE, 4).values()),
    tp.on_wire(sum(tp.predicted_sent(SHAPE, 4, BATCH, SHAPE.seq).values()), 4),
)
compared([("tensor parallel", ranks.run(cut_in_four, 4), *predicted)])


# %% [markdown]
# The states are divided, and so is the time of each layer.
# But this is the most that any technique sent up to now, and nothing can be computed meanwhile: the next matrix needs the sum.
# That is why the ranks of a tensor-parallel group sit in one machine, where the wires are fast, and why their number $t$ ends at 8 or so.
# [Tensor parallelism](tensor_parallel.md) does this for every layer.
#
# `````{admonition} Checked: "tensor parallelism divides activations by t"
# :class: checked
#
# Those inside the cut parts.
# Norms and the stream between the layers are whole on every rank.
# The next cell counts what four ranks keep for backward: 43 % each, not 25 %.
# `````

# %%
def kept_by_forward():
    model = tp.parallelize(plain(), dist.group.WORLD)
    tokens, targets = batch(0)
    with count.saved(model, tokens, targets) as saved:
        tp.loss(model(tokens), targets, dist.group.WORLD)
    return saved.bytes


rows = []
for t in (1, 2, 4):
    found = ranks.run(kept_by_forward, t, device="cpu")[0]
    want = memory.activations(SHAPE, BATCH, precision="fp32", tp=t).saved
    KEPT = found / kept
    assert abs(found / want - 1) < 0.01
    sizes = f"{want / 1e6:.2f}", f"{found / 1e6:.2f}", percent(found, want)
    rows.append((t, *sizes, f"{100 / t:.0f}", f"{100 * KEPT:.0f}"))
assert 0.42 < KEPT < 0.44
head = ["t", "kept: predicted (MB)", "measured (MB)", "difference (%)", "1/t (%)"]
show.table(rows, [*head, "of one process's (%)"])

# %% [markdown]
# (mp-zero)=
# ## ZeRO: copies without copies
#
# Data parallelism is the simplest way, and wasteful: $N$ ranks hold the same states $N$ times.
# ZeRO keeps the rest as it is and lets each rank *own* a share of them {cite}`rajbhandari2020zero`.
# Stage 1 shares the optimizer states, stage 2 the gradients too, stage 3 the weights too: a layer's weights are then gathered just before it computes, and forgotten after it.
#
# The example that everybody tells has 7 billion parameters in float32 and 8 GPUs: 28 GB of weights, 28 GB of gradients, 56 GB of optimizer states, and 10 GB of activations on each GPU, 122 GB in all.

# %%
ACTIVATIONS, rows, SEVEN = 10e9, [], {}
for stage in range(4):
    found = memory.states(7e9, "fp32", zero=stage, dp=8)
    mixed = memory.states(7e9, "bf16", zero=stage, dp=8).total + ACTIVATIONS
    sizes = found.parameters, found.gradients, found.optimizer, ACTIVATIONS
    SEVEN[stage] = sum(sizes)
    cells = [f"{size / GB:g}" for size in (*sizes, SEVEN[stage], mixed)]
    rows.append((stage, *cells, f"{SEVEN[0] / SEVEN[stage]:.2f}"))
assert list(SEVEN.values()) == [122e9, 73e9, 48.5e9, 24e9] and SEVEN[0] / 8 == 15.25e9
head = ["stage", "weights (GB)", "gradients (GB)", "optimizer (GB)", "activations (GB)"]
head += ["together (GB)", "in mixed precision (GB)", "times less than stage 0"]
show.table(rows, head, caption="7 billion parameters on each of 8 GPUs, float32")


# %% [markdown]
# `````{admonition} Checked: "ZeRO-3 divides all 122 GB by 8"
# :class: checked
#
# That would be 15 GB.
# It is 24 GB: the last row.
# Activations are no model states.
# Each GPU has those of its own sequences, and nobody else has them, so there is nothing to share.
# ZeRO-3 on 8 GPUs takes 5 times less memory here, not 8 times.
# `````
#
# The picture has the last column but one, mixed precision, where the optimizer is 12 of the 16 bytes and stage 1 saves more.
#
# ![Bytes on each of 8 ranks for 7 billion parameters: stage 0 has 122 GB, stage 1 48.5 GB, stage 2 36.25 GB, stage 3 24 GB. In each of them 10 GB are activations, so that stage 3 stays above an eighth of 122 GB, which is 15.25 GB.](../figures/zero_memory.svg)
#
# Does it still train the same model?
# All three stages on four ranks, with the code of data parallelism and another wrapper:

# %%
def in_stage(stage):
    model = zero.shard(plain(), dist.group.WORLD, stage)

    def forward_and_backward(tokens, targets):
        x, y = share(tokens, targets)
        value = loss(model(x), y)
        value.backward()
        return value

    trained = train(model, forward_and_backward, model.full_state_dict)
    return trained, sum(zero.predicted_sent(model).values())


PER_PARAMETER = {1: 8 + 8 / 4, 2: 4 + 12 / 4, 3: 16 / 4}  # bytes, in float32
cases = []
for stage in (1, 2, 3):
    found, sent = zip(*ranks.run(in_stage, 4, stage, device="cpu"), strict=True)
    cases.append((f"ZeRO-{stage}", found, int(PER_PARAMETER[stage] * P), sent[0]))
compared(cases)

# %% [markdown]
# `````{admonition} Checked: "ZeRO-1 and 2 buy memory with communication"
# :class: checked
#
# They send what data parallelism sends: an all-reduce *is* a reduce-scatter and an all-gather, and stage 1 only puts the optimizer's step between the two.
# Compare 5.153 MB above with [data parallelism's](#mp-data).
# Stage 3 gathers the weights once more, for backward: 1.5 times as much, here a little less, because the embedding and the head stay whole for the step.
# `````
#
# [ZeRO](zero.md) builds the three stages, and shows FSDP2, PyTorch's stage 3.
#
# (mp-together)=
# ## Side by side
#
# One GPT, one batch, four ranks, six ways.
# All of it was counted above; the activations are predicted, from [Memory](memory.md).
# Look for a column in which one way wins alone.

# %%
ACTIVE = {
    "data parallel": memory.activations(SHAPE, 2, precision="fp32").saved,
    "pipeline": memory.activations(SHAPE, 2, precision="fp32", pp=4, stage=0).saved,
    "tensor parallel": memory.activations(SHAPE, 8, precision="fp32", tp=4).saved,
}
rows = [("one process", "1.00", "1.00", "0.00", 0)]
for name, (held, wire, messages) in FOUR.items():
    active = ACTIVE.get(name, ACTIVE["data parallel"])  # ZeRO: as data parallelism
    shares = held / ONE.states, active / kept, wire / (4 * P)
    rows.append((name, *(f"{x:.2f}" for x in shares), messages))
    assert shares[0] < 0.28 or name in ("data parallel", "ZeRO-1", "ZeRO-2")
head = ["on the fullest of four ranks", "states (of one process's)"]
head += ["activations (of one process's)", "sent in a step (of the weights' bytes)"]
show.table(rows, [*head, "calls in a step"])

# %% [markdown]
# Nothing wins everywhere.
# The pipeline sends least and waits; tensor parallelism waits for its messages; copies keep every rank busy and save no states; ZeRO-3 saves them and sends half as much again.
#
# (mp-choose)=
# ## Choosing
#
# Each technique has a price, so take the cheapest that fits, and go on only if it does not.
# The order below is that of effort: first what changes no line of the model, then what needs fast wires, last what needs a schedule.
#
# ![A flow chart with a rung for each technique. At every rung two questions: can the batch be shared out, and does the fullest rank fit into nine tenths of its memory? Yes: train. No: the next rung. After the last one: more GPUs, or larger ones. The rungs: 1, data parallel: every GPU has a copy of everything; 2, ZeRO-1: each optimizer state once among the copies; 3, ZeRO-2: each gradient once, too; 4, ZeRO-3: each weight once, too, if the wire keeps up; 5, recompute: layers keep their inputs alone; ZeRO as before; 6, tensor in the node: matrices cut, over 2, 4, … GPUs of a node; 7, pipeline across nodes: layers cut, over as few nodes as will do.](../figures/model_parallelism_choose.svg)
#
# To answer the questions one needs the machines.
# These are stated by their makers, with links as bytes per second for one GPU in one direction:

# %%
rows = [
    (m.name, f"{m.memory / GB:.0f}", m.per_node, f"{m.inside / GB:.0f}", f"{m.between / GB:.1f}",
     f"{m.flops / TB:.0f}")
    for m in strategy.MACHINES.values()
]  # fmt: skip
head = ["GPU", "memory (GB)", "in a node", "within a node (GB/s)", "between nodes (GB/s)"]
show.table(rows, [*head, "16-bit products (TFLOP/s)"])

# %% [markdown]
# `shardlab.strategy` walks the chart. What a rank holds comes from [Memory](memory.md), and a plan may use 90 % of a GPU; the rest is for what no formula counts.
# The step's time is a *floor*: every GPU at its maker's rate, every link full, all traffic hidden that can be.
# Real steps take up to twice as long, but floors rank the layouts.
# The last two columns try *all* layouts that fit, more than a hundred for each row.
# Look at how much the simple chart gives away.

# %%
JOBS = [  # model, GPU, how many, sequences in a step
    ("gpt-2", "rtx-4090", 8, 512),
    ("llama-3-8b", "h100", 8, 128),
    ("llama-3-8b", "h100", 64, 512),
    ("llama-3-70b", "h100", 64, 512),
    ("gpt-3-175b", "a100", 64, 512),
    ("gpt-3-175b", "a100", 1024, 1536),
    ("llama-3-405b", "h100", 1008, 2016),
]
rows = []
for name, gpu, gpus, sequences in JOBS:
    job = PRESETS[name], strategy.MACHINES[gpu], gpus, sequences
    rung, (best, *others) = strategy.choose(*job), strategy.fastest(*job)
    assert len(others) > 100
    assert rung.ok and rung.layout.ranks == gpus and rung.layout.batch == sequences
    floor = strategy.seconds(*job[:2], rung.layout).total
    assert 1 <= floor / best.seconds.total < 4 / 3
    size = f"{memory.parameter_count(job[0]) / GB:.1f}"
    cells = f"{rung.peak / GB:.0f} of {rung.room / GB:.0f}", f"{floor:.2f}"
    ratio = f"{floor / best.seconds.total:.2f}"
    machines = f"{gpus:,} {job[1].name}"
    says, fastest = (str(x.layout).replace("-", "\u2011") for x in (rung, best))  # no line break
    rows.append((name, size, machines, says, *cells, ratio, fastest))
head = ["model", "parameters (billion)", "machines", "the chart says", "peak (GB)"]
show.table(rows, [*head, "floor of a step (s)", "times the fastest", "the fastest is"])

# %% [markdown]
# The chart is a rule of thumb, up to a third slower than the best here, and always something that fits and that you can explain.
# (Some of the fastest put ZeRO-2 or 3 under a pipeline and hide all its messages behind the arithmetic.
# A floor allows that; a real job rarely does.)
# The rows also show how far ZeRO-3 carries, as long as each GPU has thousands of tokens to compute between two gathers.
# Tensor parallelism and pipelines come where it cannot go: where a step has fewer sequences than there are GPUs, or where one layer with its activations is too large.
#
# (mp-gpt3)=
# ## A worked example: GPT-3 on 64 GPUs
#
# GPT-3 has 175 billion parameters {cite}`brown2020gpt3`, and we have 64 A100s with 80 GB, eight in a node.
#
# `````{admonition} Checked: "350 GB of GPT-3 weights fit on five 80 GB GPUs"
# :class: checked
#
# To look at.
# Training needs 2,793 GB for the states, of which 35 such GPUs would be full, with no byte for an activation.
# And five divide neither its 96 heads nor its 96 layers.
# The next cell counts.
# `````

# %%
gpt3, a100 = PRESETS["gpt-3-175b"], strategy.MACHINES["a100"]
params = memory.parameter_count(gpt3)
weights, all_states = 2 * params, memory.states(params).total
rows = []
for what, size in (("weights in 16 bits", weights), ("all states", all_states)):
    rows.append((what, f"{size / GB:,.0f}", -(-size // int(a100.memory))))
assert [row[1:] for row in rows] == [("349", 5), ("2,793", 35)]
assert gpt3.heads % 5 and gpt3.layers % 5
show.table(rows, [f"{params / GB:.1f} billion parameters", "size (GB)", "A100s that it fills"])


# %% [markdown]
# The usual answer is 8 × 4 × 2: tensor parallelism over the $t = 8$ GPUs of a node, a pipeline of $p = 4$ nodes, and $d = 2$ copies of it all.
#
# ![Sixty-four GPUs in eight nodes of eight: two copies of the model, each cut into four stages of one node, and every matrix of a stage cut over the node's eight GPUs. Rank 0 is in three groups. Tensor: ranks 0 to 7, its node. Data: ranks 0 and 8, which have the same part in the two copies. Pipeline: ranks 0, 16, 32 and 48, one in each stage.](../figures/model_parallelism_gpt3.svg)
#
# Does it fit?
# A step has 64 sequences, so each copy runs $m = 32$ micro-batches of one.
# The table has the fullest rank's peak without and with {term}`sequence parallelism`, which divides what tensor parallelism leaves whole.
# A plan may use 72 GB.

# %%
def eight_by_four_by_two(zero, along=True):
    return strategy.Layout(2, 8, 4, zero, 1, 32, sequence_parallel=along)


held = max(sum(memory.parameters(gpt3, 8, 4, stage).values()) for stage in (0, 3))
rows, SENT, WIRE = [], {}, {}
for stage in range(4):
    states = memory.states(held, zero=stage, dp=2).total
    peaks = [strategy.peak(gpt3, eight_by_four_by_two(stage, along)) for along in (False, True)]
    SENT[stage] = sum(strategy.zero_bytes(held, stage, 2, microbatches=32).values())
    fits = "yes" if peaks[1] <= strategy.room(a100) else "no"
    sizes = [f"{size / GB:.1f}" for size in (states, *peaks)]
    WIRE[stage] = strategy.seconds(gpt3, a100, eight_by_four_by_two(stage)).data
    rows.append((stage, *sizes, fits, f"{SENT[stage] / GB:.0f}", f"{WIRE[stage]:.1f}"))
    assert peaks[0] > strategy.room(a100) and (stage == 0) == (fits == "no")
assert SENT[0] == SENT[1] and 2 * SENT[2] == 33 * SENT[1] and SENT[3] == 48 * SENT[1]
assert (round(all_states / 32 / GB), rows[0][1], rows[3][1]) == (87, "88.2", "44.1")
head = ["ZeRO between copies", "states (GB)", "peak (GB)", "peak, sequence parallel (GB)"]
head += ["fits in 72 GB", "sent to the other copy (GB)", "which takes (s)"]
show.table(rows, head, caption="Fullest of 64 GPUs")

# %% [markdown]
# Two copies alone do not fit.
# ZeRO-1 fits, once the activations are divided along the sequence too: without, its peak is above even the 80 GB.
#
# `````{admonition} Checked: "8 × 4 × 2 = 64 divides memory by 64"
# :class: checked
#
# Only the cuts divide, and copies do not: 2,793 GB / 32 are 87 GB of states on each GPU, 88 on the fullest.
# ZeRO-1 between the two copies halves the optimizer's share of it.
# A 64th, 44 GB, would be stage 3. Activations follow rules of their own.
# `````
#
# `````{admonition} Checked: "ZeRO-3 is free with a pipeline"
# :class: checked
#
# A pipeline needs many micro-batches.
# Stage 2 scatters the gradients after each of them, stage 3 gathers the weights twice for each as well.
# With 32 micro-batches that is 16.5 and 48 times the bytes of stage 1, and in seconds, last column, about as long as a step below, or longer.
# So the stage that goes with a pipeline is stage 1, and DeepSpeed allows none above it.
# `````
#
# Is this the best order of the three numbers?
# The cell tries all six, with ZeRO-1 and sequence parallelism, and as a seventh what the chart says: no cut at all, ZeRO-3 and recomputation.

# %%
ORDERS = ((8, 4, 2), (8, 2, 4), (4, 8, 2), (4, 2, 8), (2, 8, 4), (2, 4, 8))
layouts = [strategy.Layout(d, t, p, 1, 1, 64 // d, "none", True) for t, p, d in ORDERS]
layouts.append(strategy.choose(gpt3, a100, 64, 64).layout)
rows, FLOORS = [], []
for layout in layouts:
    needs, found = strategy.peak(gpt3, layout), strategy.seconds(gpt3, a100, layout)
    fits = needs <= strategy.room(a100)
    parts = found.arithmetic, found.tensor, found.bubble, found.total
    rows.append((str(layout), f"{needs / GB:.0f}", "yes" if fits else "no"))
    rows[-1] += tuple(f"{part:.2f}" for part in parts)
    FLOORS += [found.total] if fits else []
assert [row[2] for row in rows] == ["yes", *["no"] * 5, "yes"]
fastest = strategy.fastest(gpt3, a100, 64, 64)[0].seconds.total
assert FLOORS[0] == fastest < FLOORS[1] < 1.1 * fastest
assert 0.8 * FLOORS[0] < WIRE[2] < FLOORS[0] < WIRE[3]
head = ["layout", "peak (GB)", "fits in 72 GB", "arithmetic (s)", "tensor (s)", "bubble (s)"]
show.table(rows, [*head, "floor of a step (s)"], caption="GPT-3, 64 sequences, 64 A100s")

# %% [markdown]
# Of the six, 8 × 4 × 2 is the only one that fits, and no other layout of these GPUs has a lower floor.
# ZeRO-3 comes within a tenth, where each GPU has a network card of its own: it has no bubble and waits for no sum, and pays with recomputation.
# How far is the floor from reality? {cite:t}`korthikanti2022recomputation` measured this model on 64 A100s with $t = 8$, $p = 8$, three chunks a stage and 64 sequences: 13.75 seconds a step.

# %%
theirs = strategy.Layout(1, 8, 8, 0, 1, 64, "selective", True)
floor, published = strategy.seconds(gpt3, a100, theirs, chunks=3, causal=False).total, 13.75
days = {gpus: strategy.training_days(175e9, 300e9, gpus, 140e12) for gpus in (64, 1024)}
print(f"their layout: floor {floor:.1f} s, published {published} s, {floor / published:.0%} of it")
print(f"300 billion tokens at 140 TFLOP/s: {days[64]:.0f} days on 64, {days[1024]:.0f} on 1,024")
assert 0.5 < floor / published < 1 and round(days[1024]) == 34 and 500 < days[64] < 600

# %% [markdown]
# So 64 GPUs *hold* GPT-3, and would train it for a year and a half.
# The last number is the one that {cite:t}`narayanan2021megatron` state in section 5.
#
# (mp-deepspeed)=
# ## DeepSpeed in practice
#
# Nobody writes all this anew.
# DeepSpeed, one of the production engines, takes a model and a dictionary {cite}`rasley2020deepspeed`.
# Here is one for our yardstick: two ranks, eight sequences a step.

# %%
LINES = {
    "train_micro_batch_size_per_gpu": "sequences that one copy computes at a time",
    "gradient_accumulation_steps": "micro-batches before a step of the optimizer",
    "train_batch_size": "the product of both and of the copies: what the optimizer sees",
    "gradient_clipping": "largest norm of the gradients; left out it is 1.0, and not none",
    "zero_optimization": "the stage, and where offload goes",
    "zero_allow_untested_optimizer": "accept torch's own AdamW",
    "steps_per_print": "how often to log",
}
settings = de.config(micro_batch=2, world_size=2, accumulation=2, zero=1)
assert list(settings) == list(LINES) and settings["train_batch_size"] == 2 * 2 * 2 == BATCH
show.table([(name, json.dumps(settings[name]), LINES[name]) for name in settings],
           ["line", "value", "what it does"])  # fmt: skip

# %% [markdown]
# Now it runs: every stage, and a pipeline of two stages, whose accumulation steps are its micro-batches.
# The losses have to be those of one process at the top of this page.

# %%
de.prepare()  # imports DeepSpeed once, before any rank starts


def by_deepspeed(cases):
    """On a rank: losses and weights after five steps, for each configuration."""
    found = {}
    for name, settings in cases.items():
        stages = settings.get("pipeline", {}).get("stages", 1)
        module = de.pipeline(plain(), stages) if stages > 1 else plain()
        engine = de.initialize(module, settings)
        parts, losses = engine.gradient_accumulation_steps(), []
        for step in range(STEPS):
            mine = batch(step) if stages > 1 else share(*batch(step))
            pairs = zip(*(tensor.chunk(parts) for tensor in mine), strict=True)
            losses.append(de.step(engine, list(pairs)))
        found[name] = losses, de.weights(engine)
    return found


CASES = {f"ZeRO-{zero}": de.config(2, 2, accumulation=2, zero=zero) for zero in (0, 1, 2, 3)}
CASES["pipeline, ZeRO-1"] = de.config(2, 2, accumulation=4, pp=2, zero=1)
rows = []
for name, (losses, weights) in ranks.run(by_deepspeed, 2, CASES, device="cpu")[0].items():
    in_loss = max(abs(a - b) for a, b in zip(losses, ONE.losses, strict=True))
    in_weights = max((weights[n] - w).abs().max().item() for n, w in ONE.weights.items())
    assert in_loss < 1e-4 and in_weights < 5e-3  # float32, as above
    rows.append((name, f"{losses[-1]:.4f}", f"{in_loss:.0e}", f"{in_weights:.0e}"))
show.table(rows, ["configuration", "last loss", "losses differ by", "weights differ by"])

# %% [markdown]
# What cannot go together is refused, and for the reasons of the last section:

# %%
for wrong in ({"pp": 4, "zero": 2}, {"pp": 4, "tp": 8}):
    try:
        de.config(1, 64, accumulation=32, precision="bf16", **wrong)
        raise AssertionError("this was meant to be refused")
    except ValueError as error:
        print(textwrap.fill(str(error), 90))

# %% [markdown]
# The second line means that DeepSpeed alone does not do 8 × 4 × 2: for that it is joined with Megatron-LM, whose layers are cut already.
# [DeepSpeed](deepspeed_engine.md) explains each line, what it costs, and what happens to a line that is misspelt.
#
# (mp-cases)=
# ## Two use cases
#
# ![Two jobs on four nodes of four GPUs. A large model: there are two copies, and each gets half of the batch. A copy is a pipeline of two nodes, with layers 1 and 2 on the first and 3 and 4 on the second; inside a node each GPU has a quarter of every matrix. A small model and much data: every GPU has all layers, and a sixteenth of the batch for itself.](../figures/model_parallelism_stacks.svg)
#
# **A large model.** Llama 3 405B on 1,008 H100s, in the form of the picture's upper half.
# Techniques are stacked from the inside out: matrices over a node, layers over nodes, copies of that, ZeRO-1 between the copies.
# Look at what each of them adds; 72 GB are there.

# %%
huge, machine = PRESETS["llama-3-405b"], strategy.MACHINES["h100"]
STACK = [
    ("nothing", {}),
    ("t = 8, in the node", {"tp": 8}),
    ("sequence parallelism", {"tp": 8, "sequence_parallel": True}),
    ("p = 6, across nodes", {"tp": 8, "sequence_parallel": True, "pp": 6}),
    ("d = 21 copies, ZeRO-1", {"tp": 8, "sequence_parallel": True, "pp": 6, "dp": 21, "zero": 1}),
]
STACK.append(("recomputation", STACK[-1][1] | {"recompute": "full"}))
rows = []
for what, degrees in STACK:
    layout = strategy.Layout(**degrees, microbatches=96)
    needs = strategy.peak(huge, layout)
    rows.append((what, layout.ranks, f"{needs / GB:,.0f}"))
assert needs <= strategy.room(machine)
assert layout == strategy.choose(huge, machine, 1008, 2016).layout
head = ["added", "GPUs", "peak of the fullest (GB)"]
show.table(rows, head, caption="Llama 3 405B, micro-batches of one sequence of 8,192 tokens")

# %% [markdown]
# **A small model and much data.** GPT-2 with 124 million parameters on 64 A100s.
# It fits on each of them, so nothing is cut.
# To cut it anyway costs time, as the last row shows, and saves memory that nobody needs.

# %%
small, rows, CUT = PRESETS["gpt-2"], [], {}
for d, t, m in ((1, 1, 64), (8, 1, 8), (64, 1, 1), (16, 4, 4)):
    layout = strategy.Layout(d, t, 1, 0, 8, m, sequence_parallel=t > 1)
    time_, needs = strategy.seconds(small, a100, layout), strategy.peak(small, layout)
    CUT[d, t] = time_.total
    tokens_ = layout.batch * small.seq / time_.total
    cells = f"{needs / GB:.1f}", f"{1e3 * time_.total:.0f}", f"{1e3 * time_.data:.0f}"
    rows.append((str(layout), *cells, f"{tokens_ / 1e6:.1f}"))
assert CUT[64, 1] < 1.02 * CUT[1, 1] / 64 and CUT[16, 4] > 1.2 * CUT[64, 1]
assert strategy.choose(small, a100, 64, 512).layout.dp == 64
assert round(memory.parameter_count(small) / 1e6) == 124
head = ["layout", "peak (GB)", "floor of a step (ms)", "gradients on the wire (ms)"]
show.table(rows, [*head, "tokens (million/s)"], caption="GPT-2, 512 sequences of 1,024 tokens")

# %% [markdown]
# (mp-more)=
# ## Three more cuts
#
# ![Six things that four ranks can share. Activations are a block of sequences, tokens and width: data parallelism cuts the sequences of the batch, context parallelism the tokens of each sequence, tensor parallelism the width of each layer. Of the model, a pipeline cuts the layers, ZeRO the states of every layer, and expert parallelism deals out the experts, to which each token is sent by a router.](../figures/model_parallelism_cuts.svg)
#
# **Sequence parallelism** belongs to tensor parallelism.
# What that leaves whole, norms and the stream between layers, works on each token by itself, so it is cut along the tokens; the all-reduce becomes a reduce-scatter and an all-gather, with the same bytes.
# A layer of GPT-3 keeps little more than a third: first row below.
#
# **Context parallelism** cuts the tokens everywhere, for sequences that no GPU can hold.
# Everything but attention never notices.
# For attention, keys and values go around a ring ({term}`ring attention`), or an {term}`all-to-all` deals out heads instead of tokens.
# Eight ranks hold an eighth of the activations of 131,072 tokens: second row.
# [Sequence parallelism](sequence_parallel.md) has both.
#
# **Expert parallelism.** A layer can have many feed-forward networks, *experts*, of which a router picks a few for each token.
# The model has many more parameters, and a token meets few of them.
# Experts live on different ranks; an all-to-all takes tokens to their experts, and a second one takes the results back.
# The third row gives Llama 3 8B eight experts, of which each token uses two. {cite:t}`deepseek2024v3` trained 671 billion parameters in this way, 37 billion of them for each token.

# %%
ways = [
    memory.activations(gpt3, tp=8, sequence_parallel=along, device="gpu").layer
    for along in (False, True)
]
whole = memory.activations(llama, seq=131_072, device="gpu").saved
sizes = memory.parameters(llama)
dense = sum(sizes.values())
experts, active = (dense + (n - 1) * sizes["ffn"] for n in (8, 2))
met = [f"{size / GB:.1f}" for size in (experts, active)]
rows = [
    ("GPT-3, kept by a layer on t = 8", "MB", *(f"{size / 1e6:.0f}" for size in ways)),
    ("Llama 3 8B, kept of 131,072 tokens", "GB", f"{whole / GB:.0f}", f"{whole / 8 / GB:.0f}"),
    ("Llama 3 8B with 8 experts: all weights, and those of one token", "billion", *met),
]
assert 0.3 < ways[1] / ways[0] < 0.4 and experts / active > 3
show.table(rows, ["what", "unit", "before", "after"])

# %% [markdown]
# (mp-table)=
# ## What each costs and buys
#
# | technique | for | against | numbers from |
# |---|---|---|---|
# | data parallelism | no line of the model changes; 99 % of ideal on 512 GPUs | states are copied: 16 bytes per parameter on every GPU; 17 % of ideal on 4,096 | [data parallelism](#mp-data) |
# | ZeRO-1, 2 | states of 10 and 7 bytes per parameter instead of 16 on four ranks; no byte more on the wire | stage 2 sends with each micro-batch: 16.5 times as much under a pipeline of 32 | [ZeRO](#mp-zero), [GPT-3](#mp-gpt3) |
# | ZeRO-3 | 4 bytes instead of 16: states of any size, with enough GPUs | 1.5 times the bytes, 25 messages in place of 2; activations stay: 24 GB, not 15 | [ZeRO](#mp-zero), [side by side](#mp-together) |
# | recomputation | keeps a ninth of the activations here | at most a third more arithmetic, 21 % here | [the problem](#mp-problem) |
# | pipeline | least on the wire, a tenth of data parallelism's here | idle 43 % of the time with as many micro-batches as stages, 16 % with four times as many | [pipeline](#mp-pipeline) |
# | tensor parallelism | every rank works on every layer; 25 % of the states | 14 times a pipeline's bytes, in 20 messages that are waited for; keeps 43 % of the activations on four ranks | [tensor parallelism](#mp-tensor) |
# | sequence parallelism | keeps 102 MB of a layer instead of 278 MB, for the same bytes | belongs to tensor parallelism | [three more cuts](#mp-more) |
# | context parallelism | an eighth of the activations on 8 ranks: 97 GB instead of 776 GB | keys and values travel in each layer | [three more cuts](#mp-more) |
# | experts | 47.5 billion parameters for the arithmetic of 13.7 | all 47.5 are held; two all-to-alls in each layer | [three more cuts](#mp-more) |
#
# The next cell holds the table to the numbers above.

# %% tags=["hide-input"]
states, wire, calls = ({name: row[i] for name, row in FOUR.items()} for i in range(3))
assert [round(100 * SPEEDUP[n] / n) for n in (512, 4096)] == [99, 17]
assert [round(states[f"ZeRO-{z}"] / P) for z in (1, 2, 3)] == [10, 7, 4]
assert abs(wire["ZeRO-1"] / wire["data parallel"] - 1) < 0.001
assert round(wire["ZeRO-1"] / 1e6, 3) == 5.153
assert abs(wire["ZeRO-3"] / wire["data parallel"] - 1.5) < 0.05  # embedding and head stay
assert (calls["data parallel"], calls["ZeRO-3"], calls["tensor parallel"]) == (2, 25, 20)
assert round(kept / kept_again) == 9 and round(100 * (RECOMPUTE - 1)) == 21
assert round(wire["data parallel"] / wire["pipeline"]) == 10
assert [round(100 * BUBBLE["1f1b", m]) for m in (4, 16)] == [43, 16]
assert round(wire["tensor parallel"] / wire["pipeline"]) == 14 and round(100 * KEPT) == 43
assert [round(way / 1e6) for way in ways] == [278, 102] and round(whole / 8 / GB) == 97
assert (f"{experts / GB:.1f}", f"{active / GB:.1f}") == ("47.5", "13.7")
print("all numbers of the table are those of this page")

# %% [markdown]
# ## What goes wrong, and how it looks
#
# In a real job four numbers show that parallelism is set up right, whichever you chose.
# The first loss and the first norm of the gradients are those of one process; a rank holds the predicted bytes after its first step; it sends the predicted bytes in a step; with twice the GPUs a step takes the predicted time.
# If one of them is off:
#
# | what you see | what it often is | more in |
# |---|---|---|
# | everything stands still, and no error | a rank left out a collective, or two stages follow two schedules | [Collectives](collectives.md), [Pipeline parallelism](pipeline.md) |
# | the first loss is right, later ones are not | a missing all-reduce in backward | [Tensor parallelism](tensor_parallel.md) |
# | weights that all ranks have whole come apart | ranks draw different dropout, or the same missing all-reduce | [Tensor parallelism](tensor_parallel.md) |
# | the norm of the gradients is $d$, $t$ or $m$ times too large | a sum where a mean belongs; a bias or a loss added by each rank; no division by the micro-batches | [Data parallelism](data_parallel.md), [Pipeline parallelism](pipeline.md) |
# | ZeRO-3 runs out of memory though the states fit | activations, buckets, or the model wrapped as one unit | [ZeRO](zero.md) |
# | a weight has the shape 0 | read outside of forward, in ZeRO-3 | [ZeRO](zero.md), [DeepSpeed](deepspeed_engine.md) |
# | more GPUs, and no shorter step | the wire takes longer than backward | [Data parallelism](data_parallel.md) |
#
# ## On more GPUs
#
# This page runs on any machine, because its ranks share what there is, and so its bytes and its losses are those of any cluster, and its times of none.
# A second GPU would add the two things that are only predicted here: copies that really take half the time, and a wire with a rate of its own, against which overlap can be measured.
# Eight in one node would show what tensor parallelism gains from fast links.
#
# ## Exercises
#
# Each exercise has a check; the sixth runs your answer on four real ranks.
#
# ```{exercise-start} What training holds (easy)
# :label: ex-map-training
# ```
#
# 70 billion parameters are trained in mixed precision: 16-bit weights and gradients, AdamW.
# How many bytes of model states are there in the whole job, before anything is cut or shared, and without activations?

# %%
answer = ...  # bytes
check(answer, "training_bytes")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-map-training
# :label: sol-map-training
# :class: dropdown
# ```
#
# Weights and gradients have 2 bytes each; master weights and AdamW's two states have 4 bytes each: 16 for each parameter.

# %%
answer = 70e9 * (2 + 2 + 4 + 4 + 4)
check(answer, "training_bytes")

# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} What copies tell each other (easy)
# :label: ex-map-gradients
# ```
#
# A model of 7 billion parameters is trained on 8 GPUs, each with a copy of it.
# Gradients have 2 bytes.
# How many bytes does each GPU send in one step, when a ring adds up the gradients?

# %%
answer = ...  # bytes
check(answer, "gradient_traffic")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-map-gradients
# :label: sol-map-gradients
# :class: dropdown
# ```
#
# A ring's all-reduce sends $2(N-1)/N$ of the tensor: once around to add up, once around to hand out.

# %%
answer = 2 * 7 / 8 * 7e9 * 2
check(answer, "gradient_traffic")


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Keep the stages busy (medium)
# :label: ex-map-busy
# ```
#
# A pipeline of `p` equal stages should be busy for at least `percent` percent of a step, a whole number below 100.
# Return the smallest number of micro-batches that does it.
# Mind that 0.9 is no exact number in a computer: count in whole ones.

# %%
def my_busy_microbatches(p, percent):
    pass  # your code


check(my_busy_microbatches)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-map-busy
# :label: sol-map-busy
# :class: dropdown
# ```
#
# Busy is $m/(m+p-1)$.
# From $100\,m \ge \text{percent}\,(m+p-1)$ follows $m \ge \text{percent}\,(p-1)/(100-\text{percent})$, rounded up, and one at least.

# %%
def my_busy_microbatches(p, percent):
    return max(1, -(-percent * (p - 1) // (100 - percent)))


check(my_busy_microbatches)

# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} How many GPUs? (medium)
# :label: ex-map-gpus
# ```
#
# 70 billion parameters, 16 bytes of states for each, are trained with ZeRO-3. Each GPU also holds 10 GB of activations, gathered layers and buffers.
# GPUs have 80 GB, of which a job plans with 90 %, and stand in nodes of 8. How many GPUs are needed, in whole nodes?

# %%
answer = ...  # GPUs
check(answer, "gpus_needed")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-map-gpus
# :label: sol-map-gpus
# :class: dropdown
# ```
#
# 72 GB less the 10 that nothing divides leave 62 GB for states: 1,120 / 62 = 18.1 GPUs, which are three nodes.

# %%
alone = math.ceil(70e9 * 16 / (0.9 * 80e9 - 10e9))
answer = math.ceil(alone / 8) * 8
check(answer, "gpus_needed")


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} ZeRO under a pipeline (medium)
# :label: ex-map-zero-pipeline
# ```
#
# A stage of a pipeline has `params` parameters and `d` copies.
# A step has `m` micro-batches; weights and gradients have 2 bytes.
# Return a list of four numbers: the bytes that a rank sends to the other copies in one step, in ZeRO's stages 0 to 3. Stages 0 and 1 send gradients when the last micro-batch is done; stages 2 and 3 after each, because they keep a share of them only.
# Stage 3 gathers the weights again for each forward and each backward.
# $d$ divides `params`.

# %%
def my_zero_traffic(params, d, m):
    pass  # your code


check(my_zero_traffic)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-map-zero-pipeline
# :label: sol-map-zero-pipeline
# :class: dropdown
# ```
#
# An all-reduce is twice $(d-1)/d$ of the gradients; a reduce-scatter and an all-gather are once each.

# %%
def my_zero_traffic(params, d, m):
    once = 2 * params * (d - 1) // d  # one reduce-scatter, or one all-gather
    return [2 * once, 2 * once, (m + 1) * once, 3 * m * once]


check(my_zero_traffic)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Two groups at once (hard)
# :label: ex-map-grid
# ```
#
# Four ranks train `y_BF = x_BH @ w_FH.T` as two copies of two shards.
# The loss is half of the sum of `y_BF ** 2`, divided by the sequences of *all* copies.
# Each rank has its copy's `x_BH`, and `w_fH`, its share of the rows of `w_FH`.
# `tensor_group` holds the ranks that share one copy, `data_group` the ranks of all copies that hold the same share.
# Return the loss of the whole batch, the same on all ranks, and the gradient of `w_fH`.
# Copies have equally many sequences.
# Derivative: the gradient of `w_fH` is `y_Bf.T @ x_BH` over the sequences.

# %%
def my_grid_step(x_BH, w_fH, tensor_group, data_group):
    pass  # your code


check(my_grid_step)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-map-grid
# :label: sol-map-grid
# :class: dropdown
# ```
#
# Shards are parts of one sum: the loss adds up over the tensor group.
# Copies are averaged.
# The gradient of a share belongs to that share alone: it is averaged over the copies, and the tensor group has nothing to say to it.

# %%
def my_grid_step(x_BH, w_fH, tensor_group, data_group):
    y_Bf = x_BH @ w_fH.T
    loss = (y_Bf**2).sum() / 2 / len(x_BH)
    gradient_fH = y_Bf.T @ x_BH / len(x_BH)
    copies = dist.get_world_size(data_group)
    dist.all_reduce(loss, group=tensor_group)
    dist.all_reduce(loss, group=data_group)
    dist.all_reduce(gradient_fH, group=data_group)
    return loss / copies, gradient_fH / copies


check(my_grid_step)

# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} GPT-3 on 64 GPUs (design)
# :label: ex-map-layout
# ```
#
# Lay out GPT-3 with its 175 billion parameters on 64 A100s, 8 in a node, for steps of 512 sequences of 2,048 tokens.
# The fullest GPU should need no more than 72 GB, and the floor of a step should be no more than 65 s.
# More than one layout does it; the check says what yours lacks.

# %%
# strategy.Layout(dp=…, tp=…, pp=…, zero=…, micro_batch=…, microbatches=…,
#                 recompute=…, sequence_parallel=…)
layout = ...
check(layout, "my_layout")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-map-layout
# :label: sol-map-layout
# :class: dropdown
# ```
#
# Eight GPUs of a node share each matrix, four nodes stand behind one another, and two such copies share the optimizer by ZeRO-1. One sequence at a time makes 256 micro-batches, so that the bubble is about 1 %.

# %%
layout = strategy.Layout(
    dp=2, tp=8, pp=4, zero=1, micro_batch=1, microbatches=256, sequence_parallel=True
)
check(layout, "my_layout")

# %% [markdown]
# ```{solution-end}
# ```
#
# ## Summary
#
# - Training holds 16 bytes for each parameter with AdamW, in float32 and in mixed precision, and activations on top.
# - Copies divide the batch, a pipeline the layers, tensor parallelism the matrices, ZeRO the states that copies hold many times.
# - Each of them computes what one process computes; each is told from the others by what it holds, sends and waits for.
# - Activations are no model states: ZeRO leaves them, tensor parallelism divides a part.
# - Tensor parallelism inside a node, pipelines across nodes, copies outside of both, with ZeRO-1 where there is a pipeline.
# - Take the first rung of the chart that fits; then measure, because a floor is not a step.
#
# ## Further reading
#
# - {cite:t}`shoeybi2019megatron`, {cite:t}`huang2019gpipe` and {cite:t}`rajbhandari2020zero`: the papers that tensor parallelism, micro-batches and ZeRO come from.
# - {cite:t}`narayanan2021megatron`: the three together, with the formulas behind the choice, on up to 3,072 GPUs.
# - {cite:t}`korthikanti2022recomputation`: every activation counted, sequence parallelism, and the published time above.
# - {cite:t}`dubey2024llama3`, section 3.3: how Llama 3 405B was laid out, and what went wrong meanwhile.
