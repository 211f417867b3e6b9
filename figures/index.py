"""Draw the map of the course for its landing page: python figures/index.py

The lessons' boxes are links, which matplotlib would draw as two each; so this picture is written as
it is. Boxes stand in the order of book/topics.yml, and arrows find their ways themselves, on a grid
whose step is 8 of a phone's pixels: the picture is narrow, and a phone shows it whole.
"""

from __future__ import annotations

import heapq
import textwrap
from collections.abc import Iterator
from html import escape
from itertools import count, pairwise
from pathlib import Path

from shardlab.record.index import Index, Topic, read

STEP, ZOOM = 8, 1.2  # pixels of a step; by how much a desk's screen enlarges the picture
WIDE, HIGH, ROW = 13, 5, 3  # a box, in steps, and how many stand side by side
GAP = 4  # from box to box: room for three arrows
NAME, ABOVE, BELOW = 3, 2, 1  # a part's name, and what is free under it and under its last box
WIDTH = ROW * WIDE + (ROW + 1) * GAP
BEND, CROSS, ASIDE = 3, 8, 3  # what an arrow goes round, in steps
# As a file of its own the picture has no page to take its ink and font from.
STYLE = (
    "svg:root{color:#1f2328;font-family:sans-serif}"
    "@media(prefers-color-scheme:dark){svg:root{color:#e6edf3}}"
)
Point = tuple[int, int]
Place = tuple[int, int, int, int]  # left, top, width, height
Arrow = tuple[str, str, bool]  # from, to, and whether it is needed
Net = tuple[str, bool]  # arrows from one box, those that are needed or the others


def arrows(index: Index) -> list[Arrow]:
    """All arrows, but for those that follow from needs."""
    topics = index.topics
    behind: dict[str, set[str]] = {}  # all that a topic needs, and what that needs
    for name, topic in topics.items():
        behind[name] = {*topic.needs}.union(*(behind[other] for other in topic.needs))
    return [
        (other, name, other in topic.needs)
        for name, topic in topics.items()
        for other in (*topic.needs, *topic.after)
        if not any(other in behind[one] for one in topic.needs)
    ]


def alt(index: Index) -> str:
    """What the picture says, in words."""
    title = {name: topic.title for name, topic in index.topics.items()}
    needs: dict[str, list[str]] = {name: [] for name in title}
    for before, name, needed in arrows(index):
        needs[name] += [title[before]] * needed

    def listed(words: list[str]) -> str:
        return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))

    free = [topic.title for topic in index.here if not needs[topic.topic]]
    said = [f"{listed(free)} need none"]
    said += [f"{title[name]} needs {listed(others)}" for name, others in needs.items() if others]
    said += [f"{title[b]} reads better after {title[a]}" for a, b, n in arrows(index) if not n]
    planned = [topic.title for topic in index.topics.values() if topic.planned]
    said += [f"Planned: {listed(planned)}"] * bool(planned)
    return f"The lessons, in the parts of the course, and what each needs. {'. '.join(said)}."


def layout(index: Index) -> tuple[dict[str, Place], dict[str, Place]]:
    """The places of the parts and of the topics, by name, in steps."""
    parts: dict[str, Place] = {}
    boxes: dict[str, Place] = {}
    top = 0
    for part in index.parts:
        for i, topic in enumerate(part.topics):
            x, y = GAP + i % ROW * (WIDE + GAP), top + NAME + ABOVE + i // ROW * (HIGH + GAP)
            wide = WIDE if part.topics[1:] else WIDTH - 2 * GAP
            boxes[topic.topic] = (x, y, wide, HIGH)
        if part.topics:
            parts[part.part] = (0, top, WIDTH, y + HIGH + BELOW - top)
            top = y + HIGH + BELOW + 1
    return parts, boxes


