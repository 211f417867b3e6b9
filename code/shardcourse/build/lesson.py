"""Write the skeleton of a planned lesson: a small one that builds, a file in each of its rooms.

    python -m shardlab lesson experts

What it is made from lies in lessons/.skeleton: the files in their places, with TOPIC, TITLE and
ABLE for what book/topics.yml says of the topic. Its entry there loses `planned: true`.
"""

from __future__ import annotations

import argparse
import re
import runpy
from importlib.util import find_spec
from pathlib import Path

from shardtools import options

from . import course, index, pairs

SKELETON = Path("lessons/.skeleton")


def write(topic: str, root: Path) -> list[str]:
    """Write the lesson's files, and what is made from them, and say what was done.

    Raises ValueError, and writes nothing, when the topic is not planned, or a file is there.
    """
    known = index.read(root).topics
    planned = [name for name, entry in known.items() if entry.planned]
    if topic not in planned:
        raise ValueError(
            f"topic={topic!r}: allowed are the planned ones, {', '.join(planned)}; for another one "
            f"write an entry with `planned: true` into {index.TOPICS} first"
        )
    if find_spec(topic):
        raise ValueError(f"topic={topic!r}: a script of that name would hide a module of Python's")
    words = {"TOPIC": topic, "TITLE": known[topic].title, "ABLE": known[topic].able}
    files = {}
    for path in sorted((root / SKELETON).rglob("*.*")):
        place = root / str(path.relative_to(root / SKELETON)).replace("TOPIC", topic)
        files[place] = re.sub("TOPIC|TITLE|ABLE", lambda m: words[m[0]], path.read_text("utf-8"))
    for place in files:
        for there in (place, place.with_suffix("")):  # a module may be a package
            if there.exists():
                raise ValueError(f"topic={topic!r}: {there.relative_to(root)} is there already")
    entries = (root / index.TOPICS).read_text("utf-8")
    entry = rf"(?m)^(( *)- topic: {topic}\n(?:\2  .*\n)*?)\2  planned: true\n"
    files[root / index.TOPICS], found = re.subn(entry, r"\1", entries)
    if not found:
        raise ValueError(f"{index.TOPICS}: {topic}: wanted is `planned: true` on a line of its own")
    for place, text in files.items():
        place.write_text(text, "utf-8")
    runpy.run_path(str(root / f"figures/{topic}.py"), run_name="__main__")
    done = [*files, *root.glob(f"figures/{topic}_*.svg")]
    return [*(f"wrote {path.relative_to(root)}" for path in done), *pairs.write(root)]


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `lesson` to the command line."""
    parser = options.command(commands, "lesson", __doc__)
    parser.add_argument("topic", nargs="?", default="", help="its name in book/topics.yml")
    parser.set_defaults(command=_main)


def _main(chosen: argparse.Namespace) -> int:
    for line in write(chosen.topic, course()):
        print(line)
    return 0
