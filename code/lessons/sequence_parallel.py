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
# # Sequence parallelism: tokens divided, and contexts too long for one GPU
#
# After this lesson you can
#
# - say what tensor parallelism leaves whole on every rank, and divide that as well, for the same bytes on the wire;
# - compute attention over a sequence that no rank holds, with a ring or with an all-to-all, and prove that it is one process's attention, gradients included;
# - predict bytes kept, bytes sent and work for each way, and see why a causal mask needs a zig-zag;
# - say how many tokens fit, and which of these techniques to add next when they do not.
#
# It takes about an hour to read and an hour for the exercises. Running it takes half a minute.
# It needs [Tensor parallelism](tensor_parallel.md), and what [Memory](memory.md) says about activations.

# %% tags=["hide-input"]
import time
from collections import Counter
from dataclasses import replace

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as torchs
from torch.utils._python_dispatch import TorchDispatchMode

from shardlab import count, link, memory, ranks, show, text
from shardlab import sequence_parallel as sp
from shardlab import tensor_parallel as tp
from shardlab.check import check
from shardlab.model import GPT, PRESETS, Config, loss

show.style()

SHAPE = Config(seq=256, layers=4, heads=8, hidden=128)
SMALL = Config(seq=64, layers=2, heads=4, hidden=64)


def plain(shape=SMALL, dtype=None):
    """The same GPT at every call."""
    torch.manual_seed(0)
    return GPT(shape).to(ranks.device(), dtype)


def batch(step=0, size=2, seq=SMALL.seq):
    """The same windows of text on every rank: tokens, targets: [size, seq]."""
    tokens, targets = text.batch(seq, size, start=step * size)
    return tokens.to(ranks.device()), targets.to(ranks.device())


def largest(a, b):
    """The largest difference between two state dicts."""
    return max((a[name] - b[name]).abs().max().item() for name in a)


# %% [markdown]
# One number to begin with, from the memory model of this course. A step of Llama 3 8B on one sequence has to keep, between forward and backward:

# %%
llama = PRESETS["llama-3-8b"]
rows = []
for name, t, along in (
    ("1", 1, False),
    ("8, tensor parallel", 8, False),
    ("8, and the sequence cut as well", 8, True),
):
    kept = [
        memory.activations(llama, seq=seq, tp=t, sequence_parallel=along, device="gpu").saved
        for seq in (8192, 131_072)
    ]
    rows.append((name, *(f"{bytes_ / 1e9:.1f}" for bytes_ in kept)))
head = ["ranks", "activations of 8192 tokens (GB)", "of 131,072 tokens (GB)"]
show.table(rows, head, caption="Llama 3 8B, bfloat16, on each rank")


# %% [markdown]
# Eight ranks should leave an eighth, 6.1 GB. Tensor parallelism leaves more than twice that.
# And at 131,072 tokens, the context that Llama 3.1 was trained for, no row fits into 80 GB.
# The first half of this lesson is about the second row, the second half about the last column.
#
# ## What tensor parallelism leaves whole
#
# Four ranks train a small GPT with tensor parallelism. The cell counts what forward leaves in memory for backward, on each rank.

# %%
def kept(edges, layers=SHAPE.layers):
    """Bytes that forward leaves for backward on this rank, in bfloat16."""
    shape = replace(SHAPE, layers=layers)
    model = tp.parallelize(plain(shape, torch.bfloat16), dist.group.WORLD, edges=edges)
    tokens, targets = batch(seq=shape.seq)
    with count.held(model, tokens, targets) as held:
        before = held.now
        value = tp.loss(model(tokens), targets, dist.group.WORLD)
        time.sleep(0.05)  # gloo's threads let go of a message a moment after it is over
        return held.now - before if value.isfinite() else None  # `value` holds the graph


TENSOR = {t: ranks.run(kept, t, tp.REPLICATED, device="cpu")[0] for t in (1, 2, 4)}
rows = [
    (t, f"{TENSOR[t]:,}", f"{100 * TENSOR[t] / TENSOR[1]:.0f}", f"{100 / t:.0f}")
    for t in TENSOR
]
assert TENSOR[4] > 0.4 * TENSOR[1]
show.table(rows, ["ranks", "kept on each (B)", "of one rank's (%)", "divided evenly (%)"])

# %% [markdown]
# `````{admonition} Checked: "tensor parallelism over t ranks divides activations by t"
# :class: checked
#
# On four ranks each keeps 44 %, not 25 % (last row above).
# Tensor parallelism divides what lies *between* a column-cut and a row-cut matrix: heads, and the wide part of the feed-forward network.
# Norms, dropout and the inputs of the cut matrices see the whole stream, on every rank the same.
# `````
#
# With $s$ tokens, micro-batch $b$, hidden size $h$, $a$ heads and $t$ ranks, a layer of GPT-3's kind in 16 bits keeps {cite}`korthikanti2022recomputation`
#
# $$
# \begin{aligned}
# sbh\Big(10 + \frac{24}{t} + \frac{5as}{ht}\Big) \quad & \text{bytes with tensor parallelism,} \\
# \frac{sbh}{t}\Big(34 + \frac{5as}{h}\Big) \quad & \text{with the sequence cut as well.}
# \end{aligned}
# $$
#
# The 10 are the inputs of two norms (4), of the cut matrices (4), and two dropout masks of one byte (2). The term $5as/h$ is attention's scores, of $a/t$ heads on each rank either way; fused kernels never keep them.
# However many ranks you add, the 10 stays.
#
# ## The picture
#
# A norm looks at one token at a time. So do dropout, the addition of the shortcut and the bias. None of them needs the other tokens.
# So outside the cut matrices, cut the *sequence*: a rank keeps its share of the tokens, at full width. Inside, as before, all tokens, with its share of the width.
#
# ![A block on four ranks, twice. Above, tensor parallelism: norms, dropouts and the stream are whole on every rank, attention and the feed-forward network are cut by heads and columns, and an all-reduce stands where a cut part ends, in backward where it begins. Below, with sequence parallelism: outside the cut parts each rank has a quarter of the tokens; an all-gather stands where a cut part begins, a reduce-scatter where it ends, and backward the other way round.](../figures/sequence_parallel_block.svg)
#
# Where a cut part begins, all tokens are needed: an **all-gather**. Where it ends, each rank has a summand for every token, and wants the sum of its own: a **reduce-scatter**.
# Backward, each is the other.
#
# An all-reduce *is* a reduce-scatter and an all-gather ([Collectives](collectives.md)). Sequence parallelism takes it apart, and lets norm and dropout happen between the halves, where a rank has $s/t$ tokens.
#
# ## The mechanism: two other edges
#
# `tensor_parallel.parallelize` takes the pair of operators that stand at the edges of each cut part as an argument.
# In the last lesson it was "identity, all-reduce". This is the other pair. Look at how each backward is the other's forward.

# %%
show.source(sp.edges._Enter, sp.edges._Leave)

# %% [markdown]
# `_gather` is an all-gather. `_scatter` is a reduce-scatter: part $j$ goes straight to rank $j$, which adds up what comes in, in the order of the ranks.

# %%
show.source(sp.edges._scatter)

# %% [markdown]
# The whole is `AlongSequence` in [edges.py](../code/shardlab/sequence_parallel/edges.py).
# Its `begin` and `back` are the same two collectives, started and not waited for: with them `tensor_parallel` sends in backward while it multiplies.
# Its `keep` decides what is kept, which we come to [below](#sequence-bytes).
#
# Nothing else changes in the model. One thing changes around it.
# A norm's weight has seen only this rank's tokens, and so its gradient is this rank's summand. The same goes for the biases that are added behind the reduce-scatter.
# After backward these gradients are summed, in one small message:

