"""What a training step holds from beginning to end, and what a layer keeps for its backward.

Model states: parameters, gradients and optimizer states. Bytes for each parameter, before anything
is sharded, with Adam:

    recipe                 weights  gradients  master  Adam   together
    fp32                   4        4          -       8      16
    fp16, bf16             2        2          4       8      16   Micikevicius et al. 2018; ZeRO
    bf16-fp32-gradients    2        4          4       8      18   Megatron-LM
    bf16-compute           4        4          -       8      16   FSDP2's MixedPrecisionPolicy
    8-bit                  2        2          4       2.004  10   Dettmers et al. 2022

ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054, section 5): stage 1 gives each of the d
data-parallel ranks a d-th of the optimizer states (the master weights among them), stage 2 of the
gradients too, stage 3 of the parameters too. A share is rounded up: a flat buffer is
padded to a multiple of d.

Activations: what autograd keeps of the course's own model, counted tensor by tensor, in the dtypes
that it really has. Sizes are of one micro-batch on one rank: b sequences of s tokens, h hidden,
a heads, K key-value heads of size D, F width of the feed-forward network, V vocabulary, t tensor
degree, e bytes an element.

    kept by              bytes
    norm (layer)         input and output 2bshe, mean and deviation
    norm (rms)           on a CPU input and normalised input in float32 8bsh, output bshe
    attention, fused     queries, keys, values (a + 2K)bsDe / t, output 2absDe / t, a number a row
    attention, plain     the same in float32, and its a * s * s scores
    attention, plain-16  4absDe / t, and the scores in e bytes: Megatron's own softmax
    a window             its mask: sse
    QK norm              as norm (rms) of (a + K)bsD / t elements; nobody keeps its output
    a latent of r        as norm (rms) of bsr elements, and its input
    keys from latents    in the tensor of keys and values, of which values stay a part
    rotary positions     cosines and sines, for queries and for keys: 2sDe
    feed-forward, gelu   before and after: 2bsFe / t
    feed-forward, swiglu gate, its SiLU, up, their product: 4bsFe / t
    dropout              a mask: bshe on a CPU, bsh on a GPU
    loss                 log-softmax in float32: 4bsV / t

Tensor parallelism divides what stands between the cut matrices; sequence parallelism the rest
(Korthikanti et al. 2022, arXiv 2205.05198, section 4), and there bshe stands whole for a moment, a
few times: gathered, in another order, or received in parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from shardlab.common.arguments import check_number, check_one_of
from shardlab.common.shapes import Config
from shardlab.layout import ALONE, Layout

from .units import ceil_div


@dataclass(frozen=True)
class Recipe:
    """Bytes of one element of each kind of tensor; `master` is 0 where there is no second copy."""

    parameters: int
    gradients: int
    master: int
    state: int  # of each of the optimizer's states
    compute: int  # of activations
    block: int = 0  # this many 8-bit states share a scale of four bytes; 0: no scales


PRECISIONS: dict[str, Recipe] = {
    "fp32": Recipe(4, 4, 0, 4, 4),
    "fp16": Recipe(2, 2, 4, 4, 2),
    "bf16": Recipe(2, 2, 4, 4, 2),
    "bf16-fp32-gradients": Recipe(2, 4, 4, 4, 2),  # gradients are added up in float32
    "bf16-compute": Recipe(4, 4, 0, 4, 2),  # kept in float32, cast to bfloat16 where it is used
    # Dettmers et al. 2022 (arXiv 2110.02861), section 2.1: blocks of 2048 values share a scale.
    "8-bit": Recipe(2, 2, 4, 1, 2, 2048),
}
# States of a parameter. Muon has one of each matrix in a layer, and AdamW the two of all others.
OPTIMIZERS: dict[str, int] = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2, "muon": 2}
WIDE: dict[str, int] = {"gelu": 2, "swiglu": 4}  # tensors that a feed-forward network keeps


@dataclass(frozen=True)
class States:
    """Bytes of model states on one rank: on its device, and what it keeps in `host` memory."""

    parameters: int
    gradients: int
    optimizer: int
    host: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return self.parameters + self.gradients + self.optimizer


def check_recipe(precision: str, optimizer: str, shape: bool = False) -> Recipe:
    """The recipe of that name; ValueError for names that are none.

    shape: whether the model's is known, and so which of its parameters are matrices.
    """
    check_one_of(PRECISIONS, precision=precision)
    check_one_of(OPTIMIZERS, optimizer=optimizer)
    if optimizer == "muon" and not shape:
        words = "a model's shape, which says what its matrices are: --model, --config"
        raise ValueError(f"optimizer='muon': allowed with {words}")
    return PRECISIONS[precision]


def states(
    params: float, layout: Layout = ALONE, precision: str = "bf16", optimizer: str = "adamw"
) -> States:
    """Bytes of model states per rank, for `params` parameters in the whole model (7.5e9 is fine).

    Each of the layout's t * p cuts gets its share of the parameters, rounded up, and ZeRO divides
    it over the ranks that have the same; what a certain shape gives each rank, exactly, is in
    `parameters`. Offloading "optimizer" keeps the optimizer's states in host memory, and from stage
    2 on the gradients too, because the optimizer computes there (ZeRO-Offload, arXiv 2101.06840,
    section 3); "parameters" keeps the parameters there as well.
    Adam's step counters (four bytes a tensor) are left out.

    Raises ValueError for unknown names, and numbers that are none.
    """
    recipe = check_recipe(precision, optimizer)
    check_number(params=params)
    held = ceil_div(int(params), layout.tp * layout.pp)
    return states_of(held, ceil_div(held, layout.shards), layout, recipe, optimizer)


def states_of(
    held: int,
    shard: int,
    layout: Layout,
    recipe: Recipe,
    optimizer: str = "adamw",
    matrices: int = 0,
) -> States:
    """Bytes of model states on a rank of `held` parameters, of which `shard` is what ZeRO leaves.

    Of the layout alone the stage of ZeRO and the offload are read. matrices: the parameters of
    which the rank keeps Muon's state.
    """
    zero, offload = layout.zero, layout.offload

    def of(stage: int) -> int:
        return shard if zero >= stage else held

    weights = of(3) * recipe.parameters
    gradients = of(2) * recipe.gradients
    kinds = OPTIMIZERS[optimizer]
    fewer = matrices if optimizer == "muon" else 0
    kept = of(1) * (recipe.master + kinds * recipe.state) - fewer * recipe.state
    if recipe.block:
        kept += 4 * (kinds * ceil_div(of(1), recipe.block) - fewer // recipe.block)
    host = 0
    if offload != "none":
        host, kept = kept, 0
        if zero >= 2:
            host, gradients = host + gradients, 0
    if offload == "parameters":
        host, weights = host + weights, 0
    return States(weights, gradients, kept, host)


@dataclass(frozen=True)
class Sizes:
    """Bytes of the tensors of one micro-batch on one rank, by what they are."""

    stream: int  # the residual stream, outside of the cut matrices
    stream_fp32: int
    tokens: int  # one float32 for each token of the stream
    edge: int  # the stream of all tokens, where sequence parallelism gathers it; 0 without
    order: int  # the same in the order of the ranks; 0 for one sequence, which has that order
    sent: int  # the gradient of a cut part's input; where it is scattered, received and input, too
    query: int
    key: int
    value: int  # with what they stand in one tensor with
    output: int  # of attention's core
    heads_fp32: int  # queries in float32
    values_fp32: int  # the same of values, a head for each of queries
    mask: int  # of a window
    scores: int  # a * s * s of them, in float32
    halves: int  # the same as wide as the stream's elements
    rows: int  # a float32 for each query and head
    rows_of_a_head: int
    wide: int  # the feed-forward network's inner tensor
    chosen: int  # the same of a token's experts, together
    tables: int  # cosines and sines
    logits_fp32: int
    element: int


@lru_cache(maxsize=1024)
def sizes(config: Config, batch: int, seq: int, element: int, tp: int, sequence: bool) -> Sizes:
    """Sizes for `element` bytes an element; `sequence`: the stream is cut along the sequence."""
    b_s, h = batch * seq, config.hidden
    tokens = -(-b_s // (tp if sequence else 1))
    stream, edge = tokens * h * element, b_s * h * element if sequence and tp > 1 else 0
    few = -(-config.key_value_heads // tp)  # of which ranks may have copies
    size, values = config.head_size, config.value_size
    beside = config.content_size if config.latent else 0  # keys, in the tensor that values are of
    as_is = element == 4 and 1 in (batch, config.heads // tp)  # else a product makes a copy
    return Sizes(
        stream=stream,
        stream_fp32=tokens * h * 4,
        tokens=tokens * 4,
        edge=edge,
        order=edge if batch > 1 else 0,
        sent=(3 * edge or stream) if tp > 1 else 0,
        query=b_s * config.heads * size * element // tp,
        key=b_s * few * size * element,
        value=b_s * few * (values + beside) * element,
        output=b_s * config.heads * values * element // tp,
        heads_fp32=b_s * config.heads * size * 4 // tp,
        values_fp32=b_s * config.heads * (values + as_is * beside) * 4 // tp,
        mask=seq * seq * element if config.window and config.window < seq else 0,
        scores=batch * config.heads * seq * seq * 4 // tp,
        halves=batch * config.heads * seq * seq * element // tp,
        rows=b_s * config.heads * 4 // tp,
        rows_of_a_head=b_s * 4,
        wide=b_s * config.ffn_width * element // tp,
        chosen=b_s * config.chosen_width * element // tp,
        tables=4 * seq * ((config.rotary or size) // 2) * element,
        logits_fp32=b_s * -(-config.vocab // tp) * 4,
        element=element,
    )


def kept_by_norm(config: Config, z: Sizes, device: str, again: bool = False) -> int:
    """Kept by one norm; its output is kept by what follows, but counted here.

    again: the norm is computed again where the products behind it need its output.
    """
    if again:
        return z.stream
    if config.norm == "layer":
        # Mean and deviation, in float32 on a GPU and in the input's dtype on a CPU.
        numbers = 2 * z.tokens * (4 if device == "gpu" else z.element) // 4
        return 2 * z.stream + numbers
    if device == "gpu":  # one fused kernel
        return 2 * z.stream + z.tokens
    return 2 * z.stream_fp32 + z.tokens + z.stream  # input and normalised input in float32


def kept_by_projections(z: Sizes) -> int:
    """Queries, keys, values, which attention's core takes, and its output, which `out` takes."""
    return z.query + z.key + z.value + z.output


