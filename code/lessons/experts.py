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
# # Experts: mixture-of-experts layers over many ranks
#
# After this lesson you can
#
# - compute a layer of experts with its router, and divide the experts over the ranks;
# - average the gradients of such a model over the right ranks, and recognise a wrong average;
# - predict the bytes that a rank holds and sends, and which ranks wait for which;
# - detect a router that sends all tokens to the same experts, and prevent this in two ways.
#
# DeepSeek-V3 has 671 billion parameters, more than Llama 3 405B, but uses only 37 billion for each token {cite}`deepseek2024v3`.
#
# ## The mixture-of-experts layer

# %% tags=["hide-input"]
# Imports, and the small model and batches that every cell takes
import copy
import time
from dataclasses import replace

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardcourse.exercises import check
from shardlab import collectives, experts, ranks
from shardlab import deepspeed_engine as de
from shardlab import tensor_parallel as tp
from shardlab.common import show, text
from shardlab.common.machines import MACHINES
from shardlab.common.shapes import PRESETS
from shardlab.data_parallel import buckets
from shardlab.gpt import router
from shardlab.gpt.model import GPT, Config, Experts, FeedForward, loss, count_parameters
from shardlab.measure import count

show.set_style()
SMALL = Config(
    seq=32, layers=2, heads=4, hidden=64, mlp="swiglu", bias=False,
    experts=8, experts_per_token=2, expert_ffn=64,
)  # fmt: skip


def build_model(config=SMALL, dtype=torch.float32):
    """The same GPT at every call, with all experts."""
    torch.manual_seed(0)
    return GPT(config).to(ranks.device(), dtype)


def make_batch(step, size=8):
    """`size` windows of text, the same on every rank: tokens, targets [size, 32]."""
    tokens, targets = text.get_batch(SMALL.seq, size, start=step * size)
    return tokens.to(ranks.device()), targets.to(ranks.device())


def take_shard(tensor, group=None):
    """This rank's part of a batch."""
    group = group or dist.group.WORLD
    return tensor.chunk(group.size())[dist.get_rank(group)]


