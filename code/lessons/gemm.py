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
# # One matrix product on many GPUs
#
# After this lesson you can
#
# - divide a matrix product among ranks in three ways, or on a grid of ranks, and say what each way sends;
# - predict the exact number of bytes that a rank holds and sends;
# - predict, from three measured numbers, the size above which splitting a product pays;
# - read from a roofline whether an operation is limited by memory or by arithmetic.
#
# A puzzle: each GPU computes 400 TFLOP/s and sends 200 GB/s to the others, without latency.
# Together they multiply two matrices of 16-bit numbers with 2,000 rows and columns, and every GPU needs the result.
# Two GPUs take as long as one GPU; so do 64 GPUs.
# This lesson derives the 2,000.
#
# ## A product that does not fit

# %% tags=["hide-input"]
# Imports, and two random matrices that are the same on every rank
import statistics

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F

from shardcourse.exercises import check
from shardlab import collectives, gemm, ranks
from shardlab.common import show
from shardlab.common.show import plots
from shardlab.measure import count, link
from shardlab.measure.count import speed

show.set_style()


def make_matrices(M, K, N, dtype=torch.float32):
    """Return two random matrices, a_MK and b_KN, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    a_MK, b_KN = (torch.randn(*s, generator=generator) for s in ((M, K), (K, N)))
    return a_MK.to(ranks.device(), dtype), b_KN.to(ranks.device(), dtype)


# %% [markdown]
# [Tensor parallelism](tensor_parallel.md) applies this lesson to a transformer.
#
# The last matrix product of a language model is its largest: its result has tokens × vocabulary entries.
# Here there are 2,048 tokens, a hidden size of 512, and a vocabulary of 8,192.
# In float32 the three matrices take 88 MB, and we limit a rank's memory to 40 MB.
#
# In this lesson sizes have the names of linear algebra: $C_{MN} = A_{MK}\,B_{KN}$.
# A lower-case letter is one rank's share of a dimension: `a_mK` has $m$ of the $M$ rows of $A$.
# The number of ranks is $t$.

# %%
M, K, N = 2048, 512, 8192
BUDGET = 40e6  # bytes on each rank

needed = gemm.predict_cost("rows", M, N, K, ranks=1).peak_bytes
try:
    gemm.check_budget(needed, BUDGET, f"[{M}, {K}] @ [{K}, {N}]")
except gemm.MemoryBudgetError as error:
    print(f"{type(error).__name__}: {error}")

# %% [markdown]
# A GPU's budget is its memory; exceeding it raises an error, too:

# %% tags=["hide-input"]
# Tries a product that is too large for a GPU, if there is one
assert needed > BUDGET


def exceed_gpu_memory():
    side = int((torch.cuda.mem_get_info()[1] / 4) ** 0.5) + 1024
    a, b = (torch.zeros(shape, device="cuda") for shape in ((side, 8), (8, side)))
    try:
        a @ b  # [side, 8] @ [8, side]: the result alone is more than the GPU has
    except torch.OutOfMemoryError as error:
        return ". ".join(str(error).split(". ")[:3])
    raise AssertionError("this was meant to fail")


if ranks.choose_backend(1)[1] == "cuda":
    print(ranks.run(exceed_gpu_memory, 1)[0])
else:
    print("There is no GPU here: the budget stands in for it.")


# %% [markdown]
# ## Three ways to cut: by rows, columns or the inner dimension
#
# A product has three dimensions, $M$, $N$ and $K$, and can be cut (*sharded*) along any of them.
#
# ![Three ways to share C = A @ B among four ranks. By rows: each rank has a quarter of A's rows and all of B, and makes a quarter of C's rows. By columns: each has all of A and a quarter of B's columns, and makes a quarter of C's columns. By the inner dimension: each has a quarter of A's columns and of B's rows, and makes a matrix as large as C; these four matrices have to be summed.](../figures/gemm_ways.svg)
#
# A row of $C$ needs one row of $A$ and all of $B$.
# A column of $C$ needs one column of $B$ and all of $A$:
#
# $$A\,[\,B_1 \mid B_2\,] = [\,A B_1 \mid A B_2\,]$$
#
# The product sums over the inner dimension $K$, so cutting $K$ splits this sum:
#
# $$[\,A_1 \mid A_2\,] \begin{bmatrix} B_1 \\ B_2 \end{bmatrix} = A_1 B_1 + A_2 B_2$$
#
# Each summand, a *partial sum*, is as large as all of $C$.
# So sharding by rows or columns needs one whole factor on every rank, and leaves $C$ sharded.
# Sharding by the inner dimension needs no whole factor, but a sum over all ranks.
#
# ## The three ways, in five lines of code each
#
# The bytes that must be sent depend on which ranks hold the matrices, and on which ranks need the result.
# Suppose that rank 0 has read $B$, and that all ranks need $C$ in the end.
#
# ![A product by rows on four ranks, step by step. At first rank 0 alone holds A and B. Then B is broadcast to all, and each rank gets its quarter of the rows of A. Each multiplies, and holds a quarter of the rows of C. After an all-gather every rank holds all of C.](../figures/gemm_story.svg)
#
# The next cell runs these steps on two ranks, and each rank prints its matrices.

# %%
def plain_rows(a_mK, b_KN):
    c_mN = a_mK @ b_KN
    parts = [torch.empty_like(c_mN) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, c_mN)
    return torch.cat(parts)


def print_product():
    rank = dist.get_rank()
    a_MK = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]])
    b_KN = torch.tensor([[1, 0], [10, 1]]) * (rank == 0)  # rank 0 alone knows B
    print("B before the broadcast:", b_KN.tolist())
    dist.broadcast(b_KN, 0)
    print("B after it:            ", b_KN.tolist())
    c_MN = plain_rows(a_MK.chunk(2)[rank], b_KN)
    print("C after the all-gather:", c_MN.tolist())
    return c_MN


# CPU: integers, for which GPUs have no products
found = ranks.run(print_product, 2, device="cpu")


# %% [markdown]
# By columns, only the last line differs: it joins the gathered shards side by side.
# By the inner dimension, each rank's product is a partial sum of $C$; an all-reduce adds the partial sums.

# %%
def plain_columns(a_MK, b_Kn):
    c_Mn = a_MK @ b_Kn
    parts = [torch.empty_like(c_Mn) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, c_Mn)
    return torch.cat(parts, dim=1)


def plain_inner(a_Mk, b_kN):
    c_MN = a_Mk @ b_kN  # a summand of C
    dist.all_reduce(c_MN)
    return c_MN


def check_plain_schemes():
    a_MK, b_KN = (x.round() for x in make_matrices(8, 12, 16))  # whole numbers add up exactly
    size, rank = dist.get_world_size(), dist.get_rank()
    a_mK, a_Mk = a_MK.chunk(size)[rank], a_MK.chunk(size, dim=1)[rank]
    b_kN, b_Kn = b_KN.chunk(size)[rank], b_KN.chunk(size, dim=1)[rank]
    products = (
        plain_rows(a_mK, b_KN),
        plain_columns(a_MK, b_Kn),
        plain_inner(a_Mk, b_kN),
    )
    return [(c_MN - a_MK @ b_KN).abs().max().item() for c_MN in products]


off = ranks.run(check_plain_schemes, 4)
print("largest difference from one process:", max(map(max, off)))

# %% tags=["hide-input"]
# Compares the plain versions with one process
assert all(c_MN.tolist() == [[21, 2], [43, 4], [65, 6], [87, 8]] for c_MN in found)
assert max(map(max, off)) == 0

# %% [markdown]
# ![After a product by the inner dimension each of four ranks holds a partial sum of C, as large as C. A reduce-scatter leaves each rank a quarter of C, summed over all ranks. An all-gather then gives every rank all of C. The two are an all-reduce.](../figures/gemm_inner.svg)
#
# The plain versions leave out two things.
# First, sizes that the number of ranks does not divide: the collectives need equal shards.
# Second, a $C$ that stays sharded: then rows and columns send nothing, and the inner dimension needs only a reduce-scatter, which sends half as many bytes ([measured below](#gemm-bytes)).
#
# ## The core: sizes that do not divide, and a result that stays cut
#
# `shard_slice` returns the rows of a rank.
# The number of ranks need not divide the number of rows: of 10 rows, four ranks get 3, 3, 2 and 2.

# %%
show.source(
    gemm.shard_slice, gemm.shard_operands, gemm.multiply_rows, gemm.multiply_columns
)

# %% [markdown]
# Before a gather the shorter shards are padded, and every rank drops the padding afterwards.
# The last lines of `gather_rows` and `gather_columns` differ.
# Gathered rows are already in the whole matrix's memory order.
# Gathered columns are $t$ narrow matrices, which must be copied side by side.
# The [second mistake below](#gemm-wrong) forgets this copy.

# %%
show.source(gemm.core._pad_shard, gemm.gather_rows, gemm.gather_columns)

# %% [markdown]
# With `full=False`, `multiply_inner` returns only this rank's rows of the sum.

# %%
show.source(gemm.multiply_inner, gemm.core.reduce_scatter)

# %% [markdown]
# ### Memory of each rank
#
# The next cell counts the bytes that each of four ranks holds at its peak.

# %%
PEAK_CASES = {
    "rows, C stays cut": ("rows", False),
    "columns, C stays cut": ("columns", False),
    "inner, all-reduce": ("inner", True),
}


def measure_peaks():
    group, rank, peaks = dist.group.WORLD, dist.get_rank(), []
    for way, _ in PEAK_CASES.values():
        a, b = (x.clone() for x in gemm.shard_operands(way, *make_matrices(M, K, N), 4, rank))
        with count.track_memory(a, b) as held:
            if way == "inner":
                gemm.multiply_inner(a, b, group)
            else:
                (gemm.multiply_rows if way == "rows" else gemm.multiply_columns)(a, b)
        peaks.append(held.peak_bytes)
    return peaks


measured = ranks.run(measure_peaks, 4, device="cpu")[0]  # CPU: bytes of gloo's way

# %% tags=["hide-input"]
# Table: bytes held by a rank, predicted and measured
rows = []
for (name, (way, full)), peak in zip(PEAK_CASES.items(), measured, strict=True):
    cost = gemm.predict_cost(way, M, N, K, ranks=4, full=full)
    assert peak == cost.peak_bytes
    sizes = cost.a_bytes, cost.b_bytes, cost.c_bytes, cost.peak_bytes
    parts = (f"{size / 1e6:.2f}" for size in sizes)
    fits = "yes" if cost.peak_bytes <= BUDGET else "no"
    rows.append((name, *parts, f"{peak / 1e6:.2f}", peak - cost.peak_bytes, fits))
head = ["way", "A (MB)", "B (MB)", "C (MB)", "held, predicted (MB)", "measured (MB)"]
show.table(rows, [*head, "difference (bytes)", "fits in 40 MB"])


# %% [markdown]
# `````{admonition} False: "four ranks need a quarter of the memory each"
# :class: checked
#
# A quarter of 88.1 MB would be 22 MB.
# A rank holds 25.2 MB by columns, 34.6 MB by rows, and 72.4 MB by the inner dimension (table above).
# One matrix stays whole on every rank: one factor, or the sum.
# So shard the *largest* matrix, here $C$, along the dimension that leaves the smaller factor whole.
# `````
#
# ## SUMMA: all three matrices cut, on a grid of ranks
#
# With many ranks the whole factor takes most of the memory.
# On a grid of ranks every matrix is sharded by rows and columns, and each rank has one block of each matrix.
# To multiply, ranks broadcast blocks of $A$ along grid rows, blocks of $B$ along grid columns {cite}`vandegeijn1997summa`.
#
# ![SUMMA on a grid of two by two ranks; each rank holds one block of A, of B and of C. Step 1: ranks 0 and 2 broadcast their block of A along their row of the grid, ranks 0 and 1 their block of B along their column; every rank adds the product of these two blocks to its block of C. Step 2: the same with the blocks of A of ranks 1 and 3, and the blocks of B of ranks 2 and 3.](../figures/gemm_summa.svg)
#
# Each step is a product by the inner dimension, but each rank computes and adds up all partial sums of its own block of $C$.
# The next cell is the picture as a loop, for a square grid and equal blocks.

# %%
def plain_summa(a_mk, b_kn, grid):
    """Return this rank's block of C, given its blocks of A and B."""
    c_mn = torch.zeros(len(a_mk), b_kn.shape[1], device=a_mk.device)
    for step in range(grid.rows):
        a, b = a_mk.clone(), b_kn.clone()
        dist.broadcast(a, group=grid.row_group, group_src=step)
        dist.broadcast(b, group=grid.column_group, group_src=step)
        c_mn += a @ b
    return c_mn


