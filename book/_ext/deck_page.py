"""A finished page of a lesson taken apart: its sections, their blocks, and what fits a slide.

A block is a paragraph, a picture, a table, code, a box. What a reader reads of it is counted as
`tests/visible.py` counts a lesson: words of prose, lines of visible code.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from bs4 import BeautifulSoup, Tag
from markup import ARTICLE, CELL, FONT, ROW, plain

from shardcourse.build import pace

LEAST = 20  # pixels of text; in a picture LEAST_DRAWN
LEAST_DRAWN = 15
ROOM = 1180  # pixels between the margins
LONG = 190  # characters of a sentence that a slide takes
CODE_LINES = 20
_MONO, _PROSE = 0.603, 0.62  # width of a character in sizes of its font

_KEPT = re.compile(r"<svg\b.*?</svg>|<pre\b.*?</pre>", re.DOTALL)
_STAND_IN = re.compile(r'<x-kept n="(\d+)"></x-kept>')
# Sentences that speak of where something stands on the page mean nothing on a slide.
_POINTS = re.compile(
    r"\b(above|below|th(is|e next|e last|e first) (page|section|cell|column|row)|here|lesson"
    r"|picture|the (page|cell|module|core|table)s?|next section|in the table|exercise|opening)\b"
    r"|^[“\"]",
    re.I,
)
# Nor do those that announce what follows there: "This costs three things."
_ANNOUNCES = re.compile(
    r"(?<!all )(?<!the )(?<!these )\b(two|three|four|five|six)( more| other)? (additions|facts"
    r"|mistakes|problems|questions|reasons|shortcomings|steps|things|ways)\b[^:]*$"
    r"|\ball (two|three|four|five|six)[.]$|^(and|let there be|next|now)\b",
    re.I,
)


@dataclass
class Block:
    """A piece of a page. html: as it is shown; words, lines: what a reader reads of it."""

    kind: str
    html: str = ""
    sub: str = ""  # the heading of its subsection
    words: int = 0
    lines: int = 0
    title: str = ""  # of a box; of a folded cell what it does
    tags: frozenset[str] = frozenset()
    out: str = ""  # what a cell printed

    @property
    def seconds(self) -> float:
        """How long it takes to read."""
        return 60 * pace.minutes(self.words, self.lines)

    @property
    def at_home(self) -> bool:
        """Whether a hall does not read it: code of the package, on the page and on no slide."""
        return self.kind == "source"


@dataclass
class Section:
    """A section: its title, its anchor and its blocks."""

    title: str
    anchor: str
    blocks: list[Block] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """How long it takes to read."""
        return sum(block.seconds for block in self.blocks)


class Exercise(NamedTuple):
    """An exercise: its title, its text, its check's name, and a solution's code and verdict."""

    title: str
    asked: str
    check: str
    short: bool  # whether it is answered in words or numbers, not with a function
    code: str
    verdict: str


class Page:
    """A lesson's finished page, taken apart."""

    def __init__(self, page: str):
        article = ARTICLE.search(page)
        assert article, "a page without an article"
        self._kept: list[str] = []
        soup = BeautifulSoup(_KEPT.sub(self._keep, article[1]), "html.parser")
        for one in soup.select(
            "a.headerlink, p.lesson-outputs, p.open-folds, p.can-wait, .exercise-where"
        ):
            one.decompose()
        for one in soup.select("a"):
            one.unwrap()
        for one in soup.select("code span.pre"):
            one.unwrap()
        for one in soup.select("code"):
            one.attrs = {}
        for one in soup.select("[id]:not(section)"):
            del one["id"]
        heading = soup.find("h1")
        assert heading, "a page without a title"
        self.title = self._inner(heading)
        self.opening = Section("", "")
        self.sections: list[Section] = []
        self.exercises: list[Exercise] = []
        top = heading.parent
        for child in top.find_all(True, recursive=False):
            title = child.find("h2", recursive=False) if child.name == "section" else None
            if title is None:
                self.opening.blocks += self._blocks(child, "") if child is not heading else []
                continue
            section = Section(self._inner(title), child.get("id", ""))
            words = len(title.get_text().split())
            section.blocks.append(Block("title", words=words))
            for one in child.find_all(True, recursive=False):
                if one is not title:
                    section.blocks += self._blocks(one, "")
            self.sections.append(section)
            if section.title == "Exercises":
                self.exercises = list(self._exercises(child))

    def _keep(self, match: re.Match[str]) -> str:
        self._kept.append(match[0])
        return f'<x-kept n="{len(self._kept) - 1}"></x-kept>'

    def _restored(self, html: str) -> str:
        return _STAND_IN.sub(lambda match: self._kept[int(match[1])], html)

    def _inner(self, element: Tag) -> str:
        return self._restored(element.decode_contents()).strip()

    def _outer(self, element: Tag) -> str:
        return self._restored(str(element))

    def _blocks(self, one: Tag, sub: str) -> Iterator[Block]:
        """The blocks of an element of a section."""
        classes = set(one.get("class", []))
        if one.name == "section":
            heading = one.find(["h3", "h4"], recursive=False)
            if heading:
                sub = self._inner(heading)
                yield Block("title", sub=sub, words=len(heading.get_text().split()))
            for child in one.find_all(True, recursive=False):
                if child is not heading:
                    yield from self._blocks(child, sub)
        elif "cell" in classes:
            yield from self._cell(one, sub, frozenset(c[4:] for c in classes if c[:4] == "tag_"))
        elif "quiz" in classes:
            return
        elif "predict" in classes:  # a question, and the cell that answers it
            for child in one.find_all(True, recursive=False):
                if "predict-answer" in child.get("class", []):
                    for cell in child.find_all(True, recursive=False):
                        yield from self._blocks(cell, sub)
                elif "predict-title" not in child.get("class", []):
                    yield Block("question", self._inner(child), sub, _words(child))
        elif "steps" in classes:
            yield Block("steps", self._outer(one), sub, _words(one))
        elif "admonition" in classes:
            heading = one.find(class_="admonition-title")
            title = self._inner(heading) if heading else ""
            if classes & {"exercise", "solution"}:
                return  # see `_exercises`
            if heading:
                heading.extract()
            kind = "checked" if "checked" in classes else "box"
            yield Block(kind, self._inner(one), sub, _words(one), title=title)
        elif one.select_one(".inline-svg"):
            yield Block("figure", self._outer(one), sub, _words(one))
        elif one.name == "table" or one.find("table"):
            table = one if one.name == "table" else one.find("table")
            yield Block("listed", self._outer(table), sub, _words(one))
        elif any(name.startswith("highlight-") for name in classes):
            yield Block("code", self._inner(one), sub, _words(one))
        elif one.name in ("ul", "ol"):
            yield Block("list", self._outer(one), sub, _words(one))
        elif one.name in ("p", "div", "blockquote", "dl"):
            html = self._outer(one) if "math" in classes else self._inner(one)
            yield Block("prose", html, sub, _words(one))

    def _cell(self, cell: Tag, sub: str, tags: frozenset[str]) -> Iterator[Block]:
        """The code of a cell, if it is visible, and each of its outputs."""
        said, given = cell.select_one("summary > p"), cell.select_one(".cell_input x-kept")
        title = said.get_text(" ", strip=True) if said and "hide-input" in tags else ""
        code = self._restored(str(given)) if given else ""
        printed, shown = "", []
        result = cell.select_one(".cell_output")
        for output in result.find_all(True, recursive=False) if result else []:
            table, source = output.find("table"), output.select_one(".shown-source")
            if table:
                shown.append(Block("table", self._outer(table), sub, title=title, tags=tags))
            elif source:
                for one in output.select(".shown-source"):
                    caption = one.find(["summary", "p"])
                    name = caption.find("code") if caption else None
                    pre = self._restored(str(one.find("x-kept")))
                    lines = len(code_lines(pre)) if name else 0
                    named = self._inner(caption) if caption else ""
                    kind = "source" if name else "listing"  # of the package, or another file
                    shown.append(Block(kind, pre, sub, lines=lines, title=named, tags=tags))
            elif "<svg" in (html := self._outer(output)):
                shown.append(Block("figure", html, sub, title=title, tags=tags))
            elif "<pre" in html:
                printed += "\n".join(re.findall(r"<pre[^>]*>(.*?)</pre>", html, re.DOTALL))
            elif output.select_one(".verdict"):
                shown.append(Block("verdict", html, sub))
        hidden = tags & {"hide-input", "hide-cell", "remove-input"}
        shows = re.fullmatch(r"(show\.(source|file)\(.*\)\s*)+", plain(code).strip(), re.DOTALL)
        shows = shows or (shown and len(code_lines(code)) == 1)
        if code and not hidden and not shows:
            lines = len(code_lines(code))
            yield Block("code", code, sub, lines=lines, tags=tags, out=printed)
        elif printed:
            yield Block("printed", code, sub, title=title, tags=tags, out=printed)
        yield from shown

    def _inside(self, box: Tag | None) -> list[Block]:
        """The blocks of an exercise or a solution."""
        children = box.find_all(True, recursive=False) if box else []
        return [block for child in children for block in self._blocks(child, "")]

    def _exercises(self, section: Tag) -> Iterator[Exercise]:
        """The exercises with their solutions, which follow them."""
        found = section.select(".exercise, .solution")
        for one, two in zip(found, [*found[1:], None], strict=True):
            if "exercise" not in one["class"]:
                continue
            answered = two if two is not None and "solution" in two["class"] else None
            heading = one.find(class_="admonition-title")
            number = heading.find(class_="caption-number")
            if number:
                number.decompose()
            title = re.sub(r"^\((.*)\)$", r"\1", self._inner(heading).strip(), flags=re.DOTALL)
            heading.extract()
            blocks, solved = self._inside(one), self._inside(answered)
            right = next((b for b in reversed(solved) if b.kind == "code"), Block("code"))
            verdict = next((b.html for b in reversed(solved) if b.kind == "verdict"), "")
            text = " ".join(b.html for b in blocks if b.kind == "prose")
            cells = [plain(b.html) for b in blocks if b.kind == "code"]
            name = re.search(r'check\(\s*(\w+)\s*(?:,\s*"(\w+)")?', "".join(cells[-1:]))
            short = len(cells) == 1 and "def " not in cells[0] and 0 < len(plain(text)) <= 420
            short &= all(b.kind in ("prose", "code", "verdict", "title") for b in blocks)
            checks = (name[2] or name[1]) if name else ""
            yield Exercise(title, text, checks, short, right.html, verdict)


