"""How many parameters a shape has: all of them, by part, and on one rank.

Tensor parallelism cuts as Megatron does (Shoeybi et al. 2019, arXiv 1909.08053, section 3):
queries, keys, values, up and gate by their outputs, out and down by their inputs, embedding and
head by vocabulary, padded up to a multiple of the degree; norms and the biases of out and down
stand on every rank. Pipeline parallelism gives each stage the same number of layers, or those that
`stages` says; the embedding stands before the first, the last norm and the head after the last. A
tied head on another stage than the embedding is a copy of it. Experts are dealt out over `ep` of
the copies; each is cut as a feed-forward network is, and the router stands on every rank.
"""

from __future__ import annotations

from math import prod

from shardlab.arguments import check_count, check_flag, check_kind, check_whole, given
from shardlab.shapes import Config

from .experts import check_dealt
from .stages import Stage, stages
from .units import ceil_div

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
    check_width(config, tp)
    check_count(pp=pp)
    if isinstance(stage, Stage):
        return stage
    found = stages(config, pp, rule, schedule)
    check_whole(0, pp - 1, **given(stage=stage))
    return found[-1 if stage is None else stage]


def check_width(config: Config, tp: int) -> None:
    """Raise ValueError unless `tp` ranks can cut each layer of `config`."""
    check_kind(Config, config=config)
    check_count(tp=tp)
    widths = ("ffn_width", "expert_width") if config.experts else ("ffn_width",)
    for name in ("heads", "key_value_heads", *widths):
        if (value := getattr(config, name)) % tp:
            raise ValueError(f"tp={tp}: allowed are divisors of {name}={value}")


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


def _network(config: Config, name: str, width: int) -> Shapes:
    h, bias = config.hidden, config.bias
    found = _linear(f"{name}.up", h, width, bias)
    if config.mlp == "swiglu":
        found |= _linear(f"{name}.gate", h, width, bias)
    return found | _linear(f"{name}.down", width, h, bias)


def layer_shapes(config: Config, tp: int = 1, ep: int = 1, dense: bool = False) -> Shapes:
    """Parameters of one layer on one of `tp` ranks, in the model's order.

    ep: ranks that deal out its experts, of which this is the first. dense: a layer without any.
    """
    check_width(config, tp)
    check_dealt(config, ep)
    check_flag(dense=dense)
    return _layer_shapes(config, tp, ep, dense)


def _layer_shapes(config: Config, tp: int, ep: int, dense: bool) -> Shapes:
    h, wide = config.hidden, config.hidden // tp
    narrow = config.key_value_heads * config.head_size // tp
    bias = config.bias
    shapes = _norm(config, "attention_norm")
    shapes |= _linear("attention.query", h, wide, bias)
    shapes |= _linear("attention.key", h, narrow, bias)
    shapes |= _linear("attention.value", h, narrow, bias)
    shapes |= _linear("attention.out", wide, h, bias)
    shapes |= _norm(config, "ffn_norm")
    if dense or not config.experts:
        return shapes | _network(config, "ffn", config.ffn_width // tp)
    shapes["ffn.router.score.weight"] = config.experts, h
    width = config.expert_width // tp
    for expert in range(config.experts // ep):
        shapes |= _network(config, f"ffn.experts.{expert}", width)
    if config.shared_experts:
        shapes |= _network(config, "ffn.shared", config.shared_experts * width)
    return shapes


def shapes(
    config: Config, tp: int = 1, pp: int = 1, stage: int | Stage | None = None, ep: int = 1
) -> Shapes:
    """Every parameter that one rank holds, by name, once; `stage` and `ep` as in `parameters`.

    Layers of a `Stage`, which does not say where it stands, count from 0.
    """
    here = placed(config, tp, pp, stage)
    check_dealt(config, ep)
    before = 0 if isinstance(stage, Stage) else here.layers * (pp - 1 if stage is None else stage)
    vocabulary = ceil_div(config.vocab, tp), config.hidden
    found: Shapes = {}
    if here.embedding:
        found["embedding.weight"] = vocabulary
    for layer in range(here.layers):
        of_layer = _layer_shapes(config, tp, ep, layer < here.dense)
        found |= {f"blocks.{before + layer}.{name}": s for name, s in of_layer.items()}
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
    config: Config, tp: int = 1, pp: int = 1, stage: int | Stage | None = None, ep: int = 1
) -> dict[str, int]:
    """Parameters on one rank, by part: embedding, attention, ffn, norms, head.

    stage: which of `pp` equal stages, counted from 0; None: the one with the most, which is the
    last; or any `Stage`. ep: ranks that deal out the experts, which count as feed-forward networks.
    Raises ValueError for degrees that do not divide heads, key-value heads, the width of the
    feed-forward network or of an expert (tp), the layers (pp) or the experts (ep).
    """
    counts = dict.fromkeys(PARTS, 0)
    for name, shape in shapes(config, tp, pp, stage, ep).items():
        counts[_part(name)] += prod(shape)
    return counts


def parameter_count(config: Config) -> int:
    """Parameters of the whole model; tied ones count once."""
    return sum(parameters(config).values())


def in_experts(config: Config, tp: int = 1, *, stage: Stage, ep: int = 1) -> int:
    """Of the parameters of a rank of `stage`, those of its experts, which other ranks lack."""
    check_kind(Stage, stage=stage)
    named = layer_shapes(config, tp, ep).items()
    one = sum(prod(shape) for name, shape in named if name.startswith("ffn.experts."))
    return (stage.layers - stage.dense) * one


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
    check_count(dp=dp)
    held = shapes(config, tp, pp, stage).values()
    return sum(ceil_div(shape[0], dp) * prod(shape[1:]) for shape in held)
