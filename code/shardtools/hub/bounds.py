"""What a config.json may ask for. It comes from a stranger: it is read, and never obeyed.

The standard library alone. What passes here may still be refused by the class that it names; what
does not pass is never built. -3 layers, a vocabulary of 10^12 and 10^6 layers all get past
transformers' own checks: two are built, and the last one takes the day.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from shardlab.common.arguments import LAYERS, RANKS, is_whole, told

BYTES = 10**6  # of a file; the longest of published ones has 32,000
DEPTH = 8  # of what nests in it
LISTS = LAYERS  # entries of a list, of which some have one for each layer
KEYS = 2000  # in all of its objects
TEXT = 10_000  # characters of one entry
SIZES = 10**7  # of a width, a vocabulary, a kernel
NUMBERS = 10**12  # anything else, a base of rotations for example

# Keys that would have code or kernels fetched, or say how numbers are stored. Not read.
DROPPED = (
    "auto_map", "quantization_config", "compression_config", "custom_pipelines",
    "_attn_implementation", "_attn_implementation_internal", "attn_implementation",
    "_experts_implementation", "_experts_implementation_internal", "experts_implementation",
    "_name_or_path", "name_or_path", "dtype", "torch_dtype", "use_kernels",
)  # fmt: skip
STORED = "quantization_config", "compression_config"  # of these, how weights lie in a file
# Keys by what they count, and the least and most of it.
_POSITIONS = re.compile(r"position|seq|context|_len|length|max_source|n_ctx|theta|base")
_ANY = re.compile(r"token_id|_id$|_ids$|index_|_index$|seed|version|year")
_NEEDED = re.compile(  # without one of these there is no model
    r"^(hidden_size|n_embd|d_model|dim|vocab_size|num_hidden_layers|n_layers?|num_layers"
    r"|num_attention_heads|n_heads?|num_key_value_heads)$"
)
_MANY = re.compile(r"layers|heads|experts|n_layer|n_head|top_?k|n_group|per_tok|groups$")
_WIDE = re.compile(r"size|dim|rank|width|hidden|channels|n_embd|n_inner|d_ff|kernel|window|chunk")


def read(text: str) -> tuple[dict[str, Any], str]:
    """What such a file says, without what is dropped; and how its weights are stored, or "".

    Raises ValueError for its first fault.
    """
    try:
        given = json.loads(text, parse_int=_whole, parse_constant=_constant)
    except RecursionError:
        raise ValueError("allowed are JSON files (it nests too deep)") from None
    except ValueError as error:
        raise ValueError(f"allowed are JSON files ({error})") from None
    if not isinstance(given, dict):
        raise ValueError("allowed are files with a JSON object")
    kind = given.get("model_type")
    if kind is None:
        raise ValueError("model_type is missing")
    if not isinstance(kind, str) or not re.fullmatch(r"[\w.-]{1,80}", kind):
        raise ValueError(f"model_type={told(kind)}: allowed is a name")
    _check(given, "", 0, [0])
    return _without(given), _stored(given)


def _stored(given: dict[str, Any]) -> str:
    """How a file says that its weights are stored: a key, and a name; or ""."""
    for part in (given, *(value for value in given.values() if isinstance(value, dict))):
        for key in STORED:
            if isinstance(how := part.get(key), dict):
                name = how.get("quant_method")
                plain = isinstance(name, str) and re.fullmatch(r"[\w.-]{1,30}", name)
                return f"{key} ({name})" if plain else key
    return ""


def _whole(text: str) -> int:
    if len(text) > len(str(NUMBERS)) + 1:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _constant(text: str) -> float:
    if text not in ("Infinity", "-Infinity"):  # which published files say for "no limit"
        raise ValueError(f"the number {text[:30]}")
    return float(text)


def _without(given: Any) -> Any:
    if isinstance(given, dict):
        if given.keys() == {"__float__"}:  # how transformers saves what JSON has no word for
            return _constant(str(given["__float__"]))
        return {key: _without(value) for key, value in given.items() if key not in DROPPED}
    return [_without(value) for value in given] if isinstance(given, list) else given


def _check(value: Any, key: str, depth: int, keys: list[int]) -> None:
    """Raise ValueError for a value, or one inside of it; keys: how many were met so far."""
    if depth > DEPTH:
        raise ValueError(f"{key}: allowed are {DEPTH} objects and lists in one another")
    if isinstance(value, dict):
        keys[0] += len(value)
        if keys[0] > KEYS:
            raise ValueError(f"more than {KEYS} keys: allowed are {KEYS}")
        for inner, one in value.items():
            if len(inner) > TEXT:
                raise ValueError(f"a key of {len(inner)} characters: allowed are {TEXT}")
            if inner not in DROPPED:
                _check(one, inner, depth + 1, keys)
    elif isinstance(value, list):
        if len(value) > LISTS:
            raise ValueError(f"{key}: a list of {len(value)} entries, allowed are {LISTS}")
        for one in value:
            _check(one, key, depth + 1, keys)
    elif isinstance(value, str):
        if len(value) > TEXT:
            raise ValueError(f"{key}: a text of {len(value)} characters, allowed are {TEXT}")
        if _NEEDED.match(key):
            raise ValueError(f"{key}={told(value)}: allowed are whole numbers")
    elif _NEEDED.match(key):
        if value is not None:  # the class has a default, or says that it is missing
            _check_whole(key, value, 1, LAYERS if _MANY.search(key) else SIZES)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        _check_number(key, value)


def _check_number(key: str, value: float) -> None:
    if _ANY.search(key):
        ends = -NUMBERS, NUMBERS
    elif _POSITIONS.search(key):
        ends = -1, NUMBERS
    elif "experts" in key:
        ends = 0, RANKS
    elif _MANY.search(key) and not _WIDE.search(key.replace("num_hidden", "")):
        ends = 0, LAYERS
    elif _WIDE.search(key):
        ends = -1, SIZES  # -1: some write it for "none"
    else:
        ends = -NUMBERS, NUMBERS
    if math.isinf(value) and ends[0] < -1:
        return
    if not ends[0] <= value <= ends[1]:
        raise ValueError(f"{key}={told(value)}: allowed are numbers from {ends[0]} to {ends[1]:,}")


def _check_whole(key: str, value: Any, least: int, most: int) -> None:
    values = value if isinstance(value, list) else [value]
    for one in values:
        if not is_whole(one, least, most):
            words = f"allowed are whole numbers, {least} to {most:,}"
            raise ValueError(f"{key}={told(one)}: {words}")