def check_plain_summa():
    a_MK, b_KN = (x.round() for x in make_matrices(8, 12, 16))
    grid = gemm.create_grid(dist.group.WORLD, 2, 2)
    c_mn = plain_summa(*(x.contiguous() for x in grid.take_blocks(a_MK, b_KN)), grid)
    return (c_mn - grid.take_block(a_MK @ b_KN)).abs().max().item()


off = ranks.run(check_plain_summa, 4)
print("largest difference from one process:", max(off))

# %% tags=["hide-input"]
# Compares the plain SUMMA with one process
assert max(off) == 0

# %% [markdown]
# This loop sends a block of $A$, then one of $B$, waits for both before it multiplies, and holds copies of two whole blocks.
# This lesson's module, the core, cuts blocks into *panels*: some columns of $A$, and the rows of $B$ with the same numbers.
# It broadcasts the next panels while it multiplies the current ones.
# Panels end where a block of $A$ or $B$ ends, so the core works for any grid and any sizes.

# %%
show.source(gemm.Grid, gemm.split_panels, gemm.multiply_summa, fold=70)


# %% [markdown]
# The table compares the loop with the core on a 2 × 2 grid with links of 40 MB/s; the core's panels are 64 wide.

# %% tags=["hide-input", "measured"]
# Measures bytes held and seconds of the plain SUMMA and of the core's
def compare_with_core():
    group, side = dist.group.WORLD, 1024
    grid = gemm.create_grid(group, 2, 2, lambda one: link.create_slow_group(2e-4, 40e6, one))
    a, b = (x.contiguous() for x in grid.take_blocks(*make_matrices(side, side, side)))
    works = (
        lambda: plain_summa(a, b, grid),
        lambda: gemm.multiply_summa(a, b, side, grid, width=64),
    )
    peaks = []
    for work in works:
        with count.track_memory(a, b) as held:
            work()
        peaks.append(held.peak_bytes)
    pairs = [[gemm.time_on_group(work, group, 1) for work in works] for _ in range(5)]
    return peaks, pairs


