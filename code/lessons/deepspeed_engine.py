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
# # DeepSpeed: the production engine
#
# After this lesson you can
#
# - write a configuration for DeepSpeed line by line, and say what each line does to your run;
# - show that the engine computes what one process computes, for every ZeRO stage, with offload, accumulation, and a model cut in two;
# - tell which parts you have to ask for, and which you get without asking;
# - compare one process, copies, ZeRO-3 and tensor parallelism in tokens per second and in money.
#
# It takes about an hour to read and half an hour for the exercises. Running it takes under a minute.
# You need [Data parallelism](data_parallel.md) and [ZeRO](zero.md), whose mechanisms the engine contains.
#
# One thing to wonder about before you start.
# We give DeepSpeed a configuration of one line, the batch size, and train for five steps on two ranks.
# The losses should be those of one process, up to rounding, which is the seventh digit.
# They part in the third. Nothing is broken, and nothing warned.

# %% tags=["hide-input"]
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from shardlab import count, memory, ranks, show, text
from shardlab import deepspeed_engine as de
from shardlab.check import check
from shardlab.data_parallel import drift
from shardlab.deepspeed_engine import breakdown, lab
from shardlab.model import GPT, PRESETS, loss

show.style()
SHAPE, STEPS = PRESETS["nano"], 5
de.prepare()  # imports DeepSpeed once, before any rank starts


def model():
    """The same small GPT wherever it is built."""
    torch.manual_seed(0)
    return GPT(SHAPE)


def share(step, rank=None):
    """One rank's two windows of text for a step: tokens, targets: [2, 64]."""
    rank = dist.get_rank() if rank is None else rank
    return text.batch(64, 2, start=(2 * step + rank) * 2)


def joined(step):
    """The windows of both ranks: [4, 64]."""
    return [torch.cat(side) for side in zip(share(step, 0), share(step, 1), strict=True)]


def plain():
    """What one process computes on the joined batch: losses, and weights after all steps."""
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        tokens, targets = joined(step)
        value = loss(module(tokens), targets)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, {name: w.detach() for name, w in module.state_dict().items()}


def apart(found, want):
    """Largest difference of two lists of losses, or of two state dicts."""
    if isinstance(want, dict):
        return max((found[k] - want[k]).abs().max().item() for k in want)
    return max(abs(a - b) for a, b in zip(found, want, strict=True))


def digits(gap):
    return f"{gap:.0e}" if gap else "0"


LOSSES, WEIGHTS = plain()


# %% [markdown]
# All ranks on this page are processes on the CPU, wherever you run it, and two of them: the page says `device="cpu"` each time.
# DeepSpeed is the real one; what it runs on is the only difference to a job on GPUs. So equality and bytes carry over, and times do not.
#
# ## Five steps, and a loss that is off
#
# DeepSpeed's `initialize` takes a model and a dictionary, and gives back an *engine*.
# The engine is called like the model; then it takes over `backward` and `step`.
# Look at how little of the training loop is left, and at the last line that it prints.

# %%
def train(cases):
    """On a rank: a few steps for each configuration; losses, weights, seconds of a step."""
    found = {}
    for name, settings in cases.items():
        engine = de.initialize(model(), settings)
        parts, losses, seconds = engine.gradient_accumulation_steps(), [], []
        for step in range(STEPS):
            tokens, targets = share(step)
            begin = time.perf_counter()
            for x, y in zip(tokens.chunk(parts), targets.chunk(parts), strict=True):
                value = loss(engine(x), y)
                engine.backward(value)
                engine.step()
                losses.append(value.item())
            seconds.append(time.perf_counter() - begin)
        mean = torch.tensor(losses).view(STEPS, parts).mean(1)
        dist.all_reduce(mean)  # [STEPS]
        mean /= dist.get_world_size()
        found[name] = mean.tolist(), de.weights(engine), statistics.median(seconds[1:])
    return found


one_line = {"train_micro_batch_size_per_gpu": 2}
found = ranks.run(train, 2, {"one line": one_line}, device="cpu")[0]
gap = apart(found["one line"][0], LOSSES)
print("one process:", ", ".join(f"{value:.3f}" for value in LOSSES))
print("one line:   ", ", ".join(f"{value:.3f}" for value in found["one line"][0]))
print(f"largest difference: {gap:.3f}")
assert gap > 1e-3  # rounding would be 1e-6

