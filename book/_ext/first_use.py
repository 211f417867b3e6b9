"""Glossary links: the first use of each glossary term in a lesson becomes a link.

Authors write plain words. The first time that a lesson's prose contains a term of the glossary (in
singular or plural, in any case but that of an acronym's capitals), the term becomes a link. Terms
that are everyday words as well, EVERYDAY_TERMS, need an explicit `{term}`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from docutils import nodes
from sphinx.application import Sphinx

EVERYDAY_TERMS = {
    *("chunk", "flush", "hang", "head", "hook", "moments", "node", "overlap", "panel", "reduce"),
    *("ring", "root", "schedule", "stage", "tree", "unit", "wire"),
}
_NO_PROSE = (  # nodes whose text is not the lesson's prose, or is a link already
    nodes.title | nodes.reference | nodes.literal | nodes.literal_block | nodes.raw | nodes.math
)


def iter_prose(doctree: nodes.document) -> Iterator[nodes.Text]:
    """Yield the pieces of text in a page's paragraphs and lists."""
    for paragraph in doctree.findall(lambda n: isinstance(n, nodes.paragraph | nodes.term)):
        for text in paragraph.findall(nodes.Text):
            above = text.parent
            while above not in (paragraph, None) and not isinstance(above, _NO_PROSE):
                above = above.parent
            if above is paragraph:
                yield text


def link_first_uses(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Turn first uses on the lesson `docname` into links."""
    if not docname.startswith("lessons/"):
        return
    objects = app.env.get_domain("std").objects
    where = {name: at for (kind, name), at in objects.items() if kind == "term"}
    left = {name for name in where if name not in EVERYDAY_TERMS}
    if not left:
        return
    words = "|".join(sorted(map(re.escape, left), key=len, reverse=True))
    pattern = re.compile(rf"(?<![\w-])({words})(?:e?s)?(?![\w-])", re.IGNORECASE)
    for text in list(iter_prose(doctree)):
        pieces: list[nodes.Node] = []
        end = 0
        for found in pattern.finditer(text.astext()):
            name = found[1] if found[1] in where else found[1].lower()
            if name not in left:
                continue
            left.discard(name)
            page, label = where[name]
            uri = f"{app.builder.get_relative_uri(docname, page)}#{label}"
            pieces += [
                nodes.Text(text.astext()[end : found.start()]),
                nodes.reference("", found[0], refuri=uri, internal=True, classes=["first-use"]),
            ]
            end = found.end()
        if pieces:
            pieces.append(nodes.Text(text.astext()[end:]))
            text.parent.replace(text, pieces)