# CPU: times of the CPU's work and a wire
peaks, pairs = ranks.run(compare_with_core, 4, device="cpu")[0]
ms = [f"{1e3 * statistics.median(times):.0f}" for times in zip(*pairs, strict=True)]
ratio = statistics.median(plain / core for plain, core in pairs)
assert peaks[1] < peaks[0], peaks
show.check_timing(ratio > 1.15, "the core is faster by 15 %")
rows = [
    (name, f"{peak / 1e6:.2f}", time)
    for name, peak, time in zip(("plain", "core"), peaks, ms, strict=True)
]
show.table(rows, ["SUMMA", "held by a rank (MB)", "time (ms)"])

# %% [markdown]
# ## Every way computes the result of one process
#
# The table compares each way on 1 to 4 ranks with one process, for sizes that the ranks do not divide: *off by* is the largest difference.
# Each entry of $C$ is a sum of $K$ products, and each addition rounds its result, with a relative error of at most $u$: $2^{-24}$ in float32, $2^{-53}$ in float64.
# So the results of two orders of addition differ by at most $2 K u\,(|A|\,|B|)$, the tolerance (*allowed*).

# %% tags=["hide-input"]
# Compares every way with one process, on 1 to 4 ranks, in two dtypes
GRIDS = {1: [(1, 1)], 2: [(1, 2), (2, 1)], 3: [(1, 3), (3, 1)], 4: [(2, 2), (1, 4)]}
SIZES = (10, 7, 9), (3, 50, 2), (129, 257, 65)
ROUNDING = {torch.float32: 2**-24, torch.float64: 2**-53}


def measure_errors(dtype):
    """Return {way: (largest difference from one process, tolerance)}."""
    group, found = dist.group.WORLD, {}
    for sizes in SIZES:
        a_MK, b_KN = make_matrices(*sizes, dtype)
        right, inner = a_MK @ b_KN, sizes[1]
        allowed = 2 * inner * ROUNDING[dtype] * (a_MK.abs() @ b_KN.abs()).max().item()
        pairs = [
            (scheme, gemm.multiply_sharded(scheme, a_MK, b_KN, group), right)
            for scheme in gemm.SCHEMES_1D
        ]
        cut = gemm.multiply_sharded("inner", a_MK, b_KN, group, full=False)
        gathered = gemm.gather_rows(cut, sizes[0], group)
        pairs.append(("inner, reduce-scattered", gathered, right))
        for shape in GRIDS[dist.get_world_size()]:
            grid = gemm.create_grid(group, *shape)
            block = gemm.multiply_summa(*grid.take_blocks(a_MK, b_KN), inner, grid, width=20)
            pairs.append(("summa", block, grid.take_block(right)))
        for way, got, want in pairs:
            off = (got - want).abs().max().item() if want.numel() else 0.0
            assert got.shape == want.shape and off <= allowed, (
                way,
                sizes,
                off,
                allowed,
            )
            worst = found.setdefault(way, (0.0, allowed))
            found[way] = max(worst[0], off), max(worst[1], allowed)
    return found


def measure_all_errors():
    return [measure_errors(dtype) for dtype in ROUNDING]


by_size = [found for size in GRIDS for found in ranks.run(measure_all_errors, size)]
rows = []
for way in by_size[0][0]:
    cells = []
    for number in range(len(ROUNDING)):
        off = max(found[number][way][0] for found in by_size)
        limit = max(found[number][way][1] for found in by_size)
        cells += [f"{off:.0e}" if off else "0", f"{limit:.0e}"]
    rows.append((way, *cells))
head = [
    f"{kind}: {what}"
    for kind in ("float32", "float64")
    for what in ("off by", "allowed")
]
show.table(rows, ["way", *head])

# %% [markdown]
# By rows and by columns, one rank computes all $K$ products of an entry.
# Entries can still differ from one process's, because the library's order of addition depends on the matrices' shapes.
#
# ## What it costs
#
# (gemm-bytes)=
# ### Bytes sent
#
# Let $S_C = MN \cdot$ itemsize.
# By the formulas of [Collectives](collectives.md), a rank
#
# - by rows or columns sends nothing, or $\frac{t-1}{t} S_C$ if all ranks need $C$;
# - by the inner dimension sends $\frac{t-1}{t} S_C$ if $C$ may stay sharded, twice as much if all ranks need $C$;
# - on a grid of $p \times q$ receives $\frac{q-1}{q}$ of its rows of $A$ and $\frac{p-1}{p}$ of its columns of $B$.
#
# Our reduce-scatter is an `all_to_all_single` and a sum in rank order. It sends as many bytes as the formula says, and gives the same bits each time.
# The table compares the formulas with two counts: the bytes of each collective, which must be equal, and the bytes that the loopback interface transmitted, with headers.

# %% tags=["hide-input", "measured"]
# Table: bytes sent: predicted, counted, and on the network interface
SENT_CASES = [
    ("rows", True),
    ("columns", True),
    ("inner", False),
    ("inner", True),
    ("summa", False),
]
SHAPE = 1024, 1024, 2048  # M, K, N


def count_bytes_sent():
    group, found = dist.group.WORLD, []
    a_MK, b_KN = make_matrices(*SHAPE)
    grid = gemm.create_grid(group, 2, 2)

    def multiply(way, full):
        if way == "summa":
            return gemm.multiply_summa(*grid.take_blocks(a_MK, b_KN), SHAPE[1], grid)
        return gemm.multiply_sharded(way, a_MK, b_KN, group, full)

    for way, full in SENT_CASES:
        with count.record_traffic() as sent:
            multiply(way, full)
        readings = []
        for _ in range(3):  # the least of three: others may use the interface, too
            dist.barrier()
            before = count.read_loopback_bytes()
            dist.barrier()
            multiply(way, full)
            dist.barrier()
            readings.append((count.read_loopback_bytes() or 0) - (before or 0))
            dist.barrier()
        found.append((sent.collectives, min(readings)))
    return found


