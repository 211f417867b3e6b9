"""Pipeline parallelism: a model cut by layers over stages, and schedules for their work.

- schedules: what each stage does, as plain data: `schedule`, `gpipe`, `one_f_one_b`, … `Action`;
- core: one stage on its rank, which runs its list of actions: `Pipeline`.

The other modules support these two:

- validate: checks that a schedule can run, and says what is wrong; `from_text`, `live`;
- simulate: its timeline, from given times or measured; `balance`, for layers of unequal cost;
- parts: a plain GPT in parts (`cut`), and the parts that a rank holds;
- pipelines: `distribute` (a GPT over ranks), `asleep` (stages that sleep instead of computing);
- deferred: the split backward, `defer`;
- picture, terminal: timelines as figures (`draw`) or in characters (`text`).
"""

from .schedules import (
    NAMES,
    Schedule,
    gpipe,
    interleaved,
    needed,
    one_f_one_b,
    other_end,
    schedule,
    with_messages,
    zb_h1,
)
from .simulate import Span, Timeline, balance, simulate
from .validate import from_text, live, validate

__all__ = [  # besides the names in _LATER
    "NAMES",
    "Schedule",
    "Span",
    "Timeline",
    "balance",
    "from_text",
    "gpipe",
    "interleaved",
    "live",
    "needed",
    "one_f_one_b",
    "other_end",
    "schedule",
    "simulate",
    "validate",
    "with_messages",
    "zb_h1",
]

# Names that need torch or matplotlib are loaded on first use, so programs that only look at
# schedules do not wait. Module names are complete, so that a recording's key finds the files.
_LATER = {
    "Part": "shardlab.pipeline.parts",
    "Pipeline": "shardlab.pipeline.core",
    "Sleeping": "shardlab.pipeline.pipelines",
    "asleep": "shardlab.pipeline.pipelines",
    "compute_again": "shardlab.pipeline.parts",
    "cut": "shardlab.pipeline.parts",
    "defer": "shardlab.pipeline.deferred",
    "distribute": "shardlab.pipeline.pipelines",
    "draw": "shardlab.pipeline.picture",
}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LATER[name]), name)
