"""`python -m shardlab memory`: what one rank of a training job holds.

    python -m shardlab memory --params 7.5e9 --dp 64 --zero 1
    python -m shardlab memory --model llama-3-8b --dp 8 --zero 3 --recompute full --unit GiB
    python -m shardlab memory --model gpt-2 --batch 8 --json
    python -m shardlab memory --model llama-3-405b --tp 8 --pp 16 --stages megatron --stage 0

With --params alone there is no shape, so nothing can be said about activations and buffers: they
count as 0, and the table says so. --json prints whole bytes per rank, whatever the unit:
parameters, gradients, optimizer, activations, buffers, their total on the device; with --model
peak, the most that is held at one moment, which is less; and host, what is kept in the host's
memory instead. All of it is what a program holds: what an allocator reserves with it is in
`strategy --explain`.

Of a pipeline's stages the fullest is counted, unless --stage names one, from 0. --stages says which
layers they have: equal, megatron or nanotron (as these cut), or numbers, as 9,9,8,6.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

from shardlab import memory, options
from shardlab.arguments import check_one_of
from shardlab.layout import ALONE, SCHEDULES, STAGE_RULES, Layout
from shardlab.memory.units import whole
from shardlab.shapes import PRESETS

PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers")
# Options that say something about activations, and so need a model's shape.
SHAPED = (
    "batch", "seq", "recompute", "attention", "device", "microbatches", "sequence_parallel", "cp",
    "replicas", "stages", "stage", "schedule", "chunks", "ep",
)  # fmt: skip
WHOLE = (
    "zero", "dp", "tp", "pp", "batch", "seq", "ranks", "microbatches", "cp", "replicas", "stage",
    "chunks", "ep",
)  # fmt: skip


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `memory` to the command line."""
    parser = options.command(commands, "memory", __doc__)
    add = partial(options.add, parser)
    add("params", "number of parameters, for example 7.5e9", "P")
    add("model", f"or a model: {', '.join(PRESETS)}", "NAME")
    add("dp", "data-parallel degree (1)", "D")
    add("tp", "tensor-parallel degree (1)", "T")
    add("pp", "pipeline-parallel degree (1)", "P")
    add("ranks", "ranks of the whole job; when given, the degrees have to multiply to it", "N")
    add("zero", "ZeRO stage: 0, 1, 2 or 3 (0)", "STAGE")
    add("precision", "fp32, fp16, bf16, bf16-fp32-gradients or 8-bit (bf16)", "NAME")
    add("optimizer", "sgd, momentum, adam or adamw (adamw)", "NAME")
    add("offload", "to the host's memory: none, optimizer or parameters (none)", "WHAT")
    add("batch", "sequences on each rank (1); with --model", "B")
    add("seq", "tokens in a sequence (the model's longest); with --model", "S")
    words = "none, selective, full, or operators as norms+ffn (none); with --model"
    add("recompute", words, "HOW")
    add("attention", "fused, plain or plain-16 (fused); with --model", "HOW")
    add("microbatches", "in a step of a pipeline (pp or more); with --model", "M")
    add("schedule", f"of a pipeline: {', '.join(SCHEDULES)} (1f1b); with --model", "NAME")
    add("chunks", "of the model on each stage, where it is interleaved; with --model", "V")
    add("stages", "their layers: a rule or numbers (equal); with --model", "LAYERS")
    add("stage", "the one to count, from 0 (the fullest); with --model", "K")
    add("cp", "ranks that share each sequence (1); with --model", "C")
    add("ep", "ranks, of the copies, that deal out the experts (1); with --model", "E")
    add("replicas", "groups of copies, within which ZeRO shards (1); with --model", "N")
    add("device", "whose kernels keep activations: gpu or cpu (gpu); with --model", "KIND")
    parser.add_argument(
        "--sequence-parallel",
        action="store_true",
        default=None,
        help="cut activations between tensor-parallel regions as well; with --model",
    )
    add("unit", "of the table: GB (10^9 bytes), GiB (2^30 bytes), MB, MiB, … (GB)", "UNIT")
    parser.add_argument("--json", action="store_true", help="print bytes as JSON")
    parser.set_defaults(command=_main)


def _main(chosen: argparse.Namespace) -> int:
    given = {
        name: value
        for name, value in vars(chosen).items()
        if value is not None and name not in ("command", "json", "unit")
    }
    unit = "GB" if chosen.unit is None else chosen.unit
    memory.format_bytes(0, unit)  # an unknown unit is refused before anything is counted
    found, title = _counted(given)
    if chosen.json:
        print(json.dumps(found))
    else:
        print(_table(found, title, unit, known="model" in given))
    return 0


