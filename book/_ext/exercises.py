"""Exercises: numbered page by page, as in the notebooks, and each says where to answer it.

sphinx-exercise has Sphinx number them through the whole book, as it numbers figures. Titles and
references take their numbers from the same table, so to write it anew before pages are written is
enough. From build to build Sphinx compares that table with the one before, to see which pages to
write again: it gets back the one that it made.
"""

from __future__ import annotations

from docutils import nodes
from lesson_page import DOWNLOADS, EXERCISES
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx_exercise.nodes import exercise_enumerable_node

_KIND = "exercise"
_WHERE = (
    '<p class="exercise-where">Answer it in <code>lab/{topic}.ipynb</code>, which '
    '<code>make lab</code> opens, or in <a href="{up}{file}" download>the notebook of these '
    "exercises</a>.</p>\n"
)


def as_sphinx_numbered(app: Sphinx, env: BuildEnvironment) -> list[str]:
    """Give back the numbers that Sphinx made in the build before."""
    for docname, numbers in getattr(env, "exercises_through", {}).items():
        if docname in env.toc_fignumbers:
            env.toc_fignumbers[docname][_KIND] = numbers
    return []


def by_page(app: Sphinx, env: BuildEnvironment) -> list[str]:
    """Number the exercises of each page from 1."""
    found = {name: kinds[_KIND] for name, kinds in env.toc_fignumbers.items() if _KIND in kinds}
    env.exercises_through = found
    for docname, numbers in found.items():
        order = sorted(numbers, key=numbers.__getitem__)
        env.toc_fignumbers[docname][_KIND] = {label: (n,) for n, label in enumerate(order, 1)}
    return []


def say_where(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """End each exercise of a lesson with a line that leads to where it is answered."""
    topic = docname.removeprefix("lessons/")
    for exercise in doctree.findall(exercise_enumerable_node):
        if topic != docname:
            up = f"{'../' * docname.count('/')}{DOWNLOADS}/"
            words = _WHERE.format(topic=topic, up=up, file=f"{topic}{EXERCISES}")
            exercise[-1] += nodes.raw("", words, format="html")


def setup(app: Sphinx) -> None:
    """Connect the extension."""
    app.connect("env-get-updated", as_sphinx_numbered, priority=400)  # Sphinx's own have 500
    app.connect("env-get-updated", by_page, priority=600)
    app.connect("doctree-resolved", say_where)
    # sphinx_exercise names singlehtml, and Sphinx would then take no other extension's visitors.
    app.registry.translation_handlers["singlehtml"] = app.registry.translation_handlers["html"]
