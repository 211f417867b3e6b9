"""Slides from a lesson's page: selection of its blocks, and the speaker notes.

This module does not depend on Sphinx: it turns a page parsed by BeautifulSoup into slides. A slide
shows one block of the page, and its notes hold the prose around the block, so that no sentence and
no number is written twice.

Selection: each section gets a slide of the first kind that it has and that an audience can read:
a picture (in steps or whole), a table printed by a cell, a checked claim, code of the page; a
section without any of them, its first short paragraph. Then the sections with the longest reading
times get a second and a third slide, until a deck has MAX_SLIDES. A cell with the tag `slide` is
always selected, one with `skip-slide` never. Code and a table's labels appear first, and the
cell's result in the next step, so that the lecturer can ask for it.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html import escape

from bs4 import BeautifulSoup, Tag

from shardcourse.build import reading_time

MIN_SLIDES, MAX_SLIDES = 12, 25  # number of slides in a deck
MAX_SLIDES_PER_SECTION = 3
MIN_FONT_PIXELS, MIN_DRAWN_PIXELS = 20, 15  # of the smallest text, on a slide and in a picture
SLIDE_WIDTH, SLIDE_HEIGHT = 1180, 720  # pixels: width inside the margins, and height of a slide
MAX_PARAGRAPH_CHARS = 400  # characters of a paragraph that fits on a slide
_MONO_WIDTH, _PROSE_WIDTH = 0.603, 0.6  # width of a character in units of the font size
_FONT = re.compile(r"font(?:-size)?:[^;]*?([\d.]+)px")  # font size in a style of a picture
_POINTER = re.compile(  # words for what stands elsewhere on the page
    r"\b(?:the|this|these|next|last|first|second|third|fourth|previous|following|folded) "
    r"(?:cell|table|picture|figure|row|column)s?\b|\brows? \d|\b(?:look|see) here\b|:$"
    r"|\b(?:above|below)(?=[,.;:)]|$)|\b(?:above|below) (?:shows?|is|are)\b|^(?:Above|Below)\b"
    r"|\b(?:none|each|all) of these\b",
    re.IGNORECASE,
)
_SKIPPED_SECTIONS = ("Exercises", "Summary", "Further reading")
# By class: what no slide shows, and elements of which a slide shows only the content.
_LEFT_OUT = {
    "headerlink", "lesson-outputs", "open-folds", "can-wait", "exercise-where", "predict-title",
    "quiz", "picture-caption", "path-stop",
}  # fmt: skip
_UNWRAPPED = {"predict", "predict-answer"}

# --- A page, taken apart --------------------------------------------------------------------------


@dataclass
class Block:
    """Block of a page: a paragraph, picture, table, code or box, with its words and lines."""

    kind: str
    tag: Tag
    sub: str = ""  # heading of its subsection
    words: int = 0
    lines: int = 0
    title: str = ""  # title of a box, or description of a folded cell
    tags: frozenset[str] = frozenset()
    out: str = ""  # text that a cell printed

    @property
    def seconds(self) -> float:
        """Seconds to read the block."""
        return 60 * reading_time.estimate_minutes(self.words, self.lines)


@dataclass
class Section:
    """Section: its title, its anchor and its blocks."""

    title: str
    anchor: str
    blocks: list[Block] = field(default_factory=list)
    exercises: list[tuple[str, str]] = field(default_factory=list)  # (title, name of its check)

    @property
    def seconds(self) -> float:
        """Seconds to read the section."""
        return sum(block.seconds for block in self.blocks)

    @property
    def items(self) -> list[str]:
        """Items of the section's lists."""
        found = [li for block in self.blocks if block.kind == "list" for li in block.tag("li")]
        return [get_inner_html(li.p or li).rstrip(";") for li in found]


def get_inner_html(tag: Tag) -> str:
    """Return an element's content."""
    return tag.decode_contents().strip()


def strip_tags(html: str) -> str:
    """Return the text of a piece of HTML."""
    return BeautifulSoup(html, "html.parser").get_text()


def list_children(tag: Tag) -> list[Tag]:
    """Return the child elements of an element."""
    return tag.find_all(True, recursive=False)


def drop_pointers(html: str) -> str:
    """Return the sentences of a paragraph that fit on a slide and point at nothing outside it."""
    html = re.sub(r"\s*\([^()]*\)", lambda m: "" if _POINTER.search(m[0]) else m[0], html)
    kept, left = [], MAX_PARAGRAPH_CHARS
    for one in re.split(r"(?:(?<=[.?!])|(?<=[.?!]\)))\s+(?=[A-Z<(])", html):
        if not _POINTER.search(strip_tags(one)) and (left := left - len(strip_tags(one)) - 1) >= 0:
            kept.append(one)
    return " ".join(kept)


