"""What is known of a topic beside its files, book/topics.yml, and what is made from it.

    >>> read(root).topics["gemm"].needs
    ['collectives']

`python -m shardlab pairs` writes what is made: the contents, the map, and in some pages what
stands between <!-- topics: … --> and <!-- end -->.
"""

from __future__ import annotations

import os
import re
import runpy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from . import paths
from .key import lessons
from .pace import anchor

TOPICS = Path("book/topics.yml")
CLAIMS = Path("book/claims.md")


@dataclass(frozen=True)
class Topic:
    """A lesson; topics.yml says what the fields are."""

    topic: str
    title: str
    able: str
    needs: Sequence[str] = ()
    after: Sequence[str] = ()
    module: str = ""
    exercises: int = 0
    later: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """A part of the course: its topics, and after them pages that are no lessons."""

    part: str
    topics: Sequence[Topic] = ()
    pages: Sequence[str] = ()


@dataclass(frozen=True)
class Index:
    """The parts of the course in their order."""

    parts: Sequence[Part]

    @property
    def topics(self) -> dict[str, Topic]:
        """All topics by their names, in their order."""
        return {topic.topic: topic for part in self.parts for topic in part.topics}

    @property
    def here(self) -> list[Topic]:
        """All topics in their order."""
        return list(self.topics.values())

    def needed_by(self, name: str) -> list[Topic]:
        """The topics that need this one."""
        return [topic for topic in self.here if name in topic.needs]


def read(root: Path) -> Index:
    """The index of the course in the folder `root`.

    Raises ValueError, which names the entry, when it does not fit lessons/.
    """
    import yaml

    data = _made(Index, yaml.safe_load((root / TOPICS).read_text("utf-8")))
    parts = []
    for entry in data.parts:
        part = _made(Part, entry)
        parts.append(Part(part.part, [_made(Topic, topic) for topic in part.topics], part.pages))
    index = Index(parts)
    _check(index, root)
    return index


def _made(kind: type, entry: Any) -> Any:
    """An object of the class `kind` with the values in `entry`."""
    try:
        return kind(**{key: value for key, value in entry.items() if value is not None})
    except (AttributeError, TypeError) as error:
        names = ", ".join(field.name for field in fields(kind))
        wrong = str(error).partition(" ")[2]
        raise ValueError(f"{TOPICS}: {entry}: {wrong}; known are {names}") from None


def _check(index: Index, root: Path) -> None:
    """Raise ValueError when entries do not fit one another, or what lies in `root`."""
    topics = [topic for part in index.parts for topic in part.topics]
    names = [topic.topic for topic in topics]
    if sorted(names) != lessons(root):
        apart = set(names) ^ set(lessons(root)) or {name for name in names if names.count(name) > 1}
        raise ValueError(f"{TOPICS}: {', '.join(sorted(apart))}: allowed is one topic for a lesson")
    for place, topic in enumerate(topics):
        before = names[:place]
        if wrong := {*topic.needs, *topic.after} - {*before}:
            raise ValueError(
                f"{TOPICS}: topic {topic.topic!r}: needs or after {', '.join(sorted(wrong))}: "
                f"allowed is what comes before: {before}"
            )


def pages(index: Index, root: Path) -> dict[str, paths.Page]:
    """The lessons' pages, by their names."""
    return {
        topic.topic: paths.page(topic.topic, root, topic.exercises, topic.later)
        for topic in index.here
    }


def ways(index: Index, root: Path, lessons: dict[str, paths.Page]) -> dict[str, paths.Way]:
    """The paths through the course, by their names; `lessons` are their pages."""
    return paths.read(root, {topic.topic: topic.title for topic in index.here}, lessons)