# %%
show.source(sp.seen_partly, sp.sum_gradients)


# %% [markdown]
# ## Equal
#
# One process, and the cut model on 1, 2 and 4 ranks: logits, loss, all gradients, and all weights after five steps of AdamW. Float64, so that rounding cannot hide anything.

# %%
def against_one_process():
    group, dtype = dist.group.WORLD, torch.float64
    alone = plain(dtype=dtype)
    model = tp.parallelize(plain(dtype=dtype), group, edges=sp.ALONG_SEQUENCE)
    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=1e-3, foreach=False) for m in (alone, model)
    ]
    found = {}
    for step in range(5):
        tokens, targets = batch(step)
        logits, mine = alone(tokens), model(tokens)
        values = loss(logits, targets), tp.loss(mine, targets, group)
        for optimizer, value in zip(optimizers, values, strict=True):
            optimizer.zero_grad()
            value.backward()
        sp.sum_gradients(model, group)
        if step == 0:
            t, r = dist.get_world_size(), dist.get_rank()
            found["logits"] = (logits.chunk(t, -1)[r] - mine).abs().max().item()
            found["loss"] = abs(values[0] - values[1]).item()
            found["gradients"] = largest_gradient(alone, model)
        for optimizer in optimizers:
            optimizer.step()
    found["weights"] = largest(alone.state_dict(), tp.full_state_dict(model))
    return found


def largest_gradient(alone, model):
    """The largest difference of a gradient from the same slice of one process's."""
    size, rank, gaps = dist.get_world_size(), dist.get_rank(), []
    cuts, whole = tp.cuts(model), dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        right = whole[name].grad
        if cuts[name] is not None:
            right = right.chunk(size, cuts[name])[rank]
        gaps.append((right - parameter.grad).abs().max().item())
    return max(gaps)


# %% [markdown]
# The asserts are the claim.

# %%
rows = []
for t in (1, 2, 4):
    results = ranks.run(against_one_process, t)
    found = {what: max(result[what] for result in results) for what in results[0]}
    # Float64 has 16 digits; sums are made in another order, and AdamW divides by small gradients.
    assert max(found["logits"], found["loss"], found["gradients"]) < 1e-11, found
    assert found["weights"] < 1e-8, found
    rows.append((t, *(f"{gap:.0e}" if gap else "0" for gap in found.values())))
head = ["ranks", "logits", "loss", "gradients", "weights after 5 steps"]
show.table(rows, head, caption="Largest differences from one process, float64")


# %% [markdown]
# The differences are rounding: sums over ranks are made in another order than one process makes them.
# [The tests](../tests/test_sequence_parallel_edges.py) do the same with SwiGLU, grouped keys and values, untied heads, and dropout, for which each rank draws the whole mask and keeps its own tokens'.
#
# ## What it costs
#
# ### Memory, predicted and measured
#
# What does *one layer* keep? The cell measures a model of four layers and one of two, and takes half of the difference.
# In bfloat16 the unit $sbh$ is one byte for each number of the stream, as in the formulas above. Our layer has no dropout (2 less), and a CPU's attention keeps its output in two orders (2 more, inside): 34 as well, $8 + 26/t$ with tensor parallelism alone.
# *Predicted* is `memory.activations`, which also knows the means and deviations of norms and the like.

# %%
def of_a_layer(edges):
    """Bytes that one layer keeps on this rank."""
    return (kept(edges, 4) - kept(edges, 2)) // 2


sbh = 2 * SHAPE.seq * SHAPE.hidden
CUTS = {
    "tensor alone": (tp.REPLICATED, False, lambda t: 8 + 26 / t),
    "+ sequence": (sp.ALONG_SEQUENCE, True, lambda t: 34 / t),
    "+ sequence, kept whole": (sp.AlongSequence(keep=True), True, lambda t: 30 / t + 4),
}
rows = []
for t in (1, 2, 4):
    for name, (edges, along, formula) in CUTS.items():
        if t == 1 and along:
            continue
        measured = ranks.run(of_a_layer, t, edges, device="cpu")[0]
        want = memory.activations(
            SHAPE, batch=2, precision="bf16", tp=t, sequence_parallel=along
        ).layer
        if "whole" in name:  # two gathered inputs of cut matrices, in place of their shares
            want += 4 * sbh - 4 * sbh // t
        assert abs(measured / want - 1) < 0.02, (t, name, measured, want)
        cells = f"{formula(t):.1f}", f"{want / sbh:.2f}", f"{measured / sbh:.2f}"
        rows.append((t, name, *cells, f"{100 * (measured / want - 1):+.1f}"))
head = ["ranks", "cut", "by formula (sbh)", "predicted (sbh)", "measured (sbh)"]
show.table(rows, [*head, "difference (%)"], caption="Bytes that a layer keeps on each rank")


# %% [markdown]
# With the sequence cut, two ranks keep half and four a quarter. (The third way is explained below.)
# For the paper's layer, with its dropout, and on more ranks:
#
# ![Bytes of activations that one layer keeps, without scores, in units of sbh, for tensor degrees 1, 2, 4 and 8. Tensor parallelism alone: 34, 22, 16 and 13; of these 10 lie outside the cut matrices and stay. With sequence parallelism, which divides them as well: 34, 17, 8.5 and 4.25.](../figures/sequence_parallel_memory.svg)
#
# (sequence-bytes)=
# ### Bytes on the wire, the same
#
# `````{admonition} Checked: "sequence parallelism buys memory with communication"
# :class: checked
#
# An all-reduce of $S$ bytes sends $2\frac{t-1}{t}S$ from each rank, an all-gather and a reduce-scatter $\frac{t-1}{t}S$ each.
# Four all-reduces per block become four all-gathers and four reduce-scatters: the same bytes.
# What does cost is a choice. The gathered tokens, which backward needs again, are either kept, $2bsh$ numbers a layer that are not divided, or gathered once more in backward: two all-gathers beside eight operations, a quarter more.
# The cell counts both.
# `````

# %%
def sent(edges):
    """Of a step without the loss's own messages: collectives by name, bytes on the wire."""
    group, others = dist.group.WORLD, dist.get_world_size() - 1
    model = tp.parallelize(plain(SHAPE), group, edges=edges)
    tokens, _ = batch(seq=SHAPE.seq)
    with count.sent() as sent:
        model(tokens).square().mean().backward()
    times, handed = Counter(), Counter()
    for name, (calls, bytes_) in sent.collectives.items():
        kind = next(k for k in ("all_reduce", "all_gather", "all_to_all") if k in name)
        times[kind] += calls
        handed[kind] += bytes_
    # An all-gather is handed this rank's share; the others are handed everything.
    wire = handed["all_gather"] * others + handed["all_to_all"] * others // (others + 1)
    return times, wire + 2 * handed["all_reduce"] * others // (others + 1)


t, rows = 4, []
for name, (edges, along, _) in CUTS.items():
    times, wire = ranks.run(sent, t, edges, device="cpu")[0]
    want = sp.edges_sent(SHAPE, 2, SHAPE.seq, t, along_sequence=along, keep="whole" in name)
    assert wire == want["forward"] + want["backward"], (name, wire, want)
    calls = (times[kind] for kind in ("all_reduce", "all_gather", "all_to_all"))
    rows.append((name, *calls, f"{want['forward'] + want['backward']:,}", f"{wire:,}"))
head = ["edges", "all-reduces", "all-gathers", "reduce-scatters", "sent: predicted (B)"]
show.table(rows, [*head, "counted (B)"], caption="A rank of four, one step")

