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
# # Context parallelism: ring attention and all-to-all
#
# After this lesson you can
#
# - compute attention over a sequence that no rank holds whole, with a ring or an all-to-all;
# - explain why a causal mask leaves ranks of a ring idle, and how to keep all of them busy;
# - predict the bytes sent, the work, the memory and the longest context for both methods;
# - find wrong position ids and a deadlocked ring in the first step of a run.
#
# Llama 3 was trained on contexts of 131,072 tokens.
# A step on one such sequence keeps 99 GB of activations on each of eight ranks, even with tensor and sequence parallelism.
# That does not fit on a GPU of 80 GB.
#
# ## Only attention needs other tokens

# %% tags=["hide-input"]
# Imports, and the small GPT that every cell trains
import time
from functools import partial

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from shardcourse.exercises import check
from shardlab import context_parallel as cp
from shardlab import memory, ranks
from shardlab.common import show, text
from shardlab.gpt.model import GPT, PRESETS, Config, loss
from shardlab.layout import Layout
from shardlab.measure import count, link

show.set_style()

SMALL = Config(seq=64, layers=2, heads=4, hidden=64)
LLAMA = PRESETS["llama-3-8b"]


def build_model(dtype=None):
    """Return the small GPT, with equal weights at every call."""
    torch.manual_seed(0)
    return GPT(SMALL).to(ranks.device(), dtype)


def make_batch(step=0, size=2):
    """Return tokens and targets, each [size, 64], equal on every rank."""
    tokens, targets = text.get_batch(SMALL.seq, size, start=step * size)
    return tokens.to(ranks.device()), targets.to(ranks.device())


def max_difference(a, b):
    """Return the largest difference between two tensors."""
    return (a - b).abs().max().item()


def draw_qkv(layout, seq, heads=8, kv_heads=2, size=32, dtype=torch.float64):
    """Return this rank's shards of random queries, keys and values, as leaf tensors."""
    generator = torch.Generator().manual_seed(0)
    full = (
        torch.randn(1, n, seq, size, generator=generator, dtype=dtype).to(
            ranks.device()
        )
        for n in (heads, kv_heads, kv_heads)
    )
    N, rank = dist.get_world_size(), dist.get_rank()
    return [
        cp.split_seq(x, N, rank, layout, dim=2).clone().requires_grad_()
        for x in full
    ]


# %% tags=["hide-input"]
# Prints the activations of a step on Llama's longest context, on each of eight ranks
eight = Layout(tp=8, sequence_parallel=True)
of = memory.estimate_activations(LLAMA, eight, seq=131_072, device="gpu")
print(f"Llama 3 8B, 131,072 tokens, on each of 8 ranks: {of.kept_bytes / 1e9:.1f} GB")
assert of.kept_bytes > 80e9


# %% [markdown]
# More tensor-parallel ranks do not help: each needs its own attention heads, and the fast links inside a machine.
# So *context parallelism* shards the sequence itself over the ranks, from the embedding to the loss.
# [Sequence parallelism](sequence_parallel.md) also shards the tokens, but over tensor-parallel ranks, and not in attention.
#
# A sequence has $s$ tokens. Each of $N$ ranks has $s/N$ of these tokens in all layers, and all weights.
# Embedding, LayerNorms, linear layers and the loss compute each token by itself. One operation needs other ranks' tokens: attention, which multiplies a token's query with other tokens' keys, and adds up their values.
#
# There are two methods. A *ring* sends keys and values from rank to rank, so that every rank gets all of them, one rank's at a time. An *all-to-all* changes sharding by tokens into sharding by heads, and a second all-to-all reverses this after attention.
#
# ## A ring of keys and values
#
# Queries stay on their ranks, and keys and values move. In each *turn* a rank computes attention of its queries to the keys that it currently has, and sends these keys and their values to the next rank, the last rank to rank 0 {cite}`liu2023ring`. After $N$ turns each rank has had all keys.
#
# ![Ring attention on four ranks, in four turns. Each rank keeps its queries. In turn 0 it has its own keys and values; after each turn it sends the keys and values that it has to the next rank, the last rank to the first. After four turns each rank has had all four pieces.](../figures/context_parallel_ring.svg)
#
# But softmax divides by a sum over *all* keys, and in turn 0 a rank has only its own keys.
# So attention to one turn's keys, a *block*, gives two results: the output $o_i$, and the logarithm $\ell_i$ of the sum of the scores' exponentials. The results for two blocks are merged into $o$ and $\ell$ for both {cite}`milakov2018softmax,dao2022flashattention`:
#
# $$
# \ell = \log\big(e^{\ell_1} + e^{\ell_2}\big), \qquad o = e^{\ell_1 - \ell}\, o_1 + e^{\ell_2 - \ell}\, o_2 .
# $$
#
# ![Four scores of one query, in two blocks. Block 0 has exponentials 2 and 1, sum 3, output 7; block 1 has 0.5 and 0.5, sum 1, output 6. Merged, the outputs are weighted by the sums, 3/4 and 1/4: 6.75, as from all four scores together.](../figures/context_parallel_merge.svg)
#
# The exponents are differences, and never positive, so large scores do not overflow.
#
# ### The plain version
#
# This is the forward of ring attention without a mask. In shapes, $B$ is the batch, $A$ the heads and $s$, unlike in formulas, the tokens of one rank:

# %%
def attend(q, k, v):
    """Output over these keys, and the logarithm of each row's sum of exponentials."""
    scores = q @ k.mT / q.shape[-1] ** 0.5  # [B, A, s, s]
    return scores.softmax(-1) @ v, scores.logsumexp(-1, keepdim=True)


def send_to_next(kv):
    """Send a piece to the next rank; return the previous rank's piece."""
    N, rank, coming = dist.get_world_size(), dist.get_rank(), torch.empty_like(kv)
    if rank % 2 == 0:  # even ranks send first, odd ones receive first
        dist.send(kv, (rank + 1) % N)
        dist.recv(coming, (rank - 1) % N)
    else:
        dist.recv(coming, (rank - 1) % N)
        dist.send(kv, (rank + 1) % N)
    return coming


def attend_in_ring(q, k, v):
    (out, log_sum), kv = attend(q, k, v), torch.stack((k, v))
    for _turn in range(1, dist.get_world_size()):
        kv = send_to_next(kv)
        block, block_sum = attend(q, *kv)
        both = torch.logaddexp(log_sum, block_sum)
        out = (log_sum - both).exp() * out + (block_sum - both).exp() * block
        log_sum = both
    return out


# %% tags=["hide-input"]
# Compares the plain ring with one process, on 2, 3 and 4 ranks
def compare_ring():
    mine = [x.detach() for x in draw_qkv("contiguous", 48, 4, 4)]
    full = [cp.gather_seq(x, dist.group.WORLD, "contiguous", dim=2) for x in mine]
    right = F.scaled_dot_product_attention(*full)
    right = right.chunk(dist.get_world_size(), 2)[dist.get_rank()]
    return max_difference(right, attend_in_ring(*mine))


