"""A lesson's page as slides: which of its blocks a hall sees, and what the lecturer's notes say.

Nothing here knows Sphinx: a page comes in as BeautifulSoup has parsed it, slides go out. A slide
shows one block of the page, and its notes hold the prose around it, so no sentence and no number is
written twice.

The rule. Each section gets a slide of the first of these that it has and that a hall can read: a
picture (in steps or whole), a table that a cell made, a checked claim, code of the page;
without any of them, its first short paragraph. Then the sections that take longest get a second and
a third, until a deck has MOST slides. A cell tagged `slide` is always taken, one tagged
`skip-slide` never. Code, and a table's labels, come first; what the cell gave comes with the next
step, so that there is something to ask.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html import escape

from bs4 import BeautifulSoup, Tag

from shardcourse.build import pace

LEAST, MOST = 12, 25  # slides of a deck
EACH = 3  # slides of a section
SMALL, SMALL_DRAWN = 20, 15  # pixels of the smallest text, on a slide and in a picture
WIDE, HIGH = 1180, 720  # pixels: between the margins, and of a whole slide
LONG = 400  # characters of a paragraph that a slide takes
_MONO, _PROSE = 0.603, 0.6  # width of a character in sizes of its font
_FONT = re.compile(r"font(?:-size)?:[^;]*?([\d.]+)px")  # in a style of a picture
_ASIDE = ("Exercises", "Summary", "Further reading")

# --- A page, taken apart --------------------------------------------------------------------------


@dataclass
class Block:
    """A paragraph, a picture, a table, code or a box of a page, and what a reader reads of it."""

    kind: str
    tag: Tag
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


@dataclass
class Section:
    """A section: its title, its anchor and its blocks."""

    title: str
    anchor: str
    blocks: list[Block] = field(default_factory=list)
    exercises: list[tuple[str, str]] = field(default_factory=list)  # titles, names of checks

    @property
    def seconds(self) -> float:
        """How long it takes to read."""
        return sum(block.seconds for block in self.blocks)

    @property
    def items(self) -> list[str]:
        """The items of its lists."""
        found = [li for block in self.blocks if block.kind == "list" for li in block.tag("li")]
        return [inner(li.p or li).rstrip(";") for li in found]


def inner(tag: Tag) -> str:
    """The HTML inside an element."""
    return tag.decode_contents().strip()


def text(html: str) -> str:
    """The text of a piece of HTML."""
    return BeautifulSoup(html, "html.parser").get_text()


def children(tag: Tag) -> list[Tag]:
    """The elements right inside an element."""
    return tag.find_all(True, recursive=False)


def words(tag: Tag) -> int:
    """The number of words of an element, without those of code and of pictures."""
    apart = sum(len(one.get_text(" ").split()) for one in tag.select("pre, svg"))
    return len(tag.get_text(" ").split()) - apart


def code_lines(pre: Tag) -> int:
    """The number of lines of code, blank ones apart."""
    return sum(bool(line.strip()) for line in pre.get_text().splitlines())


def parts(body: Tag) -> list[Section]:
    """The sections of a page, first what stands before them. `body` is changed: links go."""
    around = "a.headerlink, p.lesson-outputs, p.open-folds, p.can-wait, .exercise-where"
    for one in body.select(f"{around}, .predict-title, .quiz"):
        one.decompose()
    for one in body.select("a, code span.pre, .predict, .predict-answer"):
        one.unwrap()
    for one in body.select("code"):
        one.attrs = {}
    for one in body.select("[id]:not(section)"):
        del one["id"]
    heading = body.find("h1")
    found = [Section(inner(heading), "")]
    for child in children(heading.parent):
        title = child.find("h2", recursive=False) if child.name == "section" else None
        if title:
            found.append(Section(inner(title), child.get("id", "")))
            found[-1].blocks += [Block("title", title, words=words(title))]
            found[-1].exercises += map(_exercise, child.select(".exercise"))
        for one in children(child) if title else [child]:
            if one not in (title, heading):
                found[-1 if title else 0].blocks += _blocks(one, "")
    return found


def _exercise(one: Tag) -> tuple[str, str]:
    """The title of an exercise, and the name of its check."""
    heading = one.find(class_="admonition-title")
    for number in heading.select(".caption-number"):
        number.decompose()
    code = "".join(pre.get_text() for pre in one.select(".cell_input pre")[-1:])
    check = re.search(r'check\(\s*(\w+)\s*(?:,\s*"(\w+)")?', code)
    name = (check[2] or check[1]) if check else ""
    return inner(heading).removeprefix("(").removesuffix(")"), name


def _blocks(one: Tag, sub: str) -> Iterator[Block]:
    """The blocks of an element of a section; exercises are none."""
    classes = set(one.get("class", []))
    if one.name == "section":
        heading = one.find(["h3", "h4"], recursive=False)
        if heading:
            sub = inner(heading)
            yield Block("title", heading, sub, words(heading))
        for child in children(one):
            if child is not heading:
                yield from _blocks(child, sub)
    elif classes & {"exercise", "solution"}:
        return
    elif "cell" in classes:
        yield from _cell(one, sub, frozenset(c[4:] for c in classes if c.startswith("tag_")))
    elif "steps" in classes:
        yield Block("steps", one, sub, words(one))
    elif "admonition" in classes:
        heading = one.find(class_="admonition-title").extract()
        kind = "checked" if "checked" in classes else "box"
        yield Block(kind, one, sub, words(one), title=inner(heading))
    elif one.select_one(".inline-svg"):
        yield Block("figure", one, sub, words(one))
    elif one.name == "table" or one.find("table"):
        yield Block("listed", one if one.name == "table" else one.find("table"), sub, words(one))
    elif any(name.startswith("highlight-") for name in classes):
        yield Block("code", one.find("pre"), sub)
    elif one.name in ("p", "div", "blockquote", "dl", "ul", "ol"):
        yield Block("list" if one.name in ("ul", "ol") else "prose", one, sub, words(one))


def _cell(cell: Tag, sub: str, tags: frozenset[str]) -> Iterator[Block]:
    """The code of a cell, if it is visible, and each of its outputs."""
    summary, pre = cell.select_one("summary > p"), cell.select_one(".cell_input pre")
    title = summary.get_text(" ", strip=True) if summary and "hide-input" in tags else ""
    printed, shown = "", []
    for output in cell.select(".cell_output > *"):
        table, picture = output.find("table"), output.find("svg")
        sources = output.select(".shown-source")
        for one in sources:
            caption, source = one.find(["summary", "p"]), one.find("pre")
            if caption and caption.find("code"):  # code of the package
                named, lines = inner(caption), code_lines(source)
                shown.append(Block("source", source, sub, lines=lines, title=named, tags=tags))
            else:
                shown.append(Block("listing", source, sub, tags=tags))
        if table or picture and not sources:
            kind, one = ("table", table) if table else ("figure", output)
            shown.append(Block(kind, one, sub, title=title, tags=tags))
        elif not sources:
            printed += "\n".join(inner(one) for one in output.select("pre"))
    hidden = tags & {"hide-input", "hide-cell", "remove-input"}
    shows = pre and (shown and code_lines(pre) == 1 or pre.get_text().startswith("show."))
    if pre and not hidden and not shows:
        yield Block("code", pre, sub, lines=code_lines(pre), tags=tags, out=printed)
    yield from shown


# --- One block on a slide -------------------------------------------------------------------------


@dataclass
class Slide:
    """A slide: its heading, its content, what the lecturer sees, and the block it stands on."""

    title: str
    body: str
    kind: str = "text"
    kicker: str = ""  # the section of a subsection
    anchor: str = ""
    ask: str = ""
    notes: list[str] = field(default_factory=list)
    seconds: float = 0
    paths: list[str] = field(default_factory=list)  # those that come to it
    place: int = 0  # of its block in the section
    rank: int = 0  # how little it is wanted

    def html(self, lesson: str) -> str:
        """The slide as an element; `lesson` is the address of its page."""
        kicker = f'<p class="kicker">{self.kicker}</p>' if self.kicker else ""
        level = "h1" if self.kind == "title" else "h2"
        ask = f"<p><strong>Ask first:</strong> {self.ask}</p>" if self.ask else ""
        minutes = max(0.5, round(self.seconds / 30) / 2)
        there = f'<a href="{lesson}#{self.anchor}" target="_blank">On the page</a>'
        notes = f"<p><strong>{minutes:g} min</strong>. {there}.</p>{ask}{''.join(self.notes)}"
        return (
            f'<section class="{self.kind}" data-timing="{int(60 * minutes)}"'
            f' data-paths="{" ".join(self.paths)}">{kicker}'
            f"<{level}>{self.title}</{level}>{self.body}"
            f'<aside class="notes">{notes}</aside></section>'
        )


def note(block: Block) -> str:
    """What the notes say of a block; the lecturer's window sets no formulas."""
    if block.kind == "title":
        return f"<p><strong>{block.sub}</strong></p>" if block.sub else ""
    if block.kind == "source":
        minutes = max(1, round(block.seconds / 60))
        return f"<p><em>To read at home: {block.title}, {minutes} min.</em></p>"
    if block.kind == "figure":
        label = block.tag.find("svg").get("aria-label", "")
        return f"<p><strong>The picture:</strong> {escape(label)}</p>" if label else ""
    if block.kind not in ("prose", "list", "checked", "box"):
        return ""
    said = BeautifulSoup(str(block.tag), "html.parser")
    for one in said.select("svg, pre"):
        one.decompose()
    for one in said.select(".math"):
        one.name, one.string = "i", re.sub(r"\\[()\[\]]", "", one.get_text()).replace("\\", " ")
    title = f"<p><strong>{block.title}</strong></p>" if block.title else ""
    return f"{title}{said}"


