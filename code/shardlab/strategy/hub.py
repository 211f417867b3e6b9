"""The shape of a model from its `config.json`, as Hugging Face's hub keeps them."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardlab.options import read_json
from shardlab.shapes import Config

MOST_LAYERS = 10_000  # every cut of them into stages is tried
MOST = 10**9  # of all other numbers

# Our name, and what model families call it; the first that is there counts.
_KEYS = {
    "vocab": ("vocab_size",),
    "seq": ("max_position_embeddings", "n_positions", "seq_length"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
}
_OPTIONAL = {
    "kv_heads": ("num_key_value_heads",),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim"),
}
_EXPERTS = {
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok",),
    "expert_ffn": ("moe_intermediate_size",),
    "shared_experts": ("n_shared_experts",),
    "dense_layers": ("first_k_dense_replace",),
}


def read_config(path: Path) -> Config:
    """The shape that a config.json describes. Raises ValueError, which names the file's fault."""
    given = read_json("config", path)
    if not isinstance(given, dict):
        raise ValueError(f"config={str(path)!r}: allowed are files with a JSON object")
    try:
        return shape(given)
    except ValueError as error:
        raise ValueError(f"config={str(path)!r}: {error}") from None


def shape(given: Mapping[str, Any]) -> Config:
    """The shape of such an object. Raises ValueError for what is missing, or no `Config` has."""
    if _number("kv_lora_rank", given.get("kv_lora_rank"), 0):
        words = "allowed are models without latent attention"
        raise ValueError(f"kv_lora_rank={given['kv_lora_rank']!r}: {words}")
    found = {name: _first(given, keys) for name, keys in _KEYS.items()}
    for name, value in found.items():
        if value is None:
            raise ValueError(f"{_KEYS[name][0]} is missing")
    found |= {name: _first(given, keys) for name, keys in _OPTIONAL.items()}
    for name, value in found.items():
        _number(name, value, 1, MOST_LAYERS if name == "layers" else MOST)
    experts = {name: _first(given, keys) for name, keys in _EXPERTS.items()}
    for name, value in experts.items():
        _number(name, value, 0)
    if experts["experts"]:
        found |= {name: value for name, value in experts.items() if value is not None}
    head = _number("head_dim", given.get("head_dim"), 0)
    if head and head * found["heads"] != found["hidden"]:
        raise ValueError(f"head_dim={head}: allowed is hidden_size / num_attention_heads")
    gated = str(given.get("hidden_act", "")) in ("silu", "swish", "gelu_pytorch_tanh")
    gated = gated and "rms_norm_eps" in given
    return Config(
        **found,
        mlp="swiglu" if gated else "gelu",
        norm="rms" if "rms_norm_eps" in given else "layer",
        bias="rms_norm_eps" not in given,
        tied=bool(given.get("tie_word_embeddings", True)),
    )


def _number(name: str, value: Any, least: int, most: int = MOST) -> int | None:
    """`value`, where there is one. Raises ValueError for what is no whole number or too large."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value is None or (whole and least <= value <= most):
        return value
    allowed = f"allowed are whole numbers, {least} to {most:,}"
    raise ValueError(f"{name}={reprlib.repr(value)}: {allowed}")


def _first(given: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    return next((given[key] for key in keys if given.get(key) is not None), None)