# CPU: its attention takes float64
gaps = {N: max(ranks.run(compare_ring, N, device="cpu")) for N in (2, 3, 4)}
assert max(gaps.values()) < 1e-13  # paths of 32 + 48 terms: 2 * 80 * 2^-53 of up to 5
print(
    *(f"{N} ranks: largest difference {each:.0e}" for N, each in gaps.items()), sep="\n"
)


# %% [markdown]
# Even ranks send first, and odd ones receive first: if all sent first, none would receive, and the ring would hang ([shown below](#all-send-first)).
# [Collectives](collectives.md#deadlock-in-a-ring-who-sends-first) explains why, and has another solution, which `shardlab.context_parallel` uses: one batch of both messages, `ranks.exchange`.
#
# ### What the plain version leaves out
#
# - *Backward.* Autograd does not record messages, so the gradient does not return to the rank that sent the keys. This needs a second ring.
# - *Memory.* `attend` stores all scores of a block, $[B, A, s, s]$; fused kernels do not.
# - *Overlap.* Nothing is sent while a rank computes, and a rank computes nothing while it waits ([measured below](#context-seconds)).
# - *The causal mask*, under which ranks have unequal work ([measured below](#context-work)).
#
# `context_parallel.ring_attention` solves all four. The table compares the first two on four ranks.

# %% tags=["hide-input"]
# Table: peak memory and the keys' gradient, in the plain ring and the module's
def compare_both_rings(way, seq=2048):
    """Return this rank's peak bytes in forward, and the keys' gradient's error."""
    mine = draw_qkv("contiguous", seq, 4, 4, 16)
    with count.track_memory(*mine) as held:
        y = way(*mine)
    y.sum().backward()
    full = gather_qkv(seq)
    F.scaled_dot_product_attention(*full).sum().backward()
    right = full[1].grad.chunk(dist.get_world_size(), 2)[dist.get_rank()]
    return held.peak_bytes, max_difference(right, mine[1].grad) / right.abs().max().item()


def gather_qkv(seq):
    """Return the whole sequence's queries, keys and values."""
    mine, group = draw_qkv("contiguous", seq, 4, 4, 16), dist.group.WORLD
    return [
        cp.gather_seq(x, group, "contiguous", dim=2).requires_grad_() for x in mine
    ]


def run_module_ring(q, k, v):
    return cp.ring_attention(
        q, k, v, dist.group.WORLD, causal=False, layout="contiguous"
    )


RINGS = {
    # CPU: its attention takes float64
    name: ranks.run(compare_both_rings, 4, way, device="cpu")
    for name, way in (("plain", attend_in_ring), ("module", run_module_ring))
}
rows = []
for way, found in RINGS.items():
    peak, off = (max(each) for each in zip(*found, strict=True))
    rows.append((way, f"{peak / 1e6:.1f}", f"{100 * off:.2g}"))
    # Paths of 4,128 terms: 2 * 4128 * 2^-53 of terms up to 100 times the result
    assert (off < 1e-10) == (way == "module"), (way, off)
assert RINGS["plain"][0][0] > 5 * RINGS["module"][0][0]
head = ["ring", "peak in forward (MB)", "error of the keys' gradient (%)"]
show.table(rows, head, caption="2048 tokens on 4 ranks, 4 heads of 16, float64")

# %% [markdown]
# ### Ring attention with a backward
#
# The module merges two blocks by the same formula, and computes the second weight, $e^{\ell_2 - \ell}$, as the sigmoid of $\ell_2 - \ell_1$, which is equal:

# %%
show.source(cp.merge_attention)

# %% [markdown]
# In forward, `send_kv` comes *before* the blocks and `wait` after them: messages are sent during the computation.
# `ring.run_turn` yields a turn's blocks: a slice of the rank's queries, a slice of its current keys, and a flag for the causal mask. Without a mask, the only block is all queries and all keys. `block_attention` is a fused kernel that also returns the logarithms $\ell$ ([kernel.py](../code/shardlab/context_parallel/kernel.py)).

# %%
show.source(cp.ring_attention, cp.core._RingAttention.forward)

# %% [markdown]
# Backward sends keys and values round the ring again, and recomputes each block's probabilities from $\ell$, as fused kernels do.
# With each rank's keys and values, backward also sends their gradient, to which every rank adds its part. The last message returns the gradient to the rank that owns the keys.

# %%
show.source(cp.core._RingAttention.backward)

# %% [markdown]
# Each transfer is a batch of two messages, one sent and one received into a buffer:

# %%
show.source(cp.core._RingTransfer)

# %% [markdown]
# (context-work)=
# ## Load balance under a causal mask: zig-zag
#
# In a language model a token attends only to earlier tokens and to itself, so about half of the scores are not needed. For one rank, this fraction depends on the positions of its tokens.
#
# ![The causal mask over eight pieces of a sequence, whose queries belong to four ranks, in two layouts. Contiguous, rank 0 has pieces 0 and 1 and rank 3 pieces 6 and 7: the ranks do 1, 3, 5 and 7 sixteenths of the work. Zig-zag, rank r has pieces r and 7 - r: each rank does 4.](../figures/context_parallel_zigzag.svg)
#
# If each rank has one contiguous piece, rank 0 has work only in turn 0, and the last rank in every turn.
# So cut the sequence into $2N$ pieces, and give rank $r$ an early and a late one, pieces $r$ and $2N-1-r$. This layout is the *zig-zag*. (Striped attention gives each rank every $N$-th token, for the same reason {cite}`brandon2023striped`.)
#
# :::{step-through} A causal ring in a zig-zag, on four ranks
# 1. ![Before the first turn. A square of eight rows, the pieces' queries, and eight columns, their keys; only squares on and below the diagonal are needed. Pieces: rank 0 has 0 and 7; rank 1 has 1 and 6; rank 2 has 2 and 5; rank 3 has 3 and 4.](../figures/steps/context_parallel_1.svg)
#
#    Eight pieces: rank 0 has queries and keys of pieces 0 and 7, rank 1 of 1 and 6, and so on.
#    The scores on the diagonal and below it have to be computed.
#
# 2. ![Turn 0. Queries to keys: rank 0 has keys 0 and 7: 0 to 0 (half), 7 to 0, 7 to 7 (half); rank 1 has keys 1 and 6: 1 to 1 (half), 6 to 1, 6 to 6 (half); rank 2 has keys 2 and 5: 2 to 2 (half), 5 to 2, 5 to 5 (half); rank 3 has keys 3 and 4: 3 to 3 (half), 4 to 3, 4 to 4 (half). Two squares of work for each rank.](../figures/steps/context_parallel_2.svg)
#
#    In turn 0 every rank has its own keys. It computes two half squares on the diagonal and one whole square: two squares of work.
#
# 3. ![Turn 1. Queries to keys: rank 0 has keys 3 and 4: 7 to 3, 7 to 4; rank 1 has keys 0 and 7: 1 to 0, 6 to 0; rank 2 has keys 1 and 6: 2 to 1, 5 to 1; rank 3 has keys 2 and 5: 3 to 2, 4 to 2. Two squares of work for each rank.](../figures/steps/context_parallel_3.svg)
#
#    The keys have moved by one rank. Rank 0 has keys of pieces 3 and 4: its late queries come after both, its early queries before both.
#    Rank 1 has keys of pieces 0 and 7: both of its pieces come after 0, and before 7. Each rank again computes two squares.
#
# 4. ![Turn 2. Queries to keys: rank 0 has keys 2 and 5: 7 to 2, 7 to 5; rank 1 has keys 3 and 4: 6 to 3, 6 to 4; rank 2 has keys 0 and 7: 2 to 0, 5 to 0; rank 3 has keys 1 and 6: 3 to 1, 4 to 1. Two squares of work for each rank.](../figures/steps/context_parallel_4.svg)
#
#    Every turn has two squares of work for each rank: one piece of queries with two of keys, or two of queries with one of keys.
#
# 5. ![Turn 3. Queries to keys: rank 0 has keys 1 and 6: 7 to 1, 7 to 6; rank 1 has keys 2 and 5: 6 to 2, 6 to 5; rank 2 has keys 3 and 4: 5 to 3, 5 to 4; rank 3 has keys 0 and 7: 3 to 0, 4 to 0. Two squares of work for each rank.](../figures/steps/context_parallel_5.svg)
#
#    In the last turn every rank gets the only keys that it has not had yet.
#
# 6. ![After four turns. All squares below the diagonal and the halves on it are computed, eight squares of work by each rank: those in the rows of its two pieces.](../figures/steps/context_parallel_6.svg)
#
#    Each rank has computed the rows of its two pieces, 8 of 32 squares. In no turn did a rank wait for another.
# :::
#
# So in every turn a rank computes half of the scores between its queries and the current keys:

