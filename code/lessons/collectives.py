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
# # Collectives: how ranks talk
#
# After this lesson you can
#
# - say what a rank, a world size, a local rank and a process group are;
# - name the seven collectives, and build each from sends and receives;
# - predict how many bytes and how many seconds a collective takes, and check the prediction;
# - find the rank at fault when a collective hangs.
#
# **208 ms or 80 ms?** Four ranks add up the gradients of one small model over a slow network.
# The obvious way takes 208 ms; another way takes 80.
# Two formulas of this lesson predict both times.
#
# ## Four ranks, one sum
#
# Four processes train replicas of one small model.
# After each backward, every process needs the sum of all four processes' gradients.
# The obvious way: every rank sends its gradients to rank 0, and rank 0 adds them and sends the sum back.
# In the *ring* every rank cuts its tensor into as many pieces as there are ranks, and sends only to the next rank, one piece at a time.

# %% tags=["hide-input"]
# Imports, the slow link's latency and bandwidth, and two timers
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist

from shardcourse.exercises import check
from shardlab import collectives, ranks
from shardlab.collectives import CostModel
from shardlab.common import show
from shardlab.gpt.model import PRESETS, count_parameters
from shardlab.measure import count, link

LATENCY, BANDWIDTH = 5e-3, 100e6  # of the slow link: seconds, bytes per second


def time_call(call, repeats=3):
    """Return the begin and end times of `repeats` calls on this rank."""
    times = []
    for _ in range(repeats):
        dist.barrier()
        begin = time.monotonic()  # one clock for all processes of a machine
        call()
        times.append((begin, time.monotonic()))
    return times


def best_time(times_by_rank):
    """Return the seconds of the fastest repeat, from the first rank's begin to the last
    rank's end. Other work on the machine can only add time, so the minimum is best."""
    repeats = [zip(*repeat, strict=True) for repeat in zip(*times_by_rank, strict=True)]
    return min(max(ends) - min(begins) for begins, ends in repeats)


style = show.set_style()


# %% [markdown]
# Here are both in their plainest form; rank 0 comes after the last rank.
# The ring's first loop adds up: rank $r$ sends piece $r-1$ first, and then always the piece to which it has just added.
# After it rank $r$ has the whole sum of piece $r$. The second loop passes the sums on. [Pictures](#the-ring-step-by-step) follow below.

# %%
def plain_naive(tensor, group):
    """All-reduce `tensor` in place over a group of ranks: rank 0 adds up and sends the sum."""
    if dist.get_rank(group) > 0:
        ranks.isend(tensor, 0, group).wait()
        return ranks.irecv(tensor, 0, group).wait()
    incoming = torch.empty_like(tensor)
    others = range(1, dist.get_world_size(group))
    for peer in others:
        ranks.irecv(incoming, peer, group).wait()
        tensor += incoming
    for message in [ranks.isend(tensor, peer, group) for peer in others]:
        message.wait()