def count_words(tag: Tag) -> int:
    """Return the number of words in an element, without code and pictures."""
    apart = sum(len(one.get_text(" ").split()) for one in tag.select("pre, svg"))
    return len(tag.get_text(" ").split()) - apart


def count_code_lines(pre: Tag) -> int:
    """Return the number of non-blank lines of code."""
    return sum(bool(line.strip()) for line in pre.get_text().splitlines())


def split_sections(body: Tag) -> list[Section]:
    """Return the sections of a page, first the text before them. Modifies `body`: removes links."""
    for one in body.find_all(True):  # one pass: ten times as fast as a selector for each case
        if one.decomposed:  # with its parent
            continue
        classes = {*one.get("class", ())}
        if classes & _LEFT_OUT:
            one.decompose()
        elif one.name == "a" or classes & _UNWRAPPED or _is_literal(one):
            one.unwrap()
        elif one.name == "code":
            one.attrs = {}
        elif one.name != "section":
            del one["id"]
    heading = body.find("h1")
    found = [Section(get_inner_html(heading), "")]
    for child in list_children(heading.parent):
        title = child.find("h2", recursive=False) if child.name == "section" else None
        if title:
            found.append(Section(get_inner_html(title), child.get("id", "")))
            found[-1].blocks += [Block("title", title, words=count_words(title))]
            found[-1].exercises += map(_parse_exercise, child.select(".exercise"))
        for one in list_children(child) if title else [child]:
            if one not in (title, heading):
                found[-1 if title else 0].blocks += _iter_blocks(one, "")
    return found


def _is_literal(one: Tag) -> bool:
    return "pre" in one.get("class", ()) and one.find_parent("code") is not None


def _parse_exercise(one: Tag) -> tuple[str, str]:
    """Return the title of an exercise, and the name of its check."""
    heading = one.find(class_="admonition-title")
    for number in heading.select(".caption-number"):
        number.decompose()
    code = "".join(pre.get_text() for pre in one.select(".cell_input pre")[-1:])
    check = re.search(r'check\(\s*(\w+)\s*(?:,\s*"(\w+)")?', code)
    name = (check[2] or check[1]) if check else ""
    return get_inner_html(heading).removeprefix(": "), name


def _iter_blocks(one: Tag, sub: str) -> Iterator[Block]:
    """Yield the blocks of an element of a section, without exercises."""
    classes = set(one.get("class", []))
    if one.name == "section":
        heading = one.find(["h3", "h4"], recursive=False)
        if heading:
            sub = get_inner_html(heading)
            yield Block("title", heading, sub, count_words(heading))
        for child in list_children(one):
            if child is not heading:
                yield from _iter_blocks(child, sub)
    elif classes & {"exercise", "solution"}:
        return
    elif "cell" in classes:
        tags = frozenset(name[4:] for name in classes if name.startswith("tag_"))
        yield from _iter_cell_blocks(one, sub, tags)
    elif "steps" in classes:
        yield Block("steps", one, sub, count_words(one))
    elif "admonition" in classes:
        heading = one.find(class_="admonition-title").extract()
        kind = "checked" if "checked" in classes else "box"
        yield Block(kind, one, sub, count_words(one), title=get_inner_html(heading))
    elif one.select_one(".inline-svg"):
        yield Block("figure", one, sub, count_words(one))
    elif one.name == "table" or one.find("table"):
        table = one if one.name == "table" else one.find("table")
        yield Block("listed", table, sub, count_words(one))
    elif any(name.startswith("highlight-") for name in classes):
        yield Block("code", one.find("pre"), sub)
    elif one.name in ("p", "div", "blockquote", "dl", "ul", "ol"):
        yield Block("list" if one.name in ("ul", "ol") else "prose", one, sub, count_words(one))