# %%
show.source(cp.Block, cp.list_blocks)


# %% [markdown]
# The next cell counts the query-key pairs that each rank computes, and measures the processor time for them.

# %%
def time_layouts(seq):
    """Return this rank's query-key pairs in one head, and seconds, for each layout."""
    found = {}
    for layout in cp.LAYOUTS:
        for _ in range(2):  # the first one warms up
            trace, mine = [], draw_qkv(layout, seq, dtype=torch.float32)
            begin = time.process_time()  # stands still while a rank waits
            cp.ring_attention(*mine, dist.group.WORLD, layout=layout, trace=trace)
            seconds = time.process_time() - begin
        found[layout] = sum(work.block.num_pairs for work in trace), seconds
    return found


N, seq = 4, 8192

# %% tags=["hide-input", "measured"]
# Table: work of each rank in both layouts, predicted and counted
WORK = ranks.run(time_layouts, N, seq, device="cpu")  # CPU: times are gloo's
rows, slowest = [], {}
for layout in cp.LAYOUTS:
    all_seconds = sum(result[layout][1] for result in WORK)
    for rank, result in enumerate(WORK):
        pairs, seconds = result[layout]
        want = cp.count_pairs(layout, seq, N, rank)
        assert pairs == want
        fraction = f"{100 * pairs / (seq * (seq + 1) / 2):.1f}"
        took = f"{100 * seconds / all_seconds:.0f}"
        rows.append((layout, rank, f"{want:,}", f"{pairs:,}", fraction, took))
    slowest[layout] = max(result[layout][1] for result in WORK) / all_seconds
even = slowest["contiguous"] > 0.36 > slowest["zigzag"]
show.check_timing(
    even, "the slowest rank has over 36 % of the time, and less in zig-zag"
)
head = [
    "layout",
    "rank",
    "pairs, predicted",
    "counted",
    "of all (%)",
    "of the time (%)",
]
show.table(rows, head, caption=f"{seq} tokens, causal, forward")


# %% [markdown]
# `````{admonition} Only if the pieces are in zig-zag order: "the causal mask halves the time of ring attention"
# :class: checked
#
# The mask halves the total work of all ranks, but a step takes as long as its slowest rank.
# With contiguous pieces the last rank has $\frac{2N-1}{N^2}$ of the pairs that the mask leaves: 44 % on four ranks (row 4), instead of 25 %. These are 22 % of all pairs. Without a mask each rank has 25 % of all pairs, so the mask saves an eighth of the time, not a half.
# With the zig-zag the mask saves half of the time, on any number of ranks, and in every turn.
# `````
#
# ![Timeline of a causal ring on four ranks. Contiguous, rank 0 computes with its own keys only, rank 3 with all four blocks, and the other ranks wait for rank 3. Zig-zag, each rank has half a block to compute in every turn: all end together, after four sevenths of the time.](../figures/context_parallel_idle.svg)
#
# ## The all-to-all (Ulysses): from tokens to heads
#
# The other method is an all-to-all before attention. It gives a rank *all* tokens of $a/N$ heads instead of $s/N$ tokens of all $a$ heads. A head's attention needs no other head, so each rank computes plain attention, with any kernel and any mask.
# A second all-to-all returns the outputs to the ranks of their tokens. This method is called *Ulysses* {cite}`jacobs2023ulysses`.
#
# ![Four pieces of a sequence and four heads on four ranks. Before, each rank has one piece with all heads. An all-to-all gives each rank one head with all pieces, and its attention sees the whole sequence. A second all-to-all returns the outputs to the ranks of their tokens.](../figures/context_parallel_ulysses.svg)
#
# One function does both exchanges. It cuts a tensor along one dimension, sends a part to each rank, and joins the received parts along another dimension.

# %%
def swap(x, deal, collect):
    """Send part j along `deal` to rank j; join the received parts along `collect`."""
    parts = torch.stack(x.chunk(dist.get_world_size(), dim=deal))
    coming = torch.empty_like(parts)
    dist.all_to_all_single(coming, parts)
    return torch.cat(list(coming), dim=collect)


def all_to_all(q, k, v):
    q, k, v = (swap(x, 1, 2) for x in (q, k, v))  # all tokens of a/N heads
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return swap(y, 2, 1)  # all heads of s/N tokens


# %% tags=["hide-input"]
# Compares the plain all-to-all with one process, and counts its messages
def compare_swap():
    N, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    mine = [x.detach() for x in draw_qkv("contiguous", 48, 4, 4)]
    full = [cp.gather_seq(x, group, "contiguous", dim=2) for x in mine]
    right = F.scaled_dot_product_attention(*full, is_causal=True)
    calls = []
    for way in (all_to_all, partial(cp.all_to_all_attention, group=group)):
        with count.record_traffic() as sent:
            y = way(*mine)
        calls.append(sum(sent.calls.values()))
    return max_difference(right.chunk(N, 2)[rank], y), *calls


for N in (2, 4):
    # CPU: its attention takes float64
    results = ranks.run(compare_swap, N, device="cpu")
    off, *calls = map(max, zip(*results, strict=True))
    assert off < 1e-13 and calls == [4, 2]  # as the ring's
    print(f"{N} ranks: largest difference {off:.0e}; all-to-alls: plain 4, module 2")

# %% [markdown]
# Even without a zig-zag, every rank has equal work. But there must be at least one head for each rank.
#
# ### All-to-all with a backward
#
# The package's version has a backward: the same exchanges in the opposite direction. It sends queries, keys and values in one all-to-all instead of three.
# It also supports the zig-zag, and fewer key-value heads than ranks: then each key-value head goes to several ranks.