def picture(tag: Tag, wide: float, high: float) -> str:
    """The picture in an element, to fill its box; "" if it is too small there to be read."""
    svg = copy.copy(tag.find("svg"))
    *_, w, h = map(float, svg["viewbox"].split())
    styles = [
        f"{one.get('style', '')};font-size:{one.get('font-size', '')}px"
        for one in svg.select("[style*=font], [font-size]")
    ]
    sizes = [float(found[1]) for style in styles if (found := _FONT.search(style))]
    if min(sizes, default=SMALL) * min(wide / w, high / h) < SMALL_DRAWN:
        return ""
    svg.attrs = {
        k: v for k, v in svg.attrs.items() if k not in ("style", "class", "width", "height")
    }
    return f'<div class="picture">{svg}</div>'


def steps(block: Block, high: float) -> str:
    """Pictures in steps, one after the other in one place, each with its sentence beside it."""
    every = block.tag.select("li")
    shown = ""
    for number, item in enumerate(every):
        drawn = picture(item, 760, high)
        if not drawn:
            return ""
        kind = "fade-out" if number == 0 else "current-visible" if number + 1 < len(every) else ""
        said = " ".join(inner(p) for p in item.select("p") if not p.find("svg"))
        step = f'data-fragment-index="{max(0, number - 1)}"'
        shown += f'<div class="fragment {kind}" {step}>{drawn}<p class="said">{said}</p></div>'
    return f'<div class="stack">{shown}</div>'


