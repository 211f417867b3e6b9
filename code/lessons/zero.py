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
# # ZeRO: one copy of the model states instead of many
#
# After this lesson you can
#
# - say what each of ZeRO's stages shards, and predict to the byte what a rank then holds;
# - write each stage in some twenty lines, and prove that it computes what one process computes;
# - predict the bytes that each stage sends, and say when sending costs time;
# - translate between ZeRO's stages, PyTorch's FSDP2 and DeepSpeed.
#
# A model of 7 billion parameters takes 112 GB of states during training: 16 bytes per parameter ([Memory](memory.md)).
# Eight ranks that train it with data parallelism hold 896 GB; 784 GB of these are copies.
#
# ## How many bytes data parallelism holds twice

# %% tags=["hide-input"]
# Imports, and the small GPT that every cell trains
import contextlib
import copy
import hashlib
import time
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardcourse.exercises import check
from shardlab import memory, ranks, zero
from shardlab.common import show, text
from shardlab.data_parallel import DataParallel, measure_drift
from shardlab.gpt.model import GPT, PRESETS, Config, loss
from shardlab.layout import Layout
from shardlab.measure import count, link
from shardlab.ranks.torch_compat import all_gather_single, reduce_scatter_single

show.set_style()


def make_adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=False)


def make_job(stage, config=PRESETS["nano"], group=None, **options):
    """The same GPT on every rank, in a stage (0: data parallel), and its AdamW."""
    torch.manual_seed(0)
    model = GPT(config).to(ranks.device())
    group = group or dist.group.WORLD
    if stage:
        model = zero.shard_module(model, group, stage, **options)
    else:
        model = DataParallel(model, group)
    return model, make_adamw(model.parameters())


def local_batch(step, size=1, rank=None):
    """This rank's `size` windows of text for a step: tokens, targets: [size, 64]."""
    rank, count_ = dist.get_rank() if rank is None else rank, dist.get_world_size()
    tokens, targets = text.get_batch(64, size, start=(step * count_ + rank) * size)
    return tokens.to(ranks.device()), targets.to(ranks.device())


def train_steps(model, optimizer, steps, first=0):
    """Train on this rank's share; the losses."""
    losses = []
    for step in range(first, first + steps):
        tokens, targets = local_batch(step)
        optimizer.zero_grad()
        value = loss(model(tokens), targets)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def max_difference(a, b):
    """The largest difference between two state dicts."""
    return max((a[name] - b[name]).abs().max().item() for name in a)


# %% [markdown]
# You need the reduce-scatter and the all-gather, as [Model parallelism](model_parallelism.md#zero-copies-that-divide-their-states) defines them and [Collectives](collectives.md) builds them.
#
# Data parallelism makes its ranks equal on purpose: same weights, same averaged gradients, so the same step of the same optimizer.
# The next cell trains with data parallelism on four ranks, and computes a hash of every tensor that each rank holds: equal tensors have equal hashes.

# %%
def digest_weights():
    model, optimizer = make_job(0)
    train_steps(model, optimizer, 2)
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


# %% tags=["hide-input"]
# Table: bytes held by four ranks, with and without copies
held, different = defaultdict(int), defaultdict(int)
everywhere = [entry for found in ranks.run(digest_weights, 4) for entry in found]
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
    ["model states", "held by four ranks (MB)", "without copies (MB)"],
    caption=f"{100 * waste:.0f} % are copies",
)

# %% [markdown]
# Three quarters of the memory are copies; with $N$ ranks, a fraction of $1 - 1/N$.
#
# ## Three stages in a picture
#
# ZeRO, the *zero redundancy optimizer*, divides model states into one *shard* for each rank. A rank keeps only its own shard, except while it computes with the full tensor {cite}`rajbhandari2020zero`.
# Stage 1 shards the optimizer's states, stage 2 also the gradients, and stage 3 also the weights.
# In the picture a shard has the colour of the rank that keeps it.
#
# ![What four ranks hold in ZeRO's stages; weights, gradients and optimizer states are each divided into four shards. Stage 0: every rank holds all shards of all three. Stage 1: each rank holds only its own shard of the optimizer states. Stage 2: also only its own shard of the gradients. Stage 3: also only its own shard of the weights.](../figures/zero_stages.svg)
#
# ZeRO is still data parallelism: every rank computes the whole model on its own batch.
# Only the *storage* of the states is divided.
#
# The table follows from the picture. As in the paper, a parameter takes 2 bytes of weight, 2 of gradient, and 12 of optimizer state: a float32 master weight and two moments.
# The last column is from the paper's Figure 1 and Table 1.
#
# ```{predict}
# :row: 1
# :column: on 64 ranks (GB)
#
# A rank without ZeRO holds 16 bytes for each of 7.5 billion parameters. How many GB does it hold in stage 1, on 64 ranks?
# ```

# %% tags=["hide-input"]
# Table: bytes of model states by stage, beside the published ones
formulas = ["2 + 2 + 12", "2 + 2 + 12/N", "2 + 2/N + 12/N", "2/N + 2/N + 12/N"]
published = [120, 31.4, 16.6, 1.88]  # GB: Rajbhandari et al. 2020, Figure 1 and Table 1
rows = []
for stage, (formula, printed) in enumerate(zip(formulas, published, strict=True)):
    totals = [
        memory.estimate_states(7.5e9, Layout(dp=n, zero=stage), "fp16").total
        for n in (4, 64)
    ]
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
# On 4 ranks stage 1 already saves more than half, since the optimizer is 12 of the 16 bytes. From 4 to 64 ranks only stage 3 shrinks 16-fold: the states that stages 1 and 2 do not shard stay as large.
#
# ## A minimal version of each stage
#
# ### Stage 1: each rank updates its shard
#
# If rank $r$ updates only shard $r$ of the weights, it needs only shard $r$ of the averaged gradient.
# A reduce-scatter gives it this shard. After the step an all-gather gives every rank all new weights.
#
# ![A step of ZeRO's stage 1 on four ranks. Each rank has gradients of its own batch. A reduce-scatter leaves rank r with shard r of their average. Rank r updates its shard of the weights, and an all-gather gives every rank all four new shards.](../figures/zero_step.svg)
#
# Whole parameters cannot be divided evenly among ranks: one rank would get the embedding, another a few biases.
# So all parameters are concatenated in one flat tensor of $P$ elements, which is split into $N$ equal shards, also in the middle of a parameter.
# The optimizer is torch's own. Its only parameter is the shard, so it keeps states only for the shard.

# %%
def stage_1(model, group, steps):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    weights = parameters_to_vector(model.parameters()).detach()  # [P]
    vector_to_parameters(weights, model.parameters())  # they are views into it now
    own = nn.Parameter(weights.chunk(size)[rank])  # [P/N], the same memory again
    own.grad = torch.empty_like(own)
    optimizer = make_adamw([own])
    for step in range(steps):
        tokens, targets = local_batch(step)
        loss(model(tokens), targets).backward()
        gradient = parameters_to_vector(p.grad for p in model.parameters())
        reduce_scatter_single(own.grad, gradient / size, group=group)  # [P] to [P/N]
        optimizer.step()
        all_gather_single(weights, own.detach(), group=group)  # [P/N] to [P]
        model.zero_grad()


# %% [markdown]
# The reference is one process: it computes the ranks' shares of the batch one after another, adds up their gradients, each divided by $N$, and steps once.
# After five steps the weights of two ranks are bitwise equal to those of this process.

