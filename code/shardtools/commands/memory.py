"""Predict the memory of one rank of a training job.

    python -m shardlab memory --model llama-3-8b --dp 8 --zero 3 --recompute full --unit GiB
    python -m shardlab memory --model gpt-2 --batch 8 --json
    python -m shardlab memory --model llama-3-405b --tp 8 --pp 16 --stages megatron --stage 0
    python -m shardlab memory --config config.json --tp 8 --ep 8 --dp 64 --zero 1 --seq 8192

--json prints whole bytes per rank, whatever the unit: parameters, gradients, optimizer,
activations, buffers, and their total on the device; with --model also the peak, which is less than
the total because not all parts live at once; and the bytes in the host's memory. All are allocated
bytes; `strategy plan --explain` adds the memory that the allocator reserves beyond them.

--config takes any causal model of transformers, from its config.json; its class is built on the
meta device, which needs torch and transformers. Model states are exact. Activations include the
tensors that fused kernels save, and temporaries of the loss; their peak is not known. Defaults of
the class for values that the file omits are printed, and in "assumed" of --json, whose "count" has
the parameters: total, active (with only the experts that a token uses), and the model_type.

Of a pipeline the stage with the most memory is counted, or --stage, from 0. --stages gives the
layers of each stage: equal, megatron or nanotron (rules of these engines), or numbers: 9,9,8,6.
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


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `memory` to the command line."""
    parser = options.add_parser(commands, "memory", __doc__)
    add = partial(options.add_option, parser)
    add("model", f"a preset: {', '.join(PRESETS)}", "NAME")
    add("config", "or the config.json of a transformers model", "FILE")
    add("dp", "data-parallel degree (1)", "D", int)
    add("tp", "tensor-parallel degree (1)", "T", int)
    add("pp", "pipeline-parallel degree (1)", "P", int)
    add("ranks", "ranks of the whole job, to check the product of the degrees", "N", int)
    add("zero", "ZeRO stage: 0, 1, 2 or 3 (0)", "STAGE", int)
    add("precision", "fp32, fp16, bf16, bf16-fp32-gradients or 8-bit (bf16)", "NAME")
    add("optimizer", "sgd, momentum, adam, adamw, or muon for the layers' matrices (adamw)", "NAME")
    add("offload", "states kept in the host's memory: none, optimizer or parameters (none)", "WHAT")
    add("batch", "sequences on each rank (1)", "B", int)
    add("seq", "tokens per sequence (the model's longest, at most 8192)", "S", int)
    add("recompute", "activations: none, selective, full, or operators: norms+ffn (none)", "HOW")
    add("attention", "implementation: fused, plain or plain-16 (fused)", "HOW")
    add("microbatches", "micro-batches per step of the pipeline (2 pp; with gpipe pp)", "M", int)
    add("schedule", f"of the pipeline: {', '.join(SCHEDULES)} (1f1b)", "NAME")
    add("chunks", "model chunks on each stage, if interleaved", "V", int)
    add("stages", "layers of each stage: a rule or numbers (equal)", "LAYERS", _parse_layers)
    add("stage", "stage to count, from 0 (the one with the most memory)", "K", int)
    add("cp", "context-parallel degree (1)", "C", int)
    add("ep", "expert-parallel degree, within dp (1)", "E", int)
    add("etp", "tensor-parallel degree of the experts (as --tp)", "T", int)
    add("replicas", "replicas of the ZeRO shards, as in HSDP (1)", "N", int)
    add("device", "device whose kernels save activations: gpu or cpu (gpu)", "KIND")
    words = "split activations outside tensor parallelism by tokens"
    options.add_flag(parser, "sequence-parallel", words)
    add("unit", "of the table: GB (10^9 bytes), GiB (2^30 bytes), MB, MiB, … (GB)", "UNIT")
    options.add_flag(parser, "json", "print bytes as JSON")
    parser.set_defaults(command=_main)


