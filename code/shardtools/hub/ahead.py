"""Modules that predict further tokens in training, which transformers' classes leave out.

As DeepSeek-V3 has them (arXiv 2412.19437, section 2.2): a matrix makes one stream of a token's and
of the next one's embedding, each behind a norm, then comes a layer as the last one, and a norm
before the head, which all share: a layer + 2h h + 3h. They stand on the last stage, as
Megatron-LM's `--mtp-num-layers` puts them, with the head and with an embedding of its own where the
first stage is another one; tensor ranks cut the matrix by its outputs. Files say how many there
are, and not how they look; other families' may differ in their norms. The standard library alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardlab.common.arguments import check_whole
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
    h, last = found.hidden, found.kinds[found.order[-1]]
    cut = {"tp": 0, "along": "hidden", "units": h}
    entries = (
        *(Entry(f"{name}.weight", (h,), "norms", partly=True) for name in ("enorm", "hnorm")),
        Entry("eh_proj.weight", (h, 2 * h), "ffn", **cut),
        *last.entries,
        Entry("norm.weight", (h,), "norms", partly=True),
    )
    # Kept: what three norms take, what the matrix takes, and what the head does.
    kind = replace(last, name=f"{last.name}, ahead", entries=entries, stream=last.stream + 6 * h)
    words = (
        f"{number} of {key}={most}: each a layer as the last, 2h h + 3h more, and the head again"
    )
    kept = tuple(text for text in found.assumed if not text.startswith(key))
    return replace(
        found,
        kinds=(*found.kinds, kind),
        order=found.order + (len(found.kinds),) * number,
        assumed=(*kept, words),
        ahead=number,
    )
