"""A configuration for DeepSpeed from a dozen plain arguments.

DeepSpeed is configured by one dictionary (or JSON file) of nested sections. `config` writes it from
the words of this course, and refuses what cannot go together before anything starts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shardlab import ranks

from .schema import check

# Which matrices of the plain GPT are cut, and how: by columns where one rank's outputs are its own,
# by rows where the ranks' outputs have to be added up (Shoeybi et al., "Megatron-LM", section 3).
COURSE_PLAN = {
    "use_default_specs": False,
    "layer_specs": [
        {
            "patterns": [r".*\.(query|key|value|up|gate)\.weight$"],
            "partition_type": "column",
        },
        {
            "patterns": [r".*\.(out|down)\.weight$"],
            "partition_type": "row",
        },
    ],
}
OFFLOADS = ("none", "optimizer", "parameters")
PRECISIONS = ("fp32", "bf16", "fp16")


def config(
    micro_batch: int = 1,
    world_size: int = 1,
    *,
    accumulation: int = 1,
    train_batch: int | None = None,
    zero: int = 0,
    offload: str = "none",
    precision: str = "fp32",
    clipping: float = 0.0,
    recompute: bool = False,
    dp: int | None = None,
    tp: int = 1,
    tp_plan: str | Mapping[str, Any] = "course",
    pp: int = 1,
    device: str = "auto",
    **more: Any,
) -> dict[str, Any]:
    """DeepSpeed's configuration, checked against DeepSpeed's own schema.

    micro_batch: sequences that one data-parallel rank computes at a time.
    world_size: ranks of the job. dp * tp * pp; `dp` follows from the others when it is left out.
    accumulation: micro-batches per step; in a pipeline, the micro-batches that fill it.
    train_batch: sequences per step on all ranks, micro_batch * accumulation * dp; checked if given.
    zero: ZeRO stage 0 to 3.
    offload: "none"; "optimizer", whose states and step go to the host's memory (stages 1 to 3);
        "parameters", which go there too (stage 3).
    precision: "fp32"; "bf16" or "fp16" for parameters, with fp32 master weights.
    clipping: largest global norm of the gradients; 0 for none.
    recompute: write the section "activation_checkpointing". On its own it changes nothing: see
        `recompute` (the function). In a pipeline, where DeepSpeed itself calls the layers, it does.
    tp: degree of automatic tensor parallelism. tp_plan: "course" for the plain GPT, the name of one
        of DeepSpeed's presets ("llama", ...), or DeepSpeed's "partition_config" as a dict.
    pp: stages of DeepSpeed's pipeline; the module has to be one that `pipeline` made.
    device: "auto", "cpu" or "cuda", as in `ranks.run`.
    more: further sections in DeepSpeed's own words, merged with what stands here.

    Defaults of DeepSpeed that surprise, and what stands here instead:
    - gradient_clipping is 1.0 when it is left out: gradients are clipped unasked. Here 0.0.
    - An optimizer that is not DeepSpeed's own is refused from stage 1 on
      (zero_allow_untested_optimizer), and with offload too (zero_force_ds_cpu_optimizer). Here
      allowed: they train as they should.
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
    dp = _degrees(world_size, dp, tp, pp)
    _check_sizes(micro_batch=micro_batch, accumulation=accumulation)
    _check_choices(zero, offload, precision, clipping)
    _check_together(zero, offload, precision, tp, pp, device)
    batch = micro_batch * accumulation * dp
    if train_batch is not None and train_batch != batch:
        raise ValueError(
            f"train_batch={train_batch!r}: micro_batch * accumulation * dp = {micro_batch} * "
            f"{accumulation} * {dp} = {batch} is allowed"
        )
    built: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": batch,
        "gradient_clipping": float(clipping),
        "zero_optimization": {"stage": zero},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,  # never
    }
    if offload != "none":
        built["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        built["zero_force_ds_cpu_optimizer"] = False
    if offload == "parameters":
        built["zero_optimization"]["offload_param"] = {"device": "cpu"}
    if precision != "fp32":
        built[precision] = {"enabled": True}
    if tp > 1:
        del built["train_batch_size"]  # DeepSpeed would hold it against all ranks, tp's included
        built["tensor_parallel"] = {"autotp_size": tp, **_plan(tp_plan)}
    if pp > 1:
        built["pipeline"] = {"stages": pp}
        if recompute:  # re-entrant, DeepSpeed's default, would leave the embedding without gradient
            built["pipeline"] |= {"activation_checkpoint_interval": 1, "use_reentrant": False}
    elif recompute:
        built["activation_checkpointing"] = {"partition_activations": False}
    _merge(built, more)
    check(built)
    return built


def _degrees(world_size: Any, dp: Any, tp: Any, pp: Any) -> int:
    """The data-parallel degree."""
    _check_sizes(world_size=world_size, tp=tp, pp=pp)
    if dp is None:
        if world_size % (tp * pp):
            raise ValueError(
                f"world_size={world_size}: allowed are multiples of tp * pp = {tp} * {pp}"
            )
        return world_size // (tp * pp)
    _check_sizes(dp=dp)
    if dp * tp * pp != world_size:
        raise ValueError(
            f"world_size={world_size}: dp * tp * pp = {dp} * {tp} * {pp} = {dp * tp * pp} is"
            " allowed"
        )
    return dp


def _check_sizes(**sizes: Any) -> None:
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: allowed is a whole number, 1 or more")


def _check_choices(zero: Any, offload: Any, precision: Any, clipping: Any) -> None:
    if isinstance(zero, bool) or zero not in (0, 1, 2, 3):
        raise ValueError(f"zero={zero!r}: allowed are 0, 1, 2 and 3")
    if offload not in OFFLOADS:
        raise ValueError(f"offload={offload!r}: allowed are {', '.join(map(repr, OFFLOADS))}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r}: allowed are {', '.join(map(repr, PRECISIONS))}")
    number = isinstance(clipping, (int, float)) and not isinstance(clipping, bool)
    if not number or not 0 <= clipping < math.inf:
        raise ValueError(f"clipping={clipping!r}: allowed is a norm, 0 (no clipping) or more")


def _check_together(zero: int, offload: str, precision: str, tp: int, pp: int, device: str) -> None:
    _, place = ranks.place(1, device)
    if pp > 1 and zero > 1:
        raise ValueError(
            f"zero={zero}: with pp={pp} allowed are 0 and 1; a pipeline adds up the gradients of "
            "many micro-batches, and stages 2 and 3 would scatter them after each one"
        )
    if pp > 1 and tp > 1:
        raise ValueError(
            f"tp={tp}: with pp={pp} allowed is 1; DeepSpeed's automatic tensor parallelism does not"
            " go into its pipeline module"
        )
    if offload == "optimizer" and zero == 0:
        raise ValueError("zero=0: with offload='optimizer' allowed are 1, 2 and 3")
    if offload == "parameters" and zero != 3:
        raise ValueError(f"zero={zero}: with offload='parameters' allowed is 3")
    if precision == "fp16" and place == "cpu":
        raise ValueError("precision='fp16': on a CPU DeepSpeed allows 'fp32' and 'bf16'")


def _plan(plan: str | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(plan, Mapping):
        return {"partition_config": dict(plan)}
    if plan == "course":
        return {"partition_config": COURSE_PLAN}
    return {"preset_model": plan}  # an unknown one is named by `check`


def _merge(built: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, Mapping) and isinstance(built.get(key), dict):
            _merge(built[key], value)
        else:
            built[key] = value
