"""The steps of `python -m shardlab gpu`: what each runs, what it keeps, when it holds.

A step holds while the file that it keeps carries the key of the sources as they are. So a second
call does only what is missing, failed, or out of date.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .. import about, changed, code_cells, load, notebook, reach
from ..carry import FIGURES, RECORDED, WORK, replace
from ..key import Key, reach_of_program
from . import machine

PARTS = ("tests", "lessons", "benchmarks")
NEEDS = {  # packages that a part needs on every machine
    "tests": ["torch", "numpy", "cloudpickle", "tabulate", "pytest"],
    "lessons": ["torch", "numpy", "cloudpickle", "tabulate", "matplotlib", "nbclient"]
    + ["ipykernel", "jupytext"],
    "benchmarks": ["torch", "numpy", "cloudpickle", "tabulate"],
}
# Libraries that some lessons use: without them the others go on.
OPTIONAL = ("deepspeed", "transformers", "pytorch_lightning")
LONGEST = {"tests": 900, "lessons": 1800, "benchmarks": 3600}  # seconds: then it hangs
# Where a log says what went wrong: pytest's summary, `record`'s message, the end of a traceback.
_TELLS = re.compile(
    r"(?m)^(?:(?:FAILED|ERROR) .*|lessons/\w+\.md, code cell .*|[\w.]*(?:Error|Interrupt)\b.*)$"
)


@dataclass(frozen=True)
class Step:
    """One thing to do."""

    name: str  # and the name of its log
    part: str
    command: tuple[str, ...]
    kept: Path  # the file that it leaves when it passes, below the root
    key: Key
    lacks: str = ""  # why it cannot be done here
    extra: str = ""  # goes into the key: what else the result depends on
    root: Path = Path()  # of a lesson: the course's folder

    @property
    def title(self) -> str:
        """The step's name for people."""
        return self.name.replace("_", " ", 1) if self.part != "tests" else self.name

    @property
    def stamp(self) -> str:
        """The key as text."""
        return self.key.text + self.extra

    def held(self, path: Path) -> dict[str, Any] | None:
        """What the file `path` says of the step, if it holds; None otherwise."""
        if self.part == "lessons":
            book = load(path)
            if book is None or changed(book, self.kept.stem, self.root):
                return None
            return about(book) if about(book)["device"]["kind"] == "cuda" else None
        try:
            said = json.loads(path.read_bytes())
            return said if said["key"] == self.stamp else None
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return None

    def keep(self, root: Path, output: str, facts: Mapping[str, Any], seconds: float) -> str:
        """After it passed: write what it keeps; return what the table says of it.

        Raises ValueError for an output that holds nothing to keep.
        """
        if self.part == "lessons":  # `record` has written it
            if self.held(root / self.kept) is None:
                raise ValueError("its recording was not made on the GPU, or a source has changed")
            return "recorded"
        when = datetime.now(UTC).strftime("%Y-%m-%d")
        said = {"key": self.stamp, "date": when, "seconds": round(seconds, 1), **facts}
        if self.part == "tests":
            counts = output.strip().splitlines()[-1].strip("= ")
            said |= {"counts": counts}
        else:
            try:
                figures = json.loads(output.strip().splitlines()[-1])
            except (ValueError, IndexError):
                raise ValueError("it printed no figures") from None
            if not figures["rows"]:
                return ""
            counts = f"rows: {len(figures['rows'])}"
            said = {"topic": self.name.split("_", 1)[1].rpartition("_")[0], **said, **figures}
        replace(root / self.kept, (json.dumps(said, indent=1) + "\n").encode())
        return counts


def planned(
    root: Path, topics: Sequence[str], parts: Sequence[str], facts: Mapping[str, Any]
) -> list[Step]:
    """All steps of these parts, for these lessons' topics, in order."""
    device = facts["device"]
    made: dict[str, Callable[[], list[Step]]] = {
        "tests": lambda: tests(root, f", {device['count']} × {device['name']}"),
        "lessons": lambda: [lesson(topic, root) for topic in topics],
        "benchmarks": lambda: [
            benchmark(topic, ranks, root)
            for topic in topics
            if (root / "benchmarks" / f"{topic}.py").is_file()
            for ranks in sizes(device["count"])
        ],
    }
    return [step for part in PARTS if part in parts for step in made[part]()]


def sizes(gpus: int) -> list[int]:
    """How many ranks benchmarks take: two and four, as everywhere, and all GPUs of a larger one."""
    return [2, 4, *([gpus] if gpus > 4 else [])]


def tests(root: Path, where: str) -> list[Step]:
    """The tests that are marked `gpu`, in one step; none where no file has one."""
    files = [p for p in sorted(root.glob("tests/*.py")) if "mark.gpu" in p.read_text("utf-8")]
    if not files:
        return []
    names = [file.relative_to(root).as_posix() for file in files]
    keys = [reach_of_program(file, root) for file in files]
    key = Key((), {path: hashed for one in keys for path, hashed in one.files.items()})
    command = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", *names)
    return [Step("tests", "tests", command, WORK / "tests.json", key, extra=where)]


def lesson(topic: str, root: Path) -> Step:
    """The recording of a lesson."""
    book = notebook(topic, root)
    key = reach(topic, root, book)
    texts = [cell.source for cell in code_cells(book)]
    texts += [(root / path).read_text("utf-8") for path in key.files if path.endswith(".py")]
    used = [
        name
        for name in OPTIONAL
        if any(re.search(rf"(?m)^\s*(from|import) {name}\b", text) for text in texts)
    ]
    lacks = machine.missing(used)
    return Step(
        f"lesson_{topic}",
        "lessons",
        (sys.executable, "-m", "shardlab", "record", topic),
        RECORDED / f"{topic}.ipynb",
        key,
        f"needs {' and '.join(lacks)}, not installed here" if lacks else "",
        root=root,
    )


def benchmark(topic: str, ranks: int, root: Path) -> Step:
    """A topic's figures on so many ranks."""
    path = Path("benchmarks") / f"{topic}.py"
    options = ("--json", "--links", "gpu", "--ranks", str(ranks))
    return Step(
        f"benchmark_{topic}_{ranks}",
        "benchmarks",
        (sys.executable, str(path), *options),
        FIGURES / f"{topic}_{ranks}.json",
        reach_of_program(path, root),
    )


def reason(log: str) -> str:
    """The line of a log that says best what went wrong: that of its error, or the last one."""
    told = _TELLS.findall(log)
    lines = [line for line in log.splitlines() if line.strip()]
    if not (told or lines):
        return "it said nothing"
    # The first that pytest or `record` names; of tracebacks, the last.
    first = told[0] if told and told[0].startswith(("FAILED", "ERROR", "lessons/")) else ""
    return (first or (told or lines)[-1]).strip()
