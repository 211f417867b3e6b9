"""Ways through the course for who has less time than all of it takes: book/paths.yml.

    >>> ways = index.read(root).ways
    >>> [sitting.read for sitting in ways["ten_weeks"].sittings]

A path is a list of parts: a page or some sections of it, and exercises by their numbers. Its
minutes are made from those of its parts (`shardcourse.build.pace`), never typed. What
`python -m shardlab pairs` writes are each path's table, in its page book/path_<name>.md, and the
table of all, in book/paths.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from . import pace
from .key import source

PATHS = Path("book/paths.yml")
ALL = Path("book/paths.md")


@dataclass(frozen=True)
class Piece:
    """A page of a path, or some sections of it, and exercises: what is read, and in what time."""

    page: str  # "zero", or "book/setup"
    title: str
    sections: Sequence[tuple[str, str]]  # addresses and titles; none: the whole page
    exercises: Sequence[int]
    read: int  # minutes
    solve: int
    begins: str = ""  # the title of the section where it begins; "" at the top of the page

    @property
    def docname(self) -> str:
        """The page's name in the site."""
        return self.page if "/" in self.page else f"lessons/{self.page}"


@dataclass(frozen=True)
class Sitting:
    """What is done at one time: an afternoon, a week."""

    name: str
    minutes: int  # what the path's title promises
    pieces: Sequence[Piece]
    project: str = ""  # the part of book/project.md that belongs to it

    @property
    def read(self) -> int:
        """Minutes to read."""
        return sum(piece.read for piece in self.pieces)

    @property
    def solve(self) -> int:
        """Minutes for the exercises."""
        return sum(piece.solve for piece in self.pieces)


@dataclass(frozen=True)
class Way:
    """A path: whom it is for, what one can do after it, and its sittings."""

    path: str
    title: str
    whom: str  # it is for …
    able: str  # after it you can …
    sittings: Sequence[Sitting]
    reading: bool = False  # whether what is promised is the reading alone

    @property
    def docname(self) -> str:
        """The name of its page in the site."""
        return f"book/path_{self.path}"

    @property
    def pieces(self) -> list[tuple[Sitting, Piece]]:
        """All pieces in order, each with its sitting."""
        return [(sitting, piece) for sitting in self.sittings for piece in sitting.pieces]

    @property
    def read(self) -> int:
        """Minutes to read."""
        return sum(sitting.read for sitting in self.sittings)

    @property
    def solve(self) -> int:
        """Minutes for the exercises."""
        return sum(sitting.solve for sitting in self.sittings)


@dataclass(frozen=True)
class Page:
    """What is counted of a page."""

    text: str
    minutes: int = 0  # for all of its exercises
    later: Mapping[str, str] = field(default_factory=dict)  # what can wait: addresses, and words

    @cached_property
    def sections(self) -> list[pace.Section]:
        """Its sections."""
        return pace.sections(self.text)

    @property
    def title(self) -> str:
        """Its title, up to a colon."""
        found = re.search(r"^# (.+?)(?::.*)?$", self.text, re.M)
        return found[1] if found else ""

    @property
    def read(self) -> int:
        """Minutes to read all of it, exercises apart."""
        return round(sum(section.minutes for section in self.sections))

    @property
    def stated(self) -> int:
        """Minutes to read it, as the site says them."""
        return fives(self.read)

    @cached_property
    def waiting(self) -> list[pace.Section]:
        """The sections that can wait, and those below them."""
        return [section for name in self.later for section in self.of(name)]

    @property
    def first(self) -> float:
        """Minutes of a first reading, without what can wait."""
        return sum(section.minutes for section in self.sections if section not in self.waiting)

    def onward(self, name: str) -> pace.Section | None:
        """The first section after that one that cannot wait."""
        after = self.sections[self.sections.index(self.of(name)[0]) :]
        return next((section for section in after if section not in self.waiting), None)

    def of(self, name: str) -> list[pace.Section]:
        """The section of that address, and those below it. Raises ValueError for no section."""
        here = [i for i, section in enumerate(self.sections) if i and section.name == name]
        if not here:
            raise ValueError(f"{self.title}: it has no section {name!r}")
        first, *rest = self.sections[here[0] :]
        ends = [i for i, section in enumerate(rest) if section.level <= first.level]
        return [first, *rest[: ends[0] if ends else len(rest)]]

    def solve(self, numbers: Sequence[int]) -> int:
        """Minutes for the exercises of these numbers: their shares of the time for all."""
        weights = pace.exercises(self.text)
        return round(self.minutes * sum(weights[n - 1] for n in numbers) / sum(weights or [1]))


def fives(minutes: float) -> int:
    """Minutes as the site says them: five, ten, fifteen."""
    return 5 * max(1, round(minutes / 5))


def page(name: str, root: Path, minutes: int = 0, later: Mapping[str, str] | None = None) -> Page:
    """A page by its name, "zero" or "book/setup"; `minutes` are those of all its exercises.

    later: the addresses of the sections that can wait, and what each of them is.
    """
    return Page(source(name, root).read_text("utf-8"), minutes, later or {})


