"""Activations of the course's own model: what autograd keeps between forward and backward.

Counted tensor by tensor from `shardlab.model`, in the dtypes that it really has. Sizes in
bytes for one micro-batch on one rank: b sequences of s tokens, h hidden, a heads, K key-value heads
of size D, F width of the feed-forward network, V vocabulary, t tensor degree, e bytes an element.

    kept by              bytes
    norm (layer)         input and output 2bshe, mean and deviation
    norm (rms)           on a CPU input and normalised input in float32 8bsh, output bshe
    attention, fused     queries, keys, values (bshe + 2bsKDe) / t, output 2bshe / t, a number a row
    attention, plain     the same in float32, and its a * s * s scores
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

from shardlab.shapes import Config

from .counting import check_cut
from .published import RECOMPUTE
from .recipes import PRECISIONS
from .units import one_of, whole

ATTENTION = "fused", "plain"
DEVICES = "cpu", "gpu"


@dataclass(frozen=True)
class Activations:
    """Bytes on one rank, beside its model states."""

    layer: int  # kept by one layer for one micro-batch
    layers: int  # on this rank
    in_flight: int  # micro-batches kept at once
    head: int  # the last norm and the input of the output layer
    logits: int  # kept by the loss: log-softmax in float32
    loss: int  # beside what is kept: two more such tensors; where the vocabulary is cut, the logits
    stream: int  # one tensor of the residual stream
    last_norm: int  # held in backward of the last norm
    rows: int  # where tokens stand in this rank's part of the vocabulary, and a sum of each
    edge: int  # what sequence parallelism gathers at an edge of a cut part; 0 without
    order: int  # the same in the order of the ranks, where there are several sequences
    sent: int  # held in backward where a cut part begins; 0 without tensor parallelism
    forward: int  # what the end of the last layer's forward pass needs there, beside what is kept
    working: dict[str, int]  # what backward of a layer adds to what it keeps, at its moments

    @property
    def saved(self) -> int:
        """Kept at the end of the forward pass (and, on a first stage, when most are in flight)."""
        return self.layer * self.layers * self.in_flight + self.head + self.logits + self.rows

    @property
    def total(self) -> int:
        """Kept, and what is computed with it: the loss's temporaries, or those of one layer."""
        return self.saved + max(self.loss, *self.working.values())


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
    heads_fp32: int  # queries in float32
    scores: int  # a * s * s of them, in float32
    rows: int  # a float32 for each query and head
    rows_of_a_head: int
    wide: int  # the feed-forward network's inner tensor
    tables: int  # cosines and sines
    logits_fp32: int
    element: int


