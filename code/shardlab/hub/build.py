"""transformers' own class for a configuration, built on meta: every shape, and no number.

Loads torch and transformers, and so runs in the child process alone (`child`).
"""

from __future__ import annotations

import os
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

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
    return CONFIG_MAPPING[kind].from_dict({**given, "model_type": kind})


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
