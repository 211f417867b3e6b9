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
# # DeepSpeed: engine, configuration and ZeRO stages
#
# After this lesson you can
#
# - train with DeepSpeed in a script of ten lines, and write its configuration line by line;
# - show that its losses equal one process's, for every ZeRO stage and with offload;
# - tell which parts of the engine are on by default;
# - save on two ranks and resume on one or four, and say when stage 3 is worth its traffic.
#
# Two ranks train for five steps with a configuration of four lines, and their losses equal one process's to the seventh digit.
# Then one of the four lines, which switches something *off*, is left out. Now the losses differ in the third digit, without an error or a warning.
#
# ## The plain script: initialize, backward, step

# %% tags=["hide-input"]
# Imports, the small model, and what one process computes

import json
import statistics
import tempfile
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from shardcourse.exercises import check
from shardlab import deepspeed_engine as de
from shardlab import memory, ranks
from shardlab.common import show, text
from shardlab.data_parallel import measure_drift
from shardlab.deepspeed_engine import breakdown, lab
from shardlab.gpt.model import GPT, PRESETS, loss
from shardlab.layout import Layout
from shardlab.measure import count

show.set_style()
SHAPE, STEPS = PRESETS["nano"], 5
de.import_deepspeed()  # imports DeepSpeed once, before any rank starts


def build_model():
    """The same small GPT wherever it is built."""
    torch.manual_seed(0)
    return GPT(SHAPE)


def local_batch(step, rank=None):
    """One rank's two windows of text for a step: tokens, targets: [2, 64]."""
    rank = dist.get_rank() if rank is None else rank
    return text.get_batch(64, 2, start=(2 * step + rank) * 2)


def joined_batch(step):
    """The windows of both ranks: [4, 64]."""
    return [
        torch.cat(side) for side in zip(local_batch(step, 0), local_batch(step, 1), strict=True)
    ]


def one_process():
    """One process on the joined batch: losses, and weights after all steps."""
    module = build_model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        tokens, targets = joined_batch(step)
        value = loss(module(tokens), targets)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, {name: w.detach() for name, w in module.state_dict().items()}


def max_difference(found, want):
    """Largest difference of two lists of losses, or of two state dicts."""
    if isinstance(want, dict):
        return max((found[k] - want[k]).abs().max().item() for k in want)
    return max(abs(a - b) for a, b in zip(found, want, strict=True))


def format_gap(gap):
    return f"{gap:.0e}" if gap else "0"


LOSSES, WEIGHTS = one_process()
NEAR = 4.1e-5  # 4 sqrt(256 tokens) 2^-24 of 5.5; a turned weight: 2 * 1e-3 * 0.01


# %% [markdown]
# Each run has two ranks, on GPUs where your machine has them. Where a cell says `device="cpu"`, its comment says why.
# DeepSpeed is version 0.19.8 (November 2026). On GPUs only the times differ.
#
# DeepSpeed's `initialize` takes a model, an optimizer and a dictionary, and returns an *engine*.
# You call the engine like the model, and then its `backward` and its `step`.
# The script averages no gradients and calls no `zero_grad`: the engine does both.
# `de.import_deepspeed` imports DeepSpeed for the rank's device.

# %%
def plain_script(settings):
    deepspeed, module = de.import_deepspeed(), build_model()
    adamw = torch.optim.AdamW(module.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=module, optimizer=adamw, config=settings)
    losses = []
    for step in range(STEPS):
        tokens, targets = local_batch(step)  # this rank's part of the batch
        value = loss(engine(tokens), targets)
        engine.backward(value)
        engine.step()
        losses.append(value.detach())
    return torch.stack(losses)


four_lines = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,  # any optimizer of torch's
}
# CPU: this script moves nothing to a GPU
with_all = ranks.run(plain_script, 2, four_lines, device="cpu")

three_lines = {k: v for k, v in four_lines.items() if k != "gradient_clipping"}
# CPU: this script moves nothing to a GPU
without = ranks.run(plain_script, 2, three_lines, device="cpu")

# %% [markdown]
# The check compares the mean of the two ranks' losses with one process on the joined batch:

# %% tags=["hide-input"]
# Compares the losses of both runs with one process's

for name, results in (("four lines: ", with_all), ("three lines:", without)):
    losses = torch.stack(results).mean(0).tolist()
    gap = max_difference(losses, LOSSES)
    assert gap < NEAR if results is with_all else gap > 1e-3
    print(
        name,
        ", ".join(f"{v:.4f}" for v in losses),
        f" largest difference {format_gap(gap)}",
    )
print("one process: " + ", ".join(f"{value:.4f}" for value in LOSSES))

# %% [markdown]
# The three lines leave out `gradient_clipping`: DeepSpeed 0.19.8 then clips the gradients' norm at 1.0, so its losses differ from step 3 on.
#
# The plain script moves nothing to a GPU, accumulates no gradients, and checks no key of its dictionary, so a misspelt key is accepted.
#
# ## What the engine does in forward, backward and step
#
# The engine works in three calls per training step, and keeps all states between steps.
#
# ![The engine's three calls. engine(tokens) runs the model's forward; at stage 3 it gathers each layer before its use and frees it after. engine.backward(loss) divides the loss by the accumulation; at stage 0 it all-reduces the gradients, at stages 1 to 3 it reduce-scatters them. engine.step() clips and steps after the last micro-batch; at stages 1 and 2 it then all-gathers the weights. Below, the states on four ranks: all are full at stage 0; each rank has a shard of the optimizer states from stage 1, of the gradients from stage 2, of the parameters at stage 3. Offload moves optimizer states or parameters to the host's memory.](../figures/deepspeed_engine_wraps.svg)
#
# You know these mechanisms: averaging from [Data parallelism](data_parallel.md), the stages from [ZeRO](zero.md).
# With DeepSpeed a dictionary chooses among them {cite}`rasley2020deepspeed`.
#
# From here on the page uses the course's [wrappers](#the-module-wrappers-around-deepspeeds-calls) `de.initialize` and `de.step`.
# `de.initialize` calls DeepSpeed's `initialize`, chooses the device, checks the number of ranks, and keeps DeepSpeed from printing. `de.step` makes the three calls above for each micro-batch of one optimizer step.
#
# ## The configuration, line by line
#
# DeepSpeed reads JSON, or a dictionary of the same content.
# You can write it by hand, as above. `de.build_config` builds it from a layout and some arguments, and checks it against DeepSpeed's own schema before any rank starts.

# %%
layout = Layout(dp=2, zero=3, offload="parameters", micro_batch=2)
settings = de.build_config(layout, clipping=1.0)
for name, value in settings.items():
    print(f"{name}: {json.dumps(value)}")


