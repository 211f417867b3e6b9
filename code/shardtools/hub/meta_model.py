"""transformers' own class for a configuration, built on meta: all shapes, and no numbers.

Loads torch and transformers. No code from a file is run, and nothing is downloaded.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import huggingface_hub
import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from .layer_kinds import get_setting

# Names on the hub that differ from transformers' name.
MODEL_TYPE_ALIASES = {
    "kimi_k2": "deepseek_v3",
    "minimax_m3": "minimax_m3_vl",
    "minimax_text_01": "minimax",
    "minimax_m1": "minimax",
}


def build_config(given: dict[str, Any]) -> PreTrainedConfig:
    """Return the configuration that a config.json describes, without running code that it names."""
    kind = MODEL_TYPE_ALIASES.get(given["model_type"], given["model_type"])
    if kind not in CONFIG_MAPPING:
        words = f"transformers {transformers.__version__} has no such class"
        raise ValueError(f"model_type={given['model_type']!r}: {words}")
    found = CONFIG_MAPPING[kind].from_dict({**given, "model_type": kind})
    text = found.get_text_config()
    heads = get_setting(text, "num_attention_heads")
    kv_heads = get_setting(text, "num_key_value_heads")
    plain = isinstance(heads, int) and isinstance(kv_heads, int)
    if plain and kv_heads and heads % kv_heads and not get_setting(text, "kv_lora_rank"):
        words = f"must divide num_attention_heads={heads}"
        raise ValueError(f"num_key_value_heads={kv_heads}: {words}")
    return found


@contextmanager
def stay_offline() -> Iterator[None]:
    """Download nothing, print no warnings, and keep the random state, in this context."""
    verbosity = transformers.logging.get_verbosity()
    with (
        mock.patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", True),
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(action="ignore"),
    ):
        transformers.logging.set_verbosity_error()
        try:
            yield
        finally:
            transformers.logging.set_verbosity(verbosity)


def build_model(config: PreTrainedConfig, **stubs: str) -> nn.Module:
    """Build the model on meta: AutoModelForCausalLM's class, or else the image-text class."""
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        if type(config) in mapping:
            found = mapping[type(config)]
            model = found[0] if isinstance(found, tuple | list) else found
            break
    else:
        words = "must have a causal model in transformers"
        raise ValueError(f"model_type={config.model_type!r}: {words}")
    if model.config_class is config.sub_configs.get("text_config"):  # the class is for text only
        config = config.get_text_config()
    with torch.device("meta"):
        return model._from_config(config, dtype=torch.bfloat16, **stubs)