# %% [markdown]
# ## The picture
#
# What does the engine put around your model?
# It owns three moments of a step, and every state that lives longer than a step.
#
# ![Three columns, one per call. engine(tokens): stage 3 gathers each layer's parameters, computes and frees them. engine.backward(loss): divides by the accumulation, averages the gradients over the ranks, or reduce-scatters them. engine.step(): at the last micro-batch clips, steps and makes the new weights known; before that it only counts. Below, where each state lives: parameters, gradients and optimizer states are whole on every rank at stage 0; stage 1 cuts the optimizer, stage 2 the gradients, stage 3 the parameters; offload moves what is cut to the host.](../figures/deepspeed_engine_wraps.svg)
#
# Nothing in it is new to you: averaging is in [Data parallelism](data_parallel.md), and all stages are in [ZeRO](zero.md).
# New is that a dictionary chooses among them {cite}`rasley2020deepspeed`. So what you have to master is the dictionary.
#
# This is how the course starts the engine.
# Look at `prepare`: without it, DeepSpeed compiles a C++ extension when it first joins a process group on a CPU, and needs a compiler for it.

# %%
show.source(de.initialize, de.prepare)

# %% [markdown]
# ## The configuration, line by line
#
# DeepSpeed reads JSON, or a dictionary of the same content.
# You can write it by hand. The course builds it from a dozen arguments, and holds it against DeepSpeed's own schema before anything starts.

# %%
settings = de.config(
    micro_batch=2, world_size=2, zero=3, offload="parameters", clipping=1.0
)
for name, value in settings.items():
    print(f"{name}: {json.dumps(value)}")

# %% [markdown]
# | line | what it does | when you leave it out |
# |---|---|---|
# | `train_micro_batch_size_per_gpu` | sequences that one copy of the model computes at a time: sets the activations' memory | worked out from the other two |
# | `gradient_accumulation_steps` | micro-batches per optimizer step | worked out, or 1 |
# | `train_batch_size` | sequences per optimizer step, over all copies: what the optimizer sees | worked out |
# | `gradient_clipping` | largest norm of all gradients together | **1.0**: your gradients are clipped |
# | `zero_optimization.stage` | 0: copies; 1, 2, 3: cut optimizer, gradients, parameters | 0 |
# | `offload_optimizer`, `offload_param` | put the cut states into the host's memory | they stay on the device |
# | `zero_force_ds_cpu_optimizer` | insist on DeepSpeed's compiled CPU Adam when the optimizer is offloaded | true: torch's own AdamW is refused |
# | `zero_allow_untested_optimizer` | accept an optimizer that is not DeepSpeed's own | false: it may be refused |
# | `steps_per_print` | how often to log progress: here never | not at all |
#
# The fourth line is the answer to the question at the top.
#
# ````{admonition} Checked: "without a clipping line there is no clipping"
# :class: checked
#
# There is, at 1.0. The next cell trains with the line left out, with 1.0, and with 0.0.
# The first two are the same run. Only the third is the run of one process.
# ````

# %%
unsaid = de.config(2, 2)
del unsaid["gradient_clipping"]
cases = {"left out": unsaid, "1.0": de.config(2, 2, clipping=1.0), "0.0": de.config(2, 2)}
clipped = ranks.run(train, 2, cases, device="cpu")[0]
rows = []
for name, (losses, weights, _) in clipped.items():
    rows.append((name, f"{losses[-1]:.4f}", digits(apart(losses, LOSSES))))
assert clipped["left out"][0] == clipped["1.0"][0]
assert apart(clipped["left out"][0], LOSSES) > 1e-3
assert apart(clipped["0.0"][0], LOSSES) < 1e-5  # float32, losses near 5
show.table(rows, ["gradient_clipping", "last loss", "largest difference from one process"])


# %% [markdown]
# Clipping is a sensible thing to do. Doing it unasked makes a comparison of two frameworks wrong, and looks like a bug in one of them.
# With AdamW it takes a few steps to show, because AdamW divides a factor out again; only its memory of earlier gradients tells.
#
# ## The batch arithmetic
#
# Three numbers describe one thing, and have to multiply:
#
# $$
# \text{train batch} = \text{micro-batch} \times \text{accumulation} \times \text{copies}, \qquad
# \text{copies} = \frac{N}{t\,p}
# $$
#
# $N$ is the number of ranks, and $t$ and $p$ are the degrees of tensor and pipeline parallelism.
# Ranks that share one copy of the model compute the same sequences, and so count once. (DeepSpeed's own count has an exception, [below](#a-model-cut-in-two).)
#
# ![Two ranks, each with two micro-batches of two sequences, one after the other. Micro-batch two, times accumulation two, times two copies: a train batch of eight sequences, and one optimizer step.](../figures/deepspeed_engine_batch.svg)
#
# Give two of the three, and DeepSpeed works the third out. Give all three, and they must fit.
# The next cell gives three that do not. Look at which product the message writes out.

