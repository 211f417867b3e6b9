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
# # Pipeline parallelism: stages, micro-batches and schedules
#
# After this lesson you can
#
# - split a model into stages, and explain why this alone does not shorten a step;
# - write GPipe and 1F1B as loops, with gradients bitwise equal to one process's;
# - predict bubble and memory, and simulate schedules without a bubble;
# - choose numbers of stages and micro-batches, and find deadlocks before a run.
#
# A model does not fit on your GPU, so you buy three more and split it into four stages.
# Now the model fits, but a step takes as long as on one GPU that is large enough: each of the four works 25 % of the time.
# This lesson shortens the other 75 %.
#
# ## Naive pipeline: one stage works at a time

# %% tags=["hide-input"]
# Imports, and the small model that every cell trains

import importlib.util
import statistics
import textwrap
import time
from collections import deque
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import pipelining

from shardcourse.exercises import check
from shardlab import deepspeed_engine as de
from shardlab import memory, pipeline, ranks
from shardlab.common import show, text
from shardlab.data_parallel.buckets import average_gradients
from shardlab.gpt.model import GPT, PRESETS, Config, loss
from shardlab.layout import Layout
from shardlab.measure import count, link
from shardlab.pipeline import core, deferred

show.set_style()

SHAPE = Config(seq=64, layers=8, heads=2, hidden=64, tied=False)


def build_model(shape=SHAPE, device=None):
    """Build the same whole GPT at every call, on the rank's device or on `device`."""
    torch.manual_seed(0)
    return GPT(shape).to(device or ranks.device())


def make_batch(size, step=0, seq=64):
    """`size` windows of text: tokens, targets: [size, seq]."""
    tokens, targets = text.get_batch(seq, size, start=step * size)
    return tokens.to(ranks.device()), targets.to(ranks.device())


def make_pipeline(name, microbatches, model=None, chunks=None, **options):
    """This rank's stage of the course's pipeline over all ranks."""
    schedule = pipeline.make_schedule(name, dist.get_world_size(), microbatches, chunks)
    return pipeline.distribute_model(
        model or build_model(), schedule, dist.group.WORLD, **options
    )


# %% [markdown]
# Each of $p$ ranks holds a *stage*: consecutive layers with their gradients and optimizer states.
#
# ![A model of an embedding, eight blocks, a LayerNorm and a head, split into four stages, one for each rank: rank 0 has the embedding and blocks 1 and 2, rank 1 blocks 3 and 4, rank 2 blocks 5 and 6, rank 3 blocks 7 and 8, the LayerNorm and the head. Each rank holds weights, gradients and optimizer states of its own stage alone. Activations pass from each rank to the next, and their gradients come back.](../figures/pipeline_cut.svg)
#
# The plainest pipeline has two stages. In forward, rank 0 sends its output `y`, the activations, to rank 1. In backward, rank 1 sends the gradient of `y` back.
# Rank 1 receives the activations as `x`, a leaf of autograd's graph, so `x.grad` holds their gradient after backward.
# `pipeline.split_model` divides the blocks between the stages.

# %%
def naive_step():
    stage = pipeline.split_model(build_model(), 2)[dist.get_rank()]
    tokens, targets = make_batch(8)
    if dist.get_rank() == 0:
        y = stage(tokens)
        ranks.isend(y.detach(), 1).wait()
        dy = torch.empty_like(y)
        ranks.irecv(dy, 1).wait()
        y.backward(dy)
    else:
        x = torch.empty(*tokens.shape, SHAPE.hidden, device=tokens.device)
        ranks.irecv(x, 0).wait()
        x.requires_grad_()
        loss(stage(x), targets).backward()
        ranks.isend(x.grad, 0).wait()
    return {name: p.grad for name, p in stage.named_parameters()}


gradients = ranks.run(naive_step, 2)
print("parameter tensors on each rank:", [len(found) for found in gradients])

# %% [markdown]
# The gradients are bitwise equal to those of one process:

# %% tags=["hide-input"]
# Compares the two stages' gradients with one process

EXACT = ranks.choose_backend(4)[1] == "cpu"  # a GPU's kernels may add in another order


def alone(m):
    """The whole model's gradients on one rank, summed over the micro-batches."""
    model, (tokens, targets) = build_model(), make_batch(8)
    for x, y in zip(tokens.chunk(m), targets.chunk(m), strict=True):
        (loss(model(x), y) / m).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def compare_with_one_process(gradients, m):
    """The largest difference between the ranks' gradients and one process's."""
    want, found = ranks.run(alone, 1, m)[0], {}
    for mine in gradients:
        found |= mine
    assert found.keys() == want.keys()
    apart = max((found[name] - want[name]).abs().max().item() for name in want)
    assert apart == 0 or (not EXACT and apart < 1.1e-5), apart  # 2 sqrt(7,300) 2^-24
    return apart


apart = compare_with_one_process(gradients, 1)
print("gradients differ from one process by", apart)

# %% [markdown]
# But each block needs the previous block's output, so only one rank works at a time. Follow such a training step on four stages, with the whole batch as micro-batch 0:
#
# :::{step-through} The whole batch at once on four stages
# 1. ![Time 0 to 1. Stage 0: forward 0; then holds 0. Stage 1: idle; then holds nothing. Stage 2: idle; then holds nothing. Stage 3: idle; then holds nothing.](../figures/steps/pipeline_naive_1.svg)
#
#    A forward takes 1 unit of time, a backward 2. Stage 0 computes its blocks on the whole batch.
#
# 2. ![Time 1 to 2. Stage 0: idle; then holds 0. Stage 1: forward 0; then holds 0. Stage 2: idle; then holds nothing. Stage 3: idle; then holds nothing.](../figures/steps/pipeline_naive_2.svg)
#
#    Stage 0 sends its output to stage 1, and idles. It keeps the activations that its backward will need.
#
# 3. ![Time 2 to 3. Stage 0: idle; then holds 0. Stage 1: idle; then holds 0. Stage 2: forward 0; then holds 0. Stage 3: idle; then holds nothing.](../figures/steps/pipeline_naive_3.svg)
#
#    Stage 2 computes, and the other three wait.
#
# 4. ![Time 3 to 4. Stage 0: idle; then holds 0. Stage 1: idle; then holds 0. Stage 2: idle; then holds 0. Stage 3: forward 0; then holds 0.](../figures/steps/pipeline_naive_4.svg)
#
#    The last stage computes the loss.
#
# 5. ![Time 4 to 6. Stage 0: idle; then holds 0. Stage 1: idle; then holds 0. Stage 2: idle; then holds 0. Stage 3: backward 0; then holds nothing.](../figures/steps/pipeline_naive_5.svg)
#
#    Backward begins on the last stage, which then frees the activations it kept.
#
# 6. ![Time 6 to 8. Stage 0: idle; then holds 0. Stage 1: idle; then holds 0. Stage 2: backward 0; then holds nothing. Stage 3: idle; then holds nothing.](../figures/steps/pipeline_naive_6.svg)
#
#    The gradient goes back from stage to stage.
#
# 7. ![Time 8 to 10. Stage 0: idle; then holds 0. Stage 1: backward 0; then holds nothing. Stage 2: idle; then holds nothing. Stage 3: idle; then holds nothing.](../figures/steps/pipeline_naive_7.svg)
#
#    Stage 0 has waited since time 1.
#
# 8. ![Time 10 to 12. Stage 0: backward 0; then holds nothing. Stage 1: idle; then holds nothing. Stage 2: idle; then holds nothing. Stage 3: idle; then holds nothing.](../figures/steps/pipeline_naive_8.svg)
#
#    Each stage has worked 3 of 12 units of time: 25 %. Then all stages run the optimizer's step.
# :::
#
# This is the same step, measured on each rank. A second run splits the batch into four *micro-batches*, and takes one after the other, as gradient accumulation does:

# %% tags=["hide-input", "measured"]
# Draws a measured step, and prints the fraction of it that a stage works


def run_naive(microbatches):
    mine = make_pipeline("naive", microbatches, record=True)
    for _ in range(3):
        mine.step(*make_batch(8))
    return mine.gather_timeline()


# CPU: times are gloo's
at_once, looped = (ranks.run(run_naive, 4, m, device="cpu")[0] for m in (1, 4))
busy = {m: 1 - timeline.bubble for m, timeline in ((1, at_once), (4, looped))}
# One stage at a time: 25 % at most. Messages and a busy machine make it less.
assert max(busy.values()) < 0.26, busy
show.check_timing(min(busy.values()) > 0.05, "a stage works 5 to 25 % of the step")
print(f"a stage works {100 * busy[1]:.0f} % of the step with the batch at once,")
print(f"and {100 * busy[4]:.0f} % with four micro-batches in a loop")
show.figure(
    pipeline.draw_timelines(at_once, label="time (s)"),
    "A measured training step of four stages: forward goes down the stages one after "
    "the other, backward comes up again, and at each moment one stage works.",
    "pipeline_measured_naive",
)


# %% [markdown]
# Micro-batches alone do not make the step faster. The first stage has finished its forward of micro-batch 0, and could start micro-batch 1.
# But the next pass in the loop is the *backward* of micro-batch 0, which waits for a gradient from the last stage.
# The order of passes, called the *schedule*, has to change. The fraction of a step in which a stage waits is the *bubble*.
#
# ## GPipe: all forwards, then all backwards
#
# With $m$ micro-batches a stage runs $2m$ passes, in some order. *Forward*: take activations from the stage before, compute, and send the result on. *Backward*: take a gradient from the stage after, compute, and send the gradient of the input back.
# Sends no longer wait, and each direction has a process group of its own: [two neighbours may both send first](#deadlock-two-neighbours-both-send-first).

# %%
class Stage:
    """A stage: forward and backward of a micro-batch, each with its messages."""

    def __init__(self, part, m, loss=loss):
        self.part, self.m, self.loss, self.sent = part, m, loss, []
        self.me, self.last = dist.get_rank(), dist.get_world_size() - 1
        self.down, self.up = dist.group.WORLD, dist.new_group()  # by direction

    def forward(self, tokens, targets):
        x = tokens
        if self.me > 0:
            x = torch.empty(self.part.message_spec(tokens)[0], device=tokens.device)
            ranks.irecv(x, self.me - 1, self.down).wait()
            x.requires_grad_()
        out = self.part(x)
        if self.me == self.last:
            return x, self.loss(out, targets) / self.m
        self.sent.append(ranks.isend(out.detach(), self.me + 1, self.down))
        return x, out

    def backward(self, x, out):
        dy = None  # the last stage starts from the loss
        if self.me < self.last:
            dy = torch.empty_like(out)
            ranks.irecv(dy, self.me + 1, self.up).wait()
        out.backward(dy)
        if self.me > 0:
            self.sent.append(ranks.isend(x.grad, self.me - 1, self.up))


