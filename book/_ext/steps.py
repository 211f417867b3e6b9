"""Pictures in steps: an ordered list of pictures, each with a sentence.

    :::{step-through} What the steps show
    1. ![What this picture shows](../figures/steps/topic_1.svg)

       What happens here, and why.

    2. ...
    :::

In Jupyter, on a code host, without a script and in print this is what it looks like: all steps, one
below the other. In the site a little script, static/steps.js, shows one step at a time, with
buttons. Script and style are loaded by pages with steps and by no others.
"""

from __future__ import annotations

from html import escape
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class Steps(nodes.General, nodes.Element):
    """Holds the list; `title` says what all of its steps together show."""


class StepsDirective(SphinxDirective):
    """A title, and in it nothing but an ordered list whose items begin with a picture."""

    required_arguments = 1
    final_argument_whitespace = True
    has_content = True

    def run(self) -> list[nodes.Node]:
        """Parse the list; complain about anything else, with the page and the line."""
        box = Steps(title=self.arguments[0])
        self.state.nested_parse(self.content, self.content_offset, box)
        self.set_source_info(box)
        if len(box.children) != 1 or not isinstance(box[0], nodes.enumerated_list):
            found = ", ".join(child.tagname for child in box.children) or "nothing"
            raise self.error(f"step-through: allowed is one ordered list, and here is {found}")
        if len(box[0].children) < 2:
            raise self.error("step-through: one step is a picture; allowed are two or more")
        for number, item in enumerate(box[0].children, 1):
            first = item[0] if item.children else None
            picture = first[0] if isinstance(first, nodes.paragraph) and first.children else None
            if not isinstance(picture, nodes.image) or not picture.get("alt", "").strip():
                raise self.error(
                    f"step-through: step {number} does not begin with ![what it shows](…)"
                )
            if not any(text.strip() for text in item.findall(nodes.Text)):  # alt texts are none
                raise self.error(f"step-through: step {number} has a picture and no sentence")
        return [box]


def open_steps(translator: Any, node: Steps) -> None:
    """Begin the group: its title is read out, and shown."""
    title = escape(node["title"])
    translator.body.append(
        f'<div class="steps" role="group" aria-label="{title}, in steps">\n'
        f'<p class="steps-title">{title}</p>\n'
    )


def close_steps(translator: Any, node: Steps) -> None:
    """End the group."""
    translator.body.append("</div>\n")


def skip(translator: Any, node: nodes.Element) -> None:
    """Let what is in the node stand as it is."""


ELSEWHERE = {name: (skip, skip) for name in ("latex", "text", "man", "texinfo")}  # than in HTML


def load(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Let a page that has steps load their script and style."""
    if '<div class="steps"' in context.get("body", ""):
        app.add_js_file("steps.js", loading_method="defer")
        app.add_css_file("steps.css")


def setup(app: Sphinx) -> None:
    """Connect the extension."""
    app.add_node(Steps, html=(open_steps, close_steps), **ELSEWHERE)
    app.add_directive("step-through", StepsDirective)
    app.connect("html-page-context", load)
