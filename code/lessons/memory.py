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
# # Memory: where the bytes go
#
# After this lesson you can
#
# - predict the bytes of each kind of tensor in a training step, most of them exactly;
# - tell from an out-of-memory error which tensors were too large;
# - choose between a smaller batch, recomputation and more GPUs by calculation, not by trial.
#
# The file of Llama 3 8B, 8 billion weights of two bytes, is 16 GB.
# Training the model takes more than the 80 GB of an H100, even with a batch of one token.
# With one sequence of the model's training length, it takes more than the 141 GB of an H200.
#
# ## Hardware of this machine

# %% tags=["hide-input"]
# Imports, and the small model that every cell trains
import argparse
import gc
import json
import statistics
import tempfile
import textwrap
import time
import weakref
from functools import partial
from pathlib import Path

import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint

from shardcourse.exercises import check
from shardlab import memory
from shardlab.common import show, text
from shardlab.common.show import plots
from shardlab.gpt.model import GPT, PRESETS, Config, loss
from shardlab.layout import Layout
from shardlab.measure import count
from shardtools import hub
from shardtools.commands.memory import add_command

show.set_style()

GPU = torch.cuda.is_available()
MB, GB = 1e6, 1e9
# Small enough to train here; the vocabulary is large relative to the layers, as in real models.
SHAPE = Config(vocab=8192, seq=256, layers=4, heads=4, hidden=256)


def make_job(config=SHAPE, batch=2, device="cpu", dtype=torch.float32):
    """Return a model, its AdamW, and tokens and targets, each [batch, seq]."""
    torch.manual_seed(0)
    with torch.device(
        device
    ):  # where it is to be: the CPU may have less room than the GPU
        model = GPT(config).to(dtype)
    # foreach=True, the default on a GPU, would copy some tensors during the step.
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tokens, targets = text.get_batch(config.seq, batch)
    return model, optimizer, tokens.to(device), targets.to(device)


def run_command(line):
    """Run this lesson's command as `python -m shardlab …` does."""
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers())
    options = parser.parse_args(line.split())
    return options.command(options)


def format_difference(measured, predicted):
    """Return the relative difference in percent, as text for a table."""
    percent = 100 * (measured / predicted - 1)
    return "0" if measured == predicted else f"{percent:+.2f}"


# %% [markdown]
# This page was executed on this machine, whose memory limits the measurements below.

# %% tags=["hide-input", "measured"]
# Table: hardware of this machine
show.table(count.describe_machine(), ["property", "this machine"])

# %% [markdown]
# Three facts about a GPU decide what it can train.
# Its *memory* must hold all tensors of a step.
# Its *bandwidth* is the number of bytes per second that it can read from this memory.
# Its *compute capability* is NVIDIA's version number for its features: bfloat16 matrix units from 8.0 on, 8-bit floats from 8.9 on.
# Without a GPU, everything on this page uses the host's memory, and the byte counts are the same.
#
# ## A model that does not fit
#
# The table shows what one GPU would hold to train Llama 3 8B in bfloat16, on one sequence of 8192 tokens.
# The weights are a small part.

# %%
llama = PRESETS["llama-3-8b"]
one = memory.estimate_step(llama, device="gpu")
parts = ("parameters", "gradients", "optimizer", "activations", "buffers")

# %% [markdown]
# ```{predict}
# :row: most at one moment
# :column: size (GB)
#
# The weights are 8 billion numbers of two bytes. How many GB does the step hold at its peak, the moment when it holds most?
# ```

# %% tags=["hide-input"]
# Table: memory of a step of Llama 3 8B, by part, and its peak
sizes = {part: getattr(one, part) for part in parts}
sizes |= {"all parts together": one.total, "most at one moment": one.peak}
rows = [
    (part, f"{size / GB:.1f}", f"{100 * size / one.total:.0f}")
    for part, size in sizes.items()
]
assert one.total > one.peak > 141 * GB > 80 * GB > 4 * one.parameters > 0
show.table(rows, ["Llama 3 8B on one GPU", "size (GB)", "of all parts (%)"])


# %% [markdown]
# The last row, the *peak*, has to fit into the GPU.
# It is less than the sum of the parts, because the parts are never all held at once: during backward, activations are freed while gradients are made.
#
# ### What out-of-memory looks like
#
# When a tensor does not fit, the line that allocates it raises an error.
# The next cell allocates a thousand terabytes, or on a GPU ten times its memory.
# A failed allocation takes no memory.

# %% tags=["measured"]
def catch_refusal(size, device):
    try:
        torch.empty(size, dtype=torch.uint8, device=device)
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


size = 10 * torch.cuda.get_device_properties(0).total_memory if GPU else 10**15
print(textwrap.fill(catch_refusal(size, "cuda" if GPU else "cpu"), 90))


# %% [markdown]
# On a GPU the message is longer, and each of its numbers is useful:
#
# | the message says | meaning | use |
# |---|---|---|
# | Tried to allocate … | the one tensor that did not fit | divide by the bytes of an element, and look for a tensor of that size in your model, often the logits |
# | total capacity of … | the GPU's memory, in GiB | a GPU sold with "40 GB" reports 39.56 GiB, which is 42.5 GB: labels mix GB and GiB |
# | of which … is free | bytes that no process holds | add the last row's number to get all unused bytes |
# | Process … has … in use | what each process holds on this GPU | look for a process that you forgot |
# | … is allocated by PyTorch | the bytes of existing tensors | compare this number with this lesson's prediction |
# | … is reserved by PyTorch but unallocated | blocks that PyTorch keeps but no tensor uses | a large number means fragmentation, see [below](#memory-wrong) |
#
# On a CPU the process may be killed instead.
# Linux grants more memory than the machine has, and kills a process when processes use too much of it.
# Then there is no error and no traceback, just `Killed` and exit status 137, which is 128 + 9: signal 9.
# The kernel's log (`dmesg`) names the process.
#
# ## What a training step holds: states, activations, temporary tensors
#
# A training step holds five kinds of tensors, each during a different part of the step.
#
# ![Tensors held during a training step. Weights and the optimizer's moments are held all the time. Activations grow through forward and shrink through backward. Gradients grow through backward and stay until zero_grad. Temporary tensors are largest where backward begins, at the logits: this is the peak.](../figures/memory_life.svg)
#
# - *Model states*: weights, gradients and the optimizer's tensors, three of the five kinds.
#   Their size depends on the number of parameters alone.
# - *Activations*: tensors that forward keeps for backward.
#   Their size depends on the model's shape, the batch and the sequence.
# - *Temporary* tensors: tensors that a single operation needs while it runs.
#   In a language model the largest have the size of the logits.
#
# ## A plain count of a step's bytes
#
# All five kinds except temporary tensors can be counted directly.
# The model and its optimizer list weights, gradients and moments.
# Activations are in no list, but autograd passes each tensor that it keeps to a hook.