# %% tags=["hide-input"]
# Compares weights after five steps of a plain version with one process
def one_process(model, size, steps):
    optimizer = make_adamw(model.parameters())
    for step in range(steps):
        for rank in range(size):
            tokens, targets = local_batch(step, rank=rank)
            (loss(model(tokens), targets) / size).backward()
        optimizer.step()
        optimizer.zero_grad()


def from_one_process(plain, dtype):
    torch.manual_seed(0)
    alone = GPT(PRESETS["nano"]).to(ranks.device(), dtype)
    model = copy.deepcopy(alone)
    plain(model, dist.group.WORLD, 5)
    one_process(alone, dist.get_world_size(), 5)
    return max_difference(model.state_dict(), alone.state_dict())


def check_equal(plain):
    on_two = ranks.run(from_one_process, 2, plain, torch.float32)[0]
    on_four = ranks.run(from_one_process, 4, plain, torch.float64)[0]
    # Of two terms only a + b is to be computed: the same bits on any CPU. Gloo adds
    # four in its own order: 2 * 3 * 2^-53 of 0.7, and in AdamW's five steps lr / eps
    # times that; in float32 up to 1e-3 a step, either way.
    assert ranks.choose_backend(2)[1] != "cpu" or on_two == 0.0
    assert on_two < 5e-3 and on_four < 3e-10
    print("largest difference from one process, 2 ranks, float32:", on_two)
    print("largest difference from one process, 4 ranks, float64: below 3e-10")


check_equal(stage_1)


# %% [markdown]
# An all-reduce *is* a reduce-scatter and an all-gather ([Collectives](collectives.md)).
# Stage 1 puts the optimizer's step between the two, so it sends no more bytes than data parallelism.
# A rank can update a shard alone because AdamW updates each element independently. An optimizer that needs a whole matrix, such as Shampoo or Muon, cannot be sharded like this.
#
# ### Stage 2: reduce-scatter each gradient in backward
#
# After the reduce-scatter a rank needs only its shard of a gradient.
# To save memory the reduce-scatter must start early: a hook calls it for each parameter, as soon as autograd has computed that parameter's gradient.
# So here each parameter has its own shards.

# %%
def shard_of(p, group):
    return p.detach().flatten().chunk(dist.get_world_size(group))[dist.get_rank(group)]


def reduce_to_owner(p, own, group):
    own.grad = torch.empty_like(own)
    mine = p.grad.flatten() / dist.get_world_size(group)
    reduce_scatter_single(own.grad, mine, group=group)
    p.grad = None  # frees the full gradient


def stage_2(model, group, steps):
    own = {p: nn.Parameter(shard_of(p, group)) for p in model.parameters()}  # views
    optimizer = make_adamw(own.values())
    for p in own:
        p.register_post_accumulate_grad_hook(
            lambda p: reduce_to_owner(p, own[p], group)
        )
    for step in range(steps):
        tokens, targets = local_batch(step)
        loss(model(tokens), targets).backward()
        optimizer.step()
        for p in own:
            all_gather_single(p.data.view(-1), own[p].data, group=group)


# %% tags=["hide-input"]
# Compares the weights of stage 2 with one process
check_equal(stage_2)


# %% [markdown]
# When `backward` returns, no full gradient is left; during backward there is never more than one full gradient.
#
# ### Stage 3: gather before use, free after
#
# A layer's weights are needed only while that layer computes, once in forward and once in backward. At all other times a shard is enough.
# Four hooks gather and free the weights. A module's parameters are gathered before its forward, and freed after it. They are gathered again before its backward, and freed when their gradients are computed.

# %%
def stage_3(model, group, steps):
    own = {p: nn.Parameter(shard_of(p, group).clone()) for p in model.parameters()}
    optimizer = make_adamw(own.values())

    def gather_weights(module, *_):
        for p in module.parameters(recurse=False):
            p.untyped_storage().resize_(p.nbytes)
            all_gather_single(p.data.view(-1), own[p].data, group=group)

    def free_weights(module, inputs, output):
        for p in module.parameters(recurse=False):
            p.untyped_storage().resize_(0)
        output.register_hook(lambda _: gather_weights(module))  # before its backward

    def reduce_and_free(p):
        reduce_to_owner(p, own[p], group)
        p.untyped_storage().resize_(0)

    for p in own:
        p.untyped_storage().resize_(0)
        p.register_post_accumulate_grad_hook(reduce_and_free)
    for module in model.modules():
        module.register_forward_pre_hook(gather_weights)
        module.register_forward_hook(free_weights)
    for step in range(steps):
        tokens, targets = local_batch(step)
        loss(model(tokens), targets).backward()
        optimizer.step()
    model.apply(gather_weights)  # for whoever reads the weights afterwards


# %% tags=["hide-input"]
# Compares the weights of stage 3 with one process
check_equal(stage_3)

# %% [markdown]
# Autograd has saved the weights for backward. They can be freed nevertheless, because `resize_(0)` frees only the *storage*.
# The tensor object stays, and the next gather fills it again before backward reads it.
# No all-gather follows the step: the next forward gathers what it needs.
#
# ### What the plain versions leave out
#
# All three assume that $N$ divides the sizes of the parameters, and that each parameter gets a gradient.
# Stage 1 waits for all gradients, copies them into a flat tensor, and divides by $N$ into another tensor: for a moment it holds all gradients three times.
# Stages 2 and 3 send a message for each parameter, and wait for each of them: nothing overlaps.
# The table compares one step of each plain version with the core (next section), on two ranks over a link with 1 ms of latency.

# %% tags=["hide-input", "measured"]
# Table: messages, peak and seconds of the plain versions beside the core
THREE = Config(seq=64, layers=3, heads=4, hidden=128)


def run_core(stage):
    def run(model, group, steps):
        model = zero.shard_module(model, group, stage)
        train_steps(model, make_adamw(model.parameters()), steps)

    return run


def plain_and_core(ways):
    """Return messages and seconds of a step of each, and the peak of two steps."""
    wire, found = link.create_slow_group(1e-3, 1e9), []
    for way in ways:
        torch.manual_seed(0)
        model, marks = GPT(THREE), []
        with count.record_traffic() as sent, count.track_memory(model) as held:

            def record_mark(*_, marks=marks, sent=sent):
                names = "all_gather_into_tensor", "reduce_scatter_tensor"
                messages = sent.messages + sum(sent.calls[name] for name in names)
                marks.append((messages, time.perf_counter()))

            hook = register_optimizer_step_post_hook(record_mark)
            way(model, wire, 2)
            hook.remove()
        first, second = marks
        found.append((second[0] - first[0], held.peak_bytes, second[1] - first[1]))
    return found


ways = [stage_1, run_core(1), stage_2, run_core(2), stage_3, run_core(3)]
# CPU: times of the CPU's work and a wire
found = ranks.run(plain_and_core, 2, ways, device="cpu")[0]
names = [f"{stage}, {way}" for stage in (1, 2, 3) for way in ("plain", "core")]
rows = [
    (name, messages, f"{peak / 1e6:.1f}", f"{1e3 * seconds:.0f}")
    for name, (messages, peak, seconds) in zip(names, found, strict=True)
]
(m1, p1, _), (_, c1, _), (m2, p2, s2), (_, c2, t2), (m3, p3, s3), (_, c3, t3) = found
assert m3 > m2 > 20 * m1
show.check_timing(
    s2 > 1.2 * t2 and s3 > 1.2 * t3, "in stages 2 and 3 the core is faster by 20 %"
)
fits = p1 > 1.2 * c1 and p1 > 1.2 * p2 and c3 < 1.05 * p3
show.check_timing(fits, "peaks: stage 1 plain is the highest")
show.table(
    rows,
    ["stage, way", "gathers and reduce-scatters", "peak (MB)", "step (ms)"],
    caption="Two ranks, 1 ms of latency",
)

