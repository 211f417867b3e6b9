"""`python -m shardlab memory`: what one rank of a training job holds.

    python -m shardlab memory --params 7.5e9 --dp 64 --zero 1
    python -m shardlab memory --model llama-3-8b --dp 8 --zero 3 --recompute full --unit GiB
    python -m shardlab memory --model gpt-2 --batch 8 --json

With --params alone there is no shape, so nothing can be said about activations and buffers: they
count as 0, and the table says so. --json prints whole bytes per rank, whatever the unit:
parameters, gradients, optimizer, activations, buffers, their total on the device; with --model
peak, the most that is held at one moment, which is less; and host, what is kept in the host's
memory instead.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

from shardlab import memory, options
from shardlab.shapes import PRESETS, Config

PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers")
# Options that say something about activations, and so need a model's shape.
SHAPED = ("batch", "seq", "recompute", "attention", "device", "microbatches", "sequence_parallel")
WHOLE = ("zero", "dp", "tp", "pp", "batch", "seq", "ranks", "microbatches")


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `memory` to the command line."""
    words = "what one rank of a training job holds, in bytes"
    parser = options.command(commands, "memory", words, __doc__)
    add = partial(options.add, parser)
    add("params", "number of parameters, for example 7.5e9", "P")
    add("model", f"or a model: {', '.join(PRESETS)}", "NAME")
    add("dp", "data-parallel degree (1)", "D")
    add("tp", "tensor-parallel degree (1)", "T")
    add("pp", "pipeline-parallel degree (1)", "P")
    add(
        "ranks", "ranks of the whole job; when given, the three degrees have to multiply to it", "N"
    )
    add("zero", "ZeRO stage: 0, 1, 2 or 3 (0)", "STAGE")
    add("precision", "fp32, fp16, bf16, bf16-fp32-gradients or 8-bit (bf16)", "NAME")
    add("optimizer", "sgd, momentum, adam or adamw (adamw)", "NAME")
    add("offload", "to the host's memory: none, optimizer or parameters (none)", "WHAT")
    add("batch", "sequences on each rank (1); with --model", "B")
    add("seq", "tokens in a sequence (the model's longest); with --model", "S")
    add("recompute", "none, selective or full (none); with --model", "HOW")
    add("attention", "fused or plain (fused); with --model", "HOW")
    add("microbatches", "in a step of a pipeline (pp or more); with --model", "M")
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
    degrees = [settings.get(name, 1) for name in ("dp", "tp", "pp")]
    if ranks is not None and ranks != degrees[0] * degrees[1] * degrees[2]:
        d, t, p = degrees
        raise ValueError(
            f"ranks={ranks}: allowed is {d * t * p}, the product of dp={d}, tp={t} and pp={p}"
        )
    if "model" in settings:
        name = settings.pop("model")
        config = _config(name)
        counted = memory.estimate(config, **({"device": "gpu"} | settings))
        batch, seq = settings.get("batch", 1), settings.get("seq", config.seq)
        params, of = memory.parameter_count(config), f", {batch} × {seq:,} tokens on each rank"
        activations, buffers = counted.activations, counted.buffers
    else:
        needs = [name for name in SHAPED if name in settings]
        if needs:
            option = "--" + needs[0].replace("_", "-")
            raise ValueError(
                f"{option} with --params: allowed with --model ({', '.join(PRESETS)}), because "
                "activations follow from a model's shape"
            )
        params = _parameters(settings.pop("params"))
        counted, name, of = memory.states(params, **settings), "a model", ""
        activations = buffers = 0
    found = {part: getattr(counted, part) for part in PARTS[:3]}
    found |= {"activations": activations, "buffers": buffers}
    found["total"] = sum(found.values())
    if name != "a model":
        found["peak"] = counted.peak
    found["host"] = counted.host
    d, t, p = degrees
    title = (
        f"{name} of {params / 1e9:.4g} billion parameters, {settings.get('precision', 'bf16')}, "
        f"{settings.get('optimizer', 'adamw')}{of}\n"
        f"dp {d} × tp {t} × pp {p} = {d * t * p} rank{'s' * (d * t * p > 1)}, "
        f"ZeRO stage {settings.get('zero', 0)}"
    )
    return found, title


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


def _config(name: str) -> Config:
    if name not in PRESETS:
        raise ValueError(f"model={name!r}: allowed are {', '.join(PRESETS)}")
    return PRESETS[name]


def _whole(name: str, given: str) -> int:
    return options.whole(name, given, *((0, "0, 1, 2 and 3") if name == "zero" else ()))


def _parameters(given: str) -> int:
    """A number of parameters, written as 7500000000 or 7.5e9."""
    try:
        value = float(given)
        whole = int(value)
    except (ValueError, OverflowError):  # not a number at all; nan; infinity
        raise ValueError(f"params={given!r}: allowed are numbers above 0, as 7.5e9") from None
    if whole < 1 or whole != value:
        raise ValueError(f"params={given}: allowed are whole numbers above 0, as 7.5e9")
    return whole
