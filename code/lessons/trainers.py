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
# # Trainers: Lightning, accelerate, and DeepSpeed's fp16
#
# After this lesson you can
#
# - train with PyTorch Lightning on one GPU or on two nodes, with validation, checkpoints, and a Slurm job that resumes after its time limit;
# - name what a trainer changes without being asked, and check what your trainer changed;
# - train a sharded model in `float16`, with the same loss scale on all ranks;
# - read the fp16 section of DeepSpeed's configuration.
#
# Two ranks of one node train with Lightning and FSDP2.
# With Lightning's default mesh both read the same windows of text and compute the same, without a warning: you pay for two GPUs, and train as with one.
#
# ## Lightning

# %% tags=["hide-input"]
# Imports

import logging
import math
import warnings

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from shardcourse.exercises import check
from shardlab import deepspeed_engine as de
from shardlab import ranks
from shardlab.common import show, text
from shardlab.gpt.model import GPT, PRESETS, loss
from shardlab.trainers.scaler import LossScaler

with warnings.catch_warnings():  # in a notebook, of missing widgets
    warnings.simplefilter("ignore")
    import pytorch_lightning as L

    from shardlab.trainers import existing_ranks
    from shardlab.trainers import core as lightning

show.set_style()
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)

# %% [markdown]
# Lightning's `Trainer` implements the loop, the sampler, DDP or FSDP2, clipping and checkpoints. You write a model, its losses and its optimizer:

# %%
show.source(lightning.LitGPT)

# %% [markdown]
# Lightning calls `configure_model` after the ranks have started, so that FSDP2 can shard the model there.
# The arguments of the `Trainer` say where to train and how long, how often to validate, and which checkpoints to keep:

# %%
show.source(lightning.build_trainer, lightning.main)

# %% [markdown]
# On one machine `python -m shardlab.trainers.core --folder runs/a` is enough: Lightning finds the GPUs, and starts one process per GPU.
#
# ### Two nodes
#
# Under Slurm, Lightning starts no processes. `srun` starts one task per GPU, and Lightning reads its rank from Slurm's variables.
# So `--ntasks-per-node` and `devices` both have to be the number of GPUs of a node, and `num_nodes` the job's number of nodes; Lightning compares them with Slurm's variables.
# [lightning.sbatch](../code/shardlab/trainers/lightning.sbatch) is the batch file:

# %%
existing_ranks.show_batch_file()

# %% [markdown]
# Two minutes before the time limit Slurm sends `SIGUSR1` to each task. Lightning's handler then saves a checkpoint, and calls `scontrol requeue`, which puts the job back into the queue.
# The signal may reach the ranks in different steps. A rank that saves waits for the other ranks, which wait in another collective, and sometimes the job hangs ([Lightning#21406](https://github.com/Lightning-AI/pytorch-lightning/issues/21406), version 2.6).
# So a callback records the signal. Every ten steps an all-reduce tells all ranks whether any rank got the signal; if so, all call Lightning's handler:

# %%
show.source(lightning.SynchronizedSave, lightning.find_newest_checkpoint)


# %% [markdown]
# At the next start there may be two checkpoints, one from the signal and one from the last validation. Lightning resumes from the checkpoint that `ckpt_path` names; without `ckpt_path` it takes the signal's checkpoint, however old. So the script passes the newer one, which `find_newest_checkpoint` returns.
# The batch file needs `--signal` and `--requeue`. With `#SBATCH --signal=B:USR1@120` the signal would go only to the batch script's shell, and nothing would be saved.
#
# The [tests](../tests/test_trainers.py) submit this file to a real Slurm with two nodes on one machine, send the signal, and check that the job starts again and finishes. They run without GPUs and NCCL.
#
# ### Comparison with a plain loop
#
# On this page `ranks.run` starts the ranks. `ExistingRanks` (12 lines) makes Lightning use them, and `existing_ranks.DDP` gives it each rank's device.
# The cell trains two epochs of 40 windows, in ten steps of 8, with Lightning and with a plain loop. Like Lightning's sampler, the plain loop orders the windows by `torch.randperm`, seeded with seed + epoch.

