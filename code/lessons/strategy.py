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
# # Strategy: choosing a parallel layout for a model and a cluster
#
# After this lesson you can
#
# - say what limits a layer on a given GPU: matrix products, memory, the network or kernel launches;
# - predict the time of a step in twenty lines, and its memory with the package, and state both errors;
# - choose a layout for a model and a cluster, and say which constant would change the choice;
# - fit such a prediction to a few steps of your own.
#
# You train Llama 3 70B on 64 H100s, with 512 sequences of 8,192 tokens in a step.
# Hundreds of layouts fit in memory, and the slowest of these takes more than three times as long as the fastest.
#
# ## Layouts that fit, and their step times

# %% tags=["hide-input"]
# Imports, four models and the machines
import argparse
import io
import statistics
from collections import defaultdict
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from math import ceil, log

import torch
import torch.distributed as dist

from shardcourse.exercises import check
from shardlab import memory, mesh, ranks
from shardlab.common import show
from shardlab.common.shapes import PRESETS, Config
from shardlab.common.show import plots
from shardlab.gpt.model import GPT, loss
from shardlab.measure import count
from shardlab.measure.count import speed
from shardlab.mesh.job import load_batch, build_model
from shardlab.mesh.states import count_sent_bytes, measure_state_bytes
from shardtools import strategy
from shardtools.strategy import MACHINES, Layout, core, measured_runs, fit_runs
from shardtools.strategy.command import add_command
from shardtools.strategy.fit import fit
from shardtools.strategy.measure import measure_rates
from shardtools.strategy.predict import predict_rank0_bytes, predict_job
from shardtools.strategy.rates import DATA_DIR, Rate, Rates, load_rates

show.set_style()
GB = 1e9


def run_cli(line, lines=12):
    """Print the first lines of the output of `python -m shardlab …`."""
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers())
    chosen = parser.parse_args(line.split())
    with redirect_stdout(io.StringIO()) as printed, redirect_stderr(printed):
        assert chosen.command(chosen) == 0
    print(*printed.getvalue().splitlines()[:lines], sep="\n")


H100 = MACHINES["h100"]
MODELS = {
    "1B": PRESETS["llama-3.2-1b"],
    "8B": PRESETS["llama-3-8b"],
    "70B": PRESETS["llama-3-70b"],
    "405B": PRESETS["llama-3-405b"],
}

# %% [markdown]
# How should you split the model? The planner tries all layouts:

# %%
TITAN = strategy.PROFILES["torchtitan"]
found = strategy.plan(MODELS["70B"], H100, gpus=64, batch=512, profile=TITAN)
fits = len(found.feasible)
ruled = found.rejections["needs more memory than the GPU has"]
print(fits + ruled, "layouts, of which", fits, "fit")
for one in (found.feasible[0], found.feasible[-1]):
    print(round(one.seconds), "s a step:", one.layout)

# %% [markdown]
# A layout gives the number `d` of *replicas* (copies of the model), and how each is split: `t` tensor ranks shard every matrix, `p` pipeline stages divide the layers, and `c` context ranks shard every sequence.
# A degree that is not printed is 1.
# `recompute` means that backward computes all activations of a layer again; with `norms` only those of norms, with `ffn` only those between the matrices of a feed-forward network.
#
# torchtitan 0.3.0, PyTorch's training platform, can run the first layout.
# The predicted time uses rates of matrix products, attention and messages that were [fitted](#predicted-and-measured-steps-compared) to published steps; the predicted memory follows from torchtitan's source and from guesses.
# Where this page names no engine, it plans for the course's own model, whose rates are all *guesses*: rates that jobs commonly reach.

# %% tags=["hide-input"]
# Draws every layout that fits: reserved memory and time of a step
best, last = found.feasible[0], found.feasible[-1]
copies = next(one for one in found.feasible if one.layout.dp == 64)
assert fits > 100 and last.seconds > 3 * best.seconds and best.layout.cp == 1
points = [(one.reserved / GB, one.seconds, one.layout) for one in found.feasible]
alt = (
    f"{fits} dots: what a layout reserves on its fullest GPU, and the seconds of its step. "
    f"At every fullness there are fast and slow ones. The fastest takes {best.seconds:.0f} s at "
    f"{best.reserved / GB:.0f} GB, copies alone {copies.seconds:.0f} s at "
    f"{copies.reserved / GB:.0f} GB, and others take up to {last.seconds:.0f} s."
)
show.figure(plots.plot_layouts(points), alt, "strategy-layouts")


# %% [markdown]
# A layout's memory says nothing about its speed: only a prediction tells fast layouts from slow ones.
#
# ## What limits a layer: memory, network or kernel launches
#
# A GPU computes matrix products. It is slower than its data sheet says when it waits for one of three things:
#
# - **memory**: weights and activations come from its memory, some terabytes per second;
# - **the network** (`wire` in the table): data of other GPUs come over links, which are ten to a hundred times slower;
# - **launches**: a CPU launches the GPU's kernels one by one, which takes milliseconds for a layer.
#
# The data sheet gives the rates of memory and links.
# Divide operations per second by bytes per second: this many operations take as long as moving one byte.
#
# ![For six GPUs, on a logarithmic axis, the FLOP of a matrix product that take as long as moving one byte. V100: 139 from its memory, 833 from its node, 20,000 from the network. A100: 153, 1,040, 12,480. H100: 295, 2,198, 19,780. B200: 281, 2,500, 45,000. GB200: 312, 2,778, 50,000. RTX 4090: 164, 5,156, 105,600. FLOP/s grew faster than every bandwidth.](../figures/strategy_walls.svg)

# %%
def layer_limits(machine, config, tokens, t):
    """Return a layer's seconds, forward and backward, on one of t GPUs that share it."""
    h, f = config.hidden, config.ffn_width  # widths of the model, of the feed-forward network
    kv = config.key_value_heads * config.head_size  # width of keys, and of values
    weights = 2 * h * (h + kv) + 3 * h * f  # attention's, and the feed-forward network's
    return {
        "products": 6 * tokens * weights / t / machine.flops,  # 2 forward, 4 backward
        "memory": 3 * 30 * tokens * h / t / machine.memory_bandwidth,  # norms etc.
        # four all-reduces, in 16 bits
        "wire": 8 * (t - 1) / t * 2 * tokens * h / machine.node_bandwidth,
        "launches": 2e-3,  # PyTorch, neither compiled nor captured
    }


