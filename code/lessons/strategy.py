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
# # Strategy: how to split a model over machines
#
# After this lesson you can
#
# - name the wall that a layer runs into, memory, wire or launches, and say on which chip it does;
# - predict the seconds of a step in twenty lines, with the module its bytes as well, and say how far off both may be;
# - fit such a prediction to a few steps of your own, and see when it fails;
# - choose a layout for a model and its machines, and say which constant would change the choice.
#
# It takes about 35 minutes to read and 30 minutes for the exercises.
# Running it takes under a minute.
# You need [Model parallelism](model_parallelism.md), or the words data, tensor and pipeline parallelism, and ZeRO.
#
# One question to begin with: Llama 3 70B, 64 H100s, 512 sequences of 8,192 tokens in a step.
# How should it be split?

# %% tags=["hide-input"]
# Imports, four models and the machines
import argparse
import contextlib
import io
import statistics
from collections import defaultdict
from dataclasses import replace
from functools import partial
from math import ceil, log

import torch
import torch.distributed as dist

from shardlab import count, memory, mesh, ranks, show, strategy
from shardlab.check import check
from shardlab.count import speed
from shardlab.mesh.job import batch_of, model_of
from shardlab.mesh.states import counted, held
from shardlab.model import GPT, loss
from shardlab.shapes import PRESETS, Config
from shardlab.show import measured
from shardlab.strategy import MACHINES, Layout, copies, core, files, learn, products
from shardlab.strategy.command import add_command
from shardlab.strategy.fit import fit
from shardlab.strategy.measure import measure
from shardlab.strategy.predict import first_rank, of_job
from shardlab.strategy.rates import PUBLISHED, Rate, Rates, known

show.style()
GB = 1e9


def shardlab(line, lines=12):
    """The first lines of what `python -m shardlab …` prints."""
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers())
    chosen = parser.parse_args(line.split())
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert chosen.command(chosen) == 0
    print(*printed.getvalue().splitlines()[:lines], sep="\n")


H100 = MACHINES["h100"]
MODELS = {
    "1B": Config(128_256, 8192, 16, 32, 2048, 8, 8192, "swiglu", "rms", False, True),
    "8B": PRESETS["llama-3-8b"],
    "70B": PRESETS["llama-3-70b"],
    "405B": PRESETS["llama-3-405b"],
}

# %%
found = strategy.plan(MODELS["70B"], H100, gpus=64, batch=512)
fits, ruled = len(found.fits), found.ruled["needs more memory than there is"]
print(fits + ruled, "layouts, of which", fits, "fit")
for one in (found.fits[0], found.fits[-1]):
    print(round(one.seconds), "s a step:", one.layout)

# %% tags=["hide-input"]
# Draws every layout that fits: what it reserves and how long a step takes
assert fits > 100 and found.fits[-1].seconds > 1.6 * found.fits[0].seconds
points = [(one.reserved / GB, one.seconds, one.layout) for one in found.fits]
alt = (
    f"{fits} dots: what a layout reserves on its fullest GPU, and the seconds of its step. "
    "At every fullness there are fast and slow ones. The fastest takes 68 s at 71 GB, copies alone "
    "74 s at 75 GB, and others take up to 152 s."
)
show.figure(measured.layouts(points), alt, "strategy-layouts")


# %% [markdown]
# Each dot is a layout that fits.
# Fuller is not faster, and neither is emptier: only a prediction tells the dots apart.
# This page builds one, from three lines to a few hundred, and holds it to runs that others have measured.
#
# ## Three walls
#
# A GPU multiplies. Everything else that a step does keeps it from multiplying:
#
# - **memory**: weights and activations come from its memory at some terabytes per second;
# - **wire**: parts of the layer that other GPUs have come over links, ten to a hundred times slower;
# - **launches**: a CPU tells it what to do, operator by operator, in milliseconds a layer; unless steps are captured.
#
# A data sheet has the first two. Divide its operations per second by its bytes per second, and you have what a byte has to be worth.
#
# ![For six GPUs, on a logarithmic axis, how many operations of a product pay for one byte. V100: 139 from its own memory, 833 from its node, 20,000 from the network. A100 80 GB: 153, 1,040, 12,480. H100: 295, 2,198, 19,780. B200: 281, 2,500, 45,000. GB200: 312, 2,778, 50,000. RTX 4090: 164, 5,156, 105,600. Products grew faster than every link.](../figures/strategy_walls.svg)

# %%
def walls(machine, config, tokens, t):
    """Seconds of one layer, forward and backward, on one of t GPUs that share it."""
    h, f = config.hidden, config.ffn_width
    kv = config.key_value_heads * config.head_size
    weights = 2 * h * (h + kv) + 3 * h * f
    return {
        "products": 6 * tokens * weights / t / machine.flops,  # two forward, four backward
        "memory": 3 * 30 * tokens * h / t / machine.stream,  # norms and the like
        "wire": 8 * (t - 1) / t * 2 * tokens * h / machine.inside,  # four all-reduces
        "launches": 2e-3,  # as PyTorch takes that compiles and captures nothing
    }


