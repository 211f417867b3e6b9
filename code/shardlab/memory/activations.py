"""Activations on one rank: tensors kept by layers and loss, and backward's temporaries.

`in_flight` is the number of micro-batches for which a pipeline stage keeps them. `core` counts the
tensors that one layer keeps; the letters are those of `core`.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardlab.common.arguments import check_integer, check_one_of
from shardlab.common.shapes import Config
from shardlab.layout import SINGLE_RANK, Layout, get_structure, parse_recompute

from .core import (
    PRECISIONS,
    TensorSizes,
    compute_sizes,
    count_wide_tensors,
    kept_by_attention,
    kept_by_layer,
    kept_by_norm,
    resolve_kernel,
)
from .counting import list_layer_kinds, resolve_stage
from .units import ceil_div

ATTENTION_KERNELS = "fused", "plain", "plain-16"
DEVICES = "cpu", "gpu"
INT64_BYTES, FLOAT32_BYTES = 8, 4  # bytes


@dataclass(frozen=True)
class Activations:
    """Bytes of activations on one rank."""

    layer: int  # kept by one layer for one micro-batch: a layer with experts, if there are any
    layers: int  # on this rank
    in_flight: float  # micro-batches kept at once, each of all layers
    all_layers: int  # kept by all layers when most micro-batches are in flight
    head: int  # the last norm and the input of the output layer
    logits: int  # kept by the loss: log-softmax in float32
    loss: int  # temporaries: two more such tensors; with a cut vocabulary, the logits
    stream: int  # one tensor of the residual stream
    last_norm: int  # held in backward of the last norm
    rows: int  # indices of tokens in this rank's part of the vocabulary, and a sum per token
    gathered_stream: int  # tensors that sequence parallelism gathers at a cut part's edge; else 0
    reordered_stream: int  # `gathered_stream` reordered by rank, if there are several sequences
    input_grad: int  # held in backward at a cut part's start; 0 without tensor parallelism
    forward: int  # extra bytes at the end of the last layer's forward
    working: dict[str, int]  # extra bytes of a layer's backward at its moments

    @property
    def kept_bytes(self) -> int:
        """The bytes kept after forward (on a first stage: with most micro-batches in flight)."""
        return self.all_layers + self.head + self.logits + self.rows

    @property
    def total(self) -> int:
        """The kept bytes plus the largest temporaries: the loss's, or those of one layer."""
        return self.kept_bytes + max(self.loss, *self.working.values())


def _norm_backward(config: Config, z: TensorSizes, device: str, last: bool = False) -> int:
    """Return the bytes held in backward of a norm: its input, two gradients, temporaries."""
    if config.norm == "rms" and device == "cpu":  # in float32, step by step
        return (6 if last or z.element < 4 else 5) * z.stream_fp32
    return 3 * z.stream


def _kept_by_any_layer(
    config: Config, z: TensorSizes, recomputed: frozenset[str], kind: str, device: str
) -> dict[str, int]:
    """Return the bytes that one layer keeps, by part; with experts if the model has any."""
    parts = kept_by_layer(config, z, recomputed, kind, device)
    if config.experts:
        parts["ffn"] = kept_by_experts(config, z, "ffn" in recomputed)
    return parts


def _backward_moments(
    config: Config, z: TensorSizes, parts: dict[str, int], kind: str, device: str, tp: int
) -> dict[str, int]:
    """Return the bytes held in backward of one layer at its peaks, without weight gradients.

    parts: the bytes kept when its backward begins; recomputed tensors return where they are needed.
    "ffn": the inner gradients of the feed-forward network. "norm": its norm; on a CPU an RMSNorm
    makes four or five float32 tensors. "attention": its core; plain scores exist there two to four
    times. "end": the first norm. At the end of a cut part sequence parallelism gathers a gradient;
    at its start, the gradients of all its first layers are held while that of their input is sent.
    """
    whole = _kept_by_any_layer(config, z, frozenset(), kind, device)
    gathered, reordered, input_grad = z.gathered_stream, z.reordered_stream, z.input_grad
    kept = sum(parts.values()) - parts["ffn_dropout"]
    kept += max(whole[part] - parts[part] for part in ("ffn", "ffn_norm"))
    down = (2 if config.dropout else 1) * z.stream + z.ffn_inner + gathered
    inside = (2 if config.mlp == "swiglu" else 1) * z.ffn_inner
    if config.experts:  # one expert at a time, beside the gradients of all inputs and outputs
        down, inside = 3 * z.stream + backward_of_experts(config, z, tp), 0
    first = parts["attention_norm"] + parts["attention_dropout"]
    at_input = input_grad + reordered - whole["ffn"]
    moments = {"ffn": kept + max(down, z.stream + inside + max(0, at_input))}
    moments["ffn"] = max(moments["ffn"], kept + z.stream + gathered + reordered)
    norm = _norm_backward(config, z, device)
    begun = first + parts["attention"] + z.stream
    moments["norm"] = begun + max(norm, input_grad and whole["ffn_norm"] + inside + input_grad)
    # Gradients of output, queries, keys, values.
    attention = z.query + z.key + min(z.value, z.key) + z.output
    if kind == "plain":
        attention = z.scores + (2 * z.heads_fp32 if config.dropout else z.scores)
    elif kind == "plain-16":
        attention = 2 * z.scores_16bit + z.query + z.output
    core = whole["attention_norm"] + kept_by_attention(config, z, False, kind, device) - z.output
    inside = first + z.stream + z.query + z.key + z.value + input_grad
    sending = max(begun + gathered, inside) + reordered
    moments["attention"] = max(core + z.stream + attention, sending)
    moments["end"] = max(2 * z.stream + norm, inside if input_grad else 0)
    return moments