def draw_normal(seed, *shape):
    """Normal numbers that follow from the seed alone: the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(ranks.device())


def max_difference(a, b):
    """The largest difference between two tensors."""
    return (a - b).abs().max().item()


# %% [markdown]
# You need the all-to-all from [Collectives](collectives.md).

# %% tags=["hide-input"]
# Table: parameters held, and used by a token
llama = count_parameters(PRESETS["llama-3-405b"])
SHAPES = {
    "Llama 3 405B": experts.ParameterCounts(llama, llama),
    "Mixtral 8x7B": experts.count_parameters(PRESETS["mixtral-8x7b"]),
    "DeepSeek-V3": experts.count_parameters(PRESETS["deepseek-v3"]),
}
rows = []
for name, (total, active) in SHAPES.items():
    cells = f"{total / 1e9:.1f}", f"{active / 1e9:.1f}", f"{active / total:.0%}"
    rows.append((name, *cells, f"{16 * total / 1e12:.1f}"))
assert SHAPES["DeepSeek-V3"].active < llama / 10
head = [
    "model",
    "parameters (billions)",
    "used by a token",
    "share",
    "model states (TB)",
]
show.table(rows, head)


# %% [markdown]
# The papers state 46.7 billion parameters for Mixtral, of which a token uses 12.9 {cite}`jiang2024mixtral`, and 671 and 37 for DeepSeek-V3. (Of the 37.6 above, 0.9 are the embedding, of which a token reads one row.)
#
# Most parameters of a transformer are in its feed-forward networks.
# A *mixture of experts* has $E$ such networks in a layer, the *experts*, and a small *router* that sends each token through the $k$ experts with the highest scores {cite}`shazeer2017moe`.
# The arithmetic for a token grows with $k$; the number of parameters grows with $E$.
#
# The router is one matrix.
# It gives a token a score for each expert.
# The $k$ chosen scores are divided by their sum.
# The layer's output is the sum of the $k$ experts' outputs, each times its score.
# In names of tensors, `T` is tokens, `H` the model's width, `F` an expert's width, `E` experts, `C` the $k$ choices of a token, and `R` rows.
# A *row* is the hidden state of one token, for one of its experts.

# %%
def choose_experts(x_TH, router_HE, k=2):
    """The best k experts of each token, and how much each of them counts."""
    scores_TE = (x_TH @ router_HE).softmax(-1)
    weight_TC, chosen_TC = scores_TE.topk(k)
    return weight_TC / weight_TC.sum(-1, keepdim=True), chosen_TC


def run_expert(x_RH, up_HF, down_FH):
    return F.gelu(x_RH @ up_HF) @ down_FH


def run_one_process(x_TH, router_HE, networks):
    weight_TC, chosen_TC = choose_experts(x_TH, router_HE)
    y_TH = torch.zeros_like(x_TH)
    for number, matrices in enumerate(networks):
        t_R, c_R = (chosen_TC == number).nonzero(as_tuple=True)  # tokens, choice number
        y_TH[t_R] += weight_TC[t_R, c_R, None] * run_expert(x_TH[t_R], *matrices)
    return y_TH


# %% [markdown]
# Three problems are new.
# All experts have to be *held*: Mixtral uses 13 billion parameters for a token, but needs memory for 47 billion.
# Tokens have to be *sent* to the ranks of their experts.
# And experts may be chosen *unevenly*.
#
# ## Expert parallelism: dispatch and combine
#
# Each rank has some of the experts, and all other parameters.
# Each rank also has tokens of its own, as in data parallelism.
# A token's rows are sent to the ranks of its experts, and the outputs are sent back:
#
# ![A layer of four experts on two ranks with four tokens each. Rank 0's tokens choose experts 2, 0, 2 and 1, rank 1's choose 2, 3, 0 and 2. Each rank sorts its tokens by expert. An all-to-all brings rank 0, which has experts 0 and 1, three rows, and rank 1, which has experts 2 and 3, five. Each expert computes its rows; a second all-to-all brings them back, and each rank puts them into the order of its tokens.](../figures/experts_layer.svg)
#
# The first all-to-all is called *dispatch*, the second *combine* {cite}`lepikhin2020gshard`.
# Message sizes differ between ranks, layers and steps, because they follow from the router's choices.
# So before each dispatch the ranks tell each other how many rows will come.
# Each of $N$ ranks has $e = E/N$ experts:

# %%
def run_over_ranks(x_TH, router_HE, own):
    """Same as `run_one_process`, for this rank's tokens; `own`: this rank's experts."""
    N, e = dist.get_world_size(), len(own)
    weight_TC, chosen_TC = choose_experts(x_TH, router_HE)
    order_R = chosen_TC.flatten().argsort(stable=True)  # by expert
    token_R = order_R // chosen_TC.shape[1]
    leaving_Ne = torch.bincount(chosen_TC.flatten(), minlength=N * e).view(N, e)
    coming_Ne = torch.empty_like(leaving_Ne)
    dist.all_to_all_single(coming_Ne, leaving_Ne)  # how many rows will come
    sent, received = leaving_Ne.sum(1).tolist(), coming_Ne.sum(1).tolist()

    came_RH = x_TH.new_empty(sum(received), x_TH.shape[1])
    dist.all_to_all_single(came_RH, x_TH[token_R], received, sent)  # dispatch
    whose_R = torch.arange(e, device=x_TH.device).repeat(N)
    whose_R = whose_R.repeat_interleave(coming_Ne.flatten())  # by rank, then by expert
    for number, matrices in enumerate(own):
        came_RH[whose_R == number] = run_expert(came_RH[whose_R == number], *matrices)
    back_RH = torch.empty_like(x_TH[token_R])
    dist.all_to_all_single(back_RH, came_RH, sent, received)  # combine

    weight_R1 = weight_TC.flatten()[order_R, None]
    return torch.zeros_like(x_TH).index_add(0, token_R, weight_R1 * back_RH)


# %% tags=["hide-input"]
# Compares the layer's output with one process's, on 1, 2 and 4 ranks
def compare_plain():
    x_TH, router_HE = draw_normal(0, 64, 32), draw_normal(1, 32, 8)
    up_EHF, down_EFH = draw_normal(2, 8, 32, 64) / 6, draw_normal(3, 8, 64, 32) / 8
    networks = list(zip(up_EHF, down_EFH, strict=True))
    local_experts = 8 // dist.get_world_size()
    own = networks[dist.get_rank() * local_experts :][:local_experts]
    y_TH = run_over_ranks(take_shard(x_TH), router_HE, own)
    return max_difference(y_TH, take_shard(run_one_process(x_TH, router_HE, networks)))


for N in (1, 2, 4):
    # Paths of 32 + 32 + 64 terms in two orders: 2 sqrt(128) 2^-24 of up to 3.
    assert max(ranks.run(compare_plain, N)) < 4.1e-6
    print(f"{N} ranks: the layer's output is that of one process")

# %% [markdown]
# The plain version leaves out three things: a backward (autograd does not see collectives), groups smaller than the whole job, and a limit on an expert's rows.
#
# ## The module
#
# In the package the exchange is an operator with a backward.
# The backward is the same exchange with the two lists of sizes swapped: a row's gradient goes to the rank that the row came from.

# %%
show.source(experts.exchange_rows, experts.core._Exchange)

# %% [markdown]
# `plan_route` says which rows go to which rank.
# The CPU has to know the sizes of messages, so it waits for the GPU in this function, once in each layer.

# %%
show.source(experts.Route, experts.plan_route)

# %% [markdown]
# `ExpertParallel` takes the router and this rank's experts from the plain layer, `shardlab.gpt.model.Experts`, which runs the loop above.
# An expert's rows are ordered by rank, and within a rank by token.
# One process has the same order in its batch, so an expert's gradient is summed over tokens in the same order.

# %%
show.source(experts.ExpertParallel, experts.parallelize)

# %% [markdown]
# ### Averaging gradients: experts and other parameters
#
# Take four ranks with tokens of their own.
# Ranks 0 and 1 together have all experts, and ranks 2 and 3 have copies of them.
#
# ![Four ranks with tokens of their own; ranks 0 and 1 together have all experts, and so have ranks 2 and 3. After backward, gradients of shared parameters cover their rank's own tokens; an expert's gradient covers the tokens of both ranks of its pair, which came through the all-to-all. After averaging, shared parameters' gradients are averaged over four ranks; those of experts 0 and 1 are summed over ranks 0 and 2, those of experts 2 and 3 over ranks 1 and 3, and divided by four: every gradient covers all four ranks' tokens.](../figures/experts_gradients.svg)
#
# Attention, LayerNorms and routers are the same on all four ranks, so their gradients are averaged over all four.
# An expert's gradient already includes the tokens of both ranks of its pair, because backward's all-to-alls brought the rows' gradients.
# The tokens of the other pair are missing, so the gradient is summed over the two copies.
# But each of the four losses is a mean over one rank's tokens, so *the sum is divided by four*, and not by two.

# %%
show.source(experts.average_gradients)


# %% [markdown]
# ## Equal to one process
#
# After five steps with AdamW, on 1, 2 and 4 ranks and with copies of experts, the losses, the first step's gradients and the weights equal those of one process that has all experts.
# The table's second shape is like DeepSeek's: scores by a sigmoid, three of eight experts for a token, one shared expert that takes every token, and a first layer without experts.

# %%
def make_pair_groups():
    """Return this rank's pair, and the group of ranks at its place in both pairs."""
    layouts = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    return [dist.new_subgroups_by_enumeration(layout)[0] for layout in layouts]


def train_five_steps(config, copied):
    world = dist.group.WORLD
    group, copies = make_pair_groups() if copied else (world, None)
    model = experts.parallelize(build_model(config, torch.float64), group)
    optimizer, losses = torch.optim.AdamW(model.parameters(), 3e-3), []
    for step in range(5):
        tokens, targets = (take_shard(x) for x in make_batch(step))
        optimizer.zero_grad()
        value = loss(model(tokens), targets)
        value.backward()
        experts.average_gradients(model, world, copies)
        if step == 0:
            first = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        dist.all_reduce(value := value.detach())
        losses.append(value / world.size())
    return torch.stack(losses), first, experts.full_state_dict(model)


# %% tags=["hide-input"]
# Table: differences from one process
def train_one_process(config):
    model = build_model(config, torch.float64)
    optimizer, losses = torch.optim.AdamW(model.parameters(), 3e-3), []
    for step in range(5):
        tokens, targets = make_batch(step)
        optimizer.zero_grad()
        value = loss(model(tokens), targets)
        value.backward()
        if step == 0:
            first = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        losses.append(value.detach())
    return torch.stack(losses), first, model.state_dict()