# %%
def train_plainly(steps=10):
    """Train in one process; return losses, gradient norms and weights."""
    torch.manual_seed(0)
    model, losses, norms = GPT(PRESETS["nano"]).to(ranks.device()), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = lightning.TokenWindows(64)
    for epoch in range(2):
        order = torch.randperm(40, generator=torch.Generator().manual_seed(epoch))
        for part in order.split(8):
            pairs = [data[i] for i in part.tolist()]
            tokens, targets = (
                torch.stack(side).to(ranks.device()) for side in zip(*pairs, strict=True)
            )
            value = loss(model(tokens), targets)
            optimizer.zero_grad()
            value.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(value.item())
            norms.append(norm.item())
    return losses, norms, model.state_dict()


# %% [markdown]
# Lightning trains on two ranks: with DDP, with FSDP2, and with FSDP2 on its default mesh.

# %%
def fit(strategy, *choices):
    """Train with Lightning on two ranks; return rank 0's losses, gradient norms and weights."""
    device = existing_ranks.choose_device(strategy, 2)
    return ranks.run(existing_ranks.fit_on_ranks, 2, strategy, 10, *choices, device=device)[0]


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    one = ranks.run(train_plainly, 1)[0]
    fits = {
        "DDP": fit("ddp"),
        "FSDP2": fit("fsdp2"),
        "FSDP2, its default mesh": fit("fsdp2", 8, 40, "auto"),
    }

# %% tags=["hide-input"]
# Table: Lightning on two ranks against one process
rows = []
for name, (losses, norms, weights) in fits.items():
    gaps = [
        max(abs(a - b) for a, b in zip(found, want, strict=True))
        for found, want in ((losses, one[0]), (norms, one[1]))
    ]
    gaps.append(max((weights[k] - one[2][k]).abs().max().item() for k in weights))
    # 4 sqrt(512) 2^-24 of 5.5, 4 sqrt(2176) of 3.5; a turned weight: 2e-5
    equal = gaps[0] < 5e-5 and gaps[1] < 6e-5 and gaps[2] < 1e-4
    assert equal == (name != "FSDP2, its default mesh")
    rows.append((name, *("equal" if equal else f"{gap:.2f}" for gap in gaps)))
assert min(one[1]) > 1  # clipping cuts in every step
show.table(rows, ["2 ranks, 10 steps", "losses", "norms before clipping", "weights"])

# %% [markdown]
# "Equal" means within $6\cdot10^{-5}$, for weights within $10^{-4}$, since AdamW moves a weight by up to $10^{-3}$ however small its gradient.
# The last row shows the mistake from the top of this page. By default `ModelParallelStrategy()` shards over nodes, and uses the ranks of a node for tensor parallelism. On one node its `"data_parallel"` mesh has one rank, so `fully_shard` does not shard, and both ranks read the same windows.
#
# ## What a trainer changes without being asked
#
# The cell passes the `Trainer` a module that only records its inputs: 8 numbers to train on, and 5 to validate, in batches of 2.

# %% tags=["hide-input"]
# Table: what the Trainer does without being asked


class Probe(L.LightningModule):
    """A module that records its inputs; the gradient of a micro-batch is 1."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen, self.gradients = [], []

    def training_step(self, batch, index):
        self.seen.append([int(x) for x in batch[0]])
        self.log("own", batch[0].mean())
        self.log("mean", batch[0].mean(), sync_dist=True)
        return self.weight * 1.0

    def validation_step(self, batch, index):
        self.log("validation", batch[0].mean(), sync_dist=True)

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append(self.weight.grad.item())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def probe_trainer(items, batch, precision="32-true", **options):
    """Return this rank's batches, gradients, metrics, checkpoint keys and precision."""
    names = ("logger", "checkpointing", "progress_bar", "model_summary")
    quiet = {name if name == "logger" else f"enable_{name}": False for name in names}
    trainer = L.Trainer(
        strategy=existing_ranks.DDP(),
        plugins=[existing_ranks.ExistingRanks()],
        precision=precision,
        num_sanity_val_steps=0,
        **quiet,
        **options,
    )
    module, sizes = Probe(), (items, 5)
    data = [DataLoader(TensorDataset(torch.arange(float(n))), batch) for n in sizes]
    trainer.fit(module, *data)
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    kept = sorted(trainer._checkpoint_connector.dump_checkpoint())
    return module.seen, module.gradients, metrics, kept, trainer.precision


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    # CPU: all rows are of one device
    a, b = ranks.run(lambda: probe_trainer(8, 2, max_epochs=2), 2, device="cpu")
    options = dict(max_epochs=1, accumulate_grad_batches=4)
    # CPU: what "16-mixed" means there
    c, _ = ranks.run(lambda: probe_trainer(10, 1, "16-mixed", **options), 2, device="cpu")