# %% [markdown]
# The core sends a few flat tensors of any size instead of a message per parameter, and ranks compute meanwhile.
# In stage 3 the core's peak is no higher, although it gathers two blocks at a time instead of one layer.
# The core's stages 1 and 2 have the same peak here, because the buckets are larger than this model; [below](#zero-peak) buckets are smaller.
#
# ## The core
#
# `python -m shardlab.zero` trains five steps in each stage on two ranks, compares with one process, and prints the bytes held and sent.
#
# ### Flat tensors of any size
#
# `FlatParams` concatenates parameters, as the plain stage 1 does, and pads the tensor with fewer than $N$ zeros, so that all shards have the same size.
# `split_shard` returns the part of each parameter that a shard holds; the optimizer gets these *pieces*.
# `start_gather`, `wait` and `free_full` do what the plain stage 3 does, but a rank can compute between `start_gather` and `wait`.

# %%
show.source(zero.FlatParams)

# %% [markdown]
# ### Gradients, from autograd to a shard
#
# The reduce-scatter of this course sends each shard directly to its owner, which adds up the received shards in the order of the ranks.
# It sends as many bytes as any other reduce-scatter. Because the order is fixed, the sums have the same bits as those of one process, on any number of ranks.

# %%
show.source(zero.ReduceScatter)

# %% [markdown]
# `FlatGrads` reduce-scatters a flat tensor's gradients, as the plain stage 2's hook does for a parameter, in three calls: `add_gradient` for each gradient that autograd computes, `start_reduce_scatter` after the last gradient, `finish_reduce_scatter` later.
# If no rank has a parameter's gradient, the piece's `grad` has to stay `None`, as in one process. `resolve_missing`, which is called last, does this.

# %%
show.source(zero.FlatGrads)

# %% [markdown]
# A `Reducer`, named after the one in torch's DDP, calls these methods during a backward. Only one reduce-scatter runs at a time, since each takes memory.

# %%
show.source(zero.Reducer)

# %% [markdown]
# ### Stages 1 and 2: buckets sent during backward
#
# `Zero1` divides the parameters into buckets, each a `FlatParams`. Its methods are in the order in which a step calls them.
# The all-gather starts only in the next forward (`_pre_forward`), in which each layer waits only for its own weights (`_wait_for_params`).
# ZeRO's paper and DeepSpeed gather at the end of the step, as the plain version does.
# As in data parallelism, a bucket is sent while backward still computes the next one (`_on_grad_ready`), and autograd calls `_finalize_backward` when backward is over.

# %%
show.source(zero.Zero1)

# %% [markdown]
# Stage 2 changes little: full gradients are not kept. The last line of `Zero2` disables `no_sync`; the reason is [below](#zero-accumulation).

# %%
show.source(zero.Zero2)

# %% [markdown]
# ### Stage 3: prefetching the next block
#
# The plain stage 3 waits for two all-gathers for each layer. Here the model is divided into *units*, by default its blocks, and while one unit computes, the next one is gathered.
#
# Step through a training step. Weights are above, gradients below. A weight has the colour of the rank that keeps its shard. A gradient has the colour of the rank whose batch it comes from. A thick outline marks what has just arrived.
#
# :::{step-through} Stage 3 on four ranks, three blocks
# 1. ![Before the step. Two tables, weights above and gradients below, with a row for each of four ranks and three blocks side by side, each divided into four shards. Of each block's weights rank r holds only shard r. There are no gradients.](../figures/steps/zero_1.svg)
#
#    Between steps each rank has a quarter of every block's weights, and no gradients.
#
# 2. ![Block 1 is gathered: each rank sends its shard, and every rank now has all four shards of block 1. Of blocks 2 and 3 each rank still has only its own shard.](../figures/steps/zero_2.svg)
#
#    Before the first forward block 1 is gathered: an all-gather gives every rank the three quarters that it lacks.
#
# 3. ![Every rank computes the forward of block 1 while block 2 is gathered: blocks 1 and 2 are full on every rank, block 3 is sharded.](../figures/steps/zero_3.svg)
#
#    Each rank computes block 1 on its own batch. Meanwhile block 2 is gathered, so that no rank has to wait for it.
#
# 4. ![Block 1 is freed, except each rank's own shard. Every rank computes the forward of block 2 while block 3 is gathered: blocks 2 and 3 are full.](../figures/steps/zero_4.svg)
#
#    Block 1 is done: each rank frees all but its own quarter. So a rank never holds more than two full blocks.
#
# 5. ![Block 2 is freed. Every rank computes the forward of block 3, the only full block.](../figures/steps/zero_5.svg)
#
#    The last block computes. Nothing is left to gather.
#
# 6. ![Block 3 was freed after its forward like the others. While every rank computes its loss, block 3 is gathered again, for backward.](../figures/steps/zero_6.svg)
#
#    Block 3 was freed like the others. It is gathered again for backward, while the ranks compute their losses.
#
# 7. ![Every rank computes the backward of block 3 while block 2 is gathered: blocks 2 and 3 are full. In the lower table every rank has all four shards of block 3's gradients, of its own batch.](../figures/steps/zero_7.svg)
#
#    Backward goes from the last block to the first. Each rank gets block 3's gradients of its own batch, while block 2 is gathered.
#
# 8. ![Block 3's weights are freed and its gradients reduce-scattered: rank r keeps shard r, the average over all four ranks. Every rank computes the backward of block 2, whose gradients it now has of its own batch, while block 1 is gathered: blocks 1 and 2 are full.](../figures/steps/zero_8.svg)
#
#    A reduce-scatter averages block 3's gradients over the ranks, and each rank keeps its quarter of the average.
#
# 9. ![Block 2's weights are freed and its gradients reduce-scattered. Every rank computes the backward of block 1, the only full block, and has its gradients of its own batch.](../figures/steps/zero_9.svg)
#
#    The same is done for block 2, while block 1 computes.
#
# 10. ![Block 1's weights are freed and its gradients reduce-scattered. Of the weights and of the averaged gradients of all three blocks rank r now holds only shard r.](../figures/steps/zero_10.svg)
#
#     Each rank has a quarter of the weights and a quarter of the gradients, and updates its weights.
#     No all-gather follows: the next forward gathers what it needs.
# :::
#
# The same on one rank, with four blocks; the row *link* shows the messages:
#
# ![Stage 3 through a step, on one rank, with four blocks. While a block computes, the link gathers the next block's weights, in backward the previous block's; in the first half of a block's backward it carries the following block's gradients. Each block is full in memory twice, at most two blocks at a time; otherwise the rank holds only its shard.](../figures/zero_life.svg)
#
# The hooks are those of the plain version, on units, and have the names that FSDP2 gives them: `_pre_forward`, `_post_forward`, `_pre_backward`, `_post_backward`.
# The two `_pre_` hooks also call `_prefetch_next`, which follows the order of units in the last forward.
# Autograd has no hook that runs after a unit's backward, so `Zero3` uses the moment when the gradients of all the unit's inputs are computed.
# Parameters that belong to no unit, here the embedding and the last LayerNorm, are the `rest`. Hooks of the whole module gather the rest once, and keep it gathered for the step.

