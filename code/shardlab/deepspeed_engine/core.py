"""DeepSpeed's engine from call to checkpoint, in the order of the lesson.

1. `initialize` puts the engine around a model, and `step` makes one optimizer step with it;
2. `config` writes the dictionary that says what the engine does;
3. `recompute` asks for activation checkpointing, which the dictionary alone does not;
4. `save` and `load` keep a run, and `to_universal` makes it fit other numbers of ranks.

DeepSpeed keeps some of its state for the whole process: an engine with a pipeline, one with tensor
parallelism and one with neither belong in runs of their own.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlab import ranks
from shardlab.gpt import model as plain
from shardlab.layout import ALONE, Layout

from . import schema
from .pipe import is_pipeline
from .start import prepare, quiet

Optimizers = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def initialize(
    module: nn.Module,
    config: Mapping[str, Any],
    optimizer: Optimizers | torch.optim.Optimizer | None = None,
) -> Any:
    """DeepSpeed's engine around `module`, on every rank of the default process group.

        engine = initialize(GPT(PRESETS["nano"]), config(Layout(2, zero=3, micro_batch=2)))
        loss(engine(tokens), targets)   # then engine.backward(...), engine.step(); or use `step`

    module: the same on every rank; it is moved to the rank's device and becomes the engine's. One
        made by `pipeline` gives DeepSpeed's PipelineEngine.
    config: from `config`, or any dict in DeepSpeed's own words.
    optimizer: a function from parameters to an optimizer, or an optimizer over all of `module`'s
        parameters; without one, torch's AdamW with a learning rate of 1e-3. (The config's own
        "optimizer" section, when there is one, comes before that default. DeepSpeed compiles the
        fast optimizers that it names unless "torch_adam" is set.)
    """
    deepspeed = prepare()
    settings = dict(config)
    if optimizer is None and "optimizer" not in settings:
        optimizer = partial(torch.optim.AdamW, lr=1e-3, foreach=False)
    device = ranks.device()
    join()
    with quiet():
        engine, *_ = deepspeed.initialize(
            model=module.to(device),
            optimizer=optimizer,
            model_parameters=[p for p in module.parameters() if p.requires_grad],
            config=settings,
        )
    return engine


def join() -> None:
    """Have DeepSpeed take this rank's group and device, before it makes a model or an engine."""
    deepspeed, device = prepare(), ranks.device()
    # DeepSpeed takes this for the GPU's number; ranks may share one.
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    with quiet():
        deepspeed.init_distributed()


def step(engine: Any, micro_batches: Sequence[tuple[Tensor, Tensor]]) -> float:
    """One optimizer step; the mean loss over all micro-batches of all ranks.

    micro_batches: this rank's pairs of tokens and targets, each [micro_batch, S]: as many as the
        configuration's accumulation. Ranks that share a model (tensor or pipeline parallel) are
        given the same ones.

    Raises ValueError when their number is not the configuration's, and for targets of -100:
    DeepSpeed makes a mean of means, which would weigh them wrongly.
    """
    wanted = engine.gradient_accumulation_steps()
    if len(micro_batches) != wanted:
        raise ValueError(f"micro_batches: {len(micro_batches)} of them; allowed is {wanted}")
    if any((targets == plain.IGNORED).any() for _, targets in micro_batches):
        raise ValueError("targets: -100 is among them; allowed are targets that all count")
    device = ranks.device()
    batches = [(tokens.to(device), targets.to(device)) for tokens, targets in micro_batches]
    if is_pipeline(engine):
        with quiet():
            return engine.train_batch(iter(batches)).item()
    total = torch.zeros((), dtype=torch.float64, device=device)  # so that the mean adds no error
    for tokens_BS, targets_BS in batches:
        loss = plain.loss(engine(tokens_BS), targets_BS)
        engine.backward(loss)  # divides by the accumulation, and averages over the ranks
        engine.step()  # steps at the last micro-batch, and does nothing before
        total += loss.detach() / wanted
    dist.all_reduce(total)  # a scalar; ranks that share a model add the same again
    return total.item() / dist.get_world_size()


# Which matrices of the plain GPT are cut, and how: by columns where one rank's outputs are its own,
# by rows where the ranks' outputs have to be added up (Shoeybi et al., "Megatron-LM", section 3).
COURSE_PLAN = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.(query|key|value|up|gate)\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.(out|down)\.weight$"], "partition_type": "row"},
    ],
}


