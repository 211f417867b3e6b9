"""Recent shapes of the plain GPT: the logits of `transformers`, for the same weights."""

from __future__ import annotations

from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch

from shardlab.checkpoint import load_hub, read_config
from shardlab.common.shapes import Yarn
from shardlab.gpt.model import GPT, Config, count_parameters
from shardlab.layout.parameters import list_params

BOTH: dict[str, Any] = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 4}
BOTH |= {"intermediate_size": 40, "rms_norm_eps": 1e-6, "max_position_embeddings": 64}
BOTH |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12}
OURS: dict[str, Any] = {"vocab": 96, "hidden": 32, "layers": 4, "ffn": 40, "norm_eps": 1e-6}
OURS |= {"seq": 64, "heads": 4, "mlp": "swiglu", "norm": "rms", "bias": False, "tied": False}
ROUTED: dict[str, Any] = {"num_experts_per_tok": 3, "moe_intermediate_size": 24}
WINDOWED = ["sliding_attention", "full_attention"] * 2
LATENT: dict[str, Any] = {"kv_lora_rank": 16, "q_lora_rank": 20, "qk_rope_head_dim": 4}
LATENT |= {"qk_nope_head_dim": 8, "v_head_dim": 10, "n_routed_experts": 8, "n_group": 4}
LATENT |= {"topk_group": 2, "routed_scaling_factor": 2.5, "n_shared_experts": 1, "head_dim": 4}
SIGMOIDS: dict[str, Any] = {"experts": 8, "experts_per_token": 3, "expert_ffn": 24}
SIGMOIDS |= {"shared_experts": 1, "dense_layers": 1, "router": "sigmoid", "routed_scale": 2.5}
SIGMOIDS |= {"expert_groups": 4, "groups_per_token": 2}
MADE = {"latent": 16, "query_latent": 20, "rotary": 4, "head": 8, "value": 10}

YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 100.0}
YARN |= {"original_max_position_embeddings": 16, "beta_fast": 2.0, "beta_slow": 0.5}
SHARP = YARN | {"mscale": 0.9, "mscale_all_dim": 0.7}
STRETCH = Yarn(4.0, 16, 2.0, 0.5, 0.1 * log(4) + 1)
SHARPER = replace(STRETCH, attention_factor=(0.09 * log(4) + 1) / (0.07 * log(4) + 1), mscale=0.7)

# Class of transformers, its options beyond BOTH; our options beyond OURS.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3": (
        "Qwen3",
        {"rope_theta": 1e6},
        {"kv_heads": 2, "head": 12, "qk_norm": True, "rotary_base": 1e6},
    ),
    "windows": (
        "Qwen3",
        {"use_sliding_window": True, "sliding_window": 5, "layer_types": WINDOWED},
        {"kv_heads": 2, "head": 12, "qk_norm": True, "window": 5, "full_every": 2},
    ),
    "qwen3 with experts": (
        "Qwen3Moe",
        {"num_experts": 8, "norm_topk_prob": True} | ROUTED,
        {"kv_heads": 2, "head": 12, "qk_norm": True, "experts": 8, "experts_per_token": 3}
        | {"expert_ffn": 24},
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {"first_k_dense_replace": 1, "num_key_value_heads": 4} | ROUTED | LATENT,
        SIGMOIDS | MADE,
    ),
    "qwen3, stretched": (
        "Qwen3",
        {"rope_parameters": YARN},
        {"kv_heads": 2, "head": 12, "qk_norm": True, "rotary_base": 100.0, "yarn": STRETCH},
    ),
    "deepseek-v3, stretched": (
        "DeepseekV3",
        {"first_k_dense_replace": 1, "num_key_value_heads": 4, "rope_parameters": SHARP}
        | ROUTED
        | LATENT
        | {"qk_rope_head_dim": 8, "head_dim": 8},
        SIGMOIDS | MADE | {"rotary": 8, "rotary_base": 100.0, "yarn": SHARPER},
    ),
}


def make_theirs(name: str, more: dict[str, Any]) -> Any:
    """Return their tiny model, with weights far from the initial ones."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**(BOTH | more))
    torch.manual_seed(1)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.dim() > 1:
                tensor.normal_(std=0.2)
        for key, tensor in model.state_dict().items():
            if key.endswith("norm.weight") or "correction_bias" in key:
                tensor.add_(torch.randn_like(tensor), alpha=0.2)
    return model


@pytest.mark.parametrize("case", CASES)
def test_a_tiny_model_has_the_logits_of_transformers(case: str, tmp_path: Path):
    name, more, own = CASES[case]
    model, config = make_theirs(name, more), Config(**(OURS | own))
    model.save_pretrained(tmp_path)
    if config.yarn is not None:
        assert read_config(tmp_path).yarn == config.yarn
    ours = GPT(config).eval()
    assert load_hub(ours, tmp_path) == ()  # both have the same tensors
    assert count_parameters(config) == model.num_parameters()
    assert count_parameters(config) == sum(entry.count_elements() for entry in list_params(config))
    tokens_BS = torch.randint(96, (2, 24))
    with torch.no_grad():
        ours_BSV, theirs_BSV = ours(tokens_BS), model(tokens_BS).logits
        assert theirs_BSV.std() > 0.5
        # Paths of 27 products of 32 terms in two orders: 2 sqrt(27 * 32) roundings of up to 5.
        torch.testing.assert_close(ours_BSV, theirs_BSV, rtol=0, atol=2e-5)