# %% tags=["hide-input"]
# Table: times of a layer of the 8B model, and which is longest
rows, longest = [], {}
for gpu, tokens, t in (
    ("a100", 8192, 1),
    ("h100", 8192, 1),
    ("h100", 8192, 8),
    ("h100", 1024, 8),
    ("gb200", 8192, 8),
    ("rtx-4090", 8192, 8),
):
    each = layer_limits(MACHINES[gpu], MODELS["8B"], tokens, t)
    longest[gpu, tokens, t] = max(each, key=each.get)
    cells = [f"{1e3 * value:.1f}" for value in each.values()]
    rows.append([MACHINES[gpu].name, f"{tokens:,}", t, *cells, longest[gpu, tokens, t]])
assert longest["h100", 8192, 1] == "products" and longest["h100", 1024, 8] == "launches"
assert longest["rtx-4090", 8192, 8] == "wire"
head = ["", "tokens", "t", "products (ms)", "memory (ms)", "wire (ms)", "launches (ms)", "longest"]
show.table(rows, head)

# %% [markdown]
# On one GPU the products take longest, so the GPU is busy.
# Where eight GPUs share the layer, the products take an eighth of the time, but the GPUs send bytes, and launches take as long as before.
# On eight RTX 4090, which have PCIe and no NVLink, sending takes longest.
# So the same split is good on one machine and bad on another.
#
# Launches limit only code that runs operator by operator, as the measured steps below did.
# `torch.compile` fuses a block's operators into fewer kernels; a CUDA graph records a step's launches once, and then starts all of them in one call: the step is *captured*.
# torchtitan 0.3.0 (September 2026) captures forward and backward by default, but not in a pipeline; Megatron Core 0.19.2 (September 2026) does so with `--cuda-graph-impl`.
# Capturing needs constant shapes, and no operation that waits for the CPU.
#
# ## Measured steps: 3,257 published runs
#
# The authors of the Ultra-Scale Playbook {cite}`tazi2025ultrascale` report over 4,000 experiments on up to 512 H100s, early in 2025, with the library nanotron.
# Their table, here called the *sweep*, lists 3,257 runs of four models, with tokens per second and memory.
# 340 of these runs come with this course. The next sections use the first forty, on up to 128 GPUs.

# %%
nanotron = strategy.PROFILES["nanotron"]  # what is particular to that library
sweep = measured_runs.read_rows("sweep", DATA_DIR / "sweep.csv")[:40]
jobs = [measured_runs.row_to_job(row, nanotron) for row in sweep]
runs = [measured_runs.row_to_measurement(row, job) for row, job in zip(sweep, jobs)]
seconds = [step for step, _ in runs]  # of a step; the other is bytes

# %% tags=["hide-input"]
# Table: three of the forty runs
rows = []
for i in (0, 1, 39):
    job = jobs[i]
    size = memory.count_parameters(job.config) / GB
    rows.append(
        [f"{size:.1f}B", job.layout.world_size, str(job.layout), job.layout.micro_batch,
         job.layout.microbatches, f"{seconds[i]:.1f}"]
    )  # fmt: skip
show.table(rows, ["parameters", "GPUs", "layout", "b", "m", "a step (s)"])


# %% [markdown]
# `b` is the number of sequences in a micro-batch, and `m` the number of micro-batches in a step.
#
# Two numbers judge a prediction.
# The first is the median relative error.
# The second says if the prediction ranks the layouts of one model, on the same number of nodes, in the measured order.
# It is Spearman's correlation between the two orders: 1 if they are equal, near 0 if unrelated.

# %%
def median_error(predicted):
    """Return the median of |log(predicted / measured)|, about the relative error."""
    return statistics.median(abs(log(p / s)) for p, s in zip(predicted, seconds))


def rank_correlation(predicted):
    """Return Spearman's correlation: the mean over models and numbers of nodes."""
    groups = defaultdict(list)
    for row, p, s in zip(sweep, predicted, seconds):
        groups[row["model"], row["nodes"]].append((p, s))
    each = []
    for pairs in (pairs for pairs in groups.values() if len(pairs) > 2):
        places = [[sorted(column).index(x) for x in column] for column in zip(*pairs)]
        each.append(statistics.correlation(*places))
    return statistics.mean(each)


# %% [markdown]
# ## A lower bound from the data sheet does not rank layouts
#
# The *floor* of a step is a lower bound of its time from the data sheet alone: all products and links run at the sheet's rates, and all communication that can overlap does.
# `strategy.compute_floor` computes the floor; no measured step is faster.

# %%
floors = [strategy.compute_floor(j.config, j.machine, j.layout, j.seq).total for j in jobs]
fraction = statistics.median(f / s for f, s in zip(floors, seconds))
rank = rank_correlation(floors)
print("fraction of a step:", round(fraction, 2), "rank correlation:", round(rank, 2))

# %% tags=["hide-input"]
# Checks that no measured step is below its floor
assert all(f < s for f, s in zip(floors, seconds))
assert rank_correlation(floors) < 0.5


# %% [markdown]
# `````{admonition} False: "count FLOPs and bytes, divide by the data sheet, take the smallest"
# :class: checked
#
# The floor is a quarter of the measured time, and its order of layouts is nearly unrelated to the measured order.
# A floor says which times are impossible, not which layout is fastest.
# `````
#
# ## A prediction with six constants
#
# A better prediction needs constants that no data sheet has: the rates that real code reaches. Six constants are enough.

# %%
def predict_step(job, r):
    """Return the seconds of a step; r: the six constants, by name."""
    at, config, tokens = job.layout, job.config, job.tokens  # of one micro-batch
    t, p, m = at.tp, at.pp, at.microbatches
    flops = strategy.count_flops(config, int(tokens), job.seq, causal=False)
    last = 6 * tokens * config.vocab * config.hidden  # the output layer's
    launch = r["launch"] + (r["crossing"] * (t - 1) if p > 1 and job.nodes > 1 else 0)
    wire = 8 * (t - 1) / t * job.stream_bytes / r["node"] + r["beyond"] * (ceil(t / 8) - 1)
    layer = max((flops - last) / config.layers / t / r["products"], launch) + wire
    stages = at.build_stages(config)  # in layers; the head is the output layer
    busy = [s.layers * layer + s.has_head * last / t / r["products"] for s in stages]
    held = max(job.count_parameters(s).total for s in stages)
    gradients = 8 * held * (at.dp - 1) / at.dp / r["network"]  # 4 bytes each, sent twice
    return (m - 1) * max(busy) + sum(busy) + gradients


