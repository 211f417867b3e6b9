"""`python -m shardlab schedule`: the timeline of a pipeline, and how long its stages wait.

    python -m shardlab schedule 1f1b --stages 4 --microbatches 8
    python -m shardlab schedule 1f1b --stages 8 --microbatches 24 \\
        --forward 18.522 --backward-input 18.086 --backward-weight 9.337 --hop 0.601
    python -m shardlab schedule interleaved --stages 4 --microbatches 8 --chunks 2
    python -m shardlab schedule zb-h1 --stages 4 --microbatches 8 --forward 1,1,1,1.5 --json

Times are in any one unit: of a micro-batch's passes through a whole stage, and of a message from a
stage to the next; one number for all stages, or one for each, with commas. --json prints bubble
(share of the cost in which a stage idles, on average), cost (the longest time of any stage from its
first begin to its last end), busy and peak_activations (by stage; in micro-batches of a whole
stage), and the timeline: every pass of each stage, with its begin and end.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from functools import partial

from shardlab.common.arguments import check_integer
from shardlab.pipeline.schedules import SCHEDULE_NAMES, make_schedule
from shardlab.pipeline.simulate import Timeline, simulate
from shardlab.pipeline.timeline_text import format_timeline
from shardtools import options

WHOLE = ("stages", "microbatches", "chunks")
MOST = 100_000  # forwards: up to a minute on a core, and too many to draw
MOST_STAGES = 1_000
TIMES = ("forward", "backward_input", "backward_weight", "hop")


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `schedule` to the command line."""
    parser = options.command(commands, "schedule", __doc__)
    add = partial(options.add, parser)
    parser.add_argument(
        "name", nargs="?", default="", help=", ".join(SCHEDULE_NAMES), metavar="NAME"
    )
    add("stages", "of the pipeline, each on a rank", "P", int)
    add("microbatches", "of a step", "M", int)
    add("chunks", "parts of the model on each stage; with interleaved (2)", "V", int)
    add("forward", "time of the forward (1)", "TIME", _times)
    add("backward-input", "time of the backward of the input alone (1)", "TIME", _times)
    add("backward-weight", "time of the backward of the weights alone (1)", "TIME", _times)
    add("hop", "time of a message to another stage (0)", "TIME", _times)
    options.flag(parser, "json", "print it as JSON")
    parser.set_defaults(command=_main)


def _main(chosen: argparse.Namespace) -> int:
    given = options.given(chosen)
    if chosen.name not in SCHEDULE_NAMES:
        raise ValueError(f"schedule={chosen.name!r}: allowed are {', '.join(SCHEDULE_NAMES)}")
    whole = {"stages": "", "microbatches": ""} | {n: given[n] for n in WHOLE if n in given}
    check_integer(**whole)
    check_integer(1, MOST_STAGES, stages=whole["stages"])
    passes = math.prod(whole.values()) * (2 if chosen.name == "zb-v" else 1)
    if passes > MOST:
        what = ", ".join(f"{name}={value}" for name, value in whole.items())
        raise ValueError(f"{what}: {passes:,} forwards; allowed are {MOST:,} at most")
    times = {name: given[name] for name in TIMES if name in given}
    timeline = simulate(make_schedule(chosen.name, **whole), **times)
    if chosen.json:
        print(json.dumps(_facts(timeline)))
        return 0
    tty = sys.stdout.isatty()
    width = max(40, shutil.get_terminal_size().columns if tty else 80)
    print(f"{_head(timeline)}\n\n{format_timeline(timeline, width)}")
    return 0


def _head(timeline: Timeline) -> str:
    of = timeline.schedule
    chunks = f", {of.chunks} chunks on each" if of.chunks > 1 else ""
    held = " ".join(f"{peak:.4g}" for peak in timeline.peak_activations)
    return "\n".join(
        [
            f"{of.name}: {of.stages} stage{'s' * (of.stages > 1)}{chunks}, "
            f"{of.microbatches} micro-batch{'es' * (of.microbatches > 1)}",
            f"  bubble            {timeline.bubble:.4f} of the cost",
            f"  cost              {timeline.step_time:.6g}",
            f"  peak activations  {held}  (micro-batches, by stage)",
        ]
    )


def _facts(timeline: Timeline) -> dict[str, object]:
    of = timeline.schedule
    return {
        "schedule": of.name,
        "stages": of.stages,
        "microbatches": of.microbatches,
        "chunks": of.chunks,
        "bubble": timeline.bubble,
        "cost": timeline.step_time,
        "busy": timeline.busy_times,
        "peak_activations": timeline.peak_activations,
        "timeline": [[span._asdict() for span in spans] for spans in timeline.spans],
    }


def _times(given: str) -> float | list[float]:
    """Parse one number, or a list of them."""
    values = [float(value) for value in given.split(",")]
    return values if len(values) > 1 else values[0]