def _iter_cell_blocks(cell: Tag, sub: str, tags: frozenset[str]) -> Iterator[Block]:
    """Yield the code of a cell, if it is visible, and each of its outputs."""
    summary, pre = cell.select_one("summary > p"), cell.select_one(".cell_input pre")
    title = summary.get_text(" ", strip=True) if summary and "hide-input" in tags else ""
    printed, shown = "", []
    for output in cell.select(".cell_output > *"):
        table, picture = output.find("table"), output.find("svg")
        sources = output.select(".shown-source")
        for one in sources:
            caption, source = one.find(["summary", "p"]), one.find("pre")
            if caption and caption.find("code"):  # code of the package
                named, lines = get_inner_html(caption), count_code_lines(source)
                shown.append(Block("source", source, sub, lines=lines, title=named, tags=tags))
            else:
                shown.append(Block("listing", source, sub, tags=tags))
        if table or picture and not sources:
            kind, one = ("table", table) if table else ("figure", output)
            shown.append(Block(kind, one, sub, title=title, tags=tags))
        elif not sources:
            printed += "\n".join(get_inner_html(one) for one in output.select("pre"))
    hidden = tags & {"hide-input", "hide-cell", "remove-input"}
    shows = pre and (shown and count_code_lines(pre) == 1 or pre.get_text().startswith("show."))
    if pre and not hidden and not shows:
        yield Block("code", pre, sub, lines=count_code_lines(pre), tags=tags, out=printed)
    yield from shown


# --- One block on a slide -------------------------------------------------------------------------


@dataclass
class Slide:
    """Slide: its heading, its content, the speaker notes, and the position of its block."""

    title: str
    body: str
    kind: str = "text"
    kicker: str = ""  # title of the section above a subsection
    anchor: str = ""
    ask: str = ""
    notes: list[str] = field(default_factory=list)
    seconds: float = 0
    paths: list[str] = field(default_factory=list)  # learning paths that include the slide
    place: int = 0  # index of its block in the section
    rank: int = 0  # priority, 0 is highest

    def render_html(self, lesson: str) -> str:
        """Return the slide as HTML; `lesson` is the address of its page."""
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


def format_notes(block: Block) -> str:
    """Return the speaker notes on a block; the speaker view renders no formulas."""
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


def render_picture(tag: Tag, wide: float, high: float) -> str:
    """Return a picture scaled to fill its box; "" if its text would be too small to read."""
    svg = copy.copy(tag.find("svg"))
    *_, w, h = map(float, svg["viewbox"].split())
    styles = [
        f"{one.get('style', '')};font-size:{one.get('font-size', '')}px"
        for one in svg.select("[style*=font], [font-size]")
    ]
    sizes = [float(found[1]) for style in styles if (found := _FONT.search(style))]
    if min(sizes, default=MIN_FONT_PIXELS) * min(wide / w, high / h) < MIN_DRAWN_PIXELS:
        return ""
    svg.attrs = {
        k: v for k, v in svg.attrs.items() if k not in ("style", "class", "width", "height")
    }
    return f'<div class="picture">{svg}</div>'


def render_steps(block: Block, high: float) -> str:
    """Return pictures in steps, which replace one another, each with its sentence beside it."""
    every = block.tag.select("li")
    shown = ""
    for number, item in enumerate(every):
        drawn = render_picture(item, 760, high)
        if not drawn:
            return ""
        kind = "fade-out" if number == 0 else "current-visible" if number + 1 < len(every) else ""
        said = " ".join(get_inner_html(p) for p in item.select("p") if not p.find("svg"))
        step = f'data-fragment-index="{max(0, number - 1)}"'
        shown += f'<div class="fragment {kind}" {step}>{drawn}<p class="said">{said}</p></div>'
    return f'<div class="stack">{shown}</div>'


def fit_table_font(rows: list[list[str]], high: float) -> int:
    """Return the font size at which a table fits `high` pixels; 0 if it would be too small.

    The words of the table's head may wrap, those of other cells may not.
    """
    if len(rows) < 2 or len({len(row) for row in rows}) != 1:
        return 0
    columns = list(zip(*rows, strict=True))
    words = [max((len(word) for word in column[0].split()), default=0) for column in columns]
    wide = sum(  # words in the head are bold, and sometimes capitals
        max(1.2 * word, *map(len, column[1:])) for word, column in zip(words, columns, strict=True)
    )
    across = (SLIDE_WIDTH - 26 * len(columns)) / (_PROSE_WIDTH * max(1, wide))
    size = int(min(28, across, (high - 10 * len(rows)) / (1.4 * (len(rows) + 1))))
    return size if size >= MIN_FONT_PIXELS else 0


def render_table(block: Block, high: float) -> str:
    """Return a table; if a cell printed it, its numbers appear in the next step."""
    whole = copy.copy(block.tag)
    rows = [row.select("th, td") for row in whole.select("tr")]
    texts = [[cell.get_text().strip() for cell in row] for row in rows]
    size = fit_table_font(texts, high - 50 * bool(whole.caption))
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