# %% [markdown]
# - A layer takes the time of its products or of its launches, whichever is longer, because the CPU launches while the GPU computes. The time of its messages is added.
# - The time of the pipeline's slowest stage counts once for each micro-batch, the time of every other stage once in a step.
# - Gradients are summed over the replicas at the end.
#
# [The module](#the-module) adds attention's own rate, communication that overlaps with backward, the optimizer, and memory.
#
# Each constant begins as a guess, with the fraction by which the guess may be wrong: both together are its *prior*.
# `fit` changes the constants until predicted and measured times agree. A constant about which the steps say nothing stays near its guess.

# %%
GUESSES = {  # its unit, a guess, and by what fraction that may be off
    "products": ("FLOP/s of a GPU", 4e14, 0.3),
    "launch": ("s of a layer, forward and backward", 3.6e-3, 0.3),
    "crossing": ("s more for each tensor rank, if a pipeline leaves the node", 2e-3, 0.4),
    "node": ("bytes/s inside of a node", 320e9, 0.3),
    "beyond": ("s of a layer for each further node of a tensor group", 6e-3, 0.5),
    "network": ("bytes/s between copies, for each GPU", 25e9, 0.5),
}


def fit_constants(free, steps, guesses=GUESSES):
    """Fit the constants in `free` to steps: pairs of a job and its seconds."""
    rates = {name: Rate(v, unit, off, "a guess") for name, (unit, v, off) in guesses.items()}
    pairs = [(partial(predict_step, job), taken) for job, taken in steps]
    return fit(Rates("course", rates), pairs, free, "fitted")


steps = list(zip(jobs, seconds))
six = fit_constants(list(GUESSES), steps)
predicted = [predict_step(job, six) for job in jobs]
error, rank = median_error(predicted), rank_correlation(predicted)
print("median error:", round(error, 3), "rank correlation:", round(rank, 2))

# %% tags=["hide-input"]
# Table: the six constants, with the uncertainty of the fit
assert error < 0.1 and rank > 0.95
rows = [
    [name, f"{rate.value:.3g}", f"± {rate.spread:.0%}", rate.unit]
    for name, rate in six.by_name.items()
]
show.table(rows, ["constant", "value", "may be off by", "unit"])

# %% [markdown]
# The median error is less than a tenth, and the predicted order is nearly right, for models from 1 to 80 billion parameters.
# A GPU reaches less than half of the 989 TFLOP/s on its data sheet, and no layer takes less than 4 ms, however small.
#
# ### Ablation: fits without one constant
#
# Remove one constant, fit the others again, and compare.

# %%
NEUTRAL = {"launch": 1e-9, "crossing": 1e-9, "node": 1e30, "beyond": 1e-9, "network": 1e30}


def predict_without(name):
    unit, _, spread = GUESSES[name]
    rest = [other for other in GUESSES if other != name]
    rates = fit_constants(rest, steps, {**GUESSES, name: (unit, NEUTRAL[name], spread)})
    return [predict_step(job, rates) for job in jobs]


# %% tags=["hide-input"]
# Table: error and rank correlation without each constant
lost = {"none": predicted} | {name: predict_without(name) for name in NEUTRAL}
rows = [[name, f"{median_error(p):.1%}", f"{rank_correlation(p):.2f}"] for name, p in lost.items()]
assert rank_correlation(lost["launch"]) < 0.93 and median_error(lost["crossing"]) > 1.5 * error
show.table(rows, ["left out", "median error", "rank correlation"])

# %% [markdown]
# Without `launch` the order is worst, yet papers on parallelism have no formula for launches.
# For a captured step you would leave out `launch` first.
# `crossing` is particular to this cluster: its cause is unknown, and without it the error doubles.
# Few of the forty steps wait for links inside a node or for the network, so the fit is least sure of `node` and `network`.
#
# ## Predicted and measured steps compared
#
# `strategy.predict` makes the same prediction for real jobs, with other schedules, recomputation, all ZeRO stages, long sequences, and memory.
# A fit looks too good on the steps that it was fitted on. So the constants are fitted on every other row of the sweep, and judged by the remaining rows.
# Megatron's constants are fitted on five layer times of a model of 22 billion parameters on eight A100s, which {cite:t}`korthikanti2022recomputation` print; these constants then predict whole steps, on up to 3,072 GPUs.

# %%
half = fit_runs.fit_rows(sweep[::2], nanotron, "every other row of the sweep").to_values()
others = list(zip(jobs, runs))[1::2]
rest = [(predict_job(job, half).seconds.total, step) for job, (step, _) in others]
rest_bytes = [(predict_rank0_bytes(job, half), size) for job, (_, size) in others]

# %% tags=["hide-input"]
# Draws predicted over measured seconds: the sweep's other half, and Megatron
megatron, five = strategy.PROFILES["megatron"], load_rates("megatron").to_values()


def published_seconds(case):
    """Return a published step's seconds (SC21: from a rate that counts recomputation)."""
    config, found = case["config"], case["published"]
    if "iter_s" in found:
        return found["iter_s"]
    s, h, layers = config["seq"], config["hidden"], config["layers"]
    inner = 1 + s / (6 * h) + config["vocab"] / (16 * layers * h)
    work = 96 * config["gbs"] * s * layers * h**2 * inner
    return work / config["n_gpus"] / (found["tflops_per_gpu"] * 1e12)


cases = measured_runs.read_cases("cases", DATA_DIR / "megatron.json")
groups = {"nanotron, H100: rows not fitted": rest}
for words, start in (
    ("Korthikanti et al., A100", ("korthikanti-22B", "korthikanti-175B")),
    ("Narayanan et al., A100", ("sc21",)),
):
    groups[words] = [
        (
            predict_job(measured_runs.case_to_job(case["config"], megatron), five).seconds.total,
            published_seconds(case),
        )
        for case in cases
        if case["id"].startswith(start)
    ]