# %%
show.source(zero.Unit.reduce_gradients, zero.Zero3)


# %% [markdown]
# ## Five steps equal one process
#
# The cell compares five steps of AdamW with one process: every rank's losses, and all final weights, first without clipping, then with gradients clipped to a norm of 0.5.

# %% tags=["hide-input"]
# Compares losses and weights of each stage with one process
def compare_to_plain(stage, clip, dtype):
    """Largest difference from one process in a loss, and in a weight after 5 steps."""
    torch.manual_seed(0)
    alone = GPT(PRESETS["nano"]).to(ranks.device(), dtype)
    model = zero.shard_module(copy.deepcopy(alone), dist.group.WORLD, stage)
    optimizers = [make_adamw(m.parameters()) for m in (alone, model)]
    rank, size = dist.get_rank(), dist.get_world_size()
    in_loss = 0.0
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        values = []
        for other in range(size):
            tokens, targets = local_batch(step, rank=other)
            values.append(loss(alone(tokens), targets))
            (values[-1] / size).backward()
        tokens, targets = local_batch(step)
        value = loss(model(tokens), targets)
        value.backward()
        if clip:
            nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
            model.clip_grad_norm_(0.5)
        for optimizer in optimizers:
            optimizer.step()
        in_loss = max(in_loss, abs(value - values[rank]).item())
    return in_loss, max_difference(alone.state_dict(), model.full_state_dict())


def compare_all():
    cases = (False, torch.float32), (True, torch.float32), (True, torch.float64)
    return {
        stage: [compare_to_plain(stage, *case) for case in cases] for stage in (1, 2, 3)
    }


rows = []
for size in (2, 4):
    for stage, found in ranks.run(compare_all, size)[0].items():
        (in_loss, plain), (_, clipped), (_, in_float64) = found
        if ranks.choose_backend(size)[1] == "cpu":
            # The same sums in the same order: the same bits.
            assert in_loss == plain == 0.0
        # Elsewhere, and for the norm, sums are made in another order: as above. Losses:
        # 4 sqrt(256 tokens) 2^-24 of 5.5, and a turned weight: 2 * 1e-3 * 0.01.
        assert in_loss < 4.1e-5 and max(plain, clipped) < 5e-3, found
        assert in_float64 < 3e-10, found
        values = in_loss, plain, clipped, in_float64
        cells = (f"{value:.0e}" if value else "0" for value in values)
        rows.append((size, stage, *cells))
head = ["ranks", "stage", "loss", "weights", "weights, clipped", "clipped, in float64"]
show.table(rows, head, caption="Largest differences from one process")


# %% [markdown]
# Zero means bitwise equal. On four ranks libraries differ from one process by some 1e-6 (FSDP2 [below](#zero-fsdp)), since they add in the fastest order.
# Clipping needs the norm of *all* gradients. Each rank sums the squares of its own shard, and one all-reduce adds up these sums.
# One process adds in a different order, so the last digits differ; in float64, which has nine more digits, the difference is nine digits smaller.
#
# The [tests](../tests/test_zero.py) do the same with sizes that $N$ does not divide, tied and frozen parameters, layers that only some ranks use, accumulation, and 16-bit weights with float32 masters; and compare with FSDP2 and DeepSpeed.
#
# ## What it costs
#
# ### Memory: the states, to the byte
#
# In float32 a parameter takes 4 bytes for the weight, 4 for the gradient, 8 for AdamW's two moments.
# Computing in bfloat16, it takes 2 bytes for the weight, 4 for the float32 master, 4 for the gradient, 8 for the moments.
# *By formula* is bytes per parameter times $P$. *Predicted* counts the padding as well ([predict.py](../code/shardlab/zero/predict.py)): there are three ranks here, and three does not divide $P$.

# %% tags=["hide-input"]
# Table: bytes of states, by formula, predicted and counted
def measure_states(stage, dtype):
    model, optimizer = make_job(stage, **({"compute_dtype": dtype} if stage else {}))
    train_steps(model, optimizer, 1)
    found = count.measure_state_bytes(model, optimizer)
    del found["counters"]  # AdamW counts its steps, in four bytes per parameter tensor
    both = [*model.parameters(), *model.module.parameters()]
    found["parameters"] = count.sum_bytes(both)  # a storage that both share counts once
    predicted = sum(zero.predict_state_bytes(model).values()) if stage else None
    return sum(found.values()), predicted


def all_states():
    cases = [(0, None), *((s, t) for t in (None, torch.bfloat16) for s in (1, 2, 3))]
    return {case: measure_states(*case) for case in cases}


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
# The prediction is right to the byte in every stage.
# In bfloat16 stage 3 holds no 16-bit weights at all between uses: it rounds them from the master weights when it gathers.
#
# (zero-peak)=
# ### Memory: what is not a state
#
# Besides states a rank holds activations, and in stage 3 the gathered units.
#
# `````{admonition} False: "ZeRO-3 divides all 122 GB by 8"
# :class: checked
#
# A frequent example: 7 billion parameters, 112 GB of states, 10 GB of activations, 8 GPUs, so 122 / 8 = 15 GB on each.
# But activations are those of a rank's *own* batch. No other rank has a copy, so there is nothing to divide: each GPU holds 112/8 + 10 = 24 GB.
# The cell counts what forward saves for backward, in stages 0 and 3.
# `````
#
# The picture is for mixed precision; in float32 [stages 1 and 2](model_parallelism.md#zero-copies-that-divide-their-states) hold 73 and 48.5 GB.
#
# ![Bytes on each of 8 ranks for 7 billion parameters in mixed precision: stage 0 has 122 GB, stage 1 48.5 GB, stage 2 36.25 GB, stage 3 24 GB. In each stage 10 GB are activations, so stage 3 stays above an eighth of 122 GB, which is 15.25 GB.](../figures/zero_memory.svg)

# %%
def measure_activations(stage):
    model, _ = make_job(stage)
    tokens, targets = local_batch(0)
    # Autograd also notes the gathered weights; they are no activations.
    gathered = [flat.full for flat in model.flats] if stage == 3 else []
    with count.track_saved_activations(model, model.module, tokens, targets, *gathered) as saved:
        loss(model(tokens), targets)
    return saved.bytes


# %% tags=["hide-input"]
# Compares the bytes that stages 0 and 3 save for backward
def measure_both():
    return measure_activations(0), measure_activations(3)


plain_, sharded = ranks.run(measure_both, 4)[0]
total = memory.estimate_states(7e9, Layout(dp=8, zero=3), "bf16").total
print(f"saved for backward, stage 0: {plain_:,} B")
print(f"saved for backward, stage 3: {sharded:,} B")
print(f"7 billion on 8 ranks, stage 3: {total / 1e9:.0f} GB + 10 GB of activations")
assert plain_ == sharded and total + 10e9 == 24e9