# %%
def plain_states(model, optimizer):
    """Return the bytes of weights, gradients and moments, after a step."""
    weights = sum(p.nbytes for p in model.parameters())
    gradients = sum(p.grad.nbytes for p in model.parameters())
    kept = [x for state in optimizer.state.values() for x in state.values()]
    return weights, gradients, sum(x.nbytes for x in kept if x.dim() > 0)


def plain_activations(model, tokens, targets):
    """Return the loss, and the bytes that autograd keeps for its backward."""
    named = (*model.parameters(), tokens, targets)
    named = {x.untyped_storage().data_ptr() for x in named}
    found = {}

    def count_tensor(tensor):
        storage = tensor.untyped_storage()  # views share one: it is counted once
        found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count_tensor, lambda tensor: tensor):
        value = loss(model(tokens), targets)
    return value, sum(size for place, size in found.items() if place not in named)


model, optimizer, tokens, targets = make_job()
value, activations = plain_activations(model, tokens, targets)
value.backward()
optimizer.step()
weights, gradients, moments = plain_states(model, optimizer)

# %% tags=["hide-input"]
# Compares the plain count with the bytes that a step really holds
with count.track_memory(model, optimizer, tokens, targets) as held:
    named = held.current_bytes
    optimizer.zero_grad()
    start = held.current_bytes
    value = loss(model(tokens), targets)
    kept = held.current_bytes - start
    value.backward()
    optimizer.step()
    most = held.peak_bytes
counters = count.measure_state_bytes(model, optimizer)["counters"]
given = count.sum_bytes((tokens, targets))
assert weights + gradients + moments + counters + given == named
assert kept == activations + 4  # the loss itself
assert 1.05 < most / (named + activations) < 1.2
counted = weights + gradients + moments
print(f"weights, gradients, moments: {counted:,} bytes, equal to those held")
print(f"activations: {activations:,} bytes, equal to those kept (plus 4: the loss)")
print(f"together: {counted + activations:,}; the step's peak: {most:,} bytes")

# %% [markdown]
# The parts are right to the byte, but the peak is not their sum: the plain count does not know which tensors exist at the same time.
# The step reaches its peak where backward begins.
# There, two temporary tensors of the logits' size are held in addition to the activations.
# These two are larger than the gradients, which do not exist yet.
# The plain count also needs a machine on which the model fits, so the rest of this lesson predicts each part, and the peak.
#
# ## The 16 bytes of a parameter
#
# AdamW keeps two running means for each parameter, of its gradient and of the gradient's square: the *moments*.
# In float32 a parameter therefore takes 4 bytes, its gradient 4 and its moments 8: together 16.
#
# With mixed precision, weights and gradients are bfloat16, 2 bytes each.
# But a step changes a weight by little, and bfloat16 has only two to three decimal digits: in bfloat16, 1 + 0.0001 is 1.
# So the optimizer keeps a float32 copy of the weights, the *master weights*, beside its moments: $2 + 2 + 4 + 8 = 16$ {cite}`rajbhandari2020zero`.
#
# ![Bytes of states for each parameter, as bars of weights, gradients and optimizer. float32: 16; bfloat16, float32 master: 16; … and float32 gradients: 18; 8-bit moments: 10; bfloat16, momentum: 12; bfloat16, SGD: 8 bytes.](../figures/memory_recipes.svg)
#
# So the states are the number of parameters times the bytes of a recipe:

# %%
RECIPES = {  # bytes per parameter: weight, gradient, master weight, two moments
    "float32": (4, 4, 0, 8),
    "mixed precision": (2, 2, 4, 8),
}


def plain_prediction(parameters, recipe):
    """Return the bytes of weights, of gradients, and of the optimizer's tensors."""
    weight, gradient, master, moments = RECIPES[recipe]
    return [size * parameters for size in (weight, gradient, master + moments)]


states = plain_prediction(memory.count_parameters(llama), "mixed precision")
print("Llama 3 8B (GB):", [round(size / GB, 1) for size in states])


# %% [markdown]
# The next cell defines, for each recipe, a function that runs a step of a small model and counts the bytes of every state tensor.

# %%
def float32():
    model, optimizer, tokens, targets = make_job()
    loss(model(tokens), targets).backward()
    optimizer.step()
    return count.measure_state_bytes(model, optimizer), 0


def mixed_precision():
    model, _, tokens, targets = make_job(dtype=torch.bfloat16)
    master = [p.detach().float() for p in model.parameters()]
    optimizer = torch.optim.AdamW(master, foreach=False)
    loss(model(tokens), targets).backward()
    for copy, parameter in zip(master, model.parameters(), strict=True):
        copy.grad = parameter.grad.float()
    optimizer.step()
    for copy, parameter in zip(master, model.parameters(), strict=True):
        copy.grad = None  # it was there for the step alone
        parameter.data.copy_(copy)
    return count.measure_state_bytes(model, optimizer), count.sum_bytes(master)


# %% tags=["hide-input"]
# Compares the states of both recipes with the prediction, to the byte
P = memory.count_parameters(SHAPE)
for name, run_step in zip(RECIPES, (float32, mixed_precision), strict=True):
    found, master = run_step()
    found["optimizer"] += master
    held = [found[part] for part in parts[:3]]
    assert held == plain_prediction(P, name) and sum(held) == 16 * P
    each = " + ".join(f"{size:,}" for size in held)
    print(f"{name}: {each} = {sum(held):,} bytes, as predicted: 16 x {P:,}")

# %% [markdown]
# AdamW also keeps a counter of steps, four bytes for each *tensor*: 67 tensors, 268 bytes.
#
# ````{admonition} False: "mixed precision halves the memory"
# :class: checked
#
# As measured above, both recipes take 16 bytes per parameter.
# Mixed precision halves only the layers' activations and the bytes sent; and it lets matrix products use a GPU's faster units.
# ````
#
# ````{admonition} Only if the optimizer is SGD without momentum: "training needs about twice the memory of the weights"
# :class: checked
#
# With AdamW the states are 16 bytes per parameter: *eight* times a bfloat16 file of the weights, and four times a float32 file.
# Twice is right for SGD in one precision without momentum, if activations are not counted.
# ````
#
# Other sources have other numbers, each right for its own recipe.
# Hugging Face's guide says 18: 6 for the weights in both precisions, 8 for the moments, 4 for a gradient in float32 {cite}`huggingface2026anatomy`.
# NVIDIA's Megatron says 18 for the same reason, and 20 where it keeps gradients in both precisions {cite}`nvidia2026distopt`.

