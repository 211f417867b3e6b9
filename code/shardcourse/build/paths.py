"""Paths through the course for readers with less time than the whole course takes: book/paths.yml.

    >>> learning_paths = index.read_index(root).learning_paths
    >>> [session.read_minutes for session in learning_paths["ten_weeks"].sessions]

A path is a list of parts: a page or some of its sections, and exercises by number. The minutes
are computed from the parts (`reading_time`), never typed. `python -m shardlab pairs`
writes each path's table, in its page book/path_<name>.md, and the table of all paths, in
book/paths.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from . import reading_time
from .key import get_source_path

PATHS_FILE = Path("book/paths.yml")
OVERVIEW_FILE = Path("book/paths.md")


@dataclass(frozen=True)
class Segment:
    """Page of a path, or some of its sections, and exercises, with the minutes for both."""

    page: str  # "zero", or "book/setup"
    title: str
    sections: Sequence[tuple[str, str]]  # (anchor, title) each; empty: the whole page
    exercises: Sequence[int]
    read_minutes: int
    exercise_minutes: int
    following: Sequence[str] = ()  # title of the section after each of `sections` on the page

    @property
    def docname(self) -> str:
        """Name of the page in the site."""
        return self.page if "/" in self.page else f"lessons/{self.page}"


@dataclass(frozen=True)
class Session:
    """Session of a path, such as an afternoon or a week."""

    name: str
    minutes: int  # promised by the path's title
    segments: Sequence[Segment]
    project: str = ""  # the part of book/project.md that belongs to it

    @property
    def read_minutes(self) -> int:
        """Minutes to read."""
        return sum(segment.read_minutes for segment in self.segments)

    @property
    def exercise_minutes(self) -> int:
        """Minutes for the exercises."""
        return sum(segment.exercise_minutes for segment in self.segments)


@dataclass(frozen=True)
class LearningPath:
    """Path: its audience, what its readers can do afterwards, and its sessions."""

    path: str
    title: str
    whom: str  # audience: completes "it is for …"
    able: str  # outcome: completes "after it you can …"
    sessions: Sequence[Session]
    reading: bool = False  # whether the promised minutes are for reading alone

    @property
    def docname(self) -> str:
        """Name of the path's page in the site."""
        return f"book/path_{self.path}"

    @property
    def segments(self) -> list[tuple[Session, Segment]]:
        """All pieces in order, each with its session."""
        return [(session, segment) for session in self.sessions for segment in session.segments]

    @property
    def read_minutes(self) -> int:
        """Minutes to read."""
        return sum(session.read_minutes for session in self.sessions)

    @property
    def exercise_minutes(self) -> int:
        """Minutes for the exercises."""
        return sum(session.exercise_minutes for session in self.sessions)


@dataclass(frozen=True)
class Page:
    """Reading-time statistics of one page."""

    text: str
    minutes: int = 0  # for all of the page's exercises
    later: Mapping[str, str] = field(default_factory=dict)  # skippable: anchor -> description

    @cached_property
    def sections(self) -> list[reading_time.Section]:
        """Sections of the page."""
        return reading_time.split_sections(self.text)

    @property
    def title(self) -> str:
        """Title of the page, up to a colon."""
        found = re.search(r"^# (.+?)(?::.*)?$", self.text, re.M)
        return found[1] if found else ""

    @property
    def read_minutes(self) -> int:
        """Minutes to read the whole page without its exercises."""
        return round(sum(section.minutes for section in self.sections))

    @cached_property
    def skippable_sections(self) -> list[reading_time.Section]:
        """Sections that a first reading can skip, with their subsections."""
        return [section for name in self.later for section in self.find_section_tree(name)]

    @property
    def first_reading_minutes(self) -> float:
        """Minutes of a first reading, without the sections that it can skip."""
        return sum(s.minutes for s in self.sections if s not in self.skippable_sections)

    def find_next_section(self, name: str) -> reading_time.Section | None:
        """Return the first section after the section `name` that a first reading does not skip."""
        after = self.sections[self.sections.index(self.find_section_tree(name)[0]) :]
        return next((section for section in after if section not in self.skippable_sections), None)

    def find_section_tree(self, name: str) -> list[reading_time.Section]:
        """Return the section `name` and its subsections. Raises ValueError for an unknown one."""
        here = [i for i, section in enumerate(self.sections) if i and section.name == name]
        if not here:
            raise ValueError(f"page {self.title!r} has no section {name!r}")
        first, *rest = self.sections[here[0] :]
        ends = [i for i, section in enumerate(rest) if section.level <= first.level]
        return [first, *rest[: ends[0] if ends else len(rest)]]

    def estimate_exercise_minutes(self, numbers: Sequence[int]) -> int:
        """Return the minutes for these exercises: their share of the time for all exercises."""
        weights = reading_time.get_exercise_weights(self.text)
        return round(self.minutes * sum(weights[n - 1] for n in numbers) / sum(weights or [1]))


