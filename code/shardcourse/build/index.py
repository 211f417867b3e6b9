"""Index of the topics, book/topics.yml, and the files that are generated from it.

    >>> read(root).topics["gemm"].needs
    ['collectives']

`python -m shardlab pairs` writes the generated text: the table of contents, and in some pages the
text between <!-- topics: … --> and <!-- end -->.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from . import paths
from .key import list_lessons
from .notebook_export import VERDICT
from .reading_time import make_anchor

TOPICS_FILE = Path("book/topics.yml")
CLAIMS_FILE = Path("book/claims.md")


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
            name: paths.load_page(name, self.root, topic.exercises, topic.later)
            for name, topic in self.topics.items()
        }

    @cached_property
    def learning_paths(self) -> dict[str, paths.LearningPath]:
        """Paths through the course, by name."""
        titles = {name: topic.title for name, topic in self.topics.items()}
        return paths.read_paths(self.root, titles, self.pages)


def read_index(root: Path) -> Index:
    """Return the index of the course in the folder `root`, without parts if it has no topics.yml.

    Raises ValueError, which names the entry, if an entry does not match lessons/.
    """
    import yaml

    if not (root / TOPICS_FILE).is_file():
        return Index(root, [])
    parts = []
    for entry in yaml.safe_load((root / TOPICS_FILE).read_text("utf-8"))["parts"]:
        try:
            topics = [Topic(**topic) for topic in entry.pop("topics", ())]
            parts.append(Part(topics=topics, **entry))
        except TypeError as error:
            raise ValueError(f"{TOPICS_FILE}: {entry.get('part')!r}: {error}") from None
    index = Index(root, parts)
    names = [topic.topic for part in parts for topic in part.topics]
    if sorted(names) != list_lessons(root):
        wrong = set(names) ^ set(list_lessons(root)) or {n for n in names if names.count(n) > 1}
        wrong = ", ".join(sorted(wrong))
        raise ValueError(f"{TOPICS_FILE}: {wrong}: each lesson must have exactly one topic")
    for place, topic in enumerate(index.topics.values()):
        before = names[:place]
        if wrong := {*topic.needs, *topic.after} - {*before}:
            place = (
                f"{TOPICS_FILE}: topic {topic.topic!r}: needs or after {', '.join(sorted(wrong))}"
            )
            raise ValueError(f"{place}: must be topics that come earlier: {before}")
    return index


def join_words(words: Sequence[str]) -> str:
    """Join words for a sentence: "a, b and c"."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def format_prerequisites(topic: Topic, link: Callable[[str], str]) -> str:
    """Return a sentence with a lesson's prerequisites; `link` turns a topic's name into a link."""
    needs, after = ([link(name) for name in names] for names in (topic.needs, topic.after))
    text = f"Assumes {join_words(needs) or 'PyTorch, and nothing of parallelism'}"
    return text + (f"; easier after {join_words(after)}." if after else ".")


def link_prerequisites(name: str, root: Path) -> str:
    """Return a sentence with a lesson's prerequisites, linked from lessons/; "" for other pages."""
    topics = read_index(root).topics
    if name not in topics:
        return ""
    return format_prerequisites(topics[name], lambda other: f"[{topics[other].title}]({other}.md)")


