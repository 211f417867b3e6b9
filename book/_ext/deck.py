"""Slides from a lesson's page: selection of its blocks, and the speaker notes.

This module does not depend on Sphinx: it turns a page parsed by BeautifulSoup into slides. A slide
shows one block of the page, and its notes hold the prose around the block, so that no sentence and
no number is written twice.

Selection: each section and subsection gets a slide of the first kind that it has and that an
audience can read: a picture (in steps or whole), a table, a checked claim, code, a list, a short
paragraph. Then come second pictures, then further slides of the sections that take longest, until a
deck has MAX_SLIDES. A cell with the tag `slide` is always selected, one with `skip-slide` never. A
short paragraph before code or a table introduces it. Code and a table's labels appear first, and
the cell's result in the next step, so that the lecturer can ask for it.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from itertools import dropwhile, islice, takewhile

from bs4 import BeautifulSoup, Tag

from shardcourse.build import reading_time

MAX_SLIDES, MAX_SLIDES_PER_SECTION = 36, 4
MIN_FONT_PIXELS, MIN_DRAWN_PIXELS = 20, 14  # of the smallest text, on a slide and in a picture
SLIDE_WIDTH, SLIDE_HEIGHT = 1180, 720  # pixels: width inside the margins, and height of a slide
MAX_LEAD_CHARS, MAX_SENTENCES = 250, 3  # of a paragraph above a block, and of one alone
LONG_CELL_CHARS = 28  # the text of a longer cell of a table may wrap
_MONO_WIDTH, _PROSE_WIDTH = 0.603, 0.6  # width of a character in units of the font size
_FONT = re.compile(r"font(?:-size)?:[^;]*?([\d.]+)px")  # font size in a style of a picture
_POINTER = re.compile(  # a sentence with such a word is about something elsewhere on the page
    r"\b(?:cell|table|picture|figure|row|column|above|below)s?\b|:$", re.IGNORECASE
)
_SKIPPED_SECTIONS = {"Exercises", "Summary", "Further reading"}
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
    words: int = 0
    lines: int = 0
    title: str = ""  # title of a box, or description of a folded cell
    tags: frozenset[str] = frozenset()
    out: str = ""  # text that the cell printed, or the folded cell that checks it

    @property
    def seconds(self) -> float:
        """Seconds to read the block."""
        return 60 * reading_time.estimate_minutes(self.words, self.lines)


@dataclass
class Section:
    """Section, or subsection: its title, its anchor and its blocks without its subsections'."""

    title: str
    anchor: str = ""
    above: str = ""  # title of the section above a subsection
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


def format_list(items: list[str]) -> str:
    """Return items as a list in HTML."""
    return f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"


def drop_pointers(html: str) -> str:
    """Return the first sentences in a row that point at nothing outside the slide."""
    html = re.sub(r"\s*\([^()]*\)", lambda m: "" if _POINTER.search(m[0]) else m[0], html)
    every = re.split(r"(?:(?<=[.?!])|(?<=[.?!]\)))\s+(?=[A-Z<(])", html)
    kept = takewhile(lambda one: not _POINTER.search(one), dropwhile(_POINTER.search, every))
    return " ".join(islice(kept, MAX_SENTENCES))


def count_words(tag: Tag) -> int:
    """Return the number of words in an element, without code and pictures."""
    apart = sum(len(one.get_text(" ").split()) for one in tag.select("pre, svg"))
    return len(tag.get_text(" ").split()) - apart


def count_code_lines(pre: Tag) -> int:
    """Return the number of non-blank lines of code."""
    return sum(bool(line.strip()) for line in pre.get_text().splitlines())


def split_sections(body: Tag) -> list[Section]:
    """Return the sections of a page, first the text before them. Modifies `body`: removes links."""
    for one in body.find_all(class_=[*_LEFT_OUT]):
        one.decompose()
    for one in body.find_all(True):  # one pass: ten times as fast as a selector for each case
        classes = {*one.get("class", ())}
        in_code = "pre" in classes and one.find_parent("code")
        if one.name == "a" or classes & _UNWRAPPED or in_code:
            one.unwrap()
        elif one.name == "code":
            one.attrs = {}
        elif one.get("id") and one.name != "section" and not one.find_parent("svg"):
            del one["id"]
    found = [Section(get_inner_html(body.h1))]
    for child in body.h1.parent.find_all(True, recursive=False):
        _add_blocks(found, child)
    return found


