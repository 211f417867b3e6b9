"""Draw the map of the course for its landing page: python figures/index.py

A lesson stands below the last lesson that it needs, and further right: a line leads from one to
the other, and no two lines cross. What else it needs is written below its title. The boxes are
links, which matplotlib would draw as two each; so this picture is written as it is. It is as wide
as a phone, where its text can be read.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

from shardcourse.build.index import Index, Topic, listed, read

WIDE, INDENT = 344, 20  # pixels: the picture, and from a lesson to one that needs it
TITLE, NOTE, PAD, GAP = 18, 14, 5, 5  # a title's line, a note's; inside a box; between boxes
LETTER = 5.9  # how wide a letter of a note is, at most in the mean
# As a file of its own the picture has no page to take its ink and font from.
STYLE = (
    "svg:root{color:#1f2328;font-family:sans-serif}"
    "@media(prefers-color-scheme:dark){svg:root{color:#e6edf3}}"
)


@dataclass(frozen=True)
class Box:
    """A lesson on the map: where it stands, and what is written below its title."""

    topic: Topic
    below: str  # the lesson that a line comes from; "" for one that needs none
    left: int
    top: int
    high: int
    notes: list[str]

    @property
    def middle(self) -> float:
        """The height at which its line arrives."""
        return self.top + PAD + TITLE / 2


def direct(index: Index) -> dict[str, list[str]]:
    """What each lesson needs, without what follows from that."""
    behind: dict[str, set[str]] = {}  # all that a topic needs, and what that needs
    needs: dict[str, list[str]] = {}
    for topic in index.topics.values():
        here = [name for name in topic.needs if name in behind]
        behind[topic.topic] = {*here}.union(*(behind[other] for other in here))
        needs[topic.topic] = [n for n in here if not any(n in behind[one] for one in here)]
    return needs


def alt(index: Index) -> str:
    """What the picture says, in words."""
    title = {name: topic.title for name, topic in index.topics.items()}
    needs = direct(index)
    said = [f"{listed([title[name] for name, others in needs.items() if not others])} need none"]
    for name, others in needs.items():
        if others:
            said.append(f"{title[name]} needs {listed([title[other] for other in others])}")
    for topic in index.topics.values():
        after = [title[other] for other in topic.after if other in needs]
        said += [f"{topic.title} is easier after {listed(after)}"] * bool(after)
    return f"The lessons, and what each needs. {'. '.join(said)}."


def layout(index: Index) -> list[Box]:
    """The boxes from above to below."""
    place = list(index.topics)
    title = {name: topic.title for name, topic in index.topics.items()}
    needs = direct(index)
    boxes: list[Box] = []

    def put(topic: Topic, below: str, depth: int) -> None:
        also = [title[other] for other in needs[topic.topic] if other != below]
        said = [f"also needs {listed(also)}"] * bool(also)
        after = [title[other] for other in topic.after if other in needs and other != below]
        said += [f"easier after {listed(after)}"] * bool(after)
        left = 1 + depth * INDENT
        notes = textwrap.wrap("; ".join(said), int((WIDE - left - 2 * PAD - 3) / LETTER))
        top = boxes[-1].top + boxes[-1].high + GAP if boxes else 1
        high = 2 * PAD + TITLE + NOTE * len(notes)
        boxes.append(Box(topic, below, left, top, high, notes))
        for other in index.topics.values():
            if needs[other.topic] and max(needs[other.topic], key=place.index) == topic.topic:
                put(other, topic.topic, depth + 1)

    for topic in index.topics.values():
        if not needs[topic.topic]:
            put(topic, "", 0)
    return boxes


def lines(boxes: list[Box]) -> Iterator[list[tuple[float, float]]]:
    """The lines: from each lesson down, and to each that stands below it, right."""
    for box in boxes:
        into = [other for other in boxes if other.below == box.topic.topic]
        x = box.left + INDENT / 2
        if into:
            yield [(x, box.top + box.high), (x, into[-1].middle)]
        yield from ([(x, other.middle), (other.left, other.middle)] for other in into)


def text(x: float, y: float, words: str, **look: object) -> str:
    """A line of text with its baseline at y."""
    style = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in look.items())
    return f'<text x="{x:g}" y="{y:g}" fill="currentColor"{style}>{escape(words)}</text>'


def drawn(box: Box) -> str:
    """A lesson's box, which is a link."""
    parts = [
        f'<rect x="{box.left}" y="{box.top}" width="{WIDE - box.left - 1}" height="{box.high}" '
        f'rx="4" fill="currentColor" fill-opacity="0.08" stroke="currentColor"/>',
        text(box.left + PAD + 3, box.top + PAD + 14, box.topic.title, font_weight=600),
    ]
    for row, note in enumerate(box.notes, 1):
        y = box.top + PAD + 13 + NOTE * row + 1
        parts.append(text(box.left + PAD + 3, y, note, font_size="11px"))
    name = escape(f"{box.topic.title}: {box.topic.able}", quote=True)
    # The underline that pages draw has the fill of the link, not of its text.
    link = f'href="../lessons/{box.topic.topic}.html" aria-label="{name}" fill="currentColor"'
    return f"<a {link}>{''.join(parts)}</a>"


def svg(index: Index) -> str:
    """The picture."""
    boxes = layout(index)
    high = boxes[-1].top + boxes[-1].high + 1
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="group" '
        f'aria-label="{escape(alt(index), quote=True)}" '
        f'width="{WIDE}px" height="{high}px" viewBox="0 0 {WIDE} {high}" '
        f'font-size="14px"><style>{STYLE}</style>'
    )
    ways = [
        '<polyline points="' + " ".join(f"{x:g},{y:g}" for x, y in line) + '" fill="none" '
        'stroke="currentColor" stroke-width="1.4"/>'
        for line in lines(boxes)
    ]
    return "\n".join([head, *ways, *map(drawn, boxes), "</svg>"]) + "\n"


if __name__ == "__main__":
    path = Path(__file__).with_name("index_map.svg")
    path.write_text(svg(read(path.parents[1])), "utf-8")
