"""Additions to a lesson's page: the line under its title, stops of paths, next pages, origin of its
outputs, downloads; the table of all executions; and numbers of exercises.

The lines under the title and at the end are added to the finished page, not to the document: in the
document they would show in the search index and in previews.

Exercises are numbered page by page, as in the notebooks. sphinx-exercise has Sphinx number them
through the whole book, as it numbers figures. Titles and references take their numbers from the
same table, so it is enough to rewrite that table before pages are written. From build to build
Sphinx compares the table with the previous one, to see which pages to write again: for this
comparison Sphinx gets back its own numbers.
"""

from __future__ import annotations

import re
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import nbformat
from bs4 import BeautifulSoup
from docutils import nodes
from lesson_outputs import EXECUTIONS_PAGE, copy_outputs, shorten_reasons
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxDirective
from sphinx_exercise.nodes import exercise_enumerable_node

from shardcourse import build
from shardcourse.build import index, pairs, paths
from shardcourse.build.exercises import make_exercise_notebook
from shardcourse.build.notebook_export import export_notebook

DOWNLOADS_FOLDER = "downloads"
SLIDES_FOLDER = "slides"
EXERCISES_SUFFIX = "_exercises.ipynb"
_SUFFIXES = (  # suffix of a file; text of the link; description of the file
    (".md", ".md", "the lesson's source, to read and edit in Jupyter"),
    (".ipynb", ".ipynb", "the notebook with its outputs"),
    (".py", ".py", "a plain script"),
    (EXERCISES_SUFFIX, "exercises", "a notebook of the exercises, with checks, without solutions"),
)
_EXERCISE_TYPE = "exercise"  # type of the exercises in Sphinx's table of numbers
OUTPUTS_ANCHOR = "outputs-and-downloads"
# Hidden, since the switch does nothing without reading.js: that script shows it.
FOLD_SWITCH = (
    ' <span class="open-folds" hidden><button type="button" aria-pressed="false">'
    "Open all folded code</button></span>"
)


def describe_device(about: dict[str, Any]) -> str:
    """Return the device: "1 × NVIDIA H200 (driver 570.1)", "the CPU (2 cores)"."""
    device = about["device"]
    if device["kind"] == "cpu":
        return f"the CPU ({device['cores']} core{'s' if device['cores'] != 1 else ''})"
    details = [f"driver {device['driver']}"] if device.get("driver") else []
    details += [f"{k.upper()} {device[k]}" for k in ("cuda", "hip") if device.get(k)]
    return f"{device['count']} × {device['name']}" + (f" ({', '.join(details)})" if details else "")


def describe_ranks(about: dict[str, Any]) -> str:
    """Return the most ranks on each device: "up to 4 ranks on the GPU (gloo)"; "" if none ran."""
    most: dict[tuple[str, str], int] = {}
    for entry in about.get("ranks", []):
        place = ("nccl" if "nccl" in entry["backend"] else entry["backend"], entry["device"])
        most[place] = max(most.get(place, 0), entry["ranks"])
    return ", ".join(
        f"up to {count} rank{'s' if count != 1 else ''} on the "
        f"{'GPU' if device == 'cuda' else 'CPU'} ({backend})"
        for (backend, device), count in sorted(most.items())
    )


def describe_versions(about: dict[str, Any], *names: str) -> str:
    """Return the versions that ran: "torch 2.13.0, Python 3.11.7"."""
    known = {"torch": "torch", "python": "Python", "deepspeed": "DeepSpeed", "shardlab": "shardlab"}
    found = {name: about["versions"].get(name) for name in names or known}
    return ", ".join(f"{known[n]} {v.partition('+')[0]}" for n, v in found.items() if v)


def describe_origin(state: dict[str, Any]) -> str:
    """Return the line for readers on the origin of a lesson's outputs."""
    about = state["about"]
    how = "Recorded on" if state["how"] == "recorded" else "Executed by this build on"
    parts = [f"{how} {describe_device(about)}", describe_ranks(about)]
    parts += [describe_versions(about, "torch", "python"), about["date"]]
    parts += [f"{about['seconds']:.0f} s"]
    text = ", ".join(part for part in parts if part) + "."
    if state["stale"]:
        text += f" A recording is out of date: {shorten_reasons(state['stale'])}."
    return text