# %% tags=["hide-input"]
# Compares these published numbers with the recipes of shardlab.memory
wide = "bf16-fp32-gradients"
assert memory.bytes_per_parameter("bf16") == 16  # ZeRO's paper
assert memory.bytes_per_parameter(wide) == 18  # Hugging Face
assert memory.megatron_bytes(wide, 1, distributed=False) == 18
assert memory.megatron_bytes("fp16", 1, distributed=False) == 20

# %% [markdown]
# ````{admonition} False: "GB and GiB are the same thing"
# :class: checked
#
# A GB is $10^9$ bytes, a GiB is $2^{30}$, 7.4 % more.
# Papers mostly divide by powers of ten; `nvidia-smi`, PyTorch's messages and DeepSpeed's estimator divide by powers of two, and the estimator labels the result "GB".
# A GPU's label often means GiB: of an H100's "80 GB" CUDA shows 79.1 GiB, which is 84.9 GB.
# Llama 3 8B's states are 128.5 GB, or 119.7 GiB: confusing the units is an error of more than half the weights' size.
# ````
#
# ## Activations
#
# Backward needs tensors that forward computed: a matrix product needs its input for the gradient of its weight, and GELU needs its input.
# Autograd keeps these tensors until backward has used them.
# The table lists the tensors that one layer keeps, in units of $bsh$ numbers: $b$ sequences in a batch, of $s$ tokens each, of $h$ numbers each (the hidden size).

# %% tags=["hide-input"]
# Table: tensors that one layer keeps for backward
rows = [
    ("the layer's input, for the norm", "1"),
    ("the norm's output, for query, key and value", "1"),
    ("query, key, value, for attention", "3"),
    (
        "attention's output, for its own backward, and a copy in the next product's layout",
        "2",
    ),
    ("input and output of the second norm", "2"),
    ("the feed-forward network, before GELU", "4"),
    ("… and after GELU, for the second product", "4"),
]
per_token = sum(int(n) for _, n in rows)
config = Config(vocab=8192, seq=256, layers=1, heads=4, hidden=256)
found = memory.estimate_activations(
    config, Layout(micro_batch=4), precision="fp32"
).layer / (4 * 4 * 256 * 256)
# Norms keep two numbers for a token, attention one for each head: 0.3 % of the rest.
assert abs(found / per_token - 1) < 0.01
rows.append(("together", str(per_token)))
show.table(rows, ["kept by one layer", "numbers (b s h)"])

# %% [markdown]
# So a layer keeps about $17\,bsh$ numbers, of four bytes or of two.
# (It is $16\,bsh$ if a GPU's attention kernel writes its output in the layout that the next product reads.)
# The attention matrix itself, $s \times s$ for each head, is not in the table: fused kernels do not store it, and compute it again in backward.
# Attention in plain operations stores the matrix.
# With $a$ heads this adds $5abs^2$ bytes in 16-bit precision, a term of a well-known formula: $sbh\,(34 + 5as/h)$ bytes for a layer with dropout {cite}`korthikanti2022recomputation`.
#
# After the last layer come the logits: for each token as many numbers as the vocabulary has entries.
# The loss keeps the log-softmax of the logits; 16-bit logits are first converted to float32.
# The table compares predictions for three shapes with the bytes that autograd really keeps.

# %% tags=["hide-input"]
# Table: activations of three shapes, predicted and measured
SHAPES = {
    "GELU, float32": (SHAPE, 2, "fp32"),
    "GELU, bfloat16": (SHAPE, 2, "bf16"),
    "Llama's kind, float32": (
        Config(4096, 128, 6, 8, 256, 2, 704, "swiglu", "rms", False, False),
        2,
        "fp32",
    ),
}
rows = []
for name, (config, batch, precision) in SHAPES.items():
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    model, _, tokens, targets = make_job(config, batch, dtype=dtype)
    with count.track_saved_activations(model, tokens, targets) as saved:
        loss(model(tokens), targets)
    layout = Layout(micro_batch=batch)
    want = memory.estimate_activations(config, layout, precision=precision)
    assert abs(saved.bytes / want.kept_bytes - 1) < 0.02
    loss_part = want.head + want.logits
    sizes = (want.kept_bytes - loss_part, loss_part, want.kept_bytes, saved.bytes)
    share = f"{100 * loss_part / want.kept_bytes:.0f}"
    cells = [f"{size / MB:.2f}" for size in sizes]
    rows.append((name, *cells, format_difference(saved.bytes, want.kept_bytes), share))
head = [
    "shape",
    "layers (MB)",
    "logits and loss (MB)",
    "predicted (MB)",
    "measured (MB)",
]
show.table(rows, [*head, "difference (%)", "share of logits and loss (%)"])

# %% [markdown]
# ````{admonition} False: "activations are what the layers keep; forget the logits"
# :class: checked
#
# In the table, logits and loss are up to half of the bytes kept.
# And when backward begins, two more tensors of the logits' size exist for a moment, the gradients of the log-softmax and of the logits: this is the peak of the step below.
# For Llama 3 8B, one sequence of 8192 tokens makes $8192 \times 128{,}256$ logits: 4.2 GB in float32 for each of these tensors.
# ````
#
# ## The core: activations of a layer, row by row
#
# `python -m shardlab.memory` trains five steps with and without recomputation, compares the weights, and prints the bytes held beside the prediction.
#
# `shardlab/memory/core.py` computes the states for more recipes and optimizers, and for many ranks: `tp` and `pp` cut the model, and `zero` is the stage of [ZeRO](zero.md), which says which states are sharded.

# %%
show.source(
    memory.core.Recipe,
    memory.core.States,
    memory.core.check_recipe,
    memory.estimate_states,
    memory.core.compute_states,
)

# %% [markdown]
# For activations it has a function for each row of [the table](#activations), in the order of the forward pass; each returns the bytes kept.

# %%
show.source(
    memory.core.compute_sizes,
    memory.core.kept_by_norm,
    memory.core.kept_by_projections,
    memory.core.kept_by_softmax,
    memory.core.kept_by_attention,
    memory.core._kept_by_core,
    memory.core.kept_by_dropout,
    memory.core.count_wide_tensors,
    memory.core.kept_by_ffn,
    memory.core.kept_by_layer,
)


# %% [markdown]
# ## A whole step, predicted and measured
#
# On the CPU, [`count.track_memory`](../code/shardlab/measure/count/storage.py) records when each storage is allocated and when it is freed; on a GPU it reads the allocator's own counters.
# The next cell runs two steps.
# It records the bytes held after each line, and the peak while the line runs.

# %%
def watch_step(model, optimizer, tokens, targets, trace=False):
    """Run a step; return bytes held after each line, its peak, states, trace, marks."""
    after, most, marks = {}, {}, [time.perf_counter()]
    with count.track_memory(model, optimizer, tokens, targets, trace=trace) as held:

        def note_line(name):
            after[name], most[name] = held.current_bytes, held.peak_bytes
            marks.append(time.perf_counter())
            held.reset_peak()

        note_line("before")
        value = loss(model(tokens), targets)
        note_line("forward")
        value.backward()
        note_line("backward")
        optimizer.step()
        note_line("step")
        states = count.measure_state_bytes(model, optimizer)
        optimizer.zero_grad()
        note_line("zero_grad")
    return after, most, states, held.trace, marks[1:-1]


