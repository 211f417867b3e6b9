"""transformers' own class for a configuration, built on meta: all shapes, and no numbers.

Loads torch and transformers. No code from a file is run, and nothing is downloaded (`offline`).
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

from .kinds import setting

# Names on the hub that differ from transformers' name.
ALIASES = {
    "kimi_k2": "deepseek_v3",
    "minimax_m3": "minimax_m3_vl",
    "minimax_text_01": "minimax",
    "minimax_m1": "minimax",
}


def configured(given: dict[str, Any]) -> PreTrainedConfig:
    """Return the configuration that a config.json describes; code that it names is not run."""
    kind = ALIASES.get(given["model_type"], given["model_type"])
    if kind not in CONFIG_MAPPING:
        words = f"transformers {transformers.__version__} has no class of that name"
        raise ValueError(f"model_type={given['model_type']!r}: {words}")
    found = CONFIG_MAPPING[kind].from_dict({**given, "model_type": kind})
    text = found.get_text_config()
    heads, pairs = (setting(text, f"num_{what}_heads") for what in ("attention", "key_value"))
    plain = isinstance(heads, int) and isinstance(pairs, int) and not setting(text, "kv_lora_rank")
    if plain and pairs and heads % pairs:
        words = f"allowed are divisors of num_attention_heads={heads}"
        raise ValueError(f"num_key_value_heads={pairs}: {words}")
    return found


@contextmanager
def offline() -> Iterator[None]:
    """Download nothing, warn of nothing, and keep the caller's random state, in this context."""
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


def build(config: PreTrainedConfig, **plugged: str) -> nn.Module:
    """Build the model on meta: AutoModelForCausalLM's class, or else the image-text class."""
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        if type(config) in mapping:
            found = mapping[type(config)]
            model = found[0] if isinstance(found, tuple | list) else found
            break
    else:
        words = "transformers has no causal model of it"
        raise ValueError(f"model_type={config.model_type!r}: {words}")
    if model.config_class is config.sub_configs.get("text_config"):  # the class is for text only
        config = config.get_text_config()
    with torch.device("meta"):
        return model._from_config(config, dtype=torch.bfloat16, **plugged)