def sizes(config: Config, batch: int, seq: int, element: int, tp: int, sequence: bool) -> Sizes:
    """Sizes for `element` bytes an element; `sequence`: the stream is cut along the sequence."""
    b_s, h = batch * seq, config.hidden
    tokens = -(-b_s // (tp if sequence else 1))
    stream, edge = tokens * h * element, b_s * h * element if sequence and tp > 1 else 0
    return Sizes(
        stream=stream,
        stream_fp32=tokens * h * 4,
        tokens=tokens * 4,
        edge=edge,
        order=edge if batch > 1 else 0,
        sent=(3 * edge or stream) if tp > 1 else 0,
        query=b_s * h * element // tp,
        key=b_s * config.key_value_heads * config.head_size * element // tp,
        heads_fp32=b_s * h * 4 // tp,
        scores=batch * config.heads * seq * seq * 4 // tp,
        rows=b_s * config.heads * 4 // tp,
        rows_of_a_head=b_s * 4,
        wide=b_s * config.ffn_width * element // tp,
        tables=4 * seq * (config.head_size // 2) * element,
        logits_fp32=b_s * -(-config.vocab // tp) * 4,
        element=element,
    )


def _norm(config: Config, z: Sizes, device: str) -> int:
    """Kept by one norm; its output is kept by what follows, but counted here."""
    if config.norm == "layer":
        # Mean and deviation, in float32 on a GPU and in the input's dtype on a CPU.
        numbers = 2 * z.tokens * (4 if device == "gpu" else z.element) // 4
        return 2 * z.stream + numbers
    if device == "gpu":  # one fused kernel
        return 2 * z.stream + z.tokens
    return 2 * z.stream_fp32 + z.tokens + z.stream  # input and normalised input in float32


def _attention(config: Config, z: Sizes, recompute: str, plain: bool, device: str) -> int:
    """Kept from the projections to the input of the output projection."""
    inputs = z.query + 2 * z.key
    if recompute == "selective":
        return inputs + z.tables + z.query  # the core's inputs, and its output for `out`
    if not plain:
        # A CPU's kernel puts out heads before tokens: `out` keeps a copy in the other order.
        copied = device == "cpu" and z.rows > z.rows_of_a_head
        return inputs + z.tables + (2 if copied else 1) * z.query + z.rows
    kept = 3 * z.heads_fp32 + z.scores + z.query  # keys and values repeated for every head
    if config.dropout:
        mask = z.scores // 4 if device == "gpu" else z.scores
        kept += mask + z.scores
    return kept + z.tables


def _dropout(config: Config, z: Sizes, device: str) -> int:
    if not config.dropout:
        return 0
    return z.stream // z.element if device == "gpu" else z.stream


def _ffn(config: Config, z: Sizes) -> int:
    return (4 if config.mlp == "swiglu" else 2) * z.wide


def is_plain(config: Config, attention: str, device: str) -> bool:
    """Whether scores are kept: asked for, or because a CPU has no fused kernel with dropout."""
    return attention == "plain" or (device == "cpu" and config.dropout > 0)


def layer_parts(
    config: Config, z: Sizes, recompute: str, attention: str, device: str
) -> dict[str, int]:
    """What one layer keeps, by part, as if `recompute` were not "full"."""
    plain = is_plain(config, attention, device)
    return {
        "attention_norm": _norm(config, z, device),
        "attention": _attention(config, z, recompute, plain, device),
        "attention_dropout": _dropout(config, z, device),
        "ffn_norm": _norm(config, z, device),
        "ffn": _ffn(config, z),
        "ffn_dropout": _dropout(config, z, device),
    }


def _norm_backward(config: Config, z: Sizes, device: str, last: bool = False) -> int:
    """Held in backward of a norm: its input, the gradients after and before it, temporaries."""
    if config.norm == "rms" and device == "cpu":  # in float32, step by step
        return (6 if last or z.element < 4 else 5) * z.stream_fp32
    return 3 * z.stream


def _backward(
    config: Config, z: Sizes, parts: dict[str, int], plain: bool, device: str
) -> dict[str, int]:
    """Held in backward of one layer at its fullest moments, without the gradients of weights.

    parts: what it keeps when its backward begins. "ffn": the inner gradients of the feed-forward
    network. "norm": its norm; on a CPU an RMSNorm makes four or five tensors in float32.
    "attention": its core; plain scores stand there two to four times. "end": the first norm.
    Where a cut part ends, sequence parallelism gathers a gradient; where it begins, the gradients
    of all layers there are held while that of their input is on its way.
    """
    kept = sum(parts.values()) - parts["ffn_dropout"]
    down = (2 if config.dropout else 1) * z.stream + z.wide + z.edge
    inside = (2 if config.mlp == "swiglu" else 1) * z.wide
    first = parts["attention_norm"] + parts["attention_dropout"]
    begins = z.sent + z.order - parts["ffn"]
    moments = {"ffn": kept + max(down, z.stream + inside + max(0, begins))}
    moments["ffn"] = max(moments["ffn"], kept + z.stream + z.edge + z.order)
    norm = _norm_backward(config, z, device)
    begun = first + parts["attention"] + z.stream
    moments["norm"] = begun + max(norm, z.sent and parts["ffn_norm"] + inside + z.sent)
    attention = 2 * (z.query + z.key)  # gradients of output, queries, keys, values
    if plain:
        attention = z.scores + (2 * z.heads_fp32 if config.dropout else z.scores)
    again = parts["attention_norm"] + _attention(config, z, "none", plain, device) - z.query
    inside = first + z.stream + z.query + 2 * z.key + z.sent
    moments["attention"] = max(
        again + z.stream + attention, begun + z.edge + z.order, inside + z.order
    )
    moments["end"] = max(2 * z.stream + norm, inside if z.sent else 0)
    return moments


def activations(
    config: Config,
    batch: int = 1,
    seq: int | None = None,
    precision: str = "bf16",
    tp: int = 1,
    pp: int = 1,
    stage: int | None = None,
    sequence_parallel: bool = False,
    recompute: str = "none",
    attention: str = "fused",
    microbatches: int | None = None,
    device: str = "cpu",
) -> Activations:
    """Activations on one rank, for `batch` sequences of `seq` tokens in each micro-batch.

    seq: by default the model's longest. stage: of `pp`, from 0; None: the last, which has the loss.
    Under 1F1B stage i keeps min(pp - i, microbatches) micro-batches; microbatches None: pp or more.
    recompute: "selective" computes attention's core again in backward (what lies between queries,
    keys, values and the output projection), "full" each whole layer. attention: "fused" keeps no
    scores, "plain" all of them. device: whose kernels; a CPU has no fused RMSNorm and no fused
    attention with dropout, and needs more.

    Raises ValueError for sizes below 1, unknown names, degrees that do not divide the shape, and
    tokens that sequence parallelism cannot share out.
    """
    check_cut(config, tp, pp, stage)
    seq = config.seq if seq is None else whole("seq", seq)
    batch = whole("batch", batch)
    one_of("recompute", recompute, RECOMPUTE)
    one_of("attention", attention, ATTENTION)
    one_of("device", device, DEVICES)
    one_of("precision", precision, PRECISIONS)
    one_of("sequence_parallel", sequence_parallel, (False, True))
    if sequence_parallel and seq % tp:
        raise ValueError(f"tp={tp}: allowed with sequence_parallel are divisors of seq={seq}")
    stage = pp - 1 if stage is None else stage
    in_flight = pp - stage
    if microbatches is not None:
        in_flight = min(in_flight, whole("microbatches", microbatches))
    z = sizes(config, batch, seq, PRECISIONS[precision].compute, tp, sequence_parallel)
    # Full recomputation keeps a layer's input; backward computes the rest again, all of it.
    parts = layer_parts(config, z, recompute, attention, device)
    backward = _backward(config, z, parts, is_plain(config, attention, device), device)
    layer = shared = sum(parts.values())
    if recompute == "full":
        upcast = config.norm == "rms" and device == "cpu" and z.element < 4
        layer, shared = z.stream, 0 if upcast else z.stream  # the norm keeps it too, or a copy
    working = {moment: size - shared for moment, size in backward.items()}
    last = stage == pp - 1
    return Activations(
        layer=layer,
        layers=config.layers // pp,
        in_flight=in_flight,
        head=_norm(config, z, device) if last else 0,
        logits=z.logits_fp32 + (4 if tp == 1 else 0) if last else 0,
        loss=(2 * z.logits_fp32 if tp == 1 else z.logits_fp32 * z.element // 4) if last else 0,
        stream=z.stream,
        last_norm=_norm_backward(config, z, device, last) if last else 0,
        # The embedding: a number and a bit. The loss: the same, the sum and the target's logit.
        rows=batch * seq * (9 * (stage == 0) + 17 * last) if tp > 1 else 0,
        edge=z.edge,
        order=z.order,
        sent=z.sent,
        # What leaves: as it is, in the order of the ranks, and received.
        forward=2 * z.edge + z.order + z.stream + (z.wide if recompute == "full" else 0),
        working=working,
    )
