"""Options of the course's own script, `train.py`, which needs only PyTorch.

Its model is a plain GPT, to be replaced by yours: the options give its sizes and its layout.
"""

from __future__ import annotations

from .target import Row, Target, annotate_lines

FILE_NAME = "options.sh"
STRATEGIES = "ddp", "zero1", "zero2", "fsdp2"  # indexed by the stage of ZeRO


def render_file(target: Target) -> str:
    """Return the options as a shell array. Raises ValueError for features that the script lacks."""
    _check_target(target)
    lines = [
        *(f"# {line}" for line in target.title_lines()),
        "# Options of the course's train.py. Put your model in place of its plain GPT of",
        "# 256 tokens: the predicted seconds and bytes are your model's.",
        *(f"#   {line}" for line in target.torchrun_lines('train.py "${options[@]}"')),
        "options=(",
        *annotate_lines(_option_rows(target), indent=4),
        ")",
        "",
    ]
    return "\n".join(lines)


def _option_rows(target: Target) -> list[Row]:
    layout, c, why = target.layout, target.config, target.reasons
    return [
        (True, f"--layers {c.layers}", "of the script's own GPT"),
        (True, f"--hidden {c.hidden}", "width of the residual stream"),
        (True, f"--heads {c.heads}", "of attention"),
        (True, f"--seq {target.seq}", "tokens of a sequence"),
        (True, f"--batch {layout.global_batch}", why["batch"]),
        (True, f"--micro {layout.micro_batch}", why["micro_batch"]),
        (True, f"--strategy {STRATEGIES[layout.zero]}", why["zero"]),
        (True, f"--tensor {layout.tp}", why["tensor"]),
        (True, f"--precision {target.half_dtype}", why["half"]),
    ]


def _check_target(target: Target) -> None:
    layout = target.layout
    target.check_allowed(pp=[1], cp=[1], ep=[1], replicas=[1], recompute=["none"], offload=["none"])
    if layout.tp > 1:  # with fully_shard, in bf16, without sequence parallelism
        target.check_allowed("tp > 1", sequence_parallel=[False], zero=[1, 2, 3])
    if layout.tp > 1 and target.half_dtype == "fp16":
        raise target.make_error(f"tp={layout.tp}", "be 1", "precision='fp16'")