# --- Text -----------------------------------------------------------------------------------------


def _words(one: Tag) -> int:
    return len(one.get_text(" ").split())


def code_lines(pre: str) -> list[str]:
    """The lines of code of a `<pre>`, blank ones apart."""
    return [line for line in plain(pre).splitlines() if line.strip()]


def _balanced(html: str) -> bool:
    return len(re.findall(r"<\w", html)) == html.count("</")


def sentences(html: str) -> list[str]:
    """The sentences of a paragraph, each with its tags closed."""
    found, now = [], ""
    for piece in re.split(r"(?<=[.?!])\s+(?=[A-Z\"“<*])|\n", html):
        now = f"{now} {piece}".strip()
        if _balanced(now) and re.search(r"[.?!][)”\"]?(?:</\w+>)*$", now):
            found.append(now)
            now = ""
    return [*found, now] if now and _balanced(now) else found


def fitting(html: str) -> list[str]:
    """The sentences of a paragraph that a slide takes."""
    return [one for one in sentences(html) if fits(one)]


def fits(one: str) -> bool:
    """Whether a slide takes a sentence: whole, short, and understood without its place."""
    text = plain(one)
    whole = 20 < len(text) <= LONG and text[-1] in ".!?)" and not one[0].islower()
    return whole and not _POINTS.search(text) and not _ANNOUNCES.search(text)


