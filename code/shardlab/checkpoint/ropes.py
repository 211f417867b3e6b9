"""How a file on Hugging Face's hub says that positions are stretched.

Of the ways in transformers 5.23 (modeling_rope_utils.py), YaRN is what the course's GPT computes;
defaults are the same as there. The standard library alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from typing import Any

from shardlab.common.arguments import SIZES, check_number, check_whole
from shardlab.common.shapes import Yarn

TYPES = "default", "yarn"


def written(yarn: Yarn | None) -> dict[str, Any]:
    """What stands in a file's rope_parameters, beside the base."""
    if yarn is None:
        return {"rope_type": "default"}
    found = {
        "rope_type": "yarn",
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.seq,
        "beta_fast": yarn.fast,
        "beta_slow": yarn.slow,
        "attention_factor": yarn.turned,
    }
    return found | ({"mscale_all_dim": yarn.sharper} if yarn.sharper else {})


def read(scaled: Mapping[str, Any], given: Mapping[str, Any], latent: bool) -> Yarn:
    """What a file says of positions that are stretched; ValueError for another way to do it."""
    if not scaled.get("truncate", True):
        raise ValueError(f"truncate={scaled['truncate']!r}: allowed is True")
    before = scaled.get("original_max_position_embeddings")
    check_whole(1, SIZES, original_max_position_embeddings=before)
    factor = scaled.get("factor")
    if factor is None and isinstance(longest := given.get("max_position_embeddings"), int):
        factor = longest / before
    numbers = {name: scaled.get(name) for name in ("mscale", "mscale_all_dim", "attention_factor")}
    check_number(1, factor=factor)
    check_number(0, **{name: value for name, value in numbers.items() if value is not None})
    one, every, turned = (value or 0.0 for value in numbers.values())
    if numbers["attention_factor"] is None:
        whole = 0.1 * log(factor) + 1
        turned = (one * (whole - 1) + 1) / (every * (whole - 1) + 1) if one and every else whole
    fast, slow = (scaled.get(f"beta_{name}") or more for name, more in (("fast", 32), ("slow", 1)))
    return Yarn(factor, before, fast, slow, turned, every if latent else 0.0)