# %%
def refused(settings):
    """What DeepSpeed itself says to a configuration."""
    deepspeed = de.prepare()
    try:
        deepspeed.initialize(model=model(), config=settings)
    except AssertionError as error:
        return str(error)
    return "accepted"


wrong = {
    "train_batch_size": 7,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
}
message = ranks.run(refused, 2, wrong, device="cpu")[0]
print(message)
assert "7 != 2 * 1 * 2" in message

# %% [markdown]
# The usual way to get there: the job moves from 8 GPUs to 16, and the file still has all three numbers.
# Leave `gradient_accumulation_steps` out, and the batch that the optimizer sees stays as it was.
#
# ## Equal
#
# Now every stage, and what can be combined with it, against one process: five steps of AdamW, losses and weights.
# One run does them all, one engine after the other. Look at which row is *not* near rounding.

# %% tags=["measured"]
cases = {
    "stage 0": de.config(2, 2),
    "stage 1": de.config(2, 2, zero=1),
    "stage 2": de.config(2, 2, zero=2),
    "stage 3": de.config(2, 2, zero=3),
    "stage 2, optimizer on the host": de.config(2, 2, zero=2, offload="optimizer"),
    "stage 3, all states on the host": de.config(2, 2, zero=3, offload="parameters"),
    "stage 2, accumulation 2": de.config(1, 2, zero=2, accumulation=2),
    "stage 1, bf16": de.config(2, 2, zero=1, precision="bf16"),
}
found = ranks.run(train, 2, cases, device="cpu")[0]
rows = []
for name, (losses, weights, seconds) in found.items():
    gaps = apart(losses, LOSSES), apart(weights, WEIGHTS)
    # float32 rounds at 6e-8: losses are near 5, and AdamW moves a weight by up to its
    # learning rate of 1e-3 where rounding decides a sign. bf16 keeps 8 bits, and
    # rounds at 4e-3.
    assert gaps[0] < (0.02 if "bf16" in name else 1e-5), (name, gaps)
    assert gaps[1] < (0.02 if "bf16" in name else 1e-3), (name, gaps)
    rows.append((name, *map(digits, gaps), f"{1e3 * seconds:.0f}"))
assert found["stage 3"][2] > found["stage 1"][2]
head = ["configuration", "losses differ by", "weights differ by", "ms per step"]
show.table(rows, head, caption="DeepSpeed on two CPU ranks, from one process in float32")


# %% [markdown]
# Stages and offload change *where* numbers live, and leave the arithmetic alone.
# Accumulation does too: `engine.backward` divides each micro-batch's loss by their number, and `engine.step` does nothing until the last.
#
# bf16 is another arithmetic. Forward and backward have eight bits of precision, while the engine keeps float32 *master weights*, takes the step on them, and rounds them to bf16 for the next forward.
# Its difference is rounding as well, of numbers that are rounded at the third digit.
#
# The times are those of the machine that built this page, a CPU, with a model so small that DeepSpeed's own bookkeeping is most of them.
# They do show one thing that holds elsewhere: stage 3, which gathers and frees around each layer, takes longer than stage 1, which does not.
#
# ## What it costs: memory that nobody mentions
#
# The states of stage $z$ are predicted in [Memory](memory.md) and [ZeRO](zero.md).
# DeepSpeed takes something on top, which does not depend on your model: its communication buffers.
# By default a bucket for gradients has room for $5\cdot10^8$ numbers.
# The next cell counts the bytes that one rank holds at most, for our model of 0.5 MB.

# %%
def peak(cases):
    """On a rank: the most bytes that training holds, for each configuration."""
    batches, found = [share(step) for step in range(3)], {}
    for name, settings in cases.items():
        with count.held() as held:
            engine = de.initialize(model(), settings)
            for batch in batches:
                de.step(engine, [batch])
        found[name] = held.peak
        del engine
    return found


small = {"reduce_bucket_size": 20_000, "allgather_bucket_size": 20_000}
cases = {
    "left out": de.config(2, 2, zero=2),
    "20,000": de.config(2, 2, zero=2, zero_optimization=small),
}
held = ranks.run(peak, 2, cases, device="cpu")[0]
rows = [(name, f"{size / 1e6:,.1f}") for name, size in held.items()]
# The bucket's 5e8 float32; the rest is the model's states and activations.
assert 0 <= held["left out"] - 4 * 5e8 < 0.01e9
assert held["20,000"] < 0.01e9
show.table(rows, ["reduce_bucket_size (numbers)", "most bytes held by a rank (MB)"])

