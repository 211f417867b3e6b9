"""The head of a page: a description, schema.org's LearningResource, and scripts that wait.

Nothing here is written twice: title and place come from the contents, what one is able to do from
topics.yml and the lesson's first list, minutes from the count that the page shows.
"""

from __future__ import annotations

import json
import re
from html import escape
from pathlib import Path
from typing import Any

import markup
from docutils import nodes
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


def first_words(doctree: nodes.document, limit: int) -> str:
    """Return the first words of a page's prose and lists, at most `limit` characters of them."""
    text = ""
    for paragraph in doctree.findall(nodes.paragraph):
        if isinstance(paragraph.parent, nodes.section | nodes.list_item):
            words = paragraph.findall(nodes.Text)
            prose = "".join(word for word in words if not isinstance(word.parent, nodes.raw))
            text = " ".join([*text.split(), *prose.split()])
        if len(text) > limit // 2:
            break
    return text if len(text) <= limit else text[: limit - 1].rpartition(" ")[0] + "…"


def describe(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Describe a page in its head, and have its scripts wait for the page."""
    for script in context.get("script_files", []):
        name = getattr(script, "filename", "")
        if name and "documentation_options" not in str(name):  # scripts in the page use that one
            script.attributes.setdefault("defer", "defer")
    title = markup.plain(str(context.get("title", "")))
    title = title or {"search": "Search", "genindex": "Index"}.get(pagename, pagename)
    words = first_words(doctree, max(60, 155 - len(title))) if doctree is not None else ""
    words = f"{title}. {words}" if words else f"{title}: a page of {app.config.project}."
    said = f'\n<meta name="description" content="{escape(words)}" />'
    context["metatags"] = context.get("metatags", "") + said
    path = Path(app.srcdir, f"{pagename}.md")
    if doctree is None or not path.exists():
        return
    known = app.course.topics if app.course else {}
    topic = known.get(pagename.removeprefix("lessons/")) if "lessons/" in pagename else None
    minutes = 0
    if topic is not None:
        minutes = app.lesson_pages[topic.topic].stated + topic.exercises
    said = resource(pagename, title, path.read_text("utf-8"), topic, minutes)
    if topic is not None and topic.needs:
        said["competencyRequired"] = [known[name].title for name in topic.needs]
    text = json.dumps(said, ensure_ascii=False).replace("</", "<\\/")
    script = f'\n<script type="application/ld+json">{text}</script>'
    context["metatags"] += script


def setup(app: Sphinx) -> None:
    """Connect the extension."""
    app.connect("html-page-context", describe)