def plain_ring(tensor, group):
    """All-reduce `tensor` in place around a ring."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    after, before = (rank + 1) % size, (rank - 1) % size
    pieces = tensor.chunk(size)
    incoming = torch.empty_like(pieces[0])
    for step in range(size - 1):  # reduce-scatter: sums grow on their way
        outgoing = pieces[(rank - step - 1) % size]
        # Send to the next rank, and receive from the one before.
        ranks.exchange(outgoing, after, incoming, before, group).wait()
        pieces[(rank - step - 2) % size].add_(incoming)
    for step in range(size - 1):  # all-gather: complete sums go around once more
        outgoing = pieces[(rank - step) % size]
        ranks.exchange(outgoing, after, incoming, before, group).wait()
        pieces[(rank - step - 1) % size].copy_(incoming)


# %% [markdown]
# The next cell runs both, and the ring of this lesson's module, `shardlab.collectives`, over an emulated link of 100 MB/s, on which a message takes 5 ms more.

# %%
WAYS = {
    "naive": plain_naive,
    "ring": plain_ring,
    "the module's ring": collectives.all_reduce_ring,
}
size = 4 * count_parameters(PRESETS["micro"])  # bytes of its gradients in float32


def sum_gradients():
    wire = link.create_slow_group(LATENCY, BANDWIDTH)
    found = {}
    for way, all_reduce in WAYS.items():
        gradients = torch.full((size // 4,), 10.0 ** dist.get_rank())
        with count.record_traffic() as sent:
            all_reduce(gradients, wire)
        right = bool((gradients == 1111).all())
        times = time_call(partial(all_reduce, gradients, wire))
        found[way] = sent.bytes, times, right
    return found


# %% tags=["hide-input", "measured"]
# Checks the sums: 1 + 10 + 100 + 1000; table: bytes and times
found = ranks.run(sum_gradients, 4, device="cpu")  # CPU: times are gloo's
assert all(rank[way][2] for rank in found for way in WAYS)
model = CostModel(LATENCY, BANDWIDTH)
rows, ms = [], {}
for way in WAYS:
    mb = [f"{rank[way][0] / 1e6:.2f}" for rank in found]
    kind = "naive" if way == "naive" else "ring"
    predicted = 1e3 * model.predict_seconds(f"all_reduce {kind}", size, 4)
    ms[way] = 1e3 * best_time([rank[way][1] for rank in found])
    gap = f"{ms[way] / predicted - 1:+.0%}"
    rows.append((way, mb[0], mb[3], f"{predicted:.0f}", f"{ms[way]:.0f}", gap))
# Predicted: 2.7 times as long. The rest of the way to 1.5 is for a busy machine.
show.check_timing(
    ms["naive"] > 1.5 * ms["ring"], "naive takes 1.5 times the ring's time"
)
sends = ["rank 0 sends (MB)", "rank 3 sends (MB)"]
show.table(rows, ["way", *sends, "predicted (ms)", "measured (ms)", "difference"])

# %% [markdown]
# The sums are equal, and the naive way takes more than twice as long as the ring.
#
# The plain ring is as fast and sends as many bytes as the module's ring.
# Only the module's ring accepts sizes that the number of ranks does not divide.
#
# ## Rank, world size, local rank, process group
#
# A *rank* is a process, with its own memory, Python interpreter and copy of the program.
# Ranks share no memory: data gets from one rank to another only in a message.
# The number of ranks is the *world size*, $N$.
#
# ![Two nodes with two processes each. Ranks 0 and 1 are on node 0, ranks 2 and 3 on node 1. On each node the local ranks are 0 and 1, and each process has the GPU of its local rank. A process group of ranks 1 and 3 numbers them 0 and 1.](../figures/collectives_groups.svg)
#
# In this course `ranks.run(function, N)` starts $N$ processes and returns their results.
# A real job is started by a launcher, which sets environment variables that tell each process its rank.
# The table shows the variables that `torchrun`, the usual launcher, set for four processes. `torchrun` was started twice on this machine, as if on two nodes, with two processes each.

# %% tags=["hide-input"]
# Starts torchrun twice, as on two nodes; table: each process's variables
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"]
program = f"""
import os, sys
sys.stdout.write(" ".join(os.environ[name] for name in {names}) + "\\n")
"""


def torchrun_on_two_nodes(script):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc-per-node=2",
    ]
    command += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    nodes = [
        subprocess.Popen(
            [*command, f"--node-rank={node}", script],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for node in range(2)
    ]
    try:
        outputs = [node.communicate(timeout=60)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()  # does nothing to one that has ended
    return [line for output in outputs for line in sorted(output.splitlines())]


with tempfile.TemporaryDirectory() as folder:
    script = Path(folder, "who_am_i.py")
    script.write_text(program)
    lines = torchrun_on_two_nodes(script)
assert len(lines) == 4
show.table([line.split() for line in lines], names)


# %% [markdown]
# `LOCAL_RANK` counts within a node, and selects the GPU: `torch.cuda.set_device(LOCAL_RANK)`.
# With `RANK` instead, a process on the second node raises an error, because that node has no GPU 2.
# `GROUP_RANK` is torchrun's name for the node's number.
# Two more variables, `MASTER_ADDR` and `MASTER_PORT`, are the address at which the ranks connect to each other.
#
# | value | torchrun | SLURM's `srun` | Open MPI's `mpirun` |
# |---|---|---|---|
# | rank | `RANK` | `SLURM_PROCID` | `OMPI_COMM_WORLD_RANK` |
# | world size | `WORLD_SIZE` | `SLURM_NTASKS` | `OMPI_COMM_WORLD_SIZE` |
# | local rank | `LOCAL_RANK` | `SLURM_LOCALID` | `OMPI_COMM_WORLD_LOCAL_RANK` |
#
# A *process group* is a list of ranks that communicate with each other.
# The *default group* holds all ranks; `dist.new_group([1, 3])` makes a group of two ranks, which are numbered 0 and 1 in that group.
# Every rank must call `new_group`, even a rank that is not a member.

# %%
def number_in_group():
    pair = dist.new_group([1, 3])
    return dist.get_rank(), dist.get_rank(pair)


print("rank in the world, in the group:", *ranks.run(number_in_group, 4))


# %% [markdown]
# −1 means "not a member".
# All functions below take the group as an argument.
# Some also take a *root*, the one rank that has the input or gets the result: a rank *of the group*.
# Later lessons arrange the ranks as a grid whose rows and columns are such groups.
#
# ## Seven collectives
#
# A *collective* is a call that every rank of a group makes.
# In the pictures a colour stands for the rank that a number comes from; a cell with four stripes is the sum of four ranks' numbers.
#
# ![Broadcast: before, rank 0 alone holds a tensor; after, all four ranks hold it. Reduce: before, each rank holds a tensor of its own; after, rank 0 holds their sum.](../figures/collectives_roots.svg)
#
# **Broadcast** copies the root's tensor to all ranks: initial weights, a seed, a configuration.
# **Reduce** leaves the sum of all ranks' tensors on the root: for example, a loss to print.
#
# ![Before, each of four ranks holds four pieces of its own. After a reduce-scatter, rank r holds the sum of piece r and nothing else. After an all-gather, every rank holds the sums of all pieces. The two together are an all-reduce.](../figures/collectives_halves.svg)
#
# **Reduce-scatter** sums, and leaves one piece of the sum on each rank.
# **All-gather** gives every rank the pieces of all ranks.
# **All-reduce** leaves the whole sum on all ranks: a reduce-scatter, then an all-gather.
# Remember this picture: ZeRO does its optimizer step between the two arrows.
#
# ![All-to-all: before, rank i holds four pieces, one for each rank; after, rank j holds the pieces that all ranks had for it, as if rows became columns. Barrier: ranks arrive at different times, and all go on when the last one, rank 1, has arrived.](../figures/collectives_exchange.svg)
#
# **All-to-all** sends piece $j$ of every rank to rank $j$; lesson [experts](experts.md) sends its tokens this way.
# **Barrier** moves no data: it returns on a rank only when all ranks have called it.
#
# The next cell runs all but the barrier on three ranks.
# Rank 0 begins with 1, 2, 3, rank 1 with 10, 20, 30, and rank 2 with 100, 200, 300.

# %%
def run_tiny():
    group, rank = dist.group.WORLD, dist.get_rank()
    own = torch.tensor([1, 2, 3], device=ranks.device()) * 10**rank
    results = {}
    for name in ("broadcast", "reduce"):
        results[name] = own.clone()
        getattr(collectives, name)(results[name], 0, group)  # in place, root 0
    results["all_reduce"] = own.clone()
    collectives.all_reduce(results["all_reduce"], group)  # in place
    results["reduce_scatter"] = torch.zeros_like(own[:1])
    collectives.reduce_scatter(
        results["reduce_scatter"], collectives.split_evenly(own, 3), group
    )
    for name, given in (
        ("all_gather", own[:1]),
        ("all_to_all", collectives.split_evenly(own, 3)),
    ):
        results[name] = torch.zeros_like(own)
        getattr(collectives, name)(
            collectives.split_evenly(results[name], 3), given, group
        )
    return {name: str(result.tolist()) for name, result in results.items()}


found = ranks.run(run_tiny, 3)

# %% tags=["hide-input"]
# Table: each collective's result on three ranks
assert found[2]["all_reduce"] == "[111, 222, 333]"
rows = [[name, *(rank[name] for rank in found)] for name in found[0]]
rows[1][2:] = ["undefined"] * 2  # only the root's result of a reduce means something
show.table(rows, ["collective", "rank 0", "rank 1", "rank 2"])

# %% [markdown]
# As in `torch.distributed`, the functions return nothing.
# They write the result into the tensor passed, or into the output argument, which comes before the input.
#
# ## Point-to-point messages, and a broadcast along a tree
#
# All collectives here are built from messages: `ranks.isend(tensor, peer, group)` on one side, `ranks.irecv(tensor, peer, group)` on the other.
# Both start a transfer and return a handle, whose `wait()` returns when the transfer is done.
# A send is done when you may change its tensor again.
# With gloo and with NCCL, a send may be done only after the receiver has the tensor.
# With NCCL, moreover, the *first* message between two ranks connects them, and blocks both processes until they are connected.
#
# The root of a broadcast could send to every other rank in turn: $N - 1$ messages one after another.
# But a rank that has received the tensor can send it on.
#
# ![Broadcast to eight ranks in three rounds. Round 1: rank 0 sends to rank 1. Round 2: ranks 0 and 1 send to ranks 2 and 3. Round 3: ranks 0 to 3 send to ranks 4 to 7.](../figures/collectives_tree.svg)
#
# The number of ranks that have the tensor doubles in each round, so $\lceil \log_2 N \rceil$ rounds are enough {cite}`thakur2005mpich`.
# In the code, `offset` is a rank's distance from the root, and `reach` is 1, 2, 4, …

# %%
show.source(collectives.broadcast)

# %% [markdown]
# Reduce uses the same tree in reverse. Reduce followed by broadcast is an all-reduce, called the *tree* below.
# In a barrier, all ranks send at once, over the same distances 1, 2, 4, …
#
# ## The ring, step by step
#
# The tree sends the whole tensor in every message, and half of the ranks wait most of the time.
# The ring {cite}`patarasuk2009ring` cuts the tensor into $N$ pieces and keeps every rank busy in every step.
#
# :::{step-through} The ring all-reduce on four ranks
# 1. ![The start. A table: a row for each of four ranks, a column for each of four pieces. Each rank holds four pieces of its own, in its own colour.](../figures/steps/collectives_1.svg)
#
#    Every rank has a tensor of its own, cut into four pieces.
#
# 2. ![Step 1: rank 0 sends piece 3 to rank 1, rank 1 sends piece 0 to rank 2, rank 2 sends piece 1 to rank 3, rank 3 sends piece 2 to rank 0. Each sent piece is added to the receiver's piece, now the sum over two ranks.](../figures/steps/collectives_2.svg)
#
#    Each rank sends one piece to the next rank, which adds it to its own.
#    No two ranks send the same piece, so all of them send and receive at once.
#
# 3. ![Step 2: rank 0 sends piece 2 to rank 1, rank 1 sends piece 3 to rank 2, rank 2 sends piece 0 to rank 3, rank 3 sends piece 1 to rank 0. Each sent piece is added to the receiver's piece, now the sum over three ranks.](../figures/steps/collectives_3.svg)
#
#    Each rank forwards the sum of two ranks' pieces, and the next rank adds its own piece.
#
# 4. ![Step 3: rank 0 sends piece 1 to rank 1, rank 1 sends piece 2 to rank 2, rank 2 sends piece 3 to rank 3, rank 3 sends piece 0 to rank 0. Each sent piece is added to the receiver's piece, now the sum over all four ranks.](../figures/steps/collectives_4.svg)
#
#    The fourth rank's piece is added: rank 0 has the complete sum of piece 0, rank 1 the sum of piece 1, and so on. This was a reduce-scatter.
#    Each rank has sent three of its four pieces.
#
# 5. ![Step 4: rank 0 sends piece 0 to rank 1, rank 1 sends piece 1 to rank 2, rank 2 sends piece 2 to rank 3, rank 3 sends piece 3 to rank 0. Each sent piece is complete and replaces the receiver's: every rank now has two complete pieces.](../figures/steps/collectives_5.svg)
#
#    Now the complete pieces go around. Nothing is added: an arriving piece replaces the old one.
#
# 6. ![Step 5: rank 0 sends piece 3 to rank 1, rank 1 sends piece 0 to rank 2, rank 2 sends piece 1 to rank 3, rank 3 sends piece 2 to rank 0. Each sent piece is complete and replaces the receiver's: every rank now has three.](../figures/steps/collectives_6.svg)
#
#    Each rank forwards the piece that has just arrived.
#
# 7. ![Step 6: rank 0 sends piece 2 to rank 1, rank 1 sends piece 3 to rank 2, rank 2 sends piece 0 to rank 3, rank 3 sends piece 1 to rank 0. Each sent piece is complete and replaces the receiver's: every rank now has all four.](../figures/steps/collectives_7.svg)
#
#    Every rank has all four sums: this was an all-gather, in which each rank again sent three pieces.
#    In total each rank has sent 6 pieces, each a quarter of its tensor: $2(N-1)/N$ of the tensor.
# :::
#
# A thick outline marks the piece that has just arrived, an arrow its sender.
# Follow piece 0, the first column.
# It starts at rank 1; ranks 2, 3 and 0 add their own, and the sum is complete on rank 0 in step 3.
# In steps 4 to 6 the sum goes around once more, and every rank keeps a copy.
#
# (ring-parity)=
# ### Deadlock in a ring: who sends first
#
# In a ring every rank sends and receives. If all ranks send first, each waits until its neighbour receives, and none receives. With NCCL this always happens, because the first message between two ranks blocks both.
# Two rules avoid it.
#
# - **Parity**: even ranks send first and then receive; odd ranks receive first and then send. Then every send has a matching receive, whatever $N$ is.
# - **One batch**: start a send and a receive with a single call, `dist.batch_isend_irecv`, in which neither waits for the other. `ranks.exchange` does this.
#
# (With gloo, `ranks` sends and receives tensors on a GPU through copies in host memory.)

# %%
show.source(ranks.exchange)

# %% [markdown]
# All-to-all needs only `exchange`: in step $k$, send to the rank $k$ ahead and receive from the rank $k$ behind.

# %%
show.source(collectives.all_to_all)

# %% [markdown]
# ## The core: tree and ring
#
# `python -m shardlab.collectives` averages gradients with each of this module's all-reduces for five steps on two ranks, compares with one process, and prints the bytes sent.
#
# Reduce, the tree all-reduce and the barrier:

# %%
show.source(collectives.reduce, collectives.all_reduce_tree, collectives.barrier)

# %% [markdown]
# In the module's ring, the plain version's two loops are two collectives, pieces may have any sizes, and partial sums are in two buffers, so that the inputs do not change.

# %%
show.source(
    collectives.split_evenly,
    collectives.reduce_scatter,
    collectives.all_gather,
    collectives.all_reduce_ring,
)


# %% [markdown]
# ## The same results as torch.distributed
#
# The table compares our collectives with those of `torch.distributed` on 1 to 4 ranks, with seven random numbers per rank, a size that two, three and four do not divide.
# Each addition rounds its result, with a relative error of at most $u$: $2^{-24}$ in `float32` and $2^{-8}$ in `bfloat16`.
# A sum over $N$ ranks has $N - 1$ additions, and sums in two orders can differ by twice their error.
# So the tolerance is $2(N-1)\,u \sum_r |x_r|$.
# Results that are only copied must be bitwise equal.
# The table has the largest difference on 1 to 4 ranks, and the tolerance on four.

# %% tags=["hide-input"]
# Compares every collective with torch's, on 1 to 4 ranks
def full_tensors(x, group):
    """Yield (name, our result, torch's result) of the in-place collectives."""
    pairs = {
        "broadcast": (collectives.broadcast, dist.broadcast, (0,)),
        "reduce": (collectives.reduce, dist.reduce, (0,)),
    }
    for way, ours in collectives.ALL_REDUCE.items():
        pairs[f"all_reduce, {way}"] = ours, dist.all_reduce, ()
    for name, (ours, torchs, root) in pairs.items():
        a, b = x.clone(), x.cpu().clone()
        ours(a, *root, group)
        torchs(b, *root, group=group)
        if name == "reduce" and dist.get_rank(group) > 0:
            a = b  # undefined on all ranks but the root
        yield name, a, b


def in_pieces(x, group):
    """Yield (name, our result, torch's result) of the collectives on pieces."""
    size, y = dist.get_world_size(group), x.cpu()
    pieces, host_pieces = (
        collectives.split_evenly(x, size),
        collectives.split_evenly(y, size),
    )
    mine = pieces[dist.get_rank(group)]

    a, b = torch.empty_like(mine), torch.empty_like(mine, device="cpu")
    collectives.reduce_scatter(a, pieces, group)
    dist.reduce_scatter(b, host_pieces, group=group)
    yield "reduce_scatter", a, b

    a, everything = torch.empty_like(x), [torch.empty_like(y) for _ in range(size)]
    collectives.all_gather(collectives.split_evenly(a, size), mine, group)
    dist.all_gather(everything, y, group=group)
    b = torch.cat(
        [collectives.split_evenly(t, size)[r] for r, t in enumerate(everything)]
    )
    yield "all_gather", a, b

    a, b = x.new_empty(size * len(mine)), y.new_empty(size * len(mine))
    collectives.all_to_all(collectives.split_evenly(a, size), pieces, group)
    lengths = [len(piece) for piece in pieces]
    dist.all_to_all_single(b, y, [len(mine)] * size, lengths, group=group)
    yield "all_to_all", a, b


ROUNDING = {torch.float32: 2**-24, torch.bfloat16: 2**-8}


def compare_to_torch(dtype):
    group, size = dist.group.WORLD, dist.get_world_size()
    torch.manual_seed(dist.get_rank())
    x = torch.randn(7).to(ranks.device(), dtype)
    magnitude = x.abs().double().cpu()
    dist.all_reduce(magnitude)
    allowed = 2 * (size - 1) * ROUNDING[dtype] * magnitude.max().item()
    found = {}
    for name, a, b in (*full_tensors(x, group), *in_pieces(x, group)):
        found[name] = (a.cpu().double() - b.double()).abs().max().item(), allowed
    return found


table = {}
for dtype in ROUNDING:
    by_size = {size: ranks.run(compare_to_torch, size, dtype) for size in (1, 2, 3, 4)}
    for name in by_size[4][0]:
        gaps = [max(rank[name][0] for rank in found) for found in by_size.values()]
        limits = [found[0][name][1] for found in by_size.values()]
        if name in ("broadcast", "all_gather", "all_to_all"):  # copies
            limits = [0.0] * len(limits)
        assert all(gap <= limit for gap, limit in zip(gaps, limits, strict=True)), (
            name,
            gaps,
        )
        table.setdefault(name, []).extend([f"{max(gaps):.1e}", f"{limits[-1]:.1e}"])
head = [
    f"{dtype}: {what}"
    for dtype in ("float32", "bfloat16")
    for what in ("off by", "allowed")
]
show.table(
    [(name, *cells, "OK") for name, cells in table.items()],
    ["collective", *head, "verdict"],
)


# %% [markdown]
# Copied results do not differ.
# (The course's tests do the same for empty tensors, and for groups whose ranks are not 0, 1, 2, ….)
# Sums differ in the last bits because the order of additions differs: the naive way adds ranks 0, 1, 2, 3; the tree adds (0 + 2) + (1 + 3); the ring begins with another rank for each piece.
#
# Two facts matter more.
# First, after an all-reduce **all ranks hold the same bits**: each piece is summed in one place, then copied.
# Otherwise the replicas of a model would diverge.
# Second, every addition in `bfloat16` rounds to eight bits.
# With a thousand ranks these errors accumulate, so large jobs often reduce gradients in `float32`, at twice the bytes.

# %%
def same_bits():
    results = []
    for way in collectives.ALL_REDUCE:
        torch.manual_seed(dist.get_rank())
        x = torch.randn(1000)
        collectives.all_reduce(x, dist.group.WORLD, way)
        results.append(x)
    return results


found = ranks.run(same_bits, 4, device="cpu")  # CPU: the same bits each time
naive, tree, ring = found[0]
print("the same on ranks 0 and 3:", *map(torch.equal, found[0], found[3]))
differ = (naive != ring).sum().item()
print(f"sums that differ between naive and ring: {differ} of 1000")

# %% tags=["hide-input"]
# Compares the bits of all ranks with rank 0's; checks that the three ways differ
for results in found:
    assert all(map(torch.equal, results, found[0]))
for a, b in ((naive, tree), (naive, ring), (tree, ring)):
    assert not torch.equal(a, b)

# %% [markdown]
# ## Cost: bytes
#
# Let $S$ be the bytes of the tensor and $S_j$ the bytes of piece $j$.
# In the reduce-scatter, rank $r$ sends every piece but its own, $S - S_r$.
# In the all-gather, it sends every piece but the one that it receives last, $S - S_{r+1}$.
# With equal pieces, each of the two sends $\frac{N-1}{N} S$, and the ring all-reduce $2\,\frac{N-1}{N} S$.
# No algorithm can send less {cite}`patarasuk2009ring`.
#
# We count on four ranks, with a tensor of 1,000,003 floats, a number that four does not divide.
# The formulas are exact to the byte on each rank:

# %%
show.source(collectives.count_bytes_sent)


# %% tags=["hide-input"]
# Table: bytes sent in each collective, by the formula and counted
def list_calls(x, group):
    """Return each collective as a function without arguments, on a tensor `x`."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    pieces = collectives.split_evenly(x, size)
    result = [piece.clone() for piece in pieces]
    landed = [torch.empty_like(pieces[rank]) for _ in range(size)]
    return {
        "broadcast": lambda: collectives.broadcast(x, 0, group),
        "reduce": lambda: collectives.reduce(x, 0, group),
        "reduce_scatter": lambda: collectives.reduce_scatter(
            result[rank], pieces, group
        ),
        "all_gather": lambda: collectives.all_gather(result, pieces[rank], group),
        "all_to_all": lambda: collectives.all_to_all(landed, pieces, group),
        **{
            f"all_reduce {way}": lambda way=way: collectives.all_reduce(x, group, way)
            for way in collectives.ALL_REDUCE
        },
    }


ELEMENTS = 1_000_003


def count_bytes():
    counted = {}
    for name, call in list_calls(torch.ones(ELEMENTS), dist.group.WORLD).items():
        with count.record_traffic() as sent:
            call()
        counted[name] = sent.bytes
    return counted


found = ranks.run(count_bytes, 4, device="cpu")  # CPU: counts the module's bytes
rows = []
for name in found[0]:
    counted = [rank[name] for rank in found]
    formula = [
        collectives.count_bytes_sent(name, 4 * ELEMENTS, 4, 4, rank)
        for rank in range(4)
    ]
    off = max(abs(c - f) for c, f in zip(counted, formula, strict=True))
    assert off == 0
    rows.append((name, f"{max(counted):,}", f"{formula[0]:,}", f"{counted[0]:,}", off))
head = ["busiest rank (B)", "rank 0, formula (B)", "rank 0, counted (B)"]
show.table(rows, ["collective", *head, "difference (B)"])


# %% [markdown]
# The busiest rank decides the time, because the others wait for it.
# In the naive way rank 0 sends three times the tensor; in the ring all ranks send about the same number of bytes.
#
# With more ranks, the bytes that each rank of the ring sends approach $2S$, but never reach it.
#
# ```{predict}
# :row: 1024
# :column: ring sends per rank, formula (S)
#
# In a ring all-reduce of S bytes on two ranks, each rank sends 1 S. How many S does each of 1,024 ranks send?
# ```

# %% tags=["hide-input"]
# Table: bytes that each rank of the ring sends on 2 to 1,024 ranks
def ring_bytes_sent(elements):
    with count.record_traffic() as sent:
        collectives.all_reduce(torch.ones(elements), dist.group.WORLD)
    return sent.bytes


rows = []
for size in (2, 3, 4, 8, 64, 1024):
    nbytes = 4 * 3072  # 2, 3, 4, 8, 64 and 1024 divide 3072
    formula = (
        collectives.count_bytes_sent("all_reduce ring", nbytes, 4, size, 0) / nbytes
    )
    counted = "–"
    if size <= 8:
        # CPU: counts the module's bytes
        counted = ranks.run(ring_bytes_sent, size, 3072, device="cpu")[0] / nbytes
        assert counted == formula
        counted = f"{counted:.3f}"
    rows.append((size, f"{formula:.3f}", counted))
show.table(rows, ["ranks", "ring sends per rank, formula (S)", "counted (S)"])

# %% [markdown]
# ````{admonition} Only if latency dominates: "the cost of an all-reduce grows with the number of ranks"
# :class: checked
#
# The bytes that each rank of the ring sends stay below 2 S: 1 S on two ranks, 1.5 S on four, 1.75 S on eight (the cell above).
# The number of steps, $2(N-1)$, grows, and with it the latency.
# ````
#
# ### Bytes counted by the network interface
#
# So far we have counted our own calls, not the bytes on the network.
# The operating system counts the bytes that its loopback interface transmits.
# We read this counter before and after each of our collectives, and each of `torch.distributed`'s on gloo. Bytes are per rank, in units of $S$ = 16 MiB.
#
# ```{predict}
# :row: reduce_scatter
# :column: gloo, on the wire (S)
#
# A reduce-scatter over four ranks needs 0.75 S from each. How many S does gloo put on the wire?
# ```

# %% tags=["hide-input", "measured"]
# Table: bytes on the loopback interface, ours and gloo's
MIB = 2**20


def list_torch_calls(x, group):
    size = dist.get_world_size(group)
    pieces, piece = list(x.chunk(size)), torch.empty_like(x.chunk(size)[0])
    parts, landed = [torch.empty_like(piece) for _ in range(size)], torch.empty_like(x)
    return {
        "all_reduce ring": lambda: dist.all_reduce(x, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter(piece, pieces, group=group),
        "all_gather": lambda: dist.all_gather(parts, piece, group=group),
        "all_to_all": lambda: dist.all_to_all_single(landed, x, group=group),
    }


def count_wire_bytes(make, names):
    """Return loopback bytes per rank, the least of five: other programs add bytes."""
    functions, found = make(torch.ones(16 * MIB // 4), dist.group.WORLD), {}
    for name in names:
        readings = []
        for _ in range(5):
            dist.barrier()
            before = count.read_loopback_bytes()
            dist.barrier()
            functions[name]()
            dist.barrier()
            after = count.read_loopback_bytes()
            dist.barrier()
            readings.append((after or 0) - (before or 0))
        found[name] = min(readings) / dist.get_world_size()
    return found


kinds = ["all_reduce ring", "reduce_scatter", "all_gather", "all_to_all"]
# CPU: bytes on loopback
ours = ranks.run(count_wire_bytes, 4, list_calls, kinds, device="cpu")[0]
# CPU: bytes on loopback
theirs = ranks.run(count_wire_bytes, 4, list_torch_calls, kinds, device="cpu")[0]
rows = []
for name in kinds:
    formula = collectives.count_bytes_sent(name, 16 * MIB, 4, 4, 0) / (16 * MIB)
    seen, gloos = ours[name] / (16 * MIB), theirs[name] / (16 * MIB)
    if seen:
        # On Linux. Headers and other programs only add: never below the formula.
        show.check_timing(
            formula <= seen < 1.25 * formula, f"{name}: the formula's bytes, +25 %"
        )
        as_much = (gloos > 1.4) == (name in kinds[:2])
        show.check_timing(
            as_much, f"{name}: gloo reduces by all-reduce, and gathers directly"
        )
    gap = f"{seen / formula - 1:+.1%}"
    rows.append((name, f"{formula:.3f}", f"{seen:.3f}", gap, f"{gloos:.3f}"))
head = ["formula (S)", "ours, on the wire (S)", "difference", "gloo, on the wire (S)"]
show.table(rows, ["collective", *head])

# %% [markdown]
# ````{admonition} Only if the backend is not gloo: "a reduce-scatter moves half of what an all-reduce moves"
# :class: checked
#
# Ours does: 0.75 S against 1.5 S.
# gloo's does not: it sends 1.5 S, because it runs an all-reduce, and each rank keeps one piece of the result (the cell above).
# NCCL's, which GPUs use, moves half, as ours does {cite}`nvidia2026nccltests`.
# So a technique that uses reduce-scatter, such as ZeRO, looks worse on gloo than it is: do not judge it by gloo's times.
# ````
#
# ## Cost: seconds
#
# A message of $S$ bytes takes $\alpha + \beta S$ seconds: $\alpha$ is the latency, $\beta$ the time per byte {cite}`hockney1994communication`.
# The time of each collective follows from two counts: the latencies and the bytes that come one after another (*in series*):
#
# | collective | latencies in series | bytes in series |
# |---|---|---|
# | broadcast, reduce | $\lceil \log_2 N \rceil$ | $\lceil \log_2 N \rceil\, S$ |
# | reduce-scatter, all-gather, all-to-all | $N - 1$ | $\frac{N-1}{N} S$ |
# | all-reduce, naive | $N$: $N-1$ to receive, one to send to all at once | $2(N-1)\, S$ |
# | all-reduce, tree | $2 \lceil \log_2 N \rceil$ | $2 \lceil \log_2 N \rceil\, S$ |
# | all-reduce, ring | $2(N - 1)$ | $2\,\frac{N-1}{N} S$ |
# | barrier | $\lceil \log_2 N \rceil$ | $0$ |

# %%
show.source(collectives.critical_path, collectives.CostModel, fold=40)

# %% [markdown]
# $\alpha$ and $\beta$ of a link are fitted to measured times of single messages.
# We fit two links: the emulated link, whose numbers we know, and this machine's loopback.
# Messages of 16 B to 64 MiB go back and forth, several in a row, each from memory that is not in the caches.
# The *typical* error is the median over the twelve sizes.

# %% tags=["hide-input", "measured"]
# Table: latency and bandwidth of two links, fitted to single messages
SIZES = [16 * 4**k for k in range(12)]  # 16 B to 64 MiB


def ping_pong(slow, passes):
    """Return the seconds of one message of each size, the fastest of some passes."""
    group = link.create_slow_group(LATENCY, BANDWIDTH) if slow else dist.group.WORLD
    memory = torch.ones(128 * MIB, dtype=torch.uint8)
    seconds = {size: [] for size in SIZES}
    for _ in range(passes):
        for size in SIZES:
            if slow and size > MIB and seconds[size]:
                continue  # seconds long: once is enough
            train = 1 if slow else max(2, min(64, 8 * MIB // size))
            cars = [memory[64 * MIB // train * i :][:size] for i in range(train)]
            dist.barrier()
            for car in [memory[:16], *cars]:
                if car is cars[0]:  # the clock starts after a round that does not count
                    start = time.perf_counter()
                for sender in (0, 1):
                    if dist.get_rank() == sender:
                        ranks.isend(car, 1 - sender, group).wait()
                    else:
                        ranks.irecv(car, sender, group).wait()
            seconds[size].append((time.perf_counter() - start) / (2 * train))
    return [min(seconds[size]) for size in SIZES]


measured = {
    # CPU: times are gloo's
    "slow link": ranks.run(ping_pong, 2, True, 2, device="cpu")[0],
    # CPU: times are gloo's
    "loopback": ranks.run(ping_pong, 2, False, 2, device="cpu")[0],
}
fits = {name: CostModel.fit(SIZES, seconds) for name, seconds in measured.items()}


def relative_errors(name):
    return [
        fits[name].predict_seconds("message", size) / seconds - 1
        for size, seconds in zip(SIZES, measured[name], strict=True)
    ]


rows = []
for name, fit in fits.items():
    off = sorted(map(abs, relative_errors(name)))
    alpha, rate = f"{1e6 * fit.latency:,.0f}", f"{fit.bandwidth / 1e6:,.0f}"
    rows.append((name, alpha, rate, f"{off[6]:.0%}", f"{off[-1]:.0%}"))
# The slow link's numbers are known. 20 %: a busy machine wakes a process up late.
slow = fits["slow link"]
typical = {name: sorted(map(abs, relative_errors(name)))[6] for name in fits}
off = abs(slow.latency / LATENCY - 1), abs(slow.bandwidth / BANDWIDTH - 1)
show.check_timing(
    max(off) < 0.2, "the fit finds the slow link's two numbers within 20 %"
)
show.check_timing(typical["slow link"] < 0.1, "the slow link is predicted within 10 %")
show.check_timing(typical["loopback"] < 0.5, "loopback is predicted within 50 %")
show.table(rows, ["link", "α (µs)", "1/β (MB/s)", "typical error", "largest error"])

# %% tags=["hide-input", "measured"]
# Plots measured times of messages and the fitted lines
figure, axes = plt.subplots(figsize=(4.9, 3.4))
for (name, fit), color in zip(fits.items(), show.RANK_COLORS, strict=False):
    axes.plot(SIZES, measured[name], "o", color=color, ms=5)
    axes.plot(
        SIZES,
        [fit.predict_seconds("message", size) for size in SIZES],
        color=color,
        lw=1.5,
    )
    axes.text(SIZES[0], 1.5 * fit.latency, name, va="bottom")
axes.set_title("dots measured, lines fitted", fontsize="medium")
axes.set(xscale="log", yscale="log", xlabel="message (bytes)", ylabel="time (s)")
axes.set_ylim(top=3)
show.figure(
    figure,
    "Time of one message against its size, on logarithmic scales. On the slow link the "
    "measured dots lie on the fitted line; on loopback some lie beside it.",
    "collectives-fit",
)

# %% [markdown]
# On the slow link the line goes through the dots, within a few percent.
# On loopback the line's error is usually many times larger, and differs from run to run.
# A loopback message is a copy through the kernel's buffers: fast if it fits into the processor's caches, slower if not, and slower still when another process needs the core.
# Two parameters cannot describe this.
# So trust a fitted loopback model within a factor of two or so, and only for the sizes that it was fitted to.
# And do not use it for four ranks on two cores: the model ignores that ranks share cores.
#
# ### Ring or tree: the size at which they cross
#
# The ring is faster than the tree above the size $S^*$ at which their times are equal:
#
# $$S^* = \frac{2(N-1) - 2\lceil\log_2 N\rceil}{2\lceil\log_2 N\rceil - 2(N-1)/N} \cdot \frac{\alpha}{\beta}$$
#
# Below $S^*$ latency dominates, and the ring has more latencies than the tree.
# For four ranks $S^*$ is 0.8 times $\alpha/\beta$.
# On our slow link $\alpha/\beta$ is 500 kB, the bytes that the link could send during one latency.

# %%
LENGTHS = [16384 * 4**k for k in range(5)]  # bytes: 16 KiB to 4 MiB


def time_algorithms():
    wire, seconds = link.create_slow_group(LATENCY, BANDWIDTH), {}
    for _ in range(2):
        for size in LENGTHS:
            x = torch.zeros(size // 4)
            for way in collectives.ALL_REDUCE:
                once = time_call(partial(collectives.all_reduce, x, wire, way), 1)
                seconds.setdefault((way, size), []).extend(once)
    return seconds


# %% [markdown]
# Each time in the picture is the faster of two, from the first rank's start to the last rank's end.

# %% tags=["hide-input", "measured"]
# Measures the three all-reduces, and plots them with the predictions
# CPU: times of the CPU's work and a wire
found = ranks.run(time_algorithms, 4, device="cpu")
timed = {key: best_time([rank[key] for rank in found]) for key in found[0]}
predicted = {
    (way, size): model.predict_seconds(f"all_reduce {way}", size, 4)
    for way, size in timed
}
# No time is below the link's (1 %: rounding). A busy machine adds at most 25 % in half
# of the cases.
over = sorted(timed[key] / predicted[key] for key in timed)
assert over[0] > 0.99
show.check_timing(
    over[len(over) // 2] < 1.25, "half of the cases within 25 % of the prediction"
)
(small, large), ring, tree = (LENGTHS[0], LENGTHS[-1]), "ring", "tree"
show.check_timing(
    timed[tree, small] < timed[ring, small], "small: the tree is faster"
)  # 0.68
show.check_timing(
    timed[ring, large] < timed[tree, large], "large: the ring is faster"
)  # 0.49
figure, axes = plt.subplots(figsize=(4.9, 3.4))
for way, color in zip(collectives.ALL_REDUCE, show.RANK_COLORS, strict=False):
    axes.plot(
        LENGTHS,
        [1e3 * timed[way, size] for size in LENGTHS],
        "o",
        color=color,
        ms=5,
    )
    line = [1e3 * predicted[way, size] for size in LENGTHS]
    axes.plot(LENGTHS, line, color=color, lw=1.5)
    axes.text(1.15 * LENGTHS[-1], line[-1], way, va="center")
crossing = model.find_crossover(4)
axes.axvline(crossing, color=show.INK, lw=1, ls=(0, (2, 2)))
axes.text(0.9 * crossing, 300, f"ring = tree at {crossing / 1e3:.0f} kB", ha="right")
axes.set_title("dots measured, lines predicted", fontsize="medium", pad=14)
axes.set(
    xscale="log",
    yscale="log",
    xlabel="tensor (bytes)",
    ylabel="all-reduce on 4 ranks (ms)",
)
show.figure(
    figure,
    "Time of an all-reduce on four ranks of the slow link against the tensor's size: "
    "lines predicted, dots measured. The ring is the slowest for small tensors, and "
    "the fastest above 400 kB.",
    "collectives-race",
)

# %% [markdown]
# ````{admonition} Only if the tensor is large: "the ring is the fastest all-reduce"
# :class: checked
#
# At 16 KiB the prediction is 20.7 ms for the tree and 30.2 ms for the ring; the tree wins in the measurement, too (the picture above).
# The crossing at 400 kB is a prediction. The measurement shows only that the tree wins at the left end of the picture, and the ring at the right end.
# ````
#
# At the left end the naive way is as fast as the tree: on four ranks both wait for four latencies.
# On more ranks it is slower, because its latencies grow with $N$.
#
# Compared with the slow link, a real cluster (10 µs, 25 GB/s) has 1/500 of the latency and 1/250 of the time per byte: $\alpha/\beta$ is 250 kB, and the crossing is halved.
# The crossing moves up with the number of ranks, because the ring's latencies grow with $N$ and the tree's with $\log_2 N$.
# The table has predictions for such a cluster. At 1 MB the number of ranks decides whether tree or ring is faster.

# %% tags=["hide-input"]
# Table: tree and ring on a real cluster, predicted
cluster = CostModel(latency=10e-6, bandwidth=25e9)
rows = []
for ranks_in_all in (8, 64, 1024):
    times = [
        f"{1e3 * cluster.predict_seconds(f'all_reduce {way}', nbytes, ranks_in_all):,.2f}"
        for nbytes in (1e3, 1e6, 1e9)
        for way in ("tree", "ring")
    ]
    rows.append(
        (ranks_in_all, *times, f"{cluster.find_crossover(ranks_in_all) / 1e6:.1f}")
    )
head = [
    f"{way}, {name} (ms)"
    for name in ("1 kB", "1 MB", "1 GB")
    for way in ("tree", "ring")
]
show.table(rows, ["ranks", *head, "crossing (MB)"])


# %% [markdown]
# Libraries therefore choose by size: trees for small tensors, rings for large tensors.
#
# The output of `nccl-tests` has two bandwidths.
# *algbw* is $S$ divided by the seconds.
# *busbw* is algbw times $2(N-1)/N$ for an all-reduce, so that busbw can be compared with the link's nominal bandwidth, whatever $N$ is {cite}`nvidia2026nccltests`.
#
# ## Our times compared with gloo's
#
# Your own code calls `torch.distributed`, not this module.
# The table compares the times of both for 16 MiB on four ranks of this machine, run alternately.

# %% tags=["hide-input", "measured"]
# Measures our collectives and gloo's
def side_by_side():
    x = torch.zeros(16 * MIB // 4)
    ours, theirs = (
        list_calls(x, dist.group.WORLD),
        list_torch_calls(x, dist.group.WORLD),
    )
    times = {}
    for _ in range(5):
        for name in theirs:
            for who, functions in (("ours", ours), ("theirs", theirs)):
                times.setdefault((name, who), []).extend(time_call(functions[name], 1))
    return times


found = ranks.run(side_by_side, 4, device="cpu")  # CPU: times are gloo's
rows = []
for name in kinds:
    mine, gloos = (
        best_time([rank[name, who] for rank in found]) for who in ("ours", "theirs")
    )
    rows.append(
        (name, f"{1e3 * mine:.0f}", f"{1e3 * gloos:.0f}", f"{mine / gloos:.2f}")
    )
# In a reduce-scatter gloo moves twice our bytes, in an all-reduce the same.
show.check_timing(
    float(rows[1][3]) < float(rows[0][3]), "we gain more in a reduce-scatter"
)
show.table(rows, ["collective", "ours (ms)", "torch with gloo (ms)", "ours / torch"])


# %% [markdown]
# These are times of copies within one machine, possibly with more ranks than cores, and say nothing about a network.
# They show that for large messages a Python loop is nearly as fast as a C++ library, and that gloo's reduce-scatter is slow because it runs an all-reduce.
#
# The same calls in PyTorch:
#
# | this lesson | torch.distributed |
# |---|---|
# | `broadcast(x, root, group)` | `dist.broadcast(x, src, group)`; `src` is a rank of the *world* |
# | `all_reduce(x, group)` | `dist.all_reduce(x, group=group)` |
# | `reduce_scatter(out, pieces, group)` | `dist.reduce_scatter_tensor(out, x, group=group)` |
# | `all_gather(pieces, x, group)` | `dist.all_gather_into_tensor(out, x, group=group)` |
# | `all_to_all(outs, ins, group)` | `dist.all_to_all_single(out, x, group=group)` |
# | `barrier(group)` | `dist.barrier(group)` |
#
# Each also takes `async_op=True` and then returns a handle: lesson [data_parallel](data_parallel.md) computes during the transfer.
#
# PyTorch's reductions take other operations than `SUM`: `AVG`, the sum divided by the number of ranks, as for gradients, and `MIN` and `MAX`, element by element.
# A `MIN` of each rank's number of remaining batches tells all ranks when the first rank runs out of data.

# %%
def run_reductions():
    results = {}
    for op in ("SUM", "AVG", "MIN", "MAX"):
        x = torch.tensor([1.0, 5.0, -1.0], device=ranks.device()) * 2 ** dist.get_rank()
        dist.all_reduce(x, getattr(dist.ReduceOp, op))
        results[op] = x.tolist()
    return results


found = ranks.run(run_reductions, 4)
for op, result in found[0].items():
    print(op, result)

# %% tags=["hide-input"]
# Compares the reductions of every rank with one process's
given = torch.tensor([[1.0, 5.0, -1.0]]) * torch.tensor([[1], [2], [4], [8]])
wanted = {"SUM": given.sum(0), "AVG": given.mean(0), "MIN": given.amin(0), "MAX": given.amax(0)}
assert all(rank == {op: x.tolist() for op, x in wanted.items()} for rank in found)


# %% [markdown]
# ## What goes wrong
#
# Every rank has to make the same calls, in the same order, with the same sizes.
# Nothing checks this. Four mistakes and their symptoms:
#
# ![Four mistakes. Different order: rank 1 begins with a broadcast, the others with an all-reduce. One rank missing: rank 2 does not call, and the others wait. Different shapes: rank 2 sums three numbers, the others four. No error: rank 0 sums a, then b, rank 1 b, then a; no rank waits, and both sums are a + b.](../figures/collectives_mistakes.svg)

# %% tags=["hide-input"]
# Runs a function that must fail, and prints the error message
def catch_failure(function):
    """Run on four ranks and print the error message of `ranks.run`."""
    try:
        # CPU: gloo, whose ranks can be asked
        ranks.run(function, 4, timeout=2, device="cpu", show=False, own_processes=True)
    except ranks.RankError as error:
        for line in str(error).splitlines():
            print(textwrap.fill(line, 84))
        return error.ranks
    raise AssertionError("this was meant to fail")


# %% [markdown]
# **Different order.** Rank 1 calls broadcast first; the others begin with all-reduce.

# %%
def other_order():
    x = torch.ones(4)
    if dist.get_rank() == 1:
        dist.broadcast(x, 0)
        dist.all_reduce(x)
    else:
        dist.all_reduce(x)
        dist.broadcast(x, 0)


blamed = catch_failure(other_order)

# %% tags=["hide-input"]
# Checks that the message names the rank at fault
assert blamed == [1]


# %% [markdown]
# **One rank missing.** A collective is called under a condition that is true on only some ranks.
# The usual form is `if rank == 0: save()`, where `save` contains a collective.

# %%
def one_missing():
    x = torch.ones(4)
    if dist.get_rank() != 2:
        dist.all_reduce(x)


blamed = catch_failure(one_missing)

# %% tags=["hide-input"]
# Checks that the message names the rank at fault
assert blamed == [2]


# %% [markdown]
# **Different shapes.** Rank 2 has three numbers, and the others have four, for example because its last batch is short, or because a vocabulary was padded on one rank.

# %%
def other_shapes():
    x = torch.ones(3 if dist.get_rank() == 2 else 4)
    dist.all_reduce(x)


blamed = catch_failure(other_shapes)

# %% tags=["hide-input"]
# Checks that the message names the rank at fault
assert blamed == [2]


# %% [markdown]
# **No error at all.** The worst mistake: two ranks call two all-reduces of the same size in different orders.
# Rank 0 sums `a` then `b`, rank 1 sums `b` then `a`.
# Nothing hangs, and both sums are wrong.

# %%
def swap_calls():
    a, b = torch.tensor([1.0]), torch.tensor([100.0])
    first, second = (a, b) if dist.get_rank() == 0 else (b, a)
    dist.all_reduce(first)
    dist.all_reduce(second)
    return a.item(), b.item()


found = ranks.run(swap_calls, 2, device="cpu")  # CPU: a mix-up that gloo lets pass
print("sums of a and b on rank 0:", *found[0], "(right: 2 and 200)")

# %% tags=["hide-input"]
# Checks that both ranks' sums are a + b
assert found == [(101.0, 101.0)] * 2


# %% [markdown]
# Without `ranks.run` you see none of these messages.
# The job makes no progress, every GPU may show 100 % (NCCL busy-waits), and after the timeout, 10 minutes with NCCL and 30 with gloo unless you set another, the ranks that are *not* at fault raise an error.
# With a timeout of one second, rank 0 reports this error when rank 1 is late:

# %%
def run_late_rank():
    group = dist.new_group(timeout=timedelta(seconds=1))
    if dist.get_rank() == 1:
        time.sleep(2)
        return None
    try:
        dist.all_reduce(torch.ones(4), group=group)
    except RuntimeError as error:
        return str(error).splitlines()[0].split("] ")[-1]


# CPU: gloo's own words
message = ranks.run(run_late_rank, 2, device="cpu", show=False)[0]
print(message)

# %% tags=["hide-input"]
# Checks gloo's error message
assert "Timed out" in message

# %% [markdown]
# The message names neither the rank at fault nor the line.
# To find both in a real job:
#
# - set a short `timeout=` in `init_process_group`, so that a hanging job stops soon;
# - look at each rank's stack (`py-spy dump --pid …`): the rank whose stack differs is at fault;
# - `TORCH_DISTRIBUTED_DEBUG=DETAIL` makes PyTorch compare names and shapes before each collective, and name the rank that differs;
# - `dist.monitored_barrier()` (gloo only) names the rank that is missing.
#
# ## Naive, tree and ring compared
#
# | all-reduce | advantages | disadvantages |
# |---|---|---|
# | naive | adds in rank order, as one process would | rank 0 sends $(N-1) S$: three times the tensor on 4 ranks, 1,023 times on 1,024 |
# | tree | $2\lceil\log_2 N\rceil$ latencies: 20 on 1,024 ranks | the busiest rank sends $\lceil\log_2 N\rceil\, S$ in the broadcast alone: 2 S on 4 ranks; half the ranks are idle |
# | ring | less than 2 S per rank for any $N$, all links busy; its halves, reduce-scatter and all-gather, are useful on their own | $2(N-1)$ latencies: 2,046 on 1,024 ranks, 20 ms at 10 µs each |
#
# ```{admonition} On more GPUs
# :class: note
#
# Bytes, messages and results on this page hold for any machine; the seconds are those of a loopback and of an emulated link, because all ranks share one machine.
# A second GPU would add a real link: fit $\alpha$ and $\beta$ to it to find the size at which ring and tree cross.
# With NCCL you could also watch its choice of algorithm change with the size.
# ```
#
# ## Exercises
#
# ```{exercise-start} Bytes of a ring (easy)
# :label: ex-collectives-ring-bytes
# ```
#
# Four ranks all-reduce ten `float32` numbers with the ring.
# How many bytes does rank 0 send?

# %%
check(..., "ring_bytes")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-collectives-ring-bytes
# :label: sol-collectives-ring-bytes
# :class: dropdown
# ```
#
# The pieces have 3, 3, 2 and 2 elements, so 12, 12, 8 and 8 bytes.
# Rank 0 sends all pieces but its own in the reduce-scatter, and all but rank 1's in the all-gather.

# %%
check((40 - 12) + (40 - 12), "ring_bytes")


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} All-reduce with a maximum (medium)
# :label: ex-collectives-max
# ```
#
# Write an all-reduce that leaves the element-wise *maximum* on all ranks, in place.
# Loss scaling in mixed precision needs such an all-reduce, to find out if any rank has an infinite gradient.
# You may use `ranks.isend`, `ranks.irecv` and `ranks.exchange`, and everything in this lesson's module. Like the lesson's functions, it must not hang with NCCL.

# %%
def all_reduce_max(tensor, group):
    pass  # your code


check(all_reduce_max)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-collectives-max
# :label: sol-collectives-max
# :class: dropdown
# ```
#
# The shortest way gathers all tensors and takes the maximum on each rank: each rank sends $(N - 1) S$, which is fine for a few numbers.
# For large tensors, change one line of the ring: replace `add_` by `torch.maximum`.

# %%
def all_reduce_max(tensor, group):
    everyones = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    collectives.all_gather(everyones, tensor, group)
    tensor.copy_(torch.stack(everyones).amax(dim=0))


check(all_reduce_max)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Find the deadlock (medium)
# :label: ex-collectives-shift
# ```
#
# Every rank should send its tensor to the next rank, and return the previous rank's tensor.
# This function looks right, but hangs. Repair the function so that it works on any number of ranks, with NCCL too: [by parity, or in one batch](#ring-parity).

# %%
def shift(tensor, group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    received = torch.empty_like(tensor)
    ranks.isend(tensor, (rank + 1) % size, group).wait()
    ranks.irecv(received, (rank - 1) % size, group).wait()
    return received


check(shift)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-collectives-shift
# :label: sol-collectives-shift
# :class: dropdown
# ```
#
# Each rank waits until its send is done, and a send is done when the neighbour receives; but all ranks are sending.
# With gloo it is enough to start a send, then a receive, and to wait for both afterwards. With NCCL it is not: starting a send already blocks until the neighbour connects, and the neighbour is blocked for the same reason.
# With parity, every send has a matching receive.

# %%
def shift(tensor, group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    received = torch.empty_like(tensor)
    after, before = (rank + 1) % size, (rank - 1) % size
    if rank % 2 == 0:
        ranks.isend(tensor, after, group).wait()
        ranks.irecv(received, before, group).wait()
    else:
        ranks.irecv(received, before, group).wait()
        ranks.isend(tensor, after, group).wait()
    return received


check(shift)


# %% [markdown]
# `ranks.exchange(tensor, after, received, before, group).wait()` in place of the `if` does the same in one batch, in which the second message does not wait for the first.
#
# ```{solution-end}
# ```
#
# ```{exercise-start} A broadcast for large tensors (hard)
# :label: ex-collectives-broadcast
# ```
#
# In the tree, the root of a broadcast to four ranks sends 2 S, and to 1,024 ranks 10 S.
# Write a broadcast in which no rank ever sends more than $2\,\frac{N-1}{N} S$, in pieces of $S/N$.
# It must work in place, for any root, and with NCCL. Hint: which collective turns "one piece on each rank" into "everything on every rank"?

# %%
def broadcast_large(tensor, root, group):
    pass  # your code


check(broadcast_large)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-collectives-broadcast
# :label: sol-collectives-broadcast
# :class: dropdown
# ```
#
# Scatter, then all-gather: {cite}`thakur2005mpich` call this van de Geijn's algorithm.
# The root sends each rank its piece, and the ring gathers all pieces on all ranks. The link then carries about $2S$ in series; with the tree it carries $\lceil\log_2 N\rceil\, S$.

# %%
def broadcast_large(tensor, root, group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    pieces = collectives.split_evenly(tensor, size)
    if rank == root:
        for peer in range(size):
            if peer != root:
                ranks.isend(pieces[peer], peer, group).wait()
    else:
        ranks.irecv(pieces[rank], root, group).wait()
    collectives.all_gather(pieces, pieces[rank], group)


check(broadcast_large)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} How large should a bucket be? (design)
# :label: ex-collectives-bucket
# ```
#
# Gradients are joined into buckets, and a ring all-reduces each of them on `size` ranks. A message takes `latency` seconds plus its bytes divided by `bandwidth` (bytes per second).
# Return the smallest bucket, in bytes, whose all-reduce spends at most `fraction` of its time on latency (0.1: a tenth). Assume equal pieces.
# What does the formula say about buckets on a thousand ranks?

# %%
def my_bucket_bytes(size, latency, bandwidth, fraction):
    pass  # your code


check(my_bucket_bytes)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-collectives-bucket
# :label: sol-collectives-bucket
# :class: dropdown
# ```
#
# There are $2(N-1)$ messages, each an $N$-th of the bucket's $n$ bytes. Latency is a fraction $\alpha / (\alpha + \beta n / N)$ of the time, whatever the number of messages.
# So $n = N \frac{\alpha}{\beta} \frac{1 - \text{fraction}}{\text{fraction}}$: on a thousand ranks buckets have to be a hundred times as large as on ten, or the ring is the wrong algorithm.

# %%
def my_bucket_bytes(size, latency, bandwidth, fraction):
    return size * latency * bandwidth * (1 - fraction) / fraction


check(my_bucket_bytes)

# %% [markdown]
# ```{solution-end}
# ```
#
# ## Summary
#
# - Ranks share no memory; a process group is a list of ranks, and a collective is a call that all of them make.
# - All-reduce is reduce-scatter, then all-gather.
# - The ring sends $2(N-1)/N$ of the tensor per rank, the least possible, in $2(N-1)$ steps.
# - The tree takes $2\lceil\log_2 N\rceil$ rounds of the whole tensor: faster than the ring below the crossing, slower above.
# - $\alpha + \beta S$ predicts times on the emulated link within a few percent, on a machine's loopback only roughly.
# - The order of additions changes the last bits of a sum; all ranks still hold the same bits.
# - All ranks make the same calls, in the same order, with the same sizes: otherwise the job hangs or, worse, goes on with wrong numbers. In a ring, send and receive by parity or in one batch.
#
# ## Further reading
#
# - {cite}`thakur2005mpich` compares the algorithms of each collective, with the cost model of this lesson; section 4 is the source of most of our code.
# - {cite}`patarasuk2009ring` proves that no algorithm can send less than the ring.
# - {cite}`sergeev2018horovod` brought the ring to deep learning.
# - {cite}`hockney1994communication` is the source of the cost model with latency and bandwidth.
# - {cite}`nvidia2026nccltests` explains bus bandwidth, collective by collective.