# %% [markdown]
# `message_spec` gives the shape of a message, $[b, S, h]$: a micro-batch's $b$ sequences of $S$ tokens, each with $h$ numbers, the hidden size.
# `loop_over_pieces` is the naive order; `run_step` runs any order, and waits for the sends at the end of the step.

# %%
def loop_over_pieces(stage, pieces):
    for piece in pieces:
        stage.backward(*stage.forward(*piece))


def run_step(order, stage, tokens, targets):
    """A training step on a rank: its micro-batches, in this order."""
    pieces = zip(tokens.chunk(stage.m), targets.chunk(stage.m), strict=True)
    order(stage, list(pieces))
    for message in stage.sent:
        message.wait()


def train_step(order, m):
    part = pipeline.split_model(build_model(), dist.get_world_size())[dist.get_rank()]
    run_step(order, Stage(part, m), *make_batch(8))
    return {name: p.grad for name, p in part.named_parameters()}


# %% [markdown]
# GPipe {cite}`huang2019gpipe` replaces that loop by two loops, one of forwards and one of backwards:

# %% tags=["slide"]
def gpipe(stage, pieces):
    kept = [stage.forward(*piece) for piece in pieces]
    for x, out in kept:
        stage.backward(x, out)


gradients = ranks.run(train_step, 4, gpipe, 8)

# %% [markdown]
# ![Three timelines of four stages on one axis. The whole batch at once: one stage computes at a time, and each is busy 25 % of the time. Four micro-batches in a loop, forward and backward of one before the next begins: still one stage at a time, still 25 %. GPipe, forwards of all four and then backwards of all four: stages overlap, each is busy 57 % of the time, and the step takes less than half as long.](../figures/pipeline_microbatches.svg)
#
# How large is GPipe's bubble? If a forward takes $f$ seconds and a backward $g$, a stage works for $m(f + g)$ seconds.
# The last of the $p$ stages starts after $p-1$ forwards. After its last backward, $p-1$ more backwards follow until the first stage is done. So a step takes $(m+p-1)(f+g)$, and
#
# $$
# \text{bubble} = \frac{p-1}{m+p-1} .
# $$
#
# Some papers divide the idle time by the working time instead, which gives $(p-1)/m$ {cite}`narayanan2021megatron`.
#
# `````{admonition} False: "four micro-batches on four stages keep GPUs 75 % busy"
# :class: checked
#
# The busy fraction is $m/(m+p-1) = 4/7 = 57\,\%$: the pipeline has to fill *and* drain.
# The next cell measures it on four ranks whose layers *sleep* instead of computing, because this machine has too few cores for four ranks to compute at once. Messages and their order are real.
# `````

# %% tags=["hide-input", "measured"]
# Compares GPipe's gradients with one process, and measures its bubble

UNIT = 0.008  # seconds for each of forward, backward of the input, of the weights


def time_plain_step(order, m, wire=None):
    """On a rank whose part sleeps: the shorter of two steps of the plain pipeline."""
    found = []
    part, data = pipeline.SleepingPart(UNIT, UNIT, UNIT), torch.zeros(m, 1)
    for _ in range(2):
        stage = Stage(part, m, lambda y, targets: y.mean())
        if wire is not None:
            stage.down = stage.up = link.create_slow_group(*wire)
        dist.barrier()
        begin = time.perf_counter()
        run_step(order, stage, data, data)
        dist.barrier()
        found.append(time.perf_counter() - begin)
    return min(found)


apart = compare_with_one_process(gradients, 8)
print("gradients differ from one process by", apart)
# CPU: sleeping stages need no GPU
seconds = ranks.run(time_plain_step, 4, gpipe, 4, device="cpu")[0]
busy = 4 * 3 * UNIT / seconds
print(f"busy: claimed 75 %, predicted {400 / 7:.0f} %, measured {100 * busy:.0f} %")
show.check_timing(abs(busy - 4 / 7) < 0.1, "busy for 4/7, within 10 points")


# %% [markdown]
# More micro-batches make the bubble smaller, but cost memory: after the last forward, each stage holds the activations of *all* $m$ micro-batches.
#
# ## 1F1B: the same bubble, less memory
#
# A backward frees the activations that its forward kept. So 1F1B runs each backward as early as possible: after a stage's first backward, it alternates *one forward, one backward* {cite}`narayanan2021megatron`.
# Stage $s$, counted from 0, starts with $p-1-s$ forwards, and never holds more than $p-s$ micro-batches, however large $m$ is. The code has three loops: warm-up, steady state and cool-down:

# %% tags=["slide"]
def one_f_one_b(stage, pieces):
    ahead = min(stage.last - stage.me, len(pieces))
    kept = deque()
    for piece in pieces[:ahead]:  # warm-up: forwards alone
        kept.append(stage.forward(*piece))
    for piece in pieces[ahead:]:  # steady: one forward, one backward
        kept.append(stage.forward(*piece))
        stage.backward(*kept.popleft())
    while kept:  # cool-down: backwards alone
        stage.backward(*kept.popleft())


gradients = ranks.run(train_step, 4, one_f_one_b, 8)

# %% [markdown]
# In each picture, the passes since the previous picture have a thick outline:
#
# :::{step-through} 1F1B on four stages, six micro-batches
# 1. ![Time 0 to 1. Stage 0: forward 0; then holds 0. Stage 1: idle; then holds nothing. Stage 2: idle; then holds nothing. Stage 3: idle; then holds nothing.](../figures/steps/pipeline_1.svg)
#
#    A forward takes 1 unit of time, a backward 2. Stage 0 begins, and the others idle.
#    Below, each stage lists the micro-batches whose activations it holds.
#
# 2. ![Time 1 to 4. Stage 0: forward 1, forward 2, forward 3; then holds 0, 1, 2, 3. Stage 1: forward 0, forward 1, forward 2; then holds 0, 1, 2. Stage 2: forward 0, forward 1; then holds 0, 1. Stage 3: forward 0; then holds 0.](../figures/steps/pipeline_2.svg)
#
#    The pipeline fills. Stage 0 has run four forwards and stops: it holds as many micro-batches as there are stages, and will never hold more.
#
# 3. ![Time 4 to 6. Stage 0: idle; then holds 0, 1, 2, 3. Stage 1: idle; then holds 0, 1, 2. Stage 2: idle; then holds 0, 1. Stage 3: backward 0; then holds nothing.](../figures/steps/pipeline_3.svg)
#
#    Micro-batch 0 has reached the last stage, and its backward begins at once. After that backward, stage 3 frees the micro-batch's activations. The other stages wait.
#
# 4. ![Time 6 to 10. Stage 0: idle; then holds 0, 1, 2, 3. Stage 1: backward 0; then holds 1, 2. Stage 2: backward 0, forward 2, backward 1; then holds 1, 2. Stage 3: forward 1, backward 1, forward 2; then holds 2.](../figures/steps/pipeline_4.svg)
#
#    The backward of micro-batch 0 goes from stage to stage. After this backward, a stage alternates: one forward, one backward.
#
# 5. ![Time 10 to 13. Stage 0: backward 0, forward 4; then holds 1, 2, 3, 4. Stage 1: forward 3, backward 1; then holds 2, 3. Stage 2: backward 1, forward 3, backward 2; then holds 2, 3. Stage 3: backward 2, forward 3; then holds 3.](../figures/steps/pipeline_5.svg)
#
#    Stage 0 runs the backward of micro-batch 0, frees its activations, and starts micro-batch 4. It still holds four.
#
# 6. ![Time 13 to 16. Stage 0: backward 1, forward 5; then holds 2, 3, 4, 5. Stage 1: forward 4, backward 2; then holds 3, 4. Stage 2: backward 2, forward 4, backward 3; then holds 3, 4. Stage 3: backward 3, forward 4; then holds 4.](../figures/steps/pipeline_6.svg)
#
#    In the steady state no stage idles, and none holds more than before.
#
# 7. ![Time 16 to 19. Stage 0: backward 2; then holds 3, 4, 5. Stage 1: forward 5, backward 3; then holds 4, 5. Stage 2: backward 3, forward 5, backward 4; then holds 4, 5. Stage 3: backward 4, forward 5; then holds 5.](../figures/steps/pipeline_7.svg)
#
#    Stage 0 has no forward left, and waits for backwards.
#
# 8. ![Time 19 to 22. Stage 0: backward 3; then holds 4, 5. Stage 1: backward 4; then holds 5. Stage 2: backward 4, backward 5; then holds 5. Stage 3: backward 5; then holds nothing.](../figures/steps/pipeline_8.svg)
#
#    The pipeline drains. Stage 3 is the first to finish.
#
# 9. ![Time 22 to 27. Stage 0: backward 4, backward 5; then holds nothing. Stage 1: backward 5; then holds nothing. Stage 2: backward 5; then holds nothing. Stage 3: idle; then holds nothing.](../figures/steps/pipeline_9.svg)
#
#    The step takes 27 units, of which each stage computes for $6 \cdot 3 = 18$. The bubble is a third: $(p-1)/(m+p-1) = 3/9$, as for GPipe.
# :::
#
# All three orders give the gradients of one process. The table shows, for eight micro-batches on four ranks, how many of them the first and the last stage keep for backward, their bytes at the peak, and the time of a step when all stages sleep equally long.

# %% tags=["hide-input", "measured"]
# Table: activations and step times of the three orders


def measure_plain_peak(order, m):
    """On a rank: bytes held at the peak of a plain step, beyond weights and batch."""
    part = pipeline.split_model(build_model(), dist.get_world_size())[dist.get_rank()]
    tokens, targets = make_batch(8)
    with count.track_memory(part, tokens, targets) as held:
        before = held.current_bytes
        run_step(order, Stage(part, m), tokens, targets)
    return held.peak_bytes - before


