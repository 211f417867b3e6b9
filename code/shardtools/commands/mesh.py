"""Train a small GPT on a mesh of ranks of this machine, and compare it with one process.

    python -m shardlab mesh --dp 2 --tp 2 --pp 2 --zero 1 --layers 4 --hidden 32 --steps 5
    python -m shardlab mesh --dp 2 --tp 2 --zero 3 --sequence-parallel --json
    python -m shardlab mesh --tp 2 --hidden 64 --budget 3e6
    python -m shardlab mesh --dp 2 --tp 2 --pp 2 --node 4 --order tp,pp,dp

It starts dp · pp · tp ranks and prints for each rank the bytes of its model states (parameters,
gradients, optimizer) and the bytes that it sends along each axis, predicted and counted; tokens per
second; and the largest differences from one process that trains the same batches.
--budget limits the bytes of tensors that a rank holds at its peak. A job whose predicted model
states need more is not started; of any other job the peak is counted as it trains. If a rank needs
more, the exit status is 1. --json prints everything as one object.

With --node, the number of ranks on a node, nothing is trained: the command prints the groups of
each axis, and which of them span several nodes. --order lists the axes, the outermost first.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from shardlab.common.arguments import check_integer, check_number
from shardlab.common.shapes import Config
from shardlab.layout import Layout
from shardlab.mesh.groups import describe_axis
from shardtools import options

if TYPE_CHECKING:
    from shardlab.mesh.job import Job

AXES = "dp", "pp", "tp"
MAX_PRINTED_RANKS = 512
INTEGER_OPTIONS = {  # option: default, help
    "dp": (1, "data-parallel degree"),
    "tp": (1, "tensor-parallel degree"),
    "pp": (1, "pipeline-parallel degree"),
    "zero": (0, "ZeRO stage over the dp ranks: 0 to 3"),
    "layers": (2, "layers of the model"),
    "hidden": (32, "width of the model"),
    "heads": (2, "attention heads"),
    "seq": (32, "tokens per sequence"),
    "batch": (8, "sequences per step, over all dp ranks"),
    "microbatches": (None, "micro-batches per step and dp rank (as many as stages)"),
    "chunks": (None, "model chunks on each stage (1; interleaved: 2)"),
    "steps": (5, "training steps, 3 or more"),
}


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `mesh` to the command line."""
    parser = options.add_parser(commands, "mesh", __doc__)
    add = partial(options.add_option, parser)
    for name, (default, help) in INTEGER_OPTIONS.items():
        add(name, help if default is None else f"{help} ({default})", "N", int)
    add("schedule", "pipeline schedule: naive, gpipe, 1f1b or interleaved (1f1b)", "NAME")
    add("recompute", "activations of the blocks recomputed in backward: full or none (none)", "HOW")
    add("budget", "most bytes of tensors on a rank, at its peak", "BYTES", float)
    add("node", "ranks per node: print the groups, and train nothing", "N", int)
    add("order", "axes of the mesh, the outermost first (dp,pp,tp)", "AXES", _parse_axes)
    words = "split activations outside tensor parallelism by tokens"
    options.add_flag(parser, "sequence-parallel", words)
    options.add_flag(parser, "untied", "do not share the weights of embedding and head")
    options.add_flag(parser, "json", "print everything as JSON")
    parser.set_defaults(command=_main)


def _main(args: argparse.Namespace) -> int:
    if args.node is not None:
        training = [name for name in INTEGER_OPTIONS if name not in AXES]
        training += ["schedule", "recompute", "budget", "sequence_parallel", "untied"]
        reason = "cannot be used with --node, which trains nothing"
        options.refuse_options(options.collect_options(args), training, reason)
        print(_format_groups(args))
        return 0
    job = build_job(args)
    if (budget := args.budget) is not None:
        check_number(budget=budget)
        states = max(
            sum(job.predict_state_bytes(rank).values()) for rank in range(job.layout.world_size)
        )
        if states > budget:
            return _print_verdict(args, {}, states, "of model states")
    from shardlab.mesh.job import run  # loads torch

    found = run(job)
    text = "" if args.json else format_results(job, found)
    if budget is not None:
        peak = max(one["peak"] for one in found["ranks"])
        return _print_verdict(args, found, peak, "at its peak", text)
    print(text or json.dumps(found))
    return 0