# %% [markdown]
# The first and the third row send the same, to the byte. Gathering again, second row, costs a quarter more, and is what Megatron does. Those bytes need not cost time: the gather is under way while the gradient of the input is computed.
# The sum of the norms' gradients comes on top: a few vectors of $h$ numbers per layer, whatever the number of tokens.
# (gloo has no reduce-scatter of its own: its `reduce_scatter` is an all-reduce inside, and would send twice as much. Ours is an all-to-all and a sum.)
#
# ## A sequence that no rank holds
#
# So much for the first half: $s/t$ tokens outside, all $s$ tokens of $a/t$ heads inside. It needs ranks with a wire as fast as that inside a machine, and no more of them than heads.
# On 8 GPUs of 80 GB, Llama 3 8B gets to some 80,000 tokens that way ([below](#sequence-fit)). For more, cut the sequence *from the embedding to the loss*: each of $N$ ranks keeps $s/N$ tokens all the way through the model, and all of the weights.
# This is called *context parallelism*.
#
# Embedding, norms, matrices and the loss take one token at a time, and need nobody. One operation does: attention, where a token looks at keys and values of others.
# There are two ways. Bring the keys to the queries, a piece at a time; or change, for the moment, what is cut.
#
# ### A ring of keys and values
#
# Queries stay where they are. Keys and values travel: in each turn a rank computes attention to the piece that it has, while that piece is on its way to the next rank {cite}`liu2023ring`.
#
# ![Ring attention on four ranks, in four turns. Each rank keeps its queries. Keys and values start at their owners; after each turn every rank hands those that it has to the next one, the last rank to the first, so that after four turns each rank has met all four pieces.](../figures/sequence_parallel_ring.svg)
#
# But softmax divides by a sum over *all* keys, and in turn 0 most of them are elsewhere.
# So each block of keys gives two things: its own output $o_i$, and the logarithm $\ell_i$ of its own sum of exponentials. From those of two blocks follow those of both together {cite}`milakov2018softmax,dao2022flashattention`:
#
# $$
# \ell = \log\big(e^{\ell_1} + e^{\ell_2}\big), \qquad o = e^{\ell_1 - \ell}\, o_1 + e^{\ell_2 - \ell}\, o_2 .
# $$
#
# ![Four scores of one query, in two blocks. Block 0 has exponentials 2 and 1, sum 3, output 7; block 1 has 0.5 and 0.5, sum 1, output 6. Merged, the outputs weigh as much as the sums, 3/4 and 1/4, which gives 6.75, as all four scores do at once.](../figures/sequence_parallel_merge.svg)
#
# Only differences are ever exponentiated, so nothing overflows, however large the scores are. The second weight is a sigmoid of $\ell_2 - \ell_1$:

# %%
show.source(sp.merge)

# %% [markdown]
# And this is forward. Look at where the piece is passed on, and where the next one is waited for: both messages are under way during the computation.

# %%
show.source(sp.ring._Ring.forward, sp.ring._attend)

# %% [markdown]
# Backward goes round again, and recomputes each block's probabilities from $\ell$, as fused kernels do.
# With each piece of keys now travels the gradient that the ranks it has met have found for it. The last hop brings it home ([the whole file](../code/shardlab/sequence_parallel/ring.py)).
#
# ### Who works, under a causal mask
#
# A language model's token looks back, never forward: half of the scores are not needed. Which half depends on the rank.
#
# ![The causal mask over eight pieces of a sequence, whose queries belong to four ranks, in two layouts. Contiguous, rank 0 has pieces 0 and 1 and rank 3 pieces 6 and 7: of the work they do 1, 3, 5 and 7 sixteenths. Zig-zag, rank r has pieces r and 7 - r: each does 4.](../figures/sequence_parallel_zigzag.svg)
#
# Cut into contiguous shares, rank 0 is done after turn 0, and the last rank has work in every turn.
# So cut into $2N$ pieces, and give rank $r$ an early one and a late one, $r$ and $2N-1-r$: the *zig-zag*. (Striped attention deals out single tokens, to the same end {cite}`brandon2023striped`.)
#
# :::{step-through} A causal ring in a zig-zag, on four ranks
# 1. ![Before the first turn. A square of eight rows, the pieces' queries, and eight columns, their keys; only what is on and below its diagonal is needed. Of the pieces rank 0 has 0 and 7; rank 1 has 1 and 6; rank 2 has 2 and 5; rank 3 has 3 and 4.](../figures/steps/sequence_parallel_1.svg)
#
#    Eight pieces: rank 0 has queries and keys of pieces 0 and 7, rank 1 of 1 and 6, and so on.
#    What has to be computed lies on the diagonal and below it.
#
# 2. ![Turn 0. Queries to keys: rank 0 has keys 0 and 7: 0 to 0 (half), 7 to 0, 7 to 7 (half); rank 1 has keys 1 and 6: 1 to 1 (half), 6 to 1, 6 to 6 (half); rank 2 has keys 2 and 5: 2 to 2 (half), 5 to 2, 5 to 5 (half); rank 3 has keys 3 and 4: 3 to 3 (half), 4 to 3, 4 to 4 (half). Two squares of work for each rank.](../figures/steps/sequence_parallel_2.svg)
#
#    In turn 0 every rank has its own keys. On the diagonal half a square is needed, twice; with the whole one that makes two squares of work for each rank.
#
# 3. ![Turn 1. Queries to keys: rank 0 has keys 3 and 4: 7 to 3, 7 to 4; rank 1 has keys 0 and 7: 1 to 0, 6 to 0; rank 2 has keys 1 and 6: 2 to 1, 5 to 1; rank 3 has keys 2 and 5: 3 to 2, 4 to 2. Two squares of work for each rank.](../figures/steps/sequence_parallel_3.svg)
#
#    The keys have moved on by a rank. Rank 0 has those of pieces 3 and 4: its late queries come after both, its early ones after neither.
#    Rank 1 has 0 and 7: both of its pieces come after 0, none after 7. Two squares again.
#
# 4. ![Turn 2. Queries to keys: rank 0 has keys 2 and 5: 7 to 2, 7 to 5; rank 1 has keys 3 and 4: 6 to 3, 6 to 4; rank 2 has keys 0 and 7: 2 to 0, 5 to 0; rank 3 has keys 1 and 6: 3 to 1, 4 to 1. Two squares of work for each rank.](../figures/steps/sequence_parallel_4.svg)
#
#    Two squares in every turn: one piece of queries with both of keys, or both of queries with one of keys.
#
# 5. ![Turn 3. Queries to keys: rank 0 has keys 1 and 6: 7 to 1, 7 to 6; rank 1 has keys 2 and 5: 6 to 2, 6 to 5; rank 2 has keys 3 and 4: 5 to 3, 5 to 4; rank 3 has keys 0 and 7: 3 to 0, 4 to 0. Two squares of work for each rank.](../figures/steps/sequence_parallel_5.svg)
#
#    In the last turn every rank meets the keys that it has not met yet.
#
# 6. ![After four turns. All squares below the diagonal and the halves on it are computed, eight squares of work by each rank: those in the rows of its two pieces.](../figures/steps/sequence_parallel_6.svg)
#
#    Each rank has computed the rows of its two pieces, 8 squares of 32. In no turn did one have to wait for another.
# :::
#
# What is left of a block of keys is then always half, whoever they come from:

# %%
show.source(sp.blocks)


# %% [markdown]
# The cell counts the pairs of query and key that each rank computes, and the processor's time that it takes.

# %% tags=["measured"]
def work(seq):
    """On a rank: for each layout, pairs of query and key in a head, and processor's seconds."""
    found = {}
    for layout in sp.LAYOUTS:
        for _ in range(2):  # the first one warms up
            trace, mine = [], qkv(layout, seq, dtype=torch.float32)
            begin = time.process_time()  # does not run while a rank waits, or another computes
            sp.ring_attention(*mine, dist.group.WORLD, layout=layout, trace=trace)
            seconds = time.process_time() - begin
        found[layout] = sum(work.block.pairs for work in trace), seconds
    return found


