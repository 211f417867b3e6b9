"""The steps of `python -m shardlab gpu`: what each runs, what it keeps, when it holds.

A step holds while the file that it keeps carries the key of the sources as they are. So a second
call does only what is missing, failed, or out of date.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shardcourse.build import about, changed, code_cells, load, notebook, reach
from shardcourse.build.carry import FIGURES, RECORDED, WORK, replace
from shardcourse.build.key import Key, reach_of_program

from . import machine

# Each part: how many seconds a step may take before it counts as hanging, and the packages that it
# needs on every machine.
_ALWAYS = ("torch", "numpy", "cloudpickle", "tabulate", "psutil")
PARTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "tests": (900, (*_ALWAYS, "pytest")),
    "lessons": (1800, (*_ALWAYS, "matplotlib", "nbclient", "ipykernel", "jupytext")),
    "benchmarks": (3600, _ALWAYS),
}
# Libraries that some lessons use: without them the others go on.
OPTIONAL = ("deepspeed", "transformers", "pytorch_lightning")


@dataclass(frozen=True)
class Step:
    """One thing to do."""

    name: str  # and the name of its log
    part: str
    command: tuple[str, ...]  # for Python
    kept: Path  # the file that it leaves when it passes, below the root
    key: str  # over all that the result depends on
    lacks: str = ""  # why it cannot be done here

    def held(self, root: Path) -> dict[str, Any] | None:
        """What the file that it keeps says of it, if that holds; None otherwise."""
        path = root / self.kept
        if self.part == "lessons":
            book = load(path)
            if book is None or changed(book, path.stem, root):
                return None
            return about(book) if about(book)["device"]["kind"] == "cuda" else None
        with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
            said = json.loads(path.read_bytes())
            return said if said["key"] == self.key else None
        return None

    def keep(self, root: Path, output: str, facts: Mapping[str, Any], seconds: float) -> str:
        """After it passed: write what it keeps; return what the table says, "" for no figures.

        Raises ValueError for an output that holds nothing to keep.
        """
        if self.part == "lessons":  # `record` has written it
            if self.held(root) is None:
                raise ValueError("its recording was not made on the GPU, or a source has changed")
            return "recorded"
        when = datetime.now(UTC).strftime("%Y-%m-%d")
        said = {"key": self.key, "date": when, "seconds": seconds, **facts}
        last = (output.strip().splitlines() or [""])[-1]
        if self.part == "tests":
            says = said["counts"] = last.strip("= ")
        else:
            try:
                figures = json.loads(last)
            except ValueError:
                raise ValueError("it printed no figures") from None
            if not figures["rows"]:
                return ""
            says = f"rows: {len(figures['rows'])}"
            said = {"topic": self.kept.stem.rpartition("_")[0], **said, **figures}
        replace(root / self.kept, (json.dumps(said, indent=1) + "\n").encode())
        return says


def planned(
    root: Path, topics: Sequence[str], parts: Sequence[str], facts: Mapping[str, Any]
) -> list[Step]:
    """All steps of these parts, for these lessons' topics, in order."""
    gpus, found = facts["device"]["count"], []
    if "tests" in parts:
        found += tests(root, f"{gpus} × {facts['device']['name']}")
    if "lessons" in parts:
        found += [lesson(topic, root) for topic in topics]
    if "benchmarks" in parts:  # on two and four ranks, as everywhere, and on all GPUs of many
        sizes = [2, 4, *([gpus] if gpus > 4 else [])]
        measured = [topic for topic in topics if (root / f"benchmarks/{topic}.py").is_file()]
        found += [benchmark(topic, ranks, root) for topic in measured for ranks in sizes]
    return found


def tests(root: Path, where: str) -> list[Step]:
    """The tests that are marked `gpu`, in one step; none where no file has one."""
    files = [p for p in sorted(root.glob("tests/*.py")) if "mark.gpu" in p.read_text("utf-8")]
    if not files:
        return []
    reached = {p: h for file in files for p, h in reach_of_program(file, root).files.items()}
    names = [file.relative_to(root).as_posix() for file in files]
    command = ("-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", *names)
    key = f"{Key((), reached).text}, {where}"
    return [Step("tests", "tests", command, WORK / "tests.json", key)]


def lesson(topic: str, root: Path) -> Step:
    """The recording of a lesson."""
    book = notebook(topic, root)
    key = reach(topic, root, book)
    paths = [root / path for path in key.files if path.endswith(".py")]
    texts = [cell.source for cell in code_cells(book)] + [p.read_text("utf-8") for p in paths]
    imports = rf"(?m)^\s*(?:from|import) ({'|'.join(OPTIONAL)})\b"
    lacks = machine.missing(sorted(set(re.findall(imports, "\n".join(texts)))))
    return Step(
        f"lesson_{topic}",
        "lessons",
        ("-m", "shardlab", "record", topic),
        RECORDED / f"{topic}.ipynb",
        key.text,
        f"needs {' and '.join(lacks)}, not installed here" if lacks else "",
    )


def benchmark(topic: str, ranks: int, root: Path) -> Step:
    """A topic's figures on so many ranks."""
    program, name = f"benchmarks/{topic}.py", f"{topic}_{ranks}"
    command = (program, "--json", "--links", "gpu", "--ranks", str(ranks))
    key = reach_of_program(Path(program), root).text
    return Step(f"benchmark_{name}", "benchmarks", command, FIGURES / f"{name}.json", key)