# %% [markdown]
# | line | what it does | when you leave it out |
# |---|---|---|
# | `train_micro_batch_size_per_gpu` | sequences that one copy of the model computes at a time: determines the activations' memory | computed from the next two lines |
# | `gradient_accumulation_steps` | micro-batches per optimizer step | computed, or 1 |
# | `train_batch_size` | sequences per optimizer step, over all copies | computed |
# | `gradient_clipping` | largest allowed global norm of the gradients | **1.0** since version 0.19.3: your gradients are clipped; before, 0.0 |
# | `zero_optimization.stage` | 0: nothing is sharded; 1: optimizer states; 2: gradients, too; 3: parameters, too | 0 |
# | `offload_optimizer`, `offload_param` | put the sharded states into the host's memory | they stay on the device |
# | `zero_force_ds_cpu_optimizer` | refuse an offloaded optimizer that is not DeepSpeed's compiled CPU Adam | true: torch's own AdamW is refused |
# | `zero_allow_untested_optimizer` | accept an optimizer that was not tested with ZeRO: any but DeepSpeed's own and torch's Adam, AdamW and Adagrad | false: such an optimizer is refused from stage 1 on |
# | `steps_per_print` | how often to log progress: here never | no progress is logged |
#
# ````{admonition} Only if DeepSpeed is older than 0.19.3: "without a clipping line there is no clipping"
# :class: checked
#
# This was true until mid-2026. DeepSpeed's [pull request 8068](https://github.com/deepspeedai/DeepSpeed/pull/8068), merged on 23 June 2026, changed the default from 0.0 to 1.0, and [version 0.19.3](https://github.com/deepspeedai/DeepSpeed/releases/tag/v0.19.3) was the first with it.
# With 0.19.8 the next cell trains with the line left out, with 1.0, and with 0.0: the first two give the same losses, and only the third gives those of one process.
# So after an upgrade the same file trains differently. Always write the line.
# ````

# %%
def train_cases(cases):
    """On a rank, for each configuration: mean losses, weights, seconds of a step."""
    found = {}
    for name, settings in cases.items():
        engine = de.initialize(build_model(), settings)
        parts, losses, seconds = engine.gradient_accumulation_steps(), [], []
        for step in range(STEPS):
            chunks = (side.chunk(parts) for side in local_batch(step))
            begin = time.perf_counter()
            losses.append(de.step(engine, list(zip(*chunks, strict=True))))
            seconds.append(time.perf_counter() - begin)
        found[name] = losses, de.gather_weights(engine), statistics.median(seconds[1:])
    return found


PLAIN = Layout(dp=2, micro_batch=2)
unsaid = de.build_config(PLAIN)
del unsaid["gradient_clipping"]
cases = {
    "left out": unsaid,
    "1.0": de.build_config(PLAIN, clipping=1.0),
    "0.0": de.build_config(PLAIN),
}
# CPU: the same bits each time
clipped = ranks.run(train_cases, 2, cases, device="cpu")[0]

# %% tags=["hide-input"]
# Table: the last loss with the line left out, with 1.0 and with 0.0

rows = []
for name, (losses, _, _) in clipped.items():
    rows.append((name, f"{losses[-1]:.4f}", format_gap(max_difference(losses, LOSSES))))
assert clipped["left out"][0] == clipped["1.0"][0]
assert max_difference(clipped["left out"][0], LOSSES) > 1e-3
assert max_difference(clipped["0.0"][0], LOSSES) < NEAR
show.table(
    rows, ["gradient_clipping", "last loss", "largest difference from one process"]
)


# %% [markdown]
# If only one of two frameworks clips, their losses differ, as if one had a bug.
# With AdamW the difference shows only after a few steps. A gradient factor that is the same in all steps cancels in AdamW; but clipping has a different factor in each step, and AdamW's moments mix gradients of several steps.
#
# ## The batch arithmetic
#
# Three numbers determine the batch, and have to satisfy an equation:
#
# $$
# \text{train batch} = \text{micro-batch} \times \text{accumulation} \times \text{copies}, \qquad
# \text{copies} = \frac{N}{t\,p}
# $$
#
# $N$ is the number of ranks, and $t$ and $p$ are the degrees of tensor and pipeline parallelism.
# Ranks that share one copy of the model compute the same sequences, and so count once. (DeepSpeed's own count has [an exception](#tensor-and-pipeline-parallelism-in-deepspeed).)
#
# ![Two ranks, each with two micro-batches of two sequences, one after the other. Micro-batch 2, times accumulation 2, times 2 copies: a train batch of 8 sequences, for one average over the ranks and one optimizer step.](../figures/deepspeed_engine_batch.svg)
#
# If you give two of the three, DeepSpeed computes the third. If you give all three, the equation must hold.
# If it does not hold, as in the next cell, the error message shows the product.

# %%
def catch_refusal(settings):
    """What DeepSpeed itself says to a configuration."""
    deepspeed = de.import_deepspeed()
    try:
        deepspeed.initialize(model=build_model(), config=settings)
    except AssertionError as error:
        return str(error)
    return "accepted"


wrong = {
    "train_batch_size": 7,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
}
message = ranks.run(catch_refusal, 2, wrong, device="cpu")[0]  # CPU: nothing trains
print(textwrap.fill(message, 84))

# %% tags=["hide-input"]
# Checks the product in the message

assert "7 != 2 * 1 * 2" in message


# %% [markdown]
# This error is common when a job moves from 8 to 16 GPUs and its file has all three numbers. If you leave `gradient_accumulation_steps` out, the batch of an optimizer step stays the same.
#
# ## Every stage equals one process
#
# The next two cells train five steps of AdamW at every stage, also with offload, accumulation or bf16, and compare losses and weights with one process.
# One run starts all engines, one after another.

# %%
def layout_for_stage(zero, **more):
    """Two copies with two sequences each, and a stage of ZeRO."""
    return replace(PLAIN, zero=zero, **more)


cases = {
    "stage 0": de.build_config(PLAIN),
    "stage 1": de.build_config(layout_for_stage(1)),
    "stage 2": de.build_config(layout_for_stage(2)),
    "stage 3": de.build_config(layout_for_stage(3)),
    "stage 2, optimizer on the host": de.build_config(
        layout_for_stage(2, offload="optimizer")
    ),
    "stage 3, all states on the host": de.build_config(
        layout_for_stage(3, offload="parameters")
    ),
    "stage 2, accumulation 2": de.build_config(
        layout_for_stage(2, micro_batch=1, microbatches=2)
    ),
    "stage 1, bf16": de.build_config(layout_for_stage(1), precision="bf16"),
}

# %% [markdown]
# In all rows of the table but the last the differences are float32 rounding.

# %% tags=["hide-input", "measured"]
# Trains with all configurations, and tabulates the differences from one process

found = ranks.run(train_cases, 2, cases)[0]
rows = []
for name, (losses, weights, seconds) in found.items():
    gaps = max_difference(losses, LOSSES), max_difference(weights, WEIGHTS)
    # bf16: 2 sqrt(26 products) 2^-8 of logits of 0.5. Weights: a step of AdamW, 1e-3,
    # where rounding decides a sign; five either way, and 2^-8 of 1, in bf16.
    assert gaps[0] < (0.02 if "bf16" in name else NEAR), (name, gaps)
    assert gaps[1] < (0.014 if "bf16" in name else 1e-3), (name, gaps)
    rows.append((name, *map(format_gap, gaps), f"{1e3 * seconds:.0f}"))