assert a[0][:2] != a[0][2:] and c[1] == [1, 0.25] and c[4] == "bf16-mixed"
assert a[2]["own"] != b[2]["own"] and a[2]["mean"] == b[2]["mean"]
assert not any("rng" in key or "random" in key for key in a[3])
seen, _, metrics, kept, _ = a
kept = ", ".join(key for key in kept if "-" not in key)
rows = [
    ("shuffle=False", f"rank 0 sees {seen[0]}, {seen[1]}: a shuffling sampler"),
    ("no call of set_epoch", f"{seen[2]}, {seen[3]} in epoch 2: called for you"),
    ("batch_size=2", "2 on each rank: 4 in a step, and half the steps"),
    ("self.log(…)", f"{metrics['own']} on rank 0, {b[2]['own']} on rank 1"),
    ("self.log(…, sync_dist=True)", f"{metrics['mean']} on both"),
    ("validation on 0 to 4", f"{metrics['validation']:.2f}, not 2: 0 counts twice"),
    ("5 micro-batches, accumulate 4", f"gradients {c[1]}: the fifth is divided by 4"),
    ('precision="16-mixed" on a CPU', f"{c[4]}, after a warning"),
    ("save_checkpoint", f"{kept}; no random state"),
]
show.table(rows, ["you write", "you get"])

# %% [markdown]
# Each of these defaults is reasonable, and changes your numbers. With `use_distributed_sampler=False` your own sampler is used; then Lightning calls `set_epoch` only if your sampler has this method.
#
# ## accelerate
#
# Hugging Face **accelerate** keeps your loop: `model, optimizer, loader = accelerator.prepare(model, optimizer, loader)`, then `accelerator.backward(loss)`.
# The course does not install it. On 23 November 2026 we ran version 1.15.0 under `torchrun --nproc-per-node=2` with `Accelerator(cpu=True)`: five losses were equal to those of one process within $5\cdot10^{-7}$, clipping included.
# You configure it by arguments of `Accelerator`, or by a file that `accelerate config` writes; our file had `distributed_type: MULTI_CPU`, `use_cpu: true`, `num_processes: 2`.
# Print the number of processes, the wrapper and the precision that you get. On a CPU all three silently differed from the configuration:
#
# - `accelerate launch` with that file started *one* process;
# - `FullyShardedDataParallelPlugin(fsdp_version=2)` gave `DistributedDataParallel`;
# - `mixed_precision="fp16"` computed in float32, to the last digit.
#
# ## fp16: a scale that all ranks share
#
# `bfloat16` has few digits and a large range. `float16` has more digits, but a small range:
# its smallest number above 0 is $6\cdot10^{-8}$, its largest 65,504.
# So the loss is multiplied by a *scale* before backward, which scales every gradient, too. Before the step the gradients are divided by the scale {cite}`micikevicius2018mixed` (section 3.2).
# The cell compares each parameter's gradient with that in `float32`.

# %% tags=["hide-input"]
# Table: error of gradients in float16, by the scale of the loss


def compute_gradients(dtype, scale=1.0):
    """Return the gradients of one backward, divided by the scale."""
    torch.manual_seed(0)
    model = GPT(PRESETS["nano"])
    tokens, targets = text.get_batch(32, 4)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        value = loss(model(tokens), targets)
    (value * scale).backward()
    return [p.grad / scale for p in model.parameters()]


exact, rows, worst = compute_gradients(torch.float32), [], {}
for power in (0, 16, 20):
    found = compute_gradients(torch.float16, 2.0**power)
    pairs = [(f, e) for f, e in zip(found, exact, strict=True) if f.isfinite().all()]
    worst[power] = max(((f - e).norm() / e.norm()).item() for f, e in pairs)
    bad = len(exact) - len(pairs)
    rows.append((f"2^{power}", f"{100 * worst[power]:.1f}", f"{bad} of {len(exact)}"))