# %% [markdown]
# Smaller batches, recomputation ([Memory](memory.md)) and other kinds of parallelism reduce activations.
#
# The size of the units changes the peak.
#
# `````{admonition} Only if each block is a unit: "wrap the model, and stage 3 does the rest"
# :class: checked
#
# Wrapped as one unit, the model is sharded only between steps. Its weights are full during all of forward and backward, when memory is short.
# Below, the peak is about 27 MB as one unit, and 17 MB with a unit per block.
# The cell counts the peak of a step on four ranks, on the CPU, where every storage can be seen. The model has 12 blocks.
# `````

# %%
DEEP = Config(seq=64, layers=12, heads=4, hidden=128)


def measure_peak(make):
    """Bytes at the peak of a step of make()'s model, and bytes of its states."""
    model, optimizer = make()
    tokens, targets = local_batch(0, 1)
    for _ in range(2):  # the first step creates the optimizer's states
        with count.track_memory(model, getattr(model, "module", model), optimizer) as held:
            optimizer.zero_grad()
            loss(model(tokens), targets).backward()
            optimizer.step()
    return held.peak_bytes, sum(count.measure_state_bytes(model, optimizer).values())


def measure_peaks(cases):
    return [measure_peak(lambda c=case: make_job(c[0], DEEP, **c[1])) for case in cases]


CASES = {
    "0, data parallel": (0, {}),
    "1": (1, {}),
    "2, buckets of 25 MiB": (2, {}),
    "2, buckets of 1 MiB": (2, {"bucket_bytes": 2**20}),
    "3, one unit": (3, {"units": []}),
    "3, a unit per block": (3, {}),
    "3, per block, kept after forward": (3, {"reshard": False}),
}

# %% tags=["hide-input", "measured"]
# Table: bytes of states, and the peak of a step
# CPU: bytes held by CPU kernels
measured = ranks.run(measure_peaks, 4, list(CASES.values()), device="cpu")[0]
ON_TOP = {
    name: (peak - states) / 1e6
    for name, (peak, states) in zip(CASES, measured, strict=True)
}
PEAK = {name: peak / 1e6 for name, (peak, _) in zip(CASES, measured, strict=True)}
rows = [
    (n, f"{PEAK[n] - ON_TOP[n]:.1f}", f"{PEAK[n]:.1f}", f"{ON_TOP[n]:+.1f}")
    for n in CASES
]
# Bytes, so no room is needed.
assert PEAK["3, one unit"] > 1.4 * PEAK["3, a unit per block"]
assert PEAK["3, one unit"] < PEAK["2, buckets of 25 MiB"]
assert PEAK["3, one unit"] > PEAK["2, buckets of 1 MiB"]
assert abs(PEAK["2, buckets of 25 MiB"] / PEAK["1"] - 1) < 0.05
head = ["stage, how", "states (MB)", "peak of a step (MB)", "difference (MB)"]
show.table(rows, head)


# %% [markdown]
# As one unit, stage 3 has a higher peak than stage 2 with small buckets: 26.8 MB against 23.9 MB.
# Stage 2 with buckets of 25 MiB has ZeRO's highest peak, 31.9 MB: the whole model fits into one such bucket here, so all gradients exist at once, as in stage 1.
# Units and buckets decide how many full tensors exist at a time. With one unit, all weights are gathered at once, $4P$ bytes, and all gradients exist before any is sent, another $4P$. With a unit per block, two blocks have full weights, and one has full gradients.
# The figure shows the bytes held over a step, measured on [a larger model](../figures/zero.py):
#
# ![Measured bytes on one of four ranks over a training step in stage 3. With the whole model as one unit the peak is 89 MB; with a unit for each block it is 55 MB. The shards of the states alone take 32 MB.](../figures/zero_wrapping.svg)
#
# ### Bytes sent
#
# In a reduce-scatter or an all-gather of $P$ elements, each rank sends $\frac{N-1}{N}P$ elements; an all-reduce is both ([Collectives](collectives.md)).
# So each rank sends these numbers of elements per step, times $\frac{N-1}{N}$:
#
# - data parallelism: $2P$, an all-reduce;
# - stages 1 and 2: $2P$, since gradients are reduce-scattered, new weights gathered;
# - stage 3: $3P$, since weights are gathered in forward and again in backward, gradients reduce-scattered.
#
# The cells count the bytes of every collective on four ranks.

# %%
def bytes_sent(model, run):
    """Bytes that this rank sends in `run()`: of gradients, and of weights."""
    others = dist.get_world_size() - 1
    with count.record_traffic() as sent:
        run()
    gradients = sent.bytes  # of the reduce-scatter, point to point
    if isinstance(model, DataParallel):
        gradients = sent.payload["all_reduce"] * 2 * others // (others + 1)
    # An all-gather is handed this rank's shard, and sends it to each of the others.
    gathers = sent.payload["all_gather_into_tensor"] + sent.payload["all_gather_single"]
    return gradients, gathers * others


# %% tags=["hide-input"]
# Table: bytes sent in a step, by rule, predicted and counted
WAYS = {
    "0": (0, {}, 2),
    "1": (1, {}, 2),
    "2": (2, {}, 2),
    "3": (3, {}, 3),
    "3, kept after forward": (3, {"reshard": False}, 2),
}


def count_traffic():
    found = []
    for stage, options, _ in WAYS.values():
        model, optimizer = make_job(stage, DEEP, **options)
        train_steps(model, optimizer, 1)
        sent = bytes_sent(
            model, lambda m=model, o=optimizer: train_steps(m, o, 1, first=1)
        )
        predicted = sum(zero.predict_sent_bytes(model).values()) if stage else None
        found.append((sum(sent), predicted))
    return found


N, P = 4, sum(p.numel() for p in GPT(DEEP).parameters())
# DataParallel also sends a flag per parameter: does it have a gradient?
flags = len(list(GPT(DEEP).parameters()))
found = ranks.run(count_traffic, N, device="cpu")[0]  # CPU: counts the module's bytes
rows = []
for (name, (*_, factor)), (sent, predicted) in zip(WAYS.items(), found, strict=True):
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
# Stage 3 sends a little less than $3P$, because the rest outside the blocks stays gathered between forward and backward.
# With `reshard=False` weights stay gathered from forward to backward, and nothing is gathered twice.
#
# (zero-accumulation)=
# ### Accumulation
#
# `````{admonition} False: "stage 2 saves gradient memory with accumulation, for free"
# :class: checked
#
# With $m$ micro-batches per step, stage 1 adds gradients up locally (`no_sync`) and sends them once.
# Stage 2 cannot add them up locally, since it keeps no full gradients. So each micro-batch has to send its own gradients: $m$ times the bytes.
# If it kept full gradients between micro-batches, it would be stage 1. The cell counts four micro-batches.
# `````

# %%
def accumulate_gradients(stage, micro_batches=4):
    model, optimizer = make_job(stage)

    def run_backwards():
        for part in range(micro_batches):
            tokens, targets = local_batch(part)
            quiet = stage == 1 and part < micro_batches - 1
            with model.no_sync() if quiet else contextlib.nullcontext():
                (loss(model(tokens), targets) / micro_batches).backward()

    gradients, _ = bytes_sent(model, run_backwards)
    return gradients, count.measure_state_bytes(model, optimizer)["gradients"]


# %% tags=["hide-input"]
# Table: gradients sent and held with four micro-batches
def measure_both():
    return accumulate_gradients(1), accumulate_gradients(2)


