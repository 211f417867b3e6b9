"""Limits on what a config.json may ask for, checked before transformers builds anything from it.

transformers' own checks accept -3 layers, a vocabulary of 10^12 and 10^6 layers: the first two are
built, and the last one takes a day. Only the standard library is imported.
"""

from __future__ import annotations

import json
import re
from typing import Any

from shardlab.common.arguments import MAX_LAYERS, is_integer, shorten_repr

MAX_FILE_BYTES = 10**6  # the longest published file has 32,000
MAX_SIZE = 10**8  # largest width, vocabulary or kernel
MAX_NUMBER = 10**12  # largest other number, such as RoPE's base

# Keys that are not read: they would download code or kernels, or describe how weights are stored.
DROPPED_KEYS = (
    "auto_map", "quantization_config", "compression_config", "custom_pipelines",
    "_attn_implementation", "_attn_implementation_internal", "attn_implementation",
    "_experts_implementation", "_experts_implementation_internal", "experts_implementation",
    "_name_or_path", "name_or_path", "dtype", "torch_dtype", "use_kernels", "trust_remote_code",
)  # fmt: skip
QUANTIZATION_KEYS = "quantization_config", "compression_config"
_REQUIRED_KEY = re.compile(  # keys that every model needs
    r"^(hidden_size|n_embd|d_model|dim|vocab_size|num_hidden_layers|n_layers?|num_layers"
    r"|num_attention_heads|n_heads?|num_key_value_heads)$"
)
_SIZE = re.compile(r"size|dim|rank|width|channels|n_embd|n_inner|d_ff|d_model|kernel|window|chunk")
_COUNT = re.compile(r"layers|heads|experts|n_layer|n_head|top_?k|n_group|per_tok|groups$")


def parse_config(text: str) -> tuple[dict[str, Any], str]:
    """Return a config.json's settings, without DROPPED_KEYS, and its quantization, or "".

    Raises ValueError for text that is no JSON object with a model_type, and for a number that is
    out of bounds.
    """
    try:
        given = json.loads(text, parse_constant=_parse_constant)
        _check_numbers("config", given)
    except RecursionError:
        raise ValueError("must be a JSON file (it nests too deep)") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"must be a JSON file ({error})") from None
    if not isinstance(given, dict):
        raise ValueError("must have a JSON object")
    kind = given.get("model_type")
    if not isinstance(kind, str) or not re.fullmatch(r"[\w.-]{1,80}", kind):
        raise ValueError(f"model_type={shorten_repr(kind)}: must be a name")
    parts = (given, *(value for value in given.values() if isinstance(value, dict)))
    found = [(key, part.get(key)) for part in parts for key in QUANTIZATION_KEYS]
    stored = [f"{key} ({v.get('quant_method')})" for key, v in found if isinstance(v, dict)]
    return _drop_keys(given), shorten_repr(stored[0])[1:-1] if stored else ""


def _parse_constant(text: str) -> float:
    if text not in ("Infinity", "-Infinity"):  # published files use these for "no limit"
        raise ValueError(f"number {text[:30]}: must be a number of JSON")
    return float(text)


def _drop_keys(given: Any) -> Any:
    if isinstance(given, dict):
        if given.keys() == {"__float__"}:  # transformers' form of numbers that JSON lacks
            return _parse_constant(str(given["__float__"]))
        return {key: _drop_keys(value) for key, value in given.items() if key not in DROPPED_KEYS}
    return [_drop_keys(value) for value in given] if isinstance(given, list) else given


def _check_numbers(key: str, value: Any) -> None:
    """Raise ValueError for a number that is out of bounds, here or in nested values."""
    if isinstance(value, dict):
        for inner, item in value.items():
            if inner not in DROPPED_KEYS:
                _check_numbers(inner, item)
    elif isinstance(value, list):
        if len(value) > MAX_LAYERS:
            raise ValueError(f"{key}: must have at most {MAX_LAYERS} entries, not {len(value)}")
        for item in value:
            _check_numbers(key, item)
    elif _REQUIRED_KEY.match(key):
        most = MAX_LAYERS if _COUNT.search(key) else MAX_SIZE
        if value is not None and not is_integer(value, 1, most):  # None: the class's default
            raise ValueError(f"{key}={shorten_repr(value)}: must be a whole number, 1 to {most:,}")
    elif isinstance(value, int | float) and abs(value) != float("inf"):
        is_size, is_count = _SIZE.search(key), _COUNT.search(key)
        least = -1 if is_size else 0 if is_count else -MAX_NUMBER  # -1: "none" in some files
        most = MAX_SIZE if is_size else MAX_LAYERS if is_count else MAX_NUMBER
        if not least <= value <= most:
            words = f"must be a number from {least} to {most:,}"
            raise ValueError(f"{key}={shorten_repr(value)}: {words}")