m, p, rows, first = 8, 4, [], {}
cases = [  # name, order, slots of f + g, micro-batches kept by stages 0 and 3
    ("in a loop", loop_over_pieces, p * m, 1, 1),
    ("GPipe", gpipe, m + p - 1, m, m),
    ("1F1B", one_f_one_b, m + p - 1, p, 1),
]
for name, order, slots, *kept in cases:
    compare_with_one_process(ranks.run(train_step, 4, order, m), m)  # it asserts
    # CPU: bytes held by CPU kernels
    peaks = ranks.run(measure_plain_peak, 4, order, m, device="cpu")
    # CPU: sleeping stages need no GPU
    seconds = ranks.run(time_plain_step, 4, order, m, device="cpu")[0]
    first[order] = peaks[0]
    predicted = 3 * UNIT * slots
    off = seconds / predicted - 1  # sleeps end late
    show.check_timing(
        -0.02 < off < 0.4, f"{name}: a step within 40 % of the prediction"
    )
    held = [f"{peaks[stage] / 1e6:.1f}" for stage in (0, 3)]
    times = [f"{1e3 * t:.0f}" for t in (predicted, seconds)]
    rows.append((name, kept[0], held[0], kept[1], held[1], *times))
assert first[loop_over_pieces] < first[one_f_one_b] < first[gpipe]
head = ["order", "stage 0 keeps", "holds (MB)", "stage 3 keeps", "holds (MB)"]
head += ["step: predicted (ms)", "measured (ms)"]
show.table(
    rows, head, caption="Micro-batches and bytes that a stage keeps, and step times"
)

# %% [markdown]
# GPipe and 1F1B idle equally long, since both fill and drain the pipeline once. 1F1B saves memory, which allows a larger $m$ and so a smaller bubble.
#
# ![GPipe above 1F1B, four stages and eight micro-batches: both take the same time and have the same bubble. At its peak each stage of GPipe holds activations of 8 micro-batches; the stages of 1F1B hold those of 4, 3, 2 and 1.](../figures/pipeline_memory.svg)
#
# ## A schedule as a list
#
# The orders above call `forward` and `backward`. `shardlab.pipeline` writes the same orders as lists of passes: `F2` is the forward of micro-batch 2, `B2` its backward.

# %%
show.source(pipeline.schedule_gpipe, pipeline.schedule_1f1b)

# %% [markdown]
# There is one list for each stage:

# %%
print(pipeline.make_schedule("1f1b", 4, 6))

# %% [markdown]
# A list can be validated, simulated and drawn before anything runs, and one executor runs every list.
#
# ### Interleaving: less bubble, more messages
#
# Filling the pipeline takes $p-1$ forwards of a whole stage. To shorten them, give each rank several smaller pieces of the model.
# Split the model into $p \cdot v$ *chunks* of consecutive layers, $v$ for each rank: rank $s$ gets chunks $s$, $s+p$, $s+2p$, …
# A rank's stage is then its $v$ chunks together. (In code `parts` is $p \cdot v$, and `chunks` is $v$.)
#
# ![Which chunks of a model four stages hold. One each: chunks 0 to 3 in order. A loop of two each: stage 0 has chunks 0 and 4, stage 1 chunks 1 and 5, and so on; after chunk 3 a micro-batch goes back to stage 0. A V of two each: stage 0 has chunks 0 and 7, stage 3 chunks 3 and 4; at the turn the micro-batch stays on its stage, and it ends on the stage where it began.](../figures/pipeline_placement.svg)
#
# A chunk takes $1/v$ of a stage's time, so filling takes $1/v$ of the time, too: the bubble is $\frac{p-1}{vm+p-1}$. The price is somewhat more activations, and about $v$ times the messages, since each micro-batch visits all ranks $v$ times.
#
# ![1F1B above interleaved 1F1B with two chunks for each of four stages, eight micro-batches. Boxes are half as long and twice as many, the ramps at both ends are half as long, and the bubble falls from 27 % to 16 %.](../figures/pipeline_interleaved.svg)
#
# ### Zero bubble: a backward in two parts
#
# The backward of $y = xW$ is two products: $\partial x = \partial y\, W^\top$ and $\partial W = x^\top \partial y$. The previous stage waits for $\partial x$, but only the optimizer needs $\partial W$.
# So a backward `B` is split into `I`, the input's gradient, which runs as early as possible, and `W`, the weights' gradients, which run when the stage would idle {cite}`qi2024zerobubble`.
#
# ![Four schedules on one axis, four stages and eight micro-batches, with forward and both halves of the backward equally long. 1F1B: bubble 27 %, holds up to 4; ZB-H1: bubble 11 %, holds up to 4; ZB-H2: bubble 0 %, holds up to 7; ZB-V: bubble 0 %, holds up to 4 micro-batches. Where the backward is split, the passes for the weights fill time in which 1F1B idles.](../figures/pipeline_zero_bubble.svg)
#
# Three schedules use this split; their passes take $F$, $I$ and $W$ seconds:
#
# - *ZB-H1* moves `W` to the end, where the pipeline drains. 1F1B idles $(p-1)(F+I+W)$ seconds, ZB-H1 $(p-1)(F+I-W)$: only a third if all three take equally long. Every stage holds up to $p$ micro-batches; under 1F1B only the first stage does.
# - *ZB-H2* also fills the beginning, with more forwards. It idles $(p-1)(F+I-2W)$ seconds, zero if all three take equally long, but holds up to $2p-1$ micro-batches.
# - *ZB-V* idles zero seconds, too, with the memory of 1F1B. Each rank has two chunks, placed in a V: the first rank holds the first chunk *and the last*, so the first backward begins on the rank where the first forward began.
#
# `order_in_steps` builds a stage's list, also of the interleaved schedule, in steps. A step has one pass of each kind; `starts` gives each kind's first step.

# %%
show.source(pipeline.schedule_zb_h1, pipeline.schedules.order_in_steps)

# %% [markdown]
# Autograd computes both products at once. This function replaces each `nn.Linear` of a stage; its backward returns $\partial x$ and defers $\partial W$. (LayerNorms and embeddings still compute both at once, because these gradients are cheap.)

# %%
show.source(deferred._Linear)


# %% [markdown]
# ### Predict a step before it runs
#
# A simulator has one rule: a pass begins when its stage is free and its input has arrived.

# %%
def plain_simulate(orders, seconds):
    """Return when each pass ends. orders: each stage's passes, such as ["F0", "B0"]."""
    ends, free = {}, [0] * len(orders)
    waiting = [deque(order) for order in orders]
    while any(waiting):
        for stage, passes in enumerate(waiting):
            while passes:
                name = passes[0]
                source = stage - 1 if name[0] == "F" else stage + 1
                if 0 <= source < len(orders) and (source, name) not in ends:
                    break  # its input is not there yet
                begin = max(free[stage], ends.get((source, name), 0))
                ends[stage, name] = free[stage] = begin + seconds[name[0]]
                passes.popleft()
    return ends


lists = str(pipeline.make_schedule("1f1b", 4, 6))
orders = [line.split() for line in lists.splitlines()]
print("1F1B takes", max(plain_simulate(orders, {"F": 1, "B": 2}).values()), "units")

# %% [markdown]
# These are the 27 units of the pictures above.
# [`pipeline.simulate`](../code/shardlab/pipeline/simulate.py) has the same rule for every schedule of this lesson, adds the time of a message, and refuses lists that deadlock.
# The table compares it with the formulas, for $p = 4$, $m = 8$ and equal times. "Held" is the peak of activations on stages 0 to 3, in micro-batches.
#
# ```{predict}
# :row: 1f1b
# :column: simulated (%)
#
# For what percentage of the step does a stage wait under 1F1B?
# ```

# %% tags=["hide-input"]
# Table: bubbles for p = 4, m = 8, and activations held by stages 0 to 3

ends = plain_simulate(orders, {"F": 1, "B": 2})
timeline = pipeline.simulate(pipeline.make_schedule("1f1b", 4, 6))
assert max(ends.values()) == timeline.step_time == 27

p, m, v = 4, 8, 2
idle = {"naive": (p - 1) * 3 * m, "gpipe": (p - 1) * 3, "1f1b": (p - 1) * 3}  # in units
idle |= {"interleaved": (p - 1) * 3 / v, "zb-h1": p - 1, "zb-h2": 0, "zb-v": 0}
rows = []
for name, lost in idle.items():
    schedule = pipeline.make_schedule(name, p, m)
    pipeline.validate(schedule)
    timeline = pipeline.simulate(schedule)  # F = I = W = 1
    predicted = lost / (3 * m + lost)
    assert abs(timeline.bubble - predicted) < 1e-12, name
    ends = [stage[-1].end for stage in timeline.spans]
    together = 1 - 3 * m / (max(ends) - min(stage[0].begin for stage in timeline.spans))
    sends = sum(action.kind in ("SF", "SB") for action in schedule.actions[1])
    held = " ".join(f"{most:g}" for most in timeline.peak_activations)
    bubbles = (
        f"{100 * fraction:.1f}" for fraction in (predicted, timeline.bubble, together)
    )
    rows.append((name, *bubbles, held, sends))
head = ["schedule", "bubble: formula (%)", "simulated (%)", "if all end together (%)"]
show.table(rows, [*head, "held", "messages sent by stage 1"])

# %% [markdown]
# `````{admonition} Only if stages need not end together: "zero bubble: no GPU ever waits"
# :class: checked
#
# The paper measures each stage from *its own* first action to its own last. By that definition ZB-H2 has no bubble: stages start and end one after the other, and start the next step in the same order.
# If all stages have to end together, as clipping by the global gradient norm demands, they wait at the beginning and the end: column *if all end together*. (The paper runs the optimizer first and checks the norm afterwards, section 4.)
# `````
#
# Given the pass times that the paper measured on A100s (its Table 9), the simulator reproduces the paper's bubble rates (its Table 5), to the last printed digit.

# %% tags=["hide-input"]
# Compares the simulator with published bubble rates

# p, m; F, I, W, hop in ms (Table 9); rates of 1F1B, ZB-H1, ZB-H2 (Table 5)
PUBLISHED = [
    (8, 24, (18.522, 18.086, 9.337, 0.601), (0.2431, 0.1585, 0.1083)),
    (8, 32, (18.513, 18.086, 9.331, 0.626), (0.1985, 0.1242, 0.0837)),
    (8, 64, (18.546, 18.097, 9.321, 0.762), (0.1240, 0.0674, 0.0444)),
    (32, 96, (10.419, 10.207, 7.715, 0.408), (0.2646, 0.1421, 0.0641)),
]
print("published and ours, for 1F1B, for ZB-H1, for ZB-H2")
for p, m, times, rates in PUBLISHED:
    found = []
    for name, rate in zip(("1f1b", "zb-h1", "zb-h2"), rates, strict=True):
        found.append(
            pipeline.simulate(pipeline.make_schedule(name, p, m), *times).bubble
        )
        assert round(found[-1], 4) == rate, (name, p, m, found)
    shown = "   ".join(
        f"{rate:.4f} {ours:.4f}" for rate, ours in zip(rates, found, strict=True)
    )
    print(f"p = {p:2}, m = {m}:   {shown}")

