"""Names of tensors and sizes on Hugging Face's hub, and their mapping to the course's GPT.

`FAMILIES` has one row for each kind of model, by its `model_type`. Most of the hub's tensors are
the GPT's under another name. But GPT-2's matrices are transposed, inputs first, and its queries,
keys and values are concatenated. So the GPT's tensors map to parts of hub tensors: a `Link` each.

The course's GPT has rotary positions. GPT-2's learned positions are not loaded (`ignored`).

Imports only the standard library, and modules that do the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import log
from pathlib import Path
from typing import Any, NamedTuple

from shardlab.common.arguments import MAX_SIZE, check_integer, check_number, check_one_of
from shardlab.common.files import read_json
from shardlab.common.shapes import Config, Yarn
from shardlab.layout.boxes import Box, make_full_box
from shardlab.layout.parameters import list_params


class Link(NamedTuple):
    """The place of one of the GPT's tensors in the hub's files."""

    hub: str  # name of the hub's tensor
    box: Box  # the part of the hub's tensor
    transposed: bool = False  # True if the hub's tensor is transposed


_GPT_NAME = re.compile(r"(?:blocks\.(\d+)\.)?(.*?)(?:\.experts\.(\d+)(\..*))?")
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
_COMMON_KEYS = {
    "vocab": "vocab_size",
    "seq": "max_position_embeddings",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
    "tied": "tie_word_embeddings",
    "rotary_base": "rope_theta",
}
_LLAMA_KEYS = _COMMON_KEYS | {
    "kv_heads": "num_key_value_heads",
    "head": "head_dim",
    "norm_eps": "rms_norm_eps",
}
_LLAMA_FIELDS = {"mlp": "swiglu", "norm": "rms", "bias": False}
_FIXED_KEYS = {"hidden_act": "silu", "attention_bias": False}


class Family(NamedTuple):
    """The names and the storage format of a kind of model, by default Llama's."""

    class_name: str
    module_names: Mapping[str, str] = _LLAMA_NAMES  # the GPT's module names -> the hub's
    field_keys: Mapping[str, str] = _LLAMA_KEYS  # fields of Config -> keys of config.json
    fixed_fields: Mapping[str, Any] = _LLAMA_FIELDS  # fields of Config that the family fixes
    fixed_keys: Mapping[str, Any] = _FIXED_KEYS  # keys and the only value supported
    layer_prefix: str = "model.layers.{}."  # prefix of the names of a layer's tensors
    transposed: tuple[str, ...] = ()  # modules whose weights are stored transposed
    fused_qkv: bool = False  # True if queries, keys and values are concatenated in one tensor
    ignored: str = r"(?!)"  # pattern of the hub's tensors that the GPT does not have
    optional_prefix: str = ""  # prefix of names that some files omit


FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        fixed_keys=_FIXED_KEYS | {"mlp_bias": False},
        ignored=r".*\.rotary_emb\.inv_freq",
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _LLAMA_NAMES | _QK_NORM,
        fixed_fields=_LLAMA_FIELDS | {"qk_norm": True},
        fixed_keys=_FIXED_KEYS | {"use_sliding_window": False},
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
        _LLAMA_KEYS
        | {
            "experts": "num_local_experts",
            "experts_per_token": "num_experts_per_tok",
            "window": "sliding_window",
        },
        fixed_keys={"hidden_act": "silu"},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        _LLAMA_NAMES | _QK_NORM | _EXPERT_NAMES,
        _LLAMA_KEYS
        | {
            "experts": "num_experts",
            "experts_per_token": "num_experts_per_tok",
            "expert_ffn": "moe_intermediate_size",
        },
        fixed_fields=_LLAMA_FIELDS | {"qk_norm": True},
        fixed_keys=_FIXED_KEYS
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
        _COMMON_KEYS
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
        fixed_fields=_LLAMA_FIELDS | {"router": "sigmoid"},
        fixed_keys=_FIXED_KEYS | {"norm_topk_prob": True, "rope_interleave": True},
        ignored=r"model\.layers\.61\..*",  # the multi-token prediction module
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
        fixed_fields={"mlp": "gelu", "norm": "layer", "bias": True},
        fixed_keys={},
        layer_prefix="transformer.h.{}.",
        transposed=(*_QKV, "attention.out", "ffn.up", "ffn.down"),
        fused_qkv=True,
        ignored=r"transformer\.wpe\.weight|.*\.attn\.(masked_)?bias",
        optional_prefix="transformer.",
    ),
}
# transformers' defaults of missing keys, where they differ from the values the GPT computes.
_MISSING_KEY_DEFAULTS = {
    "norm_topk_prob": False,
    "rms_norm_eps": 1e-6,
}
# Fields of Config that may be None, and the properties that hold their values then.
_OPTIONAL_FIELDS = {
    "kv_heads": "key_value_heads",
    "ffn": "ffn_width",
    "expert_ffn": "expert_width",
    "head": "nope_head_size",
    "value": "value_size",
}