def read(root: Path, titles: dict[str, str], lessons: dict[str, Page]) -> dict[str, Way]:
    """The paths of the course in `root`, by their names; {} where there are none.

    titles: of the lessons. lessons: their pages.
    Raises ValueError, which names the path, where it does not fit the pages.
    """
    import yaml

    if not (root / PATHS).is_file():
        return {}
    pages, found = dict(lessons), {}
    for entry in yaml.safe_load((root / PATHS).read_text("utf-8")):
        name = entry.get("path")
        try:
            sittings, begun = [], set()
            for sitting in entry.pop("sittings"):
                parts = sitting.pop("parts")
                made = [_piece(part, root, pages, titles, begun) for part in parts]
                sittings.append(Sitting(pieces=made, **sitting))
            found[name] = Way(sittings=sittings, **entry)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{PATHS}: path {name!r}: {error}") from None
    return found


def _piece(
    part: Any, root: Path, pages: dict[str, Page], titles: dict[str, str], begun: set[str]
) -> Piece:
    """A part of a path; `begun` are the pages that it has begun, whose beginning is read once."""
    part = {"page": part} if isinstance(part, str) else dict(part)
    name, wanted, numbers = part.pop("page"), part.pop("sections", None), part.pop("exercises", [])
    if part:
        raise ValueError(f"part {name!r}: {[*part]}: known are page, sections, exercises")
    it = pages[name] = pages.get(name) or page(name, root)
    there, taken = it.sections if wanted is None else [], []
    for address in wanted or []:
        sections = it.of(address)
        there = [*there, *sections]
        taken.append((address, sections[0].title))
    begins = taken[0][1] if taken and name in begun else ""
    if wanted and name not in begun:
        there = [it.sections[0], *there]
    begun.add(name)
    count = len(pace.exercises(it.text))
    if any(not 1 <= number <= count for number in numbers):
        raise ValueError(f"page {name!r}: exercises {numbers}: it has {count}")
    spent = round(sum(section.minutes for section in there))
    solve = it.solve(numbers)
    return Piece(name, titles.get(name, it.title), taken, numbers, spent, solve, begins)


def length(minutes: int) -> str:
    """Minutes as one says them: "50 min", "2 h 15 min"."""
    hours, left = divmod(minutes, 60)
    return " ".join([f"{hours} h"] * bool(hours) + [f"{left} min"] * bool(left or not hours))


def table(way: Way, project: bool) -> list[str]:
    """A path's table; `project`: whether there is a page book/project.md."""
    lines = ["| when | read | minutes | exercises | minutes |", "|---|---|--:|---|--:|"]
    if not any(sitting.name for sitting in way.sittings):
        lines = ["| read | minutes | exercises | minutes |", "|---|--:|---|--:|"]
    named = lines[0].startswith("| when")

    def row(when: str, *cells: object) -> str:
        return "| " + " | ".join([when] * named + [str(cell) for cell in cells]) + " |"

    for sitting in way.sittings:
        when = f"**{sitting.name}**"
        for piece in sitting.pieces:
            numbers = ", ".join(map(str, piece.exercises))
            what = f"{_link(piece)}" if piece.read else f"[{piece.title}](../{piece.docname}.md)"
            lines.append(row(when, what, piece.read or "", numbers, piece.solve or ""))
            when = ""
        if sitting.project and project:
            work = f"[the project](project.md): `{sitting.project}.py`"
            lines.append(row("", work, "", "", ""))
        if named:
            whole = f"*together {length(sitting.read + sitting.solve)}*"
            lines.append(row("", whole, f"*{sitting.read}*", "", f"*{sitting.solve or ''}*"))
    read, solve = way.read, way.solve
    lines.append(row("**all**", f"**{length(read + solve)}**", f"**{read}**", "", f"**{solve}**"))
    return lines


def _link(piece: Piece) -> str:
    home = "" if piece.docname.startswith("book/") else "../"
    name = f"{home}{piece.docname.removeprefix('book/')}.md"
    ends = [f"[{title}]({name}#{place})".replace("|", "\\|") for place, title in piece.sections]
    return f"[{piece.title}]({name})" + (f": {'; '.join(ends)}" if ends else ", all of it")


def overview(ways: dict[str, Way], lessons: dict[str, Page]) -> list[str]:
    """The table of all paths, and of all lessons together."""
    lines = [
        "| path | for whom | to read | exercises | after it you can |",
        "|---|---|--:|--:|---|",
    ]
    for way in ways.values():
        title = f"[{way.title}](path_{way.path}.md)"
        cells = [title, way.whom, length(way.read), length(way.solve), way.able]
        lines.append(f"| {' | '.join(cells)} |")
    read = length(sum(page.read for page in lessons.values()))
    solve = length(sum(page.minutes for page in lessons.values()))
    lines.append(
        f"| all {len(lessons)} lessons | who has a term and more | {read} | {solve} | all of this |"
    )
    return lines


def onward(ways: dict[str, Way], docname: str) -> Iterator[tuple[Way, Sitting, Piece | None]]:
    """Where each path that comes to a page goes on from there; None at the path's end.

    With the sitting in which the path leaves the page.
    """
    for way in ways.values():
        steps = way.pieces
        for (sitting, piece), after in zip(steps, [*steps[1:], None], strict=True):
            if piece.docname == docname and (not after or after[1].docname != docname):
                yield way, sitting, after[1] if after else None