def qkv(layout, seq, heads=8, kv_heads=2, size=32, dtype=torch.float64):
    """This rank's queries, keys and values, cut from the same ones on all ranks: leaves."""
    generator = torch.Generator().manual_seed(0)
    whole = (
        torch.randn(1, n, seq, size, generator=generator, dtype=dtype).to(ranks.device())
        for n in (heads, kv_heads, kv_heads)
    )
    N, rank = dist.get_world_size(), dist.get_rank()
    return [sp.split(x, N, rank, layout, dim=2).clone().requires_grad_() for x in whole]


N, seq = 4, 8192
results = ranks.run(work, N, seq, device="cpu")
rows, slowest = [], {}
for layout in sp.LAYOUTS:
    all_seconds = sum(result[layout][1] for result in results)
    for rank, result in enumerate(results):
        pairs, seconds = result[layout]
        want = sp.score_pairs(layout, seq, N, rank)
        assert pairs == want
        share = 100 * pairs / (seq * (seq + 1) / 2)
        took = 100 * seconds / all_seconds
        rows.append((layout, rank, f"{want:,}", f"{pairs:,}", f"{share:.1f}", f"{took:.0f}"))
    slowest[layout] = max(result[layout][1] for result in results) / all_seconds
assert slowest["contiguous"] > 0.36 > slowest["zigzag"], slowest
head = ["layout", "rank", "pairs, predicted", "counted", "of all (%)", "of the time (%)"]
show.table(rows, head, caption=f"{seq} tokens, causal, forward")

# %% [markdown]
# `````{admonition} Checked: "the causal mask halves the time of ring attention"
# :class: checked
#
# It halves the work of all ranks together. But the step takes as long as its slowest rank.
# With contiguous shares that is $\frac{2N-1}{N^2}$ of the square's half: 44 % on four ranks (row 4), where 25 % would be even. Against no mask at all, a rank's 25 % of the square, it saves an eighth of the time, not a half.
# The zig-zag gets the half, on any number of ranks, and in every turn.
# `````
#
# ![A causal ring in time, on four ranks. Contiguous, rank 0 has only its own keys to work on, rank 3 all four blocks, and the others wait for it. Zig-zag, each rank has half a block to compute in every turn: all end together, after four sevenths of the time.](../figures/sequence_parallel_idle.svg)
#
# ### Tokens for heads: the all-to-all
#
# The other way: an all-to-all before attention, after which a rank has *all* tokens of $a/N$ heads instead of $s/N$ tokens of all heads. Heads know nothing of each other, so what follows is plain attention, with any kernel. A second all-to-all goes back. This is *Ulysses*, by the name of its paper {cite}`jacobs2023ulysses`.
#
# ![Four pieces of a sequence and four heads on four ranks. Before, each rank has one piece with all heads. An all-to-all gives each rank one head with all pieces, and its attention sees the whole sequence. A second all-to-all goes back.](../figures/sequence_parallel_ulysses.svg)

# %%
show.source(sp.ulysses._to_heads, sp.tokens_for_heads)


# %% [markdown]
# It is balanced without a zig-zag. But there must be a head for every rank, and where keys and values have fewer heads than there are ranks, each is sent several times.
#
# ## Equal, again
#
# First attention alone: output and all three gradients against one process, causal and not, with 8 heads of queries and 2 of keys and values.

# %%
def attention_gaps(attention, layout):
    """Largest differences: output, gradients of queries, keys, values; causal and not."""
    N, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    gaps = []
    for causal in (True, False):
        mine = qkv(layout, 64)
        whole = [sp.gather(x, group, layout, dim=2).requires_grad_() for x in mine]
        right = F.scaled_dot_product_attention(*whole, is_causal=causal, enable_gqa=True)
        got = attention(*mine, group, causal=causal, layout=layout)
        weights = torch.arange(right.numel(), device=right.device).view_as(right).sin()
        (right * weights).sum().backward()
        (got * sp.split(weights, N, rank, layout, dim=2)).sum().backward()
        pairs = [(right, got), *((x.grad, y.grad) for x, y in zip(whole, mine, strict=True))]
        gaps.append(
            [(sp.split(a, N, rank, layout, dim=2) - b).abs().max().item() for a, b in pairs]
        )
    return [max(both) for both in zip(*gaps, strict=True)]


WAYS = {
    ("ring", "contiguous"): sp.ring_attention,
    ("ring", "zigzag"): sp.ring_attention,
    ("ulysses", "contiguous"): sp.all_to_all_attention,
}


def all_gaps():
    return {way: attention_gaps(fn, way[1]) for way, fn in WAYS.items()}


rows = []
for N in (1, 2, 4):
    results = ranks.run(all_gaps, N)
    for way in WAYS:
        gaps = [max(each) for each in zip(*(r[way] for r in results), strict=True)]
        assert max(gaps) < 1e-11, (way, gaps)  # float64; a row's sum is made block by block
        rows.append((N, *way, *(f"{gap:.0e}" if gap else "0" for gap in gaps)))
head = ["ranks", "way", "layout", "output", "of queries", "of keys", "of values"]
show.table(rows, head, caption="Largest differences from one process: output, gradients")


# %% [markdown]
# Then the whole model. `sp.distribute` changes the plain GPT from outside: attention is one of the two, and rotary positions are those in the whole sequence.
# Each rank holds all weights and has seen some of the tokens. So gradients are averaged after backward, as in data parallelism.

# %%
def five_steps(attention, layout):
    group, dtype = dist.group.WORLD, torch.float64
    alone = plain(dtype=dtype)
    model = sp.distribute(plain(dtype=dtype), group, attention, layout)
    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=1e-3, foreach=False) for m in (alone, model)
    ]
    in_loss = 0.0
    for step in range(5):
        tokens, targets = batch(step)
        mine = [sp.share(x, group, layout) for x in (tokens, targets)]
        for optimizer in optimizers:
            optimizer.zero_grad()
        values = loss(alone(tokens), targets), loss(model(mine[0]), mine[1])
        for value in values:
            value.backward()
        sp.average_gradients(model, group)
        in_loss = max(in_loss, abs(values[0].item() - sp.average(values[1], group)))
        for optimizer in optimizers:
            optimizer.step()
    return in_loss, largest(alone.state_dict(), model.state_dict())


def all_models():
    return {way: five_steps(*way) for way in WAYS}


rows = []
for N in (2, 4):
    for way, gaps in ranks.run(all_models, N)[0].items():
        # AdamW divides by a gradient's size, which makes rounding larger where that is small.
        assert gaps[0] < 1e-11 and gaps[1] < 1e-8, (way, gaps)
        rows.append((N, *way, *(f"{gap:.0e}" for gap in gaps)))
head = ["ranks", "way", "layout", "loss", "weights after 5 steps"]
show.table(rows, head, caption="Largest differences from one process, float64")


# %% [markdown]
# ## What the long context costs
#
# ### Bytes sent
#
# Per layer and rank, with $D = h/a$ numbers in a head, $K$ heads of keys and values, and $e$ bytes a number:
#
# - the ring sends its piece $N-1$ times forward. Backward it does so again, and the gradients go $N$ times, all the way home (in float32, if not in more): with $e = 4$ that is $2bKD\frac{s}{N}\,e\,(3N-2)$ in all, which grows a little with $N$;
# - the all-to-all sends $\frac{N-1}{N}$ of queries, keys, values and output, forward and backward: $4b(a+K)D\frac{s}{N}\,e\,\frac{N-1}{N}$, which falls with $N$.