DEEPSEEK = replace(
    SMALL, router="sigmoid", experts_per_token=3, shared_experts=1, dense_layers=1
)
rows = []
for name, config in (("Mixtral's", SMALL), ("DeepSeek's", DEEPSEEK)):
    losses, first, want = ranks.run(train_one_process, 1, config)[0]
    runs = (1, False), (2, False), (4, False), (4, True)
    for N, copied in runs if config is SMALL else runs[2:]:
        for ours, gradients, found in ranks.run(train_five_steps, N, config, copied):
            # Losses: 4 * 256 tokens * 2^-53 of 5.5. Gradients: 2 * 1,920 terms * 2^-53.
            assert max_difference(ours, losses) < 1e-12
            assert (
                max(max_difference(gradients[n], first[n]) for n in gradients) < 1e-12
            )
            # Five steps of AdamW: lr / eps times 2 sqrt(1920) 2^-53 of 0.5.
            assert max(max_difference(found[n], want[n]) for n in want) < 7e-9
        rows.append((name, N, 2 if copied else 1, *["< 10⁻¹²"] * 2, "< 10⁻⁸"))
head = [
    "shape",
    "ranks",
    "copies of each expert",
    "losses differ by",
    "gradients",
    "weights",
]
show.table(rows, head)


# %% [markdown]
# ### Experts with tensor parallelism
#
# An expert is a feed-forward network, which [tensor parallelism](tensor_parallel.md) can shard.
# So shard each matrix first, then distribute experts over ranks.
# Here two ranks form a pair: they have the two shards of each matrix and the same tokens.
# Two pairs together have all experts.

# %%
def compare_with_tensor():
    tensor, data = make_pair_groups()
    model = tp.parallelize(build_model(SMALL, torch.float64), tensor)
    experts.parallelize(model, data)
    tokens, targets = (take_shard(x, data) for x in make_batch(0))
    tp.vocab_parallel_loss(model(tokens), targets, tensor).backward()
    experts.average_gradients(model, data)
    return {name: p.grad for name, p in model.named_parameters()}, tp.get_shard_dims(
        model
    )


# %% tags=["hide-input"]
# Compares each rank's part of the gradients with one process's
def gradients():
    model = build_model(SMALL, torch.float64)
    tokens, targets = make_batch(0)
    loss(model(tokens), targets).backward()
    return {name: p.grad for name, p in model.named_parameters()}


want, off = ranks.run(gradients, 1)[0], []
for rank, (found, cuts) in enumerate(ranks.run(compare_with_tensor, 4)):
    for name, gradient in found.items():
        full = want[name]
        if cuts[name] is not None:
            full = full.chunk(2, cuts[name])[rank % 2]
        off.append(max_difference(gradient, full))
assert max(off) < 1e-12  # 2 * 1,920 terms * 2^-53, as above
print("2 x 2 ranks: every gradient is a part of one process's")

# %% [markdown]
# Each expert then ends with an all-reduce of its rows, and there are $k$ times as many rows as tokens.
# Combine multiplies rows by scores and adds them up, so an all-reduce of the *combined* rows, one for each token, would give the same result.
# But scores would then multiply partial sums, so their gradients would have to be summed over tensor-parallel ranks, as [`copy_to`](tensor_parallel.md) does in backward.
# Larger jobs do not shard single experts: they give each tensor-parallel rank whole experts of its own.
#
# ## Expert capacity and dropped tokens
#
# Messages of unknown size make the CPU wait, and their memory cannot be planned.
# So GShard and Switch give each expert a fixed number of places, its *capacity*.
# With equal loads an expert would get a fraction $1/E$ of all choices.
# The capacity is this equal share times the *capacity factor* {cite}`fedus2021switch`.
# A choice for which no place is left is *dropped*: the expert adds nothing to the token's residual stream.
#
# ![Six tokens of a sequence, each with a first and a second choice, and three experts with four places each. First choices come first: expert 0 is the first choice of tokens 0, 1, 3, 4 and 5, so token 5 gets no place there, and neither does token 2 with its second choice. Expert 1 gets tokens 2, 0, 3 and 5, expert 2 tokens 1 and 4. Two of twelve choices are dropped.](../figures/experts_capacity.svg)

# %%
show.source(router.drop_overflow)


# %% [markdown]
# Here places are counted for each *sequence*, so the dropped choices do not depend on the ranks that the sequences are on.
# Libraries count places for all tokens of a rank in a step: then the dropped choices depend on the number of ranks.

# %% tags=["hide-input"]
# Table: choices dropped at each capacity factor, on one process and on four ranks
def count_dropped(capacity):
    model = build_model(replace(SMALL, capacity=capacity))
    model = experts.parallelize(model, dist.group.WORLD)
    with experts.record_routing(model) as routed, torch.no_grad():
        model(take_shard(make_batch(0, 16)[0]))
    return sum(int(one.dropped_BS.sum()) for one in routed)


CHOICES, rows, kept = 16 * 32 * 2 * 2, [], {}
for capacity in (0.5, 1.0, 1.5, 2.0, None):
    found = [sum(ranks.run(count_dropped, N, capacity)) for N in (1, 4)]
    assert found[0] == found[1]
    kept[capacity] = found[0]
    places = replace(SMALL, capacity=capacity).get_expert_capacity(32)
    rows.append(
        (
            capacity or "none",
            places or "as many as come",
            *found,
            f"{found[0] / CHOICES:.0%}",
        )
    )
assert kept[0.5] >= CHOICES // 2 and kept[None] == 0 < kept[2.0]
head = [
    "capacity factor",
    "places in a sequence",
    "dropped, 1 rank",
    "4 ranks",
    f"of {CHOICES:,} choices",
]
show.table(rows, head)


# %% [markdown]
# With capacity factor 0.5 at least half of the choices are dropped.
# An untrained router chooses so unevenly that some choices are dropped even with capacity factor 2.
# Without a capacity the layer is *dropless*, as in today's large models.
# Then a rank needs enough memory even if all tokens choose its experts.
#
# `````{admonition} Only if experts have no capacity: "a causal model with experts is causal"
# :class: checked
#
# First choices get places before second choices, so a *later* token's first choice can take the place of an earlier token's second choice.
# The next cell changes the last tokens of a sequence, and checks whether the first tokens' logits change.
# `````

# %%
def compare_prefixes(capacity):
    model, tokens = (
        build_model(replace(SMALL, capacity=capacity), torch.float64),
        make_batch(0)[0],
    )
    changed = tokens.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % 256
    return max_difference(model(tokens)[:, :20], model(changed)[:, :20])


print("dropless: logit change:", ranks.run(compare_prefixes, 1, None)[0] > 1e-6)
print("capacity factor 1: logit change:", ranks.run(compare_prefixes, 1, 1.0)[0] > 1e-6)

