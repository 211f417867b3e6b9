"""Options of the course's own script, `train.py`, which needs PyTorch alone.

Its model is a plain GPT, in whose place yours goes: the options say its sizes and its layout.
"""

from __future__ import annotations

from .target import Target, beside

FILE = "options.sh"
STRATEGIES = "ddp", "zero1", "zero2", "fsdp2"  # by the stage of ZeRO
DTYPES = {"bf16": "bf16", "fp16": "fp16"}


def write(target: Target) -> str:
    """A list of options, for a shell; ValueError for what the script cannot do."""
    _check(target)
    lines = [
        *(f"# {line}" for line in target.title()),
        "# Options of the course's train.py:",
        *(f"#   {line}" for line in target.torchrun('train.py "${options[@]}"')),
        "options=(",
        *beside(_rows(target), indent=4),
        ")",
        "",
    ]
    return "\n".join(lines)


def _rows(target: Target) -> list[tuple[str, str]]:
    at, c = target.layout, target.config
    return [
        (f"--layers {c.layers}", "of the script's own GPT: your model goes in its place"),
        (f"--hidden {c.hidden}", "width of what goes from layer to layer"),
        (f"--heads {c.heads}", "of attention"),
        (f"--seq {target.seq}", "tokens of a sequence"),
        (f"--batch {at.batch}", target.why["batch"]),
        (f"--micro {at.micro_batch}", target.why["micro_batch"]),
        (f"--strategy {STRATEGIES[at.zero]}", target.why["zero"]),
        (f"--tensor {at.tp}", target.why["tensor"]),
        (f"--precision {target.half}", target.why["half"]),
    ]


def _check(target: Target) -> None:
    at = target.layout
    for name in ("pp", "cp", "ep", "replicas"):
        if getattr(at, name) > 1:
            why = "train.py has copies and tensor ranks; nearest are torchtitan and megatron"
            raise target.refusal(f"{name}={getattr(at, name)}", "is 1", why)
    if at.recompute != "none" or at.offload != "none":
        given = f"recompute={at.recompute!r}, offload={at.offload!r}"
        why = "call torch.utils.checkpoint in your model, or take torchtitan, which has both"
        raise target.refusal(given, "are 'none'", why)
    if at.sequence_parallel and at.tp > 1:
        why = "it keeps whole what stands between the cut matrices"
        raise target.refusal("sequence_parallel=True", "is False", why)
    if at.tp > 1 and (at.zero == 0 or target.half == "fp16"):
        why = "it cuts matrices with fully_shard, in bf16; nearest is zero=1"
        raise target.refusal(f"tp={at.tp}", f"with zero={at.zero} and {target.half} is 1", why)
