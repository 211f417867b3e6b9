"""Model states that a training step holds throughout, and what a layer keeps for its backward.

Model states: parameters, gradients and optimizer states. Bytes per parameter, before sharding, with
Adam:

    recipe                 weights  gradients  master  Adam   together
    fp32                   4        4          -       8      16
    fp16, bf16             2        2          4       8      16   Micikevicius et al. 2018; ZeRO
    bf16-fp32-gradients    2        4          4       8      18   Megatron-LM
    bf16-compute           4        4          -       8      16   FSDP2's MixedPrecisionPolicy
    8-bit                  2        2          4       2.004  10   Dettmers et al. 2022

ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054, section 5) over d data-parallel ranks: stage 1
gives each rank 1/d of the optimizer states (master weights included), stage 2 also 1/d of the
gradients, stage 3 also 1/d of the parameters. A share is rounded up, because a flat buffer is
padded to a multiple of d.

Activations: the tensors that autograd keeps for the course's own model, counted one by one, in
their real dtypes. Sizes are for one micro-batch on one rank: b sequences of s tokens, h hidden, a
heads, K key-value heads of size D, F width of the feed-forward network, V vocabulary, t tensor
degree, e bytes per element.

    kept by              bytes
    norm (layer)         input and output 2bshe, mean and deviation
    norm (rms)           on a CPU input and normalised input in float32 8bsh, output bshe
    attention, fused     queries, keys, values (a + 2K)bsDe / t, output 2absDe / t, a float a row
    attention, plain     the same in float32, and its a * s * s scores
    attention, plain-16  4absDe / t, and the scores in e bytes: Megatron's own softmax
    a window             its mask: sse
    QK norm              as norm (rms) of (a + K)bsD / t elements; its output is not kept
    a latent of rank r   as norm (rms) of bsr elements, and its input
    keys from latents    the tensor of keys and values, because the values stay views of it
    rotary positions     cosines and sines, for queries and for keys: 2sDe
    feed-forward, gelu   before and after: 2bsFe / t
    feed-forward, swiglu gate, its SiLU, up, their product: 4bsFe / t
    dropout              a mask: bshe on a CPU, bsh on a GPU
    loss                 log-softmax in float32: 4bsV / t

Tensor parallelism divides the tensors between the cut matrices; sequence parallelism divides the
others (Korthikanti et al. 2022, arXiv 2205.05198, section 4), and then holds the whole bshe for a
moment, a few times: gathered, reordered, or received in parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from shardlab.common.arguments import check_number, check_one_of
from shardlab.common.shapes import Config
from shardlab.layout import SINGLE_RANK, Layout

from .units import ceil_div


@dataclass(frozen=True)
class Recipe:
    """Bytes per element of each kind of tensor; `master` is 0 without a second copy."""

    parameters: int
    gradients: int
    master: int
    state: int  # for each of the optimizer's states
    compute: int  # for activations
    block: int = 0  # number of 8-bit states that share a scale of four bytes; 0: no scales


PRECISIONS: dict[str, Recipe] = {
    "fp32": Recipe(4, 4, 0, 4, 4),
    "fp16": Recipe(2, 2, 4, 4, 2),
    "bf16": Recipe(2, 2, 4, 4, 2),
    "bf16-fp32-gradients": Recipe(2, 4, 4, 4, 2),  # gradients are added up in float32
    "bf16-compute": Recipe(4, 4, 0, 4, 2),  # stored in float32, cast to bfloat16 for use
    # Dettmers et al. 2022 (arXiv 2110.02861), section 2.1: blocks of 2048 values share a scale.
    "8-bit": Recipe(2, 2, 4, 1, 2, 2048),
}
# States per parameter. Muon has one per matrix of a layer; AdamW's two serve the rest.
OPTIMIZERS: dict[str, int] = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2, "muon": 2}
WIDE_TENSORS: dict[str, int] = {"gelu": 2, "swiglu": 4}  # kept by a feed-forward network


@dataclass(frozen=True)
class States:
    """Bytes of model states on one rank: three on its device, `host` in host memory."""

    parameters: int
    gradients: int
    optimizer: int
    host: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return self.parameters + self.gradients + self.optimizer


def check_recipe(precision: str, optimizer: str, shape: bool = False) -> Recipe:
    """Return the recipe called `precision`; raise ValueError for unknown names.

    shape: True if the model's shape is known, and with it which parameters are matrices.
    """
    check_one_of(PRECISIONS, precision=precision)
    check_one_of(OPTIMIZERS, optimizer=optimizer)
    if optimizer == "muon" and not shape:
        words = "needs the model's shape (--model or --config): Muon trains only matrices"
        raise ValueError(f"optimizer='muon': {words}")
    return PRECISIONS[precision]


def estimate_states(
    params: float, layout: Layout = SINGLE_RANK, precision: str = "bf16", optimizer: str = "adamw"
) -> States:
    """Predict the bytes of model states per rank, for `params` parameters in the model.

    params: in the whole model; floats such as 7.5e9 are fine. Each of the t * p model
    shards gets an equal share, rounded up, and ZeRO divides it further; `parameters` has
    the exact counts for a given shape. Offloading "optimizer" keeps the optimizer states in
    host memory, and from stage 2 on the gradients too, because the optimizer computes there
    (ZeRO-Offload, arXiv 2101.06840, section 3); "parameters" keeps the parameters there as
    well. Adam's step counters (four bytes per tensor) are not included.

    Raises ValueError for unknown names and invalid numbers.
    """
    recipe = check_recipe(precision, optimizer)
    check_number(params=params)
    held = ceil_div(int(params), layout.tp * layout.pp)
    return compute_states(held, ceil_div(held, layout.zero_degree), layout, recipe, optimizer)


def compute_states(
    held: int,
    shard: int,
    layout: Layout,
    recipe: Recipe,
    optimizer: str = "adamw",
    matrices: int = 0,
) -> States:
    """Return the bytes of model states on a rank with `held` parameters.

    shard: the parameters of which ZeRO leaves the states on the rank. layout: only ZeRO's
    stage and the offload are read. matrices: parameters whose Muon state the rank keeps.
    """
    zero, offload = layout.zero, layout.offload

    def count_at(stage: int) -> int:
        return shard if zero >= stage else held

    weights = count_at(3) * recipe.parameters
    gradients = count_at(2) * recipe.gradients
    kinds = OPTIMIZERS[optimizer]
    fewer = matrices if optimizer == "muon" else 0
    kept = count_at(1) * (recipe.master + kinds * recipe.state) - fewer * recipe.state
    if recipe.block:
        kept += 4 * (kinds * ceil_div(count_at(1), recipe.block) - fewer // recipe.block)
    host = 0
    if offload != "none":
        host, kept = kept, 0
        if zero >= 2:
            host, gradients = host + gradients, 0
    if offload == "parameters":
        host, weights = host + weights, 0
    return States(weights, gradients, kept, host)


@dataclass(frozen=True)
class TensorSizes:
    """Bytes of the tensors of one micro-batch on one rank, by tensor."""

    stream: int  # the residual stream, outside of the cut matrices
    stream_fp32: int
    token_floats: int  # one float32 for each token of the stream
    gathered_stream: int  # the stream of all tokens that sequence parallelism gathers; else 0
    reordered_stream: int  # the same, reordered by rank; 0 for one sequence, which is in order
    input_grad: int  # gradient of a cut part's input; if scattered, also as received and sent
    query: int
    key: int
    value: int  # including the keys that share its tensor
    output: int  # output of attention's core
    heads_fp32: int  # queries in float32
    values_fp32: int  # values in float32, one head per head of queries
    mask: int  # mask of a window
    scores: int  # a * s * s scores in float32
    scores_16bit: int  # the scores in the dtype of the stream
    row_stats: int  # a float32 per query and head
    row_stats_per_head: int
    ffn_inner: int  # the feed-forward network's inner tensor
    experts_inner: int  # inner width for all experts of a token
    rotary_tables: int  # cosines and sines
    logits_fp32: int
    element: int


@lru_cache(maxsize=1024)
def compute_sizes(
    config: Config, batch: int, seq: int, element: int, tp: int, sequence: bool
) -> TensorSizes:
    """Return TensorSizes for `element` bytes per element; sequence: tp shards the tokens."""
    b_s, h = batch * seq, config.hidden
    tokens = -(-b_s // (tp if sequence else 1))
    stream = tokens * h * element
    gathered = b_s * h * element if sequence and tp > 1 else 0
    few = -(-config.key_value_heads // tp)  # ranks may hold copies of the same head
    size, values = config.head_size, config.value_size
    beside = config.nope_head_size if config.latent else 0  # keys in the values' tensor
    as_is = element == 4 and 1 in (batch, config.heads // tp)  # else a product copies the tensor
    return TensorSizes(
        stream=stream,
        stream_fp32=tokens * h * 4,
        token_floats=tokens * 4,
        gathered_stream=gathered,
        reordered_stream=gathered if batch > 1 else 0,
        input_grad=(3 * gathered or stream) if tp > 1 else 0,
        query=b_s * config.heads * size * element // tp,
        key=b_s * few * size * element,
        value=b_s * few * (values + beside) * element,
        output=b_s * config.heads * values * element // tp,
        heads_fp32=b_s * config.heads * size * 4 // tp,
        values_fp32=b_s * config.heads * (values + as_is * beside) * 4 // tp,
        mask=seq * seq * element if config.window and config.window < seq else 0,
        scores=batch * config.heads * seq * seq * 4 // tp,
        scores_16bit=batch * config.heads * seq * seq * element // tp,
        row_stats=b_s * config.heads * 4 // tp,
        row_stats_per_head=b_s * 4,
        ffn_inner=b_s * config.ffn_width * element // tp,
        experts_inner=b_s * config.active_expert_width * element // tp,
        rotary_tables=4 * seq * ((config.rotary or size) // 2) * element,
        logits_fp32=b_s * -(-config.vocab // tp) * 4,
        element=element,
    )


def kept_by_norm(config: Config, z: TensorSizes, device: str, recomputed: bool = False) -> int:
    """Return the bytes that one norm keeps; its output, used later, counts here.

    recomputed: the products that follow recompute the norm when they need its output.
    """
    if recomputed:
        return z.stream
    if config.norm == "layer":
        # Mean and deviation: float32 on a GPU, the input's dtype on a CPU.
        numbers = 2 * z.token_floats * (4 if device == "gpu" else z.element) // 4
        return 2 * z.stream + numbers
    if device == "gpu":  # one fused kernel
        return 2 * z.stream + z.token_floats
    return 2 * z.stream_fp32 + z.token_floats + z.stream  # input and normalised input in float32


def kept_by_projections(z: TensorSizes) -> int:
    """Return the bytes of queries, keys, values and the output of attention's core."""
    return z.query + z.key + z.value + z.output