# %% tags=["hide-input"]
# Checks both printed results
assert ranks.run(compare_prefixes, 1, None)[0] < 2e-13  # 2 * 13 * 64 terms * 2^-53 of 1
assert ranks.run(compare_prefixes, 1, 1.0)[0] > 1e-6


# %% [markdown]
# ## Router collapse, and two cures
#
# An expert that is chosen gets gradients and improves, and an improved expert gets higher scores.
# Nothing in the loss stops this loop.
# Here the model trains on two ranks, three times: as it is, and with each of two remedies.

# %%
def train_steps(way, steps=50):
    world = dist.group.WORLD
    model = experts.parallelize(build_model(), world)
    optimizer, loads, losses = torch.optim.AdamW(model.parameters(), 1e-3), [], []
    for step in range(steps):
        tokens, targets = (take_shard(x) for x in make_batch(step))
        with experts.record_routing(model) as routed:  # what each router says
            value = loss(model(tokens), targets)
        losses.append(value.item())
        if way == "loss":
            value = value + 0.1 * experts.balancing_loss(routed, world)
        optimizer.zero_grad()
        value.backward()
        experts.average_gradients(model, world)
        optimizer.step()
        if way == "bias":
            experts.update_bias(routed, 0.02, world)
        loads.append(experts.compute_loads(routed, world))
    # [steps, L, E]: shares of tokens, of which each chooses two
    return 2 * torch.stack(loads), sum(losses[-10:]) / 10


WAYS = {"nothing": "as it is", "loss": "balancing loss", "bias": "bias"}
TRAINED = {way: ranks.run(train_steps, 2, way)[0] for way in WAYS}

# %% tags=["hide-input"]
# Draws the share of tokens that the busiest expert of the last layer gets
figure, axes = plt.subplots(figsize=(4.6, 2.7))
marks = {"nothing": (4, "-", 99), "loss": (5, "-", 32), "bias": (7, "--", 42)}
for way, (color, line, high) in marks.items():
    busiest = (
        TRAINED[way][0][:, -1].unfold(0, 10, 1).mean(-1).max(-1).values
    )  # of ten steps
    style = {"color": show.RANK_COLORS[color], "ls": line, "lw": 1.6}
    axes.plot(range(10, 51), 100 * busiest, **style)
    axes.annotate(WAYS[way], (51, high), va="center", fontsize=9)
axes.plot([10, 50], [25, 25], color=show.INK, lw=0.8, ls=(0, (3, 3)))
axes.annotate("even", (51, 22), va="center", fontsize=9)
axes.set(
    xlim=(9, 66), ylim=(0, 103), xlabel="steps", ylabel="busiest expert’s tokens (%)"
)
axes.set_xticks([10, 20, 30, 40, 50])
figure.tight_layout()
alt = (
    "The share of the last ten steps' tokens that the busiest of eight experts gets, over 50 "
    "steps. As it is, it rises to 100 %. With a balancing loss, and with a bias, it comes down "
    "towards 25 %, which is even."
)
show.figure(figure, alt, "experts-collapse")

# %% tags=["hide-input"]
# Table: tokens of each expert of the last layer, over the last ten steps
rows, last = [], {}
for way, (loads, value) in TRAINED.items():
    last[way] = sorted((100 * loads[-10:, -1].mean(0)).tolist(), reverse=True)
    rows.append(
        (WAYS[way], f"{value:.2f}", *(f"{percent:.0f}" for percent in last[way]))
    )
values = [value for _, value in TRAINED.values()]
assert max(values) < 1.02 * min(values)
assert last["nothing"][0] > 90 and last["nothing"][4] < 2
assert max(last["loss"][0], last["bias"][0]) < 50
head = ["", "loss", "busiest (%)", *["" for _ in range(6)], "idlest (%)"]
show.table(rows, head)

# %% [markdown]
# Without a remedy, two experts of the last layer get nearly every token, and the other six nearly none: these six experts' parameters are held and saved, but compute nothing.
# On many ranks collapse also costs time: ranks with busy experts compute, and the others wait.
#
# **The balancing loss** adds $E \sum_e f_e P_e$ for each layer: $f_e$ is the fraction of choices that expert $e$ gets, $P_e$ its mean score.
# The loss is 1 where all experts get equally many choices.
# $f$ is a count and has no gradient.
# $P$ has a gradient, and training lowers $P_e$ most where $f_e$ is large {cite}`fedus2021switch`.
#
# On several ranks this loss is easily wrong.
# The average of the ranks' products $f_e P_e$ is not the product of the averages.
# The two are equal only if all ranks take the *same* $f$, of all tokens.
# With its own $f$, each rank would have to balance its few sequences, and not only the batch: then experts specialise less {cite}`qiu2025demons`.
# So an all-reduce of $E$ integers for each layer counts $f$ over all ranks:

# %%
show.source(experts.compute_loads, experts.balancing_loss)

# %% [markdown]
# **The bias** adds no loss {cite}`wang2024lossfree`.
# Each expert has a number that is added to its score when experts are chosen, but not when outputs are multiplied by scores.
# After each step this bias is raised for experts that got fewer than $1/E$ of the choices, and lowered for the others.
# So no second loss changes the gradients of the scores.
# DeepSeek-V3 does this, with sigmoids as scores {cite}`deepseek2024v3`.

# %%
show.source(experts.update_bias)

# %% [markdown]
# The bias is updated once per step, from the choices of all micro-batches.
# It stays in float32, whatever the model's dtype: a step of 0.001 could not raise a bfloat16 bias of 0.5, because 0.001 is less than half the distance to the next number.

# %% tags=["hide-input"]
# Checks that bfloat16 rounds this step away, and the bias stays in float32
assert torch.tensor(0.5, dtype=torch.bfloat16) + 0.001 == 0.5
assert router.Router(SMALL).bfloat16().bias_E.dtype == torch.float32


# %% [markdown]
# The model's own loss does not show a collapse, at least not within 50 steps: the three losses in the table are within 2 %. The cost comes later, because unused experts learn nothing, and because ranks wait.
#
# ## What it costs
#
# ### Bytes held
#
# With experts sharded over $N$ ranks, each rank holds $E/N$ experts in each layer, and all other parameters.

# %% tags=["hide-input"]
# Table: parameters of a rank, predicted and counted
def measure_held(config):
    model = experts.parallelize(build_model(config), dist.group.WORLD)
    return sum(p.numel() for p in model.parameters())


rows = []
for N in (1, 2, 4, 8):
    mixtral = experts.count_held_parameters(PRESETS["mixtral-8x7b"], N)
    want, found = (
        experts.count_held_parameters(SMALL, N),
        set(ranks.run(measure_held, N, SMALL)),
    )
    assert found == {want}
    rows.append((N, f"{16 * mixtral / 1e9:.0f}", f"{want:,}", f"{found.pop():,}"))