def _print_verdict(
    args: argparse.Namespace, found: dict[str, Any], needs: int, what: str, text: str = ""
) -> int:
    """Print whether the bytes that a rank needs are within the budget; return the exit status."""
    fits = needs <= args.budget
    if args.json:
        print(json.dumps({**found, "fits": fits, "needs": needs, "budget": args.budget}))
    else:
        verdict = "fits" if fits else "does not fit"
        words = f"{verdict}: a rank needs {needs:,} B {what}, the budget is {args.budget:,.0f} B"
        print(words, *filter(None, [text]), sep="\n\n")
    return 0 if fits else 1


def _format_groups(args: argparse.Namespace) -> str:
    """Format the groups of each axis, and which of them span several nodes."""
    mesh, node = Layout(**_collect_layout_fields(args)), args.node
    check_integer(node=node)
    if mesh.world_size % node:
        raise ValueError(f"node={node}: must divide the number of ranks ({mesh.world_size})")
    if mesh.world_size > MAX_PRINTED_RANKS:
        raise ValueError(
            f"ranks={mesh.world_size}: must be at most {MAX_PRINTED_RANKS} with --node"
        )
    axes = [axis for axis in reversed(mesh.order) if getattr(mesh, axis) > 1]
    if args.json:
        groups = {axis: mesh.list_groups(axis) for axis in axes}
        told = {axis: describe_axis(mesh, axis, node) for axis in axes}
        return json.dumps({"ranks": mesh.world_size, "node": node, "groups": groups, "said": told})
    lines = [f"{mesh.world_size} ranks in nodes of {node}, {' → '.join(mesh.order)}"]
    for axis in axes:
        lines += ["", describe_axis(mesh, axis, node)]
        lines += [f"  {' '.join(map(str, group))}" for group in mesh.list_groups(axis)]
    return "\n".join(lines)


def _parse_axes(given: str) -> tuple[str, ...]:
    return tuple(given.split(","))


def _collect_layout_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a layout that the options set."""
    return {"order": AXES} | options.collect_options(args, Layout)


def build_job(args: argparse.Namespace) -> Job:
    """Build the job that the options describe. Raises ValueError for a bad one."""
    from shardlab.mesh.job import Job

    given = {name: default for name, (default, _) in INTEGER_OPTIONS.items()}
    given |= options.collect_options(args)
    names = "seq", "layers", "heads", "hidden"
    config = Config(tied=not args.untied, **{name: given[name] for name in names})
    fields, batch = _collect_layout_fields(args), given["batch"]
    fields.setdefault("microbatches", given["pp"])
    if fields.get("schedule") == "interleaved" and given["pp"] != 1:
        fields.setdefault("chunks", 2)
    layout = Layout(**fields)
    check_integer(batch=batch)
    if batch % layout.global_batch:
        factors = f"dp={layout.dp} times microbatches={layout.microbatches}"
        raise ValueError(f"batch={batch}: must be a multiple of {factors}")
    return Job(config, replace(layout, micro_batch=batch // layout.global_batch), given["steps"])


def format_results(job: Job, found: dict[str, Any]) -> str:
    """Format a job's results for a terminal."""
    layout, config = job.layout, job.config
    lines = [
        f"{layout.world_size} ranks: dp={layout.dp} pp={layout.pp} tp={layout.tp}, "
        f"ZeRO {layout.zero}, {config.layers} layers of {config.hidden}, "
        f"{layout.global_batch} × {config.seq} tokens a step",
        "",
        "rank  d p t   holds (B)  predicted    peak (B)   tp sent (B)   pp sent (B)   dp sent (B)",
    ]
    for rank, one in enumerate(found["ranks"]):
        place, held = one["place"], sum(one["held"].values())
        predicted = sum(one["held_predicted"].values())
        sends = "".join(f"{one['sent'][axis]:>14,.0f}" for axis in ("tp", "pp", "dp"))
        lines.append(
            f"{rank:>4}  {place['dp']} {place['pp']} {place['tp']} {held:>11,} {predicted:>10,} "
            f"{one['peak']:>11,}{sends}"
        )
    gaps = found["differences"]
    lines += [
        "",
        "held and sent as predicted, to the byte"
        if is_as_predicted(found)
        else "NOT as predicted: see --json",
        "from one process after "
        f"{job.steps} steps: " + ", ".join(f"{name} {gap:.0e}" for name, gap in gaps.items()),
        f"{1e3 * found['seconds']:.0f} ms a step, {found['tokens_per_second']:,.0f} tokens/s",
    ]
    return "\n".join(lines)


def is_as_predicted(found: dict[str, Any]) -> bool:
    """Return True if each rank's counted bytes equal the prediction."""
    return all(
        one["held"] == one["held_predicted"]
        and all(abs(one["sent"][axis] - one["sent_predicted"][axis]) < 0.5 for axis in one["sent"])
        for one in found["ranks"]
    )