def kept_by_head_norms(config: Config, z: TensorSizes, device: str) -> int:
    """Return the bytes that query and key norms keep; rotation needs no outputs."""
    if not config.qk_norm:
        return 0
    heads = (z.query + z.key) // z.element
    each = z.element if device == "gpu" else 8  # CPU: input and normalised input in float32
    return heads * each + heads // config.head_size * 4


def kept_by_latents(config: Config, z: TensorSizes, device: str) -> int:
    """Return the bytes that the norms of latents keep, their outputs included."""
    if config.latent is None:
        return 0
    tokens, e = z.token_floats // 4, z.element
    ranks = [rank for rank in (config.query_latent, config.latent) if rank]
    each = e if device == "gpu" else 8
    kept = sum(tokens * (rank * (each + e) + 4) for rank in ranks)
    whole = device == "gpu" or e == 4  # the input is a view of a tensor, not a float32 copy
    return kept + (tokens * config.rotary * e if whole else 0)


def kept_by_softmax(z: TensorSizes, dropout: bool, device: str) -> int:
    """Return the bytes of the softmax; with dropout also mask and dropped scores."""
    mask = z.scores // 4 if device == "gpu" else z.scores_16bit
    return z.scores_16bit + (mask + z.scores_16bit if dropout else 0)