by_rank, rows = ranks.run(count_bytes_sent, 4, device="cpu"), []  # CPU: bytes on loopback
m, k, n = SHAPE
for number, (way, full) in enumerate(SENT_CASES):
    for rank, found in enumerate(by_rank):
        shape = (2, 2) if way == "summa" else None
        cost = gemm.predict_cost(way, m, n, k, 4, full=full, rank=rank, shape=shape)
        assert found[number][0] == cost.collectives  # calls and bytes, exactly
    seen = by_rank[0][number][1]
    # Headers add some percent, other traffic of the machine more; nothing takes away.
    near = not seen or 1 <= seen / cost.wire_bytes < 1.25
    show.check_timing(near, f"{way}: the formula's bytes, +25 %")
    name = f"{way}, C on all" if full else f"{way}, C cut"
    calls = ", ".join(
        f"{times} {what}" for what, (times, _) in cost.collectives.items()
    )
    wire = (f"{value / 4 / 1e6:.2f}" for value in (cost.wire_bytes, seen))
    rows.append((name, calls, *wire, f"{seen / cost.wire_bytes - 1:+.1%}"))
head = [
    "way",
    "collectives of a rank",
    "predicted (MB per rank)",
    "on the wire (MB per rank)",
]
show.table(
    rows, [*head, "difference"], caption=f"4 ranks, C takes {4 * m * n / 1e6:.1f} MB"
)

# %% [markdown]
# ### Bytes by rows and on a grid
#
# SUMMA helps with many ranks.
# Suppose that $A$, $B$ and $C$ are all sharded, and stay sharded.
# A product by rows must then gather $B$ first.

# %% tags=["hide-input"]
# Table: bytes held and received by rows and on a grid
side, rows = 16384, []
full = 2 * side**2  # bytes of one matrix in 16 bits
for t in (4, 16, 64, 256):
    p = int(t**0.5)
    one_d = gemm.predict_cost("rows", side, side, side, t, 2, full=False)
    received = collectives.count_bytes_sent(
        "all_gather", full, 2, t, 0
    )  # sent = received
    two_d = gemm.predict_cost(
        "summa", side, side, side, t, 2, full=False, shape=(p, p), width=256
    )
    cells = (one_d.peak_bytes, two_d.peak_bytes, received, two_d.wire_bytes / t)
    rows.append((t, *(f"{value / 1e6:,.0f}" for value in cells)))
head = [
    "held: by rows (MB)",
    "on a grid (MB)",
    "received: by rows (MB)",
    "on a grid (MB)",
]
assert float(rows[-1][4]) < float(rows[-1][3]) / 5
show.table(
    rows, ["ranks", *head], caption=f"Square matrices of 16-bit numbers, side {side:,}"
)

# %% [markdown]
# By rows, a rank receives all of $B$, however many ranks there are.
# On a grid it receives $2(\sqrt t - 1)\,n^2/t$ entries, and holds $3 n^2/t$ entries and two panels of each factor.
# With only one copy of the matrices in memory, no algorithm can receive fewer entries, up to a constant factor {cite}`irony2004lower`.
# So supercomputers multiply on grids.
# Transformers mostly do not: their $t$ is small, 2 to 8 in most nodes, and they shard pairs of products by columns, then by the inner dimension (the fifth exercise).
#
# ### Seconds: when splitting pays
#
# A rank computes $2MNK/t$ operations.
# With $F$ operations per second, and an all-gather with latency $\alpha$ and $\beta$ seconds per byte ([Collectives](collectives.md)), the product by rows takes
#
# $$\frac{2MNK}{tF} + (t-1)\,\alpha + \frac{t-1}{t}\,\beta\,S_C$$
#
# and one process takes $2MNK/F$. For square matrices of side $n$ with $w$ bytes per entry, and without latency, the two are equal when
#
# $$\frac{2n^3}{F}\cdot\frac{t-1}{t} = \frac{t-1}{t}\,\beta\,w\,n^2, \qquad\text{so}\qquad n^* = \frac{w}{2}\,\beta F.$$
#
# The factor with $t$ cancels: both the operations saved and the bytes to wait for contain it.
# If $B$ has to be broadcast first, the broadcast's time is added, and $n^*$ is larger.
# With 400 TFLOP/s, 200 GB/s and 2 bytes, $n^*$ is the 2,000 of the puzzle.
#
# `````{admonition} False: "if two GPUs are slower than one, take more of them"
# :class: checked
#
# Below $n^*$ more ranks do not help; with latency they take longer.
# The table has $n^*$ for 2 to 64 ranks, by rows with an all-gather, and by the inner dimension with an all-reduce, rounded up to multiples of $t$.
# `````

# %% tags=["hide-input"]
# Table: size above which splitting pays, predicted for 2 to 64 ranks
rows = []
for t in (2, 8, 64):
    cells = []
    for way, latency in (
        ("rows", 0.0),
        ("inner", 0.0),
        ("rows", 10e-6),
        ("inner", 10e-6),
    ):
        fast = gemm.Machine(flops=400e12, latency=latency, bandwidth=200e9)
        cells.append(gemm.find_break_even_side(way, t, fast, itemsize=2))
    # The formula's 2000 and 4000, and the next multiple of t above them.
    assert 0 < cells[0] - 2000 <= t and 0 < cells[1] - 4000 <= t, cells
    rows.append((t, *(f"{side:,}" for side in cells)))
head = ["rows, α = 0 (side)", "inner, α = 0 (side)", "rows, α = 10 µs (side)"]
show.table(rows, ["ranks", *head, "inner, α = 10 µs (side)"])


# %% [markdown]
# The next cell measures this machine, with two ranks, one core each, and an emulated link of 400 MB/s between them.
# `gemm.measure_machine` finds operations per second, latency and bandwidth. From these, `gemm.find_break_even_side` predicts the *crossing*: the side at which one rank and two take equally long.
# Then the cell times one rank and two for sides from half to twice the crossing.

# %%
def time_one_and_two():
    wire = link.create_slow_group(2e-4, 400e6)
    machine = gemm.measure_machine(wire, side=512, repeats=15)
    crossing = gemm.find_break_even_side("rows", 2, machine)
    sides = [round(factor * crossing) for factor in (0.5, 0.71, 1, 1.41, 2)]
    times = {side: (float("inf"), float("inf")) for side in sides}
    for side in sides * 3:  # again and again: what disturbs the machine disturbs all
        a, b = make_matrices(side, side, side)
        works = lambda: a @ b, lambda: gemm.multiply_sharded("rows", a, b, wire)
        now = [gemm.time_on_group(work, wire, 3, min) for work in works]
        times[side] = tuple(map(min, times[side], now))
    return machine, crossing, times


