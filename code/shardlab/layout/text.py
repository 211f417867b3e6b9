"""Layouts as text: `d 2 · t 2 · p 2, ZeRO-1, sequence parallelism, m 4 × b 2`.

`str(layout)` has the fields that distinguish layouts of one job. `format_layout` adds all other
fields that are not at their default. `parse_layout` parses both.
"""

from __future__ import annotations

import re
from typing import Any

from shardlab.common.arguments import shorten_repr

from .core import AXES, OFFLOAD_CHOICES, Layout
from .stages import SCHEDULES, STAGE_RULES

LETTER_FIELDS = {"d": "dp", "t": "tp", "p": "pp", "c": "cp", "e": "ep"}
LAYOUT_EXAMPLE = "d 2 · t 2 · p 2, ZeRO-1, sequence parallelism, m 4 × b 2"


def format_layout(layout: Layout) -> str:
    """Return a text with all fields of a layout, which `parse_layout` parses back."""
    words = [str(layout)]
    if layout.schedule not in ("1f1b", *words[0].replace(",", "").split()):
        words.append(layout.schedule)  # without a pipeline, where the schedule has no effect
    if isinstance(layout.stages, str) and layout.stages != "equal":
        words.append(f"stages {layout.stages}")
    if layout.pp == 1 and not isinstance(layout.stages, str):
        words.append(f"layers {layout.stages[0]}")
    if layout.sequence_parallel:
        words.append("sequence parallelism")
    if layout.microbatches > 1 or layout.micro_batch > 1:
        words.append(f"m {layout.microbatches} × b {layout.micro_batch}")
    if layout.order != AXES:
        words.append(" ".join(("order", *layout.order)))
    return ", ".join(words)


def parse_layout(text: str) -> Layout:
    """Parse a layout. Raises ValueError for other texts, and names the words that do not parse.

    Spaces may be left out, and · may be * or a space: "d2 t2, zero-1".
    """
    fields: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        found = _parse_phrase(part)
        if not found or found.keys() & fields:
            wrong = "repeats a field" if found else "is no field of a layout"
            words = f"{shorten_repr(part)} {wrong}"
            raise ValueError(f"layout: {words}; write it as in {LAYOUT_EXAMPLE!r}")
        fields |= found
    chunks = {"zb-v": 2}.get(fields.get("schedule", ""))
    if chunks and fields.get("pp", 1) > 1:
        fields.setdefault("chunks", chunks)
    return Layout(**fields)


def _parse_phrase(part: str) -> dict[str, Any]:
    """Return the Layout fields of one phrase; {} if it does not parse."""
    first, _, rest = part.partition(" ")
    if re.fullmatch(r"([dtpce] ?\d{1,18}[ ·*]*)+", part):
        pairs = re.findall(r"([a-z]) ?(\d{1,18})", part)
        names = [LETTER_FIELDS[letter] for letter, _ in pairs]
        once = len(set(names)) == len(names)
        return {LETTER_FIELDS[letter]: int(size) for letter, size in pairs} if once else {}
    if match := re.fullmatch(r"zero-([0-3])(?: in (\d{1,18}) groups)?", part.lower()):
        groups = {"replicas": int(match[2])} if match[2] else {}
        return {"zero": int(match[1]), **groups}
    if match := re.fullmatch(r"m ?(\d{1,18})(?:[ ×x*]+b ?(\d{1,18}))?|b ?(\d{1,18})", part):
        sizes = {"microbatches": match[1], "micro_batch": match[2] or match[3]}
        return {name: int(size) for name, size in sizes.items() if size}
    if first == "recompute":
        return {"recompute": {"": "full", "attention": "selective"}.get(rest, rest)}
    if first in SCHEDULES and re.fullmatch(r"\d{0,18}", rest):
        return {"schedule": first, **({"chunks": int(rest)} if rest else {})}
    if rest == "on the host" and first in OFFLOAD_CHOICES:
        return {"offload": first}
    if first == "stages" and rest in STAGE_RULES:
        return {"stages": rest}
    if first == "layers" and re.fullmatch(
        r"(\d{1,6}[×x])?\d{1,18}(\+(\d{1,6}[×x])?\d{1,18})*", rest
    ):
        runs = [re.split("[×x]", run) for run in rest.split("+")]
        repeated = [(int(run[0]) if len(run) > 1 else 1, int(run[-1])) for run in runs]
        return {"stages": tuple(n for times, n in repeated for _ in range(times))}
    if match := re.fullmatch(r"experts cut (\d{1,18})", part):
        return {"etp": int(match[1])}
    if part == "sequence parallelism":
        return {"sequence_parallel": True}
    return {"order": tuple(rest.split())} if first == "order" else {}
