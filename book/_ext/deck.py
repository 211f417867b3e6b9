"""A lesson's page as slides: which of its pieces a hall sees, and what the lecturer's notes say.

Nothing here knows Sphinx: the page goes in as text, slides come out. A slide shows one block of the
page, and its notes hold the prose around it, so no sentence and no number is written twice.

The rule. Each section gets a slide of the first of these that it has and that a hall can read: a
picture (in steps or whole), the code of its plainest form, a table, a checked claim, other code;
without any of them, its first sentences. Then the sections that take longest get a second and a
third, until a deck has MOST slides. A cell tagged `slide` is always taken, one tagged `skip-slide`
never. Code, and a table's labels, come first; what the cell gave, and the sentence that says what
it means, come with the next step, so that there is something to ask.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from html import escape, unescape
from itertools import pairwise

from deck_page import (
    LONG,
    Block,
    Exercise,
    Page,
    Section,
    code_lines,
    code_size,
    drawn,
    fits,
    fitting,
    room,
    sentences,
    table_size,
)
from markup import CELL, ROW, plain

LEAST, MOST = 12, 25  # slides
EACH = 3  # of a section, but where a deck has fewer than LEAST
QUESTIONS = 2  # exercises that a hall answers
_ASIDE = ("Exercises", "Summary", "Further reading")
_WRONG = "What goes wrong"
_LATER = ' data-fragment-index="0"'  # all that comes with a slide's only step
_SENDS = re.compile(
    r"(?:all_reduce|reduce_scatter\w*|all_gather\w*|all_to_all\w*|broadcast\w*|exchange|isend"
    r"|irecv|send|recv|scatter|gather)\("
)
_LEANS = re.compile(r"(It|They|This|That|These|Those|Both|Here|Then|There|So|But|And|Each of)\b")
_MATHS = re.compile(r'<(span|div) class="math[^"]*">(.*?)</\1>', re.DOTALL)


@dataclass
class Slide:
    """A slide: its heading, its content, and what the lecturer sees."""

    title: str
    body: str
    kind: str = "text"
    kicker: str = ""  # the section of a subsection
    anchor: str = ""
    ask: str = ""
    notes: list[str] = field(default_factory=list)
    seconds: float = 0
    exercise: int = 0  # the number of the one that it asks
    ways: list[str] = field(default_factory=list)  # the paths that come to it

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
            f' data-paths="{" ".join(self.ways)}">{kicker}'
            f"<{level}>{self.title}</{level}>{self.body}"
            f'<aside class="notes">{notes}</aside></section>'
        )


@dataclass
class Candidate:
    """What may become a slide of a section: the blocks it stands on, and how much it is wanted."""

    first: int
    last: int
    rank: int
    slide: Slide
    forced: bool = False


# --- Notes ----------------------------------------------------------------------------------------


def readable(html: str) -> str:
    """Prose for the lecturer's window, which sets no formulas."""

    def words(match: re.Match[str]) -> str:
        tex = unescape(match[2]).strip().removeprefix("\\(").removesuffix("\\)")
        tex = re.sub(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}", r"(\1)/(\2)", tex)
        tex = re.sub(r"\\(?:text|mathrm|operatorname)\{([^{}]*)\}", r"\1", tex)
        for name, sign in {"cdot": "·", "times": "×", "le": "≤", "ge": "≥", "approx": "≈"}.items():
            tex = re.sub(rf"\\{name}\b", sign, tex)
        tex = re.sub(r"\\([a-zA-Z]+)", r"\1", re.sub(r"\\[,;!\[\]]", " ", tex))
        return f"<i>{escape(tex)}</i>"

    return _MATHS.sub(words, html)


def note(block: Block) -> str:
    """What the notes say of a block that stands on no slide, or beside one."""
    if block.kind == "prose":
        return f"<p>{readable(block.html)}</p>"
    if block.kind == "list":
        return readable(block.html)
    if block.kind in ("checked", "box"):
        return f"<p><strong>{readable(block.title)}</strong></p>{readable(block.html)}"
    if block.kind == "figure":
        said = re.search(r'aria-label="([^"]*)"', block.html)
        return f"<p><strong>The picture:</strong> {said[1]}</p>" if said else ""
    if block.at_home and block.lines:
        minutes = max(1, round(block.seconds / 60))
        return f"<p><em>To read at home: {block.title}, {minutes} min.</em></p>"
    if block.title and block.kind in ("table", "printed"):
        return f"<p><em>{escape(block.title)}</em></p>"
    return ""