# --- What a hall can read -------------------------------------------------------------------------


def room(title: str, kicker: str, *said: str | None) -> int:
    """The height that a slide has left for one thing, below its heading and beside sentences."""
    high = 720 - 62 - 55 * math.ceil(len(plain(title)) / 58) - (31 if kicker else 0)
    return high - sum(14 + 36 * math.ceil(len(plain(one)) / 76) for one in said if one)


def code_size(pre: str, high: float, out: str = "") -> int:
    """The size of font in which code fits `high` pixels, above what it printed; or 0."""
    lines = plain(pre).strip("\n").splitlines()
    if not lines or len(code_lines(pre)) > CODE_LINES:
        return 0
    more = plain(out).splitlines()
    wide = (ROOM - 30) / (_MONO * max(map(len, lines + more)))
    high = (high - 24 - (36 if more else 0)) / (1.32 * (len(lines) + len(more)))
    size = int(min(28, wide, high))
    return size if size >= LEAST else 0


def _wide(text: str) -> float:
    """How wide text is, in characters: capitals are wider."""
    return len(text) + 0.4 * sum(c.isupper() or c in "_%@" for c in text)


def table_size(html: str, most: float) -> int:
    """The size of the font in which a table fits `most` pixels; 0 when it is too small."""
    rows = [[plain(cell).strip() for *_, cell in CELL.findall(row)] for row in ROW.findall(html)]
    if len(rows) < 2 or len({len(row) for row in rows}) != 1:
        return 0
    columns = list(zip(*rows, strict=True))
    whole = [max(map(_wide, column)) for column in columns]
    word = [
        max((_wide(w) for cell in column for w in cell.split()), default=1) for column in columns
    ]
    for size in range(28, LEAST - 1, -2):
        across = (ROOM - 26 * len(columns)) / (size * _PROSE)
        if sum(word) > across:
            continue
        free = across - sum(word)  # what words leave goes to those columns that want more
        wants = [max(0, w - least) for w, least in zip(whole, word, strict=True)]
        share = min(1.0, free / sum(wants)) if sum(wants) else 1.0
        widths = [least + share * want for least, want in zip(word, wants, strict=True)]
        spread = max(1.0, across / sum(widths))  # a table is as wide as the slide
        widths = [spread * width for width in widths]
        high = 0.0
        for row in rows:
            folds = [_wide(cell) / max(1.0, w * 0.97) for cell, w in zip(row, widths, strict=True)]
            high += max(map(math.ceil, folds)) * 1.3 * size + 10
        caption = 1.5 * size if "<caption" in html else 0
        if 1.06 * (high + caption) <= most:
            return size
    return 0


