"""Pipeline parallelism: a model cut by layers over stages, and schedules for their work.

- schedules: the actions of each stage, as plain data: `make_schedule`, `schedule_1f1b`, `Action`;
- core: one stage on its rank, which runs its list of actions: `Pipeline`.

The other modules support these two:

- validate: checks of schedules; `parse_schedule`, `count_peak_activations`;
- simulate: timelines from given times or measured ones; `balance_layers`;
- parts: a plain GPT in parts (`split_model`), and the parts that a rank holds;
- builders: `distribute_model` (a GPT over ranks), `make_sleeping_pipeline` (stages that sleep);
- deferred: the split backward, `defer_weight_gradients`;
- timeline_figure, timeline_text: timelines as figures or in characters.
"""

from .schedules import (
    SCHEDULE_NAMES,
    Schedule,
    add_messages,
    find_peer,
    find_receive,
    make_schedule,
    schedule_1f1b,
    schedule_gpipe,
    schedule_interleaved,
    schedule_zb_h1,
)
from .simulate import Span, Timeline, balance_layers, simulate
from .validate import count_peak_activations, parse_schedule, validate

# Besides the names in _LAZY_IMPORTS.
__all__ = [
    "SCHEDULE_NAMES", "Schedule", "Span", "Timeline", "add_messages", "balance_layers",
    "count_peak_activations", "find_peer", "find_receive", "make_schedule", "parse_schedule",
    "schedule_1f1b", "schedule_gpipe", "schedule_interleaved", "schedule_zb_h1", "simulate",
    "validate",
]  # fmt: skip

# Names that need torch or matplotlib are loaded on first use, so programs that only look at
# schedules do not wait. Module names are complete, so that a recording's key finds the files.
_LAZY_IMPORTS = {
    "Part": "shardlab.pipeline.parts",
    "Pipeline": "shardlab.pipeline.core",
    "SleepingPart": "shardlab.pipeline.builders",
    "make_sleeping_pipeline": "shardlab.pipeline.builders",
    "recompute_blocks": "shardlab.pipeline.parts",
    "split_model": "shardlab.pipeline.parts",
    "defer_weight_gradients": "shardlab.pipeline.deferred",
    "distribute_model": "shardlab.pipeline.builders",
    "draw_timelines": "shardlab.pipeline.timeline_figure",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY_IMPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY_IMPORTS[name]), name)