def _parse_exercise(one: Tag) -> tuple[str, str]:
    """Return the title of an exercise, and the name of its check."""
    heading = one.find(class_="admonition-title")
    for number in heading.select(".caption-number"):
        number.decompose()
    code = "".join(pre.get_text() for pre in one.select(".cell_input pre")[-1:])
    check = re.search(r'check\(\s*(\w+)\s*(?:,\s*"(\w+)")?', code)
    name = (check[2] or check[1]) if check else ""
    return get_inner_html(heading).removeprefix(": "), name


def _add_blocks(found: list[Section], one: Tag, above: str = "") -> None:
    """Add an element to the last section, or as a section of its own."""
    heading = one.find(["h2", "h3", "h4"], recursive=False) if one.name == "section" else None
    if not heading:
        found[-1].blocks += _iter_blocks(one)
        return
    title = Block("title", heading, count_words(heading))
    found.append(Section(get_inner_html(heading), one.get("id", ""), above, [title]))
    found[-1].exercises += [_parse_exercise(one) for one in one.select(".exercise") if not above]
    above = above or found[-1].title
    for child in one.find_all(True, recursive=False):
        _add_blocks(found, child, above)


def _iter_blocks(one: Tag) -> Iterator[Block]:
    """Yield the blocks of an element of a section, without exercises."""
    classes = set(one.get("class", []))
    if classes & {"exercise", "solution"}:
        return
    if "cell" in classes:
        tags = frozenset(name[4:] for name in classes if name.startswith("tag_"))
        yield from _iter_cell_blocks(one, tags)
    elif "steps" in classes:
        yield Block("steps", one, count_words(one))
    elif "admonition" in classes:
        heading = one.find(class_="admonition-title").extract()
        kind = "checked" if "checked" in classes else "box"
        yield Block(kind, one, count_words(one), title=get_inner_html(heading))
    elif one.select_one(".inline-svg"):
        yield Block("figure", one, count_words(one))
    elif one.name == "table" or one.find("table"):
        yield Block("listed", one if one.name == "table" else one.table, count_words(one))
    elif any(name.startswith("highlight-") for name in classes):
        yield Block("code", one.find("pre"))
    elif one.name in ("p", "div", "blockquote", "dl", "ul", "ol"):
        yield Block("list" if one.name in ("ul", "ol") else "prose", one, count_words(one))


def _iter_cell_blocks(cell: Tag, tags: frozenset[str]) -> Iterator[Block]:
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
                shown.append(Block("source", source, lines=lines, title=named, tags=tags))
            else:
                shown.append(Block("code", source, tags=tags))
        if table or picture and not sources:
            kind, one = ("table", table) if table else ("figure", output)
            shown.append(Block(kind, one, title=title, tags=tags))
        elif not sources:
            printed += "\n".join(get_inner_html(one) for one in output.select("pre"))
    hidden = tags & {"hide-input", "hide-cell", "remove-input"}
    shows = pre and (shown and count_code_lines(pre) == 1 or pre.get_text().startswith("show."))
    if pre and not hidden and not shows:
        yield Block("code", pre, lines=count_code_lines(pre), tags=tags, out=printed)
    elif printed:
        yield Block("printed", cell, out=printed)
    yield from shown


# --- One block on a slide -------------------------------------------------------------------------


@dataclass(eq=False)
class Slide:
    """Slide: its section, its content, the speaker notes, and the position of its block."""

    section: Section
    body: str
    kind: str = "text"
    ask: str = ""
    place: int = 0  # index of its block in the section
    rank: int = 0  # priority, 0 is highest
    seconds: float = 0
    notes: list[str] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)  # learning paths that include the slide

    def render_html(self, lesson: str) -> str:
        """Return the slide as HTML; `lesson` is the address of its page."""
        kicker = f'<p class="kicker">{self.section.above}</p>' if self.section.above else ""
        level = "h1" if self.kind == "title" else "h2"
        ask = f"<p><strong>Ask first:</strong> {self.ask}</p>" if self.ask else ""
        minutes = max(0.5, round(self.seconds / 30) / 2)
        there = f'<a href="{lesson}#{self.section.anchor}" target="_blank">On the page</a>'
        notes = f"<p><strong>{minutes:g} min</strong>. {there}.</p>{ask}{''.join(self.notes)}"
        return (
            f'<section class="{self.kind}" data-timing="{int(60 * minutes)}"'
            f' data-paths="{" ".join(self.paths)}">{kicker}'
            f"<{level}>{self.section.title}</{level}>{self.body}"
            f'<aside class="notes">{notes}</aside></section>'
        )


