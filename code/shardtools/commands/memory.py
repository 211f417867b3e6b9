"""`python -m shardlab memory`: the memory of one rank of a training job.

    python -m shardlab memory --model llama-3-8b --dp 8 --zero 3 --recompute full --unit GiB
    python -m shardlab memory --model gpt-2 --batch 8 --json
    python -m shardlab memory --model llama-3-405b --tp 8 --pp 16 --stages megatron --stage 0
    python -m shardlab memory --config config.json --tp 8 --ep 8 --dp 64 --zero 1 --seq 8192

--json prints whole bytes per rank, whatever the unit: parameters, gradients, optimizer,
activations, buffers, their total on the device; with --model peak, the most that is held at one
moment, which is less than the total; and host, the bytes in the host's memory. These are the bytes
that a program allocates; `strategy plan --explain` adds what an allocator reserves with them.

--config takes any causal model of transformers, from its config.json; its class is built without
numbers, which needs torch and transformers. Its states are exact. Activations include what fused
kernels save, and temporaries of the loss; their peak is not known. Values that the file leaves
open, and the class decides, are printed. --json has the parameters in "count": total, active (of
all experts only those that a token chooses), and the model_type; and those values in "assumed".

The fullest stage of a pipeline is counted, unless --stage names one, from 0. --stages gives the
layers of all stages: equal, megatron or nanotron (these engines' rules), or numbers, as 9,9,8,6.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

from shardlab import memory
from shardlab.common.arguments import check_integer, check_one_of
from shardlab.common.shapes import PRESETS
from shardlab.layout import SCHEDULES, SINGLE_RANK, STAGE_RULES, Layout, Structure, get_structure
from shardtools import options

PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers")
SEQ = 8192  # with --config, most tokens of a sequence by default


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `memory` to the command line."""
    parser = options.command(commands, "memory", __doc__)
    add = partial(options.add, parser)
    add("model", f"a model: {', '.join(PRESETS)}", "NAME")
    add("config", "or the config.json of a model of transformers", "FILE")
    add("dp", "data-parallel degree (1)", "D", int)
    add("tp", "tensor-parallel degree (1)", "T", int)
    add("pp", "pipeline-parallel degree (1)", "P", int)
    add("ranks", "ranks of the whole job; when given, the degrees have to multiply to it", "N", int)
    add("zero", "ZeRO stage: 0, 1, 2 or 3 (0)", "STAGE", int)
    add("precision", "fp32, fp16, bf16, bf16-fp32-gradients or 8-bit (bf16)", "NAME")
    add("optimizer", "sgd, momentum, adam, adamw, or muon for matrices of layers (adamw)", "NAME")
    add("offload", "to the host's memory: none, optimizer or parameters (none)", "WHAT")
    add("batch", "sequences on each rank (1)", "B", int)
    add("seq", "tokens in a sequence (the model's longest; with --config at most 8192)", "S", int)
    add("recompute", "none, selective, full, or operators as norms+ffn (none)", "HOW")
    add("attention", "fused, plain or plain-16 (fused)", "HOW")
    add("microbatches", "in a step of a pipeline (pp or more)", "M", int)
    add("schedule", f"of a pipeline: {', '.join(SCHEDULES)} (1f1b)", "NAME")
    add("chunks", "of the model on each stage, where it is interleaved", "V", int)
    add("stages", "their layers: a rule or numbers (equal)", "LAYERS", _layers)
    add("stage", "the one to count, from 0 (the fullest)", "K", int)
    add("cp", "ranks that share each sequence (1)", "C", int)
    add("ep", "ranks, of the copies, that deal out the experts (1)", "E", int)
    add("etp", "ranks that share each matrix of an expert (as --tp)", "T", int)
    add("replicas", "groups of copies, within which ZeRO shards (1)", "N", int)
    add("device", "whose kernels keep activations: gpu or cpu (gpu)", "KIND")
    options.flag(parser, "sequence-parallel", "cut activations between cut matrices as well")
    add("unit", "of the table: GB (10^9 bytes), GiB (2^30 bytes), MB, MiB, … (GB)", "UNIT")
    options.flag(parser, "json", "print bytes as JSON")
    parser.set_defaults(command=_main)


def _main(chosen: argparse.Namespace) -> int:
    unit = "GB" if chosen.unit is None else chosen.unit
    memory.format_bytes(0, unit)  # refuse an unknown unit before anything is counted
    aside = "command", "json", "unit"
    given = {n: value for n, value in options.given(chosen).items() if n not in aside}
    found, title, unknown = _counted(given)
    print(json.dumps(found) if chosen.json else _table(found, title, unit, unknown))
    return 0