# %% tags=["hide-input"]
# Table: which wall a layer of the 8B model runs into
rows, tallest = [], {}
for gpu, tokens, t in (
    ("a100", 8192, 1),
    ("h100", 8192, 1),
    ("h100", 8192, 8),
    ("h100", 1024, 8),
    ("gb200", 8192, 8),
    ("rtx-4090", 8192, 8),
):
    each = walls(MACHINES[gpu], MODELS["8B"], tokens, t)
    tallest[gpu, tokens, t] = max(each, key=each.get)
    cells = [f"{1e3 * value:.1f}" for value in each.values()]
    rows.append([MACHINES[gpu].name, f"{tokens:,}", t, *cells, tallest[gpu, tokens, t]])
assert tallest["h100", 8192, 1] == "products" and tallest["h100", 1024, 8] == "launches"
assert tallest["rtx-4090", 8192, 8] == "wire"
head = ["", "tokens", "t", "products (ms)", "memory (ms)", "wire (ms)", "launches (ms)", "tallest"]
show.table(rows, head)

# %% [markdown]
# With one GPU a layer the products win, and the chip is busy.
# Over eight they are an eighth of it; the wire is not, and the launches stay.
# The same cut that NVLink carries breaks on PCIe: strategy is a property of machines, and not of models.
#
# The third wall is one of code that runs operator by operator, as the steps below of early 2025 do.
# `torch.compile` makes fewer operators of a block; a CUDA graph records a step's launches once, and then starts all of them in one call.
# torchtitan 0.3.0 (September 2026) captures forward and backward unless told not to, though not in a pipeline; Megatron Core 0.19.2 (September 2026) does when asked, with `--cuda-graph-impl`.
# A captured step has the other two walls, as long as its shapes stay and nothing in it asks the CPU.
#
# ## Somebody has measured it
#
# A wall says what a layer waits for, and not how long a step takes.
# For that you need steps that ran.
# The makers of the Ultra-Scale Playbook {cite}`tazi2025ultrascale` speak of over 4,000 experiments on up to 512 H100s, with nanotron, early in 2025.
# Their table lists 3,257 runs of four models, with tokens per second and memory.
# 340 of these come with this course. This page uses the first forty, on up to 128 GPUs, and no others.

# %%
nanotron = strategy.PROFILES["nanotron"]  # the library that ran them
sweep = files.read_rows("sweep", PUBLISHED / "sweep.csv")[:40]
jobs = [files.row_job(row, nanotron) for row in sweep]
seconds = [files.row_measured(row)[0] for row in sweep]  # of a step

# %% tags=["hide-input"]
# Table: three of the forty
rows = []
for i in (0, 1, 39):
    job = jobs[i]
    size = memory.parameter_count(job.config) / GB
    rows.append(
        [f"{size:.1f}B", job.layout.ranks, str(job.layout), job.layout.micro_batch,
         job.layout.microbatches, f"{seconds[i]:.1f}"]
    )  # fmt: skip
show.table(rows, ["parameters", "GPUs", "layout", "b", "m", "a step (s)"])


# %% [markdown]
# A prediction is judged by two numbers.
# How far off is it, in the median?
# And does it put them in order: among layouts of one model on one number of nodes, is the fastest the one that it calls so?
# The second is Spearman's correlation of the two orders: 1 when they agree, 0 when one says nothing of the other.

# %%
def off(predicted):
    """The median of |log(predicted / measured)|, about the share that it is off."""
    return statistics.median(abs(log(p / s)) for p, s in zip(predicted, seconds))


def order(predicted):
    """Spearman's correlation: the mean over models and numbers of nodes."""
    alike = defaultdict(list)
    for row, p, s in zip(sweep, predicted, seconds):
        alike[row["model"], row["nodes"]].append((p, s))
    each = []
    for pairs in (pairs for pairs in alike.values() if len(pairs) > 2):
        places = [[sorted(column).index(x) for x in column] for column in zip(*pairs)]
        each.append(statistics.correlation(*places))
    return statistics.mean(each)


# %% [markdown]
# ## A floor does not rank
#
# The floor of a step is all that its data sheet says: every product at the sheet's rate, every link full, all that can be hidden hidden.
# `strategy.floor` counts it, and no measured step is below it.

# %%
floors = [strategy.floor(j.config, j.machine, j.layout, j.seq).total for j in jobs]
fraction = statistics.median(f / s for f, s in zip(floors, seconds))
print("fraction of a step:", round(fraction, 2), "order:", round(order(floors), 2))

# %% tags=["hide-input"]
# Holds each measured step to its floor
assert all(f < s for f, s in zip(floors, seconds))
assert order(floors) < 0.5


# %% [markdown]
# `````{admonition} Checked: "count FLOPs and bytes, divide by the data sheet, take the smallest"
# :class: checked
#
# The floor is a quarter of what these steps take, and its order has next to nothing to do with theirs.
# It says what is impossible. It does not say what is best.
# `````
#
# ## The plainest prediction that ranks
#
# What is missing are constants that no data sheet has.
# Six are enough.