# %% [markdown]
# Two gigabytes, whatever the model. On a GPU of 80 GB and with a model of 7 billion parameters that is a detail. On a small GPU it is the out-of-memory error that no formula explains.
#
# ## Activation checkpointing has to be asked for
#
# The configuration has a section `activation_checkpointing`. It is easy to believe that it switches recomputation on.
#
# ````{admonition} Checked: "the section activation_checkpointing saves memory"
# :class: checked
#
# On its own it changes nothing: it says *how* to recompute, not *what*.
# The model's code has to call `deepspeed.checkpointing.checkpoint` around each block, which `de.recompute` does for the course's GPT.
# The second cell counts the bytes that are saved for backward: without the section, with it, and with the call.
# ````

# %%
show.source(de.recompute)


# %% [markdown]
# And this is the count, together with the loss after a step, which recomputation must not change.

# %%
def saved_bytes():
    """On a rank: bytes saved for backward, and the loss after a step, three ways."""
    tokens, targets = share(0)
    found = []
    for section, asked in ((False, False), (True, False), (True, True)):
        settings = de.config(2, 2, zero=1, recompute=section)
        module = model()
        if asked:
            de.recompute(module, config=settings)
        engine = de.initialize(module, settings)
        with count.saved(module) as saved:
            value = loss(engine(tokens), targets)
        engine.backward(value)
        engine.step()
        found.append((saved.bytes, loss(engine(tokens), targets).item()))
    return found


results = ranks.run(saved_bytes, 2, device="cpu")[0]
names = ["nothing", "the section", "the section, and the call"]
rows = [(n, f"{b / 1e3:,.1f}", f"{v:.5f}") for n, (b, v) in zip(names, results, strict=True)]
(without, after), (section, _), (asked, same) = results
assert section == without and asked < without / 4
assert abs(same - after) < 1e-6  # the same operations, a second time
show.table(rows, ["asked for", "saved for backward (kB)", "loss after one step"])


# %% [markdown]
# What is left is each block's input, and what lies outside the blocks. The loss is the same: recomputing repeats the same arithmetic.
# Hugging Face models have a switch of their own, `model.gradient_checkpointing_enable()`, which calls torch's; with that, DeepSpeed's section does nothing either.
#
# ## A model cut in two
#
# Both kinds of cut are in the engine: inside each matrix, and between layers.
#
# **Automatic tensor parallelism.** You name a degree, and which matrices are cut by columns and which by rows, as patterns over their names. For well-known models DeepSpeed knows the patterns.
# **[Pipeline](pipeline.md).** The model becomes a list of layers, a `PipelineModule`, and each stage keeps its part. Here `train_batch` replaces forward, backward and step.
#
# The cell runs both on two ranks, and looks at what each rank holds.

# %%
def cut(kind):
    """On a rank: losses, parameters held, and the shape of one matrix, with the model cut."""
    if kind == "tensor":
        engine = de.initialize(model(), de.config(4, 2, tp=2))
    else:
        settings = de.config(1, 2, pp=2, accumulation=4)
        engine = de.initialize(de.pipeline(model(), 2), settings)
    losses = []
    for step in range(STEPS):
        tokens, targets = joined(step)  # both ranks work on the same sequences
        parts = engine.gradient_accumulation_steps()
        pairs = zip(tokens.chunk(parts), targets.chunk(parts), strict=True)
        losses.append(de.step(engine, list(pairs)))
    held = sum(p.numel() for p in engine.module.parameters())
    named = engine.module.named_parameters()
    up = next((tuple(p.shape) for name, p in named if name.endswith("ffn.up.weight")), "-")
    return losses, held, up, engine.train_batch_size()


rows, says = [], {}
for kind in ("tensor", "pipeline"):
    results = ranks.run(cut, 2, kind, device="cpu")
    says[kind] = results[0][3]
    for rank, (losses, held, up, _) in enumerate(results):
        gap = apart(losses, LOSSES)
        assert gap < 1e-5, (kind, gap)  # float32: sums in another order
        rows.append((kind, rank, f"{held:,}", str(up), digits(gap)))
whole = sum(p.numel() for p in model().parameters())
head = ["cut", "rank", "parameters held", "shape of the first ffn.up", "losses differ by"]
show.table(rows, head, caption=f"Whole model: {whole:,} parameters, ffn.up (256, 64)")

# %% [markdown]
# ````{admonition} Checked: "train_batch_size is the batch that the optimizer sees"
# :class: checked
#
# Not with automatic tensor parallelism. Both runs above put four sequences into each step; the next line prints what the engine says of it.
# DeepSpeed 0.19 multiplies by *all* ranks there, since nobody tells it that they share a copy. In the pipeline it counts right.
# The training is right in both. But a learning rate that you scale with `train_batch_size` is not, and a dictionary that gives all three numbers has to be wrong to be accepted. The builder leaves `train_batch_size` out when `tp` is above 1.
# ````