def listed(words: Sequence[str]) -> str:
    """Words in a sentence: "a, b and c"."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def assumes(topic: Topic, link: Callable[[str], str]) -> str:
    """What a lesson assumes, in a sentence; `link` makes the name of a topic a link to it."""
    needs, after = ([link(name) for name in names] for names in (topic.needs, topic.after))
    said = f"Assumes {listed(needs) or 'PyTorch, and nothing of parallelism'}"
    return said + (f"; easier after {listed(after)}." if after else ".")


def assumed(name: str, root: Path) -> str:
    """What a lesson assumes, in a sentence with links for lessons/; "" for other pages."""
    topics = read(root).topics if (root / TOPICS).is_file() else {}
    if name not in topics:
        return ""
    return assumes(topics[name], lambda other: f"[{topics[other].title}]({other}.md)")


def made(root: Path) -> dict[Path, str]:
    """What the files that are made from the index should hold; none where there is no index."""
    if not (root / TOPICS).is_file():
        return {}
    index = read(root)
    drawing = runpy.run_path(str(root / "figures/index.py"))
    blocks = {
        ("book/index.md", "map"): [f"![{drawing['alt'](index)}](../figures/index_map.svg)"],
        ("book/index.md", "table"): _table(index),
        ("README.md", "lessons"): _lessons(index),
    }
    here = pages(index, root)
    if through := ways(index, root, here):
        project = (root / "book/project.md").is_file()
        blocks[str(paths.ALL), "paths"] = paths.overview(through, here)
        for way in through.values():
            blocks[f"{way.docname}.md", "path"] = paths.table(way, project)
    if (root / CLAIMS).is_file():
        blocks[str(CLAIMS), "checked"] = _checked(index, root)
    found = {
        root / "_toc.yml": _contents(index),
        root / "figures/index_map.svg": drawing["svg"](index),
    }
    for (name, block), lines in blocks.items():
        text = found.get(root / name) or (root / name).read_text("utf-8")
        head, begin, rest = text.partition(f"<!-- topics: {block} -->\n")
        _, end, tail = rest.partition("<!-- end -->\n")
        if not end:
            raise ValueError(f"{name}: wanted is <!-- topics: {block} --> … <!-- end -->")
        found[root / name] = "\n".join([head + begin, *lines, "", end + tail])
    return found


def _contents(index: Index) -> str:
    """The book's table of contents."""
    import yaml

    parts = []
    for part in index.parts:
        chapters = [{"file": name} for name in _files(part)]
        parts += [{"caption": part.part, "chapters": chapters}] * bool(chapters)
    toc = {"format": "jb-book", "root": "book/index", "parts": parts}
    text = yaml.safe_dump(toc, sort_keys=False, allow_unicode=True)
    return f"# Made from {TOPICS} by `make pairs`.\n{text}"


def _table(index: Index) -> list[str]:
    """The landing page's table of the lessons."""
    lines = ["| part | lesson | what you will be able to do |", "|---|---|---|"]
    for part in index.parts:
        for i, topic in enumerate(part.topics):
            link = f"[{topic.title}](../lessons/{topic.topic}.md)"
            lines.append(f"| {'' if i else part.part} | {link} | {topic.able} |")
    return lines


def _lessons(index: Index) -> list[str]:
    """The README's list of the lessons."""
    return [f"- [{topic.title}](lessons/{topic.topic}.md): {topic.able}." for topic in index.here]


def _checked(index: Index, root: Path) -> list[str]:
    """The claims in boxes marked Checked, page by page, each with a link to its section."""
    pages = {f"lessons/{topic.topic}": topic.title for topic in index.here}
    lines = []
    for name in [file for part in index.parts for file in _files(part)]:
        text = (root / f"{name}.md").read_text("utf-8")
        text = re.sub(r"^```{code-cell}.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
        link = os.path.relpath(f"{name}.md", CLAIMS.parent)
        section, claims = "", []
        for heading, claim in _BOX.findall(text):
            section = heading or section
            claims += [f"- [{claim}]({link}#{anchor(section)})"] * bool(claim)
        if claims:
            title = pages.get(name) or re.search(r"^# (.+)$", text, re.MULTILINE)[1]
            lines += [f"**[{title}]({link})**", "", *claims, ""]
    return lines[:-1]


# A heading, or the claim in the title of a box.
_BOX = re.compile(r"^(?:##+ (.+)|`{3,}\{admonition\} Checked: (.+))$", re.MULTILINE)


def _files(part: Part) -> list[str]:
    """The files of a part, in their order."""
    return [*(f"lessons/{topic.topic}" for topic in part.topics), *part.pages]