worst = {name: max(abs(p / s - 1) for p, s in pairs) for name, pairs in groups.items()}
middle = statistics.median(abs(p / s - 1) for p, s in rest)
assert middle < 0.07 and max(list(worst.values())[1:]) < 0.06
near = sum(abs(p / s - 1) < 0.1 for p, s in rest)
alt = (
    "Predicted over measured seconds of a step, from half a second to ten minutes. Of twenty rows "
    f"of the sweep {near} lie within a tenth of 1, and so do all nine steps of Megatron."
)
show.figure(plots.plot_prediction_ratios(groups), alt, "strategy-agreement")


# %% tags=["hide-input"]
# Table: median and largest error of the predictions
def format_errors(pairs):
    each = sorted(abs(p / s - 1) for p, s in pairs)
    return f"{statistics.median(each):.1%}", f"{each[-1]:.1%}"


rows = [["the sweep, rows not fitted", "seconds", *format_errors(rest)]]
rows.append(["the sweep, rows not fitted", "bytes of rank 0", *format_errors(rest_bytes)])
for words in list(groups)[1:]:
    rows.append([words, "seconds", *format_errors(groups[words])])
assert statistics.median(abs(p / s - 1) for p, s in rest_bytes) < 0.07
show.table(rows, ["", "predicted", "median error", "at most"])

# %% [markdown]
# Memory means the bytes that the allocator *reserves* on rank 0, which is on the first stage: more than the bytes of the rank's tensors.
#
# The course's constants for nanotron are fitted on all 340 rows, Megatron's on the five layer times, and those of today's engines on the published rows below.
# All others are guesses.
# A second test of nanotron's constants groups the rows by model and number of nodes, fits on half of the groups, and predicts the others, with a median error of 7 % in seconds and 3 % in bytes.
# In at most one group, the layout predicted as fastest was more than a tenth slower than the fastest one measured.
#
# Five layer times of a 22B model predict, within a few percent, steps of a 175B model on 64 GPUs, a 145.6B model on 1,536 and a 1T model on 3,072: all run the same kernels.
#
# The projects of today's engines (Megatron, torchtitan and others) publish tokens per second on up to 1,024 GPUs, also in 8 and 4 bits and with experts.
# `strategy fit` takes a table of such rows with `--profile engines`, and names the rows that it leaves out.
# In the picture, each half of 279 rows is predicted with constants that were fitted on the other half.
#
# ![Predicted / measured time of published steps, a dot each, by source, on a logarithmic axis; each half is predicted with rates fitted on the other. Medians (steps): Megatron-Bridge 1.00 (178), llm-foundry 1.00 (52), torchtitan 0.96 (16), Megatron-MoE-ModelZoo 1.05 (11), NeMo 24.07 0.95 (11), Automodel 1.14 (8), Megatron-LM examples 1.07 (3).](../figures/strategy_engines.svg)
#
# For one configuration of Qwen3-30B on eight GB200s, NVIDIA publishes 23,766 tokens per second and GPU with container 25.11, and 39,936 with 26.08. No column explains the difference, so no constant can.
#
# ## Choosing a layout with `strategy.plan`
#
# `strategy.plan` predicts every layout and sorts the layouts by time. The cell plans three jobs, with torchtitan's constants.

# %%
jobs_to_plan = {  # model, GPU, how many, sequences of a step, tokens of the training
    "large": (MODELS["70B"], H100, 64, 512, 2e12),
    "GPT-3": (PRESETS["gpt-3-175b"], MACHINES["a100"], 1024, 1536, 300e9),
    "small, much data": (MODELS["1B"], H100, 64, 512, 10e12),
}
plans = {name: strategy.plan(*job[:4], profile=TITAN) for name, job in jobs_to_plan.items()}

# %% tags=["hide-input"]
# Table: the two fastest layouts of each job, with days and longest wait
rows = []
for name, job in jobs_to_plan.items():
    for one in plans[name].feasible[:2]:
        parts = vars(one.prediction.seconds)
        waits = max(set(parts) - {"products", "attention"}, key=parts.get)
        rows.append(
            [name, f"{one.layout}, b {one.layout.micro_batch}", f"{one.seconds:.1f}",
             f"{one.reserved / GB:.0f}",
             f"{one.mfu:.0%}", f"{job[4] / one.tokens_per_second / 86400:.0f}", waits]
        )  # fmt: skip
assert round(copies.seconds / best.seconds, 1) == 1.2
show.table(rows, ["", "layout", "a step (s)", "GB", "MFU", "days", "waits most for"])

# %% [markdown]
# With `interleaved 4` each stage has four separate chunks of the layers, which makes the pipeline's bubble shorter.
# MFU is the fraction of the data sheet's operations per second that the model's own operations reach, without recomputation and without token pairs that a mask or a window hides.
#
# *The large job* uses all three kinds of parallelism: four ranks form a stage and shard its matrices, four stages form a replica, and four replicas shard the optimizer states (ZeRO-1).
# Each rank then holds so few activations that it recomputes only those of norms, and those between the matrices of feed-forward networks.
# 64 replicas that shard their weights (ZeRO-3) have to recompute whole layers, and take a fifth longer.
#
# *GPT-3* needs all three kinds on A100s: tensor parallelism inside the node, a pipeline across nodes, ZeRO-1 between replicas.
# {cite:t}`narayanan2021megatron` report 34 days at 140 TFLOP/s, with full recomputation.
# The plan shards optimizer states over the replicas, which leaves enough memory to keep most activations.
# [A worked example](../book/gpt3_on_64_gpus.md) splits GPT-3 over 64 GPUs.
#
# *The small job* needs only data parallelism. Only its batch is left to choose.

# %%
GPUS, PRICE = 256, 2.0  # dollars for an hour of one of them


def token_cost(batch):
    """Return the dollars for a million tokens, with data parallelism alone."""
    found = strategy.plan(
        MODELS["1B"], H100, GPUS, batch, profile=TITAN, constraints={"tp": 1, "pp": 1}
    )
    return 1e6 * GPUS * PRICE / 3600 / found.feasible[0].tokens_per_second