# %%
assert says == {"tensor": 8, "pipeline": 4}
print("train_batch_size():", ", ".join(f"{kind} {n}" for kind, n in says.items()))


# %% [markdown]
# Tensor parallelism leaves embedding, head and norms whole on every rank. The pipeline gives whole layers away, and not evenly for so small a model: stage 0 holds the embedding.
# Neither makes copies: both ranks are *one* copy in the batch arithmetic.
#
# ## Checkpoint, and a plain state dict
#
# `save` writes one file per rank and part, in a folder with the tag's name. They fit as many ranks as wrote them.
# For everything else, inference, another framework, another number of ranks, you want a plain state dict.
#
# ![The life of a checkpoint: two ranks train at stage 3 and each holds half of every state. save writes two model files and two optimizer files under a tag, and the file latest names the tag. load on two ranks reads them back, and training goes on. plain_state_dict joins the parts into one dictionary of float32 weights, which loads into the plain model, on one process without DeepSpeed.](../figures/deepspeed_engine_checkpoint.svg)
#
# The cell trains three steps at stage 3, saves, trains two more; then a fresh engine loads, and trains the same two.
# Look at the two lists of losses, and at the files' sizes.

# %%
def stop_and_go(folder):
    settings = de.config(2, 2, zero=3)
    engine = de.initialize(model(), settings)
    for step in range(3):
        de.step(engine, [share(step)])
    de.save(engine, folder, "step3")
    went_on = [de.step(engine, [share(step)]) for step in (3, 4)]
    torch.manual_seed(7)  # other weights, which the checkpoint replaces
    other = de.initialize(GPT(SHAPE), settings)
    de.load(other, folder)
    return went_on, [de.step(other, [share(step)]) for step in (3, 4)]


with tempfile.TemporaryDirectory() as folder:
    went_on, resumed = ranks.run(stop_and_go, 2, folder, device="cpu")[0]
    files = sorted(Path(folder).rglob("*.pt"))
    sizes = [(f.name, f"{f.stat().st_size / 1e3:,.0f}") for f in files]
    state = de.plain_state_dict(folder)
assert resumed == went_on  # the same bits, not merely close
alone = model()
alone.load_state_dict(state)
tokens, targets = joined(3)
value = loss(alone(tokens), targets).item()
assert abs(value - LOSSES[3]) < 1e-5
print("went on:", ", ".join(f"{v:.5f}" for v in went_on))
print("resumed:", ", ".join(f"{v:.5f}" for v in resumed))
print(f"plain model with the plain state dict, step 4: {value:.5f}")
show.table(sizes, ["file", "size (kB)"])

# %% [markdown]
# The optimizer files are the large ones: they hold master weights and AdamW's two moments, of which each rank has half.
# At stage 3 the model files hold no weights at all. Who copies only those has copied nothing.
#
# ## The lab: one Llama, four ways
#
# So far the model was ours. Now it is a Llama of Hugging Face's `transformers`, built from a configuration with random weights, so that nothing is downloaded: `lab.TINY`, with 3.1 million parameters ([counted below](#operations-predicted-and-counted)).
# `model="…"` takes a name on the hub instead.
# On a machine with a GPU for each rank, `python -m shardlab.deepspeed_engine.lab --ranks 2` runs the same lab on GPUs; here it runs on the CPU.
#
# Each way first generates, greedily and with a cache, and then trains the same weights.
# Times are the slowest rank's: the median of three generations, and the sum of the training steps after the first.
#
# - **one process**: plain torch, without DeepSpeed;
# - **data parallel**: a copy on each rank, the batch divided;
# - **ZeRO-3, offload**: the batch divided, and all states cut and kept in the host's memory;
# - **tensor parallel**: one copy cut in two, the whole batch on both.

# %%
show.source(lab.generate)

# %% [markdown]
# The cell runs all four. `price` is what a GPU costs in an hour; here it is an assumption, 2.50, and each rank is charged as one GPU. Put your own.

# %% tags=["measured"]
PRICE = 2.50  # per GPU hour
task = lab.Task(batch=4, prompt=32, new=8, seq=64, steps=3)
ways = {way: lab.run(way, 2, task, PRICE, device="cpu") for way in breakdown.WAYS}
reports = [ways[way][i] for i in range(2) for way in ways]
assert ways["zero3"][0].rate < ways["data"][0].rate  # it gathers, for each token
print(", ".join(f"{what}: {value}" for what, value in count.machine()))
breakdown.table(reports, caption="Two CPU ranks, each charged as one GPU")