class Wires:
    """Ways for arrows along the points of a grid that are free.

    Arrows of one net, from one box, share what they can, as a tree does. Others cross it, and no
    more: on no step of the grid do two run, and none bends or ends where another one is.
    """

    def __init__(self, free: set[Point]):
        self.free = free
        self.at: dict[Point, dict[Net, set[bool]]] = {}  # nets, and whether they run upright there
        self.trees: dict[Net, dict[Point, int]] = {}  # how far its points are from a net's box

    def others(self, point: Point, net: Net) -> set[bool]:
        """Whether other nets run upright at `point`, or flat."""
        nets = self.at.get(point)
        return {u for other, ways in nets.items() if other != net for u in ways} if nets else set()

    def draw(self, net: Net, starts: dict[Point, float], ends: dict[Point, float]) -> list[Point]:
        """The way of an arrow from one of `starts`, or from the net's tree, to one of `ends`.

        Starts and ends have their prices, and lie where nothing is free. [] when there is no way.
        """
        number = count()  # of equal prices, the first one found
        starts = {**starts, **{point: 0.3 * far for point, far in self.trees.get(net, {}).items()}}
        heap: list[tuple] = [
            (price, next(number), [point], None)
            for point, price in starts.items()
            if not self.others(point, net)
        ]
        heapq.heapify(heap)
        seen = set()
        while heap:
            price, _, path, way = heapq.heappop(heap)
            (x, y) = point = path[-1]
            if (point, way) in seen:
                continue
            if point in ends:
                return self.keep(net, path)
            seen.add((point, way))
            for turn in ((0, 1), (1, 0), (-1, 0), (0, -1)):
                onto, upright, bends = (x + turn[0], y + turn[1]), bool(turn[1]), turn != way
                if onto in ends:  # straight, and where nobody else came
                    fits = not bends and not self.others(onto, net)
                else:
                    fits = onto in self.free and upright not in self.others(onto, net)
                if not fits or (bends and self.others(point, net)):
                    continue
                more = 1 + ends.get(onto, 0) + BEND * bends + CROSS * bool(self.others(onto, net))
                heapq.heappush(heap, (price + more, next(number), [*path, onto], turn))
        return []

    def keep(self, net: Net, path: list[Point]) -> list[Point]:
        """Remember a net's new way."""
        tree = self.trees.setdefault(net, {})
        far = tree.get(path[0], 0)
        for i, point in enumerate(path[:-2]):  # from the head of an arrow none parts
            tree.setdefault(point, far + i)
        for (x, y), (u, v) in pairwise(path):
            for point in ((x, y), (u, v)):
                self.at.setdefault(point, {}).setdefault(net, set()).add(y != v)
        for end in (path[0], path[-1]):
            self.at[end][net] |= {True, False}
        return path


def ports(place: Place) -> Iterator[tuple[str, Point, float]]:
    """The points of a box where arrows may leave or come: the side, the point, its price."""
    x, y, wide, high = place
    for i in range(2, wide - 1):
        for side, j in (("top", 0), ("bottom", high)):
            yield side, (x + i, y + j), abs(i - wide / 2) / 2
    for j in range(1, high):
        for side, i in (("left", 0), ("right", wide)):
            yield side, (x + i, y + j), abs(j - high / 2) / 2 + ASIDE


def routes(index: Index) -> dict[Arrow, list[Point]]:
    """Each arrow's way, from its box or from where it parts from another arrow of that box.

    Raises ValueError when there is no room for one.
    """
    parts, boxes = layout(index)
    _, top, _, high = [*parts.values()][-1]
    free = {(x, y) for x in range(1, WIDTH) for y in range(1, top + high)}
    for x, y, wide, high in boxes.values():
        free -= {(x + i, y + j) for i in range(wide + 1) for j in range(high + 1)}
    for name, (_, top, _, _) in parts.items():
        free -= {(GAP + i, top + j) for i in range(len(name) + 1) for j in range(NAME)}

    def length(arrow: Arrow) -> int:
        return sum(abs(a - b) for a, b in zip(boxes[arrow[0]], boxes[arrow[1]], strict=True))

    todo = sorted(arrows(index), key=length)
    for _ in todo:
        wires, found = Wires(free), {}
        for arrow in todo:
            before, after, needed = arrow
            starts = {point: c for side, point, c in ports(boxes[before]) if side != "top"}
            ends = {point: c for side, point, c in ports(boxes[after]) if side != "bottom"}
            found[arrow] = wires.draw((before, needed), starts, ends)
        if all(found.values()):
            return found
        todo.sort(key=lambda arrow: bool(found[arrow]))  # those without a way come first
    before, after, _ = todo[0]
    raise ValueError(f"figures/index.py: GAP={GAP}: no room for an arrow from {before} to {after}")


def text(x: float, y: float, words: str, **look: object) -> str:
    """A line of text with its baseline at y."""
    style = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in look.items())
    return f'<text x="{x:g}" y="{y:g}" fill="currentColor"{style}>{escape(words)}</text>'


