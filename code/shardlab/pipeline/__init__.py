"""Pipeline parallelism: a model cut by layers over stages, and who works when.

- `schedule` and the functions behind it (schedules): what each stage does, as plain data;
- `Action`, `Schedule`, `from_text` (actions), with their messages (messages);
- `validate`: whether a schedule can be run, and what is wrong if it cannot; `live` activations;
- `simulate`: its timeline, from given times; bubble and memory;
- `draw` (picture) and `text` (terminal): timelines, simulated or measured;
- `cut`, `balance`, `distribute` (parts, balance): a plain GPT in parts, each on its rank;
- `Pipeline` (execute, stage, mail, clock): a stage that runs any schedule; `defer` (deferred): the
  split backward; `asleep` (sleeping): stages that sleep instead of computing.
"""

from .actions import Action, Schedule, from_text, loop, vee
from .balance import balance
from .messages import needed, other_end, sent, with_messages
from .schedules import (
    NAMES,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    schedule,
    zb_h1,
    zb_h2,
    zb_v,
)
from .simulate import Span, Timeline, simulate
from .terminal import text
from .validate import live, validate

__all__ = [
    "NAMES",
    "Action",
    "Part",
    "Pipeline",
    "Schedule",
    "Sleeping",
    "Span",
    "Timeline",
    "asleep",
    "balance",
    "cut",
    "defer",
    "distribute",
    "draw",
    "from_text",
    "gpipe",
    "interleaved",
    "live",
    "loop",
    "naive",
    "needed",
    "one_f_one_b",
    "other_end",
    "schedule",
    "sent",
    "simulate",
    "text",
    "validate",
    "vee",
    "with_messages",
    "zb_h1",
    "zb_h2",
    "zb_v",
]

# What needs torch or matplotlib is loaded when it is first asked for: who only looks at schedules
# does not wait for them. Names are whole, so that a recording's key finds the files.
_LATER = {
    "Part": "shardlab.pipeline.parts",
    "Pipeline": "shardlab.pipeline.execute",
    "Sleeping": "shardlab.pipeline.sleeping",
    "asleep": "shardlab.pipeline.sleeping",
    "cut": "shardlab.pipeline.parts",
    "defer": "shardlab.pipeline.deferred",
    "distribute": "shardlab.pipeline.parts",
    "draw": "shardlab.pipeline.picture",
}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LATER[name]), name)