# %% [markdown]
# For your own times, this command prints the bubble and draws the timeline in your terminal.
# `--hop` is the time of a message from one stage to the next:
#
# ```bash
# python -m shardlab schedule 1f1b --stages 8 --microbatches 24 \
#     --forward 18.522 --backward-input 18.086 --backward-weight 9.337 --hop 0.601
# ```
#
# This form runs the command in your browser:
#
# :::{calculator} schedule
# :name: zb-h1
# :stages: 4
# :microbatches: 8
# :::
#
# ## Deadlock: two neighbours both send first
#
# In the steady state of 1F1B, a stage sends activations to the next stage, while the next stage sends a gradient back.
# `Stage` above sends asynchronously. Suppose that each send waited until it is received, as `dist.send` may:

# %%
late = pipeline.schedule_gpipe(2, 2), pipeline.schedule_1f1b(2, 2)
for schedule in late:
    waiting = replace(
        schedule, explicit_actions=pipeline.add_messages(schedule, early=False)
    )
    try:
        pipeline.validate(waiting, blocking=True)
        print(schedule.name, "ends")
    except ValueError as error:
        print(error)


# %% [markdown]
# Both stages send first, and neither receives. With nccl, asynchronous sends do not help.
# Within one group, nccl runs the messages between two ranks in the order in which each rank posted them. Both ranks posted a send first, so each send waits for a receive that the other rank posted later.
# gloo does not have this limit: such code works on a laptop and hangs on a cluster.
#
# There are three ways out:
#
# - The *parity rule*: even stages send first and then receive, odd stages receive first. One of two neighbours is even, so every send meets a receive.
# - `dist.batch_isend_irecv` gives both messages to nccl at once, and nccl runs them together. Megatron uses this call in 1F1B, this course in a ring (`ranks.exchange`).
# - A group for each direction, so that neither waits for the other: `Stage` has `down` and `up`. `shardlab.pipeline` has two groups, too, because it posts receives early.
#
# Here the parity rule exchanges rank numbers with both neighbours:

# %%
def swap(out, peer):
    """Send `out` to a neighbour, and return the neighbour's tensor; all calls wait."""
    into = torch.empty_like(out)
    if dist.get_rank() % 2 == 0:
        ranks.isend(out, peer).wait()
        ranks.irecv(into, peer).wait()
    else:
        ranks.irecv(into, peer).wait()
        ranks.isend(out, peer).wait()
    return into


def swap_with_both():
    me, mine = dist.get_rank(), torch.full((2,), dist.get_rank(), device=ranks.device())
    peers = [peer for peer in (me - 1, me + 1) if 0 <= peer < dist.get_world_size()]
    return {peer: swap(mine, peer)[0].item() for peer in peers}


print(*ranks.run(swap_with_both, 4))

# %% [markdown]
# ## The executor on real ranks
#
# `python -m shardlab.pipeline` trains five steps with the naive schedule, GPipe and 1F1B on two ranks, compares with one process, and prints the bytes held and sent.
#
# The positions of messages in a stage's list decide how fast the pipeline is, and whether it deadlocks.
#
# `RF1` posts the receive of the input of `F1`, and `SF0` sends the output of `F0`; `RB` and `SB` are the same for gradients. These four do not block: the pass that needs a message waits for it.

# %% tags=["slide"]
print(*pipeline.make_schedule("1f1b", 4, 4).actions[1])

# %% [markdown]
# A receive is posted *one pass before* it is needed, so its message travels during that pass:
#
# ![A stage that alternates forward and backward, twice. Above, each receive is posted when its pass is due: the transfer runs while the stage waits. Below, each receive is posted one pass earlier: the transfer overlaps with that pass, and the stage never waits.](../figures/pipeline_messages.svg)
#
# nccl ignores tags, so it matches messages to receives by order alone. Receives between two stages must therefore have the order of the sends.

# %%
show.source(pipeline.add_messages)

# %% [markdown]
# The executor is one loop over the list, and waits for messages at one line.

# %%
show.source(core.Pipeline.step, core.Pipeline._begin_step, core.Pipeline._end_step)

# %% [markdown]
# `StagePasses` has the passes of `Stage`, with three additions: an output that has been sent is freed, since backward needs its node in autograd's graph and not its values;
# a micro-batch's loss is weighted by its number of targets (not counting −100), so that the gradients are those of the mean over the batch even if $m$ does not divide it;
# and a backward may defer the weights' gradients.

# %%
show.source(core.StagePasses)

# %% [markdown]
# `Mailbox` keeps messages in a dictionary by action, with a state: receives are `POSTED`, then `RECEIVED`; sends `MADE`, then `SENT`. `Mailbox` frees sent activations when their gradient arrives, which shows that the activations were received.

# %%
show.source(
    core.Message,
    core.Mailbox.begin_step,
    core.Mailbox.post_receive,
    core.Mailbox.wait_for_input,
    core.Mailbox.store_output,
    core.Mailbox.start_send,
    core.find_arrived_sends,
)

# %% [markdown]
# nccl connects two ranks at their first message, and both wait for the connection. So a pipeline connects all pairs before it starts, in the same order on all ranks. Two stages that share a tied weight exchange its gradients, and the lower stage sends first: both may be even, so the parity rule would not work.

# %%
show.source(
    core.get_reverse_group, core.Mailbox._connect_peers, core.Mailbox.exchange_with
)

# %% [markdown]
# The table compares this executor (core) with `Stage` (plain) under GPipe and 1F1B: bytes at the peak on stage 0, and the step time of sleeping stages over a link on which a message takes half as long as a forward.

# %% tags=["hide-input", "measured"]
# Table: the plain stage and the core on a slow link

HOP = UNIT / 2  # seconds; the link has latency, and ample bandwidth


def measure_core_peak(name, m):
    """On a rank: bytes held at the peak of a step of `Pipeline`, beyond weights and batch."""
    mine, (tokens, targets) = make_pipeline(name, m), make_batch(8)
    with count.track_memory(*mine.parts, tokens, targets) as held:
        before = held.current_bytes
        mine.step(tokens, targets)
    return held.peak_bytes - before


def time_core_step(name, m):
    """On a rank whose part sleeps: the shorter of two steps."""
    schedule, found = pipeline.make_schedule(name, dist.get_world_size(), m), []
    mine = pipeline.make_sleeping_pipeline(
        schedule, link.create_slow_group(HOP, 1e9), UNIT, UNIT, UNIT
    )
    for _ in range(2):
        dist.barrier()
        begin = time.perf_counter()
        mine.step(torch.zeros(m, 1), torch.zeros(m, 1))
        dist.barrier()
        found.append(time.perf_counter() - begin)
    return min(found)


rows = []
for order, name in ((gpipe, "gpipe"), (one_f_one_b, "1f1b")):
    # CPU: bytes held by CPU kernels
    peak = ranks.run(measure_core_peak, 4, name, 8, device="cpu")[0]
    assert peak < first[order]
    seconds = [
        # CPU: sleeping stages need no GPU
        ranks.run(time_plain_step, 4, order, 8, (HOP, 1e9), device="cpu")[0],
        # CPU: sleeping stages need no GPU
        ranks.run(time_core_step, 4, name, 8, device="cpu")[0],
    ]
    times = [f"{1e3 * t:.0f}" for t in seconds]
    rows.append((name, f"{first[order] / 1e6:.2f}", f"{peak / 1e6:.2f}", *times))
parts = "held (MB)", "step (ms)"
head = [f"{executor}: {part}" for part in parts for executor in ("plain", "core")]
show.table(rows, ["schedule", *head])

# %% [markdown]
# ## Bitwise equality with one process
#
# The reference is one process that runs the same micro-batches one after another, and adds up their gradients. The pipeline must give the same gradients with every schedule.
# The cell trains for five steps of AdamW on 4 stages, with 2, 4 and 6 micro-batches. A batch has six sequences, so four micro-batches are unequal.

# %% tags=["hide-input"]
# Compares all schedules with one process over five steps

SMALL = replace(SHAPE, seq=16, hidden=32, bias=False)
MICRO = (2, 4, 6)


def train_reference(shape, dtype, micro, at_once=False):
    """Losses, gradients of the last step and weights after five steps, for each m."""
    found = {}
    for m in micro:
        model = build_model(shape).to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        losses = []
        for step in range(5):
            optimizer.zero_grad()
            pieces = [
                x.tensor_split(1 if at_once else m)
                for x in make_batch(6, step, shape.seq)
            ]
            total = 0.0
            for tokens, targets in zip(*pieces, strict=True):
                value = loss(model(tokens), targets) * (len(tokens) / 6)
                value.backward()
                total += value.item()
            losses.append(total)
            optimizer.step()
        # A tied weight has two names.
        named = model.named_parameters(remove_duplicate=False)
        found[m] = losses, {name: (p.grad.cpu(), p.detach().cpu()) for name, p in named}
    return found


def compare_with_reference(name, shape, dtype, reference):
    """On a rank: the largest difference in gradients and in weights, for each m."""
    found = []
    for m, (losses, tensors) in reference.items():
        mine = make_pipeline(name, m, build_model(shape).to(dtype))
        optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-3, fused=True)
        for step in range(5):
            optimizer.zero_grad()
            value = mine.step(*make_batch(6, step, shape.seq))
            # 4 sqrt(96 tokens) 2^-24 of 5.5; a turned weight: 2 * 1e-3 * 0.01
            assert value is None or abs(value.item() - losses[step]) < 3.3e-5
            optimizer.step()
        apart = [0.0, 0.0]
        for own, p in mine.named_parameters():  # those of this rank's layers
            for i, (got, want) in enumerate(
                zip((p.grad, p.detach()), tensors[own], strict=True)
            ):
                apart[i] = max(apart[i], (got.cpu() - want).abs().max().item())
        found.append(apart)
    return found


def compare_all_schedules(references):
    found = []
    for name in pipeline.SCHEDULE_NAMES:
        layers = pipeline.make_schedule(name, dist.get_world_size(), 1).parts
        shape = replace(SMALL, layers=layers)  # one block in each part
        found.append(
            compare_with_reference(name, shape, torch.float32, references[layers])
        )
    return found


