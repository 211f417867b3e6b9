"""Formulas for what a rank holds and sends: exact if the ranks divide all sizes.

t ranks, L layers, b sequences of s tokens, h hidden, e bytes per element.

    all-reduces            forward   backward   bytes handed to each
    each block             2         2          bshe
    one with E experts     1 + E     1 + E      bshe, and kbshe by all experts together
      latent attention               2 more     bs times the latents and rotary, instead of one bshe
      QK norm                        2 more     De
      copied keys, values            2 more     KDhe; and with biases 2 more of KDe
    embedding              1                    bshe
    head                             1          bshe
    loss                   2                    4bs, 8bs

An all-reduce of S bytes moves 2(t-1)/t S from each rank (Patarasuk and Yuan 2009, section 4).
Shoeybi et al. 2019 (arXiv 1909.08053), section 3: "two all-reduces in the forward path and two in
the backward path" for each layer.
"""

from __future__ import annotations

from math import gcd

from shardlab import memory
from shardlab.common.shapes import Config
from shardlab.layout import Layout
from shardlab.layout.parameters import KV_HEADS

DIVIDED_SIZES = "heads", "ffn_width", "vocab"  # by the ranks, besides key-value heads


def predict_state_bytes(
    config: Config, t: int, itemsize: int = 4, bytes_per_state: int = 8
) -> dict[str, int]:
    """Predict the bytes of model states on each of t ranks after a step, by kind.

    itemsize: bytes per element of parameters and gradients. bytes_per_state: optimizer bytes per
    element, 8 for AdamW's two states in float32; its step counters are not included.

    Raises ValueError for a t that is not in `feasible_degrees`.
    """
    check_degree(config, t)
    held = sum(memory.count_rank_parameters(config, Layout(tp=t)).values())
    return {
        "parameters": held * itemsize,
        "gradients": held * itemsize,
        "optimizer": held * bytes_per_state,
    }


def predict_calls(config: Config, t: int) -> dict[str, int]:
    """Predict the number of all-reduces in one step, by purpose."""
    check_degree(config, t)
    several = int(t > 1)
    blocks = sum(count_all_reduces(config, layer, config.experts) for layer in range(config.layers))
    more = len(attention_input_sizes(config)) - 1 + len(summed_weight_sizes(config, t))
    return {
        "forward": several * (blocks + 1),
        "loss": several * 2,
        "backward": several * (blocks + 1 + config.layers * more),
    }


def predict_sent_bytes(
    config: Config, t: int, batch: int, seq: int, itemsize: int = 4
) -> dict[str, int]:
    """Predict the bytes of all-reduces' inputs on a rank in one step, by purpose: `bytes_on_wire`.

    batch: sequences of `seq` tokens. itemsize: bytes per element of activations; the loss's numbers
    have 4. With an expert capacity the result is an upper bound, because tokens may be dropped.
    """
    calls = predict_calls(config, t)
    stream = batch * seq * config.hidden * itemsize  # [B, S, H]
    chosen = config.experts_per_token
    streams = 1 + sum(count_all_reduces(config, layer, chosen) for layer in range(config.layers))
    several = int(t > 1)
    latents = sum(attention_input_sizes(config)) - config.hidden
    other = batch * seq * latents + sum(summed_weight_sizes(config, t))
    return {
        "forward": several * streams * stream,
        "loss": calls["loss"] * 3 * batch * seq * max(4, itemsize) // 2,  # [B, S] and [2, B, S]
        "backward": several * (streams * stream + config.layers * other * itemsize),
    }


def attention_input_sizes(config: Config) -> list[int]:
    """Return the elements per token that enter attention's region, for each message."""
    if config.latent is None:
        return [config.hidden]
    return [config.query_latent or config.hidden, config.latent, config.rotary]


def summed_weight_sizes(config: Config, t: int) -> list[int]:
    """Return the elements of a layer's weight gradients all-reduced in backward, per message."""
    norms = [config.head_size] * (2 if config.qk_norm else 0)
    heads = config.key_value_heads * config.head_size
    if count_parts(KV_HEADS, config.key_value_heads, t) == t:
        return norms
    return norms + 2 * [heads * config.hidden, *([heads] if config.bias else [])]


def count_all_reduces(config: Config, layer: int, experts: int) -> int:
    """Return the number of all-reduces in a layer's forward, with `experts` experts in use."""
    if not config.experts or layer < config.dense_layers:
        return 2
    return 1 + experts + bool(config.shared_experts)


def bytes_on_wire(payload: int, t: int) -> float:
    """Return the bytes that each of t ranks sends when it hands `payload` bytes to all-reduce."""
    return 2 * (t - 1) / t * payload


def divided_sizes(config: Config) -> tuple[str, ...]:
    """Return the names of the config's sizes that the ranks must divide."""
    return (*DIVIDED_SIZES, "expert_width") if config.experts else DIVIDED_SIZES


def feasible_degrees(config: Config) -> list[int]:
    """Return the tensor-parallel degrees that fit a model.

    They divide heads, widths and vocabulary, and divide the key-value heads or are multiples.
    """
    size, heads = gcd(*(getattr(config, n) for n in divided_sizes(config))), config.key_value_heads
    return [t for t in range(1, size + 1) if size % t == 0 and 0 in (heads % t, t % heads)]


def count_parts(name: str, size: int, t: int) -> int:
    """Return the number of parts into which t ranks cut `size` heads: the smaller of the two.

    Raises ValueError unless one number divides the other.
    """
    if size % t == 0 or t % size == 0:
        return min(size, t)
    raise ValueError(f"{name}={size}: must be a multiple or a divisor of the {t} ranks")


def check_degree(config: Config, t: int) -> None:
    """Raise ValueError unless t ranks divide this shape, and name the degrees that would."""
    for name in (*divided_sizes(config), KV_HEADS):
        if (value := getattr(config, name)) % t and (name != KV_HEADS or t % value):
            degrees = ", ".join(map(str, feasible_degrees(config)))
            what = f"must be a multiple of the {t} ranks; this model can use {degrees} ranks"
            raise ValueError(f"{name}={value}: {what}")
