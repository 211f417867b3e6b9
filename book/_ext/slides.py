"""Slides of each lesson, made of its finished page when a build ends: slides/<topic>.html.

    python book/_ext/slides.py _build/html      # the same, for the site that lies there

What becomes a slide is a matter of `deck`. A deck is a page of reveal.js, which comes from the
Python package sphinx-revealjs; its files lie in the site, so decks need no network.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Iterable
from html import escape
from importlib import metadata
from pathlib import Path

import deck
from deck_page import Page
from finished import when_site_is_built
from lesson_page import SLIDES
from markup import plain
from sphinx.application import Sphinx
from sphinx.util import logging

from shardcourse import exercises
from shardcourse.build import index, pace, paths
from shardlab.common import show

REVEAL = "_static/reveal"
_FILES = ("dist/reset.css", "dist/reveal.css", "dist/reveal.js", "plugin/notes/notes.js", "LICENSE")

PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}: slides</title>
<meta name="description" content="Slides of the lesson {title}, with notes for lecturers.">
{head}
</head>
<body>
<main class="reveal"><div class="slides">
{slides}
</div></main>
{scripts}
</body>
</html>
"""

logger = logging.getLogger(__name__)


def reveal(site: Path) -> None:
    """Copy the part of reveal.js that decks load."""
    package = metadata.distribution("sphinx-revealjs")
    source = Path(str(package.locate_file("sphinx_revealjs/_static/revealjs")))
    (site / REVEAL).mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        shutil.copy2(source / name, site / REVEAL / Path(name).name)


def said(exercise: str) -> list[str]:
    """What the check of an exercise says of the mistakes that it knows."""
    return exercises.mistakes(exercise) if exercise in exercises.names() else []


def mark(slides: list[deck.Slide], steps: Iterable[tuple[str, paths.Piece]]) -> None:
    """Note on each slide the paths that come to it.

    steps: names of paths, each with a piece of the lesson that it reads: all of it, or sections.
    """
    for way, piece in steps:
        read = {pace.anchor(title) for _, title in piece.sections}
        for slide in slides:
            of = {pace.anchor(plain(slide.title)), pace.anchor(plain(slide.kicker))}
            here = slide.kind == "title" or slide.exercise in piece.exercises or of & read
            if (here or not read) and way not in slide.ways:
                slide.ways.append(way)


def document(slides: list[deck.Slide], lesson: str, up: str) -> str:
    """The deck as a page. lesson: the address of the lesson's page; up: that of the site."""
    styles = ["reveal/reset.css", "reveal/reveal.css", "pygments.css", "slides.css"]
    scripts = ["reveal/reveal.js", "reveal/notes.js", "slides.js"]
    body = "\n".join(slide.html(lesson) for slide in slides)
    if "\\(" in body or "\\[" in body:
        scripts.insert(0, "maths.js")
    links = [f'<link rel="stylesheet" href="{up}_static/{name}">' for name in styles]
    return PAGE.format(
        title=escape(plain(slides[0].title)),
        head="\n".join([f'<link rel="icon" href="{up}_static/favicon.svg">', *links]),
        slides=body,
        scripts="\n".join(f'<script defer src="{up}_static/{name}"></script>' for name in scripts),
    )


def write(
    site: Path, topics: list[str], ways: Collection[paths.Way], again: bool = False
) -> dict[str, list[deck.Slide]]:
    """Write the decks of `topics` whose page changed, or all; the slides of those written."""
    planned = (show.ROOT / paths.PATHS).stat().st_mtime_ns
    folder = site / SLIDES
    folder.mkdir(exist_ok=True)
    for path in folder.glob("*.html"):
        if path.stem not in topics:
            path.unlink()  # of a lesson that is no more
    reveal(site)
    written = {}
    for topic in topics:
        page, path = site / f"lessons/{topic}.html", folder / f"{topic}.html"
        changed = max(planned, page.stat().st_mtime_ns)
        if not again and path.exists() and path.stat().st_mtime_ns > changed:
            continue
        written[topic] = deck.deck(Page(page.read_text("utf-8")), said)
        steps = ((way.path, piece) for way in ways for _, piece in way.pieces)
        mark(written[topic], (step for step in steps if step[1].page == topic))
        path.write_text(document(written[topic], f"../lessons/{topic}.html", "../"), "utf-8")
    return written


def make(app: Sphinx) -> None:
    """Write the decks of the lessons, when their pages are finished."""
    topics = [name.removeprefix("lessons/") for name in app.env.lesson_outputs]
    written = write(Path(app.outdir), topics, app.ways.values())
    logger.info("slides: %d decks", len(written))


def setup(app: Sphinx) -> None:
    """Connect the extension."""
    when_site_is_built(app, make, priority=930)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    lessons = sorted(path.stem for path in (place / "lessons").glob("*.html"))
    course = index.read(show.ROOT)
    ways = index.ways(course, show.ROOT, index.pages(course, show.ROOT)).values()
    for topic, slides in write(place, lessons, ways, again=True).items():
        minutes = sum(slide.seconds for slide in slides) / 60
        print(f"{place / SLIDES / topic}.html: {len(slides)} slides, {minutes:.0f} minutes")