def fit_code_font(lines: list[str], high: float) -> int:
    """Return the font size at which code fits `high` pixels; 0 if it would be too small."""
    wide = (SLIDE_WIDTH - 30) / (_MONO_WIDTH * max(map(len, lines), default=1))
    size = int(min(28, wide, (high - 60) / (1.32 * max(1, len(lines)))))
    return size if size >= MIN_FONT_PIXELS else 0


def render_code(block: Block, high: float) -> str:
    """Return code, and in the next step the text that it printed, if both fit."""
    pre = copy.copy(block.tag)
    lines, out = pre.get_text().strip("\n").splitlines(), block.out.strip("\n")
    both = fit_code_font([*lines, *strip_tags(out).splitlines()], high) if out else 0
    size = both or fit_code_font(lines, high)
    if not size:
        return ""
    pre.attrs = {"style": f"font-size:{size}px"}
    later = 'data-fragment-index="0"'
    result = f'<pre class="out fragment" {later} style="font-size:{size}px">{out}</pre>'
    return f'<div class="highlight">{pre}</div>{result if both else ""}'


def render_claim(block: Block, high: float) -> str:
    """Return a claim as a question, true or false; verdict and reasons appear in the next step."""
    verdict, _, claim = block.title.partition(": ")
    reasons = (drop_pointers(get_inner_html(p)) for p in block.tag.select("p"))
    answer = f"<strong>{verdict}.</strong> {next(filter(None, reasons), '')}".strip()
    later = f'<p class="claim fragment" data-fragment-index="0">{answer}</p>'
    return f'<p class="quote">{claim}</p><p class="ask">True, or false?</p>{later}'


def render_figure(block: Block, high: float) -> str:
    """Return a picture."""
    return render_picture(block.tag, SLIDE_WIDTH, high)


_ASK_CODE = "what does it compute, and what will it print? Let somebody explain it line by line."
_LAST_RANK = 5  # rank of code of the package, which is read at home
RENDERERS = {  # kind of a block -> its rank as a slide (0 is best), renderer, question to ask
    "steps": (0, render_steps, "before each step, what comes next?"),
    "figure": (1, render_figure, "what does the picture show? Give the hall a moment to read it."),
    "table": (2, render_table, "what will stand there? Take a guess from the hall for one row."),
    "listed": (2, render_table, ""),
    "checked": (3, render_claim, "who says true, who says false? Let hands be counted."),
    "code": (4, render_code, _ASK_CODE),
    "listing": (4, render_code, _ASK_CODE),
    "source": (_LAST_RANK, render_code, _ASK_CODE),
}


# --- A section ------------------------------------------------------------------------------------