# %% [markdown]
# The same as a picture. Look at the middle column first: intensity does not depend on the machine, the other two do.

# %% tags=["measured"]
show.figure(
    breakdown.picture(reports),
    "Bars for the four ways: tokens per second, FLOP per byte, and cost per million tokens; above "
    "for inference, below for training.",
    "deepspeed_engine_lab",
)

# %% [markdown]
# First, equality: four ways, one result.

# %%
rows = []
(tokens, losses) = (report.outcome for report in ways["one"])
for way, (inference, training) in ways.items():
    gap = (training.outcome - losses).abs().max().item()
    same = torch.equal(inference.outcome, tokens)
    # Greedy tokens are integers: equal, as no two logits here are within rounding of
    # each other. Losses: float32, near 8.
    assert same and gap < 1e-5, (way, gap)
    rows.append((breakdown.WAYS[way], f"{tokens.numel()} of {tokens.numel()}", digits(gap)))
show.table(rows, ["way", "generated tokens that agree", "losses differ by"])

# %% [markdown]
# Now read the table by its columns.
#
# - **TFLOP/s** counts useful operations: 6 per parameter and token in training, 2 in inference, and the attention. The formula is held against torch's own counter below.
# - **FLOP/byte** is the arithmetic intensity: operations per byte that has to come from memory or go there. Counted are weights at each pass, gradients, optimizer states, the cache, and at ZeRO-3 the gathered copies; activations are not. See [Memory](memory.md) for what a roofline makes of it.
# - **Inference** reads all weights for one token of each sequence, so its intensity is low, and lower still where the batch was divided: each copy reads all weights, for half the sequences. Tensor parallelism divides the weights instead, and keeps most of it.
# - **ZeRO-3** gathers all parameters again for each generated token. That is why it is a last resort for generation, and a good choice for training.
# - **Cost** charges every rank. Two ranks have to be twice as fast as one to cost the same: read in the table how close each way comes.
#
# ### Operations, predicted and counted
#
# Twice: a training step, with its backward pass, and a generation with its cache.

