"""What the hub calls the tensors of today's decoders, by the names that the course's own GPT has.

Tensors are the same but for their names: nothing is transposed, joined or put in another order.
Llama, Qwen3 with and without experts, and DeepSeek-V3, as `save_pretrained` of `transformers`
writes them.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardlab.arguments import check_kind
from shardlab.layout.entries import ledger
from shardlab.shapes import Config

OUTSIDE = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
LAYER = {  # the beginning of a name inside of a layer; the longest that fits
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "attention.out": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.router.score": "mlp.gate",
    "ffn.router.bias_E": "mlp.gate.e_score_correction_bias",
    "ffn.shared": "mlp.shared_experts",
    "ffn.experts": "mlp.experts",
    "ffn": "mlp",
}
LATENT = {
    "attention.query_down": "self_attn.q_a_proj",
    "attention.query_norm": "self_attn.q_a_layernorm",
    "attention.query": "self_attn.q_b_proj",
    "attention.down": "self_attn.kv_a_proj_with_mqa",
    "attention.down_norm": "self_attn.kv_a_layernorm",
    "attention.key_value": "self_attn.kv_b_proj",
}
NETWORK = {"up": "up_proj", "gate": "gate_proj", "down": "down_proj"}


def hub_names(config: Config) -> dict[str, str]:
    """Our name of each tensor in the state dict of GPT(config) -> the hub's, in the model's order.

    A tied head is in none of the hub's files, and has no name here. The bias of a router of
    sigmoids, which no gradient trains, has one. Raises ValueError for shapes of other decoders.
    """
    check_kind(Config, config=config)
    for name, only in (("mlp", "swiglu"), ("norm", "rms"), ("bias", False)):
        if (value := getattr(config, name)) != only:
            raise ValueError(f"{name}={value!r}: allowed for the hub's names is {only!r}")
    return dict(_pairs(config))


def _pairs(config: Config) -> Iterator[tuple[str, str]]:
    table = LAYER | (LATENT if config.latent else {})
    if config.latent and not config.query_latent:
        table["attention.query"] = "self_attn.q_proj"
    for entry in ledger(config):
        if entry.layer is None:
            if not entry.tied:
                yield entry.name, OUTSIDE[entry.name]
            continue
        before, inside = f"blocks.{entry.layer}.", f"model.layers.{entry.layer}."
        yield entry.name, inside + _in_layer(entry.name.removeprefix(before), table)
        if entry.name.endswith("router.score.weight") and config.router == "sigmoid":
            yield before + "ffn.router.bias_E", inside + table["ffn.router.bias_E"]


def _in_layer(name: str, table: dict[str, str]) -> str:
    start = max((s for s in table if name == s or name.startswith(f"{s}.")), key=len)
    *rest, what = name.removeprefix(start).split(".")
    return ".".join((table[start], *(NETWORK.get(part, part) for part in rest if part), what))