# %%
show.source(cp.all_to_all_attention)

# %% [markdown]
# `tokens_to_heads` and `heads_to_tokens` are the two exchanges, and `_AllToAll` is an all-to-all that has a backward:

# %%
show.source(cp.tokens_to_heads, cp.heads_to_tokens, cp.ulysses._AllToAll)

# %% [markdown]
# ## The whole model
#
# `cp.distribute_model` changes the plain GPT in place: each attention calls one of the two functions, and its rotary embedding uses the tokens' positions in the *whole* sequence.

# %%
show.source(cp.distribute_model, cp.core._forward_sharded)


# %% [markdown]
# Each rank has all weights, and gradients from its own tokens, so gradients are averaged after backward, as in data parallelism. LayerNorms, linear layers and the loss do not change.
# This is a training step:

# %%
def train_step(model, optimizer, tokens, targets, layout):
    """Train on this rank's tokens; return the loss averaged over the ranks."""
    group = dist.group.WORLD
    tokens, targets = (cp.shard_tokens(x, group, layout) for x in (tokens, targets))
    value = loss(model(tokens), targets)
    optimizer.zero_grad()
    value.backward()
    cp.average_gradients(model, group)
    optimizer.step()
    return cp.average_scalar(value, group)


def make_adamw(model, lr=1e-3):
    return torch.optim.AdamW(model.parameters(), lr=lr, foreach=False)


# %% [markdown]
# Both attentions have to equal attention in one process: the output, and the gradients of queries, keys and values, with a causal mask and without, with 8 query heads and 2 key-value heads. Then five steps of AdamW have to give the same weights.

# %% tags=["hide-input"]
# Compares attention with its gradients, and five steps, with one process
WAYS = {
    ("ring", "contiguous"): cp.ring_attention,
    ("ring", "zigzag"): cp.ring_attention,
    ("ulysses", "contiguous"): cp.all_to_all_attention,
}


def compare_attention(attention, layout):
    """Largest differences: output, and gradients of queries, keys, values."""
    N, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    gaps = [0.0, 0.0]
    for causal in (True, False):
        mine = draw_qkv(layout, 64)
        full = [
            cp.gather_seq(x, group, layout, dim=2).requires_grad_() for x in mine
        ]
        right = F.scaled_dot_product_attention(*full, is_causal=causal, enable_gqa=True)
        got = attention(*mine, group, causal=causal, layout=layout)
        weights = torch.arange(right.numel(), device=right.device).view_as(right).sin()
        (right * weights).sum().backward()
        (got * cp.split_seq(weights, N, rank, layout, dim=2)).sum().backward()
        pairs = [(right, got)]
        pairs += [(x.grad, y.grad) for x, y in zip(full, mine, strict=True)]
        out, *back = (
            max_difference(cp.split_seq(a, N, rank, layout, dim=2), b) for a, b in pairs
        )
        gaps = [max(gaps[0], out), max(gaps[1], *back)]
    return gaps


def train_five_steps(attention, layout):
    """Largest differences: loss, weights after five steps."""
    group, dtype = dist.group.WORLD, torch.float64
    alone = build_model(dtype)
    model = cp.distribute_model(build_model(dtype), group, attention, layout)
    optimizers, in_loss = (make_adamw(alone), make_adamw(model)), 0.0
    for step in range(5):
        tokens, targets = make_batch(step)
        value = loss(alone(tokens), targets)
        optimizers[0].zero_grad()
        value.backward()
        optimizers[0].step()
        mine = train_step(model, optimizers[1], tokens, targets, layout)
        in_loss = max(in_loss, abs(value.item() - mine))
    pairs = zip(alone.state_dict().values(), model.state_dict().values(), strict=True)
    return in_loss, max(max_difference(a, b) for a, b in pairs)


def compare_training():
    return {
        way: (*compare_attention(fn, way[1]), *train_five_steps(*way))
        for way, fn in WAYS.items()
    }


rows = []
for N in (2, 4):
    results = ranks.run(compare_training, N)
    for way in WAYS:
        gaps = [max(each) for each in zip(*(r[way] for r in results), strict=True)]
        # Paths of n = 1,792 terms: 4 n 2^-53 of 5; 5 lr / eps times 2 sqrt(n) 2^-53.
        assert max(gaps[:3]) < 4e-12 and gaps[3] < 5e-9, (way, gaps)
        rows.append((N, *way, *(f"{each:.0e}" if each else "0" for each in gaps)))
head = [
    "ranks",
    "way",
    "layout",
    "attention",
    "its gradients",
    "loss",
    "weights after 5 steps",
]
show.table(rows, head, caption="Largest differences from one process, float64")


# %% [markdown]
# The [tests](../tests/test_context_parallel.py) compare random shapes and 16-bit types as well, and [other tests](../tests/rows.py) train a GPT with tensor parallelism, a slow link and recomputation.
#
# ## What it costs
#
# ### Bytes sent
#
# The formulas give the bytes that a rank sends for one layer. The batch has $b$ sequences; there are $a$ query heads and $K$ key-value heads, each of size $D = h/a$, where $h$ is the model's width; a number has $e$ bytes.
#
# - The ring sends keys and values $N-1$ times in forward and again in backward. Their gradients, in float32 at least, are sent $N$ times, the last time to the rank that owns them. With $e = 4$ that is $2bKD\frac{s}{N}\,e\,(3N-2)$ in all, which grows a little with $N$.
# - The all-to-all sends $\frac{N-1}{N}$ of queries, keys, values and output, in forward and in backward: $4b(a+K)D\frac{s}{N}\,e\,\frac{N-1}{N}$, which falls with $N$.