job = make_job()
first, second = watch_step(*job), watch_step(*job)

# %% tags=["hide-input"]
# Table: bytes held after each line of the first two steps, and the peak during it
rows = []
for name in first[0]:
    sizes = [size[name] / MB for step in (first, second) for size in step[:2]]
    rows.append((name, *(f"{size:.1f}" for size in sizes)))
moments = first[2]["optimizer"]
assert second[0]["before"] - first[0]["before"] == moments + first[2]["counters"]
assert (
    max(second[1].values()) - max(first[1].values()) == moments + first[2]["counters"]
)
head = ["line", "step 1: held after it (MB)", "peak during it (MB)"]
show.table(rows, [*head, "step 2: held after it (MB)", "peak during it (MB)"])


# %% [markdown]
# AdamW allocates its moments in the first `step()`.
# So the first step's peak is lower, here by 42 MB, and a job whose first step fits can still run out of memory in its second.
# The line at which a job fails tells which tensors did not fit:
#
# | the job fails in | new tensors there |
# |---|---|
# | `.to("cuda")` | weights |
# | forward | activations; in the loss, tensors of the logits' size |
# | `backward()` | the logits' gradients at its beginning; gradients of the weights later on |
# | the first `step()` | the moments |
# | the second step's forward or backward | moments and activations exist at the same time for the first time |
# | step 1000 | longer sequences than before, tensors that are kept from step to step, or fragmentation |
#
# The bytes of each part in the second step are as predicted:

# %% tags=["hide-input"]
# Table: each part of the second step, predicted and measured
def compare_step(config, batch, device="cpu"):
    """Return rows of (part, predicted, measured) for the second step, on `device`."""
    job = make_job(config, batch, device)
    watch_step(*job)
    after, most, states, *_ = watch_step(*job)
    kernels = "gpu" if device == "cuda" else "cpu"
    layout, how = Layout(micro_batch=batch), {"precision": "fp32", "device": kernels}
    want = memory.estimate_step(config, layout, **how)
    rows = [(part, getattr(want, part), states[part]) for part in parts[:3]]
    kept = after["forward"] - after["before"]
    saved = memory.estimate_activations(config, layout, **how).kept_bytes
    return [
        *rows,
        ("activations", saved, kept),
        ("peak", want.peak, max(most.values())),
    ]


rows = []
for part, predicted, measured in compare_step(SHAPE, 2):
    limit = {"activations": 0.02, "peak": 0.05}.get(part, 0)
    assert abs(measured / predicted - 1) <= limit, part
    rows.append(
        (
            part,
            f"{predicted:,}",
            f"{measured:,}",
            format_difference(measured, predicted),
        )
    )
head = ["part", "predicted (bytes)", "measured (bytes)", "difference (%)"]
show.table(rows, head, caption="One step on the CPU, batch of 2 sequences")

# %% [markdown]
# A GPU's kernels keep slightly different tensors, and libraries hold memory of their own.
# If this machine has a GPU, the next cell prints the same table from the allocator's counters, and tables of models of billions of parameters, if they fit:

# %% tags=["hide-input", "measured"]
# Table: the same on a GPU, where there is one
LARGER = {  # the shapes of Brown et al. 2020, table 2.1
    "1.3 billion": Config(vocab=50_257, seq=2048, layers=24, heads=16, hidden=2048),
    "2.7 billion": Config(vocab=50_257, seq=2048, layers=32, heads=32, hidden=2560),
    "6.7 billion": Config(vocab=50_257, seq=2048, layers=32, heads=32, hidden=4096),
}
for name, config in {"this page's model": SHAPE, **LARGER}.items() if GPU else ():
    batch, device = (2 if config is SHAPE else 1), torch.cuda.get_device_name()
    layout = Layout(micro_batch=batch)
    want = memory.estimate_step(config, layout, precision="fp32", device="gpu").peak
    torch.cuda.empty_cache()  # what torch keeps for later does not count as free
    if want > 0.9 * torch.cuda.mem_get_info()[0]:
        print(f"{name}: {want / 1e9:.0f} GB are more than this GPU has.")
        continue
    rows = []
    for part, predicted, measured in compare_step(config, batch, "cuda"):
        assert abs(measured / predicted - 1) <= (
            0.1 if part in ("activations", "peak") else 0
        )
        rows.append(
            (
                part,
                f"{predicted:,}",
                f"{measured:,}",
                format_difference(measured, predicted),
            )
        )
    show.table(rows, head, caption=f"{name}: one step on {device}, batch of {batch}")
if not GPU:
    print("This page was executed without a GPU: only the table above was measured.")

# %% [markdown]
# ## A smaller batch: smaller activations, the same states
#
# A smaller batch is the usual first remedy.
# It makes activations smaller, but not the states.
# Each row of the table has half the batch of the row before.
#
# ```{predict}
# :row: 2
# :column: share of the row above
#
# The batch is halved from four sequences to two. What share of the peak remains, as a number between 0 and 1?
# ```

# %% tags=["hide-input"]
# Table: states, activations and peak for batches of 4, 2 and 1
rows, last = [], None
for batch in (4, 2, 1):
    (*_, kept), (*_, peak) = compare_step(SHAPE, batch)[-2:]
    states = memory.estimate_states(P, precision="fp32").total
    ratio = "" if last is None else f"{peak / last:.2f}"
    assert last is None or 0.5 < peak / last < 0.8
    rows.append(
        (batch, f"{states / MB:.1f}", f"{kept / MB:.1f}", f"{peak / MB:.1f}", ratio)
    )
    last = peak
head = ["sequences", "states (MB)", "activations (MB)", "peak (MB)", "share of the row above"]
show.table(rows, head)


# %% [markdown]
# ````{admonition} False: "halving the batch halves the memory"
# :class: checked
#
# In the table, halving from 4 sequences to 2 saves less than two fifths, and from 2 to 1 less than a third, since the states do not depend on the batch.
# For Llama 3 8B on one GPU they are 128.5 GB, even with an empty batch.
# ````
#
# At which batch do activations become larger than states?
# The model alone determines the states; activations grow with the $bs$ tokens on the GPU.
# On each line of the picture activations are as large as states; above the line they are larger.
#
# ![Llama 3 8B: the number of sequences, for each sequence length, at which activations become larger than the states. With fused attention only the product of both numbers counts; with plain attention the line falls more steeply; recomputing every layer moves the line up.](../figures/memory_overtake.svg)
#
# With fused attention only the product $bs$ matters: four sequences of 2048 tokens take as much as one of 8192.
# If the attention matrix is kept, it grows with $s^2$, so the line falls more steeply.
# The third line is for recomputation, the subject of the next section.
#
# (memory-recompute)=
# ## Recomputation: less memory for more time
#
# A layer's activations can be computed again from its input.
# So forward keeps only the input of each layer, $bsh$ numbers instead of about $17\,bsh$.
# When backward comes to a layer, it first runs that layer's forward once more.
#
# ![Activations of four layers over time, twice. Keep all: each layer's activations stay from its forward to its backward; at the end of forward those of all four exist. Recompute: each layer keeps only its input, and runs forward again right before its backward; only one layer's activations are complete at any time.](../figures/memory_recompute.svg)
#
# In PyTorch, recomputation is one call of `checkpoint` from `torch.utils.checkpoint` around each block:

# %%
def recompute_blocks(job):
    """Make backward run each block's forward again; return the job."""
    for block in job[0].blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return job


# %% [markdown]
# The picture shows two steps of this page's model; its horizontal axis counts allocations and frees of tensors.

# %% tags=["hide-input", "measured"]
# Measures and draws the bytes held over a step, keeping and recomputing
jobs = {
    "keeping all activations": make_job(),
    "recomputing": recompute_blocks(make_job()),
}
runs = []
for words, job in jobs.items():
    watch_step(*job)
    _, most, states, trace, marks = watch_step(*job, trace=True)
    weights = states["parameters"], states["optimizer"] + states["counters"]
    runs.append((words, trace, marks, *weights))
show.figure(
    plots.plot_bytes_held(runs),
    "Bytes held over one training step, measured by this page, with all activations "
    "kept and with each layer recomputed in backward.",
    "memory_timeline",
)


# %% [markdown]
# In forward each layer adds the same number of bytes.
# The highest part, in the middle, is the loss: log-softmax, its gradient, the logits' gradient, 16.8 MB each.
# Then backward frees the activations layer by layer, while it makes gradients.
#
# Backward takes about twice the arithmetic of forward, so one more forward adds a third to a step.
# The table shows the memory that recomputation saves and the time that it costs.
# Steps with and without recomputation were timed alternately.

# %% tags=["hide-input", "measured"]
# Table: memory saved by recomputation, predicted and measured; its time
def time_step(job):
    model, optimizer, tokens, targets = job
    begin = time.perf_counter()
    loss(model(tokens), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - begin


jobs = {"none": make_job(), "full": recompute_blocks(make_job())}
rows, ratios = [], []
for _ in range(5):
    took = {how: time_step(job) for how, job in jobs.items()}
    ratios.append(took["full"] / took["none"])
slower = statistics.median(ratios)
for how, job in jobs.items():
    after, most, *_ = watch_step(*job)
    kept, peak = after["forward"] - after["before"], max(most.values())
    layout = Layout(micro_batch=2, recompute=how)
    want = memory.estimate_activations(SHAPE, layout, precision="fp32")
    whole = memory.estimate_step(SHAPE, layout, precision="fp32")
    assert abs(kept / want.kept_bytes - 1) < 0.02 and abs(peak / whole.peak - 1) < 0.05
    pairs = [(want.kept_bytes, kept), (whole.peak, peak)]
    cells = [
        c
        for w, m in pairs
        for c in (f"{w / MB:.1f}", f"{m / MB:.1f}", format_difference(m, w))
    ]
    rows.append((how, *cells, "1" if how == "none" else f"{slower:.2f}"))
show.check_timing(0.9 < slower < 2.5, "recomputing all takes about 4/3 of the time")
head = ["recompute", "kept: predicted (MB)", "measured (MB)", "diff. (%)"]
head += ["peak: predicted (MB)", "measured (MB)", "diff. (%)", "time of a step"]
show.table(rows, head)


# %% [markdown]
# The layers' activations shrink to a seventeenth; logits and loss, outside the layers, are kept.
# The gradients are the same, bit for bit, because the second forward repeats the first.
# (With dropout it must draw the same random numbers again; `checkpoint` restores the generator's state.)

# %%
def copy_gradients(job):
    model, _, tokens, targets = job
    loss(model(tokens), targets).backward()
    return [p.grad for p in model.parameters()]


kept, again = copy_gradients(make_job()), copy_gradients(recompute_blocks(make_job()))
print(sum(map(torch.equal, kept, again)), "of", len(kept), "gradients are equal")

# %% tags=["hide-input"]
# Compares the gradients with and without recomputation, bit for bit
assert all(map(torch.equal, kept, again))

# %% [markdown]
# *Selective* recomputation recomputes only attention.
# If the attention matrix is kept, attention takes most of the memory but little of the arithmetic: GPT-3 needs 70 % less memory for 2.7 % more arithmetic {cite}`korthikanti2022recomputation`.
# Fused attention kernels always recompute the matrix.
# The outputs of LayerNorms and nonlinearities, too, are large to keep and cheap to recompute; with `recompute="norms+ffn"` the prediction leaves them out.
#
# ## Memory on many GPUs, simulated on fake tensors
#
# How many bytes would each of 8 or 64 GPUs hold to train Llama 3 8B, if each kept only its shard of the states (see [ZeRO](zero.md))?
# You can find out without such GPUs.
# `count.simulate_fsdp_step` runs FSDP2 on *fake* tensors, which have a shape and a size but no data.
# The other ranks of its process group do not exist.
#
# **These numbers are simulated.**
# With a small model on four real ranks, simulation and measurement were [equal to the byte](../tests/test_held.py).
# The simulation leaves out the allocator's fragmentation and nccl's buffers.

# %% tags=["hide-input"]
# Table: Llama 3 8B on 8 and on 64 GPUs, simulated and by the formula
rows = []
for size in (8, 64):
    found = count.simulate_fsdp_step(llama, size)
    layout = Layout(dp=size, zero=3, recompute="full")
    want = memory.estimate_step(llama, layout, precision="bf16-compute")
    assert abs(found["peak"] / want.peak - 1) < 0.05
    cells = [f"{found[part] / GB:.2f}" for part in parts[:4]]
    peaks = [
        f"{found['peak'] / GB:.2f}",
        f"{want.peak / GB:.2f}",
        format_difference(want.peak, found["peak"]),
    ]
    rows.append((size, *cells, *peaks))
head = ["GPUs", *(f"{part} (GB)" for part in parts[:4])]
head += ["simulated peak (GB)", "formula's (GB)", "difference (%)"]
show.table(
    rows,
    head,
    caption="Rank 0, one sequence of 8192 tokens on each, full recomputation",
)

# %% [markdown]
# With eight times as many GPUs each holds an eighth of the states, but as many activations as before.
# So beyond some number of GPUs, more of them save hardly any memory.
#
# ## Memory of a Hugging Face model, from its config.json
#
# On Hugging Face's hub a model has weights, and a `config.json` with its sizes.
# How the layers are built from these sizes is defined in a class of the `transformers` library, one for each of some two hundred architectures.
# These are the sizes of Qwen3-30B-A3B {cite}`qwen2025qwen3`.

# %%
QWEN3 = {
    "model_type": "qwen3_moe",
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,  # 32 of them are twice the hidden size
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "tie_word_embeddings": False,
}
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "config.json")
    path.write_text(json.dumps(QWEN3))
    qwen = hub.read_structure(path)