def table_size(rows: list[list[str]], high: float) -> int:
    """The size of the font in which a table fits `high` pixels; 0 when it is too small.

    Words of its head may stand one below the other, those of other cells may not.
    """
    if len(rows) < 2 or len({len(row) for row in rows}) != 1:
        return 0
    columns = list(zip(*rows, strict=True))
    words = [max((len(word) for word in column[0].split()), default=0) for column in columns]
    wide = sum(  # a head's words are bold, and capitals at times
        max(1.2 * word, *map(len, column[1:])) for word, column in zip(words, columns, strict=True)
    )
    across = (WIDE - 26 * len(columns)) / (_PROSE * max(1, wide))
    size = int(min(28, across, (high - 10 * len(rows)) / (1.4 * (len(rows) + 1))))
    return size if size >= SMALL else 0


def table(block: Block, high: float) -> str:
    """A table. Of one that a cell made, the numbers come with the next step."""
    whole = copy.copy(block.tag)
    rows = [row.select("th, td") for row in whole.select("tr")]
    texts = [[cell.get_text().strip() for cell in row] for row in rows]
    size = table_size(texts, high - 50 * bool(whole.caption))
    if not size:
        return ""
    hides = block.kind == "table"
    for one in whole.select("thead, tbody, tr, colgroup, caption"):
        one.attrs = {}
    for row in rows:
        for number, cell in enumerate(row):
            right = ["right"] if "text-right" in cell.get("class", []) else []
            cell.attrs = {"scope": "col"} if cell.name == "th" else {}
            if hides and number and cell.name == "td":
                cell.attrs = {"class": ["fragment", *right], "data-fragment-index": "0"}
            elif right:
                cell["class"] = right
    whole.attrs = {"style": f"font-size:{size}px"}
    return str(whole)