# %%
llama = lab.llama(attn_implementation="eager")
shape = llama.config
tokens = torch.zeros(task.batch, task.seq, dtype=torch.long)
with FlopCounterMode(display=False) as counter:
    llama(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
with FlopCounterMode(display=False) as forward:
    lab.generate(llama, tokens[:, : task.prompt], task.new)
rows = []
for work, counted, predicted in (
    (
        "training step",
        counter.get_total_flops(),
        breakdown.training_flops(shape, task.batch, task.seq),
    ),
    (
        "generation",
        forward.get_total_flops(),
        breakdown.inference_flops(shape, task.batch, task.prompt, task.new),
    ),
):
    assert counted == predicted  # whole numbers, both
    rows.append((work, f"{predicted:,}", f"{counted:,}", f"{counted - predicted}"))
head = ["", "predicted (FLOP)", "counted by torch (FLOP)", "difference"]
show.table(rows, head, caption=f"TINY: {llama.num_parameters():,} parameters")

# %% [markdown]
# The counter sees matrix products alone, and so does the formula.
# Attention is set to `eager` for it: the fused kernel hides its products from the counter on a CPU.
#
# ## What each costs and buys, with your numbers
#
# Put in your model, your GPUs and your price. The cell predicts what each setting holds on a GPU and on the host, what it sends, and what a million trained tokens cost if the GPUs reach the share of their peak that you expect.
# Traffic is in bytes sent per parameter and step by each rank, for 16-bit gradients and parameters.

# %%
params, gpus = 7e9, 8
gpu_memory, host_memory = 80e9, 1e12  # bytes: one GPU; the host that all of them share
price, peak_flops, reached = 2.50, 989e12, 0.4  # per GPU hour; FLOP/s; share of it

rows = []
for zero, offload in [(0, "none"), (1, "none"), (2, "none"), (3, "none"), (3, "parameters")]:
    states = memory.states(params, "bf16", zero=zero, dp=gpus, offload=offload)
    sent = 2 * (3 if zero == 3 else 2) * (gpus - 1) / gpus
    fits = states.total < 0.7 * gpu_memory and gpus * states.host < host_memory
    name = f"stage {zero}" + (", offload" if offload != "none" else "")
    gb = f"{states.total / 1e9:.1f}", f"{gpus * states.host / 1e9:.0f}"
    rows.append((name, *gb, f"{sent:.2f}", "yes" if fits else "no"))
seconds = 6 * params / (peak_flops * reached)  # of one GPU, per token
cost = price * seconds * 1e6 / 3600
head = ["setting", "states on a GPU (GB)", "on the host (GB)"]
head += ["bytes sent per parameter", "fits"]
print(f"{cost:.3f} per million tokens at {reached:.0%} of the peak, 6 FLOP per parameter")
show.table(rows, head, caption="70 % of a GPU for states, the rest for activations")

# %% [markdown]
# | | for | against |
# |---|---|---|
# | DeepSpeed as such | one dictionary for copies, ZeRO, offload, cuts and checkpoints; all equal to one process (measured above) | a default that changes your losses by 0.008 here, 2 GB of buffers, and names that are ignored when misspelt |
# | Stages 1 and 2 | states divided by $N$; traffic as with plain copies | parameters stay whole on every GPU |
# | Stage 3 | everything divided by $N$ | half as much traffic again, and work around each layer in every pass |
# | Offload | states limited by the host's memory, not the GPU's {cite}`ren2021offload` | they cross the bus between host and device in every step |
# | Tensor parallelism | weights, and the reading of them, divided; intensity nearly kept (lab) | two all-reduces per layer and pass, so only within fast links |
# | Pipeline | sends only activations between stages | a model rewritten as a list of layers; only with stages 0 and 1 |
#
# On this page, host and device are one memory, so offload cannot show its gain. The prediction for a GPU is in the fourth column; [ZeRO](zero.md) measures stages to the byte.
#
# ## What goes wrong
#
# ### A misspelt name
#
# DeepSpeed checks its sections, and passes over what it does not know at the top level. The builder asks DeepSpeed which names it ever looks up.

# %%
print("DeepSpeed:", ranks.run(refused, 2, one_line | {"gradient_cliping": 0}, device="cpu")[0])
try:
    de.check(one_line | {"gradient_cliping": 0})
    raise AssertionError("this was meant to be refused")
except ValueError as error:
    print("check:    ", error)


# %% [markdown]
# You meant to switch clipping off, and trained with 1.0.
#
# ### Reading a parameter at stage 3
#
# Between its uses, a parameter of stage 3 is not there. Its shape is `(0,)`, and code that looks at weights, to initialise, to log a norm, to tie two, sees nothing, without an error.

# %%
def look():
    deepspeed, module = de.prepare(), model()
    de.initialize(module, de.config(2, 2, zero=3))
    weight = module.blocks[0].ffn.up.weight
    outside, norm = tuple(weight.shape), weight.norm().item()
    with deepspeed.zero.GatheredParameters(weight):
        return outside, norm, tuple(weight.shape), weight.norm().item()


outside, no_norm, inside, norm = ranks.run(look, 2, device="cpu")[0]
assert outside == (0,) and no_norm == 0 and inside == (256, 64) and norm > 1
show.table(
    [("outside", str(outside), f"{no_norm:.2f}"), ("inside", str(inside), f"{norm:.2f}")],
    ["GatheredParameters", "shape", "norm"],
)


# %% [markdown]
# Every rank has to enter `GatheredParameters`, since gathering is a collective. To *change* a weight inside, name the rank whose change counts: `modifier_rank=0`.
#
# ### `loss.backward()` in place of `engine.backward(loss)`
#
# ````{admonition} Checked: "with loss.backward() the ranks silently drift apart"
# :class: checked
#
# Not any more. In DeepSpeed 0.19 stage 0 refuses, and stages 1 to 3 hang their work on the gradients themselves, accumulation included.
# This is what version 0.19 does, measured below. `engine.backward` is the call that all stages take, and the one in the documentation.
# ````

# %%
def by_hand(stage):
    engine = de.initialize(model(), de.config(1, 2, zero=stage, accumulation=2))
    losses = []
    for step in range(STEPS):
        tokens, targets = share(step)
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
    gap = apart((mean / 2).tolist(), LOSSES)
    return gap, drift(engine.module, dist.group.WORLD) if stage < 3 else None


for stage in range(4):
    result = ranks.run(by_hand, 2, stage, device="cpu")[0]
    if stage == 0:
        assert isinstance(result, str)
        print(f"stage 0: {result}")
    else:
        gap, drifted = result
        assert gap < 1e-5 and not drifted  # as with engine.backward
        print(f"stage {stage}: losses of one process, to {1e-5}")

# %% [markdown]
# ### Pipeline with stage 2 or 3
#
# A pipeline adds up the gradients of many micro-batches; stages 2 and 3 would scatter them after each one. DeepSpeed says so once the engine starts, after your model is built. The builder says so at once.

# %%
try:
    de.config(1, 2, pp=2, zero=2)
    raise AssertionError("this was meant to be refused")
except ValueError as error:
    print(error)

# %% [markdown]
# ### No compiler
#
# Name DeepSpeed's own optimizer in the configuration, and it compiles C++ the first time: with offload `DeepSpeedCPUAdam`, otherwise a fused Adam. Without a compiler you read
#
# > DeepSpeedCPUAdam requires the cpu_adam op, which failed to build/load.
#
# Three ways out: install `g++` and `ninja` in the image; pass a torch optimizer, as this page does; or write `"torch_adam": true` beside the optimizer's parameters.
# They differ in more than speed. torch's AdamW decays weights by 0.01 unless told otherwise, DeepSpeed's by 0: say the number.
#
# ### How one sees that a job is set up wrong
#
# - The loss of step 1 is not that of one process on the joined batch: the data are divided wrongly. It differs from step 2 or 3 on: clipping, weight decay, or precision.
# - Memory does not fall from stage 2 to 3: most of it is activations, which ZeRO does not touch.
# - `engine.train_batch_size()` (but see its box), `engine.zero_optimization_stage()` and `engine.gradient_clipping()` are what the engine believes. Print them in the first line of every job's log.
#
# ```{admonition} On more GPUs
# :class: note
#
# Equality and bytes carry over from here; DeepSpeed's times do not, for its ranks talk through gloo.
# A second GPU would bring nccl and `overlap_comm`: how much of stage 3 hides behind compute,
# and offload with a host connection for each GPU. The lab's table of tokens per second and cost is the one to fill in again.
# ```
#
# ## Exercises
#
# Each exercise has a check; the third runs DeepSpeed on two real ranks.
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
# ```{exercise-start} A configuration (medium)
# :label: ex-deepspeed-engine-config
# ```
#
# Write the dictionary by hand, in DeepSpeed's words: float32, ZeRO stage 2, micro-batches of one sequence, two of them per step, and losses equal to those of one process.
# The check gives it to DeepSpeed on two ranks, with a torch AdamW.

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
# The line that one forgets is the clipping.

# %%
answer = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
}
check(answer, "deepspeed_config")


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} The batch arithmetic (medium)
# :label: ex-deepspeed-engine-arithmetic
# ```
#
# Return the accumulation for any job, as an `int`. Raise `ValueError` when no whole number fits.

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
# Two divisions, and both may leave a rest.