print(f"{qwen.num_params:,} parameters, of which a token uses {qwen.num_active_params:,}")

# %% [markdown]
# The file of a Mixtral model has nearly the same keys.
# Read as a Mixtral, the sizes above give another model:

# %%
as_mixtral = Config(
    *(151_936, 40_960, 48, 32, 2048, 4, 768, "swiglu", "rms", False, False),
    experts=128,
    experts_per_token=8,
)
print(f"{memory.count_parameters(as_mixtral) - qwen.num_params:,} parameters")

# %% [markdown]
# In a Mixtral the heads have half the size, and queries and keys are not normalised: 1.5 % of the parameters and two thirds of attention's activations would be missing.
# So `hub.read_structure` guesses nothing.
# It has `transformers` build the model on the `meta` device, where tensors have shapes but take no bytes, and adds up the sizes.
# Then it runs one layer of each kind on a meta tensor, and records the tensors that are kept for backward.
# It downloads nothing, and runs no code that comes with a file.
# It refuses a file that lacks a size, and a file with a size that the class does not read, which describes another model.
#
# The memory of a rank is then predicted as above.
# The table is for 64 GPUs; each group of eight shards the [experts](experts.md).

# %% tags=["hide-input"]
# Table: Qwen3-30B-A3B on 64 GPUs, with more and more of its states divided
rows = []
for words, shared in {
    "copies": Layout(dp=64),
    "experts shared by 8": Layout(dp=64, ep=8),
    "experts shared by 8, ZeRO-1": Layout(dp=64, ep=8, zero=1),
    "experts shared by 8, ZeRO-3": Layout(dp=64, ep=8, zero=3),
}.items():
    held = memory.estimate_structure(qwen, shared, seq=4096)
    sizes = (held.parameters, held.gradients, held.optimizer, held.activations)
    rows.append((words, *(f"{size / GB:.1f}" for size in sizes)))
head = ["parameters (GB)", "gradients (GB)", "optimizer (GB)", "activations (GB)"]
show.table(rows, ["on each rank", *head], caption="One sequence of 4,096 tokens on each")

# %% [markdown]
# `python -m shardlab memory --config config.json` prints this prediction for any layout; [`strategy`](strategy.md) reads the same file.
#
# ## Other tools: MemTracker, memory snapshots, DeepSpeed's estimator
#
# PyTorch's own tool, `MemTracker`, should agree with `count.track_memory`; it also lists the bytes held at the peak by kind.

# %%
job = make_job()
watch_step(*job)
ours = max(watch_step(*job)[1].values())
tracker = MemTracker()
tracker.track_external(*job)
with tracker:
    model, optimizer, tokens, targets = job
    loss(model(tokens), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
kinds = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]

# %% tags=["hide-input"]
# Compares MemTracker's peak with our own count
assert kinds["Total"] == ours
for kind, size in kinds.items():
    if size:
        print(f"{str(kind).split('.')[-1]}: {size:,} bytes")
print(f"count.track_memory: {ours:,} bytes")

# %% [markdown]
# Both peaks are equal to the byte.
# `TEMP` is two tensors of the logits' size, which a formula for layers alone does not contain.
# On a GPU there are three more tools:
#
# - `torch.cuda.memory_summary()` prints the allocator's counters.
# - `torch.cuda.max_memory_allocated()` is the peak in the allocator's blocks, which are [somewhat larger](#memory-wrong) than the tensors.
#   `count.track_memory` reads the bytes requested for tensors, `requested_bytes` in `memory_stats()`.
# - `torch.cuda.memory._record_memory_history()` and `_dump_snapshot(file)` write down every allocation with its stack, for the viewer at `pytorch.org/memory_viz`.
#
# DeepSpeed's estimator predicts memory before the job runs.
# The first column is the output that its documentation {cite}`deepspeed2026memory` shows for T5-3B on one node of eight GPUs.
# The second is computed by its formulas, the third is our own count of the states.

# %% tags=["hide-input"]
# Table: DeepSpeed's estimates as printed, by its formula, and our own
GIB = memory.UNITS["GiB"]
t5 = 2851 * 10**6
rows = []
for words, printed, theirs, ours in (
    (
        "stage 2",
        15.93,
        memory.deepspeed_zero2(t5, gpus_per_node=8, offload=False)[1],
        memory.estimate_states(t5, Layout(dp=8, zero=2), "fp16").total,
    ),
    (
        "stage 2, optimizer in the host's memory",
        5.31,
        memory.deepspeed_zero2(t5, gpus_per_node=8, offload=True)[1],
        memory.estimate_states(
            t5, Layout(dp=8, zero=2, offload="optimizer"), "fp16"
        ).total,
    ),
):
    assert abs(theirs / GIB - printed) < 0.01
    rows.append((words, f"{printed:.2f}", f"{theirs / GIB:.2f}", f"{ours / GIB:.2f}"))
head = ["T5-3B on 8 GPUs", "printed (GiB, labelled GB)", "its formula (GiB)"]
show.table(rows, [*head, "shardlab.memory (GiB)"])

# %% [markdown]
# For stage 2 the estimator and our count differ: our count shards gradients, as ZeRO's paper does; the estimator counts all gradients on every GPU, and optimizer states of $16/d$ bytes per parameter on $d$ GPUs.
# None of the columns includes activations. So find out which tensors an estimate counts before you use it.
#
# (memory-wrong)=
# ## What goes wrong
#
# Each of these mistakes takes memory that no formula above contains.
# The first cell has a training step and an evaluation that can make the mistakes; `measure_peak` returns the third step's peak.

# %%
model, optimizer, tokens, targets = make_job()
kept = {}


def step(after_step=lambda *_: None, set_to_none=True):
    logits = model(tokens)
    value = loss(logits, targets)
    value.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=set_to_none)
    after_step(logits, value)


def run_evaluation(gradients):
    with torch.set_grad_enabled(gradients):
        return loss(model(tokens), targets)


def measure_peak(fn):
    """Return the peak of the third call of `fn`, minus the bytes that training needs."""
    optimizer.zero_grad()
    kept.clear()
    with count.track_memory(model, optimizer, tokens, targets) as held:
        fn()
        fn()
        held.reset_peak()
        fn()
        return held.peak_bytes