def code_size(lines: list[str], high: float) -> int:
    """The size of font in which code fits `high` pixels; 0 if it is too small."""
    wide = (WIDE - 30) / (_MONO * max(map(len, lines), default=1))
    size = int(min(28, wide, (high - 60) / (1.32 * max(1, len(lines)))))
    return size if size >= SMALL else 0


def code(block: Block, high: float) -> str:
    """Code, and with the next step what it printed, if both fit."""
    pre = copy.copy(block.tag)
    lines, out = pre.get_text().strip("\n").splitlines(), block.out.strip("\n")
    both = code_size([*lines, *text(out).splitlines()], high) if out else 0
    size = both or code_size(lines, high)
    if not size:
        return ""
    pre.attrs = {"style": f"font-size:{size}px"}
    later = 'data-fragment-index="0"'
    result = f'<pre class="out fragment" {later} style="font-size:{size}px">{out}</pre>'
    return f'<div class="highlight">{pre}</div>{result if both else ""}'


def checked(block: Block, high: float) -> str:
    """A claim that people make: true, or false? The answer comes with the next step."""
    answer = next((inner(p) for p in block.tag.select("p") if len(p.get_text()) <= LONG), "")
    claim = block.title.removeprefix("Checked:").strip()
    later = f'<p class="claim fragment" data-fragment-index="0">{answer}</p>'
    return f'<p class="quote">{claim}</p><p class="ask">True, or false?</p>{later}' * bool(answer)


def figure(block: Block, high: float) -> str:
    """A picture."""
    return picture(block.tag, WIDE, high)


_CODE = "what does it compute, and what will it print? Let somebody explain it line by line."
_LAST = 5  # the rank of code of the package: it is read at home
KINDS = {  # of blocks that become slides: how little each is wanted, how it is shown, what to ask
    "steps": (0, steps, "before each step, what comes next?"),
    "figure": (1, figure, "what does the picture show? Give the hall a moment to read it."),
    "table": (2, table, "what will stand there? Take a guess from the hall for one row."),
    "listed": (2, table, ""),
    "checked": (3, checked, "who says true, who says false? Let hands be counted."),
    "code": (4, code, _CODE),
    "listing": (4, code, _CODE),
    "source": (_LAST, code, _CODE),
}


# --- A section ------------------------------------------------------------------------------------