def kept_by_attention(
    config: Config, z: TensorSizes, recomputed: bool, kind: str, device: str
) -> int:
    """Return the bytes from the projections to the output projection's input."""
    norms = kept_by_head_norms(config, z, device) + kept_by_latents(config, z, device)
    return norms + _kept_by_core(config, z, recomputed, kind, device)


def _kept_by_core(config: Config, z: TensorSizes, recomputed: bool, kind: str, device: str) -> int:
    if recomputed:
        return kept_by_projections(z) + z.rotary_tables
    if kind == "plain-16":  # keys and values are repeated for every head
        heads = 2 * z.query + 2 * z.output
        return heads + kept_by_softmax(z, config.dropout > 0, device) + z.rotary_tables
    if kind == "fused":
        # A CPU's kernel returns heads before tokens: the output projection keeps a copy.
        copied = device == "cpu" and z.row_stats > z.row_stats_per_head
        return kept_by_projections(z) + z.rotary_tables + (z.output if copied else 0) + z.row_stats
    # Keys and values are repeated for every head.
    kept = 2 * z.heads_fp32 + z.values_fp32 + z.scores + z.output
    if config.dropout:
        mask = z.scores // 4 if device == "gpu" else z.scores
        kept += mask + z.scores
    return kept + z.rotary_tables


def kept_by_dropout(config: Config, z: TensorSizes, device: str) -> int:
    """Return the bytes of a mask: full elements on a CPU, one byte each on a GPU."""
    if not config.dropout:
        return 0
    return z.stream // z.element if device == "gpu" else z.stream


def count_wide_tensors(config: Config, recomputed: bool) -> int:
    """Return the number of wide tensors kept; recomputed: only the products' inputs."""
    return WIDE_TENSORS[config.mlp] // 2 if recomputed else WIDE_TENSORS[config.mlp]


def kept_by_ffn(config: Config, z: TensorSizes, recomputed: bool = False) -> int:
    """Return the bytes of a feed-forward network's wide tensors."""
    return count_wide_tensors(config, recomputed) * z.ffn_inner


def resolve_kernel(config: Config, attention: str, device: str) -> str:
    """Return `attention`, but "plain" if a CPU lacks a fused kernel.

    It lacks one with dropout, and if values and queries differ in size.
    """
    lacks = config.dropout > 0 or config.value_size != config.head_size
    return "plain" if attention == "fused" and device == "cpu" and lacks else attention


def kept_by_layer(
    config: Config, z: TensorSizes, recomputed: frozenset[str], kind: str, device: str
) -> dict[str, int]:
    """Return the bytes that one layer keeps, by part; recomputed: operators."""
    norm = kept_by_norm(config, z, device, "norms" in recomputed)
    return {
        "attention_norm": norm,
        "attention": kept_by_attention(config, z, "attention" in recomputed, kind, device),
        "attention_dropout": kept_by_dropout(config, z, device),
        "ffn_norm": norm,
        "ffn": kept_by_ffn(config, z, "ffn" in recomputed),
        "ffn_dropout": kept_by_dropout(config, z, device),
    }
