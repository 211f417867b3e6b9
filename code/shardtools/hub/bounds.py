"""Limits on what a config.json may ask for, checked before transformers builds anything from it.

transformers' own checks accept -3 layers, a vocabulary of 10^12 and 10^6 layers: the first two are
built, and the last one takes a day. Only the standard library is imported.
"""

from __future__ import annotations

import json
import re
from typing import Any

from shardlab.common.arguments import MAX_LAYERS, is_integer, shorten_repr

BYTES = 10**6  # most bytes of a file; the longest published one has 32,000
SIZES = 10**8  # largest width, vocabulary or kernel
NUMBERS = 10**12  # largest other number, such as RoPE's base

# Keys that are not read: they would download code or kernels, or describe how weights are stored.
DROPPED = (
    "auto_map", "quantization_config", "compression_config", "custom_pipelines",
    "_attn_implementation", "_attn_implementation_internal", "attn_implementation",
    "_experts_implementation", "_experts_implementation_internal", "experts_implementation",
    "_name_or_path", "name_or_path", "dtype", "torch_dtype", "use_kernels", "trust_remote_code",
)  # fmt: skip
STORED = "quantization_config", "compression_config"  # keys of DROPPED for quantized weights
_NEEDED = re.compile(  # keys that every model needs
    r"^(hidden_size|n_embd|d_model|dim|vocab_size|num_hidden_layers|n_layers?|num_layers"
    r"|num_attention_heads|n_heads?|num_key_value_heads)$"
)
_WIDE = re.compile(r"size|dim|rank|width|channels|n_embd|n_inner|d_ff|d_model|kernel|window|chunk")
_MANY = re.compile(r"layers|heads|experts|n_layer|n_head|top_?k|n_group|per_tok|groups$")


def read(text: str) -> tuple[dict[str, Any], str]:
    """Return a config.json's settings, without DROPPED, and its quantization ("" if it has none).

    Raises ValueError for text that is no JSON object with a model_type, and for a number that is
    out of bounds.
    """
    try:
        given = json.loads(text, parse_constant=_constant)
        _check("config", given)
    except RecursionError:
        raise ValueError("allowed are JSON files (it nests too deep)") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"allowed are JSON files ({error})") from None
    if not isinstance(given, dict):
        raise ValueError("allowed are files with a JSON object")
    kind = given.get("model_type")
    if not isinstance(kind, str) or not re.fullmatch(r"[\w.-]{1,80}", kind):
        raise ValueError(f"model_type={shorten_repr(kind)}: allowed is a name")
    parts = (given, *(value for value in given.values() if isinstance(value, dict)))
    stored = [f"{key} ({part[key].get('quant_method')})"
              for part in parts for key in STORED if isinstance(part.get(key), dict)]  # fmt: skip
    return _without(given), shorten_repr(stored[0])[1:-1] if stored else ""


def _constant(text: str) -> float:
    if text not in ("Infinity", "-Infinity"):  # published files use these for "no limit"
        raise ValueError(f"the number {text[:30]}: allowed are JSON's")
    return float(text)


def _without(given: Any) -> Any:
    if isinstance(given, dict):
        if given.keys() == {"__float__"}:  # transformers' form of numbers that JSON lacks
            return _constant(str(given["__float__"]))
        return {key: _without(value) for key, value in given.items() if key not in DROPPED}
    return [_without(value) for value in given] if isinstance(given, list) else given


def _check(key: str, value: Any) -> None:
    """Raise ValueError for a number that is out of bounds, here or in nested values."""
    if isinstance(value, dict):
        for inner, one in value.items():
            if inner not in DROPPED:
                _check(inner, one)
    elif isinstance(value, list):
        if len(value) > MAX_LAYERS:
            raise ValueError(f"{key}: a list of {len(value)} entries, allowed are {MAX_LAYERS}")
        for one in value:
            _check(key, one)
    elif _NEEDED.match(key):
        most = MAX_LAYERS if _MANY.search(key) else SIZES
        if value is not None and not is_integer(value, 1, most):  # None: the class's default
            raise ValueError(
                f"{key}={shorten_repr(value)}: allowed are whole numbers, 1 to {most:,}"
            )
    elif isinstance(value, int | float) and abs(value) != float("inf"):
        wide, many = _WIDE.search(key), _MANY.search(key)
        least = -1 if wide else 0 if many else -NUMBERS  # -1: some files use it for "none"
        most = SIZES if wide else MAX_LAYERS if many else NUMBERS
        if not least <= value <= most:
            words = f"allowed are numbers from {least} to {most:,}"
            raise ValueError(f"{key}={shorten_repr(value)}: {words}")