def candidates(section: Section) -> list[Slide]:
    """The blocks of a section that a hall can read, each as a slide; else its first paragraph."""
    found = []
    for place, block in enumerate(section.blocks):
        short = block.kind == "code" and code_lines(block.tag) < 3 and not block.out
        if short or "skip-slide" in block.tags or block.kind not in KINDS:
            continue
        rank, show, ask = KINDS[block.kind]
        title, kicker = (block.sub, section.title) if block.sub else (section.title, "")
        before = section.blocks[place - 1]
        asked = before.tag.get_text().strip() if place and before.kind == "prose" else ""
        asked = inner(before.tag) if asked.endswith("?") and len(asked) < LONG / 2 else ""
        high = HIGH - 117 - 31 * bool(kicker) - 50 * bool(asked)
        high -= sum(36 * (len(text(one)) // 58) for one in (title, asked))
        body = show(block, high)
        if not body:
            continue
        if asked:
            body = f'<p class="lead">{asked}</p>{body}'
        slide = Slide(title, body, block.kind, kicker, section.anchor, asked or ask)
        slide.rank = -1 if "slide" in block.tags else rank
        slide.place = place
        found.append(slide)
    prose = [b.tag for b in section.blocks if b.kind == "prose" and b.tag.name == "p"]
    for tag in prose if not found else ():
        if 60 < len(tag.get_text()) <= LONG:
            return [Slide(section.title, f"<p>{inner(tag)}</p>", anchor=section.anchor)]
    return found


def chosen(sections: list[Section], most: int) -> list[list[Slide]]:
    """For each section its slides, `most` of all of them."""
    every = list(map(candidates, sections))
    taken: list[list[Slide]] = [[] for _ in sections]
    while (many := sum(map(len, taken))) < most:
        worst = _LAST if many >= LEAST else _LAST + 1
        rest = [[one for one in mine if one not in taken[n] and one.rank < worst]
                for n, mine in enumerate(every)]  # fmt: skip
        able = [n for n, mine in enumerate(rest) if mine and len(taken[n]) < EACH]
        if not able:
            break
        # Each section's first slide comes before any second one, and then long sections come first.
        n = max(able, key=lambda n: (not taken[n], sections[n].seconds / (1 + len(taken[n]))))
        kinds = {slide.kind for slide in taken[n]}
        taken[n].append(min(rest[n], key=lambda one: (one.rank >= 0, one.kind in kinds, one.rank)))
    return [sorted(mine, key=lambda one: one.place) for mine in taken]


def annotate(section: Section, slides: list[Slide]) -> None:
    """Give slides their notes: all prose of the section, each piece beside its slide."""
    number = 0
    for place, block in enumerate(section.blocks):
        after = slides[number + 1 :]
        passed = place > slides[number].place and block.kind != "prose"  # it ends what was said
        if after and (passed or place >= after[0].place):
            number += 1
        shown = any(slide.place == place for slide in slides)
        slides[number].seconds += 0 if block.kind == "source" and not shown else block.seconds
        slides[number].notes.append(note(block))


# --- A deck ---------------------------------------------------------------------------------------


def bullets(title: str, items: list[str], kind: str, anchor: str = "", seconds: int = 0) -> Slide:
    """A slide with a list."""
    body = f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"
    return Slide(title, body, kind, anchor=anchor, seconds=seconds)


def mistakes(title: str, known: list[str]) -> str:
    """The mistakes that people make in an exercise, as its check knows them."""
    rows = "".join(f"<li>{escape(words)}</li>" for words in known)
    said = f"<p><strong>What people get wrong in “{escape(text(title))}”:</strong></p>"
    return f"{said}<ul>{rows}</ul>" if known else ""


def deck(body: Tag, known: Callable[[str], list[str]]) -> list[Slide]:
    """The slides of a lesson. known: what the check of an exercise says of known mistakes."""
    opening, *sections = parts(body)
    first = Slide(opening.title, '<p class="course">One Model, Many GPUs</p>', "title")
    slides, tail = [first], []
    if opening.items:
        slides.append(bullets("After this lesson you can", opening.items, "goals"))
    slides[-1].notes += [note(block) for block in opening.blocks if block.kind != "list"]
    slides[-1].seconds += opening.seconds
    for section in sections:
        if section.exercises:
            titles = [title for title, _ in section.exercises]
            tail.append(bullets("Exercises", titles, "exercises", section.anchor, 60))
            tail[-1].notes += [mistakes(title, known(name)) for title, name in section.exercises]
        if section.title == "Summary":
            half = math.ceil(len(section.items) / 2) if len(section.items) > 4 else 4
            for some in (section.items[:half], section.items[half:]):
                tail += [bullets("Summary", some, "summary", section.anchor, 45)] if some else []
    sections = [section for section in sections if section.title not in _ASIDE]
    found = chosen(sections, MOST - len(slides) - len(tail))
    for section, mine in zip(sections, found, strict=True):
        if mine:
            annotate(section, mine)
            slides += mine
            continue
        slides[-1].seconds += sum(b.seconds for b in section.blocks if b.kind != "source")
        slides[-1].notes += [f"<p><strong>{section.title}</strong></p>", *map(note, section.blocks)]
    minutes = sum(slide.seconds for slide in slides) / 60
    first.notes.insert(0, (
        f"<p>{len(slides) + len(tail)} slides; what their notes say takes about {minutes:.0f} "
        "minutes. Space: the next step. Esc: all slides. B: a black screen. "
        "With <code>?print-pdf</code> behind its address the deck prints, with "
        "<code>?print-pdf&amp;notes</code> together with these notes; with "
        "<code>?path=one_day</code> it has the slides of that path alone.</p>"
    ))  # fmt: skip
    return [*slides, *tail]