def rectangle(place: Place, look: str) -> str:
    """A rectangle with round corners."""
    x, y, wide, high = (STEP * length for length in place)
    return f'<rect x="{x}" y="{y}" width="{wide}" height="{high}" rx="4" {look}/>'


def box(topic: Topic, place: Place) -> str:
    """A lesson: a link where it exists."""
    dashes = ' stroke-dasharray="4 3"' if topic.planned else ""
    fill = f'fill="currentColor" fill-opacity="{0 if topic.planned else 0.1}"'
    parts = [rectangle(place, f'{fill} stroke="currentColor"{dashes}')]
    words = topic.title if place[2] == WIDE else f"{topic.title}: {topic.able}"
    lines = textwrap.wrap(words, place[2])  # a letter is no wider than a step
    x, y = STEP * (place[0] + place[2] / 2), STEP * (place[1] + place[3] / 2)
    for row, part in enumerate(lines):
        look = {"text_anchor": "middle", "font_weight": 400 if topic.planned else 600}
        parts.append(text(x, y + 4.5 + 15 * row - 7.5 * (len(lines) - 1), part, **look))
    inside = "".join(parts)
    if topic.planned:
        return inside
    name = escape(words, quote=True)
    # The underline that pages draw has the fill of the link, not of its text.
    link = f'href="../lessons/{topic.topic}.html" aria-label="{name}" fill="currentColor"'
    return f"<a {link}>{inside}</a>"


def line(points: list[Point], needed: bool) -> str:
    """An arrow along `points`."""
    (x0, y0), (x1, y1) = points[-2:]
    dx, dy, x, y = x1 - x0, y1 - y0, STEP * x1, STEP * y1
    bends = [
        b
        for a, b, c in zip(points, points[1:], points[2:], strict=False)
        if (a[0] == b[0]) != (b[0] == c[0])
    ]
    path = " ".join(f"{STEP * x},{STEP * y}" for x, y in [points[0], *bends])
    left, right = ((x - 7 * dx - i * dy, y - 7 * dy - i * dx) for i in (4, -4))
    dashes = "" if needed else ' stroke-dasharray="2 3"'
    return (
        f'<polyline points="{path} {x - 5 * dx},{y - 5 * dy}" fill="none" stroke="currentColor" '
        f'stroke-width="1.4"{dashes}/><polygon points="{x},{y} {left[0]},{left[1]} '
        f'{right[0]},{right[1]}" fill="currentColor"/>'
    )


def elements(index: Index, foot: int) -> Iterator[str]:
    """The picture's elements, from the back to the front; the legend stands around `foot`."""
    parts, boxes = layout(index)
    for words, place in parts.items():
        yield rectangle(place, 'fill="currentColor" fill-opacity="0.06"')
        yield text(STEP * GAP, STEP * place[1] + 19, words, font_weight=700)
    leave = {point for place in boxes.values() for _, point, _ in ports(place)}
    for (_, _, needed), points in routes(index).items():
        yield line(points, needed)
        if points[0] not in leave:  # a dot where it parts from another: lines that cross have none
            x, y = points[0]
            yield f'<circle cx="{STEP * x}" cy="{STEP * y}" r="2.6" fill="currentColor"/>'
    yield from (box(topic, boxes[name]) for name, topic in index.topics.items())
    yield line([(4, foot), (6, foot), (7, foot)], True)
    yield line([(17, foot), (19, foot), (20, foot)], False)
    dashes = 'fill="none" stroke="currentColor" stroke-dasharray="4 3"'
    yield rectangle((36, foot - 1, 3, 2), dashes)
    for x, words in ((8, "needs"), (21, "better after"), (40, "planned")):
        yield text(STEP * x, STEP * foot + 4.5, words)


def svg(index: Index) -> str:
    """The picture."""
    _, top, wide, high = [*layout(index)[0].values()][-1]
    foot = top + high + 2
    wide, high = STEP * wide, STEP * (foot + 2)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="group" '
        f'aria-label="{escape(alt(index), quote=True)}" '
        f'width="{wide * ZOOM:g}px" height="{high * ZOOM:g}px" viewBox="0 0 {wide} {high}" '
        f'font-size="13px"><style>{STYLE}</style>'
    )
    return "\n".join([head, *elements(index, foot), "</svg>"]) + "\n"


if __name__ == "__main__":
    path = Path(__file__).with_name("index_map.svg")
    path.write_text(svg(read(path.parents[1])), "utf-8")