def format_notes(block: Block) -> str:
    """Return the speaker notes on a block; the speaker view renders no formulas."""
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
        one.name, one.string = "i", re.sub(r"\\[()\[\]]", "", one.get_text())
    title = f"<p><strong>{block.title}</strong></p>" if block.title else ""
    return f"{title}{said}"


def render_picture(block: Block, high: float, wide: float = SLIDE_WIDTH, parts: int = 2) -> str:
    """Return a picture scaled to fill its box; "" if its text would be too small to read.

    parts: 2 if a tall picture may show its upper part, and its lower part in the next step.
    """
    svg = copy.copy(block.tag.find("svg"))
    *_, w, h = map(float, svg["viewbox"].split())
    styles = [
        f"{one.get('style', '')};font-size:{one.get('font-size', '')}px"
        for one in svg.select("[style*=font], [font-size]")
    ]
    sizes = [float(found[1]) for style in styles if (found := _FONT.search(style))]
    scale = MIN_DRAWN_PIXELS / min(sizes, default=MIN_FONT_PIXELS)
    zoom = max(1, scale * h / high)
    if scale * w > wide or zoom > parts:
        return ""
    svg.attrs = {
        k: v for k, v in svg.attrs.items() if k not in ("style", "class", "width", "height")
    }
    if zoom == 1:
        return f'<div class="picture">{svg}</div>'
    lower = '<span class="fragment" data-fragment-index="0"></span>'
    return f'<div class="picture tall" style="--zoom: {zoom + 0.01:.2f}">{svg}{lower}</div>'


def render_steps(block: Block, high: float) -> str:
    """Return pictures in steps, which replace one another, each with its sentence beside it."""
    every = block.tag.select("li")
    shown = ""
    for number, item in enumerate(every):
        drawn = render_picture(Block("figure", item), high, wide=760, parts=1)
        if not drawn:
            return ""
        kind = "fade-out" if number == 0 else "current-visible" if number + 1 < len(every) else ""
        said = " ".join(get_inner_html(p) for p in item.select("p") if not p.find("svg"))
        step = f'data-fragment-index="{max(0, number - 1)}"'
        shown += f'<div class="fragment {kind}" {step}>{drawn}<p class="said">{said}</p></div>'
    return f'<div class="stack">{shown}</div>'


def fit_table_font(rows: list[list[str]], high: float) -> int:
    """Return the font size at which a table fits `high` pixels; 0 if it would be too small.

    The words of the table's head and of its long cells may wrap, those of other cells may not.
    """
    if len(rows) < 2 or len({len(row) for row in rows}) != 1:
        return 0
    least, most, long = 0.0, [], LONG_CELL_CHARS  # width, and longest cells, in characters
    for head, *cells in zip(*rows, strict=True):
        parts = [part for cell in cells for part in (cell.split() if len(cell) > long else [cell])]
        # Words in the head are bold, and sometimes capitals.
        least += max([*map(len, parts), *(1.2 * len(word) for word in head.split())])
        most.append(max(1, len(head), *map(len, cells)))
    for size in range(28, MIN_FONT_PIXELS - 1, -1):
        wide = (SLIDE_WIDTH - 26 * len(most)) / (_PROSE_WIDTH * size)
        share, lines = max(1, sum(most) / wide), 1
        for row in rows:
            cells = zip(row, most, strict=True)
            lines += max(math.ceil(share * len(c) / n) if len(c) > long else 1 for c, n in cells)
        if wide >= least and 1.4 * size * lines + 10 * len(rows) <= high:
            return size
    return 0


def render_table(block: Block, high: float) -> str:
    """Return a table; if a cell printed it, its numbers appear in the next step."""
    whole = copy.copy(block.tag)
    if block.title and not whole.caption:
        caption = f"<caption>{escape(block.title.removeprefix('Table: '))}</caption>"
        whole.insert(0, BeautifulSoup(caption, "html.parser"))
    rows = [row.select("th, td") for row in whole.select("tr")]
    texts = [[cell.get_text().strip() for cell in row] for row in rows]
    size = fit_table_font(texts, high - 50 * bool(whole.caption))
    if not size:
        return ""
    for one in whole.select("thead, tbody, tr, colgroup, caption"):
        one.attrs = {}
    for number, cell in (found for row in rows for found in enumerate(row)):
        later = block.kind == "table" and number > 0 and cell.name == "td"
        classes = ["fragment"] * later + ["right"] * ("text-right" in cell.get("class", []))
        classes += ["long"] * (len(cell.get_text().strip()) > LONG_CELL_CHARS)
        cell.attrs = {"scope": "col"} if cell.name == "th" else {}
        cell.attrs |= {"class": classes} if classes else {}
        cell.attrs |= {"data-fragment-index": "0"} if later else {}
    whole.attrs = {"style": f"font-size:{size}px"}
    return str(whole)