assert worst[0] > 3 * worst[16] and rows[1][2].startswith("0 ") and bad
show.table(rows, ["scale", "largest error (%)", "parameters with inf or nan"])


# %% [markdown]
# If the scale is too small, gradients lose digits; if it is too large, they overflow.
# The right scale changes during training. So a scaler adjusts it: when a gradient overflows, it halves the scale and skips the step; after `interval` good steps it doubles the scale.

# %%
def plain_unscale(gradients, scale, good_steps, interval=2000):
    """Divide gradients by the scale; return whether to step, the next scale, good steps."""
    for gradient in gradients:
        gradient /= scale
    if not all(gradient.isfinite().all() for gradient in gradients):
        return False, scale / 2, 0
    if good_steps + 1 == interval:
        return True, 2 * scale, 0
    return True, scale, good_steps + 1


state = 2.0**16, 0
for value in (1.0, 2.0, float("inf"), 3.0):
    step, *state = plain_unscale([torch.tensor([value])], *state, interval=2)
    print("step" if step else "skip", *state)


# %% [markdown]
# [`LossScaler`](../code/shardlab/trainers/scaler.py) keeps this state. Before the decision it shares a flag among the ranks of a group, 1 if any of the rank's gradients is inf or nan, by an `all_reduce`:
#
# ![Two ranks, each with a shard of the gradients. Rank 1's has an inf, so its flag is 1 and rank 0's is 0. After an all-reduce with MAX both flags are 1: both ranks skip the step and halve the scale.](../figures/trainers_scale.svg)
#
# DDP does not need this `all_reduce`. Every rank has the sum of all gradients, so an inf on one rank is an inf on all, and all skip the same step.
# With ZeRO and FSDP2 a rank has only its own shard of the sum, and the `inf` may be in another rank's shard.
#
# ### A scale on each rank: broken and repaired
#
# The function below trains with FSDP2 on two ranks, and doubles the scale after 3 good steps instead of 2,000.

# %%
def train_in_fp16(group, steps=16):
    """Return the mean losses, and this rank's scale after each step."""
    torch.manual_seed(0)
    model, mesh = GPT(PRESETS["nano"]), DeviceMesh.from_group(dist.group.WORLD, "cpu")
    for part in [*model.blocks, model]:
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler, losses, scales = LossScaler(interval=3, group=group), [], []
    for step in range(steps):
        tokens, targets = text.get_batch(32, 2, start=4 * step + 2 * dist.get_rank())
        with torch.autocast("cpu", torch.float16):
            value = loss(model(tokens), targets)
        optimizer.zero_grad()
        scaler.scale_loss(value).backward()
        if scaler.unscale_gradients(optimizer):
            optimizer.step()
        scales.append(scaler.scale)
        mean = value.detach() / dist.get_world_size()
        dist.all_reduce(mean)  # a scalar
        losses.append(mean.item())
    return losses, scales


both_ways = ranks.run(
    # CPU: its mesh and autocast are the CPU's
    lambda: [train_in_fp16(group) for group in (None, dist.group.WORLD)], 2, device="cpu"
)
broken, repaired = zip(*both_ways, strict=True)

# %% tags=["hide-input"]
# Draws each rank's scale over the steps, broken and repaired

assert repaired[0] == repaired[1]
low, high = sorted(scales[-1] for _, scales in broken)
assert high > 64 * low and broken[0][0][-1] > repaired[0][0][-1] + 0.1
figure, axes = plt.subplots(figsize=(6.4, 3))
lines = [(scales, "-", show.RANK_COLORS[r]) for r, (_, scales) in enumerate(broken)]
for scales, style, color in [*lines, (repaired[0][1], "--", "#8C8C8C")]:
    powers = [math.log2(scale) for scale in scales]
    axes.step(range(1, 17), powers, style, where="mid", color=color)
for rank, (_, scales) in enumerate(broken):
    words = f"rank {rank},\nbroken"
    axes.text(16.7, math.log2(scales[-1]), words, va="center", fontsize=9)
words = "both,\nrepaired"
axes.text(16.7, math.log2(repaired[0][1][-1]) - 0.8, words, va="center", fontsize=9)
axes.set(xlabel="step", ylabel="scale, as a power of 2", xlim=(0.5, 19.5))
axes.set_xticks([1, 4, 8, 12, 16])
axes.yaxis.get_major_locator().set_params(integer=True)
show.figure(
    figure,
    "Scale over 16 steps. Repaired, it stays near 2 to the 16 on both ranks. Broken, "
    "the ranks part at the first overflow: one falls at every step, the other climbs.",
    "train-scale",
)