found = ranks.run(measure_both, 4, device="cpu")[0]  # CPU: counts the module's bytes
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
# Stage 2 sends four times the bytes, for a quarter of the gradients' memory.
# Stage 3 also sends gradients in every micro-batch, and gathers its weights for each.
#
# ### Seconds
#
# Sending more bytes does not always take more time. Let forward compute for $f$ seconds and backward for $g$, and let one all-gather of all weights take $W$ seconds.
# Gradients cannot be sent before backward begins, but weights can be gathered while forward computes. If messages overlap with compute, a step takes
#
# $$
# T_\text{data parallel} \approx f + \max(g,\, 2W), \qquad T_\text{stage 3} \approx \max(f,\, W) + \max(g,\, 2W).
# $$
#
# The next cell measures steps on two ranks with blocks that *sleep* instead of computing, as in [Data parallelism](data_parallel.md): the messages are real, and the link of 128 Mbit/s is emulated.
# At the ends of forward and backward the messages of one or two blocks do not overlap with compute. With $L$ blocks they take $2W/L$ (data parallelism) and $3W/L$ (stage 3), which the formula omits and the predicted column includes.
# The last column is the step time relative to data parallelism in the same run.

# %% tags=["hide-input", "measured"]
# Table: steps of sleeping blocks on a slow link, predicted and measured
BLOCKS, BLOCK_BYTES, BANDWIDTH = 12, 2**17, 16e6


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
    wire, half = link.create_slow_group(0, BANDWIDTH), forward / BLOCKS / 2
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
    for _ in range(3):
        for name, model in models.items():
            model.zero_grad()
            dist.barrier()
            begin = time.perf_counter()
            model(torch.ones((), requires_grad=True)).backward()
            found[name].append(time.perf_counter() - begin)
    return {name: min(seconds[1:]) for name, seconds in found.items()}


W = BLOCKS * BLOCK_BYTES * (2 - 1) / 2 / BANDWIDTH
rows, ratios = [], []
for forward in (0.01, 0.1):
    # CPU: times of the CPU's work and a wire
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
        near = want is None or 0.85 < seconds / want < 1.7
        show.check_timing(near, f"{name}: a step as predicted, +70 %")
show.check_timing(
    ratios[1] < 1.3, "with more to compute ZeRO-3 takes less than 1.3 times as long"
)
show.check_timing(
    ratios[1] < ratios[0], "the more there is to compute, the less ZeRO-3 costs"
)
head = ["compute (ms)", "sending 3P (ms)", "way", "predicted (ms)", "measured (ms)"]
show.table(rows, [*head, "difference (%)", "relative to data parallel"])


# %% [markdown]
# `````{admonition} Only if the step waits for the link: "stage 3 sends 50 % more, so it is 50 % slower"
# :class: checked
#
# It does send 50 % more. If a step mostly waits for the link (rows 1–2), it also takes nearly 50 % longer.
# If a rank computes for longer than it sends (rows 4–5), the additional messages overlap with forward, in which data parallelism sends nothing.
# Without prefetching they do not overlap (last row).
# The ratio of FLOP to bytes decides. It grows with the tokens that each rank has per step, and does not depend on the model's size, since FLOP and bytes are proportional to $P$.
# `````
#
# (zero-fsdp)=
# ## FSDP2 compared with this course's stage 3
#
# FSDP2, `torch.distributed.fsdp.fully_shard`, is stage 3 {cite}`zhao2023fsdp`. You call it for each block, then for the model: the last call makes a unit of the remaining parameters.
# Our stage 3 has flat pieces; in FSDP2 each parameter becomes a `DTensor` sharded by rows, so optimizers and checkpoints see the parameters' own shapes.
# Pass a mesh: it says which ranks shard, and on which kind of device. Without a mesh FSDP2 uses this machine's GPUs, even for a model on the CPU.
#
# To wrap a model:

# %%
def with_fsdp(config, per_block=True):
    torch.manual_seed(0)
    model = GPT(config).to(ranks.device())
    mesh = DeviceMesh.from_group(dist.group.WORLD, ranks.device().type)
    for block in model.blocks if per_block else ():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, make_adamw(model.parameters())


# %% [markdown]
# The table compares five steps under FSDP2 and our stage 3, on 2 and 4 ranks.

# %% tags=["hide-input"]
# Table: five steps of stage 3 compared with FSDP2
def compare_to_fsdp2():
    theirs, ours = with_fsdp(PRESETS["nano"]), make_job(3)
    losses = [train_steps(*pair, 5) for pair in (theirs, ours)]
    weights = {name: p.full_tensor() for name, p in theirs[0].state_dict().items()}
    found = [max(abs(a - b) for a, b in zip(*losses, strict=True))]
    found.append(max_difference(weights, ours[0].full_state_dict()))
    found += [sum(count.measure_state_bytes(*pair).values()) for pair in (ours, theirs)]
    return found


rows = []
for size in (2, 4):
    in_loss, in_weights, *held = ranks.run(compare_to_fsdp2, size)[0]
    # FSDP2 adds up in gloo's order. For both bounds see above. Two ranks: a + b is all
    # there is to compute, with the bits of b + a.
    assert in_loss < 4.1e-5 and in_weights < 5e-3
    differences = (f"{x:.0e}" if x else "0" for x in (in_loss, in_weights))
    rows.append((size, *differences, *(f"{x:,}" for x in held)))
head = [
    "ranks",
    "largest difference: loss",
    "weights",
    "our states (B)",
    "FSDP2's states (B)",
]
show.table(rows, head, caption="Stage 3 compared with FSDP2, five steps")


# %% [markdown]
# The states have equally many bytes, except for padding and the four-byte step counter that AdamW keeps per piece.
# The peaks of the model with 12 blocks:

# %% tags=["hide-input", "measured"]
# Measures the peaks of both, with a unit per block and as one unit
def peaks_beside():
    return [
        measure_peak(lambda b=blocks: with_fsdp(DEEP, b))[0] for blocks in (True, False)
    ]


theirs = ranks.run(peaks_beside, 4, device="cpu")[0]  # CPU: bytes held by CPU kernels
assert 1.4 * theirs[0] < theirs[1]
for name, size in zip(("a unit per block", "one unit"), theirs, strict=True):
    print(f"{name}: FSDP2 {size / 1e6:.1f} MB, ours {PEAK[f'3, {name}']:.1f} MB")


# %% [markdown]
# As one unit, FSDP2's peak is 2.0 times that of a unit per block, and ours 1.6 times.
# FSDP2 overlaps by CUDA streams, which a CPU does not have, so its times on a CPU do not show its real speed; [the benchmark](../benchmarks/zero.py) measures them nevertheless, with this warning.
#
# The libraries have other names for the same things:
#
# | here | FSDP2 | FSDP1 | DeepSpeed |
# |---|---|---|---|
# | stage 0 | `replicate`, or DDP | `NO_SHARD` | `"stage": 0` |
# | stage 1 | (`ZeroRedundancyOptimizer`, beside DDP) | | `"stage": 1` |
# | stage 2 | | | `"stage": 2` |
# | stage 3, `reshard=False` | `reshard_after_forward=False` | `SHARD_GRAD_OP` | |
# | stage 3 | `reshard_after_forward=True` | `FULL_SHARD` | `"stage": 3` |
# | stage 3 in a node, replicas across nodes | a mesh of two dimensions | `HYBRID_SHARD` | `"mics_shard_size"` |
# | units | one call of `fully_shard` each | `auto_wrap_policy` | chosen automatically, by thresholds in elements |
#
# `reshard_after_forward=False` and `SHARD_GRAD_OP` are often called ZeRO-2. Like stage 2 they send $2P$, and hold full weights from forward to backward. Unlike stage 2 they hold only a shard of the weights between steps.
# By default the unit of FSDP2's last call, for the model, also stays gathered until backward, like our *rest*.
# A number for `reshard_after_forward`, say 8, reshards after forward among 8 ranks only, so that the second gather stays within a node.
# The lesson [DeepSpeed](deepspeed_engine.md) shows how DeepSpeed is configured, and how its engine differs.
#
# ### Tied weights in two FSDP2 units
#
# The embedding and the head of this GPT are one matrix: they are *tied*.
# Here `fully_shard` makes the embedding a unit, and the unit of the model gets the head.

