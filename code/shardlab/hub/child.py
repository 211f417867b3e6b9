"""The process that builds: it gets configurations, one a line, and answers each in a line.

    python -m shardlab.hub.child SECONDS MEMORY

It alone loads torch and transformers, under limits of memory and time, and has no network that it
would use. What it is given has passed `bounds`; what it says is plain data, or why there is none.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any


def main(seconds: int, memory: int) -> None:
    """Answer until the input ends; whatever goes wrong is an answer, or the end.

    seconds: for one configuration; memory: bytes of the address space.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no answer
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import shardlab.hub.facts  # noqa: F401  which loads torch, in no configuration's time

    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        signal.alarm(seconds)  # ends the process, whatever it is at
        json.dump(answer(json.loads(line)), answers)
        answers.write("\n")
        answers.flush()
        signal.alarm(0)


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """What the model is, or {"error": why it is not known}."""
    from .facts import facts

    try:
        return facts(asked)
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        return {"error": said if type(error) is ValueError else f"{type(error).__name__}: {said}"}


if __name__ == "__main__":
    main(*(int(given) for given in sys.argv[1:]))