def _counted(given: dict[str, Any]) -> tuple[dict[str, int], str]:
    """Bytes per rank by part, and a line that says of what. Raises ValueError for bad input."""
    settings = {n: _whole(n, v) if n in WHOLE else v for n, v in given.items()}
    if ("params" in settings) == ("model" in settings):
        both = "params" in settings
        raise ValueError(
            f"{'--params and --model' if both else 'neither --params nor --model'}: allowed is "
            f"exactly one of --params (a number) and --model ({', '.join(PRESETS)})"
        )
    ranks = settings.pop("ranks", None)
    said = [name for name in settings if name in SHAPED]
    layout = _layout(settings)
    if ranks is not None:
        layout.check(ranks)
    if "model" in settings:
        name = settings.pop("model")
        check_one_of(PRESETS, model=name)
        config = PRESETS[name]
        counted = memory.estimate(config, layout, **({"device": "gpu"} | settings))
        batch, seq = layout.micro_batch, settings.get("seq", config.seq)
        params, of = memory.parameter_count(config), f", {batch} × {seq:,} tokens on each rank"
        activations, buffers = counted.activations, counted.buffers
    else:
        if said:
            option = "--" + said[0].replace("_", "-")
            raise ValueError(
                f"{option} with --params: allowed with --model ({', '.join(PRESETS)}), because "
                "activations follow from a model's shape"
            )
        params = _parameters(settings.pop("params"))
        counted, name, of = memory.states(params, layout, **settings), "a model", ""
        activations = buffers = 0
    found = {part: getattr(counted, part) for part in PARTS[:3]}
    found |= {"activations": activations, "buffers": buffers}
    found["total"] = sum(found.values())
    if name != "a model":
        found["peak"] = counted.peak
    found["host"] = counted.host
    names = ["dp", "tp", "pp", *["cp"] * ("cp" in said)]
    degrees = " × ".join(f"{axis} {getattr(layout, axis)}" for axis in names)
    title = (
        f"{name} of {params / 1e9:.4g} billion parameters, {settings.get('precision', 'bf16')}, "
        f"{settings.get('optimizer', 'adamw')}{of}\n"
        f"{degrees} = {layout.ranks} rank{'s' * (layout.ranks > 1)}, ZeRO stage {layout.zero}"
    )
    return found, title


def _layout(settings: dict[str, Any]) -> Layout:
    """What the options say of a layout, taken out of `settings`.

    Of a pipeline's micro-batches there are as many as it can keep, unless an option says how many.
    """
    fields = {name: settings.pop(name) for name in vars(ALONE) if name in settings}
    if "batch" in settings:
        fields["micro_batch"] = settings.pop("batch")
    if "stages" in fields:
        fields["stages"] = _stages(fields["stages"])
    if fields.get("pp", 1) > 1:
        many = 1 if fields.get("schedule") == "gpipe" else 2
        fields.setdefault("microbatches", many * fields["pp"])
    return Layout(**fields)


def _table(found: dict[str, int], title: str, unit: str, known: bool) -> str:
    rows = [(part, memory.format_bytes(found[part], unit)) for part in (*PARTS, "total")]
    if known:
        rows.append(("most at one moment", memory.format_bytes(found["peak"], unit)))
    if not known:
        unknown = "unknown without --model"
        rows = [(name, unknown if name in PARTS[3:] else size) for name, size in rows]
        rows[-1] = ("total of the states", rows[-1][1])
    if found["host"]:
        rows.append(("in the host’s memory", memory.format_bytes(found["host"], unit)))
    wide = max(len(name) for name, _ in rows)
    far = max(len(size) for _, size in rows)
    lines = [f"  {name:<{wide}}  {size:>{far}}" for name, size in rows]
    rule = "  " + "-" * (wide + 2 + far)
    lines.insert(len(PARTS), rule)
    return "\n".join([title, "", "  on each rank", *lines])


def _whole(name: str, given: str) -> int:
    bounds = {"zero": (0, 3), "stage": (0,)}
    return options.whole(name, given, *bounds.get(name, ()))


def _stages(given: str) -> str | tuple[int, ...]:
    """A rule's name, or the layers of each stage, written as 9,9,8,6."""
    if given in STAGE_RULES:
        return given
    try:
        return tuple(int(n) for n in given.split(","))
    except ValueError:
        rules = ", ".join(STAGE_RULES)
        raise ValueError(f"stages={given!r}: allowed are {rules}, or as 9,9,8,6") from None


def _parameters(given: str) -> int:
    """A number of parameters, written as 7500000000 or 7.5e9."""
    return whole("params", options.number("params", given, "numbers above 0, as 7.5e9"))
