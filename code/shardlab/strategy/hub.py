"""The shape of a model from its `config.json`, as Hugging Face's hub keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardlab.arguments import SIZES, check_whole
from shardlab.options import read_json
from shardlab.shapes import Config

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
    found = {name: _first(given, keys) for name, keys in _KEYS.items()}
    for name, value in found.items():
        if value is None:
            raise ValueError(f"{_KEYS[name][0]} is missing")
    found |= {name: _first(given, keys) for name, keys in _OPTIONAL.items()}
    experts = {name: _first(given, keys) for name, keys in _EXPERTS.items()}
    others = {name: given.get(name) for name in ("head_dim", "kv_lora_rank")}
    known = {n: v for n, v in (found | experts | others).items() if v is not None}
    check_whole(0, SIZES, **known)
    if latent := others["kv_lora_rank"]:
        words = "allowed are models without latent attention"
        raise ValueError(f"kv_lora_rank={latent}: {words}")
    if experts["experts"]:
        found |= {name: value for name, value in experts.items() if value is not None}
    head = others["head_dim"]
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


def _first(given: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    return next((given[key] for key in keys if given.get(key) is not None), None)