# --- One block on a slide -------------------------------------------------------------------------


def sentence(text: str | None, name: str, later: bool = False) -> str:
    """A sentence as a paragraph of the slide."""
    if not text:
        return ""
    classes, step = (f"{name} fragment", _LATER) if later else (name, "")
    return f'<p class="{classes}"{step}>{text}</p>'


def around(section: Section, first: int, last: int, used: set[str]) -> tuple[str | None, ...]:
    """The sentence that leads to the blocks `first` to `last`, and the one that follows them."""
    sub, blocks = section.blocks[first].sub, section.blocks
    begin = first
    while begin and blocks[begin - 1].sub == sub and blocks[begin - 1].kind in ("prose", "title"):
        begin -= 1
    before = [s for b in blocks[begin:first] if b.kind == "prose" for s in fitting(b.html)]
    before = [s for s in before if s not in used and not plain(s).endswith("?")]
    opens = begin == 0 or blocks[begin - 1].sub != sub or blocks[begin].kind == "title"
    order = before if opens else before[::-1]
    lead = next((s for s in order if not _LEANS.match(plain(s))), None)
    after: list[str] = []
    for block in blocks[last + 1 :]:
        if block.kind != "prose" or block.sub != sub or block.html.startswith("<strong>"):
            break  # what begins in bold is the next thing
        after += sentences(block.html)
    said = [one for one in connected(after, True) if one not in used]
    return lead, next(iter(said), None)


def connected(said: list[str], leans: bool = False) -> Iterator[str]:
    """The sentences that a slide takes, and that lean on none that it does not take: no answers.

    leans: whether the first may lean, on what stands before it.
    """
    asked = False
    for one in said:
        follows = asked or (not leans and _LEANS.match(plain(one)))
        asked = plain(one).endswith("?")
        leans = fits(one) and not asked and not follows
        if leans:
            yield one


def of_steps(block: Block) -> Slide | None:
    """Pictures in steps, one after the other in one place, each with its sentence."""
    items = re.findall(r"<li>(.*?)</li>", block.html, re.DOTALL)
    pictures = [drawn(item, 0) for item in items]
    if not items or not all(pictures):
        return None
    shown = []
    for number, (item, picture) in enumerate(zip(items, pictures, strict=True)):
        kind = "fade-out" if number == 0 else "current-visible" if number + 1 < len(items) else ""
        step = f' data-fragment-index="{max(0, number - 1)}"'
        text = re.sub(
            r"<svg.*?</svg>|<span[^>]*inline-svg[^>]*>\s*</span>", "", item, flags=re.DOTALL
        )
        text = re.sub(r"</?p[^>]*>|<span class=\"inline-svg[^>]*>|</?div[^>]*>", " ", text)
        text = re.sub(r"^(\s*</span>)+", "", text)
        shown.append(
            f'<div class="fragment {kind}"{step}><div class="picture">{picture.svg}</div>'
            f'<p class="said">{" ".join(text.split())}</p></div>'
        )
    body = f'<div class="stack beside">{"".join(shown)}</div>'
    return Slide("", body, "steps", ask="before each step, what comes next?")


def of_figure(
    block: Block, high: float, tall: float, lead: str | None, claim: str | None
) -> Slide | None:
    """A picture with at most two sentences, below and above it or beside it, `tall` pixels high."""
    picture = drawn(block.html, high, tall)
    if picture is None:
        return None
    shown = f'<div class="picture">{picture.svg}</div>'
    said = sentence(lead, "lead"), sentence(claim, "claim", later=True)
    if picture.beside:
        body = f'<div class="beside">{shown}<div class="said">{"".join(said)}</div></div>'
    else:
        body = f"{said[0]}{shown}{said[1]}"
    ask = "what does the picture show? Give the hall a moment to read it."
    return Slide("", body, "figure", ask=ask)