# %%
def attention_sent(heads, kv_heads, seq, size):
    """Bytes that this rank sends in forward and backward of one attention: ring, all-to-all."""
    found, N = [], dist.get_world_size()
    for attention in (sp.ring_attention, sp.all_to_all_attention):
        mine = qkv("zigzag", seq, heads, kv_heads, size, torch.float32)
        with count.sent() as sent:
            attention(*mine, dist.group.WORLD, layout="zigzag").sum().backward()
        # Of what is handed to an all-to-all, a rank keeps its own part.
        handed = sent.payload["all_to_all"] + sent.payload["all_to_all_single"]
        found.append(sent.bytes + handed * (N - 1) // N)
    return found


rows, heads, seq, size = [], 16, 1024, 16
for kv_heads in (16, 2):
    for N in (2, 4, 8):
        counted = ranks.run(attention_sent, N, heads, kv_heads, seq, size, device="cpu")[0]
        ring_ = sp.ring_sent(1, seq, kv_heads, size, N)
        swap = sp.ulysses_sent(1, seq, heads, kv_heads, size, N)
        want = [each["forward"] + each["backward"] for each in (ring_, swap)]
        assert counted == want
        cells = [f"{bytes_:,}" for pair in zip(want, counted, strict=True) for bytes_ in pair]
        rows.append((heads, kv_heads, N, *cells))
head = ["heads", "of keys", "ranks", "ring: predicted (B)", "counted (B)"]
show.table(
    rows,
    [*head, "all-to-all: predicted (B)", "counted (B)"],
    caption=f"Sent by a rank for one attention, forward and backward, {seq} tokens, float32",
)

# %% [markdown]
# `````{admonition} Checked: "the all-to-all always sends less than the ring"
# :class: checked
#
# With as many heads of keys as of queries, yes. With grouped keys and values the ring moves only those: here with 2 heads instead of 16 it sends less on 2 and 4 ranks (rows 4 and 5 of the table).
# And the ring's bytes travel while attention computes; those of the all-to-all are waited for.
# `````
#
# ### Seconds
#
# What hides the ring's bytes is work that grows with the square: in a turn a rank does $4b\big(\frac{s}{N}\big)^2h$ floating-point operations (half of them under the mask), and sends $2b\frac{s}{N}KDe$ bytes meanwhile.
# The ratio grows with the tokens on a rank, $\frac{s}{N}$. With enough of them the wire costs nothing; that is the ring's regime, and why its ranks may sit in different machines.
# The next cell puts two ranks on an emulated wire of 100 Mbit/s. One hop, so without a mask a forward takes $\max(c, w) + c$: $c$ seconds computing a turn, measured without the wire, and $w$ on it.

# %% tags=["measured"]
BANDWIDTH = 12.5e6  # bytes per second


def forwards(times):
    """For tokens on a rank: the least seconds of a forward without the slow wire, and with it."""
    groups = dist.group.WORLD, link.slow(0, BANDWIDTH)
    found = {}
    for share, repeats in times.items():
        mine = [x.detach() for x in qkv("contiguous", 2 * share, dtype=torch.float32)]
        took = [[], []]
        for _ in range(repeats):
            for seconds, group in zip(took, groups, strict=True):
                dist.barrier()
                begin = time.perf_counter()
                sp.ring_attention(*mine, group, causal=False, layout="contiguous")
                seconds.append(time.perf_counter() - begin)
        found[share] = [min(seconds) for seconds in took]  # what disturbs only adds
    return found


rows, ratios = [], []
for share, (without, slow) in ranks.run(forwards, 2, {128: 12, 3072: 3}, device="cpu")[
    0
].items():
    c, w = without / 2, 2 * 2 * 32 * share * 4 / BANDWIDTH  # keys and values, 2 heads of 32
    want = max(c, w) + c
    ratios.append(slow / without)
    cells = (f"{1e3 * seconds:.1f}" for seconds in (2 * c, w, want, slow))
    rows.append((share, *cells, f"{100 * (slow / want - 1):+.0f}", f"{slow / without:.2f}"))
assert ratios[0] > 1.2 * ratios[1], ratios
head = ["tokens on a rank", "without the wire (ms)", "on the wire (ms)", "predicted (ms)"]
show.table(rows, [*head, "measured (ms)", "difference (%)", "slower by"])


# %% [markdown]
# With few tokens on a rank the wire is all there is. With 24 times as many it carries 24 times the bytes, and hides behind 576 times the work.
#
# ### Memory
#
# A rank of the ring keeps its share of queries, keys, values and output, and $\ell$; while it works it holds two pieces of keys and values, and in backward their gradients.
# The all-to-all keeps its result twice, by heads and by tokens, and has what is on its way twice.
# Predicted ([predict.py](../code/shardlab/sequence_parallel/predict.py)) and measured, over the length of the context:

# %%
def attention_bytes(attention, contexts):
    """On a rank, for each context, twice: bytes kept by forward, the most held in backward."""
    found = {seq: [] for seq in contexts}
    for seq in [*contexts, *contexts]:
        mine = qkv("zigzag", seq, 8, 8, 16, torch.float32)
        dy = torch.ones_like(mine[0])
        with count.held() as held:
            y = attention(*(x * 1 for x in mine))  # computed, as a model's would be
            time.sleep(0.05)
            kept_ = held.now
        with count.held(*mine) as held:
            y = attention(*mine)
            held.reset_peak()
            torch.autograd.grad(y, mine, dy)
        found[seq].append((kept_, held.peak))
        del y
    return found


def alone(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def in_ring(q, k, v):
    return sp.ring_attention(q, k, v, dist.group.WORLD)


def swapped(q, k, v):
    return sp.all_to_all_attention(q, k, v, dist.group.WORLD, layout="zigzag")


# %% [markdown]
# Three ways, four lengths. What is kept has to agree to the byte.

# %% tags=["measured"]
CONTEXTS = [512, 1024, 2048, 3072]
CORES = {
    "one process": ("one", alone, 1),
    "all-to-all, 4 ranks": ("ulysses", swapped, 4),
    "ring, 4 ranks": ("ring", in_ring, 4),
}
figure, panels = plt.subplots(1, 2, figsize=(7.4, 3))
rows = []
for color, (name, (way, core, N)) in zip(show.RANK_COLORS, CORES.items(), strict=False):
    wants, measured = [], []
    every = ranks.run(attention_bytes, N, core, CONTEXTS, device="cpu")
    for seq in CONTEXTS:
        want = sp.attention_memory(way, 1, seq, 8, 8, 16, N)
        # A thread of gloo may hold a message for a moment longer: take the least.
        kept_, peak = (min(run[i] for found in every for run in found[seq]) for i in (0, 1))
        wants.append((want["kept"], want["backward"]))
        measured.append((kept_, peak))
        assert kept_ == want["kept"], (name, kept_, want)
        limit = 0.15 if way == "ulysses" else 0.02
        assert abs(peak / want["backward"] - 1) < limit, (name, peak, want)
    for axes, lines, dots in zip(
        panels, zip(*wants, strict=True), zip(*measured, strict=True), strict=True
    ):
        axes.plot(CONTEXTS, [bytes_ / 1e6 for bytes_ in lines], color=color)
        axes.plot(CONTEXTS, [bytes_ / 1e6 for bytes_ in dots], "o", color=color, ms=4)
        end = CONTEXTS[-1], dots[-1] / 1e6
        axes.annotate(name, end, (6, 0), textcoords="offset points", va="center", fontsize=8)
    off = f"{100 * (measured[-1][1] / wants[-1][1] - 1):+.1f}"
    pairs = zip(wants[-1], measured[-1], strict=True)
    rows.append((name, *(f"{bytes_:,}" for pair in pairs for bytes_ in pair), off))
for axes, label in zip(panels, ("kept by forward (MB)", "most in backward (MB)"), strict=True):
    axes.set(xlabel="tokens of context", ylabel=label, xlim=(300, 4700), ylim=(0, None))
    axes.set_xticks(CONTEXTS)
figure.tight_layout()
head = ["way", "kept: predicted (B)", "measured (B)", "backward: predicted (B)", "measured (B)"]
show.table(
    rows, [*head, "difference (%)"], caption=f"One attention, {seq} tokens, 8 heads of 16"
)

# %% [markdown]
# What is kept is divided by four, and every layer keeps it.
# What is held for a moment is divided by less: pieces under way come on top, of one layer at a time. Both grow in proportion to the context; lines are predicted, dots measured.

# %% tags=["hide-input"]
show.figure(
    figure,
    "Bytes of one attention over the length of the context, predicted as lines, measured as dots "
    "on them or close by. Kept by forward: one process keeps about four times as much as each of "
    "four ranks. The most in backward: one process 11 MB at 3072 tokens, ring 7, all-to-all 5.",
    "sequence_parallel_measured",
)

# %% [markdown]
# `````{admonition} Checked: "with N times the ranks, N times the context for the same time"
# :class: checked
#
# The same memory, yes. But attention's work grows with the square of the sequence: $N$ times the tokens on $N$ times the ranks is $N$ times the work for each. The cell counts it.
# `````

# %%
rows = []
alone_ = sp.score_pairs("zigzag", 8192, 1, 0)
for N in (1, 2, 4, 8):
    pairs = sp.score_pairs("zigzag", 8192 * N, N, 0)
    rows.append((N, f"{8192 * N:,}", 8192, f"{pairs:,}", f"{pairs / alone_:.2f}"))
show.table(rows, ["ranks", "tokens", "tokens on a rank", "pairs on a rank", "of one rank's"])

# %% [markdown]
# (sequence-fit)=
# ### How many tokens fit
#
# The memory model of the course has all of it: states, activations, the pieces of the ring, the loss. So it can be asked the other way round: how long a context fits into 80 GB?

# %%
tensor = {"tp": 8}
CASES = {
    "tensor 8": tensor,
    "+ sequence": tensor | {"sequence_parallel": True},
    "+ recomputation": tensor | {"sequence_parallel": True, "recompute": "full"},
}
fit = sp.tokens_table(llama, 80e9, (1, 2, 4, 16, 64), CASES)
rows = [(8 * row["cp"], row["cp"], *(f"{row[name]:,}" for name in CASES)) for row in fit]
assert fit[0]["+ sequence"] > 2 * fit[0]["tensor 8"]
assert fit[-1]["+ sequence"] > 60 * fit[0]["+ sequence"]
head = ["GPUs", "of them along the context", *(f"{name} (tokens)" for name in CASES)]
show.table(rows, head, caption="Llama 3 8B, bfloat16, one sequence, ring, 80 GB each")


# %% [markdown]
# ![Tokens of context that fit into 80 GB on each rank, for Llama 3 8B with tensor degree 8, over 1 to 64 context ranks. All lines double with the ranks. With sequence parallelism about twice as many tokens fit, with full recomputation four times, with both thirteen times.](../figures/sequence_parallel_fit.svg)
#
# Read it by columns: sequence parallelism more than doubles what fits, for nothing. Recomputation multiplies it again, for a third more arithmetic ([Memory](memory.md)); what limits then are the logits, which no layer holds: a rank's tokens times its part of the vocabulary, in float32.
# And by rows: every doubling of ranks doubles the context.
#
# ## The production library
#
# `DTensor` has Megatron's sequence parallelism as a plan: norms are `SequenceParallel`, a cut part's input goes from `Shard(1)` (the tokens) to `Replicate()`, and what leaves it is `Shard(1)` again.
# The cell trains the same model with that plan and with ours. Look at the collectives, and at the bytes kept.

# %%
def by_torch(model):
    """torch's plan for tensor and sequence parallelism, applied to the plain GPT."""
    along, whole = (Shard(1),), (Replicate(),)
    plan = {
        "embedding": torchs.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": torchs.SequenceParallel(),
        "head": torchs.ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    for part, last in (("attention", "out"), ("ffn", "down")):
        plan[f"blocks.*.{part}_norm"] = torchs.SequenceParallel()
        plan[f"blocks.*.{part}"] = torchs.PrepareModuleInput(
            input_layouts=along, desired_input_layouts=whole
        )
        plan[f"blocks.*.{part}.{last}"] = torchs.RowwiseParallel(output_layouts=Shard(1))
    for name in ("attention.query", "attention.key", "attention.value", "ffn.up"):
        plan[f"blocks.*.{name}"] = torchs.ColwiseParallel()
    mesh = init_device_mesh(ranks.device().type, (dist.get_world_size(),))
    return torchs.parallelize_module(model, mesh, plan, src_data_rank=None)


# %% [markdown]
# DTensor sends by functions of its own, which `count.sent` does not see, so we count those as well.

# %% tags=["hide-input"]
class Functional(TorchDispatchMode):
    """Counts the collectives that DTensor calls (`count.sent` sees those of `dist`)."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # first what it does with its local tensors
        name = str(func)
        self.calls += name.startswith("_c10d_functional.") and (
            "wait" not in name and "wrap" not in name
        )
        return func(*args, **(kwargs or {}))


def three_phases(model, value_of, finish):
    """A step: its loss, bytes kept by forward, collectives in forward, backward, optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    with count.held() as held:  # the model is there before, and not counted
        value = value_of()
        time.sleep(0.05)  # as above
        kept_ = held.now
    value = None
    calls = []
    with Functional() as theirs, count.sent() as ours:
        for phase in ("forward", "backward", "optimizer"):
            if phase == "forward":
                value = value_of()
            elif phase == "backward":
                value.backward()
                finish()
            else:
                optimizer.step()
            calls.append(theirs.calls + sum(ours.calls.values()))
    each = [now - before for now, before in zip(calls, [0, *calls], strict=False)]
    return value.item(), kept_, *each


def beside_torch():
    untied, group = replace(SHAPE, tied=False), dist.group.WORLD
    tokens, targets = batch(seq=SHAPE.seq)
    model = by_torch(plain(untied))
    with torchs.loss_parallel():
        found = {
            "torch": three_phases(model, lambda: loss(model(tokens), targets), lambda: None)
        }
    for keep in (True, False):
        mine = tp.parallelize(plain(untied), group, edges=sp.AlongSequence(keep))
        found["ours, kept whole" if keep else "ours"] = three_phases(
            mine,
            lambda m=mine: tp.loss(m(tokens), targets, group),
            lambda m=mine: sp.sum_gradients(m, group),
        )
    return found


# %% [markdown]
# And this is what comes of it:

# %%
results = ranks.run(beside_torch, 4, device="cpu", show=False)[0]
rows = [
    (n, f"{value:.6f}", f"{kept_:,}", *calls) for n, (value, kept_, *calls) in results.items()
]
values = [value for value, *_ in results.values()]
assert max(values) - min(values) < 1e-5  # float32, a loss of about 5.5
head = ["way", "loss", "kept by forward (B)", "collectives: forward", "backward", "optimizer"]
show.table(rows, head, caption=f"A step on 4 ranks, {SHAPE.layers} layers")


# %% [markdown]
# The edges are the same 18 operations forward and 18 backward; the rest are the loss's, the sum of the norms' gradients, and what is gathered again. The differences teach two things.
# PyTorch keeps what it has gathered.
# And it has no `sum_gradients`: the gradient of a norm's weight is a `DTensor` with the placement `Partial`, a sum that nobody has made yet. Whoever reads it makes it, each time. AdamW reads a gradient three times: 54 all-reduces for 18 small parameters, in every step, unless you call `gradient.redistribute(placements=[Replicate()])` on them after backward.
#
# For long contexts PyTorch has `context_parallel`, a ring attention with a zig-zag (its *load balancing*) that swaps torch's attention while a `with` block lasts.
# It needs the fused kernels of a GPU; on a CPU it raises. On GPUs the next cell compares.

# %%
def beside_context_parallel():
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    N, group = dist.get_world_size(), dist.group.WORLD
    mine = [x.to(torch.bfloat16) for x in qkv("zigzag", 1024, 8, 8, 64, torch.float32)]
    ours = sp.gather(sp.ring_attention(*mine, group), group, dim=2)
    buffers = [sp.gather(x, group, dim=2) for x in mine]
    mesh = init_device_mesh("cuda", (N,))
    shared = context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2])
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), shared:
        theirs = F.scaled_dot_product_attention(*buffers, is_causal=True)
    right = F.scaled_dot_product_attention(
        *(sp.gather(x, group, dim=2) for x in mine), is_causal=True
    )
    share = sp.split(right, N, dist.get_rank(), "zigzag", dim=2)
    return (ours - right).abs().max().item(), (theirs - share).abs().max().item()