# %% [markdown]
# The broken run learns more slowly.

# %% tags=["hide-input"]
# Table: losses of the broken and of the repaired run

steps = 1, 6, 11, 16
show.table(
    [
        (name, *(f"{losses[step - 1]:.3f}" for step in steps))
        for name, (losses, _) in (("broken", broken[0]), ("repaired", repaired[0]))
    ],
    ["", *(f"loss, step {step}" for step in steps)],
)

# %% [markdown]
# The first overflow is in one rank's shard. This rank halves its scale, the other rank does not.
# From then on the reduce-scatter adds gradients with two different scales. The larger scale makes the sum overflow in the same shard every step, although that shard's rank keeps halving its own scale: this half of the model no longer trains.
# One all-reduce of one number, with MAX, repairs this.
# With stage 2 of the course's ZeRO the same mistake ends in a hang: a rank that steps joins the all-gather of new weights, a rank that skips the step does not.
#
# `torch.amp.GradScaler` needs no repair with FSDP2: gradients are `DTensor`s, which call this all-reduce themselves ([pytorch#132816](https://github.com/pytorch/pytorch/pull/132816)). Its scales and weights are bitwise equal to those of our `LossScaler` (`tests/test_trainers.py`).
#
# ````{admonition} Only if the first gradient is sharded: "GradScaler knows DTensors, so all ranks decide alike"
# :class: checked
#
# The placement of the *first* gradient decides how the overflow flag is reduced (torch 2.13, November 2026).
# With a replicated gradient before a sharded one, as in tensor parallelism, one rank's scale became 512 and the other's stayed at 1,024. A mix of DTensors and plain tensors raises an error.
# ````

# %% tags=["hide-input"]
# Shows torch's scales after an overflow on rank 1, by the gradients' order