def estimate_activations(
    config: Config,
    layout: Layout = SINGLE_RANK,
    seq: int | None = None,
    precision: str = "bf16",
    *,
    attention: str = "fused",
    device: str = "cpu",
    stage: int | None = None,
) -> Activations:
    """Predict the activations on one rank, for micro-batches of sequences of `seq` tokens.

    seq: by default the model's longest. stage: of a pipeline, from 0; None: the last, which has the
    loss. `in_flight` is the number of micro-batches kept. Recomputation: "selective" recomputes
    attention's core in backward (between queries, keys, values and the output projection), "full"
    each whole layer; or by operator, as "attention+norms+ffn", where "ffn" is the part after the
    wide products. attention: "fused" keeps no scores, "plain" all of them in float32, "plain-16" in
    the stream's dtype. device: whose kernels; a CPU has no fused RMSNorm and no fused attention
    with dropout, and needs more. Tensors that context parallelism sends and keeps are not included:
    see `context_parallel.predict_context_moments`.

    Raises ValueError for sizes below 1, unknown names, degrees that do not divide the shape, and
    tokens that sequence or context parallelism cannot divide.
    """
    here = resolve_stage(config, layout, stage)
    check_one_of(ATTENTION_KERNELS, attention=attention)
    check_one_of(DEVICES, device=device)
    check_one_of(PRECISIONS, precision=precision)
    tp, batch, recompute = layout.tp, layout.micro_batch, layout.recompute
    seq = count_tokens(config.seq if seq is None else seq, layout)
    if layout.cp > 1 and attention != "fused":
        raise ValueError(f"attention={attention!r}: must be 'fused' with cp={layout.cp}")
    if layout.cp > 1 and config.dropout:
        raise ValueError(f"dropout={config.dropout}: must be 0 with cp={layout.cp}")
    in_flight = count_in_flight(layout, layout.pp - 1 if stage is None else stage)
    element = PRECISIONS[precision].compute
    z = compute_sizes(config, batch, seq, element, tp, layout.sequence_parallel)
    recomputed = parse_recompute(recompute)
    if "latents" in recomputed:
        words = "must be 'none', 'full' or operators without latents, for the course's own model"
        raise ValueError(f"recompute={recompute!r}: {words}")
    # Full recomputation keeps a layer's input; backward recomputes all of the rest.
    kind = resolve_kernel(config, attention, device)
    parts = _kept_by_any_layer(config, z, recomputed, kind, device)
    backward = _backward_moments(config, z, parts, kind, device, tp)
    layer = shared = sum(parts.values())
    if recompute == "full":
        upcast = config.norm == "rms" and device == "cpu" and z.element < 4
        layer, shared = z.stream, 0 if upcast else z.stream  # the norm keeps it too, or a copy
    # In a model with experts, the layers without experts keep what a dense model's layers keep.
    plain = sum(kept_by_layer(config, z, recomputed, kind, device).values())
    dense = sum(n for one, n in list_layer_kinds(get_structure(config), here) if not one.routed)
    less = 0 if recompute == "full" or not config.experts else dense * (layer - plain)
    # Plain scores add the mask without keeping it.
    masked = kind == "fused" and recompute != "full" and "attention" not in recomputed
    windowed = sum(config.get_window(layer) is not None for layer in here.layer_indices)
    masks = z.mask * windowed if masked else 0
    working = {moment: size - shared for moment, size in backward.items()}
    last = here.has_head
    # The output: as it is, reordered by rank, and received.
    forward = 2 * z.gathered_stream + z.reordered_stream + z.stream
    return Activations(
        layer=layer,
        layers=here.layers,
        in_flight=in_flight,
        all_layers=round((layer * here.layers - less + masks) * in_flight),
        head=kept_by_norm(config, z, device) if last else 0,
        logits=z.logits_fp32 + (4 if tp == 1 else 0) if last else 0,
        loss=(2 * z.logits_fp32 if tp == 1 else z.logits_fp32 * z.element // 4) if last else 0,
        stream=z.stream,
        last_norm=_norm_backward(config, z, device, last) if last else 0,
        # Embedding: an index and a bit per token. Loss: the same, the sum and the target's logit.
        rows=batch * seq * (9 * here.has_embedding + 17 * last) if tp > 1 else 0,
        gathered_stream=z.gathered_stream,
        reordered_stream=z.reordered_stream,
        input_grad=z.input_grad,
        forward=forward + (z.ffn_inner if recompute == "full" else 0),
        working=working,
    )


def count_tokens(seq: int, layout: Layout) -> int:
    """Return the tokens of each sequence on a rank, of its context and tensor group.

    Raises ValueError for no tokens, and if the degrees do not divide them.
    """
    check_integer(seq=seq)
    if seq % layout.cp:
        raise ValueError(f"cp={layout.cp}: must divide seq={seq}")
    seq //= layout.cp
    if layout.sequence_parallel and seq % layout.tp:
        raise ValueError(f"tp={layout.tp}: must divide seq={seq} with sequence_parallel")
    return seq


def count_in_flight(layout: Layout, stage: int = 0) -> float:
    """Return the number of micro-batches, each of all layers of `stage`, kept at once.

    1F1B: p - k on stage k, or all m if fewer. Interleaved, counted in chunks, of which a stage has
    v: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2, and Korthikanti et al. 2022, section
    4.2.3. Zero-bubble (Qi et al. 2023, arXiv 2401.10241): inputs of the W passes stay until these
    run; for "zb-v" an upper bound, which few micro-batches do not reach.
    """
    pp, m, schedule, chunks = layout.pp, layout.microbatches, layout.schedule, layout.chunks
    if pp == 1 or schedule == "naive":
        return 1
    if schedule == "interleaved":  # in groups of p micro-batches, or of a few more
        group = ceil_div(m, max(1, m // pp))
        ahead = 2 * (pp - 1 - stage) + (chunks - 1) * group
        return min(ahead + 1, chunks * m) / chunks
    most = {"gpipe": m, "zb-h1": pp, "zb-h2": 2 * pp - 1, "zb-v": pp}.get(schedule, pp - stage)
    return min(most, m)


def count_deferred(layout: Layout, stage: int) -> int:
    """Return how many of those `in_flight` have only their W pass left.

    They no longer need attention's scores: Qi et al. 2023, section 2.3.
    """
    behind = layout.pp - stage
    ahead = {"zb-h1": behind, "zb-h2": 2 * behind - 1}.get(layout.schedule)
    if layout.pp == 1 or ahead is None:
        return 0
    return int(count_in_flight(layout, stage)) - min(ahead, layout.microbatches)


# Tensors that a layer with experts keeps for its backward if choices are even: E experts of width
# F, k of them per token, bs tokens, e bytes per element; other letters as in `core`:
#
#     router       scores bsE in float32; the expert number and the weight of each choice
#     rows         inputs and outputs of each chosen expert: 2kbshe
#     experts      their wide tensors, as in a feed-forward network, k times
#     shared       the same once, for the shared experts' joint width
#
# Over c expert-parallel ranks, E/c experts are on each rank, with as many rows as before: as many
# rows leave a rank as arrive.


def kept_by_experts(config: Config, z: TensorSizes, recomputed: bool) -> int:
    """Return the bytes that a layer's router and experts keep.

    Without shared experts, only a token's chosen experts keep its tensors.
    """
    tokens = z.token_floats // FLOAT32_BYTES
    choices = tokens * config.experts_per_token
    scores = tokens * config.experts * FLOAT32_BYTES
    # Expert numbers; the positions of each expert's rows in batch, sequence and choices.
    places = choices * (1 + 3) * INT64_BYTES
    # Chosen scores and their sum; their quotient in the rows' dtype.
    weights = choices * FLOAT32_BYTES + tokens * FLOAT32_BYTES + choices * z.element
    rows = 2 * config.experts_per_token * z.stream  # inputs and outputs of a token's experts
    inner = count_wide_tensors(config, recomputed) * z.experts_inner
    return scores + places + weights + rows + inner


def backward_of_experts(config: Config, z: TensorSizes, tp: int) -> int:
    """Return the bytes that backward adds at one expert: gradients of rows and wide tensors."""
    tokens = z.row_stats_per_head // FLOAT32_BYTES
    rows = ceil_div(tokens * config.experts_per_token, config.experts)
    inside = (3 if config.mlp == "swiglu" else 2) * rows * config.expert_width // tp
    return (2 * rows * config.hidden + inside) * z.element