def render_origin(app: Sphinx, docname: str, body: BeautifulSoup, context: dict[str, Any]) -> str:
    """Return the paragraph on a lesson's outputs and its downloads, for the page's end."""
    state = app.env.lesson_outputs[docname]
    topic, to = docname.removeprefix("lessons/"), context["pathto"]
    downloads = " ".join(
        f'<a href="{to(f"{DOWNLOADS_FOLDER}/{topic}{suffix}", 1)}" download title="{escape(what)}">'
        f"{says}</a>"
        for suffix, says, what in _SUFFIXES
        if suffix != EXERCISES_SUFFIX or body.find(class_="exercise")
    )
    slides = (
        f'<a href="{to(f"{SLIDES_FOLDER}/{topic}.html", 1)}" title="for a hall; the key S '
        "opens the lecturer's notes\">Slides</a>"
    )
    text = f'{escape(describe_origin(state))} <a href="{to(EXECUTIONS_PAGE)}">'
    text += "How each page was executed</a>."
    return (
        f'<p class="lesson-outputs" id="{OUTPUTS_ANCHOR}" data-how="{state["how"]}">{text}'
        f'<span class="lesson-downloads">Download: {downloads}. {slides}</span></p>'
    )


def read_course_index(app: Sphinx) -> None:
    """Read the course's index into `app.course`."""
    app.course = index.read_index(Path(app.srcdir))


def render_head(app: Sphinx, docname: str, body: BeautifulSoup | None = None) -> str:
    """Return a lesson's line below its title: minutes, prerequisites, the switch for folded code
    and a link to the downloads; "" for other pages.
    """
    topics = app.course.topics
    topic = topics.get(docname.removeprefix("lessons/"))
    if not topic:
        return ""

    def make_link(name: str) -> str:
        address = app.builder.get_relative_uri(docname, f"lessons/{name}")
        return f'<a href="{address}">{escape(topics[name].title)}</a>'

    page = app.course.pages[topic.topic]
    first, whole = round(page.first_reading_minutes), page.read_minutes
    time = f"{first} minutes to read"
    if app.course.learning_paths:
        address = app.builder.get_relative_uri(docname, "book/paths")
        time = f'<a href="{address}#how-minutes-are-made">{time}</a>'
    time += f" ({whole} with what can wait)" if whole > first else ""
    time += f", {topic.exercises} for the exercises" if topic.exercises else ""
    head = f"{time}. {index.format_prerequisites(topic, make_link)}"
    if docname in app.env.lesson_outputs:
        head += f' <a href="#{OUTPUTS_ANCHOR}">Notebook, script, slides</a>.'
    if body and body.find(class_="tag_hide-input"):
        head += FOLD_SWITCH
    return f'<p class="lesson-head">{head}</p>'


def render_skip_notes(app: Sphinx, docname: str) -> dict[str, str]:
    """Return the note for each section that a first reading can skip, by the section's id."""
    lines = {}
    page = app.course.pages.get(docname.removeprefix("lessons/"))
    for name in page.later if page else ():
        hint = ""
        if to := page.find_next_section(name):
            title = escape(to.title.replace("`", ""))
            hint = f': go on with <a href="#{nodes.make_id(to.title)}">{title}</a>'
        anchor = nodes.make_id(page.find_section_tree(name)[0].title)
        lines[anchor] = f'<p class="can-wait">This section can wait for a second reading{hint}.</p>'
    return lines