# %% [markdown]
# A link of 400 MB/s is slow, but a CPU core is slow, too: only their ratio matters.
# All times, also those in `measure_machine`, are the fastest of several runs, because other work on the machine only adds time.

# %% tags=["hide-input", "measured"]
# Measures and plots the size at which one rank and two take equally long
# CPU: times of the CPU's work and a wire
machine, crossing, times = ranks.run(time_one_and_two, 2, device="cpu")[0]
sides = list(times)
gains = [split / alone for alone, split in times.values()]  # above 1: one is faster
after = next((i for i, gain in enumerate(gains) if gain < 1), 0)
show.check_timing(after > 0, "one rank is faster at half of the crossing, two at twice")
low, high = gains[after - 1] - 1, 1 - gains[after]
measured = sides[after - 1] + (sides[after] - sides[after - 1]) * low / (low + high)
show.check_timing(
    0.6 < measured / crossing < 1.6, "the crossing within 60 % of the prediction"
)
print(f"{machine.flops / 1e9:.0f} GFLOP/s, {1e6 * machine.latency:.0f} µs, ", end="")
print(f"{machine.bandwidth / 1e6:.0f} MB/s: splitting pays from side {crossing:,}")
print(f"measured: from side {measured:.0f}, {measured / crossing - 1:+.0%}")
figure, axes = plt.subplots(figsize=(5.2, 3.3))
looks = (("1 rank", show.RANK_COLORS[0]), ("2 ranks", show.RANK_COLORS[1]))
for number, (name, color) in enumerate(looks):
    line = [
        1e3 * gemm.predict_seconds("rows", n, n, n, number + 1, machine).total for n in sides
    ]
    axes.plot(sides, line, color=color, lw=1.6)
    axes.plot(
        sides, [1e3 * pair[number] for pair in times.values()], "o", color=color, ms=5
    )
    axes.text(1.05 * sides[-1], line[-1], name, va="center")
axes.axvline(crossing, color=show.INK, lw=1, ls=(0, (2, 2)))
least = min(min(pair) for pair in times.values())
axes.text(1.03 * crossing, 1e3 * least, f"equal at {crossing}", va="bottom")
axes.set(xscale="log", yscale="log", xlabel="side of the matrices", ylabel="time (ms)")
axes.set_xticks(sides, map(str, sides))
axes.minorticks_off()
axes.set_title("dots measured, lines predicted", fontsize="medium")
show.figure(
    figure,
    "Time of a product of square matrices over their side, with one rank and with two "
    "over a slow link. For small matrices two ranks take longer, for large ones less; "
    "the lines cross at the predicted side.",
    "gemm-pays",
)

# %% [markdown]
# The measured crossing lies between two measured sides, and moves by some tens of percent from run to run: the two lines cross at a small angle, so timing differences of a few percent move the crossing by many rows.
#
# (gemm-roofline)=
# ## From bytes to seconds: the roofline
#
# The formula assumes that a rank with a $t$-th of the work needs a $t$-th of the time.
# But a rank's time also depends on the bytes that it reads from its own memory: for many operations, moving bytes between memory and arithmetic units takes longer than the arithmetic.
#
# The *arithmetic intensity* of an operation is its FLOP (floating-point operations) for each byte moved.
# The operation's FLOP/s are at most
#
# $$
# \min(\text{machine's FLOP/s},\; \text{intensity} \times \text{machine's bytes/s})
# $$
#
# Plotted over the intensity, this bound looks like a roof {cite}`williams2009roofline`: it rises to the *ridge* (memory is the limit), then is flat (arithmetic is the limit).
# The next cell lists five operations of training, with their FLOP and the fewest bytes that they must move.

