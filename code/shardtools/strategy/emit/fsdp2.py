"""A script that trains the course's plain GPT with torch's fully_shard, for torch 2.13.

A stage of ZeRO is what fully_shard is told to do between forward, backward and micro-batches:

    ZeRO  weights                     gradients                         fully_shard over
    0     whole                       whole, sent with the last one     groups of one rank
    1     gathered once a step        whole, sent with the last one     all copies, or a group
    2     gathered once a step        sent with each, a share is kept   the same
    3     gathered for each layer     sent with each, a share is kept   the same
"""

from __future__ import annotations

from typing import Any

from .target import Target, beside, filled, wrapped

FILE = "train_fsdp2.py"


def write(target: Target, job: bool = False) -> str:
    """The text of the script; ValueError for what fully_shard and DTensor cannot do.

    job: with checkpoints and options, by `loop.py`.
    """
    _check(target)
    return wrapped(filled(FILE, target, job=job, **_words(target)))


def _words(target: Target) -> dict[str, Any]:
    """What the template asks and fills in."""
    at = target.layout
    tp, fp16 = at.tp > 1, target.half == "fp16"
    repeat = at.dp if at.zero == 0 else at.replicas
    mesh = {"repeat": repeat, "shard": at.dp // repeat, "tensor": at.tp}
    groups = at.replicas > 1 or at.zero == 0
    if not groups:
        del mesh["repeat"]
    if not tp:
        del mesh["tensor"]
    gate = ["ffn.gate"] if target.config.mlp == "swiglu" else []
    columns = ["attention.query", "attention.key", "attention.value", "ffn.up", *gate]
    dtype = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[target.half]
    settings = [
        *target.of_a_step(),
        (f"DTYPE = {dtype}", target.why_half()),
    ]
    return {
        "title": "\n".join(target.title()),
        "launch": "\n".join(target.torchrun(FILE)),
        "shape": target.shape(),
        "settings": "\n".join(beside(settings)),
        "columns": ", ".join(f'"{name}"' for name in columns),
        "sizes": tuple(mesh.values()),
        "names": repr(tuple(mesh)).replace("'", '"'),
        "tp": tp,
        "tokens": at.sequence_parallel,
        "tied": target.config.tied,
        "full": at.recompute == "full",
        "groups": groups,
        "host": at.offload == "parameters",
        "fp16": fp16,
        "many": at.microbatches > 1,
        "backward": "scaler.scale(value).backward()" if fp16 else "value.backward()",
    }


def _check(target: Target) -> None:
    at = target.layout
    if at.pp > 1:
        why = "fully_shard and DTensor cut no stages; nearest are torchtitan and megatron"
        raise target.refusal(f"pp={at.pp}", "is 1", why)
    if at.cp > 1:
        why = "torch's context parallelism is experimental; nearest are torchtitan and megatron"
        raise target.refusal(f"cp={at.cp}", "is 1", why)
    if at.offload == "optimizer":
        why = "its offload takes weights along; nearest is 'parameters', with zero=3"
        raise target.refusal("offload='optimizer'", "are 'none' and 'parameters'", why)
    if at.recompute == "selective":
        why = "torch's fused attention keeps no scores; nearest is 'none', which is no larger"
        raise target.refusal("recompute='selective'", "are 'none' and 'full'", why)
    target.check_vocab()