def kept_by_head_norms(config: Config, z: Sizes, device: str) -> int:
    """Kept by the norms of queries and keys: rotation needs nothing of what they put out."""
    if not config.qk_norm:
        return 0
    heads = (z.query + z.key) // z.element
    each = z.element if device == "gpu" else 8  # a CPU: input and normalised input in float32
    return heads * each + heads // config.head_size * 4


def kept_by_latents(config: Config, z: Sizes, device: str) -> int:
    """Kept by the norms of latents; their outputs are kept by what follows, and counted here."""
    if config.latent is None:
        return 0
    tokens, e = z.tokens // 4, z.element
    ranks = [rank for rank in (config.query_latent, config.latent) if rank]
    each = e if device == "gpu" else 8
    kept = sum(tokens * (rank * (each + e) + 4) for rank in ranks)
    whole = device == "gpu" or e == 4  # the input is a part of a tensor, not a copy in float32
    return kept + (tokens * config.rotary * e if whole else 0)


def kept_by_softmax(z: Sizes, dropout: bool, device: str) -> int:
    """Its results in the stream's dtype; with dropout its mask, and what that leaves of them."""
    mask = z.scores // 4 if device == "gpu" else z.halves
    return z.halves + (mask + z.halves if dropout else 0)


def kept_by_attention(config: Config, z: Sizes, again: bool, kind: str, device: str) -> int:
    """Kept from the projections to the input of the output projection, but for a window's mask."""
    norms = kept_by_head_norms(config, z, device) + kept_by_latents(config, z, device)
    return norms + _kept_by_core(config, z, again, kind, device)