head = [
    "ranks",
    "Mixtral's model states (GB)",
    "our small model, predicted (parameters)",
    "counted",
]
show.table(rows, head)


# %% [markdown]
# Even with eight ranks, each holds 116 GB.
# [ZeRO](zero.md) shards this further: an expert's states over the ranks that have copies of it, all other states over all ranks.
# `python -m shardlab memory --model mixtral-8x7b --dp 64 --ep 8 --zero 1` prints the memory of a rank, with activations; `--ep` is the number of ranks that share the experts. [The planner](strategy.md) tries all values of `--ep`.
#
# ### Bytes sent
#
# A row has $h$ numbers, the width of the model, and is sent four times in a step: dispatch and combine, forward and backward.
# Before each dispatch in forward the sizes are sent, eight bytes for each expert.

# %% tags=["hide-input"]
# Table: bytes of all-to-alls in a step of all ranks, predicted and counted
def count_sent(config):
    model = experts.parallelize(build_model(config), dist.group.WORLD)
    tokens, targets = (take_shard(x) for x in make_batch(0))
    with experts.record_routing(model) as routed, count.record_traffic() as found:
        loss(model(tokens), targets).backward()
    lost = sum(int(one.dropped_BS.sum()) for one in routed)
    want = experts.predict_sent_bytes(config, tokens.numel(), 4, lost)
    return (
        sum(want.values()),
        found.payload["all_to_all_single"],
        found.calls["all_to_all_single"],
    )


