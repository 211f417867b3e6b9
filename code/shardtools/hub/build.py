"""transformers' own class for a configuration, built on meta: every shape, and no number.

Loads torch and transformers. No code of a file's is run, and nothing is fetched (`offline`).
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

# The hub's names for what has another one in transformers.
ALIASES = {
    "kimi_k2": "deepseek_v3",
    "minimax_m3": "minimax_m3_vl",
    "minimax_text_01": "minimax",
    "minimax_m1": "minimax",
}


def configured(given: dict[str, Any]) -> PreTrainedConfig:
    """The configuration that a config.json describes; its code is not asked."""
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
    """Meanwhile fetch nothing, warn of nothing, and draw no random number of the caller's."""
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
    """The model on meta: the one that AutoModelForCausalLM makes of it, else the image-text one."""
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        if type(config) in mapping:
            found = mapping[type(config)]
            model = found[0] if isinstance(found, tuple | list) else found
            break
    else:
        words = "transformers has no causal model of it"
        raise ValueError(f"model_type={config.model_type!r}: {words}")
    if model.config_class is config.sub_configs.get("text_config"):  # the text half alone
        config = config.get_text_config()
    with torch.device("meta"):
        return model._from_config(config, dtype=torch.bfloat16, **plugged)
