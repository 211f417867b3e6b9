"""Index of the topics, book/topics.yml, and the files that are generated from it.

    >>> read(root).topics["gemm"].needs
    ['collectives']

`python -m shardlab pairs` writes the generated text: the table of contents, the map, and in some
pages the text between <!-- topics: … --> and <!-- end -->.
"""

from __future__ import annotations

import os
import re
import runpy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from . import paths
from .key import lessons
from .pace import anchor

TOPICS = Path("book/topics.yml")
CLAIMS = Path("book/claims.md")


@dataclass(frozen=True)
class Topic:
    """Lesson, with the fields that topics.yml explains."""

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
    """Part of the course: its topics, followed by pages that are no lessons."""

    part: str
    topics: Sequence[Topic] = ()
    pages: Sequence[str] = ()

    @property
    def files(self) -> list[str]:
        """Files of the part's pages, in order."""
        return [*(f"lessons/{topic.topic}" for topic in self.topics), *self.pages]


@dataclass(frozen=True)
class Index:
    """Parts of the course in the folder `root`, in order."""

    root: Path
    parts: Sequence[Part]

    @cached_property
    def topics(self) -> dict[str, Topic]:
        """All topics by name, in order."""
        return {topic.topic: topic for part in self.parts for topic in part.topics}

    @cached_property
    def pages(self) -> dict[str, paths.Page]:
        """Pages of the lessons, by topic."""
        return {
            name: paths.page(name, self.root, topic.exercises, topic.later)
            for name, topic in self.topics.items()
        }

    @cached_property
    def ways(self) -> dict[str, paths.Way]:
        """Paths through the course, by name."""
        titles = {name: topic.title for name, topic in self.topics.items()}
        return paths.read(self.root, titles, self.pages)


def read(root: Path) -> Index:
    """Return the index of the course in the folder `root`, without parts if it has no topics.yml.

    Raises ValueError, which names the entry, if an entry does not match lessons/.
    """
    import yaml

    if not (root / TOPICS).is_file():
        return Index(root, [])
    parts = []
    for entry in yaml.safe_load((root / TOPICS).read_text("utf-8"))["parts"]:
        try:
            topics = [Topic(**topic) for topic in entry.pop("topics", ())]
            parts.append(Part(topics=topics, **entry))
        except TypeError as error:
            raise ValueError(f"{TOPICS}: {entry.get('part')!r}: {error}") from None
    index = Index(root, parts)
    names = [topic.topic for part in parts for topic in part.topics]
    if sorted(names) != lessons(root):
        apart = set(names) ^ set(lessons(root)) or {name for name in names if names.count(name) > 1}
        raise ValueError(f"{TOPICS}: {', '.join(sorted(apart))}: allowed is one topic for a lesson")
    for place, topic in enumerate(index.topics.values()):
        before = names[:place]
        if wrong := {*topic.needs, *topic.after} - {*before}:
            raise ValueError(
                f"{TOPICS}: topic {topic.topic!r}: needs or after {', '.join(sorted(wrong))}: "
                f"allowed is what comes before: {before}"
            )
    return index


def listed(words: Sequence[str]) -> str:
    """Join words for a sentence: "a, b and c"."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def assumes(topic: Topic, link: Callable[[str], str]) -> str:
    """Return a sentence with a lesson's prerequisites; `link` turns a topic's name into a link."""
    needs, after = ([link(name) for name in names] for names in (topic.needs, topic.after))
    said = f"Assumes {listed(needs) or 'PyTorch, and nothing of parallelism'}"
    return said + (f"; easier after {listed(after)}." if after else ".")


def assumed(name: str, root: Path) -> str:
    """Return a sentence with a lesson's prerequisites, linked from lessons/; "" for other pages."""
    topics = read(root).topics
    if name not in topics:
        return ""
    return assumes(topics[name], lambda other: f"[{topics[other].title}]({other}.md)")


def made(root: Path) -> dict[Path, str]:
    """Return the contents of the files that are generated from the index; {} without an index."""
    index = read(root)
    if not index.parts:
        return {}
    drawing = runpy.run_path(str(root / "figures/index.py"))
    blocks = {
        ("book/index.md", "map"): [f"![{drawing['alt'](index)}](../figures/index_map.svg)"],
        ("book/index.md", "table"): _table(index),
        ("README.md", "lessons"): [
            f"- [{topic.title}](lessons/{name}.md): {topic.able}."
            for name, topic in index.topics.items()
        ],
    }
    if index.ways:
        project = (root / "book/project.md").is_file()
        blocks[str(paths.ALL), "paths"] = paths.overview(index.ways, index.pages)
        for way in index.ways.values():
            blocks[f"{way.docname}.md", "path"] = paths.table(way, project)
    if (root / CLAIMS).is_file():
        blocks[str(CLAIMS), "checked"] = _checked(index)
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
    """Return the book's table of contents."""
    import yaml

    parts = []
    for part in index.parts:
        chapters = [{"file": name} for name in part.files]
        parts += [{"caption": part.part, "chapters": chapters}] * bool(chapters)
    toc = {"format": "jb-book", "root": "book/index", "parts": parts}
    text = yaml.safe_dump(toc, sort_keys=False, allow_unicode=True)
    return f"# Made from {TOPICS} by `make pairs`.\n{text}"


def _table(index: Index) -> list[str]:
    """Return the landing page's table of lessons."""
    lines = ["| part | lesson | what you will be able to do |", "|---|---|---|"]
    for part in index.parts:
        for i, topic in enumerate(part.topics):
            link = f"[{topic.title}](../lessons/{topic.topic}.md)"
            lines.append(f"| {'' if i else part.part} | {link} | {topic.able} |")
    return lines


def _checked(index: Index) -> list[str]:
    """Return the claims in boxes marked Checked, page by page, each with a link to its section."""
    titles = {f"lessons/{name}": topic.title for name, topic in index.topics.items()}
    lines = []
    for name in [file for part in index.parts for file in part.files]:
        text = (index.root / f"{name}.md").read_text("utf-8")
        text = re.sub(r"^```{code-cell}.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
        link = os.path.relpath(f"{name}.md", CLAIMS.parent)
        section, claims = "", []
        for heading, claim in _BOX.findall(text):
            section = heading or section
            claims += [f"- [{claim}]({link}#{anchor(section)})"] * bool(claim)
        if claims:
            title = titles.get(name) or re.search(r"^# (.+)$", text, re.MULTILINE)[1]
            lines += [f"**[{title}]({link})**", "", *claims, ""]
    return lines[:-1]


# Matches a heading, or the claim in the title of a box.
_BOX = re.compile(r"^(?:##+ (.+)|`{3,}\{admonition\} Checked: (.+))$", re.MULTILINE)