# %% [markdown]
# The next cell lists the mistakes, each with the bytes that it should add to the peak.
# One mistake is harmless.

# %%
right, frugal = measure_peak(step), measure_peak(lambda: run_evaluation(False))
logits = tokens.numel() * SHAPE.vocab * 4
saved = memory.estimate_activations(
    SHAPE, Layout(micro_batch=2), precision="fp32"
).kept_bytes
CASES = [
    ("gradients set to zero, not None", lambda: step(set_to_none=False), right, 4 * P),
    (
        "the last step's logits kept",
        lambda: step(lambda x, _: kept.update(x=x)),
        right,
        logits,
    ),
    (
        "losses kept in a list, after backward",
        lambda: step(lambda _, v: kept.setdefault("v", []).append(v)),
        right,
        2 * 4,
    ),
    (
        "evaluation that adds up losses, without no_grad",
        lambda: kept.update(v=kept.get("v", 0) + run_evaluation(True)),
        frugal,
        3 * saved - logits,  # the log-softmax of the third is there in any case
    ),
]

# %% tags=["hide-input"]
# Table: bytes that each mistake adds to the peak, predicted and measured
rows = []
for name, wrong, without, predicted in CASES:
    extra = measure_peak(wrong) - without
    rows.append(
        (name, f"{predicted:,}", f"{extra:,}", format_difference(extra, predicted))
    )
    assert abs(extra - predicted) <= 0.01 * predicted, (name, extra, predicted)
optimizer.zero_grad()
kept.clear()
head = [
    "in the third step, with",
    "predicted extra at the peak (bytes)",
    "measured (bytes)",
]
show.table(rows, [*head, "difference (%)"])

# %% [markdown]
# - **Gradients set to zero take as much memory as gradients.**
#   By default `zero_grad()` sets gradients to `None`, which frees them; with `set_to_none=False` zeros are held through forward.
# - **A tensor is held as long as a name refers to it.**
#   In a loop, `logits` holds the old tensor until it is assigned again, which is *after* the next forward has made the new one.
#   The remedy is `del logits`, or a function around the step.
# - **A loss refers to its graph, and the graph to everything that it saved**, until backward has run.
#   In training a kept loss takes little; in an evaluation a sum of losses keeps the activations of every batch, until memory runs out in the middle of the validation set.
#   The remedy is `with torch.no_grad():`, and `.item()` for what you keep.
#
# ````{admonition} Only if backward is never called: "a list of losses keeps all activations alive"
# :class: checked
#
# Not after `backward()`, which frees the tensors that the graph saved: in the third row each step adds four bytes.
# Without backward, in the fourth row, each batch adds all its activations.
# Call `.item()` in both cases, but look for leaks in code without backward.
# ````
#
# **Fragmentation.**
# PyTorch takes memory from the GPU in *segments*, and cuts blocks off them.
# A tensor of at most 1 MiB gets a multiple of 512 bytes of a segment of 2 MiB.
# A tensor below 10 MiB shares a segment of 20 MiB; a larger tensor gets its own segment, rounded up to 2 MiB.
# When a tensor takes a large block, the rest of the block is split off only if it is more than 1 MiB.
# Otherwise the tensor keeps the whole block, and the rest is unused (torch 2.13).
# After many steps with sequences of different lengths the free bytes are in many small pieces: 6 GiB may be free, but no piece is large enough for a tensor of 2 GiB.
# The error then reports many bytes as *reserved but unallocated*.
# Three remedies:
#
# - `expandable_segments:True` in `PYTORCH_ALLOC_CONF` (before torch 2.9: `PYTORCH_CUDA_ALLOC_CONF`): segments can grow, and a remainder of 512 bytes or more can be used by other tensors;
# - pad sequences to a few lengths;
# - train on the longest batch first.
#
# On the CPU PyTorch has no caching allocator, so this page cannot show fragmentation.
#
# **An exception keeps a step's tensors alive.**
# Its traceback refers to the frames of the functions, and the frames to their tensors.
# A notebook keeps the last exception, so after an out-of-memory error the next cell has less memory than before.
# No restart is needed: delete the exception and your own names for tensors, and have Python collect objects that refer to each other (`gc.collect()`).

# %%
seen = []


def too_large():
    activations = torch.zeros(1_000_000)
    seen.append(weakref.ref(activations))
    raise torch.OutOfMemoryError("as a GPU would say")


try:
    too_large()
except torch.OutOfMemoryError as error:
    kept = error  # a notebook has it as sys.last_value
print("tensors held after the error:", seen[0]() is not None)
kept = None  # in a notebook: sys.last_value = sys.last_traceback = None
gc.collect()
print("and after the exception is gone:", seen[0]() is not None)

# %% [markdown]
# On a GPU then call `torch.cuda.empty_cache()`: it returns PyTorch's unused blocks to the GPU, but frees no tensor that a name still refers to.
#
# ## Ways to save memory, and their costs
#
# | remedy | saves | costs |
# |---|---|---|
# | smaller batch, with accumulation | activations and logits, in proportion, as measured above; none of the states | smaller matrix products, with fewer [operations per byte](gemm.md#from-bytes-to-seconds-the-roofline) |
# | recomputation | layers' activations: above, to 1/17 | a third more arithmetic |
# | the loss in chunks of tokens | three tensors of the logits' size: 3 × 16.8 MB of the 151 MB peak above | computing the logits twice, or a fused kernel |
# | bfloat16 | half of the activations; none of the 16 bytes | precision |
# | 8-bit moments | 6 of the 16 bytes | moments are rounded |
# | offload to the host's memory | 12 of the 16 bytes, or all | these bytes are sent over a slow link in every step |
# | sharding states over $d$ ranks ([ZeRO](zero.md)) | up to $16 - 16/d$ bytes; none of the activations | communication |
#
# In a real job, two numbers show that memory is as planned: the allocated bytes after the first step equal the states' prediction, and the peak of the second step is within a few percent of the estimate.
# Neither grows in later steps.
# The command `python -m shardlab memory` makes the same estimate, here for Llama 3 8B on 64 GPUs; with `--json` it prints bytes.

# %%
status = run_command("memory --model llama-3-8b --dp 64 --zero 3 --recompute full")

# %% [markdown]
# `--help` lists options for real jobs, such as pipeline stages with unequal numbers of layers (`--stages 9,9,8,6`), sequences sharded over ranks (`--cp`), hybrid sharding (`--replicas`), and Muon's states (`--optimizer muon`).
# [The planner's prediction](strategy.md) includes the bytes that an allocator reserves beyond the tensors.
#
# On the course's site this form runs the command in your browser.
#
# :::{calculator} memory
# :model: llama-3-8b
# :dp: 64
# :zero: 3
# :recompute: full
# :::
#
# ## Exercises
#
# ```{exercise-start} States of a model (easy)
# :label: ex-memory-states
# ```
#
# GPT-2's largest model has 1.5 billion parameters.
# It is trained with AdamW, in bfloat16 with float32 master weights.
# How many GB do its states take?