# %%
def plain(job, r):
    """Seconds of a step, at six rates."""
    at, config, tokens = job.layout, job.config, job.tokens
    t, p, m = at.tp, at.pp, at.microbatches
    flops = strategy.flops(config, int(tokens), job.seq, causal=False)
    last = 6 * tokens * config.vocab * config.hidden  # the output layer's
    launch = r["launch"] + (r["crossing"] * (t - 1) if p > 1 and job.nodes > 1 else 0)
    wire = 8 * (t - 1) / t * job.stream / r["node"] + r["beyond"] * (ceil(t / 8) - 1)
    layer = max((flops - last) / config.layers / t / r["products"], launch) + wire
    stages = at.parts(config)  # unequal: the embedding and the head count, too
    busy = [s.layers * layer + s.head * last / t / r["products"] for s in stages]
    held = max(job.held(s).all for s in stages)
    gradients = 8 * held * (at.dp - 1) / at.dp / r["network"]  # float32, all-reduced
    return (m - 1) * max(busy) + sum(busy) + gradients


# %% [markdown]
# The slowest stage takes its time for each micro-batch, the others once: that is a pipeline.
# A layer takes the longer of its products and its launches: that is a CPU that runs ahead.
# What it leaves out is what the module adds: attention's own rate, what backward hides, the optimizer, the memory.
#
# Each constant begins as a guess, and is moved until predicted and measured agree.

# %%
GUESSES = {  # what it is, a guess, and how far off that may be
    "products": ("FLOP/s of a GPU", 4e14, 0.3),
    "launch": ("s of a layer, forward and backward", 3.6e-3, 0.3),
    "crossing": ("s more for each tensor rank, if a pipeline leaves the node", 2e-3, 0.4),
    "node": ("bytes/s inside of a node", 320e9, 0.3),
    "beyond": ("s of a layer for each further node of a tensor group", 6e-3, 0.5),
    "network": ("bytes/s of a copy", 25e9, 0.5),
}


def fitted(free, steps, guesses=GUESSES):
    """The constants, the `free` ones as steps say: pairs of a job and seconds."""
    rates = {name: Rate(v, unit, off, "a guess") for name, (unit, v, off) in guesses.items()}
    pairs = [(partial(plain, job), taken) for job, taken in steps]
    return fit(Rates("course", rates), pairs, free, "fitted")


steps = list(zip(jobs, seconds))
six = fitted(list(GUESSES), steps)
predicted = [plain(job, six) for job in jobs]
print("off:", round(off(predicted), 3), "order:", round(order(predicted), 2))

# %% tags=["hide-input"]
# Table: the six constants, and how sure the fit is of each
assert off(predicted) < 0.1 and order(predicted) > 0.95
rows = [
    [name, f"{rate.value:.3g}", f"± {rate.spread:.0%}", rate.unit]
    for name, rate in six.all.items()
]
show.table(rows, ["constant", "value", "well within", "what"])

# %% [markdown]
# From a quarter of the step to within a tenth of it, with an order that is nearly right, on models from 1 to 80 billion parameters.
# A GPU reaches less than half of its sheet's 989 TFLOP/s, and a layer with less than 4 ms of work takes more than 4 ms all the same.
#
# ### What each term is worth
#
# Take one constant away, fit the others anew, and see what is lost.

# %%
NEUTRAL = {"launch": 1e-9, "crossing": 1e-9, "node": 1e30, "beyond": 1e-9, "network": 1e30}


def without(name):
    unit, _, spread = GUESSES[name]
    rest = [other for other in GUESSES if other != name]
    rates = fitted(rest, steps, {**GUESSES, name: (unit, NEUTRAL[name], spread)})
    return [plain(job, rates) for job in jobs]


# %% tags=["hide-input"]
# Table: error and order without each of them
rows = [["none", f"{off(predicted):.1%}", f"{order(predicted):.2f}"]]
lost = {name: without(name) for name in NEUTRAL}
rows += [[name, f"{off(p):.1%}", f"{order(p):.2f}"] for name, p in lost.items()]
assert order(lost["launch"]) < 0.93 and off(lost["crossing"]) > 1.5 * off(predicted)
show.table(rows, ["left out", "off in the median", "order"])

# %% [markdown]
# Launches come first, and they are in no formula of the papers on parallelism. In a captured step they would be the first to leave out.
# `crossing` is a property of this cluster: its cause is unknown, and without it the error doubles.
# Forty rows say little of the network and of single nodes: few of them wait for these. That is why the table above is unsure of both.
#
# ## The module
#
# `strategy.predict` is the same prediction with what real jobs have: other schedules, recomputation, ZeRO in all stages, long sequences, memory.
# A layer comes first.

# %%
show.source(core.layer, core._attention, core._launches, core._cpu)

# %% [markdown]
# What is multiplied, what experts add, and what the groups that share matrices or sequences send:

# %%
show.source(products.products, products.cut, products.product, core._tensor, core._context)

# %% [markdown]
# Its rates are shares of the data sheet, so that what was fitted on one chip says something of another.
# `SOFT` makes the longer of two a smooth one: near the corner, launches and products disturb each other.
# Then a step.

# %%
show.source(core.seconds, core._stage, core._likely, core._left, core._head, core._messages, core._optimizer)