def render_next_pages(app: Sphinx, docname: str) -> str:
    """Return the next page on each path and the lessons that need this one, for the page's end."""

    def make_link(to: str, words: str, section: str = "") -> str:
        place = f"#{nodes.make_id(section)}" if section else ""
        address = app.builder.get_relative_uri(docname, to)
        return f'<a href="{address}{place}">{escape(words)}</a>'

    items = []
    for path, session, part in paths.list_next_segments(app.course.learning_paths, docname):
        link = f"On {make_link(path.docname, path.title)}"
        link += f", {session.name}" if session.name else ""
        to = "this was the last"
        if part:
            to = make_link(part.docname, part.title, part.sections[0][1] if part.sections else "")
        items.append(f"<li>{link}: {to}</li>")
    name = docname.removeprefix("lessons/")
    needed = [topic for topic in app.course.topics.values() if name in topic.needs]
    if needed:
        links = ", ".join(make_link(f"lessons/{topic.topic}", topic.title) for topic in needed)
        items.append(f"<li>Lessons that need this one: {links}</li>")
    if not items:
        return ""
    return (
        '<nav class="lesson-next" aria-label="Where to go next"><p>Where to go next</p>'
        f"<ul>{''.join(items)}</ul></nav>"
    )


def render_path_stops(app: Sphinx, docname: str) -> dict[str, str]:
    """Return the note for each section where a path leaves the page or skips a section, by the
    section's id; by the last exercise's number where a path reads the whole page.
    """
    followers: dict[str, dict[str, list[str]]] = {}  # place -> what is next -> paths
    for path, title, exercises, after in paths.list_exits(app.course.learning_paths, docname):
        if not title and not exercises:
            continue
        place = nodes.make_id(title) if title else exercises[-1]
        goals = []
        if title and exercises:
            goals.append(f"exercise{'s' * (len(exercises) > 1)} {index.join_words(exercises)}")
        if after:
            address = app.builder.get_relative_uri(docname, after[0].docname)
            address += f"#{nodes.make_id(after[1])}" * bool(after[1])
            here = after[0].docname == docname
            words = after[1] if here else ": ".join(filter(None, [after[0].title, after[1]]))
            goals.append(f'<a href="{address}">{escape(words.replace("`", ""))}</a>')
        goal = f", next: {', then '.join(goals)}" if goals else ": this was the last"
        titles = followers.setdefault(place, {}).setdefault(goal, [])
        titles.append(f"<em>{escape(path.title)}</em>")

    def render_line(goal: str, titles: list[str]) -> str:
        noun = "path" if len(titles) == 1 else "paths"
        return f"On the {noun} {index.join_words(titles)}: stop here{goal}."

    return {
        place: f'<p class="path-stop">{"<br>".join(render_line(*one) for one in goals.items())}</p>'
        for place, goals in followers.items()
    }


def list_segments(app: Sphinx, docname: str) -> list[tuple[str, paths.Segment]]:
    """Return the paths that read a page, each with the segment that it reads of the page."""
    every = [
        (path, part) for path in app.course.learning_paths.values() for _, part in path.segments
    ]
    return [(path.path, part) for path, part in every if part.docname == docname]


def find_changed_pages(app: Sphinx) -> list[str]:
    """Return the pages whose additions have changed since the last build."""
    docnames = app.env.found_docs
    now = {}
    for name in docnames:
        texts = [render_head(app, name), *render_skip_notes(app, name).values()]
        texts += [*render_path_stops(app, name).values(), render_next_pages(app, name)]
        texts += [repr(list_segments(app, name))]
        now[name] = "".join(texts)
    before, app.env.around_pages = getattr(app.env, "around_pages", {}), now
    return [docname for docname in docnames if before.get(docname, now[docname]) != now[docname]]