def map_tensors(config: Config, model_type: str) -> dict[str, Link]:
    """Map the name of each tensor of GPT(config), except a tied head, to its `Link` on the hub.

    Raises ValueError for a kind that is not in FAMILIES, or that lacks one of the tensors.
    """
    check_one_of(FAMILIES, model_type=model_type)
    family, found = FAMILIES[model_type], {}
    for entry in list_params(config):
        if entry.tied_to is not None:
            continue
        # blocks.3.ffn.experts.5.up.weight is ffn.experts.up, with layer 3 and expert 5.
        rest, _, suffix = entry.name.rpartition(".")
        layer, stem, expert, last = _GPT_NAME.fullmatch(rest).groups()
        stem = stem if expert is None else f"{stem}.experts{last}"
        if stem not in family.module_names:
            raise ValueError(f"model_type={model_type!r}: these models have no {entry.name}")
        prefix = "" if layer is None else family.layer_prefix.format(layer)
        hub_stem = family.module_names[stem].format(expert)
        if config.latent and not config.query_latent:
            hub_stem = hub_stem.replace("q_b_proj", "q_proj")
        box = make_full_box(entry.shape)
        if family.fused_qkv and stem in _QKV:
            rows = entry.shape[0]
            first = _QKV.index(stem) * rows
            box = ((first, first + rows), *box[1:])
        transposed = stem in family.transposed and suffix == "weight"
        box = box[::-1] if transposed else box
        found[entry.name] = Link(f"{prefix}{hub_stem}.{suffix}", box, transposed)
        if stem == "ffn.router.score" and "ffn.router" in family.module_names:  # plus its bias
            name, box = (
                entry.name.replace("score.weight", "bias_E"),
                make_full_box(entry.shape[:1]),
            )
            hub = f"{prefix}{family.module_names['ffn.router']}.e_score_correction_bias"
            found[name] = Link(hub, box)
    return found


# Conversion of the shape from and to config.json.


def build_config_json(config: Config, model_type: str) -> dict[str, Any]:
    """Return the config.json from which `transformers` builds this kind of model, as a dict."""
    family = FAMILIES[model_type]
    fields = {key: _OPTIONAL_FIELDS.get(name, name) for name, key in family.field_keys.items()}
    found = {key: getattr(config, field) for key, field in fields.items()}
    if "rope_theta" in found:
        theta = {"rope_theta": found.pop("rope_theta")}
        found["rope_parameters"] = theta | _build_rope_parameters(config.yarn)
    if "latent" in family.field_keys:  # each head has keys and values of its own
        found["num_key_value_heads"] = config.heads
    kind = {"model_type": model_type, "architectures": [family.class_name]}
    return kind | found | dict(family.fixed_keys)


