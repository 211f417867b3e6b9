"""What several extensions look for in finished HTML."""

from __future__ import annotations

import re
from html import unescape

ARTICLE = re.compile(r"<article[^>]*>(.*)</article>", re.DOTALL)
ROW = re.compile(r"<tr\b.*?</tr>", re.DOTALL)
CELL = re.compile(r"<(t[hd])\b([^>]*)>(.*?)</\1>", re.DOTALL)  # tag, attributes, content
FONT = re.compile(r'\bfont(?:-size)?(?:: ?|=")[^;"]*?([\d.]+)px')  # the size of a drawing's text


def plain(html: str) -> str:
    """The text of a piece of HTML."""
    return unescape(re.sub(r"<[^>]*>", "", html))