def fit_code_font(lines: list[str], high: float) -> int:
    """Return the font size at which code fits `high` pixels; 0 if it would be too small."""
    wide = (SLIDE_WIDTH - 30) / (_MONO_WIDTH * max(map(len, lines), default=1))
    size = int(min(28, wide, (high - 60) / (1.32 * max(1, len(lines)))))
    return size if size >= MIN_FONT_PIXELS else 0


def render_code(block: Block, high: float) -> str:
    """Return code, and in the next step the text that it printed, if both fit."""
    lines, out = block.tag.get_text().strip("\n").splitlines(), block.out.strip("\n")
    both = fit_code_font([*lines, *strip_tags(out).splitlines()], high) if out else 0
    size = both or fit_code_font(lines, high)
    if not size:
        return ""
    font, later = f'style="font-size:{size}px"', 'data-fragment-index="0"'
    code = f"<pre {font}>{block.tag.decode_contents()}</pre>"
    result = f'<pre class="out fragment" {later} {font}>{out}</pre>'
    return f'<div class="highlight">{code}</div>{result if both else ""}'


def render_claim(block: Block, high: float) -> str:
    """Return a claim as a question, true or false; verdict and reasons appear in the next step."""
    verdict, _, claim = block.title.partition(": ")
    reasons = (drop_pointers(get_inner_html(p)) for p in block.tag.select("p"))
    answer = f"<strong>{verdict}.</strong> {next(filter(None, reasons), '')}".strip()
    later = f'<p class="claim fragment" data-fragment-index="0">{answer}</p>'
    return f'<p class="quote">{claim}</p><p class="ask">True, or false?</p>{later}'