def of_table(
    block: Block, title: str, high: float, lead: str | None, claim: str | None
) -> Slide | None:
    """A table. Of one that a cell made, the numbers come with the next step."""
    html, what = block.html, escape(block.title.removeprefix("Table: "))
    if what != escape(block.title) and "<caption" not in html and what.lower() != title.lower():
        what = re.sub("`(.*?)`", r"<code>\1</code>", what)
        html = re.sub("(<table[^>]*>)", lambda m: f"{m[1]}<caption>{what}</caption>", html, count=1)
    size = table_size(html, high)
    if not size:
        return None
    hides = block.kind == "table"
    head = [plain(text).strip() for tag, _, text in CELL.findall(block.html) if tag == "th"]

    def row(match: re.Match[str]) -> str:
        made = ""
        for number, (tag, attributes, text) in enumerate(CELL.findall(match[0])):
            right = "right" if "text-right" in attributes else ""
            step = _LATER if hides and number and tag == "td" else ""
            classes = " ".join(filter(None, [right, "fragment" if step else ""]))
            scope = ' scope="col"' if tag == "th" else ""
            named = f' class="{classes}"' if classes else ""
            made += f"<{tag}{scope}{named}{step}>{text}</{tag}>"
        return f"<tr>{made}</tr>"

    table = ROW.sub(row, html)
    table = re.sub(r"<table[^>]*>", f'<table style="font-size:{size}px">', table)
    table = re.sub(r"<(thead|tbody|colgroup|caption)[^>]*>", r"<\1>", table)
    ask = ""
    if hides and len(head) > 1:
        names = " and ".join(f"“{escape(name)}”" for name in head[1:][-2:])
        ask = f"what will stand under {names}? Take a guess from the hall for one row."
    body = f"{sentence(lead, 'lead')}{table}{sentence(claim, 'claim', later=True)}"
    return Slide("", body, "table", ask=ask)


def of_code(
    block: Block, printed: Block | None, high: float, lead: str | None, claim: str | None
) -> Slide | None:
    """Code, and with the next step what it printed."""
    html = re.sub(r"\n{3,}", "\n\n", block.html)  # one blank line is enough
    out = (printed.out if printed else block.out).strip("\n")
    size = code_size(html, high, out) if out else 0
    shows = bool(size)
    size = size or code_size(html, high)
    if not size:
        return None
    pre = re.sub(r"<pre[^>]*>", f'<pre style="font-size:{size}px">', html)
    result = ""
    if shows:
        result = f'<pre class="out fragment"{_LATER} style="font-size:{size}px">{out}</pre>'
    code = plain(html)
    line = next((row.strip() for row in code.splitlines() if _SENDS.search(row)), "")
    if line and not line.startswith(("def ", "class ", "import ", "from ")):
        ask = f"what does each rank have before and after <code>{escape(line)}</code>?"
    elif shows:
        ask = "what will it print?"
    elif block.kind == "listing":
        ask = "what does each line do, and what happens without it?"
    else:
        ask = "what does it compute? Let somebody explain it line by line."
    body = f'{sentence(lead, "lead")}<div class="highlight">{pre}</div>{result}'
    return Slide("", body + sentence(claim, "claim", later=True), "code", ask=ask)


def of_checked(block: Block) -> Slide | None:
    """A claim that people make: true, or false?"""
    claim = re.sub(r"^Checked:\s*", "", block.title)
    answer = fitting(block.html.replace("<p>", "").replace("</p>", "\n"))[:3]
    if not answer or len(plain(claim)) > LONG:
        return None
    body = f'<p class="quote">{claim}</p><p class="ask">True, or false?</p>'
    body += "".join(sentence(one, "claim", later=True) for one in answer)
    return Slide("", body, "checked", ask="who says true, who says false? Let hands be counted.")


def of_text(section: Section) -> Slide | None:
    """The first sentences of a section that has nothing else to show."""
    prose = [s for b in section.blocks if b.kind == "prose" for s in sentences(b.html)]
    said = [*connected(prose)][:3]
    if len(said) < 2:
        return None
    return Slide("", f"<ul>{''.join(f'<li>{one}</li>' for one in said)}</ul>", "text")


# --- A section ------------------------------------------------------------------------------------