# %%
def count_sent(heads, kv_heads, seq, size):
    """Return the bytes that a rank sends in forward and backward: ring, all-to-all."""
    found, N = [], dist.get_world_size()
    for attention in (cp.ring_attention, cp.all_to_all_attention):
        mine = draw_qkv("zigzag", seq, heads, kv_heads, size, torch.float32)
        with count.record_traffic() as sent:
            attention(*mine, dist.group.WORLD, layout="zigzag").sum().backward()
        # A rank does not send its own part of an all-to-all's input.
        handed = sent.payload["all_to_all"] + sent.payload["all_to_all_single"]
        found.append(sent.bytes + handed * (N - 1) // N)
    return found


SENT = {
    # CPU: counts the module's bytes
    (kv, N): ranks.run(count_sent, N, 16, kv, 1024, 16, device="cpu")[0]
    for kv in (16, 2)
    for N in (2, 4, 8)
}

# %% tags=["hide-input"]
# Table: bytes of one attention, predicted and counted
rows = []
for (kv, N), counted in SENT.items():
    swap_ = cp.predict_ulysses_bytes(1, 1024, 16, kv, 16, N)
    both = cp.predict_ring_bytes(1, 1024, kv, 16, N), swap_
    want = [each["forward"] + each["backward"] for each in both]
    assert counted == want
    cells = [
        f"{bytes_:,}" for pair in zip(want, counted, strict=True) for bytes_ in pair
    ]
    rows.append((kv, N, *cells))
head = ["key-value heads", "ranks", "ring: predicted (B)", "counted (B)"]
show.table(
    rows,
    [*head, "all-to-all: predicted (B)", "counted (B)"],
    caption="Sent by a rank: one attention, 1024 tokens, 16 heads of size 16, float32",
)

# %% [markdown]
# `````{admonition} Only if there are as many key-value heads as query heads: "the all-to-all always sends less than the ring"
# :class: checked
#
# With fewer key-value heads the ring sends fewer bytes: here, with 2 instead of 16, the ring sends less than the all-to-all on 2 and 4 ranks (rows 4 and 5 of the table).
# And the ring sends while attention computes; attention has to wait for the all-to-all.
# `````
#
# (context-seconds)=
# ### Seconds
#
# In a turn a rank does $4b\big(\frac{s}{N}\big)^2h$ floating-point operations (half of them under the mask), and sends $2b\frac{s}{N}KDe$ bytes meanwhile.
# So operations per byte grow with the tokens on a rank, $\frac{s}{N}$. With enough tokens, each message ends before the computation, and costs no time. So the ranks of a ring may be in different machines.
#
# The next cell connects two ranks by an emulated link of 100 Mbit/s.
# A turn's computation takes $c$ seconds and a message $w$ seconds, so a forward without a mask takes $c + \max(c, w)$. Without overlap, as in the plain version, it takes $c + w + c$.

# %% tags=["measured"]
BANDWIDTH = 12.5e6  # bytes per second


def run_in_turn(q, k, v, group):
    """Run the plain ring of two ranks, with the module's kernel but no overlap."""
    mine, peer = cp.block_attention(q, k, v), 1 - dist.get_rank()
    kv = torch.stack((k, v))
    coming = torch.empty_like(kv)
    ranks.exchange(kv, peer, coming, peer, group).wait()
    return cp.merge_attention(*mine, *cp.block_attention(q, *coming))


def time_forwards(times):
    """Return seconds by tokens per rank: no link, and over it plain, overlapped."""
    fast, slow = dist.group.WORLD, link.create_slow_group(0, BANDWIDTH)
    overlapped = partial(cp.ring_attention, causal=False, layout="contiguous")
    ways = (overlapped, fast), (run_in_turn, slow), (overlapped, slow)
    found = {}
    for local_seq, repeats in times.items():
        mine = [
            x.detach()
            for x in draw_qkv("contiguous", 2 * local_seq, dtype=torch.float32)
        ]
        took = [[], [], []]
        for _ in range(repeats):
            for seconds, (way, group) in zip(took, ways, strict=True):
                dist.barrier()
                begin = time.perf_counter()
                way(*mine, group=group)
                seconds.append(time.perf_counter() - begin)
        found[local_seq] = [min(seconds) for seconds in took]  # other load only adds
    return found


# CPU: times are gloo's
TIMES = ranks.run(time_forwards, 2, {128: 12, 3072: 3}, device="cpu")[0]

# %% tags=["hide-input", "measured"]
# Table: seconds of a forward over the slow link, predicted and measured
rows, ratios = [], []
for local_seq, (without, plain_, slow) in TIMES.items():
    c, w = without / 2, 2 * 2 * 32 * local_seq * 4 / BANDWIDTH  # keys, values
    for name, want, took in (
        ("one after the other", c + w + c, plain_),
        ("overlapped", max(c, w) + c, slow),
    ):
        cells = (f"{1e3 * seconds:.1f}" for seconds in (2 * c, w, want, took))
        off = f"{100 * (took / want - 1):+.0f}"
        rows.append((local_seq, name, *cells, off, f"{took / without:.2f}"))
    ratios.append(slow / without)
show.check_timing(
    ratios[0] > 1.2 * ratios[1], "with few tokens the link costs 1.2 times as much"
)
head = [
    "tokens on a rank",
    "ring",
    "without the link (ms)",
    "message (ms)",
    "predicted (ms)",
]
show.table(rows, [*head, "measured (ms)", "difference (%)", "measured / without link"])


# %% [markdown]
# With few tokens on a rank, the message takes nearly all of the time. With 24 times as many tokens there are 24 times the bytes and 576 times the operations, so the message ends before the computation.
#
# ### Memory
#
# With the ring a rank keeps the queries, keys, values, output and $\ell$ of its own tokens for backward. While it computes, it also holds the keys and values of two ranks, and in backward their gradients.
# With the all-to-all a rank keeps the output twice, by heads and by tokens, and during an exchange holds both the sent and the received tensors.

# %%
def measure_attention(attention, contexts):
    """Return, by context, this rank's bytes kept by forward and peak in backward."""
    found = {seq: [] for seq in contexts}
    for seq in [*contexts, *contexts]:
        mine = draw_qkv("zigzag", seq, 8, 8, 16, torch.float32)
        dy = torch.ones_like(mine[0])
        with count.track_memory() as held:
            y = attention(*(x * 1 for x in mine))  # computed, as a model's would be
            time.sleep(0.05)
            kept = held.current_bytes
        with count.track_memory(*mine) as held:
            y = attention(*mine)
            held.reset_peak()
            torch.autograd.grad(y, mine, dy)
        found[seq].append((kept, held.peak_bytes))
        del y
    return found


# %% tags=["hide-input", "measured"]
# Draws bytes over the context, predicted and measured, and compares them
def attend_alone(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def attend_by_ring(q, k, v):
    return cp.ring_attention(q, k, v, dist.group.WORLD)


def attend_by_swap(q, k, v):
    return cp.all_to_all_attention(q, k, v, dist.group.WORLD, layout="zigzag")


CONTEXTS = [512, 1024, 2048, 3072]
CORES = {
    "one process": ("one", attend_alone, 1),
    "all-to-all, 4 ranks": ("ulysses", attend_by_swap, 4),
    "ring, 4 ranks": ("ring", attend_by_ring, 4),
}
figure, panels = plt.subplots(1, 2, figsize=(7.4, 3))
for color, (name, (way, core, N)) in zip(show.RANK_COLORS, CORES.items(), strict=False):
    wants, measured = [], []
    # CPU: bytes held by CPU kernels
    every = ranks.run(measure_attention, N, core, CONTEXTS, device="cpu")
    for seq in CONTEXTS:
        want = cp.predict_attention_memory(way, 1, seq, 8, 8, 16, N)
        # A thread of gloo may hold a message for a moment longer: take the least.
        kept, peak = (
            min(run[i] for found in every for run in found[seq]) for i in (0, 1)
        )
        wants.append((want["kept"], want["backward"]))
        measured.append((kept, peak))
        assert kept == want["kept"], (name, kept, want)
        limit = 0.15 if way == "ulysses" else 0.02
        near = abs(peak / want["backward"] - 1) < limit
        show.check_timing(near, f"{name}: the peak in backward within {limit:.0%}")
    for axes, lines, dots in zip(
        panels, zip(*wants, strict=True), zip(*measured, strict=True), strict=True
    ):
        axes.plot(CONTEXTS, [bytes_ / 1e6 for bytes_ in lines], color=color)
        axes.plot(CONTEXTS, [bytes_ / 1e6 for bytes_ in dots], "o", color=color, ms=4)
        end = CONTEXTS[-1], dots[-1] / 1e6
        axes.annotate(
            name, end, (6, 0), textcoords="offset points", va="center", fontsize=8
        )
for axes, label in zip(
    panels, ("kept by forward (MB)", "peak in backward (MB)"), strict=True
):
    axes.set(xlabel="tokens of context", ylabel=label, xlim=(300, 4700), ylim=(0, None))
    axes.set_xticks(CONTEXTS)
figure.tight_layout()
show.figure(
    figure,
    "Bytes of one attention over the length of the context, predicted as lines, "
    "measured as dots on them or close by. Kept by forward: one process keeps about "
    "four times as much as each of four ranks. Peak in backward: one process 11 MB "
    "at 3072 tokens, ring 7, all-to-all 5.",
    "context_parallel_measured",
)

# %% [markdown]
# Lines are predicted ([predict.py](../code/shardlab/context_parallel/predict.py)), dots measured. The kept bytes agree exactly: a quarter of one process's, in every layer.
# The peak in backward is more than a quarter, because it includes one layer's message buffers. Kept bytes and peak grow in proportion to the context.
#
# `````{admonition} False: "with N times the ranks, N times the context for the same time"
# :class: checked
#
# For the same memory, yes. But attention's work grows with the square of the sequence: $N$ times the tokens on $N$ times the ranks is $N$ times the work for each rank.
# The cell below counts query-key pairs on a rank that always has 8192 tokens.
# `````

# %%
pairs = {N: cp.count_pairs("zigzag", 8192 * N, N, rank=0) for N in (1, 2, 4, 8)}
print({N: round(on_a_rank / pairs[1], 2) for N, on_a_rank in pairs.items()})

# %% [markdown]
# (context-fit)=
# ### The longest context that fits
#
# `memory` predicts a rank's bytes for a context length: states (weights, gradients, optimizer), activations, the ring's buffers, the loss. `cp.find_max_context` searches for the longest context that fits into 80 GB.
# The picture shows Llama 3 8B with 8 tensor-parallel ranks in each machine, and the context sharded over 1 to 64 machines. In a `Layout`, `tp` is the number of tensor-parallel and `cp` of context-parallel ranks.
#
# ![Tokens of context that fit into 80 GB on each rank, for Llama 3 8B with tensor degree 8, over 1 to 64 context ranks. All lines double with the ranks. With sequence parallelism about twice as many tokens fit, with full recomputation four times, with both thirteen times.](../figures/context_parallel_fit.svg)

# %%
fits = {
    N: cp.find_max_context(LLAMA, 80e9, Layout(tp=8, cp=N, sequence_parallel=True))
    for N in (1, 2, 16)
}
print(fits)

# %% tags=["hide-input"]
# Checks the numbers in the text below with the memory model
again = Layout(tp=8, sequence_parallel=True, recompute="full")
assert fits[1] < 131_072 < fits[2]
assert fits[1] > 2 * cp.find_max_context(LLAMA, 80e9, Layout(tp=8))
assert fits[16] > 15 * fits[1]
assert cp.find_max_context(LLAMA, 80e9, again) > 5 * fits[1]


# %% [markdown]
# Every doubling of ranks doubles the context: Llama's 131,072 tokens fit on two machines, but not on one.
# Sequence parallelism more than doubles the context, and sends hardly more bytes. Recomputation then multiplies the context by more than five, for a third more arithmetic ([Memory](memory.md)). The largest tensor is then the logits: a rank's tokens times its part of the vocabulary, in float32.
#
# ## PyTorch's own: context_parallel
#
# PyTorch has `context_parallel`, with a zig-zag (its *load balancing*). Inside its `with` block, torch's attention is replaced by attention over all ranks.
# By default (torch 2.13) this is not a ring: while a rank computes its own block, an all-gather collects the keys and values of all ranks, once in forward and once in backward. Only the gradients go from rank to rank.
# After `set_rotate_method("alltoall")` keys and values go from rank to rank as well, one rank's at a time.
# `context_parallel` needs the fused kernels of a GPU; on a CPU it raises an error (torch 2.13). With two GPUs the next cell compares it with our ring.

# %%
def compare_with_torch():
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    N, group = dist.get_world_size(), dist.group.WORLD
    mine = [
        x.to(torch.bfloat16) for x in draw_qkv("zigzag", 1024, 8, 8, 64, torch.float32)
    ]
    ours = cp.gather_seq(cp.ring_attention(*mine, group), group, dim=2)
    buffers = [cp.gather_seq(x, group, dim=2) for x in mine]
    mesh = init_device_mesh("cuda", (N,))
    sharded = context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2])
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), sharded:
        theirs = F.scaled_dot_product_attention(*buffers, is_causal=True)
    right = F.scaled_dot_product_attention(
        *(cp.gather_seq(x, group, dim=2) for x in mine), is_causal=True
    )
    shard = cp.split_seq(right, N, dist.get_rank(), "zigzag", dim=2)
    return max_difference(ours, right), max_difference(theirs, shard)


