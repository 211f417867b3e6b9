"""The options of the take-home script. What is not allowed is said before anything is started."""

from __future__ import annotations

import argparse
import inspect
import math
import sys
from collections.abc import Callable
from typing import Any

import torch

from shardlab.arguments import PROCESSES, check_number, check_whole
from shardlab.options import Parser, any_encoding, number, place
from shardlab.shapes import PRESETS
from shardlab.text import parts

from . import job, saved, spread

WORDS = {
    "preset": "shape of the model: " + ", ".join(PRESETS),
    "source": "text: stdlib, a file, or hf:NAME",
    "steps": "optimizer steps in all, those before a stop included",
    "batch": "sequences of a step, over all ranks",
    "micro": "sequences of one backward of one rank",
    "lr": "AdamW's learning rate",
    "clip": "largest norm of the gradient",
    "seed": "of weights and order; for dropout, ranks draw their own",
    "dropout": "share of activations that are dropped",
    "limit": "bytes to use of each part of the text, which are train, validation and test",
    "every": "steps from one validation and checkpoint to the next",
    "report": "steps from one line of metrics.jsonl to the next",
    "sample": "bytes to generate, before and after",
    "precision": ", ".join(spread.DTYPES),
    "compiler": "torch.compile's backend for the blocks: inductor, for instance",
    "strategy": ", ".join(spread.STRATEGIES),
    "tensor": "with --strategy tensor: ranks that cut each matrix between them",
    "workers": "processes of each rank that load data",
    "peak": "FLOP/s of one device, for the MFU; known of " + ", ".join(job.PEAKS),
    "folder": "where checkpoints and metrics go",
    "resume": "auto: from the folder's last checkpoint; never: the folder has to have none",
    "timeout": "seconds that a rank waits for another one in a collective",
}
LONGEST = 1e9  # seconds that torch takes as a time limit
MORE = {"resume": "auto", "timeout": 600.0}  # options that are not `main`'s
NUMBERS = {"limit": int, "peak": float}  # types of those that have no default


def parse(main: Callable[..., Any], arguments: list[str] | None = None) -> dict[str, Any]:
    """Options for `main`, whose parameters and defaults they are, and for `job.run`.

    Ends the process with status 2 and one line where a value is not allowed.
    """
    any_encoding()  # of what it prints
    defaults = {p.name: p.default for p in inspect.signature(main).parameters.values()} | MORE
    about = sys.modules[main.__module__].__doc__
    how = argparse.RawDescriptionHelpFormatter
    parser = Parser(description=about, formatter_class=how, allow_abbrev=False)
    for name, default in defaults.items():
        words = WORDS[name] + ("" if default is None else f" [{default}]")
        parser.add_argument(f"--{name}", default=default, help=words, metavar="…")
    given = vars(parser.parse_args(arguments))
    rank = 0
    try:
        at = job.launched()
        rank = at.rank
        chosen = {name: _typed(name, value, defaults[name]) for name, value in given.items()}
        check(at.size, **chosen)
        chosen["folder"] = str(place("folder", chosen["folder"]))
    except (ValueError, OSError) as error:
        job.refuse(error, rank)
    del chosen["resume"]  # checked: either there is no checkpoint, or it is to be taken
    return chosen


def _typed(name: str, value: Any, default: Any) -> Any:
    """What was typed, as a value of the default's type."""
    kind = NUMBERS.get(name, type(default))
    if not isinstance(value, str):
        return value
    if kind not in (int, float):
        return value
    return number(name, value, "whole numbers" if kind is int else "numbers", kind)


def check(
    world: int,
    *,
    preset: str,
    source: str,
    batch: int,
    dropout: float,
    limit: int | None,
    precision: str,
    strategy: str,
    tensor: int,
    peak: float | None,
    folder: str,
    resume: str,
    **others: Any,
) -> None:
    """Raise ValueError for options that `world` ranks cannot train with."""
    if preset not in PRESETS:
        raise ValueError(f"preset={preset!r}: allowed are {', '.join(PRESETS)}")
    counts = {n: others[n] for n in ("steps", "micro", "every", "report")}
    counts_or_0 = {n: others[n] for n in ("seed", "sample")}
    check_whole(batch=batch, tensor=tensor, **counts)
    check_whole(0, **counts_or_0)
    check_whole(0, PROCESSES, workers=others["workers"])
    check_number(lr=others["lr"])
    check_number(most=math.inf, clip=others["clip"])
    check_number(most=LONGEST, timeout=others["timeout"])
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout={dropout!r}: allowed are numbers from 0 to below 1")
    if peak is not None:
        check_number(peak=peak)
    config = PRESETS[preset]
    spread.check(world, config.heads, strategy, tensor, precision)
    if batch % (world // tensor):
        copies = world // tensor
        raise ValueError(f"batch={batch}: allowed are multiples of {copies}, one share a copy")
    if limit is not None:
        check_whole(config.seq * batch + 1, limit=limit)
    _check_compiler(others["compiler"])
    for name, part in zip(("train", "validation", "test"), parts(source), strict=True):
        own, needed = part[:limit], config.seq * (batch if name == "train" else 1) + 1
        if len(own) < needed:
            what = f"its part for {name} has {len(own)} bytes"
            raise ValueError(f"source={source!r}: {what}; allowed are {needed} or more")
    if resume not in ("auto", "never"):
        raise ValueError(f"resume={resume!r}: allowed are auto and never")
    path = place("folder", folder)
    if path.exists() and not path.is_dir():
        raise ValueError(f"folder={folder!r}: this is a file; allowed is a folder")
    found = saved.checkpoints(path)
    if resume == "never" and found:
        what = f"folder={folder!r} holds checkpoints"
        raise ValueError(f"resume='never': {what}; allowed are an empty folder, or resume='auto'")
    if found:
        spread.check_saved(found[-1], strategy, world, config)


def _check_compiler(name: str | None) -> None:
    """Raise ValueError for a backend that torch.compile does not have."""
    if name is not None and name not in (known := torch.compiler.list_backends(exclude_tags=())):
        raise ValueError(f"compiler={name!r}: allowed are {', '.join(known)}")
