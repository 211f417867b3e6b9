"""Draw the map of the course for its landing page (python figures/index.py).

A lesson is below the last lesson that it needs, and further right: a line leads from one to the
other, and no two lines cross. Its other prerequisites are written below its title. The boxes are
links, which matplotlib would draw as two each; so this file writes the SVG itself. The picture is
as wide as a phone, where its text can be read.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

from shardcourse.build.index import Index, Topic, join_words, read_index

WIDE, INDENT = 344, 20  # pixels: the picture, and the indent of a dependent lesson
TITLE, NOTE, PAD, GAP = 18, 14, 5, 5  # heights of title and note, padding, gap of boxes
LETTER = 5.9  # pixels: mean width of a letter in a note, at most
# A standalone SVG file inherits no colour and font from a page.
STYLE = (
    "svg:root{color:#1f2328;font-family:sans-serif}"
    "@media(prefers-color-scheme:dark){svg:root{color:#e6edf3}}"
)


@dataclass(frozen=True)
class Box:
    """Box of a lesson on the map: its position, and the notes below its title."""

    topic: Topic
    below: str  # the lesson above, where the line to this box starts; "" without prerequisites
    left: int
    top: int
    high: int
    notes: list[str]

    @property
    def middle(self) -> float:
        """Height at which the line to the box arrives."""
        return self.top + PAD + TITLE / 2


def find_direct_needs(index: Index) -> dict[str, list[str]]:
    """Return each lesson's direct prerequisites, without those that follow from others."""
    behind: dict[str, set[str]] = {}  # all direct and indirect prerequisites of a topic
    needs: dict[str, list[str]] = {}
    for topic in index.topics.values():
        here = [name for name in topic.needs if name in behind]
        behind[topic.topic] = {*here}.union(*(behind[other] for other in here))
        needs[topic.topic] = [n for n in here if not any(n in behind[one] for one in here)]
    return needs


def describe_map(index: Index) -> str:
    """Return the alternative text of the map."""
    title = {name: topic.title for name, topic in index.topics.items()}
    needs = find_direct_needs(index)
    said = [
        f"{join_words([title[name] for name, others in needs.items() if not others])} need none"
    ]
    for name, others in needs.items():
        if others:
            said.append(f"{title[name]} needs {join_words([title[other] for other in others])}")
    for topic in index.topics.values():
        after = [title[other] for other in topic.after if other in needs]
        said += [f"{topic.title} is easier after {join_words(after)}"] * bool(after)
    return f"The lessons, and what each needs. {'. '.join(said)}."


def layout(index: Index) -> list[Box]:
    """Return the boxes from top to bottom."""
    place = list(index.topics)
    title = {name: topic.title for name, topic in index.topics.items()}
    needs = find_direct_needs(index)
    boxes: list[Box] = []

    def place_topic(topic: Topic, below: str, depth: int) -> None:
        also = [title[other] for other in needs[topic.topic] if other != below]
        said = [f"also needs {join_words(also)}"] * bool(also)
        after = [title[other] for other in topic.after if other in needs and other != below]
        said += [f"easier after {join_words(after)}"] * bool(after)
        left = 1 + depth * INDENT
        notes = textwrap.wrap("; ".join(said), int((WIDE - left - 2 * PAD - 3) / LETTER))
        top = boxes[-1].top + boxes[-1].high + GAP if boxes else 1
        high = 2 * PAD + TITLE + NOTE * len(notes)
        boxes.append(Box(topic, below, left, top, high, notes))
        for other in index.topics.values():
            if needs[other.topic] and max(needs[other.topic], key=place.index) == topic.topic:
                place_topic(other, topic.topic, depth + 1)

    for topic in index.topics.values():
        if not needs[topic.topic]:
            place_topic(topic, "", 0)
    return boxes


def list_lines(boxes: list[Box]) -> Iterator[list[tuple[float, float]]]:
    """Yield the lines: from each lesson down, then right to each box below it."""
    for box in boxes:
        into = [other for other in boxes if other.below == box.topic.topic]
        x = box.left + INDENT / 2
        if into:
            yield [(x, box.top + box.high), (x, into[-1].middle)]
        yield from ([(x, other.middle), (other.left, other.middle)] for other in into)


def render_text(x: float, y: float, words: str, **look: object) -> str:
    """Return a line of SVG text with its baseline at y."""
    style = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in look.items())
    return f'<text x="{x:g}" y="{y:g}" fill="currentColor"{style}>{escape(words)}</text>'


def render_box(box: Box) -> str:
    """Return a lesson's box as an SVG link."""
    parts = [
        f'<rect x="{box.left}" y="{box.top}" width="{WIDE - box.left - 1}" height="{box.high}" '
        f'rx="4" fill="currentColor" fill-opacity="0.08" stroke="currentColor"/>',
        render_text(box.left + PAD + 3, box.top + PAD + 14, box.topic.title, font_weight=600),
    ]
    for row, note in enumerate(box.notes, 1):
        y = box.top + PAD + 13 + NOTE * row + 1
        parts.append(render_text(box.left + PAD + 3, y, note, font_size="11px"))
    name = escape(f"{box.topic.title}: {box.topic.able}", quote=True)
    # Pages underline links in the colour of the link's fill, not of its text's fill.
    link = f'href="../lessons/{box.topic.topic}.html" aria-label="{name}" fill="currentColor"'
    return f"<a {link}>{''.join(parts)}</a>"


def render_map(index: Index) -> str:
    """Return the map as an SVG document."""
    boxes = layout(index)
    high = boxes[-1].top + boxes[-1].high + 1
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="group" '
        f'aria-label="{escape(describe_map(index), quote=True)}" '
        f'width="{WIDE}px" height="{high}px" viewBox="0 0 {WIDE} {high}" '
        f'font-size="14px"><style>{STYLE}</style>'
    )
    ways = [
        '<polyline points="' + " ".join(f"{x:g},{y:g}" for x, y in line) + '" fill="none" '
        'stroke="currentColor" stroke-width="1.4"/>'
        for line in list_lines(boxes)
    ]
    return "\n".join([head, *ways, *map(render_box, boxes), "</svg>"]) + "\n"


if __name__ == "__main__":
    path = Path(__file__).with_name("index_map.svg")
    path.write_text(render_map(read_index(path.parents[1])), "utf-8")