# %% tags=["hide-input"]
# Runs torch's context_parallel beside ours, where there are two GPUs
if ranks.choose_backend(2)[1] == "cuda" and torch.cuda.device_count() >= 2:
    gaps = max(ranks.run(compare_with_torch, 2))
    print(f"from one process: ours {gaps[0]:.0e}, torch's {gaps[1]:.0e}")
    assert max(gaps) < 0.05  # bfloat16 has three digits
else:
    print("no two GPUs here: torch's context_parallel is left out")


# %% [markdown]
# ## What goes wrong
#
# (all-send-first)=
# ### A ring in which all send first
#
# Here two ranks both send first, and then receive. The run ends at its time limit, with both ranks in `send`.

# %%
def all_send_first():
    kv, peer = torch.ones(4), 1 - dist.get_rank()
    dist.send(kv, peer)
    dist.recv(kv, peer)


try:
    # CPU: gloo, whose ranks can be asked
    options = {"device": "cpu", "show": False, "own_processes": True}
    ranks.run(all_send_first, 2, timeout=2, **options)
except ranks.RankError as error:
    print(error)


# %% [markdown]
# In a real job, the first step hangs with all ranks at the same line; if a rank had died or taken another branch, the lines would differ.
# With `isend` this hangs only with NCCL, so a test on CPU ranks does not find it. Always order messages by even and odd ranks, or send both in one batch.
#
# ### Wrong position ids on a shard
#
# Suppose you shard the batch along the sequence, leave the model unchanged, and average the gradients. This runs, but each rank trains on its own short piece, whose tokens do not attend to earlier pieces.
# A second mistake is harder to find: the ring is right, but every rank counts positions from 0.

