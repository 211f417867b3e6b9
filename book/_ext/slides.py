"""Slides of each lesson, made from its finished page: slides/<topic>.html.

`deck` selects the content of the slides. A deck is a page of reveal.js, whose files are in the
site (see `site_files`), so that decks need no network.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

import deck
from bs4 import BeautifulSoup
from lesson_page import SLIDES_FOLDER, list_segments
from site_files import hash_files
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

from shardcourse import exercises
from shardcourse.build import paths
from shardcourse.build.reading_time import make_anchor

PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}: slides</title>
<meta name="description" content="Slides of the lesson {title}, with notes for lecturers.">
<link rel="icon" href="{static}favicon.svg">
<link rel="stylesheet" href="{static}reveal/reset.css">
<link rel="stylesheet" href="{static}reveal/reveal.css">
<link rel="stylesheet" href="{static}pygments.css">
<link rel="stylesheet" href="{static}slides.css">
</head>
<body>
<main class="reveal"><div class="slides">
{slides}
</div></main>
<script defer src="{static}maths.js"></script>
<script defer src="{static}reveal/reveal.js"></script>
<script defer src="{static}reveal/notes.js"></script>
<script defer src="{static}slides.js"></script>
</body>
</html>
"""


def read_mistakes(app: Sphinx, env: BuildEnvironment) -> list[str]:
    """Read each exercise's well-known mistakes, if one has changed; name no page for writing."""
    sources = sorted(Path(app.srcdir, "code/shardcourse/exercises").glob("*.py"))
    if getattr(env, "mistakes_of", None) != (now := hash_files(sources)):
        names = exercises.list_names() if sources else []  # imports torch: takes seconds
        env.mistakes = {name: exercises.list_mistakes(name) for name in names}
        env.mistakes_of = now
    return []


def mark_paths(slides: list[deck.Slide], read: list[tuple[str, paths.Segment]]) -> None:
    """Note on each slide the paths that include it.

    read: (path's name, segment of the lesson that it reads) each: the whole lesson, or sections.
    """
    for path, segment in read:
        sections = {make_anchor(title) for _, title in segment.sections}
        for slide in slides:
            titles = map(deck.strip_tags, (slide.section.title, slide.section.above))
            shown = slide.kind == "title" or not sections or {*map(make_anchor, titles)} & sections
            if shown and path not in slide.paths:
                slide.paths.append(path)


def render_deck(slides: list[deck.Slide], lesson: str, up: str) -> str:
    """Return the deck as a page. lesson: address of the lesson's page; up: address of the site."""
    body = "\n".join(slide.render_html(lesson) for slide in slides)
    title = escape(deck.strip_tags(slides[0].section.title))
    return PAGE.format(title=title, static=f"{up}_static/", slides=body)


def write_slides(app: Sphinx, docname: str, body: BeautifulSoup) -> None:
    """Write the deck of a lesson whose page is finished; `body` is consumed."""
    slides = deck.make_slides(body, app.env.mistakes)
    mark_paths(slides, list_segments(app, docname))
    path = Path(app.outdir, SLIDES_FOLDER, f"{docname.removeprefix('lessons/')}.html")
    path.parent.mkdir(exist_ok=True)
    path.write_text(render_deck(slides, f"../{docname}.html", "../"), "utf-8")