def scale_after_overflow(first_is_sharded):
    """Return this rank's scale after a step in which rank 1's shard overflows."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh, weights = DeviceMesh.from_group(dist.group.WORLD, "cpu"), []
    mine = torch.ones(2, 4)
    for kind in [Shard(0), Replicate()][:: 1 if first_is_sharded else -1]:
        weight = torch.nn.Parameter(DTensor.from_local(mine, mesh, [kind]))
        bad = math.inf if kind == Shard(0) and dist.get_rank() == 1 else 1.0
        weight.grad = DTensor.from_local(mine * bad, mesh, [kind], run_check=False)
        weights.append(weight)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    scaler.step(torch.optim.SGD(weights))
    scaler.update()
    return scaler.get_scale()


for sharded in (True, False):
    # CPU: its mesh is the CPU's
    scales = ranks.run(scale_after_overflow, 2, sharded, device="cpu")
    print(f"{'sharded' if sharded else 'replicated'} first: scales {scales}")
    assert scales == ([512, 512] if sharded else [1024, 512])

# %% [markdown]
# ## fp16 in DeepSpeed's configuration
#
# This configuration trains in fp16 with ZeRO stage 2. `de.check_config` checks all lines against DeepSpeed's own schema.

# %%
settings = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,  # a step skips both micro-batches or none
    "gradient_clipping": 1.0,  # after division by the scale
    "fp16": {
        "enabled": True,  # weights in float16, master weights in float32
        "loss_scale": 0,  # 0: dynamic; any other number: a fixed scale
        "initial_scale_power": 16,  # the first scale, 2**16
        # left out: "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1
    },
    "zero_optimization": {
        "stage": 2,  # gradients and optimizer states sharded
        "offload_optimizer": {"device": "cpu"},  # master weights, moments, step
    },
    "zero_allow_untested_optimizer": True,  # allow torch's AdamW with ZeRO
    "zero_force_ds_cpu_optimizer": False,  # and with offload
}
de.check_config(settings, optimizer=True)  # torch's AdamW is passed separately


# %% [markdown]
# Three settings need explanation:
#
# - `loss_scale_window` is our `interval`;
# - when the scale is at `min_loss_scale`, an overflow ends the run with an exception;
# - with `hysteresis` 2, the first overflow after each doubling does not halve the scale; the step is skipped all the same.
#
# DeepSpeed reduces its flag with MAX, as we do (`has_overflow` in `stage_1_and_2.py`).
#
# On most CPUs DeepSpeed refuses fp16 ("Type fp16 is not supported on your device"), since they have no fast float16 instructions. But torch can still compute in float16. So the cell disables the check, and the real engine trains: once with these settings, once with an initial scale of $2^{20}$ and a window of 3.

# %%
def train_with_deepspeed(changes, steps=10):
    """Return this rank's losses, and each step's scale and overflow."""
    de.import_deepspeed()
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True  # disable the check
    torch.manual_seed(0)
    section = settings["fp16"] | changes
    engine = de.initialize(GPT(PRESETS["nano"]), settings | {"fp16": section})
    losses, scales, overflows = [], [], []
    for step in range(steps):
        tokens, targets = text.get_batch(32, 4, start=8 * step + 4 * dist.get_rank())
        scales.append(engine.optimizer.loss_scale)
        micro_batches = zip(tokens.chunk(2), targets.chunk(2), strict=True)
        losses.append(de.step(engine, list(micro_batches)))
        overflows.append(engine.optimizer.overflow)
    return losses, scales, overflows

# %% tags=["hide-input"]
# Table: DeepSpeed's scale, measured beside the rule in its source


def predict_scales(overflows, scale, window, hysteresis=2):
    """Return the scale before each step, by DynamicLossScaler.update_scale."""
    scales, left, last = [], hysteresis, -1
    for step, overflow in enumerate(overflows):
        scales.append(scale)
        good = step - last - 1
        if overflow and left == 1:
            scale = max(scale / 2, 1)
        elif overflow:
            left -= 1
        elif good and good % window == 0:
            scale, left = 2 * scale, hysteresis
        last = step if overflow else last
    return scales


def train_in_one_process(steps=10):
    """Return the losses in float32."""
    torch.manual_seed(0)
    model, losses = GPT(PRESETS["nano"]), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for step in range(steps):
        tokens, targets = text.get_batch(32, 8, start=8 * step)
        optimizer.zero_grad()
        value = loss(model(tokens), targets)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(value.item())
    return losses


de.import_deepspeed()
high = {"initial_scale_power": 20, "loss_scale_window": 3}
as_given, too_high = zip(
    # CPU: compared with one process on the CPU
    *ranks.run(lambda: [train_with_deepspeed(c) for c in ({}, high)], 2, device="cpu"),
    strict=True,
)
assert as_given[0] == as_given[1] and too_high[0] == too_high[1]  # ranks agree
losses, scales, overflows = as_given[0]
apart = max(abs(a - b) for a, b in zip(losses, train_in_one_process(), strict=True))
assert scales == [2**16] * 10 and not any(overflows) and apart < 0.02
print(f"settings as above: 10 steps at 2^16; losses {apart:.0e} from float32")
losses, scales, overflows = too_high[0]
rule = predict_scales(overflows, 2.0**20, 3)
assert scales == rule and scales[:3] == [2**20, 2**20, 2**19]
rows = [
    [name, *(f"2^{math.log2(scale):.0f}" for scale in row)]
    for name, row in (("scale, predicted", rule), ("scale, measured", scales))
]
rows.insert(0, ["overflow", *("yes" if overflow else "" for overflow in overflows)])
show.table(rows, ["step", *map(str, range(1, 11))])

# %% [markdown]
# With an initial scale of $2^{20}$ DeepSpeed skips five steps: four halve the scale; one does not, because of the hysteresis.
# Between an overflow and the next doubling DeepSpeed takes four good steps, not three.
#
# ## What goes wrong, and how it looks
#
# | symptom | cause or missing line |
# |---|---|
# | losses differ from the script's from the first step | [the order](#what-a-trainer-changes-without-being-asked): Lightning's sampler shuffles, unless `use_distributed_sampler=False` |
# | with `ModelParallelStrategy`, two GPUs take as long as one | [`data_parallel_size`](#comparison-with-a-plain-loop): its default shards over nodes |
# | a job hangs at its time limit: two ranks save at different steps | [same step on all ranks](#two-nodes): a flag in an all-reduce, then Lightning's handler |
# | a job is ended at its time limit, without a checkpoint | [`--signal`](#two-nodes) is missing, or has `B:` |
# | losses rise after an overflow, scales differ by rank | [one decision for all ranks](#a-scale-on-each-rank-broken-and-repaired): each rank checks only its own shard |
# | the run ends with an exception, at the smallest scale | [`min_loss_scale`](#fp16-in-deepspeeds-configuration): the loss is nan, or gradients overflow at any scale |
#
# ## When to use what
#
# | | for | against |
# |---|---|---|
# | [a script of your own](train.md#the-script-to-take-home) | every line that decides a number is yours | launch, signals and checkpoints are 300 lines |
# | Lightning | the loop, the launch and the checkpoint are written | what it changes without being asked |
# | accelerate | the loop stays yours | the wrapper or the precision may not be the one that you asked for |
# | `float16` | GPUs without `bfloat16`, such as V100 and T4 | a scale, skipped steps, one more all-reduce |
#
# ## Exercises
#
# ```{exercise-start} Optimizer steps of an epoch on four ranks (easy)
# :label: ex-trainers-steps
# ```
#
# A script trains on 4,096 windows with `batch_size=16`, on one GPU. You give Lightning's `Trainer` `devices=4` and change nothing else.
# How many optimizer steps does an epoch then have?

# %%
answer = ...  # steps
check(answer, "lightning_steps")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-trainers-steps
# :label: sol-trainers-steps
# :class: dropdown
# ```
#
# `batch_size` is per rank: a step reads 4 × 16 windows, though the learning rate was chosen for 16.

# %%
answer = 4096 // (4 * 16)
check(answer, "lightning_steps")

# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} Skipped steps with too large an initial scale (easy)
# :label: ex-trainers-skipped
# ```
#
# DeepSpeed's configuration has `"initial_scale_power": 32` and `"hysteresis": 2`. Gradients overflow whenever the scale is above $2^{16}$.
# How many steps are skipped before the first successful step?

# %%
answer = ...  # steps
check(answer, "skipped_steps")

# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-trainers-skipped
# :label: sol-trainers-skipped
# :class: dropdown
# ```
#
# The first overflow uses up the hysteresis. Then each overflow halves the scale: at $2^{32}$, $2^{31}$, down to $2^{17}$.

# %%
answer = 1 + (32 - 16)
check(answer, "skipped_steps")


# %% [markdown]
# ```{solution-end}
# ```
#
# ```{exercise-start} One decision for all ranks (medium)
# :label: ex-trainers-decision
# ```
#
# Each rank has a list of its shards of the gradients, which may be empty.
# Return the `bool` `True` on all ranks if no rank has an inf or a nan, otherwise `False` on all ranks.

# %%
def my_decision(gradients, group):
    pass  # your code


check(my_decision)


# %% [markdown]
# ```{exercise-end}
# ```
#
# ```{solution-start} ex-trainers-decision
# :label: sol-trainers-decision
# :class: dropdown
# ```
#
# Each rank sends a flag, not gradients: a sum of large finite gradients could overflow. Every rank calls the collective, also a rank without shards or without an inf.

# %%
def my_decision(gradients, group):
    bad = torch.tensor(float(any(not g.isfinite().all() for g in gradients)))
    dist.all_reduce(bad, dist.ReduceOp.MAX, group)
    return not bad.item()


check(my_decision)

# %% [markdown]
# ```{solution-end}
# ```
#
# ## Summary
#
# - Lightning needs a module with training step, validation step and optimizer, and a `Trainer` that says on which devices, for how long, and which checkpoints to keep.
# - Under Slurm, `srun` starts the ranks; with `--signal` and `--requeue` a job saves before its time limit and resumes.
# - A trainer's defaults change numbers: the order of the data, the global batch, the averaging of losses, windows that count twice.
# - In `float16` the loss has a scale. In a sharded model an overflow may be seen by one rank only: one all-reduce with MAX decides for all.
# - With DeepSpeed's hysteresis the first overflow does not halve the scale, and after an overflow its window is one step longer.
#
# ## Further reading
#
# - {cite}`micikevicius2018mixed`: why half precision needs a scale, and which parts stay in single precision.
# - Lightning's documentation of [clusters](https://lightning.ai/docs/pytorch/stable/clouds/cluster_advanced.html).