# %% [markdown]
# And what the copies wait for.
# ZeRO-1 gathers new weights after the step. nanotron (early 2025) and DeepSpeed 0.19.8 wait for them.
# Megatron Core 0.19.2 gathers each bucket behind the forward pass of the one before, with `--overlap-param-gather`, which `--emit megatron` writes; torch's `fully_shard` fetches the next layer ahead, too. `ahead` counts what the first micro-batch's forward pass does not hide.
# ZeRO-3 sends three times for each micro-batch, and hides most of it behind the work.

# %%
show.source(copies.seconds, copies._zero, copies.rate)

# %% [markdown]
# ## Predicted beside measured
#
# A fit that is judged by the rows that it was fitted on flatters itself.
# So it gets every other row of the sweep, and is judged by the rest.
# Megatron's rates are fitted on five layer times that {cite:t}`korthikanti2022recomputation` print, of one model on eight A100s; then they predict whole steps, on up to 3,072 GPUs.

# %%
half = learn.from_rows(sweep[::2], nanotron, "every other row of the sweep").values_of()
others = list(zip(jobs, sweep))[1::2]
rest = [(of_job(job, half).seconds.total, files.row_measured(row)[0]) for job, row in others]
rest_bytes = [(first_rank(job, half), files.row_measured(row)[1]) for job, row in others]  # bytes

# %% tags=["hide-input"]
# Draws predicted over measured seconds: the sweep's other half, and Megatron
megatron, five = strategy.PROFILES["megatron"], known("megatron").values_of()


def printed(case):
    """Seconds of a published step; SC21 prints a rate, whose operations count recomputation."""
    config, found = case["config"], case["published"]
    if "iter_s" in found:
        return found["iter_s"]
    s, h, layers = config["seq"], config["hidden"], config["layers"]
    inner = 1 + s / (6 * h) + config["vocab"] / (16 * layers * h)
    work = 96 * config["gbs"] * s * layers * h**2 * inner
    return work / config["n_gpus"] / (found["tflops_per_gpu"] * 1e12)