rows = []
for name, config in (
    ("dropless", SMALL),
    ("capacity factor 1", replace(SMALL, capacity=1.0)),
    ("DeepSeek's", DEEPSEEK),
):
    for N in (2, 4):
        want, found, calls = (
            sum(each) for each in zip(*ranks.run(count_sent, N, config), strict=True)
        )
        assert want == found and calls == N * experts.predict_calls(config)
        rows.append((name, N, calls // N, f"{want:,}", f"{found:,}", found - want))
head = [
    "",
    "ranks",
    "calls of a rank",
    "predicted (B)",
    "counted (B)",
    "difference (B)",
]
show.table(rows, head)


# %% [markdown]
# In a layer's forward a rank sends $2Tkh$ numbers for its $T$ tokens.
# If choices are even, $(N-1)/N$ of these numbers leave the rank.
# Data parallelism sends gradients while backward computes; a layer of experts has to wait for its messages.

# %%
def layer_bytes(tokens, k, h, N, itemsize=2):
    """Return the bytes that leave a rank in a layer's forward: dispatch and combine."""
    return 2 * tokens * k * h * itemsize * (N - 1) / N


def layer_seconds(machine, tokens, k, h, f):
    """Return the seconds of a layer's expert products in forward, at machine.flops."""
    return tokens * k * 2 * 3 * h * f / machine.flops


# %% tags=["hide-input"]
# Table: one layer's forward on H100s, 4096 tokens a rank
H100, rows, times = MACHINES["h100"], [], {}
for name, k, h, f in (
    ("Mixtral 8x7B", 2, 4096, 14_336),
    ("DeepSeek-V3", 8, 7168, 2048),
):
    products = layer_seconds(H100, 4096, k, h, f)
    links = (8, H100.node_bandwidth, "NVLink"), (64, H100.network_bandwidth, "network")
    for N, speed, words in links:
        out = layer_bytes(4096, k, h, N)
        times[name, N] = out / speed / products
        cells = f"{out / 1e6:,.0f}", f"{1e3 * out / speed:.2f}", f"{1e3 * products:.2f}"
        rows.append((name, f"{N}, {words}", *cells))
assert (
    times["DeepSeek-V3", 8] > 4 * times["Mixtral 8x7B", 8]
    and times["DeepSeek-V3", 64] > 5
)
head = [
    "model",
    "ranks",
    "bytes (MB)",
    "at the data sheet's rate (ms)",
    "its experts' products (ms)",
]
show.table(rows, head)


# %% [markdown]
# Narrow experts are the hard case: a row's bytes grow with $h$, its arithmetic with $h F$, where $F$ is the width of an expert. In the table the matrix products of both models take equally long, but DeepSeek's messages are seven times as large: over a network they take six times as long as the products.
# Therefore DeepSeek-V3 sends each token to four nodes at most, dispatches in 8 bits, and computes while rows are sent {cite}`deepseek2024v3`.
# In training it pairs the forward of one micro-batch with the backward of another: one computes while the other's rows are sent. In inference, where there is no backward, it pairs two micro-batches.
#
# ### Waiting for the fullest rank
#
# The rank with the most rows determines how long the experts' part of a step takes.
# `experts.load_slowdown` predicts this time, divided by the time with equal loads.
# Here a bias sends more and more tokens to rank 0's experts:

# %%
def time_experts(shifts, rounds=9):
    torch.manual_seed(0)
    layer = Experts(replace(SMALL, hidden=256, expert_ffn=1024)).to(ranks.device())
    layer = experts.ExpertParallel(layer, dist.group.WORLD)
    x_BSH = draw_normal(dist.get_rank(), 4, 64, 256).requires_grad_()
    loads, times = {}, {shift: [] for shift in shifts}
    for _ in range(rounds):
        for shift in shifts:
            layer.router.bias_E[:4] = shift  # rank 0's four
            dist.barrier()
            begin = time.process_time()  # stands still while a rank waits
            with experts.record_routing(layer) as routed:
                layer(x_BSH).sum().backward()
            times[shift].append(time.process_time() - begin)
            loads[shift] = experts.compute_loads(routed, dist.group.WORLD)[0].tolist()
    return loads, {shift: min(seconds) for shift, seconds in times.items()}


# %% tags=["hide-input", "measured"]
# Table: rows of the fullest rank and seconds that each rank computes
SHIFTS = 0.0, 0.02, 0.05, 1.0
found, rows = (
    ranks.run(time_experts, 2, SHIFTS, device="cpu"),
    [],
)  # CPU: times are gloo's
loads = found[0][0]
for shift in SHIFTS:
    seconds = [times[shift] for _, times in found]
    longer = max(seconds) / max(times[0.0] for _, times in found)
    cells = [f"{1e3 * each:.0f}" for each in (*seconds, abs(seconds[0] - seconds[1]))]
    predicted = experts.load_slowdown(loads[shift], 2)
    rows.append(
        (f"{sum(loads[shift][:4]):.0%}", *cells, f"{predicted:.2f}", f"{longer:.2f}")
    )
show.check_timing(
    1.3 < longer < 2.4,
    "with all rows on one rank a step takes 1.3 to 2.4 times as long",
)
show.check_timing(
    seconds[1] < 0.8 * seconds[0], "the other rank computes less than 80 % as long"
)
head = ["rows for rank 0", "rank 0 computes (ms)", "rank 1 (ms)", "one rank waits (ms)"]
show.table(rows, [*head, "times as long as even, predicted", "measured"])


# %% [markdown]
# Rank 1 gets fewer and fewer rows, but cannot go on before combine has brought its tokens' outputs from rank 0: rank 1 waits for the difference.
# The router, sorting and adding up take the same time, whatever the choices are.
# This part does not grow with the load, so the measured ratio is below the predicted one.
#
# ### How many rows an expert needs
#
# A matrix product of few rows reaches few FLOP/s: all weights are read from memory, however few rows are multiplied by them.

# %%
def measure_rate(rows_R):
    """Operations per second of an expert's three products on so many rows."""
    network = FeedForward(replace(SMALL, hidden=512), 1024)
    x_RH, times = torch.randn(rows_R, 512), []
    for _ in range(15):
        begin = time.perf_counter()
        network(x_RH)
        times.append(time.perf_counter() - begin)
    return 2 * rows_R * 3 * 512 * 1024 / min(times)


# %% tags=["hide-input", "measured"]
# Draws the FLOP/s of an expert's products over the number of rows
SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
# CPU: times are gloo's
RATES = ranks.run(lambda: [measure_rate(n) for n in SIZES], 1, device="cpu")[0]
show.check_timing(
    max(RATES) > 3 * RATES[0], "many rows reach three times the rate of one"
)
figure, axes = plt.subplots(figsize=(4.6, 2.4))
axes.semilogx(SIZES, [r / 1e9 for r in RATES], "o-", color=show.RANK_COLORS[4], base=2)
axes.set(ylim=(0, None), xlabel="rows of an expert", ylabel="GFLOP/s")
axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
figure.tight_layout()
alt = "The rate of an expert's products on this CPU: it rises with the rows, and levels off."
show.figure(figure, alt, "experts-rows")

# %% [markdown]
# On this CPU some dozens of rows are enough. For a GPU the number of rows follows from the data sheet.
# A 16-bit weight has two bytes, and each row takes two operations for each weight.
# So arithmetic takes as long as reading when the number of rows is FLOP/s divided by bytes per second.

# %%
rows_needed = H100.flops / H100.memory_bandwidth  # operations a byte
tokens = rows_needed * 256 / 8  # DeepSeek-V3: a token makes 8 rows, for 256 experts
print(
    f"{rows_needed:.0f} rows of each expert, {tokens:,.0f} tokens for all ranks that share them"
)


# %% [markdown]
# So an expert needs rows of many tokens at once.
# The more ranks share the experts, the more tokens they bring: a large group has products of more rows, but sends more messages.
#
# ## DeepSpeed's MoE layer compared
#
# DeepSpeed's `MoE` runs on a CPU, with gloo. Here it gets the weights of our router and experts, and drops nothing.
# Then all its messages have the same size: each expert's rows are *padded* with empty rows, up to the largest number of rows that any expert gets from any rank.
#
# ![Rows for four experts: 5, 2, 1 and 4. With uneven messages, 12 rows are sent. Padded to the fullest expert, 20 are sent, 8 of them empty.](../figures/experts_padded.svg)

# %%
def deepspeed_layer(layer, group):
    """DeepSpeed's MoE with the weights of `layer`, this rank's experts of it."""
    from deepspeed.moe.layer import MoE

    E, rank = len(layer.experts), dist.get_rank(group)
    with de.setup.suppress_output():
        de.import_deepspeed().init_distributed(dist_backend=dist.get_backend(group))
        theirs = MoE(
            layer.router.score.in_features, layer.experts[0], E, ep_size=group.size(), k=2,
            drop_tokens=False, use_rts=False, top2_2nd_expert_sampling=False,
        )  # fmt: skip
        theirs.set_deepspeed_parallelism()
    inner = theirs.deepspeed_moe
    inner.gate.wg.load_state_dict(layer.router.score.state_dict())
    for number, network in enumerate(inner.experts.deepspeed_experts):
        network.load_state_dict(
            layer.experts[rank * E // group.size() + number].state_dict()
        )
    return lambda x_BSH: theirs(x_BSH)[0]  # it also returns its balancing loss and counts


# %% tags=["hide-input"]
# Table: both layers, forward and backward: differences and bytes
def compare_with_deepspeed():
    torch.manual_seed(0)
    layer, group = Experts(replace(SMALL, hidden=128)), dist.group.WORLD
    both = {
        "ours": experts.ExpertParallel(copy.deepcopy(layer), group),
        "DeepSpeed": deepspeed_layer(layer, group),
    }
    x_BSH, found = draw_normal(dist.get_rank(), 4, 32, 128).requires_grad_(), {}
    for name, compute in both.items():
        x_BSH.grad = None
        with count.record_traffic() as sent:
            y_BSH = compute(x_BSH)
            y_BSH.square().sum().backward()
        found[name] = y_BSH.detach(), x_BSH.grad, sent.payload["all_to_all_single"]
    counts = experts.core.RoutingRecord(layer.router, *layer.router(x_BSH)[:2]).count_E
    dist.all_reduce(
        counts, dist.ReduceOp.MAX
    )  # DeepSpeed pads by the fullest of any rank
    return found, int(counts.max())


de.import_deepspeed()
rows = []
for N in (2, 4):
    # CPU: DeepSpeed makes its gate there
    results = ranks.run(compare_with_deepspeed, N, device="cpu", show=False)
    off = max(
        max_difference(a, b)
        for found, _ in results
        for a, b in zip(found["ours"][:2], found["DeepSpeed"][:2])
    )
    assert off < 3e-6  # paths of 512 terms: 2 sqrt(512) 2^-24 of up to 1
    ours, theirs = (
        sum(found[name][2] for found, _ in results) for name in results[0][0]
    )
    padded = experts.padding_factor(SMALL, 128, results[0][1])  # of a rank's 128 tokens
    sizes = N * 8 * 8  # of ours: eight bytes for each expert
    assert theirs == padded * (ours - sizes)
    rows.append(
        (
            N,
            "< 10⁻⁵",
            f"{ours:,}",
            f"{theirs:,}",
            f"{padded:.2f}",
            f"{theirs / ours:.2f}",
        )
    )
head = [
    "ranks",
    "results differ by",
    "ours (B)",
    "DeepSpeed (B)",
    "predicted ratio",
    "counted",
]
show.table(rows, head)


# %% [markdown]
# The results agree.
# DeepSpeed sends a third more, and its experts compute the empty rows, too.
# In return the ranks exchange one maximum instead of $E$ counts.
# The script `benchmarks/experts.py` measures both layers' times.
# For speed, PyTorch has `grouped_mm`, which computes the products of all experts in one kernel; torchtitan and Megatron use such kernels.
#
# ## What goes wrong, and how it looks
#
# ### The wrong average
#
# Four ranks have two copies of each expert.
# Three mistakes are possible.
# Experts' gradients are averaged over the two copies (as by DDP around the experts), over all four ranks (as by DDP around the whole model), or not at all.

# %%
def average_wrongly(way, steps=20):
    world, (group, copies) = dist.group.WORLD, make_pair_groups()
    model = experts.parallelize(build_model(), group)
    own = experts.own_parameters(model)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for step in range(steps):
        tokens, targets = (take_shard(x) for x in make_batch(step))
        optimizer.zero_grad()
        value = loss(model(tokens), targets)
        value.backward()
        before = [p.grad.clone() for p in own]
        experts.average_gradients(model, world, copies)
        if way != "right":
            for p, gradient in zip(own, before, strict=True):
                p.grad.copy_(gradient)
        if way == "over two copies":
            buckets.average_gradients(own, copies)
        if way == "over all four":
            buckets.average_gradients(own, world)
        if step == 0:
            norm = torch.stack([p.grad.norm() for p in own]).norm().item()
        optimizer.step()
    dist.all_reduce(value := value.detach())
    return norm, value.item() / 4, own[0].detach()


# %% tags=["hide-input"]
# Table: what each mistake does to norms, loss and copies
rows, traces = [], {}
for way in ("right", "over two copies", "over all four", "over nobody"):
    found = ranks.run(average_wrongly, 4, way)
    norms, values, weights = zip(*found, strict=True)
    same = weights[0].equal(weights[2]) and weights[1].equal(weights[3])
    traces[way] = norms, values[0], same
    cells = [
        f"{norm / traces['right'][0][rank]:.2f}" for rank, norm in enumerate(norms[:2])
    ]
    rows.append((way, *cells, f"{values[0]:.3f}", "equal" if same else "differ"))
    if way == "over two copies":
        # Two norms, each off by 2 sqrt(1920) 2^-24 of it.
        assert all(abs(a / b - 2) < 2e-5 for a, b in zip(norms, traces["right"][0]))
    if way == "over all four":
        assert norms[0] == norms[1] == norms[2] == norms[3]
    assert same == (way != "over nobody")
    assert abs(values[0] - traces["right"][1]) < 0.1
head = [
    "experts averaged",
    "norm of rank 0's, times right",
    "of rank 1's",
    "loss after 20 steps",
]
show.table(rows, [*head, "copies of an expert"])


# %% [markdown]
# The loss shows none of these mistakes.
# Averaged over the copies alone, experts' gradients are too large by a factor: the number of ranks that share the experts.
# AdamW divides by the gradient's size, so the error shows only when gradients are clipped by their norm, or with SGD.
# Averaged over all ranks, the gradients of *different* experts are added up.
# The symptom: experts' gradients have the same norm on every rank, to the last bit.
# Without averaging, the copies of an expert become different.
#
# ### A rank without tokens skips the exchange
#
# Rank 1 has no tokens in this step, because its part of the data has ended, and does not call the layer.

# %%
def skip_exchange():
    model = experts.parallelize(build_model(), dist.group.WORLD)
    tokens = take_shard(make_batch(0)[0])
    if dist.get_rank() != 1:
        model(tokens)


try:
    ranks.run(
        skip_exchange, 4, device="cpu", timeout=5
    )  # CPU: gloo, whose ranks can be asked
except ranks.RankError as error:
    print(error)
    assert error.ranks == [1]

# %% [markdown]
# But rank 1's *experts* get rows from other ranks.
# Every rank has to call every exchange, in forward and in backward, with empty tensors if it has no tokens.
#
# ### Symptoms and causes
#
# | symptom | cause |
# |---|---|
# | one rank computes, the others wait in all-to-all | router collapse, or text whose tokens all choose one expert: look at `experts.compute_loads` |
# | memory runs out on one rank, in some step | the layer is dropless, and most tokens chose this rank's experts |
# | a jump in the norm of gradients when experts are sharded over more ranks | experts' gradients averaged over the copies alone |
# | norms of experts' gradients are equal on all ranks | gradients averaged over different experts |
# | the router does not learn with $k = 1$ | the only chosen score was divided by itself, which gives 1 |
# | validation loss depends on the batch and the number of ranks | a capacity, with places counted for each rank |
#
# ## When to use it
#
# | for | against |
# |---|---|
# | Parameters grow with $E$, arithmetic for a token with $k$: DeepSeek-V3 has 18 times as many parameters as it uses for a token | All parameters are held, with gradients and AdamW's two moments |
# | Each rank has tokens of its own, as in data parallelism, and no matrix is sharded | Two all-to-alls forward and two backward in each layer, which take longer than the products of narrow experts |
# | Experts are whole, so matrix products are large | Each expert needs hundreds of rows at a time |
# | | All ranks wait for the rank with the most rows; loads have to be kept even, and monitored |
#
# ```{admonition} On more GPUs
# :class: note
#
# Without GPUs this page's results, parameters and bytes are exact, and seconds are those of ranks that share a machine.
# On eight GPUs, or on two nodes, compare the seconds of the all-to-alls and of the experts' products: they decide whether experts are worth it.
# ```
#
# ## Exercises
#
# Each exercise has a check, which runs your answer on real ranks where it needs them.
#
# ```{exercise-start} Enough tokens (easy)
# :label: ex-experts-tokens
# ```
#
# Each expert should get 300 rows in each layer.
# DeepSeek-V3 has 256 experts, and each token goes to 8 of them; choices are even.
# How many tokens must all ranks that share the experts bring together?

# %%
answer = ...  # tokens
check(answer, "experts_tokens")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-experts-tokens
# :label: sol-experts-tokens
# :class: dropdown
# ```
#
# A token makes eight rows, and all rows go to 256 experts.

# %%
answer = 300 * 256 / 8
check(answer, "experts_tokens")

# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Bytes sent (easy)
# :label: ex-experts-wire
# ```
#
# 64 ranks share the experts of DeepSeek-V3 ($h = 7168$, $k = 8$). Each rank has 4,096 tokens, and a number has 2 bytes.
# Choices are even.
# How many bytes leave a rank in one layer's forward?

# %%
answer = ...  # bytes
check(answer, "experts_wire")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-experts-wire
# :label: sol-experts-wire
# :class: dropdown
# ```
#
# The rank sends in dispatch and combine, but keeps a 64th: its own experts' rows.

# %%
answer = 2 * 4096 * 8 * 7168 * 2 * 63 / 64
check(answer, "experts_wire")


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Expert capacity (medium)
# :label: ex-experts-admit
# ```
#
# `chosen_TC` holds the experts that the tokens of one sequence chose, best first.
# Return a copy with -1 where the expert has no place left.
# Each of `count` experts has `places` places; all first choices come before all second ones, and earlier tokens before later ones.

# %%
def my_admit(chosen_TC, count, places):
    pass  # your code


check(my_admit)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-experts-admit
# :label: sol-experts-admit
# :class: dropdown
# ```
#
# A loop is simplest. `router.drop_overflow` has no loop: in the order of choices it counts how often each expert was chosen before.

# %%
def my_admit(chosen_TC, count, places):
    kept_TC, taken = chosen_TC.clone(), [0] * count
    for c in range(chosen_TC.shape[1]):
        for t in range(chosen_TC.shape[0]):
            number = int(chosen_TC[t, c])
            if taken[number] == places:
                kept_TC[t, c] = -1
            else:
                taken[number] += 1
    return kept_TC


check(my_admit)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Uneven sizes, with your own all-to-all (medium)
# :label: ex-experts-exchange
# ```
#
# Return what `experts.exchange_rows` returns in forward.
# The rows of `x_RH` are in the order of the ranks that they go to, `sent[j]` of them for rank `j`; `received[i]` rows come from rank `i`.
# The course's `collectives.all_to_all(outputs, inputs, group)` takes lists of tensors of any sizes.

# %%
def my_exchange(x_RH, sent, received, group):
    pass  # your code


check(my_exchange)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-experts-exchange
# :label: sol-experts-exchange
# :class: dropdown
# ```
#
# Split, allocate outputs, exchange, concatenate.

# %%
def my_exchange(x_RH, sent, received, group):
    outputs = [x_RH.new_empty(rows, x_RH.shape[1]) for rows in received]
    collectives.all_to_all(outputs, list(x_RH.split(sent)), group)
    return torch.cat(outputs)


check(my_exchange)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} The right average (medium)
# :label: ex-experts-average
# ```
#
# Four ranks have tokens of their own; ranks 0 and 1 share the experts, ranks 2 and 3 have copies of them.
# After backward `shared` is the gradient of a parameter that all ranks have, and `own` the gradient of one of this rank's experts.
# Change both in place to the gradients of one process.
# `data` is the group of all four ranks, `copies` the group of the ranks with the same experts.

# %%
def my_average(shared, own, data, copies):
    pass  # your code


check(my_average)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-experts-average
# :label: sol-experts-average
# :class: dropdown
# ```
#
# The sum is over the ranks that have the parameter; the divisor is the number of ranks that have tokens.

# %%
def my_average(shared, own, data, copies):
    dist.all_reduce(shared, group=data)
    dist.all_reduce(own, group=copies)
    shared /= data.size()
    own /= data.size()


check(my_average)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Balance over ranks (hard)
# :label: ex-experts-balance
# ```
#
# Return the balancing loss of one layer, $E \sum_e f_e P_e$, so that its mean over ranks, and its gradient, are those of one process with all tokens.
# `scores_TE` are the scores of this rank's tokens, `chosen_TC` the experts that they chose; all ranks have equally many tokens.

# %%
def my_balancing(scores_TE, chosen_TC, group):
    pass  # your code


check(my_balancing)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-experts-balance
# :label: sol-experts-balance
# :class: dropdown
# ```
#
# The load is counted over all ranks; it has no gradient, so a plain all-reduce is enough.
# The mean score is over this rank's tokens only: averaging gradients over ranks makes it the mean over all tokens.

# %%
def my_balancing(scores_TE, chosen_TC, group):
    E = scores_TE.shape[1]
    load_E = torch.bincount(chosen_TC.flatten(), minlength=E).float()
    dist.all_reduce(load_E, group=group)
    return E * (load_E / load_E.sum() * scores_TE.mean(0)).sum()


check(my_balancing)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} How many ranks? (design)
# :label: ex-experts-ranks
# ```
#
# Return the smallest number of ranks that can share the experts of `config`, or `None` if there is none.
# The number divides `config.experts`.
# A rank's model states, 16 bytes for each of `experts.count_held_parameters(config, ranks)`, take at most `limit` bytes.
# Each expert gets at least `rows` rows if each rank brings `tokens` tokens and choices are even.

# %%
def my_expert_ranks(config, tokens, limit, rows):
    pass  # your code


check(my_expert_ranks)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-experts-ranks
# :label: sol-experts-ranks
# :class: dropdown
# ```
#
# With more ranks, each rank holds less, and each expert gets more rows. But more bytes leave each rank, so the smallest number that is enough is best.

# %%
def my_expert_ranks(config, tokens, limit, rows):
    for size in range(1, config.experts + 1):
        if (
            config.experts % size
            or 16 * experts.count_held_parameters(config, size) > limit
        ):
            continue
        if tokens * size * config.experts_per_token / config.experts >= rows:
            return size
    return None


check(my_expert_ranks)

# %% [markdown]
# ```{solution-end}
# ```
#
# ## Summary
#
# - A router sends each token to $k$ of $E$ experts: all are held in memory, few compute for a token.
# - Experts on several ranks need two all-to-alls of unequal sizes, dispatch and combine, and two in backward.
# - An expert's gradient is summed over its copies and divided by the number of all ranks that have tokens.
# - A capacity fixes message sizes but drops choices, and outputs then depend on later tokens; dropless layers send every row.
# - Without a remedy, routers collapse onto few experts. A balancing loss or a bias keeps loads even; choices are counted over all ranks.
# - All ranks wait for the rank with the most rows; on a GPU an expert needs hundreds of rows.
#
# ## Further reading
#
# - {cite:t}`lepikhin2020gshard`: experts over thousands of ranks, with capacity; section 3 is the layer of this page.
# - {cite:t}`fedus2021switch`: one expert for a token; the balancing loss; what is unstable and why.
# - {cite:t}`deepseek2024v3`: many small experts, the bias, and how 2,048 GPUs compute during the all-to-alls.
# - {cite:t}`qiu2025demons`: over which tokens to balance.