def generate_files(root: Path) -> dict[Path, str]:
    """Return the contents of the files that are generated from the index; {} without an index."""
    index = read_index(root)
    if not index.parts:
        return {}
    blocks = {
        ("book/index.md", "begin"): _format_begin(index),
        ("book/index.md", "map"): _format_map(index),
        ("README.md", "lessons"): [
            f"- [{topic.title}](lessons/{name}.md): {topic.able}."
            for name, topic in index.topics.items()
        ],
    }
    if index.learning_paths:
        project = (root / "book/project.md").is_file()
        overview = paths.format_overview(index.learning_paths, index.pages)
        blocks[str(paths.OVERVIEW_FILE), "paths"] = overview
        for path in index.learning_paths.values():
            blocks[f"{path.docname}.md", "path"] = paths.format_table(path, project)
    if (root / CLAIMS_FILE).is_file():
        blocks[str(CLAIMS_FILE), "checked"] = _list_checked_claims(index)
    found = {root / "_toc.yml": _generate_toc(index)}
    for (name, block), lines in blocks.items():
        text = found.get(root / name) or (root / name).read_text("utf-8")
        head, begin, rest = text.partition(f"<!-- topics: {block} -->\n")
        _, end, tail = rest.partition("<!-- end -->\n")
        if not end:
            raise ValueError(f"{name}: add the lines <!-- topics: {block} --> … <!-- end -->")
        found[root / name] = "\n".join([head + begin, *lines, "", end + tail])
    return found


def _generate_toc(index: Index) -> str:
    import yaml

    parts = []
    for part in index.parts:
        chapters = [{"file": name} for name in part.files]
        parts += [{"caption": part.part, "chapters": chapters}] * bool(chapters)
    toc = {"format": "jb-book", "root": "book/index", "parts": parts}
    text = yaml.safe_dump(toc, sort_keys=False, allow_unicode=True)
    return f"# Made from {TOPICS_FILE} by `make pairs`.\n{text}"


def _format_begin(index: Index) -> list[str]:
    topic = next(iter(index.topics.values()))
    minutes = index.pages[topic.topic].read_minutes
    title = f"Begin: {topic.title}, {minutes} minutes"
    lines = [f":::{{card}} {title}", f":link: ../lessons/{topic.topic}"]
    return [*lines, ":link-type: doc", f":link-alt: {title}", ":class-card: begin", ":::"]


def _format_map(index: Index) -> list[str]:
    """Return a grid with a column for each part; each lesson names those that it needs directly."""
    behind: dict[str, set[str]] = {}  # all direct and indirect prerequisites of a topic
    parts = [part for part in index.parts if part.topics]
    lines = [f"::::{{grid}} 2 2 3 {len(parts)}", ":class-container: lesson-map", ":gutter: 2", ""]
    for part in parts:
        lines += [":::{grid-item}", f"**{part.part}**", ""]
        for topic in part.topics:
            behind[topic.topic] = {*topic.needs}.union(*(behind[one] for one in topic.needs))
            direct = [n for n in topic.needs if not any(n in behind[one] for one in topic.needs)]
            needs = join_words([index.topics[name].title for name in direct])
            line = f"- [{topic.title}](../lessons/{topic.topic}.md)"
            lines.append(line + f" *needs {needs}*" * bool(needs))
        lines += [":::", ""]
    return [*lines[:-1], "::::"]


def _list_checked_claims(index: Index) -> list[str]:
    """Return the claims that boxes judge, page by page, each with a link to its section."""
    titles = {f"lessons/{name}": topic.title for name, topic in index.topics.items()}
    lines = []
    for name in [file for part in index.parts for file in part.files]:
        text = (index.root / f"{name}.md").read_text("utf-8")
        text = re.sub(r"^```{code-cell}.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
        link = os.path.relpath(f"{name}.md", CLAIMS_FILE.parent)
        section, claims = "", []
        for heading, verdict, claim in _BOX.findall(text):
            section = heading or section
            item = f"- {verdict}: [{claim}]({link}#{make_anchor(section)})"
            claims += [item] * bool(claim)
        if claims:
            title = titles.get(name) or re.search(r"^# (.+)$", text, re.MULTILINE)[1]
            lines += [f"**[{title}]({link})**", "", *claims, ""]
    return lines[:-1]


# Matches a heading, or the title of a box: the verdict and the claim.
_BOX = re.compile(rf"^(?:##+ (.+)|`{{3,}}\{{admonition\}} {VERDICT.pattern}(.+))$", re.MULTILINE)