if ranks.place(2)[1] == "cuda" and torch.cuda.device_count() >= 2:
    gaps = max(ranks.run(beside_context_parallel, 2))
    print(f"from one process: ours {gaps[0]:.0e}, torch's {gaps[1]:.0e}")
    assert max(gaps) < 0.05  # bfloat16 has three digits
else:
    print("no two GPUs here: torch's context_parallel is left out")


# %% [markdown]
# ## What goes wrong
#
# None of the first two raises an error.
#
# ### Gradients of norms that nobody sums
#
# `sum_gradients` is one line behind `backward`, and easy to forget. Each rank then steps its norms by what its own tokens say.

# %%
def train_norms(summed, steps=10):
    """Losses, and how far apart the ranks' norms are at the end."""
    group = dist.group.WORLD
    model = tp.parallelize(plain(), group, edges=sp.ALONG_SEQUENCE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    losses = []
    for step in range(steps):
        tokens, targets = batch(step)
        value = tp.loss(model(tokens), targets, group)
        optimizer.zero_grad()
        value.backward()
        if summed:
            sp.sum_gradients(model, group)
        optimizer.step()
        losses.append(value.item())
    weight_H = model.norm.weight.detach()
    weight_NH = sp.gather(weight_H[None], group, "contiguous", dim=0)  # of all ranks
    return losses, (weight_NH - weight_H).abs().max().item()


rows = []
for name, summed in (("with sum_gradients", True), ("without", False)):
    losses, apart = ranks.run(train_norms, 4, summed)[0]
    rows.append((name, f"{losses[0]:.4f}", f"{losses[-1]:.4f}", f"{apart:.4f}"))
    assert (apart == 0) == summed
head = ["norms' gradients", "first loss", "loss after 10 steps", "norms apart by"]
show.table(rows, head)


# %% [markdown]
# The first loss is right and the curve looks right. But there is no longer *one* model: weights that should be equal on all ranks are not, and which of them is saved?
# `tensor_parallel.full_state_dict` takes one rank's. Compare such parameters over the ranks now and then; equal bits are free to ask for.
#
# ### A sequence that is cut, and not told so
#
# Cut the batch along the sequence, leave the model as it is, average the gradients: it runs. Each rank then trains on short texts of its own, whose tokens cannot see what came before, and whose positions all begin at 0.
# Half right is worse to find: the ring is there, but positions begin at 0 on every rank.

# %%
def mistaken(way, steps=20):
    """First loss, last loss, and the last loss that its weights have in one process."""
    group = dist.group.WORLD
    N = dist.get_world_size()
    model = plain()
    if way == "positions from 0":
        sp.context.positions = lambda layout, seq, *_: torch.arange(
            seq // N, device=ranks.device()
        )
    if way != "own tokens alone":
        sp.distribute(model, group, "ring", "contiguous")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    losses = []
    for step in range(steps):
        tokens, targets = (sp.share(x, group, "contiguous") for x in batch(step))
        value = loss(model(tokens), targets)
        optimizer.zero_grad()
        value.backward()
        sp.average_gradients(model, group)
        optimizer.step()
        losses.append(sp.average(value, group))
    alone = plain()
    start = loss(alone(batch()[0]), batch()[1]).item()
    alone.load_state_dict(model.state_dict())
    tokens, targets = batch(steps)
    return losses[0] - start, losses[-1], loss(alone(tokens), targets).item()


rows = []
for way in ("right", "own tokens alone", "positions from 0"):
    off, last, alone_ = ranks.run(mistaken, 4, way, device="cpu")[0]
    rows.append((way, f"{off:+.1e}", f"{last:.3f}", f"{alone_:.3f}"))
    assert (abs(off) < 1e-5) == (way == "right"), (way, off)
head = ["way", "first loss: off by", "loss after 20 steps", "next batch, one process"]
show.table(rows, head)


# %% [markdown]
# After 20 steps all three losses look alike; to have seen no more than 16 tokens at a time does not show in them.
# The *first* loss shows it: the right way is one process's up to rounding, the wrong ones are off, by as little as some $10^{-5}$. So compare the first loss with one process, in float32, on a short sequence, before any long run.
#
# ### Sequences of other lengths
#
# These are refused before anything is sent:

# %%
def refused():
    group, q = dist.group.WORLD, torch.zeros(1, 6, 5, 8)
    tries = {
        "250 tokens, zig-zag": lambda: sp.share(torch.zeros(1, 250), group, "zigzag"),
        "6 heads for 4 ranks": lambda: sp.all_to_all_attention(q, q, q, group),
    }
    for name, attempt in tries.items():
        try:
            attempt()
        except ValueError as error:
            print(f"{name}: {error}")
        else:
            raise AssertionError("this was meant to be refused")


_ = ranks.run(lambda: refused() if dist.get_rank() == 0 else None, 4, device="cpu")

# %% [markdown]
# In practice sequences are padded to a multiple of $2N$, and the padding's targets left out of the loss. Then ranks have unequal numbers of targets, and each loss has to count by its number: sum the losses, and divide by the targets of *all* ranks ([Data parallelism](data_parallel.md) has the same pitfall).
#
# ## When to use it
#
# | technique | for | against |
# |---|---|---|
# | Megatron's sequence parallelism | belongs to tensor parallelism: on 4 ranks a layer keeps 8.8 instead of 14.9 $sbh$, for the same bytes, or a quarter more | no more ranks than heads, on a fast wire; norms' gradients need a sum that is easy to forget |
# | ring | any number of ranks, any heads; bytes hide behind work when $s/N$ is large; with 2 heads of keys for 16 of queries it sends 0.66 MB where the all-to-all sends 0.98 | with as many heads of keys it sends 5.2 MB where the all-to-all sends 1.6; without a zig-zag one rank has 44 % of the work of four; attention code of its own |
# | all-to-all | few bytes with many ranks; any attention kernel; balanced as it is | a head for every rank; its bytes are waited for |
# | both of them | activations per rank fall with $1/N$, so twice the ranks fit twice the context | weights are not divided: states stay, unless [ZeRO](zero.md) shards them; work grows with the square |
#
# The two halves multiply: with $t = 8$ in a machine and $N = 16$ machines, a rank has $s/128$ tokens between the cut matrices. And rings of all-to-alls exist: heads within a machine, keys round the machines.
# Llama 3 405B was trained at 131,072 tokens with 8 tensor-parallel ranks times 16 along the context {cite}`dubey2024llama3` (section 3.3.2, Table 4): in a zig-zag, but with an all-gather of all keys and values in place of the ring. With grouped keys they are small, and a mask may then be anything.
# In a real job these show that it is set up right: the first loss and the first gradient norm equal those of one process on the same tokens; activations fall with $1/t$, not by half; all ranks take equally long in attention.
#
# ```{admonition} On more GPUs
# :class: note
#
# Both attentions are equal to one process and their bytes are counted; that the ring hides its hops behind its blocks is said of an emulated link.
# With two GPUs this page also runs PyTorch's own context parallelism, which needs their kernels, beside ours.
# They would show whether NVLink is fast enough for your block size, and let you train on the context that the tables promise.
# ```
#
# ## Exercises
#
# Each exercise has a check; where ranks are needed, it runs your answer on real ones.
#
# ```{exercise-start} Bytes of a layer (easy)
# :label: ex-sequence-bytes
# ```
#
# A layer of GPT-3 has $h = 12{,}288$ and $a = 96$, and sees one sequence of 2048 tokens in 16 bits. It is cut over 8 ranks with tensor and sequence parallelism; its fused attention keeps no scores.
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
# Everything is divided, the 10 too.

# %%
answer = 2048 * 12_288 * 34 / 8
check(answer, "sequence_bytes")


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Whose tokens? (easy)
# :label: ex-sequence-zigzag
# ```
#
# Return the positions of the tokens that `rank` of `size` has in the zig-zag, in the order in which it has them. `seq` is a multiple of `2 * size`.

# %%
def my_zigzag(seq, rank, size):
    pass  # your code


check(my_zigzag)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-sequence-zigzag
# :label: sol-sequence-zigzag
# :class: dropdown
# ```
#
# Two pieces, one counted from the front and one from the back.

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
# ```{exercise-start} Two blocks into one (medium)
# :label: ex-sequence-merge
# ```
#
# Attention over some keys gave `o1` [B, A, S, D] and `l1` [B, A, S], the logarithm of the sum of exponentials; over other keys, `o2` and `l2`.
# Return `(o, l)` for all of them. Scores may be as large as 1000, and a block in which a query sees no key at all has $\ell = -\infty$.

# %%
def my_merge(o1, l1, o2, l2):
    pass  # your code


check(my_merge)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-sequence-merge
# :label: sol-sequence-merge
# :class: dropdown
# ```
#
# `logaddexp` takes out the larger one first. The differences are at most 0, and $e^{-\infty} = 0$.

# %%
def my_merge(o1, l1, o2, l2):
    log_sum = torch.logaddexp(l1, l2)
    w1, w2 = (l1 - log_sum).exp(), (l2 - log_sum).exp()
    return w1[..., None] * o1 + w2[..., None] * o2, log_sum


check(my_merge)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} The edge, with its backward (medium)
# :label: ex-sequence-enter
# ```
#
# Write the entering edge: `x_BsH` are this rank's tokens, the result is [B, S, H] with the tokens of all ranks, in rank order. It must be differentiable, and right when each rank does something else with the result.
# (`torch.autograd.Function`; plain collectives will do, also ones that move more than they must.)

