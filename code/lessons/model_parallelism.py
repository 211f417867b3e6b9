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
# # Model parallelism: training models too large for one GPU
#
# After this lesson you can
#
# - say how many bytes training needs, and what each technique divides, sends and waits for;
# - write data parallelism, a pipeline, a tensor-parallel layer and ZeRO in a dozen lines each, and compare each with one process;
# - choose among these techniques for a given model and cluster.
#
# The 70.6 billion weights of Llama 3 70B are 282 GB in float32; an H200 has 141 GB.
#
# ## One model, one process

# %% tags=["hide-input"]
# Imports, and the small GPT that every cell trains
import math
import time
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardcourse.exercises import check
from shardlab import deepspeed_engine as de
from shardlab import memory, ranks, zero
from shardlab import tensor_parallel as tp
from shardlab.common import show, text
from shardlab.gpt.model import GPT, PRESETS, Config, loss
from shardlab.layout import Layout
from shardlab.measure import count
from shardlab.ranks.torch_compat import all_gather_single, reduce_scatter_single
from shardtools import strategy

show.set_style()
GB = 1e9
# Four layers and four heads, so that four ranks can divide either.
SHAPE = Config(seq=64, layers=4, heads=4, hidden=128, bias=False, tied=False)
P, STEPS, BATCH = memory.count_parameters(SHAPE), 5, 8


def small_gpt():
    """Return a GPT with the same initial weights at every call."""
    torch.manual_seed(0)
    return GPT(SHAPE).to(ranks.device())


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=False)


def step_alone(model, optimizer):
    """Update after backward on one process: the optimizer step alone."""
    optimizer.step()


def batch(step):
    """Return the whole batch of a step: tokens and targets, each [8, 64]."""
    tokens, targets = text.get_batch(SHAPE.seq, BATCH, start=step * BATCH)
    return tokens.to(ranks.device()), targets.to(ranks.device())


# %% [markdown]
# This page trains one small GPT, of four layers and 853,120 parameters, in several ways.
# The first is one process: five steps of AdamW on eight sequences each.

# %%
def train(model, batch=batch, update=step_alone, parameters=None):
    optimizer = adamw(parameters or model.parameters())
    losses = []
    for step in range(STEPS):
        tokens, targets = batch(step)  # eight sequences of 64 tokens
        optimizer.zero_grad()
        value = loss(model(tokens), targets)
        value.backward()
        update(model, optimizer)  # here no more than optimizer.step()
        losses.append(value.item())
    return losses, model, optimizer


# %% [markdown]
# Every other way must reproduce these losses and weights, up to rounding.
# Most call this loop with another `model`, `batch` or `update`.

# %% tags=["hide-input"]
# Trains on one process, and keeps losses and weights as the reference
class Trained(NamedTuple):
    losses: list  # of each step, where this rank knows it
    weights: list  # after the last step
    states: int  # bytes of weights, gradients and optimizer
    sent: float  # bytes that this rank sends in a step
    calls: float  # messages and collectives of this rank in a step


def on_wire(sent):
    """Return the bytes that this rank sends, given the tensors it passed to collectives."""
    n, total = dist.get_world_size(), sent.bytes
    for name, size in sent.payload.items():
        if name.startswith("all_gather"):
            total += (n - 1) * size
        elif name.startswith("reduce_scatter"):
            total += (n - 1) / n * size
        else:  # an all-reduce
            total += 2 * (n - 1) / n * size
    return total