show.check_timing(
    found["stage 3"][2] > found["stage 1"][2], "stage 3 is slower than stage 1"
)
head = ["configuration", "losses differ by", "weights differ by", "ms per step"]
show.table(
    rows, head, caption="DeepSpeed on two CPU ranks: differences from one process in float32"
)


# %% [markdown]
# Stages and offload change *where* tensors are kept, not the arithmetic, as in [the course's own ZeRO](zero.md).
# Accumulation gives the same gradients, too: `engine.backward` divides each micro-batch's loss by the number of micro-batches, and `engine.step` does nothing until the last micro-batch.
#
# The bf16 row differs more. Forward and backward have eight bits of precision. The engine keeps float32 *master weights*, updates them in the step, and rounds them to bf16 for the next forward.
# So this difference is rounding as well, in the third digit.
#
# The times are those of the machine that built this page, a CPU. The model is so small that most of a step is DeepSpeed's own overhead.
# On any machine, stage 3 takes longer than stage 1, since it gathers and frees parameters around each layer. A [later section](#when-stage-3-is-worth-its-traffic) says when this matters.
#
# ## Communication buffers: `reduce_bucket_size` and `overlap_comm`
#
# [Memory](memory.md) and [ZeRO](zero.md) predict the model states of each stage.
# From stage 1 on, DeepSpeed also allocates a *bucket*, a buffer that collects gradients until they are sent. Its size does not depend on your model.
# `reduce_bucket_size` is the bucket's number of elements, by default $5\cdot10^8$. So the buffer takes
#
# $$
# \text{bytes} = \texttt{reduce_bucket_size} \times \text{bytes of the type that is reduced} \times (2 \text{ with } \texttt{overlap_comm})
# $$
#
# In stages 1 and 2 overlap is off by default. With overlap there are two buckets: one is filled while the other is sent. Stage 3 has one bucket in either case.
# The next cell counts the peak bytes of one rank, for a model of 0.5 MB.

# %%
def measure_peak(cases):
    """On a rank: the most bytes that training holds, for each configuration."""
    batches, found = [local_batch(step) for step in range(3)], {}
    for name, settings in cases.items():
        with count.track_memory() as held:
            engine = de.initialize(build_model(), settings)
            for batch in batches:
                de.step(engine, [batch])
        found[name] = held.peak_bytes
        del engine
    return found


def bucket_config(numbers, overlap=False, zero=2, precision="fp32"):
    section = {"reduce_bucket_size": numbers, "overlap_comm": overlap}
    return de.build_config(
        layout_for_stage(zero), precision=precision, zero_optimization=section
    )


cases = {
    ("2, left out", 4 * 500_000_000): de.build_config(layout_for_stage(2)),
    ("2, 20 million", 4 * 20_000_000): bucket_config(20_000_000),
    ("2, 20 million, overlap", 2 * 4 * 20_000_000): bucket_config(
        20_000_000, overlap=True
    ),
    ("2, 20 million, bf16", 2 * 20_000_000): bucket_config(
        20_000_000, precision="bf16"
    ),
    ("3, 20 million, overlap", 4 * 20_000_000): bucket_config(20_000_000, True, zero=3),
    ("2, 20,000", 4 * 20_000): bucket_config(20_000),
}
held = ranks.run(measure_peak, 2, cases)[0]

# %% tags=["hide-input"]
# Table: bytes of the buckets, predicted, beside all bytes that a rank holds

rows = []
for (name, predicted), most in held.items():
    # The rest is the model's states and activations: some 3 MB.
    assert 0 <= most - predicted < 5e6, (name, most)
    rows.append(
        (name, *(f"{n / 1e6:,.1f}" for n in (predicted, most, most - predicted)))
    )
head = ["stage, bucket (elements)", "predicted buckets (MB)", "measured, all (MB)"]
show.table(rows, [*head, "the rest: states, activations (MB)"])

# %% [markdown]
# By default the bucket takes 2 GB in float32 and 1 GB in bf16, and twice as much with overlap. This matters little on a GPU of 80 GB with a model of 7 billion parameters. On a small GPU it can cause an out-of-memory error that no formula for states explains.
#
# ## Activation checkpointing: the section alone does nothing
#
# The configuration has a section `activation_checkpointing`. Its name suggests that it switches recomputation on.
#
# ````{admonition} Only if the model calls DeepSpeed's checkpoint: "the section activation_checkpointing saves memory"
# :class: checked
#
# On its own the section changes nothing: it says *how* to recompute, not *which modules*.
# The model's code has to call `deepspeed.checkpointing.checkpoint` around each block, which `de.enable_recompute` does for the course's GPT.
# The table counts the bytes that are saved for backward: without the section, with the section, and with section and call.
# ````

# %%
show.source(de.enable_recompute)


# %% [markdown]
# The next cell counts the bytes, and computes the loss after a step. Recomputation must not change this loss.

# %%
def saved_bytes():
    """On a rank: bytes saved for backward, and the loss after a step, three ways."""
    tokens, targets = (side.to(ranks.device()) for side in local_batch(0))
    found = []
    for section, asked in (("none", False), ("full", False), ("full", True)):
        settings = de.build_config(layout_for_stage(1, recompute=section))
        module = build_model()
        if asked:
            de.enable_recompute(module, config=settings)
        engine = de.initialize(module, settings)
        with count.track_saved_activations(module) as saved:
            value = loss(engine(tokens), targets)
        engine.backward(value)
        engine.step()
        found.append((saved.bytes, loss(engine(tokens), targets).item()))
    return found


results = ranks.run(saved_bytes, 2)[0]

# %% tags=["hide-input"]
# Table: bytes saved for backward, and the loss after a step

names = ["nothing", "the section", "the section, and the call"]
rows = [
    (n, f"{b / 1e3:,.1f}", f"{v:.5f}") for n, (b, v) in zip(names, results, strict=True)
]
(without, after), (section, _), (asked, same) = results
assert section == without and asked < without / 4
assert abs(same - after) < 1e-6  # the same operations, a second time
show.table(rows, ["asked for", "saved for backward (kB)", "loss after one step"])


# %% [markdown]
# With the call, only each block's input and the activations outside the blocks are saved. The loss is the same: recomputation repeats the same arithmetic.
# Hugging Face models have their own method, `model.gradient_checkpointing_enable()`. It uses torch's recomputation, so DeepSpeed's section has no effect.
#
# ## Tensor and pipeline parallelism in DeepSpeed
#
# The engine can shard each matrix, and split the layers into stages.
#
# - **Automatic tensor parallelism**: you give the number of ranks, and patterns for the names of the matrices that are cut by columns or by rows. For well-known models DeepSpeed has the patterns.
# - **[Pipeline](pipeline.md)**: the model becomes a list of layers, a `PipelineModule`, and each stage keeps its part. Then `train_batch` replaces forward, backward and step.
#
# The cell runs both on two ranks, and counts each rank's parameters.

