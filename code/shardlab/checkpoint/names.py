"""Names of tensors and sizes on Hugging Face's hub, and their mapping to the course's GPT.

`FAMILIES` has one row for each kind of model, by its `model_type`. Most of the hub's tensors are
the GPT's under another name. But GPT-2's matrices are transposed, inputs first, and its queries,
keys and values are concatenated. So the GPT's tensors map to parts of hub tensors: a `Link` each.

The course's GPT has rotary positions. GPT-2's learned positions are not loaded (`beside`).

Imports only the standard library, and modules that do the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import log
from pathlib import Path
from typing import Any, NamedTuple

from shardlab.common.arguments import SIZES, check_number, check_one_of, check_whole
from shardlab.common.files import read_json
from shardlab.common.shapes import Config, Yarn
from shardlab.layout.boxes import Box, whole
from shardlab.layout.entries import ledger


class Link(NamedTuple):
    """The place of one of the GPT's tensors in the hub's files."""

    hub: str  # name of the hub's tensor
    place: Box  # the part of the hub's tensor
    turned: bool = False  # True if the hub's tensor is transposed


_NAME = re.compile(r"(?:blocks\.(\d+)\.)?(.*?)(?:\.experts\.(\d+)(\..*))?")
_QKV = "attention.query", "attention.key", "attention.value"
_LLAMA_NAMES = {
    "embedding": "model.embed_tokens",
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
    "norm": "model.norm",
    "head": "lm_head",
}
_EXPERT_NAMES = {
    "ffn.router.score": "mlp.gate",
    "ffn.experts.gate": "mlp.experts.{}.gate_proj",
    "ffn.experts.up": "mlp.experts.{}.up_proj",
    "ffn.experts.down": "mlp.experts.{}.down_proj",
}
_QK_NORM = {"attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm"}
_SIZES = {
    "vocab": "vocab_size",
    "seq": "max_position_embeddings",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
    "tied": "tie_word_embeddings",
    "rotary_base": "rope_theta",
}
_LLAMA_SIZES = _SIZES | {
    "kv_heads": "num_key_value_heads",
    "head": "head_dim",
    "norm_eps": "rms_norm_eps",
}
_RMS = {"mlp": "swiglu", "norm": "rms", "bias": False}
_SILU = {"hidden_act": "silu", "attention_bias": False}


class Family(NamedTuple):
    """The names and the storage format of a kind of model, by default Llama's."""

    classname: str
    names: Mapping[str, str] = _LLAMA_NAMES  # the GPT's module names -> the hub's
    sizes: Mapping[str, str] = _LLAMA_SIZES  # fields of Config -> keys of config.json
    fixed: Mapping[str, Any] = _RMS  # fields of Config with one value for the whole family
    keys: Mapping[str, Any] = _SILU  # keys of config.json, with the only value the GPT supports
    layer: str = "model.layers.{}."  # prefix of the names of a layer's tensors
    turned: tuple[str, ...] = ()  # modules whose weights are stored transposed
    fused: bool = False  # True if queries, keys and values are concatenated in one tensor
    beside: str = r"(?!)"  # pattern of the hub's tensors that the GPT does not have
    base: str = ""  # prefix of names that some files omit


FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM", keys=_SILU | {"mlp_bias": False}, beside=r".*\.rotary_emb\.inv_freq"
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _LLAMA_NAMES | _QK_NORM,
        fixed=_RMS | {"qk_norm": True},
        keys=_SILU | {"use_sliding_window": False},
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        _LLAMA_NAMES
        | {
            "ffn.router.score": "block_sparse_moe.gate",
            "ffn.experts.gate": "block_sparse_moe.experts.{}.w1",
            "ffn.experts.up": "block_sparse_moe.experts.{}.w3",
            "ffn.experts.down": "block_sparse_moe.experts.{}.w2",
        },
        _LLAMA_SIZES
        | {
            "experts": "num_local_experts",
            "experts_per_token": "num_experts_per_tok",
            "window": "sliding_window",
        },
        keys={"hidden_act": "silu"},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        _LLAMA_NAMES | _QK_NORM | _EXPERT_NAMES,
        _LLAMA_SIZES
        | {
            "experts": "num_experts",
            "experts_per_token": "num_experts_per_tok",
            "expert_ffn": "moe_intermediate_size",
        },
        fixed=_RMS | {"qk_norm": True},
        keys=_SILU
        | {
            "use_sliding_window": False,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        _LLAMA_NAMES
        | _EXPERT_NAMES
        | {
            "attention.query_down": "self_attn.q_a_proj",
            "attention.query_norm": "self_attn.q_a_layernorm",
            "attention.query": "self_attn.q_b_proj",
            "attention.down": "self_attn.kv_a_proj_with_mqa",
            "attention.down_norm": "self_attn.kv_a_layernorm",
            "attention.key_value": "self_attn.kv_b_proj",
            "ffn.router": "mlp.gate",
            "ffn.shared.gate": "mlp.shared_experts.gate_proj",
            "ffn.shared.up": "mlp.shared_experts.up_proj",
            "ffn.shared.down": "mlp.shared_experts.down_proj",
        },
        _SIZES
        | {
            "norm_eps": "rms_norm_eps",
            "head": "qk_nope_head_dim",
            "value": "v_head_dim",
            "rotary": "qk_rope_head_dim",
            "latent": "kv_lora_rank",
            "query_latent": "q_lora_rank",
            "experts": "n_routed_experts",
            "experts_per_token": "num_experts_per_tok",
            "expert_ffn": "moe_intermediate_size",
            "shared_experts": "n_shared_experts",
            "dense_layers": "first_k_dense_replace",
            "expert_groups": "n_group",
            "groups_per_token": "topk_group",
            "routed_scale": "routed_scaling_factor",
        },
        fixed=_RMS | {"router": "sigmoid"},
        keys=_SILU | {"norm_topk_prob": True, "rope_interleave": True},
        beside=r"model\.layers\.61\..*",  # the multi-token prediction module
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        {
            "embedding": "transformer.wte",
            "attention_norm": "ln_1",
            **dict.fromkeys(_QKV, "attn.c_attn"),
            "attention.out": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn.up": "mlp.c_fc",
            "ffn.down": "mlp.c_proj",
            "norm": "transformer.ln_f",
            "head": "lm_head",
        },
        {
            "vocab": "vocab_size",
            "seq": "n_positions",
            "layers": "n_layer",
            "heads": "n_head",
            "hidden": "n_embd",
            "ffn": "n_inner",
            "tied": "tie_word_embeddings",
            "norm_eps": "layer_norm_epsilon",
        },
        fixed={"mlp": "gelu", "norm": "layer", "bias": True},
        keys={},
        layer="transformer.h.{}.",
        turned=(*_QKV, "attention.out", "ffn.up", "ffn.down"),
        fused=True,
        beside=r"transformer\.wpe\.weight|.*\.attn\.(masked_)?bias",
        base="transformer.",
    ),
}
# transformers' defaults of missing keys, where they differ from the values the GPT computes.
_ABSENT = {
    "norm_topk_prob": False,
    "rms_norm_eps": 1e-6,
}
# Fields of Config that may be None, and the properties that hold their values then.
_VALUES = {
    "kv_heads": "key_value_heads",
    "ffn": "ffn_width",
    "expert_ffn": "expert_width",
    "head": "content_size",
    "value": "value_size",
}


def links(config: Config, model_type: str) -> dict[str, Link]:
    """Map the name of each tensor of GPT(config), except a tied head, to its `Link` on the hub.

    Raises ValueError for a kind that is not in FAMILIES, or that lacks one of the tensors.
    """
    check_one_of(FAMILIES, model_type=model_type)
    family, found = FAMILIES[model_type], {}
    for entry in ledger(config):
        if entry.tied is not None:
            continue
        # blocks.3.ffn.experts.5.up.weight is ffn.experts.up, with layer 3 and expert 5.
        rest, _, suffix = entry.name.rpartition(".")
        layer, stem, expert, last = _NAME.fullmatch(rest).groups()
        stem = stem if expert is None else f"{stem}.experts{last}"
        if stem not in family.names:
            text = f"has no place for {entry.name}; allowed are models without"
            raise ValueError(f"model_type={model_type!r}: {text}")
        before = "" if layer is None else family.layer.format(layer)
        theirs = family.names[stem].format(expert)
        if config.latent and not config.query_latent:
            theirs = theirs.replace("q_b_proj", "q_proj")
        place = whole(entry.shape)
        if family.fused and stem in _QKV:
            rows = entry.shape[0]
            first = _QKV.index(stem) * rows
            place = ((first, first + rows), *place[1:])
        turned = stem in family.turned and suffix == "weight"
        place = place[::-1] if turned else place
        found[entry.name] = Link(f"{before}{theirs}.{suffix}", place, turned)
        if stem == "ffn.router.score" and "ffn.router" in family.names:  # plus the bias, a buffer
            name, place = entry.name.replace("score.weight", "bias_E"), whole(entry.shape[:1])
            hub = f"{before}{family.names['ffn.router']}.e_score_correction_bias"
            found[name] = Link(hub, place)
    return found


