"""DeepSpeed's engine from initialization to checkpoints, in the order of the lesson.

1. `initialize` wraps a model in the engine, and `step` makes one optimizer step with it;
2. `build_config` builds the engine's configuration dictionary;
3. `enable_recompute` enables activation checkpointing, which the configuration alone does not;
4. checkpoints: `save_checkpoint`, `load_checkpoint`, and `to_universal` for any number of ranks.

DeepSpeed keeps some of its state for the whole process: use separate processes for an engine with a
pipeline, an engine with tensor parallelism, and an engine with neither.
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
from shardlab.layout import SINGLE_RANK, Layout

from . import schema
from .pipeline import is_pipeline
from .setup import import_deepspeed, suppress_output

Optimizers = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def initialize(
    module: nn.Module,
    config: Mapping[str, Any],
    optimizer: Optimizers | torch.optim.Optimizer | None = None,
) -> Any:
    """Wrap `module` in DeepSpeed's engine, on every rank of the default process group.

        engine = initialize(GPT(PRESETS["nano"]), build_config(Layout(2, zero=3)))
        loss(engine(tokens), targets)   # then engine.backward(...), engine.step(); or use `step`

    module: the same on every rank; it is moved to the rank's device, and the engine takes it over.
        A module from `to_pipeline_module` gives DeepSpeed's PipelineEngine.
    config: from `build_config`, or any dict in DeepSpeed's own format.
    optimizer: a function from parameters to an optimizer, or an optimizer over all of `module`'s
        parameters; None: the config's section "optimizer" if there is one, else torch's AdamW with
        a learning rate of 1e-3. (DeepSpeed compiles the fast optimizers of its "optimizer" section
        unless "torch_adam" is set.)
    """
    deepspeed = import_deepspeed()
    settings = dict(config)
    if optimizer is None and "optimizer" not in settings:
        optimizer = partial(torch.optim.AdamW, lr=1e-3, foreach=False)
    device = ranks.device()
    init_distributed()
    with suppress_output():
        engine, *_ = deepspeed.initialize(
            model=module.to(device),
            optimizer=optimizer,
            model_parameters=[p for p in module.parameters() if p.requires_grad],
            config=settings,
        )
    return engine


def init_distributed() -> None:
    """Make DeepSpeed use this rank's process group and device; call it before building a model."""
    deepspeed, device = import_deepspeed(), ranks.device()
    # DeepSpeed reads the GPU's number from LOCAL_RANK; ranks may share a GPU.
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    with suppress_output():
        deepspeed.init_distributed()