references = {}
for layers in (4, 8):
    shape = replace(SMALL, layers=layers)
    references[layers] = ranks.run(train_reference, 1, shape, torch.float32, MICRO)[0]
# [rank, schedule, m, gradients and weights]
results = torch.tensor(ranks.run(compare_all_schedules, 4, references))
assert results.max() == 0 or (not EXACT and results.max() < 1e-3), results.amax(0)
for which, what in enumerate(("gradients", "weights")):
    apart = results[..., which].max().item()
    print(
        f"{len(pipeline.SCHEDULE_NAMES)} schedules, m = 2, 4, 6: {what} differ by {apart:g}"
    )

# %% [markdown]
# Gradients and weights are equal because every product has the same operands and every sum the same order. Two cases differ:
#
# - with *tied* weights, the first stage (embedding) and the last (head) each hold a copy. The two stages add its gradients once per step, $(a + b) + (c + d)$; one process adds $((a + b) + c) + d$;
# - compared with one process that runs the whole batch *at once*: its matrix products have more rows, and may add in another order.

# %% tags=["hide-input"]
# Table: largest differences from one process

apart = (f"{value:.0g}" for value in results.amax((0, 1, 2)).tolist())
shape, rows = replace(SMALL, layers=4), [("all schedules, untied", "float32", *apart)]
for case, tied, at_once in (
    ("tied weights", True, False),
    ("the batch at once", False, True),
):
    for dtype, room in ((torch.float32, (3e-5, 1e-3)), (torch.float64, (8e-13, 5e-9))):
        shape = replace(shape, tied=tied)
        reference = ranks.run(train_reference, 1, shape, dtype, [4], at_once)[0]
        found = ranks.run(compare_with_reference, 4, "1f1b", shape, dtype, reference)
        apart = [max(rank[0][which] for rank in found) for which in (0, 1)]
        # n = 53 * 32 + 96 terms: 4 sqrt(n) 2^-24 and 2e-5, 4 n 2^-53 of up to 1. A
        # step of AdamW: 1e-3; lr / eps times 2 sqrt(n) 2^-53.
        assert all(
            0 < value < limit for value, limit in zip(apart, room, strict=True)
        ), apart
        rows.append((case, str(dtype)[6:], *(f"{value:.0e}" for value in apart)))
show.table(rows, ["on 4 stages", "type", "gradients", "weights after five steps"])

# %% [markdown]
# In float64, which has about nine more digits, both differences are about nine digits smaller: they are rounding errors. With dropout, ranks draw other masks than one process.
#
# ## What it costs
#
# ### Time
#
# The table compares the simulator with four ranks whose stages sleep. The last two rows emulate a slow link: a *hop*, a message between two stages, takes 4 ms, half of a forward.

# %% tags=["hide-input", "measured"]
# Table: steps of sleeping stages, simulated and measured


def run_sleeping_steps(names, microbatches, wire=None):
    """On a rank whose stage sleeps: the shorter of two steps, for each schedule."""
    found = {}
    for name in names:
        group = link.create_slow_group(*wire) if wire else dist.group.WORLD
        schedule = pipeline.make_schedule(name, dist.get_world_size(), microbatches)
        mine = pipeline.make_sleeping_pipeline(
            schedule, group, UNIT, UNIT, UNIT, record=True
        )
        steps = []
        for _ in range(2):
            mine.step(torch.zeros(microbatches, 1), torch.zeros(microbatches, 1))
            steps.append(mine.gather_timeline())
        found[name] = min(steps, key=lambda timeline: timeline.step_time)
    return found


names = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]
# CPU: sleeping stages need no GPU
near = ranks.run(run_sleeping_steps, 4, names, 8, device="cpu")[0]
# CPU: sleeping stages need no GPU
far = ranks.run(run_sleeping_steps, 4, names[:2], 8, (HOP, 1e9), device="cpu")[0]
cases = [(0.0, timeline) for timeline in near.values()]
cases += [(HOP, timeline) for timeline in far.values()]
rows = []
for hop, timeline in cases:
    name = timeline.schedule.name
    predicted = pipeline.simulate(timeline.schedule, UNIT, UNIT, UNIT, hop)
    off = timeline.step_time / predicted.step_time - 1
    # Some 30 sleeps in a row end late, and a busy machine delays messages.
    show.check_timing(
        -0.02 < off < 0.4, f"{name}: a step within 40 % of the prediction"
    )
    cells = [f"{1e3 * t.step_time:.0f}" for t in (predicted, timeline)]
    bubbles = [f"{100 * t.bubble:.0f}" for t in (predicted, timeline)]
    rows.append((name, f"{1e3 * hop:.0f}", *cells, f"{100 * off:+.1f}", *bubbles))
head = ["schedule", "hop (ms)", "predicted (ms)", "measured (ms)", "difference (%)"]
show.table(
    rows, [*head, "bubble: predicted (%)", "measured (%)"], caption="Four ranks, m = 8"
)

# %% [markdown]
# With slow hops 1F1B takes longer than GPipe, whose stages wait for hops only while filling and draining. In 1F1B, a stage waits in every alternation for a message that its neighbour could not send earlier.
# So hops must be short compared with a forward, or stages must run more forwards in the warm-up.
#
# The interleaved step:

# %% tags=["hide-input", "measured", "skip-slide"]
# Draws the interleaved step, simulated and measured

measured = near["interleaved"]
simulated = pipeline.simulate(measured.schedule, UNIT, UNIT, UNIT)
show.figure(
    pipeline.draw_timelines(
        [simulated, measured], ["simulated", "measured"], label="time (s)"
    ),
    "The interleaved schedule on four stages with eight micro-batches, simulated and "
    "measured: the same boxes in the same places, the measured ones a little longer.",
    "pipeline_measured",
)


# %% [markdown]
# ### Memory
#
# A stage holds about $1/p$ of the model states; embedding and head make stages unequal. Its activations are those that its layers keep for one micro-batch, times the micro-batches *in flight* (forward done, backward not), plus one layer's temporaries.

# %%
def predict_peak(name, stage, m, again):
    """Predict peak bytes: kept tensors of micro-batches in flight, and a backward."""
    recompute = "full" if again else "none"
    layout = Layout(pp=4, microbatches=4, recompute=recompute)
    one = memory.estimate_activations(WIDE, layout, precision="fp32", stage=stage)
    layers, ends = one.layer * one.layers, one.head + one.logits  # of a micro-batch
    schedule = pipeline.make_schedule(name, 4, m)
    in_flight = pipeline.count_peak_activations(schedule)[stage]
    # The backwards of head and loss end before a layer's, which adds a matrix gradient.
    backward = max(ends + one.loss, max(one.working.values()) + 4 * 4 * WIDE.hidden**2)
    messages = 2 * one.stream
    return in_flight * layers + (in_flight - 1) * ends + backward + messages


# %% [markdown]
# The table compares this prediction with the bytes that each of four ranks held:

# %% tags=["hide-input", "measured"]
# Table: activations at the peak by stage, predicted and counted

WIDE = Config(seq=64, layers=8, heads=4, hidden=128, tied=False)
# Schedule, and whether to recompute.
CASES = [("gpipe", False), ("1f1b", False), ("gpipe", True), ("1f1b", True)]


def measure_peaks(m):
    """On a rank, by case: bytes at the peak of a step, beyond weights and gradients."""
    found = []
    for name, again in CASES:
        mine = make_pipeline(name, m, build_model(WIDE), recompute=again)
        for parameter in mine.parameters():
            parameter.grad = torch.zeros_like(parameter)
        tokens, targets = make_batch(m)
        with count.track_memory(*mine.parts, tokens, targets) as held:
            before = held.current_bytes
            mine.step(tokens, targets)
        found.append(held.peak_bytes - before)
    return found


# CPU: bytes held by CPU kernels
by_rank = ranks.run(measure_peaks, 4, 8, device="cpu")
PEAKS = {case: [found[i] for found in by_rank] for i, case in enumerate(CASES)}
rows = []
for stage in range(4):
    cells = []
    for name in ("gpipe", "1f1b"):
        want, got = predict_peak(name, stage, 8, False), PEAKS[name, False][stage]
        near = abs(got / want - 1) < 0.06
        show.check_timing(near, f"{name}, stage {stage}: the peak within 6 %")
        cells += [
            f"{want / 1e6:.2f}",
            f"{got / 1e6:.2f}",
            f"{100 * (got / want - 1):+.1f}",
        ]
    rows.append((stage, *cells))
columns = "predicted (MB)", "measured (MB)", "difference (%)"
head = [f"{name}: {column}" for name in ("GPipe", "1F1B") for column in columns]
show.table(rows, ["stage", *head], caption="Activations at the peak of a step, m = 8")

# %% [markdown]
# GPipe's authors reduce activations by recomputation: keep only the *input* of each block, and recompute the rest in backward ([Memory](memory.md)). On stage 0:

# %% tags=["hide-input", "measured"]
# Table: recomputation on stage 0, bytes and time

rows = []
for (name, again), peaks in PEAKS.items():
    want, got = predict_peak(name, 0, 8, again), peaks[0]
    show.check_timing(abs(got / want - 1) < 0.06, f"{name}: the peak within 6 %")
    # With recomputation, the backward of the input begins with another forward.
    step_ = pipeline.simulate(
        pipeline.make_schedule(name, 4, 8), 1, 2 if again else 1, 1
    )
    what = "each block again in backward" if again else "everything kept"
    sizes = f"{want / 1e6:.2f}", f"{got / 1e6:.2f}", f"{100 * (got / want - 1):+.1f}"
    rows.append((name, what, *sizes, f"{step_.step_time:g}"))
head = ["schedule", "activations", "predicted (MB)", "measured (MB)", "difference (%)"]
show.table(rows, [*head, "step (forwards of a stage)"])

# %% [markdown]
# GPipe's activations shrink to a sixth, close to 1F1B's. A step takes a third longer; the bubble stays the same fraction of the step.
#
# ### Messages and bytes
#
# Activations go one way and gradients the other: with a batch of $B$ sequences, an inner stage sends $2\,v\,B\,S\,h$ elements in a step, for any $m$. Data parallelism sends the gradients of all $P$ parameters, for any batch size.

# %% tags=["hide-input"]
# Table: messages and bytes that a stage sends, predicted and counted


def count_traffic(cases):
    found = []
    for name, m in cases:
        mine = make_pipeline(name, m, build_model(WIDE))
        with count.record_traffic() as sent:
            mine.step(*make_batch(8))
        found.append((sent.messages, sent.bytes))
    return found