# %%
def run_mistake(way, dtype, steps=10):
    """Train a model set up this way; return first loss, gradients, last loss."""
    model, group = build_model(dtype), dist.group.WORLD
    if way == "positions from 0":
        cp.core.token_positions = lambda layout, seq, N, *_: torch.arange(
            seq // N, device=ranks.device()
        )
    if way != "own tokens alone":
        cp.distribute_model(model, group, "ring", "contiguous")
    optimizer = make_adamw(model, lr=3e-3)
    losses = [train_step(model, optimizer, *make_batch(0), "contiguous")]
    first = {name: p.grad.double() for name, p in model.named_parameters()}
    for step in range(1, steps):
        losses.append(train_step(model, optimizer, *make_batch(step), "contiguous"))
    return losses[0], first, losses[-1]


WRONG = {
    # CPU: float32 beside bfloat16
    (way, dtype): ranks.run(run_mistake, 4, way, dtype, device="cpu")[0]
    for way in ("right", "own tokens alone", "positions from 0")
    for dtype in (torch.float32, torch.bfloat16)
}


# %% tags=["hide-input"]
# Table: what each mistake does to the first loss and to gradients
def run_one_process():
    """Return the first loss and its gradients in one process, in float64."""
    alone = build_model(torch.float64)
    value = loss(alone(make_batch()[0]), make_batch()[1])
    value.backward()
    return value.item(), {name: p.grad for name, p in alone.named_parameters()}


def compare_cut_text(mine, right, part):
    """Return the relative error (%) of all gradients whose names contain `part`."""
    pairs = [(mine[n], right[n]) for n in right if part in n]
    a, b = (torch.cat([x.flatten() for x in each]) for each in zip(*pairs, strict=True))
    return 100 * ((a - b).norm() / b.norm()).item()


# CPU: its attention takes float64
value, right = ranks.run(run_one_process, 1, device="cpu", show=False)[0]
rows, off = [], {}
for (way, dtype), (first, gradients, last) in WRONG.items():
    queries = compare_cut_text(gradients, right, "query.weight")
    off[way, dtype] = abs(first - value), queries
    cells = (
        f"{first - value:+.1e}",
        f"{compare_cut_text(gradients, right, ''):.2f}",
        f"{queries:.2f}",
    )
    rows.append((way, str(dtype)[6:], *cells, f"{last:.3f}"))
wide, narrow = torch.float32, torch.bfloat16
# 2 sqrt(128 tokens) roundings of 2^-24 of 5.5
assert off["right", wide][0] < 7.5e-6 < off["positions from 0", wide][0]
# In bfloat16 the right loss is also off, by rounding, so the loss decides nothing.
assert off["right", narrow][0] > 0.1 * off["positions from 0", narrow][0]
assert all(off["right", dtype][1] < 3 for dtype in (wide, narrow))
assert all(off["positions from 0", dtype][1] > 20 for dtype in (wide, narrow))
head = ["way", "type", "error of the first loss", "error of all gradients (%)"]
show.table(
    rows, [*head, "error of query weights' gradients (%)", "loss after 10 steps"]
)


# %% [markdown]
# After ten steps the losses are nearly equal. With wrong positions the error of the first loss is $3.4 \cdot 10^{-5}$. In float32 this is visible, since the right program's error is $10^{-7}$; in bfloat16 it is not, since rounding alone causes nearly as large an error.
# The error of all gradients together shows little more, because the embedding's gradients are by far the largest: wrong positions cause an error of 0.4 %, rounding in bfloat16 alone 0.5 %.
# The gradients of the *query weights* show the mistake: wrong positions cause an error of 56 % in either type, rounding alone at most 1 %.
# So before a long run, compare these gradients with those of one process, on one short sequence.
#
# ### Sequences and heads that ranks cannot share
#
# The package refuses these before it sends anything:

# %%
def find_refusal():
    group, q = dist.group.WORLD, torch.zeros(1, 6, 5, 8)
    for attempt in (
        lambda: cp.shard_tokens(torch.zeros(1, 250), group, "zigzag"),
        lambda: cp.all_to_all_attention(q, q, q, group),
    ):
        try:
            attempt()
        except ValueError as error:
            print(error)


# CPU: refused before anything is sent
_ = ranks.run(lambda: find_refusal() if dist.get_rank() == 0 else None, 4, device="cpu")


# %% [markdown]
# In practice sequences are padded to a multiple of $2N$, and the targets of the padding are left out of the loss. Then ranks have unequal numbers of targets, and the mean of their means is wrong: sum the losses of all ranks, and divide by the number of targets on *all* ranks ([Data parallelism](data_parallel.md) has the same pitfall).
#
# ## When to use it
#
# | technique | for | against |
# |---|---|---|
# | ring | any number of ranks, any heads; sends while it computes, which costs no time when $s/N$ is large; with 2 key-value and 16 query heads, each of 4 ranks sends 0.66 MB (all-to-all: 0.98) | with 16 key-value heads, each sends 5.2 MB (all-to-all: 1.6); without a zig-zag one rank of four has 44 % of the work; needs an attention function of its own |
# | all-to-all | few bytes with many ranks; any attention kernel, any mask; equal work for all ranks | at most as many ranks as heads; attention waits for its messages |
# | both of them | activations per rank fall with $1/N$, so twice the ranks fit twice the context | weights are not sharded: states are as large as before, unless [ZeRO](zero.md) shards them; work grows with the square of the context |
#
# Both can be combined: an all-to-all between the ranks of a machine, and a ring between machines.
# Llama 3 405B was trained at 131,072 tokens on 8 tensor-parallel times 16 context-parallel ranks {cite}`dubey2024llama3` (section 3.3.2, Table 4): in a zig-zag, but with an all-gather of all keys and values in place of the ring. Few key-value heads keep this all-gather small, and it allows any mask.
#
# In a real job, three signs show a correct setup: the gradients of the query weights equal those of one process on one short sequence; activations fall with $1/N$; all ranks take equally long in attention.
#
# ```{admonition} On more GPUs
# :class: note
#
# Without GPUs this page compares both attentions with one process and counts their bytes; seconds are those of an emulated link.
# With two GPUs it also runs PyTorch's context parallelism, which needs GPU kernels, beside ours.
# On GPUs you can also see whether NVLink is fast enough for a rank's number of tokens, and train on contexts as long as predicted.
# ```
#
# ## Exercises
#
# Each exercise has a check, which runs your answer on real ranks where it needs them.
#
# ```{exercise-start} Token positions in the zig-zag (easy)
# :label: ex-context-zigzag
# ```
#
# Return the positions of the tokens that `rank` of `size` has in the zig-zag, in that rank's order. `seq` is a multiple of `2 * size`.

# %%
def my_zigzag(seq, rank, size):
    pass  # your code


check(my_zigzag)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-context-zigzag
# :label: sol-context-zigzag
# :class: dropdown
# ```
#
# The rank has two pieces, one counted from the front and one from the back.

# %%
def my_zigzag(seq, rank, size):
    piece = seq // (2 * size)
    return [
        position
        for i in (rank, 2 * size - 1 - rank)
        for position in range(i * piece, (i + 1) * piece)
    ]


check(my_zigzag)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Pass a tensor around a ring without deadlock (easy)
# :label: ex-context-pass
# ```
#
# Send `tensor` to the next rank, and return the tensor from the previous rank, on two or more ranks.
# Use point-to-point messages, no collective. The check replays them by NCCL's rules: a rank that begins a message waits until the other rank begins it, too.

