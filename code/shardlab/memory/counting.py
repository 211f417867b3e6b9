"""How many parameters a shape has: all of them, by part, and on one rank.

Tensor parallelism cuts as Megatron does (Shoeybi et al. 2019, arXiv 1909.08053, section 3):
queries, keys, values, up and gate by their outputs, out and down by their inputs, embedding and
head by vocabulary, padded up to a multiple of the degree; norms and the biases of out and down
stand on every rank. Pipeline parallelism gives each stage the same number of layers, or those that
`stages` says; the embedding stands before the first, the last norm and the head after the last. A
tied head on another stage than the embedding is a copy of it.
"""

from __future__ import annotations

from math import prod

from shardlab.shapes import Config

from .stages import Stage, stages
from .units import ceil_div, whole

PARTS = "embedding", "attention", "ffn", "norms", "head"
Shapes = dict[str, tuple[int, ...]]  # name of a parameter, as the model calls it -> its shape


def placed(
    config: Config,
    tp: int = 1,
    pp: int = 1,
    stage: int | Stage | None = None,
    rule: str | tuple[int, ...] = "equal",
    schedule: str = "1f1b",
) -> Stage:
    """The stage that is meant: one of `pp`, by number; the last; or a `Stage`, which it returns.

    Raises ValueError unless the shape can be cut `tp` ways across and `pp` ways along.
    """
    tp = whole("tp", tp)
    for name in ("heads", "key_value_heads", "ffn_width"):
        if (value := getattr(config, name)) % tp:
            raise ValueError(f"tp={tp}: allowed are divisors of {name}={value}")
    if isinstance(stage, Stage):
        return stage
    found = stages(config, pp, rule, schedule)
    if stage is not None and (isinstance(stage, bool) or stage not in range(pp)):
        raise ValueError(f"stage={stage!r}: allowed are 0 to {pp - 1}")
    return found[-1 if stage is None else stage]


def _norm(config: Config, name: str) -> Shapes:
    both = config.norm == "layer" and config.bias
    return {
        f"{name}.{kind}": (config.hidden,) for kind in (("weight", "bias") if both else ("weight",))
    }


def _linear(
    name: str, inputs: int, outputs: int, bias: bool, whole_bias: int | None = None
) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (outputs, inputs)}
    if bias:
        shapes[f"{name}.bias"] = (outputs if whole_bias is None else whole_bias,)
    return shapes


def layer_shapes(config: Config, tp: int = 1) -> Shapes:
    """Parameters of one layer on one of `tp` ranks, in the model's order."""
    h, wide = config.hidden, config.hidden // tp
    narrow = config.key_value_heads * config.head_size // tp
    width, bias = config.ffn_width // tp, config.bias
    shapes = _norm(config, "attention_norm")
    shapes |= _linear("attention.query", h, wide, bias)
    shapes |= _linear("attention.key", h, narrow, bias)
    shapes |= _linear("attention.value", h, narrow, bias)
    shapes |= _linear("attention.out", wide, h, bias)
    shapes |= _norm(config, "ffn_norm")
    shapes |= _linear("ffn.up", h, width, bias)
    if config.mlp == "swiglu":
        shapes |= _linear("ffn.gate", h, width, bias)
    return shapes | _linear("ffn.down", width, h, bias)


def shapes(config: Config, tp: int = 1, pp: int = 1, stage: int | Stage | None = None) -> Shapes:
    """Every parameter that one rank holds, by name, once; `stage` as in `parameters`.

    Layers of a `Stage`, which does not say where it stands, count from 0.
    """
    here = placed(config, tp, pp, stage)
    before = 0 if isinstance(stage, Stage) else here.layers * (pp - 1 if stage is None else stage)
    vocabulary = ceil_div(config.vocab, tp), config.hidden
    found: Shapes = {}
    if here.embedding:
        found["embedding.weight"] = vocabulary
    for layer in range(before, before + here.layers):
        found |= {f"blocks.{layer}.{name}": s for name, s in layer_shapes(config, tp).items()}
    if here.head:
        found |= _norm(config, "norm")
        if not (config.tied and here.embedding):
            found["head.weight"] = vocabulary
    return found


def _part(name: str) -> str:
    if "norm" in name:
        return "norms"
    return next(part for part in PARTS if part in name)


def parameters(
    config: Config, tp: int = 1, pp: int = 1, stage: int | Stage | None = None
) -> dict[str, int]:
    """Parameters on one rank, by part: embedding, attention, ffn, norms, head.

    stage: which of `pp` equal stages, counted from 0; None: the one with the most, which is the
    last; or any `Stage`.
    Raises ValueError for degrees that do not divide heads, key-value heads, the width of the
    feed-forward network (tp) or the layers (pp).
    """
    counts = dict.fromkeys(PARTS, 0)
    for name, shape in shapes(config, tp, pp, stage).items():
        counts[_part(name)] += prod(shape)
    return counts


def parameter_count(config: Config) -> int:
    """Parameters of the whole model; tied ones count once."""
    return sum(parameters(config).values())


def largest_parameter(
    config: Config, tp: int = 1, pp: int = 1, stage: int | Stage | None = None
) -> int:
    """Elements of the largest single parameter on a rank."""
    return max(prod(shape) for shape in shapes(config, tp, pp, stage).values())


def fsdp2_shard(
    config: Config, dp: int, tp: int = 1, pp: int = 1, stage: int | Stage | None = None
) -> int:
    """Elements that rank 0 of `dp` holds when FSDP2 shards each parameter by its first dimension.

    The rows are rounded up (torch.chunk), so this is a little above a `dp`-th of them.
    """
    dp = whole("dp", dp)
    held = shapes(config, tp, pp, stage).values()
    return sum(ceil_div(shape[0], dp) * prod(shape[1:]) for shape in held)
