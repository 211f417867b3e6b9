"""Simulate a pipeline schedule: its timeline, bubble, and peak activations.

    python -m shardlab schedule 1f1b --stages 4 --microbatches 8
    python -m shardlab schedule 1f1b --stages 8 --microbatches 24 \\
        --forward 18.522 --backward-input 18.086 --backward-weight 9.337 --hop 0.601
    python -m shardlab schedule interleaved --stages 4 --microbatches 8 --chunks 2
    python -m shardlab schedule zb-h1 --stages 4 --microbatches 8 --forward 1,1,1,1.5 --json

Times are those of one micro-batch on a whole stage, and of a message to the next stage, all in the
same unit; one number for all stages, or one for each, separated by commas. --json prints the cost
(the longest time of any stage from its first begin to its last end), the bubble (the mean idle
share of that cost), busy and peak_activations by stage (activations in micro-batches of a whole
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

INTEGER_OPTIONS = ("stages", "microbatches", "chunks")
MAX_FORWARDS = 100_000  # they take up to a minute on a core
MAX_STAGES = 1_000
TIME_OPTIONS = ("forward", "backward_input", "backward_weight", "hop")


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `schedule` to the command line."""
    parser = options.add_parser(commands, "schedule", __doc__)
    add = partial(options.add_option, parser)
    parser.add_argument(
        "name", nargs="?", default="", help=", ".join(SCHEDULE_NAMES), metavar="NAME"
    )
    add("stages", "number of stages, each on its own rank", "P", int)
    add("microbatches", "micro-batches per step", "M", int)
    add("chunks", "model chunks on each stage, with interleaved (2)", "V", int)
    add("forward", "time of the forward (1)", "TIME", _parse_times)
    add("backward-input", "time of the backward of the input (1)", "TIME", _parse_times)
    add("backward-weight", "time of the backward of the weights (1)", "TIME", _parse_times)
    add("hop", "time of a message to another stage (0)", "TIME", _parse_times)
    options.add_flag(parser, "json", "print the results as JSON")
    parser.set_defaults(command=_main)


def _main(args: argparse.Namespace) -> int:
    given = options.collect_options(args)
    if args.name not in SCHEDULE_NAMES:
        raise ValueError(f"schedule={args.name!r}: must be one of {', '.join(SCHEDULE_NAMES)}")
    sizes = {"stages": "", "microbatches": ""}
    sizes |= {name: given[name] for name in INTEGER_OPTIONS if name in given}
    check_integer(**sizes)
    check_integer(1, MAX_STAGES, stages=sizes["stages"])
    forwards = math.prod(sizes.values()) * (2 if args.name == "zb-v" else 1)
    if forwards > MAX_FORWARDS:
        what = ", ".join(f"{name}={value}" for name, value in sizes.items())
        raise ValueError(f"{what}: must make at most {MAX_FORWARDS:,} forwards, not {forwards:,}")
    times = {name: given[name] for name in TIME_OPTIONS if name in given}
    timeline = simulate(make_schedule(args.name, **sizes), **times)
    if args.json:
        print(json.dumps(_collect_results(timeline)))
        return 0
    tty = sys.stdout.isatty()
    width = max(40, shutil.get_terminal_size().columns if tty else 80)
    print(f"{_format_summary(timeline)}\n\n{format_timeline(timeline, width)}")
    return 0


def _format_summary(timeline: Timeline) -> str:
    schedule = timeline.schedule
    chunks = f", {schedule.chunks} chunks on each" if schedule.chunks > 1 else ""
    held = " ".join(f"{peak:.4g}" for peak in timeline.peak_activations)
    return "\n".join(
        [
            f"{schedule.name}: {schedule.stages} stage{'s' * (schedule.stages > 1)}{chunks}, "
            f"{schedule.microbatches} micro-batch{'es' * (schedule.microbatches > 1)}",
            f"  bubble            {timeline.bubble:.4f} of the cost",
            f"  cost              {timeline.step_time:.6g}",
            f"  peak activations  {held}  (micro-batches, by stage)",
        ]
    )


def _collect_results(timeline: Timeline) -> dict[str, object]:
    schedule = timeline.schedule
    return {
        "schedule": schedule.name,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "chunks": schedule.chunks,
        "bubble": timeline.bubble,
        "cost": timeline.step_time,
        "busy": timeline.busy_times,
        "peak_activations": timeline.peak_activations,
        "timeline": [[span._asdict() for span in spans] for spans in timeline.spans],
    }


def _parse_times(given: str) -> float | list[float]:
    """Parse one number, or a list of them."""
    values = [float(value) for value in given.split(",")]
    return values if len(values) > 1 else values[0]