cases = files.read_cases("cases", PUBLISHED / "megatron.json")
groups = {"nanotron, H100: rows not fitted": rest}
for words, start in (
    ("Korthikanti et al., A100", ("korthikanti-22B", "korthikanti-175B")),
    ("Narayanan et al., A100", ("sc21",)),
):
    groups[words] = [
        (of_job(files.case_job(case["config"], megatron), five).seconds.total, printed(case))
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
show.figure(measured.agreement(groups), alt, "strategy-agreement")


# %% tags=["hide-input"]
# Table: how far off, in the median and at most
def errors(pairs):
    each = sorted(abs(p / s - 1) for p, s in pairs)
    return f"{statistics.median(each):.1%}", f"{each[-1]:.1%}"


rows = [["the sweep, rows not fitted", "seconds", *errors(rest)]]
rows.append(["the sweep, rows not fitted", "bytes of rank 0", *errors(rest_bytes)])
for words in list(groups)[1:]:
    rows.append([words, "seconds", *errors(groups[words])])
assert statistics.median(abs(p / s - 1) for p, s in rest_bytes) < 0.07
show.table(rows, ["", "of what", "off in the median", "at most"])

# %% [markdown]
# The sweep's memory is what the allocator *reserves* on rank 0, which is on the first stage, and not what tensors hold there.
#
# The rates that come with the course are fitted on all 340. Where half of the cells are left out of a fit, a cell being a model on a number of nodes, their rows are 7 % off in seconds and 3 % in bytes, and in all cells but one at most the layout that is called the fastest is within 10 % of the fastest.
#
# Five layer times of a 22B model are worth a forecast of GPT-3's 175 billion parameters on 64 GPUs, of 145.6 billion on 1,536 and of a trillion on 3,072, to some percent: the same kernels run there.
#
# Today's engines print throughputs: Megatron's, torchtitan's and others', in 8 and 4 bits, with experts, on up to 1,024 GPUs. `--fit` takes such a table with `--profile engines`, and says which of its lines it leaves out. Here each half of 279 lines is predicted by rates of the other.
#
# ![Predicted over measured seconds of published steps, a dot each, by source, on a logarithmic axis; each half by rates of the other. Medians, and how many: Megatron-Bridge 1.00 (178), llm-foundry 1.00 (52), torchtitan 0.96 (16), Megatron-MoE-ModelZoo 1.08 (11), NeMo 24.07 0.94 (11), Automodel 1.02 (8), Megatron-LM examples 1.04 (3).](../figures/strategy_engines.svg)
#
# The same line of Qwen3-30B on eight GB200s prints 23,766 tokens a second and GPU in container 25.11, and 39,936 in 26.08: no column says why, and no rate can.
#
# ## This machine
#
# Rates can be measured as well: a product, an attention, a pass over memory, launches, an all-reduce.
# `measure` takes a second for it here.

# %%
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def step_seconds(config, batch):
    """One training step of the plain GPT on one thread, at best of five."""
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
        return speed.seconds(step, DEVICE)
    finally:
        torch.set_num_threads(threads)


def beside(config, batch):
    """Seconds of a step: predicted from rates measured right before, and measured."""
    here = measure()
    guess = strategy.predict(config, here.machine, Layout(micro_batch=batch), rates=here)
    return guess.seconds.total, step_seconds(config, batch)


# %% tags=["hide-input", "measured"]
# Table: three steps, predicted from these rates and measured
rows, ratios = [], []
for name, batch in (("micro", 8), ("mini", 4), ("mini", 8)):
    guess, taken = beside(PRESETS[name], batch)
    ratios.append(guess / taken)
    rows.append([name, batch, f"{guess:.3f}", f"{taken:.3f}", f"{ratios[-1]:.2f}"])
show.timed(1 / 4 < statistics.median(ratios) < 4, "half of the steps within a factor of four")
show.table(rows, ["model", "b", "predicted (s)", "measured (s)", "predicted / measured"])

# %% [markdown]
# Within a factor of two, of a machine that does other things as well, and whose caches hold some of these models and not others.
# One rate for all products is what is wrong here: measured steps of your own repair it, by the fit above.
#
# ## How a fit fails
#
# **Without a prior.** Five steps cannot tell six constants apart, and a fit that may do anything does.
# Here each guess may be off a hundredfold.

# %%
loose = {name: (unit, value, 99.0) for name, (unit, value, _) in GUESSES.items()}
few = steps[::8]
tight_fit, loose_fit = fitted(list(GUESSES), few), fitted(list(GUESSES), few, loose)

# %% tags=["hide-input"]
# Table: constants of five rows, with and without priors
rows = [
    [name, *(f"{rates[name]:.3g} ± {rates.all[name].spread:.0%}" for rates in (tight_fit, loose_fit))]
    for name in GUESSES
]
errors = [off([plain(job, rates) for job in jobs]) for rates in (tight_fit, loose_fit)]
rows.append(["all forty rows, off by", *(f"{error:.0%}" for error in errors)])
assert errors[0] < 0.75 * errors[1] and loose_fit["node"] > 2e12
show.table(rows, ["constant, by five rows", "with priors", "without"])

# %% [markdown]
# Five terabytes per second inside of a node are eleven times the data sheet.
# The fit says so itself: it gives such a constant a spread of thousands of percent.
#
# **With a slow run among the good.** Something else used the network, a GPU was hot.
# Least squares would follow it; weights that fall with the distance let it go.

# %%
slow = [(job, 4 * taken if i % 10 == 0 else taken) for i, (job, taken) in enumerate(steps)]
among = fitted(list(GUESSES), slow)  # four rows of forty are four times too slow
moved = {name: among[name] / six[name] - 1 for name in GUESSES}
print({name: round(x, 2) for name, x in moved.items()})

# %% tags=["hide-input"]
# Holds the fit among slow runs to that without
assert abs(moved["products"]) < 0.1 and abs(moved["launch"]) < 0.15 and moved["beyond"] < 0.4

# %% [markdown]
# The sweep has such runs, and they come in batches: in some jobs every message between stages takes a quarter of a second, where others with the same layout take less than a millisecond.
# No constant predicts them. What a prediction is good for there is to notice them.
#
# **With a wrong stage.** nanotron cuts a pipeline by cost, and gives the head's stage fewer layers.
# Pretend equal stages, and the memory of rank 0 is another one, and so is the slowest stage.
#
# **With another framework.** The rates hold for the code that they were fitted on.
# The same layout under another one differs by a factor, and then by nearly the same one in all rows: fit that one.
#
# ## Choosing
#
# `strategy.plan` predicts every layout and sorts.
# Three jobs, to the end.

# %%
jobs_to_plan = {
    "large": (MODELS["70B"], H100, 64, 512, 2e12),
    "GPT-3": (PRESETS["gpt-3-175b"], MACHINES["a100"], 1024, 1536, 300e9),
    "small, much data": (MODELS["1B"], H100, 64, 512, 10e12),
}
plans = {name: strategy.plan(*job[:4]) for name, job in jobs_to_plan.items()}

# %% tags=["hide-input"]
# Table: the two fastest of each, with days and what they wait for
rows = []
for name, job in jobs_to_plan.items():
    for one in plans[name].fits[:2]:
        parts = vars(one.prediction.seconds)
        waits = max(set(parts) - {"products", "attention"}, key=parts.get)
        rows.append(
            [name, f"{one.layout}, b {one.layout.micro_batch}", f"{one.seconds:.1f}",
             f"{one.reserved / GB:.0f}",
             f"{one.mfu:.0%}", f"{job[4] / one.tokens / 86400:.0f}", waits]
        )  # fmt: skip
show.table(rows, ["", "layout", "a step (s)", "GB", "MFU", "days", "waits most for"])

# %% [markdown]
# *The large one* takes all cuts: two ranks share each matrix, four each sequence, and both stay in a node; four such stages are one copy of the model, of which there are two.
# What a layer keeps is so small that its nonlinearities alone are computed again.
# 64 copies that share weights as well (ZeRO-3) have to compute whole layers again, and take a tenth longer.
#
# *GPT-3* needs all three cuts on A100s: tensor parallelism inside the node, a few stages across, ZeRO-1 between copies.
# {cite:t}`narayanan2021megatron` say 34 days, with full recomputation and 140 TFLOP/s; sharding the optimizer between copies pays for keeping what is dear to compute again.
# [A worked example](../book/gpt3_on_64_gpus.md) splits it over 64.
#
# *The small one* wants copies, and nothing else. What is left to choose is the batch.

# %%
GPUS, PRICE = 256, 2.0  # dollars for an hour of one of them


def cost(batch):
    """Dollars for a million tokens, with copies alone."""
    fixed = {"tp": 1, "pp": 1}
    best = strategy.plan(MODELS["1B"], H100, GPUS, batch, fixed=fixed).fits[0]
    return 1e6 * GPUS * PRICE / 3600 / best.tokens


costs = {batch: cost(batch) for batch in (256, 512, 1024, 2048, 4096, 8192)}

# %% tags=["hide-input"]
# Table: what a billion tokens cost, by batch
prices = list(costs.values())
assert prices[0] > 1.08 * prices[-1] and prices[-3] < 1.02 * prices[-1]
rows = [[f"{batch:,}", batch // GPUS, f"{1e3 * price:.2f}"] for batch, price in costs.items()]
show.table(rows, ["sequences in a step", "of a GPU", "a billion tokens ($)"])

# %% [markdown]
# Each doubling spreads gradients and optimizer over twice the work; after some eight sequences a GPU there is nothing left to spread.
# Beyond that a larger batch saves no money, and each token teaches less.
#
# ### The same choice, run on four ranks
#
# Two small jobs of the same two kinds, each in four layouts with the same batch.
# A rank may hold 20 MB of tensors; to ask for more is an out-of-memory error.

# %%
shape = partial(Config, vocab=256, layers=2, heads=8, tied=False)
KINDS = {  # a model, and the sequences of a step
    "large model": (shape(seq=32, hidden=256), 8),
    "much data": (shape(seq=128, hidden=64), 16),
}
ON_FOUR = Layout(dp=4), Layout(dp=2, tp=2), Layout(tp=4), Layout(dp=4, zero=3)


def attempt(config, layout):
    """On a rank: a step. What it holds of weights, gradients and optimizer, and sends."""
    groups = mesh.join(layout, dist.group.WORLD)
    copy, batch = dist.get_rank(groups.dp), batch_of(config, layout.batch, 0)
    try:
        with count.held(device=ranks.device(), limit=20e6):
            model = mesh.Parallel(model_of(config), groups, layout)
            optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
            with count.sent() as sent:
                model.step(*(x.chunk(layout.dp)[copy] for x in batch))
            optimizer.step()
            return sum(held(model, optimizer).values()), sum(counted(sent, model).values())
    except torch.OutOfMemoryError:
        return "out of memory", ""


# %% tags=["hide-input"]
# Table: what rank 0 holds and sends in each layout, predicted and counted
def attempts(jobs):
    return [attempt(*job) for job in jobs]


def in_mb(*values):
    return [value if isinstance(value, str) else f"{value / 1e6:.1f}" for value in values]


cases = [
    (name, config, replace(layout, micro_batch=batch // layout.dp))
    for name, (config, batch) in KINDS.items()
    for layout in ON_FOUR
]
rows, jobs = [], [case[1:] for case in cases]
# CPU: the limit is one of tensors; a GPU's allocator takes 20 MB at once
found = ranks.run(attempts, 4, jobs, device="cpu")[0]
for (name, config, layout), (has, sends) in zip(cases, found, strict=True):
    states = sum(mesh.predicted_states(config, layout, 0).values())
    goes = sum(mesh.predicted_sent(config, layout, 0).values())
    assert (has, sends) == (states, goes) if sends != "" else states > 20e6
    rows.append([name, str(layout), *in_mb(states, has, goes, sends)])
assert [has == "out of memory" for has, _ in found] == [True] + 7 * [False]
head = ["job", "layout", "states, predicted (MB)", "held", "sent, predicted (MB)", "sent"]
show.table(rows, head)

# %% [markdown]
# The large model does not fit as four copies. With tensor parallelism or ZeRO-3 it does, and ZeRO-3 sends nearly four times what four tensor ranks do.
# With much data all four fit, and copies send least: gradients do not grow with the batch, while tensor parallelism sends activations, which do. Four tensor ranks send ten times as much.
#
# ## Rules of thumb, judged
#
# "Below a billion parameters copies; up to ten billion a pipeline; up to a hundred billion tensor parallelism and ZeRO; above that all of them."
# The planner tries the rule on several machines: how much slower is the best layout that obeys it?

# %%
RULE = {
    "1B": ("copies", lambda at: at.tp == at.pp == 1 and at.zero == 0),
    "8B": ("a pipeline", lambda at: at.pp > 1 and at.tp == 1),
    "70B": ("tensor and ZeRO", lambda at: at.tp > 1 and at.zero > 0 and at.pp == 1),
    "405B": ("all of them", lambda at: at.tp > 1 and at.pp > 1 and at.zero > 0),
}

# %% tags=["hide-input"]
# Table: the best layout, and what obeying the rule costs
rows, price = [], {}
for gpu, gpus, batch in (
    ("rtx-4090", 64, 512),
    ("a100-40", 64, 512),
    ("h100", 64, 512),
    ("h100", 1008, 2016),
    ("gb200", 576, 1152),
):
    for name, (words, obeys) in RULE.items():
        every = strategy.plan(MODELS[name], MACHINES[gpu], gpus, batch).fits
        good = [one for one in every if obeys(one.layout)]
        price[name, gpu, gpus] = good[0].seconds / every[0].seconds - 1 if good else None
        told = f"{price[name, gpu, gpus]:+.0%}" if good else "does not fit"
        best = str(every[0].layout) if every else ""
        if every:
            rows.append([f"{gpus} × {MACHINES[gpu].name}", name, best, words, told])
assert price["8B", "rtx-4090", 64] > 0.1 and price["70B", "h100", 64] < 0.2
show.table(rows, ["machines", "model", "the fastest", "the rule says", "costs"])


# %% [markdown]
# `````{admonition} Checked: "size decides"
# :class: checked
#
# On H100s and larger the rule for 1B costs a few percent, and the one for 70B no more than the rates are unsure of.
# The pipeline for 8B is the fastest nowhere in this table.
# On cards of 24 GB without NVLink the rule for 1B does not fit, and the one for 70B is several times slower than what the planner takes.
# Size says what does not fit on one GPU. Links and memory say what to do about it.
# `````
#
# These steps are predicted at rates that jobs commonly reach.
# What is within 5 % of the first, measure.
#
# ## Which constant would change the choice?
#
# A choice that turns over when a guess is a little off is no choice.
# Halve and double each rate, and plan again.

# %%
def turned(first, name, factor, *job):
    """The fastest layout with one rate changed, and what `first` then costs."""
    rates = known("course")
    rate = rates.all[name]
    other = Rates("course", {**rates.all, name: replace(rate, value=factor * rate.value)})
    fits = strategy.plan(*job, rates=other).fits
    old = strategy.predict(*job[:2], first, rates=other).seconds.total
    return fits[0].layout, old / fits[0].seconds - 1


# %% tags=["hide-input"]
# Table: what turns the choice over, for two jobs
rows = []
NAMES = "products", "attention", "memory", "launch", "node", "hidden", "network", "gathers"
for config, gpu, words in (("70B", "h100", "70B, 64 × H100"), ("8B", "a100-40", "8B, 64 × A100 40 GB")):
    calm, job = [], (MODELS[config], MACHINES[gpu], 64, 512)
    first = strategy.plan(*job).fits[0].layout
    for name in NAMES:
        for factor in (0.5, 2.0):
            new, loss_ = turned(first, name, factor, *job)
            if new == first:
                calm.append(name)
            else:
                rows.append([words, f"{name} × {factor:g}", str(new), f"{loss_:+.0%}"])
    assert len(calm) > 8
show.table(rows, ["job", "if", "the fastest is", "the old one costs"])

# %% [markdown]
# For the 70B seven of sixteen changes move it, and then the old one costs 4 % at most: many layouts are nearly as good.
# What none of them brings back is copies alone. Halve what their gathers cost, or double the network, and copies of two tensor and two context ranks come first.
#
# ## On the command line, and in the page
#
# The command is this planner: a table of the fastest layouts, what was ruled out and by what; `--explain` takes the first one apart, and `--json` gives all of it.

# %%
shardlab("strategy --model llama-3-70b --gpu h100 --gpus 64 --top 3")

# %% [markdown]
# Below the table is what was searched: ranks share sequences from 8,192 tokens on, stages and chunks may be unequal, operators are computed again where that may be faster. What a search leaves out it names, and it warns where little memory is free or few operations are reached.
# `--layout` takes a layout as it is, from a paper for instance. With Megatron's rates Llama 3 405B on 16,384 GPUs is predicted at 44 % MFU, and ran at 41 {cite}`dubey2024llama3`; for what ran in 80 GiB 92 GB are predicted, or 80 if gradients are sharded as well.
#
# `--config config.json` plans a model of Hugging Face's hub as `transformers` builds it, [counted](memory.md#a-model-of-today-from-its-configjson) and never guessed: latent attention, windows, experts of any kind. What a file leaves open is named, and what is not understood is refused in a line.
# `--rates here.json` takes the rates that `--measure` or `--fit` wrote.
# `--emit` writes the fastest layout that an engine can run as its configuration, each line with its reason: for DeepSpeed, FSDP2, torchtitan, Megatron, or as a batch file for Slurm.
# So a file for DeepSpeed begins:

# %%
shardlab("strategy --model llama-3-8b --gpu h100 --gpus 16 --emit deepspeed", 15)

# %% [markdown]
# It is planned with that engine's bytes, not with the course's: Megatron and `fully_shard` add up gradients in float32, 4 bytes where the course's model has 2.
# So with Megatron eight ranks share each matrix of GPT-3, where the table above had four in its first line:

# %%
shardlab("strategy --model gpt-3-175b --gpu a100 --gpus 1024 --batch 1536 --emit megatron", 3)

# %% [markdown]
# `--run` trains the first layout on ranks of this machine: the same cuts, schedule and recomputation, with degrees, chunks and model as small as it takes.
# It ends with status 0 only if losses and gradients are those of one process and each rank held and sent what was predicted; what the course's [mesh](mesh.md) does not train, such as context ranks and experts over ranks, is left out, and said.

# %% tags=["measured"]
shardlab("strategy --model llama-3-70b --gpu h100 --gpus 256 --tp 8 --pp 4 --run", 20)

# %% [markdown]
# Whether *your* training script computes under that layout what it computes in one process is asked by [`python -m shardlab parity`](parity.md#two-scripts).
#
# On the course's site the command has a form: there your browser runs it.
#
# :::{calculator} strategy
# :model: llama-3-70b
# :gpu: h100
# :gpus: 64
# :tokens: 2e12
# :::
#
# ## What goes wrong, and how it looks
#
# | what one sees | what it is |
# |---|---|
# | the best layout on paper is slow in practice, and all others as well, by the same factor | rates of another framework: fit that one, from one measured step |
# | one layout is many times slower than predicted, its neighbours are not | it needs more than some 96 % of the GPU's memory: the allocator frees and retries |
# | a small model does not get faster with larger `t` | launches: a layer takes what the CPU takes, however small its share; compile the blocks, or capture the step |
# | predicted and measured agree on one node and part on two | the wrong network interface, or one card for eight GPUs: [Clusters](cluster.md) asks all ranks |
# | the planner's first three change places with every new rate | they are equal within its error: take the emptiest, or measure them |
# | fitted constants are absurd, and their spreads are above 100 % | too few steps for so many constants, and no priors |
#
# What it does not know: how unevenly tokens choose their experts (it takes a guess), a network that others use at the same time, a batch that is too large to learn from, and what a person's week costs.
#
# ## Exercises
#
# ```{exercise-start} The wire (easy)
# :label: ex-strategy-wire
# ```
#
# A layer of $12h^2$ weights with $h = 8192$ is shared by $t = 8$ GPUs of 989 TFLOP/s, in 16 bits.
# Forward and backward take 6 operations for each weight and token, and four all-reduces of $sbh$ numbers.
# How many bytes per second must each GPU send, so that the all-reduces take no longer than the products?

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
# An all-reduce sends $2 (t-1)/t$ of its bytes. Tokens cancel, and so does $1/t$ of both.

# %%
t, h = 8, 8192
answer = 4 * 2 * (t - 1) * 2 * 989e12 / (6 * 12 * h)
check(answer, "strategy_wire")

# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Days (easy)
# :label: ex-strategy-days
# ```
#
# A model of 8 billion parameters learns from 15 trillion tokens on 512 H100s, at an MFU of 40 %.
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
# You have measured layers of several sizes: a list of `(operations, seconds)`.
# A layer takes the longer of its launch and of its operations at some rate; a measurement scatters by a percent, and now and then one is disturbed and takes several times as long.
# Write a function that returns `(launch, rate)`, within 5 %. There are small layers and large ones.

# %%
def corner(layers):
    ...


check(corner, "strategy_corner")


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-strategy-corner
# :label: sol-strategy-corner
# :class: dropdown
# ```
#
# Disturbances only make slower. So the shortest time is a launch, and the highest rate is the rate.

# %%
def corner(layers):
    launch = min(seconds for _, seconds in layers)
    rate = max(operations / seconds for operations, seconds in layers)
    return launch, rate


check(corner, "strategy_corner")

# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} One card for eight (hard)
# :label: ex-strategy-layout
# ```
#
# Llama 3 70B on 64 A100s with 80 GB, 256 sequences of 8,192 tokens in a step; and each node of eight has a single network card of 100 Gbit/s.
# Find a layout that fits and is predicted to be within 10 % of the fastest.
# No plan of `strategy.plan`, please: think first, then ask `strategy.predict` where it waits.

# %%
machine = replace(MACHINES["a100"], between=100e9 / 8 / 8)
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
# A network of 1.6 GB/s for each GPU is the wall: what leaves the node must be small.
# Gradients of copies are large, and messages between stages are small. So the matrices are cut inside of the node, the layers between nodes, and there are few copies.
# Two copies of four stages are 6 % faster than one of eight: a step of 128 micro-batches has room for their gradients, and fewer stages wait for one another.
# Another 6 % are in ranks of the node that share a sequence, for some of those that share its matrices: keys and values are smaller than the stream.

# %%
layout = Layout(dp=2, tp=8, pp=4, zero=1, microbatches=128, sequence_parallel=True)
check(layout, "strategy_layout")

# %% [markdown]
# ```{solution-end}
# ```
#
# ## Summary
#
# - A layer waits for products, memory, the wire or, where nothing is captured, launches; which of them is a question of the chip.
# - A floor says what is impossible; it does not rank. Six constants do: launches first among them.
# - Fit logarithms, robustly, with priors; judge by rows that were not fitted.
# - Rates hold for the code and cluster that they were found on. Another framework is one more factor.
# - Size says what does not fit. Links and memory say what to do about it.
# - Of layouts within 5 % of the first take the emptiest, or measure.
#
# ## Further reading
#
# - {cite:t}`tazi2025ultrascale`: the sweep, with all its runs, and what its authors make of it.
# - {cite:t}`austin2025scaling`: the same walls for TPUs and GPUs, from the roofline to whole models.
# - {cite:t}`narayanan2021megatron`, section 3: which cut goes where, with the formulas.
# - {cite:t}`korthikanti2022recomputation`: layer times, and what a layer keeps.
# - [Questions: together](../book/questions_together.md) closes this part.
