"""Pipeline parallelism: a model cut by layers over stages, and who works when.

- schedules: what each stage does, as plain data: `schedule`, `gpipe`, `one_f_one_b`, … `Action`;
- core: one stage on its rank, which does what its list says: `Pipeline`.

The rest stands around these two:

- validate: whether a schedule can be run, and what is wrong if it cannot; `from_text`, `live`;
- simulate: its timeline, from given times or measured; `balance`, for layers of unequal cost;
- parts: a plain GPT in parts (`cut`), and what a rank holds of it;
- pipelines: `distribute` (a GPT over ranks), `asleep` (stages that sleep instead of computing);
- deferred: the split backward, `defer`;
- picture, terminal: timelines drawn (`draw`), or in characters (`text`).
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

__all__ = [  # beside what is in _LATER
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

# What needs torch or matplotlib is loaded when it is first asked for: who only looks at schedules
# does not wait for them. Names are whole, so that a recording's key finds the files.
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