# %%
def train_tied(together):
    model = GPT(PRESETS["nano"]).to(ranks.device())
    mesh = DeviceMesh.from_group(dist.group.WORLD, ranks.device().type)
    fully_shard([model.embedding, model.head] if together else model.embedding, mesh=mesh)
    fully_shard(model, mesh=mesh)
    try:
        model(local_batch(0)[0])
    except ValueError as error:
        return str(error)
    same = model.head.weight is model.embedding.weight
    return f"embedding and head are {'one matrix' if same else 'two matrices'}"


# %% tags=["hide-input"]
# What the first forward says, with two units and with one for both
apart, together = (ranks.run(train_tied, 2, both)[0] for both in (False, True))
print(f"two units: {apart}\none unit:  {together}")
before = torch.__version__ < "2.13"
assert ("two matrices" if before else "already managed by another FSDP group") in apart
assert together.endswith("one matrix")


# %% [markdown]
# Every unit replaces its parameters by its own shards, so in two units one matrix becomes two.
# PyTorch 2.13 checks for this at the first forward. Older versions silently train two matrices.
# To keep one matrix, call `fully_shard([embedding, head])` once for both modules, or for neither: then both stay in the unit of the model, as in `with_fsdp` above.
# A policy that wraps every module, or a library that wraps the embedding alone, makes two units, too: accelerate [did until August 2026](https://github.com/huggingface/accelerate/pull/4171).
#
# ## What goes wrong
#
# These mistakes raise no error, or a misleading error.
#
# ### Reading weights outside forward
#
# In stage 3 you read an empty tensor. In stages 1 and 2 of this course you read weights that are one step old, which is worse: the new weights are gathered only in the next forward.
# (DeepSpeed's stages 1 and 2 gather within the step, so you read new weights.)

# %%
def read_outside():
    model, optimizer = make_job(3)
    weight = model.module.blocks[0].ffn.up.weight
    shapes = [
        list(weight.shape),
        list(model.full_state_dict()["blocks.0.ffn.up.weight"].shape),
    ]
    model, optimizer = make_job(1)
    train_steps(model, optimizer, 3)
    return shapes, max_difference(model.module.state_dict(), model.full_state_dict())


# %% tags=["hide-input"]
# The shape that is read in stage 3, and how old weights are in stage 1
(empty, right), stale = ranks.run(read_outside, 2)[0]
print(f"stage 3: the weight has the shape {empty}; full_state_dict() has {right}")
print(f"stage 1: after step 3 weights are off by up to {stale:.4f}")
assert empty == [0] and stale > 5e-4  # a step of AdamW with a learning rate of 0.001


# %% [markdown]
# So a script that prints the norm of a layer, ties weights by hand, or initialises a layer again after sharding does nothing, or the wrong thing.
# In FSDP2 the weight is a `DTensor`: its `shape` is the full one, and `to_local()` is the shard.
#
# ### Building the optimizer before sharding
#
# An optimizer that is built before sharding holds the plain parameters, but the pieces get the gradients.

# %%
def optimizer_first(right):
    torch.manual_seed(0)
    plain = GPT(PRESETS["nano"]).to(ranks.device())
    optimizer = make_adamw(plain.parameters())
    model = zero.shard_module(plain, dist.group.WORLD, 3)
    if right:
        optimizer = make_adamw(model.parameters())
    before = model.full_state_dict()
    train_steps(model, optimizer, 3)
    return max_difference(before, model.full_state_dict())


# %% tags=["hide-input"]
# How far weights move in three steps, in either order
moved = [ranks.run(optimizer_first, 2, right)[0] for right in (False, True)]
print(f"optimizer before sharding: weights move by {moved[0]}")
print(f"optimizer after sharding:  weights move by up to {moved[1]:.4f}")
assert moved[0] == 0.0 < moved[1]


# %% [markdown]
# There is no error, since an optimizer skips parameters without a gradient. The loss does not change. The pieces' gradients grow with every step, since nothing sets them to zero.
#
# ### Clipping by the local norm
#
# `torch.nn.utils.clip_grad_norm_` takes the norm of the gradients that it is given. Here these are one rank's shard.
# So each rank scales by a different factor. The next cell trains with SGD, clipped to a norm of 1.

# %%
def train_clipped(local):
    torch.manual_seed(0)
    alone = GPT(PRESETS["nano"]).to(ranks.device())
    model = zero.shard_module(copy.deepcopy(alone), dist.group.WORLD, 2)
    sgd = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, model)]
    norms = []
    for step in range(5):
        for optimizer in sgd:
            optimizer.zero_grad()
        for other in range(dist.get_world_size()):
            tokens, targets = local_batch(step, rank=other)
            (loss(alone(tokens), targets) / dist.get_world_size()).backward()
        tokens, targets = local_batch(step)
        loss(model(tokens), targets).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        if local:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            norm = model.clip_grad_norm_(1.0)
        norms.append(norm.item())
        for optimizer in sgd:
            optimizer.step()
    weights = model.full_state_dict()
    apart = measure_drift(plain_with(weights), dist.group.WORLD)
    return norms[0], apart, max_difference(alone.state_dict(), weights)


def plain_with(weights):
    model = GPT(PRESETS["nano"])
    model.load_state_dict({name: tensor.cpu() for name, tensor in weights.items()})
    return model.to(ranks.device())


# %% tags=["hide-input"]
# Table: norms, drift, and the distance from one process
rows = []
for name, local in (("model.clip_grad_norm_", False), ("torch's, on the pieces", True)):
    found = ranks.run(train_clipped, 4, local)
    norms = " ".join(f"{norm:.2f}" for norm, _, _ in found)
    apart, off = found[0][1:]
    rows.append((name, norms, f"{apart:.1f}", f"{off:.0e}"))
    # Twice five steps of 0.1 * 2 sqrt(256) 2^-24 of 0.2, and of 2^-24 of weights of 1
    assert apart == 0.0 and (off > 1e-3 if local else off < 1e-6)
head = [
    "clipping",
    "norm in step 1 on ranks 0 to 3",
    "drift",
    "weights: from one process",
]
show.table(rows, head)


# %% [markdown]
# `measure_drift`, the test of [Data parallelism](data_parallel.md), does not find the mistake: each piece is on one rank only, so there are no copies that could differ. Only a comparison with one process shows it.
# The same mistake is possible in everything that needs all gradients or weights: a norm in a log, a loss scaler's check for infinities, an optimizer that scales by a layer's norm.
# FSDP2's `DTensor`s know that they are shards, and torch's `clip_grad_norm_` is right for them.
#
# ### Calling the model on some ranks only
#
# In data parallelism rank 0 may run a validation by itself. In stage 3 every forward calls all-gathers.