def _main(args: argparse.Namespace) -> int:
    unit = "GB" if args.unit is None else args.unit
    memory.format_bytes(0, unit)  # refuse an unknown unit before anything is counted
    other = "command", "json", "unit"
    given = {n: value for n, value in options.collect_options(args).items() if n not in other}
    found, title, unknown = _count_memory(given)
    print(json.dumps(found) if args.json else _format_table(found, title, unit, unknown))
    return 0


def _count_memory(settings: dict[str, Any]) -> tuple[dict[str, Any], str, str]:
    """Return bytes per rank by part, a title, and the reason for unknown activations, or "".

    Raises ValueError for bad input.
    """
    options.check_exactly_one(settings, "model", "config")
    ranks = settings.pop("ranks", None)
    names = ["dp", "tp", "pp", *["cp"] * ("cp" in settings)]
    layout = _build_layout(settings)
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
        seq = settings.setdefault("seq", min(model.seq, options.MAX_DEFAULT_SEQ))
        counted = memory.estimate_step(PRESETS[name], layout, **({"device": "gpu"} | settings))
        more["peak"] = counted.peak
    else:
        model, name = _read_model(settings)
        seq = settings.setdefault("seq", min(model.seq, options.MAX_DEFAULT_SEQ))
        counted = memory.estimate_structure(model, layout, **settings)
        numbers = {"total": model.num_params, "active": model.num_active_params}
        more["count"] = numbers | {"model_type": model.model_type}
        more["assumed"] = list(model.assumptions)
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
        f"{layout.micro_batch} × {options.format_seq(seq, model.seq)} on each rank\n"
        f"{degrees}, ZeRO stage {layout.zero}"
    )
    if model.experts and layout.world_size > 1:
        title += f"; experts over {layout.ep}, each matrix of one over {layout.expert_tp} (--etp)"
    return found, title, unknown


def _read_model(settings: dict[str, Any]) -> tuple[Structure, str]:
    """Return the model that --config names, and its name; remove the option from `settings`."""
    from shardtools import hub  # imported here: no page's calculator needs it

    if settings.pop("device", "gpu") != "gpu":
        raise ValueError("device: must be gpu with --config")
    path = Path(settings.pop("config"))
    found = hub.read_structure(path)
    return found, f"{found.model_type} ({path.name})"


def _build_layout(settings: dict[str, Any]) -> Layout:
    """Return the layout that the options describe, and remove them from `settings`."""
    fields = {name: settings.pop(name) for name in vars(SINGLE_RANK) if name in settings}
    if "batch" in settings:
        check_integer(batch=settings["batch"])
        fields["micro_batch"] = settings.pop("batch")
    if fields.get("pp", 1) != 1:
        per_stage = 1 if fields.get("schedule") == "gpipe" else 2
        fields.setdefault("microbatches", per_stage * fields["pp"])
    return Layout(**fields)


def _format_table(found: dict[str, Any], title: str, unit: str, unknown: str) -> str:
    """Format the counts of `_count_memory` as a table."""
    sizes = {part: memory.format_bytes(found[part], unit) for part in (*PARTS, "total")}
    if unknown:
        sizes |= dict.fromkeys(("activations", "buffers"), unknown)
        sizes["total of the states"] = sizes.pop("total")
    rows = list(sizes.items())
    if "peak" in found:
        rows.append(("most at one moment", memory.format_bytes(found["peak"], unit)))
    if found["host"]:
        rows.append(("in the host’s memory", memory.format_bytes(found["host"], unit)))
    name_width = max(len(name) for name, _ in rows)
    size_width = max(len(size) for _, size in rows)
    lines = [f"  {name:<{name_width}}  {size:>{size_width}}" for name, size in rows]
    rule = "  " + "-" * (name_width + 2 + size_width)
    lines.insert(len(PARTS), rule)
    notes = [f"  assumed: {words}" for words in found.get("assumed", ())]
    notes.append("  allocated bytes: strategy plan adds what the allocator reserves beyond them")
    return "\n".join([title, "", "  on each rank", *lines, "", *notes])


def _parse_layers(given: str) -> str | tuple[int, ...]:
    return given if given in STAGE_RULES else tuple(map(int, given.split(",")))