def _kept_by_core(config: Config, z: Sizes, again: bool, kind: str, device: str) -> int:
    if again:
        return kept_by_projections(z) + z.tables
    if kind == "plain-16":  # keys and values repeated for every head
        heads = 2 * z.query + 2 * z.output
        return heads + kept_by_softmax(z, config.dropout > 0, device) + z.tables
    if kind == "fused":
        # A CPU's kernel puts out heads before tokens: `out` keeps a copy in the other order.
        copied = device == "cpu" and z.rows > z.rows_of_a_head
        return kept_by_projections(z) + z.tables + (z.output if copied else 0) + z.rows
    # Keys and values repeated for every head.
    kept = 2 * z.heads_fp32 + z.values_fp32 + z.scores + z.output
    if config.dropout:
        mask = z.scores // 4 if device == "gpu" else z.scores
        kept += mask + z.scores
    return kept + z.tables


def kept_by_dropout(config: Config, z: Sizes, device: str) -> int:
    """A mask: of whole elements on a CPU, of bytes on a GPU."""
    if not config.dropout:
        return 0
    return z.stream // z.element if device == "gpu" else z.stream


def wide_tensors(config: Config, again: bool) -> int:
    """That a network's products and its nonlinearity need; again: of the products alone."""
    return WIDE[config.mlp] // 2 if again else WIDE[config.mlp]


def kept_by_ffn(config: Config, z: Sizes, again: bool = False) -> int:
    """The wide tensors of a feed-forward network."""
    return wide_tensors(config, again) * z.wide


def kernel(config: Config, attention: str, device: str) -> str:
    """`attention`, but "plain" where a CPU has no fused kernel.

    With dropout, and for values of another size than queries.
    """
    lacks = config.dropout > 0 or config.value_size != config.head_size
    return "plain" if attention == "fused" and device == "cpu" and lacks else attention


def layer_parts(
    config: Config, z: Sizes, again: frozenset[str], kind: str, device: str
) -> dict[str, int]:
    """What one layer keeps, by part, where those operators are computed `again`."""
    norm = kept_by_norm(config, z, device, "norms" in again)
    return {
        "attention_norm": norm,
        "attention": kept_by_attention(config, z, "attention" in again, kind, device),
        "attention_dropout": kept_by_dropout(config, z, device),
        "ffn_norm": norm,
        "ffn": kept_by_ffn(config, z, "ffn" in again),
        "ffn_dropout": kept_by_dropout(config, z, device),
    }