def render_list(block: Block, high: float) -> str:
    """Return a list; "" if it is too long."""
    items = [get_inner_html(one.p or one) for one in block.tag.select("li")]
    lines = sum(1 + len(strip_tags(item)) // 75 for item in items)
    return format_list(items) if 38 * lines + 15 * len(items) <= high else ""


RENDERERS = {  # kind of a block -> its rank as a slide (0 is best), renderer, question to ask
    "steps": (0, render_steps, "before each step, what comes next?"),
    "figure": (1, render_picture, "what does it show? Give the hall a moment to read it."),
    "table": (2, render_table, "what will stand there? Take a guess from the hall for one row."),
    "listed": (2, render_table, ""),
    "checked": (3, render_claim, "who says true, who says false? Let hands be counted."),
    "code": (4, render_code, "what does each line do? Let somebody explain it."),
    "list": (5, render_list, ""),
}


# --- A section ------------------------------------------------------------------------------------


def find_lead(before: list[Block]) -> str:
    """Return the short paragraph that introduces the block after `before`; "" if none does."""
    block = next((b for b in reversed(before) if b.kind not in ("code", "printed")), None)
    is_short = block and len(block.tag.get_text().strip()) <= MAX_LEAD_CHARS
    return get_inner_html(block.tag) if is_short and block.kind == "prose" else ""


def make_candidates(section: Section) -> list[Slide]:
    """Return a slide for each readable block of a section, or for its first paragraph."""
    found, blocks = [], section.blocks
    lines = len(strip_tags(section.title)) // 58
    high = SLIDE_HEIGHT - 117 - 31 * bool(section.above) - 36 * lines
    for place, block in enumerate(blocks):
        after = (other for other in blocks[place + 1 :] if other.kind not in ("prose", "list"))
        if block.kind == "code" and not block.out and (check := next(after, block)):
            block.out = check.out if check.kind == "printed" else ""
        short = block.kind == "code" and count_code_lines(block.tag) < 3 and not block.out
        if short or "skip-slide" in block.tags or block.kind not in RENDERERS:
            continue
        rank, render, ask = RENDERERS[block.kind]
        body, lead = "", find_lead(blocks[:place])
        if lead.endswith("?") or lead and block.kind not in ("steps", "figure", "checked"):
            body = render(block, high - 14 - 36 * math.ceil(len(strip_tags(lead)) / 80))
            body = body and f'<p class="lead">{lead}</p>{body}'
        if body := body or render(block, high):
            ask = "what will it print? Take a guess from the hall." if 'class="out' in body else ask
            ask = lead if lead.endswith("?") else ask
            rank = -1 if "slide" in block.tags else rank
            found.append(Slide(section, body, block.kind, ask, place, rank))
    paragraphs = [get_inner_html(b.tag) for b in blocks if b.kind == "prose" and b.tag.name == "p"]
    said = next((one for one in map(drop_pointers, paragraphs) if len(strip_tags(one)) > 60), "")
    return found or [Slide(section, f"<p>{said}</p>", rank=len(RENDERERS))] * bool(said)


def select_slides(sections: list[Section], most: int) -> list[Slide]:
    """Return the best slides of the sections, `most` in all, the best first."""
    ranked = []  # (priority, slide)
    for section in sections:
        seconds = sum(block.seconds for block in section.blocks if block.kind != "source")
        rest, taken = make_candidates(section), []
        while rest and len(taken) < MAX_SLIDES_PER_SECTION:
            kinds = {slide.kind for slide in taken}
            one = min(rest, key=lambda one: (one.rank >= 0, one.kind in kinds, one.rank))
            rest.remove(one)
            if one.rank < 0 or one.kind != "code" or "code" not in kinds:
                is_picture = one.rank < 2 and len(taken) < 2
                seconds_each = seconds / (1 + len(taken))
                ranked.append(((one.rank >= 0, bool(taken), not is_picture, -seconds_each), one))
                taken.append(one)
    return [one for _, one in sorted(ranked, key=lambda pair: pair[0])[:most]]


def add_notes(section: Section, slides: list[Slide]) -> None:
    """Add all prose of the section to the slides' notes, each block to the nearest slide."""
    number = 0
    for place, block in enumerate(section.blocks):
        after = slides[number + 1 :]
        passed = place > slides[number].place and block.kind != "prose"  # ends the notes
        if after and (passed or place >= after[0].place):
            number += 1
        slides[number].seconds += 0 if block.kind == "source" else block.seconds
        slides[number].notes.append(format_notes(block))


# --- A deck ---------------------------------------------------------------------------------------


def format_mistakes(title: str, known: list[str]) -> str:
    """Return the well-known mistakes in an exercise, as HTML."""
    rows = "".join(f"<li>{escape(words)}</li>" for words in known)
    said = f"<p><strong>What people get wrong in “{escape(strip_tags(title))}”:</strong></p>"
    return f"{said}<ul>{rows}</ul>" if known else ""


def make_slides(body: Tag, known: dict[str, list[str]]) -> list[Slide]:
    """Return the slides of a lesson. known: the well-known mistakes in each exercise."""
    opening, *sections = split_sections(body)
    slides, tail = [Slide(opening, '<p class="course">One Model, Many GPUs</p>', "title")], []
    if opening.items:
        goals = Section("After this lesson you can")
        slides.append(Slide(goals, format_list(opening.items), "goals"))
    slides[-1].notes += [format_notes(block) for block in opening.blocks if block.kind != "list"]
    slides[-1].seconds += opening.seconds
    for section in sections:
        if section.exercises:
            titles = format_list([title for title, _ in section.exercises])
            tail.append(Slide(section, titles, "exercises", seconds=60))
            for title, name in section.exercises:
                tail[-1].notes.append(format_mistakes(title, known.get(name, [])))
        if section.title == "Summary":
            half = math.ceil(len(section.items) / 2) if len(section.items) > 4 else 4
            for items in filter(None, (section.items[:half], section.items[half:])):
                tail.append(Slide(section, format_list(items), "summary", seconds=45))
    sections = [one for one in sections if not {one.title, one.above} & _SKIPPED_SECTIONS]
    found = select_slides(sections, MAX_SLIDES - len(slides) - len(tail))
    for section in sections:
        mine = [slide for slide in found if slide.section is section]
        if not mine:
            slides[-1].notes.append(f"<p><strong>{section.title}</strong></p>")
        slides += sorted(mine, key=lambda slide: slide.place)
        add_notes(section, slides[-max(1, len(mine)) :])
    minutes = sum(slide.seconds for slide in slides) / 60
    slides[0].notes.insert(0, (
        f"<p>{len(slides) + len(tail)} slides; what their notes say takes about {minutes:.0f} "
        "minutes. Space: the next step. Esc: all slides. B: a black screen. "
        "With <code>?print-pdf</code> behind its address the deck prints, with "
        "<code>?print-pdf&amp;notes</code> together with these notes; with "
        "<code>?path=one_day</code> it has the slides of that path alone.</p>"
    ))  # fmt: skip
    return [*slides, *tail]