def pieces(section: Section) -> list[Candidate]:
    """All that could be a slide of the section."""
    found: list[Candidate] = []
    used: set[str] = set()
    blocks = section.blocks
    for place, block in enumerate(blocks):
        if "skip-slide" in block.tags:
            continue
        last, printed = place, None
        after = blocks[place + 1] if place + 1 < len(blocks) else None
        if block.kind == "code" and not block.out and after and after.kind == "printed":
            last, printed = place + 1, after
        if block.kind == "code" and len(code_lines(block.html)) < 3 and not (printed or block.out):
            continue
        title, kicker = (block.sub, section.title) if block.sub else (section.title, "")
        plainest = re.search(r"\bplain|\blines\b", f"{section.title} {block.sub}".lower())
        lead, claim = around(section, place, last, used)
        asked = blocks[place - 1] if place and blocks[place - 1].kind == "question" else None
        if asked and len(plain(asked.html)) <= LONG:
            lead = asked.html
        slide, rank = None, 9
        one = [(lead, None), (None, claim)][:: 1 if asked else -1]
        for said in ((lead, claim), *one, (None, None)):
            high = room(title, kicker, *said)
            if block.kind == "steps":
                slide, rank = of_steps(block), 0
            elif block.kind == "figure":
                slide, rank = of_figure(block, high, room(title, kicker), *said), 1
            elif block.kind in ("table", "listed"):
                slide, rank = of_table(block, title, high, *said), 3
            elif block.kind == "checked":
                slide, rank = of_checked(block), 4
            elif block.kind == "code":
                slide, rank = of_code(block, printed, high, *said), 2 if plainest else 5
            elif block.kind in ("source", "listing"):
                slide, rank = of_code(block, None, high, *said), 6 - (block.kind == "listing")
            if slide:
                break
        if slide is None:
            continue
        slide.ask = asked.html if asked else slide.ask
        slide.title, slide.kicker, slide.anchor = title, kicker, section.anchor
        used |= {one for one in (lead, claim) if one and one in slide.body}
        found.append(Candidate(place, last, rank, slide, "slide" in block.tags))
    return found


def chosen(sections: list[Section], most: int) -> list[tuple[Section, list[Candidate]]]:
    """For each section the pieces that become slides, `most` of them."""
    every = {id(s): sorted(pieces(s), key=lambda p: (not p.forced, p.rank)) for s in sections}
    taken: dict[int, list[Candidate]] = {}
    for section in sections:
        mine = every[id(section)]
        first = [p for p in mine if p.forced] or mine[:1]
        if not first and (slide := of_text(section)):
            slide.title, slide.anchor = section.title, section.anchor
            first = [Candidate(0, 0, 8, slide)]
        taken[id(section)] = first
    # Too many: what says least goes first, and its prose goes into the notes before it.
    order = sorted(
        sections, key=lambda s: (-max((p.rank for p in taken[id(s)]), default=9), s.seconds)
    )
    for section in order:
        if sum(map(len, taken.values())) > most and not any(p.forced for p in taken[id(section)]):
            taken[id(section)] = []
    for turn in range(2 * EACH):
        for section in sorted(sections, key=lambda s: -s.seconds / (1 + len(taken[id(s)]))):
            mine, count = taken[id(section)], sum(map(len, taken.values()))
            if not mine or count >= (most if turn < EACH - 1 else most - MOST + LEAST):
                continue
            kinds = {piece.slide.kind for piece in mine}
            rest = [p for p in every[id(section)] if p not in mine]
            rest = [p for p in rest if p.rank < 6 or turn >= EACH - 1]
            rest.sort(key=lambda p: (p.slide.kind in kinds, p.rank))
            mine += rest[:1]
    return [(s, sorted(taken[id(s)], key=lambda p: p.first)) for s in sections]


def annotated(section: Section, mine: list[Candidate]) -> list[Slide]:
    """The slides of a section with their notes: all of its prose, each piece beside its slide."""
    slides = [piece.slide for piece in mine]
    ends = []  # a slide's notes reach to the end of the paragraph after it
    for piece, after in pairwise(mine):
        end = piece.last + 1
        while end < after.first and section.blocks[end].kind == "prose":
            end += 1
        ends.append(end)
    for place, block in enumerate(section.blocks):
        number = sum(end <= place for end in ends)
        shown = any(piece.first <= place <= piece.last for piece in mine)
        slides[number].seconds += 0 if block.at_home and not shown else block.seconds
        slides[number].notes.append(note(block))
    return slides


# --- A deck ---------------------------------------------------------------------------------------


def bullets(title: str, items: Iterable[str], kind: str, later: bool = False) -> Slide:
    """A slide with a list."""
    step = ' class="fragment"' if later else ""
    rows = "".join(f"<li{step}>{item}</li>" for item in items)
    return Slide(title, f"<ul>{rows}</ul>", kind)


def _items(block: Block) -> list[str]:
    found = re.findall(r"<li>(.*?)</li>", block.html, re.DOTALL)
    return [re.sub(r"</?p[^>]*>", "", item).strip().rstrip(";") for item in found]