# %%
def train_cut(kind):
    """On a rank: losses, parameters held, the shape of one matrix, the batch."""
    if kind == "tensor":
        engine = de.initialize(
            build_model(), de.build_config(Layout(tp=2, micro_batch=4))
        )
    else:
        settings = de.build_config(Layout(pp=2, microbatches=4))
        engine = de.initialize(de.to_pipeline_module(build_model(), 2), settings)
    losses = []
    for step in range(STEPS):
        tokens, targets = joined_batch(step)  # both ranks work on the same sequences
        parts = engine.gradient_accumulation_steps()
        pairs = zip(tokens.chunk(parts), targets.chunk(parts), strict=True)
        losses.append(de.step(engine, list(pairs)))
    held = sum(p.numel() for p in engine.module.parameters())
    named = engine.module.named_parameters()
    up = next(
        (tuple(p.shape) for name, p in named if name.endswith("ffn.up.weight")), "-"
    )
    return losses, held, up, engine.train_batch_size()


# CPU: stages of a pipeline want a GPU each
cuts = {
    kind: ranks.run(train_cut, 2, kind, device="cpu") for kind in ("tensor", "pipeline")
}

# %% tags=["hide-input"]
# Table: parameters of each rank, and differences of the losses from one process

rows = []
for kind, results in cuts.items():
    for rank, (losses, held, up, _) in enumerate(results):
        gap = max_difference(losses, LOSSES)
        assert gap < NEAR, (kind, gap)
        rows.append((kind, rank, f"{held:,}", str(up), format_gap(gap)))
full = sum(p.numel() for p in build_model().parameters())
head = [
    "cut",
    "rank",
    "parameters held",
    "shape of the first ffn.up",
    "losses differ by",
]
show.table(rows, head, caption=f"Whole model: {full:,} parameters, ffn.up (256, 64)")

# %% [markdown]
# ````{admonition} Only if the model is not tensor parallel: "train_batch_size is the batch that the optimizer sees"
# :class: checked
#
# This is wrong with automatic tensor parallelism. Both runs above have four sequences in each step; the next cell prints the batch that the engine reports.
# With tensor parallelism DeepSpeed 0.19.8 multiplies by *all* ranks, as if each had a copy. With the pipeline the reported batch is right.
# Both runs train correctly. But a learning rate that you scale with `train_batch_size` is wrong, and DeepSpeed refuses a dictionary whose three batch numbers are right. `de.build_config` leaves `train_batch_size` out when `tp`, the number of ranks of tensor parallelism, is above 1.
# ````

# %%
says = {kind: results[0][3] for kind, results in cuts.items()}
print("train_batch_size():", says)

# %% tags=["hide-input"]
# Checks the batch sizes that the engines report

assert says == {"tensor": 8, "pipeline": 4}


# %% [markdown]
# Tensor parallelism leaves embedding, output layer and LayerNorms whole on every rank. The pipeline divides whole layers, which is uneven for such a small model: stage 0 holds the embedding.
#
# ## Checkpoints: regular, universal and plain
#
# A checkpoint has a name, its *tag*. `save_checkpoint` makes a folder of that name, with a model file and an optimizer file for each rank, and `load_checkpoint` reads them on the same number of ranks.
# For another number of ranks, DeepSpeed has universal checkpoints {cite}`lian2024universal`: `to_universal` joins the shards of each weight and of its two moments, and each rank then reads its new shard.
# For inference or another framework, `plain_state_dict` makes a state dict without DeepSpeed.
#
# ![The life of a checkpoint. Two ranks train at stage 3, and each holds a shard of every state, one half. save writes, under a tag, two model files without weights and two optimizer files, each with a shard of the float32 master weights; the file latest names the tag. load reads the shards on two ranks, and training continues bit for bit. plain_state_dict joins the shards into one dictionary of weights, without optimizer, for use without DeepSpeed. to_universal makes a folder of full tensors, from which each of any number of ranks loads its shard.](../figures/deepspeed_engine_checkpoint.svg)
#
# One function trains three steps at stage 3, saves, and trains two more. The other loads the checkpoint into a new engine, and trains the same two steps.

# %%
def four_windows(step):
    """This rank's part of the step's four windows, on one, two or four ranks."""
    size = 4 // dist.get_world_size()
    return text.get_batch(64, size, start=4 * step + size * dist.get_rank())


def save_and_go_on(folder):
    engine = de.initialize(build_model(), de.build_config(layout_for_stage(3)))
    for step in range(3):
        de.step(engine, [four_windows(step)])
    de.save_checkpoint(engine, folder, "step3")
    return [de.step(engine, [four_windows(step)]) for step in (3, 4)]


