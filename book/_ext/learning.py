"""What a page teaches, for catalogues that read pages: schema.org's LearningResource in its head.

Nothing here is written twice: title and place come from the contents, what one is able to do from
topics.yml and the lesson's first list, minutes from the count that the page shows.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import markup
from sphinx.application import Sphinx

from shardcourse.build import index

LICENSE = "https://creativecommons.org/licenses/by/4.0/"  # of text and figures: LICENSE-TEXT
_ABLE = re.compile(r"^After this lesson you can\n\n((?:- .+\n(?: +.+\n)*)+)", re.MULTILINE)


def plain(text: str) -> str:
    """Markdown without its marks, in one line."""
    text = re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", text)
    return re.sub(r"[`*$]", "", " ".join(text.split()))


def resource(
    docname: str, title: str, text: str, topic: index.Topic | None, minutes: int = 0
) -> dict[str, Any]:
    """The description of a page whose source is `text`; minutes: to read it and for exercises."""
    lesson = docname.startswith("lessons/")
    kind = "lesson" if lesson else "quiz" if "/questions_" in docname else "reading"
    said: dict[str, Any] = {
        "@context": "https://schema.org",
        "@type": "LearningResource",
        "name": title,
        "learningResourceType": kind,
        "inLanguage": "en",
        "isAccessibleForFree": True,
        "license": LICENSE,
        "educationalLevel": "graduate and professional; assumes PyTorch, not parallelism",
        "isPartOf": {"@type": "Course", "name": "One Model, Many GPUs"},
    }
    if topic is not None:
        said["description"] = f"After the lesson you can {topic.able}."
    if found := _ABLE.search(text):
        items = re.split(r"(?m)^- ", found[1])[1:]
        said["teaches"] = [plain(item).rstrip(";.").removesuffix("; and") for item in items]
    if minutes:
        said["timeRequired"] = f"PT{minutes}M"
    return {key: value for key, value in said.items() if value}


def describe(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Put the description into the head of a page of the contents."""
    path = Path(app.srcdir, f"{pagename}.md")
    if doctree is None or not path.exists():
        return
    known = app.course.topics if app.course else {}
    title = markup.plain(str(context.get("title", "")))
    topic = known.get(pagename.removeprefix("lessons/")) if "lessons/" in pagename else None
    minutes = 0
    if topic is not None:
        minutes = app.lesson_pages[topic.topic].stated + topic.exercises
    said = resource(pagename, title, path.read_text("utf-8"), topic, minutes)
    if topic is not None and topic.needs:
        said["competencyRequired"] = [known[name].title for name in topic.needs]
    text = json.dumps(said, ensure_ascii=False).replace("</", "<\\/")
    script = f'\n<script type="application/ld+json">{text}</script>'
    context["metatags"] = context.get("metatags", "") + script


def setup(app: Sphinx) -> None:
    """Connect the extension."""
    app.connect("html-page-context", describe)