# %%
def my_enter(x_BsH, group):
    pass  # your code


check(my_enter)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-sequence-enter
# :label: sol-sequence-enter
# :class: dropdown
# ```
#
# Forward an all-gather. Backward, what all ranks found for this rank's tokens, added up.

# %%
class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BsH, group):
        ctx.group = group
        parts = [torch.empty_like(x_BsH) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x_BsH.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, gradient_BSH):
        total_BSH = gradient_BSH.clone()
        dist.all_reduce(total_BSH, group=ctx.group)  # a reduce-scatter would do with half
        N, rank = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        return total_BSH.chunk(N, dim=1)[rank], None


def my_enter(x_BsH, group):
    return Enter.apply(x_BsH, group)


check(my_enter)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} A ring on real ranks (hard)
# :label: ex-sequence-ring
# ```
#
# Write forward of ring attention without a mask. Each rank has `q_BAsD`, `k_BAsD` and `v_BAsD` of its own tokens; return its output [B, A, s, D].
# No collectives: `ranks.exchange(outgoing, to, incoming, source, group)` begins to send and to receive, and returns at once; `.wait()` waits.

# %%
def my_ring(q_BAsD, k_BAsD, v_BAsD, group):
    pass  # your code


check(my_ring)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-sequence-ring
# :label: sol-sequence-ring
# :class: dropdown
# ```
#
# Send first, compute, merge, then wait for the next piece. The last piece is not sent on.