def add_page_notes(app: Sphinx, docname: str, body: BeautifulSoup, context: dict) -> None:
    """Add the line under a lesson's title, the next pages and the outputs at its end, and notes
    to the sections that a first reading can skip and to those where a path leaves the page.
    """

    parse_html = partial(BeautifulSoup, features="html.parser")
    for section, note in render_skip_notes(app, docname).items():
        body.find("section", id=section).find(["h2", "h3"]).insert_after(parse_html(note))
    for place, note in render_path_stops(app, docname).items():
        if place.isdigit():
            body.select(".solution")[int(place) - 1].insert_after(parse_html(note))
        else:
            body.find("section", id=place).append(parse_html(note))
    for link in body.select(".lesson-map li a"):
        link["title"] = app.course.topics[Path(link["href"]).stem].able
    if body.h1 and (head := render_head(app, docname, body)):
        body.h1.insert_after(parse_html(head))
    body.append(parse_html(render_next_pages(app, docname)))
    if docname in app.env.lesson_outputs:
        body.append(parse_html(render_origin(app, docname, body, context)))
        # sphinx-exercise gives the same id to the content of every exercise of a page.
        for one in body.select("#exercise-content, #solution-content"):
            del one["id"]


def skip_extra_pages(app: Sphinx, pagename: str, context: dict[str, Any]) -> None:
    """Let "next" skip the further pages of a part with a single lesson, to the next part."""
    site = getattr(app.config, "external_site_map", None)
    trees = [list(tree.files()) for tree in site.root.subtrees] if site else []
    order = [name for names in trees for name in names]
    lone = [names for names in trees if sum(name.startswith("lessons/") for name in names) == 1]
    beside = {name for names in lone for name in names if not name.startswith("lessons/")}
    kept = [name for name in order if name not in beside]
    if not beside or pagename not in kept:
        return
    for word, step in (("next", 1), ("prev", -1)):
        there, to = order.index(pagename) + step, kept.index(pagename) + step
        if 0 <= there < len(order) and order[there] in beside and 0 <= to < len(kept):
            title = app.builder.render_partial(app.env.titles[kept[to]])["title"]
            link = app.builder.get_relative_uri(pagename, kept[to])
            context[word] = {"link": link, "title": title}


class Executions(SphinxDirective):
    """Table of all lessons: how, where, when and in what time each was executed."""

    def run(self) -> list[nodes.Node]:
        """Return a placeholder: the table is known once all pages have been read."""
        return [nodes.raw("", '<div class="executions"></div>', format="html")]


TABLE_HEAD = ("Page", "Outputs", "Where", "With", "Ranks", "Date", "Seconds")


def fill_table(app: Sphinx, docname: str, body: BeautifulSoup) -> None:
    """Replace the placeholder by the table."""
    for mark in body.select("div.executions"):
        states = app.env.page_outputs
        listed = getattr(app.config, "external_site_map", None) or states  # in the book's order
        order = [name for name in listed if name in states]
        head = "".join(f"<th>{word}</th>" for word in TABLE_HEAD)
        rows = ""
        for name in order:
            link = f'<a href="{app.builder.get_relative_uri(docname, name)}">'
            cells = [f"{link}{escape(app.env.titles[name].astext())}</a>"]
            cells += map(escape, _format_row(states[name]))
            rows += f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>\n"
        table = f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody>"
        table = f'<table class="executions table">\n{table}</table>'
        box = f'<div class="pst-scrollable-table-container">{table}</div>'
        mark.replace_with(BeautifulSoup(box, "html.parser"))


def _format_row(state: dict[str, Any]) -> list[str]:
    about, how = state["about"], state["how"]
    if how == "executed":
        how += " by this build"
    if state["stale"]:
        how += f"; a recording is out of date: {'; '.join(state['stale'])}"
    parts = [how, describe_device(about), describe_versions(about), describe_ranks(about)]
    return [*parts, about["date"], f"{about['seconds']:.0f}"]


def write_downloads(app: Sphinx, docname: str) -> None:
    """Write a lesson as .md, .ipynb (with the page's outputs) and .py, and its exercises."""
    root, folder = Path(app.srcdir), Path(app.outdir) / DOWNLOADS_FOLDER
    topic = docname.removeprefix("lessons/")
    book = copy_outputs(build.load_notebook(topic, root), app.lesson_books[docname])
    exercises = make_exercise_notebook(topic, root)
    book = export_notebook(topic, root, book, needs=index.link_prerequisites(topic, root))
    wanted = {
        ".md": (root / f"{docname}.md").read_text("utf-8"),
        ".ipynb": nbformat.writes(book),
        ".py": pairs.make_script(topic, root, alone=True),
        EXERCISES_SUFFIX: nbformat.writes(exercises) if exercises else "",
    }
    folder.mkdir(exist_ok=True)
    for suffix, text in wanted.items():
        (folder / f"{topic}{suffix}").unlink(missing_ok=True)
        if text:
            (folder / f"{topic}{suffix}").write_text(text.rstrip("\n") + "\n", "utf-8")


