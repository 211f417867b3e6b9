"""The process that builds: it gets configurations, one a line, and answers each in a line.

    python -m shardtools.hub.child SECONDS MEMORY

It alone loads torch and transformers, under limits of memory and time, and has no network that it
would use. What it is given has passed `bounds`; what it says is plain data, or why there is none.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from contextlib import suppress
from typing import Any

from shardlab.common.arguments import told


def main(seconds: int, memory: int) -> None:
    """Answer until the input ends; whatever goes wrong is an answer, or the end.

    seconds: for one configuration; memory: bytes of the address space.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no answer
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    missing = ""
    try:
        import shardtools.hub.facts  # noqa: F401  which loads torch, in no configuration's time
    except ImportError as error:
        room = f"in {memory / 2**30:.3g} GiB"
        missing = f"torch and transformers are needed to build its class, {room} ({error})"
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        signal.alarm(seconds)  # ends the process, whatever it is at
        json.dump({"error": missing} if missing else answer(json.loads(line), seconds), answers)
        answers.write("\n")
        answers.flush()
        signal.alarm(0)


def answer(asked: dict[str, Any], seconds: float = 60) -> dict[str, Any]:
    """What the model is, or {"error": why it is not known}."""
    from .facts import facts

    try:
        return facts(asked)
    except ValueError as error:
        return {"error": " ".join(str(error).split())[:300]}
    except Exception as error:
        return {"error": _blamed(asked["given"], error, seconds / 2 - 10)}


def _blamed(given: dict[str, Any], error: Exception, seconds: float) -> str:
    """Name the setting that its class fails on: without that one it is built."""
    from .build import build, configured

    its = f"the class of model_type={given['model_type']!r}"
    for key, value in given.items():
        if isinstance(value, str) and value in error.args:
            return f"{key}={told(value)}: {its} cannot be built with it"
    until = time.monotonic() + seconds
    # What the error itself names comes first: mostly that is the one.
    for key in sorted(given, key=lambda key: key not in str(error)):
        if key == "model_type" or time.monotonic() > until:
            continue
        with suppress(Exception):
            build(configured({name: value for name, value in given.items() if name != key}))
            return f"{key}={told(given[key])}: {its} cannot be built with it"
    return f"{its} cannot be built from these values"


if __name__ == "__main__":
    main(*(int(given) for given in sys.argv[1:]))
