"""Draw the map of the course for its landing page: python figures/index.py

The lessons' boxes are links, which matplotlib would draw as two each; so this picture is written as
it is. Its lengths are a phone's pixels or so: it is narrow, and a phone shows it whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
WIDTH, HEIGHT, ZOOM = 440, 470, 1.3
COLUMNS = (26, 174, 314)  # left edges of the boxes
BOX = (114, 40)
# As a file of its own the picture has no page to take its ink and font from.
STYLE = (
    "svg:root{color:#1f2328;font-family:sans-serif}"
    "@media(prefers-color-scheme:dark){svg:root{color:#e6edf3}}"
)
PARTS = {  # left, top, width, height
    "One GPU is not enough": (2, 60, 436, 94),
    "Copies": (2, 170, 150, 212),
    "Cuts": (164, 170, 274, 150),
    "Together": (164, 332, 274, 134),
}
LESSONS = {  # column and top of each box, and its lines, in the order of the contents
    "memory": (1, 102, "Memory"),
    "collectives": (0, 102, "Collectives"),
    "gemm": (2, 102, "GEMM"),
    "data_parallel": (0, 204, "Data\nparallelism"),
    "zero": (0, 268, "ZeRO"),
    "checkpoint": (0, 332, "Checkpoints"),
    "pipeline": (1, 204, "Pipeline\nparallelism"),
    "tensor_parallel": (2, 204, "Tensor\nparallelism"),
    "sequence_parallel": (2, 268, "Sequence\nparallelism"),
    "experts": (1, 268, "Experts"),
    "mesh": (2, 364, "Meshes"),
    "deepspeed_engine": (1, 364, "DeepSpeed"),
    "strategy": (1, 414, "Strategy"),
    "cluster": (2, 414, "Clusters"),
}
PLANNED = {"experts", "mesh", "strategy", "cluster"}
# What each arrow goes through, from the lesson that is needed to the one that needs it.
NEEDS = {
    ("collectives", "gemm"): [(83, 102), (83, 91), (305, 91), (305, 122), (314, 122)],
    ("collectives", "tensor_parallel"): [(305, 122), (305, 224), (314, 224)],
    ("collectives", "data_parallel"): [(83, 142), (83, 204)],
    ("memory", "pipeline"): [(231, 142), (231, 204)],
    ("memory", "sequence_parallel"): [(288, 130), (296, 130), (296, 288), (314, 288)],
    ("data_parallel", "pipeline"): [(140, 224), (174, 224)],
    ("data_parallel", "zero"): [(83, 244), (83, 268)],
    ("data_parallel", "checkpoint"): [(26, 232), (14, 232), (14, 352), (26, 352)],
    ("zero", "deepspeed_engine"): [(140, 288), (158, 288), (158, 384), (174, 384)],
    ("tensor_parallel", "sequence_parallel"): [(371, 244), (371, 268)],
}
BETTER = {
    ("gemm", "tensor_parallel"): [(371, 142), (371, 204)],
    ("zero", "checkpoint"): [(83, 308), (83, 332)],
}


def alt() -> str:
    """What the picture says, in words."""
    words = {topic: lines.replace("\n", " ") for topic, (_, _, lines) in LESSONS.items()}
    needs: dict[str, list[str]] = {}
    for before, after in NEEDS:
        needs.setdefault(after, []).append(words[before])
    said = [
        f"{words[topic]} needs {' and '.join(needs[topic])}" for topic in words if topic in needs
    ]
    after = [f"{words[b]} reads better after {words[a]}" for a, b in BETTER]
    free = [words[t] for t in words if t not in needs and t not in PLANNED]
    planned = ", ".join(words[topic] for topic in words if topic in PLANNED)
    return (
        "The lessons, in the parts of the course, and what each needs. Model parallelism shows the "
        f"whole subject and needs none. {' and '.join(free)} need none. {'. '.join(said)}. "
        f"{'. '.join(after)}. Planned: {planned}."
    )


def text(x: float, y: float, words: str, **look: object) -> str:
    """A line of text with its baseline at y."""
    style = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in look.items())
    return f'<text x="{x:g}" y="{y:g}" fill="currentColor"{style}>{escape(words)}</text>'


def rectangle(x: float, y: float, wide: float, high: float, look: str) -> str:
    """A rectangle with round corners."""
    return f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" rx="4" {look}/>'


def box(topic: str, place: tuple[float, float, float, float], lines: list[str]) -> str:
    """A lesson: a link where it exists."""
    x, y, wide, high = place
    here = topic not in PLANNED
    dashes = "" if here else ' stroke-dasharray="4 3"'
    fill = f'fill="currentColor" fill-opacity="{0.1 if here else 0}" stroke="currentColor"{dashes}'
    parts = [rectangle(x, y, wide, high, fill)]
    first = y + high / 2 + 4.5 - 7.5 * (len(lines) - 1)
    for row, words in enumerate(lines):
        look = {"text_anchor": "middle", "font_weight": 600 if here else 400}
        parts.append(text(x + wide / 2, first + 15 * row, words, **look))
    inside = "".join(parts)
    if not here:
        return inside
    name = escape(" ".join(lines), quote=True)
    # The underline that pages draw has the fill of the link, not of its text.
    return f'<a href="../lessons/{topic}.html" aria-label="{name}" fill="currentColor">{inside}</a>'


def line(points: list[tuple[int, int]], dotted: bool = False) -> str:
    """An arrow along `points`."""
    (x0, y0), (x1, y1) = points[-2:]
    dx, dy = (x1 > x0) - (x1 < x0), (y1 > y0) - (y1 < y0)
    dashes = ' stroke-dasharray="2 3"' if dotted else ""
    path = " ".join(f"{x},{y}" for x, y in [*points[:-1], (x1 - 5 * dx, y1 - 5 * dy)])
    back = x1 - 7 * dx, y1 - 7 * dy
    tip = f"{x1},{y1} {back[0] - 4 * dy},{back[1] - 4 * dx} {back[0] + 4 * dy},{back[1] + 4 * dx}"
    return (
        f'<polyline points="{path}" fill="none" stroke="currentColor" stroke-width="1.4"{dashes}/>'
        f'<polygon points="{tip}" fill="currentColor"/>'
    )


def elements() -> Iterator[str]:
    """The picture's elements, from the back to the front."""
    for words, (x, y, wide, high) in PARTS.items():
        yield rectangle(x, y, wide, high, 'fill="currentColor" fill-opacity="0.06"')
        yield text(x + 10, y + 19, words, font_weight=700)
    yield from (line(points) for points in NEEDS.values())
    yield from (line(points, dotted=True) for points in BETTER.values())
    words = "Model parallelism: the whole subject, in an hour"
    yield box("model_parallelism", (2, 2, 436, 46), [words])
    for topic, (column, top, lines) in LESSONS.items():
        yield box(topic, (COLUMNS[column], top, *BOX), lines.split("\n"))
    yield line([(8, 406), (34, 406)]) + text(42, 410, "needs")
    yield line([(8, 430), (34, 430)], dotted=True) + text(42, 434, "better after")
    yield rectangle(8, 447, 26, 14, 'fill="none" stroke="currentColor" stroke-dasharray="4 3"')
    yield text(42, 459, "planned")


def main() -> None:
    words = escape(alt(), quote=True)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="group" aria-label="{words}" '
        f'width="{WIDTH * ZOOM:g}px" height="{HEIGHT * ZOOM:g}px" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-size="13px">'
    )
    body = "\n".join(elements())
    page = f"{head}<style>{STYLE}</style>\n{body}\n</svg>\n"
    (HERE / "index_map.svg").write_text(page, "utf-8")


if __name__ == "__main__":
    main()