# %%
answer = ...  # GB
check(answer, "state_gigabytes")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-memory-states
# :label: sol-memory-states
# :class: dropdown
# ```
#
# Weights 2, gradients 2, master weights 4, moments 8.

# %%
answer = 1.5e9 * (2 + 2 + 4 + 8) / 1e9
check(answer, "state_gigabytes")

# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} The largest model (easy)
# :label: ex-memory-largest
# ```
#
# A GPU has 80 GB.
# Your batch needs 20 GB for activations and temporary tensors.
# How many billion parameters can the model have, with the previous exercise's recipe?

# %%
answer = ...  # billion parameters
check(answer, "largest_model")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-memory-largest
# :label: sol-memory-largest
# :class: dropdown
# ```
#
# The states get 60 GB, at 16 bytes each.

# %%
answer = (80 - 20) / 16
check(answer, "largest_model")


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Bytes of the states (medium)
# :label: ex-memory-recipes
# ```
#
# `precision` is "fp32", "bf16" (with float32 master weights) or "bf16-fp32-gradients"; `optimizer` is "sgd", "momentum" or "adamw".
# Return the bytes of parameters, gradients and optimizer together.

# %%
def my_states_bytes(params, precision, optimizer):
    pass  # your code


check(my_states_bytes)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-memory-recipes
# :label: sol-memory-recipes
# :class: dropdown
# ```
#
# Only mixed precision has master weights, and moments are always float32.

# %%
def my_states_bytes(params, precision, optimizer):
    weight = 4 if precision == "fp32" else 2
    gradient = 2 if precision == "bf16" else 4
    master = 0 if precision == "fp32" else 4
    moments = {"sgd": 0, "momentum": 1, "adamw": 2}[optimizer]
    return params * (weight + gradient + master + 4 * moments)


check(my_states_bytes)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} The largest batch (medium)
# :label: ex-memory-batch
# ```
#
# Return the number of sequences of the model's full length that fit.
# Use `memory.estimate_step(config, Layout(micro_batch=…))`, whose `.peak` is the peak of a step, and `limit`, the bytes available.
# Return 0 if not even one fits.

# %%
def my_largest_batch(config, limit):
    pass  # your code


check(my_largest_batch)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-memory-batch
# :label: sol-memory-batch
# :class: dropdown
# ```
#
# Count up, and stop before the first batch that does not fit.

# %%
def my_largest_batch(config, limit):
    batch = 0
    while memory.estimate_step(config, Layout(micro_batch=batch + 1)).peak <= limit:
        batch += 1
    return batch


check(my_largest_batch)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} An evaluation whose memory does not grow (medium)
# :label: ex-memory-evaluate
# ```
#
# Return the mean loss of `model` over `batches`, eight pairs of tokens and targets, all of one size.
# Hold no more memory at the last batch than at the first, and keep no activations.

# %%
def my_evaluate(model, batches):
    total = 0  # your code: this version grows
    for tokens, targets in batches:
        total = total + loss(model(tokens), targets)
    return total / 8


check(my_evaluate)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-memory-evaluate
# :label: sol-memory-evaluate
# :class: dropdown
# ```
#
# `no_grad` saves nothing for backward, and `.item()` returns a plain number.

# %%
def my_evaluate(model, batches):
    losses = []
    with torch.no_grad():
        for tokens, targets in batches:
            losses.append(loss(model(tokens), targets).item())
    return sum(losses) / len(losses)


check(my_evaluate)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Eight sequences in the memory of two (hard)
# :label: ex-memory-backward
# ```
#
# Compute the gradient of the mean loss over all eight sequences, into `parameter.grad`, and never hold more activations than two sequences need.
# Do not call the optimizer.
# `tokens` and `targets` are `[8, sequence]`.

# %%
def my_backward(model, tokens, targets):
    pass  # your code


check(my_backward)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-memory-backward
# :label: sol-memory-backward
# :class: dropdown
# ```
#
# Run four micro-batches, each with its own backward; autograd adds up the gradients.
# Each micro-batch's loss is its own mean, so it is divided by four.

# %%
def my_backward(model, tokens, targets):
    for x, y in zip(tokens.chunk(4), targets.chunk(4), strict=True):
        (loss(model(x), y) / 4).backward()


check(my_backward)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Micro-batch size and recomputation (design)
# :label: ex-memory-pieces
# ```
#
# A step of `batch` sequences has to fit into `limit` bytes.
# Two techniques help: micro-batches, whose gradients add up, and recomputing every layer.
# Return `(sequences, recompute)`: micro-batches of equal size, as large as possible, and `"none"` or `"full"`.
# Recomputation costs arithmetic, so use it only if no size fits without it.
# If nothing fits, return `None`.
# Use `memory.estimate_step(config, Layout(micro_batch=…, microbatches=…, recompute=…))`: earlier micro-batches' gradients count, too.

# %%
def my_micro_batch(config, batch, limit):
    pass  # your code


check(my_micro_batch)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-memory-pieces
# :label: sol-memory-pieces
# :class: dropdown
# ```
#
# From the second micro-batch on, gradients are already in memory, so a micro-batch of six sequences has a higher peak than a step of six.

# %%
def my_micro_batch(config, batch, limit):
    sizes = [size for size in range(batch, 0, -1) if batch % size == 0]
    for recompute in ("none", "full"):
        for size in sizes:
            layout = Layout(micro_batch=size, microbatches=batch // size, recompute=recompute)
            needs = memory.estimate_step(config, layout)
            if needs.peak <= limit:
                return size, recompute
    return None


check(my_micro_batch)

# %% [markdown]
# ```{solution-end}
# ```
#
# ## Summary
#
# - Model states are 16 bytes for each parameter with AdamW, in float32 and in mixed precision alike; the batch does not change that.
# - Activations grow with batch times sequence: about $17\,bsh$ numbers a layer with fused attention, and only the input, $bsh$, of a layer that is recomputed.
# - The peak is where backward begins, at the logits; a prediction without logits is far too low.
# - The second step is the first that holds gradients, moments and activations.
# - Predict first; then count one step.
#   If they differ, the step holds a tensor that you did not expect.
#
# ## Further reading
#
# - {cite:t}`rajbhandari2020zero`, sections 1 and 3: where memory goes, and the 16 bytes; Table 1 is `memory.estimate_states`.
# - {cite:t}`korthikanti2022recomputation`: every activation of a layer, counted; the memory that recomputing each of them saves.
# - {cite:t}`chen2016sublinear`: recomputation, and why keeping the inputs of $\sqrt{L}$ of $L$ layers can be enough.
# - {cite:t}`dettmers2022eightbit`: moments in 8 bits, block by block.