def load_page(name: str, root: Path, *details: Any) -> Page:
    """Return a page by name, "zero" or "book/setup"; `details`: further fields of `Page`."""
    return Page(get_source_path(name, root).read_text("utf-8"), *details)


def read_paths(root: Path, titles: Mapping, lessons: Mapping[str, Page]) -> dict[str, LearningPath]:
    """Return the paths of the course in `root` by name, {} if there are none.

    titles: titles of the lessons. lessons: their pages.
    Raises ValueError, which names the path, if a path does not match the pages.
    """
    import yaml

    if not (root / PATHS_FILE).is_file():
        return {}
    pages, found = dict(lessons), {}
    for entry in yaml.safe_load((root / PATHS_FILE).read_text("utf-8")):
        name = entry.get("path")
        try:
            sessions, begun = [], set()
            for session in entry.pop("sittings"):
                parts = session.pop("parts")
                segments = [_parse_segment(part, root, pages, titles, begun) for part in parts]
                sessions.append(Session(segments=segments, **session))
            found[name] = LearningPath(sessions=sessions, **entry)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{PATHS_FILE}: path {name!r}: {error}") from None
    return found


def _parse_segment(
    part: Any, root: Path, pages: dict[str, Page], titles: dict[str, str], begun: set[str]
) -> Segment:
    """Return a segment of a path; `begun`: pages whose beginning the path has read already."""
    part = {"page": part} if isinstance(part, str) else dict(part)
    name, wanted, numbers = part.pop("page"), part.pop("sections", None), part.pop("exercises", [])
    if part:
        raise ValueError(f"part {name!r}: {[*part]}: known are page, sections, exercises")
    page = pages[name] = pages.get(name) or load_page(name, root)
    counted, chosen, following = page.sections if wanted is None else [], [], []
    for anchor in wanted or []:
        sections = page.find_section_tree(anchor)
        counted = [*counted, *sections]
        chosen.append((anchor, sections[0].title))
        after = page.sections[page.sections.index(sections[-1]) + 1 :]
        following.append(after[0].title if after else "")
    if wanted and name not in begun:
        counted = [page.sections[0], *counted]
    begun.add(name)
    count = len(reading_time.get_exercise_weights(page.text))
    if any(not 1 <= number <= count for number in numbers):
        raise ValueError(f"page {name!r}: exercises={numbers}: must be between 1 and {count}")
    read, solve = round(sum(s.minutes for s in counted)), page.estimate_exercise_minutes(numbers)
    title = titles.get(name, page.title)
    return Segment(name, title, chosen, numbers, read, solve, following)


def format_minutes(minutes: int) -> str:
    """Format minutes: "50 min", "2 h 15 min"."""
    hours, left = divmod(minutes, 60)
    return " ".join([f"{hours} h"] * bool(hours) + [f"{left} min"] * bool(left or not hours))