# --- Exercises ------------------------------------------------------------------------------------

_ANSWER_HINT = (
    '<p class="exercise-where">Answer the exercises in <code>lab/{topic}.ipynb</code>, which '
    '<code>make lab</code> opens, or in <a href="{up}{file}" download>the notebook of these '
    "exercises</a>: a check judges each answer.</p>\n"
)


def restore_sphinx_numbers(app: Sphinx, env: BuildEnvironment) -> list[str]:
    """Restore the exercise numbers that Sphinx made in the previous build."""
    for docname, numbers in getattr(env, "exercises_through", {}).items():
        if docname in env.toc_fignumbers:
            env.toc_fignumbers[docname][_EXERCISE_TYPE] = numbers
    return []


def number_by_page(app: Sphinx, env: BuildEnvironment) -> list[str]:
    """Renumber the exercises of each page from 1."""
    tables = env.toc_fignumbers.items()
    found = {name: table[_EXERCISE_TYPE] for name, table in tables if _EXERCISE_TYPE in table}
    env.exercises_through = found
    for docname, numbers in found.items():
        order = enumerate(sorted(numbers, key=numbers.__getitem__), 1)
        env.toc_fignumbers[docname][_EXERCISE_TYPE] = {label: (n,) for n, label in order}
    return []


def add_answer_hint(doctree: nodes.document, docname: str) -> None:
    """Say before the first exercise of a lesson where to answer all of them."""
    topic = docname.removeprefix("lessons/")
    exercise = next(iter(doctree.findall(exercise_enumerable_node)), None)
    if topic != docname and exercise:
        up = f"{'../' * docname.count('/')}{DOWNLOADS_FOLDER}/"
        words = _ANSWER_HINT.format(topic=topic, up=up, file=f"{topic}{EXERCISES_SUFFIX}")
        exercise.parent.insert(exercise.parent.index(exercise), nodes.raw("", words, format="html"))


def format_exercise_titles(body: BeautifulSoup) -> None:
    """Write "Exercise 1: Bytes (easy)" where sphinx-exercise writes "Exercise 1 (Bytes (easy))"."""
    for title in body.select(".exercise > .admonition-title, .solution > .admonition-title"):
        for number in title.select(".caption-number"):
            number.string = number.get_text().rstrip()
        for link in title.select("a"):  # a solution's title
            link.insert_before(" ")
            link.contents[0].replace_with(link.contents[0].lstrip())
        opening = next(text for text in title.find_all(string=True) if "(" in text)
        opening.replace_with(re.sub(r"\s*\(", ": ", opening, count=1))
        last = title.find_all(string=True)[-1]
        last.replace_with(last.rstrip().removesuffix(")"))


_VALUE = re.compile(  # places in a table's cell where no line may end
    r"(?<=\d) (?=(?:[kKMGTP]?i?B|[kMGT]?bit|h|min|m?s|µs|days?|years?)(?:/s)?\b|%)"
    r"|(?<=\d h) (?=\d)|(?<=\d:\d\d) (?=to \d)|(?<=\d:\d\d to) (?=\d)"
)


def keep_values_whole(body: BeautifulSoup) -> None:
    """Put no-break spaces into the values of tables: "14 h 46 min", "9:15 to 10:30", "40 %"."""
    for text in [text for cell in body.select("td, th") for text in cell.find_all(string=_VALUE)]:
        text.replace_with(_VALUE.sub("\N{NO-BREAK SPACE}", text))