def find_config_file(folder: str | Path) -> Path:
    """Return the path of the config.json in a folder; raise ValueError if there is none."""
    path = Path(folder) / "config.json"
    if not path.is_file():  # also refuses a pipe, whose read would block
        text = "must hold a config.json, as folders of Hugging Face's hub do"
        raise ValueError(f"folder={str(folder)!r}: {text}")
    return path


def read_config(folder: str | Path) -> Config:
    """Return the shape of the course's GPT for the model in `folder`, from its config.json.

    Raises ValueError for a kind that is not in FAMILIES, and if a key of the file asks for a
    computation that the GPT does not support, except GPT-2's learned positions and its GELU.
    """
    return read_config_file(find_config_file(folder))


def read_config_file(path: Path) -> Config:
    """Return the GPT's shape for a config.json file; raises ValueError as `read_config` does."""
    given = read_json("config", path)
    try:
        return _parse_config(given if isinstance(given, dict) else {})
    except ValueError as error:
        raise ValueError(f"config={str(path)!r}: {error}") from None


def _parse_config(given: Mapping[str, Any]) -> Config:
    """Convert a config.json's content; raise ValueError for unsupported computations."""
    if given.get("model_type") not in FAMILIES:
        kinds = ", ".join(FAMILIES)
        raise ValueError(f"model_type={given.get('model_type')!r}: must be one of {kinds}")
    family, rope = FAMILIES[given["model_type"]], given.get("rope_parameters") or {}
    scaling = given.get("rope_scaling") or rope
    given = {**_MISSING_KEY_DEFAULTS, **given, **rope}
    given.setdefault("num_experts", given.get("num_local_experts"))  # newer versions' key
    given["rope_type"] = scaling.get("rope_type", scaling.get("type", "default"))
    for key, only in family.fixed_keys.items():
        if given.get(key, only) != only:
            raise ValueError(f"{key}={given[key]!r}: must be {only!r}")
    keys = family.field_keys.items()
    fields = {name: given[key] for name, key in keys if given.get(key) is not None}
    if given["rope_type"] != "default":
        types = ("default", "yarn") if "rotary_base" in family.field_keys else ("default",)
        check_one_of(types, rope_type=given["rope_type"])
        fields["yarn"] = _parse_yarn(scaling, given, "latent" in family.field_keys)
    return Config(**family.fixed_fields | fields)


def _build_rope_parameters(yarn: Yarn | None) -> dict[str, Any]:
    """Return the entries of a file's rope_parameters, except the base."""
    if yarn is None:
        return {"rope_type": "default"}
    found = {
        "rope_type": "yarn",
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.seq,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "attention_factor": yarn.attention_factor,
    }
    return found | ({"mscale_all_dim": yarn.mscale} if yarn.mscale else {})


def _parse_yarn(scaling: Mapping[str, Any], given: Mapping[str, Any], latent: bool) -> Yarn:
    """Read the YaRN settings of a config.json; raise ValueError for unsupported variants.

    Defaults are those of transformers 5.23 (modeling_rope_utils.py).
    """
    if not scaling.get("truncate", True):
        raise ValueError(f"truncate={scaling['truncate']!r}: must be True")
    original = scaling.get("original_max_position_embeddings")
    check_integer(1, MAX_SIZE, original_max_position_embeddings=original)
    factor = scaling.get("factor")
    if factor is None and isinstance(longest := given.get("max_position_embeddings"), int):
        factor = longest / original
    numbers = {name: scaling.get(name) for name in ("mscale", "mscale_all_dim", "attention_factor")}
    check_number(1, factor=factor)
    check_number(0, **{name: value for name, value in numbers.items() if value is not None})
    one, every, turned = (value or 0.0 for value in numbers.values())
    if numbers["attention_factor"] is None:
        scale = 0.1 * log(factor) + 1
        turned = (one * (scale - 1) + 1) / (every * (scale - 1) + 1) if one and every else scale
    fast, slow = scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1
    return Yarn(factor, original, fast, slow, turned, every if latent else 0.0)