def format_table(path: LearningPath, project: bool) -> list[str]:
    """Return a path's table; `project`: whether there is a page book/project.md."""
    lines = ["| when | read | minutes | exercises | minutes |", "|---|---|--:|---|--:|"]
    if not any(session.name for session in path.sessions):
        lines = ["| read | minutes | exercises | minutes |", "|---|--:|---|--:|"]
    named = lines[0].startswith("| when")

    def add_row(when: str, *cells: object) -> None:
        lines.append("| " + " | ".join([when] * named + [str(cell) for cell in cells]) + " |")

    for session in path.sessions:
        when = f"**{session.name}**"
        for segment in session.segments:
            read, solve = segment.read_minutes, segment.exercise_minutes
            link = _format_links(segment) if read else f"[{segment.title}](../{segment.docname}.md)"
            add_row(when, link, read or "", ", ".join(map(str, segment.exercises)), solve or "")
            when = ""
        if session.project and project:
            add_row("", f"[the project](project.md): `{session.project}.py`", "", "", "")
        if named:
            read, solve = session.read_minutes, session.exercise_minutes
            add_row(
                "",
                f"*together {format_minutes(read + solve)}*",
                f"*{read}*",
                "",
                f"*{solve or ''}*",
            )
    read, solve = path.read_minutes, path.exercise_minutes
    add_row("**all**", f"**{format_minutes(read + solve)}**", f"**{read}**", "", f"**{solve}**")
    return lines


def _format_links(part: Segment) -> str:
    home = "" if part.docname.startswith("book/") else "../"
    name = f"{home}{part.docname.removeprefix('book/')}.md"
    links = [f"[{title}]({name}#{anchor})".replace("|", "\\|") for anchor, title in part.sections]
    return f"[{part.title}]({name})" + (f": {'; '.join(links)}" if links else ", all of it")


def format_overview(learning_paths: Mapping, lessons: Mapping[str, Page]) -> list[str]:
    """Return the table of all paths, and of all lessons together."""
    lines = ["| path | for whom | to read | exercises | after it you can |"]
    lines += ["|---|---|--:|--:|---|"]
    for path in learning_paths.values():
        read, solve = format_minutes(path.read_minutes), format_minutes(path.exercise_minutes)
        cells = [f"[{path.title}](path_{path.path}.md)", path.whom, read, solve, path.able]
        lines.append(f"| {' | '.join(cells)} |")
    read = format_minutes(sum(page.read_minutes for page in lessons.values()))
    solve = format_minutes(sum(page.minutes for page in lessons.values()))
    lines.append(
        f"| all {len(lessons)} lessons | readers who have a term and more "
        f"| {read} | {solve} | all of this |"
    )
    return lines


def list_next_segments(
    learning_paths: Mapping[str, LearningPath], docname: str
) -> Iterator[tuple[LearningPath, Session, Segment | None]]:
    """Yield for each path through a page: the path, the session in which it leaves the page,
    and the next segment (None at the path's end).
    """
    for path in learning_paths.values():
        steps = path.segments
        for (session, segment), after in zip(steps, [*steps[1:], None], strict=True):
            if segment.docname == docname and (not after or after[1].docname != docname):
                yield path, session, after[1] if after else None


def list_exits(
    learning_paths: Mapping[str, LearningPath], docname: str
) -> Iterator[tuple[LearningPath, str, list[str], tuple[Segment, str] | None]]:
    """Yield the sections of a page after which a path leaves the page or skips a section.

    Each with its path, its title ("": the whole page), the numbers of the exercises that the path
    has there, and the next segment with its section's title, or None at the path's end.
    """
    for path in learning_paths.values():
        stops = [
            (segment, title, adjacent)
            for _, segment in path.segments
            for (_, title), adjacent in zip(
                segment.sections or [("", "")], segment.following or [""], strict=True
            )
        ]
        for (segment, title, adjacent), after in zip(stops, [*stops[1:], None], strict=True):
            leaves = after is None or after[0] is not segment
            if segment.docname == docname and (leaves or after[1] != adjacent):
                exercises = [str(number) for number in segment.exercises] if leaves else []
                yield path, title, exercises, after[:2] if after else None