cases, rows = [("1f1b", 4), ("1f1b", 8), ("interleaved", 8), ("zb-v", 8)], []
# CPU: counts the module's bytes
found = ranks.run(count_traffic, 4, cases, device="cpu")[1]
for (name, m), (messages, size) in zip(cases, found, strict=True):
    v = pipeline.make_schedule(name, 4, m).chunks
    predicted = 2 * v * 8 * 64 * WIDE.hidden * 4  # 2 v B S h elements of 4 bytes
    assert size == predicted and messages == 2 * v * m
    rows.append((name, m, messages, f"{predicted / 1e6:.3f}", f"{size / 1e6:.3f}"))
P = sum(p.numel() for p in build_model(WIDE, "cpu").parameters())
rows.append(("data parallel, 4 ranks", "-", "-", f"{2 * 3 / 4 * 4 * P / 1e6:.3f}", "-"))
head = ["sent by stage 1 in a step", "m", "messages", "predicted (MB)", "counted (MB)"]
show.table(rows, head, caption="Batch of 8 sequences of 64 tokens, h = 128")

# %% [markdown]
# So a pipeline sends less than data parallelism if a step has fewer than $P/h$ tokens (Llama 3 8B: 2 million).
#
# ### Balance
#
# The slowest stage determines the time of the step. The head, a product with the whole vocabulary, costs as much as several layers. Llama 3 8B has 32 layers. `costs` is each layer's time in units of one layer, the last including the head:

# %%
sizes = memory.count_rank_parameters(PRESETS["llama-3-8b"])
layer = (sizes["attention"] + sizes["ffn"]) / 32
HEAD = sizes["head"] / layer  # time in proportion to parameters
costs = [1.0] * 31 + [1.0 + HEAD]
print("the head costs", round(HEAD, 2), "layers:", pipeline.balance_layers(costs, 4))

# %% [markdown]
# `balance_layers` finds the cut whose slowest stage is fastest; you write this function in an exercise below. The table compares this cut with an even one, on stages that sleep for these times:

# %% tags=["hide-input", "measured"]
# Table: an even cut and a balanced one, simulated and measured


def time_uneven_step(seconds):
    """On a rank: the shorter of two steps of stages that sleep for unequal times."""
    schedule = pipeline.make_schedule("1f1b", 4, 8)
    mine = pipeline.make_sleeping_pipeline(
        schedule, dist.group.WORLD, *[seconds] * 3, record=True
    )
    steps = []
    for _ in range(2):
        mine.step(torch.zeros(8, 1), torch.zeros(8, 1))
        steps.append(mine.gather_timeline().step_time)
    return min(steps)


cuts = {
    "equal layers": [8] * 4,
    "balance_layers(costs, 4)": pipeline.balance_layers(costs, 4),
}
rows = []
for what, layers in cuts.items():
    stages = [
        1e-3 * (n + HEAD * (i == 3)) for i, n in enumerate(layers)
    ]  # 1 ms a layer
    predicted = pipeline.simulate(
        pipeline.make_schedule("1f1b", 4, 8), stages, stages, stages
    )
    # CPU: sleeping stages need no GPU
    measured = ranks.run(time_uneven_step, 4, stages, device="cpu")[0]
    off = measured / predicted.step_time - 1
    show.check_timing(
        -0.02 < off < 0.4, f"{what}: a step within 40 % of the prediction"
    )
    times = [
        f"{1e3 * predicted.step_time:.0f}",
        f"{1e3 * measured:.0f}",
        f"{100 * off:+.1f}",
    ]
    rows.append((what, str(layers), *times, f"{100 * predicted.bubble:.0f}"))
head = ["cut", "layers", "step: predicted (ms)", "measured (ms)"]
show.table(rows, [*head, "difference (%)", "bubble (%)"])

# %% [markdown]
# ### How to choose m and p
#
# **Stages.** Use as few stages as the model fits on: every further stage adds to the bubble.
#
# ![Above, the bubble for 2 to 32 stages and 1 to 128 micro-batches: from 97 % for 32 stages and one micro-batch to below 1 % for 2 stages and 128; it is at most 20 % with four times as many micro-batches as stages. Below, the first stage's peak activations, in units of one micro-batch's activations in all layers: GPipe's grow with the micro-batches, to 32 units for 4 stages and 128 micro-batches; 1F1B's stop at one unit, for 4 stages as for 16.](../figures/pipeline_choose.svg)
#
# `````{admonition} Only if recomputation fills the waiting time: "with four times as many micro-batches as stages the bubble is negligible"
# :class: checked
#
# GPipe's authors measured a negligible bubble {cite}`huang2019gpipe`, because a stage recomputed activations while it waited for the gradient. Without this overlap, $m = 4p$ leaves a bubble of $(p-1)/(5p-1)$: 16 % for 4 stages, up to 20 % for many. For 5 % you need $m = 19\,(p-1)$.
# `````

# %% tags=["hide-input"]
# Compares the bubble for m = 4p with the formula

for p in (2, 4, 8, 16):
    names = {
        "1f1b": "1F1B",
        "interleaved": "interleaved",
        "zb-h1": "ZB-H1",
        "zb-v": "ZB-V",
    }
    found = [
        pipeline.simulate(pipeline.make_schedule(name, p, 4 * p)).bubble
        for name in names
    ]
    assert abs(found[0] - (p - 1) / (5 * p - 1)) < 1e-12
    bubbles = zip(names.values(), found, strict=True)
    print(
        f"p = {p:2}:",
        ", ".join(f"{name} {100 * bubble:.1f} %" for name, bubble in bubbles),
    )

# %% [markdown]
# **Micro-batches.** Use many: $m = B/(d \cdot b)$ with $d$ replicas of the pipeline and $b$ sequences in a micro-batch, as few as keep a GPU busy.
# Large jobs have little choice. A batch of 1,024 sequences over 64 replicas leaves 16 sequences for each pipeline; with $b = 1$ and $p = 8$ the bubble is 7/23 = 30 %.
#
# **Schedule.** Start with 1F1B. If the bubble is too large and $m$ cannot grow, interleave, provided that hops are short compared with a chunk's forward; or split the backward.
#
# (pipeline-torch)=
# ## Comparison with PyTorch's pipelining
#
# `torch.distributed.pipelining` wraps each stage's module in a `PipelineStage`, and has a class for each schedule. This cell gives it our chunks.

# %%
TORCHS = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zb-v": "ZBVZeroBubble",
}
if torch.__version__ < "2.13":  # older ones send to their own rank; gloo cannot
    del TORCHS["zb-v"]


def make_torch_pipeline(name, m, model, **options):
    """A step of torch's pipeline around our parts, and this rank's parts."""
    schedule = pipeline.make_schedule(name, dist.get_world_size(), m)
    parts = pipeline.split_model(model, schedule.parts)
    numbers = schedule.placement[dist.get_rank()]
    stages = [
        pipelining.PipelineStage(parts[i], i, schedule.parts, ranks.device())
        for i in numbers
    ]
    kind = getattr(pipelining, "Schedule" + TORCHS[name])
    theirs = kind(
        stages if schedule.chunks > 1 else stages[0], m, **{"loss_fn": loss} | options
    )

    def step(tokens, targets):
        first = [tokens] if 0 in numbers else []
        last = {"target": targets} if schedule.parts - 1 in numbers else {}
        theirs.step(*first, **last)

    return step, nn.ModuleList(parts[i] for i in numbers)

# %% [markdown]
# The table compares both libraries' step times, measured alternately, and the gradients of the last step.

# %% tags=["hide-input", "measured"]
# Table: gradients and step times, ours and torch's


def compare_with_torch(names, rounds, m):
    found = []
    for name in names:
        ours = make_pipeline(name, m)
        step, parts = make_torch_pipeline(name, m, build_model())
        pair = {"ours": (ours.step, ours), "torch's": (step, parts)}
        seconds = {who: [] for who in pair}
        for number in range(rounds + 1):
            for who in list(pair)[:: 1 if number % 2 else -1]:
                run, module = pair[who]
                for parameter in module.parameters():
                    parameter.grad = None
                dist.barrier()
                begin = time.perf_counter()
                run(*make_batch(4, number))
                seconds[who].append(time.perf_counter() - begin)
        pairs = zip(ours.parameters(), parts.parameters(), strict=True)
        apart = max((a.grad - b.grad).abs().max().item() for a, b in pairs)
        ratios = [
            a / b for a, b in zip(*(s[1:] for s in seconds.values()), strict=True)
        ]
        found.append((apart, statistics.median(ratios)))
    return found


# CPU: times are gloo's
results = ranks.run(compare_with_torch, 2, list(TORCHS), 5, 4, device="cpu")
rows = []
for i, (name, theirs) in enumerate(TORCHS.items()):
    apart = max(result[i][0] for result in results)
    ratio = results[0][i][1]
    assert apart == 0.0, (name, apart)
    show.check_timing(
        0.4 < ratio < 1.6, f"{name}: ours takes 0.4 to 1.6 of torch's time"
    )
    rows.append((name, f"Schedule{theirs}", f"{apart:.1f}", f"{ratio:.2f}"))
head = [
    "ours",
    "torch.distributed.pipelining",
    "gradients differ by",
    "step time, ours / torch's",
]
show.table(rows, head, caption="Two ranks, loopback, m = 4")

# %% [markdown]
# The gradients are bitwise equal, and the times are close. [The benchmark](../benchmarks/pipeline.py) measures the times on two and four ranks and on a slow link, where posting receives early matters.
# The libraries' names differ:
#
# | here | PyTorch | Megatron |
# |---|---|---|
# | stage, rank | rank | stage |
# | chunk (`part` in code) | stage (`stage_index`) | virtual stage, model chunk |
# | `split_model(model, parts)` | by hand, or traced: `pipeline(…)` | by layer number |
# | `1f1b` | `Schedule1F1B` | the default |
# | `interleaved` | `ScheduleInterleaved1F1B` | with virtual stages |
# | $m$ | `n_microbatches` | $B/(d \cdot b)$ |
#
# DeepSpeed's `PipelineModule(layers, num_stages)` has one schedule, 1F1B, and calls $m$ `gradient_accumulation_steps`.
#
# `````{admonition} False: "wrap an nn.Sequential in torch.distributed.pipeline.sync.Pipe"
# :class: checked
#
# Tutorials still recommend this module. It was deprecated in March 2024 ([pull request 121464](https://github.com/pytorch/pytorch/pull/121464)) and then removed ([127354](https://github.com/pytorch/pytorch/pull/127354)).
# `Pipe` ran GPipe in *one* process over several GPUs. Its successor, `torch.distributed.pipelining` (formerly PiPPy), runs one process for each stage.
# `````