# %%
def my_accumulation(train_batch, micro_batch, world_size, tp, pp):
    copies, rest = divmod(world_size, tp * pp)
    if rest:
        raise ValueError(f"world_size={world_size}: not a multiple of {tp * pp}")
    steps, rest = divmod(train_batch, micro_batch * copies)
    if rest or not steps:
        raise ValueError(f"train_batch={train_batch}: not a multiple of {micro_batch * copies}")
    return steps


check(my_accumulation)


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Choose (design)
# :label: ex-deepspeed-engine-choose
# ```
#
# Write the rule by which you would configure a job: the first of `(0, "none")`, `(1, "none")`, `(2, "none")`, `(3, "none")`, `(3, "parameters")` whose states take at most 70 % of a GPU, or `None`.
# All GPUs share the host, and what is offloaded from all of them has to fit in it. `params` is the number of parameters, `gpu` and `host` are bytes. Train in bf16 with AdamW.

# %%
def my_choice(params, gpus, gpu, host):
    pass  # your code; memory.states(params, "bf16", zero=…, dp=…, offload=…) may help


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
    for zero, offload in [(0, "none"), (1, "none"), (2, "none"), (3, "none"), (3, "parameters")]:
        states = memory.states(params, "bf16", zero=zero, dp=gpus, offload=offload)
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
# - One dictionary chooses among copies, ZeRO, offload and cuts. The engine takes over forward, backward and step.
# - It computes what you configured: left out, `gradient_clipping` is 1.0. With 0.0 every stage equals one process to rounding.
# - Train batch = micro-batch × accumulation × copies, and copies are $N/(tp)$.
# - Recomputation has to be asked for in the model's code; buckets take 2 GB unless you make them smaller.
# - A checkpoint fits as many ranks as wrote it; a plain state dict fits everything.
# - Compare ways by tokens per second, FLOP per byte and cost together: more ranks are not cheaper by themselves.
#
# ## Further reading
#
# - {cite:t}`rasley2020deepspeed`: the engine, by its makers.
# - {cite:t}`rajbhandari2020zero`: what the stages are; section 7 has the traffic in the table above.
# - {cite:t}`ren2021offload`: when the host's memory and processor are worth it.
# - {cite:t}`rajbhandari2021infinity`: offload to the end, disks included.
# - {cite:t}`narayanan2021megatron`: the appendix derives the operations per token.