def step(engine: Any, micro_batches: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Make one optimizer step; return the mean loss over all micro-batches of all ranks.

    micro_batches: this rank's pairs of tokens and targets, each [micro_batch, S]: as many as the
        configuration's gradient accumulation steps. Ranks that share a model (tensor or pipeline
        parallelism) get the same micro-batches.

    Raises ValueError if their number is not the configuration's, and for targets of -100:
    DeepSpeed averages the micro-batches' means, which would be wrong with ignored targets.
    """
    wanted = engine.gradient_accumulation_steps()
    if len(micro_batches) != wanted:
        raise ValueError(f"micro_batches: {len(micro_batches)} of them; must be {wanted}")
    if any((targets == plain.IGNORED).any() for _, targets in micro_batches):
        raise ValueError("targets: must not contain -100, because all targets must count")
    device = ranks.device()
    batches = [(tokens.to(device), targets.to(device)) for tokens, targets in micro_batches]
    if is_pipeline(engine):
        with suppress_output():
            return engine.train_batch(iter(batches)).item()
    total = torch.zeros((), dtype=torch.float64, device=device)  # float64: no rounding error
    for tokens_BS, targets_BS in batches:
        loss = plain.loss(engine(tokens_BS), targets_BS)
        engine.backward(loss)  # divides by the accumulation, and averages over the ranks
        engine.step()  # updates weights only at the last micro-batch
        total += loss.detach() / wanted
    dist.all_reduce(total)  # a scalar; ranks that share a model add equal values
    return total.item() / dist.get_world_size()


# Tensor parallelism of the plain GPT's matrices: "column" shards the outputs, and "row" shards the
# inputs, so that the ranks' outputs have to be summed (Shoeybi et al., "Megatron-LM", section 3).
COURSE_TP_PLAN = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.(query|key|value|up|gate)\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.(out|down)\.weight$"], "partition_type": "row"},
    ],
}


def build_config(
    layout: Layout = SINGLE_RANK,
    *,
    precision: str = "fp32",
    clipping: float = 0.0,
    tp_plan: str | Mapping[str, Any] = "course",
    device: str = "auto",
    **more: Any,
) -> dict[str, Any]:
    """Build DeepSpeed's configuration, checked against DeepSpeed's own schema.

    layout: its ranks are the job's. Offload goes to the host's memory: "optimizer" offloads the
        optimizer's states and step (ZeRO stages 1 to 3), "parameters" also the parameters.
        recompute="full" adds the section "activation_checkpointing". In a pipeline, where DeepSpeed
        itself calls the layers, that section enables recomputation. Elsewhere it changes nothing on
        its own: see the function `enable_recompute`.
    precision: "fp32"; "bf16" or "fp16" for parameters, with fp32 master weights.
    clipping: largest global norm of the gradients; 0 for no clipping.
    tp_plan: plan of automatic tensor parallelism: "course" for the plain GPT, the name of one of
        DeepSpeed's presets ("llama", ...), or DeepSpeed's "partition_config" as a dict.
    device: "auto", "cpu" or "cuda", as in `ranks.run`.
    more: further sections in DeepSpeed's own format, merged into the configuration.

    Surprising defaults of DeepSpeed, and the values that this function sets instead:
    - gradient_clipping is 1.0 if it is left out, since DeepSpeed 0.19.3 (pull request 8068, June
      2026); before, it was 0.0, and gradients were not clipped. This function sets 0.0.
    - Optimizers other than DeepSpeed's own and torch's Adam, AdamW and Adagrad are refused from
      stage 1 on (zero_allow_untested_optimizer), and with offload all but DeepSpeed's own
      (zero_force_ds_cpu_optimizer). This function allows them: they train correctly.
    - Stage 0 in 16 bits runs the optimizer once with zero gradients, to create its states: so
      AdamW's bias correction is always one step ahead, and its first step is 0.74 of the usual one.
      Stage 1 has no such step.
    - Stage 3 replaces torch.nn.functional.linear in the whole process (memory_efficient_linear),
      which computes the same sums in another order.
    - With tp above 1, DeepSpeed computes train_batch_size over all ranks, as if tensor-parallel
      ranks had different samples, and refuses the true size. This function leaves it out.
    - DeepSpeed ignores an unknown name at the top level. Here it is an error (see `check_config`).

    Raises ValueError for arguments that cannot be combined.
    """
    schema.check_together(layout, precision, clipping, device)
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.microbatches,  # a pipeline's micro-batches, too
        "train_batch_size": layout.global_batch,
        "gradient_clipping": float(clipping),
        "zero_optimization": {"stage": layout.zero},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,  # never
    }
    if layout.offload != "none":
        settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        settings["zero_force_ds_cpu_optimizer"] = False
    if layout.offload == "parameters":
        settings["zero_optimization"]["offload_param"] = {"device": "cpu"}
    if precision != "fp32":
        settings[precision] = {"enabled": True}
    if layout.tp > 1:
        del settings["train_batch_size"]  # DeepSpeed would check it against all ranks, tp included
        settings["tensor_parallel"] = {"autotp_size": layout.tp, **_tp_section(tp_plan)}
    again = layout.recompute == "full"
    if layout.pp > 1:
        settings["pipeline"] = {"stages": layout.pp}
        if again:  # use_reentrant=True, the default, would leave the embedding without gradient
            settings["pipeline"] |= {"activation_checkpoint_interval": 1, "use_reentrant": False}
    elif again:
        settings["activation_checkpointing"] = {"partition_activations": False}
    _merge_config(settings, more)
    schema.check_config(settings, optimizer=True)
    return settings


def _tp_section(plan: str | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(plan, Mapping):
        return {"partition_config": dict(plan)}
    if plan == "course":
        return {"partition_config": COURSE_TP_PLAN}
    return {"preset_model": plan}  # `schema.check_config` raises for an unknown preset


def _merge_config(settings: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, Mapping) and isinstance(settings.get(key), dict):
            _merge_config(settings[key], value)
        else:
            settings[key] = value


def enable_recompute(module: nn.Module, config: Mapping[str, Any] | None = None) -> nn.Module:
    """Enable activation checkpointing for each block of `module`, in place; return `module`.

    config: settings with the section "activation_checkpointing" that DeepSpeed shall use.

    The model's own code has to call `deepspeed.checkpointing.checkpoint`, as this function makes
    each block do. The configuration's section only sets options: on its own it changes nothing.
    Call it on a rank. (Chen et al., arXiv 1604.06174.)
    """
    checkpointing = import_deepspeed().checkpointing
    if config is not None:
        with suppress_output():
            checkpointing.configure(None, deepspeed_config=dict(config))
    for block in module.blocks:
        block.forward = partial(checkpointing.checkpoint, block.forward)
    return module


def save_checkpoint(engine: Any, directory: str | Path, tag: str | None = None) -> None:
    """Save model, optimizer and step count (collective). tag: by default global_step<n>.

    DeepSpeed 0.19.8 cannot load a checkpoint of a 16-bit pipeline without ZeRO (KeyError: 0).
    """
    import_deepspeed()
    with suppress_output():
        engine.save_checkpoint(str(directory), tag=tag)
    dist.barrier()  # a rank that returns may read the other ranks' files


def load_checkpoint(engine: Any, directory: str | Path, tag: str | None = None) -> None:
    """Load a checkpoint into an engine with the same ZeRO stage and number of ranks.

    tag: by default the last. If the engine's configuration sets checkpoint.load_universal, the
    number of ranks can differ: then the checkpoint is one that `to_universal` made.

    Raises FileNotFoundError if there is no such checkpoint.
    """
    import_deepspeed()
    folder = find_checkpoint(directory, tag, universal=engine.load_universal_checkpoint())
    with suppress_output():
        engine.load_checkpoint(str(directory), tag=folder.name)


def to_universal(directory: str | Path, tag: str | None = None) -> Path:
    """Convert a checkpoint of ZeRO stages 1 to 3 to DeepSpeed's universal format, in a new folder.

    Returns the folder, beside the old one. It holds unsharded tensors, with a folder for each
    parameter, so any number of ranks can load it. Call it in a single process, without ranks.
    (Lian et al., "Universal Checkpointing", arXiv 2406.18820.)

    Raises FileNotFoundError if there is no such checkpoint, ValueError for one without ZeRO.
    """
    import_deepspeed()
    from deepspeed.checkpoint import ds_to_universal

    folder = find_checkpoint(directory, tag)
    if not list(folder.glob("*_optim_states.pt")):
        raise ValueError(f"{folder}: written at ZeRO stage 0; must be of stage 1, 2 or 3")
    universal = folder.with_name(f"{folder.name}_universal")
    with suppress_output():
        ds_to_universal.main(
            Namespace(
                input_folder=str(folder),
                output_folder=str(universal),
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,  # for models without metadata on their sharding
            )
        )
    return universal


def find_checkpoint(directory: str | Path, tag: str | None, universal: bool = False) -> Path:
    """Return the folder of `tag`, or of the last tag that DeepSpeed recorded."""
    latest = Path(directory, "latest_universal" if universal else "latest")
    if tag is None and not latest.is_file():
        raise FileNotFoundError(f"{latest}: there is no finished DeepSpeed checkpoint")
    folder = Path(directory, latest.read_text().strip() if tag is None else tag)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such checkpoint")
    return folder