def make_candidates(section: Section) -> list[Slide]:
    """Return a slide for each readable block of a section, or for its first paragraph."""
    found = []
    for place, block in enumerate(section.blocks):
        short = block.kind == "code" and count_code_lines(block.tag) < 3 and not block.out
        if short or "skip-slide" in block.tags or block.kind not in RENDERERS:
            continue
        rank, render, ask = RENDERERS[block.kind]
        title, kicker = (block.sub, section.title) if block.sub else (section.title, "")
        before = section.blocks[place - 1]
        prose = before.tag.get_text().strip() if place and before.kind == "prose" else ""
        is_question = prose.endswith("?") and len(prose) < MAX_PARAGRAPH_CHARS / 2
        question = get_inner_html(before.tag) if is_question else ""
        high = SLIDE_HEIGHT - 117 - 31 * bool(kicker) - 50 * bool(question)
        high -= sum(36 * (len(strip_tags(one)) // 58) for one in (title, question))
        body = render(block, high)
        if not body:
            continue
        if question:
            body = f'<p class="lead">{question}</p>{body}'
        slide = Slide(title, body, block.kind, kicker, section.anchor, question or ask)
        slide.rank = -1 if "slide" in block.tags else rank
        slide.place = place
        found.append(slide)
    paragraphs = [b.tag for b in section.blocks if b.kind == "prose" and b.tag.name == "p"]
    for said in (drop_pointers(get_inner_html(tag)) for tag in paragraphs if not found):
        if 60 < len(strip_tags(said)) <= MAX_PARAGRAPH_CHARS:
            return [Slide(section.title, f"<p>{said}</p>", anchor=section.anchor)]
    return found


def select_slides(sections: list[Section], most: int) -> list[list[Slide]]:
    """Select the slides of each section, `most` in all."""
    every = list(map(make_candidates, sections))
    taken = [[slide for slide in mine if slide.rank < 0] for mine in every]  # by their cells' tag
    while (many := sum(map(len, taken))) < most:
        worst = _LAST_RANK if many >= MIN_SLIDES else _LAST_RANK + 1
        rest = [[one for one in mine if one not in taken[n] and one.rank < worst]
                for n, mine in enumerate(every)]  # fmt: skip
        able = [n for n, mine in enumerate(rest) if mine and len(taken[n]) < MAX_SLIDES_PER_SECTION]
        if not able:
            break
        # First slides of all sections come before second ones, then longer sections come first.
        n = max(able, key=lambda n: (
            all(slide.rank < 0 for slide in taken[n]), sections[n].seconds / (1 + len(taken[n]))
        ))  # fmt: skip
        kinds = {slide.kind for slide in taken[n]}
        taken[n].append(min(rest[n], key=lambda one: (one.kind in kinds, one.rank)))
    return [sorted(mine, key=lambda one: one.place) for mine in taken]


def add_notes(section: Section, slides: list[Slide]) -> None:
    """Add all prose of the section to the slides' notes, each block to the nearest slide."""
    number = 0
    for place, block in enumerate(section.blocks):
        after = slides[number + 1 :]
        passed = place > slides[number].place and block.kind != "prose"  # ends the notes
        if after and (passed or place >= after[0].place):
            number += 1
        shown = any(slide.place == place for slide in slides)
        slides[number].seconds += 0 if block.kind == "source" and not shown else block.seconds
        slides[number].notes.append(format_notes(block))


# --- A deck ---------------------------------------------------------------------------------------


def list_slide(title: str, items: list[str], kind: str, anchor: str = "", time: int = 0) -> Slide:
    """Return a slide with a list; `time`: seconds."""
    body = f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"
    return Slide(title, body, kind, anchor=anchor, seconds=time)


def format_mistakes(title: str, known: list[str]) -> str:
    """Return the well-known mistakes in an exercise, as HTML."""
    rows = "".join(f"<li>{escape(words)}</li>" for words in known)
    said = f"<p><strong>What people get wrong in “{escape(strip_tags(title))}”:</strong></p>"
    return f"{said}<ul>{rows}</ul>" if known else ""


def make_slides(body: Tag, known: Callable[[str], list[str]]) -> list[Slide]:
    """Return the slides of a lesson. known: returns the known mistakes in an exercise."""
    opening, *sections = split_sections(body)
    first = Slide(opening.title, '<p class="course">One Model, Many GPUs</p>', "title")
    slides, tail = [first], []
    if opening.items:
        slides.append(list_slide("After this lesson you can", opening.items, "goals"))
    slides[-1].notes += [format_notes(block) for block in opening.blocks if block.kind != "list"]
    slides[-1].seconds += opening.seconds
    for section in sections:
        if section.exercises:
            titles = [title for title, _ in section.exercises]
            tail.append(list_slide("Exercises", titles, "exercises", section.anchor, 60))
            tail[-1].notes += [format_mistakes(t, known(name)) for t, name in section.exercises]
        if section.title == "Summary":
            half = math.ceil(len(section.items) / 2) if len(section.items) > 4 else 4
            for items in filter(None, (section.items[:half], section.items[half:])):
                tail.append(list_slide("Summary", items, "summary", section.anchor, 45))
    sections = [section for section in sections if section.title not in _SKIPPED_SECTIONS]
    found = select_slides(sections, MAX_SLIDES - len(slides) - len(tail))
    for section, mine in zip(sections, found, strict=True):
        if mine:
            add_notes(section, mine)
            slides += mine
            continue
        slides[-1].seconds += sum(b.seconds for b in section.blocks if b.kind != "source")
        notes = map(format_notes, section.blocks)
        slides[-1].notes += [f"<p><strong>{section.title}</strong></p>", *notes]
    minutes = sum(slide.seconds for slide in slides) / 60
    first.notes.insert(0, (
        f"<p>{len(slides) + len(tail)} slides; what their notes say takes about {minutes:.0f} "
        "minutes. Space: the next step. Esc: all slides. B: a black screen. "
        "With <code>?print-pdf</code> behind its address the deck prints, with "
        "<code>?print-pdf&amp;notes</code> together with these notes; with "
        "<code>?path=one_day</code> it has the slides of that path alone.</p>"
    ))  # fmt: skip
    return [*slides, *tail]