# %% tags=["hide-input"]
# Checks which of the two modules this version of torch has

gone = importlib.util.find_spec("torch.distributed.pipeline") is None
there = [name for name in dir(pipelining) if name.startswith("Schedule")]
print("torch.distributed.pipeline:", "gone" if gone else "still there")
print(
    "torch.distributed.pipelining:", *(name.removeprefix("Schedule") for name in there)
)
assert gone and {"ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"} <= set(
    there
)

# %% [markdown]
# `````{admonition} False: "DeepSpeed's pipeline goes with any ZeRO stage"
# :class: checked
#
# It works with stages 0 and 1 only. Stages 2 and 3 reduce-scatter gradients after every micro-batch, so a pipeline's $m$ micro-batches would need $m$ times the messages ([ZeRO](zero.md)). The next cell tries stages 0 to 2 in DeepSpeed's own engine.
# `````

# %% tags=["hide-input"]
# Trains DeepSpeed's pipeline with ZeRO stages 0, 1 and 2


def step_deepspeed(zero):
    """On a rank: the loss of a step of DeepSpeed's pipeline, or what it says."""
    settings = de.build_config(Layout(pp=2, microbatches=4))
    settings["zero_optimization"] = {"stage": zero}
    try:
        engine = de.initialize(de.to_pipeline_module(build_model(), 2), settings)
    except AssertionError as error:
        return str(error)
    tokens, targets = make_batch(4)
    return de.step(engine, list(zip(tokens.chunk(4), targets.chunk(4), strict=True)))


de.import_deepspeed()
with torch.no_grad():
    tokens, targets = text.get_batch(64, 4)
    alone = loss(build_model(device="cpu")(tokens), targets).item()
for zero in (0, 1, 2):
    # CPU: each stage would need its own GPU
    found = ranks.run(step_deepspeed, 2, zero, device="cpu")[0]
    # 2 sqrt(256 tokens) roundings of 2^-24 of 5.5
    trains = isinstance(found, float) and abs(found - alone) < 1.1e-5
    print(f"stage {zero}:", "trains, with the loss of one process" if trains else found)
    assert trains == (zero < 2)

# %% [markdown]
# ## Pipeline and data parallelism together
#
# A pipeline of $p$ stages on $N$ ranks leaves room for $d = N/p$ *replicas* of the pipeline. Ranks that hold the same stage in different replicas average their gradients.
# They do so once, after the last micro-batch, because the gradient of a step is the sum over all micro-batches. `Pipeline._end_step` does it with one all-reduce for each parameter:

# %%
show.source(average_gradients)

# %% [markdown]
# Two replicas of a two-stage pipeline, compared with one process:

# %% tags=["hide-input"]
# Compares two copies of two stages with one process


def compare_two_by_two(m):
    """On a rank: largest difference from one process, all-reduces, parameters."""
    rank = dist.get_rank()
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    copy_, stage = divmod(rank, 2)
    schedule = pipeline.make_schedule("1f1b", 2, m)
    options = {"replicas": replicas[stage]}
    mine = pipeline.distribute_model(
        build_model(SMALL), schedule, pipelines[copy_], **options
    )
    # A batch for each copy
    batches = [make_batch(8, step, SMALL.seq) for step in (0, 1)]
    with count.record_traffic() as sent:
        mine.step(*batches[copy_])
    alone = build_model(SMALL)
    for tokens, targets in batches:
        for x, y in zip(tokens.chunk(m), targets.chunk(m), strict=True):
            (loss(alone(x), y) / m / 2).backward()
    want = dict(alone.named_parameters())
    apart = max(
        (p.grad - want[name].grad).abs().max() for name, p in mine.named_parameters()
    )
    return apart.item(), sent.collectives["all_reduce"][0], len(list(mine.parameters()))


for m in (2, 8):
    results = ranks.run(compare_two_by_two, 4, m)
    apart = max(result[0] for result in results)
    # (a + b) + (c + d) beside ((a + b) + c) + d: 2 * 15 * 2^-24 of up to 1
    assert apart < 1.8e-6
    assert all(calls == parameters for _, calls, parameters in results)
    _, calls, parameters = results[0]
    print(f"m = {m}: gradients differ by {apart:.0e}")
    print(f"  {calls} all-reduces for {parameters} parameters")

# %% [markdown]
# A wrapper that averages after every micro-batch would send $m$ times as much. Fewer, larger messages would be faster: the buckets of [Data parallelism](data_parallel.md).
#
# ## What goes wrong
#
# ### Two stages, two schedules
#
# One node starts with an old configuration. Stage 0 runs the naive loop and waits for gradient 0 before its second forward; stage 1 runs GPipe and waits for both activations before it sends a gradient.
# Each list alone is correct. `validate` simulates both together:

# %%
mixed = pipeline.parse_schedule("F0 B0 F1 B1", "F0 F1 B0 B1")
try:
    pipeline.validate(mixed)
except ValueError as error:
    print(error)

# %% [markdown]
# Without `validate`, the ranks hang. With a timeout of three seconds, they stop with this message:

# %% tags=["hide-input"]
# Runs the two schedules unchecked, until the timeout names the waiting ranks


def run_unchecked(schedule):
    mine = pipeline.distribute_model(
        build_model(), schedule, dist.group.WORLD, check=False
    )
    value = mine.step(*make_batch(2))
    return None if value is None else value.item()


try:
    # CPU: gloo, whose ranks can say where they wait
    ranks.run(run_unchecked, 2, mixed, timeout=3, device="cpu", own_processes=True)
except ranks.RankError as error:
    print(error)
    assert error.ranks == [0, 1]
else:
    raise AssertionError("this was meant to hang")

# %% [markdown]
# With nccl the default timeout is ten minutes.
#
# ### Two messages swapped
#
# This mistake is worse, because nothing hangs. Stage 1 posts its first two receives in the wrong order, and both messages have the same size.

# %%
right = pipeline.schedule_gpipe(2, 2)
one, two, *others = right.actions[1]
swapped = replace(right, explicit_actions=(right.actions[0], (two, one, *others)))
print("stage 1:", *swapped.actions[1])

# %% [markdown]
# The losses of the right and the wrong schedule, and the message of `validate`:

# %% tags=["hide-input"]
# Runs both schedules unchecked, and validates the wrong one

for schedule in (right, swapped):
    # CPU: gloo, like the run that hung
    print(f"loss: {ranks.run(run_unchecked, 2, schedule, device='cpu')[1]:.4f}")
try:
    pipeline.validate(swapped)
except ValueError as error:
    print(textwrap.fill(str(error), 90))

# %% [markdown]
# There is no error, and the loss looks plausible. But the last stage pairs activations of one half of the batch with targets of the other half, and the model learns from these wrong pairs.
# Only a comparison with one process, or `validate`, shows the mistake.
#
# ### A stage that raises
#
# The other stages wait for messages that never come. `ranks.run` names the rank that raised, not the ranks that waited for it. Under `torchrun`, look for the *earliest* error.

# %% tags=["hide-input"]
# Makes stage 2 raise, and prints the rank that the error names


def run_failing_stage():
    mine = make_pipeline("1f1b", 4)
    passed = []

    def look(module, inputs):
        passed.append(module)
        if dist.get_rank() == 2 and len(passed) == 3:
            raise FloatingPointError("micro-batch 2: activations are not finite")

    mine.parts[0].register_forward_pre_hook(look)
    mine.step(*make_batch(8))


try:
    # CPU: gloo, whose ranks can say where they wait
    ranks.run(run_failing_stage, 4, device="cpu")
except ranks.RankError as error:
    print(error)
    assert error.ranks == [2]
else:
    raise AssertionError("this was meant to fail")

# %% [markdown]
# ### Gradients m times too large, or too small
#
# Each micro-batch's loss is a mean over its own sequences, so the micro-batches' gradients add up to $m$ times the right gradient. Torch's schedules divide by $m$ (`scale_grads=True`). If you divide the loss as well, as gradient accumulation does, you divide twice.

# %% tags=["hide-input"]
# Compares gradients divided by torch, by nobody, and twice


def compare_norms(m):
    """On a rank: the norm of this stage's gradients, in units of the right one."""
    step = make_pipeline("gpipe", m)
    step.step(*make_batch(8))
    right = sum(p.grad.square().sum() for p in step.parameters()).sqrt()
    found = {}
    ways = {"torch divides (default)": {}, "nobody divides": {"scale_grads": False}}
    ways["torch and the loss divide"] = {
        "loss_fn": lambda y, targets: loss(y, targets) / m
    }
    for name, options in ways.items():
        run, parts = make_torch_pipeline("gpipe", m, build_model(), **options)
        run(*make_batch(8))
        norm = sum(p.grad.square().sum() for p in parts.parameters()).sqrt()
        found[name] = (norm / right).item()
    return found


# CPU: each stage would need its own GPU
found = ranks.run(compare_norms, 2, 4, device="cpu")[0]
assert [round(ratio, 4) for ratio in found.values()] == [1, 4, 0.25]
for name, ratio in found.items():
    print(f"{name}: the gradient's norm is {ratio:.2f} of the right one")

# %% [markdown]
# AdamW hides both mistakes ([Data parallelism](data_parallel.md)); clipping does not. Compare the gradient norm of the first step with that of one process.
#
# ## When to use it
#
# | for | against |
# |---|---|
# | Sends little: 0.5 MB from a stage in the step above, where data parallelism sends 9.9 MB | Has a bubble: 27 % with 4 stages and 8 micro-batches, 16 % interleaved, 11 to 0 % with a split backward |
# | Divides weights, gradients and optimizer states by $p$ | Does not divide activations: stage 0 keeps activations of $p$ micro-batches in $1/p$ of the layers |
# | Gradients are bitwise equal to one process's | Needs stages of equal time: Llama's head costs 2.4 layers, so with four stages an even cut makes a step 12 % longer than necessary |
# | Works with any layer, unchanged; ZB-V has no bubble, with 1F1B's memory | A split backward changes every linear layer, and two chunks double the messages |
#
# In a real job, three signs show a correct setup. The first loss and gradient norm equal those of one process. With 1F1B, memory falls from the first stage to the last. Twice as many micro-batches of the same size take less than twice as long, because the bubble does not grow.
#
# ## Exercises
#
# ```{exercise-start} GPipe's bubble (easy)
# :label: ex-pipeline-bubble
# ```
#
# Eight stages of equal time run GPipe with 32 micro-batches.
# What fraction of the time is a stage idle, from the first stage's first forward to its last backward?