@dataclass(frozen=True)
class Drawn:
    """A picture as it stands on a slide: beside the text, or below it."""

    svg: str
    beside: bool
    text: float  # pixels of its smallest text


def drawn(html: str, most: float, tall: float = 560) -> Drawn | None:
    """A picture where it is larger: `most` pixels high, or `tall` ones beside its sentences.

    None if it is too small in both.
    """
    found = re.search(r"<svg\b[^>]*>", html)
    if not found:
        return None
    box = re.search(r'viewBox="[-\d.]+ [-\d.]+ ([\d.]+) ([\d.]+)"', found[0])
    if not box:
        return None
    wide, high = float(box[1]), float(box[2])
    below, beside = min(ROOM / wide, most / high), min(760 / wide, tall / high)
    svg = html[found.start() : html.index("</svg>") + len("</svg>")]
    least = min([float(size) for size in FONT.findall(svg)] or [LEAST])
    opening = re.sub(r'\s(?:style|class|width|height)="[^"]*"', "", found[0])
    scale = max(below, beside)
    size = f' style="width:{int(wide * scale)}px;height:{int(high * scale)}px"'
    svg = opening[:-1] + size + ">" + svg[len(found[0]) :]
    if least * scale < LEAST_DRAWN:
        return None
    return Drawn(svg, beside > below, least * scale)