def _counted(settings: dict[str, Any]) -> tuple[dict[str, Any], str, str]:
    """Return bytes per rank by part, a title, and why activations are not known ("" if they are).

    Raises ValueError for bad input.
    """
    options.one_of(settings, "model", "config")
    ranks = settings.pop("ranks", None)
    names = ["dp", "tp", "pp", *["cp"] * ("cp" in settings)]
    layout = _layout(settings)
    if ranks is not None:
        layout.check_world_size(ranks)
    check_integer(seq=settings.get("seq", 1))
    check_integer(0, layout.pp - 1, stage=settings.get("stage", 0))
    more: dict[str, Any] = {}
    unknown = ""
    if "model" in settings:
        name = settings.pop("model")
        check_one_of(PRESETS, model=name)
        model = get_structure(PRESETS[name])
        counted = memory.estimate_step(PRESETS[name], layout, **({"device": "gpu"} | settings))
        more["peak"], seq = counted.peak, settings.get("seq", model.seq)
    else:
        model, name = _model(settings)
        seq = settings.setdefault("seq", min(model.seq, SEQ))
        counted = memory.estimate_structure(model, layout, **settings)
        numbers = {
            "total": model.num_params,
            "active": model.num_active_params,
            "model_type": model.model_type,
        }
        more |= {"count": numbers, "assumed": list(model.assumptions)}
        unknown = model.unsupported_reason and f"unknown: {model.unsupported_reason}"
    found = {part: getattr(counted, part, 0) for part in PARTS}
    found |= {"total": sum(found.values()), **more, "host": counted.host}
    degrees = " × ".join(f"{axis} {getattr(layout, axis)}" for axis in names)
    degrees += f" = {layout.world_size} rank{'s' * (layout.world_size > 1)}"
    active = more.get("count", {}).get("active", model.num_params)
    some = f" ({active / 1e9:.4g} of them active)" if active < model.num_params else ""
    settings = {"precision": "bf16", "optimizer": "adamw"} | settings
    title = (
        f"{name} of {model.num_params / 1e9:.4g} billion parameters{some}, "
        f"{settings['precision']}, {settings['optimizer']}, "
        f"{layout.micro_batch} × {seq:,} tokens on each rank\n"
        f"{degrees}, ZeRO stage {layout.zero}"
    )
    if model.experts and layout.world_size > 1:
        title += f"; experts over {layout.ep}, each matrix of one over {layout.expert_tp} (--etp)"
    return found, title, unknown


def _model(settings: dict[str, Any]) -> tuple[Structure, str]:
    """Return the model that --config names, and its name; take the option out of `settings`."""
    from shardtools import hub  # imported here: no page's calculator needs it

    if settings.pop("device", "gpu") != "gpu":
        raise ValueError("--device with --config: allowed is gpu")
    path = Path(settings.pop("config"))
    found = hub.read(path)
    return found, f"{found.model_type} ({path.name})"


def _layout(settings: dict[str, Any]) -> Layout:
    """Return the layout that the options describe, and take them out of `settings`.

    By default a pipeline has as many micro-batches as it can hold.
    """
    fields = {name: settings.pop(name) for name in vars(SINGLE_RANK) if name in settings}
    if "batch" in settings:
        check_integer(batch=settings["batch"])
        fields["micro_batch"] = settings.pop("batch")
    if fields.get("pp", 1) != 1:
        many = 1 if fields.get("schedule") == "gpipe" else 2
        fields.setdefault("microbatches", many * fields["pp"])
    return Layout(**fields)


def _table(found: dict[str, Any], title: str, unit: str, unknown: str) -> str:
    """Format the counts of `_counted` as a table."""
    sizes = {part: memory.format_bytes(found[part], unit) for part in (*PARTS, "total")}
    if unknown:
        sizes |= dict.fromkeys(("activations", "buffers"), unknown)
        sizes["total of the states"] = sizes.pop("total")
    rows = list(sizes.items())
    if "peak" in found:
        rows.append(("most at one moment", memory.format_bytes(found["peak"], unit)))
    if found["host"]:
        rows.append(("in the host’s memory", memory.format_bytes(found["host"], unit)))
    wide = max(len(name) for name, _ in rows)
    far = max(len(size) for _, size in rows)
    lines = [f"  {name:<{wide}}  {size:>{far}}" for name, size in rows]
    rule = "  " + "-" * (wide + 2 + far)
    lines.insert(len(PARTS), rule)
    said = [f"  assumed: {words}" for words in found.get("assumed", ())]
    return "\n".join([title, "", "  on each rank", *lines, *[""] * bool(said), *said])


def _layers(given: str) -> str | tuple[int, ...]:
    """Return a rule's name, or the layers of each stage, from 9,9,8,6."""
    return given if given in STAGE_RULES else tuple(map(int, given.split(",")))