def config(
    layout: Layout = ALONE,
    *,
    precision: str = "fp32",
    clipping: float = 0.0,
    tp_plan: str | Mapping[str, Any] = "course",
    device: str = "auto",
    **more: Any,
) -> dict[str, Any]:
    """DeepSpeed's configuration, checked against DeepSpeed's own schema.

    layout: its ranks are the job's. What the layout offloads goes to the host's memory: with
        "optimizer" its states and step (ZeRO's stages 1 to 3), with "parameters" these, too.
        recompute="full" writes the section "activation_checkpointing". On its own that changes
        nothing: see `recompute` (the function). In a pipeline, where DeepSpeed itself calls the
        layers, it does.
    precision: "fp32"; "bf16" or "fp16" for parameters, with fp32 master weights.
    clipping: largest global norm of the gradients; 0 for none.
    tp_plan: of automatic tensor parallelism: "course" for the plain GPT, the name of one of
        DeepSpeed's presets ("llama", ...), or DeepSpeed's "partition_config" as a dict.
    device: "auto", "cpu" or "cuda", as in `ranks.run`.
    more: further sections in DeepSpeed's own words, merged with what stands here.

    Defaults of DeepSpeed that surprise, and what stands here instead:
    - gradient_clipping is 1.0 when it is left out, since DeepSpeed 0.19.3 (pull request 8068, June
      2026); before, it was 0.0, and gradients were not clipped. Here 0.0.
    - An optimizer that is neither DeepSpeed's own nor torch's Adam, AdamW or Adagrad is refused
      from stage 1 on (zero_allow_untested_optimizer), and with offload all but DeepSpeed's own
      (zero_force_ds_cpu_optimizer). Here allowed: they train as they should.
    - Stage 0 in 16 bits runs the optimizer once, with gradients of zero, to make its states:
      AdamW's bias correction is one step ahead for good, its first step 0.74 of the usual. Stage 1
      has no such step.
    - Stage 3 replaces torch.nn.functional.linear in the whole process (memory_efficient_linear):
      the same sums in another order.
    - With tp above 1 DeepSpeed still counts train_batch_size over all ranks, as if each had samples
      of its own, and refuses the true one. Here left out.
    - An unknown name at the top level is ignored. Here it is an error (see `check`).

    Raises ValueError for what cannot go together.
    """
    schema.check_together(layout, precision, clipping, device)
    built: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.microbatches,  # in a pipeline, those that fill it
        "train_batch_size": layout.batch,
        "gradient_clipping": float(clipping),
        "zero_optimization": {"stage": layout.zero},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,  # never
    }
    if layout.offload != "none":
        built["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        built["zero_force_ds_cpu_optimizer"] = False
    if layout.offload == "parameters":
        built["zero_optimization"]["offload_param"] = {"device": "cpu"}
    if precision != "fp32":
        built[precision] = {"enabled": True}
    if layout.tp > 1:
        del built["train_batch_size"]  # DeepSpeed would hold it against all ranks, tp's included
        built["tensor_parallel"] = {"autotp_size": layout.tp, **_plan(tp_plan)}
    again = layout.recompute == "full"
    if layout.pp > 1:
        built["pipeline"] = {"stages": layout.pp}
        if again:  # re-entrant, DeepSpeed's default, would leave the embedding without gradient
            built["pipeline"] |= {"activation_checkpoint_interval": 1, "use_reentrant": False}
    elif again:
        built["activation_checkpointing"] = {"partition_activations": False}
    _merge(built, more)
    schema.check(built, optimizer=True)
    return built


def _plan(plan: str | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(plan, Mapping):
        return {"partition_config": dict(plan)}
    if plan == "course":
        return {"partition_config": COURSE_PLAN}
    return {"preset_model": plan}  # an unknown one is named by the schema


def _merge(built: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, Mapping) and isinstance(built.get(key), dict):
            _merge(built[key], value)
        else:
            built[key] = value


def recompute(module: nn.Module, config: Mapping[str, Any] | None = None) -> nn.Module:
    """Keep only each block's input for backward and compute the block again then; returns `module`.

    config: settings whose section "activation_checkpointing" DeepSpeed is to use.

    DeepSpeed's `deepspeed.checkpointing.checkpoint` has to be called in the model's own code, as
    this does for each block. The section in the configuration says how, never where: on its own it
    changes nothing. Inside a rank only. (Chen et al., arXiv 1604.06174.)
    """
    checkpointing = prepare().checkpointing
    if config is not None:
        with quiet():
            checkpointing.configure(None, deepspeed_config=dict(config))
    for block in module.blocks:
        block.forward = partial(checkpointing.checkpoint, block.forward)
    return module


def save(engine: Any, directory: str | Path, tag: str | None = None) -> None:
    """Save model, optimizer and step count; on every rank, under one `tag` (global_step<n>).

    DeepSpeed 0.19.8 cannot read that of a 16-bit pipeline without ZeRO again (KeyError: 0).
    """
    prepare()
    with quiet():
        engine.save_checkpoint(str(directory), tag=tag)
    dist.barrier()  # whoever returns may read what the others wrote


def load(engine: Any, directory: str | Path, tag: str | None = None) -> None:
    """Load into an engine of the same stage on as many ranks; the last tag by default.

    Into an engine on any number of ranks, when its configuration has checkpoint.load_universal:
    then the folder is one that `to_universal` made, by default the last.

    Raises FileNotFoundError when there is no such checkpoint.
    """
    prepare()
    folder = folder_of(directory, tag, universal=engine.load_universal_checkpoint())
    with quiet():
        engine.load_checkpoint(str(directory), tag=folder.name)


def to_universal(directory: str | Path, tag: str | None = None) -> Path:
    """Convert a checkpoint of ZeRO's stages 1 to 3 into DeepSpeed's universal format, beside it.

    The universal one holds whole tensors, a folder for each parameter, and no shards of ranks: so
    every number of ranks can load it. One process converts, without ranks. Returns its folder.
    (Lian et al., "Universal Checkpointing", arXiv 2406.18820.)

    Raises FileNotFoundError when there is no such checkpoint, ValueError for one without ZeRO.
    """
    prepare()
    from deepspeed.checkpoint import ds_to_universal

    folder = folder_of(directory, tag)
    if not list(folder.glob("*_optim_states.pt")):
        raise ValueError(f"{folder}: written at stage 0; allowed are stages 1 to 3")
    universal = folder.with_name(f"{folder.name}_universal")
    with quiet():
        ds_to_universal.main(
            Namespace(
                input_folder=str(folder),
                output_folder=str(universal),
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,  # of models that say nothing about their own cuts
            )
        )
    return universal


def folder_of(directory: str | Path, tag: str | None, universal: bool = False) -> Path:
    """The folder of a tag, or of the one that DeepSpeed noted last."""
    latest = Path(directory, "latest_universal" if universal else "latest")
    if tag is None and not latest.is_file():
        raise FileNotFoundError(f"{latest}: no checkpoint of DeepSpeed was finished here")
    folder = Path(directory, latest.read_text().strip() if tag is None else tag)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such checkpoint")
    return folder