# %%
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
gpu = device.type == "cuda"
n, rows_, many = (8192, 8192, 2**27) if gpu else (1024, 4096, 2**25)
a, b = (torch.randn(n, n, device=device) for _ in range(2))
wide = torch.randn(rows_, 8192, device=device)
one, sixteen = (torch.randn(8192, columns, device=device) for columns in (1, 16))
long, out = (torch.ones(many, device=device) for _ in range(2))
weight = torch.nn.Parameter(torch.ones(many // 4, device=device))
weight.grad = torch.ones_like(weight)
adamw = torch.optim.AdamW([weight], fused=True)
size = wide.numel()
WORKLOADS = {  # name: (FLOP, bytes, the work); all in float32
    "large product": (2 * n**3, 12 * n**2, lambda: a @ b),  # [n, n] @ [n, n]
    "matrix × 16 columns": (32 * size, 4 * size, lambda: wide @ sixteen),
    "matrix × 1 column": (2 * size, 4 * size, lambda: wide @ one),
    "addition": (many, 8 * many, lambda: torch.add(long, 1, out=out)),
    # 14 operations; reads weight, gradient, two moments; writes all but the gradient
    "AdamW step": (14 * many // 4, 28 * many // 4, adamw.step),
}


# %% [markdown]
# The roof is drawn from the best rates that these operations, or a copy of a large tensor, reached.

# %% tags=["hide-input", "measured"]
# Measures and plots the roofline of this machine
def raise_roof(roof, points):
    """Return the roof: the best rates that any operation here reached."""
    return count.Rates(
        max(roof.flops, *(rate for _, _, rate in points)),
        max(roof.bytes, *(rate / intensity for _, intensity, rate in points)),
    )


points = []
for name, (flop, moved, work) in WORKLOADS.items():
    points.append((name, flop / moved, flop / speed.measure_seconds(work, device)))
roof = raise_roof(count.measure_rates(torch.float32, device), points)
reached = {name: rate for name, _, rate in points}
memory_bound = max(reached["matrix × 1 column"], reached["addition"])
show.check_timing(
    reached["large product"] > 3 * memory_bound, "a large product: three times the rate"
)
show.figure(
    plots.plot_roofline(roof, points),
    "The roofline of the machine that executed this page, and five pieces of work.",
    "gemm_roofline",
)


# %% [markdown]
# The optimizer's step and every elementwise operation are far to the left: fewer bytes make them faster, more FLOP/s do not.
# A product with a one-column matrix, as in generating text one token at a time, is there, too.
# A weight matrix is read once and used for all tokens of a batch, so more tokens move a product to the right, under the flat roof.
# Smaller batches save memory, but compute more slowly.
#
# ### Thin shards
#
# Sharding a product moves it to the left, because a rank reads more than a $t$-th of the bytes.
#
# ![What one rank reads and writes for its share of a square product, sharded by columns. On 1 rank: all of A, B and C. On 2: all of A, half of B and C; half the work for 0.67 of the bytes. On 4: a quarter of the work for 0.50 of the bytes. On 16: a sixteenth of the work for 0.38 of the bytes.](../figures/gemm_thin.svg)
#
# For square matrices the intensity is $2n/(w(t+2))$.
# Also, a kernel cuts $C$ into tiles and distributes the tiles over the processor's units.
# A thin shard has few tiles, so some units are idle in the last round, and a tile at the edge is computed in full {cite}`nvidia2023gemm`.
#
# The next cell measures one rank's share of a product for 1 to 16 ranks, on one device, without communication.

# %%
def time_thin_shards():
    device = ranks.device()
    gpu = device.type == "cuda"
    dtype = torch.bfloat16 if gpu else torch.float32
    m, k, n = (1024, 4096, 16384) if gpu else (64, 2048, 2048)
    shards = {
        cut: gemm.measure_shard_throughput(m, n, k, scheme=cut, dtype=dtype, device=device)
        for cut in ("columns", "rows")
    }
    return count.measure_rates(dtype, device), shards, dtype.itemsize


# %% [markdown]
# *Reachable* is the roof at the shard's intensity, for the matrices' dtype. The roof's flat part is the best rate of a large product and of these shards, so no measured rate is above it.

# %% tags=["hide-input", "measured"]
# Table: rates of thin shards, compared with the roof
rates, found, itemsize = ranks.run(time_thin_shards, 1)[0]
points = []
for cut, shards in found.items():
    for shard in shards:
        moved = itemsize * (shard.M * shard.K + shard.K * shard.N + shard.M * shard.N)
        name = (
            f"{cut}, t = {shard.degree}",
            f"[{shard.M}, {shard.K}] @ [{shard.K}, {shard.N}]",
        )
        points.append((name, 2 * shard.M * shard.K * shard.N / moved, shard.flops))
roof = raise_roof(rates, points)
rows = []
for number, (name, intensity, rate) in enumerate(points):
    first = points[number - number % 5][2]  # t = 1 of the same cut
    cells = (
        f"{intensity:.0f}",
        f"{roof.get_attainable_flops(intensity) / 1e9:,.0f}",
        f"{rate / 1e9:,.0f}",
    )
    rows.append((*name, *cells, f"{rate / first:.0%}"))
thin = found["rows"]  # sixteen times fewer FLOP per byte: below half of the speed
show.check_timing(
    thin[-1].flops < 0.8 * thin[0].flops, "thin shards lose a fifth of the rate"
)
head = [
    "cut",
    "shard",
    "FLOP per byte",
    "reachable (GFLOP/s)",
    "measured (GFLOP/s)",
    "speed, relative to t = 1",
]
show.table(rows, head)

# %% [markdown]
# `````{admonition} False: "cut into 16, each rank computes 16 times less, so it is done 16 times sooner"
# :class: checked
#
# The last column is a rank's speed, in percent of its speed at $t = 1$, without communication.
# By rows, at $t = 16$, a rank reads all of $B$ and uses each entry for a few rows only.
# If the speed falls to a fifth, for example, 16 ranks take a third of the time, not a sixteenth.
# By columns, the speed depends on the device.
# A GPU has fewer tiles to distribute; a CPU core may even gain speed, because its shard of $B$ fits into a cache.
# `````
#
# ## PyTorch's DTensor
#
# PyTorch's `DTensor` is a tensor that stores how it is sharded: its *placements*.
# The product `@` of two DTensors derives the result's placements.
# The next cell maps our ways to placements; the table shows what each call sends.

# %%
PLACEMENTS = {
    "rows": ([Shard(0)], [Replicate()]),
    "columns": ([Replicate()], [Shard(1)]),
    "inner": ([Shard(1)], [Shard(0)]),
    "grid": ([Shard(0), Shard(1)], [Shard(0), Shard(1)]),
}


def format_calls(mode):
    counts = mode.get_comm_counts().items()
    return ", ".join(f"{n} {str(k).split('.')[-1]}" for k, n in counts) or "nothing"


def multiply_with_dtensor():
    a_MK, b_KN = make_matrices(130, 258, 66)
    meshes = [init_device_mesh("cpu", shape) for shape in ((4,), (2, 2))]
    found = {}
    for way, placements in PLACEMENTS.items():
        mesh = meshes[len(placements[0]) - 1]
        a, b = (
            distribute_tensor(x, mesh, p, src_data_rank=None)
            for x, p in zip((a_MK, b_KN), placements, strict=True)
        )
        with CommDebugMode() as first:
            c = a @ b
        with CommDebugMode() as second:
            full = c.full_tensor()
        off = (full - a_MK @ b_KN).abs().max().item()
        sent = format_calls(first), format_calls(second)
        found[way] = ", ".join(map(str, c.placements)), *sent, off
    return found


found = ranks.run(multiply_with_dtensor, 4, device="cpu")[0]  # CPU: DTensor on a CPU mesh

# %% tags=["hide-input"]
# Table: DTensor's placements for each way, and its collectives
rows = []
for way, (result, first, second, off) in found.items():
    assert off < 1.4e-4  # 2 sqrt(258) roundings of 2^-24 of sums of up to 70
    kinds = [", ".join(map(str, placements)) for placements in PLACEMENTS[way]]
    rows.append((way, *kinds, result, first, second))
show.table(rows, ["way", "A", "B", "A @ B", "sent by @", "sent by full_tensor()"])


# %% [markdown]
# S(0), short for `Shard(0)`, is sharded by rows, S(1) by columns, R (`Replicate`) is whole on every rank, and P (`Partial`) is a partial sum.
# DTensor adds up partial sums only when an operation needs the sum.
# On a grid, DTensor gathers a row of $A$'s blocks and a column of $B$'s blocks at once; SUMMA broadcasts panels.
# PyTorch's tensor parallelism uses these placements.
#
# DTensor itself takes time: for the table, DTensor and our module alternately multiply by rows and gather $C$ on two ranks.

# %% tags=["hide-input", "measured"]
# Measures DTensor and our module, for small and for large matrices
def time_beside_dtensor():
    group, mesh, found = dist.group.WORLD, init_device_mesh("cpu", (2,)), []
    for side in (64, 1024):
        a_MK, b_KN = make_matrices(side, side, side)
        a_mK, _ = gemm.shard_operands("rows", a_MK, b_KN, 2, dist.get_rank())
        a = distribute_tensor(a_MK, mesh, [Shard(0)], src_data_rank=None)
        b = distribute_tensor(b_KN, mesh, [Replicate()], src_data_rank=None)
        works = (
            lambda a=a_mK, b=b_KN, n=side: gemm.gather_rows(
                gemm.multiply_rows(a, b), n, group
            ),
            lambda a=a, b=b: (a @ b).full_tensor(),
        )
        found.append(
            [[gemm.time_on_group(work, group, 3) for work in works] for _ in range(9)]
        )
    return found


rows = []
for side, pairs in zip(
    # CPU: times are gloo's
    (64, 1024), ranks.run(time_beside_dtensor, 2, device="cpu")[0], strict=True
):
    low, middle, high = statistics.quantiles(
        [ours / theirs for ours, theirs in pairs], n=4
    )
    ms = (f"{1e3 * statistics.median(times):.2f}" for times in zip(*pairs, strict=True))
    rows.append((side, *ms, f"{middle:.2f} [{low:.2f}, {high:.2f}]"))
    if side == 64:
        show.check_timing(
            middle < 0.95, "ours is 5 % faster than DTensor"
        )  # 0.5 to 0.7 was seen
show.table(rows, ["side", "ours (ms)", "DTensor (ms)", "ours / DTensor"])


# %% [markdown]
# `DTensor` works out placements in Python for each operation.
# This takes a few tenths of a millisecond, whatever the size: much compared with a product of side 64, little compared with a product that needs two GPUs.
#
# (gemm-wrong)=
# ## What goes wrong
#
# None of these three mistakes raises an error.

# %%
def make_mistakes():
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    a_MK, b_KN = make_matrices(256, 256, 256)
    a_Mk, b_kN = gemm.shard_operands("inner", a_MK, b_KN, size, rank)
    _, b_Kn = gemm.shard_operands("columns", a_MK, b_KN, size, rank)
    found = {"inner, never added up": a_Mk @ b_kN}
    pieces = [torch.empty_like(a_MK @ b_Kn) for _ in range(size)]
    dist.all_gather(pieces, a_MK @ b_Kn, group=group)
    joined = torch.cat([piece.reshape(-1) for piece in pieces])
    found["columns, joined as rows"] = joined.view(256, 256)
    mean = a_Mk @ b_kN
    dist.all_reduce(mean, group=group)
    found["inner, averaged"] = mean / size
    right = a_MK @ b_KN
    return [(name, c, (c - right).norm() / right.norm()) for name, c in found.items()]


by_rank = ranks.run(make_mistakes, 4)

# %% tags=["hide-input"]
# Table: the three mistakes, and how they show in the result
rows = []
for (name, c, off), (_, other, _) in zip(by_rank[0], by_rank[1], strict=True):
    agree = "yes" if torch.equal(c, other) else "no"
    rows.append((name, str(list(c.shape)), agree, f"{off:.2f}"))
    assert off > 0.5
show.table(rows, ["mistake", "shape", "the same on all ranks", "relative error of C"])


# %% [markdown]
# The shapes are right, so later code raises no error, either; two of the mistakes give the same result on all ranks.
# So compare with one process once, on small matrices whose sizes all differ and are no multiples of $t$. Square matrices hide most mistakes.
#
# A fourth mistake has a small effect.
# In bfloat16, partial sums are rounded to eight bits *before* they are added, and each addition rounds again.

# %%
def compare_rounding():
    a_MK, b_KN = make_matrices(256, 1024, 256, torch.bfloat16)
    right = a_MK.double() @ b_KN.double()
    group = dist.group.WORLD
    found = [gemm.multiply_sharded(way, a_MK, b_KN, group) for way in ("rows", "inner")]
    a_Mk, b_kN = gemm.shard_operands("inner", a_MK, b_KN, dist.get_world_size(), dist.get_rank())
    found.append(gemm.multiply_inner(a_Mk.float(), b_kN.float(), group).bfloat16())
    return [((c.double() - right).norm() / right.norm()).item() for c in found]


# %% tags=["hide-input"]
# Table: rounding errors by rows and by the inner dimension
rows = []
for t in (1, 2, 4, 8):
    # CPU: rounding of the CPU's bfloat16
    by_rows, summed, in_float32 = ranks.run(compare_rounding, t, device="cpu")[0]
    rows.append((t, *(f"{100 * off:.2f}" for off in (by_rows, summed, in_float32))))
assert summed > 1.5 * by_rows and in_float32 < 1.1 * by_rows
head = ["by rows (%)", "inner, summed in bfloat16 (%)", "inner, summed in float32 (%)"]
show.table(rows, ["ranks", *head], caption="Relative error of a product in bfloat16")

# %% [markdown]
# By rows, the error does not depend on $t$.
# By the inner dimension, the error grows with $t$; summing in float32 avoids this, but sends twice the bytes.
#
# ## Rows, columns, inner dimension or grid?
#
# | way | advantages | disadvantages |
# |---|---|---|
# | rows | nothing to send if $C$ may stay sharded | all of $B$ on every rank; shards with few rows |
# | columns | nothing to send if $C$ may stay sharded; its result is sharded like the input of *inner* | all of $A$ on every rank |
# | inner | neither factor whole; its input is sharded like the result of *columns* | a partial sum as large as $C$ on every rank; a sum in every product |
# | grid | no matrix whole; received bytes fall with $\sqrt t$ | more and smaller messages; $t$ must be $p \cdot q$ |
# | one rank | no communication | all matrices must fit; slower than several ranks above $n^*$ |
#
# In data parallelism, tokens are the rows: each rank has its own rows, and all of the weights.
# Data parallelism is *by rows*, without the all-gather.
# ZeRO's stage 3 gathers $B$, the weights, first.
# Tensor parallelism shards weights by columns and by the inner dimension.
#
# ```{admonition} On more GPUs
# :class: note
#
# On one GPU you can measure how thin shards slow down a rank, but ranks that share a GPU or cores do not compute at the same time.
# With a second GPU you could measure the size above which splitting pays on a real link,
# and how much of the all-gather a library overlaps with the next product.
# ```
#
# ## Exercises
#
# ```{exercise-start} Bytes of a sum (easy)
# :label: ex-gemm-bytes
# ```
#
# $A$ is 4096 × 2048, $B$ is 2048 × 11008, both in float32. Four ranks multiply by the inner dimension and sum with a ring all-reduce.
# How many bytes does each rank send?

# %%
answer = ...  # bytes
check(answer, "gemm_bytes")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-gemm-bytes
# :label: sol-gemm-bytes
# :class: dropdown
# ```
#
# The partial sums have the shape of $C$.

# %%
answer = 2 * 3 / 4 * 4096 * 11008 * 4
check(answer, "gemm_bytes")

# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} The size above which splitting pays (easy)
# :label: ex-gemm-pays
# ```
#
# Eight GPUs multiply with 400 TFLOP/s each, and each receives 200 GB/s. Two square matrices of 2-byte numbers are multiplied by rows, and $C$ is gathered on all GPUs.
# Ignore latency. Above which side are eight GPUs faster than one?

# %%
answer = ...  # rows of the matrices
check(answer, "gemm_pays")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-gemm-pays
# :label: sol-gemm-pays
# :class: dropdown
# ```
#
# $n^* = \frac{w}{2} \beta F$, whatever the number of GPUs.

# %%
answer = 2 * 400e12 / (2 * 200e9)
check(answer, "gemm_pays")


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Columns, backward (medium)
# :label: ex-gemm-backward
# ```
#
# $C = AB$ was computed by columns: `a_MK` is whole on every rank, `b_Kn` has this rank's columns, and `grad_Mn` is the gradient of this rank's columns of $C$.
# Return the gradient of all of $A$, on every rank, and the gradient of `b_Kn`, with a single collective. $t$ need not divide $N$.
# (In one process the gradients are `grad_MN @ b_KN.T` and `a_MK.T @ grad_MN`.)

# %%
def my_backward_of_columns(a_MK, b_Kn, grad_Mn, group):
    pass  # your code


check(my_backward_of_columns)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-gemm-backward
# :label: sol-gemm-backward
# :class: dropdown
# ```
#
# $A$'s gradient sums over $N$, the sharded dimension of $C$, so it is a product by the inner dimension.
# $B$'s gradient is again a product by columns.

# %%
def my_backward_of_columns(a_MK, b_Kn, grad_Mn, group):
    grad_MK = grad_Mn @ b_Kn.T  # [M, n] @ [n, K]: a summand
    dist.all_reduce(grad_MK, group=group)
    return grad_MK, a_MK.T @ grad_Mn  # [K, M] @ [M, n]


check(my_backward_of_columns)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} The bias, once (medium)
# :label: ex-gemm-inner
# ```
#
# Return $AB + \text{bias}$ on every rank. `a_Mk` and `b_kN` are this rank's shares of the inner dimension; `bias_N` is whole on every rank.

# %%
def my_inner(a_Mk, b_kN, bias_N, group):
    pass  # your code


check(my_inner)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-gemm-inner
# :label: sol-gemm-inner
# :class: dropdown
# ```
#
# Add the bias after the sum. Before the sum, the bias would be added $t$ times.

# %%
def my_inner(a_Mk, b_kN, bias_N, group):
    c_MN = a_Mk @ b_kN  # [M, k] @ [k, N]
    dist.all_reduce(c_MN, group=group)
    return c_MN + bias_N


check(my_inner)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Two products, one collective (medium)
# :label: ex-gemm-two
# ```
#
# A feed-forward network is $\text{gelu}(XV)\,W$. `x_MK` is whole, `v_Kf` has this rank's columns of $V$, and `w_fN` the rows of $W$ with the same numbers.
# Return the result on every rank, with a single collective.

# %%
def my_two_products(x_MK, v_Kf, w_fN, group):
    pass  # your code


check(my_two_products)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-gemm-two
# :label: sol-gemm-two
# :class: dropdown
# ```
#
# A product *by columns* leaves its result sharded exactly as a product *by the inner dimension* needs its input, and GELU works on each entry alone. Tensor parallelism is built on this {cite}`shoeybi2019megatron`.

# %%
def my_two_products(x_MK, v_Kf, w_fN, group):
    y_Mf = F.gelu(x_MK @ v_Kf)  # [M, K] @ [K, f]
    z_MN = y_Mf @ w_fN  # [M, f] @ [f, N]
    dist.all_reduce(z_MN, group=group)
    return z_MN


check(my_two_products)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} B in a ring (hard)
# :label: ex-gemm-ring
# ```
#
# `a_mK` has this rank's rows of $A$, `b_kN` this rank's rows of $B$; $t$ divides $K$. Return this rank's rows of $C$.
# No rank may hold all of $B$: pass the shards around a ring.
# `ranks.exchange(outgoing, to, incoming, source, group)` starts to send and receive in one batch; `.wait()` on its result waits. (A ring in which all ranks send first and then receive hangs with NCCL: [Collectives](collectives.md#deadlock-in-a-ring-who-sends-first) says why.)

# %%
def my_ring_product(a_mK, b_kN, group):
    pass  # your code


check(my_ring_product)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-gemm-ring
# :label: sol-gemm-ring
# :class: dropdown
# ```
#
# Start to send before you multiply, so that both overlap. In step $i$ rank $r$ holds the shard of $B$ from rank $r - i$; multiply it by the columns of $A$ with the same numbers.

# %%
def my_ring_product(a_mK, b_kN, group):
    rank, size, k = dist.get_rank(group), dist.get_world_size(group), len(b_kN)
    c_mN, piece = a_mK.new_zeros(len(a_mK), b_kN.shape[1]), b_kN
    for step in range(size):
        if step < size - 1:
            after, before = (rank + 1) % size, (rank - 1) % size
            following = torch.empty_like(piece)
            travelling = ranks.exchange(piece, after, following, before, group)
        source = (rank - step) % size
        c_mN += a_mK[:, source * k : (source + 1) * k] @ piece  # [m, k] @ [k, N]
        if step < size - 1:
            travelling.wait()
            piece = following
    return c_mN


check(my_ring_product)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Least memory (design)
# :label: ex-gemm-way
# ```
#
# A rank holds its shards of $A$ and $B$ and its own product. Return the way in which the fullest rank holds the fewest entries: `"rows"`, `"columns"` or `"inner"`.
# The ranks need not divide the sizes; $C$ is neither gathered nor reduced.

# %%
def my_way(M, K, N, ranks_):
    pass  # your code


check(my_way)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-gemm-way
# :label: sol-gemm-way
# :class: dropdown
# ```
#
# Round shares up, and count all of $C$ for the inner dimension.

# %%
def my_way(M, K, N, ranks_):
    m, k, n = (-(-size // ranks_) for size in (M, K, N))
    held = {
        "rows": m * K + K * N + m * N,
        "columns": M * K + K * n + M * n,
        "inner": M * k + k * N + M * N,
    }
    return min(held, key=held.get)


check(my_way)

# %% [markdown]
# ```{solution-end}
# ```
#
# A last question without a check: in the ring product each rank computes $t$ products of $[m, k] \times [k, N]$ instead of one product. When is the ring slower, although no rank waits for a message?
#
# ## Summary
#
# - A product can be cut along $M$, $N$ or $K$. Along $M$ and $N$ nothing is sent if $C$ may stay sharded; along $K$ there is a sum over ranks.
# - One matrix stays whole on every rank: $B$ by rows, $A$ by columns, a partial sum of $C$ by the inner dimension.
# - To have all of $C$ on all ranks, a rank sends $\frac{t-1}{t} S_C$ by rows and columns, twice as much by the inner dimension.
# - On a grid no matrix is whole, and received bytes per rank fall with $\sqrt t$.
# - Splitting pays for sizes above $n^* = \frac{w}{2}\beta F$, for any number of ranks.
# - Left of the roofline's ridge, bytes determine the time. Thin shards do fewer operations per byte, so each rank computes more slowly.
# - Shard the first product by columns and the second by the inner dimension: two products need one sum, as in tensor parallelism.
#
# ## Further reading
#
# - {cite:t}`vandegeijn1997summa`: SUMMA in full, with the pipelining of its broadcasts.
# - {cite:t}`chan2007collective`: the collectives of this lesson, their costs, and why no algorithm can send less.
# - {cite:t}`irony2004lower`: the bytes that a product must move, for a given memory. {cite:t}`solomonik2011matmul` hold copies of the matrices, and move fewer bytes.
# - {cite:t}`williams2009roofline`: the roofline.
# - {cite:t}`nvidia2023gemm`: tiles and waves: how a GPU's speed depends on the shape of a product.