costs = {batch: token_cost(batch) for batch in (256, 512, 1024, 2048, 4096, 8192)}

# %% tags=["hide-input"]
# Table: cost of a billion tokens, by batch
prices = list(costs.values())
assert prices[0] > 1.08 * prices[-1] and prices[-3] < 1.03 * prices[-1]
rows = [[f"{batch:,}", batch // GPUS, f"{1e3 * price:.2f}"] for batch, price in costs.items()]
show.table(rows, ["sequences in a step", "per GPU", "a billion tokens ($)"])

# %% [markdown]
# A doubled batch does twice the work, but needs only one all-reduce of gradients and one optimizer step.
# Above about eight sequences per GPU, a larger batch saves hardly any money, and the model learns less from each token.
#
# ### Tensor degrees 1, 2 and 4: bytes and seconds
#
# Eight H100s train Llama 3 8B on 64 sequences of 8,192 tokens a step, in bfloat16, without recomputation.
# Only the tensor degree $t$ changes, with $8/t$ replicas (ZeRO-1). All columns are predictions, the seconds with the guessed rates of the course's own model.

# %% tags=["hide-input"]
# Table: memory, bytes sent and seconds for tensor degrees 1, 2 and 4
rows, by_degree = [], {}
for t in (1, 2, 4):
    layout = Layout(dp=8 // t, tp=t, zero=1, micro_batch=1, microbatches=8 * t)
    course = strategy.PROFILES["course"]
    made = strategy.plan_layout(MODELS["8B"], H100, layout, seq=8192, profile=course)
    one = by_degree[t] = (made.feasible or [made.closest_infeasible])[0]
    sent = mesh.predict_sent_bytes(MODELS["8B"], layout, rank=0)  # in float32: bfloat16 is half
    fits = f"{one.reserved / GB:.0f}" + ("" if made.feasible else ", does not fit")
    goes = [f"{sent[axis] / 2 / GB:.0f}" for axis in ("tp", "dp")]
    waits = one.prediction.seconds.tensor
    rows.append([t, fits, *goes, f"{waits:.2f}", f"{one.seconds:.1f}"])
assert by_degree[1].reserved > H100.memory > 1.3 * by_degree[2].reserved
assert by_degree[4].seconds > 1.1 * by_degree[2].seconds
head = ["tensor degree", "reserves (GB)", "sends, tensor (GB)", "data (GB)"]
show.table(rows, [*head, "waits, tensor (s)", "a step (s)"])

# %% [markdown]
# Tensor parallelism shards weights, gradients and most activations, which degree 1 cannot hold.
# But its bytes are all-reduces of activations, several in each layer, and the layer waits for them; so of the degrees that fit, take the smallest.
#
# ### The same choice, run on four ranks
#
# The cell runs two jobs, one with a large model and one with much data, each in four layouts with the same batch.
# A rank may hold 20 MB of tensors; more is an out-of-memory error.

# %%
shape = partial(Config, vocab=256, layers=2, heads=8, tied=False)
KINDS = {  # a model, and the sequences of a step
    "large model": (shape(seq=32, hidden=256), 8),
    "much data": (shape(seq=128, hidden=64), 16),
}
ON_FOUR = Layout(dp=4), Layout(dp=2, tp=2), Layout(tp=4), Layout(dp=4, zero=3)


def try_step(config, layout):
    """Run a step on a rank; return its bytes of states, and the bytes that it sent."""
    groups = mesh.create_groups(layout, dist.group.WORLD)
    copy, batch = dist.get_rank(groups.dp), load_batch(config, layout.global_batch, 0)
    try:
        with count.track_memory(device=ranks.device(), limit=20e6):
            model = mesh.Parallel(build_model(config), groups, layout)
            optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
            with count.record_traffic() as sent:
                model.step(*(x.chunk(layout.dp)[copy] for x in batch))
            optimizer.step()
            held, goes = measure_state_bytes(model, optimizer), count_sent_bytes(sent, model)
            return sum(held.values()), sum(goes.values())
    except torch.OutOfMemoryError:
        return "out of memory", ""


# %% tags=["hide-input"]
# Table: bytes that rank 0 holds and sends in each layout, predicted and counted
def try_steps(asked):
    return [try_step(*one) for one in asked]


def format_mb(*values):
    return [value if isinstance(value, str) else f"{value / 1e6:.1f}" for value in values]


cases = [
    (name, config, replace(layout, micro_batch=batch // layout.dp))
    for name, (config, batch) in KINDS.items()
    for layout in ON_FOUR
]
rows, asked = [], [case[1:] for case in cases]
# CPU: the limit is one of tensors; a GPU's allocator takes 20 MB at once
found = ranks.run(try_steps, 4, asked, device="cpu")[0]
for (name, config, layout), (has, sends) in zip(cases, found, strict=True):
    states = sum(mesh.predict_state_bytes(config, layout, 0).values())
    goes = sum(mesh.predict_sent_bytes(config, layout, 0).values())
    assert (has, sends) == (states, goes) if sends != "" else states > 20e6
    rows.append([name, str(layout), *format_mb(states, has, goes, sends)])
assert [has == "out of memory" for has, _ in found] == [True] + 7 * [False]
head = ["job", "layout", "states, predicted (MB)", "held", "sent, predicted (MB)", "sent"]
show.table(rows, head)

# %% [markdown]
# Four replicas of the large model do not fit. Tensor parallelism or ZeRO-3 fit, and ZeRO-3 sends nearly four times as many bytes as four tensor ranks.
# With much data all four layouts fit, and data parallelism sends least: gradients do not grow with the batch, but the activations that tensor parallelism sends do.
# Four tensor ranks send ten times as many bytes as four replicas.
#
# ## Rules of thumb, judged
#
# "Use copies below a billion parameters, a pipeline up to ten billion, tensor parallelism and ZeRO up to a hundred billion, and all of them above."
# How much slower than the fastest layout is the best layout under this rule?

# %%
RULE = {
    "1B": ("copies", lambda at: at.tp == at.pp == 1 and at.zero == 0),
    "8B": ("a pipeline", lambda at: at.pp > 1 and at.tp == 1),
    "70B": ("tensor and ZeRO", lambda at: at.tp > 1 and at.zero > 0 and at.pp == 1),
    "405B": ("all of them", lambda at: at.tp > 1 and at.pp > 1 and at.zero > 0),
}

# %% tags=["hide-input"]
# Table: the fastest layout, and the extra time of the rule's best
rows, price = [], {}
for gpu, gpus, batch in (
    ("rtx-4090", 64, 512),
    ("a100-40", 64, 512),
    ("h100", 64, 512),
    ("h100", 504, 1008),
    ("gb200", 288, 576),
):
    for name, (words, obeys) in RULE.items():
        every = strategy.plan(MODELS[name], MACHINES[gpu], gpus, batch).feasible
        good = [one for one in every if obeys(one.layout)]
        price[name, gpu, gpus] = good[0].seconds / every[0].seconds - 1 if good else None
        told = f"{price[name, gpu, gpus]:+.0%}" if good else "does not fit"
        best = str(every[0].layout) if every else ""
        if every:
            rows.append([f"{gpus} × {MACHINES[gpu].name}", name, best, words, told])
assert price["8B", "rtx-4090", 64] > 0.05 and price["70B", "h100", 64] < 0.2
show.table(rows, ["machines", "model", "the fastest", "the rule says", "costs"])


# %% [markdown]
# `````{admonition} False: "size decides"
# :class: checked
#
# On H100s and larger GPUs the rule costs a few percent for 1B, and for 70B no more than the error of the prediction.
# The pipeline for 8B is nowhere the fastest in this table.
# On GPUs of 24 GB without NVLink, the rule's layout for 1B does not fit, and its layout for 70B is several times slower than the planner's.
# A model's size decides if it fits on one GPU. Links and memory decide how to split it.
# `````
#
# All times in this table are predicted with the course's guessed rates. Measure the layouts that are within 5 % of the first.
#
# ## Which constant would change the choice?
#
# The cell halves and doubles each constant, and plans again.

# %%
def plan_with_rate(layout, name, factor, *job):
    """Return the fastest layout at a changed rate, and how much longer `layout` takes."""
    rates = load_rates("course")
    rate = rates.by_name[name]
    changed = Rates("course", {**rates.by_name, name: replace(rate, value=factor * rate.value)})
    fits = strategy.plan(*job, rates=changed).feasible
    old = strategy.predict(*job[:2], layout, rates=changed).seconds.total
    return fits[0].layout, old / fits[0].seconds - 1


# %% tags=["hide-input"]
# Table: changed constants that make another layout the fastest, for two jobs
rows = []
NAMES = "products", "attention", "memory", "launch", "node", "network"
NAMES += "overlapped_collectives", "exposed_gathers"
for config, gpu, words in (("70B", "h100", "70B, 64 × H100"), ("8B", "a100-40", "8B, 64 × A100 40 GB")):
    calm, job = [], (MODELS[config], MACHINES[gpu], 64, 512)
    first = strategy.plan(*job).feasible[0].layout
    for name in NAMES:
        for factor in (0.5, 2.0):
            new, loss_ = plan_with_rate(first, name, factor, *job)
            if new == first:
                calm.append(name)
            else:
                rows.append([words, f"{name} × {factor:g}", str(new), f"{loss_:+.0%}"])
    assert len(calm) > 8
show.table(rows, ["job", "if", "the fastest is", "the first choice takes longer by"])

# %% [markdown]
# For the 70B model five of sixteen changes put another layout first, and the original choice then takes at most 3 % longer: many layouts are nearly as fast.
# No change makes pure data parallelism the fastest. If ZeRO's gathers cost half (`exposed_gathers`), or the network is twice as fast, a layout with two tensor and two context ranks comes first.
#
# ## The command `strategy plan`, and its form
#
# `strategy plan` runs this planner; without `--profile` it plans for the course's own model.
# It prints the number of guessed rates, the fastest layouts, and the reasons why others were ruled out.
# In its table `b` is the number of sequences in a micro-batch, `m` of micro-batches in a step; `GB` is what the fullest GPU reserves, `free` what it could still reserve, `s` the time of a step.
# `MFU` is the fraction of the GPU's peak rate that the model's own operations reach.

# %%
run_cli("strategy plan --model llama-3-70b --gpu h100 --gpus 64 --profile torchtitan --top 3")

# %% [markdown]
# The form below runs `strategy plan` in your browser, for the presets; a config.json needs the command.
# A plan of 1,500 layouts takes ten seconds there, 4,000 layouts up to a minute.
#
# :::{calculator} strategy
# :model: llama-3-8b
# :gpu: a100-40
# :gpus: 8
# :tokens: 2e12
# :::
#
# ## More options, `strategy emit` and `strategy run`
#
# `strategy plan` also searches context ranks (for sequences of at least 8,192 tokens), unequal stages and chunks, and recomputation of single operators.
# `--json` lists what it did not search, and why; `--explain` adds the parts of the first layout's time.
# `--layout` predicts one given layout, for instance from a paper.
# With Megatron's constants, Llama 3 405B on 16,384 GPUs is predicted at 44 % MFU; the real job had 41 % {cite}`dubey2024llama3`.
# The job ran in 80 GiB; the prediction is 92 GB, or 80 GB if gradients are sharded as well.
#
# `--config config.json` plans a model of Hugging Face's hub, also with latent attention, windows or experts. What `transformers` builds is [counted exactly](memory.md#memory-of-a-hugging-face-model-from-its-configjson).
# `--rates here.json` takes the constants that `strategy fit` wrote.
# `strategy emit` plans for an engine (DeepSpeed, torchtitan, Megatron or the course's `train.py`), and writes the fastest layout as this engine's configuration or a batch file for Slurm, each line with its reason. [Your job](../book/your_job.md#emit) lists each engine's models.
# The prediction precedes the configuration:

# %%
run_cli("strategy emit deepspeed --model llama-3-8b --gpu h100 --gpus 16", 15)

# %% [markdown]
# `strategy emit` plans with the memory of the target engine, not of the course's model: Megatron and `fully_shard` sum gradients in float32, with 4 bytes where the course's model has 2.
# So the plan of GPT-3 on 1,024 GPUs has eight stages for Megatron, and four for the course's own model:

# %%
run_cli("strategy emit megatron --model gpt-3-175b --gpu a100 --gpus 1024 --batch 1536", 1)

# %% [markdown]
# `strategy run` trains the first layout on ranks of this machine: the same kinds of parallelism, schedule and recomputation, with degrees, chunks and model as small as possible.
# The command ends with status 0 only if losses and gradients equal one process's, and each rank held and sent the predicted bytes.
# Its last line names what it left out, such as context ranks, which the course's [mesh](mesh.md) does not train.

# %% tags=["measured"]
run_cli("strategy run --model llama-3-70b --gpu h100 --gpus 256 --tp 8 --pp 4", 20)

# %% [markdown]
# [`python -m shardlab parity`](parity.md#comparing-two-scripts) says whether *your* training script computes the same numbers under this layout as in one process.
#
# ## The module
#
# `strategy.predict` first computes the time of a layer:

# %%
show.source(core.predict_layer, core._attention_seconds, core._launch_seconds, core._cpu_seconds, core._link_rates, core._all_reduce_seconds, core._context_seconds)

# %% [markdown]
# `rates` are the constants. Most are fractions of the data sheet's rates, so constants that were fitted on one GPU predict another.
# `SMOOTH_POWER` makes the maximum of GPU and CPU time smooth, since both delay each other when they take equally long.
# [`matmuls`](../code/shardtools/strategy/matmuls.py) computes the time of each matrix product.
#
# The time of a step is computed from its layers:

# %%
show.source(core.predict_seconds, core._stage_work, core._bubble_seconds, core._retry_probability, core._bubble_share, core._head_work, core._message_seconds, core._optimizer_seconds)

# %% [markdown]
# [`data_parallel`](../code/shardtools/strategy/data_parallel.py) computes the time in which replicas wait for gradients and weights.
# ZeRO-3 communicates three times for each micro-batch, mostly overlapped with computation.
# ZeRO-1 gathers new weights after the step. nanotron (early 2025) and DeepSpeed 0.19.8 wait for these weights. torch's `fully_shard`, and Megatron Core 0.19.2 with `--overlap-param-gather`, gather them while earlier layers compute; `strategy emit megatron` writes this option.
#
# ## Constants measured on this machine
#
# `measure_rates` measures the constants instead of fitting them: it times a product, an attention, a pass over memory, launches and an all-reduce, in a second.

# %% tags=["hide-input"]
# Times a training step of the plain GPT, and predicts it
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def step_seconds(config, batch):
    """Return the seconds of a step of the plain GPT on one thread (best of five)."""
    torch.manual_seed(0)
    model = GPT(config).to(DEVICE, DTYPE)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tokens = torch.randint(config.vocab, (batch, config.seq + 1), device=DEVICE)

    def step():
        loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return speed.measure_seconds(step, DEVICE)
    finally:
        torch.set_num_threads(threads)


def predict_and_measure(config, batch):
    """Return a step's seconds: predicted from newly measured rates, and measured."""
    here = measure_rates()
    guess = strategy.predict(config, here.machine, Layout(micro_batch=batch), rates=here)
    return guess.seconds.total, step_seconds(config, batch)


# %% tags=["hide-input", "measured"]
# Table: three steps, predicted from measured constants, and measured
rows, ratios = [], []
for name, batch in (("micro", 2), ("micro", 8), ("mini", 2)):
    guess, taken = predict_and_measure(PRESETS[name], batch)
    ratios.append(guess / taken)
    rows.append([name, batch, f"{guess:.3f}", f"{taken:.3f}", f"{ratios[-1]:.2f}"])
show.check_timing(
    1 / 4 < statistics.median(ratios) < 4, "half of the steps within a factor of four"
)
show.table(rows, ["model", "b", "predicted (s)", "measured (s)", "predicted / measured"])

# %% [markdown]
# Such a prediction is usually within a factor of two.
# It uses one rate for all products, although small products are slower, and ignores caches. A fit to measured steps of your own corrects the constants.
#
# ## How a fit fails: no priors, slow runs, another framework
#
# **Without priors.** Five steps cannot determine six constants.
# In the second fit below, each guess may be wrong by a factor of a hundred.

# %%
loose = {name: (unit, value, 99.0) for name, (unit, value, _) in GUESSES.items()}
few = steps[::8]
tight_fit = fit_constants(list(GUESSES), few)
loose_fit = fit_constants(list(GUESSES), few, loose)

# %% tags=["hide-input"]
# Table: constants of five rows, with and without priors
rows = [
    [name, *(f"{rates[name]:.3g} ± {rates.by_name[name].spread:.0%}" for rates in (tight_fit, loose_fit))]
    for name in GUESSES
]
both = [
    median_error([predict_step(job, rates) for job in jobs]) for rates in (tight_fit, loose_fit)
]
rows.append(["all forty rows, off by", *(f"{error:.0%}" for error in both)])
assert both[0] < 0.75 * both[1] and loose_fit["node"] > 2e12
show.table(rows, ["constant, by five rows", "with priors", "without"])

# %% [markdown]
# Without priors the fitted rate of the links inside a node is several terabytes per second, many times the data sheet's. The table shows the problem: this rate may be off by thousands of percent.
#
# **With disturbed runs.** In some runs another job used the network, or a GPU was hot. Least squares would follow such runs. `fit` gives less weight to a step the further its prediction is off.

# %%
slow = [(job, 4 * taken if i % 10 == 0 else taken) for i, (job, taken) in enumerate(steps)]
among = fit_constants(list(GUESSES), slow)  # four rows of forty are four times too slow
moved = {name: among[name] / six[name] - 1 for name in GUESSES}
print({name: round(x, 2) for name, x in moved.items()})

# %% tags=["hide-input"]
# Compares the fit with slow runs to the fit without them
assert abs(moved["products"]) < 0.1 and abs(moved["launch"]) < 0.15 and moved["beyond"] < 0.4

# %% [markdown]
# The sweep has such runs: in some jobs every message between stages takes a quarter of a second, in others with the same layout less than a millisecond.
# No constant predicts such runs, but you notice them when you compare them with a prediction.
#
# **With another framework.** Constants hold for the code that they were fitted on.
# Another framework is faster or slower by nearly the same factor in all rows: fit that one factor.
#
# ## What goes wrong, and how it looks
#
# | symptom | cause |
# |---|---|
# | the best layout on paper is slow in practice, and all others as well, by the same factor | constants of another framework: fit one factor, from one measured step |
# | one layout is many times slower than predicted, similar layouts are not | it needs more than about 96 % of the GPU's memory: the allocator frees and retries |
# | a small model does not get faster with larger `t` | launches: a layer takes as long as its launches on the CPU, however small each rank's shard; compile the blocks, or capture the step |
# | predicted and measured agree on one node, but not on two | the wrong network interface, or one network card for eight GPUs: the check in [Clusters](cluster.md) finds it on all ranks |
# | the planner's first three layouts change places with every new constant | they are equal within the prediction's error: take the layout that leaves most memory free, or measure them |
# | fitted constants are absurd, and may be off by more than 100 % | too few steps for so many constants, and no priors |
#
# The predictions ignore other traffic on the network and the batch size above which learning suffers, and assume a number for the imbalance of experts.
#
# ## Exercises
#
# ```{exercise-start} Bandwidth for all-reduces (easy)
# :label: ex-strategy-wire
# ```
#
# A layer of width $h = 8192$ has $12h^2$ weights, and $t = 8$ GPUs of 989 TFLOP/s share it. A micro-batch has $b$ sequences of $s$ tokens.
# Forward and backward together take 6 operations for each weight and token, and four all-reduces of $sbh$ numbers of 16 bits, each as a ring.
# How many bytes per second must each GPU send, so that the all-reduces take no longer than its products at its peak rate?

# %%
answer = ...  # bytes per second
check(answer, "strategy_wire")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-strategy-wire
# :label: sol-strategy-wire
# :class: dropdown
# ```
#
# In an all-reduce of $2sbh$ bytes, each GPU sends $2 (t-1)/t$ times as many bytes. A GPU computes a $t$-th of $6 \cdot 12h^2 \cdot sb$ operations. $sb$ and $1/t$ cancel in the quotient of bytes and seconds.

# %%
t, h = 8, 8192
answer = 4 * 2 * (t - 1) * 2 * 989e12 / (6 * 12 * h)
check(answer, "strategy_wire")

# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Days of training (easy)
# :label: ex-strategy-days
# ```
#
# A model of 8 billion parameters trains on 15 trillion tokens, on 512 H100s of 989 TFLOP/s, at an MFU of 40 %.
# How many days is that? Count 6 operations for each parameter and token.

# %%
answer = ...  # days
check(answer, "strategy_days")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-strategy-days
# :label: sol-strategy-days
# :class: dropdown
# ```

# %%
answer = 6 * 8e9 * 15e12 / (512 * 989e12 * 0.4) / 86400
check(answer, "strategy_days")


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Two constants by hand (medium)
# :label: ex-strategy-corner
# ```
#
# You have measured layers of several sizes: `layers` is a list of `(operations, seconds)`, in any order.
# A layer takes `launch` seconds or `operations / rate`, whichever is longer. The list has layers of both kinds.
# Measurements scatter by a percent, and a few are disturbed and take several times as long.
# Write a function that returns `(launch, rate)`, each within 5 %.

# %%
def find_constants(layers):
    ...


check(find_constants, "strategy_corner")


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-strategy-corner
# :label: sol-strategy-corner
# :class: dropdown
# ```
#
# A disturbance only makes a layer slower. So the shortest time of all is `launch`, and the largest quotient of operations and seconds is `rate`.

# %%
def find_constants(layers):
    launch = min(seconds for _, seconds in layers)
    rate = max(operations / seconds for operations, seconds in layers)
    return launch, rate


check(find_constants, "strategy_corner")

# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} One network card for eight GPUs (hard)
# :label: ex-strategy-layout
# ```
#
# Llama 3 70B trains on 64 A100s with 80 GB, with 256 sequences of 8,192 tokens in a step. Each node of eight GPUs has a single network card of 100 Gbit/s.
# Find a layout that fits and is predicted to take at most 10 % longer than the fastest.
# Do not call `strategy.plan`. Think first, then look at `.seconds` and `.memory.reserved` of `strategy.predict(MODELS["70B"], machine, layout)`; 78.7 GB may be reserved.

# %%
machine = replace(MACHINES["a100"], network_bandwidth=100e9 / 8 / 8)
layout = ...  # Layout(dp=…, tp=…, pp=…, zero=…, micro_batch=…, microbatches=…, …)
check(layout, "strategy_layout")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-strategy-layout
# :label: sol-strategy-layout
# :class: dropdown
# ```
#
# Each GPU can send 1.6 GB/s over the network, so few bytes should leave the node.
# Replicas send large gradients; stages send small messages.
# So shard matrices inside the node, put stages on different nodes, and use few replicas.
# Two replicas of four stages are 6 % faster than one replica of eight stages: with four stages the ranks wait less, and this saves more time than the gradients of two replicas take.
# If you replace some of the node's tensor ranks by context ranks, you gain another 6 %: context ranks send keys and values, which are smaller than activations.

# %%
layout = Layout(dp=2, tp=8, pp=4, zero=1, microbatches=128, sequence_parallel=True)
check(layout, "strategy_layout")

# %% [markdown]
# ```{solution-end}
# ```
#
# ## Summary
#
# - A layer waits for matrix products, memory, the network or, without CUDA graphs, kernel launches; which of them depends on the machine.
# - A lower bound of the step time does not rank layouts. A prediction with six fitted constants ranks them, and the launch constant matters most.
# - Fit logarithms of times, with weights that discount slow runs, and with priors; judge the fit by rows that it has not seen.
# - Constants hold for the code and the cluster that they were fitted on. Another framework needs one more factor.
# - A model's size decides if it fits on one GPU. Links and memory decide how to split it.
# - Among layouts within 5 % of the fastest, take the layout that leaves most memory free, or measure.
#
# ## Further reading
#
# - {cite:t}`tazi2025ultrascale`: all measured runs, of which this lesson uses some, and the authors' conclusions.
# - {cite:t}`austin2025scaling`: the same limits for TPUs and GPUs, from single products to whole models.
# - {cite:t}`narayanan2021megatron`, section 3: how to combine the kinds of parallelism, with formulas.
# - {cite:t}`korthikanti2022recomputation`: layer times, and the activations that a layer keeps.
# - [Questions: together](../book/questions_together.md) closes this part.