# %%
answer = ...  # between 0 and 1
check(answer, "pipeline_bubble")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-pipeline-bubble
# :label: sol-pipeline-bubble
# :class: dropdown
# ```
#
# A stage works for 32 slots of $f + g$, and waits for 7 while the pipeline fills and drains.

# %%
answer = 7 / (32 + 7)
check(answer, "pipeline_bubble")


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Activations that a stage holds (easy)
# :label: ex-pipeline-live
# ```
#
# `order` is a stage's list, such as `["F0", "F1", "B0", "B1"]`. Return the largest number of micro-batches whose activations the stage holds at the same time.
# If the backward is split into `"I0"` and `"W0"`, the `W` frees the activations.

# %%
def my_live(order):
    pass  # your code


check(my_live)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-pipeline-live
# :label: sol-pipeline-live
# :class: dropdown
# ```
#
# A forward adds one, a backward takes one away.

# %%
def my_live(order):
    live = most = 0
    for action in order:
        live += {"F": 1, "B": -1, "I": 0, "W": -1}[action[0]]
        most = max(most, live)
    return most


check(my_live)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Interleaved 1F1B (medium)
# :label: ex-pipeline-interleaved
# ```
#
# Write the order of a stage in the interleaved schedule, for $m$ a multiple of $p$, as a list of strings: `"F5.1"` is the forward of micro-batch 5 through the stage's chunk 1.
# Micro-batches go in groups of $p$. A group passes all chunks in turn, forward from chunk 0 up, backward from the last chunk down; then comes the next group.
# Stage $s$ starts with $2(p-1-s) + (v-1)p$ forwards, or all if there are fewer; then it alternates one forward, one backward; then the remaining backwards follow.

# %%
def my_interleaved(stage, stages, microbatches, chunks):
    pass  # your code


check(my_interleaved)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-pipeline-interleaved
# :label: sol-pipeline-interleaved
# :class: dropdown
# ```
#
# The solution is 1F1B's three loops, over lists whose actions name their chunk, too.

# %%
def my_interleaved(stage, stages, microbatches, chunks):
    forwards, backwards = [], []
    for first in range(0, microbatches, stages):
        group = range(first, first + stages)
        forwards += [f"F{i}.{c}" for c in range(chunks) for i in group]
        backwards += [f"B{i}.{c}" for c in reversed(range(chunks)) for i in group]
    ahead = 2 * (stages - 1 - stage) + (chunks - 1) * stages
    ahead = min(ahead, len(forwards))
    order = forwards[:ahead]
    for i in range(len(forwards) - ahead):
        order += [forwards[ahead + i], backwards[i]]
    return order + backwards[len(forwards) - ahead :]


check(my_interleaved)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Unequal layers (medium)
# :label: ex-pipeline-balance
# ```
#
# `costs` is the time of each layer, in order; the last one includes the head.
# Split the layers into `parts` groups of consecutive layers, none empty, so that the slowest group is as fast as possible. Return how many layers each group gets.

# %%
def my_balance(costs, parts):
    pass  # your code


check(my_balance)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-pipeline-balance
# :label: sol-pipeline-balance
# :class: dropdown
# ```
#
# Try every place of the last cut; the layers before it are the same problem with one part fewer.

# %%
def my_balance(costs, parts):
    def best(end, parts):  # (slowest part, layers of each) of the first `end` layers
        if parts == 1:
            return sum(costs[:end]), [end]
        cuts = []
        for begin in range(parts - 1, end):
            slowest, layers = best(begin, parts - 1)
            cuts.append((max(slowest, sum(costs[begin:end])), [*layers, end - begin]))
        return min(cuts)

    return best(len(costs), parts)[1]


check(my_balance)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} 1F1B with blocking messages (hard)
# :label: ex-pipeline-1f1b
# ```
#
# Write a step of 1F1B on one stage with two blocking calls: `send(tensor, peer)` returns when `peer` has received; `receive(like, peer)` waits for a tensor of the shape and dtype of `like`, and returns it.
# `part` is this rank's module, from [b, h] to [b, h]; `x_BH` and `y_BH` are the whole batch of inputs and targets, the same on every rank; `m` divides it.
# The loss is `F.mse_loss`, the mean over the whole batch. Leave the gradients in the parameters of `part`, and hold no more than $p - s$ micro-batches.

# %%
def my_1f1b(part, x_BH, y_BH, m, stage, stages, send, receive):
    pass  # your code


check(my_1f1b)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-pipeline-1f1b
# :label: sol-pipeline-1f1b
# :class: dropdown
# ```
#
# In the steady state, two neighbours exchange an output and a gradient. `swap` sends one and receives the other; even stages send first.
# The gradient for the previous stage and the next input from that stage are such a pair, so `swap` exchanges them before the next forward.

# %%
def my_1f1b(part, x_BH, y_BH, m, stage, stages, send, receive):
    xs, ys, kept = list(x_BH.chunk(m)), list(y_BH.chunk(m)), []

    def swap(out, peer):
        if stage % 2 == 0:
            send(out, peer)
            return receive(out, peer)
        got = receive(out, peer)
        send(out, peer)
        return got

    def forward(x, y):
        out = part(x.requires_grad_(stage > 0))
        kept.append((x, out if stage < stages - 1 else F.mse_loss(out, y) / m))
        return out.detach()

    def backward(dy):
        x, out = kept.pop(0)
        out.backward(dy)
        return x.grad

    ahead = min(stages - 1 - stage, m)
    for i in range(ahead):  # warm-up
        x = receive(xs[i], stage - 1) if stage > 0 else xs[i]
        send(forward(x, ys[i]), stage + 1)
    dx = None  # of the last backward
    for i in range(ahead, m):  # steady
        x = xs[i]
        if stage > 0:
            x = receive(x, stage - 1) if i == ahead else swap(dx, stage - 1)
        out = forward(x, ys[i])
        dx = backward(swap(out, stage + 1) if stage < stages - 1 else None)
    if stage > 0 and ahead < m:
        send(dx, stage - 1)
    for _ in range(ahead):  # cool-down
        dx = backward(receive(kept[0][1], stage + 1))
        if stage > 0:
            send(dx, stage - 1)


check(my_1f1b)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Find the deadlock (hard)
# :label: ex-pipeline-deadlock
# ```
#
# `orders` has a list for each stage, such as `[["F0", "F1", "B0", "B1"], ["F0", "B0", "F1", "B1"]]`.
# A forward waits for the same micro-batch's forward on the previous stage. A backward waits for the same micro-batch's backward on the next stage; on the last stage, for the micro-batch's forward.
# Return `{stage: action}`: the stages that wait for ever, and the action at which each waits; `{}` if all finish.

# %%
def my_deadlock(orders):
    pass  # your code


check(my_deadlock)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-pipeline-deadlock
# :label: sol-pipeline-deadlock
# :class: dropdown
# ```
#
# Advance every stage as far as it can go, and repeat until no stage moves.

# %%
def my_deadlock(orders):
    done, at, moved = set(), [0] * len(orders), True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                action = order[at[stage]]
                need = (stage - 1 if action[0] == "F" else stage + 1, action)
                if need[0] == len(orders):
                    need = (stage, "F" + action[1:])
                if need[0] >= 0 and need not in done:
                    break
                done.add((stage, action))
                at[stage] += 1
                moved = True
    waiting = zip(at, orders, strict=True)
    return {s: order[i] for s, (i, order) in enumerate(waiting) if i < len(order)}


check(my_deadlock)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} How many micro-batches? (design)
# :label: ex-pipeline-microbatches
# ```
#
# `stages` stages run 1F1B on `batch` sequences in a step.
# Return the smallest $m$ that divides the batch, keeps the bubble at or below `bubble`, and lets the first stage hold activations of no more than `room` sequences; `None` if there is none. (The smallest, because large micro-batches compute faster.)

# %%
def my_microbatches(stages, batch, bubble, room):
    pass  # your code


check(my_microbatches)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-pipeline-microbatches
# :label: sol-pipeline-microbatches
# :class: dropdown
# ```
#
# The first stage holds $\min(p, m)$ micro-batches of $B/m$ sequences.

# %%
def my_microbatches(stages, batch, bubble, room):
    for m in range(1, batch + 1):
        idle = (stages - 1) / (m + stages - 1)
        held = min(stages, m) * batch / m  # sequences
        if batch % m == 0 and idle <= bubble and held <= room:
            return m
    return None


check(my_microbatches)

# %% [markdown]
# ```{solution-end}
# ```
#
# ## Summary
#
# - If a model is only split into stages, one of $p$ GPUs works at a time; with $m$ micro-batches, GPipe and 1F1B have a bubble of $\frac{p-1}{m+p-1}$.
# - 1F1B has GPipe's bubble and holds $p - s$ micro-batches on stage $s$ instead of $m$; so use 1F1B with a larger $m$.
# - Interleaving divides the time to fill the pipeline by $v$ and multiplies messages by $v$; a split backward fills the remaining gaps.
# - A schedule is a list for each stage: validate and simulate the list before you run it.
# - If two neighbours both send, avoid a deadlock by the parity rule, one batch of both messages, or a group for each direction.
# - The gradients equal one process's bit for bit; each micro-batch's loss is weighted by its fraction of the batch.
# - The slowest stage determines the step time: count the head as layers. A pipeline sends less than data parallelism if a step has fewer than $P/h$ tokens.
#
# ## Further reading
#
# - {cite:t}`huang2019gpipe`: micro-batches, recomputation, and the first table of speed over stages and micro-batches.
# - {cite:t}`narayanan2019pipedream`: the first 1F1B, asynchronous, with several versions of the weights.
# - {cite:t}`fan2021dapple`: synchronous 1F1B, which equals one process, and a planner for stages and replicas.
# - {cite:t}`narayanan2021megatron`: interleaving, and pipeline, tensor and data parallelism on thousands of GPUs; section 3 on how to choose.
# - {cite:t}`qi2024zerobubble`: the split backward; hand-made schedules in section 2, the optimizer step without synchronization in section 4, ZB-V in section 6.
# - {cite:t}`deepseek2024v3`: DualPipe, which feeds the pipeline from both ends and overlaps the messages of experts.