def question(one: Exercise, said: list[str]) -> Slide:
    """An exercise that a hall can answer; the solution comes with the next step."""
    code = re.sub(r"\n[^\n]*\bcheck\b(?:<[^>]*>)*\([^\n]*(?=</pre>|\n\s*</pre>)", "", one.code)
    size = code_size(code, 300) if code else 0
    answer = f'<div class="fragment"{_LATER}>{one.verdict}'
    if size and code.count("\n") <= 8:
        pre = re.sub(r"<pre[^>]*>", f'<pre style="font-size:{min(size, 24)}px">', code)
        answer += f'<div class="highlight">{pre}</div>'
    slide = Slide(
        f"Question: {one.title}", f'<p class="asked">{one.asked}</p>{answer}</div>', "question"
    )
    slide.ask = "Let everybody write down an answer, and compare it with a neighbour's."
    slide.notes.append(mistakes(one, said))
    slide.anchor, slide.seconds = "exercises", 180
    return slide


def mistakes(one: Exercise, said: list[str]) -> str:
    """The mistakes that people make in an exercise, as its check knows them."""
    if not said:
        return ""
    rows = "".join(f"<li>{escape(words)}</li>" for words in said)
    return (
        f"<p><strong>What people get wrong in “{readable(one.title)}”:</strong></p><ul>{rows}</ul>"
    )


def deck(page: Page, said: Callable[[str], list[str]]) -> list[Slide]:
    """The slides of a lesson. said: what the check of an exercise says of known mistakes."""
    sections = [s for s in page.sections if s.title not in _ASIDE]
    wrong = next((s for s in sections if s.title.startswith(_WRONG)), None)
    subs = list(dict.fromkeys(b.sub for b in wrong.blocks if b.sub)) if wrong else []
    summary = next((s for s in page.sections if s.title == "Summary"), None)
    sums = [i for b in summary.blocks if b.kind == "list" for i in _items(b)] if summary else []
    asked = [one for one in page.exercises if one.short][:QUESTIONS]

    first = Slide(page.title, '<p class="course">One Model, Many GPUs</p>', "title")
    goals = next((b for b in page.opening.blocks if b.kind == "list"), None)
    head = [first]
    if goals:
        head.append(bullets("After this lesson you can", _items(goals), "goals"))
    for block in page.opening.blocks:
        head[-1].seconds += block.seconds
        head[-1].notes.append(note(block) if block is not goals else "")

    tail = [question(one, said(one.check)) for one in asked]
    for slide, one in zip(tail, asked, strict=True):
        slide.exercise = page.exercises.index(one) + 1
    if page.exercises:
        slide = bullets("Exercises", [one.title for one in page.exercises], "exercises")
        slide.anchor, slide.seconds = "exercises", 60
        slide.notes = [mistakes(one, said(one.check)) for one in page.exercises if one not in asked]
        tail.append(slide)
    halves = (
        [sums] if len(sums) <= 4 else [sums[: (len(sums) + 1) // 2], sums[(len(sums) + 1) // 2 :]]
    )
    for half in halves if summary and sums else []:
        slide = bullets("Summary", half, "summary")
        slide.anchor, slide.seconds = summary.anchor, 45
        tail.append(slide)

    listed = len(subs) >= 2
    body: list[Slide] = []
    for section, mine in chosen(sections, MOST - len(head) - len(tail) - listed):
        if section is wrong and listed:
            slide = bullets(section.title, subs[:7], "wrong", later=True)
            slide.anchor, slide.ask = (
                section.anchor,
                "which of these raise an error? Which are silent?",
            )
            body.append(slide)
        if mine:
            body += annotated(section, mine)
            continue
        last = (body or head)[-1]
        last.seconds += sum(b.seconds for b in section.blocks if not b.at_home)
        last.notes += [f"<p><strong>{section.title}</strong></p>", *map(note, section.blocks)]
    slides = [*head, *body, *tail]
    minutes = sum(slide.seconds for slide in slides if slide not in tail) / 60
    first.notes.insert(0, (
        f"<p>{len(slides)} slides; what their notes say takes about {minutes:.0f} minutes, "
        "questions apart. Space: the next step. Esc: all slides. B: a black screen. "
        "With <code>?print-pdf</code> behind its address the deck prints, with "
        "<code>?print-pdf&amp;notes</code> together with these notes; with "
        "<code>?path=one_day</code> it has the slides of that path alone.</p>"
    ))  # fmt: skip
    return slides