# Conversion of the shape from and to config.json.


def config_json(config: Config, model_type: str) -> dict[str, Any]:
    """Return the config.json from which `transformers` builds this kind of model, as a dict."""
    family = FAMILIES[model_type]
    found = {key: getattr(config, _VALUES.get(name, name)) for name, key in family.sizes.items()}
    if "rope_theta" in found:
        base = {"rope_theta": found.pop("rope_theta")}
        found["rope_parameters"] = base | _yarn_json(config.yarn)
    if "latent" in family.sizes:  # each head has keys and values of its own
        found["num_key_value_heads"] = config.heads
    return {"model_type": model_type, "architectures": [family.classname], **found, **family.keys}


def config_file(folder: str | Path) -> Path:
    """Return the path of the config.json in a folder; raise ValueError if there is none."""
    path = Path(folder) / "config.json"
    if not path.is_file():  # also refuses a pipe, whose read would block
        text = "there is none with a config.json; allowed is one as on the hub"
        raise ValueError(f"folder={str(folder)!r}: {text}")
    return path


def config_of(folder: str | Path) -> Config:
    """Return the shape of the course's GPT for the model in `folder`, from its config.json.

    Raises ValueError for a kind that is not in FAMILIES, and if a key of the file asks for a
    computation that the GPT does not support, except GPT-2's learned positions and its GELU.
    """
    return config_in(config_file(folder))


def config_in(path: Path) -> Config:
    """Return the GPT's shape for a config.json file; raises ValueError as `config_of` does."""
    given = read_json("config", path)
    try:
        return _shape(given if isinstance(given, dict) else {})
    except ValueError as error:
        raise ValueError(f"config={str(path)!r}: {error}") from None


def _shape(given: Mapping[str, Any]) -> Config:
    """Convert a config.json's content; raise ValueError for unsupported computations."""
    if given.get("model_type") not in FAMILIES:
        allowed = f"allowed are {', '.join(FAMILIES)}"
        raise ValueError(f"model_type={given.get('model_type')!r}; {allowed}")
    family, turned = FAMILIES[given["model_type"]], given.get("rope_parameters") or {}
    scaled = given.get("rope_scaling") or turned
    given = {**_ABSENT, **given, **turned}
    given.setdefault("num_experts", given.get("num_local_experts"))  # newer versions' key
    given["rope_type"] = scaled.get("rope_type", scaled.get("type", "default"))
    for key, only in family.keys.items():
        if given.get(key, only) != only:
            raise ValueError(f"{key}={given[key]!r}; allowed is {only!r}")
    sizes = {name: given[key] for name, key in family.sizes.items() if given.get(key) is not None}
    if given["rope_type"] != "default":
        types = ("default", "yarn") if "rotary_base" in family.sizes else ("default",)
        check_one_of(types, rope_type=given["rope_type"])
        sizes["yarn"] = _yarn(scaled, given, "latent" in family.sizes)
    return Config(**family.fixed | sizes)


def _yarn_json(yarn: Yarn | None) -> dict[str, Any]:
    """Return the entries of a file's rope_parameters, except the base."""
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


def _yarn(scaled: Mapping[str, Any], given: Mapping[str, Any], latent: bool) -> Yarn:
    """Read the YaRN settings of a config.json; raise ValueError for unsupported variants.

    Defaults are those of transformers 5.23 (modeling_rope_utils.py).
    """
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
        scale = 0.1 * log(factor) + 1
        turned = (one * (scale - 1) + 1) / (every * (scale - 1) + 1) if one and every else scale
    fast, slow = (scaled.get(f"beta_{name}") or more for name, more in (("fast", 32), ("slow", 1)))
    return Yarn(factor, before, fast, slow, turned, every if latent else 0.0)
