"""`python -m shardlab mesh`: train a small model on any mesh of ranks of this machine.

    python -m shardlab mesh --dp 2 --tp 2 --pp 2 --zero 1 --layers 4 --hidden 32 --steps 5
    python -m shardlab mesh --dp 2 --tp 2 --zero 3 --sequence-parallel --json
    python -m shardlab mesh --tp 2 --hidden 64 --budget 1e6
    python -m shardlab mesh --dp 2 --tp 2 --pp 2 --node 4 --order tp,pp,dp

It starts dp · pp · tp ranks, trains a GPT on the offline text, and prints for each rank the bytes
that it holds (parameters, gradients, optimizer) and sends along each axis, predicted and counted;
tokens per second; and the largest differences from one process that trains the same batches.
--budget limits the bytes of model states per rank: a job that needs more is not started, and the
exit status is 1. --json prints everything as one object.

With --node, the number of ranks on a node, nothing is trained: it prints the groups of each axis,
and which of them leave their node. --order lists the axes, the outermost first.
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
MOST = 512  # ranks whose groups are printed
KNOBS = {  # option: its default, and what it is
    "dp": (1, "copies of the model"),
    "tp": (1, "ranks that share each matrix"),
    "pp": (1, "stages of the pipeline"),
    "zero": (0, "ZeRO's stage between the copies: 0 to 3"),
    "layers": (2, "of the model"),
    "hidden": (32, "width of the model"),
    "heads": (2, "of attention"),
    "seq": (32, "tokens of a sequence"),
    "batch": (8, "sequences of all copies in a step"),
    "microbatches": (None, "of each copy in a step (as many as stages)"),
    "chunks": (None, "parts of the model on each stage (1; interleaved: 2)"),
    "steps": (5, "of training, 3 or more"),
}


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `mesh` to the command line."""
    parser = options.command(commands, "mesh", __doc__)
    add = partial(options.add, parser)
    for name, (default, told) in KNOBS.items():
        add(name, told if default is None else f"{told} ({default})", "N", int)
    add("schedule", "of the pipeline: naive, gpipe, 1f1b or interleaved (1f1b)", "NAME")
    add("recompute", "in backward: full, each block but its input, or none (none)", "HOW")
    add("budget", "bytes of model states that a rank may hold", "BYTES", float)
    add("node", "ranks of a node: print the groups, and train nothing", "N", int)
    add("order", "of the axes, from the outermost in (dp,pp,tp)", "AXES", _axes)
    options.flag(parser, "sequence-parallel", "cut what lies between the matrices by tokens, too")
    options.flag(parser, "untied", "a head of its own")
    options.flag(parser, "json", "print everything as JSON")
    parser.set_defaults(command=_main)


def _main(chosen: argparse.Namespace) -> int:
    if chosen.node is not None:
        trains = [name for name in KNOBS if name not in AXES]
        trains += ["schedule", "recompute", "budget", "sequence_parallel", "untied"]
        words = "with --node, which trains nothing: allowed are dp, pp, tp"
        options.apart(options.given(chosen), trains, words)
        print(_groups(chosen))
        return 0
    job = job_of(chosen)
    if (budget := chosen.budget) is not None:
        check_number(budget=budget)
        most = max(
            sum(job.predict_state_bytes(rank).values()) for rank in range(job.layout.world_size)
        )
        if most > budget:
            if chosen.json:
                print(json.dumps({"fits": False, "needs": most, "budget": budget}))
            else:
                print(f"does not fit: the fullest rank would hold {most:,} of {budget:,.0f} B")
            return 1
    from shardlab.mesh.job import run  # loads torch

    found = run(job)
    print(json.dumps(found) if chosen.json else told(job, found))
    return 0


def _groups(chosen: argparse.Namespace) -> str:
    """Format the groups of each axis, and which of them leave a node."""
    mesh, node = Layout(**_fields(chosen)), chosen.node
    check_integer(node=node)
    if mesh.world_size % node:
        raise ValueError(f"node={node}: allowed are divisors of {mesh.world_size} ranks")
    if mesh.world_size > MOST:
        raise ValueError(f"ranks={mesh.world_size}: allowed with --node are {MOST} at most")
    axes = [axis for axis in reversed(mesh.order) if getattr(mesh, axis) > 1]
    if chosen.json:
        groups = {axis: mesh.list_groups(axis) for axis in axes}
        told = {axis: describe_axis(mesh, axis, node) for axis in axes}
        return json.dumps({"ranks": mesh.world_size, "node": node, "groups": groups, "said": told})
    lines = [f"{mesh.world_size} ranks in nodes of {node}, {' → '.join(mesh.order)}"]
    for axis in axes:
        lines += ["", describe_axis(mesh, axis, node)]
        lines += [f"  {' '.join(map(str, group))}" for group in mesh.list_groups(axis)]
    return "\n".join(lines)


def _axes(given: str) -> tuple[str, ...]:
    return tuple(given.split(","))


def _fields(chosen: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a layout that the options set."""
    return {"order": AXES} | options.given(chosen, Layout)


def job_of(chosen: argparse.Namespace) -> Job:
    """Return the job that the options describe. Raises ValueError for options without a job."""
    from shardlab.mesh.job import Job

    given = {name: default for name, (default, _) in KNOBS.items()} | options.given(chosen)
    names = "seq", "layers", "heads", "hidden"
    config = Config(tied=not chosen.untied, **{name: given[name] for name in names})
    fields, batch = _fields(chosen), given["batch"]
    fields.setdefault("microbatches", given["pp"])
    if fields.get("schedule") == "interleaved" and given["pp"] != 1:
        fields.setdefault("chunks", 2)
    layout = Layout(**fields)
    check_integer(batch=batch)
    if batch % layout.global_batch:
        allowed = f"multiples of dp={layout.dp} copies times {layout.microbatches} micro-batches"
        raise ValueError(f"batch={batch}: allowed are {allowed}")
    return Job(config, replace(layout, micro_batch=batch // layout.global_batch), given["steps"])


def told(job: Job, found: dict[str, Any]) -> str:
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
        if as_predicted(found)
        else "NOT as predicted: see --json",
        "from one process after "
        f"{job.steps} steps: " + ", ".join(f"{name} {gap:.0e}" for name, gap in gaps.items()),
        f"{1e3 * found['seconds']:.0f} ms a step, {found['tokens_per_second']:,.0f} tokens/s",
    ]
    return "\n".join(lines)


def as_predicted(found: dict[str, Any]) -> bool:
    """Return True if each rank of a job held and sent what was predicted, to the byte."""
    return all(
        one["held"] == one["held_predicted"]
        and all(abs(one["sent"][axis] - one["sent_predicted"][axis]) < 0.5 for axis in one["sent"])
        for one in found["ranks"]
    )