def resume_training(folder, universal):
    size = dist.get_world_size()
    section = {"checkpoint": {"load_universal": True}} if universal else {}
    torch.manual_seed(7)  # other weights, which the checkpoint replaces
    layout = Layout(dp=size, zero=3, micro_batch=4 // size)
    engine = de.initialize(GPT(SHAPE), de.build_config(layout, **section))
    de.load_checkpoint(engine, folder)
    return [de.step(engine, [four_windows(step)]) for step in (3, 4)]


# %% [markdown]
# Two ranks resume from the regular checkpoint; one, two and four ranks resume from the universal one.

# %%
with tempfile.TemporaryDirectory() as folder:
    # CPU: the same bits each time
    went_on = ranks.run(save_and_go_on, 2, folder, device="cpu")[0]
    files = sorted(Path(folder).rglob("*.pt"))
    sizes = [(file.name, file.stat().st_size) for file in files]
    state = de.plain_state_dict(folder)
    # CPU: the same bits each time
    as_it_is = ranks.run(resume_training, 2, folder, False, device="cpu")[0]
    made = de.to_universal(folder)
    universal = {
        # CPU: the same bits each time
        n: ranks.run(resume_training, n, folder, True, device="cpu")[0]
        for n in (1, 2, 4)
    }

# %% tags=["hide-input"]
# Table: losses of steps 4 and 5, resumed on two, one and four ranks

assert as_it_is == went_on == universal[2]  # the same bits, not merely close
alone = build_model()
alone.load_state_dict(state)
tokens, targets = joined_batch(3)
value = loss(alone(tokens), targets).item()
assert abs(value - LOSSES[3]) < NEAR
rows = []
resumed = {"2, regular": as_it_is} | {
    f"{n}, universal": v for n, v in universal.items()
}
for name, losses in resumed.items():
    gap = max_difference(losses, went_on)
    assert gap < NEAR
    rows.append((name, ", ".join(f"{v:.5f}" for v in losses), format_gap(gap)))
print(f"plain model with the plain state dict, step 4: {value:.5f}")
show.table(
    rows, ["resumed on ranks", "losses of steps 4 and 5", "difference from the run that continued"]
)


# %% [markdown]
# On two ranks training continues with the same bits from both kinds of checkpoint; on one and on four ranks the difference is rounding.
# Without the conversion, DeepSpeed refuses a different number of ranks, as the next cell shows.

# %%
def on_one_rank(folder):
    engine = de.initialize(
        build_model(), de.build_config(Layout(zero=3, micro_batch=4))
    )
    try:
        de.load_checkpoint(engine, folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


with tempfile.TemporaryDirectory() as folder:
    ranks.run(save_and_go_on, 2, folder, device="cpu")  # CPU: the same bits each time
    message = ranks.run(on_one_rank, 1, folder)[0]
print(textwrap.fill(message, 84))

# %% [markdown]
# The regular checkpoint has these files:

# %% tags=["hide-input"]
# Table: the files of the checkpoint, and their sizes

assert "world size of 2 but the current world size is 1" in message
show.table(
    [(name, f"{size / 1e3:,.0f}") for name, size in sizes], ["file", "size (kB)"]
)

# %% [markdown]
# The optimizer files are large: they hold master weights and AdamW's two moments, of which each rank has half.
# At stage 3 the model files hold no weights at all.
# DeepSpeed writes no manifest, and saves directly into the final folder. So a job that is killed while it saves leaves an incomplete folder ([Checkpoints](checkpoint.md)). The file `latest`, which is written last, still names the previous checkpoint.
#
# ## The module: wrappers around DeepSpeed's calls
#
# `build_config` writes the dictionary that the table explains:

# %%
show.source(de.build_config)

# %% [markdown]
# `initialize` wraps DeepSpeed's call, and `step` makes the plain script's three calls:

# %%
show.source(de.initialize, de.step)

# %% [markdown]
# `load_checkpoint` loads a regular checkpoint, or a universal one from `to_universal`:

# %%
show.source(de.load_checkpoint, de.to_universal)

# %% [markdown]
# ## The lab: one Llama in eight configurations
#
# The lab's model, `lab.TINY`, is a Llama of Hugging Face's `transformers` with 3.1 million parameters ([counted below](#operations-predicted-and-counted)). Its weights are random, so nothing is downloaded.
# `python -m shardlab.deepspeed_engine.lab --ranks 2` runs all eight configurations, each ZeRO stage among them; `--precision bf16` runs them with 16-bit weights.
# Each configuration starts from the same weights, generates text, greedily and with a cache, and then trains.
# Times are the slowest rank's: the median of three generations, and the sum of the training steps after the first one.
# This page compares four:
#
# - **one process**: plain torch, without DeepSpeed;
# - **data parallel**: a copy on each rank, the batch divided;
# - **ZeRO-3, offload**: the batch divided, all states sharded and kept in the host's memory;
# - **tensor parallel**: one copy sharded over two ranks, the whole batch on each.
#
# With ZeRO-3 no rank ever holds the whole model. Under `deepspeed.zero.Init` each parameter is sharded as soon as it is made, and the weights are read from the file one tensor at a time:

# %%
show.source(lab._load_sharded_llama)

# %% [markdown]
# The other configurations build the whole model first: the last column of the next table has the peak bytes while building. Two more of its columns:
#
# - **TFLOP/s** counts useful operations: 6 per parameter and token in training, 2 in inference, and those of attention. The formula is compared with torch's own counter below.
# - **FLOP/byte** is the arithmetic intensity: operations per byte that is read from memory or written to it. The count includes weights at each pass, gradients, optimizer states, the cache, and with ZeRO-3 the gathered weights, but no activations. [The roofline](gemm.md#from-bytes-to-seconds-the-roofline) derives the attainable speed from it.

# %% tags=["measured"]
task = lab.Task(batch=4, prompt=32, new=8, seq=64, steps=3)
ways = {way: lab.run(way, 2, task) for way in ("one", "data", "offload", "tensor")}
reports = [ways[way][i] for i in range(2) for way in ways]
# ZeRO-3 gathers, for each token.
slower = ways["offload"][0].tokens_per_second < ways["data"][0].tokens_per_second
show.check_timing(slower, "ZeRO-3 is slower than copies")
print(", ".join(f"{what}: {value}" for what, value in count.describe_machine()))
breakdown.show_table(reports, caption="Two ranks that share one machine")

# %% [markdown]
# FLOP/byte does not depend on the machine. Speed does: here two ranks run on two cores, and with such a small model most of the time is overhead.

# %% tags=["hide-input", "measured"]
# Draws speed and intensity of the four configurations

show.figure(
    breakdown.draw_bars(reports),
    "Tokens per second and FLOP per byte of the four configurations: above for "
    "inference, below for training.",
    "deepspeed_engine_lab",
)

# %% [markdown]
# All four generate the same tokens, and their losses are equal up to rounding.

# %% tags=["hide-input"]
# Table: generated tokens that agree, and differences of losses

rows = []
(tokens, losses) = (report.outcome for report in ways["one"])
for way, (inference, training) in ways.items():
    gap = (training.outcome - losses).abs().max().item()
    same = torch.equal(inference.outcome, tokens)
    # Greedy tokens are integers: equal, as no two logits here are within rounding of
    # each other. Losses: 4 sqrt(256 tokens) 2^-24 of 8, and a turned weight.
    assert same and gap < 5.1e-5, (way, gap)
    agree = f"{tokens.numel()} of {tokens.numel()}"
    rows.append((breakdown.MODES[way], agree, format_gap(gap)))
show.table(rows, ["way", "generated tokens that agree", "losses differ by"])

# %% [markdown]
# Tensor parallelism and ZeRO combine: four ranks hold two copies, each sharded over two ranks, and the optimizer states are sharded over the copies.
# A configuration that runs out of memory does not end the others. Here each rank may hold 60 MB: data parallelism needs a few MB more, ZeRO-3 needs less.

# %%
mixed = lab.run("mixed", 4, task)
small = lab.Task(batch=2, prompt=8, new=2, seq=16, steps=1)
# CPU: its tensors are counted one by one
found, failed = lab.run_each(["data", "zero3"], 2, small, device="cpu", memory=60e6)
print("failed:", failed, "went on:", sorted({report.mode for report in found}))

# %% tags=["hide-input"]
# Compares four ranks with one process, and checks which run the memory limit ended

apart_by = (mixed[1].outcome - losses).abs().max().item()
assert torch.equal(mixed[0].outcome, tokens) and apart_by < 5.1e-5  # as above
assert failed == {"data": "out of memory"} and {r.mode for r in found} == {"zero3"}
print(
    f"tensor × ZeRO-1 on 4 ranks: the same tokens, losses {format_gap(apart_by)} apart"
)

# %% [markdown]
# The tables show two things:
#
# - **Inference** reads all weights for one token of each sequence, so its intensity is low. With a divided batch the intensity is lower still: each copy reads all weights for half the sequences. Tensor parallelism divides the weights instead, and keeps most of the intensity.
# - **ZeRO-3** gathers all parameters again for each generated token, so it suits generation only where nothing else fits. Here ZeRO-3 is the slowest row in training as well: no gather is hidden on a CPU, and each serves only 128 tokens. A later section derives the [number of tokens](#when-stage-3-is-worth-its-traffic) that hides a gather.
#
# ### Operations, predicted and counted
#
# The cell counts a training step, backward included, and a generation with its cache.

# %%
llama = lab.build_llama(attn_implementation="eager")
shape = llama.config
tokens = torch.zeros(task.batch, task.seq, dtype=torch.long)
with FlopCounterMode(display=False) as counter:
    llama(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
with FlopCounterMode(display=False) as forward:
    lab.generate_tokens(llama, tokens[:, : task.prompt], task.new)
flops = {
    "training step": breakdown.training_flops(shape, task.batch, task.seq),
    "generation": breakdown.inference_flops(shape, task.batch, task.prompt, task.new),
}

# %% tags=["hide-input"]
# Table: operations, predicted and counted

rows, angles = [], "LlamaForCausalLM.model.rotary_emb"
for (work, predicted), mode in zip(flops.items(), (counter, forward), strict=True):
    counted = mode.get_total_flops()
    counted -= sum(mode.get_flop_counts().get(angles, {}).values())
    assert counted == predicted  # whole numbers, both
    rows.append((work, f"{predicted:,}", f"{counted:,}", f"{counted - predicted}"))
head = ["", "predicted (FLOP)", "counted by torch (FLOP)", "difference"]
show.table(rows, head, caption=f"TINY: {llama.num_parameters():,} parameters")

# %% [markdown]
# Both the counter and the formula count only matrix products, without the angles of the rotary embedding, which are a product in some versions of transformers.
# Attention is set to `eager`, since on a CPU the counter does not see the products inside a fused kernel.
#
# ## Memory and traffic of each setting, with your numbers
#
# Put in your model and your GPUs. The cell predicts the bytes that each setting takes on a GPU and on the host, and the bytes that each rank sends, per parameter and step, for 16-bit gradients and parameters.

# %%
params, gpus = 7e9, 8
gpu_memory, host_memory = 80e9, 1e12  # bytes: one GPU; the host that all of them share

SETTINGS = [(0, "none"), (1, "none"), (2, "none"), (3, "none"), (3, "parameters")]
states, sent = {}, {}
for zero, offload in SETTINGS:
    held = memory.estimate_states(
        params, Layout(dp=gpus, zero=zero, offload=offload), "bf16"
    )
    states[zero, offload] = held.total, gpus * held.host
    sent[zero, offload] = 2 * (3 if zero == 3 else 2) * (gpus - 1) / gpus

# %% tags=["hide-input"]
# Table: states and traffic of each setting, and whether it fits

rows = []
for (zero, offload), (device, host) in states.items():
    fits = device < 0.7 * gpu_memory and host < host_memory
    name = f"stage {zero}" + (", offload" if offload != "none" else "")
    gb = f"{device / 1e9:.1f}", f"{host / 1e9:.0f}"
    rows.append((name, *gb, f"{sent[zero, offload]:.2f}", "yes" if fits else "no"))
head = ["setting", "states on a GPU (GB)", "on the host (GB)"]
head += ["bytes sent per parameter", "fits"]
show.table(rows, head, caption="70 % of a GPU for states, the rest for activations")

# %% [markdown]
# ### When stage 3 is worth its traffic
#
# If stage 1 or 2 fits, stage 3 is no faster with the same micro-batch: it sends 50 % more, and does more work around each layer. Use it when the states do not fit otherwise, or when the memory that it frees allows a larger micro-batch.
# The extra time of a step with stage 3 depends on the tokens that a GPU computes between two gathers. For $T$ tokens, forward does $2T$ operations per parameter, and gathers 2 bytes per parameter in bf16. Computing hides the gather if $T$ is larger than the GPU's operations per second divided by the link's bytes per second:

# %%
reached = 0.4 * 989e12  # FLOP/s of one H100 in bf16, at 40 % of its peak
for link, speed in {"NVLink, 450 GB/s": 450e9, "400 Gbit/s": 50e9}.items():
    print(link, "hides the gather from", round(reached / speed), "tokens per GPU on")

# %% [markdown]
# Backward gathers once more and sends gradients: twice the bytes for twice the operations, so the same $T$ is enough. Within a node, one sequence of a thousand tokens is enough; over a network, a GPU needs several thousand tokens.
#
# ### When more GPUs cost less
#
# An hour on $N$ GPUs costs $N$ times the price of a GPU hour, so a token costs $N \times \text{price} \div \text{tokens per hour}$.
# Let $N$ GPUs be $e \cdot N$ times as fast as one, where $e$ is the efficiency. Then a token costs $1/e$ times as much as on one GPU. With 8 GPUs at 90 % a token costs 11 % more, for a result in a seventh of the time.
# More GPUs are *cheaper* only where a single GPU is inefficient, because its memory forces tiny batches, recomputation, or offload.
# The lab's table has no prices: two ranks on one machine's cores cost as much as one. Where each rank has a GPU, `--price` adds the column.
#
# | | for | against |
# |---|---|---|
# | DeepSpeed in general | one dictionary for data and tensor parallelism, ZeRO, offload and checkpoints; all equal to one process (measured above) | a default that changes the losses by 0.008 here, buckets of 1 to 4 GB, and misspelt names that are ignored |
# | Stages 1 and 2 | states divided by $N$; traffic as in data parallelism | parameters stay whole on every GPU |
# | Stage 3 | everything divided by $N$ | 50 % more traffic; hiding it takes about 1,000 tokens per GPU within a node, several thousand over a network |
# | Offload | states limited by the host's memory, not the GPU's {cite}`ren2021offload` | states cross the bus between host and device in every step |
# | Tensor parallelism | weights and their reads are divided; intensity nearly kept (lab) | two all-reduces per layer and pass, so only within fast links |
# | Pipeline | sends only activations between stages | a model rewritten as a list of layers; only with stages 0 and 1 |
#
# On a CPU, host and device share one memory, so offload shows no gain. The table of settings above predicts the gain on GPUs.
#
# ## What goes wrong
#
# ### A misspelt name
#
# DeepSpeed checks the names inside its sections, and ignores unknown names at the top level. `de.build_config` accepts only names that DeepSpeed looks up.

# %%
misspelt = {"train_micro_batch_size_per_gpu": 2, "gradient_cliping": 0}
# CPU: nothing trains
print("DeepSpeed:", ranks.run(catch_refusal, 2, misspelt, device="cpu")[0])
try:
    de.check_config(misspelt)
except ValueError as error:
    print("check:", textwrap.fill(str(error), 78))

# %% [markdown]
# With this file clipping stays at 1.0.
# `de.check_config` also refuses configurations with which no engine starts: stage 1 or 2 without an optimizer, no batch size at all, `tp_size` in place of `autotp_size`.
# It does not check the names of optimizers and schedulers. With ZeRO or 16 bits DeepSpeed wraps the optimizer, and torch's schedulers do not accept the wrapper: so DeepSpeed refuses their names, such as `CosineAnnealingLR`. Name a scheduler of DeepSpeed, such as `WarmupCosineLR`, or create torch's in the script and pass it to `initialize` as `lr_scheduler`.
# Call `de.check_config` with `optimizer=True` if you pass `initialize` an optimizer beside the configuration. [Claims, judged](../book/claims.md) has examples from tutorials.
#
# ### `"auto"` from Hugging Face
#
# Many configurations have `"auto"` where a number belongs. Hugging Face replaces this word before DeepSpeed reads the file: `Trainer` of transformers with [the values of its `TrainingArguments`](https://huggingface.co/docs/transformers/deepspeed), accelerate with the arguments of `prepare`.
# Without this replacement DeepSpeed stops at the batch sizes with `'>' not supported between instances of 'str' and 'int'`, and inside `zero_optimization` DeepSpeed silently takes its own default.
# Write the numbers yourself: batch sizes, clipping, `lr` and the optimizer's other parameters. Leave the buckets' sizes out.

# %%
try:
    de.check_config({"train_batch_size": "auto", "zero_optimization": {"stage": 2}})
except ValueError as error:
    print(textwrap.fill(str(error), 84))


# %% [markdown]
# ### Reading a parameter at stage 3
#
# A stage-3 parameter that no layer uses at the moment is empty: its shape is `(0,)`. Code that initialises weights, logs their norm or ties two of them gets an empty tensor, and no error.

# %%
def read_parameter():
    deepspeed, module = de.import_deepspeed(), build_model()
    de.initialize(module, de.build_config(layout_for_stage(3)))
    weight = module.blocks[0].ffn.up.weight
    outside, norm = tuple(weight.shape), weight.norm().item()
    with deepspeed.zero.GatheredParameters(weight):
        return outside, norm, tuple(weight.shape), weight.norm().item()


outside, no_norm, inside, norm = ranks.run(read_parameter, 2)[0]

# %% tags=["hide-input"]
# Table: a parameter's shape and norm, outside and inside

assert outside == (0,) and no_norm == 0 and inside == (256, 64) and norm > 1
show.table(
    [
        ("outside", str(outside), f"{no_norm:.2f}"),
        ("inside", str(inside), f"{norm:.2f}"),
    ],
    ["GatheredParameters", "shape", "norm"],
)


# %% [markdown]
# Every rank has to enter `GatheredParameters`, since gathering is a collective. To *change* a weight inside, name the rank whose change counts: `modifier_rank=0`.
#
# ### `loss.backward()` in place of `engine.backward(loss)`
#
# ````{admonition} False: "with loss.backward() the ranks silently drift apart"
# :class: checked
#
# This is no longer true. In DeepSpeed 0.19.8 (November 2026) stage 0 refuses `loss.backward()`. Stages 1 to 3 reduce the gradients in hooks, also with accumulation, as the next cell measures.
# `engine.backward` works in all stages, and is the documented call.
# ````

# %%
def by_hand(stage):
    engine = de.initialize(
        build_model(),
        de.build_config(layout_for_stage(stage, micro_batch=1, microbatches=2)),
    )
    losses = []
    for step in range(STEPS):
        tokens, targets = (side.to(ranks.device()) for side in local_batch(step))
        for x, y in zip(tokens.chunk(2), targets.chunk(2), strict=True):
            value = loss(engine(x), y)
            try:
                value.backward()
            except RuntimeError as error:
                return str(error).split(" in this")[0]
            engine.step()
            losses.append(value.detach() / 2)
    mean = torch.stack(losses).view(STEPS, 2).sum(1)
    dist.all_reduce(mean)  # [STEPS]
    gap = max_difference((mean / 2).tolist(), LOSSES)
    return gap, measure_drift(engine.module, dist.group.WORLD) if stage < 3 else None


results = [ranks.run(by_hand, 2, stage)[0] for stage in range(4)]

# %% tags=["hide-input"]
# Compares each stage's losses with one process's

for stage, result in enumerate(results):
    if stage == 0:
        assert isinstance(result, str)
        print(f"stage 0: {result}")
    else:
        gap, drifted = result
        assert gap < NEAR and not drifted  # as with engine.backward
        print(f"stage {stage}: losses of one process, to {NEAR}")

# %% [markdown]
# ### Pipeline with stage 2 or 3
#
# A pipeline adds up the gradients of many micro-batches; stages 2 and 3 would reduce-scatter them after each micro-batch. DeepSpeed refuses this when the engine starts, after your model is built. `de.build_config` refuses at once.

# %%
try:
    de.build_config(Layout(pp=2, zero=2))
except ValueError as error:
    print(error)

# %% [markdown]
# ### A machine without a compiler
#
# If the configuration names DeepSpeed's own optimizer, DeepSpeed compiles it when it is first used: with offload `DeepSpeedCPUAdam`, otherwise a fused Adam. Without a compiler the error is
#
# > DeepSpeedCPUAdam requires the cpu_adam op, which failed to build/load.
#
# On a CPU DeepSpeed also compiles an extension when it first joins a process group, unless `de.import_deepspeed` imports it.
# Install `g++` and `ninja` in the image; or pass a torch optimizer, as this page does; or write `"torch_adam": true` beside the optimizer's parameters.
# The optimizers differ in more than speed. The default weight decay is 0.01 in torch's AdamW and 0 in DeepSpeed's: write the number.
#
# ### Signs that a job is set up wrong
#
# - The loss of step 1 differs from one process's on the joined batch: the data are divided wrongly. If losses differ only from step 2 or 3 on, the cause is clipping, weight decay, or precision.
# - Memory does not fall from stage 2 to 3: most of the memory is activations, which ZeRO does not divide.
# - `engine.train_batch_size()` (but see [the exception](#tensor-and-pipeline-parallelism-in-deepspeed)), `engine.zero_optimization_stage()` and `engine.gradient_clipping()` are the settings that the engine uses. Print them in the first line of every job's log.
#
# ## Exercises
#
# ```{exercise-start} Accumulation (easy)
# :label: ex-deepspeed-engine-accumulation
# ```
#
# 64 GPUs train with tensor parallelism 4 and a pipeline of 2 stages. A step takes 512 sequences, a micro-batch 4.
# How many micro-batches does each copy of the model accumulate?

# %%
answer = ...  # micro-batches
check(answer, "deepspeed_accumulation")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-deepspeed-engine-accumulation
# :label: sol-deepspeed-engine-accumulation
# :class: dropdown
# ```
#
# Eight GPUs share a copy, so there are eight copies.

# %%
answer = 512 // (4 * (64 // (4 * 2)))
check(answer, "deepspeed_accumulation")

# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} A million tokens (easy)
# :label: ex-deepspeed-engine-cost
# ```
#
# Eight GPUs at 2.50 per GPU hour train 20,000 tokens per second, together.
# What does a million tokens cost?

# %%
answer = ...  # in the price's currency
check(answer, "deepspeed_cost")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-deepspeed-engine-cost
# :label: sol-deepspeed-engine-cost
# :class: dropdown
# ```
#
# A million tokens take 50 seconds of eight GPUs.

# %%
answer = 8 * 2.50 / 3600 * 1e6 / 20_000
check(answer, "deepspeed_cost")

# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} A configuration with small buckets (medium)
# :label: ex-deepspeed-engine-config
# ```
#
# Write DeepSpeed's dictionary by hand: float32, ZeRO stage 2, micro-batches of one sequence, two of them per step, losses equal to those of one process.
# Communication must overlap with backward. The buckets must take at most one megabyte ($10^6$ bytes), and at least half of that.
# The check gives the dictionary to DeepSpeed on two ranks, with a torch AdamW.

# %%
answer = ...  # {"train_micro_batch_size_per_gpu": …}
check(answer, "deepspeed_config")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-deepspeed-engine-config
# :label: sol-deepspeed-engine-config
# :class: dropdown
# ```
#
# With overlap there are two buckets, with 4 bytes per element: 125,000 elements each. The clipping line is easily forgotten.

# %%
answer = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.0,
    "zero_optimization": {
        "stage": 2,
        "overlap_comm": True,
        "reduce_bucket_size": 125_000,
    },
    "zero_allow_untested_optimizer": True,
}
check(answer, "deepspeed_config")

# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Read this log (medium)
# :label: ex-deepspeed-engine-log
# ```
#
# A job was asked for tensor parallelism over four GPUs, and wrote this log. The shapes are sequences and tokens; an output begins with its input.
#
# ```text
# generate: llama-3-8b, 8.03e9 parameters in bf16, tensor parallel, 4 GPUs
# rank 0: sequences  0 to  7, weights 14.96 GB, input [8, 512], output [8, 576], 16.0 s
# rank 1: sequences  8 to 15, weights 14.96 GB, input [8, 512], output [8, 576], 16.0 s
# rank 2: sequences 16 to 23, weights 14.96 GB, input [8, 512], output [8, 576], 16.0 s
# rank 3: sequences 24 to 31, weights 14.96 GB, input [8, 512], output [8, 576], 16.0 s
# tokens generated: 16384
# tokens per second: 1024.0
# price per million tokens: 0.68
# ```
#
# Assume 2.50 per GPU hour.
# Which parallelism was it, how many tokens did the job generate, and what does a million generated tokens cost?

# %%
answer = ...  # ("data", "tensor", "pipeline" or "zero3", tokens, price)
check(answer, "deepspeed_log")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-deepspeed-engine-log
# :label: sol-deepspeed-engine-log
# :class: dropdown
# ```
#
# $8.03\cdot10^9$ parameters of 2 bytes are 16.06 GB, which is 14.96 GiB: the log means GiB, and every rank holds the whole model. Each rank has sequences of its own. So the job was data parallel.
# The log counts the tokens of the input, $4 \times 8 \times 512$, as generated. Only 64 tokens of each sequence are new.
# The price counts one GPU instead of four, and 512 tokens of a sequence instead of 64, so it is too low by factors of four and eight.

# %%
assert round(8.03e9 * 2 / 2**30, 2) == 14.96
generated = 4 * 8 * (576 - 512)
price = 4 * 2.50 / 3600 * 16.0 / generated * 1e6
answer = "data", generated, price
check(answer, "deepspeed_log")


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} The batch arithmetic (medium)
# :label: ex-deepspeed-engine-arithmetic
# ```
#
# Return the number of micro-batches to accumulate for any job, as an `int`. Raise `ValueError` when no whole number fits.

# %%
def my_accumulation(train_batch, micro_batch, world_size, tp, pp):
    pass  # your code


check(my_accumulation)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-deepspeed-engine-arithmetic
# :label: sol-deepspeed-engine-arithmetic
# :class: dropdown
# ```
#
# There are two divisions, and either may leave a remainder.

# %%
def my_accumulation(train_batch, micro_batch, world_size, tp, pp):
    copies, rest = divmod(world_size, tp * pp)
    if rest:
        raise ValueError(f"world_size={world_size}: not a multiple of {tp * pp}")
    steps, rest = divmod(train_batch, micro_batch * copies)
    if rest or not steps:
        raise ValueError(
            f"train_batch={train_batch}: not a multiple of {micro_batch * copies}"
        )
    return steps


check(my_accumulation)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Choose a stage (design)
# :label: ex-deepspeed-engine-choose
# ```
#
# Return the first setting of `(0, "none")`, `(1, "none")`, `(2, "none")`, `(3, "none")`, `(3, "parameters")` whose states take at most 70 % of a GPU's memory, or `None`.
# All GPUs share the host, whose memory has to hold the offloaded states of all GPUs. `params` is the number of parameters, `gpu` and `host` are bytes. Train in bf16 with AdamW.

# %%
def my_choice(params, gpus, gpu, host):
    # memory.estimate_states(params, Layout(dp=…, zero=…, offload=…)) may help
    pass  # your code


check(my_choice)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-deepspeed-engine-choose
# :label: sol-deepspeed-engine-choose
# :class: dropdown
# ```
#
# The list goes from the least traffic to the most.

# %%
def my_choice(params, gpus, gpu, host):
    least_traffic_first = [(zero, "none") for zero in range(4)] + [(3, "parameters")]
    for zero, offload in least_traffic_first:
        states = memory.estimate_states(
            params, Layout(dp=gpus, zero=zero, offload=offload), "bf16"
        )
        if states.total <= 0.7 * gpu and gpus * states.host <= host:
            return zero, offload
    return None


check(my_choice)

# %% [markdown]
# ```{solution-end}
# ```
#
# ## Summary
#
# - One dictionary chooses among data parallelism, ZeRO, offload and tensor parallelism. Forward, backward and step are calls of the engine.
# - The engine computes what you configured: if you leave out `gradient_clipping`, it is 1.0 since version 0.19.3. With 0.0 every stage equals one process up to rounding.
# - Train batch = micro-batch × accumulation × copies; there are $N/(t\,p)$ copies.
# - Recomputation needs a call in the model's code; a bucket takes $5\cdot10^8$ times the bytes of an element, and twice as much with overlap, unless you make it smaller.
# - A checkpoint loads on the number of ranks that wrote it; in the universal format it loads on any number. A plain state dict needs no DeepSpeed.
# - Stage 3 is for states that do not fit otherwise; with enough tokens per GPU (1,000 within a node, several thousand over a network), computation hides its gathers.
#
# ## Further reading
#
# - {cite:t}`rasley2020deepspeed`: the engine, by its makers.
# - {cite:t}`rajbhandari2020zero`: the stages; section 7 has the traffic in the table above.
# - {cite:t}`ren2021offload`: when the host's memory and processor are worth it.
# - {cite:t}`rajbhandari2021infinity`: offload of all states, to disks as well.
# - {cite:t}`lian2024universal`: universal checkpoints for all kinds of parallelism.
# - {cite:t}`narayanan2021megatron`: the appendix derives the operations per token.