# %%
def my_pass(tensor, group):
    pass  # your code


check(my_pass)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-context-pass
# :label: sol-context-pass
# :class: dropdown
# ```
#
# Use one batch. (Even ranks first, as in `send_to_next` above, is right as well.)

# %%
def my_pass(tensor, group):
    N, rank = dist.get_world_size(group), dist.get_rank(group)
    coming = torch.empty_like(tensor)
    both = [
        dist.P2POp(dist.isend, tensor, (rank + 1) % N, group),
        dist.P2POp(dist.irecv, coming, (rank - 1) % N, group),
    ]
    for message in dist.batch_isend_irecv(both):
        message.wait()
    return coming


check(my_pass)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Decoding: one query, keys on many ranks (medium)
# :label: ex-context-decode
# ```
#
# When a model generates text, it has one query at a time, but the keys of a long context, which are on many ranks.
# `q_BA1D` is the same on all ranks, `k_BAsD` and `v_BAsD` are this rank's: $B$ sequences, $A$ heads, $s$ tokens, $D$ numbers in a head. Return [B, A, 1, D], attention over the keys of all ranks, on every rank.
# Do not send keys or values; you may send results computed from them. Scores may be as large as 1000.

# %%
def my_decode(q_BA1D, k_BAsD, v_BAsD, group):
    pass  # your code


check(my_decode)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-context-decode
# :label: sol-context-decode
# :class: dropdown
# ```
#
# All blocks are merged at once: one all-reduce finds the largest $\ell$; a second sums the outputs times $e^{\ell - \max}$, together with these factors.

# %%
def my_decode(q_BA1D, k_BAsD, v_BAsD, group):
    scores = q_BA1D @ k_BAsD.mT / q_BA1D.shape[-1] ** 0.5
    log_sum = scores.logsumexp(-1, keepdim=True)
    largest = log_sum.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    weight = (log_sum - largest).exp()
    both = torch.cat((weight * (scores.softmax(-1) @ v_BAsD), weight), dim=-1)
    dist.all_reduce(both, group=group)
    return both[..., :-1] / both[..., -1:]


check(my_decode)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} A causal ring (hard)
# :label: ex-context-ring
# ```
#
# Write the forward of a *causal* ring. Pieces are contiguous: rank 0 has the first tokens. A token attends to itself and to all tokens before it. Return this rank's output [B, A, s, D]; no rank may hold all keys at once.
# No collectives: `ranks.exchange(outgoing, to, incoming, source, group)` begins to send and to receive in one batch, and returns at once; `.wait()` waits. With `send` and `recv`, order messages by even and odd ranks.

# %%
def my_ring(q_BAsD, k_BAsD, v_BAsD, group):
    pass  # your code


check(my_ring)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-context-ring
# :label: sol-context-ring
# :class: dropdown
# ```
#
# In each turn, start the transfer, compute, merge, then wait for the next keys. Keys of a later rank are sent on, but not used; the last turn sends nothing.

# %%
def my_ring(q_BAsD, k_BAsD, v_BAsD, group):
    N, rank, s = dist.get_world_size(group), dist.get_rank(group), q_BAsD.shape[2]
    hidden = torch.ones(s, s, device=q_BAsD.device).triu(1).bool()
    kv, out, log_sum = torch.stack((k_BAsD, v_BAsD)), 0.0, torch.tensor(-torch.inf)
    for turn in range(N):
        coming, source = torch.empty_like(kv), (rank - turn) % N
        if turn < N - 1:
            passing = ranks.exchange(kv, (rank + 1) % N, coming, (rank - 1) % N, group)
        if source <= rank:
            scores = q_BAsD @ kv[0].mT / q_BAsD.shape[-1] ** 0.5
            if source == rank:
                scores = scores.masked_fill(hidden, -torch.inf)
            block_sum = scores.logsumexp(-1, keepdim=True)
            weight = torch.sigmoid(block_sum - log_sum)  # 1 in turn 0
            out = (1 - weight) * out + weight * (scores.softmax(-1) @ kv[1])
            log_sum = torch.logaddexp(block_sum, log_sum)
        if turn < N - 1:
            passing.wait()
        kv = coming
    return out


check(my_ring)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Ring or all-to-all, on how many ranks? (design)
# :label: ex-context-way
# ```
#
# A model keeps `kept` bytes of activations for each token and has `states` bytes of states on every rank; a rank has `memory_` bytes. There are `heads` query heads and `kv_heads` key-value heads.
# Return `(ranks, way)` with the fewest of 1, 2, 4, …, 64 ranks on which one sequence of `seq` tokens fits when only the sequence is cut, or `None` if it never fits.
# On one rank, `way` is `"none"`. On more ranks it is `"all-to-all"` if their number divides both numbers of heads and the all-to-all sends fewer bytes in *forward* than the ring; else `"ring"`.

# %%
def my_context(seq, kept, states, memory_, heads, kv_heads):
    pass  # your code


check(my_context)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-context-way
# :label: sol-context-way
# :class: dropdown
# ```
#
# In forward, for each of its tokens, a rank sends $2K(N-1)$ heads in the ring, and $(2a + 2K)\frac{N-1}{N}$ in the all-to-all.

# %%
def my_context(seq, kept, states, memory_, heads, kv_heads):
    for N in (1, 2, 4, 8, 16, 32, 64):
        if states + kept * seq / N > memory_:
            continue
        if N == 1:
            return 1, "none"
        divides = heads % N == 0 and kv_heads % N == 0
        fewer = (heads + kv_heads) / N < kv_heads
        return N, "all-to-all" if divides and fewer else "ring"
    return None


check(my_context)

# %% [markdown]
# ```{solution-end}
# ```
#
# ## Summary
#
# - For contexts that no rank holds, cut the sequence from the embedding to the loss; only attention needs other tokens.
# - The ring sends keys and values from rank to rank, and merges blocks by the logarithms of their sums; its backward is a second ring.
# - Even ranks send first and odd ranks receive first, or both messages go in one batch: where all send first, the ring hangs.
# - Under a causal mask the zig-zag gives every rank equal work in every turn of the ring.
# - The all-to-all turns sharding by tokens into sharding by heads. It sends less than the ring on many ranks; the ring sends less on few ranks with few key-value heads.
# - Memory per rank falls with $1/N$; attention's work still grows with the square of the sequence.
# - Wrong positions hardly change the loss, and in bfloat16 not visibly: compare the gradients of the query weights.
#
# ## Further reading
#
# - {cite:t}`liu2023ring`: ring attention; section 3 says when computation hides the messages.
# - {cite:t}`brandon2023striped`: the unequal work of a causal ring, and another layout that balances it.
# - {cite:t}`jacobs2023ulysses`: the exchange of tokens for heads, which sends less on more ranks.
# - {cite:t}`milakov2018softmax`: softmax in one pass, the basis of the merge.
# - {cite:t}`dao2022flashattention`: the same merge inside one GPU, block by block from its memory.
