"""Modules that predict further tokens in training, which transformers' classes leave out.

As DeepSeek-V3 has them (arXiv 2412.19437, section 2.2): a matrix makes one stream of a token's and
of the next one's embedding, each behind a norm, then comes a layer as the last one, and a norm
before the head, which all share: a layer + 2h h + 3h. Files say how many there are, and not how
they look; other families' may differ in their norms. The standard library alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardlab.arguments import check_whole
from shardlab.layout.entries import Entry
from shardlab.layout.structure import Structure

KEYS = "num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers"


def said(given: Mapping[str, Any]) -> tuple[str, int]:
    """What the file calls them, and how many it has; "", 0: none."""
    inner = [value for value in given.values() if isinstance(value, dict)]
    for part in (given, *inner):
        for key in KEYS:
            if isinstance(many := part.get(key), int) and many > 0:
                return key, many
    return "", 0


def with_modules(found: Structure, given: Mapping[str, Any], number: int) -> Structure:
    """With so many of those that the file names. Raises ValueError for more."""
    key, most = said(given)
    check_whole(0, most, mtp=number)
    if not number:
        return found
    h = found.hidden
    more = [
        entry
        for n in range(number)
        for entry in (
            Entry(f"mtp.{n}.enorm.weight", (h,), "norms", partly=True),
            Entry(f"mtp.{n}.hnorm.weight", (h,), "norms", partly=True),
            Entry(f"mtp.{n}.eh_proj.weight", (h, 2 * h), "ffn"),
            Entry(f"mtp.{n}.norm.weight", (h,), "norms", partly=True),
        )
    ]
    words = (
        f"{number} of {key}={most}: each a layer as the last, 2h h + 3h more, and the head again"
    )
    kept = tuple(text for text in found.assumed if not text.startswith(key))
    return replace(
        found,
        order=found.order + (found.order[-1],) * number,
        outside=(*found.outside[:-1], *more, found.outside[-1]),
        assumed=(*kept, words),
    )