# %%
def my_ring(q_BAsD, k_BAsD, v_BAsD, group):
    N, rank = dist.get_world_size(group), dist.get_rank(group)
    kv, o, log_sum = torch.stack((k_BAsD, v_BAsD)), 0.0, torch.tensor(-torch.inf)
    for turn in range(N):
        coming = torch.empty_like(kv)
        if turn < N - 1:
            after, before = (rank + 1) % N, (rank - 1) % N
            passing = ranks.exchange(kv, after, coming, before, group)
        scores = q_BAsD @ kv[0].transpose(-1, -2) / q_BAsD.shape[-1] ** 0.5
        weight = torch.sigmoid(scores.logsumexp(-1) - log_sum)[..., None]  # 1 in turn 0
        o = (1 - weight) * o + weight * (scores.softmax(-1) @ kv[1])
        log_sum = torch.logaddexp(log_sum, scores.logsumexp(-1))
        if turn < N - 1:
            passing.wait()
        kv = coming
    return o


check(my_ring)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Which way, on how many ranks? (design)
# :label: ex-sequence-context
# ```
#
# A model keeps `kept` bytes of activations for each token and has `states` bytes of states on every rank; a rank has `memory_` bytes. There are `heads` heads, `kv_heads` of keys and values.
# Return `(ranks, way)` for one sequence of `seq` tokens: the fewest ranks of 1, 2, 4, …, 64 on which it fits when only the sequence is cut, or `None`.
# The way is `"none"` on one rank. Otherwise it is `"all-to-all"` where the ranks divide both numbers of heads and it sends fewer bytes in *forward* than the ring; else `"ring"`.

# %%
def my_context(seq, kept, states, memory_, heads, kv_heads):
    pass  # your code


check(my_context)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-sequence-context
# :label: sol-sequence-context
# :class: dropdown
# ```
#
# Forward, for each of its tokens, a rank sends $2K(N-1)$ heads in the ring, and $(2a + 2K)\frac{N-1}{N}$ in the all-to-all.

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
# - Tensor parallelism leaves norms, dropout and inputs whole: $sbh(10 + 24/t)$. Cut by tokens as well, it is $34sbh/t$.
# - An all-gather where a cut part begins and a reduce-scatter where it ends are one all-reduce taken apart: the same bytes.
# - Norms then see some of the tokens: their gradients are summed over the ranks.
# - For longer contexts cut the sequence everywhere; only attention needs other tokens.
# - The ring moves keys and values and merges blocks by the logarithms of their sums; the zig-zag makes a causal mask's work equal.
# - The all-to-all changes tokens for heads; it sends less with many ranks, the ring with few and grouped keys.
# - Memory per rank falls with $1/N$; attention's work grows with the square all the same.
#
# ## Further reading
#
# - {cite:t}`korthikanti2022recomputation`: sequence parallelism and selective recomputation; section 4 counts every byte of a layer.
# - {cite:t}`liu2023ring`: ring attention; section 3 has when the messages hide behind the blocks.
# - {cite:t}`brandon2023striped`: why a causal ring is unbalanced, and another cure.
# - {cite:t}`jacobs2023ulysses`: tokens for heads, and how its bytes fall with the ranks.
# - {cite:t}`milakov2018softmax`: softmax in one pass; two pages that all of this rests on.
# - {cite:t}`dao2022flashattention`: the same on one chip, where the "other rank" is slow memory.