def counted(technique, *args):
    """Run `technique` on this rank, and count the bytes it holds and sends per step."""
    marks = []  # at each optimizer step: bytes and calls so far

    def mark(*_):
        marks.append((on_wire(sent), sum(sent.calls.values()) + sent.messages))

    with count.record_traffic() as sent:
        hook = register_optimizer_step_post_hook(mark)
        losses, module, optimizer = technique(*args)
        hook.remove()
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    held = [*stepped, *module.parameters()]
    held += [p.grad for p in held]
    held += [s[name] for s in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    states = count.sum_bytes(t for t in held if t is not None)
    # ZeRO-3 and tensor parallelism gather their full weights here.
    full = getattr(module, "full_state_dict", None)
    weights = [w.detach().cpu() for w in (full().values() if full else module.parameters())]
    each = ((last - first) / (STEPS - 1) for first, last in zip(marks[0], marks[-1]))
    return Trained(losses, weights, states, *each)


def one_process():
    return train(small_gpt())


ONE = ranks.run(counted, 1, one_process)[0]
assert ONE.states == 16 * P and ONE.sent == 0
print("losses of one process:", ", ".join(f"{x:.4f}" for x in ONE.losses))

# %% [markdown]
# (mp-problem)=
# ## Why one GPU is not enough: memory and time
#
# This loop holds each weight, its gradient, and two running means that AdamW keeps.
# In float32 these *model states* are 4 × 4 = **16 bytes for each parameter**.
# The *activations* come on top: the tensors that forward computes and backward needs again.
#
# ![Memory of one GPU during a step of Llama 3 8B in float32. Weights and AdamW's two means, 96 GB together, are there all the time. Activations grow during forward, to 101 GB. During backward they are freed, and gradients take their place, up to 32 GB. The peak of 198 GB is at the end of forward; the four parts add up to 230 GB.](../figures/model_parallelism_step.svg)
#
# Backward frees activations while it makes gradients.
# So the *peak*, the most that a GPU holds at any moment, is less than the sum of the parts: here 198 GB, not 230.

# %% tags=["hide-input"]
# Table: memory of training on one sequence, in float32
rows = []
for name in ("llama-3-8b", "llama-3-70b"):
    config = PRESETS[name]
    one = memory.estimate_step(config, precision="fp32", device="gpu")
    states = memory.estimate_states(memory.count_parameters(config), precision="fp32")
    assert states.total == 4 * states.parameters == 16 * memory.count_parameters(config)
    assert 160 * GB > strategy.MACHINES["h200"].memory and one.peak > 190 * GB
    assert one.peak < states.total + one.activations and config.seq == 8192
    sizes = states.parameters, states.total, one.activations, one.peak
    rows.append((name, *(f"{size / GB:,.0f}" for size in sizes)))
assert [row[1:] for row in rows] == [
    ("32", "128", "101", "198"),
    ("282", "1,129", "449", "1,295"),
]
head = ["model", "weights (GB)", "all states (GB)", "activations (GB)", "peak (GB)"]
show.table(rows, head, caption="One GPU, float32, one sequence of 8,192 tokens")

# %% [markdown]
# Neither fits: an H100 has 80 GB, an H200 141.
#
# `````{admonition} Only if you count the weights alone: "a 70B model needs 280 GB"
# :class: checked
#
# Its *weights* need 280 GB in float32; its model states are 1,129 GB, and activations come on top.
# `````
#
# Computing in 16 bits halves the activations.
# The states stay at 16 bytes: AdamW then keeps a float32 copy of each weight.
# *Recomputation* keeps only each layer's input, and runs the layer's forward again in backward: a third more arithmetic at most.
# [Memory](memory.md) predicts these sizes, and counts them to the byte.
#
# The second limit is time: 6 operations for each weight and token, 2 in forward and 4 in backward.
# Llama 3 8B was trained on 15 trillion tokens {cite}`dubey2024llama3`.
# One H100 does 989 trillion operations a second in 16 bits; 40 % of this is a good result.

# %% tags=["hide-input"]
# Computes how many years one H100 would train Llama 3 8B
seconds = 6 * 8.03e9 * 15e12 / (0.4 * 989e12)
print("on one H100:", round(seconds / (365 * 24 * 3600)), "years")

# %% [markdown]
# ## Four ways to divide the work
#
# A *rank* is a process with a number, usually with a GPU of its own; on this page four ranks are real processes.
# Operations that all ranks call together are *collectives*.
# After an *all-reduce* every rank has the sum, or the mean, of all ranks' tensors.
#
# ![Four ways to train one model of four layers on four ranks. Data parallelism: each rank has a quarter of the batch and all four layers; gradients are sent. ZeRO, stage 3: each rank has a quarter of the batch, and a quarter of every layer's weights, gradients and optimizer states; weights and gradients are sent. Pipeline: each rank has one layer, and the whole batch passes through all of them; activations are sent to the next rank. Tensor parallelism: each rank has the whole batch and a quarter of every layer's matrices; activations are summed in every layer.](../figures/model_parallelism_ways.svg)

# %% tags=["hide-input"]
# Defines `beside_one_process`: compares losses and weights with one process
FOUR = {}  # what each technique held and sent on four ranks: filled below


def full(found):
    """Return the full weights: join the ranks' shards, or concatenate the stages' lists."""
    if len(found[0].weights) < len(ONE.weights):
        return [w for rank in found for w in rank.weights]
    joined = []
    for *pieces, one in zip(*(rank.weights for rank in found), ONE.weights, strict=True):
        cut = [d for d in range(one.dim()) if pieces[0].shape[d] != one.shape[d]]
        assert cut or all(p.equal(pieces[0]) for p in pieces)  # copies
        joined.append(torch.cat(pieces, cut[0]) if cut else pieces[0])
    return joined


def apart(found, one):
    """Return the largest differences: of a step's loss, and of a weight after the last step."""
    steps = zip(*(rank.losses for rank in found))
    known = [[x for x in step if x is not None] for step in steps]
    losses = [sum(step) / len(step) for step in known]
    pairs = zip(full(found), one.weights, strict=True)
    in_weights = max((a - b).abs().max().item() for a, b in pairs)
    return max(abs(a - b) for a, b in zip(losses, one.losses, strict=True)), in_weights


def beside_one_process(name, technique, *args, device="auto"):
    FOUR[name] = ranks.run(counted, 4, technique, *args, device=device)
    in_losses, in_weights = apart(FOUR[name], ONE)
    # Where a gradient is nearly 0, rounding decides which way AdamW moves a weight, by
    # 0.001 in a step. Losses: 4 sqrt(512) 2^-24 of 5.5, and 2 * 0.001 * 0.01.
    assert in_losses < 5e-5 and in_weights < 5e-3, (name, in_losses, in_weights)
    off = [f"within {x:.0e}" if x else "equal" for x in (in_losses, in_weights)]
    print(f"{name}, beside one process: losses {off[0]}, weights {off[1]}")


# %% [markdown]
# (mp-data)=
# ## Data parallelism: copies
#
# Every rank has a copy of the whole model, a *replica*, and a quarter of the batch.
# After backward the ranks average their gradients.
#
# ![Four ranks. Each has a quarter of the batch, all weights, and computes gradients of its own. An all-reduce averages the gradients; then all four ranks have the same gradients and make the same optimizer step.](../figures/data_parallel_replicas.svg)

# %%
def local_batch(step):
    rank, n = dist.get_rank(), dist.get_world_size()
    return [tensor.chunk(n)[rank] for tensor in batch(step)]  # two of the eight sequences


def average_and_step(model, optimizer):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
    optimizer.step()


def data_parallel():
    return train(small_gpt(), local_batch, average_and_step)


# %% [markdown]
# Ranks have equally many sequences, so the mean of their four losses is the loss of the whole batch.
# No weight is sent: the replicas begin equal, and equal gradients keep them equal.

# %% tags=["hide-input"]
# Compares four replicas with one process
beside_one_process("data parallel", data_parallel)

# %% [markdown]
# In a *ring* each rank sends only to the next; for an all-reduce of $S$ bytes each of $N$ ranks sends $2\frac{N-1}{N}S$, less than $2S$: [Collectives](collectives.md) shows why.
#
# Replicas divide the batch, and with it time and activations.
# They do not divide the states: **the whole model must fit on one GPU**.
#
# `````{admonition} Only if gradients are sent during backward: "N GPUs train N times as fast"
# :class: checked
#
# With more GPUs backward is shorter, but gradients are as large as before.
# `````

# %% tags=["hide-input"]
# Table: predicted speedup of N replicas
h100, llama = strategy.MACHINES["h100"], PRESETS["llama-3-8b"]
params, rows, SPEEDUP = memory.count_parameters(llama), [], {}
# Seconds on one GPU, of which two thirds are backward
compute = 6 * params * 4e6 / (0.4 * h100.flops)
for n in (64, 512, 4096):
    # seconds, with gradients of 2 bytes
    sending = 2 * (n - 1) / n * 2 * params / h100.network_bandwidth
    step = compute / n / 3 + max(2 * compute / n / 3, sending)
    SPEEDUP[n] = compute / step
    cells = 2e3 * compute / n / 3, 1e3 * sending, SPEEDUP[n]
    rows.append((f"{n:,}", *(f"{x:,.0f}" for x in cells)))
assert [round(100 * SPEEDUP[n] / n) for n in SPEEDUP] == [100, 99, 17]
head = ["GPUs", "backward (ms)", "sending gradients (ms)", "speedup over one GPU"]
show.table(rows, head, caption="Predicted: Llama 3 8B on H100s, 4 million tokens in a step")


# %% [markdown]
# [Data parallelism](data_parallel.md) packs the 35 gradients into *buckets*, which it sends during backward, as PyTorch's `DistributedDataParallel` does.
#
# (mp-pipeline)=
# ## Pipeline parallelism: a cut by layers
#
# If the model does not fit, give each rank some of its layers: a {term}`stage`.
# Activations go to the next rank, and in backward their gradients come back.

# %% tags=["hide-input"]
# Defines `receive`, and `my_stage`: a rank's layers of the small GPT
def receive(like, source):
    """Receive activations, or their gradient, from a neighbouring stage: [b, s, h]."""
    x = torch.empty(*like.shape[:2], SHAPE.hidden)
    dist.recv(x, source)
    return x.requires_grad_()


def my_stage():
    model, rank = small_gpt(), dist.get_rank()
    layers = [model.embedding, *model.blocks, model.norm, model.head]
    return nn.Sequential(*layers[(0, 2, 3, 4)[rank] : (2, 3, 4, 7)[rank]])


# %% [markdown]
# A batch is split into $m$ *micro-batches*; a stage runs all their forwards, then all their backwards:

# %%
def pipeline_step(stage, micro_batches):
    rank, last, kept = dist.get_rank(), dist.get_world_size() - 1, []
    for tokens, targets in micro_batches:
        x = tokens if rank == 0 else receive(tokens, rank - 1)
        y = stage(x)
        if rank < last:
            dist.send(y.detach(), rank + 1)
        else:
            y = loss(y, targets) / len(micro_batches)
        kept.append((x, y))
    for x, y in kept:
        y.backward(receive(y, rank + 1) if rank < last else None)
        if rank > 0:
            dist.send(x.grad, rank - 1)
    return kept


# %% [markdown]
# With $m = 1$ this is the *naive pipeline*: at any time three ranks wait.
# With $m = 4$ stages work on several micro-batches at once: this is GPipe {cite}`huang2019gpipe`.

# %% tags=["hide-input"]
# Compares both pipelines with one process
def in_stages(m):
    stage, last = my_stage(), dist.get_rank() == dist.get_world_size() - 1
    optimizer = adamw(stage.parameters())
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        pairs = zip(*(tensor.chunk(m) for tensor in batch(step)), strict=True)
        kept = pipeline_step(stage, list(pairs))
        losses.append(sum(y.item() for _, y in kept) if last else None)
        optimizer.step()
    return losses, stage, optimizer


# CPU: ranks that share a GPU use gloo, which has no point-to-point sends of GPU tensors
beside_one_process("naive pipeline", in_stages, 1, device="cpu")
# CPU: plain sends, which wait
beside_one_process("pipeline", in_stages, 4, device="cpu")


# %% [markdown]
# ![Three timelines of four stages on one axis; a backward takes twice as long as a forward. Naive: the whole batch at once, one stage computes at a time, each is busy 25 % of the time. GPipe with four micro-batches: all forwards, then all backwards; stages overlap, each is busy 57 % of the time. 1F1B with four micro-batches: each backward begins as early as it can; it takes exactly as long as GPipe.](../figures/model_parallelism_bubble.svg)
#
# The time in which a stage is idle is the *bubble*.
# Each of the $p$ stages works in $m$ of a step's $m+p-1$ time slots, so the bubble is $\frac{p-1}{m+p-1}$ of the step.
# The table measures the busy share of stages that sleep instead of computing.

# %% tags=["hide-input", "measured"]
# Table: busy share of four stages, by the formula and measured
class Sleep(torch.autograd.Function):
    """Sleep one unit of time per sequence in forward, two in backward."""

    @staticmethod
    def forward(ctx, x_BSH, unit):
        ctx.seconds = 2 * unit * len(x_BSH)
        time.sleep(ctx.seconds / 2)
        return x_BSH.clone()

    @staticmethod
    def backward(ctx, gradient_BSH):
        time.sleep(ctx.seconds)
        return gradient_BSH, None


def busy(m, unit=0.008):
    """Return the larger share, of two steps, in which a stage is busy."""

    def asleep(x):
        if not x.is_floating_point():  # the first stage's tokens
            x = torch.zeros(*x.shape, SHAPE.hidden, requires_grad=True)
        return Sleep.apply(x, unit)

    pairs = [(part, torch.zeros_like(part)) for part in batch(0)[0].chunk(m)]
    seconds = []
    for _ in range(2):
        dist.barrier()
        begin = time.perf_counter()
        pipeline_step(asleep, pairs)
        seconds.append(time.perf_counter() - begin)
    return 3 * unit * BATCH / min(seconds)


rows = []
for m in (1, 4, 8):
    # CPU: stages that sleep need no GPU. The first stage finishes last.
    found = ranks.run(busy, 4, m, device="cpu")[0]
    rows.append((m, f"{100 * m / (m + 3):.0f}", f"{100 * found:.0f}"))
    near = abs(found - m / (m + 3)) < 0.12  # sleeps end late on a busy machine
    show.check_timing(
        near, f"{m} micro-batches: busy as the formula says, within 12 points"
    )
show.table(rows, ["micro-batches", "busy: formula (%)", "measured (%)"])


# %% [markdown]
# More micro-batches make the bubble smaller, but GPipe keeps the activations of all $m$ until backward.
# {term}`1F1B <one forward, one backward>` does each backward as early as it can.
# Its bubble is GPipe's, but a stage keeps activations of at most $p$ micro-batches {cite}`narayanan2021megatron`.
#
# A rank holds about a quarter of the states, and sends the fewest bytes of all techniques here.
# The price is the bubble; and the slowest stage delays the others.
# [Pipeline parallelism](pipeline.md) builds 1F1B and its successors.
#
# (mp-tensor)=
# ## Tensor parallelism: a cut through every matrix
#
# Tensor parallelism shards every matrix, and all ranks work on the same layer at the same time {cite}`shoeybi2019megatron`.
# A feed-forward network shows how: $Y = \operatorname{GELU}(X W_1)\,W_2$.
#
# ![A feed-forward network on four ranks. Every rank has all of X. The first matrix is sharded by columns, a quarter for each rank, and so are its product with X and the GELU of that. The second matrix is sharded by rows, a quarter for each rank. Each rank then has a partial sum of Y, as large as all of Y; an all-reduce adds the four.](../figures/model_parallelism_ffn.svg)
#
# $W_1$ is sharded by columns, so a rank computes some columns of $X W_1$; GELU works on each number alone.
# $W_2$ is sharded by rows: a rank has the rows by which its columns of $\operatorname{GELU}(X W_1)$ are multiplied.
# Each rank's product is a *partial sum*, as large as $Y$; one all-reduce adds up the four.

# %% tags=["hide-input"]
# Defines `Copy`, an all-reduce in backward, and `Sum`, an all-reduce in forward
class Copy(torch.autograd.Function):
    """Use x on all ranks: forward returns x, backward all-reduces the gradients of x."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Sum(torch.autograd.Function):
    """Add up the ranks' summands: forward all-reduces, backward returns the gradient as is."""

    @staticmethod
    def forward(ctx, summand):
        total = summand.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient


# %%
class CutFeedForward(nn.Module):
    def __init__(self, full):
        super().__init__()
        rank, n = dist.get_rank(), dist.get_world_size()  # nn.Linear keeps W transposed
        self.up = nn.Parameter(full.up.weight.chunk(n, 0)[rank].clone())
        self.down = nn.Parameter(full.down.weight.chunk(n, 1)[rank].clone())

    def forward(self, x_BSH):
        inner_BSf = F.gelu(Copy.apply(x_BSH) @ self.up.T)
        return Sum.apply(inner_BSf @ self.down.T)


# %% [markdown]
# A tensor's name ends in its axes: $B$ sequences, $S$ tokens, $H$ numbers for each token; $f$ is this rank's part of the $F$ columns of $W_1$.
#
# `Sum` all-reduces in forward.
# `Copy` all-reduces in backward: every rank used all of $X$, so the gradient of $X$ is a sum over the ranks.
#
# Attention is sharded in the same way, by heads.

# %% tags=["hide-input"]
# Compares with one process: only feed-forward matrices sharded, then every matrix
def tensor_parallel():
    model = small_gpt()
    for block in model.blocks:
        block.ffn = CutFeedForward(block.ffn)
    return train(model)


def everything_cut():
    model, losses = tp.parallelize(small_gpt(), dist.group.WORLD), []
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        tokens, targets = batch(step)
        optimizer.zero_grad()
        value = tp.vocab_parallel_loss(model(tokens), targets, dist.group.WORLD)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    model.full_state_dict = partial(tp.full_state_dict, model)
    return losses, model, optimizer


beside_one_process("tensor parallel, feed-forward alone", tensor_parallel)
beside_one_process("tensor parallel", everything_cut)

# %% [markdown]
# States and arithmetic of each layer are divided, and there is no bubble.
# The price is four all-reduces a layer, two in forward and two in backward; the next matrix product waits for each of them.
# So these ranks are usually the GPUs of one *node*, a machine with fast links inside.
#
# `````{admonition} Only if a rank has few tokens: "tensor parallelism sends less than data parallelism"
# :class: checked
#
# Often it sends more.
# In data parallelism a rank sends nearly two numbers for each parameter, whatever the batch.
# In tensor parallelism it sends nearly $8H$ numbers per token and layer, a quarter of them in each all-reduce.
# `````

# %% tags=["hide-input"]
# Table: bytes that a GPU sends in a step of data and of tensor parallelism
rows = []
jobs = [
    (name, PRESETS[name], 8, 8, 2) for name in ("gpt-2", "llama-3-8b", "gpt-3-175b")
]
for name, config, n, sequences, size in [("the small GPT", SHAPE, 4, BATCH, 4), *jobs]:
    tokens_, params = sequences * config.seq, memory.count_parameters(config)
    copies = 2 * (n - 1) / n * params * size
    cuts = 8 * (n - 1) / n * config.layers * config.hidden * tokens_ * size
    equal_at = params / (4 * config.layers * config.hidden)
    assert (cuts > copies) == (tokens_ > equal_at)
    sizes = f"{copies / 1e6:,.0f}", f"{cuts / 1e6:,.0f}"
    rows.append((name, n, f"{tokens_:,}", *sizes, f"{equal_at:,.0f}"))
    if config is SHAPE:  # the loss and the embedding send some more
        assert abs(FOUR["data parallel"][0].sent / copies - 1) < 1e-3
        assert 1 <= FOUR["tensor parallel"][0].sent / cuts < 1.2
assert [
    float(row[4].replace(",", "")) > float(row[3].replace(",", "")) for row in rows
] == [
    *[True] * 3,
    False,
]
head = ["model", "GPUs", "tokens in a step", "data parallel (MB)", "tensor parallel (MB)"]
show.table(rows, [*head, "tokens above which tensor parallel sends more"])


# %% [markdown]
# [Tensor parallelism](tensor_parallel.md) shards embedding and head as well, and hides a part of the waiting.
#
# (mp-zero)=
# ## ZeRO: copies that divide their states
#
# ZeRO is data parallelism in which each rank *owns* a shard of the states, instead of holding all of them {cite}`rajbhandari2020zero`.
#
# ![Model states in float32 on four ranks, by stages of ZeRO; a coloured shard is held by its owner alone, a pale piece by every rank. Stage 0, data parallelism: weights, gradients and optimizer states are whole on every rank, 16 bytes for each parameter. Stage 1: each rank has a quarter of the optimizer states, 10 bytes. Stage 2: also a quarter of the gradients, 7 bytes. Stage 3: also a quarter of the weights, 4 bytes.](../figures/model_parallelism_zero.svg)
#
# All weights are put into one flat tensor, of which each rank owns a quarter.
# A *reduce-scatter* gives each rank the averaged gradients of its quarter alone.
# The rank updates its quarter, with a quarter of AdamW's means.
# An *all-gather* gives all new weights to every rank.

# %%
def zero_2():
    model, rank, n = small_gpt(), dist.get_rank(), dist.get_world_size()
    flat = parameters_to_vector(model.parameters()).detach()
    vector_to_parameters(flat, model.parameters())  # each weight is a view into `flat`
    mine = nn.Parameter(flat.chunk(n)[rank])  # and so is this rank's quarter

    def update(model, optimizer):
        gradients = parameters_to_vector(p.grad for p in model.parameters())
        mine.grad = torch.empty_like(mine)
        reduce_scatter_single(mine.grad, gradients / n, group=dist.group.WORLD)
        model.zero_grad()  # this rank keeps only its quarter of the gradients
        optimizer.step()
        all_gather_single(flat, mine.detach().clone(), group=dist.group.WORLD)

    return train(model, local_batch, update, [mine])


# %% [markdown]
# This is ZeRO's stage 2; stage 1 keeps all gradients until the next step.
# Stage 3 shards the weights, too: it gathers a layer's weights just before they are needed, and frees them afterwards.

# %% tags=["hide-input"]
# Compares ZeRO-2, and the course's ZeRO-3, with one process
def zero_3():
    model = zero.shard_module(small_gpt(), dist.group.WORLD, stage=3)
    return train(model, local_batch)


# CPU: ranks that share a GPU use gloo, which has no reduce-scatter of GPU tensors
beside_one_process("ZeRO-2", zero_2, device="cpu")
# CPU: bytes held by CPU kernels
beside_one_process("ZeRO-3", zero_3, device="cpu")


# %% [markdown]
# Take 7 billion parameters on 8 GPUs, with 10 GB of activations on each, in float32 and in *mixed precision*: 16-bit weights and gradients, and a float32 copy of the weights beside AdamW's means.

# %%
def sum_memory(weights, gradients, adamw, stage, parameters=7, activations=10, gpus=8):
    """Return what a GPU holds (GB): billions of parameters times their bytes."""
    if stage >= 1:
        adamw /= gpus
    if stage >= 2:
        gradients /= gpus
    if stage >= 3:
        weights /= gpus
    held = [parameters * size for size in (weights, gradients, adamw)] + [activations]
    return [f"{size:g}" for size in (*held, sum(held))]


# Bytes of a parameter: weight, gradient, AdamW
PRECISIONS = {"float32": (4, 4, 8), "mixed": (2, 2, 4 + 8)}
table = [
    [name, stage, *sum_memory(*sizes, stage)]
    for name, sizes in PRECISIONS.items()
    for stage in range(4)
]
parts = "weights (GB)", "gradients (GB)", "AdamW (GB)", "activations (GB)"
show.table(table, ["precision", "stage", *parts, "together (GB)"])

# %% tags=["hide-input"]
# Checks the table with the formulas of the course's memory module
for name, precision, together in (
    ("float32", "fp32", [122, 73, 48.5, 24]),
    ("mixed", "bf16", [122, 48.5, 36.25, 24]),
):
    for stage in range(4):
        s = memory.estimate_states(7e9, Layout(dp=8, zero=stage), precision)
        found = [float(size) for size in sum_memory(*PRECISIONS[name], stage)]
        assert [GB * x for x in found[:3]] == [s.parameters, s.gradients, s.optimizer]
        assert found[3:] == [10, together[stage]]

# %% [markdown]
# Stages 1 and 2 save more in mixed precision, where more of the bytes are AdamW's.
# Activations are not divided, since each rank has those of its own sequences: stage 3 takes 24 GB, not an eighth of 122.
#
# Stages 1 and 2 send what data parallelism sends, because an all-reduce *is* a reduce-scatter and an all-gather.
# Stage 3 gathers the weights once more, for backward: at most 1.5 times as much.
# [ZeRO](zero.md) builds all stages, and shows PyTorch's FSDP2.
#
# (mp-together)=
# ## The four techniques compared
#
# Each row is the same model and batch on four ranks.

# %% tags=["hide-input"]
# Table: states and traffic of four ranks, predicted and counted
ring, stream = (
    2 * 3 / 4,
    BATCH * SHAPE.seq * SHAPE.hidden * 4,
)  # bytes of all activations once
ffn = memory.count_rank_parameters(SHAPE)["ffn"]
stage = max(
    sum(memory.count_rank_parameters(SHAPE, Layout(pp=4), s).values()) for s in range(4)
)
cut = 16 * sum(memory.count_rank_parameters(SHAPE, Layout(tp=4)).values())
handed = sum(tp.predict_sent_bytes(SHAPE, 4, BATCH, SHAPE.seq).values())
PREDICTED = {  # bytes of states, bytes sent in a step
    "data parallel": (16 * P, ring * 4 * P),
    "naive pipeline": (16 * stage, 2 * stream),
    "pipeline": (16 * stage, 2 * stream),
    "tensor parallel, feed-forward alone": (16 * (P - ffn * 3 // 4), 8 * ring * stream),
    "tensor parallel": (cut, tp.bytes_on_wire(handed, 4)),
    "ZeRO-2": (7 * P, ring * 4 * P),
    "ZeRO-3": (4 * P, None),  # below: between those of stage 2 and 1.5 times as many
}
rows, HELD, SENT, CALLS = [], {}, {}, {}
for name, (states, sent) in PREDICTED.items():
    HELD[name], SENT[name], CALLS[name] = (
        max(getattr(rank, part) for rank in FOUR[name])
        for part in ("states", "sent", "calls")
    )
    assert HELD[name] == states, (name, HELD[name], states)
    if sent is None:
        assert SENT["ZeRO-2"] < SENT[name] < 1.5 * SENT["ZeRO-2"]
    else:
        assert abs(SENT[name] / sent - 1) < 1e-3, (name, SENT[name], sent)
    states_ = f"{states / P:.1f}", f"{HELD[name] / P:.1f}"
    wire = "-" if sent is None else f"{sent / 1e6:.2f}", f"{SENT[name] / 1e6:.2f}"
    rows.append((name, *states_, *wire, f"{CALLS[name]:.0f}"))
head = ["four ranks", "states (B/parameter): predicted", "counted"]
head += ["sent in a step (MB): predicted", "counted", "calls"]
show.table(rows, head, caption="The fullest of four ranks")

# %% [markdown]
# (mp-choose)=
# ## How to choose
#
# Take the first technique of the chart with which the job fits into memory: the simplest, not always the fastest.
# Techniques 1 to 5 change no line of the model, 6 needs fast links, 7 many micro-batches; 8 is the slow last resort.
#
# ![A flow chart with a box for each technique. Each box asks: can the batch be divided, and does the fullest rank fit into its memory? Yes: train. No: the next box. After the last: more GPUs, or larger ones. The boxes: 1, data parallel: every GPU has a full replica of the model; 2, ZeRO-1: optimizer states sharded over the replicas; 3, ZeRO-2: gradients sharded, too; 4, ZeRO-3: weights sharded, too, if the link is fast enough; 5, recompute: layers keep only their inputs; ZeRO as before; 6, tensor in the node: matrices sharded over 2, 4, … GPUs of a node; 7, pipeline across nodes: layers split into stages on several nodes; 8, the host's memory: optimizer, or all states, on the host: slowest.](../figures/model_parallelism_choose.svg)
#
# A *layout* describes how a job is divided; $d$ is the number of replicas.
# The course's planner follows the chart:

# %% tags=["hide-input"]
# Chooses a layout by the chart, for three models on 64 H100s
for name in ("gpt-2", "llama-3-8b", "llama-3-70b"):
    found = strategy.plan(PRESETS[name], strategy.MACHINES["h100"], gpus=64, batch=512)
    print(name, "on 64 H100s:", strategy.choose_by_chart(found).layout)

# %% [markdown]
# [Strategy](strategy.md) predicts the time of every layout.
#
# Large jobs, such as [GPT-3 on 64 GPUs](../book/gpt3_on_64_gpus.md), combine tensor parallelism inside each node, a pipeline across nodes, and ZeRO-1 across replicas.
#
# ![Two jobs on four nodes of four GPUs. A large model: two replicas, each with half of the batch. A replica is a pipeline of two nodes, with layers 1 and 2 on the first and 3 and 4 on the second; inside a node each GPU has a quarter of every matrix. A small model and much data: every GPU has all layers, and a sixteenth of the batch for itself.](../figures/model_parallelism_stacks.svg)
#
# (mp-deepspeed)=
# ## DeepSpeed in practice
#
# DeepSpeed is a production engine {cite}`rasley2020deepspeed`.
# Its configuration is JSON, or a dictionary:

# %%
import json

settings = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 0.0,  # left out, DeepSpeed 0.19.8 clips at 1.0
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 3},
}
print(json.dumps(settings, indent=2))

# %% [markdown]
# `de.initialize` calls DeepSpeed's `initialize` on the rank's device.
# The *engine* that it returns averages gradients, and zeroes them after a step.

# %%
de.import_deepspeed()  # once, before any rank starts


def by_deepspeed(settings):
    engine = de.initialize(small_gpt(), settings)
    losses = []
    for step in range(STEPS):
        tokens, targets = local_batch(step)  # four of the eight sequences
        value = loss(engine(tokens), targets)
        engine.backward(value)
        engine.step()
        losses.append(value.item())
    return losses, de.gather_weights(engine)


# %% tags=["hide-input"]
# Trains with DeepSpeed on two ranks, and compares with one process
for stage in (2, 3):
    of_stage = {**settings, "zero_optimization": {"stage": stage}}
    # CPU: its losses are compared with those of CPU ranks
    found = ranks.run(by_deepspeed, 2, of_stage, device="cpu")
    means = torch.tensor([losses for losses, _ in found]).mean(0).tolist()
    in_losses = max(abs(a - b) for a, b in zip(means, ONE.losses, strict=True))
    names = [name for name, _ in GPT(SHAPE).named_parameters()]
    pairs = zip((found[0][1][name] for name in names), ONE.weights, strict=True)
    in_weights = max((a - b).abs().max().item() for a, b in pairs)
    assert in_losses < 5e-5 and in_weights < 5e-3  # as above
    print(
        f"ZeRO-{stage}: losses within {in_losses:.0e} of one process, "
        f"weights within {in_weights:.0e}"
    )

# %% [markdown]
# [Its lesson](deepspeed_engine.md) explains the settings line by line.
#
# (mp-more)=
# ## Sequence, context and expert parallelism
#
# ![Six things that can be divided over four ranks. Activations are a block of sequences, tokens and width: data parallelism divides the sequences of the batch, context parallelism the tokens of each sequence, tensor parallelism the width of each layer. A pipeline divides the layers, ZeRO the states of every layer, and expert parallelism the experts, to which a router sends each token.](../figures/model_parallelism_cuts.svg)
#
# [**Sequence parallelism**](sequence_parallel.md) shards the activations that tensor parallelism leaves whole.
# [**Context parallelism**](context_parallel.md) shards the tokens of sequences too long for one GPU.
# [**Experts**](experts.md) are feed-forward networks on different ranks; a router picks a few for each token {cite}`deepseek2024v3`.
#
# ## What goes wrong, and how it looks
#
# A run is right when its first loss and gradient norm are those of one process, and each rank holds and sends the predicted bytes.
# If not, look here, then at [Symptoms](../book/symptoms.md):
#
# | symptom | common cause |
# |---|---|
# | the job hangs without an error | a rank left out a [collective](collectives.md), or two stages follow two [schedules](pipeline.md) |
# | the first loss is right, later ones are not | a missing [all-reduce in backward](tensor_parallel.md) |
# | the gradient norm is too large by the number of ranks, or of micro-batches | a sum in place of a [mean](data_parallel.md) |
# | ZeRO-3 runs out of memory though the states fit | activations, or the whole model [gathered](zero.md) at once |
# | more GPUs do not shorten the step | [sending the gradients](data_parallel.md) takes longer than backward |
#
# ## Exercises
#
# ```{exercise-start} The states of one GPU (easy)
# :label: ex-map-states
# ```
#
# 7 billion parameters are trained in mixed precision: weights and gradients in 16 bits; a copy of the weights and AdamW's two means in float32.
# 16 GPUs divide the states by ZeRO-2.
# How many bytes of states does each GPU hold?

# %%
answer = ...  # bytes
check(answer, "zero_states")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-map-states
# :label: sol-map-states
# :class: dropdown
# ```
#
# Every GPU holds the 2 bytes of each weight; the 2 of its gradient and the 12 of the optimizer are divided by 16.

# %%
answer = 7e9 * (2 + (2 + 12) / 16)
check(answer, "zero_states")

# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Bytes of an all-reduce (easy)
# :label: ex-map-gradients
# ```
#
# A model of 7 billion parameters is trained on 8 GPUs, each with a copy of it.
# Gradients have 2 bytes.
# How many bytes does each GPU send in one step, when a ring all-reduces the gradients?

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
# Each GPU sends $2(N-1)/N$ of the tensor: $(N-1)/N$ to add up, and as much again to distribute the sums.

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
# Each of `p` equal stages of a pipeline should be busy for at least `percent` percent of a step; `percent` is a whole number below 100.
# Return the smallest number of micro-batches that achieves this.
# No float equals 0.9, so compute with integers.

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
# A stage is busy for $m/(m+p-1)$ of a step.
# From $100\,m \ge \text{percent}\,(m+p-1)$ follows $m \ge \text{percent}\,(p-1)/(100-\text{percent})$, rounded up; and $m$ is at least one.

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
# 70 billion parameters, 16 bytes of states for each, are trained with ZeRO-3.
# Each GPU also holds 10 GB of activations, gathered layers and buffers.
# A GPU has 80 GB, of which the job uses no more than 90 %; a node has 8 GPUs.
# How many GPUs are needed, in whole nodes?

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
# 90 % of 80 GB is 72 GB; 10 GB are taken whatever the number of GPUs, so 62 GB are left for states.
# 1,120 / 62 = 18.1, so 19 GPUs are needed: three nodes.

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
# A stage of a pipeline has `params` parameters and `d` replicas.
# A step has `m` micro-batches; weights and gradients have 2 bytes.
# Return a list of four numbers: the bytes that a rank sends to the other replicas in one step, in ZeRO's stages 0 (plain data parallelism) to 3.
# Stages 0 and 1 send gradients once, after the last micro-batch.
# Stages 2 and 3 send them after each micro-batch, because a rank keeps only its own shard.
# Stage 3 gathers the weights for each forward, and again for each backward.
# `params` is a multiple of `d`.

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
# A reduce-scatter sends $(d-1)/d$ of a tensor, an all-gather as much, and an all-reduce twice that.

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
# Four ranks train `y_BF = x_BH @ w_FH.T`: two replicas, each sharded over two ranks.
# The loss is half the sum of `y_BF ** 2`, divided by the number of *all* replicas' sequences.
# Each rank has the `x_BH` of its replica, and `w_fH`: half of the rows of `w_FH`.
# `tensor_group` holds the ranks of one replica, `data_group` the ranks with the same rows.
# With `group=…` a collective runs only over the ranks of that group; use no other group.
# Return the loss of the whole batch, the same on all ranks, and the gradient of `w_fH`.
# Replicas have equally many sequences.
# A replica's gradient of `w_fH` is `y_Bf.T @ x_BH / len(x_BH)`.

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
# Each of a replica's two ranks has a partial sum of the loss; the tensor group adds them up.
# The losses of the replicas are averaged.
# The gradient of a rank's rows is averaged over the data group, which has the same rows; the tensor group has other rows.

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
# ```{exercise-start} Llama 3 70B on 64 GPUs (design)
# :label: ex-map-layout
# ```
#
# Lay out Llama 3 70B on 64 H200s, 8 in a node, for steps of 512 sequences of 8,192 tokens.
# The fullest GPU should reserve no more than 139.2 GB, 92.7 % of what it has, and a step should take no more than 71 s, as `strategy.predict` predicts.
# The chart's layout fits, but is too slow.
# Several layouts meet both limits; the check says which limit yours misses.

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
# The chart takes ZeRO-3 with recomputation, which computes a third more.
# With matrices sharded over half a node, two stages and eight replicas, the activations fit without recomputation.
# With matrices sharded over a whole node, `tp=8`, ranks would wait longer for all-reduces.

# %%
layout = strategy.Layout(
    dp=8, tp=4, pp=2, zero=1, micro_batch=1, microbatches=64, sequence_parallel=True
)
check(layout, "my_layout")

# %% [markdown]
# ```{solution-end}
# ```
#
# ## Summary
#
# - Training needs 16 bytes for each parameter, plus activations.
# - Data parallelism divides the batch, a pipeline the layers, tensor parallelism the matrices, and ZeRO the states, which plain replicas hold in full.
#
# ## Further reading
#
# - [Questions: the map](../book/questions_map.md).
# - {cite:t}`shoeybi2019megatron`, {cite:t}`huang2019gpipe` and {cite:t}`rajbhandari2020zero`: tensor parallelism, micro-batches and ZeRO.
# - {cite:t}`narayanan2021megatron`: data, pipeline and tensor parallelism together, on up to 3,072 GPUs.
# - {cite:t}`dubey2024llama3`, section 3.3: how Llama 3 405B was laid out, and what went wrong.