# %%
def validate_on_rank_0():
    model, optimizer = make_job(3)
    train_steps(model, optimizer, 1)
    if dist.get_rank() == 0:
        tokens, targets = local_batch(1)
        with torch.no_grad():
            print("validation loss:", loss(model(tokens), targets).item())


# %% tags=["hide-input"]
# Runs it on two ranks, and shows what the launcher says
try:
    ranks.run(validate_on_rank_0, 2, timeout=4, own_processes=True)
except ranks.RankError as error:
    print(error)
    assert error.ranks == [1]
else:
    raise AssertionError("this was meant to fail")


# %% [markdown]
# The error names rank 1 because rank 1 did *not* call the all-gather. In a real job rank 1 would continue to train: then rank 0's gathers for the validation are paired with rank 1's gathers for its next step, and mix their contents.
# The same happens when one rank has one batch fewer, or generates one token fewer than the others.
# All ranks have to call the model equally often.
#
# ### Saving one rank's shard as the model
#
# In data parallelism rank 0 saves the model. What does rank 0 save in stage 3?

# %%
def saved_elements():
    model, optimizer = make_job(3)
    train_steps(model, optimizer, 1)
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


# %% tags=["hide-input"]
# Table: how much of the model each way saves
found = ranks.run(saved_elements, 4)[0]
P = sum(p.numel() for p in GPT(PRESETS["nano"]).parameters())
assert list(found.values())[0] == 0 and 0 < list(found.values())[1] < 0.26 * P
assert list(found.values())[2] == P
rows = [(name, f"{size:,}", f"{100 * size / P:.0f}") for name, size in found.items()]
show.table(rows, ["saved by rank 0 of 4, stage 3", "elements", "of the model (%)"])

# %% [markdown]
# In this course's stage 1 the first way saves all elements, but three quarters of them are one step old, since only the next forward gathers the new ones. Nothing fails, and the resumed run is slightly wrong.
# `full_state_dict` hangs if only rank 0 calls it, like the validation above. It also needs memory for the whole model on every rank; [Checkpoints](checkpoint.md) shows how to save shards, and load them on another number of ranks.
#
# ## When to use it
#
# | | for | against |
# |---|---|---|
# | stage 1 | $8 + 8/N$ bytes per parameter in float32 instead of 16; sends as many bytes as data parallelism | an optimizer must work element by element |
# | stage 2 | $4 + 12/N$ | sends gradients $m$ times with $m$ micro-batches; buckets must be small |
# | stage 3 | $16/N$: any model, with enough ranks | $3P$ instead of $2P$; weights are there only while they are used |
# | all | the model's code stays as it is | does not shard activations; a block must still fit and compute on one rank |
#
# Take the lowest stage that fits: each higher stage waits for more messages.
# In a real job, these signs show that ZeRO is set up correctly: the bytes that a rank holds fall with $N$ as predicted; the peak falls when units get smaller; the gradient norm in the log is the same on all ranks; the first loss equals that of one process.
#
# ```{admonition} On more GPUs
# :class: note
#
# The bytes that each rank holds and sends are counted here, and are the same if each rank has its own GPU.
# A second GPU would show times: how large a block has to be so that the next one is gathered while it computes.
# Here that is measured with blocks that sleep, and an emulated link.
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
# Each rank holds the full weights, and shards of gradients and optimizer states.

# %%
answer = 13e9 * (2 + (2 + 12) / 32)
check(answer, "zero_bytes")


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} The elements of a shard (easy)
# :label: ex-zero-bounds
# ```
#
# A flat tensor has `elements` elements, and is padded and split into `size` equal shards.
# Return `(begin, end)`: which of the elements lie in the shard of `rank`, without padding. A shard may be all padding; then `begin == end == elements`.

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
# ```{exercise-start} Master weights (medium)
# :label: ex-zero-mixed
# ```
#
# Write a step of stage 1 in mixed precision, for SGD with momentum: `moment = decay * moment + gradient`, then `master = master - lr * moment`.
# `weights` [P] and this rank's own `gradient` [P] are bfloat16. `master` and `moment` [P/N] are float32, and this rank's shards.
# Gradients are widened to float32 before they are averaged over the ranks; only weights are sent in bfloat16. Change `weights`, `master` and `moment` in place. There are $P$ parameters and $N$ ranks, and $N$ divides $P$.

# %%
def my_mixed_step(weights, gradient, master, moment, lr, decay, group):
    pass  # your code


check(my_mixed_step)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-zero-mixed
# :label: sol-zero-mixed
# :class: dropdown
# ```
#
# These are the lines of the plain stage 1, with three changes: the sum is computed in float32, the step changes the master weights, and the weights are their rounded copy.

# %%
def my_mixed_step(weights, gradient, master, moment, lr, decay, group):
    begin = dist.get_rank(group) * len(master)
    own = slice(begin, begin + len(master))
    total = zero.ReduceScatter(gradient.float(), group, ordered=True).wait()
    moment.mul_(decay).add_(total / dist.get_world_size(group))  # [P/N]
    master -= lr * moment
    weights[own] = master  # rounded to bfloat16
    zero.all_gather(weights, own, group).wait()  # [P/N] to [P]


check(my_mixed_step)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} The global gradient norm (medium)
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
# Each rank holds its share of the states, and its undivided activations.

# %%
def my_stage(params, activations, ranks_, memory_):
    for stage in range(4):
        held = memory.estimate_states(
            params, Layout(dp=ranks_, zero=stage), "bf16"
        ).total
        if held + activations <= memory_:
            return stage
    return None


check(my_stage)

# %% [markdown]
# ```{solution-end}
# ```
#
# A last question without a check: by `my_stage`, 7 billion parameters and 10 GB of activations just fit on 8 ranks of 24 GB in stage 3. What does `my_stage` leave out? (Which units are full, and what do buckets hold?)
#
# ## Summary
#
# - Data parallelism holds $N$ copies of the states; ZeRO gives each rank one shard: of the optimizer (stage 1), the gradients as well (2), the weights as well (3).
# - The step computes what one process computes, bit for bit if sums are added in the same order.
# - States per rank in float32: 16, $8 + 8/N$, $4 + 12/N$, $16/N$ bytes per parameter. Activations are not divided.
# - Elements sent: $2P$, $2P$, $2P$, $3P$; stages 2 and 3 send gradients in every micro-batch.
# - The smaller its units, the more stage 3 saves: as one unit its peak is above that of stage 2 with small buckets.
# - FSDP2 is stage 3; `reshard_after_forward=False` saves the second gather.
# - Shard first, then build the optimizer; clip by the global norm; call the model on every rank.
#
# ## Further reading
#
# - {cite:t}`rajbhandari2020zero`: the three stages; section 5 derives their memory, section 7 their bytes sent. Section 6 partitions activations, too, but for tensor parallelism.
# - {cite:t}`zhao2023fsdp`: the first FSDP, with what prefetching and freeing do to a GPU's allocator.
# - {cite:t}`xu2020sharding`: stage 1 discovered independently, by a compiler that shards the weight update.
# - {cite:t}`rajbhandari2021infinity`: where to put shards when all GPUs together are too small.
